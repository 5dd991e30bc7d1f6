/* Choosing among weighted elements in order: how top-k, top-p and the draw itself are made without sorting.
 * Weights are whole numbers, so sums do not depend on the order of the threads. */
struct mp_element { uint64_t key, weight; }; /* smaller keys first; weight 0: not there */
struct mp_cut { uint64_t key; int64_t index; }; /* the last element that is kept: keys below, or equal and up to index */
MP_FN bool mp_within(const mp_cut &cut, uint64_t key, int64_t index)
{
    return key < cut.key || (key == cut.key && index <= cut.index);
}

struct mp_select_memory { unsigned long long weights[256], target; int counts[256], digit; };

/* One digit: the bucket where the running sum reaches the target; the target becomes what is left for that bucket. */
template <int THREADS, typename Digit>
MP_FN int mp_select_digit(mp_select_memory &m, int64_t n, Digit digit)
{
    for (int i = threadIdx.x; i < 256; i += THREADS) m.weights[i] = 0, m.counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        uint64_t weight = 0;
        const int d = digit(i, weight);
        if (weight == 0) continue;
        atomicAdd(&m.weights[d], (unsigned long long)weight);
        atomicAdd(&m.counts[d], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        unsigned long long own = 0;
        for (int i = 0; i < 8; ++i) own += m.weights[lane * 8 + i];
        unsigned long long upto = own;
        for (int d = 1; d < 32; d *= 2) {
            const unsigned long long left = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += left;
        }
        const unsigned long long target = m.target;
        const bool first = upto >= target && upto - own < target;
        __syncwarp();
        if (first) {
            unsigned long long below = upto - own;
            int bucket = lane * 8;
            while (below + m.weights[bucket] < target) below += m.weights[bucket++];
            m.digit = bucket;
            m.target = target - below;
        }
    }
    __syncthreads();
    const int found = m.digit;
    __syncthreads();
    return found;
}

/* The first element, by key and then by index, at which the running sum of weights reaches `target` (1 to their sum).
 * Keys are distances with 32 binary places: the first digit takes eighths up to 32, which spreads logits well. */
template <int THREADS, typename Element>
MP_FN mp_cut mp_select(mp_select_memory &m, int64_t n, uint64_t target, Element element)
{
    if (threadIdx.x == 0) m.target = target;
    int shift = 29; /* keys of the wanted element are known down to this bit */
    uint64_t prefix = mp_select_digit<THREADS>(m, n, [&](int64_t i, uint64_t &weight) {
        const mp_element e = element(i);
        weight = e.weight;
        return (int)mp_min((int64_t)(e.key >> 29), 255);
    });
    if (prefix == 255) { /* far away: all digits */
        shift = 64;
        prefix = 0;
        for (int low = 56; low >= 32; low -= 8) {
            const int digit = mp_select_digit<THREADS>(m, n, [&](int64_t i, uint64_t &weight) {
                const mp_element e = element(i);
                weight = e.key >> 29 >= 255 && (low == 56 || e.key >> (low + 8) == prefix) ? e.weight : 0;
                return (int)(e.key >> low & 255);
            });
            prefix = prefix << 8 | digit;
            shift = low;
        }
    }
    for (int bits = shift == 29 ? 5 : 8; shift > 0; bits = 8) {
        const int low = shift - bits;
        const int digit = mp_select_digit<THREADS>(m, n, [&](int64_t i, uint64_t &weight) {
            const mp_element e = element(i);
            weight = e.key >> shift == prefix ? e.weight : 0;
            return (int)(e.key >> low & ((1 << bits) - 1));
        });
        prefix = prefix << bits | digit;
        shift = low;
    }
    int64_t index = 0;
    for (int low = 24; low >= 0; low -= 8) {
        const int digit = mp_select_digit<THREADS>(m, n, [&](int64_t i, uint64_t &weight) {
            const mp_element e = element(i);
            weight = e.key == prefix && (low == 24 || i >> (low + 8) == index) ? e.weight : 0;
            return (int)(i >> low & 255);
        });
        index = index << 8 | digit;
    }
    return mp_cut{prefix, index};
}

/* The sum of all weights; `scratch` has THREADS places. */
template <int THREADS, typename Element>
MP_FN uint64_t mp_block_total(uint64_t *scratch, int64_t n, Element element)
{
    uint64_t sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += element(i).weight;
    return mp_block_sum<THREADS>(scratch, sum);
}
