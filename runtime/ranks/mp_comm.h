/* How the plans of several ranks exchange data: every rank gives some bytes and sees those of all, in rank order.
 *
 * Ranks of one host share memory. Each has two slots, used in turn, and a counter of its exchanges: a rank copies its
 * bytes to a slot, raises its counter and waits until all counters are as high. It reads the others' slots where they
 * are. A slot is written again two exchanges later; then everyone has begun the exchange in between, and has read it.
 * Between hosts the bytes travel by MPI_Allgather, called through a pointer: nothing here is linked to an MPI. A few
 * numbers go before them, by which the ranks see that they do the same.
 */
#ifndef MP_COMM_H
#define MP_COMM_H

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MP_COMM_OK = 0, MP_COMM_DEAD, MP_COMM_LEFT, MP_COMM_FAILED, MP_COMM_MISMATCH, MP_COMM_TIMEOUT, MP_COMM_MPI };
enum { MP_PRESENT = 0, MP_GONE = 1, MP_BROKEN = 2 };

/* What an exchange is: its bytes and its step in the plan, which must be the same on every rank. Over MPI it
 * goes before the bytes; they stay aligned behind it. */
typedef struct {
    int64_t bytes, tag;
} mp_heading;

/* What a rank tells the others; the memory begins as zeros. */
typedef struct {
    _Alignas(64) _Atomic uint64_t count; /* exchanges begun */
    mp_heading heading[2];               /* of the exchange in each slot */
    _Alignas(64) _Atomic int32_t state;
    _Atomic int32_t process; /* 0 until the rank has come */
    char message[1016];
} mp_place;

typedef int (*mp_gather_pointers)(const void *, int, void *, void *, int, void *, void *); /* handles are pointers */
typedef int (*mp_gather_numbers)(const void *, int, int, void *, int, int, int);           /* handles are ints */

typedef struct {
    int32_t rank, size;
    int64_t room; /* bytes of a slot */
    double patience; /* seconds to wait for a rank; 0: for ever */
    /* shared memory */
    mp_place *places;
    char *slots;
    uint64_t count;
    /* MPI */
    mp_gather_pointers by_pointers;
    mp_gather_numbers by_numbers;
    uintptr_t byte_type, group;
    char *sent, *received;
    /* the first failure; every later exchange fails as well */
    int32_t failure, culprit;
    int64_t theirs[2], ours[2]; /* bytes and step, where they differ */
    const void **parts;
} mp_comm;

static double mp_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static char *mp_slot(const mp_comm *c, int rank, uint64_t count)
{
    return c->slots + (2 * (int64_t)rank + (int64_t)(count & 1)) * c->room;
}

static int mp_comm_fail(mp_comm *c, int failure, int culprit)
{
    c->failure = failure;
    c->culprit = culprit;
    return failure;
}

/* Whether a process is there; one that has ended and that nobody has waited for yet is not. */
static int mp_lives(int32_t process)
{
    if (kill(process, 0) != 0 && errno == ESRCH) return 0;
#if defined(__linux__)
    char text[256];
    snprintf(text, sizeof text, "/proc/%d/stat", (int)process);
    FILE *file = fopen(text, "r");
    if (!file) return 1;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *name_ends = strrchr(text, ')'); /* the name may itself have brackets; a letter for the state follows */
    return !(name_ends && (!strncmp(name_ends, ") Z", 3) || !strncmp(name_ends, ") X", 3)));
#else
    return 1;
#endif
}

/* Looks after the ranks while one waits: 0, or why it should not wait any longer. */
static int mp_comm_check(mp_comm *c, int awaited, double waited)
{
    for (int r = 0; r < c->size; ++r) {
        const int state = atomic_load_explicit(&c->places[r].state, memory_order_acquire);
        if (state == MP_BROKEN) return mp_comm_fail(c, MP_COMM_FAILED, r);
    }
    mp_place *there = &c->places[awaited];
    const int32_t process = atomic_load(&there->process);
    const int gone = atomic_load(&there->state) == MP_GONE, dead = process != 0 && !mp_lives(process);
    /* It may have come just before it left: its counter is read last. */
    if (atomic_load_explicit(&there->count, memory_order_acquire) >= c->count) return 0;
    if (gone) return mp_comm_fail(c, MP_COMM_LEFT, awaited);
    if (dead) return mp_comm_fail(c, MP_COMM_DEAD, awaited);
    if (c->patience > 0 && waited > c->patience) return mp_comm_fail(c, MP_COMM_TIMEOUT, awaited);
    return 0;
}

static inline void mp_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* Spins, for the others are microseconds away; then gives the core to others, and at last sleeps between looks. */
static int mp_comm_wait(mp_comm *c, int rank)
{
    const mp_place *there = &c->places[rank];
    double begin = 0.0, looked = 0.0;
    for (int spin = 0; atomic_load_explicit(&there->count, memory_order_acquire) < c->count; ++spin) {
        if (spin < 2000) {
            mp_relax();
            continue;
        }
        sched_yield();
        if (spin % 16) continue;
        const double now = mp_seconds();
        if (begin == 0.0) begin = looked = now;
        if (now - looked > 0.02) {
            if (mp_comm_check(c, rank, now - begin)) return c->failure;
            looked = now;
        }
        if (now - begin > 0.2) {
            const struct timespec nap = {0, 100000};
            nanosleep(&nap, NULL);
        }
    }
    return 0;
}

static int mp_mismatch(mp_comm *c, int rank, mp_heading theirs, mp_heading ours)
{
    c->theirs[0] = theirs.bytes, c->theirs[1] = theirs.tag;
    c->ours[0] = ours.bytes, c->ours[1] = ours.tag;
    return mp_comm_fail(c, MP_COMM_MISMATCH, rank);
}

static int mp_exchange_shared(mp_comm *c, const void *data, int64_t bytes, int64_t tag)
{
    const mp_heading ours = {bytes, tag};
    const uint64_t count = ++c->count;
    mp_place *here = &c->places[c->rank];
    memcpy(mp_slot(c, c->rank, count), data, (size_t)bytes);
    here->heading[count & 1] = ours;
    atomic_store_explicit(&here->count, count, memory_order_release);
    for (int r = 0; r < c->size; ++r) {
        if (r != c->rank && mp_comm_wait(c, r)) return c->failure;
        const mp_heading theirs = c->places[r].heading[count & 1];
        if (theirs.bytes != bytes || theirs.tag != tag) return mp_mismatch(c, r, theirs, ours);
        c->parts[r] = mp_slot(c, r, count);
    }
    return 0;
}

static int mp_exchange_mpi(mp_comm *c, const void *data, int64_t bytes, int64_t tag)
{
    const mp_heading ours = {bytes, tag};
    const int n = (int)(bytes + (int64_t)sizeof ours);
    memcpy(c->sent, &ours, sizeof ours);
    memcpy(c->sent + sizeof ours, data, (size_t)bytes);
    for (int r = 0; r < c->size; ++r) memset(c->received + (int64_t)r * n, 0, sizeof ours);
    const int failed = c->by_pointers
        ? c->by_pointers(c->sent, n, (void *)c->byte_type, c->received, n, (void *)c->byte_type, (void *)c->group)
        : c->by_numbers(c->sent, n, (int)c->byte_type, c->received, n, (int)c->byte_type, (int)c->group);
    if (failed) return mp_comm_fail(c, MP_COMM_MPI, c->rank);
    for (int r = 0; r < c->size; ++r) {
        const char *part = c->received + (int64_t)r * n;
        mp_heading theirs;
        memcpy(&theirs, part, sizeof theirs);
        if (memcmp(&theirs, &ours, sizeof ours)) return mp_mismatch(c, r, theirs, ours);
        c->parts[r] = part + sizeof ours;
    }
    return 0;
}

/* What plans call. `*parts` gets the ranks' bytes, which stay until the next exchange, also after a failure. */
int mp_comm_exchange(void *context, const void *data, int64_t bytes, int64_t tag, const void *const **parts)
{
    mp_comm *c = context;
    *parts = (const void *const *)c->parts;
    int failure = c->failure ? c->failure : bytes > c->room ? mp_comm_fail(c, MP_COMM_MISMATCH, c->rank) : 0;
    if (!failure) failure = c->places ? mp_exchange_shared(c, data, bytes, tag) : mp_exchange_mpi(c, data, bytes, tag);
    if (failure)
        for (int r = 0; r < c->size; ++r) c->parts[r] = data;
    return failure;
}

static mp_comm *mp_comm_new(int32_t rank, int32_t size, int64_t room, double patience)
{
    mp_comm *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->rank = rank, c->size = size, c->room = room, c->patience = patience;
    c->parts = calloc((size_t)size, sizeof *c->parts);
    if (c->parts) return c;
    free(c);
    return NULL;
}

void mp_comm_close(mp_comm *c)
{
    free(c->sent);
    free(c->received);
    free(c->parts);
    free(c);
}

int64_t mp_comm_bytes(int32_t size, int64_t room) { return size * ((int64_t)sizeof(mp_place) + 2 * room); }

/* `memory`: mp_comm_bytes of it, zeros at first, the same for all ranks. */
mp_comm *mp_comm_open_shared(void *memory, int32_t rank, int32_t size, int64_t room, double patience)
{
    mp_comm *c = mp_comm_new(rank, size, room, patience);
    if (!c) return NULL;
    c->places = memory;
    c->slots = (char *)memory + size * (int64_t)sizeof(mp_place);
    atomic_store(&c->places[rank].process, (int32_t)getpid());
    return c;
}

mp_comm *mp_comm_open_mpi(void *gather, int wide, uintptr_t byte_type, uintptr_t group, int32_t rank, int32_t size,
                          int64_t room)
{
    mp_comm *c = mp_comm_new(rank, size, room, 0.0);
    if (!c) return NULL;
    const int64_t most = room + (int64_t)sizeof(mp_heading);
    c->sent = malloc((size_t)most);
    c->received = malloc((size_t)(most * size));
    if (!c->sent || !c->received) {
        mp_comm_close(c);
        return NULL;
    }
    c->by_pointers = wide ? (mp_gather_pointers)gather : NULL;
    c->by_numbers = wide ? NULL : (mp_gather_numbers)gather;
    c->byte_type = byte_type, c->group = group;
    return c;
}

/* Says that this rank will exchange no more: `message` tells why, where that is an error. */
void mp_comm_leave(mp_comm *c, const char *message)
{
    if (!c->places || atomic_load(&c->places[c->rank].state) != MP_PRESENT) return;
    mp_place *here = &c->places[c->rank];
    if (message) snprintf(here->message, sizeof here->message, "%s", message);
    atomic_store_explicit(&here->state, message ? MP_BROKEN : MP_GONE, memory_order_release);
}

/* What went wrong: {failure, rank, process, bytes and step there, bytes and step here}. */
void mp_comm_failure(const mp_comm *c, int64_t *facts)
{
    facts[0] = c->failure, facts[1] = c->culprit;
    facts[2] = c->places ? atomic_load(&c->places[c->culprit].process) : 0;
    memcpy(facts + 3, c->theirs, sizeof c->theirs);
    memcpy(facts + 5, c->ours, sizeof c->ours);
}

/* Looks whether a rank has failed, left or died, outside of any exchange: 0, or which of these, and `*rank`. */
int mp_comm_absent(const mp_comm *c, int32_t *rank)
{
    for (*rank = 0; c->places && *rank < c->size; ++*rank) {
        mp_place *there = &c->places[*rank];
        const int state = atomic_load(&there->state), process = atomic_load(&there->process);
        if (*rank == c->rank) continue;
        if (state != MP_PRESENT) return state == MP_BROKEN ? MP_COMM_FAILED : MP_COMM_LEFT;
        if (process != 0 && !mp_lives(process)) return MP_COMM_DEAD;
    }
    return 0;
}

const char *mp_comm_message(const mp_comm *c, int32_t rank) { return c->places ? c->places[rank].message : ""; }

#endif
