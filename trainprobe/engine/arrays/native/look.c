/* One tensor looked at once: where its elements lie, whether it was seen as it is, and its row; engine/tape.py takes over
   wherever something is rare. */
#include <string.h>

#include "native_tape.h"

#define SUSPECT ((uintptr_t)1 << 40) /* addresses below may be an offset into freed storage: looked at twice */
#define SHAPES_KEPT 4096             /* more of them (sequences of all lengths) are made anew in the next tape */

static PyObject *n_dtype;

/* ---- what is known of dtypes and shapes, kept from tape to tape ----------------------------------------------------------- */

static struct {
    PyTypeObject *tensor; /* the class whose dtypes they are, NULL where nothing is kept */
    int dtypes_known;
    Dtype dtypes[DTYPES_KNOWN];
    Shapes shapes;
} shelf;

void tape_know(Tape *self) {
    if (shelf.tensor != self->plain[0]) return;
    self->dtypes_known = shelf.dtypes_known, self->shapes = shelf.shapes;
    memcpy(self->dtypes, shelf.dtypes, (size_t)shelf.dtypes_known * sizeof *shelf.dtypes);
    shelf.tensor = NULL, shelf.dtypes_known = 0, shelf.shapes = (Shapes){0};
    Py_DECREF((PyObject *)self->plain[0]); /* it was held */
}

void tape_leave_known(Tape *self) {
    if (shelf.tensor || !self->plain[0] || self->shapes.used > SHAPES_KEPT) {
        for (int i = 0; i < self->dtypes_known; i++) Py_XDECREF(self->dtypes[i].dtype), Py_XDECREF(self->dtypes[i].text);
        shapes_clear(&self->shapes);
        return;
    }
    shelf.dtypes_known = self->dtypes_known, shelf.shapes = self->shapes;
    memcpy(shelf.dtypes, self->dtypes, (size_t)self->dtypes_known * sizeof *shelf.dtypes);
    shelf.tensor = (PyTypeObject *)Py_NewRef((PyObject *)self->plain[0]);
}

/* ---- one tensor --------------------------------------------------------------------------------------------------------- */

static const Dtype *dtype_of(Tape *self, PyObject *t, uint32_t kind) {
    for (int i = 0; kind && i < self->dtypes_known; i++)
        if (self->dtypes[i].kind == kind) return &self->dtypes[i];
    PyObject *dtype = PyObject_GetAttr(t, n_dtype);
    if (!dtype) return NULL;
    Py_DECREF(dtype); /* the library holds it */
    int at = 0;
    while (at < self->dtypes_known && self->dtypes[at].dtype != dtype) at++;
    if (at < self->dtypes_known) {
        if (kind) self->dtypes[at].kind = kind;
        return &self->dtypes[at];
    }
    PyObject *described = call_one(self->describe, dtype); /* (text, code) */
    if (!described) return NULL;
    at = self->dtypes_known < DTYPES_KNOWN ? self->dtypes_known++ : DTYPES_KNOWN - 1;
    Dtype *known = &self->dtypes[at];
    Py_XDECREF(known->dtype);
    Py_XDECREF(known->text);
    known->dtype = Py_NewRef(dtype), known->kind = kind;
    known->text = Py_NewRef(PyTuple_GetItem(described, 0));
    known->code = (int)PyLong_AsLong(PyTuple_GetItem(described, 1));
    Py_DECREF(described);
    return known;
}

static Slot *slot_of(Tape *self, long kinds) {
    for (int i = 0; i < ROW_SLOTS && self->slots[i].stats_rows; i++)
        if (self->slots[i].kinds == kinds) return &self->slots[i];
    PyObject *number = PyLong_FromLong(kinds);
    PyObject *opened = number ? call_one(self->open_rows, number) : NULL; /* (row buffer, its native part or None, list) */
    Py_XDECREF(number);
    if (!opened) return NULL;
    int at = 0;
    while (at < ROW_SLOTS - 1 && self->slots[at].stats_rows) at++;
    Slot *slot = &self->slots[at];
    Py_XDECREF(slot->stats_rows), Py_XDECREF(slot->rows), Py_XDECREF(slot->owned);
    slot->kinds = kinds;
    slot->stats_rows = Py_NewRef(PyTuple_GetItem(opened, 0));
    PyObject *rows = PyTuple_GetItem(opened, 1);
    slot->rows = Py_TYPE(rows) == stats_rows_type ? (StatsRows *)Py_NewRef(rows) : NULL;
    slot->owned = Py_NewRef(PyTuple_GetItem(opened, 2));
    Py_DECREF(opened);
    return slot;
}

static int is_complex(int code) { return code == D_C32 || code == D_C64 || code == D_C128; }

/* Whether an expanded tensor has more elements than a fingerprint can walk: torch_arrays.py says so of it. */
static int is_endless(const Geometry *at) {
    int64_t n = 1, repeats = 0;
    for (int i = 0; i < at->nd; i++) {
        n = at->sizes[i] && n > INT64_MAX / at->sizes[i] ? INT64_MAX : n * at->sizes[i];
        repeats |= at->strides && at->strides[i] == 0 && at->sizes[i] > 1;
    }
    return repeats && n > (int64_t)1 << 31;
}

/* Fill a job for the kernel. 1: done, 0: not for the kernel, -1: an exception is set. */
static int job_of(PyObject *t, Geometry *at, int code, long kinds, Job *job) {
    int yes;
    if (code < 0 || (uintptr_t)at->data <= SUSPECT) return 0;
    if ((yes = geometry_on_host(t, at)) <= 0) return yes;
    if ((yes = tensor_is_resolved(t, is_complex(code))) <= 0) return yes;
    job->data = at->data, job->dtype = code, job->flags = (int)kinds;
    if ((kinds & (CHECKSUM | CRC32)) && is_endless(at)) return 0;
    if (geometry_is_contiguous(at)) {
        int64_t n = 1, step = 1;
        for (int i = 0; i < at->nd; i++) n *= at->sizes[i];
        layout(job, 1, &n, &step);
    } else {
        layout(job, at->nd, at->sizes, at->strides);
    }
    return 1;
}

static PyObject *by_python(PyObject *function, PyObject *t, long flags) {
    PyObject *number = PyLong_FromLong(flags);
    PyObject *value = number ? call_two(function, t, number) : NULL;
    Py_XDECREF(number);
    return value;
}

/* The row of its numbers, read or known from another view of the same memory; -1 when it was dropped, -2 with an exception set. */
static Py_ssize_t row_of(Tape *self, PyObject *t, long long version, const Job *job, StatsRows *rows) {
    PyObject *root = self->reuse && version >= 0 ? views_root(t, job) : NULL;
    if (!root) return stats_rows_reduce(rows, job);
    Py_ssize_t row = views_find(&self->views, root, version, job, rows);
    if (row >= 0) self->reused++, row = stats_rows_repeat(rows, row);
    else if ((row = stats_rows_reduce(rows, job)) >= 0 && views_note(&self->views, root, version, job, rows, row)) row = -2;
    Py_DECREF(root);
    return row;
}

/* A Value of a tensor that was not seen, or not with these flags. NULL without an exception: not for the kernel. */
static Value *reduced(Tape *self, PyObject *t, PyObject *shape, Geometry *at, long long version, long flags) {
    const Dtype *dtype = dtype_of(self, t, at->kind);
    Slot *slot = dtype ? slot_of(self, flags & 255) : NULL;
    Job job;
    if (!slot || !slot->rows || job_of(t, at, dtype->code, flags & 255, &job) != 1) return NULL;
    StatsRows *rows = (StatsRows *)Py_NewRef((PyObject *)slot->rows); /* held: a large tensor is reduced while other threads run */
    PyObject *text = dtype->text, *owned = Py_NewRef(slot->owned), *grad = tensor_attribute(t, REQUIRES_GRAD);
    Value *value = grad ? (Value *)PyType_GenericAlloc(value_type, 0) : NULL;
    if (value) {
        static PyObject *kind, *cpu;
        if (!kind) kind = PyUnicode_InternFromString("torch.Tensor"), cpu = PyUnicode_InternFromString("cpu");
        value->type = Py_NewRef(kind), value->device = Py_NewRef(cpu), value->dtype = Py_NewRef(text);
        value->shape = Py_NewRef(shape), value->requires_grad = Py_NewRef(grad);
        value->row = row_of(self, t, version, &job, rows);
        if (value->row == -2 || PyList_Append(owned, (PyObject *)value)) {
            Py_DECREF(value);
            value = NULL;
        } else if (self->journal && value->row >= 0) {
            journal_value(self->journal, value, rows->partials + value->row * COLUMNS, rows->checksums[value->row]);
        }
    }
    Py_XDECREF(grad);
    Py_DECREF(owned);
    Py_DECREF((PyObject *)rows);
    return value;
}

int tape_is_plain(const Tape *self, PyObject *x) { return Py_TYPE(x) == self->plain[0] || Py_TYPE(x) == self->plain[1]; }

/* Its version counter, or -1 for an inference tensor, which has none and is looked at each time; -2 with an exception set. */
static long long version_of(PyObject *t) {
    PyObject *number = tensor_attribute(t, VERSION);
    if (!number) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -2;
        PyErr_Clear();
        return -1;
    }
    long long version = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return version;
}

PyObject *tape_look(Tape *self, PyObject *t, long flags, int held) {
    if (!tape_is_plain(self, t)) return by_python(self->special, t, flags);
    long long version = version_of(t);
    if (version == -2) return NULL;
    int reuse = self->reuse && version >= 0;
    Geometry at;
    PyObject *shape = geometry_read(t, &at) ? NULL : shapes_find(&self->shapes, &at), *answer = NULL;
    if (shape) {
        const Seen *seen = reuse ? seen_find(&self->seen, t) : NULL;
        if (seen && seen->known && seen_is(seen, t) && seen->version == version && seen->data == at.data && seen->shape == shape) {
            if ((seen->flags & flags) == flags) {
                self->reused++;
                Py_DECREF(shape);
                return Py_NewRef((PyObject *)seen->value);
            }
            flags |= seen->flags;
        }
        answer = (PyObject *)reduced(self, t, shape, &at, version, flags);
        reuse = reuse && !(answer && ((Value *)answer)->row < 0); /* a reduction that was dropped is none */
    }
    if (!answer && !(PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError))) {
        PyErr_Clear(); /* on another device, or without data of its own (torch.func), or nested */
        answer = by_python(self->slow, t, flags);
        reuse = reuse && answer && Py_TYPE(answer) == value_type;
    }
    if (answer && reuse && shape && seen_note(&self->seen, (Seen){t, NULL, shape, (Value *)answer, at.data, version, flags, held})) Py_CLEAR(answer);
    Py_XDECREF(shape);
    return answer;
}

/* A small tensor of the host is copied into the arena. */
int tape_gather(Tape *self, PyObject *t, Value *value, PyObject *path) {
    Geometry at;
    if (!self->arena || !value->shape || !value->dtype) return 0;
    if (geometry_read(t, &at)) return PyErr_Occurred() ? -1 : 0;
    const Dtype *dtype = dtype_of(self, t, at.kind);
    if (!dtype || dtype->code < 0) return PyErr_Occurred() ? -1 : 0;
    Job job;
    int fits = job_of(t, &at, dtype->code, CRC32, &job); /* a CRC wants the logical order too */
    return fits == 1 ? arena_keep((Arena *)self->arena, path, value->dtype, value->shape, &job) : fits;
}

int look_fill(PyObject *module) {
    (void)module;
    n_dtype = PyUnicode_InternFromString("dtype");
    return n_dtype ? 0 : -1;
}
