/* A few rows of x on tensor cores: sums[split, row, n] = xs[row] · w[n] over a part of K, for up to 8 TILES rows.
 *
 * w is the left operand, 16 of its rows (a strip) at a time, decoded in registers; xs the right one, 8 rows in each tile.
 * A block owns a run of strips and has its part of xs in shared memory. Its warps split the strips into GROUPS, and K into
 * SLICES. A warp streams its units through its own ring of asynchronous copies and waits for nobody, but where the parts of
 * a strip are summed: SLICES should be 1 where groups have several strips.
 *
 * S has the constants: K, N (rows of w), SPLITS, WARPS, SLICES, TILES, RING (units in flight), GENTLE (of them at most
 * before the dependency, 0: all), PAD (bytes behind a row of xs). F says how weights lie: mp_few_tiles or mp_few_rows. */
#include "mp_tiles.cuh"
#include "mp_vec.cuh"

template <typename T>
MP_FN void mp_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> MP_FN void mp_mma<mp_bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mp_mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}
template <> MP_FN void mp_mma<mp_f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mp_mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

/* Weights in tiles: a unit is one of them. */
template <typename Tile, int K, int N> struct mp_few_tiles : Tile {
    enum { COLUMNS = 256, UNITS = (K + 255) / 256 };
    static constexpr int64_t SIZE = (int64_t)((N + 15) / 16) * UNITS * Tile::BYTES; /* bytes; raw tiles come behind them */
    typedef mp_bf16 half;
    static MP_FN void copy(const mp_shared to, const unsigned char *w, const int strip, const int unit, const int lane)
    {
        const unsigned char *const from = w + ((int64_t)strip * UNITS + unit) * Tile::BYTES;
        MP_UNROLL
        for (int p = 0; p < Tile::BYTES; p += 512)
            if (p + 512 <= Tile::BYTES || p + lane * 16 < Tile::BYTES) mp_copy(to + p + lane * 16, from + p + lane * 16);
    }
    static MP_FN void put(unsigned char *row, const int eighth, const uint4 v)
    {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        mp_put_eight(row + eighth / 4 * 64, eighth % 4, words);
    }
};

/* Weights in rows of half precision. The order of k within 32 columns is free as long as both operands agree, so 16 bytes
 * of a row are two fragments as they lie. Neighbouring lanes copy neighbouring pieces, and a line of 128 bytes stays one in
 * shared memory: halves of lines cost a sixth of the bandwidth. They change places in odd rows, for the banks' sake. */
template <typename W, int K, int N> struct mp_few_rows {
    enum { COLUMNS = 64, UNITS = K / 64, BYTES = 2048, GROUP = 0, LOWS = 0, ZEROS = 0, PARTS = 1, CHUNKS = 1 };
    static constexpr int64_t SIZE = (int64_t)N * K * 2;
    typedef W half;
    static MP_FN void copy(const mp_shared to, const unsigned char *w, const int strip, const int unit, const int lane)
    {
        const int piece = lane % 8, row = lane / 8, n0 = strip * 16 + row;
        const W *const from = (const W *)w + (int64_t)n0 * K + unit * 64 + piece * 8;
        MP_UNROLL
        for (int r = 0; r < 16; r += 4) {
            const bool live = N % 16 == 0 || n0 + r < N;
            mp_copy_if(to + (row + r) * 128 + (piece ^ row % 2 * 4) * 16, from + (live ? (int64_t)r * K : 0), live);
        }
    }
    static MP_FN void put(unsigned char *row, const int eighth, const uint4 v) { *(uint4 *)(row + eighth * 16) = v; }
    static MP_FN void words(mp_words &a, const unsigned char *slot, const int, const int lane)
    {
        const int g = lane / 4, t = lane % 4;
        MP_UNROLL
        for (int j = 0; j < 2; ++j) {
            const unsigned char *const at = slot + g * 128 + (j ^ g % 2) * 64 + t * 16;
            const uint4 top = *(const uint4 *)at, low = *(const uint4 *)(at + 1024);
            a[2 * j][0] = top.x, a[2 * j][1] = low.x, a[2 * j][2] = top.y, a[2 * j][3] = low.y;
            a[2 * j + 1][0] = top.z, a[2 * j + 1][1] = low.z, a[2 * j + 1][2] = top.w, a[2 * j + 1][3] = low.w;
        }
    }
    static MP_FN void scales(float (&scale)[2], float (&)[2], const unsigned char *, const int, const int)
    {
        scale[0] = scale[1] = 1.0f;
    }
    static MP_FN bool is_raw(const unsigned char *) { return false; }
    static MP_FN void read_raw(mp_words &, const unsigned char *, const unsigned char *, const int, const int) {}
    static MP_FN int exceptions(const unsigned char *) { return 0; }
    static MP_FN const uint32_t *list(const unsigned char *) { return 0; }
};

/* sum[n] += a unit of a strip times the rows of tile n of x. `xs`: the unit's columns of the first row, ROW bytes for each;
 * `totals`: sums of x over the unit's groups of columns, [group][row]. */
template <typename F, int TILES, int ROW>
MP_FN void mp_few_unit(float (&sum)[TILES][4], const unsigned char *unit, const unsigned char *raw, const unsigned char *xs,
    const float *totals, const int lane)
{
    const int g = lane / 4, t = lane % 4;
    const unsigned char *const own = xs + g * ROW + t * 16;
    MP_UNROLL
    for (int p = 0; p < F::PARTS; ++p) {
        float scale[2], low[2] = {0.0f, 0.0f}, c[TILES][4] = {};
        F::scales(scale, low, unit, p, lane);
        /* Sums of a group (or of all) times the scales of its rows, which another lane of the four has. */
        auto add = [&](const int group) {
            const int owner = g * 4 + group;
            const float s0 = F::GROUP ? __shfl_sync(~0u, scale[0], owner) : scale[0];
            const float s1 = F::GROUP ? __shfl_sync(~0u, scale[1], owner) : scale[1];
            const float l0 = F::LOWS ? __shfl_sync(~0u, low[0], owner) * (F::ZEROS ? s0 : 1.0f) : 0.0f;
            const float l1 = F::LOWS ? __shfl_sync(~0u, low[1], owner) * (F::ZEROS ? s1 : 1.0f) : 0.0f;
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
            const int chunk = p * F::CHUNKS + m;
            mp_words a;
            if (F::is_raw(unit)) F::read_raw(a, unit, raw, chunk, lane);
            else F::words(a, unit, chunk, lane);
            MP_UNROLL
            for (int j = 0; j < 2; ++j) {
                uint4 b[TILES];
                MP_UNROLL
                for (int n = 0; n < TILES; ++n) {
                    b[n] = *(const uint4 *)(own + n * 8 * ROW + chunk * 128 + j * 64);
                    mp_mma<typename F::half>(c[n], a[2 * j], b[n].x, b[n].y);
                }
                if (F::GROUP == 16) add(2 * j);
                MP_UNROLL
                for (int n = 0; n < TILES; ++n) mp_mma<typename F::half>(c[n], a[2 * j + 1], b[n].z, b[n].w);
                if (F::GROUP == 16) add(2 * j + 1);
                if (F::GROUP == 32) add(2 * m + j);
            }
            if (F::GROUP == 64) add(m);
        }
        if (!F::GROUP) add(0);
        for (int e = 1; e <= F::exceptions(unit); ++e) {
            const uint32_t one = F::list(unit)[e];
            if (mp_exception_row(one) % 8 != g) continue;
            const float more = scale[0] * mp_exception_excess(one);
            const int column = mp_exception_column(one), upper = mp_exception_row(one) / 8;
            MP_UNROLL
            for (int n = 0; n < TILES; ++n) {
                MP_UNROLL
                for (int j = 0; j < 2; ++j) {
                    const unsigned char *const at = xs + (n * 8 + 2 * t + j) * ROW + column / 32 * 64 + mp_place_of(column);
                    const float product = more * mp_load_bf16(*(const mp_bf16 *)at);
                    if (upper) sum[n][2 + j] += product;
                    else sum[n][j] += product;
                }
            }
        }
    }
}

/* `source(row)` is where a row of xs begins, `put(split, row, n, sum)` takes a sum. */
template <typename S, typename F, typename Source, typename Put>
MP_FN void mp_linear_few_rows(const unsigned char *w, const int64_t rows, const Source &source, const Put &put)
{
    enum { K = S::K, N = S::N, STRIPS = (N + 15) / 16, SPLITS = S::SPLITS, TILES = S::TILES, ROWS = TILES * 8 };
    enum { WARPS = S::WARPS, THREADS = WARPS * 32, SLICES = S::SLICES, GROUPS = WARPS / SLICES, RING = S::RING, GENTLE = S::GENTLE };
    enum { DEPTH = (F::UNITS + SPLITS - 1) / SPLITS, PIECES = DEPTH * F::COLUMNS / 8, ROW = PIECES * 16 + S::PAD };
    enum { SUMS = F::LOWS ? F::PARTS * 4 : 0, PART = 20 }; /* groups of columns of a unit; floats for 16 columns */
    typedef float part_of_warp[ROWS][PART];
    MP_DYNAMIC_SHARED(dynamic);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, split = blockIdx.y;
    unsigned char *const ring = dynamic + warp * RING * F::BYTES, *const xs = dynamic + WARPS * RING * F::BYTES;
    part_of_warp *const parts = (part_of_warp *)(xs + ROWS * ROW);
    float *const totals = (float *)(parts + (SLICES > 1 ? WARPS : 0)); /* of groups of columns of x: [group][row] */
    const unsigned char *const raw = w + F::SIZE;
    const int s0 = (int)((int64_t)STRIPS * blockIdx.x / gridDim.x);
    const int strips = (int)((int64_t)STRIPS * (blockIdx.x + 1) / gridDim.x) - s0;
    const int begin = split * DEPTH, depth = (int)mp_min((int)DEPTH, F::UNITS - begin);
    const int slice = warp % SLICES, group = warp / SLICES;
    const int first = depth * slice / SLICES, units = depth * (slice + 1) / SLICES - first; /* of this warp, in each strip */
    int next_strip = units > 0 ? group : strips, next_unit = 0; /* to be copied */
    auto issue = [&](const int slot) {
        if (next_strip < strips) {
            F::copy(mp_shared_address(ring) + slot * F::BYTES, w, s0 + next_strip, begin + first + next_unit, lane);
            if (++next_unit == units) next_unit = 0, next_strip += GROUPS;
        }
        mp_copy_commit();
    };
    mp_release();
    MP_UNROLL
    for (int d = 0; d < RING - 1; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* other kernels' loads must not wait long */
        issue(d);
    }
    mp_wait();
    enum { AHEAD = 8 }; /* loads of a thread in flight */
    for (int i0 = tid; i0 < ROWS * PIECES; i0 += THREADS * AHEAD) {
        uint4 v[AHEAD];
        MP_UNROLL
        for (int e = 0; e < AHEAD; ++e) {
            const int i = i0 + e * THREADS, row = i / PIECES, k = begin * F::COLUMNS + i % PIECES * 8;
            const bool live = row < rows && k < K && i % PIECES < depth * (F::COLUMNS / 8);
            v[e] = live ? mp_read_fresh(source(row) + k) : make_uint4(0, 0, 0, 0);
        }
        MP_UNROLL
        for (int e = 0; e < AHEAD; ++e) {
            const int i = i0 + e * THREADS, row = i / PIECES, eighth = i % PIECES;
            if (i >= ROWS * PIECES) break;
            F::put(xs + row * ROW, eighth, v[e]);
            if (F::LOWS) { /* neighbouring lanes have a group */
                float f[8], sum = 0.0f;
                mp_widen<mp_bf16>(f, v[e]);
                MP_UNROLL
                for (int j = 0; j < 8; ++j) sum += f[j];
                sum += __shfl_xor_sync(~0u, sum, 1);
                if (F::GROUP >= 32) sum += __shfl_xor_sync(~0u, sum, 2);
                if (F::GROUP == 64) sum += __shfl_xor_sync(~0u, sum, 4);
                totals[eighth / (F::GROUP / 8 + !F::GROUP) * ROWS + row] = sum;
            }
        }
    }
    __syncthreads();
    int slot = 0;
    for (int strip0 = 0; strip0 < strips; strip0 += GROUPS) {
        const int strip = strip0 + group;
        float sum[TILES][4] = {};
        for (int unit = first; unit < first + units && strip < strips; ++unit) {
            mp_copy_wait<RING - 2>();
            __syncwarp(); /* all lanes' copies are there, and the slot that is filled next is read */
            issue(slot == 0 ? RING - 1 : slot - 1);
            const unsigned char *const x = xs + unit * (F::COLUMNS * 2);
            mp_few_unit<F, TILES, ROW>(sum, ring + slot * F::BYTES, raw, x, totals + unit * SUMS * ROWS, lane);
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
        if (SLICES > 1 && strip0) __syncthreads(); /* the parts before are summed */
        MP_UNROLL
        for (int n = 0; n < TILES; ++n) {
            MP_UNROLL
            for (int j = 0; j < 4; ++j) { /* w's row g or g + 8, row 2 t or 2 t + 1 of the tile */
                const int64_t row = n * 8 + 2 * t + j % 2;
                const int column = g + j / 2 * 8, all = (s0 + strip) * 16 + column;
                if (SLICES > 1) parts[warp][row][column] = sum[n][j];
                else if (strip < strips && row < rows && all < N) put(split, row, all, sum[n][j]);
            }
        }
        if (SLICES == 1) continue;
        __syncthreads();
        for (int i = tid; i < GROUPS * rows * 16; i += THREADS) {
            const int row = i / 16 % rows, own = i / 16 / rows, n = (s0 + strip0 + own) * 16 + i % 16;
            float all = 0.0f;
            MP_UNROLL
            for (int j = 0; j < SLICES; ++j) all += parts[own * SLICES + j][row][i % 16];
            if (strip0 + own < strips && n < N) put(split, row, n, all);
        }
    }
}

template <typename S, typename F>
MP_FN void mp_linear_few(const unsigned char *w, const typename F::half *xs, float *sums, const int64_t rows)
{
    mp_linear_few_rows<S, F>(w, rows, [&](const int64_t row) { return xs + row * S::K; },
        [&](const int split, const int64_t row, const int n, const float sum) { sums[(split * rows + row) * S::N + n] = sum; });
}
