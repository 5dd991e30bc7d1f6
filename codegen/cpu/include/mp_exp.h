/* 2^x and what is made of it, by vectors. */
#ifndef MP_EXP_H
#define MP_EXP_H

#include "mp_tile.h"

#if MP_LANES > 1
MP_FN mp_vec mp_vchoose(mp_vec_u32 yes, mp_vec a, mp_vec b)
{
    return (mp_vec)((yes & (mp_vec_u32)a) | (~yes & (mp_vec_u32)b));
}
#define MP_BITS(test) ((mp_vec_u32)(test))
MP_FN float mp_vfirst(mp_vec v) { return v[0]; }
MP_FN mp_vec mp_vpower(mp_vec t) { return (mp_vec)((mp_vec_u32)t << 23); }
#else
typedef uint32_t mp_vec_u32;
MP_FN mp_vec mp_vchoose(mp_vec_u32 yes, mp_vec a, mp_vec b) { return yes ? a : b; }
#define MP_BITS(test) ((test) ? ~0u : 0u)
MP_FN float mp_vfirst(mp_vec v) { return v; }
MP_FN mp_vec mp_vpower(mp_vec t) { return mp_bits_to_float(mp_float_to_bits(t) << 23); }
#endif

/* The larger of both. mp_vmax passes over a NaN in x; mp_vfloor keeps it. */
#if MP_LANES == 16 && defined(__AVX512F__)
#include <immintrin.h>
MP_FN mp_vec mp_vmax(mp_vec x, mp_vec y) { return (mp_vec)_mm512_max_ps((__m512)x, (__m512)y); }
MP_FN mp_vec mp_vfloor(mp_vec x, mp_vec y) { return (mp_vec)_mm512_max_ps((__m512)y, (__m512)x); }
#elif MP_LANES == 8 && defined(__AVX2__)
#include <immintrin.h>
MP_FN mp_vec mp_vmax(mp_vec x, mp_vec y) { return (mp_vec)_mm256_max_ps((__m256)x, (__m256)y); }
MP_FN mp_vec mp_vfloor(mp_vec x, mp_vec y) { return (mp_vec)_mm256_max_ps((__m256)y, (__m256)x); }
#elif MP_LANES == 4 && defined(__aarch64__) /* no arm_neon.h: a compiler reads it longer than most kernels */
#define MP_NEON_PAIR(name, instruction) \
    MP_FN mp_vec name(mp_vec x, mp_vec y) \
    { \
        mp_vec made; \
        __asm__(instruction " %0.4s, %1.4s, %2.4s" : "=w"(made) : "w"(x), "w"(y)); \
        return made; \
    }
MP_NEON_PAIR(mp_vmax, "fmaxnm")
MP_NEON_PAIR(mp_vfloor, "fmax")
#else
MP_FN mp_vec mp_vmax(mp_vec x, mp_vec y) { return mp_vchoose(MP_BITS(x > y), x, y); }
MP_FN mp_vec mp_vfloor(mp_vec x, mp_vec y) { return mp_vchoose(MP_BITS(x < y), y, x); }
#endif

/* 2^x for x <= 0, relative error 1.7e-7; 2^0 is 1 exactly, what is below 2^-126 becomes 0, NaN stays. Adding 1.5 * 2^23
 * rounds x to an integer and leaves that integer, biased as an exponent is, in the lowest bits. */
MP_FN mp_vec mp_vexp2(mp_vec x)
{
    const mp_vec magic = mp_splat(12583039.0f), y = mp_vfloor(x, mp_splat(-127.0f)), t = y + magic, f = y - (t - magic);
    mp_vec p = mp_splat(1.326472731e-3f);
    p = p * f + 9.671512991e-3f;
    p = p * f + 5.550733581e-2f;
    p = p * f + 2.402224243e-1f;
    p = p * f + 6.931470037e-1f;
    p = p * f + 1.0f;
    return p * mp_vpower(t);
}

/* As mp_vexp2, for x <= 126 and with a relative error of 1e-4, also of 2^0: enough for what is rounded to bf16. */
MP_FN mp_vec mp_vexp2_short(mp_vec x)
{
#if MP_LANES == 16 && defined(__AVX512DQ__) && !defined(MP_TILES_EMULATED)
    const mp_vec f = (mp_vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF); /* x - floor(x); of an infinite x 0 */
    mp_vec p = mp_splat(7.802452e-2f);
    p = p * f + 2.2606717e-1f;
    p = p * f + 6.9583353e-1f;
    p = p * f + 9.9992522e-1f;
    return (mp_vec)_mm512_scalef_ps((__m512)p, (__m512)x); /* p * 2^floor(x) */
#else
    const mp_vec magic = mp_splat(12583039.0f), y = mp_vfloor(x, mp_splat(-127.0f)), t = y + magic, f = y - (t - magic);
    mp_vec p = mp_splat(5.500892922e-2f);
    p = p * f + 2.422109544e-1f;
    p = p * f + 6.932829022e-1f;
    p = p * f + 1.0f;
    return p * mp_vpower(t);
#endif
}

/* gate / (1 + e^-gate) * up for results that are rounded to bf16: relative error 2e-4, few instructions and a short chain of
 * them, so that tile units need not wait. What a gate below -87 lets through is nearer to 0 than 2e-36 times up. */
MP_FN mp_vec mp_vswiglu_short(mp_vec gate, mp_vec up)
{
    const mp_vec g = mp_vfloor(gate, mp_splat(-87.0f)); /* NaN stays */
    const mp_vec d = mp_vexp2_short(g * -1.44269504088896341f) + 1.0f;
#if MP_LANES == 16 && defined(__AVX512F__)
    return g * (mp_vec)_mm512_rcp14_ps((__m512)d) * up;
#else
    return g / d * up;
#endif
}

#if MP_LANES > 1
/* x Phi(x) likewise: Phi(x) = 1 / (1 + 2^-w), where w is odd; |w| is |x| times a polynomial of -|x|. What lies below -7 is
 * nearer to 0 than 1e-11. */
MP_FN mp_vec mp_vgelu_short(mp_vec x)
{
    const mp_vec g = mp_vfloor(x, mp_splat(-7.0f)); /* NaN stays */
    const mp_vec a = mp_vfloor((mp_vec)((mp_vec_u32)g | 0x80000000u), mp_splat(-7.0f)), t = a * a;
    const mp_vec low = (a * 2.44048805e-2f - 2.29760709f) + t * (a * 3.42802288e-2f - 6.19039615e-2f);
    const mp_vec high = (a * 2.09542856e-3f + 1.33265683e-2f) + t * (a * 4.92940362e-6f + 1.60616405e-4f);
    const mp_vec w = a * (low + t * t * high); /* not negative */
    const mp_vec d = mp_vexp2_short((mp_vec)((mp_vec_u32)w ^ (~(mp_vec_u32)g & 0x80000000u))) + 1.0f;
#if MP_LANES == 16 && defined(__AVX512F__)
    return g * (mp_vec)_mm512_rcp14_ps((__m512)d);
#else
    return g / d;
#endif
}
#endif
#endif
