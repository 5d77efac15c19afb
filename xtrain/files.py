"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME_MAX = 255 - len("..tmp-4294967295")  # what file systems allow, less what write_file adds


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


def write_file(path: str | os.PathLike[str], write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary file beside `path` and put it in place in one step: whole, or not there. A link's
    target is replaced, not the link.

    OSError, whatever failed, has `path` as its filename: full disk, read-only folder, a directory of that name. What is
    there and no regular file is refused: a device would be replaced by a file.
    """
    path = os.fspath(path)
    target = Path(os.path.realpath(path))
    writer = threading.get_native_id()  # no two threads of a machine share one
    temporary = target.with_name(f".{target.name}.tmp-{writer}")
    with ending_in_order():
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if target.exists() and not target.is_file():
                raise OSError(errno.EINVAL, "it is not a regular file")
            write(os.fspath(temporary))
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(error.errno, reason(error), path) from None
            raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """`text` in UTF-8, by write_file; flushed to the disk."""

    def write(temporary: str) -> None:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    write_file(path, write)


def reason(error: OSError) -> str:
    """What the system says, without number and file."""
    return error.strerror or str(error)
