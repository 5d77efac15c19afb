"""A hook, and a backward in Python, that wait for a thread which walks a graph of its own over the same weight."""

import threading

from race import race

import xtrain as xt

w = xt.ones(4, 4).requires_grad_(True)
x = xt.ones(2, 4)


def other() -> None:
    xt.functional.linear(x, w).sum().backward()


def join_one(*_) -> None:
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "backward waits for a backward of another thread"


class Waits(xt.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 1.0

    @staticmethod
    def backward(ctx, g):
        join_one()
        return g


def by_hook() -> None:
    y = xt.functional.linear(x, w)
    y.register_hook(join_one)
    y.sum().backward()


def by_leaf_hook() -> None:
    v = xt.ones(4).requires_grad_(True)
    v.register_hook(join_one)
    (xt.functional.linear(x, w) * v).sum().backward()


def by_function() -> None:
    Waits.apply(xt.functional.linear(x, w)).sum().backward()


counts = race(by_hook, by_leaf_hook, by_function)
assert w.grad.tolist() == [[4.0 * sum(counts)] * 4] * 4
