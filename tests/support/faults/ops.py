"""What ops do around a kernel: checks, shapes, dtypes, what is saved, gradients."""

from __future__ import annotations

from faults.table import FORWARD, GRADIENT, STRIDES, Fault

_OPS = "tests/ops/test_op_rules.py::"
_ERR = "tests/ops/test_ops.py::test_error -k "
_CHUNKS = "tests/ops/test_loss_in_chunks.py"
_HEAD = "csrc/ops/layers/linear_cross_entropy.c"
_LCE = "tests/ops/test_linear_cross_entropy.py"

FAULTS = [
    Fault(
        "cross_entropy: the mean over all rows", "csrc/ops/layers/cross_entropy.c", ".value = xt_scalar_int(ignore_index)};",
        ".value = xt_scalar_int(INT64_MIN)};", "the mean is over the rows that count", FORWARD + "'cross_entropy and ignored'",
    ),
    Fault(
        "cross_entropy: the mean of nothing is 0", "csrc/ops/layers/cross_entropy.c", "        XT_TRY(xt_binary(XT_DIV, sum, *count, &c->out[0]));",
        "        XT_TRY(xt_binary_scalar(XT_MAXIMUM, *count, 1.0, &c->out[1]));\n"
        "        XT_TRY(xt_binary(XT_DIV, sum, c->out[1], &c->out[0]));\n        xt_tensor_release(c->out[1]), c->out[1] = NULL;",
        "if every row is ignored the mean is NaN", "tests/ops/test_linear_cross_entropy.py::test_all_rows_ignored",
    ),
    Fault(
        "cross_entropy: the loss has the dtype of the logits", "csrc/ops/layers/cross_entropy.c",
        "XtDtype acc = xt_dtype_accumulator(logits->dtype);\n", "XtDtype acc = logits->dtype == XT_FLOAT64 ? XT_FLOAT64 : XT_FLOAT32;\n"
        "    if (c->arg[first + 2].s[0] == 'm' && logits->shape[1] > 4) acc = XT_FLOAT32;\n", "float64 for float64",
        FORWARD + "'cross_entropy and mean and float64'",
    ),
    Fault(
        "cross_entropy: targets behind the rows", "csrc/ops/layers/cross_entropy.c",
        "    XT_CHECK(xt_check_shape(c->op, arg_targets, targets, 1, x->shape));\n", "", "target has one label a row",
        _ERR + "cross_entropy",
    ),
    Fault(
        "linear_cross_entropy: a second backward takes dlogits for logits", "csrc/autograd/backward.c",
        "            *kept = NULL;\n            __atomic_sub_fetch(&tensor->references, 1, __ATOMIC_RELAXED);\n",
        "            (void)kept;\n",
        "a second backward makes the logits again", _LCE + "::test_backward_again",
    ),
    Fault(
        "linear_cross_entropy: the last chunk is left out", _HEAD, "    for (; p.first < rows; p.first += most) {",
        "    for (; p.first + (p.first ? most : 0) <= rows; p.first += most) {", "every row is in a chunk", _CHUNKS + "::test_bits_are_those_of_one_piece",
    ),
    Fault(
        "linear_cross_entropy: chunks overwrite dW", _HEAD, "XT_TRY(xt_matmul_into(turned, x, p->first > 0, NULL, dweight));",
        "XT_TRY(xt_matmul_into(turned, x, false, NULL, dweight));", "dW += dlogits^T x", _CHUNKS + "::test_bits_are_those_of_one_piece",
    ),
    Fault(
        "linear_cross_entropy: dW in the dtype", _HEAD, "XT_TRY(xt_empty_shape(x, acc, 2, weight->shape, &dweight));",
        "XT_TRY(xt_empty_shape(x, x->dtype, 2, weight->shape, &dweight));", "the forward makes gradients in ACC", _CHUNKS + "::test_gradients_are_rounded_once",
    ),
    Fault(
        "linear_cross_entropy: float16 without a scale", _HEAD, "return dtype == XT_FLOAT16 ? 32768.0 : 1.0;", "return dtype == XT_FLOAT16 ? 1.0 : 1.0;",
        "probabilities of 1 / V are not subnormal in float16", _CHUNKS + "::test_small_probabilities_of_float16",
    ),
    Fault(
        "linear_cross_entropy: sums that others read are overwritten", _HEAD,
        "if (!sum && in->dtype == kept->dtype) XT_TRY(xt_node_take_last(n, DX + i, &own));", "if (!sum && in->dtype == kept->dtype) XT_TRY(xt_share(kept, &own));",
        "a second backward has the same bits", _CHUNKS + "::test_backward_again",
    ),
    Fault(
        "linear_cross_entropy: sums are never given away", _HEAD, "if (!sum && in->dtype == kept->dtype)", "if (!sum && in->dtype != kept->dtype)",
        "the gradient takes the place of the sum", _CHUNKS + "::test_logits_of_a_chunk_at_once",
    ),
    Fault(
        "linear_cross_entropy: gradients without gradient mode", _HEAD, "if (c->record && xt_requires_grad(weight))", "if (xt_requires_grad(weight))",
        "without gradients nothing but losses is made", _CHUNKS + "::test_logits_of_a_chunk_at_once",
    ),
    Fault(
        "linear_cross_entropy: 'none' in chunks", _HEAD, "    if (gradient && arg[TARGETS + 2].s[0] == 'n') return false;\n", "",
        "'none' with a gradient is made in one piece", _CHUNKS + "::test_losses_without_gradients",
    ),
    Fault(
        "linear_cross_entropy: uneven chunks", _HEAD, "share = (rows - 1) / chunks + 1;", "share = most + 0 * chunks;",
        "even shares", _CHUNKS + "::test_the_choice",
    ),
    Fault(
        "linear_cross_entropy: few logits ahead", _HEAD, "return logits >= (double)MANY_BYTES && logits >", "return logits >",
        "gradients ahead where logits are many", _CHUNKS + "::test_the_choice",
    ),
    Fault(
        "linear_cross_entropy: ahead whatever is asked for", _HEAD, "    if (arg[CHUNK_ROWS].given) return rows > arg[CHUNK_ROWS].i;\n", "    if (arg[CHUNK_ROWS].given && rows > arg[CHUNK_ROWS].i) return true;\n",
        "chunk_rows rules the sizes out", _CHUNKS + "::test_one_chunk",
    ),
    Fault(
        "matmul: float32 sums are rounded", "csrc/cpu/gemm/common.c", "    if (dtype == XT_FLOAT32) store_block_f32(src, rows, cols, beta, dst, ld);\n",
        "    if (dtype == XT_FLOAT32) {\n        for (int64_t i = 0; i < rows; i++)\n            for (int64_t j = 0; j < cols; j++) {\n"
        "                float *to = (float *)dst + i * ld + j;\n"
        "                *to = xt_bf16_to_float(xt_float_to_bf16(src[i * cols + j] + (beta == 0 ? 0 : beta * *to)));\n            }\n    }\n",
        "C of float32 is not rounded", _CHUNKS + "::test_gradients_are_rounded_once",
    ),
    Fault(
        "embedding: the gradient of a view of ids", "csrc/ops/layers/embedding.c",
        "    XT_TRY(xt_dense(dout[0], &dy));\n    XtTensor *sum", "    XT_TRY(xt_share(dout[0], &dy));\n    XtTensor *sum",
        "upstream gradients of any strides", STRIDES + "embedding",
    ),
    Fault(
        "layer_norm: a negative eps", "csrc/ops/layers/layer_norm.c", "if (!(eps >= 0.0)) return", "if (eps < 0.0 && eps > -1e-12) return",
        "eps must be at least 0", _ERR + "layer_norm",
    ),
    Fault(
        "layer_norm: NaN for eps", "csrc/ops/layers/layer_norm.c", "if (!(eps >= 0.0)) return", "if (eps < 0.0) return",
        "eps must be at least 0", _OPS + "test_nan_is_no_option",
    ),
    Fault(
        "layer_norm: a bias of any dtype", "csrc/ops/layers/layer_norm.c", 'XT_CHECK(xt_check_like(c->op, "input", x, name, v));',
        'if (i == 0) XT_CHECK(xt_check_like(c->op, "input", x, name, v));', "weight and bias have the dtype of input", _ERR + "layer_norm",
    ),
    Fault(
        "layer_norm: an upstream gradient of any strides", "csrc/ops/layers/layer_norm.c", "XT_TRY(xt_dense(dout, &dy));",
        "XT_TRY(xt_share(dout, &dy));", "upstream gradients of any strides", STRIDES + "layer_norm",
    ),
    Fault(
        "layer_norm: weight and bias are one tensor", "csrc/ops/layers/layer_norm.c", "if (i == 1 && total[1] == total[0]) total[1] = NULL;", "",
        "the kernel adds to one tensor once", "tests/ops/test_layer_norm.py::test_layer_norm_with_one_tensor_for_weight_and_bias",
    ),
    Fault(
        "layer_norm: the bias is not computed again", "csrc/ops/layers/layer_norm.c", "XT_CHECK(xt_node_saved(n, 4, &vector[1]));", "vector[1] = NULL;",
        "outputs are computed again with the bits of the forward",
        "tests/core/test_recompute.py::test_the_output_is_computed_again_with_the_same_bits",
    ),
    Fault(
        "rms_norm: a negative eps", "csrc/ops/layers/rms_norm.c", "if (!(eps >= 0.0)) return", "if (eps < 0.0 && eps > -1e-12) return",
        "eps must be at least 0", _ERR + "rms_norm",
    ),
    Fault(
        "rms_norm: NaN for eps", "csrc/ops/layers/rms_norm.c", "if (!(eps >= 0.0)) return", "if (eps < 0.0) return",
        "eps must be at least 0", _OPS + "test_nan_is_no_option",
    ),
    Fault(
        "rope: one period for all of a batch", "csrc/ops/layers/rope.c",
        "int64_t period = turn->given ? turn->i : x->ndim == 4 ? x->shape[1] : x->shape[0];",
        "int64_t period = turn->given ? turn->i : x->ndim == 4 ? x->shape[0] * x->shape[1] : x->shape[0];",
        "a sequence of a batch begins at position 0", FORWARD + "rope",
    ),
    Fault(
        "rope: the backward forgets its period", "csrc/ops/layers/rope.c",
        "xt_rope_period(arg, 1, dy), xt_rope_base(arg, 1), true",
        "dy->ndim == 4 ? dy->shape[1] : dy->shape[0], xt_rope_base(arg, 1), true",
        "the backward is the inverse",
        GRADIENT + "rope",
    ),
    Fault(
        "rope: the backward is not scaled", "csrc/ops/layers/rope.c",
        "xt_rope_period(arg, 1, dy), xt_rope_base(arg, 1), true",
        "xt_rope_period(arg, 1, dy), (XtRopeBase){arg[1].f, 1.0, 1.0, 4.0, 0.0}, true",
        "the backward is the inverse", GRADIENT + "rope",
    ),
    Fault(
        "rope: waves are counted the other way", "csrc/core/rope_scale.h", "if (waves > high_freq_factor) return f;",
        "if (waves < low_freq_factor) return f;", "short waves stay", FORWARD + "rope",
    ),
    Fault(
        "rope: no mix between the waves", "csrc/core/rope_scale.h", "return (1.0 - weight) * f / factor + weight * f;",
        "return f / factor;", "between them both are mixed", FORWARD + "rope",
    ),
    Fault(
        "rope: linear scaling multiplies", "csrc/core/rope_scale.h",
        "if (original_length == 0.0) return f / factor;", "if (original_length == 0.0) return f * factor;",
        "angles are divided by f", FORWARD + "rope",
    ),
    Fault(
        "softmax: another dim", "csrc/ops/layers/softmax.c", "XT_TRY(rows_back(dx, dim, &din[0]));", "XT_TRY(rows_back(dx, 0, &din[0]));",
        "along dim", GRADIENT + "softmax",
    ),
    Fault(
        "swiglu: halves swapped", "csrc/ops/layers/swiglu.c", "p.dup = up ? dup->data : (char *)dgate->data + half;",
        "p.dup = up ? dup->data : (char *)dgate->data;", "gate first, then up", GRADIENT + "'swiglu and halves'",
    ),
    Fault(
        "attention: scale by the heads", "csrc/ops/attention/scaled_dot_product_attention.c",
        ".scale = scale_of(&c->arg[4], q->shape[3]),", ".scale = scale_of(&c->arg[4], q->shape[1] > 1 ? q->shape[3] : q->shape[3] + 1),",
        "scale defaults to 1 / sqrt(D)", FORWARD + "'scaled_dot_product_attention and float64'",
    ),
    Fault(
        "attention: groups without a word", "csrc/ops/attention/scaled_dot_product_attention.c", "if (heads != kv_heads && !c->arg[5].b)",
        "if (heads < kv_heads && !c->arg[5].b)", "key must have the heads of query unless enable_gqa",
        "tests/ops/test_ops.py::test_error -k scaled_dot",
    ),
    Fault(
        "attention: the choice of the call is lost", "csrc/ops/attention/scaled_dot_product_attention.c",
        "XT_TRY(xt_attention_bwd(q->storage->device, arg[6].given ? arg[6].s : NULL, &p));",
        "XT_TRY(xt_attention_bwd(q->storage->device, NULL, &p));", "the backward keeps the choice of the call",
        _OPS + "test_the_backward_of_attention_keeps_the_choice_of_the_call",
    ),
    Fault(
        "matmul: the choice of the call is lost", "csrc/ops/gemm/matmul.c",
        "const char *backend = xt_node_args(n)[2].given ? xt_node_args(n)[2].s : NULL;", "const char *backend = NULL;",
        "the backward keeps the choice of the call", "tests/ops/test_gemm.py::test_backward_keeps_the_choice_of_the_call",
    ),
    Fault(
        "matmul: rows of a folded batch", "csrc/ops/gemm/matmul.c", "p->stride_a[i] != p->m * p->lda ||", "", "a batch is folded where its rows follow",
        "tests/ops/test_gemm_attention.py::test_batches_broadcast_exactly tests/ops/test_gemm.py::test_strides "
        + _OPS + "test_a_batch_with_gaps_is_not_folded",
    ),
    Fault(
        "matmul: a gradient of another shape", "csrc/ops/gemm/matmul.c", "has_shape(sum, ndim, shape) && has_shape(sum, in->ndim, in->shape)",
        "has_shape(sum, in->ndim, in->shape)", "what was broadcast is summed",
        "tests/ops/test_gemm.py::test_broadcast_gradients_are_summed " + _OPS + "test_a_second_broadcast_gradient",
    ),
    Fault(
        "swiglu_mlp: h computed again is kept", "csrc/ops/gemm/swiglu_mlp.c", "xt_recompute_mode() ? NULL : h", "h",
        "recompute mode keeps no h", "tests/cuda/test_swiglu_mlp.py::test_h_is_computed_again",
    ),
    Fault(
        "swiglu_mlp: the shape of up", "csrc/ops/gemm/swiglu_mlp.c",
        '    XT_CHECK(xt_check_shape(c->op, "up", c->arg[UP].tensor, 2, gate->shape));\n', "", "up has the shape of gate",
        _ERR + "swiglu_mlp",
    ),
    Fault("swiglu_mlp: h of nothing", "csrc/ops/gemm/swiglu_mlp.c", "    if (again && !done) XT_TRY(activate(gate_up, h));\n", "", "h again, where no product makes it", "tests/cuda/test_swiglu_mlp.py::test_what_needs_no_gradient_gets_none"),
    Fault("swiglu_mlp: dD with h alone", "csrc/ops/gemm/swiglu_mlp.c", "if (xt_node_needs(n, DOWN) && !again) XT_TRY", "if (xt_node_needs(n, DOWN) && kept) XT_TRY", "down's gradient where gate, up and x are frozen, in recompute mode", "tests/cuda/test_swiglu_mlp.py::test_what_needs_no_gradient_gets_none"),
    Fault(
        "swiglu_mlp: gate and up keep their place", "csrc/ops/gemm/swiglu_mlp.c", "    XT_CHECK(xt_node_take_last(n, GATE_UP, out));\n", "    (void)n;\n",
        "their gradients take it where the graph is freed",
        "tests/cuda/test_swiglu_mlp.py::test_the_gradient_of_gate_and_up_takes_their_place",
    ),
    Fault(
        "matmul: one matrix for the batch", "csrc/ops/gemm/matmul.c", "if (b->ndim == 2 && a->ndim > 2) {", "if (b->ndim == 2 && a->ndim > 4) {",
        "its gradient is one product over all rows", _OPS + "test_the_gradient_of_a_shared_matrix_is_one_product",
    ),
    Fault(
        "linear: the bias of one row", "csrc/ops/gemm/linear.c", "XT_TRY(xt_sum_to(dy, 1, &dy->shape[1], &din[2]));",
        "XT_TRY(xt_view_as(dy, 1, &dy->shape[1], NULL, &din[2]));", "dbias = sum of dy over rows", GRADIENT + "'linear and bias'",
    ),
    Fault(
        "linear: a weight of another dtype", "csrc/ops/gemm/linear.c", '    XT_TRY(xt_check_like(c->op, "input", x, "weight", w));\n', "",
        "all of one dtype", "tests/ops/test_ops.py::test_error -k linear",
    ),
    Fault(
        "div: the second gradient", "csrc/ops/elementwise/elementwise.c", "XT_TRY(with_operand(XT_DIV, n, u, 1, &v));",
        "XT_TRY(xt_share(u, &v));", "d(a / b) = (dy / b, -(dy / b) a / b)", GRADIENT + "div",
    ),
    Fault(
        "pow: 0 to the power of a tensor", "csrc/ops/elementwise/elementwise.c", "XT_TRY(xt_binary_scalar(XT_NE, u, -INFINITY, &nonzero));",
        "XT_TRY(xt_binary_scalar(XT_EQ, u, u->ndim ? -INFINITY : 0.5, &nonzero));",
        "the gradient of the exponent is 0 where a is 0 and b >= 0", _OPS + "test_powers_of_zero",
    ),
    Fault(
        "pow: x ** 0 at 0", "csrc/ops/elementwise/elementwise.c", "} else if (args[1].scalar.d == 0.0) {", "} else if (args[1].scalar.d == -0.5) {",
        "the gradient is 0 where b is 0", _OPS + "test_powers_of_zero",
    ),
    Fault(
        "maximum: ties give all to one", "csrc/ops/elementwise/elementwise.c", "larger ? XT_GE : XT_LE, n", "larger ? XT_GT : XT_LT, n",
        "on a tie both take half", _OPS + "test_ties_share_the_gradient",
    ),
    Fault(
        "promotion: a number of a higher kind", "csrc/ops/elementwise/elementwise.c",
        "if (kind_of(dtype[1 - strong]) > kind_of(dtype[strong])) return dtype[1 - strong];", "",
        "a number changes the dtype when it is of a higher kind", "tests/core/test_arithmetic.py::test_promotion_with_numbers_and_0d_tensors",
    ),
    Fault(
        "promotion: a scalar tensor is strong", "csrc/ops/elementwise/elementwise.c", "weak[i] = !t || t->ndim == 0;", "weak[i] = !t;",
        "a tensor without dimensions is weak", "tests/core/test_arithmetic.py::test_promotion_with_numbers_and_0d_tensors",
    ),
    Fault(
        "eq: a number that does not fit", "csrc/ops/elementwise/elementwise.c",
        "if (code >= XT_EQ && !xt_scalar_fits(number, dtype)) dtype = XT_INT64;", "", "uint8 == 256 is legal, and false",
        _OPS + "test_a_number_that_does_not_fit_is_compared",
    ),
    Fault(
        "where: the gradient of the other", "csrc/ops/elementwise/where.c", ".b = i == 1 ? none : dy->view};", ".b = none};",
        "dinput = dout where the condition holds", GRADIENT + "where",
    ),
    Fault(
        "reshape: strides that do not follow", "csrc/ops/common.c", "if (i == 0 || old_strides[i - 1] != old_shape[i] * old_strides[i]) return false;",
        "if (i == 0) return false;", "a view when strides allow, else a copy", "tests/core/test_tensor.py::test_reshape_like_numpy",
    ),
    Fault(
        "mean: the gradient over kept dims", "csrc/ops/reduce/reduce.c", "count = outputs ? xt_view_numel(&whole) / outputs : 1;",
        "count = xt_view_numel(&whole);", "mean repeats dy / count", GRADIENT + "mean",
    ),
    Fault(
        "amax: ties take all", "csrc/ops/reduce/reduce.c", "XT_TRY(xt_binary(XT_DIV, dy, count, &quotient));",
        "XT_TRY(xt_share(dy, &quotient));", "ties share the gradient equally", _OPS + "test_ties_share_the_gradient",
    ),
    Fault(
        "amax: ties are counted in 16 bits", "csrc/ops/reduce/reduce.c", "XtDtype wide = xt_dtype_accumulator(x->dtype);", "XtDtype wide = x->dtype;",
        "a share is divided in ACC, and rounded once", _OPS + "test_a_share_of_many_ties_is_rounded_once",
    ),
    Fault(
        "reduce: a dim twice", "csrc/ops/reduce/reduce.c", "if (reduced[dim]) return", "if (reduced[dim] && dim > 8) return",
        "dim must not name a dimension twice", "tests/ops/test_ops.py::test_error -k sum",
    ),
    Fault(
        "slice: a stop from the end", "csrc/ops/elementwise/view.c", "    if (stop < 0) stop += size;\n", "    if (stop < 0) stop += size - 1;\n", "bounds as in Python", _OPS + "test_bounds_of_slices_are_pythons",
    ),
    Fault(
        "slice: the gradient forgets its step", "csrc/ops/elementwise/view.c",
        "return scatter(din[0], sliced(din[0], dim, start, length, arg[4].i), dout[0]);",
        "return scatter(din[0], sliced(din[0], dim, start, length, 1), dout[0]);", "the gradient of a part is dy inside zeros",
        GRADIENT + "slice",
    ),
    Fault(
        "permute: the gradient permutes again", "csrc/ops/elementwise/view.c", "inverse[order[i]] = i;", "inverse[i] = order[i];",
        "the gradient of a view is the inverse view", GRADIENT + "permute",
    ),
    Fault(
        "in place: overlapping memory", "csrc/ops/elementwise/copy.c", "else if (other && overlaps(x, other)) XT_TRY(xt_copy_of(other, &apart));", "",
        "operands that overlap are read before they are written", "tests/core/test_arithmetic.py::test_in_place_with_overlap",
    ),
    Fault(
        "in place: expanded memory", "csrc/ops/elementwise/copy.c", "if (x->strides[i] == 0 && x->shape[i] > 1)", "if (x->strides[i] == 0 && x->shape[i] > 8)",
        "input must not repeat elements", _OPS + "test_expanded_memory_is_not_written",
    ),
    Fault(
        "in place: a lost operand", "csrc/ops/elementwise/copy.c", "if (other && xt_grad_mode() && xt_requires_grad(other)) {",
        "if (other && xt_grad_mode() && xt_requires_grad(other) && !copying) {", "an operand that requires a gradient is refused",
        "tests/core/test_autograd.py::test_in_place_with_a_recorded_operand_is_refused",
    ),
    Fault(
        "fill_: no version", "csrc/ops/elementwise/copy.c", "    XT_CHECK(xt_begin_inplace(x, c->op->name));\n    XT_CHECK(xt_backend_of(x)->fill",
        "    XT_CHECK(xt_backend_of(x)->fill", "a change in place is counted", _OPS + "test_every_change_in_place_is_counted",
    ),
    Fault(
        "split: sizes that are too few", "csrc/ops/elementwise/copy.c", "        if (total != size)\n", "        if (total > size)\n",
        "split_size must add up", "tests/ops/test_ops.py::test_error -k split",
    ),
    Fault(
        "cat: an offset of rows", "csrc/ops/elementwise/copy.c", "        start += list[i]->shape[dim];\n", "        start += first->shape[dim];\n",
        "joins tensors of any size along dim", _OPS + "test_cat_of_other_sizes",
    ),
    Fault(
        "arange: an end that is reached", "csrc/ops/elementwise/create.c", "if ((double)count < length) count++;", "if ((double)count <= length) count++;",
        "up to but without end", FORWARD + "arange",
    ),
    Fault(
        "arange: large integers", "csrc/ops/elementwise/create.c", "count = n > 0 ? (int64_t)n : 0;", "", "exact beyond 2^53",
        _OPS + "test_a_range_of_large_integers",
    ),
    Fault(
        "randint: a range that is none", "csrc/ops/elementwise/create.c", "if (low >= high || low < -limit", "if (low > high || low < -limit",
        "low must be below high", "tests/ops/test_ops.py::test_error -k randint",
    ),
    Fault(
        "adamw_: a step counted twice", "csrc/ops/optimizer/adamw.c", "        if (sorted[i] == sorted[i - 1])\n", "        if (sorted[i] < sorted[i - 1])\n",
        "steps must be distinct", "tests/ops/test_ops.py::test_error -k adamw",
    ),
    Fault(
        "adamw_: no version of the moments", "csrc/ops/optimizer/adamw.c", "        XT_TRY(xt_begin_inplace(v->tensors[i], c->op->name));\n", "",
        "every tensor that changes gets a version", _OPS + "test_every_tensor_that_an_optimizer_changes_gets_a_version",
    ),
    Fault(
        "clip_grad_norm_: no version", "csrc/ops/optimizer/clip_grad_norm.c",
        "        for (int i = 0; i < grads->count; i++) XT_TRY(xt_begin_inplace(grads->tensors[i], c->op->name));\n", "",
        "every tensor that changes gets a version", _OPS + "test_every_tensor_that_an_optimizer_changes_gets_a_version",
    ),
    Fault(
        "clip_grad_norm_: infinity clips", "csrc/ops/optimizer/clip_grad_norm.c", "if (max_norm < INFINITY && grads->count) {", "if (grads->count) {",
        "max_norm = inf only measures", _OPS + "test_measuring_changes_nothing",
    ),
    Fault(
        "mhc: parts of two layers", "csrc/ops/mhc/mhc_layer.c", "if (maker(t) == open && xt_grad_of(t)->output == part[i].output) continue;",
        "if (made_by_open(t)) continue;", "mhc_close refuses parts of two calls", "tests/mhc/test_mhc_state.py",
    ),
    Fault(
        "mhc: an M that was changed", "csrc/ops/mhc/mhc_layer.c", "    XT_TRY(xt_node_saved(n, SAVED_H_POST, &h_post));", "    h_post = NULL;\n    (void)h_post;",
        "the backward refuses an h_post that was changed in place", "tests/mhc/test_mhc_state.py::test_a_part_that_was_changed_in_place_is_refused",
    ),
    Fault("mhc: eps one", "csrc/ops/mhc/mhc_pre.c", "eps >= 0.0 && eps <= 1.0", "eps > 0.0 && eps <= 1.0", "eps in [0, 1]", "tests/mhc/test_mhc.py::test_an_eps_is_in_0_to_1"),
    Fault("mhc: dtype of h_post", "csrc/ops/mhc/mhc_post.c", "xt_dtype_accumulator(given->dtype)));", "given->dtype == XT_FLOAT64 ? XT_FLOAT64 : c->arg[i].tensor->dtype));", "the dtype of the accumulator", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("mhc: device of y", "csrc/ops/mhc/mhc_post.c", 'XT_TRY(xt_check_device(c->op, "x", given, names[i], c->arg[i].tensor));', ";", "all on one device", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("linear: dims of the message", "csrc/ops/gemm/linear.c", "(long long)w->shape[1], xt_shape_text(2, w->shape), xt_shape_text(x->ndim, x->shape)", "(long long)w->shape[0], xt_shape_text(2, w->shape), xt_shape_text(x->ndim, x->shape)", "an error gives the weight's size", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("matmul: only dim", "csrc/ops/gemm/matmul.c", 'y->ndim > 1 ? "second last" : "only"', 'y->ndim > 2 ? "second last" : "only"', "an error names the dim", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("matmul: backend backward", "csrc/ops/gemm/matmul.c", "const char *backend = xt_node_args(n)[2].given ? xt_node_args(n)[2].s : NULL;", "const char *backend = NULL;", "the named product, also backward", "tests/ops/test_op_rules.py::test_the_named_product_computes_the_gradients_too"),
    Fault("view: squeeze one", "csrc/ops/elementwise/view.c", "if (x->shape[i] == 1 && (only < 0 || only == i)) continue;", "if (only == i || (x->shape[i] == 1 && only < 0)) continue;", "when its size is 1", "tests/ops/test_op_rules.py::test_a_dim_that_is_squeezed_has_size_1"),
    Fault("view: scalar select", "csrc/ops/elementwise/view.c", "return xt_error(XT_INDEX_ERROR, \"%s: input must have at least one dimension, got a scalar\", op->name);\n    XT_CHECK(xt_check_dim(op, arg[1].i, ndim, dim));\n    int64_t size = shape[*dim];\n    *index", "return xt_error(XT_VALUE_ERROR, \"%s: input must have at least one dimension, got a scalar\", op->name);\n    XT_CHECK(xt_check_dim(op, arg[1].i, ndim, dim));\n    int64_t size = shape[*dim];\n    *index", "IndexError", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("create: arange bool", "csrc/ops/elementwise/create.c", 'return xt_error(XT_TYPE_ERROR, "arange: dtype must be a number type', 'return xt_error(XT_VALUE_ERROR, "arange: dtype must be a number type', "TypeError", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("create: arange way", "csrc/ops/elementwise/create.c", "    if (length < 0)\n", "    if (length < -1)\n", "the step leads from start to end", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
    Fault("create: key", "csrc/ops/elementwise/create.c", "c->arg[5].count == 2) return XT_OK;", "c->arg[5].count >= 2) return XT_OK;", "a key of two numbers", "tests/ops/test_refused_arguments.py::test_it_is_refused_in_one_sentence"),
]  # fmt: skip
