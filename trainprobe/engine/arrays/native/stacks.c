/* Call stacks as numbers (see engine/core/stacks.py, which turns them into text). */
#include <string.h>

#include "objects.h"

#define DEEPEST 2000

typedef struct {
    const void *code;
    Py_ssize_t instruction;
} Frame;

typedef struct {
    uint64_t hash;
    Py_ssize_t base, length, number;
    Frame *frames; /* the code objects are held by `stacks` */
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *stacks; /* list of (base, ((code, instruction), …)), by number */
    Known *table;
    Py_ssize_t used, room; /* room: a power of two */
} Stacks;

PyTypeObject *stacks_type;
static PyObject *name_back, *name_lasti;

static int stacks_grow(Stacks *self) {
    Py_ssize_t room = self->room ? self->room * 2 : 256;
    Known *table = PyMem_Calloc((size_t)room, sizeof *table);
    if (!table) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < self->room; i++) {
        if (!self->table[i].frames) continue;
        size_t at = self->table[i].hash & (size_t)(room - 1);
        while (table[at].frames) at = (at + 1) & (size_t)(room - 1);
        table[at] = self->table[i];
    }
    PyMem_Free(self->table);
    self->table = table, self->room = room;
    return 0;
}

static PyObject *stack_of(PyObject *frame, Py_ssize_t skip, const Frame *frames, Py_ssize_t length, Py_ssize_t base) {
    PyObject *own = PyTuple_New(length);
    Py_INCREF(frame);
    for (Py_ssize_t i = 0; own && i < length + skip; i++) {
        if (i >= skip) {
            PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
            PyObject *pair = Py_BuildValue(
                "(Nn)", code, frames[i - skip].instruction); /* holds the code: its address is not reused */
            if (!pair) Py_CLEAR(own);
            else PyTuple_SetItem(own, i - skip, pair);
        }
        PyObject *below = PyObject_GetAttr(frame, name_back);
        Py_DECREF(frame);
        frame = below;
        if (!frame) Py_CLEAR(own);
        if (!frame || frame == Py_None) break;
    }
    Py_XDECREF(frame);
    return own ? Py_BuildValue("(nN)", base, own) : NULL;
}

static Py_ssize_t stacks_number(Stacks *self, PyObject *first, int skip, const Frame *frames, Py_ssize_t length,
                                Py_ssize_t base) {
    uint64_t hash = (uint64_t)base * 0x9E3779B97F4A7C15u;
    for (Py_ssize_t i = 0; i < length; i++) {
        hash = (hash ^ (uint64_t)(uintptr_t)frames[i].code) * 0xD6E8FEB86659FD93u;
        hash = (hash ^ (uint64_t)frames[i].instruction ^ (hash >> 29)) * 0xD6E8FEB86659FD93u;
    }
    hash ^= hash >> 32;
    if (self->used * 2 >= self->room && stacks_grow(self)) return -2;
    size_t at = hash & (size_t)(self->room - 1);
    for (; self->table[at].frames; at = (at + 1) & (size_t)(self->room - 1)) {
        Known *known = &self->table[at];
        if (known->hash == hash && known->base == base && known->length == length &&
            !memcmp(known->frames, frames, (size_t)length * sizeof *frames))
            return known->number;
    }
    Frame *copy = PyMem_Malloc((size_t)(length + 1) * sizeof *copy);
    if (!copy) return PyErr_NoMemory(), -2;
    memcpy(copy, frames, (size_t)length * sizeof *copy);
    PyObject *stack = stack_of(first, skip, frames, length, base);
    Py_ssize_t number = PyList_Size(self->stacks);
    if (!stack || PyList_Append(self->stacks, stack)) {
        Py_XDECREF(stack);
        PyMem_Free(copy);
        return -2;
    }
    Py_DECREF(stack);
    self->table[at] = (Known){hash, base, length, number, copy};
    self->used++;
    return number;
}

/* The walk ends at the code object or the frame `stop`, which is not part of the stack; where it is never met `base` is
 * not used. */
Py_ssize_t stacks_capture(PyObject *stacks, Py_ssize_t base, const void *stop, int skip) {
    Frame frames[DEEPEST];
    Py_ssize_t length = 0, number = -2;
    PyObject *first = (PyObject *)PyEval_GetFrame(), *frame = first;
    if (!frame) return -1;
    Py_INCREF(first);
    Py_INCREF(frame);
    for (int seen = 0; frame != Py_None && frame != stop && length < DEEPEST; seen++) {
        if (seen >= skip) {
            PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
            Py_DECREF(code); /* the frame holds it */
            if (code == stop) break;
            PyObject *instruction = PyObject_GetAttr(frame, name_lasti);
            if (!instruction) goto done;
            frames[length++] = (Frame){code, PyLong_AsSsize_t(instruction)};
            Py_DECREF(instruction);
        }
        PyObject *below = PyObject_GetAttr(frame, name_back);
        if (!below) goto done;
        Py_DECREF(frame);
        frame = below;
    }
    number =
        stacks_number((Stacks *)stacks, first, skip, frames, length, frame == Py_None || length == DEEPEST ? -1 : base);
done:
    Py_DECREF(frame);
    Py_DECREF(first);
    return number;
}

static PyObject *capture(Stacks *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 2) return PyErr_Format(PyExc_TypeError, "capture takes base, stop, depth");
    Py_ssize_t base = PyLong_AsSsize_t(args[0]);
    void *stop = PyLong_AsVoidPtr(args[1]);
    long depth = nargs > 2 ? PyLong_AsLong(args[2]) : 2;
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t number = stacks_capture((PyObject *)self, base, stop ? stop : (void *)self, (int)depth - 1);
    return number == -2 ? NULL : PyLong_FromSsize_t(number);
}

static PyObject *stacks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *stacks;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &stacks) || kwargs) return NULL;
    Stacks *self = (Stacks *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(stacks);
    self->stacks = stacks;
    return (PyObject *)self;
}

static void stacks_free(Stacks *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t i = 0; i < self->room; i++) PyMem_Free(self->table[i].frames);
    PyMem_Free(self->table);
    Py_XDECREF(self->stacks);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef stacks_methods[] = {
    {"capture", (PyCFunction)(void (*)(void))capture, METH_FASTCALL,
     "capture(base, stop, depth) -> number\n\nSee engine.core.stacks.Stacks.capture; "
     "depth counts as if this were a Python function."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot stacks_slots[] = {
    {Py_tp_new, stacks_new},
    {Py_tp_dealloc, stacks_free},
    {Py_tp_methods, stacks_methods},
    {Py_tp_doc, "Numbers call stacks; new ones are appended to the list it was made with."},
    {0, NULL}};

static PyType_Spec stacks_spec = {"trainprobe._native.StackTable", sizeof(Stacks), 0, Py_TPFLAGS_DEFAULT, stacks_slots};

int stacks_fill(PyObject *module) {
    name_back = PyUnicode_InternFromString("f_back");
    name_lasti = PyUnicode_InternFromString("f_lasti");
    stacks_type = (PyTypeObject *)PyType_FromSpec(&stacks_spec);
    if (!name_back || !name_lasti || !stacks_type) return -1;
    return PyModule_AddObjectRef(module, "StackTable", (PyObject *)stacks_type);
}
