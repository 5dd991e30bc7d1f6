/* IQ4_NL: 32 codes of 4 bits, which stand for numbers of a table, and one scale. A unit is two blocks. */
#ifndef MP_FORMAT_IQ4_NL_H
#define MP_FORMAT_IQ4_NL_H

#include "mp_blocks.h"

static const int8_t mp_table_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

MP_FN void mp_group_iq4_nl(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const mp_words both = mp_word_row(unit, 4 * g + i, v);
        codes[i] = mp_lookup16(mp_table_iq4, mp_low_nibbles(both));
        codes[4 + i] = mp_lookup16(mp_table_iq4, mp_high_nibbles(both));
    }
    scale[0] = scale[1] = mp_half_row(unit, 8, g, v);
}

#endif
