"""The feed-forward layer as one op: the bits of its five ops, its memory, and who uses it."""

from __future__ import annotations

import pytest
from feed_forward import check_frozen, check_place_taken, output_and_ops, recomputed, results

import xtrain as xt
from xtrain import _C, nn
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import array

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


@pytest.mark.parametrize(
    ("dtype", "apart", "rows"), [("float32", False, (6,)), ("bfloat16", False, (2, 3)), ("bfloat16", True, ()), ("float64", True, (5,))]
)  # fmt: skip
def test_the_bits_are_those_of_the_ops_one_after_the_other(dtype: str, apart: bool, rows: tuple[int, ...]) -> None:
    given = dict(dtype=dtype, apart=apart, rows=rows)
    for passes in (1, 2):
        assert results(_C.swiglu_mlp, tensors(**given), passes) == results(separate, tensors(**given), passes)


@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1, 2), (1,)])
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...]) -> None:
    check_frozen(_C.swiglu_mlp, separate, tensors, frozen)


def test_the_gradient_of_gate_and_up_takes_their_place() -> None:
    """Where the graph is freed. Beside them the backward has dh, and the gradients of x and of the weights."""
    block = 512 * F * 4
    held = 3 * block + 2 * 512 * C * 4  # gate, up, h; y, dy
    check_place_taken(_C.swiglu_mlp, lambda: tensors(rows=(512,)), held, 2 * block)


def test_h_is_computed_again() -> None:
    """In recompute mode; the same bits, one [rows, F] less."""
    one, again = (recomputed(_C.swiglu_mlp, tensors("bfloat16", rows=(64,)), mode) for mode in (False, True))
    assert one[1] == again[1]
    assert one[0] - again[0] == 64 * F * 2


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
    got, names = output_and_ops(one, ids)
    assert got == want and ("swiglu_mlp" in names) == (change == "")
    assert called == [1] * (change == "hooked")
