#include "pool.h"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // "yield" does nothing on most cores
#endif
}

// Waiting costs nothing on an idle machine; on a busy one the thread that we wait for may need our processor.
template <class Done>
void spin_until(const Done& done) {
    for (int turn = 0; !done(); turn++) {
        if (turn < 2000)
            relax();
        else
            sched_yield();
    }
}

// Between two passes of a decoding loop lie some 100 us; longer pauses sleep.
constexpr int SPINS_BEFORE_SLEEP = 4000;

// Flush denormals: they are slow, and every thread must round alike whatever its owner set.
struct RoundingMode {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    RoundingMode() { _mm_setcsr(0x9fc0); }
    ~RoundingMode() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    // All else clear: round to nearest, and bfloat16 products as ARM first defined them.
    static constexpr uint64_t FLUSH = 1 << 24;
    uint64_t before;
    RoundingMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(FLUSH));
    }
    ~RoundingMode() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

}  // namespace

void Barrier::wait(const uint8_t* next, int64_t num_bytes) {
    const uint32_t mine = generation.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
        arrived.store(0, std::memory_order_relaxed);
        generation.store(mine + 1, std::memory_order_release);
        return;
    }
    const auto passed = [&] { return generation.load(std::memory_order_acquire) != mine; };
    for (int64_t at = 0; at < num_bytes; at += 64) {
        if (passed()) return;
        __builtin_prefetch(next + at, 0, 2);
    }
    spin_until(passed);
}

void barrier_wait(Barrier* barrier, const uint8_t* next, int64_t num_bytes) { barrier->wait(next, num_bytes); }

Pool::Pool(int num_threads) : barrier_(num_threads) {
    for (int thread = 1; thread < num_threads; thread++) workers_.emplace_back([this, thread] { loop(thread); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        round_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void (*task)(void*, int), void* argument) {
    task_ = task;
    argument_ = argument;
    running_.store((int)workers_.size(), std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    {
        RoundingMode mode;
        task(argument, 0);
    }
    spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

bool Pool::next_task(uint32_t& seen) {
    for (int turn = 0; turn < SPINS_BEFORE_SLEEP; turn++) {
        if (round_.load(std::memory_order_acquire) != seen) break;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (round_.load(std::memory_order_acquire) == seen) {
        lock.lock();
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    return !stop_;
}

void Pool::loop(int thread) {
    uint32_t seen = 0;
    while (next_task(seen)) {
        RoundingMode mode;
        task_(argument_, thread);
        running_.fetch_sub(1, std::memory_order_release);
    }
}
