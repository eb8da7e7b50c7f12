// Rows of float32 made into operands of a product, by the format of its matrix.
#pragma once

#include "product_int4.h"
#include "rows.h"
#include "work.h"

namespace {

// What a product's rows are made into. Split rows come in groups of at most 16: the group's coarse rows, then its fine
// rows, each group 32 rows behind the last.
enum class Form { bf16, int8, split, groups };

// Rows of a product: in tiles, and their scales (int8), or `scale_stride` factors a row (groups).
struct Operand {
    const uint8_t* tiles;
    int64_t step;
    const float* scales;
    Form form = Form::bf16;
    int64_t scale_stride = 1;
};

struct Turn {
    const Work& w;
    const Space& space;
    int thread;

    int share(int count) const { return share_of(count, thread, w.num_threads); }
    int end_of_share(int count) const { return share_of(count, thread + 1, w.num_threads); }
    void wait(const uint8_t* next = nullptr, int64_t num_bytes = 0) const { barrier_wait(w.barrier, next, num_bytes); }
};

// Where operand rows are put, and which of them this thread makes: all of them, or its share.
struct Preparation {
    uint8_t* tiles;
    float* scales;
    int first, end;
};

Preparation preparation(const Turn& turn, int num_rows) {
    const Work& w = turn.w;
    if (w.each_its_own) return {turn.space.a, turn.space.a_scales, 0, num_rows};
    return {w.a, w.a_scales, turn.share(num_rows), turn.end_of_share(num_rows)};
}

Form form_for(const OutriderMatrix& m) {
    return m.format == FORMAT_INT4 ? Form::groups : m.format == FORMAT_INT8 ? Form::int8 : Form::bf16;
}

// Form, group width, and what follows from them and the number of rows.
struct Layout {
    Form form;
    int group;
    int num_rows, width;

    Layout(const OutriderMatrix& m, int num_rows, int width, bool split = false)
        : form(split ? Form::split : form_for(m)), group(m.group_parts * PART_INPUTS), num_rows(num_rows), width(width) {}
    int64_t step() const {
        return (int64_t)(form == Form::split ? split_rows(num_rows) : padded_to(num_rows, ROW_TILE)) * STEP_BYTES;
    }
    int64_t scale_stride() const { return form == Form::groups ? (width + group - 1) / group * 2 : 1; }

    void put(const Preparation& to, int row, const float* y) const {
        uint8_t* tiles = to.tiles + row * STEP_BYTES;
        float* scales = to.scales + row * scale_stride();
        switch (form) {
            case Form::bf16: put_row_bf16(y, width, tiles, step()); break;
            case Form::int8: *scales = put_row_int8(y, width, tiles, step()); break;
            case Form::groups: put_row_groups(y, width, group, tiles, step(), scales); break;
            case Form::split: *scales = put_split(to, row, y); break;
        }
    }
    float put_split(const Preparation& to, int row, const float* y) const {
        const int first = row / ROW_TILE * ROW_TILE;
        const int rows = num_rows - first < ROW_TILE ? num_rows - first : ROW_TILE;
        uint8_t* coarse = to.tiles + (first + row) * STEP_BYTES;
        return put_row_split(y, width, coarse, coarse + rows * STEP_BYTES, step());
    }
};

// Operand rows made of `fill(row)`, which returns a row's float32 values.
template <class Fill>
Operand prepare(const Turn& turn, const Layout& layout, const Fill& fill) {
    const Preparation to = preparation(turn, layout.num_rows);
    for (int row = to.first; row < to.end; row++) layout.put(to, row, fill(row));
    if (!turn.w.each_its_own) turn.wait();
    return {to.tiles, layout.step(), to.scales, layout.form, layout.scale_stride()};
}

}  // namespace
