/* flash_hopper.cuh - tiles, stages, products and the order of work for flash_hopper_*.cu.
 *
 * A block has one warpgroup (4 warps) that only copies and CONSUMERS warpgroups that compute, each 64 rows of the block's tile. The
 * copy engine moves tiles to shared memory as panels of 64 columns (arch/sm90.cuh): panel c of a tile of ROWS rows is 128 ROWS bytes
 * at 128 ROWS c. The tensor cores read a panel by its rows (an operand that is summed over columns) or turned (summed over rows).
 */
#ifndef XT_ATTENTION_FLASH_HOPPER_CUH
#define XT_ATTENTION_FLASH_HOPPER_CUH

#include "arch/sm90.cuh"
#include "attention.cuh"
#include "common/softcap.cuh"

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

/* Bytes of a row of a tile: whole panels. The copy engine fills the columns beyond the dim with zeros and does not store them. */
__host__ __device__ constexpr int hopper_row_bytes(int dim) { return (dim + 63) / 64 * 128; }

constexpr int HOPPER_SHARED = 227 * 1024; // bytes that a block can have

/* ---- order of work ------------------------------------------------------------------------------------------------------------- */

/* Tiles are taken section by section: as many heads as have their other side in the L2 cache together. In a section, the longest
 * first. A block that gets done claims the next tile of the list, so long and short ones balance; with a fixed share of the list for
 * each block, sections ended together and cost 10 %. Which block does a tile has no influence on its bits. */
typedef struct HopperOrder {
    int heads, blocks, section, tiles; // batch x heads, tiles of a head, heads of a section, heads x blocks
} HopperOrder;
typedef struct HopperTile {
    int block, head; // 0 is the longest
} HopperTile;
/* What the copying thread tells the other roles of a claimed tile, so that they do not divide, and read only where documents meet:
 * block -1 where there is none. falling: flash_hopper_ordered.cuh. With documents or a window, also where the document of the tile's
 * first row begins, where that of the last ends, and whether it is one: 0, all tokens of the other side, true without documents; and the
 * tiles of the other side. */
typedef struct HopperWork {
    int block, batch, head, falling, low, high, one;
    XtSeen<int> tiles;
} HopperWork;
constexpr int HOPPER_WORK_BYTES = 32;
/* Registers of a thread that copies, and of one that computes. With spans, 24 do not suffice to copy. */
__host__ __device__ constexpr int hopper_copy_registers(int consumers, bool spans) { return consumers == 3 ? 32 : spans ? 40 : 24; }
__host__ __device__ constexpr int hopper_registers(int consumers, bool spans) { return consumers == 3 ? 160 : spans ? 232 : 240; }
template <bool SPANS> __device__ inline void hopper_put_work(uint32_t to, const HopperWork &work) {
    xt_put_words(
        to, {(unsigned)work.block, (unsigned)work.batch, (unsigned)work.head, (unsigned)(SPANS ? work.tiles.begin : work.falling)});
    if (SPANS) xt_put_words(to + 16, {(unsigned)work.low, (unsigned)work.high, (unsigned)work.one, (unsigned)work.tiles.end});
}
template <bool SPANS> __device__ inline HopperWork hopper_get_work(uint32_t from) {
    uint4 x = xt_get_words(from), y = {};
    if (SPANS) y = xt_get_words(from + 16);
    return {(int)x.x, (int)x.y, (int)x.z, (int)x.w, (int)y.x, (int)y.y, (int)y.z, {(int)x.w, (int)y.w}};
}

/* Tiles claimed, and blocks that will claim no more. The last block sets both back to 0. One pair serves all kernels: they run on one
 * stream, one after the other. */
static __device__ unsigned hopper_claimed, hopper_done;

/* By the copying thread: the tile of its block's n-th turn, order.tiles or more where there is none. */
__device__ inline int hopper_claim(int turn) {
    return turn == 0 ? (int)blockIdx.x : (int)(gridDim.x + atomicAdd(&hopper_claimed, 1u));
}
/* By the copying thread, after its last claim. */
__device__ inline void hopper_leave() {
    __threadfence();
    if (atomicAdd(&hopper_done, 1u) != gridDim.x - 1) return;
    hopper_claimed = 0;
    hopper_done = 0;
}
__device__ inline HopperTile hopper_tile(const HopperOrder &order, int tile) {
    int whole = order.section * order.blocks, section = tile / whole, first = section * order.section;
    int heads = min(order.section, order.heads - first), rest = tile - section * whole;
    return {rest / heads, first + rest % heads};
}
/* The same for the other roles; heads of a sequence. */
__device__ inline HopperWork hopper_work(const HopperOrder &order, int tile, int heads) {
    if (tile >= order.tiles) return {-1};
    HopperTile at = hopper_tile(order, tile);
    return {at.block, at.head / heads, at.head % heads};
}
/* `group` heads in a row share a head of `bytes`; sections of up to `cache` bytes. */
inline HopperOrder hopper_order(int64_t heads, int64_t group, int64_t blocks, int64_t bytes, int64_t cache) {
    int64_t section = cache / (bytes > 0 ? bytes : 1) * group;
    section = section < group ? group : section > heads ? heads : section;
    return {(int)heads, (int)blocks, (int)section, (int)(heads * blocks)};
}
inline unsigned hopper_grid(int tiles) { return (unsigned)(tiles < xt_multiprocessors() ? tiles : xt_multiprocessors()); }

/* ---- stages -------------------------------------------------------------------------------------------------------------------- */

/* Where a role is in a ring of stages: its n-th use of one, and the parity of the phase that this use fills or reads. */
template <int STAGES> struct HopperRing {
    unsigned n = 0;
    __device__ int stage() const { return n % STAGES; }
    __device__ int parity() const { return n / STAGES % 2; }
};

/* The warpgroup of this thread, from lane 0: the compiler keeps what depends on it in uniform registers. */
__device__ inline int hopper_warpgroup() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); }

/* One arrival a warp says that its warpgroup's products no longer need a stage. */
__device__ inline void hopper_release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) xt_barrier_arrive(barrier);
}
/* The same of what threads have read themselves: each arrives, as racecheck follows a thread's own arrivals alone. */
__device__ inline void hopper_release_read(uint32_t barrier) { xt_barrier_arrive(barrier); }

/* Starts the copies of a tile of ROWS rows. */
template <int D, int ROWS>
__device__ inline void hopper_load(uint32_t to, const CUtensorMap *map, int row, int head, int batch, uint32_t barrier) {
#pragma unroll
    for (int c = 0; c < (D + 63) / 64; c++) xt_panel_load(to + c * ROWS * 128, map, 64 * c, row, head, batch, barrier);
}

/* ---- documents and windows ------------------------------------------------------------------------------------------------------ */

/* SPANS, a parameter of the kernels: a query sees a span of keys, and a key is seen by a span of queries, whose ends never fall from
 * one row to the next (contract/attention.h). Tiles outside are not visited. Without it, the formulas of a causal or full square. CAPPED,
 * with SPANS: there is a softcap, and xt_bend_of says what becomes of a score. */
template <typename P> inline bool hopper_spans(const P *p) { return p->documents || p->window > 0 || p->softcap > 0; }

/* By the copying thread: the documents of a claimed tile with rows first ... last; `tokens` of the other side. */
template <typename Call>
__device__ inline void hopper_find_documents(HopperWork &work, const Call &call, int first, int last, int tokens) {
    work.low = 0, work.high = tokens, work.one = 1;
    if (!call.documents) return;
    XtSeen<int> begins = xt_document<int>(call, work.batch, first), ends = xt_document<int>(call, work.batch, last);
    work.low = begins.begin, work.high = ends.end, work.one = begins.begin == ends.begin && begins.end == ends.end;
}

/* Spans by sums alone: row i of a document sees from i + before, or from where that begins, to i + after, or to where that ends. */
typedef struct HopperEdges {
    int before, after;
    __device__ XtSeen<int> within(const XtSeen<int> &document, int i) const {
        return {max(document.begin, i + before), min(document.end, i + after)};
    }
} HopperEdges;
constexpr int HOPPER_FAR = 1 << 30; // where nothing but the document ends a span
template <typename Call> __device__ inline HopperEdges hopper_edges_seen(const Call &call) { // keys that a query sees
    int past = call.skv - call.sq + 1;
    return {call.window > 0 ? past - call.window : -HOPPER_FAR, call.causal ? past : HOPPER_FAR};
}
template <typename Call> __device__ inline HopperEdges hopper_edges_by(const Call &call) { // queries that see a key
    int past = call.skv - call.sq;
    return {call.causal ? -past : -HOPPER_FAR, call.window > 0 ? call.window - past : HOPPER_FAR};
}
/* xt_document, read where it stands: the compiler put plain loads, predicated, between products. */
template <typename Call> __device__ inline XtSeen<int> hopper_document(const Call &call, int batch, int i) {
    const int32_t *begin = call.documents + 2 * (int64_t)batch * call.sq + i;
    int first = xt_read_here(begin), last = xt_read_here(begin + call.sq);
    return {max(0, min(first, i)), min(call.sq, max(last, i + 1))};
}
/* The tiles of what the first row sees to what the last one does. */
template <int TILE> __device__ inline XtSeen<int> hopper_tiles(const XtSeen<int> &first, const XtSeen<int> &last) {
    return {first.begin / TILE, (last.end + TILE - 1) / TILE};
}
/* Tiles of keys that a tile's queries first ... last see, and tiles of queries that see such keys. */
template <int TILE, typename Call>
__device__ inline XtSeen<int> hopper_tiles_seen(const Call &call, const HopperWork &work, int first, int last) {
    XtSeen<int> documents = {work.low, work.high};
    return hopper_tiles<TILE>(xt_seen_within<int>(call, documents, first), xt_seen_within<int>(call, documents, last));
}
template <int TILE, typename Call>
__device__ inline XtSeen<int> hopper_tiles_by(const Call &call, const HopperWork &work, int first, int last) {
    XtSeen<int> documents = {work.low, work.high};
    return hopper_tiles<TILE>(xt_seen_by_within<int>(call, documents, first), xt_seen_by_within<int>(call, documents, last));
}

/* The spans of a thread's two rows, and of the first and the last of its warpgroup's 64. Rows from `rows` on are taken for the last. */
typedef struct HopperSpans {
    XtSeen<int> row[2], first, last;
    template <typename Call>
    __device__ void read_rows(const Call &call, const HopperWork &work, const HopperEdges &edges, int mine, int rows) {
        get(row[0], row[1], call, work, edges, min(mine, rows - 1), min(mine + 8, rows - 1));
    }
    template <typename Call>
    __device__ void read_ends(const Call &call, const HopperWork &work, const HopperEdges &edges, int from, int rows) {
        get(first, last, call, work, edges, min(from, rows - 1), min(from + 63, rows - 1));
    }
    /* read_rows and read_ends at once. Written out: the kernels that pass by no tiles keep their machine code that way. */
    template <typename Call>
    __device__ void read(const Call &call, const HopperWork &work, const HopperEdges &edges, int from, int mine, int rows) {
        int at[4] = {min(mine, rows - 1), min(mine + 8, rows - 1), min(from, rows - 1), min(from + 63, rows - 1)};
        XtSeen<int> document = {work.low, work.high};
        row[0] = edges.within(document, at[0]), row[1] = edges.within(document, at[1]);
        first = edges.within(document, at[2]), last = edges.within(document, at[3]);
        if (work.one) return;
        row[0] = edges.within(hopper_document(call, work.batch, at[0]), at[0]);
        row[1] = edges.within(hopper_document(call, work.batch, at[1]), at[1]);
        first = edges.within(hopper_document(call, work.batch, at[2]), at[2]);
        last = edges.within(hopper_document(call, work.batch, at[3]), at[3]);
    }
    template <typename Call>
    __device__ static void get(XtSeen<int> &a, XtSeen<int> &b, const Call &call, const HopperWork &work, const HopperEdges &edges,
                               int at_a, int at_b) {
        XtSeen<int> document = {work.low, work.high};
        a = edges.within(document, at_a), b = edges.within(document, at_b);
        if (work.one) return;
        a = edges.within(hopper_document(call, work.batch, at_a), at_a);
        b = edges.within(hopper_document(call, work.batch, at_b), at_b);
    }
    /* Those of the rows through shared memory, where registers are few: 8 bytes a row, which a warp writes for itself. */
    __device__ void put_rows(uint32_t to) const {
        if (threadIdx.x % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                xt_put_shared(to + 64 * half, row[half].begin);
                xt_put_shared(to + 64 * half + 4, row[half].end);
            }
        __syncwarp();
    }
    __device__ void get_rows(uint32_t from) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 words = xt_read_shared(from + 64 * half);
            row[half] = {__float_as_int(words.x), __float_as_int(words.y)};
        }
    }
    /* The warpgroup's tiles within those of the block. */
    template <int TILE> __device__ XtSeen<int> tiles(const XtSeen<int> &block) const {
        XtSeen<int> mine = hopper_tiles<TILE>(first, last);
        int begin = max(block.begin, min(block.end, mine.begin));
        return {begin, max(begin, min(block.end, mine.end))};
    }
    /* Whether something of the tile from column `from` on lies outside: of few tiles. One branch around both masks. */
    template <int TILE> __device__ bool crosses(int from) const {
        return __builtin_expect(from < last.begin || from + TILE > first.end, 0);
    }
    /* Calls f(x) for the elements of a thread's part of such a tile that lie outside. Few tiles cross both ends. */
    template <int TILE, typename F> __device__ void each_outside(int from, F f) const {
        int column = from + threadIdx.x % 4 * 2;
        if (from < last.begin) {
            int begin[2] = {row[0].begin - column, row[1].begin - column};
#pragma unroll
            for (int x = 0; x < TILE / 2; x++)
                if (x / 4 * 8 + x % 2 < begin[x / 2 % 2]) f(x);
        }
        if (from + TILE > first.end) {
            int end[2] = {row[0].end - column, row[1].end - column};
#pragma unroll
            for (int x = 0; x < TILE / 2; x++)
                if (x / 4 * 8 + x % 2 >= end[x / 2 % 2]) f(x);
        }
    }
} HopperSpans;

/* ---- a softcap ----------------------------------------------------------------------------------------------------------------- */

/* s becomes tanh(inner s). */
template <int N> __device__ inline void hopper_bend(float (&s)[N], float inner) {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = xt_tanh_approx(s[i] * inner);
}
/* 1 - t^2, and a number for an element that is hidden, -inf. */
__device__ inline float hopper_slope(float t) {
    t = fmaxf(t, -1.0f);
    return fmaf(-t, t, 1.0f);
}

/* ---- products ------------------------------------------------------------------------------------------------------------------- */

/* s = a b^T: a 64 rows of a tile of A_ROWS, b a tile of N rows, D columns each. One group of products is left running. */
template <typename T, int N, int D, int A_ROWS> __device__ inline void hopper_dot_rows(float (&s)[N / 2], uint32_t a, uint32_t b) {
    uint64_t left = xt_panel_operand(a, 0), right = xt_panel_operand(b, 0);
#pragma unroll
    for (int k = 0; k < D / 16; k++) // 16 columns are 32 bytes, 64 a panel
        xt_wgmma<T, N>(s, left + k % 4 * 2 + k / 4 * (A_ROWS * 8), right + k % 4 * 2 + k / 4 * (N * 8), k > 0);
    xt_wgmma_commit();
}

/* d += p b: p [64, K] in registers, b a tile of K rows and D columns. */
template <typename T, int K, int D>
__device__ inline void hopper_add_product(float (&d)[D / 2], const uint32_t (&p)[K / 16][4], uint32_t b) {
    uint64_t right = xt_panel_operand(b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) xt_wgmma<T, D>(d, p[k], right + k * 128, true); // 16 rows are 2048 bytes
    xt_wgmma_commit();
}

/* d = a^T b: a and b panels of K rows. */
template <typename T, int K> __device__ inline void hopper_turned_product(float (&d)[32], uint32_t a, uint32_t b) {
    uint64_t left = xt_panel_operand(a, 0), right = xt_panel_operand(b, 0);
#pragma unroll
    for (int k = 0; k < K / 16; k++) xt_wgmma_turned<T, 64>(d, left + k * 128, right + k * 128, k > 0);
    xt_wgmma_commit();
}

/* A result, rounded to T, as the left operand of the next product: each thread has the same elements of both. */
template <typename T, int K> __device__ inline void hopper_round(uint32_t (&p)[K / 16][4], const float (&s)[K / 2]) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = xt_round_pair<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

/* Maximum and sum over the 4 threads that share a row. */
__device__ inline float hopper_quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ inline float hopper_quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

/* ---- results ------------------------------------------------------------------------------------------------------------------- */

/* Writes 64 rows of d to shared memory, in panels `pitch` bytes apart, permuted as the copy engine wants them. f(half, x): the result
 * of row 8 half. Threads write 4 bytes each; the 8 rows at the same columns have different banks. */
template <typename T, int D, typename F>
__device__ inline void hopper_put_rows(uint32_t to, int pitch, const float (&d)[D / 2], F f) {
    int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    uint32_t place = to + row * 128 + thread % 4 * 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        uint32_t at = place + n / 8 * pitch + (n % 8 ^ row % 8) * 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t word = xt_round_pair<T>(f(half, d[4 * n + 2 * half]), f(half, d[4 * n + 2 * half + 1]));
            xt_put_shared(at + half * 1024, (int)word);
        }
    }
}
/* The same of 64 rows and K <= 64 columns that hopper_round has rounded. */
template <int K> __device__ inline void hopper_put_words(uint32_t to, const uint32_t (&p)[K / 16][4]) {
    int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    uint32_t place = to + row * 128 + thread % 4 * 4;
#pragma unroll
    for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            xt_put_shared(place + half * 1024 + (n ^ row % 8) * 16, (int)p[n / 2][n % 2 * 2 + half]);
}
/* Writes 64 rows of d through `room` (as hopper_put_rows) to memory, where `rows` rows and `columns` columns of it belong. A warp
 * copies what itself has put, by ordinary instructions: sanitizers do not see what the copy engine writes to memory. */
template <typename T, int D, typename F>
__device__ inline void hopper_write_rows(T *to, int64_t stride, int rows, int columns, uint32_t room, int pitch,
                                         const float (&d)[D / 2], F f) {
    hopper_put_rows<T, D>(room, pitch, d, f);
    __syncwarp();
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        int piece = 32 * i + lane, row = 16 * warp + piece / (D / 8), column = piece % (D / 8);
        uint4 words = xt_get_words(room + row * 128 + column / 8 * pitch + (column % 8 ^ row % 8) * 16);
        if (row < rows && 8 * column < columns) xt_put_words(to + row * stride + 8 * column, words);
    }
    __syncwarp(); // before the room is used again
}

/* ---- support ------------------------------------------------------------------------------------------------------------------- */

/* Whether the copy engine can address x [batch, heads, rows, D]: strides of dims longer than 1 are positive. */
inline bool hopper_addressable(const int64_t stride[3], int64_t batch, int64_t heads, int64_t rows) {
    const int64_t shape[3] = {batch, heads, rows}, most = (int64_t)1 << 38;
    for (int i = 0; i < 3; i++)
        if (shape[i] > 1 && (stride[i] <= 0 || stride[i] > most)) return false;
    return true;
}

/* NULL, or the first reason against Hopper's flash, forward or backward. */
template <typename P> inline const char *hopper_unfit(const P *p, const XtDeviceTraits *device) {
    float scale = (float)(p->scale * LOG2_E);
    if (!xt_built_for_sm90a()) return "the library is not built for compute capability 9.0a";
    if (device->capability != 90) return "the compute capability is not 9.0";
    if (p->dtype != XT_BFLOAT16 && p->dtype != XT_FLOAT16) return "the dtype is not bfloat16 or float16";
    if (p->dim != 64 && p->dim != 96 && p->dim != 128 && p->dim != 192 && p->dim != 256)
        return "the head dim is not 64, 96, 128, 192 or 256";
    if (!(scale > 0 && scale < INFINITY)) return "the scale is not positive"; // the largest score has the largest product
    if (device->shared_limit < HOPPER_SHARED) return "a block cannot have so much shared memory";
    if (!hopper_addressable(p->q_stride, p->batch, p->heads, p->sq) ||
        !hopper_addressable(p->k_stride, p->batch, p->kv_heads, p->skv) ||
        !hopper_addressable(p->v_stride, p->batch, p->kv_heads, p->skv) ||
        !hopper_addressable(p->out_stride, p->batch, p->heads, p->sq))
        return "a tensor has a stride that is not positive";
    return xt_attention_unfit(p, 8, true);
}

#endif
