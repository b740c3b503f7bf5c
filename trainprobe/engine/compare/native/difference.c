/* One pass over two float arrays for every number of engine/compare/difference.py. Limited API of Python 3.10.

   Sums are taken in float64 in LANES independent partial sums, so that the compiler can use vectors without being
   allowed to reorder; the result does not depend on the machine. Blocks whose bits agree only need their sum of
   squares. A block with a NaN or an infinity makes a sum that is not finite: the caller then measures it by its slower
   rules. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 8192 /* elements: both sides of a float32 block fit the first-level cache twice over */
#define EXPONENT 0x7FF0000000000000u
#define TWICE_BIAS 0x7FE0000000000000u /* minus the bits of 2^e: the bits of 2^-e */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef struct {
    int64_t changed, at;
    double square_d, square_a, square_b, dot, max_abs, max_ulp;
} Sums;

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, KINDS };
static const size_t item[KINDS] = {4, 8, 2, 2};

static inline double bits_to_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static inline uint64_t double_to_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline double from_float32(uint32_t bits) { return bits_to_float(bits); }
static inline double from_float64(uint64_t bits) { return bits_to_double(bits); }
static inline double from_bfloat16(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }

/* Half precision by moving the exponent: exact for normal and subnormal numbers; infinities and NaN become infinite
 * sums. */
static inline double from_float16(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7FFF) << 13;
    float value = bits_to_float(magnitude) * 0x1p112f;
    value = magnitude >= 0x0F800000u ? INFINITY : value;
    return bits & 0x8000 ? -(double)value : (double)value;
}

#define DEFINE_SQUARES(NAME, TYPE, FROM)                              \
    CLONES static double squares_##NAME(const void *pa, int64_t n) {  \
        const TYPE *a = pa;                                           \
        double sum[LANES] = {0};                                      \
        int64_t i = 0;                                                \
        for (; i + LANES <= n; i += LANES)                            \
            for (int l = 0; l < LANES; l++) {                         \
                double x = FROM(a[i + l]);                            \
                sum[l] += x * x;                                      \
            }                                                         \
        for (; i < n; i++) sum[i % LANES] += FROM(a[i]) * FROM(a[i]); \
        double total = 0;                                             \
        for (int l = 0; l < LANES; l++) total += sum[l];              \
        return total;                                                 \
    }

#define STEP(L, X, Y, DIFFERENT)                                                                    \
    {                                                                                               \
        double x = X, y = Y, d = x - y, distance = fabs(d), ax = fabs(x), ay = fabs(y);             \
        double larger = ax > ay ? ax : ay;                                                          \
        larger = larger > smallest ? larger : smallest;                                             \
        double units = distance * bits_to_double(TWICE_BIAS - (double_to_bits(larger) & EXPONENT)); \
        sd[L] += d * d, sa[L] += x * x, sb[L] += y * y, dot[L] += x * y;                            \
        changed[L] += DIFFERENT;                                                                    \
        most[L] = distance > most[L] ? distance : most[L];                                          \
        ulps[L] = units > ulps[L] ? units : ulps[L];                                                \
    }

#define DEFINE_PAIR(NAME, TYPE_A, FROM_A, TYPE_B, FROM_B, DIFFERENT)                                        \
    CLONES static void pair_##NAME(const void *pa, const void *pb, int64_t n, double smallest, Sums *out) { \
        const TYPE_A *a = pa;                                                                               \
        const TYPE_B *b = pb;                                                                               \
        double sd[LANES] = {0}, sa[LANES] = {0}, sb[LANES] = {0}, dot[LANES] = {0}, most[LANES] = {0},      \
               ulps[LANES] = {0};                                                                           \
        int64_t changed[LANES] = {0};                                                                       \
        int64_t i = 0;                                                                                      \
        for (; i + LANES <= n; i += LANES)                                                                  \
            for (int l = 0; l < LANES; l++)                                                                 \
                STEP(l, FROM_A(a[i + l]), FROM_B(b[i + l]), DIFFERENT(a[i + l], b[i + l], x, y))            \
        for (; i < n; i++) STEP(i % LANES, FROM_A(a[i]), FROM_B(b[i]), DIFFERENT(a[i], b[i], x, y))         \
        double largest = 0;                                                                                 \
        int64_t count = 0;                                                                                  \
        double sums[4] = {0};                                                                               \
        for (int l = 0; l < LANES; l++) {                                                                   \
            sums[0] += sd[l], sums[1] += sa[l], sums[2] += sb[l], sums[3] += dot[l];                        \
            count += changed[l];                                                                            \
            largest = most[l] > largest ? most[l] : largest;                                                \
            out->max_ulp = ulps[l] > out->max_ulp ? ulps[l] : out->max_ulp;                                 \
        }                                                                                                   \
        out->square_d += sums[0], out->square_a += sums[1], out->square_b += sums[2], out->dot += sums[3];  \
        out->changed += count;                                                                              \
        if (largest > out->max_abs || (count && out->at == -1)) {                                           \
            out->max_abs = largest;                                                                         \
            out->at = 0;                                                                                    \
            for (int64_t j = 0; j < n; j++)                                                                 \
                if (fabs(FROM_A(a[j]) - FROM_B(b[j])) == largest) {                                         \
                    out->at = j;                                                                            \
                    break;                                                                                  \
                }                                                                                           \
        }                                                                                                   \
    }

#define BITS(A, B, X, Y) ((A) != (B))
#define VALUES(A, B, X, Y) ((X) != (Y))

DEFINE_SQUARES(float32, uint32_t, from_float32)
DEFINE_SQUARES(float64, uint64_t, from_float64)
DEFINE_SQUARES(float16, uint16_t, from_float16)
DEFINE_SQUARES(bfloat16, uint16_t, from_bfloat16)
DEFINE_PAIR(f32_f32, uint32_t, from_float32, uint32_t, from_float32, BITS)
DEFINE_PAIR(f64_f64, uint64_t, from_float64, uint64_t, from_float64, BITS)
DEFINE_PAIR(f16_f16, uint16_t, from_float16, uint16_t, from_float16, BITS)
DEFINE_PAIR(b16_b16, uint16_t, from_bfloat16, uint16_t, from_bfloat16, BITS)
DEFINE_PAIR(f32_b16, uint32_t, from_float32, uint16_t, from_bfloat16, VALUES)
DEFINE_PAIR(b16_f32, uint16_t, from_bfloat16, uint32_t, from_float32, VALUES)
DEFINE_PAIR(f32_f16, uint32_t, from_float32, uint16_t, from_float16, VALUES)
DEFINE_PAIR(f16_f32, uint16_t, from_float16, uint32_t, from_float32, VALUES)

typedef double (*Squares)(const void *, int64_t);
typedef void (*Pair)(const void *, const void *, int64_t, double, Sums *);
static const Squares squares[KINDS] = {squares_float32, squares_float64, squares_float16, squares_bfloat16};
static const Pair pairs[KINDS][KINDS] = {
    [FLOAT32] = {[FLOAT32] = pair_f32_f32, [FLOAT16] = pair_f32_f16, [BFLOAT16] = pair_f32_b16},
    [FLOAT64] = {[FLOAT64] = pair_f64_f64},
    [FLOAT16] = {[FLOAT32] = pair_f16_f32, [FLOAT16] = pair_f16_f16},
    [BFLOAT16] = {[FLOAT32] = pair_b16_f32, [BFLOAT16] = pair_b16_b16},
};

static void measure(const char *a, const char *b, int64_t n, int kind_a, int kind_b, double smallest, Sums *out) {
    memset(out, 0, sizeof *out);
    out->at = -1;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t count = n - start < BLOCK ? n - start : BLOCK;
        const char *pa = a + start * item[kind_a], *pb = b + start * item[kind_b];
        if (kind_a == kind_b && memcmp(pa, pb, (size_t)count * item[kind_a]) == 0) {
            double sum = squares[kind_a](pa, count);
            out->square_a += sum, out->square_b += sum, out->dot += sum;
            continue;
        }
        Sums part = *out;
        part.at = out->at < 0 ? -1 : -2; /* -2: a place is known, a new one is only set for a larger difference */
        pairs[kind_a][kind_b](pa, pb, count, smallest, &part);
        if (part.at >= 0) part.at += start;
        else part.at = out->at;
        *out = part;
    }
}

PyDoc_STRVAR(
    difference_doc,
    "difference(address_a, address_b, n, kind_a, kind_b, smallest)\n\n"
    "Measure two runs of n elements that lie at two addresses. kinds: 0 float32, 1 float64, 2 float16, 3 bfloat16.\n"
    "Return (changed, square_d, square_a, square_b, dot, max_abs, max_ulp in units of 2^floor(log2), at or -1), or\n"
    "None when an element is not finite or a pair of kinds is not built in.");

static PyObject *difference(PyObject *module, PyObject *args) {
    (void)module;
    Py_ssize_t address_a, address_b, n;
    int kind_a, kind_b;
    double smallest;
    if (!PyArg_ParseTuple(args, "nnniid", &address_a, &address_b, &n, &kind_a, &kind_b, &smallest)) return NULL;
    if (kind_a < 0 || kind_a >= KINDS || kind_b < 0 || kind_b >= KINDS || !pairs[kind_a][kind_b]) Py_RETURN_NONE;
    Sums sums;
    Py_BEGIN_ALLOW_THREADS measure((const char *)address_a, (const char *)address_b, n, kind_a, kind_b, smallest,
                                   &sums);
    Py_END_ALLOW_THREADS if (!isfinite(sums.square_d) || !isfinite(sums.square_a) || !isfinite(sums.square_b))
        Py_RETURN_NONE;
    return Py_BuildValue("LddddddL", (long long)sums.changed, sums.square_d, sums.square_a, sums.square_b, sums.dot,
                         sums.max_abs, sums.max_ulp, (long long)sums.at);
}

static PyMethodDef methods[] = {{"difference", difference, METH_VARARGS, difference_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Differences of float arrays in one pass.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
