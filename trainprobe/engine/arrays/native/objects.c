/* Value, Call and ModuleInfo: what they mean is written in trainprobe/_native.pyi. */
#include "objects.h"

PyTypeObject *value_type, *call_type, *info_type;
static PyObject *torch_tensor, *cpu, *empty;

static PyObject *kept(PyObject *x) { /* None is held as NULL */
    if (!x || x == Py_None) return NULL;
    Py_INCREF(x);
    return x;
}

static PyObject *value_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"row", "dtype", "shape", "type", "device", "requires_grad", "note", "tensor", "extra", NULL};
    Py_ssize_t row;
    PyObject *dtype, *shape, *kind = torch_tensor, *device = cpu, *grad = NULL, *note = NULL, *tensor = NULL, *extra = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOO|$OOOOOO", names, &row, &dtype, &shape, &kind, &device, &grad, &note, &tensor,
                                     &extra))
        return NULL;
    Value *self = (Value *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->row = row;
    self->dtype = kept(dtype), self->shape = kept(shape), self->type = kept(kind), self->device = kept(device);
    self->requires_grad = kept(grad), self->note = kept(note), self->tensor = kept(tensor), self->extra = kept(extra);
    return (PyObject *)self;
}

static void value_free(Value *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->type), Py_XDECREF(self->dtype), Py_XDECREF(self->shape), Py_XDECREF(self->device);
    Py_XDECREF(self->requires_grad), Py_XDECREF(self->note), Py_XDECREF(self->tensor), Py_XDECREF(self->extra);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyObject *value_with_note(Value *self, PyObject *note) {
    Value *twin = (Value *)PyType_GenericAlloc(value_type, 0);
    if (!twin) return NULL;
    twin->row = self->row;
    twin->type = kept(self->type), twin->dtype = kept(self->dtype), twin->shape = kept(self->shape), twin->device = kept(self->device);
    twin->requires_grad = kept(self->requires_grad), twin->tensor = kept(self->tensor), twin->extra = kept(self->extra);
    twin->note = kept(note);
    return (PyObject *)twin;
}

static PyMemberDef value_members[] = {{"row", T_PYSSIZET, offsetof(Value, row), 0, NULL},
                                      {"type", T_OBJECT, offsetof(Value, type), 0, NULL},
                                      {"dtype", T_OBJECT, offsetof(Value, dtype), 0, NULL},
                                      {"shape", T_OBJECT, offsetof(Value, shape), 0, NULL},
                                      {"device", T_OBJECT, offsetof(Value, device), 0, NULL},
                                      {"requires_grad", T_OBJECT, offsetof(Value, requires_grad), 0, NULL},
                                      {"note", T_OBJECT, offsetof(Value, note), 0, NULL},
                                      {"tensor", T_OBJECT, offsetof(Value, tensor), 0, NULL},
                                      {"extra", T_OBJECT, offsetof(Value, extra), 0, NULL},
                                      {NULL, 0, 0, 0, NULL}};

static PyMethodDef value_methods[] = {
    {"with_note", (PyCFunction)value_with_note, METH_O,
     "Return the same value with a note of its own; other places that refer to it keep theirs."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot value_slots[] = {
    {Py_tp_new, value_new},
    {Py_tp_dealloc, value_free},
    {Py_tp_members, value_members},
    {Py_tp_methods, value_methods},
    {Py_tp_doc, "A distinct tensor value that was looked at once; its numbers stand in row `row` of the reel's partials."},
    {0, NULL}};

static PyType_Spec value_spec = {"trainprobe.engine.core.records.Value", sizeof(Value), 0, Py_TPFLAGS_DEFAULT, value_slots};

Call *call_new(PyObject *kind, PyObject *name, Py_ssize_t number, PyObject *phase, PyObject *cls, PyObject *micro, PyObject *parent,
               Py_ssize_t stack) {
    Call *self = (Call *)PyType_GenericAlloc(call_type, 0);
    if (!self) return NULL;
    self->kind = kept(kind), self->name = kept(name), self->phase = kept(phase), self->cls = kept(cls ? cls : empty);
    self->micro = kept(micro), self->parent = kept(parent);
    self->call = number, self->stack = stack;
    return self;
}

static PyObject *call_make(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kind", "name", "call", "phase", "cls", "micro", "parent", "stack", NULL};
    PyObject *kind, *name, *phase, *cls = empty, *micro = NULL, *parent = NULL;
    Py_ssize_t number, stack = -1;
    (void)type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnO|$OOOn", names, &kind, &name, &number, &phase, &cls, &micro, &parent, &stack))
        return NULL;
    return (PyObject *)call_new(kind, name, number, phase, cls, micro, parent, stack);
}

static void call_free(Call *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->kind), Py_XDECREF(self->name), Py_XDECREF(self->phase), Py_XDECREF(self->cls), Py_XDECREF(self->micro);
    Py_XDECREF(self->parent), Py_XDECREF(self->args), Py_XDECREF(self->kwargs), Py_XDECREF(self->out), Py_XDECREF(self->params);
    Py_XDECREF(self->node);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef call_members[] = {{"kind", T_OBJECT, offsetof(Call, kind), 0, NULL},
                                     {"name", T_OBJECT, offsetof(Call, name), 0, NULL},
                                     {"call", T_PYSSIZET, offsetof(Call, call), 0, NULL},
                                     {"phase", T_OBJECT, offsetof(Call, phase), 0, NULL},
                                     {"cls", T_OBJECT, offsetof(Call, cls), 0, NULL},
                                     {"micro", T_OBJECT, offsetof(Call, micro), 0, NULL},
                                     {"parent", T_OBJECT, offsetof(Call, parent), 0, NULL},
                                     {"stack", T_PYSSIZET, offsetof(Call, stack), 0, NULL},
                                     {"args", T_OBJECT, offsetof(Call, args), 0, NULL},
                                     {"kwargs", T_OBJECT, offsetof(Call, kwargs), 0, NULL},
                                     {"out", T_OBJECT, offsetof(Call, out), 0, NULL},
                                     {"params", T_OBJECT, offsetof(Call, params), 0, NULL},
                                     {"node", T_OBJECT, offsetof(Call, node), 0, NULL},
                                     {NULL, 0, 0, 0, NULL}};

static PyType_Slot call_slots[] = {{Py_tp_new, call_make},
                                   {Py_tp_dealloc, call_free},
                                   {Py_tp_members, call_members},
                                   {Py_tp_doc, "One forward or backward of a module or op, or one group of parameter values."},
                                   {0, NULL}};

static PyType_Spec call_spec = {"trainprobe.engine.core.records.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, call_slots};

int is_info(PyObject *x) {
    if (Py_TYPE(x) == info_type) return 1;
    PyErr_SetString(PyExc_TypeError, "info must be a ModuleInfo");
    return 0;
}

static PyObject *info_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "cls", "parameters", "flags", "selected", NULL};
    PyObject *name, *cls, *parameters;
    long flags;
    int selected;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUO!lp", names, &name, &cls, &PyTuple_Type, &parameters, &flags, &selected)) return NULL;
    ModuleInfo *self = (ModuleInfo *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->name = Py_NewRef(name), self->cls = Py_NewRef(cls), self->parameters = Py_NewRef(parameters);
    self->flags = flags, self->selected = (char)selected;
    return (PyObject *)self;
}

static void info_free(ModuleInfo *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->name), Py_XDECREF(self->cls), Py_XDECREF(self->parameters);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef info_members[] = {{"name", T_OBJECT, offsetof(ModuleInfo, name), READONLY, NULL},
                                     {"cls", T_OBJECT, offsetof(ModuleInfo, cls), READONLY, NULL},
                                     {"parameters", T_OBJECT, offsetof(ModuleInfo, parameters), READONLY, NULL},
                                     {"flags", T_LONG, offsetof(ModuleInfo, flags), READONLY, NULL},
                                     {"selected", T_BOOL, offsetof(ModuleInfo, selected), READONLY, NULL},
                                     {NULL, 0, 0, 0, NULL}};

static PyType_Slot info_slots[] = {{Py_tp_new, info_new},
                                   {Py_tp_dealloc, info_free},
                                   {Py_tp_members, info_members},
                                   {Py_tp_doc, "A module of the model as it is recorded."},
                                   {0, NULL}};

static PyType_Spec info_spec = {"trainprobe.engine.capture.torch_modules.ModuleInfo", sizeof(ModuleInfo), 0, Py_TPFLAGS_DEFAULT, info_slots};

int objects_fill(PyObject *module) {
    torch_tensor = PyUnicode_InternFromString("torch.Tensor");
    cpu = PyUnicode_InternFromString("cpu");
    empty = PyUnicode_InternFromString("");
    value_type = (PyTypeObject *)PyType_FromSpec(&value_spec);
    call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    info_type = (PyTypeObject *)PyType_FromSpec(&info_spec);
    if (!torch_tensor || !cpu || !empty || !value_type || !call_type || !info_type) return -1;
    return PyModule_AddObjectRef(module, "ModuleInfo", (PyObject *)info_type) ||
           PyModule_AddObjectRef(module, "Value", (PyObject *)value_type) || PyModule_AddObjectRef(module, "Call", (PyObject *)call_type);
}
