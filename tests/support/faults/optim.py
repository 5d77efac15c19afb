"""Optimizers, schedules, modules and their initial values, autograd in Python."""

from __future__ import annotations

from faults.table import Fault

_O = "xtrain/optim/"
_OPTIM = "tests/nn/test_optim.py::"
_STEPS = "tests/nn/test_adamw_steps.py::"
_RULES = "tests/nn/test_optim_rules.py::"
_MUON = "tests/nn/test_muon.py::"
_EMA = "tests/nn/test_ema.py::"
_REFUSED = "tests/ops/test_fused.py::test_what_would_read_wrong_memory_is_refused"
_PLACES = "tests/ops/test_documents.py::test_a_model_takes_positions_beside_documents_and_no_caches"
_OPTIONS = "tests/tune/test_optimizer_options.py::"
_CLIP = "tests/tune/test_qk_clip.py::"

FAULTS = [
    Fault("schedule: the first step has no rate", _O + "schedule.py", "return base * (step + 1) / warmup", "return base * step / warmup", "linear warm-up, step 0 is the first", _OPTIM + "test_schedules"),
    Fault("schedule: the end of the warm-up", _O + "schedule.py", "    if step < warmup:\n", "    if step <= warmup:\n", "from `base` behind the warm-up", _RULES + "test_edges_of_schedules"),
    Fault("schedule: the end", _O + "schedule.py", "progress = min(1.0, (step - begin) / max(1, total - begin))", "progress = (step - begin) / max(1, total - begin)", "steps after total keep the last value", _RULES + "test_edges_of_schedules"),
    Fault("schedule: from the first step", _O + "schedule.py", "(step - begin) / max(1, total - begin))", "step / max(1, total))", "from base behind the warm-up to final at total", _OPTIM + "test_schedules"),
    Fault("schedule: to zero", _O + "schedule.py", "return final + (base - final) * remaining", "return base * remaining", "to `final` at step total", _RULES + "test_edges_of_schedules"),
    Fault("scheduler: its first step", _O + "schedule.py", "        self.last_epoch = last_epoch\n        self.step()\n", "        self.last_epoch = last_epoch + 1\n", "the constructor sets the rate of step 0", _RULES + "test_a_scheduler_sets_the_rate_of_its_step"),
    Fault("scheduler: goes on one late", _O + "schedule.py", 'self.last_epoch = state_dict["last_epoch"] - 1', 'self.last_epoch = state_dict["last_epoch"]', "goes on from a state_dict", _RULES + "test_a_scheduler_sets_the_rate_of_its_step"),
    Fault("sgd: momentum before the first", _O + "sgd.py", 'buffer = state["momentum_buffer"] = grad.detach().clone()', 'buffer = state["momentum_buffer"] = grad.detach() * (1.0 - group["dampening"])', "the buffer starts as the first gradient", _RULES + "test_sgd_follows_its_formula"),
    Fault("sgd: a buffer that is the gradient", _O + "sgd.py", "= grad.detach().clone()", "= grad.detach()", "the buffer has memory of its own", _RULES + "test_a_buffer_has_memory_of_its_own"),
    Fault("sgd: nesterov", _O + "sgd.py", 'grad = grad + buffer * momentum if group["nesterov"] else buffer', "grad = buffer", "g + momentum * b if nesterov", _RULES + "test_sgd_follows_its_formula"),
    Fault("sgd: decay of the new parameter", _O + "sgd.py", "grad = grad + param.detach() * weight_decay", "grad = grad + grad * weight_decay", "g += weight_decay * p", _RULES + "test_sgd_follows_its_formula"),
    Fault("sgd: an edited option", _O + "sgd.py", "        for group in self.param_groups:  # which may have been edited\n            self._check(group)\n", "", "options are checked before anything changes", _OPTIM + "test_an_edited_option_of_sgd_is_checked_before_anything_changes"),
    Fault("adamw: options of a group", _O + "adamw.py", 'group["eps"], self._decay(group)]', 'group["eps"], self.defaults["weight_decay"]]', "each group has its own options", _OPTIM + "test_groups_and_skipped_parameters"),
    Fault("adamw: a stale rate", _O + "optimizer.py", "if known is not None and known[0] == lr:", "if known is not None:", "an edited rate counts from the next step on", _STEPS + "test_every_queued_step_has_its_own_learning_rate " + _RULES + "test_groups_have_rates_of_their_own"),
    Fault("adamw: no masters", _O + "adamw.py", "        if param.dtype in _16_BIT:\n            state", "        if param.dtype == _C.float16:\n            state", "16-bit parameters get a master", _OPTIM + "test_bfloat16_keeps_masters"),
    Fault("adamw: moments of float64", _O + "adamw.py", 'loaded[name] = loaded[name].to(wide)', "pass", "moments are float32", _RULES + "test_moments_of_another_dtype_are_converted"),
    Fault("adamw: a master that is not there", _O + "adamw.py", '        if param.dtype in _16_BIT and "master" not in loaded:\n', '        if param.dtype == "none" and "master" not in loaded:\n', "a state without masters gets them", _RULES + "test_moments_of_another_dtype_are_converted"),
    Fault("adamw: an option that is none", _O + "adamw.py", "        for group in self.param_groups:  # which may have been edited\n            self._check(group)\n", "", "options are checked before anything changes", _STEPS + "test_an_edited_learning_rate_is_checked_before_anything_changes"),
    Fault("optimizer: a parameter twice", _O + "optimizer.py", "if len({id(param) for param in params} | self._seen) != len(params) + len(self._seen):", "if len({id(param) for param in params}) != len(params):", "parameters are distinct, over all groups", _RULES + "test_a_parameter_of_two_groups_is_refused"),
    Fault("optimizer: zeros instead of None", _O + "optimizer.py", "                if set_to_none:\n", "                if not set_to_none:\n", "drops all gradients, or fills them with zeros", _RULES + "test_zero_grad_drops_or_fills"),
    Fault("optimizer: states are shared", _O + "optimizer.py", "value = value.detach().to(param.device).clone()", "value = value.detach().to(param.device)", "tensors are copied", _RULES + "test_a_loaded_state_has_memory_of_its_own"),
    Fault("optimizer: half a load", _O + "optimizer.py", "            self._check({**group, **options[-1]})\n", "            group.update(options[-1])\n            self._check(group)\n", "then nothing has changed", _RULES + "test_a_state_that_is_refused_changes_nothing"),
    Fault("muon: no nesterov", "csrc/cpu/optimizer/muon.c", "return nesterov ? rest * g + momentum * *next : *next;", "return *next;", "u = nesterov ? (1 - momentum) g + momentum b : b", _MUON + "test_steps_follow_the_published_formula"),
    Fault("muon: a polynomial without its diagonal", "csrc/cpu/optimizer/muon.c", "out[diagonal] = STORE(at_diagonal);", "(void)at_diagonal;", "x = (a I + b A + c A A) x", _MUON + "test_steps_follow_the_published_formula"),
    Fault("muon: a guard that counts for nothing", "csrc/cpu/optimizer/muon.c", "numel(p) == 0 || (p->guard && !isfinite(*p->guard))", "numel(p) == 0", "a bad guard changes nothing", _MUON + "test_a_step_that_its_guard_stops_changes_nothing"),
    Fault("muon: decay of the adjusted rate", "csrc/cpu/optimizer/muon.c", "fma(*p->lr, p->weight_decay, 0.0)", "fma(*p->lr * p->ratio, p->weight_decay, 0.0)", "p (1 - lr weight_decay)", _MUON + "test_steps_follow_the_published_formula"),
    Fault("muon: the ratio of columns", _O + "muon.py", "rows / max(cols, 1)", "cols / max(rows, 1)", "sqrt(max(1, rows / cols))", _MUON + "test_steps_follow_the_published_formula"),
    Fault("muon: batches without an end", _O + "muon.py", "max(_MOST_ELEMENTS // max(params[0].numel(), 1), 1)", "max(_MOST_ELEMENTS, 1)", "scratch is that of the matrices of one call", _MUON + "test_large_batches_are_cut"),
    Fault("chain: an error between two optimizers", _O + "chained.py", "return self._begun > 1 or any(", "return any(", "interrupted: some parameters had taken the step", _MUON + "test_an_error_between_two_batches_is_known"),
    Fault("muon: a matrix of two ranks", "xtrain/distributed/bank.py", "owners[i] = min(range(leaves), key=filled.__getitem__)", "owners[i] = i % leaves", "the largest first, where the most room is", "tests/distributed/test_same_bits.py::test_a_matrix_of_muon_lies_on_one_rank_whole"),
    Fault("qk_clip: negative logits", _O + "qk_clip.py", "self._tau / m if self._tau < m < math.inf else 1.0", "self._tau / max(m, self._tau) if m > 0 else self._tau / m", "heads at tau or below stay as they are", _CLIP + "test_logits_that_scale_nothing"),
    Fault("qk_clip: keys that are shared", _O + "qk_clip.py", "alone = layer.heads == layer.kv_heads", "alone = True", "keys of several heads are left alone", _CLIP + "test_heads_that_are_too_large_are_scaled"),
    Fault("qk_clip: pairs that nobody sees", _O + "qk_clip.py", "_C.where(seen, scores, -math.inf)", "scores", "of all pairs that attention sees", _CLIP + "test_the_largest_logit"),
    Fault("qk_clip: documents of the first row", _O + "qk_clip.py", "documents[b : b + 1]", "documents[:1]", "of its own document", _CLIP + "test_the_largest_logit"),
    Fault("qk_clip: the masters stay", _O + "qk_clip.py", 'parameter.copy_(state["master"].mul_(factor))', 'parameter.copy_(state["master"] * factor)', "masters are scaled, too", _CLIP + "test_heads_that_are_too_large_are_scaled"),
    Fault("qk_clip: a piece of another rank", "xtrain/distributed/step.py", "begin = owned.begin + segment.begin - bank.offsets[segment.parameter]", "begin = 0", "a rank scales its piece of a parameter", _CLIP + "test_the_bits_do_not_depend_on_the_number_of_processes"),
    Fault("qk_clip: the logits of this rank", "xtrain/train/step.py", "_largest(state.team.gather(_largest(found)))", "_largest(found)", "the largest over all ranks", _CLIP + "test_the_bits_do_not_depend_on_the_number_of_processes"),
    Fault("qk_clip: every step", "xtrain/train/step.py", "(self._state.step + 1) % self._state.config.optim.qk_clip_every == 0", "self._state.step >= 0", "every so many steps", _CLIP + "test_a_step_of_a_run_is_that_of_the_optimizer_and_then_the_clip"),
    Fault("ema: from the initial parameters", "csrc/cpu/optimizer/ema.c", "(1 - p->decay) / (1 - xt_power(p->decay, *p->step + 1))", "(1 - p->decay)", "weights decay^age add up to 1", _EMA + "test_weights_fall_with_age_and_add_up_to_one"),
    Fault("muon: those without a gradient", _O + "muon.py", "                if param.grad is not None:\n", "                if True:\n", "updates every parameter that has a gradient", _MUON + "test_a_parameter_without_a_gradient_stays"),
    Fault("muon: state between two calls", _O + "muon.py", "for call in list(self._calls(guard)):", "for call in self._calls(guard):", "state is made before anything changes", _MUON + "test_state_is_made_before_anything_changes"),
    Fault("chain: no guard", _O + "chained.py", "            one.step(**options)\n", "            one.step()\n", "guard: see AdamW.step and Muon.step", _MUON + "test_a_guard_stops_all_optimizers_of_a_chain"),
    Fault("ema: a count that a reset keeps", _O + "ema.py", "        self._steps = {device:", "        self._steps = self._steps or {device:", "forget all updates", _EMA + "test_a_reset_forgets_and_a_loaded_state_is_a_copy"),
    Fault("ema: a loaded state that is shared", _O + "ema.py", "            self.averages[param].copy_(average)", "            self.averages[param] = average", "whose tensors are copied", _EMA + "test_a_reset_forgets_and_a_loaded_state_is_a_copy"),
    Fault("options: the last pattern counts", "xtrain/train/parts.py", "            factors.setdefault(id(parameter), factor)", "            factors[id(parameter)] = factor", "the first pattern that matches counts", _OPTIONS + "test_the_first_pattern_counts_and_averages_are_of_what_is_trained"),
    Fault("options: averages of what is frozen", "xtrain/train/trainer.py", "            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]\n            self.ema", "            trained = list(self.model.parameters())\n            self.ema", "the averages of what is trained", _OPTIONS + "test_the_first_pattern_counts_and_averages_are_of_what_is_trained"),
    Fault("options: wsd falls for a quarter", "xtrain/train/config.py", "return config.steps // 5 if", "return config.steps // 4 if", "a fifth of the steps", _OPTIONS + "test_the_first_pattern_counts_and_averages_are_of_what_is_trained"),
    Fault("emergency: NaN in a momentum buffer", "xtrain/train/checkpoints.py", '"exp_avg_sq", "momentum_buffer", "master"', '"exp_avg_sq", "master"', "nothing with NaN is saved", _OPTIONS + "test_the_first_pattern_counts_and_averages_are_of_what_is_trained"),
    Fault("judge: silence after the end", "xtrain/distributed/judge.py", "if rank not in self._finished and now - at", "if now - at", "others may go on alone", "tests/distributed/test_judge.py::test_a_rank_that_has_finished_may_be_silent"),
    Fault("add_layer_norm: another dtype", "csrc/ops/layers/add_layer_norm.c", '    XT_TRY(xt_check_like(c->op, "input", given, "residual", other));\n', "", "input, residual, weight and bias all of one dtype", _REFUSED),
    Fault("swiglu_mlp: another up", "csrc/ops/gemm/swiglu_mlp.c", '    XT_CHECK(xt_check_shape(c->op, "up", c->arg[UP].tensor, 2, gate->shape));\n', "", "gate and up [F, C]", _REFUSED),
    Fault("muon_: float64 for float32", "csrc/ops/optimizer/muon.c", "if (!xt_dtype_is_float(x) || xt_dtype_accumulator(x) != xt_dtype_accumulator(first->dtype))", "if (!xt_dtype_is_float(x))", "ns_dtype has the parameters' accumulator", _REFUSED),
    Fault("ema_: a count of another dtype", "csrc/ops/optimizer/ema.c", '    XT_TRY(xt_check_dtype(c->op, "step", step, XT_INT64));\n', "", "step: an int64 scalar", _REFUSED),
    Fault("attention: a window that is not causal", "csrc/ops/attention/scaled_dot_product_attention.c", "if (c->arg[8].given && !c->arg[3].b)", "if (false)", "window, with is_causal", _REFUSED),
    Fault("documents: positions of the caller's", "xtrain/models/causal_lm.py", "positions_in(documents) if positions is None else positions", "positions_in(documents)", "positions, where they are None, begin anew", _PLACES),
    Fault("documents: with caches", "xtrain/models/causal_lm.py", "        if caches is not None:\n            raise ValueError(f\"{self.config.family}: documents", "        if False:\n            raise ValueError(f\"{self.config.family}: documents", "without caches", _PLACES),
    Fault("nonfinite: without documents", "xtrain/train/nonfinite.py", "model(ids) if documents is None else model(ids, documents=documents)", "model(ids)", "run the model again", _PLACES),
    Fault("ema: a parameter twice", _O + "ema.py", "        if len({id(param) for param in self.params}) != len(self.params):", "        if False:", "params are distinct", _EMA + "test_bad_input_is_one_sentence"),
    Fault("ema: half a load", _O + "ema.py", '            need_tensors("EMA", **{"every average": average})\n', "", "then nothing has changed", _EMA + "test_a_state_that_is_refused_changes_nothing"),
    Fault("muon: a dtype in a group", _O + "muon.py", 'group["ns_dtype"] = group["ns_dtype"].name', "pass", "a state_dict is saved as JSON", _MUON + "test_ns_dtype_is_a_dtype_or_its_name_in_every_group"),
    Fault("documents: rows past int32", "xtrain/tensors/documents.py", "if total > _MOST_TOKENS:", "if False:", "ValueError for rows that int32 cannot count", "tests/ops/test_documents.py::test_bounds_that_are_refused"),
    Fault("schedule: a fall behind the end", _O + "schedule.py", "    if begin >= total:  # no", "    if begin > total:  # no", "where no step is left to fall in, that is base", _OPTIM + "test_schedules"),
    Fault("ema: a guard that counts for nothing", "csrc/cpu/optimizer/ema.c", "    if (p->guard && !isfinite(*p->guard)) return XT_OK;\n", "", "a bad guard changes nothing", _EMA + "test_a_guard_stops_an_update"),
    Fault("z-loss: not in the gradient", "csrc/cpu/layers/cross_entropy.c", "return z > 0 ? 1 + 2 * (ACC)z * lse : 1;", "return z > 0 ? 1 + (ACC)z * lse : 1;", "exp(..) grows by 1 + 2 z lse", "tests/ops/test_ops.py -k 'cross_entropy and z_loss'"),
    Fault("schedule: wsd falls at once", _O + "schedule.py", "        if step < begin:\n            return base\n", "        begin = warmup\n", "stays at base, and falls in the last steps", _OPTIM + "test_schedules"),
    Fault("clip: gradients that are not there", "xtrain/nn/utils.py", "if grad is not None]", "]", "those without a gradient are passed over", _OPTIM + "test_clip"),
    Fault("clip: error_if_nonfinite clips first", "xtrain/nn/utils.py", "    norm = _C.clip_grad_norm_(grads, math.inf)\n", "    norm = _C.clip_grad_norm_(grads, max_norm)\n", "a norm that is not finite changes nothing", _RULES + "test_an_error_of_clipping_changes_nothing"),
    Fault("init: fan_in of the rows", "xtrain/nn/init.py", "fan_in = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0", "fan_in = tensor.shape[0]", "bound = sqrt(6 / ((1 + a^2) fan_in))", _RULES + "test_kaiming_bounds"),
    Fault("init: the slope", "xtrain/nn/init.py", "math.sqrt(6.0 / ((1.0 + a * a) * fan_in))", "math.sqrt(6.0 / fan_in)", "bound = sqrt(6 / ((1 + a^2) fan_in))", _RULES + "test_kaiming_bounds"),
    Fault("init: recorded", "xtrain/nn/init.py", "@no_grad()\ndef uniform_", "def uniform_", "parameters are filled without recording", _RULES + "test_kaiming_bounds"),
    Fault("muon: no steps", "xtrain/optim/muon.py", "or not 0 <= steps <= _MOST_STEPS", "or not 0 < steps <= _MOST_STEPS", "ns_steps in [0, 99]", "tests/nn/test_muon.py::test_without_steps_of_the_iteration_the_direction_is_the_normalised_one"),
    Fault("muon: meta is a GPU", "xtrain/optim/muon.py", "in (\"cpu\", \"meta\", \"meta:0\")", "in (\"cpu\",)", "meta:0 stands for a CPU", "tests/nn/test_muon.py::test_meta_stands_for_a_cpu_or_a_gpu"),
    Fault("ema: any number of steps", "xtrain/optim/ema.py", "not 0 <= step < _C.MOST_STEPS", "not 0 <= step", "step in [0, 2**40)", "tests/nn/test_ema.py::test_bad_input_is_one_sentence"),
    Fault("qk_clip: tf32 stays off", "xtrain/optim/qk_clip.py", "        _C.allow_tf32(tf32)\n", "        _C.allow_tf32(False)\n", "the setting of TF32 stays", "tests/tune/test_qk_clip.py::test_measuring_leaves_settings_as_they_were"),
    Fault("qk_clip: TF32 logits", "xtrain/optim/qk_clip.py", "    _C.allow_tf32(False)\n    try:", "    try:", "products are of float32 values", "tests/tune/test_qk_clip.py::test_measuring_leaves_settings_as_they_were"),
    Fault("qk_clip: a hook is lost", "xtrain/optim/qk_clip.py", "            _C.set_call_hook(before)\n", "            _C.set_call_hook(None)\n", "a hook that was there stays", "tests/tune/test_qk_clip.py::test_measuring_leaves_settings_as_they_were"),
    Fault("qk_clip: calls are not counted", "xtrain/optim/qk_clip.py", "if [one.numel() for one in found] != [layer.heads for layer in self._layers]:", "if len(found) < len(self._layers):", "RuntimeError when layers do not call it once each", "tests/tune/test_qk_clip.py::test_measuring_leaves_settings_as_they_were"),
    Fault("qk_clip: infinite logits are counted", "xtrain/optim/qk_clip.py", "return sum(self._tau < m < math.inf for", "return sum(self._tau < m for", "heads that step scales", "tests/tune/test_qk_clip.py::test_logits_that_scale_nothing"),
]  # fmt: skip
