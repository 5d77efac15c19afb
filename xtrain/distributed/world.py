"""The public functions of xtrain.distributed: joining and leaving the processes of a run, and exchanges."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _C
from .._C import Tensor
from .._types import is_whole
from .._version import __version__
from ..errors import ConfigError, NonFiniteError, PeerError, shown
from . import agree
from .env import ALONE, Launch, detect

if TYPE_CHECKING:
    from .host import HostPlane
    from .watch import Watch

_launch: Launch | None = None  # rank, world size and launcher; None before init
_plane: HostPlane | None = None  # moves bytes between ranks; None before init, and in one process
_watch: Watch | None = None  # the watchdog; None as `_plane`
_hooked = False  # whether the hooks of this process are set
_in_order = True  # whether this process has left without an error


def init(timeout: float = 300.0) -> None:
    """Join the processes that torchrun, mpirun, srun or variables of your own have started: see
    docs/how-to/distributed.md. A process alone, and one that has joined, does nothing.

    Every rank must call it. ConfigError for variables that are missing or wrong, a port that is taken, a token that
    differs, and ranks with other versions. PeerError when a rank has not come after `timeout` seconds.
    """
    global _launch, _plane, _watch
    if _launch is not None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise ValueError(f"init: timeout must be a number of seconds in (0, 1e6], got {shown(timeout)}")
    launch = detect()
    if launch.world_size > 1:
        from .host import HostPlane
        from .meeting import find_others
        from .progress import COMPUTING, Progress, times
        from .store import meet
        from .watch import Watch

        limits = times()
        launch = find_others(launch)
        plane, talks, pulses = meet(launch, timeout, 3)
        progress = Progress()
        # The watchdog ends exchanges that wait for too long. This is for the case that it has failed.
        last = 2 * max(limits.timeout, limits.patience)
        _plane = HostPlane(launch.rank, launch.world_size, plane, last, progress)
        _watch = Watch(launch.rank, launch.world_size, progress, talks, pulses, limits, _plane.abort)
        _launch = launch
        _set_hooks()
        try:
            _watch.start()
            _plane.watch = _watch
            check_same(_about_this_process(), "")
            _choose_plane(launch)
        except BaseException as error:
            _leave(_reason(error), False)
            raise
        progress.enter(COMPUTING)
    _launch = launch


def _choose_plane(launch: Launch) -> None:
    """Replace the host plane by the MPI plane, if plane_of chooses it."""
    global _plane
    from .choice import plane_of

    name: list[str] = []
    all_or_none(lambda: name.append(plane_of(launch)))
    check_same({"plane": name[0]}, "")
    if name[0] == "mpi" and _plane is not None:
        from . import mpi

        all_or_none(lambda: mpi.load(launch))
        check_same(mpi.versions(), "")
        all_or_none(lambda: mpi.start(launch))
        _plane = mpi.MpiPlane(_plane)


def _set_hooks() -> None:
    """Install handlers for the end of the process, for a forked child, and for a verdict that nobody catches."""
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)
        sys.excepthook = _ending_with_status(sys.excepthook)


def _ending_with_status(before: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that ends a script with one line and status 75 where others are lost; with status 2 where the
    watchdog has told a ConfigError.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PeerError) and not (isinstance(error, ConfigError) and error.told):
            before(kind, error, trace)
            return
        if os.environ.get("XTRAIN_DEBUG", "0") not in ("", "0"):
            before(kind, error, trace)
        elif not error.told:
            with contextlib.suppress(OSError, AttributeError):
                print(f"xtrain: error: {error}", file=sys.stderr)
        raise SystemExit(75 if isinstance(error, PeerError) else 2)

    return hook


def _in_child() -> None:
    """A forked child has no part in exchanges, and must not say anything on its parent's connections."""
    if _watch is not None:
        _watch.abandon()
    if _plane is not None:
        _plane.watch = None
        _plane.abandon(f"distributed: this process was forked from rank {_plane.rank}, and is no rank itself")


def set_timeout(seconds: float) -> None:
    """Seconds that others wait for a rank that computes; see Times."""
    if _watch is not None:
        _watch.set_timeout(seconds)


def phase(name: str) -> AbstractContextManager[None]:
    """A `with` block in which this rank is loading, evaluating or saving, which others wait for longer."""
    return contextlib.nullcontext() if _plane is None else _plane.progress.during(name)


def at_step(number: int) -> None:
    """A step of training begins, counted from 1."""
    if _plane is not None:
        _plane.progress.step = number


def steps_between_comparisons() -> int:
    """After how many steps the ranks compare their parameters."""
    return 1 << 62 if _watch is None else max(1, int(_watch.times.hashes))


def diverged(ranks: tuple[int, ...], text: str) -> Exception:
    """The error of a verdict that all ranks have found at once, for the caller to raise."""
    if _watch is not None:
        _watch.accuse("diverged", ranks, text)
    return (_watch.error() if _watch is not None else None) or PeerError(f"distributed: {text}")


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return _launch is not None


def _known() -> Launch:
    return _launch if _launch is not None else detect()


def rank() -> int:
    """The number of this process, from 0; also before `init`."""
    return _known().rank


def world_size() -> int:
    """The number of processes; also before `init`."""
    return _known().world_size


def local_rank() -> int:
    """The number of this process among those of its host, from 0."""
    return _known().local_rank


def local_world_size() -> int:
    """The number of processes on this host."""
    return _known().local_world_size


def launcher() -> str:
    """What started the processes: by hand, torchrun, Open MPI, MPICH, srun, Ray, or none."""
    return _known().launcher


def shutdown() -> None:
    """Leave the other processes. Ranks that call an exchange after that get a PeerError. Without `init` nothing
    happens. If you catch a PeerError and go on alone, call this at once: 5 s after a verdict the watchdog ends the
    process.
    """
    _leave(None, False)


def leave(error: BaseException) -> None:
    """Leave because of this error, which ends the others too, unless all ranks have raised it. After a verdict the
    watchdog still ends the process where it does not end itself.
    """
    _leave(_reason(error), True)


def _reason(error: BaseException) -> str | None:
    """What the others are told of an error that ends this rank; None where all ranks have raised it."""
    told = isinstance(error, ConfigError) and error.told  # of a verdict, which all have
    everywhere = isinstance(error, (NonFiniteError, PeerError)) or told or getattr(error, "on_all_ranks", False)
    return None if everywhere else why_left(error)


def _leave(why: str | None, ending: bool) -> None:
    global _launch, _plane, _watch, _in_order
    link, watch, _launch, _plane, _watch = _plane, _watch, None, None, None
    if watch is not None:
        watch.leave(why)
        if why is not None:
            from .watch import write_error_file

            write_error_file(why)
    if link is not None:
        link.leave(why)
        _in_order = why is None and (watch is None or watch.verdict is None)
    if watch is not None and not (ending and watch.verdict is not None):
        watch.stop()


def _at_exit() -> None:
    """A process that ends without `shutdown` says why: its last exception, where Python has shown one. Where a verdict
    came after its last exchange, it has no exception, and ends with the status of a rank whose run is lost.
    """
    error = getattr(sys, "last_value", None)
    watch = _watch
    if error is not None:
        leave(error)
    else:
        _leave(None, True)
    _C.pulse_stop()
    mpi = sys.modules.get("xtrain.distributed.mpi")
    if mpi is not None:
        mpi.at_exit(_in_order)
    if error is None and watch is not None and watch.verdict is not None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(watch.status())  # Python has no other way to change the status here


def why_left(error: BaseException) -> str:
    """The text of an exception for the other ranks."""
    text = shown(error, 300)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def plane(name: str) -> HostPlane | None:
    """The plane that moves bytes; None for a process alone. RuntimeError before `init` where there are others."""
    if _launch is None and detect() != ALONE and detect().world_size > 1:
        raise RuntimeError(f"{name}: xtrain.distributed.init() must be called first on every rank")
    return _plane


# ---- JSON ------------------------------------------------------------------------------------------------------------


def gather_json(value: Any, name: str = "json") -> list[Any]:
    """`value`, which JSON can hold, of every rank in their order, on every rank. name: of the exchange, the same on
    every rank.
    """
    return agree.gather_json(plane("gather_json"), value, name)


def barrier(what: str) -> None:
    """Return when every rank is here. what: names the place, the same on every rank; shown where ranks differ."""
    link = plane("barrier")
    if link is not None:
        link.all_gather(b"", f"barrier {what}")


def check_same(values: Mapping[str, Any], what: str) -> None:
    """ConfigError on every rank when a value differs between ranks; see agree.check_same."""
    agree.check_same(plane("check_same"), values, what)


def _about_this_process() -> dict[str, Any]:
    """What must be equal for ranks to compute the same bits."""
    info = _C.build_info()
    return {
        "version of xtrain": __version__,
        "contract of kernels": info["contract"],
        "compiler": info["compiler"],
        "flags of the compiler": info["flags"],
        "BLAS": info["blas"],
        "CPU": ", ".join(_C.cpu_features()),
    }


def together(make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 and return its result on every rank; see agree.together."""
    return agree.together(plane("together"), make)


def all_or_none(act: Callable[[], Any]) -> None:
    """Call `act` on every rank; an error of one is raised on all. See agree.all_or_none."""
    agree.all_or_none(plane("all_or_none"), act)


def choose_gpu(resolve: Callable[[], str]) -> str:
    """The device of this rank; see gpus.choose. There are other ranks."""
    from . import gpus

    link = plane("choose_gpu")
    assert link is not None
    return gpus.choose(link, resolve, _known())


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _checked(name: str, t: Tensor) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: t must be a Tensor, got {type(t).__name__}")
    return t.detach()


def _link(name: str, t: Tensor) -> HostPlane | None:
    """The plane that moves this tensor. GPUs are joined when the first tensor of one comes."""
    link = plane(name)
    if link is not None and t.device.type == "cuda" and link.gpus is None:
        from . import gpus

        if gpus.joins_gpus():
            gpus.join(link, t.device)
    return link


def _pieces(name: str, t: Tensor, size: int) -> int:
    """The rows of a piece when the first dimension of `t` is cut into one piece for each rank."""
    if t.ndim < 1 or t.shape[0] % size:
        raise ValueError(f"{name}: the first dimension of t must be a multiple of {size}, got shape {tuple(t.shape)}")
    return t.shape[0] // size


def all_gather(t: Tensor) -> Tensor:
    """[W, *t.shape]: `t` of every rank, on every rank. Shape and dtype must be the same everywhere."""
    return _gathered("all_gather", t, "")


def _gathered(name: str, t: Tensor, what: str) -> Tensor:
    """all_gather as an exchange of the name `what`, which shows where ranks call other functions. name: of this
    function.
    """
    t = _checked(name, t)
    link = _link(name, t)
    if link is None:
        return t.clone().unsqueeze(0)
    return link.all_gather_tensor([t], what).reshape((link.world_size, *t.shape))


def all_to_all(t: Tensor) -> Tensor:
    """`t` [n, ...] is cut into W pieces of n / W; piece j goes to rank j. The result [n, ...] has in place j what
    rank j has sent to this one.
    """
    return _sent("all_to_all", t, "")


def _sent(name: str, t: Tensor, what: str) -> Tensor:
    """all_to_all as an exchange of the name `what`, as in `_gathered`."""
    t = _checked(name, t)
    _pieces(name, t, world_size())
    link = _link(name, t)
    if link is None:
        return t.clone()
    return _C.cat(link.all_to_all_tensor(t, what)).reshape(t.shape)


def broadcast(t: Tensor, src: int) -> Tensor:
    """A copy of `t` of rank `src`, on every rank. Shape and dtype must be the same everywhere."""
    t = _checked("broadcast", t)
    if not is_whole(src) or not 0 <= src < world_size():
        raise ValueError(f"broadcast: src must be a rank in [0, {world_size()}), got {src!r}")
    link = _link("broadcast", t)
    if link is None:
        return t.clone()
    return link.broadcast_tensor(t, src, "").reshape(t.shape)


def all_reduce(t: Tensor, op: str = "sum") -> Tensor:
    """The sum, max or min of `t` over all ranks, on every rank, in t's dtype.

    The sum of floats is the fixed tree of docs/internals/distributed.md, in float32 (float64 for float64), rounded to
    t's dtype once: the same bits on every rank, and in every run.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce: op must be sum, max or min, got {op!r}")
    return _joined(_gathered("all_reduce", t, f"all_reduce {op}"), op).to(t.dtype)


def reduce_scatter(t: Tensor) -> Tensor:
    """The sum of `t` [n, ...] over all ranks, of which each gets its piece [n / W, ...]; see all_reduce."""
    sent = _sent("reduce_scatter", t, "reduce_scatter")
    size = world_size()
    return _joined(sent.reshape((size, sent.shape[0] // size, *sent.shape[1:])), "sum").to(t.dtype)


def _joined(stacked: Tensor, op: str) -> Tensor:
    parts = [stacked.select(0, i) for i in range(stacked.shape[0])]
    if op == "sum":
        return tree_sum(parts)
    join = _C.maximum if op == "max" else _C.minimum
    result = parts[0].clone()
    for part in parts[1:]:
        result = join(result, part)
    return result


def tree_sum(parts: list[Tensor]) -> Tensor:
    """T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}), p the largest power of two below n; floats of 16 bits are
    added as float32.
    """
    if len(parts) == 1:
        wide = parts[0].dtype in (_C.bfloat16, _C.float16)
        return parts[0].float() if wide else parts[0].clone()
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return tree_sum(parts[:half]) + tree_sum(parts[half:])
