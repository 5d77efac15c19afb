"""Indexing by tensors, lists and masks, and what is picked and put along a dim: against NumPy, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runs import raced

import xtrain as xt

X = np.random.default_rng(0).standard_normal((4, 5, 3))
A, B = np.array([2, 0, -1]), np.array([[1], [4]])
MASK = np.random.default_rng(1).integers(0, 2, (4, 5)).astype(bool)

# Keys that NumPy reads as PyTorch does.
KEYS: dict[str, Any] = {
    "a list": [0, 2],
    "a list keeps a dim": (slice(None), [-1]),
    "a list between": (1, ..., [-2], None, slice(0, 2)),
    "one place": [2],
    "the same twice": [3, 3, -1],
    "an empty list": [],
    "a vector": A,
    "two that broadcast": (A % 4, B),
    "neighbours behind a slice": (slice(None), A, np.array([0, 1, 2])),
    "apart": (A, slice(None), np.array([0, 1, 2])),
    "with None": (None, A),
    "behind None": (slice(1, 3), None, A),
    "behind ...": (..., A),
    "between ...": (A, ..., None),
    "with a step": (slice(0, 4, 2), A[:2]),
    "a matrix": (slice(None), B),
    "a mask of one dim": MASK[:, 0],
    "a mask of two dims": MASK,
    "a mask behind a slice": (slice(None), MASK[0]),
    "a mask of the last dims": (slice(1, 3), X[0] > 0),
    "a mask of all": X > 0,
    "a mask and a vector": (MASK[:, 1], np.array([0, 1] * MASK[:, 1].sum())[: MASK[:, 1].sum()]),
    "no element": np.zeros(4, bool),
    "a list of bools": [True, False, True, True],
}


def of(key: Any, kind: Any = xt.int64) -> Any:
    """The key with tensors for arrays."""
    if isinstance(key, tuple):
        return tuple(of(item, kind) for item in key)
    if not isinstance(key, np.ndarray):
        return key
    return xt.tensor(key) if key.dtype == bool else xt.tensor(key).to(kind)


@pytest.mark.parametrize("name", KEYS)
def test_a_part_and_its_gradient(name: str) -> None:
    key = KEYS[name]
    for ours in (key, of(key), of(key, xt.int32)):
        x = xt.tensor(X, requires_grad=True)
        part = x[ours]
        np.testing.assert_array_equal(part.detach().cpu().numpy(), X[key])
        dy = np.random.default_rng(2).standard_normal(X[key].shape)
        part.backward(xt.tensor(dy))
        want = np.zeros_like(X)
        np.add.at(want, key, dy)
        np.testing.assert_allclose(x.grad.cpu().numpy(), want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", KEYS)
def test_a_part_is_set(name: str) -> None:
    key = KEYS[name]
    want_shape = X[key].shape
    for value in (2.5, np.float64(-1.0), np.random.default_rng(3).standard_normal(want_shape)):
        x, want = xt.tensor(X), X.copy()
        x[of(key)] = xt.tensor(value) if isinstance(value, np.ndarray) else float(value)
        want[key] = value
        np.testing.assert_array_equal(x.cpu().numpy(), want)
    if want_shape and all(want_shape):  # one that broadcasts, of another dtype, into a view
        row = np.arange(want_shape[-1])
        base, whole = xt.tensor(np.stack([X, X])), np.stack([X, X])
        base[1][of(key)] = xt.tensor(row)
        whole[1][key] = row
        np.testing.assert_array_equal(base.cpu().numpy(), whole)


def test_dims_of_tensors_apart_come_first() -> None:
    """Also where the first of them is not the first of the tensor."""
    values = np.arange(3 * 4 * 2 * 5).reshape(3, 4, 2, 5)
    x = xt.tensor(values)
    np.testing.assert_array_equal(x[:, [0, 3], :, [1, 4]].cpu().numpy(), values[:, [0, 3], :, [1, 4]])
    x[:, [0, 3], :, [1, 4]] = xt.tensor(np.arange(12).reshape(2, 3, 2))
    values[:, [0, 3], :, [1, 4]] = np.arange(12).reshape(2, 3, 2)
    np.testing.assert_array_equal(x.cpu().numpy(), values)


def test_nan_is_not_zero() -> None:
    assert xt.tensor([float("nan"), 0.0, -0.0, -1.0]).nonzero().tolist() == [[0], [3]]


def test_ints_beside_tensors_come_first() -> None:
    """As in PyTorch; NumPy would put the picked dim in front."""
    x = xt.tensor(X)
    assert tuple(x[0, :, [1, 2]].shape) == (5, 2)
    np.testing.assert_array_equal(x[0, :, [1, 2]].cpu().numpy(), X[0][:, [1, 2]])
    np.testing.assert_array_equal(x[[1, 2], 3].cpu().numpy(), X[[1, 2], 3])
    np.testing.assert_array_equal(x[xt.tensor(1), [0, 4]].cpu().numpy(), X[1, [0, 4]])
    np.testing.assert_array_equal(x[(0, 1), (1, 2)].cpu().numpy(), X[(0, 1), (1, 2)])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"])
def test_every_dtype_is_picked_and_put(kind: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1], [2, 3, 4]])
    x = xt.tensor(values).to(kind)
    plain = x.float().cpu().numpy()
    np.testing.assert_array_equal(x[[2, 0]].float().cpu().numpy(), plain[[2, 0]])
    np.testing.assert_array_equal(
        x.gather(1, xt.tensor([[2], [1], [0]])).float().cpu().numpy(), [[1], [0], [plain[2, 0]]]
    )
    x[[0, 1]] = x[[2, 2]]
    plain[[0, 1]] = plain[[2, 2]]
    np.testing.assert_array_equal(x.float().cpu().numpy(), plain)
    x[x == 0] = 1
    assert not (x == 0).any().item() and x.dtype.name == kind


def test_the_last_of_several_values_counts() -> None:
    x, src = xt.zeros(3, requires_grad=True), xt.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    y = xt.scatter(x, 0, xt.tensor([1, 1, 2, 1]), src)
    assert y.tolist() == [0, 4, 3]
    y.backward(xt.tensor([10.0, 20.0, 30.0]))
    assert x.grad.tolist() == [10, 0, 0] and src.grad.tolist() == [0, 0, 30, 20]
    with xt.no_grad():
        x[[0, 0]] = xt.tensor([5.0, 6.0])
    assert x.tolist() == [6, 0, 0]


def test_scatter_takes_numbers_and_larger_sources() -> None:
    x, index = xt.zeros(2, 3), xt.tensor([[1], [0]])
    assert xt.scatter(x, 1, index, 7).tolist() == [[0, 7, 0], [7, 0, 0]]
    src = xt.arange(6).reshape(2, 3).float().requires_grad_()
    assert x.scatter_add(1, index, src).tolist() == [[0, 0, 0], [3, 0, 0]]
    x.scatter(1, index, src).sum().backward()
    assert src.grad.tolist() == [[1, 0, 0], [1, 0, 0]]
    x.scatter_(1, index, 2.0).scatter_add_(1, index, xt.ones(2, 1)).masked_fill_(x == 0, -1.0)
    assert x.tolist() == [[-1, 3, -1], [3, -1, -1]]
    with pytest.raises(ValueError, match=r"scatter: src must have at least the sizes of index \(2, 1\), got \(1, 1\)"):
        xt.scatter(x, 1, index, xt.zeros(1, 1))


def test_along_a_dim() -> None:
    for dim in (0, 1, 2, -1):
        index = np.array([1, 0, 1])
        x = xt.tensor(X, requires_grad=True)
        y = xt.index_select(x, dim, xt.tensor(index))
        np.testing.assert_array_equal(y.detach().cpu().numpy(), np.take(X, index, dim))
        y.sum().backward()
        want = np.zeros(X.shape[dim])
        want[:2] = 1, 2
        np.testing.assert_array_equal(
            x.grad.cpu().numpy(), np.broadcast_to(want.reshape([-1 if d == dim % 3 else 1 for d in range(3)]), X.shape)
        )
        source = np.take(X, index, dim) + 1
        added = X.copy()
        np.add.at(np.moveaxis(added, dim, 0), index, 2 * np.moveaxis(source, dim, 0))
        np.testing.assert_allclose(
            xt.index_add(xt.tensor(X), dim, xt.tensor(index), xt.tensor(source), alpha=2).cpu().numpy(),
            added,
            rtol=1e-13,
        )
        in_place = xt.tensor(X)
        in_place.index_add_(dim, xt.tensor(index), xt.tensor(source), alpha=2)
        np.testing.assert_allclose(in_place.cpu().numpy(), added, rtol=1e-13)  # fmt: skip


def test_masks_and_places() -> None:
    mask = X > 0.5
    np.testing.assert_array_equal(xt.masked_select(xt.tensor(X), xt.tensor(mask)).cpu().numpy(), X[mask])
    np.testing.assert_array_equal(xt.tensor(X).masked_select(xt.tensor(MASK[0, :3])).cpu().numpy(), X[np.broadcast_to(MASK[0, :3], X.shape)])  # fmt: skip
    np.testing.assert_array_equal(xt.nonzero(xt.tensor(mask)).cpu().numpy(), np.argwhere(mask))
    parts = xt.tensor(np.array([0, 3, 0, -2])).nonzero(as_tuple=True)
    assert [part.tolist() for part in parts] == [[1, 3]] and parts[0].dtype is xt.int64
    assert tuple(xt.nonzero(xt.zeros(2, 0)).shape) == (0, 2)
    for value, count in ((5, 1), (0, 0)):  # a scalar has a place without coordinates, or none
        assert xt.tensor(value).nonzero().shape == (count, 0) and xt.tensor(value).nonzero(as_tuple=True) == ()


def test_small_floats_are_added_in_a_wide_one() -> None:
    """1 + 2^-9 rounds to 1 in bfloat16 each time; 64 of them together are 1 + 2^-3."""
    x, index = xt.ones(1).bfloat16(), xt.zeros(64, dtype=xt.int64)
    assert x.scatter_add(0, index, xt.full((64,), 2.0**-9).bfloat16()).item() == 1.125
    y = xt.ones(1).bfloat16().requires_grad_()
    y[index].backward(xt.full((64,), 1.0 + 2.0**-7).bfloat16())
    assert y.grad.item() == 64.5


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (1.5, TypeError, r"a tensor is indexed with ints, slices, None and \.\.\., and tensors and lists .*, got float"),
    ("a", TypeError, r"a tensor is indexed with .*, got str"),
    (xt.tensor(1.5), TypeError, r"a tensor is indexed with int64, int32 and bool tensors, got float32"),
    (np.array(1.5), TypeError, r"a tensor is indexed with .*, got ndarray of float64"),
    ([1.5], TypeError, r"a tensor is indexed with .*, got list of float32"),
    (True, TypeError, r"a tensor is indexed with ints, .*, got a bool; to mask use where\(\)"),
    ((0, [5]), IndexError, r"index(_put)?: index must be in \[-5, 5\), got 5 at position 0"),
    ([1 << 70], ValueError, "must fit in 64 bits"),
    ([4], IndexError, r"index(_put)?: index must be in \[-4, 4\), got 4 at position 0"),
    ((slice(None), [0, -6]), IndexError, r"index(_put)?: index must be in \[-5, 5\), got -6 at position 1"),
    (([0, 1], [0, 1, 2]), ValueError, r"index: .*\(2,\).*\(3,\)"),
    (np.ones(3, bool), IndexError, r"index: a mask must have the sizes \(4,\) of the dims it indexes, got \(3,\)"),
    (np.ones((4, 4), bool), IndexError, r"index: a mask must have the sizes \(4, 5\) .*, got \(4, 4\)"),
    ((..., [0], ...), IndexError, r"an index can have only one ellipsis"),
    (([0], 0, 0, 0), IndexError, r"too many indices for a tensor of 3 dimensions"),
    ((MASK, 0, 0), IndexError, r"too many indices for a tensor of 3 dimensions"),
    (xt.zeros(2), TypeError, r"a tensor is indexed with int64, int32 and bool tensors, got float32"),
    (xt.zeros(2, dtype=xt.uint8), TypeError, r"a tensor is indexed with int64, int32 and bool tensors, got uint8"),
]


@pytest.mark.parametrize(("key", "kind", "text"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.on_cpu
def test_keys_that_are_refused(key: Any, kind: type[Exception], text: str) -> None:
    x = xt.tensor(X)
    with pytest.raises(kind, match=text):
        x[key]
    with pytest.raises(kind, match=text):
        x[key] = 0.0
    assert x.tolist() == X.tolist()


def test_masks_that_are_refused() -> None:
    x = xt.tensor(X)
    with pytest.raises(TypeError, match="^masked_select: mask must have dtype bool, got int64$"):
        xt.masked_select(x, xt.zeros(2, dtype=xt.int64))
    with pytest.raises(ValueError, match=r"^masked_select: mask must broadcast with input \(.*\), got \(97,\)$"):
        xt.masked_select(x, xt.zeros(97, dtype=xt.bool))


def test_what_setting_refuses_leaves_the_tensor() -> None:
    x = xt.tensor(X)
    with pytest.raises(ValueError, match="expand"):
        x[[0, 1]] = xt.zeros(2, 5, 2)
    p = xt.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="setitem: a tensor that requires a gradient must not be changed in place"):
        p[[0]] = 1.0
    with pytest.raises(RuntimeError, match="setitem: a value that requires a gradient cannot be recorded in place"):
        x[[0]] = p
    assert x.tolist() == X.tolist() and p.tolist() == [0, 0, 0] and xt.is_grad_enabled()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_few_rows_of_many_have_the_bits_of_many_of_few(kind: str) -> None:
    """The backward groups its rows in one of two ways, by the sizes; also where it adds to a gradient that is there."""
    rng = np.random.default_rng(6)
    ids = xt.tensor(rng.integers(7, 10, 93))
    for width in (1, 5, 300):
        dy = [xt.tensor(rng.standard_normal((93, width)) * 10.0 ** rng.integers(-3, 4, (93, 1))).to(kind) for _ in "ab"]
        grads = []
        for size in (10, 900):
            x = xt.zeros(size, width).to(kind).requires_grad_()
            xt._C.backward([x[ids], x[ids]], dy)
            grads.append(x.grad.float().cpu().numpy())
        np.testing.assert_array_equal(grads[1][:10], grads[0])
        assert not grads[1][10:].any() and not grads[0][:7].any() and grads[0][7:].any()


def test_cumsum_of_integers() -> None:
    counts = xt.tensor([[1, 2, 3], [250, 7, 1]]).to(xt.uint8)
    total = xt.cumsum(counts, 1)
    assert total.dtype is xt.int64 and total.tolist() == [[1, 3, 6], [250, 257, 258]]
    assert (xt.tensor([True, True, False]).cumsum(0)).tolist() == [1, 2, 2]
    assert xt.tensor(3).cumsum(0).item() == 3
    with pytest.raises(IndexError, match=r"cumsum: dim must be in \[-1, 0\], got 7"):
        xt.tensor(3).cumsum(7)
    big = np.full(5, 2**62, np.int64)
    assert xt.tensor(big).cumsum(0).tolist() == np.cumsum(big).tolist(), "wraps around"


# Memory that is right, what is given, and a call that reads the memory as x, in Python. Rows are many, so that some change under a kernel.
CHANGED = {
    "embedding": ("i % 8", "w = xt.randn(8, 16)", "F.embedding(x, w)"),
    "embedding_column": ("i % 8", "w = xt.randn(8, 1)", "F.embedding(x, w)"),
    "embedding_bwd": ("i % 8", "y = F.embedding(x, xt.randn(8, 1, requires_grad=True)).sum()", "y.backward(retain_graph=True)"),
    "embedding_bwd_few": ("i % 8", "y = F.embedding(x, xt.randn(2**18, 1, requires_grad=True)).sum()", "y.backward(retain_graph=True)"),
    "cross_entropy": ("i % 8", "w = xt.randn(len(i), 8)", "F.cross_entropy(w, x)"),
    "cross_entropy_bwd": ("i % 8", "y = F.cross_entropy(xt.randn(len(i), 8, requires_grad=True), x)", "y.backward(retain_graph=True)"),
    "chunks": ("i % 8", "a, w = (xt.randn(n, 1, requires_grad=True) for n in (len(i), 8))", "F.linear_cross_entropy(a, w, x, chunk_rows=5000).backward()"),
    "gather": ("i % 8", "w = xt.randn(8, requires_grad=True)", "w.gather(0, x).sum().backward()"),
    "likeliest": ("(0 * i).astype('f4')[None]", "r = xt.tensor([1, 2])", "assert F.sample(x, r, temperature=0.0).item() < len(i)"),
    "top_p": ("(0 * i).astype('f4')[None]", "r = xt.tensor([1, 2])", "assert F.sample(x, r, top_p=0.9).item() < len(i)"),
    "top_k": ("(0 * i).astype('f4')[None]", "r = xt.tensor([1, 2])", "assert F.sample(x, r, top_k=9, top_p=0.5).item() < len(i)"),
    "reference": ("np.tile(F.document_bounds([[4, 4]]).numpy(), (2000, 1, 1))", "q = xt.randn(2000, 1, 8, 4, requires_grad=True); _C.use_attention_backend('reference')", "F.scaled_dot_product_attention(q, q, q, documents=x).sum().backward()"),
}  # fmt: skip


@pytest.mark.on_cpu
@pytest.mark.parametrize("name", CHANGED)
def test_what_another_thread_changes_leads_nowhere_else(name: str) -> None:
    """In a process of its own: integers and logits that become addresses are right at one moment and far outside at the next. An error or any
    numbers may be the answer, but no address outside the tensors.
    """
    memory, given, call = CHANGED[name]
    setup = f"""i = np.arange(20000)
right = {memory}
wrong = right + np.array({{"int64": 2**40, "int32": [[-(2**30)], [2**30]], "float32": -1e9}}[right.dtype.name], right.dtype)
if right.dtype == np.float32:
    wrong[:, -1] = 1e9
memory = right.copy()
x = xt.from_numpy(memory)
{given}"""
    change = """memory[:] = right
time.sleep(1e-4)
memory[:] = wrong
memory[:] = right  # at once, and later
memory[:] = wrong
time.sleep(1e-4)"""
    raced(setup, change, call, 1)
