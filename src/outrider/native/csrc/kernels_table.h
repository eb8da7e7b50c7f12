// Fills the table of one instruction set; included last by every isa_*.cpp.
#pragma once

#include "draw.h"
#include "kernels.h"
#include "largest.h"
#include "layers.h"
#include "train_attention.h"
#include "train_loss.h"
#include "train_products.h"
#include "train_rows.h"

namespace {

void power_all(const float* x, float* y, int count) {
    for (int i = 0; i < count; i += LANES) store(y + i, power_of_two(load(x + i)));
}
void silu_all(const float* x, float* y, int count) {
    for (int i = 0; i < count; i += LANES) store(y + i, silu(load(x + i)));
}

uint32_t sum_words(const uint32_t* words, int64_t count) {
    U16 sums[4] = {};
    for (int64_t i = 0; i < count; i += 64)
        for (int j = 0; j < 4; j++) {
            U16 v;
            __builtin_memcpy(&v, words + i + j * LANES, sizeof v);
            sums[j] += v;
        }
    const U16 all = sums[0] + sums[1] + sums[2] + sums[3];
    uint32_t total = 0;
    for (int i = 0; i < LANES; i++) total += all[i];
    return total;
}

}  // namespace

#define OUTRIDER_KERNELS(NAME)                                                                                         \
    extern const Kernels kernels_##NAME = {                                                                            \
        #NAME,          run_pass,       begin_thread,   end_thread,      product_bf16,                                 \
        product_int8,   begin_int4,     end_int4,       product_int4,    norm_row,                                     \
        put_row_int8,   put_row_split,  put_row_groups, power_all,       silu_all,                                     \
        sum_words,      draw_candidates, cut_head,      draw_head,                                                     \
        {pack_head, loss_logits, loss_gradients, attend, attend_back, run_rows, weight_gradient}};
