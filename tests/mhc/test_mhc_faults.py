"""Faults of hyper-connections that have been seen in the field, planted: first_divergence names the op."""

from __future__ import annotations

import numpy as np
import plant_mhc_faults
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import nn
from xtrain.optable import identities
from xtrain.optable.identities import mhc_identities
from xtrain.testing import first_divergence

# ---- planted faults ---------------------------------------------------------------------------------------------------------------


class Coefficients(xt.Function):
    """mhc_pre by its formulas, with room for mistakes."""

    fault = None

    @staticmethod
    def forward(ctx, x, phi, alpha, bias, gamma):
        n = x.shape[-2]
        v = x.reshape(len(x), -1)
        r = xt.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)
        u = (v * gamma.reshape(-1)) @ phi.T
        a = xt.cat([alpha[i : i + 1].expand(size) for i, size in enumerate((n, n, n * n))])
        z = a * (r * u) + bias
        h_pre, h_post = xt.sigmoid(z[:, :n]) + 1e-6, xt.sigmoid(z[:, n : 2 * n]) * 2
        ctx.save_for_backward(x, phi, gamma, a, r, u, h_pre, h_post)
        return (h_pre.unsqueeze(-1) * x).sum(1), h_post, z[:, 2 * n :].reshape(len(x), n, n)

    @staticmethod
    def backward(ctx, dh_in, dh_post, dh_res):
        x, phi, gamma, a, r, u, h_pre, h_post = ctx.saved_tensors
        n, v, flat = x.shape[-2], x.reshape(len(x), -1), gamma.reshape(-1)
        s = h_pre - 1e-6
        parts = [
            (dh_in.unsqueeze(1) * x).sum(-1) * s * (1 - s),
            dh_post * h_post * (1 - h_post * 0.5),
            dh_res.reshape(len(x), -1),
        ]
        delta = xt.cat(parts, 1)
        dq = a * delta
        du = dq * r
        if Coefficients.fault == "missing inv_rms":  # the seed's: the branch of the logits lacks the factor
            du = xt.cat([du[:, : 2 * n], dq[:, 2 * n :]], 1)
        kappa = (dq * u).sum(-1, keepdim=True) * r * r * r * (-1 / v.shape[-1])
        if Coefficients.fault == "extra r^2":  # of the seed's other kernel
            kappa = kappa * r * r
        moment = du.T @ v
        dx = (du @ phi) * flat + kappa * v
        dq_u = delta * r * u
        dalpha = xt.stack([dq_u[:, :n].sum(), dq_u[:, n : 2 * n].sum(), dq_u[:, 2 * n :].sum()])
        dgamma = (phi * moment).sum(0).reshape(gamma.shape)
        return (
            dx.reshape(x.shape) + h_pre.unsqueeze(-1) * dh_in.unsqueeze(1),
            moment * flat,
            dalpha,
            delta.sum(0),
            dgamma,
        )


class Balance(xt.Function):
    """sinkhorn, form P, by its formulas. The fault: rows are shifted by their maxima although columns come first."""

    fault = False

    @staticmethod
    def steps(z, shift):
        a = (z - shift).exp()
        for _ in range(2):
            a = a / (a.sum(-2, keepdim=True) + 1e-6)
            a = a / (a.sum(-1, keepdim=True) + 1e-6)
        return a

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return Balance.steps(z, z.amax(-1 if Balance.fault else -2, True))

    @staticmethod
    def backward(ctx, dout):
        z = ctx.saved_tensors[0].detach().requires_grad_()
        with xt.enable_grad():
            out = Balance.steps(z, z.detach().amax(-1 if Balance.fault else -2, True))
        out.backward(dout)
        return z.grad


class Wrapped(nn.Module):
    """A hyper-connection of the Functions above between two linear layers."""

    def __init__(self, rms: float) -> None:
        self.rms = rms
        self.first = nn.Linear(5, 12)
        self.phi = nn.Parameter(xt.randn(15, 12) * 0.3)
        self.alpha, self.bias = nn.Parameter(xt.ones(3)), nn.Parameter(xt.randn(15) * 0.1)
        self.gamma = nn.Parameter(xt.rand(3, 4) + 0.5)
        self.sublayer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = F.rms_norm(self.first(x), 12).reshape(-1, 3, 4) * self.rms
        h_in, h_post, h_res = Coefficients.apply(x, self.phi, self.alpha, self.bias, self.gamma)
        return self.last(F.mhc_post(x, self.sublayer(h_in).tanh(), h_post, Balance.apply(h_res)).mean(1))


@pytest.fixture
def plant():
    yield lambda **faults: (
        setattr(Coefficients, "fault", faults.get("pre")),
        setattr(Balance, "fault", "shift" in faults),
    )
    Coefficients.fault, Balance.fault = None, False


def diverge(rms: float):
    xt.manual_seed(0)
    model = Wrapped(rms)
    x = xt.randn(6, 5)
    return first_divergence(lambda m: m(x.to(m.first.weight.dtype)).square().sum(), model)


@pytest.mark.parametrize("rms", [0.25, 1.0, 4.0])
def test_the_formulas_without_a_fault(rms: float, plant) -> None:
    found = diverge(rms)
    assert found, str(found)
    assert any(c.phase == "formula" and c.name == "Coefficients" for c in found.comparisons)


@pytest.mark.parametrize("rms", [0.1, 0.25, 4.0])
def test_a_missing_factor_is_named(rms: float, plant) -> None:
    """The branch of the logits is wrong, the two others are right, and nothing else is accused."""
    plant(pre="missing inv_rms")
    found = diverge(rms)
    assert found.first.name == "Coefficients"
    wrong = {c.what for c in found.comparisons if not c.ok}
    assert wrong == {f"gradient of {name} through output 2" for name in ("x", "phi", "gamma")}
    assert {c.name for c in found.comparisons if not c.ok} == {"Coefficients"}


@pytest.mark.parametrize("rms", [0.1, 0.25, 4.0])
def test_one_factor_too_many_is_named(rms: float, plant) -> None:
    plant(pre="extra r^2")
    found = diverge(rms)
    assert found.first.name == "Coefficients"
    assert {c.what for c in found.wrong} == {f"gradient of x through output {i}" for i in range(3)}


def test_why_the_scale_is_varied(plant) -> None:
    """At RMS 1, where r is 1, r^2 too many cannot be seen: this is how the seed's tests passed."""
    plant(pre="extra r^2")
    assert diverge(1.0)


def test_the_wrong_shift_is_named(plant) -> None:
    plant(shift=True)
    found = diverge(1.0)
    assert (found.first.phase, found.first.name, found.first.what) == ("formula", "Balance", "gradient of z")


@pytest.mark.parametrize("fault", ["missing inv_rms", "extra r^2"])
def test_identity_i3_sees_the_faults_at_any_scale(fault: str, monkeypatch) -> None:
    """I3 needs no reference: planted into the gradients that it is given, both faults show at RMS 0.1 and 4."""
    right = identities._Layer.run

    def wrong(self, d, **changed):
        outs, grads = right(self, d, **changed)
        tokens, n, c = self.shape
        v = self.x.reshape(tokens, -1)
        r = 1 / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6)
        mix = np.repeat(self.alpha, (n, n, n * n))[2 * n :] * d[2].reshape(tokens, -1)
        u = ((v * self.gamma.reshape(-1)) @ self.phi.T)[:, 2 * n :]
        if fault == "extra r^2":
            change = -(mix * u).sum(-1, keepdims=True) * r**3 / (n * c) * (r * r - 1) * v
        else:
            change = (1 - r) * (mix @ self.phi[2 * n :]) * self.gamma.reshape(-1)
        return outs, (grads[0] + change.reshape(self.shape), *grads[1:])

    for rms in (0.1, 4.0):
        residual, limit = mhc_identities("float32", rms=rms)["I3"]
        assert residual <= limit
        monkeypatch.setattr(identities._Layer, "run", wrong)
        residual, limit = mhc_identities("float32", rms=rms)["I3"]
        assert residual > 100 * limit
        monkeypatch.setattr(identities._Layer, "run", right)


def test_identities_see_small_faults_and_nan(monkeypatch) -> None:
    """A random relative error of 1e-4 in S, which reaches dphi and dgamma alike; gradients that should be exactly 0; a layer's dx."""
    right, whole = identities._Layer.run, identities._Layer.run_whole

    def noisy(self, d, **changed):
        outs, grads = right(self, d, **changed)
        dphi = grads[1] * (1 + 1e-4 * np.random.default_rng(0).standard_normal(grads[1].shape))
        dgamma = (self.phi * dphi / self.gamma.reshape(-1)).sum(0).reshape(self.gamma.shape)
        return outs, [grads[0], dphi, *grads[2:4], dgamma]

    def nonzero(value):
        def run(self, d, **changed):
            outs, grads = right(self, d, **changed)
            return outs, [grads[0], grads[1] + value, *grads[2:]] if "alpha" in changed else grads

        return run

    def broken(dtype):
        return {name for name, (residual, limit) in mhc_identities(dtype).items() if not residual <= limit}

    for dtype in ("float64", "float32", "bfloat16"):
        assert not broken(dtype)
        monkeypatch.setattr(identities._Layer, "run", noisy)
        assert "I1" in broken(dtype)
        for value in (1e-30, np.nan):
            monkeypatch.setattr(identities._Layer, "run", nonzero(value))
            assert broken(dtype) == {"I8"}
        monkeypatch.setattr(identities._Layer, "run", right)
        with monkeypatch.context() as context:  # the streams' share of a layer's dx, which only the two halves make
            context.setattr(identities._Layer, "run_whole", lambda self, d, y, g: whole(self, d, y, 1.05 * g))
            assert broken(dtype) == {"I8"}


def test_the_places_of_the_faults_to_plant_are_there() -> None:
    """What tests/support/plant_mhc_faults.py, which takes minutes, puts into the kernels."""
    for description, *fault in plant_mhc_faults.FAULTS:
        text = plant_mhc_faults.planted(plant_mhc_faults.ROOT, *fault)
        assert fault[2] in text, description
    with pytest.raises(ValueError, match="must have its place once, got 0 times"):
        plant_mhc_faults.planted(plant_mhc_faults.ROOT, "csrc/cpu/mhc/sinkhorn.c", "no such line", "")
