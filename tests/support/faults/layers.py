"""Kernels of layers, attention and the optimizer."""

from __future__ import annotations

from faults.table import CHANGED, CLAUSES, FORWARD, GRADIENT, STRIDES, Fault

_L = "csrc/cpu/layers/"
_CONV = "csrc/cpu/conv/"
FAST_CONV = "tests/conv/test_conv1d.py::test_few_taps_have_the_bits_of_the_plain_form"
_CHUNKS = "tests/ops/test_loss_in_chunks.py::"
_MASKED = "tests/ops/test_masked_attention.py::"
_LN = "tests/ops/test_layer_norm.py::test_layer_norm_"
_ADAMW = "tests/nn/test_optim.py::test_adamw_over_fifty_steps"

FAULTS = [
    Fault(
        "clip: no 1e-6", "csrc/cpu/optimizer/clip_grad_norm.c", "((double)p->norm[0] + 1e-6)", "((double)p->norm[0])",
        "min(1, max_norm / (norm + 1e-6))", CLAUSES + "test_a_coefficient_of_one_writes_nothing",
    ),
    Fault(
        "cross_entropy: lse - x", _L + "cross_entropy.c", "(max - NAME(capped)(LOAD(x[target]), cap)) + log_sum",
        "(max + log_sum) - NAME(capped)(LOAD(x[target]), cap)",
        "no digits are lost for large logits", CLAUSES + "test_the_loss_of_large_logits_keeps_its_digits",
    ),
    Fault(
        "cross_entropy: block sums in one", _L + "cross_entropy.c", "enum { BLOCK = 1024 };", "enum { BLOCK = 1 };",
        "a large vocabulary is summed in blocks", CLAUSES + "test_long_rows_are_summed_in_blocks",
    ),
    Fault(
        "cross_entropy: the gap of a row is read", _L + "cross_entropy.c",
        "for (int64_t v = 0; v < p->vocab; v++) {\n        ACC value", "for (int64_t v = 0; v < p->ld; v++) {\n        ACC value",
        "the gap between two rows is not read", CLAUSES + "test_the_gap_between_rows_of_logits_is_not_read",
    ),
    Fault(
        "cross_entropy: the maximum is at least 0", _L + "cross_entropy.c", "ACC max = -INFINITY, sum = 0;", "ACC max = 0, sum = 0;",
        "lse = log sum exp, wherever the row lies", CLAUSES + "test_rows_far_from_zero",
    ),
    Fault(
        "cross_entropy: ignored rows multiply NaN", _L + "cross_entropy.c", "memset(dx, 0, (size_t)vocab * sizeof(T));",
        "for (int64_t v = 0; v < vocab; v++) dx[v] = STORE(0 * LOAD(x[v]));",
        "ignored rows get 0, even where the logits are not finite", CLAUSES + "test_ignored_rows_have_no_gradient_whatever_they_hold",
    ),
    Fault(
        "cross_entropy: target vocab is allowed", _L + "cross_entropy.c", "(uint64_t)*target < (uint64_t)t->vocab", "(uint64_t)*target <= (uint64_t)t->vocab",
        "a target outside [0, vocab) is an IndexError", CLAUSES + "test_the_first_label_behind_the_vocabulary_is_refused",
    ),
    Fault(
        "cross_entropy: one dloss for all rows", _L + "cross_entropy.c", "[r * p->dloss_stride] * (ACC)p->scale", "[0] * (ACC)p->scale",
        "each row has its own dloss", GRADIENT + "'cross_entropy and none'",
    ),
    Fault(
        "cross_entropy: positions begin with each chunk", _L + "cross_entropy.c", "target, t->first + r);", "target, r);",
        "row 0 is reported as position `first`", "tests/ops/test_ops.py::test_error -k linear_cross_entropy",
    ),
    Fault(
        "cross_entropy: a softcap without its slope", _L + "cross_entropy.c", " * factor * (1 - t * t));", " * factor);",
        "dlogits has the factor 1 - tanh^2", GRADIENT + "linear_cross_entropy:softcap",
    ),
    Fault(
        "cross_entropy: a softcap that is not scaled back", _L + "cross_entropy.c", "return cap > 0 ? cap * NAME(tanh_of)(x / cap) : x;",
        "return cap > 0 ? NAME(tanh_of)(x / cap) : x;", "c tanh(x / c)", FORWARD + "linear_cross_entropy:softcap",
    ),
    Fault(
        "cross_entropy: the target without a softcap", _L + "cross_entropy.c", "max - NAME(capped)(LOAD(x[target]), cap)", "max - LOAD(x[target])",
        "c tanh(x / c) stands for each logit in all of this", FORWARD + "linear_cross_entropy:softcap",
    ),
    Fault(
        "cached_attention: no softcap", "csrc/cpu/attention/cached_attention.c", "        if (cap > 0) s[j] =", "        if (cap > 1e9) s[j] =",
        "a softcap as in XtAttentionFwd", FORWARD + "cached_attention",
    ),
    Fault(
        "linear_cross_entropy: a factor of nothing is NaN", _L + "linear_cross_entropy.c", "out[i] = STORE(x[i] == 0 ? 0 : x[i] * factor);",
        "out[i] = STORE(x[i] * factor);", "0 where x is 0, whatever the factor is", _CHUNKS + "test_ignored_rows",
    ),
    Fault(
        "linear_cross_entropy: the sum is overwritten", _L + "linear_cross_entropy.c", "    if (p->accumulate) {", "    if (p->accumulate && p->count > 100) {",
        "`accumulate` adds to out", _CHUNKS + "test_a_second_loss_is_added",
    ),
    Fault(
        "linear_cross_entropy: the mean is a sum", _L + "linear_cross_entropy.c", "p->total ? *(const ACC *)p->total : 1", "p->total && *(const ACC *)p->total < 2 ? *(const ACC *)p->total : 1",
        "dloss over total", GRADIENT + "'linear_cross_entropy and chunks'",
    ),
    Fault(
        "embedding: rows in the order of the list reversed", _L + "embedding.c", "for (int64_t k = first; k < last; k++) {",
        "for (int64_t k = last; k-- > first;) {", "the sum is taken in row order", CLAUSES + "test_rows_of_one_id_are_added_in_order",
    ),
    Fault(
        "embedding: sums in the dtype", _L + "embedding.c", "sum[j] += LOAD(dy[j]);", "sum[j] = LOAD(STORE(sum[j] + LOAD(dy[j])));",
        "many occurrences of one id lose nothing to a short dtype", CLAUSES + "test_many_rows_of_one_id_lose_nothing",
    ),
    Fault(
        "embedding: the gradient is overwritten", _L + "embedding.c", "sum[j] = p->accumulate ? LOAD(out[j]) : 0;", "sum[j] = 0;",
        "accumulate adds to dweight", CLAUSES + "test_a_second_batch_is_added_to_the_gradient",
    ),
    Fault(
        "embedding: rows without an id are cleared", _L + "embedding.c", "} else if (!p->accumulate) {", "} else {",
        "accumulate leaves rows that no id names", CLAUSES + "test_a_second_batch_is_added_to_the_gradient",
    ),
    Fault(
        "embedding: the last columns", _L + "embedding.c", "int64_t tiles = (p->cols + TILE - 1) / TILE;",
        "int64_t tiles = p->cols > TILE ? p->cols / TILE : 1;", "every column is added up", CLAUSES + "test_more_columns_than_a_tile",
    ),
    Fault(
        "embedding: id vocab is allowed", _L + "embedding.c", "(uint64_t)*id < (uint64_t)vocab", "(uint64_t)*id <= (uint64_t)vocab",
        "an id outside [0, vocab) is an IndexError", CLAUSES + "test_the_first_label_behind_the_vocabulary_is_refused",
    ),
    Fault(
        "embedding: an id is not checked again", _L + "embedding.c", "XT_CHECK(read_id(ids, r, vocab, &id));\n        memcpy", "id = ids[r];\n        memcpy",
        "an id is checked where it is used", CHANGED + "[embedding]",
    ),
    Fault(
        "embedding: an id of one column is not checked again", _L + "embedding.c", "XT_CHECK(read_id(ids, r, vocab, &id)); \\", "id = ids[r]; \\",
        "an id is checked where it is used", CHANGED + "[embedding_column]",
    ),
    Fault(
        "embedding: ids are grouped by another reading", _L + "embedding.c", "order[--start[id[r]]] = r;", "order[--start[ids[r]]] = r;",
        "an id is read once", CHANGED + "[embedding_bwd]",
    ),
    Fault(
        "embedding: few ids are not checked", _L + "embedding.c", "XT_TRY(read_id(p->ids, r, p->vocab, &places[r].id));", "places[r].id = p->ids[r];",
        "an id is checked where it is used", CHANGED + "[embedding_bwd_few]",
    ),
    Fault(
        "cross_entropy: a target is not checked again", _L + "cross_entropy.c", "XT_CHECK(read_target(targets, r, &target));\n        if", "target = p->targets[r];\n        if",
        "a target is checked where it is used", CHANGED + "[cross_entropy]",
    ),
    Fault(
        "cross_entropy: the gradient's target is not checked again", _L + "cross_entropy.c", "XT_CHECK(read_target(targets, r, &target));\n        const",
        "target = p->targets[r];\n        const", "a target is checked where it is used", CHANGED + "[cross_entropy_bwd]",
    ),
    Fault(
        "rms_norm: weight before rounding", _L + "row_loops.h", "STORE(LOAD(weight[j]) * LOAD(STORE(LOAD(x[j]) * rstd)))",
        "STORE(LOAD(weight[j]) * (LOAD(x[j]) * rstd))", "rounded to the dtype before the weight, as Hugging Face models do",
        CLAUSES + "test_a_norm_is_rounded_before_its_weight",
    ),
    Fault(
        "rms_norm: eps outside the root", _L + "row_loops.h", "ACC rstd = 1 / SQRT(squares / (ACC)cols + eps);",
        "ACC rstd = 1 / (SQRT(squares / (ACC)cols) + eps);", "rstd = 1 / sqrt(mean(x^2) + eps)", FORWARD + "rms_norm",
    ),
    Fault(
        "rms_norm: an empty batch erases", _L + "row_loops.h", "    if (pieces == 0 && accumulate) return;\n", "",
        "an empty batch adds nothing to the gradient", CLAUSES + "test_an_empty_batch_leaves_the_gradient_of_the_others",
    ),
    Fault(
        "rms_norm: every piece starts from the sum", _L + "rms_norm.c", "p->accumulate && begin == 0 ?", "p->accumulate ?",
        "the sum over the first piece of rows starts from what is there", CLAUSES + "test_a_second_batch_is_added_to_the_gradient",
    ),
    Fault(
        "rms_norm: pieces by threads", _L + "rms_norm.c", "widest = (p->rows + 63) / 64;",
        "widest = (p->rows + xt_num_threads() - 1) / xt_num_threads();", "same bits whatever the number of threads",
        "tests/ops/test_ops.py::test_same_bits -k rms_norm",
    ),
    Fault(
        "rms_norm: the weight missing in dx", _L + "row_loops.h", "dot += product * (!weight ? 1 : plus_one ? 1 + LOAD(weight[j]) : LOAD(weight[j]));", "dot += product;",
        "dx = rstd (g - xh mean(g xh)) with g = dy weight", GRADIENT + "rms_norm",
    ),
    Fault(
        "layer_norm: rounded before its weight", _L + "layer_norm.c", "out[j] = STORE((LOAD(x[j]) - mean) * rstd * (weight",
        "out[j] = STORE(LOAD(STORE((LOAD(x[j]) - mean) * rstd)) * (weight", "rounded once", _LN + "is_rounded_once",
    ),
    Fault(
        "add_layer_norm: the sum not rounded", _L + "layer_norm.c", "            x = total;\n", "", "the sum stands for x",
        "tests/ops/test_fused.py::test_add_layer_norm_has_the_bits_of_two_ops",
    ),
    Fault(
        "add_layer_norm: dsum forgotten", "csrc/ops/layers/layer_norm.c", ".dsum = dsum ? dsum->data : NULL,", ".dsum = NULL,",
        "the gradient of the sum is added to dx", "tests/ops/test_fused.py::test_add_layer_norm_has_the_bits_of_two_ops",
    ),
    Fault(
        "gpt2: last addition twice", "xtrain/models/gpt2.py", "return self.ln_f(x) if y is None else add_norm(self.ln_f, x, y)[1]",
        "return self.ln_f(x if y is None else x + y + y)", "a block is x + attention, then x + feed-forward",
        "tests/nn/test_gpt2.py::test_additions_inside_norms_have_the_bits_of_additions",
    ),
    Fault(
        "attention: gradients in memory of their own", "csrc/ops/attention/scaled_dot_product_attention.c",
        "XT_TRY(xt_empty_like_columns(3, tokens, made));", "for (int i = 0; i < 3; i++) XT_TRY(xt_empty_like(tokens[i], &made[i]));",
        "dq, dk and dv are columns of one block where q, k and v are",
        "tests/nn/test_columns.py::test_attention_of_columns_gets_gradients_that_are_columns",
    ),
    Fault(
        "layer_norm: squares of x itself", _L + "layer_norm.c", "squares += d * d;",
        "squares += LOAD(x[j]) * LOAD(x[j]) - mean * mean;", "a row far from zero loses no digits of its variance",
        _LN + "of_rows_far_from_zero",
    ),
    Fault(
        "layer_norm: eps outside the root", _L + "layer_norm.c", "1 / SQRT(variance + (ACC)p->eps);",
        "1 / (SQRT(variance) + (ACC)p->eps);", "rstd = 1 / sqrt(variance + eps)", FORWARD + "layer_norm",
    ),
    Fault(
        "layer_norm: variance over C - 1", _L + "layer_norm.c", "variance = squares / (ACC)cols -",
        "variance = squares / (ACC)(cols > 1 ? cols - 1 : 1) -", "the variance divided by C", FORWARD + "layer_norm",
    ),
    Fault(
        "layer_norm: no bias without a weight", _L + "layer_norm.c", "(out, x, NULL, bias, mean", "(out, x, NULL, NULL, mean",
        "weight and bias may be missing, each alone", FORWARD + "layer_norm",
    ),
    Fault(
        "layer_norm: the mean of g missing in dx", _L + "layer_norm.c", "- level - xh * along", "- xh * along",
        "dx = rstd (g - mean(g) - xh mean(g xh))", GRADIENT + "layer_norm",
    ),
    Fault(
        "layer_norm: the mean of g xh missing in dx", _L + "layer_norm.c", "- level - xh * along", "- level",
        "dx = rstd (g - mean(g) - xh mean(g xh))", GRADIENT + "layer_norm",
    ),
    Fault(
        "layer_norm: the weight missing in dx", _L + "layer_norm.c", "g = d * (weight ? LOAD(weight[j]) : 1);", "g = d;",
        "dx = rstd (g - mean(g) - xh mean(g xh)) with g = dy weight", GRADIENT + "layer_norm",
    ),
    Fault(
        "layer_norm: every piece starts from dweight", _L + "layer_norm.c", "p->accumulate_weight && begin == 0 ?",
        "p->accumulate_weight ?", "adds to what is there, once", CLAUSES + "test_a_second_batch_is_added_to_the_gradient",
    ),
    Fault(
        "layer_norm: every piece starts from dbias", _L + "layer_norm.c", "p->accumulate_bias && begin == 0 ?",
        "p->accumulate_bias ?", "adds to what is there, once", CLAUSES + "test_a_second_batch_is_added_to_the_gradient",
    ),
    Fault(
        "layer_norm: sums in front of the rows", _L + "layer_norm.c", "partial[j] = weight_sum ? LOAD(weight_sum[j]) : 0;",
        "partial[j] = 0;", "the sum over the first piece of rows starts from what is there", _LN + "with_one_tensor_for_weight_and_bias",
    ),
    Fault(
        "layer_norm: pieces by threads", _L + "layer_norm.c", "widest = (p->rows + 63) / 64;",
        "widest = (p->rows + xt_num_threads() - 1) / xt_num_threads();", "same bits whatever the number of threads",
        "tests/ops/test_ops.py::test_same_bits -k layer_norm",
    ),
    Fault(
        "rope: a table in float32", _L + "row_loops.h", "c[i] = LOAD(STORE(IS_F64 ? (ACC)cos((double)angle) : (ACC)cosf((float)angle)));",
        "c[i] = IS_F64 ? (ACC)cos((double)angle) : (ACC)cosf((float)angle);",
        "cos and sin are rounded to the dtype", CLAUSES + "test_cosines_and_sines_are_rounded_and_products_are_not",
    ),
    Fault(
        "rope: sines in float32", _L + "row_loops.h", "s[i] = LOAD(STORE(IS_F64 ? (ACC)sin((double)angle) : (ACC)sinf((float)angle))) * sign;",
        "s[i] = (IS_F64 ? (ACC)sin((double)angle) : (ACC)sinf((float)angle)) * sign;",
        "cos and sin are rounded to the dtype", CLAUSES + "test_cosines_and_sines_are_rounded_and_products_are_not",
    ),
    Fault(
        "rope: period longer than the rows", _L + "rope.c", "p->positions || p->period > p->rows ? p->rows : p->period;",
        "p->positions ? p->rows : p->period;", "a table has a row per position that is used, and no more",
        CLAUSES + "test_a_long_period_costs_no_memory",
    ),
    Fault(
        "rope: positions wrap", _L + "rope.c", "ACC pos = (ACC)(p->positions ? p->positions[t] : t);",
        "ACC pos = (ACC)(p->positions ? p->positions[t] % p->period : t);", "pos of row r = positions[r] when given",
        FORWARD + "'rope and positions'",
    ),
    Fault(
        "rope: the backward turns on", _L + "rope.c", "ACC sign = p->inverse ? -1 : 1;", "ACC sign = 1;",
        "inverse rotates by -angle", GRADIENT + "rope",
    ),
    Fault(
        "rope: strides of heads swapped", _L + "rope.c", "p->x + r * p->x_stride[0] + h * p->x_stride[1]",
        "p->x + r * p->heads * p->dim + h * p->x_stride[1]", "x has strides of its own", STRIDES + "rope",
    ),
    Fault(
        "softmax: one exp kept in the dtype", _L + "softmax.c", "out[j] = STORE(EXP(LOAD(x[j]) - max) * scale);",
        "out[j] = STORE(LOAD(STORE(EXP(LOAD(x[j]) - max))) * scale);", "a short dtype is rounded once",
        CLAUSES + "test_a_softmax_is_rounded_once",
    ),
    Fault(
        "softmax: the maximum is at least 0", _L + "softmax.c", "ACC max = -INFINITY, sum = 0;", "ACC max = 0, sum = 0;",
        "out = exp(x - max) / sum exp(x - max)", CLAUSES + "test_rows_far_from_zero",
    ),
    Fault(
        "softmax: NaN is passed over", _L + "softmax.c", "part += EXP(LOAD(x[j]) - max);",
        "part += LOAD(x[j]) == LOAD(x[j]) ? EXP(LOAD(x[j]) - max) : 0;", "a row that holds a NaN comes out as NaN",
        CLAUSES + "test_a_row_with_nan_is_nan",
    ),
    Fault(
        "softmax: block sums in one", _L + "softmax.c", "enum { BLOCK = 1024 };", "enum { BLOCK = 1 };",
        "a long row is summed in blocks", CLAUSES + "test_long_rows_are_summed_in_blocks",
    ),
    Fault(
        "swiglu: dgate by dup's formula", _L + "swiglu.c", "d * u * s * (1 + g * (1 - s))", "d * u * s * (1 + g * s)",
        "dgate = dy up s (1 + gate (1 - s))", GRADIENT + "swiglu",
    ),
    Fault(
        "swiglu: rows of the input are dense", _L + "swiglu.c",
        "const T *gate = (const T *)p->gate + r * p->ld_in, *up = (const T *)p->up + r * p->ld_in; /* [cols] */\n"
        "        T *out",
        "const T *gate = (const T *)p->gate + r * p->cols, *up = (const T *)p->up + r * p->ld_in; /* [cols] */\n"
        "        T *out",
        "gate and up have rows of stride ld_in", FORWARD + "'swiglu and halves'",
    ),
    # ---- optimizer
    Fault(
        "adamw: beta1 in the second correction", "csrc/cpu/optimizer/adamw.c", "sqrt(1 - xt_power(p->beta2, n))",
        "sqrt(1 - xt_power(p->beta1, n))", "v / (1 - beta2^n)", FORWARD + "adamw_",
    ),
    Fault(
        "adamw: eps before the correction", "csrc/cpu/optimizer/adamw.c", "(SQRT(vi) / root2 + eps)", "((SQRT(vi) + eps) / root2)",
        "sqrt(v / (1 - beta2^n)) + eps", FORWARD + "adamw_",
    ),
    Fault(
        "adamw: decay through the gradient", "csrc/cpu/optimizer/adamw.c",
        "ACC gi = (wide_g ? wide_g[i] : LOAD(g[i])) * scale, w = (master ? master[i] : LOAD(p[i])) * decay;",
        "ACC w = master ? master[i] : LOAD(p[i]), gi = LOAD(g[i]) + (1 - decay) * w;", "decoupled weight decay", FORWARD + "adamw_",
    ),
    Fault(
        "adamw: the count of the last step", "csrc/cpu/optimizer/adamw.c", "const int64_t n = *item->step + 1;",
        "const int64_t n = *item->step > 0 ? *item->step : 1;", "n is the number of this step", _ADAMW,
    ),
    Fault(
        "adamw: the master is the rounded parameter", "csrc/cpu/optimizer/adamw.c", "if (master) master[i] = w;",
        "if (master) master[i] = LOAD(STORE(w));", "16-bit parameters keep an exact master",
        "tests/nn/test_optim.py::test_bfloat16_keeps_masters",
    ),
    Fault(
        "adamw: an infinite guard", "csrc/cpu/optimizer/adamw.c", "!isfinite(*p->guard)", "isnan(*p->guard)",
        "a guard that is NaN or Inf stops the step", "tests/nn/test_adamw_steps.py",
    ),
    Fault(
        "adamw: a stopped step is counted", "csrc/cpu/optimizer/adamw.c",
        "if (tensors == 0 || (p->guard && !isfinite(*p->guard))) return XT_OK;",
        "if (p->guard && !isfinite(*p->guard))\n"
        "        for (; t < p->count; t++) ++*p->items[t].step;\n"
        "    if (tensors == 0 || (p->guard && !isfinite(*p->guard))) return XT_OK;",
        "no tensor is written, and no step", "tests/nn/test_adamw_steps.py",
    ),
    Fault(
        "adamw: the first group alone", "csrc/cpu/optimizer/adamw.c",
        "group; group = group->next) {", "group; group = NULL) {", "all groups of a call are updated",
        "tests/nn/test_adamw_steps.py::test_all_groups_of_a_device_are_one_call",
    ),
    Fault(
        "adamw: a check after the first change", "csrc/ops/optimizer/adamw.c",
        "    XT_TRY(xt_check_list(c->op, \"exp_avgs\", m, params, xt_dtype_accumulator));\n", "",
        "tensors are checked before anything changes", "tests/nn/test_adamw_steps.py::test_all_groups_of_a_device_are_one_call",
    ),
    Fault(
        "power: the low part is dropped", "csrc/core/power.h", "    rest = fma(a.low, b.high, rest);\n", "",
        "beta^n is right to 0.51 units in the last place", "tests/core/test_power.py",
    ),
    Fault(
        "pieces: the last piece is whole", "csrc/cpu/optimizer/pieces.h", "*n = numel - offset < XT_PIECE ? numel - offset : XT_PIECE;",
        "*n = numel < XT_PIECE ? numel : XT_PIECE;", "no element behind a tensor is touched",
        CLAUSES + "test_tensors_of_more_than_a_piece",
    ),
    Fault(
        "tree_sum: the second of a pair alone", "csrc/cpu/optimizer/tree_sum.c", "take_part(p, i, t, node[0], offset, n, i & 1);",
        "take_part(p, i, t, node[0], offset, n, false);", "out = T(parts)", "tests/distributed/test_tree_sum.py::test_model",
    ),
    Fault(
        "tree_sum: what is left from the oldest", "csrc/cpu/optimizer/tree_sum.c", "for (int older = level + 1; older < LEVELS; older++)",
        "for (int older = LEVELS - 1; older > level; older--)", "the largest power of two below n", "tests/distributed/test_tree_sum.py::test_model",
    ),
    Fault(
        "bank_sum: what no tensor has is not cleared", "csrc/cpu/optimizer/tree_sum.c", "        memset(node, 0, (size_t)n * size);",
        "        ;", "the rest of a bank is 0", FORWARD + "bank_sum_",
    ),
    Fault(
        "bank_sum: the next tensor is not looked for", "csrc/cpu/optimizer/tree_sum.c", "    for (; t < p->tensors && item[t].begin < offset + n; t++) {",
        "    if (t < p->tensors && item[t].begin < offset + n) {", "a chunk of several tensors", FORWARD + "bank_sum_",
    ),
    Fault(
        "block_norm: a guard that lets all pass", "csrc/cpu/optimizer/block_norm.c", "isfinite(norm) ? 0 : NAN", "0",
        "guard is NaN where the norm is not finite", "tests/distributed/test_same_bits.py::test_a_gradient_that_is_not_finite_changes_nothing",
    ),
    Fault(
        "adamw: no scale", "csrc/cpu/optimizer/adamw.c", "p->scale ? *p->scale : 1", "1", "g is multiplied by scale",
        "tests/distributed/test_same_bits.py::test_one_process_takes_the_steps_of_adamw",
    ),
    Fault(
        "clip: small gradients grow", "csrc/cpu/optimizer/clip_grad_norm.c", "if (run.coefficient >= 1) return XT_OK;",
        "if (run.coefficient == 1) return XT_OK;", "the coefficient is at most 1", FORWARD + "clip_grad_norm_",
    ),
    Fault(
        "clip: NaN stops the clipping", "csrc/cpu/optimizer/clip_grad_norm.c", "if (run.coefficient >= 1) return XT_OK;",
        "if (!(run.coefficient < 1)) return XT_OK;", "a norm that is NaN multiplies as it comes",
        CLAUSES + "test_a_norm_that_is_nan_spoils_the_gradients",
    ),
    Fault(
        "norm: squares in float32", "csrc/cpu/optimizer/clip_grad_norm.c", "(double)LOAD(x[i]) * (double)LOAD(x[i])",
        "LOAD(x[i]) * LOAD(x[i])", "float64 partial sums",
        "tests/nn/test_optim.py::test_norm_does_not_overflow_or_underflow",
    ),
    # ---- attention
    Fault(
        "attention: the mask starts at the left", "csrc/cpu/attention/attention.h", "int64_t place = row + (skv - sq);",
        "int64_t place = row < skv ? row : skv - 1;", "the last query sees everything",
        FORWARD + "'scaled_dot_product_attention and float32'",
    ),
    Fault(
        "attention: rows that see nothing", "csrc/cpu/attention/materialized.c", "ACC factor = sums[i] == 0 ? 0 : 1 / sums[i];",
        "ACC factor = 1 / sums[i];", "a row that sees nothing gives out = 0",
        "tests/ops/test_gemm_attention.py::test_rows_that_see_nothing_are_zero",
    ),
    Fault(
        "attention: kv heads in turn", "csrc/cpu/attention/materialized.c",
        "b = part->b, g = h / (p->heads / p->kv_heads), at", "b = part->b, g = h % p->kv_heads, at",
        "query head h reads kv head h / (H / K)", FORWARD + "'scaled_dot_product_attention and float32'",
    ),
    Fault(
        "attention: no shift by the maximum", "csrc/cpu/attention/materialized.c", "ACC e = EXP(row[j] - max);\n            row[j] = e;\n"
        "            sum += e;", "ACC e = EXP(row[j] - (max > 80 ? 80 : max));\n            row[j] = e;\n            sum += e;",
        "large scores do not overflow", "tests/ops/test_gemm_attention.py::test_large_scores_do_not_overflow",
    ),
    Fault(
        "attention: delta without the output", "csrc/cpu/attention/materialized.c", "drow[j] = e * (drow[j] - delta);",
        "drow[j] = e * drow[j];", "dS = P (dP - delta)", GRADIENT + "scaled_dot_product_attention",
    ),
    Fault(
        "attention: heads of a group overwrite", "csrc/cpu/attention/materialized.c",
        "i < group * part->blocks; i += part->shares)", "i < part->blocks; i += part->shares)", "dk and dv sum over the heads of a group",
        GRADIENT + "scaled_dot_product_attention",
    ),
    Fault(
        "attention: the last share is not added", "csrc/cpu/attention/materialized.c", "for (int64_t r = 1; r < shares; r++) sum_k",
        "for (int64_t r = 1; r < shares - 1; r++) sum_k", "dk and dv sum over the shares of a kv head",
        "tests/ops/test_selection.py::test_what_attention_supports_is_right",
    ),
    Fault(
        "attention: a softcap without its slope", "csrc/cpu/attention/materialized.c", "drow[j] = e * (drow[j] - delta) * (1 - t * t);",
        "drow[j] = e * (drow[j] - delta) * (t * t < 2);", "dS has the factor 1 - tanh^2",
        GRADIENT + "scaled_dot_product_attention:sinks",
    ),
    Fault(
        "attention: a softcap of float64 alone", "csrc/ops/common.c",
        "((float)arg->f > 0 && (float)arg->f < INFINITY)", "(arg->f > 0 && arg->f < INFINITY)",
        "float32 has it as a number above 0", _MASKED + "test_a_softcap_that_is_0_or_infinite_in_float32_is_refused",
    ),
    Fault(
        "attention: a softcap that is not scaled back", "csrc/cpu/attention/materialized.c", "row[j] = cap * TANH(row[j] / cap);",
        "row[j] = TANH(row[j] / cap);", "softcap * tanh(s / softcap)", FORWARD + "scaled_dot_product_attention:sinks",
    ),
    Fault(
        "attention: a sink that is not in lse", "csrc/cpu/attention/attention_sinks.c", "lse[row] = max + (ACC)log((double)sum);",
        "", "lse = log(exp(lse) + exp(sink))", GRADIENT + "scaled_dot_product_attention:sinks",
    ),
    Fault(
        "attention: sinks without a maximum", "csrc/cpu/attention/attention_sinks.c", "max = lse[row] > sink ? lse[row] : sink;",
        "max = sink;", "sinks far below the scores do not overflow",
        _MASKED + "test_sinks_far_from_the_scores",
    ),
    Fault(
        "attention: the sinks' gradient of one entry", "csrc/cpu/attention/attention_sinks.c", "for (int64_t b = 0; b < p->batch; b++) {",
        "for (int64_t b = 0; b < 1 && b < p->batch; b++) {", "dsinks sums over the batch",
        _MASKED + "test_sinks_and_softcap_are_those_of_the_composed_form",
    ),
    Fault(
        "attention: composed without a softcap", "xtrain/functional.py", "scores = (scores * (1 / softcap)).tanh() * softcap",
        "pass", "softcap, with a mask, too", _MASKED + "test_sinks_and_softcap_are_those_of_the_composed_form",
    ),
    Fault(
        "attention: shares as many as threads", "csrc/cpu/attention/materialized.c", "int64_t shares = (PIECES + groups - 1) / groups;",
        "int64_t shares = (xt_num_threads() + groups - 1) / groups;", "the number of threads changes no bit",
        "tests/ops/test_gemm_attention.py::test_threads_change_no_bit_of_a_backward_in_parts",
    ),
    Fault(
        "attention: documents cut as the batch is", "csrc/cpu/attention/materialized.c", "p->kv_heads * (p->documents ? 1 : p->batch)",
        "p->kv_heads * p->batch", "a document has the bits that it has alone",
        "tests/ops/test_documents.py::test_a_document_has_the_bits_that_it_has_alone",
    ),
    Fault(
        "attention: the first documents again", "csrc/cpu/attention/documents.c", "some.parts = parts + first, some",
        "some.parts = parts, some", "documents whose sums have no room together come one behind the other",
        "tests/ops/test_documents.py::test_documents_whose_sums_have_no_room_together",
    ),
    Fault(
        "attention: columns of the block before", "csrc/cpu/attention/materialized.c",
        "for (int64_t j = to; j < seen.count; j++) row[j] = 0;", "for (int64_t j = to; j + 1 < seen.count; j++) row[j] = 0;",
        "a token never sees the future", "tests/nn/test_model.py::test_a_token_never_sees_the_future "
        + FORWARD + "'scaled_dot_product_attention and float32'",
    ),
    Fault(
        "attention reference: rows that see nothing", "csrc/cpu/attention/reference.c", "STORE(seen.end > seen.begin ? sum_v[d] / sum : 0);",
        "STORE(sum_v[d] / sum);", "a row that sees nothing gives out = 0",
        "tests/ops/test_gemm_attention.py::test_rows_that_see_nothing_are_zero",
    ),
    Fault(
        "attention reference: bounds are read again", "csrc/cpu/attention/reference.c", "end < skv ? end : skv);", "end);",
        "no key outside the sequence", CHANGED + "[reference]",
    ),
    Fault(
        "attention: a window of one key more", "csrc/cpu/attention/attention.h", "place - window + 1 > start", "place - window > start",
        "a window counts the query itself", FORWARD + "'scaled_dot_product_attention and documents and float32'",
    ),
    Fault(
        "attention: columns before the window", "csrc/cpu/attention/materialized.c",
        "        for (int64_t j = 0; j < from; j++) row[j] = 0;\n", "", "a query sees no key before its window",
        FORWARD + "'scaled_dot_product_attention and documents and float32' tests/ops/test_documents.py",
    ),
    Fault(
        "attention: documents in blocks of the row", "csrc/cpu/attention/materialized.c",
        "part->rows = block_rows(part->sq, part->width);", "part->rows = block_rows(part->sq, part->width) - (part->first % 2);",
        "a document has the bits that it has alone", "tests/ops/test_documents.py::test_a_document_has_the_bits_that_it_has_alone",
    ),
    Fault(
        "attention: documents that overlap", "csrc/cpu/attention/documents.c", "*start == start[-step] && *end == end[-step]", "true",
        "documents lie one behind the other", "tests/ops/test_documents.py::test_documents_that_break_the_rule",
    ),
    # ---- hyper-connections
    Fault(
        "mhc_pre: the logits lack r", "csrc/cpu/mhc/mhc_pre.c", "du[i] = r * dq;", "du[i] = i < 2 * p->streams ? r * dq : dq;",
        "du has the factor r in all three blocks of rows", "tests/mhc/test_mhc.py::test_finite_differences_of_mhc_pre",
    ),
    Fault(
        "mhc_pre: r^2 too many", "csrc/cpu/mhc/mhc_pre.c", "*kappa = -dot * r * r * r / (ACC)k;",
        "*kappa = -dot * r * r * r * r * r / (ACC)k;", "kappa has r^3", "tests/mhc/test_mhc.py::test_finite_differences_of_mhc_pre",
    ),
    Fault(
        "sinkhorn: the shift of the rows", "csrc/cpu/mhc/sinkhorn.c",
        "if (form == XT_SINKHORN_P) NAME(sinkhorn_exp)(a, n, 1, n);", "if (form == XT_SINKHORN_P) NAME(sinkhorn_exp)(a, n, n, 1);",
        "form P is shifted by column maxima", "tests/mhc/test_sinkhorn.py " + FORWARD + "sinkhorn",
    ),
    Fault(
        "sinkhorn: eps of the shift", "csrc/cpu/mhc/sinkhorn.c",
        "dz[(i * n + j) * LANES + l] -= total[j * LANES + l] * eps / d[j * LANES + l];",
        "dz[(i * n + j) * LANES + l] -= 0;", "the first maximum of a column also gets -sum(E) eps / d",
        "tests/mhc/test_mhc.py::test_finite_differences_of_sinkhorn",
    ),
    Fault(
        "sinkhorn: unused lanes", "csrc/cpu/mhc/sinkhorn.c", "const T *z = from + (l < lanes ? l : lanes - 1) * n * n; /* [n, n] */",
        "const T *z = from + l * n * n; /* [n, n] */", "no memory behind the last matrix is read",
        CLAUSES + "test_no_matrix_behind_the_last_is_read",
    ),
    # ---- convolutions
    Fault(
        "causal_conv1d: the state is not read", _CONV + "causal_conv1d.c", "if (t >= steps || (t < 0 && !state)) {", "if (t >= steps || t < 0) {",
        "the inputs before x", FORWARD + "causal_conv1d_step",
    ),
    Fault(
        "causal_conv1d: taps of dx the wrong way", _CONV + "causal_conv1d.c", "dz[0] = g;", "dz[K > 1] = g;",
        "dx[t] = sum_k weight[k] dz[t + taps - 1 - k]", GRADIENT + "'causal_conv1d and no_bias'",
    ),
    Fault(
        "causal_conv1d: dw of rows behind the tile", _CONV + "causal_conv1d.c", "if (t < t1) {", "if (t < t1 + 1) {",
        "a row is in one tile's share of dweight", GRADIENT + "'causal_conv1d and silu'",
    ),
    Fault(
        "causal_conv1d: a piece too few", _CONV + "causal_conv1d.c", "for (int64_t i = 1; i < job->pieces; i++) {",
        "for (int64_t i = 1; i + 1 < job->pieces; i++) {", "dweight is the sum over all pieces", GRADIENT + "'causal_conv1d and silu'",
    ),
    Fault(
        "causal_conv1d: the oldest of dnext", _CONV + "causal_conv1d.c", "p->dnext && place >= 0", "p->dnext && place > 0",
        "dnext is added to what next is a copy of", "tests/conv/test_conv1d.py::test_the_state_alone_has_a_gradient",
    ),
    Fault("causal_conv1d: dz of rows before", _CONV + "causal_conv1d.c", "AT(slopes, k) = g[rows + k];", "AT(slopes, k) = g[rows - 1 + k];", "slopes: the last dz of these rows", FAST_CONV),
    Fault("causal_conv1d: rows of another tile count", _CONV + "causal_conv1d.c", "t < t1 ? sums : others", "t <= t1 ? sums : others", "sums of rows that are another tile's", FAST_CONV),
    Fault("causal_conv1d: a last row too many taps", _CONV + "causal_conv1d.c", "AT(slopes, K - 2) = 0;", "AT(slopes, K - 2) = AT(slopes, 0);", "dz is zero behind the end", FAST_CONV),
    Fault("causal_conv1d: the second run of channels", _CONV + "causal_conv1d.c", "* job->stride + c0;\n        for (int64_t k = 0; k <= K; k++)", "* job->stride;\n        for (int64_t k = 0; k <= K; k++)", "each run of channels has its share of dweight", FAST_CONV),
    Fault("causal_conv1d: the upper half of a word", _CONV + "causal_conv1d.c", "(h) ? (v) & 0xffff0000u : (v) << 16", "(h) ? (v) : (v) << 16", "a word of two bfloat16 is taken apart", FAST_CONV),
    Fault("causal_conv1d on a GPU: the second slab of channels", "cuda/conv/causal_conv1d.cu", "blockIdx.x % slabs) * blockDim.x", "blockIdx.x % slabs) * THREADS", "the slabs lie side by side", "tests/conv/test_conv1d.py -k long_runs"),
    Fault("causal_conv1d on a GPU: slots that do not move on", "cuda/conv/causal_conv1d.cu", "slot = slot == AHEAD_BWD ? 0 : slot + 1;", "slot = 0;", "group g is in slot g % (AHEAD_BWD + 1)", "tests/conv/test_conv1d.py -k long_runs"),
    Fault(
        "conv1d: the last place of a stride", _CONV + "conv1d.c", "last = high <= 0 ? 0 : (high + s->stride - 1) / s->stride;",
        "last = high <= 0 ? 0 : high / s->stride;", "every place whose element lies in the row", FORWARD + "'conv1d and direct'",
    ),
    Fault(
        "conv1d: one tap of the fold", _CONV + "conv1d.c", "sum[t * s->stride + at] += d[t];", "sum[t * s->stride + at] = d[t];",
        "dx is the sum over the taps", GRADIENT + "'conv1d and products'",
    ),
    Fault(
        "conv1d: dw of the last samples", "csrc/ops/conv/conv1d.c", ".beta = from + b > 0 ? 1.0 : 0.0", ".beta = b > 0 ? 1.0 : 0.0",
        "dW is the sum over all samples", "tests/conv/test_conv1d.py::test_samples_whose_columns_do_not_fit_together",
    ),
    Fault(
        "conv1d: padding 'same' has the odd one in front", "xtrain/tensors/convolution.py", "return reach // 2, reach - reach // 2",
        "return reach - reach // 2, reach // 2", "the odd one behind", "tests/conv/test_conv1d.py::test_the_words_of_padding",
    ),
    Fault(
        "Convolution: a place behind the row", "xtrain/testing/convolution.py", "(size - 1 - at) // stride + 1", "(size - at) // stride + 1",
        "taps inside the row", "tests/testing/test_testing_convolution.py::test_counts_equal_those_of_loops",
    ),
    Fault(
        "causal_conv1d on a GPU: dw of rows behind the run", "cuda/conv/causal_conv1d.cu", "if (INSIDE || i < mine) {", "if (INSIDE || i <= mine) {",
        "a row is in one run's share of dweight", GRADIENT + "'causal_conv1d and silu'",
    ),
    Fault("decoder: biases of which one is not there", "xtrain/models/decoder.py", "if all(layer.bias is not None for layer in layers):", "if any(layer.bias is not None for layer in layers):", "biases are packed where all layers have one", "tests/nn/test_joined.py::test_biases_that_not_all_have_stay_where_they_are"),
    Fault("joined: biases of some", "xtrain/nn/layers.py", " or (bias is None) != (biases[-1] is None)):", "):", "joined layers all have a bias, or none has", "tests/nn/test_joined.py::test_biases_that_not_all_have_stay_where_they_are"),
]  # fmt: skip
