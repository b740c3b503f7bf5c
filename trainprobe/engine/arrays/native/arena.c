/* Copies of tensor values on the host, gathered in chunks on their way to the writer: one hand-over for hundreds of
   small values, and memory that is used again, since fresh pages cost as much as the copy (see engine/tape.py). */
#include <string.h>

#include "objects.h"

#define FIRST ((size_t)1 << 20)   /* bytes of the first chunk of a run, where all else is small */
#define LARGEST ((size_t)8 << 20) /* bytes of a chunk, and up to which a value is gathered */
#define SPARE 16                  /* chunks of the largest size that are kept for the next */
#define ALIGN 8
#define PAGE                                                                       \
    4096 /* a chunk begins at one, so that the disk can read it where it lies (see \
            engine/storage/dumps/direct_file.py) */

typedef struct {
    PyObject *key, *dtype, *shape; /* dtype: as in Value.dtype */
    size_t offset, size;
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *bytes; /* they hold the chunk, from `skipped` on; what lies behind `used` is not part of it */
    Entry *entries;
    Py_ssize_t n, room;
    size_t skipped, used, size;
} Chunk;

struct Arena {
    PyObject_HEAD
    PyObject *names, *submit; /* names: a dict with the dtypes that are gathered */
    Chunk *chunk;
    size_t next; /* bytes of the next chunk */
};

static PyTypeObject *arena_type, *chunk_type;
static PyObject *spare[SPARE];
static int spares;

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

static Chunk *chunk_new(size_t size) {
    Chunk *self = (Chunk *)PyType_GenericAlloc(chunk_type, 0);
    if (!self) return NULL;
    self->size = size;
    self->bytes =
        size == LARGEST && spares ? spare[--spares] : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(size + PAGE - 1));
    if (!self->bytes) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->skipped = (PAGE - (uintptr_t)PyBytes_AsString(self->bytes) % PAGE) % PAGE;
    return self;
}

static Entry *chunk_entry(Chunk *self) {
    if (self->n == self->room) {
        Py_ssize_t room = self->room ? self->room * 2 : 256;
        Entry *entries = PyMem_Realloc(self->entries, (size_t)room * sizeof *entries);
        if (!entries) return (Entry *)PyErr_NoMemory();
        self->entries = entries, self->room = room;
    }
    return &self->entries[self->n++];
}

static void chunk_free(Chunk *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Py_DECREF(self->entries[i].key);
        Py_DECREF(self->entries[i].dtype);
        Py_DECREF(self->entries[i].shape);
    }
    PyMem_Free(self->entries);
    int alone = self->bytes && Py_REFCNT(self->bytes) == 1; /* no view of it is left */
    if (alone && self->size == LARGEST && spares < SPARE) spare[spares++] = self->bytes;
    else Py_XDECREF(self->bytes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *chunk_data(Chunk *self, void *unused) {
    (void)unused;
    PyObject *whole = PyMemoryView_FromObject(self->bytes), *from = PyLong_FromSize_t(self->skipped),
             *to = PyLong_FromSize_t(self->skipped + self->used);
    PyObject *range = from && to ? PySlice_New(from, to, NULL) : NULL,
             *view = whole && range ? PyObject_GetItem(whole, range) : NULL;
    Py_XDECREF(whole), Py_XDECREF(from), Py_XDECREF(to), Py_XDECREF(range);
    return view;
}

static PyObject *chunk_nbytes(Chunk *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(self->used);
}

static PyObject *chunk_keys(Chunk *self, PyObject *unused) {
    (void)unused;
    PyObject *keys = PyList_New(self->n);
    for (Py_ssize_t i = 0; keys && i < self->n; i++) PyList_SetItem(keys, i, Py_NewRef(self->entries[i].key));
    return keys;
}

static PyObject *chunk_items(Chunk *self, PyObject *unused) {
    (void)unused;
    PyObject *items = PyList_New(self->n);
    for (Py_ssize_t i = 0; items && i < self->n; i++) {
        Entry *e = &self->entries[i];
        PyObject *item =
            Py_BuildValue("(OOOnn)", e->key, e->dtype, e->shape, (Py_ssize_t)e->offset, (Py_ssize_t)e->size);
        if (!item) Py_CLEAR(items);
        else PyList_SetItem(items, i, item);
    }
    return items;
}

static PyGetSetDef chunk_getset[] = {{"data", (getter)chunk_data, NULL, "The bytes of all values, a memoryview.", NULL},
                                     {"nbytes", (getter)chunk_nbytes, NULL, "How many bytes they are.", NULL},
                                     {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef chunk_methods[] = {
    {"keys", (PyCFunction)chunk_keys, METH_NOARGS, "keys() -> the keys of the values, in order."},
    {"items", (PyCFunction)chunk_items, METH_NOARGS, "items() -> [(key, dtype, shape, offset, bytes), …]."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot chunk_slots[] = {
    {Py_tp_dealloc, chunk_free},
    {Py_tp_getset, chunk_getset},
    {Py_tp_methods, chunk_methods},
    {Py_tp_doc, "Values of a step, one behind the other, each at a multiple of eight bytes."},
    {0, NULL}};
static PyType_Spec chunk_spec = {"trainprobe._native.Chunk", sizeof(Chunk), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, chunk_slots};

/* ---- copying ----------------------------------------------------------------------------------------------------- */

static char *copy_axis(const Dims *dims, int axis, const char *from, char *to, size_t item) {
    if (axis == dims->nd) {
        memcpy(to, from, item);
        return to + item;
    }
    int64_t n = dims->size[axis], step = dims->stride[axis];
    if (axis == dims->nd - 1 && step == (int64_t)item) {
        memcpy(to, from, (size_t)n * item);
        return to + (size_t)n * item;
    }
    for (int64_t i = 0; i < n; i++) to = copy_axis(dims, axis + 1, from + i * step, to, item);
    return to;
}

int arena_flush(Arena *self) {
    Chunk *chunk = self->chunk;
    if (!chunk) return 0;
    self->chunk = NULL;
    self->next = chunk->used * 2 < FIRST ? FIRST : LARGEST;
    PyObject *done = call_one(self->submit, (PyObject *)chunk);
    Py_DECREF((PyObject *)chunk);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* 1: kept, 0: too large or of a dtype without a name, -1: an exception is set. job: its elements in logical order. */
int arena_keep(Arena *self, PyObject *key, PyObject *dtype, PyObject *shape, const Job *job) {
    size_t item = (size_t)item_size[job->dtype], size = (size_t)job->n * item,
           taken = (size + ALIGN - 1) / ALIGN * ALIGN;
    if (taken > LARGEST || !PyUnicode_Check(key)) return 0;
    int named = PyDict_Contains(self->names, dtype);
    if (named <= 0) return named;
    if (self->chunk && self->chunk->used + taken > self->chunk->size && arena_flush(self)) return -1;
    if (!self->chunk && !(self->chunk = chunk_new(taken > self->next ? LARGEST : self->next))) return -1;
    Chunk *chunk = self->chunk;
    Entry *entry = chunk_entry(chunk);
    if (!entry) return -1;
    char *to = PyBytes_AsString(chunk->bytes) + chunk->skipped + chunk->used;
    *entry = (Entry){Py_NewRef(key), Py_NewRef(dtype), Py_NewRef(shape), chunk->used, size};
    copy_axis(&job->memory, 0, job->data, to, item);
    memset(to + size, 0, taken - size);
    chunk->used += taken;
    return 1;
}

/* ---- the arena --------------------------------------------------------------------------------------------------- */

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *names, *submit;
    if (kwargs || !PyArg_ParseTuple(args, "O!O", &PyDict_Type, &names, &submit)) return NULL;
    Arena *self = (Arena *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->names = Py_NewRef(names), self->submit = Py_NewRef(submit), self->next = FIRST;
    return (PyObject *)self;
}

static PyObject *flush(Arena *self, PyObject *unused) {
    (void)unused;
    return arena_flush(self) ? NULL : Py_NewRef(Py_None);
}

static int arena_traverse(Arena *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->submit);
    return 0;
}

static int arena_clear(Arena *self) {
    Py_CLEAR(self->submit);
    return 0;
}

static void arena_free(Arena *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    arena_clear(self);
    Py_CLEAR(self->names);
    Py_XDECREF((PyObject *)self->chunk);
    while (spares) Py_DECREF(spare[--spares]); /* a run is over: its memory is given back */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *drop(Arena *self, PyObject *unused) {
    (void)unused;
    Py_CLEAR(self->chunk);
    return Py_NewRef(Py_None);
}

static PyMethodDef arena_methods[] = {
    {"flush", (PyCFunction)flush, METH_NOARGS, "flush(): hand over what was gathered."},
    {"drop", (PyCFunction)drop, METH_NOARGS, "drop(): let go of what was gathered."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot arena_slots[] = {
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_free},
    {Py_tp_traverse, arena_traverse},
    {Py_tp_clear, arena_clear},
    {Py_tp_methods, arena_methods},
    {Py_tp_doc, "Arena(names, submit): gathers values and gives chunks of them to submit."},
    {0, NULL}};
static PyType_Spec arena_spec = {"trainprobe._native.Arena", sizeof(Arena), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 arena_slots};

int arena_check(PyObject *x) { return Py_TYPE(x) == arena_type; }

int arena_fill(PyObject *module) {
    chunk_type = (PyTypeObject *)PyType_FromSpec(&chunk_spec);
    arena_type = (PyTypeObject *)PyType_FromSpec(&arena_spec);
    if (!chunk_type || !arena_type) return -1;
    return PyModule_AddObjectRef(module, "Arena", (PyObject *)arena_type);
}
