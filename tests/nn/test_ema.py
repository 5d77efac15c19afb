"""EMA against its formula in NumPy. `make test-gpu` runs all of it on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain import optim
from xtrain.optable.table import array, check_close

SHARED = xt.ones(2)
SHAPES = [(3, 4), (0,), (), (2, 16385)]


def parameters(dtype=xt.float64) -> list:
    rng = np.random.default_rng(4)
    return [xt.nn.Parameter(xt.tensor(rng.standard_normal(shape)).to(dtype)) for shape in SHAPES]


def move(params, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    with xt.no_grad():
        for p in params:
            p.copy_(xt.tensor(rng.standard_normal(tuple(p.shape))).to(p.dtype).to(p.device))
    return [array(p).copy() for p in params]


def test_weights_fall_with_age_and_add_up_to_one() -> None:
    params = parameters()
    ema = optim.EMA(params, 0.8)
    seen = []
    for step in range(1, 7):
        seen.append(move(params, step))
        ema.update()
        weights = np.array([0.8 ** (step - 1 - i) for i in range(step)])
        for i, p in enumerate(params):
            want = sum(w * values[i] for w, values in zip(weights / weights.sum(), seen))
            check_close(array(ema.averages[p]), np.asarray(want), 1e-14, f"step {step}")
    assert ema.step == 6
    ema.copy_to()
    assert all(np.array_equal(array(p), array(ema.averages[p])) for p in params)


def test_masters_are_averaged() -> None:
    """Steps far below the last place of bfloat16 move the average of its float32 master."""
    p = xt.nn.Parameter(xt.ones(64, dtype=xt.bfloat16))
    optimizer = optim.AdamW([p], lr=1e-4, weight_decay=0.0)
    ema, of_parameters = optim.EMA([p], 0.5, optimizer), optim.EMA([p], 0.5)
    for _ in range(8):
        p.grad = xt.ones(64, dtype=xt.bfloat16)
        optimizer.step()
        ema.update()
        of_parameters.update()
    assert ema.averages[p].dtype is xt.float32
    assert abs(array(ema.averages[p])[0] - (1 - 7e-4)) < 3e-5 and array(of_parameters.averages[p])[0] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_guard_stops_an_update(bad: float) -> None:
    params = parameters(xt.float32)
    ema, other = optim.EMA(params, 0.9), optim.EMA(params, 0.9)
    for step, value in enumerate([0.0, bad, 1.0]):
        move(params, step)
        ema.update(guard=xt.tensor(value, dtype=xt.float32))
        if math.isfinite(value):
            other.update()
    assert ema.step == other.step == 2
    assert all(array(ema.averages[p]).tobytes() == array(other.averages[p]).tobytes() for p in params)


def test_a_state_goes_on_bit_for_bit() -> None:
    params = parameters(xt.float32)
    whole, resumed = optim.EMA(params, 0.9), optim.EMA(params, 0.9)
    for step in range(4):
        move(params, step)
        whole.update()
        if step == 1:
            resumed.load_state_dict(whole.state_dict())
        if step > 1:
            resumed.update()
    assert resumed.step == 4
    assert all(array(whole.averages[p]).tobytes() == array(resumed.averages[p]).tobytes() for p in params)


def test_a_reset_forgets_and_a_loaded_state_is_a_copy() -> None:
    p = xt.ones(3)
    ema, other = optim.EMA([p], 0.5), optim.EMA([p], 0.5)
    ema.update()
    other.load_state_dict(ema.state_dict())
    p.fill_(2)
    ema.update()
    assert array(other.averages[p]).tolist() == [1, 1, 1] and other.step == 1
    ema.reset()
    assert ema.step == 0
    ema.update()
    assert array(ema.averages[p]).tolist() == [2, 2, 2]


def test_a_state_that_is_refused_changes_nothing() -> None:
    params = [xt.ones(3), xt.ones(2)]
    ema = optim.EMA(params, 0.9)
    ema.update()
    for second, kind in ((np.zeros(2, np.float32), TypeError), (xt.zeros(3), ValueError)):
        with pytest.raises(kind, match="EMA: every average must"):
            ema.load_state_dict({"step": 7, "averages": [xt.zeros(3), second]})
        assert ema.step == 1 and array(ema.averages[params[0]]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: optim.EMA(parameters(), 1.0), r"EMA: decay must be a number in \[0, 1\), got 1.0"),
        (lambda: optim.EMA([]), r"EMA: params must hold at least one tensor, got none"),
        (lambda: optim.EMA([SHARED, xt.ones(2), SHARED]), r"EMA: params must be distinct, got one twice"),
        (lambda: optim.EMA(xt.ones(2, 2)), r"EMA: params must be an iterable of tensors, got Tensor"),
        (lambda: optim.EMA(parameters()).load_state_dict({"averages": []}), r"EMA: state_dict must be a dict with step and averages, got \{'averages': \[\]\}"),
        (lambda: optim.EMA([xt.zeros(2, dtype=xt.int64)]), r"EMA: params must be tensors of a floating dtype, got int64"),
        (lambda: optim.EMA(parameters()).copy_to(), r"EMA: update\(\) must come before copy_to\(\), got no update"),
        (lambda: optim.EMA(parameters()).load_state_dict({"step": 1, "averages": []}), r"EMA: averages must hold 4 tensors, got 0"),
        (lambda: optim.EMA(parameters()).load_state_dict({"step": -1, "averages": []}), r"EMA: step must be in \[0, 2\*\*40\), got -1"),
        (lambda: optim.EMA(parameters()).load_state_dict({"step": 2**40, "averages": []}), r"EMA: step must be in \[0, 2\*\*40\), got 1099511627776"),
        (lambda: optim.EMA(parameters()).set_step(-1), r"^EMA: step must be in \[0, 2\*\*40\), got -1$"),
        (lambda: optim.EMA(parameters()).set_step(2**40), r"^EMA: step must be in \[0, 2\*\*40\), got 1099511627776$"),
        (lambda: optim.EMA(parameters()).set_step(1.5), r"^EMA: step must be an int, got float$"),  # pyright: ignore[reportArgumentType]  (refused)
        (lambda: optim.EMA(parameters()).set_step(True), r"^EMA: step must be an int, got bool$"),
        (lambda: optim.EMA(parameters()).load_state_dict({"step": True, "averages": []}), r"^EMA: step must be an int, got bool$"),
        (lambda: optim.EMA([xt.ones(3)]).load_state_dict({"step": 1, "averages": [xt.ones(4)]}), r"EMA: every average must have the shape of its parameter, \(3,\), got \(4,\)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, sentence) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=sentence):
        make()
