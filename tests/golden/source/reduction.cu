/* Variance: one plan, written by monoplan test for cuda (sm_90).
 * 2 kernels; symbols: rows
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %mean = mean(%x) {axes=(-1,), keepdims=True} : f32[rows, 1]  (tests/codegen/test_golden_source.py:0)
 *     mean_0<<<(((n_rows * 32 + 255) / 256)), 256>>>
 * 1: %sqrt = fused_reduce(%x, %mean) {inputs=2, reduce="mean", axes=(-1,), keepdims=False, pre="mul(sub(x0, x1),
 *     sub(x0, x1))", post="sqrt(add(x0, 9.999999747378752e-06))"} : f32[rows]
 *     (tests/codegen/test_golden_source.py:0)
 *     fused_reduce_1<<<(((n_rows * 32 + 255) / 256)), 256>>> */

/* %mean = mean(%x) {axes=(-1,), keepdims=True} : f32[rows, 1]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256)
mean_0(const float *x0, float *y, const int64_t n_rows, mp_error *error, const int64_t step)
{
    enum { THREADS = 256, TEAM = 32 };
    __shared__ double found[THREADS];
    __shared__ int64_t place[THREADS]; /* of the element found; -1: none */
    mp_release();
    mp_wait();
    const int64_t outer = n_rows, inner = 100;
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / TEAM;
    const int member = threadIdx.x % TEAM;
    double acc = 0;
    int64_t best = -1;
    if (o < outer) {
        const int64_t o0 MP_UNUSED = o;
        MP_UNROLL_BY(4)
        for (int64_t i = member; i < inner; i += TEAM) {
            const int64_t i0 MP_UNUSED = i;
            const float v = x0[o0 * 100 + i0];
            acc = (double)(acc + (double)v);
            best = i;
        }
    }
    found[threadIdx.x] = acc;
    place[threadIdx.x] = best;
    for (int half = TEAM / 2; half > 0; half /= 2) {
        __syncthreads();
        if (member < half && place[threadIdx.x + half] >= 0) {
            const double v = found[threadIdx.x + half];
            const int64_t i = place[threadIdx.x + half];
            acc = found[threadIdx.x];
            best = place[threadIdx.x];
            acc = (double)(acc + (double)v);
            best = i;
            found[threadIdx.x] = acc;
            place[threadIdx.x] = best;
        }
    }
    __syncthreads();
    if (member > 0 || o >= outer) return;
    acc = found[threadIdx.x];
    best = mp_max(place[threadIdx.x], 0);
    const int64_t o0 MP_UNUSED = o;
    y[o0] = (float)((acc / (double)inner));
}

/* %sqrt = fused_reduce(%x, %mean) {inputs=2, reduce="mean", axes=(-1,), keepdims=False, pre="mul(sub(x0, x1),
 *     sub(x0, x1))", post="sqrt(add(x0, 9.999999747378752e-06))"} : f32[rows]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256)
fused_reduce_1(const float *x0, const float *x1, float *y, const int64_t n_rows, mp_error *error,
    const int64_t step)
{
    enum { THREADS = 256, TEAM = 32 };
    __shared__ double found[THREADS];
    __shared__ int64_t place[THREADS]; /* of the element found; -1: none */
    mp_release();
    mp_wait();
    const int64_t outer = n_rows, inner = 100;
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / TEAM;
    const int member = threadIdx.x % TEAM;
    double acc = 0;
    int64_t best = -1;
    if (o < outer) {
        const int64_t o0 MP_UNUSED = o;
        MP_UNROLL_BY(4)
        for (int64_t i = member; i < inner; i += TEAM) {
            const int64_t i0 MP_UNUSED = i;
            const float v = ((x0[o0 * 100 + i0] - x1[o0]) * (x0[o0 * 100 + i0] - x1[o0]));
            acc = (double)(acc + (double)v);
            best = i;
        }
    }
    found[threadIdx.x] = acc;
    place[threadIdx.x] = best;
    for (int half = TEAM / 2; half > 0; half /= 2) {
        __syncthreads();
        if (member < half && place[threadIdx.x + half] >= 0) {
            const double v = found[threadIdx.x + half];
            const int64_t i = place[threadIdx.x + half];
            acc = found[threadIdx.x];
            best = place[threadIdx.x];
            acc = (double)(acc + (double)v);
            best = i;
            found[threadIdx.x] = acc;
            place[threadIdx.x] = best;
        }
    }
    __syncthreads();
    if (member > 0 || o >= outer) return;
    acc = found[threadIdx.x];
    best = mp_max(place[threadIdx.x], 0);
    const int64_t o0 MP_UNUSED = o;
    y[o0] = sqrtf(((float)((acc / (double)inner)) + 9.999999747378752e-06f));
}
