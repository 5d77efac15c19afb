"""What AdamW keeps on the device: the count of steps, the learning rate, the guard. `make test-gpu` runs all of it on a GPU."""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C, optim
from xtrain.optable import adamw_group, adamw_reference
from xtrain.optable.table import array, check_close

# A piece of a CUDA kernel has 8192 elements, one of a CPU kernel 16384.
SHAPES = [(3, 4), (5,), (), (0,), (8192,), (3, 16385)]


def parameters(dtype=xt.float32) -> list:
    rng = np.random.default_rng(8)
    return [xt.nn.Parameter(xt.tensor(rng.standard_normal(shape)).to(dtype)) for shape in SHAPES]


def gradients(seed: int, dtype=xt.float32) -> list:
    rng = np.random.default_rng(1000 + seed)
    return [xt.tensor(rng.standard_normal(shape)).to(dtype) for shape in SHAPES]


def content(optimizer) -> list[np.ndarray]:
    """Every parameter, moment and master, and the counts of steps."""
    found = [array(p) for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state_dict()["state"].values():
        found += [array(value) if isinstance(value, xt.Tensor) else np.array(value) for value in state.values()]
    return found


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


def guard_of(value: float):
    return xt.tensor(value, dtype=xt.float32)


# ---- the guard


def guarded(guards: list, dtype=xt.float32) -> list[np.ndarray]:
    """What is there after steps with these guards. The last parameter has a gradient at every other step only."""
    params = parameters(dtype)
    optimizer = optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95))
    for i, value in enumerate(guards):
        if value == "left out":
            continue
        for p, g in zip(params, gradients(i, dtype)):
            p.grad = g if p is not params[-1] or i % 2 == 0 else None
        optimizer.step(guard=guard_of(value))
    return content(optimizer)


@pytest.mark.parametrize("dtype", [xt.float32, xt.float64, xt.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0,), (3,), (1, 2, 6), (2, 5, 7)])
def test_a_step_that_its_guard_stops_is_as_one_that_was_not_taken(where, bad, dtype) -> None:
    found = guarded([bad if i in where else 1.0 for i in range(8)], dtype)
    assert same(found, guarded(["left out" if i in where else 1.0 for i in range(8)], dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first_bad", [0, 1, 4, 6])
def test_a_guard_that_keeps_its_nan_stops_all_steps_behind(first_bad: int, bad: float) -> None:
    """A trainer's running guard: of 7 queued steps those before the bad one count, until the guard is reset."""
    params = parameters()
    optimizer = optim.AdamW(params, lr=1e-2)
    guard = guard_of(0.0)
    for i in range(7):
        for p, g in zip(params, gradients(i)):
            p.grad = g
        optimizer.step(guard=guard.mul_(guard_of(bad if i == first_bad else 3.0)))
    others = parameters()
    other = optim.AdamW(others, lr=1e-2)
    for i in range(first_bad):
        for p, g in zip(others, gradients(i)):
            p.grad = g
        other.step()
    assert {state["step"] for state in optimizer.state_dict()["state"].values()} == {first_bad}
    if first_bad:
        assert same(content(optimizer), content(other))
    for p, q, g in zip(params, others, gradients(9)):
        p.grad = q.grad = g
    optimizer.step(guard=guard.fill_(0))
    other.step()
    assert same(content(optimizer), content(other))


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_guard_of_another_dtype_is_refused_whatever_its_value(value: float) -> None:
    param = xt.nn.Parameter(xt.ones(3))
    param.grad = xt.ones(3)
    with pytest.raises(TypeError, match="guard must have dtype float32"):
        optim.AdamW([param]).step(guard=xt.tensor(value, dtype=xt.float64))


# ---- the count


def test_the_same_call_again_is_the_next_step() -> None:
    """A recorded launch is replayed with no new number from the host: the count goes up by itself."""
    params, grads = parameters(xt.float64), gradients(0, xt.float64)
    values = [array(p).copy() for p in params]
    moments = [(np.zeros_like(v), np.zeros_like(v)) for v in values]
    m, v = ([xt.zeros(*shape, dtype=xt.float64) for shape in SHAPES] for _ in range(2))
    steps, lr, guard = [xt.tensor(41 + i) for i in range(len(SHAPES))], xt.tensor(0.01, dtype=xt.float64), guard_of(1.0)
    groups = adamw_group(len(SHAPES), 0.9, 0.99, 1e-8, 0.1)
    call = [[p.detach() for p in params], grads, m, v, [], steps, [lr], groups, guard]
    for replay in range(5):
        guard.fill_(math.nan if replay == 2 else 1.0)
        lr.fill_(0.01 * (replay + 1))
        _C.adamw_(*call)
        if replay == 2:
            continue
        for i, step in enumerate(steps):
            number = 42 + i + replay - (replay > 2)
            assert step.item() == number
            values[i], *moments[i] = adamw_reference(
                values[i], array(grads[i]), *moments[i], 0.01 * (replay + 1), 0.9, 0.99, 1e-8, 0.1, number
            )
            check_close(array(params[i]), values[i], 1e-13 * (1 + np.abs(values[i])), f"replay {replay}")


def test_more_tensors_than_one_launch_takes_count_one_by_one() -> None:
    params = [xt.nn.Parameter(xt.full((1 + i % 7,), 1.0)) for i in range(1500)]
    params[700] = xt.nn.Parameter(xt.ones(30000))
    optimizer = optim.AdamW(params, lr=0.1, weight_decay=0.0)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = xt.ones(*p.shape) if i % 3 <= step else None
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [state[i]["step"] for i in range(1500)] == [3 - i % 3 for i in range(1500)]
    for i in (0, 1, 2, 427, 428, 699, 700, 701, 1499):  # a gradient of ones: lr a step
        check_close(array(params[i]), np.full(params[i].shape, 1 - 0.1 * (3 - i % 3)), 1e-6, f"parameter {i}")


def test_step_of_a_state_is_an_int_that_can_be_set() -> None:
    param = xt.nn.Parameter(xt.ones(3))
    param.grad = xt.ones(3)
    optimizer = optim.AdamW([param])
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[param]
    optimizer.step()
    assert type(state["step"]) is int and state["step"] == 3 == dict(state)["step"] == state.get("step")
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and repr(state).startswith("{'step': 3, ")
    state["step"] = 10
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == state["step"] == 11


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
def test_a_dict_that_is_put_in_as_state_goes_on_from_there(dtype) -> None:
    """As `optimizer.state[p] = {...}`; its own tensors are updated."""
    params, others = parameters(dtype), parameters(dtype)
    optimizer, other = optim.AdamW(params, lr=1e-2), optim.AdamW(others, lr=1e-2)
    for i in range(4):
        for p, q, g in zip(params, others, gradients(i, dtype)):
            p.grad = q.grad = g
        if i == 2:
            for q in others:
                other.state[q] = {**other.state[q], "step": np.int64(other.state[q]["step"])}
            moment = other.state[others[0]]["exp_avg"]
            assert same(content(optimizer), content(other)), "state_dict takes them, too"
        optimizer.step()
        other.step()
    assert same(content(optimizer), content(other))
    assert other.state[others[0]]["exp_avg"] is moment and other.state[others[0]]["step"] == 4
    other.state[others[0]] = {"step": 0.5, "exp_avg": moment, "exp_avg_sq": moment}
    with pytest.raises(ValueError, match=r"AdamW: step must be an integer in \[0, 2\*\*40\), got 0\.5"):
        other.step()


def test_a_state_can_be_used_as_a_dict() -> None:
    param = xt.nn.Parameter(xt.ones(3))
    param.grad = xt.ones(3)
    optimizer = optim.AdamW([param])
    optimizer.step()
    state = optimizer.state[param]
    assert type(state.copy()) is dict and state.copy() == dict(state) and type(state.copy()["step"]) is int
    for value in (np.int64(5), xt.tensor(5), True):
        state["step"] = value
        assert state["step"] == int(value)
    assert state.pop("step") == 1
    state["step"] = 7
    optimizer.step()
    assert state["step"] == 8
    for bad in (-1, 2**40, 1.0, "1", None, xt.tensor(1.0)):
        with pytest.raises(ValueError, match=r"AdamW: step must be an integer in \[0, 2\*\*40\), got "):
            state["step"] = bad
    assert state["step"] == 8


def test_a_parameter_without_a_gradient_interrupts_no_step() -> None:
    a, b = xt.nn.Parameter(xt.ones(3)), xt.nn.Parameter(xt.ones(3))
    optimizer = optim.AdamW([a, b])
    a.grad = xt.ones(3)
    optimizer.step()
    assert not optimizer.interrupted()


def test_state_dict_is_what_files_hold() -> None:
    """Whole numbers of Python, which JSON takes, and what load_state_dict takes goes on with the same bits."""
    params, others = parameters(xt.bfloat16), parameters(xt.bfloat16)
    optimizer, other = optim.AdamW(params, lr=1e-2), optim.AdamW(others, lr=1e-2)
    for i in range(4):
        if i == 2:
            saved = optimizer.state_dict()
            assert [*saved["state"][0]] == ["step", "exp_avg", "exp_avg_sq", "master"]
            assert json.dumps([state["step"] for state in saved["state"].values()]) == "[2, 2, 2, 2, 2, 2]"
            other.load_state_dict(saved)
            with xt.no_grad():
                for p, q in zip(params, others):
                    q.copy_(p)
        for p, q, g in zip(params, others, gradients(i, xt.bfloat16)):
            p.grad = q.grad = g
        optimizer.step()
        if i >= 2:
            other.step()
    assert saved["state"][0]["step"] == 2
    assert same(content(optimizer), content(other))


# ---- the learning rate


def test_a_step_that_ctrl_c_ends_leaves_its_learning_rate_to_no_other() -> None:
    """At every line of AdamW: the step is taken or not, and the next one has the rate of its group."""

    def steps(end_at: int | None, second: bool) -> tuple[list[np.ndarray], int]:
        param = xt.nn.Parameter(xt.ones(3))
        optimizer, lines = optim.AdamW([param]), 0

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename != optim.adamw.__file__:
                return None
            lines += event == "line"
            if lines - 1 == end_at:
                raise KeyboardInterrupt
            return trace

        for lr in (0.1, 0.2, 0.1):
            param.grad = xt.ones(3)
            optimizer.param_groups[0]["lr"] = lr
            if lr == 0.2 and second:
                sys.settrace(trace)
                try:
                    optimizer.step()
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(None)
            elif lr == 0.1:
                optimizer.step()
        return content(optimizer), lines

    (taken, lines), (left_out, _) = steps(None, True), steps(None, False)
    assert lines > 20
    for end_at in range(lines):
        found, _ = steps(end_at, True)
        assert same(found, taken) or same(found, left_out), end_at


def test_every_queued_step_has_its_own_learning_rate() -> None:
    rates = [0.1 / (1 + i) for i in range(20)]

    def run(wait: bool) -> list[np.ndarray]:
        params = [xt.nn.Parameter(xt.ones(5)), xt.nn.Parameter(xt.ones(5))]
        optimizer = optim.AdamW([{"params": [p]} for p in params], weight_decay=0.0, betas=(0.0, 0.0), eps=0.0)
        for p in params:
            p.grad = xt.ones(5)
        work = xt.ones(1500, 1500)
        for rate in rates:
            work = work @ work * 1e-4  # keeps the device behind the host
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, 2 * rate
            optimizer.step()
            if wait:
                optimizer.state_dict()
        return [array(p) for p in params]

    found = run(wait=False)
    check_close(found[0], np.full(5, 1 - sum(rates)), 1e-6, "steps of lr each")
    check_close(found[1], np.full(5, 1 - 2 * sum(rates)), 2e-6, "steps of 2 lr each")
    assert same(found, run(wait=True))


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_an_edited_learning_rate_is_checked_before_anything_changes(bad: float) -> None:
    params = [xt.nn.Parameter(xt.ones(2)), xt.nn.Parameter(xt.ones(2))]
    optimizer = optim.AdamW([{"params": p} for p in params])
    optimizer.param_groups[1]["lr"] = bad
    for p in params:
        p.grad = xt.ones(2)
    with pytest.raises(ValueError, match=f"AdamW: lr must be a number in .*, got {bad!r}"):
        optimizer.step()
    assert [p.tolist() for p in params] == [[1.0, 1.0]] * 2 and not optimizer.state


# ---- beta^n


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.999, 0.9999, 0.99999])
def test_powers_are_right_to_the_last_bit(beta: float) -> None:
    """With one gradient of 1, beta2 = eps = 0 and lr = 1 a step subtracts (1 - beta) / (1 - beta^n). While beta^n is above a
    half, 1 - beta^n is exact, and shows the last bit of the power.
    """
    for n in {1, 2, 3, 5, 6, 10, 37, 100, 333, 1000, 4095, 6931, 60000}:
        exact = Fraction(beta) ** n if n * (1 - beta) < 0.69 else 0
        if exact < Fraction(1, 2):
            continue
        p, m, v = (xt.zeros(1, dtype=xt.float64) for _ in range(3))
        lr, step = xt.tensor(1.0, dtype=xt.float64), xt.tensor(n - 1)
        _C.adamw_([p], [xt.ones(1, dtype=xt.float64)], [m], [v], [], [step], [lr], adamw_group(1, beta, 0.0, 0.0, 0.0))
        rest = (1 - Fraction(beta)) / -Fraction(
            p.item()
        )  # 1 - beta^n, with the roundings of 2 quotients and 2 products
        limit = Fraction(0.51) * Fraction(2) ** -53 + 4 * rest * Fraction(2) ** -53
        assert abs(rest - (1 - exact)) <= limit, f"{beta} ** {n}: {float((rest - 1 + exact) * 2**53)} units"


@pytest.mark.on_cpu
def test_all_blocks_are_taken_before_the_first_launch() -> None:
    """Also those for gradients that are views: when one is not to be had, no group has moved."""
    params = [xt.nn.Parameter(xt.ones(3, 4)) for _ in range(3)]
    optimizer = xt.optim.AdamW([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)])
    for p in params:
        p.grad = xt.rand(4, 3).T
    optimizer.step()  # which makes the moments
    before = [p.tolist() for p in params]
    for k in range(100):
        _C.fail_storages(k, k)
        try:
            optimizer.step()
            break
        except xt.OutOfMemoryError:
            assert [p.tolist() for p in params] == before, k
        finally:
            _C.fail_storages(1 << 60, 1 << 60)
    assert k == 4 and all(p.tolist() != old for p, old in zip(params, before, strict=True))


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float64", "float32")])
def test_all_groups_of_a_device_are_one_call(monkeypatch, dtypes: tuple[str, str]) -> None:
    """Groups with numbers of their own, and parameters of two dtypes: what one call cannot do for the last, it does for none."""
    calls, adamw = [], _C.adamw_
    monkeypatch.setattr(_C, "adamw_", lambda *args: (calls.append(args), adamw(*args))[1])
    params = [xt.nn.Parameter(xt.full((5,), 1.0 + i, dtype=getattr(_C, dtypes[i % 2]))) for i in range(4)]
    groups = [
        {"params": params[i : i + 1], "lr": 0.1 * (i + 1), "betas": (0.5, 0.1 * i), "eps": 0.1 * i} for i in range(4)
    ]
    optimizer = optim.AdamW(groups, weight_decay=0.2)
    alone = [
        optim.AdamW([{**group, "params": [xt.nn.Parameter(p.detach().clone())]}], weight_decay=0.2)
        for group, p in zip(groups, params)
    ]
    for number in range(3):
        for p, other in zip(params, alone):
            p.grad = other.param_groups[0]["params"][0].grad = xt.rand(5).to(p.dtype)
            other.step()
        calls.clear()
        optimizer.step()
        assert len(calls) == 1 and len(calls[0][0]) == 4
        for p, other in zip(params, alone):
            theirs = other.param_groups[0]["params"][0]
            assert p.tolist() == theirs.tolist()
            assert optimizer.state[p]["step"] == number + 1
    before = [p.tolist() for p in params]
    params[-1].grad = xt.rand(5).to(params[-1].dtype)
    optimizer.state[params[-1]]["exp_avg"] = xt.zeros(4)  # of the wrong shape
    with pytest.raises(ValueError, match=r"adamw_: exp_avgs\[3\] must be"):
        optimizer.step()
    assert [p.tolist() for p in params] == before
