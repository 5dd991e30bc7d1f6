/* exp, log, sin and their kin, one text for every instruction set: scalar functions without branches or tables, which loops
 * inline and compilers turn into vectors, so that the body of a loop and its tail compute the same bits. At most 2 units
 * in the last place, with subnormals, infinities and NaN as C has them (tests/codegen/test_functions.py). Coefficients are
 * minimax fits. mp_functions_more.h has those that few plans need, and all of double. */
#ifndef MP_FUNCTIONS_H
#define MP_FUNCTIONS_H

MP_FN double mp_bits_to_double(uint64_t u) { double f; memcpy(&f, &u, 8); return f; }
MP_FN uint64_t mp_double_to_bits(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }

/* a * b + c, rounded once where the machine does that. */
#if defined(__FMA__) || defined(__aarch64__)
#define MP_FUSED 1
MP_FN float mp_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MP_FN double mp_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
#define MP_FUSED 0
MP_FN float mp_fmaf(float a, float b, float c) { return a * b + c; }
MP_FN double mp_fma(double a, double b, double c) { return a * b + c; }
#endif

/* x between bounds below and above 0. NaN becomes one of them in float, and mp_or_nan gives it back at the end: compilers
 * make one instruction of a test of bits, and of a test of floats up to seven, since NaN has to come out right. */
MP_FN float mp_boundedf(float x, float least, float most)
{
    const int32_t i = (int32_t)mp_float_to_bits(x), top = (int32_t)mp_float_to_bits(most);
    const uint32_t u = (uint32_t)(i < top ? i : top), bottom = mp_float_to_bits(least);
    return mp_bits_to_float(u < bottom ? u : bottom);
}
MP_FN double mp_bounded(double x, double least, double most)
{
    const double y = x < least ? least : x;
    return x > most ? most : y;
}
/* The larger and the smaller of two numbers that are not negative. */
MP_FN float mp_above_bothf(float x, float y)
{
    const uint32_t u = mp_float_to_bits(x), v = mp_float_to_bits(y);
    return mp_bits_to_float(u > v ? u : v);
}
MP_FN float mp_below_bothf(float x, float y)
{
    const uint32_t u = mp_float_to_bits(x), v = mp_float_to_bits(y);
    return mp_bits_to_float(u < v ? u : v);
}
/* |x|, at most a bound. */
MP_FN float mp_abs_belowf(float x, float most)
{
    const uint32_t u = mp_float_to_bits(x) & 0x7fffffffu, top = mp_float_to_bits(most);
    return mp_bits_to_float(u < top ? u : top);
}
MP_FN double mp_abs_below(double x, double most) { return fabs(x) > most ? most : fabs(x); }
MP_FN float mp_or_nanf(float y, float x) { return x == x ? y : x; }
MP_FN double mp_or_nan(double y, double x) { return x == x ? y : x; }

/* Polynomials, the coefficient of the lowest power first; F is mp_fmaf or mp_fma. */
#define MP_P2(F, x, a, b) F(b, x, a)
#define MP_P3(F, x, a, ...) F(MP_P2(F, x, __VA_ARGS__), x, a)
#define MP_P4(F, x, a, ...) F(MP_P3(F, x, __VA_ARGS__), x, a)
#define MP_P5(F, x, a, ...) F(MP_P4(F, x, __VA_ARGS__), x, a)
#define MP_P6(F, x, a, ...) F(MP_P5(F, x, __VA_ARGS__), x, a)
#define MP_P7(F, x, a, ...) F(MP_P6(F, x, __VA_ARGS__), x, a)
#define MP_P8(F, x, a, ...) F(MP_P7(F, x, __VA_ARGS__), x, a)
#define MP_P9(F, x, a, ...) F(MP_P8(F, x, __VA_ARGS__), x, a)
#define MP_P10(F, x, a, ...) F(MP_P9(F, x, __VA_ARGS__), x, a)
#define MP_P11(F, x, a, ...) F(MP_P10(F, x, __VA_ARGS__), x, a)
#define MP_P12(F, x, a, ...) F(MP_P11(F, x, __VA_ARGS__), x, a)
#define MP_P13(F, x, a, ...) F(MP_P12(F, x, __VA_ARGS__), x, a)
#define MP_P14(F, x, a, ...) F(MP_P13(F, x, __VA_ARGS__), x, a)
#define MP_P15(F, x, a, ...) F(MP_P14(F, x, __VA_ARGS__), x, a)
#define MP_P16(F, x, a, ...) F(MP_P15(F, x, __VA_ARGS__), x, a)
#define MP_P17(F, x, a, ...) F(MP_P16(F, x, __VA_ARGS__), x, a)
#define MP_P18(F, x, a, ...) F(MP_P17(F, x, __VA_ARGS__), x, a)
#define MP_P19(F, x, a, ...) F(MP_P18(F, x, __VA_ARGS__), x, a)
#define MP_P20(F, x, a, ...) F(MP_P19(F, x, __VA_ARGS__), x, a)

/* (e^r - 1 - r) / r^2 for |r| <= ln(2), and for |r| <= ln(2) / 2. By pairs of terms, which do not wait for each other. */
MP_FN float mp_exp_polyf(float r)
{
    const float t = r * r, high = mp_fmaf(t, 2.4438732e-05f, mp_fmaf(r, 0.000201108618f, 0.00138937403f));
    return mp_fmaf(t, mp_fmaf(t, high, mp_fmaf(r, 0.00833252165f, 0.0416665226f)), mp_fmaf(r, 0.166666746f, 0.5f));
}
MP_FN float mp_exp_near_polyf(float r)
{
    const float t = r * r, high = mp_fmaf(t, 0.00138979522f, mp_fmaf(r, 0.00836896803f, 0.0416671485f));
    return mp_fmaf(t, high, mp_fmaf(r, 0.166665182f, 0.499999970f));
}

#define MP_FIRST
#define MP_REAL float
#define MP_BITS_TYPE uint32_t
#define MP_NAME(name) name##f
#define MP_TO_BITS mp_float_to_bits
#define MP_OF_BITS mp_bits_to_float
#define MP_MANTISSA 23
#define MP_BIAS 127u
#define MP_ROUND 12582912.0f /* 1.5 * 2^23: what is added to it is rounded to an integer, which is in the lowest bits */
#define MP_C(single, double_) single
#include "mp_functions_real.h"
#undef MP_REAL
#undef MP_BITS_TYPE
#undef MP_NAME
#undef MP_TO_BITS
#undef MP_OF_BITS
#undef MP_MANTISSA
#undef MP_BIAS
#undef MP_ROUND
#undef MP_C
#undef MP_FIRST
#endif
