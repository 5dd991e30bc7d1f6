/* A call of a plan: how many threads run it, and what an interrupt does meanwhile. */
#ifndef MP_CALL_H
#define MP_CALL_H

static _Alignas(64) atomic_int mp_signal; /* an interrupt came while a run was listening */

static void mp_interrupted(int number)
{
    (void)number;
    atomic_store_explicit(&mp_signal, 1, memory_order_relaxed);
}

/* While a plan runs Python looks at no signal. One run at a time listens, that of the main thread; afterwards the signal is raised
 * once more, for Python's own handler. */
static inline void mp_listen(struct sigaction *before)
{
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = mp_interrupted;
    ours.sa_flags = SA_RESTART | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    atomic_store_explicit(&mp_signal, 0, memory_order_relaxed);
    sigaction(SIGINT, &ours, before);
}

static inline int mp_heard(const struct sigaction *before)
{
    sigaction(SIGINT, before, 0);
    if (!atomic_load_explicit(&mp_signal, memory_order_relaxed)) return 0;
    raise(SIGINT);
    return 1;
}

/* Where threads are slower than one (see mp_crowded), the next calls are left to one of them, for twice as long each time. */
enum { MP_ALONE_LEAST = 20000000, MP_ALONE_MOST = 1280000000 }; /* ns */
static atomic_llong mp_alone_until, mp_alone_for;

static inline int mp_threads(int wanted)
{
    if (wanted == 1) return 1;
    const long long until = atomic_load_explicit(&mp_alone_until, memory_order_relaxed);
    return until && mp_now() < until ? 1 : wanted;
}

/* After a run by several threads. */
static inline void mp_learn(const mp_run *run)
{
    long long last = atomic_load_explicit(&mp_alone_for, memory_order_relaxed);
    if (run->verdict == MP_ALONE) {
        last = last * 2 < MP_ALONE_LEAST ? MP_ALONE_LEAST : last * 2 > MP_ALONE_MOST ? MP_ALONE_MOST : last * 2;
        atomic_store_explicit(&mp_alone_until, mp_now() + last, memory_order_relaxed);
        atomic_store_explicit(&mp_alone_for, last, memory_order_relaxed);
    } else if (last) {
        atomic_store_explicit(&mp_alone_until, 0, memory_order_relaxed);
        atomic_store_explicit(&mp_alone_for, last / 2, memory_order_relaxed);
    }
}

/* How long a thread spins: a few times what it takes to wake one; hardly, where there are fewer cores than threads. */
static inline int64_t mp_patience(int T)
{
    enum { LONG = 200000, SHORT = 2000 }; /* ns */
    static atomic_int cores;
    int count = atomic_load_explicit(&cores, memory_order_relaxed);
    if (!count) {
#if defined(_OPENMP)
        count = omp_get_num_procs();
#else
        count = 1;
#endif
        atomic_store_explicit(&cores, count, memory_order_relaxed);
    }
    return T > count ? SHORT : LONG;
}

#endif
