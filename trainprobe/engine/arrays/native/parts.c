/* What a plain PyTorch model and its optimizers hold, looked at in one go around the optimizer step (see taps/parameter_states.py,
   whose loop over parts does the same and takes over for whatever is not plain). */
#include "objects.h"

typedef struct {
    Tape *tape;
    PyObject *calls, *known, *moment, *micro, *after; /* known: (moment, name, 0) → call. after: slot → slot after the step, or NULL */
    PyObject *name;
    Call *call; /* of the parameter at hand, once it has one */
} Look;

static PyObject *n_grad, *n_state, *n_optimizer, *n_value, *n_no_class;

static Call *call_of(Look *l) {
    if (l->call) return l->call;
    PyObject *zero = PyLong_FromLong(0), *key = zero ? PyTuple_Pack(3, l->moment, l->name, zero) : NULL;
    Py_XDECREF(zero);
    Call *found = key ? (Call *)PyDict_GetItemWithError(l->known, key) : NULL;
    if (found) {
        Py_INCREF((PyObject *)found);
    } else if (key && !PyErr_Occurred()) {
        found = call_new(n_state, l->name, 0, n_optimizer, n_no_class, l->micro, n_optimizer, -1);
        if (found) {
            found->node = Py_NewRef(l->moment), found->params = PyDict_New();
            if (!found->params || PyList_Append(l->calls, (PyObject *)found) || PyDict_SetItem(l->known, key, (PyObject *)found)) {
                Py_DECREF((PyObject *)found);
                found = NULL;
            }
        }
    }
    Py_XDECREF(key);
    return l->call = found;
}

static PyObject *slot_after(Look *l, PyObject *slot) { /* a new reference */
    if (!l->after) return PyObject_Str(slot);
    PyObject *told = PyDict_GetItemWithError(l->after, slot);
    if (told) return Py_NewRef(told);
    told = PyErr_Occurred() ? NULL : PyUnicode_FromFormat("%S_after", slot);
    if (told && PyDict_SetItem(l->after, slot, told)) Py_CLEAR(told);
    return told;
}

static int see(Look *l, PyObject *slot, PyObject *t, long flags) {
    PyObject *value = tape_tree(l->tape, t, flags, NULL, 0);
    Call *call = value ? call_of(l) : NULL;
    PyObject *under = call ? slot_after(l, slot) : NULL;
    int failed = !under || PyDict_SetItem(call->params, under, value);
    Py_XDECREF(under);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static int see_gradient(Look *l, PyObject *p, long flags) {
    PyObject *gradient = PyObject_GetAttr(p, n_grad);
    int failed = !gradient || (gradient != Py_None && see(l, n_grad, gradient, flags));
    Py_XDECREF(gradient);
    return failed ? -1 : 0;
}

static int see_states(Look *l, PyObject *p, PyObject *holders, long flags) {
    PyObject *id = PyLong_FromVoidPtr(p);
    int failed = !id;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(holders); i++) {
        PyObject *state = PyDict_GetItemWithError(PyList_GetItem(holders, i), id), *slot, *t;
        Py_ssize_t at = 0;
        if (!state && PyErr_Occurred()) failed = 1;
        if (!state || !PyDict_Check(state)) continue;
        Py_INCREF(state);
        while (!failed && PyDict_Next(state, &at, &slot, &t)) {
            if (!tape_is_plain(l->tape, t) && !PyObject_HasAttrString(t, "shape")) continue;
            Py_INCREF(slot), Py_INCREF(t);
            failed = see(l, slot, t, flags);
            Py_DECREF(slot), Py_DECREF(t);
        }
        Py_DECREF(state);
    }
    Py_XDECREF(id);
    return failed ? -1 : 0;
}

static int flags_at(PyObject *entry, Py_ssize_t at, long *flags) {
    *flags = PyLong_AsLong(PyTuple_GetItem(entry, at));
    return *flags == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *look_at_parts(PyObject *module, PyObject *args) {
    Look l = {0};
    PyObject *entries, *holders, *after;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!UOO", tape_type, &l.tape, &PyList_Type, &l.calls, &PyDict_Type, &l.known, &PyList_Type, &entries,
                          &PyList_Type, &holders, &l.moment, &l.micro, &after))
        return NULL;
    l.after = after == Py_None ? NULL : after;
    for (Py_ssize_t i = 0; i < PyList_Size(entries); i++) {
        PyObject *entry = PyList_GetItem(entries, i);
        if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 5) return PyErr_Format(PyExc_TypeError, "an entry has five parts");
        if (!tape_is_plain(l.tape, PyTuple_GetItem(entry, 0))) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(entries); i++) {
        PyObject *entry = PyList_GetItem(entries, i), *p = PyTuple_GetItem(entry, 0);
        long value, gradient, state;
        if (flags_at(entry, 2, &value) || flags_at(entry, 3, &gradient) || flags_at(entry, 4, &state)) return NULL;
        l.name = PyTuple_GetItem(entry, 1);
        int failed = (value && see(&l, n_value, p, value)) || (gradient && see_gradient(&l, p, gradient)) ||
                     (state && see_states(&l, p, holders, state));
        if (l.call) tape_told(l.tape, l.call, PARAMS);
        Py_XDECREF((PyObject *)l.call);
        l.call = NULL;
        if (failed) return NULL;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"look_at_parts", look_at_parts, METH_VARARGS,
     "look_at_parts(eye, calls, known, [(parameter, name, flags of value, gradient and state), …], [{id: state}, …], moment, micro, after)\n"
     "-> whether it was done: not where a parameter is of a kind of its own."},
    {NULL, NULL, 0, NULL}};

int parts_fill(PyObject *module) {
    n_grad = PyUnicode_InternFromString("grad"), n_state = PyUnicode_InternFromString("state");
    n_optimizer = PyUnicode_InternFromString("optimizer"), n_value = PyUnicode_InternFromString("value");
    n_no_class = PyUnicode_InternFromString("");
    return n_grad && n_state && n_optimizer && n_value && n_no_class ? PyModule_AddFunctions(module, functions) : -1;
}
