/* The bf16 tile units of x86: 32 x 32 sums from 32 x 32k of activations and 32k x 32 of weights. */
#ifndef MP_AMX_H
#define MP_AMX_H

#if defined(__AMX_BF16__) || defined(__AMXBF16__)
#include <immintrin.h>

/* All eight tiles have 16 rows of 64 bytes. */
static inline void mp_tiles_begin(void)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shape.bytes[i] = 64;
        shape.rows[i] = 16;
    }
    _tile_loadconfig(&shape);
}
static inline void mp_tiles_end(void) { _tile_release(); }

/* c (+)= a[32][32 * steps] · b: a as [step][32 rows][32], b as [step][16 pairs of k][32 columns][2]. Activations come
 * from L2 with the streaming load, so that the panel of weights keeps L1 to itself. */
static inline void mp_tiles_32x32(const mp_bf16 *a, const mp_bf16 *b, int64_t steps, float *c, int64_t ldc, int first)
{
    const int64_t row = ldc * 4;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 16, row);
        _tile_loadd(2, c + 16 * ldc, row);
        _tile_loadd(3, c + 16 * ldc + 16, row);
    }
    for (int64_t s = 0; s < steps; ++s) {
        _tile_stream_loadd(4, a + s * 1024, 64);
        _tile_loadd(6, b + s * 1024, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(5, a + s * 1024 + 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, b + s * 1024 + 32, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + 16, row);
    _tile_stored(2, c + 16 * ldc, row);
    _tile_stored(3, c + 16 * ldc + 16, row);
}
#endif
#endif
