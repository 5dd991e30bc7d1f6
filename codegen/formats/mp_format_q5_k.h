/* Q5_K: 256 codes of 5 bits, with the scales and minima of Q4_K: three words of 6-bit numbers, 8 words of fifth bits,
 * 32 words of the lower four. */
#ifndef MP_FORMAT_Q5_K_H
#define MP_FORMAT_Q5_K_H

#include "mp_format_q4_k.h"

MP_FN void mp_group_q5_k(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) {
        const mp_words low = mp_word_row(unit, 11 + g / 2 * 8 + i, v) >> (g % 2 * 4) & 0x0f0f0f0fu;
        const mp_words fifth = mp_word_row(unit, 3 + i, v);
        codes[i] = low | ((g < 4 ? fifth << (4 - g % 4) : fifth >> (g % 4)) & 0x10101010u);
    }
    mp_scales_q4_k(unit, 43, g, v, 1.0f, scale, offset);
}

#endif
