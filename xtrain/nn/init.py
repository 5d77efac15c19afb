"""Filling tensors in place with starting values; every function returns its tensor, of any shape. Reached as
xtrain.nn.init. TypeError for random numbers in a tensor that is not of floats.
"""

from __future__ import annotations

import math

from .. import _C
from .._C import Tensor
from ..autograd import no_grad


@no_grad()
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal numbers of this mean and standard deviation."""
    return tensor.copy_(_C.normal(tensor.shape, mean, std, tensor.dtype, tensor.device))


@no_grad()
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Uniform numbers in [a, b)."""
    return tensor.copy_(_C.uniform(tensor.shape, a, b, tensor.dtype, tensor.device))


@no_grad()
def constant_(tensor: Tensor, val: float) -> Tensor:
    """`val` everywhere."""
    return tensor.fill_(val)


def zeros_(tensor: Tensor) -> Tensor:
    """Zeros."""
    return constant_(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """Ones."""
    return constant_(tensor, 1)


def kaiming_uniform_(tensor: Tensor, a: float = 0.0) -> Tensor:
    """Uniform in [-bound, bound), bound = sqrt(6 / ((1 + a^2) fan_in)), for weights [out, in] before a leaky ReLU of
    slope `a`.

    He et al. 2015, Delving Deep into Rectifiers. ValueError for fewer than 2 dims.
    """
    if tensor.ndim < 2:
        raise ValueError(f"kaiming_uniform_: tensor must have at least 2 dims, got {tensor.ndim}")
    fan_in = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if fan_in == 0:
        return tensor
    bound = math.sqrt(6.0 / ((1.0 + a * a) * fan_in))
    return uniform_(tensor, -bound, bound)
