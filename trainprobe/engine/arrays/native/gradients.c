/* The gradients at the outputs and inputs of each module call, by hooks on autograd nodes that exist anyway (nodes.c;
   see engine/capture/gradients.py for how they are found). */
#include <string.h>

#include "module_watch.h"

static PyObject *t_module, *t_backward, *t_micro;

/* ---- the backward call of a module call: what comes back at its outputs and what it sends to its inputs ---------- */

typedef struct {
    Py_ssize_t index;
    PyObject *path; /* of what is nested or named, NULL for a plain place */
} Slot;

/* The backward call of one module call, appended to the tape when its first gradient arrives. */
struct Backward {
    PyObject_HEAD
    ModuleWatch *watch; /* not held; NULL once the step has ended */
    Call *forward, *call;
    PyObject *merged; /* number of an input → (note, other places of the same tensor), or NULL */
    Slot *slots[2];   /* of outputs, of inputs */
    Slot few[2][2];   /* these, where they are few */
    Py_ssize_t n[2], length[2];
    long flags;
};

static PyTypeObject *backward_type;
static int place_plainly(Backward *b, int side, const Edges *edges) {
    for (Py_ssize_t i = 0; i < edges->n; i++) {
        b->slots[side][i].index = edges->items[i].number;
        if (b->length[side] <= edges->items[i].number) b->length[side] = edges->items[i].number + 1;
    }
    return 0;
}

/* Places of what is nested, named or given twice: as `engine.capture.module_gradients.places` has them. */
static int place_oddly(ModuleWatch *self, Backward *b, int side, const Edges *edges) {
    PyObject *texts = PyList_New(edges->n), *answer, *slots, *merged;
    for (Py_ssize_t i = 0; texts && i < edges->n; i++) {
        PyObject *text = place_text(edges->items[i].path, edges->items[i].number);
        if (!text) Py_CLEAR(texts);
        else PyList_SetItem(texts, i, text);
    }
    answer = texts ? call_two(self->places, texts, side ? Py_True : Py_False) : NULL;
    Py_XDECREF(texts);
    int failed =
        !answer || !PyArg_ParseTuple(answer, "O!O!n", &PyList_Type, &slots, &PyDict_Type, &merged, &b->length[side]);
    for (Py_ssize_t i = 0; !failed && i < edges->n; i++) {
        PyObject *path;
        failed = !PyArg_ParseTuple(PyList_GetItem(slots, i), "nU", &b->slots[side][i].index, &path);
        if (!failed && PyUnicode_GetLength(path) > 0) b->slots[side][i].path = Py_NewRef(path);
    }
    if (!failed && side && PyDict_Size(merged) > 0) b->merged = Py_NewRef(merged);
    Py_XDECREF(answer);
    return failed ? -1 : 0;
}

static Backward *backward_new(ModuleWatch *self, const ModuleInfo *info, Call *forward, const Edges *outputs,
                              const Edges *inputs) {
    Backward *b = (Backward *)PyType_GenericAlloc(backward_type, 0);
    const Edges *sides[2] = {outputs, inputs};
    if (!b) return NULL;
    b->watch = self, b->forward = (Call *)Py_NewRef((PyObject *)forward), b->flags = info->flags;
    for (int side = 0; side < 2; side++) {
        Py_ssize_t n = sides[side]->n;
        int plain = 1;
        b->n[side] = n;
        b->slots[side] = n <= 2 ? b->few[side] : PyMem_Calloc((size_t)n, sizeof(Slot));
        for (Py_ssize_t i = 0; i < n; i++) plain &= sides[side]->items[i].path == NULL;
        if (!b->slots[side]) PyErr_NoMemory();
        if (!b->slots[side] ||
            (plain ? place_plainly(b, side, sides[side]) : place_oddly(self, b, side, sides[side]))) {
            Py_DECREF((PyObject *)b);
            return NULL;
        }
    }
    return b;
}

static PyObject *nones(Py_ssize_t n) {
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) PyList_SetItem(list, i, Py_NewRef(Py_None));
    if (list) PyObject_GC_UnTrack(list); /* a tree has no cycles: the collector need not walk it */
    return list;
}

static int begin(Backward *b) {
    Call *forward = b->forward; /* its parent is the parent's forward: named as its backward when it is written */
    b->call =
        call_new(t_module, forward->name, forward->call, t_backward, forward->cls, forward->micro, forward->parent, -1);
    if (!b->call || PyList_Append(b->watch->calls, (PyObject *)b->call)) return -1;
    b->call->args = nones(b->length[0]), b->call->out = nones(b->length[1]);
    return b->call->args && b->call->out ? 0 : -1;
}

static PyObject *with_note(Backward *b, PyObject *value, PyObject *note) { /* takes over value */
    Tape *native = value && note && Py_TYPE(value) == value_type && b->watch ? b->watch->native : NULL;
    PyObject *noted = native ? tape_noted(native, value, note) : Py_XNewRef(value);
    Py_XDECREF(value);
    return noted;
}

/* Where one tensor was given at several places, the sum stands at the first and a note at the others. */
static PyObject *merged_value(Backward *b, PyObject *value, Py_ssize_t i, PyObject *where) { /* takes over value */
    PyObject *number = PyLong_FromSsize_t(i), *about = number ? PyDict_GetItemWithError(b->merged, number) : NULL,
             *note, *others;
    Py_XDECREF(number);
    if (!about || !value || Py_TYPE(value) != value_type) return value;
    if (!PyArg_ParseTuple(about, "OO!", &note, &PyList_Type, &others)) goto failed;
    value = with_note(b, value, note);
    for (Py_ssize_t k = 0; value && k < PyList_Size(others); k++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyList_GetItem(others, k));
        Value *other = (Value *)value_with_note((Value *)value, note);
        if (!other) goto failed;
        other->row = -1;
        Py_XDECREF(other->requires_grad);
        other->requires_grad = Py_NewRef(Py_False);
        Py_CLEAR(other->tensor);
        Py_CLEAR(other->extra);
        if (PyList_SetItem(where, place, (PyObject *)other)) goto failed;
    }
    return value;
failed:
    Py_XDECREF(value);
    return NULL;
}

int backward_take(Backward *b, int side, Py_ssize_t i, PyObject *gradient, int untouched) {
    ModuleWatch *self = b->watch;
    if (!self || !self->native || gradient == Py_None) return 0;
    if (i < 0 || i >= b->n[side]) return PyErr_Format(PyExc_IndexError, "no place %zd", i), -1;
    PyObject *micro = self->backward_micro;
    self->backward_micro = Py_XNewRef(b->forward->micro);
    Py_XDECREF(micro);
    if (!b->call && begin(b)) return -1;
    Slot *slot = &b->slots[side][i];
    PyObject *where = side ? b->call->out : b->call->args, *there = PyList_GetItem(where, slot->index), *at = NULL;
    if (!there) return -1;
    if (there != Py_None) return 0;
    if (b->flags & SAVE) {
        PyObject *place =
            joined_name(b->forward->name, b->forward->cls, t_backward, b->forward->call, side ? "output" : "input");
        if (place && slot->path) at = PyUnicode_FromFormat("%U.%zd.%U", place, slot->index, slot->path);
        else if (place) at = PyUnicode_FromFormat("%U.%zd", place, slot->index);
        Py_XDECREF(place);
        if (!at) return -1;
    }
    PyObject *value =
        with_note(b, tape_tree(self->native, gradient, b->flags, at, 0), untouched ? self->untouched : NULL);
    Py_XDECREF(at);
    if (value && side && b->merged) value = merged_value(b, value, i, where);
    if (value && slot->path) {
        PyObject *named = PyDict_New();
        if (named && PyDict_SetItem(named, slot->path, value)) Py_CLEAR(named);
        Py_DECREF(value);
        value = named;
    }
    if (!value || PyList_SetItem(where, slot->index, value)) return -1;
    return self->native ? tape_report(self->native, b->call, side ? OUT : ARGS) : 0;
}

void backward_end(Backward *b) { b->watch = NULL; }

static void backward_free(Backward *b) {
    PyTypeObject *type = Py_TYPE((PyObject *)b);
    Py_XDECREF((PyObject *)b->forward);
    Py_XDECREF((PyObject *)b->call);
    Py_XDECREF(b->merged);
    for (int side = 0; side < 2; side++) {
        for (Py_ssize_t i = 0; b->slots[side] && i < b->n[side]; i++) Py_XDECREF(b->slots[side][i].path);
        if (b->slots[side] != b->few[side]) PyMem_Free(b->slots[side]);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(b);
    Py_DECREF(type);
}

static PyType_Slot backward_slots[] = {{Py_tp_dealloc, backward_free}, {0, NULL}};
static PyType_Spec backward_spec = {"trainprobe._native.Backward", sizeof(Backward), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, backward_slots};

/* ---- the sum of what several consumers send to one input, handed on when the last one has sent ------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *backward, *plus, *total; /* plus: adds two gradients out of place */
    Py_ssize_t left, input;
} Contribution;

static PyTypeObject *contribution_type;

static PyObject *contribution_new(PyObject *backward, PyObject *plus, Py_ssize_t consumers, Py_ssize_t input) {
    Contribution *self = (Contribution *)PyType_GenericAlloc(contribution_type, 0);
    if (!self) return NULL;
    self->backward = Py_NewRef(backward), self->plus = Py_NewRef(plus);
    self->left = consumers, self->input = input;
    return (PyObject *)self;
}

/* Hand on what has arrived. */
int contribution_flush(PyObject *sum) {
    Contribution *self = (Contribution *)sum;
    PyObject *total = self->total;
    self->total = NULL;
    if (!total) return 0;
    self->left = 0;
    int failed = backward_take((Backward *)self->backward, INPUT_SIDE, self->input, total, 0);
    Py_DECREF(total);
    return failed;
}

/* Take one consumer's gradient; None (no gradient along this edge) counts as sent. */
int contribution_add(PyObject *sum, PyObject *gradient) {
    Contribution *self = (Contribution *)sum;
    if (self->left <= 0) return 0; /* a second backward through a retained graph: the first one is what was recorded */
    if (gradient != Py_None) {
        PyObject *total = self->total ? call_two(self->plus, self->total, gradient) : Py_NewRef(gradient);
        if (!total) return -1;
        Py_XDECREF(self->total);
        self->total = total;
    }
    return --self->left == 0 ? contribution_flush(sum) : 0;
}

static void contribution_free(Contribution *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->backward);
    Py_XDECREF(self->plus);
    Py_XDECREF(self->total);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot contribution_slots[] = {{Py_tp_dealloc, contribution_free}, {0, NULL}};
static PyType_Spec contribution_spec = {"trainprobe._native.Contribution", sizeof(Contribution), 0,
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, contribution_slots};

/* ---- what is wanted of which node once a module call has returned ------------------------------------------------ */

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

static int want(ModuleWatch *self, Touched *touched, PyObject *node,
                HookRequest wanted) { /* takes over the contribution */
    NodeHook *hook = node_hook_of(self, node, wanted);
    return hook ? touch(touched, node, hook) : -1;
}

static int watch_outputs(ModuleWatch *self, Touched *touched, Backward *b, const Edges *found, const Edges *inputs) {
    for (Py_ssize_t i = 0; i < found->n; i++) {
        const EdgeAt *e = &found->items[i];
        int untouched = 0;
        for (Py_ssize_t k = 0; k < inputs->n; k++)
            untouched |= inputs->items[k].node == e->node && inputs->items[k].slot == e->slot;
        if (want(self, touched, e->node, (HookRequest){RECEIVED, untouched, e->slot, i, b, NULL})) return -1;
    }
    return 0;
}

static PyObject *contribution_of(ModuleWatch *self, Backward *b, Py_ssize_t consumers, Py_ssize_t i) {
    PyObject *made = contribution_new((PyObject *)b, self->plus, consumers, i);
    if (made && PyList_Append(self->open, made)) Py_CLEAR(made);
    return made;
}

static int watch_input(ModuleWatch *self, Touched *touched, Backward *b, long long floor, const Edges *found,
                       const Edges *inputs, Py_ssize_t i) {
    const EdgeAt *e = &inputs->items[i];
    Consumers to;
    PyObject *sum = NULL;
    if (graph_consumers(self->graph, e->node, e->slot, floor, &to)) return -1;
    int failed = to.n > 1 && !(sum = contribution_of(self, b, to.n, i));
    for (Py_ssize_t k = 0; !failed && k < to.n; k++)
        failed =
            want(self, touched, to.items[k].node, (HookRequest){SENT, 0, to.items[k].input, i, b, Py_XNewRef(sum)});
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

int watch_gradients(ModuleWatch *self, const ModuleInfo *info, Call *call, long long floor, const Edges *inputs,
                    PyObject *out) {
    Edges found = {0};
    Touched touched;
    Backward *b = NULL;
    touched.items = touched.few, touched.n = 0, touched.room = 16;
    int failed = edges_of(self, out, NULL, -1, &found, 0);
    if (!failed && found.n) {
        b = backward_new(self, info, call, &found, inputs);
        failed =
            !b || watch_outputs(self, &touched, b, &found, inputs) || (inputs->n && visit_from(self, &found, floor));
        for (Py_ssize_t i = 0; !failed && i < inputs->n; i++)
            failed = watch_input(self, &touched, b, floor, &found, inputs, i);
        for (Py_ssize_t i = 0; !failed && i < touched.n; i++)
            failed = node_hook_attach(touched.items[i].hook, touched.items[i].node);
    }
    if (touched.items != touched.few) PyMem_Free(touched.items);
    Py_XDECREF((PyObject *)b);
    edges_free(&found);
    return failed ? -1 : 0;
}

int gradients_fill(PyObject *module) {
    (void)module;
    t_module = PyUnicode_InternFromString("module"), t_backward = PyUnicode_InternFromString("backward");
    t_micro = PyUnicode_InternFromString("micro");
    backward_type = (PyTypeObject *)PyType_FromSpec(&backward_spec);
    contribution_type = (PyTypeObject *)PyType_FromSpec(&contribution_spec);
    return t_module && t_backward && t_micro && backward_type && contribution_type ? 0 : -1;
}
