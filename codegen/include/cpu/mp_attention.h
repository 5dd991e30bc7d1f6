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
        mp_panel_f32(w + k * ldw, wide, V);
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

#if defined(MP_TILES) && MP_LANES == 16
/* Two vectors, one word of each in turn: of their lower halves, and of their upper ones. */
#define MP_LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MP_UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

/* to[i * ldt + j] = pair i of row j for 16 pairs of 16 rows. Each round moves one bit of a word's row number into its column
 * number and one back, so four of them make a transpose. */
MP_FN void mp_turn_pairs(uint32_t *to, const int64_t ldt, const mp_bf16 *const *rows, const int64_t i0)
{
    mp_vec_u32 words[16], next[16];
    MP_FULLY
    for (int j = 0; j < 16; ++j) words[j] = *(const mp_vec_u32 *)(rows[j] + i0);
    MP_FULLY
    for (int round = 0; round < 4; ++round) {
        MP_FULLY
        for (int j = 0; j < 8; ++j) {
            next[2 * j] = MP_SHUFFLE(words[j], words[j + 8], MP_LOWER);
            next[2 * j + 1] = MP_SHUFFLE(words[j], words[j + 8], MP_UPPER);
        }
        MP_FULLY
        for (int j = 0; j < 16; ++j) words[j] = next[j];
    }
    MP_FULLY
    for (int i = 0; i < 16; ++i) *(mp_vec_u32 *)(to + i * ldt) = words[i];
}

/* to[i] = low[i] with high[i] above it, for 32 of them. */
MP_FN void mp_pair_rows(uint32_t *to, const mp_bf16 *low, const mp_bf16 *high)
{
    const mp_vec_u32 a = *(const mp_vec_u32 *)low, b = *(const mp_vec_u32 *)high;
    const mp_vec_u32 even = (a & 0xffffu) | b << 16, odd = a >> 16 | (b & 0xffff0000u);
    *(mp_vec_u32 *)to = MP_SHUFFLE(even, odd, MP_LOWER);
    *(mp_vec_u32 *)(to + 16) = MP_SHUFFLE(even, odd, MP_UPPER);
}

#if defined(__AVX512F__)
MP_FN int mp_vany(mp_vec_u32 v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
#else
MP_FN int mp_vany(mp_vec_u32 v)
{
    uint32_t any = 0;
    for (int i = 0; i < MP_LANES; ++i) any |= v[i];
    return any != 0;
}
#endif
/* Whether a row has no inf or NaN: an exponent of all ones, and only that, carries into the sign when 1 is added. */
MP_FN int mp_finite_bf16(const mp_bf16 *row, const int64_t count)
{
    mp_vec_u32 carry = {0};
    MP_FULLY
    for (int64_t i = 0; i < count; i += 32) carry |= (*(const mp_vec_u32 *)(row + i) & 0x7f807f80u) + 0x00800080u;
    return !mp_vany(carry & 0x80008000u);
}

/* 32 weights in bf16, two in a word. They are not negative. */
MP_FN void mp_weights_bf16(uint32_t *to, mp_vec low, mp_vec high)
{
#if defined(__AVX512BF16__) && !defined(MP_TILES_EMULATED)
    const __m512bh row = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    memcpy(to, &row, sizeof row);
#else
    const mp_vec_u32 even = (mp_vec_u32)mp_evens(low, high), odd = (mp_vec_u32)mp_odds(low, high);
    *(mp_vec_u32 *)to = ((even + 0x8000u) >> 16) | ((odd + 0x8000u) & 0xffff0000u);
#endif
}

MP_FN mp_vec mp_vramp(float start)
{
    return start + (mp_vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

/* c[32][32] (+)= a · b in steps of 32: a as [32 rows][32], which stays in L1; b from further away, with the load that leaves
 * L1 alone, as [16 pairs][32 columns][2]. The sums stay in tiles from `opens` to `closes`, whatever happens in between. */
MP_FN void mp_tiles_step(const mp_bf16 *a, const uint32_t *b, float *c, const int64_t ldc, const int opens, const int add,
                         const int closes)
{
    const int64_t row = ldc * 4;
    mp_tile_fence();
    if (opens && !add) {
        mp_tile_zero(0);
        mp_tile_zero(1);
        mp_tile_zero(2);
        mp_tile_zero(3);
    } else if (opens) {
        mp_tile_load(0, c, row);
        mp_tile_load(1, c + 16, row);
        mp_tile_load(2, c + 16 * ldc, row);
        mp_tile_load(3, c + 16 * ldc + 16, row);
    }
    mp_tile_load(4, a, 64);
    mp_tile_load(5, a + 512, 64);
    mp_tile_stream(6, b, 128);
    mp_tile_stream(7, b + 16, 128);
    mp_tile_dot(0, 4, 6);
    mp_tile_dot(2, 5, 6);
    mp_tile_dot(1, 4, 7);
    mp_tile_dot(3, 5, 7);
    if (closes) {
        mp_tile_store(0, c, row);
        mp_tile_store(1, c + 16, row);
        mp_tile_store(2, c + 16 * ldc, row);
        mp_tile_store(3, c + 16 * ldc + 16, row);
    }
    mp_tile_fence();
}
#endif
#endif
