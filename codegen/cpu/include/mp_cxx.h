/* What differs between C11 and C++17, as which an exported plan may be compiled too. */
#ifndef MP_CXX_H
#define MP_CXX_H

#if defined(__cplusplus)
#include <atomic>
using namespace std; /* the atomic types and functions of C */
#define restrict __restrict
#define _Alignas alignas
#define _Static_assert static_assert
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* zeros, as in C */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wc99-designator"
#pragma clang diagnostic ignored "-Wc99-extensions"
#endif
/* Packed weights: a pointer to whatever a kernel reads them as. */
struct mp_weights {
    const void *at;
    mp_weights(const void *given) : at(given) {}
    template <class T> operator const T *() const { return static_cast<const T *>(at); }
};
#else
#include <stdatomic.h>
typedef const void *mp_weights;
#endif

#if defined(__FLT16_MANT_DIG__) && !(defined(__cplusplus) && !defined(__clang__) && __GNUC__ < 13)
#define MP_HAS_FLOAT16 1
#endif
#endif
