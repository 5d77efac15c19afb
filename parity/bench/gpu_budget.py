"""Where a training step spends its time on one GPU: kernels by class, against a floor, and the time without a kernel.

    python parity/bench/gpu_budget.py [--configs 0.6B-4k,...] [--precision bfloat16] [--steps 3] [--captured] [--top 15]

The configs are those of gpu_step.py. Kernels are timed by CUPTI, through torch.profiler, in steps that follow each other. Floors:
products of 6 flops for each weight and token at 790 TFLOP/s in 16 bits (400 in TF32, 51 in float32); attention at cuDNN's 570 TFLOP/s
forward and 438 backward for head dim 128, 389 and 317 for 64, which it reaches from 2,048 positions on. Other classes have no floor
here: their bytes depend on what is fused.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict

import torch
from gpu_step import CONFIGS, Xtrain
from torch.profiler import ProfilerActivity, profile

import xtrain as xt

# The first pattern that a kernel's name has is its class.
CLASSES = {
    "attention forward": r"flash\w*forward|attention_forward",
    "attention backward": r"flash_|attention_d",
    "products": r"gemm|cutlass|nvjet|cublas|xmma|splitK",
    "AdamW, clipping": r"adamw|clip_kernel|norm_kernel<|squares_kernel",
    "loss": r"cross_entropy|softmax",
    "embedding": r"embedding",
    "norms, RoPE": r"rms_norm|layer_norm|qk_|rope_kernel|sum_shares",
    "SwiGLU": r"swiglu",
    "hyper-connections": r"mhc_|sinkhorn",
    "copies, memset": r"memset|graph_fill|memcpy|convert|transpose",
    "element by element": r"",
}


def class_of(name: str) -> str:
    return next(kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE))


def floors(config: str, precision: str) -> dict[str, float]:
    """Milliseconds a step for products and attention at the rates above."""
    batch, length, c = CONFIGS[config]
    heads, kv_heads, dim, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["hidden_size"]
    matrices = 2 if c.get("family") == "GPT2" else 3  # of a feed-forward layer
    layer = width * dim * (2 * heads + 2 * kv_heads) + matrices * width * c["intermediate_size"]
    weights = c["num_hidden_layers"] * layer + width * c["vocab_size"]
    rate = {"bfloat16": 790e12, "tf32": 400e12, "float32": 51e12}[precision]
    found = {"products": 6 * weights * batch * length / rate * 1e3}
    if precision == "bfloat16" and dim in (64, 128):
        forward, backward = (570e12, 438e12) if dim == 128 else (389e12, 317e12)
        pairs = c["num_hidden_layers"] * batch * heads * length * length * dim / 2
        found["attention forward"] = 4 * pairs / forward * 1e3
        found["attention backward"] = 10 * pairs / backward * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="0.6B-4k")
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--captured", action="store_true")
    args = parser.parse_args()
    xt.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    for config in args.configs.split(","):
        team = Xtrain(config, args.precision == "bfloat16", captured=args.captured)
        team.run(3)
        plain = team.run(args.steps) * 1e3
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            team.run(args.steps)
        spans = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        times, counts, kernels = defaultdict(float), defaultdict(int), defaultdict(lambda: [0.0, 0])
        for event in spans:
            one = event.device_time_total / 1e3 / args.steps
            kind = class_of(event.name)
            times[kind] += one
            counts[kind] += 1
            kernels[event.name][0] += one
            kernels[event.name][1] += 1
        first, last = min(e.time_range.start for e in spans), max(e.time_range.end for e in spans)
        busy, end = 0.0, first
        for event in sorted(spans, key=lambda e: e.time_range.start):  # overlapping kernels count once
            busy += max(0.0, event.time_range.end - max(end, event.time_range.start))
            end = max(end, event.time_range.end)
        floor = floors(config, args.precision)
        idle = (last - first - busy) / 1e3 / args.steps
        print(
            f"{config} {args.precision}: {plain:.2f} ms a step, traced {(last - first) / 1e3 / args.steps:.2f} ms, {idle:.2f} ms of it without a kernel"
        )
        for kind in sorted(times, key=times.__getitem__, reverse=True):
            least = f"floor {floor[kind]:8.2f}" if kind in floor else ""
            print(f"  {kind:20}{times[kind]:9.2f} ms {counts[kind] // args.steps:6} launches  {least}")
        for name, (one, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[: args.top]:
            print(f"    {one:8.3f} ms {count // args.steps:5}x  {name[:130]}")
        del team
        xt.cuda.empty_cache()


if __name__ == "__main__":
    main()
