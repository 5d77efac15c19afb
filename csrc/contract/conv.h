/* conv.h - contracts of the convolution kernels. The rules for all kernels are in kernels.h. */
#pragma once

#include "xtrain.h"

/* A convolution in one dimension: x [batch, in, length], weight [out, in / groups, kernel], y [batch, out, places], all dense.
 *     y[b, o, t] = bias[o] + sum over c < in / groups, k < kernel of weight[o, c, k] x[b, first(o) + c, t stride + k dilation - padding]
 * first(o) = (o / (out / groups)) (in / groups). x is 0 outside [0, length). Sums in ACC, the bias first, then c and in it k ascending.
 * padding: in front; what is behind follows from places. groups divides in and out; kernel, stride and dilation are >= 1. */
typedef struct XtConv1dShape {
    int64_t batch, in, out, length, places, kernel, stride, padding, dilation, groups;
} XtConv1dShape;

/* The direct form, one sum an element: for few taps, and the specification of the products. bias [out], or NULL. */
typedef struct XtConv1dFwd {
    void *y;
    const void *x, *weight, *bias;
    XtDtype dtype;
    XtConv1dShape shape;
} XtConv1dFwd;
/* dx[b, i, s] = sum over o, k with t stride = s + padding - k dilation of weight[o, i - first(o), k] dy[b, o, t];
 * dweight[o, c, k] = sum over b, t of dy[b, o, t] x[b, first(o) + c, t stride + k dilation - padding]. dx and dweight may be NULL. */
typedef struct XtConv1dBwd {
    void *dx, *dweight;
    const void *dy, *x, *weight;
    XtDtype dtype;
    XtConv1dShape shape;
} XtConv1dBwd;

/* The operand of the products: columns[b, i, k, t] = x[b, i, t stride + k dilation - padding], 0 outside x. columns [batch, in, kernel,
 * places], dense. out and groups are not read. */
typedef struct XtConv1dColumns {
    void *columns;
    const void *x;
    XtDtype dtype;
    XtConv1dShape shape;
} XtConv1dColumns;
/* Its gradient: dx[b, i, s] = sum over k, ascending, of columns[b, i, k, t] with t stride = s + padding - k dilation. columns are of ACC. */
typedef struct XtConv1dFold {
    void *dx;
    const void *columns;
    XtDtype dtype;
    XtConv1dShape shape;
} XtConv1dFold;

/* Every channel for itself, with the taps that lie before it: x and y [batch, steps, channels], weight [channels, taps], all dense.
 *     z[b, t, c] = bias[c] + sum over k < taps of weight[c, k] x[b, t - (taps - 1) + k, c],  y = z, or silu(z) with `silu`
 * state [batch, taps - 1, channels]: the inputs before x, NULL for zeros. next, or NULL: the last taps - 1 rows of state and x, one behind
 * the other, which is the state of the rows that follow. An element's sum starts from the bias, k ascending, so that its bits do not depend
 * on where a sequence is cut. 1 <= taps <= XT_CONV_TAPS.
 * Bwd: dz = dy, or dy silu'(z), z computed again. dx[t] = sum over k of weight[k] dz[t + taps - 1 - k]; dstate likewise, for t < 0;
 * dnext, or NULL, is added to the elements that next is a copy of. dweight[c, k] = sum over b, t of dz x[t - (taps - 1) + k], dbias = sum of
 * dz. Each of dx, dweight, dbias and dstate may be NULL. */
#define XT_CONV_TAPS 8
typedef struct XtCausalConv1dFwd {
    void *y, *next;
    const void *x, *weight, *bias, *state;
    XtDtype dtype;
    int64_t batch, steps, channels;
    int taps;
    bool silu;
} XtCausalConv1dFwd;
typedef struct XtCausalConv1dBwd {
    void *dx, *dweight, *dbias, *dstate;
    const void *dy, *dnext, *x, *weight, *bias, *state;
    XtDtype dtype;
    int64_t batch, steps, channels;
    int taps;
    bool silu;
} XtCausalConv1dBwd;
