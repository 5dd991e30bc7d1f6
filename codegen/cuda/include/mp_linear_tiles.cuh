/* Products by weights in tiles (mp_tiles.cuh), which are decoded in registers and multiplied by tensor cores: one row of x
 * (the decode kernel), and the weights expanded for many. mp_linear_few.cuh has a few rows.
 *
 * One row of x leaves columns of the right operand to spare: x is there in two parts, in bf16 (or f16) and the rest that
 * it does not hold, or in the upper and the lower byte of 16 bits, times a scale of each 32 or 64 columns: 15 bits of the largest of
 * them. Codes of whole numbers multiply these bytes, and their sums are exact. Groups of columns that have scales need their
 * sums apart: columns 2 t and 2 t + 1 of the result are group t of four, and elsewhere the right operand is 0. */
#include "mp_tiles.cuh"
#include "mp_vec.cuh"

/* Eight neighbours of a row of x in two parts of bf16: their upper bits, and what those leave over. */
MP_FN void mp_put_brains(unsigned char *group, const float (&f)[8], const int lane)
{
    uint32_t high[4], low[4];
    MP_UNROLL
    for (int i = 0; i < 4; ++i) {
        high[i] = mp_pack_brain(f[2 * i], f[2 * i + 1]);
        const float rest0 = f[2 * i] - mp_bits_to_float(high[i] << 16);
        const float rest1 = f[2 * i + 1] - mp_bits_to_float(high[i] & 0xffff0000u);
        low[i] = mp_pack_brain(rest0, rest1);
    }
    mp_put_eight(group, lane % 4, high);
    mp_put_eight(group + 64, lane % 4, low);
}

/* The largest size of a number among those of the lanes of a group, eight of each. */
template <typename F> MP_FN float mp_group_most(const float (&f)[8])
{
    float most = 0.0f;
    MP_UNROLL
    for (int i = 0; i < 8; ++i) most = mp_max_nan(most, fabsf(f[i]));
    most = mp_max_nan(most, __shfl_xor_sync(~0u, most, 1));
    most = mp_max_nan(most, __shfl_xor_sync(~0u, most, 2));
    if (F::GROUP == 64) most = mp_max_nan(most, __shfl_xor_sync(~0u, most, 4));
    return most;
}

/* The same in two parts of f16, times a power of two of the group, which is among the scales of x. */
template <typename F> MP_FN void mp_put_halves(unsigned char *group, float *scales, const float (&f)[8], const int lane)
{
    const float most = mp_group_most<F>(f);
    const uint32_t power = mp_float_to_bits(most) & 0x7f800000u;
    const bool finite = power < 0x7f800000u, none = most < 1e-30f;
    const float times = none || !finite ? 0.0f : mp_bits_to_float(0x7f000000u - power);
    uint32_t high[4], low[4];
    MP_UNROLL
    for (int i = 0; i < 4; ++i) {
        const float a = f[2 * i] * times, b = f[2 * i + 1] * times;
        high[i] = mp_pack_half(a, b);
        low[i] = mp_pack_half(a - mp_half_to_float((unsigned short)high[i]), b - mp_half_to_float((unsigned short)(high[i] >> 16)));
    }
    mp_put_eight(group, lane % 4, high);
    mp_put_eight(group + 64, lane % 4, low);
    enum { EACH = F::GROUP / 8 };
    if (lane % EACH == 0) scales[lane / EACH] = finite ? (none ? 0.0f : mp_bits_to_float(power)) : NAN;
}

/* Eight neighbours as whole numbers, by a lane that has as many of a tile: for each 32 columns
 * [upper byte, lower byte][lane t][half][4 columns]. What is no number makes the scale none. */
template <typename F> MP_FN void mp_put_bytes(unsigned char *tile, int *sums, const float (&f)[8], const int lane)
{
    const float most = mp_group_most<F>(f);
    uint32_t upper[2], lower[2];
    int sum = mp_two_bytes(upper, lower, f, most);
    unsigned char *const to = tile + lane / 4 * 64 + lane % 2 * 16 + lane % 4 / 2 * 4;
    *(uint32_t *)to = upper[0], *(uint32_t *)(to + 8) = upper[1];
    *(uint32_t *)(to + 32) = lower[0], *(uint32_t *)(to + 40) = lower[1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (F::GROUP >= 32) sum += __shfl_xor_sync(~0u, sum, 2);
    if (F::GROUP == 64) sum += __shfl_xor_sync(~0u, sum, 4);
    enum { EACH = F::GROUP / 8, SCALED = F::GROUP == 64 ? 8 : 4 };
    if (lane % EACH == 0) sums[lane / EACH] = sum;
    if (lane % SCALED == 0) ((float *)sums)[F::PARTS * 4 + lane / SCALED] = mp_two_bytes_scale(most);
}

/* y0 and y1 += a tile times a row of x, rows g and g + 8; of codes in groups the lanes of a four have a part each. */
template <typename F>
MP_FN void mp_row_by_bytes(float &y0, float &y1, const unsigned char *tile, const unsigned char *xs, const int *sums,
    const unsigned char *nothing, const int lane)
{
    const int t = lane % 4;
    MP_UNROLL
    for (int p = 0; p < F::PARTS; ++p) {
        int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0}; /* two chains of products */
        float scale[2], low[2] = {0.0f, 0.0f};
        F::scales(scale, low, tile, p, lane);
        MP_UNROLL
        for (int m = 0; m < F::CHUNKS; ++m) {
            mp_bytes b;
            F::bytes(b, tile, p * F::CHUNKS + m, lane);
            MP_UNROLL
            for (int j = 0; j < 2; ++j) { /* 32 columns */
                const unsigned char *const at = xs + ((p * F::CHUNKS + m) * 2 + j) * 64 + lane % 8 * 8;
                uint2 u;
                if (F::GROUP == 16) {
                    u = *(const uint2 *)(lane / 16 == j ? at : nothing);
                    if (lane / 8 % 2) u.x = 0;
                    else u.y = 0;
                } else {
                    u = *(const uint2 *)(lane / 8 == (F::GROUP == 64 ? m : 2 * m + j) ? at : nothing);
                }
                if (F::SIGNED) mp_mma_s8(j ? d : c, b[2 * j][0], b[2 * j][1], b[2 * j + 1][0], b[2 * j + 1][1], u.x, u.y);
                else mp_mma_u8(j ? d : c, b[2 * j][0], b[2 * j][1], b[2 * j + 1][0], b[2 * j + 1][1], u.x, u.y);
            }
        }
        const int sum = F::LOWS || F::SUBTRACTED ? sums[p * 4 + t] : 0, less = F::SUBTRACTED * sum;
        const float x_scale = ((const float *)sums)[F::PARTS * 4 + (F::GROUP == 16 ? p * 2 + t / 2 : p * 4 + t)];
        float dot0 = (float)((c[0] + d[0]) * 256 + (c[1] + d[1]) - less), dot1 = (float)((c[2] + d[2]) * 256 + (c[3] + d[3]) - less);
        if (F::ZEROS) dot0 = fmaf(low[0], (float)sum, dot0), dot1 = fmaf(low[1], (float)sum, dot1);
        y0 = fmaf(scale[0] * x_scale, dot0, y0);
        y1 = fmaf(scale[1] * x_scale, dot1, y1);
        if (F::LOWS && !F::ZEROS) {
            const float x_sum = x_scale * (float)sum;
            y0 = fmaf(low[0], x_sum, y0);
            y1 = fmaf(low[1], x_sum, y1);
        }
    }
}
template <typename F>
MP_FN void mp_row_by_floats(float &y0, float &y1, const unsigned char *tile, const unsigned char *xs, const int *sums,
    const unsigned char *nothing, const int lane)
{
    float scale[2], low[2];
    const int g = lane / 4;
    MP_UNROLL
    for (int p = 0; p < F::PARTS; ++p) {
        float c[4] = {}, d[4] = {};
        F::scales(scale, low, tile, p, lane);
        MP_UNROLL
        for (int m = 0; m < F::CHUNKS; ++m) {
            mp_words a;
            F::row_words(a, tile, p * F::CHUNKS + m, lane);
            MP_UNROLL
            for (int j = 0; j < 2; ++j) {
                const bool own = !F::GROUP || lane / 8 == (F::GROUP == 64 ? m : 2 * m + j);
                const unsigned char *const at = xs + (p * F::CHUNKS + m) * 256 + j * 128 + lane % 8 * 16;
                const uint4 u = *(const uint4 *)(own ? at : nothing);
                if constexpr (F::HALVES) {
                    mp_mma_f16(c, a[2 * j][0], a[2 * j][1], a[2 * j][2], a[2 * j][3], u.x, u.y);
                    mp_mma_f16(d, a[2 * j + 1][0], a[2 * j + 1][1], a[2 * j + 1][2], a[2 * j + 1][3], u.z, u.w);
                } else {
                    mp_mma_bf16(c, a[2 * j][0], a[2 * j][1], a[2 * j][2], a[2 * j][3], u.x, u.y);
                    mp_mma_bf16(d, a[2 * j + 1][0], a[2 * j + 1][1], a[2 * j + 1][2], a[2 * j + 1][3], u.z, u.w);
                }
            }
        }
        if (F::HALVES) {
            const float x_scale = ((const float *)sums)[p * 4 + lane % 4];
            scale[0] *= x_scale, scale[1] *= x_scale;
        }
        y0 = fmaf(scale[0], (c[0] + c[1]) + (d[0] + d[1]), y0);
        y1 = fmaf(scale[1], (c[2] + c[3]) + (d[2] + d[3]), y1);
    }
    for (int e = 1; e <= F::exceptions(tile); ++e) {
        const uint32_t one = F::list(tile)[e];
        const unsigned char *const at = xs + mp_exception_column(one) / 32 * 128 + mp_place_of(mp_exception_column(one));
        const float x = mp_load_bf16(*(const mp_bf16 *)at) + mp_load_bf16(*(const mp_bf16 *)(at + 64));
        const float more = scale[0] * mp_exception_excess(one) * x;
        if (mp_exception_row(one) == g) y0 += more;
        if (mp_exception_row(one) == g + 8) y1 += more;
    }
}

/* What a lane has of a tile's columns of x, for either; and a tile times them. */
template <typename F> MP_FN void mp_put_row(unsigned char *xs, int *sums, const float (&f)[8], const int lane)
{
    if constexpr (F::INTEGERS) mp_put_bytes<F>(xs, sums, f, lane);
    else if constexpr (F::HALVES) mp_put_halves<F>(xs + lane / 4 * 128, (float *)sums, f, lane);
    else mp_put_brains(xs + lane / 4 * 128, f, lane);
}
template <typename F>
MP_FN void mp_row_by_tile(float &y0, float &y1, const unsigned char *tile, const unsigned char *xs, const int *sums,
    const unsigned char *nothing, const int lane)
{
    if constexpr (F::INTEGERS) mp_row_by_bytes<F>(y0, y1, tile, xs, sums, nothing, lane);
    else mp_row_by_floats<F>(y0, y1, tile, xs, sums, nothing, lane);
}

/* One row: y = epilogue(w · norm(x)).
 *
 * A block owns a run of strips. Its warps split the tiles of a strip into SLICES, and the strips into GROUPS. S has the
 * constants: K, N, GRID, WARPS, SLICES, BATCH (tiles in a slot of the ring), RING (slots), EARLY, GENTLE, LATE, AHEAD,
 * RMS and GAMMA, as in mp_linear_row.cuh; `fetch`, `fresh` and `finish` are as there. K is a multiple of 8. */
template <typename S, typename F, typename X, typename G, typename Fetch, typename Fresh, typename Finish>
MP_FN void mp_linear_tiles_row(const unsigned char *w, const X *x, const G *norm_weight, const float eps,
    const Fetch &fetch, const Fresh &fresh, const Finish &finish)
{
    enum { K = S::K, N = S::N, STRIPS = (N + 15) / 16, TILES = (K + 255) / 256, GRID = S::GRID, WARPS = S::WARPS };
    enum { SLICES = S::SLICES, GROUPS = WARPS / SLICES, SLICE = (TILES + SLICES - 1) / SLICES, BATCH = S::BATCH };
    enum { UNITS = (SLICE + BATCH - 1) / BATCH, RING = S::RING, EARLY = S::EARLY, GENTLE = S::GENTLE, LATE = S::LATE, AHEAD = S::AHEAD };
    enum { SLOT = BATCH * F::BYTES, MOST = (STRIPS + GRID - 1) / GRID, XS = SLICE * F::X_BYTES, EVEN = SLICE * SLICES == TILES };
    enum { SUMS = F::SUMS, WHOLE = EVEN && K % 256 == 0 && SLICE % BATCH == 0 };
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ float squares[SLICES];
    __shared__ uint4 zeros[WARPS];
    typedef float sums_of_slice[MOST * 16];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, slice = warp % SLICES, group = warp / SLICES;
    unsigned char *const xs = dynamic + WARPS * RING * SLOT + warp * XS;
    /* Of each tile the sums of x over groups, then the scales of x: numbers of 32 columns. */
    int *const sums = (int *)(dynamic + WARPS * (RING * SLOT + XS)) + warp * SLICE * SUMS;
    sums_of_slice *const part = (sums_of_slice *)(dynamic + WARPS * (RING * SLOT + XS + SLICE * SUMS * 4));
    const int s0 = (int)((int64_t)STRIPS * blockIdx.x / GRID), strips = (int)((int64_t)STRIPS * (blockIdx.x + 1) / GRID) - s0;
    const int p0 = s0 * 8, pairs = (int)mp_min(strips * 8, (N + 1) / 2 - p0);
    const int tiles = EVEN ? (int)SLICE : (int)mp_min((int)SLICE, TILES - slice * SLICE); /* may be less than 0 */
    if (!LATE) mp_release();

    decltype(fetch(0, 0)) early;
    if (AHEAD && tid < pairs) early = fetch(0, p0 + tid);

    /* Before the dependency: constants first, then weights. */
    mp_vec<G, 8> gamma[SLICE];
    int at[SLICE];
    bool live[SLICE];
    MP_UNROLL
    for (int v = 0; v < SLICE; ++v) {
        const int piece = (slice * SLICE + v) * 32 + lane;
        live[v] = WHOLE || piece < K / 8;
        at[v] = live[v] ? piece * 8 : 0;
        if (S::GAMMA == MP_GAMMA_CONSTANT) mp_vec_const<G, 8>(gamma[v], norm_weight + at[v]);
    }
    if (lane == 0) zeros[warp] = make_uint4(0, 0, 0, 0);
    const unsigned char *const raw = w + (int64_t)STRIPS * TILES * F::BYTES;
    const unsigned char *const first = w + ((int64_t)s0 * TILES + slice * SLICE) * F::BYTES + lane * 16;
    unsigned char *const ring = dynamic + warp * RING * SLOT;
    const mp_shared ring_at = mp_shared_address(ring) + lane * 16;
    auto issue = [&](const int i, const int slot) {
        const int b = group + i / UNITS * GROUPS, unit = i % UNITS;
        const unsigned char *const from = first + ((int64_t)b * TILES + unit * BATCH) * F::BYTES;
        /* Tiles of a slice lie one behind the other. */
        const int bytes = WHOLE ? (int)SLOT : (int)mp_min((int)SLOT, (tiles - unit * BATCH) * F::BYTES);
        if (b < strips) {
            MP_UNROLL
            for (int p = 0; p < SLOT; p += 512)
                if ((WHOLE && p + 512 <= SLOT) || p + lane * 16 < bytes) mp_copy(ring_at + slot * SLOT + p, from + p);
        }
        mp_copy_commit();
    };
    MP_UNROLL
    for (int d = 0; d < EARLY; ++d) {
        if (GENTLE && d >= GENTLE) mp_copy_wait<(GENTLE ? GENTLE - 1 : 0)>();
        issue(d, d);
    }
    mp_wait();

    /* After it: x first, then the rest of the ring, then what only the epilogue needs. */
    mp_vec<X, 8> values[SLICE];
    MP_UNROLL
    for (int v = 0; v < SLICE; ++v) mp_vec_fresh<X, 8>(values[v], x + at[v]);
    if (S::GAMMA == MP_GAMMA_COMPUTED) {
        MP_UNROLL
        for (int v = 0; v < SLICE; ++v) mp_vec_fresh<G, 8>(gamma[v], norm_weight + at[v]);
    }
    for (int d = EARLY; d < RING; ++d) issue(d, d);
    if (!AHEAD && tid < pairs) early = fetch(0, p0 + tid);
    if (tid < pairs) fresh(early);
    float square = 0.0f;
    MP_UNROLL
    for (int v = 0; v < SLICE; ++v) {
        float f[8], g[8];
        if (!live[v]) mp_vec_zero<X, 8>(values[v]);
        mp_vec_floats<X, 8>(f, values[v]);
        if (S::GAMMA) mp_vec_floats<G, 8>(g, gamma[v]);
        MP_UNROLL
        for (int i = 0; i < 8; ++i) {
            if (S::RMS) square = fmaf(f[i], f[i], square);
            if (S::GAMMA) f[i] *= g[i];
        }
        mp_put_row<F>(xs + v * F::X_BYTES, sums + v * SUMS, f, lane);
    }
    if (S::RMS) {
        square = mp_warp_sum(square);
        if (group == 0 && lane == 0) squares[slice] = square;
    }
    __syncwarp(); /* x and its zeros are the warp's own */

    const int g = lane / 4, t = lane % 4;
    const unsigned char *const nothing = (const unsigned char *)&zeros[warp];
    for (int b = group, i = 0, slot = 0; b < strips; b += GROUPS) {
        float y0 = 0.0f, y1 = 0.0f;
        for (int unit = 0; unit < UNITS; ++unit, ++i) {
            if (LATE && unit == 0 && b + LATE * GROUPS >= strips) mp_release();
            mp_copy_wait<RING - 1>();
            __syncwarp();
            MP_UNROLL
            for (int n = 0; n < BATCH; ++n) {
                const int number = unit * BATCH + n;
                if (!WHOLE && number >= tiles) break;
                const unsigned char *const tile = ring + slot * SLOT + n * F::BYTES, *const own = xs + number * F::X_BYTES;
                if (F::is_raw(tile)) {
                    float c[4] = {};
                    MP_UNROLL_BY(1)
                    for (int m = 0; m < 4; ++m) {
                        mp_words a;
                        F::read_raw(a, tile, raw, m, lane);
                        MP_UNROLL
                        for (int step = 0; step < 4; ++step) {
                            const unsigned char *const at = own + m * 256 + step / 2 * 128 + lane % 8 * 16 + step % 2 * 8;
                            const uint2 u = *(const uint2 *)at;
                            mp_mma_bf16(c, a[step][0], a[step][1], a[step][2], a[step][3], u.x, u.y);
                        }
                    }
                    y0 += c[0] + c[1];
                    y1 += c[2] + c[3];
                    continue;
                }
                mp_row_by_tile<F>(y0, y1, tile, own, sums + number * SUMS, nothing, lane);
            }
            __syncwarp();
            issue(i + RING, slot);
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
        if (F::GROUP) {
            MP_UNROLL
            for (int d = 1; d < 4; d *= 2) y0 += __shfl_xor_sync(~0u, y0, d), y1 += __shfl_xor_sync(~0u, y1, d);
        }
        if (t == 0) part[slice][b * 16 + g] = y0, part[slice][b * 16 + 8 + g] = y1;
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
    for (int i = tid; i < pairs; i += WARPS * 32) {
        float first_sum = 0.0f, second_sum = 0.0f;
        MP_UNROLL
        for (int j = 0; j < SLICES; ++j) {
            const float2 two = *(const float2 *)&part[j][2 * i];
            first_sum += two.x;
            second_sum += two.y;
        }
        if (i != tid) {
            early = fetch(0, p0 + i);
            fresh(early);
        }
        finish(early, 0, p0 + i, first_sum * scale, second_sum * scale);
    }
}

/* The weights in rows of bf16, for the vendor's library: a warp for each tile, four warps in a block. */
template <typename F, int K, int N> MP_FN void mp_expand_tiles(mp_bf16 *to, const unsigned char *w)
{
    enum { STRIPS = (N + 15) / 16, TILES = (K + 255) / 256 };
    __shared__ __align__(16) unsigned char tiles[4][F::BYTES];
    const int64_t number = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
    mp_release();
    if (number >= (int64_t)STRIPS * TILES) return;
    unsigned char *const tile = tiles[threadIdx.x / 32];
    mp_tile_fetch<F>(tile, w + number * F::BYTES);
    mp_wait(); /* what is overwritten is read by the kernels in front */
    const int64_t n0 = number / TILES * 16, k0 = number % TILES * 256;
    mp_tile_values<F>(tile, w + (int64_t)STRIPS * TILES * F::BYTES, [&](const int row, const int column, const float value) {
        if (n0 + row < N && k0 + column < K) to[(n0 + row) * K + k0 + column] = mp_to_bf16(value);
    });
}
