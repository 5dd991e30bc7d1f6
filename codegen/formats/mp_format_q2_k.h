/* Q2_K: 256 codes of 2 bits (16 words). Each 16 of them have a scale and a minimum of 4 bits (4 words), which the
 * block's two numbers of 16 bits multiply. */
#ifndef MP_FORMAT_Q2_K_H
#define MP_FORMAT_Q2_K_H

#include "mp_blocks.h"

MP_FN void mp_group_q2_k(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) codes[i] = mp_word_row(unit, 4 + g / 4 * 8 + i, v) >> (2 * (g % 4)) & 0x03030303u;
    const mp_words both = mp_word_row(unit, g / 2, v);
    const mp_vec d = mp_half_row(unit, 20, 0, v), least = mp_half_row(unit, 20, 1, v);
    MP_BLOCK_UNROLL
    for (int h = 0; h < 2; ++h) {
        scale[h] = d * mp_byte_of(mp_low_nibbles(both), g % 2 * 2 + h);
        offset[h] = -(least * mp_byte_of(mp_high_nibbles(both), g % 2 * 2 + h));
    }
}

#endif
