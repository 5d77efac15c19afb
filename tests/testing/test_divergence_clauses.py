"""first_divergence, sentence by sentence: what it compares, what it blames, what it says, what it leaves as it was."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import xtrain as xt
from xtrain import _C, nn
from xtrain.testing import divergence, first_divergence


class Scale(nn.Module):
    """x * weight, with what a test puts behind it."""

    def __init__(self, then=lambda y: y, size: int = 3):
        super().__init__()
        self.weight = nn.Parameter(xt.tensor([float(i + 1) for i in range(size)]))
        self.then = then

    def forward(self, x):
        return self.then(x.to(self.weight.dtype) * self.weight)


def function(name: str, forward, backward):
    """An xt.Function of this name, applied."""
    made = type(name, (xt.Function,), {"forward": staticmethod(lambda ctx, *x: forward(*x)), "backward": staticmethod(lambda ctx, *dy: backward(*dy))})  # fmt: skip
    return lambda *x: made.apply(*x)


@pytest.fixture
def x() -> xt.Tensor:
    return xt.tensor([1.0, 2.0, 3.0])


def test_the_seed_is_an_int(x) -> None:
    for bad in (True, 1.0, "1"):
        with pytest.raises(TypeError, match=f"^first_divergence: seed must be an int, got {type(bad).__name__}$"):
            first_divergence(lambda m: m(x), Scale(), seed=bad)


def test_what_is_left_as_it_was(x) -> None:
    """The generator, seed and stream, and the .grad of both models."""
    model, reference = Scale(), Scale()
    model.weight.grad, reference.weight.grad = x * 5, x * 7
    xt.manual_seed(3)
    for _ in range(5):
        xt.rand(4)
    before = _C.get_rng_state()
    assert first_divergence(lambda m: m(x) + xt.rand(3), model, reference)
    assert _C.get_rng_state() == before
    assert model.weight.grad.tolist() == [5, 10, 15] and reference.weight.grad.tolist() == [7, 14, 21]


def test_the_copy_of_a_model_runs_on_the_plain_backends(x) -> None:
    seen = set()

    def look(y):
        names = _C.use_gemm_backend(None), _C.use_attention_backend(None)
        _C.use_gemm_backend(names[0]), _C.use_attention_backend(names[1])
        seen.add((y.dtype.name, *names))
        return y

    assert first_divergence(lambda m: m(x), Scale(look))
    assert {names for names in seen if names[1:] != (None, None)} == {("float64", "naive", "reference")}
    assert ("float32", None, None) in seen


@pytest.mark.parametrize(("off", "right"), [(1e-7, True), (1e-3, False)])
def test_a_formula_that_is_off_by_a_thousandth_is_wrong(off: float, right: bool, x) -> None:
    model = Scale(function("Off", lambda x: x * 2, lambda dy: dy * (2 * (1 + off))))
    found = first_divergence(lambda m: m(x), model)
    assert found.ok is right
    assert right or (found.first.phase, found.first.name) == ("formula", "Off")
    phases = {c.phase for c in first_divergence(lambda m: m(x), model, finite_differences=False).comparisons}
    assert phases == {"parameter", "forward", "backward"}


@pytest.mark.parametrize(("off", "right"), [(1e-7, True), (1e-5, False)])
def test_a_parameter_is_compared_to_the_rounding_of_its_format(off: float, right: bool, x) -> None:
    model, reference = Scale(), Scale()
    with xt.no_grad():
        reference.weight[1] = 2 * (1 + off)
    found = first_divergence(lambda m: m(x), model, reference)
    assert found.ok is right
    assert right or str(found.first) == "parameter of weight: its value"


def test_a_result_of_several_elements_is_summed_up(x) -> None:
    arrived = []

    def backward(dy):
        arrived.append(dy.tolist())
        return dy

    assert first_divergence(
        lambda m: m(x), Scale(function("See", lambda x: x.clone(), backward)), finite_differences=False
    )
    assert arrived[0] == [1, 1, 1]


def test_where_nan_is_in_what_has_several_inputs_or_outputs(x) -> None:
    spoiled = xt.tensor([1.0, float("nan"), 1.0])
    found = first_divergence(lambda m: m(x) + spoiled, Scale(), Scale())
    assert found.nan == ["NaN first appears, in both runs, in input other of add"]
    two = function("Two", lambda x: (x.clone(), x * float("nan")), lambda a, b: a)
    found = first_divergence(lambda m: two(m(x))[0], Scale(), finite_differences=False)
    assert found.nan == ["NaN first appears, in both runs, in output 1 of Two"]


def test_the_verdict_on_two_wrong_ops(x) -> None:
    def net(share: float):
        first = function("First", lambda x: x * (1 + share), lambda dy: dy)
        second = function("Second", lambda x: x * (1 + share), lambda dy: dy)
        return Scale(lambda y: second(first(y) * 2.0))

    found = first_divergence(lambda m: m(x), net(0.1), net(0.0), finite_differences=False)
    assert (found.first.phase, found.first.name) == ("forward", "First")
    others = [line for line in str(found).splitlines() if line.startswith("also wrong by itself: ")]
    assert others == ["also wrong by itself: forward of Second"]
    right = first_divergence(lambda m: m(x), net(0.0), net(0.0), finite_differences=False)
    isolated = sum(not math.isnan(c.own) for c in right.comparisons)
    assert isolated < len(right.comparisons)
    assert str(right) == f"no divergence: {isolated} results are within tolerance in isolation"


def test_the_distance_to_what_is_not_finite() -> None:
    one, inf = xt.ones(2), xt.tensor([1.0, float("inf")])
    assert divergence._distance(inf, one) == divergence._distance(one, inf) == math.inf
    assert divergence._distance(inf, inf) == 0.0
    assert divergence._distance(one * 3, one * 2) == 0.5


@pytest.mark.parametrize("lacks", ["model", "reference"])
def test_a_gradient_that_one_run_lacks_is_wrong(lacks: str, x) -> None:
    model, reference = Scale(), Scale()
    for one, name in ((model, "model"), (reference, "reference")):
        cut = function("Cut", lambda x, y: x + y, lambda dy, name=name: (dy, None if name == lacks else dy))
        one.then = lambda y, cut=cut: cut(y, y * 2.0)
    found = first_divergence(lambda m: m(x), model, reference, finite_differences=False)
    assert (found.first.phase, found.first.name, found.first.own) == ("backward", "Cut", math.inf)
    assert found.first.detail == ("no gradient" if lacks == "model" else "a gradient where none is expected")


def test_a_module_of_pytorch_needs_a_run_of_its_own(monkeypatch, x) -> None:
    monkeypatch.setattr(divergence, "is_torch_module", lambda x: isinstance(x, SimpleNamespace))
    with pytest.raises(
        ValueError, match="^first_divergence: reference_run must be given for a PyTorch module, got None$"
    ):
        first_divergence(lambda m: m(x), Scale(), SimpleNamespace())
