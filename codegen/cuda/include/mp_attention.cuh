/* Attention of any type with any mask: a block of 128 threads for each query and head. Its threads take a key each for
 * the scores, then a dimension each for the weighted values.
 *
 * S has the constants DIM and VALUE (dimensions of keys and of values), R is the type of all arithmetic. `query(i)` is
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
    enum { THREADS = 128, DIM = S::DIM, VALUE = S::VALUE, EACH = (VALUE + THREADS - 1) / THREADS };
    __shared__ R query[DIM], score[THREADS], shared[THREADS];
    for (int i = threadIdx.x; i < DIM; i += THREADS) query[i] = query_at(i);
    R sums[EACH] = {}, top = -INFINITY, total = 0;
    for (int64_t j0 = first; j0 < last; j0 += THREADS) {
        const int64_t key = j0 + threadIdx.x;
        __syncthreads();
        R dot = -INFINITY;
        if (key < last && visible(key)) {
            dot = 0;
            for (int i = 0; i < DIM; ++i) dot += query[i] * key_at(key, i);
            dot = adjusted(dot, key);
        }
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
            const int i = threadIdx.x + e * THREADS;
            if (i >= VALUE) break;
            R sum = sums[e] * keep;
            for (int64_t j = 0; j < mp_min(THREADS, last - j0); ++j)
                if (score[j] != 0) sum += score[j] * value_at(j0 + j, i); /* a hidden key may hold anything */
            sums[e] = sum;
        }
    }
    if (total != 0 && sink != -INFINITY) total += mp_real_exp(sink - top);
    const R scale = total == 0 ? 0 : 1 / total;
    for (int e = 0; e < EACH; ++e) {
        const int i = threadIdx.x + e * THREADS;
        if (i >= VALUE) break;
        store(i, sums[e] * scale);
    }
}
