"""Optimizers, gradient clipping and learning-rate schedules, with PyTorch's semantics."""

import math
import numbers
from collections.abc import Iterable, Mapping

from . import _C
from .autograd import no_grad

_Tensor = _C.Tensor
_adamw = _C.adamw_
_16_BIT = (_C.bfloat16, _C.float16)

__all__ = ["AdamW", "LRScheduler", "Optimizer", "SGD", "clip_grad_norm_", "lr_schedule"]


class Optimizer:
    """Parameters in groups, each with its own options, and a state per parameter.

    params: tensors, or dicts {"params": tensors, option: value, ...}. `param_groups` may be edited between steps
    (`group["lr"] = ...`).
    """

    _moments = ()  # the names of a state's tensors

    def __init__(self, params, defaults):
        self.defaults = defaults
        self.state = {}
        self.param_groups = []
        self._seen = set()
        if isinstance(params, _Tensor) or not isinstance(params, Iterable):
            kind = "a Tensor" if isinstance(params, _Tensor) else type(params).__name__
            raise TypeError(f"{self._name}: params must be an iterable of tensors or dicts, got {kind}")
        params = list(params)
        if not params:
            raise ValueError(f"{self._name}: params must hold at least one tensor, got none")
        if isinstance(params[0], dict):
            for group in params:
                self.add_param_group(group)
        else:
            self.add_param_group({"params": params})

    @property
    def _name(self):
        return type(self).__name__

    def add_param_group(self, group):
        """Adds a dict {"params": tensor or tensors, option: value, ...}; the rest are the defaults."""
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"{self._name}: a group must be a dict with the key params, got {type(group).__name__}")
        group = dict(group)
        if not isinstance(group["params"], Iterable):  # a Tensor is one
            raise TypeError(f"{self._name}: params must be tensors, got {type(group['params']).__name__}")
        params = [group["params"]] if isinstance(group["params"], _Tensor) else list(group["params"])
        unknown = [key for key in group if key not in self.defaults and key not in ("params", "name", "initial_lr")]
        if unknown:
            raise TypeError(f"{self._name}: options must be among {', '.join(self.defaults)}, got {unknown[0]}")
        for param in params:
            if not isinstance(param, _Tensor):
                raise TypeError(f"{self._name}: params must be tensors, got {type(param).__name__}")
            if not param.is_leaf:
                raise ValueError(f"{self._name}: params must be leaf tensors, got the result of {param.grad_fn}")
            if not param.dtype.is_floating_point:
                raise TypeError(f"{self._name}: params must have a floating dtype, got {param.dtype.name}")
        if len({id(param) for param in params} | self._seen) != len(params) + len(self._seen):
            raise ValueError(f"{self._name}: params must be distinct, got one twice")
        self._seen |= {id(param) for param in params}
        group = {"params": params, **self.defaults, **{key: value for key, value in group.items() if key != "params"}}
        self._check(group)
        self.param_groups.append(group)

    def _check(self, group):
        """Raises ValueError for options outside their range."""

    def _range(self, group, name, high=math.inf):
        value = group[name]
        if isinstance(value, _Tensor) and value.ndim == 0:
            value = value.item()
        if not isinstance(value, numbers.Real) or not 0.0 <= value < high:
            raise ValueError(f"{self._name}: {name} must be a number in [0, {high}), got {value!r}")

    def zero_grad(self, set_to_none=True):
        """Drops all gradients, or fills them with zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.fill_(0)

    def step(self, closure=None):
        raise NotImplementedError(f"{self._name}: step must be defined")

    def _refuse_closure(self, closure):
        if closure is not None:
            raise NotImplementedError(
                f"{self._name}: closure must be None (call backward, then step), got {type(closure).__name__}"
            )

    def state_dict(self):
        """{"state": {index: {...}}, "param_groups": [...]}, PyTorch's layout; parameters are numbered through all
        groups.
        """
        numbers = {}
        groups = []
        for group in self.param_groups:
            for param in group["params"]:
                numbers[id(param)] = len(numbers)
            groups.append(
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": [numbers[id(param)] for param in group["params"]],
                }
            )
        state = {numbers[id(param)]: dict(values) for param, values in self.state.items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict):
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
        params = {}
        for group, old in zip(self.param_groups, saved, strict=True):
            params.update(zip(old["params"], group["params"], strict=True))
        state = {}
        for number, values in state_dict["state"].items():
            if number not in params:
                raise ValueError(
                    f"load_state_dict: state must belong to parameters 0 to {len(params) - 1}, got {number}"
                )
            state[params[number]] = self._load_state(params[number], number, values)
        options = []
        for group, old in zip(self.param_groups, saved, strict=True):
            options.append({k: v for k, v in old.items() if k != "params" and (k in group or k == "initial_lr")})
            self._check({**group, **options[-1]})
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(loaded)
        self.state = state

    def _load_state(self, param, number, values):
        if not isinstance(values, Mapping):
            raise TypeError(f"load_state_dict: state of parameter {number} must be a dict, got {type(values).__name__}")
        loaded = {}
        for name, value in values.items():
            if name == "step":
                value = self._load_step(number, value)
            elif name in self._moments and not isinstance(value, _Tensor):
                raise TypeError(
                    f"load_state_dict: {name} of parameter {number} must be a Tensor, got {type(value).__name__}"
                )
            elif isinstance(value, _Tensor):
                if tuple(value.shape) != tuple(param.shape):
                    raise ValueError(
                        f"load_state_dict: {name} of parameter {number} must have shape {tuple(param.shape)}, "
                        f"got {tuple(value.shape)}"
                    )
                value = value.detach().to(param.device).clone()
            loaded[name] = value
        return loaded

    @staticmethod
    def _load_step(number, value):
        if isinstance(value, _Tensor) and value.ndim == 0:  # PyTorch's
            value = value.item()
        if not isinstance(value, numbers.Real) or not 0 <= value < 2**53 or value != int(value):
            raise ValueError(
                f"load_state_dict: step of parameter {number} must be a whole number of at least 0, got {value!r}"
            )
        return int(value)

    def __repr__(self):
        groups = (", ".join(f"{k}={v}" for k, v in group.items() if k != "params") for group in self.param_groups)
        return f"{self._name}(" + "; ".join(groups) + ")"


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
        return not isinstance(guard, _Tensor) or guard.device.type == "cpu"

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
        known = on_host and isinstance(guard, _Tensor) and (guard.ndim, guard.dtype) == (0, _C.float32)
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
                _adamw(
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


class SGD(Optimizer):
    """Stochastic gradient descent with momentum (PyTorch's form: the buffer starts as the first gradient).

    g += weight_decay * p;  b = momentum * b + (1 - dampening) * g;  p -= lr * (g + momentum * b if nesterov else b)
    """

    _moments = ("momentum_buffer",)

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
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

    def _check(self, group):
        for name in ("lr", "momentum", "dampening", "weight_decay"):
            self._range(group, name)
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(f"SGD: nesterov must have momentum > 0 and dampening 0, got {momentum} and {dampening}")

    def _load_state(self, param, number, values):
        if isinstance(values, Mapping) and values.get("momentum_buffer") is None:  # PyTorch's, without momentum
            values = {name: value for name, value in values.items() if name != "momentum_buffer"}
        return super()._load_state(param, number, values)

    @no_grad()
    def step(self, closure=None):
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


@no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False):
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)) in place; returns their common 2-norm before that (0-dim
    float32 tensor).

    parameters: a tensor or an iterable; those without a gradient are passed over. max_norm=inf only measures.
    """
    if norm_type != 2.0:
        raise NotImplementedError(f"clip_grad_norm_: norm_type must be 2.0, got {norm_type}")
    parameters = [parameters] if isinstance(parameters, _Tensor) else parameters
    grads = [grad for grad in (parameter.grad for parameter in parameters) if grad is not None]
    if not grads:
        return _C.full((), 0, _C.float32)
    if not error_if_nonfinite:
        return _C.clip_grad_norm_(grads, max_norm)
    norm = _C.clip_grad_norm_(grads, math.inf)
    if not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients must be finite, got {norm.item()}")
    return _C.clip_grad_norm_(grads, max_norm)


def lr_schedule(kind, step, warmup, total, base, final=0.0):
    """Learning rate of step `step` (0 is the first): linear warm-up over `warmup` steps, then from `base` to `final` at
    step `total`.

    kind: "cosine" (half a cosine), "linear", or "constant" (stays at base). Steps after total keep the last value.
    """
    if kind not in ("cosine", "linear", "constant"):
        raise ValueError(f"lr_schedule: kind must be cosine, linear or constant, got {kind!r}")
    if step < warmup:
        return base * (step + 1) / warmup
    if kind == "constant":
        return base
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
    return final + (base - final) * remaining


class LRScheduler:
    """Multiplies each group's initial learning rate by lr_lambda(step), as PyTorch's LambdaLR does.

    lr_lambda: a function, or one per group. The constructor sets the rate of step 0; step() moves to the next one.
    """

    def __init__(self, optimizer, lr_lambda, last_epoch=-1):
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self.lr_lambdas = list(lr_lambda) if isinstance(lr_lambda, (list, tuple)) else [lr_lambda] * len(groups)
        if len(self.lr_lambdas) != len(groups):
            raise ValueError(f"LRScheduler: lr_lambda must have {len(groups)} functions, got {len(self.lr_lambdas)}")
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs = [group["initial_lr"] for group in groups]
        self.last_epoch = last_epoch
        self.step()

    def step(self):
        """Sets the rates of the next step."""
        self.last_epoch += 1
        for group, base, function in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * function(self.last_epoch)

    def get_last_lr(self):
        """The rate of every group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        """{"last_epoch", "base_lrs"}; the functions are not part of it."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict):
        """Goes on from a state_dict."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"] - 1
        self.step()
