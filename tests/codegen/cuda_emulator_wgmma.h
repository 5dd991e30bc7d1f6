// What mp_wgmma.cuh has: a warpgroup's products, done as late as they may be: when they are waited for. Whoever touches their
// registers or shared memory before gets wrong numbers. What is known of the hardware's view of shared memory is here: a
// descriptor holds bits 4 to 17 of the start address (bits 0 to 13), a leading distance (16 to 29) and a stride (32 to 45), both
// in units of 16 bytes, an offset that is 0 where tiles begin at multiples of 1024 (49 to 51), and 1 for the swizzle of 128 bytes
// (62, 63): bits 7 to 9 of every address are added, without carry, to its bits 4 to 6.
//   not transposed, a row of 128 bytes for each column n: groups of eight columns lie a stride apart; the leading distance has no use;
//   transposed, a row of 64 columns for each k: groups of eight k lie a stride apart, groups of 64 columns a leading distance.
#pragma once
#include "cuda_emulator.h"

namespace emu {
static inline const unsigned short *described(uint64_t d, int n, int k, bool transposed)
{
    if (d >> 62 != 1 || (d >> 49 & 7)) abort();
    const uintptr_t base = (uintptr_t)block->dynamic.data(), start = base + (((d & 0x3fff) << 4) - base & 0x3ffff);
    const uintptr_t leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
    uintptr_t at = start + (transposed ? k / 8 * stride + k % 8 * 128 + n / 64 * leading + n % 64 * 2 : n / 8 * stride + n % 8 * 128 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    if (at < base || at + 2 > base + block->dynamic.size()) abort();
    return (const unsigned short *)at;
}
static inline void multiply(const Wgmma &w)
{
    struct Words { unsigned a[4]; } mine = {};
    if (w.a) memcpy(mine.a, w.a, sizeof mine.a);
    publish(mine);
    const int g = block->current->lane / 4, t = block->current->lane % 4, first = block->current->thread.x % 128 / 32 * 16 + g;
    float x[2][16];
    for (int i = 0; i < 32; ++i) {
        const int k = i % 16;
        x[i / 16][k] = w.a ? brain(read<Words>(g * 4 + k % 8 / 2).a[i / 16 + 2 * (k >= 8)], k % 2)
                           : brain(*described(w.tile, first + i / 16 * 8, k, false), 0);
    }
    for (int i = 0; i < w.columns / 4; ++i) { // two rows of a column: c[n / 8][2 r + n % 2]
        const int n = i / 2 * 8 + 2 * t + i % 2;
        float sums[2] = {};
        for (int k = 0; k < 16; ++k) {
            const float v = brain(*described(w.b, n, k, w.transposed), 0);
            sums[0] += x[0][k] * v, sums[1] += x[1][k] * v;
        }
        for (int r = 0; r < 2; ++r) {
            float &c = w.c[i / 2 * 4 + 2 * r + i % 2];
            c = (w.add ? c : 0.0f) + sums[r];
        }
    }
    leave();
}
}  // namespace emu
static inline void mp_show_shared() {}
static inline void mp_wgmma_begin() {}
template <int T, int N> static inline void mp_wgmma(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b, int add) { emu::block->current->open.push_back({&c[0][0], N * 8, a, 0, b, add, T != 0}); }
template <int N> static inline void mp_wgmma(float (&c)[N][4], unsigned long long a, unsigned long long b, int add) { emu::block->current->open.push_back({&c[0][0], N * 8, nullptr, a, b, add, false}); }
static inline void mp_group_barrier(int) { emu::wait(*emu::block->current->group); }
template <int N> static inline void mp_registers_fewer() {}
template <int N> static inline void mp_registers_more() {}
static inline void mp_wgmma_commit()
{
    emu::Fiber &f = *emu::block->current;
    f.products.push_back(std::move(f.open));
    f.open.clear();
}
template <int N> static inline void mp_wgmma_wait()
{
    auto &all = emu::block->current->products;
    for (; all.size() > N; all.erase(all.begin()))
        for (const auto &w : all.front()) emu::multiply(w);
    emu::wait(*emu::block->current->group); // one thread may say that the whole warpgroup is done
}
template <typename T> static inline void mp_settle(T &) {}
