/* Functions whose text is the same for float and double; mp_functions.h reads it for float, mp_functions_more.h for the rest.
 * MP_REAL is the type, MP_C picks a constant. */
#define F MP_NAME(mp_fma)
#if defined(MP_FIRST)

/* Magnitude of one number, sign of another. */
MP_FN MP_REAL MP_NAME(mp_with_sign)(MP_REAL x, MP_REAL sign)
{
    const MP_BITS_TYPE top = (MP_BITS_TYPE)1 << (MP_MANTISSA + MP_C(8, 11));
    return MP_OF_BITS((MP_TO_BITS(x) & ~top) | (MP_TO_BITS(sign) & top));
}

/* 2^n of an integer n in the lowest bits of MP_ROUND + n, in two factors: n may be twice as small or large as exponents. */
MP_FN MP_REAL MP_NAME(mp_power_half)(MP_REAL rounded)
{
    const MP_BITS_TYPE n = MP_TO_BITS(rounded) - MP_TO_BITS(MP_ROUND) + 4 * MP_BIAS;
    return MP_OF_BITS(((n >> 1) - MP_BIAS) << MP_MANTISSA);
}
MP_FN MP_REAL MP_NAME(mp_power_rest)(MP_REAL rounded)
{
    const MP_BITS_TYPE n = MP_TO_BITS(rounded) - MP_TO_BITS(MP_ROUND) + 4 * MP_BIAS;
    return MP_OF_BITS((n - (n >> 1) - MP_BIAS) << MP_MANTISSA);
}

/* x = n ln(2) + r: MP_ROUND + n, and r. */
MP_FN MP_REAL MP_NAME(mp_exp_whole)(MP_REAL x) { return F(x, MP_C(1.44269504f, 1.4426950408889634), MP_ROUND); }
MP_FN MP_REAL MP_NAME(mp_exp_rest)(MP_REAL x, MP_REAL n)
{
    return F(n, MP_C(2.12194440e-4f, -1.9082149292705877e-10), F(n, MP_C(-0.693359375f, -0.69314718036912382), x));
}
/* e^r - 1 for |r| <= ln(2). */
MP_FN MP_REAL MP_NAME(mp_exp_minus_one)(MP_REAL r) { return F(MP_NAME(mp_exp_poly)(r), r * r, r); }
/* By 4^n e^r: one power serves twice, and the result may be subnormal or overflow. */
MP_FN MP_REAL MP_NAME(mp_exp)(MP_REAL x)
{
    const MP_REAL y = MP_NAME(mp_bounded)(x, MP_C(-104.0f, -746.0), MP_C(89.0f, 710.0)), magic = MP_ROUND + MP_BIAS;
    const MP_REAL whole = F(y, MP_C(0.72134752f, 0.72134752044448170), magic), n = whole - magic;
    const MP_REAL power = MP_OF_BITS(MP_TO_BITS(whole) << MP_MANTISSA);
    const MP_REAL r = F(n, MP_C(4.2438888e-4f, -3.8164298585411754e-10), F(n, MP_C(-1.38671875f, -1.3862943607382476), y));
    return MP_NAME(mp_or_nan)(F(MP_NAME(mp_exp_minus_one)(r), power, power) * power, x);
}

/* e^x - 1 as 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)): the largest n has no power of its own. x <= 89 or 710. */
MP_FN MP_REAL MP_NAME(mp_minus_one)(MP_REAL x)
{
    const MP_REAL whole = MP_NAME(mp_exp_whole)(x), q = MP_NAME(mp_exp_minus_one)(MP_NAME(mp_exp_rest)(x, whole - MP_ROUND));
    const MP_REAL power = MP_OF_BITS((MP_TO_BITS(whole) - MP_TO_BITS(MP_ROUND) + MP_BIAS - 1) << MP_MANTISSA);
    return F(q, power, power - MP_C(0.5f, 0.5)) * 2;
}
/* e^r - 1 for |r| <= ln(2) / 2, where `first` + `rest` is r to more places. */
MP_FN MP_REAL MP_NAME(mp_exp_near)(MP_REAL first, MP_REAL rest)
{
    const MP_REAL r = first + rest;
    return F(MP_NAME(mp_exp_near_poly)(r), r * r, rest) + first;
}
/* With E = e^(-2 |x|): (1 - E) / (1 + E) near 0, 1 - 2 E / (1 + E) beyond. */
MP_FN MP_REAL MP_NAME(mp_tanh)(MP_REAL x)
{
    const MP_REAL a = MP_NAME(mp_abs_below)(x, MP_C(10.0f, 20.0)), b = -2 * a, magic = MP_ROUND + MP_BIAS;
    const MP_REAL whole = F(b, MP_C(1.44269504f, 1.4426950408889634), magic), n = whole - magic;
    const MP_REAL power = MP_OF_BITS(MP_TO_BITS(whole) << MP_MANTISSA), rest = n * MP_C(2.12194440e-4f, -1.9082149292705877e-10);
    const MP_REAL q = MP_NAME(mp_exp_near)(F(n, MP_C(-0.693359375f, -0.69314718036912382), b), rest);
    const int near_zero = MP_TO_BITS(a) < MP_C(0x3f0ccccdu, 0x3fe199999999999aull); /* 0.55 */
    const MP_REAL base = near_zero ? 0 : 1, top = F(q, power, near_zero ? power - 1 : power);
    const MP_REAL y = base - (near_zero ? top : 2 * top) / F(q, power, power + 1);
    return MP_NAME(mp_or_nan)(MP_NAME(mp_with_sign)(y, x), x);
}

/* (1 + e^-(x + low)) times 2^-64, or 2^-512: e^-x may be larger than the largest number while what is divided by it is not
 * 0 yet. */
#define MP_SMALL MP_C(0x1p-64f, 0x1p-512)
MP_FN MP_REAL MP_NAME(mp_logistic_of_bounded)(MP_REAL y, MP_REAL low)
{
    const MP_REAL magic = MP_ROUND + MP_BIAS - MP_C(64, 512), whole = F(y, MP_C(-1.44269504f, -1.4426950408889634), magic);
    const MP_REAL power = MP_OF_BITS(MP_TO_BITS(whole) << MP_MANTISSA), n = whole - magic;
    const MP_REAL rest = F(n, MP_C(2.12194440e-4f, -1.9082149292705877e-10), -low);
    const MP_REAL q = MP_NAME(mp_exp_near)(F(n, MP_C(-0.693359375f, -0.69314718036912382), -y), rest);
    /* (1 + q) power + small: the sum of both powers first where it is exact, else the smaller ones */
    const int exact = MP_TO_BITS(whole) < MP_TO_BITS(magic) + MP_C(12, 26);
    const MP_REAL first = exact ? MP_SMALL : 0, last = exact ? 0 : MP_SMALL;
    return F(q, power, last) + (power + first);
}
MP_FN MP_REAL MP_NAME(mp_logistic)(MP_REAL x, MP_REAL low)
{
    return MP_NAME(mp_logistic_of_bounded)(MP_NAME(mp_bounded)(x, MP_C(-110.0f, -760.0), MP_C(18.0f, 40.0)), low);
}
MP_FN MP_REAL MP_NAME(mp_sigmoid)(MP_REAL x) { return MP_NAME(mp_or_nan)(MP_SMALL / MP_NAME(mp_logistic)(x, 0), x); }
MP_FN MP_REAL MP_NAME(mp_silu)(MP_REAL x)
{
    const MP_REAL y = MP_NAME(mp_bounded)(x, MP_C(-110.0f, -760.0), MP_C(18.0f, 40.0));
    const MP_REAL z = MP_NAME(mp_or_nan)(y, x) / MP_NAME(mp_logistic)(x, 0) * MP_SMALL;
    return x > MP_C(18.0f, 40.0) ? x : z;
}
MP_FN MP_REAL MP_NAME(mp_swiglu)(MP_REAL gate, MP_REAL up) { return MP_NAME(mp_silu)(gate) * up; }

#endif
#if defined(MP_MORE)

#if MP_MANTISSA == 52
MP_FN MP_REAL MP_NAME(mp_exp2)(MP_REAL x)
{
    const MP_REAL above = x < MP_C(-152.0f, -1080.0) ? MP_C(-152.0f, -1080.0) : x;
    const MP_REAL y = above > MP_C(129.0f, 1025.0) ? MP_C(129.0f, 1025.0) : above, whole = y + MP_ROUND;
    const MP_REAL r = y - (whole - MP_ROUND), p = F(MP_NAME(mp_exp2_poly)(r), r, 1);
    return p * MP_NAME(mp_power_half)(whole) * MP_NAME(mp_power_rest)(whole);
}
#endif
MP_FN MP_REAL MP_NAME(mp_expm1)(MP_REAL x)
{
    const MP_REAL above = x < MP_C(-20.0f, -40.0) ? MP_C(-20.0f, -40.0) : x;
    const MP_REAL y = MP_NAME(mp_minus_one)(above > MP_C(89.0f, 710.0) ? MP_C(89.0f, 710.0) : above);
    return MP_NAME(fabs)(x) < MP_C(1e-8f, 1e-17) ? x : y; /* -0 too */
}

/* The whole binary logarithm of x > 0, which is not subnormal, as MP_ROUND + MP_BIAS + k, and 2^-k. */
MP_FN MP_BITS_TYPE MP_NAME(mp_log_whole)(MP_REAL x)
{
    return (MP_TO_BITS(x) - MP_C(0x3f3504f3u, 0x3fe6a09e667f3bcdull) + ((MP_BITS_TYPE)MP_BIAS << MP_MANTISSA)) >> MP_MANTISSA;
}
/* Logarithms: k ln(2) + log(1 + z) in the units of `one` = 1 / ln(base), in two parts, and `two`, the same of ln(2). */
MP_FN MP_REAL MP_NAME(mp_log_sum)(MP_REAL k, MP_REAL z, MP_REAL one, MP_REAL one_low, MP_REAL two, MP_REAL two_low)
{
    const MP_REAL w = z * z, rest = w * F(z, MP_NAME(mp_log_poly)(z), MP_C(-0.5f, -0.5));
    if (one == 1) return F(k, two, z + F(k, two_low, rest));
    const MP_REAL s = z + rest, e = (z - s) + rest;
    return F(k, two, F(s, one, F(k, two_low, F(s, one_low, e * one))));
}
#if MP_MANTISSA == 52
MP_FN MP_REAL MP_NAME(mp_log_by)(MP_REAL x, MP_REAL one, MP_REAL one_low, MP_REAL two, MP_REAL two_low)
{
    const int small = x < MP_C(0x1p-126f, 0x1p-1022); /* subnormal: constants are chosen, so that nothing is computed twice */
    const MP_REAL y = x * (small ? MP_C(0x1p24f, 0x1p54) : 1), bias = small ? MP_ROUND + MP_BIAS + MP_C(24, 54) : MP_ROUND + MP_BIAS;
    const MP_BITS_TYPE k = MP_NAME(mp_log_whole)(y);
    const MP_REAL n = MP_OF_BITS(MP_TO_BITS(MP_ROUND) + k) - bias;
    const MP_REAL z = MP_OF_BITS(MP_TO_BITS(y) - ((k - MP_BIAS) << MP_MANTISSA)) - 1;
    const MP_REAL v = MP_NAME(mp_log_sum)(n, z, one, one_low, two, two_low);
    const MP_REAL bounded = x < INFINITY ? v : x, defined = x < 0 ? NAN : bounded;
    return x == 0 ? -INFINITY : defined;
}
MP_FN MP_REAL MP_NAME(mp_log)(MP_REAL x)
{
    return MP_NAME(mp_log_by)(x, 1, 0, MP_C(0.693359375f, 0.69314718036912382), MP_C(-2.12194440e-4f, 1.9082149292705877e-10));
}
MP_FN MP_REAL MP_NAME(mp_log2)(MP_REAL x)
{
    return MP_NAME(mp_log_by)(x, MP_C(1.44269502f, 1.4426950408889634), MP_C(1.92596303e-08f, 2.0355273740931033e-17), 1, 0);
}
MP_FN MP_REAL MP_NAME(mp_log10)(MP_REAL x)
{
    return MP_NAME(mp_log_by)(x, MP_C(0.434294492f, 0.43429448190325182), MP_C(-1.01030500e-08f, 1.098319650216765e-17),
                              MP_C(0.301025391f, 0.301029995663157), MP_C(4.60503898e-06f, 8.241712586023572e-13));
}
#endif

/* log(1 + x): what rounding took from 1 + x is given back to z. */
MP_FN MP_REAL MP_NAME(mp_log1p)(MP_REAL x)
{
    const MP_REAL u = 1 + x, lost = x < 1 ? x - (u - 1) : 1 - (u - x);
    const MP_BITS_TYPE k = MP_NAME(mp_log_whole)(u);
    const MP_REAL n = MP_OF_BITS(MP_TO_BITS(MP_ROUND) + k) - (MP_ROUND + MP_BIAS);
    const MP_REAL power = MP_OF_BITS((2 * MP_BIAS + 1 - k) << MP_MANTISSA); /* 2^(1-k); 0 for the largest x, where nothing is lost */
    const MP_REAL z = F(lost, power * MP_C(0.5f, 0.5), MP_OF_BITS(MP_TO_BITS(u) - ((k - MP_BIAS) << MP_MANTISSA)) - 1);
    const MP_REAL v = MP_NAME(mp_log_sum)(n, z, 1, 0, MP_C(0.693359375f, 0.69314718036912382), MP_C(-2.12194440e-4f, 1.9082149292705877e-10));
    return x > -1 ? (x == 0 || x == INFINITY ? x : v) : x == -1 ? -INFINITY : NAN;
}
/* log(1 + e^(beta x)) / beta; x where beta x is above the threshold. */
MP_FN MP_REAL MP_NAME(mp_softplus)(MP_REAL x, MP_REAL beta, MP_REAL threshold)
{
    const MP_REAL y = x * beta, a = -MP_NAME(fabs)(y), b = a < MP_C(-110.0f, -760.0) ? MP_C(-110.0f, -760.0) : a;
    const MP_REAL whole = MP_NAME(mp_exp_whole)(b), p = MP_NAME(mp_exp_minus_one)(MP_NAME(mp_exp_rest)(b, whole - MP_ROUND)) + 1;
    const MP_REAL soft = MP_NAME(mp_log1p)(p * MP_NAME(mp_power_half)(whole) * MP_NAME(mp_power_rest)(whole));
    return y > threshold ? x : (y > 0 ? y + soft : y == y ? soft : y) / beta;
}

/* atan of top / bottom for 0 <= top <= bottom. */
MP_FN MP_REAL MP_NAME(mp_atan_ratio)(MP_REAL top, MP_REAL bottom)
{
    const MP_REAL q = top / bottom, t = q * q;
    return F(q * t, MP_NAME(mp_atan_poly)(t), q);
}
MP_FN MP_REAL MP_NAME(mp_atan)(MP_REAL x)
{
    const MP_REAL a = MP_NAME(fabs)(x), y = MP_NAME(mp_atan_ratio)(a > 1 ? 1 : a, a > 1 ? a : 1);
    const MP_REAL z = a > 1 ? MP_C(1.57079637f, 1.5707963267948966) - (y - MP_C(-4.37113883e-08f, 6.123233995736766e-17)) : y;
    return MP_NAME(mp_with_sign)(z, x);
}
MP_FN MP_REAL MP_NAME(mp_atan2)(MP_REAL y, MP_REAL x)
{
    const MP_REAL ay = MP_NAME(fabs)(y), ax = MP_NAME(fabs)(x);
    const int steep = ay > ax, same = ay == ax; /* 0 / 0 and infinity / infinity are 1 or 0 */
    const MP_REAL top = steep ? ax : ay, bottom = steep ? ay : ax;
    const MP_REAL v = MP_NAME(mp_atan_ratio)(same ? (ay == 0 ? 0 : 1) : top, same ? 1 : bottom);
    const MP_REAL half = MP_C(1.57079637f, 1.5707963267948966), low = MP_C(-4.37113883e-08f, 6.123233995736766e-17);
    const MP_REAL first = steep ? half - (v - low) : v;
    const int left = MP_TO_BITS(x) >> (MP_MANTISSA + MP_C(8, 11)) != 0;
    const MP_REAL full = left ? (steep ? half + (v + low) : 2 * half - (v - 2 * low)) : first;
    return MP_NAME(mp_with_sign)(x == x && y == y ? full : NAN, y);
}

/* asin(x) = x + x^3 p(x^2) up to 0.6; beyond, pi/2 - 2 asin(sqrt((1 - x) / 2)). */
MP_FN MP_REAL MP_NAME(mp_asin)(MP_REAL x)
{
    const MP_REAL a = MP_NAME(fabs)(x), large = F(a, MP_C(-0.5f, -0.5), MP_C(0.5f, 0.5));
    const int near_one = a > MP_C(0.6f, 0.6);
    const MP_REAL t = near_one ? large : a * a, s = near_one ? MP_NAME(sqrt)(t) : a;
    const MP_REAL y = F(s * t, MP_NAME(mp_asin_poly)(t), s);
    const MP_REAL z = near_one ? MP_C(1.57079637f, 1.5707963267948966) - (2 * y - MP_C(-4.37113883e-08f, 6.123233995736766e-17)) : y;
    return MP_NAME(mp_with_sign)(z, x);
}
MP_FN MP_REAL MP_NAME(mp_acos)(MP_REAL x)
{
    const MP_REAL a = MP_NAME(fabs)(x), large = F(a, MP_C(-0.5f, -0.5), MP_C(0.5f, 0.5));
    const int near_one = a > MP_C(0.6f, 0.6);
    const MP_REAL t = near_one ? large : a * a, s = near_one ? MP_NAME(sqrt)(t) : a;
    const MP_REAL half = MP_C(1.57079637f, 1.5707963267948966), low = MP_C(-4.37113883e-08f, 6.123233995736766e-17);
    const MP_REAL y = F(s * t, MP_NAME(mp_asin_poly)(t), s), signed_ = MP_NAME(mp_with_sign)(y, x);
    const MP_REAL outer = x < 0 ? 2 * half - (2 * y - 2 * low) : 2 * y;
    return near_one ? outer : half - (signed_ - low);
}
#endif
#undef F
