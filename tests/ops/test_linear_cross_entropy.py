"""linear_cross_entropy beside the two functions it stands for, what it keeps, and what a second backward finds."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import FLOATS, UNIT_ROUNDOFF, array, bits


def composed(x, weight, targets, **options):
    return F.cross_entropy(F.linear(x, weight), targets, **options)


def inputs(rows: int, width: int, words: int, dtype: str = "float32", ignored: int = 3):
    """x [rows, width], weight [words, width], targets [rows], every `ignored`-th of them -100."""
    rng = np.random.default_rng(rows * words + width)
    x, weight = (xt.tensor(rng.standard_normal(s), dtype=dtype) for s in ((rows, width), (words, width)))
    targets = rng.integers(0, words, rows)
    targets[::ignored] = -100
    return x.requires_grad_(), weight.requires_grad_(), xt.tensor(targets)


def run(f, x, weight, targets, retain: bool = False, **options):
    """Bits of the loss and of both gradients; the graph's loss too."""
    x.grad = weight.grad = None
    loss = f(x, weight, targets, **options)
    seed = xt.tensor(np.linspace(-1, 2, loss.numel()), dtype=loss.dtype).reshape(loss.shape) if loss.ndim else None
    loss.backward(seed, retain_graph=retain)
    return [bits(loss), bits(x.grad), bits(weight.grad)], loss, seed


SIZES = [(1, 3, 5), (4, 7, 1), (4, 1, 9), (6, 5, 8), (33, 24, 257), (64, 96, 1003), (1, 64, 2051)]


@pytest.mark.on_cpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("backend", _C.gemm_backends("cpu"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_those_of_linear_and_cross_entropy(dtype, backend, reduction) -> None:
    _C.use_gemm_backend(backend)
    for sizes in SIZES[:-2] if backend == "naive" else SIZES:
        given = inputs(*sizes, dtype)
        want, got = (run(f, *given, reduction=reduction)[0] for f in (composed, F.linear_cross_entropy))
        assert got == want, sizes


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_tied_weights_and_strided_inputs(dtype) -> None:
    """One table as embedding and head, its gradient added up in place; x and weight as views of other matrices."""
    table, _, targets = inputs(31, 8, 31, dtype, ignored=5)
    ids = xt.tensor(np.arange(31) % 7)
    found = []
    for f in (composed, F.linear_cross_entropy):
        table.grad = None
        f(F.embedding(ids, table) * 2.0, table, targets).backward()
        wide, turned = xt.tensor(array(table).repeat(2, 1), dtype=dtype), xt.tensor(array(table).T.copy(), dtype=dtype)
        wide.requires_grad_(), turned.requires_grad_()
        f(wide[:, ::2], turned.T, targets, reduction="sum").backward()
        found.append([bits(t.grad) for t in (table, wide, turned)])
    assert found[0] == found[1]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_again(dtype, reduction) -> None:
    """The first backward overwrites the logits; a second and a third find new ones, of the same bits."""
    x, weight, targets = inputs(9, 5, 13, dtype)
    first, loss, seed = run(F.linear_cross_entropy, x, weight, targets, retain=True, reduction=reduction)
    for last in (False, True):
        x.grad = weight.grad = None
        loss.backward(seed, retain_graph=not last)
        assert [bits(x.grad), bits(weight.grad)] == first[1:]
    with pytest.raises(RuntimeError, match="the graph of 'linear_cross_entropy' was freed"):
        loss.backward(seed)


def test_one_gradient_only() -> None:
    for wanted in (0, 1):
        x, weight, targets = inputs(9, 5, 13)
        want = run(F.linear_cross_entropy, x, weight, targets)[0][1 + wanted]
        leaves = [t.detach().requires_grad_() if i == wanted else t.detach() for i, t in enumerate((x, weight))]
        F.linear_cross_entropy(*leaves, targets).backward()
        assert bits(leaves[wanted].grad) == want and leaves[1 - wanted].grad is None


def test_saved_inputs_are_protected() -> None:
    x, weight, targets = inputs(9, 5, 13)
    loss = F.linear_cross_entropy(x, weight, targets)
    with xt.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="saved by 'linear_cross_entropy' was changed in place"):
        loss.backward()


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_rows_ignored(dtype) -> None:
    """The mean over nothing is NaN, its gradient nothing: also where logits are not finite."""
    x, weight, _ = inputs(4, 3, 5, dtype)
    with xt.no_grad():
        x[1].fill_(float("inf"))
    for reduction in ("mean", "sum"):
        x.grad = weight.grad = None
        loss = F.linear_cross_entropy(x, weight, xt.tensor([7] * 4), ignore_index=7, reduction=reduction)
        assert np.isnan(array(loss)) if reduction == "mean" else array(loss) == 0
        loss.backward()
        assert (array(x.grad) == 0).all()


def test_labels_of_32_bits_and_keywords_only() -> None:
    x, weight, targets = inputs(9, 5, 13)
    want = bits(F.linear_cross_entropy(x, weight, targets))
    assert bits(F.linear_cross_entropy(x, weight, targets.int())) == want
    with pytest.raises(TypeError):
        F.linear_cross_entropy(x, weight, targets, -100)


@pytest.mark.parametrize("bad", [13, -1])
def test_a_label_out_of_range_is_reported_under_this_name(bad: int) -> None:
    x, weight, targets = inputs(9, 5, 13)
    targets[3] = bad
    sentence = rf"^linear_cross_entropy: targets must be in \[0, 13\) or ignore_index.*, got {bad} at position 3"
    with pytest.raises(IndexError, match=sentence):
        F.linear_cross_entropy(x, weight, targets).item()  # on a GPU the report comes with the next wait
    with pytest.raises(IndexError, match=rf"^cross_entropy: target must be in .*, got {bad} at position 3"):
        F.cross_entropy(x @ weight.T, targets).item()


@pytest.mark.on_cpu
def test_one_buffer_of_logits() -> None:
    """The peak of a step holds the logits once (rows padded to 8 elements), where linear and cross_entropy hold them twice."""
    rows, width, words = 64, 8, 4099
    x, weight, targets = inputs(rows, width, words)
    logits = rows * (words + 5) * 4
    for grad in (True, False):
        with xt.enable_grad() if grad else xt.no_grad():
            gc.collect()
            _C.memory_reset_peak("cpu")
            before = _C.memory_stats("cpu")["allocated"]
            loss = F.linear_cross_entropy(x, weight, targets)
            held = _C.memory_stats("cpu")["allocated"] - before
            assert (logits <= held < 1.2 * logits) if grad else held < 0.1 * logits
            if grad:
                loss.backward()
            stats = _C.memory_stats("cpu")
            assert logits <= stats["peak"] - before < 1.3 * logits  # the gradient of the weight is 0.12 of it
            assert stats["allocated"] - before < 0.2 * logits  # the loss is alive, the logits are not
            x.grad = weight.grad = None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_close_to_the_composition_on_any_device(dtype) -> None:
    """Where aligned rows choose another product, the bits differ, but not by more than roundings of the logits."""
    given = inputs(70, 48, 1003, dtype)
    found = []
    for f in (composed, F.linear_cross_entropy):
        loss = run(f, *given)[1]
        found.append([array(loss), array(given[0].grad), array(given[1].grad)])
    for want, got in zip(*found):
        assert np.abs(got - want).max() <= 64 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_softcap_is_that_of_the_composition(dtype) -> None:
    """softcap * tanh(logits / softcap) before cross_entropy: loss, gradients and z-loss, kept and in chunks."""
    x, weight, targets = given = inputs(9, 5, 33, dtype)
    wide = [t.detach().to(xt.float64).requires_grad_() for t in (x, weight)]
    for z_loss in (0.0, 0.1):
        logits = 1.5 * (F.linear(*wide) / 1.5).tanh()
        loss = _C.cross_entropy(logits, targets, reduction="sum", z_loss=z_loss)
        for t in wide:
            t.grad = None
        loss.backward()
        wanted = [array(loss), *(array(t.grad) for t in wide)]
        for chunk_rows in (9, 4):
            got = run(
                F.linear_cross_entropy, *given, softcap=1.5, reduction="sum", z_loss=z_loss, chunk_rows=chunk_rows
            )[1]
            for want, a in zip(wanted, (got, x.grad, weight.grad), strict=True):
                assert np.abs(array(a) - want).max() <= 64 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_softcap_bounds_what_is_not_finite(dtype) -> None:
    """A logit of either infinity is one of the cap, whose slope is 0; a NaN stays one. 4 and 11 words: none is a whole vector."""
    inf = float("inf")
    for words in (4, 11):
        x = xt.tensor([[1.0], [1.0]], dtype=dtype).requires_grad_()
        column = [inf, -inf, 0.25, -0.5] + [0.0] * (words - 4)
        weight = xt.tensor([[w] for w in column], dtype=dtype)
        loss = F.linear_cross_entropy(x, weight, xt.tensor([0, 2]), softcap=2.0, reduction="none")
        capped = 2.0 * np.tanh(np.array(column) / 2.0)
        want = np.log(np.exp(capped).sum()) - capped[[0, 2]]
        assert np.abs(array(loss) - want).max() <= 8 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()
        weight = xt.tensor([[float("nan")]] + [[w] for w in column[1:]], dtype=dtype)
        assert np.isnan(array(F.linear_cross_entropy(x, weight, xt.tensor([0, 2]), softcap=2.0)))
