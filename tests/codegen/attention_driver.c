/* The loops of mp_attention.h as they are, with sizes that are not constants, against attention written down in double.
 * Prints nothing and returns 0 if all agree; rows of the cache that nobody may read hold NaN. */
#include "mp_attention.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    int64_t batches, queries, keys, past;
    int kv_heads, group, dim, value_dim, causal, window, mask, type, dense;
    double softcap;
} sizes;

static const int tile_sizes = MP_LANES > 1 ? MP_LANES : 4;
static uint32_t state = 1;

static double number(void) /* in [-1, 1), a multiple of 1/128: the same in every type */
{
    state = state * 1664525u + 1013904223u;
    return (double)(state >> 24) / 128 - 1;
}

static void *filled(const int type, const int64_t count)
{
    char *const data = calloc((size_t)count, 8);
    const mp_view v = {.type = type, .data = data};
    for (int64_t i = 0; i < count; ++i) mp_put(&v, i, number());
    return data;
}

/* [b][n1][n2][dim]; or, if not dense, with the last two dimensions exchanged. */
static mp_view view(const int type, const int64_t b, const int64_t n1, const int64_t n2, const int64_t dim, const int dense)
{
    mp_view v = MP_STORED(filled(type, b * n1 * n2 * dim), type, n1 * n2 * dim, n2 * dim, dense ? dim : 1, dense ? 1 : n2);
    return v;
}

/* A row of y: weights of all keys, then their values. */
static void naive(const mp_attention *a, const int64_t b, const int64_t s, const int64_t h, double *y)
{
    const int64_t before = mp_before(a, b), g = h / a->group, written = mp_min(a->keys, before + a->queries);
    double weight[256], top = -INFINITY, total = 0;
    for (int64_t key = 0; key < written; ++key) {
        weight[key] = -INFINITY;
        if (a->causal && key > before + s) continue;
        if (a->window && key <= before + s - a->window) continue;
        double dot = 0;
        for (int64_t i = 0; i < a->dim; ++i)
            dot += mp_at(&a->q, mp_place(&a->q, b, s, h, i)) * mp_at(&a->k, mp_place(&a->k, b, g, key, i));
        dot *= a->scale;
        if (a->softcap > 0) dot = a->softcap * tanh(dot / a->softcap);
        if (a->has_mask) dot += mp_at(&a->mask, mp_place(&a->mask, b, h, s, key));
        weight[key] = dot;
        top = fmax(top, dot);
    }
    for (int64_t i = 0; i < a->value_dim; ++i) y[i] = 0;
    for (int64_t key = 0; key < written; ++key) {
        if (weight[key] == -INFINITY) continue;
        total += exp(weight[key] - top);
        for (int64_t i = 0; i < a->value_dim; ++i) y[i] += exp(weight[key] - top) * mp_at(&a->v, mp_place(&a->v, b, g, key, i));
    }
    for (int64_t i = 0; total > 0 && i < a->value_dim; ++i) y[i] /= total;
}

/* The largest difference between y and `naive`. */
static double difference(const mp_attention *a)
{
    double most = 0, want[256];
    for (int64_t b = 0; b < a->batches; ++b)
        for (int64_t s = 0; s < a->queries; ++s)
            for (int64_t h = 0; h < a->kv_heads * a->group; ++h) {
                naive(a, b, s, h, want);
                for (int64_t i = 0; i < a->value_dim; ++i) {
                    const double off = fabs(mp_at(&a->y, mp_place(&a->y, b, s, h, i)) - want[i]);
                    if (!(off <= most)) most = off; /* NaN too */
                }
            }
    return most;
}

static int check(const sizes *z, const char *name, const mp_attention *a, const double limit)
{
    const double off = difference(a);
    if (off <= limit) return 0;
    printf("%s: off by %g; batches %d queries %d keys %d past %d heads %d x %d dims %d, %d causal %d window %d mask %d type %d dense %d\n", name,
           off, (int)z->batches, (int)z->queries, (int)z->keys, (int)z->past, z->kv_heads, z->group, z->dim, z->value_dim, z->causal, z->window,
           z->mask, z->type, z->dense);
    return 1;
}

static int run_case(const sizes *z)
{
    static const atomic_int silence;
    mp_run *const run = calloc(1, sizeof *run);
    run->signal = &silence;
    int64_t past[8];
    for (int64_t b = 0; b < z->batches; ++b) past[b] = z->past / (b + 1);
    mp_attention a = {
        .batches = z->batches, .queries = z->queries, .keys = z->keys, .kv_heads = z->kv_heads, .group = z->group, .dim = z->dim,
        .value_dim = z->value_dim, .causal = z->causal, .window = z->window, .scale = 0.25, .softcap = z->softcap,
        .q = view(MP_F32, z->batches, z->queries, z->kv_heads * z->group, z->dim, z->dense),
        .k = view(z->type, z->batches, z->kv_heads, z->keys, z->dim, z->dense),
        .v = view(z->type, z->batches, z->kv_heads, z->keys, z->value_dim, z->dense),
        .y = view(MP_F32, z->batches, z->queries, z->kv_heads * z->group, z->value_dim, 1),
        .mask = view(MP_F32, z->batches, z->kv_heads * z->group, z->queries, z->keys, 1), .has_mask = z->mask,
        .past = MP_STORED(past, MP_I64, 1, 0, 0, 0), .has_past = 1,
        .least = 32, .chunk = 64, .rows = MP_LANES < 4 || z->group > 8 ? 1 : 4, .wide = 1, .pairs = 1, .ahead = 4, .far = 16, .prefetch_keys = 1,
        .columns = 2 * tile_sizes, .block = 16, .tile_rows = 4, .tile_vectors = MP_LANES > 1 ? 2 : 8,
    };
    const mp_view *const caches[2] = {&a.k, &a.v};
    for (int64_t b = 0; b < z->batches; ++b)
        for (int64_t g = 0; g < z->kv_heads; ++g)
            for (int64_t key = past[b] + z->queries; key < z->keys; ++key)
                for (int n = 0; n < 2; ++n)
                    for (int64_t i = 0; i < (n ? z->value_dim : z->dim); ++i) mp_put(caches[n], mp_place(caches[n], b, g, key, i), NAN);
    const int64_t dim = mp_whole(z->dim), value = mp_whole(z->value_dim), lines = z->batches * z->queries * z->kv_heads * z->group;
    a.partial = malloc(sizeof(float) * (size_t)(lines * (z->keys / a.least + 1) * (value + 2)));
    float *const few = aligned_alloc(64, (size_t)(MP_FEW_ROOM(z->group, dim, value, a.rows, a.chunk) * 4 + 63) / 64 * 64);
    float *const strip = aligned_alloc(64, (size_t)(MP_STRIP_ROOM(z->dim, (z->value_dim + 3) / 4 * 4, a.columns, a.block) * 4 + 63) / 64 * 64);
    double *const wide = malloc(sizeof(double) * (size_t)MP_DOUBLE_ROOM(z->dim, z->value_dim));
    int wrong = 0;
    mp_attention_few(run, 0, 1, &a, few);
    wrong += check(z, "few", &a, 2e-5);
    mp_attention_many(run, 0, 1, &a, strip);
    wrong += check(z, "many", &a, 2e-5);
    mp_attention_double(run, 0, 1, &a, wide);
    wrong += check(z, "double", &a, 1e-6);
#if defined(MP_TILES) && MP_LANES == 16
    if ((z->type == MP_BF16 || z->type == MP_F16) && !z->mask && z->softcap == 0 && z->dim % 32 == 0 && z->value_dim % 32 == 0) {
        const int64_t room = (z->keys + 31) / 32 * 32;
        a.block = 32;
        a.columns = 32;
        a.part = 32;
        a.parts = z->type == MP_BF16 ? 1 : 2;
        a.k_tiles = malloc((size_t)(z->batches * z->kv_heads * room * z->dim * a.parts * 2));
        a.v_tiles = malloc((size_t)(z->batches * z->kv_heads * room * z->value_dim * a.parts * 2));
        const size_t floats = (size_t)MP_STRIP_TILES_ROOM(z->dim, z->value_dim, a.block, a.parts);
        float *const tiles = aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
        memset(run, 0, sizeof *run);
        run->signal = &silence;
        mp_attention_many_tiles(run, 0, 1, &a, tiles);
        wrong += check(z, "many on tiles", &a, a.parts > 1 ? 1e-4 : 2e-2);
        if (a.parts == 1 && z->dense && z->group >= 3 && z->group <= 8) {
            a.few_tiles = 1;
            a.few_heads = z->group <= 4 ? 4 : 8;
            a.ahead = 32;
            a.far = 64;
            memset(run, 0, sizeof *run);
            run->signal = &silence;
            mp_attention_few(run, 0, 1, &a, few);
            wrong += check(z, "few on tiles", &a, 2e-2);
        }
        free(tiles);
        free(a.k_tiles);
        free(a.v_tiles);
    }
#endif
    void *const all[] = {a.q.data, a.k.data, a.v.data, a.y.data, a.mask.data, a.partial, few, strip, wide, run};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
    return wrong;
}

int main(void)
{
    static const sizes cases[] = {
        {1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, MP_F32, 1, 0},
        {2, 3, 37, 34, 2, 3, 5, 7, 1, 0, 0, MP_F32, 1, 0},
        {1, 19, 150, 131, 1, 2, 16, 16, 1, 0, 0, MP_F32, 1, 0},
        {2, 5, 150, 141, 2, 2, 16, 12, 1, 9, 0, MP_BF16, 1, 0},
        {1, 2, 70, 60, 1, 35, 8, 8, 1, 0, 0, MP_F16, 1, 0}, /* more heads than run together */
        {2, 37, 150, 113, 2, 3, 64, 32, 1, 40, 0, MP_F16, 1, 0},
        {1, 21, 80, 50, 2, 1, 20, 13, 0, 0, 1, MP_F32, 1, 0},
        {1, 7, 60, 53, 1, 3, 16, 16, 1, 0, 0, MP_F32, 0, 2.0},
        {1, 6, 66, 60, 2, 2, 32, 32, 1, 5, 1, MP_BF16, 0, 0},
        {2, 9, 77, 60, 2, 4, 64, 32, 1, 0, 0, MP_BF16, 1, 0},
        {1, 40, 120, 70, 1, 3, 32, 64, 1, 33, 0, MP_BF16, 1, 0},
        {1, 34, 90, 50, 1, 8, 32, 32, 0, 0, 0, MP_BF16, 0, 0},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) wrong += run_case(&cases[i]);
    return wrong != 0;
}
