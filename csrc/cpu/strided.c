/* strided.c - see strided.h. */
#include "strided.h"

/* ---- loops and cursors ----------------------------------------------------------------------------------------------------- */

void xt_loop_init(XtLoop *loop, int operands, const XtView *const *views, int first, int ndim, bool sort) {
    loop->operands = operands;
    loop->ndim = xt_merge_dims(operands, views, first, ndim, sort, &loop->numel, loop->shape, loop->strides);
}

void xt_cursor_set(XtCursor *cursor, const XtLoop *loop, int64_t index) {
    memset(cursor, 0, sizeof *cursor);
    if (index == 0) return; /* also the way out for loops with a size of 0 */
    for (int d = loop->ndim - 1; d >= 0; d--) {
        cursor->at[d] = d > 0 ? index % loop->shape[d] : index;
        index /= loop->shape[d];
        for (int k = 0; k < loop->operands; k++) cursor->offset[k] += cursor->at[d] * loop->strides[k][d];
    }
}

void xt_cursor_advance(XtCursor *cursor, const XtLoop *loop, int64_t n) {
    int d = loop->ndim - 1;
    if (d < 0) return;
    cursor->at[d] += n;
    for (int k = 0; k < loop->operands; k++) cursor->offset[k] += n * loop->strides[k][d];
    while (d > 0 && cursor->at[d] == loop->shape[d]) { /* carry into the next dimension out */
        cursor->at[d] = 0;
        cursor->at[d - 1]++;
        for (int k = 0; k < loop->operands; k++)
            cursor->offset[k] += loop->strides[k][d - 1] - loop->shape[d] * loop->strides[k][d];
        d--;
    }
}

/* ---- dense from strided and back ------------------------------------------------------------------------------------------- */

#define XT_GATHER(T)                                                                  \
    XT_FAST static void gather_##T(T *dst, const T *src, int64_t stride, int64_t n) { \
        if (stride == 0) {                                                            \
            T value = src[0];                                                         \
            for (int64_t i = 0; i < n; i++) dst[i] = value;                           \
        } else {                                                                      \
            for (int64_t i = 0; i < n; i++) dst[i] = src[i * stride];                 \
        }                                                                             \
    }                                                                                 \
    static void scatter_##T(T *dst, int64_t stride, const T *src, int64_t n) {        \
        for (int64_t i = 0; i < n; i++) dst[i * stride] = src[i];                     \
    }
XT_GATHER(uint8_t)
XT_GATHER(uint16_t)
XT_GATHER(uint32_t)
XT_GATHER(uint64_t)
#undef XT_GATHER

void xt_gather(void *dst, const void *src, int64_t stride, int64_t n, size_t size) {
    if (n == 0) return;
    if (stride == 1) memcpy(dst, src, (size_t)n * size);
    else if (size == 4) gather_uint32_t(dst, src, stride, n);
    else if (size == 2) gather_uint16_t(dst, src, stride, n);
    else if (size == 8) gather_uint64_t(dst, src, stride, n);
    else gather_uint8_t(dst, src, stride, n);
}

void xt_scatter(void *dst, int64_t stride, const void *src, int64_t n, size_t size) {
    if (n == 0) return;
    if (stride == 1) memcpy(dst, src, (size_t)n * size);
    else if (size == 4) scatter_uint32_t(dst, stride, src, n);
    else if (size == 2) scatter_uint16_t(dst, stride, src, n);
    else if (size == 8) scatter_uint64_t(dst, stride, src, n);
    else scatter_uint8_t(dst, stride, src, n);
}

void xt_gather_block(void *dst, const void *base, const XtLoop *loop, int operand, XtCursor *cursor, int64_t n, size_t size) {
    int64_t stride = loop->ndim > 0 ? loop->strides[operand][loop->ndim - 1] : 0;
    char *to = dst;
    while (n > 0) {
        int64_t left = xt_cursor_left(cursor, loop), part = n < left ? n : left;
        xt_gather(to, (const char *)base + cursor->offset[operand] * (int64_t)size, stride, part, size);
        xt_cursor_advance(cursor, loop, part);
        to += part * (int64_t)size;
        n -= part;
    }
}

static void scatter_block(void *base, const XtLoop *loop, XtCursor *cursor, const void *src, int64_t n, size_t size) {
    int64_t stride = loop->ndim > 0 ? loop->strides[0][loop->ndim - 1] : 0;
    const char *from = src;
    while (n > 0) {
        int64_t left = xt_cursor_left(cursor, loop), part = n < left ? n : left;
        xt_scatter((char *)base + cursor->offset[0] * (int64_t)size, stride, from, part, size);
        xt_cursor_advance(cursor, loop, part);
        from += part * (int64_t)size;
        n -= part;
    }
}

/* ---- conversion ------------------------------------------------------------------------------------------------------------ */

/* Every dtype has a wide form - float32 for itself and the 16-bit floats, float64, int64 for the rest - so that 8 x 8
 * conversions are made of at most three steps: widen, change the wide form, narrow. */
#define XT_CONVERT(name, From, To, expression)                      \
    XT_FAST static void name(To *dst, const From *src, int64_t n) { \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {       \
            From v = src[i];                                        \
            dst[i] = (To)(expression);                              \
        }                                                           \
    }
XT_CONVERT(bf16_to_f32, XtBf16, float, xt_bf16_to_float(v))
XT_CONVERT(f16_to_f32, XtF16, float, xt_f16_to_float(v))
XT_CONVERT(i32_to_i64, int32_t, int64_t, v)
XT_CONVERT(u8_to_i64, uint8_t, int64_t, v)
XT_CONVERT(i32_to_f32, int32_t, float, v)
XT_CONVERT(u8_to_f32, uint8_t, float, v)
XT_CONVERT(f32_to_f64, float, double, v)
XT_CONVERT(f64_to_f32, double, float, v)
XT_CONVERT(i64_to_f32, int64_t, float, v)
XT_CONVERT(i64_to_f64, int64_t, double, v)
XT_CONVERT(f32_to_bf16, float, XtBf16, xt_float_to_bf16(v))
XT_CONVERT(f32_to_f16, float, XtF16, xt_float_to_f16(v))
XT_CONVERT(i64_to_i32, int64_t, int32_t, (uint32_t)(uint64_t)v)
XT_CONVERT(i64_to_u8, int64_t, uint8_t, (uint64_t)v)
XT_CONVERT(i64_to_bool, int64_t, uint8_t, v != 0)
XT_CONVERT(f32_to_bool, float, uint8_t, v != 0)
XT_CONVERT(f64_to_bool, double, uint8_t, v != 0)
#undef XT_CONVERT

/* The ends of an integer dtype as floats: [low, above), both exact. C leaves conversions of values outside undefined. */
static void integer_range(XtDtype dtype, double *low, double *above, int64_t *high) {
    *low = dtype == XT_UINT8 ? 0.0 : dtype == XT_INT32 ? -0x1p31 : -0x1p63;
    *above = dtype == XT_UINT8 ? 0x1p8 : dtype == XT_INT32 ? 0x1p31 : 0x1p63;
    *high = dtype == XT_UINT8 ? UINT8_MAX : dtype == XT_INT32 ? INT32_MAX : INT64_MAX;
}

#define XT_TO_INTEGER(name, From)                                                                            \
    XT_FAST static void name(int64_t *dst, const From *src, int64_t n, From low, From above, int64_t high) { \
        for (int64_t i = 0; i < n; i++) {                                                                    \
            From v = src[i], inside = v > low ? v : low;                                                     \
            inside = inside < above ? inside : 0;                                                            \
            int64_t whole = (int64_t)inside;                                                                 \
            whole = v >= above ? high : whole;                                                               \
            dst[i] = v == v ? whole : 0;                                                                     \
        }                                                                                                    \
    }
XT_TO_INTEGER(f32_to_i64, float)
XT_TO_INTEGER(f64_to_i64, double)
#undef XT_TO_INTEGER

XtDtype xt_wide_dtype(XtDtype dtype) {
    if (dtype == XT_FLOAT64) return XT_FLOAT64;
    return dtype == XT_FLOAT32 || dtype == XT_BFLOAT16 || dtype == XT_FLOAT16 ? XT_FLOAT32 : XT_INT64;
}

void xt_convert(void *dst, XtDtype dst_dtype, const void *src, XtDtype src_dtype, int64_t n) {
    _Alignas(64) char widened[XT_BLOCK * 8], changed[XT_BLOCK * 8];
    if (dst_dtype == src_dtype) {
        if (n > 0 && dst != src) memcpy(dst, src, (size_t)n * xt_dtype_size(dst_dtype));
        return;
    }
    XtDtype src_wide = xt_wide_dtype(src_dtype), dst_wide = xt_wide_dtype(dst_dtype);

    if (dst_dtype == XT_FLOAT32) { /* one step for what is common */
        if (src_dtype == XT_INT32) return i32_to_f32(dst, src, n);
        if (src_dtype == XT_UINT8 || src_dtype == XT_BOOL) return u8_to_f32(dst, src, n);
    }

    const void *wide = src;
    if (src_dtype != src_wide) {
        void *to = src_wide == dst_dtype ? dst : widened;
        if (src_dtype == XT_BFLOAT16) bf16_to_f32(to, src, n);
        else if (src_dtype == XT_FLOAT16) f16_to_f32(to, src, n);
        else if (src_dtype == XT_INT32) i32_to_i64(to, src, n);
        else u8_to_i64(to, src, n);
        if (to == dst) return;
        wide = to;
    }
    if (dst_dtype == XT_BOOL) {
        if (src_wide == XT_FLOAT32) f32_to_bool(dst, wide, n);
        else if (src_wide == XT_FLOAT64) f64_to_bool(dst, wide, n);
        else i64_to_bool(dst, wide, n);
        return;
    }
    if (src_wide != dst_wide) {
        void *to = dst_wide == dst_dtype ? dst : changed;
        if (dst_wide == XT_FLOAT64) {
            if (src_wide == XT_FLOAT32) f32_to_f64(to, wide, n);
            else i64_to_f64(to, wide, n);
        } else if (dst_wide == XT_FLOAT32) {
            if (src_wide == XT_FLOAT64) f64_to_f32(to, wide, n);
            else i64_to_f32(to, wide, n);
        } else {
            double low, above;
            int64_t high;
            integer_range(dst_dtype, &low, &above, &high);
            if (src_wide == XT_FLOAT32) f32_to_i64(to, wide, n, (float)low, (float)above, high);
            else f64_to_i64(to, wide, n, low, above, high);
        }
        if (to == dst) return;
        wide = to;
    }
    if (dst_dtype == XT_BFLOAT16) f32_to_bf16(dst, wide, n);
    else if (dst_dtype == XT_FLOAT16) f32_to_f16(dst, wide, n);
    else if (dst_dtype == XT_INT32) i64_to_i32(dst, wide, n);
    else i64_to_u8(dst, wide, n);
}

const void *xt_fetch(char (*buffer)[XT_BLOCK * 8], const void *base, XtDtype dtype, XtDtype wide, const XtLoop *loop, int operand,
                     XtCursor *cursor, int64_t n) {
    int64_t size = (int64_t)xt_dtype_size(dtype);
    const void *p;
    if (n <= xt_cursor_left(cursor, loop) && (n == 1 || loop->strides[operand][loop->ndim - 1] == 1)) {
        p = (const char *)base + cursor->offset[operand] * size;
        xt_cursor_advance(cursor, loop, n);
    } else {
        xt_gather_block(buffer[0], base, loop, operand, cursor, n, (size_t)size);
        p = buffer[0];
    }
    if (dtype == wide) return p;
    xt_convert(buffer[1], wide, p, dtype, n);
    return buffer[1];
}

/* ---- elementwise ----------------------------------------------------------------------------------------------------------- */

/* Rows shorter than this are gathered several to a block, so that the dense function always has something to do. */
enum { SHORT_ROW = 64 };

typedef struct Each {
    XtDenseFn fn;
    const void *params;
    XtLoop loop;
    void *data[XT_MAX_OPERANDS];
    XtDtype dtype[XT_MAX_OPERANDS];
    size_t size[XT_MAX_OPERANDS];
    bool flat[XT_MAX_OPERANDS];      /* element i is at data + i * size */
    bool single[XT_MAX_OPERANDS];    /* one value for all */
    bool narrow[XT_MAX_OPERANDS];    /* 16-bit float that fn sees as float32 */
    bool row_dense[XT_MAX_OPERANDS]; /* rows have stride 1 */
    bool by_rows;                    /* rows are long enough to be taken one by one */
    bool scalar;                     /* fn wants one value of the last operand */
    int64_t limit;                   /* most elements a call of fn may get: XT_BLOCK when something passes through the stack */
} Each;

static bool is_flat(const XtLoop *loop, int operand) {
    int64_t expected = 1;
    for (int d = loop->ndim - 1; d >= 0; d--) {
        if (loop->strides[operand][d] != expected) return false;
        expected *= loop->shape[d];
    }
    return true;
}

static bool is_single(const XtLoop *loop, int operand) {
    for (int d = 0; d < loop->ndim; d++)
        if (loop->strides[operand][d] != 0) return false;
    return loop->ndim > 0;
}

static XtStatus each_piece(void *context, int64_t begin, int64_t end) {
    const Each *e = context;
    const XtLoop *loop = &e->loop;
    /* Per operand: gathered elements, then (16-bit only) their float32 form behind. */
    _Alignas(64) char blocks[XT_MAX_OPERANDS][XT_BLOCK * 8];
    enum { WIDE_AT = XT_BLOCK * 4 };
    const void *in[XT_MAX_OPERANDS];
    XtCursor cursor;
    xt_cursor_set(&cursor, loop, begin);

    for (int k = 1; k < loop->operands; k++) {
        if (!e->single[k]) continue;
        int64_t n = end - begin < XT_BLOCK ? end - begin : XT_BLOCK;
        if (e->scalar && k == loop->operands - 1) n = 1;
        xt_gather(blocks[k], e->data[k], 0, n, e->size[k]);
        in[k] = blocks[k];
        if (e->narrow[k]) {
            xt_convert(blocks[k] + WIDE_AT, XT_FLOAT32, blocks[k], e->dtype[k], n);
            in[k] = blocks[k] + WIDE_AT;
        }
    }

    for (int64_t i = begin; i < end;) {
        int64_t n = end - i < e->limit ? end - i : e->limit;
        if (e->by_rows) {
            int64_t left = xt_cursor_left(&cursor, loop);
            n = n < left ? n : left;
        }
        XtCursor next = cursor;
        bool moved = false;
        for (int k = 1; k < loop->operands; k++) {
            if (e->single[k]) continue;
            const char *p = (const char *)e->data[k];
            int64_t values = n;
            if (e->scalar && k == loop->operands - 1) {
                p += cursor.offset[k] * (int64_t)e->size[k];
                values = 1;
            } else if (e->flat[k]) {
                p += i * (int64_t)e->size[k];
            } else if (e->by_rows && e->row_dense[k]) {
                p += cursor.offset[k] * (int64_t)e->size[k];
            } else {
                next = cursor;
                xt_gather_block(blocks[k], p, loop, k, &next, n, e->size[k]);
                moved = true;
                p = blocks[k];
            }
            if (e->narrow[k]) {
                xt_convert(blocks[k] + WIDE_AT, XT_FLOAT32, p, e->dtype[k], values);
                p = blocks[k] + WIDE_AT;
            }
            in[k] = p;
        }

        char *target = blocks[0];
        bool direct = e->flat[0] || (e->by_rows && e->row_dense[0]);
        if (direct) target = (char *)e->data[0] + (e->flat[0] ? i : cursor.offset[0]) * (int64_t)e->size[0];
        if (e->narrow[0]) {
            e->fn(blocks[0] + WIDE_AT, in + 1, n, e->params);
            xt_convert(target, e->dtype[0], blocks[0] + WIDE_AT, XT_FLOAT32, n);
        } else {
            e->fn(target, in + 1, n, e->params);
        }
        if (!direct) {
            next = cursor;
            scatter_block(e->data[0], loop, &next, target, n, e->size[0]);
            moved = true;
        }

        if (moved) cursor = next;
        else if (e->by_rows) xt_cursor_advance(&cursor, loop, n);
        /* Otherwise every operand is flat or single, and the cursor is not looked at. */
        i += n;
    }
    return XT_OK;
}

XtStatus xt_each(XtDenseFn fn, const void *params, bool widen, int count, const XtView *const *views) {
    return xt_each_or_scalar(fn, NULL, params, widen, count, views);
}

XtStatus xt_each_or_scalar(XtDenseFn fn, XtDenseFn scalar_fn, const void *params, bool widen, int count,
                           const XtView *const *views) {
    if (!fn)
        return xt_error(XT_TYPE_ERROR, "input must have a dtype that this operation is defined for, got %s",
                        xt_dtype_name(views[count - 1]->dtype));
    Each e = {.fn = fn, .params = params, .limit = INT64_MAX};
    xt_loop_init(&e.loop, count, views, 0, views[0]->ndim, true);
    if (e.loop.numel == 0) return XT_OK;
    e.by_rows = xt_loop_row(&e.loop) >= SHORT_ROW || e.loop.ndim <= 1;
    e.scalar = scalar_fn && e.by_rows && e.loop.ndim > 0 && e.loop.strides[count - 1][e.loop.ndim - 1] == 0;
    if (e.scalar) e.fn = scalar_fn;
    for (int k = 0; k < count; k++) {
        e.data[k] = views[k]->data;
        e.dtype[k] = views[k]->dtype;
        e.size[k] = xt_dtype_size(views[k]->dtype);
        e.flat[k] = is_flat(&e.loop, k);
        e.single[k] = k > 0 && is_single(&e.loop, k);
        e.narrow[k] = widen && (views[k]->dtype == XT_BFLOAT16 || views[k]->dtype == XT_FLOAT16);
        e.row_dense[k] = e.loop.ndim == 0 || e.loop.strides[k][e.loop.ndim - 1] == 1;
        if (e.scalar && k == count - 1) continue;
        bool buffered = e.narrow[k] || e.single[k] || !(e.flat[k] || (e.by_rows && e.row_dense[k]));
        if (buffered || (!e.by_rows && !e.flat[k])) e.limit = XT_BLOCK;
    }
    return xt_parallel(e.loop.numel, XT_EACH_GRAIN, each_piece, &e);
}
