"""The rate at which products of one row read their weights on a CPU, by threads, beside a sum of the same numbers.

    python parity/bench/row_products.py [--threads 1,2] [--wall]

float32, 256 MB of weights of one shape in turns, so that no cache holds them. Seconds that the process computed, over all its threads: on a machine
that others use they say what a core does, and a thread that waits for another by spinning would lower the rate. --wall: by the clock, on a
machine that is idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import xtrain as xt

SHAPES = {"q, k, v": (1536, 512), "gate, up": (3072, 512), "down": (512, 1536), "head": (32000, 512)}  # [out, in]
BYTES = 256_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.process_time

    def rate(call: Callable[[], object]) -> float:
        """GB/s: the median of some rounds."""
        taken = []
        for _ in range(args.rounds):
            start = clock()
            call()
            taken.append(clock() - start)
        return size / statistics.median(taken) / 1e9

    for threads in map(int, args.threads.split(",")):
        xt.set_num_threads(threads)
        for name, (outputs, inputs) in SHAPES.items():
            weights = [xt.rand(outputs, inputs) for _ in range(max(1, BYTES // (outputs * inputs * 4)))]
            size, x = sum(weight.nbytes for weight in weights), xt.rand(1, inputs)
            product = rate(lambda weights=weights, x=x: [xt.functional.linear(x, weight) for weight in weights])
            total = rate(lambda weights=weights: [weight.sum() for weight in weights])
            load = f"load {os.getloadavg()[0]:.0f}"
            print(f"{threads} threads, {name:8} product {product:5.1f} GB/s, sum {total:5.1f} GB/s, {load}", flush=True)


if __name__ == "__main__":
    main()
