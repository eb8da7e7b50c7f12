#if defined(__x86_64__)
#include "product_avx512.h"
#include "kernels_table.h"

OUTRIDER_KERNELS(avx512)
#endif
