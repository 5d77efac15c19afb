"""Generation on a CPU beside transformers: tokens a second of whole calls, in turns.

    python parity/bench/cpu_generate.py [--models default,43m] [--batch 1,8] [--tokens 128] [--rounds 5] [--threads N]
        [--dtype bfloat16] [--profile]

The same weights on both sides (Qwen3; "default" is the preset of 1.7 M parameters), 16 tokens of prompt, `--tokens` new ones, greedy and
with top-k 50, top-p 0.9, temperature 0.7. Printed: medians of `--rounds` calls of each side, and their ratio, by the clock and by the seconds that the
process computed over all its threads: on a machine that others use only the latter say something, and with one thread alone, as threads that wait
for others compute, too. --profile: what a step of ours is made of, by cProfile's time of calls, and the time of the products alone.
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
CLOCKS = {"clock": time.perf_counter, "process": time.process_time}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "top-k 50, top-p 0.9": dict(temperature=0.7, top_k=50, top_p=0.9)}


def pair(name: str, dtype: str) -> tuple[models.LanguageModel, torch.nn.Module]:
    vocab, width, inner, layers, heads, kv_heads, dim = SIZES[name]
    config = transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
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
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if args.threads:
        xt.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", end=", ")
    print(f"threads {xt.get_num_threads()} and {torch.get_num_threads()}, {args.tokens} tokens, {args.dtype}")
    for name in args.models.split(","):
        ours, theirs = pair(name, args.dtype)
        if args.profile:
            profile(ours, args.tokens)
            continue
        for batch in map(int, args.batch.split(",")):
            ids = np.random.default_rng(0).integers(0, SIZES[name][0], (batch, 16))
            for way in WAYS:
                times: dict[str, list[list[float]]] = {"xtrain": [], "transformers": []}
                for turn in range(args.rounds + 1):
                    for side, call in calls(ours, theirs, ids, args.tokens, way).items():
                        start = [clock() for clock in CLOCKS.values()]
                        call()
                        taken = [clock() - begun for clock, begun in zip(CLOCKS.values(), start)]
                        times[side] += [taken] if turn else []
                print(f"{name:8} {ours.num_parameters() / 1e6:6.1f} M, batch {batch:2}, {way:20}", end="")
                for i, clock in enumerate(CLOCKS):
                    rates = [batch * args.tokens / statistics.median(one[i] for one in each) for each in times.values()]
                    text = f"{rates[0]:7.0f} and {rates[1]:6.0f} tokens/s, ratio {rates[0] / rates[1]:5.2f}"
                    print(f"   {clock}: {text}", end="", flush=True)
                print()


def profile(ours: models.LanguageModel, tokens: int) -> None:
    """Calls by their own time; and what the products of a step take alone, each matrix once."""
    ids = np.zeros((1, 16), np.int64)
    ours.generate(ids, 8, eos=(), temperature=0.0)
    start = time.process_time()
    ours.generate(ids, tokens, eos=(), temperature=0.0)
    step = (time.process_time() - start) / tokens
    matrices = [p.detach() for p in ours.parameters() if p.ndim == 2]
    inputs = {m.shape[1]: xt.randn(1, m.shape[1]) for m in matrices}
    taken = []
    for _ in range(20):
        start = time.process_time()
        for m in matrices:
            xt.functional.linear(inputs[m.shape[1]], m)
        taken.append(time.process_time() - start)
    size = sum(m.numel() for m in matrices) * 4
    alone = statistics.median(taken)
    print(f"a step {step * 1e6:.0f} us; its products alone {alone * 1e6:.0f} us, {size / alone / 1e9:.1f} GB/s")
    profiler = cProfile.Profile()
    profiler.runcall(ours.generate, ids, tokens, eos=(), temperature=0.0)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


if __name__ == "__main__":
    main()
