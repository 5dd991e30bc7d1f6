/* A few rows times panels of coded bf16 weights on tile units. An f32 number is the sum of three bf16 numbers, so a
 * row of x is three rows of a tile, and their products with a weight are exact: few instructions stand between a
 * core and its memory, and nothing of x is lost (but bits below 2^-126: tile units take subnormal numbers as 0). */
#ifndef MP_TILE_ROWS_H
#define MP_TILE_ROWS_H

#include "mp_format_bf16_12.h"

/* tile[32] = what tile units made of the three parts of a row, together: sums[half][part][rows][16]. Where the first
 * part's sum is infinite or no number it is the result: a later part that is 0 makes NaN of a weight that is
 * infinite. */
MP_FN void mp_join_thirds(float *tile, const float *sums, const int rows)
{
    for (int half = 0; half < 2; ++half, sums += 12 * 16, tile += 16)
        for (int n = 0; n < 16; ++n) {
            const float first = sums[n], rest = sums[rows * 16 + n] + sums[2 * rows * 16 + n];
            tile[n] = first - first == 0.0f ? first + rest : first;
        }
}

/* Prefetches a coded tile that is read later into L2, and one that is read soon into L1. */
MP_FN void mp_prefetch_both(const uint8_t *later, const uint8_t *soon)
{
    MP_FULLY
    for (int i = 0; i < MP_CODED_TILE; i += 64) {
        __builtin_prefetch(later + i, 0, 2);
        __builtin_prefetch(soon + i, 0, 3);
    }
}

/* tile[R][32] = R rows (1, 4 or 8) times a panel of w; rows of tile are `width` apart. The rows lie in parts, as
 * xs[k / 32][four rows][part][row][32]. Weights are decoded two steps of 32 before they are needed, since tile loads
 * wait for stores that are under way; between the tile instructions, which want others there. What comes next is
 * prefetched twice: into L2 `far` bytes before it is decoded, into L1 `near` bytes before; past the end of a panel
 * lies the one that is read next. A function by itself: all products of a plan share it, and the compiler sees it
 * once. */
static void __attribute__((unused, noinline)) MP_NOCLONE
mp_rows_by_panel(float *tile, const int64_t width, const mp_bf16 *xs, const mp_coded w, const int64_t K,
                 const int R, const int64_t far, const int64_t near)
{
    enum { AHEAD = 2 };
    _Alignas(64) float sums[4][12 * 16];
    _Alignas(64) mp_bf16 ready[4 * 1024];
    const mp_uppers upper = mp_uppers_of(w.upper);
    const int64_t steps = K / 32;
    const mp_exception *exception = w.exception;
    for (int i = 0; i < AHEAD && i < steps; ++i) mp_decode_step(ready + i * 1024, w.codes + i * MP_CODED_STEP, upper);
    exception = mp_put_exceptions(ready, exception, 0, AHEAD * 1024);
    mp_tile_zero(0);
    mp_tile_zero(1);
    mp_tile_zero(2);
    mp_tile_zero(3);
    for (int64_t i = 0; i < steps; ++i) {
        const uint8_t *const p = w.codes + (i + AHEAD) * MP_CODED_STEP;
        const mp_bf16 *const x = xs + i * 32 * 3 * R, *const now = ready + i % 4 * 1024;
        mp_bf16 *const later = ready + (i + AHEAD) % 4 * 1024;
        const int more = i + AHEAD < steps;
        mp_tile_fence();
        mp_tile_load_close(4, x, 64);
        if (R > 4) mp_tile_load_close(5, x + 12 * 32, 64);
        mp_prefetch_both(p + far, p + near);
        mp_tile_load_close(6, now, 64);
        if (more) mp_decode_tile(later, p, upper);
        mp_tile_fence();
        mp_tile_load_close(7, now + 512, 64);
        mp_prefetch_both(p + far + MP_CODED_TILE, p + near + MP_CODED_TILE);
        mp_tile_fence();
        mp_tile_dot_close(0, 4, 6);
        if (R > 4) mp_tile_dot_close(2, 5, 6);
        if (more) {
            mp_decode_tile(later + 512, p + MP_CODED_TILE, upper);
            exception = mp_put_exceptions(later, exception, (i + AHEAD) * 1024, (i + AHEAD + 1) * 1024);
        }
        mp_tile_fence();
        mp_tile_dot_close(1, 4, 7);
        if (R > 4) mp_tile_dot_close(3, 5, 7);
    }
    mp_tile_store(0, sums[0], 64);
    mp_tile_store(1, sums[1], 64);
    if (R > 4) {
        mp_tile_store(2, sums[2], 64);
        mp_tile_store(3, sums[3], 64);
    }
    mp_tile_fence();
    for (int r = 0; r < R; ++r) mp_join_thirds(tile + r * width, sums[r / 4 * 2] + r % 4 * 16, R < 4 ? R : 4);
}

#endif
