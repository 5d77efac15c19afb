"""One training step of xtrain, PyTorch eager and torch.compile, on the same model, data, machine and number of threads.

    python parity/bench/train_step.py [--models default,10m] [--seconds 20] [--rounds 5] [--threads N] [--precision float32] [--json FILE]
    python parity/bench/train_step.py --models width1024,vocab32k,vocab150k,rows2048,gqa8 --seconds 20 --rounds 5
    python parity/bench/train_step.py --models width1024,vocab32k,vocab150k,rows2048,gqa8 --precision bfloat16
    python parity/bench/train_step.py --models rows2048 --clock process --threads 1    # beside other jobs

--models takes presets of `xtrain train` and the names of MODELS, which have few layers so that a step takes about a second.
Each contender lives in a process of its own and takes turns with the others in short bursts, so that a change of the machine's clock or load
meets all of them. A step is forward, backward, clipping and AdamW on random tokens. Printed: medians over bursts of tokens per second, peak
resident memory of the process (libraries included), and the ratios to PyTorch eager; the same as JSON with --json. With --clock process a
second is one of the process's CPU time: other jobs then take no time from a contender, though they still share its caches. One thread only,
for threads that spin while they wait would count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTENDERS = ("xtrain", "eager", "compile")
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, **HEADS}
# What differs from the default preset, batch size, sequence length: beside the presets, a wide model, large
# vocabularies, long rows, and 8 heads of queries for one of keys and values.
MODELS = {
    "width1024": (
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
        4, 256,
    ),
    "vocab32k": ({**SMALL, "vocab_size": 32_768}, 4, 256),
    "vocab150k": ({**SMALL, "vocab_size": 151_936}, 1, 256),
    "rows2048": ({}, 1, 2048),
    "gqa8": (
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
        1, 1024,
    ),
}  # fmt: skip
LABELS = {"xtrain": "xtrain", "eager": "PyTorch eager", "compile": "torch.compile"}


def settings(name: str):
    """(Qwen3Config, batch size, sequence length) of a name in MODELS or a preset of `xtrain train`."""
    from xtrain.models import Qwen3Config
    from xtrain.train.config import TrainConfig, resolve_model

    config = TrainConfig()
    changes, batch, length = MODELS.get(name, ({}, config.batch_size, config.seq_len))
    if name not in MODELS:
        config.model.preset = name
    base = resolve_model(config, 256)
    room = max(length, base.get("max_position_embeddings", 0))
    return Qwen3Config(**{**base, "max_position_embeddings": room, **changes}), batch, length


def groups(parameters):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def xtrain_step(name: str, precision: str, threads: int):
    import numpy as np

    import xtrain as xt
    from xtrain.models import Qwen3

    xt.set_num_threads(threads)
    config, batch, length = settings(name)
    model = Qwen3(config).to(getattr(xt, precision))
    optimizer = xt.optim.AdamW(groups(model.parameters()), lr=1e-3, betas=(0.9, 0.95))
    rng = np.random.default_rng(0)

    def step() -> float:
        block = rng.integers(0, config.vocab_size, (batch, length + 1))
        ids, targets = (
            xt.from_numpy(np.ascontiguousarray(block[:, :-1])),
            xt.from_numpy(np.ascontiguousarray(block[:, 1:])),
        )
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        xt.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, batch * length


def torch_step(name: str, precision: str, threads: int, compiled: bool):
    import numpy as np
    import torch

    sys.path.insert(0, str(HERE.parent / "support"))
    from torch_qwen3 import TorchQwen3

    torch.set_num_threads(threads)
    config, batch, length = settings(name)
    model = TorchQwen3(config, length).to(getattr(torch, precision))
    loss_of = torch.compile(model.loss) if compiled else model.loss
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=1e-3, betas=(0.9, 0.95), fused=True)
    rng = np.random.default_rng(0)

    def step() -> float:
        block = torch.from_numpy(rng.integers(0, config.vocab_size, (batch, length + 1)))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(block[:, :-1], block[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, batch * length


def peak() -> int:
    """Largest resident size of this process so far, in bytes, libraries included."""
    try:  # ru_maxrss counts what the parent had at the fork
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    except (OSError, StopIteration):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def worker(contender: str, name: str, precision: str, threads: int, clock: Callable[[], float]) -> None:
    """Reads seconds from standard input, trains that long, answers with one line of JSON; ends with the input."""
    begun = time.perf_counter()
    try:
        step, tokens = (
            xtrain_step(name, precision, threads)
            if contender == "xtrain"
            else torch_step(name, precision, threads, contender == "compile")
        )
        first = step()
        for _ in range(2):
            step()
    except Exception as error:
        text = " ".join(str(error).split())
        print(json.dumps({"failed": f"{type(error).__name__}: {text[:300]}"}), flush=True)
        return
    print(json.dumps({"ready": time.perf_counter() - begun, "loss": first}), flush=True)
    for line in sys.stdin:
        limit, count, begun = float(line), 0, clock()
        while count == 0 or clock() - begun < limit:
            step()
            count += 1
        print(json.dumps({"tokens_per_second": count * tokens / (clock() - begun), "peak": peak()}), flush=True)


def measure(
    name: str, contenders: list[str], seconds: float, rounds: int, threads: int, precision: str, clock: str
) -> dict:
    workers, results = {}, {}
    for c in contenders:  # one after the other, so that no start disturbs another
        command = [
            sys.executable,
            __file__,
            "--worker",
            c,
            "--models",
            name,
            "--threads",
            str(threads),
            "--precision",
            precision,
            "--clock",
            clock,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if c == "compile" else None,
            text=True,
            env=environment,
        )
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"failed": "the process ended"}
        results[c] = {"bursts": [], **answer}
        if "failed" in answer:
            process.kill()
        else:
            workers[c] = process
    burst = seconds / rounds
    for i in range(rounds):
        order = list(workers) if i % 2 == 0 else list(workers)[::-1]
        for c in order:
            print(burst, file=workers[c].stdin, flush=True)
            answer = json.loads(workers[c].stdout.readline())
            results[c]["bursts"].append(answer["tokens_per_second"])
            results[c]["peak"] = answer["peak"]
    for process in workers.values():
        process.stdin.close()
        process.wait()
    for r in results.values():
        if r["bursts"]:
            r["tokens_per_second"] = statistics.median(r["bursts"])
    return results


def table(all_results: dict[str, dict]) -> str:
    lines = [
        "| model | library | tokens/s | x eager | peak memory | x eager | first step after |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, results in all_results.items():
        eager = results.get("eager", {})
        for c, r in results.items():
            if "failed" in r:
                lines.append(f"| {name} | {LABELS[c]} | failed: {r['failed'][:120]} | | | | |")
                continue
            speed = (
                r["tokens_per_second"] / eager["tokens_per_second"] if "tokens_per_second" in eager else float("nan")
            )
            memory = r["peak"] / eager["peak"] if eager.get("peak") else float("nan")
            lines.append(
                f"| {name} | {LABELS[c]} | {r['tokens_per_second']:,.0f} | {speed:.2f} | {r['peak'] / 2**20:,.0f} MiB | {memory:.2f} | {r['ready']:.1f} s |"
            )
    return "\n".join(lines)


def machine() -> dict:
    import torch

    import xtrain as xt

    cpu = platform.processor()
    try:
        cpu = next(
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "xtrain": xt.__version__,
        "system": platform.platform(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="default,10m", help=f"presets of xtrain train, {', '.join(MODELS)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of measurement for each contender and model")
    parser.add_argument("--rounds", type=int, default=5, help="bursts each contender's time is cut into")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS), help="process: CPU time, with one thread")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clock == "process" and args.threads != 1:
        parser.error(f"--clock process adds up the time of all threads: --threads must be 1, got {args.threads}")
    if args.worker:
        worker(args.worker, args.models, args.precision, args.threads, CLOCKS[args.clock])
        return 0
    facts = machine()
    print(
        f"{facts['cpu']}, {args.threads} threads, {args.precision}, {args.clock} clock, torch {facts['torch']}, Python {facts['python']}, medians of {args.rounds} bursts"
    )
    results = {}
    for name in args.models.split(","):
        results[name] = measure(
            name, args.contenders.split(","), args.seconds, args.rounds, args.threads, args.precision, args.clock
        )
        losses = [r["loss"] for r in results[name].values() if "loss" in r]
        assert all(abs(loss - losses[0]) < 0.5 for loss in losses), (
            f"the contenders do not train the same model: {losses}"
        )
    print(table(results))
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {
                    "machine": facts,
                    "threads": args.threads,
                    "precision": args.precision,
                    "clock": args.clock,
                    "results": results,
                },
                indent=2,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
