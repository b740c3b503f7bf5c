/* Trees of arguments and results. */
#include "tape.h"

#define DEEPEST 400
#define TEXT 512
#define UNWATCHED 4 /* levels in which nobody asks whether a container holds itself */

#define MOST 100000 /* containers in a tree: one that holds itself would never end */

/* Text that can be written: half of a surrogate pair becomes its escape. Takes the reference. */
static PyObject *in_utf8(PyObject *x) {
    Py_ssize_t length;
    if (!x || PyUnicode_AsUTF8AndSize(x, &length)) return x;
    PyErr_Clear();
    PyObject *bytes = PyUnicode_AsEncodedString(x, "utf-8", "backslashreplace");
    Py_DECREF(x);
    x = bytes ? PyUnicode_FromEncodedObject(bytes, "utf-8", "strict") : NULL;
    Py_XDECREF(bytes);
    return x;
}

static PyObject *cut_text(PyObject *x) {
    if (PyUnicode_GetLength(x) <= TEXT) return in_utf8(Py_NewRef(x));
    PyObject *front = PyUnicode_Substring(x, 0, TEXT);
    PyObject *cut = front ? PyUnicode_FromFormat("%U%s", front, "\xe2\x80\xa6") : NULL;
    Py_XDECREF(front);
    return in_utf8(cut);
}

PyObject *key_text(PyObject *key) {
    PyObject *text = PyObject_Str(key);
    if (!text && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        text = PyUnicode_FromString("?");
    }
    return in_utf8(text);
}

static PyObject *kept_tensor(Tape *self, PyObject *x, long flags, PyObject *path, int held) {
    PyObject *value = tape_look(self, x, flags & KINDS, held);
    if (!value || Py_TYPE(value) != value_type) return value;
    if (((Value *)value)->tensor == NULL && ((Value *)value)->note == NULL && self->keep != Py_None) {
        int kept = flags >> CUT ? 0 : tape_gather(self, x, (Value *)value, path);
        PyObject *cut = kept == 0 ? PyLong_FromLong(flags >> CUT) : NULL;
        if (kept >= 0) ((Value *)value)->tensor = Py_NewRef(path);
        PyObject *done = cut ? PyObject_CallFunctionObjArgs(self->keep, path, x, value, cut, NULL) : NULL;
        Py_XDECREF(cut);
        Py_XDECREF(done);
        if (kept < 0 || (kept == 0 && !done)) {
            Py_DECREF(value);
            return NULL;
        }
    }
    return value;
}

static PyObject *rare(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyObject *number = PyLong_FromLong(flags), *deep = PyLong_FromLong(depth), *answer = NULL;
    if (number && deep) answer = PyObject_CallFunctionObjArgs(self->rare, x, number, path ? path : Py_None, deep, NULL);
    Py_XDECREF(number);
    Py_XDECREF(deep);
    return answer;
}

static PyObject *tree_of(Tape *self, PyObject *x, long flags, PyObject *path, int depth);

static PyObject *listed(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    int tuple = PyTuple_CheckExact(x);
    Py_ssize_t n = tuple ? PyTuple_Size(x) : PyList_Size(x);
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *item = Py_NewRef(tuple ? PyTuple_GetItem(x, i) : i < PyList_Size(x) ? PyList_GetItem(x, i) : Py_None);
        PyObject *below = path ? PyUnicode_FromFormat("%U.%zd", path, i) : NULL;
        PyObject *leaf = path && !below ? NULL : tree_of(self, item, flags, below, depth + 1);
        Py_XDECREF(below);
        Py_DECREF(item);
        if (!leaf) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, leaf);
    }
    if (list) PyObject_GC_UnTrack(list); /* a tree has no cycles: the collector need not walk it */
    return list;
}

static PyObject *named(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyObject *items = PyDict_Items(x),
             *dict = items ? PyDict_New() : NULL; /* a copy: looking may run code that changes x */
    for (Py_ssize_t i = 0; dict && i < PyList_Size(items); i++) {
        PyObject *pair = PyList_GetItem(items, i), *key = key_text(PyTuple_GetItem(pair, 0)), *below = NULL,
                 *leaf = NULL;
        if (key && path) below = PyUnicode_FromFormat("%U.%U", path, key);
        if (key && (below || !path)) leaf = tree_of(self, PyTuple_GetItem(pair, 1), flags, below, depth + 1);
        if (!leaf || PyDict_SetItem(dict, key, leaf)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(below);
        Py_XDECREF(leaf);
    }
    Py_XDECREF(items);
    return dict;
}

static void leave(PyObject *x) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Py_ReprLeave(x);
    PyErr_Restore(type, error, trace);
}

/* Whether one more container of this tree may be looked into. */
int tape_enter(Tape *self) { return self->entered++ < MOST; }

static PyObject *tree_of(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    PyTypeObject *kind = Py_TYPE(x);
    if (kind == self->plain[0] || kind == self->plain[1])
        return path && flags & SAVE ? kept_tensor(self, x, flags, path, 0) : tape_look(self, x, flags, 0);
    if (x == Py_None || kind == &PyFloat_Type || kind == &PyBool_Type) return Py_NewRef(x);
    if (kind == &PyLong_Type) {
        int large;
        PyLong_AsLongLongAndOverflow(x, &large);
        return large ? rare(self, x, flags, path, depth) : Py_NewRef(x);
    }
    if (kind == &PyUnicode_Type) return cut_text(x);
    if (depth <= DEEPEST && (kind == &PyTuple_Type || kind == &PyList_Type || kind == &PyDict_Type)) {
        if (depth == 0) self->entered = 0;
        if (!tape_enter(self)) return rare(self, x, flags, path, DEEPEST + 1);
        int watched = depth >= UNWATCHED, within = watched ? Py_ReprEnter(x) : 0;
        if (within) return within > 0 ? rare(self, x, flags, path, DEEPEST + 1) : NULL;
        PyObject *tree =
            kind == &PyDict_Type ? named(self, x, flags, path, depth) : listed(self, x, flags, path, depth);
        if (watched) leave(x);
        return tree;
    }
    return rare(self, x, flags, path, depth);
}

/* Whether what was gathered is reduced; takes the reference, and gives it back where it is. */
PyObject *once_reduced(Tape *self, int begun, PyObject *found) {
    if (tape_gather_end(self, begun)) Py_CLEAR(found);
    return found;
}

PyObject *tape_tree(Tape *self, PyObject *x, long flags, PyObject *path, int depth) {
    int begun = tape_gather_begin(self);
    return once_reduced(self, begun, tree_of(self, x, flags, path, depth));
}

/* The same for a tensor that is held for the rest of the step, such as a parameter. */
PyObject *tape_held(Tape *self, PyObject *t, long flags, PyObject *path) {
    if (!tape_is_plain(self, t)) return tape_tree(self, t, flags, path, 0);
    int begun = tape_gather_begin(self);
    return once_reduced(self, begun,
                        path && flags & SAVE ? kept_tensor(self, t, flags, path, 1) : tape_look(self, t, flags, 1));
}
