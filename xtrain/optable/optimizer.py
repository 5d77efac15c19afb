"""Entries of the op table: the optimizer. Results are the changed tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _C
from .table import (
    FLOATS,
    TAILS,
    Error,
    N,
    T,
    U,
    V,
    case,
    f32,
    i64,
    op,
)

__all__ = ["adamw_group", "adamw_reference", "clip_reference"]

SETTINGS: dict[str, Any] = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def adamw_group(count: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Any:
    """The table of one group of `count` parameters."""
    return _C.tensor([[count, beta1, beta2, eps, weight_decay]], _C.float64, _C.device("cpu"))


def adamw_call(p: Any, g: Any, m: Any, v: Any, lr: float, step: int, **settings: Any) -> list[Any]:
    acc = _C.float64 if p.dtype is _C.float64 else _C.float32
    p, m, v = _C.clone(p), _C.cast(m, acc), _C.cast(v, acc)
    m, v = _C.clone(m), _C.clone(v)
    taken, rate = _C.full((), step - 1, _C.int64, p.device), _C.full((), lr, _C.float64, p.device)
    _C.adamw_([p], [g], [m], [v], [], [taken], [rate], adamw_group(1, *settings.values()))
    return [p, m, v]


def adamw_reference(
    p: Any, g: Any, m: Any, v: Any, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> list[Any]:
    p = p * (1 - lr * weight_decay)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return [p - lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + eps), m, v]


def adamw_bad(p: int = 1, **bad: Any) -> Any:
    """A call with `p` parameters of shape (2,) and what is wrong with it."""
    lists: dict[str, Any] = {
        name: [f32(2) for _ in range(p)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    }
    scalars: dict[str, Any] = dict(masters=[], steps=[i64() for _ in range(p)], lrs=[_C.full((), 0.1, _C.float64)])
    numbers: dict[str, Any] = dict(count=p, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    numbers |= {name: bad.pop(name) for name in list(bad) if name in numbers}
    return _C.adamw_(**(lists | scalars | {"groups": adamw_group(**numbers)} | bad))


op(
    "adamw_",
    "adamw",
    [case(*[N(*s)] * 3, U(0.1, 1, *s), **SETTINGS) for s in [(2, 3), (), (0,), *((n,) for n in TAILS)]]
    + [case(*[N(129, 523)] * 3, U(0.1, 1, 129, 523), big=True, **SETTINGS)],
    adamw_call,
    adamw_reference,
    nondiff=True,
    strided="no",
    out_dtype="any",
    accumulations=24,
    magnitude=lambda p, g, m, v, **k: np.abs(p) + np.abs(g) + np.abs(m) + np.abs(v) + g * g + 0.1,
    errors=(
        Error(lambda: adamw_bad(grads=[f32(2)] * 2), V, r"adamw_: grads must .*1.*2"),
        Error(lambda: adamw_bad(grads=[f32(3)]), V, r"adamw_: .*grad.* must .*\(2,\).*\(3,\)"),
        Error(
            lambda: adamw_bad(exp_avgs=[_C.full((2,), 0.0, _C.bfloat16)]),
            (T, V),
            r"adamw_: exp_avgs.* must .*float32.*bfloat16",
        ),
        Error(lambda: adamw_bad(masters=[f32(2), f32(2)]), V, r"adamw_: masters must .*2"),
        Error(lambda: adamw_bad(steps=[i64(), i64()]), V, r"adamw_: steps must .*\(1\), got 2"),
        Error(lambda: adamw_bad(2, steps=[i64()] * 2), V, r"adamw_: steps must be distinct tensors, got one twice"),
        Error(lambda: adamw_bad(steps=[f32()]), T, r"adamw_: every step must have dtype int64, got float32"),
        Error(lambda: adamw_bad(steps=[i64(1)]), V, r"adamw_: every step must have 0 dimensions, got shape \(1,\)"),
        Error(lambda: adamw_bad(lrs=[f32()]), T, r"adamw_: lr must have dtype float64, got float32"),
        Error(lambda: adamw_bad(lrs=[_C.full((1,), 0.1, _C.float64)]), V, r"adamw_: lr must have 0 dim.* \(1,\)"),
        Error(lambda: adamw_bad(lrs=[0.1]), T, r"adamw_: .*lrs.* must .*Tensor.*float"),
        Error(lambda: adamw_bad(lrs=[]), V, r"adamw_: lrs must hold one tensor per row of groups \(1\), got 0"),
        Error(lambda: adamw_bad(groups=f32(1, 5)), T, r"adamw_: groups must have dtype float64, got float32"),
        Error(
            lambda: adamw_bad(groups=_C.full((1, 4), 0.0, _C.float64)),
            V,
            r"adamw_: groups must have 5 columns.*\(1, 4\)",
        ),
        Error(lambda: adamw_bad(count=2), V, r"adamw_: count of groups\[0\] must be an integer of at most 1, got 2"),
        Error(
            lambda: adamw_bad(2, count=0.5), V, r"adamw_: count of groups\[0\] must be an integer of at most 2, got 0.5"
        ),
        Error(lambda: adamw_bad(2, count=1), V, r"adamw_: the counts of groups must add up to .* \(2\), got 1"),
        Error(lambda: adamw_bad(guard=f32(1)), V, r"adamw_: guard must have 0 dimensions, got shape \(1,\)"),
        Error(lambda: adamw_bad(beta1=1.0), V, r"adamw_: beta1 must .*1"),
        Error(lambda: adamw_bad(eps=-0.1), V, r"adamw_: eps must .*-0.1"),
    ),
)


def clip_call(*grads: Any, max_norm: float) -> list[Any]:
    grads_ = [_C.clone(g) for g in grads]
    return [_C.clip_grad_norm_(grads_, max_norm), *grads_]


def clip_reference(*grads: np.ndarray, max_norm: float) -> list[np.ndarray]:
    norm = np.sqrt(sum(float(np.sum(g * g)) for g in grads))
    return [np.array(norm), *(g * min(1.0, max_norm / (norm + 1e-6)) for g in grads)]


op(
    "clip_grad_norm_",
    "grad_norm clip",
    [
        case(N(2, 3), N(5), max_norm=0.5),
        case(N(2, 3), N(5), max_norm=1e3),
        case(N(0), N(1), max_norm=0.1),
        case(N(257), N(33), max_norm=math.inf),
        case(N(301, 523), N(77), max_norm=1.0, big=True),
    ],
    clip_call,
    clip_reference,
    nondiff=True,
    strided="no",
    out_dtype="any",
    accumulations=8,
    dtypes=FLOATS[1:],
    errors=(
        Error(lambda: _C.clip_grad_norm_([f32(2)], -1.0), V, r"clip_grad_norm_: max_norm must .*-1"),
        Error(lambda: _C.clip_grad_norm_([f32(2)], float("nan")), V, r"clip_grad_norm_: max_norm must .*nan"),
        Error(lambda: _C.clip_grad_norm_([3], 1.0), T, r"clip_grad_norm_: grads.* must .*int"),  # pyright: ignore[reportArgumentType]  (refused)
        Error(lambda: _C.clip_grad_norm_([i64(3)], 1.0), T, r"clip_grad_norm_: .*grad.* must .*float.*int64"),
    ),
)

# The norm is a float32 whatever the dtype, so float64 gradients are scaled by a factor of float32 precision.
op(
    "clip_grad_norm_",
    "grad_norm clip",
    [case(N(2, 3), N(5), max_norm=0.5), case(N(257), N(33), max_norm=math.inf)],
    clip_call,
    clip_reference,
    variant="float64",
    nondiff=True,
    strided="no",
    out_dtype="any",
    accumulations=8 * 2.0**29,
    dtypes=("float64",),
)


def tree_call(*parts: Any) -> list[Any]:
    wide = _C.float64 if parts[0].dtype is _C.float64 else _C.float32
    out = _C.empty(parts[0].shape, wide, parts[0].device)
    squares = _C.full((-(-out.numel() // 8192),), math.nan, _C.float64, out.device)
    return [_C.tree_sum_(out, list(parts), squares), squares]


def tree_reference(*parts: np.ndarray) -> list[np.ndarray]:
    total = np.sum(parts, axis=0)
    return [
        total,
        np.array(
            [np.sum(block * block) for block in np.split(total.ravel(), range(8192, total.size, 8192))][
                : -(-total.size // 8192)
            ]
        ),
    ]


def tree_bad(parts: Any = None, out: Any = None, squares: Any = None) -> Any:
    return _C.tree_sum_(f32(2) if out is None else out, [f32(2)] if parts is None else parts, squares)


op(
    "tree_sum_",
    "tree_sum",
    [
        case(*[N(*s)] * n)
        for s, n in [((2, 3), 2), ((), 3), ((0,), 2), ((33,), 5), *(((n,), 1) for n in TAILS), ((3,), 64)]
    ]
    + [case(*[N(129, 523)] * 7, big=True)],
    tree_call,
    tree_reference,
    nondiff=True,
    out_dtype="any",
    accumulations=16,
    magnitude=lambda *parts: [np.sum(np.abs(parts), axis=0), 2 * sum(len(parts) * float(np.sum(p * p)) for p in parts)],
    errors=(
        Error(lambda: tree_bad([]), V, r"tree_sum_: parts must hold 1 to 64 tensors, got 0"),
        Error(lambda: tree_bad([f32(2)] * 65), V, r"tree_sum_: parts must hold 1 to 64 tensors, got 65"),
        Error(lambda: tree_bad([f32(3)]), V, r"tree_sum_: every part must have shape \(2,\), got \(3,\)"),
        Error(lambda: tree_bad([i64(2)]), T, r"tree_sum_: every part must .*float.*int64"),
        Error(
            lambda: tree_bad([_C.cast(f32(2), _C.float64)]), T, r"tree_sum_: out must have dtype float64, .*got float32"
        ),
        Error(
            lambda: tree_bad(out=_C.cast(f32(2), _C.bfloat16)),
            T,
            r"tree_sum_: out must have dtype float32, got bfloat16",
        ),
        Error(lambda: tree_bad(out=_C.expand(f32(1), 2)), V, r"tree_sum_: out must be contiguous"),
        Error(lambda: tree_bad(squares=f32(1)), T, r"tree_sum_: squares must have dtype float64, got float32"),
        Error(
            lambda: tree_bad(squares=_C.full((2,), 0.0, _C.float64)),
            V,
            r"tree_sum_: squares must have shape \(1,\), got",
        ),
    ),
)
