/* Rows of a key/value cache in 8 bits: codes, and behind them the scale of the row, a float. */
#ifndef MP_CACHE_ROWS_H
#define MP_CACHE_ROWS_H

#include "mp_math.h"

enum { MP_CODE_LARGEST = 127 };

/* A row that is not finite has a scale of NaN. */
MP_FN void mp_pack_row(int8_t *to, const float *row, const int64_t dim)
{
    uint32_t top = 0; /* bits of the largest: those of positive floats have their order, and NaN is above infinity */
    _Pragma("omp simd reduction(max : top)")
    for (int64_t i = 0; i < dim; ++i) {
        const uint32_t bits = mp_float_to_bits(row[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const int bad = top >= 0x7f800000u;
    const float largest = mp_bits_to_float(top), scale = bad ? NAN : largest / MP_CODE_LARGEST;
    /* The inverse of the smallest floats overflows: their products are too small to count. */
    const float ratio = bad || top == 0 ? 0.0f : MP_CODE_LARGEST / largest, inverse = ratio < INFINITY ? ratio : 0.0f;
    MP_SIMD
    for (int64_t i = 0; i < dim; ++i) to[i] = (int8_t)(bad ? 0 : (int32_t)rintf(row[i] * inverse));
    memcpy(to + dim, &scale, sizeof scale);
}
#endif
