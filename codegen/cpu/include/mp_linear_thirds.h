/* Many rows times panels of f32 (or f16) on bf16 tile units. A float is the sum of three bf16 numbers, h + m + l, of
 * 8 bits each. Of the nine products of parts the six that count are added up: m·l, l·m and l·l are below 2^-24 of h·h.
 * Tile units are sixteen times as fast as vectors of floats, so six products still gain.
 *
 * Rows of x are split once, weights for each chunk of rows, a slice of a panel at a time, which stays in L1. Tile units
 * take subnormal numbers as 0: parts below 2^-126 are lost. A sum that is not finite is made again on vectors, since an
 * infinite number times a part that is 0 is no number. Bits of a row depend on no other row and on no thread, but fewer
 * rows than `tiled_from` run on vectors. Included by mp_linear.h. */
#ifndef MP_LINEAR_THIRDS_H
#define MP_LINEAR_THIRDS_H

enum {
    MP_THIRDS_SLICE = 128,      /* k of a slice: 24 KB of weights in parts */
    MP_THIRDS_STRIP = 768,      /* k of a chunk of x, 1.2 MB, which stay in L2 */
    MP_THIRDS_CHUNK = 256,      /* rows that share split weights */
    MP_THIRDS_STEP = 3 * 32 * 32 /* numbers of three parts: 32 k of 32 rows or columns */
};

/* What the upper half of each float leaves over. */
MP_FN mp_vec mp_lower_part(const mp_vec v) { return v - (mp_vec)((mp_vec_u32)v & 0xffff0000u); }
/* The upper halves of two vectors, in turns. */
MP_FN mp_vec_u32 mp_upper_pair(const mp_vec even, const mp_vec odd)
{
    return (mp_vec_u32)even >> 16 | ((mp_vec_u32)odd & 0xffff0000u);
}

/* `count` rows of a panel of floats in parts, as tiles [k / 32][part][16 columns][pair of k][column][2]; k past the end
 * are 0. */
static inline void mp_thirds_split(const float *from, const int64_t count, uint32_t *to)
{
    const mp_vec none = mp_splat(0.0f);
    for (int64_t k = 0; k < (count + 31) / 32 * 32; k += 2)
        MP_FULLY
        for (int half = 0; half < 2; ++half) {
            const float *const row = from + k * 32 + half * 16;
            uint32_t *const tile = to + k / 32 * (MP_THIRDS_STEP / 2) + half * 256 + k % 32 * 8;
            mp_vec even = k < count ? mp_vload_f32(row) : none, odd = k + 1 < count ? mp_vload_f32(row + 32) : none;
            MP_FULLY
            for (int part = 0; part < 3; ++part, even = mp_lower_part(even), odd = mp_lower_part(odd))
                *(mp_vec_u32 *)(tile + part * 512) = mp_upper_pair(even, odd);
        }
}

/* Two tiles of 16 rows of x, or of 16 columns of w, and four products. */
#define MP_THIRDS_X(p) do { mp_tile_stream(4, p, 64); mp_tile_stream(5, (p) + 512, 64); } while (0)
#define MP_THIRDS_W(p) do { mp_tile_load(6, p, 64); mp_tile_load(7, (p) + 512, 64); } while (0)
#define MP_THIRDS_DOTS() \
    do { mp_tile_dot(0, 4, 6); mp_tile_dot(1, 4, 7); mp_tile_dot(2, 5, 6); mp_tile_dot(3, 5, 7); } while (0)

/* sums[32][32] (+)= 32 rows of x times 32 columns of w over 32 `steps` of k. In this order 14 tile loads do.
 * Weights of 16 bits have no third part. */
static inline void mp_thirds_block(const mp_bf16 *x, const mp_bf16 *w, const int64_t steps, const int thirds, float *sums,
                                   const int add)
{
    enum { M = 1024, L = 2048 };
    mp_tile_fence();
    if (add) mp_load_sums(sums);
    else mp_zero_sums();
    for (int64_t i = 0; i < steps; ++i, x += MP_THIRDS_STEP, w += MP_THIRDS_STEP) {
        MP_THIRDS_X(x);
        if (thirds) {
            MP_THIRDS_W(w + L);
            MP_THIRDS_DOTS();
        }
        MP_THIRDS_W(w + M);
        MP_THIRDS_DOTS();
        MP_THIRDS_X(x + M);
        MP_THIRDS_DOTS();
        MP_THIRDS_W(w);
        MP_THIRDS_DOTS();
        MP_THIRDS_X(x + L);
        MP_THIRDS_DOTS();
        MP_THIRDS_X(x);
        MP_THIRDS_DOTS();
    }
    mp_store_sums(sums);
}

/* Rows [first, first + 32) of x, normed, in parts: [k / 32][part][row][32]; rows and k past the end are 0. */
static inline void mp_thirds_pack(const mp_linear *s, const void *c, const int64_t first, const int64_t rows, mp_bf16 *to)
{
    const int64_t steps = (s->K + 31) / 32;
    for (int64_t r = 0; r < 32; ++r) {
        mp_stats stats;
        for (int64_t i0 = 0; i0 < steps * 32; i0 += MP_SOME_COLUMNS) {
            float values[MP_SOME_COLUMNS] = {0};
            if (first + r < rows) s->row(c, first + r, i0, mp_min(s->K, i0 + MP_SOME_COLUMNS), &stats, values);
            for (int64_t i = i0; i < mp_min(steps * 32, i0 + MP_SOME_COLUMNS); i += 32)
                mp_thirds(to + i / 32 * MP_THIRDS_STEP + r * 32, values + i - i0, 1024);
        }
    }
}

/* `count` rows of a panel as floats: as they lie, or widened into `room`. */
static inline const float *mp_thirds_floats(const mp_linear *s, const char *w, const int64_t count, float *room)
{
    if (!s->widen) return (const float *)(const void *)w;
    s->widen(w, count, room);
    return room;
}

/* sums[panels][32] of one row on vectors. */
static void __attribute__((unused, noinline))
mp_thirds_again(const mp_linear *s, const char *w, const int64_t g, const int64_t row, float *sums, const void *c)
{
    mp_stats stats;
    memset(sums, 0, sizeof *sums * (size_t)(s->panels * 32));
    for (int64_t k = 0; k < s->K; k += MP_THIRDS_SLICE) {
        const int64_t count = mp_min(MP_THIRDS_SLICE, s->K - k);
        float x[MP_THIRDS_SLICE], room[MP_THIRDS_SLICE * 32];
        s->row(c, row, k, k + count, &stats, x);
        for (int p = 0; p < s->panels; ++p) {
            const float *const from = mp_thirds_floats(s, w + ((g * s->panels + p) * s->K + k) * s->row_bytes, count, room);
            for (int64_t i = 0; i < count; ++i)
                for (int j = 0; j < 32; ++j) sums[p * 32 + j] += x[i] * from[i * 32 + j];
        }
    }
}

/* `count` rows from row `first` on, which lie in x, times the panels of group g; their sums lie in `partial` as
 * [panel][block][32][32]. */
static inline void mp_thirds_group(const mp_linear *s, const mp_bf16 *x, const char *w, const int64_t g, const int64_t first,
                                   const int64_t count, float *partial, float *sums, const void *c)
{
    const int64_t K = s->K, steps = (K + 31) / 32, blocks = (count + 31) / 32;
    const int thirds = s->row_bytes > 2 * 32;
    _Alignas(64) uint32_t slice[MP_THIRDS_SLICE / 32 * MP_THIRDS_STEP / 2];
    float room[MP_THIRDS_SLICE * 32];
    mp_tiles_begin();
    for (int64_t k0 = 0; k0 < K; k0 += MP_THIRDS_STRIP)
        for (int p = 0; p < s->panels; ++p)
            for (int64_t k = k0, end = mp_min(K, k0 + MP_THIRDS_STRIP); k < end; k += MP_THIRDS_SLICE) {
                const int64_t deep = mp_min(MP_THIRDS_SLICE, K - k), panel = g * s->panels + p;
                const char *const from = w + (panel * K + k) * s->row_bytes;
                const int64_t then = k + MP_THIRDS_SLICE < end ? panel * K + k + MP_THIRDS_SLICE : (panel + 1) * K + k0;
                const int64_t lines = (MP_THIRDS_SLICE * s->row_bytes / 64 + blocks - 1) / blocks;
                const char *next = w + then * s->row_bytes; /* the slice that comes next is prefetched meanwhile */
                mp_thirds_split(mp_thirds_floats(s, from, deep, room), deep, slice);
                for (int64_t b = 0; b < blocks; ++b, next += lines * 64) {
                    for (int64_t j = 0; j < lines; ++j) __builtin_prefetch(next + j * 64, 0, 2);
                    mp_thirds_block(x + (b * steps + k / 32) * MP_THIRDS_STEP, (const mp_bf16 *)(const void *)slice,
                                    (deep + 31) / 32, thirds, partial + (p * blocks + b) * 1024, k > 0);
                }
            }
    mp_tiles_end();
    for (int64_t r = 0; r < count; ++r) {
        float infinite = 0.0f; /* or no number */
        for (int p = 0; p < s->panels; ++p)
            for (int j = 0; j < 32; ++j) {
                const float sum = sums[p * 32 + j] = partial[p * blocks * 1024 + r * 32 + j];
                infinite += sum - sum;
            }
        if (infinite != 0.0f) mp_thirds_again(s, w, g, first + r, sums, c);
        s->finish(c, g, first + r, sums);
    }
}

/* All threads split rows of x, then take groups of columns and chunks of rows one by one. */
static void __attribute__((unused, noinline))
mp_thirds_run(const mp_linear *s, mp_run *run, const int t, const int T, const int64_t rows, const char *w, mp_bf16 *x,
                 float *partial, float *sums, const void *c)
{
    const int64_t block = (s->K + 31) / 32 * MP_THIRDS_STEP, blocks = (rows + 31) / 32;
    int64_t chunk = mp_min(MP_THIRDS_CHUNK, s->chunk / 32 * 32), pieces;
    for (;; chunk /= 2) { /* enough pieces for all threads */
        pieces = (rows + chunk - 1) / chunk * s->groups;
        if (chunk <= 64 || pieces >= 4 * T || (pieces >= T && pieces % T == 0)) break;
    }
    for (int64_t b = mp_share(blocks, t, T); b < mp_share(blocks, t + 1, T); ++b)
        mp_thirds_pack(s, c, b * 32, rows, x + b * block);
    mp_barrier(run, T);
    for (int64_t piece; (piece = mp_take(run)) < pieces;) {
        const int64_t first = piece / s->groups * chunk, count = mp_min(chunk, rows - first);
        mp_thirds_group(s, x + first / 32 * block, w, piece % s->groups, first, count, partial, sums, c);
    }
}

#endif
