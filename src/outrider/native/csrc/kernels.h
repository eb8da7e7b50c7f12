// What one instruction set offers. One constant of this type per translation unit isa_*.cpp.
#pragma once

#include <cstdint>

#include "abi.h"
#include "product.h"
#include "train.h"
#include "work.h"

struct Kernels {
    const char* name;
    void (*run_pass)(const Work&, int thread);
    // The parts, for tests. Each is called between begin and end.
    void (*begin)();
    void (*end)();
    void (*product_bf16)(const Product&);
    void (*product_int8)(const Product&);
    void (*begin_int4)(int group_parts, int num_rows);
    void (*end_int4)(int group_parts, int num_rows);
    void (*product_int4)(const GroupProduct&);
    void (*norm_row)(const float* x, const float* weight, int width, int padded, float eps, float* y);
    float (*put_row_int8)(const float* y, int width, uint8_t* tiles, int64_t step);
    float (*put_row_split)(const float* y, int width, uint8_t* coarse, uint8_t* fine, int64_t step);
    void (*put_row_groups)(const float* y, int width, int group, uint8_t* tiles, int64_t step, float* factors);
    void (*power_of_two)(const float* x, float* y, int count);
    void (*silu)(const float* x, float* y, int count);
    // The sum of 32-bit words (a multiple of 64 of them): how fast memory can be read.
    uint32_t (*sum_words)(const uint32_t* words, int64_t count);
    // See draw.h.
    int (*draw_candidates)(const float* logits, int size, uint64_t key, int32_t* ids);
    // See largest.h.
    int (*cut_head)(const float* logits, int size, const HeadCut& cut, float* values, int32_t* ids);
    int (*draw_head)(const float* logits, int size, const HeadCut& cut, uint64_t key, int32_t* ids);
    TrainKernels train;
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_amx;
#elif defined(__aarch64__)
extern const Kernels kernels_neon, kernels_neon_dot, kernels_neon_bf16;
#endif
