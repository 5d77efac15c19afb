/* muon.cu - what a step of Muon does around its products, for a batch of matrices of one shape (tables.cuh).
 *
 *     Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/); momentum as PyTorch writes it, an average:
 *         b = momentum b + (1 - momentum) g;   u = nesterov ? (1 - momentum) g + momentum b : b
 *         direction   x = u / max(|u|, eps)
 *         polynomial  out = coefficient_b gram + coefficient_a I
 *         update      p = p (1 - lr weight_decay) - lr ratio x, and b
 *
 * Bytes an element: direction reads g and b twice and writes x; update reads x, g, b, p (or the master) and writes b, p (and the master).
 * For bfloat16 with a master and x of bfloat16: 14 and 24. Writing u instead of computing it twice would move 2 more, and a step
 * that fails between the kernels would have changed b.
 *
 * No parameter of a launch changes from step to step: lr and guard are read here. Deterministic: the sums of |u|^2 are one float64 per
 * piece, whose tree depends on dtype and alignment; a block a matrix adds them in an order of its own.
 */
#include "contract/optimizer.h"
#include "optimizer/tables.cuh"

typedef struct MuonMatrix {
    void *p, *b, *master, *x; /* [numel] */
    const void *g;            /* [numel] */
    double *scale;            /* 1 / max(|u|, eps) */
    int64_t numel;
    bool wide; /* all pointers take accesses of W elements */
} MuonMatrix;

template <typename A> struct MuonConstants {
    A momentum, rest; /* rest = 1 - momentum */
    bool nesterov;
};
static_assert(sizeof(MuonConstants<double>) + 6 * sizeof(double *) <= OTHER_BYTES, "beside a table");

template <typename A> static MuonConstants<A> constants_of(const XtMuon *p) {
    return {(A)p->momentum, (A)(1 - p->momentum), p->nesterov};
}

/* u of an element; *next becomes the new b. */
template <typename A> __device__ inline A muon_element(A g, A b, const MuonConstants<A> &constant, A *next) {
    *next = constant.momentum * b + constant.rest * g;
    return constant.nesterov ? constant.rest * g + constant.momentum * *next : *next;
}

/* u of W elements from i on. */
template <typename T, int W>
__device__ inline XtVector<XtAcc<T>, W> muon_average(const MuonMatrix &t, const MuonConstants<XtAcc<T>> &constant, int64_t i) {
    typedef XtAcc<T> A;
    const XtPiece<T, W> of_g = xt_read<T, W>((const T *)t.g + i);
    const XtPiece<A, W> of_b = xt_read<A, W>((const A *)t.b + i);
    const XtVector<A, W> g = xt_load(of_g), b = xt_load(of_b);
    XtVector<A, W> u;
#pragma unroll
    for (int j = 0; j < W; j++) {
        A next;
        u.at[j] = muon_element(g.at[j], b.at[j], constant, &next);
    }
    return u;
}

/* f(i) for the elements [begin, end) of a piece, W at a time while `wide`, then one. f takes a number of elements as its type. */
template <int W, typename F> __device__ inline void muon_each(bool wide, int64_t begin, int64_t end, F f) {
    const int64_t middle = wide ? end - (end - begin) % W : begin;
    for (int64_t i = begin + threadIdx.x * W; i < middle; i += THREADS * W) f(i, std::integral_constant<int, W>());
    for (int64_t i = middle + threadIdx.x; i < end; i += THREADS) f(i, std::integral_constant<int, 1>());
}

/* The matrix of this block, and the elements of its piece. */
__device__ inline const MuonMatrix &muon_piece(const Table<MuonMatrix> &table, int64_t *begin, int64_t *end) {
    const int item = item_of(table, blockIdx.x);
    const MuonMatrix &t = table.item[item];
    *begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    *end = t.numel - *begin < PIECE ? t.numel : *begin + PIECE;
    return t;
}

/* Grid: one block a piece; sums [pieces of this table]. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    muon_squares_kernel(double *sums, const __grid_constant__ Table<MuonMatrix> table, const MuonConstants<XtAcc<T>> constant) {
    int64_t begin, end;
    const MuonMatrix &t = muon_piece(table, &begin, &end);
    double sum = 0;
    muon_each<XT_WIDTH<XtAcc<T>>>(t.wide, begin, end, [&](int64_t i, auto width) {
        constexpr int W = decltype(width)::value;
        const XtVector<XtAcc<T>, W> u = muon_average<T, W>(t, constant, i);
#pragma unroll
        for (int j = 0; j < W; j++) sum += (double)u.at[j] * (double)u.at[j];
    });
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/* Grid: one block a matrix of the table. */
__global__ void __launch_bounds__(THREADS)
    muon_scale_kernel(const double *sums, const __grid_constant__ Table<MuonMatrix> table, double eps) {
    double sum = 0;
    for (int i = table.first[blockIdx.x] + threadIdx.x; i < table.first[blockIdx.x + 1]; i += THREADS) sum += sums[i];
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) {
        const double norm = sqrt(sum);
        *table.item[blockIdx.x].scale = 1 / (norm < eps ? eps : norm); /* NaN stays NaN */
    }
}

/* Grid: one block a piece. X: the dtype of x. */
template <typename T, typename X>
__global__ void __launch_bounds__(THREADS)
    muon_direction_kernel(const __grid_constant__ Table<MuonMatrix> table, const MuonConstants<XtAcc<T>> constant) {
    typedef XtAcc<T> A;
    int64_t begin, end;
    const MuonMatrix &t = muon_piece(table, &begin, &end);
    const A scale = (A)*t.scale;
    muon_each<XT_WIDTH<A>>(t.wide, begin, end, [&](int64_t i, auto width) {
        constexpr int W = decltype(width)::value;
        XtVector<A, W> u = muon_average<T, W>(t, constant, i);
#pragma unroll
        for (int j = 0; j < W; j++) u.at[j] *= scale;
        xt_write((X *)t.x + i, xt_store<X>(u));
    });
}

/* Grid: one block a piece. lr [1], guard [1] or NULL. */
template <typename T, typename X>
__global__ void __launch_bounds__(THREADS)
    muon_update_kernel(const __grid_constant__ Table<MuonMatrix> table, const MuonConstants<XtAcc<T>> constant, double weight_decay,
                       double ratio, const double *lr, const float *guard) {
    typedef XtAcc<T> A;
    if (guard && !isfinite(*guard)) return;
    int64_t begin, end;
    const MuonMatrix &t = muon_piece(table, &begin, &end);
    const A decay = (A)(1 - __dmul_rn(*lr, weight_decay)), step = (A)(*lr * ratio); /* not fused, as on the host */
    muon_each<XT_WIDTH<A>>(t.wide, begin, end, [&](int64_t i, auto width) {
        constexpr int W = decltype(width)::value;
        const XtPiece<X, W> of_x = xt_read<X, W>((const X *)t.x + i);
        const XtPiece<T, W> of_g = xt_read<T, W>((const T *)t.g + i);
        const XtPiece<A, W> of_b = xt_read<A, W>((const A *)t.b + i);
        XtVector<A, W> w, b;
        if (t.master) w = xt_load(xt_read<A, W>((const A *)t.master + i));
        else w = xt_load(xt_read<T, W>((const T *)t.p + i));
        const XtVector<A, W> x = xt_load(of_x), g = xt_load(of_g);
        b = xt_load(of_b);
#pragma unroll
        for (int j = 0; j < W; j++) {
            b.at[j] = constant.momentum * b.at[j] + constant.rest * g.at[j];
            w.at[j] = w.at[j] * decay - step * x.at[j];
        }
        xt_write((A *)t.b + i, xt_piece(b));
        if (t.master) xt_write((A *)t.master + i, xt_piece(w));
        xt_write((T *)t.p + i, xt_store<T>(w));
    });
}

/* Calls f(T(), X()) for the dtypes of p and x, which have one ACC. */
template <typename F> static XtStatus by_dtypes(const XtMuon *p, F f) {
    if (p->dtype == XT_FLOAT64) return f(double(), double());
    return xt_by_float(p->dtype, [&](auto t) {
        return xt_by_float(p->dtype_x, [&](auto x) {
            if constexpr (sizeof(t) == 8 || sizeof(x) == 8) return XT_OK; /* ops have refused it */
            else return f(t, x);
        });
    });
}

/* Calls launch(table, pieces) for all matrices. scale [count] or NULL. */
template <typename Launch> static void by_matrices(const XtMuon *p, double *scale, Launch launch) {
    const int64_t numel = p->rows * p->cols;
    const size_t size_x = xt_dtype_size(p->dtype_x), size_p = xt_dtype_size(p->dtype);
    const uintptr_t last = size_p == 8 || size_p == 4 ? 15 : 7, last_x = size_x == 2 ? 7 : 15; /* bits that W elements need as 0 */
    by_tables<MuonMatrix>(
        p->count, 0,
        [&](int64_t i) {
            const XtMuonItem *from = &p->items[i];
            MuonMatrix t;
            t.p = from->p;
            t.b = from->b;
            t.master = from->master;
            t.x = (char *)p->x + (size_t)i * (size_t)numel * size_x;
            t.g = from->g;
            t.scale = scale ? scale + i : nullptr;
            t.numel = numel;
            t.wide = (((uintptr_t)t.p | (uintptr_t)t.g) & last) == 0 && (((uintptr_t)t.b | (uintptr_t)t.master) & 15) == 0 &&
                     ((uintptr_t)t.x & last_x) == 0;
            return t;
        },
        launch);
}

XtStatus xt_cuda_muon_direction(const XtMuon *p) {
    const int64_t numel = p->rows * p->cols, pieces = p->count * xt_divide_up(numel, PIECE);
    if (p->count == 0 || numel == 0) return XT_OK;
    XtScratch scratch;
    XT_CHECK(scratch.allocate((size_t)(pieces + p->count) * sizeof(double)));
    double *sums = (double *)scratch.data, *scale = sums + pieces; /* [pieces], [count] */
    return by_dtypes(p, [&](auto t, auto x) {
        using T = decltype(t);
        using X = decltype(x);
        const MuonConstants<XtAcc<T>> constant = constants_of<XtAcc<T>>(p);
        by_matrices(p, scale, [&](const Table<MuonMatrix> &table, int of_table) {
            xt_launch(muon_squares_kernel<T>, of_table, THREADS, 0, sums, table, constant);
            xt_launch(muon_scale_kernel, table.count, THREADS, 0, (const double *)sums, table, p->eps);
            xt_launch(muon_direction_kernel<T, X>, of_table, THREADS, 0, table, constant);
        });
        return xt_launched("muon_direction", p->count, p->rows, p->cols);
    });
}

XtStatus xt_cuda_muon_update(const XtMuon *p) {
    if (p->count == 0 || p->rows * p->cols == 0) return XT_OK;
    return by_dtypes(p, [&](auto t, auto x) {
        using T = decltype(t);
        using X = decltype(x);
        const MuonConstants<XtAcc<T>> constant = constants_of<XtAcc<T>>(p);
        by_matrices(p, nullptr, [&](const Table<MuonMatrix> &table, int pieces) {
            xt_launch(muon_update_kernel<T, X>, pieces, THREADS, 0, table, constant, p->weight_decay, p->ratio, p->lr, p->guard);
        });
        return xt_launched("muon_update", p->count, p->rows, p->cols);
    });
}

/* out, gram [count, side, side] as `count` elements in all; an element is on a diagonal where its place in the matrix is a multiple of
 * side + 1. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    muon_polynomial_kernel(T *out, const T *gram, int64_t count, int64_t side, XtAcc<T> a, XtAcc<T> b) {
    const int64_t square = side * side;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS) {
        const XtAcc<T> value = b * xt_load(gram[i]);
        out[i] = xt_store<T>(i % square % (side + 1) == 0 ? value + a : value);
    }
}

XtStatus xt_cuda_muon_polynomial(const XtMuonPolynomial *p) {
    const int64_t count = p->count * p->side * p->side;
    if (count == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        xt_launch(muon_polynomial_kernel<T>, xt_blocks(count, THREADS), THREADS, 0, (T *)p->out, (const T *)p->gram, count, p->side,
                  (XtAcc<T>)p->a, (XtAcc<T>)p->b);
        return xt_launched("muon_polynomial", p->count, p->side);
    });
}
