"""The tape: records, the walk back, hooks, what several threads share."""

from __future__ import annotations

from faults.table import Fault

_B = "csrc/autograd/backward.c"
_T = "csrc/autograd/tape.c"
_TEST = "tests/core/test_autograd.py::"
_FUNCTION = "tests/core/test_function.py::"
_RULES = "tests/core/test_tape_rules.py::"
_AGAIN = "tests/core/test_recompute.py::"

FAULTS = [
    Fault(
        "walk: any order", _B, "if (heap[child].node->sequence <= last.node->sequence) break;", "if (heap[child].node->sequence >= last.node->sequence) break;",
        "the youngest reached node first", _TEST + "test_wide_and_deep_graphs",
    ),
    Fault(
        "walk: a sum that others see is changed", _B, "return collect(sum, gradient, *sum && only_ours(*sum));", "return collect(sum, gradient, true);",
        "added in place only if nobody else sees the sum", _TEST + "test_upstream_gradient_is_not_written_to",
    ),
    Fault(
        "walk: memory of a library is ours", _B, "return xt_storage_is_own(tensor->storage) && __atomic_load_n(&tensor->references", "return __atomic_load_n(&tensor->references",
        "memory that was lent is not changed", _RULES + "test_an_array_that_came_as_gradient_is_not_written",
    ),
    Fault(
        "walk: views count as ours", _B, "           __atomic_load_n(&tensor->storage->references, __ATOMIC_ACQUIRE) == 1;", "           true;",
        "memory that another tensor shows is not changed", _RULES + "test_memory_that_another_tensor_shows_is_not_written",
    ),
    Fault(
        "grad: the memory of what came first", _B, "if (!only_ours(gradient) || !xt_view_is_contiguous(&gradient->view)) return xt_tape_math.copy(gradient, sum);",
        "if (!xt_view_is_contiguous(&gradient->view)) return xt_tape_math.copy(gradient, sum);", ".grad gets memory of its own",
        _RULES + "test_a_gradient_has_memory_of_its_own",
    ),
    Fault(
        "grad: a gradient with stride 0", _B, "if (!only_ours(gradient) || !xt_view_is_contiguous(&gradient->view)) return xt_tape_math.copy(gradient, sum);",
        "if (!only_ours(gradient)) return xt_tape_math.copy(gradient, sum);", ".grad is dense", _RULES + "test_a_gradient_is_dense",
    ),
    Fault(
        "grad: a view of itself", _B, "if (gradient->storage != old->storage) return xt_tape_math.add(old, gradient, true, sum);",
        "return xt_tape_math.add(old, gradient, true, sum);", "a gradient that is a view of .grad is read first",
        _RULES + "test_a_gradient_that_is_a_view_of_grad_is_read_before_it_is_written",
    ),
    Fault(
        "accumulator: hooks see a part", _B, "if (__atomic_load_n(&grad->hooks, __ATOMIC_RELAXED) || !__atomic_load_n(&grad->gradient, __ATOMIC_RELAXED)) return NULL;",
        "if (!__atomic_load_n(&grad->gradient, __ATOMIC_RELAXED)) return NULL;", "a leaf's hooks get the whole gradient of a backward",
        _RULES + "test_hooks_of_a_leaf_see_what_products_add",
    ),
    Fault(
        "accumulator: no version", _B, "    if (gradient) __atomic_add_fetch(&gradient->storage->version, 1, __ATOMIC_RELAXED);\n", "",
        "a product that adds to .grad changes it in place", _RULES + "test_a_product_that_adds_to_a_gradient_is_a_change_in_place",
    ),
    Fault(
        "accumulator: the adder stays", _B, "walk->adding[i].grad->adder = 0;", "walk->adding[i].grad->adder += 0;",
        "a thread is the adder until the rule has returned", _RULES + "test_threads_add_to_one_gradient_in_turn",
    ),
    Fault(
        "saved: versions are not looked at", _B, "    if (now == saved->version) return XT_OK;", "    if (now >= saved->version) return XT_OK;",
        "a saved tensor that was changed in place is refused", _TEST + "test_changed_saved_tensor_is_refused",
    ),
    Fault(
        "freed: a second backward runs", _B, "    if (consume) __atomic_store_n(&node->freed, true, __ATOMIC_RELAXED);\n", "",
        "a graph that was freed is refused", _TEST + "test_retain_graph_and_freed_graph",
    ),
    Fault(
        "freed: hooks run first", _B, "    if (__atomic_load_n(&node->freed, __ATOMIC_RELAXED)) XT_TRY(refuse_freed(node)); /* before its hooks run */\n", "",
        "a graph that was freed runs no hook", _RULES + "test_a_freed_graph_runs_no_hook",
    ),
    Fault(
        "a rule that failed eats what it saved", _B, "bool undo = status != XT_OK && !walk->retain_graph && !walk->handed_over;", "bool undo = false;",
        "a backward that failed can be tried again", _TEST + "test_a_rule_that_fails_can_be_tried_again",
    ),
    Fault(
        "saved tensors stay", _B, "for (int i = 0; i < node->saved_count; i++) xt_saved_release(&walk->saved[i]);", "memset(walk->saved, 0, sizeof walk->saved);", "a backward frees its graph as it goes",
        _RULES + "test_a_backward_frees_what_it_has_used",
    ),
    Fault(
        "unused outputs are NULL", _B, "        if (!dout[i]) {", "        if (!dout[i] && i == 0) {", "an output that nobody used arrives as zeros",
        _TEST + "test_split_with_unused_pieces",
    ),
    Fault(
        "leaves: the last one gets nothing", _B, "    for (int64_t i = 0; i < walk->leaves.count; i++) XT_CHECK(finish(&walk->leaves.items[i]));", "    for (int64_t i = 0; i + 1 < walk->leaves.count; i++) XT_CHECK(finish(&walk->leaves.items[i]));",
        "each leaf gets its gradient", _TEST + "test_accumulation_and_zero",
    ),
    Fault(
        "ready: a user's rule is forgotten", "csrc/autograd/ready.c", "if (pass.hidden < ready->item[i].oldest)", "if (false)",
        "a user's rule may add to every leaf", "tests/distributed/test_ready.py::test_what_a_recomputation_adds_comes_first",
    ),
    Fault(
        "ready: one node too early", _B, "ready->item[ready->told].oldest > sequence", "ready->item[ready->told].oldest >= sequence",
        "a gradient is complete when the oldest node has run", "tests/distributed/test_ready.py::test_gradients_are_complete",
    ),
    Fault(
        "ready: not after the others", "csrc/autograd/ready.c", "if (!made || made->after-- > 0) return;", "if (!made) return;", "after: backwards that come before",
        "tests/distributed/test_ready.py::test_the_backward_that_was_meant",
    ),
    Fault(
        "walk: recording inside", _B, "    xt_set_grad_mode(false); /* gradients of gradients are not recorded */\n", "",
        "gradients of gradients are not recorded", _RULES + "test_nothing_is_recorded_in_a_backward",
    ),
    Fault(
        "walk: the mode after an error", _B, "    xt_set_grad_mode(mode);\n    walking = walk.outer;", "    if (status == XT_OK) xt_set_grad_mode(mode);\n    walking = walk.outer;",
        "recording is as before, also after an error", _TEST + "test_hook_errors_reach_the_caller",
    ),
    Fault(
        "walk: a walk inside a walk", _B, "    walking = walk.outer;", "    walking = NULL;", "a rule may walk a graph of its own",
        _RULES + "test_a_rule_may_walk_a_graph_of_its_own",
    ),
    Fault(
        "walk: Ctrl-C waits for the end", _B, "        if (xt_interrupted()) return XT_INTERRUPTED;\n", "", "a backward answers Ctrl-C between two nodes",
        _RULES + "test_ctrl_c_ends_a_long_backward",
    ),
    Fault(
        "walk: what is under way leaks", _B, "        for (int o = 0; o < walk->heap[i].node->outputs; o++) xt_tensor_release(walk->sums[walk->heap[i].first + o]);\n", "",
        "after an error, what is still under way is dropped", _RULES + "test_an_error_in_a_backward_leaks_nothing",
    ),
    Fault(
        "retain_grad: the gradient of another", _B, "        XT_TRY(keep_gradient(output, dout[i]));\n", "        if (i == 0) XT_TRY(keep_gradient(output, dout[i]));\n",
        "retain_grad keeps .grad of any output", _RULES + "test_retained_gradients_of_all_outputs",
    ),
    Fault(
        "hooks: a removed one is called", _T, "if (!__atomic_load_n(&hooks->items[i]->removed, __ATOMIC_ACQUIRE)) status", "status",
        "a hook that another one has removed is not called", _RULES + "test_a_hook_that_another_one_removes_is_not_called",
    ),
    Fault(
        "hooks: the last one wins", _T, "        hooks->items[hooks->count++] = old->items[i];\n", "        hooks->items[hooks->count] = old->items[i];\n        hooks->count += i == 0;\n",
        "all hooks of a tensor are called, in order", _RULES + "test_hooks_are_called_in_order",
    ),
    Fault(
        "hooks: a context leaks", _T, "    hook->release(hook->context);\n    free(hook);", "    free(hook);", "a hook's callable is released",
        _RULES + "test_the_callable_of_a_hook_is_released",
    ),
    Fault(
        "hooks: a hook's history stays", _T, "    if (replacement->grad) {", "    if (replacement->grad && replacement->ndim > 8) {",
        "of what a hook returns only the values count", _TEST + "test_gradients_are_plain_values",
    ),
    Fault(
        "leaf: requires a gradient of integers", _T, "    if (!xt_dtype_is_float(tensor->dtype))\n        return xt_error", "    if (tensor->dtype == XT_BOOL)\n        return xt_error",
        "only floating point tensors can require gradients", _RULES + "test_what_is_no_float_has_no_history",
    ),
    Fault(
        "in place: recorded leaves", _T, "    if (grad_mode && xt_requires_grad(tensor))\n        return xt_error(XT_RUNTIME_ERROR,\n                        \"%s: a tensor",
        "    if (grad_mode && xt_requires_grad(tensor) && !xt_is_leaf(tensor))\n        return xt_error(XT_RUNTIME_ERROR,\n                        \"%s: a tensor",
        "a tensor that requires a gradient is not changed while recording", _TEST + "test_in_place_is_refused_while_recording",
    ),
    Fault(
        "in place: versions", _T, "    __atomic_add_fetch(&tensor->storage->version, 1, __ATOMIC_RELAXED);\n", "", "a change in place is counted",
        _TEST + "test_versions",
    ),
    Fault(
        "nodes: recursion in the release", _T, "    if (draining) return;\n    draining = true;\n    while (pending) {\n        node = pending;", "    while (pending) {\n        node = pending;",
        "a long chain does not overflow the C stack", _TEST + "test_deep_graph_in_a_thread_with_a_small_stack",
    ),
    Fault(
        "nodes: edges leak", _T, "            xt_tensor_release(node->edges[i].leaf);\n", "", "a graph is freed by counting",
        _FUNCTION + "test_graphs_do_not_keep_tensors_or_callables",
    ),
    Fault(
        "fork: the parent's adders", _T, "    generation++;\n", "", "after a fork nobody waits for a thread that does not exist",
        _RULES + "test_a_child_waits_for_no_thread_of_its_parent",
    ),
    Fault(
        "grad mode of all threads", _T, "static _Thread_local bool grad_mode = true, recompute_mode;", "static bool grad_mode = true; static _Thread_local bool recompute_mode;", "grad mode belongs to the thread",
        _TEST + "test_grad_mode_belongs_to_the_thread",
    ),
    Fault(
        "retain: the keeper of a dead tensor", _T, "    if (grad->node && grad->retain) {", "    if (grad->node && grad->retain && grad->output > 8) {", "a tensor that is gone keeps no gradient",
        _RULES + "test_retain_grad_of_a_tensor_that_is_gone",
    ),
    Fault(
        "call: an op that returns its input", "csrc/ops/call.c", "if (xt_grad_of(call->out[i])) {", "if (xt_grad_of(call->out[i]) && i > 8) {", "an output that is an input becomes an alias",
        _RULES + "test_an_op_that_returns_its_input",
    ),
    Fault(
        "call: text arguments are borrowed", "csrc/ops/call.c", "kept->args[i].s = memcpy(kept->text + used, call->arg[i].s, length);", "used += 0;",
        "a backward has copies of text arguments", _RULES + "test_text_arguments_outlive_the_call",
    ),
    Fault(
        "recompute: what was changed", _T, "if (!storage->producer || __atomic_load_n(&storage->version, __ATOMIC_RELAXED)) return NULL;", "if (!storage->producer) return NULL;",
        "nothing computes again what was changed in place", _AGAIN + "test_an_output_that_was_changed_in_place_is_kept",
    ),
    Fault(
        "recompute: the first output for all", _T, "    tensor->storage->produced = index;\n", "", "a slot names the output that it needs", _AGAIN + "test_the_output_is_computed_again_with_the_same_bits",
    ),
    Fault(
        "recompute: the beginning of the output", _B, "view.data = (char *)storage->data + made->offset;", "view.data = storage->data;", "a slot names a view of the output",
        _AGAIN + "test_views_of_the_output",
    ),
    Fault(
        "recompute: once for each who asks", _B, "    if (!again_find(&walk->again, sequence)) XT_CHECK", "    XT_CHECK", "several rules may ask for one run",
        _AGAIN + "test_one_run_serves_all_who_ask",
    ),
    Fault(
        "recompute: kept to the end", _B, "    if (node->recompute) again_forget(&walk->again, node->sequence);\n", "", "until the producer's own rule runs",
        _AGAIN + "test_it_is_kept_until_its_own_rule_runs",
    ),
    Fault(
        "recompute: the slots of the rule that asks", _B, "    memcpy(walk->saved, asking, sizeof asking);\n", "", "a producer's slots go in front of those of the rule that asks",
        _AGAIN + "test_the_output_is_computed_again_with_the_same_bits",
    ),
    Fault(
        "recompute: a slot after an error", _B, "            node->saved[i].made = saved->made;\n", "", "a backward that failed can be tried again",
        _AGAIN + "test_without_memory_a_backward_of_its_own_can_be_tried_again",
    ),
    Fault(
        "recompute: a graph that was freed", _B, "    bool freed = node->freed;\n", "    bool freed = node->freed && consume;\n", "a producer that was freed is refused",
        _AGAIN + "test_a_freed_graph_says_so",
    ),
    Fault(
        "recompute: the mode of all threads", _T, "static _Thread_local bool grad_mode = true, recompute_mode;", "static _Thread_local bool grad_mode = true; static bool recompute_mode;",
        "the mode belongs to the thread", _AGAIN + "test_the_mode_belongs_to_the_thread_and_ends_with_the_block",
    ),
    Fault(
        "recompute: chains without an end", _T, "return from->recompute_depth < MOST_DEPTH ? from : NULL;", "return from;", "computing again is a recursion with an end",
        _AGAIN + "test_a_long_chain_in_a_thread_with_a_small_stack",
    ),
    Fault(
        "Function: a gradient of another dtype", "csrc/py/tensor/autograd.c", "if (same && value->dtype == like.dtype && xt_device_equal", "if (same && xt_device_equal",
        "a gradient has the dtype of its input", _RULES + "test_a_rule_returns_the_dtype_of_its_input",
    ),
    Fault(
        "Function: the callable stays", "csrc/py/tensor/autograd.c", "if (status == XT_OK && !keep) Py_CLEAR(rule->callable);", "",
        "a backward without retain_graph drops what the context saved", _RULES + "test_a_backward_drops_what_a_context_has_saved",
    ),
    Fault(
        "columns: of memory that is gone", "csrc/ops/elementwise/joined.c", "        xt_storage_retain(begun->of);\n", "        xt_storage_retain(begun->of);\n        xt_storage_release(begun->of);\n        begun->of = NULL;\n",
        "a block is begun for memory that is still there", "tests/nn/test_columns.py::test_a_block_is_begun_for_memory_that_is_still_there",
    ),
    Fault(
        "ready: a leaf twice", "csrc/autograd/ready.c", "if (item[-1].leaf == item->leaf)", "if (false)", "leaves are distinct",
        "tests/distributed/test_ready.py::test_wrong_arguments",
    ),
    Fault(
        "ready: a thread keeps its callable", "csrc/autograd/ready.c", "pthread_key_create(&pending, drop)", "pthread_key_create(&pending, NULL)",
        "a thread that ends lets its callable go", "tests/distributed/test_ready.py::test_what_no_backward_comes_for_is_let_go",
    ),
    Fault(
        "columns: given twice", "csrc/ops/elementwise/joined.c", "if (begun->begin[i] < more->end[j] && more->begin[j] < begun->end[i]) return false;", "if (begun->end[i] < 0) return false;",
        "a column of a gradient's block is given once", _RULES + "test_gradients_of_one_column_group_have_memory_of_their_own",
    ),
    Fault(
        "columns: all or none", "csrc/ops/elementwise/joined.c", "XT_TRY(xt_empty_like_columns(1, &like[i], &out[i]));", "XT_TRY(xt_empty_like(like[i], &out[i]));",
        "columns among dense heads get a block", "tests/nn/test_columns.py -k beside_those_of_rotated_heads",
    ),
    Fault(
        "columns: one head has a stride", "csrc/ops/elementwise/joined.c", "(t->shape[d - 1] == 1 || t->strides[d - 1] == dim)", "t->strides[d - 1] == dim",
        "the stride of a single head is nothing", "tests/nn/test_columns.py -k beside_those_of_rotated_heads",
    ),
    Fault(
        "columns: rotated heads elsewhere", "csrc/ops/layers/rope.c", "true, place, &din[0]);", "true, NULL, &din[0]);",
        "dx of columns is columns", "tests/nn/test_columns.py -k beside_those_of_rotated_heads",
    ),
    Fault(
        "columns: any view is kept", "csrc/ops/layers/rope.c", "c->recomputed || xt_is_columns(x) ? x : NULL", "true ? x : NULL",
        "other views are not kept", "tests/nn/test_columns.py::test_rope_keeps_columns_alone",
    ),
    Fault(
        "columns: a block for few", "csrc/ops/elementwise/joined.c", "2 * (place.end[0] - place.begin[0]) >= place.row;", "place.row > 0;",
        "a gradient of less than half a row begins no block", "tests/nn/test_columns.py::test_few_rotated_columns_begin_no_block",
    ),
    Fault(
        "columns: a place that must not change", "csrc/ops/layers/rope.c", "    return rotate(dout[0], positions, xt_rope_period(arg, 1, dy)",
        "    XtTensor *seen;\n    XT_CHECK(xt_node_saved(n, 1, &seen));\n    return rotate(dout[0], positions, xt_rope_period(arg, 1, dy)",
        "elements may have changed since", "tests/nn/test_columns.py::test_heads_may_change_after_their_rotation",
    ),
    Fault("autograd: 4096", "csrc/py/tensor/autograd.c", "PyTuple_GET_SIZE(items) > 4096", "PyTuple_GET_SIZE(items) >= 4096", "at most 4096 entries", "tests/core/test_autograd_clauses.py::test_so_many_inputs_and_outputs"),
    Fault("autograd: gradient number", "csrc/py/tensor/autograd.c", '"%s: gradient %d of backward must be a Tensor or None, got %.100s", node->name, i,', '"%s: gradient %d of backward must be a Tensor or None, got %.100s", node->name, i + 1,', "gradients count from 0", "tests/core/test_autograd_clauses.py::test_gradients_of_a_custom_operation_are_numbered_from_0"),
    Fault("autograd: subclass leaf", "csrc/py/tensor/autograd.c", "if (status == XT_OK && bound->arg[2].b) status = xt_set_requires_grad(alias, true);", "if (status == XT_OK && (bound->arg[2].b || xt_requires_grad(bound->arg[1].tensor))) status = xt_set_requires_grad(alias, true);", "a leaf of its own", "tests/core/test_autograd_clauses.py::test_an_instance_of_a_subclass_is_a_leaf_of_its_own"),
    Fault("autograd: node freed", "csrc/py/tensor/autograd.c", "if (status == XT_OK && !keep) Py_CLEAR(rule->callable);", "if (!keep) Py_CLEAR(rule->callable);", "dropped when it has run", "tests/core/test_autograd_clauses.py::test_a_rule_that_failed_can_run_again"),
    Fault("autograd: retaining restored", "csrc/py/tensor/autograd.c", "    retaining = outer;\n", "", "the inner backward's retain_graph is its own", "tests/core/test_autograd_clauses.py::test_a_backward_inside_another_keeps_its_graph_and_no_other"),
    Fault("autograd: alias of recorded", "csrc/py/tensor/autograd.c", "    return xt_grad_of(tensor) != NULL;\n}\n\nstatic XtStatus new_node", "    return xt_grad_of(tensor) != NULL && xt_grad_of(tensor)->node != NULL;\n}\n\nstatic XtStatus new_node", "an output with a grad record comes back as an alias", "tests/core/test_autograd_clauses.py::test_an_output_that_is_a_leaf_comes_back_as_an_alias"),
]  # fmt: skip
