/* A conversation with the model in a terminal.
 *
 *     ./chat [options] weights.bin tokenizer.bin
 *
 * Each line that is typed is a message, and the answer is written as it is made; an empty line does nothing, the end of
 * the input ends the program. Texts around messages are those of the model's chat template (chat.h).
 *
 *     -t N  threads            -n N  tokens of an answer, at most (512; -1: as many as there is room for)
 *     -s N  seed (0)           -T X  temperature (0: always the best token)
 *     -k N  top k (0: all)     -p X  top p (1)     -m X  min p (0)     -r X  repetition penalty (1)
 *     -S TEXT  a system message
 *     -c TEXT  continue a text, and end; without the chat template
 *     -i    write token ids in place of text        -e    only encode the input, and write its ids
 */
#define _GNU_SOURCE
#include <errno.h>
#include <time.h>

#include "model.h"
#include "tokenizer.h"
#include "chat.h"

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s%s%s\n", what, *why ? ": " : "", why);
    exit(1);
}

/* ---- random numbers: Philox 4x64, ten rounds, as numpy's; those of a seed and a step are always the same ---- */

static float random_value(uint64_t seed, uint64_t step)
{
    uint64_t c[4] = {step + 1, 0, 0, 0}, k[2] = {seed, 0};
    for (int round = 0; round < 10; ++round) {
        const unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93u * c[0], b = (unsigned __int128)0xCA5A826395121157u * c[2];
        const uint64_t next[4] = {(uint64_t)(b >> 64) ^ c[1] ^ k[0], (uint64_t)b, (uint64_t)(a >> 64) ^ c[3] ^ k[1], (uint64_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B97F4A7C15u, k[1] += 0xBB67AE8584CAA73Bu;
    }
    return (float)(c[0] >> 40) * 0x1p-24f;
}

/* ---- the model and its cache ---- */

typedef struct {
    float penalty, random_val, top_p, temperature, min_p;
    int32_t top_k;
} settings;

typedef struct {
    model_plan *plan;
    model_array inputs[MODEL_INPUTS], outputs[MODEL_OUTPUTS];
    int64_t capacity;           /* tokens that the cache has room for */
    int32_t length, valid, seen; /* tokens in the cache, of this run, of the history */
    tok_ids fed;                /* what was fed, in order */
    uint64_t step;              /* of an answer: tokens so far, how many may follow, bytes of an unfinished character */
    int64_t left;
    tok_text bytes;
} model_state;

static model_array *input_of(model_state *s, const char *name)
{
    for (int i = 0; i < MODEL_INPUTS; ++i)
        if (!strcmp(s->inputs[i].name, name)) return &s->inputs[i];
    fail(name, "is no input of the plan");
    return NULL;
}

static int is_cache(const model_array *a) { return !strncmp(a->name, "past_key_values.", 16) && a->rank == 4; }

/* More room in the cache: it doubles, up to the context. */
static void reserve(model_state *s, int64_t tokens)
{
    if (tokens <= s->capacity) return;
    int64_t room = s->capacity ? s->capacity : tokens + 64;
    while (room < tokens) room *= 2;
    if (room > CHAT_CONTEXT) room = CHAT_CONTEXT;
    for (int i = 0; i < MODEL_INPUTS; ++i) {
        model_array *const a = &s->inputs[i];
        if (!is_cache(a)) continue;
        const size_t row = (size_t)a->shape[3] * model_item_bytes(a->dtype);
        char *const grown = (char *)calloc((size_t)(a->shape[1] * room) * row + 1, 1);
        if (!grown) fail("there is no memory", "for the cache");
        for (int64_t head = 0; a->data && head < a->shape[1]; ++head)
            memcpy(grown + (size_t)(head * room) * row, (char *)a->data + (size_t)(head * s->capacity) * row, (size_t)s->length * row);
        free(a->data);
        a->data = grown, a->shape[2] = room;
    }
    s->capacity = room;
}

static void set_up(model_state *s, model_plan *plan, settings *with)
{
    memset(s, 0, sizeof *s);
    s->plan = plan;
    for (int i = 0; i < MODEL_INPUTS; ++i) {
        s->inputs[i] = *model_input(i);
        for (int k = 0; k < s->inputs[i].rank; ++k)
            if (s->inputs[i].shape[k] < 0) s->inputs[i].shape[k] = 1;
    }
    input_of(s, "past_key_values.lengths")->data = &s->length;
    input_of(s, "num_valid")->data = &s->valid;
    input_of(s, "history_count")->data = &s->seen;
    input_of(s, "penalty")->data = &with->penalty;
    input_of(s, "random_val")->data = &with->random_val;
    input_of(s, "top_p")->data = &with->top_p;
    input_of(s, "top_k")->data = &with->top_k;
    input_of(s, "temperature")->data = &with->temperature;
    input_of(s, "min_p")->data = &with->min_p;
}

/* Feeds tokens, a long prompt in equal parts, and gives the one that follows. */
static int32_t next_token(model_state *s, const int32_t *tokens, int64_t count, const settings *with)
{
    const int64_t parts = (count + CHAT_CHUNK - 1) / CHAT_CHUNK, width = (count + parts - 1) / parts;
    model_array *const ids = input_of(s, "input_ids"), *const history = input_of(s, "history");
    const int64_t past = with->penalty == 1 ? 1 : (int64_t)s->fed.count;
    int64_t *const memory = (int64_t *)calloc((size_t)(width + past), sizeof *memory);
    if (!memory) fail("there is no memory", "for a prompt");
    for (int64_t i = 0; i < past && s->fed.count; ++i) memory[width + i] = s->fed.at[i];
    s->seen = with->penalty == 1 ? 0 : (int32_t)past;
    history->shape[1] = past, history->data = memory + width;
    reserve(s, s->length + count);
    for (int64_t at = 0; at < count; at += width) {
        const int64_t n = count - at < width ? count - at : width;
        for (int64_t i = 0; i < n; ++i) memory[i] = tokens[at + i];
        ids->shape[1] = n, ids->data = memory, s->valid = (int32_t)n;
        if (model_run(s->plan, s->inputs, MODEL_INPUTS, s->outputs)) fail(model_error(s->plan), "");
    }
    free(memory);
    for (int i = 0; i < MODEL_OUTPUTS; ++i)
        if (!strcmp(s->outputs[i].name, "token")) return (int32_t) * (int64_t *)s->outputs[i].data;
    fail("token", "is no output of the plan");
    return 0;
}

static int is_end(int32_t token)
{
    for (int i = 0; chat_ends[i] >= 0; ++i)
        if (chat_ends[i] == token) return 1;
    return 0;
}

/* Begins to answer a prompt: what it has in common with what was fed before is in the cache already. */
static void begin_answer(model_state *s, const tok_ids *prompt, int64_t most)
{
    if (!prompt->count) fail("the prompt is empty", "");
    if (prompt->count > CHAT_CONTEXT) fail("the prompt is longer than the context", "");
    size_t same = 0;
    while (same + 1 < prompt->count && same < (size_t)s->length && same < s->fed.count && s->fed.at[same] == prompt->at[same]) ++same;
    s->length = (int32_t)same, s->fed.count = 0;
    for (size_t i = 0; i < prompt->count; ++i) tok_push(&s->fed, prompt->at[i]);
    const int64_t room = CHAT_CONTEXT - (int64_t)prompt->count + 1;
    s->left = most < 0 || most > room ? room : most;
    s->step = 0;
    s->bytes.count = 0;
}

/* The next token of the answer, and the text that it makes certain; -1 at the end, with the rest of the text. */
static int32_t go_on(model_state *s, const tokenizer *t, uint64_t seed, settings *with, tok_text *text)
{
    int32_t token = -1;
    if (s->left > 0) {
        with->random_val = with->temperature > 0 ? random_value(seed, s->step) : 0;
        token = next_token(s, s->fed.at + s->length, (int64_t)s->fed.count - s->length, with);
        ++s->step, --s->left;
        if (is_end(token)) token = -1, s->left = 0;
        else {
            tok_push(&s->fed, token);
            tok_decode(t, token, &s->bytes);
        }
    }
    const size_t held = utf8_lossy(text, s->bytes.at, s->bytes.count, token >= 0);
    if (held) memmove(s->bytes.at, s->bytes.at + s->bytes.count - held, held);
    s->bytes.count = held;
    return token;
}

/* The whole answer, written as it is made; its text is added. */
static void answer(
    model_state *s, const tokenizer *t, const tok_ids *prompt, int64_t most, uint64_t seed, settings *with, int in_ids, tok_text *text)
{
    struct timespec begin, first, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    first = begin;
    begin_answer(s, prompt, most);
    for (int32_t token = 0; token >= 0;) {
        const size_t old = text->count;
        token = go_on(s, t, seed, with, text);
        if (s->step == 1) clock_gettime(CLOCK_MONOTONIC, &first);
        if (in_ids && token >= 0) printf("%d\n", (int)token);
        if (!in_ids && text->count > old) fwrite(text->at + old, 1, text->count - old, stdout);
        fflush(stdout);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (getenv("CHAT_TIMES")) {
        const double to_first = (double)(first.tv_sec - begin.tv_sec) + (double)(first.tv_nsec - begin.tv_nsec) * 1e-9;
        const double rest = (double)(end.tv_sec - first.tv_sec) + (double)(end.tv_nsec - first.tv_nsec) * 1e-9;
        const double more = s->step > 1 ? (double)(s->step - 1) : 0;
        fprintf(stderr, "first token after %.3f s, then %.1f tokens a second\n", to_first, rest > 0 ? more / rest : 0);
    }
}

/* Ids of a text, with the token in front that the model wants there. */
static void encode(const tokenizer *t, const char *text, size_t count, tok_ids *out)
{
    tok_ids found = {0};
    tok_encode(t, text, count, &found);
    out->count = 0;
    if (CHAT_BOS >= 0 && !(found.count && found.at[0] == CHAT_BOS)) tok_push(out, CHAT_BOS);
    for (size_t i = 0; i < found.count; ++i) tok_push(out, found.at[i]);
    free(found.at);
}

/* A line of the input without its end; 0 when there is none. */
static int read_line(tok_text *line, int whole)
{
    char piece[4096];
    line->count = 0;
    size_t n;
    int any = 0;
    if (whole) {
        while ((n = fread(piece, 1, sizeof piece, stdin)) > 0) tok_add(line, piece, n), any = 1;
        return any;
    }
    for (int c; (c = getchar()) != EOF;) {
        any = 1;
        if (c == '\n') break;
        piece[0] = (char)c;
        tok_add(line, piece, 1);
    }
    return any;
}

static double number(const char *option, const char *text, double least, double most)
{
    char *end;
    errno = 0;
    const double found = strtod(text, &end);
    if (*end || end == text || errno || !(found >= least && found <= most)) fail(option, "has no such value");
    return found;
}

static void talk(model_state *s, const tokenizer *t, const char *system, int64_t most, uint64_t seed, settings *with, int in_ids)
{
    tok_text line = {0}, conversation = {0}, prompt = {0};
    tok_ids ids = {0};
    if (system) {
        tok_add(&conversation, chat_with_system, sizeof chat_with_system - 1);
        tok_add(&conversation, system, strlen(system));
        tok_add(&conversation, chat_after_system, sizeof chat_after_system - 1);
    } else tok_add(&conversation, chat_without_system, sizeof chat_without_system - 1);
    for (;;) {
        if (!in_ids) fprintf(stderr, "> ");
        if (!read_line(&line, 0)) break;
        if (!line.count) continue;
        tok_add(&conversation, line.at, line.count);
        prompt.count = 0;
        tok_add(&prompt, conversation.at, conversation.count);
        tok_add(&prompt, chat_answer, sizeof chat_answer - 1);
        tok_add(&conversation, chat_answered, sizeof chat_answered - 1);
        encode(t, prompt.at, prompt.count, &ids);
        answer(s, t, &ids, most, seed, with, in_ids, &conversation);
        tok_add(&conversation, chat_next, sizeof chat_next - 1);
        printf("\n");
        fflush(stdout);
    }
    free(line.at), free(conversation.at), free(prompt.at), free(ids.at);
}

int main(int argc, char **argv)
{
    settings with = {1, 0, 1, 0, 0, 0};
    int threads = 0, in_ids = 0, only_encode = 0, at = 1;
    int64_t most = 512;
    uint64_t seed = 0;
    const char *system = NULL, *text = NULL;
    for (; at < argc && argv[at][0] == '-' && argv[at][1]; ++at) {
        const char option = argv[at][2] ? 0 : argv[at][1];
        if (option == 'i') in_ids = 1;
        else if (option == 'e') only_encode = 1;
        else if (at + 1 >= argc || !strchr("tnsTkpmrSc", option ? option : '?')) fail(argv[at], "is no option: see chat.c");
        else {
            const char *const name = argv[at], *const value = argv[++at];
            if (option == 't') threads = (int)number(name, value, 0, 4096);
            if (option == 'n') most = (int64_t)number(name, value, -1, 1e9);
            if (option == 's') seed = (uint64_t)number(name, value, 0, 9e15);
            if (option == 'T') with.temperature = (float)number(name, value, 0, 1e9);
            if (option == 'k') with.top_k = (int32_t)number(name, value, 0, 2e9);
            if (option == 'p') with.top_p = (float)number(name, value, 1e-9, 1);
            if (option == 'm') with.min_p = (float)number(name, value, 0, 1);
            if (option == 'r') with.penalty = (float)number(name, value, 1e-9, 1e9);
            if (option == 'S') system = value;
            if (option == 'c') text = value;
        }
    }
    if (argc - at != 2) fail("usage", "./chat [options] weights.bin tokenizer.bin (see chat.c)");
    tokenizer t;
    char *memory = NULL;
    const char *const problem = tok_open(&t, argv[at + 1], &memory);
    if (problem) fail(argv[at + 1], problem);
    tok_ids ids = {0};
    tok_text all = {0};
    if (only_encode) {
        read_line(&all, 1);
        tok_encode(&t, all.at ? all.at : "", all.count, &ids);
        for (size_t i = 0; i < ids.count; ++i) printf("%d\n", (int)ids.at[i]);
    } else {
        char error[512];
        model_state s;
        model_plan *const plan = model_create(argv[at], threads, error, sizeof error);
        if (!plan) fail(argv[at], error);
        set_up(&s, plan, &with);
        if (text) {
            encode(&t, text, strlen(text), &ids);
            answer(&s, &t, &ids, most, seed, &with, in_ids, &all);
            if (!in_ids) printf("\n");
        } else if (!CHAT_HAS_TEMPLATE) fail("the model has no chat template", "give it a text with -c");
        else talk(&s, &t, system, most, seed, &with, in_ids);
        for (int i = 0; i < MODEL_INPUTS; ++i)
            if (is_cache(&s.inputs[i])) free(s.inputs[i].data);
        free(s.fed.at), free(s.bytes.at);
        model_destroy(s.plan);
    }
    free(ids.at), free(all.at), free(memory);
    return 0;
}
