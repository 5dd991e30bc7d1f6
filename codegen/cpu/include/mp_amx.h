/* bf16 tile units: eight tiles of 16 rows of 64 bytes, on x86 the AMX instructions. MONOPLAN_ISA=tiles has the same tiles
 * in plain C, so that code for them can be tested on any machine. */
#ifndef MP_AMX_H
#define MP_AMX_H

#include "mp_math.h"

#if defined(MP_TILES_EMULATED)
/* Not inlined: compiling would take longer than running. */
#define MP_EMULATED static __attribute__((noinline, unused))
static _Thread_local uint32_t mp_emulated[8][16][16];
static _Thread_local struct { int rows, bytes; } mp_emulated_shape[8];

MP_EMULATED void mp_tiles_shape(int rows, int bytes)
{
    for (int i = 0; i < 8; ++i) {
        mp_emulated_shape[i].rows = i < 6 ? rows : 16;
        mp_emulated_shape[i].bytes = i < 6 ? bytes : 64;
    }
    memset(mp_emulated, 0, sizeof mp_emulated);
}
static inline void mp_tiles_end(void)
{
    memset(mp_emulated, 0xff, sizeof mp_emulated);
    memset(mp_emulated_shape, 0, sizeof mp_emulated_shape);
}
MP_EMULATED void mp_tile_zero(int i) { memset(mp_emulated[i], 0, sizeof mp_emulated[i]); }
MP_EMULATED void mp_tile_load(int i, const void *p, int64_t stride)
{
    mp_tile_zero(i);
    for (int r = 0; r < mp_emulated_shape[i].rows; ++r)
        memcpy(mp_emulated[i][r], (const char *)p + r * stride, (size_t)mp_emulated_shape[i].bytes);
}
MP_EMULATED void mp_tile_stream(int i, const void *p, int64_t stride) { mp_tile_load(i, p, stride); }
MP_EMULATED void mp_tile_store(int i, void *p, int64_t stride)
{
    for (int r = 0; r < mp_emulated_shape[i].rows; ++r)
        memcpy((char *)p + r * stride, mp_emulated[i][r], (size_t)mp_emulated_shape[i].bytes);
}
/* c[m][n] += sum over pairs of a[m][pair] · b[pair][n], each of two bf16 */
MP_EMULATED void mp_tile_dot(int c, int a, int b)
{
    float low[16][16], high[16][16], sums[16];
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 16; ++n) {
            low[k][n] = mp_bits_to_float(mp_emulated[b][k][n] << 16);
            high[k][n] = mp_bits_to_float(mp_emulated[b][k][n] & 0xffff0000u);
        }
    for (int m = 0; m < mp_emulated_shape[c].rows; ++m) {
        memcpy(sums, mp_emulated[c][m], sizeof sums);
        for (int k = 0; k < 16; ++k) {
            const uint32_t pair = mp_emulated[a][m][k];
            const float x0 = mp_bits_to_float(pair << 16), x1 = mp_bits_to_float(pair & 0xffff0000u);
            for (int n = 0; n < 16; ++n) {
                sums[n] += x0 * low[k][n];
                sums[n] += x1 * high[k][n];
            }
        }
        memcpy(mp_emulated[c][m], sums, sizeof sums);
    }
}
/* The same of groups of four signed bytes, in integers. */
MP_EMULATED void mp_tile_dot_bytes(int c, int a, int b)
{
    for (int m = 0; m < mp_emulated_shape[c].rows; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                int8_t x[4], y[4];
                memcpy(x, &mp_emulated[a][m][k], 4);
                memcpy(y, &mp_emulated[b][k][n], 4);
                mp_emulated[c][m][n] += (uint32_t)(x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]);
            }
}
#define mp_tile_load_close mp_tile_load
#define mp_tile_dot_close mp_tile_dot
#define MP_TILE_BYTES 1
#define MP_TILES 1
#elif defined(__AMX_BF16__) || defined(__AMXBF16__) /* the second: clang before 16 */
#include <immintrin.h>

/* Tiles 0 to 5 have `rows` rows of `bytes` bytes, tiles 6 and 7 are whole; all become 0. */
static inline void mp_tiles_shape(const int rows, const int bytes)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shape.bytes[i] = (uint16_t)(i < 6 ? bytes : 64);
        shape.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}
static inline void mp_tiles_end(void) { _tile_release(); }
/* A core whose other half is at work too (another program's, on a shared machine) runs tile instructions that follow each
 * other closely at a third of its speed. With eight others between them, even of no effect, it is 1.3 to 1.7 times as fast;
 * a core for itself does not notice them. */
#define mp_tile_gap() __asm__ volatile(".rept 8\n\tnop\n\t.endr")
/* The numbers of tiles are part of the instructions, so these are macros. mp_tile_stream leaves L1 to other data. Those that
 * are `close` have no gap: where other work stands between them anyway. */
#define mp_tile_zero(i) _tile_zero(i)
#define mp_tile_load_close(i, p, stride) _tile_loadd(i, p, stride)
#define mp_tile_dot_close(c, a, b) _tile_dpbf16ps(c, a, b)
#define mp_tile_load(i, p, stride) do { _tile_loadd(i, p, stride); mp_tile_gap(); } while (0)
#define mp_tile_stream(i, p, stride) do { _tile_stream_loadd(i, p, stride); mp_tile_gap(); } while (0)
#define mp_tile_store(i, p, stride) do { _tile_stored(i, p, stride); mp_tile_gap(); } while (0)
#define mp_tile_dot(c, a, b) do { _tile_dpbf16ps(c, a, b); mp_tile_gap(); } while (0)
#if defined(__AMX_INT8__) || defined(__AMXINT8__)
#define mp_tile_dot_bytes(c, a, b) _tile_dpbssd(c, a, b) /* others stand between them */
#define MP_TILE_BYTES 1
#endif
#define MP_TILES 1
#endif

#if defined(MP_TILES)
static inline void mp_tiles_begin(void) { mp_tiles_shape(16, 64); }

/* Compilers do not know which memory tile instructions touch: nothing may move past this. */
#define mp_tile_fence() __asm__ volatile("" ::: "memory")

/* 32 x 32 sums: four tiles. */
static inline void mp_zero_sums(void)
{
    mp_tile_zero(0);
    mp_tile_zero(1);
    mp_tile_zero(2);
    mp_tile_zero(3);
}

static inline void mp_load_sums(const float *from)
{
    mp_tile_stream(0, from, 128);
    mp_tile_stream(1, from + 16, 128);
    mp_tile_stream(2, from + 512, 128);
    mp_tile_stream(3, from + 528, 128);
}
static inline void mp_store_sums(float *to)
{
    mp_tile_store(0, to, 128);
    mp_tile_store(1, to + 16, 128);
    mp_tile_store(2, to + 512, 128);
    mp_tile_store(3, to + 528, 128);
    mp_tile_fence();
}

/* 32 floats as three rows of a tile, `apart` elements from each other, that add up to them: each has the bits which
 * those before it left over. An infinite number leaves nothing. */
MP_FN void mp_thirds(mp_bf16 *to, const float *from, const int64_t apart)
{
    _Pragma("omp simd")
    for (int i = 0; i < 32; ++i) {
        const uint32_t u = mp_float_to_bits(from[i]);
        const int finite = (u & 0x7f800000u) != 0x7f800000u;
        const float rest = finite ? from[i] - mp_bits_to_float(u & 0xffff0000u) : 0.0f;
        const float last = rest - mp_bits_to_float(mp_float_to_bits(rest) & 0xffff0000u);
        to[i] = (mp_bf16)(u >> 16 | (from[i] != from[i] ? 0x40u : 0u));
        to[apart + i] = (mp_bf16)(mp_float_to_bits(rest) >> 16);
        to[2 * apart + i] = (mp_bf16)(mp_float_to_bits(last) >> 16);
    }
}

/* `count` floats (16 or 32) in bf16, for a row of a tile. Tile units take subnormal numbers as 0, and so may this. */
MP_FN void mp_tile_round(mp_bf16 *to, const float *from, const int count)
{
#if defined(__AVX512BF16__) && !defined(MP_TILES_EMULATED)
    if (count == 32) {
        const __m512bh row = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
        memcpy(to, &row, sizeof row);
    } else {
        const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(from));
        memcpy(to, &half, sizeof half);
    }
#else
    _Pragma("omp simd")
    for (int i = 0; i < count; ++i) to[i] = mp_to_bf16(from[i]);
#endif
}

/* Where column `first` of row `block` + r of a matrix with N columns lies in its bf16 tiles [row / 32][column / 32][32][32];
 * `block` is a multiple of 32. */
MP_FN int64_t mp_place_in_tiles(const int64_t block, const int64_t r, const int64_t first, const int64_t N)
{
    return block * N + first / 32 * 1024 + r * 32 + first % 32;
}

/* Columns [first, first + count) of row `block` + r of y, which has N, for the kernel that reads them: as tiles or as they are. */
MP_FN void mp_hand_over(float *y, const int tiles, const int64_t block, const int64_t r, const int64_t first, const int64_t N,
                        const float *made, const int count)
{
    mp_bf16 *const to = (mp_bf16 *)y + mp_place_in_tiles(block, r, first, N);
    if (!tiles) memcpy(y + (block + r) * N + first, made, sizeof *made * (size_t)count);
    else if (count < 32) mp_tile_round(to, made, count);
    else for (int i = 0; i < count; i += 32) mp_tile_round(to + i * 32, made + i, 32);
}

#endif
#endif
