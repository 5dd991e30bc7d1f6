/* Element types and scalar functions. The float forms of exp and its kin have no branches, so loops vectorize. */
#ifndef MP_MATH_H
#define MP_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t mp_bf16;
typedef uint16_t mp_f16;

#define MP_FN static inline __attribute__((always_inline, unused))
/* `body` with the value under a name; of two expressions that of this target. The same text serves C and CUDA. */
#define MP_LET(type, name, value, body) __extension__ ({ const type name = value; body; })
#define MP_C_OR_CUDA(c, cuda) c

MP_FN float mp_bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
MP_FN uint32_t mp_float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

MP_FN float mp_load_bf16(mp_bf16 h) { return mp_bits_to_float((uint32_t)h << 16); }

/* Round to nearest, ties to even; NaN stays NaN. */
MP_FN mp_bf16 mp_to_bf16(float f)
{
    const uint32_t u = mp_float_to_bits(f);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (mp_bf16)(f != f ? (u >> 16) | 0x40u : rounded);
}

#if defined(__FLT16_MANT_DIG__)
MP_FN float mp_load_f16(mp_f16 h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
MP_FN mp_f16 mp_to_f16(float f) { const _Float16 x = (_Float16)f; mp_f16 h; memcpy(&h, &x, 2); return h; }
#else
MP_FN float mp_load_f16(mp_f16 h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu;
    const float magnitude = mp_bits_to_float(body << 13) * mp_bits_to_float(0x77800000u); /* 2^112 rebias */
    const uint32_t special = body >= 0x7c00u ? 0x7f800000u | ((body & 0x3ffu) << 13) : mp_float_to_bits(magnitude);
    return mp_bits_to_float(sign | special);
}
MP_FN mp_f16 mp_to_f16(float f)
{
    const uint32_t u = mp_float_to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (mp_f16)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (mp_f16)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* subnormal: let the FPU round at 2^-24 */
        const float scaled = mp_bits_to_float(a) + 0.5f;
        return (mp_f16)(sign | (mp_float_to_bits(scaled) - 0x3f000000u));
    }
    return (mp_f16)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}
#endif

/* e^r for |r| <= ln2/2, of y = n ln2 + r; relative error 2e-7. */
MP_FN float mp_exp_rest(float y, float n)
{
    const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

/* exp by 2^n e^r; relative error 2e-7; 0 and inf beyond the range, NaN kept. */
MP_FN float mp_expf(float x)
{
    const float clamped = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    const float n = rintf(clamped * 1.44269504088896341f);
    const float p = mp_exp_rest(clamped, n);
    const int32_t e = (int32_t)(x != x ? 0.0f : n);
    const int32_t half = e / 2; /* in two steps, so that 2^n may be subnormal or overflow */
    const float y = p * mp_bits_to_float((uint32_t)(half + 127) << 23) * mp_bits_to_float((uint32_t)(e - half + 127) << 23);
    return x != x ? x : x > 88.7228394f ? INFINITY : y;
}
MP_FN double mp_exp(double x) { return exp(x); }

MP_FN float mp_rsqrtf(float x) { return 1.0f / sqrtf(x); }
MP_FN double mp_rsqrt(double x) { return 1.0 / sqrt(x); }

/* 1 / (1 + e^x) without the divider, which is slow for vectors, and without cases: a guess from the bits, then Newton's
 * steps; error 2e-7. Adding 1.5 * 2^23 + 127 rounds to a whole number and leaves it, biased as an exponent is, in the
 * lowest bits. */
MP_FN float mp_logisticf(float x)
{
    const float below = x > 87.0f ? 87.0f : x, y = below < -87.0f ? -87.0f : below; /* NaN stays */
    const float t = y * 1.44269504088896341f + 12583039.0f, n = t - 12583039.0f;
    const float d = mp_exp_rest(y, n) * mp_bits_to_float(mp_float_to_bits(t) << 23) + 1.0f;
    float q = mp_bits_to_float(0x7ef311c7u - mp_float_to_bits(d));
    q = q * (2.0f - d * q);
    q = q * (2.0f - d * q);
    return q + q * (1.0f - d * q);
}
MP_FN float mp_sigmoidf(float x) { return x < -87.0f ? 0.0f : mp_logisticf(-x); }
MP_FN double mp_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

/* tanh by exp where |x| is not small, by its series where the difference would cancel. */
MP_FN float mp_tanhf(float x)
{
    const float a = fabsf(x), e = mp_expf(-2.0f * a), x2 = x * x;
    const float large = (1.0f - e) / (1.0f + e);
    const float small = a * (1.0f + x2 * (-0.333333313f + x2 * (0.133314773f + x2 * (-0.0537397365f + x2 * 0.0206390887f))));
    const float y = a < 0.4f ? small : large;
    return x < 0.0f ? -y : x != x ? x : y;
}
MP_FN double mp_tanh(double x) { return tanh(x); }

/* What is nearer to 0 than 2e-36 becomes 0. */
MP_FN float mp_siluf(float x) { return x < -87.0f ? 0.0f : x * mp_logisticf(-x); }
MP_FN double mp_silu(double x) { return x == -INFINITY ? 0.0 : x / (1.0 + exp(-x)); }
MP_FN float mp_swigluf(float gate, float up) { return mp_siluf(gate) * up; }
MP_FN double mp_swiglu(double gate, double up) { return mp_silu(gate) * up; }

MP_FN float mp_gelu_nonef(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
MP_FN double mp_gelu_none(double x) { return 0.5 * x * (1.0 + erf(x * 0.70710678118654752)); }
/* 0.5x(1 + tanh z) is x / (1 + exp(-2z)): one exp, and nothing cancels where x is negative. */
MP_FN float mp_gelu_tanhf(float x) { return x / (1.0f + mp_expf(-1.59576912160573072f * (x + 0.044715f * x * x * x))); }
MP_FN double mp_gelu_tanh(double x) { return x / (1.0 + exp(-1.59576912160573072 * (x + 0.044715 * x * x * x))); }
MP_FN float mp_gelu_fastf(float x) { return x == -INFINITY ? 0.0f : x / (1.0f + mp_expf(-1.702f * x)); }
MP_FN double mp_gelu_fast(double x) { return x == -INFINITY ? 0.0 : x / (1.0 + exp(-1.702 * x)); }
MP_FN float mp_gelu_fast_tanhf(float x) { return x / (1.0f + mp_expf(-3.404f * x)); }
MP_FN double mp_gelu_fast_tanh(double x) { return x / (1.0 + exp(-3.404 * x)); }

/* NaN wins, as in numpy. */
#define MP_EXTREMES(name, type) \
    MP_FN type mp_maximum_##name(type a, type b) { return a > b || a != a ? a : b; } \
    MP_FN type mp_minimum_##name(type a, type b) { return a < b || a != a ? a : b; }
MP_EXTREMES(f32, float)
MP_EXTREMES(f64, double)
MP_EXTREMES(i8, int8_t)
MP_EXTREMES(i16, int16_t)
MP_EXTREMES(i32, int32_t)
MP_EXTREMES(i64, int64_t)
MP_EXTREMES(u8, uint8_t)
MP_EXTREMES(u16, uint16_t)
MP_EXTREMES(u32, uint32_t)
MP_EXTREMES(u64, uint64_t)

MP_FN int8_t mp_abs_i8(int8_t x) { return (int8_t)(x < 0 ? -x : x); }
MP_FN int16_t mp_abs_i16(int16_t x) { return (int16_t)(x < 0 ? -x : x); }
MP_FN int32_t mp_abs_i32(int32_t x) { return x < 0 ? -x : x; }
MP_FN int64_t mp_abs_i64(int64_t x) { return x < 0 ? -x : x; }

#endif
