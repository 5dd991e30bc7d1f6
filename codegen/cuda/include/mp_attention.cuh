/* Attention of any type with any mask: a block for each query and head. Some threads share a key for the scores, so that they
 * read neighbouring numbers; then each has a dimension of the weighted values, and where there are threads for several times
 * as many, each of those takes every so many keys.
 *
 * S has the constants THREADS, DIM and VALUE (dimensions of keys and of values), R is the type of all arithmetic. `query(i)` is
 * the scaled query, `key_at(key, i)` and `value_at(key, i)` the cache, `visible(key)` says whether the query sees a key
 * between `first` and `last`, `adjusted(dot, key)` is the score behind a cap and a mask, `sink` that of a key whose value
 * is 0 (-inf: there is none), `store(i, v)` takes the result. */
MP_FN float mp_real_exp(float x) { return mp_expf(x); }
MP_FN double mp_real_exp(double x) { return mp_exp(x); }
MP_FN float mp_real_max(float a, float b) { return mp_maximum_f32(a, b); }
MP_FN double mp_real_max(double a, double b) { return mp_maximum_f64(a, b); }

MP_FN float mp_row_scale(const int8_t *p)
{
    float scale;
    memcpy(&scale, p, sizeof scale);
    return scale;
}

template <typename S, typename R, typename Query, typename Key, typename Value, typename Visible, typename Adjusted,
    typename Store>
MP_FN void mp_attention(const int64_t first, const int64_t last, const Query &query_at, const Key &key_at,
    const Value &value_at, const Visible &visible, const Adjusted &adjusted, const R sink, const Store &store)
{
    enum { THREADS = S::THREADS, DIM = S::DIM, VALUE = S::VALUE, LANES = 16, AHEAD = 8 };
    enum { WIDE = (VALUE + 31) / 32 * 32, PARTS = WIDE < THREADS ? THREADS / WIDE : 1, SIDE = PARTS > 1 ? WIDE : THREADS };
    enum { EACH = (VALUE + SIDE - 1) / SIDE };
    __shared__ R query[DIM], score[THREADS], shared[THREADS];
    const int lane = threadIdx.x % LANES, part = threadIdx.x / SIDE, own = threadIdx.x % SIDE;
    for (int i = threadIdx.x; i < DIM; i += THREADS) query[i] = query_at(i);
    R sums[EACH] = {}, top = -INFINITY, total = 0;
    for (int64_t j0 = first; j0 < last; j0 += THREADS) {
        const int count = (int)mp_min(THREADS, last - j0);
        __syncthreads();
        score[threadIdx.x] = -INFINITY;
        __syncthreads();
        for (int n0 = 0; n0 < count; n0 += THREADS / LANES) {
            const int n = n0 + threadIdx.x / LANES;
            const bool seen = n < count && visible(j0 + n);
            R dot = 0;
            if (seen)
                for (int i = lane; i < DIM; i += LANES) dot += query[i] * key_at(j0 + n, i);
            MP_UNROLL
            for (int d = LANES / 2; d; d >>= 1) dot += __shfl_xor_sync(~0u, dot, d);
            if (seen && lane == 0) score[n] = adjusted(dot, j0 + n);
        }
        __syncthreads();
        const R dot = score[threadIdx.x];
        shared[threadIdx.x] = dot;
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if ((int)threadIdx.x < half)
                shared[threadIdx.x] = mp_real_max(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        __syncthreads();
        const R high = mp_real_max(top, shared[0]);
        __syncthreads();
        if (high == -INFINITY) continue;
        const R keep = mp_real_exp(top - high), weight = dot == -INFINITY ? 0 : mp_real_exp(dot - high);
        score[threadIdx.x] = weight;
        total = total * keep + mp_block_sum<THREADS>(shared, weight);
        top = high;
        for (int e = 0; e < EACH; ++e) {
            const int i = own + e * SIDE;
            if (i >= VALUE || part >= PARTS) break;
            R sum = sums[e] * keep;
            for (int from = part; from < count; from += AHEAD * PARTS) {
                R value[AHEAD], times[AHEAD];
                MP_UNROLL
                for (int u = 0; u < AHEAD; ++u) {
                    const int n = from + u * PARTS;
                    times[u] = n < count ? score[n] : 0;
                    value[u] = times[u] != 0 ? value_at(j0 + n, i) : 0; /* a hidden key may hold anything */
                }
                MP_UNROLL
                for (int u = 0; u < AHEAD; ++u) sum += times[u] * value[u];
            }
            sums[e] = sum;
        }
    }
    if (PARTS > 1) {
        __syncthreads();
        shared[threadIdx.x] = sums[0];
        __syncthreads();
        if (part == 0)
            for (int p = 1; p < PARTS; ++p) sums[0] += shared[own + p * SIDE];
    }
    if (part > 0) return;
    if (total != 0 && sink != -INFINITY) total += mp_real_exp(sink - top);
    const R scale = total == 0 ? 0 : 1 / total;
    for (int e = 0; e < EACH; ++e) {
        const int i = own + e * SIDE;
        if (i >= VALUE) break;
        store(i, sums[e] * scale);
    }
}
