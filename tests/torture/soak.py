"""A long life: training, evaluation, sampling, saving and resuming at random for a given time; `make soak` calls it.

    soak.py [--minutes 120] [--device cpu] [--seed 1]

One process does all of it. A second trainer of the same run, which does nothing but train, says which bits are right. After a tenth of the time
resident memory, the device's memory, live tensors, open files and threads may not grow any more. A line a minute; the exit status is the
verdict.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "support"))
sys.path.append(os.fspath(Path(__file__).resolve().parents[2]))  # a package that is not installed

from oom import state_of
from runs import options as run_options
from runs import text_file

import xtrain as xt
from xtrain import _C, saving
from xtrain.train import Trainer

STEPS = 1 << 20  # of a run, which nobody reaches
MORE_MEMORY = 24 << 20  # bytes that resident memory may grow by: the allocator of the system, and Python's


def measured(device: str) -> dict[str, int]:
    gc.collect()
    found = {"live_tensors": 0, "live_storages": 0, "allocated": 0}
    for one in dict.fromkeys(("cpu", device)):
        stats = _C.memory_stats(one)
        found = {key: value + stats[key] for key, value in found.items()}
    found["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found["files"] = len(os.listdir("/proc/self/fd"))
    found["threads"] = threading.active_count()
    return found


class Soak:
    def __init__(self, folder: Path, device: str, seed: int) -> None:
        self.chance, self.device, self.counts = random.Random(seed), device, Counter()
        self.values = run_options(
            text_file(folder / "text.txt", 60_000), folder / "run", device=device, steps=STEPS, keep=2, eval_every=0
        )
        self.run, self.model = folder / "run", folder / "model"
        self.trainer = Trainer(self.values, quiet=True)
        self.run.mkdir()
        # By step, what an undisturbed run has: filled as far as the run has come.
        self.calm = Trainer({**self.values, "out": os.fspath(folder / "calm")}, quiet=True)
        self.calm_state = _C.get_rng_state()
        self.known: dict[int, str] = {0: self.state()}

    def state(self) -> str:
        return state_of(self.trainer)

    def follow(self) -> None:
        """Lets the undisturbed run come as far as the other one, with its own random numbers."""
        mine = _C.get_rng_state()
        _C.set_rng_state(self.calm_state)
        while self.calm.step < self.trainer.step:
            self.calm.train_step()
        self.known[self.calm.step] = state_of(self.calm)
        self.calm_state = _C.get_rng_state()
        _C.set_rng_state(mine)

    def act(self) -> str:
        """One action; what is wrong, or ""."""
        way = self.chance.choice(
            ("train", "train", "train", "evaluate", "sample", "save", "resume", "resume", "export", "fail")
        )
        self.counts[way] += 1
        trainer = self.trainer
        if way == "train":
            for _ in range(self.chance.randint(1, 20)):
                trainer.train_step()
        elif way == "evaluate":
            before = self.state()
            trainer.evaluate()
            if self.state() != before:
                return "an evaluation changed the state"
        elif way == "sample":
            before = self.state()
            ids = xt.tensor([[1, 2, 3]], device=self.device)
            trainer.model.generate(ids, self.chance.randint(1, 12), temperature=0.0)
            if self.state() != before:
                return "a sample changed the state"
        elif way == "save":
            trainer.save()
        elif way == "export":
            saving.save_model(trainer.model, self.model)
            loaded = saving.load_model(self.model)
            for name, tensor in trainer.model.state_dict().items():
                if bytes(_C.to_bytes(tensor.detach().cpu())) != bytes(
                    _C.to_bytes(loaded.state_dict()[name].detach().cpu())
                ):
                    return f"{name} was saved with other bits"
        elif way == "fail":  # memory that ends somewhere in a step
            before = self.state()
            _C.fail_storages(self.chance.randint(0, 30), 1 << 40)
            try:
                trainer.train_step()
                return "a step without memory was made"
            except xt.OutOfMemoryError:
                pass
            finally:
                _C.fail_storages(0, -1)
            if self.state() != before:
                return "a step without memory changed the state"
        else:
            if trainer.step == 0:
                return ""
            trainer.save()
            here, step = self.state(), trainer.step
            del trainer
            self.trainer = None  # type: ignore[assignment]
            gc.collect()
            self.trainer = Trainer({"resume": os.fspath(self.run)}, quiet=True)
            if self.trainer.step != step or self.state() != here:
                return f"step {step} was resumed with another state"
        if self.chance.random() < 0.05:
            self.follow()
            if self.state() != self.known[self.trainer.step]:
                return f"step {self.trainer.step} has other bits than an undisturbed run"
            self.known = {self.trainer.step: self.known[self.trainer.step]}
            self.counts["compared"] += 1
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--actions", type=int, help="as many, however long they take, in place of --minutes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun, seconds, wrong = time.monotonic(), options.minutes * 60, list[str]()
    folder = Path(tempfile.mkdtemp())
    base: dict[str, int] = {}
    said = 0.0
    try:
        soak = Soak(folder, options.device, options.seed)
        part = 0.0  # of the whole
        while not wrong and part < 1:
            if found := soak.act():
                wrong.append(f"{found} (seed {options.seed}, action {sum(soak.counts.values())})")
            spent, made = time.monotonic() - begun, sum(soak.counts.values()) - soak.counts["compared"]
            part = made / options.actions if options.actions else spent / seconds
            if not base and part >= 0.1 and soak.counts["resume"] > 2:
                base = measured(options.device)
            if spent - said >= 60:
                said = spent
                print(f"{spent / 60:5.0f} min, step {soak.trainer.step}: {measured(options.device)}", flush=True)
        end = measured(options.device)
        for key, value in end.items():
            room = (
                MORE_MEMORY if key == "rss" else 1 << 20 if key == "allocated" else 40 if key.startswith("live") else 4
            )
            if base and value > base[key] + room:
                wrong.append(f"{key} grew from {base[key]} to {value}")
        if not base or not soak.counts["compared"]:
            wrong.append("too short to say anything")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for text in wrong:
        print(text)
    done = ", ".join(f"{count} {what}" for what, count in sorted(soak.counts.items()))
    print(
        f"soak on {options.device}, seed {options.seed}: {done}; step {soak.trainer.step}; {base} to {end}; {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
