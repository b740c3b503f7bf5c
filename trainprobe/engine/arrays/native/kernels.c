/* The sweeps for each instruction set this compiler can target, and the choice among them when the module is loaded. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "reduce.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define X86_TARGETS 1
#include <immintrin.h>
#endif

/* A NaN in the first operand gives the second: what `a < b ? a : b` says and the x86 instructions do. */
#define SELECT(TEST, INTEGERS, A, B) \
    ((__typeof__(A))(((INTEGERS)(TEST) & (INTEGERS)(A)) | (~(INTEGERS)(TEST) & (INTEGERS)(B))))

/* In a sweep that is told how many bytes are `left` behind its own: what is not there is not asked for. X stands at a
 * line of the cache. */
#define AHEAD const int64_t near = left < NEAR ? 0 : NEAR, far = left < FAR ? 0 : FAR
#define ASK(X) (__builtin_prefetch((const char *)(X) + near, 0, 3), __builtin_prefetch((const char *)(X) + far, 0, 2))

#define SUFFIX baseline
#define WIDTH 16
#ifdef X86_TARGETS
#define MIN_F(A, B) ((vf_baseline)_mm_min_ps((__m128)(A), (__m128)(B)))
#define MAX_F(A, B) ((vf_baseline)_mm_max_ps((__m128)(A), (__m128)(B)))
#define MIN_D(A, B) ((vd_baseline)_mm_min_pd((__m128d)(A), (__m128d)(B)))
#define MAX_D(A, B) ((vd_baseline)_mm_max_pd((__m128d)(A), (__m128d)(B)))
#else
#define MIN_F(A, B) SELECT((A) < (B), vi_baseline, A, B)
#define MAX_F(A, B) SELECT((A) > (B), vi_baseline, A, B)
#define MIN_D(A, B) SELECT((A) < (B), vl_baseline, A, B)
#define MAX_D(A, B) SELECT((A) > (B), vl_baseline, A, B)
#endif
#define WIDEN_F(V) __builtin_convertvector(V, vd_baseline)
#define ADD_SQUARE(S, D) ((S) + (D) * (D))
#define SWAP_HALVES(V) ((V) << 16 | (V) >> 16)
#define ODD(V) ((vu_baseline)((vul_baseline)(V) >> 32)) /* every second element, where MULTIPLY takes its own from */
#ifdef X86_TARGETS
#define MULTIPLY(A, B) ((vul_baseline)_mm_mul_epu32((__m128i)(A), (__m128i)(B)))
#else
#define MULTIPLY(A, B) (((vul_baseline)(A) & 0xffffffff) * ((vul_baseline)(B) & 0xffffffff))
#endif
#include "sweeps.h"
#undef SUFFIX
#undef WIDTH
#undef MIN_F
#undef MAX_F
#undef MIN_D
#undef MAX_D
#undef WIDEN_F
#undef ADD_SQUARE
#undef SWAP_HALVES
#undef ODD
#undef MULTIPLY

#ifdef X86_TARGETS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,prefer-vector-width=256")
#endif
#define SUFFIX avx2
#define WIDTH 32
#define MIN_F(A, B) ((vf_avx2)_mm256_min_ps((__m256)(A), (__m256)(B)))
#define MAX_F(A, B) ((vf_avx2)_mm256_max_ps((__m256)(A), (__m256)(B)))
#define MIN_D(A, B) ((vd_avx2)_mm256_min_pd((__m256d)(A), (__m256d)(B)))
#define MAX_D(A, B) ((vd_avx2)_mm256_max_pd((__m256d)(A), (__m256d)(B)))
#define WIDEN_F(V) ((vd_avx2)_mm256_cvtps_pd((__m128)(V)))
#define ADD_SQUARE(S, D) ((vd_avx2)_mm256_fmadd_pd((__m256d)(D), (__m256d)(D), (__m256d)(S)))
#define SWAP_HALVES(V) ((vu_avx2)_mm256_shufflehi_epi16(_mm256_shufflelo_epi16((__m256i)(V), 0xb1), 0xb1))
#define ODD(V) ((vu_avx2)_mm256_shuffle_epi32((__m256i)(V), 0xf5))
#define MULTIPLY(A, B) ((vul_avx2)_mm256_mul_epu32((__m256i)(A), (__m256i)(B)))
#include "sweeps.h"
#undef SUFFIX
#undef WIDTH
#undef MIN_F
#undef MAX_F
#undef MIN_D
#undef MAX_D
#undef WIDEN_F
#undef ADD_SQUARE
#undef SWAP_HALVES
#undef ODD
#undef MULTIPLY
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

Kernels kernels;
float float8_table[5][256];

const int item_size[DTYPES] = {
    [D_BOOL] = 1, [D_U8] = 1,    [D_I8] = 1,     [D_U16] = 2,  [D_I16] = 2,      [D_U32] = 4,      [D_I32] = 4,
    [D_U64] = 8,  [D_I64] = 8,   [D_F16] = 2,    [D_BF16] = 2, [D_F32] = 4,      [D_F64] = 8,      [D_C32] = 4,
    [D_C64] = 8,  [D_C128] = 16, [D_E4M3FN] = 1, [D_E5M2] = 1, [D_E4M3FNUZ] = 1, [D_E5M2FNUZ] = 1, [D_E8M0FNU] = 1,
};

const double smallest_normal[DTYPES] = {
    [D_F16] = 0x1p-14,  [D_BF16] = 0x1p-126,   [D_F32] = 0x1p-126,     [D_F64] = 0x1p-1022,
    [D_C32] = 0x1p-14,  [D_C64] = 0x1p-126,    [D_C128] = 0x1p-1022,   [D_E4M3FN] = 0x1p-6,
    [D_E5M2] = 0x1p-14, [D_E4M3FNUZ] = 0x1p-7, [D_E5M2FNUZ] = 0x1p-15,
};

/* Formats: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), the fnuz ones of Noune et al. (2022), and the
   scale format e8m0 of the OCP Microscaling specification. */
static float float8(int format, int bits) {
    static const int mantissa_bits[5] = {3, 2, 3, 2, 0}, bias[5] = {7, 15, 8, 16, 127};
    if (format == 4) return bits == 255 ? NAN : (float)ldexp(1.0, bits - bias[4]);
    int m = mantissa_bits[format], mantissa = bits & ((1 << m) - 1), exponent = (bits & 0x7f) >> m;
    int top = (1 << (7 - m)) - 1;
    double sign = bits & 0x80 ? -1.0 : 1.0;
    if (format >= 2 && bits == 0x80) return NAN;
    if (format == 0 && (bits & 0x7f) == 0x7f) return NAN;
    if (format == 1 && exponent == top) return mantissa ? NAN : (float)(sign * INFINITY);
    if (exponent == 0) return (float)(sign * ldexp(mantissa, 1 - bias[format] - m));
    return (float)(sign * ldexp((1 << m) + mantissa, exponent - bias[format] - m));
}

int kernels_select(const char *name) {
#ifdef X86_TARGETS
    __builtin_cpu_init();
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        kernels = table_avx2;
        kernels.name = "avx2";
        return 0;
    }
#endif
    if (!strcmp(name, "baseline")) {
        kernels = table_baseline;
        kernels.name = "baseline";
        return 0;
    }
    return -1;
}

void kernels_init(void) {
    for (int format = 0; format < 5; format++)
        for (int bits = 0; bits < 256; bits++) float8_table[format][bits] = float8(format, bits);
    if (kernels_select("avx2")) kernels_select("baseline");
}
