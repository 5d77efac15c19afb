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
from .references import normal_cdf, sigmoid
from .table import TINY, UNIT_ROUNDOFF, Case, Op, accumulator, array, as_list, gradients, references_of

# ---- backends --------------------------------------------------------------------------------------------------------


def backends(entry: Op, device: str | None = None) -> list[str | None]:
    """The named implementations that an entry is run on; [None] when there is only one kernel."""
    if entry.selects is None:
        return [None]
    list_of = _C.gemm_backends if entry.selects == "gemm" else _C.attention_backends
    return list(list_of(_C.get_default_device() if device is None else _C.device(device)))


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
    """The sum of the absolute values of the terms of each element of `ref`, to which rounding errors are proportional.
    An op with several outputs may give one for each shape; without one it is |ref|.
    """
    sizes = [] if entry.magnitude is None else as_list(entry.magnitude(*arrays, **c.kwargs))
    fitting = [size for size in map(np.asarray, sizes) if size.shape == ref.shape]
    return np.maximum.reduce(fitting) if fitting else np.abs(ref)


def forward_tolerance(
    entry: Op, c: Case, arrays: Sequence[np.ndarray], refs: Sequence[np.ndarray], i: int, dtype: str, out: str
) -> np.ndarray:
    """The absolute error that output i may have, [shape of the output]. out: its dtype; dtype: that of the inputs."""
    size = magnitude(entry, c, arrays, refs[i])
    unit = max(UNIT_ROUNDOFF.get(out, 0.0), UNIT_ROUNDOFF.get(dtype, 0.0) if len(refs) == 1 else 0.0)
    work = UNIT_ROUNDOFF[accumulator(dtype)] if dtype in UNIT_ROUNDOFF else 0.0
    lost = 1.0 if entry.floors is None else entry.floors(*arrays, **c.kwargs)
    return (entry.roundings * unit + additions(entry, c, arrays) * work) * size + lost * TINY.get(out, 0.0)


# Ops whose gradients hold one term an element and output element: nothing but a broadcast adds them up.
ELEMENTWISE_KERNELS = {"unary", "unary_bwd", "binary", "where", "swiglu_fwd", "swiglu_bwd"}
ONE_TERM = {
    "cast",
    "cat",
    "clone",
    "contiguous",
    "expand",
    "pack",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
}
ONE_TERM |= {"to_device", "transpose", "unsqueeze", "view", "sum", "mean", "amax", "amin"}


def one_term(entry: Op) -> bool:
    """Whether each element of a gradient is a single product, or the sum of those that a broadcast brings together."""
    kernels = set(entry.kernels)
    return entry.op in ONE_TERM or (bool(kernels) and kernels <= ELEMENTWISE_KERNELS)


def gated(x: np.ndarray) -> np.ndarray:
    """The absolute values that are added up to silu'(x) = s + x s (1 - s)."""
    s = sigmoid(x)
    return s + np.abs(x) * s * (1 - s)


def bell(x: np.ndarray, cdf: np.ndarray) -> np.ndarray:
    """The absolute values added up to gelu'(x) = cdf + x pdf; the factor 1 + x^2 is for the rounding of x^2 in exp."""
    return (np.abs(cdf) + np.abs(x) * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)) * (1 + x * x)


def cubic_bell(x: np.ndarray) -> np.ndarray:
    """The absolute values added up to gelu'(x) of the tanh form, s + x s (1 - s) v' with s = sigmoid(v) and
    v = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    """
    v = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    s, slope = sigmoid(v), 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
    return (s + np.abs(x) * s * (1 - s) * slope) * (1 + np.abs(v))


def parts(entry: Op, c: Case, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Where f' is itself a sum that may cancel, or an ill-conditioned function: the absolute values added up, by input.
    Arrays have the shape of the output; for every other op and input these are |f'|.
    """
    x = arrays[0] if arrays else np.zeros(0)
    if entry.op == "silu":
        return {0: gated(x)}
    if entry.op == "gelu":
        return {0: cubic_bell(x) if c.kwargs.get("approximate") == "tanh" else bell(x, normal_cdf(x))}
    if entry.op == "erf":
        return {0: 2 / np.sqrt(np.pi) * np.exp(-x * x) * (1 + x * x)}
    if entry.op == "swiglu" and len(arrays) == 2:
        return {0: gated(x) * np.abs(arrays[1])}
    if entry.op == "pow" and len(arrays) == 2:
        b, log = arrays[1], np.abs(np.log(x))
        return {0: np.abs(b) * x ** (b - 1) * (1 + np.abs(b - 1) * log), 1: x**b * log * (1 + np.abs(b) * log)}
    return {}


def sum_to(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`a` summed to a shape that broadcasts to its own."""
    a = a.sum(tuple(range(a.ndim - len(shape))))
    return a.sum(tuple(d for d, n in enumerate(shape) if n == 1 and a.shape[d] != 1), keepdims=True).reshape(shape)


def gradient_magnitude(
    entry: Op, c: Case, arrays: Sequence[np.ndarray], dys: Sequence[np.ndarray], want: np.ndarray, i: int
) -> np.ndarray:
    """The absolute values that were added up to each element of the gradient of input i, for a one_term entry."""
    if entry.op == "swiglu" and len(arrays) == 1:  # both operands in one: the parts of each half lie side by side
        gate, up = np.split(arrays[0], 2, -1)
        return np.concatenate([gated(gate) * np.abs(up * dys[0]), np.abs(gate * sigmoid(gate) * dys[0])], -1)
    shape = dys[0].shape if dys else want.shape
    grown = len(dys) == 1 and want.shape != shape and dys[0].size > want.size
    if entry.op in ONE_TERM and entry.op != "expand":
        return np.abs(want)
    wide = [np.broadcast_to(a, shape) for a in arrays] if grown or entry.op != "expand" else list(arrays)
    with np.errstate(all="ignore"):
        special = parts(entry, c, wide).get(i)
    if special is not None:
        return sum_to(special * np.abs(dys[0]), want.shape)
    if not grown:
        return np.abs(want)
    terms = gradients(entry, c, wide, "float64", dys)[1][i]  # nothing is added up here
    return np.abs(want) if terms is None else sum_to(np.abs(array(terms)), want.shape)


def gradient_tolerance(
    entry: Op,
    c: Case,
    arrays: Sequence[np.ndarray],
    dys: Sequence[np.ndarray],
    want: np.ndarray,
    dtype: str,
    i: int | None = None,
) -> np.ndarray | float:
    """Of the gradient of input i in `dtype` that should be `want`.

    Elementwise entries, and those that only move elements, have a tolerance for each element: their roundings times
    what was added up there. Elsewhere it is one number, as a gradient may be a sum over everything. Without `i` it is
    the widest of those inputs that have the shape of `want`.
    """
    unit, work = entry.grad_roundings * UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    if one_term(entry):
        inputs = [i] if i is not None else [n for n in entry.differentiable(c) if arrays[n].shape == want.shape]
        terms = max(1.0, sum(dy.size for dy in dys) / max(1, want.size))
        unit += ((0 if entry.op in ("sum", "mean") else additions(entry, c, arrays)) + terms + 16) * work
        sizes = [gradient_magnitude(entry, c, arrays, dys, want, n) for n in inputs]
        return unit * np.maximum.reduce(sizes) + terms * TINY[dtype]
    terms = max([1, *(a.size for a in arrays)])
    unit += (additions(entry, c, arrays) + np.sqrt(terms) + 16) * work
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


def spread_of(entry: Op, c: Case, arrays: Sequence[np.ndarray], dys: Sequence[np.ndarray]) -> float:
    """The norm of the sizes of all terms of sum(reference * dy)."""
    refs = [r for r in references_of(entry, c, arrays) if r.dtype.kind == "f"]
    parts = [magnitude(entry, c, arrays, r) * dy for r, dy in zip(refs, dys)]
    return float(np.sqrt(sum((p * p).sum() for p in parts)))


class Slope:
    """The derivative of sum(reference * dy) along `direction` of one input, with a bound of its own error.

    From D(h), the central difference quotient of step h: (4 D(h) - D(2h)) / 3, whose error falls with h^4. Done with h
    and with 2h: the difference of the two is about 15 times the error of the finer one, and far more at a kink. To it
    comes what the rounding of the reference's own sums makes of the quotients.
    """

    def __init__(
        self,
        entry: Op,
        c: Case,
        arrays: Sequence[np.ndarray],
        dys: Sequence[np.ndarray],
        i: int,
        direction: np.ndarray,
        spread: float,
    ) -> None:
        """spread: that of the case, from spread_of()."""
        self.direction = direction
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
    inputs = entry.differentiable(c)
    spread = spread_of(entry, c, arrays, dys) if inputs else 0.0  # once: the same for all directions
    return {
        i: [
            Slope(entry, c, arrays, dys, i, d, spread)
            for d in (directions(arrays[i], rng, 0, 2) if c.big else directions(arrays[i], rng))
        ]
        for i in inputs
    }


def judge_slope(slope: Slope, gradient: Any, element: np.ndarray | float) -> tuple[float, str]:
    """(error / tolerance, what is wrong or "") of a gradient along one direction; `element`: every element's tolerance,
    or one for all."""
    got = float((array(gradient) * slope.direction).sum())
    limit = slope.error + 4 * float(np.sqrt(((element * slope.direction) ** 2).sum()))
    error = abs(got - slope.value)
    if error <= limit:
        return error / limit if error else 0.0, ""
    ratio = error / limit if np.isfinite(error) and limit > 0 else np.inf
    return ratio, f"gradient {got:.9g}, difference quotient {slope.value:.9g} with tolerance {limit:.2e}"
