"""Entries of the op table: ops that do in one pass over memory what several ops of layers.py do one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _C
from .norms import layer_norm_sizes, torch_plus_one
from .references import layer_norm, linear_cross_entropy, rms_norm, rope
from .rope import torch_rope
from .table import TAILS, Case, Error, I, Ids, N, T, U, V, case, f32, i64, op


def add_rms_norm(x: np.ndarray, residual: np.ndarray, *weight: np.ndarray, eps: float = 1e-6) -> list[np.ndarray]:
    """The sum, and the norm of the sum."""
    total = x + residual
    return [total, rms_norm(total, weight[0] if weight else np.ones(x.shape[-1]), eps)]


def torch_add_rms_norm(torch: Any, x: Any, residual: Any, *weight: Any, eps: float = 1e-6) -> list[Any]:
    total = x + residual
    return [total, torch.nn.functional.rms_norm(total, (x.shape[-1],), *weight, eps=eps)]


def add_rms_norm_sizes(x: np.ndarray, residual: np.ndarray, *weight: np.ndarray, eps: float = 1e-6) -> list[np.ndarray]:
    """The absolute values that are added up, in the sum and behind the norm."""
    size, total = np.abs(x) + np.abs(residual), x + residual
    scale = 1 / np.sqrt(np.mean(total * total, -1, keepdims=True) + eps)
    return [size, size * scale * (np.abs(weight[0]) if weight else 1)]


def add_norm_errors(call: Callable[..., Any], name: str, vectors: tuple[str, ...]) -> tuple[Error, ...]:
    """The error cases of an op that adds and normalises. Arguments: input, residual, the vectors, eps."""
    absent = [None] * len(vectors)
    return (
        Error(lambda: call(f32(2, 4), f32(2, 5)), V, rf"{name}: residual must have shape \(2, 4\), got \(2, 5\)"),
        Error(
            lambda: call(f32(2, 4), _C.full((2, 4), 1.0, _C.bfloat16)),
            T,
            rf"{name}: residual must have the dtype of input, float32, got bfloat16",
        ),
        Error(
            lambda: call(f32(2, 64), f32(2, 64), *absent[1:], f32(65)),
            V,
            rf"{name}: {vectors[-1]} must have shape \(64,\), got \(65,\)",
        ),
        Error(lambda: call(f32(), f32()), V, rf"{name}: input must .*\(\)"),
        Error(lambda: call(i64(2, 4), i64(2, 4)), T, rf"{name}: input must .*float.*int64"),
        Error(lambda: call(f32(2, 4), f32(2, 4), *absent, -1.0), V, rf"{name}: eps must .*-1"),
    )


ROWS = [(3, 5), (2, 3, 4), (5,), (0, 4), *((3, n) for n in TAILS), (33, 24)]
add_options: dict[str, Any] = dict(
    accumulations=lambda x, *a, **k: x.shape[-1] / 2 + 8, roundings=3, grad_roundings=8, magnitude=add_rms_norm_sizes
)
op(
    "add_rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s), N(*s), N(s[-1]), eps=1e-6) for s in ROWS]
    + [case(N(*s), N(*s), N(s[-1]), eps=0.5) for s in ((3, 5), (1, 1))]  # a sum near 0 has a large rstd
    + [case(N(301, n), N(301, n), N(n), eps=1e-6, big=True) for n in (523, 1024)],
    _C.add_rms_norm,
    add_rms_norm,
    torch=torch_add_rms_norm,
    **add_options,
    errors=add_norm_errors(_C.add_rms_norm, "add_rms_norm", ("weight",)),
)
op(
    "add_rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s), N(*s)) for s in ROWS],
    _C.add_rms_norm,
    add_rms_norm,
    variant="no weight",
    torch=torch_add_rms_norm,
    **add_options,
)

op(
    "add_rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s), N(*s), N(s[-1]), eps=1e-6) for s in ((3, 5), (2, 3, 4), (0, 4), (3, 33), (33, 24))]
    + [case(N(301, n), N(301, n), N(n), eps=1e-6, big=True) for n in (523, 1024)],
    lambda x, residual, w, eps: _C.add_rms_norm(x, residual, w, eps, True),
    lambda x, residual, w, eps: add_rms_norm(x, residual, 1 + w, eps=eps),
    variant="plus one",
    torch=lambda torch, x, residual, w, eps: [x + residual, torch_plus_one(torch, x + residual, w, eps)],
    **add_options | {"magnitude": lambda x, r, w, eps: add_rms_norm_sizes(x, r, 1 + w, eps=eps)},
)


def add_layer_norm(x: np.ndarray, residual: np.ndarray, *vectors: np.ndarray, eps: float = 1e-5) -> list[np.ndarray]:
    """The sum, and the norm of the sum."""
    return [x + residual, layer_norm(x + residual, *vectors, eps=eps)]


def torch_add_layer_norm(torch: Any, x: Any, residual: Any, *vectors: Any, eps: float = 1e-5) -> list[Any]:
    total = x + residual
    return [total, torch.nn.functional.layer_norm(total, (x.shape[-1],), *vectors, eps=eps)]


def add_layer_norm_sizes(x: np.ndarray, residual: np.ndarray, *vectors: Any, eps: float = 1e-5) -> list[np.ndarray]:
    """The absolute values that are added up, in the sum and behind the norm."""
    size, total = np.abs(x) + np.abs(residual), x + residual
    more = size / np.sqrt(np.var(total, -1, keepdims=True) + eps) * np.abs(vectors[0] if vectors else 1)
    return [size, layer_norm_sizes(total, *vectors, eps=eps) + more]


# A row of one element has no variance (see norms.py).
add_layer_options: dict[str, Any] = dict(
    accumulations=lambda x, *a, **k: 2 * x.shape[-1] + 8, roundings=3, grad_roundings=8, magnitude=add_layer_norm_sizes
)
op(
    "add_layer_norm",
    "layer_norm_fwd layer_norm_bwd",
    [case(N(*s), N(*s), N(s[-1]), N(s[-1]), eps=1e-5) for s in ((3, 5), (2, 3, 4), (0, 4), (3, 33), (33, 24))]
    + [case(N(3, 5), N(3, 5), N(5), N(5), eps=0.5), case(N(301, 523), N(301, 523), N(523), N(523), eps=1e-5, big=True)],
    _C.add_layer_norm,
    add_layer_norm,
    torch=torch_add_layer_norm,
    **add_layer_options,
    errors=add_norm_errors(_C.add_layer_norm, "add_layer_norm", ("weight", "bias")),
)
op(
    "add_layer_norm",
    "layer_norm_fwd layer_norm_bwd",
    [case(N(*s), N(*s)) for s in ((3, 5), (1, 7))],
    _C.add_layer_norm,
    add_layer_norm,
    variant="no weight",
    torch=torch_add_layer_norm,
    **add_layer_options,
)


# ---- QK-norm and RoPE ------------------------------------------------------------------------------------------------


def qk_norm_rope(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *positions: np.ndarray, **options: Any
) -> list[np.ndarray]:
    """rope of the rms_norm, of both."""
    eps, places = options.pop("eps", 1e-6), positions[0] if positions else None
    return [rope(rms_norm(x, w, eps), positions=places, **options) for x, w in ((q, q_weight), (k, k_weight))]


def torch_qk_norm_rope(
    torch: Any, q: Any, k: Any, q_weight: Any, k_weight: Any, *positions: Any, eps: float = 1e-6, **options: Any
) -> list[Any]:
    norm = torch.nn.functional.rms_norm
    parts = ((q, q_weight), (k, k_weight))
    return [torch_rope(torch, norm(x, (x.shape[-1],), w, eps), *positions, **options) for x, w in parts]


def qk_sizes(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *_: Any, eps: float = 1e-6, **__: Any
) -> list[np.ndarray]:
    """Both terms of each element of a rotation."""
    norms = [np.abs(rms_norm(x, w, eps)) for x, w in ((q, q_weight), (k, k_weight))]
    return [n + np.roll(n, n.shape[-1] // 2, -1) for n in norms]


def call_qk(q: Any, k: Any, q_weight: Any, k_weight: Any, *positions: Any, **options: Any) -> Any:
    places = positions[0] if positions else None
    return _C.qk_norm_rope(q, k, q_weight, k_weight, positions=places, **options)


# q's shape and k's heads: one lane and many to a line, heads that fill no group, halves that fill no lane, long heads.
QK = [
    ((6, 2, 8), 1),
    ((2, 3, 4, 8), 2),
    ((0, 2, 8), 2),
    ((1, 1, 2), 1),
    ((2, 5, 3, 6), 1),
    ((2, 3, 5, 32), 3),
    ((2, 7, 4, 64), 4),
    ((1, 9, 2, 96), 1),
    ((2, 5, 4, 128), 2),
    ((1, 3, 2, 256), 1),
    ((1, 3, 1, 1040), 1),
]


def qk_inputs(shape: tuple[int, ...], heads: int) -> list[Any]:
    d = shape[-1]
    return [N(*shape), N(*shape[:-2], heads, d), N(d), N(d)]


qk_options: dict[str, Any] = dict(
    accumulations=lambda q, *a, **k: 2 * max(math.prod(q.shape[:-2]), 40) + q.shape[-1] / 2 + 24,
    roundings=4,
    grad_roundings=10,
    magnitude=qk_sizes,
    torch=torch_qk_norm_rope,
)
op(
    "qk_norm_rope",
    "qk_norm_rope_fwd qk_norm_rope_bwd",
    [case(*qk_inputs(*s)) for s in QK]
    + [case(*qk_inputs((6, 2, 8), 1), period=3, theta=1e6), case(*qk_inputs((2, 3, 2, 8), 2), eps=0.5)]
    + [case(*qk_inputs((2, 40, 2, 16), 1), factor=8.0, original_length=64.0)]
    + [case(*qk_inputs((4, 65, 6, d), 2), big=True) for d in (64, 128)],
    call_qk,
    qk_norm_rope,
    **qk_options,
    errors=(
        Error(
            lambda: _C.qk_norm_rope(f32(2, 3, 4, 8), f32(2, 4, 2, 8), f32(8), f32(8)),
            V,
            r"qk_norm_rope: k must have shape \(2, 3, 2, 8\), got \(2, 4, 2, 8\)",
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 1, 8), f32(8), f32(6)),
            V,
            r"qk_norm_rope: k_weight must have shape \(8,\), got \(6,\)",
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 1, 8), _C.full((8,), 1.0, _C.float16), f32(8)),
            T,
            r"qk_norm_rope: q_weight must have the dtype of q, float32, got float16",
        ),
        Error(lambda: _C.qk_norm_rope(f32(4, 2, 7), f32(4, 2, 7), f32(7), f32(7)), V, r"qk_norm_rope: .*even.*7"),
        Error(lambda: _C.qk_norm_rope(f32(4, 8), f32(4, 8), f32(8), f32(8)), V, r"qk_norm_rope: q must have 3 .*4 dim"),
        Error(
            lambda: _C.qk_norm_rope(i64(4, 2, 8), i64(4, 2, 8), f32(8), f32(8)),
            T,
            r"qk_norm_rope: q must .*float.*int64",
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 2, 8), f32(8), f32(8), -1.0), V, r"qk_norm_rope: eps must .*-1"
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 2, 8), f32(8), f32(8), theta=-1.0),
            V,
            r"qk_norm_rope: theta must be positive, got -1",
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 2, 8), f32(8), f32(8), positions=i64(5)),
            V,
            r"qk_norm_rope: positions must have one entry per row of q, .*\(4,\).*\(5,\)",
        ),
        Error(
            lambda: _C.qk_norm_rope(f32(4, 2, 8), f32(4, 2, 8), f32(8), f32(8), period=0),
            V,
            r"qk_norm_rope: period must be at least 1, got 0",
        ),
    ),
)
op(
    "qk_norm_rope",
    "qk_norm_rope_fwd qk_norm_rope_bwd",
    [case(*qk_inputs((5, 2, 8), 1), Ids(0, 40, 5)), case(*qk_inputs((2, 3, 2, 16), 1), Ids(0, 40, 6))],
    call_qk,
    qk_norm_rope,
    variant="positions",
    **qk_options,
)

# ---- head and loss --------------------------------------------------------------------------------------------------


def linear_cross_entropy_case(
    rows: int, width: int, words: int, low: int = 0, high: int | None = None, **k: Any
) -> Case:
    """Logits of order one; targets in [low, high)."""
    high = words if high is None else high
    return case(N(rows, width), U(-0.7, 0.7, words, width), Ids(low, high, rows), **k)


def lce_torch(
    torch: Any, x: Any, w: Any, t: Any, chunk_rows: int | None = None, z_loss: float = 0.0,
    softcap: float | None = None, **k: Any,
) -> Any:  # fmt: skip
    logits = torch.nn.functional.linear(x, w)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = torch.nn.functional.cross_entropy(logits, t, **k)
    if not z_loss:
        return loss
    squares = torch.where(
        t != k.get("ignore_index", -100),
        torch.logsumexp(logits if logits.dtype == torch.float64 else logits.float(), 1) ** 2,
        0.0,
    )
    return loss + z_loss * (squares if k.get("reduction") == "none" else squares.sum())


lce_options: dict[str, Any] = dict(
    accumulations=lambda x, w, t, **_: x.shape[1] + w.shape[0] + len(t) + 16,
    grad_roundings=6,
    out_dtype="loss",
    magnitude=lambda x, w, t, **k: linear_cross_entropy(x, w, t, magnitude=True, **k),
    torch=lce_torch,
    selects="gemm",
    strided="close",
)
# (rows, C, V): V odd, V a multiple of the row unit, one of everything.
LCE = [(4, 3, 7), (3, 5, 8), (1, 1, 1), (3, 31, 33), (5, 33, 31), (33, 8, 257)]
for reduction in ("mean", "sum", "none"):
    op(
        "linear_cross_entropy",
        "cross_entropy_fwd cross_entropy_bwd",
        [linear_cross_entropy_case(*sizes, reduction=reduction) for sizes in LCE]
        + [linear_cross_entropy_case(130, 64, 1003, reduction=reduction, big=True)]
        + ([linear_cross_entropy_case(0, 3, 5, reduction=reduction, fd=False)] if reduction != "mean" else []),
        _C.linear_cross_entropy,
        linear_cross_entropy,
        variant=reduction,
        **lce_options,
    )
op(
    "linear_cross_entropy",
    "cross_entropy_fwd linear_cross_entropy_bwd",
    [
        # Whole chunks, a last one of fewer rows, chunks of one row, a chunk of nothing but ignored rows.
        linear_cross_entropy_case(4, 3, 7, chunk_rows=2),
        linear_cross_entropy_case(5, 31, 33, chunk_rows=2),
        linear_cross_entropy_case(3, 5, 8, chunk_rows=1),
        linear_cross_entropy_case(33, 8, 257, chunk_rows=32, reduction="sum"),
        linear_cross_entropy_case(5, 4, 7, 2, 4, ignore_index=2, chunk_rows=1),
        linear_cross_entropy_case(5, 4, 7, 2, 3, ignore_index=2, chunk_rows=2, reduction="sum"),
        linear_cross_entropy_case(5, 4, 33, 0, 3, ignore_index=2, chunk_rows=2, reduction="sum", z_loss=0.1),
        linear_cross_entropy_case(130, 64, 1003, chunk_rows=48, big=True),
    ],
    _C.linear_cross_entropy,
    linear_cross_entropy,
    variant="chunks",
    **lce_options,
    errors=(
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), _C.tensor(np.array([0, 1, -3])), chunk_rows=2),
            I,
            r"^linear_cross_entropy: targets must .*got -3 at position 2",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), i64(3), z_loss=-1.0),
            V,
            r"^linear_cross_entropy: z_loss must be a finite number of at least 0, got -1",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), i64(3), chunk_rows=0),
            V,
            r"^linear_cross_entropy: chunk_rows must be at least 1, got 0",
        ),
    ),
)
op(
    "linear_cross_entropy",
    "cross_entropy_fwd cross_entropy_bwd linear_cross_entropy_bwd",
    [
        # Caps that bend all logits, or hardly any; beside a z-loss; rows of heads, tails and whole vectors; in chunks.
        linear_cross_entropy_case(4, 3, 7, softcap=0.5),
        linear_cross_entropy_case(1, 1, 1, softcap=2.0),
        linear_cross_entropy_case(33, 8, 257, softcap=1.5, reduction="sum"),
        linear_cross_entropy_case(5, 33, 31, softcap=30.0, reduction="none", z_loss=0.1),
        linear_cross_entropy_case(8, 3, 5, ignore_index=2, softcap=0.8),
        linear_cross_entropy_case(5, 31, 33, chunk_rows=2, softcap=0.7),
        linear_cross_entropy_case(33, 8, 257, chunk_rows=32, softcap=1.0, reduction="sum", z_loss=0.1),
        linear_cross_entropy_case(130, 64, 1003, softcap=2.0, big=True),
        linear_cross_entropy_case(130, 64, 1003, chunk_rows=48, softcap=2.0, big=True),
    ],
    _C.linear_cross_entropy,
    linear_cross_entropy,
    variant="softcap",
    **lce_options,
    errors=tuple(
        Error(
            lambda value=value: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), i64(3), softcap=value),
            V,
            f"^linear_cross_entropy: softcap must be positive and finite in float32, got {value:g}",
        )
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e-60)
    ),
)
op(
    "linear_cross_entropy",
    "cross_entropy_fwd cross_entropy_bwd",
    [
        linear_cross_entropy_case(8, 3, 5, ignore_index=2),
        linear_cross_entropy_case(33, 4, 5, ignore_index=2, reduction="sum"),
        linear_cross_entropy_case(5, 4, 7, ignore_index=2, reduction="none"),
        linear_cross_entropy_case(5, 4, 7, 2, 3, ignore_index=2, reduction="none"),
        linear_cross_entropy_case(5, 4, 7, 2, 3, ignore_index=2, reduction="sum"),
        linear_cross_entropy_case(8, 3, 33, 0, 4, ignore_index=2, reduction="sum", z_loss=0.1),
        linear_cross_entropy_case(5, 4, 7, 0, 4, ignore_index=2, reduction="none", z_loss=1.0),
    ],
    _C.linear_cross_entropy,
    linear_cross_entropy,
    variant="ignored",
    **lce_options,
    errors=(
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), _C.tensor(np.array([0, 5, 1]))),
            I,
            r"^linear_cross_entropy: targets must be in \[0, 5\).*got 5 at position 1",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), _C.tensor(np.array([0, 1, -3]))),
            I,
            r"^linear_cross_entropy: targets must .*got -3 at position 2",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 6), i64(3)),
            V,
            r"linear_cross_entropy: weight must have shape \(5, 4\), got \(5, 6\)",
        ),
        Error(lambda: _C.linear_cross_entropy(f32(3, 4), f32(4), i64(3)), V, r"linear_cross_entropy: weight must .*2"),
        Error(lambda: _C.linear_cross_entropy(f32(3, 2, 4), f32(5, 4), i64(3)), V, r"linear_cross_entropy: x must .*2"),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), i64(4)),
            V,
            r"linear_cross_entropy: targets must have shape \(3,\), got \(4,\)",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), f32(3)),
            T,
            r"linear_cross_entropy: targets must be int64 or int32 .*float32",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), _C.full((5, 4), 1.0, _C.bfloat16), i64(3)),
            T,
            r"linear_cross_entropy: weight must .*float32.*bfloat16",
        ),
        Error(
            lambda: _C.linear_cross_entropy(i64(3, 4), i64(5, 4), i64(3)),
            T,
            r"linear_cross_entropy: x must .*float.*int64",
        ),
        Error(
            lambda: _C.linear_cross_entropy(f32(3, 4), f32(5, 4), i64(3), reduction="total"),
            V,
            r"linear_cross_entropy: reduction must .*total",
        ),
    ),
)
