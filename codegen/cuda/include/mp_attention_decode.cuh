/* Attention of one new token of each sequence over its cache, on tensor cores, split over the cache's length: the
 * blocks of a cluster (up to 8) merge through their shared memory; spread over more blocks, the last to finish merges.
 *
 * A warp takes 16 positions at a time, in registers from the load to the output: scores = q kᵀ, then out += p v. The
 * order of a head's dimensions is free in both products, so lane 4 g + t simply owns dimensions 8 (t + 4 c) … + 8 of
 * position g: 16 bytes are a fragment. GROUP query heads share a key head. Blocks: x is the split, y the key head, z
 * the sequence.
 *
 * S has the constants DIM, GROUP, WARPS, MOST (splits at most), FIXED (there are MOST; else as many as blocks), SPREAD
 * (over more blocks than a cluster has), WINDOW (keys that a query sees, 0: all), SINKS (`sink(head)` is log2(e) times
 * the score of a key whose value is 0) and EARLY (the cache's length and all
 * positions but the new one were there before this plan ran: they are read before the dependency). */
#include "mp_rows.cuh"

/* Eight numbers of a row as pairs of bf16, or zeros. */
MP_FN void mp_load_live(uint32_t (&into)[4], const mp_bf16 *p, const bool live)
{
    const uint4 v = live ? mp_read_cached(p) : make_uint4(0, 0, 0, 0);
    into[0] = v.x, into[1] = v.y, into[2] = v.z, into[3] = v.w;
}

/* What the warps of a block found for each head: the largest score, the sum of weights and the weighted values. */
template <typename S> struct mp_decode_parts {
    float outs[S::WARPS][S::GROUP][S::DIM], tops[S::WARPS][S::GROUP], totals[S::WARPS][S::GROUP];
    MP_FN float top(const int h) const
    {
        float high = -1e30f;
        MP_UNROLL
        for (int w = 0; w < S::WARPS; ++w) high = fmaxf(high, tops[w][h]);
        return high;
    }
    MP_FN float out(const int h, const int d) const
    {
        const float high = top(h);
        float sum = 0.0f;
        MP_UNROLL
        for (int w = 0; w < S::WARPS; ++w) sum += outs[w][h][d] * mp_exp2(tops[w][h] - high);
        return sum;
    }
    MP_FN float total(const int h) const
    {
        const float high = top(h);
        float sum = 0.0f;
        for (int w = 0; w < S::WARPS; ++w) sum += totals[w][h] * mp_exp2(tops[w][h] - high);
        return sum;
    }
};

/* Outputs begin to end of all heads, from the parts of all splits; `store(head, dimension, value)` takes them. */
template <typename S, typename Top, typename Total, typename Out, typename Sink, typename Store>
MP_FN void mp_decode_store(const int begin, const int end, const int splits, const Top &top_of, const Total &total_of,
    const Out &out_of, const Sink &sink, const Store &store)
{
    for (int i = begin + threadIdx.x; i < end; i += S::WARPS * 32) {
        const int own = i / S::DIM;
        float high = -1e30f, all = 0.0f, out = 0.0f;
        MP_UNROLL
        for (int w = 0; w < splits; ++w) high = fmaxf(high, top_of(w, own));
        MP_UNROLL
        for (int w = 0; w < splits; ++w) {
            const float keep = mp_exp2(top_of(w, own) - high);
            all += total_of(w, own) * keep;
            out += out_of(w, i) * keep;
        }
        if (S::SINKS) all += mp_exp2(sink(own) - high);
        store(own, i % S::DIM, out / all);
    }
}

/* Each block of a cluster gets its share of the outputs from all the others, and finishes it. */
template <typename S, typename Sink, typename Store>
MP_FN void mp_decode_merge_cluster(const mp_decode_parts<S> &parts, const int splits, const Sink &sink, const Store &store)
{
    enum { GROUP = S::GROUP, DIM = S::DIM, SIZE = GROUP * DIM, MOST = S::MOST, THREADS = S::WARPS * 32 };
    __shared__ float all_outs[SIZE + MOST], all_tops[MOST][GROUP], all_totals[MOST][GROUP]; /* written by the cluster */
    const int tid = threadIdx.x, split = blockIdx.x, each = (SIZE + splits - 1) / splits;
    mp_cluster_wait(); /* 1 */
    for (int i = tid; i < SIZE; i += THREADS) {
        const mp_shared to = mp_remote(mp_shared_address(&all_outs[split * each + i % each]), i / each);
        mp_store_remote(to, parts.out(i / DIM, i % DIM));
    }
    for (int i = tid; i < GROUP * splits; i += THREADS) {
        const int h = i % GROUP;
        mp_store_remote(mp_remote(mp_shared_address(&all_tops[split][h]), i / GROUP), parts.top(h));
        mp_store_remote(mp_remote(mp_shared_address(&all_totals[split][h]), i / GROUP), parts.total(h));
    }
    __syncwarp();
    mp_cluster_arrive();
    mp_cluster_wait(); /* 2: after this no block touches another's memory */
    const int begin = split * each, end = begin + (int)mp_min(each, SIZE - begin);
    mp_decode_store<S>(
        begin, end, splits, [&](const int w, const int h) { return all_tops[w][h]; },
        [&](const int w, const int h) { return all_totals[w][h]; },
        [&](const int w, const int i) { return all_outs[w * each + i - begin]; }, sink, store);
}

/* Blocks leave their parts in memory; the last of a key head's blocks finishes its outputs. */
template <typename S, typename Sink, typename Store>
MP_FN void mp_decode_merge_spread(
    const mp_decode_parts<S> &own, float *partial, uint32_t *tickets, const Sink &sink, const Store &store)
{
    enum { GROUP = S::GROUP, DIM = S::DIM, SIZE = GROUP * DIM, PART = SIZE + 2 * GROUP, THREADS = S::WARPS * 32 };
    enum { MOST = S::MOST };
    __shared__ bool last;
    const int tid = threadIdx.x, split = blockIdx.x;
    const int64_t task = (int)blockIdx.z * gridDim.y + (int64_t)blockIdx.y;
    float *const parts = partial + task * MOST * PART;
    for (int i = tid; i < SIZE; i += THREADS) parts[split * PART + i] = own.out(i / DIM, i % DIM);
    for (int h = tid; h < GROUP; h += THREADS) {
        parts[split * PART + SIZE + h] = own.top(h);
        parts[split * PART + SIZE + GROUP + h] = own.total(h);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicInc(&tickets[task], MOST - 1) == MOST - 1; /* wraps to 0 for the next call */
    __syncthreads();
    if (!last) return;
    __threadfence();
    mp_decode_store<S>(
        0, SIZE, MOST, [&](const int w, const int h) { return __ldcg(&parts[w * PART + SIZE + h]); },
        [&](const int w, const int h) { return __ldcg(&parts[w * PART + SIZE + GROUP + h]); },
        [&](const int w, const int i) { return __ldcg(&parts[w * PART + i]); }, sink, store);
}

/* `past()` is the cache's length, `query(head)` the row of a head of the group; rows of k and v: mp_rows.cuh. `scale` includes log2(e): softmax is in powers of two. partial, tickets: memory of blocks that are spread. */
template <typename S, typename Rows, typename Past, typename Query, typename Sink, typename Store>
MP_FN void mp_attention_decode(const Rows key_rows, const Rows value_rows, const int64_t keys, const float scale,
    const Past &past, const Query &query, const Sink &sink, const Store &store, float *partial, uint32_t *tickets)
{
    enum { DIM = S::DIM, GROUP = S::GROUP, WARPS = S::WARPS, C = DIM / 32 };
    const float NONE = -1e30f;
    __shared__ __align__(16) mp_decode_parts<S> parts;
    const int split = blockIdx.x, splits = S::FIXED ? S::MOST : (int)gridDim.x;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, t = lane % 4;
    if (!S::SPREAD) mp_cluster_arrive(); /* 1: every block of the cluster has started */
    mp_release();
    if (!S::EARLY) mp_wait();
    const int before = (int)mp_max(0, mp_min(past(), keys - 1)), length = before + 1;
    const int from = S::WINDOW ? (int)mp_max(0, length - S::WINDOW) : 0, chunk = (length - from + splits - 1) / splits;
    const int begin = from + split * chunk, end = (int)mp_min(length, begin + chunk);
    const int turns = (chunk + 16 * WARPS - 1) / (16 * WARPS);
    uint32_t K[2][C][4], V[2][C][4], Q[C][4];
    auto position = [&](const int turn, const int j) { return begin + (turn * WARPS + warp) * 16 + 8 * j + gid; };
    auto load_turn = [&](uint32_t (&into)[2][C][4], const Rows &rows, const int turn, const int end) {
        MP_UNROLL
        for (int j = 0; j < 2; ++j) {
            const auto *const row = rows.at(position(turn, j), 0, length - 1) + 8 * t;
            MP_UNROLL
            for (int c = 0; c < C; ++c) mp_load_live(into[j][c], row + 32 * c, position(turn, j) < end);
        }
    };
    if (S::EARLY) {
        load_turn(K, key_rows, 0, (int)mp_min(end, before));
        load_turn(V, value_rows, 0, (int)mp_min(end, before));
        mp_wait();
        MP_UNROLL
        for (int j = 0; j < 2; ++j)
            if (position(0, j) == before && before < end) { /* the new token's own */
                MP_UNROLL
                for (int c = 0; c < C; ++c) {
                    mp_load_live(K[j][c], key_rows.at(before) + 8 * t + 32 * c, true);
                    mp_load_live(V[j][c], value_rows.at(before) + 8 * t + 32 * c, true);
                }
            }
    } else {
        load_turn(K, key_rows, 0, end);
        load_turn(V, value_rows, 0, end);
    }
    MP_UNROLL
    for (int c = 0; c < C; ++c) mp_load_live(Q[c], query(gid) + 8 * t + 32 * c, gid < GROUP);
    float sums[C][4][2] = {}, top = NONE, total = 0.0f;
    for (int turn = 0; turn < turns; ++turn) {
        float score[2][2], high = NONE;
        MP_UNROLL
        for (int j = 0; j < 2; ++j) {
            score[j][0] = score[j][1] = 0.0f;
            MP_UNROLL
            for (int c = 0; c < C; ++c) {
                mp_mma_top(score[j], Q[c][0], Q[c][1], K[j][c][0], K[j][c][1]);
                mp_mma_top(score[j], Q[c][2], Q[c][3], K[j][c][2], K[j][c][3]);
            }
        }
        if (turn + 1 < turns) load_turn(K, key_rows, turn + 1, end);
        const int base = begin + (turn * WARPS + warp) * 16
            + 2 * t; /* score[j][e]: head gid, position base + 8 j + e */
        MP_UNROLL
        for (int j = 0; j < 4; ++j) {
            float &v = score[j / 2][j % 2];
            v = base + 8 * (j / 2) + j % 2 < end ? v * scale : NONE;
            high = fmaxf(high, v);
        }
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(fmaxf(high, __shfl_xor_sync(~0u, high, 2)), top);
        const float keep = mp_exp2(top - high);
        top = high;
        MP_UNROLL
        for (int j = 0; j < 4; ++j) {
            float &v = score[j / 2][j % 2];
            v = base + 8 * (j / 2) + j % 2 < end ? mp_exp2(v - high) : 0.0f;
        }
        const uint32_t p0 = mp_pack_brain(score[0][0], score[0][1]), p1 = mp_pack_brain(score[1][0], score[1][1]);
        const float used = (mp_bits_to_float(p0 << 16) + mp_bits_to_float(p0 & 0xffff0000u)) /* what p v will use */
            + (mp_bits_to_float(p1 << 16) + mp_bits_to_float(p1 & 0xffff0000u));
        total = total * keep + used;
        MP_UNROLL
        for (int c = 0; c < C; ++c)
            MP_UNROLL
            for (int e = 0; e < 4; ++e) {
                sums[c][e][0] *= keep, sums[c][e][1] *= keep;
                mp_mma_top(sums[c][e], p0, p1, mp_transpose(V[0][c][e]), mp_transpose(V[1][c][e]));
            }
        if (turn + 1 < turns) load_turn(V, value_rows, turn + 1, end);
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (gid < GROUP) { /* sums[c][e][i]: head gid, dimension 8 (t + 4 c) + 2 e + i */
        MP_UNROLL
        for (int c = 0; c < C; ++c)
            MP_UNROLL
            for (int e = 0; e < 4; ++e)
                *(float2 *)&parts.outs[warp][gid][8 * (t + 4 * c) + 2 * e] = make_float2(sums[c][e][0], sums[c][e][1]);
        if (t == 0) parts.tops[warp][gid] = top, parts.totals[warp][gid] = total;
    }
    __syncthreads();
    if constexpr (S::SPREAD) mp_decode_merge_spread<S>(parts, partial, tickets, sink, store);
    else mp_decode_merge_cluster<S>(parts, splits, sink, store);
}
