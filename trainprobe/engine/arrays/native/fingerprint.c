/* The fingerprint of engine/stats/checksum.py. The keys of 256 consecutive words are a table with one key on top of it,
   so that a row of them costs one pass over memory; words whose places are apart have their keys worked out one by one.
 */
#include "reduce.h"

#define ROWS 16 /* at once */

uint32_t key_low[ROW] __attribute__((aligned(64))),
    key_high[ROW] __attribute__((aligned(64))); /* a vector of them lies in one line of the cache */

void fingerprint_init(void) {
    for (uint64_t i = 0; i < ROW; i++) key_low[i] = (uint32_t)hashed(i), key_high[i] = (uint32_t)(hashed(i) >> 32);
}

/* Elements of 1 and 2 bytes are widened, larger ones are words already. */
static const uint32_t *words_of(int item, const char *x, int64_t n, uint32_t *buffer) {
    if (item >= 4) return (const uint32_t *)(const void *)x;
    kernels.to_words[item](x, buffer, n);
    return buffer;
}

static uint64_t consecutive(int item, const char *x, int64_t n, int64_t left, uint64_t place) {
    uint32_t buffer[ROWS * ROW];
    uint64_t total = 0;
    while (n > 0) {
        int64_t column = (int64_t)(place % ROW), run = ROW - column < n ? ROW - column : n;
        int64_t rows = run == ROW ? (n / ROW < ROWS ? n / ROW : ROWS) : 0;
        if (rows) run = rows * ROW;
        const uint32_t *words = words_of(item, x, run, buffer);
        total += rows ? kernels.row_products(words, rows, item < 4 ? 0 : left + (n - run) * 4, place / ROW)
                      : kernels.products(words, run, key_low + column, key_high + column, hashed(ROW + place / ROW));
        x += run * (item < 4 ? item : 4);
        place += (uint64_t)run, n -= run;
    }
    return total;
}

/* The elements of up to four bytes at places that are `step` apart. */
static uint64_t apart(int item, const char *x, int64_t n, uint64_t place, uint64_t step) {
    uint32_t buffer[ROW], low[ROW], high[ROW];
    uint64_t total = 0;
    while (n > 0) {
        int64_t run = n < ROW ? n : ROW;
        kernels.keys(place, step, run, low, high);
        total += kernels.products(words_of(item, x, run, buffer), run, low, high, 0);
        x += run * item;
        place += (uint64_t)run * step, n -= run;
    }
    return total;
}

/* The share of contiguous elements. `place` is that of the first in the tensor, `step` from one to the next. */
uint64_t fingerprint_run(int item, const char *x, int64_t n, int64_t left, uint64_t place, uint64_t step) {
    uint64_t each = item > 4 ? (uint64_t)item / 4 : 1, total = (uint64_t)n * each * GOLDEN;
    if (step == 1 || n == 1) return total + consecutive(item, x, n * (int64_t)each, left, place * each);
    if (each == 1) return total + apart(item, x, n, place, step);
    for (int64_t i = 0; i < n; i++)
        total += consecutive(item, x + i * item, (int64_t)each, 0, (place + (uint64_t)i * step) * each);
    return total;
}
