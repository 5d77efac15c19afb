/* conv1d.c - a convolution in one dimension: direct, and the two moves around its products (ops/conv/conv1d.c).
 *
 *     y[b, o, t] = bias[o] + sum_ck w[o, c, k] x[b, c, t stride + at_k]      at_k = k dilation - padding
 *     dx[b, c, t stride + at_k] += w[o, c, k] dy[b, o, t]                     dw[o, c, k] = sum_bt dy[b, o, t] x[b, c, t stride + at_k]
 *
 * Tap k meets the places t whose t stride + at_k lies in the row. They are a range, so the loops over t have no branch. A row is summed
 * in ACC, one block at a time; an element adds its terms in the order of c and k, whatever block it is in. dw sums a block of places with
 * vectors, and adds blocks and samples in order.
 */
#ifndef T
#include "contract/conv.h"
#include "cpu/kernel.h"

/* Narrows the places [*from, *to) to those whose element of tap k lies in [begin, end) of the row. */
XT_INLINE void xt_tap_range(const XtConv1dShape *s, int64_t k, int64_t begin, int64_t end, int64_t *from, int64_t *to) {
    int64_t at = k * s->dilation - s->padding, low = begin - at, high = end - at; /* low <= t stride < high */
    int64_t first = low <= 0 ? 0 : (low + s->stride - 1) / s->stride, last = high <= 0 ? 0 : (high + s->stride - 1) / s->stride;
    if (*from < first) *from = first;
    if (*to > last) *to = last;
}

enum { BLOCK = 512 }; /* elements of a row that are summed at once: they and the row of x stay in the first cache */

#define XT_TEMPLATE "cpu/conv/conv1d.c"
#include "cpu/each_float.h"

/* Rows per piece so that a piece has about 65536 multiplications. */
static int64_t grain_of(const XtConv1dShape *s, int64_t sums) {
    return xt_row_grain(s->places * s->kernel * (sums > 0 ? sums : 1), 65536);
}

XtStatus xt_cpu_conv1d_fwd(const XtConv1dFwd *p) {
    const XtConv1dShape *s = &p->shape;
    return xt_parallel(s->batch * s->out, grain_of(s, s->in / s->groups), XT_BY_FLOAT(p->dtype, conv1d_fwd), (void *)p);
}

XtStatus xt_cpu_conv1d_bwd(const XtConv1dBwd *p) {
    const XtConv1dShape *s = &p->shape;
    if (p->dx)
        XT_CHECK(xt_parallel(s->batch * s->in, grain_of(s, s->out / s->groups), XT_BY_FLOAT(p->dtype, conv1d_dx), (void *)p));
    if (!p->dweight) return XT_OK;
    return xt_parallel(s->out * (s->in / s->groups), grain_of(s, s->batch), XT_BY_FLOAT(p->dtype, conv1d_dweight), (void *)p);
}

XtStatus xt_cpu_conv1d_columns(const XtConv1dColumns *p) {
    const XtConv1dShape *s = &p->shape;
    return xt_parallel(s->batch * s->in, grain_of(s, 1), XT_BY_FLOAT(p->dtype, conv1d_columns), (void *)p);
}

XtStatus xt_cpu_conv1d_fold(const XtConv1dFold *p) {
    const XtConv1dShape *s = &p->shape;
    return xt_parallel(s->batch * s->in, grain_of(s, 1), XT_BY_FLOAT(p->dtype, conv1d_fold), (void *)p);
}

#else

/* Rows [begin, end) of y [batch * out, places]. */
XT_FAST static XtStatus NAME(conv1d_fwd)(void *context, int64_t begin, int64_t end) {
    const XtConv1dFwd *p = context;
    const XtConv1dShape *s = &p->shape;
    const T *bias = p->bias; /* [out] or NULL */
    int64_t in_group = s->in / s->groups, out_group = s->out / s->groups, stride = s->stride;
    ACC sum[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        int64_t b = row / s->out, o = row % s->out;
        const T *x = (const T *)p->x + (b * s->in + o / out_group * in_group) * s->length; /* [in_group, length] */
        const T *w = (const T *)p->weight + o * in_group * s->kernel;                      /* [in_group, kernel] */
        T *y = (T *)p->y + row * s->places;                                                /* [places] */
        for (int64_t t0 = 0; t0 < s->places; t0 += BLOCK) {
            int64_t t1 = t0 + BLOCK < s->places ? t0 + BLOCK : s->places;
            for (int64_t i = 0; i < t1 - t0; i++) sum[i] = bias ? LOAD(bias[o]) : 0;
            for (int64_t c = 0; c < in_group; c++)
                for (int64_t k = 0; k < s->kernel; k++) {
                    int64_t from = t0, to = t1;
                    xt_tap_range(s, k, 0, s->length, &from, &to);
                    const T *xs = x + c * s->length + k * s->dilation - s->padding;
                    ACC weight = LOAD(w[c * s->kernel + k]);
                    if (stride == 1) {
#pragma omp simd
                        for (int64_t t = from; t < to; t++) sum[t - t0] += weight * LOAD(xs[t]);
                    } else
                        for (int64_t t = from; t < to; t++) sum[t - t0] += weight * LOAD(xs[t * stride]);
                }
            for (int64_t i = 0; i < t1 - t0; i++) y[t0 + i] = STORE(sum[i]);
        }
    }
    return XT_OK;
}

/* Rows [begin, end) of dx [batch * in, length]. */
XT_FAST static XtStatus NAME(conv1d_dx)(void *context, int64_t begin, int64_t end) {
    const XtConv1dBwd *p = context;
    const XtConv1dShape *s = &p->shape;
    int64_t in_group = s->in / s->groups, out_group = s->out / s->groups, stride = s->stride;
    ACC sum[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        int64_t b = row / s->in, c = row % s->in, group = c / in_group;
        const T *dy = (const T *)p->dy + (b * s->out + group * out_group) * s->places; /* [out_group, places] */
        const T *w =
            (const T *)p->weight + (group * out_group * in_group + c % in_group) * s->kernel; /* [kernel], step in_group kernel */
        T *dx = (T *)p->dx + row * s->length;                                                 /* [length] */
        for (int64_t s0 = 0; s0 < s->length; s0 += BLOCK) {
            int64_t s1 = s0 + BLOCK < s->length ? s0 + BLOCK : s->length;
            for (int64_t i = 0; i < s1 - s0; i++) sum[i] = 0;
            for (int64_t o = 0; o < out_group; o++)
                for (int64_t k = 0; k < s->kernel; k++) {
                    int64_t from = 0, to = s->places, at = k * s->dilation - s->padding - s0;
                    xt_tap_range(s, k, s0, s1, &from, &to);
                    const T *d = dy + o * s->places;
                    ACC weight = LOAD(w[o * in_group * s->kernel + k]);
                    if (stride == 1) {
#pragma omp simd
                        for (int64_t t = from; t < to; t++) sum[t + at] += weight * LOAD(d[t]);
                    } else
                        for (int64_t t = from; t < to; t++) sum[t * stride + at] += weight * LOAD(d[t]);
                }
            for (int64_t i = 0; i < s1 - s0; i++) dx[s0 + i] = STORE(sum[i]);
        }
    }
    return XT_OK;
}

/* The kernels [begin, end) of dweight [out * in_group, kernel]. */
XT_FAST static XtStatus NAME(conv1d_dweight)(void *context, int64_t begin, int64_t end) {
    const XtConv1dBwd *p = context;
    const XtConv1dShape *s = &p->shape;
    int64_t in_group = s->in / s->groups, out_group = s->out / s->groups, stride = s->stride;
    for (int64_t row = begin; row < end; row++) {
        int64_t o = row / in_group, c = o / out_group * in_group + row % in_group;
        for (int64_t k = 0; k < s->kernel; k++) {
            int64_t from = 0, to = s->places;
            ACC total = 0;
            xt_tap_range(s, k, 0, s->length, &from, &to);
            for (int64_t b = 0; b < s->batch; b++) {
                const T *dy = (const T *)p->dy + (b * s->out + o) * s->places;                             /* [places] */
                const T *x = (const T *)p->x + (b * s->in + c) * s->length + k * s->dilation - s->padding; /* x[t stride] */
                for (int64_t t0 = from; t0 < to; t0 += BLOCK) {
                    int64_t t1 = t0 + BLOCK < to ? t0 + BLOCK : to;
                    ACC sum = 0;
                    if (stride == 1) {
#pragma omp simd reduction(+ : sum)
                        for (int64_t t = t0; t < t1; t++) sum += LOAD(dy[t]) * LOAD(x[t]);
                    } else
                        for (int64_t t = t0; t < t1; t++) sum += LOAD(dy[t]) * LOAD(x[t * stride]);
                    total += sum;
                }
            }
            ((T *)p->dweight)[row * s->kernel + k] = STORE(total);
        }
    }
    return XT_OK;
}

/* The columns of rows [begin, end) of x [batch * in, length]. */
XT_FAST static XtStatus NAME(conv1d_columns)(void *context, int64_t begin, int64_t end) {
    const XtConv1dColumns *p = context;
    const XtConv1dShape *s = &p->shape;
    for (int64_t row = begin; row < end; row++)
        for (int64_t k = 0; k < s->kernel; k++) {
            T *to = (T *)p->columns + (row * s->kernel + k) * s->places; /* [places] */
            int64_t first = 0, last = s->places;
            xt_tap_range(s, k, 0, s->length, &first, &last);
            if (last < first) first = last = 0;
            const T *x = (const T *)p->x + row * s->length + k * s->dilation - s->padding; /* x[t stride] */
            memset(to, 0, (size_t)first * sizeof(T));
            if (s->stride == 1) memcpy(to + first, x + first, (size_t)(last - first) * sizeof(T));
            else
                for (int64_t t = first; t < last; t++) to[t] = x[t * s->stride];
            memset(to + last, 0, (size_t)(s->places - last) * sizeof(T));
        }
    return XT_OK;
}

/* Rows [begin, end) of dx [batch * in, length]. */
XT_FAST static XtStatus NAME(conv1d_fold)(void *context, int64_t begin, int64_t end) {
    const XtConv1dFold *p = context;
    const XtConv1dShape *s = &p->shape;
    ACC sum[BLOCK];
    for (int64_t row = begin; row < end; row++) {
        const ACC *columns = (const ACC *)p->columns + row * s->kernel * s->places; /* [kernel, places] */
        T *dx = (T *)p->dx + row * s->length;                                       /* [length] */
        for (int64_t s0 = 0; s0 < s->length; s0 += BLOCK) {
            int64_t s1 = s0 + BLOCK < s->length ? s0 + BLOCK : s->length;
            for (int64_t i = 0; i < s1 - s0; i++) sum[i] = 0;
            for (int64_t k = 0; k < s->kernel; k++) {
                int64_t from = 0, to = s->places, at = k * s->dilation - s->padding - s0;
                xt_tap_range(s, k, s0, s1, &from, &to);
                const ACC *d = columns + k * s->places;
                for (int64_t t = from; t < to; t++) sum[t * s->stride + at] += d[t];
            }
            for (int64_t i = 0; i < s1 - s0; i++) dx[s0 + i] = STORE(sum[i]);
        }
    }
    return XT_OK;
}

#endif
