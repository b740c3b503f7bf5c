/* The rows of a step: a table that grows. */
#include "objects.h"

#define LEAST_ROWS 256

PyTypeObject *stats_rows_type;

#ifndef PyBUF_READ /* the limited API names it since Python 3.11 */
#define PyBUF_READ 0x100
#endif

static PyObject *zlib_crc32;

static Py_ssize_t expected = LEAST_ROWS; /* as many rows as the latest buffer had, so that the next one need not grow */

static int grow(StatsRows *self) {
    Py_ssize_t room = self->room ? self->room * 2 : expected;
    Py_ssize_t sizes[2] = {room * COLUMNS * (Py_ssize_t)sizeof(double), room * (Py_ssize_t)sizeof(uint64_t)};
    uint32_t *crcs = PyMem_Realloc(self->crcs, (size_t)room * sizeof(uint32_t));
    if (!crcs) return PyErr_NoMemory(), -1;
    self->crcs = crcs;
    for (int i = 0; i < 2; i++) {
        if (self->tables[i] ? PyByteArray_Resize(self->tables[i], sizes[i])
                            : !(self->tables[i] = PyByteArray_FromStringAndSize(NULL, sizes[i])))
            return -1;
    }
    self->partials = (double *)(void *)PyByteArray_AsString(self->tables[0]);
    self->checksums = (uint64_t *)(void *)PyByteArray_AsString(self->tables[1]);
    self->room = room;
    return 0;
}

static int read_sizes(PyObject *from, Py_ssize_t nd, int64_t *sizes) {
    if (!PyTuple_Check(from) || PyTuple_Size(from) != nd) {
        PyErr_SetString(PyExc_TypeError, "shape must be an int (contiguous) or a tuple, with tuples of as many "
                                         "strides, sizes of the whole and offsets");
        return -1;
    }
    for (Py_ssize_t i = 0; i < nd; i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(from, i));
        if (sizes[i] < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "sizes, strides and offsets must not be negative");
            return -1;
        }
    }
    return 0;
}

/* shape may be an int: so many contiguous elements. whole, offset: of the tensor that it is a rectangle of, or NULL. */
static int read_layout(Job *job, PyObject *shape, PyObject *strides, PyObject *whole, PyObject *offset) {
    int64_t sizes[MAX_DIMS], steps[MAX_DIMS], outer[MAX_DIMS], begin[MAX_DIMS];
    if (PyLong_Check(shape)) {
        sizes[0] = PyLong_AsLongLong(shape);
        steps[0] = 1;
        if (sizes[0] < 0 && PyErr_Occurred()) return -1;
        layout(job, 1, sizes, steps);
        return 0;
    }
    Py_ssize_t nd = PyTuple_Check(shape) ? PyTuple_Size(shape) : 0;
    if (nd > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d can be walked", nd, MAX_DIMS);
        return -1;
    }
    if (read_sizes(shape, nd, sizes) || read_sizes(strides, nd, steps)) return -1;
    if (whole && (read_sizes(whole, nd, outer) || read_sizes(offset, nd, begin))) return -1;
    layout_within(job, (int)nd, sizes, steps, whole ? outer : NULL, whole ? begin : NULL);
    return 0;
}

/* zlib's CRC-32 of the elements in their order; -1 with an exception set. zlib lets other Python threads run. */
static int crc_of(const Job *job, uint32_t *crc) {
    uint64_t buffer[CHUNK * 2];
    int64_t item = item_size[job->dtype], run = job->memory.nd == 1 && job->memory.stride[0] == item ? job->n : CHUNK;
    *crc = 0;
    for (int64_t start = 0; start < job->n; start += run) {
        int64_t n = job->n - start < run ? job->n - start : run;
        PyObject *bytes =
            PyMemoryView_FromMemory((char *)chunk_at(job, start, n, (char *)buffer), n * item, PyBUF_READ);
        PyObject *sum = bytes ? PyObject_CallFunction(zlib_crc32, "OI", bytes, (unsigned int)*crc) : NULL;
        Py_XDECREF(bytes);
        if (!sum) return -1;
        *crc = (uint32_t)PyLong_AsUnsignedLong(sum);
        Py_DECREF(sum);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

Py_ssize_t stats_rows_reduce(StatsRows *self, const Job *job) {
    Part part;
    uint64_t taken = self->taken;
    uint32_t crc = 0;
    if (job->flags & CRC32 && crc_of(job, &crc)) return -2;
    if (taken != self->taken) return -1;
    if (self->rows == self->room && grow(self)) return -2;
    Py_ssize_t row = self->rows++;
    if (job->n * item_size[job->dtype] > ALONE) {
        Py_BEGIN_ALLOW_THREADS reduce(job, &part);
        Py_END_ALLOW_THREADS if (taken != self->taken) return -1;
    } else {
        reduce(job, &part);
    }
    part_finish(&part, job, self->partials + row * COLUMNS);
    self->checksums[row] = part.checksum;
    self->crcs[row] = crc;
    if (job->flags & CRC32) self->has_crc = 1;
    return row;
}

uint64_t fingerprint_of(const Job *job) {
    Part part;
    if (job->n * item_size[job->dtype] > ALONE) {
        Py_BEGIN_ALLOW_THREADS reduce(job, &part);
        Py_END_ALLOW_THREADS
    } else {
        reduce(job, &part);
    }
    return part.checksum;
}

Py_ssize_t stats_rows_repeat(StatsRows *self, Py_ssize_t row) {
    if (self->rows == self->room && grow(self)) return -2;
    memcpy(self->partials + self->rows * COLUMNS, self->partials + row * COLUMNS, COLUMNS * sizeof(double));
    self->checksums[self->rows] = self->checksums[row], self->crcs[self->rows] = self->crcs[row];
    return self->rows++;
}

Py_ssize_t stats_rows_new(StatsRows *self) {
    if (self->rows == self->room && grow(self)) return -2;
    memset(self->partials + self->rows * COLUMNS, 0, COLUMNS * sizeof(double));
    self->checksums[self->rows] = 0, self->crcs[self->rows] = 0;
    return self->rows++;
}

static PyObject *stats_rows_blank(StatsRows *self, PyObject *unused) {
    (void)unused;
    Py_ssize_t row = stats_rows_new(self);
    return row < 0 ? NULL : PyLong_FromSsize_t(row);
}

static PyObject *stats_rows_add(StatsRows *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 && nargs != 7)
        return PyErr_Format(PyExc_TypeError,
                            "add takes data_ptr, dtype, shape, strides, flags and perhaps whole and offset; got %zd",
                            nargs);
    Job job;
    job.data = PyLong_AsVoidPtr(args[0]);
    job.dtype = (int)PyLong_AsLong(args[1]);
    job.flags = (int)PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (job.dtype < 0 || job.dtype >= DTYPES) return PyErr_Format(PyExc_ValueError, "unknown dtype code %d", job.dtype);
    if (read_layout(&job, args[2], args[3], nargs == 7 ? args[5] : NULL, nargs == 7 ? args[6] : NULL)) return NULL;
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
    int failed = !crcs || (!self->room && grow(self)) ||
                 PyByteArray_Resize(self->tables[0], self->rows * COLUMNS * (Py_ssize_t)sizeof(double)) ||
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

static PyMethodDef stats_rows_methods[] = {{"add", (PyCFunction)(void (*)(void))stats_rows_add, METH_FASTCALL,
                                            "add(data_ptr, dtype, shape, strides, flags[, whole, offset]) -> "
                                            "row\n\nReduce one tensor. shape and strides (in elements) are tuples, or "
                                            "shape is the number of contiguous elements and strides None. whole, "
                                            "offset: of a tensor that this is a rectangle of, tuples too; the "
                                            "checksum is then its share in that of the whole."},
                                           {"blank", (PyCFunction)stats_rows_blank, METH_NOARGS,
                                            "blank() -> row\n\nLeave a row of zeros for what is reduced elsewhere."},
                                           {"take", (PyCFunction)stats_rows_take, METH_NOARGS,
                                            "take() -> (partials, checksums, crcs)\n\nHand over the rows and start "
                                            "anew: bytearrays of float64 [rows, 12] and uint64 [rows], and "
                                            "a list of ints, empty when no CRC was asked for."},
                                           {NULL, NULL, 0, NULL}};

static PyType_Slot stats_rows_slots[] = {
    {Py_tp_methods, stats_rows_methods},
    {Py_tp_dealloc, stats_rows_free},
    {Py_sq_length, stats_rows_length},
    {Py_tp_doc, "Rows of partials of tensors, in the order in which they were added."},
    {0, NULL}};

static PyType_Spec stats_rows_spec = {"trainprobe._native.StatsRows", sizeof(StatsRows), 0, Py_TPFLAGS_DEFAULT,
                                      stats_rows_slots};

int rows_fill(PyObject *module) {
    PyObject *zlib = PyImport_ImportModule("zlib");
    zlib_crc32 = zlib ? PyObject_GetAttrString(zlib, "crc32") : NULL;
    Py_XDECREF(zlib);
    if (!zlib_crc32) return -1;
    stats_rows_type = (PyTypeObject *)PyType_FromSpec(&stats_rows_spec);
    return stats_rows_type ? PyModule_AddObjectRef(module, "StatsRows", (PyObject *)stats_rows_type) : -1;
}
