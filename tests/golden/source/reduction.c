/* Variance: one plan, written by monoplan test for cpu (avx2).
 * 2 kernels; symbols: rows */
#include "mp_plan.h"

/* %mean = mean(%x) {axes=(-1,), keepdims=True} : f32[rows, 1]
 * tests/codegen/test_golden_source.py:0 */
MP_KERNEL mean_0(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED, const int step MP_UNUSED,
    const float *x0 MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_rows MP_UNUSED = run->args->symbols[0];
    const int64_t outer = n_rows, inner = 100;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        double acc = 0;
        MP_SIMD_SUM(acc)
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            const float v = x0[o0 * 100 + i0];
            acc = (double)(acc + (double)v);
        }
        y[o0] = (float)((acc / (double)inner));
    }
}

/* %sqrt = fused_reduce(%x, %mean) {inputs=2, reduce="mean", axes=(-1,), keepdims=False, pre="mul(sub(x0, x1),
 *     sub(x0, x1))", post="sqrt(add(x0, 9.999999747378752e-06))"} : f32[rows]
 * tests/codegen/test_golden_source.py:0 */
MP_KERNEL fused_reduce_1(mp_run *run MP_UNUSED, const int t MP_UNUSED, const int T MP_UNUSED,
    const int step MP_UNUSED, const float *x0 MP_UNUSED, const float *x1 MP_UNUSED, float *y MP_UNUSED)
{
    const int64_t n_rows MP_UNUSED = run->args->symbols[0];
    const int64_t outer = n_rows, inner = 100;
    const int64_t end = mp_share(outer, t + 1, T);
    for (int64_t o = mp_share(outer, t, T); o < end; ++o) {
        const int64_t o0 MP_UNUSED = o;
        double acc = 0;
        MP_SIMD_SUM(acc)
        for (int64_t i = 0; i < inner; ++i) {
            const int64_t i0 MP_UNUSED = i;
            const float v = ((x0[o0 * 100 + i0] - x1[o0]) * (x0[o0 * 100 + i0] - x1[o0]));
            acc = (double)(acc + (double)v);
        }
        y[o0] = sqrtf(((float)((acc / (double)inner)) + 9.999999747378752e-06f));
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
    /* ---- mean, fused_reduce ---- */
    /* 0: %mean = mean(%x) {axes=(-1,), keepdims=True} : f32[rows, 1]  (tests/codegen/test_golden_source.py:0) */
    mean_0(run, t, T, 0, (const float *)in[0], (float *)(arena + at[0]));
    if (mp_phase(run, &t, &T)) return;
    /* 1: %sqrt = fused_reduce(%x, %mean) {inputs=2, reduce="mean", axes=(-1,), keepdims=False, pre="mul(sub(x0,
     *     x1), sub(x0, x1))", post="sqrt(add(x0, 9.999999747378752e-06))"} : f32[rows]
     *     (tests/codegen/test_golden_source.py:0) */
    fused_reduce_1(run, t, T, 1, (const float *)in[0], (const float *)(arena + at[0]), (float *)out[0]);
}

int mp_run_plan(const mp_args *args, mp_error *error)
{
    return mp_call(plan_run, args, error);
}
