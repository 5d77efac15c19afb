/* reference.cu - attention as plain loops: the specification of the fast implementations, for every shape and stride.
 *
 *     forward   s_j = scale q_i . k_j over the j it sees;  p = softmax(s);  out_i = sum_j p_j v_j;  lse_i = log sum_j exp s_j
 *     backward  p_ij = exp(s_ij - lse_i);  delta_i = dout_i . out_i;  ds_ij = scale p_ij (dout_i . v_j - delta_i)
 *     softcap   c tanh(s / c) in the place of s, and ds has the factor 1 - tanh(s / c)^2
 *               dq_i = sum_j ds_ij k_j;  dk_j = sum_i ds_ij q_i;  dv_j = sum_i p_ij dout_i, over the query heads that share the kv head
 *
 * Plan: one warp per row of the result (a query row for out and dq, a key row for dk and dv). Its lanes share the head dim: element d
 * belongs to lane d % 32, and a dot product ends in a sum over the warp, so that all lanes know every score. Sums of vectors stay in
 * registers, SLICE elements of the head dim at a time; a head dim beyond that computes the scores again for each slice. Nothing but
 * the results is written: there are no score matrices, and dk and dv need no atomics because a warp walks through all the query rows
 * that see its key. The price is bytes: every query row reads all of K twice and V once, mostly from the L1 and L2 caches.
 *
 * Deterministic: keys in order, then heads and query rows in order; dot products by a fixed tree.
 */
#include "attention.cuh"

#define WARPS 8    /* per block */
#define PER_LANE 8 /* elements of a sum that a lane holds */
#define SLICE (32 * PER_LANE)

/* This lane's part of a . b; xt_warp_sum of it is the product. */
template <typename T> __device__ static XtAcc<T> partial_dot(const T *a, const T *b, int64_t dim) {
    XtAcc<T> sum = 0; // a [dim], b [dim]
    for (int64_t d = threadIdx.x % 32; d < dim; d += 32) sum += xt_load(a[d]) * xt_load(b[d]);
    return sum;
}

/* sum[t] += factor * x[first + 32 t + lane] */
template <typename T> __device__ static void add_scaled(XtAcc<T> *sum, XtAcc<T> factor, const T *x, int64_t first, int64_t dim) {
#pragma unroll
    for (int t = 0; t < PER_LANE; t++) { // sum [PER_LANE], x [dim]
        int64_t d = first + 32 * t + threadIdx.x % 32;
        if (d < dim) sum[t] += factor * xt_load(x[d]);
    }
}

template <typename T> __device__ static void store_slice(T *out, const XtAcc<T> *sum, int64_t first, int64_t dim) {
#pragma unroll
    for (int t = 0; t < PER_LANE; t++) { // out [dim], sum [PER_LANE]
        int64_t d = first + 32 * t + threadIdx.x % 32;
        if (d < dim) out[d] = xt_store<T>(sum[t]);
    }
}

/* Row i of head h of batch entry b. */
template <typename T>
__device__ static T *row_of(T *x, const int64_t *stride, int64_t b, int64_t h, int64_t i) { // x [B, heads, rows, D], stride [3]
    return x + b * stride[0] + h * stride[1] + i * stride[2];
}

/* A score under the softcap of p, if it has one. */
template <typename P, typename A> __device__ static A capped(const P &p, A s) {
    return p.softcap > 0 ? (A)p.softcap * (A)tanh(s / (A)p.softcap) : s;
}
/* Its derivative, of the score under the softcap. */
template <typename P, typename A> __device__ static A slope(const P &p, A s) {
    return p.softcap > 0 ? 1 - s / (A)p.softcap * (s / (A)p.softcap) : 1;
}

template <typename T> __global__ void __launch_bounds__(32 * WARPS, 2) attention_forward_kernel(XtAttentionFwd p) {
    using A = XtAcc<T>;
    int64_t rows = p.batch * p.heads * p.sq, step = (int64_t)gridDim.x * WARPS;
    A scale = (A)p.scale;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += step) {
        int64_t i = row % p.sq, h = row / p.sq % p.heads, b = row / p.sq / p.heads, g = h / (p.heads / p.kv_heads);
        const T *q = row_of((const T *)p.q, p.q_stride, b, h, i); // [D]
        T *out = row_of((T *)p.out, p.out_stride, b, h, i);       // [D]
        const XtSeen<int64_t> seen = xt_seen<int64_t>(p, b, i);
        A max = -(A)INFINITY;
        for (int64_t j = seen.begin; j < seen.end; j++) {
            A s = capped(p, scale * xt_warp_sum(partial_dot(q, row_of((const T *)p.k, p.k_stride, b, g, j), p.dim)));
            if (s > max || s != s) max = s; // a NaN stays
        }
        int64_t first = 0;
        do { // once even where D is 0: lse is to be written
            A sum = 0, sum_v[PER_LANE] = {};
            for (int64_t j = seen.begin; j < seen.end; j++) {
                A s = capped(p, scale * xt_warp_sum(partial_dot(q, row_of((const T *)p.k, p.k_stride, b, g, j), p.dim)));
                A e = exp(s - max);
                sum += e;
                add_scaled(sum_v, e, row_of((const T *)p.v, p.v_stride, b, g, j), first, p.dim);
            }
            for (int t = 0; t < PER_LANE; t++) sum_v[t] = seen.end > seen.begin ? sum_v[t] / sum : 0;
            store_slice(out, sum_v, first, p.dim);
            if (first == 0 && threadIdx.x % 32 == 0) ((A *)p.lse)[row] = seen.end > seen.begin ? max + log(sum) : -(A)INFINITY;
        } while ((first += SLICE) < p.dim);
    }
}

/* dq: a warp per query row. */
template <typename T> __global__ void __launch_bounds__(32 * WARPS, 2) attention_dq_kernel(XtAttentionBwd p) {
    using A = XtAcc<T>;
    int64_t rows = p.batch * p.heads * p.sq, step = (int64_t)gridDim.x * WARPS;
    A scale = (A)p.scale;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += step) {
        int64_t i = row % p.sq, h = row / p.sq % p.heads, b = row / p.sq / p.heads, g = h / (p.heads / p.kv_heads);
        const T *q = row_of((const T *)p.q, p.q_stride, b, h, i);          // [D]
        const T *dout = row_of((const T *)p.dout, p.dout_stride, b, h, i); // [D]
        const T *out = row_of((const T *)p.out, p.out_stride, b, h, i);    // [D]
        const XtSeen<int64_t> seen = xt_seen<int64_t>(p, b, i);
        A lse = ((const A *)p.lse)[row], delta = xt_warp_sum(partial_dot(dout, out, p.dim));
        for (int64_t first = 0; first < p.dim; first += SLICE) {
            A sum[PER_LANE] = {};
            for (int64_t j = seen.begin; j < seen.end; j++) {
                const T *k = row_of((const T *)p.k, p.k_stride, b, g, j); // [D]
                const T *v = row_of((const T *)p.v, p.v_stride, b, g, j); // [D]
                A s = capped(p, scale * xt_warp_sum(partial_dot(q, k, p.dim))), dp = xt_warp_sum(partial_dot(dout, v, p.dim));
                add_scaled(sum, scale * exp(s - lse) * (dp - delta) * slope(p, s), k, first, p.dim);
            }
            store_slice(row_of((T *)p.dq, p.dq_stride, b, h, i), sum, first, p.dim);
        }
    }
}

/* dk and dv: a warp per key row, through all the queries of the group that see it. */
template <typename T> __global__ void __launch_bounds__(32 * WARPS, 2) attention_dkv_kernel(XtAttentionBwd p) {
    using A = XtAcc<T>;
    int64_t rows = p.batch * p.kv_heads * p.skv, step = (int64_t)gridDim.x * WARPS, group = p.heads / p.kv_heads;
    A scale = (A)p.scale;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += step) {
        int64_t j = row % p.skv, g = row / p.skv % p.kv_heads, b = row / p.skv / p.kv_heads;
        const T *k = row_of((const T *)p.k, p.k_stride, b, g, j); // [D]
        const T *v = row_of((const T *)p.v, p.v_stride, b, g, j); // [D]
        const XtSeen<int64_t> by = xt_seen_by<int64_t>(p, b, j);
        for (int64_t first = 0; first < p.dim; first += SLICE) {
            A sum_k[PER_LANE] = {}, sum_v[PER_LANE] = {};
            for (int64_t h = g * group; h < (g + 1) * group; h++) {
                for (int64_t i = by.begin; i < by.end; i++) {
                    const T *q = row_of((const T *)p.q, p.q_stride, b, h, i);          // [D]
                    const T *dout = row_of((const T *)p.dout, p.dout_stride, b, h, i); // [D]
                    const T *out = row_of((const T *)p.out, p.out_stride, b, h, i);    // [D]
                    A s = capped(p, scale * xt_warp_sum(partial_dot(q, k, p.dim)));
                    A dp = xt_warp_sum(partial_dot(dout, v, p.dim));
                    A delta = xt_warp_sum(partial_dot(dout, out, p.dim));
                    A e = exp(s - ((const A *)p.lse)[(b * p.heads + h) * p.sq + i]);
                    add_scaled(sum_k, scale * e * (dp - delta) * slope(p, s), q, first, p.dim);
                    add_scaled(sum_v, e, dout, first, p.dim);
                }
            }
            store_slice(row_of((T *)p.dk, p.dk_stride, b, g, j), sum_k, first, p.dim);
            store_slice(row_of((T *)p.dv, p.dv_stride, b, g, j), sum_v, first, p.dim);
        }
    }
}

XtStatus xt_cuda_attention_reference_fwd(const XtAttentionFwd *p) {
    int64_t rows = p->batch * p->heads * p->sq;
    if (rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        xt_launch(attention_forward_kernel<decltype(zero)>, xt_blocks(rows, WARPS), 32 * WARPS, 0, *p);
        return xt_launched("attention_fwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
    });
}

XtStatus xt_cuda_attention_reference_bwd(const XtAttentionBwd *p) {
    int64_t q_rows = p->batch * p->heads * p->sq, k_rows = p->batch * p->kv_heads * p->skv;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if (q_rows > 0) xt_launch(attention_dq_kernel<T>, xt_blocks(q_rows, WARPS), 32 * WARPS, 0, *p);
        if (k_rows > 0) xt_launch(attention_dkv_kernel<T>, xt_blocks(k_rows, WARPS), 32 * WARPS, 0, *p);
        return xt_launched("attention_bwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
    });
}
