// Sixteen lanes of float32 on any processor: GCC and clang lower these vectors to whatever the target has.
//
// Included by one translation unit per instruction set, always inside an anonymous namespace, so that code compiled for a
// newer processor can never be linked into the path of an older one. For the same reason no std:: template is used here.
// The build forbids contraction of a * b + c: the same expression must give the same bits wherever it is inlined.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef int8_t B16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

INLINE F16 load(const float* from) {
    F16 v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}
INLINE void store(float* to, F16 v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE F16 splat(float value) { return F16{} + value; }
INLINE I16 lanes() { return I16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE F16 select(I16 mask, F16 a, F16 b) { return mask ? a : b; }
INLINE bool any_lane(I16 mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    uint64_t words[8], all = 0;
    __builtin_memcpy(words, &mask, sizeof words);
    for (int i = 0; i < 8; i++) all |= words[i];
    return all != 0;
#endif
}

INLINE F16 maximum(F16 a, F16 b) {
#if defined(__AVX512F__)
    return (F16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INLINE F16 minimum(F16 a, F16 b) {
#if defined(__AVX512F__)
    return (F16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
// a * b + c, in one rounding where the instruction set has it: always or never on one path.
INLINE F16 multiply_add(F16 a, F16 b, F16 c) {
#if defined(__AVX512F__)
    return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__aarch64__)
    float32x4_t x[4], y[4], sum[4];
    __builtin_memcpy(x, &a, sizeof x);
    __builtin_memcpy(y, &b, sizeof y);
    __builtin_memcpy(sum, &c, sizeof sum);
    for (int i = 0; i < 4; i++) sum[i] = vfmaq_f32(sum[i], x[i], y[i]);
    __builtin_memcpy(&c, sum, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}
INLINE F16 absolute(F16 a) { return (F16)((I16)a & 0x7fffffff); }

// Halves onto halves, in that order on every path.
INLINE float sum_lanes(F16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float t[LANES];
    store(t, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
#endif
}
INLINE float max_lanes(F16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float t[LANES];
    store(t, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
    return t[0];
#endif
}

// 1 / a to about 1 ulp, for a of ordinary size. A division takes as long as a dozen other instructions.
INLINE F16 reciprocal(F16 a) {
#if defined(__AVX512F__)
    const F16 near = (F16)_mm512_rcp14_ps((__m512)a);
    return multiply_add(near, multiply_add(-a, near, splat(1.0f)), near);
#else
    return 1.0f / a;
#endif
}
// True if any lane of a is greater than b.
INLINE bool any_above(F16 a, float b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(b), _CMP_GT_OQ) != 0;
#else
    return max_lanes(a) > b;
#endif
}

// bfloat16, rounded to nearest even, in the low half of each lane. Not for NaN: nothing here makes one from finite weights.
INLINE U16 to_bf16(F16 v) {
#if defined(__AVX512BF16__)
    return (U16)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    U16 bits = (U16)v;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
}
INLINE F16 from_bf16(const uint16_t* from) {
    H16 half;
    __builtin_memcpy(&half, from, sizeof half);
    return (F16)(__builtin_convertvector(half, U16) << 16);
}
// Lane i becomes the pair (low[i], high[i]).
INLINE U16 bf16_pairs(F16 low, F16 high) { return to_bf16(low) | (to_bf16(high) << 16); }

// 16 values as 16 consecutive bfloat16.
INLINE void store_bf16(void* to, F16 v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
    H16 half = __builtin_convertvector(to_bf16(v), H16);
#endif
    __builtin_memcpy(to, &half, sizeof half);
}
// 16 integers held as floats of size at most 127, as 16 consecutive int8. Adding 1.5 * 2^23 rounds to nearest even and
// leaves the integer in the low bits.
INLINE void store_int8(void* to, F16 v) {
    I16 level = (I16)(v + 12582912.0f) - 0x4b400000;
    B16 bytes = __builtin_convertvector(level, B16);
    __builtin_memcpy(to, &bytes, sizeof bytes);
}
// 64 of them.
INLINE void store_int8(uint8_t* to, F16 a, F16 b, F16 c, F16 d) {
#if defined(__AVX512BW__)
    const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)a), _mm512_cvtps_epi32((__m512)b));
    const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)c), _mm512_cvtps_epi32((__m512)d));
    // Packing works inside quarters: the four words of a quarter belong to a, b, c, d.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    __builtin_memcpy(to, &bytes, sizeof bytes);
#else
    store_int8(to, a);
    store_int8(to + LANES, b);
    store_int8(to + 2 * LANES, c);
    store_int8(to + 3 * LANES, d);
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

// 2^x to about 2 ulp for x <= 126; exactly 1 at 0; exactly 0 below -150.
//
// 2^x = 2^whole * 2^r with |r| <= 1/2; the polynomial is a minimax fit of 2^r with constant term 1 (error 1e-7).
INLINE F16 power_of_two(F16 x) {
#if defined(__AVX512F__)
    const F16 whole = (F16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = maximum(x, splat(-200.0f));
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const F16 shifted = x + 12582912.0f;
    const F16 whole = shifted - 12582912.0f;
#endif
    const F16 r = x - whole;
    F16 y = multiply_add(splat(0.00132647273f), r, splat(0.00967151299f));
    y = multiply_add(y, r, splat(0.0555073358f));
    y = multiply_add(y, r, splat(0.240222424f));
    y = multiply_add(y, r, splat(0.693147004f));
    y = multiply_add(y, r, splat(1.0f));
#if defined(__AVX512F__)
    return (F16)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    const I16 power = (I16)shifted - 0x4b400000;
    return select(power < -126, F16{}, (F16)((I16)y + (power << 23)));
#endif
}

}  // namespace
