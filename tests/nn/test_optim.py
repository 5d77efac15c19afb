"""AdamW, clipping and schedules against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain import optim
from xtrain.optable import adamw_reference, clip_reference
from xtrain.optable.table import array, check_close


def parameters(seed: int, dtype=xt.float64):
    rng = np.random.default_rng(seed)
    return [xt.nn.Parameter(xt.tensor(rng.standard_normal(s)).to(dtype)) for s in [(3, 4), (5,), (), (33, 7)]]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_over_fifty_steps(weight_decay: float) -> None:
    params = parameters(0)
    values = [array(p).copy() for p in params]
    moments = [[np.zeros_like(v), np.zeros_like(v)] for v in values]
    optimizer = optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    rng = np.random.default_rng(1)
    for step in range(1, 51):
        for i, p in enumerate(params):
            g = rng.standard_normal(p.shape)
            p.grad = xt.tensor(g)
            values[i], *moments[i] = adamw_reference(
                values[i], g, *moments[i], 1e-2, 0.8, 0.95, 1e-6, weight_decay, step
            )
        optimizer.step()
    for p, want in zip(params, values):
        check_close(array(p), want, 1e-13 * (1 + np.abs(want)), "parameter")


def test_bfloat16_keeps_masters() -> None:
    """Steps far below the last place of bfloat16 add up in the float32 master."""
    p = xt.nn.Parameter(xt.ones(64, dtype=xt.bfloat16))
    optimizer = optim.AdamW([p], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        p.grad = xt.ones(64, dtype=xt.bfloat16)
        optimizer.step()
    assert p.dtype is xt.bfloat16
    assert abs(float(p[0].item()) - 0.98) < 0.004
    state = next(iter(optimizer.state_dict()["state"].values()))
    assert all(v.dtype is xt.float32 for v in state.values() if isinstance(v, xt.Tensor))


def test_groups_and_skipped_parameters() -> None:
    a, b, c = parameters(3)[:3]
    optimizer = optim.AdamW(
        [{"params": [a], "weight_decay": 0.5, "lr": 0.1}, {"params": [b, c], "weight_decay": 0.0}], lr=1e-3
    )
    before = [array(p).copy() for p in (a, b, c)]
    a.grad, b.grad = xt.zeros(3, 4, dtype=xt.float64), xt.ones(5, dtype=xt.float64)
    optimizer.step()
    check_close(array(a), before[0] * (1 - 0.1 * 0.5), 1e-15, "only decayed")
    check_close(array(b), before[1] - 1e-3 / (1 + 1e-8), 1e-12, "of the second group, not decayed")
    assert np.array_equal(array(c), before[2])


def test_a_dict_that_is_no_state_dict_is_refused() -> None:
    optimizer = optim.AdamW(parameters(5))
    for bad, got in (({}, "nothing"), ({"state": {}}, "got state$"), ({"model": 1}, "got model")):
        with pytest.raises(ValueError, match=f"load_state_dict: state_dict must have state and param_groups, .*{got}"):
            optimizer.load_state_dict(bad)


def test_state_dict_round_trip() -> None:
    def run(split: bool) -> list[np.ndarray]:
        params = parameters(5)
        optimizer = optim.AdamW(params, lr=1e-2)
        rng = np.random.default_rng(6)
        for step in range(6):
            if split and step == 3:
                saved = optimizer.state_dict()
                optimizer = optim.AdamW(params, lr=77.0)
                optimizer.load_state_dict(saved)
            for p in params:
                p.grad = xt.tensor(rng.standard_normal(p.shape))
            optimizer.step()
        return [array(p) for p in params]

    for a, b in zip(run(False), run(True)):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
def test_clip(max_norm: float) -> None:
    params = parameters(8)
    grads = [np.random.default_rng(9).standard_normal(p.shape) for p in params]
    for p, g in zip(params, grads):
        p.grad = xt.tensor(g)
    norm = optim.clip_grad_norm_([*params, xt.nn.Parameter(xt.zeros(2))], max_norm)
    want = clip_reference(*grads, max_norm=max_norm)
    assert norm.dtype is xt.float32
    assert norm.shape == ()
    check_close(array(norm), want[0], 1e-6 * want[0], "norm")
    for p, g in zip(params, want[1:]):
        check_close(array(p.grad), g, 1e-6 * np.abs(g) + 1e-12, "gradient")


def test_clip_of_more_tensors_than_a_launch_takes() -> None:
    """On a GPU a launch takes the tables of some hundreds: the norm is that of all of them."""
    params = [xt.nn.Parameter(xt.zeros(1)) for _ in range(2500)]
    for i, p in enumerate(params):
        p.grad = xt.full((1,), 2.0 if i < 1250 else 1.0)
    norm = optim.clip_grad_norm_(params, 1.0).item()
    assert abs(norm / math.sqrt(6250) - 1) < 1e-6
    check_close(np.array([p.grad.item() for p in params]), np.repeat([2 / norm, 1 / norm], 1250), 1e-7, "clipped")


def test_clip_reports_what_is_not_finite() -> None:
    p = xt.nn.Parameter(xt.zeros(3))
    for value in (math.nan, math.inf):
        p.grad = xt.tensor([1.0, value, 1.0])
        assert not math.isfinite(optim.clip_grad_norm_([p], 1.0).item())
    p.grad = xt.tensor([1.0, math.nan, 1.0])
    with pytest.raises(RuntimeError, match="finite"):
        optim.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_norm_does_not_overflow_or_underflow() -> None:
    """Squares of 1e30 overflow float32: the norm is summed in float64."""
    for scale in (1e30, 1e-30):
        p = xt.nn.Parameter(xt.zeros(1000))
        p.grad = xt.full((1000,), scale)
        assert abs(optim.clip_grad_norm_([p], math.inf).item() / (scale * math.sqrt(1000)) - 1) < 1e-6


def test_schedules() -> None:
    f = optim.lr_schedule
    assert [f("constant", s, 4, 10, 1.0) for s in (0, 1, 3, 4, 9, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert math.isclose(f("cosine", 4, 4, 104, 1.0, 0.1), 1.0)
    assert math.isclose(f("cosine", 54, 4, 104, 1.0, 0.1), 0.55)
    assert math.isclose(f("cosine", 104, 4, 104, 1.0, 0.1), 0.1)
    assert math.isclose(f("linear", 54, 4, 104, 1.0, 0.0), 0.5)
    assert math.isclose(f("linear", 500, 4, 104, 1.0, 0.2), 0.2)
    wsd = [f("wsd", s, 2, 20, 1.0, 0.2, decay=8) for s in (0, 1, 2, 12, 13, 16, 20, 99)]
    assert wsd == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.9, 0.6, 0.2, 0.2])
    assert f("wsd", 14, 2, 20, 1.0, 0.2, 8, "1-sqrt") == pytest.approx(0.2 + 0.8 * 0.5)
    assert [f("wsd", s, 2, 20, 1.0) for s in (16, 17)] == [1.0, 0.75]  # a fifth of the steps
    assert f("wsd", 10, 2, 20, 1.0, 0.0, 0) == f("wsd", 20, 2, 20, 1.0, 0.5, 0) == 1.0  # no fall
    assert f("wsd", 3, 4, 20, 1.0, 0.0, 20) == 1.0 and f("wsd", 4, 4, 20, 1.0, 0.0, 20) == 1.0
    for kind, warmup, decay in (("wsd", 2, 0), ("wsd", 0, None), ("cosine", 4, None), ("linear", 4, None)):
        assert [f(kind, s, warmup, 4, 1.0, 0.2, decay) for s in (4, 5, 9)] == [1.0] * 3, kind  # no step to fall in
    for bad, match in ((dict(decay_form="sqrt"), "decay_form must be linear or 1-sqrt, got 'sqrt'"), ({}, "sine")):
        with pytest.raises(ValueError, match=match):
            f("wsd" if bad else "sine", 0, 0, 1, 1.0, **bad)
    with pytest.raises(ValueError, match="sine"):
        f("sine", 0, 0, 1, 1.0)
    for decay in (10, 9.5, -1, math.nan):
        with pytest.raises(ValueError, match=rf"^lr_schedule: decay must be in \[0, total\], here 9, got {decay}$"):
            f("wsd", 0, 0, 9, 1.0, decay=decay)
    assert [f("wsd", s, 0, 9, 1.0, decay=9) for s in (0, 9)] == [1.0, 0.0] and f(
        "linear", 0, 0, 9, 1.0, decay=10
    ) == 1.0


def test_errors() -> None:
    p = xt.nn.Parameter(xt.zeros(2))
    for make, kind, text in [
        (lambda: optim.AdamW([]), ValueError, "at least one"),
        (lambda: optim.AdamW(p), TypeError, "iterable"),
        (lambda: optim.AdamW([p, p]), ValueError, "distinct"),
        (lambda: optim.AdamW([3]), TypeError, "tensors, got int"),
        (lambda: optim.AdamW([p], lr=-1.0), ValueError, "lr must .*-1"),
        (lambda: optim.AdamW([p], betas=(1.0, 0.9)), ValueError, "beta.*1.0"),
        (lambda: optim.AdamW([p], eps=-1e-8), ValueError, "eps"),
        (lambda: optim.AdamW([p * 1]), ValueError, "leaf"),
        (lambda: optim.AdamW([{"params": [p], "speed": 3}]), TypeError, "speed"),
        (lambda: optim.AdamW(None), TypeError, "AdamW: params must be an iterable of tensors or dicts, got NoneType"),
        (lambda: optim.AdamW([{"params": 3}]), TypeError, "AdamW: params must be tensors, got int"),
        (lambda: optim.AdamW([p], betas=0.9), ValueError, r"AdamW: betas must be two numbers in \[0, 1\), got 0.9"),
        (lambda: optim.AdamW([p], betas=xt.tensor(0.5)), ValueError, r"^AdamW: betas must be two .*tensor\(0.5"),
        (lambda: optim.Adam([p], betas=np.array(0.5)), ValueError, r"^Adam: betas must be two .*array\(0.5\)"),
        (lambda: optim.AdamW([p], betas=None), ValueError, "AdamW: betas must be two numbers .*None"),
        (lambda: optim.AdamW([p], betas=("a", "b")), ValueError, "AdamW: betas must be two numbers .*'a', 'b'"),
        (lambda: optim.SGD([p], dampening=math.nan), ValueError, "SGD: dampening must be a number .*nan"),
        (lambda: optim.SGD([p], dampening="x"), ValueError, "SGD: dampening must be a number .*'x'"),
        (lambda: optim.SGD([p], momentum="a", nesterov=True), ValueError, "SGD: momentum must be a number .*'a'"),
        (lambda: optim.SGD([{"params": p, "nesterov": True}]), ValueError, "SGD: nesterov must have momentum > 0"),
        (
            lambda: optim.SGD([p], momentum=0.9, dampening=0.1, nesterov=True),
            ValueError,
            "SGD: nesterov must have momentum > 0",
        ),
    ]:
        with pytest.raises(kind, match=text):
            make()


@pytest.mark.parametrize("bad", [math.nan, -1.0, "a", None])
@pytest.mark.parametrize("name", ["lr", "momentum", "dampening", "weight_decay"])
def test_an_edited_option_of_sgd_is_checked_before_anything_changes(name: str, bad) -> None:
    p, q = xt.nn.Parameter(xt.ones(2)), xt.nn.Parameter(xt.ones(2))
    optimizer = optim.SGD([{"params": p}, {"params": q}], lr=0.1, momentum=0.9)
    optimizer.param_groups[1][name] = bad
    p.grad, q.grad = xt.ones(2), xt.ones(2)
    with pytest.raises(ValueError, match=f"SGD: {name} must be a number in .*, got {bad!r}"):
        optimizer.step()
    assert p.tolist() == q.tolist() == [1.0, 1.0]


STEP = "load_state_dict: step of parameter 0 must be a whole number of at least 0, got"


@pytest.mark.parametrize(
    ("where", "change", "text"),
    [
        *(("state 0", {"step": bad}, STEP) for bad in ("x", None, -5, 1.5, math.nan, math.inf, xt.tensor(1.5))),
        (
            "state 0",
            {"step": 2**40},
            "load_state_dict: step of parameter 0 must be less than 2\\*\\*40, got 1099511627776",
        ),
        ("state 0", {"exp_avg": np.zeros(3)}, "exp_avg of parameter 0 must be a Tensor, got ndarray"),
        ("state 0", {"exp_avg_sq": None}, "exp_avg_sq of parameter 0 must be a Tensor, got NoneType"),
        ("group 0", {"lr": math.nan}, r"AdamW: lr must be a number in \[0, inf\), got nan"),
        ("group 0", {"betas": None}, r"AdamW: betas must be two numbers in \[0, 1\), got None"),
        ("group 0", {"params": None}, "every group must have a list params"),
        ("all", {"state": None}, "load_state_dict: state must be a dict, got NoneType"),
        ("all", {"state": {0: None}}, "load_state_dict: state of parameter 0 must be a dict, got NoneType"),
        ("all", {"param_groups": None}, "load_state_dict: param_groups must be a list of dicts, got None"),
        ("all", {"param_groups": [None]}, "load_state_dict: param_groups must be a list of dicts, got "),
        ("itself", None, "load_state_dict: state_dict must be a dict, got NoneType"),
    ],
)
def test_a_state_that_no_optimizer_has_is_refused_on_load(where: str, change, text: str) -> None:
    p = xt.nn.Parameter(xt.ones(3))
    p.grad = xt.ones(3)
    optimizer = optim.AdamW([p], lr=0.5)
    optimizer.step()
    saved = optimizer.state_dict()
    whole = {"state": {0: dict(saved["state"][0])}, "param_groups": [dict(saved["param_groups"][0])]}
    if where != "itself":
        {"state 0": whole["state"][0], "group 0": whole["param_groups"][0], "all": whole}[where].update(change)
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.load_state_dict(None if where == "itself" else whole)
    state = optimizer.state_dict()
    assert state["param_groups"] == saved["param_groups"]
    assert all(state["state"][0][name] is saved["state"][0][name] for name in saved["state"][0])


def test_what_pytorch_saves_is_taken() -> None:
    """Steps as float tensors, and the buffers None of a run without momentum."""
    p = xt.nn.Parameter(xt.ones(3))
    p.grad = xt.ones(3)
    adamw, sgd = optim.AdamW([p]), optim.SGD([p])
    adamw.step()
    saved = adamw.state_dict()
    saved["state"][0]["step"] = xt.tensor(5.0)
    adamw.load_state_dict(saved)
    assert adamw.state[p]["step"] == 5
    sgd.load_state_dict({**sgd.state_dict(), "state": {0: {"momentum_buffer": None}}})
    sgd.step()


def test_sgd_refuses_the_state_of_another_optimizer() -> None:
    """It took the rate and the decay, dropped the moments, and began its momentum anew."""
    p = xt.nn.Parameter(xt.ones(3))
    p.grad = xt.ones(3)
    adamw, sgd = optim.AdamW([p], lr=0.5), optim.SGD([p], lr=0.1, momentum=0.9)
    adamw.step()
    said = "load_state_dict: state of parameter 0 must have momentum_buffer alone, got step, exp_avg, exp_avg_sq"
    with pytest.raises(ValueError, match=said):
        sgd.load_state_dict(adamw.state_dict())
    assert sgd.param_groups[0]["lr"] == 0.1 and not sgd.state


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_what_can_be_trained_with_can_be_loaded(kind) -> None:
    """Learning rates as schedulers of NumPy make them, and tensors."""
    for lr in (np.float32(0.1), np.float64(0.1), np.int64(1), xt.tensor(0.25)):
        param = xt.nn.Parameter(xt.ones(3))
        optimizer = kind([param], lr=0.1)
        optimizer.param_groups[0]["lr"] = lr
        param.grad = xt.ones(3)
        optimizer.step()
        kind([param], lr=0.1).load_state_dict(optimizer.state_dict())
