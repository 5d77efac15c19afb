"""Random programs: the same sequence of operations on the same leaves here and in PyTorch, values and gradients compared in float64.

What single-op tests cannot see: views of views, values used several times, gradients that meet in an expanded or sliced tensor, hooks and
detached parts in the middle of a graph.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xtrain as xt


class Pair:
    """One value on both sides."""

    def __init__(self, ours, theirs) -> None:
        self.ours, self.theirs = ours, theirs
        assert tuple(ours.shape) == tuple(theirs.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.theirs.shape)

    def apply(self, f, *others) -> Pair:
        return Pair(f(self.ours, *[o.ours for o in others]), f(self.theirs, *[o.theirs for o in others]))


def elementwise(rng, x: Pair, pool) -> Pair:
    names = ["tanh", "sigmoid", "sin", "cos", "neg", "abs", "erf", "exp"]
    name = names[rng.integers(len(names))]
    return x.apply(lambda t: getattr(t.tanh() if name == "exp" else t, name)())


def binary(rng, x: Pair, pool) -> Pair:
    other = pool[rng.integers(len(pool))]
    try:
        np.broadcast_shapes(x.shape, other.shape)
    except ValueError:
        other = x
    kinds = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b.tanh(),
        lambda a, b: a / (b * b + 1),
        lambda a, b: 2 - a * 0.5 + b,
    ]
    return x.apply(kinds[rng.integers(len(kinds))], other)


def extremum(rng, x: Pair, pool) -> Pair:
    other = pool[rng.integers(len(pool))]
    if other.shape != x.shape:
        other = x.apply(lambda t: t * 0.5 - 0.1)
    name = ("maximum", "minimum")[rng.integers(2)]
    return Pair(getattr(xt, name)(x.ours, other.ours), getattr(torch, name)(x.theirs, other.theirs))


def reduction(rng, x: Pair, pool) -> Pair:
    if not x.shape:
        return x
    dim, keep = int(rng.integers(len(x.shape))), bool(rng.integers(2))
    name = ("sum", "mean", "amax", "amin")[rng.integers(4)]
    if x.shape[dim] == 0 and name != "sum":
        return x
    return x.apply(lambda t: getattr(t, name)(dim, keepdim=keep))


def move(rng, x: Pair, pool) -> Pair:
    n = len(x.shape)
    kind = rng.integers(8)
    if kind == 0 and n >= 2:
        a, b = (int(i) for i in rng.integers(0, n, 2))
        return x.apply(lambda t: t.transpose(a, b))
    if kind == 1 and n:
        order = [int(i) for i in rng.permutation(n)]
        return x.apply(lambda t: t.permute(*order))
    if kind == 2:
        return x.apply(lambda t: t.reshape(-1))
    if kind == 3 and n < 5:
        d = int(rng.integers(0, n + 1))
        return x.apply(lambda t: t.unsqueeze(d))
    if kind == 4 and n < 5:
        return x.apply(lambda t: t.expand(2, *x.shape))
    if kind == 5 and n and x.shape[0] > 0:
        i = int(rng.integers(x.shape[0]))
        return x.apply(lambda t: t[i])
    if kind == 6 and n:
        start, step = int(rng.integers(0, x.shape[-1] + 1)), int(rng.integers(1, 3))
        return x.apply(lambda t: t[..., start::step])
    return x.apply(lambda t: t.squeeze())


def join(rng, x: Pair, pool) -> Pair:
    if not x.shape:
        return x
    d = int(rng.integers(len(x.shape)))
    other = x.apply(lambda t: t * 2)
    if rng.integers(2):
        return Pair(xt.cat([x.ours, other.ours, x.ours], d), torch.cat([x.theirs, other.theirs, x.theirs], d))
    size = max(1, x.shape[d] // 2)
    return Pair(x.ours.split(size, d)[0], x.theirs.split(size, d)[0])


def product(rng, x: Pair, pool) -> Pair:
    if len(x.shape) < 2:
        return x
    return x.apply(lambda t: (t @ t.mT).tanh())


def layer(rng, x: Pair, pool) -> Pair:
    if not x.shape or 0 in x.shape:
        return x
    kind = rng.integers(4)
    if kind == 0:
        return x.apply(lambda t: t.softmax(-1))
    if kind == 1:
        return Pair(xt.functional.silu(x.ours), torch.nn.functional.silu(x.theirs))
    if kind == 2:
        last = (x.shape[-1],)
        return Pair(
            xt.functional.rms_norm(x.ours, last, eps=0.1), torch.nn.functional.rms_norm(x.theirs, last, eps=0.1)
        )
    return Pair(xt.where(x.ours > 0, x.ours, 0.1), torch.where(x.theirs > 0, x.theirs, 0.1))


def interrupt(rng, x: Pair, pool) -> Pair:
    """A hook, a detached copy, a clone, or contiguous memory."""
    kind = rng.integers(4)
    if kind == 0 and x.theirs.requires_grad:
        x.ours.register_hook(lambda g: g * 0.5)
        x.theirs.register_hook(lambda g: g * 0.5)
        return x.apply(lambda t: t * 1.5)
    if kind == 1:
        return x.apply(lambda t: t.detach() * t)
    return x.apply(lambda t: t.clone() if kind == 2 else t.contiguous())


STEPS = [elementwise, binary, binary, extremum, reduction, move, move, move, join, product, layer, interrupt]


@pytest.mark.parametrize("seed", range(120))
def test_random_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(2, 3, 4), (4,), (3, 1), (1, 3, 4), ()]
    arrays = [rng.standard_normal(s) for s in shapes]
    leaves = [Pair(xt.tensor(a, requires_grad=True), torch.tensor(a, requires_grad=True)) for a in arrays]
    pool = list(leaves)
    for _ in range(25):
        x = pool[rng.integers(max(0, len(pool) - 6), len(pool))]
        y = STEPS[rng.integers(len(STEPS))](rng, x, pool)
        if int(np.prod(y.shape)) <= 600:
            pool.append(y)
    ours, theirs = 0.0, 0.0
    for i, y in enumerate(pool):
        a, b = y.ours.detach().cpu().numpy(), y.theirs.detach().cpu().numpy()
        assert np.isfinite(a).all() == np.isfinite(b).all()
        scale = np.abs(b).max(initial=1.0)
        assert np.abs(a - b).max(initial=0.0) <= 1e-12 * scale, f"value {i}"
        if rng.integers(2) or i == len(pool) - 1:
            ours, theirs = ours + y.ours.sum(), theirs + y.theirs.sum()
    ours.backward()
    theirs.backward()
    for i, leaf in enumerate(leaves):
        a, b = leaf.ours.grad, leaf.theirs.grad
        assert (a is None) == (b is None), f"leaf {i}"
        if a is not None:
            a, b = a.cpu().numpy(), b.cpu().numpy()
            assert np.isfinite(a).all()
            assert np.abs(a - b).max() <= 1e-10 * np.abs(b).max(initial=1.0), f"gradient of leaf {i}"
