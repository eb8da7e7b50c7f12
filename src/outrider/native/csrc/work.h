// The state of one pass, shared by all threads.
#pragma once

#include <cstdint>

#include "abi.h"

// Keys are attended to in chunks whose borders are absolute positions, so that a row's arithmetic depends on its own
// position only.
constexpr int CHUNK = 128;
constexpr int KEY_BLOCK = 32;
constexpr int ROW_TILE = 16;
constexpr int QUERY_ROWS = 2 * ROW_TILE;
constexpr int TILE_BYTES = 1024;
constexpr int STEP_BYTES = 64;
constexpr int QUERY_STEP = QUERY_ROWS * STEP_BYTES;
constexpr int BLOCK = 32;

struct RowPlace {
    uint8_t* cache;
    int64_t capacity;
    int32_t place;  // where its key and value are written
    int32_t last;   // the last position it sees, itself
    int32_t trunk;  // chunks, from the first on, whose results are joined already in the row's part 0
};

// Partial results of a row: its trunk, then each further chunk.
static inline int parts_of_row(const RowPlace& place) {
    const int chunks = place.last / CHUNK + 1;
    return chunks <= place.trunk ? 1 : chunks - place.trunk + 1;
}

// Rows of one sequence that lie on one path from root to leaf. `nodes[i]` is the row (inside the segment) that stands at
// position base + i of that path; null when that is row i itself, as in a chain: then the cache is read where it lies.
struct Path {
    const uint8_t* cache;
    int64_t capacity;
    int32_t base;
    const int32_t* nodes;
    int32_t num_nodes;
    const int32_t* rows;  // packed rows that are attended to along this path
    int32_t num_rows;
    int32_t first_chunk;  // chunks before it are attended to on another path, the trunk of the tree
    int32_t end_chunk;
};

// What one thread attends to at a time: up to 32 query rows of one kv head over chunks [first_chunk, end_chunk).
struct Unit {
    const Path* path;
    int32_t group;
    int32_t first_query;  // query q is row q / members, member q % members of the group
    int32_t num_queries;
    int32_t first_chunk;
    int32_t end_chunk;
    int32_t furthest;  // the last position that any of its queries sees
    int32_t part;      // which partial result it fills
};

// All threads of a pass meet here. Who has to wait fetches up to `num_bytes` at `next` into its cache meanwhile.
struct Barrier;
void barrier_wait(Barrier* barrier, const uint8_t* next, int64_t num_bytes);

// Memory of one thread's own.
struct Space {
    uint8_t* a;       // operand rows
    float* a_scales;  // their scales (int8)
    float* row;       // one row in float32
    float* c;         // 32 x 32 results
    uint8_t* queries;
    float* scores;
    uint8_t* weights;
    float* mixed;
    float* state;     // one query's joined result
    uint8_t* tail;  // keys and values of one chunk, gathered along a path
    float* best;    // [rows] largest logit so far, and its id
    int64_t* best_id;
};

// The blocks of one matrix, or units of one layer's attention, that one thread has not begun yet: first in the low half,
// end in the high half. Alone on its cache line.
struct alignas(64) Share {
    uint64_t range;
};

struct Work {
    const OutriderModel* model;
    const OutriderPass* pass;
    int num_threads;
    Barrier* barrier;

    int half_blocks;    // 16-pair blocks of a head
    int width;          // head width padded to 32
    int members;        // query heads of a kv head
    int attended;       // num_heads * width, padded to 64
    int num_parts;      // partial attention results of a query, at most
    bool each_its_own;  // every thread prepares all operand rows for itself, instead of sharing them

    const RowPlace* places;
    const Unit* units;
    int num_units;

    float* x;           // residual stream [rows][hidden_padded]
    uint16_t* queries;  // [kv head][row][member][width]
    float* parts;       // [row][head][part][width + 16]: mixed values, then maximum and sum
    uint8_t* inner;     // SiLU(gate) * up: operand tiles in bfloat16, or [row][inner_padded] float32
    uint8_t* a;         // shared operand rows
    float* a_scales;
    Space* spaces;
    Share* shares;      // [matrix, then attention by layer][thread]
};

constexpr int PART_EXTRA = 16;

static inline int padded_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Operand rows that `num_rows` split rows take, padded.
static inline int split_rows(int num_rows) {
    return num_rows <= ROW_TILE / 2 ? ROW_TILE : padded_to(num_rows, ROW_TILE) * 2;
}

// Inputs of a matrix, padded.
static inline int inputs_of(const OutriderMatrix& m) { return m.num_steps * (m.format == FORMAT_BF16 ? 32 : 64); }

// First item of a thread's share.
static inline int share_of(int count, int thread, int num_threads) { return (int)((int64_t)count * thread / num_threads); }
