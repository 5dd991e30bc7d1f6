/* Attention of few queries on bf16 tile units, which read the cache as it lies. Included by mp_attention_few.h. */
#ifndef MP_ATTENTION_FEW_TILES_H
#define MP_ATTENTION_FEW_TILES_H

#include "mp_attention_tiles.h"

enum { MP_FEW_TILES_DIM = 128, MP_FEW_TILES_GROUP = 8, MP_FEW_TILES_CHUNK = 1024 }; /* the most that there may be */

/* Where 32 rows lie, and where those that are prefetched for later blocks. Part n of `parts` of the prefetches
 * stands between two tile instructions: all in one place, they hold up the loads. */
typedef struct {
    const mp_bf16 *rows, *soon, *later;
    int64_t step, stride, bytes; /* from row to row: of `rows`, and of the others; bytes of a row */
} mp_tile_rows;

MP_FN void mp_prefetch_part(const mp_tile_rows *x, const int n, const int parts)
{
    const int64_t end = 32 * (n + 1) / parts;
    MP_FULLY
    for (int64_t r = 32 * n / parts; r < end; ++r) {
        mp_prefetch_l1(x->soon + r * x->stride, x->bytes);
        mp_prefetch_l2(x->later + r * x->stride, x->bytes);
    }
}

/* Rows j to j + 32 of `count`, with zeros behind the last. Behind their end the rows of `after` are read,
 * `after_stride` apart. */
MP_FN mp_tile_rows mp_rows_at(const mp_attention *a, const mp_bf16 *from, const int64_t stride, const int64_t dim,
                              const int64_t j, const int64_t count, const mp_bf16 *after, const int64_t after_stride,
                              mp_bf16 *last)
{
    const int64_t blocks = (count + 31) / 32 * 32;
    const mp_bf16 *const rows = from + j * stride;
    mp_tile_rows x = {rows, rows + a->ahead * stride, rows + a->far * stride, stride, stride, dim * 2};
    if (j + a->ahead >= count) x.soon = after + (j + a->ahead - blocks) * after_stride;
    if (j + a->far >= count) x.later = after + (j + a->far - blocks) * after_stride;
    if (j + 32 > count) {
        x.rows = mp_rest(last, rows, stride, count - j, dim);
        x.step = dim;
    }
    return x;
}

/* The numbers of tiles are parts of instructions: steps are written out by macros, and those that are not there are
 * left out. */
#define MP_FEW_KEYS(i) \
    if (i < dims) { \
        mp_tile_load_close(6, x.rows + 32 * i, x.step * 2); \
        mp_prefetch_part(&x, 4 * i, 4 * dims); \
        mp_tile_load_close(7, x.rows + 16 * x.step + 32 * i, x.step * 2); \
        mp_prefetch_part(&x, 4 * i + 1, 4 * dims); \
        mp_tile_dot_close(4, 6, i); \
        mp_prefetch_part(&x, 4 * i + 2, 4 * dims); \
        mp_tile_dot_close(5, 7, i); \
        mp_prefetch_part(&x, 4 * i + 3, 4 * dims); \
    }
#define MP_FEW_VALUES_STEP(half, i, weights, tile) \
    if (i < values) { \
        mp_tile_load_close(tile, x.rows + 16 * half * x.step + 32 * i, x.step * 2); \
        mp_prefetch_part(&x, 2 * (half * values + i), 4 * values); \
        mp_tile_dot_close(i, weights, tile); \
        mp_prefetch_part(&x, 2 * (half * values + i) + 1, 4 * values); \
    }

/* The queries of a group in bf16 as [dim / 32][16 pairs][heads]. */
MP_FN void mp_few_tile_queries(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s,
                               uint32_t *query)
{
    float line[MP_FEW_TILES_DIM];
    mp_bf16 pairs[MP_FEW_TILES_DIM];
    memset(query, 0, (size_t)(a->dim / 2 * a->few_heads) * sizeof *query);
    for (int64_t n = 0; n < a->group; ++n) {
        for (int64_t i = 0; i < a->dim; ++i) line[i] = mp_query(a, b, s, g * a->group + n, i);
        for (int64_t i = 0; i < a->dim; i += 32) mp_tile_round(pairs + i, line + i, 32);
        for (int64_t i = 0; i < a->dim / 2; ++i) memcpy(query + i * a->few_heads + n, pairs + 2 * i, sizeof(uint32_t));
    }
}

/* Scores of 16 keys, [key][heads], become weights: rows of [even: group][16], then [odd: group][16], two keys in a
 * word. */
MP_FN mp_vec mp_few_tile_weights(const mp_attention *a, const float *score, const mp_vec scale, const mp_vec base,
                                 uint32_t *weight, mp_vec added)
{
    mp_vec_u32 words[MP_FEW_TILES_GROUP];
    MP_FULLY
    for (int i = 0; i < a->few_heads; ++i) {
        const mp_vec one = mp_vexp2_short(mp_vload_f32(score + i * MP_LANES) * scale - base);
        added += one;
        words[i] = (mp_vec_u32)one + 0x8000u;
    }
    mp_turn(words, a->few_heads);
    MP_FULLY
    for (int n = 0; n < a->group; ++n) {
        *(mp_vec_u32 *)(weight + n * 16) = words[n] >> 16;
        *(mp_vec_u32 *)(weight + (a->group + n) * 16) = words[n] & 0xffff0000u;
    }
    return added;
}

/* Keys [from, to) for one query and all heads of its group. Rows of keys meet the queries in bf16, which gives
 * scores as [key][head]. Values are rows of pairs: one row of weights takes their even elements and another one
 * their odd ones, so a value that is not finite spoils the one beside it as well. Memory is prefetched in the order
 * in which it is read, values after keys, and `next` after the values. Leaves the weighted sums of values, even
 * elements first (see mp_split), the largest score and the total of the weights of each head. */
MP_FN void mp_few_tiles(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s, const int64_t from,
                        const int64_t to, const mp_bf16 *next, float *sums, float *top, float *total)
{
    const int heads = a->few_heads, group = a->group, dims = a->dim / 32, values = a->value_dim / 32;
    _Alignas(64) float score[MP_FEW_TILES_CHUNK * MP_FEW_TILES_GROUP];
    _Alignas(64) float found[MP_FEW_TILES_DIM * MP_FEW_TILES_GROUP];
    _Alignas(64) uint32_t query[MP_FEW_TILES_DIM / 2 * MP_FEW_TILES_GROUP];
    _Alignas(64) uint32_t weight[2][2][2 * MP_FEW_TILES_GROUP * 16];
    _Alignas(64) mp_bf16 last[32 * MP_FEW_TILES_DIM];
    const int64_t count = to - from, blocks = (count + 31) / 32 * 32, k_row = a->k.s2, v_row = a->v.s2;
    const mp_bf16 *const k0 = (const mp_bf16 *)mp_row(&a->k, b, g, from);
    const mp_bf16 *const v0 = (const mp_bf16 *)mp_row(&a->v, b, g, from);
    mp_few_tile_queries(a, b, g, s, query);
    mp_tiles_shape(16, heads * 4);
    mp_tile_fence();
    mp_tile_load(0, query, heads * 4);
    if (dims > 1) mp_tile_load(1, query + 16 * heads, heads * 4);
    if (dims > 2) mp_tile_load(2, query + 32 * heads, heads * 4);
    if (dims > 3) mp_tile_load(3, query + 48 * heads, heads * 4);
    mp_vec high = mp_splat(-INFINITY), added = mp_splat(0.0f);
    for (int64_t j = 0; j < count; j += 32) {
        const mp_tile_rows x = mp_rows_at(a, k0, k_row, a->dim, j, count, v0, v_row, last);
        mp_tile_fence();
        mp_tile_zero(4);
        mp_tile_zero(5);
        MP_FEW_KEYS(0)
        MP_FEW_KEYS(1)
        MP_FEW_KEYS(2)
        MP_FEW_KEYS(3)
        mp_tile_store(4, score + j * heads, heads * 4);
        mp_tile_store(5, score + (j + 16) * heads, heads * 4);
        mp_tile_fence();
        if (j > 0) /* those of the block before: nobody waits for the store */
            for (int64_t i = (j - 32) * heads; i < j * heads; i += MP_LANES) high = mp_vmax(mp_vload_f32(score + i), high);
    }
    for (int64_t i = count * heads; i < blocks * heads; ++i) score[i] = -INFINITY;
    for (int64_t i = (blocks - 32) * heads; i < blocks * heads; i += MP_LANES) high = mp_vmax(mp_vload_f32(score + i), high);
    high = mp_heads_top(high, heads);
    const mp_vec scale = mp_splat(mp_score_scale(a)), base = mp_vbase(high * scale);
    mp_tiles_shape(2 * group, 64);
    /* Weights of 32 keys, and meanwhile the values of the 32 before. */
    for (int64_t j = 0; j < blocks + 32; j += 32) {
        for (int half = 0; half < 2 && j < blocks; ++half)
            added = mp_few_tile_weights(a, score + (j + half * 16) * heads, scale, base, weight[j / 32 % 2][half], added);
        const int64_t before = j - 32;
        if (before < 0) continue;
        const mp_tile_rows x = mp_rows_at(a, v0, v_row, a->value_dim, before, count, next, k_row, last);
        mp_tile_fence();
        mp_tile_load(4, weight[before / 32 % 2][0], 64);
        mp_tile_load(5, weight[before / 32 % 2][1], 64);
        MP_FEW_VALUES_STEP(0, 0, 4, 6)
        MP_FEW_VALUES_STEP(0, 1, 4, 7)
        MP_FEW_VALUES_STEP(0, 2, 4, 6)
        MP_FEW_VALUES_STEP(0, 3, 4, 7)
        MP_FEW_VALUES_STEP(1, 0, 5, 6)
        MP_FEW_VALUES_STEP(1, 1, 5, 7)
        MP_FEW_VALUES_STEP(1, 2, 5, 6)
        MP_FEW_VALUES_STEP(1, 3, 5, 7)
        mp_tile_fence();
    }
    mp_tile_fence();
    mp_tile_store(0, found, 64);
    if (values > 1) mp_tile_store(1, found + 32 * group, 64);
    if (values > 2) mp_tile_store(2, found + 64 * group, 64);
    if (values > 3) mp_tile_store(3, found + 96 * group, 64);
    mp_tile_fence();
    added = mp_heads_sum(added, heads);
    for (int n = 0; n < group; ++n) {
        top[n] = high[n] * mp_score_scale(a);
        total[n] = added[n];
        for (int i = 0; i < a->value_dim; i += 16)
            memcpy(sums + n * a->value_dim + i, found + (i / 32 * 2 * group + i / 16 % 2 * group + n) * 16, 16 * sizeof *sums);
    }
}
#endif
