// Gumbel-argmax over a row of logits without the noise of nearly all of its tokens.
//
// The noise of token i is g = -log(-log u), where u = (2 f + 1) / 2^53 and f are the top 52 bits of a hash of the row's key
// and i (rng.py has the definition). The token with the largest logit + g wins. A token that reaches `best` has
//     -log u <= exp(logit - best),   and   -log u >= 1 - u >= (the complement's top 31 bits) / 2^31,
// so integers and a coarse exponential that is never too small rule out all tokens but a handful, and logarithms are taken of
// those alone. Python compares what is left with its own logarithms: the token is the same, bit for bit.
#pragma once

#include "abi.h"
#include "vec.h"

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, MIX_1 = 0xBF58476D1CE4E5B9u, MIX_2 = 0x94D049BB133111EBu;

typedef uint64_t L8 __attribute__((vector_size(64)));
typedef int32_t I8 __attribute__((vector_size(32)));

template <class T>
INLINE T mixed(T z) {
    z = (z ^ z >> 30) * MIX_1;
    z = (z ^ z >> 27) * MIX_2;
    return z ^ z >> 31;
}

// What a row's tokens are compared by, and the few that may be the largest.
struct Contest {
    const float* logits;
    uint64_t key;
    double best = -__builtin_inf();
    int32_t* ids;
    double values[MOST_DRAWN];
    int count = 0;
    bool is_crowded = false;

    double margin() const { return 1e-9 + 1e-12 * __builtin_fabs(best); }
    double value_of(int id) const {
        const uint64_t hash = mixed(key + (uint64_t)(id + 1) * GOLDEN);
        const double u = (double)(2 * (hash >> 12) + 1) * 0x1p-53;
        return (double)logits[id] - __builtin_log(-__builtin_log(u));
    }
    void leave_out_worse() {
        int kept = 0;
        for (int i = 0; i < count; i++) {
            if (values[i] < best - margin()) continue;
            values[kept] = values[i];
            ids[kept++] = ids[i];
        }
        count = kept;
    }
    void consider(int id) {
        const double value = value_of(id);
        if (value < best - margin()) return;
        if (value > best) {
            best = value;
            leave_out_worse();
        }
        if (count == MOST_DRAWN) {
            is_crowded = true;
            return;
        }
        values[count] = value;
        ids[count++] = id;
    }
    // A float that is not above the value that a token must reach.
    float floor() const {
        const double least = best - margin();
        const float rounded = (float)least;
        return rounded <= least ? rounded : rounded - __builtin_fabsf(rounded) * 0x1p-22f - 1e-37f;
    }
};

// One with the largest logit, from which a good bound follows at once.
INLINE int likeliest(const float* logits, int size) {
    F16 top = splat(-__builtin_inff());
    I16 at{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const F16 x = load(logits + i);
        const I16 more = x > top;
        top = select(more, x, top);
        at = more ? lanes() + i : at;
    }
    float tops[LANES];
    int32_t places[LANES];
    store(tops, top);
    __builtin_memcpy(places, &at, sizeof places);
    int best = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (tops[lane] > logits[best]) best = places[lane];
    for (; i < size; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

// Lanes of 16 tokens from `first` on that the bound does not rule out.
INLINE I16 standing(const float* logits, L8 low, L8 high, F16 floor) {
    const I8 halves[2] = {__builtin_convertvector(~mixed(low) >> 33, I8), __builtin_convertvector(~mixed(high) >> 33, I8)};
    I16 top_bits;
    __builtin_memcpy(&top_bits, halves, sizeof top_bits);
    const F16 least = __builtin_convertvector(top_bits, F16) * (0x1p-31f * (1 - 0x1p-20f));
    const F16 distance = load(logits) - floor;
    // 2^y <= 2^whole (1 + rest): the bits of y as a float's exponent and fraction. The last term covers what rounding takes.
    const F16 y = minimum(maximum(distance * 1.442695041f, splat(-126.0f)), splat(0.0f));
    const F16 most = (F16)(__builtin_convertvector((y + 127.0f) * 0x1p23f, I16) + 2048);
    return (least <= most) | (distance != distance);
}

// The ids that may have the largest logit + noise; -1 if there are too many, or no logit is above minus infinity.
int draw_candidates(const float* logits, int size, uint64_t key, int32_t* ids) {
    Contest contest{logits, key};
    contest.ids = ids;
    const int first = likeliest(logits, size);
    if (!(logits[first] > -__builtin_inff())) return -1;
    contest.best = contest.value_of(first);
    F16 floor = splat(contest.floor());
    L8 low{}, high{};
    for (int i = 0; i < 8; i++) low[i] = key + (uint64_t)(i + 1) * GOLDEN, high[i] = key + (uint64_t)(i + 9) * GOLDEN;
    int i = 0;
    for (; i + LANES <= size; i += LANES, low += LANES * GOLDEN, high += LANES * GOLDEN) {
        const I16 mask = standing(logits + i, low, high, floor);
        if (!any_lane(mask)) continue;
        int32_t lanes_left[LANES];
        __builtin_memcpy(lanes_left, &mask, sizeof lanes_left);
        for (int lane = 0; lane < LANES; lane++)
            if (lanes_left[lane]) contest.consider(i + lane);
        floor = splat(contest.floor());
    }
    for (; i < size; i++) contest.consider(i);
    return contest.is_crowded ? -1 : contest.count;
}

}  // namespace
