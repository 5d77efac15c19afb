/* bf16_work.c - packs op(B) and cuts C for the kernels of bf16.c and amx.c. */
#include "bf16_work.h"

#define CHUNK (8 << 20) /* bytes of packed op(B) at once */
#define PACK_K 128      /* elements of k in a piece of packing */
#define PACK_COLUMNS 256

/* Piece i of packing: elements [k, k + depth) of panels [j, last). */
static void pack_piece(const XtBf16Work *work, int64_t i) {
    const XtGemm *p = work->p;
    const XtBf16Kernel *kernel = work->kernel;
    int64_t panel = kernel->panel, group = PACK_COLUMNS / panel, step = work->pairs * panel;
    int64_t blocks = xt_divide_up(p->k, PACK_K), k = i % blocks * PACK_K, depth = least(p->k - k, PACK_K);
    int64_t j = i / blocks * group, last = least(work->panels, j + group);
    int64_t n = work->column + j * panel, columns = least(work->column + work->columns - n, PACK_COLUMNS);
    const uint16_t *b = (const uint16_t *)p->b + work->at.b;
    uint32_t *out = work->b + j * step + k / 2 * panel;
    int64_t filled = k + depth == p->k ? (p->k + 1) / 2 : work->pairs;
    for (int64_t to = j; to < last; to++)
        memset(work->b + to * step + filled * panel, 0, (size_t)((work->pairs - filled) * panel) * sizeof(uint32_t));
    if (!p->trans_b) {
        kernel->pack_rows(b + k * p->ldb + n, p->ldb, depth, columns, out, step);
        return;
    }
    for (; j < last; j++, n += panel, out += step)
        kernel->pack_columns(b + n * p->ldb + k, p->ldb, depth, least(p->n - n, panel), out);
}

static XtStatus pack_pieces(void *context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) pack_piece(context, i);
    return XT_OK;
}

static XtStatus multiply_pieces(void *context, int64_t begin, int64_t end) {
    const XtBf16Work *work = context;
    void *room;
    XT_CHECK(xt_scratch(work->kernel->room(work), &room));
    for (int64_t i = begin; i < end; i++) {
        int64_t m = i / work->tiles_n * work->rows, tile = i % work->tiles_n;
        int64_t first = work->panels * tile / work->tiles_n, last = work->panels * (tile + 1) / work->tiles_n;
        work->kernel->multiply(work, m, least(work->p->m - m, work->rows), first, last, room);
    }
    return XT_OK;
}

/* One matrix of the batch: cut into pieces for all threads, or one piece. */
static XtStatus multiply_one(XtBf16Work *work, int64_t threads) {
    const XtGemm *p = work->p;
    int64_t panel = work->kernel->panel, step_rows = work->kernel->step_rows;
    int64_t rounds = xt_divide_up(p->m, work->kernel->most_rows * threads); /* of all threads */
    work->rows = xt_divide_up(xt_divide_up(p->m, rounds * threads), step_rows) * step_rows;
    int64_t chunk = CHUNK / (work->pairs * panel * (int64_t)sizeof(uint32_t));
    chunk = (chunk > 1 ? chunk : 1) * panel;
    for (work->column = 0; work->column < p->n; work->column += chunk) {
        work->columns = least(p->n - work->column, chunk), work->panels = xt_divide_up(work->columns, panel);
        int64_t tiles_m = xt_divide_up(p->m, work->rows);
        work->tiles_n = tiles_m < threads ? least(xt_divide_up(threads, tiles_m), work->panels) : 1;
        int64_t pieces = tiles_m * work->tiles_n;
        int64_t packing = xt_divide_up(work->columns, PACK_COLUMNS) * xt_divide_up(p->k, PACK_K);
        XT_CHECK(xt_parallel(packing, xt_divide_up(packing, threads == 1 ? 1 : 4 * threads), pack_pieces, work));
        XT_CHECK(xt_parallel(pieces, threads == 1 ? pieces : 1, multiply_pieces, work));
    }
    return XT_OK;
}

/* ---- a batch ----------------------------------------------------------------------------------------------------------------- */

typedef struct Batch {
    const XtGemm *p;
    const XtBf16Kernel *kernel;
} Batch;

static size_t packed_bytes(const XtBf16Work *work) {
    int64_t columns = work->kernel->panel;
    size_t panel = (size_t)(work->pairs * columns) * sizeof(uint32_t), all = panel * (size_t)xt_divide_up(work->p->n, columns);
    return all < CHUNK ? all : panel > CHUNK ? panel : CHUNK / panel * panel;
}

static XtStatus multiply_matrices(const Batch *batch, int64_t begin, int64_t end, int64_t threads) {
    const XtGemm *p = batch->p;
    int64_t whole = batch->kernel->whole_k;
    XtBf16Work work = {.kernel = batch->kernel, .p = p, .pairs = xt_divide_up(p->k, whole) * whole / 2};
    XtStatus status = XT_OK;
    XtWorkspace workspace;
    XT_CHECK(xt_take_workspace(packed_bytes(&work), &workspace));
    work.b = workspace.data;
    for (int64_t i = begin; i < end && status == XT_OK; i++) {
        work.at = xt_gemm_offsets(p, i);
        status = multiply_one(&work, threads);
    }
    xt_give_workspace(&workspace);
    return status;
}

static XtStatus whole_matrices(void *context, int64_t begin, int64_t end) { return multiply_matrices(context, begin, end, 1); }

XtStatus xt_bf16_multiply(const XtGemm *p, const XtBf16Kernel *kernel) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    Batch batch = {p, kernel};
    int64_t matrices = p->batch[0] * p->batch[1], threads = xt_num_threads();
    double work = (double)p->m * (double)p->n * (double)p->k, alone = (double)kernel->alone;
    if (matrices < threads || work > 8.0 * alone * (double)threads)
        return multiply_matrices(&batch, 0, matrices, work < alone ? 1 : threads);
    return xt_parallel(matrices, work < alone ? (int64_t)(alone / work) : 1, whole_matrices, &batch);
}

const char *xt_bf16_fits(const XtGemm *p) {
    if (p->dtype_a != XT_BFLOAT16) return "the dtype is not bfloat16";
    if (p->k > XT_BF16_MOST_K) return "K is too long: all of a panel is packed, also for one column";
    return NULL;
}
