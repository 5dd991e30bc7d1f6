/* Tensors as kernels see them: an address, an element type and strides. A kernel gives constants for what is known
 * when it is generated; after inlining nothing is left of the choices here. */
#ifndef MP_VIEW_H
#define MP_VIEW_H

#include "mp_math.h"

enum { MP_F64, MP_F32, MP_F16, MP_BF16, MP_I64, MP_I32, MP_I16, MP_I8, MP_U64, MP_U32, MP_U16, MP_U8, MP_BOOL };
#define MP_IS_FLOAT(type) ((type) <= MP_BF16)

typedef struct {
    int unstored, type;     /* unstored: there is no memory behind it, every element is `start`, or numbers rise from there */
    void *data;
    int64_t s0, s1, s2, s3; /* elements from one index to the next, by dimension */
    double start;
    int rises;
    const int32_t *table;   /* of a cache in pages: position i2 of sequence i0 is in page table[i0 * pages + i2 / page] */
    int64_t pages;          /* of a sequence */
    int page;               /* positions of a page; 0: the cache has none */
} mp_view;

#define MP_STORED(data, type, s0, s1, s2, s3) {0, type, (void *)(data), s0, s1, s2, s3, 0.0, 0, 0, 0, 0}
#define MP_PAGED(data, type, s0, s1, s2, s3, table, pages, page) \
    {0, type, (void *)(data), s0, s1, s2, s3, 0.0, 0, table, pages, page}
#define MP_CONSTANT(start, type) {1, type, 0, 0, 0, 0, 0, (double)(start), 0, 0, 0, 0}
#define MP_RAMP(start, type, s0, s1, s2, s3) {1, type, 0, s0, s1, s2, s3, (double)(start), 1, 0, 0, 0}

MP_FN int64_t mp_place(const mp_view *v, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    if (v->page) {
        i0 = v->table[i0 * v->pages + i2 / v->page];
        i2 %= v->page;
    }
    return i0 * v->s0 + i1 * v->s1 + i2 * v->s2 + i3 * v->s3;
}

/* The element at a place, of floats. double holds every value of the types that kernels compute with, so narrowing
 * it again is exact. */
MP_FN double mp_at(const mp_view *v, const int64_t place)
{
    if (v->unstored) return v->rises ? v->start + (double)place : v->start;
    if (v->type == MP_F32) return (double)((const float *)v->data)[place];
    if (v->type == MP_BF16) return (double)mp_load_bf16(((const mp_bf16 *)v->data)[place]);
    if (v->type == MP_F16) return (double)mp_load_f16(((const mp_f16 *)v->data)[place]);
    if (v->type == MP_I8) return (double)((const int8_t *)v->data)[place];
    return ((const double *)v->data)[place];
}
MP_FN float mp_at_f32(const mp_view *v, const int64_t place) { return (float)mp_at(v, place); }

/* The same of integers and flags; those of u64 by their bits. */
MP_FN int64_t mp_int_at(const mp_view *v, const int64_t place)
{
    if (v->unstored) return (int64_t)mp_at(v, place);
    switch (v->type) {
    case MP_I64: case MP_U64: return ((const int64_t *)v->data)[place];
    case MP_I32: return ((const int32_t *)v->data)[place];
    case MP_U32: return ((const uint32_t *)v->data)[place];
    case MP_I16: return ((const int16_t *)v->data)[place];
    case MP_U16: return ((const uint16_t *)v->data)[place];
    case MP_I8: return ((const int8_t *)v->data)[place];
    default: return ((const uint8_t *)v->data)[place];
    }
}

/* Stores a float. */
MP_FN void mp_put(const mp_view *v, const int64_t place, const double value)
{
    switch (v->type) {
    case MP_F64: ((double *)v->data)[place] = value; break;
    case MP_F16: ((mp_f16 *)v->data)[place] = mp_to_f16((float)value); break;
    case MP_BF16: ((mp_bf16 *)v->data)[place] = mp_to_bf16((float)value); break;
    default: ((float *)v->data)[place] = (float)value;
    }
}

MP_FN int64_t mp_size(const int type)
{
    switch (type) {
    case MP_F64: case MP_I64: case MP_U64: return 8;
    case MP_F32: case MP_I32: case MP_U32: return 4;
    case MP_F16: case MP_BF16: case MP_I16: case MP_U16: return 2;
    default: return 1;
    }
}

/* Where the row of the last dimension lies. */
MP_FN const void *mp_row(const mp_view *v, int64_t i0, int64_t i1, int64_t i2)
{
    return (const char *)v->data + mp_place(v, i0, i1, i2, 0) * mp_size(v->type);
}

/* Whether rows can be read by vectors of floats: elements of up to 32 bits that are neighbours. */
MP_FN int mp_dense(const mp_view *v)
{
    const int fits = v->type == MP_F32 || v->type == MP_F16 || v->type == MP_BF16 || v->type == MP_I8;
    return !v->unstored && v->s3 == 1 && fits;
}

/* What the elements of a row of a cache are multiplied with: in 8 bits a scale lies behind them (mp_cache_rows.h). */
MP_FN float mp_row_scale(const mp_view *v, const void *row, const int64_t dim)
{
    float scale = 1.0f;
    if (v->type == MP_I8) memcpy(&scale, (const char *)row + dim, sizeof scale);
    return scale;
}
#endif
