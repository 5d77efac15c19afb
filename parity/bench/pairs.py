"""Whether a change costs speed: training steps of two trees of xtrain, in alternating processes.

    python parity/bench/pairs.py OLD NEW [--device cpu|cuda] [--pairs 10] [--cases default-float32,...] [--json FILE]

OLD and NEW are folders that hold a built package `xtrain`; only names that both have are used. A process warms up and reports the
median time of its steps (forward, backward, clipping, AdamW on random tokens). Processes run in the order old new new old ..., so
that a drift of the clock meets both. Printed for each case: medians over processes, the median ratio new / old of the pairs, and how far
the old tree is from itself (half the spread between quartiles of its processes). Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SMALL = dict(
    vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3,
    head_dim=32, tie_word_embeddings=True,
)  # fmt: skip
MIDDLE = dict(
    vocab_size=50257, hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, head_dim=32, tie_word_embeddings=False,
)  # fmt: skip
# name: (config, batch, length, precision, steps of a process)
CASES = {
    "cpu": {
        "default-float32": (SMALL, 8, 256, "float32", 40),
        "default-bfloat16": (SMALL, 8, 256, "bfloat16", 25),
        "mhc-float32": (SMALL | dict(mhc_streams=4, num_hidden_layers=2), 4, 256, "float32", 25),
    },
    "cuda": {
        "67M-float32": (MIDDLE, 16, 256, "float32", 60),
        "67M-tf32": (MIDDLE, 16, 256, "tf32", 120),
        "67M-bfloat16": (MIDDLE, 16, 256, "bfloat16", 200),
        "67M-bfloat16-32": (MIDDLE, 32, 256, "bfloat16", 150),
        "mhc-bfloat16": (MIDDLE | dict(mhc_streams=4, num_hidden_layers=4), 16, 256, "bfloat16", 150),
        "small-bfloat16": (SMALL, 8, 256, "bfloat16", 300),
    },
}


def worker(device: str, case: str) -> None:
    """Prints the median milliseconds of a step, and the last loss."""
    import numpy as np

    import xtrain as xt
    from xtrain import optim
    from xtrain.models import Qwen3, Qwen3Config

    config, batch, length, precision, steps = CASES[device][case]
    xt.manual_seed(0)
    if precision == "tf32":
        xt.set_float32_matmul_precision("high")
    model = Qwen3(Qwen3Config(**config, max_position_embeddings=length))
    model = model.to(xt.bfloat16 if precision == "bfloat16" else xt.float32).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    drawn = np.random.default_rng(0).integers(0, config["vocab_size"], (batch, length + 1))
    ids, targets = (xt.tensor(np.ascontiguousarray(part)).to(device) for part in (drawn[:, :-1], drawn[:, 1:]))

    def step():
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    wait = xt.cuda.synchronize if device == "cuda" else lambda: None
    size = 1 if device == "cpu" else 10  # steps between two looks at the clock
    for _ in range(5):
        step()
    wait()
    times = []
    for _ in range(steps // size):
        begun = time.perf_counter()
        for _ in range(size):
            loss = step()
        wait()
        times.append((time.perf_counter() - begun) / size * 1e3)
    print(json.dumps([statistics.median(times), loss.item()]))


def process(tree: str, device: str, case: str) -> list[float]:
    path = os.pathsep.join(filter(None, [str(Path(tree).resolve()), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", __file__, tree, tree]
    command += ["--device", device, "--cases", case, "--worker"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--device", default="cpu", choices=CASES)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--cases", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = args.cases.split(",") if args.cases else list(CASES[args.device])
    if args.worker:
        worker(args.device, cases[0])
        return
    rows = []
    for case in cases:
        found: dict[str, list[float]] = {args.old: [], args.new: []}
        losses = set()
        for pair in range(args.pairs):
            for tree in (args.old, args.new) if pair % 2 == 0 else (args.new, args.old):
                ms, loss = process(tree, args.device, case)
                found[tree].append(ms)
                losses.add(loss)
        old, new = found[args.old], found[args.new]
        low, _, high = statistics.quantiles(old, n=4)
        row = dict(
            case=case, old_ms=statistics.median(old), new_ms=statistics.median(new), same_loss=len(losses) == 1,
            ratio=statistics.median(b / a for a, b in zip(old, new, strict=True)),
            spread=(high - low) / 2 / statistics.median(old), old=old, new=new,
        )  # fmt: skip
        rows.append(row)
        print(
            f"{case:18} old {row['old_ms']:9.3f} ms  new {row['new_ms']:9.3f} ms  new/old {row['ratio']:.4f}  "
            f"old within +-{row['spread']:.2%}  {'same' if row['same_loss'] else 'OTHER'} loss",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
