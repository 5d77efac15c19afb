"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import signal
import stat
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import shown

NAME_MAX = 255 - len("..tmp-abcdefghij")  # what file systems allow, less what write_file adds
_HANDLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_NOFOLLOW | os.O_CLOEXEC


def path_text(what: str, path: object) -> str:
    """A path as text. TypeError for anything else, ValueError for a text that names no file: with NUL, or with
    characters that file names cannot spell. Both begin with `what`, such as "load: directory".
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{what} must be a path, got {type(path).__name__}")
    text = os.fsdecode(path)
    try:
        usable = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ValueError(f"{what} must be a path that a file can have, got {shown(text)}")
    return text


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP, where nobody handles them, become SystemExit inside, so that cleaning up is not skipped."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    kept = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                kept[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def write_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], object], *, follow: bool = True) -> None:
    """Let `write` fill a temporary file beside `path`, which is put in place: see whole_file."""
    with whole_file(path, follow=follow) as (_, stream):
        write(stream)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, follow: bool = True) -> Iterator[tuple[Path, BinaryIO]]:
    """A temporary file beside `path` (where it is, and open for writing), put in place in one step when the block ends
    well, flushed to the disk: whole, or not there. A link's target is replaced, not the link; without `follow` a link
    is refused.

    OSError, whatever failed, has `path` as its filename: full disk, read-only folder, a directory of that name, and
    also one that the caller's block raises, of whatever file. What is there and no regular file is refused: a device
    would be replaced by a file. What killed writers of the same file have left is removed first.
    """
    path = os.fsdecode(path)
    with ending_in_order():
        try:
            folder, name = os.path.split(os.path.realpath(path) if follow else os.path.abspath(path))
            handle = os.open(folder, _HANDLE)  # whatever happens to the names of folders, the files are in this one
            try:
                with _filled_in(handle, name) as (temporary, stream):
                    yield Path(folder, temporary), stream
            finally:
                os.close(handle)
        except OSError as error:
            raise OSError(error.errno, reason(error), path) from None


@contextlib.contextmanager
def _filled_in(folder: int, name: str) -> Iterator[tuple[str, BinaryIO]]:
    before = _regular(folder, name)
    temporary, descriptor = _create(folder, name)
    try:
        with open(descriptor, "wb") as stream:
            yield temporary, stream
            stream.flush()
            if before is not None:
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)  # before the lock ends
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    with _readable(folder) as readable:
        if readable is not None:
            sync_names(readable)


def _regular(folder: int, name: str) -> os.stat_result | None:
    """The status of a regular file, None when there is no file. OSError for anything else."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    check_regular(status)
    return status


def check_regular(status: os.stat_result) -> None:
    """OSError for what is no regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def open_in_place(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, made if there is none, with `flags`; its descriptor. A link is not followed, and a pipe is
    not waited for: OSError for both.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        check_regular(os.lstat(path))  # says what is there
        raise
    try:
        check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _create(folder: int, name: str) -> tuple[str, int]:
    """Make a new temporary file for `name`: (its name, a descriptor). It is locked as long as its writer lives."""
    with _readable(folder) as readable:
        for left in os.listdir(readable) if readable is not None else ():
            if is_temporary(left, name):
                with contextlib.suppress(OSError):
                    _remove_of_dead(folder, left)
    while True:
        temporary = temporary_name(name)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NEW, 0o666, dir_fd=folder)
        lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another writer has removed it in the moment between the two calls


def _remove_of_dead(folder: int, name: str) -> None:
    """Remove a temporary file that no living process has locked; OSError when one has."""
    import fcntl

    descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | _NEW, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> None:
    """Lock a file or folder until its last descriptor is closed; nothing where the file system has no locks."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def temporary_name(name: str, kind: str = "tmp") -> str:
    """A name beside `name` that nobody can foresee."""
    return f".{name}.{kind}-" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(10))


def is_temporary(word: str, name: str, kind: str = "tmp") -> bool:
    """Whether temporary_name may have made `word` for `name`."""
    return re.fullmatch(re.escape(f".{name}.{kind}-") + "[a-z]{10}", word) is not None


@contextlib.contextmanager
def _readable(folder: int) -> Iterator[int | None]:
    """The folder behind a handle, open for listing and flushing; None when it may be written and not read."""
    try:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except PermissionError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str, *, follow: bool = True) -> None:
    """`text` in UTF-8, by write_file."""
    write_file(path, lambda stream: stream.write(text.encode("utf-8")), follow=follow)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: int) -> None:
    """Flush an open folder; nothing on a file system that can flush only files."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, and flush the name of each to the disk."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
    except OSError:
        if not path.is_dir():
            raise
        return
    sync_folder(path.parent)


def reason(error: OSError) -> str:
    """What the system says, without number and file."""
    return error.strerror or str(error)
