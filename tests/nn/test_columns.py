"""Gradients of parts that lie where the whole has them: what split() gathers, and attention's of columns."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import array, bits


class InPlace(xt.Function):
    """Twice its parts, whose gradients are columns of one new tensor; `order` says in which column group each lies."""

    order = (0, 1)
    seen: list = []

    @staticmethod
    def forward(ctx, a, b):
        return a * 2.0, b * 2.0

    @staticmethod
    def backward(ctx, da, db):
        whole = xt.full((4, 6), 7.0)
        parts = [whole[:, :2], whole[:, 2:4]]
        places = [parts[i] for i in InPlace.order]
        places[0].copy_(da * 2.0)
        places[1].copy_(db * 2.0)
        InPlace.seen = [whole] if InPlace.seen else []
        return places[0], places[1]


@pytest.mark.parametrize(("order", "keep"), [((0, 1), False), ((1, 0), False), ((0, 1), True)])
def test_split_gathers_gradients(monkeypatch, order, keep) -> None:
    """Where they lie already and nobody sees them, else in memory of their own."""
    monkeypatch.setattr(InPlace, "order", order)
    monkeypatch.setattr(InPlace, "seen", [None] if keep else [])
    x = xt.randn(4, 6)
    x.requires_grad = True
    a, b, c = x.split((2, 2, 2), 1)
    y, z = InPlace.apply(a, b)
    dy, dz, dc = xt.randn(4, 2), xt.randn(4, 2), xt.randn(4, 2)
    ((y * dy).sum() + (z * dz).sum() + (c * dc).sum()).backward()
    want = np.concatenate([2 * array(dy), 2 * array(dz), array(dc)], 1)
    assert np.array_equal(array(x.grad), want)
    if keep:
        assert np.array_equal(array(InPlace.seen[0])[:, 4:], np.full((4, 2), 7.0))


def test_split_copies_only_what_lies_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(InPlace, "order", (0, 1))
    monkeypatch.setattr(InPlace, "seen", [])
    x = xt.randn(4, 6)
    x.requires_grad = True
    a, b, c = x.split((2, 2, 2), 1)
    y, z = InPlace.apply(a, b)
    places = []
    x.register_hook(lambda g: places.append(g.data_ptr()))
    a.register_hook(lambda g: places.append(g.data_ptr()))
    ((y * y).sum() + (z * z).sum() + (c * c).sum()).backward()
    assert places[0] == places[1]


def qk(q, k):
    ones = xt.ones(8)
    return _C.qk_norm_rope(q, k, ones, ones * 2.0, 1e-6, 100.0, None, 3)


@pytest.mark.parametrize(("b", "s", "more"), [(2, 3, 0), (1, 3, 0), (2, 3, 9), (1, 1, 0)])
def test_heads_that_are_columns_get_gradients_that_are_columns(b: int, s: int, more: int) -> None:
    """In one block, which becomes the gradient of the whole, with the bits of dense heads. Where they are columns of a
    part of the block, or of one row, they may get memory of their own."""
    x, dq, dk = xt.randn(b * s + more, 40), xt.randn(b, s, 2, 8), xt.randn(b, s, 2, 8)
    x.requires_grad = True
    places, grads = [], []
    for dense in (False, True):
        q, k, v = (x * 1.0)[: b * s].split((16, 16, 8), 1)
        q, k = q.view(b, s, 2, 8), k.view(b, s, 2, 8)
        q, k = (q.contiguous(), k.contiguous()) if dense else (q, k)
        q.register_hook(lambda g: places.append(g.is_contiguous()))
        x.grad = None
        y, z = qk(q, k)
        ((y * dq).sum() + (z * dk).sum() + (v * v).sum()).backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]
    assert places == [more > 0 or b * s == 1, True]


class Given(xt.Function):
    """A product of x that lies in an array of NumPy's."""

    array = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, x):
        array = np.ones((6, 24), np.float32)
        Given.array = weakref.ref(array)
        return xt.from_numpy(array)

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.on_cpu  # where an array's memory is the tensor's
def test_a_block_is_begun_for_memory_that_is_still_there() -> None:
    """As long as columns are left: a tensor that is made meanwhile must not pass for the one that they belong to."""
    x, seen = xt.randn(6, 24).requires_grad_(), []
    product = Given.apply(x)
    q, k = product[:, :8].view(2, 3, 1, 8), product[:, 8:16].view(2, 3, 1, 8)
    older = x * 2.0
    older.register_hook(lambda g: seen.append(Given.array() is not None))
    loss = sum(t.sum() for t in qk(q, k)) + older.sum()
    del product, q, k
    loss.backward()
    assert seen == [True] and Given.array() is None


def test_heads_that_overlap_get_gradients_of_their_own() -> None:
    x, dq, dk = xt.randn(6, 24), xt.randn(2, 3, 2, 8), xt.randn(2, 3, 2, 8)
    x.requires_grad = True
    grads = []
    for dense in (False, True):
        q, k = x[:, :16].view(2, 3, 2, 8), x[:, 8:].view(2, 3, 2, 8)
        x.grad = None
        y, z = qk(q.contiguous(), k.contiguous()) if dense else qk(q, k)
        ((y * dq).sum() + (z * dk).sum()).backward()
        grads.append(array(x.grad))
    assert np.allclose(grads[0], grads[1], rtol=1e-6, atol=1e-6)


def test_attention_of_columns_gets_gradients_that_are_columns() -> None:
    """GPT-2's q, k and v: dq, dk and dv lie in one block, which becomes the gradient of the product, with the bits of dense heads."""
    b, s, h, d = 2, 5, 3, 8
    x, dy = xt.randn(b * s, 3 * h * d), xt.randn(b, s, h, d)
    x.requires_grad = True
    places, grads = [], []
    for dense in (False, True):
        product = x * 1.0
        parts = product.split((h * d, h * d, h * d), 1)
        heads = [part.view(b, s, h, d) for part in parts]
        q, k, v = (t.contiguous() if dense else t for t in heads)
        for t in (parts[2], parts[0], product):
            t.register_hook(lambda g: places.append(g.data_ptr()))
        x.grad = None
        y = _C.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True)
        (y.transpose(1, 2) * dy).sum().backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]
    size = 4 * h * d
    assert sorted(p - places[2] for p in places[:3]) == [0, 0, 2 * size]
    assert len({p - places[5] for p in places[3:]}) == 3, "dense gradients are copied into the product's"


def rotated(q, k):
    return _C.rope(q, 100.0, None, 3), _C.rope(k, 100.0, None, 3)


@pytest.mark.parametrize("order", ["qkv", "vqk"])
@pytest.mark.parametrize("through", [qk, rotated])
def test_values_get_gradients_beside_those_of_rotated_heads(through, order: str) -> None:
    """v is columns of the product, q and k are rotated, in Qwen3 after a norm: dv is left where the backward of both puts dq and dk
    beside it later, so split() copies nothing. Who keeps dv keeps its values."""
    x, dy, widths = xt.randn(6, 32), xt.randn(2, 3, 2, 8), {"q": 16, "k": 8, "v": 8}
    x.requires_grad = True
    places, grads, kept = [], [], []
    for dense in (False, True):
        product = x * 1.0
        parts = dict(zip(order, product.split([widths[name] for name in order], 1), strict=True))
        heads = [parts[name].view(2, 3, -1, 8) for name in "qkv"]
        q, k, v = (t.contiguous() if dense else t for t in heads)
        for t in (product, *(parts[name] for name in order)):
            t.register_hook(lambda g: places.append(g.data_ptr()))
        parts["v"].register_hook(lambda g: kept.append((g, array(g).copy())))
        x.grad = None
        y = _C.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (*through(q, k), v)), True, enable_gqa=True)
        (y.transpose(1, 2) * dy).sum().backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1] and all(np.array_equal(array(g), then) for g, then in kept)
    first = np.cumsum([0] + [4 * widths[name] for name in order[:2]])
    assert sorted(p - min(places[:4]) for p in places[:4]) == [0, *first]


def test_heads_may_change_after_their_rotation() -> None:
    """RoPE's backward needs their place alone."""
    x = xt.randn(6, 24).requires_grad_()
    heads = (x * 1.0)[:, :16].view(2, 3, 2, 8)
    y = _C.rope(heads, 100.0, None, 3)
    with xt.no_grad():
        heads.mul_(3.0)
    y.backward(xt.ones(2, 3, 2, 8))
    assert array(x.grad)[:, :16].any() and not array(x.grad)[:, 16:].any()


@pytest.mark.parametrize("columns", [False, True])
def test_rope_keeps_columns_alone(columns: bool) -> None:
    """A view that is no columns would keep its memory until the backward, for nothing."""
    x = xt.randn(2, 4, 4000, 8).requires_grad_()
    before = _C.memory_stats(x.device)["allocated"]
    heads = (x * 1.0).view(8000, 8, 4)[:, :4] if columns else (x * 1.0).transpose(1, 2)
    y = _C.rope(heads)
    del heads
    kept = _C.memory_stats(x.device)["allocated"] - before - y.nbytes
    assert kept >= x.nbytes if columns else kept < 0.5 * x.nbytes


@pytest.mark.parametrize(("width", "alone"), [(24, True), (16, False)])
def test_few_rotated_columns_begin_no_block(width: int, alone: bool) -> None:
    """Less than half of a row: a block would be of the whole product's size, for a gradient that may be the only one there."""
    x, seen = xt.randn(6, 16 + width).requires_grad_(), []
    heads = (x * 1.0).split((16, width), 1)[0].view(2, 3, 2, 8)
    heads.register_hook(lambda g: seen.append(g.is_contiguous()))
    _C.rope(heads, 100.0, None, 3).backward(xt.ones(2, 3, 2, 8))
    assert seen == [alone]
