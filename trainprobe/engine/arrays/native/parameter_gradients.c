/* The gradients of parameters, as they reach their accumulators: one call a module and number of arrival (see
 * engine/capture/torch_modules.py). */
#include "module_watch.h"

static PyObject *t_parameter, *t_backward, *t_micro;

/* The call of a module's gradients with this number that is on the tape already, or NULL. Not a new reference. */
static Call *earlier_gradient_call(ModuleWatch *self, const ModuleInfo *info, Py_ssize_t number) {
    for (Py_ssize_t i = PyList_Size(self->calls) - 1; i >= 0; i--) {
        Call *call = (Call *)PyList_GetItem(self->calls, i);
        if (Py_TYPE((PyObject *)call) == call_type && call->kind == t_parameter && call->name == info->name &&
            call->call == number)
            return call;
    }
    return NULL;
}

static Call *new_gradient_call(ModuleWatch *self, const ModuleInfo *info, Py_ssize_t number, PyObject *micro,
                               int is_last) {
    Call *call = call_new(t_parameter, info->name, number, t_backward, info->cls, micro, NULL, -1);
    if (!call) return NULL;
    call->params = PyDict_New();
    if (!call->params || (is_last && PyDict_SetItem(self->gradient_calls, info->name, (PyObject *)call)) ||
        PyList_Append(self->calls, (PyObject *)call)) {
        Py_DECREF((PyObject *)call);
        return NULL;
    }
    return call;
}

/* The call that a module's gradients with this number stand in: mostly the latest of all, or the module's last. An
   earlier one where backward passes of several threads, or of chosen parameters, come in turns. */
static Call *gradient_call(ModuleWatch *self, const ModuleInfo *info, Py_ssize_t number, PyObject *micro) {
    Call *latest = self->gradient_call, *known = NULL;
    if (latest && latest->name == info->name && latest->call == number) return (Call *)Py_NewRef((PyObject *)latest);
    Call *last = (Call *)PyDict_GetItemWithError(self->gradient_calls, info->name);
    if (PyErr_Occurred()) return NULL;
    if (last)
        known = last->call == number ? last : last->call > number ? earlier_gradient_call(self, info, number) : NULL;
    int is_last = !last || last->call < number;
    Call *call = known ? (Call *)Py_NewRef((PyObject *)known) : new_gradient_call(self, info, number, micro, is_last);
    if (call) self->gradient_call = call;
    return call;
}

static int record_gradient(ModuleWatch *self, const ModuleInfo *info, PyObject *name, PyObject *key,
                           PyObject *gradient) {
    PyObject *micro = self->backward_micro ? Py_NewRef(self->backward_micro) : PyObject_GetAttr(self->tape, t_micro);
    int wanted = micro ? micro_is_wanted(&self->gate, micro) : -1, failed = wanted < 0;
    if (wanted > 0) {
        PyObject *known = PyDict_GetItemWithError(self->arrived, key);
        Py_ssize_t number = known ? PyLong_AsSsize_t(known) : 0;
        PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(number + 1);
        failed = !next || PyDict_SetItem(self->arrived, key, next);
        Py_XDECREF(next);
        Call *call = failed ? NULL : gradient_call(self, info, number, micro);
        PyObject *at = NULL, *tree = NULL;
        if (call && info->flags & SAVE)
            at = PyUnicode_FromFormat("Module.%U.%U.parameters_grad.%zd.%U", info->name, info->cls, number, name);
        if (call && !PyErr_Occurred()) tree = tape_tree(self->native, gradient, info->flags, at, 0);
        failed = !tree || PyDict_SetItem(call->params, name, tree) ||
                 (self->native && tape_report(self->native, call, PARAMS));
        Py_XDECREF(at);
        Py_XDECREF(tree);
        Py_XDECREF((PyObject *)call);
    }
    Py_XDECREF(micro);
    return failed ? -1 : 0;
}

static int take_gradient(ModuleWatch *self, PyObject *about, PyObject *name, PyObject *key, PyObject *gradient) {
    if (!self->native || gradient == Py_None) return 0;
    PyObject *off = modes_off();
    int failed = PyErr_Occurred() || record_gradient(self, (const ModuleInfo *)about, name, key, gradient);
    modes_on(off);
    return failed && give_to_guard(self->fault) ? -1 : 0;
}

typedef struct {
    PyObject_HEAD
    ModuleWatch *watch;
    PyObject *info, *name, *key;
} ParameterHook;

static PyTypeObject *parameter_type;

static PyObject *parameter_called(ParameterHook *hook, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *gradients = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    if (!gradients || !PyTuple_Check(gradients) || PyTuple_Size(gradients) < 1) return Py_NewRef(Py_None);
    ModuleWatch *self = (ModuleWatch *)Py_NewRef((PyObject *)hook->watch);
    int failed = take_gradient(self, hook->info, hook->name, hook->key, PyTuple_GetItem(gradients, 0));
    Py_DECREF((PyObject *)self);
    return failed ? NULL : Py_NewRef(Py_None);
}

static void parameter_free(ParameterHook *hook) {
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    Py_XDECREF((PyObject *)hook->watch);
    Py_XDECREF(hook->info);
    Py_XDECREF(hook->name);
    Py_XDECREF(hook->key);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

static PyType_Slot parameter_slots[] = {{Py_tp_dealloc, parameter_free}, {Py_tp_call, parameter_called}, {0, NULL}};
static PyType_Spec parameter_spec = {"trainprobe._native.ParameterHook", sizeof(ParameterHook), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, parameter_slots};

PyObject *parameter_hook_new(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "parameter_hook takes info, name, key; got %zd", nargs);
    if (!is_info(args[0])) return NULL;
    ParameterHook *hook = (ParameterHook *)PyType_GenericAlloc(parameter_type, 0);
    if (!hook) return NULL;
    hook->watch = (ModuleWatch *)Py_NewRef((PyObject *)self);
    hook->info = Py_NewRef(args[0]), hook->name = Py_NewRef(args[1]), hook->key = Py_NewRef(args[2]);
    return (PyObject *)hook;
}

PyObject *parameter_take(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "parameter takes info, name, key, gradient; got %zd", nargs);
    if (!is_info(args[0])) return NULL;
    return take_gradient(self, args[0], args[1], args[2], args[3]) ? NULL : Py_NewRef(Py_None);
}

int parameter_gradients_fill(PyObject *module) {
    (void)module;
    t_parameter = PyUnicode_InternFromString("parameter"), t_backward = PyUnicode_InternFromString("backward");
    t_micro = PyUnicode_InternFromString("micro");
    parameter_type = (PyTypeObject *)PyType_FromSpec(&parameter_spec);
    return t_parameter && t_backward && t_micro && parameter_type ? 0 : -1;
}
