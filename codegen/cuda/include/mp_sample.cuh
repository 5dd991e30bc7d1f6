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

/* A token of one row, by a block. Nothing is sorted: weights become whole numbers, and the cuts of top-k and top-p and
 * the drawn token are found digit by digit from sums over the vocabulary. `mass` has a place for each token; `logit(i)`
 * is a double, of equals the first is best, and NaN comes after every number. */
template <int THREADS, typename Logit>
MP_FN int64_t mp_sample(uint64_t *mass, const int64_t vocabulary, const Logit &logit, const double temperature,
    const double top_p, const double min_p, const int64_t top_k, const double random)
{
    __shared__ mp_select_memory memory;
    __shared__ uint64_t tops[THREADS];
    __shared__ int64_t places[THREADS];
    uint64_t top = 0;
    int64_t best = vocabulary;
    MP_UNROLL_BY(8)
    for (int64_t i = threadIdx.x; i < vocabulary; i += THREADS) {
        const double v = logit(i);
        const uint64_t order = v != v ? 0 : mp_order(v);
        if (order > top || best == vocabulary) top = order, best = i;
    }
    tops[threadIdx.x] = top;
    places[threadIdx.x] = best;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        const int other = threadIdx.x + half;
        if ((int)threadIdx.x < half && (tops[other] > tops[threadIdx.x] ||
            (tops[other] == tops[threadIdx.x] && places[other] < places[threadIdx.x]))) {
            tops[threadIdx.x] = tops[other];
            places[threadIdx.x] = places[other];
        }
    }
    __syncthreads();
    const int64_t greedy = places[0];
    if (!(temperature > 0)) return greedy;
    const double ONE = 1099511627776.0; /* the weight of the best token: 2 to the 40 */
    const uint64_t LIGHT = 1ull << 63;  /* marks a weight below min-p */
    const double high = logit(greedy);
    auto distance = [&](int64_t i) { /* from the best logit, in 2 to the -32 */
        const double d = high - logit(i);
        return d == 0 || i == greedy ? 0 : d < 2147483648.0 ? (uint64_t)(d * 4294967296.0) : ~0ull >> 1;
    };
    for (int64_t i = threadIdx.x; i < vocabulary; i += THREADS) {
        const double v = logit(i), w = i == greedy || v == high ? 1 : exp((v - high) / temperature);
        mass[i] = (uint64_t)(w * ONE) | (w >= min_p ? 0 : LIGHT);
    }
    __syncthreads();
    mp_cut cut = {~0ull, vocabulary};
    if (top_k > 0 && top_k < vocabulary)
        cut = mp_select<THREADS>(memory, vocabulary, (uint64_t)top_k, [&](int64_t i) { return mp_element{distance(i),
            1}; });
    if (top_p < 1) {
        /* top-p counts every token that top-k kept, also those below min-p */
        auto whole = [&](int64_t i) {
            const uint64_t key = distance(i);
            return mp_element{key, mp_within(cut, key, i) ? mass[i] & ~LIGHT : 0};
        };
        const uint64_t total = mp_block_total<THREADS>(tops, vocabulary, whole);
        const double goal = ceil(top_p * (double)total);
        cut = mp_select<THREADS>(memory, vocabulary, (uint64_t)mp_max(1, mp_min((int64_t)goal, (int64_t)total)), whole);
    }
    auto kept = [&](int64_t i) {
        const uint64_t key = distance(i);
        const uint64_t m = mass[i];
        return mp_element{key, mp_within(cut, key, i) && !(m & LIGHT) ? m : 0};
    };
    const uint64_t total = mp_block_total<THREADS>(tops, vocabulary, kept);
    const double goal = floor(random * (double)total);
    return mp_select<THREADS>(memory, vocabulary, (uint64_t)mp_max(1, mp_min((int64_t)goal + 1, (int64_t)total)),
        kept).index;
}
