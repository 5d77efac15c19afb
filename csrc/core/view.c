/* view.c - sizes checked once, strides in elements. Stateless: a backend in a library of its own links it in. */
#include "xtrain.h"

#include <stdio.h>

XtStatus xt_size_of(XtDtype dtype, int ndim, const int64_t *shape, int64_t *numel, size_t *nbytes) {
    if (ndim < 0 || ndim > XT_MAX_DIMS)
        return xt_error(XT_VALUE_ERROR, "a tensor has at most %d dimensions, got %d", XT_MAX_DIMS, ndim);
    int64_t n = 1;
    bool empty = false, overflow = false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) return xt_error(XT_VALUE_ERROR, "shape must not hold negative sizes, got %s", xt_shape_text(ndim, shape));
        if (shape[i] == 0) empty = true;
        /* The product skips sizes of 0, so that (2^62, 0, 2^62) is refused in any order: its strides would overflow. */
        if (shape[i] > 0 && __builtin_mul_overflow(n, shape[i], &n)) overflow = true;
    }
    int64_t bytes;
    /* One bit stays free: rounding up to a whole piece cannot overflow. Expanded views reach such sizes without memory. */
    if (overflow || __builtin_mul_overflow(n, (int64_t)xt_dtype_size(dtype), &bytes) || bytes > INT64_MAX / 2)
        return xt_error(XT_VALUE_ERROR, "a tensor of shape %s and dtype %s has more than 2^62 bytes", xt_shape_text(ndim, shape),
                        xt_dtype_name(dtype));
    if (numel) *numel = empty ? 0 : n;
    if (nbytes) *nbytes = empty ? 0 : (size_t)bytes;
    return XT_OK;
}

int64_t xt_view_numel(const XtView *view) {
    int64_t n = 1;
    for (int i = 0; i < view->ndim; i++) n *= view->shape[i];
    return n;
}

bool xt_view_is_contiguous(const XtView *view) {
    int64_t expected = 1;
    bool dense = true;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] == 0) return true;
        if (view->shape[i] != 1 && view->strides[i] != expected) dense = false;
        expected *= view->shape[i];
    }
    return dense;
}

void xt_view_set_contiguous(XtView *view) {
    int64_t stride = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        view->strides[i] = stride;
        stride *= view->shape[i] > 0 ? view->shape[i] : 1;
    }
}

bool xt_same_shape(const XtView *a, const XtView *b) {
    if (a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return false;
    return true;
}

int xt_merge_dims(int count, const XtView *const *views, int first, int ndim, bool sort, int64_t *numel, int64_t *shape,
                  int64_t (*strides)[XT_MAX_DIMS]) {
    int n = 0;
    if (numel) *numel = 1;
    for (int d = first; d < first + ndim; d++) {
        int64_t size = views[0]->shape[d];
        if (numel) *numel *= size;
        if (size == 1) continue;
        int at = n++;
        for (; sort && at > 0; at--) { /* dimensions that belong inside of this one make room */
            int k = 0;
            while (k < count && views[k]->strides[d] == strides[k][at - 1]) k++;
            if (k == count || views[k]->strides[d] < strides[k][at - 1]) break;
            shape[at] = shape[at - 1];
            for (k = 0; k < count; k++) strides[k][at] = strides[k][at - 1];
        }
        shape[at] = size;
        for (int k = 0; k < count; k++) strides[k][at] = views[k]->strides[d];
    }
    int left = 0;
    for (int d = 0; d < n; d++) {
        bool merge = left > 0;
        for (int k = 0; merge && k < count; k++) merge = strides[k][left - 1] == strides[k][d] * shape[d];
        if (merge) left--;
        shape[left] = merge ? shape[left] * shape[d] : shape[d];
        for (int k = 0; k < count; k++) strides[k][left] = strides[k][d];
        left++;
    }
    return left;
}

const char *xt_shape_text(int ndim, const int64_t *shape) {
    static _Thread_local char texts[4][XT_MAX_DIMS * 22 + 8];
    static _Thread_local unsigned turn;
    char *text = texts[turn++ % 4];
    size_t room = sizeof texts[0], used = 0;
    used += (size_t)snprintf(text, room, "(");
    for (int i = 0; i < ndim && i < XT_MAX_DIMS; i++)
        used += (size_t)snprintf(text + used, room - used, i + 1 < ndim || ndim == 1 ? "%lld, " : "%lld", (long long)shape[i]);
    if (ndim == 1) used -= 1; /* "(3, " -> "(3," */
    snprintf(text + used, room - used, ")");
    return text;
}
