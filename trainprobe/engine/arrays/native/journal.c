/* What the tape tells the journal of the step, where there is one: see engine/storage/step_journal.py. */
#include "objects.h"

static int told(PyObject *done) {
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int journal_value(PyObject *journal, Value *value, const StatsRows *rows, Py_ssize_t row) {
    const char *partials = row < 0 ? NULL : (const char *)(rows->partials + row * COLUMNS);
    unsigned long long checksum = row < 0 ? 0 : rows->checksums[row];
    Py_ssize_t size = COLUMNS * sizeof(double);
    return told(PyObject_CallMethod(journal, "value", "Oy#K", (PyObject *)value, partials, size, checksum));
}

int journal_twin(PyObject *journal, PyObject *twin, PyObject *value) {
    return told(PyObject_CallMethod(journal, "twin", "OO", twin, value));
}

int journal_call(PyObject *journal, Call *call, int fields) {
    return told(PyObject_CallMethod(journal, "call", "Oi", (PyObject *)call, fields));
}

static PyObject *row_of(PyObject *module, PyObject *args) {
    PyObject *stats_rows;
    Py_ssize_t row;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!n", stats_rows_type, &stats_rows, &row)) return NULL;
    StatsRows *rows = (StatsRows *)stats_rows;
    if (row < 0 || row >= rows->rows) return PyErr_Format(PyExc_IndexError, "no row %zd", row);
    return Py_BuildValue("y#K", (char *)(rows->partials + row * COLUMNS), (Py_ssize_t)(COLUMNS * sizeof(double)),
                         (unsigned long long)rows->checksums[row]);
}

static PyMethodDef functions[] = {
    {"row_of", row_of, METH_VARARGS, "row_of(rows, row) -> (its partials as bytes, its checksum)"},
    {NULL, NULL, 0, NULL}};

int journal_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
