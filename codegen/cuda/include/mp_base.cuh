/* Element types, scalar functions and errors of every generated kernel. Includes nothing under NVRTC, so it needs no -I. */
#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INT8_MIN (-128)
#define INT16_MIN (-32767 - 1)
#define INT32_MIN (-2147483647 - 1)
#define INT64_MIN (-9223372036854775807ll - 1)
#else
#include <math.h>
#include <stdint.h>
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

#define MP_UNUSED [[maybe_unused]]
#define MP_FN __device__ __forceinline__
/* `body` with the value under a name; of two expressions that of this target. The same text serves C and CUDA. */
#define MP_LET(type, name, value, body) ([&](const type name) { return body; }(value))
#define MP_C_OR_CUDA(c, cuda) cuda
#define MP_PRAGMA(text) _Pragma(#text)
#define MP_UNROLL MP_PRAGMA(unroll)
#define MP_UNROLL_BY(n) MP_PRAGMA(unroll n)

/* Half floats are types of their own, so that functions can be chosen by them; they are computed in float. */
struct mp_bf16 { uint16_t bits; };
struct mp_f16 { uint16_t bits; };

/* A page of a cache, by a table's number for it. One that the cache does not have becomes its last: the host refuses such
 * tables, but it does not see those in device memory, and nothing else may be read or written. */
#define MP_PAGE(number, pages) mp_page(number, pages)
MP_FN int64_t mp_page(const int32_t number, const int64_t pages)
{
    return (uint64_t)(uint32_t)number < (uint64_t)pages ? number : pages - 1;
}

MP_FN float mp_bits_to_float(uint32_t u) { return __uint_as_float(u); }
MP_FN uint32_t mp_float_to_bits(float f) { return __float_as_uint(f); }

MP_FN float mp_load_bf16(mp_bf16 h) { return mp_bits_to_float((uint32_t)h.bits << 16); }
MP_FN float mp_load_f16(mp_f16 h) { return mp_half_to_float(h.bits); }
MP_FN float mp_float(float f) { return f; }
MP_FN float mp_float(mp_bf16 h) { return mp_load_bf16(h); }
MP_FN float mp_float(mp_f16 h) { return mp_load_f16(h); }
MP_FN mp_bf16 mp_to_bf16(float f) { return mp_bf16{mp_float_to_brain(f)}; }
MP_FN mp_f16 mp_to_f16(float f) { return mp_f16{mp_float_to_half(f)}; }
template <typename T> MP_FN T mp_to(float f);
template <> MP_FN float mp_to<float>(float f) { return f; }
template <> MP_FN mp_bf16 mp_to<mp_bf16>(float f) { return mp_to_bf16(f); }
template <> MP_FN mp_f16 mp_to<mp_f16>(float f) { return mp_to_f16(f); }

/* CUDA's own functions where they are within 2 units in the last place, in double where those of float are not. */
#define MP_DOUBLE(name) MP_FN double mp_##name(double x) { return name(x); }
#define MP_OWN(name) MP_DOUBLE(name) MP_FN float mp_##name##f(float x) { return name##f(x); }
#define MP_WIDER(name) MP_DOUBLE(name) MP_FN float mp_##name##f(float x) { return (float)name((double)x); }
MP_OWN(exp)
MP_OWN(exp2)
MP_OWN(expm1)
MP_OWN(log)
MP_OWN(log2)
MP_OWN(log10)
MP_OWN(log1p)
MP_OWN(sin)
MP_OWN(cos)
MP_WIDER(tan)
MP_OWN(asin)
MP_OWN(acos)
MP_OWN(atan)
MP_WIDER(sinh)
MP_OWN(cosh)
MP_OWN(tanh)
MP_WIDER(asinh)
MP_WIDER(acosh)
MP_WIDER(atanh)
MP_OWN(cbrt)
MP_OWN(erf)
MP_WIDER(erfc)
MP_FN double mp_atan2(double y, double x) { return atan2(y, x); }
MP_FN float mp_atan2f(float y, float x) { return (float)atan2((double)y, (double)x); }
MP_FN double mp_pow(double x, double y) { return pow(x, y); }
MP_FN float mp_powf(float x, float y) { return (float)pow((double)x, (double)y); }
MP_FN float mp_rsqrtf(float x) { return 1.0f / sqrtf(x); }
MP_FN double mp_rsqrt(double x) { return 1.0 / sqrt(x); }
/* value / (1 + e^-x) by e^-|x|, which does not overflow. */
MP_FN float mp_sigmoidf(float x)
{
    const float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
MP_FN double mp_sigmoid(double x)
{
    const double e = exp(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}
MP_FN double mp_gated(double x, double w) { return x == -INFINITY ? 0.0 : x / (1.0 + exp(-w)); }
/* Far below 0, e^x is subnormal in float while x e^x is not. */
MP_FN float mp_siluf(float x) { return x < -80.0f ? (float)mp_gated(x, x) : x / (1.0f + expf(-x)); }
MP_FN double mp_silu(double x) { return mp_gated(x, x); }
MP_FN float mp_swigluf(float gate, float up) { return mp_siluf(gate) * up; }
MP_FN double mp_swiglu(double gate, double up) { return mp_silu(gate) * up; }
MP_FN float mp_fast_silu(float x) { return x == -INFINITY ? 0.0f : __fdividef(x, 1.0f + __expf(-x)); }
MP_FN float mp_fast_swiglu(float gate, float up) { return mp_fast_silu(gate) * up; }
MP_FN float mp_softplusf(float x, float beta, float threshold)
{
    const float y = x * beta;
    return y > threshold ? x : ((y > 0.0f ? y : 0.0f) + log1pf(expf(-fabsf(y)))) / beta;
}
MP_FN double mp_softplus(double x, double beta, double threshold)
{
    const double y = x * beta;
    return y > threshold ? x : ((y > 0.0 ? y : 0.0) + log1p(exp(-fabs(y)))) / beta;
}
/* GELU in double: by the tail beyond |x|, and by e^-w of a w that float rounds too much, where x is negative. */
MP_FN double mp_gelu_none(double x) { return x == -INFINITY ? 0.0 : 0.5 * x * erfc(x * -0.70710678118654752); }
MP_FN double mp_gelu_tanh(double x) { return mp_gated(x, 1.5957691216057308 * (x + 0.044715 * x * x * x)); }
MP_FN double mp_gelu_fast(double x) { return mp_gated(x, 1.702 * x); }
MP_FN double mp_gelu_fast_tanh(double x) { return mp_gated(x, 3.404 * x); }
MP_FN float mp_gelu_nonef(float x) { return (float)mp_gelu_none(x); }
/* For results that are rounded to bf16: Phi(x) = 1 / (1 + 2^-w), where w is odd; |w| is |x| times a polynomial of -|x|.
 * Relative error 2e-4; what lies below -7 is nearer to 0 than 1e-11. */
MP_FN float mp_fast_gelu(float x)
{
    const float a = -fminf(fabsf(x), 7.0f), t = a * a;
    const float low = fmaf(t, fmaf(a, 3.42802288e-2f, -6.19039615e-2f), fmaf(a, 2.44048805e-2f, -2.29760709f));
    const float high = fmaf(t, fmaf(a, 4.92940362e-6f, 1.60616405e-4f), fmaf(a, 2.09542856e-3f, 1.33265683e-2f));
    const float w = a * fmaf(t * t, high, low); /* not negative */
    return __fdividef(x < -7.0f ? -7.0f : x, 1.0f + mp_exp2(x < 0.0f ? w : -w));
}
MP_FN float mp_gelu_tanhf(float x) { return (float)mp_gelu_tanh(x); }
MP_FN float mp_gelu_fastf(float x) { return (float)mp_gelu_fast(x); }
MP_FN float mp_gelu_fast_tanhf(float x) { return (float)mp_gelu_fast_tanh(x); }

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
MP_EXTREMES(bool, uint8_t)

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
        return whole == 0 ? a / b * 0 : rint##f(whole); \
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

MP_FN int64_t mp_floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }
MP_FN int64_t mp_min(int64_t a, int64_t b) { return a < b ? a : b; }
MP_FN int64_t mp_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Two neighbours at once; the address is a multiple of their size. */
MP_FN void mp_store_pair(float *p, float a, float b) { *(float2 *)p = make_float2(a, b); }
MP_FN void mp_store_pair(mp_bf16 *p, mp_bf16 a, mp_bf16 b) { *(uint32_t *)p = a.bits | (uint32_t)b.bits << 16; }
MP_FN void mp_store_pair(mp_f16 *p, mp_f16 a, mp_f16 b) { *(uint32_t *)p = a.bits | (uint32_t)b.bits << 16; }
MP_FN float2 mp_load_pair(const float *p) { return *(const float2 *)p; }
MP_FN float2 mp_load_pair(const mp_bf16 *p)
{
    const uint32_t u = *(const uint32_t *)p;
    return make_float2(mp_bits_to_float(u << 16), mp_bits_to_float(u & 0xffff0000u));
}
MP_FN float2 mp_load_pair(const mp_f16 *p)
{
    const uint32_t u = *(const uint32_t *)p;
    return make_float2(mp_half_to_float((uint16_t)u), mp_half_to_float((uint16_t)(u >> 16)));
}

/* A float's place in the order of all floats, NaN last; -0 and 0 are equal. With the index below it: the first largest. */
MP_FN uint32_t mp_order(float v)
{
    if (v != v) return 0xffffffffu;
    const uint32_t u = mp_float_to_bits(v + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
MP_FN uint64_t mp_order(double v)
{
    if (v != v) return ~0ull;
    const uint64_t u = (uint64_t)__double_as_longlong(v + 0.0);
    return u >> 63 ? ~u : u | 1ull << 63;
}
MP_FN uint64_t mp_rank(float v, int64_t index) { return (uint64_t)mp_order(v) << 32 | (0xffffffffu - (uint32_t)index); }
MP_FN int64_t mp_rank_index(uint64_t rank) { return 0xffffffffu - (uint32_t)rank; }

/* What went wrong, of the lowest step and place; Python turns it into an exception with the IR line of the step. */
enum { MP_OK = 0, MP_INDEX = 1, MP_POSITION = 2, MP_CACHE_FULL = 3, MP_COUNT = 4 };
struct mp_error { int32_t code, step; int64_t place, value, limit; int32_t lock, unused; };

static __device__ __noinline__ void
mp_fail(mp_error *error, int code, int64_t step, int64_t place, int64_t value, int64_t limit)
{
    for (bool done = false; !done;) {
        if (atomicCAS(&error->lock, 0, 1) != 0) continue;
        volatile mp_error *e = error;
        if (!e->code || step < e->step || (step == e->step && place < e->place)) {
            e->code = code;
            e->step = (int32_t)step;
            e->place = place;
            e->value = value;
            e->limit = limit;
        }
        __threadfence();
        atomicExch(&error->lock, 0);
        done = true;
    }
}

/* The sum of a block's values, in a fixed order; all threads call it with the same scratch of N values. */
template <int N, typename T> MP_FN T mp_block_sum(T *scratch, T v)
{
    scratch[threadIdx.x] = v;
    MP_UNROLL
    for (int half = N / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    }
    __syncthreads();
    const T sum = scratch[0];
    __syncthreads();
    return sum;
}

MP_FN float mp_warp_sum(float v)
{
    MP_UNROLL
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

MP_FN uint32_t mp_warp_max(uint32_t v)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
    MP_UNROLL
    for (int d = 16; d; d >>= 1) {
        const uint32_t other = __shfl_xor_sync(~0u, v, d);
        v = other > v ? other : v;
    }
    return v;
#endif
}

/* The sum over a block of WARPS warps, called once for a scratch of WARPS values. */
template <int WARPS> MP_FN float mp_fast_sum(float *scratch, float v)
{
    v = mp_warp_sum(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.0f;
    MP_UNROLL
    for (int w = 0; w < WARPS; ++w) sum += scratch[w];
    return sum;
}
