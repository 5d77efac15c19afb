"""AdamW."""

import math
import numbers
from collections.abc import Iterable

from .. import _C
from ..autograd import no_grad
from .optimizer import Optimizer

_16_BIT = (_C.bfloat16, _C.float16)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), PyTorch's arithmetic.

        p *= 1 - lr * weight_decay;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

    m and v are float32 (float64 for float64). bfloat16 and float16 parameters get a float32 master copy that holds the
    exact value; the parameter is its rounding. One call of the core per group updates all its parameters; gradients may
    be None (not updated). State per parameter: step, exp_avg, exp_avg_sq and, for 16-bit dtypes, master. `foreach` and
    `fused` are accepted and have no effect.

    A step that its guard stops is no step: t does not count it. On a GPU, where nobody waits for the guard, the device
    keeps the number of those that were stopped (state `missed`); `state_dict` and `settle` take them out of `step`.
    """

    _moments = ("exp_avg", "exp_avg_sq", "master")

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *,
        maximize=False, foreach=None, capturable=False, differentiable=False, fused=None,
    ):  # fmt: skip
        for name, value in (
            ("amsgrad", amsgrad),
            ("maximize", maximize),
            ("capturable", capturable),
            ("differentiable", differentiable),
        ):
            if value:
                raise NotImplementedError(f"AdamW: {name} must be False, got {value!r}")
        betas = tuple(betas) if isinstance(betas, Iterable) else betas
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, group):
        for name in ("lr", "eps", "weight_decay"):
            self._range(group, name)
        betas = group["betas"]
        two = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not two or not all(isinstance(beta, numbers.Real) and 0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"AdamW: betas must be two numbers in [0, 1), got {betas!r}")

    def _start(self, param):
        wide = _C.float64 if param.dtype == _C.float64 else _C.float32
        state = {
            "step": 0,
            "exp_avg": _C.full(param.shape, 0, wide, param.device),
            "exp_avg_sq": _C.full(param.shape, 0, wide, param.device),
        }
        if param.dtype in _16_BIT:
            state["master"] = param.detach().to(_C.float32)
        return state

    def _load_state(self, param, number, values):
        loaded = super()._load_state(param, number, values)
        missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in loaded]
        if missing:
            raise ValueError(
                f"load_state_dict: state of parameter {number} must have {missing[0]}, "
                f"got {', '.join(loaded) or 'nothing'}"
            )
        wide = _C.float64 if param.dtype == _C.float64 else _C.float32
        for name in self._moments:
            if name in loaded:
                loaded[name] = loaded[name].to(wide)
        if param.dtype in _16_BIT and "master" not in loaded:
            loaded["master"] = param.detach().to(_C.float32)
        return loaded

    @staticmethod
    def _on_host(guard):
        """Whether its value is there without a wait."""
        return not isinstance(guard, _C.Tensor) or guard.device.type == "cpu"

    def settle(self):
        """Takes the steps that their guards have stopped out of every state's `step`. Waits for the device, if any were
        guarded there.
        """
        counts = {}
        for state in self.state.values():
            missed = state.pop("missed", None)
            if missed is not None:
                if id(missed) not in counts:
                    counts[id(missed)] = missed, missed.item()
                state["step"] -= counts[id(missed)][1]

    def state_dict(self):
        """Optimizer.state_dict, settled."""
        self.settle()
        return super().state_dict()

    @no_grad()
    def step(self, closure=None, *, guard=None):
        """Updates every parameter that has a gradient.

        guard: a 0-dim float32 tensor on the parameters' device, such as the norm of the gradients; when it turns out to
        be NaN or infinite, no parameter and no moment is changed and no step is counted, though nobody has waited for
        its value.
        """
        self._refuse_closure(closure)
        on_host = self._on_host(guard)
        known = on_host and isinstance(guard, _C.Tensor) and (guard.ndim, guard.dtype) == (0, _C.float32)
        if known and not math.isfinite(guard.item()):  # adamw_ refuses guards of other kinds
            return
        all_state = self.state
        for group in self.param_groups:
            batches = {}  # (dtype, device, step, missed) -> lists for one call; usually there is a single one
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                state = all_state.get(param)
                if state is None:
                    state = all_state[param] = self._start(param)
                step = state["step"] + 1
                key = (param.dtype, param.device, step, id(state.get("missed")))
                batch = batches.get(key)
                if batch is None:
                    batch = batches[key] = ([], [], [], [], [], [])
                params, grads, exp_avgs, exp_avg_sqs, masters, states = batch
                params.append(param)
                grads.append(grad)
                exp_avgs.append(state["exp_avg"])
                exp_avg_sqs.append(state["exp_avg_sq"])
                if "master" in state:
                    masters.append(state["master"])
                states.append(state)
            beta1, beta2 = group["betas"]
            for (_, device, step, _), (params, grads, exp_avgs, exp_avg_sqs, masters, states) in batches.items():
                missed, after = states[0].get("missed"), None
                if not on_host and any(param.numel() for param in params):
                    missed = _C.full((), 0, _C.int64, device) if missed is None else missed
                    after = _C.empty(
                        (), _C.int64, device
                    )  # another tensor: who sits this step out keeps the old number
                _C.adamw_(
                    params,
                    grads,
                    exp_avgs,
                    exp_avg_sqs,
                    masters,
                    group["lr"],
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                    step,
                    guard,
                    missed,
                    after,
                )
                for state in states:  # only after the update went through
                    state["step"] = step
                    if after is not None:
                        state["missed"] = after
