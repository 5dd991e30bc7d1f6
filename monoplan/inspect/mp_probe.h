/* What an instrumented plan adds to itself: the time after each step, and a copy of what each step wrote.
 * One run at a time: the probe is a global, so that instrumenting changes no signature. */
#ifndef MP_PROBE_H
#define MP_PROBE_H

#include <time.h>

typedef struct {
    int64_t *times;         /* [events + 1] nanoseconds, or NULL */
    void *const *copies;    /* where to copy each write, or NULL */
    const int64_t *sizes;   /* bytes of each */
} mp_probe;

static mp_probe *mp_watch;

/* All threads have finished the step: the first one notes the time. */
static inline void mp_mark(mp_run *run, int t, int T, int64_t event)
{
    mp_barrier(run, T);
    if (t == 0 && mp_watch->times) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        mp_watch->times[event] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
}

static inline void mp_keep(int t, int64_t number, const void *from)
{
    if (t == 0 && mp_watch->copies) memcpy(mp_watch->copies[number], from, (size_t)mp_watch->sizes[number]);
}

/* Nobody goes on while the first thread copies. */
static inline void mp_kept(mp_run *run, int T)
{
    if (mp_watch->copies) mp_barrier(run, T);
}

#endif
