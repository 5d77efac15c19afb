"""A trace of a few steps of a run."""

from __future__ import annotations

import os
from typing import Any

from ...profiling import profile
from ..state import State
from .base import Callback


class ProfileWriter(Callback):
    """Skips `skip` steps, which warm up, records the next `steps`, and writes their trace to `path`: see xt.profile.

    Of a run with fewer steps the last are recorded; of several processes rank 0 alone records. A trace that cannot be
    written is a warning. table: of the profile and of what ran on the GPU, once it has ended. written: whether its
    trace is.
    """

    table: str | None = None
    written = False

    def __init__(self, path: str | os.PathLike[str], steps: int = 5, skip: int = 2) -> None:
        self._path, self._steps, self._skip = path, steps, skip
        self._profile: profile | None = None

    def on_start(self, state: State) -> None:
        left = state.config.steps - state.step
        self._first = state.step + max(0, min(self._skip, left - self._steps))

    def on_step_begin(self, state: State) -> None:
        if self._profile is not None and state.step >= self._first + self._steps:
            self._write(state)
        elif state.team.first and self._profile is None and self.table is None and state.step >= self._first:
            self._profile = profile()
            self._profile.start()

    def _write(self, state: State) -> None:
        found, self._profile = self._profile, None
        if found is None:
            return
        found.stop()
        self.table = "\n\n".join(filter(None, (found.table(), found.kernel_table())))
        try:
            found.save(self._path)
            self.written = True
        except OSError as error:
            state.failed("the profile", error)

    def on_end(self, state: State, result: Any) -> None:
        self._write(state)
