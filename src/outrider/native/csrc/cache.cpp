// Moving cached positions. Works on any layout of 2- and 4-byte pieces that attention.h describes.

#include <cstring>

#include "abi.h"
#include "work.h"

namespace {

// Moves position `from` to `to` in one side (keys or values) of one layer and kv head.
struct Mover {
    uint8_t* side;
    int half_blocks;

    void key(int64_t from, int64_t to) const {
        for (int pair = 0; pair < 16 * half_blocks; pair++) {
            const int64_t row = pair / 16 * TILE_BYTES + pair % 16 * 64;
            std::memcpy(side + to / 16 * half_blocks * TILE_BYTES + row + to % 16 * 4,
                        side + from / 16 * half_blocks * TILE_BYTES + row + from % 16 * 4, 4);
        }
    }
    void value(int64_t from, int64_t to) const {
        const int64_t block = (int64_t)2 * half_blocks * TILE_BYTES;
        for (int i = 0; i < 32 * half_blocks; i++) {
            const int64_t column = i / 16 * TILE_BYTES + i % 16 * 4;
            std::memcpy(side + to / 32 * block + column + to % 32 / 2 * 64 + to % 2 * 2,
                        side + from / 32 * block + column + from % 32 / 2 * 64 + from % 2 * 2, 2);
        }
    }
};

}  // namespace

// Keeps the first `base` positions and those behind them named in `path` (ascending), in order.
// `num_sides` is layers x kv heads.
OUTRIDER_EXPORT void outrider_keep(uint8_t* cache, int64_t capacity, int32_t num_sides, int32_t half_blocks, int64_t base,
                                   const int32_t* path, int32_t num_kept) {
    const int64_t bytes = capacity * half_blocks * 32 * 2;
    for (int32_t i = 0; i < num_sides; i++) {
        const Mover keys{cache + 2 * i * bytes, half_blocks}, values{cache + (2 * i + 1) * bytes, half_blocks};
        for (int32_t k = 0; k < num_kept; k++) {
            if (path[k] == k) continue;
            keys.key(base + path[k], base + k);
            values.value(base + path[k], base + k);
        }
    }
}
