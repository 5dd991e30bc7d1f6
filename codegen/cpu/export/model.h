/* @TITLE@: a compiled plan as a C library. See README.md.
 *
@SIGNATURE@
 *
 * Sizes that are names are those of a call: each is at least 1, and the same everywhere. */
#ifndef MODEL_H
#define MODEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MODEL_INPUTS = @INPUTS@, MODEL_OUTPUTS = @OUTPUTS@, MODEL_DIMS = @DIMS@ };

typedef enum {
    MODEL_F64, MODEL_F32, MODEL_F16, MODEL_BF16, MODEL_I8, MODEL_I16, MODEL_I32, MODEL_I64,
    MODEL_U8, MODEL_U16, MODEL_U32, MODEL_U64, MODEL_BOOL
} model_dtype;

/* A dense array, the last dimension fastest; `data` is aligned to its elements. */
typedef struct {
    const char *name;
    model_dtype dtype;
    int rank;
    int64_t shape[MODEL_DIMS];
    void *data;
} model_array;

/* An instance. Several may run at the same time, each in one thread at a time. */
typedef struct model_plan model_plan;

/* An instance with the weights of a file, which is read whole, or of memory, which is used in place: it begins with a
 * multiple of 64 bytes and outlives the instance. `threads`: 0 for as many as OpenMP has. NULL if that fails; the reason
 * is then in `error`, cut to `room` bytes, unless that is NULL. */
model_plan *model_create(const char *path, int threads, char *error, size_t room);
model_plan *model_create_from_memory(const void *weights, size_t bytes, int threads, char *error, size_t room);
void model_destroy(model_plan *plan);

/* Runs the plan on inputs in any order, each once. Fills `outputs`, an array of MODEL_OUTPUTS: their data belongs to the
 * instance, until its next run. Inputs that are marked as written hold their new values afterwards; they must not overlap
 * with other inputs. 0, or -1 with the reason in model_error(plan); what is written then is not said. */
int model_run(model_plan *plan, const model_array *inputs, int count, model_array *outputs);
const char *model_error(const model_plan *plan);

/* What an input or output is: a size is -1 where it is that of a call. NULL beyond the last. */
const model_array *model_input(int number);
const model_array *model_output(int number);

/* Bytes of an element. */
size_t model_item_bytes(model_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
