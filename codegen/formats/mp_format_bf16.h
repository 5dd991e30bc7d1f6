/* bf16 weights: a panel is [k][column], with column c beside column c + panel / 2. */
#ifndef MP_FORMAT_BF16_H
#define MP_FORMAT_BF16_H

#include "mp_tile.h"

/* V vectors of one row of a panel, widened: one load, a shift and a mask give two of them. */
MP_FN void mp_load_row_bf16(const void *from, mp_vec *wide, const int V)
{
    const mp_bf16 *const p = (const mp_bf16 *)from;
    MP_FULLY
    for (int j = 0; j < V / 2; ++j) mp_vload2_bf16(p + 2 * j * MP_LANES, &wide[j], &wide[j + V / 2]);
}

/* Column c of a weight in panels with K rows: a row of an embedding table. */
MP_FN void mp_load_column_bf16(mp_bf16 *to, const mp_bf16 *w, const int64_t c, const int64_t K, const int panel)
{
    const int64_t column = c % panel, half = panel / 2;
    const mp_bf16 *const from = w + c / panel * panel * K + (column < half ? 2 * column : 2 * (column - half) + 1);
    for (int64_t k = 0; k < K; ++k) to[k] = from[k * panel];
}

#endif
