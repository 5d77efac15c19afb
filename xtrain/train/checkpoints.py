"""When a run writes checkpoints, which it removes, and the one that it writes before an error ends it."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from pathlib import Path

from .. import _C, saving
from ..errors import CheckpointError
from .nonfinite import first_bad_parameter
from .report import Report
from .resume import trainer_state
from .state import State
from .step import check_not_torn

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_checkpoint(state: State, report: Report, emergency: bool = False) -> Path:
    """Write a checkpoint of the current step and return its directory. CheckpointError when that fails.

    On a full disk the oldest checkpoint makes room, once, unless all are kept or no later one is whole.
    """
    check_not_torn(state)
    path = state.directory / saving.checkpoint_name(state.step, emergency)
    try:
        _write(state, path)
    except CheckpointError as error:
        oldest = _removable(state) if getattr(error.__cause__, "errno", None) in _NO_ROOM else None
        if oldest is None:
            raise
        report.warn(f"{error}; {oldest.name} is removed to make room")
        saving.remove_checkpoint(oldest)
        _write(state, path)
    return path


def _write(state: State, path: Path) -> None:
    saving.save_checkpoint(path, state.model, state.optimizer, trainer_state(state), state.tokenizer, state.ema)


def _removable(state: State) -> Path | None:
    """The oldest checkpoint that a full disk may cost: a later one, up to this step, is whole."""
    found = [path for path in saving.find_checkpoints(state.directory) if _step(path) <= state.step]
    whole = saving.first_valid(found) if state.config.keep else None
    older = [path for path in found if whole and _step(path) < _step(whole) and not saving.is_emergency(path)]
    return older[-1] if older else None


def remove_old(state: State) -> None:
    """Keep `keep` checkpoints up to this step. Later ones belong to somebody else; emergency checkpoints stay."""
    found = [path for path in saving.find_checkpoints(state.directory) if not saving.is_emergency(path)]
    before = [path for path in found if _step(path) < state.step]
    for path in before[state.config.keep - 1 :] if state.config.keep else []:
        saving.remove_checkpoint(path)


def _step(path: Path) -> int:
    return saving.checkpoint_step(path) or 0


class Saver:
    """The saves of a run that it can do without: the next one may work, and the last one must.

    After one that failed, none is tried before as much time has passed as that took: a full disk takes no more than
    half of a run's time. A reason is reported once, until a save works. decide: asks one of several processes, so that
    all save or none.
    """

    def __init__(
        self,
        save: Callable[[], object],
        warn: Callable[[str], None],
        decide: Callable[[Callable[[], bool]], bool] = lambda ask: ask(),
    ) -> None:
        self._save, self._warn, self._decide = save, warn, decide
        self._not_before = -math.inf
        self._reported: object = None

    def try_to_save(self) -> None:
        """Save, unless it is too early to try again."""
        begun = time.monotonic()
        if self._decide(lambda: begun < self._not_before):
            return
        try:
            self._save()
            self._reported = None
        except CheckpointError as error:
            now = time.monotonic()
            self._not_before = now + (now - begun)
            reason = getattr(error.__cause__, "errno", None) or str(error)
            if reason != self._reported:
                self._warn(str(error))
            self._reported = reason


def rescue(state: State, report: Report) -> None:
    """Write an emergency checkpoint of the last finished step, before an error ends the run; never raises an Exception.

    Nothing is written at step 0 or where the step has a checkpoint, nor of values that are not to be trusted: of
    parameters between two steps, and of NaN.
    """
    if state.step in (0, state.saved_at):
        return
    try:
        bad = first_bad_parameter(state.model) or _bad_moment(state)
        if bad is not None:
            raise CheckpointError(bad)
        path = write_checkpoint(state, report, emergency=True)
        report.warn(f"an error ends the run; the state after step {state.step} is in {path}")
    except Exception as error:  # the error that ends the run is the one to be raised
        report.warn(f"an error ends the run, and the state after step {state.step} could not be saved: {error}")


def _bad_moment(state: State) -> str | None:
    """Name a parameter with NaN in what the optimizer keeps of it, or None. An infinite second moment is none: the
    square of a large gradient.
    """
    for name, parameter in state.model.named_parameters():
        kept = state.optimizer.state.get(parameter) or {}
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "master"):
            if key in kept and kept[key].numel() and _C.stats(kept[key].detach())[3]:
                return f"{key} of parameter {name} has NaN"
    return None
