/* All that is asked of others: of torch about a tensor, an autograd node and what it is doing just now, as cheaply as
   Python allows; of the plan, whether a micro-batch is wanted; of the guard, whether the training goes on after a
   fault. */
#include <string.h>

#include "objects.h"

/* ---- calls and attributes: descriptors are found once, and the look-up that Python makes each time is saved ------ */

/* CPython's own call, where it is there: in the stable ABI since 3.12, exported since 3.11. */
#ifdef __ELF__
extern PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *args, size_t n, PyObject *names)
    __attribute__((weak));
#endif

PyObject *call_one(PyObject *callable, PyObject *x) {
#ifdef __ELF__
    if (PyObject_Vectorcall) return PyObject_Vectorcall(callable, &x, 1, NULL);
#endif
    return PyObject_CallFunctionObjArgs(callable, x, NULL);
}

PyObject *call_two(PyObject *callable, PyObject *x, PyObject *y) {
#ifdef __ELF__
    PyObject *args[] = {x, y};
    if (PyObject_Vectorcall) return PyObject_Vectorcall(callable, args, 2, NULL);
#endif
    return PyObject_CallFunctionObjArgs(callable, x, y, NULL);
}

size_t mixed(const void *address) { return (size_t)(((uint64_t)(uintptr_t)address >> 4) * 0x9E3779B97F4A7C15u >> 20); }

Attribute attribute_of(PyTypeObject *type, PyObject *name) {
    Attribute found = {PyObject_GetAttr((PyObject *)type, name),
                       (descrgetfunc)PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get)};
    if (!found.descriptor) PyErr_Clear();
    if (found.descriptor && Py_TYPE(found.descriptor) != &PyGetSetDescr_Type) Py_CLEAR(found.descriptor);
    return found;
}

static PyObject *method_of(PyTypeObject *type, PyObject *name) {
    PyObject *method = PyObject_GetAttr((PyObject *)type, name);
    if (!method) PyErr_Clear();
    if (method && Py_TYPE(method) != &PyMethodDescr_Type) Py_CLEAR(method);
    return method;
}

PyObject *attribute_ask(const Attribute *a, PyObject *x, PyObject *name) {
    return a->descriptor ? a->get(a->descriptor, x, (PyObject *)Py_TYPE(x)) : PyObject_GetAttr(x, name);
}

static PyObject *ask_method(PyObject *method, PyObject *x, PyObject *name) {
    return method ? call_one(method, x) : PyObject_CallMethodObjArgs(x, name, NULL);
}

/* ---- a tensor ---------------------------------------------------------------------------------------------------- */

static PyTypeObject *plain[2];
static PyObject *names[TENSOR_ATTRIBUTES], *is_neg, *is_conj, *n_is_neg, *n_is_conj;
static Attribute attributes[TENSOR_ATTRIBUTES];

/* Learn which two classes are plain tensors, the second derived from the first; until then, and of others, attributes
 * are looked up. */
void attributes_learn(PyTypeObject *const *types) {
    if (plain[0] == types[0] && plain[1] == types[1]) return;
    PyTypeObject *before[2] = {plain[0], plain[1]};
    for (int i = 0; i < 2; i++) plain[i] = (PyTypeObject *)Py_NewRef(types[i]);
    for (int i = 0; i < TENSOR_ATTRIBUTES; i++) {
        Py_XDECREF(attributes[i].descriptor);
        attributes[i] = attribute_of(plain[0], names[i]);
    }
    Py_XDECREF(is_neg), Py_XDECREF(is_conj);
    is_neg = method_of(plain[0], n_is_neg), is_conj = method_of(plain[0], n_is_conj);
    for (int i = 0; i < 2; i++) Py_XDECREF(before[i]);
}

static int is_plain(PyObject *t) { return Py_TYPE(t) == plain[0] || Py_TYPE(t) == plain[1]; }

PyObject *tensor_attribute(PyObject *t, TensorAttribute which) {
    return is_plain(t) ? attribute_ask(&attributes[which], t, names[which]) : PyObject_GetAttr(t, names[which]);
}

static int answered(PyObject *answer) { /* 1, 0, or -1 with an exception set */
    int yes = !answer ? -1 : answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return yes;
}

/* Whether its elements in memory are those that it means: 1, 0, or -1 with an exception set. may_be_conjugate: it is
 * complex. */
int tensor_is_resolved(PyObject *t, int may_be_conjugate) {
    int yes = answered(ask_method(is_plain(t) ? is_neg : NULL, t, n_is_neg));
    if (!yes && may_be_conjugate) yes = answered(ask_method(is_plain(t) ? is_conj : NULL, t, n_is_conj));
    return yes < 0 ? -1 : !yes;
}

/* The node that made a tensor: a new reference, or NULL where there is none or with an exception set. */
PyObject *node_behind(PyObject *t) {
    PyObject *node = tensor_attribute(t, GRAD_FN);
    if (node == Py_None) Py_CLEAR(node);
    else if (!node && PyErr_ExceptionMatches(PyExc_RuntimeError))
        PyErr_Clear(); /* a view that autograd refuses to place */
    return node;
}

/* ---- where its elements lie -------------------------------------------------------------------------------------- */

/* torch says it in one C call through the table of functions that it offers other libraries (DLPack's exchange API,
   since torch 2.10), which is a tenth of what its Python attributes take; these are asked where there is no such table,
   and for tensors that it refuses. */

/* The part of DLPack 1.3 (github.com/dmlc/dlpack) that is used; the layout is fixed for all versions 1.x. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct Exchange {
    struct {
        uint32_t major, minor;
    } version;
    const struct Exchange *previous;
    void *allocate, *from_object, *to_object;
    int (*describe)(void *tensor, DLTensor *out);
    void *stream;
} Exchange;

enum { DL_CPU = 1, DL_MAJOR = 1 };

static const Exchange *exchange;
static PyObject *n_data_ptr, *n_shape, *n_is_cpu, *n_stride;

static int geometry_learn(PyObject *capsule) { /* None: this torch has no such table */
    exchange = NULL;
    if (capsule == Py_None) return 0;
    const Exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api) return -1;
    while (api && api->version.major > DL_MAJOR) api = api->previous;
    if (api && api->version.major == DL_MAJOR && api->describe) exchange = api;
    return 0;
}

static int read_attributes(PyObject *t, Geometry *out) {
    PyObject *address = PyObject_CallMethodObjArgs(t, n_data_ptr, NULL),
             *shape = address ? PyObject_GetAttr(t, n_shape) : NULL;
    int failed = !shape || !PyTuple_Check(shape) || PyTuple_Size(shape) > MAX_DIMS;
    if (!failed) {
        out->data = PyLong_AsVoidPtr(address), out->nd = (int)PyTuple_Size(shape);
        for (int i = 0; i < out->nd; i++) out->own[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        out->sizes = out->own;
        failed = PyErr_Occurred() != NULL;
    }
    Py_XDECREF(address);
    Py_XDECREF(shape);
    return failed ? -1 : 0;
}

/* 0, or -1 for what has no address and shape, often with an exception set. What is read holds while the tensor is held
 * and unchanged. */
int geometry_read(PyObject *t, Geometry *out) {
    DLTensor described;
    out->cpu = -1, out->kind = 0, out->strides = NULL;
    if (!exchange) return read_attributes(t, out);
    if (exchange->describe(t, &described)) {
        PyErr_Clear(); /* on a device or with elements that DLPack does not know */
        return read_attributes(t, out);
    }
    if (described.ndim > MAX_DIMS) return -1;
    out->data = (char *)described.data + described.byte_offset, out->nd = described.ndim, out->sizes = described.shape,
    out->strides = described.strides;
    out->cpu = described.device_type == DL_CPU;
    out->kind = (uint32_t)described.dtype.lanes << 16 | (uint32_t)described.dtype.bits << 8 | described.dtype.code;
    return 0;
}

/* Whether the elements lie in the host's memory; asks for the strides where they are not known. -1 with an exception
 * set. */
int geometry_on_host(PyObject *t, Geometry *g) {
    if (g->cpu < 0) {
        PyObject *answer = PyObject_GetAttr(t, n_is_cpu);
        g->cpu = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
    }
    if (g->cpu <= 0) return g->cpu;
    return geometry_strides(t, g) ? -1 : 1;
}

/* Asks for the strides where they are not known. -1 with an exception set. */
int geometry_strides(PyObject *t, Geometry *g) {
    if (g->strides || !g->nd) return 0;
    PyObject *strides = PyObject_CallMethodObjArgs(t, n_stride, NULL);
    for (int i = 0; strides && i < g->nd; i++) g->own[MAX_DIMS + i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    g->strides = g->own + MAX_DIMS;
    Py_XDECREF(strides);
    return PyErr_Occurred() ? -1 : 0;
}

int geometry_is_contiguous(const Geometry *g) {
    int64_t expected = 1;
    for (int i = 0; i < g->nd; i++)
        if (g->sizes[i] == 0) return 1;
    for (int i = g->nd - 1; i >= 0; i--) {
        if (g->sizes[i] != 1 && g->strides[i] != expected) return 0;
        expected *= g->sizes[i];
    }
    return 1;
}

/* ---- its shape: each a tuple that is made once, so that equal shapes are one object ------------------------------ */

#define MOST_SHAPES 4096

struct Shape {
    PyObject *tuple;
    int64_t *sizes;
    uint64_t hash;
    int nd;
};

static int is_shape(const Shape *shape, const Geometry *g) {
    return shape->nd == g->nd && !memcmp(shape->sizes, g->sizes, (size_t)g->nd * sizeof *g->sizes);
}

static PyObject *shape_tuple(const Geometry *g) {
    PyObject *tuple = PyTuple_New(g->nd);
    for (int i = 0; tuple && i < g->nd; i++) {
        PyObject *size = PyLong_FromLongLong(g->sizes[i]);
        if (size) PyTuple_SetItem(tuple, i, size);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

static int shapes_grow(Shapes *self) {
    size_t room = self->room ? self->room * 2 : 64;
    Shape *table = PyMem_Calloc(room, sizeof *table);
    if (!table) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->room; i++) {
        if (!self->table[i].tuple) continue;
        size_t at = self->table[i].hash & (room - 1);
        while (table[at].tuple) at = (at + 1) & (room - 1);
        table[at] = self->table[i];
    }
    PyMem_Free(self->table);
    self->table = table, self->room = room;
    return 0;
}

void shapes_clear(Shapes *self) {
    Shape *table = self->table;
    size_t room = self->room;
    *self = (Shapes){0};
    for (size_t i = 0; i < room; i++) {
        Py_XDECREF(table[i].tuple);
        PyMem_Free(table[i].sizes);
    }
    PyMem_Free(table);
}

/* The shape as a tuple. A new reference, or NULL with an exception set. */
PyObject *shapes_find(Shapes *self, const Geometry *g) {
    uint64_t hash = (uint64_t)g->nd + 1;
    for (int i = 0; i < g->nd; i++) hash = (hash ^ (uint64_t)g->sizes[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    if (self->used == MOST_SHAPES) shapes_clear(self); /* shapes that change without end: known ones are met again */
    if (self->used * 2 >= self->room && shapes_grow(self)) return NULL;
    size_t at = hash & (self->room - 1);
    for (; self->table[at].tuple; at = (at + 1) & (self->room - 1))
        if (self->table[at].hash == hash && is_shape(&self->table[at], g)) return Py_NewRef(self->table[at].tuple);
    PyObject *tuple = shape_tuple(g);
    int64_t *sizes = PyMem_Malloc((size_t)g->nd * sizeof *sizes); /* not NULL where there are none */
    if (!tuple || !sizes) {
        Py_XDECREF(tuple), PyMem_Free(sizes);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    memcpy(sizes, g->sizes, (size_t)g->nd * sizeof *sizes);
    self->table[at] = (Shape){Py_NewRef(tuple), sizes, hash, g->nd};
    self->used++;
    return tuple;
}

/* ---- an autograd node; one of a class written in Python is asked as Python asks it ------------------------------- */

#define PLACES 2048 /* a power of two; torch has some 700 kinds of nodes */

typedef struct {
    PyTypeObject *type; /* not of the heap: it stays as long as the process */
    Attribute next;
    PyObject *sequence, *registers[2]; /* methods; the latter before and behind */
    int leaf;                          /* the accumulator of a leaf, whose number is always the largest */
} Kind;

static Kind kinds[PLACES];
static int known_kinds;
static PyObject *n_next, *n_sequence, *n_name, *n_registers[2];

static const Kind *kind_of(PyTypeObject *type) { /* NULL: to be asked as Python asks */
    size_t at = mixed(type) & (PLACES - 1);
    for (; kinds[at].type; at = (at + 1) & (PLACES - 1))
        if (kinds[at].type == type) return &kinds[at];
    if (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE || known_kinds * 2 >= PLACES) return NULL;
    PyObject *name = PyObject_GetAttr((PyObject *)type, n_name);
    int leaf = name && PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, "AccumulateGrad");
    Py_XDECREF(name), PyErr_Clear();
    kinds[at] = (Kind){type,
                       attribute_of(type, n_next),
                       method_of(type, n_sequence),
                       {method_of(type, n_registers[0]), method_of(type, n_registers[1])},
                       leaf};
    known_kinds++;
    return &kinds[at];
}

/* What the node hands its gradients on to, a tuple of (node or None, slot). */
PyObject *node_nexts(PyObject *node) {
    const Kind *kind = kind_of(Py_TYPE(node));
    return kind ? attribute_ask(&kind->next, node, n_next) : PyObject_GetAttr(node, n_next);
}

/* Its number in the order of creation; leaves carry the largest. -1 with an exception set. */
long long sequence_of(PyObject *node) {
    const Kind *kind = kind_of(Py_TYPE(node));
    if (kind && kind->leaf) return INT64_MAX;
    PyObject *number = ask_method(kind ? kind->sequence : NULL, node, n_sequence);
    int beyond = 0; /* an unsigned number */
    long long answer = number ? PyLong_AsLongLongAndOverflow(number, &beyond) : -1;
    Py_XDECREF(number);
    return beyond > 0 ? INT64_MAX : answer;
}

/* Hook it, before or behind. A new reference to what torch answers. */
PyObject *node_register(PyObject *node, PyObject *hook, int behind) {
    const Kind *kind = kind_of(Py_TYPE(node));
    PyObject *method = kind ? kind->registers[behind] : NULL;
    if (method) return call_two(method, node, hook);
    return PyObject_CallMethodObjArgs(node, n_registers[behind], hook, NULL);
}

/* ---- what torch is doing ----------------------------------------------------------------------------------------- */

static PyObject *t_enter, *t_exit, *t_compiling;
static PyObject *graph_task, *sequence_nr, *tensor_type, *mode_depth, *disable, *compiler; /* of torch, learned once */

int torch_known(void) { return compiler != NULL; }

static PyObject *learn_torch(PyObject *module, PyObject *args) {
    PyObject **places[] = {&graph_task, &sequence_nr, &tensor_type, &mode_depth, &disable, &compiler};
    (void)module;
    if (PyTuple_Size(args) != 7 || !PyDict_Check(PyTuple_GetItem(args, 5)))
        return PyErr_Format(PyExc_TypeError,
                            "learn_torch takes five functions, what torch.compiler holds, and DLPack's table or None");
    for (int i = 0; i < 6; i++) {
        PyObject *before = *places[i];
        *places[i] = Py_NewRef(PyTuple_GetItem(args, i));
        Py_XDECREF(before);
    }
    return geometry_learn(PyTuple_GetItem(args, 6)) ? NULL : Py_NewRef(Py_None);
}

static long long number_from(PyObject *function) {
    PyObject *answer = PyObject_CallNoArgs(function);
    long long number = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return number;
}

long long graph_task_now(void) { return number_from(graph_task); }
long long sequence_now(void) { return number_from(sequence_nr); }

int is_tensor(PyObject *x) { return PyObject_IsInstance(x, tensor_type); }

int compiling_now(void) {
    PyObject *flag = PyDict_GetItemWithError(compiler, t_compiling); /* what torch.compiler.is_compiling reads */
    return !flag ? (PyErr_Occurred() ? -1 : 0) : flag == Py_True;
}

PyObject *functions_off(void) {
    PyObject *off = PyObject_CallNoArgs(disable),
             *entered = off ? PyObject_CallMethodObjArgs(off, t_enter, NULL) : NULL;
    if (!entered) Py_CLEAR(off);
    Py_XDECREF(entered);
    return off;
}

PyObject *modes_off(void) { return number_from(mode_depth) > 0 ? functions_off() : NULL; }

void modes_on(PyObject *off) {
    if (!off) return;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *left = PyObject_CallMethodObjArgs(off, t_exit, Py_None, Py_None, Py_None, NULL);
    if (!left) PyErr_Clear();
    Py_XDECREF(left);
    Py_DECREF(off);
    PyErr_Restore(type, error, trace);
}

/* ---- the guard and the plan -------------------------------------------------------------------------------------- */

int give_to_guard(PyObject *fault) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    PyObject *done = call_one(fault, error ? error : Py_None);
    Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(trace);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int micro_is_wanted(MicroGate *gate, PyObject *micro) {
    if (gate->micro && PyObject_RichCompareBool(gate->micro, micro, Py_EQ) == 1) return gate->wanted;
    PyObject *answer = call_one(gate->function, micro);
    if (!answer) return -1;
    gate->wanted = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    Py_XDECREF(gate->micro);
    gate->micro = Py_NewRef(micro);
    return gate->wanted;
}

static PyMethodDef functions[] = {{"learn_torch", learn_torch, METH_VARARGS,
                                   "learn_torch(graph_task_id, sequence_nr, Tensor, len_function_stack, "
                                   "DisableTorchFunction, vars(torch.compiler), DLPack's table)"},
                                  {NULL, NULL, 0, NULL}};

int torch_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } texts[] = {{&names[VERSION], "_version"},
                 {&names[REQUIRES_GRAD], "requires_grad"},
                 {&names[GRAD_FN], "grad_fn"},
                 {&names[OUTPUT_NR], "output_nr"},
                 {&names[BASE], "_base"},
                 {&n_is_neg, "is_neg"},
                 {&n_is_conj, "is_conj"},
                 {&n_data_ptr, "data_ptr"},
                 {&n_shape, "shape"},
                 {&n_is_cpu, "is_cpu"},
                 {&n_stride, "stride"},
                 {&n_next, "next_functions"},
                 {&n_sequence, "_sequence_nr"},
                 {&n_name, "__name__"},
                 {&n_registers[0], "register_prehook"},
                 {&n_registers[1], "register_hook"},
                 {&t_enter, "__enter__"},
                 {&t_exit, "__exit__"},
                 {&t_compiling, "_is_compiling_flag"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].at = PyUnicode_InternFromString(texts[i].text))) return -1;
    return PyModule_AddFunctions(module, functions);
}
