"""Custom functions (xt.Function), recomputation (xt.checkpoint), and that graphs keep nothing alive longer than they should."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.usefixtures("no_leaks")


def leaf(*values: float):
    return xt.tensor(np.array(values, np.float64), requires_grad=True)


class Square(xt.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * x * (2 * ctx.factor), None


def test_function() -> None:
    x = leaf(3, 4)
    y = Square.apply(x, 2.0)
    assert (y.tolist(), y.grad_fn, y.requires_grad) == ([18, 32], "Square", True)
    y.sum().backward()
    assert x.grad.tolist() == [12, 16]
    assert not Square.apply(x.detach(), 2.0).requires_grad
    with xt.no_grad():
        assert not Square.apply(x, 2.0).requires_grad


def test_function_with_several_outputs_and_none() -> None:
    class Both(xt.Function):
        @staticmethod
        def forward(ctx, a, b):
            assert ctx.needs_input_grad == (True, False)
            return a + b, a * 2

        @staticmethod
        def backward(ctx, d1, d2):
            return d1 + d2 * 2, None

    x = leaf(1, 2)
    s, _ = Both.apply(x, xt.tensor(np.ones(2)))
    s.sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_function_that_returns_its_input() -> None:
    class Same(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy * 7

    x = leaf(1)
    (Same.apply(x * 1) * 2).backward()
    assert x.grad.item() == 14


def test_function_errors() -> None:
    def failing(backward):
        class Bad(xt.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

        Bad.backward = staticmethod(backward)
        return Bad

    x = leaf(1, 2)
    for backward, kind, text in [
        (lambda ctx, dy: (dy, dy), (RuntimeError, ValueError), "Bad: backward must return .*1.*got 2"),
        (lambda ctx, dy: dy[:1], (RuntimeError, ValueError), r"Bad: .*gradient 0 .*must .*\(2,\).*got .*\(1,\)"),
        (lambda ctx, dy: 3.0, TypeError, "Bad: .*got float"),
        (lambda ctx, dy: 1 / 0, ZeroDivisionError, ""),
    ]:
        with pytest.raises(kind, match=text or None):
            failing(backward).apply(x).sum().backward()
    assert x.grad is None

    class NoTensor(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return 5

        @staticmethod
        def backward(ctx, dy):
            return dy

    with pytest.raises(TypeError, match="forward must return a tensor"):
        NoTensor.apply(x)


def test_function_sees_changes_of_saved_tensors() -> None:
    w, x = xt.tensor(np.ones(2)), leaf(1, 2)

    class Mul(xt.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0], None

    y = Mul.apply(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="changed in place|must not be changed"):
        y.sum().backward()


# ---- recomputation ------------------------------------------------------------------------------------------------------------------------


def test_checkpoint_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    w1, w2 = (xt.tensor(rng.standard_normal((16, 16)).astype(np.float32), requires_grad=True) for _ in range(2))
    x = xt.tensor(rng.standard_normal((5, 16)).astype(np.float32), requires_grad=True)

    def block(t):
        t = xt.functional.silu(xt.functional.linear(t, w1))
        return xt.functional.dropout(xt.functional.linear(t, w2), 0.3)

    results = []
    for wrap in (False, True):
        xt.manual_seed(5)
        y = xt.checkpoint(block, x) if wrap else block(x)
        after = xt.randn(3).tolist()
        y.sum().backward()
        results.append([y.tolist(), after, *(t.grad.tolist() for t in (x, w1, w2))])
        for t in (x, w1, w2):
            t.grad = None
    assert results[0] == results[1]


def test_checkpoint_keeps_fewer_tensors() -> None:
    x = xt.tensor(np.ones((64, 64), np.float32), requires_grad=True)

    def chain(t):
        for _ in range(20):
            t = t.sin()
        return t

    def held(f) -> int:
        before = _C.memory_stats(_C.get_default_device())["allocated"]
        y = f()
        after = _C.memory_stats(_C.get_default_device())["allocated"]
        del y
        return after - before

    assert held(lambda: xt.checkpoint(chain, x)) * 5 < held(lambda: chain(x))


def test_checkpoint_with_hidden_parameters_only() -> None:
    w = leaf(2)
    y = xt.checkpoint(lambda t: t * w, xt.tensor(np.array([3.0])))
    y.backward()
    assert w.grad.item() == 3
    with xt.no_grad():
        assert not xt.checkpoint(lambda t: t * w, xt.tensor(np.array([3.0]))).requires_grad


# ---- lifetime -----------------------------------------------------------------------------------------------------------------------------


def test_graphs_do_not_keep_tensors_or_callables() -> None:
    class Hook:
        def __call__(self, g):
            return None

    hook = Hook()
    alive = weakref.ref(hook)
    x = leaf(1)
    y = x * 2
    y.register_hook(hook)
    del hook
    y.backward()
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def test_function_context_is_released() -> None:
    x = leaf(1, 2)
    y = Square.apply(x, 2.0)
    y.sum().backward()
    before = sys.getrefcount(Square)
    for _ in range(50):
        Square.apply(x, 2.0).sum().backward()
    gc.collect()
    assert sys.getrefcount(Square) <= before + 2


def test_cycle_through_a_hook_is_collected() -> None:
    """A hook that closes over its own tensor is a cycle through Python; the collector has to find it."""

    def make():
        x = leaf(1)
        x.register_hook(lambda g: x.numel() and None)
        (x * 2).backward()

    gc.collect()
    before = _C.memory_stats(_C.get_default_device())["live_tensors"]
    for _ in range(20):
        make()
    gc.collect()
    assert _C.memory_stats(_C.get_default_device())["live_tensors"] <= before + 1
