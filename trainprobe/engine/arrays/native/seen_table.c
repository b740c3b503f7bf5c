/* What the tape has looked at: recognised by the tensor's identity, held weakly, so that nothing is kept alive and an address that is used
   again is never mistaken. */
#include "native_tape.h"

void seen_forget(Seen *seen) {
    Py_CLEAR(seen->known);
    Py_CLEAR(seen->shape);
    PyObject *value = (PyObject *)seen->value;
    seen->value = NULL;
    Py_XDECREF(value);
}

static uint32_t *seen_at(const SeenTable *table, PyObject *t) { /* its place, or the one where it would stand */
    size_t at = mixed(t) & (size_t)(table->places_n - 1);
    while (table->places[at] && table->items[table->places[at] - 1].id != t) at = (at + 1) & (size_t)(table->places_n - 1);
    return &table->places[at];
}

Seen *seen_find(const SeenTable *table, PyObject *t) {
    uint32_t number = table->places_n ? *seen_at(table, t) : 0;
    return number ? &table->items[number - 1] : NULL;
}

/* Make room; what was forgotten leaves. */
static int seen_grow(SeenTable *table) {
    Py_ssize_t alive = 0, kept = 0;
    for (Py_ssize_t i = 0; i < table->used; i++) alive += table->items[i].known != NULL;
    Py_ssize_t room = table->room ? (alive * 2 > table->room ? table->room * 2 : table->room) : 256;
    Seen *seen = PyMem_Malloc((size_t)room * sizeof *seen);
    uint32_t *places = PyMem_Calloc((size_t)room * 2, sizeof *places);
    if (!seen || !places) {
        PyMem_Free(seen), PyMem_Free(places);
        return PyErr_NoMemory(), -1;
    }
    for (Py_ssize_t i = 0; i < table->used; i++)
        if (table->items[i].known) seen[kept++] = table->items[i];
    PyMem_Free(table->items), PyMem_Free(table->places);
    table->items = seen, table->places = places, table->room = room, table->places_n = room * 2, table->used = kept;
    for (Py_ssize_t i = 0; i < kept; i++) *seen_at(table, seen[i].id) = (uint32_t)i + 1;
    return 0;
}

static Seen *seen_place(SeenTable *table, PyObject *t) {
    Seen *found = seen_find(table, t);
    if (found) {
        seen_forget(found);
        return found;
    }
    if (table->used == table->room && seen_grow(table)) return NULL;
    *seen_at(table, t) = (uint32_t)++table->used;
    table->items[table->used - 1] = (Seen){.id = t};
    return &table->items[table->used - 1];
}

void seen_clear(SeenTable *table) {
    Seen *seen = table->items;
    Py_ssize_t used = table->used;
    PyMem_Free(table->places);
    table->items = NULL, table->places = NULL, table->room = table->places_n = table->used = 0;
    for (Py_ssize_t i = 0; i < used; i++) seen_forget(&seen[i]);
    PyMem_Free(seen);
}

int seen_is(const Seen *seen, PyObject *t) { return (seen->held ? seen->known : PyWeakref_GetObject(seen->known)) == t; }

int seen_note(SeenTable *table, Seen now) {
    now.known = now.held ? Py_NewRef(now.id) : PyWeakref_NewRef(now.id, NULL);
    Seen *seen = now.known ? seen_place(table, now.id) : NULL;
    if (!seen) {
        Py_XDECREF(now.known);
        return -1;
    }
    Py_INCREF(now.shape), Py_INCREF((PyObject *)now.value);
    *seen = now;
    return 0;
}
