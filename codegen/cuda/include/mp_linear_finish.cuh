/* The epilogue of products over sums in memory: sums[split, row, n], the partial sums of each split of K.
 *
 * Blocks have 256 threads. `fetch(row, pair)` reads what the epilogue needs beside the sums; `finish(fetched, row,
 * pair, first, second)` takes the sums of columns 2 pair and 2 pair + 1. */
#include "mp_vec.cuh"

/* The sum of one column over all splits; 0 behind the last column. */
template <int N, typename T> struct mp_split_sums {
    const T *sums;
    const int64_t splits, rows;
    MP_FN float operator()(const int64_t row, const int64_t n) const
    {
        float sum = 0.0f;
        if (n < N)
            for (int split = 0; split < splits; ++split) sum += mp_float(sums[(split * rows + row) * N + n]);
        return sum;
    }
};

/* `finish(fetch(row, pair), row, pair, first, second)` of EACH pairs of columns for a thread, 256 apart. */
template <int N, int EACH, typename T, typename Fetch, typename Finish>
MP_FN void mp_finish_pairs(const T *sums, const int64_t splits, const int64_t rows, const Fetch &fetch,
    const Finish &finish)
{
    enum { PAIRS = (N + 1) / 2 };
    const mp_split_sums<N, T> part = {sums, splits, rows};
    const int pair0 = blockIdx.x * (256 * EACH) + threadIdx.x;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        decltype(fetch(0, 0)) extra[EACH];
        float2 both[EACH];
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int pair = pair0 + e * 256;
            if (pair >= PAIRS) break;
            extra[e] = fetch(row, pair);
            if (N % 2 == 0) {
                both[e] = make_float2(0.0f, 0.0f);
                for (int split = 0; split < splits; ++split) {
                    const float2 two = mp_load_pair(sums + (split * rows + row) * N + 2 * pair);
                    both[e].x += two.x;
                    both[e].y += two.y;
                }
            } else {
                both[e] = make_float2(part(row, 2 * pair), part(row, 2 * pair + 1));
            }
        }
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int pair = pair0 + e * 256;
            if (pair < PAIRS) finish(extra[e], row, pair, both[e].x, both[e].y);
        }
    }
}

/* The same with all pairs of a row for the blocks of that row. */
template <int N, typename T, typename Fetch, typename Finish>
MP_FN void mp_finish_row(const T *sums, const int64_t splits, const int64_t rows, const Fetch &fetch,
    const Finish &finish)
{
    const mp_split_sums<N, T> part = {sums, splits, rows};
    const int64_t row = blockIdx.y;
    for (int64_t pair = blockIdx.x * 256 + threadIdx.x; pair < (N + 1) / 2; pair += 256 * gridDim.x)
        finish(fetch(row, pair), row, pair, part(row, 2 * pair), part(row, 2 * pair + 1));
}

/* Whether this is the last of a grid's blocks to come here: it sees what the others wrote before. The ticket is 0 again then,
 * for the next kernel. */
MP_FN bool mp_last_block(uint32_t *ticket, const uint32_t blocks)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(ticket, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

/* The largest of what the threads of a block found: mp_rank of a column. */
MP_FN uint64_t mp_block_best(const uint64_t best)
{
    __shared__ unsigned long long top;
    if (threadIdx.x == 0) top = 0;
    __syncthreads();
    atomicMax(&top, (unsigned long long)best);
    __syncthreads();
    return top;
}

/* The best of `count` candidates that other blocks left. */
MP_FN uint64_t mp_best_candidate(const uint64_t *candidates, const int64_t count)
{
    uint64_t best = 0;
    MP_UNROLL_BY(1)
    for (int64_t i = threadIdx.x; i < count; i += 256) best = candidates[i] > best ? candidates[i] : best;
    return mp_block_best(best);
}

/* Gates and what they multiply, four columns at a time: eight neighbours of half precision are sixteen bytes.
 * `body(gate, up)` is the result, `row_of(row)` where the row's results go. */
template <int N, typename W, typename Body, typename Rows>
MP_FN void mp_finish_gated(const W *sums, const int64_t rows, const Body &body, const Rows &row_of)
{
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= (N + 1) / 2 / 4) return;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float f[8], v[4];
        mp_widen<W>(f, mp_read_fresh(sums + row * N + 8 * i));
        MP_UNROLL
        for (int e = 0; e < 4; ++e) v[e] = body(f[2 * e], f[2 * e + 1]);
        mp_store4(row_of(row) + 4 * i, v);
    }
}

/* Columns 2 i and 2 i + 1 of a head are two dimensions that rotate together, see `Layout.order`: which ones. S has the
 * constants HEADS, KV (heads of keys, and of values), DIM, HALF (pairs that rotate) and INTERLEAVED. Values come last,
 * and do not rotate. */
struct mp_dims { int64_t first, second; };
template <typename S> MP_FN mp_dims mp_pair_dims(const int64_t head, const int64_t i)
{
    const bool apart = !S::INTERLEAVED && head < S::HEADS + S::KV && i < S::HALF;
    return mp_dims{apart ? i : 2 * i, apart ? i + S::HALF : 2 * i + 1};
}

/* A row of a cache in 8 bits, by a warp: `numbers` of each lane go to places `at`, of which a negative one is none. A row
 * that is not finite has a scale of NaN. */
template <int DIM, int COUNT> MP_FN void mp_store_bytes(int8_t *to, const float (&numbers)[COUNT], const int (&at)[COUNT])
{
    uint32_t top = 0;
    MP_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        const uint32_t bits = at[i] < 0 ? 0 : mp_float_to_bits(numbers[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    top = mp_warp_max(top);
    const bool bad = top >= 0x7f800000u;
    const float largest = mp_bits_to_float(top), ratio = bad || top == 0 ? 0.0f : 127.0f / largest;
    MP_UNROLL
    for (int i = 0; i < COUNT; ++i)
        if (at[i] >= 0) to[at[i]] = (int8_t)(bad || !(ratio < INFINITY) ? 0 : (int)rintf(numbers[i] * ratio));
    const float scale = bad ? NAN : largest / 127.0f;
    if (threadIdx.x % 32 == 0) memcpy(to + DIM, &scale, sizeof scale);
}

/* A warp for each head, whose norm goes before the rotation, or whose row of a cache has a scale. `ahead(row, pair)`
 * reads what the epilogue needs, before the dependency if AHEAD; `fresh(fetched)` what it needs from the kernels in front.
 * `biased(head, dims, u, v)` adds the bias to a pair, `weights(head, dims, u, v)` sets the norm's weights,
 * `is_normed(head)` says whether the head has a norm. `turned(fetched, u, v)` rotates a pair, `row_of(fetched, row, head)`
 * is where a row in bytes goes, if it is kept, and `finish` takes a pair of the others, before they are rotated. */
template <typename S, bool AHEAD, bool BYTES, typename T, typename Biased, typename Weights, typename Normed, typename Ahead,
    typename Fresh, typename Turned, typename RowOf, typename Finish>
MP_FN void mp_finish_whole_heads(const T *sums, const int64_t splits, const int64_t rows, const float eps,
    const Biased &biased, const Weights &weights, const Normed &is_normed, const Ahead &ahead, const Fresh &fresh,
    const Turned &turned, const RowOf &row_of, const Finish &finish)
{
    enum { DIM = S::DIM, ALL = S::HEADS + 2 * S::KV, EACH = (DIM / 2 + 31) / 32 };
    const int64_t task = ((int64_t)blockIdx.x * 256 + threadIdx.x) / 32, row = task / ALL, head = task % ALL;
    const int lane = threadIdx.x % 32;
    decltype(ahead(0, 0)) extra[EACH];
    float u[EACH], v[EACH], u_weight[EACH], v_weight[EACH], squares = 0.0f;
    if (!AHEAD) mp_wait();
    if (row >= rows) return;
    MP_UNROLL
    for (int e = 0; e < EACH; ++e) {
        const int i = (int)mp_min(lane + 32 * e, DIM / 2 - 1);
        extra[e] = ahead(row, head * (DIM / 2) + i);
        u_weight[e] = v_weight[e] = 1.0f;
        weights(head, mp_pair_dims<S>(head, i), u_weight[e], v_weight[e]);
    }
    if (AHEAD) mp_wait();
    MP_UNROLL
    for (int e = 0; e < EACH; ++e) {
        const int i = lane + 32 * e;
        u[e] = v[e] = 0.0f;
        if (i >= DIM / 2) break;
        for (int split = 0; split < splits; ++split) {
            const float2 two = mp_load_pair(sums + (split * rows + row) * (ALL * DIM) + head * DIM + 2 * i);
            u[e] += two.x, v[e] += two.y;
        }
        fresh(extra[e]);
        biased(head, mp_pair_dims<S>(head, i), u[e], v[e]);
        squares += u[e] * u[e] + v[e] * v[e];
    }
    const float scale = is_normed(head) ? 1.0f / sqrtf(mp_warp_sum(squares) / DIM + eps) : 1.0f;
    MP_UNROLL
    for (int e = 0; e < EACH; ++e) u[e] *= scale * u_weight[e], v[e] *= scale * v_weight[e];
    if constexpr (BYTES) {
        if (head >= S::HEADS) {
            float numbers[2 * EACH];
            int at[2 * EACH];
            MP_UNROLL
            for (int e = 0; e < EACH; ++e) {
                const mp_dims dims = mp_pair_dims<S>(head, lane + 32 * e);
                const bool live = lane + 32 * e < DIM / 2;
                turned(extra[e], u[e], v[e]);
                numbers[2 * e] = u[e], at[2 * e] = live ? (int)dims.first : -1;
                numbers[2 * e + 1] = v[e], at[2 * e + 1] = live ? (int)dims.second : -1;
            }
            int8_t *const to = row_of(extra[0], row, head); /* the same for all lanes */
            if (to) mp_store_bytes<DIM>(to, numbers, at);
            return;
        }
    }
    MP_UNROLL
    for (int e = 0; e < EACH; ++e)
        if (lane + 32 * e < DIM / 2) finish(extra[e], row, head * (DIM / 2) + lane + 32 * e, u[e], v[e]);
}

/* The many rows of a prompt, in half precision: all dimensions rotate, halves apart. A block takes a row, a thread the
 * same dimensions of every TEAM-th head, so that angles are read once for all of them. Four pairs of a head are sixteen
 * bytes: they rotate into four dimensions of each half. `position(b, s)` is the row of the tables of angles, which have
 * `angles` rows; `start(b)` and `given(b)` are a cache's length and how many of the new rows count, all of a sequence
 * or none; `q_at(b, s, head)`, `k_at(b, head, at)` and `v_at(b, head, at)` are where heads go. */
template <typename S, typename W, typename Position, typename Sines, typename Cosines, typename Start, typename Given,
    typename Q, typename Keys, typename Values>
MP_FN void mp_finish_heads(const W *sums, const uint32_t seq, const int64_t angles, const int64_t capacity,
    const Position &position, const Sines &sines, const Cosines &cosines, const Start &start_of, const Given &given_of,
    const Q &q_at, const Keys &k_at, const Values &v_at, mp_error *error, const int64_t step)
{
    enum { DIM = S::DIM, HEADS = S::HEADS, KV = S::KV, ALL = HEADS + 2 * KV, N = ALL * DIM, HALF = DIM / 2 };
    enum { QUADS = HALF / 4, TEAM = 256 / QUADS, TURNS = (ALL + TEAM - 1) / TEAM };
    const int i = threadIdx.x % QUADS * 4, member = threadIdx.x / QUADS;
    if (member >= TEAM) return;
    const int64_t row = blockIdx.x, b = (uint32_t)row / seq, s = (uint32_t)row % seq;
    uint4 raw[TURNS];
    MP_UNROLL
    for (int turn = 0; turn < TURNS; ++turn)
        if (member + turn * TEAM < ALL)
            raw[turn] = mp_read_fresh(sums + row * N + (member + turn * TEAM) * DIM + 2 * i);
    int64_t angle = position(b, s);
    if (angle < 0 || angle >= angles) {
        if (threadIdx.x == 0) mp_fail(error, MP_POSITION, step, row, angle, angles);
        angle = 0;
    }
    float sine[4], cosine[4];
    mp_widen<float>(sine, mp_read_cached(sines(angle, i)));
    mp_widen<float>(cosine, mp_read_cached(cosines(angle, i)));
    const int64_t start = start_of(b), given = given_of(b), at = start + s;
    const bool counted = given >= 0 && given <= seq, fits = start >= 0 && start <= capacity - given;
    if (threadIdx.x == 0 && !counted) mp_fail(error, MP_COUNT, step, b, given, seq);
    else if (threadIdx.x == 0 && !fits) mp_fail(error, MP_CACHE_FULL, step, b, start + given, capacity);
    MP_UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
        const int head = member + turn * TEAM;
        const int64_t kv = head < HEADS + KV ? head - HEADS : head - HEADS - KV;
        if (head >= ALL) break;
        float f[8], low[4], high[4];
        mp_widen<W>(f, raw[turn]);
        MP_UNROLL
        for (int e = 0; e < 4; ++e) {
            low[e] = f[2 * e] * cosine[e] - f[2 * e + 1] * sine[e];
            high[e] = f[2 * e] * sine[e] + f[2 * e + 1] * cosine[e];
        }
        if (head < HEADS) {
            mp_store4(q_at(b, s, head) + i, low);
            mp_store4(q_at(b, s, head) + HALF + i, high);
        } else if (!counted || !fits || s >= given || error->code) {
            break; /* heads of keys and values come last */
        } else if (head < HEADS + KV) {
            mp_store4(k_at(b, kv, at) + i, low);
            mp_store4(k_at(b, kv, at) + HALF + i, high);
        } else { /* values do not rotate: eight dimensions in order */
            mp_store8(v_at(b, kv, at) + 2 * i, f);
        }
    }
}
