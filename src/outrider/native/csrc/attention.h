// Attention of a few query rows of one kv head over the cache, as two products around a softmax.
//
// Cache of one layer and kv head, S positions, J = half_blocks (tiles are 1 KiB):
//   keys   [S / 16][J][16 pairs of dimensions][16 positions][2]   pair p of tile j: dimensions 16j + p and half + 16j + p
//   values [S / 32][2 J][16 pairs of positions][16 dimensions][2]
// so that either is read as weights of a product, without any rearrangement.
#pragma once

#include "product.h"
#include "rows.h"
#include "work.h"

namespace {

INLINE int64_t side_bytes(const Work& w, int64_t capacity) { return capacity * w.width * 2; }

// Keys of one layer and kv head; its values lie side_bytes behind.
INLINE int64_t keys_offset(const Work& w, int layer, int group, int64_t capacity) {
    return ((int64_t)layer * w.model->num_kv_heads + group) * 2 * side_bytes(w, capacity);
}
INLINE uint8_t* key_word(uint8_t* keys, int half_blocks, int64_t position, int pair) {
    return keys + ((position / 16) * half_blocks + pair / 16) * TILE_BYTES + (pair % 16) * 64 + (position % 16) * 4;
}
INLINE uint8_t* value_half(uint8_t* values, int half_blocks, int64_t position, int dimension) {
    return values + ((position / 32) * 2 * half_blocks + dimension / 16) * TILE_BYTES + ((position % 32) / 2) * 64 +
           (dimension % 16) * 4 + (position % 2) * 2;
}

void copy_position(const Work& w, uint8_t* to_keys, uint8_t* to_values, int64_t to, const uint8_t* keys,
                   const uint8_t* values, int64_t from) {
    for (int pair = 0; pair < w.width / 2; pair++)
        __builtin_memcpy(key_word(to_keys, w.half_blocks, to, pair),
                         key_word((uint8_t*)keys, w.half_blocks, from, pair), 4);
    for (int i = 0; i < w.width; i++)
        __builtin_memcpy(value_half(to_values, w.half_blocks, to, i),
                         value_half((uint8_t*)values, w.half_blocks, from, i), 2);
}

// A private copy of one chunk in which the path's nodes stand where they would stand once kept.
void gather_tail(const Work& w, const Path& path, int start, int num_keys, const uint8_t** keys, const uint8_t** values,
                 uint8_t* tail) {
    uint8_t *to_keys = tail, *to_values = tail + side_bytes(w, CHUNK);
    const int64_t bytes = side_bytes(w, num_keys);
    __builtin_memcpy(to_keys, *keys + side_bytes(w, start), bytes);
    __builtin_memcpy(to_values, *values + side_bytes(w, start), bytes);
    for (int i = 0; i < path.num_nodes; i++) {
        const int64_t place = path.base + i - start;
        if (place >= 0 && place < num_keys)
            copy_position(w, to_keys, to_values, place, *keys, *values, path.base + path.nodes[i]);
    }
    *keys = to_keys;
    *values = to_values;
}

struct Queries {
    int32_t row[QUERY_ROWS], member[QUERY_ROWS], last[QUERY_ROWS];
};

Queries gather_queries(const Work& w, const Unit& unit, uint8_t* tiles) {
    Queries q;
    for (int i = 0; i < unit.num_queries; i++) {
        const int query = unit.first_query + i;
        q.row[i] = unit.path->rows[query / w.members];
        q.member[i] = query % w.members;
        q.last[i] = w.places[q.row[i]].last;
        const int64_t index = ((int64_t)unit.group * w.pass->num_rows + q.row[i]) * w.members + q.member[i];
        const uint8_t* from = (const uint8_t*)(w.queries + index * w.width);
        for (int j = 0; j < w.half_blocks; j++)
            __builtin_memcpy(tiles + j * QUERY_STEP + i * STEP_BYTES, from + j * STEP_BYTES, STEP_BYTES);
    }
    return q;
}

// Keys and values of up to 128 positions, and what is fetched from memory meanwhile: while scores are taken the values
// (if they lie in memory and not in a private copy), while values are mixed the keys behind.
struct Chunk {
    const uint8_t *keys, *values;
    int start, num_keys;
    bool fetch_values;
    const uint8_t* next;
    int64_t next_bytes;
};

// Keys of a chunk that count for a unit, padded.
INLINE int keys_of_chunk(const Unit& unit, int chunk) {
    const int reach = unit.furthest + 1 - chunk * CHUNK;
    return padded_to(reach < CHUNK ? reach : CHUNK, KEY_BLOCK);
}

INLINE const uint8_t* keys_of_unit(const Work& w, int layer, const Unit& unit) {
    return unit.path->cache + keys_offset(w, layer, unit.group, unit.path->capacity);
}

void score_keys(const Work& w, const Space& space, const Chunk& chunk, int num_queries) {
    const int64_t key_tile = (int64_t)w.half_blocks * TILE_BYTES;
    for (int k = 0; k < chunk.num_keys; k += KEY_BLOCK) {
        Product p{space.queries, QUERY_STEP, chunk.keys + k / 16 * key_tile, TILE_BYTES, key_tile, w.half_blocks, num_queries,
                  space.scores + k, CHUNK};
        p.ahead_step = chunk.fetch_values ? 2 * TILE_BYTES : 0;
        p.ahead_after = chunk.values + side_bytes(w, k);
        product_bf16(p);
    }
}

void mix_values(const Work& w, const Space& space, const Chunk& chunk, int num_queries) {
    const int steps = chunk.num_keys / KEY_BLOCK;
    const int64_t ahead_step = (chunk.next_bytes / (steps * w.half_blocks) + 63) / 64 * 64;
    for (int j = 0; j < w.half_blocks; j++) {
        Product p{space.weights, QUERY_STEP, chunk.values + j * 2 * TILE_BYTES, (int64_t)2 * w.half_blocks * TILE_BYTES,
                  TILE_BYTES, steps, num_queries, space.mixed + j * BLOCK, w.width};
        p.ahead_step = ahead_step;
        p.ahead_after = chunk.next + j * steps * ahead_step;
        product_bf16(p);
    }
}

// Where the results of one query are collected.
INLINE float* part_of(const Work& w, int row, int head, int part) {
    return w.parts + (((int64_t)row * w.model->num_heads + head) * w.num_parts + part) * (w.width + PART_EXTRA);
}

// Softmax and mixture of one chunk. Rows that see nothing of it are left as they are.
void attend_chunk(const Work& w, const Space& space, const Queries& q, const Unit& unit, const Chunk& chunk) {
    const int members = w.members, count = unit.num_queries;
    const float scale = LOG2_E / __builtin_sqrtf((float)w.model->head_width);
    Extent extents[QUERY_ROWS];
    score_keys(w, space, chunk, count);
    for (int i = 0; i < count; i++) {
        const int visible = q.last[i] + 1 - chunk.start;
        if (visible > 0)
            extents[i] = soften_row(space.scores + i * CHUNK, scale, chunk.num_keys, visible,
                                    space.weights + i * STEP_BYTES, QUERY_STEP);
    }
    mix_values(w, space, chunk, count);
    for (int i = 0; i < count; i++) {
        if (q.last[i] < chunk.start) continue;
        float* state = part_of(w, q.row[i], unit.group * members + q.member[i], unit.part);
        merge_chunk(state, space.mixed + i * w.width, extents[i], w.width);
    }
}

// `after`: the unit that this thread attends to next, if it is known.
void attend_unit(const Work& w, const Space& space, int layer, const Unit& unit, const Unit* after) {
    const Path& path = *unit.path;
    const Queries q = gather_queries(w, unit, space.queries);
    for (int i = 0; i < unit.num_queries; i++)
        part_of(w, q.row[i], unit.group * w.members + q.member[i], unit.part)[w.width + 1] = 0.0f;
    const uint8_t *keys = keys_of_unit(w, layer, unit), *values = keys + side_bytes(w, path.capacity);
    for (int i = unit.first_chunk; i < unit.end_chunk; i++) {
        Chunk chunk{keys + side_bytes(w, i * CHUNK), values + side_bytes(w, i * CHUNK), i * CHUNK, keys_of_chunk(unit, i),
                    true, nullptr, 0};
        if (path.nodes && chunk.start + chunk.num_keys > path.base) {
            chunk.keys = keys;
            chunk.values = values;
            chunk.fetch_values = false;
            gather_tail(w, path, chunk.start, chunk.num_keys, &chunk.keys, &chunk.values, space.tail);
        }
        if (i + 1 < unit.end_chunk) {
            chunk.next = keys + side_bytes(w, (i + 1) * CHUNK);
            chunk.next_bytes = side_bytes(w, keys_of_chunk(unit, i + 1));
        } else if (after) {
            chunk.next = keys_of_unit(w, layer, *after) + side_bytes(w, after->first_chunk * CHUNK);
            chunk.next_bytes = side_bytes(w, keys_of_chunk(*after, after->first_chunk));
        }
        attend_chunk(w, space, q, unit, chunk);
    }
}

// Joins the partial results of all heads of a row: [attended] float32.
void join_row(const Work& w, int row, float* state, float* y) {
    const int state_width = w.width + PART_EXTRA;
    const int num_parts = parts_of_row(w.places[row]);
    for (int h = 0; h < w.model->num_heads; h++, y += w.width) {
        const float *part = part_of(w, row, h, 0), *joined = part;
        if (num_parts > 1) {
            joined = state;
            state[w.width + 1] = 0.0f;
            for (int i = 0; i < num_parts; i++, part += state_width)
                merge_chunk(state, part, {part[w.width], part[w.width + 1]}, w.width);
        }
        const float inverse = 1.0f / joined[w.width + 1];
        for (int i = 0; i < w.width; i += LANES) store(y + i, load(joined + i) * inverse);
    }
    for (int i = w.model->num_heads * w.width; i < w.attended; i += LANES, y += LANES) store(y, F16{});
}

}  // namespace
