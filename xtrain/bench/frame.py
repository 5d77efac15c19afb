"""What every benchmark shares: turns of equal contenders, medians, the machine's description, tables, whole files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _C
from .._version import __version__
from ..errors import ConfigError, nearest
from ..files import NAME_MAX, write_text

BURST = 0.02  # seconds of one turn: far above the clock's resolution
PAUSE = (
    0.15  # seconds between turns: idle threads of other libraries spin for some 100 ms, in the way of who comes next
)
TURNS = 9
ENOUGH = 2.0  # seconds of measurement after which a slow contender has had turns enough ...
FEWEST = 3  # ... if it has had this many

# A device that works while the host goes on needs no pauses, and is steadier.
TURNS_ON_DEVICE = 5
ENOUGH_ON_DEVICE = 0.3
MOST_CALLS = 4096  # that wait in the queue of a device


def burst(call: Callable[[], Any], count: int, wait: Callable[[], Any] | None) -> float:
    """Seconds of `count` calls; on a device, from when it has nothing to do until it has nothing to do again."""
    if wait is not None:
        wait()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    if wait is not None:
        wait()
    return time.perf_counter() - begun


def calls_of_a_turn(call: Callable[[], Any], wait: Callable[[], Any] | None) -> int:
    """How many calls take about BURST seconds. One call on a device is mostly the wait: more are tried."""
    if wait is None:
        return max(1, round(BURST / max(burst(call, 1, None), 1e-7)))
    count = 1
    while True:
        spent = max(burst(call, count, wait), 1e-7)
        fitting = min(MOST_CALLS, max(1, round(count * BURST / spent)))
        if spent >= BURST / 4 or fitting <= count:
            return fitting
        count = min(8 * count, fitting)


def measure(
    contenders: Mapping[Any, Callable[[], Any]], wait: Callable[[], Any] | None = None
) -> dict[Any, list[float]]:
    """Seconds per call, one number a turn, of every contender.

    Contenders take turns, in an order that is reversed every time, so that a change of the machine's clock or load
    meets all of them. A turn repeats the call for about BURST seconds; a quick call runs once before the clock starts,
    to wake threads and fill caches. The first call of all is a warm-up.

    wait: returns when the device has done all it was asked for. Without it, a call's work is done when it returns.
    """
    turns, pause, enough = (TURNS, PAUSE, ENOUGH) if wait is None else (TURNS_ON_DEVICE, 0.0, ENOUGH_ON_DEVICE)
    calls, times = {}, {name: [] for name in contenders}
    for name, call in contenders.items():
        call()
        calls[name] = calls_of_a_turn(call, wait)
    for turn in range(turns):
        for name in list(contenders) if turn % 2 == 0 else list(contenders)[::-1]:
            call, count = contenders[name], calls[name]
            spent = sum(times[name]) * count
            if len(times[name]) >= FEWEST and spent > enough:
                continue
            time.sleep(pause)
            if count > 1:
                call()
            times[name].append(burst(call, count, wait) / count)
    return times


def repeated(graphs: Sequence[tuple[Any, Any, Sequence[Any]]], run: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """A backward that repeats on the graphs (roots, seeds, leaves) in turn."""
    turns = itertools.cycle(graphs)

    def backward() -> None:
        roots, seeds, leaves = next(turns)
        for leaf in leaves:
            leaf.grad = None
        run(roots, seeds)

    return backward


def summary(times: Sequence[float]) -> dict[str, float]:
    """The median and the extremes of measured seconds, in milliseconds."""
    return {
        "ms": statistics.median(times) * 1e3,
        "ms_min": min(times) * 1e3,
        "ms_max": max(times) * 1e3,
        "turns": len(times),
    }


def method(device: str, inputs: str = "inputs warm") -> str:
    """How numbers are measured, for people. inputs: how they are given."""
    turns = TURNS if device == "cpu" else TURNS_ON_DEVICE
    return (
        f"medians of up to {turns} alternating turns, normal random data, a new result each call, {inputs}; "
        "ratios are of speed, above 1 is faster"
    )


# ---- what was measured, and on what ----------------------------------------------------------------------------------


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """The facts that a reader needs to judge a number: hardware, versions, threads, compiler, BLAS."""
    import numpy

    info = _C.build_info()
    gpu = {} if device == "cpu" else {"gpu": _C.cuda_info(_C.device(device))}
    return {
        "device": device,
        **gpu,
        "cpu": cpu_name(),
        "processors": os.cpu_count(),
        "cpu_features": _C.cpu_features(),
        "threads": _C.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "xtrain": __version__,
        "numpy": numpy.__version__,
        "compiler": info["compiler"],
        "flags": info["flags"],
        "blas": info["blas"],
        "command": " ".join(["xtrain", *sys.argv[1:]]),
    }


def headline(facts: Mapping[str, Any]) -> str:
    if "gpu" in facts:
        gpu = facts["gpu"]
        runtime, driver = (f"{gpu[part] // 1000}.{gpu[part] % 1000 // 10}" for part in ("runtime", "driver"))
        return (
            f"{gpu['name']} ({facts['device']}), CUDA {runtime} (driver {driver}), xtrain {facts['xtrain']}, "
            f"Python {facts['python']}"
        )
    return (
        f"{facts['cpu']}, {facts['threads']} threads, xtrain {facts['xtrain']} ({facts['compiler']}), "
        f"NumPy {facts['numpy']}, Python {facts['python']}"
    )


# ---- arguments -------------------------------------------------------------------------------------------------------


def choose(option: str, text: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The comma-separated names of an option, each of which must be known."""
    if text is None:
        return list(default)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--{option} must name at least one of {', '.join(known)}, got {text!r}")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--{option} must be some of {', '.join(known)}, got {name!r}{nearest(name, known) if name else ''}"
            )
    return list(dict.fromkeys(names))


def choose_device(text: str) -> str:
    """The name of a device that can be used."""
    try:
        device = _C.device(text)
        if device.type == "meta":
            raise ValueError("it computes nothing; must be cpu, cuda or cuda:N")
        _C.gemm_backends(device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--device {text}: {' '.join(str(error).split())}") from None
    return str(device)


def check_threads(count: int, device: str = "cpu") -> None:
    """Use this many threads; 0 leaves xtrain's own choice. Refused for a device that has no use for them."""
    if count and device != "cpu":
        raise ConfigError(f"--threads is for the CPU; a benchmark of {device} does not depend on it: leave it out")
    if not 0 <= count <= 256:
        raise ConfigError(f"--threads must be in [0, 256], got {count}")
    if count:
        _C.set_num_threads(count)


def check_output(option: str, path: str | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, before the work and not after it."""
    if path is None:
        return
    place = Path(path)
    if suffixes and place.suffix.lower() not in suffixes:
        raise ConfigError(f"--{option} must end in {' or '.join(suffixes)}, got {path!r}")
    if place.is_dir():
        raise ConfigError(f"--{option} must be a file, got the directory {path!r}")
    if place.exists() and not place.is_file():
        raise ConfigError(f"--{option} must be a regular file, got {path!r}")
    if not os.access(place.parent, os.W_OK):
        raise ConfigError(f"--{option}: the directory {str(place.parent)!r} does not exist or cannot be written to")
    if len(os.fsencode(place.name)) > NAME_MAX:
        raise ConfigError(f"--{option} must have a name of at most {NAME_MAX} bytes, got {place.name[:40] + '...'!r}")
    if place.exists() and _is_standard_output(place):
        raise ConfigError(f"--{option} must not be the file that standard output goes to, got {path!r}")


def _is_standard_output(place: Path) -> bool:
    try:
        return os.path.samestat(place.stat(), os.fstat(1))
    except OSError:  # there is none
        return False


def check_different(first: str, a: str | None, second: str, b: str | None) -> None:
    """Refuse two outputs in one file."""
    if a is not None and b is not None and os.path.realpath(a) == os.path.realpath(b):
        raise ConfigError(f"--{second} must be another file than --{first}, got {b!r} twice")


def check_plot(path: str | None) -> None:
    """Refuse a plot that could not be drawn."""
    check_output("plot", path, (".png", ".svg", ".pdf"))
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot is drawn by matplotlib, which is missing: pip install 'xtrain[plot]'")


# ---- output ----------------------------------------------------------------------------------------------------------


class Table:
    """A Markdown table that is printed as it grows: each row at once, so that a run that is stopped has shown its work.

    widths: of the columns, where they are known to need more than their header; a row that needs still more is just
    longer. right: the columns that are numbers.
    """

    def __init__(self, header: Sequence[str], widths: Sequence[int] = (), right: Sequence[int] = ()) -> None:
        wanted = [*widths, *[0] * (len(header) - len(widths))]
        self.widths = [max(len(h), w) for h, w in zip(header, wanted)]
        self.right = right
        self.add(header)
        rule = "|".join("-" * (w + 1) + ":" if i in right else "-" * (w + 2) for i, w in enumerate(self.widths))
        print(f"|{rule}|", flush=True)

    def add(self, row: Sequence[str]) -> None:
        cells = (
            str(c).rjust(w) if i in self.right else str(c).ljust(w) for i, (c, w) in enumerate(zip(row, self.widths))
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def longest(words: Iterable[str]) -> int:
    """The width of a column that holds these."""
    return max(map(len, words), default=0)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """`value` as JSON; NaN, which JSON has not, is refused."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_text(path, text)
