// Reading memory as fast as the pool's threads can: the limit that a pass is compared with.

#include "stream.h"

namespace {

struct Read {
    const Kernels& kernels;
    const uint32_t* words;
    int64_t num_pieces;  // of 256 bytes
    int num_threads;
    std::vector<uint32_t> sums;
};

void read_share(void* argument, int thread) {
    Read& read = *(Read*)argument;
    const int64_t first = read.num_pieces * thread / read.num_threads;
    const int64_t end = read.num_pieces * (thread + 1) / read.num_threads;
    read.sums[thread] = read.kernels.sum_words(read.words + first * 64, (end - first) * 64);
}

}  // namespace

uint32_t stream_memory(const Kernels& kernels, Pool& pool, const void* memory, int64_t num_bytes) {
    Read read{kernels, (const uint32_t*)memory, num_bytes / 256, pool.size(), std::vector<uint32_t>(pool.size())};
    pool.run(read_share, &read);
    uint32_t total = 0;
    for (uint32_t sum : read.sums) total += sum;
    return total;
}
