"""Gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .. import _C
from .._C import Tensor
from ..autograd import no_grad


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
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [grad for grad in (parameter.grad for parameter in parameters) if grad is not None]
    if not grads:
        return _C.full((), 0, _C.float32)
    if not error_if_nonfinite:
        return _C.clip_grad_norm_(grads, max_norm)
    norm = _C.clip_grad_norm_(grads, math.inf)
    if not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients must be finite, got {norm.item()}")
    return _C.clip_grad_norm_(grads, max_norm)
