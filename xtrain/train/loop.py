"""The loop over the steps of a run: reads metrics, evaluates and saves when it is time, and stops on a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..profiling import span
from .checkpoints import Saver
from .config import TrainConfig
from .progress import Progress
from .report import Report, machine_metrics
from .state import State
from .step import QueuedStep, Stepper
from .stop import StopSignals


@dataclass(frozen=True)
class Hooks:
    """What the loop calls.

    on_step_begin: before each step, for the callbacks.
    write: with the metrics of each finished step.
    on_step: with the same metrics after `write`, for the callbacks; True ends the run.
    evaluate: with whether to show a sample; returns further metrics of the step.
    save: writes a checkpoint of the last step.
    rescue: the same before an error ends the run. It is called while that error is handled.
    """

    on_step_begin: Callable[[], None]
    write: Callable[[Mapping[str, Any]], None]
    on_step: Callable[[Mapping[str, Any]], bool | None]
    evaluate: Callable[[bool], dict[str, float]]
    save: Callable[[], Any]
    rescue: Callable[[], None]


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Whether the model is evaluated after this step: after the last one, and every `eval_every`."""
    return step == config.steps or bool(config.eval_every and step % config.eval_every == 0)


def loop(state: State, stepper: Stepper, report: Report, hooks: Hooks) -> tuple[dict[str, Any], str | None]:
    """Train to the last step or to a signal; the last step is saved. Return (the metrics of the last step, the name of
    the signal or None).
    """
    with (
        report.progress(state) as progress,
        StopSignals(quiet=report.quiet, agree=state.team.agree if state.team.size > 1 else None) as stop,
    ):
        record = _Loop(state, stepper, report, hooks, progress, stop).run()
        if state.saved_at != state.step:
            hooks.save()
    return record, stop.received


class _Loop:
    """Queues steps, reads several at once where reading waits for the device, and does what is due after each.

    queued: the steps whose loss and norm have not been read, the oldest first. record: the metrics of the last step.
    """

    def __init__(
        self, state: State, stepper: Stepper, report: Report, hooks: Hooks, progress: Progress, stop: StopSignals
    ) -> None:
        self._state, self._stepper, self._hooks = state, stepper, hooks
        self._progress, self._stop = progress, stop
        self._speed = _Speed(state.config.batch_size * state.config.seq_len)
        self._saver = Saver(hooks.save, report.warn, state.team.from_first)
        self._machine = machine_metrics(state)
        self._begun = time.monotonic() - state.elapsed
        self._queued: list[QueuedStep] = []
        self._record: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Make the steps; return the metrics of the last one."""
        try:
            while (wanted := self._wants_step()) or self._queued:
                self._round(wanted)
        except BaseException:
            self._end_by_error()
            raise
        return self._record

    def _wants_step(self) -> bool:
        return self._state.step < self._state.config.steps and not self._stop.received

    def _round(self, wanted: bool) -> None:
        """Queue a step if `wanted`, the answer of `_wants_step`. If it is time, read the queued steps, evaluate and
        save. A signal may come at any time, so a second call of `_wants_step` might answer otherwise, and leave no step
        to read.
        """
        state, config = self._state, self._state.config
        stepper, queued, speed, stop = self._stepper, self._queued, self._speed, self._stop
        if wanted:
            if not queued:
                speed.start()
            self._hooks.on_step_begin()
            queued.append(stepper.queue())
        final = state.step == config.steps
        evaluating = is_evaluated(config, state.step)
        saving = config.save_every and state.step % config.save_every == 0
        if len(queued) < stepper.read_every and not (evaluating or saving or stop.received):
            return
        rate = self._read(evaluating, final)
        stop.join()
        self._progress.update(state.step, self._record["loss"], rate)
        if saving and not final:
            with span("save"):
                self._saver.try_to_save()

    def _read(self, evaluating: bool, final: bool) -> float:
        """Read the queued steps, check them, evaluate after the last if wanted, and write their records. Return the
        tokens per second.
        """
        stepper, queued, stop = self._stepper, self._queued, self._stop
        read = stepper.read(queued)
        rate = self._speed.stop(len(queued))
        for numbers in read:
            stepper.check(queued[0], numbers)
            evaluated: Mapping[str, float] = {}
            if len(queued) == 1 and evaluating and (final or not stop.received):
                with span("evaluate"):
                    evaluated = self._hooks.evaluate(not final)
            self._record = self._write(queued[0], rate, evaluated)
            del queued[0]
            if self._hooks.on_step(self._record):
                stop.ask("callback")
        return rate

    def _write(self, step: QueuedStep, rate: float, evaluated: Mapping[str, float]) -> dict[str, Any]:
        """Write the record of a finished step and return it. rate: tokens per second."""
        state = self._state
        values = {"step": step.number, **step.numbers, "tokens": step.number * self._speed.tokens}
        values.update(tokens_per_second=round(rate, 1), **evaluated)
        state.elapsed = time.monotonic() - self._begun
        values["lr_groups"] = step.lr_groups
        values.update(step.data)
        if state.team.size > 1:
            values["ranks"] = state.team.size
        values.update(time=round(state.elapsed, 3), wall_time=round(time.time(), 3), **self._machine(rate))
        self._hooks.write(values)
        return values

    def _end_by_error(self) -> None:
        """Write the records of the queued steps that are sound, and save the last one."""
        try:
            for step in self._stepper.rewind(self._queued):
                self._write(step, self._speed.stop(len(self._queued)), {})
        except Exception:
            return  # the device is lost: nobody knows what is in its memory
        if not self._stop.at_once:
            self._hooks.rescue()


class _Speed:
    """Tokens per second: the average over the last 20 readings, without the time of evaluations and saves."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._recent: list[tuple[float, int]] = []  # (seconds, steps)
        self._begun = 0.0

    def start(self) -> None:
        self._begun = time.monotonic()

    def stop(self, steps: int) -> float:
        self._recent = [*self._recent[-19:], (time.monotonic() - self._begun, steps)]
        return self.tokens * sum(n for _, n in self._recent) / max(sum(t for t, _ in self._recent), 1e-9)
