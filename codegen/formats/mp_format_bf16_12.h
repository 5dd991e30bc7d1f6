/* bf16 weights in 12 bits, of which nothing is lost. The upper byte of a number, its sign and most of its exponent, is
 * nearly always one of 16 of its panel: a code of 4 bits says which, and the lower byte stays as it is. The few
 * exceptions stand in a list. What a core reads is three quarters, and it has time to put the numbers together: memory
 * is what it waits for.
 *
 * A panel of K x 32: a line with the 16 upper bytes and where the list begins; then tiles of 16 pairs of k x 16
 * columns, two for each 32 of k. For each quarter of a tile, four rows, 64 bytes of codes and twice 64 lower bytes.
 * They lie as an interleaving of vectors puts them in place: 64 bytes are two rows, 8 numbers of the one, 8 of the
 * other; their codes are the lower halves of 64 bytes, those of the other two rows the upper ones. */
#ifndef MP_FORMAT_BF16_12_H
#define MP_FORMAT_BF16_12_H

#include "mp_amx.h"
#include "mp_tile.h"

/* Bytes. */
enum {
    MP_CODED_LINE = 64,
    MP_CODED_QUARTER = 192,
    MP_CODED_TILE = 4 * MP_CODED_QUARTER,
    MP_CODED_STEP = 2 * MP_CODED_TILE
};

/* A number whose upper byte has no code: where in the panel's tiles it stands. The last one of a list is nowhere. */
typedef struct {
    uint32_t at, value;
} mp_exception;

typedef struct {
    const uint8_t *upper, *codes;
    const mp_exception *exception;
} mp_coded;

/* Where row k of panel p lies, of a weight with K rows. */
MP_FN const uint8_t *mp_coded_from(const mp_bf16 *w, const int64_t p, const int64_t k, const int64_t K)
{
    return (const uint8_t *)w + p * (K / 32 * MP_CODED_STEP + MP_CODED_LINE) + MP_CODED_LINE + k / 32 * MP_CODED_STEP;
}

MP_FN mp_coded mp_coded_panel(const mp_bf16 *w, const int64_t p, const int64_t K)
{
    const uint8_t *const codes = mp_coded_from(w, p, 0, K), *const upper = codes - MP_CODED_LINE;
    uint64_t list;
    memcpy(&list, upper + 16, sizeof list);
    return (mp_coded){upper, codes, (const mp_exception *)(codes + list)};
}

/* One number: place j of the first two rows of a quarter (half 0) or of the others. */
MP_FN mp_bf16 mp_decode_one(const uint8_t *quarter, const int half, const int j, const uint8_t *upper)
{
    return (mp_bf16)(upper[quarter[j] >> half * 4 & 15] << 8 | quarter[64 + half * 64 + j]);
}

/* How codes become upper bytes. */
#if defined(__AVX512BW__) && !defined(MP_TILES_EMULATED)
typedef __m512i mp_uppers;

MP_FN mp_uppers mp_uppers_of(const uint8_t *upper)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)upper));
}

/* Two of the four rows of a quarter: the first ones (half 0) or the others. */
MP_FN void mp_decode_rows(mp_bf16 *to, const uint8_t *quarter, const int half, const mp_uppers upper)
{
    const __m512i codes = _mm512_loadu_si512(quarter), low = _mm512_loadu_si512(quarter + 64 + half * 64);
    const __m512i code = half ? _mm512_srli_epi16(codes, 4) : codes;
#if defined(__AVX512VBMI__)
    /* 16 bytes four times: two of the six bits do not matter. */
    const __m512i high = _mm512_permutexvar_epi8(code, upper);
#else
    const __m512i high = _mm512_shuffle_epi8(upper, _mm512_and_si512(code, _mm512_set1_epi8(15)));
#endif
    _mm512_storeu_si512(to + half * 64, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + half * 64 + 32, _mm512_unpackhi_epi8(low, high));
}
#else
typedef const uint8_t *mp_uppers;

MP_FN mp_uppers mp_uppers_of(const uint8_t *upper) { return upper; }

MP_FN void mp_decode_rows(mp_bf16 *to, const uint8_t *quarter, const int half, const mp_uppers upper)
{
    for (int j = 0; j < 64; ++j)
        to[half * 64 + j % 16 / 8 * 32 + j / 16 * 8 + j % 8] = mp_decode_one(quarter, half, j, upper);
}
#endif

/* The 512 numbers of a tile. */
MP_FN void mp_decode_tile(mp_bf16 *tile, const uint8_t *from, const mp_uppers upper)
{
    MP_FULLY
    for (int i = 0; i < 8; ++i) mp_decode_rows(tile + i / 2 * 128, from + i / 2 * MP_CODED_QUARTER, i % 2, upper);
}

/* The two tiles of 32 of k. */
MP_FN void mp_decode_step(mp_bf16 *tiles, const uint8_t *from, const mp_uppers upper)
{
    for (int half = 0; half < 2; ++half) mp_decode_tile(tiles + half * 512, from + half * MP_CODED_TILE, upper);
}

/* Numbers of the list that stand before `end`, into tiles that begin at `first`; gives the rest of the list. */
MP_FN const mp_exception *mp_put_exceptions(mp_bf16 *tiles, const mp_exception *exception, const int64_t first,
                                            const int64_t end)
{
    for (; exception->at < end; ++exception) tiles[exception->at - first] = (mp_bf16)exception->value;
    return exception;
}

/* Rows of a panel that become tiles one step of 32 after the other, upwards in k or downwards. */
typedef struct {
    mp_bf16 *to;         /* where the next ones are put */
    const uint8_t *from; /* what they are decoded from */
    const mp_exception *list, *exception;
    mp_uppers upper;
    int64_t at, left; /* of the next ones in the panel's tiles; steps to go */
    int way;          /* 1: upwards, -1: downwards */
} mp_slice;

/* Does nothing when all are decoded. A function by itself: all products of a plan share it. */
static void __attribute__((unused, noinline)) mp_decode_next(mp_slice *s)
{
    if (!s->left) return;
    mp_decode_step(s->to, s->from, s->upper);
    if (s->way > 0) s->exception = mp_put_exceptions(s->to, s->exception, s->at, s->at + 1024);
    else
        for (; s->exception > s->list && s->exception[-1].at >= s->at; --s->exception)
            s->to[s->exception[-1].at - s->at] = (mp_bf16)s->exception[-1].value;
    s->to += s->way * 1024;
    s->from += s->way * MP_CODED_STEP;
    s->at += s->way * 1024;
    --s->left;
}

/* Prefetches what mp_begin_slice needs first. A panel's first line says where its list is, so that line must be in a
 * cache. */
MP_FN void mp_prefetch_head(const mp_bf16 *w, const int64_t p, const int64_t K)
{
    mp_prefetch_l2(mp_coded_from(w, p, 0, K) - MP_CODED_LINE, 64);
}
MP_FN void mp_prefetch_exceptions(const mp_bf16 *w, const int64_t p, const int64_t K)
{
    mp_prefetch_l2(mp_coded_panel(w, p, K).exception, 256);
}

/* `steps` times 32 rows from k on. The first steps are decoded, since tile loads wait for stores that are under way. */
MP_FN mp_slice mp_begin_slice(mp_bf16 *tiles, const mp_bf16 *w, const int64_t p, const int64_t k, const int64_t K,
                              const int64_t steps, const int way)
{
    enum { AHEAD = 2 };
    const mp_coded c = mp_coded_panel(w, p, K);
    const int64_t first = way > 0 ? 0 : steps - 1;
    const int64_t listed = way > 0 ? k : k + steps * 32; /* from there on the list is read, or up to there */
    mp_slice s = {
        tiles + first * 1024, mp_coded_from(w, p, k, K) + first * MP_CODED_STEP, c.exception, c.exception,
        mp_uppers_of(c.upper), k * 32 + first * 1024, steps, way,
    };
    while (s.exception->at < listed * 32) ++s.exception;
    for (int i = 0; i < AHEAD; ++i) mp_decode_next(&s);
    return s;
}

/* Where prefetches of a slice of so many steps begin, MP_PREFETCHED bytes at a time, if they come in the order of
 * decoding. */
enum { MP_PREFETCHED = 3 * 64 };
MP_FN const uint8_t *mp_prefetch_from(const mp_bf16 *w, const int64_t p, const int64_t k, const int64_t K,
                                      const int64_t steps, const int way)
{
    return mp_coded_from(w, p, k, K) + (way > 0 ? 0 : steps * MP_CODED_STEP - MP_PREFETCHED);
}

/* Column c of a panel with K rows: prefetched some tiles ahead, since no core's prefetcher sees it coming. */
static void __attribute__((unused, noinline))
mp_decode_column(mp_bf16 *to, const mp_coded w, const int64_t K, const int c)
{
    enum { AHEAD = 4 };
    const uint8_t *const from = w.codes + c / 16 * MP_CODED_TILE;
    const int lane = c % 16 / 4 * 16, place = c % 4 * 2;
    for (int64_t k = 0; k < K; k += 32) {
        const uint8_t *const tile = from + k / 32 * MP_CODED_STEP;
        if (k + 32 * AHEAD < K) mp_prefetch_l1(tile + AHEAD * MP_CODED_STEP, MP_CODED_TILE);
        for (int i = 0; i < 32; ++i) /* rows of pairs */
            to[k + i] = mp_decode_one(tile + i / 8 * MP_CODED_QUARTER, i / 4 % 2,
                                      lane + i / 2 % 2 * 8 + place + i % 2, w.upper);
    }
    for (const mp_exception *exception = w.exception; exception->at < K * 32; ++exception) {
        const int64_t step = exception->at / 1024, half = exception->at / 512 % 2, pair = exception->at / 32 % 16;
        if (half * 16 + exception->at % 32 / 2 != c) continue;
        to[step * 32 + pair * 2 + exception->at % 2] = (mp_bf16)exception->value;
    }
}

/* Column c of a weight with K rows: a row of an embedding table. */
MP_FN void mp_load_column_bf16_12(mp_bf16 *to, const mp_bf16 *w, const int64_t c, const int64_t K, const int panel)
{
    (void)panel; /* always 32 columns */
    mp_decode_column(to, mp_coded_panel(w, c / 32, K), K, (int)(c % 32));
}

#endif
