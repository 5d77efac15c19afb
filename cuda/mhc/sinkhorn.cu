/* sinkhorn.cu - positive matrices scaled towards doubly stochastic ones (Sinkhorn & Knopp 1967), as hyper-connections use it.
 *
 *     form P     A = exp(Z - s), s the maxima of the columns; `iters` times: columns, then rows
 *     form D     A = softmax of the rows of Z, + eps; columns; `iters` - 1 times: rows, then columns
 *     a stage    Y = A / d, d = sum along an axis + eps, or 1 if that is not a normal number (eps = 0, a row or column of zeros)
 *     backward   E = A dA = Y dY - Y sum(Y dY), from the last stage to the first; in P, dZ = E
 *
 * logits, out, dout, dlogits [T, n, n]. G lanes have a matrix in registers, a row a lane; G = 1, 2, 4 or 8 is the least power of
 * two >= n. A lane sums its row; the G lanes exchange values to sum the columns, and all get the same bits. Lanes beyond n hold
 * zeros and divide by 1. The backward keeps only the divisors, one for each lane and stage: lane i has that of row i, or of column
 * i. They are in shared memory, or in scratch memory for very many iterations.
 *
 * A matrix is read once and written once, but takes thousands of cycles of dependent arithmetic. Latency counts, so lanes are
 * spread over as many blocks as possible.
 *
 * The backward rebuilds the matrix before a stage as A = Y d. A subnormal element has lost digits; then the rebuilt start differs
 * from the known one (csrc/cpu/mhc/sinkhorn.c). Such a matrix is done again with the results of the stages: the kernel stores every
 * G-th result in place of the divisors, and computes those between again.
 */
#include "arch/sm80.cuh"
#include "contract/mhc.h"
#include "mhc.cuh"

#include <cfloat>

static constexpr int THREADS = 128;
static constexpr int64_t SHARED_BYTES = 48 << 10;   /* of divisors in a block */
static constexpr int64_t SCRATCH_BYTES = 256 << 20; /* of all blocks, in scratch memory; that of one block may exceed it */
static constexpr int BLOCKS_A_MULTIPROCESSOR = 4;   /* at most, if the divisors are in scratch memory */
static constexpr unsigned EVERY_LANE = 0xffffffffu;

/* A lane's row, and the numbers that every stage needs. */
template <typename A> struct Place {
    int row, n;
    A eps;
};

/* 0 where the result would be subnormal in float32, as on the CPU: scaled up, a row of such numbers would have no precision. */
__device__ inline float exponential(float v) { return v * 1.44269504f < -125.5f ? 0.0f : expf(v); }
__device__ inline double exponential(double v) { return exp(v); }

__device__ inline float least(float) { return FLT_MIN; }
__device__ inline double least(double) { return DBL_MIN; }
__device__ inline float unit(float) { return FLT_EPSILON; }
__device__ inline double unit(double) { return DBL_EPSILON; }

/* 1 in place of a divisor whose inverse may be infinite, as on the CPU; NaN stays. */
template <typename A> __device__ inline A divisor_of(A sum) { return sum < least(sum) ? A(1) : sum; }

/* 1 / d of a divisor, which is normal (or NaN) and at most 2n + 1. A division would also check for all other cases. One Newton step
 * leaves an error of about half a unit in the last place. */
__device__ inline float inverse_of(float d) {
    float r = xt_reciprocal_approx(d);
    return fmaf(r, fmaf(-d, r, 1.0f), r);
}
__device__ inline double inverse_of(double d) { return 1 / d; }

/* Divides the row a [G] by the sums of the columns + eps. Lane i returns the divisor of column i. */
template <int G, typename A> __device__ inline A divide_columns(A (&a)[G], const Place<A> &at) {
    A mine = 1;
#pragma unroll
    for (int j = 0; j < G; j++) {
        if (j >= at.n) continue;
        A d = divisor_of(xt_warp_sum<G>(a[j]) + at.eps);
        a[j] = at.row < at.n ? a[j] * inverse_of(d) : A(0);
        if (j == at.row) mine = d;
    }
    return mine;
}
template <int G, typename A> __device__ inline A divide_row(A (&a)[G], const Place<A> &at, A eps) {
    A d = eps;
#pragma unroll
    for (int j = 0; j < G; j++) d += a[j];
    if (at.row >= at.n) return 1; /* a row of zeros */
    d = divisor_of(d);
    A inverse = inverse_of(d);
#pragma unroll
    for (int j = 0; j < G; j++) a[j] = j < at.n ? a[j] * inverse : A(0);
    return d;
}

/* Turns e = y dy of a stage into a da. y [G]: the result of the stage. total [G]: the sums of e over the columns. */
template <int G, typename A> __device__ inline void back_columns(A (&e)[G], const A (&y)[G], A (&total)[G], const Place<A> &at) {
#pragma unroll
    for (int j = 0; j < G; j++) {
        if (j >= at.n) continue;
        total[j] = xt_warp_sum<G>(e[j]);
        e[j] -= y[j] * total[j];
    }
}
template <int G, typename A> __device__ inline void back_row(A (&e)[G], const A (&y)[G]) {
    A sum = 0;
#pragma unroll
    for (int j = 0; j < G; j++) sum += e[j];
#pragma unroll
    for (int j = 0; j < G; j++) e[j] -= y[j] * sum;
}

/* Turns the logits in a into the matrix before the first stage. start [G]: exp(Z - s) in P, the softmax in D. */
template <int G, typename A> __device__ inline void begin(A (&a)[G], A (&start)[G], const Place<A> &at, XtSinkhornForm form) {
    bool inside = at.row < at.n;
    if (form == XT_SINKHORN_P) {
#pragma unroll
        for (int j = 0; j < G; j++) {
            if (j >= at.n) continue;
            A most = xt_warp_reduce<G>(inside ? a[j] : -(A)INFINITY, XtFirstMax());
            a[j] = inside ? exponential(a[j] - most) : A(0);
        }
    } else {
        A most = a[0];
#pragma unroll
        for (int j = 1; j < G; j++)
            if (j < at.n && a[j] > most) most = a[j];
#pragma unroll
        for (int j = 0; j < G; j++) a[j] = inside && j < at.n ? exponential(a[j] - most) : A(0);
        divide_row<G>(a, at, A(0));
    }
#pragma unroll
    for (int j = 0; j < G; j++) {
        start[j] = a[j];
        if (form == XT_SINKHORN_D && inside && j < at.n) a[j] += at.eps;
    }
}

/* Turns the logits in a into the result. kept: the divisors of this lane, `step` apart, or NULL. start: see begin. */
template <int G, bool KEEP, typename A>
__device__ inline void run(A (&a)[G], A (&start)[G], A *kept, int step, const Place<A> &at, int64_t iters, XtSinkhornForm form) {
    begin<G>(a, start, at, form);
    for (int64_t i = 0; i < iters; i++) {
        A d = divide_columns<G>(a, at);
        if (KEEP) kept[2 * i * step] = d;
        if (form == XT_SINKHORN_D && i == iters - 1) break;
        d = divide_row<G>(a, at, at.eps);
        if (KEEP) kept[(2 * i + 1) * step] = d;
    }
}

/* A row of the matrix, or of its transpose; zeros beyond n. */
template <int G, typename A> __device__ inline void read_row(A (&a)[G], const A *from, const Place<A> &at, bool transpose) {
#pragma unroll
    for (int j = 0; j < G; j++) {
        a[j] = 0;
        if (j < at.n && at.row < at.n) a[j] = from[transpose ? j * at.n + at.row : at.row * at.n + j];
    }
}
template <int G, typename A> __device__ inline void write_row(A *to, const A (&a)[G], const Place<A> &at, bool transpose) {
#pragma unroll
    for (int j = 0; j < G; j++)
        if (j < at.n && at.row < at.n) to[transpose ? j * at.n + at.row : at.row * at.n + j] = a[j];
}

/* Exchanges need whole warps: lanes beyond the last matrix work on a copy of it and do not write. */
template <typename A, int G>
__global__ void __launch_bounds__(THREADS)
    sinkhorn_fwd_kernel(A *out, const A *logits, int64_t tokens, int n, int64_t iters, A eps, XtSinkhornForm form, bool transpose) {
    const Place<A> at = {(int)threadIdx.x % G, n, eps};
    for (int64_t first = (int64_t)blockIdx.x * (THREADS / G); first < tokens; first += (int64_t)gridDim.x * (THREADS / G)) {
        int64_t t = first + threadIdx.x / G, from = t < tokens ? t : tokens - 1;
        A a[G], start[G];
        read_row<G>(a, logits + from * n * n, at, false);
        run<G, false>(a, start, (A *)nullptr, 0, at, iters, form);
        if (t < tokens) write_row<G>(out + t * n * n, a, at, transpose);
    }
}

/* Whether a matrix rebuilt from its divisors differs from `start` by more than four roundings a stage. */
template <int G, typename A>
__device__ inline bool differs(const A (&rebuilt)[G], const A (&start)[G], const Place<A> &at, int64_t stages,
                               XtSinkhornForm form) {
    bool wrong = false;
    A off = 2 * unit(at.eps) * (A)stages, added = form == XT_SINKHORN_D && at.row < at.n ? at.eps : A(0);
#pragma unroll
    for (int j = 0; j < G; j++) {
        if (j >= at.n) continue;
        A right = start[j] + added, error = rebuilt[j] - right;
        wrong |= (error < 0 ? -error : error) > off * right;
    }
    return wrong;
}

/* Forward and backward with the exact results of the stages. a [G]: logits; e: dM, becomes A dA of the start; total: of stage 0.
 * kept: room for all stages, THREADS apart, and up to G - 1 more. */
template <int G, typename A>
__device__ __noinline__ void exactly(A (&a)[G], A (&e)[G], A (&total)[G], A *kept, const Place<A> &at, int64_t stages,
                                     XtSinkhornForm form) {
    A start[G], y[G][G]; /* y: the results of G stages */

    auto stage = [&](int64_t s) {
        if (s % 2) divide_row<G>(a, at, at.eps);
        else divide_columns<G>(a, at);
    };
    begin<G>(a, start, at, form);
    for (int64_t s = 0; s < stages; s++) {
        if (s % G == 0)
            for (int j = 0; j < G; j++) kept[(s + j) * THREADS] = a[j];
        stage(s);
    }
    for (int j = 0; j < G; j++) e[j] *= a[j];
    for (int64_t first = (stages - 1) / G * G; first >= 0; first -= G) {
        int count = (int)(stages - first < G ? stages - first : G);
        for (int j = 0; j < G; j++) a[j] = kept[(first + j) * THREADS];
        for (int k = 0; k < count; k++) {
            stage(first + k);
            for (int j = 0; j < G; j++) y[k][j] = a[j];
        }
        for (int k = count; k-- > 0;) {
            if ((first + k) % 2) back_row<G>(e, y[k]);
            else back_columns<G>(e, y[k], total, at);
        }
    }
}

/* Divisors are in scratch [blocks][room][THREADS], or in shared memory [room][THREADS] if it is NULL. room: the stages, rounded up
 * to G. */
template <typename A, int G>
__global__ void __launch_bounds__(THREADS)
    sinkhorn_bwd_kernel(A *dlogits, const A *dout, const A *logits, A *scratch, int64_t room, int64_t tokens, int n, int64_t iters,
                        A eps, XtSinkhornForm form, bool transpose) {
    extern __shared__ double divisors[];
    int64_t stages = 2 * iters - (form == XT_SINKHORN_D);
    A *kept = (scratch ? scratch + (int64_t)blockIdx.x * room * THREADS : (A *)divisors) + threadIdx.x;
    const Place<A> at = {(int)threadIdx.x % G, n, eps};
    int lead = (int)threadIdx.x % 32 / G * G; /* the lane of the matrix's first row */
    auto of_matrix = [&](bool mine) { return __ballot_sync(EVERY_LANE, mine) >> lead & ((1u << G) - 1); };
    for (int64_t first = (int64_t)blockIdx.x * (THREADS / G); first < tokens; first += (int64_t)gridDim.x * (THREADS / G)) {
        int64_t t = first + threadIdx.x / G, from = t < tokens ? t : tokens - 1;
        A y[G], e[G], start[G], total[G];
        read_row<G>(y, logits + from * n * n, at, false);
        read_row<G>(e, dout + from * n * n, at, transpose);
        run<G, true>(y, start, kept, THREADS, at, iters, form);
#pragma unroll
        for (int j = 0; j < G; j++) {
            e[j] *= y[j];
            total[j] = 0;
        }
        A d = 1;
        for (int64_t s = stages; s-- > 0;) { /* even stages divide columns */
            d = kept[s * THREADS];
            if (s % 2) {
                back_row<G>(e, y);
#pragma unroll
                for (int j = 0; j < G; j++) y[j] *= d;
            } else {
                back_columns<G>(e, y, total, at);
#pragma unroll
                for (int j = 0; j < G; j++) y[j] *= __shfl_sync(EVERY_LANE, d, lead + j);
            }
        }
        bool wrong = of_matrix(differs<G>(y, start, at, stages, form)) != 0;
        if (__any_sync(EVERY_LANE, wrong)) {
            A again[G], e_again[G], total_again[G];
            read_row<G>(again, logits + from * n * n, at, false);
            read_row<G>(e_again, dout + from * n * n, at, transpose);
            exactly<G>(again, e_again, total_again, kept, at, stages, form);
#pragma unroll
            for (int j = 0; j < G; j++) {
                if (!wrong) continue; /* a matrix's gradient does not depend on its neighbours */
                e[j] = e_again[j];
                total[j] = total_again[j];
            }
        }
        /* P: the shift changes the result, because stage 0 adds eps after it. Its gradient goes to each column's first maximum. */
        if (form == XT_SINKHORN_P) {
#pragma unroll
            for (int j = 0; j < G; j++) {
                if (j >= n) continue;
                unsigned ones = of_matrix(start[j] == 1 && at.row < n);
                A divisor = __shfl_sync(EVERY_LANE, d, lead + j);
                if (ones && __ffs((int)ones) - 1 == at.row) e[j] -= total[j] * eps / divisor;
            }
        } else {
            A sum = 0;
#pragma unroll
            for (int j = 0; j < G; j++) {
                e[j] *= start[j] == 0 ? A(0) : start[j] / (start[j] + eps);
                sum += e[j];
            }
#pragma unroll
            for (int j = 0; j < G; j++) e[j] -= start[j] * sum;
        }
        if (t < tokens) write_row<G>(dlogits + t * n * n, e, at, false);
    }
}

/* Calls f(A(), constant G). */
template <typename F> static void by_size(XtDtype dtype, int64_t n, F f) {
    auto sized = [&](auto zero) {
        if (n == 1) f(zero, XtMhcConstant<1>());
        else if (n == 2) f(zero, XtMhcConstant<2>());
        else if (n <= 4) f(zero, XtMhcConstant<4>());
        else f(zero, XtMhcConstant<8>());
    };
    if (dtype == XT_FLOAT64) sized(double());
    else sized(float());
}

XtStatus xt_cuda_sinkhorn_fwd(const XtSinkhornFwd *p) {
    if (p->tokens == 0) return XT_OK;
    by_size(p->dtype, p->streams, [&](auto zero, auto size) {
        using A = decltype(zero);
        constexpr int G = decltype(size)::value;
        xt_launch(sinkhorn_fwd_kernel<A, G>, xt_blocks(p->tokens, THREADS / G), THREADS, 0, (A *)p->out, (const A *)p->logits,
                  p->tokens, (int)p->streams, p->iters, (A)p->eps, p->form, p->transpose);
    });
    return xt_launched("sinkhorn_fwd", p->tokens, p->streams, p->iters);
}

XtStatus xt_cuda_sinkhorn_bwd(const XtSinkhornBwd *p) {
    if (p->tokens == 0) return XT_OK;
    XtScratch scratch;
    XtStatus status = XT_OK;
    by_size(p->dtype, p->streams, [&](auto zero, auto size) {
        using A = decltype(zero);
        constexpr int G = decltype(size)::value;
        unsigned blocks = xt_blocks(p->tokens, THREADS / G);
        int64_t stages = 2 * p->iters - (p->form == XT_SINKHORN_D), room = (stages + G - 1) / G * G;
        int64_t nbytes = room * THREADS * (int64_t)sizeof(A);
        bool shared = nbytes <= SHARED_BYTES;
        if (!shared) {
            int64_t resident = (int64_t)BLOCKS_A_MULTIPROCESSOR * xt_multiprocessors(), fit = SCRATCH_BYTES / nbytes;
            int64_t most = fit < 1 ? 1 : fit < resident ? fit : resident;
            if (blocks > most) blocks = (unsigned)most;
            status = scratch.allocate((size_t)nbytes * blocks);
            if (status != XT_OK) return;
        }
        xt_launch(sinkhorn_bwd_kernel<A, G>, blocks, THREADS, shared ? (size_t)nbytes : 0, (A *)p->dlogits, (const A *)p->dout,
                  (const A *)p->logits, (A *)scratch.data, room, p->tokens, (int)p->streams, p->iters, (A)p->eps, p->form,
                  p->transpose);
    });
    if (status != XT_OK) return status;
    return xt_launched("sinkhorn_bwd", p->tokens, p->streams, p->iters);
}
