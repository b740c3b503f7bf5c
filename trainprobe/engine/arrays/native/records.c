/* The records of a step: Value, Call and ModuleInfo, whose fields trainprobe/_native.pyi explains; and the bytes by
   which two steps of one structure are recognised. */
#include <string.h>

#include "objects.h"

PyTypeObject *value_type, *call_type, *info_type;
static PyObject *torch_tensor, *cpu, *empty;

static PyObject *kept(PyObject *x) { /* None is held as NULL */
    if (!x || x == Py_None) return NULL;
    Py_INCREF(x);
    return x;
}

static PyObject *value_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"row",           "dtype", "shape",  "type",  "device",
                            "requires_grad", "note",  "tensor", "extra", NULL};
    Py_ssize_t row;
    PyObject *dtype, *shape, *kind = torch_tensor, *device = cpu, *grad = NULL, *note = NULL, *tensor = NULL,
                             *extra = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOO|$OOOOOO", names, &row, &dtype, &shape, &kind, &device, &grad,
                                     &note, &tensor, &extra))
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
    twin->type = kept(self->type), twin->dtype = kept(self->dtype), twin->shape = kept(self->shape),
    twin->device = kept(self->device);
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
    {Py_tp_doc,
     "A distinct tensor value that was looked at once; its numbers stand in row `row` of the reel's partials."},
    {0, NULL}};

static PyType_Spec value_spec = {"trainprobe.engine.core.records.Value", sizeof(Value), 0, Py_TPFLAGS_DEFAULT,
                                 value_slots};

Call *call_new(PyObject *kind, PyObject *name, Py_ssize_t number, PyObject *phase, PyObject *cls, PyObject *micro,
               PyObject *parent, Py_ssize_t stack) {
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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnO|$OOOn", names, &kind, &name, &number, &phase, &cls, &micro,
                                     &parent, &stack))
        return NULL;
    return (PyObject *)call_new(kind, name, number, phase, cls, micro, parent, stack);
}

static void call_free(Call *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->kind), Py_XDECREF(self->name), Py_XDECREF(self->phase), Py_XDECREF(self->cls),
        Py_XDECREF(self->micro);
    Py_XDECREF(self->parent), Py_XDECREF(self->args), Py_XDECREF(self->kwargs), Py_XDECREF(self->out),
        Py_XDECREF(self->params);
    Py_XDECREF(self->node);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef call_members[] = {
    {"kind", T_OBJECT, offsetof(Call, kind), 0, NULL},     {"name", T_OBJECT, offsetof(Call, name), 0, NULL},
    {"call", T_PYSSIZET, offsetof(Call, call), 0, NULL},   {"phase", T_OBJECT, offsetof(Call, phase), 0, NULL},
    {"cls", T_OBJECT, offsetof(Call, cls), 0, NULL},       {"micro", T_OBJECT, offsetof(Call, micro), 0, NULL},
    {"parent", T_OBJECT, offsetof(Call, parent), 0, NULL}, {"stack", T_PYSSIZET, offsetof(Call, stack), 0, NULL},
    {"args", T_OBJECT, offsetof(Call, args), 0, NULL},     {"out", T_OBJECT, offsetof(Call, out), 0, NULL},
    {"kwargs", T_OBJECT, offsetof(Call, kwargs), 0, NULL}, {"params", T_OBJECT, offsetof(Call, params), 0, NULL},
    {"node", T_OBJECT, offsetof(Call, node), 0, NULL},     {NULL, 0, 0, 0, NULL}};

static PyType_Slot call_slots[] = {
    {Py_tp_new, call_make},
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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUO!lp", names, &name, &cls, &PyTuple_Type, &parameters, &flags,
                                     &selected))
        return NULL;
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

static PyType_Spec info_spec = {"trainprobe.engine.capture.torch_modules.ModuleInfo", sizeof(ModuleInfo), 0,
                                Py_TPFLAGS_DEFAULT, info_slots};

/* ---- the structure of a step ------------------------------------------------------------------------------------- */

/* All that the calls of a step say apart from the numbers in rows, as bytes (see engine/core/step_layout.py). Equal
   calls give equal bytes, whichever objects they consist of; each part begins with a letter and, where its length
   varies, that length. */

typedef struct {
    const void *key;
    uint32_t number;
} Entry;

/* Object → number: values by the order in which they are met, calls by their places. */
typedef struct {
    Entry *table;
    size_t used, room; /* room: a power of two */
} Numbers;

typedef struct {
    char *bytes;
    size_t used, room;
    Numbers values, calls;
} Text;

static Entry *number_slot(Numbers *self, const void *key) {
    size_t i = mixed(key) & (self->room - 1);
    while (self->table[i].key && self->table[i].key != key) i = (i + 1) & (self->room - 1);
    return &self->table[i];
}

static int numbers_grow(Numbers *self) {
    Numbers wider = {.used = self->used, .room = self->room ? 2 * self->room : 1024};
    wider.table = PyMem_Calloc(wider.room, sizeof(Entry));
    if (!wider.table) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->room; i++)
        if (self->table[i].key) *number_slot(&wider, self->table[i].key) = self->table[i];
    PyMem_Free(self->table);
    *self = wider;
    return 0;
}

/* The number of an object; is_new: whether it was not known. -1 with an exception set. */
static int64_t number_of(Numbers *self, const void *key, int *is_new) {
    if (2 * (self->used + 1) > self->room && numbers_grow(self)) return -1;
    Entry *found = number_slot(self, key);
    *is_new = !found->key;
    if (*is_new) found->key = key, found->number = (uint32_t)self->used++;
    return found->number;
}

static int put(Text *self, char letter, const void *data, size_t size) {
    if (self->used + size + 1 > self->room) {
        size_t room = 2 * (self->room + size) + 4096;
        char *wider = PyMem_Realloc(self->bytes, room);
        if (!wider) return PyErr_NoMemory(), -1;
        self->bytes = wider, self->room = room;
    }
    self->bytes[self->used++] = letter;
    memcpy(self->bytes + self->used, data, size);
    self->used += size;
    return 0;
}

static int put_number(Text *self, char letter, int64_t number) { return put(self, letter, &number, sizeof number); }

static int put_text(Text *self, char letter, PyObject *text) {
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes) return put_number(self, letter, size) || put(self, '"', bytes, (size_t)size);
    PyErr_Clear(); /* half of a surrogate pair */
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    int failed = !encoded || put_number(self, letter, PyBytes_Size(encoded)) ||
                 put(self, '\'', PyBytes_AsString(encoded), (size_t)PyBytes_Size(encoded));
    Py_XDECREF(encoded);
    return failed;
}

static int put_any(Text *self, PyObject *x);

/* What is none of the kinds that are known: its class and what it says of itself. */
static int put_other(Text *self, PyObject *x) {
    PyObject *kind = PyObject_GetAttrString((PyObject *)Py_TYPE(x), "__qualname__"),
             *text = kind ? PyObject_Repr(x) : NULL;
    int failed = !text || put_text(self, 'o', kind) || put_text(self, 'r', text);
    Py_XDECREF(kind), Py_XDECREF(text);
    return failed;
}

static int put_integer(Text *self, PyObject *x) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(x, &overflow);
    return overflow ? put_other(self, x) : put_number(self, 'i', number);
}

static int put_value(Text *self, Value *v) {
    int is_new;
    int64_t number = number_of(&self->values, v, &is_new);
    if (number < 0 || put_number(self, is_new ? 'V' : 'v', number)) return -1;
    PyObject *const fields[] = {v->type, v->dtype, v->shape, v->device, v->requires_grad, v->note, v->tensor, v->extra};
    if (is_new && put_number(self, 'R', v->row)) return -1;
    for (size_t i = 0; is_new && i < sizeof fields / sizeof *fields; i++)
        if (put_any(self, fields[i])) return -1;
    return 0;
}

static int put_list(Text *self, PyObject *x) {
    Py_ssize_t n = PyList_Size(x);
    if (put_number(self, '[', n)) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_any(self, PyList_GetItem(x, i))) return -1;
    return 0;
}

static int put_tuple(Text *self, PyObject *x) {
    Py_ssize_t n = PyTuple_Size(x);
    if (put_number(self, '(', n)) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_any(self, PyTuple_GetItem(x, i))) return -1;
    return 0;
}

static int put_dict(Text *self, PyObject *x) {
    PyObject *key, *item;
    Py_ssize_t at = 0;
    if (put_number(self, '{', PyDict_Size(x))) return -1;
    while (PyDict_Next(x, &at, &key, &item))
        if (put_any(self, key) || put_any(self, item)) return -1;
    return 0;
}

static int put_kind(Text *self, PyObject *x) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == value_type) return put_value(self, (Value *)x);
    if (kind == &PyUnicode_Type) return put_text(self, 's', x);
    if (kind == &PyLong_Type) return put_integer(self, x);
    if (kind == &PyTuple_Type) return put_tuple(self, x);
    if (kind == &PyList_Type) return put_list(self, x);
    if (kind == &PyDict_Type) return put_dict(self, x);
    if (kind == &PyFloat_Type) {
        double number = PyFloat_AsDouble(x);
        return put(self, 'f', &number, sizeof number);
    }
    return put_other(self, x);
}

static int put_any(Text *self, PyObject *x) {
    if (!x || x == Py_None) return put(self, 'N', "", 0);
    if (x == Py_True || x == Py_False) return put(self, x == Py_True ? 'T' : 'F', "", 0);
    if (Py_EnterRecursiveCall(" in the arguments of a call")) return -1;
    int failed = put_kind(self, x);
    Py_LeaveRecursiveCall();
    return failed;
}

static int put_about(Text *self, Call *c) {
    return put_any(self, c->kind) || put_any(self, c->name) || put_number(self, '#', c->call) ||
           put_any(self, c->phase) || put_any(self, c->cls);
}

static int put_parent(Text *self, PyObject *parent) {
    if (!parent || Py_TYPE(parent) != call_type) return put_any(self, parent);
    Entry *known = number_slot(&self->calls, parent);
    return known->key ? put_number(self, 'p', known->number) : put(self, 'P', "", 0) || put_about(self, (Call *)parent);
}

static int put_call(Text *self, Call *c) {
    return put(self, 'c', "", 0) || put_about(self, c) || put_any(self, c->micro) || put_number(self, '|', c->stack) ||
           put_any(self, c->node) || put_parent(self, c->parent) || put_any(self, c->args) ||
           put_any(self, c->kwargs) || put_any(self, c->out) || put_any(self, c->params);
}

static int put_calls(Text *self, PyObject *calls) {
    Py_ssize_t n = PyList_Size(calls);
    int is_new;
    if (numbers_grow(&self->calls)) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *call = PyList_GetItem(calls, i);
        if (Py_TYPE(call) != call_type) return PyErr_Format(PyExc_TypeError, "%R is not a Call", call), -1;
        if (number_of(&self->calls, call, &is_new) < 0) return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_call(self, (Call *)PyList_GetItem(calls, i))) return -1;
    return 0;
}

static PyObject *structure(PyObject *module, PyObject *given) {
    (void)module;
    PyObject *calls = PySequence_List(given); /* an own list: what an object says of itself is code of the program */
    if (!calls) return NULL;
    Text text = {0};
    int failed = put_calls(&text, calls);
    Py_DECREF(calls);
    PyObject *bytes = failed ? NULL : PyBytes_FromStringAndSize(text.bytes, (Py_ssize_t)text.used);
    PyMem_Free(text.bytes), PyMem_Free(text.values.table), PyMem_Free(text.calls.table);
    return bytes;
}

static PyMethodDef functions[] = {
    {"structure", structure, METH_O,
     "structure(calls) -> bytes, which tell apart all that the calls say but for numbers in rows."},
    {NULL, NULL, 0, NULL}};

int records_fill(PyObject *module) {
    torch_tensor = PyUnicode_InternFromString("torch.Tensor");
    cpu = PyUnicode_InternFromString("cpu");
    empty = PyUnicode_InternFromString("");
    value_type = (PyTypeObject *)PyType_FromSpec(&value_spec);
    call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    info_type = (PyTypeObject *)PyType_FromSpec(&info_spec);
    if (!torch_tensor || !cpu || !empty || !value_type || !call_type || !info_type) return -1;
    return PyModule_AddFunctions(module, functions) ||
           PyModule_AddObjectRef(module, "ModuleInfo", (PyObject *)info_type) ||
           PyModule_AddObjectRef(module, "Value", (PyObject *)value_type) ||
           PyModule_AddObjectRef(module, "Call", (PyObject *)call_type);
}
