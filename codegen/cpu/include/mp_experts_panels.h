/* mp_experts.h for matrices in panels, the panels of a matrix behind those of the one before: rows of x are packed, and
 * panels multiplied, as in products with one matrix. A pass over a panel serves one row, or a block of them; on tile units
 * from some rows of a matrix on many of them. */
#ifndef MP_EXPERTS_PANELS_H
#define MP_EXPERTS_PANELS_H

#include "mp_experts.h"

enum {
    MP_EXPERT_PANELS = 2,   /* panels of a task: threads that share few experts are done at the same time */
    MP_EXPERT_TAIL = 4,     /* tasks for each thread that are not assigned beforehand, at most */
    MP_EXPERT_SUMS = 1024,  /* floats: sums of a block of rows and the panels of a task, at most */
    MP_EXPERT_TILED = 128   /* rows that tile units take at a time */
};

/* Columns [first, first + count) of a pair: sums by matrix e, and by its second one, if there is one. */
typedef void (*mp_expert_finish)(const void *c, int64_t pair, int64_t e, int64_t first, int64_t count,
                                 const float *sums, const float *more);

typedef struct mp_experts {
    int64_t experts, columns;
    int choices, shared;        /* matrices of a row of x; whether they multiply the same row */
    int matrices, panel, block; /* 1, or 2 with a gate; columns of a panel; rows of a block */
    int64_t panel_bytes, row_bytes, apart; /* of a panel; of a packed row of x; from a row of a block to the next */
    const void *product;        /* for the functions that follow */
    /* The row of a pair becomes one of a block of R. */
    void (*pack)(const void *product, const void *c, int64_t pair, int R, char *to);
    /* sums[R][width] = a block of R rows times a panel. */
    void (*multiply)(const void *product, const char *x, const char *panel, float *sums, int64_t width, int R);
    mp_expert_finish finish;
    /* Tile units: rows of a matrix from which on they are used (0: never), bytes of 16 packed rows; row r of 16 is packed,
     * and `count` rows are multiplied by `panels` panels: sums[16 rows …][width]. */
    int tiled_from;
    int64_t deep_bytes;
    void (*pack_deep)(const void *product, const void *c, int64_t pair, char *to, int r);
    void (*multiply_deep)(const void *product, const char *x, const char *w, int panels, int64_t count, float *sums);
} mp_experts;

MP_INLINE int mp_expert_tiled(const mp_experts *s, const int64_t count) { return s->tiled_from && count >= s->tiled_from; }

/* Rows of x that matrix e has in memory: one alone, or whole blocks, the last of which repeats its last row. None where one
 * alone is packed already: rows of `common` lie in front of all blocks. */
MP_INLINE int64_t mp_expert_rows(const mp_experts *s, const int64_t *starts, const int64_t e, const int64_t common)
{
    const int64_t count = starts[e + 1] - starts[e], block = mp_expert_tiled(s, count) ? 16 : s->block;
    return count <= 1 ? (common ? 0 : count) : (count + block - 1) / block * block;
}

/* Rows of a matrix on tile units, a task of `some` panels from panel p0 on. */
MP_INLINE void mp_experts_deep(const mp_experts *s, const int64_t *order, const int64_t count, const int64_t e,
                               const int64_t p0, const int64_t some, const char *w, const char *up, const char *x, const void *c)
{
    _Alignas(64) float sums[2][MP_EXPERT_TILED * MP_EXPERT_SUMS / 16];
    const int64_t width = some * s->panel, at = (e * (s->columns / s->panel) + p0) * s->panel_bytes;
    for (int64_t b = 0; b < count; b += MP_EXPERT_TILED) {
        const int64_t rows = mp_min(MP_EXPERT_TILED, count - b);
        for (int m = 0; m < s->matrices; ++m)
            s->multiply_deep(s->product, x + b / 16 * s->deep_bytes, (m ? up : w) + at, (int)some, rows, sums[m]);
        for (int64_t r = 0; r < rows; ++r)
            s->finish(c, order[b + r], e, p0 * s->panel, width, sums[0] + r * width, sums[1] + r * width);
    }
}

/* Threads pack the rows together. Then each has tasks that follow each other, a few panels of one matrix, so that what it
 * prefetches is what it reads; the last ones go to whoever is done first, and all of them where rows are many. */
MP_INLINE void mp_experts_run(const mp_experts *s, mp_run *run, const int t, const int T, const int64_t pairs, const int64_t *order,
                              const int64_t *starts, const char *w, const char *up, char *x, const void *c)
{
    const int64_t panels = s->columns / s->panel, strips = (panels + MP_EXPERT_PANELS - 1) / MP_EXPERT_PANELS;
    const int64_t width = MP_EXPERT_PANELS * s->panel, block = s->block;
    const int64_t tokens = pairs / s->choices, common = s->shared && tokens <= block ? tokens : 0;
    int64_t active = 0, row = common, few = 1;
    for (int64_t r = t; r < common; r += T) s->pack(s->product, c, r * s->choices, 1, x + r * s->row_bytes);
    for (int64_t e = 0; e < s->experts; ++e) {
        const int64_t rows = mp_expert_rows(s, starts, e, common), count = starts[e + 1] - starts[e];
        const char tiled = mp_expert_tiled(s, count);
        for (int64_t i = 0; i < rows; ++i)
            if ((row + i) % T == t && tiled)
                s->pack_deep(s->product, c, order[starts[e] + mp_min(i, count - 1)], x + row * s->row_bytes + i / 16 * s->deep_bytes, (int)(i % 16));
            else if ((row + i) % T == t)
                s->pack(s->product, c, order[starts[e] + mp_min(i, count - 1)], rows == 1 ? 1 : s->block,
                        x + (row + i / block * block) * s->row_bytes + i % block * s->apart);
        row += rows;
        active += count > 0;
        few &= count <= block;
    }
    const int64_t tasks = active * strips, assigned = T == 1 ? tasks : few ? tasks - mp_min(tasks / 4, MP_EXPERT_TAIL * T) : 0;
    int64_t task = mp_share(assigned, t, T);
    const int64_t end = mp_share(assigned, t + 1, T);
    int64_t e = -1, reached = -1, first = 0, next = common; /* the matrix at work, its number among the active ones, its rows */
    mp_barrier(run, T);
    _Alignas(64) float sums[2][MP_EXPERT_SUMS];
    for (;; ++task) {
        if (task >= end) task = assigned + mp_take(run);
        if (task >= tasks || mp_stopping(run)) return;
        const int64_t p0 = task % strips * MP_EXPERT_PANELS, some = mp_min(MP_EXPERT_PANELS, panels - p0);
        for (; reached < task / strips; ++reached) {
            first = next;
            do ++e;
            while (starts[e + 1] == starts[e]);
            next += mp_expert_rows(s, starts, e, common);
        }
        const int64_t count = starts[e + 1] - starts[e], R = count == 1 ? 1 : block;
        const char *const rows = x + (common && count == 1 ? order[starts[e]] / s->choices : first) * s->row_bytes;
        if (mp_expert_tiled(s, count)) {
            mp_experts_deep(s, order + starts[e], count, e, p0, some, w, up, rows, c);
            continue;
        }
        for (int64_t b = 0; b < count; b += R) {
            for (int m = 0; m < s->matrices; ++m)
                for (int64_t p = 0; p < some; ++p)
                    s->multiply(s->product, rows + b * s->row_bytes, (m ? up : w) + (e * panels + p0 + p) * s->panel_bytes,
                                sums[m] + p * s->panel, width, (int)R);
            for (int64_t r = 0; r < R && b + r < count; ++r)
                s->finish(c, order[starts[e] + b + r], e, p0 * s->panel, some * s->panel, sums[0] + r * width,
                          sums[1] + r * width);
        }
    }
}
#endif
