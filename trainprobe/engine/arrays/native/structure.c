/* A fingerprint of what the calls of a step say apart from their numbers (see engine/core/step_layout.py). It holds within this process. */
#include <string.h>

#include "objects.h"

#define DEEPEST 900

typedef struct {
    uint64_t a, b;
    PyObject *opaque; /* the type of leaves that are neither tensors nor plain */
} Key;

enum { NOTHING = 1, TRUE_, FALSE_, TEXT, WHOLE, HUGE_WHOLE, REAL, LIST, TUPLE, DICT, VALUE, OPAQUE, CALL, PARENT, OTHER };

static void mix(Key *k, uint64_t x) {
    k->a = (k->a ^ x) * 0x9E3779B97F4A7C15u, k->a ^= k->a >> 29;
    k->b = (k->b + x) * 0xC2B2AE3D27D4EB4Fu, k->b ^= k->b >> 31;
}

/* What cannot be told to be the same again is never the same. */
static void mix_unlike(Key *k) {
    static uint64_t seen;
    mix(k, OTHER), mix(k, ++seen);
}

static void mix_text(Key *k, PyObject *text) {
    mix(k, TEXT), mix(k, (uint64_t)PyObject_Hash(text)), mix(k, (uint64_t)PyUnicode_GetLength(text));
}

static void mix_tree(Key *k, PyObject *x, int depth);

static void mix_attribute(Key *k, PyObject *x, const char *name, int depth) {
    PyObject *found = PyObject_GetAttrString(x, name);
    mix_tree(k, found, depth);
    Py_XDECREF(found);
}

static void mix_value(Key *k, const Value *v) {
    PyObject *const parts[] = {v->type, v->dtype, v->shape, v->device, v->requires_grad, v->note, v->tensor, v->extra};
    mix(k, VALUE), mix(k, (uint64_t)v->row);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) mix_tree(k, parts[i], 0);
}

static void mix_number(Key *k, PyObject *x) {
    int beyond = 0;
    long long number = PyLong_AsLongLongAndOverflow(x, &beyond);
    if (!beyond) {
        mix(k, WHOLE), mix(k, (uint64_t)number);
        return;
    }
    PyObject *text = PyNumber_ToBase(x, 16);
    mix(k, HUGE_WHOLE);
    if (text) mix_text(k, text);
    Py_XDECREF(text);
}

static void mix_items(Key *k, PyObject *x, int depth) {
    PyObject *key, *item;
    Py_ssize_t at = 0;
    mix(k, DICT), mix(k, (uint64_t)PyDict_Size(x));
    while (PyDict_Next(x, &at, &key, &item)) mix_tree(k, key, depth), mix_tree(k, item, depth);
}

static void mix_tree(Key *k, PyObject *x, int depth) {
    if (!x || x == Py_None) {
        mix(k, NOTHING);
        return;
    }
    PyTypeObject *kind = Py_TYPE(x);
    if (depth > DEEPEST) mix_unlike(k);
    else if (kind == value_type) mix_value(k, (Value *)x);
    else if (kind == &PyBool_Type) mix(k, x == Py_True ? TRUE_ : FALSE_);
    else if (kind == &PyUnicode_Type) mix_text(k, x);
    else if (kind == &PyLong_Type) mix_number(k, x);
    else if (kind == &PyFloat_Type) {
        double number = PyFloat_AsDouble(x);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        mix(k, REAL), mix(k, bits);
    } else if (kind == &PyList_Type) {
        mix(k, LIST), mix(k, (uint64_t)PyList_Size(x));
        for (Py_ssize_t i = 0; i < PyList_Size(x); i++) mix_tree(k, PyList_GetItem(x, i), depth + 1);
    } else if (kind == &PyTuple_Type) {
        mix(k, TUPLE), mix(k, (uint64_t)PyTuple_Size(x));
        for (Py_ssize_t i = 0; i < PyTuple_Size(x); i++) mix_tree(k, PyTuple_GetItem(x, i), depth + 1);
    } else if (kind == &PyDict_Type) mix_items(k, x, depth + 1);
    else if ((PyObject *)kind == k->opaque) {
        mix(k, OPAQUE);
        mix_attribute(k, x, "type", depth + 1), mix_attribute(k, x, "value", depth + 1), mix_attribute(k, x, "extra", depth + 1);
    } else mix_unlike(k);
}

static void mix_name(Key *k, const Call *c) {
    mix(k, CALL), mix(k, (uint64_t)c->call);
    mix_tree(k, c->kind, 0), mix_tree(k, c->name, 0), mix_tree(k, c->phase, 0), mix_tree(k, c->cls, 0);
}

static void mix_call(Key *k, const Call *c, PyObject *calls, Py_ssize_t n) {
    mix_name(k, c), mix(k, (uint64_t)c->stack), mix_tree(k, c->micro, 0), mix_tree(k, c->node, 0);
    if (c->parent && Py_TYPE(c->parent) == call_type) {
        const Call *parent = (Call *)c->parent;
        int among = parent->mark >= 0 && parent->mark < n && PyList_GetItem(calls, parent->mark) == c->parent;
        mix(k, PARENT);
        if (among) mix(k, (uint64_t)parent->mark);
        else mix_name(k, parent);
    } else mix_tree(k, c->parent, 0);
    mix_tree(k, c->args, 0), mix_tree(k, c->kwargs, 0), mix_tree(k, c->out, 0), mix_tree(k, c->params, 0);
}

static PyObject *structure_key(PyObject *module, PyObject *args) {
    PyObject *calls, *more;
    Key k = {0x243F6A8885A308D3u, 0x13198A2E03707344u, NULL};
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OO", &PyList_Type, &calls, &more, &k.opaque)) return NULL;
    Py_ssize_t n = PyList_Size(calls);
    for (Py_ssize_t i = 0; i < n; i++) {
        Call *c = (Call *)PyList_GetItem(calls, i);
        if (Py_TYPE((PyObject *)c) != call_type) return PyErr_SetString(PyExc_TypeError, "calls must be a list of Call"), NULL;
        c->mark = i;
    }
    for (Py_ssize_t i = 0; i < n; i++) mix_call(&k, (Call *)PyList_GetItem(calls, i), calls, n);
    mix_tree(&k, more, 0);
    PyErr_Clear();
    return PyBytes_FromStringAndSize((const char *)&k, 2 * sizeof(uint64_t));
}

static PyMethodDef functions[] = {
    {"structure_key", structure_key, METH_VARARGS,
     "structure_key(calls, more, opaque) -> 16 bytes, the same for calls that differ in nothing but the numbers of their values; more: a tree that is part of it"},
    {NULL, NULL, 0, NULL}};

int structure_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
