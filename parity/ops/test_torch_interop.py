"""Memory shared with PyTorch through DLPack, and semantics that the op table does not show: promotion, in-place, views, errors."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch

import xtrain as xt
import xtrain.functional as F

pytestmark = pytest.mark.on_cpu

NAMES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("name", NAMES)
def test_dlpack_from_torch(name: str) -> None:
    a = (torch.arange(12).reshape(3, 4) % 2).to(getattr(torch, name)).t()
    t = xt.from_dlpack(a)
    assert (t.data_ptr(), t.shape, t.dtype.name, tuple(t.stride())) == (a.data_ptr(), (4, 3), name, a.stride())
    assert t.float().tolist() == a.float().tolist()
    a[0, 0] = 1
    assert t[0, 0].float().item() == 1
    del a
    gc.collect()
    assert t.float().sum().item() == 7


@pytest.mark.parametrize("name", NAMES)
def test_dlpack_to_torch(name: str) -> None:
    t = (xt.arange(12).reshape(3, 4)).to(getattr(xt, name))
    a = torch.from_dlpack(t)
    assert (a.data_ptr(), tuple(a.shape), str(a.dtype)) == (t.data_ptr(), (3, 4), f"torch.{name}")
    view = torch.from_dlpack(t[1:, ::2])
    assert view.float().tolist() == t[1:, ::2].float().tolist()
    del t
    gc.collect()
    assert (
        a.float().tolist()
        == np.arange(12).reshape(3, 4).astype(bool if name == "bool" else np.float64).astype(np.float64).tolist()
    )


def test_dlpack_refusals() -> None:
    with pytest.raises((BufferError, TypeError, ValueError)):
        xt.from_dlpack(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises((BufferError, RuntimeError)):
        xt.from_dlpack(torch.zeros(2, requires_grad=True))
    with pytest.raises((BufferError, ValueError)):
        xt.from_dlpack(torch.zeros((1,) * 9))


def test_promotion() -> None:
    for a, b in itertools.product(NAMES, repeat=2):
        for shape_a, shape_b in [((2,), (2,)), ((2,), ()), ((), (2,)), ((), ())]:
            want = (torch.ones(shape_a, dtype=getattr(torch, a)) * torch.ones(shape_b, dtype=getattr(torch, b))).dtype
            got = (xt.ones(*shape_a, dtype=getattr(xt, a)) if shape_a else xt.ones((), dtype=getattr(xt, a))) * (
                xt.ones(*shape_b, dtype=getattr(xt, b)) if shape_b else xt.ones((), dtype=getattr(xt, b))
            )
            assert f"torch.{got.dtype.name}" == str(want), (a, b, shape_a, shape_b)
    for a in NAMES:
        for number in (2, 2.5, True):
            if a == "bool" and number is True:
                continue
            want = (torch.ones(2, dtype=getattr(torch, a)) * number).dtype
            assert f"torch.{(xt.ones(2, dtype=getattr(xt, a)) * number).dtype.name}" == str(want), (a, number)


def test_sum_and_mean_dtypes() -> None:
    for a in NAMES:
        assert f"torch.{xt.ones(2, dtype=getattr(xt, a)).sum().dtype.name}" == str(
            torch.ones(2, dtype=getattr(torch, a)).sum().dtype
        ), a


def test_exactly_pytorchs_gradient_conventions() -> None:
    """Points where a derivative is a matter of convention."""
    for name in ("abs", "relu"):
        x, y = xt.tensor([0.0, -0.0], requires_grad=True), torch.tensor([0.0, -0.0], requires_grad=True)
        getattr(x, name)().sum().backward()
        getattr(y, name)().sum().backward()
        assert x.grad.tolist() == y.grad.tolist(), name
    for power in (0, 0.0, 1, 2, 3):
        x, y = xt.tensor([0.0, 2.0], requires_grad=True), torch.tensor([0.0, 2.0], requires_grad=True)
        (x**power).sum().backward()
        (y**power).sum().backward()
        assert x.grad.tolist() == y.grad.tolist(), power
    x, y = xt.tensor([0.0, 2.0], requires_grad=True), torch.tensor([0.0, 2.0], requires_grad=True)
    (0**x).sum().backward()
    (0**y).sum().backward()
    assert np.array_equal(x.grad.numpy(), y.grad.numpy(), equal_nan=True)


def test_gradient_of_casts_and_mixed_dtypes() -> None:
    a = np.random.default_rng(0).standard_normal((3, 4))
    x, y = xt.tensor(a.astype(np.float32), requires_grad=True), torch.tensor(a.astype(np.float32), requires_grad=True)
    (x.double() * xt.tensor(a) + x.bfloat16().float()).sum().backward()
    (y.double() * torch.tensor(a) + y.bfloat16().float()).sum().backward()
    assert x.grad.dtype is xt.float32
    assert np.allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-6)
    x.grad = y.grad = None
    (x * xt.tensor(a)).sum().backward()
    (y * torch.tensor(a)).sum().backward()
    assert x.grad.dtype is xt.float32
    assert np.allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-6)


def test_functional_signatures_are_pytorchs() -> None:
    rng = np.random.default_rng(1)
    a, w, b = (
        rng.standard_normal((2, 6)).astype(np.float32),
        rng.standard_normal(6).astype(np.float32),
        rng.standard_normal((3, 6)).astype(np.float32),
    )
    x, y, tw, xw, tb, xb = xt.tensor(a), torch.tensor(a), torch.tensor(w), xt.tensor(w), torch.tensor(b), xt.tensor(b)
    G = torch.nn.functional
    for ours, theirs in [
        (F.linear(x, xb), G.linear(y, tb)),
        (F.rms_norm(x, (6,), xw, 1e-5), G.rms_norm(y, (6,), tw, 1e-5)),
        (F.rms_norm(x, (6,)), G.rms_norm(y, (6,))),
        (F.rms_norm(x, (2, 6), eps=1e-3), G.rms_norm(y, (2, 6), eps=1e-3)),
        (F.layer_norm(x, (6,), xw, xb[0], 1e-3), G.layer_norm(y, (6,), tw, tb[0], 1e-3)),
        (F.layer_norm(x, (6,)), G.layer_norm(y, (6,))),
        (F.layer_norm(x, (2, 6), bias=xb[:2]), G.layer_norm(y, (2, 6), bias=tb[:2])),
        (F.softmax(x, dim=0), G.softmax(y, dim=0)),
        (F.log_softmax(x, dim=-1), G.log_softmax(y, dim=-1)),
        (F.gelu(x), G.gelu(y)),
        (F.gelu(x, approximate="tanh"), G.gelu(y, approximate="tanh")),
        (F.silu(x), G.silu(y)),
        (F.cross_entropy(x, xt.tensor([1, 5])), G.cross_entropy(y, torch.tensor([1, 5]))),
        (
            F.cross_entropy(x, xt.tensor([1, -100]), ignore_index=-100, reduction="sum"),
            G.cross_entropy(y, torch.tensor([1, -100]), ignore_index=-100, reduction="sum"),
        ),
        (F.embedding(xt.tensor([[0, 2]]), xb), G.embedding(torch.tensor([[0, 2]]), tb)),
    ]:
        assert np.allclose(ours.numpy(), theirs.numpy(), rtol=2e-6, atol=1e-6)


def test_everything_ignored_is_nan_as_in_pytorch() -> None:
    x, y = xt.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    a, b = F.cross_entropy(x, xt.tensor([-100, -100])), torch.nn.functional.cross_entropy(y, torch.tensor([-100, -100]))
    assert np.isnan(a.item()) == np.isnan(b.item())


def test_causal_alignment_difference_is_the_documented_one() -> None:
    """For Sq == Skv both agree; else our last query sees everything, like PyTorch's causal_lower_right."""
    from torch.nn.attention.bias import causal_lower_right

    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((1, 2, 3, 4)).astype(np.float32), rng.standard_normal((1, 2, 7, 4)).astype(np.float32)
    ours = F.scaled_dot_product_attention(xt.tensor(q), xt.tensor(k), xt.tensor(k), is_causal=True).numpy()
    theirs = torch.nn.functional.scaled_dot_product_attention(
        torch.tensor(q), torch.tensor(k), torch.tensor(k), attn_mask=causal_lower_right(3, 7)
    ).numpy()
    assert np.allclose(ours, theirs, atol=1e-6)
