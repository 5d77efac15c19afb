/* reduce.cu - sum, mean, max, min, argmax over the last dimensions of a view of any strides.
 *
 *     out[k] = reduce over i of x[k, i],  k < kept, i < n (both row-major numbers over the dims of a view)
 *
 * The order of additions is a function of n alone, whichever kernel runs and whatever the strides are:
 *
 *     group     XT_GROUP = 16 bytes of neighbouring elements, added in a tree in float32 (integers exactly)
 *     lane      lane l of 32 adds groups l, l + 32, l + 64, ... of a segment in float64
 *     segment   1024 or 2048 elements: 32 lanes in a tree
 *     chunk     all segments if there are at most 64, else 8 or more of them: segments s, s + 8, s + 16, ... for each s < 8, then
 *               a tree over s
 *     result    up to about 8192 chunks: the same with 32 or 1024 instead of 8
 *
 * So 1e8 float32 of one sign are summed to the last digit. Lanes without a group hold 0, which changes no sum: where n is small,
 * 8 lanes do the work of 32. Two plans read x:
 *
 *   - rows:     a warp per segment (8 lanes for a short row), or a block per chunk with a warp per segment. A group is one load
 *               if aligned; four are in flight. Few registers leave room for many warps, which hide the rest of the latency.
 *               Chunks are small, so that the last block of a multiprocessor ends soon after the others.
 *   - columns:  reduced dims strided, kept dim dense. Neighbouring threads hold 16 bytes of columns each; the 32 (or 8) lanes of a
 *               column hold its rows. A group is XT_GROUP rows. There are registers for few warps only, so the next rows are loaded
 *               while the last ones are added. The lanes meet in shared memory. Where 16 bytes cannot be read at once, a thread has
 *               one column at a time. On Hopper, sums of columns of 16 bits in more than one segment come by the copy engine, so that
 *               memory is busy while lanes meet.
 *
 * On Hopper, sums of dense float32 or 16-bit rows of several chunks, where each block has several, come by the copy engine into a ring of
 * each warp (sum_ring_kernel).
 *
 * Rows that need more leave partial results (16 bytes per 1024 elements at least) for one or two more launches. MAX, MIN and ARGMAX
 * are one kernel: MIN reverses the order of the elements (-x, ~x), and the position costs little. Memory bandwidth limits all of
 * them, so the dtypes of a class (reduce.cuh) and the five reductions share kernels: few instantiations compile quickly.
 * Bytes moved: x once, out once. No atomics.
 */
#include "arch/overlap.cuh"
#include "arch/warp_ring.cuh"
#include "contract/reduce.h"
#include "reduce_job.cuh"

/* ---- rows -------------------------------------------------------------------------------------------------------------------- */

/* Reduces elements first .. first + length of the row at x by p.lanes neighbouring threads, each of which gets the result. */
template <typename C, int OP, bool LINE>
__device__ inline ReducePartial<ReduceHeld<C>> reduce_segment(const ReduceJob &p, const char *x, int64_t first, int length,
                                                              int lane) {
    constexpr int GROUP = XT_GROUP<C>, AHEAD = LINE ? 4 : 2;
    const int step = p.lanes * GROUP;
    ReduceLane<C> s;
    lane_begin(&s, lane * GROUP < length ? lane * GROUP : NONE);
    if (LINE || p.vector) { /* length is a multiple of GROUP */
        for (int i = lane * GROUP; i < length; i += AHEAD * step) {
            XtPiece<C, GROUP> raw[AHEAD];
            int64_t offset[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) offset[a] = first + i + a * step;
            if (!LINE) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++)
                    if (i + a * step < length) offset[a] = reduced_offset(p, offset[a]);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (i + a * step < length) raw[a] = xt_fetch<C, GROUP>(xt_element<C>(x, offset[a], p.format), p.format);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (i + a * step >= length) break;
                XtClassValue<C> v[GROUP];
                unpack_group<C>(v, raw[a], p.format);
                lane_take<C, OP>(&s, v, i + a * step, GROUP, p.sign);
            }
        }
    } else {
        for (int i = lane * GROUP; i < length; i += step) take_singly<C, OP>(&s, p, x, first + i, i, length - i);
    }
    ReducePartial<ReduceHeld<C>> r = {lane_value<C, OP>(&s), s.at == NONE ? INT64_MAX : first + s.at};
    return join_lanes<OP>(r, p.lanes);
}

template <typename C, int OP, bool LINE>
__global__ void __launch_bounds__(THREADS, ROW_BLOCKS<C, LINE>) reduce_rows_kernel(const __grid_constant__ ReduceJob p) {
    typedef ReduceHeld<C> H;
    typedef ReducePartial<H> Partial;
    __shared__ H value[WARPS];
    __shared__ int64_t index[WARPS];
    const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32, lane = in_warp % p.lanes, warps = blockDim.x / 32;
    /* A team is a block, or p.lanes of its threads, and reduces one part of a kept element. A warp runs as one: `start` is the kept
     * element of its first lanes. */
    const int parts = gridDim.y, part = blockIdx.y;
    const int teams = p.chunked ? 1 : THREADS / p.lanes, of_warp = p.chunked ? 0 : 32 / p.lanes;
    for (int64_t start = (int64_t)blockIdx.x * teams + warp * of_warp; start < p.kept.numel; start += (int64_t)gridDim.x * teams) {
        const int64_t mine = start + (p.chunked ? 0 : in_warp / p.lanes);
        const bool here = mine < p.kept.numel;
        const int64_t kept = here ? mine : 0;
        const char *row = xt_element<C>(p.x, xt_walk_offset<0>(p.kept, kept), p.format);
        int segment = part, end = part + 1;
        if (p.chunked) {
            segment *= p.chunk;
            end = segment + p.chunk < p.segments ? segment + p.chunk : p.segments;
            segment += warp;
        }
        Partial r = partial_none<OP, H>();
        for (; segment < end; segment += warps)
            r = join<OP>(
                r, reduce_segment<C, OP, LINE>(p, row, (int64_t)segment * p.segment, here ? segment_length(p, segment) : 0, lane));
        if (p.chunked) {
            if (in_warp == 0) value[warp] = r.value, index[warp] = r.index;
            __syncthreads(); /* all warps are there */
            r = lane < warps ? Partial{value[lane], index[lane]} : partial_none<OP, H>();
            if (warp == 0) r = join_lanes<OP>(r, WARPS);
            __syncthreads(); /* and may be overwritten */
        }
        if (here && lane == 0 && !(p.chunked && warp > 0)) keep<OP>(p, p.partials, kept * parts + part, kept, r);
    }
}

/* ---- rows by a ring, on Hopper -------------------------------------------------------------------------------------------------- */

/* Sums, with the bits of the kernel above: a block takes chunks in turns, and its warps have the same segments. But a segment comes to
 * the ring of its warp, and the next segments are on their way while lanes and warps meet: memory is not idle then, nor while one block
 * ends and the next begins. */
static constexpr int RING_BLOCKS = 2; /* of a multiprocessor */
typedef XtRowRing<8, 1, WARPS, RING_BLOCKS> SegmentRing;

template <typename C> __global__ void __launch_bounds__(THREADS, RING_BLOCKS) sum_ring_kernel(const __grid_constant__ ReduceJob p) {
#ifdef XT_SM90A
    constexpr int GROUP = XT_GROUP<C>, LOADS = 8, TURN_LENGTH = SegmentRing::SLOT / (int)sizeof(C); /* elements of a stage */
    static_assert(LOADS * 32 * GROUP == TURN_LENGTH, "a stage is read at once");
    typedef ReducePartial<double> Partial;
    extern __shared__ __align__(16) char segments[];
    __shared__ double value[2][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t all = p.kept.numel * p.chunks;
    SegmentRing ring(segments);
    auto end_of = [&](int part) { return part * p.chunk + p.chunk < p.segments ? part * p.chunk + p.chunk : p.segments; };
    xt_wait_for_previous();
    xt_let_next_begin();
    /* What to bring next: from element `at` of a segment of `length`. */
    int64_t next = (int64_t)blockIdx.x - gridDim.x;
    int segment = 0, end = 0, at = 0, length = 0;
    const C *row = NULL;
    auto bring = [&](int stage) {
        while (at >= length) { /* the next segment of this warp */
            segment += WARPS;
            if (segment >= end) {
                if (next >= all - (int64_t)gridDim.x) {
                    segment = end;
                    return;
                }
                next += gridDim.x;
                int64_t part;
                const int64_t kept = divide(next, p.chunks, &part);
                row = (const C *)p.x + xt_walk_offset<0>(p.kept, kept);
                end = end_of((int)part);
                segment = (int)part * p.chunk + warp;
                if (segment >= end) continue;
            }
            at = 0;
            length = segment_length(p, segment);
        }
        const int count = length - at < TURN_LENGTH ? length - at : TURN_LENGTH;
        ring.fill(stage, {{row + (int64_t)segment * p.segment + at}}, count * (int)sizeof(C));
        at += TURN_LENGTH;
    };
#pragma unroll 1
    for (int s = 0; s < SegmentRing::STAGES; s++) bring(s);
    int turn = 0; /* of `value`: while a warp reads one, the others write the other */
    for (int64_t item = blockIdx.x; item < all; item += gridDim.x, turn ^= 1) {
        int64_t part;
        const int64_t kept = divide(item, p.chunks, &part);
        const int last = end_of((int)part);
        Partial r = partial_none<SUM, double>();
        for (int mine = (int)part * p.chunk + warp; mine < last; mine += WARPS) {
            const int elements = segment_length(p, mine);
            ReduceLane<C> s;
            lane_begin(&s, NONE);
#pragma unroll 1
            for (int from = 0; from < elements; from += TURN_LENGTH) {
                const int left = elements - from - lane * GROUP;
                XtPiece<C, GROUP> raw[LOADS];
                ring.wait();
                const C *data = (const C *)ring.data() + lane * GROUP;
#pragma unroll
                for (int u = 0; u < LOADS; u++)
                    raw[u] = u * 32 * GROUP < left ? xt_read<C, GROUP>(data + u * 32 * GROUP) : xt_all<C, GROUP>(0);
                xt_have(raw);
                __syncwarp(); /* every lane has read */
                bring(ring.stage);
                ring.advance();
#pragma unroll
                for (int u = 0; u < LOADS; u++) {
                    if (u * 32 * GROUP >= left) break;
                    XtClassValue<C> v[GROUP];
                    unpack_group<C>(v, raw[u], p.format);
                    lane_take<C, SUM>(&s, v, 0, GROUP, 1);
                }
            }
            r = join<SUM>(r, join_lanes<SUM>(Partial{lane_value<C, SUM>(&s), 0}, 32));
        }
        if (lane == 0) value[turn][warp] = r.value;
        __syncthreads(); /* all warps are there; a cell is overwritten after the next such barrier */
        if (warp == 0) {
            r = lane < WARPS ? Partial{value[turn][lane], 0} : partial_none<SUM, double>();
            r = join_lanes<SUM>(r, WARPS);
            if (lane == 0) keep<SUM>(p, p.partials, item, kept, r);
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- columns ----------------------------------------------------------------------------------------------------------------- */

/* What the lanes of a tile have, in value[lane * (cols + 1) + column] (EXTREME: and position), becomes results of `width` columns from
 * element `kept` on. All threads call it; on return the cells may be overwritten. */
template <int OP, typename H>
__device__ inline void keep_tile(const ReduceJob &p, H *value, int *position, int lanes, int cols, int width, int segment,
                                 int64_t kept) {
    typedef ReducePartial<H> Partial;
    const int64_t first = (int64_t)segment * p.segment;
    __syncthreads(); /* every lane is written */
    /* Four threads a column: thread q takes lanes q, q + 4, ... from the top of the tree down. */
    for (int i = threadIdx.x; i < 4 * cols; i += THREADS) {
        const int q = i % 4, c = i / 4;
        Partial r[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k >= lanes / 4) break;
            const int cell = (q + 4 * k) * (cols + 1) + c, at = OP == EXTREME ? position[cell] : NONE;
            r[k] = {value[cell], at == NONE ? INT64_MAX : first + at};
        }
        if (lanes == 32) join_tree<OP, 8>(r);
        else join_tree<OP, 2>(r);
        r[0] = join_lanes<OP>(r[0], 4);
        if (q == 0) { /* in a cell that no other thread reads */
            value[c] = r[0].value;
            if (OP == EXTREME) position[c] = r[0].index == INT64_MAX ? NONE : (int)(r[0].index - first);
        }
    }
    __syncthreads(); /* every column is written */
    for (int c = threadIdx.x; c < width; c += THREADS) {
        const int at = OP == EXTREME ? position[c] : NONE;
        keep<OP>(p, p.partials, (kept + c) * p.segments + segment, kept + c,
                 Partial{value[c], at == NONE ? INT64_MAX : first + at});
    }
    __syncthreads(); /* every column is read: the next tile may overwrite it */
}

/* The block has THREADS / lanes threads side by side with GROUP columns each, or 32 with one column and several lanes each. */
template <typename C, int OP, bool LINE> __device__ inline void reduce_tile(const ReduceJob &p, int segment, int64_t tile) {
    constexpr int GROUP = XT_GROUP<C>, AHEAD = LINE ? 8 / GROUP : 1;
    constexpr bool EARLY = COLUMNS_EARLY && LINE && OP == SUM;             /* loads start before the last ones are added */
    constexpr int CELLS = THREADS * GROUP > 1024 ? THREADS * GROUP : 1024; /* of a tile: columns times lanes */
    typedef ReduceHeld<C> H;
    __shared__ H value[CELLS + 32]; /* [lanes][cols + 1] */
    __shared__ int position[OP == EXTREME ? CELLS + 32 : 1];
    const int lanes = p.lanes, across = LINE || p.vector ? THREADS / lanes : 32, cols = LINE || p.vector ? across * GROUP : 32;
    const int here = threadIdx.x % across, step = lanes * GROUP;
    int64_t column;
    const int64_t outer = divide(tile, p.tiles, &column), kept = outer * p.row + column * cols; /* of the first column */
    const int width = (int)(p.row - column * cols < cols ? p.row - column * cols : cols);
    const int64_t first = (int64_t)segment * p.segment;
    const int length = segment_length(p, segment), mine = LINE || p.vector ? here * GROUP : here;
    const bool inside = mine < width;
    const char *x = (const char *)p.x;
    if (inside) x = xt_element<C>(x, xt_walk_offset<0>(p.kept, kept + mine), p.format);
    if (LINE || p.vector) { /* GROUP rows that follow each other are p.stride apart */
        const int lane = threadIdx.x / across;
        ReduceLane<C> s[GROUP];
#pragma unroll
        for (int c = 0; c < GROUP; c++) lane_begin(&s[c], lane * GROUP < length ? lane * GROUP : NONE);
        XtPiece<C, GROUP> raw[AHEAD][GROUP], next[AHEAD][GROUP];
        auto fetch = [&](XtPiece<C, GROUP>(&to)[AHEAD][GROUP], int i) {
            int64_t offset[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                offset[a] = first + i + a * step;
                if (LINE) offset[a] *= p.stride;
                else if (i + a * step < length) offset[a] = reduced_offset(p, offset[a]);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
#pragma unroll
                for (int e = 0; e < GROUP; e++)
                    if (i + a * step + e < length)
                        to[a][e] = xt_fetch<C, GROUP>(xt_element<C>(x, offset[a] + e * p.stride, p.format), p.format);
        };
        if (EARLY && inside) fetch(raw, lane * GROUP);
        for (int i = lane * GROUP; inside && i < length; i += AHEAD * step) {
            fetch(EARLY ? next : raw, EARLY ? i + AHEAD * step : i);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const int at = i + a * step;
                if (at >= length) break;
#pragma unroll
                for (int c = 0; c < GROUP; c++) {
                    XtClassValue<C> v[GROUP];
                    unpack_column<C>(v, raw[a], c, p.format);
                    lane_take<C, OP>(&s[c], v, at, length - at, p.sign);
                }
            }
            if (EARLY) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++)
#pragma unroll
                    for (int e = 0; e < GROUP; e++) raw[a][e] = next[a][e];
            }
        }
#pragma unroll
        for (int c = 0; c < GROUP; c++) {
            value[lane * (cols + 1) + mine + c] = lane_value<C, OP>(&s[c]);
            if (OP == EXTREME) position[lane * (cols + 1) + mine + c] = s[c].at;
        }
    } else {
        for (int lane = threadIdx.x / 32; lane < lanes; lane += WARPS) {
            ReduceLane<C> s;
            lane_begin(&s, lane * GROUP < length ? lane * GROUP : NONE);
            for (int i = lane * GROUP; inside && i < length; i += step) take_singly<C, OP>(&s, p, x, first + i, i, length - i);
            value[lane * (cols + 1) + here] = lane_value<C, OP>(&s);
            if (OP == EXTREME) position[lane * (cols + 1) + here] = s.at;
        }
    }
    keep_tile<OP>(p, value, position, lanes, cols, width, segment, kept);
}

template <typename C, int OP, bool LINE>
__global__ void __launch_bounds__(THREADS, COLUMN_BLOCKS<OP, LINE>) reduce_columns_kernel(const __grid_constant__ ReduceJob p) {
    for (int segment = blockIdx.y; segment < p.segments; segment += gridDim.y)
        for (int64_t tile = blockIdx.x; tile < p.outer * p.tiles; tile += gridDim.x) reduce_tile<C, OP, LINE>(p, segment, tile);
}

/* ---- columns of 16 bits, on Hopper --------------------------------------------------------------------------------------------- */

/* Sums, with the bits of the kernel above: a thread has the same 8 columns of the same rows. But 256 rows of 64 columns, a group of each
 * lane, come to shared memory as eight panels of 32 rows, one for each warp's ring. Blocks stay, and a warp's next panels are on their way
 * also while it ends a tile, so that memory is not idle then; they take no registers. */
static constexpr int PANEL_ROWS = 32, PANEL_COLS = 64, TURN = 32 * 8; /* rows of a turn: all warps' panels */
typedef XtRowRing<8, 1, WARPS, COLUMN_BLOCKS<SUM, true>> PanelRing;
static constexpr int PANEL_CELLS = 32 * (PANEL_COLS + 1), PANEL_BYTES = PanelRing::BYTES + PANEL_CELLS * (int)sizeof(double);
static_assert(PanelRing::SLOT == PANEL_ROWS * PANEL_COLS * 2 && TURN == WARPS * PANEL_ROWS, "a stage holds a panel");
static_assert(PanelRing::STAGES * PanelRing::SLOT % 1024 == 0, "panels begin at multiples of 1024 bytes");
static_assert(COLUMN_BLOCKS<SUM, true> * (PANEL_BYTES + 1024) <= 228 * 1024, "so many blocks fit");

__global__ void __launch_bounds__(THREADS, COLUMN_BLOCKS<SUM, true>)
    sum_panels_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ReduceJob p) {
#ifdef XT_SM90A
    constexpr int GROUP = 8;
    extern __shared__ __align__(1024) char panels[];
    double *value = (double *)(panels + PanelRing::BYTES); /* [32][PANEL_COLS + 1] */
    const int warp = threadIdx.x / 32, lane = threadIdx.x / 8, here = threadIdx.x % 8;
    const int tiles = (int)p.tiles, all = p.segments * tiles;
    if (threadIdx.x == 0) xt_prefetch_map(&map);
    PanelRing ring(panels);
    xt_wait_for_previous();
    xt_let_next_begin();
    /* This warp's panels of a tile: one in each turn that its rows reach. */
    auto turns = [&](int tile) { return (segment_length(p, tile / tiles) - warp * PANEL_ROWS + TURN - 1) / TURN; };
    int next = blockIdx.x - gridDim.x, next_turn = 0, next_turns = 0; /* the panel to bring next */
    auto fill = [&](int stage) {
        while (next_turn == next_turns) { /* the next tile with rows for this warp */
            if (next >= all - (int)gridDim.x) return;
            next += gridDim.x, next_turn = 0, next_turns = turns(next);
        }
        const int segment = next / tiles, column = next - segment * tiles;
        ring.fill_panel(stage, &map, column * PANEL_COLS, segment * p.segment + next_turn * TURN + warp * PANEL_ROWS);
        next_turn++;
    };
#pragma unroll 1
    for (int s = 0; s < PanelRing::STAGES; s++) fill(s);
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
        ReduceLane<uint16_t> s[GROUP];
#pragma unroll
        for (int c = 0; c < GROUP; c++) lane_begin(&s[c], NONE);
#pragma unroll 1
        for (int turn = turns(tile); turn > 0; turn--) {
            XtPiece<uint16_t, GROUP> raw[GROUP];
            ring.wait();
            const uint16_t *rows = (const uint16_t *)ring.data() + lane % 4 * GROUP * PANEL_COLS;
#pragma unroll
            for (int e = 0; e < GROUP; e++) raw[e] = xt_read<uint16_t, GROUP>(rows + e * PANEL_COLS + (here ^ e) * GROUP);
            xt_have(raw);
            __syncwarp(); /* every lane has read */
            fill(ring.stage);
            ring.advance();
#pragma unroll
            for (int c = 0; c < GROUP; c++) { /* rows past the end are zeros */
                float v[GROUP];
                unpack_column<uint16_t>(v, raw, c, p.format);
                lane_take<uint16_t, SUM>(&s[c], v, 0, GROUP, 1);
            }
        }
#pragma unroll
        for (int c = 0; c < GROUP; c++) value[lane * (PANEL_COLS + 1) + here * GROUP + c] = s[c].total;
        const int segment = tile / tiles, kept = (tile - segment * tiles) * PANEL_COLS, left = (int)p.row - kept;
        keep_tile<SUM>(p, value, (int *)NULL, 32, PANEL_COLS, left < PANEL_COLS ? left : PANEL_COLS, segment, kept);
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- partial results to results ---------------------------------------------------------------------------------------------- */

/* Each of p.kept.numel results has `items` partial results in `from`. `lanes` threads join `each` of them to one of `parts` in
 * `to`, or to the result: 8 or 32 lanes in blocks of THREADS, or 1024. */
template <int OP, typename H>
__global__ void __launch_bounds__(1024) reduce_join_kernel(const __grid_constant__ ReduceJob p, void *to, const void *from,
                                                           int64_t items, int64_t parts, int64_t each, int lanes) {
    __shared__ H value[32];
    __shared__ int64_t index[32];
    typedef ReducePartial<H> Partial;
    xt_wait_for_previous();
    xt_let_next_begin();
    const bool block = lanes > 32;
    const int in_warp = threadIdx.x % 32, warp = threadIdx.x / 32, lane = (int)threadIdx.x % lanes;
    const int64_t tasks = p.kept.numel * parts;
    const int teams = (int)blockDim.x / lanes, of_warp = block ? 0 : 32 / lanes;
    for (int64_t start = (int64_t)blockIdx.x * teams + warp * of_warp; start < tasks; start += (int64_t)gridDim.x * teams) {
        const int64_t task = start + (block ? 0 : in_warp / lanes);
        const bool here = task < tasks;
        const int64_t kept = here ? task / parts : 0, first = here ? task % parts * each : 0;
        const int64_t count = !here ? 0 : items - first < each ? items - first : each;
        const Partial *partial = (const Partial *)from + kept * items + first;
        Partial r = partial_none<OP, H>();
#pragma unroll 8
        for (int64_t s = lane; s < count; s += lanes) r = join<OP>(r, partial[s]);
        r = join_lanes<OP>(r, block ? 32 : lanes);
        if (block) {
            if (in_warp == 0) value[warp] = r.value, index[warp] = r.index;
            __syncthreads(); /* all warps are there */
            r = join_lanes<OP>(Partial{value[in_warp], index[in_warp]}, 32);
            __syncthreads(); /* and may be overwritten */
        }
        if (here && lane == 0) keep<OP>(p, to, task, kept, r);
    }
}

/* ---- the slot ---------------------------------------------------------------------------------------------------------------- */

/* Whether XT_GROUP neighbouring columns can be read at once everywhere, and the rows of every group are evenly spaced. */
template <typename C> static bool columns_aligned(const ReduceJob *p) {
    constexpr int GROUP = XT_GROUP<C>;
    for (int d = 0; d < p->reduced.ndim; d++)
        if (p->reduced.strides[0][d] % GROUP != 0) return false;
    return (p->reduced.ndim == 1 || xt_walk_row(&p->reduced) % GROUP == 0) && p->row % GROUP == 0 && (uintptr_t)p->x % 16 == 0 &&
           xt_walk_outer_multiple(&p->kept, 0, GROUP);
}

/* Whether every group of a row can be read at once. */
template <typename C> static bool groups_aligned(const ReduceJob *p) {
    constexpr int GROUP = XT_GROUP<C>;
    for (int d = 0; d < p->kept.ndim; d++)
        if (p->kept.strides[0][d] % GROUP != 0) return false;
    return xt_walk_step(&p->reduced, 0) == 1 && xt_walk_row(&p->reduced) % GROUP == 0 && (uintptr_t)p->x % 16 == 0 &&
           xt_walk_outer_multiple(&p->reduced, 0, GROUP);
}

template <int OP, typename H>
static void launch_join(const ReduceJob *p, void *to, const void *from, int64_t items, int64_t each, int lanes) {
    const int64_t parts = xt_divide_up(items, each);
    const int threads = lanes > 32 ? lanes : THREADS;
    xt_launch_early(reduce_join_kernel<OP, H>, xt_blocks(p->kept.numel * parts, threads / lanes), threads, 0, *p, to, from, items,
                    parts, each, lanes);
}

/* Whether panels of a job of `columns`, 16 bits wide and evenly spaced rows, can be brought by the copy engine; its numbers are of 32 bits.
 * Of one segment there is too little to bring. */
static bool has_panels(const ReduceJob *p) {
    return xt_has_ring() && p->segments > 1 && p->kept.ndim == 1 && p->stride >= p->row && p->stride < (int64_t)1 << 38 &&
           p->row <= INT32_MAX && p->reduced.numel <= INT32_MAX - TURN && p->segments * p->tiles <= INT32_MAX / 2;
}
static XtStatus launch_panels(const ReduceJob *p) {
    CUtensorMap map;
    const int64_t stride[3] = {0, 0, p->stride};
    const cudaError_t error = xt_tensor_map(&map, p->format == 0, p->x, 1, 1, p->reduced.numel, p->row, stride, PANEL_ROWS);
    if (error) return xt_cuda_error("reduce", error);
    XT_CHECK(xt_allow_shared("reduce", sum_panels_kernel, PANEL_BYTES));
    const int64_t tiles = p->segments * p->tiles, places = COLUMN_BLOCKS<SUM, true> * xt_multiprocessors();
    xt_launch_early(sum_panels_kernel, (unsigned)(tiles < places ? tiles : places), THREADS, PANEL_BYTES, map, *p);
    return XT_OK;
}

/* Whether a ring may bring the chunks of a job of rows: several for each block, and a segment for each warp. In bfloat16 rows
 * of one chunk are slower by it, 86 us for 72 (16384 x 8192): the warps of a block meet at the end of each. In float32 they would be
 * 4 % faster. */
template <typename C, int OP> static bool has_segments(const ReduceJob *p) {
    return OP == SUM && (std::is_same_v<C, uint16_t> || std::is_same_v<C, float>) && xt_has_ring() && p->vector &&
           p->reduced.ndim == 1 && p->chunked && p->chunks > 1 && p->chunk >= WARPS &&
           p->kept.numel * p->chunks >= 2 * RING_BLOCKS * xt_multiprocessors();
}
template <typename C> static XtStatus launch_ring(const ReduceJob *p) {
    XT_CHECK(xt_allow_shared("reduce", sum_ring_kernel<C>, SegmentRing::BYTES));
    xt_launch_early(sum_ring_kernel<C>, RING_BLOCKS * xt_multiprocessors(), THREADS, SegmentRing::BYTES, *p);
    return XT_OK;
}

template <typename C, int OP> static XtStatus run(ReduceJob *p) {
    typedef ReduceHeld<C> H;
    const int64_t n = p->reduced.numel, kept = p->kept.numel;
    const bool line = p->reduced.ndim == 1;
    /* Fewer than 8 columns would leave most of a tile idle. */
    const bool columns = n > 0 && p->row >= 8 && xt_walk_step(&p->kept, 0) == 1 && xt_walk_step(&p->reduced, 0) != 1;
    p->lanes = n <= 8 * XT_GROUP<C> ? 8 : 32;
    p->chunked = !columns && p->segments > 1 && (p->segments <= FEW_SEGMENTS || kept >= MANY_ROWS || p->chunks > 1);
    const int64_t segments = p->segments > 1 && !p->chunked ? kept * p->segments : 0; /* partial results */
    const int64_t chunks = p->chunks > 1 ? kept * p->chunks : 0;
    XtScratch scratch;
    if (segments + chunks > 0) {
        XT_CHECK(scratch.allocate((size_t)(segments + chunks) * sizeof(ReducePartial<H>)));
    }
    ReducePartial<H> *of_chunks = (ReducePartial<H> *)scratch.data, *of_segments = of_chunks + chunks;
    if (segments > 0) p->partials = of_segments;
    else if (chunks > 0) p->partials = of_chunks;
    if (columns) {
        p->vector = columns_aligned<C>(p);
        p->tiles = xt_divide_up(p->row, p->vector ? THREADS / p->lanes * XT_GROUP<C> : 32);
        const dim3 blocks(xt_blocks(p->outer * p->tiles, 1), p->segments < 65535 ? p->segments : 65535);
        bool panels = false;
        if constexpr (OP == SUM && std::is_same_v<C, uint16_t>) panels = p->vector && line && has_panels(p);
        if (panels) XT_CHECK(launch_panels(p));
        else if (p->vector && line && !XT_IS_INTEGER<C>)
            xt_launch(reduce_columns_kernel<C, OP, !XT_IS_INTEGER<C>>, blocks, THREADS, 0, *p);
        else xt_launch(reduce_columns_kernel<C, OP, false>, blocks, THREADS, 0, *p);
    } else {
        p->vector = groups_aligned<C>(p);
        const int warps = p->chunked && p->chunk < WARPS ? p->chunk : (int)WARPS;
        const dim3 blocks(xt_blocks(kept, p->chunked ? 1 : THREADS / p->lanes), p->chunked ? p->chunks : p->segments);
        bool ring = false;
        if constexpr (std::is_same_v<C, uint16_t> || std::is_same_v<C, float>) {
            ring = has_segments<C, OP>(p);
            if (ring) XT_CHECK(launch_ring<C>(p));
        }
        if (ring) { /* launched */
        } else if (p->vector && line) xt_launch(reduce_rows_kernel<C, OP, true>, blocks, 32 * warps, 0, *p);
        else xt_launch(reduce_rows_kernel<C, OP, false>, blocks, 32 * warps, 0, *p);
    }
    if (segments > 0) launch_join<OP, H>(p, chunks > 0 ? of_chunks : NULL, of_segments, p->segments, p->chunk, WARPS);
    if (chunks > 0) launch_join<OP, H>(p, NULL, of_chunks, p->chunks, p->chunks, p->chunks <= WARP_JOIN ? 32 : 1024);
    return xt_launched("reduce", kept, n);
}

XtStatus xt_cuda_reduce(const XtReduce *p) {
    ReduceJob job = {};
    const int kept_ndim = p->out.ndim;
    const bool extreme = p->op == XT_REDUCE_MAX || p->op == XT_REDUCE_MIN; /* their results do not depend on the order */
    xt_walk_init(&job.kept, &p->x, &p->out, 0, kept_ndim, true);
    xt_walk_init(&job.reduced, &p->x, NULL, kept_ndim, p->x.ndim - kept_ndim, extreme);
    if (job.kept.numel == 0) return XT_OK;
    const int64_t n = job.reduced.numel;
    job.x = p->x.data;
    job.out = p->out.data;
    job.out_dtype = p->out.dtype;
    job.argmax = p->op == XT_REDUCE_ARGMAX;
    job.sign = p->op == XT_REDUCE_MIN ? -1 : 1;
    job.divisor = p->op == XT_REDUCE_MEAN ? (double)n : 1;
    job.segment = n <= 65536 ? 1024 : 2048;
    job.segments = n > job.segment ? (int)xt_divide_up(n, job.segment) : 1;
    job.chunk = job.segments;
    if (job.segments > CHUNK) job.chunk = WARPS * (int)xt_divide_up(job.segments, WARPS * MOST_CHUNKS);
    job.chunks = (int)xt_divide_up(job.segments, job.chunk);
    job.row = xt_walk_row(&job.kept);
    job.outer = job.kept.numel / job.row;
    job.stride = xt_walk_step(&job.reduced, 0);
    return xt_by_class(p->x.dtype, [&](auto zero, int format) {
        using C = decltype(zero);
        job.format = format;
        return p->op == XT_REDUCE_SUM || p->op == XT_REDUCE_MEAN ? run<C, SUM>(&job) : run<C, EXTREME>(&job);
    });
}
