"""Ctrl-C while the `xtrain` command is still importing ends it in one line, as it does later.

Imported before NumPy and the core, which take most of the time until `cli.main` can answer. In any other program, which
may want to catch a KeyboardInterrupt of `import xtrain`, nothing happens.
"""

import os as _os
import sys as _sys


def _is_command() -> bool:
    """Whether this process is `python -m xtrain` or the script that the installer wrote."""
    words = getattr(_sys, "argv", None) or [""]
    if words[0] == "-m":  # until runpy has found the module
        return ("-m", "xtrain") in zip(_sys.orig_argv, _sys.orig_argv[1:]) or "-mxtrain" in _sys.orig_argv
    if _os.path.basename(words[0]) not in ("xtrain", "xtrain.exe", "xtrain-script.py"):
        return False
    frame = _sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return "xtrain.cli" in frame.f_code.co_names  # from xtrain.cli import main


def _quiet(number: int, frame: object) -> None:
    # Not by an exception: what is half imported may turn it into an ImportError.
    _os.write(2, b"xtrain: error: stopped by Ctrl-C\n")
    _os._exit(130)


def _begin() -> None:
    """Answers Ctrl-C until `end`, when this process is the command and nobody else answers."""
    if _is_command():
        # Not `signal`, which imports enum: the core of it is there at once.
        import _signal  # pyright: ignore[reportMissingImports]  (no stub of CPython's own has it)

        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _quiet)


def end() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt."""
    import signal

    if signal.getsignal(signal.SIGINT) is _quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()
