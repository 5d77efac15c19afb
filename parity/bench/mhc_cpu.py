"""Hyper-connections on the CPU, xtrain and eager PyTorch in turns on the same numbers, forward and forward with backward.

    python parity/bench/mhc_cpu.py [--shapes 2x64x4x128,1x512x4x1280] [--dtypes float32,bfloat16] [--threads 1] [--rounds 7]

Shapes are B x S x n x C; the first is the seed's. `layer` wraps tanh. Results are compared before anything is timed. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.mhc import torch_post, torch_pre, torch_sinkhorn


def to_torch(a, name):
    return torch.tensor(a).to(getattr(torch, name)).requires_grad_()


def to_xtrain(a, name):
    return xt.tensor(a).to(getattr(xt, name)).requires_grad_()


def our_layer(x, phi, alpha, bias, gamma):
    h_in, h_post, m, carry = _C.mhc_open(x, phi, alpha, bias, gamma)
    return _C.mhc_close(carry, h_in.tanh(), h_post, m)


def their_layer(x, *parameters):
    h_in, h_post, h_res = torch_pre(torch, x, *parameters)
    return torch_post(torch, x, h_in.tanh(), h_post, torch_sinkhorn(torch, h_res))


def cases(b, s, n, c, dtype):
    """name -> (arrays, dtypes, ours, theirs)"""
    rng, k, m = np.random.default_rng(0), n * c, n * n + 2 * n
    normal = rng.standard_normal
    x, y = normal((b, s, n, c)), normal((b, s, c))
    parameters = [normal((m, k)) / np.sqrt(k), np.array([1.1, 0.9, 1.05]), 0.1 * normal(m), 1 + 0.5 * normal((n, c))]
    logits, h_post = normal((b, s, n, n)), rng.uniform(0, 2, (b, s, n))
    wide = "float32"
    return {
        "pre": ([x, *parameters], [dtype, *[wide] * 4], F.mhc_pre, lambda *a: torch_pre(torch, *a)),
        "sinkhorn": ([logits], [wide], F.sinkhorn, lambda z: torch_sinkhorn(torch, z)),
        "post": (
            [x, y, h_post, rng.uniform(0, 1, (b, s, n, n))], [dtype, dtype, wide, wide],
            F.mhc_post, lambda *a: torch_post(torch, *a),
        ),
        "layer": ([x, *parameters], [dtype, *[wide] * 4], our_layer, their_layer),
    }  # fmt: skip


def as_list(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def seconds(call, count):
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def in_turns(calls, rounds):
    """Median seconds of each call."""
    counts = []
    for call in calls:
        seconds(call, 2)
        counts.append(max(1, min(200, int(0.02 / seconds(call, 2)))))
    found = [[seconds(call, count) for call, count in zip(calls, counts)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found)]


def compare(arrays, dtypes, ours, theirs, rounds):
    """((our forward, their forward), (our forward and backward, their forward and backward)) in seconds."""
    mine = [to_xtrain(a, d) for a, d in zip(arrays, dtypes)]
    other = [to_torch(a, d) for a, d in zip(arrays, dtypes)]
    outs, refs = as_list(ours(*mine)), as_list(theirs(*other))
    dys = [torch.randn_like(r) for r in refs]
    given = [to_xtrain(d.detach().float().numpy(), o.dtype.name).detach() for d, o in zip(dys, outs)]

    def our_both():
        for t in mine:
            t.grad = None
        _C.backward(as_list(ours(*mine)), given, False)

    def their_both():
        for t in other:
            t.grad = None
        torch.autograd.backward(as_list(theirs(*other)), dys)

    our_both(), their_both()
    pairs = [*zip(outs, refs), *((a.grad, b.grad) for a, b in zip(mine, other))]
    for a, b in pairs:
        got, want = (t.detach().float().numpy() for t in (a, b))
        limit = 2.0**-5 if "bfloat16" in dtypes else 1e-4
        assert np.abs(got - want).max() <= limit * np.abs(want).max(), "xtrain and PyTorch disagree"

    def our_forward():
        with xt.no_grad():
            ours(*mine)

    def their_forward():
        with torch.no_grad():
            theirs(*other)

    return in_turns([our_forward, their_forward], rounds), in_turns([our_both, their_both], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x64x4x128,1x512x4x1280")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    xt.set_default_device("cpu")
    torch.set_num_threads(args.threads)
    xt.set_num_threads(args.threads)
    print(f"PyTorch {torch.__version__} eager, xtrain {xt.__version__}, {args.threads} thread(s), microseconds")
    print("| B x S x n x C | streams | what | forward | PyTorch | ratio | both | PyTorch | ratio |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            for name, case in cases(*map(int, shape.split("x")), dtype).items():
                forward, both = compare(*case, args.rounds)
                cells = [f"{t * 1e6:.0f}" for t in forward] + [f"{forward[1] / forward[0]:.1f}"]
                cells += [f"{t * 1e6:.0f}" for t in both] + [f"{both[1] / both[0]:.1f}"]
                print(f"| {shape} | {dtype} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
