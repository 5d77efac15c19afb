"""Random programs of ops, each step compared with NumPy in float64.

A value is a tensor and its shadow, a NumPy array of the same numbers. Views of a tensor are views of the shadow, so that a change in place
must appear in every alias, and nowhere else. Results are judged by the op table's references and tolerances, from the tensor's own inputs:
errors do not add up over a program. In a program with a graph every float tensor keeps its gradient, and each gradient is compared with what
the rules of `rules.py` make of the gradients that follow it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rules
from frame import Family, Wrong
from functions import Functions
from moves import Moves
from values import CPU, ENTRY, FLOATS, LARGEST, POOL, Trace, Value, alike, numbers, taken, told

from xtrain import _C
from xtrain.optable import references
from xtrain.optable.judge import additions, sum_to
from xtrain.optable.table import TINY, UNIT_ROUNDOFF, Case, accumulator, exact

COMPUTE = (
    ("unary",) * 4
    + ("binary",) * 4
    + ("number", "where", "reduce", "reduce", "product", "dense", "layer", "layer", "lookup")
)
COMPUTE += ("loss", "attend")
PICKED = (
    "gather",
    "put_along",
    "put",
    "running",
    "convolve",
    "convolve_causally",
    "rotate",
)  # cases before them had none
COMPUTE += PICKED
MOVE = ("view", "view", "view", "index", "index", "reshape", "reshape", "copy", "cast", "join", "split")
STEPS = (
    *COMPUTE,
    *MOVE,
    "integers",
    "integers",
    "compare",
    "door",
    "door",
    "in_place",
    "in_place",
    "in_place",
    "in_place",
)
STEPS_OF_A_GRAPH = (*COMPUTE, *MOVE)


BESIDE = 0.03  # of the programs with a graph get a second opinion, which judges references and rules and not the core
Second = Callable[..., str]  # another opinion on reference and rule of a step: "" or what differs


class Whole(Functions, Moves):
    def __init__(self, chance: random.Random, trace: Trace, second: Second | None = None) -> None:
        super().__init__(chance, trace)
        self.second = second if self.records and chance.random() < BESIDE else None
        self.structure = ""

    def run(self) -> int:
        """Runs the program and returns how many steps it had."""
        chance = self.chance
        for _ in range(chance.randint(1, 3)):
            self.leaf()
        if chance.random() < 0.1:
            _C.use_gemm_backend(chance.choice(_C.gemm_backends(CPU)))
        steps = STEPS_OF_A_GRAPH if self.records else STEPS
        for _ in range(chance.randint(1, 7)):
            getattr(self, chance.choice(steps))()
        if self.records:
            if chance.random() < 0.15:
                self.structured()
            self.backward()
        return len(self.trace)

    # ---- shapes of graphs that chance alone seldom makes

    def combined(self, a: Value, b: Value) -> Value:
        """(a + b) / 2 and the like: as tame as its inputs."""
        out = self.result("add", ENTRY["add"], _C.add(a.tensor, b.tensor), [a, b], {})
        self.record("add", [a, b], out, ENTRY["add"])
        return self.halved(out)

    def halved(self, x: Value) -> Value:
        number = self.chance.choice((0.5, -0.5))
        arrays = [x.shadow, np.float64(number)]
        out = self.result(f"mul of {number}", ENTRY["mul"], _C.mul(x.tensor, number), [x], {}, arrays)
        self.record("mul", [x], out, ENTRY["mul"], number=number, turned=False)
        return out

    def structured(self) -> None:
        """A long chain, a value with many users, a ladder of diamonds, a tree of leaves, or one tensor on both sides."""
        chance = self.chance
        shape = self.shape()
        self.structure = chance.choice(("chain", "fan", "ladder", "tree", "square"))
        x = self.leaf(chance.choice(FLOATS), shape, tame=True)
        count = chance.randint(3, 24)
        if self.structure == "chain":
            for _ in range(count):
                x = self.halved(x)
        elif self.structure == "fan":  # the gradients of many users meet in x
            parts = [self.halved(x) for _ in range(count)]
            while len(parts) > 1:
                parts.append(self.combined(parts.pop(chance.randrange(len(parts))), parts.pop(0)))
        elif self.structure == "ladder":  # each rung is used by the two behind it
            before, x = x, self.halved(x)
            for _ in range(count):
                before, x = x, self.combined(x, before)
        elif self.structure == "tree":
            parts = [self.leaf(x.dtype, shape, tame=True) for _ in range(count)]
            while len(parts) > 1:
                parts.append(self.combined(parts.pop(0), parts.pop(0)))
        else:
            for _ in range(min(count, 6)):
                x = self.combined(x, x)

    # ---- gradients

    def backward(self) -> None:
        """From one to three roots, with random gradients; perhaps in two walks, which add up."""
        chance = self.chance
        roots = [v for v in self.values if v.graph and not v.tensor.is_leaf]
        if not roots:
            return
        roots = chance.sample(roots, min(len(roots), chance.choice((1, 1, 2, 3))))
        seeds: dict[int, np.ndarray] = {}
        for v in roots:
            seeds[id(v)] = exact(taken(POOL, chance.randrange(4000), v.shadow.shape), v.dtype)
        self.trace.append(f"backward from {[self.values.index(v) for v in roots]}")
        tensors = [_C.cast(_C.tensor(np.array(seeds[id(v)])), v.tensor.dtype) for v in roots]
        leaves = [v for v in self.values if v.graph and v.tensor.is_leaf]
        _C.backward([v.tensor for v in roots], tensors, True)
        first = {id(v): v.tensor.grad for v in self.values if v.graph}
        self.expect(first, seeds)
        if chance.random() < 0.25:  # the same again: the same bits, and nothing that was kept has been changed
            for v in self.values:
                if v.graph:
                    v.tensor.grad = None
            _C.backward([v.tensor for v in roots], tensors, False)
            for v in leaves:
                old, new = first[id(v)], v.tensor.grad
                if (old is None) != (new is None) or (old is not None and not alike(numbers(old), numbers(new))):
                    raise Wrong(f"v{self.values.index(v)}: the second backward gives another gradient")
        for v in self.values:
            if v.shadow.dtype.kind == "f" and not alike(numbers(v.tensor), v.shadow):
                raise Wrong(f"backward changed v{self.values.index(v)}")

    def expect(self, grads: dict[int, Any], seeds: dict[int, np.ndarray]) -> None:
        """Compares each gradient with the sum of what its users make of theirs."""
        wanted: dict[int, list[Any]] = {id(v): [] for v in self.values if v.graph}
        for v in self.values:
            if id(v) in seeds:
                wanted[id(v)].append((seeds[id(v)], np.abs(seeds[id(v)]), 0.0, 0.0))
        for rule, inputs, outs, kwargs, entry in self.uses:
            dys = [grads[id(out)] for out in outs]
            if all(dy is None for dy in dys):
                continue
            gradients = [numbers(dy) if dy is not None else np.zeros(out.shadow.shape) for dy, out in zip(dys, outs)]
            parts = PARTS[rule](self, gradients, inputs, outs, kwargs)
            if self.second is not None and rule in RULES and entry is not None and "number" not in kwargs:
                arrays = [v.shadow for v in inputs]
                given = {} if rule == "cross_entropy" else kwargs  # its entry has the reduction
                want = entry.reference(*arrays, **given)
                if wrong := self.second(rule, arrays, gradients[0], want, RULES[rule], kwargs):
                    raise Wrong(wrong)
            if rule == "pow":
                parts = [part and _unless_large(part, outs[0], inputs) for part in parts]
            floors: Any = [None] * len(inputs)
            if rule in rules.FLOORS:
                floors = rules.FLOORS[rule](gradients[0], *(exact(v.shadow, outs[0].dtype) for v in inputs))
            for v, part, floor in zip(inputs, parts, floors):
                if v.graph and part is not None:
                    roundings = 4.0 if entry is None else entry.grad_roundings
                    terms = max(1.0, sum(dy.size for dy in gradients) / max(1, v.shadow.size))
                    works = outs[0].dtype if UNIT_ROUNDOFF[outs[0].dtype] > UNIT_ROUNDOFF[v.dtype] else v.dtype
                    unit: Any = roundings * UNIT_ROUNDOFF[works]
                    if rule == "move":
                        # An element that is at several places of the result gets the sum over them: one addition less
                        # than places in the core, and as many in float64 in the rule.
                        more = np.bincount(kwargs["places"].reshape(-1), minlength=v.shadow.size).clip(1) - 1
                        unit = UNIT_ROUNDOFF[works] + more.reshape(v.shadow.shape) * (
                            UNIT_ROUNDOFF[accumulator(works)] + UNIT_ROUNDOFF["float64"]
                        )
                    else:
                        arrays = [u.shadow for u in inputs]
                        added = (
                            additions(entry, Case((), {}), arrays)
                            if entry and rule not in VARIANTS
                            else 16 + max(a.size for a in arrays)
                        )
                        unit += (added + terms + 16) * UNIT_ROUNDOFF[accumulator(works)]
                    lost = (
                        terms if floor is None else sum_to(np.broadcast_to(floor, gradients[0].shape), v.shadow.shape)
                    )
                    wanted[id(v)].append((*part, unit, lost * TINY[works]))
        for v in self.values:
            if not v.graph:
                continue
            parts, got = wanted[id(v)], grads[id(v)]
            if got is not None and not parts and v in self.parts and not numbers(got).any():
                continue  # a part of a split, of which another one is used
            if got is None or not parts:
                if (got is None) != (not parts):
                    raise Wrong(f"the gradient of v{self.values.index(v)} must {'exist' if parts else 'be None'}")
                continue
            want, size = sum(p[0] for p in parts), sum(p[1] for p in parts)
            tolerance = (
                sum(p[1] * p[2] + p[3] for p in parts)
                + ((len(parts) + 1) * UNIT_ROUNDOFF[v.dtype] + (len(parts) - 1) * UNIT_ROUNDOFF["float64"]) * size
                + TINY[v.dtype]
            )
            if not np.isfinite(size).all():
                continue
            self.check(numbers(got), np.asarray(want), tolerance, v.dtype, f"gradient of v{self.values.index(v)}")


# ---- from a use to the parts of its inputs


def _by_rule(rule: Any, cast: bool = False) -> Any:
    """cast: the op takes its inputs in the dtype of its result, and its gradient is that of the cast numbers."""

    def parts(
        program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]
    ) -> Any:
        shadows = [exact(v.shadow, outs[0].dtype) if cast else v.shadow for v in inputs]
        if "number" in kwargs:
            pair = [shadows[0], np.float64(kwargs["number"])]
            found = rule(dys[0], *(pair[::-1] if kwargs["turned"] else pair), outs[0].shadow)
            return [found[1 if kwargs["turned"] else 0]]
        return rule(dys[0], *shadows, outs[0].shadow, **kwargs)

    return parts


def _unless_large(part: Any, y: Value, inputs: list[Value]) -> Any:
    """The gradient of a power, whose size is infinite (unknown) where the core's intermediate results leave the dtype: y log a, y b / a."""
    a, b = (exact(v.shadow, y.dtype) for v in inputs)
    largest = np.abs(y.shadow) * np.maximum(1.0, np.maximum(np.abs(np.log(a)), np.abs(b / a)))
    return part if (largest < 0.9 * LARGEST[y.dtype]).all() else (part[0], np.full_like(part[1], np.inf))


def _moved(
    program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]
) -> Any:
    """Each element of x is at the places of y that have its number: x as the numbers 0, 1, ... goes the same way."""
    places = kwargs.get("places")
    x = inputs[0].shadow
    grad, size = np.zeros(x.size), np.zeros(x.size)
    np.add.at(grad, places.reshape(-1), dys[0].reshape(-1))
    np.add.at(size, places.reshape(-1), np.abs(dys[0]).reshape(-1))
    return [(grad.reshape(x.shape), size.reshape(x.shape))]


def _put(program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]) -> Any:
    """scatter and index_put: values lie at places of x, whose own elements are gone there, or are added."""
    places, dy = kwargs["places"], dys[0].reshape(-1)
    own = dy.copy()
    if not kwargs["add"]:
        own[places.reshape(-1)] = 0
    own, taken = own.reshape(inputs[0].shadow.shape), dy[places]
    return [(own, np.abs(own)), (taken, np.abs(taken))]


def _rotated(
    program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]
) -> Any:
    """A rotation by the angles of the places turns back by their negatives."""
    x, options = inputs[0].shadow, dict(kwargs)
    tokens = int(np.prod(x.shape[:-2]))
    period = options.pop("period", None) or (x.shape[1] if x.ndim == 4 else max(tokens, 1))
    places = options.pop("positions", np.arange(tokens) % period)
    back = references.rope(dys[0], positions=-places, **options)
    return [(back, np.abs(dys[0]) + np.abs(np.roll(dys[0], x.shape[-1] // 2, -1)))]


def _joined(
    program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]
) -> Any:
    ends = np.cumsum([v.shadow.shape[kwargs["dim"]] for v in inputs])[:-1]
    return [(part, np.abs(part)) for part in np.split(dys[0], ends, kwargs["dim"])]


def _cut(program: Whole, dys: list[np.ndarray], inputs: list[Value], outs: list[Value], kwargs: dict[str, Any]) -> Any:
    whole = np.concatenate(dys, kwargs["dim"])
    return [(whole, np.abs(whole))]


RULES: dict[str, Any] = {
    **rules.UNARY, **rules.BINARY, "where": rules.where, "sum": rules.total, "mean": rules.average, "amax": rules.extremum,
    "amin": rules.extremum, "softmax": rules.softmax, "rms_norm": rules.rms_norm, "layer_norm": rules.layer_norm,
    "swiglu": rules.swiglu, "matmul": rules.matmul, "linear": rules.linear, "embedding": rules.embedding,
    "cross_entropy": rules.cross_entropy, "attention": rules.attention, "cumsum": rules.cumsum, "conv1d": rules.conv1d,
    "causal_conv1d": rules.causal_conv1d,
}  # fmt: skip
PARTS = {
    **{name: _by_rule(rule, name in rules.BINARY) for name, rule in RULES.items()},
    "move": _moved,
    "put": _put,
    "rope": _rotated,
    "cat": _joined,
    "split": _cut,
}
VARIANTS = {
    "linear",
    "swiglu",
    "attention",
    "cross_entropy",
    "softmax",
    "sum",
    "mean",
    "put",
    "rope",
    "cumsum",
    "conv1d",
    "causal_conv1d",
}  # additions want arguments, or other inputs


def _second_opinion() -> Second | None:
    """PyTorch's, where it is installed."""
    folder = Path(__file__).resolve().parents[2] / "parity" / "support"
    if os.environ.get("XTRAIN_SANITIZE") or not folder.is_dir():
        return None
    if os.fspath(folder) not in sys.path:
        sys.path.append(os.fspath(folder))
    with contextlib.suppress(ImportError):
        from torch_steps import differs

        return differs
    return None


class Programs(Family):
    name = "programs"
    share = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.trace: Trace = []
        self.second = _second_opinion()
        _C.set_num_threads(1)  # many processes run side by side
        np.seterr(all="ignore")

    def describe(self) -> str:
        return told(self.trace)

    def run(self, chance: random.Random) -> None:
        try:
            program = Whole(chance, self.trace, self.second)
            self.counts["steps"] += program.run()
            self.counts["beside PyTorch"] += program.second is not None
            if program.structure:
                self.counts[program.structure] += 1
        finally:
            _C.use_gemm_backend(None)
            _C.use_attention_backend(None)


FAMILY = Programs
