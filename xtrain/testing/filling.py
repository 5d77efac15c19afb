"""fill: test data made on the device that needs it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import numpy as np

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from .formats import is_finite

Shape = tuple[int, ...]

_OPTIONS: dict[str, dict[str, float]] = {
    "uniform": {"low": -1.0, "high": 1.0},
    "uniform_int": {"low": -5, "high": 6},
    "normal": {"mean": 0.0, "std": 1.0},
    "constant": {"value": 1.0},
    "zero": {},
    "sequential": {"start": 0, "step": 1},
    "diagonal": {"value": 1},
    "checkerboard": {"value": 1, "other": 0},
}


@no_grad()
def fill(tensor: Tensor, kind: str, seed: int = 0, **options: float) -> Tensor:
    """Fills tensor in place, on its device, and returns it: the same values for the same seed on every device.

    uniform(low=-1, high=1)         real numbers in [low, high); float dtypes
    uniform_int(low=-5, high=6)     whole numbers in [low, high): sums of their products are exact
    normal(mean=0, std=1)           float dtypes
    constant(value=1), zero()
    sequential(start=0, step=1)     start + i * step, i counting in row-major order
    diagonal(value=1)               value where the last two indices are equal, else 0; at least 2 dims
    checkerboard(value=1, other=0)  value where the sum of the indices is even, else other

    Any strides; seed: 0 to 2^64 - 1. The default generator is left as it was. ValueError: an unknown kind or option, or
    one that the dtype cannot hold.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"fill: tensor must be a Tensor, got {type(tensor).__name__}")
    if not isinstance(kind, str) or kind not in _OPTIONS:
        raise ValueError(f"fill: kind must be one of {', '.join(_OPTIONS)}, got {kind!r}")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"fill: seed must be an int, got {type(seed).__name__}")
    if seed < 0:
        raise ValueError(f"fill: seed must be at least 0, got {seed}")
    if seed >= 2**64:
        raise ValueError(f"fill: seed must fit in 64 bits, got {seed}")
    unknown = set(options) - set(_OPTIONS[kind])
    if unknown:
        known = ", ".join(_OPTIONS[kind]) or "nothing"
        raise ValueError(f"fill: options of {kind} must be of {known}, got {', '.join(sorted(unknown))}")
    if kind in ("uniform", "normal") and not tensor.dtype.is_floating_point:
        raise TypeError(f"fill: tensor must be floating point for {kind}, got {tensor.dtype.name}")
    chosen = {**_OPTIONS[kind], **options}
    for name, value in chosen.items():
        if not is_finite(value):
            raise ValueError(f"fill: {name} must be a finite number, got {value!r}")
        if value != int(value) and (kind == "uniform_int" or not tensor.dtype.is_floating_point):
            raise ValueError(f"fill: {name} must be a whole number for {kind} in {tensor.dtype.name}, got {value!r}")
    chosen = {name: int(v) if isinstance(v, numbers.Integral) else float(v) for name, v in chosen.items()}
    _check_range(kind, tensor, chosen)
    return tensor.copy_(_MAKERS[kind](tuple(tensor.shape), tensor.dtype, tensor.device, int(seed), **chosen))


def _check_range(kind: str, tensor: Tensor, chosen: dict[str, float]) -> None:
    """ValueError for values that the dtype would wrap around or turn into infinity."""
    values = list(chosen.values())
    if kind == "uniform_int":
        values[1] -= 1
    elif kind == "uniform":
        values.append(abs(chosen["high"] - chosen["low"]))  # what the generator scales by
    elif kind == "sequential":
        values = [chosen["start"], chosen["start"] + chosen["step"] * max(0, tensor.numel() - 1)]
    name = tensor.dtype.name
    if name == "bool":
        return
    if tensor.dtype.is_floating_point:
        high = float.fromhex("0x1.fep127") if name == "bfloat16" else float(np.finfo(name).max)
        low = -high
    else:
        low, high = np.iinfo(name).min, np.iinfo(name).max
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"fill: {kind} must stay in [{low}, {high}] for {name}, got {value!r}")


def _seeded(seed: int, draw: Callable[[], Tensor]) -> Tensor:
    before = _C.get_rng_state()
    _C.set_rng_state((seed, 0))
    try:
        return draw()
    finally:
        _C.set_rng_state(before)


def _uniform(shape: Shape, dtype: _C.dtype, device: _C.device, seed: int, low: float, high: float) -> Tensor:
    return _seeded(seed, lambda: _C.uniform(shape, low, high, dtype, device))


def _uniform_int(shape: Shape, dtype: _C.dtype, device: _C.device, seed: int, low: float, high: float) -> Tensor:
    return _seeded(seed, lambda: _C.randint(int(low), int(high), shape, _C.int64, device)).to(dtype)


def _normal(shape: Shape, dtype: _C.dtype, device: _C.device, seed: int, mean: float, std: float) -> Tensor:
    return _seeded(seed, lambda: _C.normal(shape, mean, std, dtype, device))


def _constant(shape: Shape, dtype: _C.dtype, device: _C.device, _seed: int, value: float = 0) -> Tensor:
    return _C.full(shape, value, dtype, device)


def _sequential(shape: Shape, dtype: _C.dtype, device: _C.device, _seed: int, start: float, step: float) -> Tensor:
    index = _C.arange(0, math.prod(shape), 1, _C.int64, device).reshape(shape)
    if isinstance(start, int) and isinstance(step, int):
        return (index * step + start).to(dtype)
    return (index.to(_C.float64) * float(step) + float(start)).to(dtype)


def _along(shape: Shape, dim: int, device: _C.device) -> Tensor:
    """The index in dimension dim (negative), shaped to broadcast."""
    return _C.arange(0, shape[dim], 1, _C.int64, device).reshape((shape[dim],) + (1,) * (-dim - 1))


def _diagonal(shape: Shape, dtype: _C.dtype, device: _C.device, _seed: int, value: float) -> Tensor:
    if len(shape) < 2:
        raise ValueError(f"fill: tensor must have at least 2 dims for diagonal, got shape {shape}")
    here = _C.eq(_along(shape, -2, device), _along(shape, -1, device))
    square = _C.where(here, _constant((1, 1), dtype, device, 0, value), _constant((1, 1), dtype, device, 0))
    return square.expand(shape)


def _checkerboard(shape: Shape, dtype: _C.dtype, device: _C.device, _seed: int, value: float, other: float) -> Tensor:
    total = _constant((1,) * len(shape), _C.int64, device, 0)
    for dim in range(-len(shape), 0):
        total = total + _along(shape, dim, device)
    half = (total.to(_C.float64) * 0.5).to(_C.int64)  # a cast truncates
    one = (1,) * len(shape)
    return _C.where(
        _C.eq(half * 2, total), _constant(one, dtype, device, 0, value), _constant(one, dtype, device, 0, other)
    )


_MAKERS: dict[str, Callable[..., Tensor]] = {
    "uniform": _uniform,
    "uniform_int": _uniform_int,
    "normal": _normal,
    "constant": _constant,
    "zero": _constant,
    "sequential": _sequential,
    "diagonal": _diagonal,
    "checkerboard": _checkerboard,
}
