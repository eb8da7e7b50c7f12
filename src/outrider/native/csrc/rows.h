// Arithmetic on single rows: norm, quantisation, rotary embedding, gated activation, softmax.
#pragma once

#include "vec.h"
#include "work.h"

namespace {

// y = x / sqrt(mean(x^2) + eps) * weight. `padded` is a multiple of 16, both tails are zero.
void norm_row(const float* x, const float* weight, int width, int padded, float eps, float* y) {
    F16 squares{};
    for (int i = 0; i < padded; i += LANES) {
        F16 v = load(x + i);
        squares = multiply_add(v, v, squares);
    }
    float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps);
    for (int i = 0; i < padded; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

// Writes a row of `width` values (a multiple of 64) into operand tiles, one step every `step` bytes.
void put_row_bf16(const float* y, int width, uint8_t* tiles, int64_t step) {
    for (int i = 0; i < width; i += 32, tiles += step) {
        store_bf16(tiles, load(y + i));
        store_bf16(tiles + 32, load(y + i + LANES));
    }
}

// Symmetric int8; returns the scale, which depends on this row alone.
float put_row_int8(const float* y, int width, uint8_t* tiles, int64_t step) {
    F16 most{};
    for (int i = 0; i < width; i += LANES) most = maximum(most, absolute(load(y + i)));
    float largest = max_lanes(most);
    float scale = (largest > 1e-12f ? largest : 1e-12f) / 127.0f;
    float inverse = 1.0f / scale;
    for (int i = 0; i < width; i += 64, tiles += step)
        for (int j = 0; j < 64; j += LANES) store_int8(tiles + j, load(y + i + j) * inverse);
    return scale;
}

// Integer sums to float32, in place: sum * output scale * row scale.
void scale_sums(void* c, int num_rows, const float* scales, const float* row_scales) {
    const F16 low = load(scales), high = load(scales + LANES);
    for (int r = 0; r < num_rows; r++) {
        float* row = (float*)c + r * BLOCK;
        I16 sums[2];
        __builtin_memcpy(sums, row, sizeof sums);
        store(row, __builtin_convertvector(sums[0], F16) * low * row_scales[r]);
        store(row + LANES, __builtin_convertvector(sums[1], F16) * high * row_scales[r]);
    }
}

INLINE F16 silu(F16 x) { return x / (1.0f + exponential(-x)); }

// Rotates 16 pairs (dimension p, dimension p + half) and returns them as bfloat16 pairs.
INLINE U16 rotated_pairs(const float* low_high, const float* cosines, const float* sines) {
    F16 low = load(low_high), high = load(low_high + LANES), c = load(cosines), s = load(sines);
    return bf16_pairs(multiply_add(-high, s, low * c), multiply_add(low, s, high * c));
}

// Softmax weights of one row over one chunk, before division by their sum.
//
// scores: `num_keys` values (a multiple of 32) of which the first `visible` count. Weights go to `tiles` as bfloat16,
// a step every KiB. Returns maximum and sum; hidden keys weigh exactly 0.
struct Extent {
    float maximum, sum;
};
Extent soften_row(const float* scores, float scale, int num_keys, int visible, uint8_t* tiles) {
    const float lowest = -__builtin_inff();
    if (visible <= 0) {
        for (int k = 0; k < num_keys; k += KEY_BLOCK, tiles += TILE_BYTES) __builtin_memset(tiles, 0, STEP_BYTES);
        return {lowest, 0.0f};
    }
    if (visible > num_keys) visible = num_keys;
    F16 most = splat(lowest);
    for (int k = 0; k < visible; k += LANES)
        most = maximum(most, select(lanes() + k < visible, load(scores + k) * scale, splat(lowest)));
    const float top = max_lanes(most);
    F16 sums{};
    for (int k = 0; k < num_keys; k += KEY_BLOCK, tiles += TILE_BYTES)
        for (int half = 0; half < 2; half++) {
            const int at = k + half * LANES;
            F16 weight = exponential(load(scores + at) * scale - top);
            weight = select(lanes() + at < visible, weight, F16{});
            sums += weight;
            store_bf16(tiles + half * 32, weight);
        }
    return {top, sum_lanes(sums)};
}

// state <- state with one more chunk, in the order of the chunks. A state is [width] mixed values, maximum, sum.
void merge_chunk(float* state, const float* mixed, Extent extent, int width) {
    float& top = state[width];
    float& sum = state[width + 1];
    if (extent.maximum == -__builtin_inff()) return;
    if (sum == 0.0f) {
        for (int i = 0; i < width; i += LANES) store(state + i, load(mixed + i));
        top = extent.maximum;
        sum = extent.sum;
        return;
    }
    const float next = extent.maximum > top ? extent.maximum : top;
    F16 factors = exponential(F16{top - next, extent.maximum - next});
    const float old_factor = factors[0], new_factor = factors[1];
    for (int i = 0; i < width; i += LANES) store(state + i, multiply_add(load(mixed + i), splat(new_factor), load(state + i) * old_factor));
    top = next;
    sum = sum * old_factor + extent.sum * new_factor;
}

}  // namespace
