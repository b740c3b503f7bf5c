/* The type that records torch calls, and its hooks on their autograd nodes. */
#include "op_watch.h"

PyTypeObject *op_hook_type;
static PyTypeObject *watch_type;
static PyObject *t_op, *t_backward;

/* ---- gradients --------------------------------------------------------------------------------------------------- */

/* Add gradients to a side of a backward call, which has some already where its node is passed twice. */
static int join(OpWatch *self, OpHook *hook, PyObject **side, PyObject *gradients, const char *place) {
    if (!*side) {
        if (!(*side = PyList_New(0))) return -1;
        PyObject_GC_UnTrack(*side); /* a tree has no cycles: the collector need not walk it */
    }
    Py_ssize_t first = PyList_Size(*side), n = PyTuple_Size(gradients);
    for (Py_ssize_t i = 0; i < n && self->native; i++) {
        PyObject *at = NULL, *tree = NULL;
        if (hook->flags & SAVE)
            at = PyUnicode_FromFormat("%U.%zd.%U.%s.%zd", hook->forward->name, hook->forward->call, t_backward, place,
                                      first + i);
        if (at || !(hook->flags & SAVE))
            tree = tape_tree(self->native, PyTuple_GetItem(gradients, i), hook->flags, at, 0);
        int failed = !tree || PyList_Append(*side, tree);
        Py_XDECREF(at), Py_XDECREF(tree);
        if (failed) return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int record(OpWatch *self, OpHook *hook, PyObject *sent, PyObject *received) {
    if (!hook->call) {
        Call *forward = hook->forward;
        hook->call =
            call_new(t_op, forward->name, forward->call, t_backward, NULL, forward->micro, forward->parent, -1);
        if (!hook->call || PyList_Append(self->calls, (PyObject *)hook->call)) return -1;
    }
    if (join(self, hook, &hook->call->args, received, "input")) return -1;
    if (hook->watch && join(self, hook, &hook->call->out, sent, "output")) return -1;
    return hook->watch && self->native ? tape_report(self->native, hook->call, ARGS | OUT) : 0;
}

static PyObject *hook_called(OpHook *hook, PyObject *args, PyObject *kwargs) {
    OpWatch *self = hook->watch;
    (void)kwargs;
    if (!self || !self->native || PyTuple_Size(args) != 2) return Py_NewRef(Py_None);
    Py_INCREF((PyObject *)self);
    Py_INCREF((PyObject *)hook);
    PyObject *off = modes_off();
    Tape *tape = (Tape *)Py_NewRef((PyObject *)self->native);
    int begun = tape_gather_begin(tape);
    int failed = PyErr_Occurred() || record(self, hook, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1));
    failed |= tape_gather_end(tape, begun) != 0;
    Py_DECREF((PyObject *)tape);
    modes_on(off);
    failed = failed && give_to_guard(self->fault);
    Py_DECREF((PyObject *)hook);
    Py_DECREF((PyObject *)self);
    return failed ? NULL : Py_NewRef(Py_None);
}

static void hook_forget(OpHook *hook) {
    hook->watch = NULL;
    Py_CLEAR(hook->forward);
    Py_CLEAR(hook->call);
}

static void hook_free(OpHook *hook) {
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    hook_forget(hook);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

static PyType_Slot hook_slots[] = {{Py_tp_dealloc, hook_free}, {Py_tp_call, hook_called}, {0, NULL}};
static PyType_Spec hook_spec = {"trainprobe._native.OpHook", sizeof(OpHook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

/* ---- life -------------------------------------------------------------------------------------------------------- */

static PyObject *watch_end(OpWatch *self, PyObject *unused) {
    (void)unused;
    Py_ssize_t n = self->n_hooks;
    OpHook **hooks = self->hooks;
    self->hooks = NULL, self->n_hooks = self->room = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        hook_forget(hooks[i]);
        Py_DECREF((PyObject *)hooks[i]);
    }
    PyMem_Free(hooks);
    Py_CLEAR(self->tape);
    Py_CLEAR(self->native);
    Py_CLEAR(self->calls);
    Py_CLEAR(self->counts);
    Py_CLEAR(self->gate.micro);
    return Py_NewRef(Py_None);
}

static PyObject *watch_begin(OpWatch *self, PyObject *args) {
    PyObject *tape, *native, *calls;
    if (!torch_known()) return PyErr_Format(PyExc_RuntimeError, "learn_torch must be called first");
    if (!PyArg_ParseTuple(args, "OO!O!", &tape, tape_type, &native, &PyList_Type, &calls)) return NULL;
    Py_XDECREF(watch_end(self, NULL));
    self->tape = Py_NewRef(tape), self->native = (Tape *)Py_NewRef(native), self->calls = Py_NewRef(calls);
    self->counts = PyDict_New();
    return self->counts ? Py_NewRef(Py_None) : NULL;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"names",  "learn",  "fault",     "repeats",   "micro",   "stacks",
                            "inside", "stop",   "generator", "memory",    "forward", "backward",
                            "inputs", "kwargs", "outputs",   "recompute", NULL};
    PyObject *o[9], *stop;
    OpWatch w;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOO!OOOpppppp", names, &PyDict_Type, &o[0], &o[1], &o[2],
                                     &o[3], &o[4], &o[5], &PyList_Type, &o[6], &stop, &o[7], &o[8], &w.forward,
                                     &w.backward, &w.inputs, &w.kwargs, &w.outputs, &w.recompute))
        return NULL;
    OpWatch *self = (OpWatch *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    PyObject **places[] = {&self->names,  &self->learn,  &self->fault,     &self->repeats, &self->gate.function,
                           &self->stacks, &self->inside, &self->generator, &self->memory};
    for (int i = 0; i < 9; i++) *places[i] = Py_NewRef(o[i]);
    self->unwritten = PyObject_GetAttrString(self->memory, "taken");
    if (!self->unwritten) return Py_DECREF((PyObject *)self), NULL;
    self->stop = PyLong_AsVoidPtr(stop);
    if (!self->stop) self->stop = self; /* no frame and no code object */
    self->forward = w.forward, self->backward = w.backward, self->inputs = w.inputs, self->kwargs = w.kwargs;
    self->outputs = w.outputs, self->recompute = w.recompute;
    return (PyObject *)self;
}

static int watch_traverse(OpWatch *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    PyObject *held[] = {self->names,         self->learn,  self->fault,     self->repeats,
                        self->gate.function, self->inside, self->generator, self->memory,
                        self->unwritten,     self->parent, self->tape,      (PyObject *)self->native,
                        self->calls};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_VISIT(held[i]);
    return 0;
}

static int watch_clear(OpWatch *self) {
    Py_XDECREF(watch_end(self, NULL));
    PyObject **held[] = {&self->names,         &self->learn,     &self->fault,  &self->repeats,
                         &self->gate.function, &self->stacks,    &self->inside, &self->generator,
                         &self->memory,        &self->unwritten, &self->parent};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_CLEAR(*held[i]);
    return 0;
}

static void watch_free(OpWatch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef watch_members[] = {
    {"parent", T_OBJECT, offsetof(OpWatch, parent), 0, "where calls outside every module belong"},
    {"depth", T_INT, offsetof(OpWatch, depth), READONLY, "how many calls are being handled"},
    {"looks_after", T_INT, offsetof(OpWatch, looks_after), 0, "whether arguments are looked at again after a call"},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef watch_methods[] = {
    {"handle", (PyCFunction)(void (*)(void))op_handle, METH_FASTCALL,
     "handle(mode, func, types, args, kwargs): what a mode's __torch_function__ does."},
    {"begin", (PyCFunction)watch_begin, METH_VARARGS, "begin(tape, native, calls): record onto this tape."},
    {"end", (PyCFunction)watch_end, METH_NOARGS,
     "end(): let go of the tape and of the hooks on autograd nodes; calls are passed on."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot watch_slots[] = {{Py_tp_new, watch_new},
                                    {Py_tp_dealloc, watch_free},
                                    {Py_tp_traverse, watch_traverse},
                                    {Py_tp_clear, watch_clear},
                                    {Py_tp_members, watch_members},
                                    {Py_tp_methods, watch_methods},
                                    {Py_tp_doc, "Records torch calls."},
                                    {0, NULL}};
static PyType_Spec watch_spec = {"trainprobe._native.OpWatch", sizeof(OpWatch), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watch_slots};

int op_watch_fill(PyObject *module) {
    t_op = PyUnicode_InternFromString("op"), t_backward = PyUnicode_InternFromString("backward");
    watch_type = (PyTypeObject *)PyType_FromSpec(&watch_spec);
    op_hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    if (!t_op || !t_backward || !watch_type || !op_hook_type) return -1;
    return PyModule_AddObjectRef(module, "OpWatch", (PyObject *)watch_type);
}
