// The likeliest tokens of a row of logits.
#pragma once

#include "vec.h"
#include "work.h"

namespace {

// The largest logits of a row, in order, as they are found; a later one passes only those that are smaller.
struct Top {
    float values[MOST_TOP];
    int32_t ids[MOST_TOP];
    int count;

    explicit Top(int count) : count(count) {
        for (int i = 0; i < count; i++) values[i] = -__builtin_inff(), ids[i] = 0;
    }
    float least() const { return values[count - 1]; }
    void add(float value, int id) {
        int at = count - 1;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value;
        ids[at] = id;
    }
};

// Calls `each(16 logits, first id)` over a row; what lies past its end is -inf.
template <class Each>
void for_logits(const float* logits, int count, const Each& each) {
    const int whole = count / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) each(load(logits + i), i);
    if (whole == count) return;
    float rest[LANES];
    for (int i = 0; i < LANES; i++) rest[i] = whole + i < count ? logits[whole + i] : -__builtin_inff();
    each(load(rest), whole);
}

void rank_row(const OutriderPass& pass, int count, int row) {
    const float* logits = pass.logits + (int64_t)row * count;
    Top top(pass.num_top);
    for_logits(logits, count, [&](F16 values, int first) {
        if (!any_above(values, top.least())) return;
        for (int i = 0; i < LANES; i++)
            if (values[i] > top.least()) top.add(values[i], first + i);
    });
    const float most = top.values[0];
    F16 sums{};
    for_logits(logits, count, [&](F16 values, int) {
        sums += power_of_two(maximum(values - most, splat(-100.0f)) * LOG2_E);
    });
    const float total = most + __builtin_logf(sum_lanes(sums));
    for (int i = 0; i < pass.num_top; i++) {
        pass.top_ids[(int64_t)row * pass.num_top + i] = top.ids[i];
        pass.top_logprobs[(int64_t)row * pass.num_top + i] = top.values[i] - total;
    }
}

}  // namespace
