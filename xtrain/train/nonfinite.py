"""When a loss or gradient norm is NaN or infinite: find the first value that is, in the order of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from ..nn import HyperConnection, Module


def _bad_count(tensor: Tensor) -> int:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return 0
    _, _, _, nans, infinities = _C.stats(tensor.detach())
    return nans + infinities


def _describe(kind: str, name: str, tensor: Tensor) -> str:
    return f"{kind} {name} ({_bad_count(tensor)} of {tensor.numel()} values are NaN or infinite)"


def first_bad_parameter(model: Module) -> str | None:
    """Name the first parameter with a NaN or infinite value, or None."""
    for name, parameter in model.named_parameters():
        if _bad_count(parameter):
            return _describe("parameter", name, parameter)
    return None


def first_bad_gradient(model: Module) -> str | None:
    """Name the first gradient that backward made NaN or infinite (the last layer comes first), or None."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and _bad_count(parameter.grad):
            return _describe("gradient of", name, parameter.grad)
    return None


def first_bad_activation(model: Module, ids: Tensor, documents: Tensor | None = None) -> str | None:
    """Run the model again and name the first module whose result has a NaN or infinite value, or None."""
    found: list[str] = []

    def watch(name: str) -> Callable[[Module, Any, Any], None]:
        def hook(module: Module, args: Any, result: Any) -> None:
            if not found and isinstance(result, _C.Tensor) and _bad_count(result):
                found.append(_describe("output of", name or "the model (logits)", result))

        return hook

    def watch_read(name: str, connection: HyperConnection) -> None:  # its result goes into the sublayer
        read = connection.read

        def watched_read(x: Tensor) -> Any:
            h_in, state = read(x)
            if not found and _bad_count(h_in):
                found.append(_describe("h_in of", name, h_in))
            return h_in, state

        vars(connection)["read"] = watched_read

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    connections = [(name, one) for name, one in model.named_modules() if isinstance(one, HyperConnection)]
    try:
        for name, connection in connections:
            watch_read(name, connection)
        with no_grad():
            model(ids) if documents is None else model(ids, documents=documents)
    finally:
        for handle in handles:
            handle.remove()
        for _, connection in connections:
            vars(connection).pop("read", None)
    return found[0] if found else None


def diagnose(model: Module, pieces: Iterable[tuple[Tensor, ...]]) -> str:
    """Name the first bad value of a step on the micro-batches `pieces`: token ids [B, S], and perhaps documents."""
    found = first_bad_parameter(model)
    for piece in pieces:
        found = found or first_bad_activation(model, *piece)
    return found or first_bad_gradient(model) or "the loss itself, from finite logits"
