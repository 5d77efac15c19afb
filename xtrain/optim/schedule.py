"""Learning-rate schedules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._types import as_int, is_real
from ..errors import shown
from .optimizer import Optimizer


def lr_schedule(
    kind: str, step: int, warmup: int, total: int, base: float, final: float = 0.0, decay: int | None = None,
    decay_form: str = "linear",
) -> float:  # fmt: skip
    """Learning rate of step `step` (0 is the first): linear warm-up over `warmup` steps, then from `base` to `final` at
    step `total`.

    kind: "cosine" (half a cosine; Loshchilov & Hutter 2017, SGDR), "linear", "constant" (stays at base), or "wsd"
    (stays at base, and falls in the last `decay` steps, None for a fifth of all; Hu et al. 2024, MiniCPM). decay_form,
    of wsd: "linear", or "1-sqrt", which falls faster at first (Haegele et al. 2024). Steps after total keep the last
    value; where no step is left to fall in, that is `base`. ValueError for another kind or form, and for a `decay` of
    wsd outside [0, total].
    """
    if kind not in ("cosine", "linear", "constant", "wsd"):
        raise ValueError(f"lr_schedule: kind must be cosine, linear, constant or wsd, got {kind!r}")
    if decay_form not in ("linear", "1-sqrt"):
        raise ValueError(f"lr_schedule: decay_form must be linear or 1-sqrt, got {decay_form!r}")
    for name, value in {"step": step, "warmup": warmup, "total": total, "base": base, "final": final}.items():
        if not is_real(value):
            raise TypeError(f"lr_schedule: {name} must be a number, got {type(value).__name__}")
    if decay is not None and not is_real(decay):
        raise TypeError(f"lr_schedule: decay must be a number or None, got {type(decay).__name__}")
    if kind == "wsd" and decay is not None and not 0 <= decay <= total:
        raise ValueError(f"lr_schedule: decay must be in [0, total], here {total}, got {decay}")
    if step < warmup:
        return base * (step + 1) / warmup
    if kind == "constant":
        return base
    begin = warmup
    if kind == "wsd":
        begin = max(warmup, total - (total // 5 if decay is None else decay))
        if step < begin:
            return base
    if begin >= total:  # no step is left to fall in
        return base
    progress = min(1.0, (step - begin) / max(1, total - begin))
    if kind == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - (math.sqrt(progress) if kind == "wsd" and decay_form == "1-sqrt" else progress)
    return final + (base - final) * remaining


class LRScheduler:
    """Multiplies each group's initial learning rate by lr_lambda(step), as PyTorch's LambdaLR does.

    lr_lambda: a function, or one per group. The constructor sets the rate of step 0; step() moves to the next one.
    ValueError for another number of functions.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        groups: Any = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list):
            raise TypeError(f"{type(self).__name__}: optimizer must be an optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        given: Any = lr_lambda
        functions = list(given) if isinstance(given, Iterable) else [given] * len(groups)
        for function in functions:
            if not callable(function):
                raise TypeError(f"LRScheduler: lr_lambda must be functions of a step, got {type(function).__name__}")
        last_epoch = as_int("LRScheduler", "last_epoch", last_epoch)
        if len(functions) != len(groups):
            raise ValueError(f"LRScheduler: lr_lambda must have {len(groups)} functions, got {len(functions)}")
        self.lr_lambdas: list[Callable[[int], float]] = functions
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [group["initial_lr"] for group in groups]
        self.last_epoch = last_epoch
        self.step()

    def step(self) -> None:
        """Sets the rates of the next step."""
        rates = self._rates_of_groups(self.last_epoch + 1)  # first: a step that fails changes nothing
        self.last_epoch += 1
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _rates_of_groups(self, step: int) -> list[float]:
        """The rate of every group at a step. ValueError where groups were added to the optimizer."""
        rates, count = self._rates(step), len(self.optimizer.param_groups)
        if len(rates) != count:
            raise ValueError(
                f"{type(self).__name__}: optimizer must have as many groups as its schedule, {len(rates)}, got {count}"
            )
        return rates

    def _rates(self, step: int) -> list[float]:
        """The rate of every group at a step."""
        return [base * function(step) for base, function in zip(self.base_lrs, self.lr_lambdas, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The rate of every group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """{"last_epoch", "base_lrs"}; the functions are not part of it."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state_dict. TypeError or ValueError for what is none; then nothing has changed."""
        found = self._checked(state_dict)
        self.base_lrs, self.last_epoch = found.base_lrs, found.last_epoch - 1
        self.step()

    def _checked(self, state_dict: Mapping[str, Any]) -> LRScheduler:
        """A copy of this schedule that goes on from a state_dict, and has rates there. Errors are load_state_dict's."""
        found = self._at(state_dict)
        found._rates_of_groups(found.last_epoch)
        return found

    def _at(self, state_dict: Mapping[str, Any]) -> LRScheduler:
        name = type(self).__name__
        if not isinstance(state_dict, Mapping) or not {"base_lrs", "last_epoch"} <= set(state_dict):
            raise TypeError(
                f"{name}: state_dict must be a dict with base_lrs and last_epoch, got {shown(state_dict, 80)}"
            )
        rates, epoch = state_dict["base_lrs"], as_int(name, "last_epoch", state_dict["last_epoch"])
        if not isinstance(rates, (list, tuple)) or not all(is_real(rate) for rate in rates):
            raise TypeError(f"{name}: base_lrs must be a list of numbers, got {shown(rates, 80)}")
        if len(rates) != len(self.base_lrs):
            raise ValueError(f"{name}: base_lrs must hold {len(self.base_lrs)} numbers, got {len(rates)}")
        found = copy.copy(self)
        found.base_lrs, found.last_epoch = list(rates), epoch
        return found
