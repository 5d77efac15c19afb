"""Whole runs of `xtrain train` on CPU ranks, compared byte by byte, over the host plane and MPI.

    python parity/training/same_bits_on_cpus.py [--steps 50]

A1: max_ranks 4, float32 and bfloat16, on 1, 2 and 4 ranks, with 1 and 2 threads, by both planes (MPI where mpirun and mpi4py
are installed). A2: max_ranks 12 on 1, 3, 6 and 12. A3: 4 ranks, then 2, 1 and 4 again, each killed when its checkpoint is there and
resumed by the next one, against one process that never stopped. What the last checkpoint holds and every line of metrics.jsonl but for
times must be those of one process. Clipping is active in every step. Exit status 0 when all are equal.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from same_bits_on_gpus import ended, found, said, start

COMMON = "--data python --device cpu --model.preset tiny --batch-size 12 --seq-len 64 --clip 0.5 --no-plot --seed 3 --eval-tokens 4096"


def launch(world: int, plane: str, threads: int, words: list[str], logs: Path, until: Path | None = None) -> None:
    """One run to its end, or until a checkpoint is there: then every rank is killed. RuntimeError where a rank fails, or
    ends before that.
    """
    words = [*words, "--threads", str(threads)]
    if plane == "mpi":
        mpirun = shutil.which("mpirun") or str(Path(sys.executable).parent / "mpirun")
        command = [mpirun, "-n", str(world), sys.executable, "-m", "xtrain", "train", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
        return
    ranks = start(words, list(range(world)), logs)
    while until is not None and not until.exists() and all(one.poll() is None for one in ranks):
        time.sleep(0.002)
    for one in ranks:
        if until is not None:
            one.kill()
    statuses = ended(ranks)
    if statuses != [0 if until is None else -signal.SIGKILL] * world:
        text = "".join(said(logs, rank) for rank in range(world))
        raise RuntimeError(f"statuses {statuses}, until {until and until.name}: {text[-400:]}")


def same(name: str, one: dict[str, str], other: dict[str, str]) -> bool:
    differ = [key for key in {*one, *other} if one.get(key) != other.get(key)]
    print(f"{name}: {'DIFFERENT: ' + ', '.join(differ) if differ else f'equal ({len(one)} digests)'}", flush=True)
    return not differ


def compare(folder: Path, name: str, recipe: str, ways: list[tuple[int, str, int]]) -> bool:
    """Run a recipe in each way: (ranks, plane, threads); all against the first."""
    results = []
    for number, (world, plane, threads) in enumerate(ways):
        out = folder / f"{name.replace(' ', '-')}-{number}"
        launch(world, plane, threads, [*f"{COMMON} {recipe}".split(), "--out", str(out)], Path(f"{out}-logs"))
        results.append((f"{name}, {world} ranks, {plane}, {threads} threads", found(out)))
    return all([same(what, results[0][1], digests) for what, digests in results])


def resume(folder: Path, recipe: str, steps: int) -> bool:
    """4 ranks until a quarter of the steps is saved and all are killed, then 2, 1 and 4."""
    words = f"{COMMON} {recipe} --max-ranks 4 --save-every {steps // 4}".split()
    launch(1, "host", 1, [*words, "--steps", str(steps), "--out", str(folder / "whole")], folder / "whole-logs")
    for part, world in enumerate((4, 2, 1, 4)):
        out = folder / "parts"
        begin = ["--resume", str(out)] if part else [*words, "--steps", str(steps), "--out", str(out)]
        until = out / f"checkpoint-{steps // 4 * (part + 1):08d}" if part < 3 else None
        launch(world, "host", 1, begin, folder / f"parts-{part}-logs", until)
    return same("resume on 4, 2, 1, 4 ranks", found(folder / "whole"), found(folder / "parts"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    mpi = ["mpi"] if shutil.which("mpirun") or (Path(sys.executable).parent / "mpirun").exists() else []
    ways = [
        (1, "host", 1),
        (1, "host", 2),
        (2, "host", 1),
        (4, "host", 1),
        *((world, "mpi", 1) for world in (2, 4) if mpi),
    ]
    last = f"--steps {options.steps} --save-every {options.steps} --eval-every {options.steps // 2}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = [
            compare(folder, f"A1 {precision}", f"{last} --max-ranks 4 --precision {precision}", ways)
            for precision in ("float32", "bfloat16")
        ]
        twelve = "--steps 12 --save-every 12 --eval-every 6 --max-ranks 12"
        good.append(compare(folder, "A2", twelve, [(world, "host", 1) for world in (1, 3, 6, 12)]))
        good.append(resume(folder, "--eval-every 0", 40))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
