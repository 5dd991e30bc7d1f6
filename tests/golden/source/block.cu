/* Block: one plan, written by monoplan test for cuda (sm_90).
 * 2 kernels; symbols: batch, seq
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0,
 *     x1)"} : f32[batch, seq, 1024]  (tests/codegen/test_golden_source.py:0)
 *     n_batch * n_seq = 1: fused_linear_0_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: fused_linear_0_prepare<<<(n_batch * n_seq), 256>>>, library product n_batch * n_seq x
 *     2048 x 256, fused_linear_0_finish<<<(4, n_batch * n_seq), 256>>>
 * 1: %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"}
 *     : f32[batch, seq, 256]  (tests/codegen/test_golden_source.py:0)
 *     n_batch * n_seq = 1: fused_linear_1_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 256 x 1024 */

/* %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"}
 *     : f32[batch, seq, 1024]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_0_row(const float *x, const float *w, const float *norm_weight, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 256, N = 2048, PAIRS = (N + 1) / 2, GRID = 128, WARPS = 8, SLICES = 2 };
    enum { BATCH = 8, RING = 2, EARLY = 2, GENTLE = 1, GROUPS = WARPS / SLICES, THREADS = WARPS * 32 };
    enum { E = 4, PIECES = K / E, SLICE = (PIECES + SLICES - 1) / SLICES, V = (SLICE + 31) / 32, SLOT = BATCH * V * 512 };
    enum { WHOLE = SLICE * SLICES == PIECES && SLICE % 32 == 0, MOST = 2 * ((PAIRS + GRID - 1) / GRID), BATCHES = (MOST + BATCH - 1) / BATCH };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ float squares[SLICES];
    float (*const part)[BATCHES * BATCH] = (float (*)[BATCHES * BATCH])(dynamic + WARPS * RING * SLOT); /* a slice's sums */
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, slice = warp % SLICES, group = warp / SLICES;
    const int p0 = (int)((int64_t)PAIRS * blockIdx.x / GRID), pairs = (int)((int64_t)PAIRS * (blockIdx.x + 1) / GRID) - p0;
    const int count = (int)mp_min(2 * pairs, N - 2 * p0), batches = (count + BATCH - 1) / BATCH;
    mp_release();
    /* Before the dependency: constants first (behind the ring they would wait for all of it), then weights. */
    int at[V];
    bool live[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = slice * SLICE + v * 32 + lane;
        live[v] = WHOLE || (v * 32 + lane < SLICE && piece < PIECES);
        at[v] = live[v] ? piece : 0;
    }
    mp_vec<float, E> gamma[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) mp_vec_const<float, E>(gamma[v], (norm_weight + 0) + at[v] * E);
    const float *const rows0 = w + (int64_t)2 * p0 * K;
    const mp_shared ring = mp_shared_address(dynamic) + warp * RING * SLOT + lane * 16;
    auto issue = [&](const int b, const int slot) {
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            const float *const from = rows0 + (b * BATCH + r) * K;
            if (b * BATCH + r < count) { /* predicates, not a jump: copies are cheap in a row only */
                MP_UNROLL
                for (int v = 0; v < V; ++v) {
                    if (WHOLE) mp_copy(ring + slot * SLOT + (r * V + v) * 512, from + at[v] * E);
                    else mp_copy_if(ring + slot * SLOT + (r * V + v) * 512, from + at[v] * E, live[v]);
                }
            }
        }
        mp_copy_commit();
    };
    MP_UNROLL
    for (int d = 0; d < EARLY; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* what others need must not queue for long */
        issue(group + d * GROUPS, d);
    }
    mp_wait();

    /* After it: x first, then the rest of the ring, then what only the epilogue needs. */
    mp_vec<float, E> raw[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) mp_vec_fresh<float, E>(raw[v], (x + 0) + at[v] * E);
    for (int d = EARLY; d < RING; ++d) issue(group + d * GROUPS, d);
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 1024 + n] = mp_swigluf(gate, up);
    };
    Extra early;
    if (tid < pairs) early = fetch(0, p0 + tid);
    float xs[E * V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        if (!live[v]) mp_vec_zero<float, E>(raw[v]);
        mp_vec_floats<float, E>(xs + E * v, raw[v]);
    }
    float square = 0.0f;
    MP_UNROLL
    for (int i = 0; i < E * V; ++i) square = fmaf(xs[i], xs[i], square);
    square = mp_warp_sum(square);
    if (group == 0 && lane == 0) squares[slice] = square;
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        float g[E];
        mp_vec_floats<float, E>(g, gamma[v]);
        MP_UNROLL
        for (int i = 0; i < E; ++i) xs[E * v + i] *= g[i];
    }

    for (int b = group, slot = 0; b < batches; b += GROUPS, slot = slot + 1 == RING ? 0 : slot + 1) {
        mp_copy_wait<RING - 1>();
        float sums[BATCH];
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            sums[r] = 0.0f;
            MP_UNROLL
            for (int v = 0; v < V; ++v)
                mp_dot<float>(sums[r], mp_read_shared(ring + slot * SLOT + (r * V + v) * 512), xs + E * v);
        }
        issue(b + RING * GROUPS, slot);
        const float sum = mp_reduce_rows<BATCH>(sums, lane);
        if (lane % (32 / BATCH) == 0) part[slice][b * BATCH + lane / (32 / BATCH)] = sum;
    }
    __syncthreads();

    /* One thread for each row pair; slices are summed in a fixed order. */
    float scale = 1.0f;
    float total = 0.0f;
    MP_UNROLL
    for (int j = 0; j < SLICES; ++j) total += squares[j];
    scale = rsqrtf(total / K + 9.999999974752427e-07f);
    for (int i = tid; i < pairs; i += THREADS) {
        float first = 0.0f, second = 0.0f;
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j) {
            const float2 two = *(const float2 *)&part[j][2 * i];
            first += two.x;
            second += two.y;
        }
        finish(i == tid ? early : fetch(0, p0 + i), 0, p0 + i, first * scale, second * scale);
    }
}

/* %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"}
 *     : f32[batch, seq, 1024]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256) fused_linear_0_prepare(const float *x, const float *norm_weight, float *xs, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 256 };
    __shared__ float shared[8];
    mp_release();
    const int64_t row = blockIdx.x;
    mp_wait();
    const int r MP_UNUSED = 0;
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < K; i += 256) {
        const float v = x[row * 256 + i];
        squares += v * v;
    }
    const float scales[1] = {1.0f / sqrtf(mp_fast_sum<8>(shared, squares) / K + 9.999999974752427e-07f)};
    for (int64_t i = threadIdx.x; i < K; i += 256) xs[row * K + i] = (x[row * 256 + i] * scales[r]) * norm_weight[i];
}

/* %mul = fused_linear(%x, %concat, _, %norm.weight, _) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"}
 *     : f32[batch, seq, 1024]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256) fused_linear_0_finish(float *y, const float *sums, const int64_t splits, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 2048, PAIRS = (N + 1) / 2 };
    mp_release();
    mp_wait();
    const int64_t rows = n_batch * n_seq;
    auto part = [&](const int64_t row, const int64_t n) {
        float sum = 0.0f;
        if (n < N)
            for (int split = 0; split < splits; ++split) sum += sums[(split * rows + row) * N + n];
        return sum;
    };
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 1024 + n] = mp_swigluf(gate, up);
    };
    enum { EACH = 1 };
    const int pair0 = blockIdx.x * (256 * EACH) + threadIdx.x;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        Extra extra[EACH];
        float2 both[EACH];
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int pair = pair0 + e * 256;
            if (pair >= PAIRS) break;
            extra[e] = fetch(row, pair);
            both[e] = make_float2(0.0f, 0.0f);
            for (int split = 0; split < splits; ++split) {
                const float2 two = mp_load_pair(sums + (split * rows + row) * N + 2 * pair);
                both[e].x += two.x;
                both[e].y += two.y;
            }
        }
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int pair = pair0 + e * 256;
            if (pair < PAIRS) finish(extra[e], row, pair, both[e].x, both[e].y);
        }
    }
}

/* %add = fused_linear(%mul, %down.weight, _, _, _, %x) {norm="none", eps=0.0, gated=False, expr="add(x0, x1)"} :
 *     f32[batch, seq, 256]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_1_row(const float *x, const float *w, const float *e0, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 1024, N = 256, PAIRS = (N + 1) / 2, GRID = 128, WARPS = 8, SLICES = 8 };
    enum { BATCH = 8, RING = 2, EARLY = 2, GENTLE = 1, GROUPS = WARPS / SLICES, THREADS = WARPS * 32 };
    enum { E = 4, PIECES = K / E, SLICE = (PIECES + SLICES - 1) / SLICES, V = (SLICE + 31) / 32, SLOT = BATCH * V * 512 };
    enum { WHOLE = SLICE * SLICES == PIECES && SLICE % 32 == 0, MOST = 2 * ((PAIRS + GRID - 1) / GRID), BATCHES = (MOST + BATCH - 1) / BATCH };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ float squares[SLICES];
    float (*const part)[BATCHES * BATCH] = (float (*)[BATCHES * BATCH])(dynamic + WARPS * RING * SLOT); /* a slice's sums */
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, slice = warp % SLICES, group = warp / SLICES;
    const int p0 = (int)((int64_t)PAIRS * blockIdx.x / GRID), pairs = (int)((int64_t)PAIRS * (blockIdx.x + 1) / GRID) - p0;
    const int count = (int)mp_min(2 * pairs, N - 2 * p0), batches = (count + BATCH - 1) / BATCH;
    mp_release();
    /* Before the dependency: constants first (behind the ring they would wait for all of it), then weights. */
    int at[V];
    bool live[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = slice * SLICE + v * 32 + lane;
        live[v] = WHOLE || (v * 32 + lane < SLICE && piece < PIECES);
        at[v] = live[v] ? piece : 0;
    }
    const float *const rows0 = w + (int64_t)2 * p0 * K;
    const mp_shared ring = mp_shared_address(dynamic) + warp * RING * SLOT + lane * 16;
    auto issue = [&](const int b, const int slot) {
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            const float *const from = rows0 + (b * BATCH + r) * K;
            if (b * BATCH + r < count) { /* predicates, not a jump: copies are cheap in a row only */
                MP_UNROLL
                for (int v = 0; v < V; ++v) {
                    if (WHOLE) mp_copy(ring + slot * SLOT + (r * V + v) * 512, from + at[v] * E);
                    else mp_copy_if(ring + slot * SLOT + (r * V + v) * 512, from + at[v] * E, live[v]);
                }
            }
        }
        mp_copy_commit();
    };
    MP_UNROLL
    for (int d = 0; d < EARLY; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* what others need must not queue for long */
        issue(group + d * GROUPS, d);
    }
    mp_wait();

    /* After it: x first, then the rest of the ring, then what only the epilogue needs. */
    mp_vec<float, E> raw[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) mp_vec_fresh<float, E>(raw[v], (x + 0) + at[v] * E);
    for (int d = EARLY; d < RING; ++d) issue(group + d * GROUPS, d);
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 256 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first) + extra.e0_0);
        const float value1 = ((second) + extra.e0_1);
        mp_store_pair((y + row * 256 + n0), value0, value1);
    };
    Extra early;
    if (tid < pairs) early = fetch(0, p0 + tid);
    float xs[E * V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        if (!live[v]) mp_vec_zero<float, E>(raw[v]);
        mp_vec_floats<float, E>(xs + E * v, raw[v]);
    }

    for (int b = group, slot = 0; b < batches; b += GROUPS, slot = slot + 1 == RING ? 0 : slot + 1) {
        mp_copy_wait<RING - 1>();
        float sums[BATCH];
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            sums[r] = 0.0f;
            MP_UNROLL
            for (int v = 0; v < V; ++v)
                mp_dot<float>(sums[r], mp_read_shared(ring + slot * SLOT + (r * V + v) * 512), xs + E * v);
        }
        issue(b + RING * GROUPS, slot);
        const float sum = mp_reduce_rows<BATCH>(sums, lane);
        if (lane % (32 / BATCH) == 0) part[slice][b * BATCH + lane / (32 / BATCH)] = sum;
    }
    __syncthreads();

    /* One thread for each row pair; slices are summed in a fixed order. */
    float scale = 1.0f;
    for (int i = tid; i < pairs; i += THREADS) {
        float first = 0.0f, second = 0.0f;
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j) {
            const float2 two = *(const float2 *)&part[j][2 * i];
            first += two.x;
            second += two.y;
        }
        finish(i == tid ? early : fetch(0, p0 + i), 0, p0 + i, first * scale, second * scale);
    }
}
