/* Block: one plan, written by monoplan test for cuda (sm_90).
 * 2 kernels; symbols: batch, seq
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"}
 *     : f32[batch, seq, 1024]  (tests/modules.py:0)
 *     n_batch * n_seq = 1: fused_linear_0_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: fused_linear_0_prepare<<<(n_batch * n_seq), 256>>>, library product n_batch * n_seq x
 *     2048 x 256, fused_linear_0_finish<<<(4, n_batch * n_seq), 256>>>
 * 1: %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"}
 *     : f32[batch, seq, 256]  (tests/modules.py:0)
 *     n_batch * n_seq = 1: fused_linear_1_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 256 x 1024 */

/* %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} :
 *     f32[batch, seq, 1024]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_0_row(const float *x, const float *w, const float *norm_weight, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 256, N = 2048, RMS = 1, GAMMA = MP_GAMMA_CONSTANT };
        enum { GRID = 128, WARPS = 8, SLICES = 2, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 1024 + n] = mp_swigluf(gate, up);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (norm_weight + 0), 9.999999974752427e-07f, fetch,
        mp_nothing_more(), finish);
}

/* %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} :
 *     f32[batch, seq, 1024]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_0_prepare(const float *x, const float *norm_weight, float *xs, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 256, RMS = 1 };
    const int64_t row = blockIdx.x;
    mp_release();
    auto value = [&](const int64_t i) { return x[row * 256 + i]; };
    auto rounded = [&](const int64_t i,
        const float scale MP_UNUSED) { return (x[row * 256 + i] * scale) * norm_weight[i]; };
    mp_linear_prepare_each<K, RMS>(xs + row * K, 9.999999974752427e-07f, value, rounded);
}

/* %mul = fused_linear(%x, %concat, _, %norm.weight) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} :
 *     f32[batch, seq, 1024]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_0_finish(float *y, const float *sums, const int64_t splits, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 2048 };
    const int64_t rows MP_UNUSED = n_batch * n_seq;
    mp_release();
    mp_wait();
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 1024 + n] = mp_swigluf(gate, up);
    };
    mp_finish_pairs<N, 1>(sums, splits, rows, fetch, finish);
}

/* %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} :
 *     f32[batch, seq, 256]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_1_row(const float *x, const float *w, const float *e0, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 1024, N = 256, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 128, WARPS = 8, SLICES = 8, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 256 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first) + extra.e0_0);
        const float value1 = ((second) + extra.e0_1);
        mp_store_pair((y + row * 256 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}
