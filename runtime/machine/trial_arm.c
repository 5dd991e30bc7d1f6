/* Each instruction runs where the compiler's flags allow it; argc is 1, and unknown to the optimiser. */
#include <arm_neon.h>
int main(int argc, char **argv) {
    (void)argv;
    float32x4_t a = vdupq_n_f32((float)argc);
    if (vgetq_lane_f32(vfmaq_f32(a, a, a), 3) != 2.0f) return 3;
    int8x16_t b = vdupq_n_s8((signed char)argc);
    int32x4_t sums = vdupq_n_s32(0);
    (void)b, (void)sums;
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
    float16x8_t h = vdupq_n_f16((float16_t)argc);
    if (vgetq_lane_f16(vfmaq_f16(h, h, h), 7) != 2.0f) return 3;
#endif
#ifdef __ARM_FEATURE_FP16_FML
    if (vgetq_lane_f32(vfmlalq_low_f16(a, h, h), 3) != 2.0f) return 3;
#endif
#ifdef __ARM_FEATURE_DOTPROD
    if (vgetq_lane_s32(vdotq_s32(sums, b, b), 3) != 4) return 3;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    if (vgetq_lane_s32(vmmlaq_s32(sums, b, b), 3) != 8) return 3;
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    bfloat16x8_t f = vcombine_bf16(vcvt_bf16_f32(a), vcvt_bf16_f32(a));
    if (vgetq_lane_f32(vbfdotq_f32(a, f, f), 3) != 3.0f) return 3;
#endif
    static int counter;
    return __atomic_fetch_add(&counter, argc, __ATOMIC_SEQ_CST);
}
