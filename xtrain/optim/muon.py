"""Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from .. import _C
from .._C import Tensor
from .._types import is_real, is_whole
from ..autograd import no_grad
from .optimizer import HAVE_MASTERS, RatesOnDevice, as_tuple

_MOST_STEPS = 99
_MOST_ELEMENTS = 1 << 26  # of the matrices of one call, unless one alone has more: its scratch is 2 to 4 times that
_RATIOS = (None, "original", "match_rms_adamw")
_CPU = _C.device("cpu")


class Muon(RatesOnDevice):
    """Momentum, made orthogonal by Newton-Schulz, for the hidden matrices of a network (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/). Embeddings, the head, norms and vectors go to AdamW: see
    ChainedOptimizer. Names, order and defaults of torch.optim.Muon.

        b = momentum b + (1 - momentum) g;   u = nesterov ? (1 - momentum) g + momentum b : b;   x = u / max(|u|, eps)
        ns_steps times:  A = x x^T;  x = (a I + b A + c A A) x
        p *= 1 - lr * weight_decay;   p -= lr * ratio * x

    ratio of a [rows, cols] matrix, by adjust_lr_fn: sqrt(max(1, rows / cols)) for "original" and None, or
    0.2 sqrt(max(rows, cols)) for "match_rms_adamw", with which learning rate and decay of AdamW serve (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982).

    ns_dtype: what the iteration is computed in: "float32", "bfloat16" or "float16" (a dtype or its name); None for
    bfloat16 on a GPU and float32 on a CPU. float64 parameters have float64 alone. momentum_buffer is float32 (float64
    for float64); bfloat16 and float16 parameters get a float32 master copy, as with AdamW. Matrices of one shape are
    one call: the products are batched. ValueError for options outside their range and for what is no matrix.
    """

    _moments = ("momentum_buffer", "master")

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3, weight_decay: float = 0.1,
        momentum: float = 0.95, nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7, ns_steps: int = 5,
        adjust_lr_fn: str | None = None, *, ns_dtype: _C.dtype | str | None = None,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": as_tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype,
        }  # fmt: skip
        super().__init__(params, options)
        self._interrupted = False

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            self._range(group, name)
        self._range(group, "momentum", 1.0)
        three = group["ns_coefficients"]
        right = isinstance(three, (tuple, list)) and len(three) == 3
        if not right or not all(is_real(value) and math.isfinite(value) for value in three):
            raise ValueError(f"Muon: ns_coefficients must be three finite numbers, got {three!r}")
        steps = group["ns_steps"]
        if not is_whole(steps) or not 0 <= steps <= _MOST_STEPS:
            raise ValueError(f"Muon: ns_steps must be an integer in [0, {_MOST_STEPS}], got {steps!r}")
        if group["adjust_lr_fn"] not in _RATIOS:
            raise ValueError(
                f"Muon: adjust_lr_fn must be original, match_rms_adamw or None, got {group['adjust_lr_fn']!r}"
            )
        if isinstance(group["ns_dtype"], _C.dtype):
            group["ns_dtype"] = group["ns_dtype"].name  # a state_dict is saved as JSON
        for param in group["params"]:
            if param.ndim != 2:
                raise ValueError(
                    f"Muon: params must be matrices, got shape {tuple(param.shape)}: AdamW is for vectors and the rest"
                )
            _ns_dtype(group, param)

    def _state_of(self, param: Tensor) -> MutableMapping[str, Any]:
        state = self.state.get(param)
        if state is None:
            state = self.state[param] = self._new_state(param, "momentum_buffer")
        return state

    def _load_state(self, param: Tensor, number: int, values: Mapping[str, Any]) -> MutableMapping[str, Any]:
        loaded = super()._load_state(param, number, values)
        if "momentum_buffer" not in loaded:
            raise ValueError(
                f"load_state_dict: state of parameter {number} must have momentum_buffer, "
                f"got {', '.join(loaded) or 'nothing'}"
            )
        self._widen(param, loaded)
        return loaded

    def interrupted(self) -> bool:
        """Whether an error has ended the last step when some parameters had taken it and others had not."""
        return self._interrupted

    @no_grad()
    def step(self, closure: None = None, *, guard: Tensor | None = None) -> None:
        """Updates every parameter that has a gradient.

        guard: a 0-dim float32 tensor on the parameters' device, such as the norm of the gradients. If it is NaN or
        infinite, the step changes nothing. The host does not read it.

        Options are checked, and state is made, before anything changes. Each call of a batch changes all its matrices
        or none, after it has all memory but that of products.
        """
        self._refuse_closure(closure)
        self._interrupted = False
        for group in self.param_groups:  # which may have been edited
            self._check(group)
        for call in list(self._calls(guard)):
            _C.muon_(*call)
            self._interrupted = True  # until the last
        self._interrupted = False

    def _calls(self, guard: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """The arguments of a call for each batch."""
        for index, group in enumerate(self.param_groups):
            alike: dict[Any, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    alike.setdefault((param.device, param.dtype, tuple(param.shape)), []).append(param)
            for (device, _, _), params in alike.items():
                rate = self._rate(index, device, float(group["lr"]))
                most = max(_MOST_ELEMENTS // max(params[0].numel(), 1), 1)
                for i in range(0, len(params), most):
                    batch = params[i : i + most]
                    states = [self._state_of(param) for param in batch]
                    yield (
                        batch,
                        [param.grad for param in batch],
                        [state["momentum_buffer"] for state in states],
                        [state["master"] for state in states] if batch[0].dtype in HAVE_MASTERS else [],
                        rate,
                        *muon_numbers(group, batch[0]),
                        guard,
                    )


def muon_numbers(group: Mapping[str, Any], param: Tensor) -> tuple[Tensor, bool, int, _C.dtype]:
    """What muon_ takes for matrices of this shape, dtype and device, from the options of their group: numbers,
    nesterov, ns_steps and ns_dtype.
    """
    rows, cols = param.shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, cols))
    else:
        ratio = math.sqrt(max(1.0, rows / max(cols, 1)))
    row = [group["momentum"], group["weight_decay"], *group["ns_coefficients"], group["eps"], ratio]
    numbers = _C.tensor([float(value) for value in row], _C.float64, _CPU)
    return numbers, bool(group["nesterov"]), group["ns_steps"], _ns_dtype(group, param)


def _ns_dtype(group: Mapping[str, Any], param: Tensor) -> _C.dtype:
    given = group["ns_dtype"]
    name = given.name if isinstance(given, _C.dtype) else given
    wide = param.dtype == _C.float64
    known = ("float64",) if wide else ("float32", "bfloat16", "float16")
    if name is None:
        on_cpu = str(param.device) in ("cpu", "meta", "meta:0")  # meta:0 stands for a CPU
        name = "float64" if wide else "float32" if on_cpu else "bfloat16"
    if name not in known:
        raise ValueError(
            f"Muon: ns_dtype must be {', '.join(known)} or None for {param.dtype.name} parameters, got {given!r}"
        )
    return getattr(_C, name)
