"""The host plane: bytes between ranks, through rank 0's connections. It moves bytes and never adds.

An exchange is the same call on every rank: each sends one message to rank 0, which answers each once all are there.
A message carries the name of its exchange and its sizes. Where those differ between ranks, all hear both and stop.

No deadlock: a rank sends, then waits; rank 0 reads from all connections at once, and writes when it has read all.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .. import _C
from .._C import Tensor
from .._graph import capturing
from ..errors import PeerError, shown
from .judge import differ
from .progress import Progress
from .store import ranks_text

if TYPE_CHECKING:
    from .watch import Watch

Buffer = bytes | bytearray | memoryview
Route = Callable[[int, list[list[Buffer]]], list[Buffer]]  # (rank, what each rank sent) -> what it gets

_HEAD = struct.Struct("<4sBQII")  # magic, kind, number of the exchange, bytes of the name, sections
_MAGIC = b"XTX1"
_EXCHANGE, _ANSWER, _LEFT, _FAILED = 1, 2, 3, 4
_MOST_SECTIONS = 1 << 16
_DRAIN = 2.0  # seconds that a leaving rank waits for the others to close
_LONGEST_REASON = 1000  # characters
_SPINS = 200  # tests of a condition, each of which lets other threads run, before the loop sleeps
_PAUSE = 5e-5  # seconds between two tests from then on
_R = TypeVar("_R")


class GpuPlane(Protocol):
    """Moves bytes from GPU to GPU: nccl.py."""

    device: _C.device

    def all_gather(self, parts: Sequence[Tensor], name: str) -> Tensor: ...
    def all_to_all(self, t: Tensor, name: str) -> Tensor: ...
    def broadcast(self, t: Tensor, source: int, name: str) -> Tensor: ...
    def start_all_to_all(self, t: Tensor, name: str) -> Tensor: ...
    def start_all_gather(self, t: Tensor, name: str) -> Tensor: ...
    def finish(self) -> None: ...
    def leave(self, in_order: bool) -> None: ...


def _bytes(t: Tensor) -> Buffer:
    """Its elements; a GPU's come through pinned memory."""
    return _C.to_bytes(t.cpu().contiguous())


def _tensor(data: Buffer, like: Tensor, count: int) -> Tensor:
    return _C.from_bytes(data, like.dtype, (count,)).to(like.device)


def _refuse_capture() -> None:
    if capturing() is not None:
        raise RuntimeError("cuda.graph: exchanges through hosts cannot be captured; those of NCCL can")


def _typed(name: str, t: Tensor) -> str:
    """The name of an exchange of tensors, which says what all ranks must have alike."""
    return f"{name} {t.dtype.name} {tuple(t.shape)}".lstrip()


def to_all(rank: int, sent: list[list[Buffer]]) -> list[Buffer]:
    """Everybody gets the first section of everybody."""
    return [sections[0] for sections in sent]


def one_each(rank: int, sent: list[list[Buffer]]) -> list[Buffer]:
    """Section j goes to rank j."""
    return [sections[rank] for sections in sent]


class FromOne:
    """Everybody gets the section of rank `source`."""

    def __init__(self, source: int) -> None:
        self.source = source

    def __call__(self, rank: int, sent: list[list[Buffer]]) -> list[Buffer]:
        return [sent[self.source][0]]


class _Reader:
    """A message that comes in pieces: head, lengths, name, sections."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.kind = self.number = 0
        self.name = b""
        self.sections: list[Buffer] = []
        self._parts = self._read()
        self._view = memoryview(next(self._parts))

    def _read(self) -> Any:
        head = bytearray(_HEAD.size)
        yield head
        magic, self.kind, self.number, name, count = _HEAD.unpack(head)
        if magic != _MAGIC or count > _MOST_SECTIONS:
            raise PeerError("distributed: a connection brought something that is no message of xtrain")
        lengths = bytearray(8 * count)
        yield lengths
        text = bytearray(name)
        yield text
        self.name = bytes(text)
        for size in struct.unpack(f"<{count}Q", lengths):
            section = bytearray(size)
            yield section
            self.sections.append(section)

    def advance(self) -> bool:
        """Read what is there, once; whether the message is whole. EOFError or OSError when the other end is gone."""
        while not self._view:
            buffer = next(self._parts, None)
            if buffer is None:
                return True
            self._view = memoryview(buffer)
        count = self.connection.recv_into(self._view)
        if not count:
            raise EOFError
        self._view = self._view[count:]
        while not self._view:
            buffer = next(self._parts, None)
            if buffer is None:
                return True
            self._view = memoryview(buffer)
        return False


def _send(connection: socket.socket, kind: int, number: int, name: bytes, sections: Sequence[Buffer] = ()) -> None:
    lengths = struct.pack(f"<{len(sections)}Q", *(memoryview(section).nbytes for section in sections))
    connection.sendall(_HEAD.pack(_MAGIC, kind, number, len(name), len(sections)) + lengths + name)
    for section in sections:
        if memoryview(section).nbytes:
            connection.sendall(section)


class HostPlane:
    """connections: {rank: socket}, see store.meet; they belong to this from now on. patience: seconds that an exchange
    may wait for a rank. progress: is told of each. watch: the watchdog, once there is one: it knows better why an
    exchange has failed, and ends one that waits.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connections: dict[int, socket.socket],
        patience: float,
        progress: Progress,
    ) -> None:
        self.rank, self.world_size, self.progress = rank, world_size, progress
        self.watch: Watch | None = None
        self.gpus: GpuPlane | None = None  # moves the bytes of tensors on GPUs, once they are joined
        self._connections, self._patience = connections, patience
        for connection in connections.values():  # the others wait longer than rank 0, which can name who is late
            connection.settimeout(patience if rank == 0 else 1.1 * patience + _DRAIN)
        self._number = 0
        self._over: str | None = None  # why there is no further exchange

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def all_gather(self, data: Buffer, name: str) -> list[Buffer]:
        """The `data` of every rank, in the order of ranks; sizes may differ."""
        return self._exchange([data], {"all_gather": name}, to_all)

    def all_to_all(self, parts: Sequence[Buffer], name: str) -> list[Buffer]:
        """Send parts[j] to rank j; return the parts of all ranks for this one. All parts must have the same size."""
        sizes = [memoryview(part).nbytes for part in parts]
        return self._exchange(list(parts), {"all_to_all": name, "bytes": sizes}, one_each)

    def broadcast(self, data: Buffer | None, source: int, name: str) -> Buffer:
        """The `data` of rank `source`; the other ranks pass None."""
        sections: list[Buffer] = [data if data is not None else b""]
        return self._exchange(sections, {"broadcast": name, "src": source}, FromOne(source))[0]

    def _exchange(self, sections: list[Buffer], signature: dict[str, Any], route: Route) -> list[Buffer]:
        return self.counted(signature, lambda text: self._move(sections, text.encode(), route))

    def counted(self, signature: dict[str, Any], act: Callable[[str], _R]) -> _R:
        """Call `act`, the next exchange, with the signature as JSON text, and return its result. The signature must be
        the same on every rank. RuntimeError in a captured step, whose replays could not exchange through hosts.
        """
        _refuse_capture()
        if self._over is not None:
            raise (self.watch.error() if self.watch is not None else None) or PeerError(self._over)
        self._number += 1
        text = json.dumps(signature)
        self.progress.begin(self._number, text)
        try:
            found = act(text)
        except PeerError as error:
            known = error if self.watch is None else self.watch.explain(error)
            self._over = str(known)
            raise known from None
        except BaseException as error:
            # A rank that was interrupted here is out of step with the others: whatever it does, nothing more is said.
            self._over = f"distributed: an exchange was interrupted by {type(error).__name__}"
            raise
        self.progress.end()
        return found

    def announce(self, text: str) -> None:
        """Say before the next exchange that this rank brings a ConfigError with this text to it: where others make
        another exchange, that is the reason.
        """
        self.progress.failed = self._number + 1, " ".join(text.split())[:_LONGEST_REASON]
        if self.watch is not None:
            self.watch.beat_now()

    def wait_until(self, done: Callable[[], bool], limit: float | None = None) -> None:
        """Wait until `done` returns True. PeerError when the watchdog ends the exchange, or after `limit` seconds
        (default: `patience` of the plane).
        """
        limit, spins = self._patience if limit is None else limit, 0
        deadline = time.monotonic() + limit
        while not done():
            if self._over is not None:
                raise PeerError(self._over)
            if time.monotonic() > deadline:
                raise PeerError(f"distributed: exchange {self._number} did not end within {limit:g} s")
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE)

    def _move(self, sections: list[Buffer], name: bytes, route: Route) -> list[Buffer]:
        """Send this rank's sections and return those that it gets. name: the signature of the exchange."""
        return self._collect(sections, name, route) if self.rank == 0 else self._ask(sections, name)

    def _ask(self, sections: list[Buffer], name: bytes) -> list[Buffer]:
        connection = self._connections[0]
        # Rank 0 may have said why it left, and closed: that is read even where sending fails.
        with contextlib.suppress(OSError):
            _send(connection, _EXCHANGE, self._number, name, sections)
        reader = _Reader(connection)
        try:
            while not reader.advance():
                pass
        except TimeoutError:
            raise PeerError(
                f"distributed: rank 0 did not answer exchange {self._number}, {shown(name.decode(), 300)}, within "
                f"{connection.gettimeout():g} s"
            ) from None
        except (EOFError, OSError):
            raise PeerError("distributed: rank 0 left without a word") from None
        if reader.kind != _ANSWER:
            raise PeerError(reader.name.decode("utf-8", "replace"))
        return reader.sections

    def _collect(self, sections: list[Buffer], name: bytes, route: Route) -> list[Buffer]:
        sent: list[list[Buffer]] = [[] for _ in range(self.world_size)]
        sent[0] = sections
        with selectors.DefaultSelector() as waiting:
            for rank, connection in self._connections.items():
                waiting.register(connection, selectors.EVENT_READ, (rank, _Reader(connection)))
            deadline = time.monotonic() + self._patience
            while waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    late = sorted(key.data[0] for key in waiting.get_map().values())
                    self._fail(
                        f"distributed: {ranks_text(late)} did not come to exchange {self._number}, "
                        f"{shown(name.decode(), 300)}, within {self._patience:g} s"
                    )
                for key, _ in ready:
                    rank, reader = key.data
                    try:
                        if not reader.advance():
                            continue
                    except (EOFError, OSError):
                        self._fail(f"distributed: rank {rank} left without a word", rank)
                    if reader.kind == _LEFT:
                        self._fail(f"distributed: rank {rank} left: {reader.name.decode('utf-8', 'replace')}", rank)
                    if (reader.number, reader.name) != (self._number, name):
                        self._fail(self._diverged(name, rank, reader.name))
                    sent[rank] = reader.sections
                    waiting.unregister(key.fileobj)
        for rank, connection in self._connections.items():
            try:
                _send(connection, _ANSWER, self._number, b"", route(rank, sent))
            except OSError:
                self._fail(f"distributed: rank {rank} left without a word", rank)
        return route(0, sent)

    def _diverged(self, first: bytes, rank: int, other: bytes) -> str:
        """The sentence about this exchange, which is not the same on rank 0 and on another one."""
        text = differ(self._number, 0, first.decode("utf-8", "replace"), rank, other.decode("utf-8", "replace"))
        if self.watch is not None:
            self.watch.accuse("diverged", (0, rank), text, self._number)
        return f"distributed: {text}"

    def _fail(self, text: str, gone: int | None = None) -> None:
        """Tell all others, and raise."""
        self._say(_FAILED, text, gone)
        raise PeerError(text)

    def _say(self, kind: int, text: str, gone: int | None = None) -> None:
        for rank, connection in self._connections.items():
            if rank != gone:
                with contextlib.suppress(OSError):
                    connection.settimeout(_DRAIN)
                    _send(connection, kind, self._number, text.encode())

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def gpus_of(self, t: Tensor) -> GpuPlane | None:
        """The plane that moves this tensor from GPU to GPU; None where it goes through the memory of hosts."""
        if self.gpus is not None and t.device == self.gpus.device:
            return self.gpus
        _refuse_capture()
        return None

    def all_gather_tensor(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """Gather several tensors in one exchange. Result, flat [sum of W * n_i]: for each part the elements of all
        ranks, one rank after the other. The parts have one dtype and device.
        """
        first, sizes = parts[0], [part.numel() for part in parts]
        name = (
            _typed(name, first)
            if len(parts) == 1
            else f"{name} {first.dtype.name} {zlib.crc32(repr(sizes).encode()):08x} of {len(parts)} sizes"
        )
        gpus = self.gpus_of(first)
        if gpus is not None:
            return gpus.all_gather(parts, name)
        found = self.all_gather(b"".join(_bytes(part) for part in parts), name)
        ends = list(accumulate(size * first.dtype.itemsize for size in sizes))
        cut = (memoryview(one)[begin:end] for begin, end in zip([0, *ends], ends) for one in found)
        return _tensor(b"".join(cut), first, self.world_size * sum(sizes))

    def all_to_all_tensor(self, t: Tensor, name: str) -> list[Tensor]:
        """Cut `t` [W * n] into W pieces and send piece j to rank j; return the W pieces [n] that this rank gets."""
        name = _typed(name, t)
        gpus, count = self.gpus_of(t), t.numel() // self.world_size
        if gpus is not None:
            found = gpus.all_to_all(t, name)
            return [found[i * count : (i + 1) * count] for i in range(self.world_size)]
        flat = t.reshape(-1)
        pieces = [_bytes(flat[i * count : (i + 1) * count]) for i in range(self.world_size)]
        return [_tensor(data, t, count) for data in self.all_to_all(pieces, name)]

    def start_all_to_all(self, t: Tensor, name: str) -> list[Tensor]:
        """all_to_all_tensor beside the kernels, only between GPUs: the result may be read after `gpus.finish()`."""
        gpus, count = self.gpus_of(t), t.numel() // self.world_size
        assert gpus is not None
        found = gpus.start_all_to_all(t, _typed(name, t))
        return [found[i * count : (i + 1) * count] for i in range(self.world_size)]

    def start_all_gather(self, t: Tensor, name: str) -> Tensor:
        """all_gather_tensor of one tensor beside the kernels: the result may be read after `gpus.finish()`."""
        gpus = self.gpus_of(t)
        assert gpus is not None
        return gpus.start_all_gather(t, _typed(name, t))

    def broadcast_tensor(self, t: Tensor, source: int, name: str) -> Tensor:
        """The elements of rank `source`'s `t`, flat [n], on every rank."""
        name = _typed(name, t)
        gpus = self.gpus_of(t)
        if gpus is not None:
            return gpus.broadcast(t, source, name)
        return _tensor(self.broadcast(_bytes(t) if self.rank == source else None, source, name), t, t.numel())

    # ---- the end -----------------------------------------------------------------------------------------------------

    def abort(self, text: str) -> None:
        """No further exchange; one in which another thread waits ends with a PeerError."""
        self._over = self._over or text
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def abandon(self, why: str) -> None:
        """Close and say nothing: in a forked child, whose connections are its parent's."""
        self._over = why
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def leave(self, reason: str | None) -> None:
        """Tell the others that this rank makes no further exchange, and close. Ranks that wait for one get the reason;
        None where there is no error.
        """
        why = reason or "it has ended"
        if self.gpus is not None:
            self.gpus.leave(reason is None and self._over is None)
        if self._over is None:
            if self.rank == 0:
                self._say(_FAILED, f"distributed: rank 0 left: {why}")
            else:
                self._say(_LEFT, why)
            self._over = f"distributed: this rank has left: {why}"
        deadline = time.monotonic() + _DRAIN
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if self.rank == 0:  # closing with unread bytes would take back what the others have not read yet
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    while connection.recv(1 << 16) and time.monotonic() < deadline:
                        pass
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
