/* MXFP4: 32 codes of 4 bits, which stand for floats of 4 bits, doubled here, and a byte that is the exponent of their
 * scale. A unit is four blocks. */
#ifndef MP_FORMAT_MXFP4_H
#define MP_FORMAT_MXFP4_H

#include "mp_blocks.h"

static const int8_t mp_table_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

MP_FN void mp_group_mxfp4(const char *unit, const int g, const int v, mp_words *codes, mp_vec *scale, mp_vec *offset)
{
    (void)offset;
    MP_BLOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const mp_words both = mp_word_row(unit, 4 * g + i, v);
        codes[i] = mp_lookup16(mp_table_mxfp4, mp_low_nibbles(both));
        codes[4 + i] = mp_lookup16(mp_table_mxfp4, mp_high_nibbles(both));
    }
    /* 2^(e - 128) may be subnormal: it is made of two powers of about half its exponent. */
    const mp_words e = mp_byte_row(unit, 16, 0, g, v), half = e >> 1;
    scale[0] = scale[1] = mp_bits_to_floats((half + 63) << 23) * mp_bits_to_floats((e - half + 63) << 23);
}

#endif
