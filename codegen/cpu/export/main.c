/* Runs the plan once on arrays in files: raw elements, as numpy's tofile writes them.
 *
 *     ./main [-t THREADS] [-r RUNS] [-o FOLDER] weights.bin NAME=FILE:SIZE,SIZE ...
 *
 * Without a FILE (NAME=:2,3) the array is zeros. Outputs go to FOLDER/NAME.bin; their names, element types and sizes are
 * printed. With -r it prints how long the fastest of RUNS further runs took. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model.h"

static const char *const types[] = {"f64", "f32", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"};

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s%s%s\n", what, *why ? ": " : "", why);
    exit(1);
}

static size_t count_of(const model_array *a)
{
    size_t count = 1;
    for (int i = 0; i < a->rank; ++i) count *= (size_t)a->shape[i];
    return count;
}

/* NAME=FILE:SIZE,SIZE; the type is the plan's. */
static model_array read_array(char *text)
{
    model_array a;
    memset(&a, 0, sizeof a);
    char *file = strchr(text, '='), *sizes = strrchr(text, ':');
    if (!file || !sizes || sizes < file) fail(text, "is not NAME=FILE:SIZE,SIZE");
    *file++ = *sizes++ = 0;
    a.name = text;
    int known = 0;
    for (int i = 0; i < MODEL_INPUTS; ++i)
        if (!strcmp(model_input(i)->name, text)) a.dtype = model_input(i)->dtype, known = 1;
    if (!known) fail(text, "is no input of the plan");
    for (char *end; *sizes; sizes = *end == ',' ? end + 1 : end) {
        const long long size = strtoll(sizes, &end, 10);
        if (end == sizes || (*end && *end != ',') || size < 0 || size > INT32_MAX || a.rank == MODEL_DIMS)
            fail(text, "has sizes that are not SIZE,SIZE");
        a.shape[a.rank++] = size;
    }
    const size_t bytes = count_of(&a) * model_item_bytes(a.dtype);
    if (!(a.data = calloc(bytes + 1, 1))) fail(text, "there is no memory for it");
    if (*file) {
        FILE *stream = fopen(file, "rb");
        if (!stream) fail(file, "can't be opened");
        if (fread(a.data, 1, bytes, stream) != bytes || fgetc(stream) != EOF) fail(file, "has another size than is said");
        fclose(stream);
    }
    return a;
}

static void write_array(const char *folder, const model_array *a)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.bin", folder, a->name);
    FILE *file = fopen(path, "wb");
    if (!file) fail(path, "can't be written");
    const size_t count = count_of(a);
    if (fwrite(a->data, model_item_bytes(a->dtype), count, file) != count || fclose(file)) fail(path, "can't be written");
    printf("%s %s", a->name, types[a->dtype]);
    for (int i = 0; i < a->rank; ++i) printf("%s%lld", i ? "," : " ", (long long)a->shape[i]);
    printf("\n");
}

int main(int argc, char **argv)
{
    int threads = 0, runs = 0, at = 1;
    const char *folder = ".";
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        if (!strcmp(argv[at], "-t")) threads = atoi(argv[at + 1]);
        else if (!strcmp(argv[at], "-r")) runs = atoi(argv[at + 1]);
        else if (!strcmp(argv[at], "-o")) folder = argv[at + 1];
        else fail(argv[at], "is no option: see main.c");
    }
    if (at >= argc) fail("weights.bin is missing", "see main.c");
    char error[512];
    model_plan *plan = model_create(argv[at], threads, error, sizeof error);
    if (!plan) fail(argv[at], error);
    const int count = argc - at - 1;
    model_array *inputs = calloc((size_t)count + 1, sizeof *inputs), outputs[MODEL_OUTPUTS + 1];
    if (!inputs) fail("there is no memory", "");
    for (int i = 0; i < count; ++i) inputs[i] = read_array(argv[at + 1 + i]);
    if (model_run(plan, inputs, count, outputs)) fail(model_error(plan), "");
    for (int i = 0; i < MODEL_OUTPUTS; ++i) write_array(folder, &outputs[i]);
    double best = 1e30;
    for (int i = 0; i < runs; ++i) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        if (model_run(plan, inputs, count, outputs)) fail(model_error(plan), "");
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double ms = (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-6;
        if (ms < best) best = ms;
    }
    if (runs > 0) fprintf(stderr, "%.3f ms\n", best);
    for (int i = 0; i < count; ++i) free(inputs[i].data);
    free(inputs);
    model_destroy(plan);
    return 0;
}
