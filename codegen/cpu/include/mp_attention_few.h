/* Attention of few queries: each reads the cache key by key, for all heads of a group at once. Included by
 * mp_attention.h. */
#ifndef MP_ATTENTION_FEW_H
#define MP_ATTENTION_FEW_H

enum {
    MP_FEW_SUMS = 32,            /* vectors of sums, at most; they are registers after unrolling */
    MP_FEW_HEADS = MP_FEW_SUMS,  /* heads that run together, at most */
    MP_FEW_VALUES = 32,          /* rows of values that are copied at a time */
};

/* Floats of room for one task. `dim` and `value_dim` are multiples of the vector's length here. */
#define MP_FEW_ROOM(group, dim, value_dim, rows, chunk) \
    (((group) + (rows)) * (dim) + (group) * ((chunk) + MP_LANES + MP_LANES * MP_LANES) + MP_FEW_VALUES * (value_dim))

MP_FN int64_t mp_whole(const int64_t n) { return (n + MP_LANES - 1) / MP_LANES * MP_LANES; }

/* Whether rows are read as vectors of pairs, whose even elements come before the odd ones: see mp_split. */
MP_FN int mp_keys_in_pairs(const mp_attention *a)
{
    return a->pairs && mp_dense(&a->k) && a->k.type == MP_BF16 && a->dim % (2 * MP_LANES) == 0;
}
MP_FN int mp_values_in_pairs(const mp_attention *a)
{
    const int vectors = mp_dense(&a->v) && a->v.type == MP_BF16 && a->value_dim % MP_LANES == 0;
    return a->few_tiles || (a->pairs && vectors && a->wide % 2 == 0);
}

/* score[n][j] = query[n] · key from + j for N heads. */
MP_FN void mp_few_scores(const mp_attention *a, const int64_t b, const int64_t g, const int64_t from,
                         const int64_t count, const int N, const float *query, float *copies, mp_vec *part,
                         float *score)
{
    const int64_t line = mp_whole(a->dim), size = mp_size(a->k.type), stride = a->k.s2 * size;
    const int vectors = mp_dense(&a->k) && a->dim % MP_LANES == 0, pairs = mp_keys_in_pairs(a), rows = a->rows;
    const int loads = pairs ? 2 : 1; /* vectors that one step reads of a row */
    const int scaled = vectors && a->k.type == MP_I8;
    for (int64_t j = 0; j < count; j += MP_LANES) {
        float scales[MP_LANES];
        for (int64_t l = 0; l < MP_LANES; l += rows) {
            mp_vec acc[MP_FEW_SUMS];
            const void *row[8];
            MP_FULLY
            for (int n = 0; n < rows * N; ++n) acc[n] = mp_splat(0.0f);
            for (int r = 0; !vectors && r < rows; ++r)
                mp_copy_row(copies + r * line, &a->k, b, g, from + mp_min(j + l + r, count - 1), a->dim, line);
            MP_FULLY
            for (int r = 0; r < rows; ++r) {
                row[r] = vectors ? mp_row(&a->k, b, g, from + mp_min(j + l + r, count - 1)) : copies + r * line;
                if (scaled) scales[l + r] = mp_row_scale(&a->k, row[r], a->dim);
                if (!vectors || !a->prefetch_keys) continue;
                mp_prefetch_l1((const char *)row[r] + a->ahead * stride, a->dim * size);
                mp_prefetch_l2((const char *)row[r] + a->far * stride, a->dim * size);
            }
            MP_FOUR
            for (int64_t i = 0; i < line; i += loads * MP_LANES) {
                mp_vec wide[16];
                MP_FULLY
                for (int r = 0; r < rows; ++r) {
                    if (pairs) mp_vload2_bf16((const mp_bf16 *)row[r] + i, &wide[r], &wide[rows + r]);
                    else wide[r] = mp_vload(vectors ? a->k.type : MP_F32, row[r], i);
                }
                MP_FULLY
                for (int n = 0; n < loads * N; ++n) {
                    const mp_vec one = mp_vload_f32(query + n % N * line + i + n / N * MP_LANES);
                    MP_FULLY
                    for (int r = 0; r < rows; ++r) acc[r * N + n % N] += wide[n / N * rows + r] * one;
                }
            }
            MP_FULLY
            for (int n = 0; n < rows * N; ++n) part[n % N * MP_LANES + l + n / N] = acc[n];
        }
        for (int n = 0; n < N; ++n) {
            mp_vec sums = mp_sums(part + n * MP_LANES);
            if (scaled) sums *= mp_vload_f32(scales);
            mp_vstore(score + n * (a->chunk + MP_LANES) + j, sums);
        }
    }
}

/* The scores of one head become weights; gives the largest one and the total. */
MP_FN void mp_few_weights(const mp_attention *a, float *line, const int64_t b, const int64_t h, const int64_t s,
                          const int64_t from, const int64_t count, float *top, float *total)
{
    if (a->softcap > 0 || a->has_mask)
        for (int64_t j = 0; j < count; ++j) line[j] = mp_changed_score(a, line[j], b, h, s, from + j);
    for (int64_t j = count; j % MP_LANES; ++j) line[j] = -INFINITY;
    mp_vec high = mp_splat(-INFINITY), added = mp_splat(0.0f);
    for (int64_t j = 0; j < count; j += MP_LANES) high = mp_vmax(mp_vload_f32(line + j), high);
    *top = mp_vtop(high);
    const mp_vec base = mp_vbase(mp_splat(*top));
    for (int64_t j = 0; j < count; j += MP_LANES) {
        const mp_vec weight = mp_vexp2(mp_distance(a, mp_vload_f32(line + j) - base));
        mp_vstore(line + j, weight);
        added += weight;
    }
    *total = mp_vtotal(added);
}

/* sums[n] = the values of keys from + j, times weight[n][j], for N heads. */
MP_FN void mp_few_values(const mp_attention *a, const int64_t b, const int64_t g, const int64_t from,
                         const int64_t count, const int N, const float *weight, float *copies, float *sums)
{
    const int64_t line = mp_whole(a->value_dim), size = mp_size(a->v.type), stride = a->v.s2 * size;
    const int vectors = mp_dense(&a->v) && a->value_dim % MP_LANES == 0, wide = a->wide;
    const int pairs = mp_values_in_pairs(a), loads = pairs ? 2 : 1;
    for (int64_t i = 0; i < N * line; ++i) sums[i] = 0.0f;
    for (int64_t j0 = 0; j0 < count; j0 += MP_FEW_VALUES) {
        const int64_t j1 = mp_min(count, j0 + MP_FEW_VALUES);
        for (int64_t j = j0; !vectors && j < j1; ++j)
            mp_copy_row(copies + (j - j0) * line, &a->v, b, g, from + j, a->value_dim, line);
        for (int64_t i = 0; i < line; i += wide * MP_LANES) {
            mp_vec acc[MP_FEW_SUMS];
            MP_FULLY
            for (int n = 0; n < N * wide; ++n) acc[n] = mp_vload_f32(sums + n / wide * line + i + n % wide * MP_LANES);
            MP_TWICE
            for (int64_t j = j0; j < j1; ++j) {
                const char *row = (const char *)(copies + (j - j0) * line + i);
                float scale = 1.0f;
                if (vectors) {
                    row = (const char *)mp_row(&a->v, b, g, from + j);
                    scale = mp_row_scale(&a->v, row, a->value_dim);
                    row += i * size;
                    mp_prefetch_l1(row + a->ahead * stride, wide * MP_LANES * size);
                    mp_prefetch_l2(row + a->far * stride, wide * MP_LANES * size);
                }
                if (a->has_mask) { /* a key that all heads hide may hold anything */
                    float most = 0.0f;
                    for (int n = 0; n < N; ++n) most += weight[n * (a->chunk + MP_LANES) + j];
                    if (most == 0.0f) continue;
                }
                mp_vec values[MP_FEW_SUMS];
                MP_FULLY
                for (int d = 0; d < wide; d += loads) {
                    if (pairs) mp_vload2_bf16((const mp_bf16 *)row + d * MP_LANES, &values[d], &values[d + 1]);
                    else values[d] = mp_vload(vectors ? a->v.type : MP_F32, row, d * MP_LANES);
                }
                MP_FULLY
                for (int n = 0; n < N; ++n) {
                    const float part = weight[n * (a->chunk + MP_LANES) + j];
                    const mp_vec one = mp_splat(a->v.type == MP_I8 ? part * scale : part);
                    MP_FULLY
                    for (int d = 0; d < wide; ++d) acc[n * wide + d] += one * values[d];
                }
            }
            MP_FULLY
            for (int n = 0; n < N * wide; ++n) mp_vstore(sums + n / wide * line + i + n % wide * MP_LANES, acc[n]);
        }
    }
}

#include "mp_attention_bytes.h"

/* Keys [from, to) for one query and N heads of its group, from head n0 on: every row of keys and values is read once
 * for all of them. Leaves the weighted sums of values, the largest score and the total of the weights of each head. */
MP_FN void mp_few_heads(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s, const int64_t from,
                        const int64_t to, const int n0, const int N, float *room, float *sums, float *top, float *total)
{
#if defined(MP_BYTE_DOTS)
    if (mp_few_bytes(a)) {
        mp_few_byte_heads(a, b, g, s, from, to, n0, N, room, sums, top, total);
        return;
    }
#endif
    const int64_t line = mp_whole(a->dim), scores = a->chunk + MP_LANES, count = to - from;
    float *const query = room, *const copies = query + N * line, *const score = copies + a->rows * line;
    float *const part = score + N * scores, *const values = part + N * MP_LANES * MP_LANES;
    const float scale = mp_score_scale(a);
    for (int64_t n = 0; n < N; ++n) {
        for (int64_t i = 0; i < a->dim; ++i)
            query[n * line + (mp_keys_in_pairs(a) ? mp_split(i) : i)] = mp_query(a, b, s, g * a->group + n0 + n, i) * scale;
        for (int64_t i = a->dim; i < line; ++i) query[n * line + i] = 0.0f;
    }
    mp_few_scores(a, b, g, from, count, N, query, copies, (mp_vec *)part, score);
    for (int64_t n = 0; n < N; ++n)
        mp_few_weights(a, score + n * scores, b, g * a->group + n0 + n, s, from, count, top + n0 + n, total + n0 + n);
    mp_few_values(a, b, g, from, count, N, score, values, sums + n0 * mp_whole(a->value_dim));
}

#if defined(MP_TILES) && MP_LANES == 16
#include "mp_attention_few_tiles.h"
#endif

/* Keys [from, to) for one query and all heads of its group; keys of `line1` from `key1` on are read next. */
MP_FN void mp_few_task(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s, const int64_t from,
                       const int64_t to, const int64_t line1 MP_UNUSED, const int64_t key1 MP_UNUSED, float *room,
                       float *sums, float *top, float *total)
{
#if defined(MP_TILES) && MP_LANES == 16
    if (a->few_tiles) {
        const void *const next = mp_row(&a->k, line1 / a->kv_heads / a->queries, line1 % a->kv_heads, key1);
        mp_few_tiles(a, b, g, s, from, to, (const mp_bf16 *)next, sums, top, total);
        return;
    }
#endif
    const int most = a->group < MP_FEW_HEADS ? a->group : MP_FEW_HEADS; /* heads of the last turn may run once more */
    for (int n = 0; n < a->group; n += most)
        mp_few_heads(a, b, g, s, from, to, (int)mp_min(n, a->group - most), most, room, sums, top, total);
}

/* Keys of one task when queries are few: more in long contexts, since every task begins anew, but always a dozen
 * tasks or more. It depends on nothing but the number of keys that the query sees, and so do its bits. */
MP_FN int64_t mp_chunk(const mp_attention *a, const int64_t last)
{
    const int64_t keys = a->window ? mp_min(last, a->window) : last;
    int64_t chunk = a->least;
    while (chunk < a->chunk && a->kv_heads * keys >= 24 * chunk) chunk *= 2;
    return chunk;
}

/* Joins the chunks of one query and group in their order. */
MP_FN void mp_few_join(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s, const float *partial,
                       const int64_t chunks, float *sums)
{
    const int64_t line = mp_whole(a->value_dim), left = a->group * (line + 2);
    for (int64_t n = 0; n < a->group; ++n) {
        const float *const tops = partial + a->group * line + n, *const totals = tops + a->group;
        float high = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < line; ++i) sums[i] = 0.0f;
        for (int64_t c = 0; c < chunks; ++c) high = tops[c * left] > high ? tops[c * left] : high;
        const float base = high == -INFINITY ? 0.0f : high;
        for (int64_t c = 0; c < chunks; ++c) {
            if (totals[c * left] == 0.0f) continue; /* no key of this chunk is seen: its sums are not there */
            const float weight = mp_vfirst(mp_vexp2(mp_distance(a, mp_splat(tops[c * left] - base))));
            total += weight * totals[c * left];
            MP_SIMD
            for (int64_t i = 0; i < line; ++i) sums[i] += weight * partial[c * left + n * line + i];
        }
        const float scale = mp_finished_scale(a, g * a->group + n, high, total);
        float *const made = sums + line;
        for (int64_t i = 0; i < a->value_dim; ++i) made[i] = sums[mp_values_in_pairs(a) ? mp_split(i) : i] * scale;
        mp_store_row(a, b, s, g * a->group + n, made);
    }
}

/* Each worker has its share of the tasks, one after the other as they lie in memory; one that has done them steals
 * from others. */
MP_FN void mp_attention_few(mp_run *run, const int t, const int T, const mp_attention *a, float *room)
{
    const int64_t line_size = mp_whole(a->value_dim), left = a->group * (line_size + 2);
    const int64_t lines = a->batches * a->queries * a->kv_heads;
    int64_t chunks = 1; /* the same for every worker: all of them wait below, or none */
    for (int64_t row = 0; row < a->batches * a->queries; ++row) {
        const int64_t before = mp_before(a, row / a->queries), last = mp_last_key(a, before, row % a->queries);
        const int64_t chunk = mp_chunk(a, last), skipped = mp_first_key(a, before, row % a->queries) / chunk;
        chunks = mp_max(chunks, (last + chunk - 1) / chunk - skipped);
    }
    const int parts = mp_parts(T, T), visits = chunks > 1 ? parts : 1;
    for (int part = t % parts, others = 0; others < visits; part = (t + ++others) % parts) {
        const int64_t first = mp_share(lines * chunks, part, parts), end = mp_share(lines * chunks, part + 1, parts);
        for (int64_t task; (task = first + mp_piece(run, part)) < end;) {
            const int64_t line = task / chunks, g = line % a->kv_heads, s = line / a->kv_heads % a->queries;
            const int64_t b = line / a->kv_heads / a->queries, before = mp_before(a, b), last = mp_last_key(a, before, s);
            const int64_t chunk = mp_chunk(a, last), first_key = mp_first_key(a, before, s);
            const int64_t begin = (first_key / chunk + task % chunks) * chunk;
            const int64_t from = mp_max(begin, first_key), to = mp_min(begin + chunk, last);
            float *const sums = a->partial + task * left;
            float *const top = sums + a->group * line_size, *const total = top + a->group;
            for (int n = 0; n < a->group; ++n) {
                top[n] = -INFINITY;
                total[n] = 0.0f;
            }
            const int64_t key1 = to < last ? to : 0, line1 = key1 > 0 ? line : (line + 1) % lines;
            if (from < to) mp_few_task(a, b, g, s, from, to, line1, key1, room, sums, top, total);
        }
    }
#if defined(MP_TILES)
    if (a->few_tiles) mp_tiles_end();
#endif
    if (chunks > 1 || T > parts) mp_barrier(run, T); /* else each worker finishes what it began */
    const int64_t stop = mp_share(lines, t + 1, T);
    for (int64_t line = mp_share(lines, t, T); line < stop; ++line)
        mp_few_join(a, line / a->kv_heads / a->queries, line % a->kv_heads, line / a->kv_heads % a->queries,
                    a->partial + line * chunks * left, chunks, room);
}
#endif
