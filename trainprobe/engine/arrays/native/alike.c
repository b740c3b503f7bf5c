/* Whether the calls of two steps are alike: all that is written of them is the same but the numbers (see dumps/pattern.py).
   No Python code runs in between, so the marks of a comparison are nobody else's; a log of one of the two may be in the making. */
#include <string.h>

#include "objects.h"

#define DEEPEST 900

typedef struct {
    PyObject *opaque; /* the type of leaves that are neither tensors nor plain */
    uint64_t before, now;
    Py_ssize_t values;
} Pair;

/* Marks on values and calls are of the log, or of the comparison, whose epoch they carry. */
uint64_t next_epoch(void) {
    static uint64_t epochs;
    return ++epochs;
}

static PyObject *there(PyObject *x) { return x == Py_None ? NULL : x; }

/* A missing thing, a str or an int. */
static int same_word(PyObject *a, PyObject *b) {
    a = there(a), b = there(b);
    if (a == b) return 1;
    if (!a || !b || Py_TYPE(a) != Py_TYPE(b) || (Py_TYPE(a) != &PyUnicode_Type && Py_TYPE(a) != &PyLong_Type)) return 0;
    return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

static int same_tree(Pair *p, PyObject *a, PyObject *b, int depth);

static int same_attribute(Pair *p, PyObject *a, PyObject *b, const char *name, int depth) {
    PyObject *x = PyObject_GetAttrString(a, name), *y = x ? PyObject_GetAttrString(b, name) : NULL;
    int same = y && same_tree(p, x, y, depth);
    Py_XDECREF(x), Py_XDECREF(y);
    return same;
}

/* A value is told by its place in the order in which values are met. One that is part of both steps is not compared. */
static int same_value(Pair *p, Value *a, Value *b) {
    if (b->pair_epoch == p->now) return a->pair_epoch == p->before && a->pair == b->pair;
    if (a == b || a->pair_epoch == p->before || a->pair_epoch == p->now || b->pair_epoch == p->before) return 0;
    a->pair_epoch = p->before, b->pair_epoch = p->now;
    a->pair = b->pair = p->values++;
    return a->row == b->row && there(a->requires_grad) == there(b->requires_grad) && same_word(a->dtype, b->dtype) &&
           same_word(a->type, b->type) && same_word(a->device, b->device) && same_word(a->note, b->note) &&
           same_word(a->tensor, b->tensor) && same_tree(p, a->shape, b->shape, 0) && same_tree(p, a->extra, b->extra, 0);
}

static int same_items(Pair *p, PyObject *a, PyObject *b, int depth) {
    PyObject *key, *item, *other_key, *other;
    Py_ssize_t at = 0, other_at = 0;
    if (PyDict_Size(a) != PyDict_Size(b)) return 0;
    while (PyDict_Next(a, &at, &key, &item) && PyDict_Next(b, &other_at, &other_key, &other))
        if (!same_word(key, other_key) || !same_tree(p, item, other, depth)) return 0;
    return 1;
}

static int same_tree(Pair *p, PyObject *a, PyObject *b, int depth) {
    a = there(a), b = there(b);
    if (!a || !b) return a == b;
    PyTypeObject *kind = Py_TYPE(a);
    if (kind != Py_TYPE(b) || depth > DEEPEST) return 0;
    if (kind == value_type) return same_value(p, (Value *)a, (Value *)b);
    if (kind == &PyBool_Type) return a == b;
    if (kind == &PyUnicode_Type || kind == &PyLong_Type) return same_word(a, b);
    if (kind == &PyFloat_Type) {
        double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(b);
        return memcmp(&x, &y, sizeof x) == 0;
    }
    if (kind == &PyList_Type) {
        Py_ssize_t n = PyList_Size(a);
        if (n != PyList_Size(b)) return 0;
        for (Py_ssize_t i = 0; i < n; i++)
            if (!same_tree(p, PyList_GetItem(a, i), PyList_GetItem(b, i), depth + 1)) return 0;
        return 1;
    }
    if (kind == &PyTuple_Type) {
        Py_ssize_t n = PyTuple_Size(a);
        if (n != PyTuple_Size(b)) return 0;
        for (Py_ssize_t i = 0; i < n && a != b; i++)
            if (!same_tree(p, PyTuple_GetItem(a, i), PyTuple_GetItem(b, i), depth + 1)) return 0;
        return 1;
    }
    if (kind == &PyDict_Type) return same_items(p, a, b, depth + 1);
    return (PyObject *)kind == p->opaque && same_attribute(p, a, b, "type", depth + 1) &&
           same_attribute(p, a, b, "value", depth + 1) && same_attribute(p, a, b, "extra", depth + 1);
}

static int same_name(const Call *a, const Call *b) {
    return a->call == b->call && same_word(a->name, b->name) && same_word(a->kind, b->kind) && same_word(a->phase, b->phase) &&
           same_word(a->cls, b->cls);
}

static int same_parent(const Pair *p, PyObject *a, PyObject *b) {
    if (!there(a) || !there(b) || Py_TYPE(a) != call_type || Py_TYPE(b) != call_type) return same_word(a, b);
    const Call *x = (Call *)a, *y = (Call *)b;
    if (x->pair_epoch == p->before && y->pair_epoch == p->now) return x->pair == y->pair;
    return x->pair_epoch != p->before && y->pair_epoch != p->now && same_name(x, y); /* neither is among the calls */
}

static int same_call(Pair *p, Call *a, Call *b) {
    return a->stack == b->stack && same_name(a, b) && same_word(a->micro, b->micro) && same_word(a->node, b->node) &&
           same_parent(p, a->parent, b->parent) && same_tree(p, a->args, b->args, 0) && same_tree(p, a->kwargs, b->kwargs, 0) &&
           same_tree(p, a->out, b->out, 0) && same_tree(p, a->params, b->params, 0);
}

static int marked(PyObject *calls, Py_ssize_t n, uint64_t epoch, uint64_t other) {
    for (Py_ssize_t i = 0; i < n; i++) {
        Call *c = (Call *)PyList_GetItem(calls, i);
        if (Py_TYPE((PyObject *)c) != call_type || c->pair_epoch == other) return 0;
        c->pair_epoch = epoch, c->pair = i;
    }
    return 1;
}

static PyObject *alike(PyObject *module, PyObject *args) {
    PyObject *before, *now;
    Pair p = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &before, &PyList_Type, &now, &p.opaque)) return NULL;
    p.before = next_epoch(), p.now = next_epoch();
    Py_ssize_t n = PyList_Size(before);
    int same = n == PyList_Size(now) && marked(before, n, p.before, p.now) && marked(now, n, p.now, p.before);
    for (Py_ssize_t i = 0; same && i < n; i++) same = same_call(&p, (Call *)PyList_GetItem(before, i), (Call *)PyList_GetItem(now, i));
    PyErr_Clear();
    return PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"calls_alike", alike, METH_VARARGS,
     "calls_alike(before, now, opaque) -> whether two lists of calls differ in nothing but the numbers of their values"},
    {NULL, NULL, 0, NULL}};

int alike_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
