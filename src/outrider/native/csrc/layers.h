// The pass itself, as every thread runs it: between two waits at the barrier, each thread fills its own share.
//
// Five waits a layer: behind query/key/value, attention, its output matrix, gate/up, down. Operand rows (norms,
// quantisation) are prepared by every thread for itself while rows are few, because that is cheaper than a sixth wait.
#pragma once

#include <time.h>

#include "attention.h"
#include "operands.h"
#include "product.h"
#include "rank.h"
#include "unrotate.h"
#include "work.h"

namespace {

// Blocks are shared out evenly and beforehand, so that each thread reads one stretch of memory; but cores are never
// equally fast, so who is done takes blocks from the end of the others' shares.
constexpr int MATRICES_OF_LAYER = 4;

// Behind all matrices, the LM head and the fused one.
int attention_share(const OutriderModel& model, int layer) { return model.num_layers * MATRICES_OF_LAYER + 2 + layer; }

void fill_share(const Turn& turn, int matrix, int num_blocks) {
    const uint64_t first = turn.share(num_blocks), end = turn.end_of_share(num_blocks);
    turn.w.shares[matrix * turn.w.num_threads + turn.thread].range = end << 32 | first;
}

void fill_shares(const Turn& turn) {
    const OutriderModel& model = *turn.w.model;
    for (int i = 0; i < model.num_layers; i++) {
        const OutriderLayer& layer = model.layers[i];
        const OutriderMatrix* matrices[] = {&layer.qkv, &layer.out, &layer.gate_up, &layer.down};
        for (int m = 0; m < MATRICES_OF_LAYER; m++) fill_share(turn, i * MATRICES_OF_LAYER + m, matrices[m]->num_blocks);
    }
    fill_share(turn, model.num_layers * MATRICES_OF_LAYER, model.head.num_blocks);
    if (turn.w.pass->is_fused) fill_share(turn, model.num_layers * MATRICES_OF_LAYER + 1, model.fuse.num_blocks);
    for (int i = 0; i < model.num_layers; i++) fill_share(turn, attention_share(model, i), turn.w.num_units);
}

// The next block of a share, its first (own) or its last (another's); -1 if there is none.
int take_from(Share& share, bool own) {
    uint64_t range = __atomic_load_n(&share.range, __ATOMIC_RELAXED);
    for (;;) {
        const uint32_t first = (uint32_t)range, end = (uint32_t)(range >> 32);
        if (first >= end) return -1;
        const uint64_t rest = own ? range + 1 : range - (1ull << 32);
        if (__atomic_compare_exchange_n(&share.range, &range, rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return own ? first : end - 1;
    }
}

int take_block(const Turn& turn, int matrix) {
    Share* shares = turn.w.shares + matrix * turn.w.num_threads;
    int block = take_from(shares[turn.thread], true);
    for (int i = 1; block < 0 && i < turn.w.num_threads; i++)
        block = take_from(shares[(turn.thread + i) % turn.w.num_threads], false);
    return block;
}

// Charges the time since the last call to a phase; for the roofline table, off otherwise.
struct Stopwatch {
    int64_t* phases;
    int64_t since = 0;

    Stopwatch(const Work& w, int thread) : phases(thread == 0 ? w.pass->phase_ns : nullptr) { charge(0, 0); }
    void charge(int phase, int times = 1) {
        if (!phases) return;
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t ns = now.tv_sec * 1000000000ll + now.tv_nsec;
        phases[phase] += (ns - since) * times;
        since = ns;
    }
};

INLINE int64_t block_bytes(const OutriderMatrix& m) {
    if (m.format == FORMAT_INT4) return 2 * int4_tile_bytes(2 * m.num_steps, m.group_parts);
    return (int64_t)m.num_steps * 2 * TILE_BYTES;
}

// How far ahead of the product weights are fetched (8 KiB), and how much of the next matrix while waiting.
constexpr int AHEAD_STEPS = 4;
constexpr int64_t AHEAD_WAITING = 64 * 1024;

// Where this thread's share of a matrix begins.
INLINE const uint8_t* share_of_matrix(const Turn& turn, const OutriderMatrix& m) {
    return m.weights + turn.share(m.num_blocks) * block_bytes(m);
}

// A matrix of the pass, and the memory that this thread reads behind it.
struct Stage {
    int index;
    const OutriderMatrix* matrix;
    const uint8_t* after;
};

// One block for one group of rows, scaled to float32.
INLINE void multiply_block(const Turn& turn, const OutriderMatrix& m, const Product& p, int block, const Operand& a, int row) {
    float* c = turn.space.c;
    if (m.format == FORMAT_BF16) {
        product_bf16(p);
        return;
    }
    product_int8(p);
    if (a.form == Form::split)
        scale_split_sums(c, p.num_rows / 2, m.scales + block * BLOCK, a.scales + row);
    else
        scale_sums(c, p.num_rows, m.scales + block * BLOCK, a.scales + row);
}

// The same in 4 bits. Only the first group of rows fetches the next block.
INLINE void multiply_int4(const Turn& turn, const OutriderMatrix& m, const Operand& a, const uint8_t* b, int row, int rows,
                          const uint8_t* ahead) {
    const GroupProduct p{a.tiles + row * STEP_BYTES, a.step,        a.scales + row * a.scale_stride,
                         a.scale_stride,             b,             2 * m.num_steps,
                         m.group_parts,              rows,          turn.space.c,
                         BLOCK,                      ahead};
    product_int4(p);
}

// The rows times this thread's share of the matrix; `finish(block, first_row, num_rows, c)` takes 32 x 32 results.
//
// All rows pass by while a block of weights is in the cache, so weights are read from memory once. Meanwhile what comes
// next is fetched: with one group of rows the weights 8 KiB ahead; with several, each group fetches its part of the next
// block. Behind the share's last block comes what the stage names.
template <class Finish>
void multiply(const Turn& turn, const Stage& stage, const Operand& a, int num_rows, const Finish& finish) {
    const OutriderMatrix& m = *stage.matrix;
    const int last = turn.end_of_share(m.num_blocks) - 1;
    const int64_t bytes = block_bytes(m);
    const uint8_t* after = stage.after;
    const bool split = a.form == Form::split, is_int4 = m.format == FORMAT_INT4;
    const int group_rows = split ? ROW_TILE : 2 * ROW_TILE;
    const int num_groups = (num_rows + group_rows - 1) / group_rows;
    float* c = turn.space.c;
    if (is_int4) begin_int4(m.group_parts, num_rows);
    for (int block = take_block(turn, stage.index); block >= 0; block = take_block(turn, stage.index)) {
        const uint8_t* b = m.weights + block * bytes;
        const uint8_t* next_block = block != last ? b + bytes : after;
        for (int group = 0; group < num_groups; group++) {
            const int row = group * group_rows, rows = num_rows - row < group_rows ? num_rows - row : group_rows;
            if (is_int4) {
                multiply_int4(turn, m, a, b, row, rows, group ? nullptr : next_block);
                finish(block, row, rows, c);
                continue;
            }
            Product p{a.tiles + group * 2 * ROW_TILE * STEP_BYTES, a.step, b, 2 * TILE_BYTES, TILE_BYTES, m.num_steps,
                      split ? 2 * rows : rows, c, BLOCK};
            p.ahead_step = 2 * TILE_BYTES / num_groups / 64 * 64;
            p.turn = num_groups == 1 ? m.num_steps - AHEAD_STEPS : 0;
            p.ahead = b + AHEAD_STEPS * 2 * TILE_BYTES;
            p.ahead_after = next_block + (group * m.num_steps - p.turn) * p.ahead_step;
            multiply_block(turn, m, p, block, a, row);
            finish(block, row, rows, c);
        }
    }
    if (is_int4) end_int4(m.group_parts, num_rows);
    turn.wait(after, AHEAD_WAITING);
}

bool is_split(const OutriderModel& model, const OutriderMatrix& m) { return model.split_rows && m.format == FORMAT_INT8; }

Operand normed(const Turn& turn, const float* weight, const OutriderMatrix& m) {
    const OutriderModel& model = *turn.w.model;
    const Layout layout(m, turn.w.pass->num_rows, model.hidden_padded, is_split(model, m));
    return prepare(turn, layout, [&](int row) -> const float* {
        const float* x = turn.w.x + (int64_t)row * model.hidden_padded;
        norm_row(x, weight, model.hidden, model.hidden_padded, model.norm_eps, turn.space.row);
        return turn.space.row;
    });
}

void embed(const OutriderModel& model, int64_t token, float* x) {
    const uint16_t* from = model.embedding + token * model.hidden;
    for (int i = 0; i < model.hidden_padded; i++) {
        const uint32_t bits = i < model.hidden ? (uint32_t)from[i] << 16 : 0;
        __builtin_memcpy(x + i, &bits, 4);
    }
}

// A head's first layer: embedded token and stream side by side, each with its norm.
Operand normed_pair(const Turn& turn, const OutriderLayer& layer) {
    const OutriderModel& model = *turn.w.model;
    const int padded = model.hidden_padded;
    const Layout layout(layer.qkv, turn.w.pass->num_rows, 2 * padded, is_split(model, layer.qkv));
    return prepare(turn, layout, [&](int row) -> const float* {
        const float* x = turn.w.x + (int64_t)row * padded;
        float *embedded = turn.space.row, *normed = turn.space.row + padded;
        embed(model, turn.w.pass->tokens[row], embedded);
        norm_row(embedded, model.side_norm, model.hidden, padded, model.norm_eps, embedded);
        if (model.norm_inputs)
            __builtin_memcpy(normed, x, padded * sizeof(float));
        else
            norm_row(x, layer.attention_norm, model.hidden, padded, model.norm_eps, normed);
        return turn.space.row;
    });
}

// What the stream is before anything is added to it.
void start_row(const Work& w, int row, float* x) {
    const OutriderModel& model = *w.model;
    if (!w.pass->inputs) {
        embed(model, w.pass->tokens[row], x);
        return;
    }
    const float* from = w.pass->is_fused ? model.fuse_bias : w.pass->inputs + (int64_t)row * model.hidden;
    for (int i = 0; i < model.hidden_padded; i++) x[i] = from && i < model.hidden ? from[i] : 0.0f;
}

void tap(const Turn& turn, int layer) {
    const Work& w = turn.w;
    const OutriderPass& pass = *w.pass;
    for (int i = 0; i < pass.num_taps; i++) {
        if (pass.tap_layers[i] != layer) continue;
        for (int row = turn.share(pass.num_rows); row < turn.end_of_share(pass.num_rows); row++) {
            float* to = pass.taps + ((int64_t)i * pass.num_rows + row) * w.model->hidden;
            __builtin_memcpy(to, w.x + (int64_t)row * w.model->hidden_padded, w.model->hidden * sizeof(float));
            if (w.model->rotation_signs) unrotate_row(*w.model, to, turn.space.row);
        }
    }
}

// Block of the fused matrix: heads in order (queries, keys, values), half_blocks blocks each. A block of a query or key
// head holds 16 dimensions and their 16 partners, so it can be rotated where it is; one of values 32 dimensions.
void place_heads(const Turn& turn, int layer, int block, int first_row, int num_rows, const float* c) {
    const Work& w = turn.w;
    const OutriderModel& model = *w.model;
    const int head = block / w.half_blocks, j = block % w.half_blocks;
    const int table_width = w.half_blocks * LANES;
    for (int r = 0; r < num_rows; r++, c += BLOCK) {
        const int row = first_row + r;
        const RowPlace& place = w.places[row];
        if (head >= model.num_heads + model.num_kv_heads) {
            const int group = head - model.num_heads - model.num_kv_heads;
            uint8_t* values = place.cache + keys_offset(w, layer, group, place.capacity) + side_bytes(w, place.capacity);
            uint16_t halves[BLOCK];
            store_bf16(halves, load(c));
            store_bf16(halves + LANES, load(c + LANES));
            for (int tile = 0; tile < 2; tile++) {
                uint8_t* to = value_half(values, w.half_blocks, place.place, j * BLOCK + tile * LANES);
                for (int i = 0; i < LANES; i++) __builtin_memcpy(to + i * 4, halves + tile * LANES + i, 2);
            }
            continue;
        }
        const int64_t angle = w.pass->positions[row] * table_width + j * LANES;
        const U16 pairs = rotated_pairs(c, model.cosines + angle, model.sines + angle);
        if (head < model.num_heads) {
            const int group = head / w.members, member = head % w.members;
            const int64_t query = ((int64_t)group * w.pass->num_rows + row) * w.members + member;
            __builtin_memcpy(w.queries + query * w.width + j * BLOCK, &pairs, sizeof pairs);
        } else {
            uint8_t* keys = place.cache + keys_offset(w, layer, head - model.num_heads, place.capacity);
            uint8_t* to = key_word(keys, w.half_blocks, place.place, j * LANES);
            for (int i = 0; i < LANES; i++) {
                const uint32_t word = pairs[i];
                __builtin_memcpy(to + i * 64, &word, 4);
            }
        }
    }
}

void add_to_stream(const Turn& turn, int block, int first_row, int num_rows, const float* c) {
    const int width = turn.w.model->hidden_padded;
    float* x = turn.w.x + (int64_t)first_row * width + block * BLOCK;
    for (int r = 0; r < num_rows; r++, c += BLOCK, x += width) {
        store(x, load(x) + load(c));
        store(x + LANES, load(x + LANES) + load(c + LANES));
    }
}

template <class Each>
void for_own_rows(const Turn& turn, const Each& each) {
    const int num_rows = turn.w.pass->num_rows, padded = turn.w.model->hidden_padded;
    for (int row = turn.share(num_rows); row < turn.end_of_share(num_rows); row++)
        each(row, turn.w.x + (int64_t)row * padded);
    turn.wait();
}

void start_stream(const Turn& turn) {
    const Work& w = turn.w;
    const OutriderModel& model = *w.model;
    for_own_rows(turn, [&](int row, float* x) { start_row(w, row, x); });
    if (w.pass->is_fused) {
        const int width = inputs_of(model.fuse), num_rows = w.pass->num_rows;
        const Stage fuse{model.num_layers * MATRICES_OF_LAYER + 1, &model.fuse,
                         share_of_matrix(turn, model.layers[0].qkv)};
        const Operand a = prepare(turn, Layout(model.fuse, num_rows, width),
                                  [&](int row) { return w.pass->inputs + (int64_t)row * width; });
        multiply(turn, fuse, a, num_rows,
                 [&](int block, int row, int rows, const float* c) { add_to_stream(turn, block, row, rows, c); });
    }
    if (!model.norm_inputs) return;
    for_own_rows(turn, [&](int, float* x) {
        norm_row(x, model.layers[0].attention_norm, model.hidden, model.hidden_padded, model.norm_eps, x);
    });
}

// A block holds 16 outputs of the gate and the same 16 of up.
void gate_block(const Turn& turn, int block, int first_row, int num_rows, const float* c) {
    const Work& w = turn.w;
    const int64_t step = (int64_t)padded_to(w.pass->num_rows, ROW_TILE) * STEP_BYTES;
    for (int r = 0; r < num_rows; r++, c += BLOCK) {
        const int64_t row = first_row + r;
        const F16 gated = silu(load(c)) * load(c + LANES);
        if (w.model->format != FORMAT_BF16)
            store((float*)w.inner + row * w.model->inner_padded + block * LANES, gated);
        else
            store_bf16(w.inner + block / 2 * step + row * STEP_BYTES + block % 2 * 32, gated);
    }
}

Operand inner_rows(const Turn& turn, const OutriderMatrix& m) {
    const Work& w = turn.w;
    const Layout layout(m, w.pass->num_rows, w.model->inner_padded, m.format == FORMAT_INT8);
    if (m.format == FORMAT_BF16) return {w.inner, layout.step(), nullptr};
    const int width = w.model->inner_padded;
    const float* inner = (const float*)w.inner;
    return prepare(turn, layout, [&](int row) { return inner + (int64_t)row * width; });
}

// Where the keys lie that this thread reads first; if none, where another does.
const uint8_t* first_keys(const Turn& turn, int layer) {
    const Work& w = turn.w;
    const Unit& unit = w.units[turn.share(w.num_units) % w.num_units];
    return keys_of_unit(w, layer, unit) + side_bytes(w, unit.first_chunk * CHUNK);
}

void attend(const Turn& turn, int layer) {
    const Work& w = turn.w;
    const int share = attention_share(*w.model, layer), first = turn.share(w.num_units), end = turn.end_of_share(w.num_units);
    for (int unit = take_block(turn, share); unit >= 0; unit = take_block(turn, share)) {
        const bool is_own = first <= unit && unit + 1 < end;
        attend_unit(w, turn.space, layer, w.units[unit], is_own ? w.units + unit + 1 : nullptr);
    }
}

void run_layer(const Turn& turn, Stopwatch& watch, int layer) {
    const Work& w = turn.w;
    const OutriderLayer& weights = w.model->layers[layer];
    const OutriderMatrix& behind = layer + 1 < w.model->num_layers ? w.model->layers[layer + 1].qkv : w.model->head;
    const int num_rows = w.pass->num_rows, first = layer * MATRICES_OF_LAYER;
    const Stage qkv{first, &weights.qkv, first_keys(turn, layer)};
    const Stage out{first + 1, &weights.out, share_of_matrix(turn, weights.gate_up)};
    const Stage gate_up{first + 2, &weights.gate_up, share_of_matrix(turn, weights.down)};
    const Stage down{first + 3, &weights.down, share_of_matrix(turn, behind)};
    const auto add = [&](int block, int row, int rows, const float* c) { add_to_stream(turn, block, row, rows, c); };

    tap(turn, layer);
    const bool is_pair = layer == 0 && w.model->side_norm;
    Operand a = is_pair ? normed_pair(turn, weights) : normed(turn, weights.attention_norm, weights.qkv);
    multiply(turn, qkv, a, num_rows, [&](int block, int row, int rows, const float* c) {
        place_heads(turn, layer, block, row, rows, c);
    });
    watch.charge(PHASE_QKV);
    attend(turn, layer);
    turn.wait(share_of_matrix(turn, weights.out), AHEAD_WAITING);
    watch.charge(PHASE_ATTENTION);
    const Layout attended(weights.out, num_rows, w.attended, is_split(*w.model, weights.out));
    a = prepare(turn, attended, [&](int row) -> const float* {
        join_row(w, row, turn.space.state, turn.space.row);
        return turn.space.row;
    });
    multiply(turn, out, a, num_rows, add);
    watch.charge(PHASE_OUT);
    a = normed(turn, weights.feed_forward_norm, weights.gate_up);
    multiply(turn, gate_up, a, num_rows,
             [&](int block, int row, int rows, const float* c) { gate_block(turn, block, row, rows, c); });
    watch.charge(PHASE_GATE_UP);
    multiply(turn, down, inner_rows(turn, weights.down), num_rows, add);
    watch.charge(PHASE_DOWN);
}

// Ties go to the lowest id; blocks come in any order.
INLINE bool is_better(float value, int64_t id, float best, int64_t best_id) {
    return value > best || (value == best && id < best_id);
}

// Logits of one block of the vocabulary: written if anybody reads them, and compared with the best so far.
void head_block(const Turn& turn, int block, int first_row, int num_rows, const float* c) {
    const OutriderPass& pass = *turn.w.pass;
    const int first = block * BLOCK, vocab_size = turn.w.model->vocab_size;
    const int count = vocab_size - first < BLOCK ? vocab_size - first : BLOCK;
    for (int r = 0; r < num_rows; r++, c += BLOCK) {
        const int64_t row = first_row + r;
        if (pass.logits) __builtin_memcpy(pass.logits + row * vocab_size + first, c, count * sizeof(float));
        if (!pass.argmax) continue;
        const F16 lowest = splat(-__builtin_inff());
        F16 both = maximum(load(c), load(c + LANES));
        if (count < BLOCK)
            both = maximum(select(lanes() < count, load(c), lowest), select(lanes() + LANES < count, load(c + LANES), lowest));
        // Equal logits in a later block matter only where blocks come out of order.
        const float best = turn.space.best[row];
        if (!any_above(both, best) && first > turn.space.best_id[row]) continue;
        const float most = max_lanes(both);
        if (!is_better(most, first, best, turn.space.best_id[row])) continue;
        int at = 0;
        while (c[at] != most) at++;
        turn.space.best[row] = most;
        turn.space.best_id[row] = first + at;
    }
}

void run_head(const Turn& turn) {
    const Work& w = turn.w;
    const OutriderModel& model = *w.model;
    const OutriderPass& pass = *w.pass;
    const int num_rows = pass.num_logit_rows;
    for (int row = 0; row < num_rows; row++) {
        turn.space.best[row] = -__builtin_inff();
        turn.space.best_id[row] = model.vocab_size - 1;
    }
    // The stream of a 4-bit model is not rotated, and its outliers cost the head too much accuracy in one int8 row.
    const bool split = model.format == FORMAT_INT4 || is_split(model, model.head);
    const Layout layout(model.head, num_rows, model.hidden_padded, split);
    const Operand a = prepare(turn, layout, [&](int row) -> const float* {
        const float* x = w.x + (int64_t)pass.logit_rows[row] * model.hidden_padded;
        norm_row(x, model.final_norm, model.hidden, model.hidden_padded, model.norm_eps, turn.space.row);
        return turn.space.row;
    });
    const Stage head{model.num_layers * MATRICES_OF_LAYER, &model.head, share_of_matrix(turn, model.layers[0].qkv)};
    multiply(turn, head, a, num_rows,
             [&](int block, int row, int rows, const float* c) { head_block(turn, block, row, rows, c); });
    if (pass.num_top)
        for (int row = turn.share(num_rows); row < turn.end_of_share(num_rows); row++) rank_row(pass, model.vocab_size, row);
    if (!pass.argmax) return;
    for (int row = turn.share(num_rows); row < turn.end_of_share(num_rows); row++) {
        const Space* best = &w.spaces[0];
        for (int t = 1; t < w.num_threads; t++)
            if (is_better(w.spaces[t].best[row], w.spaces[t].best_id[row], best->best[row], best->best_id[row]))
                best = &w.spaces[t];
        pass.argmax[row] = best->best_id[row];
    }
}

void run_pass(const Work& w, int thread) {
    begin_thread();
    const Turn turn{w, w.spaces[thread], thread};
    fill_shares(turn);
    start_stream(turn);
    Stopwatch watch(w, thread);
    for (int layer = 0; layer < w.model->num_layers; layer++) run_layer(turn, watch, layer);
    tap(turn, w.model->num_layers);
    if (w.pass->num_logit_rows > 0) run_head(turn);
    watch.charge(PHASE_HEAD);
    end_thread();
}

}  // namespace
