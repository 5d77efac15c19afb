"""What ran on GPUs: the part of a profile that CUPTI records. Names in short, a table, and the rows of the trace."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GPU_PROCESS = 1 << 22  # numbers of the GPUs in a trace begin here: Linux has no process above
_LONGEST = 120


@dataclass
class Kernel:
    """A kernel, copy or fill. begin and end in ns of the clock of ops. stream: a number of CUPTI's. nbytes: None of a
    kernel.
    """

    name: str
    begin: int
    end: int
    device: int
    stream: int
    nbytes: int | None = None


def read(record: tuple[str, int, int, int, int, int]) -> Kernel:
    """A record of the core; fewer than 0 bytes are a kernel's."""
    name, nbytes, begin, end, device, stream = record
    if nbytes < 0:
        return Kernel(short(name), begin, end, device, stream)
    return Kernel(name, begin, end, device, stream, nbytes)


@functools.lru_cache(maxsize=1024)  # few kernels, many records
def short(name: str) -> str:
    """The name of a kernel without what it returns and takes: `sum_kernel<float>` of `void sum_kernel<float>(float*)`.

    A name that was not demangled stays as it is, and a long one is cut.
    """
    name = name.replace("(anonymous namespace)::", "")
    begin = depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter == " ":
            begin = i + 1
        if depth == 0 and letter == "(":
            name = name[begin:i] or name
            break
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


def busy(kernels: Iterable[Kernel]) -> int:
    """ns in which at least one of them ran."""
    total = time = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        total += max(0, kernel.end - max(kernel.begin, time))
        time = max(time, kernel.end)
    return total


def lines(kernels: list[Kernel], most: int) -> list[str]:
    """The names that took most time in sum, and of each GPU how long it computed from the first to the last."""
    found: dict[str, list[int]] = {}
    for kernel in kernels:
        row = found.setdefault(kernel.name, [0, 0])
        row[0] += 1
        row[1] += kernel.end - kernel.begin
    whole = max(sum(time for _, time in found.values()), 1)
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    text = [f"{'kernel':56}{'calls':>8}{'ms':>12}{'share':>8}"]
    for name, (calls, time) in rows[:most]:
        text.append(f"{name[:55]:56}{calls:8,}{time / 1e6:12,.3f}{100 * time / whole:7.1f}%")
    if len(rows) > most:
        rest = sum(time for _, (_, time) in rows[most:])
        text.append(f"{f'{len(rows) - most} more':56}{'':8}{rest / 1e6:12,.3f}{100 * rest / whole:7.1f}%")
    for device in sorted({kernel.device for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.device == device]
        span = max(kernel.end for kernel in mine) - min(kernel.begin for kernel in mine)
        share = 100 * busy(mine) / max(span, 1)
        text.append(
            f"GPU {device} computed or copied in {share:.1f}% of the {span / 1e6:,.3f} ms from its first kernel on"
        )
    return text


def rows(kernels: list[Kernel], start: int) -> list[dict[str, Any]]:
    """Rows of a trace that begins at `start`: a GPU is a process, "GPU 0", and a stream of it a thread. What begins
    before the one before it on its stream has ended, as launches that overlap do, is on one more thread: what is on one
    must not overlap.
    """
    text: list[dict[str, Any]] = []
    ends: dict[tuple[int, int, int], int] = {}  # of a GPU, a stream and one of its threads: when the last one ends
    numbers: dict[tuple[int, int, int], int] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        lane = 0
        while ends.get((kernel.device, kernel.stream, lane), kernel.begin) > kernel.begin:
            lane += 1
        place = kernel.device, kernel.stream, lane
        ends[place] = kernel.end
        arguments = {"stream": kernel.stream} | ({} if kernel.nbytes is None else {"bytes": kernel.nbytes})
        kind = "kernel" if kernel.nbytes is None else "copy"
        begin, duration = (kernel.begin - start) / 1000, (kernel.end - kernel.begin) / 1000
        text.append(
            {"ph": "X", "name": kernel.name, "cat": kind, "ts": begin, "dur": duration}
            | {"pid": GPU_PROCESS + kernel.device, "tid": numbers.setdefault(place, len(numbers)), "args": arguments}
        )
    named: list[dict[str, Any]] = []
    for device in sorted({device for device, _, _ in numbers}):
        process = {"ph": "M", "pid": GPU_PROCESS + device, "tid": 0}
        named.append(process | {"name": "process_name", "args": {"name": f"GPU {device}"}})
        named.append(process | {"name": "process_sort_index", "args": {"sort_index": GPU_PROCESS + device}})
    for device, stream, lane in sorted(numbers):
        name = f"stream {stream}" + (f", {lane + 1}" if lane else "")
        thread = {"ph": "M", "pid": GPU_PROCESS + device, "tid": numbers[device, stream, lane]}
        named.append(thread | {"name": "thread_name", "args": {"name": name}})
    return named + text
