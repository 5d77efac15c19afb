"""Optimizer: parameters in groups, each with options, and a state per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from .. import _C
from .._C import Tensor
from .._types import is_real

HAVE_MASTERS = (_C.bfloat16, _C.float16)  # parameters whose exact values are in float32


def as_tuple(value: Any) -> Any:
    """An iterable as a tuple, anything else as it is. Having __iter__ is not enough: a 0-dim tensor has it."""
    try:
        return tuple(value)
    except TypeError:
        return value


class Optimizer:
    """Parameters in groups, each with its own options, and a state per parameter.

    params: tensors, or dicts {"params": tensors, option: value, ...}. `param_groups` may be edited between steps
    (`group["lr"] = ...`). TypeError or ValueError for what is no leaf tensor of floats, comes twice, or is no option.
    """

    _moments: tuple[str, ...] = ()  # the names of a state's tensors

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.state: dict[Tensor, Any] = {}  # parameter -> a mapping from names to tensors and numbers
        self.param_groups: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            kind = "a Tensor" if isinstance(params, Tensor) else type(params).__name__
            raise TypeError(f"{self._name}: params must be an iterable of tensors or dicts, got {kind}")
        given: list[Any] = list(params)
        if not given:
            raise ValueError(f"{self._name}: params must hold at least one tensor, got none")
        if isinstance(given[0], dict):
            for group in given:
                self.add_param_group(group)
        else:
            self.add_param_group({"params": given})

    @property
    def _name(self) -> str:
        return type(self).__name__

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a dict {"params": tensor or tensors, option: value, ...}; the rest are the defaults. A group that is
        refused changes nothing.
        """
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"{self._name}: a group must be a dict with the key params, got {type(group).__name__}")
        group = dict(group)
        if not isinstance(group["params"], Iterable):  # a Tensor is one
            raise TypeError(f"{self._name}: params must be tensors, got {type(group['params']).__name__}")
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        unknown = [key for key in group if key not in self.defaults and key not in ("params", "name", "initial_lr")]
        if unknown:
            raise TypeError(f"{self._name}: options must be among {', '.join(self.defaults)}, got {unknown[0]}")
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(f"{self._name}: params must be tensors, got {type(param).__name__}")
            if not param.is_leaf:
                raise ValueError(f"{self._name}: params must be leaf tensors, got the result of {param.grad_fn}")
            if not param.dtype.is_floating_point:
                raise TypeError(f"{self._name}: params must have a floating dtype, got {param.dtype.name}")
        if len({id(param) for param in params} | self._seen) != len(params) + len(self._seen):
            raise ValueError(f"{self._name}: params must be distinct, got one twice")
        group = {"params": params, **self.defaults, **{key: value for key, value in group.items() if key != "params"}}
        self._check(group)
        self._seen |= {id(param) for param in params}
        self.param_groups.append(group)

    def _check(self, group: dict[str, Any]) -> None:
        """Raises ValueError for options outside their range."""

    def _range(self, group: dict[str, Any], name: str, high: float = math.inf) -> None:
        value = group[name]
        if isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if not is_real(value) or not 0.0 <= value < high:
            raise ValueError(f"{self._name}: {name} must be a number in [0, {high}), got {value!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or fills them with zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.fill_(0)

    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient. NotImplementedError for a closure."""
        raise NotImplementedError(f"{self._name}: step must be defined")

    def interrupted(self) -> bool:
        """Whether an error has ended the last step when some parameters had taken it and others had not; False where
        that is not known.
        """
        return False

    def _refuse_closure(self, closure: object) -> None:
        if closure is not None:
            raise NotImplementedError(
                f"{self._name}: closure must be None (call backward, then step), got {type(closure).__name__}"
            )

    def state_dict(self) -> dict[str, Any]:
        """{"state": {index: {...}}, "param_groups": [...]}, PyTorch's layout; parameters are numbered through all
        groups.
        """
        numbers: dict[int, int] = {}
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            for param in group["params"]:
                numbers[id(param)] = len(numbers)
            groups.append(
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": [numbers[id(param)] for param in group["params"]],
                }
            )
        state = {numbers[id(param)]: values for param, values in self._plain_state().items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _plain_state(self) -> dict[Tensor, dict[str, Any]]:
        """{parameter: a dict of its state, which holds tensors and numbers}."""
        return {param: dict(values) for param, values in self.state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state_dict of an optimizer with the same groups. Tensors are copied, in their own dtypes.

        Raises ValueError or TypeError for what no state_dict holds; then nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict: state_dict must be a dict, got {type(state_dict).__name__}")
        if not {"state", "param_groups"} <= set(state_dict):
            found = ", ".join(map(str, state_dict)) or "nothing"
            raise ValueError(f"load_state_dict: state_dict must have state and param_groups, got {found}")
        saved = state_dict["param_groups"]
        if not isinstance(state_dict["state"], Mapping):
            raise TypeError(f"load_state_dict: state must be a dict, got {type(state_dict['state']).__name__}")
        for bad in [saved] if not isinstance(saved, (list, tuple)) else saved:
            if bad is saved or not isinstance(bad, Mapping):
                raise TypeError(f"load_state_dict: param_groups must be a list of dicts, got {bad!r}")
        if not all(isinstance(group.get("params"), (list, tuple)) for group in saved):
            raise TypeError("load_state_dict: every group must have a list params, which numbers its parameters")
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            wanted, got = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
            raise ValueError(f"load_state_dict: groups must have {wanted} parameters, got {got}")
        params: dict[int, Tensor] = {}
        for group, old in zip(self.param_groups, saved, strict=True):
            params.update(zip(old["params"], group["params"], strict=True))
        if len(params) != sum(len(group["params"]) for group in saved):
            raise ValueError("load_state_dict: groups must number each parameter once, got a number twice")
        state: dict[Tensor, Any] = {}
        for number, values in state_dict["state"].items():
            if number not in params:
                raise ValueError(
                    f"load_state_dict: state must belong to parameters 0 to {len(params) - 1}, got {number}"
                )
            state[params[number]] = self._load_state(params[number], number, values)
        options: list[dict[str, Any]] = []
        for group, old in zip(self.param_groups, saved, strict=True):
            options.append({k: v for k, v in old.items() if k != "params" and (k in group or k == "initial_lr")})
            self._check({**group, **options[-1]})
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(loaded)
        self.state = state

    def _load_state(self, param: Tensor, number: int, values: Mapping[str, Any]) -> MutableMapping[str, Any]:
        if not isinstance(values, Mapping):
            raise TypeError(f"load_state_dict: state of parameter {number} must be a dict, got {type(values).__name__}")
        loaded: dict[str, Any] = {}
        for name, value in values.items():
            if name == "step":
                value = self._load_step(number, value)
            elif name in self._moments and not isinstance(value, Tensor):
                raise TypeError(
                    f"load_state_dict: {name} of parameter {number} must be a Tensor, got {type(value).__name__}"
                )
            elif isinstance(value, Tensor):
                if tuple(value.shape) != tuple(param.shape):
                    raise ValueError(
                        f"load_state_dict: {name} of parameter {number} must have shape {tuple(param.shape)}, "
                        f"got {tuple(value.shape)}"
                    )
                value = value.detach().to(param.device).clone()
            loaded[name] = value
        return loaded

    @staticmethod
    def _new_state(param: Tensor, *names: str) -> dict[str, Tensor]:
        """Zeros by these names, in float32 (float64 for float64), and the master of a 16-bit parameter."""
        wide = _C.float64 if param.dtype == _C.float64 else _C.float32
        state = {name: _C.full(param.shape, 0, wide, param.device) for name in names}
        if param.dtype in HAVE_MASTERS:
            state["master"] = param.detach().to(_C.float32)
        return state

    def _widen(self, param: Tensor, loaded: MutableMapping[str, Any]) -> None:
        """Give a loaded state the dtypes of _new_state, and a master that it lacks."""
        wide = _C.float64 if param.dtype == _C.float64 else _C.float32
        for name in self._moments:
            if name in loaded:
                loaded[name] = loaded[name].to(wide)
        if param.dtype in HAVE_MASTERS and "master" not in loaded:
            loaded["master"] = param.detach().to(_C.float32)

    @staticmethod
    def _load_step(number: int, value: Any) -> int:
        if isinstance(value, Tensor) and value.ndim == 0:  # PyTorch's
            value = value.item()
        if not is_real(value) or not 0 <= value < 2**53 or value != int(value):
            raise ValueError(
                f"load_state_dict: step of parameter {number} must be a whole number of at least 0, got {value!r}"
            )
        return int(value)

    def __repr__(self) -> str:
        groups = (", ".join(f"{k}={v}" for k, v in group.items() if k != "params") for group in self.param_groups)
        return f"{self._name}(" + "; ".join(groups) + ")"


class RatesOnDevice(Optimizer):
    """An optimizer whose learning rates lie on the parameters' device, one for each group."""

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        # (number of the group, device) -> lr, and as a tensor
        self._rates: dict[tuple[int, _C.device], tuple[float, Tensor]] = {}

    def _rate(self, index: int, device: _C.device, lr: float) -> Tensor:
        """The learning rate of a group on `device`. A new one is written in the order of the stream: steps that are
        queued keep theirs.
        """
        known = self._rates.get((index, device))
        if known is not None and known[0] == lr:
            return known[1]
        self._rates.pop((index, device), None)  # first: after a Ctrl-C the tensor must not pass for the old rate
        tensor = _C.full((), lr, _C.float64, device) if known is None else known[1].fill_(lr)
        self._rates[index, device] = lr, tensor
        return tensor
