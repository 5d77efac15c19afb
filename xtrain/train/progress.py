"""What a run shows while it trains: a live bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def say(text: str) -> None:
    """Print a line, if there still is somebody to read it: a closed pipe or a full disk behind stdout ends no run."""
    try:
        print(text, flush=True)
    except OSError:
        pass


class Progress:
    """Progress of `total` steps, `done` of which are behind. `every`: steps between plain lines."""

    def __init__(self, total: int, done: int = 0, *, every: int = 10, quiet: bool = False) -> None:
        self._total, self._done, self._first = total, done, done
        self._every, self._quiet = every, quiet
        self._start = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr is not None and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            known = all(
                os.get_terminal_size(sys.stderr.fileno())
            )  # some terminals do not tell their size: tqdm shows nothing
            size: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 100, "nrows": 20}
            self._bar = tqdm(total=total, initial=done, unit="step", smoothing=0.05, **size)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that `step` steps are done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._done)
        elif not self._quiet and (step % self._every == 0 or step == self._total or step == self._first + 1):
            left = (time.monotonic() - self._start) / (step - self._first) * (self._total - step)
            say(f"step {step}/{self._total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  ETA {clock(left)}")
        self._done = step

    def message(self, text: str) -> None:
        """Print lines above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.clear()
        say(text)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def clock(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
