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
typedef uint16_t mp_vec_u16 __attribute__((vector_size(2 * MP_LANES), aligned(2), may_alias));

MP_FN mp_vec mp_splat(float x) { return x - (mp_vec){0}; }
MP_FN mp_vec mp_vload_f32(const float *p) { return *(const mp_vec *)p; }
MP_FN void mp_vstore(float *p, mp_vec v) { *(mp_vec *)p = v; }
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p)
{
    const mp_vec_u32 wide = __builtin_convertvector(*(const mp_vec_u16 *)p, mp_vec_u32) << 16;
    return (mp_vec)wide;
}
MP_FN float mp_vsum(mp_vec v)
{
    float s[MP_LANES];
    mp_vstore(s, v);
    for (int w = MP_LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; ++i) s[i] += s[i + w];
    return s[0];
}
#else
typedef float mp_vec;
MP_FN mp_vec mp_splat(float x) { return x; }
MP_FN mp_vec mp_vload_f32(const float *p) { return *p; }
MP_FN void mp_vstore(float *p, mp_vec v) { *p = v; }
MP_FN mp_vec mp_vload_bf16(const mp_bf16 *p) { return mp_load_bf16(*p); }
MP_FN float mp_vsum(mp_vec v) { return v; }
#endif

MP_FN mp_vec mp_vload_f16(const mp_f16 *p)
{
    float f[MP_LANES];
    for (int i = 0; i < MP_LANES; ++i) f[i] = mp_load_f16(p[i]);
    return mp_vload_f32(f);
}
MP_FN mp_vec mp_vload_f64(const double *p)
{
    float f[MP_LANES];
    for (int i = 0; i < MP_LANES; ++i) f[i] = (float)p[i];
    return mp_vload_f32(f);
}

#endif
