"""The trainer_state.json of a checkpoint: what a run continues from, beside tensors."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from .. import _C, _version, saving
from ..errors import CheckpointError, ConfigError, shown
from .config import flatten
from .state import State


def trainer_state(state: State) -> dict[str, Any]:
    """The content of trainer_state.json for the current step, as JSON values."""
    return {
        "xtrain": _version.__version__,
        "step": state.step,
        "tokens": state.step * state.config.batch_size * state.config.seq_len,
        "elapsed": state.elapsed,
        "loader": state.loader.state_dict(),
        "rng": list(_C.get_rng_state()),
        "data": state.identity,
        "base": state.base,
        "config": flatten(dataclasses.replace(state.config, resume="", extend=False)),
    }


def position(state: State) -> dict[str, str]:
    """From where the next step takes its rows and its random numbers. Where callbacks of one rank alone have changed
    it, that rank's leaves are of another batch than those of the others.
    """
    return {"position in the data": str(state.loader.state_dict()), "random state": str(_C.get_rng_state())}


def begun_from(checkpoint: Path | None) -> str | None:
    """SHA-256 of a checkpoint's manifest, which has those of its files; None without a checkpoint."""
    return None if checkpoint is None else hashlib.sha256((checkpoint / saving.MANIFEST).read_bytes()).hexdigest()


def restore(state: State, checkpoint: Path) -> None:
    """Continue from a checkpoint: moments, step, position in the data, and random state."""
    stored = saving.load_checkpoint(checkpoint, state.model, state.optimizer, state.ema)
    try:
        state.identity = state.corpus.identity(known=stored["data"])
        changed = state.corpus.changed(stored["data"], state.identity)
        if changed is not None:
            raise ConfigError(
                f"resume: data was {shown(stored['config']['data'], 1000)} in this run, "
                f"and {changed!r} now holds something else"
            )
        if stored.get("base") != state.base:
            raise ConfigError(f"resume: the model {state.config.model.preset} below LoRA was another one in this run")
        state.step, state.elapsed = int(stored["step"]), float(stored["elapsed"])
        state.saved_at = -1 if saving.is_emergency(checkpoint) else state.step
        state.loader.load_state_dict(stored["loader"])
        _C.set_rng_state(tuple(stored["rng"]))
    except ConfigError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{checkpoint / 'trainer_state.json'} lacks {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint / 'trainer_state.json'} is damaged: {shown(error, 300)}") from None
    if state.step > state.config.steps:
        raise ConfigError(
            f"steps must be at least {shown(state.step)}, where the checkpoint stands, got {state.config.steps}"
        )
