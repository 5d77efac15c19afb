"""The collector and cycles through hooks, functions and arrays beside walks."""

import gc
import weakref

import numpy as np
from race import race

import xtrain as xt

w = xt.ones(4).requires_grad_(True)
alive: weakref.WeakSet = weakref.WeakSet()


class Square(xt.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        y = t.detach() * t.detach()
        ctx.save_for_backward(t)
        ctx.itself = ctx
        return y

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        return g * t * 2.0


class Array(np.ndarray):
    pass


class Owner:
    pass


def cycle() -> None:
    owner = Owner()
    alive.add(owner)
    x = xt.ones(3).requires_grad_(True)
    y = x * 2.0
    owner.tensor = y
    y.register_hook(lambda g: owner and None)
    Square.apply(y).sum().backward()
    assert x.grad.tolist() == [8.0] * 3
    a = np.zeros(3, np.float32).view(Array)
    a.owner = xt.from_numpy(a)


def walk() -> None:
    (w * 2.0).sum().backward()


def collect() -> None:
    gc.collect()


race(cycle, walk, collect, least=3)
gc.collect()
assert len(alive) == 0
