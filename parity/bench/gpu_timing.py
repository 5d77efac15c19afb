"""What the GPU benchmarks share: bursts from an idle device to an idle device, contenders in turns, and the copy that is the ceiling."""

from __future__ import annotations

import statistics
import time

import torch

import xtrain as xt


def wall(call, count: int, wait) -> float:
    wait()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - begun) / count


def measure(calls: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each call {name: (call, wait)}."""
    counts, times = {}, {name: [] for name in calls}
    for name, (call, wait) in calls.items():
        wall(call, 3, wait)
        counts[name] = max(3, min(1000, int(0.02 / wall(call, 3, wait))))
    for _ in range(rounds):
        for name, (call, wait) in calls.items():
            times[name].append(wall(call, counts[name], wait))
    return {name: statistics.median(found) for name, found in times.items()}


def copy_rate(rounds):
    """GB/s, read and written, of copying 1 GiB: the faster of the two libraries, and the seconds of both."""
    x = torch.randn(2**28, device="cuda")
    y, mine, to = torch.empty_like(x), xt.from_dlpack(x), xt.empty(2**28, device="cuda")
    found = measure(
        {
            "PyTorch": (lambda: y.copy_(x), torch.cuda.synchronize),
            "xtrain": (lambda: to.copy_(mine), xt.cuda.synchronize),
        },
        rounds,
    )
    return 2 * 4 * 2**28 / min(found.values()) / 1e9, found
