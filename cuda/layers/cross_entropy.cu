/* cross_entropy.cu - softmax cross-entropy of rows of logits [rows, vocab] against class indices [rows].
 *
 *     forward    lse = M + log sum_v exp(x_v - M),  M = max_v x_v;   loss = (M - at_target) + log sum
 *     backward   dx_v = (exp(x_v - lse) - [v == target]) dloss scale
 *
 * z > 0: loss += z lse^2, and exp(x_v - lse) in dx grows by 1 + 2 z lse (the z-loss; Chowdhery et al. 2022, PaLM).
 *
 * softcap c > 0 (Gemma 2, arXiv 2408.00118): s = c tanh(x_v / c) stands for x_v, and dx_v has the factor 1 - tanh(x_v / c)^2. Kernels of
 * their own (CAP), whose rows are bound by the exponentials of tanh: one for the sum, one for the gradient, none for the maximum, as tanh
 * keeps the order.
 *
 * A vocabulary is seldom a multiple of eight (50257), so a row may begin at any address. A row is cut into a head of single
 * elements up to the first multiple of 16 bytes, a body of 16-byte vectors, and a tail: most of every row moves 16 bytes at a time.
 *
 * Forward: one block a row, one pass. A thread keeps the largest logit it has seen, m, and sum exp(x - m). For each group of LOADS
 * vectors it raises m, rescales the sum once, and adds the terms. Logits are read once: rows * vocab * sizeof(T) bytes. Backward:
 * elementwise, from lse; if there are few rows, a row is cut into tiles. Reads and writes the bytes of the logits once. One thread
 * reads and writes an element, so dlogits may be the logits.
 *
 * Both at once: the block that has a row's lse makes its dlogits. A part of the row waits in shared memory (on Hopper half of 50,000
 * 16-bit logits, four rows at a time on a multiprocessor, or three quarters of 152,000); the rest is read again, from the L2 cache,
 * as few rows are under way. Long rows of 16 bits have a kernel of their own on Hopper, the ring below.
 *
 * Deterministic: the tree of a row's sum depends on vocab, the dtype and the row's address modulo 16, not on the number of rows.
 */
#include "arch/sm90.cuh"
#include "common/cuda.cuh"
#include "common/softcap.cuh"
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

/* tanh(t), as precise as the rounding of T can show: logits are off by 2^-12 of themselves. */
template <typename T> __device__ inline XtAcc<T> tanh_for(XtAcc<T> t) {
    if constexpr (sizeof(T) == 2) return xt_tanh_approx(t);
    else return tanh(t);
}

/* c tanh(x / c) and its slope; without CAP, x and 1. The inverse of a subnormal c is finite: 0 stays 0. */
template <typename T, bool CAP> struct Softcap {
    typedef XtAcc<T> A;
    A cap, inverse;
    __device__ inline explicit Softcap(A c) : cap(c), inverse(CAP ? fmin(1 / c, sizeof(A) == 8 ? (A)DBL_MAX : (A)FLT_MAX) : A(0)) {}
    __device__ inline A operator()(A x) const { return CAP ? cap * tanh_for<T>(x * inverse) : x; }
};

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

/* 1 + 2 z lse; exactly 1 without a z-loss, also where lse is not finite. */
template <typename A> __device__ inline A z_growth(double z, A lse) { return z > 0 ? 1 + 2 * A(z) * lse : A(1); }

/* (exp(s - lse) growth - [target]) factor slope, of s = softcap(x) */
template <typename T, bool CAP>
__device__ inline XtAcc<T> gradient_at(XtAcc<T> x, const Softcap<T, CAP> &softcap, XtAcc<T> lse, XtAcc<T> growth, bool target,
                                       XtAcc<T> factor) {
    typedef XtAcc<T> A;
    if constexpr (CAP) {
        const A t = tanh_for<T>(x * softcap.inverse), p = exp_for<T>(fma(softcap.cap, t, -lse)) * growth;
        return (target ? p - 1 : p) * factor * fma(-t, t, A(1));
    } else {
        const A p = exp_for<T>(x - lse) * growth;
        return (target ? p - 1 : p) * factor;
    }
}
template <typename T, bool CAP>
__device__ inline T gradient_of(T x, const Softcap<T, CAP> &softcap, XtAcc<T> lse, XtAcc<T> growth, bool target, XtAcc<T> factor) {
    return xt_store<T>(gradient_at<T, CAP>(xt_load(x), softcap, lse, growth, target, factor));
}
/* The same of a vector; the target is its element `place`, if it is in it. */
template <typename T, int W, bool CAP>
__device__ inline XtPiece<T, W> gradient_of(const XtPiece<T, W> &x, const Softcap<T, CAP> &softcap, XtAcc<T> lse, XtAcc<T> growth,
                                            int64_t place, XtAcc<T> factor) {
    const int at = place >= 0 && place < W ? (int)place : -1;
    XtVector<XtAcc<T>, W> v = xt_load(x);
#pragma unroll
    for (int j = 0; j < W; j++) v.at[j] = gradient_at<T, CAP>(v.at[j], softcap, lse, growth, j == at, factor);
    return xt_store<T>(v);
}

/* The larger of m and the elements of a group of vectors; of a NaN and a number, the number. */
template <typename T, int W> __device__ inline XtAcc<T> largest(const XtPiece<T, W> (&q)[LOADS], XtAcc<T> m) {
    if constexpr (sizeof(T) == 2) { /* two at once, the vectors side by side */
        decltype(xt_pair(0, T())) pair[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            pair[u] = xt_pair(q[u].word[0], T());
#pragma unroll
            for (int j = 1; j < W / 2; j++) pair[u] = __hmax2(pair[u], xt_pair(q[u].word[j], T()));
        }
#pragma unroll
        for (int u = 1; u < LOADS; u++) pair[0] = __hmax2(pair[0], pair[u]);
        const float2 two = xt_load_two(xt_word(pair[0]), T());
        return fmax(m, fmax(two.x, two.y));
    } else {
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const XtVector<XtAcc<T>, W> v = xt_load(q[u]);
#pragma unroll
            for (int j = 0; j < W; j++) m = fmax(m, v.at[j]);
        }
        return m;
    }
}

/* Raises m to the largest of a group of vectors, and adds their exp(softcap(x) - m) to sum, which moves with m. inside(u): vector u is one
 * of the row; others are -Inf, but a softcap of that is not. */
template <typename T, int W, bool CAP, typename F>
__device__ inline void add_group(const XtPiece<T, W> (&q)[LOADS], const Softcap<T, CAP> &softcap, F inside, XtAcc<T> &m,
                                 XtAcc<T> &sum) {
    typedef XtAcc<T> A;
    const A peak = CAP ? fmax(m, softcap(largest<T, W>(q, (A)-INFINITY))) : largest<T, W>(q, m);
    sum *= exp_for<T>(m - peak);
    m = peak;
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
        if (CAP && !inside(u)) continue;
        const XtVector<A, W> v = xt_load(q[u]);
        A part = 0;
#pragma unroll
        for (int j = 0; j < W; j++) part += exp_for<T>(softcap(v.at[j]) - m);
        sum += part;
    }
}

/* Grid over rows, blocks of 32 to 512 threads. losses, lse [rows]; logits [rows, vocab], rows ld apart; targets [rows]. GRADIENT: dlogits
 * are the logits; the first `kept` vectors of a row's body wait in shared memory, each for the thread that put it there. Z: z > 0, whose
 * factor takes one register more. CAP: there is a softcap, and z may be 0. */
template <typename T, bool GRADIENT, bool Z, bool CAP>
__global__ void __launch_bounds__(512, 2)
    cross_entropy_fwd_kernel(XtAcc<T> *losses, XtAcc<T> *lse, T *dlogits, const T *logits, const int64_t *targets, int64_t rows,
                             int64_t vocab, int64_t ld, int64_t kept, int64_t position, XtAcc<T> scale, double z, XtAcc<T> cap,
                             int64_t ignore_index, XtIndexReport *report, XtIndexSlot slot) {
    extern __shared__ uint4 room[]; /* [kept] */
    typedef XtAcc<T> A;
    constexpr int W = XT_WIDTH<T>;
    const int thread = threadIdx.x, threads = blockDim.x;
    constexpr A lowest = sizeof(A) == 8 ? (A)-DBL_MAX : (A)-FLT_MAX;
    const T nothing = xt_store<T>((A)-INFINITY); /* exp(nothing - m) = 0 */
    const Softcap<T, CAP> softcap(cap);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = logits + row * ld; /* [vocab] */
        const Cut cut = cut_row<T, W>(x, vocab);
        const T *body = x + cut.head; /* [cut.body * W] */
        int64_t target = GRADIENT || thread == 0 ? targets[row] : 0;

        A first = thread < cut.head ? softcap(xt_load(x[thread])) : (A)-INFINITY;
        A last = thread < cut.tail ? softcap(xt_load(x[vocab - cut.tail + thread])) : (A)-INFINITY;
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
                if constexpr (GRADIENT)
                    if (i + u * threads < kept)
                        room[i + u * threads] = make_uint4(q[u].word[0], q[u].word[1], q[u].word[2], q[u].word[3]);
            }
            add_group(q, softcap, [&](int u) { return i + u * threads < cut.body; }, m, sum);
        }

        const bool counts = target != ignore_index, known = target >= 0 && target < vocab;
        A at_target = thread == 0 && counts && known ? softcap(xt_load(x[target])) : A(0); /* loaded during the reductions */
        const A peak = xt_block_reduce(m, lowest, XtMax());
        sum = xt_block_sum(sum * exp_for<T>(m - peak));
        if (!GRADIENT && thread != 0) continue;
        if (sum == 0 && vocab > 0) sum = NAN; /* every logit is -Inf: the largest term is exp(-Inf + Inf) */
        const A log_sum = log(sum);
        if (thread == 0) {
            const A lse_row = peak + log_sum;
            lse[row] = lse_row;
            /* Not lse - x: for large logits lse has lost these digits to rounding. */
            A loss = counts && known ? (peak - at_target) + log_sum : A(0);
            if (Z && (!CAP || z > 0) && counts && known) loss += A(z) * lse_row * lse_row;
            losses[row] = loss;
            if (counts && !known) xt_report_index(report, slot, position + row, target, vocab);
        }
        if constexpr (GRADIENT) {
            __syncthreads();            /* thread 0 has read x[target], which another thread overwrites */
            T *dx = dlogits + row * ld; /* x: of the rest, a thread overwrites what it alone has read */
            const A lse_row = peak + log_sum, growth = Z ? z_growth(z, lse_row) : A(1), factor = scale;
            const bool zeros = !counts || !known; /* even where the logits are not finite */
            const T zero = xt_store<T>(A(0));
            if (thread < cut.head)
                dx[thread] = zeros ? zero : gradient_of(x[thread], softcap, lse_row, growth, thread == target, factor);
            if (thread < cut.tail) {
                const int64_t v = vocab - cut.tail + thread;
                dx[v] = zeros ? zero : gradient_of(x[v], softcap, lse_row, growth, v == target, factor);
            }
            for (int64_t i = thread; i < cut.body; i += LOADS * threads) {
                XtPiece<T, W> q[LOADS];
#pragma unroll
                for (int u = 0; u < LOADS; u++) {
                    const int64_t at = i + u * threads;
                    if (at < kept) q[u] = xt_read<T, W>((const T *)(room + at));
                    else if (at < cut.body) q[u] = xt_read<T, W>(body + at * W);
                }
#pragma unroll
                for (int u = 0; u < LOADS; u++) {
                    const int64_t at = i + u * threads;
                    if (at >= cut.body) continue;
                    if (zeros) q[u] = xt_all<T, W>(zero);
                    else q[u] = gradient_of(q[u], softcap, lse_row, growth, target - cut.head - at * W, factor);
                    xt_write(dx + cut.head + at * W, q[u]);
                }
            }
        }
    }
}

/* ---- both at once, on Hopper ----------------------------------------------------------------------------------------------------- */

/* Rows of 16-bit elements that begin at multiples of 16 bytes. A row waits whole in the shared memory of a block, or of a cluster of
 * two: each half of the 512 threads that the kernel above would give it. A warp of its own has the copy engine fill a ring of stages, of
 * LOADS vectors of each thread, so while a row's gradient is made, the next row is on its way, and no exponential waits for memory.
 * Bytes moved: the logits once, the gradient once. A thread has the terms of its twin above, in the same order, and the trees are
 * the same: the same bits. */
static const int RING_THREADS = 256, RING_STAGES = 14, RING_STAGE = LOADS * RING_THREADS * 16;
static const int RING_LEAST =
    4096; /* vectors of a row; of shorter ones, several blocks of the plain kernel share a multiprocessor */
static const int RING_BYTES = RING_STAGES * RING_STAGE + 8 * (2 * RING_STAGES + 2);

/* Grid of BLOCKS for each row or fewer, RING_THREADS and a warp that copies. BLOCKS of a cluster have a row. The rest as above. */
template <typename T, int BLOCKS, bool Z>
__global__ void __launch_bounds__(RING_THREADS + 32, 1)
    cross_entropy_ring_kernel(float *losses, float *lse, T *dlogits, const T *logits, const int64_t *targets, int64_t rows,
                              int64_t vocab, int64_t ld, int64_t position, float scale, double z, int64_t ignore_index,
                              XtIndexReport *report, XtIndexSlot slot) {
#ifdef XT_SM90A
    constexpr int W = XT_WIDTH<T>, ALL = BLOCKS * RING_THREADS, WARPS = RING_THREADS / 32;
    extern __shared__ uint4 room[];              /* stages [LOADS][RING_THREADS], barriers */
    __shared__ float of_warp[2][BLOCKS * WARPS]; /* of the cluster */
    const uint32_t base = xt_shared_address(room), full = base + RING_STAGES * RING_STAGE, empty = full + 8 * RING_STAGES,
                   met = empty + 8 * RING_STAGES;
    const int thread = threadIdx.x, lane = thread % 32, rank = BLOCKS == 1 ? 0 : (int)xt_cluster_rank();
    const int me = rank * RING_THREADS + thread, tail = (int)(vocab % W), vectors = (int)(vocab / W);
    const int groups = (vectors + LOADS * ALL - 1) / (LOADS * ALL);
    const int64_t first = blockIdx.x / BLOCKS, step = gridDim.x / BLOCKS;
    if (thread == 0) {
        for (int s = 0; s < RING_STAGES; s++) {
            xt_barrier_init(full + 8 * s, 1);
            xt_barrier_init(empty + 8 * s, RING_THREADS);
        }
        for (int s = 0; s < 2; s++) xt_barrier_init(met + 8 * s, BLOCKS == 1 ? RING_THREADS : 1);
        xt_barrier_init_fence();
    }
    if (BLOCKS == 1) __syncthreads();
    else xt_cluster_sync(); /* the other block's barriers are there */

    int stage = 0, parity = 0;
    auto advance = [&](int &stage) {
        if (++stage == RING_STAGES) stage = 0, parity ^= 1;
    };
    if (thread >= RING_THREADS) { // copies
        if (lane != 0) return;
        for (int64_t row = first; row < rows; row += step)
            for (int g = 0; g < groups; g++) {
                const int at = g * LOADS * ALL + rank * RING_THREADS; /* the first of this block's vectors */
                auto count = [&](int u) { return max(0, min(RING_THREADS, vectors - at - u * ALL)); };
                int bytes = 0;
                for (int u = 0; u < LOADS; u++) bytes += count(u) * 16;
                xt_barrier_wait(empty + 8 * stage, parity ^ 1);
                xt_barrier_expect(full + 8 * stage, bytes);
                for (int u = 0; u < LOADS; u++)
                    if (count(u))
                        xt_bulk_load(base + stage * RING_STAGE + u * (RING_THREADS * 16),
                                     logits + row * ld + (int64_t)(at + u * ALL) * W, count(u) * 16, full + 8 * stage);
                advance(stage);
            }
        return;
    }

    const T nothing = xt_store<T>(-INFINITY);
    const Softcap<T, false> none(0.0f);
    int turn = 0; /* of rows */
    /* The warps of all blocks of the row exchange a value, and every thread makes the tree of xt_block_reduce from them. */
    auto reduce = [&](int which, float value, float neutral, auto combine) {
        value = xt_warp_reduce(value, combine);
        __syncwarp();
        if (BLOCKS == 1) {
            if (lane == 0) of_warp[which][me / 32] = value;
            xt_barrier_arrive(met + 8 * which); /* every thread, as each has read what the row before had here */
            xt_barrier_wait(met + 8 * which, turn % 2);
        } else { /* no block writes here before all warps have read: it waits for what they make of it */
            if (thread == 0) xt_barrier_expect(met + 8 * which, BLOCKS * WARPS * 4);
            if (lane < BLOCKS)
                xt_put_shared_of(xt_shared_of(xt_shared_address(&of_warp[which][me / 32]), lane), value,
                                 xt_shared_of(met + 8 * which, lane));
            xt_barrier_wait(met + 8 * which, turn % 2);
        }
        return xt_warp_reduce(lane < BLOCKS * WARPS ? of_warp[which][lane] : neutral, combine);
    };
    int64_t next = first < rows ? targets[first] : 0;
    for (int64_t row = first; row < rows; row += step, turn++) {
        const T *x = logits + row * ld; /* [vocab] */
        const int64_t target = next;
        const bool counts = target != ignore_index, known = target >= 0 && target < vocab;
        const bool zeros = !counts || !known; /* even where the logits are not finite */
        if (row + step < rows) next = targets[row + step];
        const T last = me < tail ? x[vocab - tail + me] : nothing;
        float m = fmax(-FLT_MAX, xt_load(last)), sum = exp_for<T>(xt_load(last) - m);
        int again = stage; /* of the gradient */
        for (int g = 0; g < groups; g++) {
            const int at = g * LOADS * ALL + me;
            const uint4 *from = room + stage * (LOADS * RING_THREADS) + thread;
            xt_barrier_wait(full + 8 * stage, parity);
            if (at < vectors) {
                XtPiece<T, W> q[LOADS];
#pragma unroll
                for (int u = 0; u < LOADS; u++)
                    q[u] = at + u * ALL < vectors ? xt_read<T, W>((const T *)(from + u * RING_THREADS)) : xt_all<T, W>(nothing);
                add_group(q, none, [](int) { return true; }, m, sum);
            }
            advance(stage);
        }
        /* The logit of the target, for the thread that has it. */
        const int place = zeros ? 0 : (int)(target / W); /* its vector */
        const bool in_body = !zeros && place < vectors,
                   mine = in_body ? place % ALL == me : !zeros && target - (vocab - tail) == me;
        float at_target = xt_load(last);
        if (in_body && mine) {
            const uint4 *from = room + (again + place / (LOADS * ALL)) % RING_STAGES * (LOADS * RING_THREADS);
            at_target = xt_load(((const T *)(from + place / ALL % LOADS * RING_THREADS + thread))[target % W]);
        }
        const float peak = reduce(0, m, -FLT_MAX, XtMax());
        sum = reduce(1, sum * exp_for<T>(m - peak), 0.0f, XtSum());
        if (sum == 0) sum = NAN; /* every logit is -Inf: the largest term is exp(-Inf + Inf) */
        const float log_sum = log(sum), lse_row = peak + log_sum, growth = Z ? z_growth(z, lse_row) : 1.0f;
        if (me == 0) {
            lse[row] = lse_row;
            if (counts && !known) xt_report_index(report, slot, position + row, target, vocab);
        }
        if (zeros ? me == 0 : mine) {
            float loss = zeros ? 0.0f : (peak - at_target) + log_sum; /* not lse - x, as above */
            if (Z && !zeros) loss += float(z) * lse_row * lse_row;
            losses[row] = loss;
        }
        T *dx = dlogits + row * ld;
        const T zero = xt_store<T>(0.0f);
        if (me < tail) {
            const int64_t v = vocab - tail + me;
            dx[v] = zeros ? zero : gradient_of(last, none, lse_row, growth, v == target, scale);
        }
        for (int g = 0; g < groups; g++) {
            const int at = g * LOADS * ALL + me;
            const uint4 *from = room + again * (LOADS * RING_THREADS) + thread;
            XtPiece<T, W> q[LOADS]; /* behind the row: what the stage had before, and nobody gets it */
#pragma unroll
            for (int u = 0; u < LOADS; u++) q[u] = xt_read<T, W>((const T *)(from + u * RING_THREADS));
            if (zeros) {
#pragma unroll
                for (int u = 0; u < LOADS; u++) q[u] = xt_all<T, W>(zero);
            } else {
#pragma unroll
                for (int u = 0; u < LOADS; u++) q[u] = gradient_of(q[u], none, lse_row, growth, -1, scale);
            }
#pragma unroll
            for (int u = 0; u < LOADS; u++)
                if (at + u * ALL < vectors) xt_write(dx + (int64_t)(at + u * ALL) * W, q[u]);
            /* Behind the stores: they have their values, so the loads have ended. An arrival does not wait for loads. */
            xt_barrier_arrive(empty + 8 * again);
            if (++again == RING_STAGES) again = 0;
        }
        if (in_body && mine) {                                                  /* after its vector, by the same thread */
            const float p = __fmul_rn(exp_for<T>(at_target - lse_row), growth); /* rounded before 1 is taken off, as in a vector */
            dx[target] = xt_store<T>((p - 1) * scale);
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* Grid over rows * tiles, blocks of 32 to 256 threads. dlogits, logits [rows, vocab], rows ld apart; lse, targets
 * [rows]; dlosses [rows], [1]. */
template <typename T, int W, bool CAP>
__global__ void __launch_bounds__(256, 4)
    cross_entropy_bwd_kernel(T *dlogits, const T *logits, const XtAcc<T> *lse, const XtAcc<T> *dlosses, const int64_t *targets,
                             int64_t rows, int64_t vocab, int64_t ld, int64_t tiles, int64_t ignore_index, int64_t dloss_stride,
                             double scale, double z, XtAcc<T> cap, XtIndexReport *report, XtIndexSlot slot) {
    typedef XtAcc<T> A;
    const int thread = threadIdx.x, threads = blockDim.x;
    const Softcap<T, CAP> softcap(cap);
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

        const A lse_row = lse[row], growth = z_growth(z, lse_row), factor = dlosses[row * dloss_stride] * (A)scale;
        if (tile == 0 && thread < cut.head) dx[thread] = gradient_of(x[thread], softcap, lse_row, growth, thread == target, factor);
        if (tile == 0 && thread < cut.tail) {
            const int64_t v = vocab - cut.tail + thread;
            dx[v] = gradient_of(x[v], softcap, lse_row, growth, v == target, factor);
        }
        for (int64_t i = begin; i < cut.body; i += step) {
            XtPiece<T, W> q[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; u++)
                if (i + u * threads < cut.body) q[u] = xt_read<T, W>(body + (i + u * threads) * W);
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                if (i + u * threads >= cut.body) continue;
                const int64_t place = target - cut.head - (i + u * threads) * W; /* in this vector, if it is in it */
                xt_write(dbody + (i + u * threads) * W, gradient_of(q[u], softcap, lse_row, growth, place, factor));
            }
        }
    }
}

/* Threads of a row's block: more for longer rows, and none idle. They depend on vocab and the dtype alone, so that a row's loss
 * does not depend on the other rows. */
static int fwd_threads(int64_t vectors) { return vectors <= 128 ? 32 : vectors <= 1024 ? 128 : vectors <= 8192 ? 256 : 512; }

/* 16-byte vectors of a row that wait in shared memory for the gradient: what leaves room for the most blocks, up to 1024 threads on a
 * multiprocessor, whose other vectors stay in its share of the L2 cache (half of 50 MB over 132). The reductions and the system take
 * less than 2 KiB a block. Elementwise: the number changes no result. */
static int64_t vectors_kept(int64_t vectors, int threads) {
    const int64_t share = 192 * 1024 / 16;
    int64_t kept = 0;
    for (int blocks = 1024 / threads; blocks > 0; blocks--) {
        const int64_t room = (xt_shared_limit() / blocks - 2048) / 16;
        kept = vectors < room ? vectors : room;
        if ((vectors - kept) * blocks <= share) break;
    }
    return kept;
}

/* The op that a report of a bad target names. */
static XtIndexSlot index_slot(bool linear) { return linear ? XT_INDEX_LINEAR_CROSS_ENTROPY : XT_INDEX_CROSS_ENTROPY; }

/* Whether the ring takes a row: its gradient is wanted, threads of the plain kernel are those of one block or two, and the stages hold it. */
static bool fits_ring(const XtCrossEntropyFwd *p, int64_t vectors, int threads) {
    return p->dlogits && p->softcap == 0 && xt_dtype_size(p->dtype) == 2 && xt_built_for_sm90a() && xt_compute_capability() == 90 &&
           xt_shared_limit() >= RING_BYTES && ((uintptr_t)p->logits | (uintptr_t)p->dlogits) % 16 == 0 && p->ld % 8 == 0 &&
           vectors > RING_LEAST && threads >= RING_THREADS && vectors <= (int64_t)RING_STAGES * LOADS * threads;
}

template <typename T, int BLOCKS> static XtStatus run_ring(const XtCrossEntropyFwd *p) {
    auto kernel = p->z > 0 ? cross_entropy_ring_kernel<T, BLOCKS, true> : cross_entropy_ring_kernel<T, BLOCKS, false>;
    const int64_t most = xt_multiprocessors() / BLOCKS, clusters = p->rows < most ? p->rows : most;
    XT_CHECK(xt_allow_shared("cross_entropy_fwd", kernel, RING_BYTES));
    xt_launch_clusters(kernel, BLOCKS, (unsigned)(clusters * BLOCKS), RING_THREADS + 32, RING_BYTES, (float *)p->losses,
                       (float *)p->lse, (T *)p->dlogits, (const T *)p->logits, p->targets, p->rows, p->vocab, p->ld, p->first,
                       p->scale, p->z, p->ignore_index, xt_index_report(), index_slot(p->linear));
    return xt_launched("cross_entropy_fwd", p->rows, p->vocab);
}

XtStatus xt_cuda_cross_entropy_fwd(const XtCrossEntropyFwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        const int64_t vectors = p->vocab / XT_WIDTH<T>;
        const int threads = fwd_threads(vectors);
        if constexpr (sizeof(T) == 2)
            if (fits_ring(p, vectors, threads)) return threads == RING_THREADS ? run_ring<T, 1>(p) : run_ring<T, 2>(p);
        const int64_t kept = p->dlogits ? vectors_kept(vectors, threads) : 0;
        auto kernel =
            p->dlogits ? cross_entropy_fwd_kernel<T, true, false, false> : cross_entropy_fwd_kernel<T, false, false, false>;
        if (p->softcap > 0)
            kernel = p->dlogits ? cross_entropy_fwd_kernel<T, true, true, true> : cross_entropy_fwd_kernel<T, false, true, true>;
        else if (p->z > 0)
            kernel = p->dlogits ? cross_entropy_fwd_kernel<T, true, true, false> : cross_entropy_fwd_kernel<T, false, true, false>;
        if (p->dlogits) XT_CHECK(xt_allow_shared("cross_entropy_fwd", kernel, (int)kept * 16));
        xt_launch(kernel, xt_blocks(p->rows, 1), threads, (size_t)kept * 16, (A *)p->losses, (A *)p->lse, (T *)p->dlogits,
                  (const T *)p->logits, p->targets, p->rows, p->vocab, p->ld, kept, p->first, p->scale, p->z, (A)p->softcap,
                  p->ignore_index, xt_index_report(), index_slot(p->linear));
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
        auto kernel = wide ? cross_entropy_bwd_kernel<T, XT_WIDTH<T>, false> : cross_entropy_bwd_kernel<T, 1, false>;
        if (p->softcap > 0) kernel = wide ? cross_entropy_bwd_kernel<T, XT_WIDTH<T>, true> : cross_entropy_bwd_kernel<T, 1, true>;
        xt_launch(kernel, xt_blocks(p->rows * tiles, 1), threads, 0, (T *)p->dlogits, (const T *)p->logits, (const A *)p->lse,
                  (const A *)p->dlosses, p->targets, p->rows, p->vocab, p->ld, tiles, p->ignore_index, p->dloss_stride, p->scale,
                  p->z, (A)p->softcap, xt_index_report(), index_slot(p->linear));
        return xt_launched("cross_entropy_bwd", p->rows, p->vocab);
    });
}
