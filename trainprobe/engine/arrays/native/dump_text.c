/* Reads the text of a dump. It is JSON; what comes out is what a JSON parser gives, but that most tensors are Values by then and
   their numbers stand in columns. Whatever is rare is left to the Python that calls this: nothing here raises but for lack of memory. */
#include <math.h>
#include <string.h>

#include "objects.h"

enum { NUMBERS = 4, DEEPEST = 450, PLACES = 1024, LONGEST_KEY = 32 };

static const char *const number_names[NUMBERS] = {"Max", "Min", "Mean", "Norm"};

typedef struct {
    const char *text;
    size_t length;
    PyObject *object;
} Place; /* of a text that was met before, and what it became */

typedef struct {
    const char *p;
    PyObject *describe, *loads; /* see _native.pyi */
    PyObject *values;
    double *numbers;
    uint64_t *checksums;
    char *has_checksum;
    size_t rows, room;
    Place keys[PLACES], likes[PLACES];
} Text;

static PyObject *read_value(Text *t, int depth); /* NULL without an exception: this is left to others */

static void skip_space(Text *t) {
    while (*t->p == ' ' || *t->p == '\n' || *t->p == '\r' || *t->p == '\t') t->p++;
}

static int take(Text *t, char c) { /* the character behind any space */
    skip_space(t);
    if (*t->p != c) return 0;
    t->p++;
    return 1;
}

static int take_word(Text *t, const char *word) {
    size_t n = strlen(word);
    if (strncmp(t->p, word, n)) return 0;
    t->p += n;
    return 1;
}

/* What stands between quotes, where nothing in it is escaped. */
static int take_plain_text(Text *t, const char **text, size_t *length) {
    const char *start = t->p + 1, *p = start;
    if (*t->p != '"') return 0;
    while (*p != '"') {
        if ((unsigned char)*p < 0x20 || *p == '\\') return 0;
        p++;
    }
    *text = start, *length = (size_t)(p - start);
    t->p = p + 1;
    return 1;
}

static Place *place_of(Place *places, const char *text, size_t length) {
    uint64_t hash = length;
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
        uint64_t word;
        memcpy(&word, text + i, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    for (; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 0x9E3779B97F4A7C15u;
    return places + (hash >> 40) % PLACES;
}

static int is_known(const Place *place, const char *text, size_t length) {
    return place->object && place->length == length && !memcmp(place->text, text, length);
}

static void know(Place *place, const char *text, size_t length, PyObject *object) {
    Py_XDECREF(place->object);
    Py_INCREF(object);
    place->text = text, place->length = length, place->object = object;
}

typedef struct {
    uint64_t value;
    size_t count, behind; /* of digits without leading zeros, and of those behind the point */
} Digits;

static void take_digits(const char **p, Digits *digits, size_t behind) {
    for (; **p >= '0' && **p <= '9'; ++*p) {
        digits->value = digits->value * 10 + (uint64_t)(**p - '0');
        digits->count += digits->count || **p != '0';
        digits->behind += behind;
    }
}

/* The double nearest to a quotient of whole numbers, which decides: exact, where the number has few digits. */
static int nearest(const Digits *digits, double *number) {
#ifdef __SIZEOF_INT128__
    enum { MOST_DIGITS = 19, MOST_POWERS = 27 }; /* 10^19 and 5^27 have at most 64 bits */
    if (digits->count > MOST_DIGITS || digits->behind > MOST_POWERS) return 0;
    if (!digits->value || !digits->behind) return *number = (double)digits->value, 1;
    uint64_t fives = 1;
    for (size_t i = 0; i < digits->behind; i++) fives *= 5;
    int of_value = __builtin_clzll(digits->value), of_fives = __builtin_clzll(fives);
    unsigned __int128 upper = (unsigned __int128)(digits->value << of_value) << 63;
    fives <<= of_fives;
    uint64_t quotient = (uint64_t)(upper / fives); /* of 63 or 64 bits, of which a double keeps 53 */
    quotient |= quotient * (unsigned __int128)fives != upper;
    return *number = ldexp((double)quotient, of_fives - of_value - 63 - (int)digits->behind), 1;
#else
    (void)digits, (void)number;
    return 0;
#endif
}

/* A number as JSON writes it, or NaN and infinities as Python does. whole: whether it has neither a point nor an exponent. */
static int take_number(Text *t, double *number, int *whole, size_t *digits) {
    const char *start = t->p, *p = start;
    int negative = *p == '-';
    *whole = 0, *digits = 0;
    if (take_word(t, "NaN")) return *number = NAN, 1;
    p += negative;
    if (*p == 'I') {
        t->p = p;
        if (take_word(t, "Infinity")) return *number = negative ? -INFINITY : INFINITY, 1;
        return t->p = start, 0;
    }
    const char *first = p;
    Digits all = {0, 0, 0};
    take_digits(&p, &all, 0);
    *digits = (size_t)(p - first);
    if (!*digits || (*first == '0' && *digits > 1)) return 0;
    *whole = 1;
    if (*p == '.') {
        const char *fraction = ++p;
        take_digits(&p, &all, 1);
        if (p == fraction) return 0;
        *whole = 0;
    }
    if (*p != 'e' && *p != 'E' && nearest(&all, number)) {
        *number = negative ? -*number : *number;
        return t->p = p, 1;
    }
    if (*p == 'e' || *p == 'E') {
        p++;
        if (*p == '+' || *p == '-') p++;
        const char *power = p;
        while (*p >= '0' && *p <= '9') p++;
        if (p == power) return 0;
        *whole = 0;
    }
    char *end;
    *number = PyOS_string_to_double(start, &end, NULL);
    if (PyErr_Occurred() || end != p || !isfinite(*number)) return 0;
    t->p = p;
    return 1;
}

static int make_room(Text *t) {
    if (t->rows < t->room) return 1;
    size_t room = t->room ? 2 * t->room : 1024;
    double *numbers = realloc(t->numbers, room * NUMBERS * sizeof *numbers);
    if (numbers) t->numbers = numbers;
    uint64_t *checksums = realloc(t->checksums, room * sizeof *checksums);
    if (checksums) t->checksums = checksums;
    char *has = realloc(t->has_checksum, room);
    if (has) t->has_checksum = has;
    if (!numbers || !checksums || !has) return PyErr_NoMemory(), 0;
    t->room = room;
    return 1;
}

/* The Value that a leaf with this type, dtype and shape is like, borrowed; NULL where the describing Python knows none. */
static PyObject *like_of(Text *t, const char *about, size_t length) {
    Place *place = place_of(t->likes, about, length);
    if (is_known(place, about, length)) return place->object == Py_None ? NULL : place->object;
    PyObject *text = PyBytes_FromStringAndSize(about, (Py_ssize_t)length), *like = text ? call_one(t->describe, text) : NULL;
    Py_XDECREF(text);
    if (!like) return NULL;
    know(place, about, length, like);
    Py_DECREF(like);
    return like == Py_None || Py_TYPE(like) != value_type ? NULL : like;
}

static int take_checksum(Text *t, uint64_t *checksum) {
    const char *text;
    size_t length;
    if (!take_plain_text(t, &text, &length)) return 0;
    if (length > 2 && text[0] == '0' && text[1] == 'x') text += 2, length -= 2;
    if (!length || length > 16) return 0;
    *checksum = 0;
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return 0;
        *checksum = *checksum << 4 | (uint64_t)digit;
    }
    return 1;
}

static int take_about(Text *t) { /* {"type": …, "dtype": …, "shape": […] */
    static const char *const names[] = {"type", "dtype", "shape"};
    const char *text;
    size_t length;
    for (int i = 0; i < 3; i++) {
        if (!take(t, i ? ',' : '{')) return 0;
        skip_space(t);
        if (!take_plain_text(t, &text, &length) || length != strlen(names[i]) || memcmp(text, names[i], length) || !take(t, ':')) return 0;
        skip_space(t);
        if (i < 2 && !take_plain_text(t, &text, &length)) return 0;
    }
    if (*t->p != '[') return 0;
    while (*t->p != ']') {
        if (!*t->p || *t->p == '"' || *t->p == '{') return 0;
        t->p++;
    }
    t->p++;
    return 1;
}

/* A tensor of which nothing is told but type, dtype, shape, the four numbers, requires_grad and perhaps a checksum; else NULL. */
static PyObject *read_tensor(Text *t) {
    enum { ALL_NUMBERS = (1 << NUMBERS) - 1, HAS_GRAD = 1 << NUMBERS, HAS_CHECKSUM = HAS_GRAD << 1 };
    const char *start = t->p, *text;
    size_t length, digits;
    double numbers[NUMBERS];
    uint64_t checksum = 0;
    int found = 0, whole, grad = 0;
    if (!take_about(t)) return NULL;
    size_t about = (size_t)(t->p - start);
    while (!take(t, '}')) {
        if (!take(t, ',')) return NULL;
        skip_space(t);
        if (!take_plain_text(t, &text, &length) || !take(t, ':')) return NULL;
        skip_space(t);
        int bit = 0;
        for (int i = 0; i < NUMBERS && !bit; i++)
            if (length == strlen(number_names[i]) && !memcmp(text, number_names[i], length)) {
                bit = 1 << i;
                if (!take_number(t, numbers + i, &whole, &digits)) return NULL;
            }
        if (!bit && length == 13 && !memcmp(text, "requires_grad", 13)) {
            bit = HAS_GRAD;
            grad = take_word(t, "true");
            if (!grad && !take_word(t, "false")) return NULL;
        } else if (!bit && length == 8 && !memcmp(text, "checksum", 8)) {
            bit = HAS_CHECKSUM;
            if (!take_checksum(t, &checksum)) return NULL;
        }
        if (!bit || found & bit) return NULL;
        found |= bit;
    }
    if ((found | HAS_CHECKSUM) != (ALL_NUMBERS | HAS_GRAD | HAS_CHECKSUM)) return NULL;
    PyObject *like = like_of(t, start, about);
    if (!like || !make_room(t)) return NULL;
    Value *value = (Value *)value_with_note((Value *)like, NULL);
    if (!value) return NULL;
    value->row = (Py_ssize_t)t->rows;
    value->requires_grad = Py_NewRef(grad ? Py_True : Py_False);
    if (PyList_Append(t->values, (PyObject *)value)) return Py_DECREF((PyObject *)value), NULL;
    memcpy(t->numbers + t->rows * NUMBERS, numbers, sizeof numbers);
    t->checksums[t->rows] = checksum;
    t->has_checksum[t->rows++] = (found & HAS_CHECKSUM) != 0;
    return (PyObject *)value;
}

static PyObject *read_text(Text *t) {
    const char *start = t->p, *text;
    size_t length;
    if (take_plain_text(t, &text, &length)) return PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, NULL);
    const char *p = start + 1;
    while (*p != '"') {
        if (!*p || (*p == '\\' && !*++p)) return NULL;
        p++;
    }
    t->p = p + 1;
    PyObject *escaped = PyBytes_FromStringAndSize(start, t->p - start), *read = escaped ? call_one(t->loads, escaped) : NULL;
    Py_XDECREF(escaped);
    return read;
}

static PyObject *read_key(Text *t) { /* a new reference */
    const char *start = t->p, *text;
    size_t length;
    if (*t->p != '"') return NULL;
    if (!take_plain_text(t, &text, &length) || length > LONGEST_KEY) return t->p = start, read_text(t);
    Place *place = place_of(t->keys, text, length);
    if (is_known(place, text, length)) return Py_NewRef(place->object);
    PyObject *key = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, NULL);
    if (key) know(place, text, length, key);
    return key;
}

static PyObject *read_object(Text *t, int depth) {
    PyObject *made = PyDict_New();
    t->p++;
    for (int first = 1; made; first = 0) {
        if (take(t, '}')) {
            if (first) return made;
            break; /* behind a comma */
        }
        PyObject *key = read_key(t), *value = key && take(t, ':') ? read_value(t, depth + 1) : NULL;
        int failed = !value || PyDict_SetItem(made, key, value);
        Py_XDECREF(key), Py_XDECREF(value);
        if (failed) break;
        if (take(t, '}')) return made;
        if (!take(t, ',')) break;
        skip_space(t);
    }
    Py_XDECREF(made);
    return NULL;
}

static PyObject *read_list(Text *t, int depth) {
    PyObject *made = PyList_New(0);
    t->p++;
    if (made && take(t, ']')) return made;
    while (made) {
        PyObject *value = read_value(t, depth + 1);
        int failed = !value || PyList_Append(made, value);
        Py_XDECREF(value);
        if (failed) break;
        if (take(t, ']')) return made;
        if (!take(t, ',')) break;
    }
    Py_XDECREF(made);
    return NULL;
}

static PyObject *read_value(Text *t, int depth) {
    double number;
    int whole;
    size_t digits;
    if (depth > DEEPEST) return NULL;
    skip_space(t);
    const char *start = t->p;
    switch (*start) {
    case '{': {
        size_t rows = t->rows;
        PyObject *tensor = read_tensor(t);
        if (tensor || PyErr_Occurred() || t->rows != rows) return tensor;
        t->p = start;
        return read_object(t, depth);
    }
    case '[': return read_list(t, depth);
    case '"': return read_text(t);
    case 't': return take_word(t, "true") ? Py_NewRef(Py_True) : NULL;
    case 'f': return take_word(t, "false") ? Py_NewRef(Py_False) : NULL;
    case 'n': return take_word(t, "null") ? Py_NewRef(Py_None) : NULL;
    }
    if (!take_number(t, &number, &whole, &digits)) return NULL;
    if (!whole) return PyFloat_FromDouble(number);
    return digits > 18 ? NULL : PyLong_FromLongLong(strtoll(start, NULL, 10));
}

static PyObject *column(const void *data, size_t size) { return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size); }

static PyObject *read_dump(PyObject *self, PyObject *args) {
    PyObject *content, *describe, *loads, *found = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "SOO", &content, &describe, &loads)) return NULL;
    Text *t = PyMem_Calloc(1, sizeof *t);
    if (!t) return PyErr_NoMemory();
    t->p = PyBytes_AsString(content); /* ends with a zero, which is no part of any JSON */
    t->describe = describe, t->loads = loads, t->values = PyList_New(0);
    const char *end = t->p + PyBytes_Size(content);
    PyObject *top = t->values ? read_value(t, 0) : NULL;
    if (top) skip_space(t);
    if (top && t->p == end)
        found = Py_BuildValue("OONNN", top, t->values, column(t->numbers, t->rows * NUMBERS * sizeof *t->numbers),
                              column(t->checksums, t->rows * sizeof *t->checksums), column(t->has_checksum, t->rows));
    for (int i = 0; i < PLACES; i++) Py_XDECREF(t->keys[i].object), Py_XDECREF(t->likes[i].object);
    Py_XDECREF(top), Py_XDECREF(t->values);
    free(t->numbers), free(t->checksums), free(t->has_checksum);
    PyMem_Free(t);
    if (found || (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError))) return found;
    PyErr_Clear(); /* whoever reads it next says what is wrong with it */
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_dump", read_dump, METH_VARARGS,
     "read_dump(content, describe, loads) -> (document, values, numbers, checksums, has_checksum), or None: see _native.pyi."},
    {NULL, NULL, 0, NULL}};

int dump_text_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
