#include "dispatch.h"

#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__x86_64__)

#include <cpuid.h>

bool has_bit(unsigned leaf, unsigned subleaf, int reg, int bit) {
    unsigned regs[4] = {};
    if (!__get_cpuid_count(leaf, subleaf, &regs[0], &regs[1], &regs[2], &regs[3])) return false;
    return regs[reg] >> bit & 1;
}

// Register state that the operating system saves: bits of XCR0.
bool saves_state(uint64_t mask) {
    if (!has_bit(1, 0, 2, 27)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (((uint64_t)high << 32 | low) & mask) == mask;
}

constexpr int EAX = 0, EBX = 1, ECX = 2, EDX = 3;

bool has_avx2() { return saves_state(0x6) && has_bit(7, 0, EBX, 5) && has_bit(1, 0, ECX, 12) && has_bit(1, 0, ECX, 29); }

bool has_avx512() {
    const bool base = has_bit(7, 0, EBX, 16) && has_bit(7, 0, EBX, 17) && has_bit(7, 0, EBX, 30) && has_bit(7, 0, EBX, 31);
    return saves_state(0xe6) && base && has_bit(7, 0, ECX, 11) && has_bit(7, 1, EAX, 5);  // VNNI, BF16
}

// Linux hands out tile registers only on request, to the whole process.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    const bool tiles = has_bit(7, 0, EDX, 24) && has_bit(7, 0, EDX, 22) && has_bit(7, 0, EDX, 25);
    return has_avx512() && saves_state(0x60000) && tiles && may_use_tiles();
}

#elif defined(__aarch64__)

#if defined(__linux__)
// Bits of the kernel's interface, which old headers do not name.
bool has_dot_product() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_matrices() {
    const unsigned long features = getauxval(AT_HWCAP2);
    return features >> 13 & 1 && features >> 14 & 1;  // I8MM, BF16
}
#elif defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"); }
#else
bool has_dot_product() { return false; }
bool has_matrices() { return false; }
#endif

bool has_dot_product_and_matrices() { return has_dot_product() && has_matrices(); }

#endif

bool always() { return true; }

struct Choice {
    const Kernels* kernels;
    bool (*can_run)();
};

// Fastest first.
const Choice choices[] = {
#if defined(__x86_64__)
    {&kernels_amx, has_amx},
    {&kernels_avx512, has_avx512},
    {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon_bf16, has_dot_product_and_matrices},
    {&kernels_neon_dot, has_dot_product},
    {&kernels_neon, always},
#endif
    {&kernels_portable, always},
};

}  // namespace

const Kernels* find_kernels(const char* name) {
    const bool any = std::strcmp(name, "auto") == 0;
    for (const Choice& choice : choices)
        if ((any || std::strcmp(name, choice.kernels->name) == 0) && choice.can_run()) return choice.kernels;
    return nullptr;
}
