"""Memory that ends at every allocation of training steps; `make oom` calls it.

    oom.py [--device cuda] [--malloc] [--steps 2] [--every 1]

For each k, allocation k of a step fails, and
- OutOfMemoryError comes out, or MemoryError, or the failure was absorbed (the core gives its cache back and tries again);
- parameters, moments, position in the data, random state and step are what they were;
- the same step is then made with the bits of a run without failures, and the step after it, too.

By default blocks of memory fail, on the CPU or on a GPU. With --malloc every malloc of the C core fails (in a process with malloc_shim.c),
once and for good; --steps: of the first steps, the first makes the moments. The exit status is the verdict.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path.insert(0, os.fspath(HERE.parent / "support"))
sys.path.append(os.fspath(HERE.parents[1]))  # a package that is not installed

from runs import options as run_options  # noqa: E402
from runs import text_file  # noqa: E402

import xtrain as xt  # noqa: E402
from xtrain import _C  # noqa: E402
from xtrain.train import Trainer  # noqa: E402

Arm = Callable[[int, int], int]  # (first, end) that fail -> how many were asked for


def state_of(trainer: Trainer) -> str:
    """A hash of all that a step may change."""
    digest = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        digest.update(name.encode() + bytes(_C.to_bytes(tensor.detach().cpu().contiguous())))
    for parameter, state in trainer.optimizer.state.items():
        if int(state["step"]) == 0:
            continue  # moments that were made, and not used yet
        digest.update(str(tuple(parameter.shape)).encode())
        for key in sorted(state):
            value = state[key]
            digest.update(key.encode())
            digest.update(
                bytes(_C.to_bytes(value.cpu().contiguous())) if isinstance(value, xt.Tensor) else str(value).encode()
            )
    digest.update(repr((trainer.step, trainer.loader.state_dict(), _C.get_rng_state())).encode())
    return digest.hexdigest()


def blocks(first: int, end: int) -> int:
    return _C.fail_storages(first, end - 1)


def mallocs() -> Arm:
    shim = ctypes.CDLL(None).shim_arm
    shim.restype, shim.argtypes = ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    name = Path(_C.__file__).name.encode()

    def arm(first: int, end: int) -> int:
        found = shim(name, first, max(end, 0))
        if found < 0:
            raise RuntimeError(f"{name.decode()} is not loaded")
        return found

    return arm


class Runs:
    """Runs of one configuration: each is made anew, and led to a step."""

    def __init__(self, folder: Path, device: str, precision: str) -> None:
        self.folder, self.text, self.device, self.precision = folder, text_file(folder / "text.txt"), device, precision

    def at(self, step: int) -> Trainer:
        values = run_options(self.text, self.folder / "run", device=self.device, grad_accum=2, precision=self.precision)
        trainer = Trainer(values, quiet=True)
        for _ in range(step):
            trainer.train_step()
        return trainer


def attack(runs: Runs, step: int, arm: Arm, width: int, every: int, counts: Counter) -> list[str]:
    """Every k of one step. width: how many allocations fail, from k on."""
    trainer = runs.at(step)
    before = state_of(trainer)
    _C.memory_trim(runs.device)
    arm(1 << 60, 1 << 61)
    trainer.train_step()
    total = arm(0, 0)
    after = state_of(trainer)
    trainer.train_step()
    later, wrong = state_of(trainer), []
    for k in range(0, total, every):
        trainer = runs.at(step)
        _C.memory_trim(runs.device)
        arm(k, k + width)
        try:
            trainer.train_step()
            kind = "absorbed"
        except MemoryError as error:
            kind = type(error).__name__
        except BaseException as error:
            kind = "wrong"
            wrong.append(f"step {step + 1}, allocation {k} of {total}: {error!r:.300}")
        finally:
            arm(0, 0)
        counts[kind] += 1
        if kind == "wrong":
            continue
        if kind != "absorbed":
            if trainer.torn or state_of(trainer) != before:
                wrong.append(
                    f"step {step + 1}, allocation {k} of {total}: {'torn' if trainer.torn else 'the state changed'}"
                )
                continue
            trainer.train_step()
        if state_of(trainer) != after:
            wrong.append(f"step {step + 1}, allocation {k} of {total}: {kind}, and the step has other bits")
            continue
        trainer.train_step()
        if state_of(trainer) != later:
            wrong.append(f"step {step + 1}, allocation {k} of {total}: {kind}, and the step after it has other bits")
    print(
        f"step {step + 1}, {runs.precision}, {width if width < 1 << 30 else 'all'} from k on: {total} allocations",
        flush=True,
    )
    return wrong


def with_shim(arguments: list[str]) -> int:
    """The same command in a process with the shim."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
        library = Path(folder) / "malloc_shim.so"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", HERE / "malloc_shim.c", "-o", library], check=True)
        environment = {**os.environ, "LD_PRELOAD": os.fspath(library), "XTRAIN_OOM_SHIM": "1"}
        return subprocess.run([sys.executable, __file__, *arguments], env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--malloc", action="store_true", help="mallocs of the C core instead of blocks")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="only every n-th k")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="both by default")
    options = parser.parse_args()
    if options.malloc and not os.environ.get("XTRAIN_OOM_SHIM"):
        return with_shim(sys.argv[1:])
    _C.set_num_threads(1)
    begun, wrong, counts = time.monotonic(), [], Counter()
    arm = mallocs() if options.malloc else blocks
    with tempfile.TemporaryDirectory() as folder:
        for precision in (options.precision,) if options.precision else ("float32", "bfloat16"):
            runs = Runs(Path(folder), options.device, precision)
            for step in range(options.steps):
                # A block that fails once; a malloc once (the cache may help) and for good.
                for width in (1, 1 << 40) if options.malloc else (1,):
                    wrong += attack(runs, step, arm, width, options.every, counts)
    for text in wrong[:20]:
        print(text)
    known = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    print(
        f"{sum(counts.values())} failures on {options.device}: {known}; {len(wrong)} wrong; {time.monotonic() - begun:.0f} s"
    )
    return 1 if wrong or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
