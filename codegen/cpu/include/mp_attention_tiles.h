/* What attention on bf16 tile units needs beside mp_attention_vec.h: rows and weights in the order of tiles, and the
 * steps of strips. */
#ifndef MP_ATTENTION_TILES_H
#define MP_ATTENTION_TILES_H

#include "mp_amx.h"
#include "mp_attention_vec.h"

#if defined(MP_TILES) && MP_LANES == 16
/* Two vectors, one word of each in turn: of their lower halves, and of their upper ones. */
#define MP_LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MP_UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

/* 16 rows of N words (4, 8 or 16), which lie one after the other in N vectors, become N columns of 16. Each round
 * moves one bit of a word's row number into its column number and one back: after four of them the column comes
 * first. */
MP_FN void mp_turn(mp_vec_u32 *words, const int N)
{
    mp_vec_u32 next[16];
    MP_FULLY
    for (int round = 0; round < 4; ++round) {
        MP_FULLY
        for (int j = 0; j < N / 2; ++j) {
            next[2 * j] = MP_SHUFFLE(words[j], words[j + N / 2], MP_LOWER);
            next[2 * j + 1] = MP_SHUFFLE(words[j], words[j + N / 2], MP_UPPER);
        }
        MP_FULLY
        for (int j = 0; j < N; ++j) words[j] = next[j];
    }
}

/* to[i * ldt + j] = pair i of row j for 16 pairs of 16 rows. */
MP_FN void mp_turn_pairs(uint32_t *to, const int64_t ldt, const mp_bf16 *const *rows, const int64_t i0)
{
    mp_vec_u32 words[16];
    MP_FULLY
    for (int j = 0; j < 16; ++j) words[j] = *(const mp_vec_u32 *)(rows[j] + i0);
    mp_turn(words, 16);
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

/* The same in two parts: 32 first ones, 32 second ones. */
MP_FN void mp_weights_parts(uint32_t *to, mp_vec low, mp_vec high)
{
    const mp_vec first_low = (mp_vec)(((mp_vec_u32)low + 0x8000u) & 0xffff0000u);
    const mp_vec first_high = (mp_vec)(((mp_vec_u32)high + 0x8000u) & 0xffff0000u);
    mp_weights_bf16(to, first_low, first_high);
    mp_weights_bf16(to + 16, low - first_low, high - first_high);
}

/* Scores of one query lie as [key][HEADS] with HEADS 4 or 8: joins what a vector has of each head, in every lane of
 * it. */
#define MP_AFTER_8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define MP_AFTER_4 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3
MP_FN mp_vec mp_heads_top(mp_vec v, const int HEADS)
{
    v = mp_vmax(v, MP_SHUFFLE(v, v, MP_AFTER_8));
    if (HEADS == 4) v = mp_vmax(v, MP_SHUFFLE(v, v, MP_AFTER_4));
    return v;
}
MP_FN mp_vec mp_heads_sum(mp_vec v, const int HEADS)
{
    v += MP_SHUFFLE(v, v, MP_AFTER_8);
    if (HEADS == 4) v += MP_SHUFFLE(v, v, MP_AFTER_4);
    return v;
}

/* Up to 32 rows that are left, with zeros behind them: nothing is read past the last one. */
MP_FN const mp_bf16 *mp_rest(mp_bf16 *room, const mp_bf16 *rows, const int64_t stride, const int64_t left,
                             const int64_t dim)
{
    memset(room, 0, (size_t)(32 * dim) * sizeof *room);
    for (int64_t r = 0; r < left; ++r) memcpy(room + r * dim, rows + r * stride, (size_t)dim * sizeof *room);
    return room;
}

MP_FN mp_vec mp_vramp(float start)
{
    return start + (mp_vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

/* c[32][32] (+)= a · b in steps of 32: a as 32 rows of 32, lda apart, which stay in L1; b from further away, with
 * the load that leaves L1 alone, as [16 pairs][32 columns][2]. The sums stay in tiles from `opens` to `closes`,
 * whatever happens in between. */
MP_FN void mp_tiles_step(const mp_bf16 *a, const int64_t lda, const uint32_t *b, float *c, const int64_t ldc,
                         const int opens, const int add, const int closes)
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
    mp_tile_load(4, a, lda * 2);
    mp_tile_load(5, a + 16 * lda, lda * 2);
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
