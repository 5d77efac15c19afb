"""Faults of what is asked of a process, of the device "meta", of hyper-connections, and of the kernels for NVIDIA GPUs."""

from __future__ import annotations

from .table import FORWARD, GRADIENT, Fault

_R, _N, _H = "csrc/py/runtime/", "xtrain/nn/mhc.py", "csrc/cpu/mhc/"
_L, _O, _CUDA = "cuda/layers/", "cuda/optimizer/", "tests/cuda/test_cuda.py::"
_META, _RUNTIME = "tests/core/test_meta.py::", "tests/core/test_runtime.py::"
_WORK = _META + "test_work_is_counted"
_MHC, _STATE, _AGAIN = "tests/mhc/test_mhc.py::", "tests/mhc/test_mhc_state.py::", "tests/mhc/test_mhc_recompute.py::"

FAULTS = [
    Fault("runtime: seeds of 63 bits", _R + "runtime.c", "*out = overflow > 0 ? PyLong_AsUnsignedLongLong(number) : (uint64_t)value;", "*out = (uint64_t)value;", "any integer of 64 bits", _RUNTIME + "test_seeds_of_64_bits"),
    Fault("runtime: True is a seed", _R + "runtime.c", "if (PyBool_Check(object) || !PyIndex_Check(object))", "if (!PyIndex_Check(object))", "a bool is no integer", _RUNTIME + "test_seeds_of_64_bits"),
    Fault("runtime: seeds that do not fit", _R + "runtime.c", "    if (!failed) return 0;\n", "    PyErr_Clear();\n    return 0;\n", "larger integers are refused", _RUNTIME + "test_seeds_of_64_bits"),
    Fault("runtime: the state the wrong way round", _R + "runtime.c", 'Py_BuildValue("(KK)", (unsigned long long)seed, (unsigned long long)stream)', 'Py_BuildValue("(KK)", (unsigned long long)stream, (unsigned long long)seed)', "(seed, stream)", _RUNTIME + "test_seeds_of_64_bits"),
    Fault("runtime: threads of 32 bits", _R + "runtime.c", "count > INT32_MAX ? INT32_MAX : (int)count", "(int)count", "a number of threads is refused as it was given", _RUNTIME + "test_numbers_of_threads"),
    Fault("runtime: the peak is what is there", _R + "runtime.c", '"peak", (long long)s.peak', '"peak", (long long)s.allocated', "peak", _RUNTIME + "test_memory_that_was_held"),
    Fault("runtime: a peak for ever", _R + "runtime.c", "    xt_memory_reset_peak(bound->arg[0].device);\n", "", "memory_reset_peak", _RUNTIME + "test_memory_that_was_held"),
    Fault("runtime: tensors are storages", _R + "runtime.c", '"live_tensors",\n                         (long long)s.live_tensors', '"live_tensors",\n                         (long long)s.live_storages', "live_tensors", _RUNTIME + "test_memory_that_was_held"),
    Fault("select: both layouts of a", _R + "select.c", "p->trans_a = layout->s[0] == 't'", "p->trans_a = layout->s[1] == 't'", "nn, nt, tn, tt", _RUNTIME + "test_what_explains_a_selection_is_checked"),
    Fault("select: heads of half a group", _R + "select.c", "if (p->kv_heads ? p->heads % p->kv_heads : p->heads) {", "if (p->kv_heads ? 0 : p->heads) {", "heads are a multiple of kv heads", _RUNTIME + "test_what_explains_a_selection_is_checked"),
    Fault("select: chunks of integers", _R + "select.c", "    if (!xt_dtype_is_float(dtype))\n", "    if (0)\n", "a floating dtype", _RUNTIME + "test_what_explains_a_selection_is_checked"),
    Fault("compare: tolerances below zero", _R + "testing.c", "isfinite(atol) && rtol >= 0 && atol >= 0", "isfinite(atol) && rtol >= 0", "not negative", _RUNTIME + "test_what_compare_refuses"),
    Fault("compare: floats with integers", _R + "testing.c", "else if (xt_dtype_is_float(out->dtype) != xt_dtype_is_float(ref->dtype))", "else if (0)", "integers are compared with integers", _RUNTIME + "test_what_compare_refuses"),
    Fault("hook: anything is one", _R + "testing.c", "if (hook != Py_None && !PyCallable_Check(hook)) {", "if (0) {", "a callable or None", _RUNTIME + "test_a_hook_is_given_back"),
    Fault("hook: the one before is forgotten", _R + "testing.c", "return before != NULL ? before : Py_NewRef(Py_None);", "return Py_NewRef(Py_None);", "returns the hook before", _RUNTIME + "test_a_hook_is_given_back"),
    Fault("paths: one name takes the other's", _R + "paths.c", "const unsigned exchange = 2;", "const unsigned exchange = 0;", "two paths change places", "tests/saving/test_writing.py::test_exchange"),
    Fault("module: a core for each", _R + "module.c", "    if (xt_py != NULL) {\n", "    if (0) {\n", "the core cannot be loaded twice in one process", _RUNTIME + "test_a_second_core_is_refused"),
    Fault("rope: theta of nothing", "csrc/ops/layers/rope.c", "    if (base.theta < XT_ROPE_LEAST)", "    if (0)", "theta is at least 1e-9", "tests/ops/test_kernel_clauses.py::test_what_a_rotation_refuses"),
    Fault("rope: a factor of nothing", "csrc/ops/layers/rope.c", "    if (base.factor < XT_ROPE_LEAST)", "    if (0)", "factor is at least 1e-9", "tests/ops/test_kernel_clauses.py::test_what_a_rotation_refuses"),
    Fault("array: dtypes in NumPy's words", "csrc/py/convert/numpy_out.c", "if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError))", "if (0)", "a message has op, argument, rule and value", "tests/core/test_refusals.py"),
    # meta
    Fault("meta: values of a print", "csrc/py/tensor/repr.c", "none                   ? PyUnicode_FromString", "0                      ? PyUnicode_FromString", "a tensor on meta prints its sizes", _META + "test_sizes_without_values"),
    Fault("meta: products of one batch", "csrc/backend/meta.c", "(double)(p->batch[0] * p->batch[1])", "(double)p->batch[1]", "work of all products of a batch", _WORK),
    Fault("meta: a backward is a forward", "csrc/backend/meta.c", "return count(5 * attention_flops", "return count(2 * attention_flops", "five products in the backward of attention", _WORK),
    Fault("meta: numbers are tensors", "csrc/backend/meta.c", "(p->constant ? 2 : 3)", "3", "a number is not read", _WORK),
    Fault("meta: bytes add up for ever", "csrc/backend/meta.c", "out->bytes = reset ? __atomic_exchange_n(&bytes, 0, __ATOMIC_RELAXED)", "out->bytes = reset ? __atomic_load_n(&bytes, __ATOMIC_RELAXED)", "meta_work(True) begins anew", _WORK),
    Fault("meta: steps without masters", "csrc/backend/meta.c", "p->items[i].master ? 24.0 : 16.0", "p->items[i].master ? 16.0 : 16.0", "masters are read and written", _WORK),
    Fault("meta: groups of one", "csrc/backend/meta.c", "    for (; p; p = p->next)\n        for", "    for (; p; p = NULL)\n        for", "all groups of a step", _WORK),
    Fault("meta: a residual is free", "csrc/backend/meta.c", "p->residual ? 4 : 2", "p->residual ? 2 : 2", "a residual is read, and the sum written", _WORK),
    Fault("meta: copies read nothing", "csrc/backend/meta.c", "size_of(&p->dst) + size_of(&p->src)", "size_of(&p->dst)", "bytes that are read and written", _WORK),
    Fault("estimate: a graph with dropout", "xtrain/train/estimate.py", " and _C.get_rng_state() == drawn", "", "a step with dropout is eager", "tests/train/test_estimate.py::test_a_gpt2_is_estimated"),
    Fault("estimate: minutes for layers", "xtrain/train/estimate.py", "    if (layers := keys.num_hidden_layers) > _MOST_LAYERS:", "    if (layers := keys.num_hidden_layers) > 10**9:", "at most 4096 layers", "tests/train/test_estimate.py::test_layers_that_would_take_minutes_are_refused"),
    # hyper-connections
    Fault("mhc_pre: alpha of another block", _H + "mhc_pre.c", "2 / (1 + EXP(-(alpha[1] * (r * u[n + i])", "2 / (1 + EXP(-(alpha[0] * (r * u[n + i])", "alpha by block of rows", FORWARD + "mhc_pre"),
    Fault("mhc_pre: no hc_eps", _H + "mhc_pre.c", " + (ACC)p->hc_eps;", ";", "h_pre = sigmoid(z_pre) + hc_eps", FORWARD + "mhc_pre"),
    Fault("mhc_pre: the slope of large z", _H + "mhc_pre.c", "e = EXP(z < 0 ? z : -z);", "e = EXP(z);", "s (1 - s) from z, on both sides", "tests/mhc/test_mhc.py::test_zero_tokens_and_huge_values_stay_finite"),
    Fault("mhc_pre: dbias with alpha", _H + "mhc_pre.c", "        sums[i] += delta;\n", "        sums[i] += dq;\n", "dbias = sum delta", GRADIENT + "mhc_pre"),
    Fault("mhc_pre: dalpha of one block", _H + "mhc_pre.c", "sums[MAX_ROWS + block] += ", "sums[MAX_ROWS] += ", "dalpha by block of rows", GRADIENT + "mhc_pre"),
    Fault("mhc_pre: dphi without gamma", _H + "mhc_pre.c", "s[r * S_COLS + c] * (gamma ? gamma[c] : 1)", "s[r * S_COLS + c]", "dphi = S gamma", GRADIENT + "mhc_pre"),
    Fault("mhc_pre: stretches begin at du of the first", _H + "mhc_pre.c", "NAME(mhc_outer)(part, du + t * m, x", "NAME(mhc_outer)(part, du, x", "S = sum over all tokens", "tests/mhc/test_mhc_tokens.py::test_gradients_of_parameters_are_sums_over_all_tokens"),
    Fault("mhc_post: M the other way round", _H + "mhc_post.c", "sum += m[i * n + j] * v[j];", "sum += m[j * n + i] * v[j];", "out_i = sum_j M_ij x_j + h_i y", FORWARD + "mhc_post"),
    Fault("mhc_post: dx by rows", _H + "mhc_post.c", "NAME(mhc_add_rows)(sum, m + j, n, g, n, cols, count);", "NAME(mhc_add_rows)(sum, m + j * n, 1, g, n, cols, count);", "dx_j = sum_i M_ij g_i", GRADIENT + "mhc_post"),
    Fault("mhc_post: dm the other way round", _H + "mhc_post.c", "NAME(mhc_dots)(dm + i * n, g + i * cols, x, n, cols, count);", "NAME(mhc_dots)(dm + i * n, x + i * cols, g, n, cols, count);", "dM_ij = g_i . x_j", GRADIENT + "mhc_post"),
    Fault("mhc: the state of another layer", _N, "        if connection is not self:\n", "        if connection is None:\n", "the state of another HyperConnection is refused", _STATE + "test_the_state_of_another_layer_is_refused"),
    Fault("mhc: a sublayer of another dtype", _N, "if tuple(y.shape) != shape or y.dtype is not carry.dtype:", "if tuple(y.shape) != shape:", "a sublayer returns what it gets", _MHC + "test_bad_layers " + _STATE + "test_a_sublayer_of_another_shape_is_refused"),
    Fault("mhc: a mean is a sum", _N, 'return x.mean(-2) if self.mode == "mean" else x.sum(-2)', "return x.mean(-2)", "mode sum", _MHC + "test_expansion_and_contraction"),
    Fault("mhc: outputs that were changed", _N, "            if y._version != version:\n", "            if y._version < version:\n", "what a sublayer returned must not be changed in place", _AGAIN + "test_a_change_in_place_before_the_backward_is_refused"),
    Fault("mhc: recomputed twice", _N, "        ctx.kept = None\n        for", "        for", "a backward of recomputed streams runs once", _AGAIN + "test_recomputed_streams_give_the_same_bits"),
    Fault("mhc: connections that are not stock", _N, "or not all(is_stock(part[0], HyperConnection) for part in parts)", "", "a subclass is called as a module", _STATE + "test_recomputed_streams_call_a_connection_that_is_not_stock"),
    Fault("mhc: coefficients of 16 bits", _N, "        dtype = _WIDE.get(dtype.name, dtype) if dtype is not None else _C.float32\n", "        dtype = dtype if dtype is not None else _C.float32\n", "parameters of coefficients are float32", _MHC + "test_parameters_stay_wide"),
    Fault("mhc_close: any carry", "csrc/ops/mhc/mhc_layer.c", "if (!made_by_open(carry) || xt_grad_of(carry)->output != OUT_CARRY)", "if (!made_by_open(carry))", "carry is output 3 of mhc_open", _STATE + "test_a_part_that_was_replaced_is_refused"),
    # kernels for NVIDIA GPUs: planted with --gpu, where there is one; the tests run with tensors made on it
    Fault("cuda adamw: the first group alone", _O + "adamw.cu", "    for (; p; p = p->next) XT_CHECK(adamw_group(p));\n", "    XT_CHECK(adamw_group(p));\n", "all groups of a call are updated", "tests/nn/test_optim.py::test_groups_and_skipped_parameters"),
    Fault("cuda adamw: a guard of NaN alone", _O + "adamw.cu", "if (guard && !isfinite(*guard)) return;", "if (guard && isnan(*guard)) return;", "a guard that is NaN or Inf stops the step", "tests/nn/test_adamw_steps.py"),
    Fault("cuda adamw: the count of the last step", _O + "adamw.cu", "const unsigned long long n = found % ARRIVAL + 1;", "const unsigned long long n = found % ARRIVAL;", "n is the number of this step", "tests/nn/test_adamw_steps.py"),
    Fault("cuda adamw: eps before the correction", _O + "adamw.cu", "(sqrt(v.at[j]) / root2 + constant.eps)", "((sqrt(v.at[j]) + constant.eps) / root2)", "sqrt(v / (1 - beta2^n)) + eps", FORWARD + "adamw_"),
    Fault("cuda adamw: masters are not written", _O + "adamw.cu", "        if (t.master) xt_write((A *)t.master + i, xt_piece(w));\n", "", "16-bit parameters keep an exact master", "tests/nn/test_optim.py::test_bfloat16_keeps_masters tests/nn/test_optim.py::test_adamw_over_fifty_steps"),
    Fault("cuda adamw: the end of a tensor", _O + "adamw.cu", "        adamw_range<T, 1>(t, constant, numbers, middle, end);\n", "", "every element of any length", FORWARD + "adamw_"),
    Fault("cuda clip: one launch for all pieces", _O + "clip_grad_norm.cu", "            sums += of_table;\n", "", "the norm of all tensors", "tests/nn/test_optim.py::test_clip_of_more_tensors_than_a_launch_takes"),
    Fault("cuda clip: squares of a rounded sum", _O + "clip_grad_norm.cu", "part += (double)v.at[j] * (double)v.at[j];", "part += (double)(float)v.at[j];", "the sum of x^2", FORWARD + "clip_grad_norm_"),
    Fault("cuda softmax: no maximum", _L + "softmax.cu", "v[k * N + e] = xt_exp_for<T>(v[k * N + e] - max);", "v[k * N + e] = xt_exp_for<T>(v[k * N + e]);", "exp(x - max)", "tests/cuda/test_cuda_kernels.py::test_rows_far_from_zero"),
    Fault("cuda softmax: the dot of another row", _L + "softmax.cu", "    A dot = sum_of<4>(part);\n", "    A dot = 2 * sum_of<4>(part);\n", "dx_i = p_i (dy_i - sum_j dy_j p_j)", GRADIENT + "softmax"),
    Fault("cuda swiglu: the slope of silu", _L + "swiglu.cu", "of_dgate.at[e] = dv * uv * s * (1 + gv * (1 - s));", "of_dgate.at[e] = dv * uv * s * (1 + gv * s);", "silu'(g) = s (1 + g (1 - s))", GRADIENT + "swiglu"),
    Fault("cuda swiglu: the short end of a row", _L + "swiglu.cu", "        if (e < count) p[e] = v.at[e];\n", "        if (e + 1 < count) p[e] = v.at[e];\n", "rows of any length", FORWARD + "swiglu"),
    Fault("cuda rope: frequencies of one dimension", _L + "rope.cuh", "(A)(2 * (first + i)) / (A)dim", "(A)(first + i) / (A)dim", "theta^(-2i/D)", FORWARD + "rope"),
    Fault("cuda embedding: ids beyond the table", _L + "embedding.cu", "const bool known = id >= 0 && id < vocab;", "const bool known = id >= 0 && id <= vocab;", "an id out of range is raised at the next wait", _CUDA + "test_an_index_out_of_range_is_raised_at_the_next_wait"),
    Fault("cuda cross_entropy: lse - x", _L + "cross_entropy.cu", "(peak - at_target) + log_sum : A(0);", "(peak + log_sum) - at_target : A(0);", "not lse - x, which loses digits of large logits", "tests/cuda/test_cuda_kernels.py::test_the_loss_of_large_logits_keeps_its_digits"),
    Fault("cuda cross_entropy: the target's share", _L + "cross_entropy.cu", "v.at[j] = (j == at ? p - 1 : p) * factor;", "v.at[j] = p * factor;", "softmax - onehot", GRADIENT + "cross_entropy"),
    Fault("cuda cross_entropy: sums of stale maxima", _L + "cross_entropy.cu", "            sum *= exp_for<T>(m - peak);\n", "", "the sum follows the running maximum", FORWARD + "cross_entropy"),
    Fault("cuda graph: foreign work", "cuda/runtime/graph.cu", "    if (foreign(index)) __atomic_store_n(&captures[index].spoiled, true, __ATOMIC_RELAXED);\n", "", "what another thread queues spoils a capture", "tests/cuda/test_graph.py::test_graph"),
]  # fmt: skip
