"""Blocks of every size made and freed in several threads, freed in other threads, with statistics and trims beside."""

from collections import deque

from race import race

import xtrain as xt

passed: deque = deque(maxlen=64)
sizes = (1, 100, 1023, 1024, 1025, 4096, 70_000, 300_000)


def make() -> None:
    for size in sizes:
        t = xt.full((size,), 3.0)
        assert float(t[-1]) == 3.0
        passed.append(t)


def drop() -> None:
    try:
        t = passed.popleft()
    except IndexError:
        return
    assert float(t[0]) == 3.0


def statistics() -> None:
    stats = xt._C.memory_stats()
    assert stats["peak"] >= 0 and stats["live_tensors"] > 0


def trim() -> None:
    xt._C.memory_trim()
    xt._C.memory_reset_peak()


race(make, make, drop, statistics, trim)
passed.clear()
