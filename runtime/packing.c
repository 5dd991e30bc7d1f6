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

/* Panels of 32 columns and pairs of k, cut into tiles: out[p][k / 16][c / 16][k % 16][c % 16]. */
void mp_pack_tiles(const uint32_t *in, const uint32_t *none, uint32_t *out, const int64_t *rows, int64_t panels, int64_t depth)
{
    for (int64_t p = 0; p < panels; ++p, rows += 32, out += 32 * depth)
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
