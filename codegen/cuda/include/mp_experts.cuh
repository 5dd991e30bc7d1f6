/* Products of rows with the matrices that are chosen for them. A pair is a row and one of its choices.
 *
 * Few pairs: blocks of one pair each have a run of columns, so that only chosen matrices are read; mp_linear_row.cuh is
 * their loop, and mp_experts_tiles.cuh that of weights in tiles. Many pairs: mp_expert_rows finds those of one matrix, and
 * mp_linear_few.cuh multiplies them. */
#include "mp_vec.cuh"

/* The norm of x: V times E numbers of each lane, those of piece v from column at[v] on, are multiplied by its weight;
 * `squares` of each slice remain for the finished sums. */
template <typename S, int E, int V, typename G>
MP_FN void mp_expert_norm(float *xs, const int *at, float *squares, const G *norm_weight, const int slice, const bool writes)
{
    float square = 0.0f;
    MP_UNROLL
    for (int i = 0; i < V * E; ++i) square = fmaf(xs[i], xs[i], square);
    square = mp_warp_sum(square);
    if (writes && threadIdx.x % 32 == 0) squares[slice] = square;
    MP_UNROLL
    for (int v = 0; S::GAMMA && v < V; ++v) {
        MP_UNROLL
        for (int i = 0; i < E; ++i) xs[v * E + i] *= mp_float(norm_weight[at[v] + i]);
    }
}
template <typename S> MP_FN float mp_expert_scale(const float *squares, const float eps)
{
    float total = 0.0f;
    MP_UNROLL
    for (int j = 0; j < S::SLICES; ++j) total += squares[j];
    return rsqrtf(total / S::K + eps);
}

/* Rows of one matrix, or of a gate and what it multiplies in turn. */
template <typename W, int K, int MATRICES> struct mp_expert_run {
    const W *first, *second;
    MP_FN const W *at(const int i) const { return MATRICES == 1 ? first + i * K : (i % 2 ? second : first) + i / 2 * K; }
};

/* Pairs of one matrix, as many as fit: at most ROWS at a time, of all that follow `from`. */
template <int ROWS, int THREADS> struct mp_expert_rows {
    int pairs[ROWS + THREADS], count, counts[THREADS / 32];

    /* Fills the list; `chosen(pair)` says whether the matrix is that of a pair. Gives where to go on, and all agree. */
    template <typename Chosen> MP_FN int64_t fill(int64_t from, const int64_t end, const Chosen &chosen)
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (; from < end && count < ROWS; from += THREADS) {
            const int64_t pair = from + threadIdx.x;
            const unsigned mine = __ballot_sync(~0u, pair < end && chosen(pair));
            if (lane == 0) counts[warp] = __popc(mine);
            __syncthreads();
            int before = count, all = 0;
            for (int i = 0; i < THREADS / 32; ++i) before += i < warp ? counts[i] : 0, all += counts[i];
            if (mine >> lane & 1) pairs[before + __popc(mine & ((1u << lane) - 1))] = (int)pair;
            __syncthreads();
            if (threadIdx.x == 0) count += all;
            __syncthreads();
        }
        return from;
    }

    /* Drops the first ROWS. */
    MP_FN void drop()
    {
        __syncthreads();
        const int left = count - ROWS, own = (int)threadIdx.x < left ? pairs[ROWS + threadIdx.x] : 0;
        __syncthreads();
        if ((int)threadIdx.x < left) pairs[threadIdx.x] = own;
        if (threadIdx.x == 0) count = left > 0 ? left : 0;
        __syncthreads();
    }
};
