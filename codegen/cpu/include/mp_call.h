/* A call of a plan: how many threads run it, and what an interrupt does meanwhile. For the part with the entry point:
 * it defines functions that Python calls. */
#ifndef MP_CALL_H
#define MP_CALL_H

#if defined(MP_EXPORTED) /* a program of its own: it knows what its interrupts mean, and may have several plans */
static int mp_run_plan(const mp_args *args, mp_error *error);
#else
static _Alignas(64) atomic_int mp_signal; /* an interrupt came while a run was listening */

static void mp_interrupted(int number)
{
    (void)number;
    atomic_store_explicit(&mp_signal, 1, memory_order_relaxed);
}

static struct sigaction mp_former; /* SIGINT's handler while mp_interrupted stands in for it */
static int mp_listening;

/* While a plan runs Python looks at no signal, so that long runs of the main thread listen for SIGINT themselves. Python
 * calls mp_listen before the run and not as a part of it: a signal that came earlier is raised between the two calls. */
void mp_listen(void);
void mp_listen(void)
{
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = mp_interrupted;
    ours.sa_flags = SA_RESTART | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    atomic_store_explicit(&mp_signal, 0, memory_order_relaxed);
    mp_listening = !sigaction(SIGINT, &ours, &mp_former);
}

/* After the run: whether a signal came, which is then raised again for Python's handler. */
int mp_heard(void);
int mp_heard(void)
{
    if (!mp_listening) return 0;
    mp_listening = 0;
    sigaction(SIGINT, &mp_former, 0);
    if (!atomic_load_explicit(&mp_signal, memory_order_relaxed)) return 0;
    raise(SIGINT);
    return 1;
}
#endif

/* Where threads are slower than one (see mp_crowded), the next calls are left to one of them, for twice as long each time. That is
 * forgotten by halves, each after as long a time in which threads were faster: a few good runs between two bad ones say little. */
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
        last = last * 2 < MP_ALONE_LEAST ? (int)MP_ALONE_LEAST : last * 2 > MP_ALONE_MOST ? (int)MP_ALONE_MOST : last * 2;
        atomic_store_explicit(&mp_alone_until, mp_now() + last, memory_order_relaxed);
        atomic_store_explicit(&mp_alone_for, last, memory_order_relaxed);
    } else if (last && mp_now() > atomic_load_explicit(&mp_alone_until, memory_order_relaxed) + last) {
        atomic_store_explicit(&mp_alone_until, mp_now(), memory_order_relaxed);
        atomic_store_explicit(&mp_alone_for, last / 2 < MP_ALONE_LEAST ? 0 : last / 2, memory_order_relaxed);
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

/* Runs a plan once, as one parallel region. */
static inline int mp_call(void (*plan)(mp_run *, int, int), const mp_args *args, mp_error *error)
{
    static const atomic_int silence = 0;
    mp_run run;
    memset((void *)&run, 0, sizeof run);
    run.args = args;
    run.error = error;
#if defined(MP_EXPORTED)
    run.signal = &silence;
#else
    run.signal = args->stoppable ? &mp_signal : &silence;
#endif
    const int threads MP_UNUSED = mp_threads(args->threads);
#if defined(_OPENMP)
    if (threads > 1) {
        run.begun = mp_now();
        run.patience = mp_patience(threads);
        #pragma omp parallel num_threads(threads)
        plan(&run, omp_get_thread_num(), omp_get_num_threads());
        mp_learn(&run);
    } else
#endif
    plan(&run, 0, 1);
    return error->code;
}

#endif
