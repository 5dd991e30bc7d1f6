/* Loading weights at the speed of memory: panels transposed, floats rounded to bf16. */
#include <stdint.h>
#include <string.h>

/* out[p][k][c] = in[p][order[c]][k] for `panels` panels of `columns` rows of `depth` elements. */
#define TRANSPOSE(name, type) \
    void name(const type *in, type *out, const int32_t *order, int64_t panels, int64_t columns, int64_t depth) \
    { \
        for (int64_t p = 0; p < panels; ++p, in += columns * depth, out += columns * depth) \
            for (int64_t k0 = 0; k0 < depth; k0 += 32) { \
                const int64_t end = k0 + 32 < depth ? k0 + 32 : depth; \
                for (int64_t c = 0; c < columns; ++c) { \
                    const type *row = in + (int64_t)order[c] * depth; \
                    for (int64_t k = k0; k < end; ++k) out[k * columns + c] = row[k]; \
                } \
            } \
    }
TRANSPOSE(mp_transpose_16, uint16_t)
TRANSPOSE(mp_transpose_32, uint32_t)

/* out[p][k / 16][c / 16][k % 16][c % 16] = in[p][c][k] for panels of 32 columns of `depth` pairs. */
void mp_cut_tiles(const uint32_t *in, uint32_t *out, int64_t panels, int64_t depth)
{
    for (int64_t p = 0; p < panels; ++p, in += 32 * depth)
        for (int64_t k0 = 0; k0 < depth; k0 += 16)
            for (int half = 0; half < 32; half += 16, out += 256)
                for (int c = 0; c < 16; ++c)
                    for (int k = 0; k < 16; ++k) out[k * 16 + c] = in[(half + c) * depth + k0 + k];
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
