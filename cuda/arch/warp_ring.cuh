/* warp_ring.cuh - a ring of rows in shared memory that belongs to one warp (Hopper).
 *
 * The copy engine brings the next rows while the warp works on this one: memory is not idle while a row is summed, and rows on their way
 * take no registers. Lane 0 starts the copies of its own warp, so the block needs no barrier and no warp waits for another. All lanes of
 * a warp together call
 *
 *     fill(s, ...) for each stage s;   then, for each row:   wait(), read data(), xt_have(), __syncwarp(), fill(stage, the row STAGES
 *     later), advance()
 *
 * Only kernels whose bodies stand inside #ifdef XT_SM90A (sm90.cuh) have one.
 */
#pragma once

#include "arch/sm90.cuh"
#include "common/launch.cuh"

#include <string.h>

/* Whether the device, and what the library was built for, have what a ring needs. */
inline bool xt_has_ring(void) { return xt_built_for_sm90a() && xt_compute_capability() == 90; }

/* Rows of a warp from which on a ring is faster than loads into registers. With fewer, filling and emptying it takes longer than it
 * gains. */
static constexpr int XT_RING_ROWS = 8;

/* Waits for what this lane has loaded from a stage, before __syncwarp() and fill(): a load may be on its way when the next instruction
 * begins, and the copy engine does not wait for it. Stores of what depends on the loads wait, too. One value in 2^32 costs a nap of no length. */
template <typename Piece, int COUNT> __device__ inline void xt_have(const Piece (&piece)[COUNT]) {
    static_assert(sizeof(Piece) % 4 == 0, "of whole words");
    uint32_t word, any = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        memcpy(&word, &piece[i], sizeof word);
        any |= word;
    }
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x7fa5c3e1;\n@p nanosleep.u32 0;\n}\n" ::"r"(any) : "memory");
}

/* A stage has a row of each of INPUTS inputs, of up to V pieces of 16 bytes a lane. WARPS of a block, BLOCKS of a multiprocessor have one
 * each: up to 4 stages, which keep memory busy, by what fits into 228 KiB, of which the system takes 1 KiB a block. */
template <int V, int INPUTS, int WARPS, int BLOCKS> struct XtRowRing {
    static constexpr int PITCH = V * 32 * 16, SLOT = INPUTS * PITCH; /* bytes from one input's row to the next, of a stage */
    static constexpr int FIT = (228 * 1024 / BLOCKS - 2048) / (WARPS * SLOT), STAGES = FIT < 4 ? FIT : 4;
    static constexpr int BYTES = WARPS * STAGES * (SLOT + 8); /* of the block: all stages, then the barriers */
    static_assert(STAGES >= 2, "a stage to work on and one to fill");

    char *room;    /* [STAGES][SLOT], of this warp */
    uint32_t full; /* [STAGES] barriers */
    int stage = 0, parity = 0;

    /* shared: BYTES, at a multiple of 16. */
    __device__ inline explicit XtRowRing(void *shared) {
        const int warp = threadIdx.x / 32;
        room = (char *)shared + warp * (STAGES * SLOT);
        full = xt_shared_address(shared) + WARPS * (STAGES * SLOT) + warp * (8 * STAGES);
        if (threadIdx.x % 32 == 0) {
            for (int s = 0; s < STAGES; s++) xt_barrier_init(full + 8 * s, 1);
            xt_barrier_init_fence();
        }
        __syncwarp();
    }
    struct Rows {
        const void *of[3]; /* the first INPUTS of them */
    };
    /* Starts the copies of `bytes` (of 16) of each input to stage s, which every lane has read. */
    __device__ inline void fill(int s, const Rows &rows, int bytes) {
        if (threadIdx.x % 32 != 0) return;
        xt_barrier_expect(full + 8 * s, INPUTS * bytes);
#pragma unroll
        for (int i = 0; i < INPUTS; i++)
            xt_bulk_load(xt_shared_address(room) + s * SLOT + i * PITCH, rows.of[i], bytes, full + 8 * s);
    }
    /* The same for a panel of a tensor map, which fills a stage, from (column, row) on; what lies out of range arrives as zeros. */
    __device__ inline void fill_panel(int s, const CUtensorMap *map, int column, int row) {
        if (threadIdx.x % 32 != 0) return;
        xt_barrier_expect(full + 8 * s, SLOT);
        xt_panel_load(xt_shared_address(room) + s * SLOT, map, column, row, 0, 0, full + 8 * s);
    }
    __device__ inline void wait() { xt_barrier_wait(full + 8 * stage, parity); }
    __device__ inline const char *data() const { return room + stage * SLOT; }
    __device__ inline void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
