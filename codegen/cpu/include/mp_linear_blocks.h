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
    int unit_bytes, unit; /* of a unit of all columns of a panel; groups of 32 k in it */
    int zero, is_signed;  /* what is taken off the codes; whether their bytes have signs */
    int halves, offsets;  /* whether both halves of a group have scales of their own; whether there are offsets */
    int far;              /* bytes by which a panel is prefetched before it is read */
    mp_group group;
} mp_block_format;

/* What MP_BLOCKS_FUNCTION makes. */
typedef void (*mp_block_panel)(const mp_x_group *x, const char *panel, int64_t groups, float *sums, int width);

typedef struct {
    int64_t K;             /* depth: columns of x */
    int panels, groups;    /* panels that one epilogue finishes, and how many such groups there are */
    int unit_bytes, unit;  /* as in mp_block_format */
    int many;              /* rows that a pass over a panel serves; fewer are padded, but for one */
    int chunk;             /* rows that share a pass over the weights */
    int tail;              /* groups that are not assigned beforehand when rows are few */
    mp_block_panel by_panel[2]; /* for one row, and for `many` */
    mp_read_row row;
    mp_finish finish;
} mp_linear_blocks;

MP_INLINE int64_t mp_blocks_groups(const mp_linear_blocks *s)
{
    const int64_t all = (s->K + MP_GROUP - 1) / MP_GROUP;
    return (all + s->unit - 1) / s->unit * s->unit;
}

/* Row `row` of x, normed, as every R-th of the groups `to`. Zeros follow its end. */
static void mp_blocks_pack(const mp_linear_blocks *s, const void *c, const int64_t row, const int R, mp_x_group *to)
{
    const int64_t groups = mp_blocks_groups(s);
    mp_stats stats;
    for (int64_t n = 0; n < groups;) {
        float values[MP_SOME_COLUMNS];
        const int64_t k0 = n * MP_GROUP, end = mp_max(k0, mp_min(s->K, k0 + MP_SOME_COLUMNS));
        if (k0 < end) s->row(c, row, k0, end, &stats, values);
        for (int64_t i = end - k0; i < MP_SOME_COLUMNS; ++i) values[i] = 0.0f;
        for (int i = 0; i < MP_SOME_COLUMNS / MP_GROUP && n < groups; ++i, ++n)
            mp_x_group_make(to + n * R, values + i * MP_GROUP);
    }
}

/* acc[r] += group g of x, of R rows, times the same group of a vector of columns. */
MP_INLINE void mp_blocks_step(const mp_block_format *f, const mp_x_group *x, const char *unit, const int g, const int v,
                              mp_vec *acc, const int R)
{
    const int parts = f->halves ? 2 : 1, zero = f->zero + (f->is_signed ? MP_BLOCK_MOVED : 0);
    mp_words codes[MP_QUADS];
    mp_vec scale[2], offset[2];
    f->group(unit, g, v, codes, scale, offset);
    MP_BLOCK_UNROLL
    for (int h = 0; h < parts; ++h) {
        mp_ints dots[MP_MOST_BLOCK_ROWS];
        int32_t sums[MP_MOST_BLOCK_ROWS];
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            sums[r] = f->halves ? x[r].sums[h] : x[r].sums[0] + x[r].sums[1];
            dots[r] = (mp_ints)(codes[0] ^ codes[0]) - zero * sums[r];
        }
        mp_block_dots(codes, x, dots, R, h * MP_QUADS / 2, MP_QUADS / parts, f->is_signed);
        MP_BLOCK_UNROLL
        for (int r = 0; r < R; ++r) {
            /* One product for each addition, so that every compiler makes the same multiply-adds of them. */
            acc[r] = mp_multiply_add(mp_splat(x[r].scale), scale[h] * mp_ints_to_floats(dots[r]), acc[r]);
            if (f->offsets) acc[r] = mp_multiply_add(offset[h], mp_splat(x[r].scale * (float)sums[r]), acc[r]);
        }
    }
}

/* sums[R][width] = R rows times a panel. Within a unit one vector of columns follows the other: registers hold its codes
 * and the sums of R rows, and what all groups of a unit have in common is computed once. */
MP_INLINE void mp_blocks_panel(const mp_block_format *f, const mp_x_group *x, const char *panel, const int64_t groups,
                               float *sums, const int width, const int R)
{
    enum { V = MP_PANEL / MP_LANES };
    mp_vec acc[MP_MOST_BLOCK_ROWS * V];
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    for (int64_t n = 0; n < groups; n += f->unit, panel += f->unit_bytes) {
        for (int i = 0; i < f->unit_bytes; i += 64) __builtin_prefetch(panel + f->far + i, 0, 2);
        MP_ONCE
        for (int v = 0; v < V; ++v) {
            mp_vec own[MP_MOST_BLOCK_ROWS];
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) own[r] = acc[v * R + r];
            MP_ONCE
            for (int g = 0; g < f->unit; ++g) mp_blocks_step(f, x + (n + g) * R, panel, g, v, own, R);
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) acc[v * R + r] = own[r];
        }
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i % R * width + i / R * MP_LANES, acc[i]);
}

/* mp_blocks_panel for R rows and panels of a format, whose fields follow: all products of a plan share it. */
#define MP_BLOCKS_FUNCTION(name, R, ...) \
    MP_SHARED name(const mp_x_group *x, const char *panel, const int64_t groups, float *sums, const int width) \
    { \
        const mp_block_format f = {__VA_ARGS__}; \
        mp_blocks_panel(&f, x, panel, groups, sums, width, R); \
    }

/* Group g of the columns for rows [first, first + count), which lie in blocks of R. */
static void mp_blocks_group(const mp_linear_blocks *s, const mp_x_group *x, const char *w, const int64_t g,
                            const int64_t first, const int64_t count, const int R, float *sums, const void *c)
{
    const int64_t groups = mp_blocks_groups(s), panel_bytes = groups / s->unit * s->unit_bytes;
    const mp_block_panel by_panel = s->by_panel[R > 1];
    const int width = s->panels * MP_PANEL;
    for (int64_t b = 0; b < count; b += R) {
        for (int p = 0; p < s->panels; ++p)
            by_panel(x + b * groups, w + (g * s->panels + p) * panel_bytes, groups, sums + p * MP_PANEL, width);
        for (int64_t r = b; r < mp_min(count, b + R); ++r) s->finish(c, g, first + r, sums + (r - b) * width);
    }
}

/* Few rows: the weights stream past them. Each thread has a share of the groups; the last ones go to whoever is done
 * first. Many rows: chunks of them, whose groups of columns are taken one by one. */
MP_SHARED mp_linear_blocks_run(const mp_linear_blocks *s, mp_run *run, const int t, const int T, const int64_t rows,
                               const void *weights, float *xt, float *sums, const void *c)
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
            mp_blocks_group(s, own, w, g, 0, rows, R, sums, c);
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
