/* Who consumes which edge of the autograd graph (see taps/gradients.py, whose Graph does the same). */
#include "objects.h"

typedef struct {
    PyObject *node, *to; /* to: address of the node that the edge leads to, not a reference */
    long long number;
    Py_ssize_t input, slot;
} Consumer;

typedef struct {
    PyObject_HEAD
    PyObject *visited; /* set of nodes, held so that their addresses are not reused */
    PyObject *outside; /* list of nodes below the floor */
    Consumer *consumers;
    Py_ssize_t n, room, *heads, *next, n_heads; /* chains of consumers by the node they lead to */
} Graph;

static PyTypeObject *graph_type;
static PyObject *t_next;

static size_t chain_of(const Graph *self, const void *to) {
    return (size_t)(((uint64_t)(uintptr_t)to >> 4) * 0x9E3779B97F4A7C15u >> 20) & (size_t)(self->n_heads - 1);
}

static int consumers_grow(Graph *self) {
    Py_ssize_t room = self->room ? self->room * 2 : 512;
    Consumer *consumers = PyMem_Realloc(self->consumers, (size_t)room * sizeof *consumers);
    if (consumers) self->consumers = consumers;
    Py_ssize_t *next = PyMem_Realloc(self->next, (size_t)room * sizeof *next), *heads = PyMem_Malloc((size_t)room * sizeof *heads);
    if (next) self->next = next;
    if (!consumers || !next || !heads) {
        PyMem_Free(heads);
        return PyErr_NoMemory(), -1;
    }
    PyMem_Free(self->heads);
    self->heads = heads, self->room = self->n_heads = room;
    for (Py_ssize_t i = 0; i < room; i++) heads[i] = -1;
    for (Py_ssize_t i = 0; i < self->n; i++) {
        size_t chain = chain_of(self, self->consumers[i].to);
        self->next[i] = heads[chain], heads[chain] = i;
    }
    return 0;
}

static int consume(Graph *self, PyObject *node, Py_ssize_t input, long long number, PyObject *to, Py_ssize_t slot) {
    if (self->n == self->room && consumers_grow(self)) return -1;
    Py_ssize_t at = self->n++;
    self->consumers[at] = (Consumer){node, to, number, input, slot};
    size_t chain = chain_of(self, to);
    self->next[at] = self->heads[chain], self->heads[chain] = at;
    return 0;
}

static int visit_node(Graph *self, PyObject *node, long long number, PyObject *walk) {
    PyObject *edges = PyObject_GetAttr(node, t_next);
    if (!edges) return -1;
    int failed = PySet_Add(self->visited, node);
    Py_ssize_t n = PyTuple_Size(edges);
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        PyObject *edge = PyTuple_GetItem(edges, i), *parent = PyTuple_GetItem(edge, 0);
        if (parent == Py_None) continue;
        failed = consume(self, node, i, number, parent, PyLong_AsSsize_t(PyTuple_GetItem(edge, 1))) || PyList_Append(walk, parent);
    }
    Py_DECREF(edges);
    return failed;
}

int graph_visit(PyObject *graph, PyObject *roots, long long floor) {
    Graph *self = (Graph *)graph;
    PyObject *walk = PySequence_Concat(roots, self->outside), *outside = PyList_New(0);
    int failed = !walk || !outside;
    while (!failed) {
        Py_ssize_t last = PyList_Size(walk) - 1;
        if (last < 0) break;
        PyObject *node = Py_NewRef(PyList_GetItem(walk, last));
        failed = PyList_SetSlice(walk, last, last + 1, NULL);
        int known = failed ? 1 : PySet_Contains(self->visited, node);
        if (known == 0) {
            long long number = sequence_of(node);
            if (PyErr_Occurred()) failed = 1;
            else failed = number < floor ? PyList_Append(outside, node) : visit_node(self, node, number, walk);
        }
        failed = failed || known < 0;
        Py_DECREF(node);
    }
    Py_XDECREF(walk);
    if (failed) {
        Py_XDECREF(outside);
        return -1;
    }
    Py_DECREF(self->outside);
    self->outside = outside;
    return 0;
}

static PyObject *visit(Graph *self, PyObject *args) {
    PyObject *roots;
    long long floor;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &roots, &floor)) return NULL;
    return graph_visit((PyObject *)self, roots, floor) ? NULL : Py_NewRef(Py_None);
}

PyObject *graph_consumers(PyObject *graph, PyObject *to, Py_ssize_t slot, long long floor) {
    Graph *self = (Graph *)graph;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t at = found && self->n ? self->heads[chain_of(self, to)] : -1; at >= 0; at = self->next[at]) {
        const Consumer *c = &self->consumers[at];
        if (c->to != to || c->slot != slot || c->number < floor) continue;
        PyObject *pair = Py_BuildValue("(On)", c->node, c->input);
        if (!pair || PyList_Insert(found, 0, pair)) { /* in the order in which they were met */
            Py_XDECREF(pair);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(pair);
    }
    return found;
}

static PyObject *consumers(Graph *self, PyObject *args) {
    PyObject *to;
    Py_ssize_t slot;
    long long floor;
    return PyArg_ParseTuple(args, "(On)L", &to, &slot, &floor) ? graph_consumers((PyObject *)self, to, slot, floor) : NULL;
}

static PyObject *clear(Graph *self, PyObject *unused) {
    (void)unused;
    PyObject *visited = self->visited, *outside = self->outside;
    self->n = 0;
    for (Py_ssize_t i = 0; i < self->n_heads; i++) self->heads[i] = -1;
    self->visited = PySet_New(NULL), self->outside = PyList_New(0);
    Py_XDECREF(visited);
    Py_XDECREF(outside);
    return self->visited && self->outside ? Py_NewRef(Py_None) : NULL;
}

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    Graph *self = (Graph *)PyType_GenericAlloc(type, 0);
    PyObject *done = self ? clear(self, NULL) : NULL;
    if (!done) Py_CLEAR(self);
    Py_XDECREF(done);
    return (PyObject *)self;
}

PyObject *graph_new_empty(void) { return graph_new(graph_type, NULL, NULL); }

int graph_forget(PyObject *graph) {
    PyObject *done = clear((Graph *)graph, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static void graph_free(Graph *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->visited);
    Py_XDECREF(self->outside);
    PyMem_Free(self->consumers);
    PyMem_Free(self->heads);
    PyMem_Free(self->next);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef graph_methods[] = {
    {"visit", (PyCFunction)visit, METH_VARARGS, "visit(roots, floor): see taps.gradients.Graph.visit."},
    {"consumers", (PyCFunction)consumers, METH_VARARGS, "consumers(edge, floor): see taps.gradients.Graph.consumers."},
    {"clear", (PyCFunction)clear, METH_NOARGS, "clear(): let go of the nodes."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot graph_slots[] = {{Py_tp_new, graph_new},
                                    {Py_tp_dealloc, graph_free},
                                    {Py_tp_methods, graph_methods},
                                    {Py_tp_doc, "What is known of the autograd graph of the forward that is running."},
                                    {0, NULL}};
static PyType_Spec graph_spec = {"trainprobe._native.Graph", sizeof(Graph), 0, Py_TPFLAGS_DEFAULT, graph_slots};

int graph_fill(PyObject *module) {
    t_next = PyUnicode_InternFromString("next_functions");
    graph_type = (PyTypeObject *)PyType_FromSpec(&graph_spec);
    return t_next && graph_type ? PyModule_AddObjectRef(module, "Graph", (PyObject *)graph_type) : -1;
}
