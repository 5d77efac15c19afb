"""Values of a random program: a tensor and its shadow, how they are drawn and judged."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from frame import Wrong

from xtrain import _C
from xtrain.optable import TABLE
from xtrain.optable.judge import forward_tolerance
from xtrain.optable.table import UNIT_ROUNDOFF, Case, Op, exact, judge

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTS = ("int64", "int32", "uint8")
RANK = {"bool": 0, "uint8": 1, "int32": 2, "int64": 3}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7e308}
TAME = 8.0  # functions of larger numbers are not asked for: their results leave float16, or are badly conditioned
DTYPE = {name: getattr(_C, name) for name in (*FLOATS, *INTS, "bool")}
NAME = {dtype: name for name, dtype in DTYPE.items()}
ENTRY: dict[str, Op] = {entry.id: entry for entry in TABLE}
SIZES = (0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 9, 16, 17, 33)
CPU = _C.device("cpu")
POOL = np.random.default_rng(20).standard_normal(1 << 15).clip(-4, 4)
TIES = np.random.default_rng(21).integers(-2, 3, 1 << 13)
SPECIAL = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-300, 1e-40, 6e-8, 65504.0, 1e30, 1.0])
SPECIAL = np.tile(SPECIAL, 500)


def taken(pool: np.ndarray, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the pool in a shape."""
    count = math.prod(shape)
    found = pool[start : start + count]
    return (found if found.size == count else np.resize(pool, count)).reshape(shape)


class Value:
    """shadow: float64 of the same numbers, or an integer or bool array of the tensor's own dtype. memory: the values that share it."""

    __slots__ = ("dtype", "graph", "memory", "shadow", "tensor")

    def __init__(self, tensor: _C.Tensor, shadow: np.ndarray, memory: list[Value] | None = None) -> None:
        self.tensor, self.shadow, self.dtype = tensor, shadow, NAME[tensor.dtype]
        self.memory = [] if memory is None else memory
        self.memory.append(self)
        self.graph = tensor.requires_grad


def numbers(tensor: _C.Tensor) -> np.ndarray:
    """The tensor's values: floats as float64."""
    tensor = tensor.detach()
    if tensor.dtype is _C.bfloat16:
        tensor = _C.cast(tensor, _C.float32)
    array = tensor.numpy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array.copy()


def mirrored(tensor: _C.Tensor, array: np.ndarray) -> np.ndarray:
    """A copy of the array with the strides of the tensor, so that both take the same calls as views."""
    if tensor.is_contiguous() or not array.size:
        return np.array(array, order="C")
    strides = tensor.stride()
    base = np.zeros(1 + sum((n - 1) * stride for n, stride in zip(array.shape, strides)), array.dtype)
    shadow = np.lib.stride_tricks.as_strided(base, array.shape, [stride * array.itemsize for stride in strides])
    shadow[...] = array
    return shadow


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal numbers, and NaN where NaN is. Equal bytes are the quick way to say so."""
    if a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return True
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")


def is_tame(x: np.ndarray) -> bool:
    return np.count_nonzero(np.abs(x) <= TAME) == x.size


def within(got: np.ndarray, want: np.ndarray, tolerance: Any) -> bool:
    """A quick yes; `judge` says what is wrong. A NaN is no yes, and neither is an infinite error within an infinite tolerance."""
    if got.shape != want.shape:
        return False
    if got.dtype.kind != "f":
        return np.count_nonzero(got == want) == got.size
    error = np.abs(got - want)
    return np.count_nonzero((error <= tolerance) & (error < np.inf)) == error.size


Trace = list[str | Callable[[], str]]  # what a program did: most of it is put into words after a finding only


def told(trace: Trace) -> str:
    return "\n".join(step if isinstance(step, str) else step() for step in trace)


class Program:
    """A program that is being made up while it runs."""

    def __init__(self, chance: random.Random, trace: Trace) -> None:
        self.chance, self.trace = chance, trace
        self.trace.clear()
        self.values: list[Value] = []
        self.uses: list[tuple[str, list[Value], list[Value], dict[str, Any], Op | None]] = []  # of the graph
        self.parts: list[Value] = []  # of splits
        self.records = chance.random() < 0.5

    def shape(self, most: int = 4) -> tuple[int, ...]:
        chance = self.chance
        while True:
            sizes = tuple([chance.choice(SIZES) for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3, 3, most)))])
            if math.prod(sizes) <= (4096 if chance.random() < 0.02 else 400):
                return sizes

    def draw(self, shape: tuple[int, ...], dtype: str, positive: bool = False, tame: bool = False) -> np.ndarray:
        chance = self.chance
        if dtype == "bool":
            return taken(TIES, chance.randrange(1000), shape) > 0
        if dtype in INTS:
            low = taken(TIES, chance.randrange(1000), shape)
            return (low + 2 if dtype == "uint8" else low).astype(dtype)
        if chance.random() < 0.04 and not (positive or tame or self.records):
            return exact(taken(SPECIAL, chance.randrange(100), shape), dtype)
        pool = TIES if chance.random() < 0.1 else POOL
        found = taken(pool, chance.randrange(4000), shape)
        return exact(np.abs(found) + 0.25 if positive else found, dtype)

    def place(self, array: np.ndarray, dtype: str) -> _C.Tensor:
        """A tensor of these numbers, of any strides."""
        chance, tensor = self.chance, _C.tensor(np.asarray(array, order="C"))
        if dtype in FLOATS:
            tensor = _C.cast(tensor, DTYPE[dtype])
        way, ndim = chance.random(), array.ndim
        if ndim and way < 0.12:  # transposed memory
            order = list(range(ndim))
            chance.shuffle(order)
            return _C.permute(_C.contiguous(_C.permute(tensor, order)), tuple(np.argsort(order).tolist()))
        if ndim and way < 0.2 and array.shape[0]:  # every second row, behind an offset
            wide = _C.empty((2 * array.shape[0] + 1, *array.shape[1:]), DTYPE[dtype])
            part = _C.slice(wide, 0, 1, 2 * array.shape[0], 2)
            return _C.copy_(part, tensor)
        if ndim and way < 0.26 and dtype in ("float32", "float64", *INTS):  # memory of NumPy's
            wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), dtype)
            wide[..., 2:-1] = array
            return _C.from_numpy(wide[..., 2:-1])
        return tensor

    def leaf(
        self, dtype: str | None = None, shape: tuple[int, ...] | None = None, positive: bool = False, tame: bool = False
    ) -> Value:
        chance = self.chance
        if dtype is None:
            dtype = chance.choice(
                ("float32", "float32", "float64", "bfloat16", "float16", *(() if self.records else (*INTS, "bool")))
            )
        shape = self.shape() if shape is None else shape
        shadow = self.draw(shape, dtype, positive, tame)
        tensor = self.place(shadow, dtype)
        if self.records and dtype in FLOATS and chance.random() < 0.8:
            tensor.requires_grad_()
        number, leaf = len(self.values), " leaf" * tensor.requires_grad
        self.trace.append(lambda: f"v{number} = {dtype} {shape} strides {tensor.stride()}{leaf}")
        return self.keep(tensor, mirrored(tensor, shadow))

    def keep(self, tensor: _C.Tensor, shadow: np.ndarray, memory: list[Value] | None = None) -> Value:
        value = Value(tensor, shadow, memory)
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
        self.values.append(value)
        return value

    def pick(self, kinds: tuple[str, ...] = (), tame: bool = False, dims: int = 0) -> Value:
        """A value of these dtypes, or a new one."""
        some = [v for v in self.values if (not kinds or v.dtype in kinds) and v.shadow.ndim >= dims]
        if some and self.chance.random() < 0.95:
            found = self.chance.choice(some)
            if not tame or is_tame(found.shadow):
                return found
        dtype = self.chance.choice(kinds) if kinds else None
        shape = self.shape()
        return self.leaf(dtype, shape if len(shape) >= dims else (*shape, 2, 3, 1)[: max(dims, 1)], tame=tame)

    def result(
        self,
        call: str,
        entry: Op,
        tensor: _C.Tensor,
        inputs: list[Value],
        kwargs: dict[str, Any],
        arrays: Any = None,
        want: Any = None,
        open_sign: np.ndarray | None = None,
    ) -> Value:
        """Judges a result and keeps it. open_sign: where it must not be finite, and rounding decides between the infinities and NaN."""
        arrays = [v.shadow for v in inputs] if arrays is None else arrays
        dtype = NAME[tensor.dtype]
        want = np.asarray(entry.reference(*arrays, **kwargs)) if want is None else want
        number = len(self.values)
        self.trace.append(
            lambda: (
                f"v{number} = {call}({', '.join(f'v{self.values.index(v)}' for v in inputs)}, {kwargs}) -> {dtype} {tensor.shape}"
            )
        )
        got = numbers(tensor)
        if dtype in FLOATS:
            works = next((v.dtype for v in inputs if v.dtype in FLOATS), dtype)
            works = dtype if UNIT_ROUNDOFF[dtype] < UNIT_ROUNDOFF[works] else works
            tolerance = forward_tolerance(entry, Case((), kwargs), arrays, [want], 0, works, dtype)
            self.check(got, want, tolerance, dtype, call, open_sign)
        elif not within(got, want, 0):
            raise Wrong(f"{call}: {judge(got, want, 0)[1] or 'wrong'}")
        return self.keep(tensor, got if tensor.is_contiguous() else mirrored(tensor, got))

    def check(
        self,
        got: np.ndarray,
        want: np.ndarray,
        tolerance: Any,
        dtype: str,
        what: str,
        open_sign: np.ndarray | None = None,
    ) -> None:
        if open_sign is not None and got.shape == want.shape:
            if np.isfinite(got[open_sign]).any():
                raise Wrong(f"{what}: finite where a factor is infinite")
            got, want, tolerance = (np.where(open_sign, 0.0, a) for a in (got, want, tolerance))
        if within(got, want, tolerance):
            return
        if got.shape == want.shape and dtype in LARGEST:
            # Beyond the largest number: an infinity, or that number where the reference is within a rounding of it.
            edge = np.abs(want) > LARGEST[dtype] * (1 - 4 * UNIT_ROUNDOFF[dtype])
            fine = (
                edge
                & np.isfinite(want)
                & (np.abs(got) >= LARGEST[dtype] * (1 - 8 * UNIT_ROUNDOFF[dtype]))
                & (np.sign(got) == np.sign(want))
            )
            got, want = np.where(fine, 0.0, got), np.where(fine, 0.0, want)
        wrong = judge(got, want, tolerance)[1]
        if wrong:
            raise Wrong(f"{what}: {wrong}")

    def record(
        self, rule: str, inputs: list[Value], out: Value | list[Value], entry: Op | None = None, **kwargs: Any
    ) -> None:
        outs = out if isinstance(out, list) else [out]
        needs = any(v.graph for v in inputs) and outs[0].dtype in FLOATS
        if outs[0].tensor.requires_grad != needs:
            raise Wrong(f"{rule}: requires_grad must be {needs}, got {outs[0].tensor.requires_grad}")
        if needs:
            self.uses.append((rule, list(inputs), outs, kwargs, entry))


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1]))


def promoted(a: Value, b: Value) -> str:
    weak = (not a.shadow.ndim, not b.shadow.ndim)
    if weak[0] != weak[1] and (a.dtype in FLOATS) == (b.dtype in FLOATS):
        return b.dtype if weak[0] else a.dtype
    if a.dtype == b.dtype:
        return a.dtype
    if a.dtype in FLOATS:
        return "float64" if "float64" in (a.dtype, b.dtype) else "float32"
    return max(a.dtype, b.dtype, key=RANK.__getitem__)
