// A program of its own, for builds with sanitizers: small random models of awkward shapes through every instruction set
// that runs here, and the promise that a row's result depends on nothing but its own path. Exit status 0 if all holds.
// Names of kernels as arguments: only those, which must run here.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "abi.h"
#include "product_int4.h"
#include "selftest.h"
#include "work.h"

OUTRIDER_EXPORT OutriderContext* outrider_open(const char* kernels, int32_t num_threads);
OUTRIDER_EXPORT void outrider_close(OutriderContext* context);
OUTRIDER_EXPORT int32_t outrider_run(OutriderContext* context, const OutriderModel* model, const OutriderPass* pass);
OUTRIDER_EXPORT uint32_t outrider_stream(OutriderContext* context, const void* memory, int64_t num_bytes);
OUTRIDER_EXPORT void outrider_keep(uint8_t* cache, int64_t capacity, int32_t num_sides, int32_t half_blocks, int64_t base,
                                   const int32_t* path, int32_t num_kept);

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* kernels, int threads) {
    if (holds) return;
    std::printf("FAILED: %s (%s, %d threads)\n", what, kernels, threads);
    failures++;
}

// A drafter's head starts its stream from rows that the pass brings, or from what its fusing matrix makes of them.
enum Start { TOKENS, GIVEN, FUSED };

struct Shape {
    int layers, hidden, inner, heads, kv_heads, head_width, vocab, format, group_parts;
    Start start = TOKENS;
};

uint16_t bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x8000) >> 16);
}

// Owns everything that an OutriderModel points at. Padding is filled like the rest: no result may depend on it, except
// where a padded output would, and those are made zero.
class RandomModel {
  public:
    RandomModel(const Shape& shape, int positions) : random_(shape.hidden * 31 + shape.format) {
        const int half_blocks = (shape.head_width / 2 + 15) / 16, width = half_blocks * 32;
        const int hidden = padded_to(shape.hidden, 64), inner = padded_to(shape.inner, 64);
        const int blocks = (shape.heads + 2 * shape.kv_heads) * half_blocks;
        for (int i = 0; i < shape.layers; i++) {
            OutriderLayer layer{};
            layer.attention_norm = norm(shape.hidden, hidden);
            layer.qkv = matrix(blocks, i == 0 && shape.start != TOKENS ? 2 * hidden : hidden, shape);
            layer.out = matrix(hidden / 32, padded_to(shape.heads * width, 64), shape);
            layer.feed_forward_norm = norm(shape.hidden, hidden);
            layer.gate_up = matrix(inner / 16, hidden, shape);
            layer.down = matrix(hidden / 32, inner, shape);
            layers_.push_back(layer);
        }
        embedding_.resize((size_t)shape.vocab * shape.hidden);
        for (uint16_t& value : embedding_) value = bf16(normal_(random_));
        model = {shape.layers, shape.hidden, hidden, inner, shape.heads, shape.kv_heads, shape.head_width, shape.vocab,
                 shape.format, 1e-5f, embedding_.data(), layers_.data(), norm(shape.hidden, hidden),
                 matrix((shape.vocab + 31) / 32, hidden, shape.format != FORMAT_BF16), angles(positions, half_blocks, true),
                 angles(positions, half_blocks, false)};
        if (shape.start != TOKENS) {
            model.side_norm = norm(shape.hidden, hidden);
            model.norm_inputs = shape.format == FORMAT_INT8;
            model.fuse = matrix(hidden / 32, 192, false);
            model.fuse_bias = norm(shape.hidden, hidden);
            model.split_rows = shape.start == FUSED;
        }
        start = shape.start;
        capacity = padded_to(positions, CHUNK);
        cache_bytes = (size_t)shape.layers * shape.kv_heads * 2 * capacity * width * 2;
    }

    OutriderModel model;
    Start start;
    int64_t capacity;
    size_t cache_bytes;

  private:
    const float* norm(int width, int padded) {
        floats_.emplace_back(padded, 0.0f);
        for (int i = 0; i < width; i++) floats_.back()[i] = 1.0f + 0.1f * normal_(random_);
        return floats_.back().data();
    }
    const float* angles(int positions, int half_blocks, bool cosines) {
        floats_.emplace_back((size_t)positions * half_blocks * 16);
        for (size_t i = 0; i < floats_.back().size(); i++)
            floats_.back()[i] = cosines ? std::cos(0.01f * (float)i) : std::sin(0.01f * (float)i);
        return floats_.back().data();
    }
    // Rows of the residual stream beyond `hidden` meet norm weights of zero, so they may hold anything.
    OutriderMatrix matrix(int blocks, int inputs, const Shape& shape) {
        return shape.format == FORMAT_INT4 ? matrix_int4(blocks, inputs, shape.group_parts) : matrix(blocks, inputs, shape.format == FORMAT_INT8);
    }
    OutriderMatrix matrix_int4(int blocks, int inputs, int parts) {
        const size_t scales = scale_bytes(inputs / 32, parts), tile = int4_tile_bytes(inputs / 32, parts);
        bytes_.emplace_back(blocks * 2 * tile);
        std::vector<uint8_t>& bytes = bytes_.back();
        for (size_t i = 0; i < bytes.size(); i += 2) {
            const bool is_scale = i % tile < scales;
            const bool is_minimum = is_scale && parts == 1 && i % 64 >= 32;
            // float16: about 1 / 256 for d, and -8 of those for m; levels are any bits.
            const uint16_t value = is_minimum ? 0xa800 : is_scale ? (uint16_t)(0x1c00 + random_() % 256) : (uint16_t)random_();
            std::memcpy(&bytes[i], &value, 2);
        }
        return {bytes.data(), nullptr, blocks, inputs / 64, FORMAT_INT4, parts};
    }
    OutriderMatrix matrix(int blocks, int inputs, bool is_int8) {
        const size_t count = (size_t)blocks * 32 * inputs;
        bytes_.emplace_back(count * (is_int8 ? 1 : 2));
        for (size_t i = 0; i < count; i++) {
            if (is_int8)
                bytes_.back()[i] = (uint8_t)(int8_t)((int)(random_() % 255) - 127);
            else
                ((uint16_t*)bytes_.back().data())[i] = bf16(normal_(random_) / std::sqrt((float)inputs));
        }
        const float* scales = nullptr;
        if (is_int8) {
            floats_.emplace_back(blocks * 32, 1.0f / (74.0f * std::sqrt((float)inputs)));
            scales = floats_.back().data();
        }
        return {bytes_.back().data(), scales, blocks, inputs * (is_int8 ? 1 : 2) / STEP_BYTES, is_int8 ? FORMAT_INT8 : FORMAT_BF16, 0};
    }

    std::mt19937 random_;
    std::normal_distribution<float> normal_;
    std::vector<OutriderLayer> layers_;
    std::vector<uint16_t> embedding_;
    std::vector<std::vector<float>> floats_;
    std::vector<std::vector<uint8_t>> bytes_;
};

struct Sequence {
    std::vector<uint8_t> cache;
    int length = 0;
};

struct Rows {
    Sequence* sequence;
    std::vector<int64_t> tokens;
    std::vector<int32_t> parents;  // empty for a chain
    int num_cached = 0;            // nodes that `parents` begins with and an earlier pass has cached
};

constexpr int TOP = 3;

struct Results {
    std::vector<float> logits;
    std::vector<int64_t> argmax;
    std::vector<int64_t> top_ids;
    std::vector<float> top_logprobs;
};

// What a head's rows start from: any function of their tokens.
std::vector<float> inputs_for(const std::vector<int64_t>& tokens, int width) {
    std::vector<float> inputs;
    for (int64_t token : tokens)
        for (int i = 0; i < width; i++) inputs.push_back(std::sin((float)token * 0.37f + (float)i * 0.11f));
    return inputs;
}

Results run(OutriderContext* context, const RandomModel& random, const std::vector<Rows>& batch) {
    std::vector<int64_t> tokens, positions;
    std::vector<OutriderSegment> segments;
    for (const Rows& rows : batch) {
        const int base = rows.sequence->length - rows.num_cached;
        OutriderSegment segment{rows.sequence->cache.data(), random.capacity, base, (int32_t)tokens.size(),
                                (int32_t)rows.tokens.size(), rows.parents.empty() ? nullptr : rows.parents.data(),
                                rows.num_cached};
        for (size_t i = 0; i < rows.tokens.size(); i++) {
            int depth = (int)i;
            if (segment.parents) {
                depth = 0;
                for (int node = rows.parents[rows.num_cached + i]; node >= 0; node = rows.parents[node]) depth++;
            }
            tokens.push_back(rows.tokens[i]);
            positions.push_back(base + depth);
        }
        segments.push_back(segment);
    }
    std::vector<int32_t> logit_rows(tokens.size());
    for (size_t i = 0; i < logit_rows.size(); i++) logit_rows[i] = (int32_t)i;
    Results results{std::vector<float>(tokens.size() * random.model.vocab_size), std::vector<int64_t>(tokens.size()),
                    std::vector<int64_t>(tokens.size() * TOP), std::vector<float>(tokens.size() * TOP)};
    const std::vector<float> inputs =
        inputs_for(tokens, random.start == FUSED ? inputs_of(random.model.fuse) : random.model.hidden);
    std::vector<float> taps(2 * tokens.size() * random.model.hidden);
    const int32_t tap_layers[] = {0, random.model.num_layers};
    int64_t phases[NUM_PHASES] = {};
    const OutriderPass pass{(int32_t)tokens.size(), (int32_t)segments.size(), tokens.data(), positions.data(),
                            segments.data(), (int32_t)logit_rows.size(), logit_rows.data(), results.logits.data(),
                            results.argmax.data(), 2, tap_layers, taps.data(), phases,
                            random.start == TOKENS ? nullptr : inputs.data(), random.start == FUSED, TOP,
                            results.top_ids.data(), results.top_logprobs.data()};
    if (outrider_run(context, &random.model, &pass)) failures++;
    for (const Rows& rows : batch) rows.sequence->length += (int)rows.tokens.size();
    return results;
}

bool same(const float* a, const float* b, int count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

void check(const char* kernels, int threads, const Shape& shape) {
    OutriderContext* context = outrider_open(kernels, threads);
    if (!context) return;
    const RandomModel random(shape, 400);
    const int vocab = shape.vocab, half_blocks = (shape.head_width / 2 + 15) / 16;
    std::vector<int64_t> prompt;
    for (int i = 0; i < 150; i++) prompt.push_back(i * 7 % vocab);

    Sequence whole{std::vector<uint8_t>(random.cache_bytes)}, pieces = whole, one = whole;
    const Results all = run(context, random, {{&whole, prompt, {}}});
    bool chunks_agree = true, argmax_agrees = true;
    for (int start = 0; start < 150; start += 37) {
        const std::vector<int64_t> part(prompt.begin() + start, prompt.begin() + std::min(start + 37, 150));
        const Results some = run(context, random, {{&pieces, part, {}}});
        chunks_agree = chunks_agree && same(some.logits.data(), &all.logits[(size_t)start * vocab], (int)part.size() * vocab);
    }
    expect(chunks_agree && whole.cache == pieces.cache, "a prompt in pieces", kernels, threads);
    for (size_t row = 0; row < prompt.size(); row++) {
        int64_t best = 0;
        for (int id = 1; id < vocab; id++)
            if (all.logits[row * vocab + id] > all.logits[row * vocab + best]) best = id;
        argmax_agrees = argmax_agrees && best == all.argmax[row] && std::isfinite(all.logits[row * vocab]);
        const int64_t* top = &all.top_ids[row * TOP];
        argmax_agrees = argmax_agrees && best == top[0] && all.logits[row * vocab + top[1]] >= all.logits[row * vocab + top[2]] &&
                        all.top_logprobs[row * TOP] < 0.0f;
    }
    expect(argmax_agrees, "argmax", kernels, threads);

    // The tree 0 -> {1 -> 3, 2 -> 4}: path 0, 2, 4 as a chain, in a tree beside company, and after keep.
    Sequence tree = whole, chain = whole, kept = whole;
    one.length = 0;
    const Results in_chain = run(context, random, {{&chain, {5, 7, 9}, {}}});
    const Results in_tree = run(context, random, {{&one, {1, 2, 3, 4}, {}}, {&tree, {5, 6, 7, 8, 9}, {-1, 0, 0, 1, 2}}});
    const int path[] = {0, 2, 4};
    bool paths_agree = true;
    for (int i = 0; i < 3; i++)
        paths_agree = paths_agree && same(&in_chain.logits[(size_t)i * vocab], &in_tree.logits[(size_t)(4 + path[i]) * vocab], vocab);
    expect(paths_agree, "chain and tree", kernels, threads);
    Sequence levels = whole;
    run(context, random, {{&levels, {5, 6, 7}, {-1, 0, 0}}});
    const Results below = run(context, random, {{&levels, {8, 9}, {-1, 0, 0, 1, 2}, 3}});
    expect(same(below.logits.data(), &in_tree.logits[(size_t)7 * vocab], 2 * vocab), "a tree level by level", kernels, threads);
    const int32_t keep[] = {0, 2, 4};
    kept = tree;
    outrider_keep(kept.cache.data(), random.capacity, shape.layers * shape.kv_heads, half_blocks, 150, keep, 3);
    kept.length = 153;
    const Results after_keep = run(context, random, {{&kept, {11}, {}}}), after_chain = run(context, random, {{&chain, {11}, {}}});
    expect(same(after_keep.logits.data(), after_chain.logits.data(), vocab), "after keep", kernels, threads);
    expect(outrider_stream(context, random.model.head.weights, 256) == outrider_stream(context, random.model.head.weights, 256),
           "stream", kernels, threads);
    outrider_close(context);
}

}  // namespace

int main(int count, char** arguments) {
    const Shape shapes[] = {{2, 96, 80, 3, 1, 20, 77, FORMAT_BF16, 0}, {2, 96, 80, 3, 1, 20, 77, FORMAT_INT8, 0},
                            {1, 64, 160, 4, 2, 64, 130, FORMAT_BF16, 0}, {1, 576, 100, 9, 3, 64, 200, FORMAT_INT8, 0},
                            {2, 96, 80, 3, 1, 20, 77, FORMAT_INT4, 1}, {1, 576, 320, 9, 3, 64, 200, FORMAT_INT4, 4},
                            {2, 96, 80, 3, 1, 20, 77, FORMAT_BF16, 0, GIVEN}, {1, 128, 80, 3, 1, 20, 77, FORMAT_INT8, 0, GIVEN},
                            {1, 128, 80, 3, 1, 20, 77, FORMAT_BF16, 0, FUSED}, {2, 96, 80, 3, 1, 20, 77, FORMAT_INT8, 0, FUSED}};
    const std::vector<const char*> asked(arguments + 1, arguments + count);
    const std::vector<const char*> names = runnable_kernels(asked);
    if (asked.size() > names.size()) failures++;
    for (const char* kernels : names)
        for (int threads : {1, 3})
            for (const Shape& shape : shapes) check(kernels, threads, shape);
    failures += compare_with_portable(names);
    std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures != 0;
}
