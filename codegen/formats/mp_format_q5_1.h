/* Q5_1: 32 codes of 5 bits, a scale and a minimum. The first word has the fifth bits. A unit is two blocks. */
#ifndef MP_FORMAT_Q5_1_H
#define MP_FORMAT_Q5_1_H

#include "mp_blocks.h"

MP_FN void mp_group_q5_1(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    const mp_words high = mp_word_row(unit, 5 * g, v);
    MP_BLOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const mp_words both = mp_word_row(unit, 5 * g + 1 + i, v);
        codes[i] = mp_low_nibbles(both) | mp_fifth_bits(high, i);
        codes[4 + i] = mp_high_nibbles(both) | mp_fifth_bits(high, 4 + i);
    }
    scale[0] = scale[1] = mp_half_row(unit, 10, 2 * g, v);
    offset[0] = offset[1] = mp_half_row(unit, 10, 2 * g + 1, v);
}

#endif
