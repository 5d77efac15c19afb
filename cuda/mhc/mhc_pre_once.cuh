/* mhc_pre_once.cuh - the forward of mhc_pre.cu that reads x once: bfloat16, n = 2 or 4, C % 8 == 0, compute capability 9.0.
 *
 *     u = phi (v gamma),  sum v^2  ->  r, z, h_pre, h_post, h_res  ->  h_in = sum_j h_pre_j x_j    (formulas: contract/mhc.h)
 *
 * h_in needs a sum over the whole of a token, and no multiprocessor holds enough whole tokens at a time: phi is longer than the
 * tokens of a tile (24 rows of 4 bytes and up beside 16 of 2), and streaming it past every tile would cost more than reading x
 * twice. So each block keeps a part of phi, and the tokens pass by. Block q has columns [q width, (q + 1) width) of all streams for
 * as long as the kernel runs, its part of phi gamma in registers. `slices` blocks, one for each q, are a group; they walk over the
 * same tiles of 16 tokens together, and the groups share the tiles. What a tile needs from other blocks, 25 sums a token, goes
 * through the L2 cache, while x waits in shared memory:
 *
 *     iteration i of block q, in this order                                                         of tile
 *     A  warp w has 64 columns of one stream: loads of them begin, straight from x, 2 KB a tile     i + STAGES - 1 - LAG
 *     B  products by mma.sync and sums of squares of the warp, added up over the warps, -> sums     i
 *     C  tokens that are q's own: the sums of all slices, in order -> coefficients, h_pre -> mixing i - COLLECT
 *     D  h_pre of all tokens <- mixing; h_in of the block's columns from shared memory              i - LAG
 *
 * Blocks of a group wait for each other, so all must run at once: the launch is cooperative, with no more blocks than fit. A
 * message is one 64-bit word, written and read as a whole: a number, and its iteration plus one. A reader that finds the iteration
 * it waits for has the number, so no fence is needed. LAG + 1 slots used in turn are enough: before a block writes a slot again,
 * step D has given it a result of the message that was there.
 * No deadlock: inputs of iteration i (C, D) are sent before iteration i - 1 ends.
 *
 * Moved: (n + 1) C elements a token; through the L2 cache 16 (m + 1) bytes more a token and slice; phi once for every group.
 * Deterministic: sums over the warp's columns, over warps, over slices in an order that n and C alone decide. No token's result
 * depends on another token.
 */
#pragma once

#include "contract/mhc.h"
#include "mhc_pre.cuh"

static constexpr int ONCE_TILE = 16;        /* tokens of a tile: the rows of an mma */
static constexpr int64_t ONCE_TOKENS = 128; /* with fewer, waiting between blocks costs more than it saves */
typedef unsigned long long OnceWord;        /* a message: the number in the low half, the iteration + 1 in the high half */

/* S streams. BLOCKS of WARPS warps on a multiprocessor; STAGES tiles in shared memory; C and D this many iterations behind B. */
template <int S_, int PARTS_, int WARPS_, int BLOCKS_, int STAGES_, int COLLECT_, int LAG_> struct OnceShape {
    static constexpr int S = S_, PARTS = PARTS_, WARPS = WARPS_, BLOCKS = BLOCKS_, STAGES = STAGES_, COLLECT = COLLECT_, LAG = LAG_;
    static constexpr int MT = (S * S + 2 * S) / 8, M = 8 * MT, THREADS = 32 * WARPS;
    static constexpr int SUMS = ONCE_TILE * (M + 1); /* of a tile: u [16, M], then squares [16] */
    static constexpr int EACH = WARPS / S;           /* warps of a stream */
    static constexpr int AHEAD = STAGES - 1 - LAG;   /* tiles in flight */
    static constexpr int PLACES = LAG + 1;           /* for messages */
    static constexpr int TILE_PIECES = WARPS * ONCE_TILE * 8;
    static constexpr int BYTES = STAGES * TILE_PIECES * 16 + (WARPS * (SUMS + 32) + ONCE_TILE * S + 64) * 4;
    static_assert(M == S * S + 2 * S && WARPS % S == 0 && M < 32, "whole tiles of rows, a lane for each");
    static_assert(COLLECT >= 1 && LAG > COLLECT && AHEAD >= 1,
                  "a message is sent in an iteration before the one that waits for it");
};

struct Once {
    XtBf16 *h_in;
    const XtBf16 *x;
    const float *phi, *gamma, *alpha, *bias;    /* gamma may be NULL */
    float *h_post, *h_res, *h_pre, *rstd, *mix; /* of the forward */
    OnceWord *sums, *mixing;                    /* [groups][PLACES][slices][SUMS] and [groups][PLACES][16][S], zeros at first */
    int64_t tokens, cols;
    int width, slices, groups;
    float norm_eps, hc_eps;
};

/* ---- messages --------------------------------------------------------------------------------------------------------------- */

__device__ inline OnceWord once_word(float value, unsigned sent) { return (OnceWord)sent << 32 | __float_as_uint(value); }
__device__ inline unsigned once_sent(OnceWord word) { return (unsigned)(word >> 32); }
__device__ inline float once_number(OnceWord word) { return __uint_as_float((unsigned)word); }

/* cut for finite numbers: without the tests, which cost more than the rest. */
template <int PARTS> __device__ inline void once_cut(uint32_t (&part)[PARTS], float2 v) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        part[i] = __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
        v.x -= __uint_as_float(__float_as_uint(v.x) & 0xffff0000u);
        v.y -= __uint_as_float(__float_as_uint(v.y) & 0xffff0000u);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------------------- */

/* Block (group, slice). A stage is [WARPS][16 tokens][8 pieces of 16 bytes]. Piece c of token r is at c ^ r % 8: neither a
 * column of pieces (B) nor a row (A, D) uses a bank twice. */
template <typename Shape> __global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) mhc_pre_once_kernel(const Once p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    constexpr int S = Shape::S, PARTS = Shape::PARTS, WARPS = Shape::WARPS, MT = Shape::MT, M = Shape::M, SUMS = Shape::SUMS;
    constexpr int STAGES = Shape::STAGES, AHEAD = Shape::AHEAD, EACH = Shape::EACH, TILE = ONCE_TILE;
    constexpr unsigned PLACES = Shape::PLACES, COLLECT = Shape::COLLECT, LAG = Shape::LAG;
    extern __shared__ uint4 once_shared[];
    uint4 *stages = once_shared;
    float *shares = (float *)(stages + STAGES * Shape::TILE_PIECES); /* [WARPS][SUMS] of tile i */
    float *own = shares + WARPS * SUMS;                              /* [WARPS][32]: sums over a warp's slices, C */
    float *h = own + WARPS * 32;                                     /* [TILE][S]: D */
    float *affine = h + TILE * S;                                    /* [2][32]: alpha of each row, bias */
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const unsigned slice = blockIdx.x % (unsigned)p.slices, group = blockIdx.x / (unsigned)p.slices;
    const int64_t k = S * p.cols, begin = (int64_t)slice * p.width;
    const int width = p.cols - begin < p.width ? (int)(p.cols - begin) : p.width; /* of this slice */
    const int64_t column = warp / EACH * p.cols + begin;                          /* in a token; then `inner` more */
    const int inner = (int)(warp % EACH) * 64;
    /* Tiles of the group, and tokens of the last one. Tile i has the tokens from 16 (i groups + group). */
    const unsigned count = (unsigned)(((p.tokens + TILE - 1) / TILE - group + p.groups - 1) / p.groups);
    const int64_t rest = p.tokens - ((int64_t)(count - 1) * p.groups + group) * TILE;
    const int last = rest < TILE ? (int)rest : TILE;
    auto tokens_of = [&](unsigned i) { return i + 1 == count ? last : TILE; };

    const int piece = (int)(lane % 8), row = (int)(lane / 8); /* A: and every fourth row from there */
    const bool inside = inner + piece * 8 < width;
    const int64_t four = 4 * k, round = (int64_t)p.groups * TILE * k; /* from row to row, from tile to tile */
    const XtBf16 *source = p.x + ((int64_t)group * TILE + row) * k + column + inner + piece * 8;
    auto load = [&](unsigned i, int stage) {
        uint4 *to = stages + (stage * WARPS + (int)warp) * (TILE * 8) + row * 8;
        int tokens = inside ? tokens_of(i) : 0;
#pragma unroll
        for (int r = 0; r < TILE / 4; r++)
            xt_copy_async(to + r * 32 + (piece ^ (r % 2 * 4 + row)), source + r * four, row + 4 * r < tokens);
        source += round;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if ((unsigned)i < count) load((unsigned)i, i);
        xt_copy_commit();
    }

    uint2 phi[4][PARTS][MT]; /* columns 16 q + 2 t, + 1 and 8 more, of row 8 nt + g of phi gamma, cut */
    {
        float2 v[4][MT][2]; /* issues all loads before the first use */
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int at = inner + 16 * q + 8 * half;
#pragma unroll
                for (int nt = 0; nt < MT; nt++)
                    v[q][nt][half] =
                        at < width ? *(const float2 *)(p.phi + (8 * nt + g) * k + column + at + 2 * t) : make_float2(0, 0);
            }
        bool finite = true;
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int at = inner + 16 * q + 8 * half;
                float2 scale = make_float2(1, 1);
                if (p.gamma && at < width) scale = *(const float2 *)(p.gamma + column + at + 2 * t);
#pragma unroll
                for (int nt = 0; nt < MT; nt++) {
                    v[q][nt][half].x *= scale.x, v[q][nt][half].y *= scale.y;
                    finite = finite && fabsf(v[q][nt][half].x) < INFINITY && fabsf(v[q][nt][half].y) < INFINITY;
                }
            }
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
            for (int nt = 0; nt < MT; nt++) {
                uint32_t word[2][PARTS];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (finite) once_cut<PARTS>(word[half], v[q][nt][half]);
                    else cut<PARTS>(word[half], v[q][nt][half].x, v[q][nt][half].y);
                }
#pragma unroll
                for (int part = 0; part < PARTS; part++) phi[q][part][nt] = make_uint2(word[0][part], word[1][part]);
            }
    }
    if (threadIdx.x < M) {
        affine[threadIdx.x] = p.alpha[threadIdx.x < S ? 0 : threadIdx.x < 2 * S ? 1 : 2];
        affine[32 + threadIdx.x] = p.bias[threadIdx.x];
    }

    /* C: token e of tile i belongs to slice (16 i + e) % slices, so a tile has at most WARPS / helpers tokens of this block.
     * `helpers` warps share a token; each adds every helpers-th slice. */
    const int slices = p.slices;
    int helpers = WARPS;
    while (WARPS / helpers * slices < TILE) helpers /= 2;
    const int helper = (int)warp % helpers, skip = TILE % slices;
    int mine = (int)slice + (int)warp / helpers * slices; /* the warp's token in the tile of C, if there is one */
    const int beyond = mine - (int)slice;                 /* mine stays in [beyond, beyond + slices) */

    OnceWord *const group_sums = p.sums + (int64_t)(group * PLACES * (unsigned)slices) * SUMS;
    OnceWord *const group_mixing = p.mixing + group * PLACES * (TILE * S);
    /* D: pieces of 8 columns of h_in, a row of them for each token */
    constexpr int PIECES = EACH * 8, ROWS = Shape::THREADS / PIECES;
    const int out_piece = (int)threadIdx.x % PIECES, out_row = (int)threadIdx.x / PIECES;
    XtBf16 *out = p.h_in + ((int64_t)group * TILE + out_row) * p.cols + begin + out_piece * 8;

    int stage = 0; /* of tile i */
    for (unsigned i = 0; i < count + LAG; i++) {
        /* Asks for the messages early, to wait less later. As unsigned, a negative iteration is beyond count. */
        const unsigned of_c = i - COLLECT, of_d = i - LAG;
        const bool collects = of_c < count && mine < tokens_of(of_c); /* equal in a warp */
        OnceWord found[4] = {};
        const OnceWord *sums = group_sums + (int)(of_c % PLACES) * slices * SUMS;
        auto look = [&](int from) {
#pragma unroll
            for (int s = 0; s < 4; s++) {
                found[s] = once_word(0, of_c + 1);
                if ((int)lane <= M && from + s * helpers < slices) found[s] = xt_read_relaxed(sums + (from + s * helpers) * SUMS);
            }
        };
        if (collects) {
            sums += (int)lane < M ? mine * M + (int)lane : TILE * M + mine;
            look(helper);
        }
        OnceWord mixed = once_word(0, of_d + 1);
        const OnceWord *mixing = group_mixing + of_d % PLACES * (TILE * S) + threadIdx.x;
        if (of_d < count && (int)threadIdx.x < tokens_of(of_d) * S) mixed = xt_read_relaxed(mixing);

        /* B: u, and the products of 8 tokens with each other, with the squares on the diagonal */
        float u[MT][4] = {}, squares[2][4] = {};
        if (i < count) {
            xt_copy_wait<AHEAD - 1>();
            __syncwarp();
            const int at = (stage * WARPS + (int)warp) * (TILE * 8) + (int)(lane % 16 * 8 + (lane / 16 ^ lane % 8));
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint32_t v[4];
                xt_load_matrices<false>(v, xt_shared_address(stages + (at ^ 2 * q)));
#pragma unroll
                for (int part = PARTS - 1; part >= 0; part--)
#pragma unroll
                    for (int nt = 0; nt < MT; nt++) xt_mma_16<XtBf16>(u[nt], v, phi[q][part][nt].x, phi[q][part][nt].y);
                xt_mma_16<XtBf16>(squares[0], v, v[0], v[2]);
                xt_mma_16<XtBf16>(squares[1], v, v[1], v[3]);
            }
        }

        /* C and D wait. */
        float collected = 0;
        for (int from = helper; collects;) {
            auto late = [&](int s) { return once_sent(found[s]) != of_c + 1; };
            while (late(0) || late(1) || late(2) || late(3)) {
                __nanosleep(20);
#pragma unroll
                for (int s = 0; s < 4; s++)
                    if (late(s)) found[s] = xt_read_relaxed(sums + (from + s * helpers) * SUMS);
            }
#pragma unroll
            for (int s = 0; s < 4; s++) collected += once_number(found[s]);
            from += 4 * helpers;
            if (from >= slices) break;
            look(from);
        }
        while (once_sent(mixed) != of_d + 1) {
            __nanosleep(20);
            mixed = xt_read_relaxed(mixing);
        }

        __syncthreads(); /* every thread is done with the shared memory of iteration i - 1 */
        if (i < count) {
            float *to = shares + warp * SUMS + g * M + 2 * t;
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int nt = 0; nt < MT; nt++) *(float2 *)(to + 8 * e * M + 8 * nt) = make_float2(u[nt][2 * e], u[nt][2 * e + 1]);
                if (g / 2 == t) shares[warp * SUMS + TILE * M + g + 8 * e] = g % 2 ? squares[e][2 * e + 1] : squares[e][2 * e];
            }
        }
        own[threadIdx.x] = collected;
        if (threadIdx.x < TILE * S) h[threadIdx.x] = once_number(mixed);
        __syncthreads();

        /* B: over the warps */
        if (i < count) {
            OnceWord *to = group_sums + ((int)(i % PLACES) * slices + (int)slice) * SUMS;
#pragma unroll
            for (int at = 0; at < SUMS; at += 2 * Shape::THREADS) {
                int e = at + 2 * (int)threadIdx.x;
                if (e >= SUMS) break;
                float2 sum = *(const float2 *)(shares + e);
#pragma unroll
                for (int w = 1; w < WARPS; w++) {
                    float2 more = *(const float2 *)(shares + w * SUMS + e);
                    sum.x += more.x, sum.y += more.y;
                }
                xt_write_relaxed(to + e, once_word(sum.x, i + 1), once_word(sum.y, i + 1));
            }
        }

        /* A: into the stage of D's tile of iteration i - 1 */
        if (i + AHEAD < count) load(i + AHEAD, stage + AHEAD < STAGES ? stage + AHEAD : stage + AHEAD - STAGES);
        xt_copy_commit();

        /* C: lane j < M has row j, lane M the squares */
        if (collects && helper == 0) {
            const int64_t at = ((int64_t)of_c * p.groups + group) * TILE + mine;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                if (w < helpers) sum += own[(warp + w) * 32 + lane];
            const float r = 1 / sqrtf(__shfl_sync(0xffffffffu, sum, M) / (float)k + p.norm_eps);
            const float z = affine[lane] * (r * sum) + affine[32 + lane], sigmoid = 1 / (1 + expf(-z)); /* unused beyond row M */
            if (lane < S)
                xt_write_relaxed(group_mixing + of_c % PLACES * (TILE * S) + mine * S + lane,
                                 once_word(sigmoid + p.hc_eps, of_c + 1));
            if (lane < S) p.h_pre[at * S + lane] = sigmoid + p.hc_eps;
            else if (lane < 2 * S) p.h_post[at * S + lane - S] = 2 * sigmoid;
            else if (lane < M) p.h_res[at * (S * S) + lane - 2 * S] = z;
            if (lane < M) p.mix[at * M + lane] = sum;
            else if (lane == M) p.rstd[at] = r;
        }
        if (i >= COLLECT) mine = mine - beyond < skip ? mine - skip + slices : mine - skip;

        /* D */
        if (of_d < count) {
            const int from = (stage >= (int)LAG ? stage - (int)LAG : stage - (int)LAG + STAGES) * Shape::TILE_PIECES;
#pragma unroll
            for (int e = 0; e < TILE; e += ROWS) {
                int r = out_row + e;
                if (r >= tokens_of(of_d) || out_piece * 8 >= width) break;
                XtVector<float, 8> sum = {};
#pragma unroll
                for (int j = 0; j < S; j++) {
                    int at = from + ((j * EACH + out_piece / 8) * TILE + r) * 8 + (out_piece % 8 ^ r % 8);
                    XtVector<float, 8> value = xt_load(xt_read<XtBf16, 8>((const XtBf16 *)(stages + at)));
#pragma unroll
                    for (int c = 0; c < 8; c++) sum.at[c] += h[r * S + j] * value.at[c];
                }
                xt_write(out + e * p.cols, xt_store<XtBf16, 8>(sum));
            }
            out += (int64_t)p.groups * TILE * p.cols;
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
#endif
}

/* ---- the slot's part -------------------------------------------------------------------------------------------------------- */

/* Columns of a block: as many as its registers hold, but fewer than all. 0: impossible. */
inline int once_width(int64_t cols, int most) {
    if (cols > most) return most;
    int half = (int)xt_divide_up(cols, 16) * 8;
    return half < cols ? half : 0;
}

template <typename Shape> static XtStatus once_queue(const XtMhcPreFwd *p, bool *queued) {
    int width = once_width(p->cols, Shape::EACH * 64), blocks = 0, cooperative = 0;
    int64_t tiles = xt_divide_up(p->tokens, ONCE_TILE);
    if (width == 0 || tiles >= 1 << 30 || Shape::BYTES > xt_shared_limit()) return XT_OK;
    cudaError_t error = cudaFuncSetAttribute(mhc_pre_once_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::BYTES);
    if (!error)
        error = cudaFuncSetAttribute(mhc_pre_once_kernel<Shape>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
    if (!error)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, mhc_pre_once_kernel<Shape>, Shape::THREADS, Shape::BYTES);
    if (!error) error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, xt_device_index());
    if (error) return xt_cuda_error("mhc_pre_fwd", error);
    int64_t slices = xt_divide_up(p->cols, width), groups = (int64_t)blocks * xt_multiprocessors() / slices;
    if (groups > tiles) groups = tiles;
    /* Calls with more slices than XT_PLAN_MULTIPROCESSORS hold take the other way on larger devices too, for the same bits. */
    if (!cooperative || groups == 0 || slices > Shape::BLOCKS * XT_PLAN_MULTIPROCESSORS) return XT_OK;

    XtScratch messages;
    size_t sums = (size_t)(groups * Shape::PLACES * slices * Shape::SUMS),
           mixing = (size_t)(groups * Shape::PLACES * ONCE_TILE * Shape::S);
    XT_CHECK(messages.allocate((sums + mixing) * sizeof(OnceWord)));
    XT_CHECK(xt_cuda_error("mhc_pre_fwd", cudaMemsetAsync(messages.data, 0, (sums + mixing) * sizeof(OnceWord), xt_stream())));
    const Once once = {(XtBf16 *)p->h_in,
                       (const XtBf16 *)p->x,
                       (const float *)p->phi,
                       (const float *)p->gamma,
                       (const float *)p->alpha,
                       (const float *)p->bias,
                       (float *)p->h_post,
                       (float *)p->h_res,
                       (float *)p->h_pre,
                       (float *)p->rstd,
                       (float *)p->mix,
                       (OnceWord *)messages.data,
                       (OnceWord *)messages.data + sums,
                       p->tokens,
                       p->cols,
                       width,
                       (int)slices,
                       (int)groups,
                       (float)p->norm_eps,
                       (float)p->hc_eps};
    if (!xt_launch_together(mhc_pre_once_kernel<Shape>, (unsigned)(slices * groups), Shape::THREADS, Shape::BYTES, once))
        return xt_refuse_captured("compute mhc_pre in another way than its planned run: the device has too little room now");
    *queued = true;
    return XT_OK;
}

/* STREAMS, PARTS; blocks of 8 warps, two of them on a multiprocessor, 6 tiles of 16 KB each. */
template <int S, int PARTS> using OnceBest = OnceShape<S, PARTS, 8, 2, 6, 1, 3>;

/* *queued is false if this path does not support the call; then it has done nothing. */
static XtStatus mhc_pre_once(const XtMhcPreFwd *p, bool *queued) {
    *queued = false;
    if (p->dtype != XT_BFLOAT16 || (p->streams != 2 && p->streams != 4) || p->tokens < ONCE_TOKENS) return XT_OK;
    if (xt_compute_capability() < 90 || !xt_aligned<XtBf16>(p->cols, p->cols, p->x, p->h_in, p->phi, p->gamma)) return XT_OK;
    if (p->streams == 4) return p->tf32 ? once_queue<OnceBest<4, 2>>(p, queued) : once_queue<OnceBest<4, 3>>(p, queued);
    return p->tf32 ? once_queue<OnceBest<2, 2>>(p, queued) : once_queue<OnceBest<2, 3>>(p, queued);
}
