"""Filling tensors in place with starting values; every function returns its tensor. Reached as xtrain.nn.init."""

import math

from .. import _C
from ..autograd import no_grad


@no_grad()
def normal_(tensor, mean=0.0, std=1.0):
    """Normal numbers of this mean and standard deviation."""
    return tensor.copy_(_C.normal(tensor.shape, mean, std, tensor.dtype, tensor.device))


@no_grad()
def uniform_(tensor, a=0.0, b=1.0):
    """Uniform numbers in [a, b)."""
    return tensor.copy_(_C.uniform(tensor.shape, a, b, tensor.dtype, tensor.device))


@no_grad()
def constant_(tensor, val):
    """`val` everywhere."""
    return tensor.fill_(val)


def zeros_(tensor):
    """Zeros."""
    return constant_(tensor, 0)


def ones_(tensor):
    """Ones."""
    return constant_(tensor, 1)


def kaiming_uniform_(tensor, a=0.0):
    """Uniform in [-bound, bound), bound = sqrt(6 / ((1 + a^2) fan_in)), for weights [out, in] before a leaky ReLU of
    slope `a`.

    He et al. 2015, Delving Deep into Rectifiers.
    """
    if tensor.ndim < 2:
        raise ValueError(f"kaiming_uniform_: tensor must have at least 2 dims, got {tensor.ndim}")
    fan_in = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if fan_in == 0:
        return tensor
    bound = math.sqrt(6.0 / ((1.0 + a * a) * fan_in))
    return uniform_(tensor, -bound, bound)
