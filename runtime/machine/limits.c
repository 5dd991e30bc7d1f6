/* What this machine can do: the rate of reading, of fused multiply-adds, and of the tile unit where there is one.
 * Every function gives the seconds of one round. */
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AMX_BF16__) || defined(__AMXBF16__)
#include <immintrin.h>
#include <unistd.h>
#define TILES 1
#endif

#ifndef MP_LANES
#define MP_LANES 4
#endif
#if MP_LANES > 1
typedef float vec __attribute__((vector_size(4 * MP_LANES)));
#else
typedef float vec;
#endif

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int thread(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Kept where the compiler can't see that nobody reads it. */
static volatile float sink;

/* The threads' parts, `streams` of them at a time: a core's prefetchers follow several runs better than one. */
static void read_part(const vec *data, int64_t begin, int64_t end, int streams, int inner)
{
    vec s0 = data[begin], s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (int r = 0; r < inner; ++r) {
        if (streams == 1) {
            for (int64_t i = begin; i + 8 <= end; i += 8) {
                s0 += data[i], s1 += data[i + 1], s2 += data[i + 2], s3 += data[i + 3];
                s4 += data[i + 4], s5 += data[i + 5], s6 += data[i + 6], s7 += data[i + 7];
            }
        } else {
            const int64_t each = (end - begin) / 4;
            const vec *const a = data + begin, *const b = a + each, *const c = b + each, *const d = c + each;
            for (int64_t i = 0; i + 2 <= each; i += 2) {
                s0 += a[i], s1 += a[i + 1], s2 += b[i], s3 += b[i + 1];
                s4 += c[i], s5 += c[i + 1], s6 += d[i], s7 += d[i + 1];
            }
        }
        __asm__ volatile("" ::: "memory"); /* every round reads again */
    }
    const vec all = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
    float first;
    memcpy(&first, &all, sizeof first);
    sink = first;
}

static void share(int64_t count, int threads, int64_t *from, int64_t *to)
{
    *from = count * thread() / threads;
    *to = count * (thread() + 1) / threads;
}

/* Each thread writes its own part: the pages come from the memory next to it. */
void mp_limit_fill(float *memory, int64_t count, int threads)
{
#if defined(_OPENMP)
    #pragma omp parallel num_threads(threads)
#endif
    {
        int64_t from, to;
        share(count, threads, &from, &to);
        float *const data = (float *)((vec *)memory + from);
        uint32_t state = (uint32_t)from * 2654435761u + 1u;
        for (int64_t i = 0; i < (to - from) * MP_LANES; ++i) {
            state = state * 1664525u + 1013904223u;
            data[i] = (float)(int32_t)state * 0x1p-31f;
        }
    }
}

/* Reads `count` vectors `inner` times; threads share them. */
double mp_limit_read(float *memory, int64_t count, int streams, int inner, int threads)
{
    const double begin = now();
#if defined(_OPENMP)
    #pragma omp parallel num_threads(threads)
#endif
    {
        int64_t from, to;
        share(count, threads, &from, &to);
        read_part((const vec *)memory, from, to, streams, inner);
    }
    return now() - begin;
}

/* An operand of an empty instruction, which the compiler must think changes it; in a register where we know how to say so. */
#if defined(__AVX512F__) && MP_LANES <= 16
#define VECTOR(v) "+v"(v)
#elif defined(__x86_64__) && (MP_LANES <= 4 || (defined(__AVX__) && MP_LANES <= 8))
#define VECTOR(v) "+x"(v)
#elif defined(__aarch64__) && MP_LANES <= 4
#define VECTOR(v) "+w"(v)
#else
#define VECTOR(v) "+m"(v)
#endif

/* 12 independent sums: enough for the latency of every machine we know, few enough for 16 registers. Neighbours multiply
 * different random numbers: real data costs power, and with it speed, that constants near 1 do not. */
static void multiply(int64_t iterations)
{
    float fill[15 * MP_LANES];
    uint32_t state = 1u;
    for (int i = 0; i < 15 * MP_LANES; ++i) {
        state = state * 1664525u + 1013904223u;
        fill[i] = (float)(int32_t)state * 0x1p-31f;
    }
    vec v[15];
    memcpy(v, fill, sizeof v);
    __asm__ volatile("" : "+m"(v)); /* unknown to the optimiser */
    vec x = v[0], y = v[1], z = v[2];
    vec s0 = v[3], s1 = v[4], s2 = v[5], s3 = v[6], s4 = v[7], s5 = v[8];
    vec s6 = v[9], s7 = v[10], s8 = v[11], s9 = v[12], s10 = v[13], s11 = v[14];
    for (int64_t i = 0; i < iterations; ++i) {
        s0 += x * y, s1 += y * z, s2 += z * x, s3 += x * x, s4 += y * y, s5 += z * z;
        __asm__ volatile("" : VECTOR(x), VECTOR(y), VECTOR(z)); /* no product is to be computed once for all */
        s6 += y * x, s7 += z * y, s8 += x * z, s9 += x * x, s10 += y * y, s11 += z * z;
        __asm__ volatile("" : VECTOR(x), VECTOR(y), VECTOR(z));
    }
    const vec all = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11;
    float first;
    memcpy(&first, &all, sizeof first);
    sink = first;
}

/* 2 * 12 * MP_LANES operations in each iteration, on each thread. */
double mp_limit_multiply(int64_t iterations, int threads)
{
    const double begin = now();
#if defined(_OPENMP)
    #pragma omp parallel num_threads(threads)
#endif
    multiply(iterations);
    return now() - begin;
}

#if defined(TILES)
/* A core that is shared is faster with other instructions between those of tiles: see mp_tile_gap. */
#define GAP() __asm__ volatile(".rept 8\n\tnop\n\t.endr")

/* The loop of a product: 2 x 2 tiles of sums, operands from L1. */
static void tiles(int64_t iterations, int bytes)
{
    struct { unsigned char head[16]; unsigned short bytes[16]; unsigned char rows[16]; } shape;
    memset(&shape, 0, sizeof shape);
    shape.head[0] = 1;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _Alignas(64) unsigned short some[8][512]; /* small numbers of both signs: zeros would draw less power than work does */
    for (int i = 0; i < 4096; i++)
        some[i / 512][i % 512] = (unsigned short)(bytes ? i * 40503u >> 3 : 0x3c00u + (i * 40503u & 0x81ffu));
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    _tile_zero(0); /* these are macros with statements inside: no commas between them */
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < iterations; ++i) {
        const unsigned short (*const x)[512] = some + i % 2 * 4;
        _tile_loadd(4, x[0], 64); GAP();
        _tile_loadd(6, x[1], 64); GAP();
        _tile_loadd(5, x[2], 64); GAP();
        _tile_loadd(7, x[3], 64); GAP();
        if (bytes) {
            _tile_dpbssd(0, 4, 6); GAP();
            _tile_dpbssd(2, 5, 6); GAP();
            _tile_dpbssd(1, 4, 7); GAP();
            _tile_dpbssd(3, 5, 7); GAP();
        } else {
            _tile_dpbf16ps(0, 4, 6); GAP();
            _tile_dpbf16ps(2, 5, 6); GAP();
            _tile_dpbf16ps(1, 4, 7); GAP();
            _tile_dpbf16ps(3, 5, 7); GAP();
        }
    }
    _tile_release();
}
#endif

/* Four tile products in each iteration, 16 x 16 x 32 bf16 or 16 x 16 x 64 int8; a negative number where there are none. */
double mp_limit_tiles(int64_t iterations, int threads, int bytes)
{
#if defined(TILES)
    if (syscall(158, 0x1023, 18) != 0) return -1.0; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) */
    const double begin = now();
#if defined(_OPENMP)
    #pragma omp parallel num_threads(threads)
#endif
    tiles(iterations, bytes);
    return now() - begin;
#else
    (void)iterations, (void)threads, (void)bytes;
    return -1.0;
#endif
}
