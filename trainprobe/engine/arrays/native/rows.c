/* One tensor to one row: the order of enumeration, the chunks, the merging of their partials. */
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
const char *chunk_at(const Job *job, int64_t start, int64_t n, char *buffer) {
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

void part_finish(const Part *p, const Job *job, double *row) {
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

void reduce(const Job *job, Part *out) {
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
