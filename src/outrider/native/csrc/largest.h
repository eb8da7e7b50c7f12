// The largest logits of a row, which is all that top_k and top_p leave of it.
//
// The row is cut into many small sets; the count-th largest of the sets' maxima is a bound that at least `count` tokens
// reach, and few more do. Those are collected and sorted.
#pragma once

#include "draw.h"

namespace {

constexpr int MOST_SETS = 8192, MOST_FOUND = 4096, MOST_HEAD = 1024;

// Integers in the order of the floats whose bits they are made of; both zeros are one.
INLINE I16 ordered(F16 x) {
    const I16 bits = (I16)(x + 0.0f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

struct Largest {
    int32_t maxima[MOST_SETS];
    uint64_t found[MOST_FOUND];  // the order of the value, then the complement of the id
    int num_sets = 0, num_found = 0;

    // Maxima of sets of `each` tokens, lane by lane. What is left over at the end is in no set.
    void make_sets(const float* logits, int size, int each) {
        const int step = each * LANES;
        for (int start = 0; start + step <= size; start += step, num_sets += LANES) {
            I16 top = ordered(load(logits + start));
            for (int i = LANES; i < step; i += LANES) {
                const I16 next = ordered(load(logits + start + i));
                top = next > top ? next : top;
            }
            __builtin_memcpy(maxima + num_sets, &top, sizeof top);
        }
    }
    int count_from(int32_t least) const {
        I16 counts{};
        for (int i = 0; i < num_sets; i += LANES) {
            I16 v;
            __builtin_memcpy(&v, maxima + i, sizeof v);
            counts -= v >= least;  // a comparison that holds is -1
        }
        int total = 0;
        for (int i = 0; i < LANES; i++) total += counts[i];
        return total;
    }
    // The largest integer that at least `count` maxima reach.
    int32_t bound(int count) const {
        int64_t low = INT32_MIN, high = INT32_MAX;
        while (low < high) {
            const int64_t middle = low + (high - low + 1) / 2;
            if (count_from((int32_t)middle) >= count)
                low = middle;
            else
                high = middle - 1;
        }
        return (int32_t)low;
    }
    bool add(int32_t order, int id) {
        if (num_found == MOST_FOUND) return false;
        found[num_found++] = (uint64_t)((uint32_t)order ^ 0x80000000u) << 32 | (uint32_t)~id;
        return true;
    }
    bool collect(const float* logits, int size, int32_t least) {
        int i = 0;
        for (; i + LANES <= size; i += LANES) {
            const I16 order = ordered(load(logits + i)), mask = order >= least;
            if (!any_lane(mask)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (mask[lane] && !add(order[lane], i + lane)) return false;
        }
        for (; i < size; i++) {
            const int32_t order = ordered(splat(logits[i]))[0];
            if (order >= least && !add(order, i)) return false;
        }
        return true;
    }
    void sort() {
        constexpr int gaps[] = {1750, 701, 301, 132, 57, 23, 10, 4, 1};
        for (const int gap : gaps)
            for (int i = gap; i < num_found; i++) {
                const uint64_t moved = found[i];
                int j = i;
                for (; j >= gap && found[j - gap] < moved; j -= gap) found[j] = found[j - gap];
                found[j] = moved;
            }
    }
};

// log(sum(exp(x))); NaN where a value is, or where one is infinite.
double log_sum(const float* logits, int size, float top) {
    F16 sums[4] = {};
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += power_of_two((load(logits + i + j * LANES) - top) * 1.442695041f);
    double total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) total += __builtin_exp((double)logits[i] - top);
    return top + __builtin_log(total);
}

// The `count` largest logits, the largest first, of equals the lowest id; false where that is not to be had so: too few
// tokens, too many equals, or values that are no numbers.
bool largest_logits(const float* logits, int size, int count, float* values, int32_t* ids) {
    static thread_local Largest found;
    found.num_sets = found.num_found = 0;
    int each = size / (4 * count);
    if (each > 64) each = 64;
    if (each < 2 || size / each > MOST_SETS) return false;
    found.make_sets(logits, size, each);
    if (found.num_sets < count || !found.collect(logits, size, found.bound(count))) return false;
    if (found.num_found < count) return false;
    found.sort();
    for (int i = 0; i < count; i++) {
        ids[i] = (int32_t)~(uint32_t)found.found[i];
        values[i] = logits[ids[i]];
    }
    return values[count - 1] > -__builtin_inff() && values[0] < __builtin_inff();
}

// What top_k and top_p leave of a row: the `count` + 1 largest logits are written, and how many of the first `count` are kept
// is returned. A token is kept while the mass in front of it, of the row or, if top_k made the head, of the head, is below
// top_p. HEAD_OPEN: they do not reach it, and more may follow.
int cut_head(const float* logits, int size, const HeadCut& cut, float* values, int32_t* ids) {
    const int count = cut.count;
    if (!largest_logits(logits, size, count + 1, values, ids)) return HEAD_MISSING;
    double base = 0;
    if (cut.is_whole) {
        for (int i = 0; i < count; i++) base += __builtin_exp((double)values[i] - values[0]);
        base = values[0] + __builtin_log(base);
    } else {
        base = log_sum(logits, size, values[0]);
    }
    if (base != base) return HEAD_MISSING;
    if (cut.top_p >= 1) return cut.is_whole ? count : HEAD_OPEN;
    double mass = 0;
    for (int i = 0; i < count; i++) {
        mass += __builtin_exp((double)values[i] - base);
        if (mass >= cut.top_p) return i + 1;
    }
    return cut.is_whole ? count : HEAD_OPEN;
}

// The ids that may have the largest logit + noise among those that top_k and top_p leave; -1 where the head is not to be had.
int draw_head(const float* logits, int size, const HeadCut& cut, uint64_t key, int32_t* ids) {
    static thread_local float values[MOST_HEAD + 1];
    static thread_local int32_t head[MOST_HEAD + 1];
    if (cut.count > MOST_HEAD) return -1;
    const int kept = cut_head(logits, size, cut, values, head);
    if (kept < 1) return -1;
    Contest contest{logits, key};
    contest.ids = ids;
    for (int i = 0; i < kept; i++) contest.consider(head[i]);
    return contest.is_crowded ? -1 : contest.count;
}

}  // namespace
