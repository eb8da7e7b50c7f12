// One pool of persistent threads. The caller is thread 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "work.h"

struct Barrier {
    explicit Barrier(int num_threads) : num_threads(num_threads) {}
    void wait(const uint8_t* next, int64_t num_bytes);

  private:
    const int num_threads;
    std::atomic<int> arrived{0};
    std::atomic<uint32_t> generation{0};
};

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    int size() const { return (int)workers_.size() + 1; }
    Barrier* barrier() { return &barrier_; }

    // Runs task(argument, thread) on every thread and waits for all.
    void run(void (*task)(void*, int), void* argument);

  private:
    void loop(int thread);
    bool next_task(uint32_t& seen);

    Barrier barrier_;
    std::vector<std::thread> workers_;
    std::atomic<uint32_t> round_{0};
    std::atomic<int> running_{0};
    std::atomic<bool> stop_{false};
    void (*task_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
};
