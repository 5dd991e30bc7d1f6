/* Functions of arrays of float by AVX-512, a block of vectors at a time, step by step: at most 2 units in the last place, the
 * same bits at every place. One vector after the other, the queues fill with steps that wait: four abreast take three quarters
 * of the time. Exponents, mantissas and powers of two are single instructions here, which know subnormals, infinities and NaN. */
#ifndef MP_FUNCTIONS_512_H
#define MP_FUNCTIONS_512_H

#include "mp_functions_vec.h"

#if MP_LANES == 16 && defined(__AVX512DQ__)
enum { MP_ALL = 0xffff }; /* a mask that leaves nothing out: without a mask, g++ warns of what these intrinsics do */
/* The smaller of both, NaN if x is; a b + c where c is a product, which compilers would fuse with the sum as well. */
MP_FN mp_vec mp_vceiling(mp_vec x, mp_vec y) { return (mp_vec)_mm512_maskz_min_ps(MP_ALL, (__m512)y, (__m512)x); }
MP_FN mp_vec mp_vfma(mp_vec a, mp_vec b, mp_vec c) { return (mp_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
MP_FN mp_vec mp_vscale(mp_vec x, mp_vec n) { return (mp_vec)_mm512_maskz_scalef_ps(MP_ALL, (__m512)x, (__m512)n); } /* x 2^n */
MP_FN mp_vec mp_vsigned(mp_vec size, const float *sign) /* a size that is not negative, with the sign of a number in memory */
{
    return (mp_vec)((mp_vec_u32)size | ((mp_vec_u32)mp_vload_f32(sign) & 0x80000000u));
}
MP_FN mp_vec mp_vpick(__mmask16 yes, mp_vec a, mp_vec b) { return (mp_vec)_mm512_mask_mov_ps((__m512)b, yes, (__m512)a); }
MP_FN __mmask16 mp_vis_odd(mp_vec bits) { return _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(1)); }

#define MP_BLOCK_FROM(v) MP_LATER MP_EACH(v[j] = mp_vload_f32(x + i + j * MP_LANES))
#define MP_BLOCK_TO(v) MP_EACH(mp_vstore(y + i + j * MP_LANES, v[j]))

/* e^x = 2^n e^r, |r| <= ln(2) / 2; so few numbers at a time that there are registers for twice as many vectors. */
#define MP_EXP_STEPS \
    { \
        mp_vec r[MP_BLOCK], whole[MP_BLOCK], p[MP_BLOCK]; \
        MP_BLOCK_FROM(r) \
        MP_EACH(r[j] = mp_vfloor(r[j], mp_splat(-104.0f))) \
        MP_EACH(r[j] = mp_vceiling(r[j], mp_splat(89.0f))) \
        MP_EACH(whole[j] = r[j] * 1.44269504f + magic) \
        MP_EACH(whole[j] = whole[j] - magic) \
        MP_EACH(r[j] = r[j] + whole[j] * -0.693359375f) \
        MP_EACH(r[j] = r[j] + whole[j] * 2.12194440e-4f) \
        MP_EACH(p[j] = r[j] * 0.00138979522f + 0.00836896803f) \
        MP_EACH(p[j] = p[j] * r[j] + 0.0416671485f) \
        MP_EACH(p[j] = p[j] * r[j] + 0.166665182f) \
        MP_EACH(p[j] = p[j] * r[j] + 0.499999970f) \
        MP_EACH(p[j] = p[j] * r[j] + 1.0f) \
        MP_EACH(p[j] = p[j] * r[j] + 1.0f) \
        MP_EACH(p[j] = mp_vscale(p[j], whole[j])) \
        MP_BLOCK_TO(p) \
    }
MP_SHARED mp_exp_blocks(float *y, const float *x, const int64_t n)
{
    const mp_vec magic = mp_splat(12582912.0f); /* 1.5 * 2^23 */
    int64_t i = 0;
    {
        enum { MP_BLOCK = 8 };
        MP_ONCE
        for (; i + MP_BLOCK * MP_LANES <= n; i += MP_BLOCK * MP_LANES) MP_EXP_STEPS
    }
    if (i < n) MP_EXP_STEPS
}

/* x = 2^k (1 + z), 3/4 <= 1 + z < 3/2. Of 0, infinity, NaN and negative numbers k or z is what the logarithm is. */
#define MP_NO_SIGN ((_MM_MANTISSA_SIGN_ENUM)3) /* of -0 none; negative numbers become NaN */
#define MP_LOG_PARTS(k, z) \
    MP_EACH(k[j] = (mp_vec)_mm512_maskz_getexp_ps(MP_ALL, (__m512)z[j])) \
    MP_EACH(z[j] = (mp_vec)_mm512_maskz_getmant_ps(MP_ALL, (__m512)z[j], _MM_MANT_NORM_p75_1p5, MP_NO_SIGN)) \
    MP_EACH(p[j] = (mp_vec)_mm512_maskz_getexp_ps(MP_ALL, (__m512)z[j])) \
    MP_EACH(z[j] = z[j] - 1.0f) \
    MP_EACH(k[j] = k[j] - p[j])
#define MP_LOG_POLYNOMIAL(c0, c1, c2, c3, c4, c5, ...) \
    MP_EACH(p[j] = __VA_ARGS__) \
    MP_EACH(p[j] = p[j] * z[j] + c5) \
    MP_EACH(p[j] = p[j] * z[j] + c4) \
    MP_EACH(p[j] = p[j] * z[j] + c3) \
    MP_EACH(p[j] = p[j] * z[j] + c2) \
    MP_EACH(p[j] = p[j] * z[j] + c1) \
    MP_EACH(p[j] = p[j] * z[j] + c0)
MP_SHARED mp_log_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec k[MP_BLOCK], z[MP_BLOCK], p[MP_BLOCK];
        MP_BLOCK_FROM(z)
        MP_LOG_PARTS(k, z)
        MP_LOG_POLYNOMIAL(-0.500000596f, 0.333335489f, -0.24993442f, 0.199770778f, -0.16822812f, 0.149839163f,
                          z[j] * 0.054132469f + -0.120673671f)
        MP_EACH(p[j] = p[j] * (z[j] * z[j]) + z[j])
        MP_EACH(p[j] = k[j] * 0.693147182f + p[j]) /* ln(2) is a float but for 2e-9 */
        MP_BLOCK_TO(p)
    }
}
MP_SHARED mp_log2_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec k[MP_BLOCK], z[MP_BLOCK], p[MP_BLOCK];
        MP_BLOCK_FROM(z)
        MP_LOG_PARTS(k, z)
        MP_EACH(p[j] = z[j] * -0.0647908673f + 0.150737569f)
        MP_LOG_POLYNOMIAL(-0.721347511f, 0.480900109f, -0.36067456f, 0.288403481f, -0.240176514f, 0.208931983f,
                          p[j] * z[j] + -0.189890876f)
        MP_EACH(p[j] = p[j] * z[j] + 1.92596303e-8f)
        MP_EACH(p[j] = p[j] * z[j])
        MP_EACH(p[j] = mp_vfma(z[j], mp_splat(1.44269502f), p[j]))
        MP_EACH(p[j] = k[j] + p[j])
        MP_BLOCK_TO(p)
    }
}
MP_SHARED mp_log10_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec k[MP_BLOCK], z[MP_BLOCK], p[MP_BLOCK];
        MP_BLOCK_FROM(z)
        MP_LOG_PARTS(k, z)
        MP_EACH(p[j] = z[j] * -0.0195039958f + 0.0453765281f)
        MP_LOG_POLYNOMIAL(-0.217147246f, 0.144765347f, -0.108573854f, 0.086818099f, -0.0723003373f, 0.0628947914f,
                          p[j] * z[j] + -0.0571628474f)
        MP_EACH(p[j] = p[j] * z[j] + -1.010305e-8f)
        MP_EACH(p[j] = p[j] * z[j])
        MP_EACH(p[j] = mp_vfma(k[j], mp_splat(1.54812140e-8f), p[j]))
        MP_EACH(p[j] = z[j] * 0.434294492f + p[j])
        MP_EACH(p[j] = k[j] * 0.301029980f + p[j])
        MP_BLOCK_TO(p)
    }
}

/* With h = (e^2|x| - 1) / 2, which loses nothing near 0: h / (h + 1). r is half of what 2|x| is beyond n ln(2). */
MP_SHARED mp_tanh_blocks(float *y, const float *x, const int64_t n)
{
    const mp_vec magic = mp_splat(12583039.0f); /* 1.5 * 2^23 + 127: an exponent's bias */
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec r[MP_BLOCK], whole[MP_BLOCK], p[MP_BLOCK], power[MP_BLOCK];
        MP_BLOCK_FROM(r)
        MP_EACH(r[j] = mp_vabs(r[j]))
        MP_EACH(r[j] = mp_vceiling(r[j], mp_splat(9.5f)))
        MP_EACH(whole[j] = r[j] * 2.88539009f + magic)
        MP_EACH(power[j] = mp_vpower(whole[j]); whole[j] = whole[j] - magic)
        MP_EACH(r[j] = r[j] + whole[j] * -0.346573591f) /* where n is large, what is lost does not count */
        MP_EACH(p[j] = r[j] * (32 * 0.00138979522f) + 16 * 0.00836896803f)
        MP_EACH(p[j] = p[j] * r[j] + 8 * 0.0416671485f)
        MP_EACH(p[j] = p[j] * r[j] + 4 * 0.166665182f)
        MP_EACH(p[j] = p[j] * r[j] + 2 * 0.499999970f)
        MP_EACH(p[j] = p[j] * (r[j] * r[j]) + r[j])
        MP_EACH(r[j] = power[j] * 0.5f + -0.5f)
        MP_EACH(p[j] = p[j] * power[j] + r[j])
        MP_EACH(r[j] = (mp_vec)_mm512_maskz_rcp14_ps(MP_ALL, (__m512)(p[j] + 1.0f)))
        MP_EACH(whole[j] = p[j] * r[j])
        MP_EACH(power[j] = p[j] - whole[j])
        MP_EACH(p[j] = power[j] - whole[j] * p[j]) /* what whole (1 + h) lacks of h */
        MP_EACH(p[j] = p[j] * r[j] + whole[j])
        MP_EACH(p[j] = mp_vsigned(p[j], x + i + j * MP_LANES))
        MP_BLOCK_TO(p)
    }
}

/* Of |x| or 1 / |x|, whichever is at most 1. */
MP_SHARED mp_atan_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec v[MP_BLOCK], q[MP_BLOCK], t[MP_BLOCK], p[MP_BLOCK];
        MP_BLOCK_FROM(v)
        MP_EACH(t[j] = mp_vabs(v[j]))
        MP_EACH(p[j] = mp_vfloor(t[j], mp_splat(1.0f)); t[j] = mp_vceiling(t[j], mp_splat(1.0f)))
        MP_EACH(p[j] = mp_vceiling(p[j], mp_splat(0x1p96f)))
        MP_EACH(q[j] = (mp_vec)_mm512_maskz_rcp14_ps(MP_ALL, (__m512)p[j]))
        MP_EACH(v[j] = t[j] * q[j])
        MP_EACH(t[j] = t[j] - v[j] * p[j])
        MP_EACH(q[j] = t[j] * q[j] + v[j])
        MP_EACH(t[j] = q[j] * q[j])
        MP_EACH(p[j] = t[j] * -0.00179362495f + 0.0109146172f)
        MP_EACH(p[j] = p[j] * t[j] + -0.0311778616f)
        MP_EACH(p[j] = p[j] * t[j] + 0.0579576045f)
        MP_EACH(p[j] = p[j] * t[j] + -0.0840345025f)
        MP_EACH(p[j] = p[j] * t[j] + 0.109521858f)
        MP_EACH(p[j] = p[j] * t[j] + -0.142642409f)
        MP_EACH(p[j] = p[j] * t[j] + 0.199985489f)
        MP_EACH(p[j] = p[j] * t[j] + -0.333332986f)
        MP_EACH(p[j] = p[j] * (t[j] * q[j]) + q[j])
        MP_EACH(t[j] = 1.57079637f - (p[j] - -4.37113883e-08f))
        MP_EACH(v[j] = mp_vabs(mp_vload_f32(x + i + j * MP_LANES)))
        MP_EACH(p[j] = mp_vpick(_mm512_cmp_ps_mask((__m512)v[j], _mm512_set1_ps(1.0f), _CMP_GT_OQ), t[j], p[j]))
        MP_EACH(p[j] = mp_vsigned(p[j], x + i + j * MP_LANES))
        MP_BLOCK_TO(p)
    }
}

/* |x| <= 2^15 as whole quarter turns, in the lowest bits of `whole`, and r + low, as mp_turn_nearf. */
#define MP_TURN(r, whole, low, lost) \
    MP_EACH(r[j] = mp_vabs(r[j]); largest = mp_vmost(largest, r[j])) \
    MP_EACH(whole[j] = r[j] * 0.636619747f + magic) \
    MP_EACH(low[j] = whole[j] - magic) \
    MP_EACH(r[j] = r[j] + low[j] * -1.57079637f) \
    MP_EACH(lost; r[j] = r[j] + low[j] * 4.37113883e-8f)
/* Larger ones are rare: their places are made anew by a function of one number. */
#define MP_FAR_TURNS(name) \
    MP_SHARED name##_far(mp_vec *made, const float *x) \
    { \
        float far[MP_BLOCK_FLOATS]; \
        MP_SIMD \
        for (int j = 0; j < MP_BLOCK_FLOATS; ++j) far[j] = name##_anyf(x[j], 0); \
        for (int j = 0; j < MP_BLOCK; ++j) { \
            const mp_vec size = mp_vabs(mp_vload_f32(x + j * MP_LANES)); \
            const __mmask16 beyond = _mm512_cmpgt_epu32_mask((__m512i)size, _mm512_set1_epi32(MP_QUICK_MOST)); \
            made[j] = mp_vpick(beyond, mp_vload_f32(far + j * MP_LANES), made[j]); \
        } \
    }
MP_FAR_TURNS(mp_sin)
MP_FAR_TURNS(mp_cos)
MP_FAR_TURNS(mp_tan)
/* sin(x + start quarter turns); `sign` as mp_wavef. */
#define MP_WAVE_BLOCKS(name, start, sign) \
    MP_SHARED name##_blocks(float *y, const float *x, const int64_t n) \
    { \
        const mp_vec magic = mp_splat(12582912.0f + (start)); \
        MP_ONCE \
        for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) { \
            mp_vec r[MP_BLOCK], q[MP_BLOCK], low[MP_BLOCK], t[MP_BLOCK], s[MP_BLOCK], c[MP_BLOCK], largest = mp_splat(0.0f); \
            MP_BLOCK_FROM(r) \
            MP_TURN(r, q, low, (void)0) \
            MP_EACH(t[j] = r[j] * r[j]) \
            MP_EACH(s[j] = t[j] * -0.000195108383f + 0.00833213143f; c[j] = t[j] * 2.43822506e-05f + -0.00138866785f) \
            MP_EACH(low[j] = low[j] * 1.71512451e-15f; c[j] = c[j] * t[j] + 0.0416666195f) \
            MP_EACH(s[j] = s[j] * t[j] + -0.166666538f; c[j] = c[j] * t[j] + -0.5f) \
            MP_EACH(s[j] = mp_vfma(s[j], r[j] * t[j], low[j]); c[j] = c[j] * t[j] + 1.0f) \
            MP_EACH(s[j] = s[j] + r[j]) \
            MP_EACH(s[j] = mp_vpick(mp_vis_odd(q[j]), c[j], s[j])) \
            MP_EACH(q[j] = (mp_vec)((mp_vec_u32)q[j] << 30 ^ (sign))) \
            MP_EACH(s[j] = (mp_vec)((mp_vec_u32)s[j] ^ ((mp_vec_u32)q[j] & 0x80000000u))) \
            if (__builtin_expect(mp_vbeyond(largest, MP_QUICK_MOST), 0)) name##_far(s, x + i); \
            MP_BLOCK_TO(s) \
        } \
    }
MP_SHARED mp_tan_blocks(float *y, const float *x, const int64_t n)
{
    const mp_vec magic = mp_splat(12582912.0f);
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec v[MP_BLOCK], r[MP_BLOCK], q[MP_BLOCK], low[MP_BLOCK], t[MP_BLOCK], e[MP_BLOCK], o[MP_BLOCK];
        mp_vec largest = mp_splat(0.0f);
        MP_BLOCK_FROM(r)
        MP_TURN(r, q, low, v[j] = r[j])
        MP_EACH(t[j] = r[j] * r[j]; v[j] = v[j] - r[j])
        MP_EACH(v[j] = v[j] + low[j] * 4.37113883e-8f) /* what rounding took from r; below 2^-9 not exact, and not needed */
        MP_EACH(v[j] = mp_vpick(_mm512_cmpge_epu32_mask((__m512i)t[j], _mm512_set1_epi32(0x36800000)), v[j], mp_splat(0.0f)))
        MP_EACH(low[j] = low[j] * 1.71512451e-15f + v[j]; v[j] = t[j] * t[j])
        MP_EACH(e[j] = v[j] * 0.00438558916f + 0.0108442176f; o[j] = v[j] * 7.43613418e-5f + 0.0212806985f)
        MP_EACH(e[j] = e[j] * v[j] + 0.0540597439f; o[j] = o[j] * v[j] + 0.133326709f)
        MP_EACH(e[j] = e[j] * t[j] + o[j])
        MP_EACH(e[j] = e[j] * t[j] + 0.333333492f; t[j] = r[j] * t[j])
        MP_EACH(e[j] = e[j] * t[j] + low[j])
        MP_EACH(t[j] = e[j] + r[j])
        MP_EACH(o[j] = (mp_vec)_mm512_maskz_rcp14_ps(MP_ALL, (__m512)t[j]); e[j] = e[j] - (t[j] - r[j]))
        MP_EACH(r[j] = o[j] * t[j] + -1.0f)
        MP_EACH(o[j] = o[j] * r[j] - o[j])
        MP_EACH(r[j] = o[j] * t[j] + 1.0f)
        MP_EACH(r[j] = o[j] * e[j] + r[j])
        MP_EACH(o[j] = o[j] * r[j] + o[j])
        MP_EACH(t[j] = mp_vpick(mp_vis_odd(q[j]), o[j], t[j]))
        MP_EACH(t[j] = (mp_vec)((mp_vec_u32)t[j] ^ ((mp_vec_u32)mp_vload_f32(x + i + j * MP_LANES) & 0x80000000u)))
        if (__builtin_expect(mp_vbeyond(largest, MP_QUICK_MOST), 0)) mp_tan_far(t, x + i);
        MP_BLOCK_TO(t)
    }
}
MP_WAVE_BLOCKS(mp_sin, 0.0f, (mp_vec_u32)mp_vload_f32(x + i + j * MP_LANES))
MP_WAVE_BLOCKS(mp_cos, 1.0f, 0u)

/* Rounded as IEEE 754 wants it, from an approximation of 14 bits: what g^2 lacks of x is exact, and divided by 2g closes the
 * gap. 0 stays 0; a block with numbers below 2^-100, infinity or NaN is made by the division unit, with the same bits. */
MP_SHARED mp_sqrt_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec v[MP_BLOCK], g[MP_BLOCK], h[MP_BLOCK], d[MP_BLOCK], largest = mp_splat(0.0f);
        MP_BLOCK_FROM(v)
        MP_EACH(h[j] = (mp_vec)_mm512_maskz_rsqrt14_ps(_mm512_cmp_ps_mask((__m512)v[j], _mm512_setzero_ps(), _CMP_NEQ_UQ),
                                                       (__m512)v[j]))
        MP_EACH(g[j] = v[j] * h[j]; h[j] = h[j] * 0.5f)
        MP_EACH(d[j] = 0.5f - g[j] * h[j])
        MP_EACH(g[j] = g[j] * d[j] + g[j]; h[j] = h[j] * d[j] + h[j])
        MP_EACH(d[j] = v[j] - g[j] * g[j]; largest = mp_vmost(largest, h[j]))
        MP_EACH(g[j] = h[j] * d[j] + g[j])
        if (__builtin_expect(mp_vbeyond(largest, 0x58000000u), 0)) /* 2^49 or NaN */
            MP_EACH(g[j] = (mp_vec)_mm512_maskz_sqrt_ps(MP_ALL, (__m512)v[j]))
        MP_BLOCK_TO(g)
    }
}
/* From the same approximation, which is exact for 0, infinity and NaN. */
MP_SHARED mp_rsqrt_blocks(float *y, const float *x, const int64_t n)
{
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        mp_vec v[MP_BLOCK], r[MP_BLOCK], e[MP_BLOCK];
        MP_BLOCK_FROM(v)
        MP_EACH(r[j] = (mp_vec)_mm512_maskz_rsqrt14_ps(MP_ALL, (__m512)v[j]))
        MP_EACH(e[j] = v[j] * r[j])
        MP_EACH(e[j] = 1.0f - e[j] * r[j])
        MP_EACH(v[j] = e[j] * 0.375f + 0.5f)
        MP_EACH(v[j] = v[j] * (e[j] * r[j]) + r[j])
        MP_EACH(r[j] = mp_vpick(_mm512_cmp_ps_mask((__m512)e[j], (__m512)e[j], _CMP_ORD_Q), v[j], r[j]))
        MP_BLOCK_TO(r)
    }
}
#endif
#endif
