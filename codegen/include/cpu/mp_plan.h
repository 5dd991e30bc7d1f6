/* What every generated plan includes: element types, scalar functions, threads and errors. */
#ifndef MP_PLAN_H
#define MP_PLAN_H

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "mp_math.h"
#include "mp_amx.h"
#include "mp_tile.h"
#include "mp_vec.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>

#if defined(__clang__)
/* `omp simd` allows vectors, it does not demand them: a loop over sinf stays as it is. */
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define MP_UNUSED __attribute__((unused))
/* Not inlined: one giant plan function takes the compiler several times as long, and profilers see the kernels. Not cloned
 * either: gcc would compile a kernel and all that it calls anew for the first and the last layer, whose arguments differ. */
#if defined(MP_PARTS) /* the plan is compiled in parts, side by side */
#define MP_KERNEL __attribute__((noinline, visibility("hidden"))) MP_NOCLONE void
#else
#define MP_KERNEL static __attribute__((noinline)) MP_NOCLONE void
#endif
#define MP_INLINE static inline __attribute__((always_inline, unused))
#define MP_PRAGMA(text) _Pragma(#text)
#define MP_SIMD MP_PRAGMA(omp simd)
#define MP_SIMD_SUM(v) MP_PRAGMA(omp simd reduction(+ : v))
#if defined(__clang__)
#define MP_UNROLL(n) MP_PRAGMA(clang loop unroll_count(n))
#else
#define MP_UNROLL(n) MP_PRAGMA(GCC unroll n)
#endif

/* The first thing that went wrong; Python turns it into an exception with the IR line of the step. */
enum { MP_OK = 0, MP_INDEX = 1, MP_POSITION = 2, MP_CACHE_FULL = 3, MP_COUNT = 4, MP_COMM = 5 };

typedef struct {
    int32_t code, step;
    int64_t place, value, limit;
} mp_error;

/* Gives every rank's bytes in rank order; what it returns is 0, or why the ranks can't talk any more. */
typedef int (*mp_exchange_fn)(void *comm, const void *data, int64_t bytes, int64_t tag, const void *const **parts);

typedef struct {
    const int64_t *symbols;   /* values of the symbolic dimensions, in the order of the plan */
    void *const *inputs;
    void *const *outputs;
    void *const *params;
    char *arena;
    const int64_t *offsets;   /* byte offset of each arena slot for these symbols */
    int32_t threads;
    mp_exchange_fn exchange;  /* with the other ranks, where there are any */
    void *comm;
    int64_t room;             /* bytes of one exchange */
} mp_args;

enum { MP_MOST_PARTS = 64 };

/* One call of the plan, shared by all threads of its parallel region. */
typedef struct {
    const mp_args *args;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int turn;
    _Alignas(64) atomic_int taken;  /* pieces of the current kernel's work that were not dealt out beforehand */
    atomic_int ready[MP_MOST_PARTS]; /* threads that have prepared what the work on a part of the rows needs */
    _Alignas(64) atomic_int pieces[MP_MOST_PARTS]; /* of that work which somebody has */
    _Alignas(64) atomic_int failed; /* a lock on *error */
    mp_error *error;
    const void *const *parts; /* what the ranks gave in the last exchange */
} mp_run;

/* The weights that a thread reads next. */
typedef struct {
    const char *first;
    int64_t bytes;
} mp_next;

/* Work that is shared out by counters begins anew after each barrier. */
static inline void mp_begin_anew(mp_run *run, const int T)
{
    atomic_store_explicit(&run->taken, 0, memory_order_relaxed);
    for (int i = 0; i < T && i < MP_MOST_PARTS; ++i) {
        atomic_store_explicit(&run->ready[i], 0, memory_order_relaxed);
        atomic_store_explicit(&run->pieces[i], 0, memory_order_relaxed);
    }
}

/* Waits until all T threads are here. Who waits asks for weights that it will read next: the memory is never idle because
 * a core is. Spins first: phases are microseconds long; then gives the core away. */
static void __attribute__((unused, noinline)) mp_meet(mp_run *run, int T, const mp_next next)
{
    enum { FIRST = 2 << 10, MOST = 512 << 10 }; /* bytes: into L1, into L2 */
    const int64_t most = next.bytes < MOST ? next.bytes : MOST;
    int64_t asked = 0;
    for (; asked < FIRST && asked < most; asked += 64) __builtin_prefetch(next.first + asked, 0, 3);
    if (T == 1) {
        mp_begin_anew(run, T);
        return;
    }
    const int turn = atomic_load_explicit(&run->turn, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&run->arrived, 1, memory_order_acq_rel) == T - 1) {
        atomic_store_explicit(&run->arrived, 0, memory_order_relaxed);
        mp_begin_anew(run, T);
        atomic_store_explicit(&run->turn, turn + 1, memory_order_release);
        return;
    }
    for (int spin = 0; atomic_load_explicit(&run->turn, memory_order_acquire) == turn;) {
        if (asked < most) {
            __builtin_prefetch(next.first + asked, 0, 2);
            asked += 64;
        } else if (++spin > 4000) {
            sched_yield();
        }
    }
}

MP_INLINE void mp_barrier(mp_run *run, int T) { mp_meet(run, T, (mp_next){0, 0}); }

/* The number of the next piece of work that nobody has; counts from 0 after each barrier. */
static inline int mp_take(mp_run *run) { return atomic_fetch_add_explicit(&run->taken, 1, memory_order_relaxed); }

/* Rows in parts, each of which belongs to one thread or several: they prepare it and take its pieces first, but a thread that
 * has none left helps the others, since cores are not equally fast: some share their units with a neighbour. */
static inline void mp_prepared(mp_run *run, int part) { atomic_fetch_add_explicit(&run->ready[part], 1, memory_order_release); }
static inline void mp_await(mp_run *run, int part, int owners)
{
    for (int spin = 0; atomic_load_explicit(&run->ready[part], memory_order_acquire) < owners;)
        if (++spin > 4000) sched_yield();
}
static inline int mp_piece(mp_run *run, int part) { return atomic_fetch_add_explicit(&run->pieces[part], 1, memory_order_relaxed); }

typedef struct {
    int64_t first, count;
} mp_span;

/* Several of a part's `all` pieces at once, none of which anybody has: up to `most`, but fewer towards the end, so that nobody
 * waits long for who took the last ones. They lie in one line of `line` pieces. The count is 0 when there are none left. */
static inline mp_span mp_some(mp_run *run, int part, int owners, int64_t all, int64_t line, int64_t least, int64_t most)
{
    const int64_t fair = all / owners; /* with little for each, small differences count */
    if (least > fair / 4) least = fair / 4 > 1 ? fair / 4 : 1;
    int first = atomic_load_explicit(&run->pieces[part], memory_order_relaxed);
    while (first < all) {
        int64_t count = (all - first) / (2 * owners), rest = line - first % line;
        if (count < least) count = least;
        if (count > most) count = most;
        if (rest - count < least && rest <= most) count = rest; /* not even `least` would be left */
        if (count > rest) count = rest;
        if (atomic_compare_exchange_weak_explicit(&run->pieces[part], &first, first + (int)count, memory_order_relaxed, memory_order_relaxed))
            return (mp_span){first, count};
    }
    return (mp_span){first, 0};
}

/* Keeps the error of the lowest step and place, so that it is the same for any number of threads; the plan runs
 * on with clamped values and reports at its end. */
static void __attribute__((unused, noinline))
mp_fail(mp_run *run, int code, int step, int64_t place, int64_t value, int64_t limit)
{
    int unlocked = 0;
    while (!atomic_compare_exchange_weak(&run->failed, &unlocked, 1)) unlocked = 0;
    mp_error *e = run->error;
    if (!e->code || step < e->step || (step == e->step && place < e->place)) {
        e->code = code;
        e->step = step;
        e->place = place;
        e->value = value;
        e->limit = limit;
    }
    atomic_store(&run->failed, 0);
}

/* One exchange with the other ranks, by thread 0: every thread's data is ready before, and everyone's there after. */
static void __attribute__((unused, noinline))
mp_exchange(mp_run *run, int t, int T, int step, const void *data, int64_t bytes, int64_t number)
{
    mp_barrier(run, T);
    if (t == 0) {
        const int failure = run->args->exchange(run->args->comm, data, bytes, number, &run->parts);
        if (failure) mp_fail(run, MP_COMM, step, 0, failure, 0);
    }
    mp_barrier(run, T);
}

/* Where the share of thread t of n pieces of work begins; it ends where that of t + 1 begins. */
MP_INLINE int64_t mp_share(int64_t n, int t, int T) { return n * t / T; }

/* Parts of equal size in which T threads share rows: no more than `most`, and as many threads for each. */
MP_INLINE int mp_parts(int T, int64_t most)
{
    int parts = T;
    if (most > MP_MOST_PARTS) most = MP_MOST_PARTS;
    while (parts > 1 && (parts > most || T % parts)) --parts;
    return parts;
}

/* Blocks of rows are dealt out to parts back and forth, so that each has early and late ones: the i-th block of a part, how
 * many of `all` it has, and whose a block is. */
MP_INLINE int64_t mp_dealt(int64_t i, int part, int parts) { return i * parts + (i % 2 ? parts - 1 - part : part); }
MP_INLINE int64_t mp_dealt_count(int64_t all, int part, int parts)
{
    return all / parts + (mp_dealt(all / parts, part, parts) < all);
}
MP_INLINE int mp_owner(int64_t block, int parts)
{
    return (int)(block / parts % 2 ? parts - 1 - block % parts : block % parts);
}

/* A barrier before a product of a few rows: thread t will read its share of `groups`, of `group` bytes each (0: of many rows). */
MP_INLINE void mp_barrier_before(mp_run *run, const void *w, int64_t groups, int64_t group, int t, int T)
{
    const int64_t first = mp_share(groups, t, T), last = mp_share(groups, t + 1, T);
    mp_meet(run, T, (mp_next){(const char *)w + first * group, (last - first) * group});
}

/* Python's //: rounds towards minus infinity; b > 0. */
MP_INLINE int64_t mp_floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }

MP_INLINE int64_t mp_min(int64_t a, int64_t b) { return a < b ? a : b; }
MP_INLINE int64_t mp_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
