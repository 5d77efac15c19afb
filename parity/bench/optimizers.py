"""Bits per byte of AdamW and Muon at equal tokens on the default text, each at the best of the same learning rates.

python parity/bench/optimizers.py --rates 1e-3 3e-3 1e-2 3e-2 --seeds 0 1 2

Each optimizer runs once at every rate with the first seed, and at its best rate with the other seeds. All else is as
`xtrain train` has it, but for final_lr, a tenth of the rate. One thread; a line a run, then a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from xtrain.train import Trainer


def run(name: str, lr: float, seed: int, arguments: argparse.Namespace, folder: str) -> float:
    """Bits per byte of the validation text at the end of a run."""
    values: dict[str, Any] = {
        "data": "python", "model.preset": arguments.preset, "steps": arguments.steps, "seed": seed, "device": "cpu",
        "threads": 1, "optim.name": name, "optim.lr": lr, "optim.final_lr": lr / 10, "eval_every": 0, "save_every": 0,
        "sample.tokens": 0, "plot": False, "out": str(Path(folder) / f"{name}-{lr:g}-{seed}"),
    }  # fmt: skip
    begun = time.process_time()
    result = Trainer(values, quiet=True).run()
    assert result.val_bpb is not None
    seconds = time.process_time() - begun
    print(f"{name} lr {lr:g} seed {seed}: {result.val_bpb:.4f} bits per byte, {seconds:.0f} s of one core", flush=True)
    return result.val_bpb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    first, *others = arguments.seeds
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("adamw", "muon"):
            tuned = {lr: run(name, lr, first, arguments, folder) for lr in arguments.rates}
            best = min(tuned, key=lambda lr: tuned[lr])
            found = [tuned[best], *(run(name, best, seed, arguments, folder) for seed in others)]
            spread = f" +- {statistics.stdev(found):.4f}" if len(found) > 1 else ""
            cells = [f"{lr:g}: {value:.4f}" for lr, value in tuned.items()]
            each = ", ".join(f"{value:.4f}" for value in found)
            rows.append(f"| {name} | {', '.join(cells)} | {best:g} | {each} | {statistics.mean(found):.4f}{spread} |")
    print(f"| optimizer | lr, seed {first} | best | seeds {', '.join(map(str, arguments.seeds))} | mean |")
    print("|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
