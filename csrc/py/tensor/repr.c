/* repr.c - the text of a tensor: its values if they are few, statistics if they are many. */
#include "contract/backend.h"
#include "contract/reduce.h"
#include "py/tensor/tensor.h"

#define SHOWN_ELEMENTS 1000

/* Of the elements in memory, each once: those that a dim of stride 0 repeats are counted in afterwards. */
static int stats_of(XtTensor *tensor, double out[5]) {
    const XtBackend *backend;
    XtStats params = {.x = tensor->view, .out = out};
    double times = 1;
    for (int d = 0; d < params.x.ndim; d++) {
        if (params.x.strides[d] != 0 || params.x.shape[d] < 2) continue;
        times *= (double)params.x.shape[d];
        params.x.shape[d] = 1;
    }
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backend_for(tensor->storage->device, &backend);
    if (status == XT_OK) status = backend->stats(&params);
    py_gil_enter(saved);
    if (status == XT_OK)
        for (int i = 2; i < 5; i++) out[i] *= times; /* the sum, and the numbers of NaN and of infinite elements */
    return py_check(status);
}

/* The mean over the finite elements, from the sum and counts of the kernel. */
static double mean_of(const XtTensor *tensor, const double stats[5]) {
    double finite = (double)xt_view_numel(&tensor->view) - stats[3] - stats[4];
    return finite > 0 ? stats[2] / finite : Py_NAN;
}

static PyObject *run_stats(PyBound *bound) {
    XtTensor *tensor = bound->arg[0].tensor;
    double s[5];
    if (stats_of(tensor, s) < 0) return NULL;
    bool none = (double)xt_view_numel(&tensor->view) - s[3] - s[4] <= 0;
    return Py_BuildValue("(dddLL)", none ? Py_NAN : s[0], none ? Py_NAN : s[1], mean_of(tensor, s), (long long)s[3],
                         (long long)s[4]);
}

/* The values as NumPy prints them, indented for a place after "tensor(". */
static PyObject *values_text(PyObject *self) {
    XtTensor *host = py_on_host(py_tensor(self)), *plain = NULL;
    PyObject *wrapped = NULL, *array = NULL, *numpy = NULL, *function = NULL, *kwargs = NULL, *args = NULL, *text = NULL;
    if (host == NULL) return NULL;
    if (host->dtype == XT_BFLOAT16 || host->dtype == XT_FLOAT16) {
        XtArg cast[2] = {py_arg_tensor(host), py_arg_dtype(XT_FLOAT32)};
        plain = py_call_plain(&xt_op_cast, cast, 2);
    } else {
        XtStatus status = xt_tensor_alias(host, &plain);
        if (status != XT_OK) py_raise(status);
    }
    xt_tensor_release(host);
    wrapped = plain != NULL ? py_wrap(plain) : NULL;
    if (wrapped == NULL || (array = py_numpy_view("repr", wrapped)) == NULL) goto done;
    if ((numpy = PyImport_ImportModule("numpy")) == NULL) goto done;
    if ((function = PyObject_GetAttrString(numpy, "array2string")) == NULL) goto done;
    if ((args = PyTuple_Pack(1, array)) == NULL) goto done;
    /* Four digits as PyTorch; rounding to the dtype's own precision would show bfloat16 with digits it does not have. */
    kwargs = Py_BuildValue("{s:s,s:s,s:i,s:i,s:i}", "separator", ", ", "prefix", "tensor(", "precision", 4, "max_line_width", 120,
                           "threshold", SHOWN_ELEMENTS);
    if (kwargs != NULL) text = PyObject_Call(function, args, kwargs);
done:
    Py_XDECREF(wrapped);
    Py_XDECREF(array);
    Py_XDECREF(numpy);
    Py_XDECREF(function);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return text;
}

static PyObject *statistics_text(XtTensor *tensor) {
    double s[5];
    char text[192];
    if (stats_of(tensor, s) < 0) return NULL;
    double finite = (double)xt_view_numel(&tensor->view) - s[3] - s[4];
    if (finite > 0)
        snprintf(text, sizeof text, "min=%.4g, max=%.4g, mean=%.4g, nan=%.0f, inf=%.0f", s[0], s[1], mean_of(tensor, s), s[3],
                 s[4]);
    else snprintf(text, sizeof text, "no finite element, nan=%.0f, inf=%.0f", s[3], s[4]);
    return PyUnicode_FromString(text);
}

PyObject *py_repr(PyObject *self) {
    XtTensor *tensor = py_tensor(self);
    const XtGrad *grad = xt_grad_of(tensor);
    int64_t count = xt_view_numel(&tensor->view);
    bool none = tensor->storage->device.type == XT_META; /* sizes without values */
    PyObject *content = count == 0               ? PyUnicode_FromString("[]")
                        : none                   ? PyUnicode_FromString("...")
                        : count > SHOWN_ELEMENTS ? statistics_text(tensor)
                                                 : values_text(self);
    if (content == NULL) return NULL;
    char graph[96] = "";
    if (grad != NULL && grad->node != NULL) snprintf(graph, sizeof graph, ", grad_fn=<%s>", grad->node->name);
    else if (xt_requires_grad(tensor)) snprintf(graph, sizeof graph, ", requires_grad=True");
    PyObject *text =
        PyUnicode_FromFormat("tensor(%U, shape=%s, dtype=%s, device=%s%s)", content, xt_shape_text(tensor->ndim, tensor->shape),
                             xt_dtype_name(tensor->dtype), xt_device_name(tensor->storage->device), graph);
    Py_DECREF(content);
    return text;
}

const PyFunction py_repr_functions[] = {
    {"stats", "input: Tensor -> (float, float, float, int, int)", run_stats,
     "(minimum, maximum, mean) over the finite elements, then the number of NaN and of infinite elements.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
