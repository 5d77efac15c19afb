/* flash_hopper_ordered.cuh - backward of flash_hopper in five products: dQ is summed in memory, in a fixed order.
 *
 * Plan: a block owns 128 keys and walks through the queries, as for dK and dV alone. dS of both computing warpgroups goes through shared
 * memory, and each warpgroup makes half of the columns of dQ = dS K. Two warps of the copying warpgroup add tiles of dQ in turns to
 * float32 sums in global memory with the copy engine: one waits for its turn or for its addition to land while the other's goes on. A
 * last kernel rounds the sums; or (FINISH) the last to add to a tile does it the other way round: its warp fetches the sum into the room of the part, before the computing warps are
 * through with their products, and these add theirs, round and write dQ.
 *
 * Order: a tile of queries gets the blocks of keys that see it by their rank. `turns` holds the rank that may add next; it moves once
 * the copy engine's addition has landed, not only read shared memory. Ranks follow the list of work, so a block waits only for blocks that
 * claimed their work before it: no deadlock with any number of blocks.
 *   Falling: the last keys first, which see the fewest queries. A block begins at its diagonal, so that neighbours of one length of walk
 *   add to one tile one step apart, and nobody waits. Ends with the longest, so the last heads are
 *   Rising: the longest first, heads in turns. Each waits a step for the one before it, which turns among heads hide.
 * Deterministic: ranks depend on the problem alone.
 */
#ifndef XT_ATTENTION_FLASH_HOPPER_ORDERED_CUH
#define XT_ATTENTION_FLASH_HOPPER_ORDERED_CUH

#include "flash_hopper_bwd.cuh"

struct HopperOrdered { // head dim 128 alone
    static constexpr int D = 128, TILE = 64, STAGES = 2, CONSUMERS = 2;
    static constexpr int ROWS = 64 * CONSUMERS, WIDTH = D, THREADS = 128 * (CONSUMERS + 1), COPY_REGISTERS = 24, REGISTERS = 240;
    static constexpr int PART = TILE * D; // floats of a tile of dQ: two panels of 64 columns
    /* Shared memory: K and V [ROWS, D]; STAGES of Q and dO [TILE, D]; dS [2][ROWS, TILE], which becomes dK and dV; dQ [2][PART];
     * STAGES of lse and delta [TILE]; barriers. */
    static constexpr int OWN_BYTES = ROWS * hopper_row_bytes(D), TILE_BYTES = TILE * hopper_row_bytes(D), STATS_BYTES = TILE * 4,
                         DS_BYTES = ROWS * TILE * 2, TILES_AT = 2 * OWN_BYTES, DS_AT = TILES_AT + STAGES * 2 * TILE_BYTES,
                         DQ_AT = DS_AT + 2 * DS_BYTES, STATS_AT = DQ_AT + 2 * PART * 4,
                         BARRIERS_AT = STATS_AT + STAGES * 2 * STATS_BYTES,
                         BYTES = BARRIERS_AT + 8 * (6 + 2 * STAGES) + HOPPER_WORK_BYTES + 1024; // and room to align
    static_assert(BYTES <= HOPPER_SHARED, "a block has no more");
};

constexpr int64_t HOPPER_SUM_TILES = 1 << 13; // the most tiles of sums, 256 MiB: working memory that flash_half does not need

/* The list of work: `falling` heads one after the other, then sections of heads in turns. */
typedef struct HopperRanks {
    HopperOrder rising;
    int falling, tiles; // heads; of all
} HopperRanks;
__device__ inline HopperWork hopper_ranked(const HopperRanks &ranks, int n, int heads) { // heads of a sequence
    if (n >= ranks.tiles) return {-1};
    int blocks = ranks.rising.blocks, before = ranks.falling * blocks, head = n / blocks, block = blocks - 1 - n % blocks;
    if (n >= before) {
        HopperTile tile = hopper_tile(ranks.rising, n - before);
        head = ranks.falling + tile.head, block = tile.block;
    }
    return {block, head / heads, head % heads, n < before};
}
/* Heads of keys; each has `bytes` of the other side. About 2 blocks of keys a multiprocessor are rising, so that the end is short.
 * Without a mask all blocks are as long, and all are rising. */
inline HopperRanks hopper_ranks(int64_t heads, int64_t blocks, int64_t bytes, bool causal) {
    int64_t last = xt_divide_up(2 * XT_PLAN_MULTIPROCESSORS, blocks);
    int64_t rising = causal ? last : heads, section = causal ? last : HOPPER_CACHE / bytes;
    if (rising > heads) rising = heads;
    section = section < 1 ? 1 : section > rising && rising > 0 ? rising : section;
    return {{(int)rising, (int)blocks, (int)section, (int)(rising * blocks)}, (int)(heads - rising), (int)(heads * blocks)};
}

typedef struct HopperOrderedCall {
    HopperBackwardCall base; // without its order
    HopperRanks ranks;
    void *dq;
    int64_t dq_stride[3];
    float *sums; // [batch, heads, padded / 64][2][64 rows][64 columns], pieces of 8 columns permuted: piece i of row r at i ^ r % 8
    unsigned *turns; // [batch, heads, padded / 64]: the rank that may add next
} HopperOrderedCall;

/* ---- dK, dV and sums of dQ ------------------------------------------------------------------------------------------------------- */

template <typename T, bool FINISH>
__global__ void __launch_bounds__(HopperOrdered::THREADS, 1)
    flash_hopper_ordered_kernel(const __grid_constant__ HopperBackwardMaps maps,
                                const __grid_constant__ HopperOrderedCall ordered) {
#ifdef XT_SM90A
    typedef HopperOrdered P;
    constexpr int D = P::D, TILE = P::TILE, STAGES = P::STAGES, ROWS = P::ROWS, PART = P::PART;
    const HopperBackwardCall &call = ordered.base;
    extern __shared__ char room[];
    uint32_t own = (xt_shared_address(room) + 1023) & ~1023u, tiles = own + P::TILES_AT, all_ds = own + P::DS_AT,
             parts = own + P::DQ_AT, all_stats = own + P::STATS_AT;
    uint32_t own_full = own + P::BARRIERS_AT, own_empty = own_full + 8, part_full = own_empty + 8, part_empty = part_full + 16,
             full = part_empty + 16, empty = full + 8 * STAGES, claim = empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        xt_barrier_init(own_full, 1);
        xt_barrier_init(own_empty, 256 + 2); // computing threads, two that add
        for (int w = 0; w < 2; w++) {
            xt_barrier_init(part_full + 8 * w, 256);
            xt_barrier_init(part_empty + 8 * w, 1);
        }
        for (int s = 0; s < STAGES; s++) {
            xt_barrier_init(full + 8 * s, 1);
            xt_barrier_init(empty + 8 * s, 256);
        }
        xt_barrier_init_fence();
    }
    __syncthreads();

    /* Queries from max(0, j - ahead) on see key j: tiles of queries from top_of(work) on see its block. */
    int sq = call.sq, skv = call.skv, ahead = call.causal ? skv - sq : skv, group = call.heads / call.kv_heads;
    int end = (sq + TILE - 1) / TILE;
    auto top_of = [&](const HopperWork &work) { return max(0, work.block * ROWS - ahead) / TILE; };
    auto last_of = [&](int i) {
        return min(ordered.ranks.rising.blocks - 1, (i * TILE + TILE - 1 + ahead) / ROWS);
    }; // that sees it
    auto rank_of = [&](const HopperWork &work, int i) { return (unsigned)(work.falling ? last_of(i) - work.block : work.block); };
    auto adds_first = [&](const HopperWork &work, int i) { return rank_of(work, i) == 0; };
    /* Whether the block adds last to tile i: the others' sum comes to it, instead of its part to the sum. */
    auto adds_last = [&](const HopperWork &work, int i) { return FINISH && work.block == (work.falling ? 0 : last_of(i)); };

    if (threadIdx.x < 128) { // copies
        xt_registers_less<P::COPY_REGISTERS>();
        int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            HopperRing<STAGES> ring;
            for (int turn = 0;; turn++) {
                int n = (int)atomicAdd(&hopper_claimed, 1u); // the first too: work begins in the order of the list
                HopperWork work = hopper_ranked(ordered.ranks, n, call.kv_heads);
                xt_barrier_wait(own_empty, turn % 2 ^ 1);
                hopper_put_work<false>(claim, work);
                if (work.block < 0) break;
                int b = work.batch, g = work.head;
                hopper_load_own<P>(own, maps, work.block * ROWS, g, b, own_full);
                for (int h = g * group; h < g * group + group; h++)
                    for (int i = top_of(work); i < end; i++, ring.n++) {
                        int s = ring.stage();
                        xt_barrier_wait(empty + 8 * s, ring.parity() ^ 1);
                        hopper_load_queries<P>(tiles + 2 * s * P::TILE_BYTES, all_stats + s * 2 * P::STATS_BYTES, maps, call, i, h,
                                               b, full + 8 * s);
                    }
            }
            xt_barrier_arrive(own_full); // there is no more
            hopper_leave();
        } else if (threadIdx.x % 32 == 0 && warp < 3) { // adds the part of a computing warpgroup
            int odd = warp - 1;
            unsigned added = 0;
            bool given = false; // whether the room of the next part is the computing warps'
            for (int turn = 0;; turn++) {
                xt_barrier_wait(own_full, turn % 2);
                HopperWork work = hopper_get_work<false>(claim);
                xt_barrier_arrive(own_empty);
                if (work.block < 0) break;
                int first_head = (work.batch * call.kv_heads + work.head) * group; // of queries
                for (int h = first_head; h < first_head + group; h++)
                    for (int i = top_of(work); i < end; i++, added++) {
                        if ((int)(added % 2) != odd) continue;
                        int64_t part = (int64_t)h * end + i;
                        unsigned rank = rank_of(work, i);
                        float *sum = ordered.sums + part * PART;
                        uint32_t my_part = parts + odd * PART * 4, empty = part_empty + 8 * odd;
                        bool first = adds_first(work, i), last = adds_last(work, i);
                        if (last && !first) {
                            xt_wait_released(ordered.turns + part, rank);
                            xt_async_fence_all();
                            xt_barrier_expect(empty, PART * 4);
                            xt_bulk_load(my_part, sum, PART * 4, empty);
                        } else if (!given) xt_barrier_arrive(empty);
                        given = false;
                        if (!last && !first) xt_wait_released(ordered.turns + part, rank);
                        xt_barrier_wait(part_full + 8 * odd, added / 2 % 2);
                        if (last) continue;
                        xt_async_fence_all();
                        xt_bulk_store(sum, my_part, PART * 4, !first);
                        xt_store_commit();
                        xt_store_wait();
                        if (!FINISH || (i + 2 < end && !adds_last(work, i + 2))) { // early: the addition has not landed
                            xt_barrier_arrive(empty);
                            given = true;
                        }
                        xt_store_land();
                        xt_async_fence_all();
                        xt_put_released(ordered.turns + part, rank + 1);
                    }
            }
        }
    } else { // computes
        xt_registers_more<P::REGISTERS>();
        int me = hopper_warpgroup() - 1, thread = threadIdx.x % 128, my_col = thread % 4 * 2;
        int in_part = thread / 32 * 16 + thread % 32 / 4, my_row = 64 * me + in_part; // rows 8 more have the same place among 8
        uint32_t my_k = own + 64 * me * 128, my_v = my_k + P::OWN_BYTES;
        uint32_t my_part = parts + me * PART / 2 * 4 + in_part * 256 + my_col * 4;
        HopperRing<STAGES> ring;
        for (int turn = 0;; turn++) {
            xt_barrier_wait(own_full, turn % 2);
            HopperWork work = hopper_get_work<false>(claim);
            if (work.block < 0) break;
            int first = work.block * ROWS, my_first = first + 64 * me, top = top_of(work);
            int b = work.batch, g = work.head, h = g * group; // h: of the queries
            float dk[D / 2], dv[D / 2];
#pragma unroll
            for (int i = 0; i < D / 2; i++) dk[i] = 0, dv[i] = 0;
            int count = group * max(0, end - top); // tiles, of one head after the other
#pragma unroll 1
            for (int i = top, c = 0; c < count; c++, ring.n++, i++) {
                if (i == end) i = top, h++;
                float s[TILE / 2];
                float dp[TILE / 2], dq[32];
                uint32_t p[TILE / 16][4];
                uint32_t q_tile = tiles + 2 * ring.stage() * P::TILE_BYTES, ds_tile = all_ds + ring.n % 2 * P::DS_BYTES;
                uint32_t stats = all_stats + ring.stage() * 2 * P::STATS_BYTES + my_col * 4;
                auto give_part = [&] {
                    xt_barrier_wait(part_empty + 8 * (ring.n % 2), ring.n / 2 % 2);
                    uint32_t here = my_part + ring.n % 2 * (PART * 4);
                    auto place = [&](int x) {
                        return here + x % 2 * 2048 + ((x / 2 ^ in_part % 8) * 32);
                    }; // piece x / 2 of row in_part + x % 2 * 8
                    if (adds_last(work, i)) {
                        if (!adds_first(work, i))
#pragma unroll
                            for (int x = 0; x < 16; x++) {
                                float2 sum = xt_read_shared(place(x));
                                dq[2 * x] = xt_add_flushed(sum.x, dq[2 * x]), dq[2 * x + 1] = xt_add_flushed(sum.y, dq[2 * x + 1]);
                            }
                        __syncwarp(); // the rows of a warp become its results
                        T *to = (T *)ordered.dq + b * ordered.dq_stride[0] + h * ordered.dq_stride[1] +
                                i * TILE * ordered.dq_stride[2] + me * 64;
                        hopper_write_rows<T, 64>(to, ordered.dq_stride[2], sq - i * TILE, 64,
                                                 parts + ring.n % 2 * (PART * 4) + me * PART / 2 * 4 + thread / 32 * 2048, 0, dq,
                                                 [&](int, float x) { return x * call.scale; });
                    } else
#pragma unroll
                        for (int x = 0; x < 16; x++) xt_put_shared(place(x), dq[2 * x], dq[2 * x + 1]);
                    xt_async_fence();
                    hopper_release_read(part_full + 8 * (ring.n % 2));
                };
                xt_barrier_wait(full + 8 * ring.stage(), ring.parity());
                if (i * TILE + TILE - 1 <
                    my_first - ahead) { // no query of the tile sees a key of this warpgroup: only dQ has others
                    xt_wgmma_wait<0>(dk);
                    if (c > 0) hopper_release_read(empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
                    uint32_t none[TILE / 16][4] = {};
                    hopper_put_words<TILE>(ds_tile + 64 * me * 128, none);
                    xt_async_fence();
                    xt_named_sync(3, 256);
                    xt_wgmma_fence();
                    hopper_turned_product<T, ROWS>(dq, ds_tile, own + me * ROWS * 128);
                    xt_wgmma_wait<0>(dq);
                    give_part();
                    continue;
                }
                xt_wgmma_fence();
                hopper_dot_rows<T, TILE, D, ROWS>(s, my_k, q_tile);
                hopper_dot_rows<T, TILE, D, ROWS>(dp, my_v, q_tile + P::TILE_BYTES);
                xt_wgmma_wait<1>(s); // and the dK before
                if (c > 0) hopper_release_read(empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
                hopper_probabilities<TILE>(s, stats, call.bend.factor);
                if (my_first + 64 > skv || i * TILE < my_first + 63 - ahead) { // hide; its last key is seen by the fewest
                    int key = first + my_row, left[2];
#pragma unroll
                    for (int half = 0; half < 2; half++, key += 8) // no key there: zeros, which dQ must not get as inf times 0
                        left[half] = key >= skv ? TILE : key - ahead - i * TILE - my_col;
#pragma unroll
                    for (int x = 0; x < TILE / 2; x++)
                        if (x / 4 * 8 + x % 2 < left[x / 2 % 2]) s[x] = 0;
                }
                hopper_round<T, TILE>(p, s);
                xt_wgmma_fence();
                hopper_add_product<T, TILE, D>(dv, p, q_tile + P::TILE_BYTES);
                xt_wgmma_wait<1>(dp);
                hopper_score_gradients<TILE>(s, dp, stats + P::STATS_BYTES);
                /* The other buffer of dS is read by products of the tile before, which both warpgroups await before they come here. */
                uint32_t ds[TILE / 16][4];
                hopper_round<T, TILE>(ds, s);
                hopper_put_words<TILE>(ds_tile + 64 * me * 128, ds);
                xt_async_fence();
                xt_named_sync(3, 256);
                xt_wgmma_fence();
                hopper_turned_product<T, ROWS>(dq, ds_tile, own + me * ROWS * 128);
                hopper_add_product<T, TILE, D>(dk, ds, q_tile);
                xt_wgmma_wait<1>(dq);
                give_part();
            }
            hopper_release_read(own_empty); // products with K and V have ended: the next ones come while dK and dV are written
            xt_wgmma_wait<0>(dk);
            if (count > 0) hopper_release_read(empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
            xt_wgmma_wait<0>(dv);
            xt_named_sync(3, 256); // no product reads dS any more: this warpgroup's rows of both buffers hold dK, then dV
            uint32_t room = all_ds + 64 * me * 128;
            hopper_write_result<T, D>(call, 0, b, g, my_first, skv, room, P::DS_BYTES, dk, call.scale);
            hopper_write_result<T, D>(call, 1, b, g, my_first, skv, room, P::DS_BYTES, dv, 1);
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- rounding of dQ -------------------------------------------------------------------------------------------------------------- */

/* A thread does 8 columns of a row. */
template <typename T>
__global__ void __launch_bounds__(256) flash_hopper_finish_kernel(XtAttentionBwd p, const float *sums, int padded) {
    int64_t n = (int64_t)blockIdx.x * 256 + threadIdx.x, piece = n % 16 * 8; // first column
    int64_t row = n / 16, head = row / padded, i = row % padded, b = head / p.heads, h = head % p.heads;
    if (head >= p.batch * p.heads || i >= p.sq) return;
    float x[8] = {};
    int64_t tile = i / 64, seen = p.causal ? tile * 64 + 63 + p.skv - p.sq : 0; // the last key that the tile sees
    if (seen >= 0) {
        const float *from =
            sums + ((head * (padded / 64) + tile) * 2 + piece / 64) * 4096 + i % 64 * 64 + (piece % 64 / 8 ^ i % 8) * 8;
        auto low = xt_load(xt_read<float, 4>(from)), high = xt_load(xt_read<float, 4>(from + 4));
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = low.at[j] * (float)p.scale, x[4 + j] = high.at[j] * (float)p.scale;
    }
    T *to = (T *)p.dq + b * p.dq_stride[0] + h * p.dq_stride[1] + i * p.dq_stride[2] + piece;
    uint4 words = {xt_round_pair<T>(x[0], x[1]), xt_round_pair<T>(x[2], x[3]), xt_round_pair<T>(x[4], x[5]),
                   xt_round_pair<T>(x[6], x[7])};
    *(uint4 *)to = words;
}

#endif
