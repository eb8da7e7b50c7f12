// Products with 4-bit weights in plain C++, for any processor.
#pragma once

#include "product_int4.h"
#include "vec.h"

namespace {

INLINE U16 load_words(const uint8_t* from) {
    U16 v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

void begin_int4(int, int) {}
void end_int4(int, int) {}

// float16 to float32. Subnormal halves become normal floats by multiplication, so that no flushing touches them.
INLINE F16 load_halves(const uint8_t* from) {
    H16 halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const U16 bits = __builtin_convertvector(halves, U16), size = bits & 0x7fffu;
    const F16 normal = (F16)((size << 13) + (112u << 23));
    const F16 subnormal = __builtin_convertvector((I16)size, F16) * 0x1p-24f;
    const F16 value = select((I16)size < 0x400, subnormal, normal);
    return (F16)((U16)value | (bits & 0x8000u) << 16);
}

INLINE I16 part_sums(const uint8_t* levels, const uint8_t* x) {
    I16 sum{};
    for (int v = 0; v < 4; v++) {
        const U16 both = load_words(levels + v * 64);
        for (int i = 0; i < 4; i++) {
            sum += (I16)(both >> (8 * i) & 15u) * (int32_t)(int8_t)x[v * 4 + i];
            sum += (I16)(both >> (8 * i + 4) & 15u) * (int32_t)(int8_t)x[16 + v * 4 + i];
        }
    }
    return sum;
}

template <int PARTS>
void tile_int4(const GroupProduct& p, int row, int tile) {
    const uint8_t* scales = p.b + tile * int4_tile_bytes(p.num_parts, PARTS);
    const uint8_t* levels = scales + scale_bytes(p.num_parts, PARTS);
    const float* factors = p.factors + row * p.factor_stride;
    F16 total{};
    for (int part = 0; part < p.num_parts; scales += GROUP_SCALE_BYTES<PARTS>, factors += 2) {
        I16 sum{};
        for (int i = 0; i < PARTS && part < p.num_parts; i++, part++, levels += PART_BYTES)
            sum += part_sums(levels, p.a + part / 2 * p.a_step + row * 64 + part % 2 * PART_INPUTS);
        const F16 d = load_halves(scales), m = PARTS == 1 ? load_halves(scales + 32) : d * -8.0f;
        total = multiply_add(__builtin_convertvector(sum, F16) * d, splat(factors[0]), total);
        total = multiply_add(m, splat(factors[1]), total);
    }
    store(p.c + row * p.c_stride + tile * 16, total);
}

void product_int4(const GroupProduct& p) {
    for (int row = 0; row < p.num_rows; row++)
        for (int tile = 0; tile < 2; tile++) p.group_parts == 1 ? tile_int4<1>(p, row, tile) : tile_int4<4>(p, row, tile);
}

}  // namespace
