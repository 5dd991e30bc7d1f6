/* Products with weights in low-bit blocks: y = finish(norm(x) · wᵀ), by sums of integers.
 *
 * Rows of x become integers of 15 bits with a scale for each 32 of them (mp_blocks.h). A group of 32 k of a column is
 * then an exact sum of integers, times the scales of both sides: groups are added in order of k, whatever the number of
 * rows and threads, so that the bits of a result depend on neither. Where codes are floats, x stays in floats, and so do the
 * sums of a group. */
#ifndef MP_LINEAR_BLOCKS_H
#define MP_LINEAR_BLOCKS_H

#include "mp_blocks_pairs.h"
#include "mp_blocks_tiles.h"
#include "mp_linear_row.h"

/* sums[R][width] = R rows of `groups` groups times a panel. */
typedef void (*mp_block_panel)(const void *x, const char *panel, float *sums, int64_t groups, int64_t width, int64_t near,
                         int64_t far);

/* Many rows times 256 k of some columns: see MP_BLOCK_SLICE. */
typedef void (*mp_times_slice)(const char *units, int64_t panel_bytes, int groups, const char *x, int64_t apart, int64_t blocks,
                               float *sums, int64_t width);

/* Up to 8 groups of a panel as planes of tiles: see mp_blocks_expand. */
typedef void (*mp_expand)(const char *units, int groups, mp_words *high, mp_words *low, mp_vec *factor);

typedef struct mp_linear_blocks {
    int64_t K;             /* depth: columns of x */
    int panels, groups;    /* panels that one epilogue finishes, and how many such groups there are */
    int before;            /* groups of the columns before these, where formats are mixed */
    const struct mp_linear_blocks *more; /* the columns behind these, in another format; or 0 */
    int chunk;             /* rows that share a pass over the weights */
    int tail;              /* groups that are not assigned beforehand when rows are few */
    int near, far;         /* bytes by which L1 and L2 prefetches run ahead */
    int tiled_from;        /* rows from which on tile units are used; 0: never */
    int strip;             /* tile units: k of a chunk of x that stay in L2 */
    const mp_block_format *format;
    mp_block_panel one, four, many; /* for 1, 4 and MP_BLOCK_ROWS rows; fewer are padded */
    mp_times_slice slice;  /* for more rows than `many`; 0: they go by `many` */
    mp_expand expand;
    mp_read_row row;
    mp_finish finish;
} mp_linear_blocks;

MP_INLINE int64_t mp_blocks_groups(const mp_linear_blocks *s)
{
    const int64_t all = (s->K + MP_GROUP - 1) / MP_GROUP, unit = s->format->unit;
    return (all + unit - 1) / unit * unit;
}

/* Columns whose sums are kept for a row: an even number of panels, as a slice may have two. */
MP_INLINE int64_t mp_blocks_width(const mp_linear_blocks *s) { return (s->panels + 1) / 2 * 2 * MP_PANEL; }

/* Groups of all columns. */
MP_INLINE int64_t mp_blocks_all(const mp_linear_blocks *s) { return s->groups + (s->more ? s->more->groups : 0); }

/* Row `row` of x, normed, as every R-th of the groups `to`, in planes or in pairs. Zeros follow its end. */
static void mp_blocks_pack(const mp_linear_blocks *s, const void *c, const int64_t row, const int R, char *to, const int planes)
{
    const mp_block_format *const f = s->format;
    const int64_t groups = mp_blocks_groups(s);
    mp_stats stats;
    for (int64_t n = 0; n < groups;) {
        float values[MP_SOME_COLUMNS];
        const int64_t k0 = n * MP_GROUP, end = mp_max(k0, mp_min(s->K, k0 + MP_SOME_COLUMNS));
        if (k0 < end) s->row(c, row, k0, end, &stats, values);
        for (int64_t i = end - k0; i < MP_SOME_COLUMNS; ++i) values[i] = 0.0f;
        for (int i = 0; i < MP_SOME_COLUMNS / MP_GROUP && n < groups; ++i, ++n) {
            void *const group = to + n * R * f->x_bytes;
            if (f->kind == MP_FLOATS) mp_x_floats_make((mp_x_floats *)group, values + i * MP_GROUP);
            else mp_x_group_make((mp_x_group *)group, values + i * MP_GROUP, mp_blocks_zero(f), f->halves, f->offsets, f->zeros, planes);
        }
    }
}

/* Groups that a step of R rows takes. */
MP_INLINE int mp_blocks_abreast(const mp_block_format *f, const int R) { return R == 1 && !f->halves ? MP_GROUPS_OF_ROW : 1; }

/* acc[r] += the groups of x from g on that a step takes, of R rows, times the same groups of a vector of columns. */
MP_INLINE void mp_blocks_step(const mp_block_format *f, const mp_x_group *x, const char *unit, const int g, const int v,
                              mp_vec *acc, const int R, const mp_ahead ahead)
{
    const int parts = f->halves ? 2 : 1, begun = !f->offsets && !f->zeros && mp_blocks_zero(f) != 0;
    const int G = mp_blocks_abreast(f, R);
    mp_words codes[MP_GROUPS_OF_ROW * MP_QUADS];
    mp_vec scale[MP_GROUPS_OF_ROW][2], offset[MP_GROUPS_OF_ROW][2];
    if (!MP_DOTS_IN_ORDER) mp_blocks_prefetch(ahead);
    MP_BLOCK_UNROLL
    for (int n = 0; n < G; ++n) f->group(unit, g + n, v, codes + n * MP_QUADS, scale[n], offset[n]);
    MP_BLOCK_UNROLL
    for (int h = 0; h < parts; ++h) {
        mp_ints dots[MP_BLOCK_ROWS];
        mp_block_dots(codes, x, dots, G, R, h, parts, f->kind == MP_SIGNED, f->largest, begun, mp_ahead_part(ahead, h, parts));
        MP_BLOCK_UNROLL
        for (int i = 0; i < G * R; ++i)
            acc[i % R] = mp_block_add(f, x + i, h, scale[i / R][h], offset[i / R][h], dots[i], acc[i % R]);
    }
}

/* The same pointer. What is read through it is not known to be what was read before: x is loaded for each vector of columns,
 * which is cheaper than what the compiler does to keep all of it in registers. */
MP_INLINE const mp_x_group *mp_hidden(const mp_x_group *x)
{
#if MP_LANES > 1
    __asm__("" : "+r"(x));
#endif
    return x;
}

/* A unit, of R rows, times vector v of its columns: registers hold its codes and the sums of the rows, and what all groups of a
 * unit have in common is computed once. */
MP_INLINE void mp_blocks_unit(const mp_block_format *f, const mp_x_group *x, const char *unit, const int v, mp_vec *acc,
                              const int R, const int64_t near, const int64_t far)
{
    enum { V = MP_PANEL / MP_LANES };
    const int lines = (f->unit_bytes + 64 * V - 1) / (64 * V); /* that are prefetched for each vector of columns */
    const char *const ahead = unit + v * lines * 64;
    const mp_ahead all = {ahead + near, ahead + far, 0, lines};
    const int G = mp_blocks_abreast(f, R);
    const mp_x_group *const rows = mp_hidden(x);
    mp_vec own[MP_BLOCK_ROWS];
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) own[r] = acc[v * R + r];
    if (R == 1 || MP_BLOCK_ROWS > 4) {
        MP_BLOCK_UNROLL
        for (int g = 0; g < f->unit; g += G)
            mp_blocks_step(f, rows + g * R, unit, g, v, own, R, mp_ahead_part(all, g / G, f->unit / G));
    } else {
        mp_blocks_prefetch(all);
        MP_ONCE
        for (int g = 0; g < f->unit; ++g) mp_blocks_step(f, rows + g * R, unit, g, v, own, R, (mp_ahead){0, 0, 0, 0});
    }
    MP_BLOCK_UNROLL
    for (int r = 0; r < R; ++r) acc[v * R + r] = own[r];
}

/* Within a unit one vector of columns follows the other. */
MP_INLINE void mp_blocks_panel(const mp_block_format *f, const mp_x_group *x, const char *panel, float *sums,
                               const int64_t groups, const int R, const int64_t width, const int64_t near,
                               const int64_t far)
{
    enum { V = MP_PANEL / MP_LANES };
    mp_vec acc[MP_BLOCK_ROWS * V];
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    for (int64_t n = 0; n < groups; n += f->unit, panel += f->unit_bytes) {
        if (MP_DOTS_IN_ORDER && R == 1 && f->unit == 2) { /* sums stay in registers, where units are small */
            MP_BLOCK_UNROLL
            for (int v = 0; v < V; ++v) mp_blocks_unit(f, x + n, panel, v, acc, R, near, far);
        } else {
            MP_ONCE
            for (int v = 0; v < V; ++v) mp_blocks_unit(f, x + n * R, panel, v, acc, R, near, far);
        }
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i % R * width + i / R * MP_LANES, acc[i]);
}

/* The same for codes that are floats. One row of x takes some groups of a unit side by side, so that no sum waits for itself;
 * more rows have sums enough. */
#if defined(__aarch64__) && MP_LANES == 4
#define MP_X_OF(p) const mp_vec x_of = mp_vload_here(p)
#define MP_ADD_X(sum, w, i) mp_vadd_product(sum, w, x_of, i)
#else
#define MP_X_OF(p) const float *const x_of = (p)
#define MP_ADD_X(sum, w, i) mp_multiply_add(w, mp_splat(x_of[i]), sum)
#endif
MP_INLINE void mp_floats_step(const mp_block_format *f, const mp_x_floats *x, const char *panel, const int first, const int groups,
                              mp_vec *acc, const int R, const int64_t near, const int64_t far)
{
    enum { V = MP_PANEL / MP_LANES };
    const char *const codes = panel + f->unit_bytes - f->unit * MP_GROUP * MP_PANEL;
    mp_vec parts[MP_BLOCK_ROWS * V];
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * groups * V; ++i) parts[i] = mp_splat(0.0f);
    MP_ONCE
    for (int k = 0; k < MP_GROUP; k += 4) {
        MP_BLOCK_UNROLL
        for (int g = 0; g < groups; ++g) {
            const char *const rows = codes + ((first + g) * MP_GROUP + k) * MP_PANEL;
            __builtin_prefetch(rows + far, 0, 2);
            __builtin_prefetch(rows + near, 0, 3);
            mp_vec w[4][V];
            MP_BLOCK_UNROLL
            for (int i = 0; i < 4; ++i) mp_float8_row(rows + i * MP_PANEL, w[i]);
            MP_BLOCK_UNROLL
            for (int r = 0; r < R; ++r) {
                MP_X_OF(x[(first + g) * R + r].numbers + k);
                MP_BLOCK_UNROLL
                for (int j = 0; j < 4 * V; ++j) {
                    mp_vec *const sum = parts + (g * R + r) * V + j % V;
                    *sum = MP_ADD_X(*sum, w[j / V][j % V], j / V);
                }
            }
        }
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < groups * R * V; ++i) {
        const int g = first + i / (R * V), v = i % V;
        mp_words unused[MP_QUADS];
        mp_vec scale[2], offset[2];
        f->group(panel, g, v, unused, scale, offset);
        mp_vec *const sum = acc + i % (R * V);
        *sum = mp_multiply_add(scale[0], parts[i] * mp_splat(x[first * R + i / V].scale), *sum);
    }
}
MP_INLINE void mp_floats_panel(const mp_block_format *f, const mp_x_floats *x, const char *panel, float *sums, const int64_t groups,
                               const int R, const int64_t width, const int64_t near, const int64_t far)
{
    enum { V = MP_PANEL / MP_LANES };
    mp_vec acc[MP_BLOCK_ROWS * V];
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    for (int64_t n = 0; n < groups; n += f->unit, x += f->unit * R, panel += f->unit_bytes) {
        const int some = R == 1 && V < 4 ? 4 / V < f->unit ? 4 / V : f->unit : 1;
        MP_ONCE
        for (int g = 0; g < f->unit; g += some) mp_floats_step(f, x, panel, g, some, acc, R, near, far);
    }
    MP_BLOCK_UNROLL
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i / V * width + i % V * MP_LANES, acc[i]);
}

/* Functions by themselves: all products of a plan with weights of this format share them, and the compiler sees them
 * once. */
#define MP_BLOCK_PANEL(format, name, R) \
    MP_SHARED mp_panel_##format##_##name(const void *x, const char *panel, float *sums, const int64_t groups, \
                                         const int64_t width, const int64_t near, const int64_t far) \
    { \
        const mp_block_format *const f = &mp_block_##format; \
        if (f->kind == MP_FLOATS) mp_floats_panel(f, (const mp_x_floats *)x, panel, sums, groups, R, width, near, far); \
        else mp_blocks_panel(f, (const mp_x_group *)x, panel, sums, groups, R, width, near, far); \
    }
#define MP_BLOCK_FORMAT(format, ...) \
    static const mp_block_format mp_block_##format = {__VA_ARGS__, .group = mp_group_##format}; \
    MP_BLOCK_PANEL(format, one, 1) \
    MP_BLOCK_PANEL(format, four, 4) \
    MP_BLOCK_MANY(format) \
    MP_BLOCK_EXPAND(format)
#if MP_BLOCK_ROWS > 4
#define MP_BLOCK_MANY(format) MP_BLOCK_PANEL(format, many, MP_BLOCK_ROWS)
#define MP_PANEL_MANY(format) mp_panel_##format##_many
#else
#define MP_BLOCK_MANY(format)
#define MP_PANEL_MANY(format) mp_panel_##format##_four
#endif
#if defined(MP_TILE_BYTES)
#define MP_BLOCK_EXPAND(format) \
    MP_SHARED mp_expand_##format(const char *units, const int groups, mp_words *high, mp_words *low, mp_vec *factor) \
    { \
        const mp_block_format f = mp_block_##format; \
        mp_blocks_expand(units, groups, f.group, f.unit_bytes, f.unit, f.zero, f.zeros, f.kind, f.offsets, high, low, factor); \
    }
#define MP_EXPAND(format) mp_expand_##format
#else
#define MP_BLOCK_EXPAND(format)
#define MP_EXPAND(format) 0
#endif

/* Group g of the columns for rows [first, first + count), which lie in blocks of R. */
static void mp_blocks_group(const mp_linear_blocks *s, const char *x, const char *w, const int64_t g,
                            const int64_t first, const int64_t count, const int R, float *sums, const void *c)
{
    const int64_t groups = mp_blocks_groups(s), panel_bytes = groups / s->format->unit * s->format->unit_bytes;
    const int64_t width = s->panels * MP_PANEL;
    const mp_block_panel panel = R == 1 ? s->one : R == 4 ? s->four : s->many;
    for (int64_t b = 0; b < count; b += R) {
        for (int p = 0; p < s->panels; ++p)
            panel(x + b * groups * s->format->x_bytes, w + (g * s->panels + p) * panel_bytes, sums + p * MP_PANEL, groups, width, s->near, s->far);
        for (int64_t r = b; r < mp_min(count, b + R); ++r) s->finish(c, s->before + g, first + r, sums + (r - b) * width);
    }
}

#if defined(MP_TILE_BYTES)
/* Row r of block b of 16 rows of x, normed. Zeros follow its end. */
MP_INLINE void mp_blocks_pack_deep(const mp_linear_blocks *s, const void *c, const int64_t row, char *to, const int r)
{
    mp_stats stats;
    for (int64_t k0 = 0; k0 < s->K; k0 += MP_DEEP, to += MP_X_DEEP) {
        float values[MP_DEEP];
        const int64_t end = mp_min(s->K - k0, MP_DEEP);
        s->row(c, row, k0, k0 + end, &stats, values);
        for (int64_t i = end; i < MP_DEEP; ++i) values[i] = 0.0f;
        mp_x_deep_make(to, r, values);
    }
}

/* 16 rows of x times 256 k of two panels: sums of bytes that wait to be scaled and added to others. */
typedef struct {
    const int32_t *dots; /* [panel][high, low][row][column] */
    const float *scales; /* of the rows */
    float *to[2];        /* of each panel, rows `apart` from each other */
    int64_t apart[2];
    mp_vec factors[2];   /* of the columns of each panel */
} mp_tile_sums;

/* The i-th of 32 rows of two panels. */
MP_INLINE void mp_tile_sums_add(const mp_tile_sums *s, const int i)
{
    const int p = i / MP_PANEL, r = i % MP_PANEL;
    const int32_t *const dots = s->dots + 2 * p * MP_PANEL * MP_PANEL + r * MP_PANEL;
    float *const to = s->to[p] + r * s->apart[p];
    const mp_vec high = mp_ints_to_floats(*(const mp_ints *)dots);
    const mp_vec low = mp_ints_to_floats(*(const mp_ints *)(dots + MP_PANEL * MP_PANEL));
    const mp_vec made = (high * mp_splat(256.0f) + low) * s->factors[p];
    mp_vstore(to, made * mp_splat(s->scales[r]) + mp_vload_f32(to));
}

/* dots = 16 rows of x times the planes of two panels, [panel][plane]. The sums of the block before are added meanwhile: tile
 * instructions want others between them. */
MP_INLINE void mp_blocks_tile_step(const char *x, const mp_words *planes, int32_t *dots, const mp_tile_sums waiting)
{
    enum { TILE = MP_PANEL * MP_PANEL };
    const mp_words *const first = planes, *const second = planes + 2 * MP_PLANE / 64;
    mp_tile_fence();
    mp_zero_sums();
    MP_FULLY
    for (int step = 0; step < MP_DEEP_STEPS; ++step) {
        mp_tile_load_close(4, x + step * 2048, 64);
        mp_tile_load_close(6, first + step * 16, 64);
        mp_tile_sums_add(&waiting, step * 8);
        mp_tile_fence();
        mp_tile_dot_bytes(0, 4, 6);
        mp_tile_load_close(7, first + MP_PLANE / 64 + step * 16, 64);
        mp_tile_sums_add(&waiting, step * 8 + 1);
        mp_tile_sums_add(&waiting, step * 8 + 2);
        mp_tile_fence();
        mp_tile_dot_bytes(1, 4, 7);
        mp_tile_load_close(7, second + step * 16, 64);
        mp_tile_sums_add(&waiting, step * 8 + 3);
        mp_tile_fence();
        mp_tile_dot_bytes(2, 4, 7);
        mp_tile_load_close(5, x + step * 2048 + 1024, 64);
        mp_tile_sums_add(&waiting, step * 8 + 4);
        mp_tile_fence();
        mp_tile_dot_bytes(1, 5, 6);
        mp_tile_load_close(6, second + MP_PLANE / 64 + step * 16, 64);
        mp_tile_sums_add(&waiting, step * 8 + 5);
        mp_tile_sums_add(&waiting, step * 8 + 6);
        mp_tile_fence();
        mp_tile_dot_bytes(3, 4, 6);
        mp_tile_sums_add(&waiting, step * 8 + 7);
        mp_tile_fence();
        mp_tile_dot_bytes(3, 5, 7);
    }
    mp_tile_store(0, dots + 0 * TILE, 64);
    mp_tile_store(1, dots + 1 * TILE, 64);
    mp_tile_store(2, dots + 2 * TILE, 64);
    mp_tile_store(3, dots + 3 * TILE, 64);
    mp_tile_fence();
}

/* Group g of the columns for `count` rows from row `first` on, which begin with a block of 16. Within a strip of k, which
 * stays in L2 of the rows, two panels at a time: 256 k of theirs, expanded, stay in L1 while the rows pass. Sums wait in
 * `partial`. */
static void mp_blocks_tile_group(const mp_linear_blocks *s, const char *x, const char *w, const int64_t g,
                                 const int64_t first, const int64_t count, float *partial, const void *c)
{
    const mp_block_format *const f = s->format;
    const int64_t groups = mp_blocks_groups(s), panel_bytes = groups / f->unit * f->unit_bytes;
    const int64_t deep_bytes = MP_DEEP_GROUPS / f->unit * f->unit_bytes, deeps = (s->K + MP_DEEP - 1) / MP_DEEP;
    const int64_t width = s->panels * MP_PANEL, blocks = (count + 15) / 16, strip = s->strip / MP_DEEP;
    _Alignas(64) mp_words planes[2][2][MP_PLANE / 64];
    mp_vec factors[2] = {mp_splat(0.0f), mp_splat(0.0f)};
    _Alignas(64) int32_t dots[2][4 * MP_PANEL * MP_PANEL] = {{0}};
    _Alignas(64) float nobody[MP_PANEL]; /* gets what is not wanted: there is no second panel, or nothing waits */
    for (int i = 0; i < MP_PANEL; ++i) nobody[i] = 0.0f;
    for (int64_t i = 0; i < blocks * 16 * width; ++i) partial[i] = 0.0f;
    mp_tiles_begin();
    for (int64_t d0 = 0; d0 < deeps; d0 += strip)
        for (int p = 0; p < s->panels; p += 2)
            for (int64_t d = d0; d < mp_min(deeps, d0 + strip); ++d) {
                const int panels = (int)mp_min(2, s->panels - p);
                const char *const units = w + (g * s->panels + p) * panel_bytes + d * deep_bytes;
                for (int q = 0; q < panels; ++q)
                    s->expand(units + q * panel_bytes, (int)mp_min(MP_DEEP_GROUPS, groups - d * MP_DEEP_GROUPS),
                              planes[q][0], planes[q][1], factors + q);
                mp_tile_sums waiting = {dots[1], nobody, {nobody, nobody}, {0, 0}, {factors[0], factors[1]}};
                for (int64_t b = 0; b < blocks; ++b) {
                    const char *const from = x + (b * deeps + d) * MP_X_DEEP;
                    float *const to = partial + b * 16 * width + p * MP_PANEL;
                    mp_blocks_tile_step(from, planes[0][0], dots[b % 2], waiting);
                    waiting.dots = dots[b % 2];
                    waiting.scales = (const float *)(const void *)(from + 2 * MP_PLANE);
                    waiting.to[0] = to;
                    waiting.apart[0] = width;
                    waiting.to[1] = panels > 1 ? to + MP_PANEL : nobody;
                    waiting.apart[1] = panels > 1 ? width : 0;
                }
                for (int i = 0; i < 2 * MP_PANEL; ++i) mp_tile_sums_add(&waiting, i);
            }
    mp_tiles_end();
    for (int64_t r = 0; r < count; ++r) s->finish(c, s->before + g, first + r, partial + r * width);
}

/* Many rows: all threads make planes of them, then take groups of columns and chunks of rows one by one. */
static void mp_blocks_tiles(const mp_linear_blocks *s, mp_run *run, const int t, const int T, const int64_t rows,
                            const char *w, const char *more, char *x, float *partial, const void *c)
{
    const int64_t deeps = (s->K + MP_DEEP - 1) / MP_DEEP, padded = (rows + 15) / 16 * 16;
    int64_t chunk = s->chunk; /* enough pieces for all threads */
    const int64_t groups = mp_blocks_all(s);
    while (chunk > 128 && (rows + chunk - 1) / chunk * groups < 4 * T) chunk /= 2;
    const int64_t pieces = (rows + chunk - 1) / chunk * groups;
    for (int64_t r = mp_share(padded, t, T); r < mp_share(padded, t + 1, T); ++r)
        /* Rows behind the last one repeat it: nobody reads their sums. */
        mp_blocks_pack_deep(s, c, mp_min(r, rows - 1), x + r / 16 * deeps * MP_X_DEEP, (int)(r % 16));
    mp_barrier(run, T);
    for (int64_t piece; (piece = mp_take(run)) < pieces;) {
        const int64_t first = piece / groups * chunk, count = mp_min(chunk, rows - first), g = piece % groups;
        const char *const from = x + first / 16 * deeps * MP_X_DEEP;
        if (g < s->groups) mp_blocks_tile_group(s, from, w, g, first, count, partial, c);
        else mp_blocks_tile_group(s->more, from, more, g - s->groups, first, count, partial, c);
    }
}
#endif

/* Rows of x for s and for the columns in another format behind it. */
typedef struct {
    const char *first, *more;
} mp_packed_rows;

/* Packs all rows in blocks of R, by all threads. */
MP_INLINE mp_packed_rows mp_blocks_pack_all(const mp_linear_blocks *s, mp_run *run, const int t, const int T, const int64_t rows,
                                            const int R, char *x, const void *c, const int planes)
{
    const int64_t blocks = (rows + R - 1) / R, each = s->format->x_bytes, row = mp_blocks_groups(s) * each;
    const int64_t more_each = s->more ? s->more->format->x_bytes : 0, more_row = s->more ? mp_blocks_groups(s->more) * more_each : 0;
    char *const other = x + blocks * R * row;
    for (int64_t b = mp_share(blocks, t, T); b < mp_share(blocks, t + 1, T); ++b)
        for (int r = 0; r < R; ++r) {
            /* Rows behind the last one repeat it: nobody reads their sums. */
            const int64_t number = mp_min(b * R + r, rows - 1);
            mp_blocks_pack(s, c, number, R, x + b * R * row + r * each, planes);
            if (s->more) mp_blocks_pack(s->more, c, number, R, other + b * R * more_row + r * more_each, planes);
        }
    mp_barrier(run, T);
    return (mp_packed_rows){x, other};
}

#if MP_PAIR_ROWS
/* Group g of the columns for `count` rows from row `first` on, which begin with a block: one slice of k, up to 256 of
 * them, after the other for all columns, so that these k of the rows stay in L2. */
static void mp_blocks_slice_group(const mp_linear_blocks *s, const char *x, const char *w, const int64_t g, const int64_t first,
                                  const int64_t count, float *partial, const void *c)
{
    enum { PANELS = MP_SLICE_VECTORS * MP_LANES / MP_PANEL };
    const mp_block_format *const f = s->format;
    const int64_t groups = mp_blocks_groups(s), panel_bytes = groups / f->unit * f->unit_bytes;
    const int64_t blocks = (count + MP_PAIR_ROWS - 1) / MP_PAIR_ROWS, width = mp_blocks_width(s);
    const int64_t slices = (groups + MP_SLICE_GROUPS - 1) / MP_SLICE_GROUPS; /* nearly equal ones */
    const int64_t each = (groups / f->unit + slices - 1) / slices * f->unit;
    for (int64_t i = 0; i < blocks * MP_PAIR_ROWS * width; ++i) partial[i] = 0.0f;
    for (int64_t n = 0; n < groups; n += each)
        for (int p = 0; p < s->panels; p += PANELS)
            s->slice(w + (g * s->panels + p) * panel_bytes + n / f->unit * f->unit_bytes, p + PANELS > s->panels ? 0 : panel_bytes,
                     (int)mp_min(each, groups - n), x + n * MP_PAIR_ROWS * f->x_bytes, groups * MP_PAIR_ROWS * f->x_bytes, blocks,
                     partial + p * MP_PANEL, width);
    for (int64_t r = 0; r < count; ++r) s->finish(c, s->before + g, first + r, partial + r * width);
}

/* Many rows: all threads make pairs of them, then take groups of columns and chunks of rows one by one. */
static void mp_blocks_slices(const mp_linear_blocks *s, mp_run *run, const int t, const int T, const int64_t rows, const char *w,
                             const char *more, char *xt, float *partial, const void *c)
{
    const mp_packed_rows x = mp_blocks_pack_all(s, run, t, T, rows, MP_PAIR_ROWS, xt, c, 0);
    const int64_t row = mp_blocks_groups(s) * s->format->x_bytes;
    const int64_t more_row = s->more ? mp_blocks_groups(s->more) * s->more->format->x_bytes : 0;
    const int64_t all = mp_blocks_all(s), least = 8 * MP_PAIR_ROWS;
    const int64_t most = s->chunk / MP_PAIR_ROWS * MP_PAIR_ROWS; /* rows whose sums there is room for */
    int64_t chunks = (rows + most - 1) / most; /* equal ones, and enough pieces for all threads */
    while (T > 1 && chunks * all < 4 * T && rows / (2 * chunks) >= least) chunks *= 2;
    const int64_t chunk = ((rows + chunks - 1) / chunks + MP_PAIR_ROWS - 1) / MP_PAIR_ROWS * MP_PAIR_ROWS;
    const int64_t pieces = (rows + chunk - 1) / chunk * all;
    for (int64_t piece; (piece = mp_take(run)) < pieces;) {
        const int64_t first = piece / all * chunk, count = mp_min(chunk, rows - first), g = piece % all;
        if (g < s->groups) mp_blocks_slice_group(s, x.first + first * row, w, g, first, count, partial, c);
        else mp_blocks_slice_group(s->more, x.more + first * more_row, more, g - s->groups, first, count, partial, c);
    }
}
#endif

/* Few rows: the weights stream past them. Each thread has a share of the groups; the last ones go to whoever is done
 * first. Many rows, by tile units, slices or blocks of rows: chunks of them, whose groups of columns are taken one by one.
 * `more_weights` are those of s->more. */
MP_SHARED mp_linear_blocks_run(const mp_linear_blocks *s, mp_run *run, const int t, const int T, const int64_t rows,
                               const void *weights, const void *more_weights, float *xt, float *partial, float *sums,
                               const void *c)
{
    const char *const w = (const char *)weights, *const more = (const char *)more_weights;
    const int64_t all = mp_blocks_all(s), each = s->format->x_bytes, row = mp_blocks_groups(s) * each; /* bytes of x */
    const int64_t more_each = s->more ? s->more->format->x_bytes : 0, more_row = s->more ? mp_blocks_groups(s->more) * more_each : 0;
    if (rows == 0) return;
#if defined(MP_TILE_BYTES)
    if (s->tiled_from && rows >= s->tiled_from) {
        mp_blocks_tiles(s, run, t, T, rows, w, more, (char *)xt, partial + t * s->chunk * mp_blocks_width(s), c);
        return;
    }
#else
    (void)partial;
#endif
    if (rows <= MP_BLOCK_ROWS) {
        /* Each thread packs the rows for itself, which is cheaper than waiting for another. */
        const int R = rows == 1 ? 1 : rows <= 4 ? 4 : MP_BLOCK_ROWS;
        char *const own = (char *)xt + t * (row + more_row) * MP_BLOCK_ROWS, *const other = own + row * MP_BLOCK_ROWS;
        for (int r = 0; r < R; ++r) mp_blocks_pack(s, c, mp_min(r, rows - 1), R, own + r * each, mp_blocks_planes(s->format, R));
        for (int r = 0; s->more && r < R; ++r) 
            mp_blocks_pack(s->more, c, mp_min(r, rows - 1), R, other + r * more_each, mp_blocks_planes(s->more->format, R));
        const int64_t assigned = T == 1 ? all : all - s->tail;
        int64_t g = mp_share(assigned, t, T), end = mp_share(assigned, t + 1, T);
        for (;; ++g) {
            if (g >= end && (g = assigned + mp_take(run)) >= all) return;
            if (g < s->groups) mp_blocks_group(s, own, w, g, 0, rows, R, sums, c);
            else mp_blocks_group(s->more, other, more, g - s->groups, 0, rows, R, sums, c);
        }
    }
#if MP_PAIR_ROWS
    if (s->slice && (!s->more || s->more->slice)) {
        mp_blocks_slices(s, run, t, T, rows, w, more, (char *)xt, partial + t * s->chunk * mp_blocks_width(s), c);
        return;
    }
#endif
    const mp_packed_rows x = mp_blocks_pack_all(s, run, t, T, rows, MP_BLOCK_ROWS, (char *)xt, c, mp_blocks_planes(s->format, MP_BLOCK_ROWS));
    const int64_t chunks = (rows + s->chunk - 1) / s->chunk, pieces = chunks * all;
    for (int64_t piece; (piece = mp_take(run)) < pieces;) {
        const int64_t first = piece / all * s->chunk, count = mp_min(s->chunk, rows - first), g = piece % all;
        if (g < s->groups) mp_blocks_group(s, x.first + first * row, w, g, first, count, MP_BLOCK_ROWS, sums, c);
        else mp_blocks_group(s->more, x.more + first * more_row, more, g - s->groups, first, count, MP_BLOCK_ROWS, sums, c);
    }
}

#endif
