/* mp_attention_prefill with the products of a Hopper warpgroup, which run while softmax does. A warpgroup takes 64
 * queries of one head; those of a block share their keys and values: HEADS heads of a group, then further queries.
 * Round r has keys r and, one behind, values r - 1 in shared memory: scores r are made beside the output of r - 1.
 * Blocks: x is a group of HEADS heads, y the strip of queries, z the sequence.
 *
 * S has the constants DIM, GROUPS (warpgroups of a block), HEADS, KEYS, STAGES, CAUSAL, WINDOW, MASK and SINKS. The other arguments are
 * those of mp_attention_prefill; q and y are this warpgroup's head, see mp_warpgroup. */
#include "mp_attention_prefill.cuh"
#include "mp_wgmma.cuh"

template <typename S, typename T, typename Y, typename Rows, typename Past, typename Shown>
MP_FN void mp_attention_hopper(const int group, const T *q, const Rows key_rows, const Rows value_rows, Y *y,
    const int64_t q_pitch, const int64_t y_pitch, const int64_t queries, const int64_t keys, const float scale,
    const Past &past, const Shown &shown, const float sink)
{
    enum { DIM = S::DIM, GROUPS = S::GROUPS, HEADS = S::HEADS, KEYS = S::KEYS, STAGES = S::STAGES, WINDOW = S::WINDOW };
    enum { THREADS = GROUPS * 128, ROWS = GROUPS / HEADS * 64, CHUNKS = DIM / 8, STEP = THREADS / CHUNKS };
    enum { HALF = KEYS * 128, SIZE = KEYS * DIM * 2 };
    const float NONE = -1e30f, LOW = -1e29f;
    MP_DYNAMIC_SHARED(dynamic);
    const int tid = threadIdx.x, lane = tid % 32, gid = lane / 4, t = lane % 4;
    const int64_t s0 = (int64_t)(gridDim.y - 1 - blockIdx.y) * ROWS; /* the longest strips of all heads first */
    const mp_shared base = (mp_shared_address(dynamic) + 1023) / 1024 * 1024;
    mp_release();
    mp_wait();
    const int group_row = (int)s0 + group / HEADS * 64;
    const int row0 = group_row + tid % 128 / 32 * 16 + gid; /* this lane's queries: row0 and row0 + 8 */
    uint32_t Q[DIM / 16][4], P[KEYS / 16][4]; /* loads of Q go out before the one that addresses of keys depend on */
    mp_load_queries<DIM>(Q, q, q_pitch, row0, queries, t);
    const int before = (int)past(), written = (int)mp_min(keys, before + queries);
    const int last = S::CAUSAL ? (int)mp_min(written, before + s0 + ROWS) : written;
    const int group_last = S::CAUSAL ? (int)mp_min(last, before + group_row + 64) : last;
    const int begin = WINDOW ? (int)(mp_max(0, before + s0 - (WINDOW - 1)) / KEYS * KEYS) : 0;
    const int steps = last > begin ? (last - begin + KEYS - 1) / KEYS : 0;
    const int own = group_last > begin ? (group_last - begin + KEYS - 1) / KEYS : 0;
    /* A thread copies chunk tid % CHUNKS of rows tid / CHUNKS, + STEP, …, a multiple of 8; see mp_tile for the places. */
    const int row = tid / CHUNKS, chunk = tid % CHUNKS;
    const int place = chunk / 8 * HALF + row * 128 + (chunk % 8 ^ row % 8) * 16;
    auto copy = [&](const mp_shared to, const Rows &rows, const int step) {
        const int key = begin + step * KEYS + row;
        MP_UNROLL
        for (int i = 0; i < (KEYS + STEP - 1) / STEP; ++i)
            if (KEYS % STEP == 0 || row + i * STEP < KEYS) {
                const T *const from = rows.at(key, i * STEP, last - 1); /* not read where there is no such key */
                mp_copy_if(to + place + i * (STEP * 128), from + chunk * 8, key + i * STEP < last);
            }
    };
    auto load = [&](const int i) {
        const mp_shared to = base + i % STAGES * (2 * SIZE);
        if (i < steps) copy(to, key_rows, i);
        if (i > 0 && i <= steps) copy(to + SIZE, value_rows, i - 1);
        mp_copy_commit();
    };
    auto next_round = [&]() { /* its pieces have come, and all are done with the round before: load() may fill its place */
        mp_copy_wait<STAGES - 2>();
        mp_show_shared();
        __syncthreads();
    };
    MP_UNROLL
    for (int i = 0; i < STAGES - 1; ++i) load(i);
    float score[KEYS / 8][4] = {}, out[DIM / 8][4] = {}, top[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f}, keep[2];
    /* a lane's two rows see keys up to these; all rows of the group, up to the last */
    auto seen = [&](const int64_t row) { return S::CAUSAL ? (int)mp_min(written - 1, before + row) : written - 1; };
    const int most[2] = {seen(row0), seen(row0 + 8)}, all = seen(group_row);
    auto start_scores = [&](const int round) { /* score = q k' */
        const mp_shared from = base + round % STAGES * (2 * SIZE);
        MP_UNROLL
        for (int d = 0; d < DIM / 16; ++d)
            mp_wgmma<0>(score, Q[d], mp_tile(from + d / 4 * HALF + d % 4 * 32, 0), d > 0);
        mp_wgmma_commit();
    };
    auto start_output = [&](const int round) { /* out += p v */
        const mp_shared from = base + round % STAGES * (2 * SIZE) + SIZE;
        MP_UNROLL
        for (int n = 0; n < KEYS / 16; ++n) mp_wgmma<1>(out, P[n], mp_tile(from + n * 2048, HALF), 1);
        mp_wgmma_commit();
    };
    auto softmax = [&](const int round) { /* scores to weights in place; keep: what earlier sums are multiplied by */
        const int key0 = begin + round * KEYS;
        if (S::MASK || key0 + KEYS - 1 > all || (WINDOW && key0 <= before + group_row + 63 - WINDOW)) {
            MP_UNROLL
            for (int i = 0; i < KEYS / 2; ++i) { /* score[n][2 r + e]: row g + 8 r, key 8 n + 2 t + e */
                const int key = key0 + i / 4 * 8 + 2 * t + i % 2, query = row0 + i % 4 / 2 * 8;
                if (key > most[i % 4 / 2] || (WINDOW && key <= before + query - WINDOW)
                    || (S::MASK && !shown(mp_min(query, queries - 1), key)))
                    score[i / 4][i % 4] = NONE;
            }
        }
        MP_UNROLL
        for (int r = 0; r < 2; ++r) {
            float high = top[r];
            MP_UNROLL
            for (int n = 0; n < KEYS / 8; ++n) high = fmaxf(high, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            const float shift = -fmaxf(high, LOW) * scale; /* LOW: a row may have seen nothing yet */
            keep[r] = mp_exp2((top[r] - high) * scale);
            top[r] = high;
            float sum[2] = {};
            MP_UNROLL
            for (int i = 0; i < KEYS / 4; ++i) {
                float &v = score[i / 2][2 * r + i % 2];
                v = mp_exp2(fmaf(v, scale, shift));
                sum[i % 2] += v;
            }
            total[r] = total[r] * keep[r] + (sum[0] + sum[1]);
        }
    };
    auto pack = [&]() {
        MP_UNROLL
        for (int i = 0; i < KEYS / 4; ++i)
            P[i / 4][i % 4] = mp_pack_brain(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
    };
    next_round();
    if (own > 0) {
        mp_wgmma_begin();
        start_scores(0);
        load(STAGES - 1);
        mp_wgmma_wait<0>();
        mp_settle(score);
        softmax(0);
        pack();
        for (int round = 1; round < own; ++round) {
            next_round();
            mp_wgmma_begin();
            start_scores(round);
            start_output(round);
            load(round + STAGES - 1);
            mp_wgmma_wait<1>();
            mp_settle(score);
            softmax(round);
            mp_wgmma_wait<0>();
            mp_settle(out);
            mp_settle(P);
            MP_UNROLL
            for (int i = 0; i < DIM / 2; ++i) out[i / 4][i % 4] *= keep[i % 4 / 2];
            pack();
        }
        next_round();
        mp_wgmma_begin();
        start_output(own);
        load(own + STAGES - 1);
        mp_wgmma_wait<0>();
        mp_settle(out);
    } else {
        load(STAGES - 1);
    }
    for (int round = own + 1; round <= steps; ++round) { /* copies for the others */
        next_round();
        load(round + STAGES - 1);
    }
    if (S::SINKS) mp_add_sink(total, top, scale, sink, t);
    mp_store_outputs<DIM>(y, y_pitch, row0, queries, t, out, total);
}
