"""What this rank does right now, and the time limits of the watchdog.

The main thread writes a Progress, a few attributes at each exchange. The watchdog's thread reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError, shown

COMPUTING = "computing"
_SIGNATURES = 64  # of the last exchanges, for comparison
_LONGEST_SIGNATURE = 300  # characters
_FRAMES = 6  # of the stack, the innermost
_TIMES = "XTRAIN_WATCH_TIMES"


@dataclasses.dataclass(frozen=True)
class Times:
    """The time limits of the watchdog, in seconds.

    beat: between two heartbeats. silent: after which a rank that is not heard counts as gone.
    report, timeout: how long others wait for a rank in an exchange before a warning, and before the run ends.
    patience: replaces timeout for a rank that loads, evaluates or saves; the warning then comes after a sixth of it.
    exit: from a verdict until the process is ended. window: over which the speeds of ranks are compared.
    hashes: the number of steps between two comparisons of parameters.
    """

    beat: float = 1.0
    silent: float = 10.0
    report: float = 30.0
    timeout: float = 300.0
    patience: float = 1800.0
    exit: float = 5.0
    window: float = 10.0
    hashes: float = 100.0

    def limit(self, phase: str) -> float:
        """Seconds that others wait for a rank in this phase."""
        return self.timeout if phase == COMPUTING else max(self.timeout, self.patience)

    def reported(self, phase: str) -> float:
        """Seconds that others wait for a rank in this phase before a warning."""
        return self.report if phase == COMPUTING else max(self.report, self.patience / 6)


def times(environ: Mapping[str, str] | None = None) -> Times:
    """The limits from the environment: XTRAIN_COMM_TIMEOUT sets `timeout`; XTRAIN_WATCH_TIMES, for tests, sets any of
    them, as in "silent=2,report=1". ConfigError for other names and values.
    """
    env = os.environ if environ is None else environ
    given: dict[str, float] = {}
    text = env.get("XTRAIN_COMM_TIMEOUT", "")
    if text:
        given["timeout"] = _seconds("XTRAIN_COMM_TIMEOUT", text)
    names = {field.name for field in dataclasses.fields(Times)}
    for part in filter(None, env.get(_TIMES, "").split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise ConfigError(f"distributed: {_TIMES} must name {', '.join(sorted(names))}, got {shown(name)}")
        given[name] = _seconds(f"{name} of {_TIMES}", value)
    return Times(**given)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:
        raise ConfigError(f"distributed: {name} must be seconds in (0, 1e6], got {shown(text)}")
    return seconds


class Progress:
    """What the main thread does, for the watchdog: the training step, the phase, and the exchanges.

    queued, done: the number of the last exchange that began, and of the last that ended.
    failed: the number of the exchange to which this rank brings a ConfigError, and its text.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self.step = 0
        self.phase = "starting"
        self.queued = self.done = 0
        self.failed: tuple[int, str] = (0, "")
        self._since = self._resumed = now
        self._waiting: float | None = None  # since when
        self._busy = 0.0  # seconds of computing so far
        self._signatures: deque[tuple[int, str]] = deque(maxlen=_SIGNATURES)
        self._thread = threading.get_ident()
        self._about = {"host": socket.gethostname(), "pid": os.getpid()}

    def begin(self, number: int, signature: str) -> None:
        """Note that exchange `number` begins. signature: its kind, name and sizes, the same on every rank."""
        now = time.monotonic()
        if self.phase == COMPUTING:
            self._busy += now - self._resumed
        self._signatures.append((number, signature[:_LONGEST_SIGNATURE]))
        self._waiting, self.queued = now, number

    def end(self) -> None:
        """Note that the exchange has ended."""
        self._waiting, self.done = None, self.queued
        self._since = self._resumed = time.monotonic()

    def enter(self, phase: str) -> str:
        """Enter a phase; return the one before."""
        before, now = self.phase, time.monotonic()
        if before == COMPUTING and self._waiting is None:
            self._busy += now - self._resumed
        self.phase, self._since, self._resumed = phase, now, now
        return before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A `with` block in this phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self) -> dict[str, Any]:
        """The heartbeat that the others get, as JSON values: "since" and "waiting" are seconds until now."""
        now, waiting = time.monotonic(), self._waiting
        return {
            **self._about,
            "step": self.step,
            "phase": self.phase,
            "since": round(now - self._since, 3),
            "queued": self.queued,
            "done": self.done,
            "waiting": None if waiting is None else round(now - waiting, 3),
            "busy": self._busy,
            "failed": list(self.failed),
            "signatures": [list(one) for one in tuple(self._signatures)],  # tuple: a copy that nobody interrupts
            "stack": self._stack(),
        }

    def _stack(self) -> str:
        """The stack of the main thread, the innermost function first."""
        frame, found = sys._current_frames().get(self._thread), []
        while frame is not None and len(found) < _FRAMES:
            code = frame.f_code
            found.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return ", ".join(found)
