"""The NCCL plane: bytes of tensors from GPU to GPU, beside a plane that moves those of hosts. It never adds.

Each exchange has a number and a signature of the host's plane, so the watchdog judges it like any other. It is queued
on the device's one stream, behind the kernels that made its input. Some run on a second stream beside the kernels that
follow; `finish` makes these wait, and is the exchange that counts. NCCL compares nothing: ranks that do not do the same
are found by their signatures, which heartbeats bring.

Nothing waits inside NCCL for ever. One more thread opens the communicator; after that calls only queue work, and the
main thread asks whether the device is done, until it is or the watchdog has spoken. The same thread then closes the
communicator, or aborts it, which may hang, too; 5 s after a verdict the process ends in any case.

In a captured step an exchange becomes a part of the graph. A replay with all its exchanges is one of the host's plane,
with a digest of their signatures, and is waited for like any other.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from .. import _C
from .._C import Tensor
from .._graph import capturing
from ..errors import ConfigError, PeerError, shown
from . import agree
from .host import HostPlane

_CLOSING = 10.0  # seconds
_ASK = 1000  # microseconds that C waits for a device before Python asks the watchdog,
_ASKS = 200  # so many times; then the thread sleeps between tests, and leaves the processor to others


class NcclPlane:
    """Joins `device` with those of all ranks, which must all do so. ConfigError on every rank where NCCL is missing or
    its versions differ, PeerError where a rank does not come.
    """

    def __init__(self, host: HostPlane, device: _C.device) -> None:
        self.device, self._host = device, host
        # Exchanges beside the kernels: the capture that each belongs to, its name, and the memory that must stay.
        self._beside: list[tuple[Any, str, Tensor, Tensor]] = []
        # Exchanges in each captured step, and a digest of their signatures.
        self._graphs: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._comm: Any = None
        self._asked, self._closed, self._in_order = threading.Event(), threading.Event(), False
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # its sums may differ from call to call, and we need none
        about: list[dict[str, Any]] = []
        agree.all_or_none(host, lambda: about.append(_version()))
        agree.check_same(host, {"version of NCCL": about[0]["version"]}, "")
        said = host.broadcast(_C.nccl_unique_id().encode() if host.rank == 0 else None, 0, "NCCL's unique id")
        try:
            host.counted({"open": "NCCL"}, lambda _: self._open(bytes(said).decode()))
        except BaseException:
            self._ask_to_close(False)
            raise
        if host.watch is not None:
            before = host.watch.abort

            def abort(text: str) -> None:
                before(text)
                self._ask_to_close(False)

            host.watch.abort = abort

    def _open(self, unique_id: str) -> None:
        """Open the communicator, in which each collective has run once then: NCCL connects the GPUs in the first. The
        thread that does so closes it later: while Python ends, no thread can be started.
        """
        found: list[BaseException | None] = []
        host, size = self._host, self._host.world_size
        trial = [_C.full((size,), 0, _C.float32, self.device) for _ in range(2)]

        def work() -> None:
            if hasattr(signal, "pthread_sigmask"):  # they are for the main thread, whose system calls they interrupt
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                comm = self._comm = _C.nccl_open(self.device, unique_id, host.rank, size)
                _C.nccl_all_to_all(comm, trial[0], trial[1])
                _C.nccl_all_gather(comm, [trial[0]], [trial[1][:1]])
                _C.nccl_broadcast(comm, trial[0], 0)
                found.append(None)
            except BaseException as error:
                found.append(error)
            self._asked.wait()
            if self._comm is not None:
                _C.nccl_close(self._comm, self._in_order)
            self._closed.set()

        threading.Thread(target=work, name="xtrain nccl", daemon=True).start()
        # NCCL waits for ever where GPUs cannot reach each other, and then no rank is late.
        limit = None if host.watch is None else host.watch.times.timeout
        host.wait_until(lambda: bool(found), limit)
        if found[0] is not None:
            raise found[0]
        host.wait_until(lambda: _C.nccl_idle(self._comm), limit)

    def all_gather(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """Gather several tensors; the result is that of HostPlane.all_gather_tensor."""
        inputs = [part.reshape(-1).contiguous() for part in parts]
        ends = list(accumulate(self._host.world_size * one.numel() for one in inputs))
        out = _C.empty((ends[-1],), parts[0].dtype, self.device)
        outs = [out[begin:end] for begin, end in zip([0, *ends], ends)]
        self._run({"all_gather": name}, lambda: _C.nccl_all_gather(self._comm, outs, inputs))
        return out

    def all_to_all(self, t: Tensor, name: str) -> Tensor:
        """Send piece j of `t` [W * n] to rank j; return what this rank gets, flat, one rank after the other."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((t.numel(),), t.dtype, self.device)
        self._run({"all_to_all": name}, lambda: _C.nccl_all_to_all(self._comm, out, t))
        return out

    def start_all_to_all(self, t: Tensor, name: str) -> Tensor:
        """As all_to_all, beside the kernels that are queued from now on: the result may be read after `finish`."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((t.numel(),), t.dtype, self.device)
        self._start(lambda: _C.nccl_all_to_all(self._comm, out, t, True), f"all_to_all {name}", t, out)
        return out

    def start_all_gather(self, t: Tensor, name: str) -> Tensor:
        """`all_gather` of one tensor beside the kernels that are queued from now on, until `finish`."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((self._host.world_size * t.numel(),), t.dtype, self.device)
        self._start(lambda: _C.nccl_all_gather(self._comm, [out], [t], True), f"all_gather {name}", t, out)
        return out

    def _start(self, queue: Callable[[], None], name: str, t: Tensor, out: Tensor) -> None:
        # First: should anything be raised here, NCCL may have begun, and reads and writes them.
        self._beside.append((_this_capture(), name, t, out))
        try:
            queue()
        except RuntimeError as error:
            if capturing() is not None:
                raise
            lost, watch = PeerError(shown(error, 300)), self._host.watch
            raise (lost if watch is None else watch.explain(lost)) from None

    def finish(self) -> None:
        """Let the kernels that are queued from now on wait for what was started: one exchange of the plane."""
        # Those of a capture that has failed never ran, and other ranks may not have them.
        now = _this_capture()
        begun = [one for one in self._beside if one[0] == now]
        self._beside = [] if now is None else [one for one in self._beside if one[0] is None]
        digest = zlib.crc32(json.dumps([name for _, name, _, _ in begun]).encode())
        self._run({"beside": len(begun), "digest": digest}, lambda: _C.nccl_join(self._comm))

    def broadcast(self, t: Tensor, source: int, name: str) -> Tensor:
        """The elements of rank `source`'s `t`, flat [n], on every rank."""
        out = t.reshape(-1).clone()
        self._run({"broadcast": name, "src": source}, lambda: _C.nccl_broadcast(self._comm, out, source))
        return out

    def _run(self, signature: dict[str, Any], queue: Any) -> None:
        graph = capturing()
        if graph is None:
            self._counted({**signature, "by": "NCCL"}, queue)
            return
        queue()
        found = self._graphs.get(graph)
        if found is None or graph.around is None:
            found = self._graphs[graph] = [0, 0]
            graph.around = lambda replay: self._counted({"graph": found[1], "exchanges": found[0]}, replay)
        found[0] += 1
        found[1] = zlib.crc32(json.dumps(signature).encode(), found[1])

    def _counted(self, signature: dict[str, Any], queue: Callable[[], Any]) -> None:
        """Queue an exchange, or a graph that has some, and wait for it."""

        def act(_: str) -> None:
            try:
                queue()
                asks = chain(repeat(_ASK, _ASKS), repeat(0))
                self._host.wait_until(lambda: _C.nccl_idle(self._comm, next(asks)))
            except PeerError:
                raise
            except RuntimeError as error:
                watch = self._host.watch
                if not str(error).startswith("distributed: ") and (watch is None or watch.verdict is None):
                    raise  # this GPU's own: the others hear of it when this rank leaves
                raise PeerError(shown(error, 300)) from None  # NCCL's; or the watchdog has ended the communicator

        self._host.counted(signature, act)

    def _ask_to_close(self, in_order: bool) -> None:
        """Let the thread close the communicator, or abort it if not `in_order`. Only the first call counts. Any thread
        may call it.
        """
        if not self._asked.is_set():
            self._in_order = in_order
            self._asked.set()

    def leave(self, in_order: bool) -> None:
        """End the communicator. in_order: all ranks leave without an error. Else it is aborted first, which ends the
        kernels that wait for other ranks. NCCL then waits for the graphs that hold its kernels.
        """
        if not in_order:
            self._ask_to_close(False)
        for graph in list(self._graphs):
            graph.end(
                "cuda.graph: the exchanges of this step have ended with xtrain.distributed.shutdown: make a new graph"
            )
        self._ask_to_close(in_order)
        self._closed.wait(_CLOSING)


def _this_capture() -> tuple[Any, int] | None:
    """Identifies the capture of this thread: (graph, attempt); None outside of a capture."""
    graph = capturing()
    return None if graph is None else (graph, graph.attempt)


def _version() -> dict[str, Any]:
    try:
        return _C.nccl_version()
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
