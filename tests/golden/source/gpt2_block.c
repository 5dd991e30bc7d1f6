/* GPT2Block: one plan, written by monoplan test for cpu (avx2).
 * 5 kernels; symbols: batch, seq */
#include "mp_plan.h"
#include "mp_linear.h"
#include "mp_format_f32.h"
MP_PANEL_FUNCTION(mp_panel_f32_1, 1, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)
MP_PANEL_FUNCTION(mp_panel_f32_6, 6, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)
#include "mp_functions_vec.h"

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/modules.py:0 in c_attn */
typedef struct {
    const float *x; const float *bias; const float *norm_weight; const float *norm_bias; float *y;
} fused_linear_0_args;

MP_INLINE float fused_linear_0_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    return a.x[row * 64 + i];
}

MP_INLINE float fused_linear_0_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    return ((x - s.mean - s.rest) * s.scale) * a.norm_weight[i] + a.norm_bias[i];
}

static void fused_linear_0_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    const int64_t first = g * 48, count = 48;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + a.bias[n];
        a.y[row * 192 + n] = sum;
    }
}

MP_ROW_FUNCTION(fused_linear_0, 64, .norm = MP_LAYER_NORM, .eps = 9.999999747378752e-06f,
    .value = fused_linear_0_value, .normed = fused_linear_0_normed)

MP_KERNEL fused_linear_0(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *bias, const float *norm_weight, const float *norm_bias, float *y, float *xt,
    float *partial, const int64_t rows)
{
    const fused_linear_0_args a = {x, bias, norm_weight, norm_bias, y};
    _Alignas(64) float sums[288];
    static const mp_linear shape = {
        .K = 64, .panel = 16, .row_bytes = 64, .panels = 3, .groups = 4, .few = {1, 6}, .tail = 1,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 64, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_0_row,
            .finish = fused_linear_0_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2) {causal=True, scale=None, softcap=None,
 *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]
 * tests/modules.py:0 */
#include "mp_attention.h"

MP_KERNEL attention_1(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *q MP_UNUSED, const float *k MP_UNUSED, const float *v MP_UNUSED,
    float *y MP_UNUSED, float *partial MP_UNUSED)
{
    enum { KV = 4, GROUP = 1, DIM = 16, VALUE = 16 };
    const int64_t n_batch MP_UNUSED = run->args->symbols[0];
    const int64_t n_seq MP_UNUSED = run->args->symbols[1];
    const mp_attention a = {
        .batches = n_batch, .queries = n_seq, .keys = n_seq,
        .kv_heads = KV, .group = GROUP, .dim = DIM, .value_dim = VALUE,
        .causal = 1, .window = 0, .scale = 0.25, .softcap = 0.0,
        .q = MP_STORED(q, MP_F32, n_seq * 192, 192, 16, 1),
        .k = MP_STORED(k + 64, MP_F32, n_seq * 192, 16, 192, 1),
        .v = MP_STORED(v + 128, MP_F32, n_seq * 192, 16, 192, 1),
        .y = MP_STORED(y, MP_F32, n_seq * 64, 64, 16, 1),
        .least = 256, .chunk = 1024, .rows = 8, .wide = 2, .pairs = 1, .ahead = 16, .far = 256, .prefetch_keys = 1,
            .partial = partial,
        .columns = 48, .block = 64, .tile_rows = 4, .tile_vectors = 3,
    };
    if (a.queries > 8) {
        _Alignas(64) float room[MP_STRIP_ROOM(DIM, 16, 48, 64)];
        mp_attention_many(run, t, T, &a, room);
    }
    if (a.queries <= 8) {
        _Alignas(64) float room[MP_FEW_ROOM(GROUP, 16, 16, 8, 1024)];
        mp_attention_few(run, t, T, &a, room);
    }
}

/* %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/modules.py:0 */
typedef struct {
    const float *x; const float *bias; const float *e0; float *y;
} fused_linear_2_args;

MP_INLINE float fused_linear_2_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_2_args a = *(const fused_linear_2_args *)c;
    return a.x[row * 64 + i];
}

static void fused_linear_2_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_2_args a = *(const fused_linear_2_args *)c;
    const int64_t first = g * 32, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + a.bias[n];
        a.y[row * 64 + n] = (sum + a.e0[row * 64 + n]);
    }
}

MP_ROW_FUNCTION(fused_linear_2, 64, .norm = MP_NO_NORM, .eps = 0.0f, .value = fused_linear_2_value)

MP_KERNEL fused_linear_2(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *bias, const float *e0, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_2_args a = {x, bias, e0, y};
    _Alignas(64) float sums[192];
    static const mp_linear shape = {
        .K = 64, .panel = 16, .row_bytes = 64, .panels = 2, .groups = 2, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 64, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_2_row,
            .finish = fused_linear_2_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/modules.py:0 */
typedef struct {
    const float *x; const float *bias; const float *norm_weight; const float *norm_bias; float *y;
} fused_linear_3_args;

MP_INLINE float fused_linear_3_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_3_args a = *(const fused_linear_3_args *)c;
    return a.x[row * 64 + i];
}

MP_INLINE float fused_linear_3_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const fused_linear_3_args a = *(const fused_linear_3_args *)c;
    return ((x - s.mean - s.rest) * s.scale) * a.norm_weight[i] + a.norm_bias[i];
}

static void fused_linear_3_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_3_args a = *(const fused_linear_3_args *)c;
    const int64_t first = g * 64, count = 64;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n MP_UNUSED = first + j;
        sums[j] = sums[j] + a.bias[n];
    }
    mp_by_blocks(mp_gelu_tanh_blocks, sums, sums, count);
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        a.y[row * 256 + n] = sum;
    }
}

MP_ROW_FUNCTION(fused_linear_3, 64, .norm = MP_LAYER_NORM, .eps = 9.999999747378752e-06f,
    .value = fused_linear_3_value, .normed = fused_linear_3_normed)

MP_KERNEL fused_linear_3(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *bias, const float *norm_weight, const float *norm_bias, float *y, float *xt,
    float *partial, const int64_t rows)
{
    const fused_linear_3_args a = {x, bias, norm_weight, norm_bias, y};
    _Alignas(64) float sums[384];
    static const mp_linear shape = {
        .K = 64, .panel = 16, .row_bytes = 64, .panels = 4, .groups = 4, .few = {1, 6}, .tail = 1,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 64, .strip = 384,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_3_row,
            .finish = fused_linear_3_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/modules.py:0 */
typedef struct {
    const float *x; const float *bias; const float *e0; float *y;
} fused_linear_4_args;

MP_INLINE float fused_linear_4_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_4_args a = *(const fused_linear_4_args *)c;
    return a.x[row * 256 + i];
}

static void fused_linear_4_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_4_args a = *(const fused_linear_4_args *)c;
    const int64_t first = g * 32, count = 32;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j] + a.bias[n];
        a.y[row * 64 + n] = (sum + a.e0[row * 64 + n]);
    }
}

MP_ROW_FUNCTION(fused_linear_4, 256, .norm = MP_NO_NORM, .eps = 0.0f, .value = fused_linear_4_value)

MP_KERNEL fused_linear_4(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *bias, const float *e0, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_4_args a = {x, bias, e0, y};
    _Alignas(64) float sums[192];
    static const mp_linear shape = {
        .K = 256, .panel = 16, .row_bytes = 64, .panels = 2, .groups = 2, .few = {1, 6}, .tail = 0,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 256, .strip = 256,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_4_row,
            .finish = fused_linear_4_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
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
    /* ---- c_attn, attention, fused_linear ---- */
    const mp_weights w_c_attn = param[3]; /* c_attn.weight f32[192, 64] */
    const float *const w_c_attn_bias = (const float *)param[0]; /* c_attn.bias f32[192] */
    const float *const w_ln_1 = (const float *)param[1]; /* ln_1.weight f32[64] */
    const float *const w_ln_1_bias = (const float *)param[2]; /* ln_1.bias f32[64] */
    const mp_weights w_c_proj = param[5]; /* c_proj.weight f32[64, 64] */
    const float *const w_c_proj_bias = (const float *)param[4]; /* c_proj.bias f32[64] */
    const mp_weights w_c_fc = param[9]; /* c_fc.weight f32[256, 64] */
    const float *const w_c_fc_bias = (const float *)param[6]; /* c_fc.bias f32[256] */
    const float *const w_ln_2 = (const float *)param[7]; /* ln_2.weight f32[64] */
    const float *const w_ln_2_bias = (const float *)param[8]; /* ln_2.bias f32[64] */
    const mp_weights w_c_out = param[11]; /* c_out.weight f32[64, 256] */
    const float *const w_c_out_bias = (const float *)param[10]; /* c_out.bias f32[64] */
    if (mp_phase_before(run, w_c_attn, 3, n_batch * n_seq <= 6 ? 12288 : 0, &t, &T)) return;
    /* 0: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer",
     *     eps=1e-05, gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/modules.py:0 in c_attn) */
    fused_linear_0(run, t, T, 0, (const float *)in[0], w_c_attn, w_c_attn_bias, w_ln_1, w_ln_1_bias,
        (float *)(arena + at[0]), (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase(run, &t, &T)) return;
    /* 1: %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2) {causal=True, scale=None, softcap=None,
     *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]  (tests/modules.py:0) */
    attention_1(run, t, T, 1, (const float *)(arena + at[0]), (const float *)(arena + at[0]),
        (const float *)(arena + at[0]), (float *)(arena + at[2]), (float *)(arena + at[1]));
    if (mp_phase_before(run, w_c_proj, 2, n_batch * n_seq <= 6 ? 8192 : 0, &t, &T)) return;
    /* 2: %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0,
     *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/modules.py:0) */
    fused_linear_2(run, t, T, 2, (const float *)(arena + at[2]), w_c_proj, w_c_proj_bias, (const float *)in[0],
        (float *)(arena + at[0]), (float *)(arena + at[3]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase_before(run, w_c_fc, 3, n_batch * n_seq <= 6 ? 16384 : 0, &t, &T)) return;
    /* 3: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
     *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]  (tests/modules.py:0) */
    fused_linear_3(run, t, T, 3, (const float *)(arena + at[0]), w_c_fc, w_c_fc_bias, w_ln_2, w_ln_2_bias,
        (float *)(arena + at[1]), (float *)(arena + at[3]), (float *)(arena + at[2]), n_batch * n_seq);
    if (mp_phase_before(run, w_c_out, 2, n_batch * n_seq <= 6 ? 32768 : 0, &t, &T)) return;
    /* 4: %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
     *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/modules.py:0) */
    fused_linear_4(run, t, T, 4, (const float *)(arena + at[1]), w_c_out, w_c_out_bias,
        (const float *)(arena + at[0]), (float *)out[0], (float *)(arena + at[2]), (float *)(arena + at[3]),
        n_batch * n_seq);
}

int mp_run_plan(const mp_args *args, mp_error *error)
{
    return mp_call(plan_run, args, error);
}
