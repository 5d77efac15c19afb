/* select.c - implementations of products and of attention: their names, the name in force, and why one is chosen; the check of documents
 * that attention makes. */
#include "contract/attention.h"
#include "contract/backend.h"
#include "contract/gemm.h"
#include "py/runtime/runtime.h"

enum { GEMM, ATTENTION };

/* ---- names ----------------------------------------------------------------------------------------------------------- */

/* Leaves out a name that is the last one already: several rows of a table may have it. */
static int append_name(PyObject *list, const char *name) {
    Py_ssize_t count = PyList_GET_SIZE(list);
    if (count > 0 && PyUnicode_CompareWithASCIIString(PyList_GET_ITEM(list, count - 1), name) == 0) return 0;
    PyObject *text = PyUnicode_FromString(name);
    int result = text != NULL ? PyList_Append(list, text) : -1;
    Py_XDECREF(text);
    return result;
}

static PyObject *run_backends(PyBound *bound) {
    const XtBackend *backend;
    XtStatus status = xt_backend_for(bound->arg[0].device, &backend);
    if (status != XT_OK) return py_raise(status);
    PyObject *list = PyList_New(0);
    if (list == NULL) return NULL;
    int result = 0;
    if (bound->signature->function.tag == GEMM) {
        for (const XtGemmBackend *b = backend->gemm; b != NULL && b->name != NULL && result == 0; b++)
            if (b->check == NULL || b->check() == XT_OK) result = append_name(list, b->name);
    } else {
        for (const XtAttentionBackend *b = backend->attention; b != NULL && b->name != NULL && result == 0; b++)
            result = append_name(list, b->name);
    }
    if (result < 0) Py_CLEAR(list);
    return list;
}

static PyObject *run_use_backend(PyBound *bound) {
    bool gemm = bound->signature->function.tag == GEMM;
    const char *before = gemm ? xt_gemm_backend_in_use() : xt_attention_backend_in_use();
    PyObject *previous = before != NULL ? PyUnicode_FromString(before) : Py_NewRef(Py_None);
    if (previous == NULL) return NULL;
    const char *name = bound->arg[0].given ? bound->arg[0].s : NULL;
    XtStatus status = gemm ? xt_use_gemm_backend(name) : xt_use_attention_backend(name);
    if (status == XT_OK) return previous;
    Py_DECREF(previous);
    return py_raise(status);
}

/* ---- documents ------------------------------------------------------------------------------------------------------- */

static PyObject *run_check_documents(PyBound *bound) {
    const XtTensor *t = bound->arg[0].tensor;
    if (t->dtype != XT_INT32) {
        PyErr_Format(PyExc_TypeError, "check_documents: documents must have dtype int32, got %s", xt_dtype_name(t->dtype));
        return NULL;
    }
    if (t->ndim != 3 || t->shape[1] != 2) {
        PyErr_Format(PyExc_ValueError, "check_documents: documents must have shape (B, 2, S), got %s",
                     xt_shape_text(t->ndim, t->shape));
        return NULL;
    }
    const int64_t rows = t->strides[0] == 0 && t->shape[0] > 1 ? 1 : t->shape[0]; /* expanded ones are one row */
    XtAttentionDocuments p = {t->data, rows, t->shape[2], {t->strides[0], t->strides[1], t->strides[2]}};
    const XtBackend *backend;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backend_for(t->storage->device, &backend);
    if (status == XT_OK) status = backend->attention_documents(&p);
    py_gil_enter(saved);
    return status == XT_OK ? Py_NewRef(Py_None) : py_raise(status);
}

/* ---- a problem from its sizes ---------------------------------------------------------------------------------------- */

/* No memory is read: tensors lie `offset` bytes behind a multiple of 256. */
static void *place(int64_t offset) { return (void *)(intptr_t)(4096 + offset % 256); }

/* Whether all are in [0, 2^31] and there are as many as expected, or none where that is allowed. */
static bool check_numbers(const PyBound *bound, const char *name, const int64_t *numbers, int count, int expected, bool optional) {
    bool good = count == expected || (optional && count == 0);
    for (int i = 0; good && i < count; i++) good = numbers[i] >= 0 && numbers[i] <= (int64_t)1 << 31;
    if (!good)
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must be %s%d numbers in [0, 2^31]", bound->signature->function.name, name,
                     optional ? "() or " : "", expected);
    return good;
}

/* The elements of `rows` rows that are `ld` apart; what has no room in 64 bits is so large that the last bits do not matter. */
static int64_t elements(int64_t rows, int64_t ld) {
    int64_t n;
    return __builtin_mul_overflow(rows, ld, &n) ? INT64_MAX / 2 : n;
}

static bool fill_gemm(const PyBound *bound, XtGemm *p) {
    const XtArg *arg = bound->arg, *sizes = &arg[0], *layout = &arg[4], *ld = &arg[5], *batch = &arg[6], *strides = &arg[7];
    if (!check_numbers(bound, "sizes", sizes->ints, sizes->count, 3, false) ||
        !check_numbers(bound, "ld", ld->ints, ld->count, 3, true) ||
        !check_numbers(bound, "batch", batch->ints, batch->count, 2, true) ||
        !check_numbers(bound, "strides", strides->ints, strides->count, 6, true))
        return false;
    if (strlen(layout->s) != 2 || strspn(layout->s, "nt") != 2) {
        PyErr_Format(PyExc_ValueError, "explain_gemm: layout must be nn, nt, tn or tt, got '%s'", layout->s);
        return false;
    }
    XtDtype dtype_a = (XtDtype)arg[1].i;
    *p = (XtGemm){.m = sizes->ints[0], .n = sizes->ints[1], .k = sizes->ints[2], .alpha = 1, .tf32 = arg[9].b, .dtype_a = dtype_a};
    p->a = p->b = p->c = place(arg[8].i);
    p->dtype_b = arg[2].given ? (XtDtype)arg[2].i : dtype_a, p->dtype_c = arg[3].given ? (XtDtype)arg[3].i : dtype_a;
    p->trans_a = layout->s[0] == 't', p->trans_b = layout->s[1] == 't';
    p->lda = ld->count ? ld->ints[0] : p->trans_a ? p->m : p->k;
    p->ldb = ld->count ? ld->ints[1] : p->trans_b ? p->k : p->n;
    p->ldc = ld->count ? ld->ints[2] : p->n;
    const int64_t rows[3] = {p->trans_a ? p->k : p->m, p->trans_b ? p->n : p->k, p->m}, lds[3] = {p->lda, p->ldb, p->ldc};
    int64_t *stride[3] = {p->stride_a, p->stride_b, p->stride_c};
    for (int i = 0; i < 2; i++) p->batch[i] = batch->count ? batch->ints[i] : 1;
    for (int i = 0; i < 3; i++) {
        stride[i][1] = strides->count ? strides->ints[2 * i + 1] : elements(rows[i], lds[i]);
        stride[i][0] = strides->count ? strides->ints[2 * i] : elements(p->batch[1], stride[i][1]);
    }
    return true;
}

/* q, out and their gradients have one set of strides, k, v and theirs another; without them all are dense. */
static bool fill_attention(const PyBound *bound, XtAttentionBwd *p) {
    const XtArg *arg = bound->arg, *sizes = &arg[0], *strides = &arg[3];
    if (!check_numbers(bound, "sizes", sizes->ints, sizes->count, 6, false) ||
        !check_numbers(bound, "strides", strides->ints, strides->count, 6, true))
        return false;
    const int64_t *n = sizes->ints;
    *p = (XtAttentionBwd){.batch = n[0], .heads = n[1], .kv_heads = n[2], .sq = n[3], .skv = n[4], .dim = n[5]};
    if (p->kv_heads ? p->heads % p->kv_heads : p->heads) {
        PyErr_Format(PyExc_ValueError, "explain_attention: heads must be a multiple of kv heads, got %lld and %lld",
                     (long long)n[1], (long long)n[2]);
        return false;
    }
    p->dtype = (XtDtype)arg[1].i, p->tf32 = arg[6].b;
    p->scale = arg[5].given ? arg[5].f : 1;
    const int64_t q_rows = elements(p->sq, p->dim), kv_rows = elements(p->skv, p->dim);
    const int64_t dense[6] = {elements(p->heads, q_rows), q_rows, p->dim, elements(p->kv_heads, kv_rows), kv_rows, p->dim};
    const int64_t *from = strides->count ? strides->ints : dense;
    int64_t *of_q[] = {p->q_stride, p->out_stride, p->dout_stride, p->dq_stride};
    int64_t *of_kv[] = {
        p->k_stride,
        p->v_stride,
        p->dk_stride,
        p->dv_stride,
    };
    for (int i = 0; i < 4; i++) {
        memcpy(of_q[i], from, 3 * sizeof *from);
        memcpy(of_kv[i], from + 3, 3 * sizeof *from);
    }
    p->documents = arg[9].b ? place(0) : NULL;
    p->window = arg[10].i, p->softcap = arg[11].f;
    p->q = p->k = p->v = p->out = p->dout = p->dq = p->dk = p->dv = place(arg[4].i);
    return true;
}

static XtAttentionFwd forward_of(const XtAttentionBwd *b) {
    XtAttentionFwd p = {.q = b->q,
                        .k = b->k,
                        .v = b->v,
                        .out = b->dq,
                        .documents = b->documents,
                        .dtype = b->dtype,
                        .batch = b->batch,
                        .heads = b->heads,
                        .kv_heads = b->kv_heads,
                        .sq = b->sq,
                        .skv = b->skv,
                        .dim = b->dim,
                        .window = b->window,
                        .scale = b->scale,
                        .softcap = b->softcap,
                        .tf32 = b->tf32};
    memcpy(p.q_stride, b->q_stride, sizeof p.q_stride);
    memcpy(p.k_stride, b->k_stride, sizeof p.k_stride);
    memcpy(p.v_stride, b->v_stride, sizeof p.v_stride);
    memcpy(p.out_stride, b->out_stride, sizeof p.out_stride);
    return p;
}

/* ---- why ------------------------------------------------------------------------------------------------------------- */

/* Appends (name, kernel, why not), or None for a row that supports the problem; NULL when that fails. */
static PyObject *add_row(PyObject *list, const char *name, const char *kernel, const char *reason) {
    PyObject *row = list != NULL ? Py_BuildValue("(ssz)", name, kernel, reason) : NULL;
    if (row == NULL || PyList_Append(list, row) < 0) Py_CLEAR(list);
    Py_XDECREF(row);
    return list;
}

static PyObject *run_explain_gemm(PyBound *bound) {
    XtGemm p;
    const XtGemmBackend *first;
    const XtDeviceTraits *traits;
    if (!fill_gemm(bound, &p)) return NULL;
    XtStatus status = xt_gemm_from(bound->arg[10].device, bound->arg[11].given ? bound->arg[11].s : NULL, &first, &traits);
    if (status == XT_OK && !xt_gemm_select(first, &p, traits)->name) status = xt_gemm_refuse(&p);
    if (status != XT_OK) return py_raise(status);
    PyObject *list = PyList_New(0);
    for (const XtGemmBackend *b = first; b->name != NULL; b++) list = add_row(list, b->name, b->kernel, b->supports(&p, traits));
    return list;
}

static PyObject *run_explain_attention(PyBound *bound) {
    XtAttentionBwd p;
    const XtAttentionBackend *first;
    const XtDeviceTraits *traits;
    if (!fill_attention(bound, &p)) return NULL;
    bool backward = bound->arg[2].b;
    XtAttentionFwd forward = forward_of(&p);
    XtStatus status = xt_attention_from(bound->arg[7].device, bound->arg[8].given ? bound->arg[8].s : NULL, &first, &traits);
    if (status != XT_OK) return py_raise(status);
    PyObject *list = PyList_New(0);
    for (const XtAttentionBackend *b = first; b->name != NULL; b++) {
        const char *of_bwd = b->supports_bwd != NULL ? b->supports_bwd(&p, traits) : NULL;
        const char *of_fwd = b->supports_fwd != NULL ? b->supports_fwd(&forward, traits) : NULL;
        list = add_row(list, b->name, b->kernel, backward ? of_bwd : of_fwd);
    }
    return list;
}

static PyObject *run_explain_chunk(PyBound *bound) {
    const XtArg *sizes = &bound->arg[0];
    XtDtype dtype = (XtDtype)bound->arg[1].i;
    if (!check_numbers(bound, "sizes", sizes->ints, sizes->count, 3, false)) return NULL;
    if (!xt_dtype_is_float(dtype))
        return PyErr_Format(PyExc_TypeError, "explain_chunk: dtype must be a floating dtype, got %s", xt_dtype_name(dtype));
    int64_t rows = sizes->ints[0], width = sizes->ints[1], vocab = sizes->ints[2];
    return Py_BuildValue("(LN)", (long long)xt_rows_of_chunk(rows, vocab, dtype),
                         PyBool_FromLong(xt_makes_gradients_ahead(rows, width, vocab, dtype)));
}

const PyFunction py_select_functions[] = {
    {"gemm_backends", "device: device = 'cpu' -> [str]", run_backends,
     "Names of the matrix products that a device can do here, the default first.", GEMM, NULL},
    {"attention_backends", "device: device = 'cpu' -> [str]", run_backends,
     "Names of the attentions of a device, the default first.", ATTENTION, NULL},
    {"use_gemm_backend", "name: str? -> str?", run_use_backend,
     "Chooses a matrix product for this thread; returns the choice before.", GEMM, NULL},
    {"use_attention_backend", "name: str? -> str?", run_use_backend,
     "Chooses an attention for this thread; returns the choice before.", ATTENTION, NULL},
    {"explain_gemm",
     "sizes: ints, dtype_a: dtype = 'float32', dtype_b: dtype? = None, dtype_c: dtype? = None, layout: str = 'nn', ld: ints = (), "
     "batch: ints = (), strides: ints = (), offset: int = 0, tf32: bool = False, device: device = 'cpu', backend: str? = None -> "
     "[(str, str, str?)]",
     run_explain_gemm,
     "[(name, kernel, why not), ...] of the implementations from `backend` on; the first without a reason computes the product.\n"
     "sizes (M, N, K); ld, batch (2) and strides (2 each of A, B, C) as in XtGemm, else dense; offset: bytes from 256.",
     GEMM, NULL},
    {"explain_attention",
     "sizes: ints, dtype: dtype = 'float32', backward: bool = False, strides: ints = (), offset: int = 0, scale: float? = None, "
     "tf32: bool = False, device: device = 'cpu', backend: str? = None, documents: bool = False, window: int = 0, "
     "softcap: float = 0.0 -> [(str, str, str?)]",
     run_explain_attention,
     "The same for attention. sizes (B, H, K, S, T, D); strides (batch, head, row) of query and then of key, else dense; with "
     "documents,\n"
     "a window of so many keys, and a softcap.",
     ATTENTION, NULL},
    {"check_documents", "documents: Tensor -> None", run_check_documents,
     "The check that a forward of attention makes of documents int32 [B, 2, S], without a call of an op.\n"
     "ValueError for those that break the rule, on a GPU at the next wait. In a capture an op must take the same tensor.",
     0, NULL},
    {"explain_chunk", "sizes: ints, dtype: dtype = 'float32' -> (int, bool)", run_explain_chunk,
     "For linear_cross_entropy of sizes (rows, C, V): the rows of logits that it makes at once, and whether its forward makes the "
     "gradients.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
