"""Callbacks of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, PeerError
from ..state import State


class Callback:
    """What a run calls; each method may be left as it is. state: the Trainer.

    A callback is a side effect: an error of one is a warning, once for each callback and method, later ones are counted
    and told at the end, and the run goes on. What ends a process (KeyboardInterrupt, SystemExit) ends the run, with an
    emergency checkpoint, and so does a PeerError, because the other processes have gone. A ConfigError of `on_start` is
    raised, too, and so is one that ends all ranks. A callback must not exchange with other ranks (xtrain.distributed)
    unless it does so on all of them and catches its own errors: a rank that fails skips its exchange, which ends the
    run with a PeerError, or with its ConfigError of `on_start`.
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

    writers: callbacks that are called after these. ConfigError for anything else in `callbacks`.
    """

    def __init__(self, callbacks: Iterable[Callback | StepFunction], writers: Iterable[Callback] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            raise ConfigError(
                f"callbacks must be a list of Callbacks or functions of (state, record), got {type(callbacks).__name__}"
            )
        self._all: list[tuple[str, Callback]] = []  # with the name that a warning has
        names: dict[str, int] = {}
        for callback in (*callbacks, *writers):
            if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
                kind = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
                raise ConfigError(f"callbacks must be Callbacks or functions of (state, record), got {kind}")
            own = None if isinstance(callback, Callback) else getattr(callback, "__name__", None)
            name = str(own or type(callback).__name__)
            names[name] = count = names.get(name, 0) + 1
            callback = callback if isinstance(callback, Callback) else _Function(callback)
            self._all.append((name if count == 1 else f"{name} {count}", callback))

    def _call(self, hook: str, state: State, *arguments: Any, step: int | None = None) -> list[bool]:
        """Call a method of every callback: whether each returned something true. An error is told, and False."""
        found: list[bool] = []
        for name, callback in self._all:
            try:
                found.append(bool(getattr(callback, hook)(state, *arguments)))
            except PeerError:
                raise
            except Exception as error:
                if isinstance(error, ConfigError) and (hook == "on_start" or error.told):
                    raise
                state.failed(f"the callback {name} ({hook})", error, state.step if step is None else step)
                found.append(False)
        return found

    def on_start(self, state: State) -> None:
        self._call("on_start", state)

    def on_step_begin(self, state: State) -> None:
        self._call("on_step_begin", state)

    def on_step(self, state: State, record: Mapping[str, Any]) -> bool | None:
        return any(self._call("on_step", state, record, step=record.get("step")))  # the state may be ahead of it

    def on_checkpoint(self, state: State, path: Path) -> None:
        self._call("on_checkpoint", state, path)

    def on_end(self, state: State, result: Any) -> None:
        self._call("on_end", state, result)
