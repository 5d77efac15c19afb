"""How a training step scales with processes: xtrain's DataParallel, and DDP + torch.compile, in turns in one run.

    python parity/bench/scaling.py --worlds 1,2 --preset tiny --json scaling.jsonl
        [--device cuda] [--modes weak] [--contenders xtrain,ddp,apart] [--limit 540] [--sends late] [--phases]

weak: every rank has the preset's batch; strong: all share it. apart: as many single GPUs train at once, and exchange
nothing: what the slowest of them leaves, since GPUs of one host differ, and share its power. Presets are those of
`xtrain train`, 67m, 124m and 0.6b. Contenders of one case follow each other, `--rounds` times in turns. Each round is a
line of the JSON file, which a second call reads: it measures what is missing or has failed, and prints the table. The
command stops at `--limit` seconds and says so. Exact mode, with as many leaves as ranks; on GPUs xtrain's step is a
captured one, and NCCL moves the bytes of both. On CPUs those of xtrain pass rank 0, and gloo moves those of DDP.
--sends: when xtrain's gradients leave a GPU, in the backward or behind it (DataParallel's overlap). --phases: each rank's
time of an eager step's backward, of the sum of gradients and of the update, with exchanges and without, in the JSON file.

A step's time is the median of the slowest rank's; the host waits for each step. exposed: how much shorter the same
captured step is when its exchanges are replaced by copies on the GPU (weak scaling only). MHz, W: of the multiprocessors
and of a GPU, the ranks' mean; without exchanges: the same in those other steps. wire: bytes that leave a GPU in a step, in
10^6. memory: of a GPU, as its driver counts.

Where others use the machine, too, compare the seconds of CPU time: those of all ranks, for a million tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import train_step
from train_step import HERE, groups

CONTENDERS = ("xtrain", "ddp", "apart")
WARM = 3
NUMBERS = [
    "cpu_seconds",
    "ms",
    "silent_ms",
    "mhz",
    "watts",
    "silent_mhz",
    "silent_watts",
    "wire_mb",
    "gib",
]  # of a round
# name: (batch, length, config)
SHAPES = {
    "67m": (32, 256, dict(
        vocab_size=50257, hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, head_dim=32, tie_word_embeddings=False, rope_theta=1e6,
    )),
    "124m": (64, 1024, dict(
        vocab_size=50257, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64, tie_word_embeddings=True, rope_theta=1e6,
    )),
    "0.6b": (8, 4096, dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6,
    )),
}  # fmt: skip


def settings(name: str):
    """(Qwen3Config, batch size, sequence length)."""
    if name not in SHAPES:
        return train_step.settings(name)
    from xtrain.models import Qwen3Config

    batch, length, shape = SHAPES[name]
    return Qwen3Config(**shape), batch, length


@dataclass
class Contender:
    """One rank of a contender, ready to train."""

    rank: int
    step: Callable[[], None]
    gather: Callable[[float], list[float]]
    tokens: int  # of a step, of all ranks
    end: Callable[[], None]
    count_bytes: Callable[[], Any] = contextlib.nullcontext
    silence: Callable[[], None] | None = None
    phases: Callable[[], list[float]] | None = None


def xtrain_steps(preset: str, batch: int, device: str, precision: str, sends: str):
    import numpy as np

    import xtrain as xt
    from xtrain.models import Qwen3

    xt.distributed.init()
    rank, size, local = xt.distributed.rank(), xt.distributed.world_size(), xt.distributed.local_rank()
    place = f"cuda:{local}" if device == "cuda" else "cpu"
    if device == "cpu":
        xt.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    config, _, length = settings(preset)
    model = Qwen3(config, device=place).to(getattr(xt, precision))
    optimizer = xt.optim.AdamW(groups(model.parameters()), lr=1e-3, betas=(0.9, 0.95))
    overlap = {"auto": None, "early": True, "late": False}[sends]
    parallel = xt.distributed.DataParallel(model, optimizer, overlap=overlap)
    rng = np.random.default_rng(0)

    def train_leaf(ids, wanted):
        for _ in parallel.rounds(backwards=1):  # one leaf a rank
            (model.loss(ids, wanted, reduction="sum") / (batch * length)).backward()

    def train(ids, wanted):
        train_leaf(ids, wanted)
        return parallel.step(clip=1.0)

    def graph():
        return xt.cuda.graph(train, optimizers=[optimizer]) if device == "cuda" else train

    call, silent = graph(), False

    def phases() -> list[float]:
        """Seconds until an eager step's backward is done, its gradients are added, the parameters are there."""
        parts = (xt.from_numpy(rng.integers(0, config.vocab_size, (batch // size, length))).to(place) for _ in range(2))
        times = []
        for act in (lambda: train_leaf(*parts), lambda: parallel.reduce(1.0), parallel.update):
            begun = time.perf_counter()
            act()
            if device == "cuda":
                xt.cuda.synchronize(place)
            times.append(time.perf_counter() - begun)
        return times

    def step() -> None:
        block = rng.integers(0, config.vocab_size, (batch // size, length + 1))
        if not silent:
            parallel.begin()
        call(*(xt.from_numpy(np.ascontiguousarray(part)).to(place) for part in (block[:, :-1], block[:, 1:])))
        if device == "cuda":
            xt.cuda.synchronize(place)

    def silence() -> None:
        """From now on a step's exchanges are copies."""
        nonlocal call, silent
        call.end("its exchanges have been replaced")
        xt._C.nccl_all_to_all = lambda comm, out, sent, beside=False: out.copy_(sent)
        xt._C.nccl_all_gather = lambda comm, outs, sent, beside=False: [
            piece.copy_(one) for out, one in zip(outs, sent, strict=True) for piece in out.reshape(size, -1)
        ]
        xt._C.nccl_join = lambda comm: None
        call, silent = graph(), True

    return Contender(
        rank, step, xt.distributed.gather_json, batch * length, xt.distributed.shutdown,
        count_bytes=lambda: sent_bytes(xt._C, size) if device == "cuda" and size > 1 else contextlib.nullcontext([]),
        silence=silence if device == "cuda" and size > 1 else None, phases=phases,
    )  # fmt: skip


@contextlib.contextmanager
def sent_bytes(core, size: int):
    """A list that gets the bytes which leave this rank in each exchange that NCCL is asked for in the block."""
    found: list[float] = []
    before = core.nccl_all_to_all, core.nccl_all_gather

    def all_to_all(comm, out, sent, beside=False):
        found.append(sent.nbytes * (size - 1) / size)
        before[0](comm, out, sent, beside)

    def all_gather(comm, outs, sent, beside=False):
        found.append(sum(one.nbytes for one in sent) * (size - 1))
        before[1](comm, outs, sent, beside)

    core.nccl_all_to_all, core.nccl_all_gather = all_to_all, all_gather
    try:
        yield found
    finally:
        core.nccl_all_to_all, core.nccl_all_gather = before


def ddp_steps(preset: str, batch: int, device: str, precision: str):
    import numpy as np
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE.parent / "support"))
    from torch_qwen3 import TorchQwen3

    class Loss(torch.nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids, targets):
            return self.model.loss(ids, targets)

    rank, size = int(os.environ["XTRAIN_RANK"]), int(os.environ["XTRAIN_WORLD_SIZE"])
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    meeting = f"file://{os.environ['XTRAIN_STORE'][5:]}-torch"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=meeting, rank=rank, world_size=size)
    config, _, length = settings(preset)
    torch.manual_seed(0)
    with torch.device(place):
        model = TorchQwen3(config, length)
    model = model.to(getattr(torch, precision))
    network = Loss(model)
    if size > 1:
        network = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    network = torch.compile(network)
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=1e-3, betas=(0.9, 0.95), fused=True)
    rng = np.random.default_rng(rank)

    def step() -> None:
        block = torch.from_numpy(rng.integers(0, config.vocab_size, (batch // size, length + 1))).to(place)
        optimizer.zero_grad(set_to_none=True)
        network(block[:, :-1], block[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def gather(value: float) -> list[float]:
        mine = torch.tensor([float(value)], device=place, dtype=torch.float64)
        all_ = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(all_, mine)
        return [one.item() for one in all_]

    return Contender(rank, step, gather, batch * length, dist.destroy_process_group)


def worker(contender: str, options: argparse.Namespace, batch: int) -> None:
    """One rank of one round; rank 0 prints tokens per second of all ranks together."""
    what = options.preset, batch, options.device, options.precision
    one = xtrain_steps(*what, options.sends) if contender == "xtrain" else ddp_steps(*what)
    with one.count_bytes() as sent:
        one.step()
    with clocks(one) if options.device == "cuda" else contextlib.nullcontext({}) as running:
        seconds, steps, busy = timed(one, options.seconds)
    found = {"tokens_per_second": one.tokens / seconds, "steps": steps, "ms": seconds * 1e3, **running}
    found["cpu_seconds"] = sum(one.gather(busy)) / (one.tokens * steps) * 1e6
    if options.device == "cuda":
        found["gib"] = max(one.gather(memory_used(one.rank)))
    if options.phases and one.phases is not None:
        found["phases_ms"] = phases_of(one)
    if one.silence is not None:
        found["wire_mb"] = sum(sent) / 1e6
    if one.silence is not None and options.modes == "weak":
        one.silence()
        for _ in range(WARM):  # eager, and the capture
            one.step()
        with clocks(one) as silent:
            found["silent_ms"] = timed(one, options.seconds)[0] * 1e3
        found |= {f"silent_{name}": value for name, value in silent.items()}
        if options.phases and one.phases is not None:
            found["silent_phases_ms"] = phases_of(one)
    if one.rank == 0:
        print(json.dumps(found), flush=True)
    one.end()


def phases_of(one: Contender) -> list[list[float]]:
    """Of each phase of an eager step, the ranks' medians in ms."""
    assert one.phases is not None
    rows = [one.phases() for _ in range(WARM + 7)][WARM:]
    return [[1e3 * each for each in one.gather(statistics.median(times))] for times in zip(*rows)]


def timed(one: Contender, seconds: float) -> tuple[float, int, float]:
    """A step's time, the number of steps, and this rank's seconds of CPU time in all of them."""
    for _ in range(WARM):
        begun = time.perf_counter()
        one.step()
    last = one.gather(time.perf_counter() - begun)[0]  # rank 0 decides
    steps, times = min(max(int(seconds / last), 3), 2000), []
    busy = time.process_time()
    for _ in range(steps):
        at = time.perf_counter()
        one.step()
        times.append(time.perf_counter() - at)
    busy = time.process_time() - busy
    return max(one.gather(statistics.median(times))), steps, busy


@contextlib.contextmanager
def clocks(one: Contender):
    """A dict that gets the mean of all ranks' clocks (MHz) and power (W) in the block, as the driver reads them."""
    found: dict[str, float] = {}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or str(one.rank)
    words = f"nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -i {gpu} -lms 100".split()
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        reader.terminate()
        lines = [line.split(",") for line in reader.communicate()[0].splitlines()]
    pairs = [(float(line[0]), float(line[1])) for line in lines if len(line) == 2 and line[1].strip()[:1].isdigit()]
    for name, values in zip(("mhz", "watts"), zip(*(pairs or [(math.nan, math.nan)]))):
        found[name] = statistics.mean(one.gather(statistics.mean(values)))


def memory_used(gpu: int) -> float:
    """GiB that all programs together use of a GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(gpu)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1024


def round_of(contender: str, mode: str, world: int, batch: int, options: argparse.Namespace, left: float) -> dict:
    apart = contender == "apart"
    with tempfile.TemporaryDirectory() as folder:
        worker = ["--worker", "xtrain" if apart else contender, "--batch", str(batch // world if apart else batch)]
        words = [sys.executable, __file__, *worker, "--preset", options.preset]
        words += ["--device", options.device, "--precision", options.precision, "--seconds", str(options.seconds)]
        words += ["--modes", mode, "--sends", options.sends, *(["--phases"] if options.phases else [])]
        files = [open(Path(folder) / f"{rank}.txt", "w+") for rank in range(world)]  # noqa: SIM115
        processes = []
        try:
            for rank in range(world):
                store = {
                    "XTRAIN_RANK": str(rank),
                    "XTRAIN_WORLD_SIZE": str(world),
                    "XTRAIN_STORE": f"file:{folder}/meet",
                }
                environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": str(rank)} if apart else store)}
                if options.device == "cpu":  # one compiler a rank, where all share the processors
                    environment |= {"XTRAIN_PLANE": "host", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                processes.append(subprocess.Popen(words, env=environment, stdout=files[rank], stderr=subprocess.STDOUT))
            deadline = time.monotonic() + left
            failed = False
            while any(one.poll() is None for one in processes) and not failed:
                failed = any(one.poll() for one in processes)
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.05)
        finally:
            for one in processes:
                one.kill()
                one.wait()
            for file in files:
                file.seek(0)
            texts = [file.read().strip() for file in files]
            for file in files:
                file.close()
    if any(one.returncode for one in processes):
        bad = next(i for i, one in enumerate(processes) if one.returncode)
        return {"failed": texts[bad].splitlines()[-1][:200] if texts[bad] else f"status {processes[bad].returncode}"}
    found = [json.loads(text.splitlines()[-1]) for text in texts[: world if apart else 1]]
    if not apart:
        return found[0]
    each = [one["ms"] for one in found]  # in the order of GPUs
    return {
        "tokens_per_second": world * min(one["tokens_per_second"] for one in found),
        "ms": max(each),
        "each_ms": each,
    }


def table(rows: list[dict], options: argparse.Namespace) -> str:
    lines = [
        "| scaling | library | processes | rounds | tokens/s | of W times one | beside DDP | exposed ms | MHz, W "
        "| without exchanges | wire MB | GiB a GPU | CPU s for 1M tokens |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    cases: dict[tuple[str, str, int], list[dict]] = {}
    for row in rows:
        cases.setdefault((row["mode"], row["contender"], row["world"]), []).append(row)
    good = {key: [one for one in found if "failed" not in one] for key, found in cases.items()}
    speeds = {key: statistics.median(one["tokens_per_second"] for one in found) for key, found in good.items() if found}
    for mode, contender, world in sorted(speeds):
        found, speed = good[mode, contender, world], speeds[mode, contender, world]
        kind = "xtrain" if contender == "apart" else contender
        one = next((speeds[key] for key in ((mode, kind, 1), ("weak", kind, 1)) if key in speeds), None)
        other = speeds.get((mode, "ddp", world))
        share = f"{speed / one / world:.1%}" if one else ""
        beside = f"{speed / other:.2f}" if other else ""
        middle = {name: statistics.median(row[name] for row in found) for name in found[-1] if name in NUMBERS}
        busy = f"{middle['cpu_seconds']:,.0f}" if "cpu_seconds" in middle else ""
        exposed = f"{middle['ms'] - middle['silent_ms']:.2f}" if "silent_ms" in middle else ""
        power, silent = (
            f"{middle[f'{kind}mhz']:,.0f}, {middle[f'{kind}watts']:,.0f}" if f"{kind}mhz" in middle else ""
            for kind in ("", "silent_")
        )
        wire, memory = (
            f"{middle[name]:,.{digits}f}" if name in middle else "" for name, digits in (("wire_mb", 0), ("gib", 1))
        )
        lines.append(
            f"| {mode} | {contender} | {world} | {len(found)} | {speed:,.0f} | {share} | {beside} | {exposed} | {power} | {silent} "
            f"| {wire} | {memory} | {busy} |"
        )
    lines += [f"{', '.join(map(str, key))}: {cases[key][-1]['failed']}" for key in sorted(cases) if not good[key]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--modes", default="weak,strong")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--json", default="scaling.jsonl")
    parser.add_argument("--sends", choices=("auto", "early", "late"), default="auto")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options, options.batch)
        return
    worlds = [int(one) for one in options.worlds.split(",")]
    batch = settings(options.preset)[1]
    begun, path = time.monotonic(), Path(options.json)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    about = {
        "preset": options.preset,
        "device": options.device,
        "precision": options.precision,
        "seconds": options.seconds,
        "sends": options.sends,
        "phases": options.phases,
    }
    rows = [row for row in rows if {key: row.get(key) for key in about} == about]
    done = {(row["round"], row["mode"], row["world"], row["contender"]) for row in rows if "failed" not in row}
    missing = [
        (number, mode, world, contender)
        for number in range(options.rounds)
        for mode in options.modes.split(",")
        for world in worlds
        for contender in options.contenders.split(",")[:: 1 if number % 2 == 0 else -1]
        if (number, mode, world, contender) not in done
        and not (mode == "strong" and world == 1 and "weak" in options.modes)  # the same step
        and not (contender == "apart" and (mode == "strong" or world == 1 or options.device == "cpu"))
    ]
    for i, (number, mode, world, contender) in enumerate(missing):
        left = options.limit - (time.monotonic() - begun)
        rows_of = batch * world if mode == "weak" else batch
        if rows_of % world:
            result = {"failed": f"the batch must be a multiple of the processes, got {rows_of} rows for {world}"}
        else:
            try:
                result = round_of(contender, mode, world, rows_of, options, left)
            except TimeoutError:
                again = "; one takes longer than --limit" if i == 0 else ""
                print(f"stopped after {options.limit:g} s: {len(missing) - i} rounds are missing{again}; call it again")
                break
        rows.append({**about, "round": number, "mode": mode, "world": world, "contender": contender, **result})
        with path.open("a") as file:
            print(json.dumps(rows[-1]), file=file)
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(rows, options))


if __name__ == "__main__":
    main()
