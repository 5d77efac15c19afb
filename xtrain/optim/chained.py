"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from .._C import Tensor
from .optimizer import Optimizer


class ChainedOptimizer(Optimizer):
    """Optimizers of different parameters that step one after the other, as one optimizer: Muon and AdamW of a model.

        optimizer = optim.ChainedOptimizer([optim.Muon(matrices), optim.AdamW(rest)])

    `param_groups` has the groups of all, in order; `state` reads and writes the states of all; state_dict numbers the
    parameters through all groups. Groups are added to one of `optimizers`. TypeError or ValueError for what is no
    optimizer, or for a parameter that two of them have.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        given: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        if not given:
            raise ValueError("ChainedOptimizer: optimizers must hold at least one optimizer, got none")
        for one in given:
            if not isinstance(one, Optimizer) or isinstance(one, ChainedOptimizer):
                raise TypeError(f"ChainedOptimizer: optimizers must be plain optimizers, got {type(one).__name__}")
        self.optimizers: tuple[Optimizer, ...] = tuple(given)
        self.defaults = {}
        self._state = _States(self)
        params = [id(param) for group in self.param_groups for param in group["params"]]
        if len(set(params)) != len(params):
            raise ValueError("ChainedOptimizer: params must be distinct, got one in two optimizers")
        self._begun = 0  # optimizers that have begun the step that an error has ended

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all optimizers; the list itself is a copy."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The states of all optimizers as one mapping."""
        return self._state

    @state.setter
    def state(self, states: Mapping[Tensor, Any]) -> None:
        kept = dict(states)
        for one in self.optimizers:
            one.state = {param: kept[param] for group in one.param_groups for param in group["params"] if param in kept}

    def owner(self, param: Tensor) -> Optimizer:
        """The optimizer that has this parameter. KeyError when none has it."""
        for one in self.optimizers:
            if any(param is other for group in one.param_groups for other in group["params"]):
                return one
        raise KeyError(param)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """TypeError: a group belongs to one of `optimizers`."""
        raise TypeError("ChainedOptimizer: a group must be added to one of its optimizers, got it for all of them")

    def _check(self, group: dict[str, Any]) -> None:
        if group["params"]:
            self.owner(group["params"][0])._check(group)

    def _load_state(self, param: Tensor, number: int, values: Mapping[str, Any]) -> MutableMapping[str, Any]:
        return self.owner(param)._load_state(param, number, values)

    def _plain_state(self) -> dict[Tensor, dict[str, Any]]:
        return {param: values for one in self.optimizers for param, values in one._plain_state().items()}

    def interrupted(self) -> bool:
        """Whether an error has ended the last step when some parameters had taken it and others had not."""
        return self._begun > 1 or any(one.interrupted() for one in self.optimizers)

    def step(self, closure: None = None, *, guard: Tensor | None = None) -> None:
        """The step of each optimizer, in order. guard: see AdamW.step and Muon.step; other optimizers take none."""
        self._refuse_closure(closure)
        options: dict[str, Any] = {} if guard is None else {"guard": guard}
        self._begun = 0
        for one in self.optimizers:
            self._begun += 1
            one.step(**options)
        self._begun = 0

    def __repr__(self) -> str:
        return "ChainedOptimizer(" + ", ".join(map(repr, self.optimizers)) + ")"


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers."""

    def __init__(self, chain: ChainedOptimizer) -> None:
        self._chain = chain

    def __getitem__(self, param: Tensor) -> Any:
        for one in self._chain.optimizers:
            if param in one.state:
                return one.state[param]
        raise KeyError(param)

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._chain.owner(param).state[param] = value

    def __delitem__(self, param: Tensor) -> None:
        for one in self._chain.optimizers:
            if param in one.state:
                del one.state[param]
                return
        raise KeyError(param)

    def __iter__(self) -> Iterator[Tensor]:
        return (param for one in self._chain.optimizers for param in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._chain.optimizers)
