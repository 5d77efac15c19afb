"""Draws from probabilities that tensors hold."""

from __future__ import annotations

from . import _C
from ._C import Tensor


def multinomial(input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """num_samples indices drawn from each row of weights [V] or [B, V]: int64 [num_samples] or [B, num_samples].

    Weights are at least 0, finite, of a float dtype, and need not add up to 1. Without replacement a row gives no index
    twice. Random numbers are Philox's, with a seed from the default generator: the same indices on every device. A
    weight below 2^-41 of the largest is never drawn (functional.sample). Waits for the device once. ValueError for a
    row with no weight above 0, or with fewer than num_samples of them without replacement. No gradient.
    """
    if not isinstance(input, _C.Tensor):
        raise TypeError(f"multinomial: input must be a Tensor, got {type(input).__name__}")
    if input.ndim not in (1, 2) or input.shape[-1] == 0:
        raise ValueError(f"multinomial: input must have shape (V,) or (B, V) with V >= 1, got {tuple(input.shape)}")
    if not input.dtype.is_floating_point:
        raise TypeError(f"multinomial: input must have a floating point dtype, got {input.dtype.name}")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"multinomial: num_samples must be an integer >= 1, got {num_samples!r}")
    weights = input.detach().reshape(-1, input.shape[-1])
    if weights.dtype != _C.float64:
        weights = weights.to(_C.float32)
    random = _C.cat([_C.randint(0, 2**53, (1,), _C.int64, "cpu"), _C.full((1,), 0, _C.int64, "cpu")]).to(input.device)
    step = _C.arange(0, 2, 1, _C.int64, input.device)  # adds 0 to the seed, 1 to the step
    left, columns = _C.log(weights), _C.arange(0, weights.shape[1], 1, _C.int64, input.device)
    drawn: list[Tensor] = []
    for _ in range(num_samples):
        tokens = _C.sample(left, random)
        drawn.append(tokens.unsqueeze(1))
        random = random + step
        if not replacement:
            left = _C.where(_C.eq(columns, drawn[-1]), float("-inf"), left)
    out = _C.cat(drawn, 1)
    if out.numel() and _C.amin(out).item() < 0:
        rule = "one weight above 0" if replacement or num_samples == 1 else f"{num_samples} weights above 0"
        raise ValueError(
            f"multinomial: each row of input must have at least {rule}, all of them finite and none negative"
        )
    return out.reshape(-1) if input.ndim == 1 else out
