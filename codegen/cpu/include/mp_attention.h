/* Attention: y[b, s, h] = softmax(q[b, s, h] · k[b, g] * scale, masked) · v[b, g], in one pass over the keys with a
 * running maximum.
 *
 * A kernel fills an mp_attention with constants, views and sizes, and calls one variant: mp_attention_few (up to
 * about two queries: chunks of keys are tasks, and their results are joined), mp_attention_many (strips of queries
 * against blocks of keys), or mp_attention_double. All of it is inlined into the kernel, so that constants
 * specialize the loops. */
#ifndef MP_ATTENTION_H
#define MP_ATTENTION_H

#include "mp_amx.h"
#include "mp_attention_vec.h"
#include "mp_plan.h"

typedef struct {
    int64_t batches, queries, keys;
    int kv_heads, group, dim, value_dim; /* `group` query heads share one key/value head */
    int causal, window;           /* a query sees its own key and those before it; `window` keys in all (0: any number) */
    double scale, softcap;        /* softcap 0: none */
    mp_view q;                    /* [batch][query][head][dim] */
    mp_view k, v;                 /* [batch][group][key][dim] */
    mp_view mask;                 /* [batch][head][query][key]: booleans (true: visible), or numbers added to scores */
    mp_view past;                 /* [batch]: keys before the first query */
    mp_view sinks;                /* [head]: the score of a key more, whose value is 0 */
    mp_view y;                    /* as q */
    int has_mask, has_past, has_sinks; /* without `past` the last query has the last key */
    /* Few queries: tasks of `least` to `chunk` keys; `rows` keys meet the queries of a group at a time, values are
     * summed `wide` vectors at a time; `rows` and `wide` times the heads that run together are at most MP_FEW_SUMS.
     * Rows are prefetched into L1 `ahead` keys before they are read, into L2 `far` keys before. */
    int least, chunk, rows, wide;
    int pairs;                    /* words of two bf16 are split by a shift and a mask */
    int ahead, far, prefetch_keys;
    int few_tiles, few_heads;     /* on tile units, with room for `few_heads` heads in a row of scores */
    float *partial;               /* what tasks leave: sums, largest score and total of each head, [line][chunk] */
    /* Many queries: strips of `columns` (query, head) pairs against blocks of `block` keys, in register tiles of
     * `tile_rows` rows and `tile_vectors` vectors; or on tile units strips of 32. */
    int columns, block, tile_rows, tile_vectors;
    int parts;                    /* on tile units: bf16 numbers of which one is the sum */
    int part;                     /* on tile units: queries, or more, that a worker may have for itself, as in products */
    int q_tiles, y_tiles;         /* whether q comes and y goes as bf16 tiles: see mp_hand_over */
    uint32_t *k_tiles, *v_tiles;  /* room for the keys and values as tiles */
} mp_attention;

/* Keys of sequence b before its first query, the end of those that are written, and [first, last) that queries s0 to
 * s1 see. */
MP_FN int64_t mp_before(const mp_attention *a, const int64_t b)
{
    return a->has_past ? mp_int_at(&a->past, b * a->past.s0) : a->keys - a->queries;
}
MP_FN int64_t mp_written(const mp_attention *a, const int64_t before) { return mp_min(a->keys, before + a->queries); }
MP_FN int64_t mp_first_key(const mp_attention *a, const int64_t before, const int64_t s0)
{
    return a->window ? mp_max(0, before + s0 - (a->window - 1)) : 0;
}
MP_FN int64_t mp_last_key(const mp_attention *a, const int64_t before, const int64_t s1)
{
    const int64_t written = mp_written(a, before);
    return a->causal ? mp_min(written, before + s1 + 1) : written;
}

/* Whether every page that a query sees is one of the cache's. All workers look at all of them. */
MP_FN int mp_pages_seen(mp_run *run, const int step, const mp_attention *a, const int64_t pages)
{
    for (int64_t b = 0; b < a->batches; ++b) {
        const int64_t row = b * a->k.pages, written = mp_written(a, mp_before(a, b));
        if (!mp_pages_fit(run, step, a->k.table, row, row + (written + a->k.page - 1) / a->k.page, pages)) return 0;
    }
    return 1;
}

/* Weights are powers of two: what multiplies scores for that is part of the scale. Where something comes between, it
 * multiplies their distances: a score of -3.4e38, by a mask, is finite and must stay so. */
#define MP_LOG2E 1.4426950408889634
MP_FN int mp_scores_change(const mp_attention *a) { return a->softcap > 0 || (a->has_mask && a->mask.type != MP_BOOL); }
MP_FN float mp_score_scale(const mp_attention *a) { return (float)(mp_scores_change(a) ? a->scale : a->scale * MP_LOG2E); }
MP_FN mp_vec mp_distance(const mp_attention *a, mp_vec x)
{
    if (mp_scores_change(a)) x *= (float)MP_LOG2E;
    return x;
}

/* What softcap and mask make of a score. */
MP_FN float mp_changed_score(const mp_attention *a, float score, const int64_t b, const int64_t h, const int64_t s,
                             const int64_t key)
{
    if (a->softcap > 0) score = (float)a->softcap * mp_tanhf(score / (float)a->softcap);
    if (!a->has_mask) return score;
    const int64_t place = mp_place(&a->mask, b, h, s, key);
    if (a->mask.type == MP_BOOL) return mp_int_at(&a->mask, place) ? score : -INFINITY;
    if (a->mask.type == MP_F64) return (float)((double)score + mp_at(&a->mask, place));
    return score + mp_at_f32(&a->mask, place);
}

/* What the weighted values of a head are multiplied with: 1 / the total of its weights and that of its sink. `top` is
 * its largest score, as mp_score_scale leaves it. */
MP_FN float mp_finished_scale(const mp_attention *a, const int64_t h, const float top, const float total)
{
    if (!a->has_sinks) return total == 0.0f ? 0.0f : 1.0f / total;
    const float sink = mp_at_f32(&a->sinks, h * a->sinks.s0) * (float)MP_LOG2E;
    const float high = mp_scores_change(a) ? top * (float)MP_LOG2E : top;
    return total == 0.0f ? 0.0f : 1.0f / (total + exp2f(sink - high));
}

MP_FN float mp_query(const mp_attention *a, const int64_t b, const int64_t s, const int64_t h, const int64_t i)
{
    return mp_at_f32(&a->q, mp_place(&a->q, b, s, h, i));
}

/* A row of y; as tiles, where the product behind it reads tiles. */
MP_FN void mp_store_row(const mp_attention *a, const int64_t b, const int64_t s, const int64_t h, const float *made)
{
#if defined(MP_TILES)
    if (a->y_tiles) {
        const int64_t place = b * a->queries + s, columns = (int64_t)a->kv_heads * a->group * a->value_dim;
        mp_hand_over((float *)a->y.data, 1, place / 32 * 32, place % 32, h * a->value_dim, columns, made, a->value_dim);
        return;
    }
#endif
    MP_SIMD
    for (int64_t i = 0; i < a->value_dim; ++i) mp_put(&a->y, mp_place(&a->y, b, s, h, i), (double)made[i]);
}

/* A row of keys or values in f32, with zeros behind it up to `line`. */
MP_FN void mp_copy_row(float *to, const mp_view *v, const int64_t b, const int64_t g, const int64_t key,
                       const int64_t dim, const int64_t line)
{
    if (mp_dense(v) && dim % MP_LANES == 0) {
        const void *const row = mp_row(v, b, g, key);
        const mp_vec scale = mp_splat(mp_row_scale(v, row, dim));
        for (int64_t i = 0; i < dim; i += MP_LANES) {
            mp_vec wide = mp_vload(v->type, row, i);
            if (v->type == MP_I8) wide *= scale;
            mp_vstore(to + i, wide);
        }
    } else {
        const float scale = v->type == MP_I8 ? mp_row_scale(v, mp_row(v, b, g, key), dim) : 1.0f;
        MP_SIMD
        for (int64_t i = 0; i < dim; ++i) to[i] = mp_at_f32(v, mp_place(v, b, g, key, i)) * scale;
    }
    for (int64_t i = dim; i < line; ++i) to[i] = 0.0f;
}

#include "mp_attention_double.h"
#include "mp_attention_few.h"
#include "mp_attention_many.h"
#endif
