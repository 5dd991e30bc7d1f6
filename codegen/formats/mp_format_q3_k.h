/* Q3_K: 256 codes of 3 bits, 4 of them zero, in two parts: the third bits (8 words) and two lower ones (16). Each 16
 * have a scale of 6 bits, 32 of them zero (3 words), which the block's number of 16 bits multiplies. */
#ifndef MP_FORMAT_Q3_K_H
#define MP_FORMAT_Q3_K_H

#include "mp_blocks.h"

MP_FN void mp_group_q3_k(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) {
        const mp_words low = mp_word_row(unit, 8 + g / 4 * 8 + i, v) >> (2 * (g % 4)) & 0x03030303u;
        codes[i] = low | (mp_word_row(unit, i, v) >> g & 0x01010101u) << 2;
    }
    const mp_words low = mp_word_row(unit, 24 + g / 2 % 2, v) >> (g / 4 * 4) & 0x0f0f0f0fu;
    const mp_words scales = low | (mp_word_row(unit, 26, v) >> (g / 2 * 2) & 0x03030303u) << 4;
    const mp_vec d = mp_half_row(unit, 27, 0, v);
    scale[0] = d * (mp_byte_of(scales, g % 2 * 2) - mp_splat(32.0f));
    scale[1] = d * (mp_byte_of(scales, g % 2 * 2 + 1) - mp_splat(32.0f));
}

#endif
