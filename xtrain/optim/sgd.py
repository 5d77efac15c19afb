"""SGD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from .._C import Tensor
from ..autograd import no_grad
from .optimizer import Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent with momentum (PyTorch's form: the buffer starts as the first gradient).

    g += weight_decay * p;  b = momentum * b + (1 - dampening) * g;  p -= lr * (g + momentum * b if nesterov else b)

    Momentum: Polyak 1964; the form nesterov: Sutskever et al. 2013. ValueError for options outside their ranges.
    """

    _moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "dampening", "weight_decay"):
            self._range(group, name)
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(f"SGD: nesterov must have momentum > 0 and dampening 0, got {momentum} and {dampening}")

    def _load_state(self, param: Tensor, number: int, values: Mapping[str, Any]) -> MutableMapping[str, Any]:
        if isinstance(values, Mapping) and values.get("momentum_buffer") is None:  # PyTorch's, without momentum
            values = {name: value for name, value in values.items() if name != "momentum_buffer"}
        if isinstance(values, Mapping) and set(values) - {"momentum_buffer"}:  # another optimizer's
            found = ", ".join(map(str, values))
            raise ValueError(
                f"load_state_dict: state of parameter {number} must have momentum_buffer alone, got {found}"
            )
        return super()._load_state(param, number, values)

    @no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient."""
        self._refuse_closure(closure)
        for group in self.param_groups:  # which may have been edited
            self._check(group)
        for group in self.param_groups:
            lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if weight_decay:
                    grad = grad + param.detach() * weight_decay
                if momentum:
                    state = self.state.setdefault(param, {})
                    buffer = state.get("momentum_buffer")
                    if buffer is None:
                        buffer = state["momentum_buffer"] = grad.detach().clone()
                    else:
                        buffer.mul_(momentum).add_(grad * (1.0 - group["dampening"]))
                    grad = grad + buffer * momentum if group["nesterov"] else buffer
                param.sub_(grad * lr)
