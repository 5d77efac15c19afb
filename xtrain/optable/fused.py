"""Entries of the op table: ops that do in one pass over memory what several ops of layers.py do one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .references import rms_norm
from .table import TAILS, Error, N, T, V, case, f32, i64, op


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
    errors=(
        Error(
            lambda: _C.add_rms_norm(f32(2, 4), f32(2, 5)),
            V,
            r"add_rms_norm: residual must have shape \(2, 4\), got \(2, 5\)",
        ),
        Error(
            lambda: _C.add_rms_norm(f32(2, 4), _C.full((2, 4), 1.0, _C.bfloat16)),
            T,
            r"add_rms_norm: residual must have the dtype of input, float32, got bfloat16",
        ),
        Error(
            lambda: _C.add_rms_norm(f32(2, 64), f32(2, 64), f32(65)),
            V,
            r"add_rms_norm: weight must have shape \(64,\), got \(65,\)",
        ),
        Error(lambda: _C.add_rms_norm(f32(), f32()), V, r"add_rms_norm: input must .*\(\)"),
        Error(lambda: _C.add_rms_norm(i64(2, 4), i64(2, 4)), T, r"add_rms_norm: input must .*float.*int64"),
        Error(lambda: _C.add_rms_norm(f32(2, 4), f32(2, 4), None, -1.0), V, r"add_rms_norm: eps must .*-1"),
    ),
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
