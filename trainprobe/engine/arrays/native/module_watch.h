/* What the parts that watch module calls share: modules.c, module_watch.c, gradients.c, parameter_gradients.c, graph.c,
 * nodes.c. */
#ifndef TRAINPROBE_MODULE_WATCH_H
#define TRAINPROBE_MODULE_WATCH_H

#include "objects.h"

typedef struct NodeHook NodeHook;

typedef struct {
    NodeHook **items; /* held */
    Py_ssize_t n, room;
} Hooks;

/* One tensor of an argument or result that a gradient reaches: its edge (node, slot) and its place, a number at the
 * top, else a path. */
typedef struct {
    PyObject *node, *path; /* path: NULL where number tells the place */
    Py_ssize_t slot, number;
} EdgeAt;

typedef struct {
    EdgeAt *items, few[4]; /* items: may be few, so that this is not copied */
    Py_ssize_t n, room;
} Edges;

typedef struct {
    PyObject_HEAD
    PyObject *guard, *fault, *other_thread, *odd_edges, *edge_of, *places, *plus, *grad_enabled, *stacks, *stack;
    PyObject *untouched, *graph;
    PyObject *tape, *calls, *forwards, *arrived, *open; /* of the step, NULL otherwise */
    PyObject *gradient_calls; /* name of a module → its call of parameter gradients with the largest number */
    Call *gradient_call;      /* the latest that took a gradient; calls hold it. NULL: none */
    PyObject *backward_micro; /* the micro-batch whose gradients passed last: under 1F1B it is not the one that ran
                                 forward last */
    Tape *native;
    MicroGate gate;
    PyTypeObject *plain[2];
    Hooks hooks; /* of the step; while the outermost module runs, the graph has each as the mark of its node */
    const void *stop;
    unsigned long thread;
    int forward, backward, inputs, kwargs, parameters, outputs, recompute;
} ModuleWatch;

/* Where the values of a module call are saved. */
static inline PyObject *joined_name(PyObject *name, PyObject *cls, PyObject *phase, Py_ssize_t number,
                                    const char *rest) {
    return PyUnicode_FromFormat("Module.%U.%U.%U.%zd.%s", name, cls, phase, number, rest);
}

/* Collect the edges (nodes.c) of all tensors in a structure; path, number: where it stands (NULL, -1: the structure
 * itself). */
int edges_of(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found, int depth);
void edges_free(Edges *edges);
PyObject *place_text(PyObject *path, Py_ssize_t number); /* the place of a tensor as text */

/* What is wanted of which node, once a module call has returned (gradients.c). */
int watch_gradients(ModuleWatch *self, const ModuleInfo *info, Call *call, long long floor, const Edges *inputs,
                    PyObject *out);

/* The backward call of a module call (gradients.c). Take what arrived at an output, or is sent to an input, of this
   number; untouched: the module hands it on as it is. */
typedef struct Backward Backward;
enum { OUTPUT_SIDE, INPUT_SIDE };
int backward_take(Backward *b, int side, Py_ssize_t number, PyObject *gradient, int untouched);
void backward_end(Backward *b); /* the step is over */

/* The sum of what several consumers send to one input (gradients.c). */
int contribution_add(PyObject *sum, PyObject *gradient);
int contribution_flush(PyObject *sum);

/* What one backward call wants of an autograd node (nodes.c): of what the node receives, for an output (RECEIVED), or
   for an input that the module hands on as it is (SHARED); of what it sends, for an input (SENT). */
enum { RECEIVED, SHARED, SENT };
typedef struct {
    int kind, untouched;
    Py_ssize_t slot, place; /* slot of the node; number of the module's output or input */
    Backward *backward;
    PyObject *contribution; /* takes it first, where it is one part of several; NULL otherwise */
} HookRequest;

NodeHook *node_hook_of(ModuleWatch *self, PyObject *node,
                       HookRequest wanted);           /* takes over the contribution; not a new reference */
int node_hook_attach(NodeHook *hook, PyObject *node); /* once all is known that is wanted of the node */
void hooks_forget(ModuleWatch *self);

/* The mark of a node that the graph knows, or NULL (graph.c). */
void **graph_mark(PyObject *graph, PyObject *node);

/* Methods of ModuleWatch (modules.c, parameter_gradients.c). */
PyObject *module_run(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *parameter_hook_new(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *parameter_take(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs);

#endif
