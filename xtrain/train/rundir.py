"""The directory of a run: which one, which checkpoint to continue from, and its lock."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import _C, cuda, saving
from ..data import parse_sources, shares_of
from ..errors import CheckpointError, ConfigError, shown
from ..files import open_in_place, reason, write_text
from ..saving.places import CONFIG, LOCK, METRICS
from .config import GPU_RUN, KEYS, PRESETS, TrainConfig, build, check_used, flatten, to_toml

RUNS = "runs"
_INSIDE = "x" * 74 + "/" + "x" * 75  # as much room as any file in a run needs, in names that every file system takes
Entry = tuple[str, int]  # a name in a run's directory, and its inode: a file that is replaced is another one


def contents(run: str | os.PathLike[str]) -> set[Entry]:
    """The checkpoints and the metrics file of a run; nothing of a folder that is none."""
    found = set()
    for path in [*saving.find_checkpoints(run), Path(run) / METRICS]:
        with contextlib.suppress(OSError):  # there is none, or it has just been removed
            if path.name != METRICS or not path.is_dir():
                found.add((path.name, path.stat().st_ino))
    return found


def plan(given: Mapping[str, Any], warn: Callable[[str], None]) -> tuple[TrainConfig, Path | None, set[Entry]]:
    """Turn the options a user gave into (configuration with its run directory in `out`, checkpoint to continue from or
    None, contents of the directory as they were when that was decided).

    On resume, options that were not given keep the values of the run; one that would change what is computed is refused
    with both values.
    """
    given = {name: KEYS[name].check(value) for name, value in given.items()}
    for name in ("out", "name", "resume", "model.preset"):
        if given.get(name):
            _check_place(name, given[name])
    resume = given.get("resume", "")
    if resume:
        checkpoint, found = _find_resume(resume, given.get("out", ""), given.get("name", ""), warn)
        if checkpoint is not None:
            saved = saving.read_trainer_state(checkpoint).get("config")
            if not isinstance(saved, dict):
                raise CheckpointError(f"{checkpoint / 'trainer_state.json'} holds no configuration")
            base = {name: value for name, value in saved.items() if name in KEYS}
            _refuse_differences(base, given)
            place = {
                "out": os.fspath(checkpoint.parent),
                "name": checkpoint.parent.name,
                "resume": os.fspath(checkpoint),
            }
            return _with_absolute_data(build({**base, "extend": False, **given, **place})), checkpoint, found
    on_gpu = resolve_device(given.get("device", "auto")) != "cpu"
    if "model.preset" not in given and on_gpu:
        given = {**GPU_RUN, **given}
    config = _with_absolute_data(build({**given, "resume": ""}))
    check_used(config)
    if config.extend and not resume:
        raise ConfigError(f"extend must be left out without resume, got {config.extend}")
    config.precision = config.precision or ("bfloat16" if on_gpu else "float32")
    directory, found = _new_directory(config, warn if resume else None)
    config.out = os.fspath(directory)
    config.name = config.name or Path(config.out).name
    return config, None, found


def _check_place(name: str, value: str) -> None:
    """ConfigError for a path that the system does not take, alone or before the name of a file; it need not exist."""
    try:
        os.stat(Path(RUNS if name == "name" else "", value, _INSIDE))
    except UnicodeError:
        raise ConfigError(
            f"{name} must be a path that can be used, got {shown(value)}: it holds characters that no path has"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # which others tell
            raise ConfigError(f"{name} must be a path that can be used, got {shown(value)}: {reason(error)}") from None


def _with_absolute_data(config: TrainConfig) -> TrainConfig:
    """So that the run can be resumed from another directory."""
    sources = parse_sources(config.data)
    if sources is None:
        config.data = _absolute(config.data)
    else:
        places = [(_absolute(name), weight) for name, weight in sources]
        for name, _ in places:
            if "," in name:
                raise ConfigError(f"data: the path of a source must have no comma, got {name!r}")
        config.data = ",".join(f"{name}:{weight}" for name, weight in places)
    return config


def _absolute(source: str) -> str:
    return os.path.abspath(source) if source != "python" and os.path.exists(source) else source


def given_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of `config` that differ from the defaults: those its maker decided."""
    return {name: value for name, value in flatten(config).items() if value != KEYS[name].default}


def resolve_device(name: str) -> str:
    """The device that an option names; auto is a usable GPU, else the CPU. ConfigError when it cannot be used."""
    if name == "auto":
        return "cuda" if cuda.is_available() else "cpu"
    try:
        device = _C.device(name)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r} ({error})") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type != "cpu" and not cuda.is_available():
        raise ConfigError(
            f"device must be cpu, because no usable CUDA device was found, got {name!r}; see xtrain doctor"
        )
    if device.type != "cpu" and (device.index or 0) >= cuda.device_count():
        raise ConfigError(f"device must be one of the {cuda.device_count()} CUDA devices, counted from 0, got {name!r}")
    return name


def _new_directory(config: TrainConfig, start_over: Callable[[str], None] | None) -> tuple[Path, set[Entry]]:
    """The directory of a run that begins, and its contents. start_over: told of a run that has no checkpoint, which
    `auto` begins anew; None: any run is refused.
    """
    if config.out or config.name:
        path = Path(config.out or Path(RUNS) / config.name)
        if config.name and not config.out and (os.sep in config.name or config.name in (".", "..")):
            raise ConfigError(f"name must not hold a path, got {config.name!r}; use --out")
        found = contents(path)
        if start_over is not None and [name for name, _ in found] == [METRICS]:
            start_over(f"the run in {path} ended before its first checkpoint: it starts over")
        elif found:
            raise _holds_a_run(path)
        if (path / CONFIG).exists() and not (path / LOCK).exists():
            raise ConfigError(f"out must be a folder without a {CONFIG} that no run has written, got {path}")
        return path, found
    preset = config.model.preset
    stem = preset if preset in PRESETS else Path(preset).resolve().name
    numbers = [
        int(match[1])
        for path in Path(RUNS).glob("*")
        if (match := re.fullmatch(re.escape(stem) + r"-(\d+)", path.name))
    ]
    return Path(RUNS) / f"{stem}-{max(numbers, default=0) + 1}", set()


def _holds_a_run(path: Path) -> ConfigError:
    """The error of a new run that would write into the directory of another."""
    return ConfigError(f"{path} already holds a run; continue it with --resume, or give another --out or --name")


def check_unchanged(path: Path, known: set[Entry], step: int | None) -> None:
    """Refuse a directory that another run has written to since `known` were its contents. step: where a resumed run
    stands, None for a new one.
    """
    new = {name for name, _ in contents(path) - known}
    if step is None and new:
        raise _holds_a_run(path)
    newest = max(new, key=lambda name: saving.checkpoint_step(name) or 0, default="")
    if (saving.checkpoint_step(newest) or 0) > (step or 0):
        raise ConfigError(f"{path} already holds a run that has gone on to {newest}; continue it with --resume")


def write_config(path: Path, config: TrainConfig) -> None:
    """Write the config.toml of a run."""
    try:
        write_text(path / CONFIG, to_toml(config), follow=False)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be written: {reason(error)}") from None


def _saved(run: Path) -> list[Path]:
    """Return the checkpoints of a run, or else what a kill has left of one that was being replaced."""
    return saving.find_checkpoints(run) or saving.find_displaced(run)


def _find_resume(resume: str, out: str, name: str, warn: Callable[[str], None]) -> tuple[Path | None, set[Entry]]:
    """Return the checkpoint to continue from, None only for `auto` when there is no run yet, and the run's contents."""
    checkpoint = None
    if resume in ("last", "auto"):
        if out or name:
            run = Path(out or Path(RUNS) / name)
        else:
            saved = {path: _saved(path) for path in Path(RUNS).glob("*")}
            runs = [path for path, found in saved.items() if found]
            run = max(runs, key=lambda path: saving.modified(saved[path][0]), default=Path(RUNS))
        if resume == "auto" and not _saved(run):
            return None, set()
    else:
        run = Path(resume)
        if run.name == CONFIG and run.is_file():
            run = run.parent
        if saving.checkpoint_step(run.resolve()) is not None:
            checkpoint = run.resolve()
            run = checkpoint.parent
        if out and Path(out).resolve() != run.resolve():
            raise ConfigError(f"out must be {run} or left out when that run is resumed, got {out}")
        if name and name != run.resolve().name:
            raise ConfigError(f"name must be {run.resolve().name} or left out when that run is resumed, got {name}")
    if saving.find_displaced(run):
        with RunLock(run):
            saving.clean_temporary(run)
    known = contents(run)
    if checkpoint is not None:
        saving.verify_checkpoint(checkpoint)
        return checkpoint, known
    checkpoint = saving.newest_valid(run, warn)
    if checkpoint is None:
        problem = (
            "holds no valid checkpoint"
            if saving.find_checkpoints(run)
            else "holds no checkpoint"
            if run.is_dir()
            else "is no directory"
            if run.exists()
            else "does not exist"
        )
        raise CheckpointError(f"resume: {run} {problem}")
    return checkpoint, known


def _refuse_differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name == "data" and isinstance(saved.get("data"), str):
            _refuse_other_weights(saved["data"], value)
        accumulates = name == "grad_accum" and (saved.get("max_ranks") or 0) > 1  # the tree adds leaves, not pieces
        free = KEYS[name].meta["free"] and not accumulates
        if name == "data" or free or name not in saved or saved[name] == value:
            continue  # data may have moved: its content is compared when it is opened
        if name in ("steps", "max_ranks") and given.get("extend"):
            continue
        if name == "max_ranks":
            raise ConfigError(
                f"resume: max_ranks was {saved[name]} in this run, got {value}; --extend allows it, with other bits "
                "from here on"
            )
        if name == "steps":
            raise ConfigError(
                f"resume: steps was {saved[name]} in this run, got {value}; "
                "--extend allows it and stretches the schedule"
            )
        shown = "model" if name == "model.preset" else name
        raise ConfigError(
            f"resume: {shown} was {saved[name]!r} in this run, got {value!r}; leave it out, or start a new run"
        )


def _refuse_other_weights(saved: str, given: str) -> None:
    """The files of a mixture may have moved; its weights stay, as they decide which rows the sources have had."""
    before, now = (None if (found := parse_sources(text)) is None else shares_of(found) for text in (saved, given))
    if before != now:
        raise ConfigError(f"resume: data was {saved!r} in this run, got other weights, {given!r}; start a new run")


class RunLock:
    """Keeps a second process from training in the same directory; released by the system even after a kill."""

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        import fcntl

        try:
            self._descriptor = open_in_place(self._path, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {reason(error)}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(f"{self._path.parent} is in use by another training process") from None
        except OSError:
            pass  # a file system without locks
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def resolve_run_directory(path: str | os.PathLike[str], warn: Callable[[str], object] = lambda _: None) -> Path:
    """Return the model directory meant by `path`: itself, or the newest valid checkpoint of a run directory. warn is
    told of each newer one, which is damaged.
    """
    path = Path(path)
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{path} must be a run, a checkpoint or a model directory, but there is no such directory"
            + saving.displaced_hint(path)
        )
    if (path / "config.json").is_file():
        return path
    warnings: list[str] = []
    found = saving.newest_valid(path, warnings.append)
    if found is None:
        raise CheckpointError(warnings[0] if warnings else f"{path} holds no config.json and no checkpoint")
    for warning in warnings:
        warn(warning)
    return found
