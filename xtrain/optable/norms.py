"""Entries of the op table: norms of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .references import layer_norm, rms_norm
from .table import TAILS, Error, N, T, V, case, f32, i64, op

RMS = [(3, 5), (2, 3, 4), (5,), (0, 4), (1, 1), *((3, n) for n in TAILS), (33, 24)]
# The gradient of a row of one element is a difference of equal numbers (tests/ops/test_layer_norm.py).
NORMS = [s for s in RMS if s[-1] > 1]
rms_options: dict[str, Any] = dict(accumulations=lambda x, *a, **k: x.shape[-1] / 2 + 8, roundings=2, grad_roundings=6)
# The normalised number is rounded to the dtype, and multiplied by the weight behind that.
rms_floors: dict[str, Any] = dict(floors=lambda x, w, eps: 1 + np.abs(w))
op(
    "rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s), N(s[-1]), eps=1e-6) for s in RMS]
    + [case(N(3, 5), N(5), eps=0.5), case(N(301, 523), N(523), eps=1e-6, big=True)],
    _C.rms_norm,
    rms_norm,
    torch=lambda torch, x, w, eps: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps),
    **rms_options,
    **rms_floors,
    errors=(
        Error(lambda: _C.rms_norm(f32(2, 64), f32(65)), V, r"rms_norm: weight must have shape \(64,\), got \(65,\)"),
        Error(lambda: _C.rms_norm(f32(), f32(1)), V, r"rms_norm: input must .*\(\)"),
        Error(
            lambda: _C.rms_norm(f32(2, 4), _C.full((4,), 1.0, _C.bfloat16)),
            T,
            r"rms_norm: weight must .*float32.*bfloat16",
        ),
        Error(lambda: _C.rms_norm(i64(2, 4)), T, r"rms_norm: input must .*float.*int64"),
        Error(lambda: _C.rms_norm(f32(2, 4), f32(4), -1.0), V, r"rms_norm: eps must .*-1"),
    ),
)
op(
    "rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s)) for s in RMS],
    _C.rms_norm,
    lambda x: rms_norm(x, np.ones(x.shape[-1]), 1e-6),
    variant="no weight",
    torch=lambda torch, x: torch.nn.functional.rms_norm(x, (x.shape[-1],), None, 1e-6),
    **rms_options,
)


def torch_plus_one(torch: Any, x: Any, w: Any, eps: float) -> Any:
    """The norm of Hugging Face's Gemma: rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.nn.functional.rms_norm(x.to(wide), (x.shape[-1],), 1 + w.to(wide), eps).to(x.dtype)


op(
    "rms_norm",
    "rms_norm_fwd rms_norm_bwd",
    [case(N(*s), N(s[-1]), eps=1e-6) for s in NORMS] + [case(N(301, n), N(n), eps=1e-6, big=True) for n in (523, 1024)],
    lambda x, w, eps: _C.rms_norm(x, w, eps, True),
    lambda x, w, eps: rms_norm(x, 1 + w, eps),
    variant="plus one",
    torch=torch_plus_one,
    **rms_options | {"roundings": 1},
)


def layer_norm_sizes(x: np.ndarray, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    """x and its mean are taken apart before they are scaled. The mean's error is one of mean |x|."""
    size = np.abs(x) + np.mean(np.abs(x), -1, keepdims=True) if x.size else x
    return size / np.sqrt(np.var(x, -1, keepdims=True) + eps) * np.abs(weight) + np.abs(bias) if x.size else x


norm_options: dict[str, Any] = dict(
    accumulations=lambda x, *a, **k: 2 * x.shape[-1] + 8, magnitude=layer_norm_sizes, grad_roundings=6
)
op(
    "layer_norm",
    "layer_norm_fwd layer_norm_bwd",
    [case(N(*s), N(s[-1]), N(s[-1]), eps=1e-5) for s in NORMS]
    + [case(N(3, 5), N(5), N(5), eps=0.5), case(N(301, 523), N(523), N(523), eps=1e-5, big=True)],
    _C.layer_norm,
    layer_norm,
    torch=lambda torch, x, w, b, eps: torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, eps),
    **norm_options,
    errors=(
        Error(
            lambda: _C.layer_norm(f32(2, 64), f32(65)), V, r"layer_norm: weight must have shape \(64,\), got \(65,\)"
        ),
        Error(
            lambda: _C.layer_norm(f32(2, 64), None, f32(65)),
            V,
            r"layer_norm: bias must have shape \(64,\), got \(65,\)",
        ),
        Error(lambda: _C.layer_norm(f32(), f32(1)), V, r"layer_norm: input must .*\(\)"),
        Error(
            lambda: _C.layer_norm(f32(2, 4), f32(4), _C.full((4,), 1.0, _C.bfloat16)),
            T,
            r"layer_norm: bias must .*float32.*bfloat16",
        ),
        Error(lambda: _C.layer_norm(i64(2, 4)), T, r"layer_norm: input must .*float.*int64"),
        Error(lambda: _C.layer_norm(f32(2, 4), f32(4), None, -1.0), V, r"layer_norm: eps must .*-1"),
    ),
)
op(
    "layer_norm",
    "layer_norm_fwd layer_norm_bwd",
    [case(N(*s)) for s in NORMS],
    _C.layer_norm,
    layer_norm,
    variant="no weight",
    torch=lambda torch, x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
    **norm_options,
)
for variant, vectors in (("weight", lambda v: (v, None)), ("bias", lambda v: (None, v))):  # one of the two
    op(
        "layer_norm",
        "layer_norm_fwd layer_norm_bwd",
        [case(N(*s), N(s[-1])) for s in NORMS],
        lambda x, v, vectors=vectors: _C.layer_norm(x, *vectors(v)),
        lambda x, v, which=variant: layer_norm(x, **{which: v}),
        variant=f"{variant} alone",
        torch=lambda torch, x, v, vectors=vectors: torch.nn.functional.layer_norm(x, (x.shape[-1],), *vectors(v)),
        **{**norm_options, "magnitude": lambda x, v, which=variant: layer_norm_sizes(x, **{which: v})},
    )
