/* What attention needs beside mp_vec.h: reductions of many vectors at once, products of strips, rows of the cache. */
#ifndef MP_ATTENTION_H
#define MP_ATTENTION_H

#include "mp_amx.h"
#include "mp_exp.h"
#include "mp_tile.h"

/* bf16 is the upper half of a float. (gcc makes several instructions of the plain conversion.) */
#if MP_LANES == 16 && defined(__AVX512F__)
#include <immintrin.h>
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p)
{
    return (mp_vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16);
}
#elif MP_LANES == 8 && defined(__AVX2__)
#include <immintrin.h>
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p)
{
    return (mp_vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p)), 16);
}
#elif MP_LANES == 4 && defined(__aarch64__)
#include <arm_neon.h>
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p) /* 0 below each: shifts go through one of two pipes only */
{
    return (mp_vec)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(p), vdup_n_u16(0)));
}
#elif MP_LANES > 1
typedef uint16_t mp_vec_u16 __attribute__((vector_size(2 * MP_LANES), aligned(2), may_alias));
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p)
{
    return (mp_vec)(__builtin_convertvector(*(const mp_vec_u16 *)p, mp_vec_u32) << 16);
}
#else
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p) { return mp_load_bf16(*p); }
#endif

/* Neighbours of two vectors side by side: the even ones, and the odd ones. Joining pairs of vectors so, and their
 * results again, reduces MP_LANES vectors to one that holds the sum (or the maximum) of each, in order. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef MP_SHUFFLE
#define MP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (mp_vec_u32){__VA_ARGS__})
#endif
#if MP_LANES == 16
#define MP_EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define MP_ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif MP_LANES == 8
#define MP_EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define MP_ODDS 1, 3, 5, 7, 9, 11, 13, 15
#elif MP_LANES == 4
#define MP_EVENS 0, 2, 4, 6
#define MP_ODDS 1, 3, 5, 7
#endif
#if MP_LANES > 1
MP_FN mp_vec mp_evens(mp_vec a, mp_vec b) { return MP_SHUFFLE(a, b, MP_EVENS); }
MP_FN mp_vec mp_odds(mp_vec a, mp_vec b) { return MP_SHUFFLE(a, b, MP_ODDS); }
#define MP_JOIN(name, a, b, how) \
    MP_FN mp_vec name(mp_vec a##_in, mp_vec b##_in) \
    { \
        const mp_vec a = mp_evens(a##_in, b##_in), b = mp_odds(a##_in, b##_in); \
        return how; \
    }
MP_JOIN(mp_join_sum, a, b, a + b)
MP_JOIN(mp_join_max, a, b, mp_vmax(a, b))
#else
MP_FN mp_vec mp_join_sum(mp_vec a, mp_vec b) { return a + b; }
MP_FN mp_vec mp_join_max(mp_vec a, mp_vec b) { return mp_vmax(a, b); }
#endif
#define MP_REDUCE(name, join) \
    MP_FN mp_vec name(const mp_vec *from) \
    { \
        mp_vec left[MP_LANES]; \
        MP_FULLY \
        for (int i = 0; i < MP_LANES; ++i) left[i] = from[i]; \
        MP_FULLY \
        for (int n = MP_LANES / 2; n > 0; n /= 2) { \
            MP_FULLY \
            for (int i = 0; i < n; ++i) left[i] = join(left[2 * i], left[2 * i + 1]); \
        } \
        return left[0]; \
    }
MP_REDUCE(mp_sums, mp_join_sum)
MP_REDUCE(mp_tops, mp_join_max)
/* The same for one vector. */
MP_FN float mp_vtotal(mp_vec v)
{
    MP_FULLY
    for (int n = MP_LANES / 2; n > 0; n /= 2) v = mp_join_sum(v, v);
    return mp_vfirst(v);
}
MP_FN float mp_vtop(mp_vec v)
{
    MP_FULLY
    for (int n = MP_LANES / 2; n > 0; n /= 2) v = mp_join_max(v, v);
    return mp_vfirst(v);
}

/* Where element i of a row is after mp_vload2_bf16: of every two vectors the even ones come first. */
MP_FN int64_t mp_split(int64_t i) { return i / (2 * MP_LANES) * (2 * MP_LANES) + i % 2 * MP_LANES + i % (2 * MP_LANES) / 2; }

/* What scores are measured from: their maximum, or 0 where there is none, so that -inf - base stays -inf. */
MP_FN mp_vec mp_vbase(mp_vec top) { return mp_vchoose(MP_BITS(top == mp_splat(-INFINITY)), mp_splat(0.0f), top); }

/* Keys of one task when queries are few: more in long contexts, since every task begins anew, but always a dozen tasks or
 * more. It depends on nothing but the number of keys that the query sees, and so do its bits. */
MP_FN int64_t mp_chunk(const int64_t keys, const int64_t lines, const int64_t least, const int64_t most)
{
    int64_t chunk = least;
    while (chunk < most && lines * keys >= 24 * chunk) chunk *= 2;
    return chunk;
}

/* out[r][j] = out[r][j] * keep[j] + sum over k of x[r * xr + k * xk] * w[k * ldw + j] for R rows and V vectors of columns;
 * without `keep` the sum alone. R and V must be constants where this is used. */
MP_FN void mp_strip(const float *x, const int64_t xr, const int64_t xk, const float *w, const int64_t ldw, const int64_t K,
                    float *out, const int64_t ldo, const int R, const int V, const float *keep)
{
    mp_vec acc[64];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) {
        acc[i] = mp_splat(0.0f);
        if (keep) acc[i] = mp_vload_f32(out + i / V * ldo + i % V * MP_LANES) * mp_vload_f32(keep + i % V * MP_LANES);
    }
    MP_TWICE
    for (int64_t k = 0; k < K; ++k) {
        mp_vec wide[64];
        mp_vloads(w + k * ldw, wide, V);
        MP_FULLY
        for (int r = 0; r < R; ++r) {
            const mp_vec one = mp_splat(x[r * xr + k * xk]);
            MP_FULLY
            for (int j = 0; j < V; ++j) acc[r * V + j] += one * wide[j];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(out + i / V * ldo + i % V * MP_LANES, acc[i]);
}
#endif
