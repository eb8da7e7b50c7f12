// A head's logits against sparse laws: exponentials of a piece of rows, then the gradients by hidden rows and head.
//
// Exponentials are relative to the row's largest logit among the first 32 outputs. In floating point any shift is as
// good as the largest logit itself while nothing overflows; what does is made anew.
//
// A piece's exponentials are written once, as operand rows of the product that gives the hidden rows' gradient. The
// head's gradient is made transposed, so that the same rows, two and two made into pairs, are its operand outputs.
#pragma once

#include "train_tiles.h"

namespace {

constexpr float MOST_POWER = 120.0f;  // of two
constexpr float MOST_SUM = 1e30f;     // of a row's exponentials before they are made anew

struct LossPlan : LossLayout {
    const TrainLoss& job;

    explicit LossPlan(const TrainLoss& job) : LossLayout(job.hidden.num_rows, job.width, job.num_outputs), job(job) {}
    // Sums of each row's exponentials, lane by lane, and behind them the rows' shifts.
    float* sums_of(int panel) const { return (float*)(job.scratch + state) + (int64_t)panel * PANEL * (LANES + 1); }
    float* shifts_of(int panel) const { return sums_of(panel) + PANEL * LANES; }
    uint8_t* own_of(int thread) const { return job.scratch + own + thread * own_bytes; }
    uint8_t* transposed_hidden(int step) const { return job.scratch + columns + (int64_t)step * panels * PANEL_STEP; }
    uint8_t* powers_of(int panel) const { return job.scratch + panel * power_stride; }
    uint8_t* hidden_of(int panel) const { return job.scratch + rows + (int64_t)panel * steps * PANEL_STEP; }
    uint8_t* head_of(int block) const { return job.packed_head + (int64_t)block * steps * PANEL_STEP; }
    int chunk_steps(int chunk) const { return smaller(CHUNK_STEPS, blocks - chunk * CHUNK_STEPS); }
    uint8_t* transposed_head(int chunk, int block) const {
        const int64_t before = (int64_t)chunk * CHUNK_STEPS * steps + (int64_t)block * chunk_steps(chunk);
        return head_of(blocks) + before * PANEL_STEP;
    }
};

// 32 outputs of the head as bfloat16 rows, `padded` values each; zeros past its end.
void narrow_head(const TrainLoss& job, int block, int padded, uint16_t* rows) {
    __builtin_memset(rows, 0, (int64_t)PANEL * padded * 2);
    for (int r = 0; r < smaller(PANEL, job.num_outputs - block * PANEL); r++) {
        const float* from = job.head + ((int64_t)block * PANEL + r) * job.width;
        int i = 0;
        for (; i + LANES <= job.width; i += LANES) store_bf16(rows + r * padded + i, load(from + i));
        for (; i < job.width; i++) set_bf16(rows + r * padded + i, from[i]);
    }
}

void pack_head(const TrainLoss& job, int thread, int num_threads, Barrier*) {
    const LossPlan plan(job);
    const int padded = plan.steps * PANEL;
    uint16_t* rows = (uint16_t*)(plan.head_of(2 * plan.blocks) + (int64_t)thread * PANEL * padded * 2);
    const TrainMatrix narrow{rows, padded, PANEL, padded};
    for (int block = share_of(plan.blocks, thread, num_threads); block < share_of(plan.blocks, thread + 1, num_threads);
         block++) {
        const int chunk = block / CHUNK_STEPS;
        narrow_head(job, block, padded, rows);
        for (int step = 0; step < plan.steps; step++) {
            pack_outputs(narrow, 0, step, plan.head_of(block) + step * PANEL_STEP);
            pack_columns(narrow, step, 0, plan.transposed_head(chunk, step) + block % CHUNK_STEPS * PANEL_STEP);
        }
    }
}

// Logits of a panel and block made into exponentials; adds them to each row's sums, lane by lane.
void put_powers(const float* c, int num_outputs, const float* shifts, uint8_t* to, float* sums) {
    for (int r = 0; r < PANEL; r++, c += PANEL, to += STEP_BYTES, sums += LANES) {
        const F16 shift = splat(-LOG2_E * shifts[r]);
        F16 low = multiply_add(load(c), splat(LOG2_E), shift),
            high = multiply_add(load(c + LANES), splat(LOG2_E), shift);
        if (num_outputs < PANEL) {
            low = select(lanes() < num_outputs, low, splat(HIDDEN));
            high = select(lanes() < num_outputs - LANES, high, splat(HIDDEN));
        }
        // In this order a NaN stays one.
        low = power_of_two(minimum(splat(MOST_POWER), low));
        high = power_of_two(minimum(splat(MOST_POWER), high));
        store_bf16(to, low);
        store_bf16(to + 32, high);
        store(sums, load(sums) + low + high);
    }
}

// The largest logit of each row among the first outputs, or any larger one that is known already.
void raise_shifts(const float* c, int num_outputs, float* shifts) {
    for (int r = 0; r < PANEL; r++, c += PANEL)
        for (int i = 0; i < smaller(PANEL, num_outputs); i++)
            if (c[i] > shifts[r]) shifts[r] = c[i];
}

// Where the exponential of a row and output lies in its panel.
INLINE uint8_t* power_at(uint8_t* powers, int row, int64_t output) {
    return powers + output / PANEL * PANEL_STEP + row * STEP_BYTES + output % PANEL * 2;
}

// The exponentials of one panel anew, for which the shift must be each row's largest logit.
void redo_panel(const LossPlan& plan, int panel) {
    alignas(64) float c[PANEL_VALUES];
    float* shifts = plan.shifts_of(panel);
    Ahead nothing{nullptr, 0};
    for (int turn = 0; turn < 2; turn++)
        for (int block = 0; block < plan.blocks; block++) {
            const int num_outputs = plan.job.num_outputs - block * PANEL;
            panel_product(plan.hidden_of(panel), plan.head_of(block), plan.steps, nullptr, c, nothing, 0);
            if (turn == 0) raise_shifts(c, num_outputs, shifts);
            else put_powers(c, num_outputs, shifts, plan.powers_of(panel) + block * PANEL_STEP, plan.sums_of(panel));
        }
}

bool are_finite(const float* sums) {
    for (int r = 0; r < PANEL; r++)
        if (!(sum_lanes(load(sums + r * LANES)) < MOST_SUM)) return false;
    return true;
}

void finish_logits(const LossPlan& plan, int panel) {
    const TrainLoss& job = plan.job;
    if (!are_finite(plan.sums_of(panel))) {
        __builtin_memset(plan.sums_of(panel), 0, PANEL * LANES * sizeof(float));
        redo_panel(plan, panel);
    }
    uint8_t* powers = plan.powers_of(panel);
    for (int r = 0; r < smaller(PANEL, job.hidden.num_rows - panel * PANEL); r++) {
        const int64_t row = (int64_t)panel * PANEL + r, first = row * job.num_law_tokens;
        for (int64_t k = first; k < first + job.num_law_tokens; k++)
            job.picked[k] = float_of(power_at(powers, r, job.law_ids[k]));
        job.shifts[row] = plan.shifts_of(panel)[r];
        job.sums[row] = sum_lanes(load(plan.sums_of(panel) + r * LANES));
    }
}

void loss_logits(const TrainLoss& job, int thread, int num_threads, Barrier*) {
    const LossPlan plan(job);
    const int first = share_of(plan.panels, thread, num_threads), end = share_of(plan.panels, thread + 1, num_threads);
    alignas(64) float c[PANEL_VALUES];
    for (int panel = first; panel < end; panel++) {
        for (int step = 0; step < plan.steps; step++)
            pack_rows(job.hidden, panel, step, plan.hidden_of(panel) + step * PANEL_STEP);
        __builtin_memset(plan.sums_of(panel), 0, PANEL * LANES * sizeof(float));
        for (int r = 0; r < PANEL; r++) plan.shifts_of(panel)[r] = HIDDEN;
    }
    for (int block = 0; block < plan.blocks; block++) {
        for (int panel = first; panel < end; panel++) {
            const int num_outputs = job.num_outputs - block * PANEL;
            Ahead ahead(plan.powers_of(panel) + block * PANEL_STEP, PANEL_STEP, 0, 1, true);
            panel_product(plan.hidden_of(panel), plan.head_of(block), plan.steps, nullptr, c, ahead, 2);
            if (block == 0) raise_shifts(c, num_outputs, plan.shifts_of(panel));
            put_powers(c, num_outputs, plan.shifts_of(panel), plan.powers_of(panel) + block * PANEL_STEP,
                       plan.sums_of(panel));
        }
    }
    for (int panel = first; panel < end; panel++) finish_logits(plan, panel);
}

// Takes the law's pull from a panel's exponentials, relative to their sum.
void pull_panel(const LossPlan& plan, int panel) {
    const TrainLoss& job = plan.job;
    uint8_t* powers = plan.powers_of(panel);
    for (int r = 0; r < smaller(PANEL, job.hidden.num_rows - panel * PANEL); r++) {
        const int64_t row = (int64_t)panel * PANEL + r, first = row * job.num_law_tokens;
        for (int64_t k = first; k < first + job.num_law_tokens; k++) {
            if (job.pulls[k] == 0.0f) continue;
            uint8_t* at = power_at(powers, r, job.law_ids[k]);
            set_bf16(at, float_of(at) - job.pulls[k] * job.sums[row]);
        }
    }
}

void hidden_gradients(const LossPlan& plan, int first, int end, float* sums) {
    const TrainLoss& job = plan.job;
    for (int chunk = 0; chunk * CHUNK_STEPS < plan.blocks; chunk++) {
        const bool is_last = (chunk + 1) * CHUNK_STEPS >= plan.blocks;
        const int64_t next_bytes = is_last ? 0 : (int64_t)plan.chunk_steps(chunk + 1) * PANEL_STEP;
        Ahead head(plan.transposed_head(chunk + 1, 0), plan.steps * next_bytes);
        Ahead powers(plan.powers_of(first) + (chunk + 1) * CHUNK_STEPS * PANEL_STEP, next_bytes, plan.power_stride,
                     end - first);
        for (int block = 0; block < plan.steps; block++)
            for (int panel = first; panel < end; panel++) {
                const uint8_t* a = plan.powers_of(panel) + chunk * CHUNK_STEPS * PANEL_STEP;
                float* c = sums + ((panel - first) * plan.steps + block) * PANEL_VALUES;
                panel_product(a, plan.transposed_head(chunk, block), plan.chunk_steps(chunk), chunk ? c : nullptr, c,
                              block % 2 ? powers : head, 9);
            }
    }
    for (int panel = first; panel < end; panel++) {
        const int row = panel * PANEL, num_rows = smaller(PANEL, job.hidden.num_rows - row);
        float factors[PANEL];
        for (int r = 0; r < num_rows; r++) factors[r] = job.scales[row + r] / job.sums[row + r];
        for (int block = 0; block < plan.steps; block++)
            put_rows(sums + ((panel - first) * plan.steps + block) * PANEL_VALUES, factors, num_rows,
                     smaller(PANEL, job.hidden.width - block * PANEL),
                     job.hidden_grad + (int64_t)row * job.hidden.width + block * PANEL, job.hidden.width);
    }
}

// Hidden rows of a panel, each by its factor, made into a step of transposed operand rows.
void scale_and_transpose(const LossPlan& plan, int panel) {
    const TrainLoss& job = plan.job;
    uint16_t rows[PANEL_VALUES];
    for (int step = 0; step < plan.steps; step++) {
        for (int r = 0; r < PANEL; r++) {
            const int64_t row = (int64_t)panel * PANEL + r;
            uint16_t* values = rows + r * PANEL;
            take_32(job.hidden, (int)row, step * PANEL, values);
            const float factor = row < job.hidden.num_rows ? job.scales[row] / job.sums[row] : 0.0f;
            store_bf16(values, from_bf16(values) * factor);
            store_bf16(values + LANES, from_bf16(values + LANES) * factor);
        }
        pack_transposed({rows, PANEL, PANEL, PANEL}, 0, 0, plan.transposed_hidden(step) + panel * PANEL_STEP);
    }
}

// c[32 columns of the head][32 outputs] into rows of outputs.
void put_head_grad(const TrainLoss& job, const float* c, int block, int step) {
    float turned[2][2][LANES * LANES];
    turn_square(c, turned);
    const int width = smaller(PANEL, job.width - step * PANEL);
    for (int r = 0; r < smaller(PANEL, job.num_outputs - block * PANEL); r++) {
        float row[PANEL];
        for (int i = 0; i < 2; i++) store(row + i * LANES, load(turned[r / LANES][i] + r % LANES * LANES));
        __builtin_memcpy(job.head_grad + ((int64_t)block * PANEL + r) * job.width + step * PANEL, row, width * 4);
    }
}

void head_gradient(const LossPlan& plan, int block, uint8_t* outputs) {
    const TrainLoss& job = plan.job;
    for (int panel = 0; panel < plan.panels; panel++) {
        const uint16_t* rows = (const uint16_t*)(plan.powers_of(panel) + (int64_t)block * PANEL_STEP);
        for (int pair = 0; pair < LANES; pair++)
            pair_rows(rows + 2 * pair * PANEL, rows + (2 * pair + 1) * PANEL,
                      outputs + panel * PANEL_STEP + pair * STEP_BYTES);
    }
    const int64_t bytes = (int64_t)plan.steps * PANEL_VALUES * sizeof(float);
    uint8_t* sums = (uint8_t*)job.head_sums + block * bytes;
    const int num_outputs = smaller(PANEL, job.num_outputs - block * PANEL);
    const bool is_end = block + 1 == plan.blocks;
    Ahead next(sums + bytes, is_end ? 0 : bytes, 0, 1, true);
    Ahead powers(plan.powers_of(0) + (block + 1) * PANEL_STEP, is_end ? 0 : PANEL_STEP, plan.power_stride, plan.panels);
    alignas(64) float last[PANEL_VALUES];
    for (int step = 0; step < plan.steps; step++) {
        float *before = (float*)sums + step * PANEL_VALUES, *c = job.is_last ? last : before;
        float* grad = job.head_grad + (int64_t)block * PANEL * job.width + step * PANEL;
        Ahead written(grad, job.is_last ? 128 : 0, job.width * 4, num_outputs, true);
        const uint8_t* a = plan.transposed_hidden(step);
        panel_product(a, outputs, plan.panels, job.is_first ? nullptr : before, c,
                      job.is_last ? written : step % 2 ? powers : next, 4);
        if (job.is_last) put_head_grad(job, c, block, step);
    }
}

void loss_gradients(const TrainLoss& job, int thread, int num_threads, Barrier* barrier) {
    const LossPlan plan(job);
    const int first = share_of(plan.panels, thread, num_threads), end = share_of(plan.panels, thread + 1, num_threads);
    uint8_t* own = plan.own_of(thread);
    for (int panel = first; panel < end; panel++) {
        pull_panel(plan, panel);
        scale_and_transpose(plan, panel);
    }
    for (int panel = first; panel < end; panel += CHUNK_PANELS)
        hidden_gradients(plan, panel, smaller(panel + CHUNK_PANELS, end), (float*)own);
    barrier_wait(barrier, nullptr, 0);
    const int end_block = share_of(plan.blocks, thread + 1, num_threads);
    for (int block = share_of(plan.blocks, thread, num_threads); block < end_block; block++)
        head_gradient(plan, block, own);
}

}  // namespace
