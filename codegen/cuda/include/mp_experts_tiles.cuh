/* mp_experts.cuh for weights in tiles: one pair. A warp has strips of 16 columns. S has the constants K, N, MATRICES, SLICES,
 * GROUPS, STEPS (strips of a group), RING (tiles of each matrix in flight), RMS and GAMMA. N is a multiple of 16. */
#include "mp_experts.cuh"
#include "mp_linear_tiles.cuh"

template <typename S, typename F, typename X, typename G, typename Finish>
MP_FN void mp_experts_tiles_row(const unsigned char *const (&w)[S::MATRICES], const X *x, const G *norm_weight, const float eps,
    const Finish &finish)
{
    enum { K = S::K, N = S::N, MATRICES = S::MATRICES, SLICES = S::SLICES, GROUPS = S::GROUPS, STEPS = S::STEPS };
    enum { STRIPS = N / 16, TILES = (K + 255) / 256, SLICE = (TILES + SLICES - 1) / SLICES, RING = S::RING };
    enum { SUMS = F::SUMS, EACH = F::X_BYTES, COLUMNS = GROUPS * STEPS * 16, SLOT = MATRICES * F::BYTES };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ uint4 zero;
    __shared__ float squares[SLICES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp % SLICES, group = warp / SLICES;
    unsigned char *const ring = dynamic + warp * (RING * SLOT + SLICE * (EACH + SUMS * 4)), *const xs = ring + RING * SLOT;
    int *const sums = (int *)(xs + SLICE * EACH);
    float *const part = (float *)(dynamic + SLICES * GROUPS * (RING * SLOT + SLICE * (EACH + SUMS * 4)));
    const int tiles = (int)mp_min((int)SLICE, TILES - slice * SLICE); /* may be less than 0 */
    const int first = (blockIdx.x * GROUPS + group) * STEPS, strips = (int)mp_min((int)STEPS, STRIPS - first);
    auto issue = [&](const int i) { /* tile i % SLICE of strip i / SLICE */
        if (i / SLICE < strips && i % SLICE < tiles) {
            const int64_t number = (int64_t)(first + i / SLICE) * TILES + slice * SLICE + i % SLICE;
            MP_UNROLL
            for (int m = 0; m < MATRICES; ++m) {
                const mp_shared to = mp_shared_address(ring + i % RING * SLOT + m * F::BYTES);
                for (int p = lane * 16; p < F::BYTES; p += 512) mp_copy(to + p, w[m] + number * F::BYTES + p);
            }
        }
        mp_copy_commit();
    };
    MP_UNROLL
    for (int i = 0; i < RING; ++i) issue(i);
    float values[SLICE][8];
    int at[SLICE];
    MP_UNROLL
    for (int v = 0; v < SLICE; ++v) {
        const int piece = (slice * SLICE + v) * 32 + lane;
        mp_vec<X, 8> raw;
        at[v] = piece < K / 8 ? piece * 8 : 0;
        mp_vec_fresh<X, 8>(raw, x + at[v]);
        if (piece >= K / 8) mp_vec_zero<X, 8>(raw);
        mp_vec_floats<X, 8>(values[v], raw);
    }
    if (S::RMS) mp_expert_norm<S, 8, SLICE>(values[0], at, squares, norm_weight, slice, group == 0);
    MP_UNROLL
    for (int v = 0; v < SLICE; ++v) mp_put_row<F>(xs + v * EACH, sums + v * SUMS, values[v], lane);
    if (threadIdx.x == 0) zero = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (int s = 0; s < STEPS; ++s) {
        float y[MATRICES][2] = {};
        for (int v = 0; v < SLICE; ++v) {
            const int i = s * SLICE + v;
            mp_copy_wait<RING - 1>();
            __syncwarp();
            if (s < strips && v < tiles) {
                MP_UNROLL
                for (int m = 0; m < MATRICES; ++m)
                    mp_row_by_tile<F>(y[m][0], y[m][1], ring + i % RING * SLOT + m * F::BYTES, xs + v * EACH,
                        sums + v * SUMS, (const unsigned char *)&zero, lane);
            }
            __syncwarp();
            issue(i + RING);
        }
        MP_UNROLL
        for (int m = 0; m < MATRICES; ++m) {
            MP_UNROLL
            for (int r = 0; r < 2; ++r) {
                float sum = y[m][r];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                const int column = (group * STEPS + s) * 16 + r * 8 + lane / 4;
                if (lane % 4 == 0) part[(slice * COLUMNS + column) * MATRICES + m] = sum;
            }
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < COLUMNS && (int)blockIdx.x * COLUMNS + c < N; c += blockDim.x) {
        float totals[MATRICES] = {0};
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j)
            for (int m = 0; m < MATRICES; ++m) totals[m] += part[(j * COLUMNS + c) * MATRICES + m];
        for (int m = 0; S::RMS && m < MATRICES; ++m) totals[m] *= mp_expert_scale<S>(squares, eps);
        finish(blockIdx.x * COLUMNS + c, totals);
    }
}
