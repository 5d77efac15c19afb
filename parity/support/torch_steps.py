"""A second opinion on the references and rules of the random programs (tests/fuzz): PyTorch's results and gradients in float64.

The fuzzer imports this file where PyTorch is installed. What is compared here are NumPy's reference of a step and the rule for its
gradient, which judge the kernels, with PyTorch on the same numbers; so a misconception that reference and kernel share is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

PLAIN = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "relu", "erf")
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "matmul")
ROOM = 1e-9  # relative to the size of the terms
torch.set_num_threads(1)


def _reduction(name: str) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        call = getattr(torch, name)
        return call(x) if dim is None else call(x, dim=dim, keepdim=keepdim)

    return step


def _swiglu(gate: torch.Tensor, *up: torch.Tensor) -> torch.Tensor:
    gate, other = (gate, up[0]) if up else gate.chunk(2, -1)
    return F.silu(gate) * other


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    rows, columns = q.shape[-2], k.shape[-2]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows) if is_causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def _causal_conv1d(
    x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor, activation: str | None = None
) -> torch.Tensor:
    if not x.numel():
        return x * 1 + 0 * w.sum() + 0 * sum(b.sum() for b in bias)
    y = F.conv1d(F.pad(x.transpose(1, 2), (w.shape[1] - 1, 0)), w.unsqueeze(1), *bias, groups=w.shape[0])
    return (F.silu(y) if activation else y).transpose(1, 2)


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in (*PLAIN, *BINARY)},
    **{name: _reduction(name) for name in ("sum", "mean", "amax", "amin")},
    "silu": F.silu, "gelu": F.gelu, "where": torch.where, "linear": F.linear, "embedding": F.embedding, "swiglu": _swiglu,
    "attention": _attention, "softmax": lambda x, dim: torch.softmax(x, dim),
    "rms_norm": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    "layer_norm": lambda x, weight=None, bias=None, eps=1e-5: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "cumsum": lambda x, dim: torch.cumsum(x, dim), "conv1d": F.conv1d, "causal_conv1d": _causal_conv1d,
    "cross_entropy": lambda x, target, reduction: F.cross_entropy(x, target, reduction=reduction),
}  # fmt: skip


def differs(
    name: str,
    arrays: list[np.ndarray],
    dy: np.ndarray,
    reference: Any,
    rule: Callable[..., Any],
    kwargs: dict[str, Any],
) -> str:
    """What the reference's result or the rule say otherwise than PyTorch; "" when they agree, or when PyTorch has no such step."""
    if name not in STEPS:
        return ""
    inputs = [torch.tensor(a, device="cpu", requires_grad=a.dtype.kind == "f") for a in arrays]
    out = STEPS[name](*inputs, **kwargs)
    y = out.detach().numpy()
    want = np.asarray(reference)
    if want.shape != y.shape:
        return f"{name}: the reference has shape {want.shape}, PyTorch's result {y.shape}"
    room = ROOM * (np.abs(y) + np.abs(arrays[0]).max(initial=1.0))
    if not (np.isclose(want, y, rtol=0, atol=0, equal_nan=True) | (np.abs(want - y) <= room)).all():
        return f"{name}: the reference differs from PyTorch by {np.abs(want - y).max()}"
    leaves = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(out, leaves, torch.tensor(dy.copy(), device="cpu"), allow_unused=True))
    for x, part in zip(inputs, rule(dy, *arrays, y, **kwargs), strict=True):
        if not x.requires_grad:
            continue
        found = next(grads)
        grad = np.zeros(x.shape) if found is None else found.numpy()
        mine, size = (np.zeros(x.shape), np.zeros(x.shape)) if part is None else part
        if mine.shape != grad.shape:
            return f"{name}: the rule's gradient has shape {mine.shape}, PyTorch's {grad.shape}"
        fine = (np.abs(mine - grad) <= ROOM * (size + np.abs(size).max(initial=0.0))) | ~np.isfinite(grad)
        if not fine.all():
            return f"{name}: the rule's gradient differs from PyTorch's by {np.abs(mine - grad).max()}"
    return ""
