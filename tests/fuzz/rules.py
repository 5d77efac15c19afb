"""Gradients in NumPy, written apart from the kernels: for each op the derivative of its inputs, and how large the terms are that it adds up.

A rule takes the inputs (float64 arrays), the result, the gradient of the result and the arguments. It returns for each input the gradient
and the sum of the absolute values of its terms, from which the tolerance follows; None where an input has no gradient. The forward
references and tolerances are those of the op table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xtrain.optable.judge import bell, cubic_bell, gated, sum_to
from xtrain.optable.references import normal_cdf, sigmoid

Parts = list[tuple[np.ndarray, np.ndarray] | None]
Rule = Callable[..., Parts]
ROOT = np.sqrt(2 / np.pi)


def _unary(slope: Callable[[np.ndarray], np.ndarray], size: Callable[[np.ndarray], np.ndarray] | None = None) -> Rule:
    def rule(dy: np.ndarray, x: np.ndarray, y: np.ndarray, **_: Any) -> Parts:
        d = slope(x)
        return [(dy * d, np.abs(dy) * (np.abs(d) if size is None else size(x)))]

    return rule


def _gelu(dy: np.ndarray, x: np.ndarray, y: np.ndarray, approximate: str = "none") -> Parts:
    if approximate == "tanh":
        s = sigmoid(2 * ROOT * (x + 0.044715 * x**3))
        d = s + x * s * (1 - s) * 2 * ROOT * (1 + 3 * 0.044715 * x * x)
        return [(dy * d, np.abs(dy) * cubic_bell(x))]
    cdf = normal_cdf(x)
    return [(dy * (cdf + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)), np.abs(dy) * bell(x, cdf))]


UNARY: dict[str, Rule] = {
    "neg": _unary(lambda x: -np.ones_like(x)),
    "abs": _unary(np.sign),
    "exp": _unary(np.exp),
    "log": _unary(lambda x: 1 / x),
    "sqrt": _unary(lambda x: 0.5 / np.sqrt(x)),
    "rsqrt": _unary(lambda x: -0.5 * x**-1.5),
    "reciprocal": _unary(lambda x: -1 / (x * x)),
    "sin": _unary(np.cos),
    "cos": _unary(lambda x: -np.sin(x)),
    "tanh": _unary(lambda x: 1 / np.cosh(x) ** 2, lambda x: 1 + np.tanh(x) ** 2),
    "sigmoid": _unary(lambda x: sigmoid(x) * sigmoid(-x), sigmoid),
    "relu": _unary(lambda x: (x > 0).astype(np.float64)),
    "erf": _unary(lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x), lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x) * (1 + x * x)),
    "silu": _unary(lambda x: sigmoid(x) * (1 + x * sigmoid(-x)), gated),
    "gelu": _gelu,
}  # fmt: skip


def _binary(
    slopes: Callable[[np.ndarray, np.ndarray], tuple[Any, Any]],
    sizes: Callable[[np.ndarray, np.ndarray], tuple[Any, Any]] | None = None,
) -> Rule:
    def rule(dy: np.ndarray, a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Parts:
        da, db = slopes(a, b)
        sa, sb = (np.abs(da), np.abs(db)) if sizes is None else sizes(a, b)
        size = np.abs(dy)
        return [
            (sum_to(dy * da, a.shape), sum_to(size * sa, a.shape)),
            (sum_to(dy * db, b.shape), sum_to(size * sb, b.shape)),
        ]

    return rule


def _greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a > b) + 0.5 * (a == b)


BINARY: dict[str, Rule] = {
    "add": _binary(lambda a, b: (1.0, 1.0)),
    "sub": _binary(lambda a, b: (1.0, -1.0)),
    "mul": _binary(lambda a, b: (b, a)),
    "div": _binary(lambda a, b: (1 / b, -a / (b * b))),
    "pow": _binary(
        lambda a, b: (b * a ** (b - 1), a**b * np.log(a)),
        lambda a, b: (np.abs(b) * a ** (b - 1) * (1 + np.abs((b - 1) * np.log(a))),
                      a**b * np.abs(np.log(a)) * (1 + np.abs(b * np.log(a)))),
    ),
    "maximum": _binary(lambda a, b: (_greater(a, b), _greater(b, a))),
    "minimum": _binary(lambda a, b: (_greater(b, a), _greater(a, b))),
}  # fmt: skip


# Gradients that the core makes of several ops round each intermediate result in the dtype of the tensors. What is lost below the smallest
# number there is then multiplied: by how much, for each input, in units of that number.
FLOORS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    # dy / b; ((dy / b) a) / b
    "div": lambda dy, a, b: (np.ones_like(dy), np.abs(a / b) + 1 / np.abs(b) + 1),
    # dy (b a^(b-1)); dy (a^b log a)
    "pow": lambda dy, a, b: (np.abs(dy) * (np.abs(b) + 1) + 1, np.abs(dy) * (np.abs(np.log(a)) + 1) + 1),
}


def where(dy: np.ndarray, c: np.ndarray, a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Parts:
    out: Parts = [None]
    for x, taken in ((a, c), (b, ~c)):
        out.append((sum_to(dy * taken, x.shape), sum_to(np.abs(dy) * taken, x.shape)))
    return out


def _axes(ndim: int, dim: Any) -> tuple[int, ...]:
    return tuple(range(ndim)) if dim is None else tuple(d % ndim for d in (dim if isinstance(dim, tuple) else (dim,)))


def _kept(a: np.ndarray, x: np.ndarray, dim: Any, keepdim: bool) -> np.ndarray:
    """`a`, of a reduction's result, with the reduced dimensions as size 1."""
    axes = _axes(x.ndim, dim) if x.ndim else ()
    return a.reshape([1 if d in axes else n for d, n in enumerate(x.shape)])


def total(
    dy: np.ndarray, x: np.ndarray, y: np.ndarray, dim: Any = None, keepdim: bool = False, mean: bool = False
) -> Parts:
    g = np.broadcast_to(_kept(dy, x, dim, keepdim), x.shape)
    if mean:
        g = g * (y.size / x.size if x.size else 1.0)
    return [(g, np.abs(g))]


def average(dy: np.ndarray, x: np.ndarray, y: np.ndarray, **kwargs: Any) -> Parts:
    return total(dy, x, y, mean=True, **kwargs)


def extremum(dy: np.ndarray, x: np.ndarray, y: np.ndarray, dim: Any = None, keepdim: bool = False) -> Parts:
    axes = _axes(x.ndim, dim) if x.ndim else ()
    hit = x == _kept(y, x, dim, keepdim)
    g = _kept(dy, x, dim, keepdim) * hit / np.maximum(hit.sum(axis=axes, keepdims=True), 1)
    return [(g, np.abs(g))]


def softmax(dy: np.ndarray, x: np.ndarray, y: np.ndarray, dim: int = -1) -> Parts:
    if x.ndim == 0:
        return [(0.0 * dy, np.abs(dy) * 2)]
    inner, size = dy * y, np.abs(dy * y)
    return [
        (inner - y * inner.sum(dim, keepdims=True), size + y * size.sum(dim, keepdims=True)),
    ]


def rms_norm(dy: np.ndarray, x: np.ndarray, *rest: np.ndarray, eps: float = 1e-6) -> Parts:
    weight = rest[0] if len(rest) == 2 else None
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    n = x * r
    g = dy if weight is None else dy * weight
    parts: Parts = [(
        r * (g - n * (g * n).mean(-1, keepdims=True)),
        r * (np.abs(g) + np.abs(n) * np.abs(g * n).mean(-1, keepdims=True)),
    )]  # fmt: skip
    if weight is not None:
        parts.append((sum_to(dy * n, weight.shape), sum_to(np.abs(dy * n), weight.shape)))
    return parts


def layer_norm(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *_: Any, eps: float = 1e-5
) -> Parts:
    centre = x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    n, size = (x - centre) * r, (np.abs(x) + np.abs(x).mean(-1, keepdims=True)) * r
    g = dy * weight
    return [
        (
            r * (g - g.mean(-1, keepdims=True) - n * (g * n).mean(-1, keepdims=True)),
            r * (np.abs(g) + np.abs(g).mean(-1, keepdims=True) + size * (np.abs(g) * size).mean(-1, keepdims=True)),
        ),
        (sum_to(dy * n, weight.shape), sum_to(np.abs(dy) * size, weight.shape)),
        (sum_to(dy, bias.shape), sum_to(np.abs(dy), bias.shape)),
    ]


def swiglu(dy: np.ndarray, gate: np.ndarray, *rest: np.ndarray) -> Parts:
    if len(rest) == 1:
        half = gate.shape[-1] // 2
        both = swiglu(dy, gate[..., :half], gate[..., half:], rest[0])
        return [tuple(np.concatenate(pair, -1) for pair in zip(*both))]  # type: ignore[misc, arg-type]
    up, s = rest[0], sigmoid(gate)
    d = s * (1 + gate * sigmoid(-gate))
    return [(dy * up * d, np.abs(dy * up) * gated(gate)), (dy * gate * s, np.abs(dy * gate * s))]


def matmul(dy: np.ndarray, a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Parts:
    wide_a, wide_b = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    if a.ndim == 1:
        dy = dy[..., None, :] if b.ndim > 1 else dy[None]
    if b.ndim == 1:
        dy = dy[..., None]
    out: Parts = []
    for f in (lambda v: v, np.abs):
        da, db = f(dy) @ f(wide_b).swapaxes(-1, -2), f(wide_a).swapaxes(-1, -2) @ f(dy)
        out.append((sum_to(da, wide_a.shape).reshape(a.shape), sum_to(db, wide_b.shape).reshape(b.shape)))
    return list(zip(*out))


def linear(dy: np.ndarray, x: np.ndarray, w: np.ndarray, *rest: np.ndarray) -> Parts:
    count = int(np.prod(x.shape[:-1]))
    rows, flat = dy.reshape(count, w.shape[0]), x.reshape(count, w.shape[1])
    parts: Parts = [
        ((rows @ w).reshape(x.shape), (np.abs(rows) @ np.abs(w)).reshape(x.shape)),
        (rows.T @ flat, np.abs(rows).T @ np.abs(flat)),
    ]
    if len(rest) == 2:
        parts.append((rows.sum(0), np.abs(rows).sum(0)))
    return parts


def embedding(dy: np.ndarray, ids: np.ndarray, weight: np.ndarray, y: np.ndarray) -> Parts:
    grad, size = np.zeros_like(weight), np.zeros_like(weight)
    rows = dy.reshape(ids.size, weight.shape[1])
    np.add.at(grad, ids.reshape(-1), rows)
    np.add.at(size, ids.reshape(-1), np.abs(rows))
    return [None, (grad, size)]


def cross_entropy(
    dy: np.ndarray, x: np.ndarray, target: np.ndarray, y: np.ndarray, ignore_index: int = -100, reduction: str = "mean"
) -> Parts:
    kept = target != ignore_index
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hot = np.zeros_like(x)
    hot[np.nonzero(kept)[0], target[kept]] = 1
    g = np.broadcast_to(dy, target.shape) * kept / (kept.sum() if reduction == "mean" else 1)
    return [((p - hot) * g[:, None], (p + hot) * np.abs(g)[:, None]), None]


def cumsum(dy: np.ndarray, x: np.ndarray, y: np.ndarray, dim: int) -> Parts:
    if not x.ndim:
        return [(dy, np.abs(dy))]
    back = [np.flip(np.cumsum(np.flip(a, dim), dim), dim) for a in (dy, np.abs(dy))]
    return [(back[0], back[1])]


def conv1d(
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    *rest: np.ndarray,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Parts:
    """Tap after tap and group after group: what a tap has read gets dy times its weight, the weight gets dy times it."""
    out = []
    for g, a, b in ((dy, x, w), (np.abs(dy), np.abs(x), np.abs(w))):
        wide = np.pad(a, ((0, 0), (0, 0), (padding, padding)))
        dx, dw = np.zeros_like(wide), np.zeros_like(b)
        ins, outs = a.shape[1] // groups, b.shape[0] // groups
        for group in range(groups):
            i, o = slice(group * ins, (group + 1) * ins), slice(group * outs, (group + 1) * outs)
            for k in range(b.shape[2]):
                read = slice(k * dilation, k * dilation + (g.shape[2] - 1) * stride + 1, stride)
                dx[:, i, read] += np.einsum("bot,oc->bct", g[:, o], b[o, :, k])
                dw[o, :, k] += np.einsum("bot,bct->oc", g[:, o], wide[:, i, read])
        out.append((dx[:, :, padding : padding + a.shape[2]], dw, g.sum((0, 2))))
    return list(zip(*out))[: len(rest) + 1]


def causal_conv1d(
    dy: np.ndarray, x: np.ndarray, w: np.ndarray, *rest: np.ndarray, activation: str | None = None
) -> Parts:
    """x [B, S, C], w [C, K]: y[s] = z or silu(z), z = bias + the sum over k of w[k] x[s + k - (K - 1)]."""
    taps, steps = w.shape[1], x.shape[1]
    wide = np.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    z = sum((w[:, k] * wide[:, k : k + steps] for k in range(taps)), np.zeros(x.shape))
    large = sum((np.abs(w[:, k] * wide[:, k : k + steps]) for k in range(taps)), np.zeros(x.shape))
    if len(rest) == 2:
        z, large = z + rest[0], large + np.abs(rest[0])
    slope = sigmoid(z) * (1 + z * sigmoid(-z)) if activation else np.ones(x.shape)
    # An error of z, which is one of `large`, moves the slope by at most half of it.
    sizes = np.abs(dy) * (gated(z) + large if activation else 1.0)
    out = []
    for g, a, b in ((dy * slope, wide, w), (sizes, np.abs(wide), np.abs(w))):
        dx = np.zeros_like(wide)
        for k in range(taps):
            dx[:, k : k + steps] += g * b[:, k]
        dw = np.stack([(g * a[:, k : k + steps]).sum((0, 1)) for k in range(taps)], 1)
        out.append((dx[:, taps - 1 :], dw, g.sum((0, 1))))
    return list(zip(*out))[: 1 + len(rest)]


def attention(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    is_causal: bool = False,
    scale: float | None = None,
) -> Parts:
    factor = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    s = factor * (q @ k.swapaxes(-1, -2))
    if is_causal:
        rows, columns = s.shape[-2:]
        s = np.where(np.tri(rows, columns, columns - rows, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dy @ v.swapaxes(-1, -2)
    size = np.abs(dy) @ np.abs(v).swapaxes(-1, -2)
    ds, ds_size = p * (dp - (dp * p).sum(-1, keepdims=True)), p * (size + (size * p).sum(-1, keepdims=True))
    # The scores are rounded, too: an error of s by |q||k| moves p by as much.
    spread = 1 + factor * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max(initial=0.0)
    return [
        (factor * ds @ k, spread * factor * ds_size @ np.abs(k)),
        (factor * ds.swapaxes(-1, -2) @ q, spread * factor * ds_size.swapaxes(-1, -2) @ np.abs(q)),
        (p.swapaxes(-1, -2) @ dy, spread * p.swapaxes(-1, -2) @ np.abs(dy)),
    ]
