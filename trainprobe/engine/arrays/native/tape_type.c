/* The type NativeTape, which engine/tape.py makes. */
#include "tape.h"

PyTypeObject *tape_type;
PyObject *n_dtype, *n_with_note, *n_add_all;

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
