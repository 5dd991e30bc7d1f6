/* mp_experts_panels.h for panels of floats: a block of rows of x lies as xt[k][row]. */
#ifndef MP_EXPERTS_VECTORS_H
#define MP_EXPERTS_VECTORS_H

#include "mp_experts_panels.h"
#include "mp_linear.h"

static inline void mp_experts_vectors_pack(const void *product, const void *c, const int64_t pair, const int R, char *to)
{
    const mp_linear *const s = (const mp_linear *)product;
    float *const xt = (float *)(void *)to;
    mp_stats stats;
    for (int64_t i0 = 0; i0 < s->K; i0 += MP_SOME_COLUMNS) {
        float values[MP_SOME_COLUMNS];
        const int64_t end = mp_min(s->K, i0 + MP_SOME_COLUMNS);
        s->row(c, pair, i0, end, &stats, values);
        for (int64_t i = i0; i < end; ++i) xt[i * R] = values[i - i0];
    }
}

static inline void mp_experts_vectors_multiply(const void *product, const char *x, const char *panel, float *sums,
                                               const int64_t width, const int R)
{
    const mp_linear *const s = (const mp_linear *)product;
    s->by_panel[R > 1]((const float *)(const void *)x, panel, s->K, sums, (int)width);
}
#endif
