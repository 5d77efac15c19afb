"""Faults of what is asked of a process, of the device "meta", and of hyper-connections."""

from __future__ import annotations

from .table import FORWARD, GRADIENT, Fault

_R, _N, _H = "csrc/py/runtime/", "xtrain/nn/mhc.py", "csrc/cpu/mhc/"
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
]  # fmt: skip
