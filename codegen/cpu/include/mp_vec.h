/* Vectors of MP_LANES floats by the compiler's vector extension: one source for AVX-512, AVX2, NEON and plain C. */
#ifndef MP_VEC_H
#define MP_VEC_H

#include "mp_math.h"

#ifndef MP_LANES
#define MP_LANES 4
#endif

#if MP_LANES > 1
typedef float mp_vec __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));
typedef uint32_t mp_vec_u32 __attribute__((vector_size(4 * MP_LANES), aligned(4), may_alias));

MP_FN mp_vec mp_splat(float x) { return x - (mp_vec){0}; }
MP_FN mp_vec mp_vload_f32(const float *p) { return *(const mp_vec *)p; }
MP_FN void mp_vstore(float *p, mp_vec v) { *(mp_vec *)p = v; }
/* Pairs of bf16 as one word: the low halves are one vector, the high halves another. */
MP_FN void mp_vload2_bf16(const mp_bf16 *p, mp_vec *low, mp_vec *high)
{
    const mp_vec_u32 pairs = *(const mp_vec_u32 *)p;
    *low = (mp_vec)(pairs << 16);
    *high = (mp_vec)(pairs & 0xffff0000u);
}
#else
typedef float mp_vec;
MP_FN mp_vec mp_splat(float x) { return x; }
MP_FN mp_vec mp_vload_f32(const float *p) { return *p; }
MP_FN void mp_vstore(float *p, mp_vec v) { *p = v; }
MP_FN void mp_vload2_bf16(const mp_bf16 *p, mp_vec *low, mp_vec *high)
{
    *low = mp_load_bf16(p[0]);
    *high = mp_load_bf16(p[1]);
}
#endif

#if MP_LANES == 16 && defined(__AVX512F__)
#include <immintrin.h>
MP_FN mp_vec mp_vload_f16(const mp_f16 *p) { return (mp_vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)p)); }
#elif MP_LANES == 8 && defined(__F16C__)
#include <immintrin.h>
MP_FN mp_vec mp_vload_f16(const mp_f16 *p) { return (mp_vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)p)); }
#elif MP_LANES == 4 && defined(__aarch64__)
typedef uint16_t mp_half_u16 __attribute__((vector_size(8), aligned(2), may_alias));
MP_FN mp_vec mp_vload_f16(const mp_f16 *p)
{
    mp_vec wide;
    __asm__("fcvtl %0.4s, %1.4h" : "=w"(wide) : "w"(*(const mp_half_u16 *)p));
    return wide;
}
#elif MP_LANES > 1 && defined(MP_HAS_FLOAT16) && !defined(__clang__)
typedef _Float16 mp_vec_f16 __attribute__((vector_size(2 * MP_LANES), aligned(2), may_alias));
MP_FN mp_vec mp_vload_f16(const mp_f16 *p) { return __builtin_convertvector(*(const mp_vec_f16 *)p, mp_vec); }
#else
MP_FN mp_vec mp_vload_f16(const mp_f16 *p)
{
    float f[MP_LANES];
    for (int i = 0; i < MP_LANES; ++i) f[i] = mp_load_f16(p[i]);
    return mp_vload_f32(f);
}
#endif

#endif
