"""Clipping of gradients, and parameters as one vector."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from .. import _C
from .._C import Tensor
from .._types import is_real, need_tensors, parameters_of
from ..autograd import no_grad

_GRAD = operator.attrgetter("grad")


@no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)) in place; returns their common 2-norm before that (0-dim
    float32 tensor).

    parameters: a tensor or an iterable; those without a gradient are passed over. max_norm=inf only measures.
    RuntimeError for a norm that is not finite, with error_if_nonfinite (this waits for the device).
    """
    if norm_type != 2.0:
        raise NotImplementedError(f"clip_grad_norm_: norm_type must be 2.0, got {norm_type}")
    owners = parameters_of("clip_grad_norm_", parameters)
    grads = [grad for grad in map(_GRAD, owners) if grad is not None]
    if not grads:
        return _C.full((), 0, _C.float32)
    if not error_if_nonfinite:
        return _C.clip_grad_norm_(grads, max_norm)
    norm = _C.clip_grad_norm_(grads, math.inf)
    if not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients must be finite, got {norm.item()}")
    return _C.clip_grad_norm_(grads, max_norm)


def _number(op: str, name: str, value: float) -> float:
    if not is_real(value) or not value >= 0:
        raise ValueError(f"{op}: {name} must be a number of at least 0, got {value!r}")
    return float(value)


@no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamps every gradient to [-clip_value, clip_value] in place. Parameters without a gradient are passed over.
    ValueError for a negative clip_value.
    """
    most = _number("clip_grad_value_", "clip_value", clip_value)
    for parameter in parameters_of("clip_grad_value_", parameters):
        if parameter.grad is not None:
            parameter.grad.copy_(_C.minimum(_C.maximum(parameter.grad, -most), most))


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """All elements of the parameters, one behind the other: [sum of their sizes], differentiable. They have one dtype
    and device; ValueError for no parameter.
    """
    flat = [parameter.reshape((-1,)) for parameter in parameters_of("parameters_to_vector", parameters)]
    if not flat:
        raise ValueError("parameters_to_vector: parameters must hold at least one tensor, got none")
    return _C.cat(flat)


@no_grad()
def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Copies a vector, such as parameters_to_vector gives, into the parameters. ValueError for a vector of another
    shape; then nothing has changed.
    """
    parameters = parameters_of("vector_to_parameters", parameters)
    need_tensors("vector_to_parameters", vec=vec)
    total = sum(parameter.numel() for parameter in parameters)
    if tuple(vec.shape) != (total,):
        raise ValueError(f"vector_to_parameters: vec must have shape {(total,)}, got {tuple(vec.shape)}")
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.copy_(vec[start:stop].reshape(tuple(parameter.shape)))
        start = stop
