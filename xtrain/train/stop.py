"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 during training.

The first asks for an orderly end after the current step, the second ends at once. A SIGHUP never does that: a terminal
that closes sends several, and a service manager one beside its SIGTERM. Nor does a SIGUSR1, by which batch systems say
that time is nearly up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_ONE_SIGNAL = 1.0  # seconds
_NEVER_AT_ONCE = (signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """A `with` block inside which SIGINT, SIGTERM, SIGHUP and SIGUSR1 set `received` (the signal's name) instead of
    ending the process.

    A second SIGINT or SIGTERM sets `at_once` and raises KeyboardInterrupt (SystemExit(143) for SIGTERM). A SIGHUP that
    is ignored, as under nohup, stays so, and so does a SIGUSR1 that the program handles or ignores. Afterwards the
    handlers are as before. Outside the main thread Python cannot install handlers, and the block changes nothing.

    agree: for several processes, which must stop after the same step. Then only `join` sets `received`, to what one of
    the processes was asked to do. Signals of different kinds, or within 1 s, count as one: launchers pass
    on what a terminal sends.
    """

    def __init__(self, *, quiet: bool = False, agree: Callable[[str | None], str | None] | None = None) -> None:
        self.received: str | None = None
        self._own: str | None = None  # what this process was asked, where others must agree
        self._own_at = 0.0
        self._agree = agree
        self.at_once = False
        self._asked = False  # by SIGINT or SIGTERM
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                found = signal.getsignal(number)
                ignored = number == signal.SIGHUP and found == signal.SIG_IGN
                handled = number == signal.SIGUSR1 and found != signal.SIG_DFL
                if not ignored and not handled:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def ask(self, why: str) -> None:
        """Stop after this step."""
        if self._agree is None:
            self.received = self.received or why
        else:
            self._own = self._own or why

    def join(self) -> None:
        """Agree with the other processes, at the end of a step."""
        if self._agree is not None and self.received is None:
            self.received = self._agree(self._own)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._agree is None:
            first = self.received = self.received or name
        else:
            now = time.monotonic()
            if self._own is None:
                self._own, self._own_at = name, now
            elif name != self._own or now - self._own_at < _ONE_SIGNAL:
                return
            first = self._own
        if number not in _NEVER_AT_ONCE:
            if self._asked:
                self.at_once = True
                if number == signal.SIGTERM:
                    raise SystemExit(128 + number)
                raise KeyboardInterrupt
            self._asked = True
        elif name != first:
            return
        if not self._quiet:
            with contextlib.suppress(OSError):  # the terminal may have gone
                # Not print: the signal may have interrupted one.
                os.write(2, f"\n{name}: finishing this step, then saving; once more stops at once\n".encode())
