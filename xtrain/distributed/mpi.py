"""The MPI plane: bytes between ranks by mpi4py, for CPUs under mpirun, also of several hosts. It never adds.

Each exchange begins with an all-gather of 32 bytes a rank: its size and a digest of its name. Where digests differ,
all hear both names. So the message itself, sent next, has the sizes that every rank expects.

MPI is never waited for. Calls are non-blocking and tested in a loop, which the watchdog can end. MPI_Finalize waits for
all ranks, so it is called when all have left in order, and else not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import struct
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, PeerError, shown
from .env import Launch
from .host import Buffer, FromOne, HostPlane, Route, to_all

MPI: Any = None  # the module mpi4py.MPI, after load
_MOST = 1 << 30  # bytes of a call: counts of MPI before 4.0 have 31 bits
_HEAD = struct.Struct("<QQ16s")  # number of the exchange, bytes of the first section, digest of the name
_LONGEST_NAME = 512  # bytes that other ranks hear of a name
_finalizes_itself = False  # whether MPI was there before, so that mpi4py calls MPI_Finalize at the end


def load(launch: Launch) -> None:
    """Load mpi4py and the MPI library, and start nothing. ConfigError where one is missing."""
    global MPI
    if MPI is not None:
        return
    try:
        import mpi4py  # pyright: ignore[reportMissingImports]  (optional)

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI as module  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ConfigError(
            "distributed: the MPI plane needs mpi4py: pip install 'xtrain[mpi]', or XTRAIN_PLANE=host"
        ) from None
    except (ImportError, RuntimeError) as error:
        text = shown(" ".join(str(error).split()), 200)
        raise ConfigError(f"distributed: mpi4py cannot load the MPI library of {launch.launcher}: {text}") from None
    MPI = module


def versions() -> dict[str, str]:
    """The versions of MPI that must be the same on every rank."""
    library = MPI.Get_library_version().rstrip("\0").splitlines()[0].split(",")[0]
    return {"version of mpi4py": importlib.metadata.version("mpi4py"), "MPI library": " ".join(library.split())}


def start(launch: Launch) -> None:
    """Start MPI, unless it has been. ConfigError where it does not count the ranks as the launcher does."""
    global _finalizes_itself
    if not MPI.Is_initialized():
        MPI.Init_thread()
    elif not _started:
        _finalizes_itself = True
    _started.append(launch)
    found = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if found != (launch.rank, launch.world_size):
        about = versions()
        raise ConfigError(
            f"distributed: mpi4py {about['version of mpi4py']} must use the MPI that started the ranks "
            f"({launch.launcher}: rank {launch.rank} of {launch.world_size}), got {about['MPI library']}: rank "
            f"{found[0]} of {found[1]}"
        )


_started: list[Launch] = []


def at_exit(in_order: bool) -> None:
    """The end of the process. in_order: whether all ranks have come to it, so that MPI_Finalize ends."""
    if MPI is None or not _started or MPI.Is_finalized():
        return
    if in_order:
        if not _finalizes_itself:
            MPI.Finalize()
    elif _finalizes_itself:  # it would wait for ever
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError, ValueError):
                stream.flush()
        MPI.COMM_WORLD.Abort(75)


class MpiPlane(HostPlane):
    """Takes the place of a host plane, whose ranks, connections, watchdog and count of exchanges it goes on with."""

    def __init__(self, host: HostPlane) -> None:
        self.__dict__.update(host.__dict__)
        self._communicator = MPI.COMM_WORLD.Dup()  # a script's own messages are apart
        self._farewell = MPI.COMM_WORLD.Dup()  # a rank that leaves must not be taken for one in an exchange
        if self.watch is not None:
            self.watch.abort = self.abort
        self._kept: list[Any] = []  # requests that were given up: MPI may still write into their buffers

    def _move(self, sections: list[Buffer], name: bytes, route: Route) -> list[Buffer]:
        try:
            sizes = self._agree(name, memoryview(sections[0]).nbytes)
            if isinstance(route, FromOne):
                return [self._broadcast(sections[0], route.source, sizes[route.source])]
            if route is to_all:
                return self._all_gather(sections[0], sizes)
            return self._all_to_all(sections)
        except MPI.Exception as error:
            raise PeerError(f"distributed: MPI failed: {shown(error, 200)}") from None

    def _agree(self, name: bytes, size: int) -> list[int]:
        """The sizes of all ranks' first sections. PeerError on every rank where names differ."""
        mine = _HEAD.pack(self._number, size, hashlib.blake2b(name, digest_size=16).digest())
        heads = bytearray(_HEAD.size * self.world_size)
        self._wait([self._communicator.Iallgather(mine, heads)])
        found = list(_HEAD.iter_unpack(heads))
        other = next((rank for rank, one in enumerate(found) if one[2] != found[0][2]), None)
        if other is None:
            return [one[1] for one in found]
        names = bytearray(_LONGEST_NAME * self.world_size)
        self._wait([self._communicator.Iallgather(name[:_LONGEST_NAME].ljust(_LONGEST_NAME, b"\0"), names)])
        heard = [bytes(names[rank * _LONGEST_NAME :][:_LONGEST_NAME]).rstrip(b"\0") for rank in (0, other)]
        raise PeerError(self._diverged(heard[0], other, heard[1]))

    def _all_gather(self, section: Buffer, sizes: list[int]) -> list[Buffer]:
        begins = [sum(sizes[:rank]) for rank in range(self.world_size)]
        whole = memoryview(bytearray(sum(sizes)))
        places = [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        if len(whole) <= _MOST:
            self._wait([self._communicator.Iallgatherv(_flat(section), [whole, sizes, begins, MPI.BYTE])])
            return list(places)
        places[self.rank][:] = _flat(section)
        for rank, place in enumerate(places):
            for piece in _cut(place):
                self._wait([self._communicator.Ibcast(piece, rank)])
        return list(places)

    def _broadcast(self, section: Buffer, source: int, size: int) -> Buffer:
        whole = _flat(section) if source == self.rank else memoryview(bytearray(size))
        for piece in _cut(whole):
            self._wait([self._communicator.Ibcast(piece, source)])
        return whole

    def _all_to_all(self, sections: list[Buffer]) -> list[Buffer]:
        """Sent one by one: MPI_Alltoallv would want them in one piece, a copy more."""
        size = memoryview(sections[self.rank]).nbytes
        found: list[Buffer] = [
            sections[rank] if rank == self.rank else bytearray(size) for rank in range(self.world_size)
        ]
        requests = []
        for step in range(1, self.world_size):  # all begin with another one
            to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
            requests += [self._communicator.Irecv([piece, MPI.BYTE], source) for piece in _cut(_flat(found[source]))]
            requests += [self._communicator.Isend([piece, MPI.BYTE], to) for piece in _cut(_flat(sections[to]))]
        self._wait(requests)
        return found

    def _wait(self, requests: Sequence[Any]) -> None:
        """Return when all are done. PeerError when the watchdog ends the exchange, or after the time of the plane."""
        self._kept.append(requests)
        self.wait_until(lambda: MPI.Request.Testall(requests))
        self._kept.pop()

    def abort(self, text: str) -> None:
        """No further exchange; one in which another thread waits ends with a PeerError."""
        self._over = self._over or text

    def leave(self, reason: str | None) -> None:
        """As HostPlane.leave. Without an error it returns when all ranks have called it, or one is lost."""
        if reason is None and self._over is None:
            with contextlib.suppress(PeerError, MPI.Exception):
                self._wait([self._farewell.Ibarrier()])
        super().leave(reason)


def _flat(section: Buffer) -> memoryview:
    view = memoryview(section)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _cut(view: memoryview) -> list[memoryview]:
    return [view[begin : begin + _MOST] for begin in range(0, len(view), _MOST)]
