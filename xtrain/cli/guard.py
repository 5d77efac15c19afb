"""Every error of a command becomes one line on standard error, and an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable

from ..errors import CheckpointError, ConfigError, DataError, NonFiniteError, PeerError


def fail(message: str, status: int) -> int:
    """Print an error and return the exit status."""
    with contextlib.suppress(OSError):  # the status still tells
        print(f"xtrain: error: {message}", file=sys.stderr)
    return status


def warn(message: str) -> None:
    """Print a warning. What is wrong with standard error must not stop a command."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"xtrain: warning: {message}", file=sys.stderr)


def guard(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command; every error becomes one line on standard error, with a traceback where XTRAIN_DEBUG is not 0."""
    try:
        status = command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # `xtrain ... | head`
        _forget_output()
        return 1
    except Exception as error:
        if os.environ.get("XTRAIN_DEBUG", "0") not in ("", "0"):
            raise
        if isinstance(error, ConfigError):
            return 2 if error.told else fail(str(error), 2)
        if isinstance(error, PeerError):
            return 75 if error.told else fail(str(error), 75)  # EX_TEMPFAIL: the ranks may be started again
        if isinstance(error, (DataError, CheckpointError, NonFiniteError)):
            return fail(str(error), 1)
        if isinstance(error, OSError) and (place := _place_of(error)):
            return fail(f"{place}: {error.strerror or error}", 1)
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, MemoryError) and str(error):  # xtrain's and NumPy's say what was asked
            return fail(text, 1)
        return fail(f"{type(error).__name__}: {text} (XTRAIN_DEBUG=1 shows where)", 1)


def _forget_output() -> None:
    """Drop what is left in sys.stdout, which Python would try to write once more at exit, with a traceback."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # there is none, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place_of(error: OSError) -> str | None:
    """The file an error is about. Everything that writes files names them; a print on a full disk does not."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _forget_output()
        return "standard output"
    return None if error.filename is None else os.fsdecode(error.filename)
