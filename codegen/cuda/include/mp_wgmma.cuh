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
#endif
