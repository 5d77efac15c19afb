/* hopper.cuh - a matrix product on Hopper's tensor cores whose results pass through an epilogue before they are written.
 *
 * Plan: a block stays on its multiprocessor and takes tile after tile. One thread fetches A and B by the copy engine, 64 terms of the
 * sums at a time, into a ring of stages; two warpgroups multiply. They take turns: while one multiplies its tile, the other writes its
 * own. So an epilogue costs time only where it takes longer than a tile's products, and it may wait for memory.
 *
 * Epilogue: a warpgroup's tile in pieces of 64 rows and 32 columns, which the copy engine fetches and stores; in between, a thread
 * has the same elements of a piece that it has of the product. SwiGLU's gradient has four pieces to move for each that a product has. There
 * the copy engine, which takes some four cycles for a row of a piece and has A and B to fetch, would be what everything waits for: a warp
 * for each warpgroup moves them by ordinary instructions.
 *
 * Deterministic: one sum an element, terms in order, whatever block has the tile.
 */
#ifndef XT_GEMM_HOPPER_CUH
#define XT_GEMM_HOPPER_CUH

#include "arch/sm90.cuh"
#include "common/gelu.cuh"
#include "common/pieces.cuh"
#include "common/swiglu.cuh"
#include "contract/gemm.h"

constexpr int HOPPER_PIECE = 64 * 32 * 2; // bytes

/* ROWS and COLUMNS of a warpgroup's tile of C; STAGES of the ring; PIECES of each warpgroup. */
struct HopperTiles {
    static constexpr int ROWS = 128, COLUMNS = 192, STAGES = 4, PIECES = 8, THREADS = 384;
    static constexpr int A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, STAGE = A_BYTES + B_BYTES;
    static constexpr int PIECES_AT = STAGES * STAGE, MY_PIECES = PIECES * HOPPER_PIECE, BARRIERS_AT = PIECES_AT + 2 * MY_PIECES,
                         BYTES = BARRIERS_AT + 8 * (2 * STAGES + 4 * PIECES) + 1024; // and room to align
    static_assert(BYTES <= 227 * 1024, "a block has no more");
};

typedef enum HopperKind {
    HOPPER_SWIGLU, /* c [rows, 2 columns] = a b^T, b [2 columns, terms], and out [rows, columns] = silu(c's left half) right half */
    HOPPER_SWIGLU_BWD,  /* dy = a b, b [terms, columns]; c, gate and up [rows, 2 columns], becomes their gradients */
    HOPPER_SWIGLU_BOTH, /* that, and out [rows, columns] = silu(c's left half) right half, of c as it was */
    HOPPER_GELU,        /* c = a b, b [terms, columns], and out = gelu(c + bias), the approximation by tanh */
    HOPPER_GELU_BWD /* dy = a b^T, b [columns, terms]; c becomes dy gelu'(c + bias), and sums [4 down, columns] the sums of its rows:
                      * row 4 i + w of rows 16 w to 16 w + 15 of both halves of the i-th 128 rows */
} HopperKind;

typedef struct HopperMaps {
    CUtensorMap a, b, c, d; // d: the activation's output
} HopperMaps;
typedef struct HopperCall {
    int tiles, down, across, group; // of C: all, in a column, in a row; how many below each other make a group
    int steps;                      // of 64 terms
    int rows, columns;              // of c; columns of c, or of a half of it
    void *c;                        // for the warps that move pieces
    int64_t ld;                     // of c
    void *out;                      // of SwiGLU beside its gradient [rows, columns]
    const void *bias;               // of GELU [columns]
    float *sums;                    // of GELU's gradient [4 down, columns], or NULL
} HopperCall;

/* Tiles of a group stand below each other in `group` rows; in a group, column by column: what runs at once shares rows and columns. */
__device__ inline void hopper_place(const HopperCall &call, int tile, int &down, int &across) {
    int whole = call.group * call.across, first = tile / whole * call.group, rest = tile % whole;
    int rows = min(call.group, call.down - first);
    across = rest / rows;
    down = first + rest % rows;
}

/* SwiGLU and its gradient for both elements of a word. */
template <typename T> __device__ inline uint32_t hopper_swiglu(uint32_t gate, uint32_t up) {
    float2 g = xt_load_two(gate, T()), u = xt_load_two(up, T());
    return xt_round_pair<T>(xt_swiglu<T>(g.x, u.x), xt_swiglu<T>(g.y, u.y));
}
template <typename T> __device__ inline void hopper_swiglu_bwd(uint32_t dy, uint32_t &gate, uint32_t &up) {
    float2 d = xt_load_two(dy, T()), g = xt_load_two(gate, T()), u = xt_load_two(up, T()), dg, du;
    xt_swiglu_bwd<T>(d.x, g.x, u.x, dg.x, du.x);
    xt_swiglu_bwd<T>(d.y, g.y, u.y, dg.y, du.y);
    gate = xt_round_pair<T>(dg.x, dg.y);
    up = xt_round_pair<T>(du.x, du.y);
}

/* The gradient as above, and silu(gate) up in the place of dy. */
template <typename T> __device__ inline void hopper_swiglu_both(uint32_t &dy, uint32_t &gate, uint32_t &up) {
    const uint32_t out = hopper_swiglu<T>(gate, up);
    hopper_swiglu_bwd<T>(dy, gate, up);
    dy = out;
}

/* GELU of a sum, and its gradient, for both elements of a word. */
template <typename T> __device__ inline uint32_t hopper_gelu(uint32_t x, float2 bias) {
    float2 v = xt_load_two(x, T());
    return xt_round_pair<T>(xt_gelu<T, true>(v.x + bias.x), xt_gelu<T, true>(v.y + bias.y));
}
template <typename T> __device__ inline uint32_t hopper_gelu_bwd(uint32_t dy, uint32_t x, float2 bias) {
    float2 d = xt_load_two(dy, T()), v = xt_load_two(x, T());
    return xt_round_pair<T>(d.x * xt_gelu_slope<T, true>(v.x + bias.x), d.y * xt_gelu_slope<T, true>(v.y + bias.y));
}

/* The sums over the 8 lanes of a warp that differ in more than the last two bits, one of the 8 a lane: of value lane / 16 * 4 + lane / 8 % 2
 * * 2 + lane / 4 % 2. Each lane keeps half of the values and gives the other half away. */
__device__ inline float hopper_fold(float (&value)[8], int lane) {
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
        bool high = lane & 4 * n;
#pragma unroll
        for (int j = 0; j < n; j++) {
            float given = high ? value[j] : value[j + n], kept = high ? value[j + n] : value[j];
            value[j] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * n);
        }
    }
    return value[0];
}

/* Four neighbouring lanes have two columns each of four matrices of eight; lane t of them gets all columns of matrix t. */
__device__ inline void hopper_gather(uint32_t (&x)[4], int lane) {
    const bool high = lane & 2, odd = lane & 1;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 2), b = __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 2);
    /* Of matrix 0 (2 in the high lanes) and of the next one, what the lanes of this parity have. */
    const uint32_t even_low = high ? a : x[0], even_high = high ? x[2] : a, odd_low = high ? b : x[1], odd_high = high ? x[3] : b;
    const uint32_t c = __shfl_xor_sync(0xffffffffu, odd ? even_low : odd_low, 1),
                   d = __shfl_xor_sync(0xffffffffu, odd ? even_high : odd_high, 1);
    x[0] = odd ? c : even_low, x[1] = odd ? odd_low : c, x[2] = odd ? d : even_high, x[3] = odd ? odd_high : d;
}

/* Where 16 bytes, part of a row, lie in a piece: as the copy engine puts them. */
__device__ inline int hopper_place_in_piece(int row, int part) { return row * 64 + (part ^ (row / 2 % 4)) * 16; }

/* A warp that moves the pieces of c for warpgroup `me`, ROOMS turns of two, to shared memory and back. Barriers of a room: `ready`, the pieces
 * have landed; `done`, the results are in it. A lane moves the same 16 bytes of a room in and out, so its next copy begins after its
 * read of what that overwrites. */
template <typename T, int ROOMS, int TURNS>
__device__ inline void hopper_move(const HopperCall &call, int me, uint32_t pieces, uint32_t ready, uint32_t done) {
    using P = HopperTiles;
    const int lane = threadIdx.x % 32, stride = 2 * (int)gridDim.x;
    struct Cursor { /* of the next turn to fetch, or to store: the lane's first row and column */
        int tile, turn = 0, row, column;
    } in, out;
    auto go_to = [&](Cursor &at) {
        int down, across;
        hopper_place(call, at.tile, down, across);
        at.row = down * P::ROWS + lane / 4, at.column = across * P::COLUMNS + lane % 4 * 8;
    };
    /* The two blocks of a panel, then the next panel. */
    auto advance = [&](Cursor &at) {
        at.turn++;
        if (at.turn % 2) at.row += 64;
        else at.row -= 64, at.column += 32;
        if (at.turn < TURNS) return;
        at.turn = 0, at.tile += stride;
        if (at.tile < call.tiles) go_to(at);
    };
    /* f(address in the room, address in c, whether it is there) of 8 rows from row r on of a piece. */
    auto rows_of = [&](const Cursor &at, uint32_t room, int piece, int r, auto f) {
        T *place = (T *)call.c + (at.row + r) * call.ld + piece * call.columns + at.column;
        f(room + piece * HOPPER_PIECE + hopper_place_in_piece(r + lane / 4, lane % 4), place,
          at.row + r < call.rows && at.column < call.columns);
    };
    in.tile = out.tile = (int)blockIdx.x + me * (int)gridDim.x;
    if (in.tile >= call.tiles) return;
    const int turns = ((call.tiles - in.tile - 1) / stride + 1) * TURNS;
    go_to(in), go_to(out);
    for (int n = 0, number = 0, parity = 1; n < turns + ROOMS; n++) { // parity: of the room's last use
        const uint32_t room = pieces + number * (2 * HOPPER_PIECE);
        if (n >= ROOMS) {
            xt_barrier_wait(done + 8 * number, parity);
#pragma unroll
            for (int piece = 0; piece < 2; piece++)
                for (int first = 0; first < 64; first += 32) { // four reads are under way at once
                    uint4 words[4];
#pragma unroll
                    for (int r = 0; r < 4; r++)
                        rows_of(out, room, piece, first + 8 * r, [&](uint32_t from, T *, bool) { words[r] = xt_get_words(from); });
#pragma unroll
                    for (int r = 0; r < 4; r++)
                        rows_of(out, room, piece, first + 8 * r, [&](uint32_t, T *to, bool there) {
                            if (there) xt_put_words(to, words[r]);
                        });
                }
            advance(out);
        }
        if (n < turns) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                rows_of(in, room, i / 8, i % 8 * 8,
                        [&](uint32_t to, T *from, bool there) { xt_copy_async_at(to, there ? from : (T *)call.c, there); });
            xt_copies_arrive(ready + 8 * number);
            advance(in);
        }
        if (++number == ROOMS) number = 0, parity ^= 1;
    }
}

template <typename T, HopperKind KIND>
__global__ void __launch_bounds__(HopperTiles::THREADS, 1)
    gemm_hopper_kernel(const __grid_constant__ HopperMaps maps, const __grid_constant__ HopperCall call) {
#ifdef XT_SM90A
    using P = HopperTiles;
    constexpr int STAGES = P::STAGES, COLUMNS = P::COLUMNS, BLOCKS = P::ROWS / 64;
    constexpr bool BOTH = KIND == HOPPER_SWIGLU_BOTH, MOVED = KIND == HOPPER_SWIGLU_BWD || BOTH; // MOVED: by warps of their own
    constexpr bool SWIGLU = KIND == HOPPER_SWIGLU || MOVED, FORWARD = KIND == HOPPER_SWIGLU || KIND == HOPPER_GELU;
    constexpr bool HALVES = KIND == HOPPER_SWIGLU;       // a tile has as many columns of either half
    constexpr bool TERMS = MOVED || KIND == HOPPER_GELU; // the rows of b are the terms
    constexpr int WIDTH = HALVES ? COLUMNS / 2 : COLUMNS;
    constexpr int OUTS = KIND == HOPPER_SWIGLU ? 3 : KIND == HOPPER_GELU_BWD ? 1 : 2; // pieces of one turn of the epilogue
    constexpr int ROOMS = P::PIECES / OUTS;                                           // for turns
    constexpr int TURNS = BLOCKS * (WIDTH / 32);
    static_assert(ROOMS >= 2, "a turn's pieces, and the next one's");
    static_assert(P::ROWS == XT_GEMM_SUMMED && XT_GEMM_SUMS == 4, "rows of sums that the caller has made: one a warp and tile");
    extern __shared__ char room[];
    uint32_t base = (xt_shared_address(room) + 1023) & ~1023u, full = base + P::BARRIERS_AT, empty = full + 8 * STAGES,
             fetched = empty + 8 * STAGES, done = fetched + 2 * 8 * P::PIECES, pieces = base + P::PIECES_AT; // of both warpgroups
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            xt_barrier_init(full + 8 * s, 1);
            xt_barrier_init(empty + 8 * s, 4);
        }
        for (int s = 0; s < 2 * P::PIECES; s++) {
            xt_barrier_init(fetched + 8 * s, MOVED ? 32 : 1);
            xt_barrier_init(done + 8 * s, 4);
        }
        xt_barrier_init_fence();
        xt_prefetch_map(&maps.a);
        xt_prefetch_map(&maps.b);
        xt_prefetch_map(&maps.c);
    }
    __syncthreads();

    int first = blockIdx.x, stride = gridDim.x, steps = call.steps;
    if (threadIdx.x < 128) { // copies
        xt_registers_less<MOVED ? 40 : 24>();
        if constexpr (MOVED) {
            const int me = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) - 1;
            if (me == 0 || me == 1)
                hopper_move<T, ROOMS, TURNS>(call, me, pieces + me * P::MY_PIECES, fetched + me * 8 * P::PIECES,
                                             done + me * 8 * P::PIECES);
        }
        if (threadIdx.x == 0) {
            int stage = 0, parity = 1; // of the barrier `empty`
            for (int tile = first; tile < call.tiles; tile += stride) {
                int down, across;
                hopper_place(call, tile, down, across);
                int row = down * P::ROWS, column = across * WIDTH;
                for (int k = 0; k < steps; k++) {
                    uint32_t a = base + stage * P::STAGE, b = a + P::A_BYTES, here = full + 8 * stage;
                    xt_barrier_wait(empty + 8 * stage, parity);
                    xt_barrier_expect(here, P::STAGE);
                    xt_panel_load(a, &maps.a, 64 * k, row, 0, 0, here);
                    if constexpr (HALVES) { // a panel of COLUMNS rows, half of them gate's and half up's
                        for (int half = 0; half < 2; half++)
                            xt_panel_load(b + half * (P::B_BYTES / 2), &maps.b, 64 * k, column, half, 0, here);
                    } else if constexpr (!TERMS) {
                        xt_panel_load(b, &maps.b, 64 * k, column, 0, 0, here);
                    } else { // panels of 64 columns
                        for (int c = 0; c < COLUMNS / 64; c++)
                            xt_panel_load(b + c * 8192, &maps.b, column + 64 * c, 64 * k, 0, 0, here);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else { // multiplies
        xt_registers_more<MOVED ? 232 : 240>();
        int me = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0) - 1, lane = threadIdx.x % 32;
        bool leads = threadIdx.x % 128 == 0;
        pieces += me * P::MY_PIECES, fetched += me * 8 * P::PIECES, done += me * 8 * P::PIECES;
        /* Of a piece: this thread's row of the matrices that a warp puts and gets, and where its pieces of 16 bytes lie. */
        int my_row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        uint32_t my_place[2];
        for (int q = 0; q < 2; q++) my_place[q] = hopper_place_in_piece(my_row, 2 * q + lane / 16);
        auto release = [&](int stage) {
            if (lane == 0) xt_barrier_arrive(empty + 8 * stage);
        };

        constexpr int MY_PIECES = 1, MY_TURN = 3;   // named barriers, two each
        if (me == 1) xt_named_arrive(MY_TURN, 256); // the first may begin
        unsigned turn = 0;                          // of the epilogue
        int now = me;
        for (int tile = first + now * stride; tile < call.tiles; tile += 2 * stride, now += 2) {
            int down, across;
            hopper_place(call, tile, down, across);
            int row = down * P::ROWS, column = across * WIDTH;
            unsigned n = (unsigned)now * (unsigned)steps;
            int stage = n % STAGES, parity = n / STAGES % 2;
            auto fetch = [&](unsigned number, int i) { // the pieces of turn i of this tile
                uint32_t to = pieces + number % ROOMS * (OUTS * HOPPER_PIECE), here = fetched + 8 * (number % ROOMS);
                int r = row + i % BLOCKS * 64, c = column + i / BLOCKS * 32;
                xt_barrier_expect(here, OUTS * HOPPER_PIECE);
                for (int o = 0; o < OUTS; o++) xt_panel_load(to + o * HOPPER_PIECE, &maps.c, c, r, o, 0, here);
            };
            uint32_t bias[2][4]; // this thread's columns of this panel and the next, 2 of each 8
            auto fetch_bias = [&](int panel) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int at = column + panel * 32 + j * 8 + lane % 4 * 2;
                    bias[panel % 2][j] = at < call.columns ? __ldg((const uint32_t *)((const T *)call.bias + at)) : 0;
                }
            };
            if constexpr (!SWIGLU) fetch_bias(0);
            if (!FORWARD && !MOVED && leads) {
                xt_store_wait<0>();
                for (int i = 0; i < ROOMS - 1 && i < TURNS; i++) fetch(turn + i, i);
            }

            float d[BLOCKS][COLUMNS / 2];
            /* A parity tells a phase of a stage from the next one only, so nobody waits for a tile before the tile before it. */
            xt_named_sync(MY_TURN + me, 256);
#pragma unroll 1
            for (int k = 0; k < steps; k++) {
                uint32_t a = base + stage * P::STAGE, b = a + P::A_BYTES;
                uint64_t left = xt_panel_operand(a, 0), right = xt_panel_operand(b, TERMS ? 8192 : 0);
                xt_barrier_wait(full + 8 * stage, parity);
                xt_wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++) // 16 columns are 32 bytes, 16 rows 2048, 64 rows 8192
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++)
                        if constexpr (!TERMS)
                            xt_wgmma<T, COLUMNS>(d[block], left + i * 2 + block * 512, right + i * 2, k > 0 || i > 0);
                        else xt_wgmma_rows<T, COLUMNS>(d[block], left + i * 2 + block * 512, right + i * 128, k > 0 || i > 0);
                xt_wgmma_commit();
                xt_wgmma_wait<1>();
                if (k > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            if (tile + stride < call.tiles) xt_named_arrive(MY_TURN + 1 - me, 256);
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) xt_wgmma_wait<0>(d[block]);
            release(stage == 0 ? STAGES - 1 : stage - 1);

            float sums[8]; // of this thread's columns of a panel: 2 of each 8
#pragma unroll
            for (int i = 0; i < TURNS; i++, turn++) {
                constexpr int UP = COLUMNS / 4; // from an element of the left half to that of the right one
                int block = i % BLOCKS, panel = i / BLOCKS;
                uint32_t here = pieces + turn % ROOMS * (OUTS * HOPPER_PIECE);
                if (!SWIGLU && block == 0 && i + BLOCKS < TURNS) fetch_bias(panel + 1);
                if (!FORWARD) xt_barrier_wait(fetched + 8 * (turn % ROOMS), turn / ROOMS % 2);
                else { // the stores of the turn that had this room have read it
                    if (leads) xt_store_wait<ROOMS - 1>();
                    xt_named_sync(MY_PIECES + me, 128);
                }
#pragma unroll
                for (int q = 0; q < 2; q++) { // 16 columns
                    int e = panel * 16 + q * 8;
                    uint32_t x[4], y[4], z[4], at = here + my_place[q];
#pragma unroll
                    for (int w = 0; w < 4; w++) x[w] = xt_round_pair<T>(d[block][e + 2 * w], d[block][e + 2 * w + 1]);
                    if constexpr (HALVES) {
#pragma unroll
                        for (int w = 0; w < 4; w++) {
                            y[w] = xt_round_pair<T>(d[block][UP + e + 2 * w], d[block][UP + e + 2 * w + 1]);
                            z[w] = hopper_swiglu<T>(x[w], y[w]);
                        }
                        xt_put_matrices(at, x);
                        xt_put_matrices(at + HOPPER_PIECE, y);
                        xt_put_matrices(at + 2 * HOPPER_PIECE, z);
                    } else if constexpr (MOVED) {
                        xt_load_matrices<false>(y, at);
                        xt_load_matrices<false>(z, at + HOPPER_PIECE);
#pragma unroll
                        for (int w = 0; w < 4; w++)
                            if constexpr (BOTH) hopper_swiglu_both<T>(x[w], y[w], z[w]);
                            else hopper_swiglu_bwd<T>(x[w], y[w], z[w]);
                        xt_put_matrices(at, y);
                        xt_put_matrices(at + HOPPER_PIECE, z);
                        if constexpr (BOTH) { // rows of 32 bytes, straight from registers
                            hopper_gather(x, lane);
                            const int r = row + block * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 + lane % 2 * 8,
                                      c = column + panel * 32 + q * 16 + lane % 4 / 2 * 8;
                            if (r < call.rows && c < call.columns)
                                xt_put_words((T *)call.out + (int64_t)r * call.columns + c, make_uint4(x[0], x[1], x[2], x[3]));
                        }
                    } else { // words 0 and 1 have columns 2 t, + 1, of two rows, words 2 and 3 8 columns further
                        float2 b[2];
#pragma unroll
                        for (int half = 0; half < 2; half++) b[half] = xt_load_two(bias[panel % 2][2 * q + half], T());
                        if constexpr (FORWARD) xt_put_matrices(at, x);
                        else xt_load_matrices<false>(y, at);
#pragma unroll
                        for (int w = 0; w < 4; w++)
                            if constexpr (FORWARD) x[w] = hopper_gelu<T>(x[w], b[w / 2]);
                            else x[w] = hopper_gelu_bwd<T>(x[w], y[w], b[w / 2]);
                        xt_put_matrices(FORWARD ? at + HOPPER_PIECE : at, x);
                        if constexpr (!FORWARD) {
#pragma unroll
                            for (int w = 0; w < 4; w += 2) {
                                float2 low = xt_load_two(x[w], T()), high = xt_load_two(x[w + 1], T());
                                float *sum = sums + q * 4 + w;
                                sum[0] = low.x + high.x + (block ? sum[0] : 0);
                                sum[1] = low.y + high.y + (block ? sum[1] : 0);
                            }
                        }
                    }
                }
                if constexpr (KIND == HOPPER_GELU_BWD)
                    if (block == BLOCKS - 1 && call.sums) {
                        int at = column + panel * 32 + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
                        float sum = hopper_fold(sums, lane);
                        if (at < call.columns) call.sums[(int64_t)(down * 4 + threadIdx.x % 128 / 32) * call.columns + at] = sum;
                    }
                if constexpr (MOVED) {
                    __syncwarp();
                    if (lane == 0) xt_barrier_arrive(done + 8 * (turn % ROOMS));
                    continue;
                }
                xt_async_fence();
                xt_named_sync(MY_PIECES + me, 128);
                if (leads) {
                    int r = row + block * 64, c = column + panel * 32;
                    xt_panel_store(&maps.c, here, c, r, 0, 0);
                    if constexpr (FORWARD) xt_panel_store(&maps.d, here + (OUTS - 1) * HOPPER_PIECE, c, r, 0, 0);
                    if constexpr (SWIGLU) xt_panel_store(&maps.c, here + HOPPER_PIECE, c, r, 1, 0);
                    xt_store_commit();
                    if (!FORWARD && i + ROOMS - 1 < TURNS) { // into the room of the turn before, whose stores have read it
                        xt_store_wait<1>();
                        fetch(turn + ROOMS - 1, i + ROOMS - 1);
                    }
                }
            }
        }
        if (leads) xt_store_land();
    }
#else
    XT_NO_SM90A();
#endif
}

#endif
