/* What mp_functions.h does not have of float, and all of double: a plan that needs none of it does not read it. */
#ifndef MP_FUNCTIONS_MORE_H
#define MP_FUNCTIONS_MORE_H

#include "mp_math.h"

/* (log(1 + z) - z + z^2 / 2) / z^3 for 1 + z between the roots of 1/2 and 2. */
MP_FN float mp_log_polyf(float z)
{
    return MP_P8(mp_fmaf, z, 0.333333313f, -0.250008196f, 0.200012267f, -0.166233569f, 0.142017603f, -0.1316019f,
                 0.127615675f, -0.0763447136f);
}
/* x = 2^k (1 + z) for 0 < x < infinity: z. Constants are chosen for subnormal x, so that nothing is computed twice. */
MP_FN float mp_log_partsf(float x, float *k)
{
    const int small = mp_float_to_bits(x) < 0x00800000u;
    const float factor = small ? 0x1p24f : 1.0f, less = small ? 24.0f : 0.0f;
    const uint32_t u = mp_float_to_bits(x * factor), above = u - 0x3f3504f3u; /* root of 1/2 */
    *k = (float)((int32_t)above >> 23) - less;
    return mp_bits_to_float(u - (above & 0xff800000u)) - 1.0f;
}
/* y = log(x), or what it is of 0, negative numbers, infinity and NaN. */
MP_FN float mp_log_endf(float y, float x)
{
    const float bounded = mp_float_to_bits(x) < 0x7f800000u ? y : x, defined = mp_float_to_bits(x) >> 31 ? NAN : bounded;
    return x == 0.0f ? -INFINITY : defined;
}
/* c0 + … + c7 z^7 by pairs of terms, which do not wait for each other. */
MP_FN float mp_pairsf(float z, float c0, float c1, float c2, float c3, float c4, float c5, float c6, float c7)
{
    const float w = z * z, high = mp_fmaf(w, mp_fmaf(z, c7, c6), mp_fmaf(z, c5, c4));
    return mp_fmaf(w, mp_fmaf(w, high, mp_fmaf(z, c3, c2)), mp_fmaf(z, c1, c0));
}
/* By 4^n 2^r, as mp_expf. */
MP_FN float mp_exp2f(float x)
{
    const float y = mp_boundedf(x, -152.0f, 129.0f), magic = 12582912.0f + 127.0f, whole = mp_fmaf(y, 0.5f, magic);
    const float r = mp_fmaf(whole - magic, -2.0f, y), power = mp_bits_to_float(mp_float_to_bits(whole) << 23);
    const float p = mp_pairsf(r, 0.693147182f, 0.240226522f, 0.0555041209f, 0.0096180439f, 0.0013332474f, 0.000154171721f,
                              1.5448446e-05f, 1.26162831e-06f);
    return mp_or_nanf(mp_fmaf(p * r, power, power) * power, x);
}
MP_FN float mp_logf(float x)
{
    float k;
    const float z = mp_log_partsf(x, &k);
    const float p = mp_pairsf(z, -0.5f, 0.333339095f, -0.250013351f, 0.199631006f, -0.165776551f, 0.149145141f, -0.142668962f,
                              0.0870032161f);
    return mp_log_endf(mp_fmaf(k, 0.693147182f, mp_fmaf(z * z, p, z)), x); /* ln(2) is a float but for 2e-9 */
}
/* Other bases: log(1 + z) is one product with 1 / ln(base), whose second part is with the rest. */
MP_FN float mp_log2f(float x)
{
    float k;
    const float z = mp_log_partsf(x, &k);
    const float p = mp_pairsf(z, -0.721347392f, 0.480907232f, -0.360699564f, 0.287992686f, -0.239053309f, 0.215204775f,
                              -0.206460908f, 0.126113161f);
    return mp_log_endf(k + mp_fmaf(z, 1.44269502f, z * mp_fmaf(z, p, 1.92596303e-8f)), x);
}
MP_FN float mp_log10f(float x)
{
    float k;
    const float z = mp_log_partsf(x, &k);
    const float p = mp_pairsf(z, -0.217147201f, 0.144767508f, -0.108581454f, 0.0866942927f, -0.0719608217f, 0.0647830293f,
                              -0.0621598810f, 0.0379748382f);
    const float rest = mp_fmaf(k, -1.43209888e-8f, z * mp_fmaf(z, p, -1.010305e-8f));
    return mp_log_endf(mp_fmaf(k, 0.301030010f, mp_fmaf(z, 0.434294492f, rest)), x);
}
/* (atan(x) - x) / x^3 over x^2 <= 1, asin over x^2 <= 0.36. */
MP_FN float mp_atan_polyf(float t)
{
    return MP_P9(mp_fmaf, t, -0.333332986f, 0.199985489f, -0.142642409f, 0.109521858f, -0.0840345025f, 0.0579576045f,
                 -0.0311778616f, 0.0109146172f, -0.00179362495f);
}
MP_FN float mp_asin_polyf(float t)
{
    return MP_P6(mp_fmaf, t, 0.166665688f, 0.0750500485f, 0.0437972508f, 0.0368280932f, -0.00148851867f, 0.0563834943f);
}

#define MP_MORE
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

/* ---- float: what is easier in double ---- */

/* e^x for |x| <= 700, relative error 2^-34. */
MP_FN double mp_exp_wide(double x)
{
    const double magic = 6755399441055744.0 + 1023, t = mp_fma(x, 1.4426950408889634, magic), n = t - magic;
    const double r = mp_fma(n, -0.6931471805599453, x);
    const double p = MP_P6(mp_fma, r, 0.50000000676812995, 0.16666665868957711, 0.041666294947583581, 0.0083334970716517371,
                           0.001394465966866158, 0.00019790342736696124);
    return (mp_fma(p * r, r, r) + 1.0) * mp_bits_to_double(mp_double_to_bits(t) << 52);
}

/* log2(x) of a float x > 0, relative error 2^-35. */
MP_FN double mp_log2_wide(float x)
{
    const uint64_t u = mp_double_to_bits((double)x), k = (u - 0x3fe6a09e667f3bcdull + (1023ull << 52)) >> 52;
    const double z = mp_bits_to_double(u - (k << 52) + (1023ull << 52)) - 1.0;
    const double n = mp_bits_to_double(k + 0x4338000000000000ull) - (6755399441055744.0 + 1023);
    const double p = MP_P13(mp_fma, z, 1.4426950408687043, -0.72134752086857234, 0.48089836139654335, -0.36067367485031082,
                            0.28853729341984985, -0.24045316462738484, 0.20617535996310468, -0.18030061927039698,
                            0.15876981040486365, -0.14315631202379098, 0.1447482831526419, -0.14283977364594416,
                            0.077371047684083386);
    return mp_fma(p, z, n);
}

/* 2^w; 0 and infinity beyond the range of float. */
MP_FN float mp_exp2_narrow(double w)
{
    const double above = w < -200.0 ? -200.0 : w, y = above > 200.0 ? 200.0 : above; /* NaN stays */
    return (float)mp_exp_wide(y * 0.6931471805599453);
}

MP_FN float mp_powf(float x, float y)
{
    const float a = fabsf(x), half = 0.5f * y;
    const double log = mp_log2_wide(a), bounded = a < INFINITY ? log : (double)a, known = a == 0.0f ? -INFINITY : bounded;
    const int one = (y == 0.0f) | (x == 1.0f) | ((a == 1.0f) & (y == y));
    const float r = mp_exp2_narrow(one ? 0.0 : (double)y * known);
    const int whole = rintf(y) == y, odd = whole & (rintf(half) != half) & (fabsf(y) < 16777216.0f);
    const uint32_t sign = odd ? 0x80000000u : 0u;
    const float z = mp_bits_to_float(mp_float_to_bits(r) ^ (mp_float_to_bits(x) & sign));
    return ((x < 0.0f) & (x > -INFINITY) & !whole) ? NAN : z;
}

MP_FN float mp_cbrtf(float x)
{
    const float a = fabsf(x), y = mp_exp2_narrow(mp_log2_wide(a) * 0.33333333333333333);
    return a > 0.0f && a < INFINITY ? mp_with_signf(y, x) : x;
}

/* Even and odd part of e^x: cosh and sinh. */
MP_FN float mp_coshf(float x)
{
    const float a = fabsf(x), y = a > 100.0f ? 100.0f : a;
    const double e = mp_exp_wide((double)y);
    return (float)(0.5 * e + 0.5 / e);
}
MP_FN float mp_sinhf(float x)
{
    const float a = fabsf(x), y = a > 100.0f ? 100.0f : a;
    const double e = mp_exp_wide((double)y);
    const float large = (float)(0.5 * e - 0.5 / e), t = y * y;
    const float small = mp_fmaf(y * t, MP_P4(mp_fmaf, t, 0.166666672f, 0.00833335053f, 0.000198360663f, 2.81743951e-06f), y);
    return mp_with_signf(a < 1.0f ? small : large, x);
}

/* x / (1 + e^-w) of a double w, which is a function of x. */
MP_FN float mp_gatedf(float x, double w)
{
    const double a = w > 0.0 ? -w : w, y = a < -200.0 ? -200.0 : a, e = mp_exp_wide(y); /* NaN stays */
    return (float)((double)(x < -2e38f ? -2e38f : x) * (w < 0.0 ? e : 1.0) / (1.0 + e));
}
/* 0.5 x (1 + tanh z) is x / (1 + e^-2z): nothing cancels where x is negative. 2z = x (A + B x^2) in two parts. */
#if MP_FUSED
MP_FN float mp_gelu_tanhf(float x)
{
    const float y = mp_boundedf(x, -10.8f, 5.125f), t = y * y, one = 1.59576917f, three = 0.0713548139f, p = three * t;
    const float c = p + one, w = y * c, most = mp_above_bothf(p, one), lost = (mp_below_bothf(p, one) - (c - most)) - 4.53406804e-08f;
    const float cubic = mp_fmaf(mp_fmaf(y, y, -t), three, mp_fmaf(t, 2.3988324e-09f, mp_fmaf(three, t, -p)));
    const float z = y / mp_logistic_of_boundedf(w, mp_fmaf(y, cubic + lost, mp_fmaf(y, c, -w))) * 0x1p-64f;
    return x < 5.125f ? z : x; /* NaN too */
}
#else
MP_FN float mp_gelu_tanhf(float x)
{
    const double wide = (double)x, cubic = 0.044715 * wide * wide;
    return mp_gatedf(x, 1.5957691216057308 * wide * (1.0 + cubic));
}
#endif
MP_FN float mp_gelu_fastf(float x) { return mp_gatedf(x, 1.702 * (double)x); }
MP_FN float mp_gelu_fast_tanhf(float x) { return mp_gatedf(x, 3.404 * (double)x); }

#if MP_FUSED
/* e^(s + low) for -110 <= s <= 0 is (1 + q) power 2^-64, so that it may be subnormal: q. */
MP_FN float mp_exp_partsf(float s, float low, float *power)
{
    const float magic = 12582912.0f + 191.0f, whole = mp_fmaf(s, 1.44269504f, magic), n = whole - magic;
    *power = mp_bits_to_float(mp_float_to_bits(whole) << 23);
    return mp_exp_nearf(mp_fmaf(n, -0.693359375f, s), mp_fmaf(n, 2.12194440e-4f, low));
}
/* 1 / (a + 2) is u (1 + off) of this u. */
MP_FN float mp_reciprocalf(float a, float *off)
{
    const float d = a + 2.0f, u = 1.0f / d, lost = a - (d - 2.0f);
    *off = mp_fmaf(-u, lost, mp_fmaf(-u, d, 1.0f));
    return u;
}
/* e^(-x^2) / (|x| + 2) times a polynomial of 1 / (|x| + 2); 1 - x - x p(x^2) near 0. The constant is added last,
 * so that few roundings count. */
MP_FN float mp_erfcf(float x)
{
    const float a = mp_abs_belowf(x, 10.25f);
    float off, power;
    const float s = -a * a, low = mp_fmaf(-a, a, -s);
    const float u = mp_reciprocalf(a, &off), w = mp_fmaf(u, off, u - 0.190829694f), v = w * w;
    const float odd = MP_P3(mp_fmaf, v, 3.35848999f, -9.65459538f, 27.4323406f);
    const float even = MP_P4(mp_fmaf, v, 3.95768499f, -3.01647639f, 3.68238139f, -27.7357941f);
    const float slope = mp_fmaf(mp_fmaf(odd, w, even), w, 2.24807978f), constant = 0.87405479f, first = constant * u;
    const float q = mp_exp_partsf(s, low, &power), rest = mp_fmaf(slope, w, mp_fmaf(w, 2.24807978f, constant) * off);
    const float sum = mp_fmaf(mp_fmaf(q, rest + constant, rest), u, mp_fmaf(constant, u, -first)) + first;
    const float tail = sum * power * 0x1p-64f;
    const float near = MP_P6(mp_fmaf, s, 0.128379166f, 0.376125574f, 0.11282555f, 0.0267956052f, 0.00503912009f,
                             0.000624354347f);
    const float far = mp_float_to_bits(x) >> 31 ? 2.0f - tail : tail;
    return mp_or_nanf(mp_float_to_bits(a) < 0x3f400000u ? mp_fmaf(-x, near, 1.0f - x) : far, x); /* 0.75 */
}
/* x Phi(x): beyond |x| = 0.75 by the tail, e^(-x^2 / 2) times a polynomial, so that nothing cancels. */
MP_FN float mp_gelu_nonef(float x)
{
    const float a = mp_abs_belowf(x, 14.5f);
    float off, power;
    const float b = -0.5f * a, s = b * a, low = mp_fmaf(b, a, -s);
    const float d = mp_reciprocalf(a, &off), u = mp_fmaf(d, off, d - 0.21875f), v = u * u;
    const float odd = MP_P4(mp_fmaf, v, -0.537391186f, -2.62952375f, 7.12224007f, -10.0529308f);
    const float even = MP_P4(mp_fmaf, v, -2.19849944f, 3.79549670f, -17.7722626f, mp_fmaf(u, -45.2364960f, 75.2653809f));
    const float q = mp_exp_partsf(s, low, &power), rest = mp_fmaf(even, u, odd) * u, constant = 0.355220884f;
    const float tail = (mp_fmaf(q, rest + constant, rest) + constant) * power * 0x1p-64f;
    const float near = MP_P5(mp_fmaf, s, 0.398942292f, 0.132980973f, 0.0398922376f, 0.00945577957f, 0.00164534594f);
    const int32_t i = (int32_t)mp_float_to_bits(x);
    const float far = mp_bits_to_float(i > 0 ? (uint32_t)i : 0u) - tail;
    const uint32_t above = (mp_float_to_bits(x) & 0x7fffffffu) - 0x3f400000u; /* in units of the last place */
    return above <= 0x40400000u ? far : x * mp_fmaf(x, near, 0.5f); /* NaN too */
}
/* 1 - e^-s, where s = -log(erfc |x|) = |x| + |x| P(|x|): of s < ln(2) / 2 nothing is subtracted from 1. */
MP_FN float mp_erff(float x)
{
    const float b = mp_abs_belowf(x, 4.0f), t = b * b, magic = 12582912.0f + 127.0f;
    const float high = mp_fmaf(t, mp_fmaf(b, 0.00011886203f, -0.000637364865f), mp_fmaf(b, 0.00167567772f, -0.000169504681f));
    const float first = mp_fmaf(t, mp_fmaf(b, -0.0191478226f, 0.102776304f), mp_fmaf(b, 0.636619568f, 0.128379166f));
    const float s = mp_fmaf(b, mp_fmaf(t * t, mp_fmaf(t * t, -9.38809717e-06f, high), first), b);
    const float whole = mp_fmaf(s, -1.44269504f, magic), n = whole - magic;
    const float power = mp_bits_to_float(mp_float_to_bits(whole) << 23);
    const float r = mp_fmaf(n, 2.12194440e-4f, mp_fmaf(n, -0.693359375f, -s)), q = mp_fmaf(mp_exp_near_polyf(r), r * r, r);
    return mp_or_nanf(mp_with_signf(mp_fmaf(-q, power, 1.0f - power), x), x);
}
#else /* what rounding takes from x^2 is not known: in double */
/* erfc(t) for 0 <= t <= 12, relative error 2^-28: e^(-t^2) / (t + 3) times a polynomial of (t - 3) / (t + 3). */
MP_FN double mp_erfc_wide(double t)
{
    const double d = t + 3.0, guess = (double)(1.0f / (float)d), u = guess * mp_fma(-d, guess, 2.0), v = mp_fma(u, -6.0, 1.0);
    const double g = MP_P10(mp_fma, v, 1.0740069079103032, -0.88339448908738616, 0.59022828544436179, -0.31046593299004815,
                            0.11952928168633967, -0.026840292823297557, -0.0012276743236269696, 0.0030808120648597006,
                            -0.00048081218469570155, -0.00032410168315809615);
    return mp_exp_wide(-t * t) * (g * u);
}
MP_FN float mp_erfcf(float x)
{
    const double a = fabs((double)x), y = mp_erfc_wide(a > 12.0 ? 12.0 : a); /* NaN stays */
    return (float)(x < 0.0f ? 2.0 - y : y);
}
/* x Phi(x), by the tail beyond |x|, so that nothing cancels. */
MP_FN float mp_gelu_nonef(float x)
{
    const double a = fabs((double)x), b = a > 15.0 ? 15.0 : a, y = b * (0.5 * mp_erfc_wide(b * 0.70710678118654752));
    return x == 0.0f ? x : (float)(x < 0.0f ? -y : a - y); /* -0 stays */
}
MP_FN float mp_erff(float x)
{
    const float b = mp_abs_belowf(x, 4.0f), t = b * b, magic = 12582912.0f + 127.0f;
    const float small = mp_fmaf(b, MP_P6(mp_fmaf, t, 0.128379166f, -0.376125574f, 0.11282555f, -0.0267956052f, 0.00503912009f,
                                           -0.000624354347f), b);
    const float rest = mp_pairsf(b, 0.000158615614f, -1.12943673f, -0.633506596f, -0.108103f, 0.025004359f, -0.00412728591f,
                                 0.000425441045f, -2.03187556e-05f); /* log(erfc(b)) */
    const float whole = mp_fmaf(rest, 1.44269504f, magic), n = whole - magic;
    const float power = mp_bits_to_float(mp_float_to_bits(whole) << 23);
    const float q = mp_exp_nearf(mp_fmaf(n, -0.693359375f, rest), n * 2.12194440e-4f), large = mp_fmaf(-q, power, 1.0f - power);
    return mp_or_nanf(mp_with_signf(mp_float_to_bits(b) < 0x3f5c28f6u ? small : large, x), x); /* 0.86 */
}
#endif

/* |x| as quarter turns: the nearest whole number of them, by its lowest bits, and what is left, between -0.505 and 0.505. 2/pi
 * is three parts, so that the products with the first two are exact; of its bits, those that are whole turns of a large x
 * are left out. */
MP_FN double mp_turnf(float x, uint32_t *quarter)
{
    const double a = fabs((double)x), round4 = 27021597764222976.0, round = 6755399441055744.0;
    double high = 0x1.45f306dp-1, mid = 0x1.9391054p-30, low = 0x1.4fe13abe8fa9ap-59;
    high = a < 0x1p50 ? high : 0x1.b939105p-26;
    mid = a < 0x1p50 ? mid : 0x1.29fc275p-56;
    low = a < 0x1p50 ? low : 0x1.f47d4d377036ep-86;
    high = a < 0x1p76 ? high : 0x1.529fc27p-52;
    mid = a < 0x1p76 ? mid : 0x1.5f47d4dp-82;
    low = a < 0x1p76 ? low : 0x1.bb81b6c52b328p-113;
    high = a < 0x1p102 ? high : 0x1.d5f47d4p-78;
    mid = a < 0x1p102 ? mid : 0x1.a6ee06dp-107;
    low = a < 0x1p102 ? low : 0x1.6295993c43904p-136;
    const double first = a * high, second = a * mid;
    const double sum = (first - ((first + round4) - round4)) + (second - ((second + round4) - round4)), whole = sum + round;
    *quarter = (uint32_t)mp_double_to_bits(whole);
    return mp_fma(a, low, sum - (whole - round));
}
#if MP_FUSED
/* The same of |x| <= 2^15 in float: what is left, in radians, and *low more. pi/2 is three parts. With `exact`, *low has also
 * what rounding took from the rest, unless that is below 2^-9: there the difference is not exact, and not needed. */
MP_FN float mp_turn_nearf(float x, uint32_t *quarter, float *low, int exact)
{
    const float a = fabsf(x), whole = mp_fmaf(a, 0.636619747f, 12582912.0f), n = whole - 12582912.0f;
    const float first = mp_fmaf(n, -1.57079637f, a), r = mp_fmaf(n, 4.37113883e-8f, first); /* the first is exact */
    const float lost = mp_fmaf(n, 4.37113883e-8f, first - r);
    *quarter = mp_float_to_bits(whole);
    *low = mp_fmaf(n, 1.71512451e-15f, exact && mp_float_to_bits(r * r) >= 0x36800000u ? lost : 0.0f);
    return r;
}
MP_FN float mp_turn_anyf(float x, uint32_t *quarter, float *low, int quick, int exact)
{
    const float near = mp_turn_nearf(x, quarter, low, exact);
    if (quick) return near;
    uint32_t far_quarter;
    const double far = mp_turnf(x, &far_quarter) * 1.5707963267948966;
    const int is_near = (mp_float_to_bits(x) & 0x7fffffffu) <= 0x47000000u;
    *quarter = is_near ? *quarter : far_quarter;
    *low = is_near ? *low : (float)(far - (double)(float)far);
    return is_near ? near : (float)far;
}
#else
MP_FN float mp_turn_anyf(float x, uint32_t *quarter, float *low, int quick, int exact)
{
    const double far = mp_turnf(x, quarter) * 1.5707963267948966;
    (void)quick, (void)exact;
    *low = (float)(far - (double)(float)far);
    return (float)far;
}
#endif
/* sin(x + start quarter turns), of the sign of `sign` for the first half turn. */
MP_FN float mp_wavef(float x, uint32_t start, uint32_t sign, int quick)
{
    uint32_t quarter;
    float low;
    const float r = mp_turn_anyf(x, &quarter, &low, quick, 0), t = r * r;
    const float sine = mp_fmaf(r * t, MP_P3(mp_fmaf, t, -0.166666538f, 0.00833213143f, -0.000195108383f), low) + r;
    const float cosine = MP_P5(mp_fmaf, t, 1.0f, -0.5f, 0.0416666195f, -0.00138866785f, 2.43822506e-05f);
    const uint32_t q = quarter + start;
    return mp_bits_to_float(mp_float_to_bits(q & 1u ? cosine : sine) ^ ((q << 30 ^ sign) & 0x80000000u));
}
MP_FN float mp_sin_anyf(float x, int quick) { return mp_wavef(x, 0, mp_float_to_bits(x), quick); }
MP_FN float mp_cos_anyf(float x, int quick) { return mp_wavef(x, 1, 0, quick); }
MP_FN float mp_tan_anyf(float x, int quick)
{
    uint32_t quarter;
    float low;
    const float r = mp_turn_anyf(x, &quarter, &low, quick, 1), t = r * r;
    const float even = MP_P3(mp_fmaf, t * t, 0.0540597439f, 0.0108442176f, 0.00438558916f);
    const float odd = MP_P3(mp_fmaf, t * t, 0.133326709f, 0.0212806985f, 7.43613418e-5f);
    const float p = mp_fmaf(mp_fmaf(even, t, odd), t, 0.333333492f);
    const float rest = mp_fmaf(r * t, p, low), y = rest + r, inverse = -1.0f / y, lost = rest - (y - r);
    const float off = mp_fmaf(inverse, lost, mp_fmaf(inverse, y, 1.0f)), z = quarter & 1u ? mp_fmaf(inverse, off, inverse) : y;
    return mp_bits_to_float(mp_float_to_bits(z) ^ (mp_float_to_bits(x) & 0x80000000u));
}
/* Large arguments of sin, cos and tan are rare and take three times as long. A loop by MP_QUICKLY has mp_quick = 1: it leaves
 * them out and notes the largest argument in mp_rare; what is stored is thrown away and made anew where there was one.
 * y may be the memory of an operand, so that a chunk of it is made elsewhere first. */
enum { mp_quick = 0, MP_QUICK_CHUNK = 512, MP_QUICK_MOST = 0x47000000 }; /* bits of 2^15 */
static uint32_t mp_rare __attribute__((unused));
#define MP_RANGED(function, x) __extension__ ({ \
    const float mp_x = (x); \
    const uint32_t mp_size = mp_float_to_bits(mp_x) & 0x7fffffffu; \
    if (mp_quick) mp_rare = mp_rare > mp_size ? mp_rare : mp_size; \
    function(mp_x, mp_quick); })
#define mp_sinf(x) MP_RANGED(mp_sin_anyf, x)
#define mp_cosf(x) MP_RANGED(mp_cos_anyf, x)
#define mp_tanf(x) MP_RANGED(mp_tan_anyf, x)
#define MP_QUICKLY(begin, end, y, ...) \
    for (int64_t mp_from = (begin), mp_end = (end), mp_to; mp_from < mp_end; mp_from = mp_to) { \
        _Alignas(64) __typeof__(*y) mp_chunk[MP_QUICK_CHUNK]; \
        __typeof__(*y) *const mp_place = y + mp_from; \
        __typeof__(*y) *const mp_shifted = (__typeof__(*y) *)((uintptr_t)mp_chunk - (uintptr_t)mp_from * sizeof *y); \
        mp_to = mp_end - mp_from < MP_QUICK_CHUNK ? mp_end : mp_from + MP_QUICK_CHUNK; \
        __typeof__(*y) *const y = mp_shifted; \
        uint32_t mp_rare = 0; \
        { \
            enum { mp_quick = MP_FUSED }; \
            _Pragma("omp simd reduction(max : mp_rare)") \
            for (int64_t i = mp_from; i < mp_to; ++i) __VA_ARGS__ \
        } \
        if (!MP_FUSED || mp_rare > MP_QUICK_MOST) { \
            _Pragma("omp simd") \
            for (int64_t i = mp_from; i < mp_to; ++i) __VA_ARGS__ \
        } \
        memcpy(mp_place, mp_chunk, (size_t)(mp_to - mp_from) * sizeof *y); \
    }

/* ---- double ---- */

MP_FN double mp_exp_poly(double r)
{
    return MP_P13(mp_fma, r,
        0.5, 0.16666666666666652, 0.041666666666667275, 0.0083333333333379268, 0.0013888888888802901,
        0.0001984126983580263, 2.4801587355356397e-05, 2.755732232608764e-06, 2.7557302788997481e-07,
        2.5051199159594862e-08, 2.0879070933184275e-09, 1.6191918876552856e-10, 1.1377873430400103e-11);
}
MP_FN double mp_exp2_poly(double r)
{
    return MP_P12(mp_fma, r,
        0.69314718055994529, 0.24022650695910072, 0.055504108664821687, 0.0096181291076283294,
        0.0013333558146392693, 0.00015403530393640587, 1.525273385431732e-05, 1.3215486595011942e-06,
        1.0178051942283164e-07, 7.0549744446116316e-09, 4.4565704705299265e-10, 2.5625463252905976e-11);
}
MP_FN double mp_log_poly(double z)
{
    return MP_P19(mp_fma, z,
        0.33333333333333143, -0.24999999999987979, 0.20000000000066537, -0.16666666669825489,
        0.142857142801005, -0.12499999691477118, 0.11111111147118639, -0.10000015204741319,
        0.090909239409046952, -0.083329135797219081, 0.076915296845537412, -0.071494389000638828,
        0.066845902095678381, -0.061966842625464237, 0.056683741353762675, -0.056777525619258411,
        0.065034822204644863, -0.059817782560514607, 0.026151651534081298);
}
MP_FN double mp_atan_poly(double t)
{
    return MP_P20(mp_fma, t,
        -0.33333333333333093, 0.19999999999955431, -0.14285714282801945, 0.11111111013642001,
        -0.090909071190925811, 0.076922811847799463, -0.06666414980829001, 0.058805924541132121,
        -0.052538051066150955, 0.047232918570090994, -0.04221713903015719, 0.036693447278307562,
        -0.029985442505819124, 0.022084993104419453, -0.013994840482928306, 0.0072632575306560681,
        -0.0029192929319966261, 0.00084346837730250499, -0.00015479378918928342, 1.34889785735067e-05);
}
MP_FN double mp_asin_poly(double t)
{
    return MP_P15(mp_fma, t,
        0.16666666666667068, 0.074999999998873926, 0.044642857253265666, 0.03038193896381532,
        0.022372320779031132, 0.017349667141375161, 0.01400548701470029, 0.011174258961642123,
        0.012290482405051324, -0.0039051890168075734, 0.050478891024297166, -0.10080645515934658,
        0.1863429248090423, -0.18306879372442059, 0.10092807569524401);
}
MP_FN double mp_exp_near_poly(double r) { return mp_exp_poly(r); }

#define MP_FIRST
#define MP_REAL double
#define MP_BITS_TYPE uint64_t
#define MP_NAME(name) name
#define MP_TO_BITS mp_double_to_bits
#define MP_OF_BITS mp_bits_to_double
#define MP_MANTISSA 52
#define MP_BIAS 1023ull
#define MP_ROUND 6755399441055744.0
#define MP_C(single, double_) double_
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
#undef MP_MORE

/* By the C library, one number at a time, and not by its vector functions, which are less exact than the scalar ones. */
static __attribute__((noinline, unused)) double mp_sin(double x) { return sin(x); }
static __attribute__((noinline, unused)) double mp_cos(double x) { return cos(x); }
static __attribute__((noinline, unused)) double mp_tan(double x) { return tan(x); }
static __attribute__((noinline, unused)) double mp_sinh(double x) { return sinh(x); }
static __attribute__((noinline, unused)) double mp_cosh(double x) { return cosh(x); }
static __attribute__((noinline, unused)) double mp_erf(double x) { return erf(x); }
static __attribute__((noinline, unused)) double mp_pow(double x, double y) { return pow(x, y); }
static __attribute__((noinline, unused)) double mp_asinh(double x) { return asinh(x); }
static __attribute__((noinline, unused)) double mp_acosh(double x) { return acosh(x); }
static __attribute__((noinline, unused)) double mp_atanh(double x) { return atanh(x); }

/* Inverse hyperbolic functions of float by log1p of double, whose argument loses nothing near 0. */
MP_FN float mp_asinhf(float x)
{
    const double a = fabs((double)x), s = a * a;
    const float y = (float)mp_log1p(a + s / (1.0 + sqrt(s + 1.0)));
    return a < INFINITY ? mp_with_signf(y, x) : x;
}
MP_FN float mp_acoshf(float x)
{
    const double t = (double)x - 1.0;
    const float y = (float)mp_log1p(t + sqrt(t * (t + 2.0)));
    return x < 1.0f ? NAN : y;
}
MP_FN float mp_atanhf(float x)
{
    const double a = fabs((double)x);
    return mp_with_signf((float)(0.5 * mp_log1p(2.0 * a / (1.0 - a))), x);
}

/* The library's is within 3 units; a step of Newton's makes it nearly exact. */
static __attribute__((noinline, unused)) double mp_cbrt(double x)
{
    const double size = fabs(x), scale = size < 1e-250 ? 0x1p162 : size > 1e250 ? 0x1p-162 : 1.0;
    const double back = size < 1e-250 ? 0x1p-54 : size > 1e250 ? 0x1p54 : 1.0; /* 1 / cbrt(scale) */
    const double a = x * scale, y = cbrt(a), s = y * y, c = s * y;
    const double off = (c - a) + (fma(s, y, -c) + fma(y, y, -s) * y), z = (y - off / (3.0 * s)) * back;
    return x == 0.0 || x - x != 0.0 ? x : z;
}

/* The library's erfc is within 5 units; that of long double has bits to spare. */
static __attribute__((noinline, unused)) double mp_erfc(double x) { return (double)erfcl((long double)x); }
static __attribute__((noinline, unused)) double mp_gelu_none(double x)
{
    const double y = x < -40.0 ? -40.0 : x;
    return x > 40.0 ? x : (double)(0.5L * y * erfcl(y * -0.707106781186547524400844362104849039L));
}
/* x / (1 + e^-w) for w = high + low. */
MP_FN double mp_gated(double x, double high, double low)
{
    const double z = (x < -1e3 ? -1e3 : x) / mp_logistic(high, low) * 0x1p-512;
    return high > 40.0 ? x : z;
}
MP_FN double mp_gelu_fast_by(double x, double factor)
{
    const double w = x * factor;
    return mp_gated(x, w, fabs(x) < 1e3 ? fma(x, factor, -w) : 0.0);
}
MP_FN double mp_gelu_fast(double x) { return mp_gelu_fast_by(x, 1.702); }
MP_FN double mp_gelu_fast_tanh(double x) { return mp_gelu_fast_by(x, 3.404); }
/* w = 2 sqrt(2 / pi) x (1 + 0.044715 x^2) */
MP_FN double mp_gelu_tanh(double x)
{
    const double y = x > 1e3 ? 1e3 : x < -1e3 ? -1e3 : x, scale = 1.5957691216057308, s = y * y, s_low = fma(y, y, -s);
    const double c = 0.044715 * s, c_low = fma(0.044715, s, -c) + 0.044715 * s_low;
    const double d = 1.0 + c, d_low = (c < 1.0 ? c - (d - 1.0) : 1.0 - (d - c)) + c_low;
    const double v = y * d, v_low = fma(y, d, -v) + y * d_low;
    const double w = scale * v, w_low = fma(scale, v, -w) + scale * v_low - 9.96930880911092e-17 * v;
    return mp_gated(x, w, w_low);
}
#endif
