/* decoder_step.cu - all layers of a decoder, and its head, for one new token a row (contract/layers.h). Two plans:
 *
 *   together   what `unfit` allows, on Hopper: one launch, described below
 *   parts      everything else, and where the blocks of that launch do not fit because other work has a part of the device: the kernels
 *              of the parts, one after the other. It is also the oracle of the first plan (`plain`)
 *
 * A step reads every weight once, and that is what its time should go to. As launches of their own the parts of a layer are so short that
 * they wait for the launch, for their inputs and for their slowest block. Here each multiprocessor has one block for the whole step:
 *
 *   - Warp 8 copies the weights that the block needs, in the order of their use, to a ring of slots in shared memory. They depend on
 *     nothing, so it is most of a layer ahead. It has few under way, and begins none from where the last slots of a product are freed until
 *     the block has met the others: a meeting takes messages through L2, which wait behind copies. Blocks that have no chunk of attention
 *     copy meanwhile.
 *   - Warps 0 to 7 compute. A layer has five parts: q, k and v; attention; its output; gate and up; down. Between two of them all blocks
 *     meet, since a part needs the results of all blocks. Norms are computed again by every block; additions and SwiGLU are done where
 *     a product is stored. The head follows the last layer, with as many copies under way as there are slots.
 *
 * A product has tiles of 8 columns, rows of a weight. A slot has 1024 terms of a tile: 128 of each warp. That is the order of few.cu, and
 * norms, attention and its chunks of 64 positions are added as by their own kernels: so a row has the bits of the kernels one after the
 * other where those products are few.cu's, and they depend neither on the other rows nor on the number of blocks.
 *
 * No deadlock: blocks wait for each other, so all of them must run at once. A cooperative launch guarantees that, also beside other
 * kernels and as a node of a graph: it begins when there is room for all blocks, and is refused where there never is. The other waits are for
 * copies that are under way, and for slots that warps of the same block will free whatever other blocks do. The copying warp waits for the
 * end of a meeting, too; nobody needs its copies to come to one. All launches of a device are in its one stream, so no two share the
 * counters.
 *
 * What other blocks wrote is read through L2. Values that are read behind a meeting are visible: a block's threads meet at a barrier, its
 * first thread adds to the counter with release and reads with acquire, and they meet again.
 */
#include "common/swiglu.cuh"
#include "contract/attention.h"
#include "contract/elementwise.h"
#include "contract/traits.h"
#include "gemm/gemm.cuh"
#include "layers/decoder_step.cuh"

/* ---- the step ----------------------------------------------------------------------------------------------------------------------- */

/* Tiles [first, first + count) of this block, of `tiles`; all blocks but the last ones have as many. */
struct Tiles {
    int first, count;
    __device__ explicit Tiles(int tiles) {
        const int each = (tiles + (int)gridDim.x - 1) / (int)gridDim.x;
        first = (int)blockIdx.x * each;
        count = max(0, min(each, tiles - first));
    }
};

template <typename T, int D> __device__ inline void fetch_all(StepShared<T, D> &s, const Step<T> &p) {
    const int c = p.channels, queries = p.heads * D, keys = p.kv_heads * D;
    const Tiles qkv((queries + 2 * keys) / 8), o(c / 8), pairs(p.inner / 8);
    const int most = p.batch > 8 ? UNDER_WAY_OF_MANY : UNDER_WAY;
    Copies copies;
    for (int l = 0; l < p.layers; l++) {
        const StepLayer<T> &w = p.layer[l];
        fetch<true>(s, copies, most, qkv.count, c, [&](int tile, int r) {
            const int64_t row = (qkv.first + tile) * 8 + r;
            return row < queries          ? w.q + row * c
                   : row < queries + keys ? w.k + (row - queries) * c
                                          : w.v + (row - queries - keys) * c;
        });
        fetch<false>(s, copies, most, o.count, queries,
                     [&](int tile, int r) { return w.o + (int64_t)((o.first + tile) * 8 + r) * queries; });
        fetch<true>(s, copies, most, 2 * pairs.count, c,
                    [&](int tile, int r) { return (tile % 2 ? w.up : w.gate) + (int64_t)((pairs.first + tile / 2) * 8 + r) * c; });
        fetch<false>(s, copies, most, o.count, p.inner,
                     [&](int tile, int r) { return w.down + (int64_t)((o.first + tile) * 8 + r) * p.inner; });
    }
    if (!p.head) return;
    const Tiles head((p.vocab + 7) / 8);
    fetch<true>(s, copies, SLOTS, head.count, c,
                [&](int tile, int r) { return p.head + (int64_t)min((head.first + tile) * 8 + r, p.vocab - 1) * c; });
}

/* MANY: 1 for up to 8 rows, 2 for up to 16. */
template <typename T, int D, int MANY> __device__ inline void compute_all(StepShared<T, D> &s, const Step<T> &p) {
    for (int i = threadIdx.x; i < p.batch * (D / 2); i += CONSUMERS) {
        float sine, cosine;
        const int row = i / (D / 2), pair = i % (D / 2);
        sine_cosine(angle_of((float)p.positions[row], p.frequency[pair]), &sine, &cosine);
        s.angles[row][0][pair] = xt_store<T>(cosine), s.angles[row][1][pair] = xt_store<T>(sine);
    }
    if (threadIdx.x < ROWS) s.rstd[threadIdx.x] = 0;
    if (threadIdx.x < p.batch) {
        const int64_t position = p.positions[threadIdx.x];
        const bool known = position >= 0 && position < p.length;
        s.position[threadIdx.x] = known ? (int)position : -1;
        s.used[threadIdx.x] = known ? (int)(position / POSITIONS) + 1 : 1;
    }
    xt_named_sync(ALL, CONSUMERS);
    const int c = p.channels, queries = p.heads * D, joint = queries + 2 * p.kv_heads * D;
    const Tiles qkv(joint / 8), o(c / 8), pairs(p.inner / 8);
    const Walk walk = first_chunk(s, p);
    Place place;
    unsigned met = 0; /* what step_met is after the next meeting */
    /* stop: no copy begins until the block has met the others. */
    const auto arrive = [&](bool stop) {
        xt_named_sync(ALL, CONSUMERS);
        if (threadIdx.x == 0) s.meets = stop, xt_add_released(&step_met, 1);
    };
    const auto meet = [&] {
        met += gridDim.x;
        if (threadIdx.x == 0) {
            while (xt_read_released(&step_met) < met) {}
            s.meets = 0;
        }
        xt_named_sync(ALL, CONSUMERS);
    };
    /* Of elements [4 e, 4 e + 4) of columns [0, count) from tile `first` on, of this block: the place in the stream. */
    const auto place_in_stream = [&](int e, int first, int count) {
        return e / (count / 4) * c + (o.first + first) * 8 + e % (count / 4) * 4;
    };
    const int columns = min(o.count, (int)MOST_TILES) * 8; /* of the first round: their old values are loaded before the product */
    typedef XtPiece<T, 4> Four;
    const auto read_four = [&](const T *x) {
        const uint2 q = __ldcg((const uint2 *)x);
        return Four{{q.x, q.y}};
    };
    const auto old_of = [&](const T *x) {
        return (int)threadIdx.x < p.batch * columns / 4 ? read_four(x + place_in_stream(threadIdx.x, 0, columns)) : Four();
    };
    /* Adds a product to the stream: x + T(a W^T). */
    const auto add = [&](const T *x, Four old, int first, int count) {
        for (int e = threadIdx.x; e < p.batch * count / 4; e += CONSUMERS) {
            const int at = place_in_stream(e, first, count);
            if (first > 0 || e >= CONSUMERS) old = read_four(x + at);
            xt_write(p.out + at, rounded_sum<T, 4>(old, joined_four<T>(s, e / (count / 4), e % (count / 4) * 4)));
        }
    };
    XtPiece<T, 8> norm[4];
    load_norm(norm, p.layer[0].norm, c);
    for (int l = 0; l < p.layers; l++) {
        const StepLayer<T> &w = p.layer[l];
        const T *x = l ? p.out : p.x;
        { /* q, k and v */
            uint32_t a[1][4][MANY][4];
            load_normalised<T, D, MANY>(s, p, a, x, norm);
            products<T, D, 1, MANY>(s, place, a, qkv.count, c, true, [&](int first, int count) {
                for (int e = threadIdx.x; e < p.batch * count / 4; e += CONSUMERS) {
                    const int row = e / (count / 4), column = e % (count / 4) * 4;
                    xt_write(p.qkv + row * joint + (qkv.first + first) * 8 + column, joined_four<T>(s, row, column));
                }
            });
        }
        arrive(true);
        attend_all(s, p, w, walk, meet);
        arrive(walk.at < walk.end); /* who has no chunk waits for longer, and copies what it could not before */
        meet();
        { /* its output */
            uint32_t a[MOST_TERMS / TERMS][4][MANY][4];
            const Four old = old_of(x);
            load_rows<T, MOST_TERMS / TERMS, MANY>(a, p.attended, p.batch, queries);
            products<T, D, MOST_TERMS / TERMS, MANY>(s, place, a, o.count, queries, true,
                                                     [&](int first, int count) { add(x, old, first, count); });
        }
        arrive(true);
        load_norm(norm, w.mlp_norm, c);
        meet();
        { /* gate and up */
            uint32_t a[1][4][MANY][4];
            load_normalised<T, D, MANY>(s, p, a, p.out, norm);
            products<T, D, 1, MANY>(s, place, a, 2 * pairs.count, c, true, [&](int first, int count) {
                for (int e = threadIdx.x; e < p.batch * count / 8; e += CONSUMERS) {
                    const int row = e / (count / 8), column = e % (count / 8) * 4, gate = column / 8 * 16 + column % 8;
                    const XtVector<float, 4> g = xt_load(joined_four<T>(s, row, gate)),
                                             u = xt_load(joined_four<T>(s, row, gate + 8));
                    XtVector<float, 4> gated;
#pragma unroll
                    for (int i = 0; i < 4; i++) gated.at[i] = xt_swiglu<T>(g.at[i], u.at[i]);
                    xt_write(p.gated + row * p.inner + pairs.first * 8 + first * 4 + column, xt_store<T>(gated));
                }
            });
        }
        arrive(true);
        meet();
        const T *next = l + 1 < p.layers ? p.layer[l + 1].norm : p.last_norm;
        { /* down */
            uint32_t a[MOST_TERMS / TERMS][4][MANY][4];
            const Four old = old_of(p.out);
            load_rows<T, MOST_TERMS / TERMS, MANY>(a, p.gated, p.batch, p.inner);
            products<T, D, MOST_TERMS / TERMS, MANY>(s, place, a, o.count, p.inner, next != NULL,
                                                     [&](int first, int count) { add(p.out, old, first, count); });
        }
        if (!next) break;
        arrive(true);
        load_norm(norm, next, c);
        meet();
    }
    const Tiles head(p.head ? (p.vocab + 7) / 8 : 0);
    if (head.count) {
        uint32_t a[1][4][MANY][4];
        load_normalised<T, D, MANY>(s, p, a, p.out, norm);
        products<T, D, 1, MANY>(s, place, a, head.count, c, false, [&](int first, int count) {
            for (int e = threadIdx.x; e < p.batch * count; e += CONSUMERS) {
                const int row = e / count, column = (head.first + first) * 8 + e % count;
                if (column < p.vocab) p.logits[(int64_t)row * p.vocab + column] = xt_store<T>(joined(s, row, e % count));
            }
        });
    }
    if (threadIdx.x == 0 && atomicAdd(&step_left, 1u) == gridDim.x - 1) step_met = step_left = 0; /* nobody waits any more */
}

template <typename T, int D, int MANY>
__global__ void __launch_bounds__(THREADS_OF_BLOCK, 1) decoder_step_kernel(const __grid_constant__ Step<T> p) {
#ifdef XT_SM90A
    extern __shared__ __align__(128) char memory[];
    StepShared<T, D> &s = *(StepShared<T, D> *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            xt_barrier_init(xt_shared_address(&s.full[i]), 1);
            xt_barrier_init(xt_shared_address(&s.empty[i]), WARPS);
        }
        xt_barrier_init_fence();
        s.meets = 0;
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        xt_registers_less<40>();
        if (threadIdx.x < CONSUMERS + 32) fetch_all(s, p);
    } else {
        xt_registers_more<232>();
        compute_all<T, D, MANY>(s, p);
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- together ---------------------------------------------------------------------------------------------------------------------- */

/* Why the kernel cannot do p, or NULL. */
static const char *unfit(const XtDecoderStep *p, const XtDeviceTraits *device) {
    const int64_t queries = p->heads * p->dim;
    if (p->dtype != XT_BFLOAT16 && p->dtype != XT_FLOAT16) return "the dtype is not bfloat16 or float16";
    if (device->capability != 90 || !xt_built_for_sm90a())
        return "the compute capability is not 9.0, or the library not built for it";
    if (device->shared_limit < (int)sizeof(StepShared<XtBf16, 128>)) return "a block has too little shared memory";
    if (p->batch > ROWS) return "the batch is above 16";
    if (p->layers > MOST_LAYERS) return "the model has more than 64 layers";
    if (p->dim != 64 && p->dim != 128) return "the head dim is not 64 or 128";
    if (p->channels > TERMS || p->channels % 32) return "the channels are above 1024, or no multiple of 32";
    if (queries > MOST_TERMS || p->inner > MOST_TERMS || p->inner % 32) return "H D or F is above 3072, or F no multiple of 32";
    if (p->batch * p->heads > MOST_GROUPS) return "rows times heads are above 4096";
    if (p->length >= 1 << 30) return "the cache has 2^30 positions or more";
    const void *const *pointer = &p->layer[0].norm;
    for (int64_t i = 0; i < p->layers * (int64_t)(sizeof(XtDecoderLayer) / sizeof *pointer); i++)
        if ((uintptr_t)pointer[i] % 16) return "a weight, keys or values are not aligned to 16 bytes";
    if (p->vocab > 1 << 28) return "the vocabulary has more than 2^28 tokens";
    if ((uintptr_t)p->last_norm % 16 || (uintptr_t)p->head % 16) return "last_norm or head is not aligned to 16 bytes";
    return (uintptr_t)p->x % 16 ? "x is not aligned to 16 bytes" : NULL;
}

template <typename T, int D, int MANY> static XtStatus run(const XtDecoderStep *p, bool *queued) {
    static_assert(sizeof(StepShared<T, D>) <= 232448, "the shared memory of a block");
    static_assert(sizeof(StepLayer<T>) == sizeof(XtDecoderLayer), "the same pointers");
    const auto kernel = decoder_step_kernel<T, D, MANY>;
    const int64_t rows = p->batch * p->heads, chunks = xt_divide_up(p->length, POSITIONS), queries = p->heads * D;
    const int64_t sizes[] = {p->batch * (queries + 2 * p->kv_heads * D) * (int64_t)sizeof(T),
                             p->batch * queries * (int64_t)sizeof(T),
                             p->batch * p->inner * (int64_t)sizeof(T),
                             rows * chunks * D * (int64_t)sizeof(float),
                             rows * chunks * (int64_t)sizeof(float2),
                             p->head ? p->batch * p->channels * (int64_t)sizeof(T) : 0};
    size_t total = 0;
    char *at[6];
    for (int64_t size : sizes) total += (size_t)xt_divide_up(size, 256) * 256;
    XtScratch scratch;
    XT_CHECK(scratch.allocate(total));
    at[0] = (char *)scratch.data;
    for (int i = 1; i < 6; i++) at[i] = at[i - 1] + xt_divide_up(sizes[i - 1], 256) * 256;
    const int64_t pieces = p->channels / 8;
    const Plan plan = choose(true, pieces, NARROW);
    const int each = plan == PLAN_NARROW_1 ? 1 : plan == PLAN_NARROW_2 ? 2 : plan == PLAN_NARROW_3 ? 3 : 4;
    Step<T> step = {};
    step.x = (const T *)p->x, step.out = p->head ? (T *)at[5] : (T *)p->out, step.logits = (T *)p->out;
    step.last_norm = (const T *)p->last_norm, step.head = (const T *)p->head, step.vocab = (int)p->vocab,
    step.positions = p->positions;
    step.qkv = (T *)at[0], step.attended = (T *)at[1], step.gated = (T *)at[2], step.parts = (float *)at[3],
    step.stats = (float2 *)at[4];
    step.length = p->length, step.layers = (int)p->layers, step.batch = (int)p->batch, step.channels = (int)p->channels;
    step.heads = (int)p->heads, step.kv_heads = (int)p->kv_heads, step.inner = (int)p->inner, step.chunks = (int)chunks;
    step.norm_pieces = each, step.norm_lanes = lanes_of(pieces, each);
    step.eps = (float)p->eps, step.scale = (float)p->scale;
    step.inverse_channels = 1.0f / (float)p->channels, step.inverse_dim = 1.0f / (float)D;
    const RopeFrequencies<float> frequency = rope_frequencies<float>(p->base, D, 0, D / 2);
    memcpy(step.frequency, frequency.at, D / 2 * sizeof(float));
    memcpy(step.layer, p->layer, (size_t)p->layers * sizeof(XtDecoderLayer));
    XT_CHECK(xt_allow_shared("decoder_step", kernel, (int)sizeof(StepShared<T, D>)));
    *queued = xt_launch_together(kernel, xt_multiprocessors(), THREADS_OF_BLOCK, sizeof(StepShared<T, D>), step);
    return xt_launched("decoder_step", p->layers, p->batch, p->channels, p->heads, p->kv_heads, p->dim, p->inner, p->length);
}

/* ---- parts --------------------------------------------------------------------------------------------------------------------------- */

/* c [rows, N], ldc apart, = a W^T for a [rows, K], W [N, K] */
static XtStatus product(const XtDecoderStep *p, void *c, const void *a, const void *weight, int64_t n, int64_t k, int64_t ldc) {
    XtGemm g = {};
    g.c = c, g.a = a, g.b = weight;
    g.dtype_a = g.dtype_b = g.dtype_c = p->dtype;
    g.m = p->batch, g.n = n, g.k = k, g.trans_b = true;
    g.lda = k, g.ldb = k, g.ldc = ldc;
    g.batch[0] = g.batch[1] = 1;
    g.alpha = 1;
    return xt_cuda_multiply(&g);
}
/* Products of a [rows, K] with weights [N_i, K] side by side in c [rows, sum of N_i]: one, where the weights lie together. */
static XtStatus joined_product(const XtDecoderStep *p, char *c, const void *a, int count, const void *const *weight,
                               const int64_t *n, int64_t k) {
    const int64_t size = (int64_t)xt_dtype_size(p->dtype);
    int64_t all = 0;
    bool together = true;
    for (int i = 0; i < count; i++) {
        together = together && (const char *)weight[i] == (const char *)weight[0] + all * k * size;
        all += n[i];
    }
    if (together) return product(p, c, a, weight[0], all, k, all);
    for (int i = 0; i < count; c += n[i++] * size) XT_CHECK(product(p, c, a, weight[i], n[i], k, all));
    return XT_OK;
}

/* q and k, turned, from the joint products: [rows, heads, D] each. */
static XtStatus turn_heads(const XtDecoderStep *p, const XtDecoderLayer *w, char *turned, const char *qkv, void *rstd) {
    const int64_t dim = p->dim, joint = (p->heads + 2 * p->kv_heads) * dim, heads[] = {p->heads, p->kv_heads};
    const int64_t size = (int64_t)xt_dtype_size(p->dtype);
    XtQkNormRopeFwd both = {};
    both.positions = p->positions, both.dtype = p->dtype, both.rows = p->batch, both.dim = dim, both.period = 1;
    both.eps = p->eps, both.base = p->base;
    for (int i = 0; i < 2; i++) {
        both.out[i] = turned + i * p->batch * heads[0] * dim * size;
        both.rstd[i] = (double *)rstd + i * p->batch * heads[0];
        both.x[i] = qkv + i * heads[0] * dim * size, both.weight[i] = i ? w->k_norm : w->q_norm, both.heads[i] = heads[i];
        both.out_stride[i][0] = heads[i] * dim, both.out_stride[i][1] = dim, both.x_stride[i][0] = joint, both.x_stride[i][1] = dim;
    }
    if (w->q_norm) return xt_cuda_qk_norm_rope_fwd(&both);
    for (int i = 0; i < 2; i++) {
        XtRope rope = {};
        rope.out = both.out[i], rope.x = both.x[i], rope.positions = p->positions, rope.dtype = p->dtype, rope.rows = p->batch;
        rope.heads = heads[i], rope.dim = dim, rope.period = 1, rope.base = p->base;
        rope.out_stride[0] = heads[i] * dim, rope.out_stride[1] = dim, rope.x_stride[0] = joint, rope.x_stride[1] = dim;
        XT_CHECK(xt_cuda_rope(&rope));
    }
    return XT_OK;
}

static XtView rows_view(const XtDecoderStep *p, void *data) {
    XtView view = {};
    view.data = data, view.dtype = p->dtype, view.ndim = 1, view.shape[0] = p->batch * p->channels, view.strides[0] = 1;
    return view;
}

static XtStatus parts(const XtDecoderStep *p) {
    const int64_t size = (int64_t)xt_dtype_size(p->dtype), rows = p->batch, c = p->channels, dim = p->dim, f = p->inner;
    const int64_t queries = p->heads * dim, keys = p->kv_heads * dim, joint = queries + 2 * keys;
    enum { H, QKV, TURNED, ATTENDED, MIDDLE, Y, BOTH, GATED, STREAM, RSTD, BUFFERS };
    const int64_t nbytes[BUFFERS] = {c * size,
                                     joint * size,
                                     (queries + keys) * size,
                                     queries * size,
                                     c * size,
                                     c * size,
                                     2 * f * size,
                                     f * size,
                                     p->head ? c * size : 0,
                                     (p->heads + p->kv_heads + 1) * (int64_t)sizeof(double)};
    size_t total = 0, offset[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) offset[i] = total, total += (size_t)xt_divide_up(rows * nbytes[i], 256) * 256;
    XtScratch scratch;
    XT_CHECK(scratch.allocate(total));
    char *at[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) at[i] = (char *)scratch.data + offset[i];
    char *const stream = p->head ? at[STREAM] : (char *)p->out;
    XtRmsNormFwd norm = {};
    norm.out = at[H], norm.rstd = at[RSTD], norm.dtype = p->dtype, norm.rows = rows, norm.cols = c, norm.eps = p->eps;
    XtCachedAttention attention = {};
    attention.out = at[ATTENDED], attention.q = at[TURNED], attention.k = at[TURNED] + rows * queries * size;
    attention.v = at[QKV] + (queries + keys) * size, attention.positions = p->positions, attention.dtype = p->dtype;
    attention.batch = rows, attention.heads = p->heads, attention.kv_heads = p->kv_heads, attention.length = p->length;
    attention.dim = dim, attention.scale = p->scale;
    attention.q_stride[0] = queries, attention.k_stride[0] = keys, attention.v_stride[0] = joint;
    attention.q_stride[1] = attention.k_stride[1] = attention.v_stride[1] = dim;
    XtSwigluFwd gate = {};
    gate.out = at[GATED], gate.gate = at[BOTH], gate.up = at[BOTH] + f * size;
    gate.dtype = p->dtype, gate.rows = rows, gate.cols = f, gate.ld_in = 2 * f;
    for (int64_t l = 0; l < p->layers; l++) {
        const XtDecoderLayer *w = &p->layer[l];
        const void *const projections[] = {w->q, w->k, w->v}, *const gates[] = {w->gate, w->up};
        const int64_t outs[] = {queries, keys, keys}, inner[] = {f, f};
        norm.weight = w->norm; /* of x, or of the last layer's sum */
        norm.x = l ? at[MIDDLE] : p->x, norm.residual = l ? at[Y] : NULL, norm.sum = l ? stream : NULL;
        XT_CHECK(xt_cuda_rms_norm_fwd(&norm));
        XT_CHECK(joined_product(p, at[QKV], at[H], 3, projections, outs, c));
        XT_CHECK(turn_heads(p, w, at[TURNED], at[QKV], at[RSTD]));
        attention.keys = w->keys, attention.values = w->values;
        XT_CHECK(xt_cuda_cached_attention(&attention));
        XT_CHECK(product(p, at[Y], at[ATTENDED], w->o, c, queries, c));
        norm.weight = w->mlp_norm, norm.x = l ? stream : p->x, norm.residual = at[Y], norm.sum = at[MIDDLE];
        XT_CHECK(xt_cuda_rms_norm_fwd(&norm));
        XT_CHECK(joined_product(p, at[BOTH], at[H], 2, gates, inner, c));
        XT_CHECK(xt_cuda_swiglu_fwd(&gate));
        XT_CHECK(product(p, at[Y], at[GATED], w->down, c, f, c));
    }
    if (p->head) {
        norm.weight = p->last_norm, norm.x = at[MIDDLE], norm.residual = at[Y], norm.sum = stream;
        XT_CHECK(xt_cuda_rms_norm_fwd(&norm));
        return product(p, p->out, at[H], p->head, p->vocab, c, p->vocab);
    }
    XtBinary sum = {};
    sum.op = XT_ADD, sum.out = rows_view(p, p->out), sum.a = rows_view(p, at[MIDDLE]), sum.b = rows_view(p, at[Y]);
    return xt_cuda_binary(&sum);
}

/* ---- the slot ---------------------------------------------------------------------------------------------------------------------- */

XtStatus xt_cuda_decoder_step(const XtDecoderStep *p) {
    if (p->batch == 0 || p->channels == 0) return XT_OK;
    if (p->plain || unfit(p, xt_traits())) return parts(p);
    bool queued = false;
    XT_CHECK(xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) {
            if (p->dim == 64) return p->batch > 8 ? run<T, 64, 2>(p, &queued) : run<T, 64, 1>(p, &queued);
            return p->batch > 8 ? run<T, 128, 2>(p, &queued) : run<T, 128, 1>(p, &queued);
        }
        return XT_OK; /* unfit has refused it */
    }));
    if (queued) return XT_OK;
    XT_CHECK(xt_refuse_captured("compute decoder_step in another way than its planned run: the device has too little room now"));
    return parts(p);
}
