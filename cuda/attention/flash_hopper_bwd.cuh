/* flash_hopper_bwd.cuh - what the kernels of the backward of flash_hopper share: their shapes, parameters and statistics. */
#ifndef XT_ATTENTION_FLASH_HOPPER_BWD_CUH
#define XT_ATTENTION_FLASH_HOPPER_BWD_CUH

#include "flash_hopper.cuh"

/* FLIGHT: the last product of a tile runs into the next tile; otherwise it is awaited, which needs fewer registers.
 * SPLIT (dK and dV of head dims above 128): both warpgroups compute the scores of the same 64 rows, and each 128 columns of the results,
 * for which the registers of one do not suffice. Tiles have 256 columns, zeros beyond the dim. */
template <int D_, int CONSUMERS_, int TILE_, int STAGES_, bool FLIGHT_, bool SPLIT_ = false> struct HopperBackward {
    static constexpr int D = D_, CONSUMERS = CONSUMERS_, TILE = TILE_, STAGES = STAGES_;
    static constexpr bool FLIGHT = FLIGHT_, SPLIT = SPLIT_;
    static constexpr int ROWS = SPLIT ? 64 : 64 * CONSUMERS, WIDTH = SPLIT ? 256 : D, PART = SPLIT ? 128 : D;
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    /* Shared memory: OWNS times two operands of the block [ROWS, D], which become its results; STAGES of two tiles [TILE, D]; STAGES of lse
     * and delta [TILE] (dK and dV); barriers. OWNS is 2 where it fits: the next operands come while these are in use. */
    static constexpr int OWN_BYTES = ROWS * hopper_row_bytes(WIDTH), TILE_BYTES = TILE * hopper_row_bytes(WIDTH),
                         STATS_BYTES = TILE * 4, STAGES_BYTES = STAGES * 2 * (TILE_BYTES + STATS_BYTES);
    static constexpr int bytes(int owns) { // and room to align
        return owns * (2 * OWN_BYTES + 16 + HOPPER_WORK_BYTES) + STAGES_BYTES + 16 * STAGES + 1024;
    }
    static constexpr int OWNS = bytes(2) <= HOPPER_SHARED ? 2 : 1, BYTES = bytes(OWNS), TILES_AT = OWNS * 2 * OWN_BYTES,
                         STATS_AT = TILES_AT + STAGES * 2 * TILE_BYTES, BARRIERS_AT = TILES_AT + STAGES_BYTES;
    static_assert(BYTES <= HOPPER_SHARED, "a block has no more");
    static_assert(TILE % 32 == 0, "tiles of statistics start at multiples of 16 bytes, and those of delta fill warps");
};

constexpr int64_t HOPPER_CACHE = 24 << 20; // bytes of a section of heads, about half of the L2

typedef struct HopperBackwardMaps {
    CUtensorMap own[2], other[2]; // dQ: Q dO, K V; dK and dV: K V, Q dO
} HopperBackwardMaps;
typedef struct HopperBackwardCall {
    void *result[2]; // dQ; dK dV
    int64_t stride[2][3];
    const float *lse, *delta; // [batch, heads, padded]; lse log2 e
    HopperOrder order;
    const int32_t *documents;
    int heads, kv_heads, sq, skv, window, padded;
    float scale;
    XtBend bend;
    bool causal;
} HopperBackwardCall;

/* Writes 64 rows, from `first` on, of result `which` through the rows of an operand that no warp reads any more. */
template <typename T, int D>
__device__ inline void hopper_write_result(const HopperBackwardCall &call, int which, int batch, int head, int first, int rows,
                                           uint32_t room, int pitch, const float (&d)[D / 2], float scale, int column = 0,
                                           int columns = D) {
    const int64_t *stride = call.stride[which];
    T *to = (T *)call.result[which] + batch * stride[0] + head * stride[1] + first * stride[2] + column;
    hopper_write_rows<T, D>(to, stride[2], rows - first, columns - column, room, pitch, d, [&](int, float x) { return x * scale; });
}

/* Starts the copies of the block's two operands. */
template <typename P>
__device__ inline void hopper_load_own(uint32_t own, const HopperBackwardMaps &maps, int first, int head, int batch,
                                       uint32_t barrier) {
    xt_barrier_expect(barrier, 2 * P::OWN_BYTES);
    hopper_load<P::WIDTH, P::ROWS>(own, &maps.own[0], first, head, batch, barrier);
    hopper_load<P::WIDTH, P::ROWS>(own + P::OWN_BYTES, &maps.own[1], first, head, batch, barrier);
}
/* The same of tile i of Q, dO, lse and delta of a head. */
template <typename P>
__device__ inline void hopper_load_queries(uint32_t tile, uint32_t stats, const HopperBackwardMaps &maps,
                                           const HopperBackwardCall &call, int i, int head, int batch, uint32_t barrier) {
    int64_t row = (int64_t)(batch * call.heads + head) * call.padded + i * P::TILE;
    xt_barrier_expect(barrier, 2 * P::TILE_BYTES + 2 * P::STATS_BYTES);
    hopper_load<P::WIDTH, P::TILE>(tile, &maps.other[0], i * P::TILE, head, batch, barrier);
    hopper_load<P::WIDTH, P::TILE>(tile + P::TILE_BYTES, &maps.other[1], i * P::TILE, head, batch, barrier);
    xt_bulk_load(stats, call.lse + row, P::STATS_BYTES, barrier);
    xt_bulk_load(stats + P::STATS_BYTES, call.delta + row, P::STATS_BYTES, barrier);
}

/* s = exp2(scale s - lse), columns are queries; lse of this thread's first column in shared memory. */
template <int TILE> __device__ inline void hopper_probabilities(float (&s)[TILE / 2], uint32_t lse, float scale) {
#pragma unroll
    for (int c = 0; c < TILE / 8; c++) {
        float2 of = xt_read_shared(lse + 32 * c);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * c + e] = xt_exp2_approx(fmaf(s[4 * c + e], scale, e % 2 ? -of.y : -of.x));
    }
}
/* The same of t = tanh(inner s): p is rounded, and s = p (1 - t^2). */
template <typename T, int TILE>
__device__ inline void hopper_bent_probabilities(uint32_t (&p)[TILE / 16][4], float (&s)[TILE / 2], uint32_t lse, float factor) {
#pragma unroll
    for (int c = 0; c < TILE / 8; c++) {
        float2 of = xt_read_shared(lse + 32 * c);
        float here[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            here[e] = xt_exp2_approx(fmaf(s[4 * c + e], factor, e % 2 ? -of.y : -of.x));
            s[4 * c + e] = here[e] * hopper_slope(s[4 * c + e]);
        }
        p[c / 2][c % 2 * 2] = xt_round_pair<T>(here[0], here[1]); // as hopper_round
        p[c / 2][c % 2 * 2 + 1] = xt_round_pair<T>(here[2], here[3]);
    }
}
/* p becomes dS = p (dp - delta). */
template <int TILE>
__device__ inline void hopper_score_gradients(float (&p)[TILE / 2], const float (&dp)[TILE / 2], uint32_t delta) {
#pragma unroll
    for (int c = 0; c < TILE / 8; c++) {
        float2 of = xt_read_shared(delta + 32 * c);
#pragma unroll
        for (int e = 0; e < 4; e++) p[4 * c + e] *= dp[4 * c + e] - (e % 2 ? of.y : of.x);
    }
}

/* Addresses in shared memory. */
template <typename P> struct HopperBackwardRoom {
    uint32_t first_own, tiles, stats, owns_full, owns_empty, full, empty, claims;
    __device__ HopperBackwardRoom(const char *room) {
        first_own = (xt_shared_address(room) + 1023) & ~1023u;
        tiles = first_own + P::TILES_AT, stats = first_own + P::STATS_AT;
        owns_full = first_own + P::BARRIERS_AT, owns_empty = owns_full + 8 * P::OWNS, full = owns_empty + 8 * P::OWNS,
        empty = full + 8 * P::STAGES, claims = empty + 8 * P::STAGES;
    }
    __device__ void init() const { // by one thread
        for (int o = 0; o < P::OWNS; o++) {
            xt_barrier_init(owns_full + 8 * o, 1);
            xt_barrier_init(owns_empty + 8 * o, 128 * P::CONSUMERS);
        }
        for (int s = 0; s < P::STAGES; s++) {
            xt_barrier_init(full + 8 * s, 1);
            xt_barrier_init(empty + 8 * s, 128 * P::CONSUMERS);
        }
        xt_barrier_init_fence();
    }
    /* Of a turn of the block. */
    __device__ uint32_t own(int turn) const { return first_own + turn % P::OWNS * (2 * P::OWN_BYTES); }
    __device__ uint32_t own_full(int turn) const { return owns_full + turn % P::OWNS * 8; }
    __device__ uint32_t own_empty(int turn) const { return owns_empty + turn % P::OWNS * 8; }
    __device__ uint32_t claim(int turn) const { return claims + turn % P::OWNS * HOPPER_WORK_BYTES; }
    __device__ int own_parity(int turn) const { return turn / P::OWNS % 2; }
    __device__ uint32_t tile(int stage, int which) const { return tiles + (2 * stage + which) * P::TILE_BYTES; }
};

/* ---- statistics ------------------------------------------------------------------------------------------------------------------ */

/* delta_i = dout_i . out_i. LANES lanes do a row, 8 elements each; a thread has a part of ITEMS rows, all on their way at once.
 * `turns` [batch, heads, padded / 64], where it is not NULL, becomes 0, and so do rows of dQ in tiles that see no key: no block of keys
 * adds to them. Indices of 32 bits: divisions of 64 would take as long as memory. */
__host__ __device__ constexpr int hopper_delta_lanes(int dim) { return dim <= 64 ? 8 : dim <= 128 ? 16 : 32; }
constexpr int HOPPER_DELTA_ITEMS = 4;
template <typename T, int D>
__global__ void __launch_bounds__(256)
    flash_hopper_delta_kernel(XtAttentionBwd p, float *stats, int padded, unsigned blocks, unsigned *turns) { // blocks of a head
    constexpr int LANES = hopper_delta_lanes(D), ITEMS = HOPPER_DELTA_ITEMS, STEP = 256 / LANES;
    unsigned head = blockIdx.x / blocks, b = head / (unsigned)p.heads, h = head % (unsigned)p.heads;
    int first = (int)(blockIdx.x % blocks * (STEP * ITEMS) + threadIdx.x / LANES), d = threadIdx.x % LANES * 8;
    int64_t heads = p.batch * p.heads, row = (int64_t)head * padded + first;
    const T *dout = (const T *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1] + first * p.dout_stride[2] + d;
    const T *out = (const T *)p.out + b * p.out_stride[0] + h * p.out_stride[1] + first * p.out_stride[2] + d;
    XtPiece<T, 8> x[ITEMS], y[ITEMS];
    float lse[ITEMS];
#pragma unroll
    for (int n = 0; n < ITEMS; n++) {
        int i = first + n * STEP;
        x[n] = y[n] = XtPiece<T, 8>();
        if (i < p.sq && d < D) {
            x[n] = xt_read<T, 8>(out + n * STEP * p.out_stride[2]);
            y[n] = xt_read<T, 8>(dout + n * STEP * p.dout_stride[2]);
        }
        lse[n] = i < p.sq ? ((const float *)p.lse)[(int64_t)head * p.sq + i] * (float)LOG2_E : INFINITY;
    }
#pragma unroll
    for (int n = 0; n < ITEMS; n++) {
        int i = first + n * STEP;
        if (i >= padded) return; // a multiple of 32: whole warps
        auto left = xt_load(x[n]), right = xt_load(y[n]);
        float dot = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) dot = fmaf(left.at[j], right.at[j], dot);
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
        if (turns && p.causal && i < p.sq && (i | 63) + p.skv < p.sq && d < D)
            *(uint4 *)((T *)p.dq + b * p.dq_stride[0] + h * p.dq_stride[1] + i * p.dq_stride[2] + d) = uint4{};
        if (d != 0) continue;
        int64_t at = row + n * STEP;
        if (turns && i % 64 == 0) turns[at / 64] = 0;
        stats[at] = lse[n] == -INFINITY ? INFINITY : lse[n];
        stats[heads * padded + at] = dot;
    }
}

#endif
