#pragma once

#include "kernels.h"
#include "pool.h"

// The sum, modulo 2^32, of the 32-bit words of `num_bytes` (a multiple of 256), read by all threads in equal shares.
uint32_t stream_memory(const Kernels& kernels, Pool& pool, const void* memory, int64_t num_bytes);
