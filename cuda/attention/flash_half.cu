/* flash_half.cu - attention of bfloat16 and float16 that keeps the scores on the chip; products on tensor cores.
 *
 *     forward   S = Q K^T tile by tile; running maximum m and sum l of each row, c = scale log2 e:
 *               m' = max(m, max_j s_j);  p_j = 2^(c s_j - c m');  l = l 2^(c m - c m') + sum_j p_j
 *               o = o 2^(c m - c m') + sum_j p_j v_j
 *               out = o / l;  lse = scale m + log l
 *     backward  P = exp(scale S - lse);  dP = dO V^T;  delta_i = dout_i . out_i;  dS = P (dP - delta)
 *               dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO, the latter two also over the query heads of a group
 *
 * Everything is summed in float32. P and dS are rounded to the dtype for the product that uses them; l sums the unrounded p.
 *
 * Plan: a block owns ROWS rows of a head, a warp 16 STRIPS of them: of Q for out and dQ, of K for dK and dV. It walks through the
 * tiles of the other side and skips those that the causal mask empties for it. Products are mma.sync.m16n8k16: lane 4 g + t has of
 * a 16 x 8 piece of a result the rows g and g + 8, columns 2 t and 2 t + 1, which is also what it needs of a left operand. So the
 * scores never leave the registers: S, or S^T = K Q^T for dK and dV, becomes P or dS in place and is the left operand of the next
 * product. A row belongs to 4 lanes. ldmatrix loads right operands, transposed where the sum is over the rows of the tile. With two
 * strips a warp uses each of them twice; with one, shared memory would limit the kernel.
 *
 * Shared memory: a row of a tile is D elements and 16 bytes of padding, so that 8 rows at the same place have different banks.
 * cp.async loads the next tile while the block computes. Rows beyond the end are zeros. A warp puts its results in its own rows of
 * a tile, to store them 16 bytes at a time.
 *
 * Three launches in all: forward; dQ, which also writes delta and lse log2 e; dK and dV. Bytes: each tensor once, and the other
 * side's tiles again for every ROWS rows, mostly from L2. Deterministic: tiles in order, then heads in order.
 *
 * Documents and windows (SPANS): tiles outside the span that a block sees are skipped, and hidden elements are masked where a tile
 * crosses a span's edge.
 *
 * A softcap (CAPPED, with SPANS): s becomes t = tanh(scale s / cap) in the registers, and then cap takes the place of scale above; dS has the
 * factor 1 - t^2, and dK and dV take dP first, so that t is there when both are known. Tanh is an exponential and a reciprocal more for each
 * score.
 *
 * Not supported: other dtypes and head dims, rows that are not aligned to 16 bytes, a scale that is not positive.
 */
#include "flash_half.cuh"

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

/* ---- forward ----------------------------------------------------------------------------------------------------------------- */

template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, P::BLOCKS) flash_half_forward_kernel(XtAttentionFwd p, XtBend bend) {
    constexpr int ROWS = P::ROWS, TILE = P::TILE, PITCH = P::PITCH, STRIPS = P::STRIPS;
    static_assert(TILE == P::COLS, "a maximum is of a whole tile");
    extern __shared__ float4 room[];
    T *q_tile = (T *)room, *kv_tiles = q_tile + ROWS * PITCH; // [ROWS, PITCH], [2][K and V][TILE, PITCH]
    int all_heads = (int)(p.batch * p.heads), head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)((gridDim.x - 1 - blockIdx.x) / all_heads) * ROWS; // causal: rows with the most keys start first
    int heads = (int)p.heads;
    int64_t b = head / heads, h = head % heads, g = head % heads / (heads / (int)p.kv_heads);
    const T *q = (const T *)p.q + b * p.q_stride[0] + h * p.q_stride[1]; // [sq, D]
    const T *k = (const T *)p.k + b * p.k_stride[0] + g * p.k_stride[1]; // [skv, D]
    const T *v = (const T *)p.v + b * p.v_stride[0] + g * p.v_stride[1]; // [skv, D]
    const float scale = bend.factor;
    Place at = my_place<P>();
    auto fetch = [&](int start, int stage) {
        T *tile = kv_tiles + stage * 2 * TILE * PITCH;
        fetch_tile<P, TILE>(tile, k, p.k_stride[2], start, skv);
        fetch_tile<P, TILE>(tile + TILE * PITCH, v, p.v_stride[2], start, skv);
    };

    /* Row i sees the keys before min(skv, i + past); the last row of the block sees those before end, of the warp before
     * warp_end. */
    int past = p.causal ? skv - sq + 1 : skv, end = min(skv, min(first + ROWS, sq) - 1 + past);
    int warp_first = first + (int)threadIdx.x / 32 * P::WARP_ROWS;
    int warp_end = warp_first < sq ? min(skv, min(warp_first + P::WARP_ROWS, sq) - 1 + past) : 0;
    auto seen = [&](int i) { return xt_seen<int>(p, b, min(i, sq - 1)); };
    Spans spans = {};
    int begin = 0;
    if (SPANS) {
        spans = spans_of(warp_first, warp_first + P::WARP_ROWS - 1, seen);
        begin = seen(first).begin / TILE * TILE, end = seen(first + ROWS - 1).end, warp_end = warp_first < sq ? spans.any.end : 0;
    }
    float max[STRIPS][2], sum[STRIPS][2];
    Sums<P> o;
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) max[m][r] = -INFINITY, sum[m][r] = 0;
    each(o, [](float &x, int, int, int) { x = 0; });
    Left<P> q_rows;
    if (end > 0) {
        fetch_tile<P, ROWS>(q_tile, q, p.q_stride[2], first, sq);
        fetch(begin, 0);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        q_rows.prepare(q_tile);
    }
    int stage = 0;
    for (int start = begin; start < end; start += TILE, stage ^= 1) {
        const T *tile = kv_tiles + stage * 2 * TILE * PITCH;
        if (start + TILE < end) fetch(start + TILE, stage ^ 1);
        __pipeline_commit();
        if (start < warp_end && start + TILE > spans.any.begin) {
            Scores<P> s;
            each(s, [](float &x, int, int, int) { x = 0; });
            dot_rows<P>(s, q_rows, right_of<P>(tile), T());
            if (CAPPED) each(s, [&](float &x, int, int, int) { x = xt_tanh_approx(x * bend.inner); });
            if (SPANS) {
                if (start < spans.all.begin || start + TILE > spans.all.end)
                    hide_outside(s, first + at.row, start + at.col, -INFINITY, seen);
            } else if (start + TILE > min(skv, warp_first + past))
                each(s, [&](float &x, int m, int r, int c) {
                    if (start + at.col + c >= min(skv, first + at.row + 16 * m + 8 * r + past)) x = -INFINITY;
                });
#pragma unroll
            for (int m = 0; m < STRIPS; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float most = max[m][r], part = 0;
#pragma unroll
                    for (int n = 0; n < TILE / 8; n++) // ignores NaN: its p is NaN, and so is the sum
                        most = fmaxf(most, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                    most = quad_max(most);
                    float shift = most == -INFINITY ? 0 : most * scale; // all scores are -inf so far: exp gives zeros, not NaN
                    float fade = xt_exp2_approx(fmaf(max[m][r], scale, -shift));
                    max[m][r] = most;
#pragma unroll
                    for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float &x = s[m][n][2 * r + e];
                            x = xt_exp2_approx(fmaf(x, scale, -shift));
                            part += x;
                        }
                    }
                    sum[m][r] = sum[m][r] * fade + part;
#pragma unroll
                    for (int n = 0; n < P::D / 8; n++) o[m][n][2 * r] *= fade, o[m][n][2 * r + 1] *= fade;
                }
            }
            add_product<P>(o, s, turned_of<P>(tile + TILE * PITCH), T());
        }
        __pipeline_wait_prior(0);
        __syncthreads(); // the next tile has arrived, this one is free
    }
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int i = first + at.row + 16 * m + 8 * r;
            sum[m][r] = quad_sum(sum[m][r]);
            if (at.col == 0 && i < sq) {
                float most = max[m][r]; // only -inf: NaN, as exp(-inf - -inf) is
                float lse = most == -INFINITY ? NAN : fmaf(most, scale, log2f(sum[m][r])) * LN_2;
                ((float *)p.lse)[(int64_t)head * sq + i] = i + past > 0 ? lse : -INFINITY;
            }
            sum[m][r] = 1 / sum[m][r];
        }
    }
    T *out = (T *)p.out + b * p.out_stride[0] + h * p.out_stride[1]; // [sq, D]
    store_rows<P>(out, p.out_stride[2], q_tile, o, first, sq,
                  [&](int m, int r, float x) { return first + at.row + 16 * m + 8 * r + past > 0 ? x * sum[m][r] : 0.0f; });
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

/* Computes dQ, and for the next kernel lse log2 e and delta. */
template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, P::BLOCKS)
    flash_half_dq_kernel(XtAttentionBwd p, XtBend bend, float *stats) { // stats [2][B, H, sq]
    constexpr int ROWS = P::ROWS, TILE = P::TILE, COLS = P::COLS, PITCH = P::PITCH, STRIPS = P::STRIPS;
    extern __shared__ float4 room[];
    T *q_tile = (T *)room, *dout_tile = q_tile + ROWS * PITCH; // [ROWS, PITCH] each
    T *kv_tiles = dout_tile + ROWS * PITCH;                    // [2][K and V][TILE, PITCH]
    int all_heads = (int)(p.batch * p.heads), head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)((gridDim.x - 1 - blockIdx.x) / all_heads) * ROWS; // causal: rows with the most keys start first
    int heads = (int)p.heads;
    int64_t b = head / heads, h = head % heads, g = head % heads / (heads / (int)p.kv_heads);
    const T *q = (const T *)p.q + b * p.q_stride[0] + h * p.q_stride[1];             // [sq, D]
    const T *dout = (const T *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1]; // [sq, D]
    const T *out = (const T *)p.out + b * p.out_stride[0] + h * p.out_stride[1];     // [sq, D]
    const T *k = (const T *)p.k + b * p.k_stride[0] + g * p.k_stride[1];             // [skv, D]
    const T *v = (const T *)p.v + b * p.v_stride[0] + g * p.v_stride[1];             // [skv, D]
    const float scale = bend.factor;
    Place at = my_place<P>();
    auto fetch = [&](int start, int stage) {
        T *tile = kv_tiles + stage * 2 * TILE * PITCH;
        fetch_tile<P, TILE>(tile, k, p.k_stride[2], start, skv);
        fetch_tile<P, TILE>(tile + TILE * PITCH, v, p.v_stride[2], start, skv);
    };

    int past = p.causal ? skv - sq + 1 : skv, end = min(skv, min(first + ROWS, sq) - 1 + past); // as in the forward pass
    int warp_first = first + (int)threadIdx.x / 32 * P::WARP_ROWS;
    int warp_end = warp_first < sq ? min(skv, min(warp_first + P::WARP_ROWS, sq) - 1 + past) : 0;
    auto seen = [&](int i) { return xt_seen<int>(p, b, min(i, sq - 1)); };
    Spans spans = {};
    int begin = 0;
    if (SPANS) {
        spans = spans_of(warp_first, warp_first + P::WARP_ROWS - 1, seen);
        begin = seen(first).begin / TILE * TILE, end = seen(first + ROWS - 1).end, warp_end = warp_first < sq ? spans.any.end : 0;
    }
    fetch_tile<P, ROWS>(q_tile, q, p.q_stride[2], first, sq);
    fetch_tile<P, ROWS>(dout_tile, dout, p.dout_stride[2], first, sq);
    if (end > 0) fetch(begin, 0);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();

    float lse[STRIPS][2], delta[STRIPS][2]; // lse in powers of 2
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = at.row + 16 * m + 8 * r, i = first + row;
            float dot = 0;
            lse[m][r] = i < sq ? ((const float *)p.lse)[(int64_t)head * sq + i] * (float)LOG2_E : 0;
#pragma unroll
            for (int c = 0; c < P::D / 32; c++) {
                int d = 32 * c + 4 * at.col; // a lane has 8 of every 32 elements
                auto y = xt_load(xt_read<T, 8>(dout_tile + row * PITCH + d));
                auto x = i < sq ? xt_load(xt_read<T, 8>(out + i * p.out_stride[2] + d)) : XtVector<float, 8>();
#pragma unroll
                for (int j = 0; j < 8; j++) dot = fmaf(x.at[j], y.at[j], dot);
            }
            delta[m][r] = quad_sum(dot);
            if (at.col == 0 && i < sq) {
                stats[(int64_t)head * sq + i] = lse[m][r];
                stats[((int64_t)all_heads + head) * sq + i] = delta[m][r];
            }
        }
    }
    Left<P> q_rows, dout_rows;
    q_rows.prepare(q_tile);
    dout_rows.prepare(dout_tile);
    Sums<P> dq;
    each(dq, [](float &x, int, int, int) { x = 0; });
    int stage = 0;
    for (int start = begin; start < end; start += TILE, stage ^= 1) {
        const T *tile = kv_tiles + stage * 2 * TILE * PITCH;
        if (start + TILE < end) fetch(start + TILE, stage ^ 1);
        __pipeline_commit();
#pragma unroll 1
        for (int from = start; from < min(start + TILE, warp_end); from += COLS) {
            if (SPANS && from + COLS <= spans.any.begin) continue;
            const T *k_rows = tile + (from - start) * PITCH, *v_rows = k_rows + TILE * PITCH;
            Scores<P> s, ds;
            each(s, [](float &x, int, int, int) { x = 0; });
            dot_rows<P>(s, q_rows, right_of<P>(k_rows), T());
            each(s, [&](float &x, int m, int r, int) {
                const float t = (CAPPED ? xt_tanh_approx(x * bend.inner) : x);
                x = xt_exp2_approx(fmaf(t, scale, -lse[m][r]));
                if (CAPPED) x *= fmaf(-t, t, 1.0f);
            });
            each(ds, [&](float &x, int m, int r, int) { x = -delta[m][r]; });
            dot_rows<P>(ds, dout_rows, right_of<P>(v_rows), T());
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] *= s[m][n][i];
            if (SPANS) {
                if (from < spans.all.begin || from + COLS > spans.all.end) hide_outside(ds, first + at.row, from + at.col, 0, seen);
            } else if (from + COLS > min(skv, warp_first + past))
                each(ds, [&](float &x, int m, int r, int c) {
                    if (from + at.col + c >= min(skv, first + at.row + 16 * m + 8 * r + past)) x = 0;
                });
            add_product<P>(dq, ds, turned_of<P>(k_rows), T());
        }
        __pipeline_wait_prior(0);
        __syncthreads(); // the next tiles have arrived, these are free
    }
    store_rows<P>((T *)p.dq + b * p.dq_stride[0] + h * p.dq_stride[1], p.dq_stride[2], q_tile, dq, first, sq,
                  [&](int, int, float x) { return (float)p.scale * x; });
}

/* Computes dK and dV. Here the rows of the scores are keys, the columns queries. */
template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, P::BLOCKS)
    flash_half_dkv_kernel(XtAttentionBwd p, XtBend bend, const float *stats) { // stats [2][B, H, sq]
    constexpr int ROWS = P::ROWS, TILE = P::TILE, COLS = P::COLS, PITCH = P::PITCH, STRIPS = P::STRIPS;
    extern __shared__ float4 room[];
    T *k_tile = (T *)room, *v_tile = k_tile + ROWS * PITCH;        // [ROWS, PITCH] each
    T *q_tiles = v_tile + ROWS * PITCH;                            // [2][Q and dO][TILE, PITCH]
    float *stat_tiles = (float *)(q_tiles + 2 * 2 * TILE * PITCH); // [2][lse and delta][TILE]
    int all_heads = (int)(p.batch * p.kv_heads), kv_head = blockIdx.x % all_heads, sq = (int)p.sq, skv = (int)p.skv;
    int first = (int)(blockIdx.x / all_heads) * ROWS; // causal: keys with the most queries start first
    int kv_heads = (int)p.kv_heads, group = (int)p.heads / kv_heads;
    int64_t b = kv_head / kv_heads, g = kv_head % kv_heads;
    const float scale = bend.factor;
    Place at = my_place<P>();

    /* Queries from max(0, j - ahead) on see key j. Steps: of one head after the other, the tiles of queries from `top` on. */
    int ahead = p.causal ? skv - sq : skv, top = max(0, first - ahead) / TILE * TILE, bottom = sq;
    int warp_first = first + (int)threadIdx.x / 32 * P::WARP_ROWS;
    auto seen_by = [&](int j) { return xt_seen_by<int>(p, b, min(j, skv - 1)); };
    Spans spans = {};
    if (SPANS) {
        spans = spans_of(warp_first, warp_first + P::WARP_ROWS - 1, seen_by);
        top = seen_by(first).begin / TILE * TILE, bottom = seen_by(first + ROWS - 1).end;
    }
    auto fetch = [&](int member, int start, int stage) {
        int64_t h = g * group + member, row = (b * p.heads + h) * sq;
        T *tile = q_tiles + stage * 2 * TILE * PITCH;
        float *stat_tile = stat_tiles + stage * 2 * TILE;
        fetch_tile<P, TILE>(tile, (const T *)p.q + b * p.q_stride[0] + h * p.q_stride[1], p.q_stride[2], start, sq);
        fetch_tile<P, TILE>(tile + TILE * PITCH, (const T *)p.dout + b * p.dout_stride[0] + h * p.dout_stride[1], p.dout_stride[2],
                            start, sq);
#pragma unroll
        for (int n = 0; n < (2 * TILE + P::THREADS - 1) / P::THREADS; n++) {
            int x = n * P::THREADS + threadIdx.x;
            if (2 * TILE % P::THREADS != 0 && x >= 2 * TILE) break;
            int i = start + x % TILE;
            const float *from = stats + (x < TILE ? 0 : p.batch * p.heads * sq) + row + (i < sq ? i : 0);
            __pipeline_memcpy_async(stat_tile + x, from, 4, i < sq ? 0 : 4);
        }
    };
    fetch_tile<P, ROWS>(k_tile, (const T *)p.k + b * p.k_stride[0] + g * p.k_stride[1], p.k_stride[2], first, skv);
    fetch_tile<P, ROWS>(v_tile, (const T *)p.v + b * p.v_stride[0] + g * p.v_stride[1], p.v_stride[2], first, skv);
    fetch(0, top, 0);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    Left<P> k_rows, v_rows;
    k_rows.prepare(k_tile);
    v_rows.prepare(v_tile);
    Sums<P> dk, dv;
    each(dk, [](float &x, int, int, int) { x = 0; });
    each(dv, [](float &x, int, int, int) { x = 0; });
    int member = 0, start = top, stage = 0;
    while (member < group) {
        int next_member = start + TILE < bottom ? member : member + 1, next = start + TILE < bottom ? start + TILE : top;
        if (next_member < group) fetch(next_member, next, stage ^ 1);
        __pipeline_commit();
        const T *tile = q_tiles + stage * 2 * TILE * PITCH;
        const float *stat_tile = stat_tiles + stage * 2 * TILE;
        int stop = warp_first < skv ? min(start + TILE, bottom) : start;
#pragma unroll 1
        for (int from = start; from < stop; from += COLS) {
            if (SPANS ? from + COLS <= spans.any.begin || from >= spans.any.end : from + COLS <= warp_first - ahead)
                continue; // no query sees the warp's keys
            const T *q_rows = tile + (from - start) * PITCH, *dout_rows = q_rows + TILE * PITCH;
            const float *lse = stat_tile + (from - start) + at.col, *delta = lse + TILE;
            bool whole = SPANS ? from >= spans.all.begin && from + COLS <= spans.all.end
                               : from + COLS <= sq && from >= warp_first + P::WARP_ROWS - 1 - ahead;
            auto hidden = [&](int m, int r, int c) {
                int i = from + at.col + c;
                return i >= sq || i < first + at.row + 16 * m + 8 * r - ahead;
            };
            Scores<P> s, ds;
            each(s, [](float &x, int, int, int) { x = 0; });
            if (CAPPED) {
#pragma unroll
                for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int m = 0; m < STRIPS; m++) ds[m][n][i] = -delta[8 * n + i % 2];
                dot_rows<P>(ds, v_rows, right_of<P>(dout_rows), T());
            }
            dot_rows<P>(s, k_rows, right_of<P>(q_rows), T());
#pragma unroll
            for (int n = 0; n < COLS / 8; n++) {
                float2 shift = *(const float2 *)(lse + 8 * n), less = *(const float2 *)(delta + 8 * n);
#pragma unroll
                for (int m = 0; m < STRIPS; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float t = (CAPPED ? xt_tanh_approx(s[m][n][i] * bend.inner) : s[m][n][i]);
                        s[m][n][i] = xt_exp2_approx(fmaf(t, scale, i % 2 ? -shift.y : -shift.x));
                        if (CAPPED) ds[m][n][i] *= fmaf(-t, t, 1.0f);
                        else ds[m][n][i] = i % 2 ? -less.y : -less.x;
                    }
                }
            }
            auto hide = [&](auto &x) {
                if (SPANS) hide_outside(x, first + at.row, from + at.col, 0, seen_by);
                else
                    each(x, [&](float &y, int m, int r, int c) {
                        if (hidden(m, r, c)) y = 0;
                    });
            };
            if (!whole) hide(s);
            add_product<P>(dv, s, turned_of<P>(dout_rows), T());
            if (!CAPPED) dot_rows<P>(ds, v_rows, right_of<P>(dout_rows), T());
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] *= s[m][n][i];
            if (!whole) hide(ds);
            add_product<P>(dk, ds, turned_of<P>(q_rows), T());
        }
        member = next_member, start = next, stage ^= 1;
        __pipeline_wait_prior(0);
        __syncthreads(); // the next tiles have arrived, these are free
    }
    store_rows<P>((T *)p.dk + b * p.dk_stride[0] + g * p.dk_stride[1], p.dk_stride[2], k_tile, dk, first, skv,
                  [&](int, int, float x) { return (float)p.scale * x; });
    store_rows<P>((T *)p.dv + b * p.dv_stride[0] + g * p.dv_stride[1], p.dv_stride[2], v_tile, dv, first, skv,
                  [](int, int, float x) { return x; });
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

/* Head dim, warps, strips, tile, columns, hold, blocks. */
template <int D, bool NARROW = false> struct Plans; // NARROW: for 99 KB of shared memory; sums in another order
template <> struct Plans<32> {
    using Forward = Plan<32, 4, 2, 64, 64, true, 3>;
    using Dq = Plan<32, 4, 2, 64, 32, true, 3>;
    using Dkv = Plan<32, 4, 2, 64, 32, true, 2>;
};
template <> struct Plans<64> {
    using Forward = Plan<64, 4, 2, 64, 64, true, 2>;
    using Dq = Plan<64, 4, 2, 64, 32, false, 3>;
    using Dkv = Plan<64, 4, 2, 64, 32, false, 2>;
};
template <> struct Plans<96> {
    using Forward = Plan<96, 4, 2, 64, 64, false, 2>;
    using Dq = Plan<96, 4, 2, 32, 32, false, 2>;
    using Dkv = Plan<96, 4, 1, 64, 64, false, 2>;
};
template <> struct Plans<128> {
    using Forward = Plan<128, 4, 2, 64, 64, false, 2>;
    using Dq = Plan<128, 4, 2, 32, 32, false, 2>;
    using Dkv = Plan<128, 4, 1, 64, 64, false, 2>;
};
template <> struct Plans<128, true> {
    using Forward = Plan<128, 4, 2, 32, 32, false, 2>;
    using Dq = Plan<128, 4, 1, 32, 32, false, 2>;
    using Dkv = Plan<128, 4, 1, 32, 32, false, 2>;
};

/* Calls f(Plans<D>()) for one of the four head dims and this much shared memory a block. */
template <typename F> static auto by_plan(int64_t dim, int shared_limit, F f) {
    if (dim == 128 && shared_limit < Plans<128>::Dkv::BACKWARD_BYTES) return f(Plans<128, true>());
    return dim == 32 ? f(Plans<32>()) : dim == 64 ? f(Plans<64>()) : dim == 96 ? f(Plans<96>()) : f(Plans<128>());
}

template <typename P> static const char *supports(const P *p, const XtDeviceTraits *device, int bytes) {
    float scale = (float)(p->scale * LOG2_E);
    if (p->dtype != XT_BFLOAT16 && p->dtype != XT_FLOAT16) return "the dtype is not bfloat16 or float16";
    if (p->dim != 32 && p->dim != 64 && p->dim != 96 && p->dim != 128) return "the head dim is not 32, 64, 96 or 128";
    if (device->capability < 80) return "the compute capability is below 8.0";
    if (!(scale > 0 && scale < INFINITY)) return "the scale is not positive"; // the largest score has the largest product
    if (bytes > device->shared_limit) return "a block cannot have so much shared memory";
    return xt_attention_unfit(p, 8, true);
}
const char *xt_cuda_attention_flash_half_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    return supports(p, device,
                    by_plan(p->dim, device->shared_limit, [](auto plans) { return +decltype(plans)::Forward::FORWARD_BYTES; }));
}
const char *xt_cuda_attention_flash_half_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    return supports(p, device, by_plan(p->dim, device->shared_limit, [](auto plans) {
                        constexpr int DQ = decltype(plans)::Dq::BACKWARD_BYTES, DKV = decltype(plans)::Dkv::BACKWARD_BYTES;
                        return DQ > DKV ? DQ : DKV;
                    }));
}

/* Calls f(T(), Plans<D>(), whether there are documents or a window, whether there is a softcap). */
template <typename F, typename P> static XtStatus by_shape(const P *p, F f) {
    const bool spans = p->documents || p->window > 0;
    auto by_mask = [&](auto zero, auto plans) {
        if (p->softcap > 0) return f(zero, plans, std::true_type(), std::true_type());
        if (spans) return f(zero, plans, std::true_type(), std::false_type());
        return f(zero, plans, std::false_type(), std::false_type());
    };
    return by_plan(p->dim, xt_shared_limit(),
                   [&](auto plans) { return p->dtype == XT_BFLOAT16 ? by_mask(XtBf16(), plans) : by_mask(XtF16(), plans); });
}

template <typename T, typename P, bool SPANS, bool CAPPED> static XtStatus run_forward(const XtAttentionFwd *p) {
    XT_CHECK(xt_allow_shared("attention", flash_half_forward_kernel<T, P, SPANS, CAPPED>, P::FORWARD_BYTES));
    unsigned blocks = (unsigned)(xt_divide_up(p->sq, P::ROWS) * p->batch * p->heads);
    xt_launch(flash_half_forward_kernel<T, P, SPANS, CAPPED>, blocks, P::THREADS, P::FORWARD_BYTES, *p, xt_bend_of(p));
    return xt_launched("attention_fwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

template <typename T, typename Dq, typename Dkv, bool SPANS, bool CAPPED> static XtStatus run_backward(const XtAttentionBwd *p) {
    XtScratch stats;
    XT_CHECK(xt_allow_shared("attention", flash_half_dq_kernel<T, Dq, SPANS, CAPPED>, Dq::BACKWARD_BYTES));
    XT_CHECK(xt_allow_shared("attention", flash_half_dkv_kernel<T, Dkv, SPANS, CAPPED>, Dkv::BACKWARD_BYTES));
    XT_CHECK(stats.allocate((size_t)(2 * p->batch * p->heads * p->sq) * sizeof(float)));
    unsigned q_blocks = (unsigned)(xt_divide_up(p->sq, Dq::ROWS) * p->batch * p->heads);
    unsigned k_blocks = (unsigned)(xt_divide_up(p->skv, Dkv::ROWS) * p->batch * p->kv_heads);
    xt_launch(flash_half_dq_kernel<T, Dq, SPANS, CAPPED>, q_blocks, Dq::THREADS, Dq::BACKWARD_BYTES, *p, xt_bend_of(p), stats.data);
    xt_launch(flash_half_dkv_kernel<T, Dkv, SPANS, CAPPED>, k_blocks, Dkv::THREADS, Dkv::BACKWARD_BYTES, *p, xt_bend_of(p),
              stats.data);
    return xt_launched("attention_bwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

XtStatus xt_cuda_attention_flash_half_fwd(const XtAttentionFwd *p) {
    return by_shape(p, [&](auto zero, auto plans, auto spans, auto capped) {
        return run_forward<decltype(zero), typename decltype(plans)::Forward, decltype(spans)::value, decltype(capped)::value>(p);
    });
}

XtStatus xt_cuda_attention_flash_half_bwd(const XtAttentionBwd *p) {
    return by_shape(p, [&](auto zero, auto plans, auto spans, auto capped) {
        using Plans = decltype(plans);
        return run_backward<decltype(zero), typename Plans::Dq, typename Plans::Dkv, decltype(spans)::value,
                            decltype(capped)::value>(p);
    });
}
