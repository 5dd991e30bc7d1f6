/* Functions of arrays of float, a block of vectors at a time: at most 2 units in the last place, the same bits at every place.
 * On NEON, compilers that vectorize mp_functions_more.h by themselves copy a constant before most sums, since a sum
 * overwrites what is added to, and a copy takes as long as a sum. Here that constant is loaded, which costs nothing. */
#ifndef MP_FUNCTIONS_VEC_H
#define MP_FUNCTIONS_VEC_H

#include "mp_exp.h"
#include "mp_functions_more.h"

#if MP_FUSED && MP_LANES > 1
/* MP_TERM: a constant to add to, loaded where it is used. MP_FACTORS: four constants to multiply by, in one register.
 * MP_TIMES is rounded: it is not fused with a sum. */
#if MP_LANES == 4 && defined(__aarch64__)
enum { MP_BLOCK = 4 };
#define MP_TERM(c) \
    __extension__ ({ static const mp_vec mp_term = {c, c, c, c}; mp_vload_here((const float *)&mp_term); })
#define MP_FACTORS(name, ...) mp_vec name = {__VA_ARGS__}; __asm__("" : "+w"(name))
#define MP_PLUS(sum, x, k, n) mp_vadd_product(sum, x, k, n)
#define MP_ALIKE(name, c) mp_vec name = {c, c, c, c}; __asm__("" : "+w"(name))
#define MP_TIMES(x, k, n) __extension__ ({ \
    mp_vec mp_made; \
    __asm__("fmul %0.4s, %1.4s, %2.s[" #n "]" : "=w"(mp_made) : "w"(x), "w"(k)); \
    mp_made; })
MP_FN mp_vec mp_vload_again(const float *p) { return mp_vload_here(p); }
MP_FN mp_vec mp_vabs(mp_vec x)
{
    mp_vec size;
    __asm__("fabs %0.4s, %1.4s" : "=w"(size) : "w"(x));
    return size;
}
/* The smaller and the larger one as unsigned integers, the smaller one as signed integers; whether one is beyond a bound. */
MP_NEON_PAIR(mp_vleast, "umin")
MP_NEON_PAIR(mp_vleast_signed, "smin")
MP_NEON_PAIR(mp_vmost, "umax")
MP_FN int mp_vbeyond(mp_vec x, uint32_t bound)
{
    mp_vec most;
    __asm__("umaxv %s0, %1.4s" : "=w"(most) : "w"(x));
    return mp_float_to_bits(most[0]) > bound;
}
#else
enum { MP_BLOCK = 4 };
#define MP_TERM(c) mp_splat(c)
#define MP_FACTORS(name, ...) static const float name[4] = {__VA_ARGS__}
#define MP_PLUS(sum, x, k, n) ((sum) + (x) * (k)[n])
#if defined(__x86_64__)
#define MP_TIMES(x, k, n) __extension__ ({ mp_vec mp_made = (x) * (k)[n]; __asm__("" : "+v"(mp_made)); mp_made; })
#else
#define MP_TIMES(x, k, n) ((x) * (k)[n])
#endif
#define MP_ALIKE(name, c) const mp_vec name = mp_splat(c)
MP_FN mp_vec mp_vload_again(const float *p) { return mp_vload_f32(p); }
MP_FN mp_vec mp_vabs(mp_vec x) { return (mp_vec)((mp_vec_u32)x & 0x7fffffffu); }
#if MP_LANES == 16 && defined(__AVX512F__)
MP_FN mp_vec mp_vleast(mp_vec x, mp_vec y) { return (mp_vec)_mm512_min_epu32((__m512i)x, (__m512i)y); }
MP_FN mp_vec mp_vleast_signed(mp_vec x, mp_vec y) { return (mp_vec)_mm512_min_epi32((__m512i)x, (__m512i)y); }
MP_FN mp_vec mp_vmost(mp_vec x, mp_vec y) { return (mp_vec)_mm512_max_epu32((__m512i)x, (__m512i)y); }
MP_FN int mp_vbeyond(mp_vec x, uint32_t bound)
{
    return _mm512_cmpgt_epu32_mask((__m512i)x, _mm512_set1_epi32((int)bound)) != 0;
}
#elif MP_LANES == 8 && defined(__AVX2__)
MP_FN mp_vec mp_vleast(mp_vec x, mp_vec y) { return (mp_vec)_mm256_min_epu32((__m256i)x, (__m256i)y); }
MP_FN mp_vec mp_vleast_signed(mp_vec x, mp_vec y) { return (mp_vec)_mm256_min_epi32((__m256i)x, (__m256i)y); }
MP_FN mp_vec mp_vmost(mp_vec x, mp_vec y) { return (mp_vec)_mm256_max_epu32((__m256i)x, (__m256i)y); }
MP_FN int mp_vbeyond(mp_vec x, uint32_t bound)
{
    const mp_vec within = mp_vleast(x, mp_splat(mp_bits_to_float(bound)));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32((__m256i)x, (__m256i)within)) != -1;
}
#else
MP_FN mp_vec mp_vleast(mp_vec x, mp_vec y) { return mp_vchoose(MP_BITS((mp_vec_u32)x < (mp_vec_u32)y), x, y); }
MP_FN mp_vec mp_vleast_signed(mp_vec x, mp_vec y)
{
    return mp_vchoose(MP_BITS(((mp_vec_u32)x ^ 0x80000000u) < ((mp_vec_u32)y ^ 0x80000000u)), x, y);
}
MP_FN mp_vec mp_vmost(mp_vec x, mp_vec y) { return mp_vchoose(MP_BITS((mp_vec_u32)x < (mp_vec_u32)y), y, x); }
MP_FN int mp_vbeyond(mp_vec x, uint32_t bound)
{
    uint32_t found = 0;
    for (int i = 0; i < MP_LANES; ++i) found |= ((mp_vec_u32)x)[i] > bound;
    return (int)found;
}
#endif
#endif
enum { MP_BLOCK_FLOATS = MP_BLOCK * MP_LANES };
#define MP_EACH(...) MP_FULLY for (int j = 0; j < MP_BLOCK; ++j) { __VA_ARGS__; }

/* Prefetches of blocks that come later: what lies beyond L2 is not there in time otherwise. Measured with AVX-512 alone. */
#if MP_LANES == 16 && defined(__AVX512F__)
#define MP_LATER \
    MP_EACH(__builtin_prefetch(x + i + j * MP_LANES + 256, 0, 3); __builtin_prefetch(y + i + j * MP_LANES + 256, 1, 3))
#else
#define MP_LATER
#endif

/* Numbers below -4.5, and NaN, are put aside with their places, and left to a function of one number when they are many, or at
 * the end. MP_ASIDE, for the numbers at `from`, is what follows when a block has such. */
enum { MP_FAR = 16 * MP_BLOCK_FLOATS };
typedef struct { _Alignas(64) float values[MP_FAR]; int64_t places[MP_FAR]; int64_t count; } mp_far;
#define MP_FAR_BY(function) \
    MP_SHARED function##_far(float *y, mp_far *far) \
    { \
        float *const values = far->values; \
        const int64_t blocks = (far->count + MP_BLOCK_FLOATS - 1) / MP_BLOCK_FLOATS; /* whole: the same bits at every place */ \
        for (int64_t j = far->count; j < blocks * MP_BLOCK_FLOATS; ++j) values[j] = 0.0f; \
        MP_SIMD_ABREAST \
        for (int64_t j = 0; j < blocks * MP_BLOCK_FLOATS; ++j) { \
            values[j] = function(values[j]); \
            MP_ABREAST; \
        } \
        MP_END_ABREAST; \
        for (int64_t j = 0; j < far->count; ++j) y[far->places[j]] = far->values[j]; \
        far->count = 0; \
    }
#define MP_ASIDE(function) \
    if (__builtin_expect(mp_vbeyond(largest, 0xc0900000u), 0)) { \
        if (far.count > MP_FAR - MP_BLOCK_FLOATS) function##_far(y, &far); \
        int64_t count = far.count; \
        for (int j = 0; j < MP_BLOCK_FLOATS; ++j) { \
            far.values[count] = from[j]; \
            far.places[count] = i + j; \
            count += mp_float_to_bits(from[j]) > 0xc0900000u; \
        } \
        far.count = count; \
    }
MP_FAR_BY(mp_gelu_nonef)
MP_FAR_BY(mp_gelu_tanhf)

/* x Phi(x) for x >= -4.5; rare numbers below that are left to mp_gelu_nonef. With a = |x|, at most 5.75:
 * Phi(-a) = e^-((a (a + 23/32) + R(a)) / 2) / 2 = 2^n e^r / 2. The polynomial R is small, and c, the upper bits of a, makes
 * the large part of the product exact. n follows from two terms of a alone, so that nothing waits for R. Exponents are
 * doubled, and so is what comes of them, so that nothing need be halved. Last, a Phi(-a) is subtracted from x, or from -0. */
MP_SHARED mp_gelu_none_blocks(float *y, const float *x, const int64_t n)
{
    MP_FACTORS(k0, -7.41386108e-09f, -4.750882e-07f, 1.55357975e-06f, 0.000574767822f);
    MP_FACTORS(k1, 0.0233918801f, 0.0887454897f, -0.627279f, -1.38671875f);
    MP_FACTORS(k2, -4.2438888e-4f, 0.000523585535f, 0.0416661017f, 4.31147491e-05f);
    MP_ALIKE(most, 5.75f);
    MP_ALIKE(shift, 1.75f);
    MP_ALIKE(slope, 0.71875f);
    MP_ALIKE(magic, 12583037.0f); /* 1.5 * 2^23 + 125: an exponent's bias, less 2 */
    MP_ALIKE(minus, -0.0f);
    mp_far far;
    far.count = 0;
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        MP_LATER
        const float *const from = x + i;
        mp_vec a[MP_BLOCK], c[MP_BLOCK], g[MP_BLOCK], p[MP_BLOCK], q[MP_BLOCK], t[MP_BLOCK], v[MP_BLOCK];
        mp_vec largest = mp_splat(0.0f);
        MP_EACH(v[j] = mp_vload_again(from + j * MP_LANES); a[j] = mp_vleast(mp_vabs(v[j]), most))
        MP_EACH(largest = mp_vmost(largest, v[j]))
        MP_EACH(v[j] = a[j] - shift)
        MP_EACH(t[j] = v[j] * v[j])
        MP_EACH(p[j] = MP_TERM(8.70720953e-08f); q[j] = MP_TERM(1.42465001e-06f))
        MP_EACH(p[j] = MP_PLUS(p[j], v[j], k0, 0); q[j] = MP_PLUS(q[j], v[j], k0, 1); c[j] = MP_TERM(-6.17867045e-05f))
        MP_EACH(q[j] = q[j] + p[j] * t[j]; c[j] = MP_PLUS(c[j], v[j], k0, 2); p[j] = MP_TERM(-0.00394701818f))
        MP_EACH(c[j] = c[j] + q[j] * t[j]; p[j] = MP_PLUS(p[j], v[j], k0, 3); q[j] = MP_TERM(-0.130429015f))
        MP_EACH(p[j] = p[j] + c[j] * t[j]; q[j] = MP_PLUS(q[j], v[j], k1, 0); c[j] = MP_TERM(-0.980246436f))
        MP_EACH(q[j] = q[j] + p[j] * t[j]; c[j] = MP_PLUS(c[j], a[j], k1, 2); g[j] = MP_TERM(12583037.0f))
        MP_EACH(g[j] = g[j] + c[j] * a[j]; p[j] = MP_TERM(0.728189111f))
        MP_EACH(p[j] = MP_PLUS(p[j], v[j], k1, 1); c[j] = (mp_vec)((mp_vec_u32)a[j] & 0xfffff000u); v[j] = g[j] - magic)
        MP_EACH(p[j] = MP_PLUS(p[j], v[j], k2, 0); v[j] = MP_TIMES(v[j], k1, 3))
        MP_EACH(q[j] = p[j] + q[j] * t[j]; t[j] = a[j] * (mp_vec)((mp_vec_u32)g[j] << 23); g[j] = c[j] + slope)
        MP_EACH(v[j] = v[j] - c[j] * g[j]; c[j] = a[j] - c[j]; g[j] = a[j] + g[j])
        MP_EACH(q[j] = q[j] + c[j] * g[j])
        MP_EACH(v[j] = v[j] - q[j]; p[j] = MP_TERM(0.00520866597f); q[j] = MP_TERM(0.24999994f))
        MP_EACH(a[j] = v[j] * v[j]; p[j] = MP_PLUS(p[j], v[j], k2, 1))
        MP_EACH(q[j] = MP_PLUS(q[j], v[j], k2, 2); p[j] = MP_PLUS(p[j], a[j], k2, 3); g[j] = t[j] + t[j])
        MP_EACH(c[j] = mp_vleast(mp_vload_again(from + j * MP_LANES), minus); q[j] = q[j] + p[j] * a[j])
        MP_EACH(v[j] = v[j] + q[j] * a[j]; c[j] = c[j] - g[j])
        MP_EACH(q[j] = c[j] - t[j] * v[j])
        MP_ASIDE(mp_gelu_nonef)
        MP_EACH(mp_vstore(y + i + j * MP_LANES, q[j]))
    }
    if (far.count) mp_gelu_nonef_far(y, &far);
}

/* As mp_erff: 1 - e^-s = 1 - 2^n e^r, where s = |x| + |x| P(|x|). */
MP_SHARED mp_erf_blocks(float *y, const float *x, const int64_t n)
{
    MP_FACTORS(k0, -9.38809717e-06f, 0.00011886203f, 0.00167567772f, -0.0191478226f);
    MP_FACTORS(k1, 0.636619568f, -1.28729f, -0.693359375f, 2.12194440e-4f);
    MP_FACTORS(k2, 0.00837890711f, 0.166664347f, 0.00138801534f, 0.0f);
    MP_ALIKE(most, 4.0f);
    MP_ALIKE(magic, 12583039.0f); /* 1.5 * 2^23 + 127: an exponent's bias */
    MP_ALIKE(one, 1.0f);
    MP_ALIKE(sign, -0.0f);
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        MP_LATER
        const float *const from = x + i;
        mp_vec b[MP_BLOCK], g[MP_BLOCK], p[MP_BLOCK], q[MP_BLOCK], t[MP_BLOCK], v[MP_BLOCK], largest = mp_splat(0.0f);
        MP_EACH(v[j] = mp_vabs(mp_vload_again(from + j * MP_LANES)); b[j] = mp_vleast(v[j], most))
        MP_EACH(largest = mp_vmost(largest, v[j]))
        MP_EACH(t[j] = b[j] * b[j]; p[j] = MP_PLUS(MP_TERM(-0.000637364865f), b[j], k0, 1))
        MP_EACH(p[j] = MP_PLUS(p[j], t[j], k0, 0); q[j] = MP_PLUS(MP_TERM(-0.000169504681f), b[j], k0, 2))
        MP_EACH(q[j] = q[j] + p[j] * t[j]; p[j] = MP_PLUS(MP_TERM(0.102776304f), b[j], k0, 3); v[j] = MP_TERM(-1.31820335f))
        MP_EACH(p[j] = p[j] + q[j] * t[j]; v[j] = MP_PLUS(v[j], b[j], k1, 1); g[j] = MP_TERM(12583039.0f))
        MP_EACH(q[j] = MP_PLUS(MP_TERM(0.128379166f), b[j], k1, 0); g[j] = g[j] + v[j] * b[j])
        MP_EACH(q[j] = q[j] + p[j] * t[j]; p[j] = g[j] - magic)
        MP_EACH(v[j] = MP_TIMES(p[j], k1, 2); g[j] = (mp_vec)((mp_vec_u32)g[j] << 23))
        MP_EACH(v[j] = v[j] - b[j])
        MP_EACH(v[j] = MP_PLUS(v[j], p[j], k1, 3))
        MP_EACH(v[j] = v[j] - b[j] * q[j]; p[j] = MP_TERM(0.04166767f); q[j] = MP_TERM(0.49999994f))
        MP_EACH(t[j] = v[j] * v[j]; p[j] = MP_PLUS(p[j], v[j], k2, 0))
        MP_EACH(q[j] = MP_PLUS(q[j], v[j], k2, 1); p[j] = MP_PLUS(p[j], t[j], k2, 2); b[j] = one - g[j])
        MP_EACH(q[j] = q[j] + p[j] * t[j])
        MP_EACH(v[j] = v[j] + q[j] * t[j]; p[j] = (mp_vec)((mp_vec_u32)mp_vload_again(from + j * MP_LANES) & (mp_vec_u32)sign))
        MP_EACH(b[j] = b[j] - g[j] * v[j])
        MP_EACH(q[j] = (mp_vec)((mp_vec_u32)b[j] | (mp_vec_u32)p[j]))
        if (__builtin_expect(mp_vbeyond(largest, 0x7f800000u), 0)) /* NaN */
            MP_EACH(v[j] = mp_vload_f32(from + j * MP_LANES); q[j] = mp_vchoose(MP_BITS(v[j] == v[j]), q[j], v[j]))
        MP_EACH(mp_vstore(y + i + j * MP_LANES, q[j]))
    }
}
/* x / (1 + e^-w) for x >= -4.5; rare numbers below that are left to mp_gelu_tanhf. w = x (A + B x^2) is
 * c (51/32 + 9/128 c^2) and a small rest, where c is the upper bits of x and makes that product exact. Beyond 5.125 the
 * divisor is 1. */
MP_SHARED mp_gelu_tanh_blocks(float *y, const float *x, const int64_t n)
{
    MP_FACTORS(k0, 0.0703125f, 0.00104231632f, -0.102943242f, -0.693359375f); /* 9/128, B - 9/128, -B / ln(2) */
    MP_FACTORS(k1, -2.12194440e-4f, 0.00836896803f, 0.166665182f, 0.00138979522f);
    MP_ALIKE(most, 5.125f);
    MP_ALIKE(magic, 12583039.0f); /* 1.5 * 2^23 + 127: an exponent's bias */
    MP_ALIKE(one, 1.0f);
    mp_far far;
    far.count = 0;
    MP_ONCE
    for (int64_t i = 0; i < n; i += MP_BLOCK_FLOATS) {
        MP_LATER
        const float *const from = x + i;
        mp_vec b[MP_BLOCK], c[MP_BLOCK], g[MP_BLOCK], p[MP_BLOCK], q[MP_BLOCK], t[MP_BLOCK], v[MP_BLOCK];
        mp_vec largest = mp_splat(0.0f);
        MP_EACH(v[j] = mp_vload_again(from + j * MP_LANES); largest = mp_vmost(largest, v[j]))
        MP_EACH(b[j] = mp_vleast_signed(v[j], most))
        MP_EACH(t[j] = b[j] * b[j]; c[j] = (mp_vec)((mp_vec_u32)b[j] & 0xffff0000u); q[j] = MP_TERM(-2.30220819f))
        MP_EACH(q[j] = MP_PLUS(q[j], t[j], k0, 2); p[j] = c[j] * c[j]; v[j] = MP_TERM(12583039.0f))
        MP_EACH(v[j] = v[j] + b[j] * q[j]; g[j] = b[j] + c[j]; q[j] = MP_TERM(0.00201912154f))
        MP_EACH(q[j] = MP_PLUS(q[j], t[j], k0, 1); t[j] = p[j] + b[j] * g[j]; g[j] = MP_TERM(1.59375f))
        MP_EACH(g[j] = MP_PLUS(g[j], p[j], k0, 0); p[j] = MP_TERM(1.59375f); q[j] = b[j] * q[j])
        MP_EACH(p[j] = MP_PLUS(p[j], t[j], k0, 0); b[j] = b[j] - c[j]; t[j] = v[j] - magic)
        MP_EACH(q[j] = q[j] + b[j] * p[j]; b[j] = (mp_vec)((mp_vec_u32)v[j] << 23); v[j] = MP_TIMES(t[j], k0, 3))
        MP_EACH(v[j] = v[j] - c[j] * g[j]; q[j] = MP_PLUS(q[j], t[j], k1, 0))
        MP_EACH(v[j] = v[j] - q[j]; p[j] = MP_TERM(0.0416671485f); q[j] = MP_TERM(0.499999970f))
        MP_EACH(t[j] = v[j] * v[j]; p[j] = MP_PLUS(p[j], v[j], k1, 1); q[j] = MP_PLUS(q[j], v[j], k1, 2))
        MP_EACH(p[j] = MP_PLUS(p[j], t[j], k1, 3); g[j] = b[j] + one)
        MP_EACH(q[j] = q[j] + p[j] * t[j])
        MP_EACH(v[j] = v[j] + q[j] * t[j])
        MP_EACH(q[j] = mp_vload_again(from + j * MP_LANES) / (g[j] + b[j] * v[j]))
        MP_ASIDE(mp_gelu_tanhf)
        MP_EACH(mp_vstore(y + i + j * MP_LANES, q[j]))
    }
    if (far.count) mp_gelu_tanhf_far(y, &far);
}
#else
enum { MP_BLOCK_FLOATS = 1 };
#define MP_BLOCKS(name) \
    MP_SHARED name##_blocks(float *y, const float *x, const int64_t n) \
    { \
        MP_SIMD \
        for (int64_t i = 0; i < n; ++i) y[i] = name##f(x[i]); \
    }
MP_BLOCKS(mp_gelu_none)
MP_BLOCKS(mp_gelu_tanh)
MP_BLOCKS(mp_erf)
#endif

/* Those for which AVX-512 has instructions of its own; elsewhere the compiler makes vectors of the functions of one number. */
#if MP_LANES == 16 && defined(__AVX512DQ__)
#include "mp_functions_512.h"
#else
#define MP_BLOCKS_ABREAST(name) \
    MP_SHARED name##_blocks(float *y, const float *x, const int64_t n) \
    { \
        MP_SIMD_ABREAST \
        for (int64_t i = 0; i < n; ++i) { \
            y[i] = name##f(x[i]); \
            MP_ABREAST; \
        } \
        MP_END_ABREAST; \
    }
#define MP_BLOCKS_QUICK(name) \
    MP_SHARED name##_blocks(float *y, const float *x, const int64_t n) { MP_QUICKLY(0, n, y, y[i] = name##f(x[i]);) }
#define MP_BLOCKS_SIMPLE(name, function) \
    MP_SHARED name##_blocks(float *y, const float *x, const int64_t n) \
    { \
        MP_SIMD \
        for (int64_t i = 0; i < n; ++i) y[i] = function(x[i]); \
    }
MP_BLOCKS_ABREAST(mp_exp)
MP_BLOCKS_ABREAST(mp_log)
MP_BLOCKS_ABREAST(mp_log2)
MP_BLOCKS_ABREAST(mp_log10)
MP_BLOCKS_ABREAST(mp_tanh)
MP_BLOCKS_QUICK(mp_sin)
MP_BLOCKS_QUICK(mp_cos)
MP_BLOCKS_QUICK(mp_tan)
MP_BLOCKS_SIMPLE(mp_atan, mp_atanf)
MP_BLOCKS_SIMPLE(mp_sqrt, sqrtf)
MP_BLOCKS_SIMPLE(mp_rsqrt, mp_rsqrtf)
#endif

/* y = f(x), where f takes whole blocks. */
MP_FN void mp_by_blocks(void (*f)(float *, const float *, int64_t), float *y, const float *x, const int64_t n)
{
    const int64_t left = n % MP_BLOCK_FLOATS, whole = n - left;
    _Alignas(64) float end[MP_BLOCK_FLOATS] = {0};
    f(y, x, whole);
    if (!left) return;
    memcpy(end, x + whole, (size_t)left * sizeof *x);
    f(end, end, MP_BLOCK_FLOATS);
    memcpy(y + whole, end, (size_t)left * sizeof *y);
}
#endif
