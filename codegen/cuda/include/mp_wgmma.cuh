/* Hopper's tensor cores (sm_90a): products of 64 x 16 by 16 x N that a warpgroup starts and later waits for. The tests run
 * kernels on the CPU with their own version of the instructions; how shared memory is described is the same for both.
 *
 * A warpgroup is 128 threads, 64 rows of c. Warp w of it holds rows 16 w to 16 w + 15 as mma.m16n8k16 does: lane 4g + t has
 * a: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8), and c[n]: (g, 8n + 2t) (g, 8n + 2t + 1) (g + 8, ...) (g + 8, ...).
 *
 * b lies in shared memory in rows of 128 bytes, eight rows to a tile of 1024 bytes (at a multiple of 1024), tile after
 * tile; 16-byte chunk c of row r is found at chunk c ^ (r % 8). Described by start address, two distances and that swizzle:
 *   a row is a column of c (keys of q k'): mp_tile(start, 0); 16 more of the depth lie 32 bytes further on;
 *   a row is one step of the depth (values): mp_tile(start, wide) where columns 64 to 127 lie `wide` bytes behind the first
 *   64; 16 more of the depth lie 2048 bytes further on. This is the transposed form of the product. */
__device__ __forceinline__ unsigned long long mp_tile(mp_shared start, unsigned int wide)
{
    const unsigned long long swizzled = 1ull << 62, next_rows = 1024 >> 4, halves = wide ? wide >> 4 : 1;
    return swizzled | next_rows << 32 | halves << 16 | (start & 0x3ffff) >> 4;
}

#if !defined(MP_EMULATED)
/* What threads wrote to shared memory is there for the tensor cores; each writer calls it before the barrier. */
MP_PTX void mp_show_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* Before products whose registers were written; after it they belong to the tensor cores until mp_wgmma_wait. */
MP_PTX void mp_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MP_PTX void mp_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> MP_PTX void mp_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
/* A warpgroup's registers of each thread: fewer for one that only copies, so that others have more. */
template <int N> MP_PTX void mp_registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> MP_PTX void mp_registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
/* All threads of one warpgroup. */
MP_PTX void mp_group_barrier(int group) { asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory"); }
/* Registers of products that were waited for: no use of them may be moved before this. */
template <int N> MP_PTX void mp_settle(float (&c)[N][4])
{
    MP_PRAGMA(unroll)
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(c[i / 4][i % 4]) :: "memory");
}
template <int N> MP_PTX void mp_settle(unsigned int (&a)[N][4])
{
    MP_PRAGMA(unroll)
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]) :: "memory");
}

#define MP_LIST0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MP_LIST16 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MP_LIST32 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MP_LIST48 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MP_SUMS4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define MP_SUMS16(n) MP_SUMS4(n), MP_SUMS4(n + 1), MP_SUMS4(n + 2), MP_SUMS4(n + 3)
#define MP_LIST64 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MP_LIST80 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MP_LIST96 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define MP_LIST112 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
/* c = a b, or c += a b where `add` is not 0. */
#define MP_WGMMA(n, columns, list, a0, a1, a2, a3, b0, add0, form, ...) \
    template <int TRANSPOSED> MP_PTX void mp_wgmma(float (&c)[n][4], const unsigned int (&a)[4], unsigned long long b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " add0 ", 0; " \
            "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" list "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", p, 1, 1, " form "; }" \
            : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED)); }
MP_WGMMA(8, "64", MP_LIST0 "," MP_LIST16, "%32", "%33", "%34", "%35", "%36", "%37", "%38",
    MP_SUMS16(0), MP_SUMS16(4))
MP_WGMMA(12, "96", MP_LIST0 "," MP_LIST16 "," MP_LIST32, "%48", "%49", "%50", "%51", "%52", "%53", "%54",
    MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8))
MP_WGMMA(16, "128", MP_LIST0 "," MP_LIST16 "," MP_LIST32 "," MP_LIST48, "%64", "%65", "%66", "%67", "%68", "%69", "%70",
    MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8), MP_SUMS16(12))
/* The same with a in shared memory, too: its rows are rows of c. */
#define MP_WGMMA_BOTH(n, columns, list, a0, b0, add0, ...) \
    MP_PTX void mp_wgmma(float (&c)[n][4], unsigned long long a, unsigned long long b, int add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " add0 ", 0; " \
            "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" list "}, " a0 ", " b0 ", p, 1, 1, 0, 0; }" \
            : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); }
MP_WGMMA_BOTH(4, "32", MP_LIST0, "%16", "%17", "%18", MP_SUMS16(0))
MP_WGMMA_BOTH(8, "64", MP_LIST0 "," MP_LIST16, "%32", "%33", "%34", MP_SUMS16(0), MP_SUMS16(4))
MP_WGMMA_BOTH(12, "96", MP_LIST0 "," MP_LIST16 "," MP_LIST32, "%48", "%49", "%50", MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8))
MP_WGMMA_BOTH(16, "128", MP_LIST0 "," MP_LIST16 "," MP_LIST32 "," MP_LIST48, "%64", "%65", "%66",
    MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8), MP_SUMS16(12))
MP_WGMMA_BOTH(24, "192", MP_LIST0 "," MP_LIST16 "," MP_LIST32 "," MP_LIST48 "," MP_LIST64 "," MP_LIST80, "%96", "%97", "%98",
    MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8), MP_SUMS16(12), MP_SUMS16(16), MP_SUMS16(20))
MP_WGMMA_BOTH(32, "256", MP_LIST0 "," MP_LIST16 "," MP_LIST32 "," MP_LIST48 "," MP_LIST64 "," MP_LIST80 "," MP_LIST96 "," MP_LIST112,
    "%128", "%129", "%130", MP_SUMS16(0), MP_SUMS16(4), MP_SUMS16(8), MP_SUMS16(12), MP_SUMS16(16), MP_SUMS16(20), MP_SUMS16(24), MP_SUMS16(28))
#endif

/* The warpgroup of a thread; the shuffle shows the compiler that a warp has one. */
__device__ __forceinline__ int mp_warpgroup() { return __shfl_sync(~0u, (int)threadIdx.x / 128, 0); }
