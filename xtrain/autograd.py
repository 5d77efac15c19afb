"""Gradients from Python: switching recording off and on, custom functions, activation recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import _C

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    _P = ParamSpec("_P")

_R = TypeVar("_R")
_Tensor = _C.Tensor
_set_grad_enabled = _C.set_grad_enabled
_is_grad_enabled = _C.is_grad_enabled
_CO_GENERATOR = 0x20


class _GradMode:
    """Context manager and decorator; the mode belongs to the calling thread."""

    mode: bool = False
    _switch: Callable[[bool], bool] = staticmethod(_set_grad_enabled)  # to a mode; returns the one before
    _previous: list[bool]

    @overload
    def __new__(cls) -> Self: ...
    @overload
    def __new__(cls, function: Callable[_P, _R]) -> Callable[_P, _R]: ...
    def __new__(cls, function: Any = None) -> Any:
        self = object.__new__(cls)
        self._previous = []
        return self if function is None else self(function)  # `@no_grad` without parentheses

    def __enter__(self) -> Self:
        self._previous.append(self._switch(self.mode))
        return self

    def __exit__(self, *_: object) -> None:
        self._switch(self._previous.pop())

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & _CO_GENERATOR:
            raise TypeError(
                f"{type(self).__name__}: cannot decorate the generator {function.__name__}, use `with` inside it"
            )
        mode, switch = self.mode, self._switch

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            previous = switch(mode)
            try:
                return function(*args, **kwargs)
            finally:
                switch(previous)

        return wrapper


class no_grad(_GradMode):
    """Nothing is recorded inside: results do not require gradients. `with no_grad():` or `@no_grad()`."""

    mode = False


class inference_mode(_GradMode):
    """no_grad by another name: `with inference_mode():`, `@inference_mode()`. inference_mode(False) switches recording
    on. Tensors made inside are ordinary ones, which may be recorded later.
    """

    def __new__(cls, mode: Any = True) -> Any:
        if callable(mode):  # `@inference_mode` without parentheses
            return super().__new__(cls, mode)
        self: Any = super().__new__(cls)
        self.mode = not mode
        return self


class enable_grad(_GradMode):
    """Recording is on inside, also within `no_grad`. `with enable_grad():` or `@enable_grad()`."""

    mode = True


class recompute(_GradMode):
    """Outputs of norms (rms_norm, layer_norm, add_rms_norm, add_layer_norm, qk_norm_rope), rope and swiglu (also inside
    swiglu_mlp) that are made inside are not kept for backward, but computed there again, from what is kept anyway.
    `with recompute():` or `@recompute()`.

    Memory goes, and one run of each such op comes; results and gradients have the same bits. The mode belongs to the
    calling thread. `checkpoint` has a second forward of its own: use both inside of what it runs. An input of such an
    op that was changed in place before backward is a RuntimeError.
    """

    mode = True
    _switch = staticmethod(_C.set_recompute)


class set_grad_enabled(_GradMode):
    """Switches recording to `mode` at once; used as a context manager, restores the earlier mode at the end of the
    block.
    """

    def __new__(cls, mode: bool) -> Self:
        self = object.__new__(cls)
        self.mode = bool(mode)
        self._previous = [_is_grad_enabled()]
        _set_grad_enabled(self.mode)
        return self

    def __enter__(self) -> Self:
        _set_grad_enabled(self.mode)
        return self

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        _set_grad_enabled(self._previous[-1])  # a decorator acts in the calls, not where it stands
        return super().__call__(function)


class FunctionContext:
    """What `forward` leaves for `backward`. Any attribute may be set on it.

    needs_input_grad: one bool per argument of forward.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._saved: tuple[_Tensor | None, ...] = ()
        self._versions: tuple[int | None, ...] = ()
        self._not_differentiable: tuple[_Tensor, ...] = ()

    if TYPE_CHECKING:  # what forward leaves here may be anything

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: _Tensor | None) -> None:
        """Keeps tensors (or None) for backward; a later in-place change of one of them is detected there."""
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, _Tensor):
                raise TypeError(f"save_for_backward: arguments must be tensors or None, got {type(tensor).__name__}")
        # Aliases without a grad record: saving an output must not tie it to itself.
        self._saved = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        self._versions = tuple(None if tensor is None else tensor._version for tensor in tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved tensors, a Tensor or None each. RuntimeError for one that has been changed in place since."""
        for index, (tensor, version) in enumerate(zip(self._saved, self._versions, strict=True)):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    f"saved_tensors: tensor {index} of shape {tuple(tensor.shape)} must not be changed in place before "
                    f"backward, got version {tensor._version} instead of {version}"
                )
        return self._saved

    def mark_non_differentiable(self, *outputs: _Tensor) -> None:
        """These outputs of forward get no gradient (integers and booleans never do)."""
        self._not_differentiable = outputs


class Function:
    """An operation with its own derivative: subclass with two static methods and call `apply`.

        class Square(xt.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, dy):
                (x,) = ctx.saved_tensors
                return 2 * x * dy

        y = Square.apply(x)

    forward gets any arguments, runs without recording and returns a tensor or a tuple of tensors. backward gets one
    gradient per output and returns one tensor or None per argument of forward. Gradients of gradients are not recorded.
    """

    @staticmethod
    def forward(ctx: FunctionContext, *args: Any, **kwargs: Any) -> Any:
        """The result, a tensor or a tuple of tensors, for the arguments of `apply`."""
        raise NotImplementedError("Function: a subclass must define forward(ctx, *args)")

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Any, **kwargs: Any) -> Any:
        """Take the gradients of the outputs of forward; return those of its arguments, a tensor or None each."""
        raise NotImplementedError("Function: a subclass must define backward(ctx, *grads)")

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call forward and record its derivative. TypeError when forward returns anything but tensors."""
        recording = _is_grad_enabled()
        needs = tuple(isinstance(arg, _Tensor) and arg.requires_grad for arg in args)
        ctx = FunctionContext(needs)
        _set_grad_enabled(False)
        try:
            result = cls.forward(ctx, *args)
        finally:
            _set_grad_enabled(recording)
        if not recording or True not in needs:
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        where = [i for i, output in enumerate(outputs) if _is_differentiable(output, ctx)]
        if not where:
            return result
        rule = cls.backward
        count = len(outputs)

        def backward(*grads: Any) -> Any:
            if count != len(where):
                every: list[Any] = [None] * count
                for i, grad in zip(where, grads, strict=True):
                    every[i] = grad
                grads = tuple(every)
            return rule(ctx, *grads)

        inputs = [arg if isinstance(arg, _Tensor) else None for arg in args]
        attached = _C.function_apply(cls.__name__, backward, inputs, tuple(outputs[i] for i in where))
        if not isinstance(result, tuple):
            return attached[0]
        outputs = list(outputs)
        for i, output in zip(where, attached, strict=True):
            outputs[i] = output
        return tuple(outputs)


def _is_differentiable(output: Any, ctx: FunctionContext) -> bool:
    if not isinstance(output, _Tensor):
        raise TypeError(f"Function: forward must return a tensor or a tuple of tensors, got {type(output).__name__}")
    return output.dtype.is_floating_point and not any(output is other for other in ctx._not_differentiable)


class _Checkpoint(Function):
    @staticmethod
    def forward(ctx: FunctionContext, function: Callable[..., Any], _anchor: _Tensor | None, *args: Any) -> Any:
        ctx.function = function
        ctx.args = tuple(None if isinstance(arg, _Tensor) else arg for arg in args)
        ctx.save_for_backward(*(arg if isinstance(arg, _Tensor) else None for arg in args))
        ctx.random_state = _C.get_rng_state()
        result, leaves = _C.reads_of(function, args)
        ctx.read = [(leaf, leaf._version) for leaf in leaves]
        return result

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        args = []
        for leaf, version in ctx.read:
            if leaf._version != version:
                raise RuntimeError(
                    f"checkpoint: a parameter of shape {tuple(leaf.shape)} that the function reads must not be changed "
                    f"in place before backward, got version {leaf._version} instead of {version}"
                )
        for tensor, other, need in zip(ctx.saved_tensors, ctx.args, needs, strict=True):
            if tensor is None:
                args.append(other)
            else:
                tensor = tensor.detach()
                args.append(tensor.requires_grad_() if need else tensor)
        random_state = _C.get_rng_state()
        _C.set_rng_state(ctx.random_state)
        _set_grad_enabled(True)
        try:
            result = ctx.function(*args)
        finally:
            _set_grad_enabled(False)
            _C.set_rng_state(random_state)
        outputs = result if isinstance(result, tuple) else (result,)
        roots = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad and grad is not None
        ]
        if roots:
            _C.backward([output for output, _ in roots], [grad for _, grad in roots], False)
        return (None, None, *(arg.grad if need else None for arg, need in zip(args, needs, strict=True)))


def checkpoint(function: Callable[..., _R], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> _R:
    """function(*args, **kwargs) without keeping its activations: backward runs it again (Chen et al. 2016).

    The second run starts from the random state of the first one, so dropout masks and results are the same bits, and so
    are all gradients. Gradients reach tensor arguments and every parameter that the function uses. `use_reentrant` is
    accepted for PyTorch scripts and has no effect. What `function` reads must be the same in both runs. A tensor
    argument that was changed in place before backward is a RuntimeError, and so is a parameter that requires a gradient
    and that an op of the first run read in this thread. Other changes are not noticed.
    """
    if not _is_grad_enabled():
        return function(*args, **kwargs)
    if kwargs:  # as arguments, so that gradients reach tensors among them
        plain, count, names = function, len(args), tuple(kwargs)
        args = (*args, *kwargs.values())

        def packed(*values: Any) -> _R:
            return plain(*values[:count], **dict(zip(names, values[count:], strict=True)))

        function = packed

    # Parameters hidden in `function` need a recorded node even when no argument requires a gradient.
    anchored = any(isinstance(arg, _Tensor) and arg.requires_grad for arg in args)
    anchor = None if anchored else _C.empty((0,), _C.float32).requires_grad_()
    return _Checkpoint.apply(function, anchor, *args)
