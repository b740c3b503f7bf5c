/* What was looked at: tensors by their identity, held weakly, so that nothing is kept alive; and memory that was read a
 * moment ago. */
#include <string.h>

#include "tape.h"

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

void seen_forget(Seen *seen) {
    Py_CLEAR(seen->known);
    Py_CLEAR(seen->shape);
    PyObject *value = (PyObject *)seen->value;
    seen->value = NULL;
    Py_XDECREF(value);
}

static uint32_t *seen_at(const SeenTable *table, PyObject *t) { /* its place, or the one where it would stand */
    size_t at = mixed(t) & (size_t)(table->places_n - 1);
    while (table->places[at] && table->items[table->places[at] - 1].id != t)
        at = (at + 1) & (size_t)(table->places_n - 1);
    return &table->places[at];
}

Seen *seen_find(const SeenTable *table, PyObject *t) {
    uint32_t number = table->places_n ? *seen_at(table, t) : 0;
    return number ? &table->items[number - 1] : NULL;
}

/* Make room; what was forgotten leaves. */
static int seen_grow(SeenTable *table) {
    Py_ssize_t alive = 0, kept = 0;
    for (Py_ssize_t i = 0; i < table->used; i++) alive += table->items[i].known != NULL;
    Py_ssize_t room = table->room ? (alive * 2 > table->room ? table->room * 2 : table->room) : 256;
    Seen *seen = PyMem_Malloc((size_t)room * sizeof *seen);
    uint32_t *places = PyMem_Calloc((size_t)room * 2, sizeof *places);
    if (!seen || !places) {
        PyMem_Free(seen), PyMem_Free(places);
        return PyErr_NoMemory(), -1;
    }
    for (Py_ssize_t i = 0; i < table->used; i++)
        if (table->items[i].known) seen[kept++] = table->items[i];
    PyMem_Free(table->items), PyMem_Free(table->places);
    table->items = seen, table->places = places, table->room = room, table->places_n = room * 2, table->used = kept;
    for (Py_ssize_t i = 0; i < kept; i++) *seen_at(table, seen[i].id) = (uint32_t)i + 1;
    return 0;
}

static Seen *seen_place(SeenTable *table, PyObject *t) {
    Seen *found = seen_find(table, t);
    if (found) {
        seen_forget(found);
        return found;
    }
    if (table->used == table->room && seen_grow(table)) return NULL;
    *seen_at(table, t) = (uint32_t)++table->used;
    table->items[table->used - 1] = (Seen){.id = t};
    return &table->items[table->used - 1];
}

void seen_clear(SeenTable *table) {
    Seen *seen = table->items;
    Py_ssize_t used = table->used;
    PyMem_Free(table->places);
    table->items = NULL, table->places = NULL, table->room = table->places_n = table->used = 0;
    for (Py_ssize_t i = 0; i < used; i++) seen_forget(&seen[i]);
    PyMem_Free(seen);
}

int seen_is(const Seen *seen, PyObject *t) {
    return (seen->held ? seen->known : PyWeakref_GetObject(seen->known)) == t;
}

int same_shape(const Seen *seen, PyObject *shape) { return PyObject_RichCompareBool(seen->shape, shape, Py_EQ) == 1; }

int seen_note(SeenTable *table, Seen now) {
    now.known = now.held ? Py_NewRef(now.id) : PyWeakref_NewRef(now.id, NULL);
    Seen *seen = now.known ? seen_place(table, now.id) : NULL;
    if (!seen) {
        Py_XDECREF(now.known);
        return -1;
    }
    Py_INCREF(now.shape), Py_INCREF((PyObject *)now.value);
    *seen = now;
    return 0;
}

/* ---- memory that was read a moment ago --------------------------------------------------------------------------- */

/* Another view of the same memory has the same numbers, which are copied and not worked out again. Views of one base
   share its version counter, which says that nothing was written in between. What writes past it (a kernel that takes
   an address) is met by a sample of the elements; `touched` and `forget_all` hold here too. */

#define LARGE (256 * 1024) /* bytes: less is read nearly as fast as it is recognised */
#define SAMPLES 64

static uint64_t sample_of(const Job *job) {
    int item = item_size[job->dtype];
    int64_t samples = job->n < SAMPLES ? job->n : SAMPLES;
    uint64_t total = 0;
    for (int64_t i = 0; i < samples; i++) {
        uint64_t bits[2] = {0, 0};
        memcpy(bits, element_at(job, samples > 1 ? (job->n - 1) / (samples - 1) * i : 0), (size_t)item);
        total = hashed(total ^ bits[0]) + bits[1];
    }
    return total;
}

static Axes axes_of(const Dims *dims) {
    Axes axes = {.nd = dims->nd};
    memcpy(axes.size, dims->size, (size_t)dims->nd * sizeof *dims->size);
    memcpy(axes.stride, dims->stride, (size_t)dims->nd * sizeof *dims->stride);
    return axes;
}

static int same_axes(const Axes *a, const Dims *b) {
    size_t bytes = (size_t)a->nd * sizeof *a->size;
    return a->nd == b->nd && !memcmp(a->size, b->size, bytes) && !memcmp(a->stride, b->stride, bytes);
}

/* The fingerprint and the CRC depend on the places of the elements too. */
static int same_elements(const View *view, const Job *job) {
    return view->data == job->data && view->dtype == job->dtype && view->repeats == job->repeats &&
           same_axes(&view->memory, &job->memory) &&
           (!(job->flags & (CHECKSUM | CRC32)) || same_axes(&view->place, &job->place));
}

static void view_drop(View *view) {
    Py_CLEAR(view->root);
    StatsRows *rows = view->rows;
    view->rows = NULL;
    Py_XDECREF((PyObject *)rows);
}

void views_clear(Views *self) {
    View *items = self->items;
    self->items = NULL, self->next = 0;
    for (int i = 0; items && i < VIEWS; i++) view_drop(&items[i]);
    PyMem_Free(items);
}

PyObject *views_root(PyObject *t, const Job *job) {
    if (job->n * item_size[job->dtype] < LARGE || job->memory.nd > VIEW_DIMS || job->place.nd > VIEW_DIMS) return NULL;
    PyObject *base = tensor_attribute(t, BASE);
    if (!base) PyErr_Clear();
    if (base != Py_None) return base;
    Py_DECREF(base);
    return Py_NewRef(t);
}

Py_ssize_t views_find(const Views *self, PyObject *root, long long version, const Job *job, const StatsRows *rows) {
    for (int i = 0; self->items && i < VIEWS; i++) { /* the latest first */
        const View *view = &self->items[(self->next + VIEWS - 1 - i) % VIEWS];
        if (!view->root || view->rows != rows || view->taken != rows->taken || view->version != version ||
            !same_elements(view, job))
            continue;
        if (PyWeakref_GetObject(view->root) == root && view->sample == sample_of(job)) return view->row;
    }
    return -1;
}

int views_note(Views *self, PyObject *root, long long version, const Job *job, StatsRows *rows, Py_ssize_t row) {
    if (!self->items && !(self->items = PyMem_Calloc(VIEWS, sizeof *self->items))) return PyErr_NoMemory(), -1;
    PyObject *known = PyWeakref_NewRef(root, NULL);
    if (!known) return -1;
    View *view = &self->items[self->next];
    view_drop(view);
    self->next = (self->next + 1) % VIEWS;
    view->root = known, view->rows = (StatsRows *)Py_NewRef((PyObject *)rows), view->row = row,
    view->taken = rows->taken;
    view->version = version, view->data = job->data, view->dtype = job->dtype, view->repeats = job->repeats;
    view->memory = axes_of(&job->memory), view->place = axes_of(&job->place);
    view->sample = sample_of(job);
    return 0;
}
