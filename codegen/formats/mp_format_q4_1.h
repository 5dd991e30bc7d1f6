/* Q4_1: 32 codes of 4 bits, a scale and a minimum. A unit is two blocks. */
#ifndef MP_FORMAT_Q4_1_H
#define MP_FORMAT_Q4_1_H

#include "mp_blocks.h"

MP_FN void mp_group_q4_1(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const mp_words both = mp_word_row(unit, 4 * g + i, v);
        codes[i] = mp_low_nibbles(both);
        codes[4 + i] = mp_high_nibbles(both);
    }
    scale[0] = scale[1] = mp_half_row(unit, 8, 2 * g, v);
    offset[0] = offset[1] = mp_half_row(unit, 8, 2 * g + 1, v);
}

#endif
