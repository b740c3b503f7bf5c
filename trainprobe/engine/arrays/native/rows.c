/* One tensor to one row: the order of enumeration, the chunks, the merging of their partials, and the table of rows,
 * which grows. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "objects.h"
#include "sweeps.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define LINE 64                /* bytes of the cache */
#define SLICE 1024             /* bytes that are widened at a time */
#define TOGETHER (1024 * 1024) /* bytes from which the pool helps */
#define LEAST_ROWS 256

PyTypeObject *stats_rows_type;

static const int computed_with[COLUMNS] = COMPUTED_WITH;

typedef struct {
    int64_t size, memory, place;
} Axis;

/* Merge neighbouring dimensions that are walked as one. */
static void collapse(Dims *dims) {
    int kept = 0;
    for (int i = 1; i < dims->nd; i++) {
        if (dims->stride[kept] == dims->stride[i] * dims->size[i]) {
            dims->size[kept] *= dims->size[i];
            dims->stride[kept] = dims->stride[i];
        } else {
            kept++;
            dims->size[kept] = dims->size[i];
            dims->stride[kept] = dims->stride[i];
        }
    }
    dims->nd = dims->nd ? kept + 1 : 0;
    if (dims->nd == 0) dims->nd = 1, dims->size[0] = 1, dims->stride[0] = 0;
}

/* Elements are enumerated in the order of memory, because no partial but the CRC depends on the order of elements and
   the fingerprint knows the place of each. A dimension of stride 0 repeats the same elements: it is counted, not
   walked, unless places matter. Strides are in elements. */
void layout_within(Job *job, int nd, const int64_t *shape, const int64_t *strides, const int64_t *whole,
                   const int64_t *offset) {
    Axis axes[MAX_DIMS];
    int kept = 0, item = item_size[job->dtype];
    int64_t place = 1, repeats = 1, n = 1, first = 0;
    for (int i = nd - 1; i >= 0; i--) {
        if (shape[i] != 1) {
            if (strides[i] == 0 && !(job->flags & (CHECKSUM | CRC32))) {
                repeats *= shape[i];
            } else {
                axes[kept++] = (Axis){shape[i], strides[i] * item, place};
                n *= shape[i];
            }
        }
        first += offset ? offset[i] * place : 0;
        place *= whole ? whole[i] : shape[i];
    }
    if (!(job->flags & CRC32)) { /* innermost first; insertion sort, stable, repeated elements outermost */
        for (int i = 1; i < kept; i++) {
            Axis a = axes[i];
            int j = i;
            for (; j > 0 && a.memory && (a.memory < axes[j - 1].memory || !axes[j - 1].memory); j--)
                axes[j] = axes[j - 1];
            axes[j] = a;
        }
    }
    job->memory.nd = job->place.nd = kept;
    for (int i = 0; i < kept; i++) {
        Axis a = axes[kept - 1 - i];
        job->memory.size[i] = job->place.size[i] = a.size;
        job->memory.stride[i] = a.memory;
        job->place.stride[i] = a.place;
    }
    collapse(&job->memory);
    collapse(&job->place);
    job->n = n;
    job->first = first;
    job->repeats = repeats;
    job->repeat = (double)repeats;
}

void layout(Job *job, int nd, const int64_t *shape, const int64_t *strides) {
    layout_within(job, nd, shape, strides, NULL, NULL);
}

double finite_count(const Part *p) { return p->count - p->nan - p->posinf - p->neginf; }

static void part_clear(Part *p) {
    memset(p, 0, sizeof *p);
    p->min = INFINITY;
    p->max = -INFINITY;
}

static void two_sum(double *s, double *c, double v) {
    double t = *s + v, b = t - *s;
    *c += (*s - (t - b)) + (v - b);
    *s = t;
}

static void merge_squares(Part *a, const Part *b) {
    if (b->q == 0) return;
    double scale = 1;
    if (a->q == 0) {
        a->exponent = b->exponent;
    } else if (a->exponent < b->exponent) {
        double down =
            ldexp(1.0, a->exponent - b->exponent); /* applied twice: its square may be too small for a double */
        a->q = a->q * down * down, a->qc = a->qc * down * down, a->exponent = b->exponent;
    } else if (b->exponent < a->exponent) {
        scale = ldexp(1.0, b->exponent - a->exponent);
    }
    two_sum(&a->q, &a->qc, b->q * scale * scale);
    a->qc += b->qc * scale * scale;
}

static void part_merge(Part *a, const Part *b, int flags) {
    if (flags & STATS) {
        merge_asked(a, b, flags); /* first: it takes the sums and counts of both */
        a->count += b->count, a->nan += b->nan, a->posinf += b->posinf, a->neginf += b->neginf;
        a->zero += b->zero;
        if (b->min < a->min) a->min = b->min;
        if (b->max > a->max) a->max = b->max;
        two_sum(&a->s, &a->c, b->s);
        a->c += b->c;
        merge_squares(a, b);
        a->integer_sum += b->integer_sum;
    }
    a->checksum += b->checksum;
}

static void stats_single(const float *x, int64_t n, int64_t left, int dtype, int flags, Part *p) {
    float clean[CHUNK];
    kernels.stats_f32(x, n, left, p);
    if (!(p->q <= DBL_MAX)) {
        Part finite_part;
        kernels.clean_f32(x, clean, n, p);
        kernels.stats_f32(clean, n, 0, &finite_part);
        p->s = finite_part.s, p->q = finite_part.q;
        x = clean;
    }
    kernels.asked_f32(x, n, mean_of(p), smallest_normal[dtype], flags, p);
}

static void stats_double(const double *x, int64_t n, int dtype, int flags, Part *p) {
    double clean[CHUNK];
    int64_t bad;
    kernels.stats_f64(x, n, 1.0, &bad, p);
    Part again = *p;
    if (bad) {
        kernels.clean_f64(x, clean, n, p);
        kernels.stats_f64(clean, n, 1.0, &bad, &again);
        x = clean;
    }
    double low = fabs(again.min), high = fabs(again.max), big = low > high ? low : high;
    if (big > 0x1p480) p->exponent = 600;
    if (big < 0x1p-480 && big > 0) p->exponent = -600;
    if (p->exponent) kernels.stats_f64(x, n, ldexp(1.0, -p->exponent), &bad, &again);
    p->s = again.s, p->c = again.c, p->q = again.q, p->qc = again.qc;
    kernels.asked_f64(x, n, mean_of(p), smallest_normal[dtype], flags, p);
}

/* In slices, before each of which as much is asked for of what comes FAR behind it. */
static void widen(int dtype, const char *x, float *out, int64_t n, int64_t left) {
    int64_t item = item_size[dtype], slice = SLICE / item;
    for (int64_t at = 0; at < n; at += slice) {
        int64_t run = n - at < slice ? n - at : slice;
        for (int64_t byte = 0; left >= FAR && byte < run * item; byte += LINE)
            __builtin_prefetch(x + at * item + FAR + byte, 0, 2);
        kernels.to_f32[dtype](x + at * item, out + at, run);
    }
}

static void stats_chunk(const Job *job, const char *x, int64_t n, int64_t left, Part *p) {
    union {
        float single[CHUNK];
        double wide[CHUNK];
    } scratch;
    p->count = (double)n;
    if (job->dtype == D_F32) {
        stats_single((const float *)(const void *)x, n, left, job->dtype, job->flags, p);
    } else if (job->dtype == D_F64) {
        stats_double((const double *)(const void *)x, n, job->dtype, job->flags, p);
    } else if (kernels.to_f32[job->dtype]) {
        widen(job->dtype, x, scratch.single, n, left);
        stats_single(scratch.single, n, 0, job->dtype, job->flags, p);
    } else {
        kernels.to_f64[job->dtype](x, scratch.wide, n);
        stats_double(scratch.wide, n, job->dtype, job->flags, p);
        if (job->dtype == D_I64) p->integer_sum = kernels.sum_i64((const int64_t *)(const void *)x, n);
        if (job->dtype == D_U64) p->integer_sum = kernels.sum_u64((const uint64_t *)(const void *)x, n);
    }
}

/* The place in each dimension, and the offset, of element number `index` of the enumeration. */
static int64_t locate(const Dims *dims, int64_t index, int64_t *at) {
    int64_t offset = 0;
    for (int i = dims->nd - 1; i >= 0; i--) {
        at[i] = index % dims->size[i];
        index /= dims->size[i];
        offset += at[i] * dims->stride[i];
    }
    return offset;
}

const char *element_at(const Job *job, int64_t index) {
    int64_t at[MAX_DIMS];
    return job->data + locate(&job->memory, index, at);
}

/* Go on by `run` elements, which end at most at the end of the innermost dimension; return the change of offset. */
static int64_t advance(const Dims *dims, int64_t *at, int64_t run) {
    int i = dims->nd - 1;
    int64_t moved = run * dims->stride[i];
    at[i] += run;
    for (; i > 0 && at[i] == dims->size[i]; i--) {
        moved -= at[i] * dims->stride[i];
        at[i] = 0;
        at[i - 1]++;
        moved += dims->stride[i - 1];
    }
    return moved;
}

static uint64_t checksum_chunk(const Job *job, const char *x, int64_t start, int64_t n, int64_t left) {
    int64_t at[MAX_DIMS], place = job->first + locate(&job->place, start, at);
    int item = item_size[job->dtype], inner = job->place.nd - 1;
    uint64_t total = 0, step = (uint64_t)job->place.stride[inner];
    while (n > 0) {
        int64_t run = job->place.size[inner] - at[inner];
        if (run > n) run = n;
        total += fingerprint_run(item, x, run, left + (n - run) * item, (uint64_t)place, step);
        place += advance(&job->place, at, run);
        x += run * item;
        n -= run;
    }
    return total;
}

#define COPY(TYPE) \
    for (int64_t i = 0; i < n; i++) ((TYPE *)to)[i] = *(const TYPE *)(from + i * stride)

typedef struct {
    uint64_t a, b;
} Pair;

static void copy_run(char *to, const char *from, int64_t n, int64_t stride, int item) {
    if (stride == item) {
        memcpy(to, from, (size_t)(n * item));
        return;
    }
    switch (item) {
    case 1: COPY(uint8_t); break;
    case 2: COPY(uint16_t); break;
    case 4: COPY(uint32_t); break;
    case 8: COPY(uint64_t); break;
    default: COPY(Pair); break;
    }
}

/* The chunk where it stands when it is contiguous, a gathered copy of it otherwise. */
static const char *chunk_at(const Job *job, int64_t start, int64_t n, char *buffer) {
    const Dims *dims = &job->memory;
    int64_t at[MAX_DIMS], inner = dims->nd - 1, item = item_size[job->dtype];
    const char *from = job->data + locate(dims, start, at);
    if (n == 1 || (dims->stride[inner] == item && at[inner] + n <= dims->size[inner])) return from;
    char *to = buffer;
    while (n > 0) {
        int64_t run = dims->size[inner] - at[inner];
        if (run > n) run = n;
        copy_run(to, from, run, dims->stride[inner], (int)item);
        from += advance(dims, at, run);
        to += run * item;
        n -= run;
    }
    return buffer;
}

static void reduce_chunk(const Job *job, int64_t start, int64_t n, Part *p) {
    uint64_t buffer[CHUNK * 2];
    const char *x = chunk_at(job, start, n, (char *)buffer);
    int64_t left = x == (const char *)buffer || job->memory.nd > 1 ? 0 : (job->n - start - n) * item_size[job->dtype];
    part_clear(p);
    if (job->flags & CHECKSUM) p->checksum = checksum_chunk(job, x, start, n, left);
    if (job->flags & STATS) stats_chunk(job, x, n, job->flags & CHECKSUM ? 0 : left, p);
}

void reduce_block(const Job *job, int64_t block, Part *out) {
    int64_t start = block * BLOCK * CHUNK, end = start + BLOCK * CHUNK;
    if (end > job->n) end = job->n;
    Part part;
    reduce_chunk(job, start, end - start < CHUNK ? end - start : CHUNK, out);
    for (start += CHUNK; start < end; start += CHUNK) {
        int64_t n = end - start < CHUNK ? end - start : CHUNK;
        reduce_chunk(job, start, n, &part);
        part_merge(out, &part, job->flags);
    }
}

static void part_finish(const Part *p, const Job *job, double *row) {
    double k = job->repeat, sum = isfinite(p->s) ? p->s + p->c : p->s;
    if (job->dtype == D_I64 || job->dtype == D_U64) sum = (double)(p->integer_sum * job->repeats);
    else sum *= k;
    for (int i = 0; i < COLUMNS; i++) row[i] = p->asked[i] * k;
    row[AT_count] = (double)job->n * k;
    row[AT_nan] = p->nan * k, row[AT_posinf] = p->posinf * k, row[AT_neginf] = p->neginf * k,
    row[AT_zero] = p->zero * k;
    /* + 0.0: a minimum or maximum of zero has no sign, because which of the two zeros came first is no property of a
     * set */
    row[AT_min] = p->min + 0.0, row[AT_max] = p->max + 0.0;
    row[AT_sum] = sum, row[AT_sumsq] = (p->q + p->qc) * k, row[AT_exponent] = p->exponent;
    for (int i = 0; i < COLUMNS; i++)
        if (computed_with[i] & ~job->flags) row[i] = NAN; /* nobody asked for it: unknown */
}

/* ---- a whole tensor, by one thread or several -------------------------------------------------------------------- */

static void reduce_alone(const Job *job, Part *out) {
    int64_t blocks = (job->n + BLOCK * CHUNK - 1) / (BLOCK * CHUNK);
    Part part;
    reduce_block(job, 0, out);
    for (int64_t block = 1; block < blocks; block++) {
        reduce_block(job, block, &part);
        part_merge(out, &part, job->flags);
    }
}

static int reduce_together(const Job *job, Part *out) {
    int64_t blocks = (job->n + BLOCK * CHUNK - 1) / (BLOCK * CHUNK);
    Part *parts = malloc((size_t)blocks * sizeof *parts);
    if (!parts) return 0;
    int ran = pool_run(job, blocks, parts);
    if (ran) {
        *out = parts[0];
        for (int64_t block = 1; block < blocks; block++) part_merge(out, &parts[block], job->flags);
    }
    free(parts);
    return ran;
}

static void reduce(const Job *job, Part *out) {
    if (job->n == 0) {
        part_clear(out);
        return;
    }
#if defined(__SSE__)
    unsigned int control =
        _mm_getcsr(); /* flushing of subnormals, which torch can switch on, would change the numbers */
    if (control & 0x8040) _mm_setcsr(control & ~0x8040u);
#endif
    if (job->n * item_size[job->dtype] < TOGETHER || pool_size() < 2 || !reduce_together(job, out))
        reduce_alone(job, out);
#if defined(__SSE__)
    if (control & 0x8040) _mm_setcsr(control);
#endif
}

/* ---- the rows of a step ------------------------------------------------------------------------------------------ */

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
