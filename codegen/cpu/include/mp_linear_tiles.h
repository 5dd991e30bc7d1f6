/* Products with packed weights on bf16 tile units: y = finish(norm(x) · wᵀ). A kernel's source has a constant
 * mp_linear_tiles, which holds sizes and functions, and one call of mp_linear_tiles_run. All functions here are inlined
 * into it, so that conditions on sizes vanish and calls are direct.
 *
 * Few rows lose nothing of x: see mp_tile_rows.h. Many rows are rounded to bf16 and run as 32 x 32 sums at a time,
 * whose epilogue runs between the tile steps of a later block (of heads, which are several panels: of the next
 * head). Bits of a row depend not on threads, but on the number of rows, which decides how they run, and on its
 * place among them: every second block of 32 rows adds its products up from behind. */
#ifndef MP_LINEAR_TILES_H
#define MP_LINEAR_TILES_H

#include "mp_exp.h"
#include "mp_linear_row.h"
#include "mp_tile_rows.h"

enum { MP_TILE_SLICE = 768 }; /* most k of a slice, see TILE_SLICE in schedule_linear.py */

/* Sums of a few panels that wait for their epilogue: rows of the blocks of a part, from its block i0 on. */
typedef struct {
    const float *sums;
    int64_t g, i0, row, rows;
    int part, parts;
} mp_waiting;

/* Sums of one panel and a block of rows that wait: rows [row, rows) of those that begin at row `first`. */
typedef struct {
    float *sums;
    int64_t g, first, row, rows;
} mp_waiting_block;

typedef struct {
    int64_t K;               /* depth: a multiple of 32 */
    int panels, groups, tail; /* few rows: panels of a group, groups, and how many are not assigned beforehand */
    int near, far;           /* bytes by which L1 and L2 prefetches run ahead when rows are few */
    int unit, units;         /* panels whose sums are finished together, and how many such units there are */
    int part;                /* rows, or more, that a thread may have for itself */
    int blocks;              /* of 32 rows that share a pass over the weights: a chunk */
    int slice, strip;        /* k of a decoded slice of a panel, which stays in L1; k of a chunk of x, in L2 */
    int slots;               /* panels whose sums wait */
    int piece, least;        /* units that a thread takes at a time, and in the end */
    int every;               /* tile steps after which some of the rows that wait are finished */
    int64_t sums;            /* floats of each thread in `partial` */
    int double_buffered;     /* heads of whole strips: half of the slots is at work while the other half is finished */
    int tiled_from;          /* rows from which on x comes as tiles, see codegen/moves.py; 0: never */
    mp_prologue x;
    mp_finish few;           /* a unit of one of a few rows */
    /* Units of one panel: rows [from, to) of the block of 32 that begins at row `block`. */
    void (*rows)(const void *c, int64_t g, int64_t block, int64_t from, int64_t to, float *sums);
    void (*next)(const void *c, mp_waiting *w, int64_t rows); /* the next rows that wait, of a unit of several panels */
    void (*prefetch)(const void *c, int64_t p, int64_t row);  /* what the epilogue reads for this panel and row; or 0 */
} mp_linear_tiles;

/* How a block of rows goes through k: 1 upwards, -1 downwards. Its number decides, not who works on it: the order in
 * which products are added up is the same for any number of threads. */
MP_INLINE int mp_way(const int64_t block) { return block % 2 ? -1 : 1; }

/* The order in which slices are read: within a strip of k, by the panels [p0, p1) of a piece, by strips; then the
 * next piece, which begins with panel p1 or with the first of all. */
typedef struct {
    int64_t p0, p1, panels, slice, strip, K;
} mp_order;
typedef struct {
    int64_t p, k;
} mp_slice_at;

MP_INLINE mp_slice_at mp_after(const mp_slice_at at, const mp_order o)
{
    const int64_t first = at.k / o.strip * o.strip, end = first + o.strip;
    if (at.k + o.slice < (end < o.K ? end : o.K)) return (mp_slice_at){at.p, at.k + o.slice};
    if (at.p + 1 < o.p1) return (mp_slice_at){at.p + 1, first};
    if (end < o.K) return (mp_slice_at){o.p0, end};
    return (mp_slice_at){o.p1 < o.panels ? o.p1 : 0, 0};
}

/* 32 values of a row of x, normed, from column i0 on. */
MP_INLINE void mp_row_values(const mp_prologue *x, const void *c, const int64_t row, const int64_t i0,
                             const mp_stats stats, float *to)
{
    MP_SIMD
    for (int j = 0; j < 32; ++j) to[j] = mp_row_value(x, c, row, i0 + j, stats);
}

/* Rows [0, R) of x, normed, in parts: xs[k / 32][four rows][part][row][32]; rows past the end are 0. */
MP_INLINE void mp_linear_thirds(const mp_linear_tiles *s, const void *c, const int R, const int64_t rows, mp_bf16 *xs)
{
    for (int r = 0; r < R; ++r) {
        mp_bf16 *const to = xs + r / 4 * 12 * 32 + r % 4 * 32;
        const int64_t apart = mp_min(R, 4) * 32;
        if (r >= rows) {
            for (int64_t i = 0; i < s->K; i += 32)
                for (int part = 0; part < 3; ++part) memset(to + i * 3 * R + part * apart, 0, 64);
            continue;
        }
        const mp_stats stats = mp_row_stats(&s->x, c, r, s->K);
        for (int64_t i = 0; i < s->K; i += 32) {
            float values[32];
            mp_row_values(&s->x, c, r, i, stats, values);
            mp_thirds(to + i * 3 * R, values, apart);
        }
    }
}

/* Rows [first, first + 32) of x, normed, as bf16 tiles [k / 32][row][32]; rows past the end are 0. */
MP_INLINE void mp_linear_tile_block(const mp_linear_tiles *s, const void *c, const int64_t first, const int64_t rows,
                                    mp_bf16 *tiles)
{
    for (int r = 0; r < 32; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < s->K; i += 32) memset(tiles + i * 32 + r * 32, 0, 64);
            continue;
        }
        const mp_stats stats = mp_row_stats(&s->x, c, first + r, s->K);
        for (int64_t i = 0; i < s->K; i += 32) {
            float values[32];
            mp_row_values(&s->x, c, first + r, i, stats, values);
            mp_tile_round(tiles + i * 32 + r * 32, values, 32);
        }
    }
}

/* A few rows, up to 8. Each thread has a share of the groups; the last ones go to whoever is done first, so that a
 * core that was disturbed holds up nobody. */
MP_INLINE void mp_linear_tiles_few(const mp_linear_tiles *s, mp_run *run, const int t, const int T, const int64_t rows,
                                   const mp_bf16 *w, mp_bf16 *xt, float *sums, const void *c)
{
    const int R = rows <= 1 ? 1 : rows <= 4 ? 4 : 8, width = s->panels * 32;
    const int64_t assigned = T == 1 ? s->groups : s->groups - s->tail;
    mp_bf16 *const xs = xt + (int64_t)t * s->K * 3 * 8;
    mp_linear_thirds(s, c, R, rows, xs); /* each thread its own, which is cheaper than waiting for another */
    mp_tiles_shape(3 * (int)mp_min(R, 4), 64);
    int64_t g = mp_share(assigned, t, T);
    for (const int64_t end = mp_share(assigned, t + 1, T);; ++g) {
        if (g >= end) g = assigned + mp_take(run);
        if (g >= s->groups) break;
        for (int p = 0; p < s->panels; ++p) {
            const mp_coded panel = mp_coded_panel(w, g * s->panels + p, s->K);
            mp_rows_by_panel(sums + p * 32, width, xs, panel, s->K, R, s->far, s->near);
        }
        const int64_t first = g * s->panels / s->unit, last = mp_min(s->units, (g + 1) * s->panels / s->unit);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t u = first; u < last; ++u) s->few(c, u, r, sums + r * width + (u - first) * s->unit * 32);
    }
    mp_tiles_end();
}

/* The next `some` rows of sums that wait, which lie as [panel][block][32 rows][32]; `line` has room for a row. */
MP_INLINE void mp_finish_next(mp_finish finish, const void *c, mp_waiting *w, const int64_t rows, const int unit,
                              const int blocks, const int some, float *line)
{
    const int64_t first = mp_block_of(w->i0 + w->row / 32, w->part, w->parts) * 32;
    const int64_t end = mp_min(w->row % 32 + some, rows - first);
    const float *const sums = w->sums + w->row / 32 * 1024;
    for (int64_t r = w->row % 32; r < end; ++r) {
        MP_FULLY
        for (int p = 0; p < unit; ++p) memcpy(line + p * 32, sums + p * blocks * 1024 + r * 32, 128);
        finish(c, w->g, first + r, line);
    }
    w->row += some;
}

/* Many rows: threads share them in parts, to which blocks of 32 are distributed block-cyclically, back and forth.
 * They take the panels of their own part, up to `piece` units at a time, before they steal work from another one:
 * what a thread makes of its rows lies in its own cache when the next product reads them. A slice of a panel,
 * decoded, stays in L1 while a chunk of rows passes it in blocks; a strip of x, for the chunk, stays in L2 while the
 * panels of a piece pass, whose sums wait in `partial`. */
MP_INLINE void mp_linear_tiles_many(const mp_linear_tiles *s, mp_run *run, const int T, const int64_t rows,
                                    const int parts, const int own, const int ready, const mp_bf16 *w,
                                    const mp_bf16 *xs, float *partial, const void *c)
{
    const int64_t K = s->K, SLICE = s->slice, STRIP = s->strip, UNIT = s->unit, UNITS = s->units, BLOCKS = s->blocks;
    const int64_t at_once = (1024 + SLICE - 1) / SLICE; /* rows for each step of a slice, so that it serves all 32 */
    const int turning = SLICE < STRIP;                  /* see below */
    const int64_t all = (rows + 31) / 32;
    const int workers = T / parts;
    float *const final = partial, *const sums = UNIT > 1 ? partial : partial + 2 * 1024;
    /* Of one panel sums are finished two blocks later, when they surely lie in the cache: who waits for them holds
     * up the tile units. Of several panels those of whole units are finished between the tile steps of the next
     * ones. */
    mp_waiting waiting = {0};
    mp_waiting_block done = {0}, fresh = {0};
    int64_t tick = 0, turn = 0, slot = 0;
    _Alignas(64) mp_bf16 slice[MP_TILE_SLICE * 32];
    mp_tiles_begin();
    for (int part = own, stolen = 0; stolen < parts; part = (own + ++stolen) % parts) {
        const int64_t blocks = mp_block_count(all, part, parts), units = (blocks + BLOCKS - 1) / BLOCKS * UNITS;
        const int64_t least = T > 1 ? s->least : s->piece;
        if (!ready) mp_await(run, part, workers);
        for (mp_span piece; (piece = mp_some(run, part, workers, units, UNITS, least, s->piece)).count;
             slot = s->double_buffered ? s->slots - s->piece * UNIT - slot : 0)
        for (int64_t k0 = 0, p0 = piece.first % UNITS * UNIT, p1 = p0 + piece.count * UNIT; k0 < K; k0 += STRIP)
        for (int64_t p = p0; p < p1; ++p)
        for (int64_t k1 = k0, k2 = mp_min(K, k0 + STRIP); k1 < k2; k1 += SLICE) {
            const int64_t i0 = piece.first / UNITS * BLOCKS, count = mp_min(BLOCKS, blocks - i0);
            const int64_t steps = mp_min(SLICE, K - k1) / 32;
            const int ends = k1 + SLICE >= K;
            /* Every second slice goes back through the rows: the sums of the block at which it turns stay in the
             * tiles. */
            const int back = turning && (k1 - k0) / SLICE % 2;
            const int turned = turning && k1 > k0, turns = turning && k1 + SLICE < k2;
            if (UNIT > 1 && STRIP < K && k1 == 0 && p == p0) /* a new piece: the slots are needed */
                while (waiting.row < waiting.rows) s->next(c, &waiting, rows);
            /* Blocks go through the slice in turns, those of even number upwards and those of odd number downwards:
             * a block begins with the tiles at which the one before ended, and finds in L1 what that one read last.
             * The first block decodes the slice, all others find it. The next slice is prefetched meanwhile, in the
             * order of its first block. */
            const int first_way = mp_way(mp_block_of(i0 + (back ? count - 1 : 0), part, parts));
            mp_slice coming = mp_begin_slice(slice, w, p, k1, K, steps, first_way);
            const mp_slice_at next = mp_after((mp_slice_at){p, k1}, (mp_order){p0, p1, UNITS * UNIT, SLICE, STRIP, K});
            const int next_way = mp_way(mp_block_of(i0 + (turns && !back ? count - 1 : 0), part, parts));
            const uint8_t *ahead = mp_prefetch_from(w, next.p, next.k, K, mp_min(SLICE, K - next.k) / 32, next_way);
            mp_prefetch_head(w, next.p, K);
            const int64_t requests = (8 + count - 1) / count, more = (32 + p1 - p0 - 1) / (p1 - p0);
            float *const slots = sums + (s->double_buffered ? slot + p - p0 : STRIP < K ? p - p0 : 0) * BLOCKS * 1024;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t here = back ? count - 1 - i : i;
                const int64_t then = i + 1 == count ? here : back ? here - 1 : here + 1;
                const int64_t block = mp_block_of(i0 + here, part, parts);
                const int64_t way = mp_way(block) * 1024, begin = way > 0 ? 0 : (steps - 1) * 1024;
                const mp_bf16 *const from = xs + (block * K + k1) * 32 + begin, *const ws = slice + begin;
                const mp_bf16 *const after = /* where this block ends in the rows of the next one */
                    xs + (mp_block_of(i0 + then, part, parts) * K + k1) * 32 + (steps - 1) * 1024 - begin;
                float *const here_sums = slots + here * 1024;
                /* The sums that come next are prefetched, rows of them with each step; so are the rows' k of the
                 * next strip, a part of them with each panel. */
                const int64_t next_slot = next.k > 0 ? next.p - p : 0;
                const float *const next_sums = slots + (i + 1 < count || turns ? then : next_slot * BLOCKS) * 1024;
                const mp_bf16 *const next_strip = xs + (block * K + (k2 < K ? k2 : 0)) * 32;
                const char *next_x = (const char *)next_strip + (p - p0) * steps * more * 64;
                if (i == count / 2) mp_prefetch_exceptions(w, next.p, K);
                mp_tile_fence();
                if (i == 0) {
                    mp_tile_stream(4, from, 64);
                    mp_tile_load(6, ws, 64);
                    mp_tile_load(7, ws + 512, 64);
                }
                if (k1 == 0) mp_zero_sums();
                else if (!turned || i > 0) mp_load_sums(here_sums);
                for (int64_t j = 0; j < steps; ++j) {
                    /* x comes from L2 with the streaming load, so that the slice of w keeps L1 to itself. What the
                     * next step needs is loaded at the end of this one, in front of the sums' stores: those fill a
                     * page, and a load behind them waits for the one that has its place in a page. Prefetches are
                     * spread over the loads: those from far away hold buffers that all of them need. */
                    mp_tile_dot(0, 4, 6);
                    mp_tile_stream(5, from + j * way + 512, 64);
                    mp_tile_dot(1, 4, 7);
                    if (i == 0) mp_decode_next(&coming);
                    mp_tile_fence();
                    mp_tile_dot(2, 5, 6);
                    mp_tile_dot(3, 5, 7);
                    mp_tile_stream(4, j + 1 < steps ? from + (j + 1) * way : after, 64);
                    __builtin_prefetch(ahead, 0, 2);
                    if (j + 1 < steps) mp_tile_load(6, ws + (j + 1) * way, 64);
                    __builtin_prefetch(ahead + 64, 0, 2);
                    if (j + 1 < steps) mp_tile_load(7, ws + (j + 1) * way + 512, 64);
                    __builtin_prefetch(ahead + 128, 0, 2);
                    ahead += next_way * MP_PREFETCHED;
                    if (SLICE < K) mp_prefetch_l1(next_sums + j * at_once * 32, at_once * 128);
                    MP_UNROLL(1)
                    for (int64_t n = 1; n < requests; ++n, ahead += next_way * MP_PREFETCHED) /* fewer than 256 rows */
                        mp_prefetch_l2(ahead, MP_PREFETCHED);
                    if (STRIP < K) {
                        MP_UNROLL(1)
                        for (int64_t n = 0; n < more; ++n, next_x += 64) __builtin_prefetch(next_x, 0, 2);
                    }
                    if (UNIT > 1) { /* the tile units go on meanwhile */
                        if (waiting.row < waiting.rows && tick++ % s->every == 0) s->next(c, &waiting, rows);
                        continue;
                    }
                    if (s->prefetch && ends)
                        for (int64_t n = j * at_once; n < mp_min(32, (j + 1) * at_once); ++n)
                            s->prefetch(c, p, block * 32 + n);
                    if (j % s->every == 0 && done.row < done.rows) {
                        const int64_t end = mp_min(done.rows, done.row + s->every * at_once);
                        s->rows(c, done.g, done.first, done.row, end, done.sums);
                        done.row = end;
                    }
                }
                float *to = here_sums;
                if (UNIT == 1) {
                    if (done.row < done.rows)
                        s->rows(c, done.g, done.first, done.row, done.rows, done.sums);
                    done = fresh;
                    fresh.rows = 0;
                    if (ends) to = final + turn++ % 2 * 1024;
                }
                if (turns && i == count - 1) break; /* the next slice goes on with these sums */
                mp_store_sums(to);
                if (UNIT > 1 && ends && p % UNIT == UNIT - 1 && i == count - 1) {
                    while (waiting.row < waiting.rows) s->next(c, &waiting, rows);
                    const float *const first = to - ((UNIT - 1) * BLOCKS + here) * 1024;
                    waiting = (mp_waiting){first, p / UNIT, i0, 0, count * 32, part, parts};
                }
                if (UNIT == 1 && ends)
                    fresh = (mp_waiting_block){to, p, block * 32, 0, mp_min(32, rows - block * 32)};
            }
        }
    }
    mp_tiles_end();
    if (UNIT > 1)
        while (waiting.row < waiting.rows) s->next(c, &waiting, rows);
    else
        for (int i = 0; i < 2; ++i, done = fresh)
            s->rows(c, done.g, done.first, done.row, done.rows, done.sums);
}

/* The whole product. `xt` has room for all rows as tiles, and for the parts of a few rows of each thread; `partial`
 * for the sums that wait; `sums` for those of few rows; c is the first argument of the kernel's functions. */
MP_INLINE void mp_linear_tiles_run(const mp_linear_tiles *s, mp_run *run, const int t, const int T, const int64_t rows,
                                   const void *x, const mp_bf16 *w, float *xt, float *partial, float *sums,
                                   const void *c)
{
    mp_bf16 *const tiles = (mp_bf16 *)xt;
    if (rows == 0) return; /* not even the first row may be written */
    if (rows <= 8) {
        mp_linear_tiles_few(s, run, t, T, rows, w, tiles, sums, c);
        return;
    }
    const int ready = s->tiled_from && rows >= s->tiled_from;
    const int parts = mp_parts(T, rows / s->part), own = t % parts, worker = t / parts, workers = T / parts;
    const int64_t count = mp_block_count((rows + 31) / 32, own, parts);
    const int64_t end = ready ? 0 : mp_share(count, worker + 1, workers);
    for (int64_t i = mp_share(count, worker, workers); i < end; ++i) {
        const int64_t block = mp_block_of(i, own, parts);
        mp_linear_tile_block(s, c, block * 32, rows, tiles + block * 32 * s->K);
    }
    mp_prepared(run, own);
    const mp_bf16 *const xs = ready ? (const mp_bf16 *)x : tiles;
    mp_linear_tiles_many(s, run, T, rows, parts, own, ready, w, xs, partial + t * s->sums, c);
}

#endif
