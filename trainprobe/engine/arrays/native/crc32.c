/* CRC-32 as zlib computes it (reflected polynomial 0xEDB88320), sixteen bytes a step, and the joining of two of them.
   Joining multiplies by x^(8n) modulo the polynomial, as M. Adler's zlib does since version 1.2.12. */
#include <string.h>

#include "reduce.h"

#define POLY 0xEDB88320u
#define SLICES 16

static uint32_t table[SLICES][256];
static uint32_t powers[64]; /* x^(2^k) */

static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t m = UINT32_C(1) << 31; m; m >>= 1) {
        if (a & m) product ^= b;
        b = b & 1 ? (b >> 1) ^ POLY : b >> 1;
    }
    return product;
}

void crc32_init(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ POLY : c >> 1;
        table[0][i] = c;
    }
    for (int s = 1; s < SLICES; s++)
        for (int i = 0; i < 256; i++) table[s][i] = (table[s - 1][i] >> 8) ^ table[0][table[s - 1][i] & 0xff];
    powers[0] = UINT32_C(1) << 30;
    for (int k = 1; k < 64; k++) powers[k] = multiply(powers[k - 1], powers[k - 1]);
}

uint32_t crc32_bytes(uint32_t crc, const void *data, size_t n) {
    const unsigned char *p = data;
    uint32_t c = ~crc;
    for (; n >= SLICES; n -= SLICES, p += SLICES) {
        uint32_t next = 0;
        unsigned char head[4] = {(unsigned char)(p[0] ^ c), (unsigned char)(p[1] ^ (c >> 8)),
                                 (unsigned char)(p[2] ^ (c >> 16)), (unsigned char)(p[3] ^ (c >> 24))};
        for (int k = 0; k < 4; k++) next ^= table[15 - k][head[k]];
        for (int k = 4; k < SLICES; k++) next ^= table[15 - k][p[k]];
        c = next;
    }
    while (n--) c = (c >> 8) ^ table[0][(c ^ *p++) & 0xff];
    return ~c;
}

uint32_t crc32_join(uint32_t a, uint32_t b, uint64_t bytes_of_b) {
    uint32_t shift = UINT32_C(1) << 31; /* x^0 */
    uint64_t n = bytes_of_b;
    for (int k = 3; n; k++, n >>= 1)
        if (n & 1) shift = multiply(powers[k & 63], shift);
    return multiply(shift, a) ^ b;
}
