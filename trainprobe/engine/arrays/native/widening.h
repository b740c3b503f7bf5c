/* Elements of each dtype as float32 or float64, or as words. For sweeps.h, which includes this file for each
   instruction set. */
#define WIDEN(NAME, FROM, TO, VALUE)                                     \
    static void F(NAME)(const void *data, TO *restrict out, int64_t n) { \
        const FROM *restrict x = data;                                   \
        for (int64_t i = 0; i < n; i++) out[i] = (TO)(VALUE);            \
    }
WIDEN(words_1, uint8_t, uint32_t, x[i])
WIDEN(words_2, uint16_t, uint32_t, x[i])
WIDEN(from_bool, uint8_t, float, x[i] != 0)
WIDEN(from_u8, uint8_t, float, x[i])
WIDEN(from_i8, int8_t, float, x[i])
WIDEN(from_u16, uint16_t, float, x[i])
WIDEN(from_i16, int16_t, float, x[i])
WIDEN(from_u32, uint32_t, double, x[i])
WIDEN(from_i32, int32_t, double, x[i])
WIDEN(from_u64, uint64_t, double, x[i])
WIDEN(from_i64, int64_t, double, x[i])
WIDEN(from_e4m3fn, uint8_t, float, float8_table[0][x[i]])
WIDEN(from_e5m2, uint8_t, float, float8_table[1][x[i]])
WIDEN(from_e4m3fnuz, uint8_t, float, float8_table[2][x[i]])
WIDEN(from_e5m2fnuz, uint8_t, float, float8_table[3][x[i]])
WIDEN(from_e8m0fnu, uint8_t, float, float8_table[4][x[i]])

static void F(from_bf16)(const void *data, float *restrict out, int64_t n) {
    const uint16_t *restrict x = data;
    uint32_t *restrict bits = (uint32_t *)(void *)out;
    for (int64_t i = 0; i < n; i++) bits[i] = (uint32_t)x[i] << 16;
}

/* Half to single: shift the fields into place, let one multiplication by 2^112 rebias the exponent and normalise. */
static inline __attribute__((always_inline)) float F(half)(uint16_t h) {
    union {
        uint32_t u;
        float f;
    } o = {.u = (uint32_t)(h & 0x7fff) << 13}, scale = {.u = 0x77800000};
    o.f *= scale.f;
    o.u |= o.f >= 65536.0f ? 0x7f800000u : 0u;
    o.u |= (uint32_t)(h & 0x8000) << 16;
    return o.f;
}
WIDEN(from_f16, uint16_t, float, F(half)(x[i]))

/* Magnitudes. An infinite part makes it infinite, whatever the other is (as C99 hypot). */
static inline __attribute__((always_inline)) double F(magnitude)(double re, double im) {
    double a = fabs(re), b = fabs(im), big = a > b ? a : b;
    double up = big > 0x1p480 ? 0x1p-600 : (big < 0x1p-480 ? 0x1p600 : 1.0);
    double down = big > 0x1p480 ? 0x1p600 : (big < 0x1p-480 ? 0x1p-600 : 1.0);
    double u = a * up, v = b * up, r = sqrt(u * u + v * v) * down;
    return ((a > DBL_MAX) | (b > DBL_MAX)) ? INFINITY : r;
}
WIDEN(from_c32, uint16_t, double, F(magnitude)(F(half)(x[2 * i]), F(half)(x[2 * i + 1])))
WIDEN(from_c64, float, double, F(magnitude)(x[2 * i], x[2 * i + 1]))
WIDEN(from_c128, double, double, F(magnitude)(x[2 * i], x[2 * i + 1]))
#undef WIDEN
