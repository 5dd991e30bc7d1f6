/* GenerationStep: one plan, written by monoplan test for cpu (avx2).
 * 21 kernels; symbols: batch, seq, capacity, hist */
#include "mp_plan.h"
#include "mp_call.h"

/* %minimum = pointwise(%arange, %reshape, %reshape_2) {expr="minimum(add(cast(x1, dtype=i64), x0), sub(add(x1,
 *     x2), 1))"} : i64[batch, seq]
 * monoplan/models/llama.py:0 in model */
MP_KERNEL pointwise_0(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const int32_t *x1 MP_UNUSED, const int32_t *x2 MP_UNUSED, int64_t *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    const int64_t outer = n_batch, inner = n_seq;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        MP_SIMD
        for (int64_t i = 0; i < inner; ++i)
            y[o0 * n_seq + i] = mp_minimum_i64(((int64_t)(x1[o0]) + (int64_t)(i)),
                (int64_t)(((x1[o0] + x2[o0]) - 1)));
    }
}

/* %embedding = embedding(%input_ids, %model.embed_tokens.weight) : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.embed_tokens */
MP_KERNEL embedding_1(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const int64_t *index MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    const int64_t outer = n_batch * n_seq, inner = 32, limit = 50;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o / (n_seq);
        const int64_t o1 MP_UNUSED = o % (n_seq);
        int64_t at = (int64_t)index[o0 * n_seq + o1];
        if (at < 0 || at >= limit) {
            mp_fail(run, MP_INDEX, step, o, at, limit);
            if (limit == 0) continue;
            at = 0;
        }
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            y[o0 * n_seq * 32 + o1 * 32 + i0] = x[at * 32 + i0];
        }
    }
}

/* %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.0.input_layernorm.weight, _, _, _) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms",
 *     eps=1e-06, qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void qkv_rope_cache_2_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const int64_t *positions MP_UNUSED, const float *sin MP_UNUSED, const float *cos MP_UNUSED,
    const int32_t *lengths MP_UNUSED, const int32_t *valid MP_UNUSED, float *k_cache MP_UNUSED,
    float *v_cache MP_UNUSED, float *y MP_UNUSED, const int64_t n_batch MP_UNUSED,
    const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED, const int64_t g, const int64_t row,
    float *sums)
{
    enum { N = 64, PANEL = 16, WIDTH = 16 };
    /* One head: bias, norm, rotation; q goes to y, k and v to row `at` of their caches. */
    enum { DIM = 8, HEADS = 4, KV = 2, HALF = 4 };
    const int64_t head = g, seq = n_seq, b0 = row < seq ? 0 : (uint32_t)row / (uint32_t)seq,
        s0 = row - b0 * seq; /* 64 bits divide slowly */
    if (head < HEADS + KV) {
        int64_t angle = (int64_t)positions[b0 * n_seq + s0];
        if (angle < 0 || angle >= 64) {
            mp_fail(run, MP_POSITION, step, row, angle, 64);
            angle = 0;
        }
        MP_SIMD
        for (int64_t i = 0; i < HALF; ++i) {
            const float sine = sin[angle * 4 + i], cosine = cos[angle * 4 + i];
            const float u = sums[i], v = sums[i + HALF];
            sums[i] = u * cosine - v * sine;
            sums[i + HALF] = u * sine + v * cosine;
        }
    }
    if (head < HEADS) {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) y[b0 * n_seq * 32 + s0 * 32 + head * 8 + j] = sums[j];
        return;
    }
    const int64_t start = (int64_t)lengths[b0], given = (int64_t)valid[b0], at = start + s0;
    const int64_t kv MP_UNUSED = head < HEADS + KV ? head - HEADS : head - HEADS - KV;
    if (given < 0 || given > seq) {
        mp_fail(run, MP_COUNT, step, b0, given, seq);
        return;
    }
    if (start < 0 || start > n_capacity - given) { /* all rows of a sequence, or none */
        mp_fail(run, MP_CACHE_FULL, step, b0, start + given, n_capacity);
        return;
    }
    if (s0 >= given) return;
    if (head < HEADS + KV) {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8
            + j] = sums[j];
    } else {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8
            + j] = sums[j];
    }
}

/* tile[1][16] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void qkv_rope_cache_2_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 16 + i % V * MP_LANES, acc[i]);
}

/* tile[6][16] = 6 rows, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void qkv_rope_cache_2_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
    for (int i = 0; i < R * V; ++i) mp_vstore(tile + i / V * 16 + i % V * MP_LANES, acc[i]);
}

/* Rows [first, first + R) of x, normed, as xt[k][row]; rows past the end are 0. */
static void qkv_rope_cache_2_block(const float *x, const float *norm_weight, const int64_t x_stride,
    const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 32 };
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
static void qkv_rope_cache_2_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, const int64_t *positions MP_UNUSED,
    const float *sin MP_UNUSED, const float *cos MP_UNUSED, const int32_t *lengths MP_UNUSED,
    const int32_t *valid MP_UNUSED, float *k_cache MP_UNUSED, float *v_cache MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const int64_t n_batch MP_UNUSED,
    const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED, const float *xs, const int R,
    const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 32, PANEL = 16, PANELS = 1, WIDTH = 16, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) qkv_rope_cache_2_rows1(xs, panel, tile + p * PANEL);
            else qkv_rope_cache_2_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) qkv_rope_cache_2_finish(run, step, positions, sin, cos, lengths, valid,
            k_cache, v_cache, y, n_batch, n_capacity, n_seq, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void qkv_rope_cache_2_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED,
    const int64_t *positions MP_UNUSED, const float *sin MP_UNUSED, const float *cos MP_UNUSED,
    const int32_t *lengths MP_UNUSED, const int32_t *valid MP_UNUSED, float *k_cache MP_UNUSED,
    float *v_cache MP_UNUSED, float *y MP_UNUSED, const int64_t n_batch MP_UNUSED,
    const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED, const float *blocks, const int64_t g,
    const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 1, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        qkv_rope_cache_2_finish(run, step, positions, sin, cos, lengths, valid, k_cache, v_cache, y, n_batch,
            n_capacity, n_seq, g, first + r, sums);
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
static void qkv_rope_cache_2_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, const int64_t *positions MP_UNUSED,
    const float *sin MP_UNUSED, const float *cos MP_UNUSED, const int32_t *lengths MP_UNUSED,
    const int32_t *valid MP_UNUSED, float *k_cache MP_UNUSED, float *v_cache MP_UNUSED, float *y MP_UNUSED,
    float *xt MP_UNUSED, float *partial MP_UNUSED, const int64_t n_batch MP_UNUSED,
    const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 32, PANEL = 16, PANELS = 1, GROUPS = 8, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 32, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        qkv_rope_cache_2_block(x + 0, norm_weight, 32, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) qkv_rope_cache_2_finish_rows(run, step, positions, sin, cos, lengths, valid, k_cache,
                v_cache, y, n_batch, n_capacity, n_seq, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL qkv_rope_cache_2(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED,
    const float *norm_weight MP_UNUSED, const int64_t *positions MP_UNUSED, const float *sin MP_UNUSED,
    const float *cos MP_UNUSED, const int32_t *lengths MP_UNUSED, const int32_t *valid MP_UNUSED,
    float *k_cache MP_UNUSED, float *v_cache MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 32, MOST = 6, GROUPS = 8, TAIL = 2 };
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_capacity MP_UNUSED = run->args->symbols[2];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];

    if (rows > MOST) {
        qkv_rope_cache_2_many(run, step, x, w, norm_weight, positions, sin, cos, lengths, valid, k_cache, v_cache,
            y, xt, partial, n_batch, n_capacity, n_seq, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        qkv_rope_cache_2_block(x + 0, norm_weight, 32, 0, R, rows, xs);
        qkv_rope_cache_2_few(run, step, x, w, norm_weight, positions, sin, cos, lengths, valid, k_cache, v_cache,
            y, xt, partial, n_batch, n_capacity, n_seq, xs, R, rows, mp_share(dealt, t, T), mp_share(dealt, t + 1,
            T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            qkv_rope_cache_2_few(run, step, x, w, norm_weight, positions, sin, cos, lengths, valid, k_cache,
                v_cache, y, xt, partial, n_batch, n_capacity, n_seq, xs, R, rows, g, g + 1);
    }
}

/* %transpose_1 = attention(%rope, %kv_update, %kv_update_1, _, %past_key_values.lengths) {causal=True,
 *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn */
#include "mp_attention.h"

/* Keys [from, to) for one query and all heads of its group: every row of keys and values is read once for all of them.
 * Leaves the weighted sums of values, the largest score and the total of the weights of each head. */
static void attention_3_few(const float *q, const float *k, const float *v, const int64_t n_batch MP_UNUSED,
    const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED, const int64_t b MP_UNUSED, const int64_t g,
    const int64_t s0,
    const int64_t from, const int64_t to, float *sums, float *top, float *total)
{
    enum { GROUP = 2, DIM = 8, VALUE = 8, CHUNK = 1024, ROWS = 4 };
    enum { LINE = 8, SUMS = 8, WIDE = 1, AHEAD = 32, FAR = 512, SOME = 32 };
    _Alignas(64) float query[GROUP * LINE], score[GROUP * (CHUNK + MP_LANES)];
    _Alignas(64) mp_vec part[GROUP * MP_LANES];
    const int64_t count = to - from;
    for (int64_t n = 0; n < GROUP; ++n) {
        const int64_t h = g * GROUP + n;
        for (int64_t i = 0; i < DIM; ++i) query[n * LINE + i] = q[b * n_seq * 32 + s0 * 32 + h * 8
            + i] * 0.510069727897644f;
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
                row[r] = (k + b * n_capacity * 16 + g * n_capacity * 8 + key * 8);
                mp_soon(row[r] + AHEAD * 8, 32);
                mp_later(row[r] + FAR * 8, 32);
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
                const float *row = (v + b * n_capacity * 16 + g * n_capacity * 8 + key * 8) + i;
                mp_soon(row + AHEAD * 8, WIDE * MP_LANES * sizeof *row);
                mp_later(row + FAR * 8, WIDE * MP_LANES * sizeof *row);
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
static void attention_3_join(float *y, const int64_t n_batch MP_UNUSED, const int64_t n_capacity MP_UNUSED,
    const int64_t n_seq MP_UNUSED, const int64_t b MP_UNUSED, const int64_t g, const int64_t s0,
    const float *partial, const int64_t chunks)
{
    enum { GROUP = 2, VALUE = 8, SUMS = 8, LEFT = GROUP * (SUMS + 2) };
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
            y[b * n_seq * 32 + s0 * 32 + h * 8 + i] = v_out;
        }
    }
}

/* Scores of a block of keys become weights: moves the maximum, and says how much of the earlier sums to keep. */
static void attention_3_weigh(float *score, float *top, float *total, float *keep, const int64_t width)
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
static void attention_3_strip(const float *q, const float *k, const float *v, float *y,
    const int64_t n_batch MP_UNUSED, const int64_t n_capacity MP_UNUSED, const int64_t n_seq MP_UNUSED,
    const int64_t b MP_UNUSED, const int64_t g, const int64_t c0,
    const int64_t filled, const int64_t before, const int64_t queries, const int64_t keys)
{
    enum { GROUP = 2, DIM = 8, VALUE = 8, SUMS = 8 };
    enum { COLS = 48, KEYS = 64, R = 4, V = 3, LONGER = DIM > SUMS ? DIM : SUMS };
    float query[DIM * COLS], score[KEYS * COLS], sums[SUMS * COLS], rows[KEYS * LONGER];
    float place[COLS], top[COLS], total[COLS], keep[COLS];
    const int64_t s0 MP_UNUSED = c0 / GROUP, s1 MP_UNUSED = (c0 + filled - 1) / GROUP,
        written MP_UNUSED = mp_min(keys, before + queries);
    for (int64_t c = 0; c < COLS; ++c) {
        const int64_t column = c0 + mp_min(c, filled - 1), row = column / GROUP,
            h MP_UNUSED = g * GROUP + column % GROUP;
        for (int64_t i = 0; i < DIM; ++i) query[i * COLS + c] = q[b * n_seq * 32 + row * 32 + h * 8
            + i] * 0.510069727897644f;
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
        const int64_t k_step = whole ? 8 : DIM;
        const float *k_rows = whole ? (k + b * n_capacity * 16 + g * n_capacity * 8 + j0 * 8) : rows;
        if (!whole)
        for (int64_t j = 0; j < (width + R - 1) / R * R; ++j) {
            const int64_t key MP_UNUSED = j0 + mp_min(j, width - 1);
            for (int64_t i = 0; i < DIM; i += MP_LANES) mp_vstore(rows + j * DIM + i,
                mp_vload_f32((k + b * n_capacity * 16 + g * n_capacity * 8 + key * 8) + i));
            /* Some column may not see a key behind the first query, which may hold anything: 0 * NaN must
             * not enter. Its values are made finite below, and those who see it get NaN from its score. */
            int odd = 0;
            for (int64_t i = 0; key > before + s0
                && i < VALUE; ++i) odd |= !isfinite(v[b * n_capacity * 16 + g * n_capacity * 8 + key * 8 + i]);
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
        attention_3_weigh(score, top, total, keep, width);
        const int64_t v_step = whole ? 8 : SUMS;
        const float *v_rows = whole ? (v + b * n_capacity * 16 + g * n_capacity * 8 + j0 * 8) : rows;
        if (!whole)
        for (int64_t j = 0; j < width; ++j) {
            const int64_t key MP_UNUSED = j0 + j;
            for (int64_t i = 0; i < VALUE; i += MP_LANES) mp_vstore(rows + j * SUMS + i,
                mp_vload_f32((v + b * n_capacity * 16 + g * n_capacity * 8 + key * 8) + i));
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
            y[b * n_seq * 32 + row * 32 + h * 8 + i] = v_out;
        }
    }
}

MP_KERNEL attention_3(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *q MP_UNUSED, const float *k MP_UNUSED, const float *v MP_UNUSED,
    const int32_t *past MP_UNUSED, float *y MP_UNUSED, float *partial MP_UNUSED)
{
    enum { HEADS = 4, KV = 2, GROUP = HEADS / KV };
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_capacity MP_UNUSED = run->args->symbols[2];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];

    const int64_t batches = n_batch, queries = n_seq, keys = n_capacity;
    if (queries > 2) {
        /* Strips of one head in a row, whose keys stay in the cache; later ones see more of them, so each head deals its
         * strips out from another thread on. */
        enum { COLS = 48 };
        const int64_t columns = queries * GROUP, strips = (columns + COLS - 1) / COLS,
            tasks = batches * KV * strips;
        for (int64_t task = t; task < tasks && !mp_stopping(run); task += T) {
            const int64_t line = task / strips, c0 = (task + line) % strips * COLS, g = line % KV, b = line / KV;
            const int64_t before = (int64_t)past[b];
            attention_3_strip(q, k, v, y, n_batch, n_capacity, n_seq, b, g, c0, mp_min(COLS, columns - c0), before,
                queries, keys);
        }
        return;
    }
    enum { LEAST = 256, CHUNK = 1024, SUMS = 8, LEFT = GROUP * (SUMS + 2) };
    int64_t chunks = 1; /* the same for every thread: all of them wait below, or none */
    for (int64_t row = 0; row < batches * queries; ++row) {
        const int64_t s1 MP_UNUSED = row % queries, b MP_UNUSED = row / queries, before = (int64_t)past[b],
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
        const int64_t before = (int64_t)past[b], written MP_UNUSED = mp_min(keys, before + queries),
            last = mp_min(written, before + s1 + 1);
        const int64_t chunk = mp_chunk(last, KV, LEAST, CHUNK), begin = task % chunks * chunk;
        const int64_t from = mp_max(begin, 0), to = mp_min(begin + chunk, last);
        float *sums = partial + task * LEFT, *top = sums + GROUP * SUMS, *total = top + GROUP;
        for (int n = 0; n < GROUP; ++n) {
            top[n] = -INFINITY;
            total[n] = 0.0f;
        }
        if (from < to) attention_3_few(q, k, v, n_batch, n_capacity, n_seq, b, g, s0, from, to, sums, top, total);
    }
    if (chunks > 1 || T > parts) mp_barrier(run, T); /* else each thread finishes what it began */
    const int64_t stop = mp_share(lines, t + 1, T);
    for (int64_t line = mp_share(lines, t, T); line < stop; ++line)
        attention_3_join(y, n_batch, n_capacity, n_seq, line / KV / queries, line % KV, line / KV % queries,
            partial + line * chunks * LEFT, chunks);
}

/* %add_2 = fused_linear(%reshape_6, %model.layers.0.self_attn.o_proj.weight, _, _, _, %embedding) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_4_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 32, PANEL = 16, WIDTH = 32 };
    const int64_t first = g * WIDTH, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        y[row * 32 + n] = (sum + e0[row * 32 + n]);
    }
}

/* tile[1][32] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_4_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
    enum { K = 32, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
    enum { K = 32 };
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
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 32, PANEL = 16, PANELS = 2, WIDTH = 32, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_4_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_4_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_4_finish(run, step, e0, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_4_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 2, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_4_finish(run, step, e0, y, g, first + r, sums);
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
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 32, PANEL = 16, PANELS = 2, GROUPS = 1, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 32, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_4_block(x + 0, 32, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_4_finish_rows(run, step, e0, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_4(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 32, MOST = 6, GROUPS = 1, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_4_many(run, step, x, w, e0, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_4_block(x + 0, 32, 0, R, rows, xs);
        fused_linear_4_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, mp_share(dealt, t, T), mp_share(dealt,
            t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_4_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight, _) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
 * monoplan/models/llama.py:0 in model.layers.0.mlp */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_5_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const int64_t g, const int64_t row, float *sums)
{
    enum { N = 48, PANEL = 16, WIDTH = 64 };
    enum { HALF = PANEL / 2 };
    for (int p = 0; p < WIDTH / PANEL; ++p) { /* half of a panel are gates, half of it what they let through */
        const int64_t first = (g * (WIDTH / PANEL) + p) * HALF, count = mp_min(8, N - first);
        const float *const gates = sums + p * PANEL, *const ups = gates + HALF;
        MP_SIMD
        for (int64_t j = 0; j < count; ++j) {
            const int64_t n = first + j;
            const float gate = gates[j], up = ups[j];
            y[row * 48 + n] = mp_swigluf(gate, up);
        }
    }
}

/* tile[1][64] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_5_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_5_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_5_block(const float *x, const float *norm_weight, const int64_t x_stride,
    const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 32 };
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
static void fused_linear_5_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 32, PANEL = 16, PANELS = 4, WIDTH = 64, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_5_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_5_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_5_finish(run, step, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_5_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 4, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_5_finish(run, step, y, g, first + r, sums);
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
static void fused_linear_5_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 32, PANEL = 16, PANELS = 4, GROUPS = 2, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 32, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_5_block(x + 0, norm_weight, 32, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_5_finish_rows(run, step, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_5(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED,
    const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int64_t rows)
{
    enum { K = 32, MOST = 6, GROUPS = 2, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_5_many(run, step, x, w, norm_weight, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_5_block(x + 0, norm_weight, 32, 0, R, rows, xs);
        fused_linear_5_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, mp_share(dealt, t, T),
            mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_5_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
 *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_6_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const int64_t g, const int64_t row, float *sums)
{
    enum { N = 32, PANEL = 16, WIDTH = 32 };
    const int64_t first = g * WIDTH, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        y[row * 32 + n] = (sum + e0[row * 32 + n]);
    }
}

/* tile[1][32] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_6_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 48, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_6_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 48, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_6_block(const float *x, const int64_t x_stride, const int64_t first, const int R,
    const int64_t rows, float *xt)
{
    enum { K = 48 };
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
static void fused_linear_6_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 48, PANEL = 16, PANELS = 2, WIDTH = 32, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_6_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_6_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_6_finish(run, step, e0, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_6_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 2, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_6_finish(run, step, e0, y, g, first + r, sums);
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
static void fused_linear_6_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *e0 MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 48, PANEL = 16, PANELS = 2, GROUPS = 1, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 48, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_6_block(x + 0, 48, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_6_finish_rows(run, step, e0, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_6(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED, const float *e0 MP_UNUSED,
    float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED, const int64_t rows)
{
    enum { K = 48, MOST = 6, GROUPS = 1, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_6_many(run, step, x, w, e0, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_6_block(x + 0, 48, 0, R, rows, xs);
        fused_linear_6_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, mp_share(dealt, t, T), mp_share(dealt,
            t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_6_few(run, step, x, w, e0, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %add_6 = add(%past_key_values.lengths, %num_valid) : i32[batch]
 * monoplan/models/llama.py:0 in model */
MP_KERNEL add_10(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED, const int step MP_UNUSED,
    const int32_t *x0 MP_UNUSED, const int32_t *x1 MP_UNUSED, int32_t *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n = n_batch;
    const int64_t end = mp_share(n, t + 1, T);
    MP_SIMD
    for (int64_t i = mp_share(n, t, T); i < end; ++i)
        y[i] = (x0[i] + x1[i]);
}

/* %sub_1 = pointwise(%num_valid) {expr="sub(x0, 1)"} : i32[batch]
 * monoplan/models/llama.py:0 in model */
MP_KERNEL pointwise_11(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const int32_t *x0 MP_UNUSED, int32_t *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n = n_batch;
    const int64_t end = mp_share(n, t + 1, T);
    MP_SIMD
    for (int64_t i = mp_share(n, t, T); i < end; ++i)
        y[i] = (x0[i] - 1);
}

/* %select_rows_1 = select_rows(%add_4, %sub_1) : f32[batch, 1, 32]
 * monoplan/models/llama.py:0 in model */
MP_KERNEL select_rows_12(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const int32_t *index MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    const int64_t outer = n_batch, inner = 32, limit = n_seq;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        int64_t at = (int64_t)index[o0];
        if (at < 0 || at >= limit) {
            mp_fail(run, MP_INDEX, step, o, at, limit);
            if (limit == 0) continue;
            at = 0;
        }
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            y[o0 * 32 + i0] = x[o0 * n_seq * 32 + at * 32 + i0];
        }
    }
}

/* %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight, _) {norm="rms", eps=1e-06,
 *     gated=False, expr="x0"} : f32[batch, 1, 50]
 * monoplan/models/llama.py:0 in lm_head */
#include "mp_format_f32.h"

/* Row `row` of group g: what follows the product. */
static void fused_linear_15_finish(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const int64_t g, const int64_t row, float *sums)
{
    enum { N = 50, PANEL = 16, WIDTH = 32 };
    const int64_t first = g * WIDTH, count = mp_min(32, N - first);
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        y[row * 50 + n] = sum;
    }
}

/* tile[1][32] = 1 row, as xt[k][row], times a panel of w, which is asked for twice: into L2 long before it is read,
 * into L1 shortly before. Past its end lies the panel that is read next. */
static void fused_linear_15_rows1(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 1, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_15_rows6(const float *xt, const float *w, float *tile)
{
    enum { K = 32, PANEL = 16, V = 2, R = 6, LINE = 1, FAR = 512, NEAR = 64 };
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
static void fused_linear_15_block(const float *x, const float *norm_weight, const int64_t x_stride,
    const int64_t first, const int R, const int64_t rows, float *xt)
{
    enum { K = 32 };
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
static void fused_linear_15_few(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const float *xs, const int R, const int64_t rows, int64_t g, const int64_t last)
{
    enum { K = 32, PANEL = 16, PANELS = 2, WIDTH = 32, MOST = 6 };
    float tile[MOST * WIDTH];
    for (; g < last; ++g) {
        for (int p = 0; p < PANELS; ++p) {
            const float *const panel = w + (g * PANELS + p) * K * PANEL;
            if (R == 1) fused_linear_15_rows1(xs, panel, tile + p * PANEL);
            else fused_linear_15_rows6(xs, panel, tile + p * PANEL);
        }
        for (int64_t r = 0; r < rows; ++r) fused_linear_15_finish(run, step, y, g, r, tile + r * WIDTH);
    }
}

/* Rows [0, rows) of the chunk that begins at row `first`; their sums lie as blocks[panel][row][column]. */
static void fused_linear_15_finish_rows(mp_run *run MP_UNUSED, const int step MP_UNUSED, float *y MP_UNUSED,
    const float *blocks, const int64_t g, const int64_t first, const int64_t rows)
{
    enum { PANEL = 16, PANELS = 2, ROWS = 516 };
    for (int64_t r = 0; r < rows; ++r) {
        _Alignas(64) float sums[PANELS * PANEL];
        for (int p = 0; p < PANELS; ++p) memcpy(sums + p * PANEL, blocks + (p * ROWS + r) * PANEL,
            sizeof(float) * PANEL);
        fused_linear_15_finish(run, step, y, g, first + r, sums);
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
static void fused_linear_15_many(mp_run *run MP_UNUSED, const int step MP_UNUSED, const float *x MP_UNUSED,
    const float *w MP_UNUSED, const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED,
    float *partial MP_UNUSED, const int t, const int T, const int64_t rows)
{
    enum { K = 32, PANEL = 16, PANELS = 2, GROUPS = 2, BLOCK = 6, CHUNK = 516, BLOCKS = CHUNK / BLOCK };
    enum { SLICE = 32, STRIP = 384, SLOTS = 1 };
    enum { SIZE = PANELS * CHUNK * PANEL, ABREAST = 1 };
    const int64_t all = (rows + BLOCK - 1) / BLOCK;
    const int parts = mp_parts(T, rows / 96), own = t % parts, seat = t / parts, seats = T / parts;
    const int64_t from = mp_share(all, own, parts), held = mp_share(all, own + 1, parts) - from;
    float *const xs = xt, *const sums = partial + (int64_t)t * SLOTS * SIZE;
    for (int64_t b = from + mp_share(held, seat, seats); b < from + mp_share(held, seat + 1, seats); ++b)
        fused_linear_15_block(x + 0, norm_weight, 32, b * BLOCK, BLOCK, rows, xs + b * BLOCK * K);
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
            if (stop == K) fused_linear_15_finish_rows(run, step, y, group, g, b0 * BLOCK, filled);
        }
    }
}

MP_KERNEL fused_linear_15(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *w MP_UNUSED,
    const float *norm_weight MP_UNUSED, float *y MP_UNUSED, float *xt MP_UNUSED, float *partial MP_UNUSED,
    const int64_t rows)
{
    enum { K = 32, MOST = 6, GROUPS = 2, TAIL = 0 };

    if (rows > MOST) {
        fused_linear_15_many(run, step, x, w, norm_weight, y, xt, partial, t, T, rows);
    } else if (rows > 0) { /* of no rows the first must not be written either */
        /* Each thread makes its own block of x, which is cheaper than waiting for another. */
        const int R = rows <= 1 ? 1 : 6;
        const int64_t dealt = T == 1 ? GROUPS : GROUPS - TAIL;
        float *xs = xt + (int64_t)t * K * MOST;
        fused_linear_15_block(x + 0, norm_weight, 32, 0, R, rows, xs);
        fused_linear_15_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, mp_share(dealt, t, T),
            mp_share(dealt, t + 1, T));
        /* The last groups go to whoever is done first: a core that was disturbed holds up nobody. */
        for (int64_t g = dealt + mp_take(run); g < GROUPS; g = dealt + mp_take(run))
            fused_linear_15_few(run, step, x, w, norm_weight, y, xt, partial, xs, R, rows, g, g + 1);
    }
}

/* %repetition_penalty = repetition_penalty(%reshape_11, %history, %history_count, %penalty) : f32[batch, 50]
 * monoplan/models/generate/generation.py:0 */
MP_KERNEL repetition_penalty_16(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const int64_t *history MP_UNUSED,
    const int32_t *counts MP_UNUSED, const float *penalty MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_hist MP_UNUSED = run->args->symbols[3];
const int64_t rows = n_batch, vocabulary = 50, room = n_hist;
    const int64_t end = mp_share(rows, t + 1, T);
    for (int64_t o0 = mp_share(rows, t, T); o0 < end; ++o0) {
        for (int64_t i = 0; i < vocabulary; ++i) {
            const float v = x[o0 * 50 + i];
            y[o0 * 50 + i] = v;
        }
        const int64_t seen = mp_min((int64_t)counts[o0], room);
        const float penalty_value = penalty[o0];
        for (int64_t j = 0; j < seen; ++j) {
            const int64_t i = (int64_t)history[o0 * n_hist + j];
            if (i < 0 || i >= vocabulary) continue;
            /* From the untouched input, so that a token seen twice is penalized once. */
            const float x0 = x[o0 * 50 + i], v = x0 > 0 ? x0 / penalty_value : x0 * penalty_value;
            y[o0 * 50 + i] = v;
        }
    }
}

/* %random_sample = random_sample(%repetition_penalty, %random_val, %top_p, %top_k, %temperature, %min_p) :
 *     i64[batch]
 * monoplan/models/generate/generation.py:0 */
/* Whether logit a goes before logit b: larger first, the lower id among equals. */
MP_INLINE int random_sample_17_before(const double *w, int64_t a,
    int64_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); }

static void random_sample_17_sink(int64_t *heap, int64_t n, int64_t i, const double *w)
{
    const int64_t item = heap[i];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && random_sample_17_before(w, heap[child + 1], heap[child])) ++child;
        if (!random_sample_17_before(w, heap[child], item)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = item;
}

MP_KERNEL random_sample_17(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *random_val MP_UNUSED,
    const float *top_p MP_UNUSED, const int32_t *top_k MP_UNUSED, const float *temperature MP_UNUSED,
    const float *min_p MP_UNUSED, int64_t *y MP_UNUSED, int64_t *heap MP_UNUSED, double *weights MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
const int64_t rows = n_batch, vocabulary = 50;
    const int64_t end = mp_share(rows, t + 1, T);
    for (int64_t o = mp_share(rows, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        double *w = weights + o * vocabulary;
        int64_t *h = heap + o * vocabulary;
        int64_t best = 0;
        for (int64_t i = 0; i < vocabulary; ++i) {
            w[i] = (double)x[o0 * 50 + i];
            if (w[i] > w[best]) best = i;
        }
        const double temperature_value = temperature[o0], limit_p = top_p[o0], least = min_p[o0];
        int64_t token = best;
        if (temperature_value > 0) {
            const double top = w[best];
            const int64_t wanted = (int64_t)top_k[o0];
            const int64_t keep = wanted > 0 && wanted < vocabulary ? wanted : vocabulary;
            double total = 0;
            if (keep == vocabulary)
                for (int64_t i = 0; i < vocabulary; ++i) total += exp((w[i] - top) / temperature_value);
            for (int64_t i = 0; i < vocabulary; ++i) h[i] = i;
            for (int64_t i = vocabulary / 2 - 1; i >= 0; --i) random_sample_17_sink(h, vocabulary, i, w);
            /* Taken tokens gather at the end of the heap: number j lies at vocabulary - 1 - j. */
            int64_t left = vocabulary, taken = 0;
            double mass = 0, kept_mass = 0;
            while (taken < keep) {
                const int64_t id = h[0];
                const double weight = exp((w[id] - top) / temperature_value);
                h[0] = h[--left];
                if (left > 0) random_sample_17_sink(h, left, 0, w);
                h[left] = id;
                mass += weight;
                ++taken;
                if (keep == vocabulary && limit_p < 1 && mass >= limit_p * total) break;
                if (keep == vocabulary && weight < least && limit_p >= 1) break;
            }
            if (keep < vocabulary) total = mass;
            int64_t count = 0;
            for (double sum = 0; count < taken; ++count) {
                const double weight = exp((w[h[vocabulary - 1 - count]] - top) / temperature_value);
                if (weight < least) break;
                kept_mass += weight;
                sum += weight;
                if (limit_p < 1 && sum >= limit_p * total) { ++count; break; }
            }
            count = mp_max(count, 1);
            const double goal = random_val[o0] * kept_mass;
            double sum = 0;
            for (int64_t j = 0; j < count; ++j) {
                token = h[vocabulary - 1 - j];
                sum += exp((w[token] - top) / temperature_value);
                if (sum > goal) break;
            }
        }
        y[o0] = token;
    }
}

/* %max = max(%reshape_11) {axes=(-1,), keepdims=True} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
MP_KERNEL max_18(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED, const int step MP_UNUSED,
    const float *x0 MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t outer = n_batch, inner = 50;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        float acc = 0;
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            const float v = x0[o0 * 50 + i0];
            acc = i == 0 ? v : mp_maximum_f32(acc, v);
        }
        y[o0] = (float)(acc);
    }
}

/* %take_along = take_along(%reshape_11, %reshape_12) {axis=-1} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
MP_KERNEL take_along_19(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const int64_t *index MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t outer = n_batch, inner = 1, limit = 50;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        const int64_t o1 MP_UNUSED = o % (1);
        int64_t at = (int64_t)index[o0 + o1];
        if (at < 0 || at >= limit) {
            mp_fail(run, MP_INDEX, step, o, at, limit);
            if (limit == 0) continue;
            at = 0;
        }
        for (int64_t i = 0; i < inner; ++i) {
            y[o0 + o1] = x[o0 * 50 + at];
        }
    }
}

/* %sub_3 = fused_reduce(%reshape_11, %max, %take_along, %max) {inputs=2, reduce="sum", axes=(-1,), keepdims=True,
 *     pre="exp(sub(x0, x1))", post="sub(x1, add(log(x0), x2))"} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
MP_KERNEL fused_reduce_20(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x0 MP_UNUSED, const float *x1 MP_UNUSED, const float *e0 MP_UNUSED,
    const float *e1 MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t outer = n_batch, inner = 50;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        double acc = 0;
        MP_SIMD_SUM(acc)
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            const float v = mp_expf((x0[o0 * 50 + i0] - x1[o0]));
            acc = (double)(acc + (double)v);
        }
        y[o0] = (e0[o0] - (logf((float)(acc)) + e1[o0]));
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
    /* ---- model, model.embed_tokens ---- */
    const float *const w_embed_tokens = param[0]; /* model.embed_tokens.weight f32[50, 32] */
    /* 0: %minimum = pointwise(%arange, %reshape, %reshape_2) {expr="minimum(add(cast(x1, dtype=i64), x0),
     *     sub(add(x1, x2), 1))"} : i64[batch, seq]  (monoplan/models/llama.py:0 in model) */
    pointwise_0(run, t, T, 0, (const int32_t *)in[5], (const int32_t *)in[6], (int64_t *)(arena + at[0]));
    /* 1: %embedding = embedding(%input_ids, %model.embed_tokens.weight) : f32[batch, seq, 32]
     *     (monoplan/models/llama.py:0 in model.embed_tokens) */
    embedding_1(run, t, T, 1, w_embed_tokens, (const int64_t *)in[0], (float *)(arena + at[1]));
    /* ---- model.layers.0 ---- */
    const void *const w0_q_k_v = param[2]; /* model.layers.0.self_attn.q_proj|k_proj|v_proj.weight f32[64, 32] */
    const float *const w0_input_layernorm = param[1]; /* model.layers.0.input_layernorm.weight f32[32] */
    const float *const w_rotary_emb_sin = param[3]; /* model.rotary_emb.sin f32[64, 4] */
    const float *const w_rotary_emb_cos = param[4]; /* model.rotary_emb.cos f32[64, 4] */
    const void *const w0_o_proj = param[5]; /* model.layers.0.self_attn.o_proj.weight f32[32, 32] */
    const void *const w0_gate_up = param[7]; /* model.layers.0.mlp.gate_proj|up_proj.weight f32[96, 32] */
    /* model.layers.0.post_attention_layernorm.weight f32[32] */
    const float *const w0_post_attention_layernorm = param[6];
    const void *const w0_down_proj = param[8]; /* model.layers.0.mlp.down_proj.weight f32[32, 48] */
    if (mp_phase_before(run, w0_q_k_v, 6, n_batch * n_seq <= 6 ? 2048 : 0, &t, &T)) return;
    /* 2: %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
     *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid,
     *     _, %model.layers.0.input_layernorm.weight, _, _, _) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms",
     *     eps=1e-06, qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
     *     (monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj) */
    qkv_rope_cache_2(run, t, T, 2, (const float *)(arena + at[1]), w0_q_k_v, w0_input_layernorm,
        (const int64_t *)(arena + at[0]), w_rotary_emb_sin, w_rotary_emb_cos, (const int32_t *)in[5],
        (const int32_t *)in[6], (float *)in[1], (float *)in[3], (float *)(arena + at[2]), (float *)(arena + at[4]),
        (float *)(arena + at[3]), n_batch * n_seq);
    if (mp_phase(run, &t, &T)) return;
    /* 3: %transpose_1 = attention(%rope, %kv_update, %kv_update_1, _, %past_key_values.lengths) {causal=True,
     *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
     *     (monoplan/models/llama.py:0 in model.layers.0.self_attn) */
    attention_3(run, t, T, 3, (const float *)(arena + at[2]), (const float *)in[1], (const float *)in[3],
        (const int32_t *)in[5], (float *)(arena + at[4]), (float *)(arena + at[3]));
    if (mp_phase_before(run, w0_o_proj, 1, n_batch * n_seq <= 6 ? 4096 : 0, &t, &T)) return;
    /* 4: %add_2 = fused_linear(%reshape_6, %model.layers.0.self_attn.o_proj.weight, _, _, _, %embedding)
     *     {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
     *     (monoplan/models/llama.py:0 in model.layers.0) */
    fused_linear_4(run, t, T, 4, (const float *)(arena + at[4]), w0_o_proj, (const float *)(arena + at[1]),
        (float *)(arena + at[1]), (float *)(arena + at[2]), (float *)(arena + at[3]), n_batch * n_seq);
    if (mp_phase_before(run, w0_gate_up, 2, n_batch * n_seq <= 6 ? 8192 : 0, &t, &T)) return;
    /* 5: %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight, _)
     *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
     *     (monoplan/models/llama.py:0 in model.layers.0.mlp) */
    fused_linear_5(run, t, T, 5, (const float *)(arena + at[1]), w0_gate_up, w0_post_attention_layernorm,
        (float *)(arena + at[2]), (float *)(arena + at[4]), (float *)(arena + at[3]), n_batch * n_seq);
    if (mp_phase_before(run, w0_down_proj, 1, n_batch * n_seq <= 6 ? 6144 : 0, &t, &T)) return;
    /* 6: %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
     *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]  (monoplan/models/llama.py:0 in model.layers.0) */
    fused_linear_6(run, t, T, 6, (const float *)(arena + at[2]), w0_down_proj, (const float *)(arena + at[1]),
        (float *)(arena + at[1]), (float *)(arena + at[4]), (float *)(arena + at[3]), n_batch * n_seq);
    /* ---- model.layers.1 ---- */
    const void *const w1_q_k_v = param[10]; /* model.layers.1.self_attn.q_proj|k_proj|v_proj.weight f32[64, 32] */
    const float *const w1_input_layernorm = param[9]; /* model.layers.1.input_layernorm.weight f32[32] */
    const void *const w1_o_proj = param[11]; /* model.layers.1.self_attn.o_proj.weight f32[32, 32] */
    if (mp_phase_before(run, w1_q_k_v, 6, n_batch * n_seq <= 6 ? 2048 : 0, &t, &T)) return;
    /* 7: %rope_2, %kv_update_2, %kv_update_3 = qkv_rope_cache(%add_3, %concat_2, %minimum, %model.rotary_emb.sin,
     *     %model.rotary_emb.cos, %past_key_values.k.1, %past_key_values.v.1, %past_key_values.lengths, %num_valid,
     *     _, %model.layers.1.input_layernorm.weight, _, _, _) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms",
     *     eps=1e-06, qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
     *     (monoplan/models/llama.py:0 in model.layers.1.self_attn.q_proj) */
    qkv_rope_cache_2(run, t, T, 7, (const float *)(arena + at[1]), w1_q_k_v, w1_input_layernorm,
        (const int64_t *)(arena + at[0]), w_rotary_emb_sin, w_rotary_emb_cos, (const int32_t *)in[5],
        (const int32_t *)in[6], (float *)in[2], (float *)in[4], (float *)(arena + at[2]), (float *)(arena + at[4]),
        (float *)(arena + at[3]), n_batch * n_seq);
    if (mp_phase(run, &t, &T)) return;
    /* 8: %transpose_3 = attention(%rope_2, %kv_update_2, %kv_update_3, _, %past_key_values.lengths) {causal=True,
     *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
     *     (monoplan/models/llama.py:0 in model.layers.1.self_attn) */
    attention_3(run, t, T, 8, (const float *)(arena + at[2]), (const float *)in[2], (const float *)in[4],
        (const int32_t *)in[5], (float *)(arena + at[4]), (float *)(arena + at[3]));
    if (mp_phase_before(run, w1_o_proj, 1, n_batch * n_seq <= 6 ? 4096 : 0, &t, &T)) return;
    /* 9: %add_4 = fused_linear(%reshape_10, %model.layers.1.self_attn.o_proj.weight, _, _, _, %add_3)
     *     {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
     *     (monoplan/models/llama.py:0 in model.layers.1) */
    fused_linear_4(run, t, T, 9, (const float *)(arena + at[4]), w1_o_proj, (const float *)(arena + at[1]),
        (float *)(arena + at[1]), (float *)(arena + at[2]), (float *)(arena + at[3]), n_batch * n_seq);
    /* ---- model ---- */
    /* 10: %add_6 = add(%past_key_values.lengths, %num_valid) : i32[batch]  (monoplan/models/llama.py:0 in model) */
    add_10(run, t, T, 10, (const int32_t *)in[5], (const int32_t *)in[6], (int32_t *)out[7]);
    /* 11: %sub_1 = pointwise(%num_valid) {expr="sub(x0, 1)"} : i32[batch]  (monoplan/models/llama.py:0 in model) */
    pointwise_11(run, t, T, 11, (const int32_t *)in[6], (int32_t *)(arena + at[0]));
    if (mp_phase(run, &t, &T)) return;
    /* 12: %select_rows_1 = select_rows(%add_4, %sub_1) : f32[batch, 1, 32]  (monoplan/models/llama.py:0 in model) */
    select_rows_12(run, t, T, 12, (const float *)(arena + at[1]), (const int32_t *)(arena + at[0]),
        (float *)(arena + at[2]));
    /* ---- model.layers.1 ---- */
    const void *const w1_gate_up = param[13]; /* model.layers.1.mlp.gate_proj|up_proj.weight f32[96, 32] */
    /* model.layers.1.post_attention_layernorm.weight f32[32] */
    const float *const w1_post_attention_layernorm = param[12];
    const void *const w1_down_proj = param[14]; /* model.layers.1.mlp.down_proj.weight f32[32, 48] */
    if (mp_phase_before(run, w1_gate_up, 2, n_batch <= 6 ? 8192 : 0, &t, &T)) return;
    /* 13: %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight, _)
     *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, 1, 48]
     *     (monoplan/models/llama.py:0 in model.layers.1.mlp) */
    fused_linear_5(run, t, T, 13, (const float *)(arena + at[2]), w1_gate_up, w1_post_attention_layernorm,
        (float *)(arena + at[0]), (float *)(arena + at[1]), (float *)(arena + at[3]), n_batch);
    if (mp_phase_before(run, w1_down_proj, 1, n_batch <= 6 ? 6144 : 0, &t, &T)) return;
    /* 14: %add_8 = fused_linear(%swiglu, %model.layers.1.mlp.down_proj.weight, _, _, _, %select_rows_1)
     *     {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, 1, 32]  (monoplan/models/llama.py:0
     *     in model.layers.1) */
    fused_linear_6(run, t, T, 14, (const float *)(arena + at[0]), w1_down_proj, (const float *)(arena + at[2]),
        (float *)(arena + at[2]), (float *)(arena + at[1]), (float *)(arena + at[3]), n_batch);
    /* ---- lm_head, repetition_penalty, random_sample, max, ... ---- */
    const void *const w_lm_head = param[16]; /* lm_head.weight f32[50, 32] */
    const float *const w_norm = param[15]; /* model.norm.weight f32[32] */
    if (mp_phase_before(run, w_lm_head, 2, n_batch <= 6 ? 4096 : 0, &t, &T)) return;
    /* 15: %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight, _) {norm="rms", eps=1e-06,
     *     gated=False, expr="x0"} : f32[batch, 1, 50]  (monoplan/models/llama.py:0 in lm_head) */
    fused_linear_15(run, t, T, 15, (const float *)(arena + at[2]), w_lm_head, w_norm, (float *)out[2],
        (float *)(arena + at[1]), (float *)(arena + at[3]), n_batch);
    if (mp_phase(run, &t, &T)) return;
    /* 16: %repetition_penalty = repetition_penalty(%reshape_11, %history, %history_count, %penalty) : f32[batch,
     *     50]  (monoplan/models/generate/generation.py:0) */
    repetition_penalty_16(run, t, T, 16, (const float *)out[2], (const int64_t *)in[7], (const int32_t *)in[8],
        (const float *)in[9], (float *)(arena + at[0]));
    if (mp_phase(run, &t, &T)) return;
    /* 17: %random_sample = random_sample(%repetition_penalty, %random_val, %top_p, %top_k, %temperature, %min_p) :
     *     i64[batch]  (monoplan/models/generate/generation.py:0) */
    random_sample_17(run, t, T, 17, (const float *)(arena + at[0]), (const float *)in[10], (const float *)in[11],
        (const int32_t *)in[12], (const float *)in[13], (const float *)in[14], (int64_t *)out[0],
        (int64_t *)(arena + at[1]), (double *)(arena + at[2]));
    if (mp_phase(run, &t, &T)) return;
    /* 18: %max = max(%reshape_11) {axes=(-1,), keepdims=True} : f32[batch, 1]
     *     (monoplan/models/generate/generation.py:0) */
    max_18(run, t, T, 18, (const float *)out[2], (float *)(arena + at[0]));
    /* 19: %take_along = take_along(%reshape_11, %reshape_12) {axis=-1} : f32[batch, 1]
     *     (monoplan/models/generate/generation.py:0) */
    take_along_19(run, t, T, 19, (const float *)out[2], (const int64_t *)out[0], (float *)(arena + at[1]));
    if (mp_phase(run, &t, &T)) return;
    /* 20: %sub_3 = fused_reduce(%reshape_11, %max, %take_along, %max) {inputs=2, reduce="sum", axes=(-1,),
     *     keepdims=True, pre="exp(sub(x0, x1))", post="sub(x1, add(log(x0), x2))"} : f32[batch, 1]
     *     (monoplan/models/generate/generation.py:0) */
    fused_reduce_20(run, t, T, 20, (const float *)out[2], (const float *)(arena + at[0]),
        (const float *)(arena + at[1]), (const float *)(arena + at[0]), (float *)out[1]);
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
