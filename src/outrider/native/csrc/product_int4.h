// 4-bit weights: what all instruction sets share.
//
// A weight is d * q + m, q = 0..15; d and m are float16 and belong to one output and one group of inputs. Two forms:
// groups of 1 part (32 inputs) with m stored, and of 4 parts with m = -8 d. The last group may have fewer parts.
// Operand rows are int8 levels with one scale for each group, so that
//
//   sum over a group of x * w = scale * (d * sum(level * q) + m * sum(level)),
//
// where both sums are exact integers. Groups are added in their order, in float32: all instruction sets with a fused
// multiply-add give the same bits.
//
// A block is two tiles of 16 outputs, each: scales [group][16 d, 16 m (if stored)], padded to 64 bytes; then levels
// [part][4][64 bytes]. Byte i of line v holds the levels of output i / 4, input i % 4 of words v (low half) and v + 4.
#pragma once

#include "product.h"
#include "work.h"

namespace {

constexpr int PART_INPUTS = 32;
constexpr int PART_BYTES = 256;

template <int PARTS>
constexpr int GROUP_SCALE_BYTES = PARTS == 1 ? 64 : 32;

static inline int groups_of(int num_parts, int group_parts) { return (num_parts + group_parts - 1) / group_parts; }

static inline int64_t scale_bytes(int num_parts, int group_parts) {
    return padded_to(groups_of(num_parts, group_parts) * (group_parts == 1 ? 64 : 32), 64);
}

static inline int64_t int4_tile_bytes(int num_parts, int group_parts) {
    return scale_bytes(num_parts, group_parts) + (int64_t)num_parts * PART_BYTES;
}

// Fetches what corresponds to one part of the block that comes next.
template <int PARTS>
inline __attribute__((always_inline)) void fetch_part(const uint8_t* ahead, int64_t levels_at, int part) {
    if (part % PARTS == 0) __builtin_prefetch(ahead + part / PARTS * GROUP_SCALE_BYTES<PARTS>, 0, 2);
    for (int i = 0; i < PART_BYTES; i += 64) __builtin_prefetch(ahead + levels_at + part * PART_BYTES + i, 0, 2);
}

}  // namespace
