/* strided.h - how the elementwise kernels walk views of any strides.
 *
 * A kernel writes only a *dense function*: n outputs from n inputs, all dense. xt_each merges the dimensions of its views, cuts the
 * elements into parallel pieces, and calls the dense function on the longest dense stretches it finds - straight on the tensors
 * where their rows are dense, on small blocks copied to and from the stack (in L1) where they are strided, broadcast or 16-bit:
 *
 *     XT_FAST static void add_f32(void *out, const void *const *in, int64_t n, const void *params) { ... }
 *     XtStatus status = xt_each(add_f32, NULL, true, 3, (const XtView *const[]){&out, &a, &b});
 */
#pragma once

#include "kernel.h"

enum {
    XT_MAX_OPERANDS = 4,
    XT_BLOCK = 1024,       /* elements of a stack block */
    XT_EACH_GRAIN = 32768, /* elements of a parallel piece */
};

/* Dimensions shared by some views, as xt_merge_dims leaves them. Strides in elements. */
typedef struct XtLoop {
    int ndim, operands;
    int64_t numel;
    int64_t shape[XT_MAX_DIMS];
    int64_t strides[XT_MAX_OPERANDS][XT_MAX_DIMS];
} XtLoop;

/* Builds the loop over dimensions [first, first + ndim) of views of equal shape there; `sort`: see xt_merge_dims. */
void xt_loop_init(XtLoop *loop, int operands, const XtView *const *views, int first, int ndim, bool sort);

/* A position in a loop: coordinates, and the element offset of each operand. */
typedef struct XtCursor {
    int64_t at[XT_MAX_DIMS];
    int64_t offset[XT_MAX_OPERANDS];
} XtCursor;

void xt_cursor_set(XtCursor *cursor, const XtLoop *loop, int64_t index);
/* Moves n elements on; n must not lead past the end of the present row. */
void xt_cursor_advance(XtCursor *cursor, const XtLoop *loop, int64_t n);
/* Size of the innermost dimension, 1 for a single element. */
XT_INLINE int64_t xt_loop_row(const XtLoop *loop) { return loop->ndim > 0 ? loop->shape[loop->ndim - 1] : 1; }
/* Elements from the cursor to the end of its row. */
XT_INLINE int64_t xt_cursor_left(const XtCursor *cursor, const XtLoop *loop) {
    return loop->ndim > 0 ? loop->shape[loop->ndim - 1] - cursor->at[loop->ndim - 1] : 1;
}

/* Dense from strided and back: dst[i] = src[i * stride], dst[i * stride] = src[i], elements of `size` bytes. */
void xt_gather(void *dst, const void *src, int64_t stride, int64_t n, size_t size);
void xt_scatter(void *dst, int64_t stride, const void *src, int64_t n, size_t size);
/* Dense block of the next n elements of one operand, whose first element of all is at `base`; moves the cursor on. */
void xt_gather_block(void *dst, const void *base, const XtLoop *loop, int operand, XtCursor *cursor, int64_t n, size_t size);

/* Dense pointer to the next n <= XT_BLOCK elements of an operand of dtype `dtype` as `wide`: into the tensor where it is so
 * already, else into buffer[2][XT_BLOCK * 8]. Moves the cursor on. */
const void *xt_fetch(char (*buffer)[XT_BLOCK * 8], const void *base, XtDtype dtype, XtDtype wide, const XtLoop *loop, int operand,
                     XtCursor *cursor, int64_t n);
/* The dtype a dtype is reduced in: float32 for itself and the 16-bit floats, float64, int64 for the rest. */
XtDtype xt_wide_dtype(XtDtype dtype);

/* Dense dst[i] = (dst dtype) src[i], n <= XT_BLOCK unless a dtype is bfloat16 or float16 and the other float32, or both are the
 * same. Floats to integers truncate, saturate at the ends of the type, and NaN gives 0; integers to integers wrap; to bool is (x
 * != 0). */
void xt_convert(void *dst, XtDtype dst_dtype, const void *src, XtDtype src_dtype, int64_t n);

/* out[n], in[k][n]: dense; out may be the same memory as an in[k]. */
typedef void (*XtDenseFn)(void *out, const void *const *in, int64_t n, const void *params);
/* Applies `fn` to views[1..count) and writes views[0]; shapes equal, strides any. With `widen`, fn sees bfloat16 and float16 as
 * float32. fn NULL, where a table has no function for a dtype: XT_TYPE_ERROR. */
XtStatus xt_each(XtDenseFn fn, const void *params, bool widen, int count, const XtView *const *views);
/* The same; where the last input is one value for a whole call, scalar_fn is called instead and gets a pointer to that value
 * only. */
XtStatus xt_each_or_scalar(XtDenseFn fn, XtDenseFn scalar_fn, const void *params, bool widen, int count,
                           const XtView *const *views);
