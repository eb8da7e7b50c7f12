// What a pass attends to: worked out once, used by every layer.
#pragma once

#include <cstddef>
#include <vector>

#include "work.h"

struct Plan {
    std::vector<RowPlace> places;
    std::vector<Path> paths;
    std::vector<Unit> units;
    int num_parts = 1;

    void build(const OutriderModel& model, const OutriderPass& pass, int num_threads);

  private:
    // Backing of Path::nodes and Path::rows: sized before anything points into it.
    std::vector<int32_t> numbers_;

    void add_chain(const OutriderSegment& segment);
    void add_tree(const OutriderSegment& segment);
    void add_trunk(const OutriderSegment& segment, std::size_t first_path);
    void cut_units(const OutriderModel& model, int num_threads);
    void cut_path(const Path& path, int group, int members, int most_rows, bool split);
};
