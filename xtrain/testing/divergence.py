"""first_divergence: which op is wrong, when all one sees is that a loss or a gradient is.

Two questions per op. How far is its result from the reference's? That distance contains everything that went wrong
before. How far is it when both get the same inputs, those of the reference? That is the op's own error, and the first
op whose own error exceeds its tolerance is the one to look at.
"""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from .. import _C, nn
from .._backends import use_attention_backend, use_gemm_backend
from .._C import Tensor
from .comparison import verify
from .formats import format_of, tolerance
from .recording import Step, record, without_data
from .torch_side import TorchRecording, from_torch, is_torch_module

# An op may round several times on its way (a product, a weight, a cast): each rounding is one half unit.
_SLACK = 4.0
# Ops whose gradient is a difference of terms as large as what arrives, and may be nothing but their rounding: equal
# streams give sinkhorn equal gradients along a row.
_CANCELLING = {"sinkhorn", "softmax"}
# Of the formula of a backward, in float64, against finite differences of the op's own forward.
_FORMULA = 1e-5
Context = Callable[[], contextlib.AbstractContextManager[Any]] | contextlib.AbstractContextManager[Any] | None


@dataclass
class Comparison:
    """One line of the report. phase: "parameter", "forward", "backward" or "formula". difference: largest difference of
    the two runs over the largest reference value (nan: not compared). own: own error over its tolerance; above 1 is
    wrong (nan: not isolated). what: which output or which branch of a gradient.
    """

    phase: str
    where: str
    name: str
    what: str
    difference: float = math.nan
    own: float = math.nan
    detail: str = ""

    @property
    def ok(self) -> bool:
        """False when the op is wrong by itself."""
        return not self.own > 1

    @property
    def place(self) -> str:
        """The op and the module it is in."""
        return f"{self.name} in {self.where}" if self.where else self.name

    def __str__(self) -> str:
        return f"{self.phase} of {self.place}: {self.what}"


@dataclass
class Divergence:
    """What first_divergence found; true when no op is wrong by itself.

    first: the Comparison of the first op whose own error exceeds its tolerance, or None. wrong: all branches of that op
    that are. comparisons: everything compared, in order: parameters, forward, backward. unmatched: calls without a
    counterpart in the other run. nan: for each run that has NaN, where it first appears, as text: in what both were
    given, it is nobody's error.
    """

    comparisons: list[Comparison]
    unmatched: int = 0
    wrong: list[Comparison] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)

    @property
    def first(self) -> Comparison | None:
        """The Comparison of the first op that is wrong by itself, or None."""
        return self.wrong[0] if self.wrong else None

    @property
    def ok(self) -> bool:
        """Whether no op is wrong by itself."""
        return not self.wrong

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        """The verdict."""
        first = self.first
        isolated = sum(not math.isnan(c.own) for c in self.comparisons)
        if first is None:
            return "\n".join([f"no divergence: {isolated} results are within tolerance in isolation", *self.nan])
        lines = [f"first divergence: {first}"]
        lines += [f"  wrong: {c.what}: {c.detail}" for c in self.wrong]
        same = [
            c for c in self.comparisons
            if (c.phase, c.where, c.name) == (first.phase, first.where, first.name) and c.own <= 1
        ]  # fmt: skip
        lines += [f"  right: {c.what}" for c in same]
        others = dict.fromkeys(
            f"{c.phase} of {c.place}" for c in self.comparisons if not c.ok and c.place != first.place
        )
        lines += [f"also wrong by itself: {text}" for text in others]
        return "\n".join(lines + self.nan)

    def table(self) -> str:
        """All comparisons as text: difference between the runs, own error / tolerance."""
        lines = [f"{'difference':>10}  {'own/limit':>9}  what"]
        for c in self.comparisons:
            lines.append(f"{_short(c.difference):>10}  {_short(c.own):>9}  {'' if c.ok else 'WRONG '}{c}")
        return "\n".join(lines)


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2g}"


def first_divergence(
    run: Callable[[Any], Any],
    model: Any,
    reference: Any = None,
    *,
    reference_run: Callable[[Any], Any] | None = None,
    context: Context = None,
    reference_context: Context = None,
    finite_differences: bool = True,
    seed: int = 0,
) -> Divergence:
    """Runs run(model) and the reference, compares every intermediate and gradient in order, repeats each op in
    isolation on the reference's inputs, and names the first one whose own error exceeds its tolerance. Returns a
    Divergence.

    run(model): a forward that returns a Tensor, which is then differentiated (its sum, when it has several elements),
    or None. reference: another nn.Module (other dtype, device or implementation), a torch.nn.Module with the same
    names, or the model itself under another `reference_context` (a context manager that can be entered again and
    again, such as xt.use_gemm_backend("naive")); None: a float64 copy of the model on the plain backends.
    reference_run: what to run on it, if not `run`; for PyTorch it returns a torch.Tensor.

    Between xtrain models the ops and xt.Functions are compared one by one, and modules where their insides differ; with
    PyTorch, modules of one name. A backward is checked for each pair of an input and an output on its own: against the
    reference's, and, with finite_differences, in float64 against the op's own forward, which finds a wrong formula even
    when the reference shares it. Both runs start from manual_seed(seed); the generator, parameters and their .grad are
    left as they were.

    TypeError: run is not callable, returns something else, or gives the reference inputs of another dtype than its own.
    ValueError: no reference, nothing in common with it, or inputs without an element.
    """
    for name, value in (("run", run), ("reference_run", reference_run)):
        if not callable(value) and not (value is None and name == "reference_run"):
            raise TypeError(f"first_divergence: {name} must be callable, got {type(value).__name__}")
    for name, value in (("context", context), ("reference_context", reference_context)):
        if not (value is None or callable(value) or hasattr(value, "__enter__")):
            raise TypeError(f"first_divergence: {name} must be a context manager, got {type(value).__name__}")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"first_divergence: seed must be an int, got {type(seed).__name__}")
    _check_reference(model, reference, reference_run)
    if reference is None:
        reference = copy.deepcopy(model).to(_C.float64)
        reference_context = reference_context or _plain
    with _gradients_kept(model), _gradients_kept(reference):
        mine = _Side(model, run, context, seed)
        other = _Side(
            reference,
            reference_run or run,
            reference_context,
            seed,
            "run" if reference_run is None else "reference_run",
            model,
        )
        result = _compare(mine, other, finite_differences)
    result.nan = _nan_lines(_first_nan(mine), _first_nan(other))
    if all(math.isnan(c.own) for c in result.comparisons):
        raise ValueError(
            "first_divergence: reference must have results that can be compared with those of model, got none: "
            "their parameters or outputs differ in shape"
        )
    return result


def _check_reference(model: Any, reference: Any, reference_run: Any) -> None:
    """ValueError or TypeError for a reference that is missing, or that is nothing to compare with."""
    if reference is None and not isinstance(model, nn.Module):
        raise ValueError("first_divergence: reference must be given unless model is an nn.Module, got None")
    if isinstance(model, nn.Module) and not (
        reference is None or isinstance(reference, nn.Module) or is_torch_module(reference) or callable(reference)
    ):
        raise TypeError(
            "first_divergence: reference must be an nn.Module, a torch.nn.Module or a function, "
            f"got {type(reference).__name__}"
        )
    if is_torch_module(reference) and reference_run is None:
        raise ValueError("first_divergence: reference_run must be given for a PyTorch module, got None")


def _nan_lines(mine: str | None, other: str | None) -> list[str]:
    """Divergence.nan of two runs, given where each first has NaN."""
    if mine is not None and mine == other:
        return [f"NaN first appears, in both runs, in {mine}"]
    known = [(whose, place) for whose, place in (("model", mine), ("reference", other)) if place is not None]
    return [f"NaN first appears in the {whose}'s run in {place}" for whose, place in known]


def _first_nan(side: _Side) -> str | None:
    """Where the first NaN of a run is, as text: a parameter, an input, an output, or a gradient; None without one."""
    parameters = side.model.named_parameters() if isinstance(side.model, nn.Module) else ()
    for name, p in parameters:
        if _has_nan(p):
            return f"parameter {name}"
    for step in side.steps:
        for label, x in zip(step.labels, step.inputs, strict=True):
            if _has_nan(x):
                return f"input {label} of {step}"
        for i, y in enumerate(step.outputs):
            if _has_nan(y):
                return f"output {i} of {step}" if len(step.outputs) > 1 else f"the output of {step}"
    for step in reversed(side.steps):
        for i, g in enumerate(step.gradients):
            if g is not None and _has_nan(g):
                # What arrives at an output was made by the op behind it.
                which = f"output {i}" if len(step.outputs) > 1 else "the output"
                return f"the gradient that arrives at {which} of {step}"
    return None


def _has_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.numel() > 0 and _C.stats(tensor.detach())[3] > 0


def _compare(mine: _Side, other: _Side, finite_differences: bool) -> Divergence:
    """The Divergence of two runs."""
    result = Divergence(_compare_parameters(mine.model, other.model))
    if without_data(mine.all_steps, mine.model):
        raise ValueError("first_divergence: run must compute with at least one element, got nothing but empty inputs")
    partner, result.unmatched = _match(mine.steps, other.steps)
    if not partner:
        raise ValueError("first_divergence: model and reference must have calls in common, got none of the same name")
    for a in mine.steps:
        if id(a) in partner:
            result.comparisons += _compare_forward(mine, a, other, partner[id(a)])
    seen: set[Any] = set()
    for a in reversed(mine.steps):
        if id(a) in partner:
            result.comparisons += _compare_backward(mine, a, other, partner[id(a)])
        if finite_differences and a.kind != "module":
            result.comparisons += _check_formula(mine, a, partner.get(id(a), a), seen)
    first = next((c for c in result.comparisons if not c.ok), None)
    if first is not None:
        place = (first.phase, first.where, first.name)
        start = result.comparisons.index(first)
        for c in result.comparisons[start:]:
            if (c.phase, c.where, c.name) != place:
                break
            if not c.ok:
                result.wrong.append(c)
    return result


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    with use_gemm_backend("naive"), use_attention_backend("reference"):
        yield


@contextlib.contextmanager
def _gradients_kept(model: Any) -> Iterator[None]:
    """The .grad of a model's parameters is set aside, and put back in the end."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) or is_torch_module(model) else []
    kept = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


class _Side:
    """One of the two runs: its model, the context it runs in, and the steps it took."""

    def __init__(
        self, model: Any, run: Callable[[Any], Any], context: Context, seed: int, name: str = "run", beside: Any = None
    ) -> None:
        """beside: the model, when this is the run of its reference."""
        self.model, self._context = model, context
        torch = is_torch_module(model)
        state = _C.get_rng_state()
        try:
            with self.context(), TorchRecording(model) if torch else record(model) as recording:
                _C.manual_seed(seed)
                try:
                    result = run(model)
                except (TypeError, RuntimeError) as error:  # PyTorch's is a RuntimeError
                    if "dtype" in str(error) and (text := _other_dtypes(beside, model)):
                        raise TypeError(
                            f"first_divergence: {name} must give the reference inputs of its own dtype, {text}: "
                            f"convert them inside {name}, as in x.to(next(m.parameters()).dtype) ({error})"
                        ) from error
                    raise
                kind = sys.modules["torch"].Tensor if torch else _C.Tensor
                if not (result is None or isinstance(result, kind)):
                    what = "torch.Tensor" if torch else "Tensor"
                    raise TypeError(
                        f"first_divergence: {name} must return a {what} or None, got {type(result).__name__}"
                    )
                if result is not None and result.requires_grad:
                    (result.sum() if torch or result.numel() != 1 else result).backward()
        finally:
            _C.set_rng_state(state)
        self.all_steps = recording.steps
        self.steps = [s for s in recording.steps if s.outputs and s.inputs]

    def context(self) -> contextlib.AbstractContextManager[Any]:
        context = self._context
        return contextlib.nullcontext() if context is None else context() if callable(context) else context


def _other_dtypes(model: Any, reference: Any) -> str:
    """The floating dtypes of two models as text, when they differ."""
    names = []
    for m in (model, reference):
        parameters = m.parameters() if isinstance(m, nn.Module) or is_torch_module(m) else ()
        names.append(sorted({str(p.dtype).rpartition(".")[2] for p in parameters if p.dtype.is_floating_point}))
    return (
        f"{'/'.join(names[1])}, and not the model's {'/'.join(names[0])}" if all(names) and names[0] != names[1] else ""
    )


def _match(mine: list[Step], other: list[Step]) -> tuple[dict[int, Step], int]:
    """The counterpart of each step of mine, by id, and how many have none. Steps pair in order when name and place are
    the same; a module is left out when everything inside it is paired.
    """
    keys = [
        [(s.kind == "module", s.where, s.name if s.kind != "module" else "") for s in side] for side in (mine, other)
    ]
    blocks = SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    pairs = [(mine[b.a + i], other[b.b + i]) for b in blocks for i in range(b.size)]
    unmatched = len(mine) + len(other) - 2 * len(pairs)
    paired = {id(a) for a, _ in pairs}
    lonely = [s.where for s in mine if s.kind != "module" and id(s) not in paired]

    def needed(step: Step) -> bool:
        prefix = step.where + "." if step.where else ""
        return step.kind != "module" or any(w == step.where or w.startswith(prefix) for w in lonely)

    return {id(a): b for a, b in pairs if needed(a)}, unmatched


def _coarser(tensors: Iterable[Tensor]) -> _C.dtype:
    return max((t.dtype for t in tensors if t.dtype.is_floating_point), key=lambda dtype: format_of(dtype).roundoff)


def _like(value: Tensor, like: Tensor) -> Tensor:
    """value with the dtype class, shape and device of `like`."""
    return _place(value.to(like.dtype) if value.dtype.is_floating_point else value, like)


def _accumulations(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Roundings that one element of an output may collect: of the longest dimension, or of all elements it sums up."""
    longest = max([1, *(n for t in inputs for n in t.shape)])
    spread = max((t.numel() for t in inputs), default=1) / max(1, min(t.numel() for t in outputs))
    return 8 + max(longest, spread)


def _limit(step: Step, tensors: list[Tensor], terms: float, magnitude: float) -> tuple[float, float]:
    rtol, atol = tolerance(_coarser(tensors), accumulations=terms, magnitude=magnitude)
    scale = _SLACK * math.sqrt(step.inside)  # the errors of ops in a row have random signs
    return scale * rtol, scale * atol


def _judge(
    step: Step, got: Tensor, want: Tensor, tensors: list[Tensor], terms: float, floor: float = 0.0
) -> tuple[float, str]:
    """(own error over tolerance, sentence)."""
    want = _place(want, got)
    stats = _C.stats(want)
    if stats[3] == want.numel():
        return math.nan, "the reference gives nothing but NaN"
    if stats[3]:  # NaN from the inputs that both got is no fault of the op
        both = _C.where(_C.ne(want, want), _C.ne(got, got), False)
        got, want = _C.where(both, 0.0, got), _C.where(both, 0.0, want)
    largest = max((abs(v) for v in stats[:2] if not math.isnan(v)), default=0.0)
    rtol, atol = _limit(step, tensors, terms, max(largest, floor))
    found = verify(got, want, rtol=rtol, atol=atol)
    return found.worst_ratio, str(found)


def _place(value: Tensor, like: Tensor) -> Tensor:
    """value with the shape and device of `like`, in its own dtype."""
    if value.device != like.device:
        value = value.to(like.device)
    return value if tuple(value.shape) == tuple(like.shape) else value.reshape(tuple(like.shape))


def _distance(got: Tensor, want: Tensor) -> float:
    """Largest difference of the runs over the largest reference value."""
    if got.numel() == 0 or got.numel() != want.numel():
        return math.nan
    r = _C.compare(got, _place(want, got), 0.0, 0.0)
    if r["out_nan"] + r["out_inf"] + r["ref_nan"] + r["ref_inf"]:
        return math.inf if r["errors"] else 0.0
    return r["max_abs"] / r["max_ref"] if r["max_ref"] > 0 else r["max_abs"]


def _shared_inputs(a: Step, b: Step) -> tuple[list[Tensor], list[Tensor]] | None:
    """The reference's inputs, rounded to the model's dtypes: for the model, and for the reference. None when they
    differ in number or size.
    """
    if len(a.inputs) != len(b.inputs):
        if not (a.kind == "module" and b.kind == "module"):
            return None
        # Modules may take different extras (positions, caches): what is computed with comes first.
        return None if not (a.inputs and b.inputs) or a.inputs[0].numel() != b.inputs[0].numel() else _first_input(a, b)
    if any(x.numel() != y.numel() for x, y in zip(a.inputs, b.inputs, strict=True)):
        return None
    ours = [_like(y, x) for x, y in zip(a.inputs, b.inputs, strict=True)]
    return ours, [_like(x, y) for x, y in zip(ours, b.inputs, strict=True)]


def _first_input(a: Step, b: Step) -> tuple[list[Tensor], list[Tensor]]:
    ours = [_like(b.inputs[0], a.inputs[0]), *a.inputs[1:]]
    return ours, [_like(ours[0], b.inputs[0]), *b.inputs[1:]]


def _compare_parameters(model: Any, reference: Any) -> list[Comparison]:
    """Values of parameters of the same name: an op cannot be blamed for other weights."""
    if not isinstance(model, nn.Module) or model is reference:
        return []
    if is_torch_module(reference):
        others = {name: from_torch(p) for name, p in reference.named_parameters()}
    elif isinstance(reference, nn.Module):
        others = dict(reference.named_parameters())
    else:
        return []
    rows = []
    for name, p in model.named_parameters():
        q = others.get(name)
        if q is not None and q.numel() == p.numel() > 0:
            q = _place(q, p).detach()
            rtol = 2 * format_of(_coarser([p, q])).roundoff
            found = verify(p, q, rtol=rtol, atol=0.0)
            rows.append(Comparison("parameter", "", name, "its value", _distance(p, q), found.worst_ratio, str(found)))
    return rows


def _replayable(step: Step) -> bool:
    return step.name[-1] != "_" and step.unchanged


def _compare_forward(mine: _Side, a: Step, other: _Side, b: Step) -> list[Comparison]:
    if not (a.unchanged and b.unchanged) or len(a.outputs) != len(b.outputs):
        return []
    rows = [
        Comparison("forward", a.where, a.name, f"output {i}" if len(a.outputs) > 1 else "output", _distance(x, y))
        if x.dtype.is_floating_point == y.dtype.is_floating_point else None
        for i, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True))
    ]  # fmt: skip
    shared = _shared_inputs(a, b) if _replayable(a) else None
    if shared is not None:
        with mine.context():
            got = a.run(shared[0])
        with other.context():
            want = b.run(shared[1])
        for row, x, y in zip(rows, got, want, strict=True):
            if row is not None and x.dtype.is_floating_point and 0 < x.numel() == y.numel():
                tensors = [x, y, *shared[0]]
                row.own, row.detail = _judge(a, x, y, tensors, _accumulations(shared[0], got))
    return [row for row in rows if row is not None]


def _branch(label: str, i: int, outputs: int) -> str:
    return f"gradient of {label}" + (f" through output {i}" if outputs > 1 else "")


def _compare_backward(mine: _Side, a: Step, other: _Side, b: Step) -> list[Comparison]:
    if len(a.outputs) != len(b.outputs) or not _replayable(a):
        return []
    shared, rows = _shared_inputs(a, b), []
    for i, (x, y) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        if x is None or y is None or x.numel() != y.numel():
            continue
        what = f"gradient of output {i}" if len(a.outputs) > 1 else "gradient of the output"
        arrived = Comparison("backward", a.where, a.name, what, _distance(x, y))
        rows.append(arrived)
        if shared is None:
            continue
        ours = _like(y, x)
        with mine.context():
            got = a.differentiate(shared[0], i, _like(ours, a.outputs[i]))
        with other.context():
            want = b.differentiate(shared[1], i, _like(ours, b.outputs[i]))
        if got is None or want is None:
            continue
        floor = max(abs(v) for v in _C.stats(ours)[:2]) * (1.0 if a.name in _CANCELLING else 2.0**-10)
        known = dict(want) if a.kind == "module" else dict(zip((label for label, _ in got), (g for _, g in want)))
        for label, g in got:
            w = known.get(label)
            if g is None and w is None:
                continue
            row = Comparison("backward", a.where, a.name, _branch(label, i, len(a.outputs)))
            if g is None or w is None:
                if a.kind == "module":
                    continue
                row.own, row.detail = math.inf, f"{'no gradient' if g is None else 'a gradient where none is expected'}"
            elif 0 < g.numel() == w.numel():
                terms = _accumulations([*shared[0], x], [g])
                row.own, row.detail = _judge(a, g, w, [g, w, x, *shared[0]], terms, floor)
            rows.append(row)
    return rows


def _check_formula(mine: _Side, a: Step, b: Step, seen: set[Any]) -> list[Comparison]:
    """The backward in float64 against central differences of the forward, along one random direction per input."""
    key = (a.name, a.options, tuple((tuple(x.shape), x.dtype.name) for x in a.inputs))
    shared = _shared_inputs(a, b) if _replayable(a) and key not in seen else None
    seen.add(key)
    if shared is None or not any(g is not None for g in a.gradients):
        return []
    inputs = [x.to(_C.float64) if x.dtype.is_floating_point else x for x in shared[0]]
    random = np.random.Generator(np.random.PCG64(0))
    rows = []
    with mine.context():
        try:
            outputs = a.run(inputs)
        except (TypeError, ValueError, NotImplementedError):
            return []  # it has no float64
        if any(y.dtype.is_floating_point and y.dtype != _C.float64 for y in outputs):
            return []
        weights = [_random_like(y, random) if a.gradients[i] is not None else None for i, y in enumerate(outputs)]
        analytic = [None if w is None else a.differentiate(inputs, i, w) for i, w in enumerate(weights)]
        places = [j for j, x in enumerate(inputs) if x.dtype.is_floating_point]
        for n, j in enumerate(places):
            if inputs[j].numel() == 0:
                continue
            direction = _random_like(inputs[j], random)
            step = 1e-5
            sides = []
            for sign in (step, -step):
                moved = (inputs[j] + direction * sign).detach()
                sides.append(a.run([*inputs[:j], moved, *inputs[j + 1 :]]))
            for i, w in enumerate(weights):
                found = analytic[i]
                if w is None or found is None:
                    continue
                label, g = found[n]
                numeric = _dot(w, sides[0][i] - sides[1][i]) / (2 * step)
                if not math.isfinite(numeric):
                    continue  # differences of a forward that is not finite say nothing about its backward
                given = 0.0 if g is None else _dot(g, direction)
                size = 0.0 if g is None else math.sqrt(_dot(g, g))
                error = abs(numeric - given) / (abs(numeric) + abs(given) + size + 1e-6)
                row = Comparison("formula", a.where, a.name, _branch(label, i, len(outputs)))
                row.own = error / _FORMULA if math.isfinite(error) else math.inf
                row.detail = (
                    f"in float64 backward gives {given:.6g} along a random direction, finite differences of its "
                    f"forward {numeric:.6g}"
                )
                rows.append(row)
    return rows


def _random_like(tensor: Tensor, random: np.random.Generator) -> Tensor:
    return _C.tensor(random.standard_normal(tuple(tensor.shape))).to(tensor.device)


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum().item())
