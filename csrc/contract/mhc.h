/* mhc.h - manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880): T tokens x n streams x C channels. Rules for
 * all kernels: kernels.h. */
#pragma once

#include "xtrain.h"

/* A layer F wrapped in hyper-connections reads one mixture of its n residual streams and writes back to all of them:
 *     h_in = sum_j h_pre_j x_j,   y = F(h_in),   out_i = sum_j M_ij x_j + h_post_i y,   M = sinkhorn(h_res)
 * mhc_pre makes h_in and the coefficients of every token, sinkhorn makes M of h_res, mhc_post makes out.
 *
 * Sizes: tokens T >= 0, streams n in 1..8, cols C >= 1 of any value; K = n C, m = n^2 + 2n. Streams (x, out, g = dout, dx [T, n, C];
 * h_in, y, dy, dh_in [T, C]) have `dtype`. Coefficients, parameters and all their gradients have ACC: float32, or float64 for float64
 * streams; they are never rounded to the dtype of the streams. All of it dense, with no alignment beyond that of an element.
 * A token as a vector is stream-major, v[k] = x[i][c] with k = i C + c. The m rows of phi are those of h_pre [0, n), h_post [n, 2n)
 * and h_res [2n, m), the last row by row as an n x n matrix.
 * Every output element of dtype is summed in ACC and rounded once.
 * Precision of the products with phi, u = phi v, w = phi^T du and S = du v^T: tf32 applies to them alone, as in XtGemm. Without it
 * u and S use every bit of phi and du (a kernel may split them into parts; 16-bit streams are exact in any unit), and so does w
 * when dx is float32 or float64. When dx has 16 bits, the error of w is at most 2^-20 of the sum of |phi du|, plus 2^-37 of m times
 * the largest |du| of the token times the largest |phi gamma| of the channel's neighbours. */

/* With a = alpha expanded to the m rows (alpha[0] for h_pre, alpha[1] for h_post, alpha[2] for h_res), gamma = 1 where NULL:
 *     r = 1 / sqrt(mean_k v_k^2 + norm_eps)              -> rstd [T]
 *     u = phi (v * gamma)                                -> mix [T, m], not normalised
 *     z = a * (r u) + bias
 *     h_pre = sigmoid(z_pre) + hc_eps                    -> [T, n]
 *     h_post = 2 sigmoid(z_post)                         -> [T, n]
 *     h_res = z_res                                      -> [T, n, n], logits
 *     h_in = sum_j h_pre_j x_j                           -> [T, C]
 * The backward reads rstd, mix and h_pre; they are always written. sigmoid never overflows: 0 and 1 for huge z. */
typedef struct XtMhcPreFwd {
    void *h_in, *h_post, *h_res, *h_pre, *rstd, *mix;
    const void *x, *phi, *alpha, *bias; /* phi [m, K], alpha [3], bias [m] */
    const void *gamma;                  /* [n, C] or NULL */
    XtDtype dtype;
    int64_t tokens, streams, cols;
    double norm_eps, hc_eps;
    bool tf32;
} XtMhcPreFwd;
/* Per token: q = r u and z = a * q + bias are computed again. s' = e / (1 + e)^2 with e = exp(-|z|) is the slope of a sigmoid,
 * precise also where the sigmoid is almost 1.
 *     delta_pre_j = (sum_c dh_in_c x_jc) s'_j;   delta_post = 2 dh_post s';   delta_res = dh_res
 *     dq = a * delta;   du = r dq;   w = phi^T du;   kappa = -(sum_j dq_j u_j) r^3 / K
 *     dx = gamma * w + kappa v + h_pre_j dh_in (+ sum_i m_res_ij dout_i) (+ dx_add)
 * and over tokens, with S = sum_t du_t v_t^T [m, K]:
 *     dbias = sum_t delta;   dalpha = sum_t sum over the rows of the block of delta * q   (no factor alpha in either)
 *     dphi = S * gamma (each column);   dgamma_k = sum_j phi_jk S_jk   (no pass over tokens of its own)
 *     (the CPU adds the m terms of dgamma, and dalpha and dbias, in double: they are few, large, and cancel)
 * The terms of dx in brackets are added when their pointers are given. dout is the gradient of mhc_post's out: with it and m_res,
 * the backward of a whole layer need not store sum_i M_ij dout_i. dx_add may be dx itself (same pointer).
 * Any of dx, dphi, dalpha, dbias, dgamma may be NULL; dh_in, dh_post and dh_res are always given. Outputs are overwritten; with T =
 * 0 the sums over tokens are zeros. dgamma is NULL when gamma is. du has the factor r in all three blocks of rows, kappa has r^3.
 * The order of the sums over tokens depends on the sizes alone. */
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
    XT_SINKHORN_P, /* A = exp(Z - column maxima); `iters` times: A /= column sums + eps, A /= row sums + eps. Row sums exact. */
    XT_SINKHORN_D, /* A = row softmax of Z, + eps; A /= column sums + eps; `iters` - 1 times: rows, columns. Column sums exact. */
} XtSinkhornForm;
/* out [tokens, n, n] = A, or A^T with `transpose`, of each matrix Z in logits [tokens, n, n]; n in 1..8, iters >= 1, eps >= 0;
 * dtype is float32 or float64.
 * Form P: the shift changes the result, because eps is added after it. Form D: the shift of its softmax does not.
 * Finite logits give finite results, also for eps = 0: float32 differences beyond about 87 count as infinite, rows (D: columns) of
 * zeros stay zero, and a divisor (sum + eps) below the least normal number acts as 1, also in the backward.
 * Bwd: dlogits from dout and the logits, exact for these iterations. The forward runs again and keeps only the divisors d (2 iters
 * vectors of n in P, 2 iters - 1 in D). The walk back carries E = Y * dY, the gradient of log Y, which starts as A * dout. For Y =
 * A / d:
 *     E_A = E_Y - Y * sum(E_Y), the sum along the axis of the stage (the eps in d adds no term), and A = Y d for the stage before.
 * No step divides, because dA itself overflows where A is small. If the walk does not end at the known start (a subnormal Y has
 * lost digits), it is repeated with every Y kept from the forward.
 * At the start, P: dZ = E; the first maximum of each column is the shift, and also gets -sum(E_Y) eps / d of the first stage, the
 * only stage whose d depends on the shift. D: dZ = F - P sum_row F with P = softmax and F = E P / (P + eps), 0 where P is 0. */
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
