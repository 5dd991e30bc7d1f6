/* The choice of experts: probabilities of all of them, then the best one by one. mp_route.cuh is the same for a warp. */
#ifndef MP_ROUTE_H
#define MP_ROUTE_H

typedef struct {
    int experts, groups, kept, softmax;
} mp_route;

/* Scores become probabilities. */
MP_FN void mp_route_chances(const mp_route *s, float *p)
{
    float top = -INFINITY, sum = 0.0f;
    for (int e = 0; e < s->experts; ++e) top = p[e] > top || p[e] != p[e] ? p[e] : top;
    for (int e = 0; e < s->experts; ++e) {
        p[e] = s->softmax ? mp_expf(p[e] - top) : 1.0f / (1.0f + mp_expf(-p[e]));
        sum += p[e];
    }
    for (int e = 0; s->softmax && e < s->experts; ++e) p[e] /= sum;
}

/* What counts for the choice; NaN is above all. */
MP_FN float mp_route_rank(const float *p, const float *bias, const int e)
{
    const float rank = bias ? p[e] + bias[e] : p[e];
    return rank == rank ? rank : INFINITY;
}

/* The groups that may be chosen from, a bit for each. */
MP_FN uint64_t mp_route_groups(const mp_route *s, const float *p, const float *bias)
{
    if (s->kept == s->groups) return ~(uint64_t)0;
    const int each = s->experts / s->groups;
    uint64_t open = 0;
    for (int n = 0; n < s->kept; ++n) {
        int best = -1;
        float top = 0.0f;
        for (int e = 0; e < s->experts; ++e) {
            const float rank = mp_route_rank(p, bias, e);
            if (open >> (e / each) & 1 || (best >= 0 && !(rank > top))) continue;
            best = e / each;
            top = rank;
        }
        open |= (uint64_t)1 << best;
    }
    return open;
}

/* The best expert behind `last` in the order of the choice; -1: the first of all. */
MP_FN int mp_route_next(const mp_route *s, const float *p, const float *bias, const uint64_t open, const int last)
{
    const int each = s->experts / s->groups;
    const float before = last < 0 ? 0.0f : mp_route_rank(p, bias, last);
    int best = -1;
    float top = 0.0f;
    for (int e = 0; e < s->experts; ++e) {
        const float rank = mp_route_rank(p, bias, e);
        if (!(open >> (e / each) & 1) || (last >= 0 && (rank > before || (rank == before && e <= last)))) continue;
        if (best >= 0 && !(rank > top)) continue;
        best = e;
        top = rank;
    }
    return best;
}
#endif
