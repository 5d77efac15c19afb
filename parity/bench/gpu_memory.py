"""Memory and time of a training step on one GPU under each policy of recomputation, beside what `xtrain train --dry-run` estimates.

    python parity/bench/gpu_memory.py [--configs 0.6B-4k,...] [--precision bfloat16] [--policies none,cheap,block,full] [--steps 5]
                                      [--eager]

A step is forward, backward, clipping and AdamW on random tokens that lie on the device, captured once and replayed (--eager: not). Peaks
are of the device's pool, working memory of kernels and a graph's region included. Times are medians of single steps, each from an idle
device to an idle device. Exit status 1 when an estimate is more than 5 % off, or when the losses of the policies differ in a bit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

from gpu_step import CONFIGS, random_tokens

import xtrain as xt
from xtrain import _C
from xtrain.models import Qwen3, Qwen3Config
from xtrain.models.registry import RECOMPUTE, architecture
from xtrain.train.config import TrainConfig
from xtrain.train.estimate import estimates
from xtrain.train.parts import make_optimizer
from xtrain.train.step import gradients

GIB = 2.0**30


def run(keys: Qwen3Config, config: TrainConfig, policy: str, steps: int, eager: bool) -> tuple[int, float, list[float]]:
    """The peak in bytes, the median step in seconds, and the losses."""
    xt.manual_seed(0)
    dtype = xt.bfloat16 if config.precision == "bfloat16" else xt.float32
    model = Qwen3(keys, device="cuda", dtype=dtype)
    model.recompute = policy
    optimizer = make_optimizer(model, config.optim)
    ids, targets = (
        xt.from_numpy(a).to("cuda") for a in random_tokens(config.batch_size, config.seq_len, keys.vocab_size)
    )
    scale = 1.0 / ids.numel()

    def step(ids, targets):
        loss, norm = gradients(model, optimizer, [(ids, targets)], scale, config.clip)
        optimizer.step(guard=norm)
        return loss

    call = step if eager else xt.cuda.graph(step, optimizers=[optimizer])
    losses = [call(ids, targets).item() for _ in range(2)]
    optimizer.zero_grad()
    xt.cuda.reset_peak_memory_stats()
    losses.append(call(ids, targets).item())  # the capture
    seconds = []
    for _ in range(steps):
        xt.cuda.synchronize()
        begin = time.perf_counter()
        loss = call(ids, targets)
        xt.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return xt.cuda.max_memory_allocated(), statistics.median(seconds), losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="0.6B-4k")
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--policies", default=",".join(RECOMPUTE))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    xt.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    wrong = 0
    for name in args.configs.split(","):
        batch, length, shape = CONFIGS[name]
        keys = Qwen3Config(**shape)
        config = TrainConfig(batch_size=batch, seq_len=length, precision=args.precision, graph=not args.eager)
        known = {one.recompute: one for one in estimates(architecture("qwen3"), keys, config, "cuda")}
        print(f"{name} {args.precision}, {'eager' if args.eager else 'captured'}, on {xt.cuda.get_device_name()}")
        first = None
        for policy in args.policies.split(","):
            gc.collect()
            xt.cuda.empty_cache()
            peak, seconds, losses = run(keys, config, policy, args.steps, args.eager)
            if first is None:
                first = peak, seconds, losses
            error = known[policy].step / peak - 1
            same = losses == first[2]
            wrong += abs(error) > 0.05 or not same
            print(
                f"  {policy:6} estimate {known[policy].step / GIB:7.2f} GiB, measured {peak / GIB:7.2f} GiB ({error:+.1%}), "
                f"{peak / first[0]:.2f}x of the first; step {seconds * 1e3:8.2f} ms, {seconds / first[1]:.3f}x, estimated "
                f"{known[policy].flops / known['none'].flops:.2f}x FLOPs; {'same bits' if same else 'OTHER LOSSES'}",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    _C.manual_seed(0)
    sys.exit(main())
