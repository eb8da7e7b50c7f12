#if defined(__aarch64__)
#include "product_neon.h"
#include "kernels_table.h"

OUTRIDER_KERNELS(neon_bf16)
#endif
