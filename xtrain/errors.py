"""Errors that a user can cause and repair: each carries one sentence, and the command line prints exactly that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ConfigError(ValueError):
    """An unknown option, a value of the wrong type or range, or a resume with another configuration. told: whether the
    watchdog has printed the error.
    """

    told = False


class DataError(ValueError):
    """Data that is missing, unreadable, empty, too short, or does not fit the model."""


class CheckpointError(ValueError):
    """A checkpoint or model directory that is missing, damaged, hostile, or cannot be written."""


class NonFiniteError(FloatingPointError):
    """The loss or a gradient became NaN or infinite. The last checkpoint on disk is from before that step, and the
    Trainer stands before it too.
    """


class PeerError(RuntimeError):
    """Another process of the run is missing, has left, or makes another exchange than this one. The command ends with
    status 75, so that the launcher may start the run again. told: whether the watchdog has printed the error.
    """

    told = False


def shown(value: Any, most: int = 100) -> str:
    """A value, or the text of an exception, for a message: one line of some `most` printable characters. An int
    of thousands of digits, and what is nested deeply, has no repr.
    """
    try:
        text = " ".join(str(value).split()) if isinstance(value, BaseException) else repr(value)
    except (ValueError, RecursionError):
        text = f"a long {type(value).__name__}"
    text = text if len(text) <= most else text[:most] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def nearest(word: str, known: Sequence[str], before: str = "") -> str:
    """Return `; did you mean ...?` for the known word nearest to `word`; nothing where none is near."""
    import difflib  # here: only a mistake needs it

    # The whole name or its last part, whichever is nearer: --momentum_decay for --optim.weight_decay.
    found: list[tuple[float, str]] = []
    for asked, names, cutoff in (
        (word, {name.lower(): name for name in known}, 0.65),
        (word.rpartition(".")[2], {name.rpartition(".")[2].lower(): name for name in known}, 0.6),
    ):
        for match in difflib.get_close_matches(asked.lower(), names, n=1, cutoff=cutoff):
            found.append((difflib.SequenceMatcher(None, match, asked.lower()).ratio(), names[match]))
    return f"; did you mean {before}{max(found, key=lambda pair: pair[0])[1]}?" if found else ""
