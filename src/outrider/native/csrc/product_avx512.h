// Products with AVX-512 BF16 and VNNI: rows in registers, in groups of at most 8, one broadcast operand each.
#pragma once

#include <immintrin.h>

#include "int4_avx512.h"
#include "product.h"

namespace {

void begin_thread() {}
void end_thread() {}

inline void fetch_ahead(const Product& p, int s) {
    const char* next = (const char*)(s < p.turn ? p.ahead : p.ahead_after) + s * p.ahead_step;
    for (int64_t i = 0; i < p.ahead_step; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
}

template <int ROWS>
void rows_bf16(const Product& p, const uint8_t* a, float* c, bool fetch) {
    __m512 sum[ROWS][2] = {};
    const uint8_t* b = p.b;
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        if (fetch) fetch_ahead(p, s);
        for (int k = 0; k < 16; k++) {
            const __m512bh low = (__m512bh)_mm512_loadu_si512(b + k * 64);
            const __m512bh high = (__m512bh)_mm512_loadu_si512(b + p.b_tile + k * 64);
            for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                __builtin_memcpy(&pair, a + r * 64 + k * 4, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], low, x);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], high, x);
            }
        }
    }
    for (int r = 0; r < ROWS; r++, c += p.c_stride) {
        _mm512_storeu_ps(c, sum[r][0]);
        _mm512_storeu_ps(c + 16, sum[r][1]);
    }
}

// vpdpbusd multiplies unsigned by signed: 128 is added to each operand value and 128 * sum(weights) taken away at the
// end. All sums are exact.
template <int ROWS>
void rows_int8(const Product& p, const uint8_t* a, float* c, bool fetch) {
    __m512i sum[ROWS][2] = {}, surplus[2] = {};
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    const uint8_t* b = p.b;
    for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) {
        if (fetch) fetch_ahead(p, s);
        for (int k = 0; k < 16; k++) {
            const __m512i low = _mm512_loadu_si512(b + k * 64), high = _mm512_loadu_si512(b + p.b_tile + k * 64);
            surplus[0] = _mm512_dpbusd_epi32(surplus[0], offset, low);
            surplus[1] = _mm512_dpbusd_epi32(surplus[1], offset, high);
            for (int r = 0; r < ROWS; r++) {
                int32_t quad;
                __builtin_memcpy(&quad, a + r * 64 + k * 4, 4);
                const __m512i x = _mm512_set1_epi32(quad ^ (int32_t)0x80808080);
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], x, low);
                sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], x, high);
            }
        }
    }
    for (int r = 0; r < ROWS; r++, c += p.c_stride) {
        _mm512_storeu_si512(c, _mm512_sub_epi32(sum[r][0], surplus[0]));
        _mm512_storeu_si512(c + 16, _mm512_sub_epi32(sum[r][1], surplus[1]));
    }
}

// Groups of nearly equal size: 12 rows are 6 + 6, not 8 + 4.
#define AVX512_PRODUCT(NAME, ROWS_OF)                                                         \
    void NAME(const Product& p) {                                                             \
        const int num_groups = (p.num_rows + 7) / 8;                                          \
        for (int group = 0, row = 0; group < num_groups; group++) {                           \
            const int rows = (p.num_rows - row + num_groups - group - 1) / (num_groups - group); \
            const uint8_t* a = p.a + row * 64;                                                \
            float* c = (float*)p.c + row * p.c_stride;                                        \
            switch (rows) {                                                                   \
                case 1: ROWS_OF<1>(p, a, c, group == 0); break;                               \
                case 2: ROWS_OF<2>(p, a, c, group == 0); break;                               \
                case 3: ROWS_OF<3>(p, a, c, group == 0); break;                               \
                case 4: ROWS_OF<4>(p, a, c, group == 0); break;                               \
                case 5: ROWS_OF<5>(p, a, c, group == 0); break;                               \
                case 6: ROWS_OF<6>(p, a, c, group == 0); break;                               \
                case 7: ROWS_OF<7>(p, a, c, group == 0); break;                               \
                default: ROWS_OF<8>(p, a, c, group == 0); break;                              \
            }                                                                                 \
            row += rows;                                                                      \
        }                                                                                     \
    }

AVX512_PRODUCT(product_bf16, rows_bf16)
AVX512_PRODUCT(product_int8, rows_int8)

void begin_int4(int, int) {}
void end_int4(int, int) {}
void product_int4(const GroupProduct& p) { product_int4_vnni(p); }

}  // namespace
