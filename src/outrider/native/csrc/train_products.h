// The gradient of a matrix: slopes transposed times inputs, summed over rows.
//
// The narrower of both is turned into operand rows once; the other, its rows two and two made into pairs, is the
// operand outputs, block by block.
#pragma once

#include "train_tiles.h"

namespace {

// Where a square of the gradient lies, to fetch it.
Ahead gradient_of(const TrainWeight& job, int panel, int block) {
    const int first = (job.is_turned ? block : panel) * PANEL, column = (job.is_turned ? panel : block) * PANEL;
    const int64_t width = job.inputs.width;
    return {job.grad + first * width + column, 64, 2 * width, smaller(PANEL, job.slopes.width - first), true};
}

// A square of sums c[32 narrow columns][32 wide columns] to where it belongs.
void put_weight_grad(const TrainWeight& job, float* c, int panel, int block) {
    const TrainMatrix &narrow = job.is_turned ? job.inputs : job.slopes,
                      &wide = job.is_turned ? job.slopes : job.inputs;
    float turned[2][2][LANES * LANES], factors[PANEL];
    const int num_narrow = smaller(PANEL, narrow.width - panel * PANEL),
              num_wide = smaller(PANEL, wide.width - block * PANEL);
    for (float& factor : factors) factor = 1.0f;
    if (!job.is_turned) {
        put_rows(c, factors, num_narrow, num_wide, job.grad + (int64_t)panel * PANEL * wide.width + block * PANEL,
                 wide.width);
        return;
    }
    turn_square(c, turned);
    for (int r = 0; r < PANEL; r++)
        for (int i = 0; i < 2; i++) store(c + r * PANEL + i * LANES, load(turned[r / LANES][i] + r % LANES * LANES));
    put_rows(c, factors, num_wide, num_narrow, job.grad + (int64_t)block * PANEL * narrow.width + panel * PANEL,
             narrow.width);
}

// Blocks of the wider side from `first` on, over steps from `from` on: [block][step].
void pack_blocks(const TrainMatrix& wide, int first, int num_blocks, int from, int num_steps, uint8_t* to) {
    // Step by step, so that neighbours in a row are read together.
    for (int step = 0; step < num_steps; step++)
        for (int i = 0; i < num_blocks; i++)
            pack_columns(wide, first + i, from + step, to + ((int64_t)i * num_steps + step) * PANEL_STEP);
}

struct WeightPlan : WeightLayout {
    const TrainWeight& job;
    const TrainMatrix &narrow, &wide;

    WeightPlan(const TrainWeight& job)
        : WeightLayout(job), job(job), narrow(job.is_turned ? job.inputs : job.slopes),
          wide(job.is_turned ? job.slopes : job.inputs) {}
    int chunk_steps(int chunk) const { return smaller(WEIGHT_STEPS, steps - chunk * WEIGHT_STEPS); }
    uint8_t* rows_of(int chunk, int panel) const {
        return job.scratch +
               ((int64_t)chunk * WEIGHT_STEPS * panels + (int64_t)panel * chunk_steps(chunk)) * PANEL_STEP;
    }
    uint8_t* outputs_of(int thread) const {
        return job.scratch + outputs + (int64_t)thread * WEIGHT_BLOCKS * WEIGHT_STEPS * PANEL_STEP;
    }
    float* sums_of(int block, int panel) const { return job.sums + ((int64_t)block * panels + panel) * PANEL_VALUES; }
};

// Some panels of the narrower side.
struct Panels {
    int first, count;
};

// What some steps add to the sums of a few blocks; the last ones write the gradient.
void add_steps(const WeightPlan& plan, int chunk, Panels panels, int first, int num_blocks, const uint8_t* outputs) {
    const int num_steps = plan.chunk_steps(chunk);
    const bool is_first = chunk == 0 && plan.job.is_first, is_last = chunk + 1 == plan.chunks && plan.job.is_last;
    alignas(64) float last[PANEL_VALUES];
    for (int i = 0; i < num_blocks; i++)
        for (int panel = panels.first; panel < panels.first + panels.count; panel++) {
            float *before = plan.sums_of(first + i, panel), *c = is_last ? last : before;
            Ahead next(before + PANEL_VALUES, PANEL_VALUES * sizeof(float), 0, 1, true),
                written = gradient_of(plan.job, panel, first + i);
            panel_product(plan.rows_of(chunk, panel), outputs + (int64_t)i * num_steps * PANEL_STEP, num_steps,
                          is_first ? nullptr : before, c, is_last ? written : next, 2);
            if (is_last) put_weight_grad(plan.job, c, panel, first + i);
        }
}

void weight_gradient(const TrainWeight& job, int thread, int num_threads, Barrier* barrier) {
    const WeightPlan plan(job);
    for (int step = share_of(plan.steps, thread, num_threads); step < share_of(plan.steps, thread + 1, num_threads);
         step++)
        for (int panel = 0; panel < plan.panels; panel++)
            pack_transposed(plan.narrow, panel, step,
                            plan.rows_of(step / WEIGHT_STEPS, panel) + step % WEIGHT_STEPS * PANEL_STEP);
    barrier_wait(barrier, nullptr, 0);
    const int end = share_of(plan.blocks, thread + 1, num_threads);
    for (int chunk = 0; chunk < plan.chunks; chunk++)
        for (int panel = 0; panel < plan.panels; panel += WEIGHT_PANELS)
            for (int first = share_of(plan.blocks, thread, num_threads); first < end; first += WEIGHT_BLOCKS) {
                const int num_blocks = smaller(WEIGHT_BLOCKS, end - first);
                pack_blocks(plan.wide, first, num_blocks, chunk * WEIGHT_STEPS, plan.chunk_steps(chunk),
                            plan.outputs_of(thread));
                add_steps(plan, chunk, {panel, smaller(WEIGHT_PANELS, plan.panels - panel)}, first, num_blocks,
                          plan.outputs_of(thread));
            }
}

}  // namespace
