/* Products of rows with the matrices that are chosen for them. A pair is a row and one of its choices.
 *
 * Few pairs: blocks of one pair each have a run of columns, so that only chosen matrices are read. Warps split K into
 * SLICES, and the columns of a step into GROUPS. Many pairs: mp_expert_rows finds those of one matrix, and
 * mp_linear_few.cuh or mp_linear_tiles.cuh multiplies them. */
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

/* Weights in rows. S has the constants: K, N (columns), MATRICES (1, or 2 with a gate), SLICES, GROUPS, EACH (columns of a
 * warp at a time, EACH * MATRICES is a power of two), STEPS, RMS and GAMMA of a norm of x. `finish(n, sums)` takes the sums
 * of column n. */
template <typename S, typename W, typename X, typename G, typename Finish>
MP_FN void mp_experts_row(const W *const (&w)[S::MATRICES], const X *x, const G *norm_weight, const float eps, const Finish &finish)
{
    enum { K = S::K, N = S::N, MATRICES = S::MATRICES, SLICES = S::SLICES, GROUPS = S::GROUPS, EACH = S::EACH };
    enum { E = 16 / (int)sizeof(W), PIECES = K / E, SLICE = (PIECES + SLICES - 1) / SLICES, V = (SLICE + 31) / 32 };
    enum { COLUMNS = GROUPS * EACH * S::STEPS, R = EACH * MATRICES };
    __shared__ float part[SLICES][COLUMNS][MATRICES], squares[SLICES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp % SLICES, group = warp / SLICES;
    const int first = blockIdx.x * COLUMNS;
    int at[V];
    float xs[V * E];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = slice * SLICE + v * 32 + lane;
        const bool live = v * 32 + lane < SLICE && piece < PIECES;
        mp_vec<X, E> raw;
        at[v] = live ? piece * E : 0;
        mp_vec_fresh<X, E>(raw, x + at[v]);
        if (!live) mp_vec_zero<X, E>(raw);
        mp_vec_floats<X, E>(xs + v * E, raw);
    }
    if (S::RMS) mp_expert_norm<S, E, V>(xs, at, squares, norm_weight, slice, group == 0);
    for (int c = group * EACH; c < COLUMNS && first + c < N; c += GROUPS * EACH) {
        uint4 raw[R][V];
        MP_UNROLL
        for (int i = 0; i < R; ++i) {
            const W *const from = w[i % MATRICES] + mp_min(first + c + i / MATRICES, N - 1) * K;
            MP_UNROLL
            for (int v = 0; v < V; ++v) raw[i][v] = mp_read_const(from + at[v]);
        }
        float sums[R];
        MP_UNROLL
        for (int i = 0; i < R; ++i) {
            sums[i] = 0.0f;
            MP_UNROLL
            for (int v = 0; v < V; ++v) mp_dot<W>(sums[i], raw[i][v], xs + v * E);
        }
        const float sum = mp_reduce_rows<R>(sums, lane);
        if (lane % (32 / R) == 0) part[slice][c + lane / (32 / R) / MATRICES][lane / (32 / R) % MATRICES] = sum;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < COLUMNS && first + c < N; c += blockDim.x) {
        float sums[MATRICES] = {0};
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j)
            for (int m = 0; m < MATRICES; ++m) sums[m] += part[j][c][m];
        for (int m = 0; S::RMS && m < MATRICES; ++m) sums[m] *= mp_expert_scale<S>(squares, eps);
        finish(first + c, sums);
    }
}

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
