"""Modules, the model, autograd in Python and what xtrain.testing says."""

from __future__ import annotations

from faults.table import Fault

_NN = "tests/nn/test_nn.py::"
_MODEL = "tests/nn/test_model.py::"
_FUNCTION = "tests/core/test_function.py::"
_RULES = "tests/nn/test_module_rules.py::"

FAULTS = [
    Fault("linear: a bias of the outputs", "xtrain/nn/layers.py", "bound = 1.0 / math.sqrt(self.in_features)", "bound = 1.0 / math.sqrt(self.out_features)", "uniform in [-1/sqrt(in), 1/sqrt(in))", _RULES + "test_a_bias_starts_within_its_bound"),
    Fault("norm: the default eps", "xtrain/nn/layers.py", "if weight is None or eps is None or len(self.normalized_shape) != 1:", "eps = 1e-6 if eps is None else eps\n        if weight is None or len(self.normalized_shape) != 1:", "eps None is the machine epsilon of x's dtype", _RULES + "test_the_eps_of_a_norm_is_that_of_the_dtype"),
    Fault("joined: a bias is lost", "xtrain/nn/layers.py", "if not is_stock(layer, Linear) or layer.bias is not None:", "if not is_stock(layer, Linear):", "joined without bias only", _RULES + "test_a_bias_is_not_lost_in_a_joined_product"),
    Fault("module: hooks of a copy of the list", "xtrain/nn/module.py", "                if changed is not None:\n                    result = changed\n", "                if changed:\n                    result = changed\n", "what a hook returns, if not None, replaces the result", _RULES + "test_what_a_forward_hook_returns_replaces_the_result"),
    Fault("module: a state that does not fit", "xtrain/nn/module.py", "            if tuple(value.shape) != tuple(tensor.shape):\n                raise ValueError(\n                    f\"load_state_dict: {key}", "            if value.numel() != tensor.numel():\n                raise ValueError(\n                    f\"load_state_dict: {key}", "every shape must fit", _RULES + "test_a_state_of_another_shape_is_refused"),
    Fault("module: buffers that are not kept", "xtrain/nn/module.py", "                if (module._buffers or {})[name]:\n", "                if name in (module._buffers or {}):\n", "persistent buffers are part of state_dict", _RULES + "test_buffers_of_a_state"),
    Fault("module: shared parameters twice", "xtrain/nn/module.py", "if not remove_duplicate or id(tensor) not in seen:", "if not remove_duplicate or tensor is not None:", "a parameter that is shared comes once", _RULES + "test_a_shared_parameter_comes_once"),
    Fault("module: apply to parents first", "xtrain/nn/module.py", "        for module in self.children():\n            module.apply(function)\n        function(self)\n", "        function(self)\n        for module in self.children():\n            module.apply(function)\n", "children first", _RULES + "test_apply_reaches_children_first"),
    Fault("module: train of this one alone", "xtrain/nn/module.py", '        for module in self.modules():\n            object.__setattr__(module, "training", bool(mode))\n', '        for module in (self, *self.children()):\n            object.__setattr__(module, "training", bool(mode))\n', "here and below", _RULES + "test_training_mode_reaches_all_below"),
    Fault("grad mode: decorators of a generator", "xtrain/autograd.py", "        _set_grad_enabled(self._previous[-1])  # a decorator acts in the calls, not where it stands\n", "", "a decorator acts in the calls", _RULES + "test_a_decorator_acts_in_the_calls"),
    Fault("Function: recording after an error", "xtrain/autograd.py", "        try:\n            result = cls.forward(ctx, *args)\n        finally:\n            _set_grad_enabled(recording)\n", "        result = cls.forward(ctx, *args)\n        _set_grad_enabled(recording)\n", "recording is as before", _RULES + "test_recording_is_as_before_a_forward_that_fails"),
    Fault("Function: changes of saved tensors", "xtrain/autograd.py", "if tensor is not None and tensor._version != version:", "if tensor is not None and tensor._version < version:", "a change in place of a saved tensor is detected", _FUNCTION + "test_function_sees_changes_of_saved_tensors"),
    Fault("checkpoint: other random numbers", "xtrain/autograd.py", "        _C.set_rng_state(ctx.random_state)\n", "", "the second run starts from the random state of the first", _FUNCTION + "test_checkpoint_gives_the_same_bits"),
    Fault("checkpoint: the generator goes back", "xtrain/autograd.py", "            _set_grad_enabled(False)\n            _C.set_rng_state(random_state)\n", "            _set_grad_enabled(False)\n", "a backward leaves the default generator alone", _RULES + "test_a_recomputation_leaves_the_generator_alone"),
    Fault("model: tied heads draw their own", "xtrain/models/qwen3.py", "logits = _C.linear(x, self._table()) if self.lm_head is None else self.lm_head(x)", "logits = _C.linear(x, self._table().detach()) if self.lm_head is None else self.lm_head(x)", "a tied head trains the token table", _RULES + "test_a_tied_head_trains_its_table"),
    Fault("model: no residual of the mlp", "xtrain/models/qwen3.py", "        return x + self._feed(x)\n", "        return self._feed(x)\n", "x + mlp(norm(x))", _RULES + "test_a_block_adds_to_its_input"),
    Fault("model: a future that is seen", "xtrain/models/qwen3.py", "_C.scaled_dot_product_attention(q, key, value, True, None, h != k)", "_C.scaled_dot_product_attention(q, key, value, seq > 1000, None, h != k)", "a token never sees the future", _MODEL + "test_a_token_never_sees_the_future"),
    Fault("model: deviations of one", "xtrain/models/qwen3.py", "nn.init.normal_(module.weight, 0.0, self.config.initializer_range)", "nn.init.normal_(module.weight, 0.0, 1.0)", "matrices start with deviation initializer_range", _RULES + "test_matrices_start_with_their_deviation"),
    Fault("tolerance: the format of the result", "xtrain/testing/formats.py", "rtol = max(of_compute.roundoff, of_out.roundoff, accumulations * of_acc.roundoff)", "rtol = max(of_compute.roundoff, accumulations * of_acc.roundoff)", "rtol = max(u(compute), u(out), n u(acc))", "tests/testing/test_testing_tolerance.py"),
    Fault("verify: NaN in the reference", "xtrain/testing/comparison.py", "    if nans == ref.numel():\n", "    if nans > ref.numel():\n", "a reference of nothing but NaN is refused", "tests/testing/test_testing_verify.py"),
    Fault("assert_close: integers beside floats", "xtrain/testing/comparison.py", "            elif floats:\n                x = x.astype(np.float64)\n", "            elif floats:\n                x = x.astype(np.float32).astype(np.int64)\n", "integers beside floats are taken as floats", "tests/testing/test_testing_verify.py " + _NN + "test_assert_close_lets_nothing_bad_pass"),
]  # fmt: skip
