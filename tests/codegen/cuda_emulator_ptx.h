// What mp_ptx.cuh has, as the emulator does it.
#pragma once
#include "cuda_emulator.h"

typedef uintptr_t mp_shared;
#define MP_DYNAMIC_SHARED(name) unsigned char *const name = emu::block->dynamic.data()
static inline float mp_half_to_float(unsigned short h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const float v = e == 0 ? ldexpf((float)m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexpf((float)(m + 1024), e - 25);
    return h & 0x8000 ? -v : v;
}
static inline unsigned short mp_float_to_half(float f)
{
    const unsigned sign = __float_as_uint(f) >> 16 & 0x8000;
    f = fabsf(f);
    if (f != f) return (unsigned short)(sign | 0x7fff);
    if (f >= 65520.0f) return (unsigned short)(sign | 0x7c00);
    if (f < 6.103515625e-05f) return (unsigned short)(sign | (unsigned)nearbyintf(ldexpf(f, 24)));
    int e;
    const float m = frexpf(f, &e);
    return (unsigned short)(sign | ((unsigned)(e + 13) << 10) + (unsigned)nearbyintf(ldexpf(m, 11)));
}
static inline unsigned short mp_float_to_brain(float f)
{
    const unsigned u = __float_as_uint(f);
    return (unsigned short)(f != f ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline unsigned mp_pack_brain(float low, float high) { return mp_float_to_brain(low) | (unsigned)mp_float_to_brain(high) << 16; }
static inline unsigned mp_pack_half(float low, float high) { return mp_float_to_half(low) | (unsigned)mp_float_to_half(high) << 16; }
static inline unsigned mp_permute(unsigned a, unsigned b, unsigned which)
{
    const uint64_t both = a | (uint64_t)b << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= (unsigned)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return found;
}
static inline unsigned mp_and_or(unsigned a, unsigned mask, unsigned more) { return (a & mask) | more; }
static inline unsigned mp_rotate(unsigned v, int right) { return v >> (right & 31) | (right & 31 ? v << (32 - (right & 31)) : 0); }
static inline int __float2int_rn(float f) { return f != f ? 0 : (int)nearbyintf(f); }
static inline float mp_max_nan(float a, float b) { return a != a || a > b ? a : b; }
static inline unsigned mp_fma_brains(unsigned a, unsigned b, unsigned c)
{
    auto one = [](unsigned v, int upper) { return __uint_as_float(upper ? v & 0xffff0000u : v << 16); };
    return mp_pack_brain(one(a, 0) * one(b, 0) + one(c, 0), one(a, 1) * one(b, 1) + one(c, 1));
}
#define MP_FLOAT8 1
static inline unsigned mp_float8_to_halves(unsigned short two)
{
    auto one = [](unsigned c) {
        const int e = c >> 3 & 15, m = c & 7;
        const float v = e == 15 && m == 7 ? NAN : e ? ldexpf((float)(m + 8), e - 10) : ldexpf((float)m, -9);
        return c & 0x80 ? -v : v;
    };
    return mp_pack_half(one(two & 255u), one(two >> 8 & 255u));
}
static inline float mp_exp2(float v) { return exp2f(v); }
static inline void mp_release() {}
static inline void mp_wait() {}
static inline uint4 mp_read_const(const void *p) { if ((uintptr_t)p % 16) abort(); return *(const uint4 *)p; }
static inline uint4 mp_read_fresh(const void *p) { return mp_read_const(p); }
static inline uint4 mp_read_cached(const void *p) { return mp_read_const(p); }
static inline mp_shared mp_shared_address(const void *p) { return (mp_shared)p; }
static inline uint4 mp_read_shared(mp_shared a) { return mp_read_const((const void *)a); }
static inline void mp_write_shared(mp_shared a, const float (&v)[4]) { if (a % 16) abort(); memcpy((void *)a, v, 16); }
static inline void mp_copy(mp_shared to, const void *from) { if (to % 16) abort(); *(uint4 *)to = mp_read_const(from); }
static inline void mp_copy_if(mp_shared to, const void *from, int live) { if (live) mp_copy(to, from); else *(uint4 *)to = make_uint4(0, 0, 0, 0); }
static inline void mp_copy_commit() {}
template <int N> static inline void mp_copy_wait() {}
// Barriers that count arrivals and bytes.
namespace emu {
struct Laps { int32_t bytes; int8_t missing, count; uint8_t lap, begun; };
template <typename Change> static inline void change(uintptr_t at, Change act)
{
    Laps &l = *(Laps *)at;
    if (at % 8 || l.begun != 77) abort();
    act(l);
    if (l.missing < 0) abort();
    if (l.missing == 0 && l.bytes == 0) l.missing = l.count, ++l.lap;
}
static inline uintptr_t inside(uintptr_t dynamic) { return (dynamic + 1023) / 1024 * 1024; } // where tiles begin
}  // namespace emu
static inline void mp_laps_begin(mp_shared laps, unsigned count = 1) { *(emu::Laps *)laps = {0, (int8_t)count, (int8_t)count, 0, 77}; }
static inline void mp_laps_begun() {}
static inline void mp_lap_expect(mp_shared laps, unsigned bytes)
{
    if (bytes % 16) abort();
    emu::change(laps, [&](emu::Laps &l) { l.bytes += (int)bytes, --l.missing; });
}
static inline void mp_lap_arrive(mp_shared laps) { emu::change(laps, [](emu::Laps &l) { --l.missing; }); }
static inline void mp_lap_wait(mp_shared laps, unsigned odd)
{
    for (bool done = false; !done;) {
        emu::change(laps, [&](emu::Laps &l) { done = (l.lap & 1) != (odd & 1); });
        if (!done) emu::yield();
    }
}
static inline void mp_copy_run(mp_shared to, const void *from, unsigned bytes, mp_shared laps)
{
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) abort();
    memcpy((void *)to, from, bytes);
    emu::change(laps, [&](emu::Laps &l) { l.bytes -= (int)bytes; });
}
struct mp_map { const unsigned short *first; int64_t rows, depth, box; };
#define MP_MAP const mp_map *const
static inline const mp_map *mp_map_of(const mp_map *map) { return map; }
static inline uint4 mp_read_remote(mp_shared a, int rank) // the same place of the dynamic memory of another block of the cluster
{
    return mp_read_shared(a - emu::inside((mp_shared)emu::block->dynamic.data()) + emu::inside((mp_shared)emu::block->cluster->dynamics[rank]));
}
static inline void mp_copy_box(mp_shared to, const mp_map *map, int column, int row, mp_shared laps)
{
    if (to % 1024) abort();
    for (int i = 0; i < map->box * 64; ++i) {
        const int64_t r = row + i / 64, k = column + i % 64;
        mp_shared at = to + i / 64 * 128 + i % 64 * 2;
        at ^= (at >> 7 & 7) << 4;
        *(unsigned short *)at = r < map->rows && k < map->depth ? map->first[r * map->depth + k] : 0;
    }
    emu::change(laps, [&](emu::Laps &l) { l.bytes -= (int)map->box * 128; });
}
namespace emu {
struct Fragments { unsigned a[4], b[2]; };
template <typename Widen> static inline void mma(float *c, int rows, const Fragments &mine, Widen widen)
{
    publish(mine);
    const int lane = block->current->lane, g = lane / 4, t = lane % 4;
    for (int i = 0; i < (rows == 16 ? 4 : 2); ++i) {
        const int row = g + i / 2 * 8, n = 2 * t + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const Fragments a = read<Fragments>(row % 8 * 4 + k % 8 / 2), b = read<Fragments>(n * 4 + k % 8 / 2);
            sum += widen(a.a[(row >= 8) + 2 * (k >= 8)], k % 2) * widen(b.b[k >= 8], k % 2);
        }
        c[i] = sum;
    }
    leave();
}
template <typename A> static inline void mma_bytes(int *c, const Fragments &mine)
{
    publish(mine);
    const int lane = block->current->lane, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, n = 2 * t + i % 2;
        for (int k = 0; k < 32; ++k) {
            const Fragments a = read<Fragments>(row % 8 * 4 + k % 16 / 4), b = read<Fragments>(n * 4 + k % 16 / 4);
            c[i] += (A)(a.a[(row >= 8) + 2 * (k >= 16)] >> k % 4 * 8) * (int8_t)(b.b[k >= 16] >> k % 4 * 8);
        }
    }
    leave();
}
static inline float half(unsigned w, int upper) { return mp_half_to_float((unsigned short)(upper ? w >> 16 : w)); }
static inline uint4 matrices(mp_shared address, bool transposed)
{
    if (address % 16) abort();
    publish(address);
    const int lane = block->current->lane, g = lane / 4, t = lane % 4;
    unsigned words[4];
    for (int i = 0; i < 4; ++i) {
        unsigned short e[2];
        for (int j = 0; j < 2; ++j) {
            const int row = transposed ? 2 * t + j : g, column = transposed ? g : 2 * t + j;
            e[j] = ((const unsigned short *)read<mp_shared>(i * 8 + row))[column];
        }
        words[i] = e[0] | (unsigned)e[1] << 16;
    }
    leave();
    return make_uint4(words[0], words[1], words[2], words[3]);
}
}  // namespace emu
static inline void mp_mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma(c, 16, {{a0, a1, a2, a3}, {b0, b1}}, emu::brain); }
static inline void mp_mma_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma(c, 16, {{a0, a1, a2, a3}, {b0, b1}}, emu::half); }
static inline void mp_mma_u8(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma_bytes<uint8_t>(c, {{a0, a1, a2, a3}, {b0, b1}}); }
static inline void mp_mma_s8(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { emu::mma_bytes<int8_t>(c, {{a0, a1, a2, a3}, {b0, b1}}); }
static inline void mp_mma_top(float (&c)[2], unsigned a0, unsigned a2, unsigned b0, unsigned b1) { emu::mma(c, 8, {{a0, 0, a2, 0}, {b0, b1}}, emu::brain); }
static inline unsigned mp_transpose(unsigned v)
{
    emu::publish(v);
    const int lane = emu::block->current->lane, g = lane / 4, t = lane % 4;
    unsigned short e[2];
    for (int j = 0; j < 2; ++j) { const unsigned w = emu::read<unsigned>((2 * t + j) * 4 + g / 2); e[j] = (unsigned short)(g % 2 ? w >> 16 : w); }
    emu::leave();
    return e[0] | (unsigned)e[1] << 16;
}
static inline uint4 mp_load_matrices(mp_shared a) { return emu::matrices(a, false); }
static inline uint4 mp_load_transposed(mp_shared a) { return emu::matrices(a, true); }

static inline mp_shared mp_remote(mp_shared a, int rank) { return a - (mp_shared)&emu::tls_mark + (mp_shared)emu::block->cluster->bases[rank]; }
static inline void mp_store_remote(mp_shared a, float v) { *(float *)a = v; }
static inline void mp_cluster_arrive()
{
    emu::Cluster &c = *emu::block->cluster;
    ++emu::block->current->arrivals;
    if (++c.arrived == c.expected) { c.arrived = 0; ++c.turn; }
}
static inline void mp_cluster_wait() { while (emu::block->cluster->turn < emu::block->current->arrivals) emu::yield(); }
