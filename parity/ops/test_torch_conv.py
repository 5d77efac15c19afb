"""Conv1d beside PyTorch's: names, start values and results; the convolution of Mamba's block as Hugging Face writes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as TF

import xtrain as xt
import xtrain.functional as F
from xtrain.testing import Convolution

LAYERS = [
    (dict(kernel_size=3), 10),
    (dict(kernel_size=(5,), stride=2, padding=3, groups=2, bias=False), 11),
    (dict(kernel_size=4, padding="same", dilation=3), 9),
    (dict(kernel_size=4, padding="valid", dilation=2, groups=4), 17),
]


@pytest.mark.parametrize(("options", "length"), LAYERS)
def test_a_layer_takes_pytorchs_state_dict(options: dict, length: int) -> None:
    theirs, ours = torch.nn.Conv1d(4, 8, **options), xt.nn.Conv1d(4, 8, **options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for (_, a), (_, b) in zip(theirs.state_dict().items(), ours.state_dict().items(), strict=True):
        assert tuple(a.shape) == tuple(b.shape)
        assert np.isclose(a.abs().max().item(), b.abs().max().item(), rtol=0.6)  # both uniform up to one bound
    ours.load_state_dict({name: xt.tensor(t.cpu().numpy()) for name, t in theirs.state_dict().items()})
    x = np.random.default_rng(0).standard_normal((2, 4, length), np.float32)
    rtol, atol = Convolution(2, 4, 8, length, theirs.kernel_size, groups=theirs.groups, padding=length).tolerance(
        "float32", magnitude=8.0
    )
    for given in (x, x[0]):
        want = theirs(torch.tensor(given)).detach().cpu().numpy()
        np.testing.assert_allclose(ours(xt.tensor(given)).detach().cpu().numpy(), want, 2 * rtol, 2 * atol)


def test_the_convolution_of_a_mamba_block() -> None:
    """Prefill and three steps of decoding: a Conv1d padded on both sides, cut; then a rolling window of K inputs."""
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(shape) for shape in ((2, 12, 6), (6, 1, 4), (6,)))
    rows = torch.tensor(x).transpose(1, 2)
    prefill = TF.silu(TF.conv1d(rows[..., :9], torch.tensor(w), torch.tensor(b), padding=3, groups=6)[..., :9])
    window, steps = rows[..., 5:9], []
    for t in range(9, 12):
        window = torch.cat([window[..., 1:], rows[..., t : t + 1]], -1)
        steps.append(TF.silu((window * torch.tensor(w)[:, 0]).sum(-1) + torch.tensor(b)))
    weight, bias = xt.tensor(w), xt.tensor(b)
    y, state = F.causal_conv1d(xt.tensor(x[:, :9]), weight, bias, "silu", state=xt.zeros(2, 3, 6, dtype="float64"))
    np.testing.assert_allclose(y.cpu().numpy(), prefill.transpose(1, 2).cpu().numpy(), rtol=1e-13, atol=1e-14)
    for t, want in enumerate(steps, 9):
        y, state = F.causal_conv1d(xt.tensor(x[:, t : t + 1]), weight, bias, "silu", state=state)
        np.testing.assert_allclose(y[:, 0].cpu().numpy(), want.cpu().numpy(), rtol=1e-13, atol=1e-14)
