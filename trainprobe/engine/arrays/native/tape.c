/* The tape: looks at each distinct tensor value once and turns trees of arguments into trees of Values. engine/tape.py
   has it and takes over wherever something is rare. */
#include <string.h>

#include "objects.h"

#define KINDS 0xFFFF
#define CUT 16
#define ROW_SLOTS 8
#define DTYPES_KNOWN 64
#define SUSPECT ((uintptr_t)1 << 40) /* addresses below may be an offset into freed storage: looked at twice */

typedef struct {
    PyObject *dtype, *text;
    int code; /* -1: not for the kernel */
} Dtype;

typedef struct {
    long kinds;
    PyObject *stats_rows; /* the Python row buffer, NULL where the slot is free */
    StatsRows *rows;      /* its native rows, NULL where it has none */
    PyObject *owned;      /* list of Values */
    PyObject *tensors,
        *values; /* lists: tensors on devices that are not reduced yet, and their Values; NULL where there are none */
} Slot;

typedef struct {
    PyObject *id, *known,
        *shape; /* id: address of the tensor. known: a weak reference to it, or itself where held; NULL: forgotten */
    Value *value;
    const void *data;
    long long version;
    long flags;
    int held;
} Seen;

/* What was looked at, by the address of the tensor. */
typedef struct {
    Seen *items;      /* in the order in which they came */
    uint32_t *places; /* table of numbers in it, from 1 on, by address; places_n: a power of two */
    Py_ssize_t used, room, places_n;
} SeenTable;

#define VIEWS 16    /* values that are remembered */
#define VIEW_DIMS 4 /* that they have at most, once neighbouring ones are walked as one */

typedef struct {
    int nd;
    int64_t size[VIEW_DIMS], stride[VIEW_DIMS];
} Axes;

typedef struct {
    PyObject *root;  /* a weak reference to the tensor whose memory it is; NULL: none */
    StatsRows *rows; /* where its numbers are: in this row while the rows were taken so often */
    Py_ssize_t row;
    uint64_t taken, sample;
    const char *data;
    long long version;
    int64_t repeats;
    int dtype;
    Axes memory, place;
} View;

typedef struct {
    View *items; /* VIEWS of them, of which the one at `next` makes room first; NULL: none yet */
    int next;
} Views;

struct Tape {
    PyObject_HEAD
    PyTypeObject *plain[2]; /* NULL where every tensor is left to Python */
    PyObject *open_rows, *slow, *special, *rare, *keep, *describe, *one_by_one;
    PyObject *arena;   /* NULL: each value passes through `keep` */
    PyObject *journal; /* records what is looked at, or NULL */
    PyObject *noted;   /* list of (twin with a note of its own, value), or NULL */
    int reuse, dtypes_known;
    int gathering;          /* how deep */
    unsigned long gatherer; /* the thread that does */
    int waiting;            /* tensors, of so many bytes */
    int64_t gathered;
    int entered; /* containers of the tree that is looked at */
    Dtype dtypes[DTYPES_KNOWN];
    Slot slots[ROW_SLOTS];
    SeenTable seen;
    Views views;
    Py_ssize_t reused;
};

PyTypeObject *tape_type;
static PyObject *n_dtype, *n_with_note, *n_add_all;

/* ---- what was looked at: recognised by the tensor's identity, held weakly, so that nothing is kept alive --------- */

static void seen_forget(Seen *seen) {
    Py_CLEAR(seen->known);
    Py_CLEAR(seen->shape);
    PyObject *value = (PyObject *)seen->value;
    seen->value = NULL;
    Py_XDECREF(value);
}

static uint32_t *seen_at(const SeenTable *table, PyObject *t) { /* its place, or the one where it would stand */
    size_t at = mixed(t) & (size_t)(table->places_n - 1);
    while (table->places[at] && table->items[table->places[at] - 1].id != t)
        at = (at + 1) & (size_t)(table->places_n - 1);
    return &table->places[at];
}

static Seen *seen_find(const SeenTable *table, PyObject *t) {
    uint32_t number = table->places_n ? *seen_at(table, t) : 0;
    return number ? &table->items[number - 1] : NULL;
}

/* Make room; what was forgotten leaves. */
static int seen_grow(SeenTable *table) {
    Py_ssize_t alive = 0, kept = 0;
    for (Py_ssize_t i = 0; i < table->used; i++) alive += table->items[i].known != NULL;
    Py_ssize_t room = table->room ? (alive * 2 > table->room ? table->room * 2 : table->room) : 256;
    Seen *seen = PyMem_Malloc((size_t)room * sizeof *seen);
    uint32_t *places = PyMem_Calloc((size_t)room * 2, sizeof *places);
    if (!seen || !places) {
        PyMem_Free(seen), PyMem_Free(places);
        return PyErr_NoMemory(), -1;
    }
    for (Py_ssize_t i = 0; i < table->used; i++)
        if (table->items[i].known) seen[kept++] = table->items[i];
    PyMem_Free(table->items), PyMem_Free(table->places);
    table->items = seen, table->places = places, table->room = room, table->places_n = room * 2, table->used = kept;
    for (Py_ssize_t i = 0; i < kept; i++) *seen_at(table, seen[i].id) = (uint32_t)i + 1;
    return 0;
}

static Seen *seen_place(SeenTable *table, PyObject *t) {
    Seen *found = seen_find(table, t);
    if (found) {
        seen_forget(found);
        return found;
    }
    if (table->used == table->room && seen_grow(table)) return NULL;
    *seen_at(table, t) = (uint32_t)++table->used;
    table->items[table->used - 1] = (Seen){.id = t};
    return &table->items[table->used - 1];
}

static void seen_clear(SeenTable *table) {
    Seen *seen = table->items;
    Py_ssize_t used = table->used;
    PyMem_Free(table->places);
    table->items = NULL, table->places = NULL, table->room = table->places_n = table->used = 0;
    for (Py_ssize_t i = 0; i < used; i++) seen_forget(&seen[i]);
    PyMem_Free(seen);
}

static int seen_is(const Seen *seen, PyObject *t) {
    return (seen->held ? seen->known : PyWeakref_GetObject(seen->known)) == t;
}

static int same_shape(const Seen *seen, PyObject *shape) {
    return PyObject_RichCompareBool(seen->shape, shape, Py_EQ) == 1;
}

static int seen_note(SeenTable *table, Seen now) {
    now.known = now.held ? Py_NewRef(now.id) : PyWeakref_NewRef(now.id, NULL);
    Seen *seen = now.known ? seen_place(table, now.id) : NULL;
    if (!seen) {
        Py_XDECREF(now.known);
        return -1;
    }
    Py_INCREF(now.shape), Py_INCREF((PyObject *)now.value);
    *seen = now;
    return 0;
}

/* ---- memory that was read a moment ago --------------------------------------------------------------------------- */

/* Another view of the same memory has the same numbers, which are copied and not worked out again. Views of one base
   share its version counter, which says that nothing was written in between. What writes past it (a kernel that takes
   an address) is met by a sample of the elements; `touched` and `forget_all` hold here too. */

#define LARGE (256 * 1024) /* bytes: less is read nearly as fast as it is recognised */
#define SAMPLES 64

static uint64_t sample_of(const Job *job) {
    int item = item_size[job->dtype];
    int64_t samples = job->n < SAMPLES ? job->n : SAMPLES;
    uint64_t total = 0;
    for (int64_t i = 0; i < samples; i++) {
        uint64_t bits[2] = {0, 0};
        memcpy(bits, element_at(job, samples > 1 ? (job->n - 1) / (samples - 1) * i : 0), (size_t)item);
        total = hashed(total ^ bits[0]) + bits[1];
    }
    return total;
}

static Axes axes_of(const Dims *dims) {
    Axes axes = {.nd = dims->nd};
    memcpy(axes.size, dims->size, (size_t)dims->nd * sizeof *dims->size);
    memcpy(axes.stride, dims->stride, (size_t)dims->nd * sizeof *dims->stride);
    return axes;
}

static int same_axes(const Axes *a, const Dims *b) {
    size_t bytes = (size_t)a->nd * sizeof *a->size;
    return a->nd == b->nd && !memcmp(a->size, b->size, bytes) && !memcmp(a->stride, b->stride, bytes);
}

/* The fingerprint and the CRC depend on the places of the elements too. */
static int same_elements(const View *view, const Job *job) {
    return view->data == job->data && view->dtype == job->dtype && view->repeats == job->repeats &&
           same_axes(&view->memory, &job->memory) &&
           (!(job->flags & (CHECKSUM | CRC32)) || same_axes(&view->place, &job->place));
}

static void view_drop(View *view) {
    Py_CLEAR(view->root);
    StatsRows *rows = view->rows;
    view->rows = NULL;
    Py_XDECREF((PyObject *)rows);
}

static void views_clear(Views *self) {
    View *items = self->items;
    self->items = NULL, self->next = 0;
    for (int i = 0; items && i < VIEWS; i++) view_drop(&items[i]);
    PyMem_Free(items);
}

static PyObject *views_root(PyObject *t, const Job *job) {
    if (job->n * item_size[job->dtype] < LARGE || job->memory.nd > VIEW_DIMS || job->place.nd > VIEW_DIMS) return NULL;
    PyObject *base = tensor_attribute(t, BASE);
    if (!base) PyErr_Clear();
    if (base != Py_None) return base;
    Py_DECREF(base);
    return Py_NewRef(t);
}

static Py_ssize_t views_find(const Views *self, PyObject *root, long long version, const Job *job,
                             const StatsRows *rows) {
    for (int i = 0; self->items && i < VIEWS; i++) { /* the latest first */
        const View *view = &self->items[(self->next + VIEWS - 1 - i) % VIEWS];
        if (!view->root || view->rows != rows || view->taken != rows->taken || view->version != version ||
            !same_elements(view, job))
            continue;
        if (PyWeakref_GetObject(view->root) == root && view->sample == sample_of(job)) return view->row;
    }
    return -1;
}

static int views_note(Views *self, PyObject *root, long long version, const Job *job, StatsRows *rows, Py_ssize_t row) {
    if (!self->items && !(self->items = PyMem_Calloc(VIEWS, sizeof *self->items))) return PyErr_NoMemory(), -1;
    PyObject *known = PyWeakref_NewRef(root, NULL);
    if (!known) return -1;
    View *view = &self->items[self->next];
    view_drop(view);
    self->next = (self->next + 1) % VIEWS;
    view->root = known, view->rows = (StatsRows *)Py_NewRef((PyObject *)rows), view->row = row,
    view->taken = rows->taken;
    view->version = version, view->data = job->data, view->dtype = job->dtype, view->repeats = job->repeats;
    view->memory = axes_of(&job->memory), view->place = axes_of(&job->place);
    view->sample = sample_of(job);
    return 0;
}

/* ---- one tensor -------------------------------------------------------------------------------------------------- */

int tape_is_plain(const Tape *self, PyObject *x) {
    return Py_TYPE(x) == self->plain[0] || Py_TYPE(x) == self->plain[1];
}

static const Dtype *dtype_of(Tape *self, PyObject *t) {
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

static Slot *slot_of(Tape *self, long kinds) {
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
static Value *gathered(Tape *self, PyObject *t, PyObject *shape, Geometry *at, const Dtype *dtype, Slot *slot) {
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

static PyObject *tape_look(Tape *self, PyObject *t, long flags, int held) {
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
static int tape_gather(Tape *self, PyObject *t, Value *value, PyObject *path) {
    Geometry at;
    if (!self->arena || !value->shape || !value->dtype) return 0;
    if (geometry_read(t, &at)) return PyErr_Occurred() ? -1 : 0;
    const Dtype *dtype = dtype_of(self, t);
    if (!dtype || dtype->code < 0) return PyErr_Occurred() ? -1 : 0;
    Job job;
    int fits = job_of(t, &at, dtype->code, CRC32, &job); /* a CRC wants the logical order too */
    return fits == 1 ? arena_keep((Arena *)self->arena, path, value->dtype, value->shape, &job) : fits;
}

/* ---- trees of arguments and results ------------------------------------------------------------------------------ */

#define DEEPEST 400
#define TEXT 512
#define UNWATCHED 4 /* levels in which nobody asks whether a container holds itself */

#define MOST 100000 /* containers in a tree: one that holds itself would never end */

/* Text that can be written: half of a surrogate pair becomes its escape. Takes the reference. */
static PyObject *in_utf8(PyObject *x) {
    Py_ssize_t length;
    if (!x || PyUnicode_AsUTF8AndSize(x, &length)) return x;
    PyErr_Clear();
    PyObject *bytes = PyUnicode_AsEncodedString(x, "utf-8", "backslashreplace");
    Py_DECREF(x);
    x = bytes ? PyUnicode_FromEncodedObject(bytes, "utf-8", "strict") : NULL;
    Py_XDECREF(bytes);
    return x;
}

static PyObject *cut_text(PyObject *x) {
    if (PyUnicode_GetLength(x) <= TEXT) return in_utf8(Py_NewRef(x));
    PyObject *front = PyUnicode_Substring(x, 0, TEXT);
    PyObject *cut = front ? PyUnicode_FromFormat("%U%s", front, "\xe2\x80\xa6") : NULL;
    Py_XDECREF(front);
    return in_utf8(cut);
}

PyObject *key_text(PyObject *key) {
    PyObject *text = PyObject_Str(key);
    if (!text && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        text = PyUnicode_FromString("?");
    }
    return in_utf8(text);
}

static PyObject *kept_tensor(Tape *self, PyObject *x, long flags, PyObject *path, int held) {
    PyObject *value = tape_look(self, x, flags & KINDS, held);
    if (!value || Py_TYPE(value) != value_type) return value;
    if (((Value *)value)->tensor == NULL && ((Value *)value)->note == NULL && self->keep != Py_None) {
        int kept = flags >> CUT ? 0 : tape_gather(self, x, (Value *)value, path);
        PyObject *cut = kept == 0 ? PyLong_FromLong(flags >> CUT) : NULL;
        if (kept >= 0) ((Value *)value)->tensor = Py_NewRef(path);
        PyObject *done = cut ? PyObject_CallFunctionObjArgs(self->keep, path, x, value, cut, NULL) : NULL;
        Py_XDECREF(cut);
        Py_XDECREF(done);
        if (kept < 0 || (kept == 0 && !done)) {
            Py_DECREF(value);
            return NULL;
        }
    }
    return value;
}

static PyObject *rare(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyObject *number = PyLong_FromLong(flags), *deep = PyLong_FromLong(depth), *answer = NULL;
    if (number && deep) answer = PyObject_CallFunctionObjArgs(self->rare, x, number, path ? path : Py_None, deep, NULL);
    Py_XDECREF(number);
    Py_XDECREF(deep);
    return answer;
}

static PyObject *tree_of(Tape *self, PyObject *x, long flags, PyObject *path, int depth);

static PyObject *listed(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    int tuple = PyTuple_CheckExact(x);
    Py_ssize_t n = tuple ? PyTuple_Size(x) : PyList_Size(x);
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *item = Py_NewRef(tuple ? PyTuple_GetItem(x, i) : i < PyList_Size(x) ? PyList_GetItem(x, i) : Py_None);
        PyObject *below = path ? PyUnicode_FromFormat("%U.%zd", path, i) : NULL;
        PyObject *leaf = path && !below ? NULL : tree_of(self, item, flags, below, depth + 1);
        Py_XDECREF(below);
        Py_DECREF(item);
        if (!leaf) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, leaf);
    }
    if (list) PyObject_GC_UnTrack(list); /* a tree has no cycles: the collector need not walk it */
    return list;
}

static PyObject *named(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyObject *items = PyDict_Items(x),
             *dict = items ? PyDict_New() : NULL; /* a copy: looking may run code that changes x */
    for (Py_ssize_t i = 0; dict && i < PyList_Size(items); i++) {
        PyObject *pair = PyList_GetItem(items, i), *key = key_text(PyTuple_GetItem(pair, 0)), *below = NULL,
                 *leaf = NULL;
        if (key && path) below = PyUnicode_FromFormat("%U.%U", path, key);
        if (key && (below || !path)) leaf = tree_of(self, PyTuple_GetItem(pair, 1), flags, below, depth + 1);
        if (!leaf || PyDict_SetItem(dict, key, leaf)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(below);
        Py_XDECREF(leaf);
    }
    Py_XDECREF(items);
    return dict;
}

static void leave(PyObject *x) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Py_ReprLeave(x);
    PyErr_Restore(type, error, trace);
}

/* Whether one more container of this tree may be looked into. */
static int tape_enter(Tape *self) { return self->entered++ < MOST; }

static PyObject *tree_of(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == self->plain[0] || kind == self->plain[1])
        return path && flags & SAVE ? kept_tensor(self, x, flags, path, 0) : tape_look(self, x, flags, 0);
    if (x == Py_None || kind == &PyFloat_Type || kind == &PyBool_Type) return Py_NewRef(x);
    if (kind == &PyLong_Type) {
        int large;
        PyLong_AsLongLongAndOverflow(x, &large);
        return large ? rare(self, x, flags, path, depth) : Py_NewRef(x);
    }
    if (kind == &PyUnicode_Type) return cut_text(x);
    if (depth <= DEEPEST && (kind == &PyTuple_Type || kind == &PyList_Type || kind == &PyDict_Type)) {
        if (depth == 0) self->entered = 0;
        if (!tape_enter(self)) return rare(self, x, flags, path, DEEPEST + 1);
        int watched = depth >= UNWATCHED, within = watched ? Py_ReprEnter(x) : 0;
        if (within) return within > 0 ? rare(self, x, flags, path, DEEPEST + 1) : NULL;
        PyObject *tree =
            kind == &PyDict_Type ? named(self, x, flags, path, depth) : listed(self, x, flags, path, depth);
        if (watched) leave(x);
        return tree;
    }
    return rare(self, x, flags, path, depth);
}

/* Whether what was gathered is reduced; takes the reference, and gives it back where it is. */
static PyObject *once_reduced(Tape *self, int begun, PyObject *found) {
    if (tape_gather_end(self, begun)) Py_CLEAR(found);
    return found;
}

PyObject *tape_tree(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    int begun = tape_gather_begin(self);
    return once_reduced(self, begun, tree_of(self, x, flags, path, depth));
}

/* The same for a tensor that is held for the rest of the step, such as a parameter. */
PyObject *tape_held(Tape *self, PyObject *t, long flags, PyObject *path) {
    if (!tape_is_plain(self, t)) return tape_tree(self, t, flags, path, 0);
    int begun = tape_gather_begin(self);
    return once_reduced(self, begun,
                        path && flags & SAVE ? kept_tensor(self, t, flags, path, 1) : tape_look(self, t, flags, 1));
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

/* ---- the type that engine/tape.py makes -------------------------------------------------------------------------- */

static PyObject *tree(Tape *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 2 || nargs > 4) return PyErr_Format(PyExc_TypeError, "tree takes x, flags, path, depth");
    long flags = PyLong_AsLong(args[1]), depth = nargs > 3 ? PyLong_AsLong(args[3]) : 0;
    if (PyErr_Occurred()) return NULL;
    return tape_tree(self, args[0], flags, nargs > 2 && args[2] != Py_None ? args[2] : NULL, (int)depth);
}

static PyObject *value(Tape *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "value takes a tensor and flags");
    long flags = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    int begun = tape_gather_begin(self);
    return once_reduced(self, begun, tape_look(self, args[0], flags, 0));
}

/* What `value` gives of a plain tensor that nobody else hands over, such as the shard in a DTensor; None where that is
 * not on a device. */
static PyObject *shard(Tape *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "shard takes a tensor and flags");
    long flags = PyLong_AsLong(args[1]);
    Geometry at;
    if (PyErr_Occurred()) return NULL;
    if (!tape_is_plain(self, args[0]) || geometry_read(args[0], &at)) {
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    int begun = tape_gather_begin(self);
    const Dtype *dtype = dtype_of(self, args[0]);
    Slot *slot = dtype ? slot_of(self, flags & 255) : NULL;
    int host = slot && slot->rows ? geometry_on_host(args[0], &at) : 1;
    PyObject *shape = host ? NULL : geometry_shape(&at);
    PyObject *found = shape ? (PyObject *)gathered(self, args[0], shape, &at, dtype, slot) : NULL;
    Py_XDECREF(shape);
    if (!found && !PyErr_Occurred()) found = Py_NewRef(Py_None);
    return once_reduced(self, begun, found);
}

static PyObject *hold(Tape *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(tape_gather_begin(self));
}

static PyObject *release(Tape *self, PyObject *begun) {
    int held = PyObject_IsTrue(begun);
    return held < 0 || tape_gather_end(self, held) ? NULL : Py_NewRef(Py_None);
}

static PyObject *touched(Tape *self, PyObject *t) {
    tape_touched(self, t);
    return Py_NewRef(Py_None);
}

static PyObject *forget_all(Tape *self, PyObject *unused) {
    (void)unused;
    seen_clear(&self->seen);
    views_clear(&self->views);
    return Py_NewRef(Py_None);
}

static PyObject *reset(Tape *self, PyObject *unused) {
    (void)unused;
    seen_clear(&self->seen);
    views_clear(&self->views);
    Py_CLEAR(self->noted);
    for (int i = 0; i < ROW_SLOTS; i++) {
        Py_CLEAR(self->slots[i].stats_rows);
        Py_CLEAR(self->slots[i].rows);
        Py_CLEAR(self->slots[i].owned);
        Py_CLEAR(self->slots[i].tensors);
        Py_CLEAR(self->slots[i].values);
    }
    self->waiting = 0, self->gathered = 0;
    return Py_NewRef(Py_None);
}

static PyObject *gather_into(Tape *self, PyObject *arena) {
    if (!arena_check(arena)) return PyErr_Format(PyExc_TypeError, "gather_into takes an Arena");
    PyObject *before = self->arena;
    self->arena = Py_NewRef(arena);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *record_into(Tape *self, PyObject *journal) {
    PyObject *before = self->journal;
    self->journal = Py_NewRef(journal);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *plain, *functions[7];
    int reuse;
    if (kwargs || !PyArg_ParseTuple(args, "O!iOOOOOOO", &PyTuple_Type, &plain, &reuse, &functions[0], &functions[1],
                                    &functions[2], &functions[3], &functions[4], &functions[5], &functions[6]))
        return NULL;
    if (PyTuple_Size(plain) != 0 && PyTuple_Size(plain) != 2)
        return PyErr_Format(PyExc_TypeError, "plain is two classes, or none");
    Tape *self = (Tape *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->reuse = reuse;
    if (PyTuple_Size(plain)) {
        for (int i = 0; i < 2; i++) self->plain[i] = (PyTypeObject *)Py_NewRef(PyTuple_GetItem(plain, i));
    }
    self->open_rows = Py_NewRef(functions[0]), self->slow = Py_NewRef(functions[1]),
    self->special = Py_NewRef(functions[2]);
    self->rare = Py_NewRef(functions[3]), self->keep = Py_NewRef(functions[4]),
    self->describe = Py_NewRef(functions[5]);
    self->one_by_one = Py_NewRef(functions[6]);
    return (PyObject *)self;
}

static void let_go(Tape *self) { /* of the functions, which hold the Python tape, which holds this */
    Py_CLEAR(self->open_rows);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->special);
    Py_CLEAR(self->rare);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->describe);
    Py_CLEAR(self->one_by_one);
    Py_CLEAR(self->arena);
    Py_CLEAR(self->journal);
}

static int tape_traverse(Tape *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->open_rows);
    Py_VISIT(self->slow);
    Py_VISIT(self->special);
    Py_VISIT(self->rare);
    Py_VISIT(self->keep);
    Py_VISIT(self->describe);
    Py_VISIT(self->one_by_one);
    Py_VISIT(self->arena);
    Py_VISIT(self->noted);
    for (int i = 0; i < ROW_SLOTS; i++) {
        Py_VISIT(self->slots[i].stats_rows);
        Py_VISIT(self->slots[i].owned);
        Py_VISIT(self->slots[i].tensors);
        Py_VISIT(self->slots[i].values);
    }
    return 0;
}

static int tape_clear(Tape *self) {
    let_go(self);
    Py_XDECREF(reset(self, NULL));
    return 0;
}

static void tape_free(Tape *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    tape_clear(self);
    for (int i = 0; i < self->dtypes_known; i++) Py_XDECREF(self->dtypes[i].dtype), Py_XDECREF(self->dtypes[i].text);
    Py_XDECREF(self->plain[0]);
    Py_XDECREF(self->plain[1]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *enter(Tape *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(tape_enter(self));
}

static PyMemberDef tape_members[] = {
    {"reuse", T_INT, offsetof(Tape, reuse), 0, "whether a tensor that was seen before may be known again"},
    {"reused", T_PYSSIZET, offsetof(Tape, reused), 0, NULL},
    {"noted", T_OBJECT, offsetof(Tape, noted), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef tape_methods[] = {
    {"tree", (PyCFunction)(void (*)(void))tree, METH_FASTCALL,
     "tree(x, flags, path=None, depth=0): see engine.tape.Tape.tree."},
    {"value", (PyCFunction)(void (*)(void))value, METH_FASTCALL, "value(t, flags): see engine.tape.Tape.value."},
    {"shard", (PyCFunction)(void (*)(void))shard, METH_FASTCALL,
     "shard(t, flags): the Value of a plain tensor on a device, or None."},
    {"hold", (PyCFunction)hold, METH_NOARGS,
     "hold(): tensors on devices that are looked at from now on stay as they are until `release`."},
    {"release", (PyCFunction)release, METH_O, "release(held): reduce them together; held: what `hold` returned."},
    {"touched", (PyCFunction)touched, METH_O, "touched(t): see engine.tape.Tape.touched."},
    {"enter", (PyCFunction)enter, METH_NOARGS, "enter(): whether one more container of this tree may be looked into."},
    {"forget_all", (PyCFunction)forget_all, METH_NOARGS, "forget_all(): see engine.tape.Tape.forget_all."},
    {"gather_into", (PyCFunction)gather_into, METH_O,
     "gather_into(arena): small values that are saved are copied there."},
    {"record_into", (PyCFunction)record_into, METH_O, "record_into(journal): also record there what is looked at."},
    {"reset", (PyCFunction)reset, METH_NOARGS, "reset(): let go of all that was seen and of the rows."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot tape_slots[] = {{Py_tp_new, tape_new},
                                   {Py_tp_dealloc, tape_free},
                                   {Py_tp_traverse, tape_traverse},
                                   {Py_tp_clear, tape_clear},
                                   {Py_tp_members, tape_members},
                                   {Py_tp_methods, tape_methods},
                                   {Py_tp_doc, "NativeTape((Tensor, Parameter) or (), reuse, open_rows, slow, special, "
                                               "rare, keep, dtype, one_by_one): with (), every\n"
                                               "tensor is left to special."},
                                   {0, NULL}};

static PyType_Spec tape_spec = {"trainprobe._native.NativeTape", sizeof(Tape), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};

int tape_fill(PyObject *module) {
    n_dtype = PyUnicode_InternFromString("dtype"), n_with_note = PyUnicode_InternFromString("with_note");
    n_add_all = PyUnicode_InternFromString("add_all");
    tape_type = (PyTypeObject *)PyType_FromSpec(&tape_spec);
    return n_dtype && n_with_note && n_add_all && tape_type
               ? PyModule_AddObjectRef(module, "NativeTape", (PyObject *)tape_type)
               : -1;
}
