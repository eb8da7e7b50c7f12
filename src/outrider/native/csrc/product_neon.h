// Products on 64-bit ARM, for three generations of it; which one is meant follows from the compiler's flags.
//
//   base      bfloat16 widened to float32, fused multiply-add; int8 widened to int16
//   DOTPROD   int8 by SDOT
//   BF16+I8MM two rows and more by the matrix instructions BFMMLA and SMMLA, a single row by BFDOT and SDOT
//
// A vector of 16 bytes holds one word (two bfloat16 or four int8 neighbours along the inputs) of each of four outputs.
// Integer sums are exact. BFMMLA is defined as two BFDOT, one after the other, on the same sum (with FPCR.EBF clear, see
// pool.cpp): a row's bits do not depend on which of the two computes it.
#pragma once

#include <arm_neon.h>

#include "int4_portable.h"
#include "product.h"
#include "vec.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define OUTRIDER_NEON_MATRICES 1
#endif

namespace {

void begin_thread() {}
void end_thread() {}

INLINE uint32x4_t load_four(const uint8_t* from) { return vreinterpretq_u32_u8(vld1q_u8(from)); }

struct Bf16 {
    typedef float32x4_t Sum;
    static INLINE Sum zero() { return vdupq_n_f32(0.0f); }
    static INLINE void save(float* to, Sum sum) { vst1q_f32(to, sum); }

    // sum += word LANE of x times the words of four outputs.
    template <int LANE>
    static INLINE Sum multiply(Sum sum, uint32x4_t w, uint32x4_t x) {
#if defined(OUTRIDER_NEON_MATRICES)
        return vbfdotq_laneq_f32(sum, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(x), LANE);
#else
        const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
        const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(x, 16)), odd = vreinterpretq_f32_u32(vandq_u32(x, upper));
        sum = vfmaq_laneq_f32(sum, vreinterpretq_f32_u32(vshlq_n_u32(w, 16)), even, LANE);
        return vfmaq_laneq_f32(sum, vreinterpretq_f32_u32(vandq_u32(w, upper)), odd, LANE);
#endif
    }
#if defined(OUTRIDER_NEON_MATRICES)
    // sum (2 rows x 2 outputs) += two words of two rows times those of two outputs.
    static INLINE Sum multiply_pairs(Sum sum, uint32x4_t x, uint32x4_t w) {
        return vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(x), vreinterpretq_bf16_u32(w));
    }
#endif
};

// Values lie within -127..127, so that a sum of two products fits into 16 bits.
struct Int8 {
    typedef int32x4_t Sum;
    static INLINE Sum zero() { return vdupq_n_s32(0); }
    static INLINE void save(float* to, Sum sum) { vst1q_s32((int32_t*)to, sum); }

    template <int LANE>
    static INLINE Sum multiply(Sum sum, uint32x4_t w, uint32x4_t x) {
        const int8x16_t levels = vreinterpretq_s8_u32(w);
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_laneq_s32(sum, levels, vreinterpretq_s8_u32(x), LANE);
#else
        const int8x16_t word = vreinterpretq_s8_u32(vdupq_laneq_u32(x, LANE));
        const int16x8_t low = vmull_s8(vget_low_s8(levels), vget_low_s8(word)), high = vmull_high_s8(levels, word);
        return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
    }
#if defined(OUTRIDER_NEON_MATRICES)
    static INLINE Sum multiply_pairs(Sum sum, uint32x4_t x, uint32x4_t w) {
        return vmmlaq_s32(sum, vreinterpretq_s8_u32(x), vreinterpretq_s8_u32(w));
    }
#endif
};

// Some rows times some outputs: one tile of 16, or both.
struct Part {
    const Product& p;
    const uint8_t* a;
    const uint8_t* b;
    float* c;
    bool fetches;

    INLINE void fetch(int step) const {
        if (!fetches) return;
        const uint8_t* next = (step < p.turn ? p.ahead : p.ahead_after) + step * p.ahead_step;
        for (int64_t i = 0; i < p.ahead_step; i += 64) __builtin_prefetch(next + i, 0, 3);
    }
    // The word `k` of outputs 4v..4v + 3 in the step that begins at `from`.
    INLINE uint32x4_t weights(const uint8_t* from, int k, int v) const {
        return load_four(from + v / 4 * p.b_tile + k * 64 + v % 4 * 16);
    }
};

template <class Kind, int LANE, int ROWS, int VECTORS>
INLINE void add_word(const Part& part, const uint8_t* b, int k, const uint32x4_t (&x)[ROWS],
                     typename Kind::Sum (&sum)[ROWS][VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        const uint32x4_t w = part.weights(b, k + LANE, v);
        for (int r = 0; r < ROWS; r++) sum[r][v] = Kind::template multiply<LANE>(sum[r][v], w, x[r]);
    }
}

// ROWS x VECTORS sums, at most 16 so that they stay in registers beside weights and operand.
template <class Kind, int ROWS, int VECTORS>
void rows_of(const Part& part) {
    const Product& p = part.p;
    typename Kind::Sum sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Kind::zero();
    const uint8_t *a = part.a, *b = part.b;
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        part.fetch(s);
        for (int k = 0; k < 16; k += 4) {
            uint32x4_t x[ROWS];
            for (int r = 0; r < ROWS; r++) x[r] = load_four(a + r * 64 + k * 4);
            add_word<Kind, 0, ROWS, VECTORS>(part, b, k, x, sum);
            add_word<Kind, 1, ROWS, VECTORS>(part, b, k, x, sum);
            add_word<Kind, 2, ROWS, VECTORS>(part, b, k, x, sum);
            add_word<Kind, 3, ROWS, VECTORS>(part, b, k, x, sum);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) Kind::save(part.c + r * p.c_stride + v * 4, sum[r][v]);
}

#if defined(OUTRIDER_NEON_MATRICES)

INLINE uint32x4_t join_low(uint32x4_t a, uint32x4_t b) { return vcombine_u32(vget_low_u32(a), vget_low_u32(b)); }
INLINE uint32x4_t join_high(uint32x4_t a, uint32x4_t b) { return vcombine_u32(vget_high_u32(a), vget_high_u32(b)); }

// PAIRS of rows: sum [pair][2v] holds outputs 4v and 4v + 1 of the first row, then of the second; [2v + 1] the next two.
template <class Kind, int PAIRS, int VECTORS>
void pairs_of(const Part& part) {
    const Product& p = part.p;
    typename Kind::Sum sum[PAIRS][2 * VECTORS];
    for (int r = 0; r < PAIRS; r++)
        for (int v = 0; v < 2 * VECTORS; v++) sum[r][v] = Kind::zero();
    const uint8_t *a = part.a, *b = part.b;
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        part.fetch(s);
        for (int k = 0; k < 16; k += 2) {
            uint32x4_t x[PAIRS];
            for (int r = 0; r < PAIRS; r++) {
                const uint8_t* row = a + r * 128 + k * 4;
                x[r] = vreinterpretq_u32_u8(vcombine_u8(vld1_u8(row), vld1_u8(row + 64)));
            }
            for (int v = 0; v < VECTORS; v++) {
                const uint32x4_t first = part.weights(b, k, v), second = part.weights(b, k + 1, v);
                const uint32x4_t low = vzip1q_u32(first, second), high = vzip2q_u32(first, second);
                for (int r = 0; r < PAIRS; r++) {
                    sum[r][2 * v] = Kind::multiply_pairs(sum[r][2 * v], x[r], low);
                    sum[r][2 * v + 1] = Kind::multiply_pairs(sum[r][2 * v + 1], x[r], high);
                }
            }
        }
    }
    for (int r = 0; r < PAIRS; r++)
        for (int v = 0; v < VECTORS; v++) {
            const uint32x4_t low = (uint32x4_t)sum[r][2 * v], high = (uint32x4_t)sum[r][2 * v + 1];
            float* c = part.c + 2 * r * p.c_stride + v * 4;
            vst1q_u32((uint32_t*)c, join_low(low, high));
            vst1q_u32((uint32_t*)(c + p.c_stride), join_high(low, high));
        }
}

// An odd last row is computed together with the padding behind it.
template <class Kind>
INLINE void two_rows(const Part& part) { pairs_of<Kind, 1, 8>(part); }
template <class Kind>
INLINE void up_to_four_rows(const Part& part, int) { pairs_of<Kind, 2, 4>(part); }

#else

template <class Kind>
INLINE void two_rows(const Part& part) { rows_of<Kind, 2, 8>(part); }
template <class Kind>
INLINE void up_to_four_rows(const Part& part, int num_rows) {
    num_rows == 3 ? rows_of<Kind, 3, 4>(part) : rows_of<Kind, 4, 4>(part);
}

#endif

template <class Kind>
INLINE void product(const Product& p) {
    for (int row = 0; row < p.num_rows; row += 4) {
        const int rows = p.num_rows - row;
        const Part part{p, p.a + row * 64, p.b, (float*)p.c + row * p.c_stride, row == 0};
        if (rows == 1) {
            rows_of<Kind, 1, 8>(part);
        } else if (rows == 2) {
            two_rows<Kind>(part);
        } else {
            up_to_four_rows<Kind>(part, rows);
            up_to_four_rows<Kind>({p, part.a, p.b + p.b_tile, part.c + 16, false}, rows);
        }
    }
}

void product_bf16(const Product& p) { product<Bf16>(p); }
void product_int8(const Product& p) { product<Int8>(p); }

}  // namespace
