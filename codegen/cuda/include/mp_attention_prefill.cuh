/* Attention of many new tokens over a cache, or of all tokens of a sequence, on tensor cores. A block takes a strip of queries of one head, a
 * warp 16 of them; keys and values pass through STAGES pieces of shared memory, KEYS at a time. Scores stay in
 * registers: as they come out of the first product they are the left operand of the second. Blocks: x is the strip, y
 * the head, z the sequence.
 *
 * S has the constants DIM, WARPS, KEYS, STAGES, CAUSAL, WINDOW (keys that a query sees, 0: all), MASK (`shown(query, key)`
 * says whether a query sees a key) and SINKS (`sink` is log2(e) times the score of a key whose value is 0). Rows of q and y are given by their first row and the distance between
 * rows, those of k and v as in mp_rows.cuh. `past()` is the cache's length before these tokens. `scale` includes
 * log2(e): softmax is in powers of two. Hidden scores are -1e30; -1e29 is less than any other. */
#include "mp_rows.cuh"

/* The queries of one lane, row0 and row0 + 8, as left operands: word i % 4 of fragment i / 4 is row g or g + 8,
 * dimension 2 t or 2 t + 8. */
template <int DIM, typename T>
MP_FN void mp_load_queries(uint32_t (&Q)[DIM / 16][4], const T *q, const int64_t pitch, const int64_t row0,
    const int64_t queries, const int t)
{
    MP_UNROLL
    for (int i = 0; i < DIM / 4; ++i) {
        const int64_t s = row0 + i % 2 * 8;
        Q[i / 4][i % 4] = s < queries ? *(const uint32_t *)(q + s * pitch + i / 4 * 16 + i % 4 / 2 * 8 + 2 * t) : 0;
    }
}

/* Sums of weights with that of a sink; the four lanes of a row have parts of its sum. */
MP_FN void mp_add_sink(float (&total)[2], const float (&top)[2], const float scale, const float sink, const int t)
{
    MP_UNROLL
    for (int r = 0; r < 2; ++r) total[r] += t == 0 ? mp_exp2(sink - top[r] * scale) : 0.0f;
}

/* out / total of the same rows: out[d][2 r + e] is row row0 + 8 r, dimension 8 d + 2 t + e. */
template <int DIM, typename Y>
MP_FN void mp_store_outputs(Y *y, const int64_t pitch, const int64_t row0, const int64_t queries, const int t,
    const float (&out)[DIM / 8][4], const float (&total)[2])
{
    MP_UNROLL
    for (int r = 0; r < 2; ++r) {
        float sum = total[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int64_t s = row0 + 8 * r;
        if (s >= queries) continue;
        const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        MP_UNROLL
        for (int d = 0; d < DIM / 8; ++d)
            mp_store_pair(y + s * pitch + d * 8 + 2 * t, mp_to<Y>(out[d][2 * r] * scale),
                mp_to<Y>(out[d][2 * r + 1] * scale));
    }
}

template <typename S, typename T, typename Y, typename Rows, typename Past, typename Shown>
MP_FN void mp_attention_prefill(const T *q, const Rows key_rows, const Rows value_rows, Y *y, const int64_t q_pitch,
    const int64_t y_pitch, const int64_t queries, const int64_t keys, const float scale, const Past &past,
    const Shown &shown, const float sink)
{
    enum { DIM = S::DIM, WARPS = S::WARPS, KEYS = S::KEYS, STAGES = S::STAGES, WINDOW = S::WINDOW };
    enum { THREADS = WARPS * 32, ROWS = WARPS * 16, CHUNKS = DIM / 8, SIZE = KEYS * DIM * 2 };
    const float NONE = -1e30f, LOW = -1e29f;
    MP_DYNAMIC_SHARED(dynamic);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, t = lane % 4;
    const int64_t s0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest strips first */
    const mp_shared base = mp_shared_address(dynamic);
    mp_release();
    mp_wait();
    const int before = (int)past(), written = (int)mp_min(keys, before + queries);
    const int last = S::CAUSAL ? (int)mp_min(written, before + s0 + ROWS) : written;
    const int begin = WINDOW ? (int)(mp_max(0, before + s0 - (WINDOW - 1)) / KEYS * KEYS) : 0;
    const int steps = last > begin ? (last - begin + KEYS - 1) / KEYS : 0;
    /* 16-byte chunk c of row r lies at chunk c ^ (r % 8): eight rows of a column fall into different banks. */
    auto issue = [&](const int step) {
        const mp_shared to = base + step % STAGES * (2 * SIZE);
        MP_UNROLL
        for (int i = 0; i < KEYS * CHUNKS / THREADS; ++i) {
            const int at = tid + i * THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
            const int key = begin + step * KEYS + row, live = key < last;
            const mp_shared place = to + (row * CHUNKS + (chunk ^ (row & 7))) * 16;
            mp_copy_if(place, key_rows.at(live ? key : 0) + chunk * 8, live);
            mp_copy_if(place + SIZE, value_rows.at(live ? key : 0) + chunk * 8, live);
        }
    };
    MP_UNROLL
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps) issue(i);
        mp_copy_commit();
    }
    const int64_t row0 = s0 + warp * 16 + gid; /* this lane's queries: row0 and row0 + 8 */
    uint32_t Q[DIM / 16][4];
    mp_load_queries<DIM>(Q, q, q_pitch, row0, queries, t);
    float out[DIM / 8][4] = {}, top[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f};
    const int first_row = before + (int)s0 + warp * 16; /* the position of the warp's first query */
    const mp_shared key_lane = base + lane % 8 * (CHUNKS * 16), value_lane = base + SIZE + lane % 16 * (CHUNKS * 16);
    for (int step = 0; step < steps; ++step) {
        mp_copy_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) issue(step + STAGES - 1);
        mp_copy_commit();
        const int stage = step % STAGES * (2 * SIZE), key0 = begin + step * KEYS;
        if (S::CAUSAL && key0 > first_row + 15) continue; /* all of it comes after the warp's queries */
        float score[KEYS / 8][4] = {};
        MP_UNROLL
        for (int d = 0; d < DIM / 32; ++d) { /* 32 dimensions: eight keys at a time */
            const uint32_t(&low)[4] = Q[2 * d], (&high)[4] = Q[2 * d + 1];
            const int place = ((d * 4 + lane / 8) ^ (lane & 7)) * 16;
            uint4 v[KEYS / 8];
            MP_UNROLL
            for (int n = 0; n < KEYS / 8; ++n) v[n] = mp_load_matrices(key_lane + stage + n * (8 * CHUNKS * 16) + place);
            MP_UNROLL
            for (int n = 0; n < KEYS / 8; ++n) mp_mma_bf16(score[n], low[0], low[1], low[2], low[3], v[n].x, v[n].y);
            MP_UNROLL
            for (int n = 0; n < KEYS / 8; ++n) mp_mma_bf16(score[n], high[0], high[1], high[2], high[3], v[n].z, v[n].w);
        }
        if (S::MASK || key0 + KEYS > written || (S::CAUSAL && key0 + KEYS - 1 > first_row)
            || (WINDOW && key0 <= first_row + 15 - WINDOW)) {
            MP_UNROLL
            for (int i = 0; i < KEYS / 2; ++i) { /* score[n][2 r + e]: row g + 8 r, key 8 n + 2 t + e */
                const int key = key0 + i / 4 * 8 + 2 * t + i % 2, position = first_row + gid + i % 4 / 2 * 8;
                const bool visible = key < written && (!S::CAUSAL || key <= position)
                    && (!WINDOW || key > position - WINDOW);
                if (!visible || (S::MASK && !shown(mp_min(position - before, queries - 1), key))) score[i / 4][i % 4] = NONE;
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
            const float keep = mp_exp2((top[r] - high) * scale);
            top[r] = high;
            float sum = 0.0f;
            MP_UNROLL
            for (int i = 0; i < KEYS / 4; ++i) {
                float &v = score[i / 2][2 * r + i % 2];
                v = mp_exp2(fmaf(v, scale, shift));
                sum += v;
            }
            total[r] = total[r] * keep + sum;
            MP_UNROLL
            for (int d = 0; d < DIM / 8; ++d) out[d][2 * r] *= keep, out[d][2 * r + 1] *= keep;
        }
        MP_UNROLL
        for (int n = 0; n < KEYS / 16; ++n) { /* sixteen keys, 16 dimensions at a time */
            uint32_t P[4];
            MP_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float(&from)[4] = score[2 * n + i / 2];
                P[i] = mp_pack_brain(from[i % 2 * 2], from[i % 2 * 2 + 1]);
            }
            MP_UNROLL
            for (int d = 0; d < DIM / 16; ++d) {
                const int place = ((d * 2 + lane / 16) ^ (lane & 7)) * 16;
                const uint4 v = mp_load_transposed(value_lane + stage + n * (16 * CHUNKS * 16) + place);
                mp_mma_bf16(out[2 * d], P[0], P[1], P[2], P[3], v.x, v.y);
                mp_mma_bf16(out[2 * d + 1], P[0], P[1], P[2], P[3], v.z, v.w);
            }
        }
    }
    if (S::SINKS) mp_add_sink(total, top, scale, sink, t);
    mp_store_outputs<DIM>(y, y_pitch, row0, queries, t, out, total);
}
