"""Entries of the op table: rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _C
from .references import rope, rope_frequencies
from .table import Error, Ids, N, T, V, case, f32, i64, op


def torch_rope(
    torch: Any, x: Any, *positions: Any, theta: float = 10000.0, period: int | None = None, **scaling: float
) -> Any:
    half = x.shape[-1] // 2
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    tokens = math.prod(x.shape[:-2])
    pos = (
        positions[0].reshape(-1)
        if positions
        else torch.arange(tokens, device=x.device) % (period or (x.shape[1] if x.ndim == 4 else max(tokens, 1)))
    )
    scale = rope_frequencies(half, theta, **scaling) / rope_frequencies(half, theta)
    frequency = theta ** (-torch.arange(half, dtype=work, device=x.device) / half)
    angle = pos.to(work)[:, None] * frequency * torch.from_numpy(scale).to(frequency)
    cos, sin = (f(angle).to(x.dtype).reshape(*x.shape[:-2], 1, half) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


rope_options: dict[str, Any] = dict(
    roundings=2,
    accumulations=lambda x, *a, **k: 2 * max(math.prod(x.shape[:-2]), 40) + 16,
    grad_roundings=4,
    magnitude=lambda x, *a, **k: np.abs(x) + np.abs(np.roll(x, x.shape[-1] // 2, -1)),
)
op(
    "rope",
    "rope",
    [
        case(N(6, 2, 8), period=3),
        case(N(2, 3, 2, 8)),
        case(N(2, 3, 2, 8), theta=1e6),
        case(N(2, 9, 2, 8), factor=4.0),
        case(N(2, 40, 1, 16), factor=8.0, original_length=64.0),
        case(N(2, 40, 1, 16), factor=3.0, low_freq_factor=0.5, high_freq_factor=9.0, original_length=100.0),
        case(N(0, 2, 8), period=1),
        case(N(1, 1, 2), period=1),
        case(N(66, 1, 24), period=33),
        case(N(2, 33, 3, 6)),
        case(N(4, 65, 6, 64), big=True),
    ],
    _C.rope,
    lambda x, **k: rope(x, **k),
    torch=torch_rope,
    **rope_options,
    errors=(
        Error(lambda: _C.rope(f32(4, 2, 7)), V, r"rope: .*even.*7"),
        Error(lambda: _C.rope(f32(4, 2)), V, r"rope: x must have 3 .*4 dim.*\(4, 2\)"),
        Error(lambda: _C.rope(f32(4, 2, 8), 10000.0, None, 0), V, r"rope: period must .*0"),
        Error(
            lambda: _C.rope(f32(4, 2, 8), 10000.0, i64(5)),
            V,
            r"rope: positions must .*\(4,\).*\(5,\)|rope: positions must .*4.*5",
        ),
        Error(lambda: _C.rope(f32(4, 2, 8), 10000.0, f32(4)), T, r"rope: positions must .*int.*float32"),
        Error(lambda: _C.rope(f32(4, 2, 8), -1.0), V, r"rope: theta must .*-1"),
        Error(lambda: _C.rope(f32(4, 2, 8), factor=0.0), V, r"rope: factor must be positive, got 0"),
        Error(lambda: _C.rope(f32(4, 2, 8), factor=2.0, original_length=-1.0), V, r"rope: original_length must .*-1"),
        Error(
            lambda: _C.rope(f32(4, 2, 8), factor=2.0, low_freq_factor=4.0, original_length=9.0),
            V,
            r"rope: low_freq_factor must be positive and below high_freq_factor 4, got 4",
        ),
        Error(lambda: _C.rope(i64(4, 2, 8)), T, r"rope: x must .*float.*int64"),
    ),
)
op(
    "rope",
    "rope",
    [case(N(5, 2, 8), Ids(0, 40, 5)), case(N(2, 3, 2, 8), Ids(0, 40, 6)), case(N(33, 1, 2), Ids(0, 40, 33))],
    lambda x, p: _C.rope(x, positions=p),
    lambda x, p: rope(x, positions=p),
    variant="positions",
    torch=torch_rope,
    **rope_options,
)
