/* reduce_loops.h - the dense loops of reduce.c, included once per computing type. No include guard. W: the type; U: its type for
 * sums (unsigned for int64, so that overflow wraps); TOTAL: of a sum over blocks, TOTAL_FIELD where Partial has it; INDEX: an
 * integer of W's size; IS_NAN(v), ANY_NAN(v, w); NAME(stem).
 *
 * Order of a sum, the same whichever way the memory lies: within a block of SUM_BLOCK elements lane j adds elements j, j + 8, j
 * + 16 and so on; the 8 lanes meet in a tree; block totals are added in TOTAL from first to last. */

typedef U NAME(Lanes) __attribute__((vector_size(LANES * sizeof(U))));
typedef INDEX NAME(Order) __attribute__((vector_size(LANES * sizeof(INDEX))));

/* The tree: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). */
#ifdef __clang__
#define XT_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define XT_SHUFFLE(v, ...) __builtin_shuffle(v, (NAME(Order)){__VA_ARGS__})
#endif
#define XT_TREE(v) (v += XT_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3), v += XT_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5), v[0] + v[1])

/* total + x[0] + ... + x[n - 1]; x starts a block. Four blocks at a time, so that the additions of one do not wait for each
 * other. */
XT_FAST static TOTAL NAME(sum)(TOTAL total, const W *x, int64_t n) {
    int64_t i = 0;
    for (; i + 4 * SUM_BLOCK <= n; i += 4 * SUM_BLOCK) {
        NAME(Lanes) s[4] = {{0}}, v;
        for (int64_t j = i; j < i + SUM_BLOCK; j += LANES) {
            memcpy(&v, x + j, sizeof v), s[0] += v;
            memcpy(&v, x + j + SUM_BLOCK, sizeof v), s[1] += v;
            memcpy(&v, x + j + 2 * SUM_BLOCK, sizeof v), s[2] += v;
            memcpy(&v, x + j + 3 * SUM_BLOCK, sizeof v), s[3] += v;
        }
        for (int b = 0; b < 4; b++) total += (TOTAL)XT_TREE(s[b]);
    }
    for (; i < n; i += SUM_BLOCK) {
        int64_t end = i + SUM_BLOCK < n ? i + SUM_BLOCK : n, j = i;
        NAME(Lanes) s = {0}, v;
        for (; j + LANES <= end; j += LANES) memcpy(&v, x + j, sizeof v), s += v;
        if (j < end) {
            v = (NAME(Lanes)){0};
            for (int l = 0; j + l < end; l++) v[l] = (U)x[j + l];
            s += v;
        }
        total += (TOTAL)XT_TREE(s);
    }
    return total;
}

/* The same for rows of n elements, `stride` apart: total[r] = sum of row r. Four rows at a time. */
XT_FAST static void NAME(sum_rows)(TOTAL *total, const W *x, int64_t stride, int64_t rows, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const W *row[4] = {x + r * stride, x + (r + 1) * stride, x + (r + 2) * stride, x + (r + 3) * stride};
        TOTAL t[4] = {0};
        for (int64_t i = 0; i < n; i += SUM_BLOCK) {
            int64_t end = i + SUM_BLOCK < n ? i + SUM_BLOCK : n, j = i;
            NAME(Lanes) s[4] = {{0}}, v;
            for (; j + LANES <= end; j += LANES) {
                memcpy(&v, row[0] + j, sizeof v), s[0] += v;
                memcpy(&v, row[1] + j, sizeof v), s[1] += v;
                memcpy(&v, row[2] + j, sizeof v), s[2] += v;
                memcpy(&v, row[3] + j, sizeof v), s[3] += v;
            }
            for (int k = 0; k < 4; k++) {
                if (j < end) {
                    v = (NAME(Lanes)){0};
                    for (int l = 0; j + l < end; l++) v[l] = (U)row[k][j + l];
                    s[k] += v;
                }
                t[k] += (TOTAL)XT_TREE(s[k]);
            }
        }
        for (int k = 0; k < 4; k++) total[r + k] = t[k];
    }
    for (; r < rows; r++) total[r] = NAME(sum)(0, x + r * stride, n);
}

/* Maximum (or minimum) of x[n], n > 0, or *nan when there is a NaN: then the result means nothing. Four streams for the same
 * reason. */
#define XT_EXTREME(name, clause, better)                                  \
    XT_FAST static W NAME(name)(const W *x, int64_t n, bool *nan) {       \
        W m0 = x[0], m1 = m0, m2 = m0, m3 = m0;                           \
        INDEX bad = 0;                                                    \
        const int64_t q = n / 4;                                          \
        _Pragma(clause) for (int64_t i = 0; i < q; i++) {                 \
            W a = x[i], b = x[i + q], c = x[i + 2 * q], d = x[i + 3 * q]; \
            m0 = a better m0 ? a : m0;                                    \
            m1 = b better m1 ? b : m1;                                    \
            m2 = c better m2 ? c : m2;                                    \
            m3 = d better m3 ? d : m3;                                    \
            bad |= (INDEX)ANY_NAN(a, b) | (INDEX)ANY_NAN(c, d);           \
        }                                                                 \
        for (int64_t i = 4 * q; i < n; i++) {                             \
            m0 = x[i] better m0 ? x[i] : m0;                              \
            bad |= (INDEX)IS_NAN(x[i]);                                   \
        }                                                                 \
        m0 = m1 better m0 ? m1 : m0;                                      \
        m2 = m3 better m2 ? m3 : m2;                                      \
        *nan = bad != 0;                                                  \
        return m2 better m0 ? m2 : m0;                                    \
    }
XT_EXTREME(max, "omp simd reduction(max : m0, m1, m2, m3) reduction(| : bad)", >)
XT_EXTREME(min, "omp simd reduction(min : m0, m1, m2, m3) reduction(| : bad)", <)
#undef XT_EXTREME

/* Position of the first element of x[n] equal to value, or of the first NaN. It is there. */
XT_FAST static int64_t NAME(find)(const W *x, int64_t n, W value, bool nan) {
    enum { STEP = 64 };
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        INDEX here = 0;
#pragma omp simd reduction(| : here)
        for (int j = 0; j < STEP; j++) here |= (INDEX)(nan ? IS_NAN(x[i + j]) : x[i + j] == value);
        if (here) break;
    }
    while (nan ? !IS_NAN(x[i]) : x[i] != value) i++;
    return i;
}

/* ---- a tile of columns: x[rows][cols], rows `stride` apart, cols <= TILE -------------------------------------------------- */

XT_COLUMN_SUM(NAME(column_sum), U, W, (U)v)

/* total[j] += the lanes of column j. */
XT_FAST static void NAME(column_fold)(TOTAL *total, U *lanes, int64_t cols) {
#pragma omp simd
    for (int64_t j = 0; j < cols; j++) {
        const U *l = lanes + j;
        U even = (l[0] + l[4 * TILE]) + (l[2 * TILE] + l[6 * TILE]), odd = (l[TILE] + l[5 * TILE]) + (l[3 * TILE] + l[7 * TILE]);
        total[j] += (TOTAL)(even + odd);
    }
}

#define XT_COLUMN_EXTREME(name, better)                                                                \
    XT_FAST static void NAME(name)(W * best, const W *x, int64_t stride, int64_t rows, int64_t cols) { \
        for (int64_t r = 0; r < rows; r++) {                                                           \
            const W *row = x + r * stride;                                                             \
            _Pragma("omp simd") for (int64_t j = 0; j < cols; j++) {                                   \
                W v = row[j], m = best[j];                                                             \
                best[j] = ((v better m) | IS_NAN(v)) ? v : m;                                          \
            }                                                                                          \
        }                                                                                              \
    }
XT_COLUMN_EXTREME(column_max, >)
XT_COLUMN_EXTREME(column_min, <)
#undef XT_COLUMN_EXTREME

/* Row r of x is row `first` + r of the segment. */
XT_FAST static void NAME(column_argmax)(W *best, INDEX *index, const W *x, int64_t stride, int64_t rows, int64_t cols,
                                        int64_t first) {
    for (int64_t r = 0; r < rows; r++) {
        const W *row = x + r * stride;
        INDEX here = (INDEX)(first + r);
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) {
            W v = row[j], m = best[j];
            INDEX i = index[j];
            bool take = (v > m) | (IS_NAN(v) & !IS_NAN(m));
            best[j] = take ? v : m;
            index[j] = take ? here : i;
        }
    }
}

/* ---- one segment of one reduction ------------------------------------------------------------------------------------------ */

/* Reduces elements [begin, end) of the reduced dimensions of the row that starts at `x`. */
static Partial NAME(reduce_row)(const Reduce *r, const char *x, int64_t begin, int64_t end) {
    _Alignas(64) char buffer[2][XT_BLOCK * 8];
    Partial out = {{0}, 0};
    TOTAL total = 0;
    W best = 0;
    XtCursor cursor;
    xt_cursor_set(&cursor, &r->reduced, begin);
    for (int64_t i = begin; i < end; i += XT_BLOCK) {
        int64_t n = end - i < XT_BLOCK ? end - i : XT_BLOCK;
        const W *v = xt_fetch(buffer, x, r->dtype, r->wide, &r->reduced, 0, &cursor, n);
        if (r->op == XT_REDUCE_SUM || r->op == XT_REDUCE_MEAN) {
            total = NAME(sum)(total, v, n);
            continue;
        }
        bool nan;
        W m = r->op == XT_REDUCE_MIN ? NAME(min)(v, n, &nan) : NAME(max)(v, n, &nan);
        bool better = r->op == XT_REDUCE_MIN ? m < best : m > best;
        if (nan || better || i == begin) {
            int64_t at = nan || r->op == XT_REDUCE_ARGMAX ? NAME(find)(v, n, m, nan) : 0;
            best = nan ? v[at] : m;
            out.index = i + at;
            if (nan) break; /* the first NaN wins */
        }
    }
    if (r->op == XT_REDUCE_SUM || r->op == XT_REDUCE_MEAN) out.value.TOTAL_FIELD = total;
    else out.value.TOTAL_FIELD = (TOTAL)best;
    return out;
}

/* All of the reduced dimension, dense and n <= SEGMENT long, for `rows` <= RUN rows that are `stride` apart. */
static void NAME(reduce_run)(const Reduce *r, const W *x, int64_t stride, int64_t rows, Partial *out) {
    const int64_t n = r->reduced.numel;
    if (r->op == XT_REDUCE_SUM || r->op == XT_REDUCE_MEAN) {
        TOTAL total[RUN];
        NAME(sum_rows)(total, x, stride, rows, n);
        for (int64_t k = 0; k < rows; k++) out[k].value.TOTAL_FIELD = total[k];
        return;
    }
    for (int64_t k = 0; k < rows; k++, x += stride) {
        bool nan;
        W m = r->op == XT_REDUCE_MIN ? NAME(min)(x, n, &nan) : NAME(max)(x, n, &nan);
        out[k].index = nan || r->op == XT_REDUCE_ARGMAX ? NAME(find)(x, n, m, nan) : 0;
        out[k].value.TOTAL_FIELD = (TOTAL)(nan ? x[out[k].index] : m);
    }
}

/* The same for `cols` <= TILE neighbouring reductions, whose elements lie side by side. */
static void NAME(reduce_columns)(const Reduce *r, const char *x, int64_t cols, int64_t begin, int64_t end, Partial *out) {
    _Alignas(64) U lanes[LANES * TILE];
    _Alignas(64) W block[LANES * TILE], best[TILE];
    INDEX index[TILE];
    TOTAL total[TILE];
    const bool sums = r->op == XT_REDUCE_SUM || r->op == XT_REDUCE_MEAN;
    const XtLoop *loop = &r->reduced;
    const int64_t size = (int64_t)xt_dtype_size(r->dtype), stride = loop->ndim > 0 ? loop->strides[0][loop->ndim - 1] : 0;
    memset(total, 0, sizeof total);
    memset(index, 0, sizeof index);
    XtCursor cursor;
    xt_cursor_set(&cursor, loop, begin);
    for (int64_t i = begin; i < end;) {
        /* Straight on the tensor, up to a whole sum block at a time; or LANES rows at a time through `block`. */
        int64_t in_block = SUM_BLOCK - (i - begin) % SUM_BLOCK, n = end - i < in_block ? end - i : in_block;
        int64_t left = xt_cursor_left(&cursor, loop), row_stride = stride;
        const bool fresh = in_block == SUM_BLOCK;
        const W *v = NULL;
        if (sums && n <= left && (r->dtype == XT_BFLOAT16 || r->dtype == XT_FLOAT16)) {
            if (r->dtype == XT_BFLOAT16)
                column_sum_bf16((float *)lanes, (const XtBf16 *)x + cursor.offset[0], stride, n, cols, fresh);
            else column_sum_f16((float *)lanes, (const XtF16 *)x + cursor.offset[0], stride, n, cols, fresh);
            xt_cursor_advance(&cursor, loop, n);
        } else if (r->dtype == r->wide && n <= left) {
            v = (const W *)(x + cursor.offset[0] * size);
            xt_cursor_advance(&cursor, loop, n);
        } else {
            n = n < LANES ? n : LANES;
            for (int64_t k = 0; k < n; k++) {
                xt_convert(block + k * TILE, r->wide, x + cursor.offset[0] * size, r->dtype, cols);
                xt_cursor_advance(&cursor, loop, 1);
            }
            v = block;
            row_stride = TILE;
        }
        if (sums) {
            if (v) NAME(column_sum)(lanes, v, row_stride, n, cols, fresh);
            if (n == in_block || i + n == end) NAME(column_fold)(total, lanes, cols);
        } else {
            if (i == begin) memcpy(best, v, (size_t)cols * sizeof(W));
            if (r->op == XT_REDUCE_MAX) NAME(column_max)(best, v, row_stride, n, cols);
            else if (r->op == XT_REDUCE_MIN) NAME(column_min)(best, v, row_stride, n, cols);
            else NAME(column_argmax)(best, index, v, row_stride, n, cols, i - begin);
        }
        i += n;
    }
    for (int64_t j = 0; j < cols; j++) {
        out[j].value.TOTAL_FIELD = sums ? total[j] : (TOTAL)best[j];
        out[j].index = begin + index[j];
    }
}

#undef XT_TREE
#undef XT_SHUFFLE
