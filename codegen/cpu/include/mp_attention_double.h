/* Attention in double: one query and one head at a time. Included by mp_attention.h. */
#ifndef MP_ATTENTION_DOUBLE_H
#define MP_ATTENTION_DOUBLE_H

#define MP_DOUBLE_ROOM(dim, value_dim) ((dim) + (value_dim)) /* doubles */

MP_FN void mp_attention_double(mp_run *run, const int t, const int T, const mp_attention *a, double *room)
{
    double *const query = room, *const sums = room + a->dim;
    const int64_t heads = a->kv_heads * a->group, lines = a->batches * heads;
    for (int64_t task = t; task < lines * a->queries && !mp_stopping(run); task += T) {
        const int64_t s = task / lines, h = task % heads, b = task / heads % a->batches, g = h / a->group;
        const int64_t before = mp_before(a, b), last = mp_last_key(a, before, s);
        double top = -INFINITY, total = 0;
        for (int64_t i = 0; i < a->dim; ++i) query[i] = mp_at(&a->q, mp_place(&a->q, b, s, h, i)) * a->scale;
        for (int64_t i = 0; i < a->value_dim; ++i) sums[i] = 0;
        for (int64_t key = mp_first_key(a, before, s); key < last; ++key) {
            double dot = 0;
            MP_SIMD_SUM(dot)
            for (int64_t i = 0; i < a->dim; ++i) dot += query[i] * mp_at(&a->k, mp_place(&a->k, b, g, key, i));
            if (a->k.type == MP_I8) dot *= (double)mp_row_scale(&a->k, mp_row(&a->k, b, g, key), a->dim);
            if (a->softcap > 0) dot = a->softcap * tanh(dot / a->softcap);
            if (a->has_mask) {
                const int64_t place = mp_place(&a->mask, b, h, s, key);
                if (a->mask.type != MP_BOOL) dot += mp_at(&a->mask, place);
                else if (!mp_int_at(&a->mask, place)) continue;
            }
            if (dot == -INFINITY) continue; /* a hidden key may hold anything */
            if (dot > top) {
                const double keep = exp(top - dot);
                total *= keep;
                for (int64_t i = 0; i < a->value_dim; ++i) sums[i] *= keep;
                top = dot;
            }
            const double weight = exp(dot - top);
            const double scale = (double)mp_row_scale(&a->v, mp_row(&a->v, b, g, key), a->value_dim);
            const double scaled = a->v.type == MP_I8 ? weight * scale : weight;
            total += weight;
            MP_SIMD
            for (int64_t i = 0; i < a->value_dim; ++i) sums[i] += scaled * mp_at(&a->v, mp_place(&a->v, b, g, key, i));
        }
        if (a->has_sinks && total != 0) total += exp(mp_at(&a->sinks, h * a->sinks.s0) - top);
        const double scale = total == 0 ? 0 : 1 / total;
        MP_SIMD
        for (int64_t i = 0; i < a->value_dim; ++i) mp_put(&a->y, mp_place(&a->y, b, s, h, i), sums[i] * scale);
    }
}
#endif
