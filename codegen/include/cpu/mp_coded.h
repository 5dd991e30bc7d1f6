/* bf16 weights in 12 bits, of which nothing is lost. Nearly all exponents of a panel lie within 15 binades, so each number
 * keeps its sign and its 7 bits in a byte and the exponent as a code of 4 bits: 0 for 0, else `below` + code. The few others
 * stand in a list. What a core reads is three quarters, and it has time to put the numbers together: memory is what it waits
 * for.
 *
 * A panel of K x 32: a line that says `below` and where the list begins; then tiles of 16 pairs of k x 16 columns, two for each
 * 32 of k. For each quarter of a tile, four rows, 64 bytes of codes and twice 64 of signs and fractions. They lie as an
 * interleaving of vectors puts them in place: 64 bytes are two rows, 8 numbers of the one, 8 of the other; their codes are the
 * lower halves of 64 bytes, those of the other two rows the upper ones. */
#ifndef MP_CODED_H
#define MP_CODED_H

#include "mp_amx.h"
#include "mp_tile.h"

/* Bytes. */
enum { MP_CODED_LINE = 64, MP_CODED_QUARTER = 192, MP_CODED_TILE = 4 * MP_CODED_QUARTER, MP_CODED_STEP = 2 * MP_CODED_TILE };

/* A number whose exponent has no code: where in the panel's tiles it stands. The last one of a list is nowhere. */
typedef struct {
    uint32_t at, value;
} mp_odd;

typedef struct {
    const uint8_t *codes;
    const mp_odd *odd;
    int below;
} mp_coded;

/* Where row k of panel p lies, of a weight with K rows. */
MP_FN const uint8_t *mp_coded_from(const mp_bf16 *w, const int64_t p, const int64_t k, const int64_t K)
{
    return (const uint8_t *)w + p * (K / 32 * MP_CODED_STEP + MP_CODED_LINE) + MP_CODED_LINE + k / 32 * MP_CODED_STEP;
}

MP_FN mp_coded mp_coded_panel(const mp_bf16 *w, const int64_t p, const int64_t K)
{
    const uint8_t *const codes = mp_coded_from(w, p, 0, K);
    uint64_t line[2];
    memcpy(line, codes - MP_CODED_LINE, sizeof line);
    return (mp_coded){codes, (const mp_odd *)(codes + line[1]), (int)line[0]};
}

/* One number: place j of the first two rows of a quarter (half 0) or of the others. */
MP_FN mp_bf16 mp_decode_one(const uint8_t *quarter, const int half, const int j, const int below)
{
    const unsigned code = quarter[j] >> half * 4 & 15, rest = quarter[64 + half * 64 + j];
    const unsigned exponent = code ? (unsigned)below + code : 0;
    return (mp_bf16)((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

/* How codes become exponents. */
#if defined(__AVX512BW__) && !defined(MP_TILES_EMULATED)
typedef struct {
    __m512i high, low; /* the upper and the lower byte of a bf16 with the exponent of each code */
} mp_exponents;

MP_FN mp_exponents mp_exponents_above(const int below)
{
    const __m512i code = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i all = _mm512_maskz_add_epi8(_mm512_test_epi8_mask(code, code), code, _mm512_set1_epi8((char)below));
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(all, 1), _mm512_set1_epi8(0x7f));
    return (mp_exponents){high, _mm512_and_si512(_mm512_slli_epi16(all, 7), _mm512_set1_epi8((char)0x80))};
}

/* Two of the four rows of a quarter: the first ones (half 0) or the others. */
MP_FN void mp_decode_rows(mp_bf16 *to, const uint8_t *quarter, const int half, const mp_exponents e)
{
    const __m512i lower = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    const __m512i codes = _mm512_loadu_si512(quarter), rest = _mm512_loadu_si512(quarter + 64 + half * 64);
    const __m512i code = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, lower);
    /* sign & rest | exponent; ~sign & rest | exponent */
    const __m512i high = _mm512_ternarylogic_epi64(sign, rest, _mm512_shuffle_epi8(e.high, code), 0xea);
    const __m512i low = _mm512_ternarylogic_epi64(sign, rest, _mm512_shuffle_epi8(e.low, code), 0xae);
    _mm512_storeu_si512(to + half * 64, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + half * 64 + 32, _mm512_unpackhi_epi8(low, high));
}
#else
typedef int mp_exponents;

MP_FN mp_exponents mp_exponents_above(const int below) { return below; }

MP_FN void mp_decode_rows(mp_bf16 *to, const uint8_t *quarter, const int half, const mp_exponents below)
{
    for (int j = 0; j < 64; ++j) to[half * 64 + j % 16 / 8 * 32 + j / 16 * 8 + j % 8] = mp_decode_one(quarter, half, j, below);
}
#endif

/* The 512 numbers of a tile. */
MP_FN void mp_decode_tile(mp_bf16 *tile, const uint8_t *from, const mp_exponents e)
{
    MP_FULLY
    for (int i = 0; i < 8; ++i) mp_decode_rows(tile + i / 2 * 128, from + i / 2 * MP_CODED_QUARTER, i % 2, e);
}

/* The two tiles of 32 of k. */
MP_FN void mp_decode_step(mp_bf16 *tiles, const uint8_t *from, const mp_exponents e)
{
    for (int half = 0; half < 2; ++half) mp_decode_tile(tiles + half * 512, from + half * MP_CODED_TILE, e);
}

/* Numbers of the list that stand before `end`, into tiles that begin at `first`; gives the rest of the list. */
MP_FN const mp_odd *mp_put_odd(mp_bf16 *tiles, const mp_odd *odd, const int64_t first, const int64_t end)
{
    for (; odd->at < end; ++odd) tiles[odd->at - first] = (mp_bf16)odd->value;
    return odd;
}

/* Rows of a panel from k on, which become tiles while those before them are at work. */
typedef struct {
    mp_bf16 *tiles, *to;             /* where they begin, and where the next ones are put */
    const uint8_t *from, *next, *end; /* what is decoded, the next quarter of a tile, and the end */
    const mp_odd *odd;
    mp_exponents e;
    int64_t k;
} mp_slice;

MP_FN mp_slice mp_begin_slice(mp_bf16 *tiles, const mp_bf16 *w, const int64_t p, const int64_t k, const int64_t K, const int64_t most)
{
    const mp_coded c = mp_coded_panel(w, p, K);
    const uint8_t *const from = mp_coded_from(w, p, k, K), *const end = mp_coded_from(w, p, most < K - k ? k + most : K, K);
    return (mp_slice){tiles, tiles, from, from, end, c.odd, mp_exponents_above(c.below), k};
}

/* Half of its next quarter of a tile: the first one, or the second, which ends it. */
MP_FN void mp_decode_half(mp_slice *s, const int half)
{
    if (s->next == s->end) return;
    mp_decode_rows(s->to, s->next, half, s->e);
    s->to += half * 128;
    s->next += half * MP_CODED_QUARTER;
}

/* All that is left of them, and the numbers that have no code. */
static void __attribute__((unused, noinline)) mp_finish_slice(mp_slice *s)
{
    while (s->next != s->end)
        for (int half = 0; half < 2; ++half) mp_decode_half(s, half);
    const mp_odd *odd = s->odd;
    while (odd->at < s->k * 32) ++odd;
    mp_put_odd(s->tiles, odd, s->k * 32, s->k * 32 + (s->to - s->tiles));
}

/* The order in which slices are read: within a strip of k, by the panels [p0, p1) of a piece, by strips; then the next piece,
 * which begins with panel p1 or with the first of all. */
typedef struct {
    int64_t p0, p1, panels, slice, strip, K;
} mp_order;
typedef struct {
    int64_t p, k;
} mp_place;

MP_FN mp_place mp_after(const mp_place at, const mp_order o)
{
    const int64_t first = at.k / o.strip * o.strip, end = first + o.strip;
    if (at.k + o.slice < (end < o.K ? end : o.K)) return (mp_place){at.p, at.k + o.slice};
    if (at.p + 1 < o.p1) return (mp_place){at.p + 1, first};
    if (end < o.K) return (mp_place){o.p0, end};
    return (mp_place){o.p1 < o.panels ? o.p1 : 0, 0};
}

/* Column c of a panel with K rows: memory is asked for some tiles ahead, no core sees it coming. */
static void __attribute__((unused, noinline)) mp_decode_column(mp_bf16 *to, const mp_coded w, const int64_t K, const int c)
{
    enum { AHEAD = 4 };
    const uint8_t *const from = w.codes + c / 16 * MP_CODED_TILE;
    const int lane = c % 16 / 4 * 16, place = c % 4 * 2;
    for (int64_t k = 0; k < K; k += 32) {
        const uint8_t *const tile = from + k / 32 * MP_CODED_STEP;
        if (k + 32 * AHEAD < K) mp_soon(tile + AHEAD * MP_CODED_STEP, MP_CODED_TILE);
        for (int i = 0; i < 32; ++i) /* rows of pairs */
            to[k + i] = mp_decode_one(tile + i / 8 * MP_CODED_QUARTER, i / 4 % 2, lane + i / 2 % 2 * 8 + place + i % 2, w.below);
    }
    for (const mp_odd *odd = w.odd; odd->at < K * 32; ++odd) {
        const int64_t step = odd->at / 1024, half = odd->at / 512 % 2, pair = odd->at / 32 % 16;
        if (half * 16 + odd->at % 32 / 2 == c) to[step * 32 + pair * 2 + odd->at % 2] = (mp_bf16)odd->value;
    }
}

#endif
