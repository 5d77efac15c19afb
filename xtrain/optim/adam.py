"""Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._C import Tensor
from .adamw import AdamW


class Adam(AdamW):
    """Adam (Kingma & Ba 2015), PyTorch's arithmetic: weight_decay is added to the gradient, g += weight_decay * p.

    The rest is AdamW's with no decay: state, float32 masters of 16-bit parameters, steps on the device. A decay makes
    one more tensor per parameter and step, of its dtype.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def _gradient(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        decay = group["weight_decay"]
        return grad + param.detach() * decay if decay else grad

    def _decay(self, group: dict[str, Any]) -> float:
        return 0.0
