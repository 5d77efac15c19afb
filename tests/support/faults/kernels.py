"""Kernels of single elements, copies, reductions, random numbers and products."""

from __future__ import annotations

from faults.table import CLAUSES, FORWARD, GRADIENT, STRIDES, Fault

_E = "csrc/cpu/elementwise/"
_R = "csrc/cpu/reduce/"
_G = "csrc/cpu/gemm/"
_GEMM = "tests/ops/test_gemm.py::"
_A = "csrc/cpu/attention/"
_BF16 = "tests/ops/test_gemm_bf16.py::"
_AMX = "tests/gemm/test_amx.py::"
_ATT = "tests/gemm/test_attention_bf16.py::"
_EXACT = "tests/ops/test_gemm_attention.py::test_products_of_small_integers_are_exact "

FAULTS = [
    Fault(
        "convert: bfloat16 truncates", "csrc/cpu/strided.c", "XT_CONVERT(f32_to_bf16, float, XtBf16, xt_float_to_bf16(v))",
        "XT_CONVERT(f32_to_bf16, float, XtBf16, v != v ? xt_float_to_bf16(v) : (xt_float_bits(v) + 0x8000u) >> 16)",
        "round to nearest even", CLAUSES + "test_ties_of_bfloat16",
    ),
    Fault(
        "convert: NaN becomes infinity", "csrc/cpu/strided.c", "XT_CONVERT(f32_to_bf16, float, XtBf16, xt_float_to_bf16(v))",
        "XT_CONVERT(f32_to_bf16, float, XtBf16, v != v ? xt_float_bits(v) >> 16 : xt_float_to_bf16(v))", "NaN stays NaN",
        CLAUSES + "test_nan_with_few_bits_stays_nan",
    ),
    Fault(
        "convert: float16 subnormals are flushed", "csrc/cpu/strided.c", "XT_CONVERT(f32_to_f16, float, XtF16, xt_float_to_f16(v))",
        "XT_CONVERT(f32_to_f16, float, XtF16, v < 0x1p-14f && v > -0x1p-14f ? 0 : xt_float_to_f16(v))",
        "float16 subnormals are rounded", CLAUSES + "test_subnormals_of_float16",
    ),
    Fault(
        "convert: float16 overflows late", "csrc/cpu/strided.c", "XT_CONVERT(f32_to_f16, float, XtF16, xt_float_to_f16(v))",
        "XT_CONVERT(f32_to_f16, float, XtF16, xt_float_to_f16(v > 65504 && v < 65536 ? 65504 : v))",
        "65520 rounds to infinity", CLAUSES + "test_subnormals_of_float16",
    ),
    Fault(
        "exp: 0 far too early", _E + "unary.c", "#define exp_f32(v) xt_expf(v)", "#define exp_f32(v) ((v) < -80 ? 0 : xt_expf(v))",
        "0 below -87 only", CLAUSES + "test_exp_keeps_its_precision_to_its_ends",
    ),
    Fault(
        "exp: a constant", "csrc/cpu/kernel.h", "poly = poly * r + 0.1666652f;", "poly = poly * r + 0.16666f;", "exp to 1.2 ulp",
        CLAUSES + "test_exp_keeps_its_precision_to_its_ends",
    ),
    Fault(
        "convert: a float beyond the integers", "csrc/cpu/strided.c", "whole = v >= above ? high : whole;", "whole = v >= above ? 0 : whole;",
        "values above the range become its end", CLAUSES + "test_floats_beyond_the_range_of_an_integer",
    ),
    Fault(
        "convert: NaN to an integer", "csrc/cpu/strided.c", "dst[i] = v == v ? whole : 0;", "dst[i] = whole;", "NaN becomes 0",
        CLAUSES + "test_floats_beyond_the_range_of_an_integer",
    ),
    Fault(
        "convert: bool keeps the low byte", "csrc/cpu/strided.c", "XT_CONVERT(i64_to_bool, int64_t, uint8_t, v != 0)",
        "XT_CONVERT(i64_to_bool, int64_t, uint8_t, (v & 0xff) != 0)", "anything -> bool is (x != 0)",
        CLAUSES + "test_bool_is_not_zero",
    ),
    Fault(
        "cursor: no carry over two dimensions", "csrc/cpu/strided.c", "while (d > 0 && cursor->at[d] == loop->shape[d]) {",
        "if (d > 0 && cursor->at[d] == loop->shape[d]) {", "views of any strides", STRIDES + "add",
    ),
    Fault(
        "merge: dims of other strides", "csrc/core/view.c", "merge = strides[k][left - 1] == strides[k][d] * shape[d];",
        "merge = strides[0][left - 1] == strides[0][d] * shape[d];", "dimensions merge where all views agree",
        "tests/core/test_merge_dims.py",
    ),
    Fault(
        "copy: tiles of other than the square", _E + "copy.c", "for (int r = 0; r < TILE; r++) buffer[r][c] = src[c * src_row + r];",
        "for (int r = 0; r < TILE; r++) buffer[c][r] = src[c * src_row + r];", "dst[i] = src[i]", CLAUSES + "test_large_transposes",
    ),
    Fault(
        "copy: the last tile of columns", _E + "copy.c", "int64_t cols = t->cols - c < TILE ? t->cols - c : TILE;", "int64_t cols = TILE;",
        "nothing behind a row is written", CLAUSES + "test_large_transposes",
    ),
    Fault(
        "copy: rows of the outer loop", _E + "copy.c", "int64_t left = outer - at.at[loop->ndim - 2], n", "int64_t left = outer, n",
        "views of any strides", CLAUSES + "test_rows_of_three_dimensions",
    ),
    Fault(
        "arange: steps add up", _E + "arange.c", "out[i] = start + (double)(first + i) * step;",
        "out[i] = i ? out[i - 1] + step : start + (double)first * step;", "each element from its index, so that no error builds up",
        CLAUSES + "test_a_range_collects_no_error",
    ),
    Fault(
        "random: blocks from the piece", _E + "random.c", "uniform_batch(made.f, p->philox, (uint64_t)block, (float)p->low",
        "uniform_batch(made.f, p->philox, (uint64_t)(block - begin), (float)p->low", "counter = element index, whatever the pieces",
        "tests/core/test_random.py::test_a_prefix_of_a_fill_does_not_depend_on_its_size " + CLAUSES
        + "test_no_number_of_a_long_fill_comes_twice",
    ),
    Fault(
        "random: high is reached", "csrc/core/philox.h", "return v < top ? v : top;", "return v;", "[low, high)",
        "tests/core/test_random.py " + CLAUSES + "test_uniform_never_reaches_its_end",
    ),
    Fault(
        "random: nine rounds", "csrc/core/philox.h",
        "XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND\n",
        "XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND\n", "Philox4x32-10",
        "tests/core/test_random.py",
    ),
    Fault(
        "random: words of a randint", "csrc/core/philox.h", "uint64_t bits = (uint64_t)word2 << 32 | word1;",
        "uint64_t bits = word1;", "64-bit word pairs", CLAUSES + "test_randint_of_a_range_beyond_32_bits",
    ),
    Fault(
        "random: one stream for all fills", "csrc/core/random.c", "    state.stream++;\n", "", "every fill has a stream of its own",
        "tests/core/test_random.py",
    ),
    Fault(
        "binary: NaN of b is passed over", _E + "binary.c", "TWO(MAXIMUM, A, S, A, ((a > b) | (a != a)) ? a : b)",
        "TWO(MAXIMUM, A, S, A, ((a > b) | (a != a) | (b != b)) ? a : b)", "NaN makes MAXIMUM NaN",
        CLAUSES + "test_nan_on_either_side",
    ),
    Fault(
        "binary: a number is rounded", _E + "binary.c", "number.dtype = dtype == XT_BFLOAT16 || dtype == XT_FLOAT16 ? XT_FLOAT32 : dtype;",
        "number.dtype = dtype;", "a 16-bit tensor does not round the number beside it",
        CLAUSES + "test_a_constant_is_not_rounded_to_the_dtype_of_its_tensor",
    ),
    Fault(
        "binary: powers of -1", _E + "binary.c", "base == -1 ? (exponent & 1 ? UINT64_MAX : 1) : 0;", "base == -1 ? 1 : 0;",
        "negative exponents of 1 and -1 are exact", CLAUSES + "test_integer_powers",
    ),
    Fault(
        "binary: the square by pow", _E + "binary.c", "if (exponent == 2) return f64 ? square_f64 : square_f32;",
        "if (exponent == 2) return f64 ? cube_f64 : cube_f32;", "x ** 2", CLAUSES + "test_integer_powers",
    ),
    Fault(
        "binary: sides swap for sub", _E + "binary.c", "if (p->op == XT_ADD || p->op == XT_MUL) {", "if (p->op <= XT_MUL) {",
        "out = a op b", FORWARD + "'sub'",
    ),
    Fault(
        "unary: |x| has slope 1 at 0", _E + "unary.c", "dx = x > 0 ? dy : x < 0 ? -dy : dy * (x * 0)", "dx = x < 0 ? -dy : dy",
        "f'(0) = 0 for ABS", CLAUSES + "test_kinks_have_slope_zero",
    ),
    Fault(
        "unary: relu has slope 1 at 0", _E + "unary.c", "X(RELU, A, S, dx = x <= 0 ? 0 : dy)", "X(RELU, A, S, dx = x < 0 ? 0 : dy)",
        "f'(0) = 0 for RELU", CLAUSES + "test_kinks_have_slope_zero",
    ),
    Fault(
        "unary: NaN through relu", _E + "unary.c", "X(RELU, A, S, x <= 0 ? 0 : x)", "X(RELU, A, S, x > 0 ? x : 0)", "NaN stays NaN",
        "tests/core/test_arithmetic.py " + CLAUSES + "test_kinks_have_slope_zero",
    ),
    Fault(
        "unary: the slope of a sigmoid far out", _E + "unary.c",
        "X(SIGMOID, A, S, A e = exp_##S(-abs_##S(x)); A q = 1 / (1 + e); dx = dy * (e * q * q))",
        "X(SIGMOID, A, S, A q = 1 / (1 + exp_##S(-x)); dx = dy * (q * (1 - q)))", "relative precision far out",
        CLAUSES + "test_slopes_far_out",
    ),
    Fault(
        "unary: the cubic of gelu", _E + "unary.c", "(1 + 3 * (A)CUBIC * x2)", "(1 + (A)CUBIC * x2)", "f' of GELU_TANH",
        GRADIENT + "'gelu and tanh'",
    ),
    Fault(
        "unary: large sines", _E + "unary.c", "large |= !(fabsf(x[i]) <= XT_TRIG_LIMIT);", "large |= !(fabsf(x[i]) <= XT_TRIG_LIMIT * 1e4f);",
        "sines of large numbers come from libm", CLAUSES + "test_sines_of_large_numbers",
    ),
    Fault(
        "where: one byte of a choice", _E + "where.c", "to[i] = condition[i] ? yes : no;", "to[i] = condition[i] == 1 ? no : yes;",
        "condition ? a : b", FORWARD + "where",
    ),
    # ---- reductions
    Fault(
        "reduce: the last of equals", _R + "reduce_loops.h", "bool take = (v > m) | (IS_NAN(v) & !IS_NAN(m));",
        "bool take = (v >= m) | (IS_NAN(v) & !IS_NAN(m));", "ARGMAX: the first one on ties", CLAUSES + "test_the_first_of_equals",
    ),
    Fault(
        "reduce: the last NaN", _R + "reduce.c", "else if (result.value.f != result.value.f) better = false; /* the first NaN wins */",
        "else if (false) better = false;", "the first NaN wins", CLAUSES + "test_the_first_of_equals",
    ),
    Fault(
        "reduce: floats add up in float32", _R + "reduce_loops.h", "for (int b = 0; b < 4; b++) total += (TOTAL)XT_TREE(s[b]);",
        "for (int b = 0; b < 4; b++) total = (TOTAL)(W)(total + (TOTAL)XT_TREE(s[b]));", "block totals are added in float64",
        CLAUSES + "test_totals_of_blocks_are_float64",
    ),
    Fault(
        "reduce: int32 sums wrap at 32 bits", "csrc/ops/reduce/reduce.c", "dtype = XT_INT64;\n    XT_TRY",
        "dtype = code == XT_REDUCE_ARGMAX || x->dtype != XT_INT32 ? XT_INT64 : XT_INT32;\n    XT_TRY", "SUM keeps integers in int64",
        FORWARD + "'sum and int'",
    ),
    Fault(
        "reduce: the last segment", _R + "reduce.c", "return end < r->reduced.numel ? end : r->reduced.numel;", "return end;",
        "every element once, and none behind the last", CLAUSES + "test_sums_of_many_elements",
    ),
    Fault(
        "reduce: segments combined backwards", _R + "reduce.c", "for (int64_t s = 1; s < r->segments; s++) {\n            Partial next = partial[s];",
        "for (int64_t s = r->segments - 1; s > 0; s--) {\n            Partial next = partial[s];", "partials are combined from first to last",
        CLAUSES + "test_the_first_of_equals",
    ),
    Fault(
        "reduce: the mean of one segment", _R + "reduce.c", "result.value.f /= (double)r->reduced.numel;",
        "result.value.f /= (double)(r->reduced.numel < SEGMENT ? r->reduced.numel : SEGMENT);", "MEAN divides by all elements",
        CLAUSES + "test_sums_of_many_elements",
    ),
    Fault(
        "stats: infinities count as NaN", _R + "stats.c", "p->inf += n - nan - finite;", "p->inf += n - finite;",
        "the number of NaN; then of +-Inf", "tests/ops/test_ops.py::test_stats",
    ),
    Fault(
        "compare: NaN is right", _R + "compare.c", "e.wrong = e.finite ? !(d <= limit && d <= DBL_MAX) : !(a == b);",
        "e.wrong = e.finite ? d > limit : a != b && a == a;", "NaN is never right", "tests/ops/test_ops.py::test_compare",
    ),
    Fault(
        "compare: integers as floats", _R + "compare.c",
        "uint64_t gap = a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;",
        "uint64_t gap = (uint64_t)fabs((double)a - (double)b);", "distances of integers are exact", "tests/ops/test_ops.py::test_compare",
    ),
    Fault(
        "compare: the last of the worst", _R + "compare.c", "if (r->worst_ratio > total->worst_ratio) {",
        "if (r->worst_ratio >= total->worst_ratio) {", "the first element with the largest ratio", CLAUSES + "test_the_first_of_the_worst",
    ),
    # ---- products
    Fault(
        "gemm: beta of nothing reads", _G + "tiled.c", "c[j] = STORE(beta == 0 ? alpha * c_tile[i][j] : alpha * c_tile[i][j] + beta * LOAD(c[j]));",
        "c[j] = STORE(alpha * c_tile[i][j] + beta * LOAD(c[j]));", "beta == 0 never reads C",
        CLAUSES + "test_a_product_does_not_read_what_it_overwrites",
    ),
    Fault(
        "gemm naive: beta of nothing reads", _G + "naive.c", "ACC sum = beta == 0 ? 0 : beta * NAME(load_c)(p, c + n);", "ACC sum = beta * NAME(load_c)(p, c + n);",
        "beta == 0 never reads C", CLAUSES + "test_a_product_does_not_read_what_it_overwrites",
    ),
    Fault(
        "gemm low: beta of nothing reads", _G + "common.c", "        if (beta == 0)\n            for (int64_t j = 0; j < cols; j++) dst[i * ld + j] = STORE(src[i * cols + j]);\n        else\n",
        "", "beta == 0 does not read dst", CLAUSES + "test_a_product_does_not_read_what_it_overwrites",
    ),
    Fault(
        "gemm: K of 0 leaves C", _G + "common.c", "if (beta == 0) memset(c, 0, (size_t)p->n * sizeof(T));", "if (beta == 0) continue;",
        "K == 0 scales C", CLAUSES + "test_a_product_over_nothing_scales_what_is_there",
    ),
    Fault(
        "gemm: parts lose beta", _G + "common.c", "c[j] = STORE(beta == 0 ? sum : sum + beta * LOAD(c[j]));", "c[j] = STORE(sum);",
        "C = alpha op(A) op(B) + beta C", CLAUSES + "test_a_cut_product_is_added_to_a_gradient",
    ),
    Fault(
        "gemm: a vector's stride", _G + "blas.c", "int step_x = (int)(row ? (p->trans_a ? p->lda : 1) : (p->trans_b ? 1 : p->ldb));",
        "int step_x = 1;", "a column of B has stride ldb", CLAUSES + "test_products_with_strided_vectors",
    ),
    Fault(
        "gemm: only the last block of K", _G + "blas.c", "k ? 1.0f : 0.0f, c, ldc);", "0.0f, c, ldc);",
        "blocks of K are added up", _GEMM + "test_low_precision_accumulates_in_float32",
    ),
    Fault(
        "gemm: batches share the second stride", _G + "gemm.h", "i * p->stride_b[0] + j * p->stride_b[1],", "i * p->stride_a[0] + j * p->stride_b[1],",
        "each operand has batch strides of its own", _GEMM + "test_batches_broadcast",
    ),
    Fault(
        "bf16: the last element of an odd K is dropped", _G + "bf16.c", "t.odd = !p->trans_a && depth % 2;", "t.odd = false;",
        "K may be odd", _BF16 + "test_bits_are_those_of_the_instruction",
    ),
    Fault(
        "bf16: a panel of any length", _G + "bf16_work.c", "    if (p->k > XT_BF16_MOST_K) return", "    if (p->k < 0) return",
        "32 MiB for a packed panel, where a single column has 512 KiB", _BF16 + "test_memory_stays_that_of_the_operands",
    ),
    Fault(
        "bf16: a block of k forgets the sums before it", _G + "bf16.c", "t.first = k == 0,", "t.first = true,",
        "blocks of K are added up", _BF16 + "test_bits_are_those_of_the_instruction",
    ),
    Fault(
        "bf16: packed rows lose the second of a pair", _G + "bf16_pairs.h", "row + 1 == k, mask", "row + 2 >= k, mask",
        "pairs are whole but the last of an odd K", _BF16 + "test_bits_are_those_of_the_instruction",
    ),
    Fault(
        "bf16: the last columns are those before them", _G + "bf16_pairs.h", "v + j < columns ?", "v + j + 1 < columns ?",
        "every column of op(B) is packed", _BF16 + "test_bits_are_those_of_the_instruction",
    ),
    Fault(
        "bf16: what is there is not added", _G + "bf16_pairs.h", "    if (t->beta != 0.0f) {", "    if (t->beta > 1.0f) {",
        "beta C is added before rounding", _BF16 + "test_bits_are_those_of_the_instruction",
    ),
    Fault(
        "bf16: matrices of a batch are the first one", _G + "bf16_work.c", "xt_gemm_offsets(p, i);", "xt_gemm_offsets(p, begin);",
        "each operand has batch strides of its own", _BF16 + "test_what_every_backend_promises",
    ),
    Fault(
        "gemm: large sizes", _G + "blas.c", "bool fits = p->n <= INT32_MAX && p->k <= INT32_MAX", "bool fits = p->n <= INT32_MAX",
        "supports() says no where the library counts in 32 bits", "tests/ops/test_selection.py::test_reasons",
    ),
    # ---- attention in AVX512-BF16 instructions and AMX tiles: emulated, on any CPU of x86-64
    Fault(
        "attention bf16: a score beside its maximum", _A + "bf16.c", "_mm512_sub_ps(product_of(_mm512_loadu_ps(vector_at(f->s, i, v)), by), shift)",
        "_mm512_fmsub_ps(_mm512_loadu_ps(vector_at(f->s, i, v)), by, shift)", "a huge score is its own maximum", _ATT + "test_attention_of_huge_scores",
    ),
    Fault(
        "attention bf16: a sum that does not shrink", _A + "bf16.c", "f->sum[i] * _mm512_cvtss_f32(shrink)", "f->sum[i]",
        "a larger maximum shrinks what is summed", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention bf16: keys from a pair's second on", _A + "bf16_block.h", "const int64_t begin = keys.begin / 2 * 2;",
        "const int64_t begin = (keys.begin + 1) / 2 * 2;", "a tile begins with the first key that a row sees",
        _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention bf16: rows that see one key more", _A + "bf16_rows.h", "int64_t begin = sight->causal ? key - off : 0,",
        "int64_t begin = sight->causal ? key - off + 2 : 0,", "dK and dV have the first row that sees a key",
        _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention bf16 and amx: a softcap without its slope", _A + "bf16_rows.h", "if (capped) ds = _mm512_fnmadd_ps(_mm512_mul_ps(ds, t), t, ds);",
        "", "dS has the factor 1 - tanh^2", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention bf16: one head of a group", _A + "bf16.c", "for (int64_t h = g * group; h < (g + 1) * group; h++) {",
        "for (int64_t h = g * group; h < g * group + 1; h++) {", "dk and dv sum over the heads of a group",
        _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention bf16: shares as many as threads", _A + "bf16_shares.c", "least((PIECES - 1) / p->kv_heads + 1,",
        "least(xt_num_threads(),", "the number of threads changes no bit",
        _ATT + "test_attention_has_the_same_bits_alone_and_with_any_threads",
    ),
    Fault(
        "attention bf16: shares of the batch", _A + "bf16_shares.c", "least((PIECES - 1) / p->kv_heads + 1,",
        "least((PIECES - 1) / (p->kv_heads * p->batch) + 1,", "the batch changes no bit",
        _ATT + "test_attention_has_the_same_bits_alone_and_with_any_threads",
    ),
    Fault(
        "attention bf16: -Inf minus itself", _A + "bf16.c", "max == -INFINITY ? 0 : max", "max",
        "scores of -Inf count for nothing beside others", _ATT + "test_attention_of_infinite_scores",
    ),
    Fault(
        "attention amx: a score beside its maximum", _A + "amx.c", "exp2_of(_mm512_sub_ps(product_of(_mm512_loadu_ps(at), by), shift))",
        "exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(at), by, shift))", "a huge score is its own maximum", _ATT + "test_attention_of_huge_scores",
    ),
    Fault(
        "attention amx: out does not shrink", _A + "amx.c", "if (first || !grew) continue;", "if (first || grew) continue;",
        "a larger maximum shrinks what is summed", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: queries in the order of the unpacks", _A + "amx_block.h", "row = i / 4 * 8 + i % 4 + 4 * half;", "row = i + 16 * half;",
        "rows of dQ are those of the queries", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: a window's start is not masked", _A + "amx_block.h", "seen_by(sight, row + rows - 1, 1, key, GROUP).begin == 0",
        "rows > 0", "a block is masked unless each query sees all of it", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: a causal block is not masked", _A + "amx_block.h", "return seen_by(sight, row, 1, key, GROUP).end == GROUP &&",
        "return key >= 0 &&", "a block is masked unless each query sees all of it", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: zeros behind D", _A + "amx_block.h", "        memset(out + used, 0, (size_t)(size - used) * sizeof *out);\n    }\n", "    }\n",
        "scratch is not cleared", _ATT + "test_what_ran_before_changes_no_bit",
    ),
    Fault(
        "attention amx: one array for P of two blocks", _A + "amx.c", "const char *p = r->p + turn * 2 * LEFT_BYTES,", "const char *p = r->p,",
        "products of a block run beside the next one", _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: sums of shares", _A + "amx.c", "    add_up(dv, shares, 2 * sums, (until - from) * each);\n", "", "dV sums over the shares",
        _ATT + "test_attention_within_the_roundings_of_p_and_ds",
    ),
    Fault(
        "attention amx: tiles stay configured", _A + "amx.c", "        release();\n        if (part", "        if (part", "a piece releases the tiles of its thread",
        _ATT + "test_emulated_attention_releases_the_tiles",
    ),
    Fault(
        "attention amx: any number of queries", _A + "amx.c", "if (!reason && sq < FEWEST_ROWS", "if (!reason && sq < 0",
        "it takes 16 queries or more, or a document", _ATT + "test_fewer_queries_than_a_tile_has_rows_run_the_next_one_unless_they_are_a_whole_document",
    ),
    Fault(
        "attention amx: a short document alone runs bf16", _A + "amx.c", "sq < FEWEST_ROWS && sq != skv", "sq < FEWEST_ROWS",
        "a document has the bits that it has alone", _ATT + "test_documents_of_1_to_40_tokens_have_the_bits_that_they_have_alone",
    ),
    Fault(
        "attention bf16: what nobody sees is a product", _A + "bf16.c", "        if (sees) store_row(", "        if (true) store_row(",
        "a row that sees nothing gives 0", _ATT + "test_a_row_that_sees_nothing_is_zero_beside_infinite_values",
    ),
    Fault(
        "amx: blocks of k from zero", _G + "amx.c", "if (!first) {", "if (0) {", "blocks of K are added up", _AMX + "test_emulated_bits_are_those_of_the_instruction",
    ),
    Fault(
        "amx: op(A) in place with a tail of k", _G + "amx.c", "return p->trans_a || p->k % K_STEP != 0;", "return p->trans_a;",
        "nothing behind K is read", _AMX + "test_emulated_bits_are_those_of_the_instruction",
    ),
    Fault(
        "amx: the last rows in place", _G + "amx.c", "if (!packs_a(p) && rows - i >= HEIGHT) {", "if (!packs_a(p)) {",
        "no row behind M is read", _AMX + "test_emulated_kernels_touch_nothing_behind_an_operand",
    ),
    Fault(
        "amx: tiles that nobody configured", _G + "amx.c", "    configure();\n", "", "a piece configures the tiles of its thread",
        _AMX + "test_emulated_threads_and_batches_change_no_bit",
    ),
    Fault(
        "amx: tiles stay configured", _G + "amx.c", "    release();\n", "", "a piece releases the tiles of its thread",
        _AMX + "test_emulated_tiles_are_released",
    ),
    Fault(
        "bf16 and amx: what fills K is not written", _G + "bf16_work.c", "filled = k + depth == p->k ? (p->k + 1) / 2 : work->pairs", "filled = work->pairs",
        "zeros fill the end of K", _AMX + "test_emulated_infinities_stay_in_their_row",
    ),
    Fault(
        "amx: K is cut inside a tile", _G + "amx.c", "#define K_BLOCK 512 ", "#define K_BLOCK 528 ", "K is cut at multiples of 32 alone",
        _AMX + "test_emulated_bits_are_those_of_the_instruction",
    ),
    Fault(
        "amx: XTRAIN_AMX says nothing", _G + "amx.c", "if (wanted && strcmp(wanted, \"0\") == 0) return", "if (0 && wanted) return",
        "XTRAIN_AMX=0 turns it off, also its name", _AMX + "test_the_environment_turns_it_off",
    ),
]  # fmt: skip
