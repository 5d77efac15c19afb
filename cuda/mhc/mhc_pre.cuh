/* mhc_pre.cuh - the products of mhc_pre.cu on tensor cores: bfloat16 streams, n = 2 or 4, rows in whole pieces of 16 bytes. Here is
 * what both directions share, and the product of the forward (the backward: mhc_pre_bwd.cuh):
 *
 *     mix      u_t = phi v_t and sum v_t^2, by tiles of tokens and slices of columns          -> part [slices, T, MP + 2]
 *
 * v has 8 significant bits, phi and du have 24. Phi and du are cut into PARTS bfloat16 numbers by truncation: 3 hold every bit, 2
 * hold more than tf32 does. A product of two cut numbers omits the pairs of parts below the last bit kept. m = 8 MT rows: 8 or 24.
 *
 * The rows and columns of an mma may stand for any tokens and columns, as long as the operands agree. Here lane 4 g + t has 16
 * bytes of x as they lie in memory, columns 8 t .. of rows g and g + 8, and the fragments of phi are laid out to match: x needs no
 * shared memory. 4 warps with 64 tokens each share a slice of phi in the L1 cache, which x bypasses.
 */
#pragma once

#include "arch/sm80.cuh"
#include "mhc.cuh"

static constexpr int MIX_TOKENS = 256; /* of a block; 64 of a warp */

/* x bypasses the L1 cache, which is for phi. */
__device__ inline XtPiece<XtBf16, 8> read_once(const XtBf16 *p) {
    XtPiece<XtBf16, 8> piece;
    xt_read_once(piece.word, p);
    return piece;
}

/* Cuts two numbers into parts: those of `low` are in the low halves. A number that is not finite is its own first part. */
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

/* ---- forward ---------------------------------------------------------------------------------------------------------------- */

/* frag [steps][PARTS][MT][32 lanes]: lane 4 g + t has the 8 columns 32 step + 8 t .. of row 8 nt + g of phi gamma; zeros beyond
 * K. */
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
    XtPiece<XtBf16, 8> v[4][2], next[4][2], after[4][2]; /* the loads of two steps are in flight */
    auto load = [&](XtPiece<XtBf16, 8>(&to)[4][2], int64_t s) {
        int64_t col = s * 32 + 8 * t;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int64_t token = first + 8 * i + g;
            to[i / 2][i % 2] = token < tokens && col < k ? read_once(x + token * k + col) : xt_all<XtBf16, 8>(XtBf16(0.0f));
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
        for (int p = PARTS - 1; p >= 0; p--) { /* the order of products leaves most time between two uses of a sum */
#pragma unroll
            for (int i = 0; i < 4 * MT; i++)
                xt_mma_16<XtBf16>(u[i % 4][i / 4], v[i % 4][0].word[0], v[i % 4][1].word[0], v[i % 4][0].word[1],
                                  v[i % 4][1].word[1], phi[p][i / 4].x, phi[p][i / 4].y);
#pragma unroll
            for (int i = 0; i < 4 * MT; i++)
                xt_mma_16<XtBf16>(u[i % 4][i / 4], v[i % 4][0].word[2], v[i % 4][1].word[2], v[i % 4][0].word[3],
                                  v[i % 4][1].word[3], phi[p][i / 4].z, phi[p][i / 4].w);
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
