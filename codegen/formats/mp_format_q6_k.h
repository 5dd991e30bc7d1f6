/* Q6_K: 256 codes of 6 bits, 32 of them zero, in two parts: four lower bits (32 words) and two upper ones (16). Each 16
 * have a scale of 8 bits (4 words), which the block's number of 16 bits multiplies. */
#ifndef MP_FORMAT_Q6_K_H
#define MP_FORMAT_Q6_K_H

#include "mp_blocks.h"

MP_FN void mp_group_q6_k(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    const int half = g / 4, part = g % 4;
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) {
        const mp_words low = mp_word_row(unit, half * 16 + part % 2 * 8 + i, v) >> (part / 2 * 4) & 0x0f0f0f0fu;
        const mp_words high = mp_word_row(unit, 32 + half * 8 + i, v);
        codes[i] = low | ((part < 2 ? high << (4 - part % 2 * 2) : high >> (part % 2 * 2)) & 0x30303030u);
    }
    const mp_words scales = mp_word_row(unit, 48 + g / 2, v);
    const mp_vec d = mp_half_row(unit, 52, 0, v);
    scale[0] = d * mp_signed_byte_of(scales, g % 2 * 2);
    scale[1] = d * mp_signed_byte_of(scales, g % 2 * 2 + 1);
}

#endif
