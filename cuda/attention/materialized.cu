/* materialized.cu - attention through batched matrix products and one fused kernel over the rows of scores.
 *
 *     forward   S = scale Q K^T;  [ P = softmax(S) with the causal mask, lse ];  out = P V
 *     backward  S = scale Q K^T;  dP = dO V^T;  [ P = exp(S - lse), dS = P (dP - delta), delta_i = dout_i . out_i ];
 *               dV = P^T dO;  dQ = scale dS K;  dK = scale dS^T Q
 *     softcap   t = tanh(scale Q K^T / c);  S = c t;  dS has the factor 1 - t^2
 *
 * The brackets are the kernels of this file: three launches forward and six backward, whatever the batch and the number of heads,
 * one more for a softcap in the forward, and one for each copy below.
 *
 * Grouped queries: the G = H/K query heads that share a kv head are stacked into one matrix of R = G * sq rows, row m * sq + i for
 * query i of head m. A product then has batch (B, K) and M = R, and the sums of dK and dV over the group are part of its inner
 * dimension, added up in ACC and rounded once. Where the strides do not give such a matrix (G > 1 in memory [B, S, H, D]), q and
 * dout are copied to [B, H, sq, D] first and results copied back: B * S * H * D elements, small beside B * H * S * S. K and V are
 * never repeated.
 *
 * bfloat16 and float16: scores rounded to 8 or 11 bits would lose more precision than all other roundings. So q, k, v and dout are
 * widened to float32 for the products that make S and dP. Such numbers fit in TF32, which multiplies them exactly: the scores have
 * the precision of float32. P and dS are rounded to the dtype, each written over its row of float32 scores (rows are twice as long,
 * in elements), and multiplied in the dtype.
 *
 * Scratch memory: the scores of all rows if they fit in SCORE_BYTES, else of as many batch entries, heads of one entry, or rows of
 * one head as fit. The steps are a function of the shape alone. If the rows of one kv head are cut, dK and dV add up the steps in
 * the dtype.
 *
 * The score kernels move each score once in and once out, in 16-byte pieces: rows of scores start at multiples of 32 bytes. A row
 * belongs to a warp (up to 1024 columns of float32) or to a block of 256 threads; it is read up to the diagonal only, and zeros are
 * written beyond. Sums have a fixed tree: a thread's columns in order, then lanes, then warps.
 */
#include "attention.cuh"
#include "contract/elementwise.h"
#include "gemm/gemm.cuh"

#include <type_traits>

#define SCORE_BYTES ((int64_t)1 << 31)
#define THREADS 256 /* per block */
#define TRY(call)                             \
    do {                                      \
        XtStatus status_ = (call);            \
        if (status_ != XT_OK) return status_; \
    } while (0)

/* ---- the rows of scores --------------------------------------------------------------------------------------------------- */

/* What of a call decides which keys a query sees, for xt_seen. */
typedef struct Sees {
    const int32_t *documents;
    int64_t sq, skv, window;
    bool causal;
} Sees;

/* The scores [count, ld] in scratch are those of query rows first ... first + count - 1 of all B * H * sq. */
typedef struct ScoreRows {
    int64_t first, ld;
    unsigned count, sq;
    unsigned head, query; /* of row `first`: first / sq, first % sq */
    unsigned heads;       /* H */
    int cols;             /* skv */
    Sees sees;
} ScoreRows;

/* The columns that row x sees. */
__device__ static XtSeen<int> visible(const ScoreRows &s, unsigned x) {
    unsigned head = s.head + (s.query + x) / s.sq, i = (s.query + x) % s.sq; // of B * H
    return xt_seen<int>(s.sees, head / s.heads, (int)i);
}

/* ROW threads (a warp or the whole block) share a row; all of them call these. */
template <int ROW, typename A, typename Combine> __device__ static A row_reduce(A value, A neutral, Combine combine) {
    return ROW == 32 ? xt_warp_reduce(value, combine) : xt_block_reduce(value, neutral, combine);
}
template <int ROW> __device__ static void row_barrier() {
    if (ROW == 32) __syncwarp();
    else __syncthreads();
}

/* The next scores of a row with `left` columns to go: at once, or one by one at the end of the row. Memory beyond was never
 * written. */
template <typename A, int WIDTH> __device__ static XtVector<A, WIDTH> piece_of(const A *at, int left) {
    if (left >= WIDTH) return *(const XtVector<A, WIDTH> *)at;
    XtVector<A, WIDTH> piece = {};
#pragma unroll
    for (int w = 0; w < WIDTH; w++)
        if (w < left) piece.at[w] = at[w];
    return piece;
}

/* Softmax of a row held in registers, up to ROW * CHUNKS * WIDTH columns: piece c of a thread is columns (c ROW + lane) WIDTH + w.
 * P replaces the row of scores, in T: no thread writes before all have read. */
template <typename T, int ROW, int CHUNKS>
__global__ void __launch_bounds__(THREADS) softmax_kernel(ScoreRows s, XtAcc<T> *scores, XtAcc<T> *lse) { // lse [B, H, sq]
    using A = XtAcc<T>;
    constexpr int WIDTH = XT_WIDTH<A>;
    unsigned per_block = THREADS / ROW;
    int lane = threadIdx.x % ROW;
    for (unsigned x = blockIdx.x * per_block + threadIdx.x / ROW; x < s.count; x += gridDim.x * per_block) {
        A *row = scores + x * s.ld; // [cols]
        T *p = (T *)row;            // [cols]
        const XtSeen<int> seen = visible(s, x);
        auto sees = [&](int col) { return col >= seen.begin && col < seen.end; };
        XtVector<A, WIDTH> e[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int col = (c * ROW + lane) * WIDTH;
            if (col < seen.end) e[c] = piece_of<A, WIDTH>(row + col, s.cols - col);
        }
        A max = -(A)INFINITY, sum = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int col = (c * ROW + lane) * WIDTH;
#pragma unroll
            for (int w = 0; w < WIDTH; w++)
                if (sees(col + w)) max = XtMax()(max, e[c].at[w]);
        }
        max = row_reduce<ROW>(max, -(A)INFINITY, XtMax());
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int col = (c * ROW + lane) * WIDTH;
#pragma unroll
            for (int w = 0; w < WIDTH; w++) {
                e[c].at[w] = sees(col + w) ? exp(e[c].at[w] - max) : (A)0;
                sum += e[c].at[w];
            }
        }
        sum = row_reduce<ROW>(sum, (A)0, XtSum());
        A factor = seen.end > seen.begin ? 1 / sum : (A)0;
        row_barrier<ROW>();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int col = (c * ROW + lane) * WIDTH;
            XtVector<T, WIDTH> piece;
#pragma unroll
            for (int w = 0; w < WIDTH; w++) piece.at[w] = xt_store<T>(e[c].at[w] * factor);
            if (col < s.cols) *(XtVector<T, WIDTH> *)(p + col) = piece;
        }
        if (lane == 0) lse[s.first + x] = seen.end > seen.begin ? max + log(sum) : -(A)INFINITY;
    }
}

/* The same for longer rows: read three times (maximum, sum, result), the second and third time mostly from the L1 cache. */
template <typename T>
__global__ void __launch_bounds__(THREADS) softmax_long_kernel(ScoreRows s, XtAcc<T> *scores, XtAcc<T> *lse) { // lse [B, H, sq]
    using A = XtAcc<T>;
    constexpr int WIDTH = XT_WIDTH<A>, CHUNKS = 4;
    for (unsigned x = blockIdx.x; x < s.count; x += gridDim.x) {
        A *row = scores + x * s.ld; // [cols]
        T *p = (T *)row;            // [cols]
        const XtSeen<int> seen = visible(s, x);
        auto sees = [&](int col) { return col >= seen.begin && col < seen.end; };
        const int first = seen.begin / WIDTH * WIDTH; // the piece that holds the first visible column
        A max = -(A)INFINITY, sum = 0;
#pragma unroll 4
        for (int col = first + threadIdx.x * WIDTH; col < seen.end; col += THREADS * WIDTH) {
            XtVector<A, WIDTH> e = piece_of<A, WIDTH>(row + col, s.cols - col);
#pragma unroll
            for (int w = 0; w < WIDTH; w++)
                if (sees(col + w)) max = XtMax()(max, e.at[w]);
        }
        max = row_reduce<THREADS>(max, -(A)INFINITY, XtMax());
#pragma unroll 4
        for (int col = first + threadIdx.x * WIDTH; col < seen.end; col += THREADS * WIDTH) {
            XtVector<A, WIDTH> e = piece_of<A, WIDTH>(row + col, s.cols - col);
#pragma unroll
            for (int w = 0; w < WIDTH; w++)
                if (sees(col + w)) sum += exp(e.at[w] - max);
        }
        sum = row_reduce<THREADS>(sum, (A)0, XtSum());
        A factor = seen.end > seen.begin ? 1 / sum : (A)0;
        for (int start = 0; start < s.cols; start += CHUNKS * THREADS * WIDTH) {
            XtVector<A, WIDTH> e[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int col = start + (c * THREADS + threadIdx.x) * WIDTH;
                if (col < seen.end) e[c] = piece_of<A, WIDTH>(row + col, s.cols - col);
            }
            /* P of this step overwrites scores of this step and earlier ones: the barrier makes sure that they have been read. */
            row_barrier<THREADS>();
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int col = start + (c * THREADS + threadIdx.x) * WIDTH;
                XtVector<T, WIDTH> piece;
#pragma unroll
                for (int w = 0; w < WIDTH; w++) piece.at[w] = xt_store<T>(sees(col + w) ? exp(e[c].at[w] - max) * factor : (A)0);
                if (col < s.cols) *(XtVector<T, WIDTH> *)(p + col) = piece;
            }
        }
        if (threadIdx.x == 0) lse[s.first + x] = seen.end > seen.begin ? max + log(sum) : -(A)INFINITY;
    }
}

/* s -> cap tanh(s / cap) of whole rows, what no query sees included. Reads and writes the scores once more than softmax does, so that
 * softmax without a softcap stays as it is. */
template <typename A> __global__ void __launch_bounds__(THREADS) softcap_kernel(ScoreRows s, A *scores, A cap) { // [count, ld]
    constexpr int WIDTH = XT_WIDTH<A>;
    const int64_t pieces = s.ld / WIDTH, total = s.count * pieces;
    for (int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x; at < total; at += (int64_t)gridDim.x * THREADS) {
        const int col = (int)(at % pieces) * WIDTH;
        A *row = scores + at / pieces * s.ld; // [cols]
#pragma unroll
        for (int w = 0; w < WIDTH; w++)
            if (col + w < s.cols) row[col + w] = cap * tanh(row[col + w] / cap);
    }
}

/* Rows of D elements by query row: [B, H, sq, D]. */
typedef struct HeadRows {
    const void *data;
    int64_t stride[3];
} HeadRows;

template <typename T> __device__ static const T *head_row(const HeadRows &a, unsigned b, unsigned h, unsigned i) {
    return (const T *)a.data + b * a.stride[0] + h * a.stride[1] + i * a.stride[2];
}

/* S -> P and dP -> dS, in place and in T, for rows of any length: CHUNKS pieces a thread at a time. A step reads its scores,
 * waits until all threads have read theirs, and overwrites scores of this step and earlier ones. The first step reads before
 * delta is summed. CAPPED: the scores come without their softcap `cap`. */
template <typename T, int ROW, int CHUNKS, bool CAPPED>
__global__ void __launch_bounds__(THREADS)
    differentiate_kernel(ScoreRows s, XtAcc<T> *scores, XtAcc<T> *dscores, const XtAcc<T> *lse, HeadRows dout, HeadRows out,
                         unsigned heads, int64_t dim, XtAcc<T> cap) { // lse [B, H, sq]
    using A = XtAcc<T>;
    constexpr int WIDTH = XT_WIDTH<A>, STEP = CHUNKS * ROW * WIDTH;
    unsigned per_block = THREADS / ROW;
    int lane = threadIdx.x % ROW;
    for (unsigned x = blockIdx.x * per_block + threadIdx.x / ROW; x < s.count; x += gridDim.x * per_block) {
        A *row = scores + x * s.ld, *drow = dscores + x * s.ld; // [cols] each
        T *p = (T *)row, *ds = (T *)drow;                       // [cols] each
        const XtSeen<int> seen = visible(s, x);
        auto sees = [&](int col) { return col >= seen.begin && col < seen.end; };
        XtVector<A, WIDTH> a[CHUNKS], da[CHUNKS];
        auto read = [&](int start) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int col = start + (c * ROW + lane) * WIDTH;
                if (col >= seen.end) continue;
                a[c] = piece_of<A, WIDTH>(row + col, s.cols - col);
                da[c] = piece_of<A, WIDTH>(drow + col, s.cols - col);
            }
        };
        read(0);
        unsigned head = s.head + (s.query + x) / s.sq, i = (s.query + x) % s.sq; // of B * H
        const T *dout_row = head_row<T>(dout, head / heads, head % heads, i);    // [D]
        const T *out_row = head_row<T>(out, head / heads, head % heads, i);      // [D]
        A shift = lse[s.first + x], delta = 0;
        for (int64_t d = lane; d < dim; d += ROW) delta += xt_load(dout_row[d]) * xt_load(out_row[d]);
        delta = row_reduce<ROW>(delta, (A)0, XtSum());
        for (int start = 0;;) {
            row_barrier<ROW>();
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int col = start + (c * ROW + lane) * WIDTH;
                XtVector<T, WIDTH> piece, dpiece;
#pragma unroll
                for (int w = 0; w < WIDTH; w++) {
                    const A t = CAPPED ? tanh(a[c].at[w] / cap) : (A)0;
                    A e = exp((CAPPED ? cap * t : a[c].at[w]) - shift), de = e * (da[c].at[w] - delta);
                    if (CAPPED) de *= 1 - t * t;
                    piece.at[w] = xt_store<T>(sees(col + w) ? e : (A)0);
                    dpiece.at[w] = xt_store<T>(sees(col + w) ? de : (A)0);
                }
                if (col < s.cols) {
                    *(XtVector<T, WIDTH> *)(p + col) = piece;
                    *(XtVector<T, WIDTH> *)(ds + col) = dpiece;
                }
            }
            start += STEP;
            if (start >= s.cols) break;
            read(start);
        }
    }
}

template <typename T> static XtStatus softmax_rows(const ScoreRows &s, XtAcc<T> *scores, XtAcc<T> *lse, XtAcc<T> cap) {
    if (cap > 0) {
        xt_launch(softcap_kernel<XtAcc<T>>, xt_blocks(s.count * (s.ld / XT_WIDTH<XtAcc<T>>), THREADS), THREADS, 0, s, scores, cap);
        TRY(xt_launched("attention_fwd softcap", s.count, s.cols));
    }
    constexpr int WARP = 32 * XT_WIDTH<XtAcc<T>>, BLOCK = THREADS * XT_WIDTH<XtAcc<T>>; // columns that one piece each covers
    unsigned by_warp = xt_blocks(s.count, THREADS / 32), by_block = xt_blocks(s.count, 1);
    if (s.cols <= WARP) xt_launch(softmax_kernel<T, 32, 1>, by_warp, THREADS, 0, s, scores, lse);
    else if (s.cols <= 2 * WARP) xt_launch(softmax_kernel<T, 32, 2>, by_warp, THREADS, 0, s, scores, lse);
    else if (s.cols <= 4 * WARP) xt_launch(softmax_kernel<T, 32, 4>, by_warp, THREADS, 0, s, scores, lse);
    else if (s.cols <= 8 * WARP) xt_launch(softmax_kernel<T, 32, 8>, by_warp, THREADS, 0, s, scores, lse);
    else if (s.cols <= 2 * BLOCK) xt_launch(softmax_kernel<T, THREADS, 2>, by_block, THREADS, 0, s, scores, lse);
    else if (s.cols <= 4 * BLOCK) xt_launch(softmax_kernel<T, THREADS, 4>, by_block, THREADS, 0, s, scores, lse);
    else if (s.cols <= 8 * BLOCK) xt_launch(softmax_kernel<T, THREADS, 8>, by_block, THREADS, 0, s, scores, lse);
    else xt_launch(softmax_long_kernel<T>, by_block, THREADS, 0, s, scores, lse);
    return xt_launched("attention_fwd softmax", s.count, s.cols);
}

template <typename T>
static XtStatus differentiate_rows(const ScoreRows &s, XtAcc<T> *scores, XtAcc<T> *dscores, const XtAttentionBwd *p) {
    constexpr int WARP = 32 * XT_WIDTH<XtAcc<T>>;
    HeadRows dout = {p->dout, {p->dout_stride[0], p->dout_stride[1], p->dout_stride[2]}};
    HeadRows out = {p->out, {p->out_stride[0], p->out_stride[1], p->out_stride[2]}};
    const XtAcc<T> *lse = (const XtAcc<T> *)p->lse;
    auto launch = [&](auto kernel, int row) {
        xt_launch(kernel, xt_blocks(s.count, THREADS / row), THREADS, 0, s, scores, dscores, lse, dout, out, p->heads, p->dim,
                  (XtAcc<T>)p->softcap);
    };
    auto by_length = [&](auto capped) {
        constexpr bool CAPPED = decltype(capped)::value;
        if (s.cols <= WARP) launch(differentiate_kernel<T, 32, 1, CAPPED>, 32);
        else if (s.cols <= 2 * WARP) launch(differentiate_kernel<T, 32, 2, CAPPED>, 32);
        else if (s.cols <= 8 * WARP) launch(differentiate_kernel<T, 32, 4, CAPPED>, 32);
        else launch(differentiate_kernel<T, THREADS, 2, CAPPED>, THREADS);
    };
    if (p->softcap > 0) by_length(std::true_type());
    else by_length(std::false_type());
    return xt_launched("attention_bwd softmax", s.count, s.cols, p->dim);
}

/* ---- matrices for the products ---------------------------------------------------------------------------------------------- */

/* What forward and backward have in common. */
typedef struct Shape {
    XtDtype dtype, acc;
    int64_t batch, heads, kv_heads, sq, skv, dim;
    int64_t group, rows; /* query heads per kv head; group * sq */
    bool tf32;
    Sees sees;
} Shape;

template <typename P> static Shape shape_of(const P *p) {
    int64_t group = p->heads / (p->kv_heads > 0 ? p->kv_heads : 1);
    XtDtype acc = p->dtype == XT_FLOAT64 ? XT_FLOAT64 : XT_FLOAT32;
    /* tf32 is exact for numbers that were 16-bit; the products of 16-bit types ignore it */
    Sees sees = {p->documents, p->sq, p->skv, p->window, p->causal};
    return {p->dtype, acc, p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim, group, group * p->sq, p->tf32 || p->dtype != acc,
            sees};
}

static const char *supports(const Shape &s) {
    if (s.batch <= 0 || s.heads <= 0 || s.sq <= 0 || s.skv <= 0 || s.dim <= 0) return "there is nothing to multiply";
    bool counted = s.skv < (1 << 30) && s.rows < (1 << 30) && s.batch * s.heads < (1 << 30);
    return counted ? NULL : "keys, rows or heads are not counted in 32 bits"; // by the kernels above
}

static int64_t size_of(XtDtype dtype) { return dtype == XT_FLOAT64 ? 8 : dtype == XT_FLOAT32 ? 4 : 2; }
static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* [B, K, rows, cols]: a matrix for each batch entry and kv head. */
typedef struct Matrix {
    char *data;
    XtDtype dtype;
    int64_t ld, stride[2]; /* of rows; of batch and kv head */
} Matrix;

static Matrix from(Matrix a, int64_t b, int64_t n, int64_t row) {
    a.data += (b * a.stride[0] + n * a.stride[1] + row * a.ld) * size_of(a.dtype);
    return a;
}

/* c (+)= alpha op(a) op(b) for `batch` x `kv` of them; c is m x n. */
static XtStatus multiply(const Shape &s, Matrix c, Matrix a, bool trans_a, Matrix b, bool trans_b, const int64_t batch[2],
                         int64_t m, int64_t n, int64_t k, double alpha, bool add) {
    XtGemm p = {};
    p.c = c.data, p.a = a.data, p.b = b.data;
    p.dtype_a = a.dtype, p.dtype_b = b.dtype, p.dtype_c = c.dtype, p.tf32 = s.tf32;
    p.m = m, p.n = n, p.k = k;
    p.trans_a = trans_a, p.trans_b = trans_b;
    p.lda = a.ld, p.ldb = b.ld, p.ldc = c.ld;
    p.alpha = alpha, p.beta = add ? 1.0 : 0.0;
    for (int i = 0; i < 2; i++) {
        p.batch[i] = batch[i];
        p.stride_a[i] = a.stride[i];
        p.stride_b[i] = b.stride[i];
        p.stride_c[i] = c.stride[i];
    }
    return xt_cuda_multiply(&p);
}

/* A tensor [B, heads, seq, D] of the caller. */
typedef struct Heads {
    const void *data;
    int64_t heads, seq;
    const int64_t *stride; /* [3] */
} Heads;

static XtView view_of(const Shape &s, const void *data, XtDtype dtype, int64_t heads, int64_t seq, const int64_t stride[3]) {
    XtView view = {(void *)data, dtype, 4, {s.batch, heads, seq, s.dim}, {stride[0], stride[1], stride[2], 1}};
    return view;
}

/* Whether the heads of a group lie so that their rows are one matrix; if so, that matrix. */
static bool stacked(const Shape &s, const Heads &x, Matrix *out) {
    int64_t group = x.heads / s.kv_heads, ld = x.stride[2];
    if (x.seq == 1) ld = group == 1 ? s.dim : x.stride[1];
    else if (group > 1 && x.stride[1] != x.seq * ld) return false;
    *out = {(char *)x.data, s.dtype, ld, {x.stride[0], x.stride[1] * group}};
    return ld >= s.dim;
}

/* A dense copy's matrix, with rows that start at multiples of 16 bytes, and its view as [B, heads, seq, D]. */
static XtStatus make_room(const Shape &s, const Heads &x, XtDtype dtype, XtScratch *room, Matrix *out, XtView *view) {
    int64_t ld = round_up(s.dim, 8), stride[3] = {x.heads * x.seq * ld, x.seq * ld, ld};
    TRY(room->allocate((size_t)(s.batch * stride[0] * size_of(dtype))));
    *out = {(char *)room->data, dtype, ld, {stride[0], stride[1] * (x.heads / s.kv_heads)}};
    *view = view_of(s, room->data, dtype, x.heads, x.seq, stride);
    return XT_OK;
}

/* A factor in `dtype`: in place, or a copy in `room`. */
static XtStatus take(const Shape &s, const Heads &x, XtDtype dtype, XtScratch *room, Matrix *out) {
    if (dtype == s.dtype && stacked(s, x, out)) return XT_OK;
    XtCopy copy;
    TRY(make_room(s, x, dtype, room, out, &copy.dst));
    copy.src = view_of(s, x.data, s.dtype, x.heads, x.seq, x.stride);
    return xt_cuda_copy(&copy);
}

/* Where a result is computed: in place, or in `room`; then `give` copies it to its tensor. */
static XtStatus target(const Shape &s, const Heads &x, XtScratch *room, Matrix *out) {
    XtView view;
    return stacked(s, x, out) ? XT_OK : make_room(s, x, s.dtype, room, out, &view);
}
static XtStatus give(const Shape &s, const Heads &x, const Matrix &from) {
    if (from.data == x.data) return XT_OK;
    int64_t ld = from.ld, stride[3] = {x.heads * x.seq * ld, x.seq * ld, ld};
    XtCopy copy = {view_of(s, x.data, s.dtype, x.heads, x.seq, x.stride), view_of(s, from.data, s.dtype, x.heads, x.seq, stride)};
    return xt_cuda_copy(&copy);
}

/* ---- steps, where the scores do not fit in scratch at once ------------------------------------------------------------------ */

/* Batch entries, kv heads and stacked rows whose scores are in scratch; of whole heads unless kv = 1, whole entries unless batch
 * = 1. */
typedef struct Part {
    int64_t b, n, row;      /* the first */
    int64_t batch[2], rows; /* how many */
} Part;

/* The largest part, at `row_bytes` of scratch a row. */
static Part largest_part(const Shape &s, int64_t row_bytes) {
    auto at_most = [](int64_t count, int64_t limit) { return limit < 1 ? 1 : limit < count ? limit : count; };
    int64_t fit = SCORE_BYTES / row_bytes;
    return {0, 0, 0, {at_most(s.batch, fit / s.rows / s.kv_heads), at_most(s.kv_heads, fit / s.rows)}, at_most(s.rows, fit)};
}

/* Calls step(part) for all parts in order. */
template <typename Step> static XtStatus each_part(const Shape &s, const Part &most, Step step) {
    auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
    for (int64_t b = 0; b < s.batch; b += most.batch[0])
        for (int64_t n = 0; n < s.kv_heads; n += most.batch[1])
            for (int64_t row = 0; row < s.rows; row += most.rows)
                TRY(step(Part{b,
                              n,
                              row,
                              {least(most.batch[0], s.batch - b), least(most.batch[1], s.kv_heads - n)},
                              least(most.rows, s.rows - row)}));
    return XT_OK;
}

static ScoreRows score_rows(const Shape &s, const Part &t, int64_t ld) {
    int64_t first = (t.b * s.kv_heads + t.n) * s.rows + t.row;
    unsigned count = (unsigned)(t.batch[0] * t.batch[1] * t.rows);
    return {first,      ld,    count, (unsigned)s.sq, (unsigned)(first / s.sq), (unsigned)(first % s.sq), (unsigned)s.heads,
            (int)s.skv, s.sees};
}

/* The scores of a part as a matrix of ACC, or of the dtype once P or dS has taken their place. */
static Matrix score_matrix(const Part &t, const void *scores, XtDtype acc, XtDtype dtype, int64_t ld) {
    ld *= size_of(acc) / size_of(dtype);
    return {(char *)scores, dtype, ld, {t.batch[1] * t.rows * ld, t.rows * ld}};
}

/* ---- forward and backward --------------------------------------------------------------------------------------------------- */

template <typename T> static XtStatus forward(const Shape &s, const XtAttentionFwd *p) {
    XtScratch score_room, room[4];
    Matrix q, k, v, out;
    Heads out_heads = {p->out, s.heads, s.sq, p->out_stride};
    TRY(take(s, {p->q, s.heads, s.sq, p->q_stride}, s.acc, &room[0], &q));
    TRY(take(s, {p->k, s.kv_heads, s.skv, p->k_stride}, s.acc, &room[1], &k));
    TRY(take(s, {p->v, s.kv_heads, s.skv, p->v_stride}, s.dtype, &room[2], &v));
    TRY(target(s, out_heads, &room[3], &out));

    int64_t ld = round_up(s.skv, 8), row_bytes = ld * size_of(s.acc);
    Part most = largest_part(s, row_bytes);
    TRY(score_room.allocate((size_t)(most.batch[0] * most.batch[1] * most.rows * row_bytes)));
    TRY(each_part(s, most, [&](const Part &t) {
        void *scores = score_room.data;
        Matrix as_acc = score_matrix(t, scores, s.acc, s.acc, ld), as_p = score_matrix(t, scores, s.acc, s.dtype, ld);
        TRY(multiply(s, as_acc, from(q, t.b, t.n, t.row), false, from(k, t.b, t.n, 0), true, t.batch, t.rows, s.skv, s.dim,
                     p->scale, false));
        TRY(softmax_rows<T>(score_rows(s, t, ld), (XtAcc<T> *)scores, (XtAcc<T> *)p->lse, (XtAcc<T>)p->softcap));
        return multiply(s, from(out, t.b, t.n, t.row), as_p, false, from(v, t.b, t.n, 0), false, t.batch, t.rows, s.dim, s.skv, 1,
                        false);
    }));
    return give(s, out_heads, out);
}

template <typename T> static XtStatus backward(const Shape &s, const XtAttentionBwd *p) {
    XtScratch score_room, room[10];
    Heads q_heads = {p->q, s.heads, s.sq, p->q_stride}, dout_heads = {p->dout, s.heads, s.sq, p->dout_stride};
    Heads k_heads = {p->k, s.kv_heads, s.skv, p->k_stride}, v_heads = {p->v, s.kv_heads, s.skv, p->v_stride};
    Heads dq_heads = {p->dq, s.heads, s.sq, p->dq_stride};
    Heads dk_heads = {p->dk, s.kv_heads, s.skv, p->dk_stride}, dv_heads = {p->dv, s.kv_heads, s.skv, p->dv_stride};
    Matrix q, k, dout, dq, dk, dv;            // in the dtype
    Matrix wide_q, wide_k, wide_v, wide_dout; // in ACC, for the scores: the same ones if that is the dtype
    TRY(take(s, q_heads, s.dtype, &room[0], &q));
    TRY(take(s, k_heads, s.dtype, &room[1], &k));
    TRY(take(s, dout_heads, s.dtype, &room[2], &dout));
    TRY(take(s, v_heads, s.acc, &room[3], &wide_v));
    wide_q = q, wide_k = k, wide_dout = dout;
    if (s.acc != s.dtype) {
        TRY(take(s, q_heads, s.acc, &room[4], &wide_q));
        TRY(take(s, k_heads, s.acc, &room[5], &wide_k));
        TRY(take(s, dout_heads, s.acc, &room[6], &wide_dout));
    }
    TRY(target(s, dq_heads, &room[7], &dq));
    TRY(target(s, dk_heads, &room[8], &dk));
    TRY(target(s, dv_heads, &room[9], &dv));

    int64_t ld = round_up(s.skv, 8), row_bytes = ld * size_of(s.acc);
    Part most = largest_part(s, 2 * row_bytes);
    int64_t room_bytes = most.batch[0] * most.batch[1] * most.rows * row_bytes; // of S; as much of dP
    TRY(score_room.allocate((size_t)(2 * room_bytes)));
    TRY(each_part(s, most, [&](const Part &t) {
        void *scores = score_room.data, *dscores = (char *)scores + room_bytes;
        Matrix as_acc = score_matrix(t, scores, s.acc, s.acc, ld), das_acc = score_matrix(t, dscores, s.acc, s.acc, ld);
        Matrix as_p = score_matrix(t, scores, s.acc, s.dtype, ld), as_ds = score_matrix(t, dscores, s.acc, s.dtype, ld);
        Matrix dout_t = from(dout, t.b, t.n, t.row), q_t = from(q, t.b, t.n, t.row);
        bool add = t.row > 0; // dK and dV of this head have begun
        TRY(multiply(s, as_acc, from(wide_q, t.b, t.n, t.row), false, from(wide_k, t.b, t.n, 0), true, t.batch, t.rows, s.skv,
                     s.dim, p->scale, false));
        TRY(multiply(s, das_acc, from(wide_dout, t.b, t.n, t.row), false, from(wide_v, t.b, t.n, 0), true, t.batch, t.rows, s.skv,
                     s.dim, 1, false));
        TRY(differentiate_rows<T>(score_rows(s, t, ld), (XtAcc<T> *)scores, (XtAcc<T> *)dscores, p));
        TRY(multiply(s, from(dv, t.b, t.n, 0), as_p, true, dout_t, false, t.batch, s.skv, s.dim, t.rows, 1, add));
        TRY(multiply(s, from(dq, t.b, t.n, t.row), as_ds, false, from(k, t.b, t.n, 0), false, t.batch, t.rows, s.dim, s.skv,
                     p->scale, false));
        return multiply(s, from(dk, t.b, t.n, 0), as_ds, true, q_t, false, t.batch, s.skv, s.dim, t.rows, p->scale, add);
    }));
    TRY(give(s, dq_heads, dq));
    TRY(give(s, dk_heads, dk));
    return give(s, dv_heads, dv);
}

const char *xt_cuda_attention_materialized_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *) {
    return supports(shape_of(p));
}
const char *xt_cuda_attention_materialized_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *) {
    return supports(shape_of(p));
}

XtStatus xt_cuda_attention_materialized_fwd(const XtAttentionFwd *p) {
    return xt_by_float(p->dtype, [&](auto zero) { return forward<decltype(zero)>(shape_of(p), p); });
}

XtStatus xt_cuda_attention_materialized_bwd(const XtAttentionBwd *p) {
    return xt_by_float(p->dtype, [&](auto zero) { return backward<decltype(zero)>(shape_of(p), p); });
}
