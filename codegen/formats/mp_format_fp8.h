/* Codes that are floats of 8 bits (e4m3), with a scale in f32 for each 128 or 32 of them. They lie byte by byte: a row of 16
 * columns for each k. A unit is a block of 128, or two of 32. */
#ifndef MP_FORMAT_FP8_H
#define MP_FORMAT_FP8_H

#include "mp_blocks.h"

MP_FN void mp_group_fp8(const char *unit, const int scales, const int s, const int g, const int v, mp_words *codes, mp_vec *scale)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < MP_QUADS; ++i) {
        codes[i] = mp_byte_row(unit, scales, 0, g * MP_GROUP + 4 * i, v);
        for (int j = 1; j < 4; ++j) codes[i] |= mp_byte_row(unit, scales, 0, g * MP_GROUP + 4 * i + j, v) << (8 * j);
    }
    scale[0] = scale[1] = mp_bits_to_floats(mp_word_row(unit, s, v));
}

#define MP_FP8(block, scales, s) \
    MP_FN void mp_group_fp8_##block(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset) \
    { \
        (void)offset; \
        mp_group_fp8(unit, scales, s, g, v, codes, scale); \
    }
MP_FP8(128, 1, 0)
MP_FP8(32, 2, g)

#endif
