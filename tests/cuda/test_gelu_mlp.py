"""GPT-2's feed-forward layer as one op: the bits of its three ops, its memory, and who uses it."""

from __future__ import annotations

from functools import partial

import pytest
from feed_forward import check_frozen, check_place_taken, output_and_ops, recomputed, results

import xtrain as xt
from xtrain import _C
from xtrain.models import GPT2, GPT2Config
from xtrain.models.gpt2 import Conv1D
from xtrain.optable.table import array, bits

C, F = 24, 40


def tensors(dtype: str = "float32", turned: bool = False, rows: tuple[int, ...] = (6,)) -> list:
    """x, weight, bias, down and its bias, which want gradients; turned: stored [in, out], as GPT-2's files have them."""
    xt.manual_seed(2)
    shapes = ((*rows, C), (F, C), (F,), (C, F), (C,))
    given = [xt.randn(*shape).to(getattr(xt, dtype)) for shape in shapes]
    if turned:
        for i in (1, 3):
            given[i] = given[i].transpose(0, 1).contiguous().transpose(0, 1)
    return [t.detach().requires_grad_() for t in given]


def separate(x, w, b, down, e, approximate="tanh"):
    return _C.linear(_C.bias_gelu(_C.linear(x, w), b, approximate), down, e)


def one_op(x, w, b, down, e, approximate="tanh"):
    return _C.gelu_mlp(x, w, b, down, e, approximate)


@pytest.mark.parametrize(
    ("form", "dtype", "turned", "rows"),
    [("tanh", "float32", False, (6,)), ("tanh", "bfloat16", True, (2, 3)), ("none", "bfloat16", False, ()), ("none", "float64", True, (5,))],
)  # fmt: skip
def test_the_bits_are_those_of_the_ops_one_after_the_other(
    form: str, dtype: str, turned: bool, rows: tuple[int, ...]
) -> None:
    given = dict(dtype=dtype, turned=turned, rows=rows)
    for passes in (1, 2):
        one, parts = tensors(**given), tensors(**given)
        assert results(partial(one_op, approximate=form), one, passes) == results(
            partial(separate, approximate=form), parts, passes
        )


@pytest.mark.parametrize("frozen", [(0,), (2,), (3, 4), (0, 1, 2), (1,), (4,)])
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...]) -> None:
    check_frozen(one_op, separate, tensors, frozen)


def test_the_inner_gradient_takes_the_place_of_the_product() -> None:
    """Where the graph is freed."""
    block = 512 * F * 4
    held = 2 * block + 2 * 512 * C * 4  # x W^T, h; y, dy
    check_place_taken(one_op, lambda: tensors(rows=(512,)), held, block)


def test_h_is_computed_again() -> None:
    """In recompute mode, also by bias_gelu; the same bits, one [rows, F] less."""
    one, again, parts = (
        recomputed(op, tensors("bfloat16", rows=(64,)), mode)
        for op, mode in ((one_op, False), (one_op, True), (separate, True))
    )
    assert one[1] == again[1] == parts[1]
    assert one[0] - again[0] == 64 * F * 2


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)")
@pytest.mark.parametrize("sizes", [(8200, 520, 2008, 264), (40000, 64, 200, 72)])
def test_products_with_gelu_inside(sizes: tuple[int, ...]) -> None:
    """Enough tiles for both warpgroups of all blocks, with rests: the bits of the parts; fewer kernels where it is a Hopper GPU. Sums of rows
    in float32 may round to the bfloat16 next to that of the sum.
    """
    m, c, f, k = sizes
    xt.manual_seed(3)
    shapes = ((m, c), (c, f), (f,), (f, k), (k,), (m, k))
    *values, dy = (
        (xt.randn(*shape, device="cuda") * shape[-2 if len(shape) > 1 else 0] ** -0.5).bfloat16() for shape in shapes
    )
    found, launches = [], []
    for backend in (None, "cublas"):
        leaves = [t.clone().requires_grad_() for t in values]
        x, w, b, down, e = leaves
        before = xt.cuda.counters()["launches"]
        with xt.use_gemm_backend(backend):
            y = _C.gelu_mlp(x, w.transpose(0, 1), b, down.transpose(0, 1), e, "tanh")
            y.backward(dy)
        launches.append(xt.cuda.counters()["launches"] - before)
        found.append([y.detach(), *(t.grad for t in leaves)])
    for i, (one, parts) in enumerate(zip(*found, strict=True)):
        if i == 3:
            one, parts = array(one.float()), array(parts.float())
            assert (abs(one - parts) <= 2.0**-7 * abs(parts)).all()
        else:
            assert bits(one) == bits(parts), i
    facts = xt.cuda.get_device_properties()
    assert launches[0] < launches[1] or facts["capability"] != (9, 0) or "90a" not in facts["built_for"].split()


@pytest.mark.parametrize("change", ["", "c_fc hooked", "c_proj hooked", "c_fc subclass", "c_proj subclass"])
def test_the_model_calls_members_that_are_not_stock(change: str) -> None:
    xt.manual_seed(1)
    one, ids, called = (
        GPT2(GPT2Config(vocab_size=61, n_embd=C, n_inner=F, n_layer=1, n_head=4)).eval(),
        xt.tensor([[1, 5, 2]]),
        [],
    )
    xt.nn.init.normal_(one.transformer.h[0].mlp.c_fc.bias)  # zeros hide a bias that is added twice
    want = array(one(ids)).tolist()
    name, _, what = change.partition(" ")
    if change:
        member = getattr(one.transformer.h[0].mlp, name)
        if what == "hooked":
            member.register_forward_hook(lambda *_: called.append(1))
        else:
            member.__class__ = type("Other", (Conv1D,), {})
    got, names = output_and_ops(one, ids)
    assert got == want and ("gelu_mlp" in names) == (change == "")
    assert called == [1] * (what == "hooked")
