/* Element types and scalar functions. */
#ifndef MP_MATH_H
#define MP_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "mp_cxx.h"

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

#if defined(MP_HAS_FLOAT16)
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

#include "mp_functions.h"

MP_FN float mp_rsqrtf(float x) { return 1.0f / sqrtf(x); }
MP_FN double mp_rsqrt(double x) { return 1.0 / sqrt(x); }

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

/* Integers in the order of floats, so that compilers find the largest by vectors; NaN is `nan`. */
MP_FN int32_t mp_order_f32(float v, int32_t nan)
{
    const int32_t i = (int32_t)mp_float_to_bits(v);
    return v == v ? i ^ ((i >> 31) & 0x7fffffff) : nan;
}
MP_FN float mp_of_order_f32(int32_t i) { return mp_bits_to_float((uint32_t)(i ^ ((i >> 31) & 0x7fffffff))); }

MP_FN int8_t mp_abs_i8(int8_t x) { return (int8_t)(x < 0 ? -x : x); }
MP_FN int16_t mp_abs_i16(int16_t x) { return (int16_t)(x < 0 ? -x : x); }
MP_FN int32_t mp_abs_i32(int32_t x) { return x < 0 ? -x : x; }
MP_FN int64_t mp_abs_i64(int64_t x) { return x < 0 ? -x : x; }

/* Integers divided by 0 are 0; the smallest one by -1 wraps around, where the CPU's own division would trap. */
#define MP_SIGNED_DIVISION(name, type, wide) \
    MP_FN type mp_fmod_##name(type a, type b) { return (type)(b == 0 || b == -1 ? 0 : a % b); } \
    MP_FN type mp_remainder_##name(type a, type b) \
    { \
        const type r = mp_fmod_##name(a, b); \
        return (type)(r != 0 && (r < 0) != (b < 0) ? r + b : r); \
    } \
    MP_FN type mp_floor_divide_##name(type a, type b) \
    { \
        if (b == 0 || b == -1) return (type)(b == 0 ? 0 : (wide)0 - (wide)a); \
        return (type)(a / b - (a % b != 0 && (a < 0) != (b < 0))); \
    }
MP_SIGNED_DIVISION(i8, int8_t, uint8_t)
MP_SIGNED_DIVISION(i16, int16_t, uint16_t)
MP_SIGNED_DIVISION(i32, int32_t, uint32_t)
MP_SIGNED_DIVISION(i64, int64_t, uint64_t)

#define MP_UNSIGNED_DIVISION(name, type) \
    MP_FN type mp_fmod_##name(type a, type b) { return (type)(b == 0 ? 0 : a % b); } \
    MP_FN type mp_remainder_##name(type a, type b) { return (type)(b == 0 ? 0 : a % b); } \
    MP_FN type mp_floor_divide_##name(type a, type b) { return (type)(b == 0 ? 0 : a / b); }
MP_UNSIGNED_DIVISION(u8, uint8_t)
MP_UNSIGNED_DIVISION(u16, uint16_t)
MP_UNSIGNED_DIVISION(u32, uint32_t)
MP_UNSIGNED_DIVISION(u64, uint64_t)

/* The remainder is exact, so the quotient is a whole number but for one rounding. */
#define MP_FLOAT_DIVISION(name, type, f) \
    MP_FN type mp_sign_##name(type x) { return (type)((x > 0) - (x < 0)); } \
    MP_FN type mp_fmod_##name(type a, type b) { return fmod##f(a, b); } \
    MP_FN type mp_remainder_##name(type a, type b) \
    { \
        const type r = fmod##f(a, b); \
        return r != 0 && (r < 0) != (b < 0) ? r + b : r; \
    } \
    MP_FN type mp_floor_divide_##name(type a, type b) \
    { \
        if (b == 0) return a / b; \
        const type r = fmod##f(a, b), whole = (a - r) / b - (r != 0 && (r < 0) != (b < 0) ? 1 : 0); \
        return whole == 0 ? copysign##f(0, a / b) : rint##f(whole); \
    }
MP_FLOAT_DIVISION(f32, float, f)
MP_FLOAT_DIVISION(f64, double, )

#define MP_SHIFTS(name, type, wide) \
    MP_FN type mp_left_shift_##name(type a, type b) \
    { \
        return (uint64_t)b < 8 * sizeof(type) ? (type)((wide)a << b) : (type)0; \
    } \
    MP_FN type mp_right_shift_##name(type a, type b) \
    { \
        return (uint64_t)b < 8 * sizeof(type) ? (type)(a >> b) : (type)(a >> (8 * sizeof(type) - 1) >> 1); \
    }
MP_SHIFTS(i8, int8_t, uint8_t)
MP_SHIFTS(i16, int16_t, uint16_t)
MP_SHIFTS(i32, int32_t, uint32_t)
MP_SHIFTS(i64, int64_t, uint64_t)
MP_SHIFTS(u8, uint8_t, uint8_t)
MP_SHIFTS(u16, uint16_t, uint16_t)
MP_SHIFTS(u32, uint32_t, uint32_t)
MP_SHIFTS(u64, uint64_t, uint64_t)

#define MP_POWER(name, type, wide, negative) \
    MP_FN type mp_power_##name(type a, type b) \
    { \
        if (negative) return (type)(a == 1 ? 1 : a == (type)-1 ? (b & 1 ? -1 : 1) : 0); \
        wide power = 1, square = (wide)a; \
        for (wide rest = (wide)b; rest; rest = (wide)(rest >> 1), square = (wide)((uint64_t)square * square)) \
            if (rest & 1) power = (wide)((uint64_t)power * square); \
        return (type)power; \
    }
MP_POWER(i8, int8_t, uint8_t, b < 0)
MP_POWER(i16, int16_t, uint16_t, b < 0)
MP_POWER(i32, int32_t, uint32_t, b < 0)
MP_POWER(i64, int64_t, uint64_t, b < 0)
MP_POWER(u8, uint8_t, uint8_t, 0)
MP_POWER(u16, uint16_t, uint16_t, 0)
MP_POWER(u32, uint32_t, uint32_t, 0)
MP_POWER(u64, uint64_t, uint64_t, 0)

#endif
