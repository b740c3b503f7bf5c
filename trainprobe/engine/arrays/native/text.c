/* Calls as JSON text: the entries of a dump (see dumps/entry_text.py) and the calls of the record log (see dumps/record_log.py).
   Rare leaves are turned into text by the Python functions given. */
#include <stdio.h>
#include <string.h>

#include "objects.h"

#define DEEPEST 900

typedef struct {
    char *data;
    size_t size, room;
} Text;

static int make_room(Text *t, size_t more) {
    if (t->size + more <= t->room) return 0;
    size_t room = (t->size + more) * 2 + 4096;
    char *data = PyMem_Realloc(t->data, room);
    if (!data) return PyErr_NoMemory(), -1;
    t->data = data, t->room = room;
    return 0;
}

static int put(Text *t, const char *data, size_t size) {
    if (make_room(t, size)) return -1;
    memcpy(t->data + t->size, data, size);
    t->size += size;
    return 0;
}

#define PUT(t, literal) put(t, literal, sizeof(literal) - 1)

static int put_number(Text *t, long long x) {
    char digits[24];
    int at = 24;
    unsigned long long rest = x < 0 ? 0ull - (unsigned long long)x : (unsigned long long)x;
    do digits[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (x < 0) digits[--at] = '-';
    return put(t, digits + at, (size_t)(24 - at));
}

/* The UTF-8 of a str as it is; -1 with an exception set where it has none. */
static int put_str(Text *t, PyObject *x) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(x, &size);
    return data ? put(t, data, (size_t)size) : -1;
}

static int put_str_and_drop(Text *t, PyObject *x) {
    if (!x) return -1;
    int failed = put_str(t, x);
    Py_DECREF(x);
    return failed;
}

/* A finite float as Python's repr has it; 1 where it is not finite. */
static int put_float(Text *t, PyObject *x) {
    double number = PyFloat_AsDouble(x);
    if (number - number != 0) return 1;
    char *digits = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (!digits) return -1;
    int failed = put(t, digits, strlen(digits));
    PyMem_Free(digits);
    return failed;
}

static int put_quoted(Text *t, PyObject *x, PyObject *quote) {
    Py_ssize_t size = 0;
    const char *data = PyUnicode_Check(x) ? PyUnicode_AsUTF8AndSize(x, &size) : NULL;
    if (!data) PyErr_Clear();
    int plain = data != NULL;
    for (Py_ssize_t i = 0; plain && i < size; i++) plain = (unsigned char)data[i] >= 32 && data[i] != '"' && data[i] != '\\';
    if (!plain) return put_str_and_drop(t, PyObject_CallFunctionObjArgs(quote, x, NULL));
    return PUT(t, "\"") || put(t, data, (size_t)size) || PUT(t, "\"") ? -1 : 0;
}

static PyObject *bytes_of(Text *t) {
    PyObject *bytes = PyBytes_FromStringAndSize(t->data ? t->data : "", (Py_ssize_t)t->size);
    PyMem_Free(t->data);
    t->data = NULL, t->size = t->room = 0;
    return bytes;
}

static int is_text(PyObject *x, const char *text) { return x && PyUnicode_CompareWithASCIIString(x, text) == 0; }

/* ---- the entries of a dump ----------------------------------------------------------------------------------------------- */

typedef struct {
    const char *prefix, **at; /* at[row], at[row + 1] - 1: the text of a row */
    size_t prefix_size;
    PyObject *text; /* held */
} Column;

typedef struct {
    Text out;
    Column columns[16];
    int n_columns;
    Py_ssize_t rows;
    PyObject *odd, *stored, *quote, *other, *about, *none; /* about(value): what is rare of a value; other(leaf): a leaf that is not plain */
    const uint64_t *checksums;
    int alone, mindspore;
} Dump;

static int put_numbers(Dump *d, Py_ssize_t row) {
    Text *t = &d->out;
    if (row < 0 || row >= d->rows) return put_str(t, d->none);
    PyObject *number = PyLong_FromSsize_t(row), *odd = number ? PyDict_GetItemWithError(d->odd, number) : NULL;
    Py_XDECREF(number);
    if (odd) return put_str(t, odd);
    if (PyErr_Occurred()) return -1;
    for (int i = 0; i < d->n_columns; i++) {
        Column *c = &d->columns[i];
        if (put(t, c->prefix, c->prefix_size)) return -1;
        if (!c->at ? PUT(t, "null") : put(t, c->at[row], (size_t)(c->at[row + 1] - c->at[row]) - 1)) return -1;
    }
    if (d->checksums && d->checksums[row]) { /* 0: none was asked for (a tensor without elements is among the odd rows) */
        char text[80];
        unsigned long long sum = d->checksums[row];
        int size = d->alone ? snprintf(text, sizeof text, ", \"checksum\": \"0x%016llx\", \"md5\": \"0x%016llx\"", sum, sum)
                            : snprintf(text, sizeof text, ", \"checksum\": \"0x%016llx\"", sum);
        if (put(t, text, (size_t)size)) return -1;
    }
    return 0;
}

static int put_value(Dump *d, Value *v) {
    Text *t = &d->out;
    if (PUT(t, "{\"type\": ") || put_quoted(t, v->type ? v->type : Py_None, d->quote) || PUT(t, ", \"dtype\": ") ||
        put_quoted(t, v->dtype ? v->dtype : Py_None, d->quote) || PUT(t, ", \"shape\": ["))
        return -1;
    Py_ssize_t nd = v->shape && PyTuple_Check(v->shape) ? PyTuple_Size(v->shape) : 0;
    for (Py_ssize_t i = 0; i < nd; i++) {
        long long size = PyLong_AsLongLong(PyTuple_GetItem(v->shape, i));
        if ((size < 0 && PyErr_Occurred()) || (i && PUT(t, ", ")) || put_number(t, size)) return -1;
    }
    if (PUT(t, "]") || put_numbers(d, v->row)) return -1;
    if (v->requires_grad && (v->requires_grad == Py_True ? PUT(t, ", \"requires_grad\": true") : PUT(t, ", \"requires_grad\": false")))
        return -1;
    if (v->tensor && !v->note && !v->extra) {
        int there = PySet_Contains(d->stored, v->tensor);
        if (there < 0 || (there && (PUT(t, ", \"data_name\": ") || put_quoted(t, v->tensor, d->quote)))) return -1;
    } else if (v->tensor || v->note || v->extra) {
        if (put_str_and_drop(t, PyObject_CallFunctionObjArgs(d->about, v, NULL))) return -1;
    }
    return PUT(t, "}");
}

static int put_tree(Dump *d, PyObject *x, int depth) {
    Text *t = &d->out;
    PyTypeObject *kind = x ? Py_TYPE(x) : NULL;
    if (!x || x == Py_None) return PUT(t, "null");
    if (kind == value_type) return put_value(d, (Value *)x);
    if (kind == &PyBool_Type)
        return x == Py_True ? PUT(t, "{\"type\": \"bool\", \"value\": true}") : PUT(t, "{\"type\": \"bool\", \"value\": false}");
    if (kind == &PyLong_Type) {
        int beyond = 0;
        long long number = PyLong_AsLongLongAndOverflow(x, &beyond);
        if (!beyond) return PUT(t, "{\"type\": \"int\", \"value\": ") || put_number(t, number) || PUT(t, "}");
    } else if (kind == &PyFloat_Type) {
        size_t before = t->size;
        int odd = PUT(t, "{\"type\": \"float\", \"value\": ") ? -1 : put_float(t, x);
        if (odd <= 0) return odd || PUT(t, "}");
        t->size = before;
    } else if (kind == &PyList_Type && depth < DEEPEST) {
        if (PUT(t, "[")) return -1;
        for (Py_ssize_t i = 0; i < PyList_Size(x); i++)
            if ((i && PUT(t, ", ")) || put_tree(d, PyList_GetItem(x, i), depth + 1)) return -1;
        return PUT(t, "]");
    } else if (kind == &PyDict_Type && depth < DEEPEST) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        if (PUT(t, "{")) return -1;
        for (int i = 0; PyDict_Next(x, &at, &key, &item); i++)
            if ((i && PUT(t, ", ")) || put_quoted(t, key, d->quote) || PUT(t, ": ") || put_tree(d, item, depth + 1)) return -1;
        return PUT(t, "}");
    } else if (kind == &PyUnicode_Type) {
        return PUT(t, "{\"type\": \"str\", \"value\": ") || put_quoted(t, x, d->quote) || PUT(t, "}");
    }
    return put_str_and_drop(t, PyObject_CallFunctionObjArgs(d->other, x, NULL));
}

static int put_listed(Dump *d, PyObject *x) {
    if (!x || x == Py_None) return PUT(&d->out, "[]");
    if (Py_TYPE(x) == &PyList_Type) return put_tree(d, x, 0);
    return PUT(&d->out, "[") || put_tree(d, x, 0) || PUT(&d->out, "]");
}

static int is_backward(const Call *c) { return is_text(c->phase, "backward"); }

static int has_items(PyObject *x) { return x && x != Py_None && PyObject_IsTrue(x) > 0; }

static int put_entry(Dump *d, Call *c) {
    Text *t = &d->out;
    if (is_text(c->kind, "saved")) return put_tree(d, c->args, 0);
    if (is_text(c->kind, "parameter")) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        if (PUT(t, "{")) return -1;
        for (int i = 0; c->params && PyDict_Check(c->params) && PyDict_Next(c->params, &at, &key, &item); i++)
            if ((i && PUT(t, ", ")) || put_quoted(t, key, d->quote) || PUT(t, ": ") || put_listed(d, item)) return -1;
        return PUT(t, "}");
    }
    if (is_backward(c)) return PUT(t, "{\"input\": ") || put_listed(d, c->args) || PUT(t, ", \"output\": ") || put_listed(d, c->out) || PUT(t, "}");
    if (PUT(t, "{\"input_args\": ") || put_listed(d, c->args) || PUT(t, ", \"input_kwargs\": ")) return -1;
    if (has_items(c->kwargs) ? put_tree(d, c->kwargs, 0) : PUT(t, "{}")) return -1;
    if (has_items(c->params) && (PUT(t, ", \"parameters\": ") || put_tree(d, c->params, 0))) return -1;
    return PUT(t, ", \"output\": ") || put_listed(d, c->out) || PUT(t, "}");
}

/* The name of an entry (see reel.entry_name), unquoted. */
static int put_name(Text *t, const Call *c, int backward, int mindspore) {
    int module = is_text(c->kind, "module");
    if (module || is_text(c->kind, "parameter")) {
        if ((mindspore ? PUT(t, "Cell.") : PUT(t, "Module.")) || put_str(t, c->name) || PUT(t, ".") || put_str(t, c->cls)) return -1;
        if (!module ? PUT(t, ".parameters_grad.") : backward ? PUT(t, ".backward.") : PUT(t, ".forward.")) return -1;
        return put_number(t, c->call);
    }
    if (put_str(t, c->name)) return -1;
    if (is_text(c->kind, "saved")) return (backward && PUT(t, "_grad")) || PUT(t, ".") || put_number(t, c->call) || PUT(t, ".debug");
    return PUT(t, ".") || put_number(t, c->call) || (backward ? PUT(t, ".backward") : PUT(t, ".forward"));
}

static PyObject *name_of(const Call *c, int backward, int mindspore) {
    Text t = {0};
    PyObject *name = put_name(&t, c, backward, mindspore) ? NULL : PyUnicode_FromStringAndSize(t.data, (Py_ssize_t)t.size);
    PyMem_Free(t.data);
    return name;
}

static int read_columns(Dump *d, PyObject *columns) { /* list of (prefix bytes, text bytes or None) */
    d->n_columns = (int)PyList_Size(columns);
    if (d->n_columns > 16) return PyErr_SetString(PyExc_ValueError, "at most 16 columns"), -1;
    for (int i = 0; i < d->n_columns; i++) {
        PyObject *pair = PyList_GetItem(columns, i), *prefix = PyTuple_GetItem(pair, 0), *text = PyTuple_GetItem(pair, 1);
        Column *c = &d->columns[i];
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(prefix, &data, &size)) return -1;
        c->prefix = data, c->prefix_size = (size_t)size;
        if (text == Py_None) continue;
        if (PyBytes_AsStringAndSize(text, &data, &size)) return -1;
        c->at = PyMem_Malloc((size_t)(d->rows + 2) * sizeof *c->at);
        if (!c->at) return PyErr_NoMemory(), -1;
        Py_ssize_t row = 0;
        c->at[row++] = data;
        for (Py_ssize_t j = 0; j < size && row <= d->rows; j++)
            if (data[j] == ',') c->at[row++] = data + j + 1;
        if (row == d->rows) c->at[row] = data + size + 1;
        else if (row < d->rows) return PyErr_Format(PyExc_ValueError, "a column of %zd rows has %zd", d->rows, row), -1;
        c->at[d->rows] = data + size + 1;
    }
    return 0;
}

static int put_all(Dump *d, PyObject *calls, PyObject *names, PyObject *kept, PyObject *free_name) {
    PyObject *taken = PySet_New(NULL);
    if (!taken) return -1;
    Py_ssize_t n = PyList_Size(calls);
    for (Py_ssize_t i = 0; i < n; i++) {
        Call *c = (Call *)PyList_GetItem(calls, i);
        if (Py_TYPE((PyObject *)c) != call_type) goto failed;
        if (is_text(c->phase, "recompute") || is_text(c->kind, "state")) continue;
        PyObject *name = name_of(c, is_backward(c), d->mindspore);
        int known = name ? PySet_Contains(taken, name) : -1;
        if (known > 0) {
            Py_DECREF(name);
            name = PyObject_CallFunctionObjArgs(free_name, c, taken, NULL);
        }
        int failed = !name || PySet_Add(taken, name) || PyList_Append(names, name) || PyList_Append(kept, (PyObject *)c) ||
                     (PyList_Size(names) > 1 ? PUT(&d->out, ",\n  ") : PUT(&d->out, "\n  ")) || put_quoted(&d->out, name, d->quote) ||
                     PUT(&d->out, ": ") || put_entry(d, c);
        Py_XDECREF(name);
        if (failed) goto failed;
    }
    Py_DECREF(taken);
    return 0;
failed:
    Py_DECREF(taken);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "calls must be a list of Call");
    return -1;
}

static PyObject *entries(PyObject *module, PyObject *args) {
    Dump d = {0};
    PyObject *calls, *columns, *free_name, *sums, *names = PyList_New(0), *kept = PyList_New(0), *answer = NULL;
    (void)module;
    if (names && kept &&
        PyArg_ParseTuple(args, "O!pnO!O!OpO!OOOUO", &PyList_Type, &calls, &d.mindspore, &d.rows, &PyList_Type, &columns, &PyDict_Type,
                         &d.odd, &sums, &d.alone, &PySet_Type, &d.stored, &d.quote, &d.other, &d.about, &d.none, &free_name)) {
        int failed = 0;
        if (sums != Py_None) {
            char *data;
            Py_ssize_t size;
            failed = PyBytes_AsStringAndSize(sums, &data, &size);
            d.checksums = (const uint64_t *)data;
            if (!failed && size != d.rows * 8) failed = PyErr_Format(PyExc_ValueError, "%zd bytes of checksums", size) == NULL;
        }
        if (!failed && !read_columns(&d, columns) && !put_all(&d, calls, names, kept, free_name)) {
            PyObject *bytes = bytes_of(&d.out);
            answer = bytes ? PyTuple_Pack(3, bytes, names, kept) : NULL;
            Py_XDECREF(bytes);
        }
    }
    for (int i = 0; i < 16; i++) PyMem_Free(d.columns[i].at);
    PyMem_Free(d.out.data);
    Py_XDECREF(names);
    Py_XDECREF(kept);
    return answer;
}

/* construct.json without micro-batches: entry → enclosing entry or null (see entry_text.construct). */
static PyObject *construct(PyObject *module, PyObject *args) {
    PyObject *names, *calls, *quote;
    int mindspore;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!pO", &PyList_Type, &names, &PyList_Type, &calls, &mindspore, &quote)) return NULL;
    Text t = {0};
    int stages = 0, any = 0;
    static const char *const stage_names[] = {"optimizer", "clip_grad"};
    if (PUT(&t, "{")) goto failed;
    for (Py_ssize_t i = 0; i < PyList_Size(names); i++) {
        Call *c = (Call *)PyList_GetItem(calls, i);
        if (is_text(c->kind, "parameter")) continue;
        if ((any++ ? PUT(&t, ",\n  ") : PUT(&t, "\n  ")) || put_quoted(&t, PyList_GetItem(names, i), quote) || PUT(&t, ": ")) goto failed;
        PyObject *parent = c->parent;
        if (!parent || parent == Py_None) {
            if (PUT(&t, "null")) goto failed;
        } else if (Py_TYPE(parent) == call_type) {
            PyObject *name = name_of((Call *)parent, is_backward(c) || is_backward((Call *)parent), mindspore);
            int failed = !name || put_quoted(&t, name, quote);
            Py_XDECREF(name);
            if (failed) goto failed;
        } else {
            for (int s = 0; s < 2; s++)
                if (is_text(parent, stage_names[s])) stages |= 1 << s;
            if (put_quoted(&t, parent, quote)) goto failed;
        }
    }
    for (int s = 0; s < 2; s++)
        if (stages & (1 << s))
            if ((any++ ? PUT(&t, ",\n  \"") : PUT(&t, "\n  \"")) || put(&t, stage_names[s], strlen(stage_names[s])) || PUT(&t, "\": null")) goto failed;
    if (any ? PUT(&t, "\n}") : PUT(&t, "}")) goto failed;
    return bytes_of(&t);
failed:
    PyMem_Free(t.data);
    return NULL;
}

/* ---- the calls of the record log ----------------------------------------------------------------------------------------- */

typedef struct {
    Text out, rows, head_of;
    PyObject *quote, *other, *heads, *sparse; /* heads: dict head → number; sparse: list of (number, value) with note, tensor or extra */
    Py_ssize_t values;
    uint64_t epoch;
} Log;

static uint64_t epochs; /* marks on values and calls are of the log that is being written */

static int number_value(Log *l, Value *v) {
    v->epoch = l->epoch, v->mark = l->values++;
    PyObject *head = PyTuple_Pack(5, v->type ? v->type : Py_None, v->dtype ? v->dtype : Py_None, v->shape ? v->shape : Py_None,
                                  v->device ? v->device : Py_None, v->requires_grad ? v->requires_grad : Py_None);
    if (!head) return -1;
    PyObject *number = PyDict_GetItemWithError(l->heads, head);
    long long at = number ? PyLong_AsLongLong(number) : PyDict_Size(l->heads);
    int failed = 0;
    if (!number) {
        number = PyErr_Occurred() ? NULL : PyLong_FromLongLong(at);
        failed = !number || PyDict_SetItem(l->heads, head, number);
        Py_XDECREF(number);
    }
    Py_DECREF(head);
    if (failed || (v->mark && (PUT(&l->rows, ",") || PUT(&l->head_of, ","))) || put_number(&l->rows, v->row) || put_number(&l->head_of, at)) return -1;
    if (v->note || v->tensor || v->extra) {
        PyObject *pair = Py_BuildValue("(nO)", v->mark, (PyObject *)v);
        failed = !pair || PyList_Append(l->sparse, pair);
        Py_XDECREF(pair);
    }
    return failed;
}

static int log_tree(Log *l, PyObject *x, int depth) {
    Text *t = &l->out;
    PyTypeObject *kind = Py_TYPE(x);
    if (x == Py_None) return PUT(t, "null");
    if (kind == value_type) {
        Value *v = (Value *)x;
        if (v->epoch != l->epoch && number_value(l, v)) return -1;
        return put_number(t, v->mark);
    }
    if (kind == &PyBool_Type) return x == Py_True ? PUT(t, "true") : PUT(t, "false");
    if (kind == &PyLong_Type) {
        int beyond = 0;
        long long number = PyLong_AsLongLongAndOverflow(x, &beyond);
        if (!beyond) return PUT(t, "{\"i\":") || put_number(t, number) || PUT(t, "}");
    } else if (kind == &PyFloat_Type) {
        int odd = put_float(t, x);
        if (odd <= 0) return odd;
    } else if (kind == &PyUnicode_Type) {
        return put_quoted(t, x, l->quote);
    } else if (kind == &PyList_Type && depth < DEEPEST) {
        if (PUT(t, "[")) return -1;
        for (Py_ssize_t i = 0; i < PyList_Size(x); i++)
            if ((i && PUT(t, ",")) || log_tree(l, PyList_GetItem(x, i), depth + 1)) return -1;
        return PUT(t, "]");
    } else if (kind == &PyDict_Type && depth < DEEPEST) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        if (PUT(t, "{\"d\":{")) return -1;
        for (int i = 0; PyDict_Next(x, &at, &key, &item); i++)
            if ((i && PUT(t, ",")) || put_quoted(t, key, l->quote) || PUT(t, ":") || log_tree(l, item, depth + 1)) return -1;
        return PUT(t, "}}");
    }
    return put_str_and_drop(t, PyObject_CallFunctionObjArgs(l->other, x, NULL));
}

static int log_call(Log *l, Call *c) {
    Text *t = &l->out;
    if (PUT(t, "{\"kind\":") || put_quoted(t, c->kind, l->quote) || PUT(t, ",\"name\":") || put_quoted(t, c->name, l->quote) ||
        PUT(t, ",\"call\":") || put_number(t, c->call) || PUT(t, ",\"phase\":") || put_quoted(t, c->phase, l->quote))
        return -1;
    if (c->cls && PyUnicode_GetLength(c->cls) > 0 && (PUT(t, ",\"cls\":") || put_quoted(t, c->cls, l->quote))) return -1;
    if (c->micro && c->micro != Py_None && (PUT(t, ",\"micro\":") || put_number(t, PyLong_AsLongLong(c->micro)))) return -1;
    if (c->stack >= 0 && (PUT(t, ",\"stack\":") || put_number(t, c->stack))) return -1;
    if (c->node && c->node != Py_None && (PUT(t, ",\"node\":") || put_quoted(t, c->node, l->quote))) return -1;
    if (c->parent && c->parent != Py_None) {
        if (PUT(t, ",\"parent\":")) return -1;
        Call *parent = (Call *)c->parent;
        if (Py_TYPE(c->parent) != call_type ? put_quoted(t, c->parent, l->quote)
                                            : parent->epoch == l->epoch ? put_number(t, parent->mark) : PUT(t, "null"))
            return -1;
    }
    struct {
        const char *key;
        PyObject *tree;
    } trees[] = {{",\"args\":", c->args}, {",\"kwargs\":", c->kwargs}, {",\"out\":", c->out}, {",\"params\":", c->params}};
    for (int i = 0; i < 4; i++)
        if (trees[i].tree && trees[i].tree != Py_None && (put(t, trees[i].key, strlen(trees[i].key)) || log_tree(l, trees[i].tree, 0))) return -1;
    return PUT(t, "}");
}

static PyObject *log_calls(PyObject *module, PyObject *args) {
    Log l = {0};
    PyObject *calls, *answer = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OO", &PyList_Type, &calls, &l.quote, &l.other)) return NULL;
    l.heads = PyDict_New(), l.sparse = PyList_New(0);
    l.epoch = ++epochs;
    Py_ssize_t n = PyList_Size(calls);
    int failed = !l.heads || !l.sparse || PUT(&l.out, "[");
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        Call *c = (Call *)PyList_GetItem(calls, i);
        if (Py_TYPE((PyObject *)c) != call_type) failed = PyErr_Format(PyExc_TypeError, "calls must be a list of Call") == NULL;
        else c->epoch = l.epoch, c->mark = i;
    }
    for (Py_ssize_t i = 0; !failed && i < n; i++) failed = (i && PUT(&l.out, ",")) || log_call(&l, (Call *)PyList_GetItem(calls, i));
    if (!failed && !PUT(&l.out, "]")) {
        PyObject *text = bytes_of(&l.out), *rows = bytes_of(&l.rows), *heads = bytes_of(&l.head_of);
        if (text && rows && heads) answer = PyTuple_Pack(5, text, l.heads, heads, rows, l.sparse);
        Py_XDECREF(text), Py_XDECREF(rows), Py_XDECREF(heads);
    }
    PyMem_Free(l.out.data), PyMem_Free(l.rows.data), PyMem_Free(l.head_of.data);
    Py_XDECREF(l.heads), Py_XDECREF(l.sparse);
    return answer;
}

static PyMethodDef functions[] = {
    {"dump_entries", entries, METH_VARARGS,
     "dump_entries(calls, mindspore, rows, columns, odd, checksums, alone, stored, quote, other, about, none, free_name) -> (text, names, calls)"},
    {"dump_construct", construct, METH_VARARGS, "dump_construct(names, calls, mindspore, quote) -> text of construct.json"},
    {"log_calls", log_calls, METH_VARARGS, "log_calls(calls, quote, other) -> (text, heads, head of each value, row of each value, sparse)"},
    {NULL, NULL, 0, NULL}};

int text_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
