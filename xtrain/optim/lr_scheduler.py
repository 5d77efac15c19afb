"""Learning-rate schedules under PyTorch's names: `optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max)`.

A schedule is made after its optimizer and sets the rate of step 0; call `scheduler.step()` after each
`optimizer.step()`. Rates are functions of the number of the step, times the rate that each group had at first: PyTorch
computes each from the one before, which is the same up to rounding. last_epoch: the number of the step before the
first one.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._types import is_real
from ..errors import shown
from .optimizer import Optimizer
from .schedule import LRScheduler

__all__ = [
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LRScheduler", "LambdaLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "SequentialLR", "StepLR",
]  # fmt: skip

LambdaLR = LRScheduler


def _at_least(name: str, argument: str, value: int, least: int) -> int:
    """value, an integer of Python, NumPy or a tensor, as an int."""
    try:
        found = operator.index(value)
    except (TypeError, ValueError):
        found = least - 1
    if found < least:
        raise ValueError(f"{name}: {argument} must be an integer of at least {least}, got {value!r}")
    return found


def _real(name: str, argument: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """value, a finite number in [low, high]."""
    if not is_real(value) or not math.isfinite(value) or not low <= value <= high:
        span = "" if low == -math.inf else f" in [{low:g}, {high:g}]" if high < math.inf else f" of at least {low:g}"
        raise ValueError(f"{name}: {argument} must be a finite number{span}, got {value!r}")
    return value


def _divisor(name: str, argument: str, value: float) -> float:
    if not is_real(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{name}: {argument} must be a finite number above 0, got {value!r}")
    return value


def _one(step: int) -> float:
    """The factor that LRScheduler wants; schedules that override _rates do not use it."""
    return 1.0


def _milestones(name: str, milestones: Iterable[int]) -> list[int]:
    if not isinstance(milestones, Iterable) or isinstance(milestones, str):
        raise ValueError(f"{name}: milestones must be integers of at least 0, got {milestones!r}")
    return [_at_least(name, "each of milestones", one, 0) for one in milestones]


class _Closed(LRScheduler):
    """A schedule whose rate is `_rate(base, step)`."""

    def __init__(self, optimizer: Optimizer, last_epoch: int) -> None:
        super().__init__(optimizer, _one, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        raise NotImplementedError(f"{type(self).__name__}: _rate must be defined")

    def _rates(self, step: int) -> list[float]:
        return [self._rate(base, step) for base in self.base_lrs]


class StepLR(_Closed):
    """base * gamma^(step // step_size)."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = _at_least("StepLR", "step_size", step_size, 1), _real("StepLR", "gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return base * self.gamma ** (step // self.step_size)


class MultiStepLR(_Closed):
    """base * gamma^(number of milestones that are not above the step)."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = _milestones("MultiStepLR", milestones), _real("MultiStepLR", "gamma", gamma)
        self.milestones.sort()
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return base * self.gamma ** bisect_right(self.milestones, step)


class ExponentialLR(_Closed):
    """base * gamma^step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = _real("ExponentialLR", "gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return base * self.gamma**step


class ConstantLR(_Closed):
    """base * factor for total_iters steps, then base."""

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        self.factor = _real("ConstantLR", "factor", factor)
        self.total_iters = _at_least("ConstantLR", "total_iters", total_iters, 0)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return base * self.factor if step < self.total_iters else base


class LinearLR(_Closed):
    """base times a factor that goes in a straight line from start_factor to end_factor in total_iters steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor = _real("LinearLR", "start_factor", start_factor)
        self.end_factor = _real("LinearLR", "end_factor", end_factor)
        self.total_iters = _at_least("LinearLR", "total_iters", total_iters, 1)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        way = min(step, self.total_iters) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * way)


class PolynomialLR(_Closed):
    """base * (1 - step / total_iters)^power, and 0 after total_iters steps."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters = _at_least("PolynomialLR", "total_iters", total_iters, 1)
        self.power = _real("PolynomialLR", "power", power, 0.0)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return base * (1.0 - min(step, self.total_iters) / self.total_iters) ** self.power


class CosineAnnealingLR(_Closed):
    """eta_min + (base - eta_min) (1 + cos(pi step / T_max)) / 2 (Loshchilov & Hutter 2017, SGDR, without restarts):
    down in T_max steps, then up again as PyTorch's goes.
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max = _at_least("CosineAnnealingLR", "T_max", T_max, 1)
        self.eta_min = _real("CosineAnnealingLR", "eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        return self.eta_min + (base - self.eta_min) * (1.0 + math.cos(math.pi * step / self.T_max)) / 2.0


class CosineAnnealingWarmRestarts(_Closed):
    """The cosine of CosineAnnealingLR down to eta_min in T_0 steps, then from base again, each time T_mult times as
    long (Loshchilov & Hutter 2017, SGDR).
    """

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        name = "CosineAnnealingWarmRestarts"
        self.T_0, self.T_mult = _at_least(name, "T_0", T_0, 1), _at_least(name, "T_mult", T_mult, 1)
        self.eta_min = _real(name, "eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        length = self.T_0
        if self.T_mult == 1:
            step %= length
        while step >= length:
            step -= length
            length *= self.T_mult
        return self.eta_min + (base - self.eta_min) * (1.0 + math.cos(math.pi * step / length)) / 2.0


class OneCycleLR(_Closed):
    """From max_lr / div_factor up to max_lr in pct_start of total_steps, then down to the first rate /
    final_div_factor, by half a cosine or in a straight line (Smith & Topin 2018, Super-convergence). Momentum stays.

    ValueError for another anneal_strategy, a pct_start outside [0, 1], a factor that is not above 0, and after the last
    step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"OneCycleLR: anneal_strategy must be cos or linear, got {anneal_strategy!r}")
        name, self.anneal_strategy = "OneCycleLR", anneal_strategy
        self.max_lr = _real(name, "max_lr", max_lr)
        self.total_steps = _at_least(name, "total_steps", total_steps, 1)
        self.pct_start = _real(name, "pct_start", pct_start, 0.0, 1.0)
        self.div_factor = _divisor(name, "div_factor", div_factor)
        self.final_div_factor = _divisor(name, "final_div_factor", final_div_factor)
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, step: int) -> float:
        if step >= self.total_steps:
            raise ValueError(f"OneCycleLR: step must be below total_steps {self.total_steps}, got {step}")
        first = self.max_lr / self.div_factor
        last, top = first / self.final_div_factor, self.pct_start * self.total_steps - 1.0
        if step <= top:
            start, end, way = first, self.max_lr, step / top if top > 0 else 1.0
        else:
            start, end, way = self.max_lr, last, (step - top) / max(self.total_steps - 1.0 - top, 1e-300)
        return end + (start - end) * (
            (1.0 + math.cos(math.pi * way)) / 2.0 if self.anneal_strategy == "cos" else 1 - way
        )


class SequentialLR(LRScheduler):
    """Schedules one after another: the one of number i from step milestones[i - 1] on, where it begins with its step 0.

    All of one optimizer. ValueError for another number of milestones than of schedules less one, and for milestones
    that do not grow.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        milestones = _milestones("SequentialLR", milestones)
        for scheduler in schedulers if isinstance(schedulers, Iterable) else (schedulers,):
            if not isinstance(scheduler, LRScheduler) or scheduler is schedulers:
                raise ValueError(f"SequentialLR: schedulers must be several, got {type(scheduler).__name__}")
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"SequentialLR: milestones must be one fewer than schedulers, "
                f"got {len(milestones)} and {len(schedulers)}"
            )
        if list(milestones) != sorted(set(milestones)):
            raise ValueError(f"SequentialLR: milestones must grow, got {list(milestones)}")
        if any(scheduler.optimizer is not optimizer for scheduler in schedulers):
            raise ValueError("SequentialLR: schedulers must have the optimizer given, got one of another")
        self.schedulers, self.milestones = list(schedulers), list(milestones)
        super().__init__(optimizer, _one, last_epoch)

    def _rates(self, step: int) -> list[float]:
        number = bisect_right(self.milestones, step)
        return self.schedulers[number]._rates(step - (self.milestones[number - 1] if number else 0))

    def state_dict(self) -> dict[str, Any]:
        """{"last_epoch", "base_lrs", "schedulers": their state_dicts}."""
        return {**super().state_dict(), "schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state_dict. TypeError or ValueError for what is none; then nothing has changed."""
        self._checked(state_dict)  # all parts, before the first is written
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        super().load_state_dict(state_dict)

    def _at(self, state_dict: Mapping[str, Any]) -> LRScheduler:
        states: Any = state_dict.get("schedulers") if isinstance(state_dict, Mapping) else None
        if not isinstance(states, (list, tuple)) or len(states) != len(self.schedulers):
            raise TypeError(
                f"SequentialLR: state_dict must have {len(self.schedulers)} schedulers, got {shown(state_dict, 80)}"
            )
        found: Any = super()._at(state_dict)
        found.schedulers = [one._checked(state) for one, state in zip(self.schedulers, states, strict=True)]
        return found
