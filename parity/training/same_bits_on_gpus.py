"""Whole runs of `xtrain train` on 1, 2 and 4 GPUs, compared byte by byte; and one whose rank is killed.

    python parity/training/same_bits_on_gpus.py --worlds 1,2,4 [--steps 100] [--only bfloat16] [--kill]

Each recipe runs on every number of GPUs, captured, with gradients that are sent in the backward, and eagerly: what its
last checkpoint holds (model, optimizer and averages) and every line of metrics.jsonl but for times must be those of one GPU.
--kill: a rank of the largest world gets SIGKILL; the others must name it, and a resume on half as many ends with the
bytes of one GPU. Exit status 0 when all are equal. As many runs go on at a time as there are GPUs for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

COMMON = (
    "--data python --batch-size 16 --seq-len 128 --save-every 20 --eval-every 50 --eval-tokens 4096 --no-plot --seed 3"
)
RECIPES = {
    "float32": "--model tiny --precision float32 --clip 0.5",
    "tf32, 2 pieces": "--model tiny --precision tf32 --grad-accum 2 --clip 0.5",
    "bfloat16, muon, ema": "--model tiny --precision bfloat16 --optim.name muon --ema 0.9 --clip 0.5",
    "bfloat16, several banks": "--model gpu --model.num_hidden_layers 32 --precision bfloat16 --clip 0.5",  # of 64 Mi
    "bfloat16, several banks, muon, ema": (
        "--model gpu --model.num_hidden_layers 32 --precision bfloat16 --optim.name muon --ema 0.9 --clip 0.5"
    ),
}
WAYS = {"captured": [], "captured, overlap": ["--overlap"], "eager": ["--no-graph"]}
TIMES = ("time", "seconds", "tokens_per_second", "ranks", "mfu", "memory")  # fields that may differ


class Gpus:
    """Hands out GPUs of this machine, in the order of those who want some."""

    def __init__(self, count: int) -> None:
        self._free, self._waiting, self._more = set(range(count)), deque[object](), threading.Condition()

    def take(self, count: int) -> list[int]:
        ticket = object()
        with self._more:
            self._waiting.append(ticket)
            self._more.wait_for(lambda: self._waiting[0] is ticket and len(self._free) >= count)
            self._waiting.popleft()
            self._more.notify_all()
            return [self._free.pop() for _ in range(count)]

    def give(self, taken: list[int]) -> None:
        with self._more:
            self._free.update(taken)
            self._more.notify_all()


def start(words: list[str], devices: list[int], folder: Path) -> list[subprocess.Popen]:
    """The ranks of a run."""
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(len(devices)):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        if len(devices) > 1:
            environment |= {"XTRAIN_RANK": str(rank), "XTRAIN_WORLD_SIZE": str(len(devices))}
            environment |= {"XTRAIN_LOCAL_RANK": str(rank), "XTRAIN_STORE": f"file:{folder}/meeting"}
        out = open(folder / f"rank{rank}.txt", "w")  # noqa: SIM115
        command = [sys.executable, "-m", "xtrain", "train", *words]
        ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    return ranks


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.txt").read_text()


def found(run: Path) -> dict[str, str]:
    """Digests of what a run has written."""
    last = max((path for path in run.glob("checkpoint-*")), key=lambda path: int(path.name.split("-")[1]))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*.safetensors"))}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if not any(word in key for word in TIMES)} for line in lines]
    return {**files, "metrics": hashlib.sha256(json.dumps(kept).encode()).hexdigest(), "checkpoint": last.name}


def ended(ranks: list[subprocess.Popen]) -> list[int]:
    """Their statuses. All have ended then, also where one hangs."""
    until = time.monotonic() + 300
    try:
        return [one.wait(timeout=max(0.0, until - time.monotonic())) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def train(gpus: Gpus, world: int, words: list[str], out: Path) -> dict[str, str]:
    devices = gpus.take(world)
    logs = out.with_name(out.name + "-logs")
    try:
        statuses = ended(start([*words, "--out", str(out)], devices, logs))
    finally:
        gpus.give(devices)
    if any(statuses):
        bad = next(rank for rank, status in enumerate(statuses) if status)
        raise RuntimeError(f"{out.name}: rank {bad} ended with {statuses[bad]}: {said(logs, bad)[-400:]}")
    if "--no-graph" not in words and "run eagerly" in said(logs, 0):
        raise RuntimeError(f"{out.name}: not captured: {said(logs, 0)[-400:]}")
    return found(out)


def killed(gpus: Gpus, world: int, words: list[str], out: Path) -> tuple[str, dict[str, str]]:
    """Kill rank 1 after step 30; what the others said, and what a run that goes on with half of the ranks has found."""
    devices, logs = gpus.take(world), out.with_name(out.name + "-logs")
    ranks = start([*words, "--out", str(out)], devices, logs)
    try:
        metrics, until = out / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and '"step": 30' in metrics.read_text()):
            if time.monotonic() > until or ranks[0].poll() is not None:
                raise RuntimeError(f"no step 30: {said(logs, 0)[-400:]}")
            time.sleep(0.01)
        ranks[1].send_signal(signal.SIGKILL)
        begun, gone = time.monotonic(), {}
        while len(gone) < world and time.monotonic() < begun + 60:
            for rank, one in enumerate(ranks):
                if rank not in gone and one.poll() is not None:
                    gone[rank] = time.monotonic() - begun
            time.sleep(0.005)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        gpus.give(devices)
    others = [rank for rank in range(world) if rank != 1]
    lines = {rank: next((line for line in said(logs, rank).splitlines() if "rank 1" in line), "") for rank in others}
    text = (
        f"statuses {[one.returncode for one in ranks]}, ended after {max(gone.values(), default=60):.1f} s: {lines[0]}"
    )
    if not all(lines.values()) or any(ranks[rank].returncode != 75 for rank in others):
        raise RuntimeError(f"{text}; {lines}")
    devices = gpus.take(world // 2)
    try:
        statuses = ended(start(["--resume", str(out)], devices, out.with_name(out.name + "-again")))
    finally:
        gpus.give(devices)
    if any(statuses):
        raise RuntimeError(f"the resume ended with {statuses}: {said(out.with_name(out.name + '-again'), 0)[-400:]}")
    return text, found(out)


def told(jobs: dict[tuple[str, int, str], Future], place: tuple[str, int, str]) -> bool:
    """Print how a run compares with that of one GPU; whether it is equal."""
    name, world, way = place
    try:
        one, result = jobs[name, 1, "captured"].result(), jobs[place].result()
    except Exception as error:  # a run that failed
        print(f"{name}, {world} ranks, {way}: FAILED: {error}", flush=True)
        return False
    said, result = result if isinstance(result, tuple) else ("", result)
    differ = [key for key in {*one, *result} if one.get(key) != result.get(key)]
    verdict = f"DIFFERENT: {', '.join(differ)}" if differ else f"equal ({len(one)} digests)"
    print(f"{name}, {world} ranks, {way}: {verdict} {said}".rstrip(), flush=True)
    return not differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--gpus", type=int, help="how many the machine has (default: the largest world)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="a part of the names of recipes")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    worlds = sorted({1, *map(int, options.worlds.split(","))}, reverse=True)
    gpus = Gpus(options.gpus or worlds[0])
    recipes = {name: recipe for name, recipe in RECIPES.items() if options.only in name}
    if options.gpus is not None and options.gpus < worlds[0]:
        parser.error(f"--gpus must be at least {worlds[0]}, the largest of --worlds; got {options.gpus}")
    if options.kill and worlds[0] < 2:
        parser.error("--kill needs a world of at least 2 in --worlds")
    if not recipes:
        parser.error(f"--only must be a part of {', '.join(RECIPES)}; got {options.only!r}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(64) as pool:
        jobs = {}
        for number, (name, recipe) in enumerate(recipes.items()):
            words = [*f"{recipe} {COMMON}".split(), "--steps", str(options.steps), "--max-ranks", str(worlds[0])]
            for world in worlds:
                for way, more in WAYS.items() if world > 1 else [("captured", [])]:
                    out = Path(folder) / f"{number}-{world}-{way.replace(', ', '-')}"
                    jobs[name, world, way] = pool.submit(train, gpus, world, [*words, *more], out)
            if options.kill and number == len(recipes) - 1:
                job = pool.submit(killed, gpus, worlds[0], words, Path(folder) / f"{number}-killed")
                jobs[name, worlds[0], "a rank killed"] = job
        by_job = {job: place for place, job in jobs.items()}
        done, wrong = list[tuple[str, int, str]](), 0
        for job in as_completed(by_job):  # each is told once that of one GPU is there, too
            done.append(by_job[job])
            ready = [place for place in done if jobs[place[0], 1, "captured"].done()]
            done = [place for place in done if place not in ready]
            wrong += sum(not told(jobs, place) for place in ready)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
