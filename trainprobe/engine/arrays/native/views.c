/* What was read a moment ago, by where its elements lie: another view of the same memory has the same numbers, which are copied and not worked
   out again. Views of one base share its version counter, which says that nothing was written in between. What writes past it (a kernel that
   takes an address) is met by a sample of the elements; `touched` and `forget_all` of the tape hold here too. */
#include <string.h>

#include "native_tape.h"

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
           same_axes(&view->memory, &job->memory) && (!(job->flags & (CHECKSUM | CRC32)) || same_axes(&view->place, &job->place));
}

static void let_go(View *view) {
    Py_CLEAR(view->root);
    StatsRows *rows = view->rows;
    view->rows = NULL;
    Py_XDECREF((PyObject *)rows);
}

void views_clear(Views *self) {
    View *items = self->items;
    self->items = NULL, self->next = 0;
    for (int i = 0; items && i < VIEWS; i++) let_go(&items[i]);
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
        if (!view->root || view->rows != rows || view->taken != rows->taken || view->version != version || !same_elements(view, job)) continue;
        if (PyWeakref_GetObject(view->root) == root && view->sample == sample_of(job)) return view->row;
    }
    return -1;
}

int views_note(Views *self, PyObject *root, long long version, const Job *job, StatsRows *rows, Py_ssize_t row) {
    if (!self->items && !(self->items = PyMem_Calloc(VIEWS, sizeof *self->items))) return PyErr_NoMemory(), -1;
    PyObject *known = PyWeakref_NewRef(root, NULL);
    if (!known) return -1;
    View *view = &self->items[self->next];
    let_go(view);
    self->next = (self->next + 1) % VIEWS;
    view->root = known, view->rows = (StatsRows *)Py_NewRef((PyObject *)rows), view->row = row, view->taken = rows->taken;
    view->version = version, view->data = job->data, view->dtype = job->dtype, view->repeats = job->repeats;
    view->memory = axes_of(&job->memory), view->place = axes_of(&job->place);
    view->sample = sample_of(job);
    return 0;
}
