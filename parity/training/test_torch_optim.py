"""AdamW, clipping and schedules against torch.optim over 50 steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import xtrain as xt
from xtrain import optim

SHAPES = [(7, 5), (33,), (), (3, 2, 4), (257, 3)]


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-14), ("float32", 2e-6)])
@pytest.mark.parametrize(
    "options", [{}, dict(lr=3e-3, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3), dict(weight_decay=0.0)]
)
def test_adamw(dtype: str, limit: float, options: dict) -> None:
    rng = np.random.default_rng(0)
    start = [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES]
    ours = [xt.nn.Parameter(xt.tensor(a)) for a in start]
    theirs = [torch.nn.Parameter(torch.tensor(a)) for a in start]
    mine, peer = optim.AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(peer, 50)
    follow = optim.LRScheduler(mine, lambda step: 0.5 * (1 + math.cos(math.pi * step / 50)))
    for step in range(50):
        for p, q in zip(ours, theirs):
            g = np.asarray(rng.standard_normal(p.shape) * 10 ** rng.uniform(-3, 1), dtype)
            p.grad, q.grad = xt.tensor(g), torch.tensor(g)
        if step % 7 == 3:  # a parameter without a gradient is passed over
            ours[1].grad = theirs[1].grad = None
        mine.step()
        peer.step()
        schedule.step()
        follow.step()
        assert math.isclose(mine.param_groups[0]["lr"], peer.param_groups[0]["lr"], rel_tol=1e-12, abs_tol=1e-15)
    for p, q in zip(ours, theirs):
        a, b = p.detach().cpu().numpy().astype(np.float64), q.detach().double().cpu().numpy()
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() <= limit * max(1.0, np.abs(b).max())


def test_defaults_are_pytorchs() -> None:
    mine, peer = optim.AdamW([xt.nn.Parameter(xt.zeros(1))]), torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert mine.param_groups[0][key] == peer.param_groups[0][key], key


def test_state_has_pytorchs_layout() -> None:
    p, q = xt.nn.Parameter(xt.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    p.grad, q.grad = xt.ones(2), torch.ones(2)
    mine, peer = optim.AdamW([p]), torch.optim.AdamW([q])
    mine.step()
    peer.step()
    a, b = mine.state_dict(), peer.state_dict()
    assert set(a) == set(b)
    assert {"step", "exp_avg", "exp_avg_sq"} <= set(a["state"][0])
    assert a["param_groups"][0]["params"] == b["param_groups"][0]["params"] == [0]


@pytest.mark.parametrize("max_norm", [0.3, 5.0, 1e9, math.inf])
def test_clip(max_norm: float) -> None:
    rng = np.random.default_rng(1)
    grads = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    ours = [xt.nn.Parameter(xt.zeros(*s)) for s in SHAPES]
    theirs = [torch.nn.Parameter(torch.zeros(s)) for s in SHAPES]
    for p, q, g in zip(ours, theirs, grads):
        p.grad, q.grad = xt.tensor(g), torch.tensor(g)
    a, b = optim.clip_grad_norm_(ours, max_norm).item(), torch.nn.utils.clip_grad_norm_(theirs, max_norm).item()
    assert abs(a - b) <= 1e-6 * b
    for p, q in zip(ours, theirs):
        x, y = p.grad.cpu().numpy(), q.grad.cpu().numpy()
        assert np.abs(x - y).max() <= 1e-6 * max(np.abs(y).max(), 1e-30)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules(kind: str) -> None:
    q = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warm = torch.optim.lr_scheduler.LinearLR(q, 1 / 5, 1.0, 4)
    rest = (
        torch.optim.lr_scheduler.LinearLR(q, 1.0, 0.1, 45)
        if kind == "linear"
        else torch.optim.lr_scheduler.CosineAnnealingLR(q, 45, 0.1)
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(q, [warm, rest], [5])
    for step in range(50):
        ours = optim.lr_schedule(kind, step, 5, 50, 1.0, 0.1)
        assert math.isclose(ours, q.param_groups[0]["lr"], rel_tol=1e-6), step
        q.step()
        schedule.step()


MATRICES = [(7, 5), (5, 7), (33, 33), (3, 257), (7, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lr=0.02, weight_decay=0.3, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw"),
        dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=7, eps=1e-3, adjust_lr_fn="original"),
    ],
)
def test_muon_is_torchs_where_torch_does_not_round(options: dict, monkeypatch) -> None:
    """PyTorch's iteration is in bfloat16; kept in float64 it is the oracle of ours in float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    rng = np.random.default_rng(0)
    start = [rng.standard_normal(s) for s in MATRICES]
    ours = [xt.nn.Parameter(xt.tensor(a)) for a in start]
    theirs = [torch.nn.Parameter(torch.tensor(a)) for a in start]
    mine, peer = optim.Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(5):
        for p, q in zip(ours, theirs):
            g = rng.standard_normal(p.shape)
            p.grad, q.grad = xt.tensor(g), torch.tensor(g)
        if step == 2:
            ours[1].grad = theirs[1].grad = None
        mine.step()
        peer.step()
    for p, q in zip(ours, theirs):
        assert np.abs(p.detach().cpu().numpy() - q.detach().cpu().numpy()).max() <= 1e-12 * max(
            1.0, q.abs().max().item()
        )


def test_bfloat16_of_muon_errs_no_more_than_torchs() -> None:
    rng = np.random.default_rng(1)
    g = rng.standard_normal((48, 80))
    zero = np.zeros_like(g)
    found = {}
    for name, library in (("ours", xt), ("theirs", torch), ("exact", xt)):
        dtype = library.float64 if name == "exact" else library.float32
        p = library.nn.Parameter(library.tensor(zero, dtype=dtype))
        p.grad = library.tensor(g, dtype=dtype)
        options = dict(ns_dtype="bfloat16") if name == "ours" else {}
        library.optim.Muon([p], lr=1.0, **options).step()
        found[name] = p.detach().cpu().numpy().astype(np.float64)
    errors = {name: np.abs(found[name] - found["exact"]).max() for name in ("ours", "theirs")}
    assert 0 < errors["ours"] <= 2 * errors["theirs"], errors


def test_muon_has_the_defaults_and_the_state_of_pytorchs() -> None:
    p, q = xt.nn.Parameter(xt.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2, 3))
    mine, peer = optim.Muon([p]), torch.optim.Muon([q])
    for key, value in peer.defaults.items():
        assert mine.param_groups[0][key] == value, key
    p.grad, q.grad = xt.ones(2, 3), torch.ones(2, 3)
    mine.step()
    peer.step()
    assert set(mine.state_dict()["state"][0]) == set(peer.state_dict()["state"][0])
