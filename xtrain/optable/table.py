"""The frame of the op table: what an entry says, how its inputs are made, and how an answer is judged.

An entry (`Op`) names an op, the kernel slots it exercises, its cases (input specifications and arguments), a NumPy
float64 reference, a PyTorch composition for the parity suite, and its error inputs. tests/ops,
parity/ops and `xtrain check` turn every entry into tests; nothing is written per op besides the entry.

Judging: a result is first checked to be finite wherever the reference is, then `not (error <= tolerance)` fails, so
that a NaN never passes. The tolerance is computed: (roundings * u_out + accumulations * u_acc) * magnitude, u being the
unit roundoff of the format and `magnitude` the sum of the absolute values that were added (by default the reference's
absolute value).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTS = ("int64", "int32", "uint8")

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Below this a format loses precision (or is flushed to zero by a fast path): the absolute part of every tolerance.
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


# ---- input specifications --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """How one input is made: `kind` draws float64 (or integer, or bool) values of `shape` from a generator."""

    kind: str
    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 0.0

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "normal":
            return rng.standard_normal(self.shape)
        if self.kind == "uniform":
            return rng.uniform(self.low, self.high, self.shape)
        if self.kind == "apart":  # away from zero, both signs: for kinks and poles at 0
            return rng.uniform(self.low, self.high, self.shape) * rng.choice([-1.0, 1.0], self.shape)
        if self.kind == "distinct":  # no two elements within 0.05: for extrema
            count = int(np.prod(self.shape, dtype=np.int64))
            return (rng.permutation(count).reshape(self.shape) - count / 2) * 0.07 + 0.01
        if self.kind == "ties":  # few values, many ties
            return rng.integers(-2, 3, self.shape).astype(np.float64)
        if self.kind == "int":
            return rng.integers(int(self.low), int(self.high), self.shape)
        if self.kind == "bool":
            return rng.integers(0, 2, self.shape).astype(bool)
        raise AssertionError(f"unknown input kind {self.kind}")

    @property
    def is_float(self) -> bool:
        return self.kind not in ("int", "bool")


def N(*shape: int) -> Spec:
    return Spec("normal", shape)


def U(low: float, high: float, *shape: int) -> Spec:
    return Spec("uniform", shape, low, high)


def Apart(low: float, high: float, *shape: int) -> Spec:
    return Spec("apart", shape, low, high)


def Distinct(*shape: int) -> Spec:
    return Spec("distinct", shape)


def Ties(*shape: int) -> Spec:
    return Spec("ties", shape)


def Ids(low: int, high: int, *shape: int) -> Spec:
    return Spec("int", shape, low, high)


def Away(*shape: int) -> Spec:
    """Away from zero, both signs."""
    return Apart(0.5, 3.0, *shape)


def Bools(*shape: int) -> Spec:
    return Spec("bool", shape)


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One set of inputs. `kwargs` go to call, reference and torch alike. `fd=False`: no finite differences (not smooth
    there). `big=True`: large enough to be split over threads; only forward, repeat and thread tests run it."""

    inputs: tuple[Spec, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fd: bool = True
    big: bool = False

    @property
    def id(self) -> str:
        shapes = "_".join("x".join(map(str, s.shape)) or "0d" for s in self.inputs) or "none"
        options = ",".join(f"{k}={v}" for k, v in self.kwargs.items())
        return f"{shapes}[{options}]" if options else shapes


def case(*inputs: Spec, fd: bool = True, big: bool = False, **kwargs: Any) -> Case:
    return Case(inputs, kwargs, fd, big)


@dataclass(frozen=True)
class Error:
    """A call that must raise `type` with a message that matches `match` (op, argument, rule, value)."""

    call: Callable[[], Any]
    type: type[BaseException] | tuple[type[BaseException], ...]
    match: str


@dataclass(frozen=True)
class Op:
    """An entry of the table. `op` is the name in `_C.op_signatures()`; `variant` tells entries of one op apart.

    call(*tensors, **kwargs) -> tensor or list of tensors
    reference(*float64 arrays, **kwargs) -> array or list of arrays (None: the call is checked elsewhere, see `note`)
    torch(torch, *tensors, **kwargs) -> tensor or list, for the parity suite (None: PyTorch has no such thing)
    magnitude(*arrays, **kwargs): sum of absolute values of what is added up; default |reference|; a list with several
        outputs, told apart by their shapes
    accumulations(*arrays, **kwargs) -> number of roundings in the accumulator's format
    roundings: number of roundings to the tensor's own format
    floors(*arrays, **kwargs): by how much what roundings lose below the smallest number is multiplied, added up over
        them, in an op of one output; default 1
    out_dtype: dtype of the result, "same" = that of the inputs
    selects: "gemm" or "attention": every named backend of the device is run
    strided: inputs of other strides give the same bits ("bits"), the same numbers ("close"), or are not tried ("no")
    """

    op: str
    kernels: tuple[str, ...]
    cases: tuple[Case, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    variant: str = ""
    torch: Callable[..., Any] | None = None
    magnitude: Callable[..., Any] | None = None
    accumulations: Callable[..., float] | float = 8
    roundings: float = 1
    floors: Callable[..., Any] | None = None
    grad_roundings: float = 4
    out_dtype: str = "same"
    dtypes: tuple[str, ...] = FLOATS
    nondiff: bool = False
    selects: str | None = None
    strided: str = "bits"
    errors: tuple[Error, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.op}:{self.variant}" if self.variant else self.op

    def draw(self, c: Case, dtype: str, salt: str = "") -> list[np.ndarray]:
        """Seeded inputs, already rounded to `dtype` (float64 arrays that hold exactly what the tensor holds)."""
        rng = np.random.default_rng(zlib.crc32(f"{self.id}/{c.id}/{salt}".encode()))
        return [exact(s.draw(rng), dtype) if s.is_float else s.draw(rng) for s in c.inputs]

    def differentiable(self, c: Case) -> list[int]:
        return [] if self.nondiff else [i for i, s in enumerate(c.inputs) if s.is_float]


TABLE: list[Op] = []
V, T, I, R = ValueError, TypeError, IndexError, RuntimeError

# Sizes that catch tails: one element, vector widths and their neighbours, more than one block.
TAILS = (1, 31, 32, 33, 257)


def op(name: str, kernels: str, cases: Any, call: Any, reference: Any, **options: Any) -> None:
    """Adds an entry to the table; `kernels` is a space-separated list of slots.

    nondiff: by default true where no float goes in or comes out.
    """
    floats = set(FLOATS) & set(options.get("dtypes", FLOATS)) and options.get("out_dtype") not in (*INTS, "bool")
    options.setdefault("nondiff", not floats)
    TABLE.append(Op(name, tuple(kernels.split()), tuple(cases), call, reference, **options))


def elementwise_cases(kind: Any, count: int = 1) -> list[Case]:
    """The shapes every elementwise op is tried on; `kind(*shape)` is the input specification."""
    shapes = [(2, 3, 4), (), (0,), (2, 0, 3), (1, 1), *((n,) for n in TAILS)]
    return [case(*[kind(*shape)] * count) for shape in shapes] + [case(*[kind(129, 523)] * count, big=True)]


def same_torch(name: str) -> Any:
    """The PyTorch function of this name."""
    return lambda torch, *a, **k: getattr(torch, name)(*a, **k)


def f32(*shape: int) -> Tensor:
    """Ones, for error inputs."""
    return _C.full(shape, 1.0, _C.float32)


def i64(*shape: int) -> Tensor:
    """Zeros of int64, for error inputs."""
    return _C.full(shape, 0, _C.int64)


# ---- between NumPy and xtrain ----------------------------------------------------------------------------------------


def dtype_of(name: str) -> _C.dtype:
    return getattr(_C, name)


def tensor(a: np.ndarray, dtype: str | None = None, device: str | None = None) -> Tensor:
    """A copy of `a` as a tensor; float arrays become `dtype`, through float64, which no format rounds twice from.

    device: None is the default device."""
    t = _C.tensor(np.asarray(a, order="C"), device="cpu")
    if dtype is not None and a.dtype.kind == "f" and str(a.dtype) != dtype:
        t = _C.cast(t, dtype_of(dtype))
    return _C.to_device(t, _C.get_default_device() if device is None else device)


def exact(a: np.ndarray, dtype: str) -> np.ndarray:
    """`a` rounded to `dtype`, as float64."""
    a = np.asarray(a, np.float64)
    if dtype == "float64":
        return a
    if dtype == "bfloat16":
        bits = a.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
    return a.astype(dtype).astype(np.float64)


def array(t: Tensor) -> np.ndarray:
    """The values of a tensor: float64 for float tensors, the tensor's own type otherwise."""
    t = _C.detach(t)
    if t.device.type != "cpu":
        t = _C.to_device(t, _C.device("cpu"))
    return (_C.cast(t, _C.float64) if t.dtype.is_floating_point else t).numpy()


def bits(t: Tensor) -> bytes:
    """The bytes of a tensor: equal bytes, equal bits. bfloat16 and float16 widen exactly, which keeps them apart."""
    return array(t).tobytes()


def as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def outputs_of(entry: Op, c: Case, tensors: Sequence[Any]) -> list[Any]:
    return as_list(entry.call(*tensors, **c.kwargs))


def references_of(entry: Op, c: Case, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return [np.asarray(r) for r in as_list(entry.reference(*arrays, **c.kwargs))]


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(got: np.ndarray, want: np.ndarray, tolerance: np.ndarray | float) -> tuple[float, str]:
    """(largest error / tolerance, what is wrong or ""). Right is: the shape of `want`, finite where `want` is, equal
    where it is not, and |got - want| <= tolerance. What cannot be measured has the ratio inf."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return np.inf, f"shape {got.shape}, expected {want.shape}"
    special = ~np.isfinite(want)
    if not np.array_equal(got[special], want[special], equal_nan=True):
        return np.inf, "differs where the reference is not finite"
    finite = np.isfinite(got) | special
    if not finite.all():
        return np.inf, f"{int((~finite).sum())} elements are not finite, first at {first(~finite)}"
    if want.size == 0:
        return 0.0, ""
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(special, 0.0, np.abs(got - np.where(special, 0.0, want)))
        limit = np.broadcast_to(np.asarray(tolerance, np.float64), want.shape)
        ratio = np.where(error == 0, 0.0, error / limit)
    good = (error <= limit) | special
    if good.all():
        return float(ratio.max()), ""
    worst = np.unravel_index(np.argmax(np.where(good, -1.0, np.nan_to_num(ratio, nan=np.inf))), want.shape)
    return float(np.nan_to_num(ratio[worst], nan=np.inf)), (
        f"{int((~good).sum())} of {good.size} elements are wrong, worst at {tuple(map(int, worst))}: "
        f"got {got[worst]!r}, expected {want[worst]!r}, error {error[worst]:.3e} > tolerance {limit[worst]:.3e}"
    )


def check_close(got: np.ndarray, want: np.ndarray, tolerance: np.ndarray | float, what: str) -> None:
    """AssertionError unless judge() finds nothing wrong."""
    wrong = judge(got, want, tolerance)[1]
    if wrong:
        raise AssertionError(f"{what}: {wrong}")


def first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


def upstream(refs: Sequence[Any], dtype: str, seed: str) -> list[np.ndarray]:
    """Random gradients for outputs of these shapes, exact in `dtype`."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return [exact(rng.standard_normal(tuple(r.shape)), dtype) for r in refs]


def gradients(
    entry: Op,
    c: Case,
    arrays: Sequence[np.ndarray],
    dtype: str,
    dys: Sequence[np.ndarray] | None = None,
    device: str | None = None,
) -> tuple[list[Any], list[Any]]:
    """Runs the case forward and backward: the outputs and the gradients (None where there is none)."""
    tensors = [tensor(a, dtype, device) for a in arrays]
    for i in entry.differentiable(c):
        tensors[i].requires_grad_()
    outs = [o for o in outputs_of(entry, c, tensors) if o.dtype.is_floating_point]
    dys = upstream(outs, dtype, entry.id + c.id) if dys is None else dys
    seeds = [_C.cast(tensor(dy, "float64", str(o.device)), o.dtype) for dy, o in zip(dys, outs)]
    _C.backward(outs, seeds, False)
    return outs, [t.grad for t in tensors]
