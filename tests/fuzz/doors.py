"""Random and forged objects at the doors of the C core: DLPack capsules, NumPy arrays, buffers, the arguments of every op, indices.

Only exceptions of DOCUMENTED come out, what is accepted has the right numbers, a refused capsule is left to its owner, an accepted one is
given back once, and nothing else changes: a tensor beside each case is looked at after it.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from frame import Family, Wrong
from objects import NUMBERS, Bad, any_array, any_index, any_thing

import xtrain as xt
from xtrain import _C

DOCUMENTED = (
    TypeError,
    ValueError,
    IndexError,
    BufferError,
    OverflowError,
    RuntimeError,
    MemoryError,
    NotImplementedError,
)
LARGE = 1 << 22  # elements of a result that are not looked at


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", DELETER),
        ("flags", ctypes.c_uint64), ("tensor", DlTensor),
    ]  # fmt: skip


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
TYPES = {
    (2, 32): np.float32,
    (2, 64): np.float64,
    (2, 16): np.float16,
    (0, 32): np.int32,
    (0, 64): np.int64,
    (1, 8): np.uint8,
}
NAMES = [b"dltensor", b"dltensor_versioned", b"used_dltensor", b"dltensor ", b"", b"other"]


class Producer:
    """What from_dlpack is given: an object whose capsule was made up."""

    def __init__(self, capsule: Any, device: Any = (1, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


class Doors(Family):
    name = "doors"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ways = [
            self.capsule,
            self.capsule,
            self.array,
            self.array,
            self.buffer,
            self.call,
            self.call,
            self.index,
            self.index,
        ]
        self.ops = sorted(_C.op_signatures())
        self.methods = [
            name for name in sorted(set(dir(_C.Tensor)))
            if name not in ("__class__", "__init_subclass__", "__subclasshook__", "__new__", "__getattribute__", "__dir__")
        ]  # fmt: skip
        self.canary = xt.arange(64, dtype="int64")
        self.last = ""
        np.seterr(all="ignore")

    def describe(self) -> str:
        return self.last

    def run(self, chance: random.Random) -> None:
        way = chance.choice(self.ways)
        self.last = way.__name__
        way(chance)
        if self.canary.tolist() != list(range(64)):
            self.canary = xt.arange(64, dtype="int64")
            raise Wrong("another tensor changed")
        self.counts[way.__name__] += 1

    def tried(self, call: Callable[[], Any]) -> Any:
        """The result, or None after a documented exception."""
        try:
            return call()
        except ZeroDivisionError:
            if "Bad" in self.last or "division" not in self.last:
                return None
            raise
        except DOCUMENTED as error:
            text = str(error)
            if not text.strip() or "\0" in text or len(text) > 2000 or isinstance(error, UnicodeError):
                raise Wrong(f"the message says too little or too much: {error!r:.300}") from None
            self.counts["refused"] += 1
            return None

    # ---- DLPack

    def capsule(self, chance: random.Random) -> None:
        code, bits = chance.choice([*TYPES, *TYPES, (4, 16), (6, 8), (2, 8), (5, 64), (9, 200)])
        ndim = chance.choice((0, 1, 1, 2, 3, 8))
        shape = [chance.choice((0, 1, 1, 2, 3)) for _ in range(ndim)]
        strides = [chance.choice((0, 1, 1, 2, 3, 6)) for _ in range(ndim)]
        memory = np.arange(256, dtype=np.uint8)  # and 64 bytes on both sides
        address, offset = memory.ctypes.data + 64, chance.choice((0, 0, 8, 16))
        fields: dict[str, Any] = {
            "type": 1, "index": 0, "ndim": ndim, "lanes": 1, "major": 1, "minor": 1, "flags": 0, "data": address, "offset": offset,
            "null_shape": False, "null_strides": chance.random() < 0.2,
        }  # fmt: skip
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
            forge(chance, fields, shape, strides)
        versioned = chance.random() < 0.6
        name = chance.choice(NAMES) if chance.random() < 0.1 else NAMES[versioned]
        self.last = f"capsule {name} {fields} code {code} bits {bits} shape {shape} strides {strides}"
        keep = [(ctypes.c_int64 * max(len(v), 1))(*v) for v in (shape, strides)]
        given: list[int] = []
        deleter = DELETER(given.append) if chance.random() < 0.9 else DELETER()
        tensor = DlTensor(
            fields["data"] or None, Device(fields["type"], fields["index"]), fields["ndim"], code, bits, fields["lanes"],
            None if fields["null_shape"] else keep[0], None if fields["null_strides"] else keep[1], fields["offset"],
        )  # fmt: skip
        if versioned:
            managed: Any = Versioned(fields["major"], fields["minor"], None, deleter, fields["flags"], tensor)
        else:
            managed = Managed(tensor, None, deleter)
        capsule = _new(ctypes.addressof(managed), name, None)
        out = self.tried(lambda: xt.from_dlpack(Producer(capsule, (fields["type"], fields["index"]))))
        if out is None:
            if _name(capsule) != name or given:
                raise Wrong("a refused capsule must be left to its owner")
            return
        if _name(capsule) == name:
            raise Wrong("an accepted capsule must be renamed")
        self.counts["accepted"] += 1
        shape = shape[: fields["ndim"]]
        if tuple(shape) != out.shape:
            raise Wrong(f"shape must be {shape}, got {out.shape}")
        self.read_capsule(out, memory, fields, shape, strides, TYPES.get((code, bits)))
        again = self.tried(lambda: xt.from_dlpack(Producer(capsule)))
        if again is not None:
            raise Wrong("a used capsule must be refused")
        del out
        if deleter and len(given) != 1:
            raise Wrong(f"the deleter must have been called once, got {len(given)}")

    def read_capsule(
        self, out: Any, memory: np.ndarray, fields: dict[str, Any], shape: list[int], strides: list[int], dtype: Any
    ) -> None:
        """Compares the numbers where the description stays within our memory."""
        if dtype is None or not 0 < out.numel() < LARGE:
            return
        size = np.dtype(dtype).itemsize
        if fields["null_strides"]:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        start = fields["data"] + fields["offset"] - memory.ctypes.data
        span = size * (1 + sum((n - 1) * s for n, s in zip(shape, strides)))
        if start >= 0 and start + span <= memory.size:
            base = memory[start : start + span].view(dtype)
            want = np.lib.stride_tricks.as_strided(base, shape, [s * size * (n > 1) for s, n in zip(strides, shape)])
            if not np.array_equal(out.numpy(), want, equal_nan=want.dtype.kind == "f"):
                raise Wrong("other numbers than the memory has")

    # ---- NumPy and buffers

    def array(self, chance: random.Random) -> None:
        array = any_array(chance)
        text = (
            f"array {array.dtype} {array.shape} strides {array.strides} flags {array.flags.num} {type(array).__name__}"
        )
        self.last = "tensor of " + text
        copied = self.tried(lambda: xt.tensor(array))
        if copied is not None:
            self.equal(copied, array, "xt.tensor")
            if array.size and array.dtype.kind in "iuf" and np.shares_memory(copied.numpy(), array):
                raise Wrong("xt.tensor must copy")
        self.last = "from_numpy of " + text
        shared = self.tried(lambda: xt.from_numpy(array))
        if shared is None:
            return
        self.equal(shared, array, "from_numpy")
        self.counts["accepted"] += 1
        if array.size and array.dtype.kind in "iuf" and type(array) is np.ndarray:
            if not np.shares_memory(shared.numpy(), array):
                raise Wrong("from_numpy must share memory")
            if not any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape)):
                self.last = "in place, " + text
                shared.fill_(1)
                if not (array == 1).all():
                    raise Wrong("a change in place must appear in the array")

    def equal(self, tensor: Any, array: np.ndarray, call: str) -> None:
        if tensor.shape != array.shape:
            raise Wrong(f"{call}: shape must be {array.shape}, got {tensor.shape}")
        if array.dtype.kind not in "iufb" or tensor.numel() > LARGE:
            return
        got = (tensor.float() if tensor.dtype is _C.bfloat16 else tensor).numpy()
        with np.errstate(all="ignore"):
            want = np.asarray(array).astype(got.dtype)
        if not np.array_equal(got, want, equal_nan=got.dtype.kind == "f"):
            raise Wrong(f"{call}: other numbers than the array has")

    def buffer(self, chance: random.Random) -> None:
        data: Any = bytes(chance.randrange(256) for _ in range(chance.choice((0, 1, 2, 4, 8, 24, 31))))
        if chance.random() < 0.5:
            data = bytearray(data)
        if chance.random() < 0.4:
            data = memoryview(data)
            if chance.random() < 0.4 and len(data) > 2:
                data = data[:: chance.choice((1, 2, -1))]
            elif chance.random() < 0.4 and len(data) % 8 == 0:
                data = data.cast(chance.choice(("d", "f", "i", "q", "B", "?", "c", "b")))
        if chance.random() < 0.1:
            data = any_thing(chance)
        dtype = chance.choice(
            ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "what", None, 3)
        )
        shape = chance.choice(
            ((), (0,), (1,), (2,), (3,), (2, 3), (8,), (2**62,), (-1,), (1,) * 9, (2**40, 2**40), "x", None, (2, 2, 2))
        )
        self.last = f"from_bytes({_said(data)}, {dtype}, {shape})"
        out = self.tried(lambda: _C.from_bytes(data, dtype, shape))
        if out is not None:
            self.counts["accepted"] += 1
            known = isinstance(data, (bytes, bytearray, memoryview))  # an array of dates has no memoryview
            if known and bytes(_C.to_bytes(out)) != bytes(data):
                raise Wrong("from_bytes: other bytes")
        self.last = f"xt.tensor({_said(data)}, {dtype})"
        self.tried(lambda: xt.tensor(data, dtype=dtype))

    # ---- arguments

    def call(self, chance: random.Random) -> None:
        if chance.random() < 0.6:
            name = chance.choice(self.ops)
            f: Any = getattr(_C, name)
        else:
            name = chance.choice(self.methods)
            self.last = f"Tensor.{name}"
            try:
                f = getattr(any_thing(chance, tensors=True), name)
            except (AttributeError, ValueError):  # __cuda_array_interface__ and mT
                return
            if not callable(f):
                return
        args = [
            any_thing(chance, tensors=chance.random() < 0.6)
            for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3, 4, 5, 8)))
        ]
        kwargs = (
            {chance.choice(("dim", "keepdim", "other", "shape", "dtype", "weight", "no")): any_thing(chance)}
            if chance.random() < 0.2
            else {}
        )
        self.last = f"{name}({', '.join(map(_said, args))}, { ({k: _said(v) for k, v in kwargs.items()}) })"
        try:
            out = self.tried(lambda: f(*args, **kwargs))
        except AttributeError:
            if "attr" not in name:
                raise
            return
        if isinstance(out, xt.Tensor) and 0 < out.numel() < 1000:
            out.tolist()
            repr(out)
            if out.requires_grad:
                self.tried(lambda: out.sum().backward())

    def index(self, chance: random.Random) -> None:
        shape = [chance.choice((0, 1, 2, 3, 5)) for _ in range(chance.choice((0, 1, 1, 2, 3, 4, 8)))]
        array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        x, key, plain = xt.tensor(array), *any_index(chance, len(shape))
        self.last = f"index {_said(key)} of {shape}"
        try:
            want: Any = np.asarray(array[key if isinstance(key, tuple) else (key,)]) if plain else None
        except (IndexError, ValueError, TypeError, OverflowError):
            want = None
        try:
            got = x[key]
        except (IndexError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
            text = str(error)
            if want is not None and not any(part in text for part in ("step", "dimensions", "fit")):
                raise Wrong(f"NumPy takes it: {error!r}") from None
            self.counts["refused"] += 1
        else:
            if plain and (want is None or got.shape != want.shape or not np.array_equal(got.numpy(), want)):
                raise Wrong(f"NumPy gives {want!r:.300}, got {got!r:.300}")
            self.counts["accepted"] += 1
        if chance.random() < 0.3:
            value = chance.choice((1, 2.5, any_thing(chance), any_thing(chance, tensors=True)))
            self.last += f" = {_said(value)}"
            self.tried(lambda: x.__setitem__(key, value))


def _said(thing: Any) -> str:
    if isinstance(thing, xt.Tensor):
        return f"{thing.dtype.name}{list(thing.shape)}{'*' * thing.requires_grad}"
    try:
        return "Bad()" if isinstance(thing, Bad) else f"{thing!r:.200}"
    except RecursionError:
        return "a deep list"


def forge(chance: random.Random, fields: dict[str, Any], shape: list[int], strides: list[int]) -> None:
    """Changes one field of a description."""
    field = chance.choice([*fields, "size", "stride", "size", "stride"])
    if field == "size" and shape:
        shape[chance.randrange(len(shape))] = chance.choice(NUMBERS)
    elif field == "stride" and strides:
        strides[chance.randrange(len(strides))] = chance.choice(NUMBERS)
    elif field in ("null_shape", "null_strides"):
        fields[field] = True
    elif field == "ndim":
        # Not more than shape and strides hold: their length is the producer's word.
        fields[field] = chance.choice((-1, -(2**31), 9, 64, 2**31 - 1, len(shape)))
    elif field == "data":
        fields[field] = chance.choice((0, 1, fields["data"] + 1, 2**64 - 8))
    elif field == "type":
        fields[field] = chance.choice((0, 2, 3, 4, 7, 10, 13, -1, 2**31 - 1))
    elif field == "index":
        fields[field] = chance.choice((1, -1, 255, 256, 2**31 - 1))
    elif field in fields:
        fields[field] = abs(chance.choice(NUMBERS)) % (
            2**16 if field == "lanes" else 2**32 if field in ("major", "minor") else 2**64
        )


FAMILY = Doors
