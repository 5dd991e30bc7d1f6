/* One token for a row of logits. */
#ifndef MP_SAMPLE_H
#define MP_SAMPLE_H

#include "mp_plan.h"
#include "mp_view.h"

typedef struct {
    double temperature;   /* 0: the largest logit, the lowest id among equals */
    int64_t top_k;        /* 0: any number */
    double top_p, min_p;
    double random;        /* in [0, 1) */
} mp_sampling;

/* Whether logit a goes before logit b: larger first, the lower id among equals. */
MP_FN int mp_logit_before(const double *w, int64_t a, int64_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); }

static void __attribute__((unused)) mp_sink(int64_t *heap, int64_t n, int64_t i, const double *w)
{
    const int64_t item = heap[i];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && mp_logit_before(w, heap[child + 1], heap[child])) ++child;
        if (!mp_logit_before(w, heap[child], item)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = item;
}

/* The id that is drawn from logits w, the largest of which is `best`. A heap hands out logits from the largest down,
 * so only as many are visited as top-k and top-p keep. */
static int64_t __attribute__((unused)) mp_draw(const double *w, int64_t *heap, const int64_t vocabulary,
    const int64_t best, const mp_sampling *rule)
{
    const double top = w[best], temperature = rule->temperature, limit_p = rule->top_p, least = rule->min_p;
    const int64_t keep = rule->top_k > 0 && rule->top_k < vocabulary ? rule->top_k : vocabulary;
    double total = 0;
    if (keep == vocabulary)
        for (int64_t i = 0; i < vocabulary; ++i) total += exp((w[i] - top) / temperature);
    for (int64_t i = 0; i < vocabulary; ++i) heap[i] = i;
    for (int64_t i = vocabulary / 2 - 1; i >= 0; --i) mp_sink(heap, vocabulary, i, w);
    /* Taken tokens gather at the end of the heap: number j lies at vocabulary - 1 - j. */
    int64_t left = vocabulary, taken = 0;
    double mass = 0, kept_mass = 0;
    while (taken < keep) {
        const int64_t id = heap[0];
        const double weight = exp((w[id] - top) / temperature);
        heap[0] = heap[--left];
        if (left > 0) mp_sink(heap, left, 0, w);
        heap[left] = id;
        mass += weight;
        ++taken;
        if (keep == vocabulary && limit_p < 1 && mass >= limit_p * total) break;
        if (keep == vocabulary && weight < least && limit_p >= 1) break;
    }
    if (keep < vocabulary) total = mass;
    int64_t count = 0;
    for (double sum = 0; count < taken; ++count) {
        const double weight = exp((w[heap[vocabulary - 1 - count]] - top) / temperature);
        if (weight < least) break;
        kept_mass += weight;
        sum += weight;
        if (limit_p < 1 && sum >= limit_p * total) {
            ++count;
            break;
        }
    }
    count = mp_max(count, 1);
    const double goal = rule->random * kept_mass;
    double sum = 0;
    int64_t token = best;
    for (int64_t j = 0; j < count; ++j) {
        token = heap[vocabulary - 1 - j];
        sum += exp((w[token] - top) / temperature);
        if (sum > goal) break;
    }
    return token;
}

/* The token of a row of logits; `weights` and `heap` are room for as many numbers. */
MP_FN int64_t mp_sample(const mp_view *logits, const int64_t vocabulary, const mp_sampling *rule, double *weights,
                        int64_t *heap)
{
    enum { LOOK = 64 }; /* a vector loop finds out whether any of them is larger */
    int64_t best = 0;
    double top = mp_at(logits, 0);
    for (int64_t i = 0; i < vocabulary; i += LOOK) {
        const int64_t end = mp_min(i + LOOK, vocabulary);
        int larger = 0;
        _Pragma("omp simd reduction(| : larger)")
        for (int64_t j = i; j < end; ++j) larger |= mp_at(logits, j * logits->s0) > top;
        for (int64_t j = i; larger && j < end; ++j)
            if (mp_at(logits, j * logits->s0) > top) top = mp_at(logits, (best = j) * logits->s0);
    }
    if (!(rule->temperature > 0)) return best;
    for (int64_t i = 0; i < vocabulary; ++i) weights[i] = mp_at(logits, i * logits->s0);
    return mp_draw(weights, heap, vocabulary, best, rule);
}

/* Logits [from, to) with those of the first `seen` tokens of a history made smaller. They are read from the untouched input,
 * so that a token that was seen twice is penalized once. */
MP_FN void mp_penalize(const mp_view *x, const mp_view *y, const int64_t from, const int64_t to, const mp_view *history,
                       const int64_t seen, const double penalty)
{
    for (int64_t i = from; i < to; ++i) mp_put(y, i * y->s0, mp_at(x, i * x->s0));
    for (int64_t j = 0; j < seen; ++j) {
        const int64_t i = mp_int_at(history, j * history->s0);
        if (i < from || i >= to) continue;
        const double logit = mp_at(x, i * x->s0);
        mp_put(y, i * y->s0, logit > 0 ? logit / penalty : logit * penalty);
    }
}
#endif
