#if defined(__x86_64__)
#include "product_amx.h"
#include "kernels_table.h"

OUTRIDER_KERNELS(amx)
#endif
