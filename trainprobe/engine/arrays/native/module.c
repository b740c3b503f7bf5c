/* The Python face: the type StatsRows, a row buffer that grows in C, and a few functions about the machine. Limited API of Python 3.10. */
#include <string.h>

#include "objects.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define ALONE (64 * 1024)     /* bytes above which other Python threads may run meanwhile */
#define TOGETHER (1024 * 1024) /* bytes from which the pool helps */
#define LEAST_ROWS 256

PyTypeObject *stats_rows_type;

static void reduce_alone(const Job *job, Part *out) {
    int64_t blocks = (job->n + BLOCK * CHUNK - 1) / (BLOCK * CHUNK);
    Part part;
    reduce_block(job, 0, out);
    for (int64_t block = 1; block < blocks; block++) {
        reduce_block(job, block, &part);
        int64_t left = job->n - block * BLOCK * CHUNK, n = left < BLOCK * CHUNK ? left : BLOCK * CHUNK;
        part_merge(out, &part, job->flags, (uint64_t)n * (uint64_t)item_size[job->dtype]);
    }
}

static int reduce_together(const Job *job, Part *out) {
    int64_t blocks = (job->n + BLOCK * CHUNK - 1) / (BLOCK * CHUNK);
    Part *parts = malloc((size_t)blocks * sizeof *parts);
    if (!parts) return 0;
    int ran = pool_run(job, blocks, parts);
    if (ran) {
        *out = parts[0];
        for (int64_t block = 1; block < blocks; block++) {
            int64_t left = job->n - block * BLOCK * CHUNK, n = left < BLOCK * CHUNK ? left : BLOCK * CHUNK;
            part_merge(out, &parts[block], job->flags, (uint64_t)n * (uint64_t)item_size[job->dtype]);
        }
    }
    free(parts);
    return ran;
}

void reduce(const Job *job, Part *out) {
    if (job->n == 0) {
        part_clear(out);
        return;
    }
#if defined(__SSE__)
    unsigned int control = _mm_getcsr(); /* flushing of subnormals, which torch can switch on, would change the numbers */
    if (control & 0x8040) _mm_setcsr(control & ~0x8040u);
#endif
    if (job->n * item_size[job->dtype] < TOGETHER || pool_size() < 2 || !reduce_together(job, out)) reduce_alone(job, out);
#if defined(__SSE__)
    if (control & 0x8040) _mm_setcsr(control);
#endif
}

static Py_ssize_t expected = LEAST_ROWS; /* as many rows as the latest buffer had, so that the next one need not grow */

static int grow(StatsRows *self) {
    Py_ssize_t room = self->room ? self->room * 2 : expected;
    Py_ssize_t sizes[2] = {room * COLUMNS * (Py_ssize_t)sizeof(double), room * (Py_ssize_t)sizeof(uint64_t)};
    uint32_t *crcs = PyMem_Realloc(self->crcs, (size_t)room * sizeof(uint32_t));
    if (!crcs) return PyErr_NoMemory(), -1;
    self->crcs = crcs;
    for (int i = 0; i < 2; i++) {
        if (self->tables[i] ? PyByteArray_Resize(self->tables[i], sizes[i]) : !(self->tables[i] = PyByteArray_FromStringAndSize(NULL, sizes[i])))
            return -1;
    }
    self->partials = (double *)(void *)PyByteArray_AsString(self->tables[0]);
    self->checksums = (uint64_t *)(void *)PyByteArray_AsString(self->tables[1]);
    self->room = room;
    return 0;
}

/* shape may be an int: so many contiguous elements. */
static int read_layout(Job *job, PyObject *shape, PyObject *strides) {
    int64_t sizes[MAX_DIMS], steps[MAX_DIMS];
    if (PyLong_Check(shape)) {
        sizes[0] = PyLong_AsLongLong(shape);
        steps[0] = 1;
        if (sizes[0] < 0 && PyErr_Occurred()) return -1;
        layout(job, 1, sizes, steps);
        return 0;
    }
    if (!PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_Size(shape) != PyTuple_Size(strides)) {
        PyErr_SetString(PyExc_TypeError, "shape must be an int (contiguous) or a tuple, with a tuple of as many strides");
        return -1;
    }
    Py_ssize_t nd = PyTuple_Size(shape);
    if (nd > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d can be walked", nd, MAX_DIMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < nd; i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        steps[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        if (sizes[i] < 0 || steps[i] < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "sizes and strides must not be negative");
            return -1;
        }
    }
    layout(job, (int)nd, sizes, steps);
    return 0;
}

Py_ssize_t stats_rows_reduce(StatsRows *self, const Job *job) {
    Part part;
    if (self->rows == self->room && grow(self)) return -2;
    Py_ssize_t row = self->rows++;
    if (job->n * item_size[job->dtype] > ALONE) {
        uint64_t taken = self->taken;
        Py_BEGIN_ALLOW_THREADS
        reduce(job, &part);
        Py_END_ALLOW_THREADS
        if (taken != self->taken) return -1;
    } else {
        reduce(job, &part);
    }
    part_finish(&part, job, self->partials + row * COLUMNS);
    self->checksums[row] = part.checksum;
    self->crcs[row] = part.crc;
    if (job->flags & CRC32) self->has_crc = 1;
    return row;
}

Py_ssize_t stats_rows_repeat(StatsRows *self, Py_ssize_t row) {
    if (self->rows == self->room && grow(self)) return -2;
    memcpy(self->partials + self->rows * COLUMNS, self->partials + row * COLUMNS, COLUMNS * sizeof(double));
    self->checksums[self->rows] = self->checksums[row], self->crcs[self->rows] = self->crcs[row];
    return self->rows++;
}

static PyObject *stats_rows_blank(StatsRows *self, PyObject *unused) {
    (void)unused;
    if (self->rows == self->room && grow(self)) return NULL;
    Py_ssize_t row = self->rows++;
    memset(self->partials + row * COLUMNS, 0, COLUMNS * sizeof(double));
    self->checksums[row] = 0, self->crcs[row] = 0;
    return PyLong_FromSsize_t(row);
}

static PyObject *stats_rows_add(StatsRows *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "add takes data_ptr, dtype, shape, strides, flags; got %zd", nargs);
    Job job;
    job.data = PyLong_AsVoidPtr(args[0]);
    job.dtype = (int)PyLong_AsLong(args[1]);
    job.flags = (int)PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (job.dtype < 0 || job.dtype >= DTYPES) return PyErr_Format(PyExc_ValueError, "unknown dtype code %d", job.dtype);
    if (read_layout(&job, args[2], args[3])) return NULL;
    if (!job.data && job.n) return PyErr_Format(PyExc_ValueError, "no data behind %lld elements", (long long)job.n);
    Py_ssize_t row = stats_rows_reduce(self, &job);
    return row == -2 ? NULL : PyLong_FromSsize_t(row);
}

static PyObject *stats_rows_take(StatsRows *self, PyObject *unused) {
    (void)unused;
    PyObject *crcs = PyList_New(self->has_crc ? self->rows : 0), *answer = NULL;
    for (Py_ssize_t i = 0; crcs && self->has_crc && i < self->rows; i++) {
        PyObject *crc = PyLong_FromUnsignedLong(self->crcs[i]);
        if (!crc || PyList_SetItem(crcs, i, crc)) Py_CLEAR(crcs);
    }
    int failed = !crcs || (!self->room && grow(self)) || PyByteArray_Resize(self->tables[0], self->rows * COLUMNS * (Py_ssize_t)sizeof(double)) ||
                 PyByteArray_Resize(self->tables[1], self->rows * (Py_ssize_t)sizeof(uint64_t));
    if (crcs && self->room) self->room = self->rows;
    if (!failed) answer = PyTuple_Pack(3, self->tables[0], self->tables[1], crcs);
    Py_XDECREF(crcs);
    if (answer) {
        if (self->rows >= LEAST_ROWS) expected = self->rows;
        Py_CLEAR(self->tables[0]);
        Py_CLEAR(self->tables[1]);
        self->partials = NULL, self->checksums = NULL;
        self->rows = self->room = 0, self->has_crc = 0, self->taken++;
    }
    return answer;
}

static Py_ssize_t stats_rows_length(StatsRows *self) { return self->rows; }

static void stats_rows_free(StatsRows *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tables[0]);
    Py_XDECREF(self->tables[1]);
    PyMem_Free(self->crcs);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef stats_rows_methods[] = {
    {"add", (PyCFunction)(void (*)(void))stats_rows_add, METH_FASTCALL,
     "add(data_ptr, dtype, shape, strides, flags) -> row\n\nReduce one tensor. shape and strides (in elements) are tuples, or shape "
     "is the number of contiguous elements and strides None."},
    {"blank", (PyCFunction)stats_rows_blank, METH_NOARGS, "blank() -> row\n\nLeave a row of zeros for what is reduced elsewhere."},
    {"take", (PyCFunction)stats_rows_take, METH_NOARGS,
     "take() -> (partials, checksums, crcs)\n\nHand over the rows and start anew: bytearrays of float64 [rows, 12] and uint64 [rows], and "
     "a list of ints, empty when no CRC was asked for."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot stats_rows_slots[] = {{Py_tp_methods, stats_rows_methods},
                                    {Py_tp_dealloc, stats_rows_free},
                                    {Py_sq_length, stats_rows_length},
                                    {Py_tp_doc, "Rows of partials of tensors, in the order in which they were added."},
                                    {0, NULL}};

static PyType_Spec stats_rows_spec = {"trainprobe._native.StatsRows", sizeof(StatsRows), 0, Py_TPFLAGS_DEFAULT, stats_rows_slots};

static PyObject *set_threads(PyObject *self, PyObject *n) {
    (void)self;
    long wanted = PyLong_AsLong(n);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    pool_threads((int)(wanted > 1000 ? 1000 : wanted));
    return PyLong_FromLong(pool_size());
}

static PyObject *get_threads(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(pool_size());
}

static PyObject *use(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *text = PyUnicode_AsUTF8String(name);
    if (!text) return NULL;
    int failed = kernels_select(PyBytes_AsString(text));
    Py_DECREF(text);
    if (failed) return PyErr_Format(PyExc_ValueError, "this machine or build has no %R (avx512, avx2, baseline)", name);
    return PyUnicode_FromString(kernels.name);
}

static PyObject *instruction_set(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString(kernels.name);
}

static PyObject *bytes_at(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "bytes_at takes data_ptr, size");
    const void *data = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (size <= ALONE) return PyBytes_FromStringAndSize(data, size);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (!bytes) return NULL;
    char *copy = PyBytes_AsString(bytes);
    Py_BEGIN_ALLOW_THREADS
    memcpy(copy, data, (size_t)size);
    Py_END_ALLOW_THREADS
    return bytes;
}

static PyMethodDef functions[] = {
    {"bytes_at", (PyCFunction)(void (*)(void))bytes_at, METH_FASTCALL, "bytes_at(data_ptr, size) -> bytes, a copy of what lies there."},
    {"set_threads", set_threads, METH_O, "set_threads(n) -> threads in use. Numbers do not depend on it."},
    {"get_threads", get_threads, METH_NOARGS, "Return how many threads reduce a large tensor."},
    {"use", use, METH_O, "use(name) -> name. Choose the instruction set: avx512, avx2 or baseline; numbers do not depend on it."},
    {"instruction_set", instruction_set, METH_NOARGS, "Return the instruction set in use."},
    {NULL, NULL, 0, NULL}};

static const char *const dtype_names[DTYPES] = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu"};

static int fill(PyObject *module) {
    PyObject *type = PyType_FromSpec(&stats_rows_spec), *codes = PyDict_New();
    int failed = !type || !codes || PyModule_AddObjectRef(module, "StatsRows", type) || PyModule_AddObjectRef(module, "DTYPES", codes);
    for (int code = 0; !failed && code < DTYPES; code++) {
        PyObject *value = PyLong_FromLong(code);
        failed = !value || PyDict_SetItemString(codes, dtype_names[code], value);
        Py_XDECREF(value);
    }
    stats_rows_type = (PyTypeObject *)type; /* held for ever */
    Py_XDECREF(codes);
    int (*const fill[])(PyObject *) = {objects_fill, attributes_fill, geometry_fill, look_fill, tape_fill, stacks_fill,
                                       torch_state_fill, ops_fill, graph_fill,
                                       modules_fill, backward_fill, parameters_fill, node_hooks_fill, contribution_fill, arena_fill,
                                       hook_registry_fill, journal_fill, structure_fill, dump_text_fill};
    for (size_t i = 0; !failed && i < sizeof fill / sizeof *fill; i++) failed = fill[i](module);
    return failed ? -1 : 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "One pass over a tensor in memory.", -1, functions,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    kernels_init();
    crc32_init();
    fingerprint_init();
    pool_init();
    PyObject *module = PyModule_Create(&definition);
    if (module && fill(module)) Py_CLEAR(module);
    return module;
}
