/* attention_sinks.cu - a sink of each head joins the softmax after attention has run (contract/attention.h).
 *
 *     forward   l = log(exp(lse) + exp(sink));  out *= exp(lse - l);  lse = l
 *     backward  dsink = -sum_rows exp(sink - lse) delta,  delta = dout . out
 *
 * A warp per row. Bytes moved: out once in and once out; backward out and dout once. So every kernel of attention has sinks, and is as
 * fast without them as before. The sum of the backward: a warp's rows in order, the warps of a block by a fixed tree, the blocks of a head
 * in order.
 */
#include "attention.cuh"

static constexpr int WARPS = 8;       /* of a block */
static constexpr int ROWS = 1024;     /* of the backward, that a block adds up at least */
static constexpr int MOST_PARTS = 64; /* blocks of a head */

template <typename T> __global__ void __launch_bounds__(32 * WARPS) sinks_forward_kernel(XtAttentionSinksFwd p) {
    using A = XtAcc<T>;
    const int64_t rows = p.batch * p.heads * p.sq, step = (int64_t)gridDim.x * WARPS;
    const int lane = threadIdx.x % 32;
    A *lse = (A *)p.lse; // [B, H, sq]
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += step) {
        const int64_t i = row % p.sq, h = row / p.sq % p.heads, b = row / p.sq / p.heads;
        T *out = (T *)p.out + b * p.out_stride[0] + h * p.out_stride[1] + i * p.out_stride[2]; // [D]
        const A sink = xt_load(((const T *)p.sinks)[h]), before = lse[row], max = before > sink ? before : sink;
        if (max == -(A)INFINITY) continue; // no key and no sink
        const A keys = exp(before - max), sum = keys + exp(sink - max), factor = keys / sum;
        for (int64_t d = lane; d < p.dim; d += 32) out[d] = xt_store<T>(xt_load(out[d]) * factor);
        __syncwarp(); // all lanes have read lse
        if (lane == 0) lse[row] = max + log(sum);
    }
}

/* parts [H, gridDim.y]: of blockIdx.x = h, rows blockIdx.y * WARPS + warp and every (gridDim.y * WARPS)-th of the B * sq behind it. */
template <typename T> __global__ void __launch_bounds__(32 * WARPS) sinks_backward_kernel(XtAttentionSinksBwd p, XtAcc<T> *parts) {
    using A = XtAcc<T>;
    const int64_t rows = p.batch * p.sq, step = (int64_t)gridDim.y * WARPS;
    const int lane = threadIdx.x % 32;
    for (int64_t h = blockIdx.x; h < p.heads; h += gridDim.x) {
        const A sink = xt_load(((const T *)p.sinks)[h]);
        A sum = 0; // the same in all lanes of a warp
        for (int64_t row = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32; row < rows; row += step) {
            const int64_t i = row % p.sq, b = row / p.sq;
            const T *dout = (const T *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1] + i * p.dout_stride[2]; // [D]
            const T *out = (const T *)p.out + b * p.out_stride[0] + h * p.out_stride[1] + i * p.out_stride[2];      // [D]
            A delta = 0;
            for (int64_t d = lane; d < p.dim; d += 32) delta += xt_load(dout[d]) * xt_load(out[d]);
            delta = xt_warp_sum(delta);
            const A lse = ((const A *)p.lse)[(b * p.heads + h) * p.sq + i];
            if (lse > -(A)INFINITY) sum += exp(sink - lse) * delta;
        }
        sum = xt_block_sum(lane == 0 ? sum : (A)0);
        if (threadIdx.x == 0) parts[h * gridDim.y + blockIdx.y] = sum;
    }
}

template <typename T> __global__ void sinks_total_kernel(T *dsinks, const XtAcc<T> *parts, int64_t heads, int count) {
    for (int64_t h = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; h < heads; h += (int64_t)gridDim.x * blockDim.x) {
        XtAcc<T> sum = 0; // parts [H, count]
        for (int n = 0; n < count; n++) sum += parts[h * count + n];
        dsinks[h] = xt_store<T>(-sum);
    }
}

XtStatus xt_cuda_attention_sinks_fwd(const XtAttentionSinksFwd *p) {
    const int64_t rows = p->batch * p->heads * p->sq;
    if (rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        xt_launch(sinks_forward_kernel<decltype(zero)>, xt_blocks(rows, WARPS), 32 * WARPS, 0, *p);
        return xt_launched("attention_sinks_fwd", p->batch, p->heads, p->sq, p->dim);
    });
}

XtStatus xt_cuda_attention_sinks_bwd(const XtAttentionSinksBwd *p) {
    if (p->heads == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        const int64_t wanted = xt_divide_up(p->batch * p->sq, (int64_t)ROWS);
        const int count = wanted < 1 ? 1 : wanted < MOST_PARTS ? (int)wanted : MOST_PARTS;
        XtScratch room;
        XT_CHECK(room.allocate((size_t)(p->heads * count) * sizeof(XtAcc<T>)));
        XtAcc<T> *parts = (XtAcc<T> *)room.data; // [H, count]
        xt_launch(sinks_backward_kernel<T>, dim3(xt_blocks(p->heads, 1), count), 32 * WARPS, 0, *p, parts);
        XT_CHECK(xt_launched("attention_sinks_bwd", p->batch, p->heads, p->sq, p->dim));
        xt_launch(sinks_total_kernel<T>, xt_blocks(p->heads, 32), 32, 0, (T *)p->dsinks, (const XtAcc<T> *)parts, p->heads, count);
        return xt_launched("attention_sinks_bwd", p->heads, count);
    });
}
