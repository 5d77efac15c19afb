"""Generation on a GPU: whether captured steps give the right tokens, and how fast they are.

    python parity/bench/gpu_generate.py [--tokens 256] [--skip-theirs]
    python parity/bench/gpu_generate.py --only-theirs [--tokens 256] [--their-tokens 64] [--limit 240] [--static]

1. cached_attention: the split kernel against the plain one and float64, over shapes and dtypes; bits on repeats.
2. sample: the same tokens as on the CPU, for every dtype and option, at V = 151,936 too.
3. Captured generation in float32 against steps one by one, on the GPU and the CPU.
4. Qwen3-0.6B's shape in bfloat16: tokens a second at batch 1 and 16, captured and step by step; launches of a step.
5. What a step is made of: each op in a graph of 50 calls, at batch 1 and 16.
6. The same shape beside transformers, in turns: greedy, and top-k 50 with top-p 0.9, at batch 1 and 16.

The exit status is 1 when something of 1 to 3 is wrong. Numbers are medians; 1 to 5 take 90 seconds, 6 takes
--limit seconds and the calls that have begun.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from functools import partial
from typing import Any

import numpy as np

import xtrain as xt
from xtrain import _C
from xtrain.generation import generate, steps
from xtrain.models import Qwen3, Qwen3Config

WRONG: list[str] = []


def wrong(text: str) -> None:
    WRONG.append(text)
    print("WRONG", text, flush=True)


def attention() -> None:
    rng, checked = np.random.default_rng(0), 0
    for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-24)):
        for batch, heads, kv_heads, length, dim in (
            (1, 16, 8, 700, 128), (16, 16, 8, 300, 128), (2, 14, 2, 513, 64), (3, 8, 8, 64, 64), (2, 8, 1, 1000, 128), (1, 12, 4, 65, 128),
        ):  # fmt: skip
            shapes = [(batch, heads, 1, dim), *[(batch, kv_heads, 1, dim)] * 2, *[(batch, kv_heads, length, dim)] * 2]
            cpu = [xt.tensor(rng.standard_normal(shape)).to(getattr(xt, dtype)) for shape in shapes]
            for position in (0, 1, 63, 64, length // 2, length - 1):
                places = xt.full((batch,), min(position, length - 1), dtype=xt.int64)
                outs, kept = [], []
                for plain in (False, True, False):
                    gpu = [x.to("cuda") for x in cpu]
                    outs.append(_C.cached_attention(*gpu, places.to("cuda"), plain=plain).cpu().to(xt.float64).numpy())
                    kept.append([x.cpu().to(xt.float64).numpy().tobytes() for x in gpu[3:]])
                exact = [x.to(xt.float64) for x in cpu]
                want = _C.cached_attention(*exact, places).numpy()
                limit = np.abs(exact[4].numpy()).max() * (3 * unit + 300 * min(unit, 2.0**-24))
                name = f"cached_attention {dtype} {(batch, heads, kv_heads, length, dim)} at {position}"
                checked += 1
                if not all(np.abs(out - want).max() <= limit for out in outs):
                    wrong(f"{name}: {[float(np.abs(out - want).max()) for out in outs]} > {limit}")
                if outs[0].tobytes() != outs[2].tobytes():
                    wrong(f"{name}: other bits on a repeat")
                if not kept[0] == kept[1] == [x.numpy().tobytes() for x in exact[3:]]:
                    wrong(f"{name}: what is stored")
    print(f"cached_attention: {checked} cases", flush=True)


def sampling() -> None:
    rng, checked = np.random.default_rng(1), 0
    options = [
        {}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9, "temperature": 0.7}, {"top_p": 0.9}, {"top_k": 1}, {"top_k": 3000, "top_p": 0.5},
        {"top_k": 1024}, {"top_p": 1e-9}, {"temperature": 1e-7}, {"temperature": 1e9},
    ]  # fmt: skip
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for vocab in (1, 33, 1025, 32000, 151936):
            x = xt.tensor(rng.standard_normal((4, vocab)) * 3).to(getattr(xt, dtype))
            if vocab == 1025:
                x = xt.tensor(rng.integers(-1, 2, (4, vocab)).astype(np.float64)).to(getattr(xt, dtype))
            there = x.to("cuda")
            for option in options:
                for step in range(3):
                    random = xt.tensor(np.array([12345 + vocab, step]))
                    want = _C.sample(x, random, **option).tolist()
                    got = _C.sample(there, random.to("cuda"), **option).tolist()
                    checked += 1
                    if got != want:
                        wrong(f"sample {dtype} V {vocab} {option}: {got}, on the CPU {want}")
    bad = np.zeros((4, 999), np.float32)
    bad[0, 998], bad[1, 5], bad[2], bad[3, 1:] = np.nan, np.inf, -np.inf, -np.inf
    if _C.sample(xt.tensor(bad, device="cuda"), xt.tensor([1, 2], device="cuda")).tolist() != [-1, -1, -1, 0]:
        wrong("sample: rows that are not finite")
    print(f"sample: {checked} cases", flush=True)


def tokens() -> None:
    sizes = dict(
        vocab_size=997, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    ids = np.random.default_rng(2).integers(0, 997, (3, 7))
    for dtype in (xt.float64, xt.float32):
        xt.manual_seed(1)
        model = Qwen3(Qwen3Config(**sizes), dtype=dtype)
        on_cpu = {str(o): generate(model, ids, 120, **o).tolist() for o in OPTIONS}
        model = model.to("cuda")
        for option in OPTIONS:
            eager = generate(model, ids, 120, capture=False, **option).tolist()
            captured = [generate(model, ids, 120, capture=True, **option).tolist() for _ in range(2)]
            if captured[0] != captured[1]:
                wrong(f"generate {dtype} {option}: other tokens on a repeat")
            if captured[0] != eager:
                wrong(f"generate {dtype} {option}: captured and step by step differ from {first(captured[0], eager)}")
            if captured[0] != on_cpu[str(option)]:
                print(f"note: {dtype} {option}: GPU and CPU differ from {first(captured[0], on_cpu[str(option)])}")
    print("generate: captured against step by step", flush=True)


OPTIONS = (
    {"temperature": 0.0},
    {"seed": 7, "top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"seed": 8, "eos": [5, 6, 7]},
)
SHAPE = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, rope_theta=1e6,
)  # fmt: skip


def first(a: list, b: list) -> list:
    return [next((i for i, pair in enumerate(zip(x, y)) if pair[0] != pair[1]), None) for x, y in zip(a, b)]


def speed(count: int) -> None:
    xt.manual_seed(0)
    model = Qwen3(Qwen3Config(**SHAPE), device="cuda", dtype=xt.bfloat16)
    for batch in (1, 16):
        ids = np.random.default_rng(0).integers(0, 150000, (batch, 32))
        for name, options in (
            ("captured, greedy", dict(temperature=0.0, capture=True)),
            ("captured, top-k 50, top-p 0.9", dict(seed=1, top_k=50, top_p=0.9, capture=True)),
            ("step by step, greedy", dict(temperature=0.0, capture=False)),
        ):
            taken = []
            for _ in range(3 if "captured" in name else 1):
                stamps = [time.perf_counter()]
                generate(model, ids, count, eos=(), stream=lambda _, s=stamps: s.append(time.perf_counter()), **options)
                whole = time.perf_counter() - stamps[0]
                late = stamps[-1] - stamps[33] if len(stamps) > 64 else float("nan")
                taken.append((whole, late / (len(stamps) - 34) if len(stamps) > 64 else float("nan")))
            whole, each = min(taken)
            print(
                f"batch {batch:2} {name:32} whole call {batch * count / whole:9.0f} tokens/s, "
                f"steady {batch / each:9.0f} tokens/s ({each * 1e6:.0f} us a step)", flush=True,
            )  # fmt: skip
    steps_of(model)


DRAWS = {"greedy": {}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9}}


def beside_transformers(
    shape: dict[str, Any], device: str, count: int, their_count: int, limit: float, static: bool, rounds: int = 3
) -> None:
    """Tokens a second of both, in turns, for the same weights and the same 32 tokens of prompt; medians of whole calls,
    the prompt's step and, of ours, the capture included. A rate is per token: transformers' steps take equally long from
    the first to the last, so its calls may make fewer tokens. After `limit` seconds no side has a second call.
    """
    import torch
    import transformers

    start = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    xt.manual_seed(0)
    model = Qwen3(Qwen3Config(**shape, bos_token_id=None, eos_token_id=None), device=device, dtype=xt.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        other = load(folder, dtype=torch.bfloat16).to(device).eval()
    kind = "static cache, compiled" if static else "its default cache"
    print(
        f"in turns, bfloat16, {count} new tokens after 32 (transformers {their_count}, {kind}; the rate is per token)"
    )

    def ours(ids: np.ndarray, new: int, draw: dict[str, Any]) -> np.ndarray:
        options = {"temperature": 1.0, "seed": 1, **draw} if draw else {"temperature": 0.0}
        return generate(model, ids, new, eos=(), capture=True, **options).cpu().numpy()

    def theirs(ids: np.ndarray, new: int, draw: dict[str, Any]) -> np.ndarray:
        there = torch.tensor(ids, device=device)
        options = {"do_sample": True, "temperature": 1.0, **draw} if draw else {"do_sample": False}
        cache = {"cache_implementation": "static"} if static else {}
        length = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        out = other.generate(there, attention_mask=torch.ones_like(there), **length, **options, **cache)
        return out.cpu().numpy()

    for batch in (1, 16):
        ids = np.random.default_rng(0).integers(0, shape["vocab_size"], (batch, 32))
        for name, draw in DRAWS.items():
            taken: dict[str, list[float]] = {"ours": [], "theirs": []}
            out: dict[str, np.ndarray] = {}
            sides = (("ours", ours, count), ("theirs", theirs, their_count))
            for _, call, new in sides:  # warm: kernels are chosen, and with --static compiled for this length
                call(ids, new if static else 8, draw)
            for _ in range(rounds):
                for side, call, new in sides:
                    if taken[side] and time.perf_counter() - start > limit:
                        continue
                    begin = time.perf_counter()
                    out[side] = call(ids, new, draw)
                    taken[side].append((time.perf_counter() - begin) / new)
            rates = {side: batch / statistics.median(each) for side, each in taken.items()}
            same = ""
            if not draw:
                n = min(count, their_count)
                differ = out["ours"][:, 32 : 32 + n] != out["theirs"][:, 32 : 32 + n]
                first = np.where(differ.any(1), differ.argmax(1), n)
                same = f", the first {int(np.median(first))} of {n} tokens are equal in the median row"
            print(
                f"batch {batch:2} {name:22} ours {rates['ours']:8.0f} tokens/s, transformers {rates['theirs']:7.1f}: "
                f"{rates['ours'] / rates['theirs']:.1f} times ({len(taken['ours'])} and {len(taken['theirs'])} calls{same})",
                flush=True,
            )  # fmt: skip
            if time.perf_counter() - start > limit:
                print(f"the limit of {limit:.0f} s is reached: what follows has one call a side")


def steps_of(model: xt.nn.Module) -> None:
    """Times of one op, in a graph of 50 calls on inputs that are not in the cache twice, and of a whole step."""
    layer, config = model.model.layers[0], model.config

    def timed(name: str, calls: list, repeat: int = 30) -> None:
        def body() -> xt.Tensor:
            for call in calls:
                out = call()
            return out[0] if isinstance(out, (list, tuple)) else out

        try:
            with xt.no_grad():
                graph = xt.cuda.graph(body)
                for _ in range(3):
                    graph()
                taken = []
                for _ in range(7):
                    xt.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(repeat):
                        graph()
                    xt.cuda.synchronize()
                    taken.append((time.perf_counter() - start) / repeat / len(calls))
            print(
                f"  {name:44} {statistics.median(taken) * 1e6:8.2f} us, launches {graph.launches / len(calls):.1f}",
                flush=True,
            )
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {error}")

    layers = list(model.model.layers)

    def parts(batch: int) -> None:
        print(f"batch {batch}:")
        x = xt.randn(batch, 1024, device="cuda").to(xt.bfloat16)
        wide, inner = (xt.randn(batch, n, device="cuda").to(xt.bfloat16) for n in (2048, 3072))
        joined = [
            [one.self_attn.q_proj.weight, one.self_attn.k_proj.weight, one.self_attn.v_proj.weight] for one in layers
        ]
        gates = [[one.mlp.gate_proj.weight, one.mlp.up_proj.weight] for one in layers]
        timed("qkv 1024 -> 4096", [lambda w=w: _C.linear_joined(x, w) for w in joined])
        timed("o_proj 2048 -> 1024", [lambda m=one: m.self_attn.o_proj(wide) for one in layers])
        timed("gate, up 1024 -> 6144", [lambda w=w: _C.linear_joined(x, w) for w in gates])
        timed("down 3072 -> 1024", [lambda m=one: m.mlp.down_proj(inner) for one in layers])
        timed("head 1024 -> 151936", [lambda: _C.linear(x, model.model.embed_tokens.weight)] * 4)
        timed("add_rms_norm", [lambda: _C.add_rms_norm(x, x, layer.input_layernorm.weight, 1e-6)] * 50)
        timed("swiglu", [lambda: _C.swiglu(_C.cat([inner, inner], 1))] * 20)
        places = xt.full((batch,), 100, dtype=xt.int64, device="cuda")
        q, k = (xt.randn(batch, 1, n, 128, device="cuda").to(xt.bfloat16) for n in (16, 8))
        a, b = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
        timed("qk_norm_rope", [lambda: _C.qk_norm_rope(q, k, a, b, 1e-6, 1e6, places)] * 50)

        def attends(at: int) -> None:
            there = xt.full((batch,), at, dtype=xt.int64, device="cuda")
            kept = [
                [xt.zeros(batch, 8, at + 60, 128, dtype=xt.bfloat16, device="cuda") for _ in range(2)] for _ in range(8)
            ]
            new = xt.randn(batch, 8, 1, 128, device="cuda").to(xt.bfloat16)
            heads = q.transpose(1, 2)
            timed(
                f"cached_attention at {at}", [lambda c=c: _C.cached_attention(heads, new, new, *c, there) for c in kept]
            )

        for at in (100, 500, 4000):
            attends(at)
        logits = (xt.randn(batch, config.vocab_size, device="cuda") * 3).to(xt.bfloat16)
        random = xt.tensor([1, 2], device="cuda")
        for option in ({"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}):
            timed(f"sample {option}", [lambda o=option: _C.sample(logits, random, **o)] * 10)

    parts(1)
    parts(16)
    made: list[steps.Steps] = []

    class Seen(steps.Steps):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    xt.generation.sampling.Steps = Seen  # type: ignore[attr-defined]
    generate(model, np.zeros((1, 32), np.int64), 24, capture=True, temperature=0.0, eos=())
    graph = made[0]._graph
    print(f"a step of batch 1: {'eager' if graph is None else graph.launches} launches, captured {made[0].captured}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--skip-theirs", action="store_true", help="1 to 5 alone")
    parser.add_argument("--only-theirs", action="store_true", help="6 alone")
    parser.add_argument("--their-tokens", type=int, default=64, help="of a call of transformers")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which 6 starts no second call")
    parser.add_argument("--static", action="store_true", help="transformers with a static cache, which it compiles")
    args = parser.parse_args()
    print(xt.cuda.get_device_name())
    start = time.perf_counter()
    parts = [] if args.only_theirs else [attention, sampling, tokens, partial(speed, args.tokens)]
    if not args.skip_theirs:
        sizes = args.tokens, args.their_tokens, args.limit
        parts.append(partial(beside_transformers, SHAPE, "cuda", *sizes, args.static))
    for part in parts:
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            wrong(f"{getattr(part, '__name__', 'speeds')}: {type(error).__name__}: {error}")
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
    print("WRONG: " + "; ".join(WRONG[:5]) if WRONG else "all right")
    sys.exit(bool(WRONG))


if __name__ == "__main__":
    main()
