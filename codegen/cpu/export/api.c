/* ---- model.h ---- */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

struct model_plan {
    int threads;
    void *owned;                        /* the file's bytes, of an instance that has read them */
    void *params[MODEL_PARAMS + 1];
    void *arena, *results[MODEL_RESULTS + 1];
    int64_t arena_bytes, result_bytes[MODEL_RESULTS + 1];
    char error[512];
};

static __attribute__((format(printf, 2, 3))) int model_fail(model_plan *plan, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(plan->error, sizeof plan->error, format, args);
    va_end(args);
    return -1;
}

size_t model_item_bytes(model_dtype dtype)
{
    static const unsigned char bytes[] = {8, 4, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
    return (unsigned)dtype < sizeof bytes ? bytes[dtype] : 0;
}

const char *model_error(const model_plan *plan) { return plan->error; }
const model_array *model_input(int number) { return number >= 0 && number < MODEL_INPUTS ? &model_inputs[number] : NULL; }
const model_array *model_output(int number) { return number >= 0 && number < MODEL_OUTPUTS ? &model_results[number] : NULL; }

/* The size `symbol` that makes an axis fit: by * symbol + plus. */
static MP_UNUSED int model_solve(
    model_plan *plan, const model_array *in, int axis, int64_t by, int64_t plus, const char *name, int64_t *symbol)
{
    const int64_t size = in->shape[axis];
    if (by == 0 || (size - plus) % by || (size - plus) / by < 1)
        return model_fail(plan, "input %s: size %lld of axis %d does not fit: no %s of 1 or more gives it",
            in->name, (long long)size, axis, name);
    *symbol = (size - plus) / by;
    return 0;
}

static MP_UNUSED int model_expect(model_plan *plan, const model_array *in, int axis, int64_t wanted)
{
    if (in->shape[axis] == wanted) return 0;
    return model_fail(plan, "input %s: size %lld of axis %d must be %lld",
        in->name, (long long)in->shape[axis], axis, (long long)wanted);
}

static MP_UNUSED int model_require(model_plan *plan, int holds, const char *what)
{
    return holds ? 0 : model_fail(plan, "these sizes do not fit: %s", what);
}

/* ---- weights: a head of 64 bytes, then the arrays at the places of model_params ---- */

typedef struct {
    char magic[16];
    uint64_t bytes, sum; /* of the whole file, and of the arrays */
    unsigned char digest[32];
} model_head;

/* Finds damage: any one changed bit changes the sum. */
static uint64_t model_sum(const unsigned char *data, int64_t bytes)
{
    enum { BLOCK = 16384 };
    uint64_t sum = 0;
    for (int64_t first = 0; first < bytes; first += BLOCK) {
        const int64_t words = ((bytes - first < BLOCK ? bytes - first : (int64_t)BLOCK) + 7) / 8; /* arrays are padded to 64 bytes */
        uint64_t inner = 0;
        for (int64_t i = 0; i < words; ++i) {
            uint64_t word;
            memcpy(&word, data + first + 8 * i, 8);
            inner += word * ((uint64_t)(2 * i + 1) * 0x9E3779B97F4A7C15u);
        }
        sum += inner * (uint64_t)(2 * (first / BLOCK) + 1);
    }
    return sum;
}

static int model_take(model_plan *plan, const unsigned char *weights, size_t bytes)
{
    model_head head;
    if (bytes < sizeof head) return model_fail(plan, "the weights are cut short: %zu bytes", bytes);
    memcpy(&head, weights, sizeof head);
    if (memcmp(head.magic, "monoplanweights1", 16)) return model_fail(plan, "this is no file of weights");
    if (memcmp(head.digest, model_digest, 32)) return model_fail(plan, "the weights belong to another model, or to another export");
    if (bytes != MODEL_WEIGHT_BYTES || head.bytes != MODEL_WEIGHT_BYTES)
        return model_fail(plan, "the weights have %zu bytes, not %lld", bytes, (long long)MODEL_WEIGHT_BYTES);
    uint64_t sum = 0;
    for (int i = 0; i < MODEL_PARAMS; ++i) {
        plan->params[i] = (void *)(uintptr_t)(weights + model_params[i].at);
        sum += model_sum(weights + model_params[i].at, model_params[i].bytes) * (uint64_t)(2 * i + 1);
    }
    return sum == head.sum ? 0 : model_fail(plan, "the weights are damaged");
}

/* Memory that begins with a cache line, or where much is read with a huge page. */
static void *model_memory(int64_t bytes)
{
    const int64_t unit = bytes < (4 << 20) ? 64 : 2 << 20;
    if (bytes < 0 || bytes > INT64_MAX - unit || (uint64_t)(bytes + unit) > SIZE_MAX) return NULL;
    const size_t whole = (size_t)((bytes / unit + 1) * unit);
    void *memory = aligned_alloc((size_t)unit, whole);
#if defined(MADV_HUGEPAGE)
    if (memory && unit > 64) (void)madvise(memory, whole, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Reads a file that has exactly the size of the weights; what is wrong with another is found by model_take. */
static int model_read(model_plan *plan, const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    if (!file) return model_fail(plan, "%s can't be opened", path);
    plan->owned = model_memory(MODEL_WEIGHT_BYTES + 1);
    *bytes = plan->owned ? fread(plan->owned, 1, (size_t)MODEL_WEIGHT_BYTES + 1, file) : 0;
    const int failed = ferror(file);
    fclose(file);
    if (!plan->owned) return model_fail(plan, "there is no memory for %lld bytes of weights", (long long)MODEL_WEIGHT_BYTES);
    return failed ? model_fail(plan, "%s can't be read", path) : 0;
}

static model_plan *model_make(const char *path, const void *weights, size_t bytes, int threads, char *error, size_t room)
{
    model_plan *plan = (model_plan *)calloc(1, sizeof *plan);
    int failed = !plan;
    if (plan) {
#if defined(_OPENMP)
        plan->threads = threads > 0 ? threads : omp_get_max_threads();
#else
        plan->threads = 1;
        (void)threads;
#endif
#if defined(__AMX_TILE__) && defined(__linux__)
        if (syscall(SYS_arch_prctl, 0x1023, 18)) failed = model_fail(plan, "this system gives no permission to use AMX");
#endif
        if (!failed && path) failed = model_read(plan, path, &bytes);
        else if ((uintptr_t)weights % 64) failed = model_fail(plan, "the weights do not begin with a multiple of 64 bytes");
        if (!failed) failed = model_take(plan, (const unsigned char *)(path ? plan->owned : weights), bytes);
    }
    if (!failed) return plan;
    if (error && room) snprintf(error, room, "%s", plan ? plan->error : "there is no memory");
    model_destroy(plan);
    return NULL;
}

model_plan *model_create(const char *path, int threads, char *error, size_t room)
{
    return model_make(path, NULL, 0, threads, error, room);
}

model_plan *model_create_from_memory(const void *weights, size_t bytes, int threads, char *error, size_t room)
{
    return model_make(NULL, weights, bytes, threads, error, room);
}

void model_destroy(model_plan *plan)
{
    if (!plan) return;
    for (int i = 0; i < MODEL_RESULTS; ++i) free(plan->results[i]);
    free(plan->arena);
    free(plan->owned);
    free(plan);
}

/* ---- a call ---- */

/* The inputs in the order of the plan, checked but for their sizes. */
static int model_match(model_plan *plan, const model_array *given, int count, const model_array **in)
{
    if (count != MODEL_INPUTS) return model_fail(plan, "the plan takes %d inputs, got %d", (int)MODEL_INPUTS, count);
    for (int i = 0; i < MODEL_INPUTS; ++i) {
        const model_array *want = &model_inputs[i];
        in[i] = NULL;
        for (int k = 0, j; k < count && !in[i]; ++k) {
            j = (i + k) % count; /* most callers have the plan's order */
            if (given[j].name && !strcmp(given[j].name, want->name)) in[i] = &given[j];
        }
        if (!in[i]) return model_fail(plan, "there is no input %s", want->name);
        if (in[i]->dtype != want->dtype) return model_fail(plan, "input %s has another dtype than model.h says", want->name);
        if (in[i]->rank != want->rank) return model_fail(plan, "input %s has %d dimensions, not %d", want->name, in[i]->rank, want->rank);
        if (!in[i]->data) return model_fail(plan, "input %s has no data", want->name);
        if ((uintptr_t)in[i]->data % model_item_bytes(want->dtype)) return model_fail(plan, "input %s is not aligned", want->name);
    }
    return 0;
}

static int model_grow(model_plan *plan, void **memory, int64_t *have, int64_t bytes)
{
    if (*memory && *have >= bytes) return 0;
    free(*memory);
    *memory = model_memory(bytes);
    *have = *memory ? bytes : 0;
    return *memory ? 0 : model_fail(plan, "there is no memory for %lld bytes", (long long)bytes);
}

static int model_explain(model_plan *plan, const mp_error *e)
{
    const char *const step = e->step >= 0 && e->step < MODEL_STEPS ? model_steps[e->step] : "a step";
    const long long value = e->value, limit = e->limit, place = e->place;
    switch (e->code) {
    case MP_INDEX: return model_fail(plan, "%s: index %lld at place %lld is out of range [0, %lld)", step, value, place, limit);
    case MP_POSITION: return model_fail(plan, "%s: position %lld is not in the table of %lld positions", step, value, limit);
    case MP_CACHE_FULL: return model_fail(plan, "%s: sequence %lld needs %lld positions, the cache has %lld", step, place, value, limit);
    case MP_COUNT: return model_fail(plan, "%s: sequence %lld has %lld valid rows, of %lld given", step, place, value, limit);
    default: return model_fail(plan, "%s failed with code %d", step, (int)e->code);
    }
}

int model_run(model_plan *plan, const model_array *inputs, int count, model_array *outputs)
{
    const model_array *in[MODEL_INPUTS + 1] = {0};
    void *from[MODEL_INPUTS + 1], *to[MODEL_RESULTS + 1];
    int64_t symbols[MODEL_SYMBOLS], offsets[MODEL_SLOTS + 1], arena = 0;
    model_array made[MODEL_RESULTS + 1];
    memcpy(made, model_results, sizeof made);
    symbols[MODEL_SYMBOLS - 1] = plan->threads;
    if (model_match(plan, inputs, count, in) || model_bind(plan, in, symbols)) return -1;
    model_layout(symbols, offsets, &arena, made);
    if (model_grow(plan, &plan->arena, &plan->arena_bytes, arena)) return -1;
    for (int i = 0; i < MODEL_INPUTS; ++i) from[i] = in[i]->data;
    for (int i = 0; i < MODEL_RESULTS; ++i) {
        int64_t bytes = (int64_t)model_item_bytes(made[i].dtype);
        for (int k = 0; k < made[i].rank; ++k) bytes *= made[i].shape[k];
        if (model_places[i].is >= 0) made[i].data = from[model_places[i].is];
        else if (model_grow(plan, &plan->results[i], &plan->result_bytes[i], bytes)) return -1;
        else made[i].data = plan->results[i];
        to[i] = made[i].data;
    }
    mp_args args;
    mp_error error;
    memset(&args, 0, sizeof args);
    memset(&error, 0, sizeof error);
    args.symbols = symbols, args.inputs = from, args.outputs = to, args.params = plan->params;
    args.arena = (char *)plan->arena, args.offsets = offsets, args.threads = plan->threads;
    if (mp_run_plan(&args, &error)) return model_explain(plan, &error);
    for (int i = 0; i < MODEL_RESULTS; ++i) { /* an input that is written, where the plan has a place of its own for it */
        const int into = model_places[i].written;
        int64_t bytes = (int64_t)model_item_bytes(made[i].dtype);
        for (int k = 0; k < made[i].rank; ++k) bytes *= made[i].shape[k];
        if (into >= 0 && from[into] != made[i].data) memcpy(from[into], made[i].data, (size_t)bytes);
    }
    if (MODEL_OUTPUTS > 0) memcpy(outputs, made, MODEL_OUTPUTS * sizeof *outputs);
    return 0;
}
