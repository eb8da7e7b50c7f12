// Norms, gated activations and rotary embeddings of bfloat16 rows, forward and backward, in one trip over memory each.
// Widths are multiples of 16.
#pragma once

#include "train_tiles.h"

namespace {

INLINE const uint16_t* row_of(const TrainMatrix& m, int64_t row) { return m.values + row * m.stride; }

// out = x * scale * weight with scale = 1 / sqrt(mean(x^2) + eps).
void norm_forward(const TrainRows& job, int first, int end) {
    const int width = job.x.width;
    for (int64_t r = first; r < end; r++) {
        const uint16_t* x = row_of(job.x, r);
        uint16_t* out = job.out + r * width;
        F16 squares{};
        for (int i = 0; i < width; i += LANES) squares = multiply_add(from_bf16(x + i), from_bf16(x + i), squares);
        const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + job.eps);
        job.scales[r] = scale;
        for (int i = 0; i < width; i += LANES) {
            const F16 unit = from_bf16(x + i) * scale;
            store_bf16(out + i, job.weight ? unit * load(job.weight + i) : unit);
        }
    }
}

// What a row's slopes give by its norm's input, and, added to `sums`, by its weight.
void norm_back_row(const TrainRows& job, int64_t r, float* sums) {
    const int width = job.x.width;
    const uint16_t *x = row_of(job.x, r), *slope = row_of(job.slopes, r);
    const float scale = job.scales[r];
    F16 common{};
    for (int i = 0; i < width; i += LANES) {
        const F16 product = from_bf16(slope + i) * from_bf16(x + i);
        if (job.weight) {
            store(sums + i, multiply_add(product, splat(scale), load(sums + i)));
            common = multiply_add(product, load(job.weight + i), common);
        } else {
            common += product;
        }
    }
    const float mean = sum_lanes(common) * scale * scale / (float)width;
    for (int i = 0; i < width; i += LANES) {
        const F16 plain = from_bf16(slope + i), own = job.weight ? plain * load(job.weight + i) : plain;
        store_bf16(job.out + r * width + i, (own - from_bf16(x + i) * mean) * scale);
    }
}

// Sums of the weight's gradient are made panel by panel, so that they do not depend on the number of threads.
void norm_back(const TrainRows& job, int thread, int num_threads, Barrier* barrier) {
    const int width = job.x.width, panels = panels_of(job.x.num_rows);
    for (int panel = share_of(panels, thread, num_threads); panel < share_of(panels, thread + 1, num_threads);
         panel++) {
        float* sums = job.weight ? job.weight_sums + (int64_t)panel * width : nullptr;
        if (sums) __builtin_memset(sums, 0, width * sizeof(float));
        for (int r = panel * PANEL; r < smaller((panel + 1) * PANEL, job.x.num_rows); r++) norm_back_row(job, r, sums);
    }
    barrier_wait(barrier, nullptr, 0);
    if (!job.weight || thread) return;
    for (int i = 0; i < width; i += LANES) {
        F16 sum{};
        for (int panel = 0; panel < panels; panel++) sum += load(job.weight_sums + (int64_t)panel * width + i);
        store(job.weight_grad + i, sum);
    }
}

INLINE F16 sigmoid(F16 x) { return reciprocal(1.0f + power_of_two(minimum(x * -LOG2_E, splat(126.0f)))); }

// out = silu(gate) * up, the row being gate and up.
void gate_forward(const TrainRows& job, int first, int end) {
    const int width = job.x.width / 2;
    for (int64_t r = first; r < end; r++)
        for (int i = 0; i < width; i += LANES) {
            const F16 gate = from_bf16(row_of(job.x, r) + i), up = from_bf16(row_of(job.x, r) + width + i);
            store_bf16(job.out + r * width + i, gate * sigmoid(gate) * up);
        }
}

void gate_back(const TrainRows& job, int first, int end) {
    const int width = job.x.width / 2;
    for (int64_t r = first; r < end; r++)
        for (int i = 0; i < width; i += LANES) {
            const F16 gate = from_bf16(row_of(job.x, r) + i), up = from_bf16(row_of(job.x, r) + width + i);
            const F16 slope = from_bf16(row_of(job.slopes, r) + i), share = sigmoid(gate);
            uint16_t* out = job.out + r * job.x.width + i;
            store_bf16(out, slope * up * share * (1.0f + gate * (1.0f - share)));
            store_bf16(out + width, slope * gate * share);
        }
}

// Heads turned by their rows' angles: out = x * cos + (x, halves exchanged) * sin, the sine's sign in the table.
// Backward is the same with the opposite sine.
void rotate_rows(const TrainRows& job, int first, int end, float sign) {
    const int width = job.head_width, half = width / 2;
    for (int64_t r = first; r < end; r++) {
        const uint16_t *cos = job.cos + r * width, *sin = job.sin + r * width;
        for (int h = 0; h < job.x.width; h += width)
            for (int i = 0; i < width; i += LANES) {
                const uint16_t* x = row_of(job.x, r) + h;
                const F16 other = from_bf16(x + (i < half ? i + half : i - half)) * from_bf16(sin + i) * sign;
                store_bf16(job.out + r * job.x.width + h + i,
                           multiply_add(from_bf16(x + i), from_bf16(cos + i), other));
            }
    }
}

void run_rows(const TrainRows& job, int kind, int thread, int num_threads, Barrier* barrier) {
    const int first = share_of(job.x.num_rows, thread, num_threads),
              end = share_of(job.x.num_rows, thread + 1, num_threads);
    switch (kind) {
        case ROWS_NORM: return norm_forward(job, first, end);
        case ROWS_NORM_BACK: return norm_back(job, thread, num_threads, barrier);
        case ROWS_GATE: return gate_forward(job, first, end);
        case ROWS_GATE_BACK: return gate_back(job, first, end);
        case ROWS_ROTATE: return rotate_rows(job, first, end, 1.0f);
        case ROWS_ROTATE_BACK: return rotate_rows(job, first, end, -1.0f);
    }
}

}  // namespace
