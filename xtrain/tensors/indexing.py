"""Indexing by tensors, lists and masks; elements picked and put along a dim.

x[key] with ints, slices, None and ... alone is done by the core, as views. A key with more comes here: first its ints,
slices, None and ... are applied, then its tensors, as in PyTorch. A result is a copy, a gradient is summed in a fixed
order, and of several values for one place the last counts. Masks are read by the host, to know how many they pick; a
number put through one mask is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .._types import axis, need_tensors

_Tensor = _C.Tensor


def nonzero(input: _Tensor, as_tuple: bool = False) -> Any:
    """Where input is not 0: int64 [count, dims], in row-major order; with as_tuple a tensor [count] for each dim. The
    host reads input.
    """
    need_tensors("nonzero", input=input)
    found = np.argwhere((input != 0).cpu().numpy() if input.dtype != _C.bool else input.cpu().numpy())
    if as_tuple:
        return tuple(_C.from_numpy(np.ascontiguousarray(places)).to(input.device) for places in found.T)
    return _C.from_numpy(np.ascontiguousarray(found)).to(input.device)


def _as_tensor(item: Any) -> _Tensor:
    """An index of a key as a tensor of integers or a mask."""
    rule = "a tensor is indexed with ints, slices, None and ..., and tensors and lists of ints or bools"
    if isinstance(item, _Tensor):
        tensor = item
    elif isinstance(item, (np.ndarray, np.generic)):
        if item.dtype.kind not in "iub":
            raise TypeError(f"{rule}, got {type(item).__name__} of {item.dtype}")
        if item.dtype == np.uint64 and (most := int(item.max(initial=0))) >= 2**63:  # int64 would count it from behind
            raise IndexError(f"index: every index must be below 2^63, got {most}")
        tensor = _C.tensor(item if item.dtype == np.bool_ else item.astype(np.int64), device="cpu")
    else:
        try:
            tensor = _C.tensor(item, device="cpu")
        except RuntimeError as error:  # a tensor in a list that cannot be read
            raise TypeError(f"{rule}, got {type(item).__name__}: {error}") from None
        if tensor.numel() == 0:
            tensor = tensor.to(_C.int64)
        if tensor.dtype.is_floating_point:
            raise TypeError(f"{rule}, got {type(item).__name__} of {tensor.dtype.name}")
    if tensor.dtype not in (_C.int64, _C.int32, _C.bool):
        raise TypeError(f"a tensor is indexed with int64, int32 and bool tensors, got {tensor.dtype.name}")
    if tensor.dtype == _C.bool and tensor.ndim == 0:
        raise TypeError("a tensor is indexed with ints, slices, None and ..., got a bool; to mask use where()")
    return tensor


def _is_index(item: Any) -> bool:
    """Whether an item of a key indexes by a tensor; ints, slices, None and ... do not."""
    if isinstance(item, _Tensor):
        return item.ndim > 0 or item.dtype == _C.bool or item.dtype.is_floating_point
    if isinstance(item, np.ndarray):
        return item.ndim > 0 or item.dtype.kind not in "iu"
    return isinstance(item, (list, tuple, bool, np.bool_))


def _together(indices: list[_Tensor]) -> tuple[int, ...]:
    """The shape that the indices broadcast to. ValueError when they do not."""
    shapes = [tuple(index.shape) for index in indices]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"index: tensors must broadcast together, got shapes {', '.join(map(str, shapes))}") from None


class _Key:
    """A parsed key. view: the tensor indexed by the ints, slices, None and ... of the key. parts: its tensors of
    indices, each with the first dim of the view that it indexes.
    """

    def __init__(self, input: _Tensor, key: Any) -> None:
        items = key if isinstance(key, tuple) else (key,)
        found = [_as_tensor(item) if _is_index(item) else None for item in items]
        width = [
            1 if t is None or t.dtype != _C.bool else t.ndim for t in found
        ]  # dims of the tensor that an item takes
        taken = sum(n for n, item in zip(width, items, strict=True) if item is not None and item is not Ellipsis)
        if taken > input.ndim:
            raise IndexError(f"too many indices for a tensor of {input.ndim} dimensions")
        basic: list[Any] = []
        self.parts: list[tuple[int, _Tensor]] = []  # (first dim of the view, index)
        dim = at = 0  # of the tensor, and of the view
        for item, tensor, n in zip(items, found, width, strict=True):
            if tensor is not None:
                if tensor.dtype == _C.bool and tuple(tensor.shape) != tuple(input.shape[dim : dim + n]):
                    raise IndexError(
                        f"index: a mask must have the sizes {tuple(input.shape[dim : dim + n])} of the dims it "
                        f"indexes, got {tuple(tensor.shape)}"
                    )
                self.parts.append((at, tensor if tensor.device == input.device else tensor.to(input.device)))
                basic += [slice(None)] * n
                dim, at = dim + n, at + n
            else:
                basic.append(item)
                if item is Ellipsis:
                    dim, at = dim + input.ndim - taken, at + input.ndim - taken
                elif item is None:
                    at += 1
                else:
                    dim, at = dim + 1, at + isinstance(item, slice)
        self.view = (
            input if all(isinstance(item, slice) and item == slice(None) for item in basic) else input[tuple(basic)]
        )

    def mask(self) -> _Tensor | None:
        """The mask, in the view's dims, when it is the only tensor of the key."""
        if len(self.parts) != 1 or self.parts[0][1].dtype != _C.bool:
            return None
        at, mask = self.parts[0]
        return mask.reshape((*mask.shape, *(1,) * (self.view.ndim - at - mask.ndim)))

    def arrange(self) -> None:
        """Sets indices (int64 or int32), and `order`, the view's dims with those that they index first."""
        self.indices: list[_Tensor] = []
        dims: list[int] = []
        for at, tensor in self.parts:
            several = nonzero(tensor, True) if tensor.dtype == _C.bool else (tensor,)
            self.indices += several
            dims += range(at, at + len(several))
        self.order = (*dims, *(dim for dim in range(self.view.ndim) if dim not in dims))
        self.shape = _together(self.indices)
        self.ndim = len(self.shape)
        # Where the dims of the result that the indices make stand: those of neighbours stay in their place.
        self.place = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0

    def back(self, rows: int) -> tuple[int, ...]:
        """The order of dims that brings what _C.index gives, which has `rows` more dims, into that of the result."""
        made, rest = list(range(self.ndim)), list(range(self.ndim, self.ndim + rows))
        return (*rest[: self.place], *made, *rest[self.place :])


def _one_place(input: _Tensor, key: Any) -> _Tensor | None:
    """x[.., [i], ..], which keeps a dim: a copy of a slice, without a tensor of indices. None for other keys, and where
    there is nothing or an error.
    """
    items = key if isinstance(key, tuple) else (key,)
    several = [item for item in items if _is_index(item)]
    if len(several) != 1 or type(several[0]) is not list or [type(place) for place in several[0]] != [int]:
        return None
    place = several[0][0]
    view = input[tuple(slice(place, place + 1 or None) if item is several[0] else item for item in items)]
    return view.clone() if view.numel() else None


def _get(self: _Tensor, key: Any) -> _Tensor:
    one = _one_place(self, key)
    if one is not None:
        return one
    found = _Key(self, key)
    found.arrange()
    view = found.view
    plain = found.order == tuple(range(view.ndim))
    picked = _C.index(view if plain else view.permute(found.order), found.indices)
    return picked if not found.place else picked.permute(found.back(picked.ndim - found.ndim))


def _set(self: _Tensor, key: Any, value: _Tensor | float) -> None:
    found = _Key(self, key)
    mask = found.mask()
    if mask is not None and (not isinstance(value, _Tensor) or value.ndim == 0):
        found.view.copy_(_C.where(mask, value, found.view) if isinstance(value, _Tensor) else _fill(found, mask, value))
        return
    found.arrange()
    view = found.view.permute(found.order)
    shape = (*found.shape, *view.shape[len(found.indices) :])
    turn = found.back(len(shape) - found.ndim)  # of the result
    if not isinstance(value, _Tensor):
        values = _C.full(shape, value, self.dtype, self.device)
    else:
        values = value.to(self.dtype).expand(tuple(shape[dim] for dim in turn))
        values = values.permute(tuple(turn.index(dim) for dim in range(len(turn))))
    view.copy_(_C.index_put(view, found.indices, values))


def _fill(found: _Key, mask: _Tensor, value: float) -> _Tensor:
    number = _C.full((), value, found.view.dtype, found.view.device)
    return _C.where(mask, number, found.view)


_Tensor._advanced_get = _get  # pyright: ignore[reportAttributeAccessIssue]  (py_subscript calls it)
_Tensor._advanced_set = _set  # pyright: ignore[reportAttributeAccessIssue]


# ---- along a dim -----------------------------------------------------------------------------------------------------


def _dim_first(op: str, input: _Tensor, dim: int) -> _Tensor:
    """input with dim and the first one swapped."""
    return input.transpose(0, axis(op, input, dim))


def _one_dim(op: str, index: _Tensor) -> _Tensor:
    """index. ValueError when it does not have 1 dim."""
    if index.ndim != 1:
        raise ValueError(f"{op}: index must have 1 dim, got shape {tuple(index.shape)}")
    return index


class _named:
    """Inside, messages of the op `index` or `index_put` begin with the name of the function that was called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (IndexError, TypeError, ValueError)):
            op, colon, text = str(error).partition(": ")
            if colon and op in ("index", "index_put"):
                raise type(error)(f"{self._name}: {text}") from None


def index_select(input: _Tensor, dim: int, index: _Tensor) -> _Tensor:
    """The parts of input along dim that index [n], int64 or int32, names: the size of dim becomes n. Any dtype.

    Negative ones count from the end; IndexError for one outside, ValueError for an index of other dims.
    """
    need_tensors("index_select", input=input, index=index)
    rows, index = _dim_first("index_select", input, dim), _one_dim("index_select", index)
    with _named("index_select"):
        return _C.index(rows, [index]).transpose(0, dim)


def index_add(input: _Tensor, dim: int, index: _Tensor, source: _Tensor, *, alpha: float = 1) -> _Tensor:
    """input with the parts of alpha * source along dim added to those of input that index [n] names. source has the
    shape of input but n along dim. Sums in a fixed order, in float32 (float64). Float dtypes.
    """
    need_tensors("index_add", input=input, index=index, source=source)
    rows = _dim_first("index_add", source if alpha == 1 else source * alpha, dim)
    table = _dim_first("index_add", input, dim)
    index = _one_dim("index_add", index)
    with _named("index_add"):
        return _C.index_put(table, [index], rows, True).transpose(0, dim)


def _part(op: str, src: _Tensor, index: _Tensor) -> _Tensor:
    """The first part of src, with the shape of index. ValueError when src is smaller than index along a dim."""
    if src.ndim != index.ndim or any(n > size for n, size in zip(index.shape, src.shape, strict=True)):
        raise ValueError(
            f"{op}: src must have at least the sizes of index {tuple(index.shape)}, got {tuple(src.shape)}"
        )
    return src if src.shape == index.shape else src[tuple(slice(0, n) for n in index.shape)]


def scatter(input: _Tensor, dim: int, index: _Tensor, src: _Tensor | float) -> _Tensor:
    """input with src in the places that gather(input, dim, index) reads: a number, or a tensor of input's dtype that is
    nowhere smaller than index. Of several elements for one place the last counts, also for the gradient. Any dtype.
    """
    need_tensors("scatter", input=input, index=index)
    if not isinstance(src, _Tensor):
        src = _C.full(index.shape, src, input.dtype, input.device)
    return _C.scatter(input, dim, index, _part("scatter", src, index))


def scatter_add(input: _Tensor, dim: int, index: _Tensor, src: _Tensor) -> _Tensor:
    """input with src added in the places that gather(input, dim, index) reads. src: of input's dtype, nowhere smaller
    than index. Sums in a fixed order, in float32 (float64). Float dtypes.
    """
    need_tensors("scatter_add", input=input, index=index, src=src)
    return _C.scatter_add(input, dim, index, _part("scatter_add", src, index))


def masked_select(input: _Tensor, mask: _Tensor) -> _Tensor:
    """The elements where mask (bool, broadcast with input) is true, 1-D in row-major order. The host reads mask.

    TypeError for a mask of another dtype, ValueError for shapes that do not broadcast.
    """
    need_tensors("masked_select", input=input, mask=mask)
    if mask.dtype != _C.bool:
        raise TypeError(f"masked_select: mask must have dtype bool, got {mask.dtype.name}")
    sizes, of_mask = tuple(input.shape), tuple(mask.shape)
    try:
        shape = np.broadcast_shapes(sizes, of_mask)
    except ValueError:
        raise ValueError(f"masked_select: mask must broadcast with input {sizes}, got {of_mask}") from None
    return input.expand(shape).reshape((-1,))[mask.expand(shape).reshape((-1,))]


def scatter_(input: _Tensor, dim: int, index: _Tensor, src: _Tensor | float) -> _Tensor:
    """scatter, in place."""
    need_tensors("scatter_", input=input)
    return input.copy_(scatter(input, dim, index, src))


def scatter_add_(input: _Tensor, dim: int, index: _Tensor, src: _Tensor) -> _Tensor:
    """scatter_add, in place."""
    need_tensors("scatter_add_", input=input)
    return input.copy_(scatter_add(input, dim, index, src))


def index_add_(input: _Tensor, dim: int, index: _Tensor, source: _Tensor, *, alpha: float = 1) -> _Tensor:
    """index_add, in place."""
    need_tensors("index_add_", input=input)
    return input.copy_(index_add(input, dim, index, source, alpha=alpha))


def masked_fill_(input: _Tensor, mask: _Tensor, value: _Tensor | float) -> _Tensor:
    """masked_fill, in place."""
    need_tensors("masked_fill_", input=input, mask=mask)
    return input.copy_(_C.where(mask, value, input))


_METHODS = (
    nonzero, index_select, index_add, scatter, scatter_add, masked_select, scatter_, scatter_add_, index_add_,
    masked_fill_,
)  # fmt: skip
for _method in _METHODS:
    setattr(_Tensor, _method.__name__, _method)
del _method
