/* GPT2Block: one plan, written by monoplan test for cpu (avx2).
 * 5 kernels; symbols: batch, seq */
#include "mp_plan.h"
#include "mp_call.h"

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/codegen/test_golden_source.py:0 in c_attn */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_0_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *bias MP_UNUSED,
    float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 192, PANEL = 16, WIDTH = 48 };
    const int64_t first = g * WIDTH, count = 48;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + bias[n];
        y[row * 192 + n] = sum;
    }
}

/* tile[1][48] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_0_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 48 + i % V * MP_LANES, acc[i]);
}

/* tile[6][48] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_0_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 48 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void fused_linear_0_block(const float *x, const float *norm_weight, const float *norm_bias,
    const int64_t x_stride, const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 64 };
    for (int r = 0; r < R; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < K; ++i) xt[i * R + r] = 0.0f;
            continue;
        }
        const float *row = x + (first + r) * x_stride;
        float sum = 0.0f;
        MP_SIMD_SUM(sum)
        for (int64_t i = 0; i < K; ++i) sum += row[i];
        const float mean = sum / K;
        float rest = 0.0f; /* what rounding left in the mean */
        MP_SIMD_SUM(rest)
        for (int64_t i = 0; i < K; ++i) rest += row[i] - mean;
        rest /= K;
        float squares = 0.0f;
        MP_SIMD_SUM(squares)
        for (int64_t i = 0; i < K; ++i) {
            const float d = row[i] - mean - rest;
            squares += d * d;
        }
        const float scale = 1.0f / sqrtf(squares / K + 9.999999747378752e-06f);
        if (R == 1) {
            MP_SIMD
            for (int64_t i = 0; i < K; ++i) xt[i] = ((row[i] - mean - rest) * scale) * norm_weight[i]
                + norm_bias[i];
        } else {
            for (int64_t i0 = 0; i0 < K; i0 += 64) { /* values first, in vectors; then each to its place */
                float values[64];
                const int64_t end = mp_min(K, i0 + 64);
                MP_SIMD
                for (int64_t i = i0; i < end; ++i) values[i - i0] =
                    ((row[i] - mean - rest) * scale) * norm_weight[i] + norm_bias[i];
                for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
            }
        }
    }
}

/* Groups [g, last) for a few rows, which lie in xs as a block of R. */
static void fused_linear_0_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *norm_weight MP_UNUSED,
    const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 64, PANEL = 16, PANELS = 3, WIDTH = 48, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_0_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_0_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_0_finish(run, step, bias, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_0_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const float *bias MP_UNUSED, float *y MP_UNUSED, const float *blocks, const int64_t g, const int64_t first,
    const int64_t rows)
{
    enum { PANEL = 16, PANELS = 3, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_0_finish(run, step, bias, y, g, first + r, sums);
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
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *norm_weight MP_UNUSED,
    const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int t, const int T, const int64_t rows)
{
    enum { K = 64, PANEL = 16, PANELS = 3, GROUPS = 4, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 64, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_0_block(x + 0, norm_weight, norm_bias, 64, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_0_finish_rows(run, step, bias, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_0(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *bias MP_UNUSED,
    const float *norm_weight MP_UNUSED, const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 64, MOST = 6, GROUPS = 4, TAIL = 1 };

    if (rows > MOST) {
        fused_linear_0_many(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_0_block(x + 0, norm_weight, norm_bias, 64, 0, R, rows, xs);
        fused_linear_0_few(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, xs, R, rows,
            mp_share(dealt, t, T), mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_0_few(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, xs, R, rows, g,
                g + 1);
    }
}

/* %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2, _, _) {causal=True, scale=None, softcap=None,
 *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_attention.h"

/* Keys [from, to) for one query and all heads of its group: every row of keys and values is read once for all of them.
 * Leaves the weighted sums of values, the largest score and the total of the weights of each head. */
static void attention_1_few(const float *q, const float *k, const float *v, const int64_t n_batch MP_UNUSED,
    const int64_t n_seq MP_UNUSED, const int64_t b MP_UNUSED, const int64_t g, const int64_t s0,
    const int64_t from, const int64_t to, float *sums, float *top, float *total)
{
    enum { GROUP = 1, DIM = 16, VALUE = 16, CHUNK = 1024, ROWS = 8 };
    enum { LINE = 16, SUMS = 16, WIDE = 2, AHEAD = 16, FAR = 256, SOME = 32 };
    _Alignas(64) float query[GROUP * LINE], score[GROUP * (CHUNK + MP_LANES)];
    _Alignas(64) mp_vec part[GROUP * MP_LANES];
    const int64_t count = to - from;
    for (int64_t n = 0; n < GROUP; ++n) {
        const int64_t h = g * GROUP + n;
        for (int64_t i = 0; i < DIM; ++i) query[n * LINE + i] = q[b * n_seq * 192 + s0 * 192 + h * 16
            + i] * 0.3606737554073334f;
        for (int64_t i = DIM; i < LINE; ++i) query[n * LINE + i] = 0.0f;
    }
    for (int64_t j = 0; j < count; j += MP_LANES) {
        for (int64_t l = 0; l < MP_LANES; l += ROWS) {
            mp_vec acc[ROWS * GROUP];
            MP_FULLY
            for (int n = 0; n < ROWS * GROUP; ++n) acc[n] = mp_splat(0.0f);
            const float *row[ROWS];
            MP_FULLY
            for (int r = 0; r < ROWS; ++r) {
                const int64_t key = from + mp_min(j + l + r, count - 1);
                row[r] = (k + b * n_seq * 192 + g * 16 + key * 192 + 64);
                mp_soon(row[r] + AHEAD * 192, 64);
                mp_later(row[r] + FAR * 192, 64);
            }
            MP_FOUR
            for (int i = 0; i < LINE; i += MP_LANES) {
                mp_vec wide[1 * ROWS];
                MP_FULLY
                for (int r = 0; r < ROWS; ++r) wide[r] = mp_vload_f32(row[r] + i);
                MP_FULLY
                for (int n = 0; n < GROUP; ++n) {
                    const mp_vec one = mp_vload_f32(query + n % GROUP * LINE + i);
                    MP_FULLY
                    for (int r = 0; r < ROWS; ++r) acc[r * GROUP + n % GROUP] += wide[n / GROUP * ROWS + r] * one;
                }
            }
            MP_FULLY
            for (int n = 0; n < ROWS * GROUP; ++n) part[n % GROUP * MP_LANES + l + n / GROUP] = acc[n];
        }
        for (int n = 0; n < GROUP; ++n) mp_vstore(score + n * (CHUNK + MP_LANES) + j, mp_sums(part + n * MP_LANES));
    }
    for (int64_t n = 0; n < GROUP; ++n) {
        float *line = score + n * (CHUNK + MP_LANES);
        for (int64_t j = count; j % MP_LANES; ++j) line[j] = -INFINITY;
        mp_vec high = mp_splat(-INFINITY), added = mp_splat(0.0f);
        for (int64_t j = 0; j < count; j += MP_LANES) high = mp_vmax(mp_vload_f32(line + j), high);
        top[n] = mp_vtop(high);
        const mp_vec base = mp_vbase(mp_splat(top[n]));
        for (int64_t j = 0; j < count; j += MP_LANES) {
            const mp_vec weight = mp_vexp2(mp_vload_f32(line + j) - base);
            mp_vstore(line + j, weight);
            added += weight;
        }
        total[n] = mp_vtotal(added);
    }
    for (int64_t i = 0; i < GROUP * SUMS; ++i) sums[i] = 0.0f;
    for (int64_t j0 = 0; j0 < count; j0 += SOME) {
        const int64_t j1 = mp_min(count, j0 + SOME);
        for (int64_t i = 0; i < SUMS; i += WIDE * MP_LANES) {
            mp_vec acc[GROUP * WIDE];
            MP_FULLY
            for (int n = 0; n < GROUP * WIDE; ++n) acc[n] = mp_vload_f32(sums + n / WIDE * SUMS + i
                + n % WIDE * MP_LANES);
            MP_TWICE
            for (int64_t j = j0; j < j1; ++j) {
                const int64_t key MP_UNUSED = from + j;
                const float *row = (v + b * n_seq * 192 + g * 16 + key * 192 + 128) + i;
                mp_soon(row + AHEAD * 192, WIDE * MP_LANES * sizeof *row);
                mp_later(row + FAR * 192, WIDE * MP_LANES * sizeof *row);
                mp_vec wide[WIDE];
                MP_FULLY
                for (int n = 0; n < WIDE; ++n) wide[n] = mp_vload_f32(row + n * MP_LANES);
                MP_FULLY
                for (int n = 0; n < GROUP; ++n) {
                    const mp_vec one = mp_splat(score[n * (CHUNK + MP_LANES) + j]);
                    MP_FULLY
                    for (int d = 0; d < WIDE; ++d) acc[n * WIDE + d] += one * wide[d];
                }
            }
            MP_FULLY
            for (int n = 0; n < GROUP * WIDE; ++n) mp_vstore(sums + n / WIDE * SUMS + i + n % WIDE * MP_LANES,
                acc[n]);
        }
    }
}

/* Joins the chunks of one query and group in their order. */
static void attention_1_join(float *y, const int64_t n_batch MP_UNUSED, const int64_t n_seq MP_UNUSED,
    const int64_t b MP_UNUSED, const int64_t g, const int64_t s0,
    const float *partial, const int64_t chunks)
{
    enum { GROUP = 1, VALUE = 16, SUMS = 16, LEFT = GROUP * (SUMS + 2) };
    for (int64_t n = 0; n < GROUP; ++n) {
        const int64_t h MP_UNUSED = g * GROUP + n;
        const float *tops = partial + GROUP * SUMS + n, *totals = tops + GROUP;
        _Alignas(64) float sums[SUMS];
        float high = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        for (int64_t c = 0; c < chunks; ++c) high = tops[c * LEFT] > high ? tops[c * LEFT] : high;
        const float base = high == -INFINITY ? 0.0f : high;
        for (int64_t c = 0; c < chunks; ++c) {
            if (totals[c * LEFT] == 0.0f) continue; /* no key of this chunk is seen: its sums are not there */
            const float weight = mp_vfirst(mp_vexp2(mp_splat(tops[c * LEFT] - base)));
            total += weight * totals[c * LEFT];
            MP_SIMD
            for (int64_t i = 0; i < SUMS; ++i) sums[i] += weight * partial[c * LEFT + n * SUMS + i];
        }
        const float scale = total == 0.0f ? 0.0f : 1.0f / total;
        MP_SIMD
        for (int64_t i = 0; i < VALUE; ++i) {
            const float v_out = sums[i] * scale;
            y[b * n_seq * 64 + s0 * 64 + h * 16 + i] = v_out;
        }
    }
}

/* Scores of a block of keys become weights: moves the maximum, and says how much of the earlier sums to keep. */
static void attention_1_weigh(float *score, float *top, float *total, float *keep, const int64_t width)
{
    enum { COLS = 48 };
    for (int64_t c = 0; c < COLS; c += MP_LANES) {
        const mp_vec old = mp_vload_f32(top + c);
        mp_vec high = old;
        for (int64_t j = 0; j < width; ++j) high = mp_vmax(mp_vload_f32(score + j * COLS + c), high);
        const mp_vec base = mp_vbase(high), kept = mp_vexp2(old - base);
        mp_vec sum = mp_vload_f32(total + c) * kept;
        MP_TWICE
        for (int64_t j = 0; j < width; ++j) {
            const mp_vec weight = mp_vexp2(mp_vload_f32(score + j * COLS + c) - base);
            mp_vstore(score + j * COLS + c, weight);
            sum += weight;
        }
        mp_vstore(top + c, high);
        mp_vstore(total + c, sum);
        mp_vstore(keep + c, kept);
    }
}

/* Columns [c0, c0 + filled) of a group, column = query * GROUP + head, against all keys that they see. Lanes are columns:
 * keys and values are read as they lie, and softmax has no sum across a vector. */
static void attention_1_strip(const float *q, const float *k, const float *v, float *y,
    const int64_t n_batch MP_UNUSED, const int64_t n_seq MP_UNUSED, const int64_t b MP_UNUSED, const int64_t g,
    const int64_t c0,
    const int64_t filled, const int64_t before, const int64_t queries, const int64_t keys)
{
    enum { GROUP = 1, DIM = 16, VALUE = 16, SUMS = 16 };
    enum { COLS = 48, KEYS = 64, R = 4, V = 3, LONGER = DIM > SUMS ? DIM : SUMS };
    float query[DIM * COLS], score[KEYS * COLS], sums[SUMS * COLS], rows[KEYS * LONGER];
    float place[COLS], top[COLS], total[COLS], keep[COLS];
    const int64_t s0 MP_UNUSED = c0 / GROUP, s1 MP_UNUSED = (c0 + filled - 1) / GROUP,
        written MP_UNUSED = mp_min(keys, before + queries);
    for (int64_t c = 0; c < COLS; ++c) {
        const int64_t column = c0 + mp_min(c, filled - 1), row = column / GROUP,
            h MP_UNUSED = g * GROUP + column % GROUP;
        for (int64_t i = 0; i < DIM; ++i) query[i * COLS + c] = q[b * n_seq * 192 + row * 192 + h * 16
            + i] * 0.3606737554073334f;
        place[c] = (float)(before + row);
        top[c] = -INFINITY;
        total[c] = 0.0f;
    }
    for (int64_t i = 0; i < SUMS * COLS; ++i) sums[i] = 0.0f;
    const int64_t first = 0, last = mp_min(written, before + s1 + 1);
    /* Blocks begin at multiples of KEYS, so that the bits of a query do not depend on its neighbours. */
    for (int64_t j0 = first / KEYS * KEYS; j0 < last; j0 += KEYS) {
        const int64_t width = mp_min(KEYS, last - j0);
        const int whole MP_UNUSED = width == KEYS && j0 + KEYS <= before + s0 + 1;
        const int64_t k_step = whole ? 192 : DIM;
        const float *k_rows = whole ? (k + b * n_seq * 192 + g * 16 + j0 * 192 + 64) : rows;
        if (!whole)
        for (int64_t j = 0; j < (width + R - 1) / R * R; ++j) {
            const int64_t key MP_UNUSED = j0 + mp_min(j, width - 1);
            for (int64_t i = 0; i < DIM; i += MP_LANES) mp_vstore(rows + j * DIM + i,
                mp_vload_f32((k + b * n_seq * 192 + g * 16 + key * 192 + 64) + i));
            /* Some column may not see a key behind the first query, which may hold anything: 0 * NaN must
             * not enter. Its values are made finite below, and those who see it get NaN from its score. */
            int odd = 0;
            for (int64_t i = 0; key > before + s0
                && i < VALUE; ++i) odd |= !isfinite(v[b * n_seq * 192 + g * 16 + key * 192 + i + 128]);
            for (int64_t i = 0; odd && i < DIM; ++i) rows[j * DIM + i] = NAN;
        }
        for (int64_t j = 0; j < width; j += R)
            for (int64_t c = 0; c < COLS; c += V * MP_LANES)
                mp_strip(k_rows + j * k_step, k_step, 1, query + c, COLS, DIM, score + j * COLS + c, COLS, R, V, 0);
        if (!whole)
            for (int64_t j = 0; j < width; ++j)
                for (int64_t c = 0; c < COLS; c += MP_LANES) {
                    const mp_vec key = mp_splat((float)(j0 + j)), at = mp_vload_f32(place + c),
                        dot = mp_vload_f32(score + j * COLS + c);
                    const mp_vec_u32 hidden = MP_BITS(key > at);
                    mp_vstore(score + j * COLS + c, mp_vchoose(hidden, mp_splat(-INFINITY), dot));
                }
        attention_1_weigh(score, top, total, keep, width);
        const int64_t v_step = whole ? 192 : SUMS;
        const float *v_rows = whole ? (v + b * n_seq * 192 + g * 16 + j0 * 192 + 128) : rows;
        if (!whole)
        for (int64_t j = 0; j < width; ++j) {
            const int64_t key MP_UNUSED = j0 + j;
            for (int64_t i = 0; i < VALUE; i += MP_LANES) mp_vstore(rows + j * SUMS + i,
                mp_vload_f32((v + b * n_seq * 192 + g * 16 + key * 192 + 128) + i));
            if (key > before + s0)
                for (int64_t i = 0; i < VALUE; ++i) rows[j * SUMS + i] = isfinite(rows[j * SUMS
                    + i]) ? rows[j * SUMS + i] : 0.0f;
        }
        for (int64_t i = 0; i < SUMS; i += R)
            for (int64_t c = 0; c < COLS; c += V * MP_LANES)
                mp_strip(v_rows + i, 1, v_step, score + c, COLS, width, sums + i * COLS + c, COLS, R, V, keep + c);
    }
    for (int64_t c = 0; c < filled; ++c) {
        const int64_t row = (c0 + c) / GROUP, h MP_UNUSED = g * GROUP + (c0 + c) % GROUP;
        const float scale = total[c] == 0.0f ? 0.0f : 1.0f / total[c];
        for (int64_t i = 0; i < VALUE; ++i) {
            const float v_out = sums[i * COLS + c] * scale;
            y[b * n_seq * 64 + row * 64 + h * 16 + i] = v_out;
        }
    }
}

MP_KERNEL attention_1(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *q MP_UNUSED, const float *k MP_UNUSED, const float *v MP_UNUSED,
    float *y MP_UNUSED, float *partial MP_UNUSED)
{
    enum { HEADS = 4, KV = 4, GROUP = HEADS / KV };
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];

    const int64_t batches = n_batch, queries = n_seq, keys = n_seq;
    if (queries > 2) {
        /* Strips of one head in a row, whose keys stay in the cache; later ones see more of them, so each head deals its
         * strips out from another thread on. */
        enum { COLS = 48 };
        const int64_t columns = queries * GROUP, strips = (columns + COLS - 1) / COLS,
            tasks = batches * KV * strips;
        for (int64_t task = t; task < tasks && !mp_stopping(run); task += T) {
            const int64_t line = task / strips, c0 = (task + line) % strips * COLS, g = line % KV, b = line / KV;
            const int64_t before = keys - queries;
            attention_1_strip(q, k, v, y, n_batch, n_seq, b, g, c0, mp_min(COLS, columns - c0), before, queries,
                keys);
        }
        return;
    }
    enum { LEAST = 256, CHUNK = 1024, SUMS = 16, LEFT = GROUP * (SUMS + 2) };
    int64_t chunks = 1; /* the same for every thread: all of them wait below, or none */
    for (int64_t row = 0; row < batches * queries; ++row) {
        const int64_t s1 MP_UNUSED = row % queries, b MP_UNUSED = row / queries, before = keys - queries,
            written = mp_min(keys, before + queries);
        const int64_t last = mp_min(written, before + s1 + 1), chunk = mp_chunk(last, KV, LEAST, CHUNK);
        chunks = mp_max(chunks, (last + chunk - 1) / chunk);
    }
    /* Each thread has its share of the tasks, one after the other as they lie in memory; who has done them helps the others. */
    const int64_t lines = batches * queries * KV;
    const int parts = mp_parts(T, T), helps = chunks > 1 ? parts : 1;
    for (int part = t % parts, others = 0; others < helps; part = (t + ++others) % parts)
    for (int64_t begun = mp_share(lines * chunks, part, parts), end = mp_share(lines * chunks, part + 1, parts),
        task;
         (task = begun + mp_piece(run, part)) < end;) {
        const int64_t line = task / chunks, g = line % KV, s0 = line / KV % queries, s1 MP_UNUSED = s0,
            b = line / KV / queries;
        const int64_t before = keys - queries, written MP_UNUSED = mp_min(keys, before + queries),
            last = mp_min(written, before + s1 + 1);
        const int64_t chunk = mp_chunk(last, KV, LEAST, CHUNK), begin = task % chunks * chunk;
        const int64_t from = mp_max(begin, 0), to = mp_min(begin + chunk, last);
        float *sums = partial + task * LEFT, *top = sums + GROUP * SUMS, *total = top + GROUP;
        for (int n = 0; n < GROUP; ++n) {
            top[n] = -INFINITY;
            total[n] = 0.0f;
        }
        if (from < to) attention_1_few(q, k, v, n_batch, n_seq, b, g, s0, from, to, sums, top, total);
    }
    if (chunks > 1 || T > parts) mp_barrier(run, T); /* else each thread finishes what it began */
    const int64_t stop = mp_share(lines, t + 1, T);
    for (int64_t line = mp_share(lines, t, T); line < stop; ++line)
        attention_1_join(y, n_batch, n_seq, line / KV / queries, line % KV, line / KV % queries,
            partial + line * chunks * LEFT, chunks);
}

/* %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_2_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *bias MP_UNUSED,
    const float *e0 MP_UNUSED, float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 64, PANEL = 16, WIDTH = 32 };
    const int64_t first = g * WIDTH, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + bias[n];
        y[row * 64 + n] = (sum + e0[row * 64 + n]);
    }
}

/* tile[1][32] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_2_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 32 + i % V * MP_LANES, acc[i]);
}

/* tile[6][32] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_2_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 32 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void fused_linear_2_block(const float *x, const int64_t x_stride, const int64_t first, const int R,
    const int64_t rows, float *xt)
{
    enum { K = 64 };
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
static void fused_linear_2_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g,
    const int64_t last)
{
    enum { K = 64, PANEL = 16, PANELS = 2, WIDTH = 32, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_2_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_2_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_2_finish(run, step, bias, e0, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_2_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, const float *blocks,
    const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 2, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_2_finish(run, step, bias, e0, y, g, first + r, sums);
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
static void fused_linear_2_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 64, PANEL = 16, PANELS = 2, GROUPS = 2, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 64, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_2_block(x + 0, 64, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_2_finish_rows(run, step, bias, e0, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_2(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *bias MP_UNUSED,
    const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int64_t rows)
{
    enum { K = 64, MOST = 6, GROUPS = 2, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_2_many(run, step, x, w, bias, e0, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_2_block(x + 0, 64, 0, R, rows, xs);
        fused_linear_2_few(run, step, x, w, bias, e0, y, xt, partial, xs, R, rows, mp_share(dealt, t, T),
            mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_2_few(run, step, x, w, bias, e0, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_3_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *bias MP_UNUSED,
    float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 256, PANEL = 16, WIDTH = 64 };
    const int64_t first = g * WIDTH, count = 64;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + bias[n];
        y[row * 256 + n] = mp_gelu_tanhf(sum);
    }
}

/* tile[1][64] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_3_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_3_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 64, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_3_block(const float *x, const float *norm_weight, const float *norm_bias,
    const int64_t x_stride, const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 64 };
    for (int r = 0; r < R; ++r) {
        if (first + r >= rows) {
            for (int64_t i = 0; i < K; ++i) xt[i * R + r] = 0.0f;
            continue;
        }
        const float *row = x + (first + r) * x_stride;
        float sum = 0.0f;
        MP_SIMD_SUM(sum)
        for (int64_t i = 0; i < K; ++i) sum += row[i];
        const float mean = sum / K;
        float rest = 0.0f; /* what rounding left in the mean */
        MP_SIMD_SUM(rest)
        for (int64_t i = 0; i < K; ++i) rest += row[i] - mean;
        rest /= K;
        float squares = 0.0f;
        MP_SIMD_SUM(squares)
        for (int64_t i = 0; i < K; ++i) {
            const float d = row[i] - mean - rest;
            squares += d * d;
        }
        const float scale = 1.0f / sqrtf(squares / K + 9.999999747378752e-06f);
        if (R == 1) {
            MP_SIMD
            for (int64_t i = 0; i < K; ++i) xt[i] = ((row[i] - mean - rest) * scale) * norm_weight[i]
                + norm_bias[i];
        } else {
            for (int64_t i0 = 0; i0 < K; i0 += 64) { /* values first, in vectors; then each to its place */
                float values[64];
                const int64_t end = mp_min(K, i0 + 64);
                MP_SIMD
                for (int64_t i = i0; i < end; ++i) values[i - i0] =
                    ((row[i] - mean - rest) * scale) * norm_weight[i] + norm_bias[i];
                for (int64_t i = i0; i < end; ++i) xt[i * R + r] = values[i - i0];
            }
        }
    }
}

/* Groups [g, last) for a few rows, which lie in xs as a block of R. */
static void fused_linear_3_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *norm_weight MP_UNUSED,
    const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 64, PANEL = 16, PANELS = 4, WIDTH = 64, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_3_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_3_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_3_finish(run, step, bias, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_3_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const float *bias MP_UNUSED, float *y MP_UNUSED, const float *blocks, const int64_t g, const int64_t first,
    const int64_t rows)
{
    enum { PANEL = 16, PANELS = 4, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_3_finish(run, step, bias, y, g, first + r, sums);
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
static void fused_linear_3_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *norm_weight MP_UNUSED,
    const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int t, const int T, const int64_t rows)
{
    enum { K = 64, PANEL = 16, PANELS = 4, GROUPS = 4, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 64, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_3_block(x + 0, norm_weight, norm_bias, 64, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_3_finish_rows(run, step, bias, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_3(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *bias MP_UNUSED,
    const float *norm_weight MP_UNUSED, const float *norm_bias MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 64, MOST = 6, GROUPS = 4, TAIL = 1 };

    if (rows > MOST) {
        fused_linear_3_many(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_3_block(x + 0, norm_weight, norm_bias, 64, 0, R, rows, xs);
        fused_linear_3_few(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, xs, R, rows,
            mp_share(dealt, t, T), mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_3_few(run, step, x, w, bias, norm_weight, norm_bias, y, xt, partial, xs, R, rows, g,
                g + 1);
    }
}

/* %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/codegen/test_golden_source.py:0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_4_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *bias MP_UNUSED,
    const float *e0 MP_UNUSED, float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 64, PANEL = 16, WIDTH = 32 };
    const int64_t first = g * WIDTH, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + bias[n];
        y[row * 64 + n] = (sum + e0[row * 64 + n]);
    }
}

/* tile[1][32] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_4_rows1(const float *xt, const float *w, float *tile)
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 32 + i % V * MP_LANES, acc[i]);
}

/* tile[6][32] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_4_rows6(const float *xt, const float *w, float *tile)
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 32 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void fused_linear_4_block(const float *x, const int64_t x_stride, const int64_t first, const int R,
    const int64_t rows, float *xt)
{
    enum { K = 256 };
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
static void fused_linear_4_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g,
    const int64_t last)
{
    enum { K = 256, PANEL = 16, PANELS = 2, WIDTH = 32, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_4_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_4_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_4_finish(run, step, bias, e0, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_4_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, const float *blocks,
    const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 2, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_4_finish(run, step, bias, e0, y, g, first + r, sums);
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
static void fused_linear_4_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *bias MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 256, PANEL = 16, PANELS = 2, GROUPS = 2, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 256, STRIP = 256, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_4_block(x + 0, 256, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_4_finish_rows(run, step, bias, e0, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_4(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *bias MP_UNUSED,
    const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int64_t rows)
{
    enum { K = 256, MOST = 6, GROUPS = 2, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_4_many(run, step, x, w, bias, e0, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_4_block(x + 0, 256, 0, R, rows, xs);
        fused_linear_4_few(run, step, x, w, bias, e0, y, xt, partial, xs, R, rows, mp_share(dealt, t, T),
            mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_4_few(run, step, x, w, bias, e0, y, xt, partial, xs, R, rows, g, g + 1);
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
    /* ---- c_attn, attention, fused_linear ---- */
    const void *const w_c_attn = param[3]; /* c_attn.weight f32[192, 64] */
    const float *const w_c_attn_bias = param[0]; /* c_attn.bias f32[192] */
    const float *const w_ln_1 = param[1]; /* ln_1.weight f32[64] */
    const float *const w_ln_1_bias = param[2]; /* ln_1.bias f32[64] */
    const void *const w_c_proj = param[5]; /* c_proj.weight f32[64, 64] */
    const float *const w_c_proj_bias = param[4]; /* c_proj.bias f32[64] */
    const void *const w_c_fc = param[9]; /* c_fc.weight f32[256, 64] */
    const float *const w_c_fc_bias = param[6]; /* c_fc.bias f32[256] */
    const float *const w_ln_2 = param[7]; /* ln_2.weight f32[64] */
    const float *const w_ln_2_bias = param[8]; /* ln_2.bias f32[64] */
    const void *const w_c_out = param[11]; /* c_out.weight f32[64, 256] */
    const float *const w_c_out_bias = param[10]; /* c_out.bias f32[64] */
    if (mp_phase_before(run, w_c_attn, 3, n_batch * n_seq <= 6 ? 12288 : 0, &t, &T)) return;
    /* 0: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer",
     *     eps=1e-05, gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/codegen/test_golden_source.py:0 in
     *     c_attn) */
    fused_linear_0(run, t, T, 0, (const float *)in[0], w_c_attn, w_c_attn_bias, w_ln_1, w_ln_1_bias,
        (float *)(arena + at[0]), (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase(run, &t, &T)) return;
    /* 1: %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2, _, _) {causal=True, scale=None,
     *     softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 16]
     *     (tests/codegen/test_golden_source.py:0) */
    attention_1(run, t, T, 1, (const float *)(arena + at[0]), (const float *)(arena + at[0]),
        (const float *)(arena + at[0]), (float *)(arena + at[2]), (float *)(arena + at[1]));
    if (mp_phase_before(run, w_c_proj, 2, n_batch * n_seq <= 6 ? 8192 : 0, &t, &T)) return;
    /* 2: %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0,
     *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/codegen/test_golden_source.py:0) */
    fused_linear_2(run, t, T, 2, (const float *)(arena + at[2]), w_c_proj, w_c_proj_bias, (const float *)in[0],
        (float *)(arena + at[0]), (float *)(arena + at[3]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase_before(run, w_c_fc, 3, n_batch * n_seq <= 6 ? 16384 : 0, &t, &T)) return;
    /* 3: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
     *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
     *     (tests/codegen/test_golden_source.py:0) */
    fused_linear_3(run, t, T, 3, (const float *)(arena + at[0]), w_c_fc, w_c_fc_bias, w_ln_2, w_ln_2_bias,
        (float *)(arena + at[1]), (float *)(arena + at[3]), (float *)(arena + at[2]), n_batch * n_seq);
    if (mp_phase_before(run, w_c_out, 2, n_batch * n_seq <= 6 ? 32768 : 0, &t, &T)) return;
    /* 4: %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
     *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/codegen/test_golden_source.py:0) */
    fused_linear_4(run, t, T, 4, (const float *)(arena + at[1]), w_c_out, w_c_out_bias,
        (const float *)(arena + at[0]), (float *)out[0], (float *)(arena + at[2]), (float *)(arena + at[3]),
        n_batch * n_seq);
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
