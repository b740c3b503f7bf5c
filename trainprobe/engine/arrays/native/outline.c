/* Whether a model is still made of what it was (see taps/outline.py, whose Python lines do the same). */
#include "objects.h"

static int same_members(PyObject *members, PyObject *before) {
    PyObject *key, *item;
    Py_ssize_t at = 0, i = 0;
    if (PyDict_Size(members) != PyTuple_Size(before)) return 0;
    while (PyDict_Next(members, &at, &key, &item))
        if (item != PyTuple_GetItem(before, i++)) return 0;
    return 1;
}

/* 1, 0, or -1 with an exception set. */
static int still_wants(PyObject *parameter, PyObject *wanted) {
    PyObject *now = tensor_attribute(parameter, REQUIRES_GRAD);
    Py_XDECREF(now);
    return now ? now == wanted : -1;
}

static PyObject *outline_holds(PyObject *module, PyObject *args) {
    PyObject *held, *wanting, *first, *second;
    int holds = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &held, &PyList_Type, &wanting)) return NULL;
    for (Py_ssize_t i = 0; holds == 1 && i < PyList_Size(held); i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(held, i), "O!O!", &PyDict_Type, &first, &PyTuple_Type, &second)) return NULL;
        holds = same_members(first, second);
    }
    for (Py_ssize_t i = 0; holds == 1 && i < PyList_Size(wanting); i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(wanting, i), "OO", &first, &second)) return NULL;
        holds = still_wants(first, second);
    }
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

static PyMethodDef functions[] = {
    {"outline_holds", outline_holds, METH_VARARGS,
     "outline_holds(held, wanting) -> bool\n\nheld: list of (dict, tuple of what it held). wanting: list of (tensor, its requires_grad)."},
    {NULL, NULL, 0, NULL}};

int outline_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
