"""Clauses of cached_attention: what is stored, what is seen, and which kernel of a GPU has which shapes."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain import functional as F

DTYPES = ["float32", "bfloat16", "float16", "float64"]


def inputs(batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: str = "float32", seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, 1, dim), *[(batch, kv_heads, 1, dim)] * 2, *[(batch, kv_heads, length, dim)] * 2]
    return [xt.tensor(rng.standard_normal(shape)).to(getattr(xt, dtype)) for shape in shapes]


def bits(x: xt.Tensor) -> bytes:
    return x.to(xt.float64).cpu().numpy().tobytes()


def test_one_row_is_stored_and_the_others_stay() -> None:
    """At the position of each sequence; what lies behind it is neither read nor written."""
    q, k, v, keys, values = inputs(2, 4, 2, 70, 64)
    keys[0, :, 4:], values[1, :, 68:] = float("nan"), float("nan")
    before = [keys.cpu().numpy().copy(), values.cpu().numpy().copy()]
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([3, 67]))
    for new, kept, old in ((k, keys, before[0]), (v, values, before[1])):
        old[0, :, 3], old[1, :, 67] = new.cpu().numpy()[0, :, 0], new.cpu().numpy()[1, :, 0]
        assert np.array_equal(kept.cpu().numpy(), old, equal_nan=True)
    assert np.isfinite(out.cpu().numpy()).all()


def test_the_first_position_gives_the_value() -> None:
    q, k, v, keys, values = inputs(2, 6, 2, 5, 8)
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([0, 0]))
    assert (out.cpu().numpy() == np.repeat(v.cpu().numpy(), 3, 1)).all()


@pytest.mark.parametrize("plain", [False, True])
def test_positions_outside(plain: bool) -> None:
    """NaN for that sequence alone, and nothing is stored."""
    q, k, v, keys, values = inputs(3, 2, 1, 6, 64)
    before = bits(keys), bits(values)
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([-1, 6, 2**40]), plain=plain).cpu().numpy()
    assert np.isnan(out).all() and (bits(keys), bits(values)) == before
    out = _C.cached_attention(q, k, v, keys, values, xt.tensor([-1, 5, 6]), plain=plain).cpu().numpy()
    assert [bool(np.isnan(row).all()) for row in out] == [True, False, True] and np.isfinite(out[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 150, 64), (1, 7, 1, 129, 128), (2, 3, 3, 64, 64), (1, 12, 2, 300, 128)])
def test_both_kernels_and_attention_agree(dtype: str, sizes) -> None:
    """With scaled_dot_product_attention over what is stored, to what the format can show; step after step."""
    q, k, v, keys, values = inputs(*sizes, dtype=dtype)
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    other = keys.clone(), values.clone()
    for position in (0, 62, 63, 64, sizes[3] - 1):
        place = xt.full((sizes[0],), min(position, sizes[3] - 1), dtype=xt.int64)
        fast = _C.cached_attention(q, k, v, keys, values, place)
        plain = _C.cached_attention(q, k, v, *other, place, plain=True)
        end = place[0].item() + 1
        want = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], enable_gqa=True)
        scale = values.to(xt.float64).abs().max().item() * (3 * unit + 300 * min(unit, 2.0**-24))
        for got in (fast, plain):
            assert (got.to(xt.float64) - want.to(xt.float64)).abs().max().item() <= scale
    assert bits(keys) == bits(other[0]) and bits(values) == bits(other[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_company_and_again(dtype: str) -> None:
    """A sequence's result depends neither on the others nor on the room behind its position."""
    q, k, v, keys, values = inputs(4, 8, 2, 140, 64, dtype)
    places = xt.tensor([10, 139, 64, 63])
    out = [_C.cached_attention(q, k, v, keys, values, places) for _ in range(3)]
    assert bits(out[0]) == bits(out[1]) == bits(out[2])
    alone = [part[1:2].clone() for part in (q, k, v, keys, values)]
    assert bits(_C.cached_attention(*alone, places[1:2])) == bits(out[0][1:2])
    short = [part[2:3].clone() for part in (q, k, v)] + [part[2:3, :, :65].clone() for part in (keys, values)]
    assert bits(_C.cached_attention(*short, places[2:3])) == bits(out[0][2:3])


def test_columns_of_one_product_are_taken_as_they_are() -> None:
    """query, key and value as views of [B, (H + 2 K) D], as a joined product makes them."""
    joined = xt.tensor(np.random.default_rng(2).standard_normal((2, 8 * 64)).astype(np.float32))
    views = [joined[:, a:b].view(2, n, 1, 64) for a, b, n in ((0, 256, 4), (256, 384, 2), (384, 512, 2))]
    _, _, _, keys, values = inputs(2, 4, 2, 9, 64)
    places = xt.tensor([4, 8])
    want = _C.cached_attention(*[view.contiguous() for view in views], keys.clone(), values.clone(), places)
    assert bits(_C.cached_attention(*views, keys, values, places)) == bits(want)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_elements_apart_are_read_where_they_are(number: int) -> None:
    """Two elements a head, every other one of four."""
    given, want = inputs(2, 2, 1, 5, 2), inputs(2, 2, 1, 5, 2)
    wide = xt.full((*given[number].shape[:3], 4), 9.0)
    wide[..., ::2] = given[number]
    given[number] = wide[..., ::2]
    place = xt.tensor([2, 4])
    assert bits(_C.cached_attention(*given, place)) == bits(_C.cached_attention(*want, place))
    assert bits(given[3]) == bits(want[3]) and bits(given[4]) == bits(want[4])


def test_what_is_refused() -> None:
    names = ("query", "key", "value", "keys", "values")
    for number, name in enumerate(names):
        given = inputs(1, 2, 1, 3, 4)
        given[number].requires_grad_()
        with pytest.raises(
            RuntimeError, match=f"^cached_attention: {name} must not require a gradient while recording"
        ):
            _C.cached_attention(*given, xt.tensor([0]))
    for number in (3, 4):
        given = inputs(1, 2, 2, 3, 4)
        given[number] = given[number].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match=f"^cached_attention: {names[number]} must be contiguous, got strides"):
            _C.cached_attention(*given, xt.tensor([0]))
    with pytest.raises(ValueError, match="must be a multiple of key heads, got 3 and 2$"):
        _C.cached_attention(*inputs(1, 3, 2, 3, 4), xt.tensor([0]))


@pytest.mark.on_cpu
def test_heads_without_elements() -> None:
    """Nothing is copied from where nothing is, which UBSan sees (make sanitize)."""
    out = _C.cached_attention(*inputs(2, 4, 2, 5, 0), xt.tensor([0, 3]))
    assert tuple(out.shape) == (2, 4, 1, 0)


@pytest.mark.parametrize("number", [3, 4])
def test_changes_are_counted(number: int) -> None:
    """Autograd sees that keys and values have changed since they were saved."""
    given = inputs(1, 1, 1, 3, 2)
    x = xt.ones(1, 1, 3, 2).requires_grad_()
    y = (x * given[number]).sum()
    with xt.no_grad():
        _C.cached_attention(*given, xt.tensor([1]))
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()
