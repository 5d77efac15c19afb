"""AdamW."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from .. import _C
from .._C import Tensor
from .._types import is_real
from ..autograd import no_grad
from .optimizer import RatesOnDevice, as_tuple

_L = list[Tensor]
# params, grads, exp_avgs, exp_avg_sqs, masters, steps, lrs; for each group a row: its index, the count of its
# parameters, beta1, beta2, eps, weight decay
_Call = tuple[_L, _L, _L, _L, _L, _L, _L, list[list[float]]]
_CPU = _C.device("cpu")


class _State(MutableMapping[str, Any]):
    """State of a parameter. `raw` has the step as a tensor on the parameter's device; here it is an int, and reading it
    waits for that device.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> Any:
        value = self.raw[name]
        return value.item() if name == "step" else value

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "step":
            count = _count(value)
            if name in self.raw:
                self.raw[name].fill_(count)
            else:  # it was taken out
                self.raw[name] = _C.full((), count, _C.int64, self.raw["exp_avg"].device)
        else:
            self.raw[name] = value

    def __delitem__(self, name: str) -> None:
        del self.raw[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def copy(self) -> dict[str, Any]:
        """As dict.copy: a dict of the same values."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))


def _count(value: Any) -> int:
    try:
        count = operator.index(value)  # also of NumPy's integers and integer tensors
    except TypeError:
        count = -1
    if not 0 <= count < _C.MOST_STEPS:
        raise ValueError(f"AdamW: step must be an integer in [0, 2**40), got {value!r}")
    return count


class AdamW(RatesOnDevice):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), PyTorch's arithmetic.

        p *= 1 - lr * weight_decay;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p -= lr / (1 - b1^n) * m / (sqrt(v / (1 - b2^n)) + eps)    (n: number of the step)

    m and v are float32 (float64 for float64). bfloat16 and float16 parameters get a float32 master copy that holds the
    exact value; the parameter is its rounding. One call of the core updates all parameters of a device, or none;
    gradients may be None (not updated). State per parameter: step, exp_avg, exp_avg_sq and, for 16-bit dtypes, master.
    `foreach` and `fused` are accepted and have no effect.

    Steps and learning rates lie on the parameters' device: a step does not wait for it, and its launch has the same
    arguments each time. Reading a state's `step` waits; `state_dict` waits once for all of them.
    """

    _moments = ("exp_avg", "exp_avg_sq", "master")

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        for name, value in (
            ("amsgrad", amsgrad),
            ("maximize", maximize),
            ("capturable", capturable),
            ("differentiable", differentiable),
        ):
            if value:
                raise NotImplementedError(f"{self._name}: {name} must be False, got {value!r}")
        super().__init__(params, {"lr": lr, "betas": as_tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            self._range(group, name)
        betas = group["betas"]
        two = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not two or not all(is_real(beta) and 0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"{self._name}: betas must be two numbers in [0, 1), got {betas!r}")

    def _start(self, param: Tensor) -> _State:
        step = _C.full((), 0, _C.int64, param.device)
        return _State({"step": step, **self._new_state(param, "exp_avg", "exp_avg_sq")})

    def _state_of(self, param: Tensor) -> _State:
        """The state of `param`: started, or made of the mapping that was put in its place, when it is not there yet."""
        found: Any = self.state.get(param)
        if not isinstance(found, _State):
            if found is None:
                found = self._start(param)
            else:
                step = _C.full((), _count(found["step"]), _C.int64, param.device)
                found = _State({**found, "step": step})
            self.state[param] = found
        return found

    def _load_state(self, param: Tensor, number: int, values: Mapping[str, Any]) -> _State:
        loaded = super()._load_state(param, number, values)
        missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in loaded]
        if missing:
            raise ValueError(
                f"load_state_dict: state of parameter {number} must have {missing[0]}, "
                f"got {', '.join(loaded) or 'nothing'}"
            )
        if loaded["step"] >= _C.MOST_STEPS:
            raise ValueError(
                f"load_state_dict: step of parameter {number} must be less than 2**40, got {loaded['step']}"
            )
        loaded["step"] = _C.full((), loaded["step"], _C.int64, param.device)
        self._widen(param, loaded)
        return _State(dict(loaded))

    def _plain_state(self) -> dict[Tensor, dict[str, Any]]:
        counts: dict[_C.device, list[Tensor]] = {}  # device -> the steps of all its parameters, in one copy
        for param in self.state:
            state = self._state_of(param)
            counts.setdefault(state.raw["step"].device, []).append(state.raw["step"].reshape(1))
        numbers = {device: iter(_C.cat(steps).tolist()) for device, steps in counts.items()}
        return {
            param: {**state.raw, "step": next(numbers[state.raw["step"].device])} for param, state in self.state.items()
        }

    def _gradient(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad  # Adam adds its decay

    def _decay(self, group: dict[str, Any]) -> float:
        return group["weight_decay"]

    def interrupted(self) -> bool:
        """Whether an error has ended the last step when some parameters had taken it and others had not: those with a
        gradient differ in their counts of steps. So they do when one gets its first gradient later than others.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return len({self.state[p]["step"] if p in self.state else 0 for p in parameters}) > 1

    @no_grad()
    def step(self, closure: None = None, *, guard: Tensor | None = None) -> None:
        """Updates every parameter that has a gradient.

        guard: a 0-dim float32 tensor on the parameters' device, such as the norm of the gradients. If it is
        NaN or infinite, the step changes no parameter, moment or count. The host does not read it.

        Options and tensors are checked, and memory is taken, before anything changes. Parameters on several devices are
        a call each: what is wrong with tensors of one is found after those of the devices before it were updated.
        """
        self._refuse_closure(closure)
        for group in self.param_groups:  # which may have been edited
            self._check(group)
        all_state = self.state
        # All groups of a device in one call, which takes its memory before it changes anything.
        calls: dict[_C.device, _Call] = {}
        for index, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            numbers = [beta1, beta2, group["eps"], self._decay(group)]
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                state = all_state.get(param)
                raw = (state if type(state) is _State else self._state_of(param)).raw
                device = param.device
                call = calls.get(device)
                if call is None:
                    call = calls[device] = ([], [], [], [], [], [], [], [])
                params, grads, exp_avgs, exp_avg_sqs, masters, steps, rates, rows = call
                params.append(param)
                grad = self._gradient(param, grad, group)
                grads.append(grad if grad.is_contiguous() else grad.contiguous())
                exp_avgs.append(raw["exp_avg"])
                exp_avg_sqs.append(raw["exp_avg_sq"])
                masters.append(raw.get("master", param))
                steps.append(raw["step"])
                if not rows or rows[-1][0] != index:
                    rows.append([index, 0, *numbers])
                    rates.append(self._rate(index, device, float(group["lr"])))
                rows[-1][1] += 1
        ready = [(*call[:7], _C.tensor([row[1:] for row in call[7]], _C.float64, _CPU)) for call in calls.values()]
        for arguments in ready:
            _C.adamw_(*arguments, guard)
