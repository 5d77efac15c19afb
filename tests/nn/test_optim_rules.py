"""Rules of optimizers and schedules at their edges, and what an error leaves as it was."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import pytest

import xtrain as xt
from xtrain import nn, optim

pytestmark = pytest.mark.on_cpu


def param(*values: float, dtype=None) -> nn.Parameter:
    t = xt.tensor(list(values))
    return nn.Parameter(t if dtype is None else t.to(dtype))


def step(optimizer, *pairs) -> None:
    for p, grad in pairs:
        p.grad = xt.tensor(grad).to(p.dtype)
    optimizer.step()


# ---- schedules


def test_edges_of_schedules() -> None:
    """The last step of the warm-up has base, and so has the first one behind it; total and what follows have final."""
    for kind in ("cosine", "linear"):
        rates = [optim.lr_schedule(kind, s, 4, 10, 8.0, 2.0) for s in range(13)]
        assert rates[:5] == [2.0, 4.0, 6.0, 8.0, 8.0] and rates[10:] == [2.0] * 3 and rates[7] == 5.0
        assert optim.lr_schedule(kind, 0, 0, 10, 8.0) == 8.0 and optim.lr_schedule(kind, 3, 3, 3, 8.0, 2.0) == 8.0
    assert [optim.lr_schedule("constant", s, 2, 4, 8.0, 2.0) for s in (0, 1, 2, 9)] == [4.0, 8.0, 8.0, 8.0]


def test_a_scheduler_sets_the_rate_of_its_step() -> None:
    def made():
        optimizer = optim.SGD([{"params": [param(1.0)], "lr": 2.0}, {"params": [param(1.0)], "lr": 3.0}])
        return optimizer, optim.LRScheduler(optimizer, [lambda s: 1.0 / (s + 1), lambda s: 10.0 + s])

    optimizer, scheduler = made()
    assert scheduler.get_last_lr() == [2.0, 30.0]
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0, 33.0] and optimizer.param_groups[1]["initial_lr"] == 3.0
    other, twin = made()
    twin.load_state_dict(scheduler.state_dict())
    assert twin.get_last_lr() == [1.0, 33.0] and twin.last_epoch == 1
    twin.step(), scheduler.step()
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]


# ---- SGD


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_its_formula(nesterov: bool) -> None:
    lr, momentum, dampening, decay = 0.1, 0.9, 0.0 if nesterov else 0.25, 0.5
    p = param(1.0, -2.0)
    optimizer = optim.SGD([p], lr, momentum, dampening, decay, nesterov)
    x, b = np.array([1.0, -2.0]), None
    for grad in ([0.5, 1.0], [-1.0, 0.25], [2.0, 2.0]):
        step(optimizer, (p, grad))
        g = np.array(grad) + decay * x
        b = g if b is None else momentum * b + (1 - dampening) * g
        x = x - lr * (g + momentum * b if nesterov else b)
        assert np.abs(p.detach().numpy() - x).max() < 1e-6


def test_a_buffer_has_memory_of_its_own() -> None:
    p = param(1.0)
    optimizer = optim.SGD([p], 0.1, 0.9)
    p.grad = xt.tensor([2.0])
    optimizer.step()
    p.grad.fill_(7.0)
    assert optimizer.state[p]["momentum_buffer"].tolist() == [2.0]


# ---- AdamW


def test_groups_have_rates_of_their_own() -> None:
    """With gradients that never change each step is lr, whatever its size."""
    a, b = param(0.0), param(0.0)
    optimizer = optim.AdamW([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.25}], weight_decay=0.0)
    step(optimizer, (a, [3.0]), (b, [5.0]))
    assert abs(a.item() + 1.0) < 1e-5 and abs(b.item() + 0.25) < 1e-5
    optimizer.param_groups[0]["lr"] = 0.5
    step(optimizer, (a, [3.0]), (b, [5.0]))
    assert abs(a.item() + 1.5) < 1e-5 and abs(b.item() + 0.5) < 1e-5


def test_moments_of_another_dtype_are_converted() -> None:
    """Of a state without masters, or saved by another library: moments in float32, a master of the parameter."""
    p = param(1.0, 2.0, dtype=xt.bfloat16)
    optimizer = optim.AdamW([p])
    values = {"step": 3, "exp_avg": xt.ones((2,)).bfloat16(), "exp_avg_sq": xt.ones((2,)).double()}
    optimizer.load_state_dict({"state": {0: values}, "param_groups": optimizer.state_dict()["param_groups"]})
    state = optimizer.state[p]
    assert [state[name].dtype.name for name in ("exp_avg", "exp_avg_sq", "master")] == ["float32"] * 3
    assert state["master"].tolist() == [1.0, 2.0]
    step(optimizer, (p, [1.0, 1.0]))
    assert state["step"] == 4


# ---- all optimizers


def test_a_parameter_of_two_groups_is_refused() -> None:
    p, q = param(1.0), param(1.0)
    for groups in ([p, p], [{"params": [p]}, {"params": [q, p]}]):
        with pytest.raises(ValueError, match="AdamW: params must be distinct, got one twice"):
            optim.AdamW(groups)


def test_zero_grad_drops_or_fills() -> None:
    p, q = param(1.0), param(1.0)
    optimizer = optim.SGD([p, q])
    p.grad = xt.tensor([2.0])
    held = p.grad
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0.0] and held.tolist() == [0.0] and q.grad is None
    optimizer.zero_grad()
    assert p.grad is None


def test_a_loaded_state_has_memory_of_its_own() -> None:
    for make in (lambda p: optim.AdamW([p]), lambda p: optim.SGD([p], 0.1, 0.9)):
        p, q = param(1.0), param(1.0)
        first, second = make(p), make(q)
        step(first, (p, [2.0]))
        state = first.state_dict()
        second.load_state_dict(state)
        before = [t.tolist() for t in state["state"][0].values() if isinstance(t, xt.Tensor)]
        step(second, (q, [5.0]))
        assert [t.tolist() for t in state["state"][0].values() if isinstance(t, xt.Tensor)] == before


def test_a_state_that_is_refused_changes_nothing() -> None:
    """The second group is wrong: the first has its options and state still."""
    p, q = param(1.0), param(1.0)
    optimizer = optim.AdamW([{"params": [p]}, {"params": [q]}], lr=0.5)
    step(optimizer, (p, [1.0]), (q, [1.0]))
    saved = optimizer.state_dict()
    wrong = {
        "state": saved["state"],
        "param_groups": [{**g, "lr": lr} for g, lr in zip(saved["param_groups"], (0.125, -1.0))],
    }
    with pytest.raises(ValueError, match="AdamW: lr must be a number"):
        optimizer.load_state_dict(wrong)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5] and optimizer.state[p]["step"] == 1


def test_an_error_of_clipping_changes_nothing() -> None:
    p = param(1.0, 2.0)
    p.grad = xt.tensor([math.nan, 4.0])
    with pytest.raises(RuntimeError, match="must be finite, got nan"):
        optim.clip_grad_norm_([p], 0.5, error_if_nonfinite=True)
    assert p.grad[1].item() == 4.0


# ---- initial values


def test_kaiming_bounds() -> None:
    """Of a weight [out, in] that is no square; parameters are filled in place, without recording."""
    for shape, fan_in in (((20, 500), 500), ((500, 20), 20), ((10, 30, 4), 120)):
        for a in (0.0, math.sqrt(5.0)):
            w = nn.Parameter(xt.zeros(shape))
            assert nn.init.kaiming_uniform_(w, a) is w and w.is_leaf
            bound = math.sqrt(6.0 / ((1 + a * a) * fan_in))
            top = np.abs(w.detach().numpy()).max()
            assert 0.98 * bound < top <= bound


def test_a_group_that_is_refused_changes_nothing() -> None:
    """It can be added once its option is right."""
    p, q = param(1.0), param(1.0)
    optimizer = optim.AdamW([p])
    with pytest.raises(ValueError, match="AdamW: lr must be a number"):
        optimizer.add_param_group({"params": [q], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q], "lr": 1.0})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1.0]


def test_what_a_group_may_be() -> None:
    p = param(1.0)
    given = {"params": p, "name": "first", "initial_lr": 3.0}
    optimizer = optim.AdamW([given], lr=0.5)
    assert optimizer.param_groups[0]["name"] == "first" and optimizer.param_groups[0]["params"] == [p]
    assert given == {"params": p, "name": "first", "initial_lr": 3.0}, "the caller's dict is as it was"
    for group, words in (
        (3, "a group must be a dict with the key params, got int"),
        ({"lr": 1.0}, "with the key params"),
    ):
        with pytest.raises(TypeError, match=words):
            optimizer.add_param_group(group)
    with pytest.raises(TypeError, match="params must have a floating dtype, got int64"):
        optim.SGD([xt.tensor([1])])


def test_numbers_of_a_state() -> None:
    p, q = param(1.0), param(1.0)
    optimizer = optim.AdamW([{"params": [p]}, {"params": [q]}])
    step(optimizer, (p, [1.0]), (q, [1.0]))
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]] and sorted(saved["state"]) == [0, 1]
    first, second = saved["param_groups"]
    for groups, words in (
        ([first, {**second, "params": [0]}], "groups must number each parameter once"),
        ([first, {**second, "params": [1, 2]}], r"groups must have \[1, 1\] parameters, got \[1, 2\]"),
        ([first], r"groups must have \[1, 1\] parameters, got \[1\]"),
    ):
        with pytest.raises(ValueError, match=f"load_state_dict: {words}"):
            optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    with pytest.raises(ValueError, match="state must belong to parameters 0 to 1, got 5"):
        optimizer.load_state_dict({"state": {5: saved["state"][0]}, "param_groups": saved["param_groups"]})
    swapped = [{**first, "params": ["b"]}, {**second, "params": ["a"]}]  # names in another order are numbers, too
    optimizer.load_state_dict(
        {"state": {"a": {**saved["state"][0], "step": 7}, "b": saved["state"][1]}, "param_groups": swapped}
    )
    assert (optimizer.state[p]["step"], optimizer.state[q]["step"]) == (1, 7)
    optimizer.load_state_dict({**saved, "param_groups": [{**first, "foreach": None}, second]})  # an option of PyTorch's
    assert optimizer.state_dict()["param_groups"] == [first, second]


def test_what_optimizers_do_not_have() -> None:
    p = param(1.0)
    for name in ("amsgrad", "maximize", "capturable", "differentiable"):
        with pytest.raises(NotImplementedError, match=f"AdamW: {name} must be False, got True"):
            optim.AdamW([p], **{name: True})
    optim.AdamW([p], foreach=True, fused=True)
    for optimizer in (optim.AdamW([p]), optim.SGD([p])):
        with pytest.raises(NotImplementedError, match="closure must be None"):
            optimizer.step(lambda: 0.0)
    with pytest.raises(NotImplementedError, match="norm_type must be 2.0, got 1.0"):
        optim.clip_grad_norm_([p], 1.0, norm_type=1.0)


def test_a_scheduler_has_a_function_for_each_group() -> None:
    p, q = param(1.0), param(1.0)
    optimizer = optim.SGD([{"params": [p], "lr": 1.0}, {"params": [q], "lr": 2.0}])
    with pytest.raises(ValueError, match="lr_lambda must have 2 functions, got 1"):
        optim.LRScheduler(optimizer, [lambda n: 1.0])
    scheduler = optim.LRScheduler(optimizer, [lambda n: 1.0 + n, lambda n: 0.5])
    scheduler.step()
    assert scheduler.get_last_lr() == [2.0, 1.0] == [group["lr"] for group in optimizer.param_groups]
    again = optim.LRScheduler(optimizer, lambda n: 1.0)
    assert again.base_lrs == [1.0, 2.0], "initial rates stay those of the first scheduler"


def test_dampening() -> None:
    p = param(0.0)
    optimizer = optim.SGD([p], lr=1.0, momentum=0.5, dampening=0.25)
    step(optimizer, (p, [1.0]))
    step(optimizer, (p, [1.0]))
    assert p.item() == -1.0 - (0.5 + 0.75), "the first gradient is not dampened"


def test_a_gradient_is_not_changed_by_a_step() -> None:
    for optimizer, p in (
        (kind([q], lr=0.1, weight_decay=0.5), q) for kind in (optim.SGD, optim.AdamW) for q in (param(2.0),)
    ):
        step(optimizer, (p, [1.0]))
        assert p.grad.tolist() == [1.0]


def test_clipping_one_tensor_and_none() -> None:
    p = param(1.0)
    norm = optim.clip_grad_norm_(p, 1.0)
    assert norm.item() == 0.0 and norm.dtype is xt.float32 and norm.shape == ()
    p.grad = xt.tensor([2.0])
    assert optim.clip_grad_norm_(p, 1.0, error_if_nonfinite=True).item() == 2.0 and abs(p.grad.item() - 1.0) < 1e-6


SCHEDULES = optim.lr_scheduler
NO_SCHEDULE = [
    ("OneCycleLR", dict(max_lr=1.0, total_steps=9, div_factor=0), "div_factor must be a finite number above 0, got 0"),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=9, final_div_factor=-1.0), "final_div_factor must be a finite number above 0, got -1.0"),
    ("OneCycleLR", dict(max_lr="a", total_steps=9), "max_lr must be a finite number, got 'a'"),
    ("OneCycleLR", dict(max_lr=math.nan, total_steps=9), "max_lr must be a finite number, got nan"),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=9, div_factor=math.inf), "div_factor must be a finite number above 0, got inf"),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=9, pct_start=2.0), "pct_start must be a finite number in [0, 1], got 2.0"),
    ("StepLR", dict(step_size=1, gamma="x"), "gamma must be a finite number, got 'x'"),
    ("ExponentialLR", dict(gamma=None), "gamma must be a finite number, got None"),
    ("MultiStepLR", dict(milestones=3), "milestones must be integers of at least 0, got 3"),
    ("MultiStepLR", dict(milestones=[1, "a"]), "each of milestones must be an integer of at least 0, got 'a'"),
    ("ConstantLR", dict(factor="a"), "factor must be a finite number, got 'a'"),
    ("LinearLR", dict(start_factor="a"), "start_factor must be a finite number, got 'a'"),
    ("LinearLR", dict(end_factor=math.inf), "end_factor must be a finite number, got inf"),
    ("PolynomialLR", dict(power=-1.0), "power must be a finite number of at least 0, got -1.0"),
    ("CosineAnnealingLR", dict(T_max=5, eta_min="a"), "eta_min must be a finite number, got 'a'"),
    ("CosineAnnealingWarmRestarts", dict(T_0=5, eta_min="a"), "eta_min must be a finite number, got 'a'"),
    ("SequentialLR", dict(schedulers=3, milestones=[]), "schedulers must be several, got int"),
    ("SequentialLR", dict(schedulers=[], milestones=4), "milestones must be integers of at least 0, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text"), NO_SCHEDULE)
def test_a_schedule_of_wrong_numbers_is_refused(name: str, options: dict, text: str) -> None:
    optimizer = optim.AdamW([xt.nn.Parameter(xt.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {text}')}$"):
        getattr(SCHEDULES, name)(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_schedule_of_no_functions_is_refused() -> None:
    optimizer = optim.AdamW([xt.nn.Parameter(xt.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"^LRScheduler: lr_lambda must be functions of a step, got int$"):
        SCHEDULES.LambdaLR(optimizer, 3)
    with pytest.raises(TypeError, match=r"^LRScheduler: last_epoch must be an int, got str$"):
        SCHEDULES.LambdaLR(optimizer, lambda step: 1.0, "x")


U = nn.utils


@pytest.mark.parametrize("bad", [None, 3, 1.5, "a", b"x", [3], {}, object()])
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda bad: optim.EMA([param(1.0)], 0.9, [bad]), "EMA: optimizer must be an optimizer or None, got list"),
        (
            lambda bad: optim.EMA([param(1.0)]).load_state_dict({"step": 1, "averages": [bad]}),
            "EMA: every average must be a Tensor, got ",
        ),
        (lambda bad: optim.LRScheduler(bad, abs), "LRScheduler: optimizer must be an optimizer, got "),
        (lambda bad: optim.lr_scheduler.StepLR(bad, 2), "StepLR: optimizer must be an optimizer, got "),
        (lambda bad: stepped().load_state_dict(bad), "StepLR: state_dict must be a dict with base_lrs and last_epoch"),
        (
            lambda bad: stepped().load_state_dict({"base_lrs": [bad and [bad]], "last_epoch": 1}),
            "StepLR: base_lrs must be a list of numbers, got ",
        ),
        (lambda bad: optim.lr_schedule("wsd", [bad], 1, 9, 1.0), "lr_schedule: step must be a number, got list"),
        (lambda bad: optim.lr_schedule("wsd", 1, 1, 9, 1.0, [bad]), "lr_schedule: final must be a number, got list"),
        (lambda bad: optim.lr_schedule("wsd", 1, 1, 9, 1.0, 0.0, [bad]), "lr_schedule: decay must be a number or None"),
        (lambda bad: U.clip_grad_norm_([bad], 1.0), "clip_grad_norm_: every parameter must be a Tensor, got "),
        (lambda bad: U.clip_grad_value_([bad], 1.0), "clip_grad_value_: every parameter must be a Tensor, got "),
        (lambda bad: U.parameters_to_vector([bad]), "parameters_to_vector: every parameter must be a Tensor, got "),
        (lambda bad: U.vector_to_parameters(bad, []), "vector_to_parameters: vec must be a Tensor, got "),
        (
            lambda bad: U.vector_to_parameters(xt.ones(1), [bad]),
            "vector_to_parameters: every parameter must be a Tensor",
        ),
    ],
)
def test_arguments_of_other_types_are_one_sentence(call, sentence: str, bad) -> None:
    with pytest.raises(TypeError) as found:
        call(bad)
    assert str(found.value).startswith(sentence) and "\n" not in str(found.value)


@pytest.mark.parametrize("call", [lambda bad: U.clip_grad_norm_(bad, 1.0), lambda bad: U.clip_grad_value_(bad, 1.0)])
def test_parameters_that_are_no_list(call) -> None:
    for bad, got in ((3, "int"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"parameters must be a Tensor or an iterable of Tensors, got {got}$"):
            call(bad)


def test_clipping_calls_no_python_function_for_each_parameter() -> None:
    """An eager step waits for the host, and a model has hundreds of parameters."""

    def calls(count: int) -> int:
        params, found = [param(1.0) for _ in range(count)], 0
        for p in params:
            p.grad = xt.ones(1)

        def see(frame, event: str, arg) -> None:
            nonlocal found
            found += event == "call"

        sys.setprofile(see)
        try:
            U.clip_grad_norm_(params, 1.0)
        finally:
            sys.setprofile(None)
        return found

    assert calls(2) == calls(200)


def test_one_bad_parameter_among_many_is_named() -> None:
    for bad in (3, None, np.ones(1)):
        with pytest.raises(TypeError, match=f"every parameter must be a Tensor, got {type(bad).__name__}$"):
            U.clip_grad_norm_([param(1.0), xt.ones(1), bad, param(2.0)], 1.0)


def stepped() -> optim.LRScheduler:
    return optim.lr_scheduler.StepLR(optim.SGD([param(1.0)], lr=0.1), 2)


def test_a_state_of_a_schedule_that_is_refused_changes_nothing() -> None:
    schedule = stepped()
    before = schedule.state_dict(), schedule.get_last_lr()
    for state, error in (
        ({"base_lrs": [0.5, 0.5], "last_epoch": 2}, ValueError),
        ({"base_lrs": [0.5], "last_epoch": "a"}, TypeError),
        ({"base_lrs": [0.5]}, TypeError),
    ):
        with pytest.raises(error, match="^StepLR: "):
            schedule.load_state_dict(state)
        assert (schedule.state_dict(), schedule.get_last_lr()) == before
    chain = optim.lr_scheduler.SequentialLR(schedule.optimizer, [schedule], [])
    with pytest.raises(TypeError, match="^SequentialLR: state_dict must have 1 schedulers, got "):
        chain.load_state_dict(schedule.state_dict())


def test_a_state_of_schedules_that_is_refused_changes_none_of_them() -> None:
    """Each part of a state is checked before the first is written; so are the groups, which may have been added to."""
    optimizer = optim.SGD([param(1.0)], lr=1.0)
    parts = [SCHEDULES.StepLR(optimizer, 2), SCHEDULES.OneCycleLR(optimizer, 1.0, 4)]
    chain = SCHEDULES.SequentialLR(optimizer, parts, [2])

    def everything() -> tuple:
        return chain.state_dict(), [group["lr"] for group in optimizer.param_groups]

    before, good = everything(), {"base_lrs": [0.5], "last_epoch": 2}
    for state, text in (
        ({**good, "schedulers": [good, {"base_lrs": [0.5]}]}, "OneCycleLR: state_dict must be a dict with base_lrs and last_epoch, "),
        ({**good, "schedulers": [good, {**good, "last_epoch": 4}]}, "OneCycleLR: step must be below total_steps 4, got 4"),
        ({**good, "last_epoch": 6, "schedulers": [good, good]}, "OneCycleLR: step must be below total_steps 4, got 4"),
        ({**good, "base_lrs": [0.5, 0.5], "schedulers": [good, good]}, "SequentialLR: base_lrs must hold 1 numbers, got 2"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}"):
            chain.load_state_dict(state)
        assert everything() == before, text
    optimizer.add_param_group({"params": [param(1.0)], "lr": 7.0})
    before = everything()
    for call in (lambda: parts[0].load_state_dict(good), parts[0].step, chain.step):
        with pytest.raises(ValueError, match=r"LR: optimizer must have as many groups as its schedule, 1, got 2$"):
            call()
        assert everything() == before


def test_integers_of_numpy_and_tensors_are_numbers_of_steps() -> None:
    def rates(name: str, **options) -> list[float]:
        optimizer = optim.AdamW([xt.nn.Parameter(xt.ones(2))], lr=0.1)
        if name == "SequentialLR":
            options["schedulers"] = [SCHEDULES.ConstantLR(optimizer), SCHEDULES.StepLR(optimizer, 1)]
        scheduler = getattr(SCHEDULES, name)(optimizer, **options)
        return [scheduler.get_last_lr()[0] for _ in range(5) if not scheduler.step()]

    for several in (np.array([1, 3]), xt.tensor([1, 3]), (np.int64(1), xt.tensor(3)), [3, 1]):
        assert rates("MultiStepLR", milestones=several) == rates("MultiStepLR", milestones=[1, 3])
    assert rates("SequentialLR", milestones=np.array([2])) == rates("SequentialLR", milestones=[2])
    assert rates("StepLR", step_size=np.int32(2)) == rates("StepLR", step_size=2)
    assert rates("StepLR", step_size=2, last_epoch=np.int64(1)) == rates("StepLR", step_size=2, last_epoch=1)


# (name, options, the rate of each step from a base of 1), by hand; ValueError is raised in the step behind the last
RATES = [
    ("StepLR", dict(step_size=2), [1, 1, 0.1, 0.1, 0.01]),
    ("MultiStepLR", dict(milestones=[3, 1], gamma=0.5), [1, 0.5, 0.5, 0.25]),
    ("ExponentialLR", dict(gamma=0.5), [1, 0.5, 0.25]),
    ("ConstantLR", dict(factor=0.5, total_iters=2), [0.5, 0.5, 1, 1]),
    ("LinearLR", dict(start_factor=0.5, total_iters=2), [0.5, 0.75, 1, 1]),
    ("PolynomialLR", dict(total_iters=2, power=2.0), [1, 0.25, 0, 0]),
    ("CosineAnnealingLR", dict(T_max=2), [1, 0.5, 0, 0.5, 1]),
    ("CosineAnnealingWarmRestarts", dict(T_0=2), [1, 0.5, 1, 0.5, 1]),
    ("CosineAnnealingWarmRestarts", dict(T_0=1, T_mult=2), [1, 1, 0.5, 1, *(0.5 + math.sqrt(0.125) * i for i in (1, 0, -1)), 1]),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=4, pct_start=0.5, div_factor=4.0, final_div_factor=5.0, anneal_strategy="linear"), [0.25, 1, 0.525, 0.05]),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=4, pct_start=0.25, div_factor=4.0, final_div_factor=5.0), [1, 0.7625, 0.2875, 0.05]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "want"), RATES)
def test_rates_of_schedules(name: str, options: dict, want: list[float]) -> None:
    scheduler = getattr(SCHEDULES, name)(optim.SGD([xt.nn.Parameter(xt.ones(2))], lr=1.0), **options)
    found = [scheduler.get_last_lr()[0], *(scheduler.get_last_lr()[0] for _ in want[1:] if not scheduler.step())]
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-15)
    if name == "OneCycleLR":
        with pytest.raises(ValueError, match="OneCycleLR: step must be below total_steps 4, got 4"):
            scheduler.step()


def test_a_step_behind_the_last_changes_nothing() -> None:
    optimizer = optim.SGD([param(1.0)], lr=1.0)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 2)
    scheduler.step()
    rates = scheduler.get_last_lr()
    for _ in range(2):
        with pytest.raises(ValueError, match="OneCycleLR: step must be below total_steps 2, got 2"):
            scheduler.step()
        assert scheduler.last_epoch == 1 and scheduler.get_last_lr() == rates


def test_schedules_one_after_another() -> None:
    def make(lr: float, milestones=(2,)) -> Any:
        optimizer = optim.SGD([xt.nn.Parameter(xt.ones(2))], lr=lr)
        parts = [SCHEDULES.ConstantLR(optimizer, 0.5, 9), SCHEDULES.StepLR(optimizer, 2)]
        return SCHEDULES.SequentialLR(optimizer, parts, milestones)

    one, found = make(1.0), []
    for _ in range(6):
        found.append(one.get_last_lr()[0])
        other = make(3.0)
        other.load_state_dict(one.state_dict())
        one.step()
        other.step()
        assert other.get_last_lr() == one.get_last_lr(), "with the states of its schedules"
    np.testing.assert_allclose(found, [0.5, 0.5, 1, 1, 0.1, 0.1])
    two = optim.SGD([xt.nn.Parameter(xt.ones(2))], lr=1.0)
    for schedulers, milestones, text in (
        ([SCHEDULES.StepLR(two, 1)] * 3, [2, 2], "milestones must grow, got [2, 2]"),
        ([SCHEDULES.StepLR(two, 1), make(1.0)], [2], "schedulers must have the optimizer given, got one of another"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'SequentialLR: {text}')}$"):
            SCHEDULES.SequentialLR(two, schedulers, milestones)
