/* copy.c - copies and conversions between views of any strides. Transposes go through square tiles. */
#include "contract/elementwise.h"
#include "cpu/strided.h"

typedef struct Dtypes {
    XtDtype dst, src;
    size_t dst_size, src_size;
} Dtypes;

static void copy_dense(void *out, const void *const *in, int64_t n, const void *params) {
    const Dtypes *t = params;
    if (t->dst == t->src) {
        memcpy(out, in[0], (size_t)n * t->dst_size);
        return;
    }
    for (int64_t i = 0; i < n; i += XT_BLOCK) {
        int64_t part = n - i < XT_BLOCK ? n - i : XT_BLOCK;
        xt_convert((char *)out + i * (int64_t)t->dst_size, t->dst, (const char *)in[0] + i * (int64_t)t->src_size, t->src, part);
    }
}

/* ---- transposes ------------------------------------------------------------------------------------------------------------ */

enum { TILE = 32 };

/* dst[r * dst_row + c] = src[c * src_row + r] for a tile of rows x cols of dst. Through a buffer, so that memory is read and
 * written in whole stretches of a row and only L1 sees the strided accesses. */
#define XT_TILE(T)                                                                                             \
    static void tile_##T(T *dst, int64_t dst_row, const T *src, int64_t src_row, int64_t rows, int64_t cols) { \
        T buffer[TILE][TILE];                                                                                  \
        if (rows == TILE && cols == TILE) {                                                                    \
            for (int c = 0; c < TILE; c++)                                                                     \
                for (int r = 0; r < TILE; r++) buffer[r][c] = src[c * src_row + r];                            \
            for (int r = 0; r < TILE; r++) memcpy(dst + r * dst_row, buffer[r], sizeof buffer[r]);             \
        } else {                                                                                               \
            for (int64_t r = 0; r < rows; r++)                                                                 \
                for (int64_t c = 0; c < cols; c++) dst[r * dst_row + c] = src[c * src_row + r];                \
        }                                                                                                      \
    }
XT_TILE(uint8_t)
XT_TILE(uint16_t)
XT_TILE(uint32_t)
XT_TILE(uint64_t)
#undef XT_TILE

typedef struct Transpose {
    char *dst;
    const char *src;
    size_t size;
    XtLoop outer;              /* the other dimensions */
    int64_t rows, cols, bands; /* of a dst matrix; bands of TILE rows */
    int64_t dst_row, src_row;  /* stride of a row of dst; stride of src along a row of dst */
} Transpose;

static XtStatus transpose_piece(void *context, int64_t begin, int64_t end) {
    const Transpose *t = context;
    const int64_t size = (int64_t)t->size;
    for (int64_t item = begin; item < end; item++) {
        XtCursor at;
        xt_cursor_set(&at, &t->outer, item / t->bands);
        int64_t r = item % t->bands * TILE, rows = t->rows - r < TILE ? t->rows - r : TILE;
        char *dst = t->dst + (at.offset[0] + r * t->dst_row) * size;
        const char *src = t->src + (at.offset[1] + r) * size;
        for (int64_t c = 0; c < t->cols; c += TILE) {
            int64_t cols = t->cols - c < TILE ? t->cols - c : TILE;
            void *to = dst + c * size;
            const void *from = src + c * t->src_row * size;
            if (size == 4) tile_uint32_t(to, t->dst_row, from, t->src_row, rows, cols);
            else if (size == 2) tile_uint16_t(to, t->dst_row, from, t->src_row, rows, cols);
            else if (size == 8) tile_uint64_t(to, t->dst_row, from, t->src_row, rows, cols);
            else tile_uint8_t(to, t->dst_row, from, t->src_row, rows, cols);
        }
    }
    return XT_OK;
}

/* Fills *t and returns true when dst is dense along its last dimension and src along another one, both long enough to bother. */
static bool find_transpose(Transpose *t, const XtCopy *p) {
    if (p->dst.dtype != p->src.dtype) return false;
    XtLoop *loop = &t->outer;
    xt_loop_init(loop, 2, (const XtView *const[]){&p->dst, &p->src}, 0, p->dst.ndim, true);
    int last = loop->ndim - 1, d = last - 1;
    if (last < 1 || loop->strides[0][last] != 1 || loop->strides[1][last] <= 1 || loop->shape[last] < 8) return false;
    while (d >= 0 && loop->strides[1][d] != 1) d--;
    if (d < 0 || loop->shape[d] < 8) return false;

    t->dst = p->dst.data;
    t->src = p->src.data;
    t->size = xt_dtype_size(p->dst.dtype);
    t->rows = loop->shape[d];
    t->cols = loop->shape[last];
    t->dst_row = loop->strides[0][d];
    t->src_row = loop->strides[1][last];
    t->bands = (t->rows + TILE - 1) / TILE;
    loop->numel /= t->rows * t->cols;
    loop->ndim = last;
    for (int i = d; i + 1 < last; i++) { /* take dimension d out of the outer loop too */
        loop->shape[i] = loop->shape[i + 1];
        for (int k = 0; k < 2; k++) loop->strides[k][i] = loop->strides[k][i + 1];
    }
    loop->ndim--;
    return true;
}

/* ---- rows: same dtype, dense along the last dimension in both --------------------------------------------------------------- */

typedef struct Rows {
    char *dst;
    const char *src;
    size_t size;
    XtLoop loop; /* ndim >= 2 */
} Rows;

static XtStatus rows_piece(void *context, int64_t begin, int64_t end) {
    const Rows *t = context;
    const XtLoop *loop = &t->loop;
    const int64_t size = (int64_t)t->size, row = xt_loop_row(loop), outer = loop->shape[loop->ndim - 2];
    const int64_t dst_step = loop->strides[0][loop->ndim - 2] * size, src_step = loop->strides[1][loop->ndim - 2] * size;
    for (int64_t item = begin; item < end;) {
        XtCursor at;
        xt_cursor_set(&at, loop, item * row);
        int64_t left = outer - at.at[loop->ndim - 2], n = end - item < left ? end - item : left;
        char *dst = t->dst + at.offset[0] * size;
        const char *src = t->src + at.offset[1] * size;
        for (int64_t r = 0; r < n; r++, dst += dst_step, src += src_step) memcpy(dst, src, (size_t)(row * size));
        item += n;
    }
    return XT_OK;
}

static bool find_rows(Rows *t, const XtCopy *p) {
    if (p->dst.dtype != p->src.dtype) return false;
    xt_loop_init(&t->loop, 2, (const XtView *const[]){&p->dst, &p->src}, 0, p->dst.ndim, true);
    int last = t->loop.ndim - 1;
    if (last < 1 || t->loop.strides[0][last] != 1 || t->loop.strides[1][last] != 1) return false;
    t->dst = p->dst.data;
    t->src = p->src.data;
    t->size = xt_dtype_size(p->dst.dtype);
    return true;
}

XtStatus xt_cpu_copy(const XtCopy *p) {
    for (int d = 0; d < p->dst.ndim; d++)
        if (p->dst.shape[d] == 0) return XT_OK;
    Transpose t;
    if (find_transpose(&t, p))
        return xt_parallel(t.outer.numel * t.bands, xt_row_grain(TILE * t.cols, XT_EACH_GRAIN), transpose_piece, &t);
    Rows rows;
    if (find_rows(&rows, p))
        return xt_parallel(rows.loop.numel / xt_loop_row(&rows.loop), xt_row_grain(xt_loop_row(&rows.loop), XT_EACH_GRAIN),
                           rows_piece, &rows);
    Dtypes types = {p->dst.dtype, p->src.dtype, xt_dtype_size(p->dst.dtype), xt_dtype_size(p->src.dtype)};
    return xt_each(copy_dense, &types, false, 2, (const XtView *const[]){&p->dst, &p->src});
}
