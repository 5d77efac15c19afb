"""`xtrain verify`."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError
from ..saving import (
    MANIFEST,
    DirectoryReader,
    checkpoint_name,
    checkpoint_step,
    displaced_hint,
    find_checkpoints,
    is_emergency,
    verify_checkpoint,
)
from .guard import fail
from .parser import simple_options

USAGE = f"""\
usage: xtrain verify DIR

Checks every file of a checkpoint or a model directory, or of all checkpoints of a run, against the {MANIFEST} that was
saved with it, and prints a line for each directory. Exit status 1 when one is damaged. A model directory without a
{MANIFEST}, such as a download, has nothing to be checked against, and is no failure; a checkpoint without one is.
"""


def command(arguments: list[str]) -> int:
    (name,), _ = simple_options(arguments, {}, 1, USAGE)
    directories = _directories(Path(name))
    return max([_verify(directory) for directory in directories])


def _directories(path: Path) -> list[Path]:
    """The directories to check: the directory itself, or the checkpoints of a run, newest first."""
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{path} must be a run, a checkpoint or a model directory, but there is no such directory"
            + displaced_hint(path)
        )
    if _is_checkpoint(path) or any(os.path.lexists(path / name) for name in (MANIFEST, "config.json")):
        return [path]
    found = find_checkpoints(path)
    if not found:
        raise CheckpointError(f"{path} holds no {MANIFEST}, no config.json and no checkpoint")
    return found


def _is_checkpoint(path: Path) -> bool:
    """Whether a run of xtrain has named the directory: other programs write checkpoint-500."""
    path = path.resolve()
    step = checkpoint_step(path)
    return step is not None and path.name == checkpoint_name(step, is_emergency(path))


def _verify(path: Path) -> int:
    """Check one directory, print its line and return the exit status."""
    try:
        line = _check(path)
    except CheckpointError as error:
        return fail(str(error), 1)
    except OSError as error:
        return fail(f"{path} cannot be read: {error.strerror or error}", 1)
    print(f"{path}: {line}")
    return 0


def _check(path: Path) -> str:
    """What is to be said of a directory that is whole. CheckpointError or OSError for another."""
    if _is_checkpoint(path):
        verify_checkpoint(path)
    reader = DirectoryReader(path)
    if reader.records is None:
        return f"nothing to check, because there is no {MANIFEST}"
    if not _is_checkpoint(path):
        reader.verify()
    size = sum(record.size for record in reader.records.values())
    unknown = sorted(set(os.listdir(path)) - set(reader.records) - {MANIFEST})
    more = f"; not in its {MANIFEST}: {', '.join(map(ascii, unknown))}" if unknown else ""
    return f"{len(reader.records)} files, {size:,} bytes, as they were saved{more}"
