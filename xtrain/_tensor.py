"""Tensor methods that are compositions of the core's, and the functions of the same names."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

from . import _C
from ._types import Size, as_int, axis, need_input, need_tensors

_Tensor = _C.Tensor
_cat, _split, _where = _C.cat, _C.split, _C.where
_SPLIT_PIECES, _SPLIT_SIZES = 64, 8  # what one call of the core takes

# Not classes: repr says max(values=..., indices=...).
_MaxResult = NamedTuple("max", [("values", _Tensor), ("indices", _Tensor)])  # noqa: UP014
_MinResult = NamedTuple("min", [("values", _Tensor), ("indices", _Tensor)])  # noqa: UP014


def _take(input: _Tensor, indices: _Tensor, dim: int) -> _Tensor:
    """input at `indices` (keepdim form) along dim, as a differentiable selection."""
    shape = [1] * input.ndim
    shape[dim] = input.shape[dim]
    positions = _C.arange(0, input.shape[dim], 1, _C.int64, input.device).reshape(tuple(shape))
    return _where(positions == indices, input, 0.0).sum(dim, True)


def _extreme(
    op: str, result: Any, reduce: Any, arg: Any, pairwise: Any, input: _Tensor, dim: int | _Tensor | None, keepdim: bool
) -> Any:
    need_input(op, input)
    if dim is None:
        return reduce(input)
    if isinstance(dim, _Tensor):
        return pairwise(input, dim)
    if input.ndim == 0:
        return result(input.clone(), _C.full((), 0, _C.int64, input.device))
    dim = axis(op, input, dim)
    indices = arg(input, dim, True)
    # The gradient goes to the element at `indices` alone; amax and amin would share it between equal elements.
    values = _take(input, indices, dim) if input.requires_grad and _C.is_grad_enabled() else reduce(input, dim, True)
    return result(values, indices) if keepdim else result(values.squeeze(dim), indices.squeeze(dim))


@overload
def max(input: _Tensor) -> _Tensor: ...
@overload
def max(input: _Tensor, other: _Tensor, /) -> _Tensor: ...
@overload
def max(input: _Tensor, dim: int, keepdim: bool = False) -> _MaxResult: ...
def max(input: _Tensor, dim: int | _Tensor | None = None, keepdim: bool = False) -> Any:
    """Without dim the largest element (0-dim); with dim `(values, indices)` along it; with a second tensor the
    elementwise maximum.
    """
    return _extreme("max", _MaxResult, _C.amax, _C.argmax, _C.maximum, input, dim, keepdim)


@overload
def min(input: _Tensor) -> _Tensor: ...
@overload
def min(input: _Tensor, other: _Tensor, /) -> _Tensor: ...
@overload
def min(input: _Tensor, dim: int, keepdim: bool = False) -> _MinResult: ...
def min(input: _Tensor, dim: int | _Tensor | None = None, keepdim: bool = False) -> Any:
    """Without dim the smallest element (0-dim); with dim `(values, indices)` along it; with a second tensor the
    elementwise minimum.
    """
    return _extreme("min", _MinResult, _C.amin, argmin, _C.minimum, input, dim, keepdim)


def argmin(input: _Tensor, dim: int | None = None, keepdim: bool = False) -> _Tensor:
    """Index (int64) of the smallest element along dim, or in the flattened input; the first one on ties."""
    need_input("argmin", input)
    # -1 - x turns the order of integers round without overflow, which -x does not (uint8, the smallest int64).
    turned = -input if input.dtype.is_floating_point else -1 - input.to(_C.int64)
    return _C.argmax(turned, dim, keepdim)


def _listed(op: str, tensors: object) -> list[_Tensor]:
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    if not isinstance(tensors, Iterable) or getattr(tensors, "ndim", 1) == 0:
        raise TypeError(f"{op}: tensors must be an iterable of Tensors, got {type(tensors).__name__}")
    return list(tensors)


def cat(tensors: Iterable[_Tensor], dim: int = 0) -> _Tensor:
    """Tensors joined along an existing dim; the other sizes must agree."""
    return _cat(_listed("cat", tensors), dim)


def stack(tensors: Iterable[_Tensor], dim: int = 0) -> _Tensor:
    """Tensors of one shape joined along a new dim. ValueError for other shapes and for no tensor."""
    tensors = _listed("stack", tensors)
    if not tensors:
        raise ValueError("stack: tensors must hold at least one tensor, got none")
    for tensor in tensors:
        if not isinstance(tensor, _Tensor):
            need_tensors("stack", **{"each of tensors": tensor})
        if tensor.shape != tensors[0].shape:
            raise ValueError(f"stack: tensors must have shape {tuple(tensors[0].shape)}, got {tuple(tensor.shape)}")
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def split(input: _Tensor, split_size: Size, dim: int = 0) -> tuple[_Tensor, ...]:
    """Views of pieces along dim: all of `split_size` (the last may be smaller), or of the sizes in a list.

    ValueError for sizes that do not add up to that of dim.
    """
    need_input("split", input)
    if isinstance(split_size, int) or not isinstance(split_size, (list, tuple, Iterable)):
        split_size = as_int("split", "split_size", split_size)
        size = input.shape[axis("split", input, dim)]
        if split_size < 1 or size <= split_size * _SPLIT_PIECES:
            return _split(input, split_size, dim)
        sizes = [split_size] * (size // split_size) + ([size % split_size] if size % split_size else [])
    else:
        sizes = [n if type(n) is int else as_int("split", "each of split_size", n) for n in split_size]
        if len(sizes) <= _SPLIT_SIZES:
            return _split(input, tuple(sizes), dim)
        size = input.shape[axis("split", input, dim)]
        if builtins.min(sizes) < 0 or builtins.sum(sizes) != size:
            raise ValueError(f"split: split_size must add up to {size} along dimension {dim}, got {sizes}")
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_C.slice(input, dim, start, start + size))
        start += size
    return tuple(pieces)


def chunk(input: _Tensor, chunks: int, dim: int = 0) -> tuple[_Tensor, ...]:
    """At most `chunks` views of equal size along dim (the last may be smaller). ValueError for chunks below 1."""
    need_input("chunk", input)
    chunks = as_int("chunk", "chunks", chunks)
    if chunks < 1:
        raise ValueError(f"chunk: chunks must be at least 1, got {chunks}")
    size = input.shape[axis("chunk", input, dim)]
    if size == 0:
        return (input,) * chunks
    return split(input, -(-size // chunks), dim)


def narrow(input: _Tensor, dim: int, start: int, length: int) -> _Tensor:
    """View of `length` places along dim from `start` on. IndexError when dim has fewer."""
    need_input("narrow", input)
    start, length = as_int("narrow", "start", start), as_int("narrow", "length", length)
    if not 0 <= start <= start + length <= input.shape[axis("narrow", input, dim)]:
        raise IndexError(f"narrow: start and length must lie in dimension {dim}, got {start} and {length}")
    return _C.slice(input, dim, start, start + length)


def flatten(input: _Tensor, start_dim: int = 0, end_dim: int = -1) -> _Tensor:
    """The dims start_dim..end_dim made one; a view where the strides allow it. ValueError when end_dim comes first."""
    need_input("flatten", input)
    if input.ndim == 0:
        return input.reshape((1,))
    start, end = axis("flatten", input, start_dim), axis("flatten", input, end_dim)
    if start > end:
        raise ValueError(f"flatten: start_dim must not come after end_dim, got {start_dim} and {end_dim}")
    shape = input.shape
    size = 1
    for n in shape[start : end + 1]:
        size *= n
    return input.reshape((*shape[:start], size, *shape[end + 1 :]))


def var(
    input: _Tensor,
    dim: Size | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> _Tensor:
    """sum (x - mean)^2 / max(0, n - correction) over dim; correction is 1, or 0 with unbiased=False."""
    need_input("var", input)
    if correction is None:
        correction = 1 if unbiased else 0
    squares = (input - input.mean(dim, True)) ** 2
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    count = 1
    for d in dims if input.ndim else ():  # a scalar takes dim 0 and -1, as sum does
        count *= input.shape[d]
    freedom = count - correction
    return squares.sum(dim, keepdim) / (freedom if freedom > 0 else 0.0)


def std(
    input: _Tensor,
    dim: Size | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> _Tensor:
    """Square root of `var`."""
    need_input("std", input)
    return var(input, dim, unbiased, keepdim, correction=correction).sqrt()


def square(input: _Tensor) -> _Tensor:
    """x * x; of bool in int64, as a product of bools is a bool."""
    need_input("square", input)
    if input.dtype == _C.bool:
        input = input.to(_C.int64)
    return input * input


def clamp(input: _Tensor, min: _Tensor | float | None = None, max: _Tensor | float | None = None) -> _Tensor:
    """Elements below `min` become min, above `max` become max; either may be None, ValueError for both."""
    need_input("clamp", input)
    if min is None and max is None:
        raise ValueError("clamp: min or max must be given, got None for both")
    if min is not None:
        input = _C.maximum(input, min)
    return input if max is None else _C.minimum(input, max)


def isnan(input: _Tensor) -> _Tensor:
    """bool: where x is not a number."""
    need_input("isnan", input)
    return input != input


def isinf(input: _Tensor) -> _Tensor:
    """bool: where x is +inf or -inf."""
    need_input("isinf", input)
    if input.dtype == _C.bool:
        return input != input
    return abs(input) == float("inf")


def isfinite(input: _Tensor) -> _Tensor:
    """bool: where x is neither NaN nor infinite."""
    need_input("isfinite", input)
    if input.dtype == _C.bool:
        return input == input
    return abs(input) < float("inf")


def _count(input: _Tensor, dim: Size | None, keepdim: bool) -> _Tensor:
    return (input if input.dtype == _C.bool else input != 0).sum(dim, keepdim)


def any(input: _Tensor, dim: Size | None = None, keepdim: bool = False) -> _Tensor:
    """bool: whether some element (along dim) is not zero."""
    need_input("any", input)
    return _count(input, dim, keepdim) != 0


def all(input: _Tensor, dim: Size | None = None, keepdim: bool = False) -> _Tensor:
    """bool: whether no element (along dim) is zero."""
    need_input("all", input)
    return _count(input == 0, dim, keepdim) == 0


def masked_fill(input: _Tensor, mask: _Tensor, value: _Tensor | float) -> _Tensor:
    """`value` where mask is true, x elsewhere; the shapes broadcast. TypeError for a mask that is not bool."""
    return _where(mask, value, input)


def t(input: _Tensor) -> _Tensor:
    """The transpose of a matrix (a view); vectors and scalars come back as they are. ValueError for more dims."""
    if input.ndim > 2:
        raise ValueError(f"t: input must have at most 2 dims, got {input.ndim}")
    return input.transpose(0, 1) if input.ndim == 2 else input


def zero_(input: _Tensor) -> _Tensor:
    """Zeros, in place."""
    return input.fill_(0)


def _like(op: str, other: object) -> _Tensor:
    if not isinstance(other, _Tensor):
        raise TypeError(f"{op}: other must be a Tensor, got {type(other).__name__}")
    return other


def view_as(input: _Tensor, other: _Tensor) -> _Tensor:
    """view with the shape of other."""
    return input.view(_like("view_as", other).shape)


def expand_as(input: _Tensor, other: _Tensor) -> _Tensor:
    """expand to the shape of other."""
    return input.expand(_like("expand_as", other).shape)


def type_as(input: _Tensor, other: _Tensor) -> _Tensor:
    """Cast to the dtype of other."""
    return input.to(_like("type_as", other).dtype)


def is_floating_point(input: _Tensor) -> bool:
    """Whether the dtype is one of the floats."""
    return input.dtype.is_floating_point


def _mask_operator(name: str, function: Callable[[Any, Any], _Tensor]) -> None:
    """The operators `name`, reflected and in place, of bool tensors (and True and False)."""

    def operator(self: _Tensor, other: _Tensor | bool) -> _Tensor:
        if not isinstance(other, (_Tensor, bool)):
            return NotImplemented
        for operand in (self, other):
            if isinstance(operand, _Tensor) and operand.dtype != _C.bool:
                raise TypeError(f"{name}: operands must have dtype bool, got {operand.dtype.name}")
        return function(self, other)

    def in_place(self: _Tensor, other: _Tensor | bool) -> _Tensor:
        result = operator(self, other)
        return result if result is NotImplemented else self.copy_(result)

    setattr(_Tensor, f"__{name}__", operator)
    setattr(_Tensor, f"__r{name}__", operator)  # all three are symmetric
    setattr(_Tensor, f"__i{name}__", in_place)


_mask_operator("and", _C.mul)
_mask_operator("or", _C.maximum)
_mask_operator("xor", _C.ne)


def _invert(self: _Tensor) -> _Tensor:
    if self.dtype != _C.bool:
        raise TypeError(f"invert: input must have dtype bool, got {self.dtype.name}")
    return self == False  # noqa: E712


_Tensor.__invert__ = _invert


def _repr_html_(self: _Tensor) -> str:
    """For notebooks."""
    from .notebook import html

    return html.tensor(self)


_Tensor._repr_html_ = _repr_html_  # pyright: ignore[reportAttributeAccessIssue]  (IPython asks for it)

_METHODS = (
    max, min, argmin, split, chunk, narrow, flatten, var, std, square, clamp, isnan, isinf, isfinite, any, all,
    masked_fill, t, zero_, view_as, expand_as, type_as, is_floating_point,
)  # fmt: skip
for _method in _METHODS:
    setattr(_Tensor, _method.__name__, _method)
del _method
