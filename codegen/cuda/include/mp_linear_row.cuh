/* One row of x: y = epilogue(w · norm(x)), the decode kernel. Weights are read once, through a ring of asynchronous
 * copies.
 *
 * A block owns a run of row pairs of w. Its warps split K into SLICES (and the batches of BATCH rows into GROUPS), so
 * an element of x is loaded once for each group and stays in registers; 1 / rms is applied to the finished sums. A lane
 * copies exactly the bytes that it will read itself: the ring needs no barrier.
 *
 * S has the constants: K, N (rows of w), GRID (blocks), WARPS, SLICES, BATCH, RING (batches in flight), EARLY (of them
 * before the dependency), GENTLE (in flight at most until then, 0: all), LATE (batches that a warp has left when it
 * lets the next kernel start, 0: from the beginning, -1: when its own dependency is met), RMS and GAMMA (of the norm).
 * `rows_from(pair)` is where rows of w are from 2 pair on, asked once before the first of them is read: `at(i)`.
 * `fetch(row, pair)` reads what the
 * epilogue needs beside the sums, before the dependency if AHEAD; `fresh(fetched)` what it needs from the kernels in
 * front; `finish(fetched, row, pair, first, second)` takes the sums of rows 2 pair and 2
 * pair + 1 of w. */
#include "mp_vec.cuh"

template <typename W, int K> struct mp_row_run {
    const W *first;
    MP_FN const W *at(const int i) const { return first + i * K; }
};

template <typename S, typename W, typename RowsFrom, typename X, typename G, typename Fetch, typename Fresh, typename Finish>
MP_FN void mp_linear_row(const RowsFrom &rows_from, const X *x, const G *norm_weight, const float eps, const Fetch &fetch,
    const Fresh &fresh, const Finish &finish)
{
    enum { K = S::K, N = S::N, PAIRS = (N + 1) / 2, GRID = S::GRID, WARPS = S::WARPS, THREADS = WARPS * 32 };
    enum { SLICES = S::SLICES, GROUPS = WARPS / SLICES, BATCH = S::BATCH };
    enum { RING = S::RING, EARLY = S::EARLY, GENTLE = S::GENTLE, LATE = S::LATE, AHEAD = S::AHEAD };
    enum { E = 16 / (int)sizeof(W), PIECES = K / E, SLICE = (PIECES + SLICES - 1) / SLICES, V = (SLICE + 31) / 32 };
    enum { WHOLE = SLICE * SLICES == PIECES && SLICE % 32 == 0, SLOT = BATCH * V * 512 };
    enum { MOST = 2 * ((PAIRS + GRID - 1) / GRID), BATCHES = (MOST + BATCH - 1) / BATCH };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ float squares[SLICES];
    typedef float sums_of_slice[BATCHES * BATCH];
    sums_of_slice *const part = (sums_of_slice *)(dynamic + WARPS * RING * SLOT);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, slice = warp % SLICES, group = warp / SLICES;
    const int p0 = (int)((int64_t)PAIRS * blockIdx.x / GRID), end = (int)((int64_t)PAIRS * (blockIdx.x + 1) / GRID);
    const int pairs = end - p0;
    const int count = (int)mp_min(2 * pairs, N - 2 * p0), batches = (count + BATCH - 1) / BATCH;
    if (!LATE) mp_release();

    decltype(fetch(0, 0)) early;
    if (AHEAD && tid < pairs) early = fetch(0, p0 + tid);

    /* Before the dependency: constants first (behind the ring they would wait for all of it), then weights. */
    int at[V];
    bool live[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = slice * SLICE + v * 32 + lane;
        live[v] = WHOLE || (v * 32 + lane < SLICE && piece < PIECES);
        at[v] = live[v] ? piece : 0;
    }
    mp_vec<G, E> gamma[V];
    if (S::GAMMA == MP_GAMMA_CONSTANT) {
        MP_UNROLL
        for (int v = 0; v < V; ++v) mp_vec_const<G, E>(gamma[v], norm_weight + at[v] * E);
    }
    decltype(rows_from(0)) rows = {};
    if (EARLY) rows = rows_from(p0);
    const mp_shared ring = mp_shared_address(dynamic) + warp * RING * SLOT + lane * 16;
    auto issue = [&](const int b, const int slot) {
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            const W *const from = rows.at(b * BATCH + r);
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
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* other kernels' loads must not wait long */
        issue(group + d * GROUPS, d);
    }
    mp_wait();
    if (LATE < 0) mp_release();
    if (!EARLY) rows = rows_from(p0);

    /* After it: x first, then the rest of the ring, then what only the epilogue needs. */
    mp_vec<X, E> raw[V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) mp_vec_fresh<X, E>(raw[v], x + at[v] * E);
    if (S::GAMMA == MP_GAMMA_COMPUTED) {
        MP_UNROLL
        for (int v = 0; v < V; ++v) mp_vec_fresh<G, E>(gamma[v], norm_weight + at[v] * E);
    }
    for (int d = EARLY; d < RING; ++d) issue(group + d * GROUPS, d);
    if (!AHEAD && tid < pairs) early = fetch(0, p0 + tid);
    if (tid < pairs) fresh(early);
    float xs[E * V];
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        if (!live[v]) mp_vec_zero<X, E>(raw[v]);
        mp_vec_floats<X, E>(xs + E * v, raw[v]);
    }
    if (S::RMS) {
        float square = 0.0f;
        MP_UNROLL
        for (int i = 0; i < E * V; ++i) square = fmaf(xs[i], xs[i], square);
        square = mp_warp_sum(square);
        if (group == 0 && lane == 0) squares[slice] = square;
    }
    if (S::GAMMA) {
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            float g[E];
            mp_vec_floats<G, E>(g, gamma[v]);
            MP_UNROLL
            for (int i = 0; i < E; ++i) xs[E * v + i] *= g[i];
        }
    }

    for (int b = group, slot = 0; b < batches; b += GROUPS, slot = slot + 1 == RING ? 0 : slot + 1) {
        if (LATE > 0 && b + LATE * GROUPS >= batches) mp_release(); /* the next kernel's weights follow this one's last */
        mp_copy_wait<RING - 1>();
        float sums[BATCH];
        MP_UNROLL
        for (int r = 0; r < BATCH; ++r) {
            sums[r] = 0.0f;
            MP_UNROLL
            for (int v = 0; v < V; ++v)
                mp_dot<W>(sums[r], mp_read_shared(ring + slot * SLOT + (r * V + v) * 512), xs + E * v);
        }
        issue(b + RING * GROUPS, slot);
        const float sum = mp_reduce_rows<BATCH>(sums, lane);
        if (lane % (32 / BATCH) == 0) part[slice][b * BATCH + lane / (32 / BATCH)] = sum;
    }
    __syncthreads();

    /* One thread for each row pair; slices are summed in a fixed order. */
    float scale = 1.0f;
    if (S::RMS) {
        float total = 0.0f;
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j) total += squares[j];
        scale = rsqrtf(total / K + eps);
    }
    for (int i = tid; i < pairs; i += THREADS) {
        float first = 0.0f, second = 0.0f;
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j) {
            const float2 two = *(const float2 *)&part[j][2 * i];
            first += two.x;
            second += two.y;
        }
        if (i != tid) {
            early = fetch(0, p0 + i);
            fresh(early);
        }
        finish(early, 0, p0 + i, first * scale, second * scale);
    }
}
