"""grad_check: gradients against finite differences. The core sees NumPy arrays and a callable: no device, no tensor."""

import math
from dataclasses import dataclass

import numpy as np

from .. import _C
from ..autograd import no_grad
from .formats import is_finite

# (eps, rtol, atol): float32's are those of the usual harness; float64's error is far below them for smooth functions.
DEFAULTS = {"float32": (1e-3, 2e-2, 1e-4), "float64": (1e-5, 1e-6, 1e-4)}
_EVERY_ELEMENT = 4096  # larger inputs are checked along random directions
_DIRECTIONS = 32


@dataclass(frozen=True)
class GradMismatch:
    """One comparison: input number, index in it, the finite difference and the gradient given for it, and
    |numeric - analytic| / (|numeric| + |analytic| + atol). Of a random direction, index is the first element in it, and
    the values are derivatives along it.
    """

    input: int
    index: tuple
    numeric: float
    analytic: float
    relative: float

    def __str__(self):
        return (
            f"input {self.input} at {self.index}: gradient {self.analytic:.9g}, finite difference {self.numeric:.9g}, "
            f"relative error {self.relative:.3g}"
        )


@dataclass
class GradCheck:
    """What grad_check found; true when ok. worst is the GradMismatch of the largest relative error, max_rel that error,
    failures all that exceed rtol, worst first; checked counts the comparisons made.
    """

    ok: bool
    max_rel: float
    worst: GradMismatch
    failures: list
    checked: int
    rtol: float

    def __bool__(self):
        return self.ok

    def __str__(self):
        head = f"{len(self.failures)} of {self.checked} gradients differ by more than {self.rtol:.3g}"
        return "\n".join([head, *(f"  {f}" for f in self.failures[:10] or [self.worst])])


def grad_check(fn, inputs, *, grads=None, eps=None, rtol=None, atol=None, projections=None, seed=0):
    """Compares gradients of fn(*inputs) with central differences; returns a GradCheck, true when all agree.

    inputs: Tensors, on any device: fn returns a Tensor or a tuple of them, a fixed random weighting of whose elements
    is differentiated, and the gradients of the inputs that require one are checked. Their values change during the
    check and are put back, so fn may also read them from outside its arguments. Or NumPy arrays, with `grads`: fn
    returns a number, grads is a list of arrays (None: unchecked) or a callable that returns it for *inputs.

    Agreement: |num - ana| / (|num| + |ana| + atol) <= rtol; NaN never agrees. The difference quotient uses the step
    that rounding to the dtype leaves of eps * max(1, |x|). Defaults (eps, rtol, atol): 1e-3, 2e-2, 1e-4 in float32;
    1e-5, 1e-6, 1e-4 in float64. projections: None checks every element of inputs of up to 4096, larger ones along 32
    random directions that share out the elements (there the typical gradient joins the denominator, as signs may
    cancel); an integer sets that number for all inputs, 0 checks every element. A direction that fails is halved until
    the elements at fault are found. A direction of n elements shows the fault of a single one reduced by sqrt(n): in
    float32, beyond some hundred elements per direction, it may stay below rtol; use float64 or more projections.

    ValueError or TypeError: nothing to check, empty inputs, wrong dtypes or shapes.
    """
    inputs = list(inputs)
    if projections is not None and (
        isinstance(projections, bool) or not isinstance(projections, int) or projections < 0
    ):
        raise ValueError(f"grad_check: projections must be None or an int of at least 0, got {projections!r}")
    random = np.random.Generator(np.random.PCG64(seed))
    if any(isinstance(x, _C.Tensor) for x in inputs):
        if grads is not None:
            raise ValueError(
                "grad_check: grads must be None for Tensors, whose gradients come from backward, got a value"
            )
        checked, loss, restore = _of_tensors(fn, inputs, random)
    else:
        checked, loss, restore = _of_arrays(fn, inputs, grads)
    found, limit = [], 0.0
    try:
        for number, values, analytic in checked:
            name = "float64" if values.dtype == np.float64 else "float32"
            chosen = [d if given is None else given for d, given in zip(DEFAULTS[name], (eps, rtol, atol), strict=True)]
            for text, value in zip(("eps", "rtol", "atol"), chosen, strict=True):
                if not (is_finite(value) and value > 0):
                    raise ValueError(f"grad_check: {text} must be positive and finite, got {value!r}")
            limit = max(limit, chosen[1])
            count = projections
            if count is None:
                count = 0 if values.size <= _EVERY_ELEMENT else _DIRECTIONS
            change = _Change(lambda x, number=number: loss(number, x), values, analytic, *chosen)
            rows = change.every_element() if count == 0 else change.along_directions(count, random)
            found += [(row.relative <= chosen[1], row) for row in (GradMismatch(number, *rest) for rest in rows)]
    finally:
        restore()
    worst = max((row for _, row in found), key=lambda row: row.relative)
    failures = sorted((row for good, row in found if not good), key=lambda row: -row.relative)
    return GradCheck(not failures, worst.relative, worst, failures, len(found), limit)


class _Change:
    """How loss(values) changes with values: the host-only core.

    Each comparison is (index, numeric, analytic, relative error).
    """

    def __init__(self, loss, values, analytic, eps, rtol, atol):
        self.loss, self.values, self.analytic = loss, values, np.asarray(analytic, np.float64)
        self.eps, self.rtol, self.atol = eps, rtol, atol

    def every_element(self):
        return [self._compare(np.array([j]), np.ones(1)) for j in range(self.values.size)]

    def along_directions(self, count, random):
        """Random signs on `count` shares of the elements, each element in one share."""
        order = random.permutation(self.values.size)
        rows = []
        for share in np.array_split(order, min(count, self.values.size)):
            signs = random.choice([-1.0, 1.0], len(share))
            rows += self._search(share, signs)
        return rows

    def _search(self, share, signs):
        """The comparison of a share; when it fails, those of its elements at fault instead."""
        row = self._compare(share, signs)
        if len(share) == 1 or row[-1] <= self.rtol:
            return [row]
        half = len(share) // 2
        rows = self._search(share[:half], signs[:half]) + self._search(share[half:], signs[half:])
        # Errors may hide in the halves and show in the whole: the whole then stands.
        return rows if any(not r[-1] <= self.rtol for r in rows) else [row]

    def _compare(self, share, signs):
        x, g = self.values.reshape(-1), self.analytic.reshape(-1)[share]
        step = self.eps / math.sqrt(len(share)) * np.maximum(1.0, np.abs(x[share].astype(np.float64))) * signs
        sums, points = [], []
        for sign in (1.0, -1.0):
            moved = x.copy()
            moved[share] = x[share] + sign * step
            points.append(moved[share].astype(np.float64))
            sums.append(self.loss(moved.reshape(self.values.shape)))
        taken = points[0] - points[1]  # what rounding left of the step
        length = math.sqrt(float((taken * taken).sum()))
        numeric = (sums[0] - sums[1]) / length if length > 0 else math.nan
        analytic = float((g * taken).sum()) / length if length > 0 else math.nan
        # Random signs may cancel: the typical size of the gradient in the share keeps its noise in proportion.
        typical = math.sqrt(float((g * g).mean())) if len(share) > 1 else 0.0
        size = abs(numeric) + abs(analytic) + self.atol + typical
        relative = abs(numeric - analytic) / size
        index = tuple(map(int, np.unravel_index(share[0], self.values.shape)))
        return index, numeric, analytic, relative if math.isfinite(relative) else math.inf


def _of_arrays(fn, inputs, grads):
    """Checked (number, values, gradient), loss(number, values) and restore() for NumPy."""
    if grads is None:
        raise ValueError("grad_check: grads must be given for inputs that are not Tensors, got None")
    for i, x in enumerate(inputs):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"grad_check: input {i} must be a Tensor or an array, got {type(x).__name__}")
    given = list(grads(*inputs) if callable(grads) else grads)
    if len(given) != len(inputs):
        raise ValueError(f"grad_check: grads must have {len(inputs)} entries like inputs, got {len(given)}")
    checked = []
    for i, (x, g) in enumerate(zip(inputs, given, strict=True)):
        if g is None:
            continue
        if x.dtype not in (np.float32, np.float64):
            raise TypeError(f"grad_check: input {i} must be float32 or float64, got {x.dtype}")
        if np.asarray(g).dtype.kind not in "fiu":
            raise TypeError(f"grad_check: gradient {i} must hold real numbers, got {np.asarray(g).dtype}")
        if np.shape(g) != x.shape:
            raise ValueError(f"grad_check: gradient {i} must have shape {x.shape}, got {np.shape(g)}")
        _check_size(i, x)
        checked.append((i, x, g))
    if not checked:
        raise ValueError("grad_check: grads must hold an array, got none")

    def loss(number, values):
        value = fn(*inputs[:number], values, *inputs[number + 1 :])
        if value is None:
            raise TypeError("grad_check: fn must return one number, got None")
        if np.size(value) != 1:
            raise ValueError(f"grad_check: fn must return one number, got shape {np.shape(value)}")
        return float(np.asarray(value).reshape(()))

    return checked, loss, lambda: None


def _check_size(i, x):
    if math.prod(x.shape) == 0:
        raise ValueError(f"grad_check: input {i} must not be empty, got shape {tuple(x.shape)}")


def _of_tensors(fn, inputs, random):
    """The same for Tensors: backward gives the gradients, values are written into the inputs themselves."""
    checked = [i for i, x in enumerate(inputs) if isinstance(x, _C.Tensor) and x.requires_grad]
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
    before = {i: inputs[i].grad for i in checked}
    try:
        for i in checked:
            inputs[i].grad = None
        outputs = _outputs(fn, inputs)
        shapes = [tuple(y.shape) for y in outputs]
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
    def write(number, values):
        inputs[number].copy_(_C.tensor(np.ascontiguousarray(values)).to(inputs[number].device))

    @no_grad()
    def loss(number, values):
        write(number, values)
        outs = _outputs(fn, inputs)
        total = sum(
            float((outs[i].to(_C.float64).to("cpu").numpy() * w).sum()) for i, w in zip(which, used, strict=True)
        )
        for other, kept, _ in rows:
            if other == number:
                write(other, kept)
        return total

    def restore():
        for number, values, _ in rows:
            write(number, values)

    return rows, loss, restore


def _outputs(fn, inputs):
    result = fn(*inputs)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for y in outputs:
        if not isinstance(y, _C.Tensor):
            raise TypeError(f"grad_check: fn must return a Tensor or a tuple of Tensors, got {type(y).__name__}")
    return outputs
