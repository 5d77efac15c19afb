"""The watchdog: a thread of each rank that tells the others where it is, hears where they are, and ends the process
when one of them is lost.

Each rank has two more connections to rank 0: on one come heartbeats and verdicts (JSON with its length in front), on
the other a byte each second from a thread that needs no GIL (csrc/py/runtime/pulse.c). Rank 0 judges all, the others
judge rank 0 (judge.py). A verdict is told to all, printed, and raised by the main thread, whose exchanges it ends; 5 s
later the process ends in any case, with status 75, or 2 for a mistake in the config (csrc/py/runtime/ending.c).

No deadlock: the thread holds no lock, never waits for the main thread, and its sockets do not block.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import _C
from ..errors import ConfigError, PeerError, shown
from .judge import Judge, Verdict
from .progress import Progress, Times
from .store import LENGTH

EXIT_STATUS = 75  # EX_TEMPFAIL: whoever started the ranks may start them again
_LONGEST = 1 << 22  # bytes of a message
_MOST_WAITING = 1 << 18  # bytes that wait to be sent, after which heartbeats are left out
_EXPLAINED = 2.0  # seconds that an exchange which failed waits for the verdict
_FLUSH = 1.0  # seconds
_GRACE = 3.0  # seconds; mpirun kills the other ranks at once when one has ended with an error


class _Link:
    """The connections to one rank."""

    def __init__(self, rank: int, talk: socket.socket, pulse: socket.socket) -> None:
        self.rank, self.talk, self.pulse = rank, talk, pulse
        self.inbox, self.outbox = bytearray(), bytearray()
        self.open = True
        self.leaves = False  # its rank has said so
        for one in (talk, pulse):
            one.setblocking(False)

    def put(self, data: bytes) -> None:
        """Send the data: now as much as the socket takes without waiting, the rest later."""
        if self.open:
            self.outbox += data
            self.flush()

    def flush(self) -> None:
        """Send of the data that waits as much as the socket takes."""
        try:
            while self.open and self.outbox:
                del self.outbox[: self.talk.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()  # the end is read, too

    def take(self) -> list[dict[str, Any]]:
        """The whole messages that have come; at the end of the connection the last one is {"ended": True}."""
        ended = False
        while not ended:
            try:
                data = self.talk.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.inbox += data
            ended = not data
        found: list[dict[str, Any]] = []
        while len(self.inbox) >= LENGTH.size:
            size = LENGTH.unpack_from(self.inbox)[0]
            if size > _LONGEST:
                ended = True
                break
            if len(self.inbox) < LENGTH.size + size:
                break
            found.append(json.loads(bytes(self.inbox[LENGTH.size : LENGTH.size + size])))
            self.leaves |= "left" in found[-1] or "finished" in found[-1]
            del self.inbox[: LENGTH.size + size]
        if ended:
            self.open = False
            found.append({"ended": True})
        return found

    def close(self) -> None:
        self.open = False
        for one in (self.talk, self.pulse):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)
            one.close()


class Watch:
    """The watchdog of this process.

    talks, pulses: {rank: socket} from store.meet, which this object closes. abort: is called once, with the message of
    the verdict, to end the exchange that the main thread may be in.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        progress: Progress,
        talks: dict[int, socket.socket],
        pulses: dict[int, socket.socket],
        times: Times,
        abort: Callable[[str], None],
    ) -> None:
        self.rank, self.times, self.progress = rank, times, progress
        self.verdict: Verdict | None = None
        self.abort = abort
        self._judge = Judge(rank, size, times)
        self._links = [_Link(peer, talks[peer], pulses[peer]) for peer in sorted(talks)]
        self._orders: deque[Callable[[], None]] = deque()  # of the main thread, for this one
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._stopping = False
        self._failed = False  # this rank leaves because of an error
        self._convicted = threading.Event()
        self._thread = threading.Thread(target=self._main, name="xtrain watchdog", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        _C.pulse_start([link.pulse.fileno() for link in self._links], self.times.beat)
        self._thread.start()

    # ---- what the main thread says -----------------------------------------------------------------------------------

    def accuse(self, kind: str, ranks: tuple[int, ...], text: str, exchange: int = 0) -> None:
        """End the run with a verdict that the main thread has found. On ranks but 0, rank 0's verdict comes first if it
        arrives within 1 s, as it knows more. Return when there is a verdict.

        exchange: which is not the same on all ranks. Where one brings a ConfigError to it, that is the verdict.
        """
        if self.rank != 0 and self._convicted.wait(_FLUSH):
            return
        mine = self.progress.beat()

        def act() -> None:
            now = time.monotonic()
            self._judge.saw(self.rank, now, mine)
            for link in self._links if exchange else ():
                if link.open:  # a rank announces its error before the exchange: what it said has come
                    self._read(link, True)
            found = Verdict(kind, ranks, f"{text} {self._judge.who(ranks, now)}".rstrip())
            self._convict(self._judge.mistaken(exchange, now) or found)

        self._order(act)
        self._convicted.wait(_EXPLAINED)

    def explain(self, error: PeerError) -> PeerError | ConfigError:
        """The error to raise in place of that of an exchange: the verdict, for which this waits up to 2 s."""
        if not self._convicted.is_set():
            self._order(lambda: None)  # look now
            if not self._convicted.wait(_EXPLAINED):
                self.accuse("lost", (), str(error).removeprefix("distributed: "))
        return self.error() or error

    def error(self) -> PeerError | ConfigError | None:
        """The verdict as an exception, which is not printed a second time."""
        if self.verdict is None:
            return None
        error = (ConfigError if self.verdict.kind == "config" else PeerError)(f"distributed: {self.verdict.text}")
        error.told = True
        return error

    def status(self) -> int:
        """With which the process ends after the verdict: a new start does not mend a mistake in the config."""
        return 2 if self.verdict is not None and self.verdict.kind == "config" else EXIT_STATUS

    def beat_now(self) -> None:
        """Send a heartbeat, and return when it is on its way, 1 s later at most."""
        sent = threading.Event()
        self._order(self._beat)
        self._order(sent.set)
        sent.wait(_FLUSH)

    def leave(self, why: str | None) -> None:
        """Tell the others that this rank leaves: in order (None), or because of an error."""
        self._failed = why is not None and self.verdict is None
        if self.verdict is None:
            last = {"beat": self.progress.beat()}  # so that nobody thinks it owes an exchange
            self._order(lambda: self._tell(last, {"finished": True} if why is None else {"left": why}))

    def set_timeout(self, seconds: float) -> None:
        """Change `timeout` of Times."""
        import dataclasses

        self.times = self._judge.times = dataclasses.replace(self.times, timeout=seconds)

    def stop(self) -> None:
        """End the thread, and close. After a verdict the process then goes on as long as it likes. After an error this
        waits for the ends of the ranks that it is connected to, `_GRACE` at most, so that they can say why they end.
        """
        self._stopping = True
        self._order(lambda: None)
        if self._thread.ident is None:  # there is no thread: what waits for it is said here
            for act in self._orders:
                act()
        else:
            self._thread.join(_FLUSH + (_GRACE if self._failed else _FLUSH))
        _C.call_off_end()
        _C.pulse_stop()  # before its sockets are closed, whose numbers others may get
        for link in self._links:
            link.close()
        for one in (self._wake, self._woken):
            one.close()

    def abandon(self) -> None:
        """In a forked child, which has no such thread: close, and say nothing."""
        for link in self._links:
            link.talk.close()  # no shutdown: the connection is the parent's
            link.pulse.close()
        for one in (self._wake, self._woken):
            one.close()

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        with contextlib.suppress(OSError):  # full: it is awake anyway
            self._wake.send(b"x")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # they are for the main thread, whose system calls they interrupt
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with selectors.DefaultSelector() as selector:
                self._loop(selector)
        except Exception as error:
            if not self._stopping and not sys.is_finalizing():
                _print(f"warning: distributed: the watchdog of rank {self.rank} has failed: {shown(error)}")

    def _loop(self, selector: selectors.BaseSelector) -> None:
        """Hear the others, beat, and look for whoever is lost, until the main thread stops this one; then send what is
        left.
        """
        selector.register(self._woken, selectors.EVENT_READ)
        for link in self._links:
            selector.register(link.talk, selectors.EVENT_READ, (link, True))
            selector.register(link.pulse, selectors.EVENT_READ, (link, False))
        before = next_beat = next_look = time.monotonic()
        pause = min(0.2, self.times.beat / 4)  # between two looks, of which each takes all ranks
        while not self._stopping:
            self._wait(selector, min(next_beat, next_look))
            now = time.monotonic()
            if now - before > self.times.silent / 3:
                self._judge.forgive(now)  # the process was stopped, or something kept the GIL
            before = now
            asked = self._obey()
            if now >= next_beat:
                next_beat = now + self.times.beat
                self._beat()
            if now < next_look and not asked:
                continue
            next_look = now + pause
            for link in self._links:
                link.flush()
            if self.verdict is None:
                self._look(now)
        self._obey()
        self._send_the_rest()

    def _wait(self, selector: selectors.BaseSelector, until: float) -> None:
        """Read what comes, once: when something has come, when the main thread wakes this one, or at `until`."""
        for key, _ in selector.select(max(0.0, until - time.monotonic())):
            if key.data is None:
                with contextlib.suppress(OSError):
                    self._woken.recv(1 << 12)
            elif not self._read(*key.data):
                selector.unregister(key.fileobj)

    def _look(self, now: float) -> None:
        """Have the judge look at all ranks; print its warnings, and act on its verdict."""
        self._judge.saw(self.rank, now, self.progress.beat())
        verdict, warnings = self._judge.look(now)
        for text in warnings:
            _print(f"warning: distributed: {text}")
        if verdict is not None:
            self._convict(verdict)

    def _send_the_rest(self) -> None:
        """Send what waits to be sent, for `_FLUSH` at most; after an error read, too, until the others have left, for
        `_GRACE` at most.
        """
        waits = self._failed and self.verdict is None  # else the others end by themselves
        deadline = time.monotonic() + (_GRACE if waits else _FLUSH)
        while time.monotonic() < deadline:
            links = [link for link in self._links if link.open and (link.outbox or (waits and not link.leaves))]
            for link in links:
                link.flush()
                if waits:
                    link.take()
            if not links:
                break
            time.sleep(0.01)

    def _obey(self) -> bool:
        """Run the calls that the main thread has queued; return whether there were any."""
        asked = bool(self._orders)
        while self._orders:
            self._orders.popleft()()
        return asked

    def _read(self, link: _Link, talks: bool) -> bool:
        """Read what has come; False at the end of the connection."""
        now = time.monotonic()
        if not talks:
            try:
                more = bool(link.pulse.recv(1 << 12))
            except BlockingIOError:
                return True
            except OSError:
                more = False
            if more:
                self._judge.heard(link.rank, now)
            return more
        self._judge.heard(link.rank, now)
        for message in link.take():
            self._hear(link, message, now)
        return link.open

    def _hear(self, link: _Link, message: dict[str, Any], now: float) -> None:
        if "beat" in message:
            self._judge.saw(link.rank, now, message["beat"])
        elif "finished" in message:
            self._judge.finished(link.rank)
        elif "left" in message:
            self._convict(self._judge.left(link.rank, message["left"], now), link)
        elif "verdict" in message:
            kind, ranks, text = message["verdict"]
            self._convict(Verdict(kind, tuple(ranks), text), link)
        elif self.verdict is None:
            verdict = self._judge.ended(link.rank, now)
            if verdict is not None:
                self._convict(verdict)

    def _beat(self) -> None:
        beat = self.progress.beat()
        if self.rank == 0:
            beat["signatures"] = []  # rank 0 compares
        data = _framed({"beat": beat})
        for link in self._links:
            if len(link.outbox) < _MOST_WAITING:
                link.put(data)

    def _tell(self, *messages: dict[str, Any], but: _Link | None = None) -> None:
        data = b"".join(map(_framed, messages))
        for link in self._links:
            if link is not but:
                link.put(data)

    def _convict(self, verdict: Verdict, source: _Link | None = None) -> None:
        """End the run: tell all others, print, and end the main thread's exchange. Only the first verdict counts.
        source: the rank that sent it, which need not be told.
        """
        if self.verdict is not None or self._stopping:
            return
        self.verdict = verdict
        _C.end_after(self.times.exit, self.status())
        self._tell({"verdict": [verdict.kind, list(verdict.ranks), verdict.text]}, but=source)
        text = f"error: distributed: {verdict.text}"
        _print(text)
        write_error_file(text)
        self.abort(f"distributed: {verdict.text}")
        self._convicted.set()


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def _print(text: str) -> None:
    """One line on standard error, in one write, unless that would wait: not by sys.stderr, whose lock the main thread
    may hold.
    """
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(1000):
            os.write(2, f"xtrain: {text}".encode("utf-8", "replace")[: select.PIPE_BUF - 1] + b"\n")


def write_error_file(text: str) -> None:
    """Tell torchrun why this rank ends, in the file that it has named; the first reason counts."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        data = json.dumps({"message": {"message": text, "extraInfo": extra}})
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(data)
