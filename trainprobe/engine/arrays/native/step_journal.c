/* The journal of a step: what it has brought so far, written as it comes into memory that outlives the process (see
   engine/storage/step_journal.py, which reads it and says what the records mean). */
#include <string.h>

#include "objects.h"

#define HEAD 24
#define DEEPEST 400
#define WHOLE 0xFFFF

typedef struct {
    PyObject_HEAD
    char *base; /* NULL: nothing is written */
    uint64_t room, used, left_out;
    uint64_t epoch;  /* of the step: what carries it was written; 0 between two steps */
    int full;        /* what does not fit is left out from there on */
    PyObject *owner; /* of the memory */
} StepJournal;

static PyTypeObject *journal_type;
static PyObject *n_type;

/* ---- one record -------------------------------------------------------------------------------------------------- */

typedef struct {
    StepJournal *journal;
    char *start, *at, *end;
    int bad;
} Pen;

static Pen record(StepJournal *self, char kind) {
    Pen p = {self, self->base + HEAD + self->used, NULL, self->base + self->room, self->full};
    if (!p.bad && p.end - p.start < 5) p.bad = 1;
    p.at = p.start + 5;
    if (!p.bad) p.start[4] = kind;
    return p;
}

static void write_bytes(Pen *p, const void *data, size_t size) {
    if (p->bad || (size_t)(p->end - p->at) < size) {
        p->bad = 1;
        return;
    }
    memcpy(p->at, data, size);
    p->at += size;
}

#define WRITE(p, x) write_bytes(p, &(x), sizeof(x))

static void write_byte(Pen *p, int x) {
    uint8_t byte = (uint8_t)x;
    WRITE(p, byte);
}

static void write_id(Pen *p, const void *x) {
    uint64_t id = (uint64_t)(uintptr_t)x;
    WRITE(p, id);
}

static void write_integer(Pen *p, int64_t x) { WRITE(p, x); }

static void write_text(Pen *p, PyObject *x) { /* NULL, or what is no text: empty */
    Py_ssize_t size = 0;
    const char *data = x && PyUnicode_Check(x) ? PyUnicode_AsUTF8AndSize(x, &size) : NULL;
    if (!data) PyErr_Clear();
    uint16_t length = (uint16_t)(!data ? 0 : size > WHOLE ? WHOLE : size);
    WRITE(p, length);
    write_bytes(p, data ? data : "", length);
}

/* The record counts from now on: its bytes are there before the number that says so. */
static void finish(Pen *p) {
    StepJournal *self = p->journal;
    if (p->bad) {
        self->full = 1;
        self->left_out++;
        memcpy(self->base + 16, &self->left_out, 8);
        return;
    }
    uint32_t size = (uint32_t)(p->at - p->start);
    memcpy(p->start, &size, sizeof size);
    self->used += size;
    __atomic_store_n((uint64_t *)self->base, self->used, __ATOMIC_RELEASE);
}

/* ---- values and trees -------------------------------------------------------------------------------------------- */

static void describe(Pen *p, const Value *v, const double *row, uint64_t checksum) {
    Py_ssize_t nd = v->shape && PyTuple_Check(v->shape) ? PyTuple_Size(v->shape) : 0;
    int grad = v->requires_grad == Py_True ? 2 : v->requires_grad == Py_False ? 4 : 0;
    write_id(p, v);
    write_byte(p, (row ? 1 : 0) | grad);
    write_byte(p, (int)(nd > 255 ? 255 : nd));
    for (Py_ssize_t i = 0; i < nd && i < 255; i++) write_integer(p, PyLong_AsLongLong(PyTuple_GetItem(v->shape, i)));
    if (PyErr_Occurred()) PyErr_Clear();
    write_text(p, v->type), write_text(p, v->dtype), write_text(p, v->device), write_text(p, v->note);
    if (!row) return;
    uint16_t mask = 0;
    _Static_assert(COLUMNS <= 8 * sizeof mask, "the mask of a row has a bit a column");
    for (int i = 0; i < COLUMNS; i++) mask |= (uint16_t)(row[i] != 0) << i;
    WRITE(p, mask);
    for (int i = 0; i < COLUMNS; i++)
        if (mask >> i & 1) write_bytes(p, &row[i], sizeof row[i]);
    WRITE(p, checksum);
}

static void write_tree(Pen *p, PyObject *x, int depth) {
    PyTypeObject *kind = x ? Py_TYPE(x) : NULL;
    if (!x || x == Py_None || depth > DEEPEST) {
        write_byte(p, 'n');
    } else if (kind == value_type) {
        Value *v = (Value *)x;
        if (v->epoch == p->journal->epoch) {
            write_byte(p, 'v'), write_id(p, v);
        } else {
            write_byte(p, 'w'), describe(p, v, NULL, 0);
        }
    } else if (kind == &PyBool_Type) {
        write_byte(p, x == Py_True ? 't' : 'f');
    } else if (kind == &PyLong_Type) {
        int beyond = 0;
        long long number = PyLong_AsLongLongAndOverflow(x, &beyond);
        write_byte(p, beyond ? 'n' : 'i');
        if (!beyond) write_integer(p, number);
    } else if (kind == &PyFloat_Type) {
        double number = PyFloat_AsDouble(x);
        write_byte(p, 'd'), WRITE(p, number);
    } else if (kind == &PyUnicode_Type) {
        write_byte(p, 's'), write_text(p, x);
    } else if (kind == &PyList_Type) {
        uint32_t n = (uint32_t)PyList_Size(x);
        write_byte(p, 'l'), WRITE(p, n);
        for (uint32_t i = 0; i < n && !p->bad; i++) write_tree(p, PyList_GetItem(x, i), depth + 1);
    } else if (kind == &PyDict_Type) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        uint32_t n = (uint32_t)PyDict_Size(x);
        write_byte(p, 'm'), WRITE(p, n);
        while (!p->bad && PyDict_Next(x, &at, &key, &item)) write_text(p, key), write_tree(p, item, depth + 1);
    } else { /* of an Opaque its type */
        PyObject *type = PyObject_GetAttr(x, n_type);
        if (!type) PyErr_Clear();
        write_byte(p, 'o'), write_text(p, type);
        Py_XDECREF(type);
    }
}

/* ---- what the other parts tell ----------------------------------------------------------------------------------- */

int journal_check(PyObject *x) { return Py_TYPE(x) == journal_type; }

void journal_value(PyObject *journal, Value *v, const double *row, uint64_t checksum) {
    StepJournal *self = (StepJournal *)journal;
    if (!self->epoch) return;
    Pen p = record(self, 'V');
    describe(&p, v, row, checksum);
    finish(&p);
    v->epoch = self->epoch;
}

void journal_twin(PyObject *journal, Value *twin, const Value *v) {
    StepJournal *self = (StepJournal *)journal;
    if (!self->epoch || v->epoch != self->epoch) return;
    Pen p = record(self, 'T');
    write_id(&p, twin), write_id(&p, v), write_text(&p, twin->note);
    finish(&p);
    twin->epoch = self->epoch;
}

static void write_call(StepJournal *self, Call *c) {
    Pen p = record(self, 'C');
    int inside = c->parent && Py_TYPE(c->parent) == call_type;
    long long micro = c->micro && PyLong_Check(c->micro) ? PyLong_AsLongLong(c->micro) : INT64_MIN;
    if (PyErr_Occurred()) PyErr_Clear();
    write_id(&p, c), write_id(&p, inside ? c->parent : NULL);
    write_integer(&p, c->call), write_integer(&p, micro);
    write_text(&p, c->kind), write_text(&p, c->name), write_text(&p, c->phase), write_text(&p, c->cls);
    write_text(&p, c->node), write_text(&p, c->parent);
    finish(&p);
    c->epoch = self->epoch;
}

void journal_call(PyObject *journal, Call *c, int fields) {
    StepJournal *self = (StepJournal *)journal;
    if (!self->epoch) return;
    if (c->epoch != self->epoch) write_call(self, c);
    PyObject *trees[] = {c->args, c->kwargs, c->out, c->params};
    for (int i = 0; i < 4; i++) {
        if (!(fields >> i & 1) || !trees[i] || trees[i] == Py_None) continue;
        Pen p = record(self, 'F');
        write_id(&p, c), write_byte(&p, i), write_tree(&p, trees[i], 0);
        finish(&p);
    }
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *begin(StepJournal *self, PyObject *args) {
    static uint64_t steps; /* the upper bit keeps apart from the numbers of logs (text.c) */
    long long step;
    const char *about;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Ly#", &step, &about, &size)) return NULL;
    if (!self->base) return Py_NewRef(Py_None);
    self->used = self->left_out = 0, self->full = 0;
    self->epoch = (uint64_t)1 << 63 | ++steps;
    __atomic_store_n((uint64_t *)self->base, 0, __ATOMIC_RELEASE);
    int64_t number = step;
    memcpy(self->base + 8, &number, 8);
    memcpy(self->base + 16, &self->left_out, 8);
    Pen p = record(self, 'H');
    write_bytes(&p, about, (size_t)size);
    finish(&p);
    return Py_NewRef(Py_None);
}

static PyObject *end(StepJournal *self, PyObject *unused) {
    (void)unused;
    self->used = 0, self->epoch = 0;
    if (self->base) __atomic_store_n((uint64_t *)self->base, 0, __ATOMIC_RELEASE);
    return Py_NewRef(Py_None);
}

static PyObject *let_go(StepJournal *self, PyObject *unused) {
    (void)unused;
    self->base = NULL, self->epoch = 0;
    Py_CLEAR(self->owner);
    return Py_NewRef(Py_None);
}

static PyObject *value(StepJournal *self, PyObject *args) {
    PyObject *v;
    const char *row = NULL;
    Py_ssize_t size = 0;
    unsigned long long checksum = 0;
    double numbers[COLUMNS];
    if (!PyArg_ParseTuple(args, "O!z#K", value_type, &v, &row, &size, &checksum)) return NULL;
    if (row && size != sizeof numbers)
        return PyErr_Format(PyExc_ValueError, "a row of partials has %zd bytes, not %zd", sizeof numbers, size);
    if (row) memcpy(numbers, row, sizeof numbers);
    journal_value((PyObject *)self, (Value *)v, row ? numbers : NULL, checksum);
    return Py_NewRef(Py_None);
}

static PyObject *twin(StepJournal *self, PyObject *args) {
    PyObject *other, *v;
    if (!PyArg_ParseTuple(args, "O!O!", value_type, &other, value_type, &v)) return NULL;
    journal_twin((PyObject *)self, (Value *)other, (Value *)v);
    return Py_NewRef(Py_None);
}

static PyObject *call(StepJournal *self, PyObject *c) {
    if (Py_TYPE(c) != call_type) return PyErr_Format(PyExc_TypeError, "call takes a Call");
    journal_call((PyObject *)self, (Call *)c, ARGS | KWARGS | OUT | PARAMS);
    return Py_NewRef(Py_None);
}

static PyObject *scalar(StepJournal *self, PyObject *args) {
    PyObject *name, *x;
    if (!PyArg_ParseTuple(args, "UO", &name, &x)) return NULL;
    if (!self->epoch) return Py_NewRef(Py_None);
    Pen p = record(self, 'S');
    write_text(&p, name), write_tree(&p, x, 0);
    finish(&p);
    return Py_NewRef(Py_None);
}

static PyObject *batch(StepJournal *self, PyObject *number) {
    uint64_t fingerprint = PyLong_AsUnsignedLongLongMask(number);
    if (PyErr_Occurred()) return NULL;
    if (!self->epoch) return Py_NewRef(Py_None);
    Pen p = record(self, 'B');
    WRITE(&p, fingerprint);
    finish(&p);
    return Py_NewRef(Py_None);
}

/* row_of(rows, row) -> (its partials as bytes, its fingerprint) */
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

static PyObject *journal_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *address, *owner;
    Py_ssize_t room;
    if (kwargs || !PyArg_ParseTuple(args, "OnO", &address, &room, &owner)) return NULL;
    char *base = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    if (!base || (uintptr_t)base % 8 || room < HEAD)
        return PyErr_Format(PyExc_ValueError, "a journal needs aligned memory of at least %d bytes", HEAD);
    StepJournal *self = (StepJournal *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->base = base, self->room = (uint64_t)room, self->owner = Py_NewRef(owner);
    memset(base, 0, HEAD);
    return (PyObject *)self;
}

static void journal_free(StepJournal *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef journal_methods[] = {
    {"begin", (PyCFunction)begin, METH_VARARGS, "begin(step, about): a step begins."},
    {"end", (PyCFunction)end, METH_NOARGS, "end(): the step is kept elsewhere."},
    {"close", (PyCFunction)let_go, METH_NOARGS, "close(): let go of the memory; what comes afterwards is dropped."},
    {"value", (PyCFunction)value, METH_VARARGS,
     "value(value, row, checksum): a value was looked at; row: bytes, None while it is on a device."},
    {"twin", (PyCFunction)twin, METH_VARARGS, "twin(twin, value): the same value with a note of its own."},
    {"call", (PyCFunction)call, METH_O, "call(call): a call as it is now."},
    {"scalar", (PyCFunction)scalar, METH_VARARGS, "scalar(name, x): a scalar of the step."},
    {"batch", (PyCFunction)batch, METH_O, "batch(fingerprint): what the model was called with."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot journal_slots[] = {
    {Py_tp_new, journal_new},
    {Py_tp_dealloc, journal_free},
    {Py_tp_methods, journal_methods},
    {Py_tp_doc, "StepJournal(address, size, owner): see engine.storage.step_journal.StepJournal."},
    {0, NULL}};
static PyType_Spec journal_spec = {"trainprobe._native.StepJournal", sizeof(StepJournal), 0, Py_TPFLAGS_DEFAULT,
                                   journal_slots};

static PyMethodDef functions[] = {
    {"row_of", row_of, METH_VARARGS, "row_of(rows, row) -> (partials as bytes, checksum)"}, {NULL, NULL, 0, NULL}};

int journal_fill(PyObject *module) {
    n_type = PyUnicode_InternFromString("type");
    journal_type = (PyTypeObject *)PyType_FromSpec(&journal_spec);
    if (!n_type || !journal_type || PyModule_AddFunctions(module, functions)) return -1;
    return PyModule_AddObjectRef(module, "StepJournal", (PyObject *)journal_type);
}
