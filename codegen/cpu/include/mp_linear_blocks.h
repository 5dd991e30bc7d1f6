/* Products with weights in low-bit blocks: y = finish(norm(x) · wᵀ), by sums of integers.
 *
 * Rows of x become integers of 15 bits with a scale for each 32 of them (mp_blocks.h). A group of 32 k of a column is
 * then an exact sum of integers, times the scales of both sides: groups are added in order of k, whatever the number of
 * rows and threads, so that the bits of a result depend on neither. */
#ifndef MP_LINEAR_BLOCKS_H
#define MP_LINEAR_BLOCKS_H

#include "mp_blocks.h"
#include "mp_linear_row.h"

typedef struct {
    int64_t K;             /* depth: columns of x */
    int panels, groups;    /* panels that one epilogue finishes, and how many such groups there are */
    int unit_bytes, unit;  /* of a unit of all columns of a panel; groups of 32 k in it */
    int zero, is_signed;   /* what is taken off the codes; whether their bytes have signs */
    int halves, offsets;   /* whether both halves of a group have scales of their own; whether there are offsets */
    int many;              /* rows that a pass over a panel serves; fewer are padded, but for one */
    int chunk;             /* rows that share a pass over the weights */
    int tail;              /* groups that are not assigned beforehand when rows are few */
    int near, far;         /* bytes by which L1 and L2 prefetches run ahead */
    mp_group group;
    mp_prologue x;
    mp_finish finish;
} mp_linear_blocks;

MP_INLINE int64_t mp_blocks_groups(const mp_linear_blocks *s)
{
    const int64_t all = (s->K + MP_GROUP - 1) / MP_GROUP;
    return (all + s->unit - 1) / s->unit * s->unit;
}

/* What is taken off the codes as mp_block_dots takes them. */
MP_INLINE int mp_blocks_zero(const mp_linear_blocks *s) { return s->zero + (s->is_signed ? MP_BLOCK_MOVED : 0); }

/* Row `row` of x, normed, as every R-th of the groups `to`. Zeros follow its end. */
MP_INLINE void mp_blocks_pack(const mp_linear_blocks *s, const void *c, const int64_t row, const int R, mp_x_group *to)
{
    const mp_stats stats = mp_row_stats(&s->x, c, row, s->K);
    for (int64_t n = 0; n < mp_blocks_groups(s); ++n) {
        float values[MP_GROUP];
        const int64_t k0 = n * MP_GROUP, end = mp_min(s->K - k0, MP_GROUP);
        if (end == MP_GROUP)
            MP_SIMD
            for (int i = 0; i < MP_GROUP; ++i) values[i] = mp_row_value(&s->x, c, row, k0 + i, stats);
        else
            for (int i = 0; i < MP_GROUP; ++i) values[i] = i < end ? mp_row_value(&s->x, c, row, k0 + i, stats) : 0.0f;
        mp_x_group_make(to + n * R, values, mp_blocks_zero(s), s->halves, s->offsets);
    }
}

/* acc[r] += group g of x, of R rows, times the same group of a vector of columns. */
MP_INLINE void mp_blocks_step(const mp_linear_blocks *s, const mp_x_group *x, const char *unit, const int g, const int v,
                              mp_vec *acc, const int R)
{
    const int parts = s->halves ? 2 : 1;
    mp_words codes[MP_QUADS];
    mp_vec scale[2], offset[2];
    s->group(unit, g, v, codes, scale, offset);
    MP_BLOCK_UNROLL
    for (int h = 0; h < parts; ++h) {
        mp_ints dots[MP_MOST_BLOCK_ROWS];
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) dots[r] = (mp_ints)(codes[0] ^ codes[0]) + (s->offsets ? 0 : x[r].start[h]);
        mp_block_dots(codes, x, dots, R, h * MP_QUADS / 2, MP_QUADS / parts, s->is_signed);
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            /* One product for each addition, so that every compiler makes the same multiply-adds of them. */
            acc[r] = mp_multiply_add(mp_splat(x[r].scale), scale[h] * mp_ints_to_floats(dots[r]), acc[r]);
            if (s->offsets) acc[r] = mp_multiply_add(offset[h], mp_splat(x[r].weighted[h]), acc[r]);
        }
    }
}

/* Prefetches the i-th of n parts of a unit that is read later: into L2 what comes `far` bytes behind, into L1 what comes
 * `near` bytes behind. Past the end of a panel lies the one that is read next. */
MP_INLINE void mp_blocks_prefetch(const mp_linear_blocks *s, const char *unit, const int i, const int n)
{
    const int lines = (s->unit_bytes + 63) / 64;
    MP_BLOCK_UNROLL
    for (int line = lines * i / n; line < lines * (i + 1) / n; ++line) {
        __builtin_prefetch(unit + s->far + line * 64, 0, 2);
        __builtin_prefetch(unit + s->near + line * 64, 0, 3);
    }
}

/* sums[R][width] = R rows times a panel. Within a unit one vector of columns follows the other: registers hold its codes
 * and the sums of R rows, and what all groups of a unit have in common is computed once. */
MP_INLINE void mp_blocks_panel(const mp_linear_blocks *s, const mp_x_group *x, const char *panel, float *sums,
                               const int R)
{
    enum { V = MP_PANEL / MP_LANES };
    const int width = s->panels * MP_PANEL;
    const int64_t groups = mp_blocks_groups(s);
    mp_vec acc[MP_MOST_BLOCK_ROWS * V];
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    for (int64_t n = 0; n < groups; n += s->unit, panel += s->unit_bytes) {
        MP_ONCE
        for (int v = 0; v < V; ++v) {
            mp_vec own[MP_MOST_BLOCK_ROWS];
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) own[r] = acc[v * R + r];
            if (R == 1 || MP_BLOCK_MANY_UNROLLED) {
                MP_BLOCK_UNROLL
                for (int g = 0; g < s->unit; ++g) {
                    mp_blocks_prefetch(s, panel, v * s->unit + g, V * s->unit);
                    mp_blocks_step(s, x + (n + g) * R, panel, g, v, own, R);
                }
            } else {
                MP_ONCE
                for (int g = 0; g < s->unit; ++g) {
                    mp_blocks_prefetch(s, panel, v * s->unit + g, V * s->unit);
                    mp_blocks_step(s, x + (n + g) * R, panel, g, v, own, R);
                }
            }
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) acc[v * R + r] = own[r];
        }
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i % R * width + i / R * MP_LANES, acc[i]);
}

/* Group g of the columns for rows [first, first + count), which lie in blocks of R. */
MP_INLINE void mp_blocks_group(const mp_linear_blocks *s, const mp_x_group *x, const char *w, const int64_t g,
                               const int64_t first, const int64_t count, const int R, float *sums, const void *c)
{
    const int64_t groups = mp_blocks_groups(s), panel_bytes = groups / s->unit * s->unit_bytes;
    const int width = s->panels * MP_PANEL;
    for (int64_t b = 0; b < count; b += R) {
        for (int p = 0; p < s->panels; ++p)
            mp_blocks_panel(s, x + b * groups, w + (g * s->panels + p) * panel_bytes, sums + p * MP_PANEL, R);
        for (int64_t r = b; r < mp_min(count, b + R); ++r) s->finish(c, g, first + r, sums + (r - b) * width);
    }
}

/* Few rows: the weights stream past them. Each thread has a share of the groups; the last ones go to whoever is done
 * first. Many rows: chunks of them, whose groups of columns are taken one by one. */
MP_INLINE void mp_linear_blocks_run(const mp_linear_blocks *s, mp_run *run, const int t, const int T,
                                    const int64_t rows, const void *weights, float *xt, float *sums, const void *c)
{
    const char *const w = (const char *)weights;
    const int64_t groups = mp_blocks_groups(s);
    if (rows == 0) return;
    if (rows <= s->many) {
        /* Each thread packs the rows for itself, which is cheaper than waiting for another. */
        const int R = rows == 1 ? 1 : s->many;
        mp_x_group *const own = (mp_x_group *)(void *)xt + t * groups * s->many;
        for (int r = 0; r < R; ++r) mp_blocks_pack(s, c, mp_min(r, rows - 1), R, own + r);
        const int64_t assigned = T == 1 ? s->groups : s->groups - s->tail;
        int64_t g = mp_share(assigned, t, T), end = mp_share(assigned, t + 1, T);
        for (;; ++g) {
            if (g >= end && (g = assigned + mp_take(run)) >= s->groups) return;
            if (R == 1) mp_blocks_group(s, own, w, g, 0, 1, 1, sums, c);
            else mp_blocks_group(s, own, w, g, 0, rows, s->many, sums, c);
        }
    }
    mp_x_group *const x = (mp_x_group *)(void *)xt;
    const int64_t blocks = (rows + s->many - 1) / s->many;
    for (int64_t b = mp_share(blocks, t, T); b < mp_share(blocks, t + 1, T); ++b)
        for (int r = 0; r < s->many; ++r) {
            /* Rows behind the last one repeat it: nobody reads their sums. */
            const int64_t row = mp_min(b * s->many + r, rows - 1);
            mp_blocks_pack(s, c, row, s->many, x + b * s->many * groups + r);
        }
    mp_barrier(run, T);
    const int64_t chunks = (rows + s->chunk - 1) / s->chunk, pieces = chunks * s->groups;
    for (int64_t piece; (piece = mp_take(run)) < pieces;) {
        const int64_t first = piece / s->groups * s->chunk;
        mp_blocks_group(s, x + first * groups, w, piece % s->groups, first, mp_min(s->chunk, rows - first), s->many,
                        sums, c);
    }
}

#endif
