"""A clock of the tests' own, so that no result depends on how busy the machine is; and a limit for what may wait for ever."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Clock:
    """Stands in for the module `time`: it goes on while somebody sleeps, and by a nanosecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """AssertionError where the block, or the test that this decorates, is still there after `seconds`: for a promise without which it would
    wait for ever, in Python. The limit is far beyond what it takes on a busy machine, and far below that of planted faults. Uses SIGALRM, in
    the main thread."""

    def give_up(*_) -> None:
        raise AssertionError(f"still there after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
