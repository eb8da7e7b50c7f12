// 4-bit products with VNNI: levels are unpacked in registers, where they are the unsigned operand as they are.
#pragma once

#include <immintrin.h>

#include "product_int4.h"

namespace {

// d and m of one group and 16 outputs.
template <int PARTS>
inline __attribute__((always_inline)) void load_scales(const uint8_t* from, __m512& d, __m512& m) {
    d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    if (PARTS == 1)
        m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 32)));
    else
        m = _mm512_mul_ps(d, _mm512_set1_ps(-8.0f));
}

inline __attribute__((always_inline)) __m512 add_group(__m512 total, __m512i sums, __m512 d, __m512 m, const float* factors) {
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), d);
    total = _mm512_fmadd_ps(scaled, _mm512_set1_ps(factors[0]), total);
    return _mm512_fmadd_ps(m, _mm512_set1_ps(factors[1]), total);
}

inline __attribute__((always_inline)) __m512i word_of(const uint8_t* from) {
    int32_t word;
    __builtin_memcpy(&word, from, 4);
    return _mm512_set1_epi32(word);
}

// One tile of 16 outputs. A lone row takes two sums, because one would wait for itself.
template <int PARTS, int ROWS>
void tile_int4(const GroupProduct& p, const uint8_t* a, const float* factors, const uint8_t* b, float* c,
               const uint8_t* ahead) {
    const __m512i low_half = _mm512_set1_epi8(15);
    const int64_t levels_at = scale_bytes(p.num_parts, PARTS);
    const uint8_t* levels = b + levels_at;
    __m512 total[ROWS] = {};
    for (int part = 0; part < p.num_parts; b += GROUP_SCALE_BYTES<PARTS>, factors += 2) {
        __m512i sum[ROWS] = {}, more[ROWS] = {};
        const int end = part + PARTS < p.num_parts ? part + PARTS : p.num_parts;
        for (; part < end; part++, levels += PART_BYTES) {
            if (ahead) fetch_part<PARTS>(ahead, levels_at, part);
            const uint8_t* x = a + part / 2 * p.a_step + part % 2 * PART_INPUTS;
            for (int v = 0; v < 4; v++) {
                const __m512i both = _mm512_loadu_si512(levels + v * 64);
                const __m512i low = _mm512_and_si512(both, low_half);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
                for (int r = 0; r < ROWS; r++) {
                    sum[r] = _mm512_dpbusd_epi32(sum[r], low, word_of(x + r * 64 + v * 4));
                    __m512i& other = ROWS == 1 ? more[r] : sum[r];
                    other = _mm512_dpbusd_epi32(other, high, word_of(x + r * 64 + 16 + v * 4));
                }
            }
        }
        __m512 d, m;
        load_scales<PARTS>(b, d, m);
        for (int r = 0; r < ROWS; r++) {
            if (ROWS == 1) sum[r] = _mm512_add_epi32(sum[r], more[r]);
            total[r] = add_group(total[r], sum[r], d, m, factors + r * p.factor_stride);
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(c + r * p.c_stride, total[r]);
}

template <int PARTS>
void rows_int4(const GroupProduct& p, const uint8_t* b, float* c, const uint8_t* ahead) {
    const int num_groups = (p.num_rows + 7) / 8;
    for (int group = 0, row = 0; group < num_groups; group++, ahead = nullptr) {
        const int rows = (p.num_rows - row + num_groups - group - 1) / (num_groups - group);
        const uint8_t* a = p.a + row * 64;
        const float* factors = p.factors + row * p.factor_stride;
        float* to = c + row * p.c_stride;
        switch (rows) {
            case 1: tile_int4<PARTS, 1>(p, a, factors, b, to, ahead); break;
            case 2: tile_int4<PARTS, 2>(p, a, factors, b, to, ahead); break;
            case 3: tile_int4<PARTS, 3>(p, a, factors, b, to, ahead); break;
            case 4: tile_int4<PARTS, 4>(p, a, factors, b, to, ahead); break;
            case 5: tile_int4<PARTS, 5>(p, a, factors, b, to, ahead); break;
            case 6: tile_int4<PARTS, 6>(p, a, factors, b, to, ahead); break;
            case 7: tile_int4<PARTS, 7>(p, a, factors, b, to, ahead); break;
            default: tile_int4<PARTS, 8>(p, a, factors, b, to, ahead); break;
        }
        row += rows;
    }
}

void product_int4_vnni(const GroupProduct& p) {
    const int64_t tile_bytes = int4_tile_bytes(p.num_parts, p.group_parts);
    for (int tile = 0; tile < 2; tile++) {
        const uint8_t *b = p.b + tile * tile_bytes, *ahead = p.ahead ? p.ahead + tile * tile_bytes : nullptr;
        if (p.group_parts == 1)
            rows_int4<1>(p, b, p.c + tile * 16, ahead);
        else
            rows_int4<4>(p, b, p.c + tile * 16, ahead);
    }
}

}  // namespace
