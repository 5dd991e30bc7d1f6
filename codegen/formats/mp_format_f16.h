/* f16 weights: a panel is [k][column]. */
#ifndef MP_FORMAT_F16_H
#define MP_FORMAT_F16_H

#include "mp_tile.h"

/* V vectors of one row of a panel, widened. */
MP_FN void mp_load_row_f16(const void *from, mp_vec *wide, const int V)
{
    const mp_f16 *const p = (const mp_f16 *)from;
    MP_FULLY
    for (int j = 0; j < V; ++j) wide[j] = mp_vload_f16(p + j * MP_LANES);
}

/* Column c of a weight in panels with K rows: a row of an embedding table. */
MP_FN void mp_load_column_f16(mp_f16 *to, const mp_f16 *w, const int64_t c, const int64_t K, const int panel)
{
    const mp_f16 *const from = w + c / panel * panel * K + c % panel;
    for (int64_t k = 0; k < K; ++k) to[k] = from[k * panel];
}

#endif
