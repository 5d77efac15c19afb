"""What the doors are tried with: arrays of every kind, indices, and objects that no op wants."""

from __future__ import annotations

import array as arrays
import math
import random
from typing import Any

import numpy as np

import xtrain as xt
from xtrain import _C

NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, -(2**63), -(2**31))
KINDS = (
    "f4", "f8", "f2", "i4", "i8", "u1", "?", "i1", "i2", "u2", "u4", "u8", "c8", "c16", "g", "S3", "U2", "M8[s]", "m8[D]", "O", "V5", "f4,i4",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")


class Bad:
    def __index__(self) -> int:
        raise ZeroDivisionError("Bad")

    __float__ = __bool__ = __iter__ = __index__  # type: ignore[assignment]

    def __len__(self) -> int:
        return -1


def any_array(chance: random.Random) -> np.ndarray:
    kind = chance.choice(KINDS[:7]) if chance.random() < 0.6 else chance.choice(KINDS)
    dtype = np.dtype(kind)
    if chance.random() < 0.1:
        dtype = dtype.newbyteorder()
    ndim = chance.choice((0, 1, 1, 2, 2, 3, 8, 9, 32)) if chance.random() < 0.5 else chance.choice((1, 2, 3))
    shape = [chance.choice((1, 1, 0)) if ndim > 4 else chance.choice((0, 1, 2, 3, 5)) for _ in range(ndim)]
    if dtype.kind in "fiub?" and dtype.names is None:
        array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    else:
        array = np.zeros(shape, dtype)
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        array = _bent(chance, array)
    return array


def _bent(chance: random.Random, array: np.ndarray) -> np.ndarray:
    """Another view of the array's kind: turned, strided, misaligned, read-only, repeated, of another class."""
    way = chance.randrange(10)
    if way == 0:
        return array.T
    if way == 1 and array.ndim:
        return array[:: chance.choice((-1, 2, -2, 3))]
    if way == 2 and array.ndim < 8:
        return np.broadcast_to(array, (chance.choice((0, 1, 2, 3)), *array.shape))
    if way == 3 and array.dtype.kind in "fiu" and array.size:
        raw = np.zeros(array.nbytes + 8, np.uint8)[chance.choice((1, 2, 4)) :][: array.nbytes]
        return raw.view(array.dtype).reshape(array.shape)
    if way == 4:
        array = array[...]
        array.flags.writeable = False
        return array
    if way == 5 and array.dtype.kind == "c":
        return array.real
    if way == 6 and array.ndim and array.shape[0] > 1 and array.dtype.kind in "fiu":
        base = np.zeros(2 * array.nbytes + 32, np.uint8)
        step = array.itemsize * chance.choice((0, 1, 2)) + chance.choice((0, 0, 1, 2))
        try:
            return np.lib.stride_tricks.as_strided(base[: base.size // array.itemsize * array.itemsize].view(array.dtype),
                                                   (2,), (min(step, array.nbytes),))  # fmt: skip
        except ValueError:
            return array
    if way == 7:
        return (
            np.ma.masked_array(array) if chance.random() < 0.5 else array.view(np.matrix) if array.ndim == 2 else array
        )
    if way == 8 and array.dtype.kind == "f" and array.size:
        array = array.copy()
        array.reshape(-1)[0] = chance.choice((np.nan, np.inf, -0.0, 1e30))
        return array
    return array


def any_index(chance: random.Random, ndim: int) -> tuple[Any, bool]:
    """An index, and whether NumPy gives the same result for it."""
    parts: list[Any] = []
    plain = True
    for _ in range(chance.choice((0, 1, 1, 2, ndim, ndim + 1))):
        way = chance.random()
        if way < 0.35:
            parts.append(chance.choice((0, -1, 1, 2, -3, 4, *(NUMBERS if chance.random() < 0.1 else ()))))
        elif way < 0.7:
            ends = [chance.choice((None, 0, 1, -1, 3, -9, *NUMBERS)) for _ in range(2)]
            parts.append(slice(*ends, chance.choice((None, 1, 2, 3, 2**62, 2**63 - 1, 0, -1))))
        elif way < 0.8:
            parts.append(None)
        elif way < 0.88:
            parts.append(...)
        else:
            plain = False
            parts.append(any_thing(chance))
    if len(parts) == 1 and chance.random() < 0.5:
        return parts[0], plain
    return tuple(parts), plain


def any_thing(chance: random.Random, tensors: bool = False) -> Any:
    if tensors:
        dtype = chance.choice(DTYPES[:1] if chance.random() < 0.6 else DTYPES)
        shape = chance.choice(
            ((), (0,), (1,), (3,), (2, 3), (3, 2), (2, 0, 3), (1, 2, 3, 4), (1,) * 8, (4, 4), (2, 4, 4), (2, 2, 3, 4))
        )
        t = xt.full(shape, chance.choice((0, 1, 1, 2)), dtype=dtype)
        if chance.random() < 0.2 and t.ndim > 1:
            t = t.T if t.ndim == 2 else t.transpose(0, -1)
        if chance.random() < 0.2 and t.dtype.is_floating_point:
            t.requires_grad_()
        return t
    way = chance.randrange(30)
    if way < 8:
        return (None, True, False, -1, 0, 1, 2, 3)[way]
    if way < 10:
        return chance.choice((0.5, -1.5, math.nan, math.inf, -math.inf, 1e308, 1e-320, 1j))
    if way < 12:
        return chance.choice((*NUMBERS, 2**63, 2**64, 2**70, -(2**70)))
    if way < 14:
        return chance.choice(
            ("x", "", "float32", "cpu", "cuda", "mean", "cuda:300", "\ud800", "a\0b", "P" * 300, b"", b"x")
        )
    if way < 17:
        return tuple(chance.choice((*NUMBERS, 1, 2, 3)) for _ in range(chance.choice((0, 1, 2, 3, 9))))
    if way < 19:
        return [any_thing(chance, tensors=chance.random() < 0.7) for _ in range(chance.choice((0, 1, 2, 3)))]
    if way == 19:
        deep: list[Any] = []
        for _ in range(chance.choice((5, 9, 100, 3000))):
            deep = [deep]
        return deep
    if way == 20:
        looped: list[Any] = []
        looped.append(looped)
        return looped
    if way == 21:
        return any_array(chance)
    if way == 22:
        return chance.choice(
            (np.float32(2), np.int64(-3), np.bool_(True), np.datetime64("2020"), np.float64("nan"), np.str_("x"))
        )
    if way == 23:
        return arrays.array(chance.choice("dfiBq"), [1, 2, 3])
    if way == 24:
        return chance.choice((xt.float32, xt.int64, _C.device("cpu"), type, print, xt.Tensor, _C.add, Bad))
    if way == 25:
        return chance.choice((object(), {}, {"a": 1}, {1, 2}, range(3), iter([1, 2]), slice(1, 2), ..., NotImplemented))
    if way == 26:
        return Bad()
    return any_thing(chance, tensors=True)
