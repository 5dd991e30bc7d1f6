/* Each instruction runs where the compiler's flags allow it; argc is 1, and unknown to the optimiser. */
#include <immintrin.h>
#include <unistd.h>
int main(int argc, char **argv) {
    (void)argv;
#ifdef __AVX2__
    __m256 a = _mm256_set1_ps((float)argc);
    a = _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_fmadd_ps(a, a, a), 0));
    __m256i b = _mm256_add_epi32(_mm256_set1_epi32(argc), _mm256_cvtps_epi32(a));
    if (_mm256_extract_epi32(b, 7) != 3) return 3;
#endif
#ifdef __AVX512F__
    __m512i c = _mm512_add_epi16(_mm512_set1_epi16((short)argc), _mm512_set1_epi16(2));
    c = _mm512_mullo_epi64(c, _mm512_set1_epi64(argc));
    __m256i d = _mm256_maskz_rol_epi32(0xff, _mm512_castsi512_si256(c), 16);
    if (_mm256_extract_epi32(d, 0) != 0x30003) return 3;
#endif
#ifdef __AVX512VNNI__
    c = _mm512_dpbusd_epi32(c, c, c);
    if (_mm_extract_epi32(_mm512_castsi512_si128(c), 0) != 0x30003 + 18) return 3;
#endif
#ifdef __AVX512VBMI__
    __m512i f = _mm512_permutexvar_epi8(_mm512_set1_epi8((char)argc), _mm512_set1_epi16(0x201));
    if (_mm_extract_epi32(_mm512_castsi512_si128(f), 0) != 0x2020202) return 3;
#endif
#ifdef __AVX512BF16__
    __m512 e = _mm512_set1_ps((float)argc);
    __m512bh h = _mm512_cvtne2ps_pbh(e, e);
    if (_mm_cvtss_f32(_mm512_castps512_ps128(_mm512_dpbf16_ps(e, h, h))) != 3.0f) return 3;
#endif
#if defined(__AMX_BF16__) || defined(__AMXBF16__) /* the second: clang before 16 */
    if (syscall(158, 0x1023, 18) != 0) return 2; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) */
    struct { unsigned char head[16]; unsigned short bytes[16]; unsigned char rows[16]; } shape = {0};
    static unsigned short ones[16 * 32];
    static float sums[16 * 16];
    for (int i = 0; i < 16 * 32; i++) ones[i] = argc == 1 ? 0x3f80 : 0;
    shape.head[0] = 1; /* the palette */
    for (int i = 0; i < 3; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_loadd(1, ones, 64);
    _tile_loadd(2, ones, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
    if (sums[255] != 32.0f) return 3;
#endif
    return 0;
}
