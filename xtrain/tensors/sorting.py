"""The largest and the smallest elements, by NumPy's stable sort on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import _C
from .._types import as_int, axis, need_tensors

_Tensor = _C.Tensor
# Not classes: repr says topk(values=..., indices=...).
_TopkResult = NamedTuple("topk", [("values", _Tensor), ("indices", _Tensor)])  # noqa: UP014
_SortResult = NamedTuple("sort", [("values", _Tensor), ("indices", _Tensor)])  # noqa: UP014


def _order(input: _Tensor, dim: int, descending: bool, count: int) -> _Tensor:
    """The int64 indices of the first `count` elements along dim in order, NaN as the largest; on input's device."""
    wide = input.detach()
    wide = wide.float() if wide.itemsize < 4 and wide.dtype.is_floating_point else wide
    array = wide.cpu().numpy()
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if descending:  # turned round, so that of equal ones the first one stays first; NumPy sorts NaN behind inf
        array = np.flip(array, dim)
    places = np.argsort(array, axis=dim, kind="stable")
    if descending:
        places = array.shape[dim] - 1 - np.flip(places, dim)
    places = places[(slice(None),) * (dim % array.ndim) + (slice(0, count),)]
    return _C.from_numpy(np.ascontiguousarray(places, np.int64)).to(input.device)


def topk(input: _Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> _TopkResult:
    """(values, indices) of the k largest (smallest) elements along dim, best first; of equal ones the first one first.

    input: any dtype; one of no dims is sorted as one element, and the results have no dims. indices: int64. NaN is
    larger than all. The host sorts: with a tensor on a GPU it waits. The gradient goes to the elements that were
    picked. `sorted` is accepted and has no effect. ValueError for a k outside [0, size of dim].
    """
    need_tensors("topk", input=input)
    k = as_int("topk", "k", k)
    if input.ndim == 0:
        if k != 1:
            raise ValueError(f"topk: k must be 1 where input has no dims, got {k}")
        return _TopkResult(*(part.reshape(()) for part in topk(input.reshape(1), k, dim, largest)))
    size = input.shape[axis("topk", input, dim)]
    if not 0 <= k <= size:
        raise ValueError(f"topk: k must be in [0, {size}], got {k}")
    indices = _order(input, dim, largest, k)
    return _TopkResult(_C.gather(input, dim, indices), indices)


def sort(input: _Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> _SortResult:
    """(values, indices) of all elements along dim in order; always stable. As topk in all else."""
    need_tensors("sort", input=input)
    if input.ndim == 0:
        return _SortResult(*(part.reshape(()) for part in sort(input.reshape(1), dim, descending)))
    indices = _order(input, dim, descending, input.shape[axis("sort", input, dim)])
    return _SortResult(_C.gather(input, dim, indices), indices)


def argsort(input: _Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> _Tensor:
    """The indices of sort."""
    need_tensors("argsort", input=input)
    if input.ndim == 0:
        return argsort(input.reshape(1), dim, descending).reshape(())
    return _order(input, dim, descending, input.shape[axis("argsort", input, dim)])


_METHODS = (topk, sort, argsort)
for _method in _METHODS:
    setattr(_Tensor, _method.__name__, _method)
del _method
