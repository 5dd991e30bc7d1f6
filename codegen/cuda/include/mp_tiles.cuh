/* Weights as tensor cores take them: tiles of 16 rows x 256 columns, [strip of 16 rows][tile along k], of any format.
 *
 * A tile is the left operand of 16 steps of 16 columns each. Lane 4 g + t holds columns 4 t to 4 t + 3 of a step, in rows g
 * and g + 8: that is what mma takes, of bytes two steps at a time, of bf16 one, if x lies so that the right operand agrees.
 * Four steps are a chunk; codes lie in pieces of 16 bytes for each lane. Behind the codes of a tile come its scales, in the
 * order in which lanes need them.
 *
 * A format is mp_weight_tile<Codes, Scales, ZERO>. Codes of whole numbers have bytes(), which gives a chunk as bytes: four
 * columns of row g, and of row g + 8, for each step. Codes of bf16 have words(): (g; 4 t, 4 t + 1), (g + 8; the same),
 * (g; 4 t + 2, 4 t + 3), (g + 8; the same), for each step. Scales::get gives a lane the scale (and what is added) of its own
 * group of columns: group t of four, in rows g and g + 8. A value is scale (number - ZERO) + low. */

typedef uint32_t mp_bytes[4][2];
typedef uint32_t mp_words[4][4];

/* Whole numbers of LOW + HIGH bits: LOW is 4 or 2, HIGH are one or two bits above them, in pieces of their own. */
template <int LOW, int HIGH> struct mp_codes {
    enum { PIECES = LOW + HIGH, INTEGERS = 1, SIGNED = 0, EXCEPTIONS = 0, HALVES = 0 };
    static MP_FN uint32_t shifted(const uint32_t v, const int right) { return right >= 0 ? v >> right : v << -right; }
    static MP_FN void bytes(mp_bytes &b, const unsigned char *tile, const int chunk, const int lane)
    {
        const int two = chunk / 2 * 512 + lane * 16 + chunk % 2 * 8; /* where two words of a chunk are */
        const unsigned char *const high = tile + LOW * 512;
        uint32_t lows[4] = {0, 0, 0, 0}, above[2] = {0, 0};
        if (LOW == 4) {
            const uint4 v = *(const uint4 *)(tile + chunk * 512 + lane * 16);
            lows[0] = v.x, lows[1] = v.y, lows[2] = v.z, lows[3] = v.w;
        } else {
            const uint2 v = *(const uint2 *)(tile + two);
            lows[0] = v.x, lows[1] = v.y;
        }
        if (HIGH == 1) above[0] = *(const uint32_t *)(high + lane * 16 + chunk * 4);
        if (HIGH == 2) {
            const uint2 v = *(const uint2 *)(high + two);
            above[0] = v.x, above[1] = v.y;
        }
        MP_UNROLL
        for (int k = 0; k < 8; ++k) { /* steps, and rows of a step */
            const uint32_t from = LOW == 4 ? lows[k / 2] >> k % 2 * 4 : lows[k / 4] >> k % 4 * 2;
            uint32_t w = from & (LOW == 4 ? 0x0f0f0f0fu : 0x03030303u);
            if (HIGH == 1) w = mp_and_or(shifted(above[0], k - LOW), 0x01010101u << LOW, w);
            if (HIGH == 2) w = mp_and_or(shifted(above[k / 4], k % 4 * 2 - LOW), 0x03030303u << LOW, w);
            b[k / 2][k % 2] = w;
        }
    }
};

struct mp_codes_bytes {
    enum { PIECES = 8, INTEGERS = 1, SIGNED = 1, EXCEPTIONS = 0, HALVES = 0 };
    static MP_FN void bytes(mp_bytes &b, const unsigned char *tile, const int chunk, const int lane)
    {
        MP_UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint4 v = *(const uint4 *)(tile + (2 * chunk + half) * 512 + lane * 16);
            b[2 * half][0] = v.x, b[2 * half][1] = v.y, b[2 * half + 1][0] = v.z, b[2 * half + 1][1] = v.w;
        }
    }
};

/* Floats of 8 bits, e4m3. Of bf16 that has their bits the exponent is too small: 2^120 makes up for it. */
struct mp_codes_float8 {
    enum { PIECES = 8, INTEGERS = 0, SIGNED = 0, EXCEPTIONS = 0, HALVES = MP_FLOAT8 };
#if MP_FLOAT8
    /* The same as f16: an instruction for two of them. */
    static MP_FN void halves(mp_words &a, const unsigned char *tile, const int chunk, const int lane)
    {
        mp_bytes b;
        mp_codes_bytes::bytes(b, tile, chunk, lane);
        MP_UNROLL
        for (int i = 0; i < 8; ++i) {
            a[i / 2][i % 2] = mp_float8_to_halves((unsigned short)b[i / 2][i % 2]);
            a[i / 2][2 + i % 2] = mp_float8_to_halves((unsigned short)(b[i / 2][i % 2] >> 16));
        }
    }
#endif
    static MP_FN uint32_t two(const uint32_t bytes, const uint32_t which)
    {
        const uint32_t v = mp_permute(bytes, 0, which), power = 0x7b807b80u;
        return mp_fma_brains(mp_and_or(v, 0x80008000u, v >> 4 & 0x07f007f0u), power, 0x80008000u); /* -0 keeps signs */
    }
    static MP_FN void words(mp_words &a, const unsigned char *tile, const int chunk, const int lane)
    {
        mp_bytes b;
        mp_codes_bytes::bytes(b, tile, chunk, lane);
        MP_UNROLL
        for (int i = 0; i < 8; ++i)
            a[i / 2][i % 2] = two(b[i / 2][i % 2], 0x1404), a[i / 2][2 + i % 2] = two(b[i / 2][i % 2], 0x3424);
    }
};

/* Four bits are the number of a signed byte in a table of 16. */
template <uint32_t A, uint32_t B, uint32_t C, uint32_t D> struct mp_codes_table {
    enum { PIECES = 4, INTEGERS = 1, SIGNED = 1, EXCEPTIONS = 0, HALVES = 0 };
    static MP_FN uint32_t look_up(const uint32_t codes)
    {
        const uint32_t low = mp_permute(A, B, codes & 0x7777u), high = mp_permute(C, D, codes & 0x7777u);
        const uint32_t upper = mp_permute(0x0000ff00u, 0, codes >> 3 & 0x1111u); /* bytes whose code is 8 or more */
        return (high & upper) | (low & ~upper);
    }
    static MP_FN void bytes(mp_bytes &b, const unsigned char *tile, const int chunk, const int lane)
    {
        const uint4 v = *(const uint4 *)(tile + chunk * 512 + lane * 16);
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
        MP_UNROLL
        for (int step = 0; step < 4; ++step) b[step][0] = look_up(codes[step]), b[step][1] = look_up(codes[step] >> 16);
    }
};

/* Eight numbers, of which `most` is the largest without its sign or larger, as whole numbers of 16 bits: their upper and
 * lower bytes, both signed. Gives their sum. What is not finite makes the scale NaN. */
MP_FN int mp_two_bytes(uint32_t (&upper)[2], uint32_t (&lower)[2], const float (&f)[8], const float most)
{
    const float times = most > 1e-30f ? 32512.0f / most : 0.0f;
    int sum = 0;
    upper[0] = upper[1] = lower[0] = lower[1] = 0;
    MP_UNROLL
    for (int i = 0; i < 8; ++i) {
        const int n = __float2int_rn(f[i] * times), high = (n + 128) >> 8;
        upper[i / 4] |= (uint32_t)(high & 255) << i % 4 * 8;
        lower[i / 4] |= (uint32_t)((n - high * 256) & 255) << i % 4 * 8;
        sum += n;
    }
    return sum;
}
MP_FN float mp_two_bytes_scale(const float most) { return most > 1e-30f ? most * (1.0f / 32512.0f) : most * 0.0f; }

/* bf16 of a small whole number, twice. */
MP_FN constexpr uint32_t mp_two_brains(const int value)
{
    uint32_t magnitude = (uint32_t)(value < 0 ? -value : value), exponent = 127 + 7;
    if (!magnitude) return 0;
    while (magnitude < 128) magnitude *= 2, --exponent;
    return ((value < 0 ? 0x8000u : 0u) | exponent << 7 | (magnitude & 127)) * 0x10001u;
}

/* Bytes 0 and 2 of a word, signed, as bf16: the lower seven bits, and a sign's 128, are both exact above 128. */
MP_FN uint32_t mp_signed_brains(const uint32_t bytes)
{
    const uint32_t magic = 0x43004300u; /* 128 */
    return mp_fma_brains(mp_and_or(bytes, 0x00800080u, magic), 0xbf80bf80u, mp_and_or(bytes, 0x007f007fu, magic));
}

/* Bytes less ZERO as two words of bf16. */
template <bool SIGNED, int ZERO> MP_FN void mp_bytes_to_brains(uint32_t &first, uint32_t &second, const uint32_t bytes)
{
    const uint32_t low = mp_permute(bytes, 0, 0x4140), high = mp_permute(bytes, 0, 0x4342);
    if (SIGNED) {
        first = mp_signed_brains(low), second = mp_signed_brains(high);
    } else {
        constexpr uint32_t less = mp_two_brains(-(128 + ZERO));
        first = mp_fma_brains(low | 0x43004300u, 0x3f803f80u, less);
        second = mp_fma_brains(high | 0x43004300u, 0x3f803f80u, less);
    }
}

/* bf16 in 12 bits, of which nothing is lost: the sign, three bits of the exponent, and the lower byte. The exponent's
 * other bits are those of 2^-15 to 2^1, and the tile has a power of two of its own. Eight words stand behind the codes:
 * that power's exponent field | exceptions << 8, which are up to seven numbers that do not fit; or MP_RAW, where more do
 * not. A word for each exception: bf16 << 16 | row << 8 | column; its code stands for 2^-15. A raw tile has bf16 words
 * behind all tiles of the weight, [tile][chunk][step][lane][4 words]; its second word says which one. */
enum { MP_RAW = 1 << 16 };
struct mp_codes_12 {
    enum { PIECES = 12, INTEGERS = 0, SIGNED = 0, EXCEPTIONS = 1, HALVES = 0 };
    static MP_FN void words(mp_words &a, const unsigned char *tile, const int chunk, const int lane)
    {
        const unsigned char *const from = tile + chunk * 3 * 512 + lane * 16;
        const uint4 codes = *(const uint4 *)from, first = *(const uint4 *)(from + 512), second = *(const uint4 *)(from + 1024);
        const uint32_t code[4] = {codes.x, codes.y, codes.z, codes.w};
        const uint32_t lower[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        MP_UNROLL
        for (int step = 0; step < 4; ++step) {
            const uint32_t u = mp_and_or(code[step], 0x87878787u, 0x38383838u);
            const uint32_t v = mp_and_or(mp_rotate(code[step], 4), 0x87878787u, 0x38383838u);
            a[step][0] = mp_permute(lower[2 * step], u, 0x5140), a[step][1] = mp_permute(lower[2 * step], u, 0x7362);
            a[step][2] = mp_permute(lower[2 * step + 1], v, 0x5140), a[step][3] = mp_permute(lower[2 * step + 1], v, 0x7362);
        }
    }
};

/* Scales of a tile. `get(scale, low, at, part, lane)`: those of group t of four in part `part` of the tile, rows g and g + 8.
 * GROUP is the number of columns that have one (of 128 columns both halves give theirs); 0: the whole tile has one. LOWS says
 * whether anything is added: 1 to values, 2 to codes, before they are scaled. */
MP_FN float mp_half_at(const unsigned char *at) { return mp_half_to_float(*(const unsigned short *)at); }

struct mp_scales_half { /* f16 */
    enum { GROUP = 32, BYTES = 256, LOWS = 0 };
    static MP_FN void get(float (&scale)[2], float (&)[2], const unsigned char *at, const int part, const int lane)
    {
        scale[0] = mp_half_at(at + lane * 8 + part * 4), scale[1] = mp_half_at(at + lane * 8 + part * 4 + 2);
    }
};
struct mp_scales_half_low { /* f16, and what is added */
    enum { GROUP = 32, BYTES = 512, LOWS = 1 };
    static MP_FN void get(float (&scale)[2], float (&low)[2], const unsigned char *at, const int part, const int lane)
    {
        const unsigned char *const own = at + lane * 16 + part * 8;
        scale[0] = mp_half_at(own), low[0] = mp_half_at(own + 2), scale[1] = mp_half_at(own + 4), low[1] = mp_half_at(own + 6);
    }
};
/* Two numbers of six bits, times f16 of the row: [g][row] of two f16, [lane] of 32 bits, [lane] of 16 bits. */
struct mp_scales_six {
    enum { GROUP = 32, BYTES = 256, LOWS = 1 };
    static MP_FN void get(float (&scale)[2], float (&low)[2], const unsigned char *at, const int part, const int lane)
    {
        const unsigned char *const rows = at + lane / 4 * 8;
        const uint32_t first = *(const uint32_t *)(at + 64 + lane * 4), last = *(const unsigned short *)(at + 192 + lane * 2);
        const uint32_t second = first >> 24 | last << 8;
        const uint32_t pair0 = first >> part * 12, pair1 = second >> part * 12;
        scale[0] = mp_half_at(rows) * (float)(pair0 & 63), low[0] = -mp_half_at(rows + 2) * (float)(pair0 >> 6 & 63);
        scale[1] = mp_half_at(rows + 4) * (float)(pair1 & 63), low[1] = -mp_half_at(rows + 6) * (float)(pair1 >> 6 & 63);
    }
};
/* A signed byte for each 16 or 32 columns, times f16 of the row: bytes [lane][part][row], f16 [g][row]. */
template <int COLUMNS> struct mp_scales_byte {
    enum { GROUP = COLUMNS, PARTS = 64 / COLUMNS, BYTES = PARTS * 64 + 32, LOWS = 0 };
    static MP_FN void get(float (&scale)[2], float (&)[2], const unsigned char *at, const int part, const int lane)
    {
        const signed char *const own = (const signed char *)at + (lane * PARTS + part) * 2;
        const unsigned char *const rows = at + PARTS * 64 + lane / 4 * 4;
        scale[0] = mp_half_at(rows) * (float)own[0], scale[1] = mp_half_at(rows + 2) * (float)own[1];
    }
};
/* Two numbers of four bits for each 16 columns, times f16 of the row. */
struct mp_scales_four {
    enum { GROUP = 16, BYTES = 320, LOWS = 1 };
    static MP_FN void get(float (&scale)[2], float (&low)[2], const unsigned char *at, const int part, const int lane)
    {
        const unsigned char *const own = at + lane * 8 + part * 2, *const rows = at + 256 + lane / 4 * 8;
        scale[0] = mp_half_at(rows) * (float)(own[0] & 15), low[0] = -mp_half_at(rows + 2) * (float)(own[0] >> 4);
        scale[1] = mp_half_at(rows + 4) * (float)(own[1] & 15), low[1] = -mp_half_at(rows + 6) * (float)(own[1] >> 4);
    }
};
struct mp_scales_power { /* half a power of two: its exponent is a byte */
    enum { GROUP = 32, BYTES = 128, LOWS = 0 };
    static MP_FN float power(const uint32_t e) { return mp_bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }
    static MP_FN void get(float (&scale)[2], float (&)[2], const unsigned char *at, const int part, const int lane)
    {
        scale[0] = power(at[lane * 4 + part * 2]), scale[1] = power(at[lane * 4 + part * 2 + 1]);
    }
};
/* One for each 32, 64 or 128 columns, in f16, bf16 or f32: [g][group][row], then zero points in bytes, if there are any. They
 * have signs where codes have them, and are small where not. */
template <typename T, int COLUMNS, int ZEROS> struct mp_scales_of {
    enum { GROUP = COLUMNS == 32 ? 32 : 64, GROUPS = 256 / COLUMNS, BYTES = GROUPS * 16 * (sizeof(T) + ZEROS), LOWS = ZEROS * 2 };
    static MP_FN void get(float (&scale)[2], float (&low)[2], const unsigned char *at, const int part, const int lane)
    {
        const int t = lane % 4, group = COLUMNS == 32 ? part * 4 + t : COLUMNS == 64 ? t : t / 2;
        const int first = (lane / 4 * GROUPS + group) * 2;
        const T *const own = (const T *)at + first;
        const signed char *const zeros = (const signed char *)at + GROUPS * 16 * sizeof(T) + first;
        MP_UNROLL
        for (int r = 0; r < 2; ++r) {
            scale[r] = mp_float(own[r]);
            if (ZEROS) low[r] = -(float)zeros[r];
        }
    }
};
struct mp_scales_tile { /* the power of two of a tile in 12 bits */
    enum { GROUP = 0, BYTES = 32, LOWS = 0 };
    static MP_FN void get(float (&scale)[2], float (&)[2], const unsigned char *at, const int, const int)
    {
        scale[0] = scale[1] = mp_bits_to_float((*(const uint32_t *)at & 255) << 23);
    }
};

template <typename Codes, typename Scales, int ZERO> struct mp_weight_tile {
    enum { CODES = Codes::PIECES * 512, BYTES = CODES + Scales::BYTES, GROUP = Scales::GROUP, LOWS = Scales::LOWS, ZEROS = LOWS == 2 };
    enum { PARTS = GROUP == 16 ? 4 : GROUP == 32 ? 2 : 1, CHUNKS = 4 / PARTS }; /* parts have four groups each */
    enum { EXCEPTIONS = Codes::EXCEPTIONS, INTEGERS = Codes::INTEGERS, SIGNED = Codes::SIGNED, SUBTRACTED = ZERO };
    enum { HALVES = Codes::HALVES }; /* one row of x: numbers become f16, not bf16 */
    /* Bytes that the columns of one row of x take; words of their sums and scales. */
    enum { X_BYTES = INTEGERS ? 512 : 1024, SUMS = INTEGERS ? PARTS * 4 + 8 : HALVES ? PARTS * 4 : 0 };
    static MP_FN void bytes(mp_bytes &b, const unsigned char *tile, const int chunk, const int lane)
    {
        Codes::bytes(b, tile, chunk, lane);
    }
    /* The same as bf16, exact. */
    static MP_FN void words(mp_words &a, const unsigned char *tile, const int chunk, const int lane)
    {
        if constexpr (INTEGERS) {
            mp_bytes b;
            Codes::bytes(b, tile, chunk, lane);
            MP_UNROLL
            for (int i = 0; i < 8; ++i)
                mp_bytes_to_brains<SIGNED, ZERO>(a[i / 2][i % 2], a[i / 2][2 + i % 2], b[i / 2][i % 2]);
        } else {
            Codes::words(a, tile, chunk, lane);
        }
    }
    static MP_FN void row_words(mp_words &a, const unsigned char *tile, const int chunk, const int lane)
    {
        if constexpr (HALVES) Codes::halves(a, tile, chunk, lane);
        else words(a, tile, chunk, lane);
    }
    static MP_FN void scales(float (&scale)[2], float (&low)[2], const unsigned char *tile, const int part, const int lane)
    {
        Scales::get(scale, low, tile + CODES, part, lane);
    }
    /* The eight words of a tile with exceptions. */
    static MP_FN const uint32_t *list(const unsigned char *tile) { return (const uint32_t *)(tile + CODES); }
    static MP_FN bool is_raw(const unsigned char *tile) { return EXCEPTIONS && (list(tile)[0] & MP_RAW) != 0; }
    static MP_FN int exceptions(const unsigned char *tile) { return EXCEPTIONS ? (int)(list(tile)[0] >> 8 & 15) : 0; }
    /* The words of a raw tile; `raw` is where those of the weight are. */
    static MP_FN void read_raw(mp_words &a, const unsigned char *tile, const unsigned char *raw, const int chunk, const int lane)
    {
        const unsigned char *const from = raw + list(tile)[1] * (int64_t)8192 + chunk * 2048 + lane * 16;
        MP_UNROLL
        for (int step = 0; step < 4; ++step) {
            const uint4 v = mp_read_const(from + step * 512);
            a[step][0] = v.x, a[step][1] = v.y, a[step][2] = v.z, a[step][3] = v.w;
        }
    }
};
/* An exception, and what its number is above that of its code. */
MP_FN int mp_exception_row(const uint32_t one) { return one >> 8 & 15; }
MP_FN int mp_exception_column(const uint32_t one) { return one & 255; }
MP_FN float mp_exception_value(const uint32_t one) { return mp_bits_to_float(one & 0xffff0000u); }
MP_FN float mp_exception_excess(const uint32_t one) { return mp_exception_value(one) - 0x1p-15f; }

/* Eight neighbours of a row of x for the right operand: for each 32 columns [lane t][step of 16][4 columns]. */
MP_FN void mp_put_eight(unsigned char *group, const int eighth, const uint32_t (&words)[4])
{
    unsigned char *const to = group + eighth % 2 * 32 + eighth / 2 * 8;
    *(uint2 *)to = make_uint2(words[0], words[1]);
    *(uint2 *)(to + 16) = make_uint2(words[2], words[3]);
}

/* Where a column of a tile is in 32 columns that mp_put_eight has put. */
MP_FN int mp_place_of(const int column) { return column % 16 / 4 * 16 + column % 32 / 16 * 8 + column % 4 * 2; }

/* All numbers of a tile in shared memory, by a warp: `put(row, column, value)`, row and column within the tile. */
template <typename F, typename Put> MP_FN void mp_tile_values(const unsigned char *tile, const unsigned char *raw, const Put &put)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int part = 0; part < F::PARTS; ++part) {
        float scale[2], low[2] = {0.0f, 0.0f};
        F::scales(scale, low, tile, part, lane);
        for (int m = 0; m < F::CHUNKS; ++m) {
            const int chunk = part * F::CHUNKS + m;
            mp_words a;
            if (F::is_raw(tile)) F::read_raw(a, tile, raw, chunk, lane);
            else F::words(a, tile, chunk, lane);
            MP_UNROLL
            for (int step = 0; step < 4; ++step) {
                const int group = F::GROUP == 16 ? step : F::GROUP == 32 ? m * 2 + step / 2 : F::GROUP == 64 ? m : t, owner = g * 4 + group;
                MP_UNROLL
                for (int r = 0; r < 2; ++r) {
                    const float s = __shfl_sync(~0u, scale[r], owner), l = F::LOWS ? __shfl_sync(~0u, low[r], owner) : 0.0f;
                    MP_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const int row = g + 8 * r, column = chunk * 64 + step * 16 + 4 * t + i;
                        const uint32_t two = a[step][i / 2 * 2 + r];
                        float number = mp_bits_to_float(i % 2 ? two & 0xffff0000u : two << 16);
                        for (int e = 1; e <= F::exceptions(tile); ++e)
                            if ((F::list(tile)[e] & 0xfff) == (uint32_t)(row << 8 | column))
                                number = mp_exception_value(F::list(tile)[e]);
                        put(row, column, F::ZEROS ? s * (number + l) : F::LOWS ? fmaf(s, number, l) : s * number);
                    }
                }
            }
        }
    }
}

/* A tile into shared memory, by a warp. */
template <typename F> MP_FN void mp_tile_fetch(unsigned char *to, const unsigned char *tile)
{
    const int lane = threadIdx.x % 32;
    for (int i = lane * 16; i < F::BYTES; i += 512) *(uint4 *)(to + i) = mp_read_const(tile + i);
    __syncwarp();
}
