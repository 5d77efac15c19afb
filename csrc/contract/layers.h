/* layers.h - per-token layers: rows x cols, dense. The rules for all kernels are in kernels.h. */
#pragma once

#include "xtrain.h"

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
 * weight [cols] or NULL (ones). rstd [rows] of ACC is written for the backward. plus_one, with a weight: out = cast(x * rstd * (1 +
 * weight)), rounded once (Gemma), and 1 + weight, in ACC, stands for the weight below.
 * Bwd, with g = dy * weight and xh = x * rstd: dx = rstd * (g - xh * mean(g * xh)); dweight = sum_rows dy * xh.
 * dx or dweight may be NULL. dweight has the dtype of weight; `accumulate` adds to it instead of overwriting it: the sum over the first
 * piece of rows starts from what is there.
 * With a residual [rows, cols]: sum = cast(x + residual) is written and stands for x. Bwd: x is that sum, and where dsum, the gradient
 * of the sum itself, is given, dx = cast(cast(dx as above) + dsum). All bits are those of an addition and a norm one after the other.
 * sum and residual are both given or both NULL. */
typedef struct XtRmsNormFwd {
    void *out, *rstd, *sum;
    const void *x, *residual, *weight;
    XtDtype dtype;
    int64_t rows, cols;
    double eps;
    bool plus_one;
} XtRmsNormFwd;
typedef struct XtRmsNormBwd {
    void *dx, *dweight;
    const void *dy, *dsum, *x, *weight, *rstd;
    XtDtype dtype;
    int64_t rows, cols;
    bool accumulate, plus_one;
} XtRmsNormBwd;

/* LayerNorm (Ba et al. 2016): mean = mean(x), rstd = 1 / sqrt(mean((x - mean)^2) + eps), xh = (x - mean) * rstd, all in ACC;
 * out = xh * weight + bias, rounded once. weight and bias [cols], or NULL: ones, zeros. mean and rstd [rows] of ACC are written for the
 * backward.
 * Bwd, with g = dy * weight: dx = rstd * (g - mean(g) - xh * mean(g * xh)); dweight = sum_rows dy * xh; dbias = sum_rows dy. Each of the
 * three may be NULL. accumulate_weight and accumulate_bias add to what is there, as in XtRmsNormBwd. residual, sum and dsum are as in
 * XtRmsNormFwd and XtRmsNormBwd, with the same bits. */
typedef struct XtLayerNormFwd {
    void *out, *mean, *rstd, *sum;
    const void *x, *residual, *weight, *bias;
    XtDtype dtype;
    int64_t rows, cols;
    double eps;
} XtLayerNormFwd;
typedef struct XtLayerNormBwd {
    void *dx, *dweight, *dbias;
    const void *dy, *dsum, *x, *weight, *mean, *rstd;
    XtDtype dtype;
    int64_t rows, cols;
    bool accumulate_weight, accumulate_bias;
} XtLayerNormBwd;

/* Rotary embedding (Su et al. 2021), half-split form: with a = x[..., :D/2], b = x[..., D/2:], angle = pos * theta^(-2i/D),
 * out = (a cos - b sin, b cos + a sin). inverse rotates by -angle: that is the backward. D even. cos and sin are computed in ACC and
 * rounded to the dtype, products in ACC. x and out are [rows, heads, D] with strides (row, head, 1).
 * pos of row r = positions[r] when given (int64, dense), else r % period (period >= 1). Frequencies theta^(-2i/D) are scaled as
 * core/rope_scale.h says. theta and factor are at least XT_ROPE_LEAST: frequencies are at most 1e18, so that a float32 holds the angle of
 * every int64 position. */
#define XT_ROPE_LEAST 1e-9
typedef struct XtRopeBase {
    double theta, factor, low_freq_factor, high_freq_factor, original_length;
} XtRopeBase;
typedef struct XtRope {
    void *out;
    const void *x;
    const int64_t *positions;
    XtDtype dtype;
    int64_t rows, heads, dim;
    int64_t out_stride[2], x_stride[2]; /* row, head */
    int64_t period;
    XtRopeBase base;
    bool inverse;
} XtRope;

/* RMSNorm of every head of queries and of keys, then RoPE: for part i (0 the queries, 1 the keys),
 *     n = weight[i] * cast(x[i] * rstd[i]),   out[i] = rope(n),
 * with the formulas and roundings of XtRmsNormFwd over D and of XtRope; n is rounded to the dtype and not stored. x[i] and out[i] are
 * [rows, heads[i], D] with strides (row, head, 1), weight[i] [D]; rstd[i] [rows, heads[i]] of ACC, dense, is written for the backward.
 * D is even. Positions as in XtRope.
 * Bwd: dn = rope of dout[i] by -angle, rounded; dx[i] and dweight[i] are then those of XtRmsNormBwd for dy = dn. dx is always written;
 * dweight[i] may be NULL; accumulate[i] adds to it. out, rstd, dx and, on the CPU, dweight have the bits of the two kernels one after
 * the other. On a GPU that holds for D of a power of two and 16-byte rows; elsewhere, and for dweight, sums are added in another order. */
typedef struct XtQkNormRopeFwd {
    void *out[2], *rstd[2];
    const void *x[2], *weight[2];
    const int64_t *positions;
    XtDtype dtype;
    int64_t rows, heads[2], dim;
    int64_t out_stride[2][2], x_stride[2][2]; /* of a part: row, head */
    int64_t period;
    double eps;
    XtRopeBase base;
} XtQkNormRopeFwd;
typedef struct XtQkNormRopeBwd {
    void *dx[2], *dweight[2];
    const void *dout[2], *x[2], *weight[2], *rstd[2];
    const int64_t *positions;
    XtDtype dtype;
    int64_t rows, heads[2], dim;
    int64_t dx_stride[2][2], dout_stride[2][2], x_stride[2][2]; /* of a part: row, head */
    int64_t period;
    XtRopeBase base;
    bool accumulate[2];
} XtQkNormRopeBwd;

/* All layers of a pre-norm decoder for one new token a row: x, B rows of C channels, is the stream. For each layer, in order,
 *     h = rms_norm(x, norm);  q, k, v = h W_q^T, h W_k^T, h W_v^T;  q, k = rope(rms_norm(q, q_norm)), rope(rms_norm(k, k_norm)) a head
 *     x = x + cached_attention(q, k, v, keys, values) W_o^T
 *     h = rms_norm(x, mlp_norm);  x = x + (silu(h W_gate^T) * (h W_up^T)) W_down^T
 * and out [B, C] is the last x. It has the formulas of XtRmsNormFwd, XtRope, XtCachedAttention and XtSwigluFwd, and each of h, q, k, v,
 * the products, attention's output, the gated values and x is rounded to the dtype, as by the kernels one after the other. positions [B]
 * is where a row stands, for RoPE and in its keys and values [B, K, L, D], which get the new ones; a row that stands outside [0, L) becomes
 * NaN and stores nothing. q_norm and k_norm are NULL in all layers or none: q and k are turned as they are. Weights [out, in], dense;
 * norm, mlp_norm [C], q_norm, k_norm [D], W_q [H D, C], W_k, W_v [K D, C], W_o [C, H D], W_gate, W_up [F, C], W_down [C, F]. H is a
 * multiple of K, D is even. out is not x. With a head, W [V, C], out [B, V] is rms_norm(x, last_norm) W^T of the last x instead; else
 * both are NULL. plain: a device's simplest way. */
typedef struct XtDecoderLayer {
    const void *norm, *q, *k, *v, *q_norm, *k_norm, *o, *mlp_norm, *gate, *up, *down;
    void *keys, *values;
} XtDecoderLayer;
typedef struct XtDecoderStep {
    void *out;
    const void *x;
    const int64_t *positions;
    const XtDecoderLayer *layer; /* [layers], host memory */
    const void *last_norm, *head;
    XtDtype dtype;
    int64_t layers, batch, channels, heads, kv_heads, dim, inner, length, vocab; /* B, C, H, K, D, F, L, V */
    double eps, scale;
    XtRopeBase base;
    bool plain;
} XtDecoderStep;

/* out = silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). gate and up have rows of stride ld_in, out is dense.
 * Bwd: dgate = dy * up * s * (1 + gate * (1 - s)), s = sigmoid(gate); dup = dy * silu(gate); both with row stride ld_in. dgate may be
 * gate and dup may be up: an element is read before it is written. */
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

/* out = gelu(x + bias), bias [cols] added to every row of x [rows, cols], dense; x + bias is not rounded. gelu(v) = v Phi(v) or, with tanh,
 * v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) / 2 (Hendrycks & Gimpel 2016).
 * Bwd: dx = dy gelu'(x + bias). dx may be x or dy: an element is read before it is written. */
typedef struct XtBiasGeluFwd {
    void *out;
    const void *x, *bias;
    XtDtype dtype;
    int64_t rows, cols;
    bool tanh;
} XtBiasGeluFwd;
typedef struct XtBiasGeluBwd {
    void *dx;
    const void *dy, *x, *bias;
    XtDtype dtype;
    int64_t rows, cols;
    bool tanh;
} XtBiasGeluBwd;

/* out[i] = x[i] * (u_i < (float)p ? 0 : 1 / (1 - p)), the factor 0 for p = 1; dense, `count` elements. u_i = (word i % 4 of Philox block
 * i / 4 >> 8) 2^-24. `random` NULL: the generator is `philox`; else, on the device, (seed, stream) are (random[0], random[1] +
 * philox.stream), read when the kernel runs. Its backward is itself. */
typedef struct XtDropout {
    void *out;
    const void *x;
    const int64_t *random; /* [2] */
    XtPhilox philox;
    XtDtype dtype;
    int64_t count;
    double p;
} XtDropout;

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

/* Places in a table that tensors of indices name: out[c] = sum over d of c_d * step[d] + sum over k < count of i_k * stride[k], for the
 * coordinates c of `shape` in row-major order, i_k = index[k] at c, plus size[k] if it is negative and `wrap` is set.
 * index[k]: int64 views of `shape`. An i_k outside [0, size[k]): XT_INDEX_ERROR with `op`, the index as given and its place in row-major
 * order. */
typedef struct XtPositions {
    int64_t *out;
    int ndim;
    int64_t shape[XT_MAX_DIMS], step[XT_MAX_DIMS];
    int count;
    XtView index[XT_MAX_DIMS];
    int64_t size[XT_MAX_DIMS], stride[XT_MAX_DIMS];
    bool wrap;
    const char *op;
} XtPositions;

/* table[ids[r]] = rows[r]: table [places, cols], rows [count, cols], ids in [0, places). Any dtype. Of several rows for one place the
 * last counts. last [count], or NULL: whether row r is one that counts, as a bool. */
typedef struct XtScatter {
    void *table;
    uint8_t *last;
    const void *rows;
    const int64_t *ids;
    XtDtype dtype;
    int64_t count, cols, places;
} XtScatter;

/* losses[r] = lse[r] - logits[r, target[r]], lse = log sum exp, both ACC; a row whose target is ignore_index has loss 0.
 * logits and dlogits have rows of stride ld >= vocab; the gap between two rows is not read. dlogits may be logits.
 * A target outside [0, vocab) that is not ignore_index: XT_INDEX_ERROR with its position, its value and the op's name:
 * linear_cross_entropy when `linear`, else cross_entropy. Row 0 is reported as position `first`.
 * Where dlogits is given it is the logits, which their gradient for dlosses of 1 replaces: the bits of a Bwd after it.
 * Bwd: dlogits[r, v] = (exp(logits[r, v] - lse[r]) - [v == target[r]]) * dlosses[r * dloss_stride] * scale; ignored rows get 0.
 * z > 0 adds z lse[r]^2 to the loss of a row that counts, and multiplies its exp(..) in dlogits by 1 + 2 z lse[r].
 * softcap c > 0: c tanh(x / c), in ACC and not rounded, stands for each logit x in all of this, and dlogits has the factor
 * 1 - tanh(x / c)^2; 0: none. */
typedef struct XtCrossEntropyFwd {
    void *losses, *lse, *dlogits;
    const void *logits;
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index, first;
    double scale; /* of dlogits */
    double z, softcap;
    bool linear;
} XtCrossEntropyFwd;
typedef struct XtCrossEntropyBwd {
    void *dlogits;
    const void *logits, *lse, *dlosses; /* dlosses ACC: [rows], or one value when dloss_stride == 0 */
    const int64_t *targets;
    XtDtype dtype;
    int64_t rows, vocab, ld, ignore_index, dloss_stride;
    double scale, z, softcap;
    bool linear;
} XtCrossEntropyBwd;

/* out[i] = cast(x[i] * (dloss / total * scale) [+ out[i]]): the gradient of an input of a loss, from the sums x of ACC that the forward
 * left for a loss whose own gradient was 1. 0 where x is 0, whatever the factor is. dloss is one value of ACC, total one or NULL (1).
 * `accumulate` adds to out. out may be x where dtype is ACC. Dense. */
typedef struct XtLinearCrossEntropyBwd {
    void *out;
    const void *x, *dloss, *total;
    XtDtype dtype;
    int64_t count;
    double scale;
    bool accumulate;
} XtLinearCrossEntropyBwd;

/* out[r] = a token drawn from row r of x [rows, vocab], 1 <= vocab <= XT_DRAW_MOST; -1 where the largest of the row is not finite or an
 * element is NaN. Tokens are ordered by their logits, the larger first, of equal ones the first one first; temperature 0 takes the first in
 * this order. Else the first top_k are left (top_k >= vocab: all), of these the ones before which there is less than
 * ceil(top_p * their weight), and the drawn one is the first, by index, where the sum of what is left exceeds the row's random number.
 * Weights, sums and random numbers are integers (core/draw.h): the same token on every device.
 * random [2]: seed and stream of the generator; it is read when the kernel runs. */
typedef struct XtSample {
    int64_t *out;
    const void *x;
    const int64_t *random;
    XtDtype dtype;
    int64_t rows, vocab, top_k;
    double temperature, top_p;
} XtSample;

/* The end of a step of generation, for each row b of `rows`: ids[b] = max(tokens[b], 0), as -1 is no id; made[slot][b] = tokens[b], where
 * slot is in [0, slots); positions[b] += 1. Then step += 1, and slot becomes the next one: 0 behind the last, and where it was outside.
 * state [rows + 3] is positions [rows], seed, step, slot: all that a step changes, so that a captured one finds it on the device. */
typedef struct XtAdvance {
    int64_t *ids, *state, *made; /* [rows], [rows + 3], [slots, rows] */
    const int64_t *tokens;       /* [rows] */
    int64_t rows, slots;
} XtAdvance;
