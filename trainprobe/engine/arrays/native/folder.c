/* The folder of one rank and step written by system calls alone, without the interpreter's lock: each of some twenty calls would
   otherwise give it up and win it back from the training (see engine/dumps/layout.py, which does the same). */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects.h"

#define PARTIAL ".partial"
#define LONGEST 4096
#define MOST_FILES 16

typedef struct {
    const char *name, *data;
    Py_ssize_t size;
} File;

static int write_whole(int file, const char *data, Py_ssize_t size) {
    while (size > 0) {
        ssize_t done = write(file, data, (size_t)size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -1;
        data += done, size -= done;
    }
    return 0;
}

/* path is left at what the error is about. */
static int write_file(const char *folder, const File *f, char *path) {
    char whole[LONGEST];
    if (snprintf(whole, LONGEST, "%s/%s", folder, f->name) >= LONGEST || snprintf(path, LONGEST, "%s" PARTIAL, whole) >= LONGEST)
        return errno = ENAMETOOLONG, -1;
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) return -1;
    int failed = write_whole(file, f->data, f->size), error = errno; /* closing may set another */
    if (close(file) && !failed) failed = -1, error = errno;
    if (failed) return errno = error, -1;
    return rename(path, whole);
}

/* 1: written. 0: something is there already, or there is nothing to make the folder in; nothing was done. -1: errno and path. */
static int write_all(const char *step, const char *hidden, const char *final, const File *files, Py_ssize_t n, char *path) {
    struct stat about;
    if (mkdir(step, 0777) && errno != EEXIST) return 0;
    if (lstat(final, &about) == 0 || mkdir(hidden, 0777)) return 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (write_file(hidden, &files[i], path)) return -1;
    snprintf(path, LONGEST, "%s", final);
    return rename(hidden, final) ? -1 : 1;
}

static int read_files(PyObject *list, File *files, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PyList_GetItem(list, i);
        char *data;
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) return PyErr_SetString(PyExc_TypeError, "files are (name, bytes)"), -1;
        if (!(files[i].name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), NULL))) return -1;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &data, &files[i].size)) return -1;
        files[i].data = data;
    }
    return 0;
}

static PyObject *write_folder(PyObject *module, PyObject *args) {
    PyObject *names[3] = {NULL, NULL, NULL}, *list, *answer = NULL;
    File files[MOST_FILES];
    char path[LONGEST] = "";
    (void)module;
    if (!PyArg_ParseTuple(args, "O&O&O&O!", PyUnicode_FSConverter, &names[0], PyUnicode_FSConverter, &names[1], PyUnicode_FSConverter,
                          &names[2], &PyList_Type, &list))
        goto done;
    Py_ssize_t n = PyList_Size(list);
    if (n > MOST_FILES) {
        PyErr_Format(PyExc_ValueError, "at most %d files; got %zd", MOST_FILES, n);
        goto done;
    }
    if (read_files(list, files, n)) goto done;
    const char *step = PyBytes_AsString(names[0]), *hidden = PyBytes_AsString(names[1]), *final = PyBytes_AsString(names[2]);
    int written, error;
    PyThreadState *state = PyEval_SaveThread();
    written = write_all(step, hidden, final, files, n, path);
    error = errno;
    PyEval_RestoreThread(state);
    errno = error;
    answer = written < 0 ? PyErr_SetFromErrnoWithFilename(PyExc_OSError, path) : PyBool_FromLong(written);
done:
    for (int i = 0; i < 3; i++) Py_XDECREF(names[i]);
    return answer;
}

static PyMethodDef functions[] = {
    {"write_folder", write_folder, METH_VARARGS,
     "write_folder(step, hidden, final, files) -> whether it was\n\nMake the folder `hidden` in `step` with these (name, bytes) and "
     "rename it to `final`. False where one of them is there already or `step` cannot be made: nothing was done. Raises OSError."},
    {NULL, NULL, 0, NULL}};

int folder_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
