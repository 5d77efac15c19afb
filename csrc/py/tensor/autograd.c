/* autograd.c - autograd for Python: backward, hooks, grad mode, nodes with a backward written in Python, subclasses.
 *
 * Ownership of an xt.Function node:  output tensor -> node -> Rule -> callable (usually a method bound to the context) -> what the
 * context saved. A context that saved an output closes a cycle. py_traverse_grad visits it for the collector, and a backward
 * without retain_graph breaks it by dropping the callable after its run. The collector does not see cycles through several nodes:
 * they stay in memory until a backward walks their graph.
 */
#include "py/tensor/tensor.h"

#include "ops/reads.h"

/* ---- callbacks from the tape: any thread ----------------------------------------------------------------------------- */

static void release_object(void *context) {
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)context);
    PyGILState_Release(gil);
}

/* What a gradient must agree with. */
typedef struct Like {
    int ndim;
    const int64_t *shape;
    XtDtype dtype;
    XtDevice device;
} Like;

static Like like_tensor(const XtTensor *tensor) {
    return (Like){tensor->ndim, tensor->shape, tensor->dtype, tensor->storage->device};
}

/* `what` begins the message. */
static int check_gradient(const char *what, const XtTensor *value, Like like) {
    bool same = value->ndim == like.ndim && memcmp(value->shape, like.shape, sizeof *like.shape * (size_t)like.ndim) == 0;
    if (same && value->dtype == like.dtype && xt_device_equal(value->storage->device, like.device)) return 0;
    PyErr_Format(same ? PyExc_TypeError : PyExc_ValueError, "%s must be %s %s on %s, got %s %s on %s", what,
                 xt_dtype_name(like.dtype), xt_shape_text(like.ndim, like.shape), xt_device_name(like.device),
                 xt_dtype_name(value->dtype), xt_shape_text(value->ndim, value->shape), xt_device_name(value->storage->device));
    return -1;
}

static XtStatus call_hook(void *context, XtTensor *gradient, XtTensor **out) {
    XtStatus status = XT_PYTHON_ERROR;
    PyGILState_STATE gil = py_code_begins();
    PyObject *callable = Py_NewRef((PyObject *)context); /* it may remove itself */
    PyObject *argument = py_wrap_borrowed(gradient);
    PyObject *result = argument != NULL ? PyObject_CallOneArg(callable, argument) : NULL;
    if (result == Py_None) {
        status = XT_OK;
    } else if (result != NULL && !py_is_tensor(result)) {
        PyErr_Format(PyExc_TypeError, "hook: must return a Tensor or None, got %.100s", Py_TYPE(result)->tp_name);
    } else if (result != NULL && check_gradient("hook: the returned gradient", py_tensor(result), like_tensor(gradient)) == 0) {
        *out = py_tensor(result);
        xt_tensor_retain(*out);
        status = XT_OK;
    }
    Py_XDECREF(result);
    Py_XDECREF(argument);
    Py_DECREF(callable);
    py_code_ends(gil);
    return status;
}

/* ---- nodes with a Python rule ---------------------------------------------------------------------------------------- */

typedef struct Rule {
    PyObject *callable; /* owned; NULL once a backward that keeps no graph has run it */
    char name[64];      /* what XtNode.name points at */
} Rule;

/* Whether the backward that runs in this thread keeps its graph. */
static _Thread_local bool retaining;

static void release_rule(void *context) {
    Rule *rule = context;
    if (rule->callable != NULL) release_object(rule->callable);
    free(rule);
}

/* What the gradient for edge `i` must agree with; false when the edge needs none. */
static bool wanted_like(const XtNode *node, int i, Like *out) {
    const XtEdge *edge = &node->edges[i];
    if (edge->leaf != NULL) {
        *out = like_tensor(edge->leaf);
    } else if (edge->node != NULL) {
        const XtOutput *output = &edge->node->output[edge->output];
        *out = (Like){output->ndim, output->shape, output->dtype, output->device};
    } else {
        return false;
    }
    return true;
}

/* Checks what the callable returned and hands it to the tape. */
static XtStatus take_gradients(XtNode *node, PyObject *result, XtTensor **din) {
    XtStatus status = XT_PYTHON_ERROR;
    bool sequence = PyTuple_Check(result) || PyList_Check(result);
    PyObject *items = sequence ? PySequence_Tuple(result) : PyTuple_Pack(1, result);
    if (items == NULL) return status;
    if (PyTuple_GET_SIZE(items) != node->inputs) {
        PyErr_Format(PyExc_ValueError, "%s: backward must return one gradient (or None) per input of forward, %d in all, got %zd",
                     node->name, node->inputs, PyTuple_GET_SIZE(items));
        goto done;
    }
    for (int i = 0; i < node->inputs; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        Like like;
        char what[112];
        if (item == Py_None) continue;
        if (!py_is_tensor(item)) {
            PyErr_Format(PyExc_TypeError, "%s: gradient %d of backward must be a Tensor or None, got %.100s", node->name, i,
                         Py_TYPE(item)->tp_name);
            goto done;
        }
        if (!wanted_like(node, i, &like)) continue;
        snprintf(what, sizeof what, "%s: gradient %d of backward", node->name, i);
        if (check_gradient(what, py_tensor(item), like) < 0) goto done;
        din[i] = py_tensor(item);
        xt_tensor_retain(din[i]);
    }
    status = XT_OK;
done:
    Py_DECREF(items);
    return status;
}

static XtStatus run_rule(XtNode *node, XtTensor *const *dout, XtTensor **din) {
    Rule *rule = node->context;
    XtStatus status = XT_PYTHON_ERROR;
    PyGILState_STATE gil = py_code_begins();
    bool mode = xt_grad_mode(), keep = retaining;
    xt_set_grad_mode(false);
    PyObject *callable = NULL, *result = NULL, *args = NULL;
    if (rule->callable == NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s: backward has run and its graph was freed; call the first backward with retain_graph=True", rule->name);
        goto done;
    }
    callable = Py_NewRef(rule->callable);
    args = py_wrap_tuple(dout, node->outputs);
    if (args == NULL) goto done;
    result = PyObject_CallObject(callable, args); /* may run another backward, which sets `retaining` and restores it */
    if (result == NULL) goto done;
    status = take_gradients(node, result, din);
    if (status == XT_OK && !keep) Py_CLEAR(rule->callable);
done:
    Py_XDECREF(result);
    Py_XDECREF(args);
    Py_XDECREF(callable);
    xt_set_grad_mode(mode);
    py_code_ends(gil);
    return status;
}

/* ---- garbage collection ---------------------------------------------------------------------------------------------- */

static int visit_hooks(const XtHooks *hooks, visitproc visit, void *arg) {
    for (int i = 0; hooks != NULL && i < hooks->count; i++)
        if (hooks->items[i]->call == call_hook) Py_VISIT((PyObject *)hooks->items[i]->context);
    return 0;
}

int py_traverse_grad(XtTensor *tensor, visitproc visit, void *arg) {
    const XtGrad *grad = xt_grad_of(tensor);
    if (grad == NULL) return 0;
    int result = visit_hooks(grad->hooks, visit, arg);
    const XtNode *node = grad->node;
    if (result != 0 || node == NULL || __atomic_load_n(&node->references, __ATOMIC_ACQUIRE) != 1) return result;
    for (int i = 0; i < node->outputs && result == 0; i++) result = visit_hooks(node->output[i].hooks, visit, arg);
    if (result == 0 && node->backward == run_rule) Py_VISIT(((Rule *)node->context)->callable);
    return result;
}

/* ---- function_apply -------------------------------------------------------------------------------------------------- */

/* Whether `tensor` is an input of the call or is in a graph already. */
static bool needs_alias(XtTensor *tensor, XtTensor *const *inputs, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (inputs[i] == tensor) return true;
    return xt_grad_of(tensor) != NULL;
}

static XtStatus new_node(const char *name, PyObject *callable, XtTensor *const *inputs, int input_count, int output_count,
                         XtNode **out) {
    Rule *rule = calloc(1, sizeof *rule);
    if (rule == NULL) return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory while recording", name);
    snprintf(rule->name, sizeof rule->name, "%s", name);
    XtStatus status = xt_node_new(rule->name, run_rule, input_count, inputs, output_count, out);
    if (status != XT_OK) {
        free(rule);
        return status;
    }
    rule->callable = Py_NewRef(callable);
    (*out)->context = rule;
    (*out)->hides_leaves = true;
    (*out)->release_context = release_rule;
    return XT_OK;
}

/* Attaches output `i`; returns the object for the caller. */
static PyObject *attach(XtNode *node, int i, PyObject *output, XtTensor *const *inputs, Py_ssize_t count) {
    XtTensor *tensor = py_tensor(output);
    XtStatus status;
    if (xt_dtype_is_float(tensor->dtype) && needs_alias(tensor, inputs, count)) {
        XtTensor *alias = NULL;
        status = xt_tensor_alias(tensor, &alias);
        if (status != XT_OK) return py_raise(status);
        output = py_wrap(alias);
        if (output == NULL) return NULL;
        tensor = alias;
    } else {
        Py_INCREF(output);
    }
    status = xt_node_attach(node, i, tensor);
    if (status == XT_OK) return output;
    Py_DECREF(output);
    return py_raise(status);
}

/* Checks a list or tuple whose entries are Tensors (or None when `optional`); returns a tuple that owns them. */
static PyObject *tensor_tuple(const char *name, PyObject *object, bool optional) {
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        py_refuse("function_apply", name, "a list or tuple of Tensors", object);
        return NULL;
    }
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (py_is_tensor(item) || (optional && item == Py_None)) continue;
        PyErr_Format(PyExc_TypeError, "function_apply: argument '%s' must hold Tensors%s, got %.100s as entry %zd", name,
                     optional ? " or None" : "", Py_TYPE(item)->tp_name, i);
        Py_CLEAR(items);
        break;
    }
    if (items != NULL && PyTuple_GET_SIZE(items) > 4096) {
        PyErr_Format(PyExc_ValueError, "function_apply: argument '%s' must hold at most 4096 entries, got %zd", name,
                     PyTuple_GET_SIZE(items));
        Py_CLEAR(items);
    }
    return items;
}

static PyObject *run_function_apply(PyBound *bound) {
    PyObject *callable = bound->object[1], *inputs = NULL, *outputs = NULL, *result = NULL;
    XtTensor **tensors = NULL;
    XtNode *node = NULL;
    if (!PyCallable_Check(callable)) {
        py_refuse("function_apply", "backward", "a callable", callable);
        return NULL;
    }
    inputs = tensor_tuple("inputs", bound->object[2], true);
    outputs = inputs != NULL ? tensor_tuple("outputs", bound->object[3], false) : NULL;
    if (outputs == NULL) goto fail;

    Py_ssize_t input_count = PyTuple_GET_SIZE(inputs), output_count = PyTuple_GET_SIZE(outputs);
    bool record = false;
    tensors = PyMem_Calloc((size_t)(input_count > 0 ? input_count : 1), sizeof *tensors);
    if (tensors == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < input_count; i++) {
        if (PyTuple_GET_ITEM(inputs, i) != Py_None) tensors[i] = py_tensor(PyTuple_GET_ITEM(inputs, i));
        record = record || (tensors[i] != NULL && xt_requires_grad(tensors[i]));
    }
    if (!record || !xt_grad_mode()) {
        PyMem_Free(tensors);
        Py_DECREF(inputs);
        return outputs;
    }
    XtStatus status = new_node(bound->arg[0].s, callable, tensors, (int)input_count, (int)output_count, &node);
    if (status != XT_OK) {
        py_raise(status);
        goto fail;
    }
    result = PyTuple_New(output_count);
    for (Py_ssize_t i = 0; i < output_count && result != NULL; i++) {
        PyObject *output = PyTuple_GET_ITEM(outputs, i);
        PyObject *attached = attach(node, (int)i, output, tensors, input_count);
        if (attached == NULL) Py_CLEAR(result);
        else PyTuple_SET_ITEM(result, i, attached);
    }
fail:
    xt_node_release(node);
    PyMem_Free(tensors);
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    return result;
}

/* ---- backward -------------------------------------------------------------------------------------------------------- */

static PyObject *walk_back(int count, XtTensor *const *roots, XtTensor *const *gradients, bool retain_graph) {
    bool outer = retaining;
    retaining = retain_graph;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backward(count, roots, gradients, retain_graph);
    py_gil_enter(saved);
    retaining = outer;
    return py_none(status);
}

static PyObject *run_backward_method(PyBound *bound) {
    return walk_back(1, &bound->arg[0].tensor, &bound->arg[1].tensor, bound->arg[2].b);
}

static PyObject *run_backward(PyBound *bound) {
    const XtArg *roots = &bound->arg[0];
    PyObject *items = NULL, *result = NULL;
    XtTensor **gradients = PyMem_Calloc((size_t)(roots->count > 0 ? roots->count : 1), sizeof *gradients);
    if (gradients == NULL) return PyErr_NoMemory();
    if (bound->object[1] != Py_None) {
        if (!PyTuple_Check(bound->object[1]) && !PyList_Check(bound->object[1])) {
            py_refuse("backward", "gradients", "a list or tuple of Tensors or None", bound->object[1]);
            goto done;
        }
        items = PySequence_Tuple(bound->object[1]);
        if (items == NULL) goto done;
        if (PyTuple_GET_SIZE(items) != roots->count) {
            PyErr_Format(PyExc_ValueError, "backward: argument 'gradients' must have %d entries like tensors, got %zd",
                         roots->count, PyTuple_GET_SIZE(items));
            goto done;
        }
        for (int i = 0; i < roots->count; i++) {
            PyObject *item = PyTuple_GET_ITEM(items, i);
            if (item == Py_None) continue;
            if (!py_is_tensor(item)) {
                py_refuse("backward", "gradients", "a list or tuple of Tensors or None", item);
                goto done;
            }
            gradients[i] = py_tensor(item);
        }
    }
    result = walk_back(roots->count, roots->tensors, gradients, bound->arg[2].b);
done:
    Py_XDECREF(items);
    PyMem_Free(gradients);
    return result;
}

static XtStatus call_ready(void *context, int index) {
    PyGILState_STATE gil = py_code_begins();
    PyObject *result = PyObject_CallFunction((PyObject *)context, "i", index);
    XtStatus status = result != NULL ? XT_OK : XT_PYTHON_ERROR;
    Py_XDECREF(result);
    py_code_ends(gil);
    return status;
}

static PyObject *run_on_ready(PyBound *bound) {
    const XtArg *leaves = &bound->arg[0];
    PyObject *callable = bound->object[1];
    if (!PyCallable_Check(callable)) {
        py_refuse("on_ready", "call", "a callable", callable);
        return NULL;
    }
    return py_none(xt_set_ready(leaves->count, leaves->tensors, bound->arg[2].i, call_ready, release_object, Py_NewRef(callable)));
}

/* ---- leaves, grad mode, hooks ---------------------------------------------------------------------------------------- */

static PyObject *run_requires_grad(PyBound *bound) {
    XtStatus status = xt_set_requires_grad(bound->arg[0].tensor, bound->arg[1].b);
    return status == XT_OK ? Py_NewRef(bound->object[0]) : py_raise(status);
}

static PyObject *run_retain_grad(PyBound *bound) {
    XtStatus status = xt_retain_grad(bound->arg[0].tensor);
    return py_none(status);
}

static PyObject *run_is_grad_enabled(PyBound *Py_UNUSED(bound)) { return PyBool_FromLong(xt_grad_mode()); }

static PyObject *run_set_grad_enabled(PyBound *bound) {
    bool before = xt_grad_mode();
    xt_set_grad_mode(bound->arg[0].b);
    return PyBool_FromLong(before);
}

static PyObject *run_set_recompute(PyBound *bound) {
    bool before = xt_recompute_mode();
    xt_set_recompute_mode(bound->arg[0].b);
    return PyBool_FromLong(before);
}

static PyObject *run_reads_of(PyBound *bound) {
    PyObject *arguments = PySequence_Tuple(bound->object[1]);
    if (!arguments) return NULL;
    XtReads reads;
    xt_begin_reads(&reads);
    PyObject *result = PyObject_CallObject(bound->object[0], arguments);
    xt_end_reads(&reads);
    Py_DECREF(arguments);
    PyObject *leaves = result ? py_wrap_tuple(reads.leaves, reads.count) : NULL;
    xt_free_reads(&reads);
    PyObject *both = leaves ? PyTuple_Pack(2, result, leaves) : NULL;
    Py_XDECREF(result);
    Py_XDECREF(leaves);
    return both;
}

static PyObject *run_make_subclass(PyBound *bound) {
    PyObject *cls = bound->object[0];
    if (!PyType_Check(cls) || !PyType_IsSubtype((PyTypeObject *)cls, xt_py->tensor_type)) {
        py_refuse("make_subclass", "cls", "Tensor or a subclass of it", cls);
        return NULL;
    }
    XtTensor *alias = NULL;
    XtStatus status = xt_tensor_alias(bound->arg[1].tensor, &alias);
    if (status == XT_OK && bound->arg[2].b) status = xt_set_requires_grad(alias, true);
    if (status == XT_OK) return py_wrap_as((PyTypeObject *)cls, alias);
    xt_tensor_release(alias);
    return py_raise(status);
}

/* What register_hook returns. It owns the tensor object, so that remove() always finds the hook. */
typedef struct Handle {
    PyObject_HEAD PyObject *tensor; /* owned; NULL once removed */
    int64_t id;
} Handle;

static PyObject *run_register_hook(PyBound *bound) {
    PyObject *callable = bound->object[1];
    if (!PyCallable_Check(callable)) {
        py_refuse("register_hook", "hook", "a callable", callable);
        return NULL;
    }
    Handle *handle = (Handle *)xt_py->handle_type->tp_alloc(xt_py->handle_type, 0);
    if (handle == NULL) return NULL;
    XtHook hook = {.call = call_hook, .release = release_object, .context = Py_NewRef(callable)};
    XtStatus status = xt_add_hook(bound->arg[0].tensor, &hook, &handle->id); /* takes over the context, also when it fails */
    if (status == XT_OK) {
        handle->tensor = Py_NewRef(bound->object[0]);
        return (PyObject *)handle;
    }
    Py_DECREF(handle);
    return py_raise(status);
}

static PyObject *handle_remove(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Handle *self = (Handle *)object;
    PyObject *tensor = self->tensor;
    self->tensor = NULL;
    if (tensor != NULL) xt_remove_hook(py_tensor(tensor), self->id);
    Py_XDECREF(tensor);
    Py_RETURN_NONE;
}

static int handle_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Handle *)self)->tensor);
    return 0;
}

static int handle_clear(PyObject *self) {
    Py_CLEAR(((Handle *)self)->tensor);
    return 0;
}

static void handle_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Handle *)self)->tensor);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef handle_methods[] = {
    {"remove", handle_remove, METH_NOARGS, "remove($self, /)\n--\n\nNone: Removes the hook; a second call does nothing."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, (void *)handle_dealloc}, {Py_tp_traverse, (void *)handle_traverse},  {Py_tp_clear, (void *)handle_clear},
    {Py_tp_methods, handle_methods},         {Py_tp_doc, "A registered gradient hook."}, {0, NULL},
};

static PyType_Spec handle_spec = {
    .name = "xtrain._C.Handle",
    .basicsize = sizeof(Handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = handle_slots,
};

int py_handle_init(PyObject *module) {
    xt_py->handle_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
    return xt_py->handle_type != NULL ? PyModule_AddObjectRef(module, "Handle", (PyObject *)xt_py->handle_type) : -1;
}

const PyFunction py_autograd_methods[] = {
    {"backward", "input: Tensor, gradient: Tensor? = None, retain_graph: bool? = False -> None", run_backward_method,
     "Adds d(input . gradient) / d(leaf) to the .grad of every leaf. gradient has input's shape and dtype; for one element it is "
     "1.\n"
     "Frees the graph as it goes unless retain_graph is true.",
     0, NULL},
    {"requires_grad_", "input: Tensor, requires_grad: bool = True -> self", run_requires_grad, "Sets requires_grad; returns self.",
     0, NULL},
    {"retain_grad", "input: Tensor -> None", run_retain_grad, "Makes backward() keep .grad of a tensor that is not a leaf.", 0,
     NULL},
    {"register_hook", "input: Tensor, hook: object -> Handle", run_register_hook,
     "hook(gradient) is called when the gradient of input is complete and may return another one. Returns a handle with remove().",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};

const PyFunction py_autograd_functions[] = {
    {"backward", "tensors: Tensors, gradients: object = None, retain_graph: bool = False -> None", run_backward,
     "Backward from several tensors at once; gradients is None, or one Tensor or None per tensor.", 0, NULL},
    {"on_ready", "leaves: Tensors, call: object, after: int = 0 -> None", run_on_ready,
     "In the next backward but `after` of this thread, call(i) once the .grad of leaves[i] is complete: for each, if no error "
     "ends\n"
     "it. No leaves: nothing is called. ValueError for a tensor that is no leaf, comes twice, or a negative `after`.",
     0, NULL},
    {"function_apply", "name: str, backward: object, inputs: object, outputs: object -> (Tensor, ...)", run_function_apply,
     "Makes `outputs` the results of a custom operation on `inputs` (Tensors or None).\n"
     "backward(*output gradients) returns one gradient or None per input. Returns the outputs as a tuple;\n"
     "an output that is an input or has a graph comes back as an alias.\n"
     "If nothing is recorded or no input requires a gradient, the outputs come back unchanged.",
     0, NULL},
    {"is_grad_enabled", "-> bool", run_is_grad_enabled, "Whether this thread records operations.", 0, NULL},
    {"set_grad_enabled", "mode: bool -> bool", run_set_grad_enabled, "Switches recording in this thread; returns the mode before.",
     0, NULL},
    {"set_recompute", "mode: bool -> bool", run_set_recompute,
     "Whether later outputs of norms, rope and swiglu in this thread are computed again in backward instead of kept; returns the "
     "mode "
     "before.",
     0, NULL},
    {"reads_of", "function: object, arguments: object -> object", run_reads_of,
     "(function(*arguments), the leaves that require a gradient and were read by ops in it, in this thread).", 0, NULL},
    {"make_subclass", "cls: object, tensor: Tensor, requires_grad: bool = False -> object", run_make_subclass,
     "Instance of cls (Tensor or a subclass) over the memory of `tensor`, a leaf of its own. __init__ is not called.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
