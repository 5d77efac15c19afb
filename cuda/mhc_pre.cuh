/* mhc_pre.cuh - the products with phi of mhc_pre.cu on tensor cores: bfloat16 streams, n = 2 or 4, rows in whole pieces of 16 bytes.
 *
 *     mix      u_t = phi v_t and sum v_t^2, by tiles of tokens and slices of columns          -> part [slices, T, MP + 2]
 *     dx       w_t = phi^T du_t and what else dx is made of, S = sum_t du_t v_t^T by slices   -> dx, share [slices, m, K]
 *
 * v has 8 significant bits, phi and du have 24: these are cut into PARTS bfloat16 numbers, by truncation: 3 hold every bit, 2 hold
 * more than tf32 does. A product of two cut numbers leaves out the pairs of parts below the last bit kept. m = 8 MT rows: 8 or 24.
 *
 * mma.sync leaves open which token, row or column is the i-th, as long as the operands agree. Here lane 4 g + t owns 16 bytes of x as
 * they lie in memory: 8 columns (in mix, columns 8 t .. of rows g and g + 8; in dx, columns 8 g .. of tokens 4 t .. 4 t + 3), and
 * fragments of phi and du are laid out to match, so that neither x nor dx goes through shared memory, and what the elementwise part
 * of dx needs is in the lane that has w.
 *
 *     mix: 4 warps with 64 tokens each share a slice of phi through the first cache, which x bypasses.
 *     dx: a warp has one stream and 64 channels and walks over the 16-token groups of a slice; S stays in registers, the parts of
 *     phi in shared memory. The n warps of a block have the same channels: they find dout and dh_in in the first cache.
 */
#ifndef XT_MHC_PRE_CUH
#define XT_MHC_PRE_CUH

#include "mhc.cuh"

static constexpr int MIX_TOKENS = 256; /* of a block; 64 of a warp */
static constexpr int GROUP = 16;       /* tokens whose du is cut and laid out together */

/* d += a b for a [16, 16] and b [16, 8], or a [16, 8] and b [8, 8], of bfloat16: compute capability 8.0. */
__device__ inline void mma_16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
__device__ inline void mma_8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
#endif
}
/* Read once: leaves the first cache to phi. */
__device__ inline XtPiece<XtBf16, 8> read_past(const XtBf16 *p) {
    XtPiece<XtBf16, 8> piece;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]), "=r"(piece.word[3])
                 : "l"(p));
    return piece;
}

/* Parts of two numbers, side by side: low in the low half. A number that is not finite is its first part. */
template <int PARTS> __device__ inline void cut(uint32_t (&part)[PARTS], float low, float high) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        uint32_t a = __float_as_uint(low) & 0xffff0000u, b = __float_as_uint(high) & 0xffff0000u;
        if (!(fabsf(low) < INFINITY)) a = low != low ? 0x7fc00000u : a;
        if (!(fabsf(high) < INFINITY)) b = high != high ? 0x7fc00000u : b;
        part[i] = a >> 16 | b;
        low = fabsf(low) < INFINITY ? low - __uint_as_float(a) : 0.0f;
        high = fabsf(high) < INFINITY ? high - __uint_as_float(b) : 0.0f;
    }
}

/* ---- forward ------------------------------------------------------------------------------------------------------------------- */

/* frag [steps][PARTS][MT][32 lanes]: a lane's 8 columns 32 step + 8 t .. of row 8 nt + g of phi gamma; zeros beyond K. */
template <int MT, int PARTS>
__global__ void __launch_bounds__(256)
    mhc_pre_cut_kernel(uint4 *frag, const float *phi, const float *gamma, int64_t k, int64_t steps) {
    int64_t count = steps * MT * 32;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256) {
        int lane = (int)(i % 32), nt = (int)(i / 32 % MT);
        int64_t step = i / (32 * MT), col = step * 32 + lane % 4 * 8;
        const float *from = phi + (8 * nt + lane / 4) * k + col; /* [8] */
        float4 v[2], scale[2] = {make_float4(1, 1, 1, 1), make_float4(1, 1, 1, 1)};
        uint32_t word[4][PARTS];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[h] = col < k ? ((const float4 *)from)[h] : make_float4(0, 0, 0, 0);
            if (gamma && col < k) scale[h] = ((const float4 *)(gamma + col))[h];
            cut<PARTS>(word[2 * h], v[h].x * scale[h].x, v[h].y * scale[h].y);
            cut<PARTS>(word[2 * h + 1], v[h].z * scale[h].z, v[h].w * scale[h].w);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            frag[((step * PARTS + p) * MT + nt) * 32 + lane] = make_uint4(word[0][p], word[1][p], word[2][p], word[3][p]);
    }
}

/* part [gridDim.y][tokens][8 MT + 2]: u, then the sum of squares. Block (tile of tokens, slice of `each` steps). */
template <int MT, int PARTS>
__global__ void __launch_bounds__(128, 2) mhc_pre_mix_mma_kernel(float *part, const XtBf16 *x, const uint4 *frag, int64_t tokens,
                                                                 int64_t k, int64_t steps, int64_t each) {
    constexpr int STRIDE = 8 * MT + 2;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int64_t first = (int64_t)blockIdx.x * MIX_TOKENS + threadIdx.x / 32 * 64; /* of this warp */
    if (first >= tokens) return;
    int64_t step = blockIdx.y * each, end = step + each < steps ? step + each : steps;
    float u[4][MT][4] = {}, squares[4][2] = {};
    XtPiece<XtBf16, 8> v[4][2], next[4][2], after[4][2]; /* two steps are on their way */
    auto load = [&](XtPiece<XtBf16, 8>(&to)[4][2], int64_t s) {
        int64_t col = s * 32 + 8 * t;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int64_t token = first + 8 * i + g;
            to[i / 2][i % 2] = token < tokens && col < k ? read_past(x + token * k + col) : xt_all<XtBf16, 8>(XtBf16(0.0f));
        }
    };
    load(v, step);
    if (step + 1 < end) load(next, step + 1);
    for (; step < end; step++) {
        const uint4 *b = frag + step * PARTS * MT * 32 + lane;
        if (step + 2 < end) load(after, step + 2);
        uint4 phi[PARTS][MT];
#pragma unroll
        for (int i = 0; i < PARTS * MT; i++) phi[i / MT][i % MT] = b[i * 32];
#pragma unroll
        for (int p = PARTS - 1; p >= 0; p--) { /* a sum is used again after all others */
#pragma unroll
            for (int i = 0; i < 4 * MT; i++)
                mma_16(u[i % 4][i / 4], v[i % 4][0].word[0], v[i % 4][1].word[0], v[i % 4][0].word[1], v[i % 4][1].word[1],
                       phi[p][i / 4].x, phi[p][i / 4].y);
#pragma unroll
            for (int i = 0; i < 4 * MT; i++)
                mma_16(u[i % 4][i / 4], v[i % 4][0].word[2], v[i % 4][1].word[2], v[i % 4][0].word[3], v[i % 4][1].word[3],
                       phi[p][i / 4].z, phi[p][i / 4].w);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float2 pair = xt_load_two(v[i / 2][i % 2].word[w], XtBf16());
                sum += pair.x * pair.x + pair.y * pair.y;
            }
            squares[i / 2][i % 2] += sum;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i / 2][i % 2] = next[i / 2][i % 2];
            next[i / 2][i % 2] = after[i / 2][i % 2];
        }
    }
    part += (int64_t)blockIdx.y * tokens * STRIDE;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float sum = squares[i / 2][i % 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int64_t token = first + 8 * i + g;
        if (token >= tokens) continue;
        float *to = part + token * STRIDE; /* [8 MT + 2] */
#pragma unroll
        for (int nt = 0; nt < MT; nt++)
            *(float2 *)(to + 8 * nt + 2 * t) = make_float2(u[i / 2][nt][i % 2 * 2], u[i / 2][nt][i % 2 * 2 + 1]);
        if (t == 0) to[8 * MT] = sum;
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------------------ */

/* Of a group of 16 tokens, [PARTS][MT][32 lanes] of each: du for w = phi^T du: rows 2 MT t + 2 unit, + 1 of tokens 4 (g / 2) + g % 2
 * and + 2; then du for S: row 8 unit + g of tokens 4 t, + 1 and 4 t + 2, + 3. du [GROUP][stride] in shared memory. */
template <int PARTS> __device__ inline void write_cut(uint2 *frag, const float *du, int stride, int mt, int thread, int threads) {
    for (int i = thread; i < 2 * mt * 32; i += threads) {
        int lane = i % 32, unit = i / 32 % mt, g = lane / 4, t = lane % 4;
        bool for_s = i >= mt * 32;
        uint32_t low[PARTS], high[PARTS];
        if (for_s) {
            const float *from = du + 4 * t * stride + 8 * unit + g;
            cut<PARTS>(low, from[0], from[stride]);
            cut<PARTS>(high, from[2 * stride], from[3 * stride]);
        } else {
            const float *from = du + (4 * (g / 2) + g % 2) * stride + 2 * mt * t + 2 * unit;
            cut<PARTS>(low, from[0], from[1]);
            cut<PARTS>(high, from[2 * stride], from[2 * stride + 1]);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++) frag[((for_s * PARTS + p) * mt + unit) * 32 + lane] = make_uint2(low[p], high[p]);
    }
}

/* Block (64 channels, slice of `each` groups), a warp for each stream. coefficients [tokens][S][8]: of stream j of a token M_0j .. in
 * 0 .. 3, h_pre_j in 4, kappa in 5. dx, share, dout, more (dx_add, which may be dx) and gamma may be NULL. */
template <int S, int PARTS>
__global__ void __launch_bounds__(32 * S, 8 / S)
    mhc_pre_dx_mma_kernel(XtBf16 *dx, float *share, const XtBf16 *__restrict__ x, const float *__restrict__ phi, const float *gamma,
                          const XtBf16 *__restrict__ dh_in, const XtBf16 *__restrict__ dout, const XtBf16 *more,
                          const float *__restrict__ coefficients, const uint2 *__restrict__ frag, int64_t tokens, int64_t cols,
                          int64_t groups, int64_t each) {
    constexpr int MT = (S * S + 2 * S) / 8;
    static_assert(MT * 8 == S * S + 2 * S, "rows of phi in whole tiles");
    typedef XtPiece<XtBf16, 8> Piece;
    __shared__ uint2
        phis[S][4][PARTS][MT][32];          /* columns 8 g + 2 q and + 1 of rows 2 MT t + 2 unit, + 1; each lane reads its own */
    __shared__ float4 staged[S][2 * GROUP]; /* the coefficients of the group */
    int lane = threadIdx.x % 32, stream = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int64_t c = (int64_t)blockIdx.x * 64 + 8 * g, k = S * cols, at = stream * cols + c; /* in a token */
    bool inside = c < cols;
    const Piece none = xt_all<XtBf16, 8>(XtBf16(0.0f));
    float4 scale[2] = {make_float4(1, 1, 1, 1), make_float4(1, 1, 1, 1)};
    if (gamma && inside) scale[0] = ((const float4 *)(gamma + at))[0], scale[1] = ((const float4 *)(gamma + at))[1];
#pragma unroll
    for (int unit = 0; unit < MT; unit++) {
        const float *from = phi + (2 * MT * t + 2 * unit) * k + at; /* [2] rows, k apart, of [8] */
        float4 v[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i / 2][i % 2] = inside ? ((const float4 *)(from + i / 2 * k))[i % 2] : make_float4(0, 0, 0, 0);
            v[i / 2][i % 2].x *= scale[i % 2].x, v[i / 2][i % 2].y *= scale[i % 2].y;
            v[i / 2][i % 2].z *= scale[i % 2].z, v[i / 2][i % 2].w *= scale[i % 2].w;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t cuts[4][PARTS];
            cut<PARTS>(cuts[0], v[0][h].x, v[1][h].x);
            cut<PARTS>(cuts[1], v[0][h].y, v[1][h].y);
            cut<PARTS>(cuts[2], v[0][h].z, v[1][h].z);
            cut<PARTS>(cuts[3], v[0][h].w, v[1][h].w);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                phis[stream][2 * h][p][unit][lane] = make_uint2(cuts[0][p], cuts[1][p]);
                phis[stream][2 * h + 1][p][unit][lane] = make_uint2(cuts[2][p], cuts[3][p]);
            }
        }
    }
    float s[4][MT][4] = {}; /* S: columns 8 g + 2 q, + 1 of rows 8 nt + 2 t, + 1 */
    int64_t group = blockIdx.y * each, end = group + each < groups ? group + each : groups;
    for (; group < end; group++) {
        int64_t first = group * GROUP + 4 * t; /* of this lane's tokens */
        const uint2 *du = frag + group * (2 * PARTS * MT * 32) + lane;
        Piece v[4], d[4], sum[4][S];
        float w[4][2][4]; /* columns 8 g + 2 q, + 1 of tokens 2 h, + 1 */
        bool valid[4];
        float4 own = make_float4(0, 0, 0, 0);
        if (dx && group * GROUP + lane / 2 < tokens)
            own = ((const float4 *)coefficients)[((group * GROUP + lane / 2) * S + stream) * 2 + lane % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            valid[i] = inside && first + i < tokens;
            v[i] = valid[i] ? xt_read<XtBf16, 8>(x + (first + i) * k + at) : none;
        }
        if (dx) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d[i] = valid[i] ? xt_read<XtBf16, 8>(dh_in + (first + i) * cols + c) : none;
                if (dout) {
#pragma unroll
                    for (int j = 0; j < S; j++)
                        sum[i][j] = valid[i] ? xt_read<XtBf16, 8>(dout + (first + i) * k + j * cols + c) : none;
                }
            }
#pragma unroll
            for (int q = 0; q < 4; q++)
#pragma unroll
                for (int i = 0; i < 8; i++) w[q][i / 4][i % 4] = 0;
#pragma unroll
            for (int pd = PARTS - 1; pd >= 0; pd--) {
                uint2 b[MT];
#pragma unroll
                for (int unit = 0; unit < MT; unit++) b[unit] = du[(pd * MT + unit) * 32];
#pragma unroll
                for (int pp = PARTS - 1 - pd; pp >= 0; pp--) {
#pragma unroll
                    for (int unit = 0; unit + 1 < MT; unit += 2)
#pragma unroll
                        for (int q = 0; q < 4; q++) {
                            uint2 a = phis[stream][q][pp][unit][lane], e = phis[stream][q][pp][unit + 1][lane];
                            mma_16(w[q][0], a.x, a.y, e.x, e.y, b[unit].x, b[unit + 1].x);
                            mma_16(w[q][1], a.x, a.y, e.x, e.y, b[unit].y, b[unit + 1].y);
                        }
#pragma unroll
                    for (int q = 0; MT % 2 && q < 4; q++) {
                        uint2 a = phis[stream][q][pp][MT - 1][lane];
                        mma_8(w[q][0], a.x, a.y, b[MT - 1].x);
                        mma_8(w[q][1], a.x, a.y, b[MT - 1].y);
                    }
                }
            }
        }
        if (share) {
            const uint2 *for_s = du + PARTS * MT * 32;
#pragma unroll
            for (int p = PARTS - 1; p >= 0; p--)
#pragma unroll
                for (int nt = 0; nt < MT; nt++) {
                    uint2 b = for_s[(p * MT + nt) * 32];
#pragma unroll
                    for (int q = 0; q < 4; q++)
                        mma_16(s[q][nt], __byte_perm(v[0].word[q], v[1].word[q], 0x5410),
                               __byte_perm(v[0].word[q], v[1].word[q], 0x7632), __byte_perm(v[2].word[q], v[3].word[q], 0x5410),
                               __byte_perm(v[2].word[q], v[3].word[q], 0x7632), b.x, b.y);
                }
        }
        if (!dx) continue;
        __syncwarp();
        staged[stream][lane] = own;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!valid[i]) continue;
            float4 mixing = staged[stream][2 * (4 * t + i)], rest = staged[stream][2 * (4 * t + i) + 1];
            float m[4] = {mixing.x, mixing.y, mixing.z, mixing.w};
            Piece to, add = more ? xt_read<XtBf16, 8>(more + (first + i) * k + at) : none;
#pragma unroll
            for (int q = 0; q < 4; q++) {
                float2 a = xt_load_two(v[i].word[q], XtBf16()), b = xt_load_two(d[i].word[q], XtBf16());
                float low = w[q][i / 2][i % 2] + rest.y * a.x + rest.x * b.x,
                      high = w[q][i / 2][2 + i % 2] + rest.y * a.y + rest.x * b.y;
                if (dout) {
#pragma unroll
                    for (int j = 0; j < S; j++) {
                        float2 e = xt_load_two(sum[i][j].word[q], XtBf16());
                        low += m[j] * e.x, high += m[j] * e.y;
                    }
                }
                if (more) {
                    float2 e = xt_load_two(add.word[q], XtBf16());
                    low += e.x, high += e.y;
                }
                __nv_bfloat162 pair = xt_store_two(low, high, XtBf16());
                memcpy(&to.word[q], &pair, sizeof pair);
            }
            xt_write(dx + (first + i) * k + at, to);
        }
    }
    if (!share || !inside) return;
    share += (int64_t)blockIdx.y * 8 * MT * k + at;
#pragma unroll
    for (int nt = 0; nt < MT; nt++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float4 *to = (float4 *)(share + (8 * nt + 2 * t + r) * k); /* [2] */
            to[0] = make_float4(s[0][nt][r], s[0][nt][2 + r], s[1][nt][r], s[1][nt][2 + r]);
            to[1] = make_float4(s[2][nt][r], s[2][nt][2 + r], s[3][nt][r], s[3][nt][2 + r]);
        }
}

#endif
