/* Block: one plan, written by monoplan test for cpu (avx2).
 * 2 kernels; symbols: batch, seq */
#include "mp_plan.h"
#include "mp_linear.h"
#include "mp_format_f32.h"
MP_PANEL_FUNCTION(mp_panel_f32_1, 1, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)
MP_PANEL_FUNCTION(mp_panel_f32_6, 6, .load = mp_load_row_f32, .vectors = 2, .bytes = 64, .line = 1, .near = 64,
    .far = 512)

/* %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} :
 *     f32[batch, seq, 1024]
 * tests/modules.py:0 */
typedef struct {
    const float *x; const float *norm_weight; float *y;
} fused_linear_0_args;

MP_INLINE float fused_linear_0_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    return a.x[row * 256 + i];
}

MP_INLINE float fused_linear_0_normed(const void *c MP_UNUSED, const int64_t i MP_UNUSED, const float x,
    const mp_stats s)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    return (x * s.scale) * a.norm_weight[i];
}

static void fused_linear_0_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_0_args a = *(const fused_linear_0_args *)c;
    for (int64_t p = 0; p < 4; ++p) { /* of each panel: gates in the first half, up in the second */
        const int64_t first = (g * 4 + p) * 8, count = 8;
        const float *const gates = sums + p * 16, *const ups = gates + 8;
        MP_SIMD
        for (int64_t j = 0; j < count; ++j) {
            const int64_t n = first + j;
            const float gate = gates[j], up = ups[j];
            a.y[row * 1024 + n] = mp_swigluf(gate, up);
        }
    }
}

MP_ROW_FUNCTION(fused_linear_0, 256, .norm = MP_RMS_NORM, .eps = 9.999999974752427e-07f,
    .value = fused_linear_0_value, .normed = fused_linear_0_normed)

MP_KERNEL fused_linear_0(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *norm_weight, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_0_args a = {x, norm_weight, y};
    _Alignas(64) float sums[384];
    static const mp_linear shape = {
        .K = 256, .panel = 16, .row_bytes = 64, .panels = 4, .groups = 32, .few = {1, 6}, .tail = 8,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 256, .strip = 256,
            .slots = 1,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_0_row,
            .finish = fused_linear_0_finish,
    };
    mp_linear_run(&shape, run, t, T, rows, w, xt, partial, sums, &a);
}

/* %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} :
 *     f32[batch, seq, 256]
 * tests/modules.py:0 */
typedef struct {
    const float *x; const float *e0; float *y;
} fused_linear_1_args;

MP_INLINE float fused_linear_1_value(const void *c, const int64_t row, const int64_t i)
{
    const fused_linear_1_args a = *(const fused_linear_1_args *)c;
    return a.x[row * 1024 + i];
}

static void fused_linear_1_finish(const void *c, const int64_t g, const int64_t row, float *sums)
{
    const fused_linear_1_args a = *(const fused_linear_1_args *)c;
    const int64_t first = g * 64, count = 64;
    MP_SIMD
    for (int64_t j = 0; j < count; ++j) {
        const int64_t n = first + j;
        const float sum = sums[j];
        a.y[row * 256 + n] = (sum + a.e0[row * 256 + n]);
    }
}

MP_ROW_FUNCTION(fused_linear_1, 1024, .norm = MP_NO_NORM, .eps = 0.0f, .value = fused_linear_1_value)

MP_KERNEL fused_linear_1(mp_run *run, const int t, const int T, const int step MP_UNUSED, const float *x,
    const float *w, const float *e0, float *y, float *xt, float *partial, const int64_t rows)
{
    const fused_linear_1_args a = {x, e0, y};
    _Alignas(64) float sums[384];
    static const mp_linear shape = {
        .K = 1024, .panel = 16, .row_bytes = 64, .panels = 4, .groups = 4, .few = {1, 6}, .tail = 1,
        .block = 6, .abreast = 1, .sizes = {2, 4, 6}, .part = 96, .chunk = 516, .slice = 342, .strip = 342,
            .slots = 4,
        .by_panel = {mp_panel_f32_1, mp_panel_f32_6}, .widen = 0,
        .tile = {mp_tile_2x2x1, mp_tile_4x2x1, mp_tile_6x2x1}, .row = fused_linear_1_row,
            .finish = fused_linear_1_finish,
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
    /* ---- fused_linear ---- */
    const mp_weights w_gate_up = param[1]; /* gate|up.weight f32[2048, 256] */
    const float *const w_norm = (const float *)param[0]; /* norm.weight f32[256] */
    const mp_weights w_down = param[2]; /* down.weight f32[256, 1024] */
    if (mp_phase_before(run, w_gate_up, 24, n_batch * n_seq <= 6 ? 65536 : 0, &t, &T)) return;
    /* 0: %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0,
     *     x1)"} : f32[batch, seq, 1024]  (tests/modules.py:0) */
    fused_linear_0(run, t, T, 0, (const float *)in[0], w_gate_up, w_norm, (float *)(arena + at[0]),
        (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
    if (mp_phase_before(run, w_down, 3, n_batch * n_seq <= 6 ? 262144 : 0, &t, &T)) return;
    /* 1: %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0,
     *     x1)"} : f32[batch, seq, 256]  (tests/modules.py:0) */
    fused_linear_1(run, t, T, 1, (const float *)(arena + at[0]), w_down, (const float *)in[0], (float *)out[0],
        (float *)(arena + at[2]), (float *)(arena + at[1]), n_batch * n_seq);
}

int mp_run_plan(const mp_args *args, mp_error *error)
{
    return mp_call(plan_run, args, error);
}
