"""Writers of metrics in other formats than metrics.jsonl. One that fails gives a warning, and the run goes on."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from ...errors import ConfigError, nearest
from ...files import check_regular, write_text
from ...saving.places import METRICS
from ..config import flatten
from ..metrics import read_metrics
from ..state import State
from .base import Callback
from .tensorboard import TensorBoardWriter, scalars

COLUMNS = (
    "step", "loss", "val_loss", "val_bpb", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory", "time",
    "wall_time",
)  # fmt: skip


class CSVWriter(Callback):
    """metrics.csv in the run's directory: a line a step, with the columns of `COLUMNS`. A resumed run writes the lines
    up to its step again, from metrics.jsonl.
    """

    _file: TextIO | None = None

    def on_start(self, state: State) -> None:
        path = state.directory / "metrics.csv"
        if path.is_symlink() or path.exists():
            check_regular(path.lstat())
        write_text(path, "", follow=False)
        self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 (closed by on_end)
        self._file.write(",".join(COLUMNS) + "\r\n")
        for record in read_metrics(state.directory / METRICS):
            self._write(record)
        self._file.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        row = [record.get(name, "") for name in COLUMNS]
        if self._file is not None:
            csv.writer(self._file).writerow(row)

    def on_step(self, state: State, record: Mapping[str, Any]) -> None:
        self._write(record)
        if self._file is not None:
            self._file.flush()

    def on_end(self, state: State, result: Any) -> None:
        if self._file is not None:
            self._file.close()


class WandbWriter(Callback):
    """Weights & Biases (needs the package wandb): a run with the options of this one. options: of wandb.init."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def on_start(self, state: State) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("writers: wandb needs the package wandb: pip install wandb") from None
        given = {"project": "xtrain", "name": state.config.name, "dir": str(state.directory), "resume": "allow"}
        self._run = wandb.init(**{**given, "config": flatten(state.config), **self._options})

    def on_step(self, state: State, record: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log(scalars(record), step=record["step"])

    def on_end(self, state: State, result: Any) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if result is not None else 1)


class _Isolated(Callback):
    """A writer whose first error is a warning; after that, until the next run, it is called at the end alone, where it
    closes what it has opened. A ConfigError, for a missing package, is raised.
    """

    def __init__(self, name: str, writer: Callback) -> None:
        self._name, self._writer, self._works = name, writer, True

    def _call(self, state: State, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(state, *arguments)
        except ConfigError:
            raise
        except Exception as error:
            self._works = False
            state.failed(f"the writer {self._name}", error)  # which tells the first

    def on_start(self, state: State) -> None:
        self._works = True  # a second run of a Trainer opens it again
        self._call(state, self._writer.on_start)

    def on_step(self, state: State, record: Mapping[str, Any]) -> None:
        if self._works:
            self._call(state, self._writer.on_step, record)

    def on_end(self, state: State, result: Any) -> None:
        self._call(state, self._writer.on_end, result)


WRITERS: dict[str, Callable[[], Callback]] = {
    "csv": CSVWriter,
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
}


def make_writers(names: str) -> list[Callback]:
    """The writers of these names, with commas between. ConfigError for a name that is none."""
    found: list[Callback] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in WRITERS:
            raise ConfigError(f"writers must be among {', '.join(WRITERS)}, got {name!r}{nearest(name, list(WRITERS))}")
        found.append(_Isolated(name, WRITERS[name]()))
    return found
