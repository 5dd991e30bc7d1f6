/* IQ4_XS: 256 codes of 4 bits, which stand for the numbers of IQ4_NL's table (32 words). Each 32 of them have a scale
 * of 6 bits, 32 of them zero, which the block's number of 16 bits multiplies: four lower bits in a word, two upper ones
 * in single bytes. */
#ifndef MP_FORMAT_IQ4_XS_H
#define MP_FORMAT_IQ4_XS_H

#include "mp_format_iq4_nl.h"

MP_FN void mp_group_iq4_xs(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const mp_words both = mp_word_row(unit, 1 + g * 4 + i, v);
        codes[i] = mp_lookup16(mp_table_iq4, mp_low_nibbles(both));
        codes[4 + i] = mp_lookup16(mp_table_iq4, mp_high_nibbles(both));
    }
    const mp_words s = (mp_word_row(unit, 0, v) >> (4 * g) & 15)
                       | (mp_byte_row(unit, 33, 1, g / 4, v) >> (g % 4 * 2) & 3) << 4;
    scale[0] = scale[1] = mp_half_row(unit, 33, 0, v) * (mp_ints_to_floats((mp_ints)s) - mp_splat(32.0f));
}

#endif
