/* mp_experts.h for matrices in low-bit blocks: rows of x become integers, and panels are multiplied as in products with
 * one matrix (mp_linear_blocks.h). The panels of a matrix follow those of the one before. */
#ifndef MP_EXPERTS_BLOCKS_H
#define MP_EXPERTS_BLOCKS_H

#include "mp_experts.h"
#include "mp_linear_blocks.h"

enum { MP_EXPERT_PANELS = 4 }; /* panels of a task */

/* Columns [first, first + count) of a pair: sums by matrix e, and by its second one, if there is one. */
typedef void (*mp_expert_finish)(const void *c, int64_t pair, int64_t e, int64_t first, int64_t count,
                                 const float *sums, const float *more);

typedef struct {
    mp_linear_blocks product; /* of one matrix: K, near, far, format, one, four, row */
    int64_t experts, columns;
    int matrices; /* 1, or 2 with a gate */
    mp_expert_finish finish;
} mp_experts_blocks;

/* Rows of x that matrix e has in memory: one alone, or blocks of four, the last of which repeats its last row. */
MP_INLINE int64_t mp_expert_rows(const int64_t *starts, const int64_t e)
{
    const int64_t count = starts[e + 1] - starts[e];
    return count <= 1 ? count : (count + 3) / 4 * 4;
}

/* Threads pack the rows together, then take tasks, a few panels of one matrix, in order. */
MP_INLINE void mp_experts_blocks_run(const mp_experts_blocks *s, mp_run *run, const int t, const int T, const int64_t *order,
                                     const int64_t *starts, const char *w, const char *up, mp_x_group *x, const void *c)
{
    enum { WIDTH = MP_EXPERT_PANELS * MP_PANEL };
    const mp_linear_blocks *const product = &s->product;
    const mp_block_format *const f = product->format;
    const int64_t groups = mp_blocks_groups(product), panel_bytes = groups / f->unit * f->unit_bytes;
    const int64_t panels = s->columns / MP_PANEL, strips = (panels + MP_EXPERT_PANELS - 1) / MP_EXPERT_PANELS;
    int64_t active = 0, row = 0;
    for (int64_t e = 0; e < s->experts; ++e) {
        const int64_t rows = mp_expert_rows(starts, e), count = starts[e + 1] - starts[e];
        for (int64_t i = 0; i < rows; ++i)
            if ((row + i) % T == t)
                mp_blocks_pack(product, c, order[starts[e] + mp_min(i, count - 1)], rows == 1 ? 1 : 4,
                               x + (row + i / 4 * 4) * groups + i % 4);
        row += rows;
        active += rows > 0;
    }
    mp_barrier(run, T);
    _Alignas(64) float sums[2][4 * WIDTH];
    int64_t e = -1, reached = -1, next = 0; /* the matrix at work, its number among the active ones, the rows before the next */
    for (int64_t task; (task = mp_take(run)) < active * strips && !mp_stopping(run);) {
        const int64_t p0 = task % strips * MP_EXPERT_PANELS, some = mp_min(MP_EXPERT_PANELS, panels - p0);
        int64_t first = e < 0 ? 0 : next - mp_expert_rows(starts, e);
        for (; reached < task / strips; ++reached) {
            first = next;
            do ++e;
            while (starts[e + 1] == starts[e]);
            next += mp_expert_rows(starts, e);
        }
        const int64_t rows = next - first, R = rows == 1 ? 1 : 4;
        const mp_block_panel by_panel = rows == 1 ? product->one : product->four;
        for (int64_t b = 0; b < rows; b += R) {
            for (int m = 0; m < s->matrices; ++m)
                for (int64_t p = 0; p < some; ++p)
                    by_panel(x + (first + b) * groups, (m ? up : w) + (e * panels + p0 + p) * panel_bytes,
                             sums[m] + p * MP_PANEL, groups, WIDTH, product->near, product->far);
            for (int64_t r = 0; r < R && starts[e] + b + r < starts[e + 1]; ++r)
                s->finish(c, order[starts[e] + b + r], e, p0 * MP_PANEL, some * MP_PANEL, sums[0] + r * WIDTH,
                          sums[1] + r * WIDTH);
        }
    }
}
#endif
