"""Module, the base of all layers, and Parameter.

A Module keeps its parameters, buffers and sub-modules as plain attributes; `parameters()`, `state_dict()` and the rest
find them by type.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from .. import _C
from .._C import Tensor
from .._types import Device
from ..autograd import no_grad

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    _P = ParamSpec("_P")
    _R = TypeVar("_R", covariant=True)

    class _Defined(Protocol[_P, _R]):
        """What has a `forward`: calling a module takes and returns what the forward of its class does."""

        _forward_hooks: list[Callable[..., Any]] | None
        _forward_pre_hooks: list[Callable[..., Any]] | None

        def forward(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


class LoadResult(NamedTuple):
    """What load_state_dict returns: names that only one of the two sides has."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Parameter(Tensor):
    """A tensor that a Module owns and an optimizer changes. Shares memory with `data`; requires a gradient unless told
    otherwise.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Self:
        return _C.make_subclass(cls, data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self)(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:
        return "Parameter containing:\n" + super().__repr__()


class Module:
    """Base of all layers: define `forward`, assign parameters and sub-modules as attributes in `__init__`."""

    training: bool = True
    _buffers: dict[str, bool] | None = None  # name -> persistent, made by register_buffer
    _forward_hooks: list[Callable[..., Any]] | None = None
    _forward_pre_hooks: list[Callable[..., Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}: forward must be defined")

    _defined_forward = forward  # of each class, so that is_stock sees when a class was given another one later

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._defined_forward = cls.forward

    def __call__(self: _Defined[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._forward_pre_hooks:
            for hook in tuple(self._forward_pre_hooks):
                changed: Any = hook(self, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)  # pyright: ignore[reportAssignmentType]
        result = self.forward(*args, **kwargs)
        if self._forward_hooks:
            for hook in tuple(self._forward_hooks):
                changed = hook(self, args, result)
                if changed is not None:
                    result = changed
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for run in _packed(p for p in self.parameters() if id(p) not in memo):
            for parameter, copied in zip(run, _packed_copies(run), strict=True):
                memo[id(parameter)] = copied
        reduced: Any = self.__reduce_ex__(4)  # as copy.deepcopy does it for other classes
        rebuild, arguments, state = reduced[:3]
        copied = memo[id(self)] = rebuild(*arguments)
        state = deepcopy(state, memo)
        if hasattr(copied, "__setstate__"):
            copied.__setstate__(state)
        else:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            copied.__dict__.update(attributes)
            for name, value in (slots or {}).items():
                object.__setattr__(copied, name, value)
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            isinstance(value, Tensor)
            and not isinstance(value, Parameter)
            and isinstance(self.__dict__.get(name), Parameter)
        ):
            raise TypeError(
                f"{type(self).__name__}: parameter {name} must be replaced by a Parameter or None, got a Tensor"
            )
        object.__setattr__(self, name, value)

    # ---- what is inside

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of the direct sub-modules, each module once."""
        seen: set[int] = set()
        for name, value in self.__dict__.items():
            if isinstance(value, Module) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def children(self) -> Iterator[Module]:
        """The direct sub-modules."""
        for _, module in self.named_children():
            yield module

    def named_modules(self, memo: set[int] | None = None, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(dotted name, module) of this module and all below it, each module once, parents first."""
        memo = set() if memo is None else memo
        if id(self) in memo:
            return
        memo.add(id(self))
        yield prefix, self
        for name, value in self.__dict__.items():
            if isinstance(value, Module):
                yield from value.named_modules(memo, f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once, in the order of named_modules."""
        found: dict[int, Module] = {}
        left: list[Module] = [self]
        while left:
            module = left.pop()
            if id(module) in found:
                continue
            found[id(module)] = module
            below: list[Module] = []
            for value in module.__dict__.values():
                if isinstance(value, Module):
                    below.append(value)
            below.reverse()
            left += below
        return iter(found.values())

    def _own(self, buffers: bool) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of this module alone."""
        kept = self._buffers or {}
        for name, value in self.__dict__.items():
            if buffers:
                if name in kept and value is not None:
                    yield name, value
            elif isinstance(value, Parameter):
                yield name, value

    def _named_tensors(
        self, buffers: bool, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for module_name, module in self.named_modules(prefix=prefix) if recurse else ((prefix, self),):
            for name, tensor in module._own(buffers):
                if not remove_duplicate or id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{module_name}.{name}" if module_name else name, tensor

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """(dotted name, Parameter); a parameter that is shared comes once, under its first name."""
        return self._named_tensors(False, prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """All parameters, each once."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(dotted name, Tensor) of the buffers."""
        return self._named_tensors(True, prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All buffers, each once."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """A tensor (or None) that moves with the module but is not trained; persistent ones are part of state_dict.

        ValueError for a name that has a dot or is taken.
        """
        if (
            not isinstance(name, str)
            or not name
            or "." in name
            or (hasattr(self, name) and name not in (self._buffers or ()))
        ):
            raise ValueError(f"register_buffer: name must be a new name without a dot, got {name!r}")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"register_buffer: tensor must be a Tensor or None, got {type(tensor).__name__}")
        object.__setattr__(self, "_buffers", {**(self._buffers or {}), name: bool(persistent)})
        setattr(self, name, tensor)

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """The same as assigning the attribute."""
        if parameter is not None and not isinstance(parameter, Parameter):
            raise TypeError(
                f"register_parameter: parameter must be a Parameter or None, got {type(parameter).__name__}"
            )
        setattr(self, name, parameter)

    def add_module(self, name: str, module: Module | None) -> None:
        """The same as assigning the attribute."""
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"add_module: module must be a Module or None, got {type(module).__name__}")
        setattr(self, name, module)

    def register_forward_hook(self, hook: Callable[[Any, tuple[Any, ...], Any], Any]) -> _HookHandle:
        """Calls hook(module, args, result) after every forward; what it returns, if not None, replaces the result.

        Returns a handle whose remove() ends it.
        """
        object.__setattr__(self, "_forward_hooks", [*(self._forward_hooks or ()), hook])
        return _HookHandle(self, "_forward_hooks", hook)

    def register_forward_pre_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> _HookHandle:
        """Calls hook(module, args) before every forward, args being the positional ones; what it returns, if not None,
        replaces them: a tuple, or a single argument.

        Returns a handle whose remove() ends it.
        """
        object.__setattr__(self, "_forward_pre_hooks", [*(self._forward_pre_hooks or ()), hook])
        return _HookHandle(self, "_forward_pre_hooks", hook)

    # ---- reading and writing all values

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """{dotted name: tensor} of parameters and persistent buffers; the tensors share memory with the module."""
        state: dict[str, Tensor] = {}
        for module_name, module in self.named_modules(prefix=prefix.removesuffix(".")):
            start = f"{module_name}." if module_name else ""
            for name, tensor in module._own(False):
                state[start + name] = tensor.detach()
            for name, tensor in module._own(True):
                if (module._buffers or {})[name]:
                    state[start + name] = tensor.detach()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> LoadResult:
        """Copies the values in, casting to this module's dtypes. Nothing is changed unless everything fits.

        ValueError names missing and unexpected keys (only when strict) and every shape that differs. Returns
        (missing_keys, unexpected_keys).
        """
        own = self.state_dict()
        name = type(self).__name__
        missing = [key for key in own if key not in state_dict]
        unexpected = [key for key in state_dict if key not in own]
        if strict and (missing or unexpected):
            raise ValueError(
                f"load_state_dict: keys must be those of {name}, got missing {_some(missing)} "
                f"and unexpected {_some(unexpected)}"
            )
        for key, tensor in own.items():
            value = state_dict.get(key, tensor)
            if not isinstance(value, Tensor):
                raise TypeError(f"load_state_dict: {key} must be a Tensor, got {type(value).__name__}")
            if tuple(value.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"load_state_dict: {key} must have shape {tuple(tensor.shape)}, got {tuple(value.shape)}"
                )
        with no_grad():
            for key, tensor in own.items():
                if key in state_dict:
                    tensor.copy_(state_dict[key])
        return LoadResult(missing, unexpected)

    # ---- changing all of it

    def apply(self, function: Callable[[Module], object]) -> Self:
        """Calls function(module) for every module, children first; returns self."""
        for module in self.children():
            module.apply(function)
        function(self)
        return self

    def train(self, mode: bool = True) -> Self:
        """Training mode on or off (dropout looks at it), here and below; returns self."""
        for module in self.modules():
            object.__setattr__(module, "training", bool(mode))
        return self

    def eval(self) -> Self:
        """train(False)."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes or unfreezes all parameters; returns self."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, or fills them with zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill_(0)

    def to(self, *args: _C.dtype | _C.device | str, dtype: _C.dtype | None = None, device: Device = None) -> Self:
        """Casts floating parameters and buffers to a dtype and moves them to a device; returns self.

        to(dtype), to(device), to(device, dtype) or keywords. Parameters that are shared stay shared, and those that lie
        together in memory (see `pack`) stay together. Converted parameters are new objects: make the optimizer after
        this call. Gradients are dropped by a conversion.
        TypeError for an integer dtype.
        """
        for arg in args:
            if isinstance(arg, _C.dtype):
                dtype = arg
            elif isinstance(arg, (str, _C.device)):
                device = arg
            else:
                raise TypeError(f"to: arguments must be a dtype or a device, got {type(arg).__name__}")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"to: dtype must be a floating dtype, got {dtype.name}")
        place = None if device is None else _C.device(device)
        converted: dict[int, Tensor] = {}
        runs = [run for run in _packed(self.parameters()) if len(run) > 1]
        for module in self.modules():
            for _, tensor in [*module._own(False), *module._own(True)]:
                if id(tensor) not in converted:
                    converted[id(tensor)] = _convert(tensor, module._dtype_for(dtype), place)
        for run in runs:
            new = [converted[id(parameter)] for parameter in run]
            if all(a is not b and a.dtype == new[0].dtype for a, b in zip(new, run, strict=True)):
                converted.update(zip(map(id, run), _packed_copies(new), strict=True))
        for module in self.modules():
            for name, tensor in [*module._own(False), *module._own(True)]:
                if converted[id(tensor)] is not tensor:
                    object.__setattr__(module, name, converted[id(tensor)])
        return self

    def _dtype_for(self, dtype: _C.dtype | None) -> _C.dtype | None:
        """What `to` makes of a dtype for this module's own tensors; hyper-connections stay wide."""
        return dtype

    def float(self) -> Self:
        """to(float32)."""
        return self.to(_C.float32)

    def double(self) -> Self:
        """to(float64)."""
        return self.to(_C.float64)

    def half(self) -> Self:
        """to(float16)."""
        return self.to(_C.float16)

    def bfloat16(self) -> Self:
        """to(bfloat16)."""
        return self.to(_C.bfloat16)

    def extra_repr(self) -> str:
        """The text between the brackets of repr; subclasses override it."""
        return ""

    def __repr__(self) -> str:
        runs: list[Any] = []  # [first name, last name, count, text]: equal neighbours take one line
        for name, module in self.named_children():
            text = repr(module).replace("\n", "\n  ")
            if runs and runs[-1][3] == text and name.isdecimal():
                runs[-1][1:3] = name, runs[-1][2] + 1
            else:
                runs.append([name, name, 1, text])
        lines = [
            f"  ({first}): {text}" if count == 1 else f"  ({first}-{last}): {count} x {text}"
            for first, last, count, text in runs
        ]
        extra = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({extra})"
        return "\n".join([f"{type(self).__name__}({extra}", *lines, ")"])

    def _repr_html_(self) -> str:
        """For notebooks: sizes of parameters, and members that open on a click."""
        from ..notebook import html

        return html.module(self)


_defined_call = Module.__call__


def is_stock(module: Any, kind: type[Module]) -> bool:
    """Whether calling `module` runs the forward that the class `kind` was defined with, and nothing else: its class is
    exactly `kind`, it has no hook, and nobody has replaced `forward` or `__call__`, of it or of the class.

    Code that computes with a member's parameters and does not call the member, as a fused op does, asks this in every
    forward and calls the member when the answer is False. The wrappers of testing.record do not count: a recording
    sees the ops that train.
    """
    if type(module) is not kind or module._forward_hooks or module._forward_pre_hooks:
        return False
    if kind.forward is not kind._defined_forward or kind.__call__ is not _defined_call:
        return False
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "records_stock", False)


# By the id of a module: the modes before its first block, and the number of blocks in each thread.
_evaluated: dict[int, tuple[list[tuple[Module, bool]], dict[int, int]]] = {}
_evaluating = threading.RLock()  # the collector may end a block of this thread inside another's beginning


def _forked() -> None:
    """The other threads are not in the child: nobody would let go of the lock, or end their blocks."""
    global _evaluating
    _evaluating = threading.RLock()
    for key, (first, blocks) in list(_evaluated.items()):
        for thread in blocks.keys() - {threading.get_ident()}:
            del blocks[thread]
        if not blocks:
            del _evaluated[key]
            for part, mode in first:
                object.__setattr__(part, "training", mode)


os.register_at_fork(after_in_child=_forked)


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Evaluation mode inside the block (no dropout), here and below; then each module has its own mode again. A
    class's own `eval` or `train` is not called. Several threads may evaluate one module: the last that ends gives the
    modes back which the first has found.
    """
    modes = [(part, part.training) for part in module.modules()]  # the one walk: `eval` would be another
    thread = threading.get_ident()
    with _evaluating:
        first, blocks = _evaluated.setdefault(id(module), (modes, {}))
        blocks[thread] = blocks.get(thread, 0) + 1
        for part, _ in modes:
            object.__setattr__(part, "training", False)
    try:
        yield
    finally:
        with _evaluating:
            blocks[thread] -= 1
            inside = blocks[thread] > 0  # another block of this thread
            if not inside:
                del blocks[thread]
            if not blocks:
                del _evaluated[id(module)]
            if len(blocks) == inside:  # no other thread's
                for part, mode in modes if inside else first:
                    object.__setattr__(part, "training", mode)


def pack(*modules: Module, name: str = "weight") -> None:
    """Moves the parameter `name` of each module into one block of memory, one behind the other, where
    `_C.linear_joined` reads matrices as one operand.

    The parameters stay apart, each with its values, gradient and place in `state_dict`; they are new objects, as after
    `Module.to`, which keeps them together, as copy.deepcopy does. One dtype and device.
    """
    parameters = [getattr(module, name) for module in modules]
    for module, parameter in zip(modules, _packed_copies(parameters), strict=True):
        setattr(module, name, parameter)


_OPEN_RUNS = 8  # of parameters: how many are looked at for each


def _packed(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Runs of parameters that lie one behind the other. Weights and biases take turns: a run goes on behind others."""
    open_: list[list[Parameter]] = []  # the newest last
    for parameter in parameters:
        for run in reversed(open_):
            if run[-1].adjoins(parameter):
                run.append(parameter)
                break
        else:
            open_.append([parameter])
            if len(open_) > _OPEN_RUNS:
                yield open_.pop(0)
    yield from open_


def _packed_copies(parameters: Sequence[Any]) -> list[Any]:
    """New parameters with the same values, in one block."""
    tensors = _C.pack([parameter.detach() for parameter in parameters])
    return [type(p)(tensor, p.requires_grad) for p, tensor in zip(parameters, tensors, strict=True)]


class _HookHandle:
    def __init__(self, module: Module, kind: str, hook: Callable[..., Any]) -> None:
        self._module: Module | None = module
        self._kind, self._hook = kind, hook  # kind: the attribute that lists it

    def remove(self) -> None:
        """Ends the hook; a second call does nothing."""
        if self._module is not None:
            (getattr(self._module, self._kind) or []).remove(self._hook)
            self._module = None


def _some(names: list[str], most: int = 5) -> str:
    text = ", ".join(names[:most]) or "none"
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def _convert(tensor: Tensor, dtype: _C.dtype | None, device: _C.device | None) -> Tensor:
    want = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if tensor.dtype == want and (device is None or tensor.device == device):
        return tensor
    data = tensor.detach().to(want)
    if device is not None:
        data = data.to(device)
    return type(tensor)(data, tensor.requires_grad) if isinstance(tensor, Parameter) else data
