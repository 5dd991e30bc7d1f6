/* What products of more than one row have before and instead of tensor cores: x prepared for them, and the general
 * tile. The loops of one row and of a few are mp_linear_row.cuh and mp_linear_few.cuh; mp_linear_finish.cuh is the
 * epilogue. */
#include "mp_vec.cuh"

/* xs[K] = norm(x[K]) in the weights' type, by a block of 256 threads; K is a multiple of 8, rows are aligned. */
template <int K, bool RMS, int GAMMA, typename W, typename X, typename G>
MP_FN void mp_linear_prepare(W *xs, const X *x, const G *norm_weight, const float eps)
{
    enum { PIECES = K / 8, V = (PIECES + 255) / 256 }; /* of eight elements */
    __shared__ float shared[8];
    mp_vec<G, 8> gamma[V];
    if (GAMMA == MP_GAMMA_CONSTANT) {
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            const int piece = v * 256 + threadIdx.x;
            if (piece < PIECES) mp_vec_const<G, 8>(gamma[v], norm_weight + piece * 8);
        }
    }
    mp_wait();
    if (GAMMA == MP_GAMMA_COMPUTED) {
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            const int piece = v * 256 + threadIdx.x;
            if (piece < PIECES) mp_vec_fresh<G, 8>(gamma[v], norm_weight + piece * 8);
        }
    }
    float values[V][8], squares = 0.0f;
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = v * 256 + threadIdx.x;
        mp_vec<X, 8> raw;
        mp_vec_zero<X, 8>(raw);
        if (piece < PIECES) mp_vec_fresh<X, 8>(raw, x + piece * 8);
        mp_vec_floats<X, 8>(values[v], raw);
        MP_UNROLL
        for (int i = 0; i < 8; ++i) squares = fmaf(values[v][i], values[v][i], squares);
    }
    const float scale = RMS ? 1.0f / sqrtf(mp_fast_sum<8>(shared, squares) / K + eps) : 1.0f;
    MP_UNROLL
    for (int v = 0; v < V; ++v) {
        const int piece = v * 256 + threadIdx.x;
        if (piece >= PIECES) break;
        if (GAMMA) {
            float g[8];
            mp_vec_floats<G, 8>(g, gamma[v]);
            MP_UNROLL
            for (int i = 0; i < 8; ++i) values[v][i] *= g[i];
        }
        MP_UNROLL
        for (int i = 0; i < 8; ++i) values[v][i] *= scale;
        mp_store8(xs + piece * 8, values[v]);
    }
}

/* The same element by element, for any strides and types: `value(i)` is x, `normed(i, scale)` the element of xs. */
template <int K, bool RMS, typename W, typename Value, typename Normed>
MP_FN void mp_linear_prepare_each(W *xs, const float eps, const Value &value, const Normed &normed)
{
    __shared__ float shared[8];
    mp_wait();
    float scale = 1.0f;
    if (RMS) {
        float squares = 0.0f;
        for (int64_t i = threadIdx.x; i < K; i += 256) {
            const float v = value(i);
            squares += v * v;
        }
        scale = 1.0f / sqrtf(mp_fast_sum<8>(shared, squares) / K + eps);
    }
    for (int64_t i = threadIdx.x; i < K; i += 256) xs[i] = normed(i, scale);
}

/* sums[row, n] = norm(x[row]) · w[n], any sizes: the product behind every epilogue where no faster kernel fits. A block
 * makes a tile of 64 x 64 sums, 4 x 4 for each of 256 threads, from tiles in shared memory. `value(row, i)` is x,
 * `normed(row, i, scale)` its norm, `weight(n, i)` w. */
template <int K, int N, bool RMS, typename Value, typename Normed, typename Weight>
MP_FN void mp_linear_tile(float *sums, const int64_t rows, const float eps, const Value &value, const Normed &normed,
    const Weight &weight)
{
    enum { TILE = 64, STEP = 16 };
    __shared__ float left[STEP][TILE + 4], right[STEP][TILE + 4];
    __shared__ float scales[TILE];
    mp_wait();
    const int64_t row0 = (int64_t)blockIdx.y * TILE, n0 = (int64_t)blockIdx.x * TILE;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    if (RMS) {
        for (int r = threadIdx.x / 32; r < TILE && row0 + r < rows; r += 8) {
            float squares = 0.0f;
            for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
                const float v = value(row0 + r, i);
                squares += v * v;
            }
            squares = mp_warp_sum(squares);
            if (threadIdx.x % 32 == 0) scales[r] = 1.0f / sqrtf(squares / K + eps);
        }
        __syncthreads();
    }
    float sum[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += STEP) {
        MP_UNROLL
        for (int part = 0; part < TILE * STEP / 256; ++part) {
            const int r = ty + part * 16;
            const int64_t i = k0 + tx, row = row0 + r, n = n0 + r;
            left[tx][r] = row < rows && i < K ? normed(row, i, RMS ? scales[r] : 1.0f) : 0.0f;
            right[tx][r] = n < N && i < K ? weight(n, i) : 0.0f;
        }
        __syncthreads();
        MP_UNROLL
        for (int i = 0; i < STEP; ++i) {
            float a[4], b[4];
            MP_UNROLL
            for (int j = 0; j < 4; ++j) a[j] = left[i][ty * 4 + j], b[j] = right[i][tx * 4 + j];
            MP_UNROLL
            for (int j = 0; j < 16; ++j) sum[j / 4][j % 4] = fmaf(a[j / 4], b[j % 4], sum[j / 4][j % 4]);
        }
        __syncthreads();
    }
    for (int j = 0; j < 16; ++j) {
        const int64_t row = row0 + ty * 4 + j / 4, n = n0 + tx * 4 + j % 4;
        if (row < rows && n < N) sums[row * N + n] = sum[j / 4][j % 4];
    }
}
