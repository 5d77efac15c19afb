"""What a run shows while it trains: a live bar on a terminal, a display in a notebook, plain lines elsewhere, nothing
when quiet. Showing is a side effect: whatever fails in it ends no run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ..notebook.live import Live, publisher

_told: list[str] = []  # that standard output is broken, once in a process


def say(text: str) -> None:
    """Print a line, if there still is somebody to read it. What the encoding of the output lacks is spelled with
    backslashes; a pipe or terminal that has gone, or a full disk behind it, is reported once on standard error.
    """
    stream = sys.stdout
    if stream is None:
        return
    try:
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except Exception as error:
        _tell(error)


def _tell(error: Exception) -> None:
    if _told or isinstance(error, BrokenPipeError):  # `xtrain train | head`
        return
    _told.append(str(error))
    try:
        print(f"warning: standard output cannot be written: {error}", file=sys.stderr, flush=True)
    except Exception:
        pass  # nobody reads at all


class Progress:
    """Progress of `total` steps, `done` of which are behind. `every`: steps between plain lines. speed: a number of
    tokens a second as text.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        every: int = 10,
        quiet: bool = False,
        speed: Callable[[float], str] = lambda rate: f"{rate:,.0f} tokens/s",
    ) -> None:
        self._speed = speed
        self._total, self._done, self._first = total, done, done
        self._every, self._quiet = every, quiet
        self._start = time.monotonic()
        self._bar: Any = None
        self._live: Live | None = None
        if not quiet:
            try:
                new = publisher()
                if new is not None:
                    self._live = Live(total, done, new())
                else:
                    self._bar = _new_bar(total, done)
            except Exception:
                pass  # standard error is closed, or no terminal or notebook after all: plain lines

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that `step` steps are done."""
        if self._bar is not None:
            text = f"loss {loss:.3f}, {self._speed(tokens_per_second)}"
            self._on_bar("set_postfix_str", text, refresh=False)
            self._on_bar("update", step - self._done)
        elif not self._quiet:
            left = (time.monotonic() - self._start) / max(step - self._first, 1) * (self._total - step)
            line = f"step {step}/{self._total}  loss {loss:.4f}  {self._speed(tokens_per_second)}  ETA {clock(left)}"
            due = step % self._every == 0 or step == self._total or step == self._first + 1
            if not self._on_live("update", step, loss, line) and due:
                say(line)
        self._done = step

    def evaluated(self, step: int, loss: float) -> None:
        """Take the validation loss at a step, for the curve of a notebook."""
        self._on_live("evaluated", step, loss)

    def message(self, text: str) -> None:
        """Print lines above the bar, or show them in the display of a notebook, where warnings alone are printed."""
        if self._quiet or (not text.startswith("warning:") and self._on_live("message", text)):
            return
        self._on_bar("clear")
        say(text)
        self._on_bar("refresh")

    def close(self) -> None:
        """End the bar."""
        self._on_bar("close")
        self._on_live("close")
        self._bar = self._live = None

    def _on_live(self, name: str, *values: object) -> bool:
        """Call a method of the display; whether that worked. The first that fails is the last."""
        if self._live is None:
            return False
        try:
            getattr(self._live, name)(*values)
        except Exception:
            self._live = None
            return False
        return True

    def _on_bar(self, name: str, *values: object, **options: object) -> None:
        """Call a method of the bar, if there is one; the first that fails is the last."""
        bar = self._bar
        if bar is None:
            return
        try:
            getattr(bar, name)(*values, **options)
        except Exception:
            self._bar, bar.disable = None, True  # its destructor draws, too


def _new_bar(total: int, done: int) -> Any:
    """tqdm's bar on a terminal, else None."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    known = all(os.get_terminal_size(sys.stderr.fileno()))  # some terminals do not tell their size: tqdm shows nothing
    size: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 100, "nrows": 20}
    return tqdm(total=total, initial=done, unit="step", smoothing=0.05, **size)


def clock(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
