/* A few rows of x on tensor cores: sums[split, row, n] = xs[row] · w[n] over a part of K, for up to 8 TILES rows.
 *
 * w is the left operand (16 of its rows), xs the right one (8 rows a tile). The order of k within 32 is free as long as
 * both agree, so 16 bytes of a row are a fragment as they lie. A warp streams 16 rows of w, a strip, through its own
 * ring of asynchronous copies; xs lies in shared memory for all warps. mp_linear_finish sums the splits of K.
 *
 * S has the constants: K, N (rows of w), SPLITS, WARPS, TILES, RING (steps in flight), GENTLE (of them at most before
 * the dependency, 0: all), PAD (bytes behind a row of xs). */
template <typename T>
MP_FN void mp_mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
    uint32_t b1); template <> MP_FN void mp_mma<mp_bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
    uint32_t a3, uint32_t b0, uint32_t b1)
{
    mp_mma_bf16(c, a0, a1, a2, a3, b0, b1);
}
template <>
MP_FN void mp_mma<mp_f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    mp_mma_f16(c, a0, a1, a2, a3, b0, b1);
}

/* `source(row)` is where a row of xs begins, `put(split, row, n, sum)` takes a sum. */
template <typename S, typename W, typename Source, typename Put>
MP_FN void mp_linear_few_rows(const W *w, const int64_t rows, const Source &source, const Put &put)
{
    enum { K = S::K, N = S::N, STRIPS = (N + 15) / 16, SPLITS = S::SPLITS, DEPTH = K / SPLITS, TILES = S::TILES };
    enum { WARPS = S::WARPS, RING = S::RING, GENTLE = S::GENTLE, SLOT = 2048, ROW = DEPTH * 2 + S::PAD };
    enum { STEP = 64, STEPS = DEPTH / STEP };
    MP_DYNAMIC_SHARED(dynamic);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, split = blockIdx.y;
    const mp_shared ring = mp_shared_address(dynamic) + warp * RING * SLOT + lane * 16;
    unsigned char *const xs_bytes = dynamic + WARPS * RING * SLOT;
    const mp_shared xs0 = mp_shared_address(xs_bytes) + g * ROW + t * 16;
    const int first = blockIdx.x * WARPS + warp, stride = gridDim.x * WARPS;
    const int strips = first < STRIPS ? (STRIPS - first + stride - 1) / stride : 0, total = strips * STEPS;
    auto issue = [&](const int i, const int slot) {
        if (i < total) {
            const int n = (first + i / STEPS * stride) * 16 + g;
            const W *const from = w + (int64_t)n * K + split * DEPTH + i % STEPS * STEP + t * 8;
            const mp_shared to = ring + slot * SLOT;
            mp_copy_if(to, from, n < N);
            mp_copy_if(to + 512, from + (int64_t)(n + 8 < N ? 8 : 0) * K, n + 8 < N);
            mp_copy_if(to + 1024, from + 32, n < N);
            mp_copy_if(to + 1536, from + (int64_t)(n + 8 < N ? 8 : 0) * K + 32, n + 8 < N);
        }
        mp_copy_commit();
    };
    mp_release();
    MP_UNROLL
    for (int d = 0; d < RING - 1; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>(); /* other kernels' loads must not wait long */
        issue(d, d);
    }
    mp_wait();
    for (int i = threadIdx.x; i < TILES * 8 * (DEPTH / 8); i += WARPS * 32) {
        const int row = i / (DEPTH / 8), at = i % (DEPTH / 8) * 8;
        const uint4 v = row < rows ? mp_read_fresh(source(row) + split * DEPTH + at) : make_uint4(0, 0, 0, 0);
        *(uint4 *)(xs_bytes + row * ROW + at * 2) = v;
    }
    __syncthreads();
    float sum[TILES][4] = {};
    for (int i = 0, slot = 0; i < total; ++i, slot = slot + 1 == RING ? 0 : slot + 1) {
        mp_copy_wait<RING - 2>();
        const int step = i % STEPS;
        issue(i + RING - 1, slot == 0 ? RING - 1 : slot - 1);
        MP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint4 top = mp_read_shared(ring + slot * SLOT + half * 1024);
            const uint4 low = mp_read_shared(ring + slot * SLOT + half * 1024 + 512);
            MP_UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 b = mp_read_shared(xs0 + tile * 8 * ROW + (step * STEP + half * 32) * 2);
                mp_mma<W>(sum[tile], top.x, low.x, top.y, low.y, b.x, b.y);
                mp_mma<W>(sum[tile], top.z, low.z, top.w, low.w, b.z, b.w);
            }
        }
        if (step + 1 < STEPS) continue;
        const int n = (first + i / STEPS * stride) * 16 + g;
        MP_UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            MP_UNROLL
            for (int j = 0; j < 4; ++j) { /* w's row n or n + 8, row 2 t or 2 t + 1 of the tile */
                const int64_t row = tile * 8 + 2 * t + j % 2;
                const int column = n + j / 2 * 8;
                if (row < rows && column < N) put(split, row, column, sum[tile][j]);
                sum[tile][j] = 0.0f;
            }
        }
    }
}

template <typename S, typename W> MP_FN void mp_linear_few(const W *w, const W *xs, float *sums, const int64_t rows)
{
    mp_linear_few_rows<S>(w, rows, [&](const int64_t row) { return xs + row * S::K; },
        [&](const int split, const int64_t row, const int n, const float sum) { sums[(split * rows + row) * S::N + n] = sum; });
}
