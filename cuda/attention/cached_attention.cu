/* cached_attention.cu - one query per sequence, over keys and values that are kept (contract/attention.h).
 *
 * Two plans:
 *
 *   split    D of 64 or 128, float32 or 16 bits, rows aligned to 16 bytes. The positions are cut into chunks of CHUNK. A block has a chunk
 *            of a kv head and up to G of the query heads that share it: scores to shared memory, their softmax, the weighted sum of the
 *            values. Of the blocks of these heads, the one that ends last joins the chunks. The grid covers the whole length; blocks
 *            behind the position, which is read on the device, and before the window end at once
 *   plain    any D, dtype and stride: a warp has a query head and walks through all positions, as reference.cu does
 *
 * The block that has the new position, and of the query heads the first ones, stores the new key and value; all take them from the inputs,
 * so no block reads what another one writes. Sums go over lanes, rows of a chunk and chunks in a fixed order. Bytes moved: keys and values
 * once for each G query heads.
 */
#include "arch/overlap.cuh"
#include "attention.cuh"

enum {
    CHUNK = 64, /* positions of a block */
    THREADS = 128,
    WARPS = 8, /* of a block of the plain plan */
};

/* A score, with its softcap where there is one. */
template <typename A> __device__ inline A capped(A score, const XtCachedAttention &p) {
    return p.softcap > 0 ? (A)p.softcap * (A)tanh(score / (A)p.softcap) : score;
}

/* ---- split ------------------------------------------------------------------------------------------------------------------- */

template <typename T, int W> __device__ inline void widen(float *values, const XtPiece<T, W> &piece) { // values [W]
    const XtVector<T, W> vector = xt_elements(piece);
#pragma unroll
    for (int w = 0; w < W; w++) values[w] = xt_load(vector.at[w]);
}

/* Blocks of a launch that have finished, for each blockIdx.y. Zeros between launches: the last block of a row resets its count. */
__device__ unsigned cached_finished[65536];

/* parts [B, H, chunks, D]; stats [B, H, chunks]: the maximum of the scores and the sum of exp(score - maximum). CAP: there is a softcap;
 * its tanh in the only kernel made all attention 9 to 30 % slower. */
template <typename T, int D, int G, bool CAP>
__global__ void __launch_bounds__(THREADS)
    cached_split_kernel(XtCachedAttention p, float *parts, float2 *stats, int chunks, int tiles) {
    constexpr int W = XT_WIDTH<T>, LANES = D / W, ROWS = THREADS / LANES, EACH = CHUNK / ROWS;
    static_assert(LANES <= 32 && CHUNK == 64, "a row within a warp; two scores a lane");
    static_assert(D <= THREADS && G <= THREADS / 32, "a thread for each element, a warp for each head");
    __shared__ float scores[G][CHUNK];
    __shared__ float sums[ROWS][G][D];
    __shared__ float2 stat[G]; /* of this chunk; then .x is the maximum of all chunks */
    __shared__ bool is_last;
    xt_wait_for_previous();
    xt_let_next_begin();
    const int tile = blockIdx.y % tiles, bg = blockIdx.y / tiles, b = bg / (int)p.kv_heads, g = bg % (int)p.kv_heads;
    const int group = (int)(p.heads / p.kv_heads), h0 = g * group + tile * G, count = min(G, group - tile * G);
    const int64_t position = p.positions[b], first = (int64_t)blockIdx.x * CHUNK, row0 = (int64_t)b * p.heads + h0;
    T *out = (T *)p.out + row0 * D; // [count, D]
    if (position < 0 || position >= p.length) {
        if (blockIdx.x == 0)
            for (int at = threadIdx.x; at < count * D; at += THREADS) out[at] = xt_store<T>(NAN);
        return;
    }
    const int64_t low = p.window > 0 && position >= p.window ? position - p.window + 1 : 0; /* the first position that is seen */
    if (position < first || first + CHUNK <= low) return;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    T *keys = (T *)p.keys + (int64_t)bg * p.length * D;                          // [L, D]
    T *values = (T *)p.values + (int64_t)bg * p.length * D;                      // [L, D]
    const T *new_key = (const T *)p.k + b * p.k_stride[0] + g * p.k_stride[1];   // [D]
    const T *new_value = (const T *)p.v + b * p.v_stride[0] + g * p.v_stride[1]; // [D]

    /* All loads of the block are under way at once: their latency is most of its time. */
    XtPiece<T, W> key[EACH], value[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int64_t j = first + e * ROWS + row;
        key[e] = value[e] = xt_all<T, W>(xt_store<T>(0));
        if (j > position || j < low) continue;
        key[e] = xt_read<T, W>((j == position ? new_key : keys + j * D) + lane * W);
        value[e] = xt_read<T, W>((j == position ? new_value : values + j * D) + lane * W);
    }
    float q[G][W];
#pragma unroll
    for (int i = 0; i < G; i++) {
        const int h = h0 + (i < count ? i : 0);
        widen(q[i], xt_read<T, W>((const T *)p.q + b * p.q_stride[0] + h * p.q_stride[1] + lane * W));
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int64_t j = first + e * ROWS + row;
        if (j == position && tile == 0) {
            xt_write(keys + j * D + lane * W, key[e]);
            xt_write(values + j * D + lane * W, value[e]);
        }
        float of_key[W];
        widen(of_key, key[e]);
#pragma unroll
        for (int i = 0; i < G; i++) {
            float dot = 0;
#pragma unroll
            for (int w = 0; w < W; w++) dot += q[i][w] * of_key[w];
            dot = xt_warp_sum<LANES>(dot);
            const float score = CAP ? capped(dot * (float)p.scale, p) : dot * (float)p.scale;
            if (lane == 0) scores[i][e * ROWS + row] = j <= position && j >= low ? score : -INFINITY;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < count; i += THREADS / 32) {
        const int at = threadIdx.x % 32;
        const float a = scores[i][at], c = scores[i][at + 32];
        const float max = xt_warp_reduce(a > c ? a : c, XtMax());
        const float ea = xt_exp_for<T>(a - max), ec = xt_exp_for<T>(c - max), sum = xt_warp_sum(ea + ec);
        scores[i][at] = ea;
        scores[i][at + 32] = ec;
        if (at == 0) stat[i] = stats[(row0 + i) * chunks + blockIdx.x] = make_float2(max, sum);
    }
    __syncthreads();
    float sum[G][W] = {};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (first + e * ROWS + row > position || first + e * ROWS + row < low) continue;
        float of_value[W];
        widen(of_value, value[e]);
#pragma unroll
        for (int i = 0; i < G; i++) {
            const float weight = i < count ? scores[i][e * ROWS + row] : 0.0f;
#pragma unroll
            for (int w = 0; w < W; w++) sum[i][w] += weight * of_value[w];
        }
    }
#pragma unroll
    for (int i = 0; i < G; i++)
#pragma unroll
        for (int w = 0; w < W; w++) sums[row][i][lane * W + w] = sum[i][w];
    __syncthreads();
    const int begin = (int)(low / CHUNK), end = (int)(position / CHUNK) + 1, used = end - begin; /* chunks */
    for (int at = threadIdx.x; at < count * D; at += THREADS) {
        float total = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) total += sums[r][at / D][at % D];
        if (used == 1) out[at] = xt_store<T>(total / stat[at / D].y);
        else parts[((row0 + at / D) * chunks + blockIdx.x) * D + at % D] = total;
    }
    if (used == 1) return;
    /* The block that ends last joins the chunks, in their order. */
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&cached_finished[blockIdx.y], 1u) == (unsigned)used - 1;
        if (is_last) cached_finished[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x / 32; i < count; i += THREADS / 32) {
        float max = -INFINITY;
        for (int s = begin + threadIdx.x % 32; s < end; s += 32) max = fmaxf(max, __ldcg(&stats[(row0 + i) * chunks + s]).x);
        max = xt_warp_reduce(max, XtMax());
        if (threadIdx.x % 32 == 0) stat[i].x = max;
    }
    __syncthreads();
    if (threadIdx.x >= D) return;
    float weights[G] = {}, totals[G] = {};
#pragma unroll 4
    for (int s = begin; s < end; s++) {
#pragma unroll
        for (int i = 0; i < G; i++) {
            if (i >= count) continue;
            const float2 part = __ldcg(&stats[(row0 + i) * chunks + s]);
            const float factor = xt_exp_for<T>(part.x - stat[i].x);
            weights[i] += part.y * factor;
            totals[i] += __ldcg(&parts[((row0 + i) * chunks + s) * D + threadIdx.x]) * factor;
        }
    }
#pragma unroll
    for (int i = 0; i < G; i++)
        if (i < count) out[i * D + threadIdx.x] = xt_store<T>(totals[i] / weights[i]);
}

template <typename T, int D, int G> static XtStatus split(const XtCachedAttention *p) {
    const int chunks = (int)xt_divide_up(p->length, CHUNK), tiles = (int)xt_divide_up(p->heads / p->kv_heads, G);
    const int64_t rows = p->batch * p->heads;
    XtScratch scratch;
    XT_CHECK(scratch.allocate((size_t)(rows * chunks) * (D * sizeof(float) + sizeof(float2))));
    float2 *stats = (float2 *)scratch.data;          /* [B, H, chunks] */
    float *parts = (float *)(stats + rows * chunks); /* [B, H, chunks, D] */
    const dim3 grid((unsigned)chunks, (unsigned)(p->batch * p->kv_heads * tiles));
    const auto kernel = p->softcap > 0 ? cached_split_kernel<T, D, G, true> : cached_split_kernel<T, D, G, false>;
    xt_launch_early(kernel, grid, THREADS, 0, *p, parts, stats, chunks, tiles);
    return xt_launched("cached_attention", p->batch, p->heads, p->kv_heads, p->length, p->dim);
}

template <typename T, int D> static XtStatus split_heads(const XtCachedAttention *p) {
    const int64_t group = p->heads / p->kv_heads;
    return group == 1 ? split<T, D, 1>(p) : group == 2 ? split<T, D, 2>(p) : split<T, D, 4>(p);
}

/* ---- plain ------------------------------------------------------------------------------------------------------------------- */

/* This lane's part of a . b; xt_warp_sum of it is the product. */
template <typename T> __device__ static XtAcc<T> partial_dot(const T *a, const T *b, int64_t dim) { // a, b [dim]
    XtAcc<T> sum = 0;
    for (int64_t d = threadIdx.x % 32; d < dim; d += 32) sum += xt_load(a[d]) * xt_load(b[d]);
    return sum;
}

template <typename T> __global__ void __launch_bounds__(32 * WARPS) cached_plain_kernel(XtCachedAttention p) {
    using A = XtAcc<T>;
    const int lane = threadIdx.x % 32;
    const int64_t rows = p.batch * p.heads, group = p.heads / p.kv_heads, step = (int64_t)gridDim.x * WARPS;
    const A scale = (A)p.scale;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += step) {
        const int64_t b = row / p.heads, h = row % p.heads, g = h / group, position = p.positions[b];
        const T *q = (const T *)p.q + b * p.q_stride[0] + h * p.q_stride[1];         // [D]
        const T *new_key = (const T *)p.k + b * p.k_stride[0] + g * p.k_stride[1];   // [D]
        const T *new_value = (const T *)p.v + b * p.v_stride[0] + g * p.v_stride[1]; // [D]
        T *keys = (T *)p.keys + (b * p.kv_heads + g) * p.length * p.dim;             // [L, D]
        T *values = (T *)p.values + (b * p.kv_heads + g) * p.length * p.dim;         // [L, D]
        T *out = (T *)p.out + row * p.dim;                                           // [D]
        const bool known = position >= 0 && position < p.length;
        const int64_t low = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
        auto score = [&](int64_t j) {
            return capped(scale * xt_warp_sum(partial_dot(q, j == position ? new_key : keys + j * p.dim, p.dim)), p);
        };
        A max = -(A)INFINITY, sum = 0;
        for (int64_t j = low; known && j <= position; j++) {
            const A s = score(j);
            if (s > max || s != s) max = s; // a NaN stays
        }
        for (int64_t j = low; known && j <= position; j++) sum += exp(score(j) - max);
        for (int64_t first = 0; first < p.dim; first += 32) { // all lanes stay for the products
            const int64_t d = first + lane;
            A value = 0;
            for (int64_t j = low; known && j <= position; j++) {
                const A s = score(j);
                if (d < p.dim) value += exp(s - max) * xt_load((j == position ? new_value : values + j * p.dim)[d]);
            }
            if (d >= p.dim) continue;
            out[d] = xt_store<T>(known ? value / sum : (A)NAN);
            if (known && h % group == 0) {
                keys[position * p.dim + d] = new_key[d];
                values[position * p.dim + d] = new_value[d];
            }
        }
    }
}

/* ---- the slot ---------------------------------------------------------------------------------------------------------------- */

/* Whether every row of x [batch, heads, D] starts at a multiple of 16 bytes. */
static bool rows_aligned(const void *x, const int64_t stride[2], int64_t batch, int64_t heads, int width) {
    return (uintptr_t)x % 16 == 0 && (batch <= 1 || stride[0] % width == 0) && (heads <= 1 || stride[1] % width == 0);
}

static bool fits_split(const XtCachedAttention *p) {
    const int width = (int)(16 / xt_dtype_size(p->dtype));
    const int64_t most = 1 << 30;
    return !p->plain && p->dtype != XT_FLOAT64 && (p->dim == 64 || p->dim == 128) && p->length < most &&
           p->batch * p->heads <= 65535 && (uintptr_t)p->keys % 16 == 0 && (uintptr_t)p->values % 16 == 0 &&
           rows_aligned(p->q, p->q_stride, p->batch, p->heads, width) &&
           rows_aligned(p->k, p->k_stride, p->batch, p->kv_heads, width) &&
           rows_aligned(p->v, p->v_stride, p->batch, p->kv_heads, width);
}

XtStatus xt_cuda_cached_attention(const XtCachedAttention *p) {
    const int64_t rows = p->batch * p->heads;
    if (rows == 0 || p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) < 8) {
            if (fits_split(p) && p->length > 0) return p->dim == 64 ? split_heads<T, 64>(p) : split_heads<T, 128>(p);
        }
        xt_launch(cached_plain_kernel<T>, xt_blocks(rows, WARPS), 32 * WARPS, 0, *p);
        return xt_launched("cached_attention", p->batch, p->heads, p->kv_heads, p->length, p->dim);
    });
}
