/* Q8_0: 32 signed bytes and one scale. A unit is two blocks. */
#ifndef MP_FORMAT_Q8_0_H
#define MP_FORMAT_Q8_0_H

#include "mp_blocks.h"

MP_FN void mp_group_q8_0(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 8; ++i) codes[i] = mp_word_row(unit, 8 * g + i, v);
    scale[0] = scale[1] = mp_half_row(unit, 16, g, v);
}

#endif
