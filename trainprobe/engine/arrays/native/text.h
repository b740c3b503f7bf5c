/* Text that grows, and what JSON text is made of. */
#ifndef TRAINPROBE_TEXT_H
#define TRAINPROBE_TEXT_H

#include <string.h>

#include "objects.h"

#define DEEPEST 900

typedef struct {
    char *data;
    size_t size, room;
} Text;

static inline int make_room(Text *t, size_t more) {
    if (t->size + more <= t->room) return 0;
    size_t room = (t->size + more) * 2 + 4096;
    char *data = PyMem_Realloc(t->data, room);
    if (!data) return PyErr_NoMemory(), -1;
    t->data = data, t->room = room;
    return 0;
}

static inline int put(Text *t, const char *data, size_t size) {
    if (make_room(t, size)) return -1;
    memcpy(t->data + t->size, data, size);
    t->size += size;
    return 0;
}

#define PUT(t, literal) put(t, literal, sizeof(literal) - 1)

static inline int put_number(Text *t, long long x) {
    char digits[24];
    int at = 24;
    unsigned long long rest = x < 0 ? 0ull - (unsigned long long)x : (unsigned long long)x;
    do digits[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (x < 0) digits[--at] = '-';
    return put(t, digits + at, (size_t)(24 - at));
}

/* The UTF-8 of a str as it is; -1 with an exception set where it has none. */
static inline int put_str(Text *t, PyObject *x) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(x, &size);
    return data ? put(t, data, (size_t)size) : -1;
}

static inline int put_str_and_drop(Text *t, PyObject *x) {
    if (!x) return -1;
    int failed = put_str(t, x);
    Py_DECREF(x);
    return failed;
}

/* A finite float as Python's repr has it; 1 where it is not finite. */
static inline int put_float(Text *t, PyObject *x) {
    double number = PyFloat_AsDouble(x);
    if (number - number != 0) return 1;
    char *digits = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (!digits) return -1;
    int failed = put(t, digits, strlen(digits));
    PyMem_Free(digits);
    return failed;
}

static inline int put_quoted(Text *t, PyObject *x, PyObject *quote) {
    Py_ssize_t size = 0;
    const char *data = PyUnicode_Check(x) ? PyUnicode_AsUTF8AndSize(x, &size) : NULL;
    if (!data) PyErr_Clear();
    int plain = data != NULL;
    for (Py_ssize_t i = 0; plain && i < size; i++) plain = (unsigned char)data[i] >= 32 && data[i] != '"' && data[i] != '\\';
    if (!plain) return put_str_and_drop(t, PyObject_CallFunctionObjArgs(quote, x, NULL));
    return PUT(t, "\"") || put(t, data, (size_t)size) || PUT(t, "\"") ? -1 : 0;
}

static inline PyObject *bytes_of(Text *t) {
    PyObject *bytes = PyBytes_FromStringAndSize(t->data ? t->data : "", (Py_ssize_t)t->size);
    PyMem_Free(t->data);
    t->data = NULL, t->size = t->room = 0;
    return bytes;
}

static inline int is_text(PyObject *x, const char *text) { return x && PyUnicode_CompareWithASCIIString(x, text) == 0; }

#endif
