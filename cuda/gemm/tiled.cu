/* tiled.cu - C = alpha op(A) op(B) + beta C in tiles, without tensor cores or a library.
 *
 * op(A) [M, K], op(B) [K, N], C [M, N], for each of batch0 x batch1 matrices.
 *
 * Why tiles, twice. A block of 16 x 16 threads makes TILE x TILE elements of C. It walks along K in steps of DEPTH, and copies a
 * TILE x DEPTH piece of op(A) and a DEPTH x TILE piece of op(B) to shared memory: each element that comes from memory is used TILE
 * times. Within the block each thread makes EACH x EACH elements in registers (TILE = 16 EACH): each value that comes from shared
 * memory is used EACH times. With EACH = 8 the threads multiply more than they load: arithmetic limits the kernel.
 *
 * Transposes. Neighbouring threads copy neighbouring elements of memory, whichever way the operand lies; the piece always lands in
 * shared memory as [DEPTH][TILE], in ACC. So one inner loop serves every transpose and dtype, and nothing is rewritten in memory.
 *
 * Latency. There are two buffers. While the threads multiply from one, they load the elements of the next step to registers, and
 * then store them in the other. One barrier a step.
 *
 * Memory: A is read N / TILE times and B M / TILE times, mostly from the L2 cache; C is written once, and read when beta != 0.
 * Deterministic: an element of C is one chain of additions over k from 0 upwards, whatever the tile and the batch.
 */
#include "gemm.cuh"

#define SIDE 16 /* threads along each side of a block */
#define THREADS (SIDE * SIDE)

/* What one thread copies of each piece: elements at (i, k), (i + di, k + dk), ..., i along the tile and k along K. */
template <typename T> struct Share {
    const T *x;       /* the first of them, at the current step */
    int64_t next;     /* from one of them to the next */
    int64_t along_k;  /* from a step to the following one */
    int i, k, di, dk; /* positions in the piece */
};

/* x points at the piece of the first step; its element (i, k) is x[i * step_i + k * step_k], and one of the steps is 1. */
template <int TILE, int DEPTH, typename T> __device__ inline Share<T> get_share(const T *x, int64_t step_i, int64_t step_k) {
    int thread = threadIdx.y * SIDE + threadIdx.x;
    bool k_first = step_k == 1; /* neighbours in memory lie along K */
    Share<T> s;
    s.i = k_first ? thread / DEPTH : thread % TILE;
    s.k = k_first ? thread % DEPTH : thread / TILE;
    s.di = k_first ? THREADS / DEPTH : 0;
    s.dk = k_first ? 0 : THREADS / TILE;
    s.x = x + s.i * step_i + s.k * step_k;
    s.next = s.di * step_i + s.dk * step_k;
    s.along_k = DEPTH * step_k;
    return s;
}

/* The thread's elements of a step, zeros outside the matrix: `rows` of the tile lie inside it, and `depth` of what is left of K. */
template <int COUNT, typename T>
__device__ inline void fetch(XtAcc<T> (&value)[COUNT], const Share<T> *s, int rows, int64_t depth) {
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
        bool inside = s->i + q * s->di < rows && s->k + q * s->dk < depth;
        value[q] = inside ? xt_load(s->x[q * s->next]) : XtAcc<T>(0);
    }
}

/* piece [DEPTH][LD] */
template <int LD, int COUNT, typename T>
__device__ inline void deposit(XtAcc<T> (*piece)[LD], const XtAcc<T> (&value)[COUNT], const Share<T> *s) {
#pragma unroll
    for (int q = 0; q < COUNT; q++) piece[s->k + q * s->dk][s->i + q * s->di] = value[q];
}

/* A thread's EACH rows (and columns) of the tile come in groups of GROUP neighbours, one access of shared memory each; the groups
 * of the 16 threads lie side by side. */
template <int GROUP> __device__ inline int place(int thread, int i) {
    return i / GROUP * (SIDE * GROUP) + thread * GROUP + i % GROUP;
}

template <typename T, typename C, int EACH>
__global__ void __launch_bounds__(THREADS, EACH == 8 ? 2 : 3) gemm_tiled_kernel(XtGemm p) { // A and B of T
    typedef XtAcc<T> ACC;
    constexpr int TILE = SIDE * EACH, DEPTH = EACH == 8 ? 8 : 16, COUNT = TILE * DEPTH / THREADS;
    constexpr int GROUP = EACH < XT_WIDTH<ACC> ? EACH : XT_WIDTH<ACC>, GROUPS = EACH / GROUP;
    constexpr int LD = TILE + XT_WIDTH<ACC>; /* rows of shared memory start 16 bytes apart in the banks, and stay aligned */
    typedef XtVector<ACC, GROUP> Group;
    __shared__ alignas(16) ACC a_piece[2][DEPTH][LD], b_piece[2][DEPTH][LD];

    int64_t a_m = p.trans_a ? 1 : p.lda, a_k = p.trans_a ? p.lda : 1; /* steps in A along m and k */
    int64_t b_k = p.trans_b ? 1 : p.ldb, b_n = p.trans_b ? p.ldb : 1;
    int64_t tiles_n = (p.n + TILE - 1) / TILE, tiles = (p.m + TILE - 1) / TILE * tiles_n;
    int64_t items = p.batch[0] * p.batch[1] * tiles;
    int64_t item = blockIdx.x + (int64_t)blockIdx.y * gridDim.x;
    if (item >= items) return;
    XtGemmOffsets at = xt_gemm_offsets(&p, item / tiles);
    int64_t m = item % tiles / tiles_n * TILE, n = item % tiles_n * TILE;
    Share<T> a = get_share<TILE, DEPTH>((const T *)p.a + at.a + m * a_m, a_m, a_k);
    Share<T> b = get_share<TILE, DEPTH>((const T *)p.b + at.b + n * b_n, b_n, b_k);

    C *c = (C *)p.c + at.c + m * p.ldc + n; /* [rows, cols] */
    int rows = (int)(p.m - m < TILE ? p.m - m : TILE), cols = (int)(p.n - n < TILE ? p.n - n : TILE);

    ACC sum[EACH][EACH] = {}, a_next[COUNT], b_next[COUNT];
    fetch<COUNT>(a_next, &a, rows, p.k);
    fetch<COUNT>(b_next, &b, cols, p.k);
    deposit<LD, COUNT>(a_piece[0], a_next, &a);
    deposit<LD, COUNT>(b_piece[0], b_next, &b);
    __syncthreads();
    int now = 0;
    for (int64_t left = p.k; left > 0; left -= DEPTH) {
        bool more = left > DEPTH;
        if (more) {
            a.x += a.along_k, b.x += b.along_k;
            fetch<COUNT>(a_next, &a, rows, left - DEPTH);
            fetch<COUNT>(b_next, &b, cols, left - DEPTH);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Group row[GROUPS], col[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                row[g] = *(const Group *)&a_piece[now][k][place<GROUP>(threadIdx.y, g * GROUP)];
                col[g] = *(const Group *)&b_piece[now][k][place<GROUP>(threadIdx.x, g * GROUP)];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += row[i / GROUP].at[i % GROUP] * col[j / GROUP].at[j % GROUP];
        }
        now ^= 1;
        if (more) { /* no thread reads this buffer any more: the last step's barrier has passed */
            deposit<LD, COUNT>(a_piece[now], a_next, &a);
            deposit<LD, COUNT>(b_piece[now], b_next, &b);
        }
        __syncthreads(); /* the next buffer is filled, and this one may be overwritten */
    }

    ACC alpha = (ACC)p.alpha, beta = (ACC)p.beta;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int row = place<GROUP>(threadIdx.y, i), col = place<GROUP>(threadIdx.x, j);
            if (row >= rows || col >= cols) continue;
            C *element = c + row * p.ldc + col;
            ACC value = alpha * sum[i][j];
            *element = xt_store<C>(beta == 0 ? value : value + beta * xt_load(*element));
        }
    }
}

static int64_t count_tiles(const XtGemm *p, int64_t tile) {
    return p->batch[0] * p->batch[1] * xt_divide_up(p->m, tile) * xt_divide_up(p->n, tile);
}

template <typename T, typename C, int EACH> static XtStatus run(const XtGemm *p) {
    int64_t tiles = count_tiles(p, SIDE * EACH);
    unsigned across = xt_blocks(tiles, 1); /* more tiles than fit there go along y */
    xt_launch(gemm_tiled_kernel<T, C, EACH>, dim3(across, (unsigned)xt_divide_up(tiles, across)), dim3(SIDE, SIDE), 0, *p);
    return xt_launched("gemm_tiled", p->batch[0], p->batch[1], p->m, p->n, p->k);
}

/* The largest tile that still gives every multiprocessor a tile. The bits of C do not depend on it. */
XtStatus xt_cuda_gemm_tiled(const XtGemm *p) {
    XtStatus status;
    if (xt_cuda_gemm_trivial(p, &status)) return status;
    int enough = xt_multiprocessors();
    return xt_by_gemm_dtypes(p, [&](auto a, auto c) {
        using T = decltype(a);
        using C = decltype(c);
        if constexpr (sizeof(T) < 8) /* 8 x 8 sums of float64 do not fit in the registers */
            if (count_tiles(p, SIDE * 8) >= enough) return run<T, C, 8>(p);
        return count_tiles(p, SIDE * 4) >= enough ? run<T, C, 4>(p) : run<T, C, 2>(p);
    });
}
