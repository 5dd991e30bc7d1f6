/* Products with packed weights on vectors: y = finish(norm(x) · wᵀ). A kernel's source has a constant mp_linear, which
 * holds sizes and functions, and one call of mp_linear_run. All products of a plan share mp_linear_run and the loops over a
 * panel, so that the compiler sees each of them once. The loops have constant sizes and are made by MP_PANEL_FUNCTION and
 * MP_WIDEN_FUNCTION, at the head of a plan.
 *
 * Few rows: the weights stream past them at the speed of memory. Many rows: they pass the caches in blocks. Every
 * output is one sum over k in order: its bits depend neither on the number of threads nor on the other rows. (But where
 * there are tile units, many rows run on them: mp_linear_thirds.h.) */
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
/* How the rows of a panel lie in memory, and how far ahead they are prefetched into L1 and L2 where rows of x are few. */
typedef struct {
    mp_load_row load;
    int vectors, bytes;  /* of a row */
    int line, near, far; /* rows: in a cache line, and from what is read to what is prefetched; 0: nothing is */
} mp_panel_format;
/* What MP_TILE_FUNCTION, MP_PANEL_FUNCTION and MP_WIDEN_FUNCTION make. */
typedef void (*mp_register_tile)(const float *x, const float *w, int64_t wp, int64_t K, float *out, int64_t op,
                                 int add);
typedef void (*mp_panel)(const float *xt, const char *w, int64_t K, float *sums, int width);
typedef void (*mp_widen)(const char *w, int64_t count, float *to);

typedef struct {
    int64_t K;                  /* depth: columns of x, rows of a panel */
    int panel, row_bytes;       /* columns of a panel; bytes of one of its rows */
    int panels, groups;         /* panels that one epilogue finishes, and how many such groups there are */
    int few[3];                 /* rows that a pass over the weights serves when they are few, ascending; 0: no more */
    int tail;                   /* groups that are not assigned beforehand when rows are few */
    int block, abreast;         /* many rows: rows and panels of a register tile */
    int sizes[3];               /* rows of the last one, ascending up to `block` */
    int part;                   /* rows, or more, that a thread may have for itself */
    int chunk;                  /* rows that share a pass over the weights */
    int slice, strip;           /* k of a slice of panels, which stays in L1; k of a strip of x, which stays in L2 */
    int slots;                  /* groups whose sums wait between strips */
    int tiled_from;             /* rows from which on tile units multiply them; 0: never */
    mp_panel by_panel[3];       /* for each of `few` */
    mp_widen widen;             /* 0: panels are floats */
    mp_register_tile tile[3];   /* for each of `sizes` */
    mp_read_row row;
    mp_finish finish;
} mp_linear;

MP_TILE_FUNCTION(mp_tile_12x2x1, 12, 2, 1)
MP_TILE_FUNCTION(mp_tile_8x2x1, 8, 2, 1)
MP_TILE_FUNCTION(mp_tile_6x2x1, 6, 2, 1)
MP_TILE_FUNCTION(mp_tile_4x2x1, 4, 2, 1)
MP_TILE_FUNCTION(mp_tile_2x2x1, 2, 2, 1)
MP_TILE_FUNCTION(mp_tile_6x2x2, 6, 2, 2)
MP_TILE_FUNCTION(mp_tile_4x2x2, 4, 2, 2)
MP_TILE_FUNCTION(mp_tile_2x2x2, 2, 2, 2)
MP_TILE_FUNCTION(mp_tile_4x2x3, 4, 2, 3)
MP_TILE_FUNCTION(mp_tile_2x2x3, 2, 2, 3)
MP_TILE_FUNCTION(mp_tile_6x4x1, 6, 4, 1)
MP_TILE_FUNCTION(mp_tile_4x4x1, 4, 4, 1)
MP_TILE_FUNCTION(mp_tile_2x4x1, 2, 4, 1)
MP_TILE_FUNCTION(mp_tile_1x4x1, 1, 4, 1)
MP_TILE_FUNCTION(mp_tile_4x8x1, 4, 8, 1)
MP_TILE_FUNCTION(mp_tile_2x8x1, 2, 8, 1)

/* How many rows are few, and which block is the smallest that takes so many of them. */
MP_INLINE int mp_linear_most(const mp_linear *s) { return s->few[2] ? s->few[2] : s->few[1] ? s->few[1] : s->few[0]; }
MP_INLINE int mp_linear_size(const mp_linear *s, const int64_t rows) { return rows <= s->few[0] ? 0 : rows <= s->few[1] ? 1 : 2; }

/* The size of a block of many rows, if `rows` are left: its number in `sizes`. */
MP_INLINE int mp_linear_fit(const mp_linear *s, const int64_t rows) { return rows <= s->sizes[0] ? 0 : rows <= s->sizes[1] ? 1 : 2; }

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static inline void mp_linear_pack(const mp_linear *s, const void *c, const int64_t first, const int R,
                                  const int64_t rows, float *xt)
{
    const int64_t K = s->K;
    mp_stats stats;
    if (R == 1) {
        s->row(c, first, 0, K, &stats, xt);
        return;
    }
    for (int r = 0; r < R; ++r)
        for (int64_t i0 = 0; i0 < K; i0 += MP_SOME_COLUMNS) {
            float values[MP_SOME_COLUMNS];
            const int64_t end = mp_min(K, i0 + MP_SOME_COLUMNS);
            if (first + r < rows) s->row(c, first + r, i0, end, &stats, values);
            else memset(values, 0, sizeof values);
            MP_FOUR
            for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
        }
}

/* acc[r][v] += x[r] * w[v] for one row of a panel. */
MP_INLINE void mp_linear_step(const mp_panel_format *f, const float *x, const char *w, mp_vec *acc, const int R)
{
    mp_vec wide[MP_MOST_VECTORS];
    f->load(w, wide, f->vectors);
#if defined(MP_TILE_STEP_BY_PLACE)
    if (R >= MP_LANES && R < 2 * MP_LANES) { /* in the order of the text, as in register tiles */
        const mp_vec first = mp_vload_here(x), last = R > MP_LANES ? mp_vload_here(x + R - MP_LANES) : first;
        MP_FULLY
        for (int i = 0; i < R * f->vectors; ++i) {
            const int v = i / R, r = i % R, place = r < MP_LANES ? r : r - (R - MP_LANES);
            mp_vec *const sum = acc + r * f->vectors + v;
            *sum = mp_vadd_product(*sum, wide[v], r < MP_LANES ? first : last, place);
        }
        return;
    }
#endif
    MP_FULLY
    for (int r = 0; r < R; ++r)
        MP_FULLY
        for (int v = 0; v < f->vectors; ++v) acc[r * f->vectors + v] += mp_splat(x[r]) * wide[v];
}

/* The rows of a panel that lie in line `n`; prefetches those that come later. */
MP_INLINE void mp_linear_line(const mp_panel_format *f, const float *xt, const char *w, mp_vec *acc, const int R, const int n)
{
    if (f->far && n % MP_LINES_INTO_L2 == 0) mp_prefetch_l2(w + f->far * f->bytes, f->line * f->bytes);
    mp_prefetch_l1(w + f->near * f->bytes, f->line * f->bytes);
    MP_FULLY
    for (int i = 0; i < f->line; ++i) mp_linear_step(f, xt + i * R, w + i * f->bytes, acc, R);
}

/* How often the loop over a panel is unrolled. Neoverse-N1 cores are 8 % slower where prefetches lie close together. */
#if defined(__aarch64__)
#define MP_LINES_OF_ONE MP_ONCE
#define MP_LINES MP_ONCE
#else
#define MP_LINES_OF_ONE MP_FOUR
#define MP_LINES MP_TWICE
#endif

/* sums[R][width] = R rows, as xt[k][row], times a panel of w. The panel is prefetched twice: into L2 long before it
 * is read, into L1 shortly before. Past its end lies the panel that is read next. */
MP_INLINE void mp_linear_panel(const mp_panel_format *f, const float *xt, const char *w, const int64_t K, float *sums,
                               const int width, const int R)
{
    const int V = f->vectors;
    const int64_t lines = K / f->line * f->line;
    mp_vec acc[MP_MOST_SUMS];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    int64_t i = 0;
    if (R == 1) {
#if MP_LINES_INTO_L2 > 1
        for (const int64_t some = f->line * MP_LINES_INTO_L2; i + some <= lines; i += some)
            MP_FULLY
            for (int n = 0; n < MP_LINES_INTO_L2; ++n)
                mp_linear_line(f, xt + i + n * f->line, w + (i + n * f->line) * f->bytes, acc, R, n);
#endif
        MP_LINES_OF_ONE
        for (; i < lines; i += f->line) mp_linear_line(f, xt + i, w + i * f->bytes, acc, R, 0);
    } else {
        MP_LINES
        for (; i < lines; i += f->line) mp_linear_line(f, xt + i * R, w + i * f->bytes, acc, R, 0);
    }
    for (int64_t n = lines; n < K; ++n) mp_linear_step(f, xt + n * R, w + n * f->bytes, acc, R);
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i / V * width + i % V * MP_LANES, acc[i]);
}

/* mp_linear_panel for R rows and panels of a format, whose fields follow. */
#define MP_PANEL_FUNCTION(name, R, ...) \
    MP_SHARED name(const float *xt, const char *w, const int64_t K, float *sums, const int width) \
    { \
        const mp_panel_format f = {__VA_ARGS__}; \
        mp_linear_panel(&f, xt, w, K, sums, width, R); \
    }

/* `count` rows of a panel as floats. */
#define MP_WIDEN_FUNCTION(name, ...) \
    MP_SHARED name(const char *w, const int64_t count, float *to) \
    { \
        const mp_panel_format f = {__VA_ARGS__}; \
        for (int64_t i = 0; i < count; ++i) { \
            mp_vec row[MP_MOST_VECTORS]; \
            f.load(w + i * f.bytes, row, f.vectors); \
            MP_FULLY \
            for (int j = 0; j < f.vectors; ++j) mp_vstore(to + (i * f.vectors + j) * MP_LANES, row[j]); \
        } \
    }

/* A few rows, which lie in xs as a block of few[size]. Each thread has a share of the groups; the last ones go to whoever
 * is done first, so that a core that was disturbed holds up nobody. */
static inline void mp_linear_few(const mp_linear *s, mp_run *run, const int t, const int T, const int64_t rows,
                                 const int size, const char *w, const float *xs, float *sums, const void *c)
{
    const mp_panel by_panel = s->by_panel[size];
    const int panels = s->panels, panel = s->panel, width = panels * panel;
    const int64_t K = s->K, panel_bytes = K * s->row_bytes, assigned = T == 1 ? s->groups : s->groups - s->tail;
    int64_t g = mp_share(assigned, t, T), end = mp_share(assigned, t + 1, T);
    for (;; ++g) {
        if (g >= end) {
            g = assigned + mp_take(run);
            if (g >= s->groups) return;
        }
        for (int p = 0; p < panels; ++p) by_panel(xs, w + (g * panels + p) * panel_bytes, K, sums + p * panel, width);
        for (int64_t r = 0; r < rows; ++r) s->finish(c, g, r, sums + r * width);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static inline void mp_linear_finish(const mp_linear *s, const float *blocks, const int64_t g, const int64_t first,
                                    const int64_t rows, float *sums, const void *c)
{
    const int64_t panel = s->panel, panels = s->panels, apart = s->chunk * panel;
    const mp_finish finish = s->finish;
    for (int64_t r = 0; r < rows; ++r, blocks += panel) {
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t j = 0; j < panel; j += MP_LANES)
                mp_vstore(sums + p * panel + j, mp_vload_f32(blocks + p * apart + j));
        finish(c, g, first + r, sums);
    }
}

/* A slice of `abreast` panels, from row k on of panel number p: `deep` rows of each, for the blocks of so many rows. */
static inline void mp_linear_slice(const mp_linear *s, const char *w, const int64_t p, const int64_t k,
                                   const char *next, const float *xs, const int64_t rows, float *sums)
{
    const int64_t R = s->block, blocks = (rows + R - 1) / R;
    const int64_t K = s->K, deep = mp_min(s->slice, K - k), panel_bytes = K * s->row_bytes, panel = s->panel;
    const int64_t lines = (deep * s->row_bytes / 64 + blocks - 1) / blocks, sums_apart = s->chunk * panel;
    const int64_t block_bytes = R * panel * (int64_t)sizeof *sums;
    const int abreast = s->abreast;
    const char *const slice = w + p * panel_bytes + k * s->row_bytes;
    const float *weights = (const float *)(const void *)slice;
    int64_t apart = K * panel;
    _Alignas(64) float loaded[MP_MOST_SLICE];
    if (s->widen) {
        weights = loaded;
        apart = s->slice * panel;
        for (int q = 0; q < abreast; ++q) s->widen(slice + q * panel_bytes, deep, loaded + q * apart);
    }
    for (int64_t b = 0; b < blocks; ++b) {
        for (int q = 0; q < abreast; ++q) { /* the slice that comes next, and the next sums */
            const char *const then = (const char *)(sums + q * sums_apart) + block_bytes;
            for (int64_t j = 0; j < lines; ++j) __builtin_prefetch(next + q * panel_bytes + j * 64, 0, 2);
            for (int64_t j = 0; j < block_bytes; j += 64) __builtin_prefetch(then + j, 0, 3);
        }
        const int size = mp_linear_fit(s, rows - b * R);
        s->tile[size](xs + b * R * K + k * s->sizes[size], weights, apart, deep, sums, sums_apart, k > 0);
        next += lines * 64;
        sums += R * panel;
    }
}

/* Many rows: threads share them in parts and take the groups of their own part, up to `slots` at a time, before they
 * steal work from another one: what a thread makes of its rows lies in its own cache when the next product reads
 * them. A slice of a panel stays in L1 while a chunk of rows passes it in blocks; a strip of x, for the chunk, stays
 * in L2 while the panels of `slots` groups pass, whose sums wait in `partial`. */
static inline void mp_linear_many(const mp_linear *s, mp_run *run, const int T, const int64_t rows, const int parts,
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
            const int64_t filled = mp_min(count * s->block, rows - b0 * s->block);
            float *const group = partial + (g - g0) * size;
            for (int p = 0; p < s->panels; p += s->abreast)
                for (int64_t k = k0; k < stop; k += s->slice) {
                    const int64_t number = g * s->panels + p, next = k + s->slice < stop;
                    const int64_t row = next ? number * K + k + s->slice : (number + s->abreast) * K + k0;
                    mp_linear_slice(s, w, number, k, w + row * s->row_bytes, xs + b0 * s->block * K, filled,
                                    group + p * s->chunk * s->panel);
                }
            if (stop == K) mp_linear_finish(s, group, g, b0 * s->block, filled, sums, c);
        }
    }
}

#if defined(MP_TILES)
#include "mp_linear_thirds.h"
#endif

/* The whole product. `xt` has room for all rows in blocks, and for a block of each thread; `partial` for the sums
 * that wait; `sums` for a block of few rows; c is the first argument of the kernel's functions. */
MP_SHARED mp_linear_run(const mp_linear *s, mp_run *run, const int t, const int T, const int64_t rows, const void *w,
                        float *xt, float *partial, float *sums, const void *c)
{
    const int most = mp_linear_most(s);
    if (rows == 0) return; /* not even the first row may be written */
    if (rows <= most) { /* each thread packs its own block, which is cheaper than waiting for another */
        const int size = mp_linear_size(s, rows);
        float *const xs = xt + (int64_t)t * s->K * most;
        mp_linear_pack(s, c, 0, s->few[size], rows, xs);
        mp_linear_few(s, run, t, T, rows, size, (const char *)w, xs, sums, c);
        return;
    }
    const int64_t waiting = (int64_t)s->slots * s->panels * s->chunk * s->panel;
#if defined(MP_TILES)
    if (s->tiled_from && rows >= s->tiled_from) {
        mp_thirds_run(s, run, t, T, rows, (const char *)w, (mp_bf16 *)(void *)xt, partial + t * waiting, sums, c);
        return;
    }
#endif
    const int64_t R = s->block, all = (rows + R - 1) / R;
    const int parts = mp_parts(T, rows / s->part), own = t % parts, worker = t / parts, workers = T / parts;
    const int64_t from = mp_share(all, own, parts), count = mp_share(all, own + 1, parts) - from;
    const int64_t end = from + mp_share(count, worker + 1, workers);
    for (int64_t b = from + mp_share(count, worker, workers); b < end; ++b)
        mp_linear_pack(s, c, b * R, s->sizes[mp_linear_fit(s, rows - b * R)], rows, xt + b * R * s->K);
    mp_prepared(run, own);
    mp_linear_many(s, run, T, rows, parts, own, (const char *)w, xt, partial + t * waiting, sums, c);
}

#endif
