"""Drawing tokens, beside transformers' logits processors and torch.multinomial.

    python parity/bench/sampling.py [--device cpu|cuda] [--vocab 32000] [--batch 8] [--threads N]

Logits are normal with deviation 3, in float32. Both sides get the logits and give a token per row; rounds alternate. Printed: medians of
200 calls in microseconds. Lines may be long so that they can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import xtrain as xt
from xtrain import functional as F

OPTIONS = (
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_k": 50},
    {"top_p": 0.9},
    {"temperature": 0.7},
)  # fmt: skip


def theirs(logits: torch.Tensor, options: dict) -> torch.Tensor:
    if "temperature" in options:
        logits = TemperatureLogitsWarper(options["temperature"])(None, logits)
    if "top_k" in options:
        logits = TopKLogitsWarper(options["top_k"])(None, logits)
    if "top_p" in options:
        logits = TopPLogitsWarper(options["top_p"])(None, logits)
    return torch.multinomial(torch.softmax(logits, -1), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        xt.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    x = (np.random.default_rng(0).standard_normal((args.batch, args.vocab)) * 3).astype(np.float32)
    ours, random = xt.tensor(x, device=args.device), xt.tensor(np.array([1, 2]), device=args.device)
    other = torch.from_numpy(x).to(args.device)
    print(
        f"{args.device}, {args.batch} x {args.vocab}, threads {xt.get_num_threads()}, torch {torch.get_num_threads()}"
    )
    for options in OPTIONS:
        times: dict[str, list[float]] = {"xtrain": [], "transformers": []}
        for call in range(210):
            for name in times:
                start = time.perf_counter()
                if name == "xtrain":
                    F.sample(ours, random, **options).cpu()
                else:
                    theirs(other, options).cpu()
                if call >= 10:
                    times[name].append(time.perf_counter() - start)
        a, b = (statistics.median(each) * 1e6 for each in times.values())
        print(f"{options!s:55} xtrain {a:9.1f} us   transformers {b:9.1f} us   ratio {b / a:6.1f}")


if __name__ == "__main__":
    main()
