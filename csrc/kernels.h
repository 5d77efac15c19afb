/* kernels.h - THE kernel contract: what every backend (csrc/cpu, cuda) implements and what csrc/ops may call.
 *
 * Per kernel one parameter struct with its contract, and one line in XT_KERNELS below. From that list come the backend table, the
 * slot names and the coverage test. Rules that hold for every kernel unless its contract says otherwise:
 *
 *   - Arguments are right: ops check, kernels assume. What only the data can show (an index out of range) the kernel reports.
 *   - Outputs never overlap inputs, except that an elementwise output may be exactly one of its inputs (same data and strides).
 *   - Sizes of 0 are legal and mean "nothing to do" (reductions write their neutral element).
 *   - ACC: float64 computes in float64; float32, bfloat16 and float16 compute and keep statistics in float32.
 *   - Deterministic: same inputs, same bits, whatever the number of threads. No float atomics.
 *   - "rows x cols, dense" means row-major without gaps. `float` outputs named lse, rstd, losses have dtype ACC.
 *
 * Letters: B batch, S sequence, C channels, H query heads, K kv heads, D head dim, V vocab; M, N, K in gemm only.
 */
#ifndef XT_KERNELS_H
#define XT_KERNELS_H

#include "xtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- elementwise and data movement: views of any strides, equal shapes --------------------------------------------------- */

/* dst[i] = (dst dtype) src[i]. Any pair of dtypes; float -> int truncates, anything -> bool is (x != 0). src strides may be 0. */
typedef struct XtCopy {
    XtView dst, src;
} XtCopy;

/* dst[i] = value. Any dtype. */
typedef struct XtFill {
    XtView dst;
    XtScalar value;
} XtFill;

/* dst[i] = start + i * step, dst dense 1-D, any dtype but bool; computed in int64 when both are integers, else in float64. */
typedef struct XtArange {
    XtView dst;
    XtScalar start, step;
} XtArange;

typedef enum XtRandomKind {
    XT_UNIFORM, /* low + (high - low) * u, u = (word >> 8) * 2^-24, in [low, high) */
    XT_NORMAL,  /* low + high * z (mean low, deviation high), Box-Muller on words (0,1) and (2,3) of a block in float32 */
    XT_RANDINT, /* integer low + (64-bit word pair (2i, 2i+1) % (high - low)): two words an element */
} XtRandomKind;

/* dst dense. UNIFORM and NORMAL: float dtypes; RANDINT: any dtype. Numbers are made in float32 and cast. */
typedef struct XtRandom {
    XtView dst;
    XtRandomKind kind;
    double low, high;
    XtPhilox philox;
} XtRandom;

/* clang-format off */
#define XT_UNARY_OPS(X) \
    X(NEG) X(ABS) X(EXP) X(LOG) X(SQRT) X(RSQRT) X(RECIPROCAL) X(SIN) X(COS) X(TANH) X(SIGMOID) X(RELU) X(SILU) X(GELU) X(GELU_TANH) X(ERF)
/* clang-format on */
typedef enum XtUnaryOp {
#define XT_X(name) XT_##name,
    XT_UNARY_OPS(XT_X)
#undef XT_X
        XT_UNARY_OP_COUNT
} XtUnaryOp;

/* out[i] = f(x[i]). Same dtype, float; NEG and ABS also integers. GELU is the erf form, GELU_TANH the tanh approximation. */
typedef struct XtUnary {
    XtUnaryOp op;
    XtView out, x;
} XtUnary;

/* dx[i] = dy[i] * f'(x[i]), from the input x. All of one float dtype. f'(0) = 0 for ABS and RELU. */
typedef struct XtUnaryBwd {
    XtUnaryOp op;
    XtView dx, dy, x;
} XtUnaryBwd;

/* clang-format off */
#define XT_BINARY_OPS(X) X(ADD) X(SUB) X(MUL) X(DIV) X(POW) X(MAXIMUM) X(MINIMUM) X(EQ) X(NE) X(LT) X(LE) X(GT) X(GE)
/* clang-format on */
typedef enum XtBinaryOp {
#define XT_X(name) XT_##name,
    XT_BINARY_OPS(XT_X)
#undef XT_X
        XT_BINARY_OP_COUNT
} XtBinaryOp;

/* out[i] = a[i] op b[i]; a and b have out's shape (broadcast by stride 0) and one dtype. Comparisons write bool, the rest a's dtype.
 * constant: 0 = both are tensors; 1 = a is `value`; 2 = b is `value` (that view is then ignored).
 * DIV: float dtypes only. Integer POW with a negative exponent gives 0 (1 and -1 excepted). NaN makes MAXIMUM and MINIMUM NaN. */
typedef struct XtBinary {
    XtBinaryOp op;
    XtView out, a, b;
    int constant;
    XtScalar value;
} XtBinary;

/* out[i] = condition[i] ? a[i] : b[i]; condition bool; a, b, out one dtype; all of out's shape. */
typedef struct XtWhere {
    XtView out, condition, a, b;
} XtWhere;

/* clang-format off */
#define XT_REDUCE_OPS(X) X(SUM) X(MEAN) X(MAX) X(MIN) X(ARGMAX)
/* clang-format on */
typedef enum XtReduceOp {
#define XT_X(name) XT_REDUCE_##name,
    XT_REDUCE_OPS(XT_X)
#undef XT_X
        XT_REDUCE_OP_COUNT
} XtReduceOp;

/* x has its kept dims first, then its reduced dims: x.shape = out.shape + reduced. Any strides.
 * SUM keeps integers in int64 (out int64), floats in ACC (out x's dtype). MEAN: floats only; of nothing is NaN. MAX, MIN: first NaN
 * wins; of nothing is refused by the op. ARGMAX: out int64, flat index among the reduced elements, first one on ties.
 * The order of additions is a function of the shape alone. */
typedef struct XtReduce {
    XtReduceOp op;
    XtView out, x;
} XtReduce;

/* Four float64: minimum, maximum, sum over the finite elements of x, and the number of NaN; then the number of +-Inf. out[5]. */
typedef struct XtStats {
    XtView x;    /* any strides, any dtype */
    double *out; /* [5] in host memory */
} XtStats;

/* What XtCompare leaves in host memory. With d = |out - ref| and limit = atol + rtol |ref|, an element is right when both values are
 * finite, d is finite and d <= limit, or when both are the same infinity. NaN is never right. The distances are maxima over the
 * elements where both are finite, 0 when there is none; max_rel = d / |ref| leaves out ref == 0. */
typedef struct XtComparison {
    int64_t errors;                             /* elements that are not right */
    int64_t out_nan, out_inf, ref_nan, ref_inf; /* how many */
    int64_t worst; /* row-major index of the first element with the largest d / limit; -1: no elements */
    double max_abs, max_rel, max_ref, worst_ratio; /* max_ref = |ref|; worst_ratio = d / limit, Inf where a value is not finite */
} XtComparison;

/* Compares views of equal shape and any strides: both of float dtypes, in float64, or both of integer dtypes (bool too), whose
 * distances are exact. */
typedef struct XtCompare {
    XtView out, ref;
    double rtol, atol; /* finite, >= 0 */
    XtComparison *result;
} XtCompare;

/* ---- matrix product ------------------------------------------------------------------------------------------------------ */

/* C[b0,b1] = alpha * op(A[b0,b1]) op(B[b0,b1]) + beta * C[b0,b1], row-major. op(A) is M x K, op(B) is K x N, C is M x N.
 * Stored A has rows of `lda` elements: A[m * lda + k], or A[k * lda + m] when trans_a; B and C alike (C is never transposed).
 * Batch strides may be 0 (broadcast) for A and B. One dtype for all three; ACC accumulation; beta == 0 never reads C; K == 0 scales C.
 * Leading dimensions are >= the row length; columns have stride 1. tf32: float32 operands may be rounded to TF32 (10 mantissa bits)
 * on devices that have such units; sums stay float32. */
typedef struct XtGemm {
    void *c;
    const void *a, *b;
    XtDtype dtype;
    bool tf32;
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldc;
    int64_t batch[2];
    int64_t stride_a[2], stride_b[2], stride_c[2];
    double alpha, beta;
} XtGemm;

/* ---- per-token layers: rows x cols, dense -------------------------------------------------------------------------------- */

/* out = exp(x - max) / sum exp(x - max), per row. Bwd: dx = p * (dy - sum_j dy_j p_j), p = the forward's output. */
typedef struct XtSoftmaxFwd {
    void *out;
    const void *x;
    XtDtype dtype;
    int64_t rows, cols;
} XtSoftmaxFwd;
typedef struct XtSoftmaxBwd {
    void *dx;
    const void *dy, *p;
    XtDtype dtype;
    int64_t rows, cols;
} XtSoftmaxBwd;

/* RMSNorm (Zhang & Sennrich 2019): rstd = 1 / sqrt(mean(x^2) + eps); out = weight * cast(x * rstd), cast to the dtype as HF does.
 * weight [cols] or NULL (ones). rstd [rows] of ACC is written for the backward.
 * Bwd, with g = dy * weight and xh = x * rstd: dx = rstd * (g - xh * mean(g * xh)); dweight = sum_rows dy * xh.
 * dx or dweight may be NULL. dweight has the dtype of weight; `accumulate` adds to it instead of overwriting it: the sum over the first
 * piece of rows starts from what is there. */
typedef struct XtRmsNormFwd {
    void *out, *rstd;
    const void *x, *weight;
    XtDtype dtype;
    int64_t rows, cols;
    double eps;
} XtRmsNormFwd;
typedef struct XtRmsNormBwd {
    void *dx, *dweight;
    const void *dy, *x, *weight, *rstd;
    XtDtype dtype;
    int64_t rows, cols;
    bool accumulate;
} XtRmsNormBwd;

/* Rotary embedding (Su et al. 2021), half-split form: with a = x[..., :D/2], b = x[..., D/2:], angle = pos * theta^(-2i/D),
 * out = (a cos - b sin, b cos + a sin). inverse rotates by -angle: that is the backward. D even. cos and sin are computed in ACC and
 * rounded to the dtype, products in ACC. x and out are [rows, heads, D] with strides (row, head, 1).
 * pos of row r = positions[r] when given (int64, dense), else r % period (period >= 1). */
typedef struct XtRope {
    void *out;
    const void *x;
    const int64_t *positions;
    XtDtype dtype;
    int64_t rows, heads, dim;
    int64_t out_stride[2], x_stride[2]; /* row, head */
    int64_t period;
    double theta;
    bool inverse;
} XtRope;

/* out = silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). gate and up have rows of stride ld_in, out is dense.
 * Bwd: dgate = dy * up * s * (1 + gate * (1 - s)), s = sigmoid(gate); dup = dy * silu(gate); both with row stride ld_in. */
typedef struct XtSwigluFwd {
    void *out;
    const void *gate, *up;
    XtDtype dtype;
    int64_t rows, cols, ld_in;
} XtSwigluFwd;
typedef struct XtSwigluBwd {
    void *dgate, *dup;
    const void *dy, *gate, *up;
    XtDtype dtype;
    int64_t rows, cols, ld_in;
} XtSwigluBwd;

/* out[r] = weight[ids[r]]; weight [vocab, cols]. An id outside [0, vocab): XT_INDEX_ERROR with its position and value.
 * Bwd: dweight[v] (+)= sum of dy[r] over rows with ids[r] == v, in row order; `accumulate` adds to dweight instead of overwriting it. */
typedef struct XtEmbeddingFwd {
    void *out;
    const void *weight;
    const int64_t *ids;
    XtDtype dtype;
    int64_t rows, cols, vocab;
} XtEmbeddingFwd;
typedef struct XtEmbeddingBwd {
    void *dweight;
    const void *dy;
    const int64_t *ids;
    XtDtype dtype;
    int64_t rows, cols, vocab;
    bool accumulate;
} XtEmbeddingBwd;

/* losses[r] = lse[r] - logits[r, target[r]], lse = log sum exp, both ACC; a row whose target is ignore_index has loss 0.
 * logits and dlogits have rows of stride ld >= vocab; what lies between two rows is neither used nor written. dlogits may be logits.
 * A target outside [0, vocab) that is not ignore_index: XT_INDEX_ERROR with its position and value, in the words of the op:
 * linear_cross_entropy when `linear`, else cross_entropy.
 * Bwd: dlogits[r, v] = (exp(logits[r, v] - lse[r]) - [v == target[r]]) * dlosses[r * dloss_stride] * scale; ignored rows get 0. */
typedef struct XtCrossEntropyFwd {
    void *losses, *lse;
    const void *logits;
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index;
    bool linear;
} XtCrossEntropyFwd;
typedef struct XtCrossEntropyBwd {
    void *dlogits;
    const void *logits, *lse, *dlosses; /* dlosses ACC: [rows], or one value when dloss_stride == 0 */
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index, dloss_stride;
    double scale;
    bool linear;
} XtCrossEntropyBwd;

/* ---- manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880): T tokens x n streams x C channels ---------- */

/* A layer F wrapped in hyper-connections reads one mixture of its n residual streams and writes back to all of them:
 *     h_in = sum_j h_pre_j x_j,   y = F(h_in),   out_i = sum_j M_ij x_j + h_post_i y,   M = sinkhorn(h_res)
 * mhc_pre makes h_in and the coefficients of every token, sinkhorn makes M of h_res, mhc_post makes out.
 *
 * Sizes: tokens T >= 0, streams n in 1..8, cols C >= 1 of any value; K = n C, m = n^2 + 2n. Streams (x, out, g = dout, dx [T, n, C];
 * h_in, y, dy, dh_in [T, C]) have `dtype`. Coefficients, parameters and all their gradients have ACC: float32, or float64 for float64
 * streams; they are never rounded to the dtype of the streams. All of it dense, with no alignment beyond that of an element.
 * A token as a vector is stream-major, v[k] = x[i][c] with k = i C + c. The m rows of phi are those of h_pre [0, n), h_post [n, 2n)
 * and h_res [2n, m), the last row by row as an n x n matrix.
 * Every output element of dtype is summed in ACC and rounded once. tf32: as in XtGemm, for the three products with phi (u, w and S)
 * and for those alone; without it phi and du keep all their bits in u and S (phi or du may be split in parts; a bfloat16 or float16
 * stream keeps them in any unit), and in w where dx is float32 or float64. In a dx of 16 bits their product is within 2^-20 of the sum
 * of |phi du| and 2^-37 of m times the largest |du| of the token times the largest |phi gamma| of the channel's neighbours. */

/* With a = alpha expanded to the m rows (alpha[0] for h_pre, alpha[1] for h_post, alpha[2] for h_res), gamma = 1 where NULL:
 *     r = 1 / sqrt(mean_k v_k^2 + norm_eps)              -> rstd [T]
 *     u = phi (v * gamma)                                -> mix [T, m], not normalised
 *     z = a * (r u) + bias
 *     h_pre = sigmoid(z_pre) + hc_eps                    -> [T, n]
 *     h_post = 2 sigmoid(z_post)                         -> [T, n]
 *     h_res = z_res                                      -> [T, n, n], logits
 *     h_in = sum_j h_pre_j x_j                           -> [T, C]
 * rstd, mix and h_pre are for the backward (and always written). sigmoid never overflows: 0 and 1 for huge z. */
typedef struct XtMhcPreFwd {
    void *h_in, *h_post, *h_res, *h_pre, *rstd, *mix;
    const void *x, *phi, *alpha, *bias; /* phi [m, K], alpha [3], bias [m] */
    const void *gamma;                  /* [n, C] or NULL */
    XtDtype dtype;
    int64_t tokens, streams, cols;
    double norm_eps, hc_eps;
    bool tf32;
} XtMhcPreFwd;
/* Per token, with q = r u, z = a * q + bias made again, e = exp(-|z|) and the slope of a sigmoid s' = e / (1 + e)^2, which keeps its
 * precision where the sigmoid is almost 1:
 *     delta_pre_j = (sum_c dh_in_c x_jc) s'_j;   delta_post = 2 dh_post s';   delta_res = dh_res
 *     dq = a * delta;   du = r dq;   w = phi^T du;   kappa = -(sum_j dq_j u_j) r^3 / K
 *     dx = gamma * w + kappa v + h_pre_j dh_in (+ sum_i m_res_ij dout_i) (+ dx_add)
 * and over tokens, with S = sum_t du_t v_t^T [m, K]:
 *     dbias = sum_t delta;   dalpha = sum_t sum over the rows of the block of delta * q   (no factor alpha in either)
 *     dphi = S * gamma (each column);   dgamma_k = sum_j phi_jk S_jk   (no pass over tokens of its own)
 *     (the CPU adds the m terms of dgamma, and dalpha and dbias, in double: they are few, large, and cancel)
 * The terms of dx in brackets are there when their pointers are. `dout` and m_res are what lets the backward of a whole layer do
 * without storing sum_i M_ij dout_i: dout is the gradient of mhc_post's out. dx_add may be dx itself (same pointer).
 * Any of dx, dphi, dalpha, dbias, dgamma may be NULL; dh_in, dh_post and dh_res are always given. Outputs are overwritten; with
 * T = 0 the sums over tokens are zeros. dgamma is NULL when gamma is. r appears as often as written: once in du (in all three blocks
 * of rows), three times in kappa. The order of the sums over tokens depends on the sizes alone. */
typedef struct XtMhcPreBwd {
    void *dx, *dphi, *dalpha, *dbias, *dgamma;
    const void *dh_in, *dh_post, *dh_res;       /* [T, C] of dtype, [T, n], [T, n, n] */
    const void *x, *phi, *alpha, *bias, *gamma; /* the forward's inputs */
    const void *h_pre, *rstd, *mix;             /* the forward's outputs */
    const void *dout, *m_res;                   /* [T, n, C] of dtype and [T, n, n], or both NULL */
    const void *dx_add;                         /* [T, n, C] of dtype, or NULL */
    XtDtype dtype;
    int64_t tokens, streams, cols;
    bool tf32;
} XtMhcPreBwd;

/* The order in which rows and columns are normalised. */
typedef enum XtSinkhornForm {
    XT_SINKHORN_P, /* A = exp(Z - column maxima); `iters` times: A /= column sums + eps, then A /= row sums + eps. Rows end exact. */
    XT_SINKHORN_D, /* A = softmax of the rows of Z, + eps; A /= column sums + eps; `iters` - 1 times: rows, then columns. Columns do. */
} XtSinkhornForm;
/* out [tokens, n, n] = A, or A^T with `transpose`, of each matrix Z in logits [tokens, n, n]; n in 1..8, iters >= 1, eps >= 0. The
 * shift is part of P's definition (its eps feels it), a row's maximum in D's softmax is not. dtype is float32 or float64.
 * Finite logits give finite results, also for eps = 0: float32 differences beyond about 87 count as infinite, rows (D: columns) of zeros
 * may be left, and a divisor (sum + eps) below the least normal number acts as 1, in the backward, too.
 * Bwd, exact for these iterations: dlogits of dout, from the logits alone. Run the forward again keeping only the divisors d (2 iters
 * vectors of n in P, 2 iters - 1 in D), then go backwards with E = Y * dY, the gradient of log Y, which starts as A * dout: for Y = A / d
 *     E_A = E_Y - Y * sum(E_Y), the sum along the axis of the stage (nothing more for the eps in d), and A = Y d for the next stage.
 * Where the start does not come out again (a Y too small for a normal number has lost digits), go again with every Y as it was.
 * There is no division: dA itself overflows where A is small. In the end P: dZ = E, and, as d of the first stage is the only one that s
 * changes, the (first) maximum of each column gets -sum(E_Y) eps / d of that stage more; D: with P = softmax and F = E P / (P + eps),
 * 0 where P is 0, dZ = F - P sum_row F. */
typedef struct XtSinkhornFwd {
    void *out;
    const void *logits;
    XtDtype dtype;
    int64_t tokens, streams;
    int64_t iters;
    double eps;
    XtSinkhornForm form;
    bool transpose;
} XtSinkhornFwd;
typedef struct XtSinkhornBwd {
    void *dlogits;
    const void *dout, *logits;
    XtDtype dtype;
    int64_t tokens, streams;
    int64_t iters;
    double eps;
    XtSinkhornForm form;
    bool transpose;
} XtSinkhornBwd;

/* out_i = sum_j m_res_ij x_j + h_post_i y: out, x [T, n, C], y [T, C] of dtype; h_post [T, n], m_res [T, n, n] of ACC.
 * Bwd: dx_j = sum_i m_res_ij dout_i (+ dx_add, which may be dx); dy = sum_i h_post_i dout_i; dh_post_i = sum_c dout_ic y_c;
 * dm_res_ij = sum_c dout_ic x_jc. Any of dx, dy, dh_post, dm_res may be NULL: a whole layer asks for all but dx, see XtMhcPreBwd. */
typedef struct XtMhcPostFwd {
    void *out;
    const void *x, *y, *h_post, *m_res;
    XtDtype dtype;
    int64_t tokens, streams, cols;
} XtMhcPostFwd;
typedef struct XtMhcPostBwd {
    void *dx, *dy, *dh_post, *dm_res;
    const void *dout, *x, *y, *h_post, *m_res, *dx_add;
    XtDtype dtype;
    int64_t tokens, streams, cols;
} XtMhcPostBwd;

/* ---- attention ----------------------------------------------------------------------------------------------------------- */

/* out[b,h,i] = sum_j P[i,j] v[b,h/(H/K),j], P = softmax_j(scale * q_i . k_j), over j <= i + (skv - sq) when causal (the last query
 * sees everything; for sq == skv the usual triangle). A row that sees nothing gives out = 0 and lse = -inf.
 * lse[b,h,i] (ACC, dense) = log sum_j exp(scale * q_i . k_j). Strides are (b, head, row), the last dim is dense.
 * Bwd: with P rebuilt from lse, delta_i = dout_i . out_i: dV = P^T dO; dP = dO V^T; dS = P * (dP - delta); dQ = scale dS K;
 * dK = scale dS^T Q; dk and dv sum over the H/K query heads that share a kv head. dq, dk, dv are all written, in strides of their own.
 * tf32: as in XtGemm, for the products. */
typedef struct XtAttentionFwd {
    void *out, *lse;
    const void *q, *k, *v;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim;
    int64_t out_stride[3], q_stride[3], k_stride[3], v_stride[3];
    double scale;
    bool causal, tf32;
} XtAttentionFwd;
typedef struct XtAttentionBwd {
    void *dq, *dk, *dv;
    const void *dout, *q, *k, *v, *out, *lse;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim;
    int64_t dq_stride[3], dk_stride[3], dv_stride[3];
    int64_t dout_stride[3], q_stride[3], k_stride[3], v_stride[3], out_stride[3];
    double scale;
    bool causal, tf32;
} XtAttentionBwd;

/* ---- optimizer: a list of dense tensors in one call ------------------------------------------------------------------------ */

/* AdamW (Loshchilov & Hutter 2019), PyTorch's order of operations, for each tensor:
 *   p *= 1 - lr * weight_decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
 *   p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
 * p and g have `dtype`; m, v and master (or NULL: p is the master) have ACC. Computed in ACC; p is the rounded master when given.
 * guard: one float on the device, or NULL; when it is NaN or Inf no tensor is written.
 * missed: one int64 on the device, or NULL: how many of the `step` steps a guard has stopped before this one; where the formula says
 * step, step - missed is meant. missed_after, elsewhere, or NULL: gets missed, plus 1 when the guard stops this step too. */
typedef struct XtAdamWItem {
    void *p, *m, *v, *master;
    const void *g;
    XtDtype dtype;
    int64_t numel;
    double weight_decay;
} XtAdamWItem;
typedef struct XtAdamW {
    const XtAdamWItem *items; /* [count], host memory */
    int64_t count;
    double lr, beta1, beta2, eps;
    int64_t step;       /* >= 1, the step being taken */
    const float *guard; /* borrows, as the others do */
    const int64_t *missed;
    int64_t *missed_after; /* NULL without missed */
} XtAdamW;

/* norm[0] (float32, on the device) = sqrt(sum over all tensors of x^2), in float64 partial sums of fixed size. */
typedef struct XtGradNorm {
    float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
} XtGradNorm;

/* Every item *= min(1, max_norm / (norm[0] + 1e-6)), as torch.nn.utils.clip_grad_norm_. A coefficient of exactly 1 writes nothing.
 * A norm that is NaN or Inf multiplies as it comes: the caller looks at the norm. */
typedef struct XtClip {
    const float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
    double max_norm;
} XtClip;

/* ---- the list ------------------------------------------------------------------------------------------------------------ */

/* X(slot, ParameterStruct). gemm and attention are not here: they have several named implementations each. */
/* clang-format off */
#define XT_KERNELS(X)                          \
    X(copy, XtCopy)                            \
    X(fill, XtFill)                            \
    X(arange, XtArange)                        \
    X(random, XtRandom)                        \
    X(unary, XtUnary)                          \
    X(unary_bwd, XtUnaryBwd)                   \
    X(binary, XtBinary)                        \
    X(where, XtWhere)                          \
    X(reduce, XtReduce)                        \
    X(stats, XtStats)                          \
    X(compare, XtCompare)                      \
    X(softmax_fwd, XtSoftmaxFwd)               \
    X(softmax_bwd, XtSoftmaxBwd)               \
    X(rms_norm_fwd, XtRmsNormFwd)              \
    X(rms_norm_bwd, XtRmsNormBwd)              \
    X(rope, XtRope)                            \
    X(swiglu_fwd, XtSwigluFwd)                 \
    X(swiglu_bwd, XtSwigluBwd)                 \
    X(embedding_fwd, XtEmbeddingFwd)           \
    X(embedding_bwd, XtEmbeddingBwd)           \
    X(cross_entropy_fwd, XtCrossEntropyFwd)    \
    X(cross_entropy_bwd, XtCrossEntropyBwd)    \
    X(mhc_pre_fwd, XtMhcPreFwd)                \
    X(mhc_pre_bwd, XtMhcPreBwd)                \
    X(sinkhorn_fwd, XtSinkhornFwd)             \
    X(sinkhorn_bwd, XtSinkhornBwd)             \
    X(mhc_post_fwd, XtMhcPostFwd)              \
    X(mhc_post_bwd, XtMhcPostBwd)              \
    X(adamw, XtAdamW)                          \
    X(grad_norm, XtGradNorm)                   \
    X(clip, XtClip)
/* clang-format on */

/* Named implementations; the first of a table that is usable is what "auto" picks unless an environment variable or a context says
 * otherwise. */
typedef struct XtGemmBackend {
    const char *name;
    XtStatus (*run)(const XtGemm *p);
    bool (*usable)(void); /* NULL: always; asked for "auto" and for a list of names: asking may open a library */
} XtGemmBackend;
typedef struct XtAttentionBackend {
    const char *name;
    XtStatus (*forward)(const XtAttentionFwd *p);
    XtStatus (*backward)(const XtAttentionBwd *p);
} XtAttentionBackend;

/* What an accelerator is and has done; for people and tests. */
typedef struct XtDeviceInfo {
    char name[256];
    int major, minor, multiprocessors; /* compute capability */
    int driver, runtime;               /* 13000 is 13.0 */
    int64_t memory_total, memory_free; /* bytes, of the whole device */
    char built_for[128];               /* compute capabilities with kernels in this library, "80 86 90a ptx120" */
    char blas[512];                    /* which cuBLASLt was loaded, and from where; "" before the first product */
} XtDeviceInfo;
typedef struct XtDeviceCounters {
    int64_t launches, synchronizations, to_host, from_host; /* since the library was opened */
    int64_t allocations, driver_allocations;                /* blocks asked for, and those that were not kept from before */
    int64_t pool_used, pool_reserved, pool_peak;            /* bytes of the memory pool, scratch included */
} XtDeviceCounters;

/* What an accelerator's table has besides kernels. */
typedef struct XtAccelerator {
    int device_count;
    XtStatus (*use)(int index); /* makes it the calling thread's device: where slots run and scratch comes from */
    XtStatus (*info)(int index, XtDeviceInfo *out);
    XtStatus (*counters)(int index, XtDeviceCounters *out);
    XtStatus (*trim)(int index); /* gives unused memory of the pool back */
    void (*reset_peak)(int index);
    void *(*stream)(int index);                      /* of all its work */
    XtStatus (*make_wait)(int index, void *foreign); /* what that stream gets from now on waits for what is queued here now */
    /* And the other way round: work queued here from now on waits for what the legacy default stream holds now, or (every) whatever
     * stream of the device. No handle: it is asked when memory comes back, and the stream that used it may be gone by then. */
    XtStatus (*wait_for)(int index, bool every);
} XtAccelerator;

/* What a device offers. NULL slots are missing kernels: the coverage test lists and fails them. */
typedef struct XtBackend {
    const char *name; /* "cpu", "cuda" */
    XtStatus (*allocate)(int device_index, size_t nbytes, void **out);
    void (*release)(int device_index, void *data, size_t nbytes);
    XtStatus (*to_host)(int device_index, void *host, const void *device, size_t nbytes);   /* returns when done */
    XtStatus (*from_host)(int device_index, void *device, const void *host, size_t nbytes); /* host may be reused on return */
    XtStatus (*synchronize)(int device_index);
#define XT_X(slot, Params) XtStatus (*slot)(const Params *p);
    XT_KERNELS(XT_X)
#undef XT_X
    const XtGemmBackend *gemm; /* ends with a NULL name */
    const XtAttentionBackend *attention;
    const XtAccelerator *accelerator; /* NULL on the CPU */
} XtBackend;

/* A backend in a library of its own exports two functions. The first is asked first, and says xt_contract() as the library was built:
 * when that is another one, nothing else of this file can be relied on. The second gets what it needs of the process that opens it. */
typedef struct XtHost {
    XtStatus (*error)(XtStatus status, const char *message); /* xt_error */
    const char *const *folders;                              /* where Python packages lie; ends with NULL; outlives the library */
} XtHost;
typedef const char *(*XtBackendContract)(void);                               /* "xt_cuda_contract" */
typedef XtStatus (*XtOpenBackend)(const XtHost *host, const XtBackend **out); /* "xt_open_cuda" */

extern const XtBackend xt_cpu_backend;

#define XT_X(slot, Params) XtStatus xt_cpu_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X

#ifdef __cplusplus
}
#endif

#endif
