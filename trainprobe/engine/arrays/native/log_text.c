/* The calls of the record log as JSON text (see dumps/record_log.py). Rare leaves are turned into text by the Python functions given. */
#include "text.h"

typedef struct {
    Text out, rows, head_of;
    PyObject *quote, *other, *heads, *sparse; /* heads: dict head → number; sparse: list of (number, value) with note, tensor or extra */
    Py_ssize_t values;
    uint64_t epoch;
} Log;

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
    return put_str_and_drop(t, call_one(l->other, x));
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
    l.epoch = next_epoch();
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
    {"log_calls", log_calls, METH_VARARGS, "log_calls(calls, quote, other) -> (text, heads, head of each value, row of each value, sparse)"},
    {NULL, NULL, 0, NULL}};

int log_text_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
