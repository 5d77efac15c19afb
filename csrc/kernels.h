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
 * A target outside [0, vocab) that is not ignore_index: XT_INDEX_ERROR with its position and value.
 * Bwd: dlogits[r, v] = (exp(logits[r, v] - lse[r]) - [v == target[r]]) * dlosses[r * dloss_stride] * scale; ignored rows get 0. */
typedef struct XtCrossEntropyFwd {
    void *losses, *lse;
    const void *logits;
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index;
} XtCrossEntropyFwd;
typedef struct XtCrossEntropyBwd {
    void *dlogits;
    const void *logits, *lse, *dlosses; /* dlosses ACC: [rows], or one value when dloss_stride == 0 */
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index, dloss_stride;
    double scale;
} XtCrossEntropyBwd;

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
 * guard: one float on the device, or NULL; when it is NaN or Inf nothing is written. */
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
    const float *guard; /* borrows */
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
    X(adamw, XtAdamW)                          \
    X(grad_norm, XtGradNorm)                   \
    X(clip, XtClip)
/* clang-format on */

/* Named implementations; the first of a table that is usable is what "auto" picks unless an environment variable or a context says
 * otherwise. */
typedef struct XtGemmBackend {
    const char *name;
    XtStatus (*run)(const XtGemm *p);
    bool (*usable)(void); /* NULL: always; asked for "auto" only, because asking may open a library */
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
    int64_t launches, synchronizations, to_host, from_host, allocations; /* since the library was opened */
    int64_t pool_used, pool_reserved, pool_peak;                         /* bytes of the memory pool, scratch included */
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
    XtStatus (*wait_for)(int index, void *foreign);  /* work queued from now on waits for what `foreign` holds now */
    XtStatus (*make_wait)(int index, void *foreign); /* and the other way round */
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

/* A backend in a library of its own exports one function, which gets what it needs of the process that opens it. */
typedef struct XtHost {
    const char *version; /* of xtrain, with the size of XtBackend: a library of another build is refused */
    size_t table_size;
    XtStatus (*error)(XtStatus status, const char *message); /* xt_error */
    const char *const *folders;                              /* where Python packages lie; ends with NULL; outlives the library */
} XtHost;
typedef XtStatus (*XtOpenBackend)(const XtHost *host, const XtBackend **out); /* "xt_open_cuda" */

extern const XtBackend xt_cpu_backend;

#define XT_X(slot, Params) XtStatus xt_cpu_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X

#ifdef __cplusplus
}
#endif

#endif
