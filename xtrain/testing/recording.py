"""record: every op, xt.Function and module call of a forward, its inputs and outputs, and their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _C, nn
from .._C import Tensor
from ..autograd import Function, enable_grad
from ..nn import mhc
from ..nn.module import is_stock

if TYPE_CHECKING:
    from typing_extensions import Self

Gradients = list[tuple[str, Tensor | None]]  # (label, gradient), None where none arrived
_under_way = threading.Lock()  # held by the one Recording that there may be


@dataclass
class Step:
    """One call. kind: "op", "function" (an xt.Function) or "module". where: dotted name of the module it happened in,
    or of the module itself. inputs: the tensors among its arguments, labels their names. gradients: of the loss by each
    output, None where none arrived. inside: how many ops a function or module called.
    """

    kind: str
    name: str
    where: str
    call: Callable[..., list[Any]]  # call(inputs) -> list of outputs, as this call with other tensors
    inputs: list[Tensor]
    labels: list[str]
    outputs: list[Tensor]
    options: str = ""  # the arguments that are no tensors, as text
    inside: int = 1
    gradients: list[Tensor | None] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} in {self.where}" if self.where and self.kind != "module" else self.where or self.name

    @property
    def unchanged(self) -> bool:
        """False when an output was changed in place after the call."""
        return self.versions == [y._version for y in self.outputs]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for other inputs; nothing is recorded on the tape."""
        before = _C.set_grad_enabled(False)
        try:
            return self._again([x.detach() for x in inputs])
        finally:
            _C.set_grad_enabled(before)

    def _again(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The call with other inputs. One that draws, such as dropout, draws the same numbers each time."""
        state = _C.get_rng_state()
        _C.set_rng_state((0, 0))
        try:
            return self.call(inputs)
        finally:
            _C.set_rng_state(state)

    def differentiate(self, inputs: Sequence[Tensor], output: int, gradient: Tensor) -> Gradients | None:
        """Gradients of <outputs[output], gradient>: (label, Tensor) by every floating input, then by every parameter.

        None when that output has no gradient at these inputs.
        """
        leaves = [x.detach() for x in inputs]
        for x in leaves:
            if x.dtype.is_floating_point:
                x.requires_grad_()
        kept = {name: p.grad for name, p in self.parameters.items()}
        for p in self.parameters.values():
            p.grad = None
        try:
            with enable_grad():
                outputs = self._again(leaves)
            if not outputs[output].requires_grad:
                return None
            _C.backward([outputs[output]], [gradient], False)
            rows: Gradients = [(label, x.grad) for label, x in zip(self.labels, leaves, strict=True) if x.requires_grad]
            return rows + [(name, p.grad) for name, p in self.parameters.items()]
        finally:
            for name, p in self.parameters.items():
                p.grad = kept[name]


def flatten(tree: Any, label: str = "", found: list[tuple[str, Tensor]] | None = None) -> list[tuple[str, Tensor]]:
    """(label, Tensor) of every tensor in nested tuples, lists and dicts."""
    found = [] if found is None else found
    if isinstance(tree, _C.Tensor):
        found.append((label, tree))
    elif isinstance(tree, dict):
        for key, value in tree.items():
            flatten(value, f"{label}.{key}" if label else str(key), found)
    elif isinstance(tree, (tuple, list)):
        for i, value in enumerate(tree):
            flatten(value, f"{label}[{i}]", found)
    return found


def rebuild(tree: Any, tensors: Iterator[Any], kind: type = _C.Tensor) -> Any:
    """The tree with its tensors, of class `kind`, replaced in order by those of an iterator."""
    if isinstance(tree, kind):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: rebuild(value, tensors, kind) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(rebuild(value, tensors, kind) for value in tree)
    return tree


def _options(tree: Any) -> str:
    """The tree as text, tensors left out."""
    if isinstance(tree, _C.Tensor):
        return "Tensor"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_options(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(_options, tree)) + ")"
    return repr(tree)


class Recording:
    """`with record(model) as recording:` around a forward and a backward fills recording.steps in the order of returns.

    What an xt.Function calls inside belongs to it. Hyper-connections run as mhc_pre, sinkhorn and mhc_post. Ops after
    the first gradient belong to the backward and are left out. Tensors are kept, not copied. RuntimeError: another
    recording of this process, of any thread, is under way.
    """

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self.steps: list[Step] = []
        self._path: list[str] = []  # dotted names of the modules under way
        self._inside: list[int] = []  # per function or module under way: ops so far
        self._hidden = 0  # xt.Functions under way
        self._walking = False  # a gradient has arrived
        self._handles: list[_C.Handle] = []
        self._wrapped: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> Self:
        if not _under_way.acquire(blocking=False):
            raise RuntimeError("record: a recording must end before the next begins, got one that is under way")
        self._walking = False
        try:
            if isinstance(self.model, nn.Module):
                for name, module in self.model.named_modules():
                    own = module.__dict__.get("forward")
                    object.__setattr__(module, "forward", self._module_call(name, module, module.forward))
                    self._wrapped.append((module, own))
        except BaseException:
            try:
                self._unwrap()
            finally:
                _under_way.release()
            raise
        self._apply = Function.__dict__["apply"]
        Function.apply = classmethod(self._function_call)  # pyright: ignore[reportAttributeAccessIssue]  (bound by it)
        self._before = _C.set_call_hook(self._op_call)
        mhc.separate += 1
        return self

    def __exit__(self, *_: object) -> None:
        mhc.separate -= 1
        _C.set_call_hook(self._before)
        Function.apply = self._apply
        try:
            self._unwrap()
        finally:
            _under_way.release()

    def _unwrap(self) -> None:
        for module, own in self._wrapped:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", own)
        for handle in self._handles:
            handle.remove()
        self._wrapped, self._handles = [], []

    def _op_call(self, op: Any, arguments: dict[str, Any], outputs: tuple[Tensor, ...]) -> None:
        if self._walking:
            return
        for i in range(len(self._inside)):
            self._inside[i] += 1
        if self._hidden:
            return

        def call(tree: dict[str, Any], op: Any = op) -> list[Any]:
            result = op(**tree)
            return list(result) if isinstance(result, tuple) else [result]

        self._add("op", op.__name__, self._path[-1] if self._path else "", call, arguments, list(outputs), 1)

    def _function_call(self, cls: type[Function], *args: Any) -> Any:
        apply = self._apply.__func__
        if self._walking:
            return apply(cls, *args)
        self._hidden += 1
        self._inside.append(0)
        try:
            result = apply(cls, *args)
        finally:
            self._hidden -= 1
            inside = self._inside.pop()
        if not self._hidden:
            names = cls.forward.__code__.co_varnames[1 : cls.forward.__code__.co_argcount]
            names = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]

            def call(tree: Any, cls: type[Function] = cls) -> list[Any]:
                result = cls.apply(*tree.values())
                return list(result) if isinstance(result, tuple) else [result]

            outputs = list(result) if isinstance(result, tuple) else [result]
            where = self._path[-1] if self._path else ""
            self._add("function", cls.__name__, where, call, dict(zip(names, args)), outputs, max(1, inside))
        return result

    def _module_call(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._walking or self._hidden:
                return forward(*args, **kwargs)
            self._path.append(path)
            self._inside.append(0)
            try:
                result = forward(*args, **kwargs)
            finally:
                self._path.pop()
                inside = self._inside.pop()
            outputs = [y for _, y in flatten(result)]

            def call(tree: Any) -> list[Any]:
                return [y for _, y in flatten(module(*tree["input"], **tree["options"]))]

            tree = {"input": args, "options": kwargs}
            step = self._add("module", type(module).__name__, path, call, tree, outputs, max(1, inside))
            step.parameters = dict(module.named_parameters())
            return result

        called.records_stock = is_stock(module, type(module))
        return called

    def _add(
        self,
        kind: str,
        name: str,
        where: str,
        call: Callable[[Any], list[Any]],
        tree: dict[str, Any],
        outputs: list[Any],
        inside: int,
    ) -> Step:
        pairs = flatten(tree)  # `data` is an alias without history, and no op: nothing is recorded of recording

        def replay(tensors: Sequence[Any]) -> list[Any]:
            return call(rebuild(tree, iter(tensors)))

        step = Step(
            kind, name, where, replay, [x.data for _, x in pairs], [label for label, _ in pairs],
            [y.data for y in outputs], _options(tree), inside,
        )  # fmt: skip
        step.gradients = [None] * len(outputs)
        step.versions = [y._version for y in outputs]
        self.steps.append(step)
        for i, y in enumerate(outputs):
            if y.requires_grad and y.dtype.is_floating_point:
                self._handles.append(y.register_hook(lambda gradient, i=i: self._arrived(step, i, gradient)))
        return step

    def _arrived(self, step: Step, i: int, gradient: Tensor) -> None:
        self._walking = True
        step.gradients[i] = gradient


def record(model: Any = None) -> Recording:
    """A Recording, to be used with `with`; model is the nn.Module whose modules are to be named, or None."""
    return Recording(model)


def without_data(steps: Sequence[Step], model: Any) -> bool:
    """Whether some of `steps` hold no element and none computes with data: with what is neither empty, nor a value of
    the model, nor made of nothing but these (the sum of no elements, rope's tables). Both runs agree on all of that.
    """
    known: dict[int, str] = {}  # address -> "model" or "empty"; everything else is data
    if isinstance(model, nn.Module):
        known = {x.data_ptr(): "model" for _, x in [*model.named_parameters(), *model.named_buffers()] if x.numel()}
    found = set()
    for step in steps:
        kinds = {known.get(x.data_ptr(), "data") if x.numel() else "empty" for x in step.inputs}
        kind = next((kind for kind in ("data", "empty") if kind in kinds), "model")
        if step.outputs and not any(y.numel() for y in step.outputs):
            kind = "empty"
        found.add(kind)
        for y in step.outputs:
            if kind == "data":
                known.pop(y.data_ptr(), None)  # written into in place
            elif y.numel():
                known[y.data_ptr()] = kind
    return "empty" in found and "data" not in found
