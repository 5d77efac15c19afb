"""Generation on a CPU beside transformers: tokens a second of whole calls, in turns.

    python parity/bench/cpu_generate.py [--models default,43m] [--batch 1,8] [--tokens 128] [--rounds 5] [--threads N] [--cpu-time] [--profile]

The same float32 weights on both sides (Qwen3; "default" is the preset of 1.7 M parameters), 16 tokens of prompt, `--tokens` new ones, greedy and
with top-k 50, top-p 0.9, temperature 0.7. Printed: medians of `--rounds` calls of each side, and their ratio. --profile: what a step of ours is made
of, by cProfile's time of calls, and the time of the products alone.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers

import xtrain as xt
from xtrain import models

# vocab_size, hidden_size, intermediate_size, layers, heads, kv heads, head_dim
SIZES = {
    "default": (256, 192, 512, 4, 6, 3, 32),
    "43m": (8192, 512, 1536, 12, 8, 4, 64),
    "110m": (32000, 768, 2048, 12, 12, 4, 64),
}
CLOCK = time.perf_counter
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "top-k 50, top-p 0.9": dict(temperature=0.7, top_k=50, top_p=0.9)}


def pair(name: str) -> tuple[models.LanguageModel, torch.nn.Module]:
    vocab, width, inner, layers, heads, kv_heads, dim = SIZES[name]
    config = transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(config).float().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return models.load(folder), theirs


def calls(ours: models.LanguageModel, theirs: torch.nn.Module, ids: np.ndarray, tokens: int, way: str) -> Any:
    options = WAYS[way]

    def mine() -> None:
        ours.generate(ids, tokens, eos=(), seed=1, **({"temperature": 0.0} | options))

    def other() -> None:
        x = torch.from_numpy(ids)
        with torch.inference_mode():
            theirs.generate(
                x, attention_mask=torch.ones_like(x), max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, eos_token_id=None,
                do_sample=bool(options), **options,
            )  # fmt: skip

    return {"xtrain": mine, "transformers": other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="default,43m")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    transformers.utils.logging.set_verbosity_error()
    if args.threads:
        xt.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", end=", ")
    print(f"threads {xt.get_num_threads()} and {torch.get_num_threads()}, {args.tokens} tokens")
    for name in args.models.split(","):
        ours, theirs = pair(name)
        if args.profile:
            profile(ours, args.tokens)
            continue
        for batch in map(int, args.batch.split(",")):
            ids = np.random.default_rng(0).integers(0, SIZES[name][0], (batch, 16))
            for way in WAYS:
                times: dict[str, list[float]] = {"xtrain": [], "transformers": []}
                for turn in range(args.rounds + 1):
                    for side, call in calls(ours, theirs, ids, args.tokens, way).items():
                        start = CLOCK()
                        call()
                        times[side] += [CLOCK() - start] if turn else []
                rates = [batch * args.tokens / statistics.median(each) for each in times.values()]
                print(
                    f"{name:8} {ours.num_parameters() / 1e6:6.1f} M, batch {batch:2}, {way:20} xtrain {rates[0]:8.0f} tokens/s   "
                    f"transformers {rates[1]:8.0f}   ratio {rates[0] / rates[1]:5.2f}", flush=True,
                )  # fmt: skip


def profile(ours: models.LanguageModel, tokens: int) -> None:
    """Calls by their own time; and what the products of a step take alone, each matrix once."""
    ids = np.zeros((1, 16), np.int64)
    ours.generate(ids, 8, eos=(), temperature=0.0)
    start = CLOCK()
    ours.generate(ids, tokens, eos=(), temperature=0.0)
    step = (CLOCK() - start) / tokens
    matrices = [p.detach() for p in ours.parameters() if p.ndim == 2]
    inputs = {m.shape[1]: xt.randn(1, m.shape[1]) for m in matrices}
    taken = []
    for _ in range(20):
        start = CLOCK()
        for m in matrices:
            xt.functional.linear(inputs[m.shape[1]], m)
        taken.append(CLOCK() - start)
    size = sum(m.numel() for m in matrices) * 4
    alone = statistics.median(taken)
    print(f"a step {step * 1e6:.0f} us; its products alone {alone * 1e6:.0f} us, {size / alone / 1e9:.1f} GB/s")
    profiler = cProfile.Profile()
    profiler.runcall(ours.generate, ids, tokens, eos=(), temperature=0.0)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


if __name__ == "__main__":
    main()
