/* The tape: looks at each distinct tensor value once. tree.c turns trees of arguments into trees of Values;
   engine/tape.py has the tape and takes over wherever something is rare. */
#include <string.h>

#include "tape.h"

#define SUSPECT ((uintptr_t)1 << 40) /* addresses below may be an offset into freed storage: looked at twice */

/* ---- one tensor -------------------------------------------------------------------------------------------------- */

int tape_is_plain(const Tape *self, PyObject *x) {
    return Py_TYPE(x) == self->plain[0] || Py_TYPE(x) == self->plain[1];
}

const Dtype *dtype_of(Tape *self, PyObject *t) {
    PyObject *dtype = PyObject_GetAttr(t, n_dtype);
    if (!dtype) return NULL;
    Py_DECREF(dtype); /* the library holds it */
    int at = 0;
    while (at < self->dtypes_known && self->dtypes[at].dtype != dtype) at++;
    if (at < self->dtypes_known) return &self->dtypes[at];
    PyObject *described = call_one(self->describe, dtype); /* (text, code) */
    if (!described) return NULL;
    at = self->dtypes_known < DTYPES_KNOWN ? self->dtypes_known++ : DTYPES_KNOWN - 1;
    Dtype *known = &self->dtypes[at];
    Py_XDECREF(known->dtype);
    Py_XDECREF(known->text);
    known->dtype = Py_NewRef(dtype);
    known->text = Py_NewRef(PyTuple_GetItem(described, 0));
    known->code = (int)PyLong_AsLong(PyTuple_GetItem(described, 1));
    Py_DECREF(described);
    return known;
}

/* ---- tensors on devices, reduced many at once -------------------------------------------------------------------- */

/* Looking at a tensor on a device takes a call into Python and a launch, which many tensors share. Those that one hook
   shows are gathered and reduced as it ends, before anything can write to them; those of which Python says that they
   stay as they are, when that ends. */

#define GATHERED ((int64_t)128 << 20) /* bytes that may wait, some of which nobody else holds */
#define MOST_GATHERED 512

static int reduce_gathered(Tape *self, Slot *slot) {
    PyObject *tensors = slot->tensors, *values = slot->values,
             *rows = tensors ? PyList_New(PyList_Size(tensors)) : NULL, *done = NULL;
    if (!tensors) return 0;
    slot->tensors = slot->values = NULL; /* what follows may run other threads */
    for (Py_ssize_t i = 0; rows && i < PyList_Size(rows); i++) {
        PyObject *row = PyLong_FromSsize_t(((Value *)PyList_GetItem(values, i))->row);
        if (row) PyList_SetItem(rows, i, row);
        else Py_CLEAR(rows);
    }
    PyObject *stats_rows = Py_NewRef(slot->stats_rows);
    if (rows) done = PyObject_CallMethodObjArgs(stats_rows, n_add_all, tensors, rows, NULL);
    if (!done && PyErr_ExceptionMatches(PyExc_Exception)) { /* one of them cannot be read: the others are */
        PyErr_Clear();
        done = PyObject_CallFunctionObjArgs(self->one_by_one, stats_rows, tensors, values, NULL);
    }
    Py_DECREF(stats_rows), Py_DECREF(tensors), Py_DECREF(values);
    Py_XDECREF(rows), Py_XDECREF(done);
    return done ? 0 : -1;
}

static int reduce_all_gathered(Tape *self) {
    int failed = 0;
    self->waiting = 0, self->gathered = 0;
    for (int i = 0; i < ROW_SLOTS; i++) failed |= reduce_gathered(self, &self->slots[i]);
    return failed ? -1 : 0;
}

/* Another thread gathers nothing meanwhile: what it shows is reduced at once. */
int tape_gather_begin(Tape *self) {
    unsigned long me = PyThread_get_thread_ident();
    if (self->gathering && self->gatherer != me) return 0;
    self->gatherer = me, self->gathering++;
    return 1;
}

int tape_gather_end(Tape *self, int begun) {
    if (!begun || --self->gathering || !self->waiting) return 0;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    int failed = reduce_all_gathered(self);
    if (!type) return failed;
    PyErr_Restore(type, error, trace);
    return -1;
}

Slot *slot_of(Tape *self, long kinds) {
    for (int i = 0; i < ROW_SLOTS && self->slots[i].stats_rows; i++)
        if (self->slots[i].kinds == kinds) return &self->slots[i];
    PyObject *number = PyLong_FromLong(kinds);
    PyObject *opened =
        number ? call_one(self->open_rows, number) : NULL; /* (row buffer, its native part or None, list) */
    Py_XDECREF(number);
    if (!opened) return NULL;
    int at = 0;
    while (at < ROW_SLOTS - 1 && self->slots[at].stats_rows) at++;
    Slot *slot = &self->slots[at];
    if (reduce_gathered(self, slot)) {
        Py_DECREF(opened);
        return NULL;
    }
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

/* The row of its numbers, read or known from another view of the same memory; -1 when it was dropped, -2 with an
 * exception set. */
static Py_ssize_t row_of(Tape *self, PyObject *t, long long version, const Job *job, StatsRows *rows) {
    PyObject *root = self->reuse && version >= 0 ? views_root(t, job) : NULL;
    if (!root) return stats_rows_reduce(rows, job);
    Py_ssize_t row = views_find(&self->views, root, version, job, rows);
    if (row >= 0) self->reused++, row = stats_rows_repeat(rows, row);
    else if ((row = stats_rows_reduce(rows, job)) >= 0 && views_note(&self->views, root, version, job, rows, row))
        row = -2;
    Py_DECREF(root);
    return row;
}

/* Say how the elements of a tensor lie in memory, where that is not one after the other. */
static int note_layout(PyObject *t, Geometry *at, Value *value) {
    if (value->extra || !at->nd || geometry_strides(t, at)) return PyErr_Occurred() ? -1 : 0;
    if (geometry_is_contiguous(at)) return 0;
    PyObject *strides = PyList_New(at->nd);
    for (int i = 0; strides && i < at->nd; i++) {
        PyObject *stride = PyLong_FromLongLong(at->strides[i]);
        if (stride) PyList_SetItem(strides, i, stride);
        else Py_CLEAR(strides);
    }
    value->extra = strides ? Py_BuildValue("{sN}", "stride", strides) : NULL;
    return value->extra ? 0 : -1;
}

static Value *value_of(PyObject *t, PyObject *dtype, PyObject *shape) {
    static PyObject *kind, *cpu;
    if (!kind) kind = PyUnicode_InternFromString("torch.Tensor"), cpu = PyUnicode_InternFromString("cpu");
    PyObject *grad = tensor_attribute(t, REQUIRES_GRAD);
    Value *value = grad ? (Value *)PyType_GenericAlloc(value_type, 0) : NULL;
    if (value) {
        value->type = Py_NewRef(kind), value->device = Py_NewRef(cpu), value->dtype = Py_NewRef(dtype);
        value->shape = Py_NewRef(shape), value->requires_grad = Py_NewRef(grad);
    }
    Py_XDECREF(grad);
    return value;
}

/* A Value of a tensor on a device, which is gathered. NULL without an exception: to be looked at by itself. */
Value *gathered(Tape *self, PyObject *t, PyObject *shape, Geometry *at, const Dtype *dtype, Slot *slot) {
    int64_t n = 1;
    for (int i = 0; i < at->nd; i++)
        n = at->sizes[i] && n > INT64_MAX / 16 / at->sizes[i] ? INT64_MAX / 16 : n * at->sizes[i];
    /* data below SUSPECT: none, or freed. Sizes beyond: an expanded tensor, perhaps without end. */
    if (at->cpu || dtype->code < 0 || (uintptr_t)at->data <= SUSPECT || n > (int64_t)1 << 31) return NULL;
    if (!self->gathering || self->gatherer != PyThread_get_thread_ident()) return NULL;
    if (!slot->tensors) slot->tensors = PyList_New(0), slot->values = PyList_New(0);
    Value *value = slot->tensors && slot->values ? value_of(t, dtype->text, shape) : NULL;
    if (!value) return NULL;
    value->row = stats_rows_new(slot->rows);
    if (value->row < 0 || note_layout(t, at, value) || PyList_Append(slot->owned, (PyObject *)value) ||
        PyList_Append(slot->values, (PyObject *)value) || PyList_Append(slot->tensors, t) ||
        (self->journal && journal_value(self->journal, value, NULL, -1))) {
        Py_DECREF(value);
        return NULL;
    }
    self->gathered += n * item_size[dtype->code];
    if ((++self->waiting >= MOST_GATHERED || self->gathered > GATHERED) && reduce_all_gathered(self)) {
        Py_DECREF(value);
        return NULL;
    }
    return value;
}

/* A Value of a tensor that was not seen, or not with these flags. NULL without an exception: not for the kernel. */
static Value *reduced(Tape *self, PyObject *t, PyObject *shape, Geometry *at, long long version, long flags) {
    const Dtype *dtype = dtype_of(self, t);
    Slot *slot = dtype ? slot_of(self, flags & 255) : NULL;
    Job job;
    if (!slot || !slot->rows) return NULL;
    int host = job_of(t, at, dtype->code, flags & 255, &job);
    if (host != 1) return host < 0 ? NULL : gathered(self, t, shape, at, dtype, slot);
    StatsRows *rows =
        (StatsRows *)Py_NewRef((PyObject *)slot->rows); /* held: a large tensor is reduced while other threads run */
    PyObject *owned = Py_NewRef(slot->owned);
    Value *value = value_of(t, dtype->text, shape);
    if (value) {
        value->row = row_of(self, t, version, &job, rows);
        if (value->row == -2 || note_layout(t, at, value) || PyList_Append(owned, (PyObject *)value) ||
            (self->journal && value->row >= 0 && journal_value(self->journal, value, rows, value->row))) {
            Py_DECREF(value);
            value = NULL;
        }
    }
    Py_DECREF(owned);
    Py_DECREF((PyObject *)rows);
    return value;
}

/* Its version counter, or -1 for an inference tensor, which has none and is looked at each time; -2 with an exception
 * set. */
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

/* What is known of a tensor, as it is now: `requires_grad_()` may have come after it was looked at. A new reference. */
static PyObject *as_used(Tape *self, PyObject *t, Value *value) {
    PyObject *grad = tensor_attribute(t, REQUIRES_GRAD), *note = value->note ? value->note : Py_None;
    if (!grad) return NULL;
    Value *now = grad == value->requires_grad ? (Value *)Py_NewRef((PyObject *)value)
                                              : (Value *)tape_noted(self, (PyObject *)value, note);
    if (now && now != value) {
        Py_XDECREF(now->requires_grad);
        now->requires_grad = Py_NewRef(grad);
    }
    Py_DECREF(grad);
    return (PyObject *)now;
}

PyObject *tape_look(Tape *self, PyObject *t, long flags, int held) {
    if (!tape_is_plain(self, t)) return by_python(self->special, t, flags);
    long long version = version_of(t);
    if (version == -2) return NULL;
    int reuse = self->reuse && version >= 0;
    Geometry at;
    PyObject *shape = geometry_read(t, &at) ? NULL : geometry_shape(&at), *answer = NULL;
    if (shape) {
        const Seen *seen = reuse ? seen_find(&self->seen, t) : NULL;
        if (seen && seen->known && seen_is(seen, t) && seen->version == version && seen->data == at.data &&
            same_shape(seen, shape)) {
            if ((seen->flags & flags) == flags) {
                Seen was = *seen; /* `as_used` may let other threads run, which move what was seen */
                Py_INCREF((PyObject *)was.value);
                PyObject *now = as_used(self, t, was.value);
                self->reused++;
                if (now && now != (PyObject *)was.value &&
                    seen_note(&self->seen, (Seen){t, NULL, shape, (Value *)now, at.data, version, was.flags, was.held}))
                    Py_CLEAR(now);
                Py_DECREF((PyObject *)was.value), Py_DECREF(shape);
                return now;
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
        if (shape && answer && Py_TYPE(answer) == value_type && note_layout(t, &at, (Value *)answer))
            PyErr_Clear(); /* it cannot say */
    }
    if (answer && reuse && shape &&
        seen_note(&self->seen, (Seen){t, NULL, shape, (Value *)answer, at.data, version, flags, held}))
        Py_CLEAR(answer);
    Py_XDECREF(shape);
    return answer;
}

/* A small tensor of the host is copied into the arena. */
int tape_gather(Tape *self, PyObject *t, Value *value, PyObject *path) {
    Geometry at;
    if (!self->arena || !value->shape || !value->dtype) return 0;
    if (geometry_read(t, &at)) return PyErr_Occurred() ? -1 : 0;
    const Dtype *dtype = dtype_of(self, t);
    if (!dtype || dtype->code < 0) return PyErr_Occurred() ? -1 : 0;
    Job job;
    int fits = job_of(t, &at, dtype->code, CRC32, &job); /* a CRC wants the logical order too */
    return fits == 1 ? arena_keep((Arena *)self->arena, path, value->dtype, value->shape, &job) : fits;
}

/* ---- what the parts that record calls ask besides ---------------------------------------------------------------- */

void tape_touched(Tape *self, PyObject *t) {
    Seen *seen = seen_find(&self->seen, t);
    if (seen) seen_forget(seen);
    views_clear(&self->views); /* which share memory with it, perhaps */
}

/* Whether a tensor that was looked at has other bits now, 0 or 1; -1 where that cannot be told from here: it is on a
 * device, or has no fingerprint. */
static int seen_differs(Tape *self, const Seen *seen, PyObject *t) {
    Geometry at;
    Job job;
    PyObject *shape = seen->flags & CHECKSUM && !geometry_read(t, &at) ? geometry_shape(&at) : NULL;
    int same = shape && same_shape(seen, shape) && at.data == seen->data;
    Py_XDECREF(shape);
    const Dtype *dtype = same ? dtype_of(self, t) : NULL;
    Slot *slot = dtype && seen->value->row >= 0 ? slot_of(self, seen->flags & 255) : NULL;
    int told = slot && slot->rows && job_of(t, &at, dtype->code, CHECKSUM, &job) == 1;
    PyErr_Clear();
    if (!told) return -1;
    uint64_t then = slot->rows->checksums[seen->value->row];
    return fingerprint_of(&job) != then;
}

/* What a tensor was when it was looked at, unless it is known to have the same bits still: a new reference, or NULL.
   Where its version counter moved, NULL too: somebody says that he wrote there. What is returned is forgotten here, and
   all else with it where the tensor is known to have changed: others may lie in the same memory. */
Value *tape_overwritten(Tape *self, PyObject *t) {
    const Seen *seen = seen_find(&self->seen, t);
    long long version = seen && seen->known && seen_is(seen, t) ? version_of(t) : -1;
    if (version == -2) PyErr_Clear();
    if (version < 0 || version != seen->version) return NULL;
    Value *before = (Value *)Py_NewRef((PyObject *)seen->value);
    int differs = seen_differs(self, seen, t);
    if (differs > 0) seen_clear(&self->seen), views_clear(&self->views);
    else if (differs < 0) tape_touched(self, t);
    else Py_CLEAR(before);
    return before;
}

PyObject *tape_noted(Tape *self, PyObject *value, PyObject *note) {
    PyObject *twin = Py_TYPE(value) == value_type ? value_with_note((Value *)value, note)
                                                  : PyObject_CallMethodObjArgs(value, n_with_note, note, NULL);
    PyObject *pair = twin ? PyTuple_Pack(2, twin, value) : NULL;
    if (pair && !self->noted) self->noted = PyList_New(0);
    if (!pair || !self->noted || PyList_Append(self->noted, pair)) Py_CLEAR(twin);
    Py_XDECREF(pair);
    if (twin && self->journal && journal_twin(self->journal, twin, value)) Py_CLEAR(twin);
    return twin;
}

int tape_report(Tape *self, Call *c, int fields) { return self->journal ? journal_call(self->journal, c, fields) : 0; }
