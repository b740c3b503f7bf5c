/* Torch enters a hook on an autograd node by a Python function of its own, which makes a handle with a weak reference for whoever wants
   to remove the hook again: 5 microseconds. Hooks of this extension leave with their node. What stands here takes that function's place
   while steps are collected (see engine/capture/node_hooks.py), enters ours alone, and passes everything else on. */
#include "objects.h"

typedef struct {
    PyObject_HEAD
    PyObject *below; /* what stood there before */
    char ended;      /* passes everything on */
} Registrar;

static PyTypeObject *registrar_type;
static PyObject *ordered_dict, *our_key;

static PyObject *registrar_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    return PyType_GenericAlloc(type, 0);
}

/* (hooks that hold this one, None). */
static PyObject *entry_new(PyObject *hook) {
    PyObject *hooks = PyObject_CallNoArgs(ordered_dict), *answer = NULL; /* ordered, as torch's own handles want to refer to it weakly */
    if (hooks && !PyObject_SetItem(hooks, our_key, hook)) answer = PyTuple_Pack(2, hooks, Py_None);
    Py_XDECREF(hooks);
    return answer;
}

/* (hooks of the node or None, hook) → (hooks of the node, handle). */
static PyObject *registrar_called(Registrar *self, PyObject *args, PyObject *kwargs) {
    PyObject *hook = PyTuple_Size(args) == 2 ? PyTuple_GetItem(args, 1) : NULL;
    int again = hook && Py_TYPE(hook) == node_hook_type, ours = again || (hook && Py_TYPE(hook) == op_hook_type);
    if (!ours || self->ended || PyTuple_GetItem(args, 0) != Py_None) {
        if (self->below) return PyObject_Call(self->below, args, kwargs);
        return PyErr_Format(PyExc_RuntimeError, "a registrar that stands in no place was called");
    }
    PyObject *entry = again ? node_hook_entry(hook) : NULL;
    if (entry || !(entry = entry_new(hook))) return entry;
    if (again) node_hook_keep(hook, entry);
    return entry;
}

static void registrar_free(Registrar *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->below);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef registrar_members[] = {{"below", T_OBJECT, offsetof(Registrar, below), 0, NULL},
                                          {"ended", T_BOOL, offsetof(Registrar, ended), 0, NULL},
                                          {NULL, 0, 0, 0, NULL}};

static PyType_Slot registrar_slots[] = {{Py_tp_new, registrar_new},
                                        {Py_tp_call, registrar_called},
                                        {Py_tp_dealloc, registrar_free},
                                        {Py_tp_members, registrar_members},
                                        {Py_tp_doc, "Enters the hooks of this extension on autograd nodes."},
                                        {0, NULL}};
static PyType_Spec registrar_spec = {"trainprobe._native.Registrar", sizeof(Registrar), 0, Py_TPFLAGS_DEFAULT, registrar_slots};

int hook_registry_fill(PyObject *module) {
    PyObject *collections = PyImport_ImportModule("collections");
    ordered_dict = collections ? PyObject_GetAttrString(collections, "OrderedDict") : NULL;
    Py_XDECREF(collections);
    our_key = PyLong_FromLong(-1); /* torch's handles count from 0 */
    registrar_type = (PyTypeObject *)PyType_FromSpec(&registrar_spec);
    if (!ordered_dict || !our_key || !registrar_type) return -1;
    return PyModule_AddObjectRef(module, "Registrar", (PyObject *)registrar_type);
}
