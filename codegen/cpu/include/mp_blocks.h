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
 * offset for each half of the group (two that are equal where the format has one). A format whose groups have zero points
 * of their own gives those in place of offsets. Codes may also be floats of 8 bits: they lie byte by byte, a row of 16
 * columns for each k, and products are sums of floats (mp_linear_blocks.h). */
#ifndef MP_BLOCKS_H
#define MP_BLOCKS_H

#include "mp_tile.h"

/* Loops over vectors of a panel and over quads are unrolled; without vectors there would be too much of them. */
#if MP_LANES > 1 && !defined(MP_TILES_EMULATED)
#define MP_BLOCK_UNROLL MP_FULLY
#else
#define MP_BLOCK_UNROLL
#endif

/* Rows that a pass over a panel serves at most; more of them go by slices on x86 (mp_blocks_pairs.h). With 8 the groups of a
 * unit are unrolled for several rows, too: elsewhere registers do not suffice. */
#if MP_LANES == 16
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
/* One rounding, wherever the compiler would not see that: the bits of a row must not depend on how many rows there are. */
#if MP_LANES == 16 && defined(__AVX512F__)
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum)
{
    return (mp_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}
#elif MP_LANES == 8 && defined(__FMA__)
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum)
{
    return (mp_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
}
#else
MP_FN mp_vec mp_multiply_add(mp_vec a, mp_vec b, mp_vec sum) { return a * b + sum; }
#endif
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

/* What the byte of a code is. */
enum { MP_UNSIGNED, MP_SIGNED, MP_FLOATS };

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
MP_FN mp_vec mp_brain_row(const char *unit, const int words, const int i, const int v)
{
    const uint16_t *const row = (const uint16_t *)(const void *)(unit + (words * 4 + i * 2) * MP_PANEL) + v * MP_LANES;
#if MP_LANES > 1
    typedef uint16_t shorts __attribute__((vector_size(2 * MP_LANES), aligned(2), may_alias));
    return mp_bits_to_floats(__builtin_convertvector(*(const shorts *)row, mp_words) << 16);
#else
    return mp_bits_to_floats((mp_words)*row << 16);
#endif
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

/* The same as codes that may be MP_UPPER_TIMES times as large, which saves a shift: dot products of VNNI take any bytes that have
 * no sign. */
#if defined(__AVX512VNNI__) && MP_LANES == 16
#define MP_UPPER_TIMES 16.0f
MP_FN mp_words mp_upper_nibbles(const mp_words w) { return w & 0xf0f0f0f0u; }
#else
#define MP_UPPER_TIMES 1.0f
MP_FN mp_words mp_upper_nibbles(const mp_words w) { return mp_high_nibbles(w); }
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

/* Floats of 8 bits (e4m3) are those of more bits, times a power of two, when their sign is moved: so numbers below 2^-6 are
 * exact. 0x7f and 0xff are 480 and -480: what is no number has a scale that is none. */
MP_FN mp_vec mp_float8_of(const mp_words bytes)
{
    return mp_bits_to_floats((bytes & 0x80) << 24 | (bytes & 0x7f) << 20) * mp_splat(0x1p120f);
}
/* A row of 16 of them, divided by MP_FLOAT8_TIMES: by f32 on NEON, where subnormal numbers are as quick as others, and the
 * conversion of f16 is slow; by f16 on x86. */
#if defined(__aarch64__) && MP_LANES == 4
#define MP_FLOAT8_TIMES 0x1p120f
MP_FN void mp_float8_row(const char *at, mp_vec *to)
{
    const int8x16_t bytes = vld1q_s8((const int8_t *)at);
    const uint16x8_t mask = vdupq_n_u16(0x87f0), none = vdupq_n_u16(0);
    const uint16x8_t low = vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(bytes), 4)), mask);
    const uint16x8_t high = vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(bytes, 4)), mask);
    to[0] = (mp_vec)vzip1q_u16(none, low), to[1] = (mp_vec)vzip2q_u16(none, low);
    to[2] = (mp_vec)vzip1q_u16(none, high), to[3] = (mp_vec)vzip2q_u16(none, high);
}
#elif MP_LANES == 16 && defined(__AVX512F__)
#define MP_FLOAT8_TIMES 256.0f
MP_FN void mp_float8_row(const char *at, mp_vec *to)
{
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i_u *)at)), 7);
    *to = (mp_vec)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbfff)));
}
#elif MP_LANES == 8 && defined(__F16C__)
#define MP_FLOAT8_TIMES 256.0f
MP_FN void mp_float8_row(const char *at, mp_vec *to)
{
    MP_FULLY
    for (int v = 0; v < 2; ++v) {
        const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i_u *)(at + 8 * v))), 7);
        to[v] = (mp_vec)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xbfff)));
    }
}
#else
#define MP_FLOAT8_TIMES 1.0f
MP_FN void mp_float8_row(const char *at, mp_vec *to)
{
    for (int v = 0; v < MP_PANEL / MP_LANES; ++v) to[v] = mp_float8_of(mp_byte_row(at, 0, 0, 0, v));
}
#endif

/* The number that code j of each word is. */
MP_FN mp_vec mp_number_of(const mp_words w, const int j, const int kind)
{
    if (kind == MP_FLOATS) return mp_float8_of(w >> (8 * j) & 255);
    return kind == MP_SIGNED ? mp_signed_byte_of(w, j) : mp_byte_of(w, j);
}

/* A row of an embedding table: column c of a weight in panels, as floats. `groups` of a unit of `bytes` bytes. */
MP_FN void mp_block_column(float *to, const void *w, const int64_t c, const int64_t K, const mp_group group,
                               const int bytes, const int groups, const int zero, const int zeros, const int kind)
{
    const int64_t all = (K + MP_GROUP - 1) / MP_GROUP, units = (all + groups - 1) / groups;
    const char *const panel = (const char *)w + c / MP_PANEL * units * bytes;
    const int v = (int)(c % MP_PANEL / MP_LANES), lane = (int)(c % MP_LANES);
    for (int64_t n = 0; n < all; ++n) {
        mp_words codes[MP_QUADS];
        mp_vec scale[2], offset[2] = {mp_splat(-0.0f), mp_splat(-0.0f)}; /* keeps the sign of a zero */
        group(panel + n / groups * bytes, (int)(n % groups), v, codes, scale, offset);
        for (int i = 0; i < MP_GROUP && n * MP_GROUP + i < K; ++i) {
            const mp_vec code = mp_number_of(codes[i / 4], i % 4, kind), none = zeros ? offset[i / 16] : mp_splat((float)zero);
            float values[MP_LANES];
            mp_vstore(values, scale[i / 16] * (code - none) + (zeros ? mp_splat(-0.0f) : offset[i / 16]));
            to[n * MP_GROUP + i] = values[lane];
        }
    }
}

/* A group of 32 numbers of x as integers of 15 bits: x = scale * number. Rounding is to 1 / 32512 of the largest. */
typedef struct {
    union {
        int8_t planes[2][MP_GROUP]; /* number = 128 * planes[0] + planes[1] */
        int16_t pairs[MP_GROUP];    /* of four neighbours the first and the third, then the others: see mp_even_bytes */
    };
    float scale;
    int32_t unused;
    union { /* of each half of the group; of all of it in the first place where halves have the same scale */
        int32_t start[2];  /* what sums begin with: -zero * the sum of the numbers */
        float weighted[2]; /* the sum of the numbers, times scale for offsets, as it is for zero points */
    };
} mp_x_group;

enum { MP_X_LARGEST = 127 * 128 };

/* Numbers of 16 bits in the order of mp_x_group. */
MP_FN void mp_store_pairs(int16_t *to, const int32_t *numbers)
{
#if MP_LANES == 16 && defined(__AVX512BW__)
    MP_FULLY
    for (int i = 0; i < MP_GROUP; i += 16) {
        const __m256i shorts = _mm512_cvtepi32_epi16(_mm512_loadu_si512(numbers + i));
        const __m256i halfway = _mm256_shufflelo_epi16(shorts, 0xd8);
        _mm256_storeu_si256((__m256i_u *)(to + i), _mm256_shufflehi_epi16(halfway, 0xd8));
    }
#elif MP_LANES == 8 && defined(__AVX2__)
    MP_FULLY
    for (int i = 0; i < MP_GROUP; i += 16) {
        const __m256i first = _mm256_loadu_si256((const __m256i_u *)(numbers + i));
        const __m256i last = _mm256_loadu_si256((const __m256i_u *)(numbers + i + 8));
        const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0xd8);
        const __m256i halfway = _mm256_shufflelo_epi16(shorts, 0xd8);
        _mm256_storeu_si256((__m256i_u *)(to + i), _mm256_shufflehi_epi16(halfway, 0xd8));
    }
#else
    for (int i = 0; i < MP_GROUP; ++i) to[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = (int16_t)numbers[i];
#endif
}

MP_FN void mp_x_group_make(mp_x_group *to, const float *x, const int zero, const int halves, const int offsets, const int zeros,
                           const int planes)
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
        if (offsets || zeros) to->weighted[h] = (zeros ? 1.0f : to->scale) * (float)sums[h];
        else to->start[h] = -zero * sums[h];
    }
    if (!planes) {
        mp_store_pairs(to->pairs, numbers);
        return;
    }
    _Pragma("omp simd")
    for (int i = 0; i < MP_GROUP; ++i) {
        to->planes[0][i] = (int8_t)((numbers[i] + 64) >> 7);
        to->planes[1][i] = (int8_t)(numbers[i] - 128 * ((numbers[i] + 64) >> 7));
    }
}

/* The same for weights that are floats: x = scale * number / MP_FLOAT8_TIMES, where scale is a power of two, so that nothing is
 * rounded and the largest products of numbers and weights are near 1. */
typedef struct {
    float numbers[MP_GROUP], scale;
    int32_t unused[3];
} mp_x_floats;

MP_FN void mp_x_floats_make(mp_x_floats *to, const float *x)
{
    uint32_t top = 0;
    _Pragma("omp simd reduction(max : top)")
    for (int i = 0; i < MP_GROUP; ++i) {
        const uint32_t bits = mp_float_to_bits(x[i]) & 0x7f800000u;
        top = bits > top ? bits : top;
    }
    /* The exponent of x becomes that of MP_FLOAT8_TIMES, as far as powers of two go. */
    const int32_t field = (int32_t)(top >> 23), wanted = (int32_t)(mp_float_to_bits(MP_FLOAT8_TIMES) >> 23);
    const int32_t apart = wanted - field, more = field == 255 ? 0 : apart > 120 ? 120 : apart < -126 ? -126 : apart;
    const float power = mp_bits_to_float((uint32_t)(127 + more) << 23);
    to->scale = MP_FLOAT8_TIMES * mp_bits_to_float((uint32_t)(127 - more) << 23);
    _Pragma("omp simd")
    for (int i = 0; i < MP_GROUP; ++i) to->numbers[i] = x[i] * power;
    memset(to->unused, 0, sizeof to->unused);
}

/* Cache lines that are read later: lines `first` to `first + count` of a unit, which begin at both places, into L1 and into L2. */
typedef struct {
    const char *near, *far;
    int first, count;
} mp_ahead;

/* Prefetches them. Past the end of a panel lies the one that is read next. */
MP_FN void mp_blocks_prefetch(const mp_ahead ahead)
{
    MP_BLOCK_UNROLL
    for (int line = 0; line < ahead.count; ++line) {
        if ((ahead.first + line) % MP_LINES_INTO_L2 == 0) __builtin_prefetch(ahead.far + line * 64, 0, 2);
        __builtin_prefetch(ahead.near + line * 64, 0, 3);
    }
}

/* Part n of `parts` of them. */
MP_FN mp_ahead mp_ahead_part(const mp_ahead all, const int n, const int parts)
{
    const int line = all.count * n / parts, end = all.count * (n + 1) / parts;
    return (mp_ahead){all.near + line * 64, all.far + line * 64, all.first + line, end - line};
}

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

/* Products of pairs of 16 bits, each pair added, with b for every column. */
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

/* sum + codes * two numbers, the same ones for every column. The three instructions stay together: gcc loads two pairs at once
 * and moves each through a port that the products need, and makes all products before it adds them, in more registers than
 * there are. */
MP_FN mp_ints mp_add_pair_of(mp_ints sum, const mp_words codes, const int16_t *numbers)
{
    typedef int32_t word __attribute__((may_alias, aligned(2)));
#if (defined(__AVX512BW__) && MP_LANES == 16) || (defined(__AVX2__) && MP_LANES == 8)
    mp_ints pair;
    __asm__("vpbroadcastd %2, %1\n\tvpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0"
            : "+v"(sum), "=&v"(pair)
            : "m"(*(const word *)(const void *)numbers), "v"(codes));
    return sum;
#else
    return sum + MP_PAIRS(codes, *(const word *)(const void *)numbers);
#endif
}

/* sums[r] = codes * numbers over part h of a group, of `parts`, of every column and of R rows, which take turns so that no sum
 * waits for itself. They begin with x.start, if `begun`. VNNI takes unsigned codes: signed ones are moved by 128, which
 * MP_BLOCK_MOVED says. MP_X_PLANES(R, largest): the numbers of R rows are planes of bytes, not pairs, if `largest` is the largest
 * of the codes. Where MP_DOTS_IN_ORDER is set, the lines `ahead` are prefetched meanwhile. Where MP_GROUPS_OF_ROW is 2, a row has
 * too few sums to take turns: G of its groups, one behind the other in `codes`, `x` and `sums`, are multiplied at once. */
#if defined(__ARM_FEATURE_DOTPROD)
#define MP_BLOCK_MOVED 0
#define MP_X_PLANES(R, largest) 1
/* Instructions stay in the order of the text, as in mp_tile.h: the two sums of a row take turns, and prefetches keep apart,
 * which makes a tenth of the speed of Neoverse-N1 cores. */
#define MP_DOTS_IN_ORDER 1
#define MP_GROUPS_OF_ROW 1
#define MP_DOT_BY(n) __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #n "]" : "+w"(sum) : "w"(codes), "w"(x))
MP_FN int32x4_t mp_dot_by(int32x4_t sum, const mp_words codes, const int8x16_t x, const int place)
{
    if (place == 0) MP_DOT_BY(0);
    else if (place == 1) MP_DOT_BY(1);
    else if (place == 2) MP_DOT_BY(2);
    else MP_DOT_BY(3);
    return sum;
}
MP_FN int8x16_t mp_bytes_here(const int8_t *p)
{
    int8x16_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const int8x16_t *)p));
    return v;
}
MP_FN int32x4_t mp_no_sum(void)
{
    int32x4_t none;
    __asm__ volatile("movi %0.4s, #0" : "=w"(none)); /* costs nothing; gcc would copy a register that is zero */
    return none;
}
MP_FN void mp_prefetch_here(const mp_ahead ahead, const int line)
{
    typedef int64_t word __attribute__((may_alias));
    if (line >= ahead.count) return;
    /* Into L1 alone: into L2 as well, Q8_0 has 4 % less of the memory's speed. */
    __asm__ volatile("prfm pldl1keep, %0" : : "m"(*(const word *)(const void *)(ahead.near + line * 64)));
}
MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int G, const int R, const int h,
                         const int parts, const int is_signed, const int largest, const int begun, const mp_ahead ahead)
{
    const int first = h * MP_QUADS / 2, end = first + MP_QUADS / parts;
    int32x4_t high[MP_BLOCK_ROWS], low[MP_BLOCK_ROWS];
    (void)G, (void)is_signed, (void)largest;
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) {
        high[r] = mp_no_sum();
        low[r] = begun ? vdupq_n_s32(x[r].start[h]) : mp_no_sum();
    }
    MP_BLOCK_UNROLL
    for (int i = first; i < end; i += 4) {
        int8x16_t upper[MP_BLOCK_ROWS], lower[MP_BLOCK_ROWS];
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            upper[r] = mp_bytes_here(x[r].planes[0] + 4 * i);
            lower[r] = mp_bytes_here(x[r].planes[1] + 4 * i);
        }
        MP_BLOCK_UNROLL
        for (int q = 0; q < 4; ++q) {
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) {
                high[r] = mp_dot_by(high[r], codes[i + q], upper[r], q);
                low[r] = mp_dot_by(low[r], codes[i + q], lower[r], q);
            }
            if (q % 2) mp_prefetch_here(ahead, (i - first + q) / 2);
        }
    }
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = (mp_ints)vaddq_s32(vshlq_n_s32(high[r], 7), low[r]);
}
#elif defined(__AVX512VNNI__) && MP_LANES == 16
#define MP_BLOCK_MOVED 128
#define MP_X_PLANES(R, largest) 1
/* Instructions stay in the order of the text here, too. gcc would put the prefetches of a group together, where they wait for each
 * other, and the sums of a group one after the other, of which the core sees too few at once. */
#define MP_DOTS_IN_ORDER 1
#define MP_GROUPS_OF_ROW 2
/* sum + codes * four numbers, the same ones for every column. gcc would load them by an instruction of its own, and the loops
 * are bound by how many instructions begin in a cycle: 8 rows of Q4_K took 1.4 times as long. */
MP_FN __m512i mp_dot_with(__m512i sum, const __m512i codes, const int8_t *numbers)
{
    typedef int32_t word __attribute__((may_alias, aligned(1)));
    __asm__ volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const word *)(const void *)numbers));
    return sum;
}
MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int G, const int R, const int h,
                         const int parts, const int is_signed, const int largest, const int begun, const mp_ahead ahead)
{
    const int first = h * MP_QUADS / 2, quads = MP_QUADS / parts;
    __m512i high[MP_BLOCK_ROWS], low[MP_BLOCK_ROWS];
    (void)largest;
    MP_BLOCK_UNROLL
    for (int r = 0; r < G * R; ++r) {
        high[r] = _mm512_setzero_si512();
        low[r] = _mm512_set1_epi32(begun ? x[r].start[h] : 0);
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < quads; ++i) {
        mp_blocks_prefetch(mp_ahead_part(ahead, i, quads));
        MP_BLOCK_UNROLL
        for (int r = 0; r < G * R; ++r) {
            const __m512i q = (__m512i)(codes[r / R * MP_QUADS + first + i] ^ (is_signed ? 0x80808080u : 0u));
            high[r] = mp_dot_with(high[r], q, x[r].planes[0] + 4 * (first + i));
            low[r] = mp_dot_with(low[r], q, x[r].planes[1] + 4 * (first + i));
        }
    }
    MP_BLOCK_UNROLL
    for (int r = 0; r < G * R; ++r) sums[r] = (mp_ints)_mm512_add_epi32(_mm512_slli_epi32(high[r], 7), low[r]);
}
#else
#define MP_BLOCK_MOVED 0
#define MP_DOTS_IN_ORDER 0
#define MP_GROUPS_OF_ROW 1
#if (defined(__AVX512BW__) && MP_LANES == 16) || (defined(__AVX2__) && MP_LANES == 8)
/* One row of x goes by bytes: codes need not become 16 bits. Products of two neighbours are added to one number of 16 bits, and some
 * of those, as many as the largest codes allow, before they become one of 32. */
#define MP_X_PLANES(R, largest) ((R) == 1 && (largest) > 0 && (largest) < 64)
#if MP_LANES == 16
#define MP_BYTE_PAIRS(a, b) (mp_words)_mm512_maddubs_epi16((__m512i)(a), _mm512_set1_epi32(b))
#else
#define MP_BYTE_PAIRS(a, b) (mp_words)_mm256_maddubs_epi16((__m256i)(a), _mm256_set1_epi32(b))
#endif
typedef int16_t mp_shorts __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
/* sum + times * codes * plane; the numbers of the plane are at most `most`. */
MP_FN mp_ints mp_plane_dots(const mp_words *codes, const int8_t *plane, mp_ints sum, const int first, const int end,
                            const int largest, const int most, const int times)
{
    const int together = INT16_MAX / (2 * largest * most);
    mp_shorts some = {0};
    MP_BLOCK_UNROLL
    for (int i = first; i < end; ++i) {
        int32_t quad;
        memcpy(&quad, plane + 4 * i, sizeof quad);
        some += (mp_shorts)MP_BYTE_PAIRS(codes[i], quad);
        if ((i - first) % together == together - 1 || i == end - 1) {
            sum += MP_PAIRS((mp_words)some, times * 0x00010001);
            some = (mp_shorts){0};
        }
    }
    return sum;
}
#else
#define MP_X_PLANES(R, largest) 0
#endif
MP_FN void mp_block_dots(const mp_words *codes, const mp_x_group *x, mp_ints *sums, const int G, const int R, const int h,
                         const int parts, const int is_signed, const int largest, const int begun, const mp_ahead ahead)
{
    const int first = h * MP_QUADS / 2, end = first + MP_QUADS / parts;
    (void)G, (void)ahead, (void)largest;
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = (mp_ints)(codes[0] ^ codes[0]) + (begun ? x[r].start[h] : 0);
#if defined(MP_BYTE_PAIRS)
    if (MP_X_PLANES(R, largest)) {
        sums[0] = mp_plane_dots(codes, x->planes[0], sums[0], first, end, largest, 127, 128);
        sums[0] = mp_plane_dots(codes, x->planes[1], sums[0], first, end, largest, 64, 1);
        return;
    }
#endif
    MP_BLOCK_UNROLL
    for (int i = first; i < end; ++i) {
        const mp_words even = mp_even_bytes(codes[i], is_signed), odd = mp_odd_bytes(codes[i], is_signed);
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            sums[r] = mp_add_pair_of(sums[r], even, x[r].pairs + 4 * i);
            sums[r] = mp_add_pair_of(sums[r], odd, x[r].pairs + 4 * i + 2);
        }
    }
}
#endif

/* What a format is to these loops. */
typedef struct {
    int unit_bytes, unit; /* of a unit of all columns of a panel; groups of 32 k in it */
    int zero;             /* what is taken off the codes */
    int largest;          /* of the codes, if they have no sign; 0 where it does not matter */
    int halves, offsets;  /* whether both halves of a group have scales of their own; whether there are offsets */
    int zeros;            /* whether groups have zero points of their own */
    int x_bytes;          /* of a group of x: an mp_x_group or an mp_x_floats */
    int kind;             /* MP_UNSIGNED, MP_SIGNED or MP_FLOATS */
    mp_group group;
} mp_block_format;

/* Whether R rows of x are planes of bytes, not pairs. */
MP_FN int mp_blocks_planes(const mp_block_format *f, const int R)
{
    (void)f, (void)R;
    return MP_X_PLANES(R, f->largest);
}

/* What is taken off the codes as mp_block_dots takes them. */
MP_FN int mp_blocks_zero(const mp_block_format *f) { return f->zero + (f->kind == MP_SIGNED ? MP_BLOCK_MOVED : 0); }

/* acc + `sum`, of part h of a group of x times one of columns, scaled. There is one product for each addition, so that
 * every compiler makes the same multiply-adds of them. */
MP_FN mp_vec mp_block_add(const mp_block_format *f, const mp_x_group *x, const int h, const mp_vec scale, const mp_vec offset,
                          const mp_ints sum, const mp_vec acc)
{
    const mp_vec weighted = mp_splat(x->weighted[h]);
    mp_vec dot = mp_ints_to_floats(sum);
    if (f->zeros) dot = mp_multiply_add(mp_splat(-(float)mp_blocks_zero(f)) - offset, weighted, dot);
    const mp_vec added = mp_multiply_add(mp_splat(x->scale), scale * dot, acc);
    return f->offsets ? mp_multiply_add(offset, weighted, added) : added;
}

#endif
