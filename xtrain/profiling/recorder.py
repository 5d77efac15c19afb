"""Records what runs when. Ops are recorded by the core, spans of Python here, by the same clock; what is left between
them inside a span is the host's: Python, and whatever else is no op. What runs on GPUs meanwhile is in kernels.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _C
from .._version import __version__
from ..files import write_text
from . import kernels
from .kernels import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self

_running: profile | None = None


@dataclass
class Event:
    """Something that ran. kind: "span", "forward" or "backward" of an op, or "host". begin and end in ns of one clock;
    thread: a number. shapes: of tensors, of an op: the first arguments, or the gradients of the results.
    """

    name: str
    kind: str
    begin: int
    end: int
    thread: int
    shapes: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    children: list[Event] = field(default_factory=list, repr=False)

    @property
    def own(self) -> int:
        """ns outside of the children."""
        return self.end - self.begin - sum(child.end - child.begin for child in self.children)


class profile:
    """Records what runs inside the `with` block, in all threads of this process.

        with xt.profile("trace.json") as found:
            train_step()
        print(found.table())

    path: where the trace goes at the end, as JSON that ui.perfetto.dev and chrome://tracing show; None for nowhere. On
    a GPU an op lasts until it is launched; `kernels` has what ran on GPUs that were in use before, in replayed graphs,
    too. It needs NVIDIA's CUPTI; without it `no_kernels` says why there are none. Begin and end wait for the GPUs.
    RuntimeError when another profile runs, OSError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._spans: list[Event] = []
        self.roots: list[Event] = []
        self.kernels: list[Kernel] = []
        self.no_kernels = ""
        self.lost = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._path is not None:
            self.save(self._path)

    def start(self) -> None:
        """Begin to record."""
        global _running
        if not _C.spans_start():
            raise RuntimeError("profile: another one is running in this process")
        try:
            self.no_kernels = _C.kernels_start()
        except BaseException:  # Ctrl-C, say: the next profile may begin
            try:
                _C.kernels_stop()
            finally:
                _C.spans_stop()
            raise
        self._spans, _running = [], self  # from now on it can be ended, by another thread, too

    def stop(self) -> None:
        """End the recording: `roots` has what ran, in order, and what ran inside of that as its children; `kernels` has
        what ran on GPUs; `lost` events were without memory.
        """
        global _running
        if _running is not self:
            return
        _running = None
        try:
            found, lost, why = _C.kernels_stop()
        finally:  # the next profile may begin, whatever interrupts this one
            ops, self.lost = _C.spans_stop()
        self.lost += lost
        self.no_kernels = self.no_kernels or why
        self.kernels = [kernels.read(record) for record in found]
        events = [
            Event(name, "backward" if rule else "forward", begin, end, thread, shapes)
            for name, rule, begin, end, thread, shapes in ops
        ]
        self.roots = _tree(events + self._spans)

    def events(self) -> Iterator[Event]:
        """All events, each before what ran inside it."""
        waiting = self.roots[::-1]
        while waiting:
            event = waiting.pop()
            yield event
            waiting += event.children[::-1]

    def trace(self) -> dict[str, Any]:
        """The events in the format of Chrome's traces: complete events ("X"), times in microseconds from the first."""
        events = list(self.events())
        start, process = min((one.begin for one in [*events, *self.kernels]), default=0), os.getpid()
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": f"thread {thread}"}}
            for thread in sorted({event.thread for event in events})
        ]
        for event in events:
            arguments = {**event.values, **({"shapes": event.shapes} if event.shapes else {})}
            begin, duration = (event.begin - start) / 1000, (event.end - event.begin) / 1000
            rows.append(
                {"ph": "X", "name": event.name, "cat": event.kind, "ts": begin, "dur": duration, "pid": process}
                | {"tid": event.thread, "args": arguments}
            )
        rows += kernels.rows(self.kernels, start)
        about = {"xtrain": __version__, "lost": self.lost, "no_kernels": self.no_kernels}
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace."""
        write_text(Path(path), json.dumps(self.trace()) + "\n", follow=True)

    def table(self, most: int = 12) -> str:
        """The names that took most time by themselves, without what ran inside them."""
        found: dict[tuple[str, str], list[int]] = {}
        for event in self.events():
            row = found.setdefault((event.name, event.kind), [0, 0])
            row[0] += 1
            row[1] += event.own
        whole = max(sum(own for _, own in found.values()), 1)
        rows = sorted(found.items(), key=lambda item: -item[1][1])
        lines = [f"{'name':32}{'kind':10}{'calls':>8}{'ms':>12}{'share':>8}"]
        for (name, kind), (calls, own) in rows[:most]:
            lines.append(f"{name[:31]:32}{kind:10}{calls:8,}{own / 1e6:12,.3f}{100 * own / whole:7.1f}%")
        if len(rows) > most:
            rest = sum(own for _, (_, own) in rows[most:])
            lines.append(f"{f'{len(rows) - most} more':32}{'':10}{'':8}{rest / 1e6:12,.3f}{100 * rest / whole:7.1f}%")
        return "\n".join(lines)

    def kernel_table(self, most: int = 12) -> str:
        """The kernels, copies and fills that took most time; or why there are none; "" where no GPU is in use."""
        if self.kernels:
            return "\n".join(kernels.lines(self.kernels, most))
        return f"no kernels in the profile: {self.no_kernels}" if self.no_kernels else ""


@contextlib.contextmanager
def span(name: str, **values: Any) -> Iterator[None]:
    """Name what runs inside the `with` block in the running profile, if there is one. values: shown beside it."""
    found = _running
    if found is None:
        yield
        return
    begin, thread = _C.spans_clock()
    try:
        yield
    finally:
        end, _ = _C.spans_clock()
        if _running is found:
            found._spans.append(Event(name, "span", begin, end, thread, values=values))


def _tree(events: list[Event]) -> list[Event]:
    """The events that are inside no other, with the others inside them. What is left in a span between its children is
    an event of the host.
    """
    roots: list[Event] = []
    open_events: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        above = open_events.setdefault(event.thread, [])
        while above and above[-1].end < event.end:
            above.pop()
        (above[-1].children if above else roots).append(event)
        above.append(event)
    for event in events:
        if event.kind == "span" and event.children:
            event.children = _filled(event)
    return roots


def _filled(event: Event) -> list[Event]:
    found, time = [], event.begin
    for child in event.children:
        if child.begin > time:
            found.append(Event("host", "host", time, child.begin, event.thread))
        found.append(child)
        time = child.end
    if event.end > time:
        found.append(Event("host", "host", time, event.end, event.thread))
    return found
