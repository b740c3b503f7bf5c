/* The sum of what the consumers of one input send back, handed on when the last one has sent (see `Contribution` in engine/capture/gradients.py). */
#include "module_watch.h"

typedef struct {
    PyObject_HEAD
    PyObject *backward, *plus, *total; /* plus: adds two gradients out of place */
    Py_ssize_t left, input;
} Contribution;

static PyTypeObject *contribution_type;

PyObject *contribution_new(PyObject *backward, PyObject *plus, Py_ssize_t consumers, Py_ssize_t input) {
    Contribution *self = (Contribution *)PyType_GenericAlloc(contribution_type, 0);
    if (!self) return NULL;
    self->backward = Py_NewRef(backward), self->plus = Py_NewRef(plus);
    self->left = consumers, self->input = input;
    return (PyObject *)self;
}

/* Hand on what has arrived. */
int contribution_flush(PyObject *sum) {
    Contribution *self = (Contribution *)sum;
    PyObject *total = self->total;
    self->total = NULL;
    if (!total) return 0;
    self->left = 0;
    int failed = backward_take((Backward *)self->backward, INPUT_SIDE, self->input, total, 0);
    Py_DECREF(total);
    return failed;
}

/* Take one consumer's gradient; None (no gradient along this edge) counts as sent. */
int contribution_add(PyObject *sum, PyObject *gradient) {
    Contribution *self = (Contribution *)sum;
    if (self->left <= 0) return 0; /* a second backward through a retained graph: the first one is what was recorded */
    if (gradient != Py_None) {
        PyObject *total = self->total ? call_two(self->plus, self->total, gradient) : Py_NewRef(gradient);
        if (!total) return -1;
        Py_XDECREF(self->total);
        self->total = total;
    }
    return --self->left == 0 ? contribution_flush(sum) : 0;
}

static void contribution_free(Contribution *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->backward);
    Py_XDECREF(self->plus);
    Py_XDECREF(self->total);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot contribution_slots[] = {{Py_tp_dealloc, contribution_free}, {0, NULL}};
static PyType_Spec contribution_spec = {"trainprobe._native.Contribution", sizeof(Contribution), 0,
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, contribution_slots};

int contribution_fill(PyObject *module) {
    (void)module;
    contribution_type = (PyTypeObject *)PyType_FromSpec(&contribution_spec);
    return contribution_type ? 0 : -1;
}
