// Products with AVX2 and FMA: bfloat16 widened to float32, int8 multiplied as |a| x sign(w, a), which cannot saturate
// because quantised values stay within -127..127.
#pragma once

#include <immintrin.h>

#include "product.h"

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

}  // namespace
