#if defined(__x86_64__)
#include "product_avx2.h"
#include "kernels_table.h"

OUTRIDER_KERNELS(avx2)
#endif
