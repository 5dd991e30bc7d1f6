/* Text to token ids and back, by the tables of tokenizer.bin: byte-level BPE, and SentencePiece's with byte fallback.
 *
 * A text is cut at added tokens, normalized, cut by the tokenizer's patterns, and each piece is merged, the pair of the
 * lowest rank first. Patterns are small programs over classes of characters; both come from the tokenizer itself. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAYBE_UNUSED __attribute__((unused))

enum { TOK_NORMAL, TOK_SPECIAL, TOK_BYTE };                       /* what a token is when it becomes text */
enum { TOK_MATCH, TOK_CLASS, TOK_SPLIT, TOK_JUMP, TOK_NOT };      /* instructions of a pattern */
enum { TOK_BYTES = 1, TOK_WHOLE_WORDS = 2, TOK_NFC = 4 };         /* flags: byte-level, words of the vocabulary first */

/* The numbers at the beginning of the file, then the tables, in this order. */
typedef struct {
    char magic[16];
    uint64_t bytes, sum;
    uint32_t flags, tokens, merges, ranges, patterns, code, added, decomposed, composed, combining, pool, unknown;
} tok_head;

typedef struct {
    tok_head head;
    const uint32_t *token_at, *kind, *order; /* text in the pool [tokens + 1], TOK_*, ids by their texts */
    const uint32_t *merge_left, *merge_right, *merge_rank, *merge_id; /* sorted by the pair */
    const uint32_t *range, *range_mask;      /* classes of characters, from a first one on */
    const uint32_t *pattern_at, *code;       /* [patterns + 1], pairs of an instruction and its argument */
    const uint32_t *added_at, *added_id;     /* texts in the pool [added + 1] */
    const uint32_t *apart, *joined;          /* NFC: character, first, second; first, second, character */
    const uint32_t *combining;               /* NFC: character, class */
    const int32_t *byte_token;               /* [256], -1: none */
    const uint32_t *replaced;                /* places in the pool: what is put in front, what is replaced, by what, end */
    const char *pool;
} tokenizer;

typedef struct { int32_t *at; size_t count, room; } tok_ids;
typedef struct { char *at; size_t count, room; } tok_text;

static void tok_need(void **memory, size_t *room, size_t count, size_t size)
{
    if (count <= *room) return;
    *room = count + count / 2 + 64;
    void *const grown = realloc(*memory, *room * size);
    if (!grown) {
        fprintf(stderr, "there is no memory for a text\n");
        exit(1);
    }
    *memory = grown;
}

static void tok_push(tok_ids *ids, int32_t id)
{
    void *memory = ids->at;
    tok_need(&memory, &ids->room, ids->count + 1, sizeof *ids->at);
    ids->at = (int32_t *)memory;
    ids->at[ids->count++] = id;
}

static void tok_add(tok_text *text, const char *from, size_t count)
{
    void *memory = text->at;
    tok_need(&memory, &text->room, text->count + count + 1, 1);
    text->at = (char *)memory;
    if (count) memcpy(text->at + text->count, from, count);
    text->count += count;
    text->at[text->count] = 0;
}

/* ---- UTF-8 ---- */

/* The bytes of the character at `s`, 0 if none begins there, and -1 if its end is missing. */
static int utf8_bytes(const unsigned char *s, size_t left)
{
    if (!left) return 0;
    const unsigned c = s[0];
    if (c < 0x80) return 1;
    const int count = c >= 0xC2 && c <= 0xDF ? 2 : c >= 0xE0 && c <= 0xEF ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    for (int i = 1; i < count; ++i) {
        if ((size_t)i >= left) return -1;
        const unsigned low = i > 1 ? 0x80 : c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
        const unsigned high = i > 1 ? 0xBF : c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
        if (s[i] < low || s[i] > high) return 0;
    }
    return count;
}

/* A copy in which every byte that is part of no character, or of an unfinished one, stands as U+FFFD: one for each run that
 * could have begun a character. With `hold`, what may still become a character stays out: its number of bytes is given. */
static size_t utf8_lossy(tok_text *out, const char *text, size_t count, int hold)
{
    const unsigned char *const s = (const unsigned char *)text;
    size_t at = 0;
    while (at < count) {
        const int n = utf8_bytes(s + at, count - at);
        if (n > 0) {
            tok_add(out, text + at, (size_t)n);
            at += (size_t)n;
            continue;
        }
        if (n < 0 && hold) return count - at;
        size_t bad = 1; /* as much as a character could begin with */
        while (n == 0 && at + bad < count && utf8_bytes(s + at, bad + 1) < 0) ++bad;
        if (n < 0) bad = count - at;
        tok_add(out, "\xEF\xBF\xBD", 3);
        at += bad;
    }
    return 0;
}

static uint32_t utf8_get(const unsigned char *s, int n)
{
    if (n == 1) return s[0];
    uint32_t c = s[0] & (0x7Fu >> n);
    for (int i = 1; i < n; ++i) c = c << 6 | (s[i] & 0x3Fu);
    return c;
}

static void utf8_put(tok_text *out, uint32_t c)
{
    char s[4];
    int n = 0;
    if (c < 0x80) s[n++] = (char)c;
    else if (c < 0x800) s[n++] = (char)(0xC0 | c >> 6), s[n++] = (char)(0x80 | (c & 63));
    else if (c < 0x10000) s[n++] = (char)(0xE0 | c >> 12), s[n++] = (char)(0x80 | (c >> 6 & 63)), s[n++] = (char)(0x80 | (c & 63));
    else {
        s[n++] = (char)(0xF0 | c >> 18), s[n++] = (char)(0x80 | (c >> 12 & 63));
        s[n++] = (char)(0x80 | (c >> 6 & 63)), s[n++] = (char)(0x80 | (c & 63));
    }
    tok_add(out, s, (size_t)n);
}

/* ---- tables ---- */

static const uint32_t *tok_find3(const uint32_t *table, uint32_t count, uint32_t a, int64_t b)
{
    uint32_t low = 0;
    while (low < count) {
        const uint32_t middle = (low + count) / 2, *const row = table + 3 * middle;
        if (row[0] == a && (b < 0 || row[1] == (uint32_t)b)) return row;
        if (row[0] < a || (row[0] == a && b >= 0 && row[1] < (uint32_t)b)) low = middle + 1;
        else count = middle;
    }
    return NULL;
}

static int64_t tok_merge(const tokenizer *t, int32_t left, int32_t right)
{
    uint32_t low = 0, high = t->head.merges;
    while (low < high) {
        const uint32_t m = (low + high) / 2;
        if (t->merge_left[m] == (uint32_t)left && t->merge_right[m] == (uint32_t)right) return m;
        if (t->merge_left[m] < (uint32_t)left || (t->merge_left[m] == (uint32_t)left && t->merge_right[m] < (uint32_t)right)) low = m + 1;
        else high = m;
    }
    return -1;
}

static int32_t tok_find(const tokenizer *t, const char *text, size_t count)
{
    uint32_t low = 0, high = t->head.tokens;
    while (low < high) {
        const uint32_t m = (low + high) / 2, id = t->order[m];
        const size_t n = t->token_at[id + 1] - t->token_at[id];
        int c = memcmp(t->pool + t->token_at[id], text, n < count ? n : count);
        if (!c) c = n < count ? -1 : n > count;
        if (!c) return (int32_t)id;
        if (c < 0) low = m + 1;
        else high = m;
    }
    return -1;
}

static uint32_t tok_classes(const tokenizer *t, uint32_t c)
{
    uint32_t low = 0, high = t->head.ranges;
    while (low + 1 < high) {
        const uint32_t m = (low + high) / 2;
        if (t->range[m] <= c) low = m;
        else high = m;
    }
    return t->range_mask[low];
}

/* ---- NFC ---- */

static uint32_t tok_combining(const tokenizer *t, uint32_t c)
{
    uint32_t low = 0, high = t->head.combining;
    while (low < high) {
        const uint32_t m = (low + high) / 2;
        if (t->combining[2 * m] == c) return t->combining[2 * m + 1];
        if (t->combining[2 * m] < c) low = m + 1;
        else high = m;
    }
    return 0;
}

static void tok_apart(const tokenizer *t, uint32_t c, tok_ids *out)
{
    enum { S = 0xAC00, L = 0x1100, V = 0x1161, T = 0x11A7, COUNT = 11172, TS = 28, VT = 588 };
    if (c >= S && c < S + COUNT) {
        tok_push(out, (int32_t)(L + (c - S) / VT));
        tok_push(out, (int32_t)(V + (c - S) % VT / TS));
        if ((c - S) % TS) tok_push(out, (int32_t)(T + (c - S) % TS));
        return;
    }
    const uint32_t *const row = tok_find3(t->apart, t->head.decomposed, c, -1);
    if (!row) tok_push(out, (int32_t)c);
    else {
        tok_apart(t, row[1], out);
        if (row[2]) tok_push(out, (int32_t)row[2]);
    }
}

static uint32_t tok_join(const tokenizer *t, uint32_t a, uint32_t b)
{
    enum { S = 0xAC00, L = 0x1100, V = 0x1161, T = 0x11A7 };
    if (a >= L && a < L + 19 && b >= V && b < V + 21) return S + ((a - L) * 21 + (b - V)) * 28;
    if (a >= S && a < S + 11172 && (a - S) % 28 == 0 && b > T && b < T + 28) return a + (b - T);
    const uint32_t *const row = tok_find3(t->joined, t->head.composed, a, (int64_t)b);
    return row ? row[2] : 0;
}

static void tok_nfc(const tokenizer *t, tok_text *text)
{
    tok_ids c = {0};
    for (size_t at = 0; at < text->count;) {
        const int n = utf8_bytes((unsigned char *)text->at + at, text->count - at);
        tok_apart(t, utf8_get((unsigned char *)text->at + at, n), &c);
        at += (size_t)n;
    }
    for (size_t i = 1; i < c.count; ++i) { /* marks of one character in the order of their classes */
        const uint32_t own = tok_combining(t, (uint32_t)c.at[i]);
        for (size_t j = i; own && j > 0 && tok_combining(t, (uint32_t)c.at[j - 1]) > own; --j) {
            const int32_t swap = c.at[j];
            c.at[j] = c.at[j - 1], c.at[j - 1] = swap;
        }
    }
    text->count = 0;
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last = 0;
    for (size_t i = 0; i < c.count; ++i) {
        const uint32_t own = tok_combining(t, (uint32_t)c.at[i]);
        const uint32_t whole = starter != SIZE_MAX && (last < own || (last == 0 && starter + 1 == out))
            ? tok_join(t, (uint32_t)c.at[starter], (uint32_t)c.at[i]) : 0;
        if (whole) {
            c.at[starter] = (int32_t)whole;
            continue;
        }
        if (!own) starter = out;
        last = own;
        c.at[out++] = c.at[i];
    }
    for (size_t i = 0; i < out; ++i) utf8_put(text, (uint32_t)c.at[i]);
    free(c.at);
}

/* ---- BPE ---- */

typedef struct { int32_t id; int64_t before, after; } tok_symbol;
typedef struct { uint32_t rank; int64_t at; uint32_t id; } tok_pair;

static int tok_less(const tok_pair *a, const tok_pair *b) { return a->rank != b->rank ? a->rank < b->rank : a->at < b->at; }

static void tok_offer(const tokenizer *t, const tok_symbol *s, int64_t at, tok_pair **heap, size_t *count, size_t *room)
{
    if (at < 0 || s[at].after < 0) return;
    const int64_t m = tok_merge(t, s[at].id, s[s[at].after].id);
    if (m < 0) return;
    void *memory = *heap;
    tok_need(&memory, room, *count + 1, sizeof **heap);
    *heap = (tok_pair *)memory;
    const tok_pair made = {t->merge_rank[m], at, t->merge_id[m]};
    size_t i = (*count)++;
    for (; i && tok_less(&made, *heap + (i - 1) / 2); i = (i - 1) / 2) (*heap)[i] = (*heap)[(i - 1) / 2];
    (*heap)[i] = made;
}

static tok_pair tok_take(tok_pair *heap, size_t *count)
{
    const tok_pair top = heap[0], last = heap[--*count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < *count; i = child) {
        if (child + 1 < *count && tok_less(heap + child + 1, heap + child)) ++child;
        if (!tok_less(heap + child, &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

static void tok_bpe(const tokenizer *t, const char *text, size_t count, tok_ids *out)
{
    if (!count) return;
    if (t->head.flags & TOK_WHOLE_WORDS) {
        const int32_t id = tok_find(t, text, count);
        if (id >= 0) {
            tok_push(out, id);
            return;
        }
    }
    tok_symbol *s = (tok_symbol *)malloc(count * sizeof *s);
    if (!s) exit(1);
    int64_t n = 0;
    int unknown = 0; /* unknown characters side by side are one token */
    for (size_t at = 0; at < count;) {
        size_t bytes = 1;
        int32_t id;
        if (t->head.flags & TOK_BYTES) id = t->byte_token[(unsigned char)text[at]];
        else {
            bytes = (size_t)utf8_bytes((const unsigned char *)text + at, count - at);
            id = tok_find(t, text + at, bytes);
        }
        int known = id >= 0;
        if (known) s[n++].id = id;
        else if (!(t->head.flags & TOK_BYTES)) {
            known = 1;
            for (size_t i = 0; i < bytes; ++i) known = known && t->byte_token[(unsigned char)text[at + i]] >= 0;
            for (size_t i = 0; known && i < bytes; ++i) s[n++].id = t->byte_token[(unsigned char)text[at + i]];
            if (!known && !unknown && t->head.unknown != UINT32_MAX) s[n++].id = (int32_t)t->head.unknown;
        }
        unknown = !known;
        at += bytes;
    }
    tok_pair *heap = NULL;
    size_t pairs = 0, room = 0;
    for (int64_t i = 0; i < n; ++i) s[i].before = i - 1, s[i].after = i + 1 < n ? i + 1 : -1;
    for (int64_t i = 0; i < n; ++i) tok_offer(t, s, i, &heap, &pairs, &room);
    while (pairs) {
        const tok_pair top = tok_take(heap, &pairs);
        tok_symbol *const left = s + top.at;
        if (left->id < 0 || left->after < 0) continue;
        const int64_t m = tok_merge(t, left->id, s[left->after].id);
        if (m < 0 || t->merge_id[m] != top.id) continue; /* one of the two was merged with another */
        tok_symbol *const right = s + left->after;
        left->id = (int32_t)top.id, left->after = right->after, right->id = -1;
        if (left->after >= 0) s[left->after].before = top.at;
        tok_offer(t, s, left->before, &heap, &pairs, &room);
        tok_offer(t, s, top.at, &heap, &pairs, &room);
    }
    for (int64_t i = 0; i < n; ++i)
        if (s[i].id >= 0) tok_push(out, s[i].id);
    free(heap);
    free(s);
}

/* ---- patterns ---- */

typedef struct { uint32_t mask, at; } tok_char; /* its classes, and where it begins */

/* Where a match of a pattern that begins at `from` ends; -1: there is none. The first alternative counts, as much as it takes. */
static int64_t tok_match(const tokenizer *t, uint32_t pattern, const tok_char *c, int64_t from, int64_t end, tok_ids *stack)
{
    const uint32_t *const code = t->code + 2 * t->pattern_at[pattern];
    stack->count = 0;
    int64_t at = from;
    for (uint32_t pc = 0;;) {
        const uint32_t op = code[2 * pc], arg = code[2 * pc + 1];
        int goes = 1;
        if (op == TOK_MATCH) return at;
        if (op == TOK_CLASS) goes = at < end && (c[at].mask >> arg & 1), ++at, ++pc;
        else if (op == TOK_NOT) goes = !(at < end && (c[at].mask >> arg & 1)), ++pc;
        else if (op == TOK_JUMP) pc = arg;
        else {
            tok_push(stack, (int32_t)arg);
            tok_push(stack, (int32_t)(at - from));
            ++pc;
        }
        if (!goes) {
            if (!stack->count) return -1;
            at = from + stack->at[stack->count - 1], pc = (uint32_t)stack->at[stack->count - 2];
            stack->count -= 2;
        }
    }
}

/* Cuts characters by the patterns from `pattern` on: each match is a piece, and what lies between two. */
static void tok_cut(
    const tokenizer *t, const char *text, const tok_char *c, int64_t from, int64_t end, uint32_t pattern, tok_ids *stack, tok_ids *out)
{
    if (from >= end) return;
    if (pattern == t->head.patterns) {
        tok_bpe(t, text + c[from].at, c[end].at - c[from].at, out);
        return;
    }
    int64_t begin = from;
    for (int64_t at = from; at < end;) {
        const int64_t to = tok_match(t, pattern, c, at, end, stack);
        if (to <= at) {
            ++at;
            continue;
        }
        tok_cut(t, text, c, begin, at, pattern + 1, stack, out);
        tok_cut(t, text, c, at, to, pattern + 1, stack, out);
        begin = at = to;
    }
    tok_cut(t, text, c, begin, end, pattern + 1, stack, out);
}

/* ---- from text to ids ---- */

static void tok_plain(const tokenizer *t, const char *given, size_t count, tok_ids *out)
{
    if (!count) return;
    tok_text text = {0};
    const uint32_t *const r = t->replaced;
    tok_add(&text, t->pool + r[0], r[1] - r[0]);
    const size_t from = r[2] - r[1];
    for (size_t at = 0; at < count;) {
        const int found = from && at + from <= count && !memcmp(given + at, t->pool + r[1], from);
        tok_add(&text, found ? t->pool + r[2] : given + at, found ? r[3] - r[2] : 1);
        at += found ? from : 1;
    }
    if (t->head.flags & TOK_NFC) tok_nfc(t, &text);
    tok_char *c = (tok_char *)malloc((text.count + 1) * sizeof *c);
    if (!c) exit(1);
    int64_t n = 0;
    for (size_t at = 0; at < text.count; ++n) {
        const int bytes = utf8_bytes((unsigned char *)text.at + at, text.count - at);
        c[n].at = (uint32_t)at, c[n].mask = tok_classes(t, utf8_get((unsigned char *)text.at + at, bytes));
        at += (size_t)bytes;
    }
    c[n].at = (uint32_t)text.count;
    tok_ids stack = {0};
    tok_cut(t, text.at, c, 0, n, 0, &stack, out);
    free(stack.at);
    free(c);
    free(text.at);
}

/* The ids of a text. Bytes that make no character become U+FFFD. */
static void tok_encode(const tokenizer *t, const char *given, size_t count, tok_ids *out)
{
    tok_text text = {0};
    utf8_lossy(&text, given, count, 0);
    size_t begin = 0;
    for (size_t at = 0; at < text.count;) {
        int64_t best = -1;
        size_t longest = 0;
        for (uint32_t i = 0; i < t->head.added; ++i) {
            const size_t n = t->added_at[i + 1] - t->added_at[i];
            if (n > longest && at + n <= text.count && !memcmp(text.at + at, t->pool + t->added_at[i], n)) best = i, longest = n;
        }
        if (best < 0) {
            ++at;
            continue;
        }
        tok_plain(t, text.at + begin, at - begin, out);
        tok_push(out, (int32_t)t->added_id[best]);
        begin = at += longest;
    }
    tok_plain(t, text.at + begin, text.count - begin, out);
    free(text.at);
}

/* The bytes of an id; special tokens have none. */
static void tok_decode(const tokenizer *t, int32_t id, tok_text *out)
{
    if (id < 0 || (uint32_t)id >= t->head.tokens || t->kind[id] == TOK_SPECIAL) return;
    const char *const text = t->pool + t->token_at[id];
    const size_t count = t->token_at[id + 1] - t->token_at[id];
    if (t->kind[id] == TOK_BYTE) {
        char byte = 0;
        for (int i = 0; i < 256; ++i)
            if (t->byte_token[i] == id) byte = (char)i;
        tok_add(out, &byte, 1);
        return;
    }
    const uint32_t *const r = t->replaced;
    const size_t mark = r[3] - r[2];
    for (size_t at = 0; at < count;) {
        const int found = mark && at + mark <= count && !memcmp(text + at, t->pool + r[2], mark);
        tok_add(out, found ? t->pool + r[1] : text + at, found ? r[2] - r[1] : 1);
        at += found ? mark : 1;
    }
}

/* ---- the file ---- */

/* The tables of a file in memory, which begins with a multiple of 4 bytes and is used in place. NULL, or what is wrong. */
static const char *tok_take_file(tokenizer *t, const char *data, size_t count)
{
    memset(t, 0, sizeof *t);
    if (count < sizeof t->head || memcmp(data, "monoplantokens1\n", 16)) return "is no file of a tokenizer";
    memcpy(&t->head, data, sizeof t->head);
    const char *const body = data + sizeof t->head;
    const size_t bytes = count - sizeof t->head;
    const tok_head *const h = &t->head;
    const uint64_t words = 4ull * h->merges + 2ull * h->ranges + h->patterns + 1 + 2ull * h->code + 2ull * h->added + 1
        + 3ull * h->decomposed + 3ull * h->composed + 2ull * h->combining + 3ull * h->tokens + 1 + 256 + 4;
    if (count != h->bytes || bytes != 4 * words + h->pool) return "is cut, or was changed";
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes / 4; ++i) sum += (uint64_t)((const uint32_t *)(const void *)body)[i] * (2 * i + 1);
    if (sum != h->sum) return "is damaged";
    const uint32_t *at = (const uint32_t *)(const void *)body;
    t->token_at = at, at += h->tokens + 1;
    t->kind = at, at += h->tokens;
    t->order = at, at += h->tokens;
    t->merge_left = at, at += h->merges;
    t->merge_right = at, at += h->merges;
    t->merge_rank = at, at += h->merges;
    t->merge_id = at, at += h->merges;
    t->range = at, at += h->ranges;
    t->range_mask = at, at += h->ranges;
    t->pattern_at = at, at += h->patterns + 1;
    t->code = at, at += 2 * h->code;
    t->added_at = at, at += h->added + 1;
    t->added_id = at, at += h->added;
    t->apart = at, at += 3 * h->decomposed;
    t->joined = at, at += 3 * h->composed;
    t->combining = at, at += 2 * h->combining;
    t->byte_token = (const int32_t *)(const void *)at, at += 256;
    t->replaced = at, at += 4;
    t->pool = (const char *)at;
    return NULL;
}

static MAYBE_UNUSED const char *tok_open(tokenizer *t, const char *path, char **memory)
{
    FILE *file = fopen(path, "rb");
    if (!file) return "can't be opened";
    tok_text text = {0};
    char piece[65536];
    for (size_t n; (n = fread(piece, 1, sizeof piece, file)) > 0;) tok_add(&text, piece, n);
    fclose(file);
    *memory = text.at;
    return tok_take_file(t, text.at ? text.at : "", text.count);
}
#endif
