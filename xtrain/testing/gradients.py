"""grad_check: gradients against finite differences. The core sees NumPy arrays and a callable: no device, no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from .._types import is_whole
from ..autograd import no_grad
from .formats import format_of, is_finite

# (eps, rtol, atol): float32's are those of the usual harness; float64's error is far below them for smooth functions.
DEFAULTS = {"float32": (1e-3, 2e-2, 1e-4), "float64": (1e-5, 1e-6, 1e-4)}
_EVERY_ELEMENT = 4096  # larger inputs are checked in blocks
_BLOCKS = 32
_SINGLES = 8  # of the largest gradients, and as many at random, that are looked at one by one besides
_SCALES = (1 / 64, 1 / 8, 1.0, 8.0, 64.0)  # of eps, tried where the caller leaves it to us
_SEARCH = 22  # comparisons that may be spent on naming elements, per input
# A block may be off by this many typical elements that are each off by rtol: room for a gradient's own rounding.
_SHARED = 5.0
# Six standard deviations of a residual, in those of _Probe.unrest: both are sums of the same noisy differences.
_NOISE = 6.0 * math.sqrt((45**2 + 9**2 + 1) / 42.0) / 30.0
_QUANTUM = 55 / 30  # the most that rounding every value of the function makes of a residual

Loss = Callable[[int, np.ndarray], tuple[float, float]]  # (input's number, its values) -> (value, its rounding error)
# What is checked (number, values, gradient), its loss, and what puts the values back.
Parts = tuple[list[tuple[int, np.ndarray, np.ndarray]], Loss, Callable[[], None]]


@dataclass(frozen=True)
class GradMismatch:
    """One comparison: input number, index in it, the finite difference and the gradient given for it. relative is
    |numeric - analytic|, less the noise of the difference, over |numeric| + |analytic| + atol. Of a block of `size`
    elements, index is the first of them, and the values are derivatives along its direction.
    """

    input: int
    index: tuple[int, ...]
    numeric: float
    analytic: float
    relative: float
    size: int = 1

    def __str__(self) -> str:
        block = f" (one of {self.size} elements moved together)" if self.size > 1 else ""
        return (
            f"input {self.input} at {self.index}{block}: gradient {self.analytic:.9g}, finite difference "
            f"{self.numeric:.9g}, relative error {self.relative:.3g}"
        )


@dataclass
class GradCheck:
    """What grad_check found; true when ok. worst is the GradMismatch of the largest relative error, max_rel that error,
    failures all that exceed rtol, worst first; checked counts the comparisons made. resolution: an element that is off
    by more than this is found, `typical` being the root mean square of that input's gradients; of several inputs, the
    one that is seen worst. blocks: an input was checked in blocks.
    """

    ok: bool
    max_rel: float
    worst: GradMismatch
    failures: list[GradMismatch]
    checked: int
    rtol: float
    resolution: float = 0.0
    typical: float = 0.0
    blocks: bool = False

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{len(self.failures)} of {self.checked} gradients differ by more than {self.rtol:.3g}"
        lines = [head, *(f"  {f}" for f in self.failures[:10] or [self.worst])]
        if len(self.failures) > 10:
            lines.append(f"  and {len(self.failures) - 10} more")
        if self.blocks or self.resolution > self.typical:
            lines.append(
                f"  an element is surely found when it is off by {self.resolution:.3g}; a typical gradient is "
                f"{self.typical:.3g}"
            )
        return "\n".join(lines)


def grad_check(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    grads: Sequence[Any] | Callable[..., Sequence[Any]] | None = None,
    eps: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> GradCheck:
    """Compares gradients of fn(*inputs) with central differences; returns a GradCheck, true when all agree.

    inputs: Tensors, on any device: fn returns a Tensor or a tuple of them, a fixed random weighting of whose elements
    is differentiated, and the gradients of the inputs that require one are checked. Their values change during the
    check and are put back, so fn may also read them from outside its arguments. Or NumPy arrays, with `grads`: fn
    returns a number, grads is a list of arrays (None: unchecked) or a callable that returns it for *inputs.

    Agreement: |num - ana| / (|num| + |ana| + atol) <= rtol beyond what rounding fn's results makes of num; NaN never
    agrees. The difference quotient uses the step that rounding to the dtype leaves of eps * max(1, |x|). Defaults (eps,
    rtol, atol): 1e-3, 2e-2, 1e-4 in float32; 1e-5, 1e-6, 1e-4 in float64.

    projections: None checks every element of inputs of up to 4096, larger ones in 32 blocks that share out the
    elements; an integer sets that number for all inputs, 0 checks every element. The elements of a block move together,
    each by its whole step and in a random direction, so that a single wrong one shows undiminished; its limit is the
    noise of these very differences, measured, plus 5 rtol of a typical element. A block that fails is halved until the
    elements at fault are found. The 8 largest gradients and 8 random ones are checked by themselves as well. At most
    500 evaluations an input; without `eps` the step is the one of eps / 64 to 64 eps that sees most. The result's
    `resolution` is the error of one element that is surely found (unless others in its block cancel it): compare it
    with `typical`. A sum in float32 hides much: fn should return the tensor and not its sum.

    ValueError or TypeError: nothing to check, empty inputs, wrong dtypes or shapes. RuntimeError: Tensors inside
    no_grad().
    """
    given = _as_list(inputs)
    _check_options(fn, projections, (eps, rtol, atol), seed)
    random = np.random.Generator(np.random.PCG64(seed))
    checked, loss, restore = _parts(fn, given, grads, random)
    found: list[tuple[bool, GradMismatch]] = []
    limit, resolution, typical, in_blocks = 0.0, 0.0, 0.0, False
    try:
        for number, values, analytic in checked:
            name = "float64" if values.dtype == np.float64 else "float32"
            chosen = [d if own is None else own for d, own in zip(DEFAULTS[name], (eps, rtol, atol), strict=True)]
            limit = max(limit, chosen[1])
            count = projections
            if count is None:
                count = 0 if values.size <= _EVERY_ELEMENT else _BLOCKS
            with np.errstate(all="ignore"):  # what is not finite is found, and reported in words
                change = _Change(number, loss, values, analytic, *chosen)
                if count == 0:
                    rows = [change.element(j) for j in range(values.size)]
                    seen = change.resolution
                else:
                    rows, seen = _Blocks(change, random, _SCALES if eps is None else (1.0,)).check(count)
                    in_blocks = True
            size = change.typical()
            if typical == 0 or (size > 0 and seen * typical > resolution * size):
                resolution, typical = seen, size
            found += [(row.relative <= chosen[1], row) for row in rows]
    finally:
        restore()
    worst = max((row for _, row in found), key=lambda row: row.relative)
    failures = sorted((row for good, row in found if not good), key=lambda row: -row.relative)
    return GradCheck(not failures, worst.relative, worst, failures, len(found), limit, resolution, typical, in_blocks)


def _check_options(fn: Any, projections: Any, steps: tuple[Any, Any, Any], seed: Any) -> None:
    """TypeError or ValueError for options of grad_check; steps: eps, rtol and atol."""
    if not callable(fn):
        raise TypeError(f"grad_check: fn must be callable, got {type(fn).__name__}")
    if projections is not None and not (is_whole(projections) and projections >= 0):
        raise ValueError(f"grad_check: projections must be None or an int of at least 0, got {projections!r}")
    for text, value in zip(("eps", "rtol", "atol"), steps, strict=True):
        if value is not None and not (is_finite(value) and value > 0):
            raise ValueError(f"grad_check: {text} must be positive and finite, got {value!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"grad_check: seed must be an int of at least 0, got {seed!r}")


def _parts(fn: Callable[..., Any], inputs: list[Any], grads: Any, random: np.random.Generator) -> Parts:
    """The Parts of a check of Tensors, where any input is one, or of arrays; see _of_tensors and _of_arrays."""
    if not any(isinstance(x, Tensor) for x in inputs):
        return _of_arrays(fn, inputs, grads)
    if not _C.is_grad_enabled():
        raise RuntimeError("grad_check: gradients of Tensors must be recorded, got a call inside no_grad()")
    if grads is not None:
        raise ValueError("grad_check: grads must be None for Tensors, whose gradients come from backward, got a value")
    return _of_tensors(fn, inputs, random)


class _Change:
    """How loss(number, values) -> (value, its rounding error) changes with the values: the host-only core."""

    def __init__(
        self, number: int, loss: Loss, values: np.ndarray, analytic: np.ndarray, eps: float, rtol: float, atol: float
    ) -> None:
        self.number, self.loss, self.values = number, loss, values
        self.x, self.g = values.reshape(-1), np.asarray(analytic, np.float64).reshape(-1)
        self.eps, self.rtol, self.atol = eps, rtol, atol
        self.resolution = 0.0
        self.here, self.rounding = loss(number, values)

    def typical(self) -> float:
        """The root mean square of the gradients that are finite; 0 where none is."""
        known = self.g[np.isfinite(self.g)]
        return math.sqrt(float((known * known).mean())) if len(known) else 0.0

    def steps(self, share: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """The step of each element of a share."""
        return self.eps * scale * np.maximum(1.0, np.abs(self.x[share].astype(np.float64)))

    def moved(self, share: np.ndarray, step: np.ndarray) -> tuple[float, np.ndarray]:
        """(value, the share's elements) after a step of theirs."""
        x = self.x.copy()
        x[share] = self.x[share] + step
        value, self.rounding = self.loss(self.number, x.reshape(self.values.shape))
        return value, x[share].astype(np.float64)

    def row(self, share: np.ndarray, numeric: float, analytic: float, relative: float) -> GradMismatch:
        index = tuple(map(int, np.unravel_index(share[0], self.values.shape)))
        relative = relative if all(map(math.isfinite, (relative, numeric, analytic))) else math.inf
        return GradMismatch(self.number, index, numeric, analytic, relative, len(share))

    def element(self, j: int) -> GradMismatch:
        """The comparison of one element by a plain central difference."""
        share = np.array([j])
        (above, high), (below, low) = (self.moved(share, sign * self.steps(share)) for sign in (1.0, -1.0))
        taken = float(high[0] - low[0])  # what rounding left of the step
        numeric, analytic = (above - below) / taken if taken > 0 else math.nan, float(self.g[j])
        error, noise = abs(numeric - analytic), _ratio(4 * self.rounding, taken)
        error = max(0.0, error - noise) if math.isfinite(error) else math.inf
        if math.isfinite(numeric):
            self.resolution = max(self.resolution, noise + self.rtol * (2 * abs(numeric) + self.atol))
        return self.row(share, numeric, analytic, error / (abs(numeric) + abs(analytic) + self.atol))


@dataclass
class _Probe:
    """A share of the elements, moved by 1, 2 and 3 steps up and down.

    given: the change of the function that the gradient predicts for one step.
    residual: the measured change minus `given`, by a formula whose error is of seventh order in the step.
    unrest: what remains of the three changes without their parts in step and step^3: noise, or a kink.
    sides: the residuals of the steps up alone and down alone, with an error of fourth order.
    """

    scale: float
    residual: float
    unrest: float
    given: float
    sides: tuple[float, float] = (math.nan, math.nan)


class _Blocks:
    """The check of a big input in blocks. Every number is in units of the function: an element that is off by d, moved
    by a step h, adds d h to the residual of its block, whatever else the block holds.

    Two questions to each block. Is one element wrong? Then the residual exceeds `single`: the noise and _SHARED typical
    elements off by rtol; the block is halved to name it. Are many wrong? Then it exceeds rtol of the change itself.
    """

    def __init__(self, change: _Change, random: np.random.Generator, scales: tuple[float, ...]) -> None:
        self.change, self.random, self.scales = change, random, scales
        self.left = _SEARCH
        self.noise = 0.0

    def check(self, count: int) -> tuple[list[GradMismatch], float]:
        """(the comparisons made: blocks, single elements, and the elements that were found out; the resolution)."""
        change = self.change
        finite = np.isfinite(change.g)
        rows = []
        for j in np.flatnonzero(~finite).tolist():  # no need to look for these
            share = np.array([j])
            rows.append(
                change.row(share, change.element(j).numeric if len(rows) < 8 else math.nan, float(change.g[j]), np.inf)
            )
        places = np.flatnonzero(finite)
        if not len(places):
            return rows, math.inf
        if not math.isfinite(change.here):
            self.left = 0
        order = self.random.permutation(places)
        self.signs = self.random.choice([-1.0, 1.0], change.x.size)
        shares = np.array_split(order, min(count, len(order)))
        scale = self.scale_of(shares[:2])
        probes = [self.probe(share, scale) for share in shares]
        # The typical unrest measures the noise. Far larger ones are kinks, which may be in any block and stay unseen.
        unrest = [abs(p.unrest) for p in probes if math.isfinite(p.unrest)] or [0.0]
        self.noise = 1.5 * float(np.median(unrest))
        if max(unrest) > 4 * self.noise:
            self.noise = max(unrest)
        limits = [self.single(share, p) for share, p in zip(shares, probes, strict=True)]
        at = [_ratio(2 * limit, change.eps * p.scale) for limit, p in zip(limits, probes, strict=True)]
        resolution = max((r for r in at if math.isfinite(r)), default=math.inf)
        # An element by itself is allowed rtol of its own gradient, which may be far from typical.
        largest = 2 * float(np.abs(change.g[places]).max()) + change.atol
        resolution = max(resolution, 2 * change.rtol * largest)
        worst_first = sorted(range(len(shares)), key=lambda i: -_ratio(abs(probes[i].residual), limits[i]))
        for i in worst_first:
            rows += self.judge(shares[i], probes[i])
        if len(shares[0]) > 1:
            rows += self.singles(order, scale)
        return list({(row.index, row.size): row for row in rows}.values()), resolution

    def probe(self, share: np.ndarray, scale: float) -> _Probe:
        """A _Probe; with the shortest step where the function is not finite at a longer one (a logarithm near 0)."""
        change = self.change
        steps = change.steps(share, scale) * self.signs[share]
        here, ups, downs = change.x[share].astype(np.float64), [], []
        for times in (1.0, 2.0, 3.0):
            (above, high), (below, low) = (change.moved(share, sign * times * steps) for sign in (1.0, -1.0))
            ups.append((above - change.here) - float((change.g[share] * (high - here)).sum()))
            downs.append((change.here - below) - float((change.g[share] * (here - low)).sum()))
        given = float((change.g[share] * steps).sum())
        one, two, three = ((up + down) / 2 for up, down in zip(ups, downs, strict=True))
        up, down = ((18 * a - 9 * b + 2 * c) / 6 for a, b, c in (ups, downs))
        found = _Probe(scale, (45 * one - 9 * two + three) / 30, 5 * one - 4 * two + three, given, (up, down))
        if not math.isfinite(found.residual) and scale > self.scales[0] and math.isfinite(change.here):
            return self.probe(share, self.scales[0])
        return found

    def scale_of(self, shares: list[np.ndarray]) -> float:
        """The scale that shows an element's error best: beside longer steps noise shrinks, curvature grows."""
        best, floor = (math.inf, self.scales[0]), 0.0
        for scale in self.scales if len(self.scales) > 1 else ():
            probes = [self.probe(share, scale) for share in shares]
            if any(p.scale != scale for p in probes):
                break
            floor = max([floor, *(abs(p.unrest) for p in probes)])
            score = _ratio(max(_NOISE * floor, _QUANTUM * self.change.rounding), scale)
            if not score < math.inf:
                break
            best = min(best, (score, scale))
        return best[1]

    def blur(self, probe: _Probe) -> float:
        """The residual that noise alone may cause."""
        unrest = abs(probe.unrest)
        unrest = max(self.noise, unrest if math.isfinite(unrest) else 0.0)
        return max(_NOISE * unrest, _QUANTUM * self.change.rounding)

    def typical(self, share: np.ndarray, scale: float) -> tuple[float, float]:
        """(change by a typical element of a share, change that atol stands for)."""
        change = self.change
        moves = change.steps(share, scale) * change.g[share]
        return math.sqrt(float((moves * moves).mean())), change.atol * change.eps * scale

    def single(self, share: np.ndarray, probe: _Probe) -> float:
        """The residual up to which no element of a share counts as wrong."""
        return self.blur(probe) + _SHARED * self.change.rtol * sum(self.typical(share, probe.scale))

    def judge(self, share: np.ndarray, probe: _Probe) -> list[GradMismatch]:
        """The comparisons of a block: its own, or, when it fails, those of the elements at fault."""
        row = self.row(share, probe)
        if len(share) == 1 or abs(probe.residual) <= self.single(share, probe):
            return [row]
        rows = self.search(share, probe, self.single(share, probe))
        return rows or [row]

    def row(self, share: np.ndarray, probe: _Probe, lost: bool = False) -> GradMismatch:
        """The comparison of a share as a whole. lost: one of its elements is at fault, but could not be identified."""
        change, root = self.change, math.sqrt(len(share))
        typical, atol = self.typical(share, probe.scale)
        error, numeric = max(0.0, abs(probe.residual) - self.blur(probe)), probe.given + probe.residual
        # Random signs may cancel: the typical change keeps the noise of the predicted one in proportion.
        size = abs(numeric) + abs(probe.given) + atol * root + (typical * root if len(share) > 1 else 0.0)
        relative = _ratio(error, size) if math.isfinite(probe.residual) else math.inf
        # At a kink the gradient belongs to one side; one that is wrong is wrong on both.
        low, high = sorted(map(abs, probe.sides))
        if len(share) == 1 and low < high / 4 and abs(probe.sides[0] - probe.sides[1]) > 8 * change.rounding:
            relative = 0.0
        if lost:
            relative = max(relative, _ratio(error, _SHARED * (typical + atol)))
        length = float(np.linalg.norm(change.steps(share, probe.scale)))
        return change.row(share, _over(numeric, length), _over(probe.given, length), relative)

    def search(self, share: np.ndarray, probe: _Probe, limit: float) -> list[GradMismatch]:
        """Halve a failing share again and again. Return the comparisons of the elements at fault, and of shares for
        which no evaluations were left. limit: the residual limit of the block that the share is from.
        """
        if self.left <= 0:
            return [self.row(share, probe, lost=True)]
        self.left -= 1
        if len(share) == 1:
            row = self.row(share, self.probe(share, probe.scale))
            return [row] if row.relative > self.change.rtol else []
        parts = share[: len(share) // 2], share[len(share) // 2 :]
        left = self.probe(parts[0], probe.scale)
        rest = [getattr(probe, n) - getattr(left, n) for n in ("residual", "unrest", "given")]
        right = _Probe(probe.scale, *rest) if left.scale == probe.scale else self.probe(parts[1], left.scale)
        rows = []
        for part, found in sorted(
            zip(parts, (left, right), strict=True), key=lambda pair: -_or_inf(abs(pair[1].residual))
        ):
            if not abs(found.residual) <= limit:
                rows += self.search(part, found, limit)
        return rows

    def singles(self, order: np.ndarray, scale: float) -> list[GradMismatch]:
        """The largest gradients, and some at random, each by itself."""
        change = self.change
        size = np.abs(change.g[order] * change.steps(order))
        largest = order[np.argsort(-size, kind="stable")[:_SINGLES]]
        picked = dict.fromkeys([*largest.tolist(), *order[-_SINGLES:].tolist()])
        shares = [np.array([j]) for j in picked]
        return [self.row(share, self.probe(share, scale)) for share in shares]


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _ratio(a: float, b: float) -> float:
    return _or_inf(a / b) if b > 0 else math.inf if a != 0 else 0.0


def _as_list(inputs: Any) -> list[Any]:
    if isinstance(inputs, (Tensor, np.ndarray)) or not hasattr(inputs, "__iter__"):
        raise TypeError(f"grad_check: inputs must be a list of Tensors or arrays, got {type(inputs).__name__}")
    return list(inputs)


def _of_arrays(fn: Callable[..., Any], inputs: list[Any], grads: Any) -> Parts:
    """Check the arrays and return ([(number of the input, values, its gradient)], loss, restore). loss(number, values)
    calls fn with other values of one input and returns (the result, how much rounding it to its format loses).
    restore() puts the inputs back.
    """
    if grads is None:
        raise ValueError("grad_check: grads must be given for inputs that are not Tensors, got None")
    for i, x in enumerate(inputs):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"grad_check: input {i} must be a Tensor or an array, got {type(x).__name__}")
    given = grads(*inputs) if callable(grads) else grads
    if not isinstance(given, (list, tuple)) and not isinstance(given, np.ndarray):
        raise TypeError(f"grad_check: grads must be a list of arrays, got {type(given).__name__}")
    given = list(given)
    if len(given) != len(inputs):
        raise ValueError(f"grad_check: grads must have {len(inputs)} entries like inputs, got {len(given)}")
    checked = []
    for i, (x, g) in enumerate(zip(inputs, given, strict=True)):
        if g is None:
            continue
        if x.dtype not in (np.float32, np.float64):
            raise TypeError(f"grad_check: input {i} must be float32 or float64, got {x.dtype}")
        try:
            g = np.asarray(g)
        except ValueError:
            raise ValueError(
                f"grad_check: gradient {i} must have shape {x.shape}, got rows of different lengths"
            ) from None
        if g.dtype.kind not in "fiu":
            raise TypeError(f"grad_check: gradient {i} must hold real numbers, got {g.dtype}")
        if np.shape(g) != x.shape:
            raise ValueError(f"grad_check: gradient {i} must have shape {x.shape}, got {np.shape(g)}")
        _check_size(i, x)
        checked.append((i, x, g))
    if not checked:
        raise ValueError("grad_check: grads must hold an array, got none")

    coarse = all(x.dtype == np.float32 for _, x, _ in checked)  # so far all values fit into float32: fn rounds to it

    def loss(number: int, values: np.ndarray) -> tuple[float, float]:
        nonlocal coarse
        value = fn(*inputs[:number], values, *inputs[number + 1 :])
        if not (isinstance(value, (int, float, np.generic, np.ndarray)) or hasattr(value, "__float__")):
            raise TypeError(f"grad_check: fn must return one number, got {_got(value)}")
        if np.size(value) != 1:
            raise ValueError(f"grad_check: fn must return one number, got shape {np.shape(value)}")
        if np.asarray(value).dtype.kind not in "fiub":
            raise TypeError(f"grad_check: fn must return a real number, got {np.asarray(value).dtype}")
        value = float(np.asarray(value).reshape(()))
        with np.errstate(all="ignore"):
            coarse = coarse and not float(np.float32(value)) != value == value
        return value, abs(value) * (2.0**-24 if coarse else 2.0**-53)

    return checked, loss, lambda: None


def _got(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _check_size(i: int, x: Any) -> None:
    if math.prod(x.shape) == 0:
        raise ValueError(f"grad_check: input {i} must not be empty, got shape {tuple(x.shape)}")


def _check_tensors(inputs: list[Any]) -> list[int]:
    """The indices of the tensors whose gradients are checked. ValueError or TypeError where there are none, one comes
    twice, or one is no leaf or has another dtype.
    """
    checked = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    if not checked:
        raise ValueError("grad_check: inputs must hold a tensor with requires_grad, got none")
    if len({id(inputs[i]) for i in checked}) != len(checked):
        raise ValueError("grad_check: inputs must be different tensors, got one of them twice")
    for i in checked:
        if inputs[i].dtype not in (_C.float64, _C.float32):
            raise TypeError(f"grad_check: input {i} must be float32 or float64, got {inputs[i].dtype.name}")
        if not inputs[i].is_leaf:
            raise ValueError(f"grad_check: input {i} must be a leaf, got the result of {inputs[i].grad_fn}")
        _check_size(i, inputs[i])
    return checked


def _of_tensors(fn: Callable[..., Any], inputs: list[Any], random: np.random.Generator) -> Parts:
    """As _of_arrays, for Tensors: backward gives the gradients, and loss writes the values into the inputs."""
    checked = _check_tensors(inputs)
    before = {i: inputs[i].grad for i in checked}
    try:
        for i in checked:
            inputs[i].grad = None
        outputs = _outputs(fn, inputs)
        shapes = [tuple(y.shape) for y in outputs]
        if outputs and all(y.numel() == 0 for y in outputs):
            raise ValueError(f"grad_check: fn must return elements, got shape {shapes[0]}")
        weights = [random.uniform(0.5, 1.5, s) * random.choice([-1.0, 1.0], s) for s in shapes]
        roots = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
        if not roots:
            raise ValueError(
                "grad_check: fn must return a tensor that depends on the inputs, got none that requires a gradient"
            )
        _C.backward([y for y, _ in roots], [_C.tensor(w).to(y.dtype).to(y.device) for y, w in roots], False)
        rows = []
        for i in checked:
            values = inputs[i].detach().to("cpu").numpy().copy()
            gradient = inputs[i].grad
            rows.append((i, values, np.zeros(values.shape) if gradient is None else gradient.to("cpu").numpy()))
    finally:
        for i in checked:
            inputs[i].grad = before[i]
    used = [w for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    which = [i for i, y in enumerate(outputs) if y.requires_grad]

    @no_grad()
    def write(number: int, values: np.ndarray) -> None:
        rows = np.ascontiguousarray(values).reshape(values.shape)  # which has a dimension, even where values have none
        inputs[number].copy_(_C.tensor(rows).to(inputs[number].device))

    @no_grad()
    def loss(number: int, values: np.ndarray) -> tuple[float, float]:
        write(number, values)
        outs = _outputs(fn, inputs)
        if [tuple(y.shape) for y in outs] != shapes:
            raise ValueError("grad_check: fn must return tensors of the same shapes every time, got others")
        total = rounding = 0.0
        for i, w in zip(which, used, strict=True):
            terms = outs[i].to(_C.float64).to("cpu").numpy() * w
            total += float(terms.sum())
            rounding = math.hypot(rounding, format_of(outs[i].dtype).roundoff * float(np.linalg.norm(terms)))
        for other, kept, _ in rows:
            if other == number:
                write(other, kept)
        return total, rounding

    def restore() -> None:
        for number, values, _ in rows:
            write(number, values)

    return rows, loss, restore


def _outputs(fn: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
    result = fn(*inputs)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for y in outputs:
        if not isinstance(y, Tensor):
            raise TypeError(f"grad_check: fn must return a Tensor or a tuple of Tensors, got {type(y).__name__}")
    return outputs
