/* GPT2Block: one plan, written by monoplan test for cuda (sm_90).
 * 7 kernels; symbols: batch, seq
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/codegen/test_golden_source.py:0 in c_attn)
 *     fused_linear_0<<<(n_batch * n_seq), 256>>>
 * 1: %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]  (tests/codegen/test_golden_source.py:0 in c_attn)
 *     n_batch * n_seq = 1: fused_linear_1_row<<<(96), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 192 x 64, fused_linear_1_finish<<<(n_batch * n_seq),
 *     256>>>
 * 2: %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2, _, _) {causal=True, scale=None,
 *     softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 16]  (tests/codegen/test_golden_source.py:0)
 *     attention_2<<<(n_batch * n_seq * 4), 128>>>
 * 3: %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/codegen/test_golden_source.py:0)
 *     n_batch * n_seq = 1: fused_linear_3_row<<<(32), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 64 x 64, fused_linear_3_finish<<<(n_batch * n_seq),
 *     256>>>
 * 4: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 *     (tests/codegen/test_golden_source.py:0)
 *     fused_linear_0<<<(n_batch * n_seq), 256>>>
 * 5: %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 *     (tests/codegen/test_golden_source.py:0)
 *     n_batch * n_seq = 1: fused_linear_5_row<<<(128), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 256 x 64, fused_linear_5_finish<<<(n_batch * n_seq),
 *     256>>>
 * 6: %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]  (tests/codegen/test_golden_source.py:0)
 *     n_batch * n_seq = 1: fused_linear_6_row<<<(32), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 64 x 256, fused_linear_3_finish<<<(n_batch * n_seq),
 *     256>>> */

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/codegen/test_golden_source.py:0 in c_attn */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_0(const float *x, const float *weight, const float *bias, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { THREADS = 256 };
    __shared__ float sums[THREADS];
    mp_wait();
    const int64_t inner = 64, o MP_UNUSED = blockIdx.x;
    const int64_t o0 MP_UNUSED = o;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < inner; i += THREADS) sum += x[o0 * 64 + i];
    const float mean = mp_block_sum<THREADS>(sums, sum) / (float)inner;
    float rest = 0; /* what rounding left in the mean: much where it is large beside the deviations */
    for (int64_t i = threadIdx.x; i < inner; i += THREADS) rest += x[o0 * 64 + i] - mean;
    rest = mp_block_sum<THREADS>(sums, rest) / (float)inner;
    float squares = 0;
    for (int64_t i = threadIdx.x; i < inner; i += THREADS) {
        const float d = x[o0 * 64 + i] - mean - rest;
        squares += d * d;
    }
    squares = mp_block_sum<THREADS>(sums, squares);
    const float scale = 1 / sqrtf(squares / (float)inner + 9.999999747378752e-06f);
    for (int64_t i = threadIdx.x; i < inner; i += THREADS) {
        const float v = ((x[o0 * 64 + i] - mean - rest) * scale) * weight[i] + bias[i];
        y[o0 * 64 + i] = v;
    }
}

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/codegen/test_golden_source.py:0 in c_attn */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_1_row(const float *x, const float *w, const float *bias, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 64, N = 192, PAIRS = (N + 1) / 2, GRID = 96, WARPS = 8, SLICES = 1 };
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
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = (first + bias[n0]);
        const float value1 = (second + bias[n1]);
        mp_store_pair((y + row * 192 + n0), value0, value1);
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

/* %linear = fused_linear(%x, %c_attn.weight, %c_attn.bias, %ln_1.weight, %ln_1.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="x0"} : f32[batch, seq, 192]
 * tests/codegen/test_golden_source.py:0 in c_attn */
extern "C" __global__ void __launch_bounds__(256) fused_linear_1_finish(const float *bias, float *y, const float *sums, const int64_t splits, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 192, PAIRS = (N + 1) / 2 };
    mp_release();
    mp_wait();
    const int64_t rows = n_batch * n_seq;
    auto part = [&](const int64_t row, const int64_t n) {
        float sum = 0.0f;
        if (n < N)
            for (int split = 0; split < splits; ++split) sum += sums[(split * rows + row) * N + n];
        return sum;
    };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = (first + bias[n0]);
        const float value1 = (second + bias[n1]);
        mp_store_pair((y + row * 192 + n0), value0, value1);
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

/* %transpose_3 = attention(%reshape_1, %transpose_1, %transpose_2, _, _) {causal=True, scale=None, softcap=None,
 *     window=None, layout="bshd"} : f32[batch, seq, 4, 16]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(128)
attention_2(const float *q, const float *k, const float *v, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { THREADS = 128, HEADS = 4, GROUP = 1, DIM = 16, VALUE = 16 };
    enum { EACH = (VALUE + THREADS - 1) / THREADS };
    __shared__ float query[DIM], score[THREADS], shared[THREADS];
    mp_wait();
    const int64_t queries = n_seq, keys = n_seq;
    const int64_t h = blockIdx.x % HEADS, b MP_UNUSED = blockIdx.x / HEADS / queries, g MP_UNUSED = h / GROUP;
    const int64_t s0 = blockIdx.x / HEADS % queries, count MP_UNUSED = 1, r = 0;
    const int64_t before = keys - queries, position MP_UNUSED = before + s0;
    const int64_t written = mp_min(keys, before + queries);
    for (int i = threadIdx.x; i < DIM; i += THREADS) query[i] = q[b * n_seq * 192 + s0 * 192 + h * 16 + i] * 0.25f;
    float sums[EACH] = {}, top = -INFINITY, total = 0;
    const int64_t first = 0, last = mp_min(written, before + s0 + 1);
    for (int64_t j0 = first; j0 < last; j0 += THREADS) {
        const int64_t key = j0 + threadIdx.x;
        __syncthreads();
        float dot = -INFINITY;
        if (key < last && (key < written && key <= position)) {
            dot = 0;
            for (int i = 0; i < DIM; ++i) dot += query[i] * k[b * n_seq * 192 + g * 16 + key * 192 + i + 64];
        }
        shared[threadIdx.x] = dot;
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if ((int)threadIdx.x < half)
                shared[threadIdx.x] = mp_maximum_f32(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        __syncthreads();
        const float high = mp_maximum_f32(top, shared[0]);
        __syncthreads();
        if (high == -INFINITY) continue;
        const float keep = mp_expf(top - high), weight = dot == -INFINITY ? 0 : mp_expf(dot - high);
        score[threadIdx.x] = weight;
        total = total * keep + mp_block_sum<THREADS>(shared, weight);
        top = high;
        for (int e = 0; e < EACH; ++e) {
            const int i = threadIdx.x + e * THREADS;
            if (i >= VALUE) break;
            float sum = sums[e] * keep;
            for (int64_t j = 0; j < mp_min(THREADS, last - j0); ++j) {
                const int64_t key = j0 + j;
                if (score[j] != 0) sum += score[j] * v[b * n_seq * 192 + g * 16 + key * 192 + i + 128]; /* a hidden key may hold anything */
            }
            sums[e] = sum;
        }
    }
    const float scale = total == 0 ? 0 : 1 / total;
    for (int e = 0; e < EACH; ++e) {
        const int i = threadIdx.x + e * THREADS;
        if (i >= VALUE) break;
        const float v_out = sums[e] * scale;
        y[b * n_seq * 64 + s0 * 64 + h * 16 + i] = v_out;
    }
}

/* %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_3_row(const float *x, const float *w, const float *bias, const float *e0, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 64, N = 64, PAIRS = (N + 1) / 2, GRID = 32, WARPS = 8, SLICES = 1 };
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
        const float2 e0_both = mp_load_pair(((e0 + row * 64 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first + bias[n0]) + extra.e0_0);
        const float value1 = ((second + bias[n1]) + extra.e0_1);
        mp_store_pair((y + row * 64 + n0), value0, value1);
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

/* %add = fused_linear(%reshape_4, %c_proj.weight, %c_proj.bias, _, _, %x) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256) fused_linear_3_finish(const float *bias, const float *e0, float *y, const float *sums, const int64_t splits, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 64, PAIRS = (N + 1) / 2 };
    mp_release();
    mp_wait();
    const int64_t rows = n_batch * n_seq;
    auto part = [&](const int64_t row, const int64_t n) {
        float sum = 0.0f;
        if (n < N)
            for (int split = 0; split < splits; ++split) sum += sums[(split * rows + row) * N + n];
        return sum;
    };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 64 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first + bias[n0]) + extra.e0_0);
        const float value1 = ((second + bias[n1]) + extra.e0_1);
        mp_store_pair((y + row * 64 + n0), value0, value1);
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

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_5_row(const float *x, const float *w, const float *bias, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 64, N = 256, PAIRS = (N + 1) / 2, GRID = 128, WARPS = 8, SLICES = 1 };
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
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = mp_gelu_tanhf((first + bias[n0]));
        const float value1 = mp_gelu_tanhf((second + bias[n1]));
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

/* %gelu = fused_linear(%add, %c_fc.weight, %c_fc.bias, %ln_2.weight, %ln_2.bias) {norm="layer", eps=1e-05,
 *     gated=False, expr="gelu(x0, approximate='tanh')"} : f32[batch, seq, 256]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256) fused_linear_5_finish(const float *bias, float *y, const float *sums, const int64_t splits, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 256, PAIRS = (N + 1) / 2 };
    mp_release();
    mp_wait();
    const int64_t rows = n_batch * n_seq;
    auto part = [&](const int64_t row, const int64_t n) {
        float sum = 0.0f;
        if (n < N)
            for (int split = 0; split < splits; ++split) sum += sums[(split * rows + row) * N + n];
        return sum;
    };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = mp_gelu_tanhf((first + bias[n0]));
        const float value1 = mp_gelu_tanhf((second + bias[n1]));
        mp_store_pair((y + row * 256 + n0), value0, value1);
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

/* %add_1 = fused_linear(%gelu, %c_out.weight, %c_out.bias, _, _, %add) {norm="none", eps=0.0, gated=False,
 *     expr="add(x0, x1)"} : f32[batch, seq, 64]
 * tests/codegen/test_golden_source.py:0 */
extern "C" __global__ void __launch_bounds__(256, 1) fused_linear_6_row(const float *x, const float *w, const float *bias, const float *e0, float *y, const int64_t n_batch, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 256, N = 64, PAIRS = (N + 1) / 2, GRID = 32, WARPS = 8, SLICES = 2 };
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
        const float2 e0_both = mp_load_pair(((e0 + row * 64 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first, const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first + bias[n0]) + extra.e0_0);
        const float value1 = ((second + bias[n1]) + extra.e0_1);
        mp_store_pair((y + row * 64 + n0), value0, value1);
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
