/* mp_experts_panels.h for low-bit blocks: rows of x become integers. */
#ifndef MP_EXPERTS_BLOCKS_H
#define MP_EXPERTS_BLOCKS_H

#include "mp_experts_panels.h"
#include "mp_linear_blocks.h"

static inline void mp_experts_blocks_pack(const void *product, const void *c, const int64_t pair, const int R, char *to)
{
    const mp_linear_blocks *const s = (const mp_linear_blocks *)product;
    mp_blocks_pack(s, c, pair, R, to, mp_blocks_planes(s->format, R));
}

static inline void mp_experts_blocks_multiply(const void *product, const char *x, const char *panel, float *sums,
                                              const int64_t width, const int R)
{
    const mp_linear_blocks *const s = (const mp_linear_blocks *)product;
    (R == 1 ? s->one : s->four)(x, panel, sums, mp_blocks_groups(s), width, s->near, s->far);
}

#if defined(MP_TILE_BYTES)
static inline void mp_experts_blocks_pack_deep(const void *product, const void *c, const int64_t pair, char *to, const int r)
{
    mp_blocks_pack_deep((const mp_linear_blocks *)product, c, pair, to, r);
}

static void mp_experts_no_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    (void)c, (void)g, (void)row, (void)sums;
}

static inline void mp_experts_blocks_multiply_deep(const void *product, const char *x, const char *w, const int panels,
                                                   const int64_t count, float *sums)
{
    mp_linear_blocks s = *(const mp_linear_blocks *)product;
    s.panels = panels;
    s.finish = mp_experts_no_finish; /* sums of both matrices are finished together */
    mp_blocks_tile_group(&s, x, w, 0, 0, count, sums, 0);
}
#endif
#endif
