// 4-bit products on AMX tiles, for more rows than VNNI likes. Same integer sums, same float32 order, same bits.
//
// Groups pass by in chunks of four: while the tiles multiply chunk i, the vector units unpack chunk i + 1 and add up the
// sums of chunk i - 1.
#pragma once

#include "int4_avx512.h"

namespace {

// Up to how many rows VNNI is faster, measured: each group of inputs costs the tiles a round trip.
inline int most_vnni_rows(int group_parts) { return group_parts == 1 ? 8 : 4; }
constexpr int GROUPS_AT_ONCE = 4;

template <int PARTS>
struct Int4Tile {
    // A group is one multiplication of 32 inputs, or two of 64.
    static constexpr int PARTS_AT_ONCE = PARTS == 1 ? 1 : 2;
    static constexpr int CHUNK_PARTS = GROUPS_AT_ONCE * PARTS;

    alignas(64) uint8_t levels[2][CHUNK_PARTS * 2 * PART_BYTES];
    alignas(64) int32_t sums[GROUPS_AT_ONCE][ROW_TILE * LANES];
    const GroupProduct& p;
    const uint8_t* a;
    const float* factors;
    const uint8_t* b;
    const uint8_t* ahead;
    int64_t levels_at;
    int num_rows;
    float* c;

    // The arrays are filled before they are read.
    Int4Tile(const GroupProduct& p, int tile, int row)
        : p(p), a(p.a + row * STEP_BYTES), factors(p.factors + row * p.factor_stride),
          levels_at(scale_bytes(p.num_parts, PARTS)) {
        const int64_t at = tile * int4_tile_bytes(p.num_parts, PARTS);
        b = p.b + at;
        ahead = row || !p.ahead ? nullptr : p.ahead + at;
        num_rows = p.num_rows - row < ROW_TILE ? p.num_rows - row : ROW_TILE;
        c = p.c + row * p.c_stride + tile * LANES;
    }

    int parts_of_chunk(int chunk) const {
        const int left = p.num_parts - chunk * CHUNK_PARTS;
        return left < CHUNK_PARTS ? left : CHUNK_PARTS;
    }

    void unpack(int chunk) {
        const __m512i low_half = _mm512_set1_epi8(15);
        const int first = chunk * CHUNK_PARTS, count = parts_of_chunk(chunk);
        const uint8_t* from = b + levels_at + (int64_t)first * PART_BYTES;
        uint8_t* to = levels[chunk % 2];
        for (int part = 0; part < count; part++, from += PART_BYTES, to += 2 * PART_BYTES) {
            if (ahead) fetch_part<PARTS>(ahead, levels_at, first + part);
            for (int v = 0; v < 4; v++) {
                const __m512i both = _mm512_loadu_si512(from + v * 64);
                _mm512_store_si512(to + v * 64, _mm512_and_si512(both, low_half));
                _mm512_store_si512(to + 256 + v * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half));
            }
        }
    }

    // Tile numbers must be literals; a tile that no group fills stays zero.
#define INT4_GROUP(TILE)                                                                     \
    _tile_zero(TILE);                                                                        \
    for (int part = TILE * PARTS; part < (TILE + 1) * PARTS && part < count; part += PARTS_AT_ONCE) { \
        const int place = chunk * CHUNK_PARTS + part;                                        \
        _tile_loadd(4, a + place / 2 * p.a_step + place % 2 * PART_INPUTS, 64);              \
        _tile_loadd(6, from + part * 2 * PART_BYTES, 64);                                    \
        _tile_dpbsud(TILE, 4, 6);                                                            \
    }
    void multiply(int chunk) {
        const int count = parts_of_chunk(chunk);
        const uint8_t* from = levels[chunk % 2];
        INT4_GROUP(0)
        INT4_GROUP(1)
        INT4_GROUP(2)
        INT4_GROUP(3)
    }
#undef INT4_GROUP

    void fetch_sums() {
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }

    template <int COUNT>
    void add_groups(int first) {
        __m512 d[COUNT], m[COUNT];
        for (int g = 0; g < COUNT; g++) load_scales<PARTS>(b + (first + g) * GROUP_SCALE_BYTES<PARTS>, d[g], m[g]);
        for (int r = 0; r < num_rows; r++) {
            __m512 total = first ? _mm512_loadu_ps(c + r * p.c_stride) : _mm512_setzero_ps();
            for (int g = 0; g < COUNT; g++)
                total = add_group(total, _mm512_load_si512(sums[g] + r * LANES), d[g], m[g],
                                  factors + r * p.factor_stride + (first + g) * 2);
            _mm512_storeu_ps(c + r * p.c_stride, total);
        }
    }

    void add_chunk(int chunk) {
        switch (groups_of(parts_of_chunk(chunk), PARTS)) {
            case 1: add_groups<1>(chunk * GROUPS_AT_ONCE); break;
            case 2: add_groups<2>(chunk * GROUPS_AT_ONCE); break;
            case 3: add_groups<3>(chunk * GROUPS_AT_ONCE); break;
            default: add_groups<4>(chunk * GROUPS_AT_ONCE); break;
        }
    }

    void run() {
        const int num_chunks = (p.num_parts + CHUNK_PARTS - 1) / CHUNK_PARTS;
        unpack(0);
        for (int chunk = 0; chunk < num_chunks; chunk++) {
            if (chunk + 1 < num_chunks) unpack(chunk + 1);
            multiply(chunk);
            if (chunk > 0) add_chunk(chunk - 1);
            fetch_sums();
        }
        add_chunk(num_chunks - 1);
    }
};

template <int PARTS>
void tiles_int4(const GroupProduct& p) {
    for (int tile = 0; tile < 2; tile++)
        for (int row = 0; row < p.num_rows; row += ROW_TILE) Int4Tile<PARTS>(p, tile, row).run();
}

void product_int4(const GroupProduct& p) {
    if (p.num_rows <= most_vnni_rows(p.group_parts))
        product_int4_vnni(p);
    else if (p.group_parts == 1)
        tiles_int4<1>(p);
    else
        tiles_int4<4>(p);
}

}  // namespace
