/* flash_hopper_fwd.cu - attention forward on Hopper's tensor cores; the formula is flash_half.cu's.
 *
 * Plan: a block owns 64 CONSUMERS rows of a head, each computing warpgroup 64 of them. One thread of the copying warpgroup fetches Q
 * once and then K and V, tile by tile from the last that the rows see to the first, so that masks come first; the next block's Q, K and V as soon as there
 * is room, so that nobody waits for them. Products are
 * wgmma.m64nNk16: S = Q K^T from shared memory, then P stays in registers as left operand of P V.
 *
 * Overlap: a warpgroup issues S of tile j and P V of tile j + 1 together, and computes the exponentials of tile j while the latter
 * runs. Warpgroups issue in turns, so that one computes exponentials while the other's products run.
 *
 * Barriers: full[s] of a stage: its bytes have landed; empty[s]: all computing warps have read it. Q has stages of its own.
 *
 * lse, masks and rows that see nothing: as flash_half.cu. Deterministic: tiles of keys in order. Documents and windows (SPANS) change the
 * range of tiles and `hide`; a softcap (CAPPED) bends each score before it is hidden. With spans, each warpgroup of a
 * block of three passes by the tiles that none of its own 64 rows sees.
 */
#include "flash_hopper.cuh"

/* ---- kernel ---------------------------------------------------------------------------------------------------------------------- */

template <int D_, int CONSUMERS_, int TILE_, int STAGES_> struct HopperForward {
    static constexpr int D = D_, CONSUMERS = CONSUMERS_, TILE = TILE_, STAGES = STAGES_;
    static constexpr int ROWS = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
    /* With spans and few registers: the rows' spans lie in shared memory, and both maxima are taken before the exponentials. */
    static constexpr bool NARROW = CONSUMERS == 3;
    /* Shared memory: Q [2][ROWS, D] and out [ROWS, D] where there is room, else Q once, which becomes out; K [STAGES][TILE, D], V the
     * same, barriers, spans of the rows. */
    static constexpr int Q_BYTES = ROWS * hopper_row_bytes(D), TILE_BYTES = TILE * hopper_row_bytes(D),
                         REST = STAGES * 2 * TILE_BYTES + 8 * (4 + 4 * STAGES) + 2 * HOPPER_WORK_BYTES + (NARROW ? 8 * ROWS : 0) +
                                1024; // and room to align
    static constexpr bool IN_Q = 3 * Q_BYTES + REST > HOPPER_SHARED;
    static constexpr int Q_STAGES = IN_Q ? 1 : 2;
    static constexpr int OUT_AT = IN_Q ? 0 : 2 * Q_BYTES, K_AT = OUT_AT + Q_BYTES, V_AT = K_AT + STAGES * TILE_BYTES,
                         BARRIERS_AT = V_AT + STAGES * TILE_BYTES, BYTES = K_AT + REST;
    static_assert(BYTES <= HOPPER_SHARED, "a block has no more");
};

typedef struct HopperForwardMaps {
    CUtensorMap q, k, v;
} HopperForwardMaps;
typedef struct HopperForwardCall {
    void *out;
    float *lse; // [batch, heads, sq]
    int64_t out_stride[3];
    HopperOrder order;
    const int32_t *documents;
    int heads, kv_heads, sq, skv, window;
    XtBend bend;
    bool causal;
} HopperForwardCall;

template <typename T, typename P, bool SPANS, bool CAPPED>
__global__ void __launch_bounds__(P::THREADS, 1)
    flash_hopper_forward_kernel(const __grid_constant__ HopperForwardMaps maps, const __grid_constant__ HopperForwardCall call) {
#ifdef XT_SM90A
    constexpr int D = P::D, TILE = P::TILE, STAGES = P::STAGES, ROWS = P::ROWS, CONSUMERS = P::CONSUMERS;
    constexpr bool NARROW = SPANS && P::NARROW;
    extern __shared__ char room[];
    uint32_t base = (xt_shared_address(room) + 1023) & ~1023u, k_tiles = base + P::K_AT, v_tiles = base + P::V_AT;
    uint32_t q_full = base + P::BARRIERS_AT, q_empty = q_full + 16, k_full = q_empty + 16, k_empty = k_full + 8 * STAGES,
             v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES, claim = v_empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < P::Q_STAGES; s++) {
            xt_barrier_init(q_full + 8 * s, 1);
            xt_barrier_init(q_empty + 8 * s, 128 * CONSUMERS);
        }
        for (int s = 0; s < STAGES; s++) {
            xt_barrier_init(k_full + 8 * s, 1);
            xt_barrier_init(v_full + 8 * s, 1);
            xt_barrier_init(k_empty + 8 * s, 4 * CONSUMERS);
            xt_barrier_init(v_empty + 8 * s, 4 * CONSUMERS);
        }
        xt_barrier_init_fence();
        xt_prefetch_map(&maps.q);
        xt_prefetch_map(&maps.k);
        xt_prefetch_map(&maps.v);
    }
    __syncthreads();

    /* Row i sees the keys before min(skv, i + past); the rows of a tile, `count` tiles of keys. */
    int sq = call.sq, skv = call.skv, past = call.causal ? skv - sq + 1 : skv, group = call.heads / call.kv_heads;
    auto count_of = [&](int first) { return (max(0, min(skv, min(first + ROWS, sq) - 1 + past)) + TILE - 1) / TILE; };
    auto first_of = [&](const HopperWork &work) { return (call.order.blocks - 1 - work.block) * ROWS; };
    HopperEdges edges = SPANS ? hopper_edges_seen(call) : HopperEdges{};

    if (threadIdx.x < 128) { // copies
        xt_registers_less<hopper_copy_registers(CONSUMERS, SPANS)>();
        if (threadIdx.x == 0) {
            HopperRing<STAGES> ring;
            HopperRing<P::Q_STAGES> q_ring;
            auto find = [&](int tile) {
                HopperWork work = hopper_work(call.order, tile, call.heads);
                if (SPANS && work.block >= 0) {
                    int first = first_of(work), last = min(first + ROWS, sq) - 1;
                    hopper_find_documents(work, call, first, last, skv);
                    work.tiles = hopper_tiles_seen<TILE>(call, work, first, last);
                }
                return work;
            };
            int claimed = 0;
            HopperWork work = find(hopper_claim(0));
            for (;; q_ring.n++) {
                xt_barrier_wait(q_empty + 8 * q_ring.stage(), q_ring.parity() ^ 1);
                hopper_put_work<SPANS>(claim + HOPPER_WORK_BYTES * q_ring.stage(), work);
                if (work.block < 0) break;
                int b = work.batch, h = work.head, g = h / group, first = first_of(work);
                int begin = SPANS ? work.tiles.begin : 0, end = SPANS ? work.tiles.end : count_of(first);
                HopperWork next = work;
                uint32_t q_here = q_full + 8 * q_ring.stage();
                xt_barrier_expect(q_here, P::Q_BYTES);
                hopper_load<D, ROWS>(base + q_ring.stage() * P::Q_BYTES, &maps.q, first, h, b, q_here);
                for (int j = end - 1; j >= begin; j--, ring.n++) {
                    uint32_t full = k_full + 8 * ring.stage();
                    xt_barrier_wait(k_empty + 8 * ring.stage(), ring.parity() ^ 1);
                    xt_barrier_expect(full, P::TILE_BYTES);
                    hopper_load<D, TILE>(k_tiles + ring.stage() * P::TILE_BYTES, &maps.k, j * TILE, g, b, full);
                    /* Both wait for memory: the claim a step earlier, what it says of documents while the last V has time. */
                    if (SPANS && j == min(begin + 1, end - 1)) claimed = hopper_claim(q_ring.n + 1);
                    if (SPANS && j == begin) next = find(claimed);
                    full = v_full + 8 * ring.stage();
                    xt_barrier_wait(v_empty + 8 * ring.stage(), ring.parity() ^ 1);
                    xt_barrier_expect(full, P::TILE_BYTES);
                    hopper_load<D, TILE>(v_tiles + ring.stage() * P::TILE_BYTES, &maps.v, j * TILE, g, b, full);
                }
                work = SPANS && begin < end ? next : find(hopper_claim(q_ring.n + 1));
            }
            xt_barrier_arrive(q_full + 8 * q_ring.stage()); // there is no more
            hopper_leave();
        }
    } else { // computes
        xt_registers_more<hopper_registers(CONSUMERS, SPANS)>();
        int me = hopper_warpgroup() - 1, next = me + 1 < CONSUMERS ? me + 1 : 0, thread = threadIdx.x % 128;
        int my_row = 64 * me + thread / 32 * 16 + thread % 32 / 4, my_col = thread % 4 * 2; // of the tile
        uint32_t my_out = base + P::OUT_AT + 64 * me * 128, my_spans = claim + 2 * HOPPER_WORK_BYTES + 8 * my_row;
        HopperRing<STAGES> ring;
        HopperRing<P::Q_STAGES> q_ring;
        constexpr int MY_OUT = 1, MY_TURN = 1 + CONSUMERS;      // named barriers
        if (me == CONSUMERS - 1) xt_named_arrive(MY_TURN, 256); // the first may begin
        for (;; q_ring.n++) {
            uint32_t my_q = base + q_ring.stage() * P::Q_BYTES + 64 * me * 128, q_left = q_empty + 8 * q_ring.stage();
            xt_barrier_wait(q_full + 8 * q_ring.stage(), q_ring.parity());
            HopperWork work = hopper_get_work<SPANS>(claim + HOPPER_WORK_BYTES * q_ring.stage());
            if (work.block < 0) break;
            int first = first_of(work), row = first + my_row, begin = SPANS ? work.tiles.begin : 0;
            int count = SPANS ? work.tiles.end - begin : count_of(first), below = 0;
            HopperSpans spans;
            /* Passes by `tiles` tiles up to `end`, and a turn for each but tile `without`: all warpgroups of a block take turns equally often,
             * one time fewer than the block has tiles. A stage is released when it is full, so that its next use cannot be released by mistake. */
            auto pass = [&](int end, int tiles, int without) {
                for (int j = end - 1; j >= end - tiles; j--, ring.n++) {
                    if (j != without) {
                        xt_named_sync(MY_TURN + me, 256);
                        xt_named_arrive(MY_TURN + next, 256);
                    }
                    xt_barrier_wait(k_full + 8 * ring.stage(), ring.parity());
                    xt_barrier_wait(v_full + 8 * ring.stage(), ring.parity());
                    __syncwarp(); // one lane says that all have seen it
                    hopper_release(k_empty + 8 * ring.stage());
                    hopper_release(v_empty + 8 * ring.stage());
                }
            };
            if (NARROW) {
                spans.read_ends(call, work, edges, first + 64 * me, sq);
                XtSeen<int> mine = spans.tiles<TILE>(work.tiles);
                if (first + 64 * me >= sq || mine.begin >= mine.end) mine = {begin, begin};
                int above = work.tiles.end - mine.end;
                below = mine.begin - begin, begin = mine.begin, count = mine.end - mine.begin;
                pass(work.tiles.end, above, mine.begin == mine.end ? mine.begin : -1);
            }
            float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, fade[2];
            float o[D / 2];
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] = 0;
            if (count > 0) {
                float s[TILE / 2];
                uint32_t p[TILE / 16][4];
                auto hide = [&](int j) { // a warpgroup's first row sees the fewest keys
                    if (SPANS) {
                        if (!spans.crosses<TILE>(j * TILE)) return;
                        if (NARROW) spans.get_rows(my_spans);
                        return spans.each_outside<TILE>(j * TILE, [&](int i) { s[i] = -INFINITY; });
                    }
                    if (j * TILE + TILE <= min(skv, first + 64 * me + past)) return;
                    int left[2] = {min(skv, row + past) - j * TILE - my_col, min(skv, row + 8 + past) - j * TILE - my_col};
#pragma unroll
                    for (int i = 0; i < TILE / 2; i++)
                        if (i / 4 * 8 + i % 2 >= left[i / 2 % 2]) s[i] = -INFINITY;
                };
                auto most_of = [&](int half) {
                    float most = max[half];
#pragma unroll
                    for (int n = 0; n < TILE / 8; n++) // ignores NaN: its p is NaN, and so is the sum
                        most = fmaxf(most, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
                    return hopper_quad_max(most);
                };
                auto soften = [&]() { // s becomes p
                    float both[2];
                    if (NARROW) both[0] = most_of(0), both[1] = most_of(1);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float most = NARROW ? both[half] : most_of(half), part = 0;
                        float shift = most == -INFINITY ? 0 : most * call.bend.factor; // no score yet: zeros, not NaN
                        fade[half] = xt_exp2_approx(fmaf(max[half], call.bend.factor, -shift));
                        max[half] = most;
#pragma unroll
                        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                float &x = s[4 * n + 2 * half + e];
                                x = xt_exp2_approx(fmaf(x, call.bend.factor, -shift));
                                part += x;
                            }
                        sum[half] = sum[half] * fade[half] + part;
                    }
                };
                xt_barrier_wait(k_full + 8 * ring.stage(), ring.parity());
                xt_wgmma_fence();
                hopper_dot_rows<T, TILE, D, ROWS>(s, my_q, k_tiles + ring.stage() * P::TILE_BYTES);
                if (NARROW) spans.read_rows(call, work, edges, row, sq), spans.put_rows(my_spans);
                else if (SPANS) spans.read(call, work, edges, first + 64 * me, row, sq);
                xt_wgmma_wait<0>(s);
                hopper_release(k_empty + 8 * ring.stage());
                ring.n++;
                if (CAPPED) hopper_bend(s, call.bend.inner);
                hide(begin + count - 1);
                soften();
                hopper_round<T, TILE>(p, s);
                if (count > 1) xt_barrier_wait(k_full + 8 * ring.stage(), ring.parity());
#pragma unroll 1
                for (int j = begin + count - 2; j >= begin; j--) {
                    HopperRing<STAGES> v_ring = {ring.n - 1}; // the tile before
                    xt_named_sync(MY_TURN + me, 256);
                    xt_wgmma_fence();
                    hopper_dot_rows<T, TILE, D, ROWS>(s, my_q, k_tiles + ring.stage() * P::TILE_BYTES);
                    xt_barrier_wait(v_full + 8 * v_ring.stage(), v_ring.parity());
                    xt_wgmma_fence();
                    hopper_add_product<T, TILE, D>(o, p, v_tiles + v_ring.stage() * P::TILE_BYTES);
                    xt_named_arrive(MY_TURN + next, 256);
                    xt_wgmma_wait<1>(s);
                    hopper_release(k_empty + 8 * ring.stage());
                    ring.n++;
                    if (CAPPED) hopper_bend(s, call.bend.inner);
                    hide(j);
                    soften();
                    /* Here and not at the top: the branch keeps the exponentials before the wait; ptxas moved them behind it. */
                    if (j > begin) xt_barrier_wait(k_full + 8 * ring.stage(), ring.parity());
                    xt_wgmma_wait<0>(o);
                    hopper_release(v_empty + 8 * v_ring.stage());
                    hopper_round<T, TILE>(p, s);
#pragma unroll
                    for (int i = 0; i < D / 2; i++) o[i] *= fade[i / 2 % 2];
                }
                if (!P::IN_Q) hopper_release_read(q_left);
                HopperRing<STAGES> v_ring = {ring.n - 1};
                xt_barrier_wait(v_full + 8 * v_ring.stage(), v_ring.parity());
                xt_wgmma_fence();
                hopper_add_product<T, TILE, D>(o, p, v_tiles + v_ring.stage() * P::TILE_BYTES);
                xt_wgmma_wait<0>(o);
                hopper_release(v_empty + 8 * v_ring.stage());
                if (NARROW) pass(begin, below, -1);
            }
            if (!P::IN_Q && count == 0) hopper_release_read(q_left);
            if (first + 64 * me >= sq) { // no row of this warpgroup
                if (P::IN_Q) hopper_release_read(q_left);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int i = row + 8 * half;
                sum[half] = hopper_quad_sum(sum[half]);
                if (my_col == 0 && i < sq) {
                    float lse = max[half] == -INFINITY
                                    ? NAN
                                    : fmaf(max[half], call.bend.factor, log2f(sum[half])) * LN_2; // as exp(-inf - -inf)
                    call.lse[((int64_t)work.batch * call.heads + work.head) * sq + i] = i + past > 0 ? lse : -INFINITY;
                }
                sum[half] = 1 / sum[half];
            }
            if (P::IN_Q) xt_named_sync(MY_OUT + me, 128); // no warp reads Q any more
            T *out = (T *)call.out + work.batch * call.out_stride[0] + work.head * call.out_stride[1] +
                     (first + 64 * me) * call.out_stride[2];
            hopper_write_rows<T, D>(out, call.out_stride[2], sq - first - 64 * me, D, my_out, ROWS * 128, o,
                                    [&](int half, float x) { return row + 8 * half + past > 0 ? x * sum[half] : 0.0f; });
            if (P::IN_Q) {
                xt_async_fence(); // the copy engine fills the room next
                hopper_release_read(q_left);
            }
        }
    }
#else
    XT_NO_SM90A();
#endif
}

/* ---- slots ----------------------------------------------------------------------------------------------------------------------- */

template <typename T, typename P, bool SPANS, bool CAPPED> static XtStatus run_forward(const XtAttentionFwd *p) {
    HopperForwardMaps maps;
    bool bf16 = p->dtype == XT_BFLOAT16;
    cudaError_t error = xt_tensor_map(&maps.q, bf16, p->q, p->batch, p->heads, p->sq, p->dim, p->q_stride, P::ROWS);
    if (!error) error = xt_tensor_map(&maps.k, bf16, p->k, p->batch, p->kv_heads, p->skv, p->dim, p->k_stride, P::TILE);
    if (!error) error = xt_tensor_map(&maps.v, bf16, p->v, p->batch, p->kv_heads, p->skv, p->dim, p->v_stride, P::TILE);
    if (error) return xt_cuda_error("attention_fwd", error);
    XtStatus status = xt_allow_shared("attention", flash_hopper_forward_kernel<T, P, SPANS, CAPPED>, P::BYTES);
    if (status != XT_OK) return status;
    int64_t group = p->heads / p->kv_heads, blocks = xt_divide_up(p->sq, P::ROWS);
    HopperForwardCall call = {p->out,
                              (float *)p->lse,
                              {p->out_stride[0], p->out_stride[1], p->out_stride[2]},
                              hopper_order(p->batch * p->heads, group, blocks, 4 * p->skv * p->dim, 12 << 20),
                              p->documents,
                              (int)p->heads,
                              (int)p->kv_heads,
                              (int)p->sq,
                              (int)p->skv,
                              (int)p->window,
                              xt_bend_of(p),
                              p->causal};
    xt_launch(flash_hopper_forward_kernel<T, P, SPANS, CAPPED>, hopper_grid(call.order.tiles), P::THREADS, P::BYTES, maps, call);
    return xt_launched("attention_fwd", p->batch, p->heads, p->kv_heads, p->sq, p->skv, p->dim);
}

const char *xt_cuda_attention_flash_hopper_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    return hopper_unfit(p, device);
}

/* What won on an H200: docs/worklog/attention-hopper.md. */
template <typename T, bool SPANS, bool CAPPED> static XtStatus by_dim(const XtAttentionFwd *p) {
    /* Tiles of 192 rows lose where sequences are short, and have no registers for a softcap. How long documents are is not known here. */
    if constexpr (!SPANS || CAPPED)
        if (p->dim == 64 && (CAPPED || p->skv < 2048)) return run_forward<T, HopperForward<64, 2, 128, 4>, SPANS, CAPPED>(p);
    if constexpr (!CAPPED)
        if (p->dim == 64) return run_forward<T, HopperForward<64, 3, 128, 4>, SPANS, CAPPED>(p);
    if (p->dim == 96) return run_forward<T, HopperForward<96, 2, 128, 2>, SPANS, CAPPED>(p);
    if (p->dim == 128) return run_forward<T, HopperForward<128, 2, 128, 2>, SPANS, CAPPED>(p);
    if (p->dim == 192) return run_forward<T, HopperForward<192, 2, 96, 2>, SPANS, CAPPED>(p);
    return run_forward<T, HopperForward<256, 2, 80, 2>, SPANS, CAPPED>(p);
}
template <typename T> static XtStatus by_mask(const XtAttentionFwd *p) {
    if (p->softcap > 0) return by_dim<T, true, true>(p);
    /* Causal rows of head dim 64 take the kernel with spans: its warpgroups pass by tiles above the diagonal, each its own. */
    const bool passes = p->dim == 64 && p->causal && p->skv >= 1024;
    return passes || hopper_spans(p) ? by_dim<T, true, false>(p) : by_dim<T, false, false>(p);
}
XtStatus xt_cuda_attention_flash_hopper_fwd(const XtAttentionFwd *p) {
    return p->dtype == XT_BFLOAT16 ? by_mask<XtBf16>(p) : by_mask<XtF16>(p);
}
