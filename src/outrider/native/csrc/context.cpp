// Threads and scratch memory behind one handle, and the pass as Python calls it.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "context.h"
#include "dispatch.h"
#include "plan.h"
#include "pool.h"
#include "stream.h"

namespace {

// Up to this many rows every thread prepares operand rows for itself: shared out, they cost a wait more.
constexpr int MOST_OWN_ROWS = 2;

// Zeroed memory carved into 64-byte aligned pieces. First a dry run that counts, then the pieces.
class Arena {
  public:
    template <class T>
    T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 127) / 64 * 64;  // a line between neighbours
        uint8_t* piece = memory_ ? memory_.get() + used_ : nullptr;
        used_ += bytes;
        return (T*)piece;
    }
    void restart() { used_ = 0; }
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        memory_.reset();
        uint8_t* raw = (uint8_t*)std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        if (!raw) throw std::bad_alloc();
        std::memset(raw, 0, bytes);
        memory_.reset(raw);
        size_ = bytes;
    }
    size_t used() const { return used_; }

  private:
    struct Free {
        void operator()(uint8_t* memory) const { std::free(memory); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t size_ = 0, used_ = 0;
};

}  // namespace

struct OutriderContext {
    OutriderContext(const Kernels* kernels, int num_threads) : kernels(kernels), pool(num_threads) {}

    const Kernels* kernels;
    Pool pool;
    Plan plan;
    Arena arena;
    std::vector<Space> spaces;
    std::mutex busy;

    void run(const OutriderModel& model, const OutriderPass& pass);

  private:
    Work describe(const OutriderModel& model, const OutriderPass& pass);
    void place(Work& work);
    void place_thread(const Work& work, Space& space, size_t operand_bytes);
};

Work OutriderContext::describe(const OutriderModel& model, const OutriderPass& pass) {
    Work work{};
    work.model = &model;
    work.pass = &pass;
    work.num_threads = pool.size();
    work.barrier = pool.barrier();
    work.half_blocks = (model.head_width / 2 + 15) / 16;
    work.width = work.half_blocks * 32;
    work.members = model.num_heads / model.num_kv_heads;
    work.attended = padded_to(model.num_heads * work.width, 64);
    work.num_parts = plan.num_parts;
    work.each_its_own = pass.num_rows <= MOST_OWN_ROWS;
    work.places = plan.places.data();
    work.units = plan.units.data();
    work.num_units = (int)plan.units.size();
    return work;
}

// Scales of an operand row, at most: two factors for each 32 inputs.
size_t factors_of(size_t width) { return (width + 31) / 32 * 2; }

// The widest row that a product of this pass reads.
size_t widest_operand(const Work& work) {
    const OutriderModel& model = *work.model;
    const int stream = model.hidden_padded * (model.side_norm ? 2 : 1);
    const int widest = std::max(std::max(stream, model.inner_padded), work.attended);
    return work.pass->is_fused ? std::max(widest, inputs_of(model.fuse)) : widest;
}

void OutriderContext::place(Work& work) {
    const OutriderModel& model = *work.model;
    const size_t rows = work.pass->num_rows, padded = padded_to((int)rows, 32);
    const size_t width = widest_operand(work);
    arena.restart();
    work.x = arena.take<float>(rows * model.hidden_padded);
    work.queries = arena.take<uint16_t>(rows * model.num_heads * work.width);
    work.parts = arena.take<float>(rows * model.num_heads * work.num_parts * (work.width + PART_EXTRA));
    work.inner = arena.take<uint8_t>(padded * model.inner_padded * (model.format == FORMAT_BF16 ? 2 : 4));
    work.a = arena.take<uint8_t>(padded * width * 2);  // bfloat16, or int8 twice
    work.a_scales = arena.take<float>(padded * factors_of(width));
    work.shares = arena.take<Share>((size_t)(5 * model.num_layers + 2) * work.num_threads);
    for (Space& space : spaces) place_thread(work, space, width);
    work.spaces = spaces.data();
}

void OutriderContext::place_thread(const Work& work, Space& space, size_t width) {
    space.a = arena.take<uint8_t>(ROW_TILE * width * 2);
    space.a_scales = arena.take<float>(ROW_TILE * factors_of(width));
    space.row = arena.take<float>(width);
    space.c = arena.take<float>(32 * 32);
    space.queries = arena.take<uint8_t>(work.half_blocks * QUERY_STEP);
    space.scores = arena.take<float>(QUERY_ROWS * CHUNK);
    space.weights = arena.take<uint8_t>(CHUNK / KEY_BLOCK * QUERY_STEP);
    space.mixed = arena.take<float>(QUERY_ROWS * work.width);
    space.state = arena.take<float>(work.width + PART_EXTRA);
    space.tail = arena.take<uint8_t>(2 * CHUNK * work.width * sizeof(uint16_t));
    space.best = arena.take<float>(work.pass->num_rows);
    space.best_id = arena.take<int64_t>(work.pass->num_rows);
}

void OutriderContext::run(const OutriderModel& model, const OutriderPass& pass) {
    plan.build(model, pass, pool.size());
    spaces.resize(pool.size());
    Work work = describe(model, pass);
    place(work);
    arena.reserve(arena.used());
    place(work);
    struct Call {
        const Kernels* kernels;
        const Work* work;
    } call{kernels, &work};
    pool.run(
        [](void* argument, int thread) {
            const Call& call = *(const Call*)argument;
            call.kernels->run_pass(*call.work, thread);
        },
        &call);
}

const Kernels& kernels_of(const OutriderContext& context) { return *context.kernels; }
Pool& pool_of(OutriderContext& context) { return context.pool; }
std::mutex& turn_of(OutriderContext& context) { return context.busy; }
void run_pass(OutriderContext& context, const OutriderModel& model, const OutriderPass& pass) { context.run(model, pass); }

// A handle with `num_threads` threads (the caller is one) and the kernels of that name, or null if those cannot run here.
OUTRIDER_EXPORT OutriderContext* outrider_open(const char* kernels, int32_t num_threads) {
    const Kernels* found = find_kernels(kernels);
    if (!found || num_threads < 1) return nullptr;
    try {
        return new OutriderContext(found, num_threads);
    } catch (...) {
        return nullptr;
    }
}

OUTRIDER_EXPORT void outrider_close(OutriderContext* context) { delete context; }

OUTRIDER_EXPORT const char* outrider_kernels(const OutriderContext* context) { return context->kernels->name; }

// Runs one pass; 0, or 1 if memory ran out. Calls on one handle take turns.
OUTRIDER_EXPORT int32_t outrider_run(OutriderContext* context, const OutriderModel* model, const OutriderPass* pass) {
    std::lock_guard<std::mutex> lock(context->busy);
    try {
        context->run(*model, *pass);
        return 0;
    } catch (...) {
        return 1;
    }
}

// The sum of `num_bytes` (a multiple of 256), read by all threads: for measuring.
OUTRIDER_EXPORT uint32_t outrider_stream(OutriderContext* context, const void* memory, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(context->busy);
    return stream_memory(*context->kernels, context->pool, memory, num_bytes);
}
