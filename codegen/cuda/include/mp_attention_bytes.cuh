/* Attention of one new token of each sequence over a cache in 8 bits, split and merged as in mp_attention_decode.cuh.
 *
 * A row is DIM codes and its scale, DIM + 4 bytes: too narrow for 16 bytes of each lane. So a warp copies 32 rows of keys
 * and 32 of values at once, STAGES times that ahead, each warp into shared memory of its own, and waits for nobody else.
 * Queries are whole numbers of 16 bits: their upper bytes are rows 0 to 7 of the left operand, the lower ones rows 8 to 15,
 * and codes of keys are the right one as they lie. Values become bf16, two rows at a time as tensor cores take them.
 *
 * Lane 4 g + t has the scores of rows 8 t to 8 t + 7. Then all reads of shared memory are without conflicts, since a row is
 * 8 n + 1 words: those of values, word g of rows 8 t + s, and those of keys, words 2 t and 2 t + 1 of rows
 * 8 (g / 2) + g % 2 + 2 j.
 *
 * S has the constants of mp_attention_decode, and STAGES. Rows lie side by side, Rows::RUN of them at least; they begin at
 * multiples of 4 bytes, runs of less than 32 at multiples of 16. Up to 12 bytes around the rows that are wanted are read. */
#include "mp_attention_decode.cuh"
#include "mp_tiles.cuh"
#include "mp_vec.cuh"

/* 32 rows of keys or values in shared memory. */
template <int DIM> struct mp_byte_rows {
    enum { ROW = DIM + 4, BYTES = 32 * ROW + 16 };
    const unsigned char *first;
    MP_FN uint32_t word(const int row, const int i) const { return *(const uint32_t *)(first + row * ROW + 4 * i); }
    MP_FN float scale(const int row) const { return mp_bits_to_float(word(row, DIM / 4)); }
};

template <typename S, typename Rows, typename Past, typename Query, typename Sink, typename Store>
MP_FN void mp_attention_bytes(const Rows key_rows, const Rows value_rows, const int64_t keys, const float scale,
    const Past &past, const Query &query, const Sink &sink, const Store &store, float *partial, uint32_t *tickets)
{
    enum { DIM = S::DIM, GROUP = S::GROUP, WARPS = S::WARPS, STAGES = S::STAGES, C = DIM / 32 };
    enum { ROW = mp_byte_rows<DIM>::ROW, SIDE = mp_byte_rows<DIM>::BYTES, RUN = Rows::RUN, RUNS = 32 / RUN };
    const float NONE = -1e30f;
    MP_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(16) mp_decode_parts<S> parts;
    __shared__ __align__(8) uint64_t arrived[WARPS][STAGES];
    const int split = blockIdx.x, splits = S::FIXED ? S::MOST : (int)gridDim.x;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, t = lane % 4;
    if (!S::SPREAD) mp_cluster_arrive(); /* 1: every block of the cluster has started */
    mp_release();
    if (!S::EARLY) mp_wait();
    const int before = (int)mp_max(0, mp_min(past(), keys - 1)), length = before + 1;
    const int from = S::WINDOW ? (int)mp_max(0, length - S::WINDOW) : 0;
    /* Pieces of 32 rows, from multiples of 32 on: those of the split, of which each warp has every WARPS-th. */
    const int all = before / 32 + 1 - from / 32, chunk = (all + splits - 1) / splits;
    const int end = from / 32 + (int)mp_min(all, (split + 1) * chunk), begin = from / 32 + split * chunk + warp;
    unsigned char *const ring = dynamic + warp * (STAGES * 2 * SIDE);
    const mp_shared laps = mp_shared_address(arrived[warp]);
    if (lane < STAGES) mp_laps_begin(laps + lane * 8);
    mp_laps_begun();
    __syncwarp();
    /* Lanes copy a run of keys or values each; a run may begin in the middle of 16 bytes only if it is all 32 rows. */
    auto issue = [&](const int piece, const int stage) {
        const int rows = (int)mp_min(32, length - piece * 32), first = lane % RUNS * RUN;
        const int8_t *const source = (lane < RUNS ? key_rows : value_rows).at(piece * 32, first, length - 1);
        const int shift = (int)((uint64_t)source % 16);
        const int own = lane < 2 * RUNS && first < rows ? (shift + (int)mp_min(RUN, rows - first) * ROW + 15) / 16 * 16 : 0;
        int total = own;
        MP_UNROLL
        for (int d = RUNS; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d); /* of 2 RUNS lanes */
        if (lane == 0) mp_lap_expect(laps + stage * 8, (unsigned)total);
        __syncwarp();
        if (own)
            mp_copy_run(mp_shared_address(ring + (2 * stage + lane / RUNS) * SIDE + first * ROW), source - shift,
                (unsigned)own, laps + stage * 8);
    };
    if (S::EARLY) {
        MP_UNROLL
        for (int d = 0; d < STAGES; ++d)
            if (begin + d * WARPS < end && begin + d * WARPS != before / 32) issue(begin + d * WARPS, d);
        mp_wait();
    }
    MP_UNROLL
    for (int d = 0; d < STAGES; ++d) /* the new token's own piece */
        if (begin + d * WARPS < end && (!S::EARLY || begin + d * WARPS == before / 32)) issue(begin + d * WARPS, d);

    float numbers[C][8], most = 0.0f;
    MP_UNROLL
    for (int c = 0; c < C; ++c) {
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (gid < GROUP) raw = mp_read_cached(query(gid) + 8 * t + 32 * c);
        mp_widen<mp_bf16>(numbers[c], raw);
        MP_UNROLL
        for (int i = 0; i < 8; ++i) most = mp_max_nan(most, fabsf(numbers[c][i]));
    }
    most = mp_max_nan(most, __shfl_xor_sync(~0u, most, 1));
    most = mp_max_nan(most, __shfl_xor_sync(~0u, most, 2));
    uint32_t upper[C][2], lower[C][2];
    MP_UNROLL
    for (int c = 0; c < C; ++c) mp_two_bytes(upper[c], lower[c], numbers[c], most);
    const float q_scale = mp_two_bytes_scale(most) * scale;
    /* Where rows begin in shared memory; the same for all pieces, which are multiples of 16 bytes. */
    const int k_shift = RUNS > 1 ? 0 : (int)((uint64_t)key_rows.at(0) % 16);
    const int v_shift = RUNS > 1 ? 0 : (int)((uint64_t)value_rows.at(0) % 16);

    float sums[C][4][2] = {}, top = 0.1f * NONE, total = 0.0f;
    for (int piece = begin, stage = 0, odd = 0; piece < end; piece += WARPS) {
        const mp_byte_rows<DIM> k = {ring + 2 * stage * SIDE + k_shift}, v = {ring + (2 * stage + 1) * SIDE + v_shift};
        float score[8], weight[8], high = top;
        mp_lap_wait(laps + stage * 8, odd);
        MP_UNROLL
        for (int j = 0; j < 4; ++j) {
            const int row = gid / 2 * 8 + gid % 2 + 2 * j;
            int both[4] = {0, 0, 0, 0};
            MP_UNROLL
            for (int c = 0; c < C; ++c)
                mp_mma_s8(both, upper[c][0], lower[c][0], upper[c][1], lower[c][1], k.word(row, 8 * c + 2 * t),
                    k.word(row, 8 * c + 2 * t + 1));
            MP_UNROLL
            for (int i = 0; i < 2; ++i)
                score[2 * j + i] = (float)(both[i] * 256 + both[2 + i]) * (k.scale(8 * t + 2 * j + i) * q_scale);
        }
        MP_UNROLL
        for (int s = 0; s < 8; ++s) weight[s] = v.scale(8 * t + s);
        if (piece * 32 < from || piece * 32 + 32 > length) { /* rows that are not seen hold anything */
            MP_UNROLL
            for (int s = 0; s < 8; ++s) {
                const int at = piece * 32 + 8 * t + s;
                if (at < from || at >= length) score[s] = NONE, weight[s] = 0.0f;
            }
        }
        MP_UNROLL
        for (int s = 0; s < 8; ++s) high = fmaxf(high, score[s]);
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float keep = mp_exp2(top - high);
        float part = 0.0f;
        MP_UNROLL
        for (int s = 0; s < 8; ++s) {
            const float p = mp_exp2(score[s] - high);
            part += p;
            weight[s] *= p;
        }
        top = high, total = total * keep + part;
        MP_UNROLL
        for (int c = 0; c < C; ++c)
            MP_UNROLL
            for (int e = 0; e < 4; ++e) sums[c][e][0] *= keep, sums[c][e][1] *= keep;
        MP_UNROLL
        for (int h = 0; h < 2; ++h) { /* 16 rows: 8 t + 4 h to 8 t + 4 h + 3 of each lane */
            const uint32_t p0 = mp_pack_brain(weight[4 * h], weight[4 * h + 1]);
            const uint32_t p1 = mp_pack_brain(weight[4 * h + 2], weight[4 * h + 3]);
            MP_UNROLL
            for (int c = 0; c < C; ++c) {
                uint32_t w[4];
                MP_UNROLL
                for (int s = 0; s < 4; ++s) w[s] = v.word(8 * t + 4 * h + s, 8 * c + gid);
                MP_UNROLL
                for (int e = 0; e < 4; ++e) { /* byte e of two rows */
                    const uint32_t b0 = mp_permute(w[0], w[1], 0x0400u + 0x1111u * e);
                    const uint32_t b1 = mp_permute(w[2], w[3], 0x0400u + 0x1111u * e);
                    mp_mma_top(sums[c][e], p0, p1, mp_signed_brains(b0), mp_signed_brains(b1));
                }
            }
        }
        __syncwarp(); /* all lanes have read the slot */
        if (piece + STAGES * WARPS < end) issue(piece + STAGES * WARPS, stage);
        if (++stage == STAGES) stage = 0, odd ^= 1;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (gid < GROUP) { /* sums[c][e][i]: head gid, dimension 32 c + 8 t + 4 i + e */
        MP_UNROLL
        for (int c = 0; c < C; ++c)
            MP_UNROLL
            for (int i = 0; i < 4; ++i)
                mp_store_pair(&parts.outs[warp][gid][32 * c + 8 * t + 2 * i], sums[c][i % 2 * 2][i / 2],
                    sums[c][i % 2 * 2 + 1][i / 2]);
        if (t == 0) parts.tops[warp][gid] = top, parts.totals[warp][gid] = total;
    }
    __syncthreads();
    if constexpr (S::SPREAD) mp_decode_merge_spread<S>(parts, partial, tickets, sink, store);
    else mp_decode_merge_cluster<S>(parts, splits, sink, store);
}
