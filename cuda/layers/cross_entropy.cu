/* cross_entropy.cu - softmax cross-entropy of rows of logits [rows, vocab] against class indices [rows].
 *
 *     forward    lse = M + log sum_v exp(x_v - M),  M = max_v x_v;   loss = (M - x_target) + log sum
 *     backward   dx_v = (exp(x_v - lse) - [v == target]) dloss scale
 *
 * A vocabulary is seldom a multiple of eight (50257), so a row may begin at any address. A row is cut into a head of single
 * elements up to the first multiple of 16 bytes, a body of 16-byte vectors, and a tail: most of every row moves 16 bytes at a time.
 *
 * Forward: one block a row, one pass. A thread keeps the largest logit it has seen, m, and sum exp(x - m). For each group of LOADS
 * vectors it raises m, rescales the sum once, and adds the terms. Logits are read once: rows * vocab * sizeof(T) bytes. Backward:
 * elementwise, from lse; if there are few rows, a row is cut into tiles. Reads and writes the bytes of the logits once. One thread
 * reads and writes an element, so dlogits may be the logits.
 *
 * Deterministic: the tree of a row's sum depends on vocab, the dtype and the row's address modulo 16, not on the number of rows.
 */
#include "arch/sm80.cuh"
#include "common/cuda.cuh"
#include "contract/layers.h"

#include <float.h>
#include <math.h>

static const int LOADS = 4; /* 16-byte vectors that a thread has in flight */

/* exp(t), t <= 0, as precise as the rounding of T can show. 16-bit types use 2^(t log2 e), two instructions. The product rounds the
 * exponent, which adds a relative error of |t| 2^-24 to the 2^-22 of ex2.approx: 3e-6 for terms that are e^-50 of the largest, less
 * for larger terms. The logits in t were rounded to 8 or 11 bits, 2^-12 at best. Results below 2^-126 become 0. */
template <typename T> __device__ inline XtAcc<T> exp_for(XtAcc<T> t) {
    if constexpr (sizeof(T) == 2) return xt_exp2_approx(t * 1.4426950408889634f);
    else return exp(t);
}

/* A row of `vocab` elements = head elements, body vectors of W, tail elements. head and tail are less than W. */
typedef struct Cut {
    int head, tail;
    int64_t body;
} Cut;

template <typename T, int W> __device__ inline Cut cut_row(const T *x, int64_t vocab) {
    Cut cut;
    cut.head = W == 1 ? 0 : (int)((16 - (uintptr_t)x % 16) % 16 / sizeof(T));
    if (cut.head > vocab) cut.head = (int)vocab;
    cut.body = (vocab - cut.head) / W;
    cut.tail = (int)(vocab - cut.head - cut.body * W);
    return cut;
}

/* Grid over rows, blocks of 32 to 512 threads. losses, lse [rows]; logits [rows, vocab], rows ld apart; targets [rows]. */
template <typename T>
__global__ void __launch_bounds__(512, 2)
    cross_entropy_fwd_kernel(XtAcc<T> *losses, XtAcc<T> *lse, const T *logits, const int64_t *targets, int64_t rows, int64_t vocab,
                             int64_t ld, int64_t ignore_index, XtIndexReport *report, XtIndexSlot slot) {
    typedef XtAcc<T> A;
    constexpr int W = XT_WIDTH<T>;
    const int thread = threadIdx.x, threads = blockDim.x;
    constexpr A lowest = sizeof(A) == 8 ? (A)-DBL_MAX : (A)-FLT_MAX;
    const T nothing = xt_store<T>((A)-INFINITY); /* exp(nothing - m) = 0 */
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = logits + row * ld; /* [vocab] */
        const Cut cut = cut_row<T, W>(x, vocab);
        const T *body = x + cut.head; /* [cut.body * W] */
        int64_t target = thread == 0 ? targets[row] : 0;

        A first = xt_load(thread < cut.head ? x[thread] : nothing);
        A last = xt_load(thread < cut.tail ? x[vocab - cut.tail + thread] : nothing);
        /* m begins at the lowest finite number: with -Inf, a thread that sees only -Inf would compute -Inf + Inf = NaN. fmax of
         * a NaN and a number is the number; the NaN still reaches the sum. */
        A m = fmax(fmax(lowest, first), last);
        A sum = exp_for<T>(first - m) + exp_for<T>(last - m);
        for (int64_t i = thread; i < cut.body; i += LOADS * threads) {
            XtPiece<T, W> q[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                q[u] = xt_all<T, W>(nothing);
                if (i + u * threads < cut.body) q[u] = xt_read<T, W>(body + (i + u * threads) * W);
            }
            A peak = m;
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                const XtVector<A, W> v = xt_load(q[u]);
#pragma unroll
                for (int j = 0; j < W; j++) peak = fmax(peak, v.at[j]);
            }
            sum *= exp_for<T>(m - peak);
            m = peak;
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                const XtVector<A, W> v = xt_load(q[u]);
                A part = 0;
#pragma unroll
                for (int j = 0; j < W; j++) part += exp_for<T>(v.at[j] - m);
                sum += part;
            }
        }

        const bool counts = target != ignore_index, known = target >= 0 && target < vocab;
        A at_target = thread == 0 && counts && known ? xt_load(x[target]) : A(0); /* loaded during the reductions */
        const A peak = xt_block_reduce(m, lowest, XtMax());
        sum = xt_block_sum(sum * exp_for<T>(m - peak));
        if (thread != 0) continue;
        if (sum == 0 && vocab > 0) sum = NAN; /* every logit is -Inf: the largest term is exp(-Inf + Inf) */
        const A log_sum = log(sum);
        lse[row] = peak + log_sum;
        /* Not lse - x: for large logits lse has lost these digits to rounding. */
        losses[row] = counts && known ? (peak - at_target) + log_sum : A(0);
        if (counts && !known) xt_report_index(report, slot, row, target, vocab);
    }
}

/* Grid over rows * tiles, blocks of 32 to 256 threads. dlogits, logits [rows, vocab], rows ld apart; lse, targets
 * [rows]; dlosses [rows], [1]. */
template <typename T, int W>
__global__ void __launch_bounds__(256, 4)
    cross_entropy_bwd_kernel(T *dlogits, const T *logits, const XtAcc<T> *lse, const XtAcc<T> *dlosses, const int64_t *targets,
                             int64_t rows, int64_t vocab, int64_t ld, int64_t tiles, int64_t ignore_index, int64_t dloss_stride,
                             double scale, XtIndexReport *report, XtIndexSlot slot) {
    typedef XtAcc<T> A;
    const int thread = threadIdx.x, threads = blockDim.x;
    for (int64_t item = blockIdx.x; item < rows * tiles; item += gridDim.x) {
        const int64_t row = item / tiles, tile = item - row * tiles;
        const T *x = logits + row * ld;          /* [vocab] */
        T *dx = dlogits + row * ld;              /* [vocab], the same modulo 16 bytes unless W == 1 */
        const Cut cut = cut_row<T, W>(x, vocab); /* also the cut of dx */
        const T *body = x + cut.head;            /* [cut.body * W] */
        T *dbody = dx + cut.head;                /* [cut.body * W] */
        const int64_t begin = tile * LOADS * threads + thread, step = tiles * LOADS * threads;
        const int64_t target = targets[row];
        const bool counts = target != ignore_index, known = target >= 0 && target < vocab;

        if (!counts || !known) { /* zeros, even where the logits are not finite */
            if (counts && item == row * tiles && thread == 0) xt_report_index(report, slot, row, target, vocab);
            const T zero = xt_store<T>(A(0));
            if (tile == 0 && thread < cut.head) dx[thread] = zero;
            if (tile == 0 && thread < cut.tail) dx[vocab - cut.tail + thread] = zero;
            for (int64_t i = begin; i < cut.body; i += step)
#pragma unroll
                for (int u = 0; u < LOADS; u++)
                    if (i + u * threads < cut.body) xt_write(dbody + (i + u * threads) * W, xt_all<T, W>(zero));
            continue;
        }

        const A lse_row = lse[row], factor = dlosses[row * dloss_stride] * (A)scale;
        if (tile == 0 && thread < cut.head)
            dx[thread] = xt_store<T>((exp_for<T>(xt_load(x[thread]) - lse_row) - A(thread == target)) * factor);
        if (tile == 0 && thread < cut.tail) {
            const int64_t v = vocab - cut.tail + thread;
            dx[v] = xt_store<T>((exp_for<T>(xt_load(x[v]) - lse_row) - A(v == target)) * factor);
        }
        for (int64_t i = begin; i < cut.body; i += step) {
            XtPiece<T, W> q[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; u++)
                if (i + u * threads < cut.body) q[u] = xt_read<T, W>(body + (i + u * threads) * W);
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                if (i + u * threads >= cut.body) continue;
                const int64_t from_here = target - cut.head - (i + u * threads) * W;
                const int place = from_here >= 0 && from_here < W ? (int)from_here : -1; /* of the target in this vector */
                XtVector<A, W> v = xt_load(q[u]);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    A p = exp_for<T>(v.at[j] - lse_row);
                    v.at[j] = (j == place ? p - 1 : p) * factor;
                }
                xt_write(dbody + (i + u * threads) * W, xt_store<T>(v));
            }
        }
    }
}

/* Threads of a row's block: more for longer rows, and none idle. They depend on vocab and the dtype alone, so that a row's loss
 * does not depend on the other rows. */
static int fwd_threads(int64_t vectors) { return vectors <= 128 ? 32 : vectors <= 1024 ? 128 : vectors <= 8192 ? 256 : 512; }

/* The op that a report of a bad target names. */
static XtIndexSlot index_slot(bool linear) { return linear ? XT_INDEX_LINEAR_CROSS_ENTROPY : XT_INDEX_CROSS_ENTROPY; }

XtStatus xt_cuda_cross_entropy_fwd(const XtCrossEntropyFwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        xt_launch(cross_entropy_fwd_kernel<T>, xt_blocks(p->rows, 1), fwd_threads(p->vocab / XT_WIDTH<T>), 0, (A *)p->losses,
                  (A *)p->lse, (const T *)p->logits, p->targets, p->rows, p->vocab, p->ld, p->ignore_index, xt_index_report(),
                  index_slot(p->linear));
        return xt_launched("cross_entropy_fwd", p->rows, p->vocab);
    });
}

XtStatus xt_cuda_cross_entropy_bwd(const XtCrossEntropyBwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        const bool wide = ((uintptr_t)p->dlogits - (uintptr_t)p->logits) % 16 == 0; /* one cut fits both */
        const int64_t vectors = p->vocab / (wide ? XT_WIDTH<T> : 1);
        const int threads = vectors <= 32 * LOADS ? 32 : vectors <= 128 * LOADS ? 128 : 256;
        /* Elementwise: the tiles of a row change no result. */
        const int64_t most = xt_divide_up(vectors + 1, threads * LOADS), wanted = xt_divide_up(16 * xt_multiprocessors(), p->rows);
        const int64_t tiles = most < wanted ? most : wanted;
        xt_launch(wide ? cross_entropy_bwd_kernel<T, XT_WIDTH<T>> : cross_entropy_bwd_kernel<T, 1>, xt_blocks(p->rows * tiles, 1),
                  threads, 0, (T *)p->dlogits, (const T *)p->logits, (const A *)p->lse, (const A *)p->dlosses, p->targets, p->rows,
                  p->vocab, p->ld, tiles, p->ignore_index, p->dloss_stride, p->scale, xt_index_report(), index_slot(p->linear));
        return xt_launched("cross_entropy_bwd", p->rows, p->vocab);
    });
}
