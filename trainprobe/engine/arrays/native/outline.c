/* Whether a model is still made of what it was (see taps/outline.py, whose Python lines do the same). */
#include "objects.h"

/* 1, 0, or -1 with an exception set. */
static int same_members(PyObject *members, PyObject *before) {
    PyObject *key, *item;
    Py_ssize_t at = 0, i = 0, n = before ? PyTuple_Size(before) : -1;
    if (n < 0) return -1;
    if (PyDict_Size(members) * 2 != n) return PyErr_Occurred() ? -1 : 0;
    for (; PyDict_Next(members, &at, &key, &item); i += 2)
        if (item != PyTuple_GetItem(before, i + 1) || key != PyTuple_GetItem(before, i)) return 0;
    return 1;
}

/* 1, 0, or -1 with an exception set. */
static int still_wants(PyObject *parameter, PyObject *wanted) {
    PyObject *now = tensor_attribute(parameter, REQUIRES_GRAD);
    Py_XDECREF(now);
    return now ? now == wanted : -1;
}

static PyObject *outline_holds(PyObject *module, PyObject *args) {
    PyObject *held, *before, *wanting, *wanted;
    int holds = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyTuple_Type, &held, &PyTuple_Type, &before, &PyTuple_Type, &wanting, &PyTuple_Type, &wanted))
        return NULL;
    for (Py_ssize_t i = 0, n = PyTuple_Size(held); holds == 1 && i < n; i++)
        holds = same_members(PyTuple_GetItem(held, i), PyTuple_GetItem(before, i));
    for (Py_ssize_t i = 0, n = PyTuple_Size(wanting); holds == 1 && i < n; i++)
        holds = still_wants(PyTuple_GetItem(wanting, i), PyTuple_GetItem(wanted, i));
    return holds < 0 || PyErr_Occurred() ? NULL : PyBool_FromLong(holds);
}

static PyMethodDef functions[] = {
    {"outline_holds", outline_holds, METH_VARARGS,
     "outline_holds(held, before, wanting, wanted) -> bool\n\nTuples: dicts, what each held (key, value, key, value, ...), tensors, the requires_grad of each."},
    {NULL, NULL, 0, NULL}};

int outline_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
