"""verify, assert_close, reduce_max_abs: two tensors compared where they are."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from .formats import format_of, is_finite, tolerance

_SHOWN = 5


class NotComparableError(AssertionError, ValueError):
    """assert_close: other shapes or devices, no elements, or nothing but NaN: a bad argument and a failed assertion."""


@dataclass
class Verification:
    """What verify found; true when every element is right.

    errors of count elements are wrong. max_abs and max_rel are the largest |out - ref| and |out - ref| / |ref| (ref not
    0) where both are finite, and nan when an element is wrong because one of the two is not; worst is the index of the
    element that exceeds its limit most (or comes nearest to it) and worst_ratio by how much: above 1 is wrong.
    nonfinite counts the NaN and Inf of out, ref_nonfinite those of ref. max_ref is the largest finite |ref|.
    """

    ok: bool
    errors: int
    count: int
    max_abs: float
    max_rel: float
    worst: tuple[int, ...]
    worst_ratio: float
    nonfinite: int
    ref_nonfinite: int
    max_ref: float
    rtol: float
    atol: float
    out: Tensor = field(repr=False)
    ref: Tensor = field(repr=False)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def percent(self) -> float:
        """Wrong elements in percent."""
        return 100.0 * self.errors / self.count

    def __str__(self) -> str:
        return (
            f"{self.errors} of {self.count} elements ({self.percent:.3g} %) differ by more than atol {self.atol:.3g} + "
            f"rtol {self.rtol:.3g} * |ref|: largest difference {self.max_abs:.3g}, relative {self.max_rel:.3g}; "
            f"worst at {self.worst}: got {_value(self.out, self.worst)!r}, expected {_value(self.ref, self.worst)!r}; "
            f"{self.nonfinite} NaN or Inf, {self.ref_nonfinite} in the reference"
        )

    def report(self, most: int = _SHOWN) -> str:
        """The numbers, and the first `most` wrong elements with both values. This copies both tensors to the host."""
        if isinstance(most, bool) or not isinstance(most, numbers.Integral):
            raise TypeError(f"report: most must be an int, got {type(most).__name__}")
        lines, most = [str(self)], max(0, most)
        if self.errors:
            out, ref = _host(self.out), _host(self.ref)
            places = np.argwhere(_wrong(out, ref, self.rtol, self.atol))
            for place in map(tuple, places[:most].tolist()):
                a, b = out[place].item(), ref[place].item()
                lines.append(f"  {place}: got {a!r}, expected {b!r}, difference {_difference(a, b):.3g}")
            if len(places) > most:
                lines.append(f"  and {len(places) - most} more")
        return "\n".join(lines)


def verify(
    out: Tensor, ref: Tensor, *, rtol: float | None = None, atol: float | None = None, accumulations: float = 1
) -> Verification:
    """Compares tensor `out` with the reference `ref` on their device; returns a Verification, true when all is right.

    An element is right when |out - ref| <= atol + rtol |ref| and both are finite, or when both are the same infinity;
    NaN is never right. Defaults: `tolerance` of the coarser of the two dtypes for results of `accumulations` roundings
    and of the size of ref; integers and booleans must be equal. ValueError: shapes or devices that differ, no elements,
    a reference of nothing but NaN. TypeError: no tensors, or a float beside an integer.
    """
    _check_pair("verify", "out", out, "ref", ref)
    out, ref = out.detach(), ref.detach()
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (is_finite(value) and value >= 0):
            raise ValueError(f"verify: {name} must be finite and not negative, got {value!r}")
    if not (is_finite(accumulations) and accumulations >= 1):
        raise ValueError(f"verify: accumulations must be a number of at least 1, got {accumulations!r}")
    low, high, _, nans, infs = _C.stats(ref)
    if nans == ref.numel():
        raise ValueError(f"verify: ref must hold a value that is not NaN, got NaN in all {nans} elements")
    if rtol is None or atol is None:
        finite = ref.numel() - nans - infs > 0
        dtype = max(out.dtype, ref.dtype, key=lambda dtype: format_of(dtype).roundoff)
        magnitude = max(abs(low), abs(high)) if finite else 0.0
        default = tolerance(dtype, accumulations=accumulations, magnitude=magnitude)
        rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    r = _C.compare(out, ref, rtol, atol)
    errors, place = int(r["errors"]), np.unravel_index(int(r["worst"]), out.shape) if out.ndim else ()
    nonfinite, ref_nonfinite = int(r["out_nan"] + r["out_inf"]), int(r["ref_nan"] + r["ref_inf"])
    # The kernel's ratio for a wrong element that is not finite. Of finite ones it is a distance near overflow.
    beyond = r["worst_ratio"] == math.inf and nonfinite + ref_nonfinite > 0
    max_abs, max_rel = (math.nan, math.nan) if beyond else (r["max_abs"], r["max_rel"])
    return Verification(
        ok=errors == 0, errors=errors, count=out.numel(), max_abs=max_abs, max_rel=max_rel,
        worst=tuple(map(int, place)), worst_ratio=r["worst_ratio"], nonfinite=nonfinite, ref_nonfinite=ref_nonfinite,
        max_ref=r["max_ref"], rtol=rtol, atol=atol, out=out, ref=ref,
    )  # fmt: skip


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    accumulations: float = 1,
    msg: str | None = None,
) -> None:
    """Raises AssertionError, with the first mismatches, unless `verify` finds every element right.

    actual and expected are tensors, arrays, lists or numbers; what is no tensor goes to the device of the other, and
    integers beside floats are taken as floats. Tolerances and TypeError are verify's; where verify raises ValueError,
    what is raised here is an AssertionError as well.
    """
    a, b = _as_tensors(actual, expected)
    more = f"\n{msg}" if msg else ""
    try:
        _check_pair("assert_close", "actual", a, "expected", b)
        found = verify(a, b, rtol=rtol, atol=atol, accumulations=accumulations)
    except ValueError as error:
        text = str(error).replace("verify: ref", "verify: expected").replace("verify:", "assert_close:")
        raise NotComparableError(text + more) from None
    if not found.ok:
        raise AssertionError(f"assert_close: {found.report()}{more}")


def reduce_max_abs(tensor: Tensor) -> float:
    """The largest absolute value, a float found on the tensor's device; NaN when one is in it. ValueError for none."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"reduce_max_abs: tensor must be a Tensor, got {type(tensor).__name__}")
    if tensor.numel() == 0:
        raise ValueError(f"reduce_max_abs: tensor must not be empty, got shape {tuple(tensor.shape)}")
    low, high, _, nans, infs = _C.stats(tensor)
    return math.nan if nans else math.inf if infs else max(abs(low), abs(high))


def _check_pair(op: str, a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    for name, value in ((a_name, a), (b_name, b)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    if tuple(a.shape) != tuple(b.shape):
        raise ValueError(f"{op}: {a_name} must have shape {tuple(b.shape)}, got {tuple(a.shape)}")
    if a.numel() == 0:
        raise ValueError(f"{op}: {a_name} must not be empty, got shape {tuple(a.shape)}")
    if a.device != b.device:
        raise ValueError(f"{op}: {a_name} must be on {b.device}, got {a.device}")
    if a.dtype.is_floating_point != b.dtype.is_floating_point:
        kind = "floating point" if b.dtype.is_floating_point else "an integer dtype"
        raise TypeError(f"{op}: {a_name} must be {kind} like {b_name}, got {a.dtype.name}")


def _as_tensors(actual: Any, expected: Any) -> list[Tensor]:
    """Both as tensors. A value that is no tensor takes the device of the other."""
    given = [
        x if isinstance(x, Tensor) else _as_array(name, x) for name, x in (("actual", actual), ("expected", expected))
    ]
    floats = any(x.dtype.is_floating_point if isinstance(x, Tensor) else x.dtype.kind == "f" for x in given)
    devices = [x.device for x in given if isinstance(x, Tensor)]
    out: list[Tensor] = []
    for name, x in zip(("actual", "expected"), given, strict=True):
        if not isinstance(x, Tensor):
            if x.dtype.kind not in "fiub":
                raise TypeError(f"assert_close: {name} must hold {_no_number(x)}")
            if x.dtype.kind == "f":
                x = x.astype(np.float64) if x.dtype.itemsize > 8 else x
            elif floats:
                x = x.astype(np.float64)
            elif x.dtype not in (np.int32, np.int64, np.uint8, np.bool_):
                if x.size and int(x.max()) >= 2**63:
                    raise TypeError(f"assert_close: {name} must hold integers of 64 bits, got {int(x.max())}")
                x = x.astype(np.int64)
            x = _C.tensor(np.ascontiguousarray(x).reshape(x.shape))
        out.append(x.detach().to(devices[0]) if len(devices) == 1 else x.detach())
    return out


def _as_array(name: str, value: Any) -> np.ndarray:
    """A list, number or array as an array; what makes no rectangle is refused in words."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        kind = type(value).__name__
        raise ValueError(
            f"assert_close: {name} must be a rectangle of numbers, got a {kind} whose parts differ in shape"
        ) from None


def _no_number(array: np.ndarray) -> str:
    """The rule that an array of something else breaks, and by what."""
    if array.dtype.kind == "c":
        return f"real numbers, got {array.dtype}"
    values = array.reshape(-1).tolist() if array.dtype.kind in "OUS" else []
    for value in values:
        if not isinstance(value, numbers.Real):
            return f"numbers, got {value!r:.60}"
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        return f"integers of 64 bits, got {max(values, key=abs)}"
    return f"numbers, got {array.dtype}"


def _host(tensor: Tensor) -> np.ndarray:
    return (tensor.to(_C.float64) if tensor.dtype.is_floating_point else tensor).to("cpu").numpy()


def _value(tensor: Tensor, index: tuple[int, ...]) -> float:
    for i in index:
        tensor = _C.select(tensor, 0, i)
    return tensor.item()


def _wrong(out: np.ndarray, ref: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        limit = atol + rtol * np.abs(ref.astype(np.float64))
        if out.dtype.kind != "f":  # the distance is taken before it is rounded to a double, as the kernel does
            a, b = (x.astype(np.int64) for x in (out, ref))
            return ~((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).astype(np.float64) <= limit)
        distance = np.abs(out - ref)
        finite = np.isfinite(out) & np.isfinite(ref)
        return ~np.where(finite, (distance <= limit) & np.isfinite(distance), out == ref)


def _difference(a: float, b: float) -> float:
    return abs(a - b)  # Python's numbers: exact for integers
