// Single kernels, for tests: each on the calling thread, in the instruction set asked for.

#include "dispatch.h"

namespace {

template <class Call>
int32_t with_kernels(const char* name, const Call& call) {
    const Kernels* kernels = find_kernels(name);
    if (!kernels) return 1;
    kernels->begin();
    call(*kernels);
    kernels->end();
    return 0;
}

}  // namespace

// 0 if those kernels can run here.
OUTRIDER_EXPORT int32_t outrider_test_available(const char* kernels) { return find_kernels(kernels) ? 0 : 1; }

// c[rows][32] = a x b over packed tiles; rows at most 32, buffers padded to 16 or 32 rows.
OUTRIDER_EXPORT int32_t outrider_test_product(const char* kernels, int32_t is_int8, const uint8_t* a, int64_t a_step,
                                              const uint8_t* b, int32_t num_steps, int32_t num_rows, void* c) {
    return with_kernels(kernels, [&](const Kernels& k) {
        const Product p{a, a_step, b, 2 * TILE_BYTES, TILE_BYTES, num_steps, num_rows, c, BLOCK};
        is_int8 ? k.product_int8(p) : k.product_bf16(p);
    });
}

OUTRIDER_EXPORT int32_t outrider_test_norm(const char* kernels, const float* x, const float* weight, int32_t width,
                                           int32_t padded, float eps, float* y) {
    return with_kernels(kernels, [&](const Kernels& k) { k.norm_row(x, weight, width, padded, eps, y); });
}

OUTRIDER_EXPORT int32_t outrider_test_quantise(const char* kernels, const float* x, int32_t width, uint8_t* levels,
                                               float* scale) {
    return with_kernels(kernels, [&](const Kernels& k) { *scale = k.put_row_int8(x, width, levels, STEP_BYTES); });
}

OUTRIDER_EXPORT int32_t outrider_test_split(const char* kernels, const float* x, int32_t width, uint8_t* coarse, uint8_t* fine,
                                            float* scale) {
    return with_kernels(kernels, [&](const Kernels& k) { *scale = k.put_row_split(x, width, coarse, fine, STEP_BYTES); });
}

// c[rows][32] = a x b in 4 bits; factors [rows][groups][2].
OUTRIDER_EXPORT int32_t outrider_test_int4(const char* kernels, const uint8_t* a, int64_t a_step, const float* factors,
                                           const uint8_t* b, int32_t num_parts, int32_t group_parts, int32_t num_rows,
                                           float* c) {
    return with_kernels(kernels, [&](const Kernels& k) {
        const int64_t stride = (num_parts + group_parts - 1) / group_parts * 2;
        const GroupProduct p{a, a_step, factors, stride, b, num_parts, group_parts, num_rows, c, BLOCK, b};
        k.begin_int4(group_parts, num_rows);
        k.product_int4(p);
        k.end_int4(group_parts, num_rows);
    });
}

OUTRIDER_EXPORT int32_t outrider_test_groups(const char* kernels, const float* x, int32_t width, int32_t group,
                                             uint8_t* levels, float* factors) {
    return with_kernels(kernels, [&](const Kernels& k) { k.put_row_groups(x, width, group, levels, STEP_BYTES, factors); });
}

// `count` is a multiple of 16.
OUTRIDER_EXPORT int32_t outrider_test_power(const char* kernels, const float* x, float* y, int32_t count) {
    return with_kernels(kernels, [&](const Kernels& k) { k.power_of_two(x, y, count); });
}

OUTRIDER_EXPORT int32_t outrider_test_silu(const char* kernels, const float* x, float* y, int32_t count) {
    return with_kernels(kernels, [&](const Kernels& k) { k.silu(x, y, count); });
}
