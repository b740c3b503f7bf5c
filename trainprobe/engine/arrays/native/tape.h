/* What the files of the tape share: tape.c, tape_type.c, tree.c, seen.c. */
#ifndef TRAINPROBE_TAPE_H
#define TRAINPROBE_TAPE_H

#include "objects.h"

#define KINDS 0xFFFF
#define CUT 16
#define ROW_SLOTS 8
#define DTYPES_KNOWN 64

typedef struct {
    PyObject *dtype, *text;
    int code; /* -1: not for the kernel */
} Dtype;

typedef struct {
    long kinds;
    PyObject *stats_rows; /* the Python row buffer, NULL where the slot is free */
    StatsRows *rows;      /* its native rows, NULL where it has none */
    PyObject *owned;      /* list of Values */
    PyObject *tensors,
        *values; /* lists: tensors on devices that are not reduced yet, and their Values; NULL where there are none */
} Slot;

typedef struct {
    PyObject *id, *known,
        *shape; /* id: address of the tensor. known: a weak reference to it, or itself where held; NULL: forgotten */
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
    PyObject *root;  /* a weak reference to the tensor whose memory it is; NULL: none */
    StatsRows *rows; /* where its numbers are: in this row while the rows were taken so often */
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
    PyObject *open_rows, *slow, *special, *rare, *keep, *describe, *one_by_one;
    PyObject *arena;   /* NULL: each value passes through `keep` */
    PyObject *journal; /* records what is looked at, or NULL */
    PyObject *noted;   /* list of (twin with a note of its own, value), or NULL */
    int reuse, dtypes_known;
    int gathering;          /* how deep */
    unsigned long gatherer; /* the thread that does */
    int waiting;            /* tensors, of so many bytes */
    int64_t gathered;
    int entered; /* containers of the tree that is looked at */
    Dtype dtypes[DTYPES_KNOWN];
    Slot slots[ROW_SLOTS];
    SeenTable seen;
    Views views;
    Py_ssize_t reused;
};

/* seen.c. `seen_find`: NULL where the tensor was not looked at. */
Seen *seen_find(const SeenTable *table, PyObject *t);
int seen_note(SeenTable *table, Seen now); /* -1 with an exception set */
int seen_is(const Seen *seen, PyObject *t);
int same_shape(const Seen *seen, PyObject *shape);
void seen_forget(Seen *seen);
void seen_clear(SeenTable *table);

/* seen.c. The row of another view of the same memory, or -1. `views_root`: a new reference to the tensor whose memory
 * it is; NULL, without an exception, where it is not remembered. */
PyObject *views_root(PyObject *t, const Job *job);
Py_ssize_t views_find(const Views *self, PyObject *root, long long version, const Job *job, const StatsRows *rows);
int views_note(Views *self, PyObject *root, long long version, const Job *job, StatsRows *rows, Py_ssize_t row);
void views_clear(Views *self);

/* tape.c. */
extern PyObject *n_dtype, *n_with_note, *n_add_all;
PyObject *tape_look(Tape *self, PyObject *t, long flags, int held);
int tape_gather(Tape *self, PyObject *t, Value *value, PyObject *path); /* 1: kept in the arena */
const Dtype *dtype_of(Tape *self, PyObject *t);
Slot *slot_of(Tape *self, long kinds);
Value *gathered(Tape *self, PyObject *t, PyObject *shape, Geometry *at, const Dtype *dtype, Slot *slot);

/* tree.c. `once_reduced`: takes the reference, and gives it back where what was gathered is reduced. `tape_enter`:
 * whether one more container of this tree may be looked into. */
PyObject *once_reduced(Tape *self, int begun, PyObject *found);
int tape_enter(Tape *self);

#endif
