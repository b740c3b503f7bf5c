/* Reads the text of a dump, piece by piece. It is JSON; what comes out is what a JSON parser gives, but that most
   tensors are Values by then, or packed lists of them, and their numbers stand in columns. Whatever is rare is left to
   the Python that calls this: nothing here raises but for lack of memory. */
#include <math.h>
#include <string.h>

#include "objects.h"

enum { NUMBERS = 4, DEEPEST = 450, PLACES = 1024, LONGEST_KEY = 32, LONGEST_PACK = 32, PIECE = 1 << 20 };

static const char *const number_names[NUMBERS] = {"Max", "Min", "Mean", "Norm"};

typedef struct {
    PyObject *text; /* bytes */
    PyObject *object;
} Place; /* of a text that was met before, and what it became */

typedef struct {
    const char *p;
    char *piece; /* of the file, which ends with a zero */
    size_t length, moves;
    int is_last, in_data;
    PyObject *read, *describe, *loads, *entry; /* see _native.pyi */
    double *numbers;
    uint64_t *checksums;
    char *has_checksum;
    size_t rows, room;
    Place keys[PLACES], likes[2][PLACES]; /* likes: of tensors that require no gradient, and of those that do */
} Text;

/* A list of Values with consecutive rows, each of which is like another one but for its row. */
typedef struct {
    PyObject_VAR_HEAD Py_ssize_t first;
    PyObject *likes[];
} Packed;

PyTypeObject *packed_type;

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
    return place->object && (size_t)PyBytes_Size(place->text) == length &&
           !memcmp(PyBytes_AsString(place->text), text, length);
}

static int know(Place *place, PyObject *text, PyObject *object) {
    Py_XDECREF(place->text), Py_XDECREF(place->object);
    place->text = text ? Py_NewRef(text) : NULL, place->object = text ? Py_NewRef(object) : NULL;
    return text != NULL;
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

/* A number as JSON writes it, or NaN and infinities as Python does. whole: whether it has neither a point nor an
 * exponent. */
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

/* The Value that a leaf with this type, dtype and shape is like, borrowed; NULL where the describing Python knows none.
 */
static PyObject *like_of(Text *t, const char *about, size_t length, int grad) {
    Place *place = place_of(t->likes[grad], about, length);
    if (!is_known(place, about, length)) {
        PyObject *text = PyBytes_FromStringAndSize(about, (Py_ssize_t)length),
                 *like = text ? call_one(t->describe, text) : NULL;
        int known = like && know(place, text, like);
        Py_XDECREF(text), Py_XDECREF(like);
        if (!known) return NULL;
        if (Py_TYPE(like) == value_type) ((Value *)like)->requires_grad = Py_NewRef(grad ? Py_True : Py_False);
    }
    return Py_TYPE(place->object) == value_type ? place->object : NULL;
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
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
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
        if (!take_plain_text(t, &text, &length) || length != strlen(names[i]) || memcmp(text, names[i], length) ||
            !take(t, ':'))
            return 0;
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

/* A tensor of which nothing is told but type, dtype, shape, the four numbers, requires_grad and perhaps a checksum,
   whose numbers are the last row then: the Value that it is like, borrowed; else NULL. */
static PyObject *take_tensor(Text *t) {
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
    PyObject *like = like_of(t, start, about, grad);
    if (!like || !make_room(t)) return NULL;
    memcpy(t->numbers + t->rows * NUMBERS, numbers, sizeof numbers);
    t->checksums[t->rows] = checksum;
    t->has_checksum[t->rows++] = (found & HAS_CHECKSUM) != 0;
    return like;
}

static PyObject *value_like(PyObject *like, Py_ssize_t row) {
    Value *value = (Value *)value_with_note((Value *)like, NULL);
    if (!value) return NULL;
    value->requires_grad = Py_XNewRef(((Value *)like)->requires_grad);
    value->row = row;
    return (PyObject *)value;
}

PyObject *packed_list(PyObject *packed) {
    Packed *self = (Packed *)packed;
    Py_ssize_t n = Py_SIZE(self);
    PyObject *made = PyList_New(n);
    for (Py_ssize_t i = 0; made && i < n; i++) {
        PyObject *value = value_like(self->likes[i], self->first + i);
        if (!value || PyList_SetItem(made, i, value)) Py_CLEAR(made);
    }
    return made;
}

static PyObject *packed_to_list(PyObject *self, PyObject *nothing) {
    (void)nothing;
    return packed_list(self);
}

static void packed_free(Packed *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_DECREF(self->likes[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* A list of tensors and nothing else; NULL without an exception, with the text where it was, where it is another. */
static PyObject *read_packed(Text *t) {
    const char *start = t->p;
    size_t first = t->rows;
    Py_ssize_t n = 0;
    PyObject *likes[LONGEST_PACK], *like;
    t->p++;
    do {
        skip_space(t);
        like = *t->p == '{' && n < LONGEST_PACK ? take_tensor(t) : NULL;
        if (like) likes[n++] = Py_NewRef(like); /* another text may take its place */
    } while (like && take(t, ','));
    Packed *made = like && take(t, ']') ? (Packed *)PyType_GenericAlloc(packed_type, n) : NULL;
    if (made) {
        made->first = (Py_ssize_t)first;
        memcpy(made->likes, likes, (size_t)n * sizeof *likes);
        return (PyObject *)made;
    }
    while (n) Py_DECREF(likes[--n]);
    t->p = start, t->rows = first;
    return NULL;
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
    PyObject *escaped = PyBytes_FromStringAndSize(start, t->p - start),
             *read = escaped ? call_one(t->loads, escaped) : NULL;
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
    PyObject *bytes = key ? PyBytes_FromStringAndSize(text, (Py_ssize_t)length) : NULL;
    if (bytes) know(place, bytes, key);
    Py_XDECREF(bytes);
    return key;
}

/* Let a piece begin where the text is read, and hold PIECE of it or all that is left; more: more than it holds now, 0
 * where there is none. */
static int read_on(Text *t, int more) {
    size_t left = t->length - (size_t)(t->p - t->piece);
    if (t->is_last) return !more;
    for (; !t->is_last && (more || left < PIECE); more = 0) {
        PyObject *size = PyLong_FromSize_t(left + PIECE), *bytes = size ? call_one(t->read, size) : NULL;
        Py_XDECREF(size);
        Py_ssize_t got = bytes && PyBytes_Check(bytes) ? PyBytes_Size(bytes) : -1;
        char *piece = got < 0 ? NULL : malloc(left + (size_t)got + 1);
        if (piece) {
            if (left) memcpy(piece, t->p, left);
            memcpy(piece + left, PyBytes_AsString(bytes), (size_t)got);
            piece[left += (size_t)got] = 0;
            free(t->piece);
            t->p = t->piece = piece, t->length = left, t->is_last = !got, t->moves++;
        } else if (got >= 0) {
            PyErr_NoMemory();
        }
        Py_XDECREF(bytes);
        if (!piece) return 0;
    }
    return 1;
}

/* A member of an object and what is behind it, up to the next one. 1 where there is another, 0 behind the last, -1
 * where it is none. */
static int read_member(Text *t, PyObject *made, int depth, int first) {
    if (take(t, '}')) return first ? 0 : -1; /* none is behind a comma */
    PyObject *key = read_key(t), *value = NULL;
    if (key && take(t, ':')) {
        skip_space(t);
        if (depth == 0) t->in_data = PyUnicode_CompareWithASCIIString(key, "data") == 0;
        if (depth == 2 && t->in_data && *t->p == '[') value = read_packed(t);
        if (!value && !PyErr_Occurred()) value = read_value(t, depth + 1);
    }
    if (value && depth == 1 && t->in_data) {
        PyObject *entry = call_two(t->entry, key, value);
        Py_DECREF(value);
        value = entry;
    }
    int failed = !value || PyDict_SetItem(made, key, value);
    Py_XDECREF(key), Py_XDECREF(value);
    if (failed || (depth == 0 && t->in_data && !read_on(t, 0))) return -1;
    if (take(t, '}')) return 0;
    if (!take(t, ',')) return -1;
    skip_space(t);
    return 1;
}

static PyObject *read_object(Text *t, int depth) {
    PyObject *made = PyDict_New();
    int pieces = depth == 0 || (depth == 1 && t->in_data); /* nothing that is being read points into the text there */
    int more = 1;
    t->p++;
    for (int first = 1; made && more == 1; first = 0) {
        if (pieces && !read_on(t, 0)) break;
        size_t at = (size_t)(t->p - t->piece), rows = t->rows, moves = t->moves;
        while ((more = read_member(t, made, depth, first)) < 0 && pieces && t->moves == moves && !PyErr_Occurred()) {
            t->p = t->piece + at, t->rows = rows; /* the member may go on behind the piece */
            if (!read_on(t, 1)) break;
            at = 0, moves = t->moves;
        }
    }
    if (made && more) Py_CLEAR(made);
    return made;
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
        PyObject *like = take_tensor(t);
        if (like) return value_like(like, (Py_ssize_t)rows);
        if (PyErr_Occurred()) return NULL;
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

static PyObject *column(const void *data, size_t size) {
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
}

static PyObject *read_dump(PyObject *self, PyObject *args) {
    PyObject *read, *describe, *loads, *entry, *found = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOO", &read, &describe, &loads, &entry)) return NULL;
    Text *t = PyMem_Calloc(1, sizeof *t);
    if (!t) return PyErr_NoMemory();
    t->read = read, t->describe = describe, t->loads = loads, t->entry = entry;
    PyObject *top = read_on(t, 0) ? read_value(t, 0) : NULL;
    if (top) skip_space(t);
    if (top && read_on(t, 0) && t->p == t->piece + t->length)
        found = Py_BuildValue("ONNN", top, column(t->numbers, t->rows * NUMBERS * sizeof *t->numbers),
                              column(t->checksums, t->rows * sizeof *t->checksums), column(t->has_checksum, t->rows));
    for (int i = 0; i < PLACES; i++)
        know(t->keys + i, NULL, NULL), know(t->likes[0] + i, NULL, NULL), know(t->likes[1] + i, NULL, NULL);
    Py_XDECREF(top);
    free(t->piece), free(t->numbers), free(t->checksums), free(t->has_checksum);
    PyMem_Free(t);
    if (found || (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError))) return found;
    PyErr_Clear(); /* whoever reads it next says what is wrong with it */
    Py_RETURN_NONE;
}

static PyMethodDef packed_methods[] = {{"to_list", packed_to_list, METH_NOARGS, "Return the Values, newly made."},
                                       {NULL, NULL, 0, NULL}};

static PyType_Slot packed_slots[] = {{Py_tp_dealloc, packed_free},
                                     {Py_tp_methods, packed_methods},
                                     {Py_tp_doc, "A list of Values of a dump that are made when they are asked for."},
                                     {0, NULL}};

static PyType_Spec packed_spec = {"trainprobe._native.PackedValues", offsetof(Packed, likes), sizeof(PyObject *),
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, packed_slots};

static PyMethodDef functions[] = {{"read_dump", read_dump, METH_VARARGS,
                                   "read_dump(read, describe, loads, entry) -> (document, numbers, checksums, "
                                   "has_checksum), or None: see _native.pyi."},
                                  {NULL, NULL, 0, NULL}};

int dump_text_fill(PyObject *module) {
    packed_type = (PyTypeObject *)PyType_FromSpec(&packed_spec);
    return !packed_type || PyModule_AddFunctions(module, functions) ||
           PyModule_AddObjectRef(module, "PackedValues", (PyObject *)packed_type);
}
