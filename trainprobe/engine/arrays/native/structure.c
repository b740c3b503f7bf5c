/* The structure of a step as bytes: all that its calls say apart from the numbers in rows (see engine/core/step_layout.py). Equal calls
   give equal bytes, whichever objects they consist of; each part begins with a letter and, where its length varies, that length. */
#include "objects.h"

typedef struct {
    const void *key;
    uint32_t number;
} Entry;

/* Object → number: values by the order in which they are met, calls by their places. */
typedef struct {
    Entry *table;
    size_t used, room; /* room: a power of two */
} Numbers;

typedef struct {
    char *bytes;
    size_t used, room;
    Numbers values, calls;
} Text;

static Entry *number_slot(Numbers *self, const void *key) {
    size_t i = mixed(key) & (self->room - 1);
    while (self->table[i].key && self->table[i].key != key) i = (i + 1) & (self->room - 1);
    return &self->table[i];
}

static int numbers_grow(Numbers *self) {
    Numbers wider = {.used = self->used, .room = self->room ? 2 * self->room : 1024};
    wider.table = PyMem_Calloc(wider.room, sizeof(Entry));
    if (!wider.table) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->room; i++)
        if (self->table[i].key) *number_slot(&wider, self->table[i].key) = self->table[i];
    PyMem_Free(self->table);
    *self = wider;
    return 0;
}

/* The number of an object; is_new: whether it was not known. -1 with an exception set. */
static int64_t number_of(Numbers *self, const void *key, int *is_new) {
    if (2 * (self->used + 1) > self->room && numbers_grow(self)) return -1;
    Entry *found = number_slot(self, key);
    *is_new = !found->key;
    if (*is_new) found->key = key, found->number = (uint32_t)self->used++;
    return found->number;
}

static int put(Text *self, char letter, const void *data, size_t size) {
    if (self->used + size + 1 > self->room) {
        size_t room = 2 * (self->room + size) + 4096;
        char *wider = PyMem_Realloc(self->bytes, room);
        if (!wider) return PyErr_NoMemory(), -1;
        self->bytes = wider, self->room = room;
    }
    self->bytes[self->used++] = letter;
    memcpy(self->bytes + self->used, data, size);
    self->used += size;
    return 0;
}

static int put_number(Text *self, char letter, int64_t number) { return put(self, letter, &number, sizeof number); }

static int put_text(Text *self, char letter, PyObject *text) {
    Py_ssize_t size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes) return put_number(self, letter, size) || put(self, '"', bytes, (size_t)size);
    PyErr_Clear(); /* half of a surrogate pair */
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    int failed = !encoded || put_number(self, letter, PyBytes_Size(encoded)) ||
                 put(self, '\'', PyBytes_AsString(encoded), (size_t)PyBytes_Size(encoded));
    Py_XDECREF(encoded);
    return failed;
}

static int put_any(Text *self, PyObject *x);

/* What is none of the kinds that are known: its class and what it says of itself. */
static int put_other(Text *self, PyObject *x) {
    PyObject *kind = PyObject_GetAttrString((PyObject *)Py_TYPE(x), "__qualname__"), *text = kind ? PyObject_Repr(x) : NULL;
    int failed = !text || put_text(self, 'o', kind) || put_text(self, 'r', text);
    Py_XDECREF(kind), Py_XDECREF(text);
    return failed;
}

static int put_integer(Text *self, PyObject *x) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(x, &overflow);
    return overflow ? put_other(self, x) : put_number(self, 'i', number);
}

static int put_value(Text *self, Value *v) {
    int is_new;
    int64_t number = number_of(&self->values, v, &is_new);
    if (number < 0 || put_number(self, is_new ? 'V' : 'v', number)) return -1;
    PyObject *const fields[] = {v->type, v->dtype, v->shape, v->device, v->requires_grad, v->note, v->tensor, v->extra};
    if (is_new && put_number(self, 'R', v->row)) return -1;
    for (size_t i = 0; is_new && i < sizeof fields / sizeof *fields; i++)
        if (put_any(self, fields[i])) return -1;
    return 0;
}

static int put_list(Text *self, PyObject *x) {
    Py_ssize_t n = PyList_Size(x);
    if (put_number(self, '[', n)) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_any(self, PyList_GetItem(x, i))) return -1;
    return 0;
}

static int put_tuple(Text *self, PyObject *x) {
    Py_ssize_t n = PyTuple_Size(x);
    if (put_number(self, '(', n)) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_any(self, PyTuple_GetItem(x, i))) return -1;
    return 0;
}

static int put_dict(Text *self, PyObject *x) {
    PyObject *key, *item;
    Py_ssize_t at = 0;
    if (put_number(self, '{', PyDict_Size(x))) return -1;
    while (PyDict_Next(x, &at, &key, &item))
        if (put_any(self, key) || put_any(self, item)) return -1;
    return 0;
}

static int put_kind(Text *self, PyObject *x) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == value_type) return put_value(self, (Value *)x);
    if (kind == &PyUnicode_Type) return put_text(self, 's', x);
    if (kind == &PyLong_Type) return put_integer(self, x);
    if (kind == &PyTuple_Type) return put_tuple(self, x);
    if (kind == &PyList_Type) return put_list(self, x);
    if (kind == &PyDict_Type) return put_dict(self, x);
    if (kind == &PyFloat_Type) {
        double number = PyFloat_AsDouble(x);
        return put(self, 'f', &number, sizeof number);
    }
    return put_other(self, x);
}

static int put_any(Text *self, PyObject *x) {
    if (!x || x == Py_None) return put(self, 'N', "", 0);
    if (x == Py_True || x == Py_False) return put(self, x == Py_True ? 'T' : 'F', "", 0);
    if (Py_EnterRecursiveCall(" in the arguments of a call")) return -1;
    int failed = put_kind(self, x);
    Py_LeaveRecursiveCall();
    return failed;
}

static int put_about(Text *self, Call *c) {
    return put_any(self, c->kind) || put_any(self, c->name) || put_number(self, '#', c->call) || put_any(self, c->phase) ||
           put_any(self, c->cls);
}

static int put_parent(Text *self, PyObject *parent) {
    if (!parent || Py_TYPE(parent) != call_type) return put_any(self, parent);
    Entry *known = number_slot(&self->calls, parent);
    return known->key ? put_number(self, 'p', known->number) : put(self, 'P', "", 0) || put_about(self, (Call *)parent);
}

static int put_call(Text *self, Call *c) {
    return put(self, 'c', "", 0) || put_about(self, c) || put_any(self, c->micro) || put_number(self, '|', c->stack) ||
           put_any(self, c->node) || put_parent(self, c->parent) || put_any(self, c->args) || put_any(self, c->kwargs) ||
           put_any(self, c->out) || put_any(self, c->params);
}

static int put_calls(Text *self, PyObject *calls) {
    Py_ssize_t n = PyList_Size(calls);
    int is_new;
    if (numbers_grow(&self->calls)) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *call = PyList_GetItem(calls, i);
        if (Py_TYPE(call) != call_type) return PyErr_Format(PyExc_TypeError, "%R is not a Call", call), -1;
        if (number_of(&self->calls, call, &is_new) < 0) return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_call(self, (Call *)PyList_GetItem(calls, i))) return -1;
    return 0;
}

static PyObject *structure(PyObject *module, PyObject *given) {
    (void)module;
    PyObject *calls = PySequence_List(given); /* an own list: what an object says of itself is code of the program */
    if (!calls) return NULL;
    Text text = {0};
    int failed = put_calls(&text, calls);
    Py_DECREF(calls);
    PyObject *bytes = failed ? NULL : PyBytes_FromStringAndSize(text.bytes, (Py_ssize_t)text.used);
    PyMem_Free(text.bytes), PyMem_Free(text.values.table), PyMem_Free(text.calls.table);
    return bytes;
}

static PyMethodDef functions[] = {
    {"structure", structure, METH_O, "structure(calls) -> bytes, which tell apart all that the calls say but for numbers in rows."},
    {NULL, NULL, 0, NULL}};

int structure_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
