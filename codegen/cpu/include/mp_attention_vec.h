/* What attention needs beside mp_vec.h: rows of the cache as vectors, reductions of many vectors at once. */
#ifndef MP_ATTENTION_VEC_H
#define MP_ATTENTION_VEC_H

#include "mp_exp.h"
#include "mp_tile.h"
#include "mp_view.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif

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
#elif MP_LANES == 4 && defined(__aarch64__) && defined(MP_SHUFFLE)
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p) /* 0 below each: shifts go through one of two pipes only */
{
    return (mp_vec)MP_SHUFFLE((mp_half_u16){0}, *(const mp_half_u16 *)p, 0, 4, 1, 5, 2, 6, 3, 7);
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

/* Codes of a cache in 8 bits. */
#if MP_LANES == 16 && defined(__AVX512F__)
MP_FN mp_vec mp_vload_i8(const int8_t *p)
{
    return (mp_vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)p)));
}
#elif MP_LANES == 8 && defined(__AVX2__)
MP_FN mp_vec mp_vload_i8(const int8_t *p)
{
    return (mp_vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)p)));
}
#elif MP_LANES == 4 && defined(__aarch64__)
#include <arm_neon.h>
MP_FN mp_vec mp_vload_i8(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return (mp_vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
#else
MP_FN mp_vec mp_vload_i8(const int8_t *p)
{
    float f[MP_LANES];
    for (int i = 0; i < MP_LANES; ++i) f[i] = (float)p[i];
    return mp_vload_f32(f);
}
#endif

/* A vector of floats from a dense row of some type. */
MP_FN mp_vec mp_vload(const int type, const void *row, const int64_t i)
{
    if (type == MP_I8) return mp_vload_i8((const int8_t *)row + i);
    if (type == MP_BF16) return mp_vload_bf16((const mp_bf16 *)row + i);
    if (type == MP_F16) return mp_vload_f16((const mp_f16 *)row + i);
    return mp_vload_f32((const float *)row + i);
}
#endif
