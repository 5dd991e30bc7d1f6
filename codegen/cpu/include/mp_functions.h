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
MP_FN float mp_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MP_FN double mp_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
MP_FN float mp_fmaf(float a, float b, float c) { return a * b + c; }
MP_FN double mp_fma(double a, double b, double c) { return a * b + c; }
#endif

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

/* (e^r - 1 - r) / r^2 for |r| <= ln(2), (tanh(x) - x) / x^3 over x^2 <= 0.303. */
MP_FN float mp_exp_polyf(float r)
{
    return MP_P7(mp_fmaf, r, 0.5f, 0.166666746f, 0.0416665226f, 0.00833252165f, 0.00138937403f, 0.000201108618f, 2.4438732e-05f);
}
MP_FN float mp_tanh_polyf(float t)
{
    return MP_P5(mp_fmaf, t, -0.333333164f, 0.133325756f, -0.0538511686f, 0.021066647f, -0.00626668567f);
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
