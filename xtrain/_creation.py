"""Making tensors: constants, ranges and random numbers, with PyTorch's signatures.

Every function takes `dtype` (default float32 unless it says otherwise), `device` (default cpu) and `requires_grad`.
Sizes are given as integers or as one tuple: `zeros(2, 3)` and `zeros((2, 3))` are the same. Random numbers are
Philox4x32-10 keyed by (seed, fill number), counted by element index: the same numbers on every device and for any
number of threads. `generator`: draw from this Generator in place of the default one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from . import _C
from ._C import Tensor
from ._types import Device, DType, Size, as_int, need_input
from .tensors.random import Generator

_float32, _int64, _bool = _C.float32, _C.int64, _C.bool


def _shape(size: tuple[Any, ...]) -> Sequence[int]:
    if len(size) == 1 and not isinstance(size[0], int) and hasattr(size[0], "__iter__"):
        return tuple(size[0])
    return size


def _sizes(op: str, size: object) -> tuple[Any, ...]:
    """A size, or several. TypeError for what is neither; the core says what is wrong with one of several."""
    if isinstance(size, Iterable) and getattr(size, "ndim", 1):
        return tuple(size)
    return (as_int(op, "size", size),)


def _finish(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_() if requires_grad else tensor


def _key(generator: Generator | None) -> tuple[int, int] | None:
    if generator is None:
        return None
    if not isinstance(generator, Generator):
        raise TypeError(f"generator must be a Generator or None, got {type(generator).__name__}")
    return generator.key()


def _dtype_of_value(value: float) -> _C.dtype:
    if isinstance(value, bool):
        return _bool
    return _int64 if isinstance(value, int) else _float32


def empty(*size: Size, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """Uninitialised memory of shape `size`, float32 by default. ValueError for negative sizes, here and below."""
    return _finish(_C.empty(_shape(size), dtype or _float32, device), requires_grad)


def full(
    size: Size, fill_value: float, *, dtype: DType = None, device: Device = None, requires_grad: bool = False
) -> Tensor:
    """`fill_value` everywhere; without dtype: bool for a bool, int64 for an int, float32 for a float."""
    return _finish(
        _C.full(_sizes("full", size), fill_value, dtype or _dtype_of_value(fill_value), device), requires_grad
    )


def zeros(*size: Size, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """Zeros of shape `size`, float32 by default."""
    return _finish(_C.full(_shape(size), 0, dtype or _float32, device), requires_grad)


def ones(*size: Size, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """Ones of shape `size`, float32 by default."""
    return _finish(_C.full(_shape(size), 1, dtype or _float32, device), requires_grad)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: DType = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Tensor:
    """start, start + step, ... below `end`, 1-D. `arange(n)` counts from 0. int64 when all three are integers, else
    float32. ValueError for numbers that an integer dtype does not hold.
    """
    if end is None:
        start, end = 0, start
    if dtype is None:
        dtype = _int64 if isinstance(start, int) and isinstance(end, int) and isinstance(step, int) else _float32
    return _finish(_C.arange(start, end, step, dtype, device), requires_grad)


def rand(
    *size: Size,
    generator: Generator | None = None,
    dtype: DType = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Tensor:
    """Uniform in [0, 1), of shape `size`, float32 by default. TypeError for a dtype that is not a float."""
    return _finish(_C.uniform(_shape(size), 0.0, 1.0, dtype or _float32, device, key=_key(generator)), requires_grad)


def randn(
    *size: Size,
    generator: Generator | None = None,
    dtype: DType = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Tensor:
    """Standard normal, of shape `size`, float32 by default. TypeError for a dtype that is not a float."""
    return _finish(_C.normal(_shape(size), 0.0, 1.0, dtype or _float32, device, key=_key(generator)), requires_grad)


@overload
def randint(
    high: int,
    size: Size,
    /,
    *,
    generator: Generator | None = ...,
    dtype: DType = ...,
    device: Device = ...,
    requires_grad: bool = ...,
) -> Tensor: ...
@overload
def randint(
    low: int,
    high: int,
    size: Size,
    *,
    generator: Generator | None = ...,
    dtype: DType = ...,
    device: Device = ...,
    requires_grad: bool = ...,
) -> Tensor: ...
def randint(
    low: int,
    high: Any,
    size: Any = None,
    *,
    generator: Generator | None = None,
    dtype: DType = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Tensor:
    """Integers in [low, high), int64 by default. `randint(high, size)` starts at 0. ValueError for numbers that an
    integer dtype does not hold.
    """
    if size is None:
        low, high, size = 0, low, high
    shape = _sizes("randint", size)
    return _finish(_C.randint(low, high, shape, dtype or _int64, device, key=_key(generator)), requires_grad)


def empty_like(input: Tensor, *, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """`empty` with the shape of input and, unless given, its dtype and device."""
    need_input("empty_like", input)
    return _finish(_C.empty(input.shape, dtype or input.dtype, device or input.device), requires_grad)


def full_like(
    input: Tensor, fill_value: float, *, dtype: DType = None, device: Device = None, requires_grad: bool = False
) -> Tensor:
    """`full` with the shape of input and, unless given, its dtype and device."""
    need_input("full_like", input)
    return _finish(_C.full(input.shape, fill_value, dtype or input.dtype, device or input.device), requires_grad)


def zeros_like(input: Tensor, *, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """`zeros` with the shape of input and, unless given, its dtype and device."""
    need_input("zeros_like", input)
    return full_like(input, 0, dtype=dtype, device=device, requires_grad=requires_grad)


def ones_like(input: Tensor, *, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """`ones` with the shape of input and, unless given, its dtype and device."""
    need_input("ones_like", input)
    return full_like(input, 1, dtype=dtype, device=device, requires_grad=requires_grad)


def rand_like(input: Tensor, *, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """`rand` with the shape of input and, unless given, its dtype and device."""
    need_input("rand_like", input)
    return rand(input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad)


def randn_like(input: Tensor, *, dtype: DType = None, device: Device = None, requires_grad: bool = False) -> Tensor:
    """`randn` with the shape of input and, unless given, its dtype and device."""
    need_input("randn_like", input)
    return randn(input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad)
