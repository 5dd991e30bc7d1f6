/* What stands before and behind a product: how rows of x are read and normed, and functions for epilogues. */
#ifndef MP_LINEAR_ROW_H
#define MP_LINEAR_ROW_H

#include "mp_plan.h"

/* Row `row` of group g of the product: what becomes of its sums. c points to the kernel's arguments. */
typedef void (*mp_finish)(const void *c, int64_t g, int64_t row, float *sums);

typedef struct {
    float mean, rest, scale; /* `rest` is what rounding left in the mean */
} mp_stats;

typedef enum { MP_NO_NORM, MP_RMS_NORM, MP_LAYER_NORM } mp_norm;

/* How x is read. */
typedef struct {
    mp_norm norm;
    float eps;
    float (*value)(const void *c, int64_t row, int64_t i); /* column i of row `row`, as it is */
    float (*normed)(const void *c, int64_t i, float x, mp_stats stats); /* x in column i, scaled and shifted */
} mp_prologue;

/* What the norm needs to know of a whole row. */
MP_INLINE mp_stats mp_row_stats(const mp_prologue *x, const void *c, const int64_t row, const int64_t K)
{
    mp_stats s = {0.0f, 0.0f, 1.0f};
    if (x->norm == MP_NO_NORM) return s;
    if (x->norm == MP_LAYER_NORM) {
        float sum = 0.0f, rest = 0.0f;
        MP_SIMD_SUM(sum)
        for (int64_t i = 0; i < K; ++i) sum += x->value(c, row, i);
        const float mean = sum / K;
        MP_SIMD_SUM(rest)
        for (int64_t i = 0; i < K; ++i) rest += x->value(c, row, i) - mean;
        s.mean = mean;
        s.rest = rest / K;
    }
    float squares = 0.0f;
    MP_SIMD_SUM(squares)
    for (int64_t i = 0; i < K; ++i) {
        const float d = x->norm == MP_LAYER_NORM ? x->value(c, row, i) - s.mean - s.rest : x->value(c, row, i);
        squares += d * d;
    }
    s.scale = 1.0f / sqrtf(squares / K + x->eps);
    return s;
}

/* Column i of a row, normed. */
MP_INLINE float mp_row_value(const mp_prologue *x, const void *c, const int64_t row, const int64_t i,
                             const mp_stats stats)
{
    const float value = x->value(c, row, i);
    return x->norm == MP_NO_NORM ? value : x->normed(c, i, value, stats);
}

/* What a kernel gives to the loops that products share: columns [from, end) of a row of x, normed. A row is read from its
 * first column on, which leaves in *stats what the norm needs to know. */
typedef void (*mp_read_row)(const void *c, int64_t row, int64_t from, int64_t end, mp_stats *stats, float *values);

MP_INLINE void mp_row_part(const mp_prologue *x, const int64_t K, const void *c, const int64_t row, const int64_t from,
                           const int64_t end, mp_stats *stats, float *restrict values)
{
    if (from == 0) *stats = mp_row_stats(x, c, row, K);
    const mp_stats known = *stats;
    MP_SIMD
    for (int64_t i = from; i < end; ++i) values[i - from] = mp_row_value(x, c, row, i, known);
}

/* The mp_read_row of a kernel, for x with K columns; the fields of its mp_prologue follow. */
#define MP_ROW_FUNCTION(kernel, K, ...) \
    static void kernel##_row(const void *c, const int64_t row, const int64_t from, const int64_t end, mp_stats *stats, \
                             float *restrict values) \
    { \
        const kernel##_args a = *(const kernel##_args *)c; /* a copy: nothing that is written here changes it */ \
        const mp_prologue x = {__VA_ARGS__}; \
        mp_row_part(&x, K, &a, row, from, end, stats, values); \
    }

/* Columns of a row that are read at a time where they go to other places than they come from. */
enum { MP_SOME_COLUMNS = 512 };

/* The best column of a row so far, and its bits: the largest, NaN above all; of equals the lowest column. */
MP_INLINE void mp_keep_best(int64_t *best, const int64_t column, const float v)
{
    const float top = mp_bits_to_float((uint32_t)best[1]);
    if (best[0] >= 0 && !(v > top) && !(v != v && top == top)) return;
    best[0] = column;
    best[1] = mp_float_to_bits(v);
}

/* Thread t's places of `found`, best column and its bits by row: nothing yet. */
MP_INLINE int64_t *mp_no_best(int64_t *found, const int t, const int64_t rows)
{
    int64_t *const mine = found + t * rows * 2;
    for (int64_t r = 0; r < rows; ++r) mine[2 * r] = -1;
    return mine;
}

/* The best column of row r among those that the T threads found. */
MP_INLINE int64_t mp_best_column(const int64_t *found, const int64_t r, const int64_t rows, const int T)
{
    int64_t best = -1;
    float top = 0.0f;
    for (int t = 0; t < T; ++t) {
        const int64_t *const theirs = found + (t * rows + r) * 2;
        const float v = mp_bits_to_float((uint32_t)theirs[1]);
        const int more = v > top || (v != v && top == top), same = v == top || (v != v && top != top);
        if (theirs[0] >= 0 && (best < 0 || more || (same && theirs[0] < best))) {
            best = theirs[0];
            top = v;
        }
    }
    return best;
}

#endif
