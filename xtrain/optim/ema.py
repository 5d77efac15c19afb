"""Exponential averages of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .. import _C
from .._C import Tensor
from .._types import as_int, is_real, need_tensors
from ..autograd import no_grad
from ..errors import shown
from .optimizer import Optimizer


class EMA:
    """The average of parameters over the steps of a training, which often does better than the last ones.

        ema = optim.EMA(model.parameters(), 0.999, optimizer)
        optimizer.step(); ema.update()    # after each step
        ema.copy_to()                     # at the end: the parameters become their averages

    average += (p - average) (1 - decay) / (1 - decay^n), n: number of the update (the bias correction of Adam, Kingma &
    Ba 2015). So the weights, decay^age, add up to 1 from the first update on, and the initial parameters have none.
    averages: {parameter: tensor}, float32 (float64 for float64). optimizer: where it keeps float32 masters of 16-bit
    parameters, these are averaged. The count of updates lies on the parameters' device, as AdamW's does, so a captured
    step may hold `update`. ValueError or TypeError for a decay outside [0, 1), and for params that are none.
    """

    def __init__(self, params: Iterable[Tensor], decay: float = 0.999, optimizer: Optimizer | None = None) -> None:
        if not is_real(decay) or not 0.0 <= decay < 1.0:
            raise ValueError(f"EMA: decay must be a number in [0, 1), got {decay!r}")
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise TypeError(f"EMA: params must be an iterable of tensors, got {type(params).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"EMA: optimizer must be an optimizer or None, got {type(optimizer).__name__}")
        self.params: list[Tensor] = list(params)
        if not self.params:
            raise ValueError("EMA: params must hold at least one tensor, got none")
        for param in self.params:
            if not isinstance(param, Tensor) or not param.dtype.is_floating_point:
                kind = param.dtype.name if isinstance(param, Tensor) else type(param).__name__
                raise TypeError(f"EMA: params must be tensors of a floating dtype, got {kind}")
        if len({id(param) for param in self.params}) != len(self.params):
            raise ValueError("EMA: params must be distinct, got one twice")
        self.decay, self.optimizer = float(decay), optimizer
        self.averages: dict[Tensor, Tensor] = {}
        self._steps: dict[_C.device, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all updates."""
        self.averages.clear()
        for param in self.params:
            wide = _C.float64 if param.dtype == _C.float64 else _C.float32
            self.averages[param] = _C.full(param.shape, 0, wide, param.device)
        self._steps = {device: _C.full((), 0, _C.int64, device) for device in {p.device for p in self.params}}

    @property
    def step(self) -> int:
        """The number of updates; reading it waits for the device."""
        return int(next(iter(self._steps.values())).item())

    @no_grad()
    def update(self, *, guard: Tensor | None = None) -> None:
        """Take the parameters, or their masters, as they are now. guard: of AdamW.step; where that changes nothing,
        neither does this.
        """
        known: Mapping[Tensor, Any] = self.optimizer.state if self.optimizer is not None else {}
        for device, step in self._steps.items():
            params = [param for param in self.params if param.device == device]
            values = [known[param].get("master", param) if param in known else param for param in params]
            _C.ema_([self.averages[param] for param in params], values, step, self.decay, guard)

    @no_grad()
    def copy_to(self) -> None:
        """The parameters become their averages, rounded. An optimizer's masters stay. RuntimeError before an update."""
        if not self.step:
            raise RuntimeError("EMA: update() must come before copy_to(), got no update")
        for param, average in self.averages.items():
            param.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """{"step": int, "averages": tensors in the order of the parameters}."""
        return {"step": self.step, "averages": [self.averages[param] for param in self.params]}

    @no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict, whose tensors are copied. ValueError for another number of tensors, or another
        shape, TypeError for what is no state_dict; then nothing has changed.
        """
        if not isinstance(state_dict, Mapping) or not {"step", "averages"} <= set(state_dict):
            raise TypeError(f"EMA: state_dict must be a dict with step and averages, got {shown(state_dict, 80)}")
        step, given = _count(state_dict["step"]), state_dict["averages"]
        if not isinstance(given, Iterable):
            raise TypeError(f"EMA: averages must be a list of tensors, got {type(given).__name__}")
        averages = list(given)
        if len(averages) != len(self.params):
            raise ValueError(f"EMA: averages must hold {len(self.params)} tensors, got {len(averages)}")
        for param, average in zip(self.params, averages, strict=True):
            need_tensors("EMA", **{"every average": average})
            if tuple(average.shape) != tuple(param.shape):
                raise ValueError(
                    f"EMA: every average must have the shape of its parameter, {tuple(param.shape)}, "
                    f"got {tuple(average.shape)}"
                )
        for param, average in zip(self.params, averages, strict=True):
            self.averages[param].copy_(average)
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Set the number of updates. TypeError for what is no integer, ValueError for one outside [0, 2**40)."""
        number = _count(step)
        for count in self._steps.values():
            count.fill_(number)


def _count(step: Any) -> int:
    if isinstance(step, bool):
        raise TypeError("EMA: step must be an int, got bool")
    count = as_int("EMA", "step", step)
    if not 0 <= count < _C.MOST_STEPS:
        raise ValueError(f"EMA: step must be in [0, 2**40), got {count}")
    return count
