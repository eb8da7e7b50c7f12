// Draft trees of a head, grown by expand and rerank in one call: a pass over the entries, then one a level.
//
// The reference is outrider/drafters/tree.py with a walk of outrider/drafters/eagle_native.py; both give the same trees.

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "abi.h"
#include "context.h"

namespace {

constexpr int32_t ROOT = -1;

// A tree while it grows: what is cached of it, and which candidates stand in the rows of the last pass.
struct Growing {
    OutriderGrowth* tree;
    std::vector<int32_t> frontier{ROOT};  // candidates whose children come next, best first
    std::vector<int32_t> above;           // the same of the level before, and where each is among the cached nodes
    std::vector<int32_t> places;
    std::vector<int32_t> parents;         // of the cached nodes
    int32_t first_row = 0;                // of the frontier's outputs in the last pass
};

class Forest {
  public:
    Forest(OutriderContext& context, const OutriderModel& model, const OutriderForest& forest)
        : context_(context), model_(model), forest_(forest) {
        for (int i = 0; i < forest.num_trees; i++) trees_.push_back({&forest.trees[i]});
    }

    void grow(const OutriderPass& entries) {
        run_pass(context_, model_, entries);
        outputs_.resize(entries.num_logit_rows * (size_t)model_.hidden);
        for (int i = 0; i < entries.num_logit_rows; i++) {
            const float* output = entries.taps + (int64_t)entries.logit_rows[i] * model_.hidden;
            std::copy_n(output, model_.hidden, &outputs_[(size_t)i * model_.hidden]);
            trees_[i].first_row = i;
        }
        expand(entries, 0);
        for (int level = 1; read_level(entries, level); level++) {}
    }

  private:
    bool goes_on(const Growing& growing, int level) const {
        return growing.tree->depth > level && !growing.frontier.empty();
    }

    // One pass over the frontiers of the trees that go on; false if there are none.
    bool read_level(const OutriderPass& entries, int level) {
        tokens_.clear(), positions_.clear(), inputs_.clear(), segments_.clear(), logit_rows_.clear();
        for (Growing& growing : trees_)
            if (goes_on(growing, level)) add_rows(growing, level);
        if (tokens_.empty()) return false;
        for (size_t i = 0; i < tokens_.size(); i++) logit_rows_.push_back((int32_t)i);
        outputs_.resize(inputs_.size());
        OutriderPass pass = entries;
        pass.num_rows = pass.num_logit_rows = (int32_t)tokens_.size();
        pass.num_segments = (int32_t)segments_.size();
        pass.tokens = tokens_.data(), pass.positions = positions_.data(), pass.segments = segments_.data();
        pass.logit_rows = logit_rows_.data();
        pass.taps = outputs_.data();
        pass.inputs = inputs_.data(), pass.is_fused = 0;
        run_pass(context_, model_, pass);
        expand(pass, level);
        return true;
    }

    void add_rows(Growing& growing, int level) {
        const OutriderGrowth& tree = *growing.tree;
        const int32_t num_cached = (int32_t)growing.parents.size(), first = (int32_t)tokens_.size();
        std::vector<int32_t> places;
        for (int32_t node : growing.frontier) {
            const int32_t parent = tree.parents[node];
            const auto found = std::find(growing.above.begin(), growing.above.end(), parent);
            const size_t rank = found - growing.above.begin();
            const float* output = &outputs_[(growing.first_row + rank) * model_.hidden];
            inputs_.insert(inputs_.end(), output, output + model_.hidden);
            places.push_back((int32_t)growing.parents.size());
            growing.parents.push_back(parent == ROOT ? ROOT : growing.places[rank]);
            tokens_.push_back(tree.tokens[node]);
            positions_.push_back(tree.position + level - 1);
        }
        growing.places = places;
        growing.first_row = first;
        segments_.push_back({tree.cache, tree.capacity, tree.base, first, (int32_t)growing.frontier.size(),
                             growing.parents.data(), num_cached});
    }

    // Gives the nodes behind the rows of a pass their likeliest children, and chooses the next frontier among those.
    void expand(const OutriderPass& pass, int level) {
        for (Growing& growing : trees_) {
            OutriderGrowth& tree = *growing.tree;
            if (!goes_on(growing, level)) continue;
            const int32_t first = tree.num_candidates;
            for (size_t i = 0; i < growing.frontier.size(); i++) {
                const int32_t node = growing.frontier[i];
                const int64_t row = (int64_t)(growing.first_row + i) * pass.num_top;
                const double base = node == ROOT ? 0.0 : tree.scores[node];
                for (int child = 0; child < pass.num_top; child++) {
                    const double score = base + pass.top_logprobs[row + child];
                    if (!(score >= forest_.min_score) || score == -__builtin_inf()) continue;
                    tree.tokens[tree.num_candidates] = forest_.target_ids[pass.top_ids[row + child]];
                    tree.parents[tree.num_candidates] = node;
                    tree.scores[tree.num_candidates++] = score;
                }
            }
            growing.above = growing.frontier;
            choose_frontier(growing, first);
        }
    }

    // The best of the candidates from `first` on, or none of them if they are not worth a pass.
    void choose_frontier(Growing& growing, int32_t first) const {
        const OutriderGrowth& tree = *growing.tree;
        std::vector<int32_t>& frontier = growing.frontier;
        frontier.clear();
        for (int32_t node = first; node < tree.num_candidates; node++) frontier.push_back(node);
        std::stable_sort(frontier.begin(), frontier.end(),
                         [&](int32_t a, int32_t b) { return tree.scores[a] > tree.scores[b]; });
        if ((int32_t)frontier.size() > forest_.width) frontier.resize(forest_.width);
        double kept = 0;
        for (int32_t node : frontier) kept += std::exp(tree.scores[node]);
        if (kept < forest_.min_level) frontier.clear();
    }

    OutriderContext& context_;
    const OutriderModel& model_;
    const OutriderForest& forest_;
    std::vector<Growing> trees_;
    std::vector<float> outputs_, inputs_;
    std::vector<int64_t> tokens_, positions_;
    std::vector<OutriderSegment> segments_;
    std::vector<int32_t> logit_rows_;
};

}  // namespace

// Makes the entries that `entries` brings, one segment and one logit row a tree, and grows the trees behind them. The pass's
// logits, top_ids and top_logprobs have room for `width` rows a tree; its only tap is the head's output. 0, or 1 if memory
// ran out.
OUTRIDER_EXPORT int32_t outrider_grow(OutriderContext* context, const OutriderModel* model, const OutriderPass* entries,
                                      const OutriderForest* forest) {
    std::lock_guard<std::mutex> lock(turn_of(*context));
    try {
        Forest(*context, *model, *forest).grow(*entries);
        return 0;
    } catch (...) {
        return 1;
    }
}
