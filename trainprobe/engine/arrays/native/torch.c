/* All that is asked of others: of torch about a tensor, an autograd node and what it is doing just now; of the plan,
   whether a micro-batch is wanted; of the guard, whether the training goes on after a fault. */
#include "objects.h"

PyObject *call_one(PyObject *callable, PyObject *x) { return PyObject_CallFunctionObjArgs(callable, x, NULL); }

Py_ssize_t stacks_capture(PyObject *stacks, Py_ssize_t base, const void *stop, int skip) {
    PyObject *ends = PyLong_FromVoidPtr((void *)stop);
    PyObject *found = ends ? PyObject_CallMethod(stacks, "capture", "nNi", base, ends, skip + 1) : NULL;
    Py_ssize_t number = found ? PyLong_AsSsize_t(found) : -2;
    Py_XDECREF(found);
    return number;
}

PyObject *call_two(PyObject *callable, PyObject *x, PyObject *y) {
    return PyObject_CallFunctionObjArgs(callable, x, y, NULL);
}

size_t mixed(const void *address) { return (size_t)(((uint64_t)(uintptr_t)address >> 4) * 0x9E3779B97F4A7C15u >> 20); }

/* ---- a tensor ---------------------------------------------------------------------------------------------------- */

static PyObject *names[TENSOR_ATTRIBUTES], *n_is_neg, *n_is_conj;

PyObject *tensor_attribute(PyObject *t, TensorAttribute which) { return PyObject_GetAttr(t, names[which]); }

static int answered(PyObject *answer) { /* 1, 0, or -1 with an exception set */
    int yes = !answer ? -1 : answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return yes;
}

/* Whether its elements in memory are those that it means: 1, 0, or -1 with an exception set. may_be_conjugate: it is
 * complex. */
int tensor_is_resolved(PyObject *t, int may_be_conjugate) {
    int yes = answered(PyObject_CallMethodObjArgs(t, n_is_neg, NULL));
    if (!yes && may_be_conjugate) yes = answered(PyObject_CallMethodObjArgs(t, n_is_conj, NULL));
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

static PyObject *n_data_ptr, *n_shape, *n_is_cpu, *n_stride;

/* 0, or -1 for what has no address and shape, often with an exception set. What is read holds while the tensor is held
 * and unchanged. */
int geometry_read(PyObject *t, Geometry *out) {
    out->cpu = -1, out->strides = NULL;
    PyObject *address = PyObject_CallMethodObjArgs(t, n_data_ptr, NULL),
             *shape = address ? PyObject_GetAttr(t, n_shape) : NULL;
    int failed = !shape || !PyTuple_Check(shape) || PyTuple_Size(shape) > MAX_DIMS;
    if (!failed) {
        out->data = PyLong_AsVoidPtr(address), out->nd = (int)PyTuple_Size(shape);
        for (int i = 0; i < out->nd; i++) out->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        failed = PyErr_Occurred() != NULL;
    }
    Py_XDECREF(address);
    Py_XDECREF(shape);
    return failed ? -1 : 0;
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
    for (int i = 0; strides && i < g->nd; i++) g->own_strides[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    g->strides = g->own_strides;
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

/* The shape as a tuple. A new reference, or NULL with an exception set. */
PyObject *geometry_shape(const Geometry *g) {
    PyObject *tuple = PyTuple_New(g->nd);
    for (int i = 0; tuple && i < g->nd; i++) {
        PyObject *size = PyLong_FromLongLong(g->sizes[i]);
        if (size) PyTuple_SetItem(tuple, i, size);
        else Py_CLEAR(tuple);
    }
    if (tuple && g->nd) PyObject_GC_UnTrack(tuple); /* it has no cycles: the collector need not walk it */
    return tuple;
}

/* ---- an autograd node -------------------------------------------------------------------------------------------- */

static PyObject *n_next, *n_sequence, *n_registers[2];

/* What the node hands its gradients on to, a tuple of (node or None, slot). */
PyObject *node_nexts(PyObject *node) { return PyObject_GetAttr(node, n_next); }

/* Its number in the order of creation; leaves carry the largest. -1 with an exception set. */
long long sequence_of(PyObject *node) {
    PyObject *number = PyObject_CallMethodObjArgs(node, n_sequence, NULL);
    int beyond = 0; /* an unsigned number */
    long long answer = number ? PyLong_AsLongLongAndOverflow(number, &beyond) : -1;
    Py_XDECREF(number);
    return beyond > 0 ? INT64_MAX : answer;
}

/* Hook it, before or behind. A new reference to what torch answers. */
PyObject *node_register(PyObject *node, PyObject *hook, int behind) {
    return PyObject_CallMethodObjArgs(node, n_registers[behind], hook, NULL);
}

/* ---- what torch is doing ----------------------------------------------------------------------------------------- */

static PyObject *t_enter, *t_exit, *t_compiling;
static PyObject *graph_task, *sequence_nr, *tensor_type, *mode_depth, *disable, *compiler; /* of torch, learned once */

int torch_known(void) { return compiler != NULL; }

static PyObject *learn_torch(PyObject *module, PyObject *args) {
    PyObject **places[] = {&graph_task, &sequence_nr, &tensor_type, &mode_depth, &disable, &compiler};
    (void)module;
    if (PyTuple_Size(args) != 6 || !PyDict_Check(PyTuple_GetItem(args, 5)))
        return PyErr_Format(PyExc_TypeError, "learn_torch takes five functions and what torch.compiler holds");
    for (int i = 0; i < 6; i++) {
        PyObject *before = *places[i];
        *places[i] = Py_NewRef(PyTuple_GetItem(args, i));
        Py_XDECREF(before);
    }
    return Py_NewRef(Py_None);
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
                                   "DisableTorchFunction, vars(torch.compiler))"},
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
                 {&n_registers[0], "register_prehook"},
                 {&n_registers[1], "register_hook"},
                 {&t_enter, "__enter__"},
                 {&t_exit, "__exit__"},
                 {&t_compiling, "_is_compiling_flag"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].at = PyUnicode_InternFromString(texts[i].text))) return -1;
    return PyModule_AddFunctions(module, functions);
}
