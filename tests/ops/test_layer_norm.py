"""Promises of layer_norm and rms_norm beside those of every op: rounding, means far from zero, sums over rows."""

from __future__ import annotations

import numpy as np
import pytest
from test_clauses import LOW, agreement, rounded

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import array, exact, tensor


@pytest.mark.parametrize("dtype", LOW)
def test_layer_norm_is_rounded_once(dtype: str) -> None:
    """Not before its weight, nor before its bias."""
    random = np.random.default_rng(0)
    x, w, b = (rounded(random.standard_normal(shape), dtype) for shape in ((64, 96), 96, 96))
    inner = x - x.astype(np.float64).mean(-1, keepdims=True)
    inner /= np.sqrt(np.mean(np.square(inner), -1, keepdims=True) + 1e-5)
    mine = [xt.tensor(t).to(getattr(xt, dtype)) for t in (x, w, b)]
    out = F.layer_norm(mine[0], (96,), *mine[1:])
    once, before_weight, before_bias = agreement(
        out,
        inner * w + b,
        rounded(inner, dtype).astype(np.float64) * w + b,
        rounded(inner * w, dtype).astype(np.float64) + b,
    )
    assert once > 0.995 and before_weight < 0.9 and before_bias < 0.9


def test_layer_norm_of_rows_far_from_zero() -> None:
    """Squares of x itself would leave no digit of a variance of 1 beside a mean of 10,000."""
    x = (np.random.default_rng(0).standard_normal((5, 300)) + 1e4).astype(np.float32)
    inner = x - x.astype(np.float64).mean(-1, keepdims=True)
    want = inner / np.sqrt(np.mean(np.square(inner), -1, keepdims=True) + 1e-5)
    assert np.allclose(F.layer_norm(xt.tensor(x), 300).cpu().numpy(), want, rtol=0, atol=5e-3)


@pytest.mark.on_cpu
def test_layer_norm_of_long_rows_far_from_zero() -> None:
    """The mean is right to its last place, which is 0.001 here, however many elements are added up."""
    x = (np.random.default_rng(0).standard_normal((5, 30000)) + 1e4).astype(np.float32)
    inner = x - x.astype(np.float64).mean(-1, keepdims=True)
    want = inner / np.sqrt(np.mean(np.square(inner), -1, keepdims=True) + 1e-5)
    assert np.allclose(F.layer_norm(xt.tensor(x), 30000).numpy(), want, rtol=0, atol=7e-4)
    for value in (1e6 + 1 / 16, 12345.678):  # the rounding of a mean is no variance
        got = F.layer_norm(xt.full((2, 30000), value), 30000, eps=1e-12).numpy()
        assert np.isfinite(got).all()


@pytest.mark.parametrize("cols", [24, 33, 520, 4100, 17000])
def test_the_variance_of_layer_norm_is_of_the_elements_of_the_row(cols: int) -> None:
    """Lanes and threads of a GPU beyond the row hold zeros, whose distance from the mean is no part of it."""
    x = (np.random.default_rng(0).standard_normal((4, cols)) + 3).astype(np.float32)
    inner = x - x.astype(np.float64).mean(-1, keepdims=True)
    want = inner / np.sqrt(np.mean(np.square(inner), -1, keepdims=True) + 1e-5)
    assert np.allclose(F.layer_norm(xt.tensor(x), cols).cpu().numpy(), want, rtol=0, atol=1e-4)


def test_layer_norm_of_one_column() -> None:
    """There is no variance: the bias comes out, and x has no gradient but the rounding of two equal numbers."""
    x, w, b = (xt.tensor(v).requires_grad_() for v in ([[3.0], [-7.0]], [2.0], [0.75]))
    out = F.layer_norm(x, 1, w, b)
    assert out.tolist() == [[0.75], [0.75]]
    out.sum().backward()
    assert w.grad.tolist() == [0.0] and b.grad.tolist() == [2.0] and x.grad.tolist() == [[0.0], [0.0]]


def test_layer_norm_with_one_tensor_for_weight_and_bias() -> None:
    x = xt.tensor(np.random.default_rng(0).standard_normal((6, 4)))
    w, *apart = (xt.full((4,), 2.0, dtype=xt.float64).requires_grad_() for _ in range(3))
    for _ in range(2):  # the second backward adds to .grad
        F.layer_norm(x, 4, w, w).sum().backward()
        F.layer_norm(x, 4, *apart).sum().backward()
    assert np.allclose(w.grad.cpu().numpy(), (apart[0].grad + apart[1].grad).cpu().numpy(), rtol=1e-14)


# Where several rows follow each other in a block of a GPU: two pieces of 16 bytes a lane, a row a block.
@pytest.mark.parametrize(("rows", "cols"), [(3400, 132), (9, 520)])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_gradient_of_a_row_by_its_own_mean_and_rstd(op: str, rows: int, cols: int) -> None:
    """No row has the mean or the scale of another."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, cols)) + random.uniform(-3, 3, (rows, 1))
    x = exact(x * np.geomspace(0.1, 10, rows)[:, None], "float32")
    w, dy = (exact(random.standard_normal(shape), "float32") for shape in (cols, (rows, cols)))
    centre = x.mean(-1, keepdims=True) if op == "layer_norm" else 0.0
    rstd = 1 / np.sqrt(np.square(x - centre).mean(-1, keepdims=True) + 1e-6)
    xh, g = (x - centre) * rstd, dy * w
    level = g.mean(-1, keepdims=True) if op == "layer_norm" else 0.0
    dx, dw = rstd * (g - level - xh * (g * xh).mean(-1, keepdims=True)), (dy * xh).sum(0)
    mine, weight = (tensor(t, "float32").requires_grad_() for t in (x, w))
    out = _C.layer_norm(mine, weight, None, 1e-6) if op == "layer_norm" else _C.rms_norm(mine, weight, 1e-6)
    out.backward(tensor(dy, "float32"))
    assert (np.abs(array(mine.grad) - dx).max(-1) <= 3e-5 * np.abs(dx).max(-1)).all()
    assert np.abs(array(weight.grad) - dw).max() <= 1e-4 * np.abs(dw).max()


# On Hopper the rows of a warp come through a ring of stages: each has several rows of the whole, and one of a part.
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("cols", [512, 768, 1000])
def test_the_gradient_of_a_row_does_not_depend_on_other_rows(cols: int, dtype: str, op: str) -> None:
    """dx of many rows has the bits of dx of a few; the gradients of weight and bias are the sums of those of all parts."""
    rows, each, random = 18000, 1000, np.random.default_rng(0)
    kind, adds, centred = getattr(xt, dtype), op.startswith("add"), op.endswith("layer_norm")
    x = random.standard_normal((rows, cols), dtype=np.float32) + random.uniform(-2, 2, (rows, 1)).astype(np.float32)
    wide = [x, *(random.standard_normal((rows, cols), dtype=np.float32) for _ in range(3 if adds else 1))]
    weights = [random.standard_normal(cols, dtype=np.float32) for _ in range(1 + centred)]

    def gradients(first: int, count: int) -> list[np.ndarray]:
        here, *more = (xt.tensor(t[first : first + count]).to(kind).requires_grad_() for t in wide)
        of_weights = [xt.tensor(t).to(kind).requires_grad_() for t in weights]
        outs = getattr(_C, op)(here, *(more[:1] if adds else []), *of_weights, 1e-5)
        _C.backward(list(outs) if adds else [outs], [t.detach() for t in more[-1 - adds :]])
        return [t.grad.float().cpu().numpy() for t in (here, *of_weights)]

    whole, parts = gradients(0, rows), [gradients(first, each) for first in range(0, rows, each)]
    assert np.array_equal(whole[0], np.concatenate([part[0] for part in parts]))
    for got, *of_parts in zip(whole[1:], *(part[1:] for part in parts), strict=True):
        assert np.abs(got - np.sum(of_parts, 0)).max() <= 0.04 * np.abs(of_parts).max()


# 70,787 rows are more than 32 for each warp of an H200: those that a ring has loaded numbers for at its start, and others.
@pytest.mark.parametrize("cols", [504, 768])
def test_a_row_that_comes_again_has_the_same_gradient(cols: int) -> None:
    """Its bits do not depend on where among many rows it is."""
    count, times, random = 997, 71, np.random.default_rng(0)
    scale = random.uniform(0.5, 2, (count, 1)).astype(np.float32)
    x, dy = (
        xt.tensor(random.standard_normal((count, cols), dtype=np.float32) * scale + scale).to(xt.bfloat16)
        for _ in range(2)
    )
    weights = [xt.tensor(random.standard_normal(cols, dtype=np.float32)).to(xt.bfloat16) for _ in range(2)]

    def gradient(again: int) -> np.ndarray:
        here = xt.cat([x] * again, 0).requires_grad_()
        _C.layer_norm(here, *weights, 1e-5).backward(xt.cat([dy] * again, 0))
        return here.grad.float().cpu().numpy()

    assert np.array_equal(
        gradient(times).reshape(times, count, cols), np.broadcast_to(gradient(1), (times, count, cols))
    )


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("cols", [33, 96, 2048, 2050])
def test_a_norm_is_rounded_before_its_weight_in_every_plan(cols: int, dtype: str) -> None:
    """A single rounding of the product differs in a quarter of the elements. On a GPU: lanes that share a row, a block a row, a row read twice."""
    random = np.random.default_rng(0)
    x, w = (rounded(random.standard_normal(shape), dtype) for shape in ((64, cols), cols))
    inner = x / np.sqrt(np.mean(np.square(x.astype(np.float64)), -1, keepdims=True) + 1e-6)
    out = _C.rms_norm(xt.tensor(x).to(getattr(xt, dtype)), xt.tensor(w).to(getattr(xt, dtype)), 1e-6)
    twice, once = agreement(out, rounded(inner, dtype).astype(np.float64) * w, inner * w)
    assert twice > 0.995 and once < 0.9


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("dim", [64, 70])
def test_the_norm_of_a_head_is_rounded_before_its_weight(dim: int, dtype: str) -> None:
    """At position 0, where a rotation turns nothing. 70: halves of no whole number of 16 bytes, which are one element at a time on a GPU."""
    random = np.random.default_rng(0)
    shapes = [(40, 4, dim), (40, 2, dim), dim, dim]
    arrays = [rounded(random.standard_normal(shape), dtype) for shape in shapes]
    places = xt.zeros(40, dtype=xt.int64)
    outs = _C.qk_norm_rope(*(xt.tensor(t).to(getattr(xt, dtype)) for t in arrays), 1e-6, positions=places)
    for out, x, w in zip(outs, arrays[:2], arrays[2:], strict=True):
        inner = x / np.sqrt(np.mean(np.square(x.astype(np.float64)), -1, keepdims=True) + 1e-6)
        twice, once = agreement(out, rounded(inner, dtype).astype(np.float64) * w, inner * w)
        assert twice > 0.995 and once < 0.9


@pytest.mark.on_cpu
def test_looped_rows_of_layer_norm_add_up_to_the_batch_bitwise() -> None:
    """Rows after rows into .grad are the same chain of additions as all at once, in one piece of rows (16384 elements)."""
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal((3, 17, 48)).astype(np.float32) for _ in "xy")
    found = []
    for parts in ((slice(0, 3),), (slice(0, 1), slice(1, 2), slice(2, 3))):
        w, b = (xt.full((48,), 1.5).requires_grad_() for _ in "wb")
        for part in parts:
            (F.layer_norm(xt.tensor(x[part]), 48, w, b) * xt.tensor(dy[part])).sum().backward()
        found.append((w.grad.numpy().tobytes(), b.grad.numpy().tobytes()))
    assert found[0] == found[1]
