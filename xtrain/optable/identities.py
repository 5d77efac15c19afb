"""Identities that hyper-connections obey, as checks that need no reference and no automatic differentiation.

Each compares two quantities that the kernels make in different ways, and reports their distance over the size of the
terms that went into them: the sum of their absolute values or, where they are many and of both signs (I1, I2), the
square root of the sum of their squares. With v a token as a vector, r its 1 / RMS, g the gradient of the new streams:

    I1  <phi_k, dphi_k> = alpha_k dalpha_k, for each of the three blocks of rows
    I2  gamma_k dgamma_k = sum_j phi_jk dphi_jk, for each column
    I3  <v, dx> = (sum_j dq_j u_j) r^3 norm_eps, through the coefficients alone: scaling a token changes almost nothing.
        At every scale of x: it misses neither a factor r nor one too many
    I4  form D: every row of dlogits sums to 0 (form P: every column)
    I5  form D: columns of the matrix sum to 1 - O(eps); rows as far as the iterations have come; nothing is negative
    I6  with M doubly stochastic, sum_i out_i = sum_i x_i + (sum_i h_post_i) y, but for the deviation of the columns
    I7  twice the gradient gives twice every gradient, bit for bit
    I8  alpha = 0: dphi = 0 and dgamma = 0 exactly, dalpha is not 0, and dx = h_pre dh_in up to the device's sigmoid;
        of a whole layer (mhc_open and mhc_close), dx_j = h_pre_j dh_in + sum_i M_ij g_i
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _C
from .table import UNIT_ROUNDOFF, array, exact, tensor

SLOWEST = {2: 1e-3, 3: 2e-4}  # what 100 iterations leave of logits of deviation 1, by the streams; else eps


class _Layer:
    """Inputs of mhc_pre, drawn, and its gradients for given gradients of its results."""

    def __init__(
        self, dtype: str, shape: tuple[int, int, int], rms: float, deviation: float, device: str | None
    ) -> None:
        tokens, n, c = self.shape = shape
        self.dtype, self.device = dtype, device
        self.wide = "float64" if dtype == "float64" else "float32"
        self.rng = np.random.default_rng(zlib.crc32(f"{dtype}{shape}{rms}{deviation}".encode()))
        m, k = n * n + 2 * n, n * c
        self.x = exact(self.rng.standard_normal(shape) * rms, dtype)
        self.phi = exact(self.rng.standard_normal((m, k)) * deviation / np.sqrt(k), self.wide)
        self.alpha = exact(self.rng.uniform(0.5, 1.5, 3), self.wide)
        self.bias = exact(self.rng.standard_normal(m) * 0.1, self.wide)
        self.gamma = exact(self.rng.uniform(0.5, 1.5, (n, c)), self.wide)
        shapes = (tokens, c), (tokens, n), (tokens, n, n)
        self.d = [exact(self.rng.standard_normal(s), w) for s, w in zip(shapes, (dtype, self.wide, self.wide))]

    def tensor(self, a: np.ndarray, dtype: str) -> Any:
        return tensor(np.asarray(a, np.float64), dtype, self.device)

    def _leaves(self, changed: dict[str, np.ndarray]) -> list[Any]:
        values = {name: getattr(self, name) for name in ("x", "phi", "alpha", "bias", "gamma")} | changed
        return [self.tensor(a, self.dtype if name == "x" else self.wide).requires_grad_() for name, a in values.items()]

    def run(self, d: list[np.ndarray], **changed: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(h_in, h_post, h_res), (dx, dphi, dalpha, dbias, dgamma)."""
        given = self._leaves(changed)
        return self._back(given, _C.mhc_pre(*given), d)

    def run_whole(self, dh_in: np.ndarray, y: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """M and the gradients of a whole layer with alpha = 0 whose output is y, whatever it gets; g is that of the
        new streams."""
        zeros = {"alpha": np.zeros(3)}
        given = self._leaves(zeros)
        h_in, h_post, m, carry = _C.mhc_open(*given)
        out = _C.mhc_close(carry, self.tensor(y, self.dtype), h_post, m)
        return array(m), self._back(given, [h_in, out], [dh_in, g])[1]

    def _back(
        self, given: list[Any], outs: Sequence[Any], d: list[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        _C.backward(outs, [self.tensor(a, o.dtype.name) for a, o in zip(d, outs)], False)
        return [array(o) for o in outs], [array(t.grad) for t in given]


def _relative(left: np.ndarray, right: np.ndarray, size: np.ndarray) -> float:
    worst = np.abs(left - right) / np.maximum(size, 1e-300)
    return float(worst.max(initial=0.0)) if np.isfinite(worst).all() else float("inf")


def _of_pre(layer: _Layer, terms: float) -> dict[str, tuple[float, float]]:
    tokens, n, c = layer.shape
    unit = UNIT_ROUNDOFF[layer.wide]
    blocks = [slice(0, n), slice(n, 2 * n), slice(2 * n, n * n + 2 * n)]
    _, grads = layer.run(layer.d)
    _, dphi, dalpha, _, dgamma = grads
    product = layer.phi * dphi
    found, rounding = {}, (32 + np.sqrt(tokens + terms)) * unit  # a few for each term, and those of long sums
    # The terms of dphi and dalpha are the same numbers, added up in another order.
    size = np.array([np.linalg.norm(product[rows]) for rows in blocks]) + np.abs(layer.alpha * dalpha)
    sums = np.array([product[rows].sum() for rows in blocks])
    found["I1"] = (_relative(sums, layer.alpha * dalpha, size), rounding)
    size = np.linalg.norm(product, axis=0) + 1e-3 * np.linalg.norm(product, axis=0).max(initial=0.0)
    left = (layer.gamma * dgamma).reshape(-1)
    found["I2"] = (_relative(left, product.sum(0), size), rounding)
    d = [np.zeros_like(layer.d[0]), *layer.d[1:]]
    outs, (mixed, *_) = layer.run(d)
    v = layer.x.reshape(tokens, -1)
    r = 1 / np.sqrt((v * v).mean(-1) + 1e-6)
    u = (v * layer.gamma.reshape(-1)) @ layer.phi.T
    delta = np.zeros_like(u)
    delta[:, blocks[1]] = d[1] * outs[1] * (1 - outs[1] / 2)
    delta[:, blocks[2]] = d[2].reshape(tokens, -1)
    want = (np.repeat(layer.alpha, (n, n, n * n)) * delta * u).sum(-1) * r**3 * 1e-6
    mixed = mixed.reshape(tokens, -1)
    size = np.linalg.norm(v, axis=-1) * np.linalg.norm(mixed, axis=-1)
    stored = UNIT_ROUNDOFF[layer.dtype] / np.sqrt(n * c) * 8 if layer.dtype != layer.wide else 0.0
    found["I3"] = (_relative((v * mixed).sum(-1), want, size), 16 * np.sqrt(terms) * unit + stored)
    twice = layer.run([2 * a for a in layer.d])[1]
    found["I7"] = (max(_relative(a, 2 * b, np.ones(1)) for a, b in zip(twice, grads)), 0.0)
    found["I8"] = (_of_zero_alpha(layer), (8 + n) * unit + UNIT_ROUNDOFF[layer.dtype])
    return found


def _of_zero_alpha(layer: _Layer) -> float:
    """I8: the distance of both dx from what they must be; infinite where a gradient that must be 0 is not."""
    h_pre = 1 / (1 + np.exp(-layer.bias[: layer.shape[1]])) + 1e-6
    straight = h_pre[:, None] * layer.d[0][:, None, :]
    g = exact(layer.rng.standard_normal(layer.shape), layer.dtype)
    m, whole = layer.run_whole(layer.d[0], g[:, 0], g)
    mixed, size = np.swapaxes(m, 1, 2) @ g, np.swapaxes(np.abs(m), 1, 2) @ np.abs(g)
    found = 0.0
    _, alone = layer.run(layer.d, alpha=np.zeros(3))
    for (dx, dphi, dalpha, _, dgamma), more, more_size in ((alone, 0.0, 0.0), (whole, mixed, size)):
        # Of a single stream M is 1 whatever its logit is, and alpha's third gradient a rounding.
        moving = dalpha if layer.shape[1] > 1 else dalpha[:2]
        if not ((dphi == 0).all() and (dgamma == 0).all() and np.isfinite(dalpha).all() and moving.all()):
            return float("inf")
        found = max(found, _relative(dx, straight + more, np.abs(straight) + more_size + 1e-30))
    return found


def _of_sinkhorn(layer: _Layer, deviation: float) -> dict[str, tuple[float, float]]:
    tokens, n, _ = layer.shape
    unit, found = UNIT_ROUNDOFF[layer.wide], {}
    logits = exact(layer.rng.standard_normal((tokens, n, n)) * deviation, layer.wide)
    for form, axis in (("D", -1), ("P", -2)):
        z = layer.tensor(logits, layer.wide).requires_grad_()
        a = _C.sinkhorn(z, form=form)
        _C.backward([a], [layer.tensor(layer.d[2], layer.wide)], False)
        dz, a = array(z.grad), array(a)
        # In P, too, for any eps: the share of eps / d that its column's maximum gets sees to it.
        scale = np.abs(dz).max(initial=0.0) + np.abs(layer.d[2] * a).max(initial=0.0)
        found[f"I4 {form}"] = (_relative(dz.sum(axis), np.zeros(1), scale), 200 * unit)
        last = a.sum(-1 - axis - 2)
        found[f"I5 {form}"] = (_relative(last, np.ones(1), np.ones(1)) if (a >= 0).all() else np.inf, 3e-6)
        if deviation <= 1:
            # Of 100000 4 x 4 matrices 20 iterations leave up to 3e-3, 100 only eps; smaller ones converge more slowly.
            other = array(_C.sinkhorn(z.detach(), form=form, iters=100)).sum(axis)
            found[f"I5 {form}, other axis"] = (_relative(other, np.ones(1), np.ones(1)), SLOWEST.get(n, 3e-6))
    return found


def _of_post(layer: _Layer) -> dict[str, tuple[float, float]]:
    m = array(_C.sinkhorn(layer.tensor(layer.d[2], layer.wide), form="D"))
    y, h = layer.d[0], np.abs(layer.d[1])
    out = array(
        _C.mhc_post(
            layer.tensor(layer.x, layer.dtype),
            layer.tensor(y, layer.dtype),
            layer.tensor(h, layer.wide),
            layer.tensor(m, layer.wide),
        )
    )
    want = layer.x.sum(1) + h.sum(-1)[:, None] * y
    size = np.abs(layer.x).sum(1) + h.sum(-1)[:, None] * np.abs(y)
    columns = np.abs(m.sum(-2) - 1).max(initial=0.0)
    unit = UNIT_ROUNDOFF[layer.dtype] + 8 * UNIT_ROUNDOFF[layer.wide]
    return {"I6": (_relative(out.sum(1), want, size), columns + 4 * unit)}


def mhc_identities(
    dtype: str = "float64",
    shape: tuple[int, int, int] = (33, 4, 40),
    rms: float = 1.0,
    deviation: float = 1.0,
    device: str | None = None,
) -> dict[str, tuple[float, float]]:
    """{identity: (residual, what rounding allows)} on random tokens.

    shape: tokens, streams and channels. rms: of the streams. deviation: of the logits.
    """
    layer = _Layer(dtype, shape, rms, deviation, device)
    terms = float(shape[1] * shape[2])
    return {**_of_pre(layer, terms), **_of_sinkhorn(layer, deviation), **_of_post(layer)}


def check(device: str) -> str:
    """What is wrong with the identities on a device, or ""."""
    for dtype in ("float64", "float32", "bfloat16"):
        for shape in ((33, 4, 40), (17, 2, 129), (9, 8, 31)):
            for rms in (0.1, 1.0, 4.0):
                for name, (residual, limit) in mhc_identities(dtype, shape, rms, 1.0, device).items():
                    if not residual <= limit:
                        return f"{name} in {dtype}, {shape}, RMS {rms:g}: residual {residual:.2e} above {limit:.2e}"
    return ""
