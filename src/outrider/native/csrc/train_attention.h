// Attention of an unroll step, text by text and kv head by kv head, forward and backward.
//
// A query's own later keys are few: they are handled one by one in float32. Scores of step-0 keys are products of
// panels of 32 queries with blocks of 32 keys, as far as the panel's last query sees. The backward pass makes the
// shares anew from the logarithm of their sum. It forms gradients of keys and values transposed, so that shares need no
// turning: pairs of query rows are the operand outputs, summed over all query heads of the kv head in one product.
#pragma once

#include "train_tiles.h"

namespace {

// One text and kv head.
struct HeadUnit : AttentionLayout {
    const TrainAttention& job;
    const TrainSegment segment;
    const int group, blocks;
    uint8_t* const scratch;

    HeadUnit(const TrainAttention& job, int unit, int thread)
        : AttentionLayout(job), job(job), segment(job.segments[unit / job.num_kv_heads]),
          group(unit % job.num_kv_heads), blocks(panels_of(segment.num_keys)),
          scratch(job.scratch + thread * job.thread_bytes) {}

    uint8_t* side(int64_t at, int outer, int inner) const {
        return scratch + at + ((int64_t)outer * inner) * PANEL_STEP;
    }
    uint16_t* row_of(const TrainHeads& x, int query, int head) const {
        return x.values + (segment.first_query + query) * x.stride + (int64_t)head * job.head_width;
    }
    TrainMatrix keys_of(const TrainHeads& x) const {
        return {x.values + segment.first_key * x.stride + (int64_t)group * job.head_width, x.stride, segment.num_keys,
                job.head_width};
    }
    // Queries from `first` on, of one head; rows past the text's last are zeros.
    TrainMatrix queries_of(const TrainHeads& x, int first, int head) const {
        return {row_of(x, first, head), x.stride, segment.num_queries - first, job.head_width};
    }
    // What a query of the padding has: it sees nothing.
    int index_of(int query) const {
        return query < segment.num_queries ? job.indexes[segment.first_query + query] : -1;
    }
    float& log_sum_of(int query, int head) const {
        return job.log_sums[head * job.num_queries + segment.first_query + query];
    }
};

INLINE float dot(const uint16_t* x, const uint16_t* y, int width) {
    F16 sum{};
    int i = 0;
    for (; i + LANES <= width; i += LANES) sum = multiply_add(from_bf16(x + i), from_bf16(y + i), sum);
    float total = sum_lanes(sum);
    for (; i < width; i++) total += float_of(x + i) * float_of(y + i);
    return total;
}

// to += factor * x
INLINE void add_scaled(float* to, const uint16_t* x, float factor, int width) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, multiply_add(from_bf16(x + i), splat(factor), load(to + i)));
    for (; i < width; i++) to[i] += float_of(x + i) * factor;
}

INLINE void put_scaled(uint16_t* to, const float* x, float factor, int width) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store_bf16(to + i, load(x + i) * factor);
    for (; i < width; i++) set_bf16(to + i, x[i] * factor);
}

struct QueryRows {
    int index[PANEL];
    int least, blocks;  // the least index of a query that is one, and blocks of keys that the panel sees

    QueryRows(const HeadUnit& unit, int first) : least(1 << 30), blocks(0) {
        for (int r = 0; r < PANEL; r++) {
            index[r] = unit.index_of(first + r);
            if (index[r] < least) least = index[r];
            if (index[r] / PANEL + 1 > blocks && index[r] >= 0) blocks = index[r] / PANEL + 1;
        }
    }
    bool sees_all(int block) const { return (block + 1) * PANEL - 1 <= least; }
    // Columns past the row's own index hold `hidden`.
    INLINE void mask(int row, int block, float hidden, F16& low, F16& high) const {
        const int last = index[row] - block * PANEL;
        low = select(lanes() <= last, low, splat(hidden));
        high = select(lanes() + LANES <= last, high, splat(hidden));
    }
};

// Scores to base 2 of a block, masked, and each row's largest so far, lane by lane.
void keep_scores(const QueryRows& rows, int block, float factor, float* c, float* best) {
    const bool all = rows.sees_all(block);
    for (int r = 0; r < PANEL; r++, c += PANEL, best += LANES) {
        F16 low = load(c) * factor, high = load(c + LANES) * factor;
        if (!all) rows.mask(r, block, HIDDEN, low, high);
        store(c, low);
        store(c + LANES, high);
        store(best, maximum(load(best), maximum(low, high)));
    }
}

// Scores of one block made into weights; `best` counts sums.
void put_weights(const float* c, const float* shifts, uint8_t* to, float* sums) {
    for (int r = 0; r < PANEL; r++, c += PANEL, to += STEP_BYTES, sums += LANES) {
        const F16 low = power_of_two(load(c) - shifts[r]), high = power_of_two(load(c + LANES) - shifts[r]);
        store_bf16(to, low);
        store_bf16(to + 32, high);
        store(sums, load(sums) + low + high);
    }
}

// The weights of one panel of queries and one head, [block][32][32]; shifts and sums of its rows.
struct Softmax {
    float own[MOST_OWN][PANEL];
    alignas(64) float lanes[PANEL * LANES];
    float shifts[PANEL], sums[PANEL];

    void run(const HeadUnit& unit, const QueryRows& rows, int first, int head) {
        const float factor = unit.job.scale * LOG2_E;
        const int count = smaller(PANEL, unit.segment.num_queries - first);
        float* scores = (float*)(unit.scratch + unit.scores);
        Ahead nothing{nullptr, 0};
        for (int r = 0; r < PANEL; r++)
            store(lanes + r * LANES, splat(own_scores(unit, first + r, r, head, factor, r < count)));
        for (int b = 0; b < rows.blocks; b++) {
            float* c = scores + b * PANEL_VALUES;
            panel_product(unit.scratch + unit.queries, unit.side(unit.keys, b, unit.steps), unit.steps, nullptr, c,
                          nothing, 0);
            keep_scores(rows, b, factor, c, lanes);
        }
        for (int r = 0; r < PANEL; r++) {
            shifts[r] = max_lanes(load(lanes + r * LANES));
            store(lanes + r * LANES, F16{});
        }
        for (int b = 0; b < rows.blocks; b++)
            put_weights(scores + b * PANEL_VALUES, shifts, unit.side(unit.weights, b, 1), lanes);
        for (int r = 0; r < PANEL; r++) sums[r] = sum_lanes(load(lanes + r * LANES));
        add_own(unit, count);
    }

  private:
    // A row's scores of its own keys; returns the largest.
    float own_scores(const HeadUnit& unit, int query, int r, int head, float factor, bool is_one) {
        float most = HIDDEN;
        for (int j = 0; is_one && j < unit.job.num_own; j++) {
            own[j][r] = factor * dot(unit.row_of(unit.job.queries, query, head),
                                     unit.row_of(unit.job.own_keys[j], query, unit.group), unit.job.head_width);
            if (own[j][r] > most) most = own[j][r];
        }
        return most;
    }
    void add_own(const HeadUnit& unit, int count) {
        for (int j = 0; j < unit.job.num_own; j++)
            for (int r = 0; r < count; r++) sums[r] += own[j][r] = power_of_two(splat(own[j][r] - shifts[r]))[0];
    }
};

// c[32 rows][32 values] of each step of a head's width to rows of all of them.
void gather_row(const float* c, int steps, int row, float* to) {
    for (int i = 0; i < steps; i++)
        __builtin_memcpy(to + i * PANEL, c + i * PANEL_VALUES + row * PANEL, PANEL * sizeof(float));
}

constexpr int MOST_STEPS = MOST_WIDTH / PANEL;

void attend_panel(const HeadUnit& unit, int first, int head) {
    const TrainAttention& job = unit.job;
    const QueryRows rows(unit, first);
    Softmax softmax;
    alignas(64) float mixed[MOST_STEPS * PANEL_VALUES], row[MOST_STEPS * PANEL];
    Ahead nothing{nullptr, 0};
    for (int i = 0; i < unit.steps; i++)
        pack_rows(unit.queries_of(job.queries, first, head), 0, i, unit.side(unit.queries, i, 1));
    softmax.run(unit, rows, first, head);
    for (int i = 0; i < unit.steps; i++)
        panel_product(unit.scratch + unit.weights, unit.side(unit.values, i, unit.blocks), rows.blocks, nullptr,
                      mixed + i * PANEL_VALUES, nothing, 0);
    for (int r = 0; r < smaller(PANEL, unit.segment.num_queries - first); r++) {
        gather_row(mixed, unit.steps, r, row);
        for (int j = 0; j < job.num_own; j++)
            add_scaled(row, unit.row_of(job.own_values[j], first + r, unit.group), softmax.own[j][r], job.head_width);
        put_scaled(unit.row_of(job.out, first + r, head), row, 1.0f / softmax.sums[r], job.head_width);
        unit.log_sum_of(first + r, head) = softmax.shifts[r] + __builtin_log2f(softmax.sums[r]);
    }
}

// Shares of a panel and block, and the slopes of their scores, from scores and the slopes of shares.
struct ShareRows {
    float log_sums[PANEL], common[PANEL];

    // `pairs`: shares, and the slopes' behind them at `apart`; `slope_rows`: slopes.
    void put(const QueryRows& rows, int block, float factor, const float* scores, const float* pulls, uint8_t* pairs,
             int64_t apart, uint8_t* slope_rows) const {
        const bool all = rows.sees_all(block);
        for (int r = 0; r < PANEL; r += 2, pairs += STEP_BYTES) {
            F16 share[2][2], slope[2][2];
            for (int i = 0; i < 2; i++) {
                const float *score = scores + (r + i) * PANEL, *pull = pulls + (r + i) * PANEL;
                F16 low = load(score) * factor - log_sums[r + i], high = load(score + LANES) * factor - log_sums[r + i];
                if (!all) rows.mask(r + i, block, HIDDEN, low, high);
                share[i][0] = power_of_two(low);
                share[i][1] = power_of_two(high);
                for (int half = 0; half < 2; half++) {
                    slope[i][half] = share[i][half] * (load(pull + half * LANES) - common[r + i]);
                    store_bf16(slope_rows + (r + i) * STEP_BYTES + half * 32, slope[i][half]);
                }
            }
            for (int half = 0; half < 2; half++) {
                const U16 shares = bf16_pairs(share[0][half], share[1][half]),
                          slopes = bf16_pairs(slope[0][half], slope[1][half]);
                __builtin_memcpy(pairs + half * TILE_BYTES, &shares, sizeof shares);
                __builtin_memcpy(pairs + apart + half * TILE_BYTES, &slopes, sizeof slopes);
            }
        }
    }
};

// Operands of one panel of queries and one head: the `i`-th of those taken at a time.
void pack_panel(const HeadUnit& unit, int first, int head, int i, ShareRows& shares) {
    const TrainAttention& job = unit.job;
    const TrainMatrix queries = unit.queries_of(job.queries, first, head),
                      slopes = unit.queries_of(job.slopes, first, head);
    for (int step = 0; step < unit.steps; step++) {
        pack_rows(queries, 0, step, unit.side(unit.queries, i, unit.steps) + step * PANEL_STEP);
        pack_rows(slopes, 0, step, unit.side(unit.slopes, i, unit.steps) + step * PANEL_STEP);
        pack_transposed(queries, step, 0, unit.side(unit.turned_queries, step, unit.rows) + i * PANEL_STEP);
        pack_transposed(slopes, step, 0, unit.side(unit.turned_slopes, step, unit.rows) + i * PANEL_STEP);
    }
    for (int r = 0; r < PANEL; r++) {
        const bool is_one = first + r < unit.segment.num_queries;
        shares.log_sums[r] = is_one ? unit.log_sum_of(first + r, head) : 0.0f;
        shares.common[r] = is_one ? dot(unit.row_of(job.slopes, first + r, head), unit.row_of(job.out, first + r, head),
                                        job.head_width)
                                  : 0.0f;
    }
}

// What keys and values of one block receive from all panels taken.
void add_block(const HeadUnit& unit, int block, int num_rows) {
    const int64_t apart = (int64_t)unit.rows * PANEL_STEP;
    Ahead nothing{nullptr, 0};
    for (int step = 0; step < unit.steps; step++) {
        const int64_t at = ((int64_t)block * unit.steps + step) * PANEL_VALUES;
        float *values = (float*)(unit.scratch + unit.value_sums) + at,
              *keys = (float*)(unit.scratch + unit.key_sums) + at;
        panel_product(unit.side(unit.turned_slopes, step, unit.rows), unit.scratch + unit.pairs, num_rows, values,
                      values, nothing, 0);
        panel_product(unit.side(unit.turned_queries, step, unit.rows), unit.scratch + unit.pairs + apart, num_rows,
                      keys, keys, nothing, 0);
    }
}

// Gradients of one query's own keys and values, summed over the heads that share them, and their part of the queries'.
struct OwnGradients {
    float keys[MOST_OWN][MOST_STEPS * PANEL], values[MOST_OWN][MOST_STEPS * PANEL];

    void clear(int num_own) {
        __builtin_memset(keys, 0, num_own * sizeof keys[0]);
        __builtin_memset(values, 0, num_own * sizeof values[0]);
    }
    void add(const HeadUnit& unit, int query, int head, float log_sum, float common, float* query_row) {
        const TrainAttention& job = unit.job;
        const int width = job.head_width;
        const uint16_t *q = unit.row_of(job.queries, query, head), *slope = unit.row_of(job.slopes, query, head);
        for (int j = 0; j < job.num_own; j++) {
            const uint16_t *key = unit.row_of(job.own_keys[j], query, unit.group),
                           *value = unit.row_of(job.own_values[j], query, unit.group);
            const float share = power_of_two(splat(job.scale * LOG2_E * dot(q, key, width) - log_sum))[0];
            const float pull = share * (dot(slope, value, width) - common);
            add_scaled(query_row, key, pull, width);
            add_scaled(keys[j], q, pull, width);
            add_scaled(values[j], slope, share, width);
        }
    }
    void put(const HeadUnit& unit, int query) const {
        const TrainAttention& job = unit.job;
        for (int j = 0; j < job.num_own; j++) {
            put_scaled(unit.row_of(job.own_key_grads[j], query, unit.group), keys[j], job.scale, job.head_width);
            put_scaled(unit.row_of(job.own_value_grads[j], query, unit.group), values[j], 1.0f, job.head_width);
        }
    }
};

// Gradients of the queries of one panel, all heads that share the unit's keys, and of their own keys.
void put_query_gradients(const HeadUnit& unit, int first, int panel, int blocks, const ShareRows* shares) {
    const TrainAttention& job = unit.job;
    float* mixed = (float*)(unit.scratch + unit.mixed);
    float row[MOST_STEPS * PANEL];
    OwnGradients own;
    Ahead nothing{nullptr, 0};
    for (int member = 0; member < unit.members; member++)
        for (int step = 0; step < unit.steps; step++)
            panel_product(unit.side(unit.slope_rows, panel * unit.members + member, unit.most_blocks),
                                 unit.side(unit.key_columns, step, unit.blocks), blocks, nullptr,
                                 mixed + (member * unit.steps + step) * PANEL_VALUES, nothing, 0);
    for (int r = 0; r < smaller(PANEL, unit.segment.num_queries - first); r++) {
        own.clear(job.num_own);
        for (int member = 0; member < unit.members; member++) {
            const ShareRows& share = shares[panel * unit.members + member];
            const int head = unit.group * unit.members + member;
            gather_row(mixed + member * unit.steps * PANEL_VALUES, unit.steps, r, row);
            own.add(unit, first + r, head, share.log_sums[r], share.common[r], row);
            put_scaled(unit.row_of(job.query_grad, first + r, head), row, job.scale, job.head_width);
        }
        own.put(unit, first + r);
    }
}

// All query heads of the unit, QUERY_PANELS panels of queries from `first` on.
void attend_back_panels(const HeadUnit& unit, int first) {
    const int num_panels = smaller(QUERY_PANELS, panels_of(unit.segment.num_queries - first)),
              num_rows = num_panels * unit.members;
    const QueryRows rows[QUERY_PANELS] = {QueryRows(unit, first), QueryRows(unit, first + PANEL)};
    ShareRows shares[QUERY_PANELS * MOST_MEMBERS];
    const float factor = unit.job.scale * LOG2_E;
    float *scores = (float*)(unit.scratch + unit.scores), *pulls = scores + PANEL_VALUES;
    const int64_t apart = (int64_t)unit.rows * PANEL_STEP;
    Ahead nothing{nullptr, 0};
    int blocks = 0;
    for (int i = 0; i < num_rows; i++)
        pack_panel(unit, first + i / unit.members * PANEL, unit.group * unit.members + i % unit.members, i, shares[i]);
    for (int panel = 0; panel < num_panels; panel++)
        if (rows[panel].blocks > blocks) blocks = rows[panel].blocks;
    for (int b = 0; b < blocks; b++) {
        for (int i = 0; i < num_rows; i++) {
            panel_product(unit.side(unit.queries, i, unit.steps), unit.side(unit.keys, b, unit.steps), unit.steps,
                          nullptr, scores, nothing, 0);
            panel_product(unit.side(unit.slopes, i, unit.steps), unit.side(unit.values, b, unit.steps), unit.steps,
                          nullptr, pulls, nothing, 0);
            shares[i].put(rows[i / unit.members], b, factor, scores, pulls, unit.side(unit.pairs, i, 1), apart,
                          unit.side(unit.slope_rows, i, unit.most_blocks) + b * PANEL_STEP);
        }
        add_block(unit, b, num_rows);
    }
    for (int panel = 0; panel < num_panels; panel++)
        put_query_gradients(unit, first + panel * PANEL, panel, blocks, shares);
}

// Sums of one side, [block][step][32 values of a head][32 keys], into rows of keys.
void put_key_gradients(const HeadUnit& unit, int64_t sums, const TrainHeads& to, float factor) {
    float turned[2][2][LANES * LANES], factors[PANEL], rows[PANEL_VALUES];
    for (float& each : factors) each = factor;
    for (int b = 0; b < unit.blocks; b++)
        for (int step = 0; step < unit.steps; step++) {
            const float* c = (const float*)(unit.scratch + sums) + ((int64_t)b * unit.steps + step) * PANEL_VALUES;
            turn_square(c, turned);
            for (int r = 0; r < PANEL; r++)
                for (int i = 0; i < 2; i++)
                    store(rows + r * PANEL + i * LANES, load(turned[r / LANES][i] + r % LANES * LANES));
            put_rows(rows, factors, smaller(PANEL, unit.segment.num_keys - b * PANEL),
                     smaller(PANEL, unit.job.head_width - step * PANEL),
                     to.values + (unit.segment.first_key + (int64_t)b * PANEL) * to.stride +
                         (int64_t)unit.group * unit.job.head_width + step * PANEL,
                     to.stride);
        }
}

void attend_unit(const HeadUnit& unit) {
    const TrainMatrix keys = unit.keys_of(unit.job.keys), values = unit.keys_of(unit.job.values);
    for (int b = 0; b < unit.blocks; b++)
        for (int step = 0; step < unit.steps; step++) {
            pack_outputs(keys, b, step, unit.side(unit.keys, b, unit.steps) + step * PANEL_STEP);
            pack_columns(values, step, b, unit.side(unit.values, step, unit.blocks) + b * PANEL_STEP);
        }
    for (int first = 0; first < unit.segment.num_queries; first += PANEL)
        for (int member = 0; member < unit.members; member++)
            attend_panel(unit, first, unit.group * unit.members + member);
}

void attend_back_unit(const HeadUnit& unit) {
    const TrainMatrix keys = unit.keys_of(unit.job.keys), values = unit.keys_of(unit.job.values);
    const int64_t side_bytes = (int64_t)unit.blocks * unit.steps * PANEL_VALUES * sizeof(float);
    for (int b = 0; b < unit.blocks; b++)
        for (int step = 0; step < unit.steps; step++) {
            pack_outputs(keys, b, step, unit.side(unit.keys, b, unit.steps) + step * PANEL_STEP);
            pack_outputs(values, b, step, unit.side(unit.values, b, unit.steps) + step * PANEL_STEP);
            pack_columns(keys, step, b, unit.side(unit.key_columns, step, unit.blocks) + b * PANEL_STEP);
        }
    __builtin_memset(unit.scratch + unit.key_sums, 0, side_bytes);
    __builtin_memset(unit.scratch + unit.value_sums, 0, side_bytes);
    for (int first = 0; first < unit.segment.num_queries; first += QUERY_PANELS * PANEL)
        attend_back_panels(unit, first);
    put_key_gradients(unit, unit.key_sums, unit.job.key_grad, unit.job.scale);
    put_key_gradients(unit, unit.value_sums, unit.job.value_grad, 1.0f);
}

void run_units(TrainAttention& job, int thread, void (*run)(const HeadUnit&)) {
    for (;;) {
        const int unit = __atomic_fetch_add(&job.next_unit, 1, __ATOMIC_RELAXED);
        if (unit >= job.num_segments * job.num_kv_heads) return;
        run(HeadUnit(job, unit, thread));
    }
}

void attend(TrainAttention& job, int thread) { run_units(job, thread, attend_unit); }
void attend_back(TrainAttention& job, int thread) { run_units(job, thread, attend_back_unit); }

}  // namespace
