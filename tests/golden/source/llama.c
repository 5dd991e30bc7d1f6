/* GenerationStep: one plan, written by monoplan test for cpu (avx2).
 * 21 kernels; symbols: batch, seq, capacity, hist */
#include "mp_plan.h"
#include "mp_functions_more.h"
#include "mp_linear.h"
#include "mp_format_f32.h"
MP_PANEL_FUNCTION(mp_panel_f32_1, 1, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)
MP_PANEL_FUNCTION(mp_panel_f32_6, 6, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)

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
 *     %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj */
typedef struct {
    const float *x; const float *norm_weight; const int64_t *positions; const float *sin; const float *cos;
    const int32_t *lengths; const int32_t *valid; float *k_cache; float *v_cache; float *y; mp_run *run; int step;
    int writes; int64_t n_batch; int64_t n_capacity; int64_t n_seq;
} qkv_rope_cache_2_args;

MP_INLINE float qkv_rope_cache_2_value(const void *c, const int64_t row, const int64_t i)
{
    const qkv_rope_cache_2_args a = *(const qkv_rope_cache_2_args *)c;
    return a.x[row * 32 + i];
}

MP_INLINE float qkv_rope_cache_2_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const qkv_rope_cache_2_args a = *(const qkv_rope_cache_2_args *)c;
    return (x * s.scale) * a.norm_weight[i];
}

static void qkv_rope_cache_2_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const qkv_rope_cache_2_args a = *(const qkv_rope_cache_2_args *)c;
    const int64_t n_batch MP_UNUSED = a.n_batch;
    const int64_t n_capacity MP_UNUSED = a.n_capacity;
    const int64_t n_seq MP_UNUSED = a.n_seq;
    /* One head: bias, norm, rotation; q goes to y, k and v to row `at` of their caches. */
    enum { DIM = 8, HEADS = 4, KV = 2, HALF = 4 };
    const int64_t head = g, seq = n_seq, b0 = row < seq ? 0 : (uint32_t)row / (uint32_t)seq,
        s0 = row - b0 * seq; /* 64 bits divide slowly */
    if (head < HEADS + KV) {
        const int64_t angle = a.writes ? (int64_t)a.positions[b0 * n_seq + s0] : 0;
        MP_SIMD
        for (int64_t i = 0; i < HALF; ++i) {
            const float sine = a.sin[angle * 4 + i], cosine = a.cos[angle * 4 + i];
            const float u = sums[i], v = sums[i + HALF];
            sums[i] = u * cosine - v * sine;
            sums[i + HALF] = u * sine + v * cosine;
        }
    }
    if (head < HEADS) {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) a.y[b0 * n_seq * 32 + s0 * 32 + head * 8 + j] = sums[j];
        return;
    }
    const int64_t at = (int64_t)a.lengths[b0] + s0;
    const int64_t kv MP_UNUSED = head < HEADS + KV ? head - HEADS : head - HEADS - KV;
    if (!a.writes || s0 >= (int64_t)a.valid[b0]) return;
    if (head < HEADS + KV) {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) a.k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8
            + j] = sums[j];
    } else {
        MP_SIMD
        for (int64_t j = 0; j < DIM; ++j) a.v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8
            + j] = sums[j];
    }
}

/* Whether all rows can be written to the caches: every worker looks at all of them, so either all are written or none. */
MP_INLINE int qkv_rope_cache_2_fits(const void *c)
{
    const qkv_rope_cache_2_args a = *(const qkv_rope_cache_2_args *)c;
    const int64_t n_batch MP_UNUSED = a.n_batch;
    const int64_t n_capacity MP_UNUSED = a.n_capacity;
    const int64_t n_seq MP_UNUSED = a.n_seq;
    const int64_t batch = n_batch, seq = n_seq, capacity = n_capacity, positions = 64;
    int fits = !mp_went_wrong(a.run);
    for (int64_t b0 = 0; b0 < batch; ++b0) {
        const int64_t start = (int64_t)a.lengths[b0], count = (int64_t)a.valid[b0];
        if (!mp_fits(a.run, a.step, b0, start, count, seq, capacity)) fits = 0;
        for (int64_t s0 = 0; s0 < seq; ++s0) {
            const int64_t angle = (int64_t)a.positions[b0 * n_seq + s0];
            if (angle >= 0 && angle < positions) continue;
            mp_fail(a.run, MP_POSITION, a.step, b0 * seq + s0, angle, positions);
            fits = 0;
        }
    }
    return fits;
}

MP_ROW_FUNCTION(qkv_rope_cache_2, 32, .norm = MP_RMS_NORM, .eps = 9.999999974752427e-07f,
    .value = qkv_rope_cache_2_value, .normed = qkv_rope_cache_2_normed)

MP_KERNEL qkv_rope_cache_2(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *norm_weight, const int64_t *positions, const float *sin, const float *cos,
    const int32_t *lengths, const int32_t *valid, float *k_cache, float *v_cache, float *y, float *xt,
    float *partial, const int64_t rows)
{
    qkv_rope_cache_2_args a = {x, norm_weight, positions, sin, cos, lengths, valid, k_cache, v_cache, y, run, step,
        0, run->args->symbols[0], run->args->symbols[2], run->args->symbols[1]};
    a.writes = qkv_rope_cache_2_fits(&a);
    _Alignas(64) float sums[96];
    static const mp_linear shape = {
        .K = 32, .panel = 16, .row_bytes = 64, .panels = 1, .groups = 8, .few = {1, 6}, .tail = 2,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 32, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = qkv_rope_cache_2_row,
            .finish = qkv_rope_cache_2_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %transpose_1 = attention(%rope, %kv_update, %kv_update_1, _, %past_key_values.lengths) {causal=True,
 *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn */
#include "mp_attention.h"

MP_KERNEL attention_3(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *q MP_UNUSED, const float *k MP_UNUSED, const float *v MP_UNUSED,
    const int32_t *past MP_UNUSED, float *y MP_UNUSED, float *partial MP_UNUSED)
{
    enum { KV = 2, GROUP = 2, DIM = 8, VALUE = 8 };
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_capacity MP_UNUSED = run->args->symbols[2];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    const mp_attention a = {
        .batches = n_batch, .queries = n_seq, .keys = n_capacity,
        .kv_heads = KV, .group = GROUP, .dim = DIM, .value_dim = VALUE,
        .causal = 1, .window = 0, .scale = 0.3535533905932738, .softcap = 0.0,
        .q = MP_STORED(q, MP_F32, n_seq * 32, 32, 8, 1),
        .k = MP_STORED(k, MP_F32, n_capacity * 16, n_capacity * 8, 8, 1),
        .v = MP_STORED(v, MP_F32, n_capacity * 16, n_capacity * 8, 8, 1),
        .past = MP_STORED(past, MP_I32, 1, 0, 0, 0),
        .y = MP_STORED(y, MP_F32, n_seq * 32, 32, 8, 1),
        .has_past = 1,
        .least = 256, .chunk = 1024, .rows = 4, .wide = 1, .pairs = 1, .ahead = 32, .far = 512, .prefetch_keys = 1,
            .partial = partial,
        .columns = 48, .block = 64, .tile_rows = 4, .tile_vectors = 3,
    };
    if (a.queries > 8) {
        _Alignas(64) float room[MP_STRIP_ROOM(DIM, 8, 48, 64)];
        mp_attention_many(run, t, T, &a, room);
    }
    if (a.queries <= 8) {
        _Alignas(64) float room[MP_FEW_ROOM(GROUP, 8, 8, 4, 1024)];
        mp_attention_few(run, t, T, &a, room);
    }
}

/* %add_2 = fused_linear(%reshape_6, %model.layers.0.self_attn.o_proj.weight, _, _, _, %embedding) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
typedef struct {
    const float *x; const float *e0; float *y;
} fused_linear_4_args;

MP_INLINE float fused_linear_4_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_4_args a = *(const fused_linear_4_args *)c;
    return a.x[row * 32 + i];
}

static void fused_linear_4_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_4_args a = *(const fused_linear_4_args *)c;
    const int64_t first = g * 32, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        a.y[row * 32 + n] = (sum + a.e0[row * 32 + n]);
    }
}

MP_ROW_FUNCTION(fused_linear_4, 32, .norm = MP_NO_NORM, .eps = 0.0f, .value = fused_linear_4_value)

MP_KERNEL fused_linear_4(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *e0, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_4_args a = {x, e0, y};
    _Alignas(64) float sums[192];
    static const mp_linear shape = {
        .K = 32, .panel = 16, .row_bytes = 64, .panels = 2, .groups = 1, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 32, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_4_row,
            .finish = fused_linear_4_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
 * monoplan/models/llama.py:0 in model.layers.0.mlp */
typedef struct {
    const float *x; const float *norm_weight; float *y;
} fused_linear_5_args;

MP_INLINE float fused_linear_5_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_5_args a = *(const fused_linear_5_args *)c;
    return a.x[row * 32 + i];
}

MP_INLINE float fused_linear_5_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const fused_linear_5_args a = *(const fused_linear_5_args *)c;
    return (x * s.scale) * a.norm_weight[i];
}

static void fused_linear_5_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_5_args a = *(const fused_linear_5_args *)c;
    for (int64_t p = 0; p < 4; ++p) { /* of each panel: gates in the first half, up in the second */
        const int64_t first = (g * 4 + p) * 8, count = mp_min(8, 48 - first);
        const float *const gates = sums + p * 16, *const ups = gates + 8;
        MP_SIMD
        for (int64_t j = 0; j < count; ++j) {
            const int64_t n = first + j;
            const float gate = gates[j], up = ups[j];
            a.y[row * 48 + n] = mp_swigluf(gate, up);
        }
    }
}

MP_ROW_FUNCTION(fused_linear_5, 32, .norm = MP_RMS_NORM, .eps = 9.999999974752427e-07f,
    .value = fused_linear_5_value, .normed = fused_linear_5_normed)

MP_KERNEL fused_linear_5(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *norm_weight, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_5_args a = {x, norm_weight, y};
    _Alignas(64) float sums[384];
    static const mp_linear shape = {
        .K = 32, .panel = 16, .row_bytes = 64, .panels = 4, .groups = 2, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 32, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_5_row,
            .finish = fused_linear_5_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
 *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
typedef struct {
    const float *x; const float *e0; float *y;
} fused_linear_6_args;

MP_INLINE float fused_linear_6_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_6_args a = *(const fused_linear_6_args *)c;
    return a.x[row * 48 + i];
}

static void fused_linear_6_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_6_args a = *(const fused_linear_6_args *)c;
    const int64_t first = g * 32, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        a.y[row * 32 + n] = (sum + a.e0[row * 32 + n]);
    }
}

MP_ROW_FUNCTION(fused_linear_6, 48, .norm = MP_NO_NORM, .eps = 0.0f, .value = fused_linear_6_value)

MP_KERNEL fused_linear_6(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *e0, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_6_args a = {x, e0, y};
    _Alignas(64) float sums[192];
    static const mp_linear shape = {
        .K = 48, .panel = 16, .row_bytes = 64, .panels = 2, .groups = 1, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 48, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_6_row,
            .finish = fused_linear_6_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
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

/* %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight) {norm="rms", eps=1e-06, gated=False,
 *     expr="x0"} : f32[batch, 1, 50]
 * monoplan/models/llama.py:0 in lm_head */
typedef struct {
    const float *x; const float *norm_weight; float *y;
} fused_linear_15_args;

MP_INLINE float fused_linear_15_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_15_args a = *(const fused_linear_15_args *)c;
    return a.x[row * 32 + i];
}

MP_INLINE float fused_linear_15_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const fused_linear_15_args a = *(const fused_linear_15_args *)c;
    return (x * s.scale) * a.norm_weight[i];
}

static void fused_linear_15_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_15_args a = *(const fused_linear_15_args *)c;
    const int64_t first = g * 32, count = mp_min(32, 50 - first);
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        a.y[row * 50 + n] = sum;
    }
}

MP_ROW_FUNCTION(fused_linear_15, 32, .norm = MP_RMS_NORM, .eps = 9.999999974752427e-07f,
    .value = fused_linear_15_value, .normed = fused_linear_15_normed)

MP_KERNEL fused_linear_15(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *norm_weight, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_15_args a = {x, norm_weight, y};
    _Alignas(64) float sums[192];
    static const mp_linear shape = {
        .K = 32, .panel = 16, .row_bytes = 64, .panels = 2, .groups = 2, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 32, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_15_row,
            .finish = fused_linear_15_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %repetition_penalty = repetition_penalty(%reshape_11, %history, %history_count, %penalty) : f32[batch, 50]
 * monoplan/models/generate/generation.py:0 */
#include "mp_sample.h"

MP_KERNEL repetition_penalty_16(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const int64_t *history MP_UNUSED,
    const int32_t *counts MP_UNUSED, const float *penalty MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_hist MP_UNUSED = run->args->symbols[3];
    const int64_t rows = n_batch, vocabulary = 50;
    /* Threads share the rows, or parts of every row: there is seldom more than one. */
    const int64_t first = 0, end = rows;
    for (int64_t o = first; o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        const mp_view logits = MP_STORED(x + o0 * 50, MP_F32, 1, 0, 0, 0);
        const mp_view result = MP_STORED(y + o0 * 50, MP_F32, 1, 0, 0, 0), seen = MP_STORED(history + o0 * n_hist,
            MP_I64, 1, 0, 0, 0);
        const int64_t count = mp_min((int64_t)counts[o0], n_hist);
        mp_penalize(&logits, &result, mp_share(vocabulary, t, T), mp_share(vocabulary, t + 1, T), &seen, count,
            (float)penalty[o0]);
    }
}

/* %random_sample = random_sample(%repetition_penalty, %random_val, %top_p, %top_k, %temperature, %min_p) :
 *     i64[batch]
 * monoplan/models/generate/generation.py:0 */
#include "mp_sample.h"

MP_KERNEL random_sample_17(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x MP_UNUSED, const float *random_val MP_UNUSED,
    const float *top_p MP_UNUSED, const int32_t *top_k MP_UNUSED, const float *temperature MP_UNUSED,
    const float *min_p MP_UNUSED, int64_t *y MP_UNUSED, int64_t *heap MP_UNUSED, double *weights MP_UNUSED)
{
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t rows = n_batch, vocabulary = 50;
    /* Threads share the rows, or parts of every row: there is seldom more than one. */
    const int64_t first = mp_share(rows, t, T), end = mp_share(rows, t + 1, T);
    for (int64_t o = first; o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        const mp_view logits = MP_STORED(x + o0 * 50, MP_F32, 1, 0, 0, 0);
        const mp_sampling rule = {
            .temperature = temperature[o0], .top_k = (int64_t)top_k[o0], .top_p = top_p[o0],
            .min_p = min_p[o0], .random = random_val[o0],
        };
        const int64_t token = mp_sample(&logits, vocabulary, &rule, weights + o * vocabulary,
            heap + o * vocabulary);
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
        int32_t top = INT32_MIN;
        MP_PRAGMA(omp simd reduction(max : top))
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            const int32_t v = mp_order_f32(x0[o0 * 50 + i0], INT32_MAX);
            top = v > top ? v : top;
        }
        const float acc = mp_of_order_f32(top);
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
        y[o0] = (e0[o0] - (mp_logf((float)(acc)) + e1[o0]));
    }
}

#include "mp_call.h"

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
    const float *const w_embed_tokens = (const float *)param[0]; /* model.embed_tokens.weight f32[50, 32] */
    /* 0: %minimum = pointwise(%arange, %reshape, %reshape_2) {expr="minimum(add(cast(x1, dtype=i64), x0),
     *     sub(add(x1, x2), 1))"} : i64[batch, seq]  (monoplan/models/llama.py:0 in model) */
    pointwise_0(run, t, T, 0, (const int32_t *)in[5], (const int32_t *)in[6], (int64_t *)(arena + at[0]));
    /* 1: %embedding = embedding(%input_ids, %model.embed_tokens.weight) : f32[batch, seq, 32]
     *     (monoplan/models/llama.py:0 in model.embed_tokens) */
    embedding_1(run, t, T, 1, w_embed_tokens, (const int64_t *)in[0], (float *)(arena + at[1]));
    /* ---- model.layers.0 ---- */
    const mp_weights w0_q_k_v = param[2]; /* model.layers.0.self_attn.q_proj|k_proj|v_proj.weight f32[64, 32] */
    /* model.layers.0.input_layernorm.weight f32[32] */
    const float *const w0_input_layernorm = (const float *)param[1];
    const float *const w_rotary_emb_sin = (const float *)param[3]; /* model.rotary_emb.sin f32[64, 4] */
    const float *const w_rotary_emb_cos = (const float *)param[4]; /* model.rotary_emb.cos f32[64, 4] */
    const mp_weights w0_o_proj = param[5]; /* model.layers.0.self_attn.o_proj.weight f32[32, 32] */
    const mp_weights w0_gate_up = param[7]; /* model.layers.0.mlp.gate_proj|up_proj.weight f32[96, 32] */
    /* model.layers.0.post_attention_layernorm.weight f32[32] */
    const float *const w0_post_attention_layernorm = (const float *)param[6];
    const mp_weights w0_down_proj = param[8]; /* model.layers.0.mlp.down_proj.weight f32[32, 48] */
    if (mp_phase_before(run, w0_q_k_v, 6, n_batch * n_seq <= 6 ? 2048 : 0, &t, &T)) return;
    /* 2: %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
     *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid,
     *     _, %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
     *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
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
    /* 5: %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
     *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]  (monoplan/models/llama.py:0 in
     *     model.layers.0.mlp) */
    fused_linear_5(run, t, T, 5, (const float *)(arena + at[1]), w0_gate_up, w0_post_attention_layernorm,
        (float *)(arena + at[2]), (float *)(arena + at[4]), (float *)(arena + at[3]), n_batch * n_seq);
    if (mp_phase_before(run, w0_down_proj, 1, n_batch * n_seq <= 6 ? 6144 : 0, &t, &T)) return;
    /* 6: %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
     *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]  (monoplan/models/llama.py:0 in model.layers.0) */
    fused_linear_6(run, t, T, 6, (const float *)(arena + at[2]), w0_down_proj, (const float *)(arena + at[1]),
        (float *)(arena + at[1]), (float *)(arena + at[4]), (float *)(arena + at[3]), n_batch * n_seq);
    /* ---- model.layers.1 ---- */
    const mp_weights w1_q_k_v = param[10]; /* model.layers.1.self_attn.q_proj|k_proj|v_proj.weight f32[64, 32] */
    /* model.layers.1.input_layernorm.weight f32[32] */
    const float *const w1_input_layernorm = (const float *)param[9];
    const mp_weights w1_o_proj = param[11]; /* model.layers.1.self_attn.o_proj.weight f32[32, 32] */
    if (mp_phase_before(run, w1_q_k_v, 6, n_batch * n_seq <= 6 ? 2048 : 0, &t, &T)) return;
    /* 7: %rope_2, %kv_update_2, %kv_update_3 = qkv_rope_cache(%add_3, %concat_2, %minimum, %model.rotary_emb.sin,
     *     %model.rotary_emb.cos, %past_key_values.k.1, %past_key_values.v.1, %past_key_values.lengths, %num_valid,
     *     _, %model.layers.1.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
     *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
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
    const mp_weights w1_gate_up = param[13]; /* model.layers.1.mlp.gate_proj|up_proj.weight f32[96, 32] */
    /* model.layers.1.post_attention_layernorm.weight f32[32] */
    const float *const w1_post_attention_layernorm = (const float *)param[12];
    const mp_weights w1_down_proj = param[14]; /* model.layers.1.mlp.down_proj.weight f32[32, 48] */
    if (mp_phase_before(run, w1_gate_up, 2, n_batch <= 6 ? 8192 : 0, &t, &T)) return;
    /* 13: %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight)
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
    const mp_weights w_lm_head = param[16]; /* lm_head.weight f32[50, 32] */
    const float *const w_norm = (const float *)param[15]; /* model.norm.weight f32[32] */
    if (mp_phase_before(run, w_lm_head, 2, n_batch <= 6 ? 4096 : 0, &t, &T)) return;
    /* 15: %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight) {norm="rms", eps=1e-06,
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
    return mp_call(plan_run, args, error);
}
