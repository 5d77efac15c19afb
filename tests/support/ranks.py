"""Several processes of one run, which meet through a file on this host, and are all ended in every case."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HANGS = 120  # seconds after which ranks count as hung, however busy the machine is
# What engines set: a test that is itself started by one must not be taken for its rank.
ENGINES = ("XTRAIN_RANK", "XTRAIN_WORLD", "XTRAIN_LOCAL", "XTRAIN_STORE", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")  # fmt: skip
RANK = "import xtrain as xt\nfrom xtrain import nn, optim\nxt.distributed.init()\n"  # what every script of a rank begins with


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(ENGINES)}


def environment(rank: int, size: int, meeting: Path, **more: str) -> dict[str, str]:
    return {
        **clean_environment(),
        "XTRAIN_RANK": str(rank),
        "XTRAIN_WORLD_SIZE": str(size),
        "XTRAIN_STORE": f"file:{meeting}",
        "OMP_NUM_THREADS": "1",
        **more,
    }


class Rank:
    """What a rank has said: status, out, err; and when it ended, on the clock of time.monotonic."""

    def __init__(self, status: int, ended: float, out: str, err: str) -> None:
        self.status, self.ended, self.out, self.err = status, ended, out, err

    def __repr__(self) -> str:
        return f"status {self.status}\n{self.out}\n{self.err}"


def run_ranks(
    size: int,
    arguments: Sequence[str] | Callable[[int], Sequence[str]],
    folder: Path,
    more: Callable[[int], dict[str, str]] = lambda rank: {},
    act: Callable[[list[subprocess.Popen]], None] = lambda processes: None,
    stdin: int = subprocess.DEVNULL,
    limit: float = HANGS,
) -> list[Rank]:
    """Run Python with these arguments on every rank, and wait for `limit` seconds. act: is called once all have been started."""
    folder.mkdir(exist_ok=True)
    processes: list[subprocess.Popen] = []
    outputs = []
    ended: dict[int, float] = {}
    try:
        for rank in range(size):
            words = arguments(rank) if callable(arguments) else arguments
            out, err = (open(folder / f"{name}-{rank}.txt", "w+b") for name in ("out", "err"))  # noqa: SIM115
            outputs.append((out, err))
            env = environment(rank, size, folder / "meeting", **more(rank))
            processes.append(subprocess.Popen([sys.executable, *words], env=env, stdin=stdin, stdout=out, stderr=err))
        act(processes)
        deadline = time.monotonic() + limit
        while len(ended) < size and time.monotonic() < deadline:
            for process in processes:
                if process.pid not in ended and process.poll() is not None:
                    ended[process.pid] = time.monotonic()
            time.sleep(0.005)
        assert len(ended) == size, f"after {limit} s, ranks are still there"
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        texts = []
        for pair in outputs:
            for file in pair:
                file.seek(0)
            texts.append([file.read().decode() for file in pair])
            for file in pair:
                file.close()
    return [Rank(one.returncode, ended[one.pid], *text) for one, text in zip(processes, texts, strict=True)]


def at_once(*calls: Callable[[], list[Rank]], most: int = 3) -> list[list[Rank]]:
    """What each returns; `most` of them at a time."""
    with ThreadPoolExecutor(most) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]
