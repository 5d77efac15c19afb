"""Layers with parameters, and activations as modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import _C, _creation, functional
from .._C import Tensor
from .._types import Device, DType, Size, as_sizes
from ..tensors.convolution import One, both_sides, one
from . import init
from .module import Module, Parameter, is_stock


def _parameter(shape: Sequence[int], dtype: DType, device: Device) -> Parameter:
    return Parameter(_C.empty(shape, dtype or _C.float32, device))


class Linear(Module):
    """y = x W^T + b: x [..., in_features] -> [..., out_features]; weight [out, in], bias [out] or None.

    Both start uniform in [-1/sqrt(in), 1/sqrt(in)), PyTorch's default. Calls: ValueError for an x that does not end in
    in_features, TypeError for an x of another dtype than the weight's.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None, dtype: DType = None
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter((out_features, in_features), dtype, device)
        self.bias = _parameter((out_features,), dtype, device) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None and self.in_features > 0:
            bound = 1.0 / math.sqrt(self.in_features)
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return _C.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def joined_weights(*layers: Module) -> tuple[list[Tensor], list[Tensor] | None] | None:
    """The weights and biases of `layers` where _C.linear_joined of them computes what calling the layers does, in one
    product; else None.

    They are stock Linear layers (see is_stock), all with a bias or none, and their weights lie one behind the other in
    memory (see module.pack). Asked in every forward.
    """
    weights: list[Any] = []
    biases: list[Any] = []
    for layer in layers:
        if not is_stock(layer, Linear):
            return None
        weight: Any = layer.weight  # pyright: ignore[reportAttributeAccessIssue]
        bias: Any = layer.bias  # pyright: ignore[reportAttributeAccessIssue]
        if weights and (not weights[-1].adjoins(weight) or (bias is None) != (biases[-1] is None)):
            return None
        weights.append(weight)
        biases.append(bias)
    return weights, None if biases[0] is None else biases


def add_norm(norm: Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(x + residual, norm(x + residual)): one op where `norm` is a stock RMSNorm or LayerNorm over the last dim (see
    is_stock) and x and residual are alike, else an addition and a call of norm. The same bits, forward and backward.
    """
    alike = x.dtype == residual.dtype and x.shape == residual.shape
    if alike and is_stock(norm, LayerNorm):
        layer: Any = norm
        if layer.normalized_shape == tuple(x.shape[-1:]):
            return _C.add_layer_norm(x, residual, layer.weight, layer.bias, layer.eps)
    if alike and is_stock(norm, RMSNorm):
        weight: Any = norm.weight  # pyright: ignore[reportAttributeAccessIssue]
        eps: Any = norm.eps  # pyright: ignore[reportAttributeAccessIssue]
        if weight is not None and weight.ndim == 1 and eps is not None:
            return _C.add_rms_norm(x, residual, weight, eps)
    x = x + residual
    return x, norm(x)


class Embedding(Module):
    """Rows of a table: ids (int64 or int32, any shape) -> [*ids.shape, embedding_dim]; weight [num_embeddings,
    embedding_dim].

    The table starts standard normal. Calls: IndexError for an id outside the table, TypeError for ids of other dtypes.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: DType = None) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = _parameter((num_embeddings, embedding_dim), dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return _C.embedding(input, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Conv1d(Module):
    """Cross-correlation along rows (see functional.conv1d): input [B, in_channels, L] or [in_channels, L] ->
    [B, out_channels, T] or [out_channels, T]; weight [out_channels, in_channels / groups, kernel_size], bias
    [out_channels] or None.

    Both start uniform in [-b, b), b = 1/sqrt(in_channels / groups * kernel_size), PyTorch's default. kernel_size,
    stride, padding and dilation are ints or tuples of one; padding may also be "valid", "same" or "causal". ValueError
    for numbers out of range and groups that do not divide, NotImplementedError for other padding modes. Calls: errors
    as in functional.conv1d. F.causal_conv1d takes this layer's weight and bias for a causal depthwise one.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: One,
        stride: One = 1,
        padding: One | str = 0,
        dilation: One = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        if padding_mode != "zeros":
            raise NotImplementedError(f"Conv1d: padding_mode must be 'zeros', got {padding_mode!r}")
        kernel, steps, spread = (
            one("Conv1d", name, value)
            for name, value in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
        )
        for name, value in (("kernel_size", kernel), ("stride", steps), ("dilation", spread), ("groups", groups)):
            if value < 1:
                raise ValueError(f"Conv1d: {name} must be at least 1, got {value}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ValueError(f"Conv1d: groups must divide {name}, {channels}, got {groups}")
        both_sides("Conv1d", padding, kernel, steps, spread)  # refuses what is none
        self.in_channels, self.out_channels, self.groups, self.padding = in_channels, out_channels, groups, padding
        self.kernel_size, self.stride, self.dilation = (kernel,), (steps,), (spread,)
        self.weight = _parameter((out_channels, in_channels // groups, kernel), dtype, device)
        self.bias = _parameter((out_channels,), dtype, device) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        fan_in = self.in_channels // self.groups * self.kernel_size[0]
        if self.bias is not None and fan_in > 0:
            init.uniform_(self.bias, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))

    def forward(self, input: Tensor) -> Tensor:
        return functional.conv1d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size[0]}, stride={self.stride[0]}, "
            f"padding={self.padding!r}, dilation={self.dilation[0]}, groups={self.groups}, bias={self.bias is not None}"
        )


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dims (see functional.rms_norm).

    x [..., *normalized_shape] -> the same shape; weight [*normalized_shape], ones at the start. eps None is the machine
    epsilon of x's dtype. elementwise_affine False: no weight. Calls: ValueError for an x of another shape, TypeError
    for an x of another dtype than the weight's.
    """

    def __init__(
        self,
        normalized_shape: Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        shape = as_sizes("RMSNorm", normalized_shape)
        self.normalized_shape: tuple[int, ...] = shape
        self.eps = eps
        self.weight = (
            Parameter(_creation.ones(self.normalized_shape, dtype=dtype, device=device)) if elementwise_affine else None
        )

    def reset_parameters(self) -> None:
        if self.weight is not None:
            init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        if weight is None or eps is None or len(self.normalized_shape) != 1:
            return functional.rms_norm(input, self.normalized_shape, weight, eps)
        return _C.rms_norm(input, weight, eps)  # checks the last dim by the weight

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dims (see functional.layer_norm).

    x [..., *normalized_shape] -> the same shape; weight and bias [*normalized_shape], ones and zeros at the start.
    elementwise_affine False: neither; bias False: no bias. Calls: ValueError for an x of another shape, TypeError for
    an x of another dtype than the weight's.
    """

    def __init__(
        self,
        normalized_shape: Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        shape = as_sizes("LayerNorm", normalized_shape)
        self.normalized_shape: tuple[int, ...] = shape
        self.eps = eps
        self.weight = Parameter(_creation.ones(shape, dtype=dtype, device=device)) if elementwise_affine else None
        self.bias = (
            Parameter(_creation.zeros(shape, dtype=dtype, device=device)) if elementwise_affine and bias else None
        )

    def reset_parameters(self) -> None:
        for start, parameter in ((init.ones_, self.weight), (init.zeros_, self.bias)):
            if parameter is not None:
                start(parameter)

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, bias={self.bias is not None}"


class Dropout(Module):
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p) while training; x of any shape and float
    dtype. ValueError for p outside [0, 1].
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p must be in [0, 1], got {p}")
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class SiLU(Module):
    """x * sigmoid(x), elementwise; x of any shape and float dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return input.silu()


class GELU(Module):
    """x * Phi(x), elementwise; x of any shape and float dtype. approximate="tanh" uses the tanh formula; ValueError for
    other words than "tanh" and "none" when it is called.
    """

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class ReLU(Module):
    """max(x, 0), elementwise; x of any shape and float dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return input.relu()


class Identity(Module):
    """Returns its input, of any shape and dtype. The constructor ignores its arguments: it can replace any layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def forward(self, input: Tensor) -> Tensor:
        return input


class CrossEntropyLoss(Module):
    """functional.cross_entropy as a module: logits [rows, V] and targets [rows] -> a 0-dim loss, or [rows] for
    reduction "none". Errors as there; NotImplementedError for class weights.
    """

    def __init__(
        self, weight: None = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        if weight is not None:
            raise NotImplementedError(f"CrossEntropyLoss: weight must be None, got {type(weight).__name__}")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(input, target, None, self.ignore_index, self.reduction, self.label_smoothing)

    def extra_repr(self) -> str:
        rest = f", label_smoothing={self.label_smoothing}" if self.label_smoothing else ""
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}{rest}"
