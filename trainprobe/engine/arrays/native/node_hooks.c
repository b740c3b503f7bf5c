/* Hooks on autograd nodes: one a node, for all modules that want what arrives there or what the node sends on, entered without torch's
   handle (hook_registry.c) and used again in later steps. */
#include "module_watch.h"

struct NodeHook {
    PyObject_HEAD
    ModuleWatch *watch; /* not held; NULL once the step has ended */
    HookRequest *wanted;
    Py_ssize_t n, room;
    int before, behind; /* how the node is hooked */
    PyObject *entry;    /* what it is entered with, (hooks, None), which a later step uses again; the hooks hold this hook */
};

PyTypeObject *node_hook_type;

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

/* Whether no node has the hook's own entry, and nobody added another hook there. */
static int entry_is_free(const NodeHook *hook) {
    PyObject *hooks = hook->entry && Py_REFCNT(hook->entry) == 1 ? PyTuple_GetItem(hook->entry, 0) : NULL;
    return hooks && Py_REFCNT(hooks) == 1 && PyDict_Size(hooks) == 1;
}

/* Whether its node is gone: nobody has it but what it rests in and its own entry. */
static int hook_is_free(const NodeHook *hook) { return entry_is_free(hook) && Py_REFCNT((PyObject *)hook) == 2; }

static void hook_drop(NodeHook *hook) {
    Py_CLEAR(hook->entry);
    Py_DECREF((PyObject *)hook);
}

static int hooks_add(Hooks *hooks, NodeHook *hook) { /* takes over the hook */
    if (hooks->n == hooks->room) {
        Py_ssize_t room = hooks->room ? hooks->room * 2 : 256;
        NodeHook **items = PyMem_Realloc(hooks->items, (size_t)room * sizeof *items);
        if (!items) {
            hook_drop(hook);
            return PyErr_NoMemory(), -1;
        }
        hooks->items = items, hooks->room = room;
    }
    hooks->items[hooks->n++] = hook;
    return 0;
}

void hooks_drop(Hooks *hooks) {
    while (hooks->n) hook_drop(hooks->items[--hooks->n]);
    PyMem_Free(hooks->items);
    *hooks = (Hooks){0};
}

/* A hook that is used again, or a new one. */
static NodeHook *hook_take(ModuleWatch *self) {
    while (self->spare.n) {
        NodeHook *hook = self->spare.items[--self->spare.n];
        if (hook_is_free(hook)) return hook;
        hook_drop(hook);
    }
    return (NodeHook *)PyType_GenericAlloc(node_hook_type, 0);
}

/* The hook of a node, made where there is none. Not a new reference. */
static NodeHook *hook_of(ModuleWatch *self, PyObject *node) {
    void **mark = graph_mark(self->graph, node);
    if (!mark || *mark) return mark ? *mark : NULL;
    NodeHook *hook = hook_take(self);
    if (!hook || hooks_add(&self->hooks, hook)) return NULL;
    hook->watch = self, hook->before = hook->behind = 0;
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
        if (hook->wanted[k].kind == RECEIVED) failed = take_one(hook->wanted[k], PyTuple_GetItem(received, hook->wanted[k].slot));
    for (Py_ssize_t k = 0; !failed && arrives && hook->watch && k < hook->n; k++)
        if (hook->wanted[k].kind == SHARED) failed = take_one(hook->wanted[k], PyTuple_GetItem(received, hook->wanted[k].slot));
    for (Py_ssize_t k = 0; !failed && sent && hook->watch && k < hook->n; k++)
        if (hook->wanted[k].kind == SENT) failed = take_one(hook->wanted[k], PyTuple_GetItem(sent, hook->wanted[k].slot));
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
    int failed = PyErr_Occurred() || take_all(hook, PyTuple_GetItem(args, n - 1), n == 2 ? PyTuple_GetItem(args, 0) : NULL);
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

/* The step is over: its hooks rest. As many are kept as a step has. */
void hooks_forget(ModuleWatch *self) {
    Py_ssize_t most = self->hooks.n > self->latest.n ? self->hooks.n : self->latest.n;
    for (Py_ssize_t i = 0; i < self->hooks.n; i++) hook_forget(self->hooks.items[i]);
    if (!self->hooks.n) return;
    while (self->latest.n) {
        NodeHook *hook = self->latest.items[--self->latest.n];
        if (self->spare.n >= most) hook_drop(hook);
        else if (hooks_add(&self->spare, hook)) PyErr_Clear();
    }
    Hooks empty = self->latest;
    self->latest = self->hooks, self->hooks = empty;
}

static void hook_free(NodeHook *hook) {
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    hook_forget(hook);
    PyMem_Free(hook->wanted);
    Py_XDECREF(hook->entry);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

PyObject *node_hook_entry(PyObject *hook) { return entry_is_free((NodeHook *)hook) ? Py_NewRef(((NodeHook *)hook)->entry) : NULL; }

void node_hook_keep(PyObject *hook, PyObject *entry) {
    if (!((NodeHook *)hook)->entry) ((NodeHook *)hook)->entry = Py_NewRef(entry);
}

static PyType_Slot hook_slots[] = {{Py_tp_dealloc, hook_free}, {Py_tp_call, hook_called}, {0, NULL}};
static PyType_Spec hook_spec = {"trainprobe._native.NodeHook", sizeof(NodeHook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                hook_slots};

/* ---- what is wanted of a node ------------------------------------------------------------------------------------------------ */

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

int node_hooks_fill(PyObject *module) {
    (void)module;
    node_hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
    return node_hook_type ? 0 : -1;
}
