/* arithmetic.h - elementwise arithmetic for other ops: one kernel call on tensors of one dtype, nothing recorded. */
#pragma once

#include "contract/elementwise.h"
#include "ops/ops.h"

/* Refuses bool in an op whose code, an XtBinaryOp, has no meaning for it: sub, pow, floor_divide, remainder. */
XtStatus xt_check_combines(const XtOp *op, XtDtype dtype);
XtStatus xt_binary(XtBinaryOp op, XtTensor *a, XtTensor *b, XtTensor **out); /* same dtype, broadcasting, no recording */
XtStatus xt_binary_scalar(XtBinaryOp op, XtTensor *a, double value, XtTensor **out);
XtStatus xt_unary(XtUnaryOp op, XtTensor *x, XtTensor **out);
