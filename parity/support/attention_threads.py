"""Attention's backward with one sample and few kv heads: one thread against two, in turns, least of the rounds.

    python parity/support/attention_threads.py [--rounds 9] [--dtypes float32,bfloat16]

The ceiling is what two threads make of work that needs no such cut: 24 even products, with about the multiplications of the backward's
five, handed out by the same pool. Asked: 1.8. Wall time, so the machine must have two quiet cores: `cpu 2` is CPU time over wall time with
two threads; well below 2, another job had a core, or a thread waited.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

SHAPES = [(1, 8, 1, 2048, 64), (1, 8, 2, 1024, 64), (1, 6, 3, 1024, 64), (1, 32, 4, 1024, 128)]  # B, H, K, S, D
Call = Callable[[], object]


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> xt.Tensor:
    return xt.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(getattr(xt, dtype))


def backward(rng: np.random.Generator, dtype: str, b: int, h: int, k: int, s: int, d: int) -> Call:
    inputs = [normal(rng, dtype, b, heads, s, d).requires_grad_() for heads in (h, k, k)]
    out, seed = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True), normal(rng, dtype, b, h, s, d)

    def call() -> None:
        for t in inputs:
            t.grad = None
        _C.backward([out], [seed], True)

    return call


def pieces(rng: np.random.Generator, dtype: str, b: int, h: int, k: int, s: int, d: int) -> Call:
    """24 products of a head's [s, d] x [d, n]: n makes their multiplications those of the backward, half a mask."""
    n = max(16, 5 * b * h * s // (2 * 24) // 16 * 16)
    left, right = normal(rng, dtype, 24, s, d), normal(rng, dtype, 24, d, n)
    return lambda: xt.matmul(left, right)


def measure(calls: dict[str, Call], rounds: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Least wall milliseconds, and the CPU time over the wall time then, of each call and number of threads."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for turn in range(rounds + 1):  # the first warms up
        for name, call in calls.items():
            for threads in (1, 2):
                xt.set_num_threads(threads)
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if turn:
                    best[name, threads] = min(best.get((name, threads), (1e9, 0.0)), (1e3 * wall, cpu / wall))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    print("| B, H, K, S, D | dtype | 1, ms | 2, ms | 1 / 2 | cpu 2 | ceiling | its cpu 2 |\n|---|---|" + "---:|" * 6)
    for shape in SHAPES:
        for dtype in args.dtypes.split(","):
            rng = np.random.default_rng(0)
            found = measure({"b": backward(rng, dtype, *shape), "p": pieces(rng, dtype, *shape)}, args.rounds)
            one, (two, cpu), (p1, _), (p2, p_cpu) = found["b", 1][0], found["b", 2], found["p", 1], found["p", 2]
            cells = f"{one:.2f} | {two:.2f} | {one / two:.2f} | {cpu:.2f} | {p1 / p2:.2f} | {p_cpu:.2f}"
            print(f"| {', '.join(map(str, shape))} | {dtype} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
