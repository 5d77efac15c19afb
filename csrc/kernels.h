/* kernels.h - THE lists: of kernels, which every backend (csrc/cpu, cuda) implements and csrc/ops may call, and of ops.
 *
 * A kernel is one parameter struct with its contract in contract/<family>.h, and one line in XT_KERNELS below. From that list come the
 * backend table, the slot names and the coverage test. The structs are only declared here: a file includes the families whose
 * kernels it calls or implements, so an edited contract recompiles those files only.
 *
 * Rules that hold for every kernel unless its contract says otherwise:
 *
 *   - Ops check the arguments; kernels assume they are right. A kernel reports what only the data show (an index out of range).
 *   - Outputs never overlap inputs, except that an elementwise output may be exactly one of its inputs (same data and strides).
 *   - Sizes of 0 are legal and mean "nothing to do" (reductions write their neutral element).
 *   - ACC: float64 computes in float64; float32, bfloat16 and float16 compute and keep statistics in float32.
 *   - Deterministic: same inputs, same bits, whatever the number of threads. No float atomics.
 *   - "rows x cols, dense" means row-major without gaps. Outputs named lse, rstd and losses have dtype ACC.
 *
 * Letters: B batch, S sequence, C channels, H query heads, K kv heads, D head dim, V vocab; M, N, K in gemm only.
 */
#pragma once

#include "xtrain.h"

/* X(slot, ParameterStruct). gemm and attention of many queries are not here: they have several named implementations each. */
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
    X(cumsum, XtCumsum)                        \
    X(stats, XtStats)                          \
    X(compare, XtCompare)                      \
    X(softmax_fwd, XtSoftmaxFwd)               \
    X(softmax_bwd, XtSoftmaxBwd)               \
    X(rms_norm_fwd, XtRmsNormFwd)              \
    X(rms_norm_bwd, XtRmsNormBwd)              \
    X(layer_norm_fwd, XtLayerNormFwd)          \
    X(layer_norm_bwd, XtLayerNormBwd)          \
    X(rope, XtRope)                            \
    X(qk_norm_rope_fwd, XtQkNormRopeFwd)       \
    X(qk_norm_rope_bwd, XtQkNormRopeBwd)       \
    X(swiglu_fwd, XtSwigluFwd)                 \
    X(swiglu_bwd, XtSwigluBwd)                 \
    X(bias_gelu_fwd, XtBiasGeluFwd)            \
    X(bias_gelu_bwd, XtBiasGeluBwd)            \
    X(dropout, XtDropout)                      \
    X(embedding_fwd, XtEmbeddingFwd)           \
    X(embedding_bwd, XtEmbeddingBwd)           \
    X(positions, XtPositions)                  \
    X(scatter, XtScatter)                      \
    X(cross_entropy_fwd, XtCrossEntropyFwd)    \
    X(cross_entropy_bwd, XtCrossEntropyBwd)    \
    X(linear_cross_entropy_bwd, XtLinearCrossEntropyBwd) \
    X(mhc_pre_fwd, XtMhcPreFwd)                \
    X(mhc_pre_bwd, XtMhcPreBwd)                \
    X(sinkhorn_fwd, XtSinkhornFwd)             \
    X(sinkhorn_bwd, XtSinkhornBwd)             \
    X(mhc_post_fwd, XtMhcPostFwd)              \
    X(mhc_post_bwd, XtMhcPostBwd)              \
    X(sample, XtSample)                        \
    X(advance, XtAdvance)                      \
    X(attention_sinks_fwd, XtAttentionSinksFwd) \
    X(attention_sinks_bwd, XtAttentionSinksBwd) \
    X(attention_documents, XtAttentionDocuments) \
    X(cached_attention, XtCachedAttention)     \
    X(decoder_step, XtDecoderStep)             \
    X(adamw, XtAdamW)                          \
    X(muon_direction, XtMuon)                  \
    X(muon_polynomial, XtMuonPolynomial)       \
    X(muon_update, XtMuon)                     \
    X(ema, XtEma)                              \
    X(foreach_copy, XtCopies)                  \
    X(checksums, XtChecksums)                  \
    X(grad_norm, XtGradNorm)                   \
    X(clip, XtClip)                            \
    X(tree_sum, XtTreeSum)                     \
    X(block_norm, XtBlockNorm)                 \
    X(conv1d_fwd, XtConv1dFwd)                 \
    X(conv1d_bwd, XtConv1dBwd)                 \
    X(conv1d_columns, XtConv1dColumns)         \
    X(conv1d_fold, XtConv1dFold)               \
    X(causal_conv1d_fwd, XtCausalConv1dFwd)    \
    X(causal_conv1d_bwd, XtCausalConv1dBwd)

/* X(op): xt_op_<op> in the file of that stem or of its family in csrc/ops, which alone expands this list. */
#define XT_OPS(X)                                                                                                              \
    /* elementwise.c */                                                                                                        \
    X(add) X(sub) X(mul) X(div) X(pow) X(maximum) X(minimum) X(floor_divide) X(remainder)                                     \
    X(eq) X(ne) X(lt) X(le) X(gt) X(ge)                                                                                        \
    X(neg) X(abs) X(exp) X(log) X(sqrt) X(rsqrt) X(reciprocal) X(sin) X(cos) X(tanh) X(sigmoid) X(relu) X(erf) X(silu) X(gelu) \
    /* where.c */ X(where)                                                                                                     \
    /* reduce.c */                                                                                                             \
    X(sum) X(mean) X(amax) X(amin) X(argmax) /* cumsum.c */ X(cumsum)                                                          \
    /* gather.c */ X(gather) X(scatter) X(scatter_add) X(index) X(index_put)                                                   \
    /* view.c */                                                                                                               \
    X(reshape) X(view) X(transpose) X(permute) X(expand) X(slice) X(select) X(unsqueeze) X(squeeze) X(detach)                  \
    /* copy.c */                                                                                                               \
    X(clone) X(contiguous) X(cast) X(to_device) X(cat) X(split) X(copy_) X(fill_) X(add_) X(sub_) X(mul_) X(div_)              \
    /* joined.c */ X(pack)                                                                                                     \
    /* create.c */                                                                                                             \
    X(empty) X(full) X(arange) X(uniform) X(normal) X(randint)                                                                 \
    /* one file each */                                                                                                        \
    X(matmul) X(linear) X(embedding) X(rms_norm) X(rope) X(swiglu) X(softmax) X(scaled_dot_product_attention) X(cross_entropy) \
    X(linear_cross_entropy) X(add_rms_norm) X(add_layer_norm) X(linear_joined) X(qk_norm_rope) X(layer_norm) X(sample) X(cached_attention)       \
    X(bias_gelu) X(dropout) X(swiglu_mlp) X(gelu_mlp) X(decoder_step) /* advance.c */ X(advance_)                              \
    X(mhc_pre) X(sinkhorn) X(mhc_post)                                                                                         \
    /* mhc_layer.c */ X(mhc_open) X(mhc_close)                                                                                 \
    X(conv1d) /* causal_conv1d.c */ X(causal_conv1d) X(causal_conv1d_step)                                                     \
    /* adamw.c */ X(adamw_) /* muon.c */ X(muon_) /* ema.c */ X(ema_) /* clip_grad_norm.c */ X(clip_grad_norm_) /* tree_sum.c */ X(tree_sum_) \
    /* foreach_copy.c */ X(foreach_copy_) /* bank_sum.c */ X(bank_sum_) /* block_norm.c */ X(block_norm)                         \
    /* checksums.c */ X(checksums)
/* clang-format on */

#define XT_X(slot, Params) typedef struct Params Params;
XT_KERNELS(XT_X)
#undef XT_X
