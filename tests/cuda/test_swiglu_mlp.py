"""The feed-forward layer as one op: the bits of its five ops, its memory, and who uses it."""

from __future__ import annotations

import gc

import pytest

import xtrain as xt
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import array, bits

C, F = 24, 40


def tensors(dtype: str = "float32", apart: bool = False, rows: tuple[int, ...] = (6,)) -> list:
    """x, gate, up and down, which want gradients."""
    xt.manual_seed(2)
    x, gate, up, down = (xt.randn(*shape).to(getattr(xt, dtype)) for shape in ((*rows, C), (F, C), (F, C), (C, F)))
    if not apart:
        gate, up = _C.pack([gate, up])
    return [t.detach().requires_grad_() for t in (x, gate, up, down)]


def separate(x, gate, up, down):
    return _C.linear(_C.swiglu(_C.linear_joined(x, [gate, up])), down)


def results(op, given: list, passes: int = 1) -> list[bytes]:
    y = op(*given)
    for i in range(passes):
        y.backward(xt.ones(*y.shape).to(y.dtype) * 0.5, retain_graph=i < passes - 1)
    return [bits(y), *(b"" if t.grad is None else bits(t.grad) for t in given)]


@pytest.mark.parametrize(
    ("dtype", "apart", "rows"), [("float32", False, (6,)), ("bfloat16", False, (2, 3)), ("bfloat16", True, ()), ("float64", True, (5,))]
)  # fmt: skip
def test_the_bits_are_those_of_the_ops_one_after_the_other(dtype: str, apart: bool, rows: tuple[int, ...]) -> None:
    given = dict(dtype=dtype, apart=apart, rows=rows)
    for passes in (1, 2):
        assert results(_C.swiglu_mlp, tensors(**given), passes) == results(separate, tensors(**given), passes)


@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1, 2), (1,)])
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...]) -> None:
    both = tensors(), tensors()
    for given in both:
        for i in frozen:
            given[i].requires_grad = False
    assert results(_C.swiglu_mlp, both[0]) == results(separate, both[1])
    assert all((t.grad is None) == (i in frozen) for i, t in enumerate(both[0]))


def test_the_gradient_of_gate_and_up_takes_their_place() -> None:
    """Where the graph is freed. Beside them the backward has dh, and the gradients of x and of the weights."""
    peaks, kept = [], []
    device = _C.get_default_device()
    for retain in (False, True):
        given = tensors(rows=(512,))
        before = _C.memory_stats(device)["allocated"]
        y = _C.swiglu_mlp(*given)
        dy = xt.ones(*y.shape)
        kept.append(_C.memory_stats(device)["allocated"] - before)
        gc.collect()
        _C.memory_reset_peak(device)
        y.backward(dy, retain_graph=retain)
        peaks.append(_C.memory_stats(device)["peak"] - before - kept[-1])
        del given, y, dy
    block = 512 * F * 4
    assert kept[0] == 3 * block + 2 * 512 * C * 4  # gate, up, h; y, dy
    assert peaks[1] - peaks[0] >= 2 * block


def test_h_is_computed_again() -> None:
    """In recompute mode; the same bits, one [rows, F] less."""
    found = []
    for mode in (False, True):
        given = tensors("bfloat16", rows=(64,))
        before = _C.memory_stats(_C.get_default_device())["allocated"]
        with xt.recompute() if mode else xt.enable_grad():
            y = _C.swiglu_mlp(*given)
        kept = _C.memory_stats(_C.get_default_device())["allocated"] - before
        y.backward(xt.ones(*y.shape).to(y.dtype))
        found.append((kept, [bits(t.grad) for t in given]))
        del given, y
    assert found[0][1] == found[1][1]
    assert found[0][0] - found[1][0] == 64 * F * 2


def test_a_change_in_place_before_backward_is_seen() -> None:
    given = tensors()
    y = _C.swiglu_mlp(*given)
    with xt.no_grad():
        given[3].fill_(0.0)
    with pytest.raises(RuntimeError, match="swiglu_mlp.*changed in place"):
        y.backward(xt.ones(*y.shape))


def model() -> Qwen3:
    xt.manual_seed(1)
    return Qwen3(
        Qwen3Config(
            vocab_size=61, hidden_size=C, intermediate_size=F, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("change", ["", "bias", "hooked", "subclass", "replaced"])
def test_the_model_calls_a_down_proj_that_is_not_stock(change: str) -> None:
    one, ids, called = model(), xt.tensor([[1, 5, 2]]), []
    want = array(one(ids)).tolist()
    mlp = one.model.layers[0].mlp
    if change == "bias":
        mlp.down_proj.bias = nn.Parameter(xt.zeros(C))
    elif change == "hooked":
        mlp.down_proj.register_forward_hook(lambda module, args, out: called.append(1))
    elif change == "subclass":
        mlp.down_proj.__class__ = type("Other", (nn.Linear,), {})
    elif change == "replaced":
        mlp.down_proj.forward = lambda x: _C.linear(x, mlp.down_proj.weight)
    names: list[str] = []
    before = _C.set_call_hook(lambda op, arguments, outputs: names.append(op.__name__))
    try:
        got = array(one(ids)).tolist()
    finally:
        _C.set_call_hook(before)
    assert got == want and ("swiglu_mlp" in names) == (change == "")
    assert called == [1] * (change == "hooked")
