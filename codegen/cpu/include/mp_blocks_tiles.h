/* Many rows times weights in low-bit blocks on tile units, by sums of bytes.
 *
 * 256 k of a column, whatever their format, become integers of 16 bits with one scale, in two planes of bytes, as do 256 k
 * of a row of x. Of the four products of planes the three that count are made: high by high, and in one sum high by low
 * and low by high. Weights are expanded once for a chunk of rows. Rounding is to 1 / 65024 of the largest of 256 numbers;
 * the bits of a row depend on no other row and on no thread, but few rows run another way (mp_linear_blocks.h). */
#ifndef MP_BLOCKS_TILES_H
#define MP_BLOCKS_TILES_H

#include "mp_amx.h"
#include "mp_blocks.h"

enum {
    MP_DEEP = 256,                           /* k that share a scale */
    MP_DEEP_GROUPS = MP_DEEP / MP_GROUP,
    MP_DEEP_STEPS = MP_DEEP / 64,            /* tiles have 64 k */
    MP_PLANE = MP_DEEP * MP_PANEL,           /* bytes: of 16 columns or 16 rows */
    MP_DEEP_LARGEST = 127 * 256,             /* number = 256 * high + low */
    MP_X_DEEP = 2 * MP_PLANE + MP_PANEL * 4, /* 16 rows of x: [64 k][plane][row][64], then their scales */
};

/* 256 numbers of x as row r of 16. */
MP_FN void mp_x_deep_make(char *to, const int r, const float *x)
{
    uint32_t top = 0; /* see mp_x_group_make */
    _Pragma("omp simd reduction(max : top)")
    for (int i = 0; i < MP_DEEP; ++i) {
        const uint32_t bits = mp_float_to_bits(x[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const int bad = top >= 0x7f800000u;
    const float largest = mp_bits_to_float(top);
    const float ratio = top > 0 && !bad ? MP_DEEP_LARGEST / largest : 0.0f, inverse = ratio < INFINITY ? ratio : 0.0f;
    ((float *)(void *)(to + 2 * MP_PLANE))[r] = bad ? NAN : largest / MP_DEEP_LARGEST;
    for (int step = 0; step < MP_DEEP_STEPS; ++step) {
        int8_t *const high = (int8_t *)to + step * 2048 + r * 64, *const low = high + 1024;
        _Pragma("omp simd")
        for (int i = 0; i < 64; ++i) {
            const int32_t n = bad ? 0 : (int32_t)rintf(x[step * 64 + i] * inverse);
            high[i] = (int8_t)((n + 128) >> 8);
            low[i] = (int8_t)(n - 256 * ((n + 128) >> 8));
        }
    }
}

#if MP_LANES == 16
typedef uint8_t mp_code_bytes __attribute__((vector_size(64), aligned(4), may_alias));

/* The larger of two words, or of their bytes. */
MP_FN mp_words mp_larger(const mp_words a, const mp_words b)
{
#if defined(__AVX512F__)
    return (mp_words)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
    const mp_words more = (mp_words)(a > b);
    return (a & more) | (b & ~more);
#endif
}
MP_FN mp_words mp_larger_bytes(const mp_words a, const mp_words b)
{
#if defined(__AVX512BW__)
    return (mp_words)_mm512_max_epu8((__m512i)a, (__m512i)b);
#else
    const mp_words more = (mp_words)((mp_code_bytes)a > (mp_code_bytes)b);
    return (a & more) | (b & ~more);
#endif
}
MP_FN mp_words mp_largest_word(const mp_words w)
{
    const mp_words pairs = mp_larger_bytes(w, w >> 16);
    return mp_larger_bytes(pairs, pairs >> 8) & 255;
}
MP_FN mp_vec mp_largest_byte(const mp_words w) { return mp_ints_to_floats((mp_ints)mp_largest_word(w)); }

/* `groups` groups of a panel, up to 256 k of its 16 columns, as two planes of tiles [64 k][quad][column][4] and a scale
 * for each column, times 256. A column with a number that is infinite or none has the scale NaN. */
MP_FN void mp_blocks_expand(const char *units, const int groups, const mp_group group, const int unit_bytes, const int unit,
                            const int zero, const int zeros, const int kind, const int offsets, mp_words *high, mp_words *low,
                            mp_vec *factor)
{
    mp_vec scale[MP_DEEP_GROUPS][2], offset[MP_DEEP_GROUPS][2];
    const uint32_t flip = kind == MP_SIGNED ? 0x80808080u : 0u; /* codes without signs */
    const mp_vec none = mp_splat((float)(zero + (kind == MP_SIGNED ? 128 : 0)));
    mp_words top = {0};
    MP_ONCE
    for (int g = 0; g < groups; ++g) {
        mp_words codes[MP_QUADS];
        mp_vec least[2] = {mp_splat(0.0f), mp_splat(0.0f)};
        group(units + g / unit * unit_bytes, g % unit, 0, codes, scale[g], least);
        if (kind == MP_FLOATS) {
            mp_words most = {0};
            MP_BLOCK_UNROLL
            for (int i = 0; i < MP_QUADS; ++i) most = mp_larger_bytes(most, codes[i] & 0x7f7f7f7fu);
            const mp_vec last = scale[g][0] * mp_number_of(mp_largest_word(most), 0, kind);
            top = mp_larger(top, (mp_words)last & 0x7fffffffu);
            offset[g][0] = offset[g][1] = mp_splat(0.0f);
            continue;
        }
        MP_BLOCK_UNROLL
        for (int h = 0; h < 2; ++h) {
            mp_words most = {0}, rest = {0}; /* the largest codes, and the largest complements */
            MP_BLOCK_UNROLL
            for (int i = 4 * h; i < 4 * h + 4; ++i) {
                most = mp_larger_bytes(most, codes[i] ^ flip);
                rest = mp_larger_bytes(rest, ~(codes[i] ^ flip));
            }
            offset[g][h] = zeros ? scale[g][h] * -(none + least[h]) : (offsets ? least[h] : mp_splat(0.0f)) - scale[g][h] * none;
            const mp_vec last = scale[g][h] * mp_largest_byte(most) + offset[g][h];
            const mp_vec first = scale[g][h] * (mp_splat(255.0f) - mp_largest_byte(rest)) + offset[g][h];
            top = mp_larger(top, mp_larger((mp_words)last & 0x7fffffffu, (mp_words)first & 0x7fffffffu));
        }
    }
    const mp_vec largest = (mp_vec)top;
    const mp_words bad = (mp_words)(top >= 0x7f800000u), small = (mp_words)(top < 0x01000000u);
    *factor = (mp_vec)((mp_words)(largest * mp_splat(256.0f / MP_DEEP_LARGEST)) | (bad & 0x7fc00000u));
    const mp_vec inverse = (mp_vec)((mp_words)(mp_splat((float)MP_DEEP_LARGEST) / largest) & ~(bad | small));
    for (int i = 0; i < 2 * groups; ++i) {
        scale[i / 2][i % 2] *= inverse;
        offset[i / 2][i % 2] *= inverse;
    }
    MP_ONCE
    for (int g = 0; g < groups; ++g) {
        mp_words codes[MP_QUADS];
        mp_vec again[2], unused[2];
        group(units + g / unit * unit_bytes, g % unit, 0, codes, again, unused);
        MP_BLOCK_UNROLL
        for (int i = 0; i < MP_QUADS; ++i) {
            const mp_vec a = scale[g][i / 4], b = offset[g][i / 4];
            mp_words n[4]; /* number + 128 in the lower 16 bits, where rounding to a whole number leaves it */
            MP_BLOCK_UNROLL
            for (int j = 0; j < 4; ++j)
                n[j] = (mp_words)(mp_number_of(codes[i] ^ flip, j, kind == MP_FLOATS ? MP_FLOATS : MP_UNSIGNED) * a + b + mp_splat(12582912.0f + 128.0f));
            const mp_words even = (n[0] & 0xffffu) | n[2] << 16, odd = (n[1] & 0xffffu) | n[3] << 16;
            high[g * MP_QUADS + i] = (even >> 8 & 0x00ff00ffu) | (odd & 0xff00ff00u);
            low[g * MP_QUADS + i] = ((even & 0x00ff00ffu) | (odd << 8 & 0xff00ff00u)) ^ 0x80808080u;
        }
    }
    for (int i = groups * MP_QUADS; i < MP_DEEP / 4; ++i) high[i] = low[i] = top * 0;
}
#endif

#endif
