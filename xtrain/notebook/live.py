"""A run in a notebook: one display that is updated in place, with bar, numbers, curve and the last messages.

A notebook is where an IPython kernel runs in this process, which is looked up and never imported. Only messages of
Jupyter's protocol with HTML go out (`display_data`, then `update_display_data` of the same id): no package for widgets
is needed, and a notebook that is saved keeps the last state.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from html import escape

from . import curve
from .html import shown

_OFTEN = 0.5  # seconds between two updates, at least: browsers and saved files do not keep up with every step
_MESSAGES = 12
Publish = Callable[[str, str, bool], None]  # (HTML, plain text, whether it replaces what was shown before)


def publisher() -> Callable[[], Publish] | None:
    """What makes displays in the notebook of this process; None where there is none.

    XTRAIN_NOTEBOOK=0 means plain lines. Databricks and Spyder run kernels too and do not update displays.
    """
    if os.environ.get("XTRAIN_NOTEBOOK") == "0" or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return None
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find is not None else None
    if getattr(shell, "kernel", None) is None or type(shell).__name__ == "SpyderShell":
        return None
    publish = shell.display_pub.publish  # pyright: ignore[reportOptionalMemberAccess]  (it has a kernel)

    def new() -> Publish:
        name = uuid.uuid4().hex

        def show(html: str, text: str, update: bool) -> None:
            data = {"text/html": html, "text/plain": text}
            publish(data=data, metadata={}, transient={"display_id": name}, update=update)

        return show

    return new


class Live:
    """The display of a run of `total` steps, `done` of which are behind.

    publish: shows. clock: seconds.
    """

    def __init__(self, total: int, done: int, publish: Publish, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._step, self._publish, self._clock = total, done, publish, clock
        self._losses, self._evaluated = curve.Series(), curve.Series()
        self._line = f"step {done}/{total}"
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._shown_at: float | None = None

    def update(self, step: int, loss: float, line: str) -> None:
        """Show that `step` steps are done. line: the numbers of the last one."""
        self._step, self._line = step, line
        self._losses.add(step, loss)
        self._show(step == self._total)

    def evaluated(self, step: int, loss: float) -> None:
        """Take a validation loss, in the unit of the losses."""
        self._evaluated.add(step, loss)

    def message(self, text: str) -> None:
        """Show lines below the curve; the oldest go."""
        self._messages.extend(text.splitlines())
        self._show(False)

    def close(self) -> None:
        """Show the last state."""
        self._show(True)

    def _show(self, now: bool) -> None:
        time = self._clock()
        first = self._shown_at is None
        if first or now or time - (self._shown_at or 0.0) >= _OFTEN:
            self._publish(self._html(), self._line, not first)
            self._shown_at = time

    def _html(self) -> str:
        share = 100 * self._step / max(self._total, 1)
        bar = (
            '<div style="height:6px;max-width:520px;background:rgba(128,128,128,0.3)" role="progressbar" '
            f'aria-valuenow="{share:.0f}"><div style="height:6px;width:{share:.1f}%;background:#4c86c6"></div></div>'
        )
        picture = curve.svg(self._losses.points(), self._evaluated.points(), "loss, nats per token")
        messages = shown("\n".join(self._messages)) if self._messages else ""
        return f"<div>{bar}<div>{escape(self._line)}</div>{picture}{messages}</div>"
