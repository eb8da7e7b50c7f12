// What training asks of an instruction set: jobs as Python fills them, and the functions that do them.
//
// Operands of all products are tiles of 1 KiB as everywhere in this library, in two arrangements ("panels" of 32 rows,
// "blocks" of 32 outputs), either of them a whole matrix padded with zeros:
//   rows     [panel][step of 32 inputs][32 rows][32 inputs]
//   outputs  [block][step of 32 inputs][2 tiles][16 pairs of inputs][16 outputs][2]
#pragma once

#include <cstdint>

#include "work.h"

// bfloat16, `stride` values from row to row.
struct TrainMatrix {
    const uint16_t* values;
    int64_t stride;
    int32_t num_rows;
    int32_t width;
};

// Logits of some rows, kept as exponentials e = exp(logit - a shift of the row's), and from them both gradients.
struct TrainLoss {
    TrainMatrix hidden;    // [num_rows][width]
    const float* head;     // [num_outputs][width]
    int32_t num_outputs, width;
    uint8_t* packed_head;  // outputs of head, then of its transpose in chunks, then 32 rows for each thread
    uint8_t* scratch;      // loss_bytes
    int64_t num_law_tokens;
    const int64_t* law_ids;  // [num_rows][num_law_tokens]
    float* picked;           // out: e at law_ids
    float* shifts;           // out: the logit of each row that e is relative to
    float* sums;             // out: of each row's e
    const float* pulls;      // in: what is taken from the probabilities at law_ids
    const float* scales;     // in: factor of each row's gradient
    uint16_t* hidden_grad;   // out: [num_rows][width]
    float* head_grad;        // out: [num_outputs][width], written by the last piece
    float* head_sums;        // sums so far, in tiles
    int32_t is_first, is_last;
};

constexpr int PANEL = 32;
constexpr int PANEL_STEP = 2 * TILE_BYTES;  // one step of a panel, or of a block
constexpr int PANEL_VALUES = PANEL * PANEL;
constexpr int CHUNK_STEPS = 16;  // of the sum over outputs: what is read again and again stays in the second cache
constexpr int CHUNK_PANELS = 8;  // rows that share it
constexpr int POWER_SKEW = 16;   // steps between panels, lest all their beginnings fall on the same sets of a cache

static inline int panels_of(int64_t count) { return (int)((count + PANEL - 1) / PANEL); }

// How a piece's scratch memory is divided, in bytes: exponentials, hidden rows, the same transposed, sums and
// shifts of rows, and what each thread has of its own (partial sums of hidden gradients, or operand outputs).
struct LossLayout {
    int steps, blocks, panels;
    int64_t power_stride, rows, columns, state, own, own_bytes;

    LossLayout(int64_t num_rows, int64_t width, int64_t num_outputs)
        : steps(panels_of(width)), blocks(panels_of(num_outputs)), panels(panels_of(num_rows)),
          power_stride((int64_t)(blocks + POWER_SKEW) * PANEL_STEP) {
        const int64_t hidden_bytes = (int64_t)panels * steps * PANEL_STEP;
        rows = panels * power_stride;
        columns = rows + hidden_bytes;
        state = columns + hidden_bytes;
        own = state + (int64_t)panels * PANEL * 17 * 4;
        const int64_t sums = (int64_t)CHUNK_PANELS * steps * PANEL_VALUES * 4, outputs = (int64_t)panels * PANEL_STEP;
        own_bytes = sums > outputs ? sums : outputs;
    }
};

// One packed text of a batch.
struct TrainSegment {
    int32_t first_key, num_keys;
    int32_t first_query, num_queries;
};

// bfloat16 [rows][heads][head width], `stride` values from row to row.
struct TrainHeads {
    uint16_t* values;
    int64_t stride;
};

constexpr int MOST_OWN = 16;      // later keys and values that a query has of its own
constexpr int MOST_MEMBERS = 16;  // query heads of a kv head
constexpr int MOST_WIDTH = 256;   // of a head

// Attention of an unroll step: each query sees the keys of its text up to its own index, and keys of its own.
struct TrainAttention {
    int32_t num_heads, num_kv_heads, head_width, num_own;
    float scale;  // of scores
    int32_t num_segments;
    const TrainSegment* segments;  // those that take longest first
    const int32_t* indexes;        // of each query in its text
    int64_t num_queries;           // all, as log_sums counts them
    TrainHeads queries, keys, values, own_keys[MOST_OWN], own_values[MOST_OWN];
    TrainHeads out;
    float* log_sums;  // [num_heads][num_queries], to base 2: written by the forward pass, read by the backward pass
    TrainHeads slopes, query_grad, key_grad, value_grad, own_key_grads[MOST_OWN], own_value_grads[MOST_OWN];
    uint8_t* scratch;  // attention_bytes
    int64_t thread_bytes;
    int32_t next_unit;  // work that no thread has taken yet
};

constexpr int QUERY_PANELS = 2;  // of each query head, that the backward pass takes at a time

// How one thread's scratch memory is divided, for the longest text, in bytes.
struct AttentionLayout {
    int steps, most_blocks, members, rows;  // `rows`: panels that the backward pass takes at a time
    int64_t keys, values, key_columns, queries, slopes, turned_queries, turned_slopes, scores, weights, slope_rows,
        pairs, key_sums, value_sums, mixed, end;

    explicit AttentionLayout(const TrainAttention& job)
        : steps(panels_of(job.head_width)), most_blocks(0), members(job.num_heads / job.num_kv_heads),
          rows(QUERY_PANELS * members) {
        for (int i = 0; i < job.num_segments; i++)
            if (panels_of(job.segments[i].num_keys) > most_blocks) most_blocks = panels_of(job.segments[i].num_keys);
        int64_t at = 0;
        const auto take = [&at](int64_t num_tiles) { return (at += num_tiles * PANEL_STEP) - num_tiles * PANEL_STEP; };
        const int64_t side = (int64_t)most_blocks * steps, panel = (int64_t)rows * steps;
        keys = take(side);
        values = take(side);
        key_columns = take(side);
        queries = take(panel);
        slopes = take(panel);
        turned_queries = take(panel);
        turned_slopes = take(panel);
        scores = take(2 * (most_blocks > 2 ? most_blocks : 2));
        weights = take(most_blocks);
        slope_rows = take((int64_t)rows * most_blocks);
        pairs = take(2 * rows);
        key_sums = take(2 * side);
        value_sums = take(2 * side);
        mixed = take((int64_t)2 * members * steps);
        end = at;
    }
};

enum { ROWS_NORM, ROWS_NORM_BACK, ROWS_GATE, ROWS_GATE_BACK, ROWS_ROTATE, ROWS_ROTATE_BACK };

// Rows that are handled one by one; what a kind does not need is null.
struct TrainRows {
    TrainMatrix x, slopes;
    uint16_t* out;  // or the gradient by x; its rows are contiguous
    const float* weight;
    float eps;
    int32_t head_width;
    float* scales;       // of each row of a norm
    float* weight_sums;  // scratch: [panels of rows][width]
    float* weight_grad;
    const uint16_t *cos, *sin;  // [rows][head_width]
};

// The gradient [slopes.width][inputs.width] of a matrix by which rows are multiplied, one use of it after another.
struct TrainWeight {
    TrainMatrix slopes, inputs;
    uint16_t* grad;  // written at the last use
    float* sums;     // of all uses so far, in tiles: [block][panel]
    int32_t is_first, is_last;
    uint8_t* scratch;   // WeightLayout
    int32_t is_turned;  // the inputs are the narrower
};

constexpr int WEIGHT_STEPS = 40;  // of 32 rows, whose operands stay in the second cache
constexpr int WEIGHT_PANELS = 9;  // of the narrower side, likewise
constexpr int WEIGHT_BLOCKS = 4;  // of the wider side, packed together

// The narrower side in tiles, and each thread's blocks of the wider.
struct WeightLayout {
    int steps, chunks, panels, blocks;
    int64_t outputs;

    explicit WeightLayout(const TrainWeight& job)
        : steps(panels_of(job.inputs.num_rows)), chunks((steps + WEIGHT_STEPS - 1) / WEIGHT_STEPS),
          panels(panels_of(job.is_turned ? job.inputs.width : job.slopes.width)),
          blocks(panels_of(job.is_turned ? job.slopes.width : job.inputs.width)) {
        outputs = (int64_t)steps * panels * PANEL_STEP;
    }
    int64_t bytes(int num_threads) const {
        return outputs + (int64_t)num_threads * WEIGHT_BLOCKS * WEIGHT_STEPS * PANEL_STEP;
    }
};

struct TrainKernels {
    void (*pack_head)(const TrainLoss&, int thread, int num_threads, Barrier*);
    void (*loss_logits)(const TrainLoss&, int thread, int num_threads, Barrier*);
    void (*loss_gradients)(const TrainLoss&, int thread, int num_threads, Barrier*);
    void (*attend)(TrainAttention&, int thread);
    void (*attend_back)(TrainAttention&, int thread);
    void (*rows)(const TrainRows&, int kind, int thread, int num_threads, Barrier*);
    void (*weight_gradient)(const TrainWeight&, int thread, int num_threads, Barrier*);
};
