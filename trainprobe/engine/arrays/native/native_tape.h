/* The native tape, in the files that it is made of: seen_table.c (which tensors were looked at already), views.c (which memory), look.c (one
   tensor), pytree.c (trees of arguments) and tape.c (the type). */
#ifndef TRAINPROBE_NATIVE_TAPE_H
#define TRAINPROBE_NATIVE_TAPE_H

#include "objects.h"

#define KINDS 0xFFFF
#define CUT 16
#define ROW_SLOTS 8
#define DTYPES_KNOWN 64

typedef struct {
    PyObject *dtype, *text;
    int code;      /* -1: not for the kernel */
    uint32_t kind; /* as in Geometry */
} Dtype;

typedef struct {
    long kinds;
    PyObject *stats_rows; /* the Python row buffer, NULL where the slot is free */
    StatsRows *rows;     /* its native rows, NULL where it has none */
    PyObject *owned; /* list of Values */
} Slot;

typedef struct {
    PyObject *id, *known, *shape; /* id: address of the tensor. known: a weak reference to it, or itself where held; NULL: forgotten */
    Value *value;
    const void *data;
    long long version;
    long flags;
    int held;
} Seen;

/* What was looked at, by the address of the tensor. */
typedef struct {
    Seen *items;      /* in the order in which they came */
    uint32_t *places; /* table of numbers in it, from 1 on, by address; places_n: a power of two */
    Py_ssize_t used, room, places_n;
} SeenTable;

#define VIEWS 16    /* values that are remembered */
#define VIEW_DIMS 4 /* that they have at most, once neighbouring ones are walked as one */

typedef struct {
    int nd;
    int64_t size[VIEW_DIMS], stride[VIEW_DIMS];
} Axes;

typedef struct {
    PyObject *root; /* a weak reference to the tensor whose memory it is; NULL: none */
    StatsRows *rows;    /* where its numbers are: in this row while the rows were taken so often */
    Py_ssize_t row;
    uint64_t taken, sample;
    const char *data;
    long long version;
    int64_t repeats;
    int dtype;
    Axes memory, place;
} View;

typedef struct {
    View *items; /* VIEWS of them, of which the one at `next` makes room first; NULL: none yet */
    int next;
} Views;

struct Tape {
    PyObject_HEAD
    PyTypeObject *plain[2]; /* NULL where every tensor is left to Python */
    PyObject *open_rows, *slow, *special, *rare, *keep, *describe;
    PyObject *arena; /* NULL: each value passes through `keep` */
    PyObject *journal; /* records what is looked at, or NULL */
    PyObject *noted; /* list of (twin with a note of its own, value), or NULL */
    int reuse, dtypes_known;
    int entered; /* containers of the tree that is looked at */
    Dtype dtypes[DTYPES_KNOWN];
    Shapes shapes;
    Slot slots[ROW_SLOTS];
    SeenTable seen;
    Views views;
    Py_ssize_t reused;
};

/* seen_table.c */
Seen *seen_find(const SeenTable *table, PyObject *t); /* NULL: never looked at */
int seen_is(const Seen *seen, PyObject *t);           /* whether it is of this tensor, and not of one whose address that was */
int seen_note(SeenTable *table, Seen now);            /* takes references of its own to known, shape and value; -1: an exception is set */
void seen_forget(Seen *seen);
void seen_clear(SeenTable *table);

/* views.c */
PyObject *views_root(PyObject *t, const Job *job); /* the tensor whose memory it is; a new reference, or NULL: not to be remembered */
Py_ssize_t views_find(const Views *self, PyObject *root, long long version, const Job *job, const StatsRows *rows); /* its row, or -1 */
int views_note(Views *self, PyObject *root, long long version, const Job *job, StatsRows *rows, Py_ssize_t row);    /* -1: an exception is set */
void views_clear(Views *self);

/* look.c. held: somebody else keeps the tensor for the rest of the step, so that a reference of the tape's own keeps nothing alive. */
PyObject *tape_look(Tape *self, PyObject *t, long flags, int held);             /* its Value; a new reference */
int tape_gather(Tape *self, PyObject *t, Value *value, PyObject *path);         /* 1: copied into the arena, 0: not for it, -1: an exception */
void tape_know(Tape *self);                                                     /* what an earlier tape knew of dtypes and shapes */
void tape_leave_known(Tape *self);                                              /* to the next tape */

#endif
