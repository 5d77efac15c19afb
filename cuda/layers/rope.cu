/* rope.cu - rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split form.
 *
 *     a = x[:D/2], b = x[D/2:], angle_i = pos theta^(-2i/D):   out = (a cos - b sin,  b cos + a sin)
 *
 * x and out [rows, heads, D] with strides (row, head, 1). A rotation is orthogonal, so the backward turns dy by -angle: `inverse`.
 *
 * Rows plan (rope_rows_kernel), for 16 bits, a multiple of four heads, and a power of two of pieces: a thread has four heads of a row.
 *
 * Tile plan, for all others, with the same bits: a line is the D elements of one head of one row. A block has a tile of consecutive
 * lines, which are close in memory. A thread has 16 bytes of a (4 pairs in float32) and the matching 16 bytes of b of ITEMS lines. It
 * loads them all while the block computes the cosines and sines of the tile's rows, each once, in shared memory. There are many more
 * tiles than resident blocks, so no multiprocessor waits long for the last tile. A block is (pieces of a line) x (lines).
 *
 * Moved: every element once in and once out; one launch, no scratch memory, no table in global memory. It begins early (overlap.cuh).
 *
 * Frequencies: rope.cuh.
 */
#include "arch/overlap.cuh"
#include "common/divide.cuh"
#include "common/rope.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256;
static constexpr int ITEMS = 4;                  /* lines of a thread in flight together */
static constexpr int BLOCKS = 4;                 /* that fit in a multiprocessor by their registers */
static constexpr int HEADS = 4, BLOCKS_ROWS = 3; /* of the rows plan: heads of a thread, blocks that fit by their registers */
static constexpr int64_t MOST_HEADS = 1 << 30;   /* of one launch */

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

/* Rows plan, for 16-bit types: a thread has HEADS heads of one row, 2^log_across threads a line. S threads of a warp have the same piece of the
 * same row; each makes N / S of its angles and gets the others by shuffles. No barrier, no shared memory. Same bits. */
template <typename T, int N, int S>
__global__ void __launch_bounds__(THREADS, BLOCKS_ROWS)
    rope_rows_kernel(T *out, const T *x, const int64_t *positions, uint32_t items, XtDivider by_chunks, int half, int log_across,
                     int64_t out_row, int64_t out_head, int64_t x_row, int64_t x_head, uint32_t period, bool inverse,
                     const __grid_constant__ RopeFrequencies<XtAcc<T>> frequency) {
    using A = XtAcc<T>;
    constexpr int MINE = N / S;
    const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, item = thread >> log_across;
    const bool here = item < items;
    const int piece = (int)(thread & ((1u << log_across) - 1)) * N, member = (int)(item % S);
    const uint32_t row = here ? xt_quotient(item, by_chunks) : 0, chunk = item - row * by_chunks.divisor;
    const int64_t head = here ? (int64_t)chunk * HEADS : 0;
    xt_wait_for_previous();
    xt_let_next_begin();
    XtPiece<T, N> v[HEADS][2];
    const T *from = x + row * x_row + head * x_head + piece;
    if (here) {
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            v[k][0] = xt_read<T, N>(from + k * x_head);
            v[k][1] = xt_read<T, N>(from + k * x_head + half);
        }
    }
    const A place = (A)(positions ? positions[row] : (int64_t)(row % period));
    XtVector<A, MINE> cosines, sines;
    const int mine = piece + member * MINE;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        sine_cosine(angle_of(place, frequency.at[mine + i]), &sines.at[i], &cosines.at[i]);
        if (inverse) sines.at[i] = -sines.at[i];
    }
    XtPiece<T, N> c, s;
    const int first = (int)threadIdx.x % 32 - (member << log_across);
    if constexpr (S == 1) c = xt_store<T>(cosines), s = xt_store<T>(sines);
    else if constexpr (MINE > 1) {
        const XtPiece<T, MINE> own_c = xt_store<T>(cosines), own_s = xt_store<T>(sines);
#pragma unroll
        for (int m = 0; m < S; m++) {
#pragma unroll
            for (int w = 0; w < MINE / 2; w++) {
                c.word[m * (MINE / 2) + w] = __shfl_sync(0xffffffffu, own_c.word[w], first + (m << log_across));
                s.word[m * (MINE / 2) + w] = __shfl_sync(0xffffffffu, own_s.word[w], first + (m << log_across));
            }
        }
    } else {
        XtVector<A, 2> both = {cosines.at[0], sines.at[0]};
        const XtPiece<T, 2> own = xt_store<T>(both);
#pragma unroll
        for (int m = 0; m < S; m += 2) {
            const uint32_t even = __shfl_sync(0xffffffffu, own.word[0], first + (m << log_across));
            const uint32_t odd = __shfl_sync(0xffffffffu, own.word[0], first + ((m + 1) << log_across));
            c.word[m / 2] = __byte_perm(even, odd, 0x5410);
            s.word[m / 2] = __byte_perm(even, odd, 0x7632);
        }
    }
    if (!here) return;
    T *to = out + row * out_row + head * out_head + piece;
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        turn<T, N>(v[k], c, s);
        xt_write(to + k * out_head, v[k][0]);
        xt_write(to + k * out_head + half, v[k][1]);
    }
}

/* False: the shape or its strides need the other plan. */
template <typename T, int N> static bool launch_rows(const XtRope *p) {
    const int64_t half = p->dim / 2, across = half / N, chunks = p->heads / HEADS, items = p->rows * chunks;
    if (p->heads % HEADS || across > 32 || (across & (across - 1)) || items * across >= (int64_t)1 << 31) return false;
    if (p->period >= (int64_t)1 << 31) return false;
    int log_across = 0, share = 1;
    while (1 << log_across < across) log_across++;
    while (share < N && 2 * share * across <= 32 && chunks % (2 * share) == 0) share *= 2;
    const RopeFrequencies<XtAcc<T>> frequency = rope_frequencies<XtAcc<T>>(p->base, p->dim, 0, (int)half);
    const auto go = [&](auto kernel) {
        xt_launch_early(kernel, xt_blocks(items * across, THREADS), THREADS, 0, (T *)p->out, (const T *)p->x, p->positions, items,
                        xt_divider((uint32_t)chunks), half, log_across, p->out_stride[0], p->out_stride[1], p->x_stride[0],
                        p->x_stride[1], p->period, p->inverse, frequency);
    };
    if (share == 1) go(rope_rows_kernel<T, N, 1>);
    else if (share == 2) go(rope_rows_kernel<T, N, 2>);
    else if (share == 4) go(rope_rows_kernel<T, N, 4>);
    else go(rope_rows_kernel<T, N, 8>);
    return true;
}

XtStatus xt_cuda_rope(const XtRope *p) {
    if (p->rows == 0 || p->heads == 0 || p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        int64_t half = p->dim / 2;
        bool aligned = xt_aligned<T>(half, p->x_stride[0], p->x, p->out) && xt_aligned<T>(p->x_stride[1], p->out_stride[0]) &&
                       p->out_stride[1] % N == 0;
        if constexpr (sizeof(T) == 2) {
            if (aligned && launch_rows<T, N>(p)) return xt_launched("rope", p->rows, p->heads, p->dim);
        }
        for (int64_t head = 0; head < p->heads; head += MOST_HEADS) {
            int64_t heads = p->heads - head < MOST_HEADS ? p->heads - head : MOST_HEADS;
            if (aligned) launch<T, N>(p, head, heads);
            else launch<T, 1>(p, head, heads);
        }
        return xt_launched("rope", p->rows, p->heads, p->dim);
    });
}
