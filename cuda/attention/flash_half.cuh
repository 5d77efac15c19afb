/* flash_half.cuh - tiles, tensor core fragments and their products for flash_half.cu. */
#pragma once

#include "arch/sm80.cuh"
#include "attention.cuh"
#include "common/softcap.cuh"

#include <cuda_pipeline.h>

/* How a kernel cuts its work. TILE rows of the other side are in shared memory, and the next TILE are in flight. The scores of
 * at most COLS of them are in registers. HOLD: the left operands that stay the same are in registers too. */
template <int D_, int WARPS, int STRIPS_, int TILE_, int COLS_, bool HOLD_, int BLOCKS_> struct Plan {
    static constexpr int D = D_, STRIPS = STRIPS_, TILE = TILE_, COLS = COLS_, BLOCKS = BLOCKS_; // BLOCKS a multiprocessor
    static constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * STRIPS, ROWS = WARPS * WARP_ROWS, PITCH = D + 8;
    static constexpr bool HOLD = HOLD_;
    static constexpr int FORWARD_BYTES = 2 * PITCH * (ROWS + 4 * TILE),
                         BACKWARD_BYTES = 2 * PITCH * (2 * ROWS + 4 * TILE) + 16 * TILE;
    static_assert(TILE % COLS == 0 && COLS % 16 == 0 && D % 32 == 0, "whole pieces");
};

/* A thread's place: it has rows row + 16 m + 8 h of the block and columns col + 8 n + e, where h, e = 0, 1. */
typedef struct Place {
    int row, col;
} Place;
template <typename P> __device__ static Place my_place() {
    return {(int)threadIdx.x / 32 * P::WARP_ROWS + (int)threadIdx.x % 32 / 4, 2 * ((int)threadIdx.x % 4)};
}

/* SPANS, a parameter of the kernels: a query sees a span of keys, and a key is seen by a span of queries, whose ends never fall from
 * one row to the next (contract/attention.h). What rows first ... last have together, and what they have in common. */
typedef struct Spans {
    XtSeen<int> any, all;
} Spans;
template <typename F> __device__ static Spans spans_of(int first, int last, F span) {
    XtSeen<int> low = span(first), high = span(last);
    return {{low.begin, high.end}, {high.begin, low.end}};
}

/* Maximum and sum over the 4 threads that share a row. */
__device__ static float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ static float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

/* ---- tiles in shared memory ------------------------------------------------------------------------------------------------- */

/* The address at which this lane reads a tile: the strips of its warp as left operand; the rows of the tile as columns of a right
 * operand; the tile itself as right operand. 16 rows further is 32 PITCH bytes, 16 columns further 32 bytes. */
template <typename P> __device__ static uint32_t left_of(const void *tile) {
    int lane = threadIdx.x % 32, row = (int)threadIdx.x / 32 * P::WARP_ROWS + lane % 16;
    return xt_shared_address(tile) + 2 * (row * P::PITCH + lane / 16 * 8);
}
template <typename P> __device__ static uint32_t right_of(const void *tile) {
    int lane = threadIdx.x % 32;
    return xt_shared_address(tile) + 2 * ((lane % 8 + lane / 16 * 8) * P::PITCH + lane / 8 % 2 * 8);
}
template <typename P> __device__ static uint32_t turned_of(const void *tile) {
    int lane = threadIdx.x % 32;
    return xt_shared_address(tile) + 2 * (lane % 16 * P::PITCH + lane / 16 * 8);
}

/* Starts the copy of rows first ... first + COUNT - 1 of x. Rows from `rows` on are zeros, and their addresses are not read. */
template <typename P, int COUNT, typename T>
__device__ static void fetch_tile(T *tile, const T *x, int64_t stride, int first, int rows) { // tile [COUNT, PITCH], x [rows, D]
    constexpr int PIECES = P::D / 8, LANES = PIECES % 8 == 0 ? PIECES : 4, STEP = P::THREADS / LANES; // LANES to a row
    int row = threadIdx.x / LANES, c = threadIdx.x % LANES, left = rows - first - row;
    T *to = tile + row * P::PITCH + 8 * c;
    const T *from = x + (first + row) * stride + 8 * c;
#pragma unroll
    for (int n = 0; n < (COUNT + STEP - 1) / STEP; n++) {
        if (COUNT % STEP != 0 && n * STEP + row >= COUNT) break;
#pragma unroll
        for (int j = 0; j < PIECES; j += LANES)
            __pipeline_memcpy_async(to + n * STEP * P::PITCH + 8 * j, from + 8 * j, 16, n * STEP < left ? 0 : 16);
        from += STEP * stride;
    }
}

/* The left operands of a warp: its strips of a tile, read once (HOLD) or at each use. */
template <typename P> struct Left {
    uint32_t held[P::HOLD ? P::STRIPS : 1][P::HOLD ? P::D / 16 : 1][4], from;
    __device__ void prepare(const void *tile) { // a tile that has arrived
        from = left_of<P>(tile);
        if constexpr (P::HOLD) {
#pragma unroll
            for (int m = 0; m < P::STRIPS; m++)
#pragma unroll
                for (int k = 0; k < P::D / 16; k++) xt_load_matrices<false>(held[m][k], from + 32 * (m * P::PITCH + k));
        }
    }
    __device__ void get(uint32_t (&a)[4], int m, int k) const {
        if constexpr (P::HOLD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held[m][k][i];
        } else xt_load_matrices<false>(a, from + 32 * (m * P::PITCH + k));
    }
};

/* A thread's part of the warp's scores, and of rows as long as the head dim. */
template <typename P> using Scores = float[P::STRIPS][P::COLS / 8][4];
template <typename P> using Sums = float[P::STRIPS][P::D / 8][4];

/* s += (rows of a) . (rows of b), b as right_of says */
template <typename P, typename T> __device__ static void dot_rows(Scores<P> &s, const Left<P> &a, uint32_t b, T) {
#pragma unroll
    for (int k = 0; k < P::D / 16; k++) {
        uint32_t x[P::STRIPS][4];
#pragma unroll
        for (int m = 0; m < P::STRIPS; m++) a.get(x[m], m, k);
#pragma unroll
        for (int n = 0; n < P::COLS / 16; n++) {
            uint32_t y[4];
            xt_load_matrices<false>(y, b + 32 * (n * P::PITCH + k));
#pragma unroll
            for (int m = 0; m < P::STRIPS; m++) {
                xt_mma_16<T>(s[m][2 * n], x[m], y[0], y[1]);
                xt_mma_16<T>(s[m][2 * n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

/* sum += p v, p rounded to T, v as turned_of says */
template <typename P, typename T> __device__ static void add_product(Sums<P> &sum, const Scores<P> &p, uint32_t v, T) {
#pragma unroll
    for (int k = 0; k < P::COLS / 16; k++) {
        uint32_t x[P::STRIPS][4];
#pragma unroll
        for (int m = 0; m < P::STRIPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[m][i] = xt_word(xt_store_two(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1], T()));
#pragma unroll
        for (int n = 0; n < P::D / 16; n++) {
            uint32_t y[4];
            xt_load_matrices<true>(y, v + 32 * (k * P::PITCH + n));
#pragma unroll
            for (int m = 0; m < P::STRIPS; m++) {
                xt_mma_16<T>(sum[m][2 * n], x[m], y[0], y[1]);
                xt_mma_16<T>(sum[m][2 * n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

/* Calls f(element, strip m, half h, column 8 n + e) for every element of a thread's part. */
template <int STRIPS, int PIECES, typename F> __device__ static void each(float (&s)[STRIPS][PIECES][4], F f) {
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) f(s[m][n][i], m, i / 2, 8 * n + i % 2);
}

/* Sets to `hidden` the elements of a thread's part outside of their rows' spans. row and column: of its first element. The spans are read
 * here, for tiles at an edge alone, as they take registers. */
template <int STRIPS, int PIECES, typename F>
__device__ static void hide_outside(float (&s)[STRIPS][PIECES][4], int row, int column, float hidden, F span) {
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            XtSeen<int> of = span(row + 16 * m + 8 * r);
#pragma unroll
            for (int n = 0; n < PIECES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (column + 8 * n + e < of.begin || column + 8 * n + e >= of.end) s[m][n][2 * r + e] = hidden;
        }
}

/* Stores the warp's rows below `rows`, each through factor(m, h, value). Its rows of the tile, no longer needed, are the buffer. */
template <typename P, typename T, typename Factor>
__device__ static void store_rows(T *out, int64_t stride, T *tile, Sums<P> &sum, int first, int rows,
                                  Factor factor) { // out [rows, D], tile [ROWS, PITCH]
    constexpr int PIECES = P::D / 8;
    Place at = my_place<P>();
    int lane = threadIdx.x % 32, top = (int)threadIdx.x / 32 * P::WARP_ROWS;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < P::STRIPS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            T *row = tile + (at.row + 16 * m + 8 * h) * P::PITCH + at.col;
#pragma unroll
            for (int n = 0; n < P::D / 8; n++)
                *(uint32_t *)(row + 8 * n) =
                    xt_word(xt_store_two(factor(m, h, sum[m][n][2 * h]), factor(m, h, sum[m][n][2 * h + 1]), T()));
        }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < P::WARP_ROWS * PIECES / 32; n++) {
        int index = 32 * n + lane, row = top + index / PIECES, c = index % PIECES;
        if (first + row < rows) xt_write(out + (first + row) * stride + 8 * c, xt_read<T, 8>(tile + row * P::PITCH + 8 * c));
    }
}
