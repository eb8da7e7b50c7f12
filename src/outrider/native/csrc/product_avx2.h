// Products with AVX2 and FMA: bfloat16 widened to float32, int8 multiplied as |a| x sign(w, a), which cannot saturate
// because quantised values stay within -127..127.
#pragma once

#include <immintrin.h>

#include "product.h"
#include "product_int4.h"

namespace {

void begin_thread() {}
void end_thread() {}

inline void fetch_ahead(const Product& p, int s) {
    const char* next = (const char*)(s < p.turn ? p.ahead : p.ahead_after) + s * p.ahead_step;
    for (int64_t i = 0; i < p.ahead_step; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
}

// One tile of 16 outputs at a time: ROWS x 2 sums fit into 16 registers beside weights and operand.
template <int ROWS>
void tile_bf16(const Product& p, const uint8_t* a, const uint8_t* b, float* c, bool fetch) {
    __m256 sum[ROWS][2];
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        if (fetch) fetch_ahead(p, s);
        for (int k = 0; k < 16; k++)
            for (int half = 0; half < 2; half++) {
                const __m256i pairs = _mm256_loadu_si256((const __m256i*)(b + k * 64 + half * 32));
                const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
                const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
                for (int r = 0; r < ROWS; r++) {
                    int32_t pair;
                    __builtin_memcpy(&pair, a + r * 64 + k * 4, 4);
                    const __m256i x = _mm256_set1_epi32(pair);
                    sum[r][half] = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), sum[r][half]);
                    sum[r][half] = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(x, upper)), sum[r][half]);
                }
            }
    }
    for (int r = 0; r < ROWS; r++, c += p.c_stride) {
        _mm256_storeu_ps(c, sum[r][0]);
        _mm256_storeu_ps(c + 8, sum[r][1]);
    }
}

template <int ROWS>
void tile_int8(const Product& p, const uint8_t* a, const uint8_t* b, float* c, bool fetch) {
    __m256i sum[ROWS][2];
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    const __m256i ones = _mm256_set1_epi16(1);
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        if (fetch) fetch_ahead(p, s);
        for (int k = 0; k < 16; k++)
            for (int r = 0; r < ROWS; r++) {
                int32_t quad;
                __builtin_memcpy(&quad, a + r * 64 + k * 4, 4);
                const __m256i x = _mm256_set1_epi32(quad), size = _mm256_abs_epi8(x);
                for (int half = 0; half < 2; half++) {
                    const __m256i w = _mm256_loadu_si256((const __m256i*)(b + k * 64 + half * 32));
                    const __m256i twos = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w, x));
                    sum[r][half] = _mm256_add_epi32(sum[r][half], _mm256_madd_epi16(twos, ones));
                }
            }
    }
    for (int r = 0; r < ROWS; r++, c += p.c_stride) {
        _mm256_storeu_si256((__m256i*)c, sum[r][0]);
        _mm256_storeu_si256((__m256i*)(c + 8), sum[r][1]);
    }
}

#define AVX2_PRODUCT(NAME, TILE_OF)                                                    \
    void NAME(const Product& p) {                                                      \
        for (int row = 0; row < p.num_rows; row += 4)                                  \
            for (int tile = 0; tile < 2; tile++) {                                     \
                const int rows = p.num_rows - row;                                     \
                const bool fetch = row == 0 && tile == 0;                              \
                const uint8_t *a = p.a + row * 64, *b = p.b + tile * p.b_tile;         \
                float* c = (float*)p.c + row * p.c_stride + tile * 16;                 \
                switch (rows) {                                                        \
                    case 1: TILE_OF<1>(p, a, b, c, fetch); break;                      \
                    case 2: TILE_OF<2>(p, a, b, c, fetch); break;                      \
                    case 3: TILE_OF<3>(p, a, b, c, fetch); break;                      \
                    default: TILE_OF<4>(p, a, b, c, fetch); break;                     \
                }                                                                      \
            }                                                                          \
    }

AVX2_PRODUCT(product_bf16, tile_bf16)
AVX2_PRODUCT(product_int8, tile_int8)

void begin_int4(int, int) {}
void end_int4(int, int) {}

// Half a tile: 8 outputs. The 16-bit sums of a part cannot overflow: 16 products of at most 15 * 127.
template <int PARTS, int ROWS>
void half_int4(const GroupProduct& p, const uint8_t* a, const float* factors, const uint8_t* b, const uint8_t* levels,
               float* c) {
    const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 total[ROWS];
    for (int r = 0; r < ROWS; r++) total[r] = _mm256_setzero_ps();
    for (int part = 0; part < p.num_parts; b += GROUP_SCALE_BYTES<PARTS>, factors += 2) {
        __m256i sum[ROWS];
        for (int r = 0; r < ROWS; r++) sum[r] = _mm256_setzero_si256();
        const int end = part + PARTS < p.num_parts ? part + PARTS : p.num_parts;
        for (; part < end; part++, levels += PART_BYTES) {
            const uint8_t* x = a + part / 2 * p.a_step + part % 2 * PART_INPUTS;
            __m256i twos[ROWS];
            for (int r = 0; r < ROWS; r++) twos[r] = _mm256_setzero_si256();
            for (int v = 0; v < 4; v++) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(levels + v * 64));
                const __m256i low = _mm256_and_si256(both, low_half);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
                for (int r = 0; r < ROWS; r++) {
                    int32_t first, second;
                    __builtin_memcpy(&first, x + r * 64 + v * 4, 4);
                    __builtin_memcpy(&second, x + r * 64 + 16 + v * 4, 4);
                    twos[r] = _mm256_add_epi16(twos[r], _mm256_maddubs_epi16(low, _mm256_set1_epi32(first)));
                    twos[r] = _mm256_add_epi16(twos[r], _mm256_maddubs_epi16(high, _mm256_set1_epi32(second)));
                }
            }
            for (int r = 0; r < ROWS; r++) sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(twos[r], ones));
        }
        const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)b));
        const __m256 m = PARTS == 1 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(b + 32)))
                                    : _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
        for (int r = 0; r < ROWS; r++) {
            const float* f = factors + r * p.factor_stride;
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[r]), d);
            total[r] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(f[0]), total[r]);
            total[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(f[1]), total[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) _mm256_storeu_ps(c + r * p.c_stride, total[r]);
}

template <int PARTS>
void rows_int4(const GroupProduct& p) {
    const int64_t levels_at = scale_bytes(p.num_parts, PARTS);
    for (int row = 0; row < p.num_rows; row += 4)
        for (int half = 0; half < 4; half++) {
            const int64_t at = half / 2 * int4_tile_bytes(p.num_parts, PARTS);
            const uint8_t *a = p.a + row * 64, *b = p.b + at + half % 2 * 16;
            const uint8_t* levels = p.b + at + levels_at + half % 2 * 32;
            const float* factors = p.factors + row * p.factor_stride;
            float* c = p.c + row * p.c_stride + half * 8;
            switch (p.num_rows - row) {
                case 1: half_int4<PARTS, 1>(p, a, factors, b, levels, c); break;
                case 2: half_int4<PARTS, 2>(p, a, factors, b, levels, c); break;
                case 3: half_int4<PARTS, 3>(p, a, factors, b, levels, c); break;
                default: half_int4<PARTS, 4>(p, a, factors, b, levels, c); break;
            }
        }
}

void fetch_block(const GroupProduct& p) {
    const int64_t bytes = 2 * int4_tile_bytes(p.num_parts, p.group_parts);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p.ahead + i, 0, 2);
}

void product_int4(const GroupProduct& p) {
    if (p.ahead) fetch_block(p);
    p.group_parts == 1 ? rows_int4<1>(p) : rows_int4<4>(p);
}

}  // namespace
