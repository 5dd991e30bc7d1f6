/* Block: one plan, written by monoplan test for cpu (avx2).
 * 2 kernels; symbols: batch, seq */
#include "mp_plan.h"
#include "mp_call.h"

/* %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"}
 *     : f32[batch, seq, 1024]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_0_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const int64_t g, const int64_t row, float *sums)
{
    enum { N = 1024, PANEL = 16, WIDTH = 64 };
    enum { HALF = PANEL / 2 };
    for (int p = 0; p < WIDTH / PANEL; ++p) { /* half of a panel are gates, half of it what they let through */
        const int64_t first = (g * (WIDTH / PANEL) + p) * HALF, count = 8;
        const float *const gates = sums + p * PANEL, *const ups = gates + HALF;
        MP_SIMD
        for (int64_t j = 0; j < count; ++j) {
            const int64_t n = first + j;
            const float gate = gates[j], up = ups[j];
            y[row * 1024 + n] = mp_swigluf(gate, up);
        }
    }
}

/* tile[1][64] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_0_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 256, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
    mp_vec acc[R * V];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    MP_FOUR
    for (int64_t i = 0; i + LINE <= K; i += LINE) {
        mp_later(w + (i + FAR) * PANEL, LINE * PANEL * sizeof *w);
        mp_soon(w + (i + NEAR) * PANEL, LINE * PANEL * sizeof *w);
        MP_FULLY
        for (int64_t n = i; n < i + LINE; ++n) {
            mp_vec wide[V];
            mp_load_row_f32(w + n * PANEL, wide, V);
            MP_FULLY
            for (int r = 0; r < R; ++r)
                MP_FULLY
                for (int v = 0; v < V; ++v) acc[r * V + v] += mp_splat(xt[n * R + r]) * wide[v];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 64 + i % V * MP_LANES, acc[i]);
}

/* tile[6][64] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_0_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 256, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
    mp_vec acc[R * V];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    MP_TWICE
    for (int64_t i = 0; i + LINE <= K; i += LINE) {
        mp_later(w + (i + FAR) * PANEL, LINE * PANEL * sizeof *w);
        mp_soon(w + (i + NEAR) * PANEL, LINE * PANEL * sizeof *w);
        MP_FULLY
        for (int64_t n = i; n < i + LINE; ++n) {
            mp_vec wide[V];
            mp_load_row_f32(w + n * PANEL, wide, V);
            MP_FULLY
            for (int r = 0; r < R; ++r)
                MP_FULLY
                for (int v = 0; v < V; ++v) acc[r * V + v] += mp_splat(xt[n * R + r]) * wide[v];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 64 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void fused_linear_0_block(const float *x, const float *norm_weight, const int64_t x_stride,
    const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 256 };
    for (int r = 0; r < R; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < K; ++i) xt[i * R + r] = 0.0f;
            continue;
        }
        const float *row = x + (first + r) * x_stride;
        float squares = 0.0f;
        MP_SIMD_SUM(squares)
        for (int64_t i = 0; i < K; ++i) {
            const float d = row[i];
            squares += d * d;
        }
        const float scale = 1.0f / sqrtf(squares / K + 9.999999974752427e-07f);
        if (R == 1) {
            MP_SIMD
            for (int64_t i = 0; i < K; ++i) xt[i] = (row[i] * scale) * norm_weight[i];
        } else {
            for (int64_t i0 = 0; i0 < K; i0 += 64) { /* values first, in vectors; then each to its place */
                float values[64];
                const int64_t end = mp_min(K, i0 + 64);
                MP_SIMD
                for (int64_t i = i0; i < end; ++i) values[i - i0] = (row[i] * scale) * norm_weight[i];
                for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
            }
        }
    }
}

/* Groups [g, last) for a few rows, which lie in xs as a block of R. */
static void fused_linear_0_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 256, PANEL = 16, PANELS = 4, WIDTH = 64, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_0_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_0_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_0_finish(run, step, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_0_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 4, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_0_finish(run, step, y, g, first + r, sums);
    }
}

#ifndef MP_TILE_6X2X1
#define MP_TILE_6X2X1
MP_TILE_FUNCTION(mp_tile_6x2x1, 6, 2, 1)
#endif

/* Many rows: threads share them in parts and take the groups of their part, up to SLOTS at a time, before they help with
 * another one: what a thread makes of its rows lies in its own cache when the next product reads them. A slice of a panel
 * (SLICE of k) stays in L1 while a chunk of rows passes it in blocks; a strip of x (STRIP of k, for the chunk) stays in L2 while the
 * panels of SLOTS groups pass, whose sums wait in `partial`. */
static void fused_linear_0_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 256, PANEL = 16, PANELS = 4, GROUPS = 32, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 256, STRIP = 256, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_0_block(x + 0, norm_weight, 256, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
    mp_prepared(run, own);
    for (int part = own, others = 0; others < parts; part = (own + ++others) % parts) {
        const int64_t begin = mp_share(all, part, parts), end = mp_share(all, part + 1, parts),
            groups = (end - begin + BLOCKS - 1) / BLOCKS * GROUPS;
        mp_await(run, part, seats);
        for (mp_span piece; (piece = mp_some(run, part, seats, groups, GROUPS, T > 1 ? 1 : SLOTS, SLOTS)).count;)
        for (int64_t k0 = 0; k0 < K; k0 += STRIP)
        for (int64_t g0 = piece.first % GROUPS, g = g0; g < g0 + piece.count; ++g) {
            const int64_t b0 = begin + piece.first / GROUPS * BLOCKS, count = mp_min(BLOCKS, end - b0),
                filled = mp_min(count * BLOCK, rows - b0 * BLOCK);
            const int64_t stop = mp_min(K, k0 + STRIP);
            float *const group = sums + (g - g0) * SIZE;
            for (int p = 0; p < PANELS; p += ABREAST)
            for (int64_t k1 = k0; k1 < stop; k1 += SLICE) {
                const int64_t deep = mp_min(SLICE, K - k1), number = g * PANELS + p;
                const float *const panel = w + (number * K + k1) * PANEL;
                /* The slice that comes next is asked for while this one is at work. */
                const int64_t after = k1 + SLICE < stop ? number * K + k1 + SLICE : (number + ABREAST) * K + k0;
                const char *next = (const char *)(w + after * PANEL);
                const int64_t lines = (deep * PANEL * (int64_t)sizeof *w / 64 + count - 1) / count;
                for (int64_t b = 0; b < count; ++b) {
                    const float *const x = xs + (b0 + b) * BLOCK * K + k1 * BLOCK;
                    float *const c = group + (p * CHUNK + b * BLOCK) * PANEL;
                    for (int64_t j = 0; j < lines; ++j, next += 64)
                        MP_FULLY
                        for (int q = 0; q < ABREAST; ++q) __builtin_prefetch(next
                            + q * K * PANEL * (int64_t)sizeof *w, 0, 2);
                    MP_FULLY
                    for (int q = 0; q < ABREAST; ++q) mp_soon(c + (q * CHUNK + BLOCK) * PANEL,
                        BLOCK * PANEL * (int64_t)sizeof *c); /* the next sums */
                    mp_tile_6x2x1(x, panel, K * PANEL, deep, c, CHUNK * PANEL, k1 > 0);
                }
            }
            if (stop == K) fused_linear_0_finish_rows(run, step, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_0(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED,
    const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int64_t rows)
{
    enum { K = 256, MOST = 6, GROUPS = 32, TAIL = 8 };

    if (rows > MOST) {
        fused_linear_0_many(run, step, x, w, norm_weight, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_0_block(x + 0, norm_weight, 256, 0, R, rows, xs);
        fused_linear_0_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, mp_share(dealt, t, T),
            mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_0_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} :
 *     f32[batch, seq, 256]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_1_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 256, PANEL = 16, WIDTH = 64 };
    const int64_t first = g * WIDTH, count = 64;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        y[row * 256 + n] = (sum + e0[row * 256 + n]);
    }
}

/* tile[1][64] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_1_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 1024, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
    mp_vec acc[R * V];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    MP_FOUR
    for (int64_t i = 0; i + LINE <= K; i += LINE) {
        mp_later(w + (i + FAR) * PANEL, LINE * PANEL * sizeof *w);
        mp_soon(w + (i + NEAR) * PANEL, LINE * PANEL * sizeof *w);
        MP_FULLY
        for (int64_t n = i; n < i + LINE; ++n) {
            mp_vec wide[V];
            mp_load_row_f32(w + n * PANEL, wide, V);
            MP_FULLY
            for (int r = 0; r < R; ++r)
                MP_FULLY
                for (int v = 0; v < V; ++v) acc[r * V + v] += mp_splat(xt[n * R + r]) * wide[v];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 64 + i % V * MP_LANES, acc[i]);
}

/* tile[6][64] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_1_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 1024, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
    mp_vec acc[R * V];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_splat(0.0f);
    MP_TWICE
    for (int64_t i = 0; i + LINE <= K; i += LINE) {
        mp_later(w + (i + FAR) * PANEL, LINE * PANEL * sizeof *w);
        mp_soon(w + (i + NEAR) * PANEL, LINE * PANEL * sizeof *w);
        MP_FULLY
        for (int64_t n = i; n < i + LINE; ++n) {
            mp_vec wide[V];
            mp_load_row_f32(w + n * PANEL, wide, V);
            MP_FULLY
            for (int r = 0; r < R; ++r)
                MP_FULLY
                for (int v = 0; v < V; ++v) acc[r * V + v] += mp_splat(xt[n * R + r]) * wide[v];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 64 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void fused_linear_1_block(const float *x, const int64_t x_stride, const int64_t first, const int R,
    const int64_t rows, float *xt)
{
    enum { K = 1024 };
    for (int r = 0; r < R; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < K; ++i) xt[i * R + r] = 0.0f;
            continue;
        }
        const float *row = x + (first + r) * x_stride;
        if (R == 1) {
            MP_SIMD
            for (int64_t i = 0; i < K; ++i) xt[i] = row[i];
        } else {
            for (int64_t i0 = 0; i0 < K; i0 += 64) { /* values first, in vectors; then each to its place */
                float values[64];
                const int64_t end = mp_min(K, i0 + 64);
                MP_SIMD
                for (int64_t i = i0; i < end; ++i) values[i - i0] = row[i];
                for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
            }
        }
    }
}

/* Groups [g, last) for a few rows, which lie in xs as a block of R. */
static void fused_linear_1_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 1024, PANEL = 16, PANELS = 4, WIDTH = 64, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_1_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_1_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_1_finish(run, step, e0, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_1_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 4, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_1_finish(run, step, e0, y, g, first + r, sums);
    }
}

#ifndef MP_TILE_6X2X1
#define MP_TILE_6X2X1
MP_TILE_FUNCTION(mp_tile_6x2x1, 6, 2, 1)
#endif

/* Many rows: threads share them in parts and take the groups of their part, up to SLOTS at a time, before they help with
 * another one: what a thread makes of its rows lies in its own cache when the next product reads them. A slice of a panel
 * (SLICE of k) stays in L1 while a chunk of rows passes it in blocks; a strip of x (STRIP of k, for the chunk) stays in L2 while the
 * panels of SLOTS groups pass, whose sums wait in `partial`. */
static void fused_linear_1_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 1024, PANEL = 16, PANELS = 4, GROUPS = 4, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 342, STRIP = 342, SLOTS = 4 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_1_block(x + 0, 1024, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
    mp_prepared(run, own);
    for (int part = own, others = 0; others < parts; part = (own + ++others) % parts) {
        const int64_t begin = mp_share(all, part, parts), end = mp_share(all, part + 1, parts),
            groups = (end - begin + BLOCKS - 1) / BLOCKS * GROUPS;
        mp_await(run, part, seats);
        for (mp_span piece; (piece = mp_some(run, part, seats, groups, GROUPS, T > 1 ? 1 : SLOTS, SLOTS)).count;)
        for (int64_t k0 = 0; k0 < K; k0 += STRIP)
        for (int64_t g0 = piece.first % GROUPS, g = g0; g < g0 + piece.count; ++g) {
            const int64_t b0 = begin + piece.first / GROUPS * BLOCKS, count = mp_min(BLOCKS, end - b0),
                filled = mp_min(count * BLOCK, rows - b0 * BLOCK);
            const int64_t stop = mp_min(K, k0 + STRIP);
            float *const group = sums + (g - g0) * SIZE;
            for (int p = 0; p < PANELS; p += ABREAST)
            for (int64_t k1 = k0; k1 < stop; k1 += SLICE) {
                const int64_t deep = mp_min(SLICE, K - k1), number = g * PANELS + p;
                const float *const panel = w + (number * K + k1) * PANEL;
                /* The slice that comes next is asked for while this one is at work. */
                const int64_t after = k1 + SLICE < stop ? number * K + k1 + SLICE : (number + ABREAST) * K + k0;
                const char *next = (const char *)(w + after * PANEL);
                const int64_t lines = (deep * PANEL * (int64_t)sizeof *w / 64 + count - 1) / count;
                for (int64_t b = 0; b < count; ++b) {
                    const float *const x = xs + (b0 + b) * BLOCK * K + k1 * BLOCK;
                    float *const c = group + (p * CHUNK + b * BLOCK) * PANEL;
                    for (int64_t j = 0; j < lines; ++j, next += 64)
                        MP_FULLY
                        for (int q = 0; q < ABREAST; ++q) __builtin_prefetch(next
                            + q * K * PANEL * (int64_t)sizeof *w, 0, 2);
                    MP_FULLY
                    for (int q = 0; q < ABREAST; ++q) mp_soon(c + (q * CHUNK + BLOCK) * PANEL,
                        BLOCK * PANEL * (int64_t)sizeof *c); /* the next sums */
                    mp_tile_6x2x1(x, panel, K * PANEL, deep, c, CHUNK * PANEL, k1 > 0);
                }
            }
            if (stop == K) fused_linear_1_finish_rows(run, step, e0, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_1(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 1024, MOST = 6, GROUPS = 4, TAIL = 1 };

    if (rows > MOST) {
        fused_linear_1_many(run, step, x, w, e0, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_1_block(x + 0, 1024, 0, R, rows, xs);
        fused_linear_1_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, mp_share(dealt, t, T), mp_share(dealt,
            t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_1_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

static void plan_run(mp_run *run, int t, int T)
{
    void *const *in MP_UNUSED = run->args->inputs;
    void *const *out MP_UNUSED = run->args->outputs;
    void *const *param MP_UNUSED = run->args->params;
    char *const arena MP_UNUSED = run->args->arena;
    const int64_t *const at MP_UNUSED = run->args->offsets;
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    /* ---- fused_linear ---- */
    const void *const w_gate_up = param[1]; /* gate|up.weight f32[2048, 256] */
    const float *const w_norm = param[0]; /* norm.weight f32[256] */
    const void *const w_down = param[2]; /* down.weight f32[256, 1024] */
    if (mp_phase_before(run, w_gate_up, 24, n_batch * n_seq <= 6 ? 65536 : 0, &t, &T)) return;
    /* 0: %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0,
     *     x1)"} : f32[batch, seq, 1024]  (tests/codegen/test_golden_source.py:0) */
    fused_linear_0(run, t, T, 0, (const float *)in[0], w_gate_up, w_norm, (float *)(arena + at[0]),
        (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase_before(run, w_down, 3, n_batch * n_seq <= 6 ? 262144 : 0, &t, &T)) return;
    /* 1: %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0,
     *     x1)"} : f32[batch, seq, 256]  (tests/codegen/test_golden_source.py:0) */
    fused_linear_1(run, t, T, 1, (const float *)(arena + at[0]), w_down, (const float *)in[0], (float *)out[0],
        (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
}

int mp_run_plan(const mp_args *args, mp_error *error)
{
    static const atomic_int silence;
    struct sigaction before;
    mp_run run;
    memset(&run, 0, sizeof run);
    run.args = args;
    run.error = error;
    run.signal = args->stoppable ? &mp_signal : &silence;
    if (args->stoppable) mp_listen(&before);
    const int threads MP_UNUSED = mp_threads(args->threads);
#if defined(_OPENMP)
    if (threads > 1) {
        run.begun = mp_now();
        run.patience = mp_patience(threads);
        #pragma omp parallel num_threads(threads)
        plan_run(&run, omp_get_thread_num(), omp_get_num_threads());
        mp_learn(&run);
    } else
#endif
    plan_run(&run, 0, 1);
    return args->stoppable && mp_heard(&before) ? MP_STOPPED : error->code;
}
