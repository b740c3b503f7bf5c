/* Where a tensor's elements lie: address, sizes, strides, kind of element. torch says it in one C call through the table of functions
   that it offers other libraries (DLPack's exchange API, since torch 2.10), which is a tenth of what its Python attributes take; these
   are asked where there is no such table, and for tensors that it refuses. */
#include <string.h>

#include "objects.h"

/* The part of DLPack 1.3 (github.com/dmlc/dlpack) that is used; the layout is fixed for all versions 1.x. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct Exchange {
    struct {
        uint32_t major, minor;
    } version;
    const struct Exchange *previous;
    void *allocate, *from_object, *to_object;
    int (*describe)(void *tensor, DLTensor *out);
    void *stream;
} Exchange;

enum { DL_CPU = 1, DL_MAJOR = 1 };

static const Exchange *exchange;
static PyObject *n_data_ptr, *n_shape, *n_is_cpu, *n_stride;

int geometry_learn(PyObject *capsule) { /* None: this torch has no such table */
    exchange = NULL;
    if (capsule == Py_None) return 0;
    const Exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api) return -1;
    while (api && api->version.major > DL_MAJOR) api = api->previous;
    if (api && api->version.major == DL_MAJOR && api->describe) exchange = api;
    return 0;
}

static int read_attributes(PyObject *t, Geometry *out) {
    PyObject *address = PyObject_CallMethodObjArgs(t, n_data_ptr, NULL), *shape = address ? PyObject_GetAttr(t, n_shape) : NULL;
    int failed = !shape || !PyTuple_Check(shape) || PyTuple_Size(shape) > MAX_DIMS;
    if (!failed) {
        out->data = PyLong_AsVoidPtr(address), out->nd = (int)PyTuple_Size(shape);
        for (int i = 0; i < out->nd; i++) out->own[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        out->sizes = out->own;
        failed = PyErr_Occurred() != NULL;
    }
    Py_XDECREF(address);
    Py_XDECREF(shape);
    return failed ? -1 : 0;
}

/* 0, or -1 for what has no address and shape, often with an exception set. What is read holds while the tensor is held and unchanged. */
int geometry_read(PyObject *t, Geometry *out) {
    DLTensor described;
    out->cpu = -1, out->kind = 0, out->strides = NULL;
    if (!exchange) return read_attributes(t, out);
    if (exchange->describe(t, &described)) {
        PyErr_Clear(); /* on a device or with elements that DLPack does not know */
        return read_attributes(t, out);
    }
    if (described.ndim > MAX_DIMS) return -1;
    out->data = (char *)described.data + described.byte_offset, out->nd = described.ndim, out->sizes = described.shape, out->strides = described.strides;
    out->cpu = described.device_type == DL_CPU;
    out->kind = (uint32_t)described.dtype.lanes << 16 | (uint32_t)described.dtype.bits << 8 | described.dtype.code;
    return 0;
}

/* Whether the elements lie in the host's memory; asks for the strides where they are not known. -1 with an exception set. */
int geometry_on_host(PyObject *t, Geometry *g) {
    if (g->cpu < 0) {
        PyObject *answer = PyObject_GetAttr(t, n_is_cpu);
        g->cpu = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
    }
    if (g->cpu <= 0) return g->cpu;
    return geometry_strides(t, g) ? -1 : 1;
}

/* Asks for the strides where they are not known. -1 with an exception set. */
int geometry_strides(PyObject *t, Geometry *g) {
    if (g->strides || !g->nd) return 0;
    PyObject *strides = PyObject_CallMethodObjArgs(t, n_stride, NULL);
    for (int i = 0; strides && i < g->nd; i++) g->own[MAX_DIMS + i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    g->strides = g->own + MAX_DIMS;
    Py_XDECREF(strides);
    return PyErr_Occurred() ? -1 : 0;
}

int geometry_is_contiguous(const Geometry *g) {
    int64_t expected = 1;
    for (int i = 0; i < g->nd; i++)
        if (g->sizes[i] == 0) return 1;
    for (int i = g->nd - 1; i >= 0; i--) {
        if (g->sizes[i] != 1 && g->strides[i] != expected) return 0;
        expected *= g->sizes[i];
    }
    return 1;
}

/* ---- shapes: each a tuple that is made once, so that equal shapes are one object ----------------------------------------------- */

#define MOST_SHAPES 4096

struct Shape {
    PyObject *tuple;
    int64_t *sizes;
    uint64_t hash;
    int nd;
};

static int is_shape(const Shape *shape, const Geometry *g) {
    return shape->nd == g->nd && !memcmp(shape->sizes, g->sizes, (size_t)g->nd * sizeof *g->sizes);
}

static PyObject *shape_tuple(const Geometry *g) {
    PyObject *tuple = PyTuple_New(g->nd);
    for (int i = 0; tuple && i < g->nd; i++) {
        PyObject *size = PyLong_FromLongLong(g->sizes[i]);
        if (size) PyTuple_SetItem(tuple, i, size);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

static int shapes_grow(Shapes *self) {
    size_t room = self->room ? self->room * 2 : 64;
    Shape *table = PyMem_Calloc(room, sizeof *table);
    if (!table) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->room; i++) {
        if (!self->table[i].tuple) continue;
        size_t at = self->table[i].hash & (room - 1);
        while (table[at].tuple) at = (at + 1) & (room - 1);
        table[at] = self->table[i];
    }
    PyMem_Free(self->table);
    self->table = table, self->room = room;
    return 0;
}

void shapes_clear(Shapes *self) {
    Shape *table = self->table;
    size_t room = self->room;
    *self = (Shapes){0};
    for (size_t i = 0; i < room; i++) {
        Py_XDECREF(table[i].tuple);
        PyMem_Free(table[i].sizes);
    }
    PyMem_Free(table);
}

/* The shape as a tuple. A new reference, or NULL with an exception set. */
PyObject *shapes_find(Shapes *self, const Geometry *g) {
    uint64_t hash = (uint64_t)g->nd + 1;
    for (int i = 0; i < g->nd; i++) hash = (hash ^ (uint64_t)g->sizes[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    if (self->used == MOST_SHAPES) shapes_clear(self); /* shapes that change without end: known ones are met again */
    if (self->used * 2 >= self->room && shapes_grow(self)) return NULL;
    size_t at = hash & (self->room - 1);
    for (; self->table[at].tuple; at = (at + 1) & (self->room - 1))
        if (self->table[at].hash == hash && is_shape(&self->table[at], g)) return Py_NewRef(self->table[at].tuple);
    PyObject *tuple = shape_tuple(g);
    int64_t *sizes = PyMem_Malloc((size_t)g->nd * sizeof *sizes); /* not NULL where there are none */
    if (!tuple || !sizes) {
        Py_XDECREF(tuple), PyMem_Free(sizes);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    memcpy(sizes, g->sizes, (size_t)g->nd * sizeof *sizes);
    self->table[at] = (Shape){Py_NewRef(tuple), sizes, hash, g->nd};
    self->used++;
    return tuple;
}

int geometry_fill(PyObject *module) {
    (void)module;
    n_data_ptr = PyUnicode_InternFromString("data_ptr"), n_shape = PyUnicode_InternFromString("shape");
    n_is_cpu = PyUnicode_InternFromString("is_cpu"), n_stride = PyUnicode_InternFromString("stride");
    return n_data_ptr && n_shape && n_is_cpu && n_stride ? 0 : -1;
}
