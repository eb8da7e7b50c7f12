// The one product that everything is made of: a few rows times 32 outputs.
#pragma once

#include <cstdint>

// C[row][0..31] = sum over steps of A[row] . B, for at most 32 rows.
//
// A: row r of step s lies at a + s * a_step + r * 64. B: the two tiles (16 outputs each) of step s lie at
// b + s * b_step and b_tile behind that. C is float32, or int32 for int8 products, with c_stride values a row.
// Rows are padded: A can be read, and C written, up to the next multiple of 16 rows.
//
// Every row is summed in the order of the steps, alone: its result does not depend on `num_rows` or on its place.
struct Product {
    const uint8_t* a;
    int64_t a_step;
    const uint8_t* b;
    int64_t b_step;
    int64_t b_tile;
    int num_steps;
    int num_rows;
    void* c;
    int64_t c_stride;
    // What to fetch from memory meanwhile, `ahead_step` bytes a step: before step `turn` at `ahead`, then `ahead_after`.
    const uint8_t* ahead = nullptr;
    const uint8_t* ahead_after = nullptr;
    int64_t ahead_step = 0;
    int turn = 0;
};

// The same with 4-bit weights in groups of inputs, summed to float32. See product_int4.h.
struct GroupProduct {
    const uint8_t* a;  // int8 levels, as above
    int64_t a_step;
    const float* factors;  // [row][group][2]: the row's scale in that group, and that times the sum of its levels
    int64_t factor_stride;
    const uint8_t* b;
    int num_parts;    // of 32 inputs, an even number
    int group_parts;  // 1 or 4
    int num_rows;
    float* c;
    int64_t c_stride;
    const uint8_t* ahead;  // the block that is fetched from memory meanwhile, or null
};
