"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import _C
from ..errors import CheckpointError
from ..files import is_temporary, lock, make_folders, reason, sync_folder, sync_names, temporary_name

FORMAT = 2
MANIFEST = "manifest.json"
PIECE = 8 << 20  # bytes that one hash of the manifest covers at most
PathLike = str | os.PathLike[str]


class DirectoryWriter:
    """Collects files in a temporary directory and publishes them with one rename.

    Leaving the `with` block early removes them. What killed writers of the same directory have left is removed first.
    """

    def __init__(self, final: PathLike, *, follow: bool = True) -> None:
        """follow: of a link, replace the target and not the link; else a link is refused."""
        self._name = os.path.abspath(final)  # as the caller knows it
        self.final = Path(os.path.realpath(final) if follow else self._name)
        self.temporary = free_name(self.final, "tmp")
        self._manifest: dict[str, dict[str, Any]] = {}
        self._handle = -1  # of the temporary directory, locked as long as its writer lives

    def __enter__(self) -> DirectoryWriter:
        with self._clear_errors():
            if self.final.is_dir() and any(self.final.iterdir()) and not (self.final / MANIFEST).is_file():
                raise CheckpointError(f"{self._name} must be new, empty or an earlier save, but it holds other files")
            make_folders(self.final.parent)
            _remove_of_dead(self.final)
            while self._handle < 0:
                self.temporary.mkdir()
                self._handle = _locked(self.temporary)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)  # what was replaced, after an exchange
        os.close(self._handle)

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._name} cannot be written: {reason(error)}; nothing that was saved before is lost"
            ) from error

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write file `name` from bytes-like pieces and flush it to the disk."""
        written: list[tuple[int, str]] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            self._clear_errors(),
            open(os.open(name, flags, 0o666, dir_fd=self._handle), "wb", buffering=0) as file,
        ):
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
            sync_names(self._handle)
            with _renames:
                old = self._replace()
            sync_folder(self.final.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _replace(self) -> Path | None:
        """Give the directory its name; what has had that name is returned under its new one, or has become the
        temporary directory.
        """
        if not os.path.lexists(self.final):
            os.rename(self.temporary, self.final)
            return None
        if self.final.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        if not self.final.is_dir():  # a file, or a device: it must not be moved away
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if _C.exchange(self.temporary, self.final):
            return None
        old = free_name(self.final, "old")
        try:  # in two steps; a kill between them leaves `old`, which clean_temporary and displaced_hint know
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
    """An unused name `.NAME.kind-XXXXXXXXXX` beside a directory."""
    path = final.with_name(temporary_name(final.name, kind))
    return path if not os.path.lexists(path) else free_name(final, kind)


def _locked(directory: Path) -> int:
    """A handle of a new directory, locked; -1 when another writer took it for one that a kill has left."""
    try:
        handle = _open(directory)
    except FileNotFoundError:
        return -1
    lock(handle)
    if os.path.lexists(directory):
        return handle
    os.close(handle)
    return -1


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_of_dead(final: Path) -> None:
    """Remove the temporary directories of `final` that no living process has locked."""
    import fcntl

    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may be written and not read
        names = os.listdir(final.parent)
    for name in names:
        if is_temporary(name, final.name):
            with contextlib.suppress(OSError):
                handle = _open(final.with_name(name))
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(final.with_name(name), ignore_errors=True)
                finally:
                    os.close(handle)
