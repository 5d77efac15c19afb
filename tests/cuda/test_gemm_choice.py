"""Products of cuda/gemm/cublas_choice.cuh's table, whose kernels cuBLASLt's heuristic did not choose: right within their rounding."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain.optable.table import array

SOURCE = Path(__file__).parents[2] / "cuda" / "gemm" / "cublas_choice.cuh"
LINE = re.compile(r"^ +\{(\d+), (\d+), (\d+), (true|false), (true|false), (XT_\w+),", re.MULTILINE)
TABLE = [(*map(int, f[:3]), f[3] == "true", f[4] == "true", f[5]) for f in LINE.findall(SOURCE.read_text())]
PLACES = 64  # rows and columns of a result that are computed again in float64

needs_gpu = pytest.mark.skipif(not xt.cuda.is_available(), reason=f"needs a GPU: {xt.cuda.why_unavailable()}")


def some(size: int) -> np.ndarray:
    """Places of a row or column, its ends among them."""
    return np.unique(np.r_[0, size - 1, np.random.default_rng(size).integers(0, size, PLACES)])


def wide(x, rows: np.ndarray) -> np.ndarray:
    return np.stack([array(x[int(row)].to(xt.float32)) for row in rows]).astype(np.float64)


def test_the_table_is_read() -> None:
    assert len(TABLE) == SOURCE.read_text().count("{0, ") + len([line for line in TABLE if line[0]]) > 20


@needs_gpu
@pytest.mark.parametrize("line", [line for line in TABLE if line[5] == "XT_BFLOAT16"], ids=str)
@pytest.mark.parametrize("tokens", [4096, 4136])
def test_products_of_the_table(line, tokens: int) -> None:
    m, n, k, trans_a, trans_b, _ = line
    m, k = m or tokens, k or tokens
    xt.manual_seed(m + n)
    a, b = (xt.randn(*shape, device="cuda").to(xt.bfloat16) for shape in ((m, k), (n, k)))
    left = a.transpose(0, 1).contiguous().transpose(0, 1) if trans_a else a
    right = b.transpose(0, 1) if trans_b else b.transpose(0, 1).contiguous()
    rows, cols = some(m), some(n)
    got = wide(xt.matmul(left, right), rows)[:, cols]
    x, y = wide(a, rows), wide(b, cols)
    want, size = x @ y.T, np.abs(x) @ np.abs(y).T
    assert np.all(np.abs(got - want) <= 2**-8 * np.abs(want) + k * 2**-24 * size)


@needs_gpu
@pytest.mark.parametrize("line", [line for line in TABLE if line[4] and not line[3] and line[1] < 50000], ids=str)
def test_products_of_the_table_with_a_bias(line) -> None:
    """Which the product adds at its end, before it rounds."""
    _, n, k, *_ = line
    xt.manual_seed(n + k)
    a, weight, bias = (xt.randn(*shape, device="cuda").to(xt.bfloat16) for shape in ((4096, k), (n, k), (n,)))
    rows, cols = some(4096), some(n)
    got = wide(F.linear(a, weight, bias), rows)[:, cols]
    x, y, add = wide(a, rows), wide(weight, cols), array(bias.to(xt.float32)).astype(np.float64)[cols]
    want, size = x @ y.T + add, np.abs(x) @ np.abs(y).T + np.abs(add)
    assert np.all(np.abs(got - want) <= 2**-8 * np.abs(want) + (k + 1) * 2**-24 * size)


@needs_gpu
def test_rows_that_the_copy_engine_cannot_read() -> None:
    """A product of the table whose rows lie 1,030 elements apart."""
    x = xt.randn(4096, 4096, device="cuda").to(xt.bfloat16)
    weight = xt.randn(4096, 1030, device="cuda").to(xt.bfloat16)[:, :1024]
    assert (0, 1024, 4096, False, False, "XT_BFLOAT16") in TABLE
    rows, cols = some(4096), some(1024)
    got, left = wide(xt.matmul(x, weight), rows)[:, cols], wide(x, rows)
    right = array(weight.to(xt.float32)).astype(np.float64)[:, cols]
    want, size = left @ right, np.abs(left) @ np.abs(right)
    assert np.all(np.abs(got - want) <= 2**-8 * np.abs(want) + 4096 * 2**-24 * size)


@needs_gpu
@pytest.mark.parametrize("width", [768, 896, 1024])
def test_gradients_of_a_head(width: int) -> None:
    """dx and the rows of dW, of logits in chunks of 4,096 rows and more, for losses that are added up."""
    vocab, rows = (50257, 26624) if width == 768 else (151936, 8192)
    xt.manual_seed(width)
    x = xt.randn(rows, width, device="cuda").to(xt.bfloat16).requires_grad_()
    w = (xt.randn(vocab, width, device="cuda") * 0.02).to(xt.bfloat16).requires_grad_()
    targets = np.random.default_rng(3).integers(0, vocab, rows)
    F.linear_cross_entropy(x, w, xt.tensor(targets, device="cuda"), reduction="sum").backward()
    some_rows, ids = some(rows), some(vocab)
    with xt.no_grad():
        largest, total = np.full(rows, -np.inf), np.zeros(rows)
        for start in range(0, rows, 2048):  # log-sum-exp of the rows, in float32
            logits = xt.matmul(x[start : start + 2048].to(xt.float32), w.to(xt.float32).transpose(0, 1))
            top = logits.amax(-1, keepdim=True)
            largest[start : start + 2048] = array(top)[:, 0]
            total[start : start + 2048] = array((logits - top).exp().sum(-1))
    lse = largest + np.log(total)
    inputs, weights = wide(x.detach(), np.arange(rows)), array(w.detach().to(xt.float32)).astype(np.float64)
    error = 2**-7 + 2**-8 * largest.max()  # a logit and its gradient are rounded to 16 bits, each once
    for places, logits, target, got, operand, lse_of in (
        (
            some_rows,
            inputs[some_rows] @ weights.T,
            targets[some_rows, None] == np.arange(vocab),
            x.grad,
            weights,
            lse[some_rows, None],
        ),
        (ids, weights[ids] @ inputs.T, targets[None] == ids[:, None], w.grad, inputs, lse[None]),
    ):
        gradient = np.exp(logits - lse_of) - target
        want, size = gradient @ operand, np.abs(gradient) @ np.abs(operand)
        assert np.all(np.abs(wide(got, places) - want) <= 2**-8 * np.abs(want) + error * size)
