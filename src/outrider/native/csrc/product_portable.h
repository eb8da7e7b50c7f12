// Products in plain C++ over 16 lanes, for any processor.
#pragma once

#include "int4_portable.h"
#include "product.h"
#include "vec.h"

namespace {

void begin_thread() {}
void end_thread() {}

void product_bf16(const Product& p) {
    for (int r = 0; r < p.num_rows; r++)
        for (int tile = 0; tile < 2; tile++) {
            const uint8_t *a = p.a + r * 64, *b = p.b + tile * p.b_tile;
            F16 sum{};
            for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step)
                for (int k = 0; k < 16; k++) {
                    uint32_t pair;
                    __builtin_memcpy(&pair, a + k * 4, 4);
                    const U16 w = load_words(b + k * 64), x = U16{} + pair;
                    sum += (F16)(w << 16) * (F16)(x << 16);
                    sum += (F16)(w & 0xffff0000u) * (F16)(x & 0xffff0000u);
                }
            store((float*)p.c + r * p.c_stride + tile * 16, sum);
        }
}

void product_int8(const Product& p) {
    for (int r = 0; r < p.num_rows; r++)
        for (int tile = 0; tile < 2; tile++) {
            const uint8_t *a = p.a + r * 64, *b = p.b + tile * p.b_tile;
            I16 sum{};
            for (int s = 0; s < p.num_steps; s++, a += p.a_step, b += p.b_step)
                for (int k = 0; k < 16; k++) {
                    const U16 w = load_words(b + k * 64);
                    for (int i = 0; i < 4; i++) {
                        const I16 level = (I16)(w << (24 - 8 * i)) >> 24;
                        sum += level * (int32_t)(int8_t)a[k * 4 + i];
                    }
                }
            __builtin_memcpy((float*)p.c + r * p.c_stride + tile * 16, &sum, sizeof sum);
        }
}

}  // namespace
