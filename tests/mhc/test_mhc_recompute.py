"""Hyper-connections whose streams are computed again in backward, and what a recording of one thread changes for the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from arrays import f64

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, nn
from xtrain.optable.table import array, bits, tensor
from xtrain.testing import record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_streams_give_the_same_bits(dtype: str) -> None:
    layers = [nn.HyperConnection(12, 4, nn.Sequential(nn.RMSNorm(12), nn.Linear(12, 12), nn.SiLU())) for _ in range(5)]
    model = nn.Sequential(*layers).to(getattr(xt, dtype))
    x = xt.randn(2, 3, 4, 12).to(getattr(xt, dtype))
    found = []
    for run in (model, lambda x: nn.recompute_streams(layers[2:], nn.recompute_streams(layers[:2], x))):
        for leaf in (x, x.detach().requires_grad_()):  # the streams may be a leaf, or need no gradient at all
            model.zero_grad()
            out = run(leaf)
            (out * out).sum().backward()
            found.append([bits(out), *(bits(p.grad) for p in model.parameters())])
            if leaf.requires_grad:
                found[-1].append(bits(leaf.grad))
    assert found[0] == found[2] and found[1] == found[3]
    out = nn.recompute_streams(layers, x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute_streams: backward must run once"):
        out.sum().backward()


def one_after_another(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


@pytest.mark.parametrize("parts", [1, 3])
def test_recomputed_sublayers_share_their_arguments(parts: int) -> None:
    """Made by an op, by name or not, used outside, too; some of no gradient."""
    layers = [
        nn.HyperConnection(6, 2, lambda h, s, *, by, plus: (h @ s) * by + plus, dtype=xt.float64) for _ in range(parts)
    ]
    w, b, x = (tensor(f64(*shape)).requires_grad_() for shape in ((6, 6), (6,), (4, 2, 6)))
    found = []
    for run in (nn.recompute_streams, one_after_another):
        leaves = [w, b, x, *(p for layer in layers for p in layer.parameters())]
        for leaf in leaves:
            leaf.grad = None
        scale, shift = (w * 2).tanh(), b.exp()
        out = run(layers, x, scale, by=0.5, plus=shift)
        (out.square().sum() + scale.sum() + shift.sum()).backward()
        found.append([bits(out), *(bits(leaf.grad) for leaf in leaves[3:])])
        found.append([array(leaf.grad) for leaf in leaves])
    assert found[0] == found[2]
    assert max(np.abs(a - b).max() for a, b in zip(found[1], found[3])) <= 1e-14


def test_recomputed_streams_require_what_plain_ones_do() -> None:
    x = xt.randn(3, 2, 8)
    hidden = xt.randn(8, 8).requires_grad_()
    for sublayer, moves in ((nn.Linear(8, 8), False), (lambda h: h @ hidden, True), (nn.SiLU(), False)):
        layers = [nn.HyperConnection(8, 2, part).requires_grad_(False) for part in (nn.SiLU(), sublayer, nn.SiLU())]
        found = []
        for run in (nn.recompute_streams, one_after_another):
            out = run(layers, x)
            assert out.requires_grad == moves
            if moves:
                hidden.grad = None
                out.square().sum().backward()
                found.append(bits(hidden.grad))
        assert len(set(found)) <= 1
        layers[2].requires_grad_()
        assert nn.recompute_streams(layers, x).requires_grad
    assert nn.recompute_streams([], x) is x
    for enabled in (True, False):
        with xt.set_grad_enabled(enabled):
            for parts in ([], [nn.HyperConnection(4, 2, nn.SiLU())]):
                with pytest.raises(TypeError, match="recompute_streams: x must be a Tensor, got ndarray"):
                    nn.recompute_streams(parts, np.zeros((3, 2, 4)))


@pytest.mark.parametrize("what", ["x", "phi", "alpha", "bias", "gamma", "y"])
def test_a_change_in_place_before_the_backward_is_refused(what: str) -> None:
    """Each is needed to compute the streams again; a plain run refuses, too. A change before the next forward is none of these."""
    made = []

    def sublayer(h):
        made.append(h * 2.0)
        return made[-1]

    layers = [nn.HyperConnection(8, 2, sublayer, affine=True) for _ in range(2)]
    x = xt.randn(3, 2, 8).requires_grad_()
    for run in (one_after_another, nn.recompute_streams):
        streams = x * 1.0
        out = run(layers, streams)
        changed = {"x": streams, "y": made[-1]}.get(what) if what in "xy" else getattr(layers[0], what)
        changed.detach().fill_(0.5)
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()
        run(layers, x * 1.0).sum().backward()


@pytest.mark.parametrize("what", ["x", "phi", "y"])
def test_a_change_in_place_by_a_sublayer_is_refused(what: str) -> None:
    buffer = xt.zeros(3, 8)

    def sublayer(h):
        if what == "x":
            streams.detach().fill_(0.5)
        elif what == "phi":
            layers[0].phi.detach().fill_(0.5)
        else:
            buffer.copy_(h.detach())
            return buffer
        return h * 2.0

    layers = [nn.HyperConnection(8, 2, part) for part in (sublayer if what == "y" else nn.SiLU(), sublayer)]
    x = xt.randn(3, 2, 8).requires_grad_()
    for run in (one_after_another, nn.recompute_streams):
        streams = x * 1.0
        out = run(layers, streams)
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()


def test_a_recording_of_one_thread_leaves_others_alone() -> None:
    layer, x = nn.HyperConnection(8, 2, nn.SiLU()), xt.randn(3, 2, 8).requires_grad_()
    seen = []
    with record(layer):
        thread = threading.Thread(target=lambda: seen.append(layer.read(x)[1][1]))
        thread.start()
        thread.join()
        assert layer.read(x)[1][1] is F.mhc_post
    assert seen == [_C.mhc_close] and layer.read(x)[1][1] is _C.mhc_close
