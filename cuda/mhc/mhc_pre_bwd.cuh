/* mhc_pre_bwd.cuh - dx and S of mhc_pre.cu on tensor cores: bfloat16 streams, n = 2 or 4, rows in whole pieces of 16 bytes.
 *
 *     w_t = phi^T du_t,   dx_j = gamma w + kappa x_j + h_pre_j dh_in (+ sum_i M_ij dout_i) (+ more_j)      -> dx [T, n, C]
 *     S = sum_t du_t v_t^T, in slices of the tokens                                                       -> share [slices, m, K]
 *
 * Plan. 16 tokens are a group. A block has 16 WARPS channels of all streams and walks over the groups of a slice. While it computes
 * one group, cp.async loads the next STAGES - 1 groups to shared memory. A warp has 16 channels of all streams, so only one warp
 * reads those channels of dout and dh_in. Its parts of phi and of S stay in registers from the first group to the last.
 *
 *     w    d [16 tokens, 8 channels] = a [16 tokens, rows] b [rows, 8 channels]. Columns 2 t, 2 t + 1 of the two tiles stand for
 *          channels 4 t .. 4 t + 3: lane 4 g + t has 8 adjacent bytes of tokens g and g + 8, of w, x, dh_in, dout and dx.
 *     S    d [16 channels, 8 rows] += a [16 channels, 16 tokens] b [16 tokens, 8 rows], a by ldmatrix.trans from the tile of x.
 *
 * Precision. v has 8 significant bits, phi and du have 24. S takes 3 bfloat16 parts of du, which hold every bit. w takes 2 float16
 * parts of phi and of du, rounded to nearest, which hold 22 bits, and omits the product of the two small parts. To fit the range of
 * float16, du is scaled by a power of two for each token, and phi gamma by one for the 16 channels of a warp: the largest value
 * comes to [2^13, 2^15). The error is at most 3 2^-22 of the sum of |phi du| if every factor is at least 2^-16 of the largest of
 * its token or warp. Smaller factors add at most 2^-37 of the product of the two largest for each row.
 *
 * All else that a block needs of a group's tokens is in a record (below), in the order of the lanes that read it.
 *
 * Shared memory: a row of a tile is 2 WARPS chunks of 16 bytes, chunk c of token i at place c ^ (2 (i % 4) + i / 4 % 2). Both ways
 * of reading use each of the 32 banks once: two chunks of 4 tokens (8 bytes a lane), and the same chunk of 8 tokens (ldmatrix).
 *
 * Bytes: (2 n + 1) C elements a token, and n C with each of dout and more; the records once for each block of channels, from the
 * L2 cache; phi and share once for each slice. Deterministic: S adds tokens in an order that T and C decide, then slices in order.
 */
#pragma once

#include "mhc_pre.cuh"

#include <cuda_pipeline.h>

static constexpr int GROUP = 16; /* tokens of a group: the rows of an mma */

/* A power of two and the root of its reciprocal. A value scaled by two of them is scaled back in two steps, each by the product of
 * the two roots: that product and the result of each step are floats, however large or small the two are. */
struct Scale {
    float by, root;
};
/* Scales `most` >= 0 into [2^13, 2^15), or as near as 2^126 can; the scale of 0 is 1. */
__device__ inline Scale scale_to_half(float most) {
    int power = (127 + 14 - (int)(__float_as_uint(most) >> 23)) & ~1; /* even, -114 at least */
    if (power > 126) power = 126;
    if (!(most > 0)) power = 0;
    return {__uint_as_float((uint32_t)(127 + power) << 23), __uint_as_float((uint32_t)(127 - power / 2) << 23)};
}
/* The larger of `most` and |v|, if v is finite. */
__device__ inline float finite_max(float most, float v) { return fabsf(v) < INFINITY ? fmaxf(most, fabsf(v)) : most; }

/* Cuts two numbers below 2^15 into 2 float16 parts: those of `low` are in the low halves. A number that is not finite is its own
 * first part. */
__device__ inline void cut_half(uint32_t (&part)[2], float low, float high) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] = xt_word(xt_store_two(low, high, XtF16()));
        float2 taken = xt_load_two(part[i], XtF16());
        low = fabsf(low) < INFINITY ? low - taken.x : 0.0f;
        high = fabsf(high) < INFINITY ? high - taken.y : 0.0f;
    }
}

/* The record of a group of 16 tokens: its size and the offsets of its five arrays, in bytes. mt = m / 8, PARTS of du for S,
 * lane = 4 g + t.
 *     for_w   uint4  [mt][32]         scaled du of tokens g, g + 8, rows 8 u + 2 t, + 1, in the order of mma operands: of units 0
 *                                     and 1 the first parts, then the second parts; of the last unit the first, second parts
 *     for_s   uint2  [PARTS][mt][32]  row 8 u + g of tokens 2 t, 2 t + 1 (x) and 2 t + 8, 2 t + 9 (y)
 *     mixing  float4 [n][16]          M_0j .. M_n-1,j
 *     rest    float2 [n][16]          h_pre_j, kappa
 *     scale   float  [16]             the root that takes the scale of du back */
template <int PARTS> struct Record {
    __host__ __device__ static constexpr int for_s(int n) { return (n * n + 2 * n) / 8 * 32 * 16; }
    __host__ __device__ static constexpr int mixing(int n) { return for_s(n) + PARTS * (n * n + 2 * n) / 8 * 32 * 8; }
    __host__ __device__ static constexpr int rest(int n) { return mixing(n) + n * GROUP * 16; }
    __host__ __device__ static constexpr int scale(int n) { return rest(n) + n * GROUP * 8; }
    __host__ __device__ static constexpr int bytes(int n) { return scale(n) + GROUP * 4; }
};
static constexpr int S_PARTS = 3; /* also with tf32: 2 would save a sixth of the products, but loads limit the kernel */

/* All threads of a block call it. du [GROUP][stride], kappa and the scale of du [GROUP] are in shared memory; h_pre [tokens, n],
 * m_res [tokens, n, n] or NULL. */
template <int PARTS>
__device__ inline void write_record(char *record, const float *du, int stride, const float *kappa, const Scale *scale,
                                    const float *h_pre, const float *m_res, int64_t first, int64_t tokens, int n) {
    typedef Record<PARTS> R;
    int mt = (n * n + 2 * n) / 8;
    for (int i = threadIdx.x; i < 2 * mt * 32; i += blockDim.x) {
        int lane = i % 32, unit = i / 32 % mt, g = lane / 4, t = lane % 4;
        if (i < mt * 32) {
            const float *from = du + g * stride + 2 * t;
            float of_g = scale[g].by, of_g8 = scale[g + 8].by;
            uint32_t part[2][2][2]; /* of two units: g, g + 8; the parts */
            bool last = unit == mt - 1;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *of = from + 8 * (last ? unit : unit / 2 * 2 + e); /* [2] */
                cut_half(part[e][0], of[0] * of_g, of[1] * of_g);
                cut_half(part[e][1], of[8 * stride] * of_g8, of[8 * stride + 1] * of_g8);
            }
            bool second = unit % 2; /* of the parts */
            ((uint4 *)record)[i] = last     ? make_uint4(part[0][0][0], part[0][1][0], part[0][0][1], part[0][1][1])
                                   : second ? make_uint4(part[0][0][1], part[0][1][1], part[1][0][1], part[1][1][1])
                                            : make_uint4(part[0][0][0], part[0][1][0], part[1][0][0], part[1][1][0]);
        } else {
            uint32_t low[PARTS], high[PARTS];
            const float *from = du + 2 * t * stride + 8 * unit + g;
            cut<PARTS>(low, from[0], from[stride]);
            cut<PARTS>(high, from[8 * stride], from[9 * stride]);
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                ((uint2 *)(record + R::for_s(n)))[(p * mt + unit) * 32 + lane] = make_uint2(low[p], high[p]);
        }
    }
    for (int i = threadIdx.x; i < n * GROUP; i += blockDim.x) {
        int j = i / GROUP, token = i % GROUP;
        int64_t t = first + token;
        float m[4] = {};
        for (int e = 0; m_res && t < tokens && e < n; e++) m[e] = m_res[(t * n + e) * n + j];
        ((float4 *)(record + R::mixing(n)))[i] = make_float4(m[0], m[1], m[2], m[3]);
        ((float2 *)(record + R::rest(n)))[i] = t < tokens ? make_float2(h_pre[t * n + j], kappa[token]) : make_float2(0, 0);
        if (j == 0) ((float *)(record + R::scale(n)))[token] = scale[token].root;
    }
}

/* S_ streams, with dout, with more (dx_add); BLOCKS blocks of WARPS warps on a multiprocessor, STAGES groups in shared memory. */
template <int S_, bool DOUT_, bool MORE_, int WARPS_, int STAGES_, int BLOCKS_, int PARTS_ = S_PARTS> struct DxShape {
    static constexpr int S = S_, WARPS = WARPS_, STAGES = STAGES_, BLOCKS = BLOCKS_, PARTS = PARTS_;
    static constexpr bool DOUT = DOUT_, MORE = MORE_;
    static constexpr int MT = (S * S + 2 * S) / 8, THREADS = 32 * WARPS, COLS = 16 * WARPS;
    static constexpr int TILE = GROUP * 2 * WARPS, RECORD = Record<PARTS>::bytes(S) / 16; /* in pieces of 16 bytes */
    static constexpr int DH_IN = S * TILE, OF_DOUT = DH_IN + TILE, OF_MORE = OF_DOUT + DOUT * S * TILE;
    static constexpr int OF_RECORD = OF_MORE + MORE * S * TILE, STAGE = OF_RECORD + RECORD, BYTES = STAGES * STAGE * 16;
    static_assert(MT * 8 == S * S + 2 * S, "rows of phi in whole tiles");
    static_assert(WARPS % 4 == 0 && STAGES >= 2, "chunks change places within 128 bytes; a stage to compute and one to load");
};

struct DxMma {
    XtBf16 *dx;                            /* may be NULL, like share */
    float *share;                          /* [gridDim.y][m][K] */
    const XtBf16 *x, *dh_in, *dout, *more; /* more may be dx */
    const float *phi, *gamma;              /* gamma may be NULL */
    const uint4 *records;                  /* [groups] */
    int64_t tokens, cols, groups;
};

/* Block (COLS channels, slice of the groups: every gridDim.y-th, the last one first). */
template <typename P> __global__ void __launch_bounds__(P::THREADS, P::BLOCKS) mhc_pre_dx_mma_kernel(const DxMma p) {
    constexpr int S = P::S, MT = P::MT, STAGES = P::STAGES, WIDE = 2 * P::WARPS; /* chunks of a row */
    typedef XtPiece<XtBf16, 4> Piece;
    extern __shared__ uint4 mhc_pre_stages[]; /* [STAGES][STAGE] */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int64_t begin = (int64_t)blockIdx.x * P::COLS, k = S * p.cols;
    int slices = gridDim.y, group = (int)p.groups - 1 - blockIdx.y; /* the one to compute; then group - slices, .. */
    auto twist = [](int token) { return 2 * (token % 4) + token / 4 % 2; };

    const int64_t back = (int64_t)slices * GROUP * p.cols; /* elements of dh_in from a group to the next */

    /* A thread loads the same chunk of every tile. */
    int row = threadIdx.x / WIDE, chunk = threadIdx.x % WIDE, place = row * WIDE + (chunk ^ twist(row));
    int coming = group, free = 0;        /* the group to load, and its stage */
    int column = (int)begin + chunk * 8; /* fits an int: a larger phi would fit no memory */
    bool there = column < p.cols;
    int64_t in_dh = ((int64_t)coming * GROUP + row) * p.cols + column, size = p.tokens * p.cols;
    auto load = [&]() {
        if (coming < 0) return;
        bool inside = there && in_dh < size;
        size_t zeros = inside ? 0 : 16;
        int64_t at = inside ? S * in_dh - (S - 1) * column : 0; /* outside: any valid address, which is not read */
        uint4 *to = mhc_pre_stages + free * P::STAGE;
#pragma unroll
        for (int j = 0; j < S; j++) __pipeline_memcpy_async(to + j * P::TILE + place, p.x + at + j * p.cols, 16, zeros);
        if (p.dx) {
            __pipeline_memcpy_async(to + P::DH_IN + place, p.dh_in + (inside ? in_dh : 0), 16, zeros);
#pragma unroll
            for (int j = 0; P::DOUT && j < S; j++)
                __pipeline_memcpy_async(to + P::OF_DOUT + j * P::TILE + place, p.dout + at + j * p.cols, 16, zeros);
#pragma unroll
            for (int j = 0; P::MORE && j < S; j++)
                __pipeline_memcpy_async(to + P::OF_MORE + j * P::TILE + place, p.more + at + j * p.cols, 16, zeros);
        }
        const uint4 *record = p.records + (int64_t)coming * P::RECORD;
#pragma unroll
        for (int i = 0; i < P::RECORD; i += P::THREADS)
            if (i + (int)threadIdx.x < P::RECORD)
                __pipeline_memcpy_async(to + P::OF_RECORD + i + threadIdx.x, record + i + threadIdx.x, 16);
        coming -= slices, in_dh -= back, free = free + 1 == STAGES ? 0 : free + 1;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        load();
        __pipeline_commit();
    }

    /* phi gamma, scaled: rows 8 u + 2 t, + 1 of channel 4 (g / 2) + 2 h + g % 2 of the warp's 16. The last index has what one
     * mma takes: the first parts of units u and u + 1, then their second parts; of the last unit its first and second part. */
    uint32_t phi[S][2][MT][2]; /* stream, h */
    float whole[S * 2 * MT][2] = {}, most = 0;
#pragma unroll
    for (int i = 0; i < S * 2 * MT; i++) {
        int j = i / (2 * MT), h = i / MT % 2, u = i % MT;
        int64_t c = begin + 16 * warp + 4 * (g / 2) + 2 * h + g % 2;
        if (p.dx && c < p.cols) {
            const float *from = p.phi + (8 * u + 2 * t) * k + j * p.cols + c;
            float gamma = p.gamma ? p.gamma[j * p.cols + c] : 1.0f;
            whole[i][0] = from[0] * gamma, whole[i][1] = from[k] * gamma;
        }
        most = finite_max(finite_max(most, whole[i][0]), whole[i][1]);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    Scale scale = scale_to_half(most);
#pragma unroll
    for (int i = 0; i < S * 2 * MT; i++) {
        int j = i / (2 * MT), h = i / MT % 2, u = i % MT;
        uint32_t part[2];
        cut_half(part, whole[i][0] * scale.by, whole[i][1] * scale.by);
        if (u == MT - 1) phi[j][h][u][0] = part[0], phi[j][h][u][1] = part[1];
        else phi[j][h][u / 2 * 2][u % 2] = part[0], phi[j][h][u / 2 * 2 + 1][u % 2] = part[1];
    }

    float s[S][MT][4] = {}; /* S: channels g (0, 1) and g + 8 (2, 3) of the warp's 16, rows 8 u + 2 t, + 1 */
    /* Place of this lane's 8 bytes of token g in a tile, distance to those of g + 8, and place of its row for ldmatrix. */
    int own = (g * WIDE + ((2 * warp + t / 2) ^ twist(g))) * 2 + t % 2, beyond = 8 * WIDE * 2;
    int of_matrix = (lane / 16 * 8 + lane % 8) * WIDE + ((2 * warp + lane / 8 % 2) ^ twist(lane % 8));
    bool inside = begin + 16 * warp + 4 * t < p.cols; /* [4] channels of tokens g and g + 8 of the group */
    XtBf16 *dx = p.dx + ((int64_t)group * GROUP + g) * k + begin + 16 * warp + 4 * t;
    for (int now = 0; group >= 0; group -= slices, dx -= S * back, now = now + 1 == STAGES ? 0 : now + 1) {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads(); /* the group has arrived for all threads, and all are done with the group before it */
        load();
        __pipeline_commit();
        const uint4 *stage = mhc_pre_stages + now * P::STAGE;
        const char *record = (const char *)(stage + P::OF_RECORD);
        if (p.share) {
            const uint2 *for_s = (const uint2 *)(record + Record<P::PARTS>::for_s(S)) + lane;
            uint32_t v[S][4];
#pragma unroll
            for (int j = 0; j < S; j++) xt_load_matrices<true>(v[j], xt_shared_address(stage + j * P::TILE + of_matrix));
#pragma unroll
            for (int part = P::PARTS - 1; part >= 0; part--)
#pragma unroll
                for (int u = 0; u < MT; u++) {
                    uint2 b = for_s[(part * MT + u) * 32];
#pragma unroll
                    for (int j = 0; j < S; j++) xt_mma_16<XtBf16>(s[j][u], v[j], b.x, b.y);
                }
        }
        if (!p.dx) continue;
        uint4 du[MT];
#pragma unroll
        for (int u = 0; u < MT; u++) du[u] = ((const uint4 *)record)[u * 32 + lane];
        auto two = [&](Piece(&to)[2], int tile) {
            const XtBf16 *from = (const XtBf16 *)(stage + tile) + own * 4;
            to[0] = xt_read<XtBf16, 4>(from), to[1] = xt_read<XtBf16, 4>(from + beyond * 4);
        };
        const float4 *mixing = (const float4 *)(record + Record<P::PARTS>::mixing(S)) + g;
        const float2 *rest = (const float2 *)(record + Record<P::PARTS>::rest(S)) + g;
        const float *root = (const float *)(record + Record<P::PARTS>::scale(S)) + g; /* of token g; [8] of g + 8 */
        bool there[2] = {inside && (int64_t)group * GROUP + g < p.tokens, inside && (int64_t)group * GROUP + g + 8 < p.tokens};
        Piece in[2], dout[S][2];
        two(in, P::DH_IN);
#pragma unroll
        for (int j = 0; P::DOUT && j < S; j++) two(dout[j], P::OF_DOUT + j * P::TILE);
#pragma unroll
        for (int j = 0; j < S; j++) {
            float w[2][4] = {}; /* channels 4 t + 2 h, + 1 of token g, then of g + 8 */
            /* Pairs of units of 8 rows, then the last unit, whose first part meets both parts of phi in one mma. Small products
             * come first. */
            static_assert(MT % 2 == 1, "pairs of units, and one");
            const uint4 &end = du[MT - 1];
            auto pairs = [&](int of_du, int of_phi) {
#pragma unroll
                for (int i = 0; i < MT - 1; i++) {
                    int u = i / 2 * 2, h = i % 2;
                    const uint4 &a = du[u + of_du];
                    xt_mma_16<XtF16>(w[h], a.x, a.y, a.z, a.w, phi[j][h][u + of_phi][0], phi[j][h][u + of_phi][1]);
                }
            };
            pairs(1, 0);
#pragma unroll
            for (int h = 0; h < 2; h++) xt_mma_8<XtF16>(w[h], end.z, end.w, phi[j][h][MT - 1][0]);
            pairs(0, 1);
#pragma unroll
            for (int h = 0; h < 2; h++)
                xt_mma_16<XtF16>(w[h], end.x, end.y, end.x, end.y, phi[j][h][MT - 1][0], phi[j][h][MT - 1][1]);
            pairs(0, 0);
            Piece v[2], more[2];
            two(v, j * P::TILE);
            if constexpr (P::MORE) two(more, P::OF_MORE + j * P::TILE);
#pragma unroll
            for (int e = 0; e < 2; e++) { /* token g + 8 e */
                float2 factor = rest[j * GROUP + 8 * e];
                float of_w = root[8 * e] * scale.root;
                float m[4] = {};
                if constexpr (P::DOUT) {
                    float4 of = mixing[j * GROUP + 8 * e];
                    m[0] = of.x, m[1] = of.y, m[2] = of.z, m[3] = of.w;
                }
                Piece to;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float2 of_x = xt_load_two(v[e].word[h], XtBf16()), of_in = xt_load_two(in[e].word[h], XtBf16());
                    float low = of_w * (of_w * w[h][2 * e]) + factor.y * of_x.x + factor.x * of_in.x,
                          high = of_w * (of_w * w[h][2 * e + 1]) + factor.y * of_x.y + factor.x * of_in.y;
#pragma unroll
                    for (int o = 0; P::DOUT && o < S; o++) {
                        float2 of_out = xt_load_two(dout[o][e].word[h], XtBf16());
                        low += m[o] * of_out.x, high += m[o] * of_out.y;
                    }
                    if constexpr (P::MORE) {
                        float2 of_more = xt_load_two(more[e].word[h], XtBf16());
                        low += of_more.x, high += of_more.y;
                    }
                    to.word[h] = xt_word(xt_store_two(low, high, XtBf16()));
                }
                if (there[e]) xt_write(dx + j * p.cols + 8 * e * k, to);
            }
        }
    }
    if (!p.share) return;
    float *share = p.share + (int64_t)blockIdx.y * 8 * MT * k;
#pragma unroll
    for (int i = 0; i < S * MT * 4; i++) {
        int j = i / (MT * 4), u = i / 4 % MT, e = i % 4;
        int64_t of_s = begin + 16 * warp + g + e / 2 * 8;
        if (of_s < p.cols) share[(8 * u + 2 * t + e % 2) * k + j * p.cols + of_s] = s[j][u][e];
    }
}

/* The shapes that the library runs: 3 blocks of 4 warps with 168 registers a thread and 72 KB each, or as many as fit in memory. */
template <int S, bool DOUT, bool MORE> using DxDefault = DxShape<S, DOUT, MORE, 4, 3, S == 2 ? 4 : DOUT && MORE ? 2 : 3>;
static constexpr int64_t DX_BLOCKS = 3 * XT_PLAN_MULTIPROCESSORS; /* resident */

/* As many slices as give no more blocks than are resident at once: each slice writes a part of share, which is read again. */
static int64_t dx_slices(int64_t groups, int64_t cols) {
    int64_t count = DX_BLOCKS / xt_divide_up(cols, DxDefault<4, true, false>::COLS), most = groups / 2;
    if (count > most) count = most;
    return count < 1 ? 1 : count;
}

template <typename P> static XtStatus dx_mma_as(const DxMma &d, int64_t slices) {
    XT_CHECK(xt_allow_shared("mhc_pre_bwd", mhc_pre_dx_mma_kernel<P>, P::BYTES));
    xt_launch(mhc_pre_dx_mma_kernel<P>, dim3(xt_blocks(d.cols, P::COLS), (unsigned)slices), P::THREADS, P::BYTES, d);
    return XT_OK;
}
template <int S> static XtStatus dx_mma(const DxMma &d, int64_t slices) {
    bool dout = d.dx && d.dout, more = d.dx && d.more;
    if (dout && more) return dx_mma_as<DxDefault<S, true, true>>(d, slices);
    if (dout) return dx_mma_as<DxDefault<S, true, false>>(d, slices);
    if (more) return dx_mma_as<DxDefault<S, false, true>>(d, slices);
    return dx_mma_as<DxDefault<S, false, false>>(d, slices);
}
