/* decoder_step.cuh - the parts of decoder_step.cu's kernel: what the blocks share, products with weights from a ring of slots, rows that are
 * normalised on their way into a product, attention over a chunk. The plan is in decoder_step.cu. */
#pragma once

#include "arch/sm90.cuh"
#include "common/rms_norm.cuh"
#include "common/rope.cuh"

enum {
    ROWS = 16,                          /* the most: those of the matrix unit */
    WARPS = 8,                          /* that compute */
    CONSUMERS = WARPS * 32,             /* their threads */
    THREADS_OF_BLOCK = CONSUMERS + 128, /* and a warpgroup whose first warp copies: registers are handed on by warpgroups */
    CHUNK = 128,                        /* terms of a warp in a slot */
    TERMS = WARPS * CHUNK,              /* of a slot */
    PITCH = TERMS * 2 + 64,             /* bytes from row to row of a slot: the lanes of a read have banks of their own */
    SLOT = 8 * PITCH,                   /* bytes: a row for each column of a tile */
    SLOTS = 12,                         /* what fits */
    UNDER_WAY = 2,                      /* slots that are copied at once: what blocks tell each other would wait behind more */
    UNDER_WAY_OF_MANY = 1,              /* the same above 8 rows, where blocks tell each other more */
    MOST_TILES = 6,                     /* whose sums are joined at once */
    COLS = MOST_TILES * 8,              /* of them */
    MOST_LAYERS = 64,                   /* what the parameters of a kernel hold */
    MOST_TERMS = 3 * TERMS,             /* of a product: what registers hold of the rows */
    POSITIONS = 64,                     /* of a chunk, as in cached_attention.cu */
    HEADS = 2,                          /* query heads that share one */
    HELD = 8,                           /* chunks of a group that a block holds in registers */
    MOST_GROUPS = 4096,                 /* rows times query heads, which count their chunks */
    JOINING = 1,                        /* turns that joining the chunks of several blocks takes longer */
    ALL = 1,                            /* the named barrier of all warps that compute */
};

/* ---- what the blocks share ------------------------------------------------------------------------------------------------------ */

/* Zeros between launches. Blocks that have come to a meeting, over all meetings; blocks that have left the last one. */
__device__ unsigned step_met, step_left;
/* Chunks that are done, for each row and tile of query heads. The last one resets its count. */
__device__ unsigned step_chunks[MOST_GROUPS];

template <typename T> struct StepLayer {
    const T *norm, *q, *k, *v, *q_norm, *k_norm, *o, *mlp_norm, *gate, *up, *down;
    T *keys, *values; // [B, K, L, D]
};
template <typename T> struct Step {
    const T *x;                // [B, C]
    T *out;                    // [B, C]: the stream from the first layer's output on
    const T *last_norm, *head; // [C], [V, C], or NULL
    T *logits;                 // [B, V]
    T *qkv, *attended, *gated; // [B, (H + 2 K) D], [B, H D], [B, F]
    float *parts;              // [B, H, chunks, D], as in cached_attention.cu
    float2 *stats;             // [B, H, chunks]
    const int64_t *positions;  // [B]
    int64_t length;            // L
    int layers, batch, channels, heads, kv_heads, inner, chunks, vocab;
    int norm_pieces, norm_lanes; /* of a lane; that share a row, as rms_norm.cu does it */
    float eps, inverse_channels, inverse_dim, scale;
    float frequency[64]; /* of the D / 2 pairs */
    StepLayer<T> layer[MOST_LAYERS];
};

template <typename T, int D> struct StepShared {
    alignas(128) char slots[SLOTS][SLOT];
    union {
        float sums[WARPS][ROWS][COLS];
        struct {
            float scores[HEADS][POSITIONS], sums[1024 / D][HEADS][D];
            T lines[WARPS][HEADS + 1][D]; /* queries and the key of a chunk, normalised and turned: each warp has its own */
            float2 stat[HEADS], held[HELD][HEADS];
            bool is_last;
        } chunk;
    };
    T angles[ROWS][2][D / 2]; /* cosines, sines */
    float rstd[ROWS];
    int position[ROWS], used[ROWS]; /* of the new token, and chunks of a row; -1 and 1 where it stands outside the cache */
    uint64_t full[SLOTS], empty[SLOTS];
    /* No copy may begin, behind which messages of others would wait: from where the last slots of a product are freed to the end of the
     * meeting, but for blocks that have no chunk of attention. Volatile accesses are relaxed ones of PTX's
     * memory model, and no race; racecheck takes them for plain ones and reports them. */
    volatile int meets;
};

/* 16 bytes, or an element, that another block may have written since the launch. */
template <typename T> __device__ inline XtPiece<T, 8> read_shared_piece(const T *p) {
    const uint4 q = __ldcg((const uint4 *)p);
    return {{q.x, q.y, q.z, q.w}};
}

/* ---- slots --------------------------------------------------------------------------------------------------------------------- */

/* A place in the sequence of all slots of a block. */
struct Place {
    int slot = 0, phase = 0;
    __device__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};
/* Tiles that are multiplied at once, of `left`. Both roles go through a product in this order. WIDE products have one slot a tile; in the
 * others the rows take the registers that more sums would need. */
template <bool WIDE> __device__ inline int at_once(int left) {
    return !WIDE ? 1 : left >= MOST_TILES ? (int)MOST_TILES : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* What the copying warp has begun, and the first of it that may not have landed. */
struct Copies {
    Place next, landed;
    int under_way = 0;
};
/* Copies the rows of `tiles` tiles, of `terms` each, to the next slots, at most `most` at once; row(tile, r) is row r of a tile. Called by a
 * warp. */
template <bool WIDE, typename T, int D, typename Row>
__device__ inline void fetch(StepShared<T, D> &s, Copies &copies, int most, int tiles, int terms, Row row) {
    const int lane = threadIdx.x % 32;
    for (int round = 0; round < tiles; round += MOST_TILES)
        for (int end = min(round + MOST_TILES, tiles), first = round, count; first < end; first += count) {
            count = at_once<WIDE>(end - first);
            for (int from = 0; from < terms; from += TERMS)
                for (int j = 0; j < count; j++, copies.next.next()) {
                    const Place place = copies.next;
                    const int bytes = min(TERMS, terms - from) * 2;
                    const uint32_t full = xt_shared_address(&s.full[place.slot]);
                    xt_barrier_wait(xt_shared_address(&s.empty[place.slot]), place.phase ^ 1);
                    if (copies.under_way == most) {
                        xt_barrier_wait(xt_shared_address(&s.full[copies.landed.slot]), copies.landed.phase);
                        copies.landed.next();
                    } else copies.under_way++;
                    while (s.meets) {}
                    if (lane == 0) xt_barrier_expect(full, 8 * bytes);
                    __syncwarp();
                    if (lane < 8)
                        xt_bulk_load(xt_shared_address(s.slots[place.slot] + lane * PITCH), row(first + j, lane) + from, bytes,
                                     full);
                }
        }
}

/* Adds the products of rows a with TILES tiles: this warp's share of the terms. meets: behind them the block meets others, so that the last
 * slots are freed for copies that begin after the meeting. */
template <typename T, int D, int KS, int MANY, int TILES>
__device__ inline void multiply(StepShared<T, D> &s, Place &place, float (&d)[TILES][4], const uint32_t (&a)[KS][4][MANY][4],
                                int terms, bool meets) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < KS; k++) {
        if (k * TERMS >= terms) break;
        int slot[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++, place.next()) {
            slot[j] = place.slot;
            xt_barrier_wait(xt_shared_address(&s.full[place.slot]), place.phase);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = warp * CHUNK + i * 32;
            if (k * TERMS + at >= terms) break;
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                const uint4 w = *(const uint4 *)(s.slots[slot[j]] + g * PITCH + (at + 8 * t) * 2);
                const uint32_t *u = a[k][i][0], *v = a[k][i][MANY - 1];
                xt_mma_16<T>(d[j], u[0], MANY > 1 ? v[0] : 0, u[1], MANY > 1 ? v[1] : 0, w.x, w.y);
                xt_mma_16<T>(d[j], u[2], MANY > 1 ? v[2] : 0, u[3], MANY > 1 ? v[3] : 0, w.z, w.w);
            }
        }
        __syncwarp();
        if (meets && threadIdx.x == 0 && (k + 1 == KS || (k + 1) * TERMS >= terms)) s.meets = 1;
        if (lane == 0) {
#pragma unroll
            for (int j = 0; j < TILES; j++) xt_barrier_arrive(xt_shared_address(&s.empty[slot[j]]));
        }
    }
}
template <typename T, int D, int KS, int MANY, int TILES>
__device__ inline void multiply_and_keep(StepShared<T, D> &s, Place &place, const uint32_t (&a)[KS][4][MANY][4], int terms,
                                         int column, bool meets) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float d[TILES][4] = {};
    multiply<T, D, KS, MANY, TILES>(s, place, d, a, terms, meets);
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int half = 0; half < MANY; half++)
            *(float2 *)&s.sums[warp][g + 8 * half][column + 8 * j + 2 * t] = make_float2(d[j][2 * half], d[j][2 * half + 1]);
}
/* The sum of an element over the warps, in their order. */
template <typename T, int D> __device__ inline float joined(const StepShared<T, D> &s, int row, int column) {
    float sum = s.sums[0][row][column];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += s.sums[w][row][column];
    return sum;
}
/* The same of four columns, rounded. */
template <typename T, int D> __device__ inline XtPiece<T, 4> joined_four(const StepShared<T, D> &s, int row, int column) {
    XtVector<float, 4> sum;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float4 one = *(const float4 *)&s.sums[w][row][column];
        if (w == 0) sum.at[0] = one.x, sum.at[1] = one.y, sum.at[2] = one.z, sum.at[3] = one.w;
        else sum.at[0] += one.x, sum.at[1] += one.y, sum.at[2] += one.z, sum.at[3] += one.w;
    }
    return xt_store<T>(sum);
}
/* Multiplies rows a with `tiles` tiles. store(first, count): columns [0, count) of `joined` are those from tile `first` on. meets: as in
 * multiply. */
template <typename T, int D, int KS, int MANY, typename Store>
__device__ inline void products(StepShared<T, D> &s, Place &place, const uint32_t (&a)[KS][4][MANY][4], int tiles, int terms,
                                bool meets, Store store) {
    for (int round = 0; round < tiles; round += MOST_TILES) {
        const int end = min(round + MOST_TILES, tiles);
        if (round > 0) xt_named_sync(ALL, CONSUMERS);
        for (int first = round, count; first < end; first += count) {
            count = at_once<KS == 1>(end - first);
            const int column = (first - round) * 8;
            const bool last = meets && first + count == tiles;
            if (KS == 1 && count == MOST_TILES)
                multiply_and_keep<T, D, KS, MANY, KS == 1 ? MOST_TILES : 1>(s, place, a, terms, column, last);
            else if (KS == 1 && count == 4) multiply_and_keep<T, D, KS, MANY, KS == 1 ? 4 : 1>(s, place, a, terms, column, last);
            else if (KS == 1 && count == 2) multiply_and_keep<T, D, KS, MANY, KS == 1 ? 2 : 1>(s, place, a, terms, column, last);
            else multiply_and_keep<T, D, KS, MANY, 1>(s, place, a, terms, column, last);
        }
        xt_named_sync(ALL, CONSUMERS);
        store(round, (end - round) * 8);
    }
}

/* ---- rows of a product ------------------------------------------------------------------------------------------------------------ */

/* The rows x [batch, terms] as a product takes them: those that other blocks have just written. */
template <typename T, int KS, int MANY>
__device__ inline void load_rows(uint32_t (&a)[KS][4][MANY][4], const T *x, int batch, int terms) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < KS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < MANY; half++) {
                const int row = g + 8 * half, at = k * TERMS + warp * CHUNK + i * 32 + 8 * t;
                XtPiece<T, 8> piece = {};
                if (row < batch && at < terms) piece = read_shared_piece(x + row * terms + at);
#pragma unroll
                for (int e = 0; e < 4; e++) a[k][i][half][e] = piece.word[e];
            }
}
/* This thread's pieces of a norm's weight, which can be loaded before a meeting. */
template <typename T> __device__ inline void load_norm(XtPiece<T, 8> (&weight)[4], const T *from, int channels) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = warp * CHUNK + i * 32 + lane % 4 * 8;
        weight[i] = {};
        if (at < channels) weight[i] = xt_read<T, 8>(from + at);
    }
}
/* a = rms_norm of the rows x [batch, channels]: a warp has the sum of every eighth row. */
template <typename T, int D, int MANY>
__device__ inline void load_normalised(StepShared<T, D> &s, const Step<T> &p, uint32_t (&a)[1][4][MANY][4], const T *x,
                                       const XtPiece<T, 8> (&weight)[4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    load_rows<T, 1, MANY>(a, x, p.batch, p.channels);
    XtPiece<T, 8> piece[MANY][4];
#pragma unroll
    for (int half = 0; half < MANY; half++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = warp + 8 * half, at = (i * p.norm_lanes + lane % p.norm_lanes) * 8;
            piece[half][i] = {};
            if (row < p.batch && i < p.norm_pieces && at < p.channels)
                piece[half][i] = read_shared_piece(x + row * p.channels + at);
        }
#pragma unroll
    for (int half = 0; half < MANY; half++) {
        float sum[1] = {0};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < p.norm_pieces) sum[0] += squares<T, 8>(piece[half][i]);
        sum_of_lanes<1>(sum, p.norm_lanes);
        if (lane == 0) s.rstd[warp + 8 * half] = reciprocal_root(sum[0] * p.inverse_channels + p.eps);
    }
    xt_named_sync(ALL, CONSUMERS);
#pragma unroll
    for (int half = 0; half < MANY; half++) {
        const float rstd = s.rstd[g + 8 * half];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            XtPiece<T, 8> x_piece;
#pragma unroll
            for (int e = 0; e < 4; e++) x_piece.word[e] = a[0][i][half][e];
            const XtPiece<T, 8> normal = normalised<T, 8>(x_piece, weight[i], rstd);
#pragma unroll
            for (int e = 0; e < 4; e++) a[0][i][half][e] = normal.word[e];
        }
    }
}

/* ---- attention --------------------------------------------------------------------------------------------------------------------- */

/* A chunk of a group: of the query heads [head, head + count) of a row, which share a kv head. */
struct Chunk {
    int group, b, kv_head, head, count, chunk, used, tile;
    int position; /* of the new token */
    bool known;   /* it lies in the cache */
};
/* Tiles of query heads for each kv head: groups of a row. */
template <typename T> __device__ inline int tiles_of(const Step<T> &p) { return (p.heads / p.kv_heads + HEADS - 1) / HEADS; }

template <typename T, int D> __device__ inline Chunk chunk_of(const StepShared<T, D> &s, const Step<T> &p, int group, int chunk) {
    const int shared = p.heads / p.kv_heads, tiles = tiles_of(p), in_row = group % (p.kv_heads * tiles);
    Chunk c;
    c.group = group, c.b = group / (p.kv_heads * tiles), c.kv_head = in_row / tiles, c.tile = in_row % tiles;
    c.head = c.kv_head * shared + c.tile * HEADS;
    c.count = min(HEADS, shared - c.tile * HEADS);
    c.chunk = chunk, c.used = s.used[c.b];
    c.position = s.position[c.b];
    c.known = c.position >= 0;
    return c;
}
/* Number `item` of all chunks. */
template <typename T, int D> __device__ inline Chunk chunk_at(const StepShared<T, D> &s, const Step<T> &p, int item) {
    const int groups = p.kv_heads * tiles_of(p);
    int b = 0;
    for (; item >= s.used[b] * groups; b++) item -= s.used[b] * groups;
    return chunk_of(s, p, b * groups + item / s.used[b], item % s.used[b]);
}
/* The chunks of the block, one after the other. */
struct Walk {
    bool by_group; /* the block has whole groups; else chunks of any group */
    int at, end;   /* an item of `end` chunks, or a group of `end` */
    Chunk c;       /* where at < end */

    template <typename T, int D> __device__ void go_to(const StepShared<T, D> &s, const Step<T> &p, int chunk) {
        if (at < end) c = by_group ? chunk_of(s, p, at, chunk) : chunk_at(s, p, at);
    }
    template <typename T, int D> __device__ void next(const StepShared<T, D> &s, const Step<T> &p) {
        int chunk = c.chunk + 1;
        if (!by_group) at++;
        else if (chunk == c.used) at += gridDim.x, chunk = 0;
        go_to(s, p, chunk);
    }
};
/* Whole groups save the joining of chunks of several blocks. They are taken where the block that has the most is not longer busy for it. */
template <typename T, int D> __device__ inline Walk first_chunk(const StepShared<T, D> &s, const Step<T> &p) {
    const int blocks = (int)gridDim.x, groups = p.batch * p.kv_heads * tiles_of(p);
    int chunks = 0, most = 0;
    for (int b = 0; b < p.batch; b++) chunks += s.used[b] * p.kv_heads * tiles_of(p), most = max(most, s.used[b]);
    const int turns = (chunks + blocks - 1) / blocks, by_group = (groups + blocks - 1) / blocks * most;
    Walk walk;
    walk.by_group = most <= HELD && by_group <= turns + JOINING;
    walk.at = (int)blockIdx.x * (walk.by_group ? 1 : turns); /* neighbours: mostly of one group */
    walk.end = walk.by_group ? groups : min(chunks, walk.at + turns);
    walk.go_to(s, p, 0);
    return walk;
}
/* A thread has 8 elements of keys, of every (2048 / D)th position, and 4 of values, of every (1024 / D)th: as many lines as
 * cached_split_kernel has, whose sums of values are added in this order. */
template <typename T, int D> struct Loaded {
    static constexpr int KEY_LANES = D / 8, KEY_LINES = CONSUMERS / KEY_LANES, KEYS = POSITIONS / KEY_LINES;
    static constexpr int VALUE_LANES = D / 4, VALUE_LINES = CONSUMERS / VALUE_LANES, VALUES = POSITIONS / VALUE_LINES;
    XtPiece<T, 8> key[KEYS];
    XtPiece<T, 4> value[VALUES];
};
/* Keys and values of a chunk that were stored by earlier steps; the new token's are not read here. */
template <typename T, int LANES, int N, int COUNT>
__device__ inline void load_chunk(XtPiece<T, N> (&piece)[COUNT], const T *from, const Step<T> &p, const Chunk &c) {
    constexpr int LINES = CONSUMERS / LANES, D = LANES * N;
    const int lane = threadIdx.x % LANES, first = c.chunk * POSITIONS + threadIdx.x / LANES,
              left = c.known ? c.position - first : 0;
    from += (((int64_t)c.b * p.kv_heads + c.kv_head) * p.length + first) * D + lane * N;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        piece[e] = {};
        if (e * LINES < left) piece[e] = xt_read<T, N>(from + e * LINES * D);
    }
}
/* Norm and RoPE of the query heads of a chunk and of the new key, to the warp's lines. */
template <typename T, int D>
__device__ inline void make_lines(StepShared<T, D> &s, const Step<T> &p, const StepLayer<T> &w, const Chunk &c, const T *new_row) {
    constexpr int LANES = D / 16;
    const int lane = threadIdx.x % 32, line = lane / LANES, col = lane % LANES * 8;
    const bool here = line < c.count || line == HEADS;
    const T *from = new_row + (line < HEADS ? c.head + line : p.heads + c.kv_head) * D + col;
    XtPiece<T, 8> pair[2] = {};
    if (here) pair[0] = read_shared_piece(from), pair[1] = read_shared_piece(from + D / 2);
    if (w.q_norm) {
        const T *weight = (line < HEADS ? w.q_norm : w.k_norm) + col;
        float sum[1] = {squares<T, 8>(pair[0]) + squares<T, 8>(pair[1])};
        sum_of_lanes<1>(sum, LANES);
        const float rstd = reciprocal_root(sum[0] * p.inverse_dim + p.eps);
        pair[0] = normalised<T, 8>(pair[0], xt_read<T, 8>(weight), rstd);
        pair[1] = normalised<T, 8>(pair[1], xt_read<T, 8>(weight + D / 2), rstd);
    }
    turn<T, 8>(pair, *(const XtPiece<T, 8> *)&s.angles[c.b][0][col], *(const XtPiece<T, 8> *)&s.angles[c.b][1][col]);
    T(&lines)[HEADS + 1][D] = s.chunk.lines[threadIdx.x / 32];
    __syncwarp(); /* the last chunk's readers are done */
    if (here) *(XtPiece<T, 8> *)&lines[line][col] = pair[0], *(XtPiece<T, 8> *)&lines[line][col + D / 2] = pair[1];
    __syncwarp();
}
/* Joins the chunks of a group, in their order, from global memory. */
template <typename T, int D> __device__ inline void join_chunks(StepShared<T, D> &s, const Step<T> &p, const Chunk &c) {
    const int64_t row0 = (int64_t)c.b * p.heads + c.head;
    const int i = threadIdx.x / D, d = threadIdx.x % D;
    if (i >= c.count) return;
    const float2 *stats = p.stats + (row0 + i) * p.chunks;
    const float *parts = p.parts + (row0 + i) * p.chunks * D + d;
    float max = -INFINITY, weight = 0, total = 0;
#pragma unroll 4
    for (int n = 0; n < c.used; n++) max = fmaxf(max, __ldcg(&stats[n]).x);
#pragma unroll 4
    for (int n = 0; n < c.used; n++) {
        const float2 part = __ldcg(&stats[n]);
        const float factor = xt_exp_for<T>(part.x - max);
        weight += part.y * factor;
        total += __ldcg(&parts[n * D]) * factor;
    }
    p.attended[(row0 + i) * D + d] = xt_store<T>(total / weight);
}
/* The same of a group whose chunks this block holds: this thread's element of each. */
template <typename T, int D>
__device__ inline void join_held(StepShared<T, D> &s, const Step<T> &p, const Chunk &c, const float (&held)[HELD]) {
    const int i = threadIdx.x / D;
    if (i >= c.count) return;
    float max = -INFINITY, weight = 0, total = 0;
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (n < c.used) max = fmaxf(max, s.chunk.held[n][i].x);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        if (n < c.used) {
            const float2 part = s.chunk.held[n][i];
            const float factor = xt_exp_for<T>(part.x - max);
            weight += part.y * factor;
            total += held[n] * factor;
        }
    }
    p.attended[((int64_t)c.b * p.heads + c.head + i) * D + threadIdx.x % D] = xt_store<T>(total / weight);
}
/* Computes the chunk of `walk`, whose older keys and values are loaded; as cached_split_kernel does, in the same order. Those of the next
 * chunk are loaded as soon as there is room. made: the group that the warp's lines are of. */
template <typename T, int D>
__device__ inline void attend(StepShared<T, D> &s, const Step<T> &p, const StepLayer<T> &w, Walk &walk, int &made, Loaded<T, D> &at,
                              float (&held)[HELD]) {
    using L = Loaded<T, D>;
    const Chunk c = walk.c;
    walk.next(s, p);
    const bool more = walk.at < walk.end;
    const int64_t row0 = (int64_t)c.b * p.heads + c.head;
    T *out = p.attended + row0 * D; // [count, D]
    if (!c.known) {                 /* all threads agree */
        if ((int)threadIdx.x < c.count * D) out[threadIdx.x] = xt_store<T>(NAN);
        if (more)
            load_chunk<T, L::KEY_LANES>(at.key, w.keys, p, walk.c), load_chunk<T, L::VALUE_LANES>(at.value, w.values, p, walk.c);
        return;
    }
    const T *new_row = p.qkv + (int64_t)c.b * (p.heads + 2 * p.kv_heads) * D; // [H + 2 K, D]
    const T *new_value = new_row + (p.heads + p.kv_heads + c.kv_head) * D;
    const int last = c.position - c.chunk * POSITIONS; /* of the row, counted from this chunk's first position */
    const int64_t place = (((int64_t)c.b * p.kv_heads + c.kv_head) * p.length + c.position) * D; /* of the new token in the cache */
    const int value_lane = threadIdx.x % L::VALUE_LANES, value_line = threadIdx.x / L::VALUE_LANES;
    XtPiece<T, 4> value = {};
    if (last < POSITIONS && last % L::VALUE_LINES == value_line) {
        const uint2 q = __ldcg((const uint2 *)(new_value + value_lane * 4));
        value = {{q.x, q.y}};
        if (c.tile == 0) xt_write(w.values + place + value_lane * 4, value);
    }
    if (made != c.group) make_lines(s, p, w, c, new_row), made = c.group;
    { /* scores */
        const T(&lines)[HEADS + 1][D] = s.chunk.lines[threadIdx.x / 32];
        const int lane = threadIdx.x % L::KEY_LANES, line = threadIdx.x / L::KEY_LANES;
        const XtPiece<T, 8> key = *(const XtPiece<T, 8> *)&lines[HEADS][lane * 8];
        if (c.tile == 0 && last < POSITIONS && last % L::KEY_LINES == line) xt_write(w.keys + place + lane * 8, key);
        const XtVector<float, 8> q[HEADS] = {xt_load(*(const XtPiece<T, 8> *)&lines[0][lane * 8]),
                                             xt_load(*(const XtPiece<T, 8> *)&lines[c.count > 1][lane * 8])};
        constexpr int COUNT = L::KEYS * HEADS;
        float dot[COUNT] = {};
#pragma unroll
        for (int e = 0; e < L::KEYS; e++) {
            if (e * L::KEY_LINES + line == last) at.key[e] = key;
            const XtVector<float, 8> of_key = xt_load(at.key[e]);
#pragma unroll
            for (int i = 0; i < HEADS; i++)
#pragma unroll
                for (int n = 0; n < 8; n++) dot[e * HEADS + i] += q[i].at[n] * of_key.at[n];
        }
        /* The sums over the lanes, each in the order of xt_warp_sum: a lane goes on with half of the numbers of the lanes before, as long as
         * it has several. Pairs of lanes come to the same number. */
        int left = COUNT, number = 0;
#pragma unroll
        for (int step = L::KEY_LANES / 2; step > 0; step /= 2) {
            if (left > 1) {
                left /= 2;
                const bool upper = lane & step;
#pragma unroll
                for (int n = 0; n < COUNT / 2; n++)
                    if (n < left) {
                        const float kept = upper ? dot[n + left] : dot[n], sent = upper ? dot[n] : dot[n + left];
                        dot[n] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
                    }
                number += upper ? left : 0;
            } else dot[0] += __shfl_xor_sync(0xffffffffu, dot[0], step);
        }
        const int j = number / HEADS * L::KEY_LINES + line;
        s.chunk.scores[number % HEADS][j] = j <= last ? dot[0] * p.scale : -INFINITY;
    }
    if (more) load_chunk<T, L::KEY_LANES>(at.key, w.keys, p, walk.c);
    xt_named_sync(ALL, CONSUMERS);
    if (const int i = threadIdx.x / 32; i < c.count) {
        const int n = threadIdx.x % 32;
        float *scores = s.chunk.scores[i];
        const float a = scores[n], b = scores[n + 32];
        const float max = xt_warp_reduce(a > b ? a : b, XtMax());
        const float ea = xt_exp_for<T>(a - max), eb = xt_exp_for<T>(b - max), sum = xt_warp_sum(ea + eb);
        scores[n] = ea;
        scores[n + 32] = eb;
        if (n == 0) {
            const float2 stat = make_float2(max, sum);
            s.chunk.stat[i] = stat;
            if (walk.by_group) s.chunk.held[c.chunk][i] = stat;
            else p.stats[(row0 + i) * p.chunks + c.chunk] = stat;
        }
    }
    xt_named_sync(ALL, CONSUMERS);
    float sum[HEADS][4] = {};
#pragma unroll
    for (int e = 0; e < L::VALUES; e++) {
        const int j = e * L::VALUE_LINES + value_line;
        if (j > last) continue;
        if (j == last) at.value[e].word[0] = value.word[0], at.value[e].word[1] = value.word[1];
        const XtVector<float, 4> of_value = xt_load(at.value[e]);
#pragma unroll
        for (int i = 0; i < HEADS; i++) {
            const float weight = i < c.count ? s.chunk.scores[i][j] : 0.0f;
#pragma unroll
            for (int n = 0; n < 4; n++) sum[i][n] += weight * of_value.at[n];
        }
    }
    if (more) load_chunk<T, L::VALUE_LANES>(at.value, w.values, p, walk.c);
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        *(float4 *)&s.chunk.sums[value_line][i][value_lane * 4] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    xt_named_sync(ALL, CONSUMERS);
    if (const int i = threadIdx.x / D, d = threadIdx.x % D; i < c.count) {
        float total = 0;
#pragma unroll
        for (int r = 0; r < L::VALUE_LINES; r++) total += s.chunk.sums[r][i][d];
        if (c.used == 1) out[i * D + d] = xt_store<T>(total / s.chunk.stat[i].y);
        else if (!walk.by_group) p.parts[((row0 + i) * p.chunks + c.chunk) * D + d] = total;
        else {
#pragma unroll
            for (int n = 0; n < HELD; n++)
                if (n == c.chunk) held[n] = total;
        }
    }
    if (c.used == 1) return;
    if (walk.by_group) {
        if (c.chunk == c.used - 1) join_held<T, D>(s, p, c, held);
        return;
    }
    /* The block that ends last joins the chunks. */
    __threadfence();
    xt_named_sync(ALL, CONSUMERS);
    if (threadIdx.x == 0) {
        unsigned *count = &step_chunks[c.group];
        s.chunk.is_last = atomicAdd(count, 1u) == (unsigned)c.used - 1;
        if (s.chunk.is_last) *count = 0;
    }
    xt_named_sync(ALL, CONSUMERS);
    if (!s.chunk.is_last) return;
    __threadfence();
    join_chunks(s, p, c);
}
/* Attention of all rows. meet() returns when q, k and v are there. */
template <typename T, int D, typename Meet>
__device__ inline void attend_all(StepShared<T, D> &s, const Step<T> &p, const StepLayer<T> &w, Walk walk, Meet meet) {
    using L = Loaded<T, D>;
    int made = -1;
    float held[HELD] = {};
    L at;
    if (walk.at < walk.end)
        load_chunk<T, L::KEY_LANES>(at.key, w.keys, p, walk.c), load_chunk<T, L::VALUE_LANES>(at.value, w.values, p, walk.c);
    meet();
    while (walk.at < walk.end) attend<T, D>(s, p, w, walk, made, at, held);
}
