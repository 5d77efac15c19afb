"""linear_cross_entropy in chunks of rows: beside the one piece, what is rounded when, what it keeps, and when it is chosen."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.references import linear_cross_entropy
from xtrain.optable.table import FLOATS, UNIT_ROUNDOFF, array, bits

LOW = ["bfloat16", "float16"]


def inputs(rows: int, width: int, words: int, dtype: str = "float32", counted: int | None = None):
    """x [rows, width], weight [words, width], targets [rows], of which the last `counted` count, or all but every third."""
    rng = np.random.default_rng(rows * words + width)
    x, weight = (xt.tensor(rng.standard_normal(s), dtype=dtype) for s in ((rows, width), (words, width)))
    targets = rng.integers(0, words, rows)
    if counted is None:
        targets[::3] = -100
    else:
        targets[: rows - counted] = -100
    return x.requires_grad_(), weight.requires_grad_(), xt.tensor(targets)


def run(x, weight, targets, upstream: float | None = None, retain: bool = False, **options):
    """[loss, dx, dweight], and the loss of the graph."""
    x.grad = weight.grad = None
    loss = F.linear_cross_entropy(x, weight, targets, **options)
    seed = None if upstream is None else xt.tensor(upstream, dtype=loss.dtype)
    loss.backward(seed, retain_graph=retain)
    return [loss.detach(), x.grad, weight.grad], loss


def all_bits(tensors) -> list[bytes]:
    return [bits(t) for t in tensors]


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return array(xt.tensor(np.asarray(values, np.float32)).to(getattr(xt, dtype)))


# ---- values -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 7, 32, 36])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_bits_are_those_of_one_piece(dtype: str, reduction: str, chunk_rows: int) -> None:
    """Where no factor rounds: each sum goes on where the chunk before ended. 37 rows, of which 16 count."""
    given = inputs(37, 24, 257, dtype, counted=16)
    for softcap in (None, 1.5):
        options = dict(reduction=reduction, softcap=softcap)
        with xt.use_gemm_backend("naive"):
            want, got = (all_bits(run(*given, chunk_rows=n, **options)[0]) for n in (37, chunk_rows))
        assert got == want, softcap


@pytest.mark.parametrize("words", [58000, 60001, 151936, 400003])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_all_lengths(dtype: str, words: int) -> None:
    """A GPU keeps a row in shared memory for its gradient, or a part of it; other rows lie behind it."""
    given = inputs(5, 2, words, dtype, counted=4)
    with xt.no_grad():
        given[0].mul_(0.5), given[1].mul_(0.5)  # no probability is too small for float16
    for softcap in (None, 0.5):
        options = dict(reduction="sum", softcap=softcap)
        with xt.use_gemm_backend("naive"):
            whole, chunks = ([array(t) for t in run(*given, chunk_rows=n, **options)[0]] for n in (5, 2))
        for want, got in zip(whole, chunks, strict=True):
            if dtype != "float16":  # whose one piece has subnormal probabilities
                assert np.array_equal(got, want)
            assert np.abs(got - want).max() <= 2.0**-9 * np.abs(want).max()


@pytest.mark.parametrize(("rows", "words"), [(290, 33001), (70, 65544), (139, 66001)])
@pytest.mark.parametrize("dtype", LOW)
def test_many_rows_of_16_bits(dtype: str, rows: int, words: int) -> None:
    """A GPU's block, or two that share a row, takes several rows, one after the other, and the next is on its way beside it. The last
    row is a chunk of its own."""
    given = inputs(rows, 2, words, dtype)
    with xt.no_grad():
        given[0].mul_(0.5), given[1].mul_(0.5)
    with xt.use_gemm_backend("naive"):
        whole, chunks = ([array(t) for t in run(*given, reduction="sum", chunk_rows=n)[0]] for n in (rows, rows - 1))
    for want, got in zip(whole, chunks, strict=True):
        if dtype != "float16":
            assert np.array_equal(got, want)
        assert np.abs(got - want).max() <= 2.0**-9 * np.abs(want).max()


@pytest.mark.parametrize("gemm", xt.gemm_backends(xt.get_default_device()))
@pytest.mark.parametrize("dtype", FLOATS)
def test_as_exact_as_one_piece(dtype: str, gemm: str) -> None:
    """Against float64, with upstream gradients of all sizes; V is no multiple of 8, and the last chunk has 6 rows."""
    x, weight, targets = given = inputs(70, 48, 1003, dtype)
    wide = [t.detach().to(xt.float64).requires_grad_() for t in (x, weight)]
    for upstream in (1.0, -0.3, 1e-3, 300.0):
        with xt.use_gemm_backend(gemm):
            whole, chunks = (run(*given, upstream, chunk_rows=n)[0] for n in (70, 32))
        exact = run(*wide, targets, upstream, chunk_rows=70)[0]
        for w, c, e in zip(whole, chunks, map(array, exact), strict=True):
            error = np.abs(array(w) - e).max()
            assert np.abs(array(c) - e).max() <= max(1.5 * error, 64 * UNIT_ROUNDOFF[dtype] * np.abs(e).max())


@pytest.mark.on_cpu  # where exp is exact enough for each rounding of a probability
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("which", [1, 2])
def test_gradients_are_rounded_once(which: int, dtype: str) -> None:
    """Sums over chunks, the upstream gradient and what is added to .grad: of 64 chunks, a third of the bits would be others if the
    sum were rounded before the factor."""
    rng = np.random.default_rng(1)
    rows, width, words = 64, 8, 32
    x, weight = rng.integers(-1, 2, (rows, width)) * 1.0, rng.integers(-1, 2, (words, width)) * 0.5  # exact logits
    targets = rng.integers(0, words, rows)
    logits = x @ weight.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(words)[targets]
    p = rounded(p * 2.0**15, dtype) / 2.0**15 if dtype == "float16" else rounded(p, dtype)
    sums = p @ weight if which == 1 else p.T @ x
    factor = np.float32(np.float32(0.7) / np.float32(rows))
    before = rounded(rng.standard_normal(sums.shape) * 1e-2, dtype)
    for start in (None, before):
        leaves = [xt.tensor(a, dtype=dtype).requires_grad_() for a in (x, weight)]
        leaf = leaves[which - 1]
        if start is not None:
            leaf.grad = xt.tensor(start, dtype=dtype)
        loss = F.linear_cross_entropy(*leaves, xt.tensor(targets), chunk_rows=1)
        loss.backward(xt.tensor(0.7))
        there = 0.0 if start is None else start
        once = rounded(there + sums * factor, dtype)
        twice = rounded(there + rounded(rounded(sums, dtype) * factor, dtype), dtype)
        got = array(leaf.grad)
        assert np.mean(got == once) > 0.97 > 0.95 > np.mean(got == twice)


def test_small_probabilities_of_float16() -> None:
    """1 / V is subnormal in float16, with 8 bits; gradients have 11, whatever the upstream gradient makes of them."""
    words = 50000
    x, weight = xt.ones(2, 1, dtype=xt.float16), xt.zeros(words, 1, dtype=xt.float16).requires_grad_()
    loss = F.linear_cross_entropy(x, weight, xt.tensor([0, 0]), reduction="sum", chunk_rows=1)
    loss.backward(xt.tensor(1024.0))
    got = array(weight.grad)[1:]
    assert np.abs(got * words / 2048 - 1).max() < 1.2 * 2.0**-11


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_without_gradients(reduction: str) -> None:
    """In the same chunks, so that mean and sum have the same bits as with gradients; 'none' with a gradient is one piece."""
    x, weight, targets = inputs(37, 24, 257)
    with_gradient = F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_rows=8)
    want = linear_cross_entropy(
        *(array(t).astype(np.float64) for t in (x, weight)), array(targets).astype(int), reduction=reduction
    )
    with xt.no_grad():
        loss = F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_rows=8)
    assert not loss.requires_grad and np.allclose(array(loss), want, rtol=1e-5)
    if reduction == "none":
        found = []
        for losses in (with_gradient, F.linear_cross_entropy(x, weight, targets, reduction=reduction)):
            x.grad = weight.grad = None
            losses.backward(xt.tensor(np.linspace(-1, 2, 37), dtype=xt.float32))
            found.append(all_bits((losses, x.grad, weight.grad)))
        assert found[0] == found[1]
    else:
        assert bits(loss) == bits(with_gradient)


def test_ignored_rows() -> None:
    """A chunk of nothing else, and all: no gradient, also where the factor is infinite or logits are; the mean over nothing is
    NaN."""
    for infinite in (False, True):
        x, weight, targets = inputs(12, 3, 5, counted=4)
        with xt.no_grad():
            if infinite:
                x[1].fill_(float("inf"))
        _, loss = run(x, weight, targets, chunk_rows=4)
        assert np.isfinite(array(loss)) and (array(x.grad)[:8] == 0).all() and (array(x.grad)[8:] != 0).all()
        assert infinite or (array(weight.grad) != 0).all()  # 0 times an infinite x is NaN, as in any product
        for reduction in ("mean", "sum"):
            _, loss = run(x, weight, xt.tensor([-100] * 12), chunk_rows=5, reduction=reduction)
            assert np.isnan(array(loss)) if reduction == "mean" else array(loss) == 0
            assert (array(x.grad) == 0).all() and (infinite or (array(weight.grad) == 0).all())


def test_nan_reaches_loss_and_gradients() -> None:
    x, weight, targets = inputs(12, 3, 5, counted=12)
    with xt.no_grad():
        x[5].fill_(float("nan"))
    found, _ = run(x, weight, targets, chunk_rows=4)
    assert np.isnan(array(found[0])) and np.isnan(array(weight.grad)).all()
    assert np.isnan(array(x.grad)[5]).all() and np.isfinite(np.delete(array(x.grad), 5, 0)).all()


# ---- graphs -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_again(dtype: str) -> None:
    """As often as one likes with retain_graph, with other upstream gradients, also after the gradients were changed."""
    given = inputs(20, 5, 13, dtype)
    first, loss = run(*given, retain=True, chunk_rows=8)
    first = all_bits(first)
    for last in (False, True):
        for tensor in given[:2]:
            with xt.no_grad():
                tensor.grad.mul_(0.0)
            tensor.grad = None
        loss.backward(retain_graph=not last)
        assert all_bits(t.grad for t in given[:2]) == first[1:]
    with pytest.raises(RuntimeError, match="the graph of 'linear_cross_entropy' was freed"):
        loss.backward()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_second_loss_is_added(dtype: str) -> None:
    x, weight, targets = inputs(20, 5, 13, dtype)
    once = [array(t).copy() for t in run(x, weight, targets, chunk_rows=8)[0][1:]]
    F.linear_cross_entropy(x, weight, targets, chunk_rows=8).backward()
    for t, want in zip((x, weight), once, strict=True):
        assert np.abs(array(t.grad) - 2 * want).max() <= 16 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()


@pytest.mark.parametrize("dtype", FLOATS)
def test_tied_weights_and_strided_inputs(dtype: str) -> None:
    """One table as embedding and head; x and weight as views of other matrices: as in one piece, up to roundings."""
    table, _, targets = inputs(31, 8, 31, dtype)
    ids = xt.tensor(np.arange(31) % 7)
    found = []
    for chunk_rows in (31, 8):
        table.grad = None
        F.linear_cross_entropy(F.embedding(ids, table) * 2.0, table, targets, chunk_rows=chunk_rows).backward()
        wide, turned = xt.tensor(array(table).repeat(2, 1), dtype=dtype), xt.tensor(array(table).T.copy(), dtype=dtype)
        wide.requires_grad_(), turned.requires_grad_()
        F.linear_cross_entropy(wide[:, ::2], turned.T, targets, reduction="sum", chunk_rows=chunk_rows).backward()
        found.append([array(t.grad) for t in (table, wide, turned)])
    for want, got in zip(*found, strict=True):
        assert np.abs(got - want).max() <= 64 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()


def test_one_gradient_only() -> None:
    for wanted in (0, 1):
        x, weight, targets = inputs(20, 5, 13)
        want = bits(run(x, weight, targets, chunk_rows=8)[0][1 + wanted])
        leaves = [t.detach().requires_grad_() if i == wanted else t.detach() for i, t in enumerate((x, weight))]
        F.linear_cross_entropy(*leaves, targets, chunk_rows=8).backward()
        assert bits(leaves[wanted].grad) == want and leaves[1 - wanted].grad is None


def test_inputs_may_change_after_the_forward() -> None:
    """Its gradients are made: they are those of the values that it saw."""
    x, weight, targets = inputs(20, 5, 13)
    want = all_bits(run(x, weight, targets, chunk_rows=8)[0][1:])
    x.grad = weight.grad = None
    loss = F.linear_cross_entropy(x, weight, targets, chunk_rows=8)
    with xt.no_grad():
        weight.mul_(2.0), x.mul_(0.0)
    loss.backward()
    assert all_bits((x.grad, weight.grad)) == want


# ---- memory and choice --------------------------------------------------------------------------------------------------------------


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_chunk_at_once(dtype: str) -> None:
    """Peak: logits of 8 of 64 rows, and the gradients in float32. Nothing of it is left but the gradients themselves."""
    rows, width, words, size = 64, 4, 4096, 4 if dtype == "float32" else 2
    x, weight, targets = inputs(rows, width, words, dtype)
    logits, sums, own = 8 * words * size, (rows + words) * width * 4, (rows + words) * width * size
    for grad in (True, False):
        with xt.enable_grad() if grad else xt.no_grad():
            gc.collect()
            _C.memory_reset_peak("cpu")
            before = _C.memory_stats("cpu")["allocated"]
            loss = F.linear_cross_entropy(x, weight, targets, chunk_rows=8)
            held = _C.memory_stats("cpu")["allocated"] - before
            peak = _C.memory_stats("cpu")["peak"] - before
            assert held < (1.1 * sums if grad else 0.1 * logits)
            assert logits <= peak < 1.1 * (logits + (sums if grad else 0))
            if not grad:
                continue
            _C.memory_reset_peak("cpu")
            loss.backward()
            stats = _C.memory_stats("cpu")
            # float32: in the place of the sums.
            assert stats["peak"] - before < 1.1 * (sums + (own if dtype != "float32" else 0))
            assert own <= stats["allocated"] - before < 1.1 * own
            x.grad = weight.grad = None


@pytest.mark.parametrize(
    ("sizes", "dtype", "want"),
    [
        ((4096, 1024, 151936), "bfloat16", (4096, False)),  # 4096 rows save as much as sums of 1024 columns cost
        ((4300, 1024, 151936), "bfloat16", (4300, True)),  # 1.22 GiB
        ((4500, 1024, 151936), "bfloat16", (2304, True)),
        ((32768, 1024, 151936), "bfloat16", (4096, True)),  # of at most 4,352, in 8 even shares
        ((32768, 1024, 151936), "float32", (2048, True)),
        ((32768, 10**6, 50257), "bfloat16", (11008, True)),  # for want of room
        ((8192, 384, 50257), "bfloat16", (8192, True)),
        ((8192, 4096, 50257), "bfloat16", (8192, False)),
        ((2048, 256, 4096), "bfloat16", (2048, False)),  # few logits
        ((8192, 4, 4096), "bfloat16", (8192, True)),
        ((8191, 4, 4096), "bfloat16", (8191, False)),
        ((1000, 2, 10**7), "float32", (33, True)),
        ((5, 2, 2**29), "float64", (1, True)),
        ((0, 2, 5), "float32", (0, False)),
        ((5, 2, 0), "float32", (5, False)),
    ],
)
def test_the_choice(sizes: tuple[int, int, int], dtype: str, want: tuple[int, bool]) -> None:
    """At most 1.25 GiB of logits at once, whole tiles of rows, even shares; gradients ahead where that moves fewer bytes."""
    assert _C.explain_chunk(sizes, dtype) == want
    rows, _, words = sizes
    assert want[0] * words * xt.empty(0, dtype=dtype).element_size() <= 1.25 * 2**30 or want[0] == 1
    with pytest.raises(TypeError, match="explain_chunk: dtype must be a floating dtype, got int32"):
        _C.explain_chunk(sizes, "int32")
    with pytest.raises(ValueError, match="explain_chunk: argument 'sizes' must be 3 numbers"):
        _C.explain_chunk((1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_chunk(dtype: str) -> None:
    """64 MiB of logits: gradients ahead by themselves, which leave x and weight alone; an explicit number of rows rules that out."""
    words = 4096
    rows = 2**26 // words // xt.empty(0, dtype=dtype).element_size()
    given = inputs(rows, 1, words, dtype, counted=1024)
    assert _C.explain_chunk((rows, 1, words), dtype) == (rows, True)
    with xt.use_gemm_backend("naive"):
        afterwards, ahead = (run(*given, reduction="sum", chunk_rows=n)[0] for n in (rows, None))
    assert all_bits(ahead) == all_bits(afterwards)
    x, weight, targets = given
    for chunk_rows in (rows, None):
        loss = F.linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
        with xt.no_grad():
            weight.mul_(1.0)
        if chunk_rows is None:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="saved by 'linear_cross_entropy' was changed in place"):
                loss.backward()


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs a GPU: 4 GiB of logits")
def test_more_logits_than_32_bits_count() -> None:
    """43,008 rows of 50,257 logits in one piece: the last column, row and term of their products lie 2^31 elements from the first."""
    rows, width, words = 43008, 16, 50257
    xt.manual_seed(0)
    x, weight = ((xt.randn(n, width, device="cuda") * 0.5).to(xt.bfloat16).requires_grad_() for n in (rows, words))
    targets = xt.randint(0, words, (rows,), device="cuda")
    found = []
    for chunk_rows in (4096, rows):
        x.grad = weight.grad = None
        loss = F.linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
        loss.backward()
        found.append([loss.item(), array(x.grad), array(weight.grad)])
    chunks, whole = found
    assert abs(chunks[0] - whole[0]) < 1e-4
    for a, b in zip(chunks[1:], whole[1:], strict=True):
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs a GPU: 2.5 GiB of logits")
def test_large_logits_are_made_in_chunks_by_themselves() -> None:
    rows, width, words = 8192, 256, 151936
    xt.manual_seed(0)
    x, weight = ((xt.randn(n, width, device="cuda") * 0.1).to(xt.bfloat16).requires_grad_() for n in (rows, words))
    targets = xt.randint(0, words, (rows,), device="cuda")
    found = []
    for chunk_rows in (None, 4096, rows):
        x.grad = weight.grad = None
        xt.cuda.synchronize()
        _C.memory_reset_peak("cuda")
        before = _C.memory_stats("cuda")["allocated"]
        loss = F.linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
        loss.backward()
        found.append(([loss.item(), array(x.grad), array(weight.grad)], _C.memory_stats("cuda")["peak"] - before))
    (own, peak), (asked, _), (whole, most) = found
    assert own[0] == asked[0] and all(np.array_equal(a, b) for a, b in zip(own[1:], asked[1:], strict=True))
    assert peak < 1.6 * 2**30 < most
    assert abs(own[0] - whole[0]) < 1e-4
    for a, b in zip(own[1:], whole[1:], strict=True):
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()
