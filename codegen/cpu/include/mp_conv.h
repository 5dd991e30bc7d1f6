/* Convolutions as implicit products: y[n][o][p] = finish(sum over k of w[o][k] * patch[k][p]), where k counts channels
 * and taps of the kernel and p output positions. A kernel's source has a constant mp_conv, which holds sizes and
 * functions, and one call of mp_conv_run, into which all functions here are inlined.
 *
 * Vectors run along positions, so that images stay [channel][row][column]: one row of a panel of patches is a copy of
 * a few runs of an image's rows, and sums are stored as they lie. Padding and strides are dealt with once, in a copy of
 * the image in which every tap of a row of positions is one run. Weights are panels of columns as in mp_linear.h, and a
 * register tile takes some columns of one. Every output is one sum over k in order: its bits do not depend on the number
 * of threads. */
#ifndef MP_CONV_H
#define MP_CONV_H

#include "mp_plan.h"

enum {
    MP_CONV_LOADED = 128 * 32, /* floats of a slice of a panel that is converted, see choose_conv */
    MP_CONV_MOST = 64,         /* positions of a panel */
    MP_CONV_AHEAD = 16,        /* rows of a panel of patches whose numbers are prefetched */
    MP_CONV_VECTORS = 16       /* of a row of a panel of weights */
};

typedef void (*mp_conv_tile)(const float *x, int64_t apart, const float *w, int64_t K, float *out, int add);

typedef struct {
    int64_t K;                    /* channels of a group times taps */
    int channels, groups;         /* channels of a group */
    int columns;                  /* outputs of a group */
    int taps[2], stride[2], dilation[2], before[2]; /* of rows and columns; before: padding in front */
    int copied;                   /* whether patches are read from a copy of the image */
    int panel, vectors;           /* columns of a panel of weights, and the vectors they fill */
    int row_bytes, floats;        /* bytes of one row of it; whether it is floats, which need no conversion */
    int rows, wide;               /* of a register tile: columns of weights, vectors of positions */
    int slice, strip, chunk;      /* k that stays in L1 and in L2; panels of positions that share a pass over weights */
    void (*load)(const void *from, mp_vec *wide, int V);
    mp_conv_tile tile[3];         /* for 1, 2 and 3 vectors of positions */
    float (*value)(const void *c, int64_t image, int64_t channel, int64_t row, int64_t column);
    void (*finish)(const void *c, int64_t image, int64_t column, int64_t at, int64_t count, const float *sums);
} mp_conv;

/* Sizes of a call, and where taps lie in what patches are read from. */
typedef struct {
    int64_t images, height, width, out_height, out_width;
    int64_t run, row, plane, image; /* floats: columns of one remainder by the stride; a row; a channel; an image */
    int64_t down, below;            /* floats from one row of positions, or of taps, to the next */
} mp_conv_sizes;

#if defined(MP_TILE_STEP_BY_PLACE)
#define MP_CONV_STEP(R, V) \
    do { \
        mp_vec some[(R) / MP_LANES]; \
        MP_FULLY \
        for (int i = 0; i < (R) / MP_LANES; ++i) some[i] = mp_vload_here(x + i * MP_LANES); \
        MP_TILE_STEP_BY_PLACE(R, V, 1, 0, some, 0) \
    } while (0)
#else
#define MP_CONV_STEP(R, V) MP_TILE_STEP(R, V, 1, 0, x[r])
#endif

/* out[r][j] (+)= sum over k of x[k][r] * w[k][j] for R columns of weights, whose rows are `apart`, and V vectors of
 * positions. Not unrolled: with two k at a time gcc has too few registers for the sums. */
#define MP_CONV_TILE(name, R, V) \
    static void __attribute__((unused, noinline)) MP_NOCLONE \
    name(const float *x, const int64_t apart, const float *w, const int64_t K, float *out, const int add) \
    { \
        enum { WIDE = (V) * MP_LANES, ALL = (V), wp = 0 }; \
        mp_vec acc[(R) * (V)]; \
        MP_FULLY \
        for (int i = 0; i < (R) * (V); ++i) acc[i] = add ? mp_vload_f32(out + i * MP_LANES) : mp_splat(0.0f); \
        for (int64_t k = 0; k < K; ++k, x += apart, w += WIDE) MP_CONV_STEP(R, V); \
        MP_FULLY \
        for (int i = 0; i < (R) * (V); ++i) mp_vstore(out + i * MP_LANES, acc[i]); \
    }

MP_CONV_TILE(mp_conv_8x1, 8, 1)
MP_CONV_TILE(mp_conv_8x2, 8, 2)
MP_CONV_TILE(mp_conv_8x3, 8, 3)
MP_CONV_TILE(mp_conv_4x1, 4, 1)
MP_CONV_TILE(mp_conv_4x2, 4, 2)
MP_CONV_TILE(mp_conv_4x3, 4, 3)

/* Floats of a run, a row and a plane of the copy: of the rows and columns that windows touch. */
MP_INLINE int64_t mp_conv_run_floats(const mp_conv *s, const int64_t out_width)
{
    return out_width + (s->taps[1] - 1) * s->dilation[1] / s->stride[1];
}

MP_INLINE mp_conv_sizes mp_conv_layout(const mp_conv *s, const int64_t images, const int64_t height,
                                       const int64_t width, const int64_t out_height, const int64_t out_width)
{
    mp_conv_sizes z = {images, height, width, out_height, out_width, width, width, height * width, 0, 0, 0};
    const int single = s->copied && s->taps[0] == 1; /* rows between those of the windows are left out */
    if (s->copied) {
        z.run = mp_conv_run_floats(s, out_width);
        z.row = z.run * (s->taps[1] == 1 ? 1 : s->stride[1]);
        z.plane = z.row * (single ? out_height : (out_height - 1) * s->stride[0] + (s->taps[0] - 1) * s->dilation[0] + 1);
    }
    z.image = z.plane * s->channels * s->groups;
    z.down = z.row * (single ? 1 : s->stride[0]);
    z.below = z.row * s->dilation[0];
    return z;
}

/* A thread's share of the copy: zeros around the image, and columns with one remainder by the stride as one run. */
MP_INLINE void mp_conv_copy(const mp_conv *s, const mp_conv_sizes *z, const int t, const int T, float *to,
                            const void *c)
{
    const int step = s->taps[0] == 1 ? s->stride[0] : 1, runs = s->taps[1] == 1 ? 1 : s->stride[1];
    const int64_t rows = z->plane / z->row, channels = (int64_t)s->channels * s->groups;
    const int64_t end = mp_share(z->images * channels, t + 1, T);
    for (int64_t p = mp_share(z->images * channels, t, T); p < end; ++p)
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t y = r * step - s->before[0];
            for (int m = 0; m < runs; ++m) { /* columns q * stride + m - before */
                float *const run = to + p * z->plane + r * z->row + m * z->run;
                const int64_t skip = mp_max(0, s->before[1] - m);
                const int64_t from = mp_min(z->run, (skip + s->stride[1] - 1) / s->stride[1]);
                const int64_t left = z->width - 1 + s->before[1] - m;
                const int64_t stop = mp_max(from, mp_min(z->run, left < 0 ? 0 : left / s->stride[1] + 1));
                const int inside = y >= 0 && y < z->height;
                for (int64_t q = 0; q < (inside ? from : z->run); ++q) run[q] = 0.0f;
                if (!inside) continue;
                MP_SIMD
                for (int64_t q = from; q < stop; ++q)
                    run[q] = s->value(c, p / channels, p % channels, y, q * s->stride[1] + m - s->before[1]);
                for (int64_t q = stop; q < z->run; ++q) run[q] = 0.0f;
            }
        }
}

/* Positions of a panel that lie in one row of the output. */
typedef struct {
    int64_t from; /* of their first tap */
    int64_t lane, length, vectors;
} mp_conv_segment;

/* Rows [k0, k1) of a panel of patches: `count` positions from `first` on. Whole vectors are copied: what goes past a
 * segment is overwritten by the next one, or by the next row. */
MP_INLINE void mp_conv_pack(const mp_conv *s, const mp_conv_sizes *z, const float *x, const float *end,
                            const int64_t first, const int count, const int wide, const int64_t k0, const int64_t k1,
                            float *to)
{
    mp_conv_segment segments[MP_CONV_MOST];
    int many = 0;
    for (int lane = 0; lane < count; ++many) {
        const int64_t p = first + lane, column = p % z->out_width, row = p / z->out_width;
        const int64_t length = mp_min(count - lane, z->out_width - column);
        segments[many] = (mp_conv_segment){
            row / z->out_height * z->image + row % z->out_height * z->down + column, lane, length,
            (length + MP_LANES - 1) / MP_LANES,
        };
        lane += (int)length;
    }
    if (count < wide) memset(to, 0, sizeof *to * (size_t)((k1 - k0) * wide)); /* numbers that nobody reads */
    const int taps = s->taps[0] * s->taps[1], most = s->wide * MP_LANES, whole = many == 1 && count == most;
    const int64_t ahead = (MP_CONV_AHEAD + taps - 1) / taps * z->plane;
    int64_t channel = k0 / taps;
    int i = (int)(k0 % taps) / s->taps[1], j = (int)(k0 % taps) % s->taps[1];
    for (int64_t k = k0; k < k1; ++k, to += wide) {
        const int across = j * s->dilation[1];
        const int64_t tap = s->copied ? across % s->stride[1] * z->run + across / s->stride[1] : across;
        const float *const row = x + channel * z->plane + i * z->below + tap;
        if (j == 0) /* no prefetcher of a CPU sees that the next rows are those of another channel */
            for (int n = 0; n < many; ++n)
                for (int64_t l = 0; l < segments[n].length + 15; l += 16)
                    __builtin_prefetch(row + ahead + segments[n].from + l, 0, 3);
        if (whole && row + segments[0].from + most <= end) {
            MP_FULLY
            for (int v = 0; v < s->wide; ++v)
                mp_vstore(to + v * MP_LANES, mp_vload_f32(row + segments[0].from + v * MP_LANES));
        } else
            for (int n = 0; n < many; ++n) {
                const mp_conv_segment g = segments[n];
                const float *const from = row + g.from;
                if (from + g.vectors * MP_LANES > end) { /* the image ends here */
                    for (int64_t l = 0; l < g.length; ++l) to[g.lane + l] = from[l];
                    continue;
                }
                float *const at = to + g.lane; /* branches that go the same way for each k cost less than a loop */
                mp_vstore(at, mp_vload_f32(from));
                if (g.vectors > 1) mp_vstore(at + MP_LANES, mp_vload_f32(from + MP_LANES));
                if (g.vectors > 2) mp_vstore(at + 2 * MP_LANES, mp_vload_f32(from + 2 * MP_LANES));
            }
        if (++j == s->taps[1]) {
            j = 0;
            if (++i == s->taps[0]) i = 0, ++channel;
        }
    }
}

/* sums[panel][column][position] (+)= rows [k, k + deep) of a panel of weights, which stay in L1, times those of all panels
 * of patches of `positions` positions; columns in [low, high) are wanted. */
MP_INLINE void mp_conv_slice(const mp_conv *s, const char *w, const int64_t deep, const int low, const int high,
                             const float *patches, const int64_t k, const int64_t positions, float *sums, const int add)
{
    _Alignas(64) float loaded[MP_CONV_LOADED];
    const int most = s->wide * MP_LANES;
    if (!s->floats)
        for (int64_t i = 0; i < deep; ++i) {
            mp_vec row[MP_CONV_VECTORS];
            s->load(w + i * s->row_bytes, row, s->vectors);
            MP_FULLY
            for (int j = 0; j < s->vectors; ++j) mp_vstore(loaded + i * s->panel + j * MP_LANES, row[j]);
        }
    const float *const weights = s->floats ? (const float *)(const void *)w : loaded;
    for (int64_t from = 0; from < positions; from += most, patches += most * s->strip, sums += (int64_t)most * s->panel) {
        const int V = (int)(mp_min(most, positions - from) + MP_LANES - 1) / MP_LANES;
        for (int r = low / s->rows * s->rows; r < high; r += s->rows)
            s->tile[V - 1](weights + r, s->panel, patches + k * V * MP_LANES, deep, sums + r * V * MP_LANES, add);
    }
}

/* Positions of a chunk for the panels of weights [first, last) of group g. */
MP_INLINE void mp_conv_chunk(const mp_conv *s, const mp_conv_sizes *z, const int g, const int64_t from,
                             const int64_t to, const int64_t first, const int64_t last, const char *w, const float *x,
                             const float *end, float *patches, float *sums, const void *c)
{
    const int most = s->wide * MP_LANES;
    const int64_t K = s->K, positions = z->out_height * z->out_width, panels = (to - from + most - 1) / most;
    const int64_t begin = (int64_t)g * s->columns, stop = begin + s->columns, each = (int64_t)most * s->panel;
    for (int64_t k0 = 0; k0 < K; k0 += s->strip) {
        const int64_t k1 = mp_min(K, k0 + s->strip);
        for (int64_t p = 0; p < panels; ++p) {
            const int count = (int)mp_min(most, to - from - p * most);
            const int wide = (count + MP_LANES - 1) / MP_LANES * MP_LANES;
            mp_conv_pack(s, z, x + g * s->channels * z->plane, end, from + p * most, count, wide, k0, k1,
                         patches + p * most * s->strip);
        }
        for (int64_t q = first; q < last; ++q) {
            const int low = (int)mp_max(0, begin - q * s->panel), high = (int)mp_min(s->panel, stop - q * s->panel);
            float *const mine = s->strip < K ? sums + (q - first) * s->chunk * each : sums;
            for (int64_t k = k0; k < k1; k += s->slice)
                mp_conv_slice(s, w + (q * K + k) * s->row_bytes, mp_min(s->slice, k1 - k), low, high, patches, k - k0,
                              to - from, mine, k > 0);
            if (k1 < K) continue;
            for (int j = low; j < high; ++j) /* all positions of a column, which are neighbours in memory */
                for (int64_t p = 0; p < panels; ++p) {
                    const int64_t count = mp_min(most, to - from - p * most), V = (count + MP_LANES - 1) / MP_LANES;
                    for (int64_t l = 0, at; l < count; l += at) { /* of one image at a time */
                        const int64_t place = from + p * most + l;
                        at = mp_min(count - l, positions - place % positions);
                        s->finish(c, place / positions, q * s->panel + j, place % positions, at,
                                  mine + p * each + j * V * MP_LANES + l);
                    }
                }
        }
    }
}

/* The whole convolution. `copy` has room for the copy and 64 floats; `patches` and `sums` have room for a chunk of each
 * thread. Threads take chunks of positions; where these are few, also parts of the weights. */
MP_INLINE void mp_conv_run(const mp_conv *s, mp_run *run, const int t, const int T, const mp_conv_sizes sizes,
                           const void *w, const float *x, float *copy, float *patches, const int64_t patch_floats,
                           float *sums, const int64_t sum_floats, const void *c)
{
    const mp_conv_sizes z = mp_conv_layout(s, sizes.images, sizes.height, sizes.width, sizes.out_height, sizes.out_width);
    const int64_t all = z.images * z.out_height * z.out_width, most = (int64_t)s->wide * MP_LANES * s->chunk;
    const int64_t chunks = (all + most - 1) / most;
    if (all == 0) return;
    if (s->copied) {
        mp_conv_copy(s, &z, t, T, copy, c);
        mp_barrier(run, T);
    }
    const float *const from = s->copied ? copy : x;
    const float *const end = from + z.images * z.image + (s->copied ? 64 : 0);
    const int64_t panels = (s->columns + s->panel - 1) / s->panel;
    const int64_t wanted = T == 1 || chunks * s->groups >= 2 * T ? 1 : (2 * T - 1) / (chunks * s->groups) + 1;
    const int64_t parts = mp_min(wanted, panels);
    for (int64_t n; (n = mp_take(run)) < chunks * s->groups * parts;) {
        const int g = (int)(n / parts / chunks);
        const int64_t chunk = n / parts % chunks, part = n % parts;
        const int64_t first = (int64_t)g * s->columns / s->panel;
        const int64_t count = ((int64_t)(g + 1) * s->columns + s->panel - 1) / s->panel - first;
        mp_conv_chunk(s, &z, g, chunk * most, mp_min(all, (chunk + 1) * most), first + count * part / parts,
                      first + count * (part + 1) / parts, (const char *)w, from, end, patches + t * patch_floats,
                      sums + t * sum_floats, c);
    }
}

#endif
