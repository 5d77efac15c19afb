"""The loop over the steps of a run: reads metrics, evaluates and saves when it is time, and stops on a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..profiling import span
from .checkpoints import Saver
from .progress import Progress
from .report import Report, machine_metrics
from .state import State
from .step import QueuedStep, Stepper
from .stop import StopSignals


def loop(
    state: State,
    stepper: Stepper,
    report: Report,
    write: Callable[[Mapping[str, Any]], None],
    on_step_begin: Callable[[], None],
    on_step: Callable[[Mapping[str, Any]], bool | None],
    evaluate: Callable[[bool], dict[str, float]],
    save: Callable[[], Any],
    rescue: Callable[[], None],
) -> tuple[dict[str, Any], str | None]:
    """Train to the last step or to a signal; the last step is saved. Return (the metrics of the last step, the signal).

    on_step_begin: called before each step, for the callbacks. write: takes the metrics of every step. on_step: takes
    them after that, for the callbacks; True ends the run. evaluate: takes whether to show a sample, returns further
    metrics. rescue: saves the last finished step before an error ends the run.
    """
    with (
        report.progress(state) as progress,
        StopSignals(quiet=report.quiet, agree=state.team.agree if state.team.size > 1 else None) as stop,
    ):
        record = _steps(state, stepper, report, write, on_step_begin, on_step, evaluate, save, rescue, progress, stop)
        if state.saved_at != state.step:
            save()
    return record, stop.received


def _steps(
    state: State,
    stepper: Stepper,
    report: Report,
    write: Callable[[Mapping[str, Any]], None],
    on_step_begin: Callable[[], None],
    on_step: Callable[[Mapping[str, Any]], bool | None],
    evaluate: Callable[[bool], dict[str, float]],
    save: Callable[[], Any],
    rescue: Callable[[], None],
    progress: Progress,
    stop: StopSignals,
) -> dict[str, Any]:
    config = state.config
    record: dict[str, Any] = {}
    speed = _Speed(config.batch_size * config.seq_len)
    saver = Saver(save, report.warn, state.team.from_first)
    queued: list[QueuedStep] = []
    begun = time.monotonic() - state.elapsed
    machine = machine_metrics(state)

    def note(step: QueuedStep, rate: float, evaluated: Mapping[str, float]) -> dict[str, Any]:
        """Write the record of a finished step."""
        values = {"step": step.number, **step.numbers, "tokens": step.number * speed.tokens}
        values.update(tokens_per_second=round(rate, 1), **evaluated)
        state.elapsed = time.monotonic() - begun
        values["lr_groups"] = step.lr_groups
        values.update(step.data)
        if state.team.size > 1:
            values["ranks"] = state.team.size
        values.update(time=round(state.elapsed, 3), wall_time=round(time.time(), 3), **machine(rate))
        write(values)
        return values

    try:
        while queued or (state.step < config.steps and not stop.received):
            if state.step < config.steps and not stop.received:
                if not queued:
                    speed.start()
                on_step_begin()
                queued.append(stepper.queue())
            final = state.step == config.steps
            evaluating = final or (config.eval_every and state.step % config.eval_every == 0)
            saving = config.save_every and state.step % config.save_every == 0
            if len(queued) < stepper.read_every and not (evaluating or saving or stop.received):
                continue
            read = stepper.read(queued)
            rate = speed.stop(len(queued))
            for numbers in read:
                stepper.check(queued[0], numbers)
                last = len(queued) == 1 and evaluating and (final or not stop.received)
                evaluated: Mapping[str, float] = {}
                if last:
                    with span("evaluate"):
                        evaluated = evaluate(not final)
                record = note(queued[0], rate, evaluated)
                del queued[0]
                if on_step(record):
                    stop.ask("callback")
            stop.join()
            progress.update(state.step, record["loss"], rate)
            if saving and not final:
                with span("save"):
                    saver.try_to_save()
    except BaseException:
        try:
            for step in stepper.rewind(queued):
                note(step, speed.stop(len(queued)), {})
        except Exception:
            pass  # the device is lost: nobody knows what is in its memory
        else:
            if not stop.at_once:
                rescue()
        raise
    return record


class _Speed:
    """Tokens per second: the average over the last steps, without the time of evaluations and saves."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._recent: list[tuple[float, int]] = []  # (seconds, steps)
        self._begun = 0.0

    def start(self) -> None:
        self._begun = time.monotonic()

    def stop(self, steps: int) -> float:
        self._recent = [*self._recent[-19:], (time.monotonic() - self._begun, steps)]
        return self.tokens * sum(n for _, n in self._recent) / max(sum(t for t, _ in self._recent), 1e-9)
