/* Instructions that C++ has no words for. The tests run kernels on the CPU with their own versions of these. */
#if !defined(MP_EMULATED)
typedef unsigned int mp_shared; /* an address in shared memory */
#define MP_PTX __device__ __forceinline__
#define MP_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

MP_PTX float mp_half_to_float(unsigned short h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
MP_PTX unsigned short mp_float_to_half(float f) { unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
MP_PTX unsigned short mp_float_to_brain(float f)
{
#if __CUDA_ARCH__ >= 800
    unsigned short h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
#else
    const unsigned int u = __float_as_uint(f);
    return (unsigned short)(f != f ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}
MP_PTX unsigned int mp_pack_brain(float low, float high)
{
#if __CUDA_ARCH__ >= 800
    unsigned int d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    return mp_float_to_brain(low) | (unsigned int)mp_float_to_brain(high) << 16;
#endif
}
MP_PTX unsigned int mp_pack_half(float low, float high) { return mp_float_to_half(low) | (unsigned int)mp_float_to_half(high) << 16; }
/* Bytes of a and b by the digits of `which`; a rotation; a & mask | more, for which the compiler may take two
 * instructions if both are constants; a b + c of two bf16. */
MP_PTX unsigned int mp_permute(unsigned int a, unsigned int b, unsigned int which) { return __byte_perm(a, b, which); }
MP_PTX unsigned int mp_and_or(unsigned int a, unsigned int mask, unsigned int more)
{
    unsigned int d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(more));
    return d;
}
MP_PTX unsigned int mp_rotate(unsigned int v, int right) { return __funnelshift_r(v, v, right); }
#if __CUDA_ARCH__ >= 800
MP_PTX float mp_max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
MP_PTX unsigned int mp_fma_brains(unsigned int a, unsigned int b, unsigned int c)
{
    unsigned int d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif
/* Two floats of 8 bits (e4m3) as f16, where there is an instruction for it. */
#if __CUDA_ARCH__ >= 890
#define MP_FLOAT8 1
MP_PTX unsigned int mp_float8_to_halves(unsigned short two)
{
    unsigned int d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(two));
    return d;
}
#else
#define MP_FLOAT8 0
#endif
MP_PTX float mp_exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }

/* Programmatic dependent launch: mp_release lets the next kernel start; before mp_wait only constants may be touched. */
#if __CUDA_ARCH__ >= 900
MP_PTX void mp_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
MP_PTX void mp_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
MP_PTX void mp_release() {}
MP_PTX void mp_wait() {}
#endif

/* Loads that stay where they are written, in particular before mp_wait: of constants, and of what another SM wrote. */
#define MP_READ16(name, op) MP_PTX uint4 name(const void *p) { uint4 v; \
    asm volatile(op ".v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
MP_READ16(mp_read_const, "ld.global.nc")
MP_READ16(mp_read_fresh, "ld.global.cg")
/* One that may be moved. Its half of a line brings the other half into L2: who reads 64 bytes of each row wants both. */
MP_PTX uint4 mp_read_cached(const void *p)
{
    uint4 v;
    asm("ld.global.cg.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

MP_PTX mp_shared mp_shared_address(const void *p) { return (mp_shared)__cvta_generic_to_shared(p); }
MP_PTX uint4 mp_read_shared(mp_shared a)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
MP_PTX void mp_write_shared(mp_shared a, const float (&v)[4])
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" :: "r"(a), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
/* 16 bytes from global to shared memory in the background, and their line into L2; where `live` is 0, zeros. */
#if __CUDA_ARCH__ >= 800
MP_PTX void mp_copy(mp_shared to, const void *from) { asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory"); }
MP_PTX void mp_copy_if(mp_shared to, const void *from, int live)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
MP_PTX void mp_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> MP_PTX void mp_copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
#else
MP_PTX void mp_copy_if(mp_shared to, const void *from, int live)
{
    const uint4 v = live ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
MP_PTX void mp_copy(mp_shared to, const void *from) { mp_copy_if(to, from, 1); }
MP_PTX void mp_copy_commit() {}
template <int N> MP_PTX void mp_copy_wait() {}
#endif

/* A whole run of bytes, all in multiples of 16, by one thread. A barrier in shared memory counts what has arrived: lap after
 * lap, one thread says how much is expected, and all wait for the end of a lap that is even (0) or odd (1). A lap also needs
 * `count` arrivals; mp_lap_expect is one of them. */
#if __CUDA_ARCH__ >= 900
MP_PTX void mp_laps_begin(mp_shared laps, unsigned int count = 1) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(laps), "r"(count) : "memory"); }
MP_PTX void mp_laps_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MP_PTX void mp_lap_expect(mp_shared laps, unsigned int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(laps), "r"(bytes) : "memory");
}
MP_PTX void mp_lap_arrive(mp_shared laps) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(laps) : "memory"); }
MP_PTX void mp_lap_wait(mp_shared laps, unsigned int odd)
{
    for (unsigned int done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(laps), "r"(odd) : "memory");
}
MP_PTX void mp_copy_run(mp_shared to, const void *from, unsigned int bytes, mp_shared laps)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(laps) : "memory");
}
#endif

/* A matrix in global memory as the copy engine knows it: the driver makes the map. A box is 64 columns of some rows, in rows of
 * 128 bytes that are swizzled (see mp_tile); what lies behind the matrix is 0. Kernels take maps as MP_MAP. */
struct __align__(64) mp_map { unsigned long long words[16]; };
#define MP_MAP const __grid_constant__ mp_map
MP_PTX const mp_map *mp_map_of(const mp_map &map) { return &map; }
#if __CUDA_ARCH__ >= 900
MP_PTX void mp_copy_box(mp_shared to, const mp_map *map, int column, int row, mp_shared laps)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(laps) : "memory");
}
#endif

/* Tensor cores. mma: c[16][8] += a[16][16] b[16][8]; lane 4g + t holds a: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8),
 * b: (2t, g) (2t + 8, g), c: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1). */
#if __CUDA_ARCH__ >= 800
#define MP_MMA(name, type) \
    MP_PTX void name(float (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3, unsigned int b0, unsigned int b1) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
MP_MMA(mp_mma_bf16, "bf16")
MP_MMA(mp_mma_f16, "f16")
/* c[16][8] += a[16][32] b[32][8] of bytes, exact; lane 4g + t holds a: (g, 4t ..) (g + 8, 4t ..) (g, 16 + 4t ..) (g + 8, ..),
 * b: (4t .., g) (16 + 4t .., g). b is signed. */
#define MP_MMA_BYTES(name, type) \
    MP_PTX void name(int (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3, unsigned int b0, unsigned int b1) { \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
MP_MMA_BYTES(mp_mma_u8, "u8")
MP_MMA_BYTES(mp_mma_s8, "s8")
/* The same with rows 8 to 15 of a zero: only rows 0 to 7 of c are kept. */
MP_PTX void mp_mma_top(float (&c)[2], unsigned int a0, unsigned int a2, unsigned int b0, unsigned int b1)
{
    float d2, d3;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%9,%9};"
        : "+f"(c[0]), "+f"(c[1]), "=f"(d2), "=f"(d3) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f));
}
MP_PTX unsigned int mp_transpose(unsigned int v) { unsigned int r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
/* Four 8x8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8. */
MP_PTX uint4 mp_load_matrices(mp_shared a)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
MP_PTX uint4 mp_load_transposed(mp_shared a)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
#endif

/* Clusters: blocks that see each other's shared memory. */
#if __CUDA_ARCH__ >= 900
MP_PTX mp_shared mp_remote(mp_shared a, int rank) { mp_shared r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
MP_PTX void mp_store_remote(mp_shared a, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(a), "f"(v) : "memory"); }
MP_PTX uint4 mp_read_remote(mp_shared a, int rank)
{
    uint4 v;
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %4, %5; ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [r]; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a), "r"(rank) : "memory");
    return v;
}
MP_PTX void mp_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
MP_PTX void mp_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif
#endif
