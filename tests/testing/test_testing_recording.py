"""record: one at a time, and nothing of it stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import xtrain as xt
from xtrain import _C, nn
from xtrain.testing import first_divergence, record, recording

X = xt.randn(5, 6)


class Net(nn.Module):
    def __init__(self):
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def run(model):
    return (model(X.to(model.first.weight.dtype)) ** 2).mean()


def test_one_recording_at_a_time(no_leaks):
    model = Net()
    before = [dict(m.__dict__) for m in model.modules()]
    apply = xt.Function.__dict__["apply"]
    sentence = "^record: a recording must end before the next begins, got one that is under way$"

    def refused(second):
        with pytest.raises(RuntimeError, match=sentence), second:
            pytest.fail("a second recording began")

    outer = record(model)
    with outer:
        for second in (outer, record(model), record()):
            refused(second)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(refused, record(model)).result()
        with pytest.raises(RuntimeError, match=sentence):
            first_divergence(run, model)
        begun = len(outer.steps)
        run(model).backward()
    steps = len(outer.steps) - begun
    assert steps and [dict(m.__dict__) for m in model.modules()] == before
    assert xt.Function.__dict__["apply"] is apply and _C.set_call_hook(None) is None and not recording.mhc.separate
    with outer:  # the refusals have not closed the door, and a backward of before is not this one
        run(model)
    assert len(outer.steps) == begun + 2 * steps


def test_a_recording_that_cannot_begin_leaves_nothing_behind():
    class Broken(nn.Module):
        def __init__(self):
            self.inner = nn.Linear(2, 2)

        @property
        def forward(self):
            raise KeyError("no forward")

    outer = nn.Module()
    outer.first, outer.second = nn.Linear(2, 2), Broken()
    with pytest.raises(KeyError, match="no forward"), record(outer):
        pass
    assert "forward" not in outer.first.__dict__ and _C.set_call_hook(None) is None and not recording.mhc.separate
    with record(outer.first):
        pass


def test_a_recording_ends_also_when_a_module_was_changed_inside() -> None:
    model = nn.Linear(2, 2)
    with record(model):
        del model.__dict__["forward"]
    with record(model) as again:
        model(xt.ones(1, 2))
    assert again.steps and "forward" not in model.__dict__


def test_an_op_whose_name_was_given_away_is_an_error(monkeypatch) -> None:
    """A hook is told which op ran by the attribute of _C: another object there is refused, not read as an op."""
    rms_norm = _C.rms_norm
    monkeypatch.setattr(_C, "rms_norm", lambda *args: rms_norm(*args))
    refused = pytest.raises(TypeError, match=r"^set_call_hook: _C.rms_norm must be the op itself .*, got function$")
    with refused, record():
        _C.rms_norm(xt.ones(2, 3))
    assert rms_norm(xt.ones(2, 3)).shape == (2, 3)


def test_what_a_step_says() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return x.tanh().exp()

    class Outer(nn.Module):
        def __init__(self):
            self.inner, self.last = Inner(), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.inner(x).exp())

    class Two(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1, x + 2

    model = Outer()
    with record(model) as recorded:
        y = model(X)
        first, second = Two.apply(X)
        y.sum().backward()
    steps = {step.name: step for step in recorded.steps if step.kind != "op"}
    assert steps["Inner"].inside == 2 and steps["Outer"].inside == 3 + steps["Linear"].inside
    assert steps["Two"].unchanged
    second.add_(1)
    assert not steps["Two"].unchanged and first.tolist() == (X + 1).tolist()
    before = {name: p.grad.tolist() for name, p in model.named_parameters()}
    step = steps["Outer"]
    assert len(step.differentiate(step.inputs, 0, xt.ones(5, 2))) == 3
    assert {name: p.grad.tolist() for name, p in model.named_parameters()} == before
