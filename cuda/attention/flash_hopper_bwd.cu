/* flash_hopper_bwd.cu - attention backward on Hopper's tensor cores; the formulas are flash_half.cu's.
 *
 * Plan: three launches. (1) delta and lse log2 e of each row. (2) dQ: a block owns 64 CONSUMERS queries and walks through the keys;
 * S = Q K^T, dP = dO V^T, dQ += dS K. (3) dK and dV: a block owns 64 CONSUMERS keys and walks through the queries, of one head of its
 * group after the other; S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q. In both, P and dS stay in registers as left operands,
 * so no sum leaves its block and nothing is added atomically: seven products instead of five, and the same bits in every run.
 *
 * Overlap: the last product of a tile runs beside the first two of the next; the other computing warpgroup fills the rest.
 *
 * The statistics of a head are padded to whole tiles: lse is +inf where there is no row or where it sees nothing, which makes P zero there.
 * Deterministic: tiles in order, then heads in order. Documents and windows (SPANS) change the range of tiles and what is hidden.
 * A softcap (CAPPED): scores are bent before they are hidden, and P becomes P (1 - t^2) once it is rounded for dV.
 */
#include "flash_hopper_ordered.cuh"

/* ---- dQ -------------------------------------------------------------------------------------------------------------------------- */

template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, 1)
    flash_hopper_dq_kernel(const __grid_constant__ HopperBackwardMaps maps, const __grid_constant__ HopperBackwardCall call) {
#ifdef XT_SM90A
    constexpr int D = P::D, TILE = P::TILE, STAGES = P::STAGES, ROWS = P::ROWS;
    extern __shared__ char room[];
    HopperBackwardRoom<P> at(room);
    if (threadIdx.x == 0) at.init();
    __syncthreads();

    /* Row i sees the keys before min(skv, i + past). */
    int sq = call.sq, skv = call.skv, past = call.causal ? skv - sq + 1 : skv, group = call.heads / call.kv_heads;
    auto count_of = [&](int first) { return (max(0, min(skv, min(first + ROWS, sq) - 1 + past)) + TILE - 1) / TILE; };
    auto first_of = [&](const HopperWork &work) { return (call.order.blocks - 1 - work.block) * ROWS; };
    auto tiles_of = [&](const HopperWork &work, int first) { return SPANS ? work.tiles : XtSeen<int>{0, count_of(first)}; };
    HopperEdges edges = SPANS ? hopper_edges_seen(call) : HopperEdges{};

    if (threadIdx.x < 128) { // copies
        xt_registers_less<hopper_copy_registers(P::CONSUMERS, SPANS)>();
        if (threadIdx.x == 0) {
            HopperRing<STAGES> ring;
            for (int turn = 0;; turn++) {
                HopperWork work = hopper_work(call.order, hopper_claim(turn), call.heads);
                if (SPANS && work.block >= 0) {
                    int first = first_of(work), last = min(first + ROWS, sq) - 1;
                    hopper_find_documents(work, call, first, last, skv);
                    work.tiles = hopper_tiles_seen<TILE>(call, work, first, last);
                }
                xt_barrier_wait(at.own_empty(turn), at.own_parity(turn) ^ 1);
                hopper_put_work<SPANS>(at.claim(turn), work);
                if (work.block < 0) {
                    xt_barrier_arrive(at.own_full(turn)); // there is no more
                    break;
                }
                int b = work.batch, h = work.head, g = h / group, first = first_of(work);
                hopper_load_own<P>(at.own(turn), maps, first, h, b, at.own_full(turn));
                XtSeen<int> tiles = tiles_of(work, first);
                for (int j = tiles.end - 1; j >= tiles.begin; j--, ring.n++) {
                    uint32_t full = at.full + 8 * ring.stage();
                    xt_barrier_wait(at.empty + 8 * ring.stage(), ring.parity() ^ 1);
                    xt_barrier_expect(full, 2 * P::TILE_BYTES);
                    hopper_load<D, TILE>(at.tile(ring.stage(), 0), &maps.other[0], j * TILE, g, b, full);
                    hopper_load<D, TILE>(at.tile(ring.stage(), 1), &maps.other[1], j * TILE, g, b, full);
                }
            }
            hopper_leave();
        }
    } else { // computes
        xt_registers_more<hopper_registers(P::CONSUMERS, SPANS)>();
        int me = hopper_warpgroup() - 1, thread = threadIdx.x % 128, my_col = thread % 4 * 2;
        int my_row = 64 * me + thread / 32 * 16 + thread % 32 / 4; // of the tile
        HopperRing<STAGES> ring;
        for (int turn = 0;; turn++) {
            xt_barrier_wait(at.own_full(turn), at.own_parity(turn));
            HopperWork work = hopper_get_work<SPANS>(at.claim(turn));
            if (work.block < 0) break;
            uint32_t my_q = at.own(turn) + 64 * me * 128, my_dout = my_q + P::OWN_BYTES;
            int first = first_of(work), row = first + my_row;
            XtSeen<int> tiles = tiles_of(work, first), mine = tiles;
            HopperSpans spans;
            if (SPANS) {
                spans.read(call, work, edges, first + 64 * me, row, sq);
                mine = spans.tiles<TILE>(tiles);
            }
            int begin = mine.begin, last = mine.end - 1;
            auto pass = [&](int count) { // tiles that this warpgroup does not see
                for (int i = 0; i < count; i++, ring.n++) {
                    xt_barrier_wait(at.full + 8 * ring.stage(), ring.parity());
                    hopper_release_read(at.empty + 8 * ring.stage());
                }
            };
            float lse[2], delta[2], dq[D / 2], s[TILE / 2], dp[TILE / 2];
            uint32_t ds[TILE / 16][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int i = row + 8 * half;
                int64_t at = ((int64_t)work.batch * call.heads + work.head) * call.padded + i;
                lse[half] = i < call.padded ? call.lse[at] : INFINITY;
                delta[half] = i < call.padded ? call.delta[at] : 0;
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) dq[i] = 0;
            if (SPANS) pass(tiles.end - mine.end);
#pragma unroll 1
            for (int j = last; j >= begin; j--, ring.n++) {
                uint32_t k_tile = at.tile(ring.stage(), 0);
                xt_barrier_wait(at.full + 8 * ring.stage(), ring.parity());
                xt_wgmma_fence();
                hopper_dot_rows<T, TILE, D, ROWS>(s, my_q, k_tile);
                hopper_dot_rows<T, TILE, D, ROWS>(dp, my_dout, k_tile + P::TILE_BYTES);
                xt_wgmma_wait<1>(s); // and the dQ before
                if (P::FLIGHT && j < last) hopper_release_read(at.empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
                if (CAPPED) hopper_bend(s, call.bend.inner);
                if (SPANS) {
                    if (spans.crosses<TILE>(j * TILE)) spans.each_outside<TILE>(j * TILE, [&](int i) { s[i] = -INFINITY; });
                } else if (j * TILE + TILE > min(skv, first + 64 * me + past)) { // hide; its first row sees the fewest keys
                    int left[2] = {min(skv, row + past) - j * TILE - my_col, min(skv, row + 8 + past) - j * TILE - my_col};
#pragma unroll
                    for (int i = 0; i < TILE / 2; i++)
                        if (i / 4 * 8 + i % 2 >= left[i / 2 % 2]) s[i] = -INFINITY;
                }
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) {
                    const float t = s[i];
                    s[i] = xt_exp2_approx(fmaf(t, call.bend.factor, -lse[i / 2 % 2]));
                    if (CAPPED) s[i] *= hopper_slope(t);
                }
                /* Returns at once. Its branch keeps the exponentials before the wait; ptxas moved them behind it. */
                xt_barrier_wait(at.full + 8 * ring.stage(), ring.parity());
                xt_wgmma_wait<0>(dp);
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) s[i] *= dp[i] - delta[i / 2 % 2];
                hopper_round<T, TILE>(ds, s);
                xt_wgmma_fence();
                hopper_add_product<T, TILE, D>(dq, ds, k_tile);
                if (!P::FLIGHT) {
                    xt_wgmma_wait<0>(dq);
                    hopper_release_read(at.empty + 8 * ring.stage());
                }
            }
            xt_wgmma_wait<0>(dq);
            if (P::FLIGHT && last >= begin) hopper_release_read(at.empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
            if (SPANS) pass(begin - tiles.begin);
            xt_named_sync(1 + me, 128); // no warp reads Q any more: its rows hold dQ now
            hopper_write_result<T, D>(call, 0, work.batch, work.head, first + 64 * me, sq, my_q, ROWS * 128, dq, call.scale);
            xt_async_fence(); // the copy engine fills the room next
            hopper_release_read(at.own_empty(turn));
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- dK and dV ------------------------------------------------------------------------------------------------------------------- */

/* Here the rows of the scores are keys, the columns queries. */
template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, 1)
    flash_hopper_dkv_kernel(const __grid_constant__ HopperBackwardMaps maps, const __grid_constant__ HopperBackwardCall call) {
#ifdef XT_SM90A
    constexpr int D = P::D, TILE = P::TILE, STAGES = P::STAGES, ROWS = P::ROWS, PART = P::PART;
    extern __shared__ char room[];
    HopperBackwardRoom<P> at(room);
    if (threadIdx.x == 0) at.init();
    __syncthreads();

    /* Queries from max(0, j - ahead) on see key j: tiles of queries from top / TILE on. */
    int sq = call.sq, skv = call.skv, ahead = call.causal ? skv - sq : skv, group = call.heads / call.kv_heads;
    int end = (sq + TILE - 1) / TILE;
    auto tiles_of = [&](const HopperWork &work) {
        int first = work.block * ROWS;
        return SPANS ? work.tiles : XtSeen<int>{max(0, first - ahead) / TILE, end};
    };
    HopperEdges edges = SPANS ? hopper_edges_by(call) : HopperEdges{};

    if (threadIdx.x < 128) { // copies
        xt_registers_less<hopper_copy_registers(P::CONSUMERS, SPANS)>();
        if (threadIdx.x == 0) {
            HopperRing<STAGES> ring;
            for (int turn = 0;; turn++) {
                HopperWork work = hopper_work(call.order, hopper_claim(turn), call.kv_heads);
                if (SPANS && work.block >= 0) {
                    int first = work.block * ROWS, last = min(first + ROWS, skv) - 1;
                    hopper_find_documents(work, call, first, last, sq);
                    work.tiles = hopper_tiles_by<TILE>(call, work, first, last);
                }
                xt_barrier_wait(at.own_empty(turn), at.own_parity(turn) ^ 1);
                hopper_put_work<SPANS>(at.claim(turn), work);
                if (work.block < 0) {
                    xt_barrier_arrive(at.own_full(turn)); // there is no more
                    break;
                }
                int b = work.batch, g = work.head, first = work.block * ROWS;
                hopper_load_own<P>(at.own(turn), maps, first, g, b, at.own_full(turn));
                XtSeen<int> tiles = tiles_of(work);
                for (int h = g * group; h < g * group + group; h++)
                    for (int i = tiles.begin; i < tiles.end; i++, ring.n++) {
                        int s = ring.stage();
                        xt_barrier_wait(at.empty + 8 * s, ring.parity() ^ 1);
                        hopper_load_queries<P>(at.tile(s, 0), at.stats + s * 2 * P::STATS_BYTES, maps, call, i, h, b,
                                               at.full + 8 * s);
                    }
            }
            hopper_leave();
        }
    } else { // computes
        xt_registers_more<hopper_registers(P::CONSUMERS, SPANS)>();
        int me = hopper_warpgroup() - 1, thread = threadIdx.x % 128, my_col = thread % 4 * 2;
        int my_part = P::SPLIT ? me : 0, my_block = P::SPLIT ? 0 : 64 * me; // columns of results, rows
        int my_row = my_block + thread / 32 * 16 + thread % 32 / 4;         // of the tile
        HopperRing<STAGES> ring;
        for (int turn = 0;; turn++) {
            xt_barrier_wait(at.own_full(turn), at.own_parity(turn));
            HopperWork work = hopper_get_work<SPANS>(at.claim(turn));
            if (work.block < 0) break;
            uint32_t my_k = at.own(turn) + my_block * 128, my_v = my_k + P::OWN_BYTES;
            int first = work.block * ROWS, my_first = first + my_block;
            float dk[PART / 2], dv[PART / 2], s[TILE / 2], dp[TILE / 2];
            uint32_t p[TILE / 16][4], ds[TILE / 16][4];
#pragma unroll
            for (int i = 0; i < PART / 2; i++) dk[i] = 0, dv[i] = 0;
            int top = max(0, first - ahead) / TILE, my_top = min(end, max(0, my_first - ahead) / TILE), my_end = end, last = end;
            HopperSpans spans;
            if (SPANS) {
                spans.read(call, work, edges, my_first, first + my_row, skv);
                XtSeen<int> tiles = tiles_of(work), mine = spans.tiles<TILE>(tiles);
                top = tiles.begin, last = tiles.end, my_top = mine.begin, my_end = mine.end;
            }
            for (int h = 0; h < group; h++) {
                auto pass = [&](int begin, int end) { // tiles that see no key of this warpgroup
                    for (int i = begin; i < end; i++, ring.n++) {
                        xt_barrier_wait(at.full + 8 * ring.stage(), ring.parity());
                        hopper_release_read(at.empty + 8 * ring.stage());
                    }
                };
                pass(top, my_top);
#pragma unroll 1
                for (int i = my_top; i < my_end; i++, ring.n++) {
                    uint32_t q_tile = at.tile(ring.stage(), 0), stats = at.stats + ring.stage() * 2 * P::STATS_BYTES + my_col * 4;
                    xt_barrier_wait(at.full + 8 * ring.stage(), ring.parity());
                    xt_wgmma_fence();
                    hopper_dot_rows<T, TILE, D, ROWS>(s, my_k, q_tile);
                    hopper_dot_rows<T, TILE, D, ROWS>(dp, my_v, q_tile + P::TILE_BYTES);
                    xt_wgmma_wait<1>(s); // and the dK before
                    if (P::FLIGHT && i > my_top) hopper_release_read(at.empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
                    if (CAPPED) hopper_bend(s, call.bend.inner);
                    else hopper_probabilities<TILE>(s, stats, call.bend.factor);
                    if (SPANS) {
                        if (spans.crosses<TILE>(i * TILE))
                            spans.each_outside<TILE>(i * TILE, [&](int x) { s[x] = CAPPED ? -INFINITY : 0; });
                    } else if (i * TILE < my_first + 63 - ahead) { // hide; its last key is seen by the fewest
                        int left = first + my_row - ahead - i * TILE - my_col;
#pragma unroll
                        for (int x = 0; x < TILE / 2; x++)
                            if (x / 4 * 8 + x % 2 < left + x / 2 % 2 * 8) s[x] = 0;
                    }
                    if (CAPPED) hopper_bent_probabilities<T, TILE>(p, s, stats, call.bend.factor);
                    else hopper_round<T, TILE>(p, s);
                    xt_wgmma_fence();
                    hopper_add_product<T, TILE, PART>(dv, p, q_tile + P::TILE_BYTES + my_part * (PART / 64 * TILE * 128));
                    xt_wgmma_wait<1>(dp);
                    hopper_score_gradients<TILE>(s, dp, stats + P::STATS_BYTES);
                    hopper_round<T, TILE>(ds, s);
                    xt_wgmma_fence();
                    hopper_add_product<T, TILE, PART>(dk, ds, q_tile + my_part * (PART / 64 * TILE * 128));
                    if (!P::FLIGHT) {
                        xt_wgmma_wait<0>(dk);
                        hopper_release_read(at.empty + 8 * ring.stage());
                    }
                }
                xt_wgmma_wait<0>(dk);
                if (P::FLIGHT && my_top < my_end) hopper_release_read(at.empty + 8 * HopperRing<STAGES>{ring.n - 1}.stage());
                if (SPANS) pass(my_end, last);
            }
            xt_wgmma_wait<0>(dv);
            if (P::SPLIT) xt_named_sync(1, 256); // no warp reads K and V any more: their rows hold dK and dV now
            else xt_named_sync(1 + me, 128);
            uint32_t panels = my_part * (PART / 64 * ROWS * 128);
            int b = work.batch, g = work.head;
            hopper_write_result<T, PART>(call, 0, b, g, my_first, skv, my_k + panels, ROWS * 128, dk, call.scale, my_part * PART,
                                         D);
            hopper_write_result<T, PART>(call, 1, b, g, my_first, skv, my_v + panels, ROWS * 128, dv, 1, my_part * PART, D);
            xt_async_fence(); // the copy engine fills the room next
            hopper_release_read(at.own_empty(turn));
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- slots ----------------------------------------------------------------------------------------------------------------------- */

/* Tensor maps of `own` and `other`: K V and Q dO, in this order where the block owns keys. */
template <typename P> static cudaError_t make_maps(HopperBackwardMaps *maps, const XtAttentionBwd *p, bool owns_keys) {
    CUtensorMap *of_keys = owns_keys ? maps->own : maps->other, *of_queries = owns_keys ? maps->other : maps->own;
    int key_rows = owns_keys ? P::ROWS : P::TILE, query_rows = owns_keys ? P::TILE : P::ROWS;
    bool bf16 = p->dtype == XT_BFLOAT16;
    cudaError_t error = xt_tensor_map(&of_keys[0], bf16, p->k, p->batch, p->kv_heads, p->skv, p->dim, p->k_stride, key_rows);
    if (!error) error = xt_tensor_map(&of_keys[1], bf16, p->v, p->batch, p->kv_heads, p->skv, p->dim, p->v_stride, key_rows);
    if (!error) error = xt_tensor_map(&of_queries[0], bf16, p->q, p->batch, p->heads, p->sq, p->dim, p->q_stride, query_rows);
    if (!error) error = xt_tensor_map(&of_queries[1], bf16, p->dout, p->batch, p->heads, p->sq, p->dim, p->dout_stride, query_rows);
    return error;
}

static HopperBackwardCall make_call(const XtAttentionBwd *p, bool owns_keys, const HopperOrder &order, const float *stats,
                                    int64_t padded) {
    const float *delta = stats + p->batch * p->heads * padded;
    HopperBackwardCall call = {{owns_keys ? p->dk : p->dq, p->dv},
                               {},
                               stats,
                               delta,
                               order,
                               p->documents,
                               (int)p->heads,
                               (int)p->kv_heads,
                               (int)p->sq,
                               (int)p->skv,
                               (int)p->window,
                               (int)padded,
                               (float)p->scale,
                               xt_bend_of(p),
                               p->causal};
    for (int i = 0; i < 3; i++)
        call.stride[0][i] = owns_keys ? p->dk_stride[i] : p->dq_stride[i], call.stride[1][i] = p->dv_stride[i];
    return call;
}

template <typename P, typename Kernel, typename Call>
static XtStatus launch(Kernel kernel, const XtAttentionBwd *p, bool owns_keys, int tiles, const Call &call) {
    HopperBackwardMaps maps = {};
    cudaError_t error = make_maps<P>(&maps, p, owns_keys);
    if (error) return xt_cuda_error("attention_bwd", error);
    XtStatus status = xt_allow_shared("attention", kernel, P::BYTES);
    if (status == XT_OK) xt_launch(kernel, hopper_grid(tiles), P::THREADS, P::BYTES, maps, call);
    return status;
}

template <typename T, typename P, bool SPANS, bool CAPPED>
static XtStatus run_dq(const XtAttentionBwd *p, const float *stats, int64_t padded, int64_t cache) {
    HopperOrder order =
        hopper_order(p->batch * p->heads, p->heads / p->kv_heads, xt_divide_up(p->sq, P::ROWS), 4 * p->skv * p->dim, cache);
    return launch<P>(flash_hopper_dq_kernel<T, P, SPANS, CAPPED>, p, false, order.tiles, make_call(p, false, order, stats, padded));
}

template <typename T, typename P, bool SPANS, bool CAPPED>
static XtStatus run_dkv(const XtAttentionBwd *p, const float *stats, int64_t padded) {
    int64_t group = p->heads / p->kv_heads;
    HopperOrder order =
        hopper_order(p->batch * p->kv_heads, 1, xt_divide_up(p->skv, P::ROWS), 4 * p->sq * p->dim * group, HOPPER_CACHE);
    return launch<P>(flash_hopper_dkv_kernel<T, P, SPANS, CAPPED>, p, true, order.tiles, make_call(p, true, order, stats, padded));
}

template <typename T, int D> static void run_delta(const XtAttentionBwd *p, float *stats, int64_t padded, unsigned *turns) {
    unsigned blocks = (unsigned)xt_divide_up(padded * hopper_delta_lanes(D), 256 * HOPPER_DELTA_ITEMS);
    xt_launch(flash_hopper_delta_kernel<T, D>, (unsigned)(p->batch * p->heads) * blocks, 256, 0, *p, stats, (int)padded, blocks,
              turns);
}

/* Seven products. `cache`: of the sections of dQ. SpansDq, SpansDkv: of documents and windows. */
template <typename T, typename Dq, typename Dkv, typename SpansDq = Dq, typename SpansDkv = Dkv>
static XtStatus run_seven(const XtAttentionBwd *p, int64_t cache = HOPPER_CACHE) {
    int64_t heads = p->batch * p->heads, tile = hopper_spans(p) ? SpansDkv::TILE : Dkv::TILE;
    int64_t padded = xt_divide_up(p->sq, tile) * tile;
    XtScratch stats;
    XtStatus status = stats.allocate((size_t)(2 * heads * padded) * sizeof(float));
    if (status != XT_OK) return status;
    run_delta<T, Dq::D>(p, (float *)stats.data, padded, NULL);
    auto both = [&](auto spans, auto capped) {
        constexpr bool SPANS = decltype(spans)::value, CAPPED = decltype(capped)::value;
        status = run_dq<T, std::conditional_t<SPANS, SpansDq, Dq>, SPANS, CAPPED>(p, (const float *)stats.data, padded, cache);
        if (status == XT_OK)
            status = run_dkv<T, std::conditional_t<SPANS, SpansDkv, Dkv>, SPANS, CAPPED>(p, (const float *)stats.data, padded);
    };
    if (p->softcap > 0) both(std::true_type(), std::true_type());
    else if (hopper_spans(p)) both(std::true_type(), std::false_type());
    else both(std::false_type(), std::false_type());
    if (status != XT_OK) return status;
    return xt_launched("attention_bwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

/* Five products: flash_hopper_ordered.cuh. FINISH: without the last kernel. */
template <typename T, bool FINISH> static XtStatus run_five(const XtAttentionBwd *p) {
    typedef HopperOrdered P;
    int64_t heads = p->batch * p->heads, padded = xt_divide_up(p->sq, P::TILE) * P::TILE, parts = heads * (padded / P::TILE);
    XtScratch scratch;
    XtStatus status = scratch.allocate((size_t)(parts * P::PART + 2 * heads * padded + parts) * sizeof(float));
    if (status != XT_OK) return status;
    float *sums = (float *)scratch.data, *stats = sums + parts * P::PART;
    unsigned *turns = (unsigned *)(stats + 2 * heads * padded);
    run_delta<T, P::D>(p, stats, padded, turns);
    int64_t group = p->heads / p->kv_heads;
    HopperOrderedCall call = {
        make_call(p, true, {}, stats, padded),
        hopper_ranks(p->batch * p->kv_heads, xt_divide_up(p->skv, P::ROWS), 8 * p->sq * p->dim * group, p->causal),
        p->dq,
        {p->dq_stride[0], p->dq_stride[1], p->dq_stride[2]},
        sums,
        turns};
    status = launch<P>(flash_hopper_ordered_kernel<T, FINISH>, p, true, call.ranks.tiles, call);
    if (status != XT_OK) return status;
    if (!FINISH)
        xt_launch(flash_hopper_finish_kernel<T>, (unsigned)xt_divide_up(heads * padded * 16, 256), 256, 0, *p, (const float *)sums,
                  (int)padded);
    return xt_launched("attention_bwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

/* As many sequences at a time as have HOPPER_SUM_TILES tiles of sums. From 8192 keys on the last kernel costs less than what it saves. */
template <typename T> static XtStatus run_five_in_turns(const XtAttentionBwd *p) {
    int64_t most = HOPPER_SUM_TILES / (p->heads * xt_divide_up(p->sq, HopperOrdered::TILE));
    int64_t turns = xt_divide_up(p->batch, most), size = xt_divide_up(p->batch, turns);
    for (int64_t first = 0; first < p->batch; first += size) {
        XtAttentionBwd part = *p;
        auto move = [&](auto &x, int64_t stride) { x = (T *)x + first * stride; };
        part.batch = size < p->batch - first ? size : p->batch - first;
        move(part.dq, p->dq_stride[0]), move(part.dk, p->dk_stride[0]), move(part.dv, p->dv_stride[0]);
        move(part.q, p->q_stride[0]), move(part.k, p->k_stride[0]), move(part.v, p->v_stride[0]);
        move(part.out, p->out_stride[0]), move(part.dout, p->dout_stride[0]);
        part.lse = (const float *)p->lse + first * p->heads * p->sq;
        XtStatus status = p->skv <= 4096 ? run_five<T, true>(&part) : run_five<T, false>(&part);
        if (status != XT_OK) return status;
    }
    return XT_OK;
}

const char *xt_cuda_attention_flash_hopper_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    if (!hopper_addressable(p->dout_stride, p->batch, p->heads, p->sq) ||
        !hopper_addressable(p->dq_stride, p->batch, p->heads, p->sq) ||
        !hopper_addressable(p->dk_stride, p->batch, p->kv_heads, p->skv) ||
        !hopper_addressable(p->dv_stride, p->batch, p->kv_heads, p->skv))
        return "a tensor has a stride that is not positive";
    return hopper_unfit(p, device);
}

/* Which backward runs, by sizes alone: the same problem always gets the same bits. What won on an H200:
 * docs/worklog/attention-hopper.md. Five products win at head dim 128, where the sums of dQ of a sequence fit;
 * with documents, blocks of keys wait for one another. */

typedef enum HopperPlan { HOPPER_64_SHORT, HOPPER_64, HOPPER_96, HOPPER_128_FIVE, HOPPER_128, HOPPER_192, HOPPER_256 } HopperPlan;
static HopperPlan hopper_plan(int64_t dim, int64_t heads, int64_t sq, int64_t skv, bool spans) {
    if (dim == 64) return skv < 2048 ? HOPPER_64_SHORT : HOPPER_64;
    if (dim == 96) return HOPPER_96;
    if (dim > 128) return dim == 192 ? HOPPER_192 : HOPPER_256;
    if (!spans && heads * xt_divide_up(sq, HopperOrdered::TILE) <= HOPPER_SUM_TILES) return HOPPER_128_FIVE;
    return HOPPER_128;
}
template <typename T> static XtStatus run(const XtAttentionBwd *p) {
    switch (hopper_plan(p->dim, p->heads, p->sq, p->skv, hopper_spans(p))) {
    case HOPPER_64_SHORT: return run_seven<T, HopperBackward<64, 2, 96, 4, true>, HopperBackward<64, 3, 64, 4, false>>(p);
    case HOPPER_64: // with spans, dK and dV in tiles of 64 queries: they cross fewer documents
        return run_seven<T, HopperBackward<64, 2, 96, 4, true>, HopperBackward<64, 2, 96, 3, true>,
                         HopperBackward<64, 2, 96, 4, true>, HopperBackward<64, 3, 64, 4, false>>(p);
    case HOPPER_96: return run_seven<T, HopperBackward<96, 2, 64, 4, true>, HopperBackward<96, 2, 64, 2, false>>(p);
    case HOPPER_128_FIVE: return run_five_in_turns<T>(p);
    case HOPPER_192: return run_seven<T, HopperBackward<192, 2, 64, 2, false>, HopperBackward<192, 2, 64, 2, false, true>>(p);
    case HOPPER_256: return run_seven<T, HopperBackward<256, 2, 32, 3, false>, HopperBackward<256, 2, 64, 2, false, true>>(p);
    case HOPPER_128: break;
    }
    /* With spans, dQ in tiles of 128 rows: they cross fewer documents, and the next tile's operands have room. */
    int64_t cache = p->skv < 16384 ? HOPPER_CACHE : (int64_t)1 << 40; // so long, sections of dQ cost 9 %
    return run_seven<T, HopperBackward<128, 3, 64, 2, false>, HopperBackward<128, 2, 64, 2, false>,
                     HopperBackward<128, 2, 64, 3, true>>(p, cache);
}
XtStatus xt_cuda_attention_flash_hopper_bwd(const XtAttentionBwd *p) {
    return p->dtype == XT_BFLOAT16 ? run<XtBf16>(p) : run<XtF16>(p);
}
