"""What counts as right: backends to run, tolerances of results and gradients, and gradients of the NumPy references.

The gradient of an op in float64 is compared with difference quotients of its NumPy reference, which shares nothing with
the kernels; the gradients of the lower formats are then compared with the float64 gradient on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _C
from .table import TINY, UNIT_ROUNDOFF, Case, Op, accumulator, array, references_of

# ---- backends --------------------------------------------------------------------------------------------------------


def backends(entry: Op, device: str = "cpu") -> list[str | None]:
    """The named implementations that an entry is run on; [None] when there is only one kernel."""
    if entry.selects is None:
        return [None]
    list_of = _C.gemm_backends if entry.selects == "gemm" else _C.attention_backends
    return list(list_of(_C.device(device)))


def use(entry: Op, name: str | None) -> str | None:
    """Puts a named backend in force and returns the one before."""
    if entry.selects == "gemm":
        return _C.use_gemm_backend(name)
    return _C.use_attention_backend(name) if entry.selects == "attention" else None


@contextlib.contextmanager
def using(entry: Op, name: str | None) -> Iterator[None]:
    before = use(entry, name)
    try:
        yield
    finally:
        use(entry, before)


# ---- tolerances ------------------------------------------------------------------------------------------------------


def result_dtype(entry: Op, out: Any, dtype: str) -> str:
    """The dtype that a result must have."""
    if entry.out_dtype == "any":
        return out.dtype.name
    if entry.out_dtype == "loss":  # statistics stay in the accumulator's format, or come back in the input's
        return out.dtype.name if out.dtype.name in (dtype, accumulator(dtype)) else accumulator(dtype)
    return dtype if entry.out_dtype == "same" else entry.out_dtype


def additions(entry: Op, c: Case, arrays: Sequence[np.ndarray]) -> float:
    """Roundings in the accumulator's format of one element of the result."""
    return entry.accumulations(*arrays, **c.kwargs) if callable(entry.accumulations) else entry.accumulations


def magnitude(entry: Op, c: Case, arrays: Sequence[np.ndarray], ref: np.ndarray) -> np.ndarray:
    """What was added up to `ref`. When an op has several outputs its magnitude applies to those of its shape."""
    size = None if entry.magnitude is None else np.asarray(entry.magnitude(*arrays, **c.kwargs))
    return np.abs(ref) if size is None or size.shape != ref.shape else size


def forward_tolerance(
    entry: Op, c: Case, arrays: Sequence[np.ndarray], refs: Sequence[np.ndarray], i: int, dtype: str, out: str
) -> np.ndarray:
    """Of output i, whose dtype is `out`, computed in `dtype`."""
    size = magnitude(entry, c, arrays, refs[i])
    unit = max(UNIT_ROUNDOFF.get(out, 0.0), UNIT_ROUNDOFF.get(dtype, 0.0) if len(refs) == 1 else 0.0)
    work = UNIT_ROUNDOFF[accumulator(dtype)] if dtype in UNIT_ROUNDOFF else 0.0
    return (entry.roundings * unit + additions(entry, c, arrays) * work) * size + TINY.get(out, 0.0)


def gradient_tolerance(
    entry: Op, c: Case, arrays: Sequence[np.ndarray], dys: Sequence[np.ndarray], want: np.ndarray, dtype: str
) -> float:
    """Of a gradient in `dtype` that should be `want`: one number, as a gradient may be a sum over everything."""
    terms = max([1, *(a.size for a in arrays)])
    unit = entry.grad_roundings * UNIT_ROUNDOFF[dtype]
    unit += (additions(entry, c, arrays) + np.sqrt(terms) + 16) * UNIT_ROUNDOFF[accumulator(dtype)]
    scale = np.abs(want).max(initial=0.0) + max([0.0, *(np.abs(dy).max(initial=0.0) for dy in dys)])
    return unit * scale + TINY[dtype]


# ---- gradients of the references -------------------------------------------------------------------------------------


def directions(a: np.ndarray, rng: np.random.Generator, single: int = 6, random: int = 4) -> list[np.ndarray]:
    """Every coordinate of a small input; for a big one some coordinates and some random directions (projections)."""
    if a.size <= 24:
        picks, random = range(a.size), 0
    else:
        picks = rng.choice(a.size, single, replace=False)
    units = []
    for i in picks:
        d = np.zeros(a.size)
        d[i] = 1.0
        units.append(d.reshape(a.shape))
    return units + [rng.choice([-1.0, 1.0], a.shape) / np.sqrt(a.size) for _ in range(random)]


class Slope:
    """The derivative of sum(reference * dy) along `direction` of one input, with a bound of its own error.

    From D(h), the central difference quotient of step h: (4 D(h) - D(2h)) / 3, whose error falls with h^4. Done with h
    and with 2h: the difference of the two is about 15 times the error of the finer one, and far more at a kink. To it
    comes what the rounding of the reference's own sums makes of the quotients.
    """

    def __init__(
        self, entry: Op, c: Case, arrays: Sequence[np.ndarray], dys: Sequence[np.ndarray], i: int, direction: np.ndarray
    ) -> None:
        self.direction = direction
        refs = [r for r in references_of(entry, c, arrays) if r.dtype.kind == "f"]
        parts = [magnitude(entry, c, arrays, r) * dy for r, dy in zip(refs, dys)]
        spread = float(np.sqrt(sum((p * p).sum() for p in parts)))
        noise = 4 * (4 + additions(entry, c, arrays)) * UNIT_ROUNDOFF["float64"] * spread

        def loss(step: float) -> float:
            moved = [*arrays[:i], arrays[i] + step * direction, *arrays[i + 1 :]]
            outs = [r for r in references_of(entry, c, moved) if r.dtype.kind == "f"]
            return sum(float((o * dy).sum()) for o, dy in zip(outs, dys))

        best = (0.0, np.inf)
        for h in (2.0**-10, 2.0**-13):
            d1, d2, d4 = ((loss(k * h) - loss(-k * h)) / (2 * k * h) for k in (1, 2, 4))
            fine, coarse = (4 * d1 - d2) / 3, (4 * d2 - d4) / 3
            best = min(best, (fine, abs(fine - coarse) + 1.5 * noise / h), key=lambda pair: pair[1])
            if best[1] <= 1e-8 * max(abs(best[0]), spread):
                break
        self.value, self.error = best


def slopes(
    entry: Op, c: Case, arrays: Sequence[np.ndarray], dys: Sequence[np.ndarray], rng: np.random.Generator
) -> dict[int, list[Slope]]:
    """For every input that has a gradient: slopes along its directions (two random ones when the case is big)."""
    return {
        i: [
            Slope(entry, c, arrays, dys, i, d)
            for d in (directions(arrays[i], rng, 0, 2) if c.big else directions(arrays[i], rng))
        ]
        for i in entry.differentiable(c)
    }


def judge_slope(slope: Slope, gradient: Any, element: float) -> tuple[float, str]:
    """(error / tolerance, what is wrong or "") of a gradient along one direction; `element`: an element's tolerance."""
    got = float((array(gradient) * slope.direction).sum())
    limit = slope.error + element * float(np.sqrt((slope.direction**2).sum())) * 4
    error = abs(got - slope.value)
    if error <= limit:
        return error / limit if error else 0.0, ""
    ratio = error / limit if np.isfinite(error) and limit > 0 else np.inf
    return ratio, f"gradient {got:.9g}, difference quotient {slope.value:.9g} with tolerance {limit:.2e}"
