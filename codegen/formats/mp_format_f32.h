/* f32 weights: a panel is [k][column]. */
#ifndef MP_FORMAT_F32_H
#define MP_FORMAT_F32_H

#include "mp_tile.h"

/* V vectors of one row of a panel. */
MP_FN void mp_load_row_f32(const void *from, mp_vec *wide, const int V)
{
    mp_vloads((const float *)from, wide, V);
}

/* Column c of a weight in panels with K rows: a row of an embedding table. */
MP_FN void mp_load_column_f32(float *to, const float *w, const int64_t c, const int64_t K, const int panel)
{
    const float *const from = w + c / panel * panel * K + c % panel;
    for (int64_t k = 0; k < K; ++k) to[k] = from[k * panel];
}

#endif
