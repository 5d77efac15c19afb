"""Convolutions on the CPU, one thread: milliseconds of process time forward and backward, xtrain and PyTorch in turns, medians.

    python parity/support/conv_cpu.py [--rounds 9] [--dtypes float32,bfloat16]

Prints the table of docs/worklog/conv.md: our times, and PyTorch's over ours. Of causal_conv1d also the bytes a second that it has to move (x
and y; x, dy and dx), as a share of those of a copy of x, which takes turns with it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as TF

import xtrain as xt
import xtrain.functional as F
from xtrain import _C


def causal(x: Any, w: Any, b: Any) -> Any:
    """As models write it: a Conv1d padded on both sides, cut, between two transposes."""
    rows = TF.conv1d(x.transpose(1, 2), w.unsqueeze(1), b, padding=w.shape[1] - 1, groups=w.shape[0])
    return rows[..., : x.shape[1]].transpose(1, 2)


def general(**options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda *inputs: F.conv1d(*inputs, **options), lambda *inputs: TF.conv1d(*inputs, **options)


ROWS = [(4, 512, 512), (512, 4), (512,)]
MANY = [(4, 2048, 1024), (1024, 4), (1024,)]  # 16 or 32 MiB each, so that memory counts
CASES: list[tuple[str, list[tuple[int, ...]], Any]] = [
    ("causal_conv1d 4x512x512, 4", ROWS, (F.causal_conv1d, causal)),
    (
        "the same with silu", ROWS,
        (lambda x, w, b: F.causal_conv1d(x, w, b, "silu"), lambda x, w, b: TF.silu(causal(x, w, b))),
    ),
    (
        "causal_conv1d, `[B, C, S]` in PyTorch", ROWS,
        (F.causal_conv1d, lambda x, w, b: causal(x.view(4, 512, 512).transpose(1, 2), w, b)),
    ),
    ("causal_conv1d 4x2048x1024, 4", MANY, (F.causal_conv1d, causal)),
    (
        "causal_conv1d 4x2048x1024, 4, silu", MANY,
        (lambda x, w, b: F.causal_conv1d(x, w, b, "silu"), lambda x, w, b: TF.silu(causal(x, w, b))),
    ),
    ("conv1d 8x64x1000, 128x64x3", [(8, 64, 1000), (128, 64, 3), (128,)], general(padding=1)),
    ("conv1d 8x128x500, 128x128x5, stride 2", [(8, 128, 500), (128, 128, 5), (128,)], general(stride=2, padding=2)),
    ("conv1d 8x128x500, 128x128x1", [(8, 128, 500), (128, 128, 1), (128,)], general()),
    ("conv1d 8x256x500, 256x64x3, 4 groups", [(8, 256, 500), (256, 64, 3), (256,)], general(padding=1, groups=4)),
    ("conv1d 8x256x500, 256x1x7, depthwise", [(8, 256, 500), (256, 1, 7), (256,)], general(padding=3, groups=256)),
]  # fmt: skip
MOVES_X = {name for name, shapes, _ in CASES if shapes in (ROWS, MANY)}


def turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of process time of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(rounds + 1):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            if round:  # the first warms up
                times[name].append(1e3 * (time.process_time() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def row(name: str, shapes: list[tuple[int, ...]], ours: Any, theirs: Any, dtype: str, rounds: int) -> str:
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
    mine = [xt.from_dlpack(t).clone().requires_grad_() for t in tensors]
    for t in tensors:
        t.requires_grad_()

    def forward(call: Any, inputs: Any, no_grad: Any) -> Callable[[], Any]:
        def run() -> None:
            with no_grad():
                call(*inputs)

        return run

    y, want = ours(*mine), theirs(*tensors)
    dy = torch.randn(want.shape).to(want.dtype)
    seed = xt.from_dlpack(dy.clone())

    def backward_of_ours() -> None:
        for t in mine:
            t.grad = None
        _C.backward([y], [seed], True)

    def backward_of_theirs() -> None:
        for t in tensors:
            t.grad = None
        want.backward(dy, retain_graph=True)

    x = tensors[0].detach()
    place = torch.empty_like(x)
    copy = {"copy": lambda: place.copy_(x)}
    f = turns({"x": forward(ours, mine, xt.no_grad), "t": forward(theirs, tensors, torch.no_grad)} | copy, rounds)
    b = turns({"x": backward_of_ours, "t": backward_of_theirs} | copy, rounds)
    cells = [name, dtype]
    for found, arrays in ((f, 2), (b, 3)):
        share = f"{50 * arrays * found['copy'] / found['x']:.0f} %" if name in MOVES_X else ""
        cells += [f"{found['x']:.2f}", f"{found['t'] / found['x']:.2f}", share]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    xt.set_num_threads(1)
    print("| | dtype | forward, ms | x | of a copy | backward, ms | x | of a copy |\n|---|---|" + "---:|" * 6)
    for name, shapes, (ours, theirs) in CASES:
        for dtype in args.dtypes.split(","):
            print(row(name, shapes, ours, theirs, dtype, args.rounds), flush=True)


if __name__ == "__main__":
    main()
