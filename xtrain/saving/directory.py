"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
PIECE = 8 << 20  # bytes that one hash of the manifest covers at most
PathLike = str | os.PathLike[str]


class DirectoryWriter:
    """Collects files in a temporary directory and publishes them with one rename.

    Leaving the `with` block early removes them.
    """

    def __init__(self, final: PathLike) -> None:
        self._name = os.path.abspath(final)  # as the caller knows it
        self.final = Path(os.path.realpath(final))  # a link's target is replaced, not the link
        self.temporary = free_name(self.final, "tmp")
        self._manifest: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> DirectoryWriter:
        with self._clear_errors():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._name} cannot be written: {error.strerror or error}; nothing that was saved before is lost"
            ) from error

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write file `name` from bytes-like pieces and flush it to the disk."""
        written: list[tuple[int, str]] = []
        with self._clear_errors(), open(self.temporary / name, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), PIECE):
                    part = view[start : start + PIECE]
                    written.append((len(part), hashlib.sha256(part).hexdigest()))
                    while part:
                        part = part[file.write(part) :]
            os.fsync(file.fileno())
        self._manifest[name] = {"size": sum(size for size, _ in written), "pieces": written}

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON, in ASCII: a path that is not valid Unicode has no UTF-8."""
        self.write(name, [(json.dumps(value, indent=2) + "\n").encode("ascii")])

    def publish(self) -> None:
        """Write the manifest and give the directory its name, replacing a directory of that name."""
        manifest = {"format": FORMAT, "files": self._manifest}
        self.write(MANIFEST, [json.dumps(manifest).encode()])  # ends with its brace: any cut is seen
        with self._clear_errors():
            _sync_directory(self.temporary)
            with _renames:
                old = self._replace()
            _sync_directory(self.final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _replace(self) -> Path | None:
        """Give the directory its name; what has had that name is returned under its new one."""
        if not os.path.lexists(self.final):
            os.rename(self.temporary, self.final)
            return None
        if not self.final.is_dir():  # a file, or a device: it must not be moved away
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        old = free_name(self.final, "old")
        try:
            os.rename(self.final, old)
            os.rename(self.temporary, self.final)
        except BaseException:  # Ctrl-C between the two is one of them
            if old.exists() and not self.final.exists():
                os.rename(old, self.final)
            elif not self.temporary.exists():  # it came after the two
                shutil.rmtree(old, ignore_errors=True)
            raise
        return old


_renames = threading.RLock()  # two threads that replace one directory take turns; a signal's handler may save, too


def _forked() -> None:
    global _renames
    _renames = threading.RLock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


def free_name(final: Path, kind: str) -> Path:
    """First unused name `.NAME.kind-N`. N starts at the thread's id, which no two threads of a machine share."""
    names = (final.with_name(f".{final.name}.{kind}-{n}") for n in itertools.count(threading.get_native_id()))
    return next(path for path in names if not os.path.lexists(path))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
