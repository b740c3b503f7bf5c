/* Gradients at the outputs and inputs of a module call, by hooks on autograd nodes that exist anyway (see engine/capture/gradients.py for how they
   are found): what is wanted of which node once the call has returned. */
#include <string.h>

#include "module_watch.h"

/* Nodes, held by the graph, that are to be hooked when all is known that is wanted of them. */
typedef struct {
    struct {
        PyObject *node;
        NodeHook *hook;
    } *items, few[16];
    Py_ssize_t n, room;
} Touched;

static int touch(Touched *touched, PyObject *node, NodeHook *hook) {
    if (touched->n == touched->room) {
        size_t size = (size_t)touched->room * sizeof *touched->items;
        void *items = PyMem_Malloc(2 * size);
        if (!items) return PyErr_NoMemory(), -1;
        memcpy(items, touched->items, size);
        if (touched->items != touched->few) PyMem_Free(touched->items);
        touched->items = items, touched->room *= 2;
    }
    touched->items[touched->n].node = node, touched->items[touched->n++].hook = hook;
    return 0;
}

static int want(ModuleWatch *self, Touched *touched, PyObject *node, HookRequest wanted) { /* takes over the contribution */
    NodeHook *hook = node_hook_of(self, node, wanted);
    return hook ? touch(touched, node, hook) : -1;
}

static int watch_outputs(ModuleWatch *self, Touched *touched, Backward *b, const Edges *found, const Edges *inputs) {
    for (Py_ssize_t i = 0; i < found->n; i++) {
        const EdgeAt *e = &found->items[i];
        int untouched = 0;
        for (Py_ssize_t k = 0; k < inputs->n; k++) untouched |= inputs->items[k].node == e->node && inputs->items[k].slot == e->slot;
        if (want(self, touched, e->node, (HookRequest){RECEIVED, untouched, e->slot, i, b, NULL})) return -1;
    }
    return 0;
}

static PyObject *contribution_of(ModuleWatch *self, Backward *b, Py_ssize_t consumers, Py_ssize_t i) {
    PyObject *made = contribution_new((PyObject *)b, self->plus, consumers, i);
    if (made && PyList_Append(self->open, made)) Py_CLEAR(made);
    return made;
}

static int watch_input(ModuleWatch *self, Touched *touched, Backward *b, long long floor, const Edges *found, const Edges *inputs,
                       Py_ssize_t i) {
    const EdgeAt *e = &inputs->items[i];
    Consumers to;
    PyObject *sum = NULL;
    if (graph_consumers(self->graph, e->node, e->slot, floor, &to)) return -1;
    int failed = to.n > 1 && !(sum = contribution_of(self, b, to.n, i));
    for (Py_ssize_t k = 0; !failed && k < to.n; k++)
        failed = want(self, touched, to.items[k].node, (HookRequest){SENT, 0, to.items[k].input, i, b, Py_XNewRef(sum)});
    for (Py_ssize_t k = 0; !failed && to.n == 0 && k < found->n; k++) {
        if (found->items[k].node != e->node || found->items[k].slot != e->slot) continue;
        failed = want(self, touched, e->node, (HookRequest){SHARED, 1, e->slot, i, b, NULL});
    }
    Py_XDECREF(sum);
    consumers_free(&to);
    return failed ? -1 : 0;
}

static int visit_from(ModuleWatch *self, const Edges *found, long long floor) {
    PyObject *few[16], **roots = found->n <= 16 ? few : PyMem_Malloc((size_t)found->n * sizeof *roots);
    if (!roots) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < found->n; i++) roots[i] = found->items[i].node;
    int failed = graph_visit(self->graph, roots, found->n, floor);
    if (roots != few) PyMem_Free(roots);
    return failed;
}

int watch_gradients(ModuleWatch *self, const ModuleInfo *info, Call *call, long long floor, const Edges *inputs, PyObject *out) {
    Edges found = {0};
    Touched touched;
    Backward *b = NULL;
    touched.items = touched.few, touched.n = 0, touched.room = 16;
    int failed = edges_of(self, out, NULL, -1, &found, 0);
    if (!failed && found.n) {
        b = backward_new(self, info, call, &found, inputs);
        failed = !b || watch_outputs(self, &touched, b, &found, inputs) || (inputs->n && visit_from(self, &found, floor));
        for (Py_ssize_t i = 0; !failed && i < inputs->n; i++) failed = watch_input(self, &touched, b, floor, &found, inputs, i);
        for (Py_ssize_t i = 0; !failed && i < touched.n; i++) failed = node_hook_attach(touched.items[i].hook, touched.items[i].node);
    }
    if (touched.items != touched.few) PyMem_Free(touched.items);
    Py_XDECREF((PyObject *)b);
    edges_free(&found);
    return failed ? -1 : 0;
}
