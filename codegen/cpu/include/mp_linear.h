/* Products with packed weights on vectors: y = finish(norm(x) · wᵀ). A kernel's source has a constant mp_linear, which
 * holds sizes and functions, and one call of mp_linear_run. All functions here are inlined into it, so that sizes are
 * literals, calls are direct and sums stay in registers.
 *
 * Few rows: the weights stream past them at the speed of memory. Many rows: they pass the caches in blocks. Every
 * output is one sum over k in order: its bits depend neither on the number of threads nor on the other rows. */
#ifndef MP_LINEAR_H
#define MP_LINEAR_H

#include "mp_linear_row.h"

enum {
    MP_MOST_SUMS = 64,             /* vectors of sums of a block of few rows */
    MP_MOST_VECTORS = 16,          /* of a panel's columns */
    MP_MOST_SLICE = (32 << 10) / 4 /* floats of a slice of panels, see SLICE_BYTES in schedule_linear.py */
};

/* V vectors of one row of a panel, as floats. */
typedef void (*mp_load_row)(const void *from, mp_vec *wide, int V);
/* What MP_TILE_FUNCTION makes. */
typedef void (*mp_register_tile)(const float *x, const float *w, int64_t wp, int64_t K, float *out, int64_t op,
                                 int add);

typedef struct {
    int64_t K;                  /* depth: columns of x, rows of a panel */
    int panel, vectors;         /* columns of a panel, and the vectors they fill */
    int panels, groups;         /* panels that one epilogue finishes, and how many such groups there are */
    int row_bytes, floats;      /* bytes of one row of a panel; whether it is floats, which need no conversion */
    int few[3];                 /* rows that a pass over the weights serves when they are few, ascending; 0: no more */
    int line, near, far;        /* rows of a panel in a cache line; rows by which L1 and L2 prefetches run ahead */
    int tail;                   /* groups that are not assigned beforehand when rows are few */
    int block, abreast;         /* many rows: rows and panels of a register tile */
    int part;                   /* rows, or more, that a thread may have for itself */
    int chunk;                  /* rows that share a pass over the weights */
    int slice, strip;           /* k of a slice of panels, which stays in L1; k of a strip of x, which stays in L2 */
    int slots;                  /* groups whose sums wait between strips */
    mp_load_row load;
    mp_register_tile tile;
    mp_prologue x;
    mp_finish finish;
} mp_linear;

MP_TILE_FUNCTION(mp_tile_12x2x1, 12, 2, 1)
MP_TILE_FUNCTION(mp_tile_6x2x2, 6, 2, 2)
MP_TILE_FUNCTION(mp_tile_4x2x3, 4, 2, 3)
MP_TILE_FUNCTION(mp_tile_6x2x1, 6, 2, 1)
MP_TILE_FUNCTION(mp_tile_6x4x1, 6, 4, 1)
MP_TILE_FUNCTION(mp_tile_2x4x1, 2, 4, 1)
MP_TILE_FUNCTION(mp_tile_4x2x1, 4, 2, 1)
MP_TILE_FUNCTION(mp_tile_4x8x1, 4, 8, 1)

/* How many rows are few, and the smallest block that takes so many of them. */
MP_INLINE int mp_linear_most(const mp_linear *s) { return s->few[2] ? s->few[2] : s->few[1] ? s->few[1] : s->few[0]; }
MP_INLINE int mp_linear_block(const mp_linear *s, const int64_t rows)
{
    for (int i = 0; i < 2; ++i)
        if (rows <= s->few[i]) return s->few[i];
    return mp_linear_most(s);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
MP_INLINE void mp_linear_pack(const mp_linear *s, const void *c, const int64_t first, const int R, const int64_t rows,
                              float *xt)
{
    enum { SOME = 64 };
    const int64_t K = s->K;
    for (int r = 0; r < R; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < K; ++i) xt[i * R + r] = 0.0f;
            continue;
        }
        const mp_stats stats = mp_row_stats(&s->x, c, first + r, K);
        if (R == 1) {
            MP_SIMD
            for (int64_t i = 0; i < K; ++i) xt[i] = mp_row_value(&s->x, c, first + r, i, stats);
            continue;
        }
        for (int64_t i0 = 0; i0 < K; i0 += SOME) { /* values first, in vectors; then each to its place */
            float values[SOME];
            const int64_t end = mp_min(K, i0 + SOME);
            MP_SIMD
            for (int64_t i = i0; i < end; ++i) values[i - i0] = mp_row_value(&s->x, c, first + r, i, stats);
            for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
        }
    }
}

/* acc[r][v] += x[r] * w[v] for one row of a panel. */
MP_INLINE void mp_linear_step(const mp_linear *s, const float *x, const char *w, mp_vec *acc, const int R)
{
    mp_vec wide[MP_MOST_VECTORS];
    s->load(w, wide, s->vectors);
    MP_FULLY
    for (int r = 0; r < R; ++r)
        MP_FULLY
        for (int v = 0; v < s->vectors; ++v) acc[r * s->vectors + v] += mp_splat(x[r]) * wide[v];
}

/* The rows of a panel that lie in one cache line, from row i on; prefetches those that come later. */
MP_INLINE void mp_linear_line(const mp_linear *s, const float *xt, const char *w, const int64_t i, mp_vec *acc,
                              const int R)
{
    mp_prefetch_l2(w + (i + s->far) * s->row_bytes, s->line * s->row_bytes);
    mp_prefetch_l1(w + (i + s->near) * s->row_bytes, s->line * s->row_bytes);
    MP_FULLY
    for (int64_t n = i; n < i + s->line; ++n) mp_linear_step(s, xt + n * R, w + n * s->row_bytes, acc, R);
}

/* sums[R][width] = R rows, as xt[k][row], times a panel of w. The panel is prefetched twice: into L2 long before it
 * is read, into L1 shortly before. Past its end lies the panel that is read next. */
MP_INLINE void mp_linear_panel(const mp_linear *s, const float *xt, const char *w, float *sums, const int R)
{
    const int V = s->vectors, width = s->panels * s->panel;
    const int64_t lines = s->K / s->line * s->line;
    mp_vec acc[MP_MOST_SUMS];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    if (R == 1) {
        MP_FOUR
        for (int64_t i = 0; i < lines; i += s->line) mp_linear_line(s, xt, w, i, acc, R);
    } else {
        MP_TWICE
        for (int64_t i = 0; i < lines; i += s->line) mp_linear_line(s, xt, w, i, acc, R);
    }
    for (int64_t n = lines; n < s->K; ++n) mp_linear_step(s, xt + n * R, w + n * s->row_bytes, acc, R);
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i / V * width + i % V * MP_LANES, acc[i]);
}

/* A few rows, which lie in xs as a block of R. Each thread has a share of the groups; the last ones go to whoever is
 * done first, so that a core that was disturbed holds up nobody. */
MP_INLINE void mp_linear_few(const mp_linear *s, mp_run *run, const int t, const int T, const int64_t rows, const int R,
                             const char *w, const float *xs, float *sums, const void *c)
{
    const int width = s->panels * s->panel;
    const int64_t panel_bytes = s->K * s->row_bytes, assigned = T == 1 ? s->groups : s->groups - s->tail;
    int64_t g = mp_share(assigned, t, T), end = mp_share(assigned, t + 1, T);
    for (;; ++g) {
        if (g >= end) {
            g = assigned + mp_take(run);
            if (g >= s->groups) return;
        }
        for (int p = 0; p < s->panels; ++p) {
            const char *const panel = w + (g * s->panels + p) * panel_bytes;
            float *const to = sums + p * s->panel;
            if (!s->few[1] || R == s->few[0]) mp_linear_panel(s, xs, panel, to, s->few[0]);
            else if (!s->few[2] || R == s->few[1]) mp_linear_panel(s, xs, panel, to, s->few[1]);
            else mp_linear_panel(s, xs, panel, to, s->few[2]);
        }
        for (int64_t r = 0; r < rows; ++r) s->finish(c, g, r, sums + r * width);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
MP_INLINE void mp_linear_finish(const mp_linear *s, const float *blocks, const int64_t g, const int64_t first,
                                const int64_t rows, float *sums, const void *c)
{
    for (int64_t r = 0; r < rows; ++r) {
        for (int p = 0; p < s->panels; ++p)
            memcpy(sums + p * s->panel, blocks + (p * s->chunk + r) * s->panel, sizeof *sums * (size_t)s->panel);
        s->finish(c, g, first + r, sums);
    }
}

/* A slice of `abreast` panels, from row k on of panel number p: `deep` rows of each, for all blocks of a chunk. */
MP_INLINE void mp_linear_slice(const mp_linear *s, const char *w, const int64_t p, const int64_t k, const char *next,
                               const float *xs, const int64_t blocks, float *sums)
{
    const int64_t K = s->K, deep = mp_min(s->slice, K - k), panel_bytes = K * s->row_bytes;
    const int64_t lines = (deep * s->row_bytes / 64 + blocks - 1) / blocks;
    const char *const slice = w + p * panel_bytes + k * s->row_bytes;
    _Alignas(64) float loaded[MP_MOST_SLICE];
    if (!s->floats)
        for (int q = 0; q < s->abreast; ++q)
            for (int64_t i = 0; i < deep; ++i) {
                mp_vec row[MP_MOST_VECTORS];
                s->load(slice + q * panel_bytes + i * s->row_bytes, row, s->vectors);
                MP_FULLY
                for (int j = 0; j < s->vectors; ++j)
                    mp_vstore(loaded + (q * s->slice + i) * s->panel + j * MP_LANES, row[j]);
            }
    const float *const weights = s->floats ? (const float *)(const void *)slice : loaded;
    const int64_t apart = s->floats ? K * s->panel : s->slice * s->panel;
    for (int64_t b = 0; b < blocks; ++b) {
        float *const to = sums + b * s->block * s->panel;
        for (int64_t j = 0; j < lines; ++j, next += 64) /* the slice that comes next */
            MP_FULLY
            for (int q = 0; q < s->abreast; ++q) __builtin_prefetch(next + q * panel_bytes, 0, 2);
        MP_FULLY
        for (int q = 0; q < s->abreast; ++q) /* and the next sums */
            mp_prefetch_l1(to + (q * s->chunk + s->block) * s->panel, s->block * s->panel * (int64_t)sizeof *to);
        s->tile(xs + b * s->block * K + k * s->block, weights, apart, deep, to, s->chunk * s->panel, k > 0);
    }
}

/* Many rows: threads share them in parts and take the groups of their own part, up to `slots` at a time, before they
 * steal work from another one: what a thread makes of its rows lies in its own cache when the next product reads
 * them. A slice of a panel stays in L1 while a chunk of rows passes it in blocks; a strip of x, for the chunk, stays
 * in L2 while the panels of `slots` groups pass, whose sums wait in `partial`. */
MP_INLINE void mp_linear_many(const mp_linear *s, mp_run *run, const int T, const int64_t rows, const int parts,
                              const int own, const char *w, const float *xs, float *partial, float *sums,
                              const void *c)
{
    const int64_t K = s->K, all = (rows + s->block - 1) / s->block, groups = s->groups, blocks = s->chunk / s->block;
    const int64_t size = (int64_t)s->panels * s->chunk * s->panel;
    const int workers = T / parts;
    for (int part = own, stolen = 0; stolen < parts; part = (own + ++stolen) % parts) {
        const int64_t begin = mp_share(all, part, parts), end = mp_share(all, part + 1, parts);
        const int64_t pieces = (end - begin + blocks - 1) / blocks * groups;
        mp_await(run, part, workers);
        const int64_t least = T > 1 ? 1 : s->slots;
        for (mp_span piece; (piece = mp_some(run, part, workers, pieces, groups, least, s->slots)).count;)
        for (int64_t k0 = 0; k0 < K; k0 += s->strip)
        for (int64_t g0 = piece.first % groups, g = g0; g < g0 + piece.count; ++g) {
            const int64_t b0 = begin + piece.first / groups * blocks, count = mp_min(blocks, end - b0);
            const int64_t stop = mp_min(K, k0 + s->strip);
            float *const group = partial + (g - g0) * size;
            for (int p = 0; p < s->panels; p += s->abreast)
                for (int64_t k = k0; k < stop; k += s->slice) {
                    const int64_t number = g * s->panels + p, next = k + s->slice < stop;
                    const int64_t row = next ? number * K + k + s->slice : (number + s->abreast) * K + k0;
                    mp_linear_slice(s, w, number, k, w + row * s->row_bytes, xs + b0 * s->block * K, count,
                                    group + p * s->chunk * s->panel);
                }
            const int64_t filled = mp_min(count * s->block, rows - b0 * s->block);
            if (stop == K) mp_linear_finish(s, group, g, b0 * s->block, filled, sums, c);
        }
    }
}

/* The whole product. `xt` has room for all rows in blocks, and for a block of each thread; `partial` for the sums
 * that wait; `sums` for a block of few rows; c is the first argument of the kernel's functions. */
MP_INLINE void mp_linear_run(const mp_linear *s, mp_run *run, const int t, const int T, const int64_t rows,
                             const void *w, float *xt, float *partial, float *sums, const void *c)
{
    const int most = mp_linear_most(s), few = rows <= most;
    if (rows == 0) return; /* not even the first row may be written */
    /* Of few rows each thread packs its own block, which is cheaper than waiting for another. */
    const int R = few ? mp_linear_block(s, rows) : s->block;
    const int64_t all = (rows + s->block - 1) / s->block;
    const int parts = mp_parts(T, rows / s->part), own = t % parts, worker = t / parts, workers = T / parts;
    const int64_t from = mp_share(all, own, parts), count = mp_share(all, own + 1, parts) - from;
    const int64_t begin = few ? 0 : from + mp_share(count, worker, workers);
    const int64_t end = few ? 1 : from + mp_share(count, worker + 1, workers);
    float *const xs = few ? xt + (int64_t)t * s->K * most : xt;
    for (int64_t b = begin; b < end; ++b) mp_linear_pack(s, c, b * R, R, rows, xs + b * R * s->K);
    if (few) {
        mp_linear_few(s, run, t, T, rows, R, (const char *)w, xs, sums, c);
        return;
    }
    mp_prepared(run, own);
    const int64_t size = (int64_t)s->slots * s->panels * s->chunk * s->panel;
    mp_linear_many(s, run, T, rows, parts, own, (const char *)w, xs, partial + t * size, sums, c);
}

#endif
