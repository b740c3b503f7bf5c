/* The torch calls of a step (see engine/capture/torch_ops.py): what goes in, what comes out, and the
   gradients that pass the autograd node of each call. */
#include "op_watch.h"

static PyObject *t_op, *t_forward, *t_recompute, *t_backward, *t_micro, *t_register, *t_written, *t_generator, *t_after,
    *t_given, *t_result, *t_out;
/* ---- before and after a call ------------------------------------------------------------------------------------- */

static Py_ssize_t counted(OpWatch *self, PyObject *name) {
    PyObject *known = PyDict_GetItemWithError(self->counts, name);
    if (!known && PyErr_Occurred()) return -1;
    Py_ssize_t n = known ? PyLong_AsSsize_t(known) : 0;
    PyObject *next = PyLong_FromSsize_t(n + 1);
    int failed = !next || PyDict_SetItem(self->counts, name, next);
    Py_XDECREF(next);
    return failed ? -1 : n;
}

static PyObject *joined(PyObject *name, Py_ssize_t number, PyObject *phase, const char *side) {
    return PyUnicode_FromFormat("%U.%zd.%U%s", name, number, phase, side);
}

static int look_at_inputs(OpWatch *self, Call *call, long flags, PyObject *args, PyObject *kwargs) {
    if (self->inputs) {
        PyObject *at = flags & SAVE ? joined(call->name, call->call, call->phase, ".input") : NULL;
        if (flags & SAVE && !at) return -1;
        call->args = tape_tree(self->native, args, flags, at, 0);
        Py_XDECREF(at);
        if (!call->args) return -1;
    }
    if (self->kwargs && kwargs && kwargs != Py_None && PyDict_Size(kwargs) > 0) {
        PyObject *at = flags & SAVE ? joined(call->name, call->call, call->phase, ".kwargs") : NULL;
        if (flags & SAVE && !at) return -1;
        call->kwargs = tape_tree(self->native, kwargs, flags, at, 0);
        Py_XDECREF(at);
        if (!call->kwargs) return -1;
    }
    return 0;
}

/* Whether a call is handed memory that is no value yet, or hands some out (see engine/capture/unwritten_memory.py). */
static int meets_unwritten(OpWatch *self, PyObject *spec, PyObject *kwargs) {
    if (PyTuple_GetItem(spec, 3) == Py_True || PyObject_IsTrue(PyTuple_GetItem(spec, 7)) > 0) return 1;
    return PyDict_Size(self->unwritten) > 0 || (PyDict_Check(kwargs) && PyDict_GetItemWithError(kwargs, t_out));
}

/* The inputs as they are to be recorded. */
static int look_at_given(OpWatch *self, Call *call, PyObject *spec, long flags, PyObject *args, PyObject *kwargs) {
    if (!meets_unwritten(self, spec, kwargs)) return look_at_inputs(self, call, flags, args, kwargs);
    PyObject *shown = PyObject_CallMethodObjArgs(self->memory, t_given, spec, args, kwargs, NULL);
    int failed = !shown || look_at_inputs(self, call, flags, PyTuple_GetItem(shown, 0), PyTuple_GetItem(shown, 1));
    Py_XDECREF(shown);
    return failed ? -1 : 0;
}

/* Keep a tree beside the arguments of a call under a name of its own. Takes the reference. */
static int keep_beside(OpWatch *self, Call *call, PyObject *name, PyObject *tree) {
    if (tree && !call->params) call->params = PyDict_New();
    int failed = !tree || !call->params || PyDict_SetItem(call->params, name, tree);
    Py_XDECREF(tree);
    if (!failed && self->native && (call->phase == t_forward || self->recompute))
        failed = tape_report(self->native, call, PARAMS);
    return failed ? -1 : 0;
}

/* The state of the generator that a call is about to draw from, where values are saved and `generator` knows it. */
static int keep_generator(OpWatch *self, Call *call, PyObject *args, PyObject *kwargs) {
    PyObject *state = PyObject_CallFunctionObjArgs(self->generator, call->name, args, kwargs ? kwargs : Py_None, NULL);
    if (!state || state == Py_None) {
        Py_XDECREF(state);
        return state ? 0 : -1;
    }
    PyObject *at = joined(call->name, call->call, call->phase, ".generator");
    PyObject *tree = at ? tape_tree(self->native, state, SAVE, at, 0) : NULL;
    Py_XDECREF(at);
    Py_DECREF(state);
    return keep_beside(self, call, t_generator, tree);
}

/* The call, NULL where it is not recorded or with an exception set. */
static Call *before(OpWatch *self, PyObject *spec, long flags, PyObject *args, PyObject *kwargs) {
    PyObject *name = PyTuple_GetItem(spec, 0);
    Py_ssize_t running = PyList_Size(self->inside);
    PyObject *above = running > 0 ? PyList_GetItem(self->inside, running - 1) : NULL,
             *parent = above ? above : self->parent;
    PyObject *micro = NULL, *again = NULL;
    Py_ssize_t number = -1, stack = -1;
    Call *call = NULL;
    if (graph_task_now() != -1) {
        again = call_two(self->repeats, name, parent ? parent : Py_None);
        if (!again || again == Py_None) goto done; /* what Python does in a backward pass is no forward */
        number = PyLong_AsSsize_t(again);
    }
    if (PyErr_Occurred()) goto done;
    int recompute = again != NULL;
    if (recompute && parent && Py_TYPE(parent) == call_type) micro = Py_XNewRef(((Call *)parent)->micro);
    if (!micro) micro = PyObject_GetAttr(self->tape, t_micro);
    if (!micro || micro_is_wanted(&self->gate, micro) <= 0) goto done;
    if (number < 0) number = counted(self, name);
    if (number < 0) goto done;
    if (self->stacks != Py_None) {
        Py_ssize_t base = above && Py_TYPE(above) == call_type ? ((Call *)above)->stack : -1;
        stack = stacks_capture(self->stacks, base, self->stop, 0);
        if (stack == -2) goto done;
    }
    call = call_new(t_op, name, number, recompute ? t_recompute : t_forward, NULL, micro, parent, stack);
    if (!call || !self->forward) goto done;
    int draws = flags & SAVE && PyTuple_GetItem(spec, 4) == Py_True;
    if (look_at_given(self, call, spec, flags, args, kwargs) || (draws && keep_generator(self, call, args, kwargs)) ||
        ((!recompute || self->recompute) && self->calls && PyList_Append(self->calls, (PyObject *)call)) ||
        ((!recompute || self->recompute) && self->native && tape_report(self->native, call, ARGS | KWARGS))) {
        Py_DECREF((PyObject *)call);
        call = NULL;
    }
done:
    Py_XDECREF(again);
    Py_XDECREF(micro);
    return call;
}

static int keep_hook(OpWatch *self, OpHook *hook) {
    if (self->n_hooks == self->room) {
        Py_ssize_t room = self->room ? self->room * 2 : 256;
        OpHook **hooks = PyMem_Realloc(self->hooks, (size_t)room * sizeof *hooks);
        if (!hooks) return PyErr_NoMemory(), -1;
        self->hooks = hooks, self->room = room;
    }
    self->hooks[self->n_hooks++] = (OpHook *)Py_NewRef((PyObject *)hook);
    return 0;
}

static int watch_node(OpWatch *self, PyObject *t, long long floor, Call *call, long flags, OpHook **hook,
                      PyObject *made) {
    int tensor = is_tensor(t);
    if (tensor <= 0) return tensor;
    PyObject *off = tape_is_plain(self->native, t) ? NULL : functions_off(),
             *node = PyErr_Occurred() ? NULL : node_behind(t);
    modes_on(off);
    if (!node) return PyErr_Occurred() ? -1 : 0;
    long long number = sequence_of(node);
    int known = number < floor || PyErr_Occurred();
    for (Py_ssize_t i = 0; !known && made && i < PyList_Size(made); i++) known = PyList_GetItem(made, i) == node;
    int failed = PyErr_Occurred() != NULL;
    if (!known && !failed) {
        if (!*hook) {
            *hook = (OpHook *)PyType_GenericAlloc(op_hook_type, 0);
            if (*hook) {
                (*hook)->watch = self, (*hook)->flags = flags, (*hook)->forward = (Call *)Py_NewRef((PyObject *)call);
                failed = keep_hook(self, *hook);
            } else {
                failed = 1;
            }
        }
        PyObject *handle = failed ? NULL : PyObject_CallMethodObjArgs(node, t_register, *hook, NULL);
        failed = !handle || (made && PyList_Append(made, node));
        Py_XDECREF(handle);
    }
    Py_DECREF(node);
    return failed ? -1 : 0;
}

/* What an op may have written without a trace: its arguments at the positions whose bits are set, all tensors of its
   lists
   (`_fused_adamw_`), and what it was given by keyword. */
static void forget_written(Tape *native, long written, PyObject *args, PyObject *kwargs) {
    PyObject *name, *value;
    Py_ssize_t at = 0, n = PyTuple_Check(args) ? PyTuple_Size(args) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *x = PyTuple_GetItem(args, i);
        int tuple = PyTuple_CheckExact(x), list = PyList_CheckExact(x);
        if (i < 32 && written >> i & 1) tape_touched(native, x);
        for (Py_ssize_t k = 0; (tuple || list) && k < (tuple ? PyTuple_Size(x) : PyList_Size(x)); k++)
            tape_touched(native, tuple ? PyTuple_GetItem(x, k) : PyList_GetItem(x, k));
    }
    while (PyDict_Check(kwargs) && PyDict_Next(kwargs, &at, &name, &value)) tape_touched(native, value);
}

/* Look again at what an op has written and does not return, by its position or keyword. */
static int keep_written(OpWatch *self, Call *call, long written, long flags, PyObject *args, PyObject *kwargs,
                        PyObject *out) {
    static const char *const named[] = {"running_mean", "running_var"};
    PyObject *tree = PyDict_New();
    Py_ssize_t n = PyTuple_Check(args) ? PyTuple_Size(args) : 0;
    int failed = !tree;
    for (Py_ssize_t i = 0; !failed && i < n + 2; i++) {
        int positional = i < n;
        if (positional ? !(i < 32 && written >> i & 1) : !PyDict_Check(kwargs)) continue;
        PyObject *x = positional ? PyTuple_GetItem(args, i) : PyDict_GetItemString(kwargs, named[i - n]);
        if (!x || x == Py_None || x == out) continue;
        PyObject *key = positional ? PyUnicode_FromFormat("%zd", i) : PyUnicode_FromString(named[i - n]);
        PyObject *at =
            key ? PyUnicode_FromFormat("%U.%zd.%U.written.%U", call->name, call->call, call->phase, key) : NULL;
        PyObject *leaf = at ? tape_tree(self->native, x, flags, at, 0) : NULL;
        failed = !leaf || PyDict_SetItem(tree, key, leaf);
        Py_XDECREF(key), Py_XDECREF(at), Py_XDECREF(leaf);
    }
    if (!failed && PyDict_Size(tree) > 0) return keep_beside(self, call, t_written, tree);
    Py_XDECREF(tree);
    return failed ? -1 : 0;
}

/* Keep an argument that has changed, though the call does not say that it writes there. place: its position, keyword,
 * or place in a list. */
static int keep_changed(OpWatch *self, Call *call, PyObject **tree, long flags, PyObject *x, PyObject *place,
                        Py_ssize_t item) {
    Value *before = is_tensor(x) == 1 ? tape_overwritten(self->native, x) : NULL;
    if (!before) return PyErr_Occurred() ? -1 : 0;
    PyObject *key = item < 0 ? PyObject_Str(place) : PyUnicode_FromFormat("%S.%zd", place, item);
    PyObject *at = key ? PyUnicode_FromFormat("%U.%zd.%U.after.%U", call->name, call->call, call->phase, key) : NULL;
    PyObject *now = at ? tape_tree(self->native, x, flags, at, 0) : NULL,
             *pair = now ? Py_BuildValue("[OO]", before, now) : NULL;
    if (pair && !*tree) *tree = PyDict_New();
    int failed = !pair || !*tree || PyDict_SetItem(*tree, key, pair);
    Py_XDECREF(pair), Py_XDECREF(now), Py_XDECREF(at), Py_XDECREF(key);
    Py_DECREF((PyObject *)before);
    return failed ? -1 : 0;
}

static int keep_changed_in(OpWatch *self, Call *call, PyObject **tree, long flags, PyObject *x, PyObject *out,
                           PyObject *place) {
    int tuple = PyTuple_CheckExact(x), list = PyList_CheckExact(x), failed = 0;
    if (x == out) return 0;
    if (!tuple && !list) return keep_changed(self, call, tree, flags, x, place, -1);
    for (Py_ssize_t k = 0; !failed && k < (tuple ? PyTuple_Size(x) : PyList_Size(x)); k++) {
        PyObject *item = tuple ? PyTuple_GetItem(x, k) : PyList_GetItem(x, k);
        failed = item != out && keep_changed(self, call, tree, flags, item, place, k);
    }
    return failed ? -1 : 0;
}

/* The arguments of a call that changed and that it does not say it writes, before and after it. */
static int keep_after(OpWatch *self, Call *call, long written, long flags, PyObject *args, PyObject *kwargs,
                      PyObject *out) {
    PyObject *tree = NULL, *name, *value;
    Py_ssize_t at = 0, n = PyTuple_Check(args) ? PyTuple_Size(args) : 0;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        if (i < 32 && written >> i & 1) continue;
        PyObject *place = PyLong_FromSsize_t(i);
        failed = !place || keep_changed_in(self, call, &tree, flags, PyTuple_GetItem(args, i), out, place);
        Py_XDECREF(place);
    }
    while (!failed && PyDict_Check(kwargs) && PyDict_Next(kwargs, &at, &name, &value))
        if (PyUnicode_CompareWithASCIIString(name, "out"))
            failed = keep_changed_in(self, call, &tree, flags, value, out, name);
    if (!failed && tree) return keep_beside(self, call, t_after, tree);
    Py_XDECREF(tree);
    return failed ? -1 : 0;
}

static int look_at_results(OpWatch *self, Call *call, long flags, PyObject *out) {
    PyObject *at = flags & SAVE ? joined(call->name, call->call, call->phase, ".output") : NULL;
    if (flags & SAVE && !at) return -1;
    PyObject *tree = tape_tree(self->native, out, flags, at, 0);
    Py_XDECREF(at);
    if (!tree) return -1;
    Py_XDECREF(call->out);
    call->out = tree;
    return self->native && (call->phase == t_forward || self->recompute) ? tape_report(self->native, call, OUT) : 0;
}

static int after(OpWatch *self, PyObject *spec, long flags, Call *call, long long floor, PyObject *args,
                 PyObject *kwargs, PyObject *out) {
    if (!self->native) return 0; /* the step has ended meanwhile */
    long written = PyLong_AsLong(PyTuple_GetItem(spec, 2));
    if (written > 0) forget_written(self->native, written, args, kwargs);
    int unwritten = PyTuple_GetItem(spec, 3) == Py_True, failed = 0;
    PyObject *shown = NULL;
    if (meets_unwritten(self, spec, kwargs)) {
        shown = PyObject_CallMethodObjArgs(self->memory, t_result, spec, args, kwargs, out, NULL);
        if (!shown) return -1;
    }
    if (self->forward && self->outputs && !unwritten) failed = look_at_results(self, call, flags, shown ? shown : out);
    Py_XDECREF(shown);
    if (failed) return -1;
    if (written > 0 && flags & SAVE && self->forward && self->inputs && self->native &&
        keep_written(self, call, written, flags, args, kwargs, out))
        return -1;
    if (self->looks_after && flags & SAVE && self->native && keep_after(self, call, written, flags, args, kwargs, out))
        return -1;
    if (!self->backward || !self->native) return 0;
    OpHook *hook = NULL;
    if (PyTuple_Check(out) || PyList_Check(out)) {
        PyObject *made = PyList_New(0);
        Py_ssize_t n = PySequence_Size(out);
        for (Py_ssize_t i = 0; made && !failed && i < n; i++) {
            PyObject *t = PySequence_GetItem(out, i);
            failed = !t || watch_node(self, t, floor, call, flags, &hook, made);
            Py_XDECREF(t);
        }
        failed |= !made;
        Py_XDECREF(made);
    } else {
        failed = watch_node(self, out, floor, call, flags, &hook, NULL);
    }
    Py_XDECREF((PyObject *)hook);
    return failed ? -1 : 0;
}

static PyObject *call_it(PyObject *func, PyObject *args, PyObject *kwargs) {
    if (!PyTuple_Check(args)) return PyErr_Format(PyExc_TypeError, "arguments of a torch function must be a tuple");
    return PyObject_Call(func, args, kwargs == Py_None ? NULL : kwargs);
}

static PyObject *handle_wanted(OpWatch *self, PyObject *spec, PyObject *func, PyObject *args, PyObject *kwargs) {
    long flags = PyLong_AsLong(PyTuple_GetItem(spec, 1));
    PyObject *off =
        modes_off(); /* those of the program are still on where a function of its own is called (OpTap.call) */
    Tape *tape = (Tape *)Py_NewRef((PyObject *)self->native); /* values of one moment are reduced together */
    int begun = tape_gather_begin(tape);
    Call *call = PyErr_Occurred() ? NULL : before(self, spec, flags, args, kwargs);
    if (tape_gather_end(tape, begun)) Py_CLEAR(call);
    modes_on(off);
    if (PyErr_Occurred() && give_to_guard(self->fault)) {
        Py_XDECREF((PyObject *)call);
        Py_DECREF((PyObject *)tape);
        return NULL;
    }
    long long floor = call && self->backward ? sequence_now() : 0;
    PyObject *out = call_it(func, args, kwargs);
    if (out && call) {
        off = modes_off();
        begun = tape_gather_begin(tape);
        int failed = PyErr_Occurred() || after(self, spec, flags, call, floor, args, kwargs, out);
        failed |= tape_gather_end(tape, begun) != 0;
        modes_on(off);
        if (failed && give_to_guard(self->fault)) Py_CLEAR(out);
    }
    Py_XDECREF((PyObject *)call);
    Py_DECREF((PyObject *)tape);
    return out;
}

PyObject *op_handle(OpWatch *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 4) return PyErr_Format(PyExc_TypeError, "handle takes mode, func, types, args, kwargs; got %zd", nargs);
    args++;
    PyObject *func = args[0], *kwargs = nargs > 4 ? args[3] : Py_None, *out;
    PyObject *spec = self->native ? PyDict_GetItemWithError(self->names, func) : Py_None;
    Py_XINCREF(spec);
    self->depth++;
    if (!spec) {
        PyErr_Clear();
        spec = call_one(self->learn, func);
    }
    if (!spec) {
        out = NULL;
    } else if (spec == Py_None) {
        out = call_it(func, args[2], kwargs);
    } else {
        out = handle_wanted(self, spec, func, args[2], kwargs);
    }
    self->depth--;
    Py_XDECREF(spec);
    return out;
}
int ops_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {{&t_op, "op"},
                 {&t_forward, "forward"},
                 {&t_recompute, "recompute"},
                 {&t_backward, "backward"},
                 {&t_micro, "micro"},
                 {&t_register, "register_hook"},
                 {&t_written, "written"},
                 {&t_generator, "generator"},
                 {&t_after, "after"},
                 {&t_given, "given"},
                 {&t_result, "result"},
                 {&t_out, "out"}};
    (void)module;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return -1;
    return 0;
}
