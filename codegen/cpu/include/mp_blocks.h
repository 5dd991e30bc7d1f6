/* Weights in low-bit blocks: what every such format is made of.
 *
 * A panel has MP_PANEL columns. Its blocks follow each other by k, and a block of all columns lies word by word: the
 * first 32 bits of every column, then the next. So a vector of words holds four codes, of four neighbouring k, for
 * each of its columns, as the integer dot products of all instruction sets take them. Numbers of 16 bits (scales), then
 * single bytes, stand behind the words in the same way.
 *
 * A format gives one function, which takes a group of 32 k out of a block:
 *     void mp_group_<format>(const char *unit, int g, int v, mp_words *codes, mp_vec *scale, mp_vec *offset);
 * `unit` is one block, or some of 32 numbers (two or four); g the group in it; v the vector of columns. codes[i] are the codes of
 * k = 4 * i .. 4 * i + 3, one in each byte. The value of a code is scale * (code - zero) + offset, with a scale and an
 * offset for each half of the group (two that are equal where the format has one). */
#ifndef MP_BLOCKS_H
#define MP_BLOCKS_H

#include "mp_tile.h"

/* Loops over vectors of a panel and over quads are unrolled; without vectors there would be too much of them. */
#if MP_LANES > 1 && !defined(MP_TILES_EMULATED)
#define MP_BLOCK_UNROLL MP_FULLY
#else
#define MP_BLOCK_UNROLL
#endif

/* Rows that a pass over a panel serves when they are many. With 8 the groups of a unit are unrolled for several rows, too:
 * elsewhere registers do not suffice. */
#if defined(__AVX512VNNI__) && MP_LANES == 16
#define MP_BLOCK_ROWS 8
#else
#define MP_BLOCK_ROWS 4
#endif

enum { MP_PANEL = 16, MP_GROUP = 32, MP_QUADS = MP_GROUP / 4 };

#if MP_LANES > 1
typedef uint32_t mp_words __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
typedef int32_t mp_ints __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
MP_FN mp_vec mp_ints_to_floats(mp_ints i) { return __builtin_convertvector(i, mp_vec); }
MP_FN mp_vec mp_bits_to_floats(mp_words w) { return (mp_vec)w; }
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum) { return a * b + sum; }
#else
typedef uint32_t mp_words;
typedef int32_t mp_ints;
MP_FN mp_vec mp_ints_to_floats(mp_ints i) { return (float)i; }
MP_FN mp_vec mp_bits_to_floats(mp_words w) { return mp_bits_to_float(w); }
#if defined(__FP_FAST_FMAF) /* scalars that gcc joins to vectors are not always contracted */
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum) { return __builtin_fmaf(a, b, sum); }
#else
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum) { return a * b + sum; }
#endif
#endif

typedef void (*mp_group)(const char *unit, int g, int v, mp_words *codes, mp_vec *scale, mp_vec *offset);

/* Row i of the words of a unit; row i of the 16-bit numbers behind `words` rows of words; row i of the bytes behind both,
 * each in a word. */
MP_FN mp_words mp_word_row(const char *unit, const int i, const int v)
{
    return *(const mp_words *)(const void *)(unit + i * MP_PANEL * 4 + v * MP_LANES * 4);
}
MP_FN mp_vec mp_half_row(const char *unit, const int words, const int i, const int v)
{
    return mp_vload_f16((const mp_f16 *)(const void *)(unit + (words * 4 + i * 2) * MP_PANEL) + v * MP_LANES);
}

/* The lower and the upper four bits of each byte. */
MP_FN mp_words mp_low_nibbles(const mp_words w) { return w & 0x0f0f0f0fu; }
MP_FN mp_words mp_high_nibbles(const mp_words w)
{
#if MP_LANES > 1 && defined(__ARM_NEON)
    typedef uint8_t bytes __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
    return (mp_words)((bytes)w >> 4); /* one instruction; x86 shifts no bytes */
#else
    return w >> 4 & 0x0f0f0f0fu;
#endif
}

/* The same as codes that may be MP_UPPER_TIMES times as large, which saves a shift; NEON has signed bytes and shifts them. */
#if defined(__ARM_NEON)
#define MP_UPPER_TIMES 1.0f
MP_FN mp_words mp_upper_nibbles(const mp_words w) { return mp_high_nibbles(w); }
#else
#define MP_UPPER_TIMES 16.0f
MP_FN mp_words mp_upper_nibbles(const mp_words w) { return w & 0xf0f0f0f0u; }
#endif

MP_FN mp_words mp_byte_row(const char *unit, const int words, const int halves, const int i, const int v)
{
    const uint8_t *const row = (const uint8_t *)unit + (words * 4 + halves * 2 + i) * MP_PANEL + v * MP_LANES;
#if MP_LANES > 1
    typedef uint8_t bytes __attribute__((vector_size(MP_LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes *)row, mp_words);
#else
    return *row;
#endif
}

/* table[n] for each of the bytes n < 16. */
#if defined(__aarch64__) && MP_LANES == 4
#include <arm_neon.h>
MP_FN mp_words mp_lookup16(const int8_t *table, const mp_words n)
{
    return (mp_words)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)n);
}
#elif defined(__AVX512BW__) && MP_LANES == 16
MP_FN mp_words mp_lookup16(const int8_t *table, const mp_words n)
{
    const __m128i all = _mm_loadu_si128((const __m128i_u *)table);
    return (mp_words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)n);
}
#elif defined(__AVX2__) && MP_LANES == 8
MP_FN mp_words mp_lookup16(const int8_t *table, const mp_words n)
{
    const __m128i all = _mm_loadu_si128((const __m128i_u *)table);
    return (mp_words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)n);
}
#elif defined(__SSSE3__) && MP_LANES == 4
#include <tmmintrin.h>
MP_FN mp_words mp_lookup16(const int8_t *table, const mp_words n)
{
    return (mp_words)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i_u *)table), (__m128i)n);
}
#else
MP_FN mp_words mp_lookup16(const int8_t *table, mp_words n)
{
    uint8_t bytes[sizeof n];
    memcpy(bytes, &n, sizeof n);
    for (size_t i = 0; i < sizeof n; ++i) bytes[i] = (uint8_t)table[bytes[i]];
    memcpy(&n, bytes, sizeof n);
    return n;
}
#endif

/* Bits 4 * i .. 4 * i + 3 of each word, each as the fifth bit of a byte. */
MP_FN mp_words mp_fifth_bits(const mp_words w, const int i) { return (w >> (4 * i) & 15) * 0x02040810u & 0x10101010u; }

/* Byte b of each word as a float. */
MP_FN mp_vec mp_byte_of(const mp_words w, const int b) { return mp_ints_to_floats((mp_ints)(w >> (8 * b) & 255)); }
MP_FN mp_vec mp_signed_byte_of(const mp_words w, const int b)
{
    return mp_ints_to_floats((mp_ints)(w << (24 - 8 * b)) >> 24);
}

/* A row of an embedding table: column c of a weight in panels, as floats. `groups` of a unit of `bytes` bytes. */
MP_FN void mp_block_column(float *to, const void *w, const int64_t c, const int64_t K, const mp_group group,
                               const int bytes, const int groups, const int zero, const int is_signed)
{
    const int64_t all = (K + MP_GROUP - 1) / MP_GROUP, units = (all + groups - 1) / groups;
    const char *const panel = (const char *)w + c / MP_PANEL * units * bytes;
    const int v = (int)(c % MP_PANEL / MP_LANES), lane = (int)(c % MP_LANES);
    for (int64_t n = 0; n < all; ++n) {
        mp_words codes[MP_QUADS];
        mp_vec scale[2], offset[2] = {mp_splat(-0.0f), mp_splat(-0.0f)}; /* keeps the sign of a zero */
        group(panel + n / groups * bytes, (int)(n % groups), v, codes, scale, offset);
        for (int i = 0; i < MP_GROUP && n * MP_GROUP + i < K; ++i) {
            const mp_words q = codes[i / 4];
            const mp_vec code = (is_signed ? mp_signed_byte_of(q, i % 4) : mp_byte_of(q, i % 4)) - mp_splat((float)zero);
            float values[MP_LANES];
            mp_vstore(values, scale[i / 16] * code + offset[i / 16]);
            to[n * MP_GROUP + i] = values[lane];
        }
    }
}

/* A group of 32 numbers of x as integers of 15 bits: x = scale * number. Rounding is to 1 / 32512 of the largest. */
typedef struct {
#if defined(__ARM_FEATURE_DOTPROD) || defined(__AVX512VNNI__)
    int8_t high[MP_GROUP], low[MP_GROUP]; /* number = 128 * high + low */
#else
    int16_t numbers[MP_GROUP]; /* of four neighbours the first and the third, then the others: see mp_block_dots */
#endif
    float scale;
    int32_t unused;
    union { /* of each half of the group; of all of it in the first place where halves have the same scale */
        int32_t start[2];  /* what sums begin with: -zero * the sum of the numbers */
        float weighted[2]; /* scale * the sum of the numbers, which offsets are multiplied with */
    };
} mp_x_group;

enum { MP_X_LARGEST = 127 * 128 };

MP_FN void mp_x_group_make(mp_x_group *to, const float *x, const int zero, const int halves, const int offsets)
{
    uint32_t top = 0; /* bits of the largest: those of positive floats have their order, and NaN is above infinity */
    _Pragma("omp simd reduction(max : top)")
    for (int i = 0; i < MP_GROUP; ++i) {
        const uint32_t bits = mp_float_to_bits(x[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const int bad = top >= 0x7f800000u;
    const float largest = mp_bits_to_float(top);
    to->scale = bad ? NAN : largest / MP_X_LARGEST;
    to->unused = 0;
    /* The inverse of the smallest floats overflows: their products are too small to count. */
    const float ratio = top > 0 && !bad ? MP_X_LARGEST / largest : 0.0f, inverse = ratio < INFINITY ? ratio : 0.0f;
    int32_t numbers[MP_GROUP], sums[2] = {0, 0};
    _Pragma("omp simd")
    for (int i = 0; i < MP_GROUP; ++i) numbers[i] = bad ? 0 : (int32_t)rintf(x[i] * inverse);
    for (int h = 0; h < 2; ++h) {
        int32_t sum = 0;
        _Pragma("omp simd reduction(+ : sum)")
        for (int i = 0; i < MP_GROUP / 2; ++i) sum += numbers[h * MP_GROUP / 2 + i];
        sums[halves ? h : 0] += sum;
    }
    for (int h = 0; h < 2; ++h) {
        if (offsets) to->weighted[h] = to->scale * (float)sums[h];
        else to->start[h] = -zero * sums[h];
    }
#if defined(__ARM_FEATURE_DOTPROD) || defined(__AVX512VNNI__)
    _Pragma("omp simd")
    for (int i = 0; i < MP_GROUP; ++i) {
        to->high[i] = (int8_t)((numbers[i] + 64) >> 7);
        to->low[i] = (int8_t)(numbers[i] - 128 * ((numbers[i] + 64) >> 7));
    }
#else
    for (int i = 0; i < MP_GROUP; ++i) to->numbers[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = (int16_t)numbers[i];
#endif
}

/* sums[r], which begin as they are given, += codes * numbers over `quads` quads from quad `first` on, of every column and
 * of R rows, which take turns so that no sum waits for itself. VNNI takes unsigned codes: signed ones are moved by 128,
 * which MP_BLOCK_MOVED says. */
#if defined(__ARM_FEATURE_DOTPROD)
#define MP_BLOCK_MOVED 0
#define MP_DOT(lane) \
    MP_BLOCK_UNROLL \
    for (int r = 0; r < R; ++r) { \
        high[r] = vdotq_laneq_s32(high[r], (int8x16_t)codes[i + lane], h[r], lane); \
        low[r] = vdotq_laneq_s32(low[r], (int8x16_t)codes[i + lane], l[r], lane); \
    }
MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int R, const int first,
                         const int quads, const int is_signed)
{
    int32x4_t high[MP_BLOCK_ROWS], low[MP_BLOCK_ROWS];
    (void)is_signed;
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) {
        high[r] = vdupq_n_s32(0);
        low[r] = (int32x4_t)sums[r];
    }
    MP_BLOCK_UNROLL
    for (int i = first; i < first + quads; i += 4) {
        int8x16_t h[MP_BLOCK_ROWS], l[MP_BLOCK_ROWS];
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            h[r] = vld1q_s8(x[r].high + 4 * i);
            l[r] = vld1q_s8(x[r].low + 4 * i);
        }
        MP_DOT(0)
        MP_DOT(1)
        MP_DOT(2)
        MP_DOT(3)
    }
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = (mp_ints)vaddq_s32(vshlq_n_s32(high[r], 7), low[r]);
}
#undef MP_DOT
#elif defined(__AVX512VNNI__) && MP_LANES == 16
#define MP_BLOCK_MOVED 128
MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int R, const int first,
                         const int quads, const int is_signed)
{
    __m512i high[MP_BLOCK_ROWS], low[MP_BLOCK_ROWS];
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) {
        high[r] = _mm512_setzero_si512();
        low[r] = (__m512i)sums[r];
    }
    MP_BLOCK_UNROLL
    for (int i = first; i < first + quads; ++i) {
        const __m512i q = (__m512i)(codes[i] ^ (is_signed ? 0x80808080u : 0u));
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            int32_t h, l;
            memcpy(&h, x[r].high + 4 * i, sizeof h);
            memcpy(&l, x[r].low + 4 * i, sizeof l);
            high[r] = _mm512_dpbusd_epi32(high[r], q, _mm512_set1_epi32(h));
            low[r] = _mm512_dpbusd_epi32(low[r], q, _mm512_set1_epi32(l));
        }
    }
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = (mp_ints)_mm512_add_epi32(_mm512_slli_epi32(high[r], 7), low[r]);
}
#else
#define MP_BLOCK_MOVED 0
#if defined(__AVX512BW__) && MP_LANES == 16
#define MP_PAIRS(a, b) (mp_ints)_mm512_madd_epi16((__m512i)(a), _mm512_set1_epi32(b))
#elif defined(__AVX2__) && MP_LANES == 8
#define MP_PAIRS(a, b) (mp_ints)_mm256_madd_epi16((__m256i)(a), _mm256_set1_epi32(b))
#elif defined(__SSE2__) && MP_LANES == 4
#include <emmintrin.h>
#define MP_PAIRS(a, b) (mp_ints)_mm_madd_epi16((__m128i)(a), _mm_set1_epi32(b))
#else
#define MP_PAIRS(a, b) (((mp_ints)((a) << 16) >> 16) * (int16_t)(b) + ((mp_ints)(a) >> 16) * ((b) >> 16))
#endif

/* Bytes 1 and 3 of each word as pairs of 16 bits. */
MP_FN mp_words mp_odd_bytes(const mp_words w, const int is_signed)
{
#if MP_LANES > 1
    typedef int16_t shorts __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
    typedef uint16_t unsigned_shorts __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
    return is_signed ? (mp_words)((shorts)w >> 8) : (mp_words)((unsigned_shorts)w >> 8);
#else
    mp_words pairs = w >> 8 & 0x00ff00ffu;
    if (is_signed) pairs |= (pairs & 0x00800080u) * 510u; /* the sign fills the byte above */
    return pairs;
#endif
}
MP_FN mp_words mp_even_bytes(const mp_words w, const int is_signed)
{
    const mp_words pairs = w & 0x00ff00ffu;
    return is_signed ? mp_odd_bytes(w << 8, 1) : pairs;
}

MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int R, const int first,
                         const int quads, const int is_signed)
{
    MP_BLOCK_UNROLL
    for (int i = first; i < first + quads; ++i) {
        const mp_words even = mp_even_bytes(codes[i], is_signed), odd = mp_odd_bytes(codes[i], is_signed);
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            int32_t b[2];
            memcpy(b, x[r].numbers + 4 * i, sizeof b);
            sums[r] += MP_PAIRS(even, b[0]) + MP_PAIRS(odd, b[1]);
        }
    }
}
#endif

#endif
