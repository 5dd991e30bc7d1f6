/* Products of rows with the matrices that are chosen for them. Pairs of a row and one of its choices are sorted by
 * matrix, so that a strip of a matrix is read once for all its rows, and one that nobody chose not at all. */
#ifndef MP_EXPERTS_H
#define MP_EXPERTS_H

#include "mp_attention_vec.h"

#define MP_EXPERT_STRIP 8 /* rows of a matrix at a time: with two rows of x 16 sums, as many as hide a latency of 8 */
#define MP_EXPERT_AHEAD 1024 /* bytes by which a row is prefetched, or then the one that follows its strip */
typedef mp_vec (*mp_expert_vector)(const void *from, int64_t at);
typedef float (*mp_expert_number)(const void *from, int64_t at);

MP_FN mp_vec mp_expert_vector_f32(const void *p, int64_t at) { return mp_vload_f32((const float *)p + at); }
MP_FN mp_vec mp_expert_vector_bf16(const void *p, int64_t at) { return mp_vload_bf16((const mp_bf16 *)p + at); }
MP_FN mp_vec mp_expert_vector_f16(const void *p, int64_t at) { return mp_vload_f16((const mp_f16 *)p + at); }
MP_FN float mp_expert_number_f32(const void *p, int64_t at) { return ((const float *)p)[at]; }
MP_FN float mp_expert_number_bf16(const void *p, int64_t at) { return mp_load_bf16(((const mp_bf16 *)p)[at]); }
MP_FN float mp_expert_number_f16(const void *p, int64_t at) { return mp_load_f16(((const mp_f16 *)p)[at]); }

/* Pairs in the order of their matrices: those of matrix e are order[starts[e]] … order[starts[e + 1] - 1]. */
MP_FN void mp_expert_sort(const int64_t *ids, int64_t pairs, int64_t experts, int64_t *order, int64_t *starts)
{
    for (int64_t e = 0; e <= experts; ++e) starts[e] = 0;
    for (int64_t p = 0; p < pairs; ++p) ++starts[ids[p] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    for (int64_t p = 0; p < pairs; ++p) order[starts[ids[p]]++] = p;
    for (int64_t e = experts; e > 0; --e) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* sums[p][c]: row p of x, which begins at x_at[p], times row `first` + c of a matrix of `rows` rows at w_at, of
 * `bytes` a number. */
MP_INLINE void mp_expert_block(const int P, const void *x, mp_expert_vector x_vector, mp_expert_number x_number,
    const int64_t *x_at, const void *w, mp_expert_vector w_vector, mp_expert_number w_number, const int64_t w_at,
    const int bytes, const int64_t first, const int64_t rows, const int64_t depth, float sums[2][MP_EXPERT_STRIP])
{
    mp_vec acc[2][MP_EXPERT_STRIP];
    int64_t row[MP_EXPERT_STRIP], i = 0;
    for (int c = 0; c < MP_EXPERT_STRIP; ++c) {
        row[c] = w_at + mp_min(first + c, rows - 1) * depth;
        for (int p = 0; p < P; ++p) acc[p][c] = mp_splat(0.0f);
    }
    for (; i + MP_LANES <= depth; i += MP_LANES) {
        if (i % (64 / bytes) == 0) {
            const int64_t next = i + MP_EXPERT_AHEAD / bytes, skip = next < depth ? 0 : (MP_EXPERT_STRIP - 1) * depth;
            for (int c = 0; c < MP_EXPERT_STRIP; ++c)
                __builtin_prefetch((const char *)w + (row[c] + next + skip) * bytes);
        }
        mp_vec v[2];
        for (int p = 0; p < P; ++p) v[p] = x_vector(x, x_at[p] + i);
        for (int c = 0; c < MP_EXPERT_STRIP; ++c) {
            const mp_vec m = w_vector(w, row[c] + i);
            for (int p = 0; p < P; ++p) acc[p][c] += v[p] * m;
        }
    }
    for (int p = 0; p < P; ++p)
        for (int c = 0; c < MP_EXPERT_STRIP; ++c) {
            float lanes[MP_LANES], sum = 0.0f;
            mp_vstore(lanes, acc[p][c]);
            for (int l = 0; l < MP_LANES; ++l) sum += lanes[l];
            for (int64_t j = i; j < depth; ++j) sum += x_number(x, x_at[p] + j) * w_number(w, row[c] + j);
            sums[p][c] = sum;
        }
}
#endif
