"""Ctrl-C and SIGTERM during training.

The first asks for an orderly end after the current step, the second ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """A `with` block inside which SIGINT and SIGTERM set `received` (the signal's name) instead of ending the process.

    A second signal raises KeyboardInterrupt (SystemExit(143) for SIGTERM). Afterwards the handlers are as before.
    Outside the main thread Python cannot install handlers, and the block changes nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: str | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if not self._quiet:  # not print: the signal may have interrupted one
            os.write(2, f"\n{self.received}: finishing this step, then saving; once more stops at once\n".encode())
