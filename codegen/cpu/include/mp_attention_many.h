/* Attention of many queries: strips of (query, head) pairs against blocks of keys. Included by mp_attention.h. */
#ifndef MP_ATTENTION_MANY_H
#define MP_ATTENTION_MANY_H

/* out[r][j] = out[r][j] * keep[j] + sum over k of x[r * xr + k * xk] * w[k * ldw + j] for R rows and V vectors of
 * columns; without `keep` the sum alone. R and V must be constants where this is used. */
MP_FN void mp_strip(const float *x, const int64_t xr, const int64_t xk, const float *w, const int64_t ldw,
                    const int64_t K, float *out, const int64_t ldo, const int R, const int V, const float *keep)
{
    mp_vec acc[64];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) {
        acc[i] = mp_splat(0.0f);
        if (keep) acc[i] = mp_vload_f32(out + i / V * ldo + i % V * MP_LANES) * mp_vload_f32(keep + i % V * MP_LANES);
    }
    int64_t k = 0;
#if defined(MP_TILE_STEP_BY_PLACE)
    for (; R == MP_LANES && xr == 1 && k < K; ++k) { /* x is one vector */
        const mp_vec some = mp_vload_here(x + k * xk);
        MP_FULLY
        for (int j = 0; j < V; ++j) {
            const mp_vec wide = mp_vload_here(w + k * ldw + j * MP_LANES);
            MP_FULLY
            for (int r = 0; r < R; ++r) acc[r * V + j] = mp_vadd_product(acc[r * V + j], wide, some, r);
        }
    }
    for (; R == MP_LANES && xk == 1 && k + MP_LANES <= K; k += MP_LANES) { /* or a vector of each row */
        mp_vec some[MP_LANES];
        MP_FULLY
        for (int r = 0; r < MP_LANES; ++r) some[r] = mp_vload_here(x + r * xr + k);
        MP_FULLY
        for (int i = 0; i < MP_LANES * V; ++i) {
            const mp_vec wide = mp_vload_here(w + (k + i / V) * ldw + i % V * MP_LANES);
            MP_FULLY
            for (int r = 0; r < MP_LANES; ++r) acc[r * V + i % V] = mp_vadd_product(acc[r * V + i % V], wide, some[r], i / V);
        }
    }
#endif
    MP_TWICE
    for (; k < K; ++k) {
        mp_vec wide[64];
        mp_vloads(w + k * ldw, wide, V);
        MP_FULLY
        for (int r = 0; r < R; ++r) {
            const mp_vec one = mp_splat(x[r * xr + k * xk]);
            MP_FULLY
            for (int j = 0; j < V; ++j) acc[r * V + j] += one * wide[j];
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(out + i / V * ldo + i % V * MP_LANES, acc[i]);
}

/* Floats of room for a strip; `value_dim` is a multiple of `tile_rows` here. */
#define MP_STRIP_ROOM(dim, value_dim, columns, block) \
    (((dim) + (block) + (value_dim) + 4) * (columns) + (block) * ((dim) > (value_dim) ? (dim) : (value_dim)))

/* A strip in work. Columns [c0, c0 + filled) of a group, column = query * group + head, are lanes: keys and values
 * are read as they lie, and softmax has no sum across a vector. */
typedef struct {
    int64_t b, g, c0, filled, used, before, s0, s1; /* used: `filled` in whole tiles; the first and the last query */
    float *query, *score, *sums;              /* [dim][column], [key][column], [value_dim][column] */
    float *rows;                              /* copies of keys, then of values */
    float *place, *top, *total, *keep;        /* [column]: its own key, the largest score, the total, see mp_weigh */
} mp_strip_state;

MP_FN int64_t mp_strip_sums(const mp_attention *a) { return (a->value_dim + a->tile_rows - 1) / a->tile_rows * a->tile_rows; }

/* Scores of a block of keys become weights: moves the maximum, and says how much of the earlier sums to keep. */
MP_FN void mp_weigh(const mp_attention *a, const mp_strip_state *s, const int64_t width)
{
    const int64_t columns = a->columns;
    for (int64_t c = 0; c < s->used; c += MP_LANES) {
        float *const score = s->score + c;
        const mp_vec old = mp_vload_f32(s->top + c);
        mp_vec high = old;
        for (int64_t j = 0; j < width; ++j) high = mp_vmax(mp_vload_f32(score + j * columns), high);
        const mp_vec base = mp_vbase(high), kept = mp_vexp2(mp_distance(a, old - base));
        mp_vec sum = mp_vload_f32(s->total + c) * kept;
        MP_TWICE
        for (int64_t j = 0; j < width; ++j) {
            const mp_vec weight = mp_vexp2(mp_distance(a, mp_vload_f32(score + j * columns) - base));
            mp_vstore(score + j * columns, weight);
            sum += weight;
        }
        mp_vstore(s->top + c, high);
        mp_vstore(s->total + c, sum);
        mp_vstore(s->keep + c, kept);
    }
}

/* Whether some column may not see a key: it lies behind the first query's, or before the last one's window. It may
 * hold anything, and 0 * NaN must not enter. Its values are made finite, and those who see it get NaN from its
 * score. */
MP_FN int mp_unseen(const mp_attention *a, const mp_strip_state *s, const int64_t key)
{
    return a->causal && (key > s->before + s->s0 || (a->window && key <= s->before + s->s1 - a->window));
}

MP_FN void mp_strip_copy_keys(const mp_attention *a, const mp_strip_state *s, const int64_t j0, const int64_t width)
{
    for (int64_t j = 0; j < (width + a->tile_rows - 1) / a->tile_rows * a->tile_rows; ++j) {
        const int64_t key = j0 + mp_min(j, width - 1);
        float *const row = s->rows + j * a->dim;
        mp_copy_row(row, &a->k, s->b, s->g, key, a->dim, a->dim);
        int bad = 0;
        const int unseen = mp_unseen(a, s, key), bytes = a->v.type == MP_I8;
        if (unseen && bytes) bad = !isfinite(mp_row_scale(&a->v, mp_row(&a->v, s->b, s->g, key), a->value_dim));
        for (int64_t i = 0; unseen && !bytes && i < a->value_dim; ++i)
            bad |= !isfinite(mp_at_f32(&a->v, mp_place(&a->v, s->b, s->g, key, i)));
        for (int64_t i = 0; bad && i < a->dim; ++i) row[i] = NAN;
    }
}

MP_FN void mp_strip_copy_values(const mp_attention *a, const mp_strip_state *s, const int64_t j0, const int64_t width)
{
    const int64_t line = mp_strip_sums(a);
    for (int64_t j = 0; j < width; ++j) {
        float *const row = s->rows + j * line;
        mp_copy_row(row, &a->v, s->b, s->g, j0 + j, a->value_dim, line);
        if (mp_unseen(a, s, j0 + j))
            for (int64_t i = 0; i < a->value_dim; ++i) row[i] = isfinite(row[i]) ? row[i] : 0.0f;
    }
}

/* Whether a mask of booleans, rows of which are neighbours or equal, hides none of these keys from any column. */
MP_FN int mp_mask_shows_all(const mp_attention *a, const mp_strip_state *s, const int64_t j0, const int64_t width)
{
    if (a->mask.type != MP_BOOL || a->mask.unstored || a->mask.s3 < 0 || a->mask.s3 > 1) return 0;
    for (int64_t c = s->c0; c < s->c0 + s->filled; ++c) {
        const int64_t place = mp_place(&a->mask, s->b, s->g * a->group + c % a->group, c / a->group, j0);
        if (memchr((const uint8_t *)a->mask.data + place, 0, (size_t)(a->mask.s3 ? width : 1))) return 0;
    }
    return 1;
}

/* Softcap and mask, and -inf for keys that a column does not see. */
MP_FN void mp_strip_change(const mp_attention *a, const mp_strip_state *s, const int64_t j0, const int64_t width,
                           const int whole)
{
    const int64_t columns = a->columns;
    const int masked = a->has_mask && !mp_mask_shows_all(a, s, j0, width);
    for (int64_t j = 0; (a->softcap > 0 || masked) && j < width; ++j)
        for (int64_t c = 0; c < s->used; ++c) {
            const int64_t column = s->c0 + mp_min(c, s->filled - 1), h = s->g * a->group + column % a->group;
            float *const score = s->score + j * columns + c;
            *score = mp_changed_score(a, *score, s->b, h, column / a->group, j0 + j);
        }
    for (int64_t j = 0; (a->causal || a->window) && !whole && j < width; ++j)
        for (int64_t c = 0; c < s->used; c += MP_LANES) {
            float *const score = s->score + j * columns + c;
            const mp_vec key = mp_splat((float)(j0 + j)), at = mp_vload_f32(s->place + c);
            mp_vec_u32 hidden = MP_BITS(key > at);
            if (!a->causal) hidden = MP_BITS(key <= at - (float)a->window);
            else if (a->window) hidden |= MP_BITS(key <= at - (float)a->window);
            mp_vstore(score, mp_vchoose(hidden, mp_splat(-INFINITY), mp_vload_f32(score)));
        }
}

/* Keys [j0, j0 + width) for a strip. Rows of f32 that follow each other are read in place where every column sees them
 * all. Rows that lie apart are copied: often they are 2 KB apart, or 4, and fall upon each other in the caches. */
MP_FN void mp_strip_block(const mp_attention *a, const mp_strip_state *s, const int64_t j0, const int64_t width)
{
    const int R = a->tile_rows, V = a->tile_vectors;
    const int64_t columns = a->columns, line = mp_strip_sums(a);
    const int whole = width == a->block && (!a->causal || j0 + a->block <= s->before + s->s0 + 1)
                      && (!a->window || j0 > s->before + s->s1 - a->window);
    const int joined = !a->k.page || j0 / a->k.page == (j0 + a->block - 1) / a->k.page; /* all of it is in one page */
    const int k_there = mp_dense(&a->k) && a->k.type == MP_F32 && a->k.s2 == a->dim && whole && joined;
    const int v_there = mp_dense(&a->v) && a->v.type == MP_F32 && a->v.s2 == line && whole && joined;
    const float *const k = k_there ? (const float *)mp_row(&a->k, s->b, s->g, j0) : s->rows;
    const float *const v = v_there ? (const float *)mp_row(&a->v, s->b, s->g, j0) : s->rows;
    const int64_t k_step = k_there ? a->k.s2 : a->dim, v_step = v_there ? a->v.s2 : line;
    if (!k_there) mp_strip_copy_keys(a, s, j0, width);
    for (int64_t j = 0; j < width; j += R)
        for (int64_t c = 0; c < s->used; c += V * MP_LANES)
            mp_strip(k + j * k_step, k_step, 1, s->query + c, columns, a->dim, s->score + j * columns + c, columns, R, V, 0);
    mp_strip_change(a, s, j0, width, whole);
    mp_weigh(a, s, width);
    if (!v_there) mp_strip_copy_values(a, s, j0, width);
    for (int64_t i = 0; i < line; i += R)
        for (int64_t c = 0; c < s->used; c += V * MP_LANES)
            mp_strip(v + i, 1, v_step, s->score + c, columns, width, s->sums + i * columns + c, columns, R, V, s->keep + c);
}

/* Columns of a strip against all keys that they see. */
MP_FN void mp_attention_strip(const mp_attention *a, const int64_t b, const int64_t g, const int64_t c0,
                              const int64_t filled, float *room)
{
    const int64_t columns = a->columns, line = mp_strip_sums(a), before = mp_before(a, b);
    float *const score = room + a->dim * columns, *const sums = score + a->block * columns;
    float *const place = sums + line * columns;
    const int64_t wide = a->tile_vectors * MP_LANES, used = (filled + wide - 1) / wide * wide;
    const mp_strip_state s = {b, g, c0, filled, used, before, c0 / a->group, (c0 + filled - 1) / a->group, room, score, sums,
                              place + 4 * columns, place, place + columns, place + 2 * columns, place + 3 * columns};
    const float scale = mp_score_scale(a);
    for (int64_t c = 0; c < used; ++c) {
        const int64_t column = c0 + mp_min(c, filled - 1), row = column / a->group, h = g * a->group + column % a->group;
        for (int64_t i = 0; i < a->dim; ++i) s.query[i * columns + c] = mp_query(a, b, row, h, i) * scale;
        s.place[c] = (float)(before + row);
        s.top[c] = -INFINITY;
        s.total[c] = 0.0f;
    }
    for (int64_t i = 0; i < line * columns; ++i) s.sums[i] = 0.0f;
    const int64_t last = mp_last_key(a, before, s.s1);
    /* Blocks begin at multiples of their size, so that the bits of a query do not depend on its neighbours. */
    for (int64_t j0 = mp_first_key(a, before, s.s0) / a->block * a->block; j0 < last; j0 += a->block)
        mp_strip_block(a, &s, j0, mp_min(a->block, last - j0));
    for (int64_t c = 0; c < filled; ++c) {
        const int64_t row = (c0 + c) / a->group, h = g * a->group + (c0 + c) % a->group;
        const float scale_of = mp_finished_scale(a, h, s.top[c], s.total[c]);
        for (int64_t i = 0; i < a->value_dim; ++i)
            mp_put(&a->y, mp_place(&a->y, b, row, h, i), (double)(s.sums[i * columns + c] * scale_of));
    }
}

/* Strips of one head follow each other, so that its keys stay in the cache; later ones see more of them, so each
 * head distributes its strips beginning at another worker. */
MP_FN void mp_attention_many(mp_run *run, const int t, const int T, const mp_attention *a, float *room)
{
    const int64_t all = a->queries * a->group, strips = (all + a->columns - 1) / a->columns;
    const int64_t tasks = a->batches * a->kv_heads * strips;
    for (int64_t task = t; task < tasks && !mp_stopping(run); task += T) {
        const int64_t line = task / strips, c0 = (task + line) % strips * a->columns;
        mp_attention_strip(a, line / a->kv_heads, line % a->kv_heads, c0, mp_min(a->columns, all - c0), room);
    }
}

#if defined(MP_TILES) && MP_LANES == 16
#include "mp_attention_many_tiles.h"
#endif
#endif
