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

__all__ = ["adamw_group", "adamw_reference", "clip_reference", "muon_reference"]

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
        Error(lambda: adamw_bad(scale=f32()), T, r"adamw_: scale must have dtype float64, got float32"),
        Error(lambda: adamw_bad(grads=[_C.full((2,), 0.0, _C.bfloat16)]), T, r"adamw_: .*float32.*bfloat16"),
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


# ---- sums of banks ---------------------------------------------------------------------------------------------------


def starts_of(tensors: Any) -> list[int]:
    """Where each begins in a bank, which begins with a gap: at the next multiple of 128, some of them one further.
    An empty one shares its place with the next.
    """
    starts, at = [], 128
    for tensor in tensors:
        starts.append(at)
        at += (math.prod(tensor.shape) // 128 + (math.prod(tensor.shape) > 0)) * 128
    return starts


def bank_call(*parts: Any, tensors: int) -> list[Any]:
    """The sum of banks of `tensors` tensors each, and the squares of its blocks."""
    starts = starts_of(parts[:tensors])
    wide = _C.float64 if parts[0].dtype is _C.float64 else _C.float32
    out = _C.full((starts[-1] + parts[tensors - 1].numel() + 3,), math.nan, wide, parts[0].device)
    squares = _C.full((-(-out.numel() // 8192),), math.nan, _C.float64, out.device)
    _C.bank_sum_(out, list(parts), _C.tensor(starts, _C.int64, _C.device("cpu")), squares)
    return [out, squares]


def bank_reference(*parts: np.ndarray, tensors: int) -> list[np.ndarray]:
    starts = starts_of(parts[:tensors])
    total = np.zeros(starts[-1] + parts[tensors - 1].size + 3)
    for i, part in enumerate(parts):
        at = starts[i % tensors]
        total[at : at + part.size] += part.ravel()
    return tree_reference(total)


def bank_bad(**bad: Any) -> Any:
    """Two banks of two tensors, and what is wrong."""
    given: dict[str, Any] = dict(
        out=f32(300), parts=[f32(2), f32(3)] * 2, offsets=i64(2).add_(_C.tensor([0, 128], _C.int64))
    )
    given |= bad
    given["offsets"] = given["offsets"].cpu()  # wherever the others are
    return _C.bank_sum_(**given)


op(
    "bank_sum_",
    "tree_sum",
    [
        case(*[N(*s) for s in shapes] * n, tensors=len(shapes))
        for shapes, n in (
            ([(2, 3), (), (0,), (129,)], 1),
            ([(33,), (7, 19)], 3),
            ([(n,) for n in TAILS], 4),
            ([(5,)] * 70, 2),
            ([(3,), (2, 2)], 16),
            ([(40, 523), (1,), (90, 100)], 1),
            ([(5,)] + [(0,)] * 1400 + [(3,)], 1),  # more than a kernel parameter holds, at one place
        )
    ]
    + [case(*[N(129, 523), N(77)] * 4, tensors=2, big=True)],
    bank_call,
    bank_reference,
    nondiff=True,
    out_dtype="any",
    accumulations=16,
    magnitude=lambda *parts, tensors: [
        bank_reference(*map(np.abs, parts), tensors=tensors)[0],
        2 * sum(len(parts) * float(np.sum(p * p)) for p in parts),
    ],
    errors=(
        Error(lambda: bank_bad(parts=[]), V, r"bank_sum_: parts must not be empty, .*, got 0 parts"),
        Error(lambda: bank_bad(out=None), V, r"bank_sum_: parts must not be empty, and out or squares be given, got 4"),
        Error(lambda: bank_bad(parts=[f32(2)] * 3), V, r"bank_sum_: parts must hold 1 to 16 times .* \(2\), got 3"),
        Error(lambda: bank_bad(parts=[f32(2)] * 34), V, r"bank_sum_: parts must hold 1 to 16 times .* \(2\), got 34"),
        Error(lambda: bank_bad(parts=[i64(2)] * 2), T, r"bank_sum_: parts\[0\] must .*float.*int64"),
        Error(lambda: bank_bad(parts=[f32(2), _C.full((3,), 1.0, _C.float64)]), T, r"bank_sum_: .*float32.*float64"),
        Error(
            lambda: bank_bad(parts=[f32(2), f32(3), f32(2), f32(4)]),
            V,
            r"bank_sum_: parts\[3\] must have 3 elements as in the first bank, got 4",
        ),
        Error(lambda: bank_bad(offsets=f32(2)), T, r"bank_sum_: offsets must have dtype int64, got float32"),
        Error(lambda: bank_bad(offsets=i64(2, 1)), V, r"bank_sum_: offsets must have 1 dimensions, got shape \(2, 1\)"),
        Error(
            lambda: bank_bad(offsets=_C.tensor([0, 64], _C.int64)),
            V,
            r"bank_sum_: offsets\[1\] must be a multiple of 128 behind the tensor before, got 64",
        ),
        Error(
            lambda: bank_bad(offsets=i64(2)), V, r"bank_sum_: offsets\[1\] must be a multiple of 128 behind .*, got 0"
        ),
        Error(
            lambda: bank_bad(offsets=_C.tensor([0, 384], _C.int64)),
            V,
            r"bank_sum_: parts\[1\] must end within the 300 elements of out, got an end at 387",
        ),
        Error(
            lambda: bank_bad(offsets=_C.tensor([0, 2**63 - 128], _C.int64), parts=[f32(2), f32(200)]),
            V,
            r"bank_sum_: parts\[1\] must end within the 300 elements of out, got an end at 9223372036854775880",
        ),
        Error(
            lambda: bank_bad(out=_C.full((300,), 0.0, _C.bfloat16)),
            T,
            r"bank_sum_: out must have dtype float32, .*, got bfloat16",
        ),
        Error(lambda: bank_bad(out=_C.expand(f32(1), 300)), V, r"bank_sum_: out must be contiguous"),
        Error(lambda: bank_bad(squares=f32(1)), T, r"bank_sum_: squares must have dtype float64, got float32"),
        Error(
            lambda: bank_bad(squares=_C.full((2,), 0.0, _C.float64)),
            V,
            r"bank_sum_: squares must have 1 elements, one a block of 8192, got 2",
        ),
    ),
)


def norm_call(x: Any, most: float) -> list[Any]:
    return list(_C.block_norm(_C.cast(x, _C.float64), most))


def norm_reference(x: np.ndarray, most: float) -> list[np.ndarray]:
    norm = np.sqrt(np.sum(x))
    return [norm, np.array(min(1.0, most / (norm + 1e-6))), np.array(0.0)]


op(
    "block_norm",
    "block_norm",
    [case(U(0, 2, n), most=most) for n, most in ((1, 0.5), (33, 1e9), (1025, 1.0), (20000, math.inf))],
    norm_call,
    norm_reference,
    nondiff=True,
    out_dtype="any",
    accumulations=16,
    errors=(
        Error(lambda: _C.block_norm(f32(2), 1.0), T, r"block_norm: squares must have dtype float64, got float32"),
        Error(
            lambda: _C.block_norm(_C.full((), 1.0, _C.float64), 1.0),
            V,
            r"block_norm: squares must have 1 dimensions, got shape \(\)",
        ),
        Error(
            lambda: _C.block_norm(_C.full((2,), 1.0, _C.float64), 0.0),
            V,
            r"block_norm: most must be greater than 0, got 0",
        ),
    ),
)


# ---- Muon ------------------------------------------------------------------------------------------------------------

MUON: dict[str, Any] = dict(
    lr=0.1, momentum=0.9, weight_decay=0.1, a=3.4445, b=-4.775, c=2.0315, eps=1e-7, ratio=0.7, nesterov=True, steps=2
)
STILL: dict[str, Any] = dict(steps=0, eps=100.0)


def muon_numbers_of(settings: dict[str, Any]) -> Any:
    names = ("momentum", "weight_decay", "a", "b", "c", "eps", "ratio")
    return _C.tensor([settings[name] for name in names], _C.float64, _C.device("cpu"))


def muon_call(*tensors: Any, **settings: Any) -> list[Any]:
    """A step of one matrix or more, tensors being p, g, b of the first, then of the next: the new p and b of each."""
    wide = _C.float64 if tensors[0].dtype is _C.float64 else _C.float32
    params, buffers = ([_C.clone(t) for t in tensors[i::3]] for i in (0, 2))
    buffers = [_C.clone(_C.cast(b, wide)) for b in buffers]
    rate = _C.full((), settings["lr"], _C.float64, tensors[0].device)
    _C.muon_(
        params, list(tensors[1::3]), buffers, [], rate, muon_numbers_of(settings), settings["nesterov"],
        settings["steps"], wide,
    )  # fmt: skip
    return [t for pair in zip(params, buffers) for t in pair]


def muon_reference(*arrays: np.ndarray, **settings: Any) -> list[np.ndarray]:
    """The published formula, transposed as in Jordan's code where a matrix has more rows than columns."""
    found: list[np.ndarray] = []
    rest, momentum = 1 - settings["momentum"], settings["momentum"]
    for p, g, b in zip(arrays[::3], arrays[1::3], arrays[2::3]):
        b = momentum * b + rest * g
        u = rest * g + momentum * b if settings["nesterov"] else b
        x = u / max(float(np.linalg.norm(u)), settings["eps"])
        x = x.T if x.shape[0] > x.shape[1] else x
        for _ in range(settings["steps"]):
            gram = x @ x.T
            x = settings["a"] * x + (settings["b"] * gram + settings["c"] * gram @ gram) @ x
        x = x.T if p.shape[0] > p.shape[1] else x
        found += [p * (1 - settings["lr"] * settings["weight_decay"]) - settings["lr"] * settings["ratio"] * x, b]
    return found


def muon_roundings(*arrays: np.ndarray, **settings: Any) -> float:
    """Of an element of x, in units of its largest value, about 1. Each iteration rounds sums of as many terms as the
    matrix has rows or columns, three times, and multiplies an error by at most a.
    """
    terms = 3 * max(max(a.shape) for a in arrays) + 8
    return terms * sum(settings["a"] ** i for i in range(settings["steps"] + 1))


def muon_bad(shape: tuple[int, ...] = (2, 3), **bad: Any) -> Any:
    """A call with one matrix and what is wrong with it."""
    lists: dict[str, Any] = {name: [f32(*shape)] for name in ("params", "grads", "buffers")}
    numbers = muon_numbers_of(MUON | {name: bad.pop(name) for name in ("momentum", "a") if name in bad})
    others: dict[str, Any] = dict(masters=[], lr=_C.full((), 0.1, _C.float64), numbers=numbers, nesterov=True)
    others |= dict(ns_steps=5, ns_dtype=_C.float32)
    return _C.muon_(**(lists | others | bad))


op(
    "muon_",
    "muon_direction muon_polynomial muon_update",
    [case(*[N(*s)] * 3, **MUON) for s in [(3, 5), (5, 3), (4, 4), (1, 1), (1, 33), (33, 1), (0, 3), (2, 0), (31, 257)]]
    + [case(*[N(7, 5)] * 9, **MUON | dict(nesterov=False)), case(*[N(6, 33)] * 6, **MUON | STILL)]
    + [case(*[N(129, 261)] * 6, big=True, **MUON)],
    muon_call,
    muon_reference,
    nondiff=True,
    strided="no",
    out_dtype="any",
    accumulations=muon_roundings,
    magnitude=lambda *arrays, **settings: [
        magnitude
        for p, g, b in zip(arrays[::3], arrays[1::3], arrays[2::3])
        for magnitude in (np.abs(p) + settings["lr"] * settings["ratio"], np.abs(g) + np.abs(b))
    ],
    errors=(
        Error(lambda: muon_bad((3,)), V, r"muon_: every parameter must be a matrix, got shape \(3,\)"),
        Error(lambda: muon_bad(params=[i64(2, 3)]), T, r"muon_: every parameter must .*float.*int64"),
        Error(
            lambda: muon_bad(params=[f32(2, 3), f32(3, 2)]), V, r"muon_: every parameter must have shape \(2, 3\), got"
        ),
        Error(lambda: muon_bad(grads=[]), V, r"muon_: grads must .*\(1\), got 0"),
        Error(lambda: muon_bad(grads=[f32(3, 2)]), V, r"muon_: the gradient must have shape \(2, 3\), got \(3, 2\)"),
        Error(lambda: muon_bad(buffers=[f32(3, 2)]), V, r"muon_: buffers\[0\] must be float32 \(2, 3\)"),
        Error(lambda: muon_bad(masters=[f32(2, 3)] * 2), V, r"muon_: masters must .*\(1\), got 2"),
        Error(lambda: muon_bad(ns_dtype=_C.float64), T, r"muon_: ns_dtype must be .* for float32 .*, got float64"),
        Error(lambda: muon_bad(ns_dtype=_C.int64), T, r"muon_: ns_dtype must be .*, got int64"),
        Error(lambda: muon_bad(ns_steps=100), V, r"muon_: ns_steps must be in \[0, 99\], got 100"),
        Error(lambda: muon_bad(ns_steps=-1), V, r"muon_: ns_steps must be in \[0, 99\], got -1"),
        Error(lambda: muon_bad(momentum=1.0), V, r"muon_: momentum must be in \[0, 1\), got 1"),
        Error(lambda: muon_bad(a=math.nan), V, r"muon_: a must be .*nan"),
        Error(lambda: muon_bad(numbers=f32(7)), T, r"muon_: numbers must have dtype float64, got float32"),
        Error(
            lambda: muon_bad(numbers=_C.full((6,), 0.0, _C.float64)), V, r"muon_: numbers must have shape \(7,\), got"
        ),
        Error(lambda: muon_bad(lr=f32()), T, r"muon_: lr must have dtype float64, got float32"),
        Error(lambda: muon_bad(guard=f32(1)), V, r"muon_: guard must have 0 dimensions, got shape \(1,\)"),
    ),
)


# ---- averages --------------------------------------------------------------------------------------------------------


def ema_call(*tensors: Any, decay: float, step: int) -> list[Any]:
    """tensors: some averages, then what they take in."""
    half = len(tensors) // 2
    wide = _C.float64 if tensors[0].dtype is _C.float64 else _C.float32
    averages = [_C.clone(_C.cast(t, wide)) for t in tensors[:half]]
    taken = _C.full((), step - 1, _C.int64, tensors[0].device)
    _C.ema_(averages, list(tensors[half:]), taken, decay)
    return [*averages, taken]


def ema_reference(*arrays: np.ndarray, decay: float, step: int) -> list[np.ndarray]:
    half, share = len(arrays) // 2, (1 - decay) / (1 - decay**step)
    return [*(a + (x - a) * share for a, x in zip(arrays[:half], arrays[half:])), np.array(float(step))]


def ema_bad(**bad: Any) -> Any:
    good: dict[str, Any] = dict(averages=[f32(2)], tensors=[f32(2)], step=i64(), decay=0.9)
    return _C.ema_(**(good | bad))


op(
    "ema_",
    "ema",
    [case(N(*s), N(*s), decay=0.9, step=3) for s in [(2, 3), (), (0,), (33,), (257,)]]
    + [case(*[N(5), N(3, 4)] * 2, decay=0.999, step=1), case(*[N(129, 523)] * 2, big=True, decay=0.5, step=2)],
    ema_call,
    ema_reference,
    nondiff=True,
    strided="no",
    out_dtype="any",
    roundings=0,
    magnitude=lambda *arrays, **_: [
        *(np.abs(a) + np.abs(x) for a, x in zip(arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :])),
        np.array(0.0),
    ],
    errors=(
        Error(lambda: ema_bad(decay=1.0), V, r"ema_: decay must be in \[0, 1\), got 1"),
        Error(lambda: ema_bad(tensors=[]), V, r"ema_: tensors must hold at least one tensor, got none"),
        Error(lambda: ema_bad(tensors=[i64(2)]), T, r"ema_: every tensor must .*float.*int64"),
        Error(lambda: ema_bad(averages=[]), V, r"ema_: averages must hold one tensor per parameter \(1\), got 0"),
        Error(lambda: ema_bad(averages=[f32(3)]), V, r"ema_: averages\[0\] must be float32 \(2,\)"),
        Error(lambda: ema_bad(step=f32()), T, r"ema_: step must have dtype int64, got float32"),
        Error(lambda: ema_bad(step=i64(1)), V, r"ema_: step must have 0 dimensions, got shape \(1,\)"),
        Error(lambda: ema_bad(guard=f32(1)), V, r"ema_: guard must have 0 dimensions, got shape \(1,\)"),
    ),
)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies_call(*tensors: Any) -> list[Any]:
    """tensors: what is copied, flat, into tensors of the same shapes."""
    made = [_C.full(t.shape, 7, t.dtype, t.device) for t in tensors]
    _C.foreach_copy_(made, [_C.reshape(t, (-1,)) for t in tensors])
    return made


def copies_torch(torch: Any, *tensors: Any) -> list[Any]:
    made = [torch.full_like(t, 7) for t in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


def copies_bad(**bad: Any) -> Any:
    good: dict[str, Any] = dict(tensors=[f32(2)], sources=[f32(2)])
    return _C.foreach_copy_(**(good | bad))


def copies_of_itself() -> Any:
    row = f32(8)
    return _C.foreach_copy_([row[:4]], [row[3:7]])


op(
    "foreach_copy_",
    "foreach_copy",
    [case(N(2, 3)), case(N(0), N(33), N(), N(1, 257))] + [case(N(129, 523), N(8193), big=True)],
    copies_call,
    lambda *arrays: list(arrays),
    torch=copies_torch,
    nondiff=True,
    out_dtype="same",
    roundings=0,
    errors=(
        Error(lambda: copies_bad(tensors=[]), V, r"foreach_copy_: tensors must hold at least one tensor, got none"),
        Error(lambda: copies_bad(sources=[]), V, r"foreach_copy_: sources must hold one for each tensor \(1\), got 0"),
        Error(
            lambda: copies_bad(sources=[f32(3)]),
            V,
            r"foreach_copy_: sources\[0\] must have 2 elements of float32, got 3 of float32",
        ),
        Error(
            lambda: copies_bad(sources=[i64(2)]),
            V,
            r"foreach_copy_: sources\[0\] must have 2 elements of float32, got 2 of int64",
        ),
        Error(lambda: copies_bad(tensors=[_C.expand(f32(1), 2)]), V, r"foreach_copy_: tensors\[0\] must be contiguous"),
        Error(copies_of_itself, V, r"foreach_copy_: sources\[0\] must not overlap tensors\[0\]"),
    ),
)
