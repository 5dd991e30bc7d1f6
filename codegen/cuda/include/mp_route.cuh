/* The choice of experts by a warp: lane l has experts l, l + 32, … in registers. mp_route.h is the same in C. */
MP_FN uint64_t mp_warp_best(const uint64_t rank)
{
    const uint32_t high = mp_warp_max((uint32_t)(rank >> 32));
    return (uint64_t)high << 32 | mp_warp_max((uint32_t)(rank >> 32) == high ? (uint32_t)rank : 0);
}

template <int EXPERTS, int GROUPS, int KEPT, int SOFTMAX> struct mp_warp_route {
    enum { V = (EXPERTS + 31) / 32, GROUP = EXPERTS / GROUPS };
    float chances[V];
    uint64_t ranks[V]; /* 0: may not be chosen, or was already */

    template <typename Score> MP_FN void load(const int lane, const float *bias, const Score &score)
    {
        float top = -INFINITY, sum = 0.0f;
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            chances[v] = v * 32 + lane < EXPERTS ? (float)score(v * 32 + lane) : -INFINITY;
            top = mp_maximum_f32(chances[v], top);
        }
        MP_UNROLL
        for (int d = 16; d; d >>= 1) top = mp_maximum_f32(__shfl_xor_sync(~0u, top, d), top);
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            chances[v] = SOFTMAX ? mp_expf(chances[v] - top) : 1.0f / (1.0f + mp_expf(-chances[v]));
            sum += v * 32 + lane < EXPERTS ? chances[v] : 0.0f;
        }
        if (SOFTMAX) sum = mp_warp_sum(sum);
        MP_UNROLL
        for (int v = 0; v < V; ++v) {
            const int e = v * 32 + lane;
            if (SOFTMAX) chances[v] /= sum;
            const float rank = bias && e < EXPERTS ? chances[v] + bias[e] : chances[v];
            ranks[v] = e < EXPERTS ? mp_rank(rank == rank ? rank : INFINITY, e) : 0;
        }
        if (KEPT == GROUPS) return;
        uint64_t open = 0; /* groups that may be chosen from, a bit for each */
        for (int n = 0; n < KEPT; ++n) {
            const uint64_t rank = best([&](const int e) { return !(open >> (e / GROUP) & 1); }, lane);
            open |= (uint64_t)1 << mp_rank_index(rank) / GROUP;
        }
        MP_UNROLL
        for (int v = 0; v < V; ++v)
            if (!(open >> ((v * 32 + lane) / GROUP) & 1)) ranks[v] = 0;
    }

    template <typename Allowed> MP_FN uint64_t best(const Allowed &allowed, const int lane) const
    {
        uint64_t found = 0;
        MP_UNROLL
        for (int v = 0; v < V; ++v)
            if (ranks[v] > found && allowed(v * 32 + lane)) found = ranks[v];
        return mp_warp_best(found);
    }

    /* The best expert that was not chosen yet, and its probability. */
    MP_FN int next(float &chance, const int lane)
    {
        const uint64_t rank = best([](int) { return true; }, lane);
        float own = 0.0f;
        MP_UNROLL
        for (int v = 0; v < V; ++v)
            if (ranks[v] == rank) own = chances[v], ranks[v] = 0;
        const int e = (int)mp_rank_index(rank);
        chance = __shfl_sync(~0u, own, e % 32);
        return e;
    }
};
