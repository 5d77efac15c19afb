"""Fused ops beside the ops that they stand for: the same bits, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import FLOATS, bits


def random(shape: tuple[int, ...], dtype: str, seed: int):
    return xt.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


# ---- residual addition and RMSNorm -----------------------------------------------------------------------------------

# On a GPU: narrow plans of one to four pieces a lane, whole blocks, rows read twice, rows that are not aligned.
WIDTHS = [1, 24, 33, 128, 192, 384, 768, 1024, 2048, 4100, 17000, 17001, 40000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_has_the_bits_of_two_ops(dtype: str, width: int) -> None:
    """Both outputs are used, so both gradients meet in the sum; the inputs get one gradient."""
    rows = 3 if width > 4000 else 37
    found = []
    for fused in (False, True):
        x, residual, weight = (
            random(s, dtype, i).requires_grad_() for i, s in enumerate([(rows, width), (rows, width), (width,)])
        )
        if fused:
            total, out = F.add_rms_norm(x, residual, weight, 1e-6)
        else:
            total = x + residual
            out = F.rms_norm(total, weight, 1e-6)
        _C.backward([total, out], [random((rows, width), dtype, 4), random((rows, width), dtype, 5)], False)
        found.append([bits(t) for t in (total, out, x.grad, residual.grad, weight.grad)])
    assert found[0] == found[1]
    assert found[1][2] == found[1][3]


@pytest.mark.parametrize("used", [0, 1])
def test_add_rms_norm_with_one_output(used: int) -> None:
    """The output that nobody uses has no gradient; dweight is then nothing, or the norm's own."""
    found = []
    for fused in (False, True):
        x, residual, weight = (random(s, "float32", i).requires_grad_() for i, s in enumerate([(5, 48)] * 2 + [(48,)]))
        total = x + residual
        outs = F.add_rms_norm(x, residual, weight, 1e-6) if fused else (total, F.rms_norm(total, weight, 1e-6))
        outs[used].backward(random((5, 48), "float32", 4))
        found.append([bits(x.grad), bits(residual.grad), None if weight.grad is None else bits(weight.grad)])
    nothing = bits(xt.zeros(48))
    assert [g or nothing for g in found[0]] == [g or nothing for g in found[1]]


def test_add_rms_norm_adds_to_a_gradient_in_place() -> None:
    """A second backward adds to weight.grad; one tensor as both inputs gets both gradients."""
    found = []
    for fused in (False, True):
        x, weight = random((9, 40), "float32", 0).requires_grad_(), random((40,), "float32", 1).requires_grad_()
        for _ in range(2):
            total = x + x
            outs = F.add_rms_norm(x, x, weight, 1e-6) if fused else (total, F.rms_norm(total, weight, 1e-6))
            (outs[0] * outs[1]).sum().backward()
        found.append([bits(x.grad), bits(weight.grad)])
    assert found[0] == found[1]


def test_add_rms_norm_protects_the_sum() -> None:
    x = random((4, 8), "float32", 0).requires_grad_()
    total, out = F.add_rms_norm(x, random((4, 8), "float32", 1))
    with xt.no_grad():
        total.mul_(2.0)
    with pytest.raises(RuntimeError, match="saved by 'add_rms_norm' was changed in place"):
        out.sum().backward()
