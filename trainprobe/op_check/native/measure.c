/* The sums of op_check/measure.py over a float32 result in one pass. Limited API of Python 3.10.

   Sums are taken in float64 in LANES independent partial sums, so that the compiler can use vectors without being
   allowed to reorder. A NaN or an infinity anywhere makes a sum that is not finite: the caller then measures by its
   slower rules. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

#define LANES 8
#define BLOCK \
    4096 /* elements: a block of all three stays in the second-level cache while its worst element is sought */
#define UNIT 0x1p-24
#define LEAST 0x1p-150 /* half of the least subnormal number */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef struct {
    int64_t same, beyond, at;
    double worst, bound, largest, largest_beyond, square, weight, weights, noise, explained, all;
} Sums;

#define BOUND(R, N) (fabs(R) * UNIT + LEAST + (N))

typedef struct {
    double worst, largest, square, weight, weights, noise, explained, all;
    int64_t same;
} Block;

CLONES static void add_block(const float *y, const double *r, const double *noise, int64_t n, Block *out) {
    double worst[LANES] = {0}, largest[LANES] = {0}, square[LANES] = {0}, weight[LANES] = {0}, weights[LANES] = {0};
    double squared[LANES] = {0}, explained[LANES] = {0}, all[LANES] = {0};
    int64_t same[LANES] = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t m = n - i < LANES ? n - i : LANES;
        for (int l = 0; l < m; l++) {
            double want = r[i + l], size = fabs(want), own = noise[i + l], error = y[i + l] - want,
                   bound = BOUND(want, own);
            double q = fabs(error) / bound, w = error * want;
            worst[l] = q > worst[l] ? q : worst[l], largest[l] = size > largest[l] ? size : largest[l];
            square[l] += want * want, weight[l] += w, weights[l] += w * w, squared[l] += own * own,
                explained[l] += own * size;
            all[l] += q;
            same[l] += y[i + l] == (float)want;
        }
    }
    Block b = {0};
    for (int l = 0; l < LANES; l++) {
        b.worst = worst[l] > b.worst ? worst[l] : b.worst, b.largest = largest[l] > b.largest ? largest[l] : b.largest;
        b.square += square[l], b.weight += weight[l], b.weights += weights[l], b.noise += squared[l];
        b.explained += explained[l], b.all += all[l], b.same += same[l];
    }
    *out = b;
}

static void seek(const float *y, const double *r, const double *noise, int64_t n, int64_t begin, double near,
                 Sums *sums) {
    for (int64_t i = 0; i < n; i++) {
        double bound = BOUND(r[i], noise[i]), q = fabs(y[i] - r[i]) / bound, size = fabs(r[i]);
        if (q > sums->worst) sums->worst = q, sums->at = begin + i, sums->bound = bound;
        if (q > near) sums->beyond++, sums->largest_beyond = size > sums->largest_beyond ? size : sums->largest_beyond;
    }
}

/* A noise that is not written out: relative |r| + factor size, with sizes of either format or none. */
typedef struct {
    const double *wide;
    const float *single;
    double relative, factor;
} Noise;

CLONES static void write_noise(const double *r, const Noise *noise, int64_t begin, int64_t n, double *out) {
    double relative = noise->relative, factor = noise->factor;
    if (noise->single) {
        const float *size = noise->single + begin;
        for (int64_t i = 0; i < n; i++) out[i] = size[i] * factor + fabs(r[i]) * relative;
    } else if (noise->wide) {
        const double *size = noise->wide + begin;
        for (int64_t i = 0; i < n; i++) out[i] = size[i] * factor + fabs(r[i]) * relative;
    } else {
        for (int64_t i = 0; i < n; i++) out[i] = fabs(r[i]) * relative;
    }
}

static void add_all(const float *y, const double *r, const Noise *its, int64_t n, double near, Sums *sums) {
    Block b;
    double written[BLOCK];
    int whole = its->wide && its->factor == 1 && its->relative == 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        const double *noise = whole ? its->wide + i : written;
        if (!whole) write_noise(r + i, its, i, m, written);
        add_block(y + i, r + i, noise, m, &b);
        sums->same += b.same, sums->square += b.square, sums->weight += b.weight, sums->weights += b.weights;
        sums->noise += b.noise, sums->explained += b.explained, sums->all += b.all;
        sums->largest = b.largest > sums->largest ? b.largest : sums->largest;
        if (b.worst > sums->worst || b.worst > near) seek(y + i, r + i, noise, m, i, near, sums);
    }
}

PyDoc_STRVAR(measure_doc, "measure(address_y, address_r, n, near, address_size, bytes, factor, relative)\n\n"
                          "Measure n elements of float32 at one address against float64 results at another. Their "
                          "noise is relative |r| + factor size,\n"
                          "with sizes of so many bytes each at a third address, or none of 0 bytes. Return (same, "
                          "worst, at, bound, beyond, largest,\n"
                          "largest_beyond, square, weight, weights, noise, explained) as measure.Sums has them, or "
                          "None where a number is not finite.");

static PyObject *measure(PyObject *module, PyObject *args) {
    (void)module;
    Py_ssize_t y, r, n, size;
    int bytes;
    double near;
    Noise noise = {0};
    if (!PyArg_ParseTuple(args, "nnndnidd", &y, &r, &n, &near, &size, &bytes, &noise.factor, &noise.relative))
        return NULL;
    if (bytes != 0 && bytes != sizeof(float) && bytes != sizeof(double)) {
        PyErr_Format(PyExc_ValueError, "sizes have 4 or 8 bytes each, and not %d", bytes);
        return NULL;
    }
    noise.wide = bytes == sizeof(double) ? (const double *)size : NULL;
    noise.single = bytes == sizeof(float) ? (const float *)size : NULL;
    Sums s = {.worst = -1};
    Py_BEGIN_ALLOW_THREADS add_all((const float *)y, (const double *)r, &noise, n, near, &s);
    Py_END_ALLOW_THREADS if (!isfinite(s.square + s.weights + s.noise + s.explained + s.all)) Py_RETURN_NONE;
    return Py_BuildValue("LdLdLddddddd", (long long)s.same, s.worst, (long long)s.at, s.bound, (long long)s.beyond,
                         s.largest, s.largest_beyond, s.square, s.weight, s.weights, s.noise, s.explained);
}

static PyMethodDef methods[] = {{"measure", measure, METH_VARARGS, measure_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Sums over float32 results in one pass.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
