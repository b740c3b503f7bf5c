/* The tape's eye: each distinct tensor value looked at once, trees of arguments turned into trees of Values (see engine/tape.py,
   whose Python methods of the same names do the same and take over wherever something is rare). */
#include <string.h>

#include "objects.h"

#define SAVE 256
#define KINDS 0xFFFF
#define CUT 16
#define DEEPEST 400
#define TEXT 512
#define SUSPECT ((uintptr_t)1 << 40) /* addresses below may be an offset into freed storage: looked at twice */
#define STRIPS 8
#define DTYPES_KNOWN 64
#define SHAPES_KEPT 4096 /* more of them (sequences of all lengths) are made anew in the next tape */

typedef struct {
    PyObject *dtype, *text;
    int code;      /* -1: not for the kernel */
    uint32_t kind; /* as in Geometry */
} Dtype;

typedef struct {
    long kinds;
    PyObject *strip; /* the Python strip, NULL where the slot is free */
    Strip *rows;     /* its native rows, NULL where it has none */
    PyObject *owned; /* list of Values */
} Slot;

typedef struct {
    PyObject *id, *known, *shape; /* id: address of the tensor. known: a weak reference to it, or itself where held; NULL: forgotten */
    Value *value;
    const void *data;
    long long version;
    long flags;
    int held;
} Seen;

struct Tape {
    PyObject_HEAD
    PyTypeObject *plain[2];
    PyObject *open_strip, *slow, *special, *rare, *keep, *describe;
    PyObject *arena; /* NULL: each value passes through `keep` */
    PyObject *trail; /* is told what is looked at, or NULL */
    PyObject *noted; /* list of (twin with a note of its own, value), or NULL */
    int reuse, dtypes_known;
    Dtype dtypes[DTYPES_KNOWN];
    Shapes shapes;
    Slot slots[STRIPS];
    Seen *seen;       /* in the order in which they came */
    uint32_t *places; /* table of numbers in it, from 1 on, by address; places_n: a power of two */
    Py_ssize_t used, room, places_n;
    Py_ssize_t reused;
};

PyTypeObject *tape_type;
static PyObject *n_dtype, *n_with_note;

/* ---- what is known of dtypes and shapes, kept from tape to tape ----------------------------------------------------------- */

static struct {
    PyTypeObject *tensor; /* the class whose dtypes they are, NULL where nothing is kept */
    int dtypes_known;
    Dtype dtypes[DTYPES_KNOWN];
    Shapes shapes;
} kept;

static void kept_take(Tape *self) {
    if (kept.tensor != self->plain[0]) return;
    self->dtypes_known = kept.dtypes_known, self->shapes = kept.shapes;
    memcpy(self->dtypes, kept.dtypes, (size_t)kept.dtypes_known * sizeof *kept.dtypes);
    kept.tensor = NULL, kept.dtypes_known = 0, kept.shapes = (Shapes){0};
    Py_DECREF((PyObject *)self->plain[0]); /* it was held */
}

static void kept_give(Tape *self) {
    if (kept.tensor || !self->plain[0] || self->shapes.used > SHAPES_KEPT) {
        for (int i = 0; i < self->dtypes_known; i++) Py_XDECREF(self->dtypes[i].dtype), Py_XDECREF(self->dtypes[i].text);
        shapes_clear(&self->shapes);
        return;
    }
    kept.dtypes_known = self->dtypes_known, kept.shapes = self->shapes;
    memcpy(kept.dtypes, self->dtypes, (size_t)self->dtypes_known * sizeof *kept.dtypes);
    kept.tensor = (PyTypeObject *)Py_NewRef((PyObject *)self->plain[0]);
}

/* ---- what was seen ------------------------------------------------------------------------------------------------------ */

static void seen_forget(Seen *seen) {
    Py_CLEAR(seen->known);
    Py_CLEAR(seen->shape);
    PyObject *value = (PyObject *)seen->value;
    seen->value = NULL;
    Py_XDECREF(value);
}

static uint32_t *seen_at(const Tape *self, PyObject *t) { /* its place, or the one where it would stand */
    size_t at = mixed(t) & (size_t)(self->places_n - 1);
    while (self->places[at] && self->seen[self->places[at] - 1].id != t) at = (at + 1) & (size_t)(self->places_n - 1);
    return &self->places[at];
}

static Seen *seen_find(const Tape *self, PyObject *t) {
    uint32_t number = self->places_n ? *seen_at(self, t) : 0;
    return number ? &self->seen[number - 1] : NULL;
}

/* Make room; what was forgotten leaves. */
static int seen_grow(Tape *self) {
    Py_ssize_t alive = 0, kept = 0;
    for (Py_ssize_t i = 0; i < self->used; i++) alive += self->seen[i].known != NULL;
    Py_ssize_t room = self->room ? (alive * 2 > self->room ? self->room * 2 : self->room) : 256;
    Seen *seen = PyMem_Malloc((size_t)room * sizeof *seen);
    uint32_t *places = PyMem_Calloc((size_t)room * 2, sizeof *places);
    if (!seen || !places) {
        PyMem_Free(seen), PyMem_Free(places);
        return PyErr_NoMemory(), -1;
    }
    for (Py_ssize_t i = 0; i < self->used; i++)
        if (self->seen[i].known) seen[kept++] = self->seen[i];
    PyMem_Free(self->seen), PyMem_Free(self->places);
    self->seen = seen, self->places = places, self->room = room, self->places_n = room * 2, self->used = kept;
    for (Py_ssize_t i = 0; i < kept; i++) *seen_at(self, seen[i].id) = (uint32_t)i + 1;
    return 0;
}

static Seen *seen_place(Tape *self, PyObject *t) {
    Seen *found = seen_find(self, t);
    if (found) {
        seen_forget(found);
        return found;
    }
    if (self->used == self->room && seen_grow(self)) return NULL;
    *seen_at(self, t) = (uint32_t)++self->used;
    self->seen[self->used - 1] = (Seen){.id = t};
    return &self->seen[self->used - 1];
}

static void seen_clear(Tape *self) {
    Seen *seen = self->seen;
    Py_ssize_t used = self->used;
    PyMem_Free(self->places);
    self->seen = NULL, self->places = NULL, self->room = self->places_n = self->used = 0;
    for (Py_ssize_t i = 0; i < used; i++) seen_forget(&seen[i]);
    PyMem_Free(seen);
}

static int is_still(const Seen *seen, PyObject *t) { return (seen->held ? seen->known : PyWeakref_GetObject(seen->known)) == t; }

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
    PyObject *told = call_one(self->describe, dtype); /* (text, code) */
    if (!told) return NULL;
    at = self->dtypes_known < DTYPES_KNOWN ? self->dtypes_known++ : DTYPES_KNOWN - 1;
    Dtype *known = &self->dtypes[at];
    Py_XDECREF(known->dtype);
    Py_XDECREF(known->text);
    known->dtype = Py_NewRef(dtype), known->kind = kind;
    known->text = Py_NewRef(PyTuple_GetItem(told, 0));
    known->code = (int)PyLong_AsLong(PyTuple_GetItem(told, 1));
    Py_DECREF(told);
    return known;
}

static Slot *slot_of(Tape *self, long kinds) {
    for (int i = 0; i < STRIPS && self->slots[i].strip; i++)
        if (self->slots[i].kinds == kinds) return &self->slots[i];
    PyObject *number = PyLong_FromLong(kinds);
    PyObject *told = number ? call_one(self->open_strip, number) : NULL; /* (strip, native rows or None, list) */
    Py_XDECREF(number);
    if (!told) return NULL;
    int at = 0;
    while (at < STRIPS - 1 && self->slots[at].strip) at++;
    Slot *slot = &self->slots[at];
    Py_XDECREF(slot->strip), Py_XDECREF(slot->rows), Py_XDECREF(slot->owned);
    slot->kinds = kinds;
    slot->strip = Py_NewRef(PyTuple_GetItem(told, 0));
    PyObject *rows = PyTuple_GetItem(told, 1);
    slot->rows = Py_TYPE(rows) == strip_type ? (Strip *)Py_NewRef(rows) : NULL;
    slot->owned = Py_NewRef(PyTuple_GetItem(told, 2));
    Py_DECREF(told);
    return slot;
}

static int is_complex(int code) { return code == D_C32 || code == D_C64 || code == D_C128; }

/* Fill a job for the kernel. 1: done, 0: not for the kernel, -1: an exception is set. */
static int job_of(PyObject *t, Geometry *at, int code, long kinds, Job *job) {
    int yes;
    if (code < 0 || (uintptr_t)at->data <= SUSPECT) return 0;
    if ((yes = geometry_on_host(t, at)) <= 0) return yes;
    if ((yes = tensor_is_resolved(t, is_complex(code))) <= 0) return yes;
    job->data = at->data, job->dtype = code, job->flags = (int)kinds;
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

/* A Value of a tensor that was not seen, or not with these flags. NULL without an exception: not for the kernel. */
static Value *reduced(Tape *self, PyObject *t, PyObject *shape, Geometry *at, long flags) {
    const Dtype *dtype = dtype_of(self, t, at->kind);
    Slot *slot = dtype ? slot_of(self, flags & 255) : NULL;
    Job job;
    if (!slot || !slot->rows || job_of(t, at, dtype->code, flags & 255, &job) != 1) return NULL;
    Strip *rows = (Strip *)Py_NewRef((PyObject *)slot->rows); /* held: a large tensor is reduced while other threads run */
    PyObject *text = dtype->text, *owned = Py_NewRef(slot->owned), *grad = tensor_attribute(t, REQUIRES_GRAD);
    Value *value = grad ? (Value *)PyType_GenericAlloc(value_type, 0) : NULL;
    if (value) {
        static PyObject *kind, *cpu;
        if (!kind) kind = PyUnicode_InternFromString("torch.Tensor"), cpu = PyUnicode_InternFromString("cpu");
        value->type = Py_NewRef(kind), value->device = Py_NewRef(cpu), value->dtype = Py_NewRef(text);
        value->shape = Py_NewRef(shape), value->requires_grad = Py_NewRef(grad);
        value->row = strip_reduce(rows, &job);
        if (value->row == -2 || PyList_Append(owned, (PyObject *)value)) {
            Py_DECREF(value);
            value = NULL;
        } else if (self->trail && value->row >= 0) {
            trail_value(self->trail, value, rows->partials + value->row * COLUMNS, rows->checksums[value->row]);
        }
    }
    Py_XDECREF(grad);
    Py_DECREF(owned);
    Py_DECREF((PyObject *)rows);
    return value;
}

int tape_is_plain(const Tape *self, PyObject *x) { return Py_TYPE(x) == self->plain[0] || Py_TYPE(x) == self->plain[1]; }

/* Remember what a tensor was looked at as. */
static int seen_note(Tape *self, Seen now) { /* of known, shape and value it takes references of its own */
    now.known = now.held ? Py_NewRef(now.id) : PyWeakref_NewRef(now.id, NULL);
    Seen *seen = now.known ? seen_place(self, now.id) : NULL;
    if (!seen) {
        Py_XDECREF(now.known);
        return -1;
    }
    Py_INCREF(now.shape), Py_INCREF((PyObject *)now.value);
    *seen = now;
    return 0;
}

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

/* held: somebody else keeps the tensor for the rest of the step, so that a reference of the tape's own keeps nothing alive. */
static PyObject *look(Tape *self, PyObject *t, long flags, int held) {
    if (!tape_is_plain(self, t)) return by_python(self->special, t, flags);
    long long version = version_of(t);
    if (version == -2) return NULL;
    int reuse = self->reuse && version >= 0;
    Geometry at;
    PyObject *shape = geometry_read(t, &at) ? NULL : shapes_find(&self->shapes, &at), *answer = NULL;
    if (shape) {
        const Seen *seen = reuse ? seen_find(self, t) : NULL;
        if (seen && seen->known && is_still(seen, t) && seen->version == version && seen->data == at.data && seen->shape == shape) {
            if ((seen->flags & flags) == flags) {
                self->reused++;
                Py_DECREF(shape);
                return Py_NewRef((PyObject *)seen->value);
            }
            flags |= seen->flags;
        }
        answer = (PyObject *)reduced(self, t, shape, &at, flags);
        reuse = reuse && !(answer && ((Value *)answer)->row < 0); /* a reduction that was dropped is none */
    }
    if (!answer && !(PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError))) {
        PyErr_Clear(); /* on another device, or without data of its own (torch.func), or nested */
        answer = by_python(self->slow, t, flags);
        reuse = reuse && answer && Py_TYPE(answer) == value_type;
    }
    if (answer && reuse && shape && seen_note(self, (Seen){t, NULL, shape, (Value *)answer, at.data, version, flags, held})) Py_CLEAR(answer);
    Py_XDECREF(shape);
    return answer;
}

/* ---- trees of arguments ------------------------------------------------------------------------------------------------- */

static PyObject *cut_text(PyObject *x) {
    if (PyUnicode_GetLength(x) <= TEXT) return Py_NewRef(x);
    PyObject *front = PyUnicode_Substring(x, 0, TEXT);
    PyObject *cut = front ? PyUnicode_FromFormat("%U%s", front, "\xe2\x80\xa6") : NULL;
    Py_XDECREF(front);
    return cut;
}

/* Copy a small tensor of the host into the arena. 1: done, 0: not for the arena, -1: an exception is set. */
static int gather(Tape *self, PyObject *t, Value *value, PyObject *path) {
    Geometry at;
    if (!self->arena || !value->shape || !value->dtype) return 0;
    if (geometry_read(t, &at)) return PyErr_Occurred() ? -1 : 0;
    const Dtype *dtype = dtype_of(self, t, at.kind);
    if (!dtype || dtype->code < 0) return PyErr_Occurred() ? -1 : 0;
    Job job;
    int fits = job_of(t, &at, dtype->code, CRC32, &job); /* a CRC wants the logical order too */
    return fits == 1 ? arena_keep((Arena *)self->arena, path, value->dtype, value->shape, &job) : fits;
}

static PyObject *kept_tensor(Tape *self, PyObject *x, long flags, PyObject *path, int held) {
    PyObject *value = look(self, x, flags & KINDS, held);
    if (!value || Py_TYPE(value) != value_type) return value;
    if (((Value *)value)->tensor == NULL && ((Value *)value)->note == NULL && self->keep != Py_None) {
        int kept = flags >> CUT ? 0 : gather(self, x, (Value *)value, path);
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

static PyObject *listed(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    int tuple = PyTuple_CheckExact(x);
    Py_ssize_t n = tuple ? PyTuple_Size(x) : PyList_Size(x);
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *item = tuple ? PyTuple_GetItem(x, i) : i < PyList_Size(x) ? PyList_GetItem(x, i) : Py_None;
        PyObject *below = path ? PyUnicode_FromFormat("%U.%zd", path, i) : NULL;
        PyObject *leaf = path && !below ? NULL : tape_tree(self, item, flags, below, depth + 1);
        Py_XDECREF(below);
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
    PyObject *items = PyDict_Items(x), *dict = items ? PyDict_New() : NULL; /* a copy: looking may run code that changes x */
    for (Py_ssize_t i = 0; dict && i < PyList_Size(items); i++) {
        PyObject *pair = PyList_GetItem(items, i), *key = PyObject_Str(PyTuple_GetItem(pair, 0)), *below = NULL, *leaf = NULL;
        if (key && path) below = PyUnicode_FromFormat("%U.%U", path, key);
        if (key && (below || !path)) leaf = tape_tree(self, PyTuple_GetItem(pair, 1), flags, below, depth + 1);
        if (!leaf || PyDict_SetItem(dict, key, leaf)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(below);
        Py_XDECREF(leaf);
    }
    Py_XDECREF(items);
    return dict;
}

PyObject *tape_tree(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == self->plain[0] || kind == self->plain[1])
        return path && flags & SAVE ? kept_tensor(self, x, flags, path, 0) : look(self, x, flags, 0);
    if (x == Py_None || kind == &PyLong_Type || kind == &PyFloat_Type || kind == &PyBool_Type) return Py_NewRef(x);
    if (kind == &PyUnicode_Type) return cut_text(x);
    if (depth <= DEEPEST && (kind == &PyTuple_Type || kind == &PyList_Type)) return listed(self, x, flags, path, depth);
    if (depth <= DEEPEST && kind == &PyDict_Type) return named(self, x, flags, path, depth);
    return rare(self, x, flags, path, depth);
}

/* The same for a tensor that is held for the rest of the step, such as a parameter. */
PyObject *tape_held(Tape *self, PyObject *t, long flags, PyObject *path) {
    if (!tape_is_plain(self, t)) return tape_tree(self, t, flags, path, 0);
    return path && flags & SAVE ? kept_tensor(self, t, flags, path, 1) : look(self, t, flags, 1);
}

/* ---- the type ----------------------------------------------------------------------------------------------------------- */

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
    return look(self, args[0], flags, 0);
}

void tape_touched(Tape *self, PyObject *t) {
    Seen *seen = seen_find(self, t);
    if (seen) seen_forget(seen);
}

PyObject *tape_noted(Tape *self, PyObject *value, PyObject *note) {
    PyObject *twin = Py_TYPE(value) == value_type ? value_with_note((Value *)value, note)
                                                  : PyObject_CallMethodObjArgs(value, n_with_note, note, NULL);
    PyObject *pair = twin ? PyTuple_Pack(2, twin, value) : NULL;
    if (pair && !self->noted) self->noted = PyList_New(0);
    if (!pair || !self->noted || PyList_Append(self->noted, pair)) Py_CLEAR(twin);
    Py_XDECREF(pair);
    if (twin && self->trail && Py_TYPE(value) == value_type) trail_twin(self->trail, (Value *)twin, (Value *)value);
    return twin;
}

void tape_told(Tape *self, Call *c, int fields) {
    if (self->trail) trail_call(self->trail, c, fields);
}

static PyObject *touched(Tape *self, PyObject *t) {
    tape_touched(self, t);
    return Py_NewRef(Py_None);
}

static PyObject *forget_all(Tape *self, PyObject *unused) {
    (void)unused;
    seen_clear(self);
    return Py_NewRef(Py_None);
}

static PyObject *reset(Tape *self, PyObject *unused) {
    (void)unused;
    seen_clear(self);
    Py_CLEAR(self->noted);
    for (int i = 0; i < STRIPS; i++) {
        Py_CLEAR(self->slots[i].strip);
        Py_CLEAR(self->slots[i].rows);
        Py_CLEAR(self->slots[i].owned);
    }
    return Py_NewRef(Py_None);
}

static PyObject *gather_into(Tape *self, PyObject *arena) {
    if (!arena_check(arena)) return PyErr_Format(PyExc_TypeError, "gather_into takes an Arena");
    PyObject *before = self->arena;
    self->arena = Py_NewRef(arena);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *leave_trail(Tape *self, PyObject *trail) {
    if (!trail_check(trail)) return PyErr_Format(PyExc_TypeError, "leave_trail takes a Trail");
    PyObject *before = self->trail;
    self->trail = Py_NewRef(trail);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *plain[2], *functions[6];
    int reuse;
    if (kwargs || !PyArg_ParseTuple(args, "(OO)iOOOOOO", &plain[0], &plain[1], &reuse, &functions[0], &functions[1], &functions[2],
                                    &functions[3], &functions[4], &functions[5]))
        return NULL;
    Tape *self = (Tape *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->reuse = reuse;
    for (int i = 0; i < 2; i++) self->plain[i] = (PyTypeObject *)Py_NewRef(plain[i]);
    attributes_learn(self->plain);
    kept_take(self);
    self->open_strip = Py_NewRef(functions[0]), self->slow = Py_NewRef(functions[1]), self->special = Py_NewRef(functions[2]);
    self->rare = Py_NewRef(functions[3]), self->keep = Py_NewRef(functions[4]), self->describe = Py_NewRef(functions[5]);
    return (PyObject *)self;
}

static void let_go(Tape *self) { /* of the functions, which hold the Python tape, which holds this */
    Py_CLEAR(self->open_strip);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->special);
    Py_CLEAR(self->rare);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->describe);
    Py_CLEAR(self->arena);
    Py_CLEAR(self->trail);
}

static int tape_traverse(Tape *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->open_strip);
    Py_VISIT(self->slow);
    Py_VISIT(self->special);
    Py_VISIT(self->rare);
    Py_VISIT(self->keep);
    Py_VISIT(self->describe);
    Py_VISIT(self->arena);
    Py_VISIT(self->noted);
    for (int i = 0; i < STRIPS; i++) {
        Py_VISIT(self->slots[i].strip);
        Py_VISIT(self->slots[i].owned);
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
    kept_give(self);
    Py_XDECREF(self->plain[0]);
    Py_XDECREF(self->plain[1]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef tape_members[] = {{"reused", T_PYSSIZET, offsetof(Tape, reused), 0, NULL},
                                     {"noted", T_OBJECT, offsetof(Tape, noted), READONLY, NULL},
                                     {NULL, 0, 0, 0, NULL}};

static PyMethodDef tape_methods[] = {
    {"tree", (PyCFunction)(void (*)(void))tree, METH_FASTCALL, "tree(x, flags, path=None, depth=0): see engine.tape.Tape.tree."},
    {"value", (PyCFunction)(void (*)(void))value, METH_FASTCALL, "value(t, flags): see engine.tape.Tape.value."},
    {"touched", (PyCFunction)touched, METH_O, "touched(t): see engine.tape.Tape.touched."},
    {"forget_all", (PyCFunction)forget_all, METH_NOARGS, "forget_all(): see engine.tape.Tape.forget_all."},
    {"gather_into", (PyCFunction)gather_into, METH_O, "gather_into(arena): small values that are saved are copied there."},
    {"leave_trail", (PyCFunction)leave_trail, METH_O, "leave_trail(trail): it is told what is looked at."},
    {"reset", (PyCFunction)reset, METH_NOARGS, "reset(): let go of all that was seen and of the strips."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot tape_slots[] = {{Py_tp_new, tape_new},
                                   {Py_tp_dealloc, tape_free},
                                   {Py_tp_traverse, tape_traverse},
                                   {Py_tp_clear, tape_clear},
                                   {Py_tp_members, tape_members},
                                   {Py_tp_methods, tape_methods},
                                   {Py_tp_doc, "Eye((Tensor, Parameter), reuse, open_strip, slow, special, rare, keep, dtype)"},
                                   {0, NULL}};

static PyType_Spec tape_spec = {"trainprobe._native.Eye", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};

int tape_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {{&n_dtype, "dtype"}, {&n_with_note, "with_note"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return -1;
    tape_type = (PyTypeObject *)PyType_FromSpec(&tape_spec);
    return tape_type ? PyModule_AddObjectRef(module, "Eye", (PyObject *)tape_type) : -1;
}
