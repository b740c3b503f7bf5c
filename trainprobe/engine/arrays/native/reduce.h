/* What the parts of the extension share: the partials of a run of elements, and the kernels of one instruction set.

   A tensor is enumerated in chunks of CHUNK elements, which fit the first-level cache, so that several sweeps over a
   chunk are one pass over memory. BLOCK chunks make a block, the unit of work of a thread. Chunks merge in order inside
   a block and blocks in order inside a tensor: the numbers do not depend on how many threads there are. */
#ifndef TRAINPROBE_REDUCE_H
#define TRAINPROBE_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#define CHUNK 4096
#define BLOCK 16
#define MAX_DIMS 64
#define ALONE (64 * 1024) /* bytes above which other Python threads may run meanwhile */

/* Memory is asked for before its turn: far ahead into the second cache, near into the first. In bytes; reading past the
   caches becomes 1.2 to 1.8 times as fast. */
#define NEAR 1024
#define FAR 8192

/* COLUMNS of a row, where each is (AT_m2), what it is computed with, and the flags of what is wanted of a tensor
   (STATS, CHECKSUM, STD, CRC32, SUBNORMAL) come from engine/core/row_schema.py: setup.py defines them. */
#ifndef COLUMNS
#error "build with setup.py, which defines the layout of a row"
#endif

enum {
    D_BOOL,
    D_U8,
    D_I8,
    D_U16,
    D_I16,
    D_U32,
    D_I32,
    D_U64,
    D_I64,
    D_F16,
    D_BF16,
    D_F32,
    D_F64,
    D_C32,
    D_C64,
    D_C128,
    D_E4M3FN,
    D_E5M2,
    D_E4M3FNUZ,
    D_E5M2FNUZ,
    D_E8M0FNU,
    DTYPES
};

typedef __int128 int128;

/* sum is s + c, sum of squares (q + qc) * 4^exponent; integer_sum is exact and used for 64-bit integers. asked: the
   sums that a flag asks for, by their columns (see sweeps.h). */
typedef struct {
    double count, nan, posinf, neginf, zero, min, max, s, c, q, qc, asked[COLUMNS];
    int128 integer_sum;
    uint64_t checksum;
    int exponent;
} Part;

/* The elements in the order of enumeration: sizes, strides in bytes, and strides of the logical (row-major) place. */
typedef struct {
    int nd;
    int64_t size[MAX_DIMS], stride[MAX_DIMS];
} Dims;

typedef struct {
    const char *data;
    Dims memory;   /* strides in bytes */
    Dims place;    /* strides in logical places */
    int64_t n;     /* elements that are enumerated */
    int64_t first; /* place of the first element: not 0 for a part of a larger tensor */
    double repeat; /* how often each stands in the tensor (expanded dimensions, where their places do not matter) */
    int64_t repeats;
    int dtype, flags;
} Job;

/* The sweeps over a chunk. n <= CHUNK; left: bytes that follow in memory and are read next. One table an instruction
   set; all give the same bits. */
typedef struct {
    void (*stats_f32)(const float *x, int64_t n, int64_t left,
                      Part *p); /* min, max, zero, s, q; q is not finite if any x is not */
    void (*stats_f64)(const double *x, int64_t n, double scale, int64_t *bad, Part *p);
    void (*clean_f32)(const float *x, float *out, int64_t n, Part *p); /* non-finite to 0, counted */
    void (*clean_f64)(const double *x, double *out, int64_t n, Part *p);
    void (*asked_f32)(const float *x, int64_t n, double mean, double tiny, int flags,
                      Part *p); /* all x finite, others 0 and counted */
    void (*asked_f64)(const double *x, int64_t n, double mean, double tiny, int flags, Part *p);
    uint64_t (*products)(const uint32_t *x, int64_t n, const uint32_t *low, const uint32_t *high, uint64_t key);
    uint64_t (*row_products)(const uint32_t *x, int64_t rows, int64_t left, uint64_t row);
    void (*keys)(uint64_t place, uint64_t step, int64_t n, uint32_t *low, uint32_t *high);
    void (*to_words[3])(const void *x, uint32_t *out, int64_t n); /* elements of 1 and 2 bytes */
    void (*to_f32[DTYPES])(const void *x, float *out, int64_t n); /* where float32 holds the dtype exactly */
    void (*to_f64[DTYPES])(const void *x, double *out, int64_t n);
    int128 (*sum_i64)(const int64_t *x, int64_t n);
    int128 (*sum_u64)(const uint64_t *x, int64_t n);
    const char *name;
} Kernels;

extern Kernels kernels;
extern float float8_table[5][256];
extern const int item_size[DTYPES];
extern const double smallest_normal[DTYPES];

void kernels_init(void);
int kernels_select(const char *name); /* 0 when this machine has that instruction set */

void layout(Job *job, int nd, const int64_t *shape, const int64_t *strides);
/* The same for a rectangle of a tensor of shape `whole` that begins at `offset`: places are those in the whole. */
void layout_within(Job *job, int nd, const int64_t *shape, const int64_t *strides, const int64_t *whole,
                   const int64_t *offset);
double finite_count(const Part *p);
const char *element_at(const Job *job, int64_t index); /* of the enumeration */
void reduce(const Job *job, Part *out);                /* a whole tensor, by one thread or several */
void part_finish(const Part *p, const Job *job, double *row);
const char *chunk_at(const Job *job, int64_t start, int64_t n, char *buffer);
void reduce_block(const Job *job, int64_t block, Part *out);

/* K of engine/stats/checksum.py. */
#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)
static inline uint64_t hashed(uint64_t n) {
    uint64_t x = (n + 1) * GOLDEN;
    x = (x ^ x >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    x = (x ^ x >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    return x ^ x >> 32;
}
#define ROW 256                              /* words whose keys stand in a row */
extern uint32_t key_low[ROW], key_high[ROW]; /* halves of hashed(0) to hashed(255) */
void fingerprint_init(void);
uint64_t fingerprint_run(int item, const char *x, int64_t n, int64_t left, uint64_t place, uint64_t step);

int pool_run(const Job *job, int64_t blocks, Part *parts); /* 0 when the pool was busy or absent: nothing was done */
void pool_threads(int n);
int pool_size(void);
void pool_init(void);

#endif
