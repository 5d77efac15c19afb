"""What lies where in the directory of a run: names, finding checkpoints, and putting them away."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError
from ..files import reason
from .directory import PathLike, free_name

METRICS = "metrics.jsonl"
LOCK = ".lock"
CONFIG = "config.toml"
# What a run writes beside its LOCK.
WRITTEN = re.compile(
    r"config\.toml|metrics\.jsonl|metrics\.csv|tensorboard|wandb|loss\.png|(set-aside-\d+-)?(emergency-)?checkpoint-\d+"
)
_EMERGENCY = "emergency-"
_STEP_NAME = re.compile(r"(?:emergency-)?checkpoint-(\d+)")
# What saves in a run write, and nothing else that a folder may hold; version 0.1 had numbers at the end.
_TEMPORARY_DIRECTORY = re.compile(r"\.((?:emergency-)?checkpoint-\d{8,})\.(tmp|old)-(\d+|[a-z]{10})")
_TEMPORARY_FILE = re.compile(r"\.(config\.toml|metrics\.jsonl|loss\.png)\.tmp-(\d+|[a-z]{10})")


def checkpoint_name(step: int, emergency: bool = False) -> str:
    """Return the directory name of the checkpoint of `step`. emergency: of one that is saved before an error ends the
    run.
    """
    return f"{_EMERGENCY * emergency}checkpoint-{step:08d}"


def is_emergency(path: PathLike) -> bool:
    """Whether the checkpoint is one that was saved before an error ended the run: `keep` does not count it."""
    return Path(path).name.startswith(_EMERGENCY)


def checkpoint_step(path: PathLike) -> int | None:
    """Return the step in a checkpoint's directory name, or None."""
    match = _STEP_NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def find_checkpoints(run: PathLike) -> list[Path]:
    """Return the checkpoint directories of a run, newest (highest step) first; they may be damaged. Emergency
    checkpoints are among them, behind others of their step.
    """
    run = Path(run)
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if checkpoint_step(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: (checkpoint_step(path) or 0, not is_emergency(path)), reverse=True)


def find_displaced(run: PathLike) -> list[Path]:
    """Return checkpoints that a killed save has renamed and not replaced, newest first; clean_temporary names them as
    they were.
    """
    found = []
    for path in Path(run).glob(".*checkpoint-*.old-*"):
        match = _TEMPORARY_DIRECTORY.fullmatch(path.name)
        if match and path.is_dir() and not path.with_name(match[1]).exists():
            found.append(path)
    return sorted(found, key=modified, reverse=True)


def modified(path: Path) -> float:
    """When `path` was last changed, in seconds; 0 when it has gone: a run that is alive removes checkpoints."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def displaced_hint(directory: PathLike) -> str:
    """Return "; ..." that names what a killed save left of the missing `directory`, or ""."""
    try:
        final = Path(os.path.realpath(directory))
    except ValueError:  # NUL or a lone surrogate: no path
        return ""
    if not os.path.isdir(final.parent):
        return ""
    pattern = re.compile(re.escape(f".{final.name}.old-") + r"(\d+|[a-z]{10})")
    found = [path for path in final.parent.glob(".*") if pattern.fullmatch(path.name) and path.is_dir()]
    if not found:
        return ""
    return f"; a save that was killed has left the earlier one as {max(found, key=modified)}: rename it back"


def clean_temporary(run: PathLike) -> None:
    """Remove what interrupted saves left in a run; a checkpoint that was being replaced gets its name back.

    Only for the holder of the run's lock: another process may be saving. Names of other forms are left alone.
    """
    for path in find_displaced(run):
        final = path.with_name(path.name[1:].partition(".")[0])
        if not final.exists():  # of several the newest
            _rename(path, final)
    for path in Path(run).glob(".*"):
        if _TEMPORARY_DIRECTORY.fullmatch(path.name):
            _remove(path)
        elif _TEMPORARY_FILE.fullmatch(path.name) and path.is_file():  # of files.write_file
            with contextlib.suppress(OSError):
                path.unlink()


def _rename(old: Path, new: Path) -> None:
    try:
        os.rename(old, new)
    except OSError as error:
        raise CheckpointError(f"{old} cannot be renamed to {new.name}: {reason(error)}") from None


def remove_checkpoint(path: PathLike) -> None:
    """Delete a checkpoint; renamed first, so that a half-deleted one is never taken for a damaged one."""
    path = Path(path)
    temporary = free_name(path, "tmp")
    try:
        os.rename(path, temporary)
    except OSError:
        return
    _remove(temporary)


def _remove(path: Path) -> None:
    """Delete a directory; of a link to one, the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def set_aside_after(run: PathLike, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, which a resumed run is about to write anew, and return their new paths."""
    renamed = []
    for path in find_checkpoints(run):
        if (checkpoint_step(path) or 0) > step:
            for number in range(1, 1000):
                target = path.with_name(f"set-aside-{number}-{path.name}")
                if not target.exists():
                    _rename(path, target)
                    renamed.append(target)
                    break
    return renamed
