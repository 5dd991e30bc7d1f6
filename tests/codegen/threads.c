/* Threads of a plan by themselves, without OpenMP: `threads N` runs phases of random length and checks that nobody is early, that
 * an interrupt ends the run for everybody at the same barrier, and that of crowded threads one goes on. */
#include "mp_plan.h"
#include "mp_call.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { PHASES = 300, MOST = 8 };

static mp_args args;
static mp_run run;
static int threads, patient;
static int counts[MOST];                 /* phases that each thread has finished: plain, so that a race would show */
static int left[MOST], alone, crowd_at, stop_at;
static atomic_int signalled;

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void *work(void *number)
{
    int t = (int)(intptr_t)number, T = threads;
    const int own = t;
    unsigned seed = (unsigned)t + 1;
    for (int phase = 0; phase < PHASES; ++phase) {
        const int pause = rand_r(&seed) % 8 ? 0 : rand_r(&seed) % 400; /* now and then longer than anybody spins */
        if (pause) nanosleep(&(struct timespec){0, pause * 1000}, 0);
        if (phase == stop_at && own == 0) atomic_store(&signalled, 1);
        if (phase == crowd_at && own == 0) atomic_store(&run.waited, 1ll << 60);
        if (T > 1) {
            mp_prepared(&run, t);
            mp_await(&run, (t + 1) % T, 1);
        }
        for (mp_span s; (s = mp_some(&run, 0, 1, 40, 10, 1, 4)).count;) {}
        if (mp_take(&run) < 0 || mp_piece(&run, T - 1) < 0) fail("a piece before the first");
        counts[own] = phase + 1;
        mp_barrier(&run, T);
        for (int i = 0; i < T && T > 1; ++i)
            if (counts[i] != phase + 1) fail("a thread passed a barrier too early");
        if (mp_phase(&run, &t, &T)) {
            left[own] = phase + 1;
            return 0;
        }
        if (T == 1 && threads > 1) alone = own + 1;
    }
    left[own] = PHASES + 1;
    return 0;
}

static void round_of(int stops, int crowds)
{
    pthread_t others[MOST];
    memset(&run, 0, sizeof run);
    memset(left, 0, sizeof left);
    run.args = &args;
    run.signal = &signalled;
    run.begun = mp_now() - 3600000000000; /* so long ago that only `crowds` makes a crowd */
    run.patience = patient ? mp_patience(1) : 0;
    stop_at = stops, crowd_at = crowds, alone = 0;
    atomic_store(&signalled, 0);
    for (int i = 1; i < threads; ++i) pthread_create(others + i, 0, work, (void *)(intptr_t)i);
    work(0);
    for (int i = 1; i < threads; ++i) pthread_join(others[i], 0);
    for (int i = 0; i < threads; ++i) {
        const int wanted = stops >= 0 ? stops + 1 : crowds >= 0 && threads > 1 && alone != i + 1 ? crowds + 1 : PHASES + 1;
        if (left[i] != wanted) fail("a thread left elsewhere");
    }
    if (crowds >= 0 && threads > 1 && (!alone || run.verdict != MP_ALONE)) fail("nobody went on alone");
}

static void pass(const int64_t nanoseconds)
{
    const int64_t end = mp_now() + nanoseconds + 1000000;
    while (mp_now() < end) sched_yield();
}

int main(int count, char **arguments)
{
    threads = count > 1 ? atoi(arguments[1]) : 2;
    for (patient = 0; patient < 2; ++patient) {
        round_of(-1, -1);
        round_of(PHASES / 3, -1);
        round_of(-1, PHASES / 3);
    }
    if (mp_threads(3) != 3) fail("threads that nobody forbade");
    run.verdict = MP_ALONE;
    mp_learn(&run);
    if (mp_threads(3) != 1 || mp_threads(1) != 1) fail("crowded threads are tried at once");
    run.verdict = MP_ON;
    mp_learn(&run);
    if (mp_threads(3) != 1) fail("one good run is believed too soon");
    pass(MP_ALONE_LEAST);
    if (mp_threads(3) != 3) fail("crowded threads are never tried again");
    run.verdict = MP_ALONE;
    mp_learn(&run);
    if (atomic_load(&mp_alone_for) != 2 * MP_ALONE_LEAST) fail("a second bad run is as the first one");
    pass(4 * MP_ALONE_LEAST);
    run.verdict = MP_ON;
    mp_learn(&run);
    if (atomic_load(&mp_alone_for) != MP_ALONE_LEAST) fail("good runs are never believed");
    return 0;
}
