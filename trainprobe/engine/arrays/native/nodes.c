/* Nodes of autograd's graph: which of them a tensor hangs on (its edges), and the hooks that take what passes a node.
 */
#include <string.h>

#include "module_watch.h"

/* ---- the edges of all tensors in an argument or result (`collect_edges` of engine/capture/module_gradients.py) ----
 */

#define MOST 100000 /* containers: one that holds itself has no end of places */

PyObject *place_text(PyObject *path, Py_ssize_t number) {
    return path ? Py_NewRef(path) : PyUnicode_FromFormat("%zd", number < 0 ? 0 : number);
}

static int merge_edge(EdgeAt *known, PyObject *path, Py_ssize_t number) {
    PyObject *first = place_text(known->path, known->number), *second = place_text(path, number);
    PyObject *both = first && second ? PyUnicode_FromFormat("%U|%U", first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    if (!both) return -1;
    Py_XDECREF(known->path);
    known->path = both, known->number = -1;
    return 0;
}

/* node, slot: None, or an edge. */
static int add_edge(Edges *found, PyObject *node, Py_ssize_t slot, PyObject *path, Py_ssize_t number) {
    for (Py_ssize_t i = 0; i < found->n; i++)
        if (found->items[i].node == node && found->items[i].slot == slot)
            return merge_edge(&found->items[i], path, number);
    if (found->n == found->room) {
        Py_ssize_t room = found->room ? found->room * 2 : 4;
        EdgeAt *items = found->room ? PyMem_Malloc((size_t)room * sizeof *items) : found->few;
        if (!items) return PyErr_NoMemory(), -1;
        if (found->n) memcpy(items, found->items, (size_t)found->n * sizeof *items);
        if (found->items != found->few) PyMem_Free(found->items);
        found->items = items, found->room = room;
    }
    found->items[found->n++] = (EdgeAt){Py_NewRef(node), path ? Py_NewRef(path) : NULL, slot,
                                        path         ? -1
                                        : number < 0 ? 0
                                                     : number};
    return 0;
}

void edges_free(Edges *edges) {
    for (Py_ssize_t i = 0; i < edges->n; i++) {
        Py_DECREF(edges->items[i].node);
        Py_XDECREF(edges->items[i].path);
    }
    if (edges->items != edges->few) PyMem_Free(edges->items);
    edges->items = NULL, edges->n = edges->room = 0;
}

static int edge_of_tensor(ModuleWatch *self, PyObject *t, PyObject *path, Py_ssize_t number, Edges *found) {
    PyObject *node = node_behind(t);
    if (!node && PyErr_Occurred()) return -1;
    int failed;
    if (node) { /* then it wants a gradient */
        PyObject *slot = tensor_attribute(t, OUTPUT_NR);
        failed = !slot || add_edge(found, node, PyLong_AsSsize_t(slot), path, number);
        Py_XDECREF(slot);
        Py_DECREF(node);
    } else {
        PyObject *grad = tensor_attribute(t, REQUIRES_GRAD);
        int wanted = grad ? grad == Py_True : -1;
        Py_XDECREF(grad);
        if (wanted <= 0) return wanted;
        PyObject *edge = call_one(self->edge_of, t);
        failed = !edge || (edge != Py_None && add_edge(found, PyTuple_GetItem(edge, 0),
                                                       PyLong_AsSsize_t(PyTuple_GetItem(edge, 1)), path, number));
        Py_XDECREF(edge);
    }
    return failed || PyErr_Occurred() ? -1 : 0;
}

static int plain_number(PyObject *text, Py_ssize_t *number) {
    Py_ssize_t length = 0;
    const char *s = PyUnicode_AsUTF8AndSize(text, &length);
    if (!s || length < 1 || length > 9) return PyErr_Clear(), 0;
    *number = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        if (s[i] < '0' || s[i] > '9') return 0;
        *number = *number * 10 + (s[i] - '0');
    }
    return 1;
}

static int edges_named(ModuleWatch *self, PyObject *x, PyObject *name, PyObject *path, Py_ssize_t number, Edges *found,
                       int depth) {
    PyObject *key = key_text(name), *whole = NULL;
    if (key && (path || number >= 0)) {
        PyObject *own = place_text(path, number);
        whole = own ? PyUnicode_FromFormat("%U.%U", own, key) : NULL;
        Py_XDECREF(own);
    } else {
        whole = Py_XNewRef(key);
    }
    Py_XDECREF(key);
    if (!whole) return -1;
    Py_ssize_t plain = -1;
    int failed = plain_number(whole, &plain) ? edges_of(self, x, NULL, plain, found, depth)
                                             : edges_of(self, x, whole, -1, found, depth);
    Py_DECREF(whole);
    return failed;
}

static int odd_edges(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found) {
    PyObject *own = path || number >= 0 ? place_text(path, number) : PyUnicode_FromString("");
    PyObject *pairs = own ? call_two(self->odd_edges, x, own) : NULL;
    int failed = !pairs;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(pairs); i++) {
        PyObject *at, *node;
        Py_ssize_t slot, plain = -1;
        failed = !PyArg_ParseTuple(PyList_GetItem(pairs, i), "U(On)", &at, &node, &slot);
        if (!failed)
            failed = plain_number(at, &plain) ? add_edge(found, node, slot, NULL, plain)
                                              : add_edge(found, node, slot, at, -1);
    }
    Py_XDECREF(own);
    Py_XDECREF(pairs);
    return failed ? -1 : 0;
}

int edges_of(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found, int depth) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == self->plain[0] || kind == self->plain[1]) return edge_of_tensor(self, x, path, number, found);
    if (x == Py_None || kind == &PyLong_Type || kind == &PyFloat_Type || kind == &PyBool_Type ||
        kind == &PyUnicode_Type)
        return 0;
    static int left; /* containers: one that holds itself has no end of places */
    if (depth == 0) left = MOST;
    if (depth > 8 || left <= 0) return 0;
    left--;
    if (PyDict_CheckExact(x)) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        while (PyDict_Next(x, &at, &key, &item))
            if (edges_named(self, item, key, path, number, found, depth + 1)) return -1;
        return 0;
    }
    int tuple = PyTuple_CheckExact(x);
    if (!tuple && !PyList_CheckExact(x)) return odd_edges(self, x, path, number, found);
    for (Py_ssize_t i = 0; i < (tuple ? PyTuple_Size(x) : PyList_Size(x)); i++) {
        PyObject *item = tuple ? PyTuple_GetItem(x, i) : PyList_GetItem(x, i), *below = NULL;
        if (path || number >= 0) {
            PyObject *own = place_text(path, number);
            below = own ? PyUnicode_FromFormat("%U.%zd", own, i) : NULL;
            Py_XDECREF(own);
            if (!below) return -1;
        }
        int failed = edges_of(self, item, below, below ? -1 : i, found, depth + 1);
        Py_XDECREF(below);
        if (failed) return -1;
    }
    return 0;
}

/* ---- hooks: one a node, for all modules that want what arrives there or what the node sends on ------------------- */

struct NodeHook {
    PyObject_HEAD
    ModuleWatch *watch; /* not held; NULL once the step has ended */
    HookRequest *wanted;
    Py_ssize_t n, room;
    int before, behind; /* how the node is hooked */
};

static PyTypeObject *node_hook_type;

/* Takes over the contribution. */
static int hook_wants(NodeHook *hook, HookRequest wanted) {
    if (hook->n == hook->room) {
        Py_ssize_t room = hook->room ? hook->room * 2 : 4;
        HookRequest *all = PyMem_Realloc(hook->wanted, (size_t)room * sizeof *all);
        if (!all) {
            Py_XDECREF(wanted.contribution);
            return PyErr_NoMemory(), -1;
        }
        hook->wanted = all, hook->room = room;
    }
    Py_INCREF((PyObject *)wanted.backward);
    hook->wanted[hook->n++] = wanted;
    return 0;
}

static int hooks_add(Hooks *hooks, NodeHook *hook) { /* takes over the hook */
    if (hooks->n == hooks->room) {
        Py_ssize_t room = hooks->room ? hooks->room * 2 : 256;
        NodeHook **items = PyMem_Realloc(hooks->items, (size_t)room * sizeof *items);
        if (!items) {
            Py_DECREF((PyObject *)hook);
            return PyErr_NoMemory(), -1;
        }
        hooks->items = items, hooks->room = room;
    }
    hooks->items[hooks->n++] = hook;
    return 0;
}

/* The hook of a node, made where there is none. Not a new reference. */
static NodeHook *hook_of(ModuleWatch *self, PyObject *node) {
    void **mark = graph_mark(self->graph, node);
    if (!mark || *mark) return mark ? *mark : NULL;
    NodeHook *hook = (NodeHook *)PyType_GenericAlloc(node_hook_type, 0);
    if (!hook || hooks_add(&self->hooks, hook)) return NULL;
    hook->watch = self;
    return *mark = hook;
}

static int take_one(HookRequest w, PyObject *gradient) { /* a copy: more may be wanted of the hook meanwhile */
    if (!gradient) return -1;
    PyObject *taker = Py_NewRef(w.contribution ? w.contribution : (PyObject *)w.backward);
    int failed = w.contribution ? contribution_add(taker, gradient)
                                : backward_take(w.backward, w.kind != RECEIVED, w.place, gradient, w.untouched);
    Py_DECREF(taker);
    return failed;
}

/* The module that returned last is the outermost: its backward begins first. */
static int take_all(NodeHook *hook, PyObject *received, PyObject *sent) {
    int failed = 0, arrives = !sent || !hook->before;
    for (Py_ssize_t k = hook->n - 1; !failed && arrives && hook->watch && k >= 0; k--)
        if (hook->wanted[k].kind == RECEIVED)
            failed = take_one(hook->wanted[k], PyTuple_GetItem(received, hook->wanted[k].slot));
    for (Py_ssize_t k = 0; !failed && arrives && hook->watch && k < hook->n; k++)
        if (hook->wanted[k].kind == SHARED)
            failed = take_one(hook->wanted[k], PyTuple_GetItem(received, hook->wanted[k].slot));
    for (Py_ssize_t k = 0; !failed && sent && hook->watch && k < hook->n; k++)
        if (hook->wanted[k].kind == SENT)
            failed = take_one(hook->wanted[k], PyTuple_GetItem(sent, hook->wanted[k].slot));
    return failed;
}

/* As a pre-hook: (received). As a hook: (sent, received). */
static PyObject *hook_called(NodeHook *hook, PyObject *args, PyObject *kwargs) {
    ModuleWatch *self = hook->watch;
    Py_ssize_t n = PyTuple_Size(args);
    (void)kwargs;
    if (!self || !self->native || n < 1 || n > 2) return Py_NewRef(Py_None);
    Py_INCREF((PyObject *)self);
    Py_INCREF((PyObject *)hook);
    PyObject *off = modes_off();
    int failed =
        PyErr_Occurred() || take_all(hook, PyTuple_GetItem(args, n - 1), n == 2 ? PyTuple_GetItem(args, 0) : NULL);
    modes_on(off);
    failed = failed && give_to_guard(self->fault);
    Py_DECREF((PyObject *)hook);
    Py_DECREF((PyObject *)self);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Become inert, and let go of what was wanted. */
static void hook_forget(NodeHook *hook) {
    HookRequest *wanted = hook->wanted;
    Py_ssize_t n = hook->n;
    hook->watch = NULL, hook->n = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        backward_end(wanted[i].backward);
        Py_XDECREF(wanted[i].contribution);
        Py_DECREF((PyObject *)wanted[i].backward);
    }
}

/* The step is over: its hooks do nothing any more, and leave with their nodes. */
void hooks_forget(ModuleWatch *self) {
    Hooks hooks = self->hooks;
    self->hooks = (Hooks){0};
    for (Py_ssize_t i = 0; i < hooks.n; i++) hook_forget(hooks.items[i]);
    for (Py_ssize_t i = 0; i < hooks.n; i++) Py_DECREF((PyObject *)hooks.items[i]);
    PyMem_Free(hooks.items);
}

static void hook_free(NodeHook *hook) {
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    hook_forget(hook);
    PyMem_Free(hook->wanted);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

static PyType_Slot hook_slots[] = {{Py_tp_dealloc, hook_free}, {Py_tp_call, hook_called}, {0, NULL}};
static PyType_Spec hook_spec = {"trainprobe._native.NodeHook", sizeof(NodeHook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

/* ---- what is wanted of a node ------------------------------------------------------------------------------------ */

NodeHook *node_hook_of(ModuleWatch *self, PyObject *node, HookRequest wanted) {
    NodeHook *hook = hook_of(self, node);
    if (!hook) Py_XDECREF(wanted.contribution);
    return hook && !hook_wants(hook, wanted) ? hook : NULL;
}

/* Hook the node: behind it if what it sends is wanted, else before it, and once is enough. */
int node_hook_attach(NodeHook *hook, PyObject *node) {
    int behind = 0;
    for (Py_ssize_t k = 0; k < hook->n; k++) behind |= hook->wanted[k].kind == SENT;
    if (hook->behind || (hook->before && !behind)) return 0;
    PyObject *handle = node_register(node, (PyObject *)hook, behind);
    Py_XDECREF(handle);
    *(behind ? &hook->behind : &hook->before) = 1;
    return handle ? 0 : -1;
}

int nodes_fill(PyObject *module) {
    (void)module;
    node_hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    return node_hook_type ? 0 : -1;
}
