/* The type that records module calls: its life within a step and its methods. */
#include "module_watch.h"

static PyObject *watch_end(ModuleWatch *self, PyObject *unused) {
    (void)unused;
    PyObject *open = self->open, *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    self->open = NULL;
    for (Py_ssize_t i = 0; open && i < PyList_Size(open); i++) { /* sums that still waited for a consumer */
        if (contribution_flush(PyList_GetItem(open, i)) && give_to_guard(self->fault)) PyErr_Clear();
    }
    Py_XDECREF(open);
    hooks_forget(self);
    self->gradient_call = NULL;
    if (self->graph) graph_forget(self->graph);
    PyObject **held[] = {&self->tape,    (PyObject **)&self->native, &self->calls,          &self->forwards,
                         &self->arrived, &self->backward_micro,      &self->gradient_calls, &self->gate.micro};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_CLEAR(*held[i]);
    PyErr_Restore(type, error, trace);
    return Py_NewRef(Py_None);
}

static PyObject *watch_begin(ModuleWatch *self, PyObject *args) {
    PyObject *tape, *native, *calls, *arrived;
    if (!torch_known()) return PyErr_Format(PyExc_RuntimeError, "learn_torch must be called first");
    if (!PyArg_ParseTuple(args, "OO!O!O!", &tape, tape_type, &native, &PyList_Type, &calls, &PyDict_Type, &arrived))
        return NULL;
    Py_XDECREF(watch_end(self, NULL));
    self->tape = Py_NewRef(tape), self->native = (Tape *)Py_NewRef(native), self->calls = Py_NewRef(calls),
    self->arrived = Py_NewRef(arrived);
    self->forwards = PyDict_New(), self->gradient_calls = PyDict_New(), self->open = PyList_New(0);
    self->thread = PyThread_get_thread_ident();
    return self->forwards && self->gradient_calls && self->open ? Py_NewRef(Py_None) : NULL;
}

#define HELD 11
static void held(ModuleWatch *self, PyObject **places[HELD]) {
    PyObject **all[HELD] = {&self->guard,        &self->fault,  &self->other_thread, &self->odd_edges,
                            &self->edge_of,      &self->places, &self->plus,         &self->gate.function,
                            &self->grad_enabled, &self->stacks, &self->stack};
    for (int i = 0; i < HELD; i++) places[i] = all[i];
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"guard",      "fault",   "other_thread", "odd_edges", "edge_of", "places",
                            "plus",       "micro",   "grad_enabled", "stacks",    "stack",   "plain",
                            "untouched",  "stop",    "forward",      "backward",  "inputs",  "kwargs",
                            "parameters", "outputs", "recompute",    NULL};
    PyObject *o[HELD], *plain[2], *untouched, *stop, **places[HELD];
    ModuleWatch w;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOOO!(OO)UOppppppp", names, &o[0], &o[1], &o[2], &o[3],
                                     &o[4], &o[5], &o[6], &o[7], &o[8], &o[9], &PyList_Type, &o[10], &plain[0],
                                     &plain[1], &untouched, &stop, &w.forward, &w.backward, &w.inputs, &w.kwargs,
                                     &w.parameters, &w.outputs, &w.recompute))
        return NULL;
    ModuleWatch *self = (ModuleWatch *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    held(self, places);
    for (int i = 0; i < HELD; i++) *places[i] = Py_NewRef(o[i]);
    for (int i = 0; i < 2; i++) self->plain[i] = (PyTypeObject *)Py_NewRef(plain[i]);
    self->untouched = Py_NewRef(untouched);
    self->stop = PyLong_AsVoidPtr(stop);
    self->forward = w.forward, self->backward = w.backward, self->inputs = w.inputs, self->kwargs = w.kwargs;
    self->parameters = w.parameters, self->outputs = w.outputs, self->recompute = w.recompute;
    self->graph = graph_new_empty();
    if (!self->graph) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int watch_traverse(ModuleWatch *self, visitproc visit, void *arg) {
    PyObject **places[HELD];
    held(self, places);
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int i = 0; i < HELD; i++) Py_VISIT(*places[i]);
    Py_VISIT(self->tape);
    Py_VISIT((PyObject *)self->native);
    Py_VISIT(self->calls);
    return 0;
}

static int watch_clear(ModuleWatch *self) {
    PyObject **places[HELD];
    Py_XDECREF(watch_end(self, NULL));
    held(self, places);
    for (int i = 0; i < HELD; i++) Py_CLEAR(*places[i]);
    return 0;
}

static void watch_free(ModuleWatch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    Py_CLEAR(self->graph);
    Py_CLEAR(self->untouched);
    Py_XDECREF((PyObject *)self->plain[0]);
    Py_XDECREF((PyObject *)self->plain[1]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"run", (PyCFunction)(void (*)(void))module_run, METH_FASTCALL,
     "run(info, original, module, args, kwargs): a call of a module of the model."},
    {"parameter_hook", (PyCFunction)(void (*)(void))parameter_hook_new, METH_FASTCALL,
     "parameter_hook(info, name, key): a pre-hook for the gradient accumulator of a parameter."},
    {"parameter", (PyCFunction)(void (*)(void))parameter_take, METH_FASTCALL,
     "parameter(info, name, key, gradient): record one gradient."},
    {"begin", (PyCFunction)watch_begin, METH_VARARGS, "begin(tape, native, calls, arrived): record onto this tape."},
    {"end", (PyCFunction)watch_end, METH_NOARGS,
     "end(): let go of the tape, the graph and the hooks; calls are passed on."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot watch_slots[] = {{Py_tp_new, watch_new},
                                    {Py_tp_dealloc, watch_free},
                                    {Py_tp_traverse, watch_traverse},
                                    {Py_tp_clear, watch_clear},
                                    {Py_tp_methods, watch_methods},
                                    {Py_tp_doc, "Records module calls."},
                                    {0, NULL}};
static PyType_Spec watch_spec = {"trainprobe._native.ModuleWatch", sizeof(ModuleWatch), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, watch_slots};

int module_watch_fill(PyObject *module) {
    PyObject *type = PyType_FromSpec(&watch_spec);
    return type ? PyModule_AddObjectRef(module, "ModuleWatch", type) : -1;
}
