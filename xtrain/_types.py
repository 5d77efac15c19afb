"""Types that rooms above share."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeGuard

import numpy as np

from . import _C

DType = _C.dtype | str | None  # a dtype or its name ("float32", "bfloat16", ...); None: the function's default
Device = _C.device | str | None  # a device or its name ("cpu", "cuda", "cuda:1"); None: the function's default
Size = int | Sequence[int]  # of one dimension, or of several


class Tokenizer(Protocol):
    """What data, training, saving and sampling need of a tokenizer. eos: the token that ends a document, or None."""

    vocab_size: int
    eos: int | None

    def encode(self, text: bytes) -> np.ndarray:
        """The token ids of a text: integers [tokens]."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        ...

    def files(self) -> dict[str, bytes]:
        """The tokenizer files of a Hugging Face model directory: {name: content}."""
        ...


def need_tensors(op: str, **given: object) -> None:
    """TypeError for an argument that is no Tensor."""
    for name, value in given.items():
        if not isinstance(value, _C.Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")


def need_input(op: str, input: object) -> None:
    """need_tensors of `input`, faster: for small functions that are called often."""
    if not isinstance(input, _C.Tensor):
        need_tensors(op, input=input)


def parameters_of(op: str, given: object) -> list[_C.Tensor]:
    """A tensor, or an iterable of tensors, as a list. TypeError for what is neither."""
    if isinstance(given, _C.Tensor):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{op}: parameters must be a Tensor or an iterable of Tensors, got {type(given).__name__}")
    found = list(given)
    # A model has hundreds of parameters of one or two types: asking the types takes a fifteenth of the time.
    if not all(issubclass(kind, _C.Tensor) for kind in set(map(type, found))):
        for one in found:
            need_tensors(op, **{"every parameter": one})
    return found


def as_int(op: str, name: str, value: object) -> int:
    """An integer of Python, NumPy or a tensor. TypeError for what is none."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}") from None


def axis(op: str, input: _C.Tensor, dim: int) -> int:
    """dim counted from the front, in [0, dims of input). IndexError for one outside [-dims, dims), and for any where
    there are none; TypeError for what is no int.
    """
    ndim, dim = input.ndim, as_int(op, "dim", dim)
    if ndim == 0:
        raise IndexError(f"{op}: input must have at least 1 dim, got shape ()")
    if not -ndim <= dim < ndim:
        raise IndexError(f"{op}: dim must be in [{-ndim}, {ndim - 1}], got {dim}")
    return dim % ndim


def is_real(value: object) -> TypeGuard[float]:
    """Whether value is a number of Python or NumPy that is not complex. Checkers know nothing of numbers.Real."""
    return isinstance(value, (float, int, numbers.Real))  # in this order: the last takes long


def is_whole(value: object) -> TypeGuard[int]:
    """Whether value is an int of Python, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_sizes(op: str, value: Size) -> tuple[int, ...]:
    """normalized_shape as a tuple. TypeError for what is neither an integer nor several."""
    if isinstance(value, (int, np.integer)):
        return (int(value),)
    try:
        return tuple(value)
    except TypeError:
        rule = "normalized_shape must be an int or a tuple of ints"
        raise TypeError(f"{op}: {rule}, got {type(value).__name__}") from None
