/* Runs a plan by itself, for programs that sanitizers watch: every buffer is an allocation of just its size, and threads are
 * made with pthreads. The compiler's calls of OpenMP end here: sanitizers know nothing of what happens inside libgomp, and
 * take its barriers for races. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "mp_plan.h"

int mp_run_plan(const mp_args *args, mp_error *error);

static _Thread_local int my_number, my_count = 1;

int omp_get_thread_num(void) { return my_number; }
int omp_get_num_threads(void) { return my_count; }
int omp_get_num_procs(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

typedef struct {
    void (*work)(void *);
    void *data;
    int number, count;
} worker;

static void *begin(void *p)
{
    const worker *w = p;
    my_number = w->number;
    my_count = w->count;
    w->work(w->data);
    my_number = 0;
    my_count = 1;
    return 0;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned count, unsigned flags)
{
    (void)flags;
    worker *all = calloc(count, sizeof *all);
    pthread_t *threads = calloc(count, sizeof *threads);
    for (unsigned i = 0; i < count; ++i) all[i] = (worker){work, data, (int)i, (int)count};
    for (unsigned i = 1; i < count; ++i)
        if (pthread_create(&threads[i], 0, begin, &all[i])) abort();
    begin(&all[0]);
    for (unsigned i = 1; i < count; ++i) pthread_join(threads[i], 0);
    free(all);
    free(threads);
}

/* No plan here has other ranks to talk to. */
static int nobody(void *comm, const void *data, int64_t bytes, int64_t tag, const void *const **parts)
{
    (void)comm, (void)data, (void)bytes, (void)tag, (void)parts;
    abort();
}

static FILE *in;

static int64_t number(void)
{
    int64_t value;
    if (fread(&value, sizeof value, 1, in) != 1) abort();
    return value;
}

/* A buffer of `size` bytes that begins at a multiple of `align`, but of no larger power of two where it is less than 64. */
static void *buffer(int64_t size, int64_t align, void **whole)
{
    const int64_t shift = align < 64 ? align : 0;
    if (posix_memalign(whole, 64, (size_t)(size + shift) + !(size + shift))) abort();
    return (char *)*whole + shift;
}

/* A table of pointers: each buffer's size, alignment and whether its contents follow; a size of -1 - i is input i itself. */
static void **table(int64_t count, void **inputs, void ***wholes)
{
    void **found = calloc((size_t)count + 1, sizeof *found);
    *wholes = calloc((size_t)count + 1, sizeof **wholes);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = number(), align = number(), given = number();
        if (size < 0) {
            found[i] = inputs[-1 - size];
            continue;
        }
        found[i] = buffer(size, align, &(*wholes)[i]);
        if (given && size && fread(found[i], (size_t)size, 1, in) != 1) abort();
    }
    return found;
}

static void release(void **found, void **wholes, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) free(wholes[i]);
    free(found);
    free(wholes);
}

/* Arguments: a file of calls, and where the outputs go. */
int main(int argc, char **argv)
{
    if (argc != 3 || !(in = fopen(argv[1], "rb"))) return 2;
    FILE *out = fopen(argv[2], "wb");
    if (!out) return 2;
    void **param_wholes, **params;
    const int64_t count_params = number();
    params = table(count_params, 0, &param_wholes);
    for (int64_t calls = number(); calls; --calls) {
        void **input_wholes, **output_wholes, *arena_whole;
        mp_args args;
        mp_error error;
        memset(&args, 0, sizeof args);
        memset(&error, 0, sizeof error);
        args.threads = (int32_t)number();
        /* On crowded cores a plan goes on with one thread, and the rest would not be watched; not one with other ranks. */
        if (calls % 2) args.exchange = nobody;
        const int64_t numbers = number();
        int64_t *symbols = calloc((size_t)numbers + 1, sizeof *symbols);
        for (int64_t i = 0; i < numbers; ++i) symbols[i] = number();
        const int64_t slots = number();
        int64_t *offsets = calloc((size_t)slots + 1, sizeof *offsets);
        for (int64_t i = 0; i < slots; ++i) offsets[i] = number();
        const int64_t room = number();
        args.arena = buffer(room, 64, &arena_whole);
        memset(args.arena, 0xff, (size_t)room); /* NaN: what nobody has written shows */
        const int64_t count_inputs = number();
        void **inputs = table(count_inputs, 0, &input_wholes);
        const int64_t count_outputs = number();
        int64_t *sizes = calloc((size_t)count_outputs + 1, sizeof *sizes);
        for (int64_t i = 0; i < count_outputs; ++i) sizes[i] = number();
        void **outputs = table(count_outputs, inputs, &output_wholes);
        args.symbols = symbols;
        args.offsets = offsets;
        args.inputs = inputs;
        args.outputs = outputs;
        args.params = params;
        const int32_t code = mp_run_plan(&args, &error);
        fwrite(&code, sizeof code, 1, out);
        for (int64_t i = 0; i < count_outputs; ++i) fwrite(outputs[i], 1, (size_t)sizes[i], out);
        release(outputs, output_wholes, count_outputs);
        release(inputs, input_wholes, count_inputs);
        free(arena_whole);
        free(symbols);
        free(offsets);
        free(sizes);
    }
    release(params, param_wholes, count_params);
    return fclose(out) || fclose(in);
}
