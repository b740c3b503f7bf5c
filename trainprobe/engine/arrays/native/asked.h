/* The sums that only a flag asks for: how a chunk is swept for them, which is compiled for each instruction set as the rest of sweeps.h is (F is
   defined then), and how the sums of two parts are merged. A new sum over values is written here and nowhere else in C. */
#ifdef F

/* Squared deviations from the mean; the last term takes back what the rounding of the mean put in. */
#define M2(NAME, TYPE, VECTOR, WIDENED)                                            \
    static double F(NAME)(const TYPE *restrict x, int64_t n, double mean) {        \
        F(vd) a[ND], b[ND];                                                        \
        double d1[L], d2[L];                                                       \
        int64_t whole = n / L * L;                                                 \
        EACH(ND) a[l] = b[l] = (F(vd)){0};                                         \
        for (int64_t i = 0; i < whole; i += L)                                     \
            EACH(ND) {                                                             \
                VECTOR v;                                                          \
                memcpy(&v, x + i + l * (WIDTH / 8), sizeof v);                     \
                F(vd) d = WIDENED - mean;                                          \
                a[l] += d;                                                         \
                b[l] += d * d;                                                     \
            }                                                                      \
        memcpy(d1, a, sizeof d1), memcpy(d2, b, sizeof d2);                        \
        for (int64_t l = 0; l < n - whole; l++) {                                  \
            double d = (double)x[whole + l] - mean;                                \
            d1[l] += d;                                                            \
            d2[l] += d * d;                                                        \
        }                                                                          \
        double sum = F(fold)(d1), m2 = F(fold)(d2) - sum * sum / (double)n;        \
        return m2 > 0 || m2 != m2 ? m2 : 0;                                         \
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

#define ASKED(NAME, TYPE, M2, SUBNORMALS)                                                                        \
    static void F(NAME)(const TYPE *x, int64_t n, double mean, double tiny, int flags, Part *p) {                \
        double good = finite_count(p);                                                                           \
        if (flags & SUBNORMAL) p->asked[AT_subnormal] = SUBNORMALS(x, n, (TYPE)tiny);                            \
        if (flags & STD && good > 0) {                                                                           \
            p->asked[AT_m2] = M2(x, n, mean);                                                                    \
            if (good < (double)n) p->asked[AT_m2] -= mean * mean * ((double)n - good); /* no std is defined there */ \
        }                                                                                                        \
    }
ASKED(asked_f32, float, F(m2_f32), F(subnormal_f32))
ASKED(asked_f64, double, F(m2_f64), F(subnormal_f64))
#undef ASKED

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
