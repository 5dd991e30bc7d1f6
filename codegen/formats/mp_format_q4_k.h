/* Q4_K: 256 codes of 4 bits. Each 32 of them have a scale and a minimum of 6 bits, which a block's two numbers of
 * 16 bits multiply: three words of 6-bit numbers, 32 words of codes. */
#ifndef MP_FORMAT_Q4_K_H
#define MP_FORMAT_Q4_K_H

#include "mp_blocks.h"

/* A group's scale, of which `part` is wanted, and its minimum; a block has `words` words. */
MP_FN void mp_scales_q4_k(const char *unit, const int words, const int g, const int v, const float part,
                          mp_vec *scale, mp_vec *offset)
{
    /* All scales and minima at once, four in each word: groups 0 to 3 and groups 4 to 7. */
    const mp_words a = mp_word_row(unit, 0, v), b = mp_word_row(unit, 1, v), c = mp_word_row(unit, 2, v);
    const mp_words first[2] = {a & 0x3f3f3f3fu, b & 0x3f3f3f3fu};
    const mp_words last[2] = {mp_low_nibbles(c) | (a >> 2 & 0x30303030u), mp_high_nibbles(c) | (b >> 2 & 0x30303030u)};
    const mp_vec s = mp_byte_of(g < 4 ? first[0] : last[0], g % 4), m = mp_byte_of(g < 4 ? first[1] : last[1], g % 4);
    scale[0] = scale[1] = mp_half_row(unit, words, 0, v) * mp_splat(part) * s;
    offset[0] = offset[1] = -(mp_half_row(unit, words, 1, v) * m);
}

MP_FN void mp_group_q4_k(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) {
        const mp_words both = mp_word_row(unit, 3 + g / 2 * 8 + i, v);
        codes[i] = g % 2 ? mp_upper_nibbles(both) : mp_low_nibbles(both);
    }
    mp_scales_q4_k(unit, 35, g, v, g % 2 ? 1.0f / MP_UPPER_TIMES : 1.0f, scale, offset);
}

#endif
