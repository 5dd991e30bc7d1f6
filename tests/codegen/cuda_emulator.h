// Runs generated CUDA kernels on the CPU, so that their arithmetic and synchronization are tested where no GPU is.
// A thread is a fiber, a block an OS thread's turn: shared memory is thread-local storage. Slow, and exact in meaning.
#pragma once
#define MP_EMULATED 1
#undef _FORTIFY_SOURCE // its longjmp takes a jump to another fiber's stack for a mistake
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emu {
struct Dim { unsigned x, y, z; };
struct Barrier {
    int live = 0, arrived = 0, turn = 0;
    void release() { if (arrived == live && live > 0) arrived = 0, ++turn; }
};
struct Warp { Barrier barrier; unsigned words[32][8]; };
struct Cluster { std::atomic<int> arrived{0}, turn{0}; int expected = 0; std::vector<char *> bases; };
struct Wgmma { float *c; int columns; const unsigned *a; uint64_t b; int add; bool transposed; };
struct Fiber {
    std::vector<Wgmma> open;                  // products that are not committed
    std::vector<std::vector<Wgmma>> products; // groups that nobody has waited for
    ucontext_t context; // where it starts
    jmp_buf place;      // where it goes on: jumps ask nothing of the system, unlike swapcontext
    Dim thread;
    int lane;
    Warp *warp;
    bool begun, done;
    int arrivals;
    const int *watched; // a barrier's turn; there is nothing to do while it is `seen`
    int seen;
};
struct Block {
    jmp_buf scheduler;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    Dim index, grid, size;
    std::vector<unsigned char> dynamic;
    Cluster *cluster;
    int rank;
    Fiber *current;
    void (*entry)(const int64_t *);
    void *kernel; // of this launch: several threads may launch at once
    const int64_t *args;
};
static thread_local Block *block;
static thread_local char tls_mark;

static __attribute__((noinline)) void yield()
{
    Block *b = block;
    if (_setjmp(b->current->place) == 0) _longjmp(b->scheduler, 1);
}
static __attribute__((noinline)) void resume(Block &b, Fiber &f)
{
    if (_setjmp(b.scheduler) != 0) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}
static inline void wait(Barrier &b)
{
    Fiber *f = block->current;
    const int turn = b.turn;
    ++b.arrived;
    b.release();
    f->watched = &b.turn;
    f->seen = turn;
    while (b.turn == turn) yield();
    f->watched = nullptr;
}
static void start()
{
    Block *b = block;
    Fiber *f = b->current;
    b->entry(b->args);
    f->done = true;
    --b->barrier.live;
    b->barrier.release();
    --f->warp->barrier.live;
    f->warp->barrier.release();
    _longjmp(b->scheduler, 1);
}
static const size_t STACK = 128 << 10;
struct Stacks { // kept by each OS thread; memory that is never touched costs nothing
    unsigned char *data = nullptr;
    size_t size = 0;
    void grow(size_t n) { if (n > size) { free(data); data = (unsigned char *)malloc(n); size = n; } }
    ~Stacks() { free(data); }
};
static thread_local Stacks stacks;
static void run_block(Block &b, Dim index)
{
    block = &b;
    b.index = index;
    const int n = b.size.x;
    b.fibers.assign(n, Fiber());
    b.warps.assign((n + 31) / 32, Warp());
    memset(b.dynamic.data(), 0xff, b.dynamic.size());
    b.barrier = Barrier();
    b.barrier.live = n;
    stacks.grow(n * STACK);
    ucontext_t here;
    getcontext(&here);
    for (int i = 0; i < n; ++i) {
        Fiber &f = b.fibers[i];
        f.thread = {(unsigned)i, 0, 0};
        f.lane = i % 32;
        f.warp = &b.warps[i / 32];
        ++f.warp->barrier.live;
        f.context = here;
        f.context.uc_stack.ss_sp = stacks.data + i * STACK;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, start, 0);
    }
    for (int left = n, idle = 0; left > 0;) {
        left = 0;
        for (int i = 0; i < n; ++i) {
            if (b.fibers[i].done) continue;
            ++left;
            if (b.fibers[i].watched && *b.fibers[i].watched == b.fibers[i].seen) continue;
            b.current = &b.fibers[i];
            resume(b, b.fibers[i]);
        }
        if (b.cluster->bases.size() > 1 && ++idle % 4 == 0) sched_yield();
    }
}
template <typename T> static inline void publish(const T &v) { memcpy(block->current->warp->words[block->current->lane], &v, sizeof v); wait(block->current->warp->barrier); }
template <typename T> static inline T read(int lane) { T v; memcpy(&v, block->current->warp->words[lane], sizeof v); return v; }
static inline void leave() { wait(block->current->warp->barrier); }
static inline float brain(unsigned w, int half) { const unsigned u = half ? w & 0xffff0000u : w << 16; float f; memcpy(&f, &u, 4); return f; }
}  // namespace emu

#define threadIdx (emu::block->current->thread)
#define blockIdx (emu::block->index)
#define gridDim (emu::block->grid)
#define blockDim (emu::block->size)

static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline long long __double_as_longlong(double d) { long long u; memcpy(&u, &d, 8); return u; }
#define __expf(x) expf(x)
static inline float __fdividef(float a, float b) { return a / b; }
struct uint2 { unsigned x, y; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline void __syncthreads() { emu::wait(emu::block->barrier); }
static inline void __syncwarp() { emu::wait(emu::block->current->warp->barrier); }
static inline void __threadfence() {}
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline T __shfl_xor_sync(unsigned, T v, int d) { emu::publish(v); const T r = emu::read<T>(emu::block->current->lane ^ d); emu::leave(); return r; }
template <typename T> static inline T __shfl_sync(unsigned, T v, int lane) { emu::publish(v); const T r = emu::read<T>(lane); emu::leave(); return r; }
template <typename T> static inline T __shfl_up_sync(unsigned, T v, int d)
{
    emu::publish(v);
    const int lane = emu::block->current->lane;
    const T r = emu::read<T>(lane >= d ? lane - d : lane);
    emu::leave();
    return r;
}
static inline int atomicCAS(int *p, int expected, int v) { const int old = *p; if (old == expected) *p = v; return old; }
static inline unsigned atomicInc(unsigned *p, unsigned most) { const unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
static inline int atomicExch(int *p, int v) { const int old = *p; *p = v; return old; }
template <typename T> static inline T atomicAdd(T *p, T v) { const T old = *p; *p += v; return old; }
template <typename T> static inline T atomicMax(T *p, T v) { const T old = *p; if (v > old) *p = v; return old; }

// mp_ptx.cuh
typedef uintptr_t mp_shared;
#define MP_DYNAMIC_SHARED(name) unsigned char *const name = emu::block->dynamic.data()
static inline float mp_half_to_float(unsigned short h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const float v = e == 0 ? ldexpf((float)m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexpf((float)(m + 1024), e - 25);
    return h & 0x8000 ? -v : v;
}
static inline unsigned short mp_float_to_half(float f)
{
    const unsigned sign = __float_as_uint(f) >> 16 & 0x8000;
    f = fabsf(f);
    if (f != f) return (unsigned short)(sign | 0x7fff);
    if (f >= 65520.0f) return (unsigned short)(sign | 0x7c00);
    if (f < 6.103515625e-05f) return (unsigned short)(sign | (unsigned)nearbyintf(ldexpf(f, 24)));
    int e;
    const float m = frexpf(f, &e);
    return (unsigned short)(sign | ((unsigned)(e + 13) << 10) + (unsigned)nearbyintf(ldexpf(m, 11)));
}
static inline unsigned short mp_float_to_brain(float f)
{
    const unsigned u = __float_as_uint(f);
    return (unsigned short)(f != f ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline unsigned mp_pack_brain(float low, float high) { return mp_float_to_brain(low) | (unsigned)mp_float_to_brain(high) << 16; }
static inline unsigned mp_pack_half(float low, float high) { return mp_float_to_half(low) | (unsigned)mp_float_to_half(high) << 16; }
static inline float mp_exp2(float v) { return exp2f(v); }
static inline void mp_release() {}
static inline void mp_wait() {}
static inline uint4 mp_read_const(const void *p) { if ((uintptr_t)p % 16) abort(); return *(const uint4 *)p; }
static inline uint4 mp_read_fresh(const void *p) { return mp_read_const(p); }
static inline uint4 mp_read_cached(const void *p) { return mp_read_const(p); }
static inline int mp_read_int(const int *p) { return *p; }
static inline mp_shared mp_shared_address(const void *p) { return (mp_shared)p; }
static inline uint4 mp_read_shared(mp_shared a) { return mp_read_const((const void *)a); }
static inline void mp_copy(mp_shared to, const void *from) { if (to % 16) abort(); *(uint4 *)to = mp_read_const(from); }
static inline void mp_copy_if(mp_shared to, const void *from, int live) { if (live) mp_copy(to, from); else *(uint4 *)to = make_uint4(0, 0, 0, 0); }
static inline void mp_copy_commit() {}
template <int N> static inline void mp_copy_wait() {}
namespace emu {
struct Fragments { unsigned a[4], b[2]; };
template <typename Widen> static inline void mma(float *c, int rows, const Fragments &mine, Widen widen)
{
    publish(mine);
    const int lane = block->current->lane, g = lane / 4, t = lane % 4;
    for (int i = 0; i < (rows == 16 ? 4 : 2); ++i) {
        const int row = g + i / 2 * 8, n = 2 * t + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const Fragments a = read<Fragments>(row % 8 * 4 + k % 8 / 2), b = read<Fragments>(n * 4 + k % 8 / 2);
            sum += widen(a.a[(row >= 8) + 2 * (k >= 8)], k % 2) * widen(b.b[k >= 8], k % 2);
        }
        c[i] = sum;
    }
    leave();
}
static inline float half(unsigned w, int upper) { return mp_half_to_float((unsigned short)(upper ? w >> 16 : w)); }
static inline uint4 matrices(mp_shared address, bool transposed)
{
    if (address % 16) abort();
    publish(address);
    const int lane = block->current->lane, g = lane / 4, t = lane % 4;
    unsigned words[4];
    for (int i = 0; i < 4; ++i) {
        unsigned short e[2];
        for (int j = 0; j < 2; ++j) {
            const int row = transposed ? 2 * t + j : g, column = transposed ? g : 2 * t + j;
            e[j] = ((const unsigned short *)read<mp_shared>(i * 8 + row))[column];
        }
        words[i] = e[0] | (unsigned)e[1] << 16;
    }
    leave();
    return make_uint4(words[0], words[1], words[2], words[3]);
}
}  // namespace emu
static inline void mp_mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma(c, 16, {{a0, a1, a2, a3}, {b0, b1}}, emu::brain); }
static inline void mp_mma_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma(c, 16, {{a0, a1, a2, a3}, {b0, b1}}, emu::half); }
static inline void mp_mma_top(float (&c)[2], unsigned a0, unsigned a2, unsigned b0, unsigned b1) { emu::mma(c, 8, {{a0, 0, a2, 0}, {b0, b1}}, emu::brain); }
static inline unsigned mp_transpose(unsigned v)
{
    emu::publish(v);
    const int lane = emu::block->current->lane, g = lane / 4, t = lane % 4;
    unsigned short e[2];
    for (int j = 0; j < 2; ++j) { const unsigned w = emu::read<unsigned>((2 * t + j) * 4 + g / 2); e[j] = (unsigned short)(g % 2 ? w >> 16 : w); }
    emu::leave();
    return e[0] | (unsigned)e[1] << 16;
}
static inline uint4 mp_load_matrices(mp_shared a) { return emu::matrices(a, false); }
static inline uint4 mp_load_transposed(mp_shared a) { return emu::matrices(a, true); }

// mp_wgmma.cuh: a warpgroup's products, done as late as they may be: when they are waited for. Whoever touches their
// registers or shared memory before gets wrong numbers. What is known of the hardware's view of shared memory is here: a
// descriptor holds bits 4 to 17 of the start address (bits 0 to 13), a leading distance (16 to 29) and a stride (32 to 45), both
// in units of 16 bytes, an offset that is 0 where tiles begin at multiples of 1024 (49 to 51), and 1 for the swizzle of 128 bytes
// (62, 63): bits 7 to 9 of every address are added, without carry, to its bits 4 to 6.
//   not transposed, a row of 128 bytes for each column n: groups of eight columns lie a stride apart; the leading distance has no use;
//   transposed, a row of 64 columns for each k: groups of eight k lie a stride apart, groups of 64 columns a leading distance.
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
    struct Words { unsigned a[4]; } mine;
    memcpy(mine.a, w.a, sizeof mine.a);
    publish(mine);
    const int g = block->current->lane / 4, t = block->current->lane % 4;
    float x[2][16];
    for (int i = 0; i < 32; ++i) {
        const int k = i % 16;
        x[i / 16][k] = brain(read<Words>(g * 4 + k % 8 / 2).a[i / 16 + 2 * (k >= 8)], k % 2);
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
template <int T, int N> static inline void mp_wgmma(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b, int add) { emu::block->current->open.push_back({&c[0][0], N * 8, a, b, add, T != 0}); }
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
}
template <typename T> static inline void mp_settle(T &) {}

static inline mp_shared mp_remote(mp_shared a, int rank) { return a - (mp_shared)&emu::tls_mark + (mp_shared)emu::block->cluster->bases[rank]; }
static inline void mp_store_remote(mp_shared a, float v) { *(float *)a = v; }
static inline void mp_cluster_arrive()
{
    emu::Cluster &c = *emu::block->cluster;
    ++emu::block->current->arrivals;
    if (++c.arrived == c.expected) { c.arrived = 0; ++c.turn; }
}
static inline void mp_cluster_wait() { while (emu::block->cluster->turn < emu::block->current->arrivals) emu::yield(); }

namespace emu {
template <size_t... I> static void call(void *f, const int64_t *a, std::index_sequence<I...>) { ((void (*)(decltype((void)I, int64_t())...))f)(a[I]...); }
template <size_t N> static void entry(const int64_t *a) { call(block->kernel, a, std::make_index_sequence<N>()); }
template <size_t... N> static void (*choose(int n, std::index_sequence<N...>))(const int64_t *)
{
    static void (*const table[])(const int64_t *) = {entry<N>...};
    return table[n];
}
}  // namespace emu

extern "C" int emu_launch(void *kernel, const unsigned *grid, unsigned threads, unsigned shared, unsigned cluster, const int64_t *args, int count)
{
    using namespace emu;
    const Dim size = {threads, 1, 1}, all = {grid[0], grid[1], grid[2]};
    auto prepare = [&](Block &b, Cluster *c, int rank) {
        b.size = size, b.grid = all, b.cluster = c, b.rank = rank, b.kernel = kernel, b.args = args;
        b.dynamic.resize(shared + 128);
        b.entry = choose(count, std::make_index_sequence<40>());
    };
    if (cluster <= 1) {
        Block b;
        for (unsigned z = 0; z < all.z; ++z)
            for (unsigned y = 0; y < all.y; ++y)
                for (unsigned x = 0; x < all.x; ++x) {
                    Cluster alone;
                    alone.expected = (int)threads;
                    alone.bases.push_back(&tls_mark);
                    prepare(b, &alone, 0);
                    run_block(b, {x, y, z});
                }
        return 0;
    }
    for (unsigned i = 0; i < all.x / cluster * all.y * all.z; ++i) {
        const unsigned first = i % (all.x / cluster) * cluster, y = i / (all.x / cluster) % all.y, z = i / (all.x / cluster) / all.y;
        Cluster c;
        c.expected = (int)(threads * cluster);
        c.bases.resize(cluster);
        std::atomic<unsigned> ready{0};
        std::vector<std::thread> blocks;
        for (unsigned r = 0; r < cluster; ++r)
            blocks.emplace_back([&, r] {
                Block b;
                        prepare(b, &c, (int)r);
                c.bases[r] = &tls_mark;
                ++ready;
                while (ready < cluster) sched_yield();
                run_block(b, {first + r, y, z});
            });
        for (auto &t : blocks) t.join();
    }
    return 0;
}
