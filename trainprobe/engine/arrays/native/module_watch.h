/* What modules.c and module_gradients.c share. */
#ifndef TRAINPROBE_MODULE_WATCH_H
#define TRAINPROBE_MODULE_WATCH_H

#include "objects.h"

#define SAVE 256

typedef struct NodeHook NodeHook;

typedef struct {
    NodeHook **items; /* held */
    Py_ssize_t n, room;
} Hooks;

/* One tensor of an argument or result that a gradient reaches: its edge (node, slot) and its place, a number at the top, else a path. */
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
    PyObject *gradient_calls; /* name of a module → its latest call of the gradients of parameters */
    Call *gradient_call;      /* the latest that took a gradient; calls hold it. NULL: none */
    PyObject *backward_micro; /* the micro-batch whose gradients passed last: under 1F1B it is not the one that ran forward last */
    Tape *eye;
    MicroGate gate;
    PyTypeObject *plain[2];
    Hooks hooks;  /* of the step; while the outermost module runs, the graph has each as the mark of its node */
    Hooks latest; /* of the step before, whose graph may live until the next loss takes its name */
    Hooks spare;  /* of earlier steps, to be used again */
    const void *stop;
    unsigned long thread;
    int forward, backward, inputs, kwargs, parameters, outputs, recompute;
} ModuleWatch;

PyObject *joined_name(PyObject *name, PyObject *cls, PyObject *phase, Py_ssize_t number, const char *rest);

/* Collect the edges of all tensors in a structure; path, number: where it stands (NULL, -1: the structure itself). */
int edges_of(ModuleWatch *self, PyObject *x, PyObject *path, Py_ssize_t number, Edges *found, int depth);
void edges_free(Edges *edges);
PyObject *place_text(PyObject *path, Py_ssize_t number); /* the place of a tensor as text */

int watch_gradients(ModuleWatch *self, const ModuleInfo *info, Call *call, long long floor, const Edges *inputs, PyObject *out);
void hooks_forget(ModuleWatch *self);
void hooks_drop(Hooks *hooks);

/* The module's own part of the gradient at one of its inputs: into its backward call, or first summed over several consumers. */
int take_input(PyObject *backward, Py_ssize_t input, PyObject *gradient);
PyObject *contribution_new(PyObject *backward, PyObject *plus, Py_ssize_t consumers, Py_ssize_t input);
int contribution_add(PyObject *sum, PyObject *gradient);
int contribution_flush(PyObject *sum);

#endif
