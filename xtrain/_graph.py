"""Steps that a CUDA device records once and then repeats as a whole: xt.cuda.graph (docs/internals/graphs.md)."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from . import _C
from ._C import Tensor
from ._draw import CapturedGenerator
from ._types import is_whole
from .autograd import no_grad

_R = TypeVar("_R")
_this_thread = threading.local()


def capturing() -> Graph[Any] | None:
    """The graph whose step this thread is capturing; None outside."""
    return getattr(_this_thread, "graph", None)


class Graph(Generic[_R]):
    """What xt.cuda.graph returns.

    captured: whether calls are replays by now. launches: kernels and copies of the device that one replay makes.
    memory: bytes that the graph holds for the tensors of the step.
    """

    def __init__(
        self,
        step: Callable[..., _R],
        optimizers: Iterable[Any],
        warmup: int,
        device: _C.device | None,
        collect: bool = True,
    ) -> None:
        if not callable(step):
            raise TypeError(f"cuda.graph: step must be callable, got {type(step).__name__}")
        if not is_whole(warmup) or warmup < 1:
            raise ValueError(f"cuda.graph: warmup must be an integer of at least 1, got {warmup!r}")
        self._step, self._warmup, self._collect = step, warmup, collect
        self._optimizers = [part for one in optimizers for part in getattr(one, "optimizers", [one])]
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise TypeError(f"cuda.graph: optimizers must be optimizers, got {type(optimizer).__name__}")
        places = (p.device for one in self._optimizers for group in one.param_groups for p in group["params"])
        self._device = device or next((one for one in places if one.type == "cuda"), _C.device("cuda"))
        self._inputs: tuple[Tensor, ...] | None = None  # tensors on the device, the same ones in each call
        self._eager_calls = 0
        self._handle: Any = None  # the captured graph of the C core
        self._outputs: Any = None  # the tensors that each replay writes
        self._kept: list[Tensor] = []  # tensors from outside the step whose memory replays read or write
        self._fixed: list[Any] = []  # options and states of the optimizers at the capture (see _fixed)
        self._draws = False  # whether eager runs have drawn random numbers
        self._generator: CapturedGenerator | None = None  # the random state of a captured step that draws
        # Set where the step has exchanges with other processes. It is called with the function that replays, so that
        # the replay counts as an exchange.
        self.around: Callable[[Callable[[], None]], None] | None = None
        self.attempt = 0  # number of captures so far: one may fail and be tried again
        self._ended = ""  # the error of further calls, after `end`
        self._seen: list[Any] | None = None  # states and options of the optimizers at the last _prepare, which passed
        self.launches = 0
        self.memory = 0

    @property
    def captured(self) -> bool:
        return self._handle is not None

    @property
    def ready(self) -> bool:
        """Whether the next call captures: the eager runs are done."""
        return not self.captured and self._eager_calls >= self._warmup and not _C.cuda_waits(self._device)

    def __call__(self, *inputs: Tensor) -> _R:
        """One step: eager, or a replay. Return its outputs, which are valid until the next call."""
        if self._ended:
            raise RuntimeError(self._ended)
        self._load(inputs)
        if self.ready:
            self._capture()
        if not self.captured:
            return self._run_eagerly()
        self._prepare()
        if self._generator is not None:
            self._generator.write()
        if self.around is None:
            _C.cuda_replay(self._handle)
        else:
            self.around(lambda: _C.cuda_replay(self._handle))
        if self._generator is not None:
            self._generator.skip()
        return self._outputs

    def end(self, why: str) -> None:
        """Give the captured step back. why: a sentence, which later calls raise as a RuntimeError."""
        self._handle, self._outputs, self._kept, self._ended = None, None, [], why

    def capture(self, *inputs: Tensor) -> None:
        """Capture the step now, which runs nothing: the next call is the first replay. RuntimeError before the eager
        runs are done, and where a call would raise. A capture that fails changes nothing, and may be tried again.
        """
        if self.captured:
            return
        if not self.ready:
            raise RuntimeError(
                f"cuda.graph: the step must have run {self._warmup} times before its capture, got {self._eager_calls}"
                if self._eager_calls < self._warmup
                else "cuda.graph: nothing can be captured while XTRAIN_CUDA_SYNC=1 waits after every kernel"
            )
        self._load(inputs)
        self._capture()

    # ---- inputs and outputs --------------------------------------------------------------------------------------

    @no_grad()
    def _load(self, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs, in the order of the stream, to where the step reads them."""
        for number, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"cuda.graph: argument {number} must be a Tensor, got {type(tensor).__name__}: what does not "
                    "change belongs into the step, by functools.partial for example"
                )
            if tensor.requires_grad:
                raise ValueError(f"cuda.graph: argument {number} must not require a gradient, which would go to a copy")
        if self._inputs is None:
            self._inputs = tuple(_C.empty(x.shape, x.dtype, self._device) for x in inputs)
        if len(inputs) != len(self._inputs):
            raise ValueError(
                f"cuda.graph: the step must get {len(self._inputs)} tensors as in its first call, got {len(inputs)}"
            )
        for number, (tensor, own) in enumerate(zip(inputs, self._inputs, strict=True)):
            for what, got, wanted in (
                ("shape", tuple(tensor.shape), tuple(own.shape)),
                ("dtype", tensor.dtype, own.dtype),
            ):
                if got != wanted:
                    raise ValueError(
                        f"cuda.graph: argument {number} must have {what} {wanted} as in the first call, got {got}: "
                        "another graph can have others"
                    )
        for tensor, own in zip(inputs, self._inputs, strict=True):
            own.copy_(tensor)

    def _result(self, value: Any) -> Any:
        """The step's outputs without their history."""
        if value is None:
            return None
        if type(value) in (tuple, list):
            return type(value)(self._result(item) for item in value)
        if type(value) is dict:
            return {key: self._result(item) for key, item in value.items()}
        if not isinstance(value, Tensor):
            raise TypeError(
                "cuda.graph: the step must return tensors, in tuples, lists and dicts, or None, "
                f"got {type(value).__name__}, which no replay could change"
            )
        if value.device != self._device:
            raise ValueError(f"cuda.graph: the step must return tensors on {self._device}, got one on {value.device}")
        return value.detach()

    # ---- eager runs ----------------------------------------------------------------------------------------------

    def _run_eagerly(self) -> _R:
        """Run the step itself. The last of the `warmup` runs also measures its memory."""
        assert self._inputs is not None
        rng = _C.get_rng_state()
        with self._planning() if self._eager_calls == self._warmup - 1 else contextlib.nullcontext():
            outputs = self._result(self._step(*self._inputs))
        self._eager_calls += 1
        self._draws = self._draws or _C.get_rng_state() != rng
        return outputs

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """A `with` block that sets `memory` to the bytes that the step inside needs at once."""
        with _no_collection(self._collect):
            _C.cuda_plan(self._device)
            try:
                yield
            finally:
                self.memory = _C.cuda_planned(self._device)

    # ---- the capture ---------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """Record the step into a graph. Its kernels do not run, and an exception leaves everything as it was."""
        assert self._inputs is not None
        self.around = None
        self.attempt += 1
        self._prepare()  # a learning rate written inside would be written by each replay
        rng = _C.get_rng_state()
        generator = CapturedGenerator(self._device) if self._draws else None
        kept: dict[int, Tensor] = {}  # by address: what the step uses of memory from outside
        leaves: dict[int, Tensor] = {}  # by id: those of them that get a gradient
        with _no_collection(self._collect):
            handle = _C.cuda_capture(self._device, self.memory)
            launches, outputs, done = 0, None, False
            before = _C.set_call_hook(None, thread=True)
            _C.set_call_hook(self._keeper(handle, kept, leaves, before), thread=True)
            outer, _this_thread.graph = capturing(), self
            fixed = [_fixed(optimizer) for optimizer in self._optimizers]
            try:
                with generator.installed() if generator is not None else contextlib.nullcontext():
                    outputs = self._result(self._step(*self._inputs))
                self._check_optimizers(fixed)
                done = True
            finally:
                _this_thread.graph = outer
                _C.set_call_hook(before, thread=True)
                if not done:
                    _C.set_rng_state(rng)
                    self._drop_gradients(handle, leaves.values())
                launches = _C.cuda_end_capture(handle, done)
        for leaf in leaves.values():  # a gradient from before, which the step adds to
            if leaf.grad is not None and not _C.cuda_graph_owns(handle, leaf.grad):
                kept[leaf.grad.data_ptr()] = leaf.grad.detach()
        self._seen = None  # a learning rate may have been written to the device for the first time
        self._kept, self._fixed = list(kept.values()), fixed
        self._generator = generator
        self._handle, self._outputs, self.launches = handle, outputs, launches

    def _drop_gradients(self, handle: Any, leaves: Iterable[Tensor]) -> None:
        """Set every .grad in the graph's memory to None: the capture has failed, so nothing has computed it."""
        known = (p for one in self._optimizers for group in one.param_groups for p in group["params"])
        for leaf in (*leaves, *known):
            if leaf.grad is not None and _C.cuda_graph_owns(handle, leaf.grad):
                leaf.grad = None

    def _keeper(
        self, handle: Any, kept: dict[int, Tensor], leaves: dict[int, Tensor], before: Callable[..., Any] | None
    ) -> Callable[..., None]:
        """A call hook of this thread that puts every tensor from outside the step into `kept`: replays use its memory,
        even if nobody else refers to it any more. Leaves that the step itself makes, as a recomputation does, are not
        kept, because the plan counts on their memory being used again. before: the hook that was there, which is
        called, too.
        """

        def see(op: Any, arguments: dict[str, Any], outputs: tuple[Tensor, ...]) -> None:
            for value in arguments.values():
                for tensor in value if isinstance(value, tuple) else (value,):
                    if not isinstance(tensor, Tensor) or tensor.device != self._device or tensor.numel() == 0:
                        continue
                    if _C.cuda_graph_owns(handle, tensor):
                        continue
                    kept.setdefault(tensor.data_ptr(), tensor.detach())
                    if tensor.requires_grad and tensor.is_leaf:
                        leaves.setdefault(id(tensor), tensor)
            if op.__name__ in ("adamw_", "muon_"):
                self._check_known(arguments.get("lrs") or [arguments["lr"]])
            if before is not None:
                before(op, arguments, outputs)

        return see

    # ---- optimizers ----------------------------------------------------------------------------------------------

    def _check_known(self, lrs: Iterable[Tensor]) -> None:
        """RuntimeError where a learning rate on the device is not one that an optimizer of this graph has written."""
        rates = (tensor.data_ptr() for one in self._optimizers for _, tensor in getattr(one, "_rates", {}).values())
        if {lr.data_ptr() for lr in lrs} - set(rates):
            raise RuntimeError(
                "cuda.graph: the step uses an optimizer that the graph does not know, so its learning rate would stay "
                "as it is: pass it in optimizers"
            )

    def _check_optimizers(self, before: list[Any]) -> None:
        """RuntimeError where the captured step made states or changed learning rates. before: see _fixed."""
        for optimizer, (_, states, _, rates) in zip(self._optimizers, before, strict=True):
            name = type(optimizer).__name__
            if len(optimizer.state) != states:
                raise RuntimeError(
                    f"cuda.graph: {name} must have the state of every parameter before the capture, and some parameter "
                    "had its first step in it"
                )
            if _rates(optimizer) != rates:
                raise RuntimeError(
                    f"cuda.graph: a captured step must not change the learning rate of {name}: set it before the call"
                )

    def _prepare(self) -> None:
        """Write changed learning rates to the device; refuse other changes, which replays would not see."""
        found = [(one.state, _options(one)) for one in self._optimizers]
        if self._seen is not None and all(
            new[0] is old[0] and new[1] is not None and new[1] == old[1]
            for new, old in zip(found, self._seen, strict=True)
        ):
            return
        self._seen = None
        for optimizer, (state, _, options, _) in zip(self._optimizers, self._fixed):
            name = type(optimizer).__name__
            if optimizer.state is not state or len(optimizer.param_groups) != len(options):
                raise RuntimeError(
                    f"cuda.graph: the state and the groups of {name} must stay those of the capture, and were "
                    "replaced: make a new graph"
                )
            for group, captured in zip(optimizer.param_groups, options, strict=True):
                for option, value in captured.items():
                    if group[option] != value:
                        raise ValueError(
                            f"cuda.graph: {option} of {name} must stay {value!r} as captured, got {group[option]!r}: "
                            "make a new graph"
                        )
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                optimizer._check(group)
            for index, device in list(getattr(optimizer, "_rates", {})):
                optimizer._rate(index, device, float(optimizer.param_groups[index]["lr"]))
        self._seen = found


def _options(optimizer: Any) -> list[list[Any]] | None:
    """The options of each group; None when one is a tensor, which may have changed in place."""
    found = [[value for key, value in group.items() if key != "params"] for group in optimizer.param_groups]
    return None if any(isinstance(value, Tensor) for values in found for value in values) else found


def _rates(optimizer: Any) -> dict[Any, float]:
    """The learning rates that an optimizer has written to devices."""
    return {key: lr for key, (lr, _) in getattr(optimizer, "_rates", {}).items()}


def _fixed(optimizer: Any) -> tuple[Any, int, list[dict[str, Any]], dict[Any, float]]:
    """What a capture fixes of an optimizer: (state, number of parameters in it, options of each group, learning rates
    written to devices).
    """
    rates = _rates(optimizer)
    free = ("params", "initial_lr", *(("lr",) if hasattr(optimizer, "_rates") else ()))
    options = [{k: v for k, v in group.items() if k not in free} for group in optimizer.param_groups]
    return optimizer.state, len(optimizer.state), options, rates


@contextlib.contextmanager
def _no_collection(first: bool) -> Iterator[None]:
    """A `with` block without garbage collection, so that the planned and the captured step free their tensors at the
    same places. first: collect before it, so that no memory is held by garbage alone.
    """
    if first:
        gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
