/* Sixteen bytes at a time: vectors of elements, dot products of them, and sums over the lanes of a warp. */
template <typename T> MP_FN void mp_widen(float *f, const uint4 &raw);
template <> MP_FN void mp_widen<float>(float *f, const uint4 &raw)
{
    f[0] = mp_bits_to_float(raw.x);
    f[1] = mp_bits_to_float(raw.y);
    f[2] = mp_bits_to_float(raw.z);
    f[3] = mp_bits_to_float(raw.w);
}
template <> MP_FN void mp_widen<mp_bf16>(float *f, const uint4 &raw)
{
    f[0] = mp_bits_to_float(raw.x << 16), f[1] = mp_bits_to_float(raw.x & 0xffff0000u);
    f[2] = mp_bits_to_float(raw.y << 16), f[3] = mp_bits_to_float(raw.y & 0xffff0000u);
    f[4] = mp_bits_to_float(raw.z << 16), f[5] = mp_bits_to_float(raw.z & 0xffff0000u);
    f[6] = mp_bits_to_float(raw.w << 16), f[7] = mp_bits_to_float(raw.w & 0xffff0000u);
}
template <> MP_FN void mp_widen<mp_f16>(float *f, const uint4 &raw)
{
    const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
    MP_UNROLL
    for (int i = 0; i < 4; ++i) {
        f[2 * i] = mp_half_to_float((uint16_t)u[i]);
        f[2 * i + 1] = mp_half_to_float((uint16_t)(u[i] >> 16));
    }
}

/* E elements as they lie in memory: loaded early, widened when they are needed. */
template <typename T, int E> struct mp_vec {
    enum { PIECES = E * (int)sizeof(T) / 16, EACH = 16 / (int)sizeof(T) };
    uint4 raw[PIECES];
};
template <typename T, int E> MP_FN void mp_vec_const(mp_vec<T, E> &v, const T *p)
{
    MP_UNROLL
    for (int i = 0; i < mp_vec<T, E>::PIECES; ++i) v.raw[i] = mp_read_const(p + i * mp_vec<T, E>::EACH);
}
template <typename T, int E> MP_FN void mp_vec_fresh(mp_vec<T, E> &v, const T *p)
{
    MP_UNROLL
    for (int i = 0; i < mp_vec<T, E>::PIECES; ++i) v.raw[i] = mp_read_fresh(p + i * mp_vec<T, E>::EACH);
}
template <typename T, int E> MP_FN void mp_vec_zero(mp_vec<T, E> &v)
{
    MP_UNROLL
    for (int i = 0; i < mp_vec<T, E>::PIECES; ++i) v.raw[i] = make_uint4(0, 0, 0, 0);
}
template <typename T, int E> MP_FN void mp_vec_floats(float *f, const mp_vec<T, E> &v)
{
    MP_UNROLL
    for (int i = 0; i < mp_vec<T, E>::PIECES; ++i) mp_widen<T>(f + i * mp_vec<T, E>::EACH, v.raw[i]);
}

/* Neighbours in half precision at a multiple of their size: two as a word, four, eight. */
template <typename T> MP_FN uint32_t mp_pack(float low, float high);
template <> MP_FN uint32_t mp_pack<mp_bf16>(float low, float high) { return mp_pack_brain(low, high); }
template <> MP_FN uint32_t mp_pack<mp_f16>(float low, float high) { return mp_pack_half(low, high); }
template <typename T> MP_FN void mp_store4(T *to, const float *f)
{
    *(uint2 *)to = make_uint2(mp_pack<T>(f[0], f[1]), mp_pack<T>(f[2], f[3]));
}
template <typename T> MP_FN void mp_store8(T *to, const float *f)
{
    uint4 v;
    v.x = mp_pack<T>(f[0], f[1]), v.y = mp_pack<T>(f[2], f[3]), v.z = mp_pack<T>(f[4], f[5]), v.w = mp_pack<T>(f[6], f[7]);
    *(uint4 *)to = v;
}

/* The weight of a norm in front of a product. Only constants may be read before the dependency: another kernel may have
 * computed the others. */
enum { MP_NO_GAMMA, MP_GAMMA_CONSTANT, MP_GAMMA_COMPUTED };

/* sum += w · x over the 16 bytes of w. */
template <typename T> MP_FN void mp_dot(float &sum, const uint4 &w, const float *x)
{
    float f[16 / sizeof(T)];
    mp_widen<T>(f, w);
    MP_UNROLL
    for (int i = 0; i < 16 / (int)sizeof(T); ++i) sum = fmaf(f[i], x[i], sum);
}

/* R values in each lane: afterwards lane l holds the warp's total of value l / (32 / R). R is 1, 2, 4, 8 or 16:
 * R - 1 + log2(32 / R) shuffles in place of 5 R. */
template <int R> MP_FN float mp_reduce_rows(float (&a)[R], int lane)
{
    MP_UNROLL
    for (int n = R / 2; n; n >>= 1) {
        const int d = 16 * n / (R / 2);
        const bool upper = lane & d;
        MP_UNROLL
        for (int i = 0; i < n; ++i) {
            const float keep = upper ? a[i + n] : a[i], send = upper ? a[i] : a[i + n];
            a[i] = keep + __shfl_xor_sync(~0u, send, d);
        }
    }
    MP_UNROLL
    for (int d = 16 / R; d; d >>= 1) a[0] += __shfl_xor_sync(~0u, a[0], d);
    return a[0];
}

/* An epilogue that reads nothing of the kernels in front but what it fetches. */
struct mp_nothing_more {
    template <typename Extra> MP_FN void operator()(Extra &) const {}
};
