"""A language model's head and its loss on one GPU: time and memory of forward and backward, xtrain and PyTorch in turns.

    python parity/bench/gpu_head.py [--sizes 32768x1024x151936,65536x768x50257,8192x384x50257] [--dtype bfloat16] [--rounds 5]
                                    [--chunks 2048,4096,8192] [--compile] [--json FILE]

Sizes are rows x width x vocabulary. `xtrain` makes logits in chunks of its own choice, `xtrain N` of N rows, `one piece` in one with
gradients afterwards. `PyTorch` materialises them and takes their loss in float32, `PyTorch 16` in their dtype; `--compile` adds
torch.compile of the first. `products` are the three products of the materialised logits alone. extra is the peak of a call beyond what
was there, without the gradients of x and weight; ratios are to `PyTorch`. Each call drops the gradients first.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as TF
from gpu_timing import measure

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

GIB = 2**30


def ours(x, weight, targets, chunk_rows):
    def call() -> None:
        x.grad = weight.grad = None
        F.linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows).backward()

    return call


def theirs(x, weight, targets, loss):
    def call() -> None:
        x.grad = weight.grad = None
        loss(x, weight, targets).backward()

    return call


def float32_loss(x, weight, targets):
    return TF.cross_entropy(TF.linear(x, weight).float(), targets)


def own_loss(x, weight, targets):
    return TF.cross_entropy(TF.linear(x, weight), targets)


def products(x, weight):
    """The three products, into memory that is there."""
    x, weight = x.detach(), weight.detach()
    logits, dx, dweight = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device), x.clone(), weight.clone()

    def call() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return call


def peak(name: str, call, gradients: int) -> int:
    """Bytes at the peak of a call beyond those before it, without the gradients."""
    if name.startswith("xtrain"):
        call()
        xt.cuda.synchronize()
        xt.cuda.empty_cache()
        _C.memory_reset_peak("cuda")
        held = _C.memory_stats("cuda")["allocated"] - gradients  # those of the call before, which this one drops
        call()
        xt.cuda.synchronize()
        return _C.memory_stats("cuda")["peak"] - held - gradients
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() - gradients
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held - gradients


def compare(rows: int, width: int, words: int, args) -> list[dict]:
    dtype = getattr(torch, args.dtype)
    x = torch.randn(rows, width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(words, width, device="cuda") * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, words, (rows,), device="cuda")
    mine = [xt.from_dlpack(t.detach()).clone().requires_grad_() for t in (x, weight)]
    labels = xt.from_dlpack(targets).clone()
    calls = {"xtrain": ours(*mine, labels, None)}
    calls |= {f"xtrain {n}": ours(*mine, labels, n) for n in map(int, args.chunks.split(",")) if n < rows}
    calls |= {
        "xtrain one piece": ours(*mine, labels, rows),
        "PyTorch": theirs(x, weight, targets, float32_loss),
        "PyTorch 16": theirs(x, weight, targets, own_loss),
    }
    if args.compile:
        calls["compile"] = theirs(x, weight, targets, torch.compile(float32_loss))
    gradients = (rows + words) * width * x.element_size()
    extra = {name: peak(name, call, gradients) for name, call in calls.items()}
    torch.cuda.empty_cache()
    calls["products"] = products(x, weight)
    waits = {name: xt.cuda.synchronize if name.startswith("xtrain") else torch.cuda.synchronize for name in calls}
    times = measure({name: (call, waits[name]) for name, call in calls.items()}, args.rounds)

    calls["xtrain"](), calls["PyTorch"]()
    xt.cuda.synchronize()
    for name, a, b in (("dx", mine[0].grad, x.grad), ("dweight", mine[1].grad, weight.grad)):
        far = (torch.from_dlpack(a).float() - b.float()).abs().max() / b.float().abs().max()
        print(f"  {name}: largest difference {far:.1e} of the largest value")
    found = []
    for name, seconds in times.items():
        row = dict(
            sizes=[rows, width, words], dtype=args.dtype, by=name, ms=seconds * 1e3, speed=times["PyTorch"] / seconds
        )
        row |= dict(tflops=6 * rows * width * words / seconds / 1e12)
        if name in extra:
            row |= dict(extra_gib=extra[name] / GIB, of_extra=extra[name] / extra["PyTorch"])
        memory = f"{row['extra_gib']:7.2f} GiB extra, {row['of_extra']:6.3f}" if name in extra else ""
        print(f"  {name:16} {row['ms']:8.2f} ms {row['speed']:5.2f}x {row['tflops']:6.0f} TFLOP/s {memory}", flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="32768x1024x151936,65536x768x50257,8192x384x50257")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", default="2048,4096,8192")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    rows = []
    for size in args.sizes.split(","):
        n, width, words = map(int, size.split("x"))
        chunk, ahead = _C.explain_chunk((n, width, words), args.dtype)
        print(
            f"{size} {args.dtype}: chunks of {chunk} rows, gradients {'ahead' if ahead else 'afterwards'}", flush=True
        )
        rows += compare(n, width, words, args)
        torch.cuda.empty_cache()
        xt.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
