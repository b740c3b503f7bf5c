/* Who consumes which edge of autograd's graph: each node is visited once a step, and held only while the outermost
 * module runs. Why it is done this way is written in engine/capture/gradients.py. */
#include <string.h>

#include "module_watch.h"

typedef struct {
    PyObject *node, *to; /* to: address of the node that the edge leads to, not a reference */
    long long number;
    Py_ssize_t input, slot;
} Consumer;

typedef struct {
    PyObject **items; /* held */
    Py_ssize_t n, room;
} Nodes;

/* A node that is known. Held, so that its address is not reused. */
typedef struct {
    PyObject *node;
    void *mark;
    int visited;
} Known;

typedef struct {
    PyObject_HEAD
    Known *known; /* table: n_known of places, a power of two */
    Py_ssize_t n_known, places;
    Nodes outside; /* below the floor */
    Nodes walk;    /* to be looked at; empty between visits */
    Consumer *consumers;
    Py_ssize_t n, room, *heads, *next, n_heads; /* chains of consumers by the node they lead to */
} Graph;

static PyTypeObject *graph_type;

static size_t chain_of(const Graph *self, const void *to) { return mixed(to) & (size_t)(self->n_heads - 1); }

static int nodes_add(Nodes *nodes, PyObject *node) {
    if (nodes->n == nodes->room) {
        Py_ssize_t room = nodes->room ? nodes->room * 2 : 128;
        PyObject **items = PyMem_Realloc(nodes->items, (size_t)room * sizeof *items);
        if (!items) return PyErr_NoMemory(), -1;
        nodes->items = items, nodes->room = room;
    }
    nodes->items[nodes->n++] = Py_NewRef(node);
    return 0;
}

static void nodes_drop(Nodes *nodes) {
    while (nodes->n) Py_DECREF(nodes->items[--nodes->n]);
}

static Known *place_of(Known *table, Py_ssize_t places, PyObject *node) {
    size_t at = mixed(node) & (size_t)(places - 1);
    while (table[at].node && table[at].node != node) at = (at + 1) & (size_t)(places - 1);
    return &table[at];
}

static int was_visited(const Graph *self, PyObject *node) {
    return self->places && place_of(self->known, self->places, node)->visited;
}

/* What is known of a node, from now on at the latest. NULL with an exception set. */
static Known *know(Graph *self, PyObject *node) {
    if (self->n_known * 2 >= self->places) {
        Py_ssize_t places = self->places ? self->places * 2 : 512;
        Known *table = PyMem_Calloc((size_t)places, sizeof *table);
        if (!table) return (Known *)PyErr_NoMemory();
        for (Py_ssize_t i = 0; i < self->places; i++)
            if (self->known[i].node) *place_of(table, places, self->known[i].node) = self->known[i];
        PyMem_Free(self->known);
        self->known = table, self->places = places;
    }
    Known *known = place_of(self->known, self->places, node);
    if (!known->node) known->node = Py_NewRef(node), self->n_known++;
    return known;
}

void **graph_mark(PyObject *graph, PyObject *node) {
    Known *known = know((Graph *)graph, node);
    return known ? &known->mark : NULL;
}

static int consumers_grow(Graph *self) {
    Py_ssize_t room = self->room ? self->room * 2 : 512;
    Consumer *consumers = PyMem_Realloc(self->consumers, (size_t)room * sizeof *consumers);
    if (consumers) self->consumers = consumers;
    Py_ssize_t *next = PyMem_Realloc(self->next, (size_t)room * sizeof *next),
               *heads = PyMem_Malloc((size_t)room * sizeof *heads);
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

static int visit_node(Graph *self, PyObject *node, long long number) {
    Known *known = know(self, node);
    if (!known) return -1;
    known->visited = 1;
    if (number == INT64_MAX) return 0; /* the accumulator of a leaf leads nowhere */
    PyObject *edges = node_nexts(node);
    if (!edges) return -1;
    int failed = 0;
    Py_ssize_t n = PyTuple_Size(edges);
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        PyObject *edge = PyTuple_GetItem(edges, i), *parent = PyTuple_GetItem(edge, 0);
        if (parent == Py_None) continue;
        failed = consume(self, node, i, number, parent, PyLong_AsSsize_t(PyTuple_GetItem(edge, 1))) ||
                 (!was_visited(self, parent) && nodes_add(&self->walk, parent));
    }
    Py_DECREF(edges);
    return failed;
}

int graph_visit(PyObject *graph, PyObject *const *roots, Py_ssize_t n, long long floor) {
    Graph *self = (Graph *)graph;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++) failed = nodes_add(&self->walk, roots[i]);
    for (Py_ssize_t i = 0; !failed && i < self->outside.n; i++) failed = nodes_add(&self->walk, self->outside.items[i]);
    nodes_drop(&self->outside);
    while (!failed && self->walk.n) {
        PyObject *node = self->walk.items[--self->walk.n]; /* taken over */
        if (!was_visited(self, node)) {
            long long number = sequence_of(node);
            if (PyErr_Occurred()) failed = -1;
            else failed = number < floor ? nodes_add(&self->outside, node) : visit_node(self, node, number);
        }
        Py_DECREF(node);
    }
    nodes_drop(&self->walk);
    return failed;
}

static PyObject *visit(Graph *self, PyObject *args) {
    PyObject *roots;
    long long floor;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &roots, &floor)) return NULL;
    Nodes held = {0};
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(roots); i++) failed = nodes_add(&held, PyList_GetItem(roots, i));
    failed = failed || graph_visit((PyObject *)self, held.items, held.n, floor);
    nodes_drop(&held);
    PyMem_Free(held.items);
    return failed ? NULL : Py_NewRef(Py_None);
}

int graph_consumers(PyObject *graph, PyObject *to, Py_ssize_t slot, long long floor, Consumers *found) {
    const Graph *self = (const Graph *)graph;
    const Consumer *all = self->consumers;
    Py_ssize_t first = self->n ? self->heads[chain_of(self, to)] : -1, n = 0;
#define IS_ONE(at) (all[at].to == to && all[at].slot == slot && all[at].number >= floor)
    for (Py_ssize_t at = first; at >= 0; at = self->next[at]) n += IS_ONE(at);
    found->n = n, found->items = n <= 8 ? found->few : PyMem_Malloc((size_t)n * sizeof *found->items);
    if (!found->items) return PyErr_NoMemory(), -1;
    for (Py_ssize_t at = first; n; at = self->next[at]) /* the chain has the latest first */
        if (IS_ONE(at)) found->items[--n] = (Consuming){all[at].node, all[at].input};
#undef IS_ONE
    return 0;
}

void consumers_free(Consumers *found) {
    if (found->items != found->few) PyMem_Free(found->items);
}

static PyObject *consumers(Graph *self, PyObject *args) {
    PyObject *to;
    Py_ssize_t slot;
    long long floor;
    Consumers found;
    if (!PyArg_ParseTuple(args, "(On)L", &to, &slot, &floor) ||
        graph_consumers((PyObject *)self, to, slot, floor, &found))
        return NULL;
    PyObject *list = PyList_New(found.n);
    for (Py_ssize_t i = 0; list && i < found.n; i++) {
        PyObject *pair = Py_BuildValue("(On)", found.items[i].node, found.items[i].input);
        if (pair) PyList_SetItem(list, i, pair);
        else Py_CLEAR(list);
    }
    consumers_free(&found);
    return list;
}

void graph_forget(PyObject *graph) {
    Graph *self = (Graph *)graph;
    Known *known = self->known;
    Py_ssize_t places = self->places;
    self->known = NULL, self->places = self->n_known = self->n = 0; /* letting go may run other code */
    for (Py_ssize_t i = 0; i < self->n_heads; i++) self->heads[i] = -1;
    for (Py_ssize_t i = 0; i < places; i++) Py_XDECREF(known[i].node);
    PyMem_Free(known);
    nodes_drop(&self->outside);
}

static PyObject *clear(Graph *self, PyObject *unused) {
    (void)unused;
    graph_forget((PyObject *)self);
    return Py_NewRef(Py_None);
}

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    return PyType_GenericAlloc(type, 0);
}

PyObject *graph_new_empty(void) { return graph_new(graph_type, NULL, NULL); }

static void graph_free(Graph *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    graph_forget((PyObject *)self);
    PyMem_Free(self->outside.items);
    PyMem_Free(self->walk.items);
    PyMem_Free(self->consumers);
    PyMem_Free(self->heads);
    PyMem_Free(self->next);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef graph_methods[] = {
    {"visit", (PyCFunction)visit, METH_VARARGS, "visit(roots, floor): see engine.capture.graph.Graph.visit."},
    {"consumers", (PyCFunction)consumers, METH_VARARGS,
     "consumers(edge, floor): see engine.capture.graph.Graph.consumers."},
    {"clear", (PyCFunction)clear, METH_NOARGS, "clear(): let go of the nodes."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot graph_slots[] = {{Py_tp_new, graph_new},
                                    {Py_tp_dealloc, graph_free},
                                    {Py_tp_methods, graph_methods},
                                    {Py_tp_doc, "What is known of the autograd graph of the forward that is running."},
                                    {0, NULL}};
static PyType_Spec graph_spec = {"trainprobe._native.Graph", sizeof(Graph), 0, Py_TPFLAGS_DEFAULT, graph_slots};

int graph_fill(PyObject *module) {
    graph_type = (PyTypeObject *)PyType_FromSpec(&graph_spec);
    return graph_type ? PyModule_AddObjectRef(module, "Graph", (PyObject *)graph_type) : -1;
}
