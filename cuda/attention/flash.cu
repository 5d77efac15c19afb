/* flash.cu - attention of float32 that keeps the scores on the chip; strict float32 products on the CUDA cores.
 * bfloat16 and float16 are in flash_half.cu.
 *
 *     forward   S = scale Q K^T tile by tile; running maximum m and sum l of each row:
 *               m' = max(m, max_j s_j);  p_j = exp(s_j - m');  l = l exp(m - m') + sum_j p_j;  o = o exp(m - m') + sum_j p_j v_j
 *               out = o / l;  lse = m + log l
 *     backward  P = exp(S - lse);  dP = dO V^T;  delta_i = dout_i . out_i;  dS = P (dP - delta)
 *               dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO, the latter two also over the query heads of a group
 *
 * Plan: a block owns 64 rows of a head: of Q for out and dQ, of K for dK and dV. It walks through the tiles of the other side, of
 * 64 or 32 rows, between the first and the last row of them that one of its rows sees. A tile of scores is 64 x COLS: warp w has rows 16 w ... 16 w + 15, a
 * thread 4 rows times COLS/8 columns, and later the same 4 rows times D/8 elements of the head dim. So a row never leaves its warp:
 * 8 lanes share maxima and sums, and P or dS passes from one product to the next through the warp's own part of shared memory. The
 * products read 16 bytes at a time, one read for 8 to 11 multiply-adds.
 *
 * Shared memory: a row of a tile is D floats, its 16-byte chunk c at place c ^ (row / 4 % 8). A warp that reads one chunk of rows 4
 * apart, or all chunks of a row, uses different banks. cp.async loads the next K, or dO, or V, while the block computes. Rows
 * beyond the end are zeros.
 *
 * Three launches in all: forward; dQ, which also writes delta; dK and dV. Bytes: each tensor once, and the other side's tiles
 * again for every 64 rows, mostly from L2. exp is exp2 (2 ulp) with log2 e in the scale. Deterministic: tiles in order, then heads
 * in order.
 *
 * Not supported: other dtypes and head dims, rows that are not aligned to 16 bytes, TF32 on long rows.
 */
#include "attention.cuh"

#include <cuda_pipeline.h>

#define THREADS 128
#define ROWS 64 /* of a block, 16 a warp */
#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f
#define TF32_COLUMNS 1024 /* in longer rows, tensor cores save more time than writing the scores costs */

/* A warp's lanes are 4 groups of rows times 8 groups of columns, numbered so that lanes i and i ^ 1 share rows and lanes i and
 * i ^ 2 share columns: the hardware joins reads of the same 16 bytes by such neighbours. */
typedef struct Place {
    int row;    /* the first of 4 */
    int across; /* 0 ... 7: columns 4 across + 32 h + (0 ... 3) of a tile of scores, and the same of the head dim */
} Place;

__device__ static Place my_place() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return {16 * warp + 4 * ((lane >> 1 & 1) + 2 * (lane >> 4 & 1)), (lane & 1) + 2 * (lane >> 2 & 3)};
}

/* Maximum or sum over the 8 threads that share rows. */
__device__ static float reduce_across(float value, bool maximum) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float other = __shfl_xor_sync(0xffffffffu, value, i == 0 ? 1 : 2 << i); // lanes 1, 4 and 8 away
        value = maximum ? fmaxf(value, other) : value + other;
    }
    return value;
}

/* ---- tiles in shared memory -------------------------------------------------------------------------------------------------- */

__device__ static float4 *chunk_of(float *row, int c, int turn) { return (float4 *)(row + 4 * (c ^ turn)); }
__device__ static float4 chunk_of(const float *row, int c, int turn) { return *(const float4 *)(row + 4 * (c ^ turn)); }

/* Starts the copy of rows first ... first + COUNT - 1 of x; zeros from row `rows` on. */
template <int D, int COUNT>
__device__ static void fetch_tile(float *tile, const float *x, int64_t stride, int first,
                                  int rows) { // tile [COUNT, D], x [rows, D]
#pragma unroll
    for (int n = 0; n < COUNT * D / 4 / THREADS; n++) {
        int index = n * THREADS + threadIdx.x, row = index / (D / 4), c = index % (D / 4);
        bool there = first + row < rows;
        const float *from = x + (there ? (first + row) * stride : 0) + 4 * c;
        __pipeline_memcpy_async(chunk_of(tile + row * D, c, row / 4 % 8), from, 16, there ? 0 : 16);
    }
}

/* s[r][4 h + u] = a[row + r] . b[32 h + 4 across + u] */
template <int D, int COLS>
__device__ static void dot_rows(float (&s)[4][COLS / 8], const float *a, const float *b, Place at) { // a [ROWS, D], b [COLS, D]
    const float *a_row = a + at.row * D, *b_row = b + 4 * at.across * D;
    int a_turn = at.row / 4 % 8;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) s[r][j] = 0;
#pragma unroll 1
    for (int c = 0; c < D / 4; c++) {
        float4 x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = chunk_of(a_row + r * D, c, a_turn);
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            float4 y = chunk_of(b_row + (j / 4 * 32 + j % 4) * D, c, at.across);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                s[r][j] = fmaf(x[r].x, y.x, s[r][j]);
                s[r][j] = fmaf(x[r].y, y.y, s[r][j]);
                s[r][j] = fmaf(x[r].z, y.z, s[r][j]);
                s[r][j] = fmaf(x[r].w, y.w, s[r][j]);
            }
        }
    }
}

/* sum[r][4 c + e] += p[row + r] . (column 32 c + 4 across + e of v), over the tile's columns 16 begin ... 16 end - 1 */
template <int D, int COLS>
__device__ static void add_product(float (&sum)[4][D / 8], const float *p, const float *v, Place at, int begin,
                                   int end) { // p [ROWS, COLS], v [COLS, D]
    const float *p_row = p + at.row * COLS;
    int p_turn = at.row / 4 % 8;
#pragma unroll 1
    for (int sixteen = begin; sixteen < end; sixteen++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float4 x[4];
            int chunk = 4 * sixteen + k;
            const float *v_row = v + 4 * chunk * D;
#pragma unroll
            for (int r = 0; r < 4; r++) x[r] = chunk_of(p_row + r * COLS, chunk, p_turn);
#pragma unroll
            for (int u = 0; u < 4; u++) {
#pragma unroll
                for (int c = 0; c < D / 32; c++) {
                    float4 y = chunk_of(v_row + u * D, 8 * c + at.across, chunk % 8);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        float factor = u == 0 ? x[r].x : u == 1 ? x[r].y : u == 2 ? x[r].z : x[r].w;
                        sum[r][4 * c] = fmaf(factor, y.x, sum[r][4 * c]);
                        sum[r][4 * c + 1] = fmaf(factor, y.y, sum[r][4 * c + 1]);
                        sum[r][4 * c + 2] = fmaf(factor, y.z, sum[r][4 * c + 2]);
                        sum[r][4 * c + 3] = fmaf(factor, y.w, sum[r][4 * c + 3]);
                    }
                }
            }
        }
    }
}

/* Stores the thread's part of a tile of scores. */
template <int COLS> __device__ static void put_scores(float *p, const float (&s)[4][COLS / 8], Place at) { // p [ROWS, COLS]
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int h = 0; h < COLS / 32; h++)
            *chunk_of(p + (at.row + r) * COLS, 8 * h + at.across, at.row / 4 % 8) =
                make_float4(s[r][4 * h], s[r][4 * h + 1], s[r][4 * h + 2], s[r][4 * h + 3]);
}
/* s = P (s - delta of its row or column), P as put_scores left it */
template <int COLS, typename Delta>
__device__ static void differentiate(float (&s)[4][COLS / 8], const float *p, Place at, Delta delta) { // p [ROWS, COLS]
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int h = 0; h < COLS / 32; h++) {
            float4 e = chunk_of(p + (at.row + r) * COLS, 8 * h + at.across, at.row / 4 % 8);
            s[r][4 * h] = e.x * (s[r][4 * h] - delta(r, 4 * h));
            s[r][4 * h + 1] = e.y * (s[r][4 * h + 1] - delta(r, 4 * h + 1));
            s[r][4 * h + 2] = e.z * (s[r][4 * h + 2] - delta(r, 4 * h + 2));
            s[r][4 * h + 3] = e.w * (s[r][4 * h + 3] - delta(r, 4 * h + 3));
        }
    }
}

/* s = value outside the columns that row r sees; those of the tile begin at `start`. Only tiles at an edge come here, so what the rows
 * see is computed, or read, each time, and takes no registers meanwhile. */
template <int COLS, typename Seen>
__device__ static void mask(float (&s)[4][COLS / 8], Place at, float value, int start, Seen seen) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const XtSeen<int> of_row = seen(r);
        int low = of_row.begin - start - 4 * at.across, high = of_row.end - start - 4 * at.across;
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            int col = j / 4 * 32 + j % 4;
            if (col < low || col >= high) s[r][j] = value;
        }
    }
}

/* Stores row at.row + r of the block, times factor(r), for rows below `rows`. */
template <int D, typename Factor>
__device__ static void store_rows(float *out, int64_t stride, const float (&sum)[4][D / 8], Place at, int first, int rows,
                                  Factor factor) { // out [rows, D]
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = first + at.row + r;
        if (i >= rows) break;
#pragma unroll
        for (int c = 0; c < D / 32; c++)
            *(float4 *)(out + i * stride + 32 * c + 4 * at.across) = make_float4(
                factor(r, sum[r][4 * c]), factor(r, sum[r][4 * c + 1]), factor(r, sum[r][4 * c + 2]), factor(r, sum[r][4 * c + 3]));
    }
}

/* How many groups of 16 columns the first `columns` columns of a tile are. */
template <int COLS> __device__ static int sixteens(int columns) {
    return columns < 0 ? 0 : columns > COLS ? COLS / 16 : (columns + 15) / 16;
}

/* The group of 16 columns that holds column `column`, or the first one. */
__device__ static int first_sixteen(int column) { return column < 0 ? 0 : column / 16; }

/* ---- forward ----------------------------------------------------------------------------------------------------------------- */

template <int D> constexpr int FORWARD_BYTES = (3 * ROWS * D + ROWS * 64) * 4;

template <int D> __global__ void __launch_bounds__(THREADS, D == 32 ? 4 : D == 64 ? 3 : 2) flash_forward_kernel(XtAttentionFwd p) {
    constexpr int COLS = 64;
    extern __shared__ float4 room[];
    float *q_tile = (float *)room, *k_tile = q_tile + ROWS * D;     // [ROWS, D], [COLS, D]
    float *v_tile = k_tile + COLS * D, *p_tile = v_tile + COLS * D; // [COLS, D], [ROWS, COLS]
    int all_heads = (int)(p.batch * p.heads), head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)((gridDim.x - 1 - blockIdx.x) / all_heads) * ROWS; // causal: rows with the most keys start first
    int64_t b = head / p.heads, h = head % p.heads, g = h / (p.heads / p.kv_heads);
    const float *q = (const float *)p.q + b * p.q_stride[0] + h * p.q_stride[1]; // [sq, D]
    const float *k = (const float *)p.k + b * p.k_stride[0] + g * p.k_stride[1]; // [skv, D]
    const float *v = (const float *)p.v + b * p.v_stride[0] + g * p.v_stride[1]; // [skv, D]
    float scale = (float)(p.scale * LOG2_E);
    Place at = my_place();

    /* All rows of the block see keys whole.begin ... whole.end - 1, some rows begin ... end - 1, the warp's rows part of them. */
    const XtSeen<int> top = xt_seen<int>(p, b, first), bottom = xt_seen<int>(p, b, min(first + ROWS, sq) - 1);
    const XtSeen<int> whole = {bottom.begin, top.end};
    const int begin = top.begin, end = bottom.end, warp_row = first + at.row / 16 * 16;
    const XtSeen<int> warp = {xt_seen<int>(p, b, min(warp_row, sq - 1)).begin, xt_seen<int>(p, b, min(warp_row + 15, sq - 1)).end};
    auto of_row = [&](int r) { return first + at.row + r < sq ? xt_seen<int>(p, b, first + at.row + r) : XtSeen<int>{0, 0}; };
    float max[4], sum[4], o[4][D / 8];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        max[r] = -INFINITY;
        sum[r] = 0;
#pragma unroll
        for (int d = 0; d < D / 8; d++) o[r][d] = 0;
    }
    if (end > begin) {
        fetch_tile<D, ROWS>(q_tile, q, p.q_stride[2], first, sq);
        fetch_tile<D, COLS>(k_tile, k, p.k_stride[2], begin, skv);
    }
    __pipeline_commit();
    for (int start = begin; start < end; start += COLS) {
        float s[4][COLS / 8];
        __pipeline_wait_prior(0);
        __syncthreads(); // Q and K have arrived, V and P are free
        fetch_tile<D, COLS>(v_tile, v, p.v_stride[2], start, skv);
        __pipeline_commit();
        dot_rows<D, COLS>(s, q_tile, k_tile, at);
        __syncthreads(); // K is free
        if (start + COLS < end) fetch_tile<D, COLS>(k_tile, k, p.k_stride[2], start + COLS, skv);
        __pipeline_commit();

#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int j = 0; j < COLS / 8; j++) s[r][j] *= scale;
        if (start < whole.begin || start + COLS > whole.end) mask<COLS>(s, at, -INFINITY, start, of_row);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float most = max[r], part = 0;
#pragma unroll
            for (int j = 0; j < COLS / 8; j++) most = fmaxf(most, s[r][j]); // ignores NaN: its exp is NaN, and so is the sum
            most = reduce_across(most, true);
            float shift = most == -INFINITY ? 0 : most; // all scores are -inf so far: exp gives zeros, not NaN
            float fade = exp2f(max[r] - shift);
            max[r] = most;
#pragma unroll
            for (int j = 0; j < COLS / 8; j++) {
                s[r][j] = exp2f(s[r][j] - shift);
                part += s[r][j];
            }
            sum[r] = sum[r] * fade + part;
#pragma unroll
            for (int d = 0; d < D / 8; d++) o[r][d] *= fade;
        }
        put_scores<COLS>(p_tile, s, at);
        __pipeline_wait_prior(1);
        __syncthreads(); // V has arrived, P is complete
        add_product<D, COLS>(o, p_tile, v_tile, at, first_sixteen(warp.begin - start), sixteens<COLS>(warp.end - start));
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = first + at.row + r;
        const XtSeen<int> seen = of_row(r);
        const bool some = seen.end > seen.begin;
        sum[r] = reduce_across(sum[r], false);
        if (at.across == 0 && i < sq) {
            float lse = max[r] == -INFINITY ? NAN : (max[r] + log2f(sum[r])) * LN_2; // only -inf: NaN, as exp(-inf - -inf) is
            ((float *)p.lse)[(int64_t)head * sq + i] = some ? lse : -INFINITY;
        }
        sum[r] = some ? 1 / sum[r] : 0;
    }
    float *out = (float *)p.out + b * p.out_stride[0] + h * p.out_stride[1]; // [sq, D]
    store_rows<D>(out, p.out_stride[2], o, at, first, sq, [&](int r, float x) { return sum[r] == 0 ? 0.0f : x * sum[r]; });
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

/* Rows of the other side in a tile: few enough for two blocks a multiprocessor. */
template <int D> constexpr int BACKWARD_COLS = D == 128 ? 32 : 64;
template <int D> constexpr int BACKWARD_BLOCKS = D == 32 ? 4 : 2;
template <int D> constexpr int BACKWARD_BYTES = (2 * (ROWS + BACKWARD_COLS<D>)*D + (ROWS + 2) * BACKWARD_COLS<D>)*4;

/* Computes dQ, and delta for the next kernel. */
template <int D> __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS<D>) flash_dq_kernel(XtAttentionBwd p, float *deltas) {
    constexpr int COLS = BACKWARD_COLS<D>; // deltas [B, H, sq]
    extern __shared__ float4 room[];
    float *q_tile = (float *)room, *dout_tile = q_tile + ROWS * D;     // [ROWS, D] each
    float *k_tile = dout_tile + ROWS * D, *v_tile = k_tile + COLS * D; // [COLS, D] each
    float *p_tile = v_tile + COLS * D;                                 // [ROWS, COLS]
    int all_heads = (int)(p.batch * p.heads), head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)((gridDim.x - 1 - blockIdx.x) / all_heads) * ROWS; // causal: rows with the most keys start first
    int64_t b = head / p.heads, h = head % p.heads, g = h / (p.heads / p.kv_heads);
    const float *q = (const float *)p.q + b * p.q_stride[0] + h * p.q_stride[1];             // [sq, D]
    const float *dout = (const float *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1]; // [sq, D]
    const float *out = (const float *)p.out + b * p.out_stride[0] + h * p.out_stride[1];     // [sq, D]
    const float *k = (const float *)p.k + b * p.k_stride[0] + g * p.k_stride[1];             // [skv, D]
    const float *v = (const float *)p.v + b * p.v_stride[0] + g * p.v_stride[1];             // [skv, D]
    float scale = (float)(p.scale * LOG2_E);
    Place at = my_place();

    const XtSeen<int> top = xt_seen<int>(p, b, first), bottom = xt_seen<int>(p, b, min(first + ROWS, sq) - 1); // as in the forward
    const XtSeen<int> all = {bottom.begin, top.end};
    const int begin = top.begin, end = bottom.end, warp_row = first + at.row / 16 * 16;
    const XtSeen<int> warp = {xt_seen<int>(p, b, min(warp_row, sq - 1)).begin, xt_seen<int>(p, b, min(warp_row + 15, sq - 1)).end};
    auto of_row = [&](int r) { return first + at.row + r < sq ? xt_seen<int>(p, b, first + at.row + r) : XtSeen<int>{0, 0}; };
    fetch_tile<D, ROWS>(q_tile, q, p.q_stride[2], first, sq);
    fetch_tile<D, ROWS>(dout_tile, dout, p.dout_stride[2], first, sq);
    if (end > begin) {
        fetch_tile<D, COLS>(k_tile, k, p.k_stride[2], begin, skv);
        fetch_tile<D, COLS>(v_tile, v, p.v_stride[2], begin, skv);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();

    float lse[4], delta[4], dq[4][D / 8]; // lse in powers of 2
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = first + at.row + r;
        lse[r] = i < sq ? ((const float *)p.lse)[(int64_t)head * sq + i] * (float)LOG2_E : 0;
        delta[r] = 0;
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
            float4 x = i < sq ? *(const float4 *)(out + i * p.out_stride[2] + 32 * c + 4 * at.across) : make_float4(0, 0, 0, 0);
            float4 y = chunk_of((const float *)dout_tile + (at.row + r) * D, 8 * c + at.across, at.row / 4 % 8);
            delta[r] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        delta[r] = reduce_across(delta[r], false);
        if (at.across == 0 && i < sq) deltas[(int64_t)head * sq + i] = delta[r];
#pragma unroll
        for (int d = 0; d < D / 8; d++) dq[r][d] = 0;
    }
    for (int start = begin; start < end; start += COLS) {
        float s[4][COLS / 8];
        const bool whole = start >= all.begin && start + COLS <= all.end;
        dot_rows<D, COLS>(s, q_tile, k_tile, at);
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int j = 0; j < COLS / 8; j++) s[r][j] = exp2f(fmaf(s[r][j], scale, -lse[r]));
        put_scores<COLS>(p_tile, s, at);
        __syncwarp(); // frees the registers of P for dP; a thread reads back only what it wrote
        dot_rows<D, COLS>(s, dout_tile, v_tile, at);
        differentiate<COLS>(s, p_tile, at, [&](int r, int) { return delta[r]; });
        if (!whole) mask<COLS>(s, at, 0, start, of_row);
        put_scores<COLS>(p_tile, s, at);
        __syncthreads(); // dS is complete, V is free
        if (start + COLS < end) fetch_tile<D, COLS>(v_tile, v, p.v_stride[2], start + COLS, skv);
        add_product<D, COLS>(dq, p_tile, k_tile, at, first_sixteen(warp.begin - start), sixteens<COLS>(warp.end - start));
        __syncthreads(); // K is free
        if (start + COLS < end) fetch_tile<D, COLS>(k_tile, k, p.k_stride[2], start + COLS, skv);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads(); // K and V have arrived
    }
    store_rows<D>((float *)p.dq + b * p.dq_stride[0] + h * p.dq_stride[1], p.dq_stride[2], dq, at, first, sq,
                  [&](int, float x) { return (float)p.scale * x; });
}

/* Computes dK and dV. Here the rows of a tile of scores are keys, its columns queries. */
template <int D>
__global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS<D>) flash_dkv_kernel(XtAttentionBwd p, const float *deltas) {
    constexpr int COLS = BACKWARD_COLS<D>; // deltas [B, H, sq]
    extern __shared__ float4 room[];
    float *k_tile = (float *)room, *v_tile = k_tile + ROWS * D;            // [ROWS, D] each
    float *q_tile = v_tile + ROWS * D, *dout_tile = q_tile + COLS * D;     // [COLS, D] each
    float *p_tile = dout_tile + COLS * D;                                  // [ROWS, COLS]
    float *lse_tile = p_tile + ROWS * COLS, *delta_tile = lse_tile + COLS; // [COLS] each
    int all_heads = (int)(p.batch * p.kv_heads), kv_head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)(blockIdx.x / all_heads) * ROWS; // causal: keys with the most queries start first
    int group = (int)(p.heads / p.kv_heads);
    int64_t b = kv_head / p.kv_heads, g = kv_head % p.kv_heads;
    float scale = (float)(p.scale * LOG2_E);
    Place at = my_place();

    /* Queries in `all` see all keys of the block, those in the tiles from `top` on some. Steps: tiles of queries of one head after the
     * other; none where a window leaves these keys out. */
    const XtSeen<int> by_first = xt_seen_by<int>(p, b, first), by_last = xt_seen_by<int>(p, b, min(first + ROWS, skv) - 1);
    const XtSeen<int> all = {by_last.begin, by_first.end};
    const int warp_key = first + at.row / 16 * 16;
    const XtSeen<int> warp = {xt_seen_by<int>(p, b, min(warp_key, skv - 1)).begin,
                              xt_seen_by<int>(p, b, min(warp_key + 15, skv - 1)).end};
    auto of_row = [&](int r) { return first + at.row + r < skv ? xt_seen_by<int>(p, b, first + at.row + r) : XtSeen<int>{0, 0}; };
    const int top = by_first.begin / COLS * COLS, tiles = by_last.end > by_first.begin ? (by_last.end - top + COLS - 1) / COLS : 0;
    const int64_t steps = (int64_t)group * tiles;
    auto fetch_queries = [&](int64_t step) {
        int64_t h = g * group + step / tiles, row = (b * p.heads + h) * sq;
        int start = top + (int)(step % tiles) * COLS;
        const float *q = (const float *)p.q + b * p.q_stride[0] + h * p.q_stride[1]; // [sq, D]
        fetch_tile<D, COLS>(q_tile, q, p.q_stride[2], start, sq);
        if (threadIdx.x < COLS) {
            bool there = start + (int)threadIdx.x < sq;
            int64_t from = row + (there ? start + (int)threadIdx.x : 0);
            __pipeline_memcpy_async(lse_tile + threadIdx.x, (const float *)p.lse + from, 4, there ? 0 : 4);
            __pipeline_memcpy_async(delta_tile + threadIdx.x, deltas + from, 4, there ? 0 : 4);
        }
    };
    auto fetch_dout = [&](int64_t step) {
        int64_t h = g * group + step / tiles;
        const float *dout = (const float *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1]; // [sq, D]
        fetch_tile<D, COLS>(dout_tile, dout, p.dout_stride[2], top + (int)(step % tiles) * COLS, sq);
    };
    float dk[4][D / 8], dv[4][D / 8];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int d = 0; d < D / 8; d++) dk[r][d] = dv[r][d] = 0;
    if (steps > 0) {
        fetch_tile<D, ROWS>(k_tile, (const float *)p.k + b * p.k_stride[0] + g * p.k_stride[1], p.k_stride[2], first, skv);
        fetch_tile<D, ROWS>(v_tile, (const float *)p.v + b * p.v_stride[0] + g * p.v_stride[1], p.v_stride[2], first, skv);
        fetch_queries(0);
        fetch_dout(0);
    }
    __pipeline_commit();
    for (int64_t step = 0; step < steps; step++) {
        int start = top + (int)(step % tiles) * COLS;
        const bool whole = start >= all.begin && start + COLS <= all.end;
        const int begin = first_sixteen(warp.begin - start), end = sixteens<COLS>(warp.end - start);
        float s[4][COLS / 8];
        __pipeline_wait_prior(0);
        __syncthreads(); // Q and dO have arrived
        dot_rows<D, COLS>(s, k_tile, q_tile, at);
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            float lse = lse_tile[4 * at.across + j / 4 * 32 + j % 4] * (float)LOG2_E;
#pragma unroll
            for (int r = 0; r < 4; r++) s[r][j] = exp2f(fmaf(s[r][j], scale, -lse));
        }
        if (!whole) mask<COLS>(s, at, 0, start, of_row);
        put_scores<COLS>(p_tile, s, at);
        __syncwarp(); // P is complete
        add_product<D, COLS>(dv, p_tile, dout_tile, at, begin, end);
        dot_rows<D, COLS>(s, v_tile, dout_tile, at);
        differentiate<COLS>(s, p_tile, at, [&](int, int j) { return delta_tile[4 * at.across + j / 4 * 32 + j % 4]; });
        if (!whole) mask<COLS>(s, at, 0, start, of_row);
        __syncwarp(); // the warp has used P
        put_scores<COLS>(p_tile, s, at);
        __syncthreads(); // dS is complete, dO is free
        if (step + 1 < steps) fetch_dout(step + 1);
        add_product<D, COLS>(dk, p_tile, q_tile, at, begin, end);
        __syncthreads(); // Q is free
        if (step + 1 < steps) fetch_queries(step + 1);
        __pipeline_commit();
    }
    store_rows<D>((float *)p.dk + b * p.dk_stride[0] + g * p.dk_stride[1], p.dk_stride[2], dk, at, first, skv,
                  [&](int, float x) { return (float)p.scale * x; });
    store_rows<D>((float *)p.dv + b * p.dv_stride[0] + g * p.dv_stride[1], p.dv_stride[2], dv, at, first, skv,
                  [](int, float x) { return x; });
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

template <typename P> static const char *supports(const P *p, const XtDeviceTraits *device, int bytes) {
    if (p->dtype != XT_FLOAT32) return "the dtype is not float32";
    if (p->dim != 32 && p->dim != 64 && p->dim != 128) return "the head dim is not 32, 64 or 128";
    if (p->tf32 && p->skv > TF32_COLUMNS) return "TF32 products of more than 1024 keys are faster on tensor cores";
    if (bytes > device->shared_limit) return "a block cannot have so much shared memory";
    return xt_attention_unfit(p, 4);
}
const char *xt_cuda_attention_flash_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    return supports(p, device, p->dim == 32 ? FORWARD_BYTES<32> : p->dim == 64 ? FORWARD_BYTES<64> : FORWARD_BYTES<128>);
}
const char *xt_cuda_attention_flash_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    return supports(p, device, p->dim == 32 ? BACKWARD_BYTES<32> : p->dim == 64 ? BACKWARD_BYTES<64> : BACKWARD_BYTES<128>);
}

template <int D> static XtStatus forward(const XtAttentionFwd *p) {
    constexpr int BYTES = FORWARD_BYTES<D>;
    XT_CHECK(xt_allow_shared("attention", flash_forward_kernel<D>, BYTES));
    unsigned blocks = (unsigned)(xt_divide_up(p->sq, ROWS) * p->batch * p->heads);
    xt_launch(flash_forward_kernel<D>, blocks, THREADS, BYTES, *p);
    return xt_launched("attention_fwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

template <int D> static XtStatus backward(const XtAttentionBwd *p) {
    constexpr int BYTES = BACKWARD_BYTES<D>;
    XtScratch deltas;
    XT_CHECK(xt_allow_shared("attention", flash_dq_kernel<D>, BYTES));
    XT_CHECK(xt_allow_shared("attention", flash_dkv_kernel<D>, BYTES));
    XT_CHECK(deltas.allocate((size_t)(p->batch * p->heads * p->sq) * sizeof(float)));
    unsigned q_blocks = (unsigned)(xt_divide_up(p->sq, ROWS) * p->batch * p->heads);
    unsigned k_blocks = (unsigned)(xt_divide_up(p->skv, ROWS) * p->batch * p->kv_heads);
    xt_launch(flash_dq_kernel<D>, q_blocks, THREADS, BYTES, *p, deltas.data);
    xt_launch(flash_dkv_kernel<D>, k_blocks, THREADS, BYTES, *p, deltas.data);
    return xt_launched("attention_bwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

XtStatus xt_cuda_attention_flash_fwd(const XtAttentionFwd *p) {
    return p->dim == 32 ? forward<32>(p) : p->dim == 64 ? forward<64>(p) : forward<128>(p);
}

XtStatus xt_cuda_attention_flash_bwd(const XtAttentionBwd *p) {
    return p->dim == 32 ? backward<32>(p) : p->dim == 64 ? backward<64>(p) : backward<128>(p);
}
