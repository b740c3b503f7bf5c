/* The sweeps over one chunk, written once and compiled for each instruction set (see kernels.c, which includes this
   file with SUFFIX, WIDTH and the vector minimum, maximum and widening defined). Sixteen lanes everywhere, so that each
   instruction set adds in the same order. The square of a float is exact in a double, so ADD_SQUARE rounds once whether
   its multiplication and addition are one instruction or two.

   Included without SUFFIX, by rows.c, it is how two parts of a tensor are merged: a new sum over values is written in
   this file and nowhere else in C. */
#ifdef SUFFIX

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define F(name) JOIN(name, SUFFIX)
#define L 16

static inline __attribute__((always_inline)) double F(fold)(const double *v) {
    double a[8];
    for (int l = 0; l < 8; l++) a[l] = v[l] + v[l + 8];
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* Vectors of this instruction set. WIDTH is their size in bytes; NF of them hold sixteen floats, ND sixteen doubles. */
#define NF (L * 4 / WIDTH)
#define ND (L * 8 / WIDTH)
typedef float F(vf) __attribute__((vector_size(WIDTH)));
typedef int32_t F(vi) __attribute__((vector_size(WIDTH)));
typedef double F(vd) __attribute__((vector_size(WIDTH)));
typedef int64_t F(vl) __attribute__((vector_size(WIDTH)));
typedef uint32_t F(vu) __attribute__((vector_size(WIDTH)));
typedef uint64_t F(vul) __attribute__((vector_size(WIDTH)));
typedef float F(half_vf) __attribute__((vector_size(WIDTH / 2)));

#define EACH(COUNT) _Pragma("GCC unroll 16") for (int l = 0; l < (COUNT); l++)

/* The smallest and the largest of the lanes; in halves, which the compiler makes a few instructions. */
static inline __attribute__((always_inline)) float F(lowest)(float *v) {
    for (int width = L / 2; width; width /= 2)
        for (int l = 0; l < width; l++) v[l] = v[l + width] < v[l] ? v[l + width] : v[l];
    return v[0];
}

static inline __attribute__((always_inline)) float F(highest)(float *v) {
    for (int width = L / 2; width; width /= 2)
        for (int l = 0; l < width; l++) v[l] = v[l + width] > v[l] ? v[l + width] : v[l];
    return v[0];
}

static void F(stats_f32)(const float *restrict x, int64_t n, int64_t left, Part *p) {
    AHEAD;
    F(vf) mn[NF], mx[NF];
    F(vd) s[ND], q[ND];
    EACH(NF) mn[l] = (F(vf)){0} + INFINITY, mx[l] = (F(vf)){0} - INFINITY;
    EACH(ND) s[l] = q[l] = (F(vd)){0};
    F(vi) z[NF];
    EACH(NF) z[l] = (F(vi)){0};
    int64_t whole = n / L * L, rest = n - whole;
    for (int64_t i = 0; i < whole; i += L) {
        ASK(x + i); /* L floats are a line of the cache */
        EACH(NF) {
            F(vf) v;
            memcpy(&v, x + i + l * (WIDTH / 4), WIDTH);
            mn[l] = MIN_F(v, mn[l]);
            mx[l] = MAX_F(v, mx[l]);
            z[l] -= (F(vi))(v == 0);
        }
        EACH(ND) {
            F(half_vf) v;
            memcpy(&v, x + i + l * (WIDTH / 8), WIDTH / 2);
            F(vd) d = WIDEN_F(v);
            s[l] += d;
            q[l] = ADD_SQUARE(q[l], d);
        }
    }
    float lows[L], highs[L];
    double sums[L], squares[L];
    memcpy(lows, mn, sizeof lows), memcpy(highs, mx, sizeof highs);
    memcpy(sums, s, sizeof sums), memcpy(squares, q, sizeof squares);
    int32_t zeros[L];
    int64_t found = 0;
    memcpy(zeros, z, sizeof zeros);
    for (int l = 0; l < L; l++) found += zeros[l];
    const float *tail = x + whole;
    for (int64_t l = 0; l < rest; l++) {
        double d = tail[l];
        lows[l] = tail[l] < lows[l] ? tail[l] : lows[l];
        highs[l] = tail[l] > highs[l] ? tail[l] : highs[l];
        found += tail[l] == 0;
        sums[l] += d;
        squares[l] += d * d;
    }
    p->min = F(lowest)(lows), p->max = F(highest)(highs), p->zero = (double)found;
    p->s = F(fold)(sums), p->q = F(fold)(squares);
}

/* Knuth's two-sum a lane: exact error terms, no branches. */
#define TWO_SUM_OF(TYPE, S, C, V)              \
    do {                                       \
        TYPE t_ = (S) + (V);                   \
        TYPE b_ = t_ - (S);                    \
        (C) += ((S) - (t_ - b_)) + ((V) - b_); \
        (S) = t_;                              \
    } while (0)
#define TWO_SUM(S, C, V) TWO_SUM_OF(double, S, C, V)
#define VECTOR_TWO_SUM(S, C, V) TWO_SUM_OF(F(vd), S, C, V)

static void F(stats_f64)(const double *restrict x, int64_t n, double scale, int64_t *bad, Part *p) {
    F(vd) mn[ND], mx[ND], s[ND], c[ND], q[ND], k[ND];
    F(vl) z[ND], b[ND];
    EACH(ND) mn[l] = (F(vd)){0} + INFINITY, mx[l] = (F(vd)){0} - INFINITY, z[l] = b[l] = (F(vl)){0};
    EACH(ND) s[l] = c[l] = q[l] = k[l] = (F(vd)){0};
    int64_t whole = n / L * L, rest = n - whole;
    for (int64_t i = 0; i < whole; i += L) EACH(ND) {
            F(vd) v;
            memcpy(&v, x + i + l * (WIDTH / 8), WIDTH);
            F(vd) w = v * scale, r = w * w, off = v - v;
            mn[l] = MIN_D(v, mn[l]);
            mx[l] = MAX_D(v, mx[l]);
            z[l] -= (F(vl))(v == 0);
            b[l] -= (F(vl))(off != off);
            VECTOR_TWO_SUM(s[l], c[l], v);
            VECTOR_TWO_SUM(q[l], k[l], r);
        }
    double lows[L], highs[L], sums[L], lost[L], squares[L], squares_lost[L];
    double low = INFINITY, high = -INFINITY, S = 0, C = 0, Q = 0, K = 0;
    int64_t zeros[L], wrongs[L], found = 0, wrong = 0;
    memcpy(lows, mn, sizeof lows), memcpy(highs, mx, sizeof highs), memcpy(zeros, z, sizeof zeros),
        memcpy(wrongs, b, sizeof wrongs);
    memcpy(sums, s, sizeof sums), memcpy(lost, c, sizeof lost);
    memcpy(squares, q, sizeof squares), memcpy(squares_lost, k, sizeof squares_lost);
    for (int64_t l = 0; l < rest; l++) {
        double v = x[whole + l], w = v * scale, r = w * w;
        low = v < low ? v : low;
        high = v > high ? v : high;
        found += v == 0;
        wrong += !(fabs(v) <= DBL_MAX);
        TWO_SUM(sums[l], lost[l], v);
        TWO_SUM(squares[l], squares_lost[l], r);
    }
    for (int l = 0; l < L; l++) {
        low = lows[l] < low ? lows[l] : low;
        high = highs[l] > high ? highs[l] : high;
        found += zeros[l], wrong += wrongs[l];
        TWO_SUM(S, C, sums[l]);
        TWO_SUM(Q, K, squares[l]);
        C += lost[l], K += squares_lost[l];
    }
    p->min = low, p->max = high, p->zero = (double)found;
    p->s = S, p->c = C, p->q = Q, p->qc = K;
    *bad = wrong;
}

static void F(clean_f32)(const float *restrict x, float *restrict out, int64_t n, Part *p) {
    int32_t nan = 0, pos = 0, neg = 0;
    for (int64_t i = 0; i < n; i++) {
        float v = x[i];
        nan += v != v;
        pos += v > FLT_MAX;
        neg += v < -FLT_MAX;
        out[i] = fabsf(v) <= FLT_MAX ? v : 0;
    }
    p->nan = nan, p->posinf = pos, p->neginf = neg;
}

static void F(clean_f64)(const double *restrict x, double *restrict out, int64_t n, Part *p) {
    int64_t nan = 0, pos = 0, neg = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = x[i];
        nan += v != v;
        pos += v > DBL_MAX;
        neg += v < -DBL_MAX;
        out[i] = fabs(v) <= DBL_MAX ? v : 0;
    }
    p->nan = (double)nan, p->posinf = (double)pos, p->neginf = (double)neg;
}

/* ---- the sums that only a flag asks for */

/* Squared deviations from the mean; the last term takes back what the rounding of the mean put in. */
#define M2(NAME, TYPE, VECTOR, WIDENED)                                     \
    static double F(NAME)(const TYPE *restrict x, int64_t n, double mean) { \
        F(vd) a[ND], b[ND];                                                 \
        double d1[L], d2[L];                                                \
        int64_t whole = n / L * L;                                          \
        EACH(ND) a[l] = b[l] = (F(vd)){0};                                  \
        for (int64_t i = 0; i < whole; i += L) EACH(ND) {                   \
                VECTOR v;                                                   \
                memcpy(&v, x + i + l * (WIDTH / 8), sizeof v);              \
                F(vd) d = WIDENED - mean;                                   \
                a[l] += d;                                                  \
                b[l] += d * d;                                              \
            }                                                               \
        memcpy(d1, a, sizeof d1), memcpy(d2, b, sizeof d2);                 \
        for (int64_t l = 0; l < n - whole; l++) {                           \
            double d = (double)x[whole + l] - mean;                         \
            d1[l] += d;                                                     \
            d2[l] += d * d;                                                 \
        }                                                                   \
        double sum = F(fold)(d1), m2 = F(fold)(d2) - sum * sum / (double)n; \
        return m2 > 0 || m2 != m2 ? m2 : 0;                                 \
    }
M2(m2_f32, float, F(half_vf), WIDEN_F(v))
M2(m2_f64, double, F(vd), v)
#undef M2

static double F(subnormal_f32)(const float *restrict x, int64_t n, float tiny) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; i++) found += (fabsf(x[i]) < tiny) & (x[i] != 0);
    return found;
}

static double F(subnormal_f64)(const double *restrict x, int64_t n, double tiny) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) found += (fabs(x[i]) < tiny) & (x[i] != 0);
    return (double)found;
}

#define ASKED(NAME, TYPE, M2, SUBNORMALS)                                                                            \
    static void F(NAME)(const TYPE *x, int64_t n, double mean, double tiny, int flags, Part *p) {                    \
        double good = finite_count(p);                                                                               \
        if (flags & SUBNORMAL) p->asked[AT_subnormal] = SUBNORMALS(x, n, (TYPE)tiny);                                \
        if (flags & STD && good > 0) {                                                                               \
            p->asked[AT_m2] = M2(x, n, mean);                                                                        \
            if (good < (double)n) p->asked[AT_m2] -= mean * mean * ((double)n - good); /* no std is defined there */ \
        }                                                                                                            \
    }
ASKED(asked_f32, float, F(m2_f32), F(subnormal_f32))
ASKED(asked_f64, double, F(m2_f64), F(subnormal_f64))
#undef ASKED

/* For fingerprint.c: the sums of the products of words with the halves of their keys, at low and high, each with those
 * of a key on top. */
static inline __attribute__((always_inline)) void F(multiply)(F(vul) * even, F(vul) * odd, const uint32_t *x,
                                                              const uint32_t *low, const uint32_t *high, F(vu) low_keys,
                                                              F(vu) high_keys) {
    F(vu) w, a, b;
    memcpy(&w, x, WIDTH), memcpy(&a, low, WIDTH), memcpy(&b, high, WIDTH);
    a ^= w ^ low_keys;
    b ^= SWAP_HALVES(w) ^ high_keys;
    *even += MULTIPLY(a, b);
    *odd += MULTIPLY(ODD(a), ODD(b));
}

static inline __attribute__((always_inline)) uint64_t F(total)(F(vul) even, F(vul) odd) {
    uint64_t total = 0, sums[WIDTH / 8];
    even += odd;
    memcpy(sums, &even, sizeof sums);
    for (int l = 0; l < WIDTH / 8; l++) total += sums[l];
    return total;
}

static uint64_t F(products)(const uint32_t *restrict x, int64_t n, const uint32_t *restrict low,
                            const uint32_t *restrict high, uint64_t key) {
    const uint32_t low_key = (uint32_t)key, high_key = (uint32_t)(key >> 32);
    F(vu) low_keys = (F(vu)){0} + low_key, high_keys = (F(vu)){0} + high_key;
    F(vul) even = {0}, odd = {0};
    uint64_t total = 0;
    int64_t i = 0;
    for (; i + WIDTH / 4 <= n; i += WIDTH / 4) F(multiply)(&even, &odd, x + i, low + i, high + i, low_keys, high_keys);
    for (; i < n; i++) total += (uint64_t)(x[i] ^ low[i] ^ low_key) * ((x[i] << 16 | x[i] >> 16) ^ high[i] ^ high_key);
    return total + F(total)(even, odd);
}

/* The same of whole rows, from number `row` on. */
static uint64_t F(row_products)(const uint32_t *restrict x, int64_t rows, int64_t left, uint64_t row) {
    AHEAD;
    F(vul) even = {0}, odd = {0};
    for (int64_t r = 0; r < rows; r++, x += ROW) {
        const uint64_t key = hashed(ROW + row + (uint64_t)r);
        F(vu) low_keys = (F(vu)){0} + (uint32_t)key, high_keys = (F(vu)){0} + (uint32_t)(key >> 32);
        for (int i = 0; i < ROW; i += L) {
            ASK(x + i);
            EACH(NF) {
                int at = i + l * (WIDTH / 4);
                F(multiply)(&even, &odd, x + at, key_low + at, key_high + at, low_keys, high_keys);
            }
        }
    }
    return F(total)(even, odd);
}

/* The keys of words whose places are `step` apart, as halves. */
static void F(keys)(uint64_t place, uint64_t step, int64_t n, uint32_t *restrict low, uint32_t *restrict high) {
    uint64_t row[ROW];
    for (uint64_t i = 0; i < (uint64_t)n; i++) row[i] = hashed(ROW + ((place + i * step) >> 8));
    for (int64_t i = 0; i < n; i++, place += step) {
        low[i] = key_low[place & 255] ^ (uint32_t)row[i];
        high[i] = key_high[place & 255] ^ (uint32_t)(row[i] >> 32);
    }
}

#include "widening.h"

/* Exact: the low and the high 32 bits are added apart, which cannot overflow within a chunk. */
#define EXACT_SUM(NAME, TYPE)                                    \
    static int128 F(NAME)(const TYPE *restrict x, int64_t n) {   \
        int64_t high = 0;                                        \
        uint64_t low = 0;                                        \
        for (int64_t i = 0; i < n; i++) {                        \
            high += (int64_t)(x[i] >> 32);                       \
            low += (uint64_t)x[i] & 0xffffffffu;                 \
        }                                                        \
        return ((int128)high) * ((int128)1 << 32) + (int128)low; \
    }
EXACT_SUM(sum_i64, int64_t)
EXACT_SUM(sum_u64, uint64_t)

static const Kernels F(table) = {
    .stats_f32 = F(stats_f32),
    .stats_f64 = F(stats_f64),
    .clean_f32 = F(clean_f32),
    .clean_f64 = F(clean_f64),
    .asked_f32 = F(asked_f32),
    .asked_f64 = F(asked_f64),
    .products = F(products),
    .row_products = F(row_products),
    .keys = F(keys),
    .to_words = {[1] = F(words_1), [2] = F(words_2)},
    .to_f32 =
        {
            [D_BOOL] = F(from_bool),
            [D_U8] = F(from_u8),
            [D_I8] = F(from_i8),
            [D_U16] = F(from_u16),
            [D_I16] = F(from_i16),
            [D_F16] = F(from_f16),
            [D_BF16] = F(from_bf16),
            [D_E4M3FN] = F(from_e4m3fn),
            [D_E5M2] = F(from_e5m2),
            [D_E4M3FNUZ] = F(from_e4m3fnuz),
            [D_E5M2FNUZ] = F(from_e5m2fnuz),
            [D_E8M0FNU] = F(from_e8m0fnu),
        },
    .to_f64 =
        {
            [D_U32] = F(from_u32),
            [D_I32] = F(from_i32),
            [D_U64] = F(from_u64),
            [D_I64] = F(from_i64),
            [D_C32] = F(from_c32),
            [D_C64] = F(from_c64),
            [D_C128] = F(from_c128),
        },
    .sum_i64 = F(sum_i64),
    .sum_u64 = F(sum_u64),
};

#undef JOIN2
#undef JOIN
#undef F
#undef L
#undef TWO_SUM_OF
#undef TWO_SUM
#undef VECTOR_TWO_SUM
#undef NF
#undef ND
#undef EACH
#undef EXACT_SUM

#else

static double mean_of(const Part *p) {
    double good = finite_count(p);
    return good > 0 ? (p->s + p->c) / good : 0;
}

/* The sums of b are added to those of a, before anything else of b is. Chan, Golub and LeVeque (1979) */
static void merge_asked(Part *a, const Part *b, int flags) {
    double na = finite_count(a), nb = finite_count(b);
    for (int i = 0; i < COLUMNS; i++) a->asked[i] += b->asked[i];
    if (flags & STD && na > 0 && nb > 0) {
        double delta = mean_of(b) - mean_of(a);
        a->asked[AT_m2] += delta * delta * (na * nb / (na + nb));
    }
}

#endif
