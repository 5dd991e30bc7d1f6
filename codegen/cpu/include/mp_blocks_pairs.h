/* Many rows times weights in low-bit blocks on vectors of x86, by products of pairs of 16 bits.
 *
 * A slice of the weights, 256 k of two vectors of columns, becomes numbers of 16 bits, which stay in L1 while the rows
 * pass. Registers hold the sums of some rows and both vectors. A group of 32 k is the same exact sum of integers as for few
 * rows, and goes through the same floats (mp_block_add), so that the bits of a row do not depend on how many there are. */
#ifndef MP_BLOCKS_PAIRS_H
#define MP_BLOCKS_PAIRS_H

#include "mp_blocks.h"

#if MP_LANES == 16 && defined(__AVX512BW__)
#define MP_PAIR_ROWS 6 /* by two vectors: twelve sums of integers and twelve of floats */
#elif MP_LANES == 8 && defined(__AVX2__)
#define MP_PAIR_ROWS 4
#else
#define MP_PAIR_ROWS 0 /* of 16-bit integers NEON and SSE multiply too few at once */
#endif

#if MP_PAIR_ROWS
enum { MP_SLICE = 256, MP_SLICE_GROUPS = MP_SLICE / MP_GROUP, MP_SLICE_VECTORS = 2, MP_PAIRS_OF_GROUP = MP_GROUP / 2 };

/* A slice: pairs of codes, in the order of mp_x_group, and what groups and their halves are scaled by. */
typedef struct {
    mp_words codes[MP_SLICE_GROUPS][MP_PAIRS_OF_GROUP][MP_SLICE_VECTORS];
    mp_vec scale[MP_SLICE_GROUPS][2][MP_SLICE_VECTORS], offset[MP_SLICE_GROUPS][2][MP_SLICE_VECTORS];
} mp_block_slice;

/* Vector v of the columns of a panel as vector `place` of a slice. Zeros that all groups share are taken off here; where groups
 * have their own, codes are those that mp_block_dots multiplies. */
MP_FN void mp_slice_expand(const mp_block_format *f, const char *unit, const int groups, const int v, const int place,
                           mp_block_slice *to)
{
    typedef int16_t shorts __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
    const int is_signed = f->kind == MP_SIGNED;
    const int16_t less = (int16_t)(f->zeros ? f->zero - mp_blocks_zero(f) : f->zero);
    MP_ONCE
    for (int n = 0; n < groups; n += f->unit, unit += f->unit_bytes) {
        MP_BLOCK_UNROLL
        for (int g = 0; g < f->unit; ++g) {
            mp_words codes[MP_QUADS];
            mp_vec scale[2], offset[2] = {mp_splat(0.0f), mp_splat(0.0f)};
            f->group(unit, g, v, codes, scale, offset);
            MP_BLOCK_UNROLL
            for (int i = 0; i < MP_QUADS; ++i) {
                to->codes[n + g][2 * i][place] = (mp_words)((shorts)mp_even_bytes(codes[i], is_signed) - less);
                to->codes[n + g][2 * i + 1][place] = (mp_words)((shorts)mp_odd_bytes(codes[i], is_signed) - less);
            }
            MP_BLOCK_UNROLL
            for (int h = 0; h < 2; ++h) to->scale[n + g][h][place] = scale[h], to->offset[n + g][h][place] = offset[h];
        }
    }
}

/* sum + a * b, of pairs, for every column. */
MP_FN mp_ints mp_add_pairs(const mp_ints sum, const mp_words a, const int32_t b)
{
#if MP_LANES == 16 && defined(__AVX512VNNI__)
    return (mp_ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32(b));
#else
    return sum + MP_PAIRS(a, b);
#endif
}

/* sums[row][two vectors] += a block of rows times a slice. */
MP_FN void mp_slice_rows(const mp_block_format *f, const mp_x_group *x, const mp_block_slice *w, const int groups,
                         float *sums, const int64_t width)
{
    enum { R = MP_PAIR_ROWS, V = MP_SLICE_VECTORS };
    const int parts = f->halves ? 2 : 1, steps = MP_PAIRS_OF_GROUP / parts;
    mp_vec acc[R * V];
    MP_FULLY
    for (int i = 0; i < R * V; ++i) acc[i] = mp_vload_f32(sums + i / V * width + i % V * MP_LANES);
    MP_ONCE
    for (int g = 0; g < groups; ++g, x += R) {
        MP_FULLY
        for (int h = 0; h < parts; ++h) {
            mp_ints dots[R * V];
            MP_FULLY
            for (int i = 0; i < R * V; ++i) dots[i] = (mp_ints){0};
            MP_TWICE
            for (int i = h * steps; i < (h + 1) * steps; ++i) {
                MP_FULLY
                for (int r = 0; r < R; ++r) {
                    int32_t pair;
                    memcpy(&pair, x[r].pairs + 2 * i, sizeof pair);
                    MP_FULLY
                    for (int v = 0; v < V; ++v) dots[r * V + v] = mp_add_pairs(dots[r * V + v], w->codes[g][i][v], pair);
                }
            }
            MP_FULLY
            for (int i = 0; i < R * V; ++i)
                acc[i] = mp_block_add(f, x + i / V, h, w->scale[g][h][i % V], w->offset[g][h][i % V], dots[i], acc[i]);
        }
    }
    MP_FULLY
    for (int i = 0; i < R * V; ++i) mp_vstore(sums + i / V * width + i % V * MP_LANES, acc[i]);
}

/* sums[row][two vectors] += blocks of rows, `apart` bytes from each other, times up to 256 k of two vectors of columns: of two
 * panels, `panel_bytes` apart, or of one where vectors are shorter. Of a last panel that is alone the second vector is the
 * first. */
#define MP_BLOCK_SLICE(format) \
    MP_SHARED mp_slice_##format(const char *units, const int64_t panel_bytes, const int groups, const char *x, \
                                const int64_t apart, const int64_t blocks, float *sums, const int64_t width) \
    { \
        enum { EACH = MP_PANEL / MP_LANES }; \
        const mp_block_format *const f = &mp_block_##format; \
        _Alignas(64) mp_block_slice w; \
        MP_ONCE \
        for (int v = 0; v < MP_SLICE_VECTORS; ++v) mp_slice_expand(f, units + v / EACH * panel_bytes, groups, v % EACH, v, &w); \
        for (int64_t b = 0; b < blocks; ++b) \
            mp_slice_rows(f, (const mp_x_group *)(const void *)(x + b * apart), &w, groups, sums + b * MP_PAIR_ROWS * width, width); \
    }
#define MP_SLICE_OF(format) mp_slice_##format
#else
#define MP_BLOCK_SLICE(format)
#define MP_SLICE_OF(format) 0
#endif
#endif
