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

// What top_k or top_p leaves of each of some rows, by a cut of its own: counts as cut_head returns them, and count + 1 values
// and ids, where `count` is that of all cuts.
OUTRIDER_EXPORT void outrider_cut(const void* kernels, const float* logits, int64_t stride, int32_t num_rows, int32_t size,
                                  const HeadCut* cuts, float* values, int32_t* ids, int32_t* counts) {
    for (int row = 0; row < num_rows; row++) {
        const int64_t place = (int64_t)row * (cuts[row].count + 1);
        counts[row] =
            ((const Kernels*)kernels)->cut_head(logits + row * stride, size, cuts[row], values + place, ids + place);
    }
}

// As outrider_draw, among what top_k or top_p leaves of each row.
OUTRIDER_EXPORT void outrider_draw_heads(const void* kernels, const float* logits, int64_t stride, int32_t num_rows,
                                         int32_t size, const HeadCut* cuts, const uint64_t* keys, int32_t* ids,
                                         int32_t* counts) {
    for (int row = 0; row < num_rows; row++)
        counts[row] = ((const Kernels*)kernels)
                          ->draw_head(logits + row * stride, size, cuts[row], keys[row], ids + (int64_t)row * MOST_DRAWN);
}
