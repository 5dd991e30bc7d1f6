/* Sorting: a bottom-up merge sort of indices, so it is stable. NaN counts as larger than every number, as in numpy. */
#ifndef MP_SORT_H
#define MP_SORT_H

#include "mp_plan.h"
#include "mp_view.h"

/* Whether element b must come before element a. */
MP_FN int mp_sorts_before(const mp_view *x, const int descending, const int64_t b, const int64_t a)
{
    if (MP_IS_FLOAT(x->type)) {
        const double vb = mp_at(x, b * x->s0), va = mp_at(x, a * x->s0);
        return descending ? vb > va || (vb != vb && va == va) : vb < va || (va != va && vb == vb);
    }
    const int64_t vb = mp_int_at(x, b * x->s0), va = mp_int_at(x, a * x->s0);
    if (x->type == MP_U64) return descending ? (uint64_t)vb > (uint64_t)va : (uint64_t)vb < (uint64_t)va;
    return descending ? vb > va : vb < va;
}

/* The indices of a row of n elements in order; `room` is for twice as many. */
MP_FN const int64_t *mp_sort(const mp_view *x, const int descending, const int64_t n, int64_t *room)
{
    int64_t *from = room, *into = room + n;
    for (int64_t i = 0; i < n; ++i) from[i] = i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t low = 0; low < n; low += 2 * width) {
            const int64_t middle = mp_min(low + width, n), high = mp_min(low + 2 * width, n);
            int64_t a = low, b = middle;
            for (int64_t i = low; i < high; ++i) {
                const int take_a = b >= high || (a < middle && !mp_sorts_before(x, descending, from[b], from[a]));
                into[i] = take_a ? from[a++] : from[b++];
            }
        }
        int64_t *const swap = from;
        from = into;
        into = swap;
    }
    return from;
}
#endif
