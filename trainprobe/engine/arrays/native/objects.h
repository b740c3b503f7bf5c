/* The objects that a tape is made of, and what the files of the extension need of each other. Limited API of
 * Python 3.10. */
#ifndef TRAINPROBE_OBJECTS_H
#define TRAINPROBE_OBJECTS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "reduce.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t rows, room;
    uint64_t taken; /* how often the rows were taken: a reduction that straddles a take is dropped */
    int has_crc;
    PyObject *tables[2]; /* bytearrays, which are handed over: partials and checksums lie in them */
    double *partials;
    uint64_t *checksums;
    uint32_t *crcs;
} StatsRows;

Py_ssize_t stats_rows_reduce(StatsRows *self,
                             const Job *job); /* row, -1 when it was dropped, -2 with an exception set */
uint64_t fingerprint_of(const Job *job);      /* job->flags: CHECKSUM; lets other threads run while it reads much */
Py_ssize_t stats_rows_repeat(StatsRows *self,
                             Py_ssize_t row); /* a row with the numbers of that one; -2 with an exception set */
Py_ssize_t stats_rows_new(StatsRows *self);   /* a row of zeros, for what a device reduces; -2 with an exception set */

/* Neither is tracked by the garbage collector: a value refers to texts and a shape, a call to values and to calls
 * before it. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t row;
    PyObject *type, *dtype, *shape, *device, *requires_grad, *note, *tensor, *extra;
} Value;

typedef struct {
    PyObject_HEAD
    Py_ssize_t call, stack;
    PyObject *kind, *name, *phase, *cls, *micro, *parent, *args, *kwargs, *out, *params, *node;
} Call;

/* A module of the model as it is recorded; nothing of it changes. */
typedef struct {
    PyObject_HEAD
    PyObject *name, *cls, *parameters; /* parameters: tuple of (name, parameter) */
    long flags;
    char selected;
} ModuleInfo;

int is_info(PyObject *x); /* 0 with an exception set where it is none */

extern PyTypeObject *info_type, *stats_rows_type, *value_type, *call_type, *tape_type, *op_hook_type;

typedef struct Tape Tape;

#define SAVE 256 /* of flags: the values themselves are wanted too */

/* torch.c. Calls with one argument or two; where an address goes in a table, to be cut to its places, a power of
   two. */
PyObject *call_one(PyObject *callable, PyObject *x);
PyObject *call_two(PyObject *callable, PyObject *x, PyObject *y);
size_t mixed(const void *address);

/* What torch's attributes tell of tensors and nodes. */
typedef enum { VERSION, REQUIRES_GRAD, GRAD_FN, OUTPUT_NR, BASE, TENSOR_ATTRIBUTES } TensorAttribute;
PyObject *tensor_attribute(PyObject *t, TensorAttribute which); /* a new reference */
int tensor_is_resolved(PyObject *t, int may_be_conjugate);
PyObject *node_behind(PyObject *t);
PyObject *node_nexts(PyObject *node);
long long sequence_of(PyObject *node);
PyObject *node_register(PyObject *node, PyObject *hook, int behind);

/* Where a tensor's elements lie. strides: in elements, NULL until geometry_on_host said yes. */
typedef struct {
    void *data;
    int nd, cpu; /* cpu: -1 where it was not asked for */
    int64_t sizes[MAX_DIMS], own_strides[MAX_DIMS];
    const int64_t *strides;
} Geometry;

int geometry_read(PyObject *t, Geometry *out);
int geometry_on_host(PyObject *t, Geometry *g);
int geometry_strides(PyObject *t, Geometry *g);
int geometry_is_contiguous(const Geometry *g);

PyObject *geometry_shape(const Geometry *g); /* a new reference */

/* tree.c. The tree of Values and scalars of an argument or result; path: where its values are saved, or NULL. A new
 * reference. */
PyObject *tape_tree(Tape *self, PyObject *x, long flags, PyObject *path, int depth);
PyObject *key_text(PyObject *key); /* the key of a dict as text that can be written; a new reference */

/* The same for a tensor that somebody holds for the rest of the step: it is remembered by a reference, which is less
 * than a weak one. */
PyObject *tape_held(Tape *self, PyObject *t, long flags, PyObject *path);

/* Between these two, tensors on devices are gathered that stay as they are meanwhile, and reduced together at the end.
   `end` takes what `begin` returned, keeps an exception that is set, and returns -1 where one is set. */
int tape_gather_begin(Tape *self);
int tape_gather_end(Tape *self, int begun);

/* A twin of a value with a note of its own, whose row is set with the value's when the step is drained. A new
 * reference. */
PyObject *tape_noted(Tape *self, PyObject *value, PyObject *note);

int tape_is_plain(const Tape *self, PyObject *x); /* a tensor that needs no describing */
void tape_touched(Tape *self, PyObject *t);
Value *tape_overwritten(Tape *self, PyObject *t);

/* Copies of small values on the host (arena.c). */
typedef struct Arena Arena;
int arena_check(PyObject *x);
int arena_keep(Arena *self, PyObject *key, PyObject *dtype, PyObject *shape, const Job *job);

/* Tell the journal of the step of a call, where there is one; fields: those of its trees that have come or changed.
   -1 with an exception set. */
enum { ARGS = 1, KWARGS = 2, OUT = 4, PARAMS = 8 };
int tape_report(Tape *self, Call *c, int fields);

/* Tell a journal (journal.c). row: -1 where the numbers are on a device. -1 with an
 * exception set. */
int journal_value(PyObject *journal, Value *value, const StatsRows *rows, Py_ssize_t row);
int journal_twin(PyObject *journal, PyObject *twin, PyObject *value);
int journal_call(PyObject *journal, Call *call, int fields);

/* The graph of the forward that is running (graph.c). */
PyObject *graph_new_empty(void);
int graph_visit(PyObject *graph, PyObject *const *roots, Py_ssize_t n, long long floor); /* roots: held by the caller */
void graph_forget(PyObject *graph);

/* The nodes that consume an edge, in the order in which they were met; held by the graph. */
typedef struct {
    PyObject *node;
    Py_ssize_t input;
} Consuming;

typedef struct {
    Consuming *items, few[8];
    Py_ssize_t n;
} Consumers;

int graph_consumers(PyObject *graph, PyObject *node, Py_ssize_t slot, long long floor, Consumers *found);
void consumers_free(Consumers *found);

/* What torch is doing. */
int torch_known(void);
int is_tensor(PyObject *x); /* -1 with an exception set */
long long graph_task_now(void);
long long sequence_now(void);
int compiling_now(void); /* whether torch exports or compiles what runs; -1 with an exception set */

/* Keep `__torch_function__` of classes and modes (functions_off), or of modes where there are any (modes_off), away
   from what the tool itself asks of tensors, until modes_on. NULL with an exception set, or where modes_off finds none.
 */
PyObject *functions_off(void);
PyObject *modes_off(void);
void modes_on(PyObject *off);

/* Whether the plan wants a micro-batch: asked once for each, and the latest answer kept. */
typedef struct {
    PyObject *function, *micro;
    int wanted;
} MicroGate;

int micro_is_wanted(MicroGate *gate, PyObject *micro); /* -1 with an exception set */

/* Hand the exception that is set to the guard: 0 when the training goes on, -1 when it is to be raised. */
int give_to_guard(PyObject *fault);

PyObject *value_with_note(Value *self, PyObject *note); /* a new reference */
Call *call_new(PyObject *kind, PyObject *name, Py_ssize_t number, PyObject *phase, PyObject *cls, PyObject *micro,
               PyObject *parent, Py_ssize_t stack);

/* See engine/core/stacks.py. `skip`: frames left out, from the current Python frame on. -2 with an exception set. */
Py_ssize_t stacks_capture(PyObject *stacks, Py_ssize_t base, const void *stop, int skip);

int rows_fill(PyObject *module);
int torch_fill(PyObject *module);
int records_fill(PyObject *module);
int tape_fill(PyObject *module);
int ops_fill(PyObject *module);
int op_watch_fill(PyObject *module);
int graph_fill(PyObject *module);
int nodes_fill(PyObject *module);
int modules_fill(PyObject *module);
int module_watch_fill(PyObject *module);
int gradients_fill(PyObject *module);
int parameter_gradients_fill(PyObject *module);
int arena_fill(PyObject *module);
int journal_fill(PyObject *module);

#endif
