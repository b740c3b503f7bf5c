/* Attributes of plain tensors, of autograd nodes and of frames, asked by their descriptors: these are found once, and the look-up that
   Python makes each time is saved. Whatever has no such descriptor (a node of a class written in Python) is asked as Python asks it. */
#include "objects.h"

#define PLACES 2048 /* a power of two; torch has some 700 kinds of nodes */

typedef struct {
    PyTypeObject *type; /* not of the heap: it stays as long as the process */
    Attribute next;
    PyObject *sequence, *registers[2]; /* methods; the latter before and behind */
    int leaf;                          /* the accumulator of a leaf, whose number is always the largest */
} Kind;

static PyTypeObject *plain[2];
static PyObject *names[TENSOR_ATTRIBUTES], *is_neg, *is_conj, *n_is_neg, *n_is_conj, *n_next, *n_sequence, *n_name, *n_registers[2];
static Attribute attributes[TENSOR_ATTRIBUTES];
static Kind kinds[PLACES];
static int known_kinds;

Attribute attribute_of(PyTypeObject *type, PyObject *name) {
    Attribute found = {PyObject_GetAttr((PyObject *)type, name), (descrgetfunc)PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get)};
    if (!found.descriptor) PyErr_Clear();
    if (found.descriptor && Py_TYPE(found.descriptor) != &PyGetSetDescr_Type) Py_CLEAR(found.descriptor);
    return found;
}

static PyObject *method_of(PyTypeObject *type, PyObject *name) {
    PyObject *method = PyObject_GetAttr((PyObject *)type, name);
    if (!method) PyErr_Clear();
    if (method && Py_TYPE(method) != &PyMethodDescr_Type) Py_CLEAR(method);
    return method;
}

PyObject *attribute_ask(const Attribute *a, PyObject *x, PyObject *name) {
    return a->descriptor ? a->get(a->descriptor, x, (PyObject *)Py_TYPE(x)) : PyObject_GetAttr(x, name);
}

static PyObject *ask_method(PyObject *method, PyObject *x, PyObject *name) {
    return method ? call_one(method, x) : PyObject_CallMethodObjArgs(x, name, NULL);
}

/* ---- tensors -------------------------------------------------------------------------------------------------------------- */

/* Learn which two classes are plain tensors, the second derived from the first; until then, and of others, attributes are looked up. */
void attributes_learn(PyTypeObject *const *types) {
    if (plain[0] == types[0] && plain[1] == types[1]) return;
    PyTypeObject *before[2] = {plain[0], plain[1]};
    for (int i = 0; i < 2; i++) plain[i] = (PyTypeObject *)Py_NewRef(types[i]);
    for (int i = 0; i < TENSOR_ATTRIBUTES; i++) {
        Py_XDECREF(attributes[i].descriptor);
        attributes[i] = attribute_of(plain[0], names[i]);
    }
    Py_XDECREF(is_neg), Py_XDECREF(is_conj);
    is_neg = method_of(plain[0], n_is_neg), is_conj = method_of(plain[0], n_is_conj);
    for (int i = 0; i < 2; i++) Py_XDECREF(before[i]);
}

static int is_plain(PyObject *t) { return Py_TYPE(t) == plain[0] || Py_TYPE(t) == plain[1]; }

PyObject *tensor_attribute(PyObject *t, TensorAttribute which) {
    return is_plain(t) ? attribute_ask(&attributes[which], t, names[which]) : PyObject_GetAttr(t, names[which]);
}

static int answered(PyObject *answer) { /* 1, 0, or -1 with an exception set */
    int yes = !answer ? -1 : answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return yes;
}

/* Whether its elements in memory are those that it means: 1, 0, or -1 with an exception set. may_be_conjugate: it is complex. */
int tensor_is_resolved(PyObject *t, int may_be_conjugate) {
    int yes = answered(ask_method(is_plain(t) ? is_neg : NULL, t, n_is_neg));
    if (!yes && may_be_conjugate) yes = answered(ask_method(is_plain(t) ? is_conj : NULL, t, n_is_conj));
    return yes < 0 ? -1 : !yes;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------------------- */

static const Kind *kind_of(PyTypeObject *type) { /* NULL: to be asked as Python asks */
    size_t at = mixed(type) & (PLACES - 1);
    for (; kinds[at].type; at = (at + 1) & (PLACES - 1))
        if (kinds[at].type == type) return &kinds[at];
    if (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE || known_kinds * 2 >= PLACES) return NULL;
    PyObject *name = PyObject_GetAttr((PyObject *)type, n_name);
    int leaf = name && PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, "AccumulateGrad");
    Py_XDECREF(name), PyErr_Clear();
    kinds[at] = (Kind){type, attribute_of(type, n_next), method_of(type, n_sequence),
                       {method_of(type, n_registers[0]), method_of(type, n_registers[1])}, leaf};
    known_kinds++;
    return &kinds[at];
}

/* What the node hands its gradients on to, a tuple of (node or None, slot). */
PyObject *node_nexts(PyObject *node) {
    const Kind *kind = kind_of(Py_TYPE(node));
    return kind ? attribute_ask(&kind->next, node, n_next) : PyObject_GetAttr(node, n_next);
}

/* Its number in the order of creation; leaves carry the largest. -1 with an exception set. */
long long sequence_of(PyObject *node) {
    const Kind *kind = kind_of(Py_TYPE(node));
    if (kind && kind->leaf) return INT64_MAX;
    PyObject *number = ask_method(kind ? kind->sequence : NULL, node, n_sequence);
    int beyond = 0; /* an unsigned number */
    long long answer = number ? PyLong_AsLongLongAndOverflow(number, &beyond) : -1;
    Py_XDECREF(number);
    return beyond > 0 ? INT64_MAX : answer;
}

/* Hook it, before or behind. A new reference to what torch answers. */
PyObject *node_register(PyObject *node, PyObject *hook, int behind) {
    const Kind *kind = kind_of(Py_TYPE(node));
    PyObject *method = kind ? kind->registers[behind] : NULL;
    if (method) return call_two(method, node, hook);
    return PyObject_CallMethodObjArgs(node, n_registers[behind], hook, NULL);
}

/* The node that made a tensor: a new reference, or NULL where there is none or with an exception set. */
PyObject *node_behind(PyObject *t) {
    PyObject *node = tensor_attribute(t, GRAD_FN);
    if (node == Py_None) Py_CLEAR(node);
    else if (!node && PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear(); /* a view that autograd refuses to place */
    return node;
}

int attributes_fill(PyObject *module) {
    struct {
        PyObject **at;
        const char *text;
    } texts[] = {{&names[VERSION], "_version"}, {&names[REQUIRES_GRAD], "requires_grad"}, {&names[GRAD_FN], "grad_fn"},
                 {&names[OUTPUT_NR], "output_nr"}, {&names[BASE], "_base"}, {&n_is_neg, "is_neg"}, {&n_is_conj, "is_conj"}, {&n_next, "next_functions"},
                 {&n_sequence, "_sequence_nr"}, {&n_name, "__name__"}, {&n_registers[0], "register_prehook"},
                 {&n_registers[1], "register_hook"}};
    (void)module;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].at = PyUnicode_InternFromString(texts[i].text))) return -1;
    return 0;
}
