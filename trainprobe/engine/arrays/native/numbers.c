/* The numbers of a step that are written most often, in one pass over its partials (see engine/dumps/shared.py and stats/partials.py). */
#include <math.h>

#include "text.h"

enum { COUNT, NANS, POSINF, NEGINF, ZERO, MIN, MAX, SUM, SUMSQ, M2, EXPONENT, LOW };
#define TABLE 6

/* Which columns of the table have a number that is not 0, as bits. */
static long used_columns(const double *table, Py_ssize_t rows) {
    long used = 0;
    for (int i = 0; i < TABLE; i++)
        for (Py_ssize_t row = 0; row < rows && !(used >> i & 1); row++) used |= (long)(table[i * rows + row] != 0) << i;
    return used;
}

static int put_whole(Text *t, double x) { return (t->size && PUT(t, ",")) || put_number(t, (long long)x) ? -1 : 0; }

/* 0 where a row is not plain: it has no elements, some that are not finite, numbers that are not, or rarer partials. */
static int fill_table(const double *partials, Py_ssize_t rows, double *out) {
    for (Py_ssize_t row = 0; row < rows; row++, partials += COLUMNS) {
        const double *p = partials;
        if (!(p[COUNT] > 0) || p[NANS] != 0 || p[POSINF] != 0 || p[NEGINF] != 0 || p[M2] != 0 || p[EXPONENT] != 0 || p[LOW] != 0) return 0;
        double table[TABLE] = {p[SUM], p[SUMSQ], p[MIN], p[MAX], p[SUM] / p[COUNT], sqrt(p[SUMSQ])};
        for (int i = 0; i < TABLE; i++) {
            if (table[i] - table[i] != 0) return 0;
            out[i * rows + row] = table[i];
        }
    }
    return 1;
}

static PyObject *plain_table(PyObject *module, PyObject *bytes) {
    Text counts = {0}, zeros = {0};
    char *data;
    Py_ssize_t size, rows;
    (void)module;
    if (PyBytes_AsStringAndSize(bytes, &data, &size)) return NULL;
    const double *partials = (const double *)data;
    rows = size / (Py_ssize_t)(COLUMNS * sizeof *partials);
    PyObject *table = PyBytes_FromStringAndSize(NULL, rows * TABLE * (Py_ssize_t)sizeof(double)), *answer = NULL;
    if (!table) return NULL;
    if (rows == 0 || !fill_table(partials, rows, (double *)PyBytes_AsString(table))) {
        Py_DECREF(table);
        Py_RETURN_NONE;
    }
    int failed = make_room(&counts, (size_t)rows * 8) || make_room(&zeros, (size_t)rows * 4), zero = 0;
    for (Py_ssize_t row = 0; !failed && row < rows; row++) {
        zero |= partials[row * COLUMNS + ZERO] != 0;
        failed = put_whole(&counts, partials[row * COLUMNS + COUNT]) || put_whole(&zeros, partials[row * COLUMNS + ZERO]);
    }
    if (!failed)
        answer = Py_BuildValue("Oly#y#", table, used_columns((double *)PyBytes_AsString(table), rows), counts.data, (Py_ssize_t)counts.size,
                               zeros.data, (Py_ssize_t)(zero ? zeros.size : 0));
    PyMem_Free(counts.data), PyMem_Free(zeros.data);
    Py_DECREF(table);
    return answer;
}

static PyMethodDef functions[] = {
    {"plain_table", plain_table, METH_O,
     "plain_table(partials) -> None, or (float64 [6, rows] as bytes, which columns are used, counts and zeros as text)\n\nThe columns are sum, "
     "sumsq, min, max, mean and norm; used is a bit each, set where a number is not 0. No zeros: empty. None where a row is not plain: without elements, with some that are not finite, or with rarer partials."},
    {NULL, NULL, 0, NULL}};

int numbers_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
