"""Ctrl-C, SIGTERM and SIGHUP during training.

The first asks for an orderly end after the current step, the second ends at once. A SIGHUP never does that: a terminal
that closes sends several, and a service manager one beside its SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """A `with` block inside which SIGINT, SIGTERM and SIGHUP set `received` (the signal's name) instead of ending the
    process.

    A second SIGINT or SIGTERM sets `at_once` and raises KeyboardInterrupt (SystemExit(143) for SIGTERM). A SIGHUP that
    is ignored, as under nohup, stays so. Afterwards the handlers are as before. Outside the main thread Python cannot
    install handlers, and the block changes nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: str | None = None
        self.at_once = False
        self._asked = False  # by SIGINT or SIGTERM
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.received = self.received or name
        if number != signal.SIGHUP:
            if self._asked:
                self.at_once = True
                if number == signal.SIGTERM:
                    raise SystemExit(128 + number)
                raise KeyboardInterrupt
            self._asked = True
        elif name != self.received:
            return
        if not self._quiet:
            with contextlib.suppress(OSError):  # the terminal may have gone
                # Not print: the signal may have interrupted one.
                os.write(2, f"\n{name}: finishing this step, then saving; once more stops at once\n".encode())
