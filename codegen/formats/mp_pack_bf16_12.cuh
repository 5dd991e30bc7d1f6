/* Packs rows of bf16 into the tiles of 12 bits that mp_tiles.cuh describes, a warp for each tile. Tiles that are kept raw
 * are marked so; the host numbers them and puts their words behind the others. codegen/formats/bf16_12.py does the same. */

#include "mp_tiles.cuh"

enum { MP_PACK_WARPS = 4, MP_PACK_BYTES = mp_weight_tile<mp_codes_12, mp_scales_tile, 0>::BYTES };

/* The exponent below which the 16 binades of a tile lie, so that they miss the fewest numbers; 0: all are 0. `counts` are
 * how many numbers have each exponent. */
MP_FN int mp_pack_top(const unsigned *counts)
{
    const int lane = threadIdx.x % 32;
    int most = 0;
    for (int e = lane; e < 255; e += 32)
        if (counts[e]) most = e;
    for (int d = 16; d; d >>= 1) {
        const int other = __shfl_xor_sync(~0u, most, d);
        most = other > most ? other : most;
    }
    const int least = most > 0 ? 1 : 0, lower = most - lane % 8, top = lower > least ? lower : least;
    int missed = 4096;
    for (int e = top > 16 ? top - 15 : 1; e <= top; ++e) missed -= (int)counts[e];
    int best = missed * 8 + lane % 8; /* the highest of several that miss as few */
    for (int d = 4; d; d >>= 1) {
        const int other = __shfl_xor_sync(~0u, best, d);
        best = other < best ? other : best;
    }
    return __shfl_sync(~0u, top, best % 8);
}

extern "C" __global__ void __launch_bounds__(128)
mp_pack_bf16_12(const unsigned short *w, unsigned char *tiles, const int64_t rows, const int64_t depth)
{
    __shared__ unsigned histograms[MP_PACK_WARPS][256];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t across = depth / 256, tile = (int64_t)blockIdx.x * MP_PACK_WARPS + threadIdx.x / 32;
    if (tile >= (rows + 15) / 16 * across) return;
    unsigned *const counts = histograms[threadIdx.x / 32];
    for (int i = lane; i < 256; i += 32) counts[i] = 0;
    __syncwarp();

    uint32_t words[4][4][4]; /* [chunk][step][word]: as mp_words, two numbers each */
    MP_UNROLL
    for (int i = 0; i < 32; ++i) {
        const int chunk = i / 8, step = i / 2 % 4, upper = i % 2;
        const int64_t row = tile / across * 16 + g + 8 * upper;
        const unsigned short *const from = w + row * depth + tile % across * 256 + chunk * 64 + step * 16 + t * 4;
        const uint2 four = row < rows ? *(const uint2 *)from : make_uint2(0, 0);
        words[chunk][step][upper] = four.x, words[chunk][step][2 + upper] = four.y;
        atomicAdd(&counts[four.x >> 7 & 255], 1u), atomicAdd(&counts[four.x >> 23 & 255], 1u);
        atomicAdd(&counts[four.y >> 7 & 255], 1u), atomicAdd(&counts[four.y >> 23 & 255], 1u);
    }
    __syncwarp();
    const int top = mp_pack_top(counts);

    unsigned char *const to = tiles + tile * MP_PACK_BYTES;
    uint32_t *const head = (uint32_t *)(to + 12 * 512);
    if (lane < 8) head[lane] = 0;
    __syncwarp();
    int found = 0, lost = 0; /* exceptions of the tile so far; whether one of them can't be written as such */
    MP_UNROLL
    for (int chunk = 0; chunk < 4; ++chunk) {
        uint32_t codes[4], lower[8];
        unsigned unknown = 0; /* a bit for each of the lane's 32 numbers that has no code */
        MP_UNROLL
        for (int step = 0; step < 4; ++step) {
            codes[step] = lower[2 * step] = lower[2 * step + 1] = 0;
            MP_UNROLL
            for (int i = 0; i < 8; ++i) {
                const uint32_t bits = words[chunk][step][i / 2] >> i % 2 * 16 & 0xffff;
                const int e = bits >> 7 & 255, place = e - top + 15;
                const bool known = e > 0 && e < 255 ? place >= 0 && place < 16 : e == 0 && top == 0;
                const uint32_t code = known ? place : 0;
                if (!known) unknown |= 1u << (step * 8 + i);
                codes[step] |= code >> 1 << (i < 4 ? 8 * i : 8 * i - 28) | bits >> 15 << (i < 4 ? 8 * i + 7 : (8 * i - 21) % 32);
                lower[2 * step + i / 4] |= ((code & 1) << 7 | (bits & 127)) << i % 4 * 8;
            }
        }
        *(uint4 *)(to + chunk * 1536 + lane * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        *(uint4 *)(to + chunk * 1536 + 512 + lane * 16) = make_uint4(lower[0], lower[1], lower[2], lower[3]);
        *(uint4 *)(to + chunk * 1536 + 1024 + lane * 16) = make_uint4(lower[4], lower[5], lower[6], lower[7]);
        const int own = __popc(unknown);
        int upto = own;
        for (int d = 1; d < 32; d *= 2) {
            const int left = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += left;
        }
        int rank = found + upto - own;
        MP_UNROLL
        for (int n = 0; n < 32; ++n) {
            if (!(unknown >> n & 1)) continue;
            const uint32_t bits = words[chunk][n / 8][n / 2 % 4] >> n % 2 * 16 & 0xffff;
            const int e = bits >> 7 & 255, moved = e - top + 127; /* the tile's power of two moves its exponent; 0 stays 0 */
            const bool zero = (bits & 0x7fff) == 0;
            if (!zero && (moved < 1 || moved > 254 || e == 0 || e == 255)) lost = 1;
            const uint32_t put = zero ? bits : (bits & 0x807f) | (uint32_t)moved << 7;
            const uint32_t row = g + n / 2 % 2 * 8, column = chunk * 64 + n / 8 * 16 + t * 4 + n / 4 % 2 * 2 + n % 2;
            if (++rank <= 7) head[rank] = put << 16 | row << 8 | column;
        }
        found += __shfl_sync(~0u, upto, 31);
    }
    const bool raw = __ballot_sync(~0u, lost) != 0 || found > 7;
    __syncwarp();
    if (lane < 8) head[lane] = lane ? (raw ? 0 : head[lane]) : raw ? 127 | MP_RAW : (uint32_t)(top | found << 8);
}
