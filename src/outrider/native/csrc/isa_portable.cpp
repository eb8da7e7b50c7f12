#include "product_portable.h"
#include "kernels_table.h"

OUTRIDER_KERNELS(portable)
