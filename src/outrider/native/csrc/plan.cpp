#include "plan.h"

#include <algorithm>

namespace {

constexpr int32_t NO_END = 1 << 30;

}  // namespace

// A chain is one path. A tree becomes one path per leaf; a row that lies on several is attended to along the first, the
// keys and values it sees are the same on all. Of nodes that are cached already only the places matter. What all rows of a
// tree see of the text before it is read once, not once a leaf: whole chunks of it are a path of their own, the trunk.

void Plan::build(const OutriderModel& model, const OutriderPass& pass, int num_threads) {
    places.assign(pass.num_rows, RowPlace{});
    paths.clear();
    units.clear();
    numbers_.clear();
    size_t needed = 0;
    for (int i = 0; i < pass.num_segments; i++) {
        const size_t rows = pass.segments[i].num_rows, nodes = rows + pass.segments[i].num_cached_nodes;
        needed += pass.segments[i].parents ? rows * (nodes + 2) : rows;
    }
    numbers_.reserve(needed);
    for (int i = 0; i < pass.num_segments; i++) {
        const OutriderSegment& segment = pass.segments[i];
        segment.parents ? add_tree(segment) : add_chain(segment);
    }
    cut_units(model, num_threads);
}

void Plan::add_chain(const OutriderSegment& segment) {
    const int32_t* rows = numbers_.data() + numbers_.size();
    for (int i = 0; i < segment.num_rows; i++) {
        numbers_.push_back(segment.start + i);
        places[segment.start + i] = {segment.cache, segment.capacity, segment.base + i, segment.base + i, NO_END};
    }
    paths.push_back({segment.cache, segment.capacity, segment.base, nullptr, 0, rows, segment.num_rows, 0, NO_END});
}

void Plan::add_trunk(const OutriderSegment& segment, size_t first_path) {
    const int32_t trunk = segment.base / CHUNK;
    if (trunk == 0 || paths.size() - first_path < 2) return;
    for (size_t i = first_path; i < paths.size(); i++) paths[i].first_chunk = trunk;
    const int32_t* rows = numbers_.data() + numbers_.size();
    for (int i = 0; i < segment.num_rows; i++) {
        numbers_.push_back(segment.start + i);
        places[segment.start + i].trunk = trunk;
    }
    paths.push_back({segment.cache, segment.capacity, segment.base, nullptr, 0, rows, segment.num_rows, 0, trunk});
}

void Plan::add_tree(const OutriderSegment& segment) {
    const int num_cached = segment.num_cached_nodes, count = num_cached + segment.num_rows;
    std::vector<int32_t> depth(count, 0);
    std::vector<char> is_parent(count, 0), is_taken(count, 0);
    const size_t first_path = paths.size();
    for (int i = 0; i < count; i++) {
        const int parent = segment.parents[i];
        if (parent >= 0) {
            depth[i] = depth[parent] + 1;
            is_parent[parent] = 1;
        }
        if (i >= num_cached)
            places[segment.start + i - num_cached] = {segment.cache, segment.capacity, segment.base + i,
                                                      segment.base + depth[i], NO_END};
    }
    for (int leaf = num_cached; leaf < count; leaf++) {
        if (is_parent[leaf]) continue;
        std::vector<int32_t> nodes(depth[leaf] + 1);
        bool in_place = true;
        for (int node = leaf; node >= 0; node = segment.parents[node]) {
            nodes[depth[node]] = node;
            in_place = in_place && depth[node] == node;
        }
        const int32_t* begin = numbers_.data() + numbers_.size();
        const int32_t* rows = begin + nodes.size();
        numbers_.insert(numbers_.end(), nodes.begin(), nodes.end());
        int taken = 0;
        for (int node : nodes) {
            if (node < num_cached || is_taken[node]) continue;
            is_taken[node] = 1;
            numbers_.push_back(segment.start + node - num_cached);
            taken++;
        }
        paths.push_back({segment.cache, segment.capacity, segment.base, in_place ? nullptr : begin, (int32_t)nodes.size(),
                         rows, taken, 0, NO_END});
    }
    add_trunk(segment, first_path);
}

namespace {

// Threads begin with equal shares of the units. A unit runs over all chunks of its rows, up to 32 of them, or 16 if that
// shares the work out more evenly. If threads would stay idle either way (few rows, or few kv heads), every chunk is a unit
// of its own, which costs memory for partial results and time to join them. Chunks are joined in the same order always.
bool is_uneven(int num_units, int num_threads) {
    const int turns = (num_units + num_threads - 1) / num_threads;
    return num_units < 8 * num_threads && 5 * turns * num_threads > 6 * num_units;
}

int count_of(int items, int most) { return (items + most - 1) / most; }

}  // namespace

void Plan::cut_units(const OutriderModel& model, int num_threads) {
    const int members = model.num_heads / model.num_kv_heads;
    int most_chunks = 1;
    for (const RowPlace& place : places) most_chunks = std::max(most_chunks, place.last / CHUNK + 1);
    const auto leaves_idle = [&](int most_rows) {
        int tiles = 0;
        for (const Path& path : paths) tiles += count_of(path.num_rows * members, most_rows);
        return is_uneven(tiles * model.num_kv_heads, num_threads);
    };
    const bool uneven = leaves_idle(QUERY_ROWS), split = most_chunks > 1 && uneven && leaves_idle(ROW_TILE);
    num_parts = 1;
    for (RowPlace& place : places) {
        if (split) place.trunk = 1;
        num_parts = std::max(num_parts, parts_of_row(place));
    }
    for (const Path& path : paths)
        for (int group = 0; group < model.num_kv_heads; group++)
            cut_path(path, group, members, uneven && !split ? ROW_TILE : QUERY_ROWS, split);
}

// Equal tiles of queries; those of one kv head follow each other, so that one thread finds its keys in its cache.
void Plan::cut_path(const Path& path, int group, int members, int most_rows, bool split) {
    const int num_queries = path.num_rows * members;
    const int tile = num_queries ? count_of(num_queries, count_of(num_queries, most_rows)) : 1;
    const int trunk = split ? 1 : path.first_chunk;
    for (int first = 0; first < num_queries; first += tile) {
        const int count = std::min(tile, num_queries - first);
        int furthest = 0;
        for (int row = first / members; row <= (first + count - 1) / members; row++)
            furthest = std::max(furthest, places[path.rows[row]].last);
        const int end = std::min(furthest / CHUNK + 1, path.end_chunk);
        if (trunk == 0) units.push_back({&path, group, first, count, 0, end, furthest, 0});
        for (int chunk = path.first_chunk; trunk > 0 && chunk < end; chunk++)
            units.push_back({&path, group, first, count, chunk, chunk + 1, furthest, chunk < trunk ? 0 : chunk - trunk + 1});
    }
}
