"""A PyTorch module as the reference of first_divergence: recorded module by module, its tensors turned into ours.

PyTorch is never imported here: a module of it can only be given by a process that has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _C
from .._C import Tensor
from .recording import Gradients, Step, rebuild

if TYPE_CHECKING:
    from typing_extensions import Self


def is_torch_module(model: object) -> bool:
    """Whether model is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def from_torch(tensor: Any) -> Tensor:
    """A Tensor on the CPU with the values of a PyTorch tensor."""
    return _C.from_dlpack(tensor.detach().to("cpu").contiguous().clone())


def to_torch(tensor: Tensor, like: Any) -> Any:
    """A PyTorch tensor with the values of ours, and the dtype (when floating), shape and device of `like`."""
    torch = sys.modules["torch"]
    value = torch.from_dlpack(tensor.detach().to("cpu").clone()).reshape(like.shape)
    return value.to(like.device, like.dtype) if like.is_floating_point() else value.to(like.device)


def _flatten(tree: Any) -> list[Any]:
    torch = sys.modules["torch"]
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [t for value in tree for t in _flatten(value)]


class TorchStep(Step):
    """A Step whose module is PyTorch's; inputs, outputs and gradients are our tensors. leaves: inputs as PyTorch's."""

    leaves: Callable[[Sequence[Tensor]], list[Any]]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with sys.modules["torch"].no_grad():
            return [from_torch(y) for y in self.call(inputs)]

    def differentiate(self, inputs: Sequence[Tensor], output: int, gradient: Tensor) -> Gradients | None:
        torch = sys.modules["torch"]
        leaves, parameters = self.leaves(inputs), dict(self.parameters)
        floats = [(label, x) for label, x in zip(self.labels, leaves, strict=True) if x.is_floating_point()]
        with torch.enable_grad():
            for _, x in floats:
                x.requires_grad_()
            y = self.call(leaves, ready=True)[output]
        if not y.requires_grad:
            return None
        rows = floats + list(parameters.items())
        grads = torch.autograd.grad(y, [x for _, x in rows], to_torch(gradient, y), allow_unused=True)
        return [(name, None if g is None else from_torch(g)) for (name, _), g in zip(rows, grads, strict=True)]


class TorchRecording:
    """As Recording, for the modules of a PyTorch model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[Step] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            hook = self._hook(name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            tree, outputs = (args, kwargs), _flatten(result)
            given = _flatten(tree)

            def leaves(inputs: Sequence[Tensor]) -> list[Any]:
                return [to_torch(x, like).detach() for x, like in zip(inputs, given, strict=True)]

            def call(inputs: Sequence[Any], ready: bool = False) -> list[Any]:
                new_args, new_kwargs = rebuild(
                    tree, iter(inputs if ready else leaves(inputs)), sys.modules["torch"].Tensor
                )
                return _flatten(module(*new_args, **new_kwargs))

            labels = [f"input[{i}]" for i in range(len(given))]
            step = TorchStep("module", type(module).__name__, path, call, [from_torch(x) for x in given], labels,
                             [from_torch(y) for y in outputs])  # fmt: skip
            step.leaves = leaves
            step.gradients = [None] * len(outputs)
            step.versions = [y._version for y in step.outputs]
            step.parameters = dict(module.named_parameters())
            self.steps.append(step)
            for i, y in enumerate(outputs):
                if y.requires_grad:
                    y.register_hook(lambda gradient, i=i: step.gradients.__setitem__(i, from_torch(gradient)))

        return hook
