/* The Python module: its types and kinds of elements, and a few functions about the machine. Limited API of
 * Python 3.10. */
#include <string.h>

#include "objects.h"

static PyObject *set_threads(PyObject *self, PyObject *n) {
    (void)self;
    long wanted = PyLong_AsLong(n);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    pool_threads((int)(wanted > 1000 ? 1000 : wanted));
    return PyLong_FromLong(pool_size());
}

static PyObject *get_threads(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(pool_size());
}

static PyObject *use(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *text = PyUnicode_AsUTF8String(name);
    if (!text) return NULL;
    int failed = kernels_select(PyBytes_AsString(text));
    Py_DECREF(text);
    if (failed) return PyErr_Format(PyExc_ValueError, "this machine or build has no %R (avx2, baseline)", name);
    return PyUnicode_FromString(kernels.name);
}

static PyObject *instruction_set(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString(kernels.name);
}

static PyObject *bytes_at(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "bytes_at takes data_ptr, size");
    const void *data = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t size = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (size <= ALONE) return PyBytes_FromStringAndSize(data, size);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (!bytes) return NULL;
    char *copy = PyBytes_AsString(bytes);
    Py_BEGIN_ALLOW_THREADS memcpy(copy, data, (size_t)size);
    Py_END_ALLOW_THREADS return bytes;
}

static PyMethodDef functions[] = {
    {"bytes_at", (PyCFunction)(void (*)(void))bytes_at, METH_FASTCALL,
     "bytes_at(data_ptr, size) -> bytes, a copy of what lies there."},
    {"set_threads", set_threads, METH_O, "set_threads(n) -> threads in use. Numbers do not depend on it."},
    {"get_threads", get_threads, METH_NOARGS, "Return how many threads reduce a large tensor."},
    {"use", use, METH_O,
     "use(name) -> name. Choose the instruction set: avx2 or baseline; numbers do not depend on it."},
    {"instruction_set", instruction_set, METH_NOARGS, "Return the instruction set in use."},
    {NULL, NULL, 0, NULL}};

static const char *const dtype_names[DTYPES] = {
    "bool",      "uint8",      "int8",          "uint16",      "int16",           "uint32",          "int32",
    "uint64",    "int64",      "float16",       "bfloat16",    "float32",         "float64",         "complex32",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"};

static int fill(PyObject *module) {
    PyObject *codes = PyDict_New();
    int failed = !codes || PyModule_AddObjectRef(module, "DTYPES", codes);
    for (int code = 0; !failed && code < DTYPES; code++) {
        PyObject *value = PyLong_FromLong(code);
        failed = !value || PyDict_SetItemString(codes, dtype_names[code], value);
        Py_XDECREF(value);
    }
    Py_XDECREF(codes);
    int (*const fill[])(PyObject *) = {rows_fill,    torch_fill,        records_fill,   tape_fill,
                                       ops_fill,     op_watch_fill,     graph_fill,     nodes_fill,
                                       modules_fill, module_watch_fill, gradients_fill, parameter_gradients_fill,
                                       arena_fill,   journal_fill};
    for (size_t i = 0; !failed && i < sizeof fill / sizeof *fill; i++) failed = fill[i](module);
    return failed ? -1 : 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "One pass over a tensor in memory.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    kernels_init();
    fingerprint_init();
    pool_init();
    PyObject *module = PyModule_Create(&definition);
    if (module && fill(module)) Py_CLEAR(module);
    return module;
}
