/* rope.cu - rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split form.
 *
 *     a = x[:D/2], b = x[D/2:], angle_i = pos theta^(-2i/D):   out = (a cos - b sin,  b cos + a sin)
 *
 * x and out [rows, heads, D] with strides (row, head, 1). A rotation is orthogonal, so the backward turns dy by -angle: `inverse`.
 *
 * Plan: a line is the D elements of one head of one row. A block has a tile of consecutive lines, which are close in memory. A
 * thread has 16 bytes of a (8 pairs in bfloat16) and the matching 16 bytes of b of ITEMS lines. It loads them all while the block
 * computes the cosines and sines of the tile's rows, each once, in shared memory. There are many more tiles than resident blocks,
 * so no multiprocessor waits long for the last tile. A block is (pieces of a line) x (lines).
 * Moved: every element once in and once out; one launch, no scratch memory, no table in global memory. It begins early (overlap.cuh).
 *
 * Frequencies: rope.cuh.
 */
#include "arch/overlap.cuh"
#include "common/divide.cuh"
#include "common/rope.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256;
static constexpr int ITEMS = 4;                /* lines of a thread in flight together */
static constexpr int BLOCKS = 4;               /* that fit in a multiprocessor by their registers */
static constexpr int64_t MOST_HEADS = 1 << 30; /* of one launch */

/* out, x [rows, heads, D], lines = rows heads; pairs [first, first + count) of D/2 = half, blockDim.x N = count. The next line of a
 * thread is blockDim.y = step_rows heads + step_heads further. table [2, table_rows, count]: cosines, sines. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    rope_kernel(T *out, const T *x, const int64_t *positions, int64_t lines, XtDivider by_heads, int64_t half, int64_t first,
                XtDivider by_count, int table_rows, int step_rows, int step_heads, int64_t out_row, int64_t out_head, int64_t x_row,
                int64_t x_head, int64_t period, bool inverse, const __grid_constant__ RopeFrequencies<XtAcc<T>> frequency) {
    using A = XtAcc<T>;
    extern __shared__ uint4 table[];
    xt_wait_for_previous();
    xt_let_next_begin();
    const int heads = (int)by_heads.divisor, count = (int)by_count.divisor;
    T *cosines = (T *)table, *sines = cosines + table_rows * count;
    const int down = blockDim.y, piece = threadIdx.x * N; /* pairs [piece, piece + N) of count */
    for (int64_t start = (int64_t)blockIdx.x * (ITEMS * down); start < lines; start += (int64_t)gridDim.x * (ITEMS * down)) {
        const int here = (int)(lines - start < ITEMS * down ? lines - start : ITEMS * down);
        const int64_t start_row = quotient(start, heads);
        const int start_head = (int)(start - start_row * heads);
        const int my_row = (int)xt_quotient(start_head + threadIdx.y, by_heads); /* from start_row */
        const int my_head = start_head + (int)threadIdx.y - my_row * heads;
        XtPiece<T, N> a[ITEMS], b[ITEMS];
        int row = my_row, head = my_head;
        const T *from = x + start_row * x_row + (first + piece);
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            if ((int)threadIdx.y + k * down < here) {
                a[k] = xt_read<T, N>(from + row * x_row + head * x_head);
                b[k] = xt_read<T, N>(from + row * x_row + head * x_head + half);
            }
            row += step_rows;
            head += step_heads;
            if (head >= heads) head -= heads, row++;
        }
        const int entries = (int)(xt_quotient(start_head + here - 1, by_heads) + 1) * count;
        const int64_t start_place = positions ? 0 : start_row - quotient(start_row, period) * period;
#pragma unroll 1
        for (int e = threadIdx.y * blockDim.x + threadIdx.x; e < entries; e += blockDim.x * down) {
            const int r = (int)xt_quotient(e, by_count);
            int64_t place = positions ? positions[start_row + r] : start_place + r;
            if (!positions && place >= period) place -= quotient(place, period) * period; /* the tile goes on in the next batch */
            A sine, cosine;
            sine_cosine(angle_of((A)place, frequency.at[e - r * count]), &sine, &cosine);
            cosines[e] = xt_store<T>(cosine);
            sines[e] = xt_store<T>(inverse ? -sine : sine);
        }
        __syncthreads(); /* the table is complete */
        row = my_row;
        head = my_head;
        T *to = out + start_row * out_row + (first + piece);
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            if ((int)threadIdx.y + k * down < here) {
                XtVector<A, N> turned_a, turned_b, of_a = xt_load(a[k]), of_b = xt_load(b[k]);
                const XtVector<A, N> c = xt_load(xt_read<T, N>(cosines + row * count + piece));
                const XtVector<A, N> s = xt_load(xt_read<T, N>(sines + row * count + piece));
#pragma unroll
                for (int e = 0; e < N; e++) {
                    turned_a.at[e] = of_a.at[e] * c.at[e] - of_b.at[e] * s.at[e];
                    turned_b.at[e] = of_b.at[e] * c.at[e] + of_a.at[e] * s.at[e];
                }
                xt_write(to + row * out_row + head * out_head, xt_store<T>(turned_a));
                xt_write(to + row * out_row + head * out_head + half, xt_store<T>(turned_b));
            }
            row += step_rows;
            head += step_heads;
            if (head >= heads) head -= heads, row++;
        }
        __syncthreads(); /* every thread has read the table: the next tile may overwrite it */
    }
}

/* Heads [head, head + heads). */
template <typename T, int N> static void launch(const XtRope *p, int64_t head, int64_t heads) {
    using A = XtAcc<T>;
    const int64_t half = p->dim / 2, lines = p->rows * heads;
    for (int64_t first = 0; first < half; first += PAIRS) {
        int count = (int)(half - first < PAIRS ? half - first : PAIRS);
        const RopeFrequencies<A> frequency = rope_frequencies<A>(p->base, p->dim, first, count);
        const int across = count / N, down = THREADS / across; /* N divides count, and count / N <= THREADS */
        const int64_t tile = ITEMS * down, most = lines < tile ? lines : tile;
        /* A tile may begin in the middle of a row. At most `most` rows, so 32 bytes for each piece of the tile. */
        const int64_t table_rows = tile % heads == 0 ? tile / heads : (most + heads - 2) / heads + 1;
        xt_launch_early(rope_kernel<T, N>, xt_blocks(lines, tile), dim3(across, down), (size_t)(2 * table_rows * count) * sizeof(T),
                        (T *)p->out + head * p->out_stride[1], (const T *)p->x + head * p->x_stride[1], p->positions, lines,
                        xt_divider((uint32_t)heads), half, first, xt_divider((uint32_t)count), table_rows, down / heads,
                        down % heads, p->out_stride[0], p->out_stride[1], p->x_stride[0], p->x_stride[1], p->period, p->inverse,
                        frequency);
    }
}

XtStatus xt_cuda_rope(const XtRope *p) {
    if (p->rows == 0 || p->heads == 0 || p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        int64_t half = p->dim / 2;
        bool aligned = xt_aligned<T>(half, p->x_stride[0], p->x, p->out) && xt_aligned<T>(p->x_stride[1], p->out_stride[0]) &&
                       p->out_stride[1] % N == 0;
        for (int64_t head = 0; head < p->heads; head += MOST_HEADS) {
            int64_t heads = p->heads - head < MOST_HEADS ? p->heads - head : MOST_HEADS;
            if (aligned) launch<T, N>(p, head, heads);
            else launch<T, 1>(p, head, heads);
        }
        return xt_launched("rope", p->rows, p->heads, p->dim);
    });
}
