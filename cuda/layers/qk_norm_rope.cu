/* qk_norm_rope.cu - RMSNorm of every head of queries and keys, then rotary embedding (formulas: rms_norm.cu, rope.cu).
 *
 *     forward    n = w cast(x rstd),  out = rope(n)
 *     backward   dn = rope^-1(dout),  dx = rstd (g - xh mean(g xh)) with g = dn w, xh = x rstd,   dw = sum_lines dn xh
 *
 * A line is one head of one row, D elements: half pairs (j, j + half). One launch has the lines of both parts, queries and keys:
 * its first blocks have the queries.
 *
 * Plan: a group of lanes has R neighbouring heads of one row. A lane has the same 16 bytes of both halves of each: the pairs that a
 * rotation joins lie in one lane, and so do the elements whose squares rms_norm's plans add first. The group loads the cosines and
 * sines of the row once for its R heads, from a table [places, 2, half] that a small launch makes in scratch memory first; it stays
 * in the cache. Its launches begin early (overlap.cuh): rows are loaded while the table is
 * made. Those of the plain kernels do not, and have no wait. Moved: every element once in and once
 * out, backward two in and one out; dn and n never leave the registers.
 *
 * dw: as in rms_norm. Block b of P_i has the items b, b + P_i, ... of its part, keeps its share of dw in registers and writes it to
 * scratch memory; another launch adds the shares. P_0 and P_1 divide two blocks for each of XT_PLAN_MULTIPROCESSORS in proportion to
 * the heads, so all blocks run at once and end together; they depend on sizes alone.
 *
 * Up to FEW_ROWS rows, as in a step of generation: a row has blocks of its own, which make its angles in shared memory first. Same bits,
 * without the small launch.
 *
 * Plain plan, for rows that are not aligned to 16 bytes and for D of more than 32 pieces a half: a warp has a line, one element at a
 * time, and reads it twice; the shares of dw are a launch of their own.
 */
#include "arch/overlap.cuh"
#include "common/rms_norm.cuh"
#include "common/rope.cuh"
#include "contract/layers.h"

static constexpr int HEADS_FWD = 4, HEADS_BWD = 2; /* R: heads of a group in flight together */
static constexpr int FEW_ROWS = 16;                /* up to which a block makes the angles of its row */
/* Blocks that fit in a multiprocessor by their registers. A third one forward spills in 16 bits. */
template <typename T> constexpr int BLOCKS_FWD = sizeof(T) == 2 ? 2 : 3;
static constexpr int BLOCKS_BWD = 2;

/* One part, as a kernel sees it; y is out forward and dx backward. */
template <typename T> struct QkPart {
    T *y;
    XtAcc<T> *rstd; /* [rows, heads] */
    const T *x, *dout, *weight;
    XtAcc<T> *share; /* [blocks, D], or NULL */
    int heads;
    int64_t blocks;
    int64_t y_row, y_head, x_row, x_head, dout_row, dout_head;
};
template <typename T> struct QkParts {
    QkPart<T> queries, keys;
};
/* Where the cosines of a row are: table + place * 2 half. */
typedef struct QkPlaces {
    bool by_row; /* the table has a line for every row */
    int64_t period;
} QkPlaces;

__device__ inline int64_t place_of(QkPlaces places, int64_t row) {
    return places.by_row ? row : row - quotient(row, places.period) * places.period;
}

/* table [places, 2, half]: the pairs [first, first + count) of its lines. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    qk_table_kernel(T *table, const int64_t *positions, int64_t places, int half, int first, int count, bool inverse,
                    const __grid_constant__ RopeFrequencies<XtAcc<T>> frequency) {
    using A = XtAcc<T>;
    xt_wait_for_previous(); /* its successor reads rows before it waits: they are complete from here on */
    xt_let_next_begin();
    for (int64_t e = blockIdx.x * (int64_t)THREADS + threadIdx.x; e < places * count; e += (int64_t)gridDim.x * THREADS) {
        const int64_t place = quotient(e, count);
        const int i = (int)(e - place * count);
        A sine, cosine;
        sine_cosine(angle_of((A)(positions ? positions[place] : place), frequency.at[i]), &sine, &cosine);
        T *line = table + place * 2 * half + first + i;
        line[0] = xt_store<T>(cosine);
        line[half] = xt_store<T>(inverse ? -sine : sine);
    }
}

/* Where a forward finds the cosines and sines of a row: in a table, or, for few rows, which a block each has to itself, it makes them
 * first. */
template <typename T> struct QkTable {
    static constexpr bool BY_BLOCK = false;
    const T *at; // [places, 2, half]
    QkPlaces places;
};
template <typename T> struct QkAngles {
    static constexpr bool BY_BLOCK = true;
    const int64_t *positions; /* [rows], or NULL */
    QkPlaces places;
    RopeFrequencies<XtAcc<T>> frequency;
};

/* One item a group: `chunks` items of R heads a row. BY_BLOCK: blocks of row blockIdx.y, half <= PAIRS. */
template <typename T, int N, typename From>
__global__ void __launch_bounds__(THREADS, BLOCKS_FWD<T>)
    qk_fwd_kernel(const __grid_constant__ QkParts<T> parts, const __grid_constant__ From from, int64_t rows, int half, int lanes,
                  XtAcc<T> inverse_dim, XtAcc<T> eps) {
    using A = XtAcc<T>;
    constexpr int R = HEADS_FWD;
    constexpr bool BY_BLOCK = From::BY_BLOCK;
    __shared__ __align__(16) T made[BY_BLOCK ? 2 * PAIRS : 1];
    if constexpr (BY_BLOCK) {
        xt_wait_for_previous();
        xt_let_next_begin();
        const int64_t place = from.positions ? from.positions[blockIdx.y] : place_of(from.places, blockIdx.y);
        for (int i = threadIdx.x; i < half; i += THREADS) {
            A sine, cosine;
            sine_cosine(angle_of((A)place, from.frequency.at[i]), &sine, &cosine);
            made[i] = xt_store<T>(cosine), made[half + i] = xt_store<T>(sine);
        }
    }
    const bool keys = blockIdx.x >= parts.queries.blocks;
    const QkPart<T> p = keys ? parts.keys : parts.queries;
    const int group = threadIdx.x / lanes, col = threadIdx.x % lanes * N, chunks = (p.heads + R - 1) / R;
    const int64_t item = (int64_t)(blockIdx.x - (keys ? (unsigned)parts.queries.blocks : 0)) * (THREADS / lanes) + group;
    const int64_t row = BY_BLOCK ? (item < chunks ? (int64_t)blockIdx.y : rows) : quotient(item, chunks);
    const int head = (int)(BY_BLOCK ? item : item - row * chunks) * R;
    const bool here = row < rows && col < half;
    XtPiece<T, N> v[R][2], c = all<T, N>(0), s = all<T, N>(0), w[2] = {all<T, N>(0), all<T, N>(0)};
    A sum[R];
    const T *x = p.x + row * p.x_row + head * p.x_head + col;
#pragma unroll
    for (int k = 0; k < R; k++) {
        const bool line = here && head + k < p.heads;
        v[k][0] = line ? xt_read<T, N>(x + k * p.x_head) : all<T, N>(0);
        v[k][1] = line ? xt_read<T, N>(x + k * p.x_head + half) : all<T, N>(0);
    }
    if constexpr (BY_BLOCK) __syncthreads();
    else {
        xt_wait_for_previous(); /* the table is complete */
        xt_let_next_begin();
    }
    if (here) {
        const T *angles = made;
        if constexpr (!BY_BLOCK) angles = from.at + place_of(from.places, row) * 2 * half;
        angles += col;
        c = xt_read<T, N>(angles), s = xt_read<T, N>(angles + half);
        w[0] = xt_read<T, N>(p.weight + col), w[1] = xt_read<T, N>(p.weight + half + col);
    }
#pragma unroll
    for (int k = 0; k < R; k++) sum[k] = squares<T, N>(v[k][0]) + squares<T, N>(v[k][1]);
    sum_of_lanes<R>(sum, lanes);
#pragma unroll
    for (int k = 0; k < R; k++) sum[k] = reciprocal_root(sum[k] * inverse_dim + eps);
    if (!here) return;
    T *y = p.y + row * p.y_row + head * p.y_head + col;
#pragma unroll
    for (int k = 0; k < R; k++) {
        if (head + k >= p.heads) break;
        if (col == 0) p.rstd[row * p.heads + head + k] = sum[k];
        v[k][0] = normalised<T, N>(v[k][0], w[0], sum[k]);
        v[k][1] = normalised<T, N>(v[k][1], w[1], sum[k]);
        turn<T, N>(v[k], c, s);
        xt_write(y + k * p.y_head, v[k][0]);
        xt_write(y + k * p.y_head + half, v[k][1]);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD)
    qk_bwd_kernel(const __grid_constant__ QkParts<T> parts, const T *table, QkPlaces places, int64_t rows, int half, int lanes,
                  XtAcc<T> inverse_dim) {
    using A = XtAcc<T>;
    constexpr int R = HEADS_BWD, WARPS = THREADS / 32;
    const bool keys = blockIdx.x >= parts.queries.blocks;
    const QkPart<T> p = keys ? parts.keys : parts.queries;
    const int64_t block = blockIdx.x - (keys ? (unsigned)parts.queries.blocks : 0);
    const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes, col = lane * N;
    const int chunks = (p.heads + R - 1) / R;
    const int64_t items = rows * chunks;
    XtPiece<T, N> w[2] = {all<T, N>(0), all<T, N>(0)};
    A dweight[2][N] = {};
    if (col < half) w[0] = xt_read<T, N>(p.weight + col), w[1] = xt_read<T, N>(p.weight + half + col);
    /* All groups of a block take as many turns: the sums over lanes need whole warps. */
    for (int64_t first = block * groups; first < items; first += p.blocks * groups) {
        const int64_t item = first + group, row = quotient(item, chunks);
        const int head = (int)(item - row * chunks) * R;
        const bool here = row < rows && col < half;
        XtPiece<T, N> v[R][2], d[R][2], c = all<T, N>(0), s = all<T, N>(0);
        A scale[R], sum[R];
        const T *x = p.x + row * p.x_row + head * p.x_head + col;
        const T *dout = p.dout + row * p.dout_row + head * p.dout_head + col;
#pragma unroll
        for (int k = 0; k < R; k++) {
            const bool line = here && head + k < p.heads;
            d[k][0] = line ? xt_read<T, N>(dout + k * p.dout_head) : all<T, N>(0);
            d[k][1] = line ? xt_read<T, N>(dout + k * p.dout_head + half) : all<T, N>(0);
            v[k][0] = line ? xt_read<T, N>(x + k * p.x_head) : all<T, N>(0);
            v[k][1] = line ? xt_read<T, N>(x + k * p.x_head + half) : all<T, N>(0);
            scale[k] = line ? p.rstd[row * p.heads + head + k] : A(0);
        }
        if (first == block * groups) { /* the table is complete */
            xt_wait_for_previous();
            xt_let_next_begin();
        }
        if (here) {
            const T *angles = table + place_of(places, row) * 2 * half + col;
            c = xt_read<T, N>(angles), s = xt_read<T, N>(angles + half);
        }
#pragma unroll
        for (int k = 0; k < R; k++) {
            turn<T, N>(d[k], c, s);
            sum[k] = dot<T, N>(d[k][0], v[k][0], w[0], scale[k], dweight[0]);
            sum[k] += dot<T, N>(d[k][1], v[k][1], w[1], scale[k], dweight[1]);
        }
        sum_of_lanes<R>(sum, lanes);
        if (!here) continue;
        T *y = p.y + row * p.y_row + head * p.y_head + col;
#pragma unroll
        for (int k = 0; k < R; k++) {
            if (head + k >= p.heads) break;
            const A shrink = scale[k] * scale[k] * (sum[k] * inverse_dim);
            xt_write(y + k * p.y_head, input_gradient<T, N>(d[k][0], v[k][0], w[0], scale[k], shrink));
            xt_write(y + k * p.y_head + half, input_gradient<T, N>(d[k][1], v[k][1], w[1], scale[k], shrink));
        }
    }
    if (!p.share) return;
    /* The groups of a warp, then the warps of the block. */
    __shared__ A of_warp[WARPS][32 * 2 * N];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int e = 0; e < N; e++) {
            A sum = dweight[i][e];
            for (int apart = lanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
            if (threadIdx.x % 32 < lanes) of_warp[warp][(i * lanes + lane) * N + e] = sum;
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < 2 * half; j += THREADS) {
        const int at = j < half ? j : lanes * N + j - half;
        A sum = of_warp[0][at];
#pragma unroll
        for (int i = 1; i < WARPS; i++) sum += of_warp[i][at];
        p.share[block * 2 * half + j] = sum;
    }
}

/* ---- plain ------------------------------------------------------------------------------------------------------------------- */

/* Elements j and j + half of a line, turned. */
template <typename T> struct Turned {
    T a, b;
};
template <typename T> __device__ inline Turned<T> turned(T of_a, T of_b, const T *angles, int j, int half) {
    const XtAcc<T> a = xt_load(of_a), b = xt_load(of_b), c = xt_load(angles[j]), s = xt_load(angles[half + j]);
    return {xt_store<T>(a * c - b * s), xt_store<T>(b * c + a * s)};
}

/* A warp has a line. BACK: dx from dout; else out. */
template <typename T, bool BACK>
__global__ void __launch_bounds__(THREADS) qk_plain_kernel(const __grid_constant__ QkPart<T> p, const T *table, QkPlaces places,
                                                           int64_t rows, int half, XtAcc<T> inverse_dim, XtAcc<T> eps) {
    using A = XtAcc<T>;
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t line = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; line < rows * p.heads; line += step) {
        const int64_t row = quotient(line, p.heads), head = line - row * p.heads;
        const T *x = p.x + row * p.x_row + head * p.x_head;
        const T *dout = BACK ? p.dout + row * p.dout_row + head * p.dout_head : nullptr;
        const T *angles = table + place_of(places, row) * 2 * half, *weight = p.weight;
        T *y = p.y + row * p.y_row + head * p.y_head;
        A sum = 0, scale = BACK ? p.rstd[line] : A(0);
        for (int j = lane; j < half; j += 32) {
            const A a = xt_load(x[j]), b = xt_load(x[half + j]);
            if (BACK) {
                const Turned<T> d = turned(dout[j], dout[half + j], angles, j, half);
                sum += xt_load(d.a) * a * xt_load(weight[j]) + xt_load(d.b) * b * xt_load(weight[half + j]);
            } else sum += a * a + b * b;
        }
        sum = xt_warp_sum(sum);
        if (!BACK) {
            scale = reciprocal_root(sum * inverse_dim + eps);
            if (lane == 0) p.rstd[line] = scale;
        }
        const A shrink = scale * scale * (sum * inverse_dim);
        for (int j = lane; j < half; j += 32) {
            const A a = xt_load(x[j]), b = xt_load(x[half + j]), wa = xt_load(weight[j]), wb = xt_load(weight[half + j]);
            if (BACK) {
                const Turned<T> d = turned(dout[j], dout[half + j], angles, j, half);
                y[j] = xt_store<T>(scale * (xt_load(d.a) * wa - a * shrink));
                y[half + j] = xt_store<T>(scale * (xt_load(d.b) * wb - b * shrink));
            } else {
                const T na = xt_store<T>(wa * xt_load(xt_store<T>(a * scale))),
                        nb = xt_store<T>(wb * xt_load(xt_store<T>(b * scale)));
                const Turned<T> n = turned(na, nb, angles, j, half);
                y[j] = n.a, y[half + j] = n.b;
            }
        }
    }
}

/* share [gridDim.y, 2 half]: a thread has a pair of columns, a row of blocks one share. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    qk_share_kernel(const __grid_constant__ QkPart<T> p, const T *table, QkPlaces places, int64_t rows, int half) {
    using A = XtAcc<T>;
    for (int j = blockIdx.x * THREADS + threadIdx.x; j < half; j += gridDim.x * THREADS) {
        A sum_a = 0, sum_b = 0;
        for (int64_t line = blockIdx.y; line < rows * p.heads; line += gridDim.y) {
            const int64_t row = quotient(line, p.heads), head = line - row * p.heads;
            const T *x = p.x + row * p.x_row + head * p.x_head, *dout = p.dout + row * p.dout_row + head * p.dout_head;
            const Turned<T> d = turned(dout[j], dout[half + j], table + place_of(places, row) * 2 * half, j, half);
            sum_a += xt_load(d.a) * xt_load(x[j]) * p.rstd[line];
            sum_b += xt_load(d.b) * xt_load(x[half + j]) * p.rstd[line];
        }
        p.share[(int64_t)blockIdx.y * 2 * half + j] = sum_a;
        p.share[(int64_t)blockIdx.y * 2 * half + half + j] = sum_b;
    }
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

static int64_t places_of(const int64_t *positions, int64_t period, int64_t rows) {
    return positions || period > rows ? rows : period;
}

template <typename T>
static void make_table(T *table, const int64_t *positions, int64_t places, int64_t dim, const XtRopeBase &base, bool inverse) {
    using A = XtAcc<T>;
    const int64_t half = dim / 2;
    for (int64_t first = 0; first < half; first += PAIRS) {
        const int count = (int)(half - first < PAIRS ? half - first : PAIRS);
        xt_launch_early(qk_table_kernel<T>, xt_blocks(places * count, THREADS), THREADS, 0, table, positions, places, half, first,
                        count, inverse, rope_frequencies<A>(base, dim, first, count));
    }
}

/* Lanes for half a line of `half` elements, or 0: the plain plan. */
template <typename T> static int lanes_for(int64_t half) {
    if (half % XT_WIDTH<T> || half / XT_WIDTH<T> > 32) return 0;
    return lanes_of(half / XT_WIDTH<T>, 1);
}
template <typename T> static bool even(const void *data, const int64_t stride[2]) {
    return (uintptr_t)data % 16 == 0 && stride[0] % XT_WIDTH<T> == 0 && stride[1] % XT_WIDTH<T> == 0;
}

template <typename T> static XtStatus forward(const XtQkNormRopeFwd *p) {
    using A = XtAcc<T>;
    constexpr int N = XT_WIDTH<T>;
    const int64_t half = p->dim / 2, places = places_of(p->positions, p->period, p->rows);
    const QkPlaces where = {places == p->rows, p->period};
    int lanes = lanes_for<T>(half);
    QkPart<T> part[2] = {};
    for (int i = 0; i < 2; i++) {
        if (!even<T>(p->x[i], p->x_stride[i]) || !even<T>(p->out[i], p->out_stride[i]) || (uintptr_t)p->weight[i] % 16) lanes = 0;
        part[i].y = (T *)p->out[i], part[i].rstd = (A *)p->rstd[i], part[i].heads = (int)p->heads[i];
        part[i].x = (const T *)p->x[i], part[i].weight = (const T *)p->weight[i];
        part[i].y_row = p->out_stride[i][0], part[i].y_head = p->out_stride[i][1];
        part[i].x_row = p->x_stride[i][0], part[i].x_head = p->x_stride[i][1];
    }
    const A inverse_dim = A(1) / (A)p->dim, eps = (A)p->eps;
    if (lanes && p->rows <= FEW_ROWS && half <= PAIRS) {
        for (int i = 0; i < 2; i++) part[i].blocks = xt_divide_up(xt_divide_up(p->heads[i], HEADS_FWD), THREADS / lanes);
        const dim3 grid((unsigned)(part[0].blocks + part[1].blocks), (unsigned)p->rows);
        const QkAngles<T> angles = {p->positions, where, rope_frequencies<A>(p->base, p->dim, 0, (int)half)};
        if (grid.x > 0)
            xt_launch_early(qk_fwd_kernel<T, N, QkAngles<T>>, grid, THREADS, 0, QkParts<T>{part[0], part[1]}, angles, p->rows, half,
                            lanes, inverse_dim, eps);
        return xt_launched("qk_norm_rope_fwd", p->rows, p->heads[0], p->heads[1], p->dim);
    }
    XtScratch scratch;
    XT_CHECK(scratch.allocate((size_t)(places * p->dim) * sizeof(T)));
    T *table = (T *)scratch.data;
    make_table<T>(table, p->positions, places, p->dim, p->base, false);
    if (lanes) {
        for (int i = 0; i < 2; i++) part[i].blocks = xt_divide_up(p->rows * xt_divide_up(p->heads[i], HEADS_FWD), THREADS / lanes);
        const int64_t blocks = part[0].blocks + part[1].blocks;
        if (blocks > 0)
            xt_launch_early(qk_fwd_kernel<T, N, QkTable<T>>, (unsigned)blocks, THREADS, 0, QkParts<T>{part[0], part[1]},
                            QkTable<T>{table, where}, p->rows, half, lanes, inverse_dim, eps);
    } else {
        for (int i = 0; i < 2; i++)
            xt_launch(qk_plain_kernel<T, false>, xt_blocks(p->rows * p->heads[i], THREADS / 32), THREADS, 0, part[i], table, where,
                      p->rows, half, inverse_dim, eps);
    }
    return xt_launched("qk_norm_rope_fwd", p->rows, p->heads[0], p->heads[1], p->dim);
}

XtStatus xt_cuda_qk_norm_rope_fwd(const XtQkNormRopeFwd *p) {
    if (p->rows == 0 || p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) { return forward<decltype(zero)>(p); });
}

template <typename T> static XtStatus backward(const XtQkNormRopeBwd *p) {
    using A = XtAcc<T>;
    constexpr int N = XT_WIDTH<T>;
    const int64_t half = p->dim / 2, places = places_of(p->positions, p->period, p->rows);
    const QkPlaces where = {places == p->rows, p->period};
    int lanes = lanes_for<T>(half);
    QkPart<T> part[2] = {};
    for (int i = 0; i < 2; i++) {
        if (!even<T>(p->x[i], p->x_stride[i]) || !even<T>(p->dout[i], p->dout_stride[i]) || !even<T>(p->dx[i], p->dx_stride[i]) ||
            (uintptr_t)p->weight[i] % 16)
            lanes = 0;
        part[i].y = (T *)p->dx[i], part[i].rstd = (A *)p->rstd[i], part[i].heads = (int)p->heads[i];
        part[i].x = (const T *)p->x[i], part[i].dout = (const T *)p->dout[i], part[i].weight = (const T *)p->weight[i];
        part[i].y_row = p->dx_stride[i][0], part[i].y_head = p->dx_stride[i][1];
        part[i].x_row = p->x_stride[i][0], part[i].x_head = p->x_stride[i][1];
        part[i].dout_row = p->dout_stride[i][0], part[i].dout_head = p->dout_stride[i][1];
    }
    const int64_t heads = p->heads[0] + p->heads[1], most = XT_PLAN_MULTIPROCESSORS * BLOCKS_BWD;
    for (int i = 0; i < 2; i++) {
        const int64_t items = p->rows * xt_divide_up(p->heads[i], HEADS_BWD),
                      wanted = lanes ? xt_divide_up(items, THREADS / lanes) : items;
        const int64_t queries = heads ? most * p->heads[0] / heads : 0, mine = i == 0 ? queries : most - queries;
        part[i].blocks = wanted < mine ? wanted : mine > 0 ? mine : wanted > 0;
    }
    XtScratch scratch;
    const size_t table_nbytes = ((size_t)(places * p->dim) * sizeof(T) + 255) / 256 * 256;
    XT_CHECK(scratch.allocate(table_nbytes + (size_t)((part[0].blocks + part[1].blocks) * p->dim) * sizeof(A)));
    T *table = (T *)scratch.data;
    A *share[2] = {(A *)((char *)scratch.data + table_nbytes)};
    share[1] = share[0] + part[0].blocks * p->dim;
    for (int i = 0; i < 2; i++) part[i].share = p->dweight[i] ? share[i] : nullptr;
    if (places > 0) make_table<T>(table, p->positions, places, p->dim, p->base, true);
    if (lanes) {
        const QkParts<T> parts = {part[0], part[1]};
        const int64_t blocks = part[0].blocks + part[1].blocks;
        if (blocks > 0)
            xt_launch_early(qk_bwd_kernel<T, N>, (unsigned)blocks, THREADS, 0, parts, table, where, p->rows, half, lanes,
                            A(1) / (A)p->dim);
    } else {
        for (int i = 0; i < 2; i++) {
            if (part[i].blocks == 0) continue;
            xt_launch(qk_plain_kernel<T, true>, xt_blocks(p->rows * p->heads[i], THREADS / 32), THREADS, 0, part[i], table, where,
                      p->rows, half, A(1) / (A)p->dim, A(0));
            if (part[i].share)
                xt_launch(qk_share_kernel<T>, dim3(xt_blocks(half, THREADS), (unsigned)part[i].blocks), THREADS, 0, part[i], table,
                          where, p->rows, half);
        }
    }
    const XtShares<T> sums = {{(T *)p->dweight[0], (T *)p->dweight[1]},
                              {share[0], share[1]},
                              {part[0].blocks, part[1].blocks},
                              {p->accumulate[0], p->accumulate[1]}};
    if (p->dweight[0] && p->dweight[0] == p->dweight[1]) { /* one weight for both: one sum after the other */
        xt_sum_shares(sums, 1, p->dim);
        const XtShares<T> second = {{(T *)p->dweight[1]}, {share[1]}, {part[1].blocks}, {p->accumulate[1]}};
        xt_sum_shares(second, 1, p->dim);
    } else if (p->dweight[0] || p->dweight[1]) xt_sum_shares(sums, 2, p->dim);
    return xt_launched("qk_norm_rope_bwd", p->rows, p->heads[0], p->heads[1], p->dim);
}

XtStatus xt_cuda_qk_norm_rope_bwd(const XtQkNormRopeBwd *p) {
    if (p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) { return backward<decltype(zero)>(p); });
}
