/* The gradient edges of all tensors in an argument or result (see `collect_edges` in engine/capture/module_gradients.py). */
#include <string.h>

#include "module_watch.h"

#define MOST 100000

PyObject *place_text(PyObject *path, Py_ssize_t number) {
    return path ? Py_NewRef(path) : PyUnicode_FromFormat("%zd", number < 0 ? 0 : number);
}

static int merge_edge(EdgeAt *known, PyObject *path, Py_ssize_t number) {
    PyObject *first = place_text(known->path, known->number), *second = place_text(path, number);
    PyObject *both = first && second ? PyUnicode_FromFormat("%U|%U", first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    if (!both) return -1;
    Py_XDECREF(known->path);
    known->path = both, known->number = -1;
    return 0;
}

/* node, slot: None, or an edge. */
static int add_edge(Edges *found, PyObject *node, Py_ssize_t slot, PyObject *path, Py_ssize_t number) {
    for (Py_ssize_t i = 0; i < found->n; i++)
        if (found->items[i].node == node && found->items[i].slot == slot) return merge_edge(&found->items[i], path, number);
    if (found->n == found->room) {
        Py_ssize_t room = found->room ? found->room * 2 : 4;
        EdgeAt *items = found->room ? PyMem_Malloc((size_t)room * sizeof *items) : found->few;
        if (!items) return PyErr_NoMemory(), -1;
        if (found->n) memcpy(items, found->items, (size_t)found->n * sizeof *items);
        if (found->items != found->few) PyMem_Free(found->items);
        found->items = items, found->room = room;
    }
    found->items[found->n++] = (EdgeAt){Py_NewRef(node), path ? Py_NewRef(path) : NULL, slot, path ? -1 : number < 0 ? 0 : number};
    return 0;
}

void edges_free(Edges *edges) {
    for (Py_ssize_t i = 0; i < edges->n; i++) {
        Py_DECREF(edges->items[i].node);
        Py_XDECREF(edges->items[i].path);
    }
    if (edges->items != edges->few) PyMem_Free(edges->items);
    edges->items = NULL, edges->n = edges->room = 0;
}

static int edge_of_tensor(ModuleWatch *self, PyObject *t, PyObject *path, Py_ssize_t number, Edges *found) {
    PyObject *node = node_behind(t);
    if (!node && PyErr_Occurred()) return -1;
    int failed;
    if (node) { /* then it wants a gradient */
        PyObject *slot = tensor_attribute(t, OUTPUT_NR);
        failed = !slot || add_edge(found, node, PyLong_AsSsize_t(slot), path, number);
        Py_XDECREF(slot);
        Py_DECREF(node);
    } else {
        PyObject *grad = tensor_attribute(t, REQUIRES_GRAD);
        int wanted = grad ? grad == Py_True : -1;
        Py_XDECREF(grad);
        if (wanted <= 0) return wanted;
        PyObject *edge = call_one(self->edge_of, t);
        failed = !edge || (edge != Py_None && add_edge(found, PyTuple_GetItem(edge, 0), PyLong_AsSsize_t(PyTuple_GetItem(edge, 1)), path, number));
        Py_XDECREF(edge);
    }
    return failed || PyErr_Occurred() ? -1 : 0;
}

static int plain_number(PyObject *text, Py_ssize_t *number) {
    Py_ssize_t length = 0;
    const char *s = PyUnicode_AsUTF8AndSize(text, &length);
    if (!s || length < 1 || length > 9) return PyErr_Clear(), 0;
    *number = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        if (s[i] < '0' || s[i] > '9') return 0;
        *number = *number * 10 + (s[i] - '0');
    }
    return 1;
}

static int edges_named(ModuleWatch *self, PyObject *x, PyObject *name, PyObject *path, Py_ssize_t number, Edges *found, int depth) {
    PyObject *key = key_text(name), *whole = NULL;
    if (key && (path || number >= 0)) {
        PyObject *own = place_text(path, number);
        whole = own ? PyUnicode_FromFormat("%U.%U", own, key) : NULL;
        Py_XDECREF(own);
    } else {
        whole = Py_XNewRef(key);
    }
    Py_XDECREF(key);
    if (!whole) return -1;
    Py_ssize_t plain = -1;
    int failed = plain_number(whole, &plain) ? edges_of(self, x, NULL, plain, found, depth) : edges_of(self, x, whole, -1, found, depth);
    Py_DECREF(whole);
    return failed;
}

static int odd_edges(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found) {
    PyObject *own = path || number >= 0 ? place_text(path, number) : PyUnicode_FromString("");
    PyObject *pairs = own ? call_two(self->odd_edges, x, own) : NULL;
    int failed = !pairs;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(pairs); i++) {
        PyObject *at, *node;
        Py_ssize_t slot, plain = -1;
        failed = !PyArg_ParseTuple(PyList_GetItem(pairs, i), "U(On)", &at, &node, &slot);
        if (!failed) failed = plain_number(at, &plain) ? add_edge(found, node, slot, NULL, plain) : add_edge(found, node, slot, at, -1);
    }
    Py_XDECREF(own);
    Py_XDECREF(pairs);
    return failed ? -1 : 0;
}

int edges_of(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found, int depth) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == self->plain[0] || kind == self->plain[1]) return edge_of_tensor(self, x, path, number, found);
    if (x == Py_None || kind == &PyLong_Type || kind == &PyFloat_Type || kind == &PyBool_Type || kind == &PyUnicode_Type) return 0;
    static int left; /* containers: one that holds itself has no end of places */
    if (depth == 0) left = MOST;
    if (depth > 8 || left <= 0) return 0;
    left--;
    if (PyDict_CheckExact(x)) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        while (PyDict_Next(x, &at, &key, &item))
            if (edges_named(self, item, key, path, number, found, depth + 1)) return -1;
        return 0;
    }
    int tuple = PyTuple_CheckExact(x);
    if (!tuple && !PyList_CheckExact(x)) return odd_edges(self, x, path, number, found);
    for (Py_ssize_t i = 0; i < (tuple ? PyTuple_Size(x) : PyList_Size(x)); i++) {
        PyObject *item = tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i), *below = NULL;
        if (path || number >= 0) {
            PyObject *own = place_text(path, number);
            below = own ? PyUnicode_FromFormat("%U.%zd", own, i) : NULL;
            Py_XDECREF(own);
            if (!below) return -1;
        }
        int failed = edges_of(self, item, below, below ? -1 : i, found, depth + 1);
        Py_XDECREF(below);
        if (failed) return -1;
    }
    return 0;
}
