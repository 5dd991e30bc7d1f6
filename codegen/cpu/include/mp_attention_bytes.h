/* Few queries over a cache in 8 bits, by dot products of bytes. Queries, and weights times the scales of values, become
 * integers of 15 bits, two planes of bytes: sums are exact up to that. Included by mp_attention_few.h. */
#ifndef MP_ATTENTION_BYTES_H
#define MP_ATTENTION_BYTES_H

#if defined(__ARM_FEATURE_DOTPROD) && MP_LANES == 4
#define MP_BYTE_DOTS
#include <arm_neon.h>

enum { MP_BYTE_KEYS = 64, MP_BYTE_HEADS = 3 }; /* keys whose weights share a scale; heads whose sums registers hold */

MP_FN int mp_few_bytes(const mp_attention *a)
{
    const int bytes = a->k.type == MP_I8 && a->v.type == MP_I8 && mp_dense(&a->k) && mp_dense(&a->v);
    return bytes && a->dim % 16 == 0 && a->value_dim % 16 == 0;
}

/* x[i] = scale * (128 * high[i] + low[i]) for `count` numbers; gives the scale, NaN where one of them is not finite. */
MP_FN float mp_planes(const float *x, const int64_t count, int8_t *high, int8_t *low)
{
    uint32_t top = 0; /* bits of the largest: those of positive floats have their order, and NaN is above infinity */
    _Pragma("omp simd reduction(max : top)")
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = mp_float_to_bits(x[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const int bad = top >= 0x7f800000u;
    const float largest = mp_bits_to_float(top), ratio = bad || top == 0 ? 0.0f : 16256.0f / largest;
    const float inverse = ratio < INFINITY ? ratio : 0.0f;
    _Pragma("omp simd")
    for (int64_t i = 0; i < count; ++i) {
        const int32_t number = bad ? 0 : (int32_t)rintf(x[i] * inverse), upper = (number + 64) >> 7;
        high[i] = (int8_t)upper;
        low[i] = (int8_t)(number - 128 * upper);
    }
    return bad ? NAN : largest / 16256.0f;
}

/* mp_few_scores; planes[n][high, low][dim] are the queries, scales[n] theirs. R keys at a time. */
MP_FN void mp_few_byte_scores(const mp_attention *a, const int64_t b, const int64_t g, const int64_t from, const int64_t count,
                              const int N, const int R, const int8_t *planes, const float *scales, float *score)
{
    const int64_t dim = a->dim, stride = a->k.s2;
    for (int64_t j = 0; j < count; j += 4) {
        int32x4_t sums[MP_FEW_HEADS][4];
        float of_keys[4];
        MP_FULLY
        for (int l = 0; l < 4; l += R) {
            int32x4_t high[MP_FEW_SUMS], low[MP_FEW_SUMS];
            const int8_t *row[4];
            MP_FULLY
            for (int r = 0; r < R; ++r) {
                row[r] = (const int8_t *)mp_row(&a->k, b, g, from + mp_min(j + l + r, count - 1));
                of_keys[l + r] = mp_row_scale(&a->k, row[r], dim);
                mp_prefetch_l1((const char *)row[r] + a->ahead * stride, dim);
            }
            MP_FULLY
            for (int i = 0; i < N * R; ++i) high[i] = low[i] = vdupq_n_s32(0);
            for (int64_t i = 0; i < dim; i += 16) {
                int8x16_t codes[4];
                MP_FULLY
                for (int r = 0; r < R; ++r) codes[r] = vld1q_s8(row[r] + i);
                MP_FULLY
                for (int n = 0; n < N; ++n) {
                    const int8x16_t h = vld1q_s8(planes + 2 * n * dim + i), w = vld1q_s8(planes + (2 * n + 1) * dim + i);
                    MP_FULLY
                    for (int r = 0; r < R; ++r) {
                        high[n * R + r] = vdotq_s32(high[n * R + r], codes[r], h);
                        low[n * R + r] = vdotq_s32(low[n * R + r], codes[r], w);
                    }
                }
            }
            MP_FULLY
            for (int i = 0; i < N * R; ++i) sums[i / R][l + i % R] = vaddq_s32(vshlq_n_s32(high[i], 7), low[i]);
        }
        const float32x4_t all = vld1q_f32(of_keys);
        MP_FULLY
        for (int n = 0; n < N; ++n) {
            const int32x4_t total = vpaddq_s32(vpaddq_s32(sums[n][0], sums[n][1]), vpaddq_s32(sums[n][2], sums[n][3]));
            const float32x4_t made = vmulq_f32(vmulq_n_f32(vcvtq_f32_s32(total), scales[n]), all);
            vst1q_f32(score + n * (a->chunk + MP_LANES) + j, made);
        }
    }
}

#define MP_BYTE_STEP(lane) \
    { \
        int8x16_t row[4]; \
        MP_FULLY \
        for (int r = 0; r < 4; ++r) row[r] = vld1q_s8(rows[q + 4 * lane + r] + i); \
        const int16x8_t x0 = (int16x8_t)vzip1q_s8(row[0], row[1]), x1 = (int16x8_t)vzip2q_s8(row[0], row[1]); \
        const int16x8_t y0 = (int16x8_t)vzip1q_s8(row[2], row[3]), y1 = (int16x8_t)vzip2q_s8(row[2], row[3]); \
        const int8x16_t codes[4] = {(int8x16_t)vzip1q_s16(x0, y0), (int8x16_t)vzip2q_s16(x0, y0), \
                                    (int8x16_t)vzip1q_s16(x1, y1), (int8x16_t)vzip2q_s16(x1, y1)}; \
        MP_FULLY \
        for (int n = 0; n < N; ++n) { \
            const int8x16_t h = vld1q_s8(planes[n][0] + q), w = vld1q_s8(planes[n][1] + q); \
            MP_FULLY \
            for (int d = 0; d < 4; ++d) { \
                high[n * 4 + d] = vdotq_laneq_s32(high[n * 4 + d], codes[d], h, lane); \
                low[n * 4 + d] = vdotq_laneq_s32(low[n * 4 + d], codes[d], w, lane); \
            } \
        } \
    }

/* mp_few_values for up to MP_BYTE_HEADS heads: four keys of four columns make a vector. */
MP_FN void mp_few_byte_values(const mp_attention *a, const int64_t b, const int64_t g, const int64_t from, const int64_t count,
                              const int N, const float *weight, float *sums)
{
    const int64_t dim = a->value_dim;
    for (int64_t i = 0; i < N * dim; ++i) sums[i] = 0.0f;
    for (int64_t j0 = 0; j0 < count; j0 += MP_BYTE_KEYS) {
        const int64_t some = mp_min(MP_BYTE_KEYS, count - j0);
        const int8_t *rows[MP_BYTE_KEYS];
        float of_keys[MP_BYTE_KEYS], scales[MP_BYTE_HEADS];
        int8_t planes[MP_BYTE_HEADS][2][MP_BYTE_KEYS];
        for (int64_t j = 0; j < MP_BYTE_KEYS; ++j) {
            rows[j] = (const int8_t *)mp_row(&a->v, b, g, from + j0 + mp_min(j, some - 1));
            of_keys[j] = mp_row_scale(&a->v, rows[j], dim);
            mp_prefetch_l1((const char *)rows[j] + MP_BYTE_KEYS * a->v.s2, dim); /* the next ones, while these are at work */
        }
        for (int n = 0; n < N; ++n) {
            const float *const own = weight + n * (a->chunk + MP_LANES) + j0;
            float x[MP_BYTE_KEYS];
            for (int64_t j = 0; j < some; ++j) x[j] = own[j] == 0.0f ? 0.0f : own[j] * of_keys[j];
            for (int64_t j = some; j < MP_BYTE_KEYS; ++j) x[j] = 0.0f;
            scales[n] = mp_planes(x, MP_BYTE_KEYS, planes[n][0], planes[n][1]);
        }
        for (int64_t i = 0; i < dim; i += 16) {
            int32x4_t high[4 * MP_BYTE_HEADS], low[4 * MP_BYTE_HEADS];
            MP_FULLY
            for (int n = 0; n < 4 * N; ++n) high[n] = low[n] = vdupq_n_s32(0);
            for (int64_t q = 0; q < some; q += 16) {
                MP_BYTE_STEP(0)
                MP_BYTE_STEP(1)
                MP_BYTE_STEP(2)
                MP_BYTE_STEP(3)
            }
            MP_FULLY
            for (int n = 0; n < 4 * N; ++n) {
                float *const to = sums + n / 4 * dim + i + n % 4 * 4;
                const float32x4_t made = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high[n], 7), low[n]));
                vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), made, scales[n / 4]));
            }
        }
    }
}
#undef MP_BYTE_STEP

/* mp_few_heads. */
MP_FN void mp_few_byte_heads(const mp_attention *a, const int64_t b, const int64_t g, const int64_t s, const int64_t from,
                             const int64_t to, const int n0, const int N, float *room, float *sums, float *top, float *total)
{
    const int64_t dim = a->dim, scores = a->chunk + MP_LANES, count = to - from;
    float *const query = room, *const score = query + (N + a->rows) * dim, *const rest = score + N * scores;
    int8_t *const planes = (int8_t *)(rest + N * MP_LANES * MP_LANES);
    float scales[MP_FEW_HEADS];
    const float scale = mp_score_scale(a);
    for (int n = 0; n < N; ++n) {
        for (int64_t i = 0; i < dim; ++i) query[i] = mp_query(a, b, s, g * a->group + n0 + n, i) * scale;
        scales[n] = mp_planes(query, dim, planes + 2 * n * dim, planes + (2 * n + 1) * dim);
    }
    mp_few_byte_scores(a, b, g, from, count, N, N <= MP_BYTE_HEADS ? 4 : N <= 6 ? 2 : 1, planes, scales, score);
    for (int n = 0; n < N; ++n)
        mp_few_weights(a, score + n * scores, b, g * a->group + n0 + n, s, from, count, top + n0 + n, total + n0 + n);
    float *const mine = sums + n0 * a->value_dim;
    int n = 0;
    for (; n + MP_BYTE_HEADS <= N; n += MP_BYTE_HEADS)
        mp_few_byte_values(a, b, g, from, count, MP_BYTE_HEADS, score + n * scores, mine + n * a->value_dim);
    if (N % MP_BYTE_HEADS == 2) mp_few_byte_values(a, b, g, from, count, 2, score + n * scores, mine + n * a->value_dim);
    if (N % MP_BYTE_HEADS == 1) mp_few_byte_values(a, b, g, from, count, 1, score + n * scores, mine + n * a->value_dim);
}
#endif
#endif
