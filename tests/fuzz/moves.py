"""Steps of a random program that move numbers or change them in place: views, copies, casts, other libraries' doors, and aliases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from frame import Wrong
from values import DTYPE, FLOATS, INTS, LARGEST, Program, Value, alike, broadcasts, is_tame, mirrored, numbers

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import exact

Move = Callable[[np.ndarray], np.ndarray]
INSIDE = {"uint8": (0, 255), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


class Moves(Program):
    def alias(self, call: str, x: Value, tensor: _C.Tensor, move: Move, grown: bool = True) -> Value:
        """Keeps a tensor that shares memory with x. move: what the call does, to a NumPy array."""
        shadow = move(x.shadow)
        if tensor.shape != shadow.shape:
            raise Wrong(f"{call}: shape must be {shadow.shape}, got {tensor.shape}")
        number = len(self.values)
        self.trace.append(
            lambda: f"v{number} = {call} of v{self.values.index(x)} -> {tensor.shape} strides {tensor.stride()}"
        )
        out = self.keep(tensor, shadow, x.memory)
        self.same(out, call)
        if grown:
            self.record_move(x, out, move)
        return out

    def record_move(self, x: Value, out: Value, move: Move) -> None:
        places = move(np.arange(x.shadow.size).reshape(x.shadow.shape)) if x.graph else None
        self.record("move", [x], out, places=places)

    def same(self, value: Value, what: str) -> None:
        if not alike(numbers(value.tensor), value.shadow):
            raise Wrong(f"{what}: v{self.values.index(value)} has other numbers than its shadow")

    # ---- views

    def view(self) -> None:
        chance, x = self.chance, self.pick()
        way, s, ndim = chance.randrange(7), x.shadow, x.shadow.ndim
        if way == 0 and ndim:
            a, b = chance.randrange(-ndim, ndim), chance.randrange(-ndim, ndim)
            self.alias(f"transpose {a} {b}", x, _C.transpose(x.tensor, a, b), lambda s: s.swapaxes(a, b))
        elif way == 1:
            order = list(range(ndim))
            chance.shuffle(order)
            self.alias(f"permute {order}", x, _C.permute(x.tensor, order), lambda s: s.transpose(order))
        elif way == 2 and ndim:
            dim = chance.randrange(ndim)
            start, stop, step = chance.randint(-9, 9), chance.randint(-9, 40), chance.choice((1, 1, 1, 2, 3, 50))
            where = (slice(None),) * dim + (slice(start, stop, step),)
            self.alias(
                f"slice {dim} {start}:{stop}:{step}", x, _C.slice(x.tensor, dim, start, stop, step), lambda s: s[where]
            )
        elif way == 3 and ndim and all(s.shape):
            dim = chance.randrange(ndim)
            at = chance.randrange(-s.shape[dim], s.shape[dim])
            where = (slice(None),) * dim + (at,)
            self.alias(f"select {dim} {at}", x, _C.select(x.tensor, dim, at), lambda s: s[(*where, ...)])
        elif way == 4 and ndim < 6:
            dim = chance.randint(-ndim - 1, ndim)
            self.alias(f"unsqueeze {dim}", x, _C.unsqueeze(x.tensor, dim), lambda s: np.expand_dims(s, dim))
        elif way == 5:
            self.alias("squeeze", x, _C.squeeze(x.tensor), lambda s: s.squeeze()[...])
        else:
            shape = tuple(n if n != 1 or chance.random() < 0.5 else chance.choice((0, 1, 2, 3)) for n in s.shape)
            shape = (*(chance.choice((1, 2, 3)) for _ in range(chance.choice((0, 0, 1)))), *shape)
            if math.prod(shape) <= 2000 and len(shape) <= 8:
                self.alias(f"expand {shape}", x, _C.expand(x.tensor, shape), lambda s: expanded(s, shape))

    def index(self) -> None:
        """x[...] with ints, slices, None and Ellipsis, as NumPy has it."""
        chance, x = self.chance, self.pick()
        shape = x.shadow.shape
        front = chance.randint(0, len(shape))
        back = chance.randint(0, len(shape) - front) if chance.random() < 0.4 else None
        key = self.keys(shape[:front])
        if back is not None:  # what stands behind "..." counts from the end
            key += [..., *self.keys(shape[len(shape) - back :])]
        if len(shape) + sum((k is None) - isinstance(k, int) for k in key) > 8:
            return
        whole = tuple(key) if ... in key else (*key, ...)
        self.alias(f"index {key}", x, x.tensor[tuple(key)], lambda s: s[whole])

    def keys(self, shape: tuple[int, ...]) -> list[Any]:
        chance, keys = self.chance, list[Any]()
        for n in shape:
            if chance.random() < 0.15:
                keys.append(None)
            if chance.random() < 0.3 and n:
                keys.append(chance.randrange(-n, n))
            else:
                ends = [chance.choice((None, chance.randint(-n - 2, n + 2))) for _ in range(2)]
                keys.append(slice(*ends, chance.choice((None, 1, 2, 5))))
        return keys

    def reshape(self) -> None:
        chance, x = self.chance, self.pick()
        shape = _regrouped(chance, x.shadow.shape)
        want = x.shadow.reshape(shape)
        out = _C.reshape(x.tensor, shape)
        shared = x.shadow.size > 0 and np.shares_memory(want, x.shadow)
        if x.shadow.size and (out.data_ptr() == x.tensor.data_ptr()) != shared:
            raise Wrong(
                f"reshape of {x.shadow.shape} {x.tensor.stride()} to {shape}: NumPy {'makes a view' if shared else 'copies'}"
            )
        if shared or not x.shadow.size:
            self.alias(f"reshape {shape}", x, out, lambda s: s.reshape(shape))
        else:
            self.copied(f"reshape {shape}", x, out, lambda s: s.reshape(shape))

    def copied(self, call: str, x: Value, tensor: _C.Tensor, move: Move, want: np.ndarray | None = None) -> Value:
        want = move(x.shadow) if want is None else want
        self.trace.append(f"v{len(self.values)} = {call} of v{self.values.index(x)} -> {tensor.shape}, a copy")
        out = self.keep(tensor, mirrored(tensor, want))
        if tensor.shape != want.shape:
            raise Wrong(f"{call}: shape must be {want.shape}, got {tensor.shape}")
        self.same(out, call)
        self.record_move(x, out, move)
        return out

    def copy(self) -> None:
        x = self.pick()
        if self.chance.random() < 0.5:
            self.copied("clone", x, _C.clone(x.tensor), itself)
            return
        out = _C.contiguous(x.tensor)
        if x.tensor.is_contiguous():
            self.alias("contiguous", x, out, itself)
        else:
            self.copied("contiguous", x, out, itself)

    def cast(self) -> None:
        x, dtype = self.pick(), self.chance.choice((*FLOATS, *FLOATS, *INTS, "bool"))
        s = x.shadow
        if dtype in INTS and s.dtype.kind == "f":
            low, high = INSIDE[dtype]
            if not ((s > low - 1) & (s < high)).all():
                return  # undefined in C, and so here
        out = _C.cast(x.tensor, DTYPE[dtype])
        if dtype == x.dtype:
            self.alias(f"cast {dtype}", x, out, itself)
            return
        if dtype in ("bfloat16", "float16"):  # by way of float32, as in PyTorch
            want = exact(s.astype(np.float32).astype(np.float64), dtype)
        else:
            want = exact(s.astype(np.float64), dtype) if dtype in FLOATS else s.astype(dtype)
        if dtype in FLOATS and s.dtype.kind == "i" and (np.abs(s) > 2**24).any():
            return  # through float64, whose rounding may be another one
        edge = (np.abs(want) > LARGEST[dtype]) if dtype in FLOATS else None
        if edge is not None and edge.any():
            want = np.where(edge, np.copysign(np.inf, want), want)
        self.copied(f"cast {dtype}", x, out, itself, want)

    def join(self) -> None:
        chance, x = self.chance, self.pick(dims=1)
        dim = chance.randrange(x.shadow.ndim)
        parts = [x]
        for _ in range(chance.randint(0, 2)):
            shape = list(x.shadow.shape)
            shape[dim] = chance.choice((0, 1, 2, 3))
            parts.append(self.leaf(x.dtype, tuple(shape)))
        chance.shuffle(parts)
        tensor = _C.cat([v.tensor for v in parts], dim - x.shadow.ndim * (chance.random() < 0.5))
        self.trace.append(
            f"v{len(self.values)} = cat of {[self.values.index(v) for v in parts]} along {dim} -> {tensor.shape}"
        )
        want = np.concatenate([v.shadow for v in parts], dim)
        if tensor.shape != want.shape:
            raise Wrong(f"cat: shape must be {want.shape}, got {tensor.shape}")
        out = self.keep(tensor, mirrored(tensor, want))
        self.same(out, "cat")
        self.record("cat", parts, out, dim=dim)

    def split(self) -> None:
        chance, x = self.chance, self.pick(dims=1)
        dim = chance.randrange(x.shadow.ndim)
        n = x.shadow.shape[dim]
        if n == 0:
            return
        if chance.random() < 0.5:
            size: Any = chance.randint(1, n)
            cuts = list(range(size, n, size))
        else:
            cuts = sorted(chance.randint(0, n) for _ in range(chance.randint(0, 2)))
            size = tuple(b - a for a, b in zip([0, *cuts], [*cuts, n]))
        tensors = _C.split(x.tensor, size, dim)
        wanted = np.split(x.shadow, cuts, dim)
        if len(tensors) != len(wanted):
            raise Wrong(f"split {size} of {x.shadow.shape}: must have {len(wanted)} parts, got {len(tensors)}")
        parts = [
            self.alias(f"split {size} {dim}", x, t, lambda _, w=w: w, grown=False) for t, w in zip(tensors, wanted)
        ]
        self.parts += parts
        self.record("split", [x], parts, dim=dim)

    # ---- other libraries' doors

    def door(self) -> None:
        x, way = self.pick(), self.chance.choice(("dlpack", "numpy", "both", "buffer", "tensor"))
        repeats = any(st == 0 and n > 1 for st, n in zip(x.tensor.stride(), x.shadow.shape))
        if x.graph:
            return
        if repeats and way in ("numpy", "buffer", "both"):
            way = "dlpack"  # such an array is not writable
        if x.dtype == "bfloat16" and way != "dlpack":
            way = "dlpack"
        t = x.tensor
        if way == "tensor":
            array = t.numpy()
            self.copied("xt.tensor of an array", x, xt.tensor(array), itself)
            return
        if way == "dlpack":
            out = xt.from_dlpack(t)
        elif way == "numpy":
            out = xt.from_numpy(t.numpy())
        elif way == "both":
            out = xt.from_dlpack(np.from_dlpack(t))
        else:
            out = xt.from_numpy(np.asarray(t))
        self.alias(way, x, out, itself, grown=False)

    # ---- in place

    def in_place(self) -> None:
        """A change of x appears in all that share its memory, and nowhere else."""
        chance = self.chance
        x = self.pick()
        name = chance.choice(("add_", "sub_", "mul_", "copy_", "fill_", "item"))
        if x.dtype == "bool" and name in ("add_", "sub_", "mul_"):
            name = "copy_"
        other: Value | None = None
        if name in ("fill_", "item") or chance.random() < 0.2:
            number = bool(chance.randrange(2)) if x.dtype == "bool" else chance.choice((0, 1, 2, 3))
        elif chance.random() < 0.4:  # of the same memory, perhaps shifted
            fits = [
                v for v in x.memory if broadcasts(v.shadow.shape, x.shadow.shape) and v.shadow.ndim <= x.shadow.ndim
            ]
            other = chance.choice(fits)
        else:
            shape = tuple(n if chance.random() < 0.7 else 1 for n in x.shadow.shape)
            other = self.leaf(x.dtype, shape)
        if other is not None and np.broadcast_shapes(other.shadow.shape, x.shadow.shape) != x.shadow.shape:
            return
        if x.dtype in FLOATS and not is_tame(x.shadow):
            return
        s, t = x.shadow, x.tensor
        operand: Any = other.tensor if other is not None else number
        self.trace.append(
            f"{name} v{self.values.index(x)} {f'v{self.values.index(other)}' if other is not None else number}"
        )
        repeats = any(st == 0 and n > 1 for st, n in zip(t.stride(), t.shape))
        want = self.changed(name, s, other.shadow if other is not None else number, x.dtype)
        try:
            if name == "item":
                t[...] = operand
            else:
                getattr(_C, name)(t, operand)
        except ValueError as error:
            if repeats and "repeat" in str(error):
                return
            raise
        if repeats and name != "fill_" and s.size:
            raise Wrong(f"{name} of a tensor that repeats elements was not refused: {t.shape} {t.stride()}")
        s[...] = want
        for value in x.memory:
            self.same(value, name)
        for value in self.values:
            if value.memory is not x.memory:
                self.same(value, f"{name} elsewhere")

    def changed(self, name: str, x: np.ndarray, other: Any, dtype: str) -> np.ndarray:
        if name in ("copy_", "fill_", "item"):
            return np.broadcast_to(np.asarray(other), x.shape).astype(x.dtype)
        f = {"add_": np.add, "sub_": np.subtract, "mul_": np.multiply}[name]
        if dtype in FLOATS:
            return exact(f(x, np.array(other, np.float64)), dtype)
        return f(x, np.asarray(other).astype(dtype))


def expanded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """np.broadcast_to, but what is writable stays so."""
    return np.lib.stride_tricks.as_strided(x, shape, np.broadcast_to(x, shape).strides)


def itself(x: np.ndarray) -> np.ndarray:
    return x


def _regrouped(chance: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    count = math.prod(shape)
    out: list[int] = []
    if count == 0:
        out = [n for n in shape if n]
        out.insert(chance.randint(0, len(out)), 0)
        return tuple(out)
    rest = count
    while rest > 1 and len(out) < 4:
        divisor = chance.choice([d for d in range(1, min(rest, 60) + 1) if rest % d == 0])
        out.append(divisor)
        rest //= divisor
    out.append(rest)
    if chance.random() < 0.2:
        out[chance.randrange(len(out))] = -1
    return tuple(out)
