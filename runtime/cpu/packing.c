/* Loading weights at the speed of memory: rows gathered into panels, floats rounded to bf16. */
#include <stdint.h>
#include <string.h>

typedef uint32_t four __attribute__((vector_size(16)));
typedef uint16_t eight __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Four numbers of each of four rows, stored as four lines that are `pitch` bytes apart. */
static inline void turn(const four r[4], void *out, int64_t pitch)
{
    const four a = PICK(four, r[0], r[1], 0, 4, 1, 5), b = PICK(four, r[0], r[1], 2, 6, 3, 7);
    const four c = PICK(four, r[2], r[3], 0, 4, 1, 5), d = PICK(four, r[2], r[3], 2, 6, 3, 7);
    const four lines[4] = {
        PICK(four, a, c, 0, 1, 4, 5), PICK(four, a, c, 2, 3, 6, 7), PICK(four, b, d, 0, 1, 4, 5), PICK(four, b, d, 2, 3, 6, 7),
    };
    for (int i = 0; i < 4; ++i) memcpy((char *)out + i * pitch, &lines[i], sizeof lines[i]);
}

enum { STEP = 64 }; /* numbers of a row that are read before the next row's turn */
#define ROW(c) (rows[c] < 0 ? none : in + rows[c] * depth)

/* out[p][k][c] = row rows[p][c] of `in` at k, for `panels` panels of `columns` columns, a multiple of 8; a negative row is
 * `none`. */
void mp_pack_32(const uint32_t *in, const uint32_t *none, uint32_t *out, const int64_t *rows,
                int64_t panels, int64_t columns, int64_t depth)
{
    for (int64_t p = 0; p < panels; ++p, rows += columns, out += columns * depth)
        for (int64_t k0 = 0; k0 < depth; k0 += STEP)
            for (int64_t c = 0; c < columns; c += 4) {
                const uint32_t *const row[4] = {ROW(c), ROW(c + 1), ROW(c + 2), ROW(c + 3)};
                const int64_t end = k0 + STEP < depth ? k0 + STEP : depth;
                int64_t k = k0;
                for (; k + 4 <= end; k += 4) {
                    four r[4];
                    for (int i = 0; i < 4; ++i) memcpy(&r[i], row[i] + k, sizeof r[i]);
                    turn(r, out + k * columns + c, columns * 4);
                }
                for (; k < end; ++k)
                    for (int i = 0; i < 4; ++i) out[k * columns + c + i] = row[i][k];
            }
}

/* The same for numbers of 16 bits: those of two columns are paired first. */
void mp_pack_16(const uint16_t *in, const uint16_t *none, uint16_t *out, const int64_t *rows,
                int64_t panels, int64_t columns, int64_t depth)
{
    for (int64_t p = 0; p < panels; ++p, rows += columns, out += columns * depth)
        for (int64_t k0 = 0; k0 < depth; k0 += STEP)
            for (int64_t c = 0; c < columns; c += 8) {
                const uint16_t *row[8];
                for (int i = 0; i < 8; ++i) row[i] = ROW(c + i);
                const int64_t end = k0 + STEP < depth ? k0 + STEP : depth;
                int64_t k = k0;
                for (; k + 8 <= end; k += 8) {
                    eight r[8];
                    four low[4], high[4];
                    for (int i = 0; i < 8; ++i) memcpy(&r[i], row[i] + k, sizeof r[i]);
                    for (int i = 0; i < 4; ++i) {
                        low[i] = (four)PICK(eight, r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
                        high[i] = (four)PICK(eight, r[2 * i], r[2 * i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
                    }
                    turn(low, out + k * columns + c, columns * 2);
                    turn(high, out + (k + 4) * columns + c, columns * 2);
                }
                for (; k < end; ++k)
                    for (int i = 0; i < 8; ++i) out[k * columns + c + i] = row[i][k];
            }
}

/* Low-bit blocks: out[p][unit][word][c] = the word at places[word] of that unit of row rows[p][c], for `words` words of 32
 * bits, then for `halves` numbers of 16 bits and `singles` bytes. A panel has 16 columns; a negative row is zeros. */
void mp_pack_blocks(const uint8_t *in, uint8_t *out, const int64_t *rows, int64_t panels, int64_t units, int64_t size,
                    const int64_t *places, int64_t words, int64_t halves, int64_t singles)
{
    enum { COLUMNS = 16 };
    for (int64_t p = 0; p < panels; ++p, rows += COLUMNS)
        for (int64_t u = 0; u < units; ++u, out += size * COLUMNS)
            for (int c = 0; c < COLUMNS; ++c) {
                if (rows[c] < 0) continue; /* the memory is zeros */
                const uint8_t *const from = in + (rows[c] * units + u) * size;
                for (int64_t i = 0; i < words; ++i) memcpy(out + (i * COLUMNS + c) * 4, from + places[i], 4);
                uint8_t *const narrow = out + words * COLUMNS * 4, *const last = narrow + halves * COLUMNS * 2;
                const int64_t *const after = places + words;
                for (int64_t i = 0; i < halves; ++i) memcpy(narrow + (i * COLUMNS + c) * 2, from + after[i], 2);
                for (int64_t i = 0; i < singles; ++i) last[i * COLUMNS + c] = from[after[halves + i]];
            }
}

/* Panels of 32 columns and pairs of k, cut into tiles: out[p][k / 16][c / 16][k % 16][c % 16]. */
static void pack_tiles(const uint32_t *in, const uint32_t *none, uint32_t *out, const int64_t *rows, int64_t depth)
{
    for (int64_t k0 = 0; k0 < depth; k0 += STEP)
        for (int c = 0; c < 32; c += 4) {
            const uint32_t *const row[4] = {ROW(c), ROW(c + 1), ROW(c + 2), ROW(c + 3)};
            for (int64_t k = k0; k < depth && k < k0 + STEP; k += 4) {
                four r[4];
                for (int i = 0; i < 4; ++i) memcpy(&r[i], row[i] + k, sizeof r[i]);
                turn(r, out + k / 16 * 512 + c / 16 * 256 + k % 16 * 16 + c % 16, 64);
            }
        }
}

enum { TILE = 512, CODED = 768, HALF = 8, SAMPLE = 4096 };

/* Upper bytes without sign that most of `count` numbers have, eight, the most frequent first (of several, the lowest), from rows
 * of the tiles that are evenly spread. Weights gather around 0: where few were seen or none, there are a quarter as many as in
 * the two binades above. */
static void usual_bytes(const uint16_t *w, int64_t count, uint8_t *upper)
{
    const int64_t apart = count / SAMPLE | 1; /* odd: rows of all columns */
    uint32_t seen[2][128] = {{0}}; /* two: equal neighbours do not wait for each other */
    double guess[128], above = 0.0;
    for (int64_t i = 0; i < count; i += apart * 32)
        for (int j = 0; j < 32; j += 2) ++seen[0][w[i + j] >> 8 & 127], ++seen[1][w[i + j + 1] >> 8 & 127];
    for (int b = 127; b >= 0; --b) {
        guess[b] = seen[0][b] + seen[1][b];
        if (guess[b] < above / 4) guess[b] = above / 4;
        above = guess[b];
    }
    for (int code = 0; code < HALF; ++code) {
        int most = 0;
        for (int b = 1; b < 128; ++b)
            if (guess[b] > guess[most]) most = b;
        upper[code] = (uint8_t)most, upper[HALF + code] = (uint8_t)(most | 0x80);
        guess[most] = -1.0;
    }
}

/* Puts the numbers of a tile into 12 bits each: mp_coded.h says how. Gives whether there are some that have no code. */
static int encode_tile(const uint16_t *tile, uint8_t *out, const uint8_t *upper)
{
    enum { NONE = 16 };
    uint8_t odd = 0;
    for (int two = 0; two < 8; ++two) { /* rows */
        uint8_t *const codes = out + two / 2 * 192, *const lower = codes + 64 + two % 2 * 64;
        uint16_t v[64];
        uint8_t high[64], code[64];
        for (int i = 0; i < 8; ++i) memcpy(v + i * 8, tile + two * 64 + i % 2 * 32 + i / 2 * 8, 16);
        for (int i = 0; i < 64; ++i) high[i] = (uint8_t)(v[i] >> 8), lower[i] = (uint8_t)v[i], code[i] = NONE;
        for (int c = 0; c < HALF; ++c)
            for (int i = 0; i < 64; ++i) code[i] = (high[i] & 127) == upper[c] ? (uint8_t)c : code[i];
        for (int i = 0; i < 64; ++i) {
            const uint8_t both = (uint8_t)((code[i] & 7) | high[i] >> 4 & 8); /* and the sign */
            odd |= code[i] & NONE;
            codes[i] = (uint8_t)(two % 2 ? codes[i] | both << 4 : both);
        }
    }
    return odd;
}

/* A list of numbers that have no code, in which there is room for some; `count` goes on beyond it. */
typedef struct {
    uint32_t *list;
    int64_t count, room;
} odd_numbers;

static void put(odd_numbers *odd, uint32_t at, uint32_t value)
{
    if (odd->count < odd->room) odd->list[2 * odd->count] = at, odd->list[2 * odd->count + 1] = value;
    ++odd->count;
}

/* Panels of 32 columns of bf16 in 12 bits, each a line and [depth / 32][2] tiles, then the lists of numbers that have no code, as
 * far as they fit into `room` entries; gives how many there are. `tiles` is room for a panel. */
int64_t mp_pack_coded(const uint32_t *in, const uint32_t *none, uint8_t *out, const int64_t *rows, int64_t panels, int64_t depth,
                      uint16_t *tiles, int64_t room)
{
    const int64_t each = depth * 48 + 64;
    odd_numbers odd = {(uint32_t *)(out + panels * each), 0, room};
    for (int64_t p = 0; p < panels; ++p, rows += 32, out += each) {
        pack_tiles(in, none, (uint32_t *)tiles, rows, depth / 2);
        uint8_t *const upper = out, *const codes = out + 64;
        const int64_t list = (uint8_t *)(odd.list + 2 * odd.count) - codes;
        memset(out, 0, 64);
        memcpy(out + 2 * HALF, &list, sizeof list);
        usual_bytes(tiles, depth * 32, upper);
        for (int64_t at = 0; at < depth * 32; at += TILE) {
            if (!encode_tile(tiles + at, codes + at / TILE * CODED, upper)) continue;
            for (int i = 0; i < TILE; ++i)
                if (!memchr(upper, tiles[at + i] >> 8 & 127, HALF)) put(&odd, (uint32_t)(at + i), tiles[at + i]);
        }
        put(&odd, UINT32_MAX, 0); /* the end of the list */
    }
    return odd.count;
}

/* Round to nearest, ties to even; NaN stays NaN. */
void mp_round_bf16(const float *in, uint16_t *out, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        uint32_t u;
        memcpy(&u, in + i, 4);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        out[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
    }
}
