"""Convolutions in one dimension, as functional has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from .. import _C
from .._types import as_int

_Tensor = _C.Tensor
One = int | Sequence[int]  # an int, or a tuple of one


def one(op: str, name: str, value: One) -> int:
    """The int of a parameter that is given for one dimension. TypeError for no int, ValueError for several."""
    if isinstance(value, (tuple, list)):
        if len(value) != 1:
            raise ValueError(f"{op}: {name} must be an int or a tuple of one, got {value}")
        return as_int(op, name, value[0])
    return as_int(op, name, value)


def both_sides(op: str, padding: One | str, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Zeros in front of a row and behind it. ValueError for other words, and for "same" with a stride."""
    if not isinstance(padding, str):
        padding = one(op, "padding", padding)
        return padding, padding
    reach = dilation * (kernel - 1)
    if padding == "valid":
        return 0, 0
    if padding == "causal":
        return reach, 0
    if padding != "same":
        raise ValueError(f"{op}: padding must be an int, 'valid', 'same' or 'causal', got {padding!r}")
    if stride != 1:
        raise ValueError(f"{op}: padding 'same' must come with a stride of 1, got {stride}")
    return reach // 2, reach - reach // 2


def conv1d(
    input: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None = None,
    stride: One = 1,
    padding: One | str = 0,
    dilation: One = 1,
    groups: int = 1,
) -> _Tensor:
    """Cross-correlation along rows of L elements (LeCun et al. 1989, Backpropagation Applied to Handwritten Zip Code
    Recognition).

    input [B, in, L] or [in, L], weight [out, in / groups, K], bias [out] or None, of one dtype -> [B, out, T] or
    [out, T], T = (L + padding in front and behind - dilation (K - 1) - 1) // stride + 1:

        y[b, o, t] = bias[o] + sum over c, k of weight[o, c, k] input[b, c + first channel of o's group, t stride + k
        dilation - padding in front]

    padding: zeros on both sides, or "valid" (none), "same" (T = L, the odd one behind; stride 1), or "causal" (all in
    front: y[t] sees nothing after t stride). Sums in float32 (float64), rounded once; gradients likewise. A product of
    matrices computes it, for depthwise kernels of few taps a sum an element. ValueError for a kernel longer than the
    padded row, groups that do not divide, and other shapes; TypeError for other dtypes.
    """
    if not isinstance(weight, _Tensor) or weight.ndim != 3:  # the core says what is wrong
        return _C.conv1d(input, weight, bias)
    steps, spread = one("conv1d", "stride", stride), one("conv1d", "dilation", dilation)
    front, behind = both_sides("conv1d", padding, weight.shape[2], steps, spread)
    if isinstance(input, _Tensor) and input.ndim not in (2, 3):
        raise ValueError(f"conv1d: input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
    if isinstance(input, _Tensor) and input.ndim == 2:
        return _C.conv1d(input.unsqueeze(0), weight, bias, steps, front, behind, spread, groups).squeeze(0)
    return _C.conv1d(input, weight, bias, steps, front, behind, spread, groups)


@overload
def causal_conv1d(
    x: _Tensor, weight: _Tensor, bias: _Tensor | None = None, activation: str | None = None, state: None = None
) -> _Tensor: ...
@overload
def causal_conv1d(
    x: _Tensor, weight: _Tensor, bias: _Tensor | None = None, activation: str | None = None, *, state: _Tensor
) -> tuple[_Tensor, _Tensor]: ...
def causal_conv1d(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None = None,
    activation: str | None = None,
    state: _Tensor | None = None,
) -> _Tensor | tuple[_Tensor, _Tensor]:
    """The short convolution of Mamba and hybrid models (Gu & Dao 2023): each channel with its last K inputs.

    x [B, S, C], as the layers around it have it, weight [C, K] or Conv1d's [C, 1, K], K in 1..8, bias [C] or None, of
    one dtype -> [B, S, C]: z[b, t, c] = bias[c] + sum_k weight[c, k] x[b, t - (K - 1) + k, c], zeros in front of the
    row; silu(z) with activation "silu". Nothing but the inputs is kept for the backward.

    state [B, K - 1, C]: the inputs before x, in place of the zeros -> (output, state for what follows), the second one
    new. A row in pieces has the bits of the whole row: start from zeros, pass each state on. Gradients also go through
    states. Sums in float32 (float64), rounded once. ValueError for other shapes, more taps and other activations,
    TypeError for other dtypes.
    """
    if state is None:
        return _C.causal_conv1d(x, weight, bias, activation)
    return _C.causal_conv1d_step(x, weight, state, bias, activation)
