/* GPT2Block: one plan, written by monoplan test for cuda (sm_90).
 * 7 kernels; symbols: batch, seq
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/modules.py:0 in c_attn)
 *     fused_linear_0_short<<<(((n_batch * n_seq * 32 + 127) / 128)), 128>>>
 * 1: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/modules.py:0 in c_attn)
 *     n_batch * n_seq = 1: fused_linear_1_row<<<(96), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 192 x 64
 * 2: %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2) {causal=True, scale=None, softcap=None,
 *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]  (tests/modules.py:0)
 *     attention_2<<<(n_batch * n_seq * 4), 256>>>
 * 3: %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/modules.py:0)
 *     n_batch * n_seq = 1: fused_linear_3_row<<<(32), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 64 x 64
 * 4: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]  (tests/modules.py:0)
 *     fused_linear_0_short<<<(((n_batch * n_seq * 32 + 127) / 128)), 128>>>
 * 5: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]  (tests/modules.py:0)
 *     n_batch * n_seq = 1: fused_linear_5_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 256 x 64, fused_linear_5_finish<<<(n_batch * n_seq),
 *     256>>>
 * 6: %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/modules.py:0)
 *     n_batch * n_seq = 1: fused_linear_6_row<<<(32), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 64 x 256 */

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/modules.py:0 in c_attn */
extern "C" __global__ void __launch_bounds__(128)
fused_linear_0_short(const float *x, const float *weight, const float *bias, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { INNER = 64, EACH = (INNER + 31) / 32, ROWS = 4 };
    mp_release();
    mp_wait();
    const int64_t o = (int64_t)blockIdx.x * ROWS + threadIdx.x / 32;
    if (o >= n_batch * n_seq) return;
    const int64_t o0 MP_UNUSED = o;

    float kept[EACH];
    MP_UNROLL
    for (int j = 0; j < EACH; ++j)
        if (const int64_t i = threadIdx.x % 32 + 32 * j; i < INNER) kept[j] = x[o0 * 64 + i];
    float sum = 0;
    MP_UNROLL
    for (int j = 0; j < EACH; ++j)
        if (const int64_t i = threadIdx.x % 32 + 32 * j; i < INNER) sum += kept[j];
    const float mean = mp_warp_sum(sum) / INNER;
    float rest = 0; /* what rounding left in the mean: much where it is large beside the deviations */
    MP_UNROLL
    for (int j = 0; j < EACH; ++j)
        if (const int64_t i = threadIdx.x % 32 + 32 * j; i < INNER) rest += kept[j] - mean;
    rest = mp_warp_sum(rest) / INNER;
    float squares = 0;
    MP_UNROLL
    for (int j = 0; j < EACH; ++j)
        if (const int64_t i = threadIdx.x % 32
            + 32 * j; i < INNER) squares += (kept[j] - mean - rest) * (kept[j] - mean - rest);
    const float scale = 1 / sqrtf(mp_warp_sum(squares) / INNER + 9.999999747378752e-06f);
    MP_UNROLL
    for (int j = 0; j < EACH; ++j)
        if (const int64_t i = threadIdx.x % 32 + 32 * j; i < INNER) {
            const float v = ((kept[j] - mean - rest) * scale) * weight[i] + bias[i];
            y[o0 * 64 + i] = v;
        }
}

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/modules.py:0 in c_attn */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_1_row(const float *x, const float *w, const float *bias, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 64, N = 192, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 96, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = (first + bias[n0]);
        const float value1 = (second + bias[n1]);
        mp_store_pair((y + row * 192 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2) {causal=True, scale=None, softcap=None,
 *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256)
attention_2(const float *q, const float *k, const float *v, float *y, const int64_t n_batch, const int64_t n_seq,
    mp_error *error, const int64_t step)
{
    struct S {
        enum { THREADS = 256, HEADS = 4, GROUP = 1 };
        enum { DIM = 16, VALUE = 16 };
    };
    typedef float real;
    mp_wait();
    const int64_t queries = n_seq, keys = n_seq;
    const int64_t h = blockIdx.x % S::HEADS, b MP_UNUSED = blockIdx.x / S::HEADS / queries,
        g MP_UNUSED = h / S::GROUP;
    const int64_t s0 = blockIdx.x / S::HEADS % queries, before = keys - queries, position MP_UNUSED = before + s0;
    const int64_t written = mp_min(keys, before + queries), first = 0, last = mp_min(written, before + s0 + 1);
    auto query = [&](const int64_t i) { return q[b * n_seq * 192 + s0 * 192 + h * 16 + i] * 0.25f; };
    auto key_at = [&](const int64_t key,
        const int64_t i) { return k[b * n_seq * 192 + g * 16 + key * 192 + i + 64]; };
    auto value_at = [&](const int64_t key,
        const int64_t i) { return v[b * n_seq * 192 + g * 16 + key * 192 + i + 128]; };
    auto visible = [&](const int64_t key) { return key < written && key <= position; };
    auto adjusted = [&](const real dot, const int64_t key MP_UNUSED) { return dot; };
    auto store = [&](const int64_t i, const real value) { y[b * n_seq * 64 + s0 * 64 + h * 16 + i] = value; };
    mp_attention<S, real>(first, last, query, key_at, value_at, visible, adjusted, (float)-INFINITY, store);
}

/* %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_3_row(const float *x, const float *w, const float *bias, const float *e0, float *y,
    const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 64, N = 64, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 32, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 64 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first + bias[n0]) + extra.e0_0);
        const float value1 = ((second + bias[n1]) + extra.e0_1);
        mp_store_pair((y + row * 64 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_5_row(const float *x, const float *w, const float *bias, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 64, N = 256, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 128, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = mp_gelu_tanhf((first + bias[n0]));
        const float value1 = mp_gelu_tanhf((second + bias[n1]));
        mp_store_pair((y + row * 256 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_5_finish(const float *bias, float *y, const float *sums, const int64_t splits, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 256 };
    const int64_t rows MP_UNUSED = n_batch * n_seq;
    mp_release();
    mp_wait();
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = mp_gelu_tanhf((first + bias[n0]));
        const float value1 = mp_gelu_tanhf((second + bias[n1]));
        mp_store_pair((y + row * 256 + n0), value0, value1);
    };
    mp_finish_pairs<N, 1>(sums, splits, rows, fetch, finish);
}

/* %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/modules.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_6_row(const float *x, const float *w, const float *bias, const float *e0, float *y,
    const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 256, N = 64, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 32, WARPS = 8, SLICES = 2, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 64 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first + bias[n0]) + extra.e0_0);
        const float value1 = ((second + bias[n1]) + extra.e0_1);
        mp_store_pair((y + row * 64 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}
