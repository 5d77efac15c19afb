/* tensor.c - tensors: a view of a counted storage, counted itself. */
#include "core.h"
#include "xtrain.h"

#include <stdlib.h>

void (*xt_grad_release)(struct XtGrad *grad);

static XtStatus new_tensor(XtStorage *storage, XtTensor **out) {
    XtTensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor) return xt_error(XT_OUT_OF_MEMORY, "out of memory: cannot allocate a tensor record");
    tensor->references = 1;
    tensor->storage = storage;
    xt_count_tensor(storage->device, 1);
    *out = tensor;
    return XT_OK;
}

XtStatus xt_tensor_empty(XtDevice device, XtDtype dtype, int ndim, const int64_t *shape, XtTensor **out) {
    size_t nbytes;
    XtStorage *storage = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_size_of(dtype, ndim, shape, NULL, &nbytes));
    XT_TRY(xt_storage_allocate(device, nbytes, &storage));
    XT_TRY(new_tensor(storage, out));
    storage = NULL; /* now the tensor's */
    XtTensor *t = *out;
    t->data = t->storage->data;
    t->dtype = dtype;
    t->ndim = ndim;
    for (int i = 0; i < ndim; i++) t->shape[i] = shape[i];
    xt_view_set_contiguous(&t->view);
done:
    xt_storage_release(storage);
    return status;
}

XtStatus xt_tensor_from_view(XtStorage *storage, const XtView *view, XtTensor **out) {
    XT_CHECK(new_tensor(storage, out));
    xt_storage_retain(storage);
    (*out)->view = *view;
    return XT_OK;
}

XtStatus xt_tensor_alias(const XtTensor *tensor, XtTensor **out) {
    return xt_tensor_from_view(tensor->storage, &tensor->view, out);
}

void xt_tensor_retain(XtTensor *tensor) { __atomic_add_fetch(&tensor->references, 1, __ATOMIC_RELAXED); }

void xt_tensor_release(XtTensor *tensor) {
    if (!tensor || __atomic_sub_fetch(&tensor->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (tensor->grad) xt_grad_release(tensor->grad);
    xt_count_tensor(tensor->storage->device, -1);
    xt_storage_release(tensor->storage);
    free(tensor);
}
