/* The module calls of a step (see engine/capture/torch_modules.py): inputs, parameters and outputs of each
   call, and what watches its gradients and those of parameters (gradients.c). */
#include "module_watch.h"

static PyObject *t_module, *t_forward, *t_recompute, *t_micro, *t_tripped, *t_begins, *t_pre_hooks;

/* ---- a call ------------------------------------------------------------------------------------------------------ */

/* Number a forward: the micro-batches of a module's calls stand in a list, by number; that of an only call stands by
 * itself. */
static Py_ssize_t forward_number(ModuleWatch *self, PyObject *name, PyObject *micro) {
    PyObject *calls = PyDict_GetItemWithError(self->forwards, name), *made = NULL;
    if (!calls) return PyErr_Occurred() || PyDict_SetItem(self->forwards, name, micro) ? -1 : 0;
    if (!PyList_Check(calls)) {
        made = PyList_New(1);
        if (made) PyList_SetItem(made, 0, Py_NewRef(calls));
        calls = made && !PyDict_SetItem(self->forwards, name, made) ? made : NULL;
    }
    Py_ssize_t number = calls ? PyList_Size(calls) : -1;
    if (calls && PyList_Append(calls, micro)) number = -1;
    Py_XDECREF(made);
    return number;
}

/* The latest forward of the micro-batch that is in its backward, among those not recomputed yet: backward is reverse.
 */
static Py_ssize_t recomputed_number(ModuleWatch *self, PyObject *name, PyObject *micro) {
    PyObject *calls = PyDict_GetItemWithError(self->forwards, name);
    Py_ssize_t found = -1, latest = -1;
    if (calls && !PyList_Check(calls)) return PyDict_SetItem(self->forwards, name, Py_None) ? -1 : 0;
    for (Py_ssize_t i = calls ? PyList_Size(calls) - 1 : -1; i >= 0 && found < 0; i--) {
        PyObject *of = PyList_GetItem(calls, i);
        if (of == Py_None) continue; /* recomputed */
        if (latest < 0) latest = i;
        if (PyObject_RichCompareBool(of, micro, Py_EQ) == 1) found = i;
    }
    if (found < 0) found = latest;
    if (found < 0) return PyErr_Occurred() ? -1 : 0;
    return PyList_SetItem(calls, found, Py_NewRef(Py_None)) ? -1 : found;
}

static Call *new_call(ModuleWatch *self, const ModuleInfo *info, int again, Call *parent) {
    PyObject *micro =
        again && self->backward_micro ? Py_NewRef(self->backward_micro) : PyObject_GetAttr(self->tape, t_micro);
    Py_ssize_t number = !micro  ? -1
                        : again ? recomputed_number(self, info->name, micro)
                                : forward_number(self, info->name, micro),
               stack = -1;
    Call *call = NULL;
    if (number >= 0 && self->stacks != Py_None) {
        stack = stacks_capture(self->stacks, parent ? parent->stack : -1, self->stop, 1);
        if (stack == -2) number = -1;
    }
    if (number >= 0)
        call = call_new(t_module, info->name, number, again ? t_recompute : t_forward, info->cls, micro,
                        (PyObject *)parent, stack);
    Py_XDECREF(micro);
    return call;
}

static PyObject *looked(ModuleWatch *self, const ModuleInfo *info, Call *call, PyObject *x, const char *place) {
    PyObject *at = info->flags & SAVE ? joined_name(info->name, info->cls, call->phase, call->call, place) : NULL;
    if (info->flags & SAVE && !at) return NULL;
    PyObject *tree = tape_tree(self->native, x, info->flags, at, 0);
    Py_XDECREF(at);
    return tree;
}

static PyObject *look_at_parameters(ModuleWatch *self, const ModuleInfo *info, Call *call) {
    PyObject *trees = PyDict_New();
    for (Py_ssize_t i = 0; trees && i < PyTuple_Size(info->parameters); i++) {
        PyObject *pair = PyTuple_GetItem(info->parameters, i), *name = PyTuple_GetItem(pair, 0), *at = NULL,
                 *tree = NULL;
        if (info->flags & SAVE)
            at = PyUnicode_FromFormat("Module.%U.%U.%U.%zd.parameters.%U", info->name, info->cls, call->phase,
                                      call->call, name);
        if (!PyErr_Occurred()) tree = tape_held(self->native, PyTuple_GetItem(pair, 1), info->flags, at);
        Py_XDECREF(at);
        if (!tree || PyDict_SetItem(trees, name, tree)) Py_CLEAR(trees);
        Py_XDECREF(tree);
    }
    return trees;
}

/* Whether hooks of the module run before it: they may fill its weights (Megatron's overlap_param_gather), which are
   then looked at behind the forward, as the module used them. -1 with an exception set. */
static int filled_by_hooks(PyObject *module) {
    PyObject *hooks = PyObject_GetAttr(module, t_pre_hooks);
    Py_ssize_t n = hooks ? PyObject_Size(hooks) : -1;
    Py_XDECREF(hooks);
    return n < 0 ? -1 : n > 0;
}

/* Look at the parameters once a call, before the forward or behind it. */
static int note_parameters(ModuleWatch *self, const ModuleInfo *info, Call *call) {
    if (!self->parameters || call->params || PyTuple_Size(info->parameters) <= 0) return 0;
    return (call->params = look_at_parameters(self, info, call)) ? 0 : -1;
}

static int look_at_inputs(ModuleWatch *self, const ModuleInfo *info, Call *call, PyObject *module, PyObject *args,
                          PyObject *kwargs) {
    if (self->inputs && !(call->args = looked(self, info, call, args, "input"))) return -1;
    if (self->kwargs && PyDict_Size(kwargs) > 0 && !(call->kwargs = looked(self, info, call, kwargs, "kwargs")))
        return -1;
    if (!self->parameters || PyTuple_Size(info->parameters) <= 0) return 0;
    int late = filled_by_hooks(module);
    return late ? (late < 0 ? -1 : 0) : note_parameters(self, info, call);
}

static int gradients_flow(ModuleWatch *self) {
    PyObject *answer = PyObject_CallNoArgs(self->grad_enabled);
    int flow = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return flow;
}

/* Record what goes in; the call is on the stack afterwards. flow: set where gradients flow. NULL with an exception set.
 */
static Call *enter(ModuleWatch *self, const ModuleInfo *info, PyObject *module, PyObject *args, PyObject *kwargs,
                   Edges *edges, int *flow) {
    int again = graph_task_now() != -1;
    Py_ssize_t running = PyList_Size(self->stack);
    Call *parent = running > 0 ? (Call *)PyList_GetItem(self->stack, running - 1) : NULL;
    if (PyErr_Occurred()) return NULL;
    if (!parent && !again) {
        PyObject *begun = PyObject_CallMethodObjArgs(self->tape, t_begins, info->name, NULL);
        if (!begun) return NULL;
        Py_DECREF(begun);
    }
    Call *call = new_call(self, info, again, parent);
    int wanted = call && info->selected && !(again && !self->recompute) ? micro_is_wanted(&self->gate, call->micro) : 0;
    int failed = !call || wanted < 0;
    if (!failed && wanted) {
        failed = self->forward && look_at_inputs(self, info, call, module, args, kwargs);
        if (!failed && self->backward && self->inputs) {
            *flow = gradients_flow(self);
            failed =
                *flow < 0 ||
                (*flow && (edges_of(self, args, NULL, -1, edges, 0) || edges_of(self, kwargs, NULL, -1, edges, 0)));
        }
        failed = failed || PyList_Append(self->calls, (PyObject *)call) ||
                 tape_report(self->native, call, ARGS | KWARGS | PARAMS);
    }
    if (failed || PyList_Append(self->stack, (PyObject *)call)) {
        Py_XDECREF((PyObject *)call);
        return NULL;
    }
    return call;
}

/* flow: whether gradients flowed when the module was entered; where they did not, they may since. */
static int leave(ModuleWatch *self, const ModuleInfo *info, Call *call, long long floor, Edges *edges, int flow,
                 PyObject *out) {
    if (!self->native || !info->selected) return 0;
    int wanted = micro_is_wanted(&self->gate, call->micro);
    if (wanted <= 0) return wanted;
    int seen = self->forward && !(call->phase == t_recompute && !self->recompute);
    if (seen && !call->params) {
        if (note_parameters(self, info, call)) return -1;
        if (self->native && call->params && tape_report(self->native, call, PARAMS)) return -1;
    }
    if (seen && self->outputs && self->native) {
        PyObject *tree = looked(self, info, call, out, "output");
        if (!tree) return -1;
        Py_XDECREF(call->out);
        call->out = tree;
        if (self->native && tape_report(self->native, call, OUT)) return -1;
    }
    if (!self->backward || !self->native) return 0;
    if (!flow) flow = gradients_flow(self);
    return flow <= 0 ? flow : watch_gradients(self, info, call, floor, edges, out);
}

static PyObject *call_original(PyObject *original, PyObject *module, PyObject *args, PyObject *kwargs) {
    Py_ssize_t n = PyTuple_Size(args);
    PyObject *all = PyTuple_New(n + 1);
    if (!all) return NULL;
    PyTuple_SetItem(all, 0, Py_NewRef(module));
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SetItem(all, i + 1, Py_NewRef(PyTuple_GetItem(args, i)));
    PyObject *out = PyObject_Call(original, all, PyDict_Size(kwargs) > 0 ? kwargs : NULL);
    Py_DECREF(all);
    return out;
}

/* Whether this call is to be recorded: not after a fault, not for a compiler, and not on a thread that is neither the
 * training's nor autograd's. */
static int recording(ModuleWatch *self) {
    if (!self->native) return 0;
    PyObject *tripped = PyObject_GetAttr(self->guard, t_tripped);
    int on = tripped == Py_None;
    Py_XDECREF(tripped);
    if (!on) return PyErr_Occurred() ? -1 : 0;
    int compiling = compiling_now();
    if (compiling) return compiling < 0 ? -1 : 0;
    if (PyThread_get_thread_ident() == self->thread || graph_task_now() != -1) return 1;
    PyObject *said = PyErr_Occurred() ? NULL : PyObject_CallNoArgs(self->other_thread);
    Py_XDECREF(said);
    return said ? 0 : -1;
}

static void pop(ModuleWatch *self, Py_ssize_t depth) { /* keeps an exception that is set */
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Py_ssize_t now = PyList_Size(self->stack);
    if (now >= depth && PyList_SetSlice(self->stack, depth - 1, now, NULL)) PyErr_Clear();
    if (depth == 1) graph_forget(self->graph);
    PyErr_Restore(type, error, trace);
}

static PyObject *run_recorded(ModuleWatch *self, const ModuleInfo *info, PyObject *const *args) {
    Edges edges = {0};
    long long floor = 0;
    int flow = 0;
    PyObject *off = modes_off(), *out;
    Tape *tape = (Tape *)Py_NewRef((PyObject *)self->native); /* values of one moment are reduced together */
    int begun = tape_gather_begin(tape);
    Call *call = PyErr_Occurred() ? NULL : enter(self, info, args[2], args[3], args[4], &edges, &flow);
    if (tape_gather_end(tape, begun) && call) {
        pop(self, PyList_Size(self->stack));
        Py_CLEAR(call);
    }
    if (call) floor = sequence_now();
    modes_on(off);
    if (PyErr_Occurred() && give_to_guard(self->fault)) {
        Py_XDECREF((PyObject *)call);
        Py_DECREF((PyObject *)tape);
        edges_free(&edges);
        return NULL;
    }
    if (!call) {
        Py_DECREF((PyObject *)tape);
        edges_free(&edges);
        return call_original(args[1], args[2], args[3], args[4]);
    }
    Py_ssize_t depth = PyList_Size(self->stack);
    out = call_original(args[1], args[2], args[3], args[4]);
    if (out) {
        off = modes_off();
        begun = tape_gather_begin(tape);
        int failed = PyErr_Occurred() || leave(self, info, call, floor, &edges, flow, out);
        failed |= tape_gather_end(tape, begun) != 0;
        modes_on(off);
        if (failed && give_to_guard(self->fault)) Py_CLEAR(out);
    }
    Py_DECREF((PyObject *)tape);
    pop(self, depth);
    if (edges.n) edges_free(&edges);
    Py_DECREF((PyObject *)call);
    return out;
}

PyObject *module_run(ModuleWatch *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5)
        return PyErr_Format(PyExc_TypeError, "run takes info, original, module, args, kwargs; got %zd", nargs);
    int on = recording(self);
    if (on < 0) return NULL;
    if (!on) return call_original(args[1], args[2], args[3], args[4]);
    if (!is_info(args[0])) return NULL;
    PyObject *info = Py_NewRef(args[0]),
             *out = run_recorded(self, (const ModuleInfo *)info, args); /* held: modules may be named anew */
    Py_DECREF(info);
    return out;
}
int modules_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } names[] = {{&t_module, "module"},
                 {&t_forward, "forward"},
                 {&t_recompute, "recompute"},
                 {&t_micro, "micro"},
                 {&t_tripped, "tripped"},
                 {&t_begins, "forward_begins"},
                 {&t_pre_hooks, "_forward_pre_hooks"}};
    (void)module;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return -1;
    return 0;
}
