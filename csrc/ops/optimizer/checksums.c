/* checksums.c - a checksum of each of many tensors, where they lie, in one call. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"

#include <stdlib.h>

static XtStatus forward(XtCall *c) {
    const XtArg *tensors = &c->arg[0];
    const int64_t count = tensors->count;
    XtStatus status = XT_OK;
    XtTensor *sums = NULL, **dense = NULL;
    XtChecksumItem *items = NULL;
    const XtDevice device = count ? tensors->tensors[0]->storage->device : xt_default_device();
    XT_TRY(xt_tensor_empty(device, XT_INT64, 1, &count, &sums));
    items = calloc((size_t)count + 1, sizeof *items); /* + 1: never 0 bytes */
    dense = calloc((size_t)count + 1, sizeof *dense);
    if (!items || !dense) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "checksums: out of memory"));
    for (int64_t i = 0; i < count; i++) {
        XT_TRY(xt_check_device(c->op, "tensors[0]", tensors->tensors[0], "every tensor", tensors->tensors[i]));
        XT_TRY(xt_dense(tensors->tensors[i], &dense[i]));
        items[i].data = dense[i]->data;
        items[i].nbytes = xt_view_numel(&dense[i]->view) * (int64_t)xt_dtype_size(dense[i]->dtype);
    }
    XT_TRY(xt_backend_of(sums)->checksums(&(XtChecksums){.sums = sums->data, .items = items, .count = count}));
    c->out[c->out_count++] = sums;
    sums = NULL;
done:
    for (int64_t i = 0; dense && i < count; i++) xt_tensor_release(dense[i]);
    free(dense);
    free(items);
    xt_tensor_release(sums);
    return status;
}

const XtOp xt_op_checksums = {
    .name = "checksums",
    .signature = "tensors: Tensors -> Tensor",
    .forward = forward,
    .doc =
        "int64 [n]: a 64-bit checksum of the bytes of each of n tensors, in row-major order: the same on every device and for all\n"
        "strides. Tensors of any dtypes, on one device. A change within 8 bytes always changes it, as -0.0 for 0.0 or another "
        "NaN;\n"
        "any other change does so except with a chance of about 2^-64.",
};
