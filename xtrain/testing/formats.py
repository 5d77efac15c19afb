"""Number formats, and the tolerance that follows from them. The derivation is in docs/reference/numerics.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from .._types import is_real


@dataclass(frozen=True)
class Format:
    """mantissa: stored bits after the point. min_exponent: that of the smallest normal number. Integers are exact."""

    name: str
    mantissa: int = 0
    min_exponent: int = 0
    exact: bool = False

    @property
    def roundoff(self) -> float:
        """Largest relative error of rounding a normal number to the nearest: half a unit in the last place."""
        return 0.0 if self.exact else math.ldexp(0.5, -self.mantissa)

    def half_unit(self, magnitude: float) -> float:
        """Largest absolute error of rounding a number of at most this size: 2^(exponent - mantissa) / 2. Below the
        smallest normal number the spacing of the subnormals takes over.
        """
        if self.exact:
            return 0.0
        exponent = math.frexp(magnitude)[1] - 1 if magnitude > 0 else self.min_exponent
        return math.ldexp(0.5, max(exponent, self.min_exponent) - self.mantissa)


FORMATS = {
    f.name: f
    for f in (
        Format("float64", 52, -1022),
        Format("float32", 23, -126),
        Format("tf32", 10, -126),
        Format("float16", 10, -14),
        Format("bfloat16", 7, -126),
        Format("float8_e4m3", 3, -6),
        Format("float8_e5m2", 2, -14),
        Format("float4_e2m1", 1, 0),
        *(Format(name, exact=True) for name in ("int8", "int16", "int32", "int64", "uint8", "bool")),
    )
}
_OTHER_NAMES = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2", "float8_e4m3fn": "float8_e4m3",
    "fp4": "float4_e2m1", "fp4_e2m1": "float4_e2m1", "float4_e2m1fn": "float4_e2m1",
}  # fmt: skip


def is_finite(value: object) -> TypeGuard[float]:
    """Whether value is a real number, of Python or NumPy, that a float64 can hold."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def format_of(dtype: Any, argument: str = "compute") -> Format:
    """The Format of a name or of a dtype object of xtrain, NumPy or PyTorch. TypeError or ValueError for another."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    if not isinstance(dtype, (str, Format)) and not any(hasattr(dtype, a) for a in ("name", "__name__", "itemsize")):
        raise TypeError(f"tolerance: {argument} must be a dtype or its name, got {dtype!r}")
    name = name.removeprefix("torch.")
    found = FORMATS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise ValueError(f"tolerance: {argument} must be one of {', '.join(FORMATS)}, got {name}")
    return found


def tolerance(
    compute: Any, out: Any = None, acc: Any = None, accumulations: float = 1, magnitude: float = 1.0
) -> tuple[float, float]:
    """(rtol, atol): a right result differs from the exact one by at most atol + rtol |exact|.

    compute: format of the operands; out: of the result (default compute); acc: of the sums (default float32, float64
    for float64, int32 for integers). Each is a dtype or a name: float64, float32, tf32, float16, bfloat16, float8_e4m3,
    float8_e5m2, float4_e2m1, or an integer, which is exact. accumulations: how many roundings a result collects in
    `acc`, as a rule the terms of its sum. magnitude: the largest absolute value that a result or a partial sum takes.

        rtol = max(u(compute), u(out), n u(acc))                       u = 2^-mantissa / 2
        atol = max(h(compute), h(out), n h(acc))                       h = 2^(exponent(magnitude) - mantissa) / 2

    ValueError for other formats and for numbers outside their ranges.
    No constant is fitted: docs/reference/numerics.md derives it, tests/testing/test_testing_tolerance.py measures it.
    """
    of_compute = format_of(compute)
    of_out = of_compute if out is None else format_of(out, "out")
    if acc is None:
        acc = "int32" if of_compute.exact else "float64" if of_compute.name == "float64" else "float32"
    of_acc = format_of(acc, "acc")
    if not (is_finite(accumulations) and accumulations >= 1):
        raise ValueError(f"tolerance: accumulations must be a number of at least 1, got {accumulations!r}")
    if not (is_finite(magnitude) and magnitude >= 0):
        raise ValueError(f"tolerance: magnitude must be finite and not negative, got {magnitude!r}")
    accumulations, magnitude = float(accumulations), float(magnitude)
    rtol = max(of_compute.roundoff, of_out.roundoff, accumulations * of_acc.roundoff)
    atol = max(
        of_compute.half_unit(magnitude), of_out.half_unit(magnitude), accumulations * of_acc.half_unit(magnitude)
    )
    return rtol, atol
