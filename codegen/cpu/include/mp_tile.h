/* Small products in registers: the heart of linear and attention. */
#ifndef MP_TILE_H
#define MP_TILE_H

#include "mp_vec.h"

#if defined(__clang__)
#define MP_NOCLONE
#define MP_FULLY _Pragma("clang loop unroll(full)")
#define MP_ONCE _Pragma("clang loop unroll(disable)")
#define MP_TWICE _Pragma("clang loop unroll_count(2)")
#define MP_FOUR _Pragma("clang loop unroll_count(4)")
#else
#define MP_NOCLONE __attribute__((noclone))
#define MP_FULLY _Pragma("GCC unroll 64")
#define MP_ONCE _Pragma("GCC unroll 1")
#define MP_TWICE _Pragma("GCC unroll 2")
#define MP_FOUR _Pragma("GCC unroll 4")
#endif

/* Lines for each one that is prefetched into L2. A prefetch holds one of few buffers of a core until memory answers: Skylake and
 * Cascade Lake cores fetch the next lines by themselves once they see one, and by other buffers, which is a tenth faster.
 * Those with tile units have buffers enough, and are a tenth slower. */
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
#define MP_LINES_INTO_L2 3
#else
#define MP_LINES_INTO_L2 1
#endif

/* A function that all kernels of a plan share, and the compiler sees once. */
#define MP_SHARED static void __attribute__((unused, noinline)) MP_NOCLONE

/* Prefetches: into L1 what is needed soon, into L2 what is needed after that. */
MP_FN void mp_prefetch_l1(const void *row, const int64_t bytes)
{
    MP_FULLY
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i, 0, 3);
}
MP_FN void mp_prefetch_l2(const void *row, const int64_t bytes)
{
    MP_FULLY
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i, 0, 2);
}

/* V vectors of floats. */
MP_FN void mp_vloads(const float *p, mp_vec *wide, const int V)
{
    MP_FULLY
    for (int j = 0; j < V; ++j) wide[j] = mp_vload_f32(p + j * MP_LANES);
}

/* acc[r][p][j] += x_r * w[p][k][j] for R rows and P panels of V vectors; X says what x_r is. */
#define MP_TILE_STEP(R, V, P, k, X) \
    do { \
        mp_vec wide[ALL]; \
        MP_FULLY \
        for (int p = 0; p < (P); ++p) mp_vloads(w + p * wp + (k) * WIDE, wide + p * (V), V); \
        MP_FULLY \
        for (int r = 0; r < (R); ++r) { \
            const mp_vec one = mp_splat(X); \
            MP_FULLY \
            for (int j = 0; j < ALL; ++j) acc[r * ALL + j] += one * wide[j]; \
        } \
    } while (0)

/* x in vectors, where an instruction multiplies by one place of a vector: it saves the loads of single numbers, for which
 * registers do not suffice. Elsewhere loads put a number into all places. Instructions stay in the order of the text: gcc
 * moves loads up until sums no longer fit the registers, which takes a tenth of the speed of Neoverse-N1 cores. */
#if defined(__aarch64__) && MP_LANES == 4
MP_FN mp_vec mp_vload_here(const float *p)
{
    mp_vec v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const mp_vec *)p));
    return v;
}
#define MP_BY_PLACE(n) __asm__ volatile("fmla %0.4s, %1.4s, %2.s[" #n "]" : "+w"(sum) : "w"(w), "w"(x))
/* sum + w * x[place] */
MP_FN mp_vec mp_vadd_product(mp_vec sum, const mp_vec w, const mp_vec x, const int place)
{
    if (place == 0) MP_BY_PLACE(0);
    else if (place == 1) MP_BY_PLACE(1);
    else if (place == 2) MP_BY_PLACE(2);
    else MP_BY_PLACE(3);
    return sum;
}
/* MP_TILE_STEP where x_r is number first + r of the vectors xs. */
#define MP_TILE_STEP_BY_PLACE(R, V, P, k, xs, first) \
    MP_FULLY \
    for (int j = 0; j < ALL; ++j) { \
        const mp_vec wide = mp_vload_here(w + j / (V) * wp + (k) * WIDE + j % (V) * MP_LANES); \
        MP_FULLY \
        for (int r = 0; r < (R); ++r) \
            acc[r * ALL + j] = mp_vadd_product(acc[r * ALL + j], wide, (xs)[((first) + r) / 4], ((first) + r) % 4); \
    }
/* Two k at a time: whole vectors of an even number of rows. */
#define MP_TILE_PAIRS(R, V, P) \
    if ((R) % 2 == 0) \
        MP_ONCE \
        for (; k + 2 <= K; k += 2) { \
            mp_vec pair[(R) / 2 + 1]; \
            MP_FULLY \
            for (int i = 0; i < (R) / 2; ++i) pair[i] = mp_vload_here(x + k * (R) + i * MP_LANES); \
            MP_TILE_STEP_BY_PLACE(R, V, P, k, pair, 0) \
            MP_TILE_STEP_BY_PLACE(R, V, P, k + 1, pair, R) \
        }
#else
#define MP_TILE_PAIRS(R, V, P)
#endif

/* out[p][r][j] (+)= sum over k of x[k][r] * w[p][k][j] for R rows and P panels of V vectors: one sum for each
 * output, k in order. Panels of w are `wp` apart, those of out `op`. */
#define MP_TILE_FUNCTION(name, R, V, P) \
    MP_SHARED name(const float *x, const float *w, const int64_t wp, const int64_t K, float *out, const int64_t op, const int add) \
    { \
        enum { WIDE = (V) * MP_LANES, ALL = (P) * (V) }; \
        mp_vec acc[(R) * ALL]; \
        MP_FULLY \
        for (int i = 0; i < (R) * ALL; ++i) { \
            const float *const from = out + i % ALL / (V) * op + i / ALL * WIDE + i % (V) * MP_LANES; \
            acc[i] = add ? mp_vload_f32(from) : mp_splat(0.0f); \
        } \
        int64_t k = 0; \
        MP_TILE_PAIRS(R, V, P) \
        MP_TWICE \
        for (; k < K; ++k) MP_TILE_STEP(R, V, P, k, x[k * (R) + r]); \
        MP_FULLY \
        for (int i = 0; i < (R) * ALL; ++i) \
            mp_vstore(out + i % ALL / (V) * op + i / ALL * WIDE + i % (V) * MP_LANES, acc[i]); \
    }

#endif
