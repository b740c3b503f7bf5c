/* The folders of one rank, one a step, written by system calls alone and without the interpreter's lock: each of some twenty calls
   a step would otherwise give it up and win it back from the training (see engine/dumps/layout.py, which does the same). */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects.h"

#define PARTIAL ".partial"
#define LONGEST 4096
#define MOST_FILES 4

typedef struct {
    const char *name, *data;
    Py_ssize_t size;
} File;

typedef struct {
    PyObject *names[3];
    const char *step, *hidden, *final;
    Py_ssize_t n;
    File files[MOST_FILES];
} Folder;

static int write_whole(int file, const char *data, Py_ssize_t size) {
    while (size > 0) {
        ssize_t done = write(file, data, (size_t)size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -1;
        data += done, size -= done;
    }
    return 0;
}

static int write_file(const char *folder, const File *f) {
    char path[LONGEST], whole[LONGEST];
    if (snprintf(whole, LONGEST, "%s/%s", folder, f->name) >= LONGEST || snprintf(path, LONGEST, "%s" PARTIAL, whole) >= LONGEST)
        return -1;
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file < 0) return -1;
    int failed = write_whole(file, f->data, f->size);
    return close(file) || failed ? -1 : rename(path, whole);
}

/* -1 where something is there already, or the disk refuses; what was begun is in `hidden` then. */
static int write_folder(const Folder *f) {
    struct stat about;
    if (mkdir(f->step, 0777) && errno != EEXIST) return -1;
    if (lstat(f->final, &about) == 0 || mkdir(f->hidden, 0777)) return -1;
    for (Py_ssize_t i = 0; i < f->n; i++)
        if (write_file(f->hidden, &f->files[i])) return -1;
    return rename(f->hidden, f->final);
}

static int read_files(PyObject *list, Folder *f) {
    f->n = PyList_Size(list);
    if (f->n > MOST_FILES) return PyErr_Format(PyExc_ValueError, "at most %d files; got %zd", MOST_FILES, f->n), -1;
    for (Py_ssize_t i = 0; i < f->n; i++) {
        PyObject *pair = PyList_GetItem(list, i);
        char *data;
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) return PyErr_SetString(PyExc_TypeError, "files are (name, bytes)"), -1;
        if (!(f->files[i].name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), NULL))) return -1;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &data, &f->files[i].size)) return -1;
        f->files[i].data = data;
    }
    return 0;
}

static int read_folder(PyObject *item, Folder *f) {
    PyObject *list;
    if (!PyTuple_Check(item)) return PyErr_SetString(PyExc_TypeError, "folders are (step, hidden, final, files)"), -1;
    if (!PyArg_ParseTuple(item, "O&O&O&O!", PyUnicode_FSConverter, &f->names[0], PyUnicode_FSConverter, &f->names[1],
                          PyUnicode_FSConverter, &f->names[2], &PyList_Type, &list))
        return -1;
    f->step = PyBytes_AsString(f->names[0]), f->hidden = PyBytes_AsString(f->names[1]), f->final = PyBytes_AsString(f->names[2]);
    return read_files(list, f);
}

static PyObject *write_folders(PyObject *module, PyObject *list) {
    PyObject *answer = NULL;
    (void)module;
    if (!PyList_Check(list)) return PyErr_SetString(PyExc_TypeError, "folders are a list"), NULL;
    Py_ssize_t n = PyList_Size(list), read = 0, done = 0;
    Folder *folders = PyMem_Calloc((size_t)n + 1, sizeof *folders);
    if (!folders) return PyErr_NoMemory();
    for (; read < n; read++)
        if (read_folder(PyList_GetItem(list, read), &folders[read])) goto end;
    PyThreadState *state = PyEval_SaveThread();
    while (done < n && !write_folder(&folders[done])) done++;
    PyEval_RestoreThread(state);
    answer = PyLong_FromSsize_t(done);
end:
    for (Py_ssize_t i = 0; i < n; i++)
        for (int j = 0; j < 3; j++) Py_XDECREF(folders[i].names[j]);
    PyMem_Free(folders);
    return answer;
}

static PyMethodDef functions[] = {
    {"write_folders", write_folders, METH_O,
     "write_folders([(step, hidden, final, files), ...]) -> how many were written\n\nMake each folder `hidden` in `step` with these "
     "(name, bytes) and rename it to `final`, up to the first that cannot be written, or is there already; of that one a part may "
     "be in `hidden`."},
    {NULL, NULL, 0, NULL}};

int folder_fill(PyObject *module) { return PyModule_AddFunctions(module, functions); }
