// Arithmetic on single rows: norm, quantisation, rotary embedding, gated activation, softmax.
#pragma once

#include "vec.h"
#include "work.h"

namespace {

// Folds a row, `width` values (a multiple of 16), four vectors at a time: `next(folded, v)` waits for the last of its own
// kind only.
template <class Next, class Join>
INLINE F16 fold_row(const float* y, int width, const Next& next, const Join& join) {
    F16 a{}, b{}, c{}, d{};
    int i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        a = next(a, load(y + i));
        b = next(b, load(y + i + LANES));
        c = next(c, load(y + i + 2 * LANES));
        d = next(d, load(y + i + 3 * LANES));
    }
    for (; i < width; i += LANES) a = next(a, load(y + i));
    return join(join(a, b), join(c, d));
}

// y = x / sqrt(mean(x^2) + eps) * weight. `padded` is a multiple of 16, both tails are zero.
void norm_row(const float* x, const float* weight, int width, int padded, float eps, float* y) {
    const F16 squares = fold_row(
        x, padded, [](F16 sum, F16 v) { return multiply_add(v, v, sum); }, [](F16 p, F16 q) { return p + q; });
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

INLINE float largest_of(const float* y, int width) {
    const F16 most = fold_row(y, width, [](F16 m, F16 v) { return maximum(m, absolute(v)); }, maximum);
    const float largest = max_lanes(most);
    return largest > 1e-30f ? largest : 1e-30f;
}

// Symmetric int8; returns the scale, which depends on this row alone.
float put_row_int8(const float* y, int width, uint8_t* tiles, int64_t step) {
    const float scale = largest_of(y, width) / 127.0f, inverse = 1.0f / scale;
    for (int i = 0; i < width; i += 64, tiles += step, y += 64)
        store_int8(tiles, load(y) * inverse, load(y + LANES) * inverse, load(y + 2 * LANES) * inverse,
                   load(y + 3 * LANES) * inverse);
    return scale;
}

// As two int8 rows, levels and what rounding left of them: y = (coarse + fine / FINE) * scale. For the gated product,
// whose outliers cost too much accuracy in one.
constexpr float FINE = 254.0f;
float put_row_split(const float* y, int width, uint8_t* coarse, uint8_t* fine, int64_t step) {
    const float scale = largest_of(y, width) / 127.0f, inverse = 1.0f / scale;
    for (int i = 0; i < width; i += 64, coarse += step, fine += step) {
        F16 level[4], rest[4];
        for (int j = 0; j < 4; j++) {
            const F16 exact = load(y + i + j * LANES) * inverse;
            level[j] = (exact + 12582912.0f) - 12582912.0f;
            rest[j] = (exact - level[j]) * FINE;
        }
        store_int8(coarse, level[0], level[1], level[2], level[3]);
        store_int8(fine, rest[0], rest[1], rest[2], rest[3]);
    }
    return scale;
}

// Symmetric int8 with one scale for each group of inputs, the last of which may be short. A group leaves two factors: its
// scale, and that times the sum of its levels.
void put_row_groups(const float* y, int width, int group, uint8_t* tiles, int64_t step, float* factors) {
    for (int start = 0; start < width; start += group, factors += 2) {
        const int end = start + group < width ? start + group : width;
        const float scale = largest_of(y + start, end - start) / 127.0f, inverse = 1.0f / scale;
        F16 sum{};
        for (int i = start; i < end; i += LANES) {
            const F16 rounded = (load(y + i) * inverse + 12582912.0f) - 12582912.0f;
            sum += rounded;
            store_int8(tiles + i / 64 * step + i % 64, rounded);
        }
        factors[0] = scale;
        factors[1] = scale * sum_lanes(sum);
    }
}

INLINE F16 load_sums(const float* from) {
    I16 sums;
    __builtin_memcpy(&sums, from, sizeof sums);
    return __builtin_convertvector(sums, F16);
}

// Integer sums to float32, in place: sum * output scale * row scale.
void scale_sums(float* c, int num_rows, const float* scales, const float* row_scales) {
    const F16 low = load(scales), high = load(scales + LANES);
    for (int r = 0; r < num_rows; r++, c += BLOCK) {
        store(c, load_sums(c) * low * row_scales[r]);
        store(c + LANES, load_sums(c + LANES) * high * row_scales[r]);
    }
}

// The same for split rows: coarse sums in the first `num_rows` rows of c, fine ones in the next.
void scale_split_sums(float* c, int num_rows, const float* scales, const float* row_scales) {
    const F16 low = load(scales), high = load(scales + LANES);
    const float* fine = c + num_rows * BLOCK;
    for (int r = 0; r < num_rows; r++, c += BLOCK, fine += BLOCK) {
        store(c, multiply_add(load_sums(fine), splat(1.0f / FINE), load_sums(c)) * low * row_scales[r]);
        store(c + LANES,
              multiply_add(load_sums(fine + LANES), splat(1.0f / FINE), load_sums(c + LANES)) * high * row_scales[r]);
    }
}

// x / (1 + e^-x); below -83 the result is 0 to within 1e-34, and the power would overflow.
INLINE F16 silu(F16 x) {
    x = maximum(x, splat(-83.0f));
    return x * reciprocal(1.0f + power_of_two(x * -LOG2_E));
}

// Rotates 16 pairs (dimension p, dimension p + half) and returns them as bfloat16 pairs.
INLINE U16 rotated_pairs(const float* low_high, const float* cosines, const float* sines) {
    F16 low = load(low_high), high = load(low_high + LANES), c = load(cosines), s = load(sines);
    return bf16_pairs(multiply_add(-high, s, low * c), multiply_add(low, s, high * c));
}

// What softmax knows of a row's scores in one chunk: the largest, in powers of two (that is, times log2(e) and the score
// scale), and the sum of the weights relative to it.
struct Extent {
    float maximum, sum;
};

// Softmax weights of one row over one chunk, before division by their sum: 2^(score * scale - maximum).
//
// scores: `num_keys` values (a multiple of 32) of which the first `visible` count, at least one; hidden keys weigh
// exactly 0. Weights go to `tiles` as bfloat16, a step every `step` bytes. `scale` includes log2(e).
Extent soften_row(const float* scores, float scale, int num_keys, int visible, uint8_t* tiles, int64_t step) {
    const float lowest = -__builtin_inff();
    if (visible > num_keys) visible = num_keys;
    const int whole = visible / LANES * LANES;
    F16 most = splat(lowest);
    for (int k = 0; k < whole; k += LANES) most = maximum(most, load(scores + k));
    if (whole < visible) most = maximum(most, select(lanes() + whole < visible, load(scores + whole), splat(lowest)));
    const float top = max_lanes(most) * scale;
    F16 sums{};
    for (int k = 0; k < num_keys; k += LANES) {
        F16 weight{};
        if (k < visible) weight = power_of_two(multiply_add(load(scores + k), splat(scale), splat(-top)));
        if (k + LANES > visible) weight = select(lanes() + k < visible, weight, F16{});
        sums += weight;
        store_bf16(tiles + k / KEY_BLOCK * step + k % KEY_BLOCK * 2, weight);
    }
    return {top, sum_lanes(sums)};
}

// state <- state with one more chunk, in the order of the chunks. A state is [width] mixed values, maximum, sum; a sum of
// 0 means that it is empty (else it is at least 1).
void merge_chunk(float* state, const float* mixed, Extent extent, int width) {
    float& top = state[width];
    float& sum = state[width + 1];
    if (sum == 0.0f) {
        for (int i = 0; i < width; i += LANES) store(state + i, load(mixed + i));
        top = extent.maximum;
        sum = extent.sum;
        return;
    }
    const float next = extent.maximum > top ? extent.maximum : top;
    const F16 factors = power_of_two(F16{top - next, extent.maximum - next});
    const float old_factor = factors[0], new_factor = factors[1];
    for (int i = 0; i < width; i += LANES)
        store(state + i, multiply_add(load(mixed + i), splat(new_factor), load(state + i) * old_factor));
    top = next;
    sum = sum * old_factor + extent.sum * new_factor;
}

}  // namespace
