"""Backward beside w.grad = None, w.grad = another, and reads of w.grad: the rules of linear add to .grad in place meanwhile."""

from race import race

import xtrain as xt

w = xt.ones(8, 8).requires_grad_(True)
v = xt.ones(8).requires_grad_(True)
x = xt.ones(4, 8)
other = xt.zeros(8, 8)


def walk() -> None:
    h = xt.functional.linear(x, w)
    (xt.functional.linear(h, w) * v).sum().backward()


def clear() -> None:
    w.grad = None
    v.grad = None


def replace() -> None:
    w.grad = other.clone()


def read() -> None:
    for t in (w, v):
        g = t.grad
        assert g is None or g.shape == t.shape
        assert t.requires_grad and t.is_leaf


race(walk, walk, clear, replace, read)
w.grad = v.grad = None
walk()
assert v.grad.tolist() == [256.0] * 8
