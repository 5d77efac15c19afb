"""Rules of modules, of the model and of autograd in Python that a right result of the usual case does not show."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from runs import status_of_child

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.models.decoder import tensor_shapes
from xtrain.nn.module import evaluating, pack

pytestmark = pytest.mark.on_cpu

SIZES = dict(
    vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip


# ---- layers


def test_a_bias_starts_within_its_bound() -> None:
    for inputs, outputs in ((4, 1000), (900, 30)):
        bias = nn.Linear(inputs, outputs).bias.detach().numpy()
        assert 0.8 / math.sqrt(inputs) < np.abs(bias).max() <= 1 / math.sqrt(inputs)


def test_the_eps_of_a_norm_is_that_of_the_dtype() -> None:
    """2^-23 in float32: beside it 1e-6 would be seen in small rows."""
    x = xt.full((1, 4), 1e-4)
    for shape in (4, (1, 4)):
        got = nn.RMSNorm(shape)(x)[0, 0].item()
        assert abs(got - 1e-4 / math.sqrt(1e-8 + 2.0**-23)) < 1e-5
    assert abs(F.rms_norm(x.double(), (4,), None, None)[0, 0].item() - 1e-4 / math.sqrt(1e-8 + 2.0**-52)) < 1e-9


def small_mlp():
    return Qwen3(Qwen3Config(**SIZES)).model.layers[0].mlp


def unjoined(mlp, x):
    return mlp.down_proj(
        _C.swiglu(
            F.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias), F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias)
        )
    )


def test_weights_that_lie_apart_are_not_joined() -> None:
    mlp, x = small_mlp(), xt.rand(5, 16)
    mlp.up_proj.weight = nn.Parameter(xt.rand(32, 16))
    assert np.allclose(mlp(x).detach().numpy(), unjoined(mlp, x).detach().numpy(), atol=1e-6)


def test_a_bias_is_not_lost_in_a_joined_product() -> None:
    mlp, x = small_mlp(), xt.rand(5, 16)
    mlp.gate_proj.bias = nn.Parameter(xt.full((32,), 2.0))
    assert np.allclose(mlp(x).detach().numpy(), unjoined(mlp, x).detach().numpy(), atol=1e-6)


# ---- modules


def test_what_a_forward_hook_returns_replaces_the_result() -> None:
    """Also a zero, which is false."""
    layer = nn.Linear(2, 1)
    handle = layer.register_forward_hook(lambda module, args, result: xt.tensor(0.0))
    assert layer(xt.ones((1, 2))).shape == ()
    handle.remove()
    layer.register_forward_hook(lambda module, args, result: None)
    assert layer(xt.ones((1, 2))).shape == (1, 1)


def test_a_state_of_another_shape_is_refused() -> None:
    """With as many elements, or one that would broadcast."""
    layer = nn.Linear(2, 3, bias=False)
    for shape in ((3, 2, 1), (2, 3), (6,), (1, 2), ()):
        with pytest.raises(ValueError, match=r"load_state_dict: weight must have shape \(3, 2\)"):
            layer.load_state_dict({"weight": xt.zeros(shape)})


def test_buffers_of_a_state() -> None:
    layer = nn.Linear(2, 3)
    layer.register_buffer("kept", xt.ones((2,)))
    layer.register_buffer("scratch", xt.ones((2,)), persistent=False)
    assert set(layer.state_dict()) == {"weight", "bias", "kept"} and len(list(layer.buffers())) == 2


def test_a_shared_parameter_comes_once() -> None:
    both = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    both[1].weight = both[0].weight
    assert [name for name, _ in both.named_parameters()] == ["0.weight"]
    assert len(list(both.named_parameters(remove_duplicate=False))) == 2 and len(both.state_dict()) == 2


def test_apply_reaches_children_first() -> None:
    seen = []
    nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.SiLU())).apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["Linear", "SiLU", "Sequential", "Sequential"]


def test_training_mode_reaches_all_below() -> None:
    deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Dropout(0.5))))
    assert all(not m.training for m in deep.eval().modules()) and all(m.training for m in deep.train().modules())


# ---- autograd


def test_a_decorator_acts_in_the_calls() -> None:
    @xt.set_grad_enabled(False)
    def inside() -> bool:
        return xt.is_grad_enabled()

    assert xt.is_grad_enabled() and not inside() and xt.is_grad_enabled()


def test_recording_is_as_before_a_forward_that_fails() -> None:
    class Fails(xt.Function):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Fails.apply(xt.ones((2,)).requires_grad_())
    assert xt.is_grad_enabled()


def test_a_recomputation_leaves_the_generator_alone() -> None:
    """Its second run draws the first one's numbers again; who draws next gets the next ones."""
    _C.manual_seed(4)
    x = xt.ones((8,)).requires_grad_()
    y = xt.checkpoint(lambda t: F.dropout(t, 0.5, True), x)
    xt.rand(3)
    state = _C.get_rng_state()
    y.sum().backward()
    assert _C.get_rng_state() == state and x.grad.tolist() == y.tolist()


# ---- the model


def test_a_tied_head_trains_its_table() -> None:
    model = Qwen3(Qwen3Config(**SIZES, tie_word_embeddings=True))
    ids = xt.zeros((1, 3), dtype=xt.int64)
    model(ids).sum().backward()
    assert (np.abs(model.model.embed_tokens.weight.grad.numpy()).sum(1) > 0).all()  # also of tokens that are not in ids


def test_a_block_adds_to_its_input() -> None:
    """Layers whose last products are zeros change nothing."""
    model = Qwen3(Qwen3Config(**SIZES))
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    x = xt.rand(6, 16)
    assert np.array_equal(model.model.layers[0](x, 2, 3).detach().numpy(), x.numpy())


def test_matrices_start_with_their_deviation() -> None:
    model = Qwen3(Qwen3Config(**SIZES, initializer_range=0.01))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert abs(parameter.detach().numpy().std() / 0.01 - 1) < 0.2, name
        else:
            assert (parameter.detach().numpy() == 1.0).all(), name


def test_biases_of_an_mlp_are_added() -> None:
    """Of layers that replace its own, in each place; and of a gate and an up that are one piece of memory."""
    mlp = Qwen3(Qwen3Config(**SIZES)).model.layers[0].mlp
    c, f = mlp.gate_proj.weight.shape[1], mlp.gate_proj.weight.shape[0]
    x = xt.randn(5, c)

    def check() -> None:
        want = F.linear(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight, mlp.down_proj.bias)
        assert (mlp(x) - want).abs().max().item() <= 1e-5 * want.abs().max().item()

    check()
    down = mlp.down_proj
    mlp.down_proj = nn.Linear(f, c, True)
    check()
    mlp.down_proj = down
    mlp.gate_proj, mlp.up_proj = nn.Linear(c, f, True), nn.Linear(c, f, True)
    check()
    pack(mlp.gate_proj, mlp.up_proj)
    pack(mlp.gate_proj, mlp.up_proj, name="bias")
    check()


def test_a_layer_need_not_know_what_it_is_not_given() -> None:
    """The documents, where a row holds one."""

    class Twice(nn.Module):
        def forward(self, x, batch, seq, positions, cache):
            return x * 2

    model = Qwen3(Qwen3Config(**SIZES))
    model.model.layers[1] = Twice()
    ids = xt.tensor([[1, 2, 3]])
    x = model.model.layers[0](model.model.embed_tokens(ids.reshape(3)), 1, 3, None)
    assert (model.features(ids) - model.model.norm(x * 2)).abs().max().item() <= 1e-5


@pytest.mark.parametrize("policy", ["none", "cheap", "block", "full"])
def test_caches_are_used_whatever_training_recomputes(policy: str) -> None:
    """A model in training mode that reads a row piece by piece has the logits of the whole row."""
    model, ids = Qwen3(Qwen3Config(**SIZES)), xt.tensor([[1, 2, 3, 4, 5]])
    with xt.no_grad():
        want = model.eval()(ids)
        model.train()
        model.recompute = policy
        caches = model.make_caches(1, 5)
        for at, end in ((0, 3), (3, 5)):
            places = xt.arange(at, end)
            got = model(ids[:, at:end], places, caches)
            assert (got - want[:, at:end]).abs().max().item() <= 1e-5
    assert [cache.used for cache in caches] == [5, 5]


@pytest.mark.parametrize("more", [{}, {"mhc_streams": 2, "mhc_contraction": "learned"}], ids=["plain", "streams"])
def test_shapes_of_a_file_come_in_the_order_of_the_model(more: dict) -> None:
    config = Qwen3Config(**SIZES, **more, tie_word_embeddings=False)
    want = [(name, tuple(parameter.shape)) for name, parameter in Qwen3(config).named_parameters()]
    assert list(tensor_shapes(config)) == want


@pytest.mark.parametrize("first_ends", [True, False])
def test_threads_that_evaluate_one_model_give_its_modes_back(first_ends: bool) -> None:
    """The second one finds evaluation mode, and would leave the model in it: dropout of a run would be off."""
    mlp, began, ends = small_mlp(), threading.Event(), threading.Event()
    mlp.gate_proj.eval()
    modes = [part.training for part in mlp.modules()]
    assert modes.count(True) == len(modes) - 1

    def other() -> None:
        with evaluating(mlp):
            began.set()
            ends.wait()

    def end_other() -> None:
        ends.set()
        thread.join()

    thread, mine = threading.Thread(target=other, daemon=True), ExitStack()
    mine.enter_context(evaluating(mlp))
    thread.start()
    began.wait()
    for end in (mine.close, end_other) if first_ends else (end_other, mine.close):
        assert not any(part.training for part in mlp.modules())
        end()
    assert [part.training for part in mlp.modules()] == modes


def test_blocks_of_other_threads_end_in_a_child() -> None:
    """Their threads are not there, so that its model would stay in evaluation mode."""
    mlp, began, ends = small_mlp(), threading.Event(), threading.Event()

    def other() -> None:
        with evaluating(mlp):
            began.set()
            ends.wait()

    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    mine = ExitStack()
    mine.enter_context(evaluating(mlp))

    def in_child() -> bool:
        inside = mlp.training
        mine.close()
        return mlp.down_proj.training and not inside

    status = status_of_child(in_child)
    mine.close()
    ends.set()
    thread.join()
    assert status == 0 and mlp.training


def test_blocks_inside_a_block_give_back_the_mode_they_have_found() -> None:
    mlp = small_mlp()
    with evaluating(mlp):
        with evaluating(mlp):
            assert not mlp.down_proj.training
        assert not mlp.down_proj.training
        mlp.train()
        with evaluating(mlp):
            assert not mlp.down_proj.training
        assert mlp.down_proj.training
    assert mlp.training and mlp.down_proj.training
