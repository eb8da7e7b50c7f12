// The C interface of the library: plain structures that Python fills through ctypes, and a handful of functions.
//
// Everything is addressed in tiles of 1 KiB: 16 rows of 64 bytes. A "step" is 64 bytes along the inner dimension of a
// product: 32 bfloat16 or 64 int8 values. A "block" is 32 outputs of a matrix.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define OUTRIDER_EXPORT extern "C"
#else
#define OUTRIDER_EXPORT extern "C" __attribute__((visibility("default")))
#endif

extern "C" {

enum { FORMAT_BF16, FORMAT_INT8, FORMAT_INT4 };

// A matrix packed once: [block][step][2 tiles][16 rows of 4 bytes x 16 outputs]; in 4 bits as product_int4.h says.
struct OutriderMatrix {
    const uint8_t* weights;
    const float* scales;  // one per output (int8), else null
    int32_t num_blocks;
    int32_t num_steps;    // in 4 bits: of 64 inputs
    int32_t format;
    int32_t group_parts;  // 32-input parts of a group (4 bits)
};

struct OutriderLayer {
    const float* attention_norm;  // padded with zeros to hidden_padded
    OutriderMatrix qkv;
    OutriderMatrix out;
    const float* feed_forward_norm;
    OutriderMatrix gate_up;
    OutriderMatrix down;
};

struct OutriderModel {
    int32_t num_layers;
    int32_t hidden;
    int32_t hidden_padded;  // to a multiple of 64, like every inner dimension
    int32_t inner_padded;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_width;
    int32_t vocab_size;
    int32_t format;  // of the layers' matrices; the LM head of a 4-bit model is int8
    float norm_eps;
    const uint16_t* embedding;  // bfloat16 [vocab_size][hidden]
    const OutriderLayer* layers;
    const float* final_norm;
    OutriderMatrix head;
    const float* cosines;  // by position: [positions][half of the head width, padded to 16]
    const float* sines;

    // Of a drafter's head; zeros for a target. The first layer's query/key/value matrix reads the embedded token, normed by
    // `side_norm`, and beside it the normed stream, either padded to hidden_padded.
    const float* side_norm;
    int32_t norm_inputs;  // the stream starts as the first layer's norm of what the pass brings
    OutriderMatrix fuse;  // makes the stream of a pass's `inputs`, if that pass says so
    const float* fuse_bias;  // padded like a norm, or null
    int32_t split_rows;      // rows of all int8 products are split, as those of the gated product always are

    // Of a rotated stream (models/rotation.py): how taps are turned back. Zeros where it is not rotated.
    const float* rotation_signs;    // [hidden], the Hadamard transform's scale taken in
    const float* rotation_cosines;  // [hidden / power][hidden / power]
    int32_t rotation_power;
};

// The rows that one sequence brings to a pass. `cache` holds [layer][kv head][keys, values] of `capacity` positions.
struct OutriderSegment {
    uint8_t* cache;
    int64_t capacity;  // a multiple of 128
    int32_t base;      // positions cached before the pass
    int32_t start;     // first packed row
    int32_t num_rows;
    const int32_t* parents;  // null for a chain; else the parent row inside the segment, -1 for row 0
    // Nodes of this tree that earlier passes have cached behind `base`. They come first in `parents`, which then counts
    // them too, and bring no rows; the segment's rows are cached behind them. Several nodes may have parent -1.
    int32_t num_cached_nodes;
};

struct OutriderPass {
    int32_t num_rows;
    int32_t num_segments;
    const int64_t* tokens;
    const int64_t* positions;  // of the rotary embedding
    const OutriderSegment* segments;
    int32_t num_logit_rows;
    const int32_t* logit_rows;
    float* logits;    // [num_logit_rows][vocab_size], or null
    int64_t* argmax;  // [num_logit_rows], or null; ties go to the lowest id
    int32_t num_taps;
    const int32_t* tap_layers;
    float* taps;  // [num_taps][num_rows][hidden], never rotated
    int64_t* phase_ns;  // [NUM_PHASES], or null: where thread 0's time went, waits included
    const float* inputs;  // what starts the stream instead of the embedded tokens, or null: [num_rows][hidden]
    int32_t is_fused;     // `inputs` are [num_rows][inputs of model.fuse, padded to 64], which makes the stream of them
    int32_t num_top;      // at most MOST_TOP; 0 for none. Needs `logits`
    int64_t* top_ids;     // [num_logit_rows][num_top], the largest first, of equals the lowest id
    float* top_logprobs;  // of the softmax over all of the row's logits
};

enum { MOST_TOP = 64 };

// A draft tree of one sequence: all candidates, in the order in which they are proposed. They have room for the `num_top`
// children of the root and of `width` nodes on each further level.
struct OutriderGrowth {
    uint8_t* cache;  // of the head; nodes are cached behind `base`
    int64_t capacity;
    int32_t base;
    int32_t depth;     // levels, at least 1
    int64_t position;  // of the first level's nodes
    int64_t* tokens;   // ids of the target
    int32_t* parents;  // -1 for a child of the root
    double* scores;    // log-probability of the path to the node
    int32_t num_candidates;  // 0 before
};

struct OutriderForest {
    int32_t num_trees;
    int32_t width;  // nodes expanded on a level
    OutriderGrowth* trees;
    const int64_t* target_ids;  // [vocab_size] of the head's own ids
    double min_score;  // candidates that score less are left out
    double min_level;  // a tree ends where the nodes to be expanded score less, all together
};

enum { MOST_DRAWN = 32 };  // candidates of a row's draw

// How top_k (is_whole, `count` is k) or top_p alone cuts a row.
struct HeadCut {
    int32_t count;
    int32_t is_whole;
    double top_p;
};

enum { HEAD_OPEN = -1, HEAD_MISSING = -2 };

enum { PHASE_QKV, PHASE_ATTENTION, PHASE_OUT, PHASE_GATE_UP, PHASE_DOWN, PHASE_HEAD, NUM_PHASES };

struct OutriderContext;
}
