"""Tensors that keep their gradient go while another thread walks through their node."""

from race import race

import xtrain as xt

x = xt.ones(4).requires_grad_(True)
shared = {}


def make() -> None:
    y = x * 2.0
    y.retain_grad()
    shared["z"] = (y * 3.0).sum()  # y goes here, its node stays


def walk() -> None:
    z = shared.get("z")
    if z is not None:
        z.backward(retain_graph=True)


def keep() -> None:
    y = x * 2.0
    y.retain_grad()
    z = (y * 3.0).sum()
    z.backward()
    assert y.grad.tolist() == [3.0] * 4


race(make, walk, walk, keep)
