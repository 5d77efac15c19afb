"""Adam, the schedules of optim.lr_scheduler and smoothed labels against PyTorch's."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import xtrain as xt
from xtrain import optim

SHAPES = [(7, 5), (33,), ()]
OURS, THEIRS = optim.lr_scheduler, torch.optim.lr_scheduler


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-14), ("float32", 2e-6)])
@pytest.mark.parametrize("options", [{}, dict(lr=3e-3, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)])
def test_adam(dtype: str, limit: float, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    start = [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES]
    ours = [xt.nn.Parameter(xt.tensor(a)) for a in start]
    theirs = [torch.nn.Parameter(torch.tensor(a)) for a in start]
    mine, peer = optim.Adam(ours, **options), torch.optim.Adam(theirs, **options)
    assert all(mine.param_groups[0][key] == peer.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay"))
    for step in range(20):
        for p, q in zip(ours, theirs):
            g = np.asarray(rng.standard_normal(p.shape), dtype)
            p.grad, q.grad = xt.tensor(g), torch.tensor(g)
        if step == 3:
            ours[1].grad = theirs[1].grad = None
        mine.step()
        peer.step()
    for p, q in zip(ours, theirs):
        b = q.detach().double().cpu().numpy()
        assert np.abs(p.detach().cpu().double().numpy() - b).max() <= limit * max(1.0, np.abs(b).max())


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda s, o: s.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "StepLR": lambda s, o: s.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [7, 2, 7], 0.5),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.9),
    "ConstantLR": lambda s, o: s.ConstantLR(o, 0.25, 4),
    "LinearLR": lambda s, o: s.LinearLR(o, 0.1, 0.8, 6),
    "PolynomialLR": lambda s, o: s.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 9, 1e-4),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 3, 2, 1e-4),
    "CosineAnnealingWarmRestarts of one length": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda s, o: s.OneCycleLR(
        o, 0.3, total_steps=20, pct_start=0.4, **({} if s is OURS else {"cycle_momentum": False})
    ),
    "OneCycleLR linear": lambda s, o: s.OneCycleLR(
        o, 0.3, total_steps=20, anneal_strategy="linear", **({} if s is OURS else {"cycle_momentum": False})
    ),
    "SequentialLR": lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 10)], [4]),
}


def made(name: str) -> tuple[Any, Any, Any, Any]:
    """(our optimizer, our schedule, PyTorch's)."""
    mine = optim.SGD(
        [{"params": xt.nn.Parameter(xt.zeros(1))}, {"params": xt.nn.Parameter(xt.zeros(1)), "lr": 0.5}], 0.1
    )
    zeros = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    peer = torch.optim.SGD([{"params": zeros[:1]}, {"params": zeros[1:], "lr": 0.5}], 0.1)
    return mine, SCHEDULES[name](OURS, mine), peer, SCHEDULES[name](THEIRS, peer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    mine, follow, peer, schedule = made(name)
    for step in range(19):
        got, want = [group["lr"] for group in mine.param_groups], [float(group["lr"]) for group in peer.param_groups]
        assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(got, want)), (step, got, want)
        assert follow.get_last_lr() == got
        mine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.step()
            schedule.step()
        follow.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_from_its_state(name: str) -> None:
    mine, follow, _, _ = made(name)
    for _ in range(6):
        follow.step()
    other, again, _, _ = made(name)
    again.load_state_dict(follow.state_dict())
    for _ in range(5):
        assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in mine.param_groups]
        follow.step()
        again.step()


def test_what_schedules_refuse() -> None:
    mine, follow, _, _ = made("OneCycleLR")
    for _ in range(19):
        follow.step()
    rates = follow.get_last_lr()
    for message, call in (
        ("OneCycleLR: step must be below total_steps 20, got 20", follow.step),
        ("OneCycleLR: anneal_strategy must be cos or linear, got 'exp'", lambda: OURS.OneCycleLR(mine, 1.0, 5, 0.3, "exp")),
        ("StepLR: step_size must be an integer of at least 1, got 0", lambda: OURS.StepLR(mine, 0)),
        ("CosineAnnealingLR: T_max must be an integer of at least 1, got 2.5", lambda: OURS.CosineAnnealingLR(mine, 2.5)),
        ("SequentialLR: milestones must be one fewer than schedulers, got 2 and 1", lambda: OURS.SequentialLR(mine, [follow], [1, 2])),
        ("SequentialLR: milestones must grow, got [3, 3]", lambda: OURS.SequentialLR(mine, [follow] * 3, [3, 3])),
        ("SequentialLR: schedulers must have the optimizer given, got one of another", lambda: OURS.SequentialLR(made("StepLR")[0], [follow], [])),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message
    assert follow.get_last_lr() == rates and follow.last_epoch == 19, "a step that fails changes nothing"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothed_labels(reduction: str) -> None:
    rng = np.random.default_rng(1)
    x, target = rng.standard_normal((33, 17)), rng.integers(0, 17, 33)
    target[[3, 8]] = -100
    ours, theirs = xt.tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
    mine = xt.nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.2)(ours, xt.tensor(target))
    peer = torch.nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.2)(theirs, torch.tensor(target))
    (mine * 1.5).sum().backward()
    (peer * 1.5).sum().backward()
    np.testing.assert_allclose(mine.detach().cpu().numpy(), peer.detach().cpu().numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(ours.grad.cpu().numpy(), theirs.grad.cpu().numpy(), rtol=1e-11, atol=1e-13)
