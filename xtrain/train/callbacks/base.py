"""Callbacks of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..state import State


class Callback:
    """What a run calls; each method may be left as it is. state: the Trainer.

    An error that a method raises ends the run as any other does, with an emergency checkpoint of the last step.
    """

    def on_start(self, state: State) -> None:
        """Before the first step, at `state.step`: more than 0 in a resumed run."""

    def on_step_begin(self, state: State) -> None:
        """Before step `state.step + 1` is made; on a GPU, before it is queued."""

    def on_step(self, state: State, record: Mapping[str, Any]) -> bool | None:
        """After each step, with its record as metrics.jsonl has it; True ends the run, which saves first.

        On a GPU steps are read `log_every` at a time: `state` may be some steps ahead of the record.
        """

    def on_checkpoint(self, state: State, path: Path) -> None:
        """After a checkpoint has been written to `path`."""

    def on_end(self, state: State, result: Any) -> None:
        """At the end, with the Result of the run, or None where an error ends it."""


StepFunction = Callable[[State, Mapping[str, Any]], Any]


class _Function(Callback):
    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def on_step(self, state: State, record: Mapping[str, Any]) -> bool | None:
        return self._function(state, record) is True


class CallbackList(Callback):
    """Several callbacks as one. A function (state, record) stands for a callback with that on_step.

    ConfigError for what is neither.
    """

    def __init__(self, callbacks: Iterable[Callback | StepFunction]) -> None:
        self._all: list[Callback] = []
        for callback in callbacks:
            if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
                kind = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
                raise ConfigError(f"callbacks must be Callbacks or functions of (state, record), got {kind}")
            self._all.append(callback if isinstance(callback, Callback) else _Function(callback))

    def on_start(self, state: State) -> None:
        for callback in self._all:
            callback.on_start(state)

    def on_step_begin(self, state: State) -> None:
        for callback in self._all:
            callback.on_step_begin(state)

    def on_step(self, state: State, record: Mapping[str, Any]) -> bool | None:
        return any([callback.on_step(state, record) for callback in self._all])

    def on_checkpoint(self, state: State, path: Path) -> None:
        for callback in self._all:
            callback.on_checkpoint(state, path)

    def on_end(self, state: State, result: Any) -> None:
        for callback in self._all:
            callback.on_end(state, result)
