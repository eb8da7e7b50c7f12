// Products on AMX tiles: 16 rows x 16 outputs x 64 bytes in one instruction.
//
// Tiles 0..3 hold results (row group x output tile), 4 and 5 operand rows, 6 and 7 weights. One result tile takes 52
// cycles to come back, so two independent ones at least are in flight; that is still far faster than memory.
#pragma once

#include <immintrin.h>

#include "product.h"
#include "vec.h"
#include "int4_amx.h"

namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// `inputs`: bytes of a multiplication's inner dimension, 64 or 32; `rows`: of operands and results.
void configure(int inputs, int rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        config.bytes_per_row[i] = i == 4 || i == 5 ? inputs : 64;
        config.rows[i] = i >= 6 ? inputs / 4 : rows;
    }
    // GCC's intrinsic claims to read 8 bytes only, and the stores to the rest would be dropped.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

void begin_thread() { configure(64, ROW_TILE); }
// Around 4-bit products of up to that many rows. Tiles of fewer rows multiply and come back sooner.
void begin_int4(int group_parts, int num_rows) {
    if (num_rows > most_vnni_rows(group_parts)) configure(group_parts == 1 ? 32 : 64, num_rows < ROW_TILE ? num_rows : ROW_TILE);
}
void end_int4(int group_parts, int num_rows) {
    if (num_rows > most_vnni_rows(group_parts)) begin_thread();
}
// Live tiles would add 8 KiB to every switch of threads.
void end_thread() { _tile_release(); }

INLINE void fetch_ahead(const Product& p, int step) {
    const char* next = (const char*)(step < p.turn ? p.ahead : p.ahead_after) + step * p.ahead_step;
    for (int64_t i = 0; i < p.ahead_step; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
}

// The two instructions differ only in type; tile numbers must be literals.
#define AMX_PRODUCT(NAME, MULTIPLY)                                       \
    void NAME(const Product& p) {                                         \
        const bool two = p.num_rows > 16;                                 \
        const uint8_t *a = p.a, *b = p.b;                                 \
        const int64_t stride = p.c_stride * 4;                            \
        _tile_zero(0);                                                    \
        _tile_zero(1);                                                    \
        if (!two) {                                                       \
            for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) { \
                fetch_ahead(p, s);                                       \
                _tile_loadd(4, a, 64);                                    \
                _tile_loadd(6, b, 64);                                    \
                MULTIPLY(0, 4, 6);                                        \
                _tile_loadd(7, b + p.b_tile, 64);                         \
                MULTIPLY(1, 4, 7);                                        \
            }                                                             \
        } else {                                                          \
            _tile_zero(2);                                                \
            _tile_zero(3);                                                \
            for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step) { \
                fetch_ahead(p, s);                                       \
                _tile_loadd(4, a, 64);                                    \
                _tile_loadd(5, a + 1024, 64);                             \
                _tile_loadd(6, b, 64);                                    \
                MULTIPLY(0, 4, 6);                                        \
                MULTIPLY(2, 5, 6);                                        \
                _tile_loadd(7, b + p.b_tile, 64);                         \
                MULTIPLY(1, 4, 7);                                        \
                MULTIPLY(3, 5, 7);                                        \
            }                                                             \
        }                                                                 \
        uint8_t* c = (uint8_t*)p.c;                                       \
        _tile_stored(0, c, stride);                                       \
        _tile_stored(1, c + 64, stride);                                  \
        if (two) {                                                        \
            _tile_stored(2, c + 16 * stride, stride);                     \
            _tile_stored(3, c + 16 * stride + 64, stride);                \
        }                                                                 \
    }

AMX_PRODUCT(product_bf16, _tile_dpbf16ps)
AMX_PRODUCT(product_int8, _tile_dpbssd)

}  // namespace
