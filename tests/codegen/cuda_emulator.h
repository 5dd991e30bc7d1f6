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
struct Cluster { std::atomic<int> arrived{0}, turn{0}; int expected = 0; std::vector<char *> bases; std::vector<unsigned char *> dynamics; };
struct Wgmma { float *c; int columns; const unsigned *a; uint64_t tile, b; int add; bool transposed; }; // a, or a tile of it
struct Fiber {
    std::vector<Wgmma> open;                  // products that are not committed
    std::vector<std::vector<Wgmma>> products; // groups that nobody has waited for
    jmp_buf place; // where it goes on: jumps ask nothing of the system, unlike swapcontext
    Dim thread;
    int lane;
    Warp *warp;
    Barrier *group; // of the warpgroup
    bool begun, done;
    int arrivals;
    const int *watched; // a barrier's turn; there is nothing to do while it is `seen`
    int seen;
};
struct Block {
    jmp_buf scheduler;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Barrier> groups;
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
static const size_t STACK = (128 << 10) + 832; // not a power of two: all of them would meet in the same sets of caches
struct Stacks { // kept by each OS thread, with what stands on them; memory that is never touched costs nothing
    unsigned char *data = nullptr;
    std::vector<jmp_buf> idle; // where the fibers of earlier blocks wait for a thread of another
    std::vector<char> used;
    void grow(size_t n)
    {
        if (n <= used.size()) return;
        free(data);
        data = (unsigned char *)malloc(n * STACK);
        idle = std::vector<jmp_buf>(n);
        used.assign(n, 0);
    }
    ~Stacks() { free(data); }
};
static thread_local Stacks stacks;
static void start()
{
    for (;;) {
        Block *b = block;
        Fiber *f = b->current;
        b->entry(b->args);
        f->done = true;
        --b->barrier.live;
        b->barrier.release();
        --f->warp->barrier.live;
        f->warp->barrier.release();
        --f->group->live;
        f->group->release();
        if (_setjmp(stacks.idle[f->thread.x]) == 0) _longjmp(b->scheduler, 1);
    }
}
static __attribute__((noinline)) void resume(Block &b, Fiber &f)
{
    if (_setjmp(b.scheduler) != 0) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    const size_t i = f.thread.x;
    if (stacks.used[i]) _longjmp(stacks.idle[i], 1);
    stacks.used[i] = 1;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.data + i * STACK;
    context.uc_stack.ss_size = STACK / 16 * 16;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    setcontext(&context);
}
static void run_block(Block &b, Dim index)
{
    block = &b;
    b.index = index;
    const int n = b.size.x;
    b.fibers.assign(n, Fiber());
    b.warps.assign((n + 31) / 32, Warp());
    b.groups.assign((n + 127) / 128, Barrier());
    memset(b.dynamic.data(), 0xff, b.dynamic.size());
    b.barrier = Barrier();
    b.barrier.live = n;
    stacks.grow(n);
    for (int i = 0; i < n; ++i) {
        Fiber &f = b.fibers[i];
        f.thread = {(unsigned)i, 0, 0};
        f.lane = i % 32;
        f.warp = &b.warps[i / 32];
        ++f.warp->barrier.live;
        f.group = &b.groups[i / 128];
        ++f.group->live;
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
static inline unsigned __ballot_sync(unsigned, bool v)
{
    emu::publish(v);
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= (unsigned)emu::read<bool>(lane) << lane;
    emu::leave();
    return all;
}
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
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
        c->dynamics[rank] = b.dynamic.data();
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
                    alone.dynamics.resize(1);
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
        c.dynamics.resize(cluster);
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

#include "cuda_emulator_ptx.h"
#include "cuda_emulator_wgmma.h"
