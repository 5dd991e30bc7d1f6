/* An exported language model for a page: chat.c without its terminal. Built by build.sh into chat.wasm. */
#define main chat_main
#include "chat.c"
#undef main

#define EXPORT(name) __attribute__((export_name(#name)))

static tokenizer tok;
static model_state state;
static settings chosen = {1, 0, 1, 0, 0, 0};
static tok_text text;
static tok_ids prompt;
static uint64_t chosen_seed;
static char problem[512];

/* Memory for files and texts, which begins with a cache line. */
EXPORT(web_memory) void *web_memory(size_t bytes) { return aligned_alloc(64, (bytes + 64) / 64 * 64); }

/* NULL, or why the two files can't be used. They stay where they are. */
EXPORT(web_open) const char *web_open(const void *weights, size_t weight_bytes, const char *tokens, size_t token_bytes)
{
    const char *const why = tok_take_file(&tok, tokens, token_bytes);
    if (why) return why;
    model_plan *const plan = model_create_from_memory(weights, weight_bytes, 1, problem, sizeof problem);
    if (!plan) return problem;
    set_up(&state, plan, &chosen);
    return NULL;
}

/* Begins to continue a text, or to answer it as a message. */
EXPORT(web_begin) void web_begin(const char *given, size_t count, int is_message, int most, float temperature, unsigned seed)
{
    text.count = 0;
    if (is_message && CHAT_HAS_TEMPLATE) tok_add(&text, chat_without_system, sizeof chat_without_system - 1);
    tok_add(&text, given, count);
    if (is_message && CHAT_HAS_TEMPLATE) tok_add(&text, chat_answer, sizeof chat_answer - 1);
    chosen.temperature = temperature;
    chosen_seed = seed;
    encode(&tok, text.at, text.count, &prompt);
    begin_answer(&state, &prompt, most);
}

/* The next token, or -1 at the end; web_text() is then the text that it made certain. */
EXPORT(web_next) int web_next(void)
{
    text.count = 0;
    tok_add(&text, "", 0);
    return go_on(&state, &tok, chosen_seed, &chosen, &text);
}

EXPORT(web_text) const char *web_text(void) { return text.at; }
