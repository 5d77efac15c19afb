"""tree_sum_: the fixed tree against a model in NumPy, bit for bit, and what a sum over processes needs of it."""

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.distributed.bank import Bank, add


def tree(parts):
    """T of float32 arrays."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return tree(parts[:half]) + tree(parts[half:])


def wide(count, size=700):
    """Numbers whose sums depend on their order."""
    rng = np.random.default_rng(count)
    return (rng.standard_normal((count, size)) * 10.0 ** rng.integers(-3, 4, (count, size))).astype(np.float32)


def summed(parts, shape=None):
    return _C.tree_sum_(xt.empty(parts[0].shape if shape is None else shape), parts).cpu().numpy().tobytes()


@pytest.mark.parametrize("count", range(1, 65))
def test_model(count):
    values = wide(count)
    assert summed([xt.tensor(row) for row in values]) == tree(list(values)).tobytes()


def test_more_parts_than_one_call_takes():
    values = wide(150)
    assert (
        add([xt.tensor(row) for row in values], Bank([xt.zeros(700)], 1)).cpu().numpy().tobytes()
        == tree(list(values)).tobytes()
    )


@pytest.mark.parametrize("size", [700, 8192 + 5])  # the second has a whole block
@pytest.mark.parametrize("narrow", [xt.bfloat16, xt.float16])
def test_parts_of_16_bits_beside_sums(narrow, size):
    """They are converted exactly: a leaf's gradient is added to a float32 node."""
    parts = [xt.tensor(row) for row in wide(5, size)]
    mixed = [part.to(narrow) if i % 2 else part for i, part in enumerate(parts)]
    assert summed(mixed) == tree([part.float().cpu().numpy() for part in mixed]).tobytes()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_parts_may_begin_anywhere(count):
    """The last one an element behind an aligned address, a whole block of it too."""
    values = wide(count, 8192 + 5)
    parts = [xt.tensor(row) for row in values]
    parts[-1] = xt.tensor(np.append(np.float32(9), values[-1]))[1:]
    assert summed(parts) == tree(list(values)).tobytes()


@pytest.mark.parametrize("count", [1, 2, 6, 8, 12, 40, 64])
def test_neighbours_of_a_power_of_two_are_a_subtree(count):
    parts = [xt.tensor(row) for row in wide(count)]
    whole = summed(parts)
    for each in (1, 2, 4, 8, 16, 32):
        if count % each == 0:
            nodes = [_C.tree_sum_(xt.empty(700), parts[i : i + each]) for i in range(0, count, each)]
            assert summed(nodes) == whole
    if count == 12:  # three are none
        assert summed([_C.tree_sum_(xt.empty(700), parts[i : i + 3]) for i in range(0, 12, 3)]) != whole


def test_the_sum_may_replace_a_part():
    parts = [xt.tensor(row) for row in wide(3)]
    whole = summed(parts)
    assert _C.tree_sum_(parts[1], parts).cpu().numpy().tobytes() == whole


def test_squares_of_blocks_do_not_depend_on_where_the_blocks_lie():
    """A block is 8192 elements from a multiple of that, whoever has it; the last may be shorter."""
    values = xt.tensor(wide(1, 3 * 8192 + 5)[0])
    out, squares = xt.empty(values.shape), xt.full((4,), float("nan"), dtype=xt.float64)
    assert _C.tree_sum_(out, [values], squares) is out
    expected = [
        float(np.sum(np.square(block, dtype=np.float64)))
        for block in np.split(values.cpu().numpy(), [8192, 16384, 24576])
    ]
    np.testing.assert_allclose(squares.cpu().numpy(), expected, rtol=1e-14)
    for block in range(3):
        alone = xt.empty(1, dtype=xt.float64)
        piece = values[8192 * block : 8192 * (block + 1)]
        _C.tree_sum_(xt.empty(8192), [piece], alone)
        assert alone.item() == squares[block].item()


def test_threads_do_not_change_a_bit():
    values = [xt.tensor(row) for row in wide(6, 50_000)]
    found = set()
    for threads in (1, 2, 3):
        xt.set_num_threads(threads)
        squares = xt.empty(7, dtype=xt.float64)
        found.add(
            summed(values)
            + _C.tree_sum_(xt.empty(50_000), values, squares).cpu().numpy().tobytes()
            + squares.cpu().numpy().tobytes()
        )
    assert len(found) == 1


def test_infinities_and_nan_pass():
    inf, nan = float("inf"), float("nan")
    out = _C.tree_sum_(xt.empty(3), [xt.tensor([inf, inf, nan]), xt.tensor([1.0, -inf, 1.0])]).tolist()
    assert out[0] == inf and np.isnan(out[1]) and np.isnan(out[2])


def test_the_guard_of_a_norm_is_nan_where_the_norm_is_not_finite():
    for square, most in ((4.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        norm, _, guard = _C.block_norm(xt.tensor([1.0, square], dtype=xt.float64), most)
        np.testing.assert_equal(norm.item(), np.sqrt(1.0 + square))
        np.testing.assert_equal(guard.item(), 0.0 if square == 4.0 else float("nan"))


def test_what_is_changed_is_counted():
    """A tensor that a backward needs is not overwritten without a word: the sum, the squares, and copies."""
    part = xt.ones(3)
    for place in (0, 1):
        out, squares = xt.ones(3), xt.ones(1, dtype=xt.float64)
        x = xt.ones(3 if place == 0 else 1, dtype=(xt.float32, xt.float64)[place], requires_grad=True)
        y = (x * (out, squares)[place]).sum()
        _C.tree_sum_(out, [part], squares)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.backward()
    kept, x = xt.ones(3), xt.ones(3, requires_grad=True)
    y = (x * kept).sum()
    _C.foreach_copy_([kept], [part])
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()
