/* meta.c - the device "meta": tensors have shapes and sizes, and no elements. Kernels do nothing but count what they would do, so a
 * training step on meta tells its memory (core/storage.c) and its work before anything runs.
 *
 * meta:0 rounds sizes as the CPU does, meta:1 as a GPU. Working memory of kernels is not counted.
 */
#include "backend.h"
#include "contract/attention.h"
#include "contract/conv.h"
#include "contract/elementwise.h"
#include "contract/gemm.h"
#include "contract/layers.h"
#include "contract/mhc.h"
#include "contract/optimizer.h"
#include "contract/reduce.h"

static int64_t flops, bytes; /* atomic */

static XtStatus count(double operations, double moved) {
    __atomic_add_fetch(&flops, (int64_t)operations, __ATOMIC_RELAXED);
    __atomic_add_fetch(&bytes, (int64_t)moved, __ATOMIC_RELAXED);
    return XT_OK;
}

void xt_meta_work(XtMetaWork *out, bool reset) {
    out->flops = reset ? __atomic_exchange_n(&flops, 0, __ATOMIC_RELAXED) : __atomic_load_n(&flops, __ATOMIC_RELAXED);
    out->bytes = reset ? __atomic_exchange_n(&bytes, 0, __ATOMIC_RELAXED) : __atomic_load_n(&bytes, __ATOMIC_RELAXED);
}

static XtStatus no_values(void) { return xt_error(XT_RUNTIME_ERROR, "a tensor on meta has no values"); }
static XtStatus to_host(int index, void *host, const void *device, size_t nbytes) {
    (void)index, (void)host, (void)device, (void)nbytes;
    return no_values();
}
static XtStatus from_host(int index, void *device, const void *host, size_t nbytes) {
    (void)index, (void)device, (void)host, (void)nbytes;
    return XT_OK;
}
static XtStatus synchronize(int index) {
    (void)index;
    return XT_OK;
}

/* ---- kernels: how many bytes each reads and writes ----------------------------------------------------------------------- */

/* of the elements of a view */
static double size_of(const XtView *view) { return (double)xt_view_numel(view) * (double)xt_dtype_size(view->dtype); }
/* of a rows x cols matrix, `passes` times */
static XtStatus passes(double rows, double cols, XtDtype dtype, int passes) {
    return count(0, rows * cols * (double)xt_dtype_size(dtype) * passes);
}

#define META(slot, Params, body) \
    static XtStatus meta_##slot(const Params *p) { body; }
META(copy, XtCopy, return count(0, size_of(&p->dst) + size_of(&p->src)))
META(fill, XtFill, return count(0, size_of(&p->dst)))
META(arange, XtArange, return count(0, size_of(&p->dst)))
META(random, XtRandom, return count(0, size_of(&p->dst)))
META(unary, XtUnary, return count(0, 2 * size_of(&p->out)))
META(unary_bwd, XtUnaryBwd, return count(0, 3 * size_of(&p->dx)))
META(binary, XtBinary, return count(0, size_of(&p->out) + (p->constant ? 1 : 2) * size_of(p->constant == 1 ? &p->b : &p->a)))
META(where, XtWhere, return count(0, size_of(&p->condition) + 3 * size_of(&p->out)))
META(reduce, XtReduce, return count(0, size_of(&p->x) + size_of(&p->out)))
META(stats, XtStats, (void)p; return no_values())
META(compare, XtCompare, (void)p; return no_values())
META(softmax_fwd, XtSoftmaxFwd, return passes((double)p->rows, (double)p->cols, p->dtype, 2))
META(softmax_bwd, XtSoftmaxBwd, return passes((double)p->rows, (double)p->cols, p->dtype, 3))
META(rms_norm_fwd, XtRmsNormFwd, return passes((double)p->rows, (double)p->cols, p->dtype, p->residual ? 4 : 2))
META(rms_norm_bwd, XtRmsNormBwd, return passes((double)p->rows, (double)p->cols, p->dtype, p->dsum ? 4 : 3))
META(layer_norm_fwd, XtLayerNormFwd, return passes((double)p->rows, (double)p->cols, p->dtype, 2))
META(layer_norm_bwd, XtLayerNormBwd, return passes((double)p->rows, (double)p->cols, p->dtype, 3))
META(rope, XtRope, return passes((double)p->rows, (double)(p->heads * p->dim), p->dtype, 2))
META(qk_norm_rope_fwd, XtQkNormRopeFwd, return passes((double)p->rows, (double)((p->heads[0] + p->heads[1]) * p->dim), p->dtype, 2))
META(qk_norm_rope_bwd, XtQkNormRopeBwd, return passes((double)p->rows, (double)((p->heads[0] + p->heads[1]) * p->dim), p->dtype, 3))
META(swiglu_fwd, XtSwigluFwd, return passes((double)p->rows, (double)p->cols, p->dtype, 3))
META(swiglu_bwd, XtSwigluBwd, return passes((double)p->rows, (double)p->cols, p->dtype, 5))
META(bias_gelu_fwd, XtBiasGeluFwd, return passes((double)p->rows, (double)p->cols, p->dtype, 2))
META(bias_gelu_bwd, XtBiasGeluBwd, return passes((double)p->rows, (double)p->cols, p->dtype, 3))
META(dropout, XtDropout, return passes((double)p->count, 1, p->dtype, 2))
META(embedding_fwd, XtEmbeddingFwd, return passes((double)p->rows, (double)p->cols, p->dtype, 2))
META(embedding_bwd, XtEmbeddingBwd, return passes((double)(p->rows + p->vocab), (double)p->cols, p->dtype, 1))
META(cross_entropy_fwd, XtCrossEntropyFwd, return passes((double)p->rows, (double)p->vocab, p->dtype, 1))
META(cross_entropy_bwd, XtCrossEntropyBwd, return passes((double)p->rows, (double)p->vocab, p->dtype, 2))
META(sample, XtSample, return passes((double)p->rows, (double)p->vocab, p->dtype, 2))
META(attention_sinks_fwd, XtAttentionSinksFwd, return passes((double)(p->batch * p->heads * p->sq), (double)p->dim, p->dtype, 2))
META(attention_sinks_bwd, XtAttentionSinksBwd, return passes((double)(p->batch * p->heads * p->sq), (double)p->dim, p->dtype, 2))
META(cached_attention, XtCachedAttention, return passes((double)(p->batch * p->kv_heads * p->length), (double)p->dim, p->dtype, 2))
META(mhc_pre_fwd, XtMhcPreFwd, return passes((double)p->tokens, (double)((p->streams + 1) * p->cols), p->dtype, 1))
META(mhc_pre_bwd, XtMhcPreBwd, return passes((double)p->tokens, (double)((2 * p->streams + 1) * p->cols), p->dtype, 1))
META(sinkhorn_fwd, XtSinkhornFwd, return passes((double)p->tokens, (double)(p->streams * p->streams), p->dtype, 2))
META(sinkhorn_bwd, XtSinkhornBwd, return passes((double)p->tokens, (double)(p->streams * p->streams), p->dtype, 3))
META(mhc_post_fwd, XtMhcPostFwd, return passes((double)p->tokens, (double)((2 * p->streams + 1) * p->cols), p->dtype, 1))
META(mhc_post_bwd, XtMhcPostBwd, return passes((double)p->tokens, (double)((4 * p->streams + 2) * p->cols), p->dtype, 1))
/* x, y and the weight of a convolution, `passes` times; 2 operations a term of a sum */
static XtStatus convolved(const XtConv1dShape *s, XtDtype dtype, int passes) {
    double x = (double)s->batch * (double)s->in * (double)s->length, y = (double)s->batch * (double)s->out * (double)s->places;
    double taps = (double)s->in / (double)s->groups * (double)s->kernel;
    return count(2 * y * taps * passes, (x + y + (double)s->out * taps) * (double)xt_dtype_size(dtype) * passes);
}
META(conv1d_fwd, XtConv1dFwd, return convolved(&p->shape, p->dtype, 1))
META(conv1d_bwd, XtConv1dBwd, return convolved(&p->shape, p->dtype, !!p->dx + !!p->dweight))
static double columns_of(const XtConv1dShape *s) {
    return (double)s->batch * (double)s->in * ((double)s->length + (double)s->kernel * (double)s->places);
}
META(conv1d_columns, XtConv1dColumns, return passes(columns_of(&p->shape), 1, p->dtype, 1))
META(conv1d_fold, XtConv1dFold, return passes(columns_of(&p->shape), 1, xt_dtype_accumulator(p->dtype), 1))
META(causal_conv1d_fwd, XtCausalConv1dFwd, return passes((double)(p->batch * p->steps), (double)p->channels, p->dtype, 2))
META(causal_conv1d_bwd, XtCausalConv1dBwd, return passes((double)(p->batch * p->steps), (double)p->channels, p->dtype, 3))

static XtStatus meta_adamw(const XtAdamW *p) {
    for (; p; p = p->next)
        for (int64_t i = 0; i < p->count; i++) /* p and g; both moments, and the master, in and out */
            XT_CHECK(count(0, (double)p->items[i].numel *
                                  (3.0 * (double)xt_dtype_size(p->items[i].dtype) + (p->items[i].master ? 24.0 : 16.0))));
    return XT_OK;
}
static XtStatus meta_muon_direction(const XtMuon *p) { /* g and b twice, x once */
    const double acc = p->dtype == XT_FLOAT64 ? 8 : 4;
    return count(0, (double)(p->count * p->rows * p->cols) *
                        (2.0 * ((double)xt_dtype_size(p->dtype) + acc) + (double)xt_dtype_size(p->dtype_x)));
}
static XtStatus meta_muon_polynomial(const XtMuonPolynomial *p) {
    return passes((double)(p->count * p->side), (double)p->side, p->dtype, 2);
}
static XtStatus meta_muon_update(const XtMuon *p) { /* x, g; b in and out; p in and out, or the master, and p out */
    const double acc = p->dtype == XT_FLOAT64 ? 8 : 4, size = (double)xt_dtype_size(p->dtype);
    const bool master = p->count && p->items[0].master;
    return count(0, (double)(p->count * p->rows * p->cols) *
                        ((double)xt_dtype_size(p->dtype_x) + 2 * size + 2 * acc + (master ? 2 * acc : size)));
}
static XtStatus meta_ema(const XtEma *p) { /* x; the average in and out */
    for (int64_t i = 0; i < p->count; i++)
        XT_CHECK(count(0, (double)p->items[i].numel * ((double)xt_dtype_size(p->items[i].dtype) + 8.0)));
    return XT_OK;
}
static XtStatus meta_foreach_copy(const XtCopies *p) {
    for (int64_t i = 0; i < p->count; i++) XT_CHECK(count(0, 2 * (double)p->items[i].nbytes));
    return XT_OK;
}
static XtStatus meta_checksums(const XtChecksums *p) {
    for (int64_t i = 0; i < p->count; i++) XT_CHECK(count(0, (double)p->items[i].nbytes + sizeof(int64_t)));
    return XT_OK;
}
static XtStatus meta_grad_norm(const XtGradNorm *p) {
    for (int64_t i = 0; i < p->count; i++) XT_CHECK(count(0, size_of(&p->items[i])));
    return XT_OK;
}
static XtStatus meta_clip(const XtClip *p) {
    for (int64_t i = 0; i < p->count; i++) XT_CHECK(count(0, 2 * size_of(&p->items[i])));
    return XT_OK;
}
static XtStatus meta_tree_sum(const XtTreeSum *p) {
    for (int64_t i = 0; i < p->count * p->tensors; i++)
        XT_CHECK(count(0, (double)p->items[i].numel * (double)xt_dtype_size(p->items[i].dtype)));
    return count(0, p->out ? (double)p->numel * (double)xt_dtype_size(p->dtype) : 0);
}
static XtStatus meta_block_norm(const XtBlockNorm *p) { return passes((double)p->count, 1, XT_FLOAT64, 1); }

/* ---- products and attention ------------------------------------------------------------------------------------------------ */

static const char *any_product(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    return xt_gemm_plain(p);
}
static XtStatus product(const XtGemm *p) {
    return count(2.0 * (double)(p->batch[0] * p->batch[1]) * (double)(p->m * p->n) * (double)p->k, 0);
}
static const XtGemmBackend products[] = {{"meta", "meta", NULL, any_product, product}, {0}};

/* Of one product of all queries and keys; the causal half alone. */
static double attention_flops(int64_t batch, int64_t heads, int64_t sq, int64_t skv, int64_t dim, bool causal) {
    return (causal ? 1.0 : 2.0) * (double)(batch * heads) * (double)(sq * skv) * (double)dim;
}
static XtStatus attention_fwd(const XtAttentionFwd *p) {
    return count(2 * attention_flops(p->batch, p->heads, p->sq, p->skv, p->dim, p->causal), 0);
}
static XtStatus attention_bwd(const XtAttentionBwd *p) {
    return count(5 * attention_flops(p->batch, p->heads, p->sq, p->skv, p->dim, p->causal), 0);
}
static const XtAttentionBackend attentions[] = {{"meta", "meta", NULL, attention_fwd, NULL, attention_bwd}, {0}};

/* ---- the table -------------------------------------------------------------------------------------------------------------- */

/* Of a kernel whose work nobody has written down. */
#define XT_X(slot, Params)                              \
    static XtStatus uncounted_##slot(const Params *p) { \
        (void)p;                                        \
        return XT_OK;                                   \
    }
XT_KERNELS(XT_X)
#undef XT_X

/* Memory comes from core/storage.c: allocate and release stay NULL. */
static XtBackend table = {
    .name = "meta",
    .to_host = to_host,
    .from_host = from_host,
    .synchronize = synchronize,
#define XT_X(slot, Params) .slot = uncounted_##slot,
    XT_KERNELS(XT_X)
#undef XT_X
        .gemm = products,
    .attention = attentions,
};
const XtBackend *xt_meta_table(void) { return &table; }

__attribute__((constructor)) static void fill_table(void) {
    table.copy = meta_copy;
    table.fill = meta_fill;
    table.arange = meta_arange;
    table.random = meta_random;
    table.unary = meta_unary;
    table.unary_bwd = meta_unary_bwd;
    table.binary = meta_binary;
    table.where = meta_where;
    table.reduce = meta_reduce;
    table.stats = meta_stats;
    table.compare = meta_compare;
    table.softmax_fwd = meta_softmax_fwd;
    table.softmax_bwd = meta_softmax_bwd;
    table.rms_norm_fwd = meta_rms_norm_fwd;
    table.rms_norm_bwd = meta_rms_norm_bwd;
    table.layer_norm_fwd = meta_layer_norm_fwd;
    table.layer_norm_bwd = meta_layer_norm_bwd;
    table.rope = meta_rope;
    table.qk_norm_rope_fwd = meta_qk_norm_rope_fwd;
    table.qk_norm_rope_bwd = meta_qk_norm_rope_bwd;
    table.sample = meta_sample;
    table.attention_sinks_fwd = meta_attention_sinks_fwd;
    table.attention_sinks_bwd = meta_attention_sinks_bwd;
    table.cached_attention = meta_cached_attention;
    table.swiglu_fwd = meta_swiglu_fwd;
    table.swiglu_bwd = meta_swiglu_bwd;
    table.bias_gelu_fwd = meta_bias_gelu_fwd;
    table.bias_gelu_bwd = meta_bias_gelu_bwd;
    table.dropout = meta_dropout;
    table.embedding_fwd = meta_embedding_fwd;
    table.embedding_bwd = meta_embedding_bwd;
    table.cross_entropy_fwd = meta_cross_entropy_fwd;
    table.cross_entropy_bwd = meta_cross_entropy_bwd;
    table.mhc_pre_fwd = meta_mhc_pre_fwd;
    table.mhc_pre_bwd = meta_mhc_pre_bwd;
    table.sinkhorn_fwd = meta_sinkhorn_fwd;
    table.sinkhorn_bwd = meta_sinkhorn_bwd;
    table.mhc_post_fwd = meta_mhc_post_fwd;
    table.mhc_post_bwd = meta_mhc_post_bwd;
    table.adamw = meta_adamw;
    table.muon_direction = meta_muon_direction;
    table.muon_polynomial = meta_muon_polynomial;
    table.muon_update = meta_muon_update;
    table.ema = meta_ema;
    table.foreach_copy = meta_foreach_copy;
    table.checksums = meta_checksums;
    table.grad_norm = meta_grad_norm;
    table.clip = meta_clip;
    table.tree_sum = meta_tree_sum;
    table.block_norm = meta_block_norm;
    table.conv1d_fwd = meta_conv1d_fwd;
    table.conv1d_bwd = meta_conv1d_bwd;
    table.conv1d_columns = meta_conv1d_columns;
    table.conv1d_fold = meta_conv1d_fold;
    table.causal_conv1d_fwd = meta_causal_conv1d_fwd;
    table.causal_conv1d_bwd = meta_causal_conv1d_bwd;
}
