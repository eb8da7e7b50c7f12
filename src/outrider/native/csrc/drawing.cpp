// Draws as Python calls them. They need no threads and no context: only the kernels of an instruction set.

#include "abi.h"
#include "dispatch.h"

// Kernels of that name, for outrider_draw; null if they cannot run here.
OUTRIDER_EXPORT const void* outrider_find(const char* name) { return find_kernels(name); }

// For each of some rows, `stride` apart, the ids that may be the largest of logits + noise: at most MOST_DRAWN, or count -1.
OUTRIDER_EXPORT void outrider_draw(const void* kernels, const float* logits, int64_t stride, int32_t num_rows, int32_t size,
                                   const uint64_t* keys, int32_t* ids, int32_t* counts) {
    for (int row = 0; row < num_rows; row++)
        counts[row] = ((const Kernels*)kernels)
                          ->draw_candidates(logits + row * stride, size, keys[row], ids + (int64_t)row * MOST_DRAWN);
}

// Of each of some rows the `count` largest logits, their ids, and the logarithm of the sum of all exponentials, which is NaN for
// rows that are not to be had so.
OUTRIDER_EXPORT void outrider_largest(const void* kernels, const float* logits, int64_t stride, int32_t num_rows, int32_t size,
                                      int32_t count, float* values, int32_t* ids, double* log_sums) {
    const auto largest = ((const Kernels*)kernels)->largest_logits;
    for (int row = 0; row < num_rows; row++) {
        const int64_t place = (int64_t)row * count;
        if (!largest(logits + row * stride, size, count, values + place, ids + place, log_sums + row))
            log_sums[row] = __builtin_nan("");
    }
}
