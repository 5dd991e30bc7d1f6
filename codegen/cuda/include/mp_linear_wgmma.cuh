/* Products of many rows by Hopper's warpgroups: epilogue(x[rows, K] · wᵀ), w[N, K], both in bf16; sums are f32 in registers.
 *
 * GROUPS warpgroups multiply, 64 rows and COLUMNS columns each; a thread of one more copies boxes of x and w into a ring in
 * shared memory. Blocks go on to further tiles, so that copies for the next one run beside an epilogue.
 *
 * S has the constants K, N, GROUPS, COLUMNS (32 to 256), STAGES (of 64 of K), BAND (tiles of rows that take turns before the
 * next columns: what they have of x stays in L2) and AHEAD (w may be read before the dependency).
 *
 * SPLITS > 1: so many blocks of a cluster have one tile and a part of K each, GROUPS is 1, and there are as many clusters as
 * tiles. Each finishes a part of the columns, from the sums of all of them.
 *
 * `epilogue(c, row, n)` gets a thread's sums: c[i][0] and c[i][1] are those of columns n + 8 i and n + 8 i + 1 in `row`, c[i][2]
 * and c[i][3] of the same columns in row + 8. Lane 4 g + t of a warp has rows g and g + 8 of 16, columns 2 t and 2 t + 1. */
#include "mp_vec.cuh"
#include "mp_wgmma.cuh"

/* A thread's sums. NVRTC takes no lambda whose parameters are `auto`. */
template <typename S> using mp_wgmma_sums = float[S::COLUMNS / 8 / S::SPLITS][4];

template <typename S, typename Epilogue>
MP_FN void mp_linear_wgmma(const mp_map *const x, const mp_map *const w, const int64_t rows, const Epilogue &epilogue)
{
    enum { GROUPS = S::GROUPS, COLUMNS = S::COLUMNS, STAGES = S::STAGES, BAND = S::BAND };
    enum { ROWS = GROUPS * 64, STEPS = (S::K + 63) / 64, WIDE = (S::N + COLUMNS - 1) / COLUMNS };
    enum { SPLITS = S::SPLITS, BLOCKS = COLUMNS / 8 / SPLITS };
    enum { X_BYTES = ROWS * 128, W_BYTES = COLUMNS * 128 };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ uint64_t laps[2 * STAGES];
    const mp_shared base = (mp_shared_address(dynamic) + 1023) / 1024 * 1024, base_w = base + STAGES * X_BYTES;
    const mp_shared full = mp_shared_address(laps), empty = full + STAGES * 8;
    const int split = blockIdx.x % SPLITS, first = blockIdx.x / SPLITS, turn = gridDim.x / SPLITS;
    const int begin = STEPS * split / SPLITS, end = STEPS * (split + 1) / SPLITS; /* of the steps of K */
    const int group = mp_warpgroup();
    mp_release();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mp_laps_begin(full + i * 8, 1);
            mp_laps_begin(empty + i * 8, GROUPS);
        }
        mp_laps_begun();
    }
    __syncthreads();

    const int high = (int)((rows + ROWS - 1) / ROWS), units = high * WIDE;
    auto row_of = [&](const int unit) {
        const int above = unit / (BAND * WIDE) * BAND, tall = high - above < BAND ? high - above : BAND;
        return (above + (unit - above * WIDE) % tall) * ROWS;
    };
    auto column_of = [&](const int unit) {
        const int above = unit / (BAND * WIDE) * BAND, tall = high - above < BAND ? high - above : BAND;
        return (unit - above * WIDE) / tall * COLUMNS;
    };
    int stage = 0;
    uint32_t lap = 0;
    auto next = [&]() {
        if (++stage == STAGES) stage = 0, lap ^= 1;
    };
    if (group == GROUPS) {
        if (GROUPS > 1) mp_registers_fewer<40>();
        if (threadIdx.x == GROUPS * 128) {
            auto copy_w = [&](const int step, const int column) {
                mp_lap_wait(empty + stage * 8, lap ^ 1);
                mp_lap_expect(full + stage * 8, X_BYTES + W_BYTES);
                mp_copy_box(base_w + stage * W_BYTES, w, step * 64, column, full + stage * 8);
            };
            auto copy_x = [&](const int step, const int row) {
                mp_copy_box(base + stage * X_BYTES, x, step * 64, row, full + stage * 8);
            };
            int ahead = 0; /* steps of the first tile whose w is on its way */
            if (S::AHEAD && first < units) {
                for (; ahead < STAGES && begin + ahead < end; ++ahead) copy_w(begin + ahead, column_of(first)), next();
                stage = 0, lap = 0;
            }
            mp_wait();
            for (int unit = first; unit < units; unit += turn) {
                const int row = row_of(unit), column = column_of(unit);
                for (int step = begin; step < end; ++step, next()) {
                    if (ahead > 0) --ahead;
                    else copy_w(step, column);
                    copy_x(step, row);
                }
            }
        }
        __syncwarp();
        if (SPLITS > 1) mp_cluster_arrive(), mp_cluster_wait();
    } else {
        if (GROUPS > 1) mp_registers_more<232>();
        const int lane = threadIdx.x % 32;
        float c[COLUMNS / 8][4] = {};
        auto done = [&](const int which) { /* with a stage */
            if (threadIdx.x % 128 == 0) mp_lap_arrive(empty + which * 8);
        };
        mp_wait(); /* an epilogue reads and writes what kernels in front do */
        for (int unit = first; unit < units; unit += turn) {
            int last = 0;
            for (int step = begin; step < end; ++step, next()) {
                mp_lap_wait(full + stage * 8, lap);
                const mp_shared xs = base + stage * X_BYTES + group * 8192, ws = base_w + stage * W_BYTES;
                mp_wgmma_begin();
                MP_UNROLL
                for (int d = 0; d < 4; ++d) mp_wgmma(c, mp_tile(xs + d * 32, 0), mp_tile(ws + d * 32, 0), (step - begin) | d);
                mp_wgmma_commit();
                mp_wgmma_wait<1>();
                if (step > begin) done(last);
                last = stage;
            }
            mp_wgmma_wait<0>();
            mp_settle(c);
            done(last);
            const int row = row_of(unit) + group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4, n = column_of(unit) + lane % 4 * 2;
            if constexpr (SPLITS == 1) {
                epilogue(c, row, n);
            } else { /* a thread has the same places in all blocks */
                const mp_shared own = base + threadIdx.x * 16;
                mp_group_barrier(group);
                MP_UNROLL
                for (int i = 0; i < COLUMNS / 8; ++i) mp_write_shared(own + i * 2048, c[i]);
                mp_cluster_arrive();
                mp_cluster_wait();
                float sums[BLOCKS][4] = {};
                for (int from = 0; from < SPLITS; ++from)
                    MP_UNROLL
                    for (int i = 0; i < BLOCKS; ++i) {
                        float f[4];
                        mp_widen<float>(f, mp_read_remote(own + (split * BLOCKS + i) * 2048, from));
                        MP_UNROLL
                        for (int j = 0; j < 4; ++j) sums[i][j] += f[j];
                    }
                epilogue(sums, row, n + split * BLOCKS * 8);
            }
        }
    }
    if (SPLITS > 1) mp_cluster_arrive(), mp_cluster_wait(); /* others read this block's sums */
}

/* Any epilogue: `finish(fetch(row, pair), row, pair, first, second)` of a pair of columns. */
template <int N, int BLOCKS, typename Fetch, typename Finish>
MP_FN void mp_wgmma_pairs(const float (&c)[BLOCKS][4], const int64_t rows, const int64_t row, const int n, const Fetch &fetch,
    const Finish &finish)
{
    enum { EACH = BLOCKS < 4 ? BLOCKS : 4 }; /* blocks of columns that are fetched for together */
    MP_UNROLL
    for (int i = 0; i < BLOCKS; i += EACH) {
        decltype(fetch(0, 0)) extra[EACH][2];
        MP_UNROLL
        for (int j = 0; j < 2 * EACH; ++j)
            if (n + (i + j / 2) * 8 < N && row + j % 2 * 8 < rows) extra[j / 2][j % 2] = fetch(row + j % 2 * 8, n / 2 + (i + j / 2) * 4);
        MP_UNROLL
        for (int j = 0; j < 2 * EACH; ++j)
            if (n + (i + j / 2) * 8 < N && row + j % 2 * 8 < rows)
                finish(extra[j / 2][j % 2], row + j % 2 * 8, n / 2 + (i + j / 2) * 4, c[i + j / 2][j % 2 * 2], c[i + j / 2][j % 2 * 2 + 1]);
    }
}

/* Lane t of four has words of four blocks; afterwards it has block t's words of all four lanes. */
MP_FN void mp_quad_turn(uint32_t (&v)[4], const int t)
{
    MP_UNROLL
    for (int d = 1; d <= 2; ++d)
        MP_UNROLL
        for (int k = 0; k < 2; ++k) {
            const int low = d == 1 ? 2 * k : k;
            const uint32_t got = __shfl_xor_sync(~0u, t & d ? v[low] : v[low + d], d);
            v[low] = t & d ? got : v[low];
            v[low + d] = t & d ? v[low + d] : got;
        }
}

/* Results in half precision, two to a word: `word(extra, row, pair, first, second)`, extra = fetch(row, pair); sixteen bytes of a
 * row are written at a time. `row_of(row)` is where a row's results go; N is a multiple of 8. */
template <int N, int BLOCKS, typename Fetch, typename Value, typename Rows>
MP_FN void mp_wgmma_words(const float (&c)[BLOCKS][4], const int64_t rows, const int64_t row, const int n, const Fetch &fetch,
    const Value &word, const Rows &row_of)
{
    typedef decltype(fetch(0, 0)) Extra;
    const int t = threadIdx.x % 4;
    Extra extra[2][8];
    auto fetch_four = [&](const int i, Extra (&to)[8]) {
        MP_UNROLL
        for (int j = 0; j < 8; ++j)
            if (n + (i + j / 2) * 8 < N && row + j % 2 * 8 < rows) to[j] = fetch(row + j % 2 * 8, n / 2 + (i + j / 2) * 4);
    };
    fetch_four(0, extra[0]);
    MP_UNROLL
    for (int i = 0; i < BLOCKS; i += 4) {
        if (i + 4 < BLOCKS) fetch_four(i + 4, extra[(i / 4 + 1) % 2]);
        MP_UNROLL
        for (int r = 0; r < 2; ++r) {
            uint32_t v[4];
            MP_UNROLL
            for (int j = 0; j < 4; ++j)
                v[j] = word(extra[i / 4 % 2][2 * j + r], row + 8 * r, n / 2 + (i + j) * 4, c[i + j][2 * r], c[i + j][2 * r + 1]);
            mp_quad_turn(v, t);
            const int to = n - 2 * t + (i + t) * 8;
            if (to < N && row + 8 * r < rows) *(uint4 *)(row_of(row + 8 * r) + to) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/* Lane t of four has a number of each of four blocks; it gets block t's numbers of all four lanes, in half precision. */
template <typename Y> MP_FN uint2 mp_quad_gather(const float (&v)[4], const int t)
{
    /* Blocks 0 and 1 go to lanes 0 and 1, 2 and 3 to the others; then two lanes part what they have. */
    const bool odd = t & 1;
    const uint32_t front = mp_pack<Y>(v[0], v[1]), back = mp_pack<Y>(v[2], v[3]);
    const uint32_t got = __shfl_xor_sync(~0u, t & 2 ? front : back, 2);
    const uint32_t a = t & 2 ? got : front, b = t & 2 ? back : got; /* of lanes t % 2 and t % 2 + 2 */
    const uint32_t low = mp_permute(a, b, 0x5410), high = mp_permute(a, b, 0x7632);
    const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1), even = odd ? other : low, last = odd ? high : other;
    return make_uint2(mp_permute(even, last, 0x5410), mp_permute(even, last, 0x7632));
}

/* Gates and what they multiply are neighbours: `body(gate, up)` is one result in half precision; eight bytes of a row are written
 * at a time. N is a multiple of 8. There are WIDTH results, a multiple of 4; `keep(row, pair, first, second)` takes the sums
 * behind them. */
template <int N, typename Y, int WIDTH, int BLOCKS, typename Body, typename Rows, typename Keep>
MP_FN void mp_wgmma_gated(const float (&c)[BLOCKS][4], const int64_t rows, const int64_t row, const int n, const Body &body,
    const Rows &row_of, const Keep &keep)
{
    const int t = threadIdx.x % 4;
    MP_UNROLL
    for (int i = 0; i < BLOCKS; i += 4)
        MP_UNROLL
        for (int r = 0; r < 2; ++r) {
            float v[4];
            MP_UNROLL
            for (int j = 0; j < 4; ++j) v[j] = body(c[i + j][2 * r], c[i + j][2 * r + 1]);
            const uint2 four = mp_quad_gather<Y>(v, t);
            const int to = (n - 2 * t) / 2 + (i + t) * 4;
            if (to < WIDTH && row + 8 * r < rows) *(uint2 *)(row_of(row + 8 * r) + to) = four;
            if constexpr (WIDTH < N / 2) {
                MP_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const int pair = n / 2 + (i + j) * 4;
                    if (pair >= WIDTH && pair < N / 2 && row + 8 * r < rows)
                        keep(row + 8 * r, pair, c[i + j][2 * r], c[i + j][2 * r + 1]);
                }
            }
        }
}

/* mp_finish_heads of sums in registers; DIM is a multiple of 32, and so are the columns of a tile. */
template <typename S, typename W, int BLOCKS, typename Position, typename Sines, typename Cosines, typename Start, typename Given,
    typename Q, typename Keys, typename Values>
MP_FN void mp_wgmma_heads(const float (&c)[BLOCKS][4], const int64_t rows, const int64_t row, const int n, const uint32_t seq,
    const int64_t angles, const int64_t capacity, const Position &position, const Sines &sines, const Cosines &cosines,
    const Start &start_of, const Given &given_of, const Q &q_at, const Keys &k_at, const Values &v_at, mp_error *error,
    const int64_t step)
{
    enum { DIM = S::DIM, HEADS = S::HEADS, KV = S::KV, N = (HEADS + 2 * KV) * DIM, HALF = DIM / 2 };
    const int t = threadIdx.x % 4, column = n - 2 * t;
    int64_t angle[2] = {0, 0}, at[2] = {-1, -1};
    const bool kept = column + BLOCKS * 8 > HEADS * DIM; /* keys or values are among them */
    MP_UNROLL
    for (int r = 0; r < 2; ++r) {
        const int64_t here = row + 8 * r, b = (uint32_t)here / seq, s = (uint32_t)here % seq;
        if (here >= rows) break;
        angle[r] = position(b, s);
        if (angle[r] < 0 || angle[r] >= angles) {
            if (n == 0) mp_fail(error, MP_POSITION, step, here, angle[r], angles);
            angle[r] = 0;
        }
        if (!kept) continue;
        const int64_t start = start_of(b), given = given_of(b);
        const bool counted = given >= 0 && given <= seq, fits = start >= 0 && start <= capacity - given;
        const bool reports = t == 0 && column <= HEADS * DIM; /* one tile has the first key head's first column */
        if (reports && !counted) mp_fail(error, MP_COUNT, step, b, given, seq);
        else if (reports && !fits) mp_fail(error, MP_CACHE_FULL, step, b, start + given, capacity);
        if (counted && fits && s < given && !error->code) at[r] = start + s;
    }
    MP_UNROLL
    for (int i = 0; i < BLOCKS; i += 4) {
        const int n0 = column + i * 8, head = n0 / DIM, inside = n0 % DIM;
        if (n0 >= N) break;
        MP_UNROLL
        for (int r = 0; r < 2; ++r) {
            const int64_t here = row + 8 * r, b = (uint32_t)here / seq, s = (uint32_t)here % seq;
            const bool live = here < rows && (head < HEADS || at[r] >= 0);
            if (head < HEADS + KV) {
                float low[4], high[4];
                MP_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const int d = inside / 2 + 4 * j + t;
                    const float sine = *sines(angle[r], d), cosine = *cosines(angle[r], d), u = c[i + j][2 * r], v = c[i + j][2 * r + 1];
                    low[j] = u * cosine - v * sine, high[j] = u * sine + v * cosine;
                }
                const uint2 lows = mp_quad_gather<W>(low, t), highs = mp_quad_gather<W>(high, t);
                if (live) {
                    W *const to = (head < HEADS ? q_at(b, s, head) : k_at(b, head - HEADS, at[r])) + inside / 2 + 4 * t;
                    *(uint2 *)to = lows;
                    *(uint2 *)(to + HALF) = highs;
                }
            } else { /* values do not rotate */
                uint32_t v[4];
                MP_UNROLL
                for (int j = 0; j < 4; ++j) v[j] = mp_pack<W>(c[i + j][2 * r], c[i + j][2 * r + 1]);
                mp_quad_turn(v, t);
                if (live) *(uint4 *)(v_at(b, head - HEADS - KV, at[r]) + inside + 8 * t) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}
