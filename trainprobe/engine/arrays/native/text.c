/* The entries of a dump as JSON text (see dumps/entry_text.py). Rare leaves are turned into text by the Python functions given. */
#include <stdio.h>

#include "text.h"

#define MOST_COLUMNS 16

typedef struct {
    Text out, numbers;
    size_t *starts; /* of the text of each row in `numbers`, and where the last one ends */
    Py_ssize_t rows;
    PyObject *stored, *quote, *other, *about; /* about(value): what is rare of a value; other(leaf): a leaf that is not plain */
    const char *none;
    size_t none_size;
    int mindspore;
} Dump;

static int put_checksum(Text *t, unsigned long long sum, int alone) {
    char text[80];
    int size = alone ? snprintf(text, sizeof text, ", \"checksum\": \"0x%016llx\", \"md5\": \"0x%016llx\"", sum, sum)
                     : snprintf(text, sizeof text, ", \"checksum\": \"0x%016llx\"", sum);
    return put(t, text, (size_t)size);
}

/* columns: list of (prefix, the numbers of all rows with commas between, or None). odd: row → its whole text. */
static int put_rows(Dump *d, PyObject *columns, PyObject *odd, const uint64_t *checksums, int alone) {
    const char *prefix[MOST_COLUMNS], *at[MOST_COLUMNS], *end[MOST_COLUMNS];
    Py_ssize_t prefix_size[MOST_COLUMNS], size, n = PyList_Size(columns), n_odd = PyDict_Size(odd);
    if (n > MOST_COLUMNS) return PyErr_Format(PyExc_ValueError, "at most %d columns", MOST_COLUMNS), -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *text;
        char *data;
        if (!PyArg_ParseTuple(PyList_GetItem(columns, i), "y#O", &prefix[i], &prefix_size[i], &text)) return -1;
        at[i] = NULL;
        if (text == Py_None) continue;
        if (PyBytes_AsStringAndSize(text, &data, &size)) return -1;
        at[i] = data, end[i] = data + size;
    }
    if (!(d->starts = PyMem_Malloc((size_t)(d->rows + 1) * sizeof *d->starts))) return PyErr_NoMemory(), -1;
    for (Py_ssize_t row = 0; row < d->rows; row++) {
        d->starts[row] = d->numbers.size;
        for (Py_ssize_t i = 0; i < n; i++) {
            if (put(&d->numbers, prefix[i], (size_t)prefix_size[i])) return -1;
            if (!at[i]) {
                if (PUT(&d->numbers, "null")) return -1;
                continue;
            }
            const char *comma = at[i] < end[i] ? memchr(at[i], ',', (size_t)(end[i] - at[i])) : NULL;
            const char *stop = comma ? comma : end[i];
            if (at[i] >= end[i] || !comma != (row == d->rows - 1)) return PyErr_Format(PyExc_ValueError, "a column has not %zd rows", d->rows), -1;
            if (put(&d->numbers, at[i], (size_t)(stop - at[i]))) return -1;
            at[i] = stop + 1;
        }
        if (checksums && checksums[row] && put_checksum(&d->numbers, checksums[row], alone)) return -1; /* 0: none was asked for */
        if (!n_odd) continue;
        PyObject *number = PyLong_FromSsize_t(row), *whole = number ? PyDict_GetItemWithError(odd, number) : NULL;
        Py_XDECREF(number);
        if (whole) d->numbers.size = d->starts[row];
        if (whole ? put_str(&d->numbers, whole) : PyErr_Occurred() != NULL) return -1;
    }
    d->starts[d->rows] = d->numbers.size;
    return 0;
}

/* The text of a row's numbers, or of none where there is no such row. */
static size_t row_text(const Dump *d, Py_ssize_t row, const char **text) {
    if (row < 0 || row >= d->rows) return *text = d->none, d->none_size;
    return *text = d->numbers.data + d->starts[row], d->starts[row + 1] - d->starts[row];
}

static int put_numbers(Dump *d, Py_ssize_t row) {
    const char *text;
    size_t size = row_text(d, row, &text);
    return put(&d->out, text, size);
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
    PyObject *grad = v->requires_grad;
    if (grad && grad != Py_None && (grad == Py_True ? PUT(t, ", \"requires_grad\": true") : PUT(t, ", \"requires_grad\": false"))) return -1;
    if (v->tensor && !v->note && !v->extra) {
        int there = PySet_Contains(d->stored, v->tensor);
        if (there < 0 || (there && (PUT(t, ", \"data_name\": ") || put_quoted(t, v->tensor, d->quote)))) return -1;
    } else if (v->tensor || v->note || v->extra) {
        if (put_str_and_drop(t, call_one(d->about, (PyObject *)v))) return -1;
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
    return put_str_and_drop(t, call_one(d->other, x));
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
            name = call_two(free_name, (PyObject *)c, taken);
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

/* numbers: (rows, columns, odd, checksums as bytes or None, whether they are alone, text of no numbers). */
static int read_numbers(Dump *d, PyObject *numbers) {
    PyObject *columns, *odd, *sums;
    char *data = NULL;
    Py_ssize_t size, none_size;
    int alone;
    if (!PyArg_ParseTuple(numbers, "nO!O!Ops#", &d->rows, &PyList_Type, &columns, &PyDict_Type, &odd, &sums, &alone, &d->none, &none_size))
        return -1;
    d->none_size = (size_t)none_size;
    if (sums != Py_None && PyBytes_AsStringAndSize(sums, &data, &size)) return -1;
    if (data && size != d->rows * 8) return PyErr_Format(PyExc_ValueError, "%zd bytes of checksums", size), -1;
    return put_rows(d, columns, odd, (const uint64_t *)data, alone);
}

static void dump_free(Dump *d) {
    PyMem_Free(d->out.data);
    PyMem_Free(d->numbers.data);
    PyMem_Free(d->starts);
}

static PyObject *entries(PyObject *module, PyObject *args) {
    Dump d = {0};
    PyObject *calls, *numbers, *free_name, *names = PyList_New(0), *kept = PyList_New(0), *answer = NULL;
    (void)module;
    if (names && kept &&
        PyArg_ParseTuple(args, "O!pO!O!OOOO", &PyList_Type, &calls, &d.mindspore, &PyTuple_Type, &numbers, &PySet_Type, &d.stored, &d.quote,
                         &d.other, &d.about, &free_name) &&
        !read_numbers(&d, numbers) && !put_all(&d, calls, names, kept, free_name)) {
        PyObject *text = bytes_of(&d.out);
        answer = text ? PyTuple_Pack(3, text, names, kept) : NULL;
        Py_XDECREF(text);
    }
    dump_free(&d);
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

static PyMethodDef functions[] = {
    {"dump_entries", entries, METH_VARARGS,
     "dump_entries(calls, mindspore, numbers, stored, quote, other, about, free_name) -> (text, names, calls)"},
    {"dump_construct", construct, METH_VARARGS, "dump_construct(names, calls, mindspore, quote) -> text of construct.json"},
    {NULL, NULL, 0, NULL}};

int text_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
