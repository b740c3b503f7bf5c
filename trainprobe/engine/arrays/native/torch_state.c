/* What the parts that record calls ask: torch, what it is doing just now; the plan, whether a micro-batch is wanted; and the guard,
   whether the training goes on after a fault. */
#include "objects.h"

static PyObject *t_enter, *t_exit, *t_compiling;
static PyObject *graph_task, *sequence_nr, *tensor_type, *mode_depth, *disable, *compiler; /* of torch, learned once */

int torch_known(void) { return compiler != NULL; }

static PyObject *learn_torch(PyObject *module, PyObject *args) {
    PyObject **places[] = {&graph_task, &sequence_nr, &tensor_type, &mode_depth, &disable, &compiler};
    (void)module;
    if (PyTuple_Size(args) != 7 || !PyDict_Check(PyTuple_GetItem(args, 5)))
        return PyErr_Format(PyExc_TypeError, "learn_torch takes five functions, what torch.compiler holds, and DLPack's table or None");
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
    PyObject *off = PyObject_CallNoArgs(disable), *entered = off ? PyObject_CallMethodObjArgs(off, t_enter, NULL) : NULL;
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

static PyMethodDef functions[] = {
    {"learn_torch", learn_torch, METH_VARARGS,
     "learn_torch(graph_task_id, sequence_nr, Tensor, len_function_stack, DisableTorchFunction, vars(torch.compiler), DLPack's table)"},
    {NULL, NULL, 0, NULL}};

int torch_state_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {{&t_enter, "__enter__"}, {&t_exit, "__exit__"}, {&t_compiling, "_is_compiling_flag"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return -1;
    return PyModule_AddFunctions(module, functions);
}
