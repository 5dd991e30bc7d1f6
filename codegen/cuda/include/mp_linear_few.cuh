/* A few rows of x on tensor cores: y = epilogue(w · norm(x)) for up to 8 TILES rows. Weights are read once.
 *
 * w is the left operand, 16 of its rows (a strip) at a time, decoded in registers; x the right one, 8 of its rows in each
 * tile. A cluster of blocks owns a run of strips and takes GROUPS x EACH of them at a time, a round. Its blocks split K,
 * and so do the SLICES of warps of a block. K goes by in stages, which are copied into shared memory some of them
 * ahead: a warp its own weights, a thread its own pieces of x. One stage ahead the thread puts these where all warps read
 * them, in the weights' type, times the norm's weights. 1 / rms is applied to the finished sums. At the end of a round each block finishes some of its strips, for which the others have
 * stored their parts of the sums into its memory.
 *
 * S has the constants: K, N (rows of w), RUNS and CLUSTER (blocks of a cluster), WARPS, SLICES, EACH (strips that a warp
 * has at a time), TILES, RING (stages), GENTLE (of them in flight at most before the dependency, 0: all), RMS, GAMMA. F says
 * how weights lie: mp_few_tiles or mp_few_rows. `x_row(row)` is where a row of x begins; `fetch` and `finish` are as in
 * mp_linear_row.cuh. */
#include "mp_tiles.cuh"
#include "mp_vec.cuh"

/* Weights in tiles. */
template <typename Tile> struct mp_few_tiles : Tile {
    enum { UNIT = 4, BYTES = Tile::BYTES }; /* chunks of 64 columns in a stage */
    typedef mp_bf16 half;
    /* What a stage has of a strip. */
    static MP_FN void copy(const mp_shared to, const unsigned char *w, const int64_t strip, const int unit, const int units,
        const int lane)
    {
        const unsigned char *const from = w + (strip * units + unit) * BYTES;
        MP_UNROLL
        for (int p = 0; p < BYTES; p += 512)
            if (p + lane * 16 < BYTES) mp_copy(to + p + lane * 16, from + p + lane * 16);
    }
    /* Eight neighbours of a row of x, in the order of the tiles. */
    static MP_FN void put(unsigned char *group, const int eighth, const uint32_t (&words)[4])
    {
        unsigned char *const to = group + eighth % 2 * 32 + eighth / 2 * 8;
        *(uint2 *)to = make_uint2(words[0], words[1]);
        *(uint2 *)(to + 16) = make_uint2(words[2], words[3]);
    }
    static MP_FN int place_of(const int column) { return column % 16 / 4 * 16 + column % 32 / 16 * 8 + column % 4 * 2; }
};

/* Weights in rows of half precision: the order of k within 32 columns is free as long as both operands agree, so 16 bytes
 * of a row are two fragments as they lie. */
template <typename W, int K, int N> struct mp_few_rows {
    enum { UNIT = K % 128 == 0 ? 2 : 1, BYTES = UNIT * 2048, GROUP = 0, LOWS = 0, PARTS = 1, CHUNKS = UNIT };
    typedef W half;
    static MP_FN void copy(const mp_shared to, const unsigned char *w, const int64_t strip, const int unit, const int,
        const int lane)
    {
        const int g = lane / 4, t = lane % 4;
        const W *const from = (const W *)w + (strip * 16 + g) * K + unit * (UNIT * 64) + t * 8;
        MP_UNROLL
        for (int piece = 0; piece < UNIT * 4; ++piece) { /* [32 columns][rows g, rows g + 8] */
            const bool live = strip * 16 + g + piece % 2 * 8 < N;
            mp_copy_if(to + piece * 512 + lane * 16, from + (live ? piece % 2 * 8 * K : 0) + piece / 2 * 32, live);
        }
    }
    static MP_FN void put(unsigned char *group, const int eighth, const uint32_t (&words)[4])
    {
        *(uint4 *)(group + eighth * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    static MP_FN void words(mp_words &a, const unsigned char *slot, const int chunk, const int lane)
    {
        MP_UNROLL
        for (int j = 0; j < 2; ++j) {
            const uint4 top = *(const uint4 *)(slot + (chunk * 4 + j * 2) * 512 + lane * 16);
            const uint4 low = *(const uint4 *)(slot + (chunk * 4 + j * 2 + 1) * 512 + lane * 16);
            a[2 * j][0] = top.x, a[2 * j][1] = low.x, a[2 * j][2] = top.y, a[2 * j][3] = low.y;
            a[2 * j + 1][0] = top.z, a[2 * j + 1][1] = low.z, a[2 * j + 1][2] = top.w, a[2 * j + 1][3] = low.w;
        }
    }
    static MP_FN void scales(float (&scale)[2], float (&)[2], const unsigned char *, const int, const int) { scale[0] = scale[1] = 1.0f; }
    static MP_FN bool is_raw(const unsigned char *) { return false; }
    static MP_FN int exceptions(const unsigned char *) { return 0; }
    static MP_FN void read_raw(mp_words &, const unsigned char *, const unsigned char *, const int, const int) {}
    static MP_FN const uint32_t *list(const unsigned char *) { return 0; }
    static MP_FN int place_of(const int) { return 0; }
};

template <typename W>
MP_FN void mp_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> MP_FN void mp_mma<mp_bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mp_mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}
template <> MP_FN void mp_mma<mp_f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mp_mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

/* sum[n] += what a stage has of a strip, times the rows of tile n of x. `xs`: [32 columns][tile of x][row][64 bytes];
 * `totals`: sums of x over groups of columns, [group][row]. */
template <typename F, int TILES>
MP_FN void mp_few_stage(float (&sum)[TILES][4], const unsigned char *slot, const unsigned char *raw, const unsigned char *xs,
    const float *totals, const int lane)
{
    const int g = lane / 4, t = lane % 4;
    MP_UNROLL
    for (int p = 0; p < F::PARTS; ++p) {
        float scale[2], low[2] = {0.0f, 0.0f}, c[TILES][4] = {};
        F::scales(scale, low, slot, p, lane);
        /* Sums of a group (or of all) times the scales of its rows, which another lane of the four has. */
        auto add = [&](const int group) {
            const int owner = g * 4 + group;
            const float s0 = F::GROUP ? __shfl_sync(~0u, scale[0], owner) : scale[0];
            const float s1 = F::GROUP ? __shfl_sync(~0u, scale[1], owner) : scale[1];
            const float l0 = F::LOWS ? __shfl_sync(~0u, low[0], owner) : 0.0f;
            const float l1 = F::LOWS ? __shfl_sync(~0u, low[1], owner) : 0.0f;
            MP_UNROLL
            for (int n = 0; n < TILES; ++n) {
                MP_UNROLL
                for (int j = 0; j < 4; ++j) {
                    sum[n][j] = fmaf(j < 2 ? s0 : s1, c[n][j], sum[n][j]);
                    if (F::LOWS) {
                        const float x_sum = totals[(p * 4 + group) * (TILES * 8) + n * 8 + 2 * t + j % 2];
                        sum[n][j] = fmaf(j < 2 ? l0 : l1, x_sum, sum[n][j]);
                    }
                    c[n][j] = 0.0f;
                }
            }
        };
        MP_UNROLL
        for (int m = 0; m < F::CHUNKS; ++m) {
            mp_words a;
            const int chunk = p * F::CHUNKS + m;
            if (F::is_raw(slot)) F::read_raw(a, slot, raw, chunk, lane);
            else F::words(a, slot, chunk, lane);
            MP_UNROLL
            for (int j = 0; j < 2; ++j) {
                uint4 b[TILES];
                MP_UNROLL
                for (int n = 0; n < TILES; ++n) {
                    b[n] = *(const uint4 *)(xs + ((chunk * 2 + j) * TILES + n) * 512 + lane * 16);
                    mp_mma<typename F::half>(c[n], a[2 * j], b[n].x, b[n].y);
                }
                if (F::GROUP == 16) add(2 * j);
                MP_UNROLL
                for (int n = 0; n < TILES; ++n) mp_mma<typename F::half>(c[n], a[2 * j + 1], b[n].z, b[n].w);
                if (F::GROUP == 16) add(2 * j + 1);
                if (F::GROUP == 32) add(2 * m + j);
            }
        }
        if (!F::GROUP) add(0);
        for (int e = 1; e <= F::exceptions(slot); ++e) {
            const uint32_t one = F::list(slot)[e];
            if (mp_exception_row(one) % 8 != g) continue;
            const float more = scale[0] * mp_exception_excess(one);
            const int column = mp_exception_column(one), upper = mp_exception_row(one) / 8;
            MP_UNROLL
            for (int n = 0; n < TILES; ++n) {
                MP_UNROLL
                for (int j = 0; j < 2; ++j) {
                    const unsigned char *const at = xs + (column / 32 * TILES + n) * 512 + (2 * t + j) * 64 + F::place_of(column);
                    const float product = more * mp_load_bf16(*(const mp_bf16 *)at);
                    if (upper) sum[n][2 + j] += product;
                    else sum[n][j] += product;
                }
            }
        }
    }
}

template <typename S, typename F, typename X, typename G, typename XRow, typename Fetch, typename Finish>
MP_FN void mp_linear_few(const unsigned char *w, const G *norm_weight, const float eps, const int rows, const X *,
    const XRow &x_row, const Fetch &fetch, const Finish &finish)
{
    enum { K = S::K, N = S::N, STRIPS = (N + 15) / 16, RUNS = S::RUNS, CLUSTER = S::CLUSTER, WARPS = S::WARPS };
    enum { SLICES = S::SLICES, GROUPS = WARPS / SLICES, EACH = S::EACH, ROUND = GROUPS * EACH, TILES = S::TILES };
    enum { ROWS = TILES * 8, THREADS = WARPS * 32, RING = S::RING, GENTLE = S::GENTLE };
    enum { SPAN = F::UNIT * 64, UNITS = (K + SPAN - 1) / SPAN, PART = (UNITS + CLUSTER - 1) / CLUSTER };
    enum { LONG = (PART + SLICES - 1) / SLICES, EVEN = LONG * SLICES * CLUSTER == UNITS && K % SPAN == 0 };
    /* Of x in a stage: eights of columns of all slices, how many threads take the same row, rows of a thread. */
    enum { EIGHTS = SLICES * SPAN / 8, TEAMS = THREADS / EIGHTS, MINE = (ROWS + TEAMS - 1) / TEAMS };
    enum { X_SLICE = SPAN * ROWS * 2, SUMS = F::LOWS ? SPAN / (F::GROUP + !F::GROUP) : 0, W_STAGE = WARPS * EACH * F::BYTES };
    enum { X_PIECES = mp_vec<X, 8>::PIECES, G_PIECES = S::GAMMA ? (int)mp_vec<G, 8>::PIECES : 0 };
    enum { STAGE = W_STAGE + (MINE * X_PIECES + G_PIECES) * THREADS * 16, XS = SLICES * (X_SLICE + SUMS * ROWS * 4) };
    enum { PARTS = CLUSTER * SLICES, OWN = (ROUND + CLUSTER - 1) / CLUSTER, WIDTH = EIGHTS < 16 ? (int)EIGHTS : 16 };
    enum { ALL_PARTS = PARTS == 1 ? (int)ROUND : PARTS * OWN };
    static_assert(THREADS % EIGHTS == 0 && RING > 2, "every thread has one place of x in a stage");
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ float squares[TEAMS * MINE * (EIGHTS / WIDTH)], total[CLUSTER][ROWS], inverse[ROWS];
    typedef float sums_of_strip[16][ROWS];
    __shared__ sums_of_strip parts[ALL_PARTS]; /* [part][own strip], or [strip] where a warp has all of it */
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int slice = warp % SLICES, group = warp / SLICES, rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, run = blockIdx.x / CLUSTER;
    const int s0 = (int)((int64_t)STRIPS * run / RUNS), strips = (int)((int64_t)STRIPS * (run + 1) / RUNS) - s0;
    const int stages = (strips + ROUND - 1) / ROUND * LONG;
    const unsigned char *const raw = w + (int64_t)STRIPS * UNITS * F::BYTES;
    if (CLUSTER > 1) mp_cluster_arrive(); /* every block of the cluster has started */
    mp_release();

    const int unit0 = rank * PART + slice * LONG, unit_end = (int)mp_min(mp_min(unit0 + LONG, (rank + 1) * PART), (int)UNITS);
    auto issue = [&](const int i) {
        if (i >= stages || (!EVEN && unit0 + i % LONG >= unit_end)) return;
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int strip = i / LONG * ROUND + group * EACH + e;
            const mp_shared to = mp_shared_address(dynamic) + i % RING * STAGE + (warp * EACH + e) * F::BYTES;
            if (strip < strips) F::copy(to, w, s0 + strip, unit0 + i % LONG, UNITS, lane);
        }
    };
    MP_UNROLL
    for (int d = 0; d < RING - 1; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* other kernels' loads must not wait long */
        issue(d);
        mp_copy_commit();
    }
    mp_wait();

    /* x: this thread's eight columns of a stage, in rows `team`, `team` + TEAMS … */
    const int place = tid % EIGHTS, team = tid / EIGHTS, x_slice = place / (SPAN / 8), eighth = place % (SPAN / 8);
    const int x_unit0 = rank * PART + x_slice * LONG, x_end = (int)mp_min(mp_min(x_unit0 + LONG, (rank + 1) * PART), (int)UNITS);
    auto issue_x = [&](const int i) {
        if (i >= stages) return;
        const int unit = x_unit0 + i % LONG, column = unit * SPAN + eighth * 8;
        const bool inside = EVEN || (unit < x_end && column < K);
        const mp_shared to = mp_shared_address(dynamic) + i % RING * STAGE + W_STAGE + tid * 16;
        MP_UNROLL
        for (int r = 0; r < MINE; ++r) {
            const bool live = inside && team + r * TEAMS < rows;
            const X *const from = x_row(live ? team + r * TEAMS : 0) + (live ? column : 0);
            MP_UNROLL
            for (int p = 0; p < X_PIECES; ++p)
                mp_copy_if(to + (r * X_PIECES + p) * (THREADS * 16), from + p * mp_vec<X, 8>::EACH, live);
        }
        MP_UNROLL
        for (int p = 0; p < G_PIECES; ++p) /* behind K, 0 times anything must be 0 */
            mp_copy_if(to + (MINE * X_PIECES + p) * (THREADS * 16), norm_weight + (inside ? column : 0) + p * mp_vec<G, 8>::EACH, inside);
    };
    float square[MINE] = {};
    auto put_x = [&](const int i) {
        const unsigned char *const own = dynamic + i % RING * STAGE + W_STAGE + tid * 16;
        unsigned char *const xs = dynamic + RING * STAGE + i % 2 * XS + x_slice * X_SLICE;
        float *const totals = (float *)(dynamic + RING * STAGE + i % 2 * XS + SLICES * X_SLICE) + x_slice * (SUMS * ROWS);
        float weights[8];
        MP_UNROLL
        for (int p = 0; p < G_PIECES; ++p)
            mp_widen<G>(weights + p * mp_vec<G, 8>::EACH, *(const uint4 *)(own + (MINE * X_PIECES + p) * (THREADS * 16)));
        MP_UNROLL
        for (int r = 0; r < MINE; ++r) {
            const int row = team + r * TEAMS;
            if (row >= ROWS) break;
            float f[8];
            uint32_t words[4];
            MP_UNROLL
            for (int p = 0; p < X_PIECES; ++p)
                mp_widen<X>(f + p * mp_vec<X, 8>::EACH, *(const uint4 *)(own + (r * X_PIECES + p) * (THREADS * 16)));
            MP_UNROLL
            for (int j = 0; j < 8; ++j) {
                if (S::RMS && i < LONG) square[r] = fmaf(f[j], f[j], square[r]);
                if (S::GAMMA) f[j] *= weights[j];
            }
            MP_UNROLL
            for (int j = 0; j < 4; ++j) words[j] = mp_pack<typename F::half>(f[2 * j], f[2 * j + 1]);
            F::put(xs + (eighth / 4 * TILES + row / 8) * 512 + row % 8 * 64, eighth % 4, words);
            if (F::LOWS) { /* neighbouring threads have a group */
                float sum = 0.0f;
                mp_widen<mp_bf16>(f, make_uint4(words[0], words[1], words[2], words[3]));
                MP_UNROLL
                for (int j = 0; j < 8; ++j) sum += f[j];
                sum += __shfl_xor_sync(~0u, sum, 1);
                if (F::GROUP == 32) sum += __shfl_xor_sync(~0u, sum, 2);
                totals[eighth / (F::GROUP / 8 + !F::GROUP) * ROWS + row] = sum;
            }
        }
    };
    MP_UNROLL
    for (int d = 0; d < RING - 1; ++d) {
        issue_x(d);
        mp_copy_commit();
    }
    /* Items of the epilogue: pairs of a strip's columns, then rows, then strips. */
    const int local = PARTS == 1 ? lane : tid, width = PARTS == 1 ? 32 : (int)THREADS;
    auto strip_of = [&](const int i) { return PARTS == 1 ? group * EACH + i : i * CLUSTER + rank; };
    decltype(fetch(0, 0)) early;
    const int early_row = local / 8 % rows, early_pair = (s0 + strip_of(local / 8 / rows)) * 8 + local % 8;
    if (stages && early_pair < (N + 1) / 2) early = fetch(early_row, early_pair);
    mp_copy_wait<RING - 2>(); /* x of the first stage */
    if (stages) put_x(0);

    float sum[EACH][TILES][4] = {};
    for (int i = 0; i < stages; ++i) {
        mp_copy_wait<RING - 3>(); /* this stage's weights and x of the next one, for the threads that copied them */
        __syncthreads(); /* for all; and nobody reads what comes next into its place */
        issue(i + RING - 1);
        issue_x(i + RING - 1);
        mp_copy_commit();
        if (i + 1 < stages) put_x(i + 1);
        const unsigned char *const stage = dynamic + i % RING * STAGE, *const all_xs = dynamic + RING * STAGE + i % 2 * XS;
        const unsigned char *const xs = all_xs + slice * X_SLICE;
        const float *const totals = (const float *)(all_xs + SLICES * X_SLICE) + slice * (SUMS * ROWS);
        const int first = i / LONG * ROUND + group * EACH;
        if (EVEN || unit0 + i % LONG < unit_end) {
            MP_UNROLL
            for (int e = 0; e < EACH; ++e)
                if (first + e < strips) mp_few_stage<F, TILES>(sum[e], stage + (warp * EACH + e) * F::BYTES, raw, xs, totals, lane);
        }
        if (i % LONG + 1 < LONG) continue;

        /* The end of a round. Sums of squares first, of WIDTH neighbours each. */
        if (S::RMS && i < LONG) {
            MP_UNROLL
            for (int r = 0; r < MINE; ++r) {
                float part = square[r];
                MP_UNROLL
                for (int d = 1; d < WIDTH; d *= 2) part += __shfl_xor_sync(~0u, part, d);
                if (tid % WIDTH == 0) squares[(r * TEAMS + team) * (EIGHTS / WIDTH) + place / WIDTH] = part;
            }
            __syncthreads();
            if (CLUSTER > 1) mp_cluster_wait();
            if (tid < ROWS) {
                float part = 0.0f;
                for (int j = 0; j < EIGHTS / WIDTH; ++j) part += squares[tid * (EIGHTS / WIDTH) + j];
                MP_UNROLL
                for (int r = 0; r < CLUSTER; ++r) {
                    if (CLUSTER > 1) mp_store_remote(mp_remote(mp_shared_address(&total[rank][tid]), r), part);
                    else total[0][tid] = part;
                }
            }
        } else if (CLUSTER > 1 && i < LONG) {
            mp_cluster_wait();
        }
        MP_UNROLL
        for (int e = 0; e < EACH; ++e) {
            const int strip = group * EACH + e, owner = strip % CLUSTER;
            sums_of_strip &to = parts[PARTS == 1 ? warp * EACH + e : (rank * SLICES + slice) * OWN + strip / CLUSTER];
            MP_UNROLL
            for (int n = 0; n < TILES; ++n) {
                MP_UNROLL
                for (int j = 0; j < 4; ++j) {
                    float *const at = &to[g + j / 2 * 8][n * 8 + 2 * t + j % 2];
                    if (CLUSTER > 1) mp_store_remote(mp_remote(mp_shared_address(at), owner), sum[e][n][j]);
                    else *at = sum[e][n][j];
                    sum[e][n][j] = 0.0f;
                }
            }
        }
        if (CLUSTER > 1) {
            mp_cluster_arrive();
            mp_cluster_wait();
        } else if (PARTS > 1 || (S::RMS && i < LONG)) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        if (S::RMS && i < LONG) {
            if (tid < ROWS) {
                float all = 0.0f;
                MP_UNROLL
                for (int r = 0; r < CLUSTER; ++r) all += total[r][tid];
                inverse[tid] = rsqrtf(all / K + eps);
            }
            __syncthreads();
        }
        const int count = PARTS == 1 ? (int)EACH : (int)OWN, round0 = i / LONG * ROUND;
        for (int item = local; item < count * rows * 8; item += width) {
            const int own = item / 8 / rows, row = item / 8 % rows, pair = (s0 + round0 + strip_of(own)) * 8 + item % 8;
            if (round0 + strip_of(own) >= strips || strip_of(own) >= ROUND || pair >= (N + 1) / 2) continue;
            float both[2] = {0.0f, 0.0f};
            MP_UNROLL
            for (int p = 0; p < PARTS; ++p) {
                sums_of_strip &from = parts[PARTS == 1 ? warp * EACH + own : p * OWN + own];
                both[0] += from[item % 8 * 2][row], both[1] += from[item % 8 * 2 + 1][row];
            }
            if (i >= LONG || item != local) early = fetch(row, pair);
            const float scale = S::RMS ? inverse[row] : 1.0f;
            finish(early, row, pair, both[0] * scale, both[1] * scale);
        }
        if (i + 1 == stages) break;
        if (CLUSTER > 1) { /* before the next parts are stored */
            mp_cluster_arrive();
            mp_cluster_wait();
        } else if (PARTS > 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }
}
