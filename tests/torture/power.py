"""Power that fails during training, saving and resuming: the recording, and what must be found afterwards."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk import Disk, Event, digest, events, put
from oom import state_of
from runs import options as run_options
from runs import text_file

from xtrain import _C, saving
from xtrain.errors import CheckpointError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.train import Trainer
from xtrain.train.metrics import read_metrics

HERE = Path(__file__).resolve().parent
STEPS, FIRST, VERSIONS = 7, 4, 3
MODEL = 1000  # marks from here on: versions of a model
SIZES = dict(
    vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
)  # fmt: skip


def compile_shim(folder: Path, name: str) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    library = folder / f"{name}.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", HERE / f"{name}.c", "-o", library, "-ldl"], check=True)
    return library


def values(text: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return run_options(text, out, device="cpu", keep=2, steps=STEPS, **changes)


def model(version: int) -> Qwen3:
    _C.manual_seed(version)
    return Qwen3(Qwen3Config(**SIZES))


def weights_of(one: Any) -> bytes:
    return b"".join(bytes(_C.to_bytes(tensor.detach().contiguous())) for tensor in one.state_dict().values())


def scenario(root: Path, text: Path, mark: Any) -> None:
    """A run with a checkpoint at each step, its resume, and a model directory that is replaced. mark(n): n is promised."""
    save = saving.save_checkpoint

    def marked(path: Any, *rest: Any, **more: Any) -> None:
        save(path, *rest, **more)
        mark(saving.checkpoint_step(path))

    saving.save_checkpoint = marked
    try:
        trainer = Trainer(values(text, root / "run", save_every=1), quiet=True)
        while trainer.step < FIRST:
            trainer.train_step()
            trainer.save()
        del trainer
        Trainer({"resume": os.fspath(root / "run"), "save_every": 1}, quiet=True).run()
        for version in range(VERSIONS):
            saving.save_model(model(version), root / "model")
            mark(MODEL + version)
    finally:
        saving.save_checkpoint = save


def record(root: Path, text: Path, log: Path) -> None:
    """The scenario in this process, which has the shim."""
    shim = ctypes.CDLL(None)
    shim.shim_start(os.fsencode(root), os.fsencode(log))
    scenario(root, text, lambda number: shim.shim_mark(ctypes.c_int64(number)))


class Expected:
    """What an undisturbed run has after each step, and each version of the model."""

    def __init__(self, folder: Path, text: Path) -> None:
        trainer = Trainer(values(text, folder / "whole"), quiet=True)
        self.states = {0: state_of(trainer)}
        while trainer.step < STEPS:
            trainer.train_step()
            self.states[trainer.step] = state_of(trainer)
        self.models = [weights_of(model(version)) for version in range(VERSIONS)]

    def check(self, root: Path, promised: int, version: int, to_the_end: bool) -> str:
        """What is wrong with what a crash has left, or "". promised, version: -1 for none."""
        run = root / "run"
        try:
            trainer = Trainer({"resume": os.fspath(run)}, quiet=True)
        except CheckpointError as error:
            if promised >= 0:
                return f"step {promised} was promised: {error}"
        else:
            if trainer.step < promised:
                return f"step {promised} was promised, the resume goes on from {trainer.step}"
            if state_of(trainer) != self.states[trainer.step]:
                return f"the resumed step {trainer.step} has another state"
            if to_the_end:
                trainer.run()
                if state_of(trainer) != self.states[STEPS]:
                    return "the resumed run ends with other bits"
            steps = (
                [r["step"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
                if (run / "metrics.jsonl").exists()
                else []
            )
            if to_the_end and promised > FIRST and steps != sorted(set(steps)):
                return f"metrics.jsonl has steps {steps}"
        try:
            found = weights_of(saving.load_model(root / "model"))
        except CheckpointError as error:
            return f"model version {version} was promised: {error}" if version >= 0 else ""
        return (
            "" if found in self.models[max(version, 0) :] else f"model version {version} was promised, and is not there"
        )


def crashes(
    folder: Path,
    count: int,
    seed: int,
    counts: Counter,
    every: int = 1,
    lost: Callable[[Event], bool] = lambda event: False,
) -> list[str]:
    """Power failures at every recorded call (every n-th, and at every mark), some `count` different states; what was wrong. lost: calls that
    the disk does not see, for tests.
    """
    text, root, log = text_file(folder / "text.txt", 3000), folder / "root", folder / "log"
    root.mkdir()
    environment = {**os.environ, "LD_PRELOAD": os.fspath(compile_shim(folder, "disk_shim"))}
    command = [
        sys.executable,
        os.fspath(HERE / "torture.py"),
        "--record",
        os.fspath(root),
        os.fspath(text),
        os.fspath(log),
    ]
    subprocess.run(command, env=environment, check=True)
    expected, chance = Expected(folder, text), random.Random(seed)
    recorded = [event for event in events(log) if not lost(event)]
    changes = [event for event in recorded if event.kind != "!"]
    counts["recorded calls"], counts["flushes"] = len(changes), sum(event.kind == "S" for event in changes)
    seen: set[tuple[bytes, int, int]] = set()
    wrong: list[str] = []
    variants = max(2, -(-count * every // len(changes)) * 2)
    disk, promised, version = Disk(root.stat().st_ino), -1, -1
    for number, event in enumerate(recorded):
        if event.kind == "!":
            promised, version = (promised, event.c - MODEL) if event.c >= MODEL else (max(promised, event.c), version)
        else:
            disk.follow(event)
            if number % every:
                continue
        for mode in ("nothing", "everything", *["some"] * variants):
            if len(seen) >= count * (number + 1) / len(recorded) and mode == "some":
                break
            tree = disk.crashed(chance, mode)
            key = (digest(tree), promised, version)
            if key in seen:
                continue
            seen.add(key)
            place = folder / "crashed"
            shutil.rmtree(place, ignore_errors=True)
            put(tree, place)
            found = expected.check(place, promised, version, to_the_end=len(seen) % 40 == 0)
            if found:
                wrong.append(
                    f"after call {number} ({event.kind} {event.name}), {mode} of what waited on the disk, seed {seed}: {found}"
                )
    counts["crash states"] = len(seen)
    return wrong
