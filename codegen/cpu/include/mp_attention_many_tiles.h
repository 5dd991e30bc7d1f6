/* Attention of many queries on bf16 tile units. Included by mp_attention_many.h.
 *
 * Queries, keys, weights and values are bf16, or, where the cache has more bits, sums of two of them: the product of the
 * lower parts is left out, 1 / 65536 of the whole. */
#ifndef MP_ATTENTION_MANY_TILES_H
#define MP_ATTENTION_MANY_TILES_H

#include "mp_attention_tiles.h"

/* Floats of room for a worker; for 32 keys while they are packed, and for its strips. */
#define MP_STRIP_TILES_ROOM(dim, value_dim, block, parts) \
    ((parts) * 16 * (dim) + 64 * (block) + 33 * (value_dim) + (dim) / 2)

/* Words that a key and a value have as tiles. */
MP_FN int64_t mp_key_words(const mp_attention *a) { return (int64_t)a->parts * a->dim / 2; }
MP_FN int64_t mp_value_words(const mp_attention *a) { return (int64_t)a->parts * a->value_dim / 2; }

/* 32 floats as two parts that add up to them but for 1 / 65536. An infinite number leaves nothing for the second. */
MP_FN void mp_two_parts(mp_bf16 *first, mp_bf16 *second, const float *from)
{
    float rest[32];
    mp_tile_round(first, from, 32);
    for (int i = 0; i < 32; i += MP_LANES) {
        const mp_vec x = mp_vload_f32(from + i), left = x - mp_vload_bf16(first + i);
        mp_vstore(rest + i, mp_vchoose(MP_BITS(left - left == mp_splat(0.0f)), left, mp_splat(0.0f)));
    }
    mp_tile_round(second, rest, 32);
}

/* A row of a cache with more bits, in two parts `apart` elements from each other. */
MP_FN void mp_row_parts(mp_bf16 *to, const int64_t apart, const mp_view *v, const int64_t b, const int64_t g, const int64_t key,
                        const int64_t dim, float *line)
{
    mp_copy_row(line, v, b, g, key, dim, dim);
    for (int64_t i = 0; i < dim; i += 32) mp_two_parts(to + i, to + apart + i, line + i);
}

/* Keys [j0, j0 + 32) of a group for the tile units: keys as [part][dim / 32][16 pairs of dims][key][2], values as
 * [part][dim / 32][16 pairs of keys][dim][2]. Keys that are not written are 0. */
MP_FN void mp_pack_keys(const mp_attention *a, const int64_t b, const int64_t g, const int64_t j0, const int64_t before,
                        const int64_t written, uint32_t *k_tiles, uint32_t *v_tiles, float *room)
{
    const int longer = a->dim > a->value_dim ? a->dim : a->value_dim, k_vectors = mp_dense(&a->k), v_vectors = mp_dense(&a->v);
    float *const line = room;
    mp_bf16 *const none = (mp_bf16 *)(room + longer), *const nan = none + longer, *const dense_keys = nan + a->dim;
    mp_bf16 *const dense_values = dense_keys + a->parts * 32 * a->dim;
    const mp_bf16 *rows[2][32], *values[2][32];
    for (int64_t i = 0; i < longer; ++i) none[i] = 0;
    for (int64_t i = 0; (a->causal || a->has_mask) && i < a->dim; ++i) nan[i] = 0x7fc0;
    for (int64_t j = 0; j < 32; ++j) {
        const int64_t key = j0 + j;
        for (int p = 0; p < 2; ++p) rows[p][j] = values[p][j] = none;
        if (key >= written) continue;
        for (int p = 0; p < a->parts; ++p) {
            rows[p][j] = dense_keys + (p * 32 + j) * a->dim;
            values[p][j] = dense_values + (p * 32 + j) * a->value_dim;
        }
        if (a->parts > 1) {
            mp_row_parts(dense_keys + j * a->dim, 32 * a->dim, &a->k, b, g, key, a->dim, line);
            mp_row_parts(dense_values + j * a->value_dim, 32 * a->value_dim, &a->v, b, g, key, a->value_dim, line);
        } else {
            if (k_vectors) rows[0][j] = (const mp_bf16 *)mp_row(&a->k, b, g, key);
            if (v_vectors) values[0][j] = (const mp_bf16 *)mp_row(&a->v, b, g, key);
            for (int64_t i = 0; !k_vectors && i < a->dim; ++i)
                dense_keys[j * a->dim + i] = ((const mp_bf16 *)a->k.data)[mp_place(&a->k, b, g, key, i)];
            for (int64_t i = 0; !v_vectors && i < a->value_dim; ++i)
                dense_values[j * a->value_dim + i] = ((const mp_bf16 *)a->v.data)[mp_place(&a->v, b, g, key, i)];
        }
        /* Some query does not see a key after `before`, nor, with a window or a mask, any other: its values must be
         * finite, since 0 * NaN is NaN. Those who see it still get NaN, from the key. */
        const int hidden = (a->causal && (a->window || key > before)) || a->has_mask;
        if (hidden && !mp_finite_bf16(values[0][j], a->value_dim)) {
            rows[0][j] = nan;
            rows[1][j] = values[0][j] = values[1][j] = none;
        }
    }
    for (int p = 0; p < a->parts; ++p, k_tiles += 16 * a->dim, v_tiles += 16 * a->value_dim) {
        for (int64_t i = 0; i < a->dim; i += 32)
            for (int64_t j = 0; j < 32; j += 16) mp_turn_pairs(k_tiles + i * 16 + j, 32, rows[p] + j, i);
        for (int64_t i = 0; i < a->value_dim; i += 32)
            for (int64_t j = 0; j < 16; ++j)
                mp_pair_rows(v_tiles + i * 16 + j * 32, values[p][2 * j] + i, values[p][2 * j + 1] + i);
    }
}

/* What the tile units do for a strip of 32 rows, in turns, so that it can run between the vector instructions of
 * softmax: first the sums of the block before, then the scores of the next one, which take the place of that block's
 * weights. */
typedef struct {
    const mp_bf16 *query;     /* [part][dim / 32][32 rows][32] */
    const uint32_t *k_tiles;  /* of the block whose scores are wanted */
    /* [32 rows][block]: first weights in bf16, at the beginning of each row (two parts: of 32 keys where their scores
     * were), then scores */
    float *score;
    int64_t groups;           /* of 32 keys in the next block; 0: there is none */
    const uint32_t *v_tiles;
    float *sums;              /* [32 rows][value_dim] */
    int64_t weighed;          /* groups of the block whose values are added */
    int add;                  /* 0: there are no sums yet */
} mp_strip_work;

MP_FN int64_t mp_sum_turns(const mp_attention *a) { return a->block / 32 * (a->value_dim / 32); }
MP_FN int64_t mp_all_turns(const mp_attention *a) { return mp_sum_turns(a) + a->block / 32 * (a->dim / 32); }

MP_FN void mp_strip_turn(const mp_attention *a, const mp_strip_work *w, const int64_t turn)
{
    const int64_t groups = a->block / 32, first = mp_sum_turns(a), dims = a->dim / 32;
    const int last = a->parts > 1 ? 2 : 0; /* products: first by first, then first by second and second by first */
    if (turn < first) {
        const int64_t i = turn / groups, n = turn % groups;
        const mp_bf16 *const weights = (const mp_bf16 *)w->score + n * 32 * a->parts;
        const uint32_t *const values = w->v_tiles + n * 32 * mp_value_words(a) + i * 512;
        for (int p = 0; n < w->weighed && p <= last; ++p)
            mp_tiles_step(weights + p / 2 * 32, 2 * a->block, values + p % 2 * 16 * a->value_dim, w->sums + i * 32, a->value_dim,
                          n == 0 && p == 0, w->add, n == w->weighed - 1 && p == last);
    } else {
        const int64_t n = (turn - first) / dims, i = (turn - first) % dims;
        const uint32_t *const keys = w->k_tiles + n * 32 * mp_key_words(a) + i * 512;
        for (int p = 0; n < w->groups && p <= last; ++p)
            mp_tiles_step(w->query + p / 2 * 32 * a->dim + i * 1024, 32, keys + p % 2 * 16 * a->dim, w->score + n * 32, a->block,
                          i == 0 && p == 0, 0, i == dims - 1 && p == last);
    }
}

/* Scores of 32 rows become weights in bf16, which take their place: moves the maximum of each row, and says how much
 * of the earlier sums to keep. Meanwhile the tile units have other work. */
MP_FN void mp_weigh_rows(const mp_attention *a, float *score, float *top, mp_vec *total, float *keep,
                         const int64_t groups, const mp_strip_work *work)
{
    const int64_t turns = mp_all_turns(a);
    const mp_vec scale = mp_splat(mp_score_scale(a));
    float bases[32];
    for (int64_t r0 = 0; r0 < 32; r0 += MP_LANES) {
        mp_vec part[MP_LANES];
        for (int64_t r = 0; r < MP_LANES; ++r) {
            const float *line = score + (r0 + r) * a->block;
            mp_vec high = mp_vmax(mp_vload_f32(line), mp_vload_f32(line + MP_LANES));
            for (int64_t j = 2 * MP_LANES; j < groups * 32; j += 2 * MP_LANES)
                high = mp_vmax(mp_vmax(mp_vload_f32(line + j), mp_vload_f32(line + j + MP_LANES)), high);
            part[r] = high;
        }
        const mp_vec old = mp_vload_f32(top + r0), high = mp_vmax(mp_tops(part) * scale, old), base = mp_vbase(high);
        mp_vstore(top + r0, high);
        mp_vstore(bases + r0, base);
        mp_vstore(keep + r0, mp_vexp2(old - base));
    }
    for (int64_t r = 0; r < 32; ++r) {
        float *const line = score + r * a->block;
        const mp_vec base = mp_splat(bases[r]);
        mp_vec sum = total[r] * keep[r];
        for (int64_t turn = r * turns / 32; turn < (r + 1) * turns / 32; ++turn) mp_strip_turn(a, work, turn);
        for (int64_t n = 0; n < groups; ++n) {
            const mp_vec x = mp_vload_f32(line + n * 32) * scale - base, y = mp_vload_f32(line + n * 32 + 16) * scale - base;
            const mp_vec left = a->parts > 1 ? mp_vexp2(x) : mp_vexp2_short(x);
            const mp_vec right = a->parts > 1 ? mp_vexp2(y) : mp_vexp2_short(y);
            sum += left + right;
            if (a->parts > 1) mp_weights_parts((uint32_t *)line + n * 32, left, right);
            else mp_weights_bf16((uint32_t *)line + n * 16, left, right); /* over scores that are read already */
        }
        total[r] = sum;
    }
}

/* A strip: 32 rows of a group, row = query * group + head, and the keys that some of them see. */
typedef struct {
    int64_t b, g, c0, filled, before, first, last;
    const uint32_t *k_tiles, *v_tiles; /* of the group, from key 0 on */
} mp_strip_rows;

/* The sums of a strip, times `scale`, become rows of y. A strip that sees no key gives zeros: `step` 0 reads one row
 * for all. */
MP_FN void mp_strip_finish(const mp_attention *a, const mp_strip_rows *s, float *sums, const int64_t step,
                           const float *scale)
{
    const int64_t s0 = s->c0 / a->group;
    const uint32_t over = (uint32_t)(s->c0 % a->group); /* columns are counted from s0: small numbers are quick to divide */
    for (int64_t r = 0; r < s->filled; ++r) {
        const uint32_t column = over + (uint32_t)r;
        float *const row = sums + r * step;
        for (int64_t i = 0; i < a->value_dim; ++i) row[i] *= scale[r];
        mp_store_row(a, s->b, s0 + column / (uint32_t)a->group, s->g * a->group + column % (uint32_t)a->group, row);
    }
}

/* Where a worker takes its strips. Blocks of 32 queries belong to workers as the rows of products do: what they make
 * lies in their own caches. One that has done its strips steals from others. */
typedef struct {
    int own, parts, visited;
    int64_t keys; /* room for so many in the tiles of a group */
} mp_strip_source;

/* 32 elements of query s of head h, from i0 on, in bf16; of two parts the second one 32 * dim elements behind. */
MP_FN void mp_query_tile(const mp_attention *a, mp_bf16 *to, const int64_t b, const int64_t s, const int64_t h,
                         const int64_t i0)
{
    if (a->parts > 1) {
        float values[32];
        MP_SIMD
        for (int j = 0; j < 32; ++j) values[j] = mp_query(a, b, s, h, i0 + j);
        mp_two_parts(to, to + 32 * a->dim, values);
        return;
    }
    const mp_bf16 *const rounded = (const mp_bf16 *)a->q.data;
    if (a->q_tiles) {
        const int64_t place = b * a->queries + s, columns = (int64_t)a->kv_heads * a->group * a->dim;
        memcpy(to, rounded + mp_place_in_tiles(place / 32 * 32, place % 32, h * a->dim + i0, columns), 32 * sizeof *to);
    } else if (mp_dense(&a->q) && a->q.type == MP_BF16) {
        memcpy(to, rounded + mp_place(&a->q, b, s, h, i0), 32 * sizeof *to);
    } else if (mp_dense(&a->q)) {
        mp_tile_round(to, (const float *)a->q.data + mp_place(&a->q, b, s, h, i0), 32);
    } else {
        float values[32];
        MP_SIMD
        for (int j = 0; j < 32; ++j) values[j] = mp_query(a, b, s, h, i0 + j);
        mp_tile_round(to, values, 32);
    }
}

/* The next strip, and its queries in bf16 tiles; 0 when there is none left. */
MP_FN int mp_take_strip(mp_run *run, const mp_attention *a, mp_strip_source *from, mp_strip_rows *s, mp_bf16 *query,
                        float *zeros)
{
    const int64_t blocks = (a->queries + 31) / 32;
    for (; from->visited < from->parts; ++from->visited) {
        const int part = (from->own + from->visited) % from->parts;
        /* `group` strips are a block of queries. */
        const int64_t strips = mp_block_count(a->batches * blocks, part, from->parts) * a->group;
        for (int64_t piece = mp_piece(run, part); piece < a->kv_heads * strips; piece = mp_piece(run, part)) {
            const int64_t g = piece / strips, block = mp_block_of(piece % strips / a->group, part, from->parts);
            const int64_t b = block / blocks, c0 = (block % blocks * a->group + piece % a->group) * 32;
            const int64_t filled = mp_min(32, a->queries * a->group - c0);
            if (filled <= 0) continue;
            const int64_t before = mp_before(a, b), s0 = c0 / a->group, line = (b * a->kv_heads + g) * from->keys;
            /* Blocks of keys begin at multiples of their size, so that the bits of a query do not depend on its
             * neighbours. */
            *s = (mp_strip_rows){b, g, c0, filled, before, mp_first_key(a, before, s0) / a->block * a->block,
                                 mp_last_key(a, before, (c0 + filled - 1) / a->group), a->k_tiles + line * mp_key_words(a),
                                 a->v_tiles + line * mp_value_words(a)};
            if (s->first >= s->last) {
                const float none[32] = {0};
                memset(zeros, 0, (size_t)a->value_dim * sizeof *zeros);
                mp_strip_finish(a, s, zeros, 0, none);
                continue;
            }
            const uint32_t over = (uint32_t)(c0 % a->group);
            for (int64_t r = 0; r < 32; ++r) {
                const uint32_t column = over + (uint32_t)mp_min(r, filled - 1);
                MP_FULLY
                for (int64_t i0 = 0; i0 < a->dim; i0 += 32)
                    mp_query_tile(a, query + i0 * 32 + r * 32, b, s0 + column / (uint32_t)a->group,
                                  g * a->group + column % (uint32_t)a->group, i0);
            }
            return 1;
        }
    }
    return 0;
}

/* Scores of the block at key j0 become -inf where a row does not see a key, or there is none. */
MP_FN void mp_hide(const mp_attention *a, const mp_strip_rows *s, const int64_t j0, const int64_t width, float *score)
{
    const uint32_t over = (uint32_t)(s->c0 % a->group);
    const int64_t at0 = s->before + s->c0 / a->group - j0; /* the first row's own key */
    const int64_t seen = a->causal ? mp_max(0, mp_min(width, at0 + 1)) : width; /* by all rows */
    for (int64_t r = 0; r < 32; ++r) {
        const int64_t at = at0 + (over + (uint32_t)mp_min(r, s->filled - 1)) / (uint32_t)a->group;
        const mp_vec end = mp_splat((float)(a->causal ? mp_min(width, at + 1) : width));
        for (int64_t j = a->window ? 0 : seen / MP_LANES * MP_LANES; j < (width + 31) / 32 * 32; j += MP_LANES) {
            const mp_vec place = mp_vramp((float)j), dot = mp_vload_f32(score + r * a->block + j);
            mp_vec_u32 hidden = MP_BITS(place >= end);
            if (a->window) hidden |= MP_BITS(place <= mp_splat((float)(at - a->window)));
            mp_vstore(score + r * a->block + j, mp_vchoose(hidden, mp_splat(-INFINITY), dot));
        }
    }
}

/* The same where a mask of booleans hides a key from a row. */
MP_FN void mp_hide_masked(const mp_attention *a, const mp_strip_rows *s, const int64_t j0, const int64_t width, float *score)
{
    const uint8_t *const shown = (const uint8_t *)a->mask.data;
    const int dense = a->mask.s3 == 1, equal = a->mask.s1 == 0 && a->mask.s2 == 0; /* rows of heads and queries */
    for (int64_t r = 0; r < s->filled; ++r) {
        const int64_t column = s->c0 + r, head = s->g * a->group + column % a->group;
        const int64_t place = mp_place(&a->mask, s->b, head, column / a->group, j0);
        if (dense && !memchr(shown + place, 0, (size_t)width)) {
            if (equal) return;
            continue;
        }
        float *const line = score + r * a->block;
        for (int64_t j = 0; j < width; ++j)
            if (!shown[place + j * a->mask.s3]) line[j] = -INFINITY;
    }
}

/* All strips of a worker, one after the other, each against blocks of keys. The tile units are always ahead by one
 * block, across strips too: beside the softmax of one they add up the values of the block before and make the scores
 * of the next. */
MP_FN void mp_strips_on_tiles(mp_run *run, const mp_attention *a, mp_strip_source from, float *room)
{
    const int64_t turns = mp_all_turns(a), first = mp_sum_turns(a), block = a->block;
    mp_bf16 *const query = (mp_bf16 *)room;
    float *const scores = room + a->parts * 16 * a->dim, *const sums = scores + 64 * block, *const zeros = sums + 32 * a->value_dim;
    _Alignas(64) float top[32], keep[32], scale[32];
    mp_vec total[32];
    mp_strip_rows s, next, done = {0};
    int more = mp_take_strip(run, a, &from, &s, query, zeros), now = 0;
    if (!more) return;
    const int64_t groups = (mp_min(block, s.last - s.first) + 31) / 32;
    mp_strip_work work = {query, s.k_tiles + s.first * mp_key_words(a), scores, groups, 0, sums, 0, 0};
    for (int64_t turn = first; turn < turns; ++turn) mp_strip_turn(a, &work, turn);
    for (; more; done = s, s = next) {
        for (int64_t r = 0; r < 32; ++r) {
            top[r] = -INFINITY;
            total[r] = mp_splat(0.0f);
        }
        for (int64_t j0 = s.first; j0 < s.last; j0 += block, now ^= 1) {
            float *const score = scores + now * 32 * block;
            const int64_t width = mp_min(block, s.last - j0);
            const int whole = width == block && (!a->causal || j0 + block <= s.before + s.c0 / a->group + 1)
                              && (!a->window || j0 > s.before + (s.c0 + s.filled - 1) / a->group - a->window);
            if (!whole) mp_hide(a, &s, j0, width, score);
            if (a->has_mask) mp_hide_masked(a, &s, j0, width, score);
            int64_t left = s.last - j0 - block;
            work.score = scores + (now ^ 1) * 32 * block;
            work.k_tiles = s.k_tiles + (j0 + block) * mp_key_words(a);
            if (left <= 0) { /* the next block is another strip's: this one's queries have met all keys */
                more = mp_take_strip(run, a, &from, &next, query, zeros);
                left = more ? next.last - next.first : 0;
                if (more) work.k_tiles = next.k_tiles + next.first * mp_key_words(a);
            }
            work.groups = (mp_min(block, left) + 31) / 32;
            mp_weigh_rows(a, score, top, total, keep, (width + 31) / 32, &work);
            if (j0 == s.first) { /* the sums of the strip before are whole now */
                if (done.filled) mp_strip_finish(a, &done, sums, a->value_dim, scale);
            } else {
                for (int64_t r = 0; r < 32; ++r)
                    for (int64_t i = 0; i < a->value_dim; i += MP_LANES)
                        mp_vstore(sums + r * a->value_dim + i, mp_vload_f32(sums + r * a->value_dim + i) * keep[r]);
            }
            work.v_tiles = s.v_tiles + j0 * mp_value_words(a);
            work.weighed = (width + 31) / 32;
            work.add = j0 > s.first;
        }
        for (int64_t r = 0; r < 32; r += MP_LANES) {
            const mp_vec all = mp_sums(total + r);
            mp_vstore(scale + r, mp_vchoose(MP_BITS(all == mp_splat(0.0f)), mp_splat(0.0f), 1.0f / all));
        }
        for (int64_t r = 0; a->has_sinks && r < s.filled; ++r)
            scale[r] = mp_finished_scale(a, s.g * a->group + (s.c0 + r) % a->group, top[r], mp_vtotal(total[r]));
    }
    work.score = scores + (now ^ 1) * 32 * block;
    for (int64_t turn = 0; turn < first; ++turn) mp_strip_turn(a, &work, turn);
    mp_strip_finish(a, &done, sums, a->value_dim, scale);
}

/* Each worker packs the keys and values of its queries' tokens, of a long past its share; then come its strips. */
MP_FN void mp_attention_many_tiles(mp_run *run, const int t, const int T, const mp_attention *a, float *room)
{
    const int parts = mp_parts(T, a->batches * a->queries / a->part), own = t % parts, worker = t / parts, workers = T / parts;
    const int64_t keys = (a->keys + a->block - 1) / a->block * a->block, blocks = (a->queries + 31) / 32;
    for (int64_t piece = 0; piece < a->batches * a->kv_heads * (keys / 32); ++piece) {
        const int64_t line = piece / (keys / 32), j0 = piece % (keys / 32) * 32, g = line % a->kv_heads, b = line / a->kv_heads;
        const int64_t before = mp_before(a, b), written = mp_written(a, before), block = (j0 < before ? j0 : j0 - before) / 32;
        if (mp_owner(b * blocks + block, parts) != own || piece % workers != worker) continue;
        if (j0 < mp_first_key(a, before, 0) / a->block * a->block || j0 >= written) continue;
        mp_pack_keys(a, b, g, j0, before, written, a->k_tiles + (line * keys + j0) * mp_key_words(a),
                     a->v_tiles + (line * keys + j0) * mp_value_words(a), room);
    }
    mp_barrier(run, T);
    mp_tiles_begin();
    mp_strips_on_tiles(run, a, (mp_strip_source){own, parts, 0, keys}, room);
    mp_tiles_end();
}
#endif
