"""The NCCL plane: bytes of tensors from GPU to GPU, beside a plane that moves those of hosts. It never adds.

Each exchange has a number and a signature of the host's plane, so the watchdog judges it like any other. It is queued
on the device's one stream, behind the kernels that made its input. NCCL compares nothing: ranks that do not do the same
are found by their signatures, which heartbeats bring.

Nothing waits inside NCCL for ever. The communicator is opened by a thread of its own; after that calls only queue work,
and the main thread asks whether the device is done, until it is or the watchdog has spoken. Then the communicator is
aborted by one more thread, because that may hang, too; 5 s after a verdict the watchdog ends the process.

In a captured step an exchange becomes a part of the graph. A replay with all its exchanges is one of the host's plane,
with a digest of their signatures, and is waited for like any other.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from .. import _C
from .._C import Tensor
from .._graph import capturing
from ..errors import ConfigError, PeerError, shown
from . import agree
from .host import HostPlane

_CLOSING = 10.0  # seconds


class NcclPlane:
    """Joins `device` with those of all ranks, which must all do so. ConfigError on every rank where NCCL is missing or
    its versions differ, PeerError where a rank does not come.
    """

    def __init__(self, host: HostPlane, device: _C.device) -> None:
        self.device, self._host = device, host
        self._beside: list[tuple[str, Tensor, Tensor]] = []  # exchanges beside the kernels, whose memory must stay
        # Exchanges in each captured step, and a digest of their signatures.
        self._graphs: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # its sums may differ from call to call, and we need none
        about: list[dict[str, Any]] = []
        agree.all_or_none(host, lambda: about.append(_version()))
        agree.check_same(host, {"version of NCCL": about[0]["version"]}, "")
        said = host.broadcast(_C.nccl_unique_id().encode() if host.rank == 0 else None, 0, "NCCL's unique id")
        self._comm = host.counted({"open": "NCCL"}, lambda _: self._open(bytes(said).decode()))
        if host.watch is not None:
            before = host.watch.abort

            def abort(text: str) -> None:
                before(text)
                self._close(False)

            host.watch.abort = abort

    def _open(self, unique_id: str) -> Any:
        """The communicator, in which each collective has run once: NCCL connects the GPUs in the first."""
        found: list[Any] = []
        size = self._host.world_size
        trial = [_C.full((size,), 0, _C.float32, self.device) for _ in range(2)]

        def work() -> None:
            try:
                comm = _C.nccl_open(self.device, unique_id, self._host.rank, size)
                _C.nccl_all_to_all(comm, trial[0], trial[1])
                _C.nccl_all_gather(comm, trial[0], trial[1][:1])
                _C.nccl_broadcast(comm, trial[0], 0)
                found.append(comm)
            except BaseException as error:
                found.append(error)

        threading.Thread(target=work, name="xtrain nccl", daemon=True).start()
        self._host.wait_until(lambda: bool(found))
        if isinstance(found[0], BaseException):
            raise found[0]
        self._host.wait_until(lambda: _C.nccl_idle(found[0]))
        return found[0]

    def all_gather(self, t: Tensor, name: str) -> Tensor:
        """The elements of `t` of every rank, one rank after the other: [W * n]."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((self._host.world_size * t.numel(),), t.dtype, self.device)
        self._run({"all_gather": name}, lambda: _C.nccl_all_gather(self._comm, out, t))
        return out

    def all_to_all(self, t: Tensor, name: str) -> Tensor:
        """Piece j of `t` [W * n] goes to rank j: what every rank has sent to this one, one rank after the other."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((t.numel(),), t.dtype, self.device)
        self._run({"all_to_all": name}, lambda: _C.nccl_all_to_all(self._comm, out, t))
        return out

    def start_all_to_all(self, t: Tensor, name: str) -> Tensor:
        """The same beside the kernels that are queued from now on: the result may be read after `finish`."""
        t = t.reshape(-1).contiguous()
        out = _C.empty((t.numel(),), t.dtype, self.device)
        try:
            _C.nccl_all_to_all(self._comm, out, t, True)
        except RuntimeError as error:
            raise PeerError(f"distributed: {shown(error, 300)}") from None
        self._beside.append((name, t, out))
        return out

    def finish(self) -> None:
        """Let the kernels that are queued from now on wait for what was started: one exchange of the plane."""
        begun, self._beside = self._beside, []
        digest = zlib.crc32(json.dumps([name for name, _, _ in begun]).encode())
        self._run({"all_to_all": len(begun), "digest": digest}, lambda: _C.nccl_join(self._comm))

    def broadcast(self, t: Tensor, source: int, name: str) -> Tensor:
        """The elements of `t` of rank `source`: [n]."""
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
                self._host.wait_until(lambda: _C.nccl_idle(self._comm))
            except PeerError:
                raise
            except RuntimeError as error:  # of NCCL; or the watchdog has ended the communicator
                raise PeerError(f"distributed: {shown(error, 300)}") from None

        self._host.counted(signature, act)

    def _close(self, in_order: bool) -> threading.Thread:
        closing = threading.Thread(target=_C.nccl_close, args=(self._comm, in_order), name="xtrain nccl", daemon=True)
        closing.start()
        return closing

    def leave(self, in_order: bool) -> None:
        """End the communicator. in_order: all ranks leave without an error. Graphs go first: NCCL waits for theirs."""
        for graph in list(self._graphs):
            graph.end(
                "cuda.graph: the exchanges of this step have ended with xtrain.distributed.shutdown: make a new graph"
            )
        self._close(in_order).join(_CLOSING)


def _version() -> dict[str, Any]:
    try:
        return _C.nccl_version()
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
