/* What every generated plan includes: element types, scalar functions, threads and errors. */
#ifndef MP_PLAN_H
#define MP_PLAN_H

#include <math.h>
#if !defined(MP_EXPORTED) /* such a plan leaves interrupts to its program */
#include <signal.h>
#endif
#include <stdint.h>
#include <string.h>

#include "mp_cxx.h"
#include "mp_math.h"
#include "mp_amx.h"
#include "mp_tile.h"
#include "mp_vec.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

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
/* A loop over functions whose steps wait for each other: four vectors abreast. A count in bytes makes gcc take 16 elements,
 * with AVX-512 64, at a time, step by step; one vector after the other fills the queues with steps that wait. AVX2 has too few registers. */
#if (defined(__aarch64__) || defined(__AVX512F__)) && defined(__GNUC__) && !defined(__clang__)
#define MP_SIMD_ABREAST uint8_t mp_abreast = 0, mp_place = 0; MP_PRAGMA(omp simd reduction(| : mp_abreast) linear(mp_place))
#define MP_ABREAST mp_abreast |= mp_place++
#define MP_END_ABREAST __asm__ volatile("" : : "r"(mp_abreast))
#else
#define MP_SIMD_ABREAST MP_SIMD
#define MP_ABREAST (void)0
#define MP_END_ABREAST (void)0
#endif
#if defined(__clang__)
#define MP_UNROLL(n) MP_PRAGMA(clang loop unroll_count(n))
#else
#define MP_UNROLL(n) MP_PRAGMA(GCC unroll n)
#endif

/* The first thing that went wrong; Python turns it into an exception with the IR line of the step. */
enum { MP_OK = 0, MP_INDEX = 1, MP_POSITION = 2, MP_CACHE_FULL = 3, MP_COUNT = 4, MP_COMM = 5, MP_STOPPED = 6 };

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
    int32_t stoppable;        /* whether an interrupt ends the run */
    mp_exchange_fn exchange;  /* with the other ranks, where there are any */
    void *comm;
    int64_t room;             /* bytes of one exchange */
} mp_args;

enum { MP_MOST_PARTS = 64 };

/* One call of the plan, shared by all threads of its parallel region. */
typedef struct {
    const mp_args *args;
    const atomic_int *signal;       /* not 0: an interrupt came, and the results are not wanted any more */
    int64_t begun, patience;        /* nanoseconds: when the run began, how long a thread spins before it sleeps */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int turn;
    atomic_int sleepers;            /* threads that wait for `turn` or `ready` and do not look */
    int verdict;                    /* of the last barrier between kernels, see mp_phase */
    _Alignas(64) atomic_llong waited; /* nanoseconds, of all threads, in waits that were longer than `patience` */
    atomic_llong asleep;            /* since when one of them sleeps; 0: none does */
    _Alignas(64) atomic_int taken;  /* pieces of the current kernel's work that are taken by work stealing */
    atomic_int ready[MP_MOST_PARTS]; /* threads that have prepared what the work on a part of the rows needs */
    _Alignas(64) atomic_int pieces[MP_MOST_PARTS]; /* of that work which somebody has */
    _Alignas(64) atomic_int failed; /* a lock on *error */
    atomic_int wrong;               /* *error is not empty */
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

/* Tells the core that this loop waits. */
MP_INLINE void mp_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` does nothing on most cores */
#endif
}

static inline int64_t mp_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* One step of a wait until *word is no longer `value`. Spins first: phases are microseconds long. Then it sleeps, since the
 * thread that it waits for may need this core. The time is taken from the clock: a pause takes 5 ns on one core, 50 on another. */
static void __attribute__((unused, noinline)) mp_linger(mp_run *run, atomic_int *word, int value, int64_t *since)
{
    const int64_t now = mp_now();
    if (!*since) *since = now;
    if (now - *since < run->patience) {
        for (int i = 0; i < 16 && atomic_load_explicit(word, memory_order_relaxed) == value; ++i) mp_relax();
        return;
    }
#if defined(__linux__)
    long long none = 0, mine = *since;
    atomic_compare_exchange_strong_explicit(&run->asleep, &none, mine, memory_order_relaxed, memory_order_relaxed);
    atomic_fetch_add_explicit(&run->sleepers, 1, memory_order_seq_cst); /* before the kernel looks at *word */
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
    atomic_fetch_sub_explicit(&run->sleepers, 1, memory_order_relaxed);
    atomic_compare_exchange_strong_explicit(&run->asleep, &mine, 0, memory_order_relaxed, memory_order_relaxed);
#else
    (void)word, (void)value;
    sched_yield();
#endif
    if (atomic_load_explicit(word, memory_order_relaxed) != value) atomic_fetch_add_explicit(&run->waited, mp_now() - *since, memory_order_relaxed);
}

/* Wakes those who sleep until *word changes; it was changed by a sequentially consistent operation. */
static inline void mp_wake(mp_run *run, atomic_int *word)
{
#if defined(__linux__)
    if (atomic_load_explicit(&run->sleepers, memory_order_seq_cst)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
#else
    (void)run, (void)word;
#endif
}

MP_INLINE int mp_stopping(const mp_run *run) { return atomic_load_explicit(run->signal, memory_order_relaxed); }

/* What threads do after a barrier between kernels: go on, leave the plan, or leave it to the one that came last. */
enum { MP_ON = 0, MP_LEAVE = 1, MP_ALONE = 2 };

/* Whether threads wait so much that one of them is faster: where other processes want the cores as well, a thread that sleeps or
 * was stopped gets its core back after milliseconds, again and again, while phases are microseconds long. No more than T - 1
 * threads have a reason to wait at a time, so these waits are the system's. Not with other ranks: MPI knows only thread 0. */
static inline int mp_crowded(mp_run *run, int T)
{
    enum { LEAST = 1000000 }; /* ns */
    const int64_t before = atomic_load_explicit(&run->waited, memory_order_relaxed);
    const int64_t asleep = atomic_load_explicit(&run->asleep, memory_order_relaxed);
    if ((!before && !asleep) || run->args->exchange) return 0;
    const int64_t now = mp_now(), passed = now - run->begun, waited = before + (asleep ? now - asleep : 0);
    return passed > LEAST && waited > (T - 1) * passed + passed / 4;
}

/* Waits until all T threads are here. While it waits, a thread prefetches the weights that it reads next: the memory is never
 * idle because a core is. The verdict of the last one is everybody's, and MP_ON where no kernel ends here. */
static int __attribute__((unused, noinline)) mp_meet(mp_run *run, int T, const mp_next next, int between)
{
    enum { FIRST = 2 << 10, MOST = 512 << 10, SPINS = 64 }; /* bytes: into L1, into L2 */
    const int64_t most = next.bytes < MOST ? next.bytes : (int64_t)MOST;
    int64_t fetched = 0;
    for (; fetched < FIRST && fetched < most; fetched += 64) __builtin_prefetch(next.first + fetched, 0, 3);
    if (T == 1) {
        mp_begin_anew(run, T);
        return between && mp_stopping(run) ? MP_LEAVE : MP_ON;
    }
    const int turn = atomic_load_explicit(&run->turn, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&run->arrived, 1, memory_order_acq_rel) == T - 1) {
        const int verdict = !between ? MP_ON : mp_stopping(run) ? MP_LEAVE : mp_crowded(run, T) ? MP_ALONE : MP_ON;
        atomic_store_explicit(&run->arrived, 0, memory_order_relaxed);
        mp_begin_anew(run, T);
        run->verdict = verdict;
        atomic_store_explicit(&run->turn, turn + 1, memory_order_seq_cst);
        mp_wake(run, &run->turn);
        return verdict;
    }
    int64_t since = 0;
    for (int spin = 0; atomic_load_explicit(&run->turn, memory_order_acquire) == turn;) {
        if (fetched < most) {
            __builtin_prefetch(next.first + fetched, 0, 2);
            fetched += 64;
        } else if (++spin < SPINS) {
            mp_relax();
        } else {
            mp_linger(run, &run->turn, turn, &since);
        }
    }
    return run->verdict ? MP_LEAVE : MP_ON;
}

/* A barrier inside of a kernel. */
MP_INLINE void mp_barrier(mp_run *run, int T) { (void)mp_meet(run, T, (mp_next){0, 0}, 0); }

/* Between kernels: not 0 where the thread has to leave the plan. Who goes on alone does the work of all. */
MP_INLINE int mp_between(mp_run *run, int *t, int *T, const mp_next next)
{
    const int verdict = mp_meet(run, *T, next, 1);
    if (verdict != MP_ALONE) return verdict;
    *t = 0;
    *T = 1;
    return 0;
}
MP_INLINE int mp_phase(mp_run *run, int *t, int *T) { return mp_between(run, t, T, (mp_next){0, 0}); }

/* Once an interrupt came there is no work left. */
enum { MP_NONE_LEFT = 1 << 30 };

/* The number of the next piece of work that nobody has; counts from 0 after each barrier. */
static inline int mp_take(mp_run *run)
{
    return mp_stopping(run) ? MP_NONE_LEFT : atomic_fetch_add_explicit(&run->taken, 1, memory_order_relaxed);
}

/* Rows in parts, each of which belongs to one thread or several: they prepare it and take its pieces first, but a thread that
 * has none left helps the others, since cores are not equally fast: some share their units with a neighbour. */
static inline void mp_prepared(mp_run *run, int part)
{
    atomic_fetch_add_explicit(&run->ready[part], 1, memory_order_seq_cst);
    mp_wake(run, &run->ready[part]);
}
static inline void mp_await(mp_run *run, int part, int owners)
{
    int64_t since = 0;
    for (int ready; (ready = atomic_load_explicit(&run->ready[part], memory_order_acquire)) < owners;)
        mp_linger(run, &run->ready[part], ready, &since);
}
static inline int mp_piece(mp_run *run, int part)
{
    return mp_stopping(run) ? MP_NONE_LEFT : atomic_fetch_add_explicit(&run->pieces[part], 1, memory_order_relaxed);
}

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
    while (first < all && !mp_stopping(run)) {
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
    atomic_store_explicit(&run->wrong, 1, memory_order_relaxed);
    atomic_store(&run->failed, 0);
}

/* Whether a step before the last barrier has failed: then nothing is written into what belongs to the caller. */
MP_INLINE int mp_went_wrong(const mp_run *run) { return atomic_load_explicit(&run->wrong, memory_order_relaxed); }

/* Whether `count` of `seq` rows fit into a cache from `start` on; all rows of sequence b, or none. */
MP_INLINE int mp_fits(mp_run *run, int step, int64_t b, int64_t start, int64_t count, int64_t seq, int64_t capacity)
{
    const int counted = count >= 0 && count <= seq, fits = start >= 0 && start <= capacity - count;
    if (!counted) mp_fail(run, MP_COUNT, step, b, count, seq);
    else if (!fits) mp_fail(run, MP_CACHE_FULL, step, b, start + count, capacity);
    return counted && fits;
}

/* A page of a cache, by a table's number for it, which mp_pages_fit has checked. */
#define MP_PAGE(number, pages) ((int64_t)(number))

/* Whether the places [from, to) of a table name pages of a cache that has so many. */
MP_INLINE int mp_pages_fit(mp_run *run, int step, const int32_t *table, int64_t from, int64_t to, int64_t pages)
{
    for (int64_t i = from; i < to; ++i) {
        if (table[i] >= 0 && table[i] < pages) continue;
        mp_fail(run, MP_INDEX, step, i, table[i], pages);
        return 0;
    }
    return 1;
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

/* Block-cyclic distribution, back and forth, so that each part has early and late blocks of rows: the i-th block of a part, how
 * many of `all` it has, and whose a block is. */
MP_INLINE int64_t mp_block_of(int64_t i, int part, int parts) { return i * parts + (i % 2 ? parts - 1 - part : part); }
MP_INLINE int64_t mp_block_count(int64_t all, int part, int parts)
{
    return all / parts + (mp_block_of(all / parts, part, parts) < all);
}
MP_INLINE int mp_owner(int64_t block, int parts)
{
    return (int)(block / parts % 2 ? parts - 1 - block % parts : block % parts);
}

/* mp_phase before a product of a few rows: thread t will read its share of `groups`, of `group` bytes each (0: of many rows). */
MP_INLINE int mp_phase_before(mp_run *run, const void *w, int64_t groups, int64_t group, int *t, int *T)
{
    const int64_t first = mp_share(groups, *t, *T), last = mp_share(groups, *t + 1, *T);
    return mp_between(run, t, T, (mp_next){(const char *)w + first * group, (last - first) * group});
}

/* Python's //: rounds towards minus infinity; b > 0. */
MP_INLINE int64_t mp_floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }

MP_INLINE int64_t mp_min(int64_t a, int64_t b) { return a < b ? a : b; }
MP_INLINE int64_t mp_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
