"""Norms, triangles and repetition, each composed of a few calls of the core."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _C
from .._types import Size, as_int, axis, is_real, need_tensors

_Tensor = _C.Tensor


def outer(input: _Tensor, vec2: _Tensor) -> _Tensor:
    """input [n], vec2 [m] -> [n, m]: out[i, j] = input[i] * vec2[j]. ValueError for other dims."""
    need_tensors("outer", input=input, vec2=vec2)
    for name, vector in (("input", input), ("vec2", vec2)):
        if vector.ndim != 1:
            raise ValueError(f"outer: {name} must have 1 dim, got shape {tuple(vector.shape)}")
    return input.unsqueeze(1) * vec2.unsqueeze(0)


def _triangle(op: str, input: _Tensor, diagonal: int, lower: bool) -> _Tensor:
    if input.ndim < 2:
        raise ValueError(f"{op}: input must have at least 2 dims, got shape {tuple(input.shape)}")
    diagonal = max(-input.shape[-2], min(input.shape[-1], as_int(op, "diagonal", diagonal)))
    rows, cols = (_C.arange(0, size, 1, _C.int64, input.device) for size in input.shape[-2:])
    edge = rows.unsqueeze(1) + diagonal
    kept = cols <= edge if lower else cols >= edge
    return _C.where(kept, input, False if input.dtype == _C.bool else 0)


def tril(input: _Tensor, diagonal: int = 0) -> _Tensor:
    """The lower triangles of the last two dims: x[.., i, j] where j <= i + diagonal, else 0. Any dtype. ValueError for
    fewer than 2 dims.
    """
    need_tensors("tril", input=input)
    return _triangle("tril", input, diagonal, True)


def triu(input: _Tensor, diagonal: int = 0) -> _Tensor:
    """The upper triangles of the last two dims: x[.., i, j] where j >= i + diagonal, else 0. Any dtype. ValueError for
    fewer than 2 dims.
    """
    need_tensors("triu", input=input)
    return _triangle("triu", input, diagonal, False)


def _root_of_powers(sizes: _Tensor, p: float, dim: Size | None, keepdim: bool) -> _Tensor:
    """(sum sizes^p)^(1/p). Zeros stand apart: the slope of a power, or of the root, is infinite there, times 0 NaN."""
    some = sizes != 0  # so is NaN
    powers = _C.where(some, _C.where(some, sizes, 1.0) ** p, 0.0 if p > 0 else math.inf)
    return powers.sum(dim, keepdim) ** (1.0 / p)


def norm(input: _Tensor, p: float | str = "fro", dim: Size | None = None, keepdim: bool = False) -> _Tensor:
    """(sum |x|^p)^(1/p) over dim (all when None); for p inf and -inf the largest and smallest |x|, for 0 the number of
    elements that are not 0. "fro" is 2. Floats; 16-bit ones are summed in float32.

    The gradient at a norm of 0 is 0, and so is that of an element that is 0. TypeError for other dtypes, ValueError for
    other p.
    """
    need_tensors("norm", input=input)
    if p == "fro":
        p = 2.0
    if not is_real(p) or math.isnan(p):
        raise ValueError(f"norm: p must be a number or 'fro', got {p!r}")
    if not isinstance(keepdim, (bool, np.bool_)):
        raise TypeError(f"norm: keepdim must be a bool, got {type(keepdim).__name__}")
    if isinstance(dim, (tuple, list)):
        dim = tuple(as_int("norm", "dim", one) for one in dim)
    elif dim is not None:
        dim = as_int("norm", "dim", dim)
    if not input.dtype.is_floating_point:
        raise TypeError(f"norm: input must have a floating point dtype, got {input.dtype.name}")
    wide = input.float() if input.itemsize < 4 else input
    if p == 2:
        squares = (wide * wide).sum(dim, keepdim)
        some = squares != 0  # so is NaN
        result = _C.where(some, _C.where(some, squares, 1.0).sqrt(), 0.0)
    elif p == math.inf:
        result = wide.abs().amax(dim, keepdim)
    elif p == -math.inf:
        result = wide.abs().amin(dim, keepdim)
    elif p == 0:
        result = (wide != 0).sum(dim, keepdim).to(wide.dtype)
    elif p == 1:
        result = wide.abs().sum(dim, keepdim)
    else:
        result = _root_of_powers(wide.abs(), float(p), dim, keepdim)
    return result if wide is input else result.to(input.dtype)


def unbind(input: _Tensor, dim: int = 0) -> tuple[_Tensor, ...]:
    """Views of the parts along dim, without that dim."""
    need_tensors("unbind", input=input)
    dim = axis("unbind", input, dim)
    return tuple(_C.select(input, dim, index) for index in range(input.shape[dim]))


def repeat(input: _Tensor, *sizes: Any) -> _Tensor:
    """A copy of the tensor, repeated sizes[d] times along dim d; more sizes than dims add dims in front. ValueError for
    fewer, and for negative ones.
    """
    need_tensors("repeat", input=input)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, range, np.ndarray)) and np.ndim(sizes[0]):
        sizes = tuple(sizes[0])
    sizes = tuple(as_int("repeat", "each of sizes", n) for n in sizes)
    if len(sizes) < input.ndim or any(n < 0 for n in sizes):
        raise ValueError(f"repeat: sizes must be at least {input.ndim} integers of at least 0, got {sizes}")
    shape = (1,) * (len(sizes) - input.ndim) + tuple(input.shape)
    x = input.clone().reshape(shape)
    for dim, (times, size) in enumerate(zip(sizes, shape, strict=True)):
        if times != 1:  # a dim at a time: no more dims than sizes and one
            spread = x.unsqueeze(dim).expand((*x.shape[:dim], times, *x.shape[dim:]))
            x = spread.reshape((*x.shape[:dim], times * size, *x.shape[dim + 1 :]))
    return x


_MOST = 2**40  # elements of an index, which the host makes


def repeat_interleave(input: _Tensor, repeats: _Tensor | int, dim: int | None = None) -> _Tensor:
    """Each element `repeats` times along dim (of the flattened tensor when None), equal ones side by side.

    repeats: an int, or int64 or int32 of shape [size of dim], one for each; such a tensor is read by the host.
    ValueError for negative numbers, for those that add up to 2^40 or more, and for another shape.
    """
    need_tensors("repeat_interleave", input=input)
    if dim is None:
        input, dim = input.reshape((-1,)), 0
    dim = axis("repeat_interleave", input, dim)
    size = input.shape[dim]
    if isinstance(repeats, _Tensor):
        if repeats.dtype not in (_C.int64, _C.int32):
            raise TypeError(f"repeat_interleave: repeats must be int64 or int32, got {repeats.dtype.name}")
        if tuple(repeats.shape) != (size,):
            raise ValueError(f"repeat_interleave: repeats must have shape {(size,)}, got {tuple(repeats.shape)}")
        counts = repeats.cpu().numpy()
        if counts.size and counts.min() < 0:
            raise ValueError(f"repeat_interleave: repeats must be at least 0, got {counts.min()}")
        if counts.size and int(counts.max()) * size >= _MOST:  # NumPy adds them up in 64 bits, and believes the sum
            total = sum(counts.tolist())
            if total >= _MOST:
                raise ValueError(f"repeat_interleave: repeats must add up to less than 2^40, got {total}")
        index = _C.from_numpy(np.repeat(np.arange(size), counts)).to(input.device)
        return _C.index(input.transpose(0, dim), [index]).transpose(0, dim)
    repeats = as_int("repeat_interleave", "repeats", repeats)
    if repeats < 0:
        raise ValueError(f"repeat_interleave: repeats must be at least 0, got {repeats}")
    shape = tuple(input.shape)
    spread = input.unsqueeze(dim + 1).expand((*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return spread.reshape((*shape[:dim], size * repeats, *shape[dim + 1 :]))


_METHODS = (outer, tril, triu, norm, unbind, repeat, repeat_interleave)
for _method in _METHODS:
    setattr(_Tensor, _method.__name__, _method)
del _method
