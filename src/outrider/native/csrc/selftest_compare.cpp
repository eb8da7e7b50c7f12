#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "dispatch.h"
#include "selftest.h"

namespace {

constexpr int MOST_ROWS = 32, MOST_STEPS = 19, MOST_VALUES = 640;
constexpr int ROW_COUNTS[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32};

struct Operands {
    std::vector<uint8_t> a, b;
};

// Normal numbers as bfloat16, or levels between -127 and 127 with both ends among them.
Operands random_operands(std::mt19937& random, bool is_int8) {
    std::normal_distribution<float> normal;
    Operands operands{std::vector<uint8_t>(MOST_STEPS * MOST_ROWS * STEP_BYTES),
                      std::vector<uint8_t>(MOST_STEPS * 2 * TILE_BYTES)};
    for (std::vector<uint8_t>* bytes : {&operands.a, &operands.b})
        for (size_t i = 0; i < bytes->size(); i += 2) {
            if (is_int8) {
                for (int j = 0; j < 2; j++) (*bytes)[i + j] = (uint8_t)(random() % 4 ? (int)(random() % 255) - 127 : 127);
                continue;
            }
            const float value = normal(random);
            std::memcpy(bytes->data() + i, (const uint8_t*)&value + 2, 2);
        }
    return operands;
}

typedef std::vector<uint32_t> Results;  // [32 rows][32 outputs], float32 or int32

Results multiply(const Kernels& kernels, const Operands& operands, bool is_int8, int first_row, int num_rows, int num_steps) {
    Results c((MOST_ROWS + 16) * BLOCK);
    std::vector<uint8_t> a = operands.a;
    a.resize(a.size() + 16 * STEP_BYTES);
    const Product p{a.data() + first_row * STEP_BYTES, MOST_ROWS * STEP_BYTES, operands.b.data(), 2 * TILE_BYTES,
                    TILE_BYTES, num_steps, num_rows, c.data(), BLOCK};
    kernels.begin();
    is_int8 ? kernels.product_int8(p) : kernels.product_bf16(p);
    kernels.end();
    c.resize(num_rows * BLOCK);
    return c;
}

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A sum of n products may lie n units in the last place away from another order's, measured by the sum of sizes.
bool are_close(const Results& one, const Results& other, const Results& sizes, int num_products) {
    for (size_t i = 0; i < one.size(); i++)
        if (std::fabs(as_float(one[i]) - as_float(other[i])) > as_float(sizes[i]) * (float)num_products * 0x1p-23f) return false;
    return true;
}

Operands without_signs(Operands operands) {
    for (std::vector<uint8_t>* bytes : {&operands.a, &operands.b})
        for (size_t i = 1; i < bytes->size(); i += 2) (*bytes)[i] &= 0x7f;
    return operands;
}

class Comparison {
  public:
    explicit Comparison(const Kernels& kernels) : kernels_(kernels), portable_(*find_kernels("portable")) {}

    int run() {
        for (int num_steps : {1, 2, 9, MOST_STEPS})
            for (bool is_int8 : {false, true}) products(is_int8, num_steps);
        for (int width : {64, 96, 576}) rows(width);
        curves();
        return failures_;
    }

  private:
    void expect(bool holds, const char* what) {
        if (holds) return;
        std::printf("FAILED: %s differs from the portable kernels (%s)\n", what, kernels_.name);
        failures_++;
    }

    void products(bool is_int8, int num_steps) {
        const Operands operands = random_operands(random_, is_int8);
        const Results expected = multiply(portable_, operands, is_int8, 0, MOST_ROWS, num_steps);
        const Results sizes = is_int8 ? expected : multiply(portable_, without_signs(operands), false, 0, MOST_ROWS, num_steps);
        const Results all = multiply(kernels_, operands, is_int8, 0, MOST_ROWS, num_steps);
        if (is_int8)
            expect(all == expected, "an int8 product");
        else
            expect(are_close(all, expected, sizes, num_steps * 32), "a bfloat16 product");
        for (int num_rows : ROW_COUNTS)
            for (int first_row : {0, 5}) {
                if (first_row + num_rows > MOST_ROWS) continue;
                const Results some = multiply(kernels_, operands, is_int8, first_row, num_rows, num_steps);
                expect(std::equal(some.begin(), some.end(), all.begin() + first_row * BLOCK), "a row in other company");
            }
    }

    std::vector<float> values(float size) {
        std::normal_distribution<float> normal(0.0f, size);
        std::vector<float> result(MOST_VALUES);
        for (float& value : result) value = normal(random_);
        return result;
    }
    static bool near(const std::vector<float>& one, const std::vector<float>& other, float relative, float absolute) {
        for (size_t i = 0; i < one.size(); i++)
            if (!(std::fabs(one[i] - other[i]) <= std::fabs(other[i]) * relative + absolute)) return false;
        return true;
    }

    void rows(int width) {
        const std::vector<float> x = values(5.0f), weight = values(1.0f);
        std::vector<float> mine(width), expected(width);
        kernels_.norm_row(x.data(), weight.data(), width - 7, width, 1e-5f, mine.data());
        portable_.norm_row(x.data(), weight.data(), width - 7, width, 1e-5f, expected.data());
        expect(near(mine, expected, 1e-5f, 1e-7f), "a norm");
        if (width % 64) return;
        std::vector<uint8_t> levels(4 * MOST_VALUES);
        uint8_t *coarse = levels.data(), *fine = coarse + MOST_VALUES, *coarse2 = fine + MOST_VALUES, *fine2 = coarse2 + MOST_VALUES;
        expect(kernels_.put_row_int8(x.data(), width, coarse, 64) == portable_.put_row_int8(x.data(), width, coarse2, 64) &&
                   std::memcmp(coarse, coarse2, width) == 0, "a quantised row");
        expect(kernels_.put_row_split(x.data(), width, coarse, fine, 64) ==
                       portable_.put_row_split(x.data(), width, coarse2, fine2, 64) &&
                   std::memcmp(coarse, coarse2, width) == 0 && std::memcmp(fine, fine2, width) == 0, "a split row");
    }

    void curves() {
        const std::vector<float> x = values(30.0f);
        std::vector<float> mine(x.size()), expected(x.size());
        kernels_.power_of_two(x.data(), mine.data(), MOST_VALUES);
        portable_.power_of_two(x.data(), expected.data(), MOST_VALUES);
        expect(near(mine, expected, 5e-7f, 0x1p-125f), "a power of two");
        kernels_.silu(x.data(), mine.data(), MOST_VALUES);
        portable_.silu(x.data(), expected.data(), MOST_VALUES);
        expect(near(mine, expected, 2e-6f, 1e-30f), "SiLU");
    }

    const Kernels& kernels_;
    const Kernels& portable_;
    std::mt19937 random_{7};
    int failures_ = 0;
};

}  // namespace

std::vector<const char*> runnable_kernels(const std::vector<const char*>& asked) {
    const std::vector<const char*> all{"amx", "avx512", "avx2", "neon_bf16", "neon_dot", "neon", "portable"};
    std::vector<const char*> found;
    for (const char* name : asked.empty() ? all : asked)
        if (find_kernels(name)) found.push_back(name);
    std::printf("kernels tested:");
    for (const char* name : found) std::printf(" %s", name);
    std::printf("; auto is %s\n", find_kernels("auto")->name);
    return found;
}

int compare_with_portable(const std::vector<const char*>& names) {
    int failures = 0;
    for (const char* name : names) failures += Comparison(*find_kernels(name)).run();
    return failures;
}
