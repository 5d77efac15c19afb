"""metrics.jsonl: one JSON object per step."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import check_regular, open_in_place, reason, sync_folder, write_text
from ..saving.places import METRICS

_LONGEST = 1 << 20  # bytes of a line


class Metrics:
    """The metrics file of a run; each record is flushed, and comes to the disk with the next checkpoint.

    A full disk costs records, not the run: it is reported once through `warn`. CheckpointError when the file cannot be
    opened, or cut back to `keep_until`, to begin with; then it is as before. more: goes into the record of
    `keep_until`.
    """

    def __init__(
        self, run: Path, warn: Callable[[str], None], keep_until: int, more: Mapping[str, Any] | None = None
    ) -> None:
        self._path, self._warn, self._failed = run / METRICS, warn, False
        try:
            with contextlib.suppress(FileNotFoundError):
                check_regular(os.lstat(self._path))
                self._truncate(keep_until, more or {})
            descriptor = open_in_place(self._path, os.O_WRONLY | os.O_APPEND)
            self._file = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
            sync_folder(run)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {reason(error)}") from None

    def _truncate(self, step: int, more: Mapping[str, Any]) -> None:
        """Drop the records after `step`, which a run that is resumed, or starts over, will write again; add `more` to
        that of `step`.
        """
        kept = [record for record in read_metrics(self._path) if record["step"] <= step]
        kept = [{**record, **more} if record["step"] == step else record for record in kept]
        write_text(self._path, "".join(map(_line, kept)), follow=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        with self._reported():
            self._file.write(_line(record))
            self._file.flush()

    def sync(self) -> None:
        """Flush the records to the disk."""
        with self._reported():
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush the records to the disk and close the file."""
        self.sync()
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # records are never worth a run
            if not self._failed:
                why = reason(error) if isinstance(error, OSError) else error
                self._warn(f"{self._path} cannot be written: {why}; training goes on")
            self._failed = True


def _line(record: Mapping[str, Any]) -> str:
    """The line of a record. JSON has no NaN and no infinity: null stands for them."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl file; null becomes NaN. A line that was cut off or damaged is left out; one
    of more than 1 MiB, such as a hole in the file, ends it.

    OSError for what is no regular file: a pipe would be waited for.
    """
    records = []
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        check_regular(os.fstat(stream.fileno()))
        while len(line := stream.readline(_LONGEST + 1)) in range(1, _LONGEST + 1):
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append({key: math.nan if value is None else value for key, value in record.items()})
    return records
