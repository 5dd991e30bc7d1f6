/* Whole numbers of 4 or 8 bits in blocks of 128, 64 or 32, each with a scale in f16, bf16 or f32 and a zero point, which is a
 * byte. 32 codes of 4 bits lie as those of Q4_0; bytes have signs. A unit is one block, or four of 32. */
#ifndef MP_FORMAT_GROUPS_H
#define MP_FORMAT_GROUPS_H

#include "mp_blocks.h"

MP_FN void mp_group_codes(const char *unit, const int bits, const int first, const int v, mp_words *codes)
{
    MP_BLOCK_UNROLL
    for (int i = 0; i < bits; ++i) {
        const mp_words both = mp_word_row(unit, first + i, v);
        codes[i] = bits == 4 ? mp_low_nibbles(both) : both;
        if (bits == 4) codes[4 + i] = mp_high_nibbles(both);
    }
}

/* The scale of block b of a unit of `words` words, a block of which are `each`. */
MP_FN mp_vec mp_group_scale_f16(const char *unit, const int words, const int each, const int b, const int v)
{
    (void)each;
    return mp_half_row(unit, words, b, v);
}
MP_FN mp_vec mp_group_scale_bf16(const char *unit, const int words, const int each, const int b, const int v)
{
    (void)each;
    return mp_brain_row(unit, words, b, v);
}
MP_FN mp_vec mp_group_scale_f32(const char *unit, const int words, const int each, const int b, const int v)
{
    (void)words;
    return mp_bits_to_floats(mp_word_row(unit, b * each + each - 1, v)); /* the last word of its block */
}

/* `narrow`: whether scales have 16 bits. */
#define MP_GROUPS(bits, block, type, narrow) \
    MP_FN void mp_group_int##bits##_##block##_##type(const char *unit, const int g, const int v, mp_words *codes, \
                                                     mp_vec *scale, mp_vec *offset) \
    { \
        enum { UNIT = (block) == 32 ? 4 : 1, EACH = (block) * (bits) / 32 + !(narrow), WORDS = UNIT * EACH }; \
        const int b = g / ((block) / 32); \
        mp_group_codes(unit, bits, b * EACH + g % ((block) / 32) * (bits), v, codes); \
        scale[0] = scale[1] = mp_group_scale_##type(unit, WORDS, EACH, b, v); \
        const mp_words zero = mp_byte_row(unit, WORDS, (narrow) * UNIT, b, v); \
        offset[0] = offset[1] = (bits) == 4 ? mp_byte_of(zero, 0) : mp_signed_byte_of(zero, 0); \
    }
#define MP_GROUPS_OF(block) \
    MP_GROUPS(4, block, f16, 1) \
    MP_GROUPS(4, block, bf16, 1) \
    MP_GROUPS(4, block, f32, 0) \
    MP_GROUPS(8, block, f32, 0)
MP_GROUPS_OF(128)
MP_GROUPS_OF(64)
MP_GROUPS_OF(32)

#endif
