// Operand tiles made of matrices that lie row by row, and the product of a panel of 32 rows with a block of 32 outputs.
#pragma once

#include "product.h"
#include "rows.h"
#include "train.h"

namespace {

INLINE int smaller(int a, int b) { return a < b ? a : b; }

// 32 values of a row from column `first` on, zeros past its end.
INLINE void take_32(const TrainMatrix& m, int row, int first, uint16_t* to) {
    const int count = row < m.num_rows ? smaller(m.width - first, PANEL) : 0;
    if (count == PANEL) {
        __builtin_memcpy(to, m.values + row * m.stride + first, 2 * PANEL);
        return;
    }
    __builtin_memset(to, 0, 2 * PANEL);
    if (count > 0) __builtin_memcpy(to, m.values + row * m.stride + first, 2 * count);
}

// A tile whose rows and columns of 32-bit words change places.
#if defined(__AVX512F__)
INLINE void transpose_tile(const void* from, int64_t stride, void* to) {
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512((const uint8_t*)from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    // x[4 i + c]: rows 4 i .. 4 i + 3 of columns c, c + 4, c + 8, c + 12, in quarters.
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88),
                      high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd),
                      high2 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        y[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        y[c + 4] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        y[c + 12] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_si512((uint8_t*)to + i * 64, y[i]);
}
#else
INLINE void transpose_tile(const void* from, int64_t stride, void* to) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            __builtin_memcpy((uint8_t*)to + j * 64 + i * 4, (const uint8_t*)from + i * stride + j * 4, 4);
}
#endif

// Two rows of 32 values as pairs, one row's value beside the other's: columns 0 .. 15 in `to`, the rest a tile on.
INLINE void pair_rows(const uint16_t* even, const uint16_t* odd, uint8_t* to) {
    for (int half = 0; half < 2; half++) {
        H16 low, high;
        __builtin_memcpy(&low, even + half * LANES, sizeof low);
        __builtin_memcpy(&high, odd + half * LANES, sizeof high);
        const U16 words = __builtin_convertvector(low, U16) | (__builtin_convertvector(high, U16) << 16);
        __builtin_memcpy(to + half * TILE_BYTES, &words, sizeof words);
    }
}

// "rows" of one panel and step.
void pack_rows(const TrainMatrix& m, int panel, int step, uint8_t* to) {
    for (int i = 0; i < PANEL; i++) take_32(m, panel * PANEL + i, step * PANEL, (uint16_t*)(to + i * STEP_BYTES));
}

// "outputs" of one block and step, the matrix' rows being outputs.
void pack_outputs(const TrainMatrix& m, int block, int step, uint8_t* to) {
    uint16_t rows[PANEL_VALUES];
    pack_rows(m, block, step, (uint8_t*)rows);
    transpose_tile(rows, STEP_BYTES, to);
    transpose_tile(rows + PANEL_VALUES / 2, STEP_BYTES, to + TILE_BYTES);
}

// "outputs" of one block and step of the transpose: the matrix' columns are outputs, its rows inputs.
void pack_columns(const TrainMatrix& m, int block, int step, uint8_t* to) {
    for (int pair = 0; pair < LANES; pair++) {
        uint16_t rows[2 * PANEL];
        take_32(m, step * PANEL + 2 * pair, block * PANEL, rows);
        take_32(m, step * PANEL + 2 * pair + 1, block * PANEL, rows + PANEL);
        pair_rows(rows, rows + PANEL, to + pair * STEP_BYTES);
    }
}

// "rows" of one panel and step of the transpose.
void pack_transposed(const TrainMatrix& m, int panel, int step, uint8_t* to) {
    alignas(64) uint8_t tiles[PANEL_STEP];
    pack_columns(m, panel, step, tiles);
    transpose_tile(tiles, STEP_BYTES, to);
    transpose_tile(tiles + TILE_BYTES, STEP_BYTES, to + TILE_BYTES);
}

INLINE float float_of(const void* bf16) {
    uint16_t half;
    __builtin_memcpy(&half, bf16, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

INLINE void set_bf16(void* to, float value) {
    const uint16_t half = (uint16_t)to_bf16(splat(value))[0];
    __builtin_memcpy(to, &half, 2);
}

// c[32 rows][32 columns] float32, each row by its factor, into bfloat16 rows; what lies beyond the matrix is dropped.
void put_rows(const float* c, const float* factors, int num_rows, int num_columns, uint16_t* to, int64_t stride) {
    for (int r = 0; r < num_rows; r++, c += PANEL, to += stride) {
        uint16_t values[PANEL];
        store_bf16(values, load(c) * factors[r]);
        store_bf16(values + LANES, load(c + LANES) * factors[r]);
        __builtin_memcpy(to, values, 2 * num_columns);
    }
}

// c[32][32] float32 with rows and columns changed: column half, row half, and in them 16 rows of 16.
void turn_square(const float* c, float (*to)[2][LANES * LANES]) {
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            transpose_tile(c + i * LANES * PANEL + j * LANES, PANEL * sizeof(float), to[j][i]);
}

constexpr float HIDDEN = -1e30f;  // a logit or score that must not count

// Memory that is wanted soon, to be read or to be written, fetched a few lines a step while a product runs: rows of so
// many bytes, or one piece. Stores that miss the caches would wait for each other.
struct Ahead {
    const uint8_t* next;
    int64_t row_bytes, stride, done;
    int num_rows;
    bool is_written;

    Ahead(const void* from, int64_t row_bytes, int64_t stride = 0, int num_rows = 1, bool is_written = false)
        : next((const uint8_t*)from), row_bytes(row_bytes), stride(stride), done(0),
          num_rows(row_bytes > 0 ? num_rows : 0), is_written(is_written) {}
    INLINE void fetch(int num_lines) {
        for (int i = 0; i < num_lines && num_rows > 0; i++) {
            if (is_written) __builtin_prefetch(next + done, 1, 2);
            else __builtin_prefetch(next + done, 0, 2);
            done += 64;
            if (done < row_bytes) continue;
            done = 0;
            next += stride;
            num_rows--;
        }
    }
};

// c = a x b, or c = before + a x b: a panel's rows with a block's outputs over `num_steps` steps. Both [32][32].
#if defined(__AMX_BF16__)
void panel_product(const uint8_t* a, const uint8_t* b, int num_steps, const float* before, float* c, Ahead& ahead,
                   int num_lines) {
    // To the compiler a tile load reads nothing: what was written for it must be in memory by now.
    __asm__ volatile("" : : : "memory");
    const int64_t stride = PANEL * sizeof(float);
    if (before) {
        _tile_loadd(0, before, stride);
        _tile_loadd(1, before + LANES, stride);
        _tile_loadd(2, before + PANEL_VALUES / 2, stride);
        _tile_loadd(3, before + PANEL_VALUES / 2 + LANES, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int s = 0; s < num_steps; s++, a += PANEL_STEP, b += PANEL_STEP) {
        _tile_loadd(4, a, STEP_BYTES);
        _tile_loadd(6, b, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE_BYTES, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + TILE_BYTES, STEP_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        ahead.fetch(num_lines);
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + LANES, stride);
    _tile_stored(2, c + PANEL_VALUES / 2, stride);
    _tile_stored(3, c + PANEL_VALUES / 2 + LANES, stride);
}
#else
void panel_product(const uint8_t* a, const uint8_t* b, int num_steps, const float* before, float* c, Ahead&, int) {
    float sums[PANEL_VALUES];
    product_bf16({a, PANEL_STEP, b, PANEL_STEP, TILE_BYTES, num_steps, PANEL, sums, PANEL});
    for (int i = 0; i < PANEL_VALUES; i += LANES)
        store(c + i, before ? load(before + i) + load(sums + i) : load(sums + i));
}
#endif

}  // namespace
