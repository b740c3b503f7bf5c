/* What the parts that record torch calls share: ops.c, op_watch.c. */
#ifndef TRAINPROBE_OP_WATCH_H
#define TRAINPROBE_OP_WATCH_H

#include "objects.h"

typedef struct OpHook OpHook;

typedef struct {
    PyObject_HEAD
    PyObject *names, *learn, *fault, *repeats, *stacks, *inside, *generator, *memory, *unwritten, *parent;
    PyObject *tape, *calls, *counts; /* of the step that is being collected, NULL otherwise */
    Tape *native;
    MicroGate gate;
    OpHook **hooks;
    Py_ssize_t n_hooks, room;
    const void *stop;
    int depth, forward, backward, inputs, kwargs, outputs, recompute, looks_after;
} OpWatch;

struct OpHook {
    PyObject_HEAD
    OpWatch *watch; /* not held; NULL once the step has ended */
    Call *forward, *call;
    long flags;
};

PyObject *op_handle(OpWatch *self, PyObject *const *args, Py_ssize_t nargs); /* a method of OpWatch, in ops.c */

#endif
