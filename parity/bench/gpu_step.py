"""Training steps on one GPU: xtrain, PyTorch eager and torch.compile, on the same model, data and device, in turns.

    python parity/bench/gpu_step.py [--configs seed16,seed32] [--precisions float32,tf32] [--contenders xtrain,eager,compile]
                                    [--rounds 7] [--steps 20] [--looped] [--json FILE]

A step is forward, backward, clipping and AdamW on random tokens that lie on the device. Contenders take turns, `rounds` bursts of `steps`
steps each; a burst is timed from an idle device to an idle device. Printed: medians of tokens per second, the ratio to PyTorch eager, the
most device memory in use, and xtrain's kernel launches, waits and copies per step. `--looped` adds the naive way, one sequence after the
other. float32 is strict, tf32 lets both sides round operands of products, bfloat16 is 16-bit parameters with float32 masters and moments here
and autocast there. PyTorch's model has its query, key and value projections and its gate and up projections fused into one matrix each, which is its
faster form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import xtrain as xt
from xtrain.models import Qwen3, Qwen3Config

# name: (batch, length, config); the 67 M model that the looped and the batched trainer of the early documents had
SHAPE = dict(
    vocab_size=50257, hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, head_dim=32, tie_word_embeddings=False, rope_theta=1e6, max_position_embeddings=256,
)  # fmt: skip
CONFIGS = {"seed16": (16, 256, SHAPE), "seed32": (32, 256, SHAPE), "tiny": (2, 64, SHAPE | dict(num_hidden_layers=2))}


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-6)


class Block(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, inner = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.norm1, self.norm2, self.q_norm, self.k_norm = Norm(width), Norm(width), Norm(self.dim), Norm(self.dim)
        self.qkv = nn.Linear(width, inner + 2 * self.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * c["intermediate_size"], bias=False)
        self.down = nn.Linear(c["intermediate_size"], width, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        sizes = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.view(b, s, -1, self.dim) for t in self.qkv(self.norm1(x)).split(sizes, -1))
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    @staticmethod
    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class TorchModel(nn.Module):
    def __init__(self, c: dict, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.head = Norm(c["hidden_size"]), nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)
        half = torch.arange(0, c["head_dim"], 2) / c["head_dim"]
        angle = torch.outer(torch.arange(length).float(), c["rope_theta"] ** -half)[None, :, None]
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, targets):
        x, cos, sin = self.embed(ids), self.cos, self.sin
        if torch.is_autocast_enabled():
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def random_tokens(batch: int, length: int, vocab: int):
    block = np.random.default_rng(0).integers(0, vocab, (batch, length + 1))
    return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])


class Xtrain:
    def __init__(self, name: str, bf16: bool, looped: bool = False) -> None:
        batch, length, shape = CONFIGS[name]
        config = Qwen3Config(**shape)
        self.model = Qwen3(config).to("cuda")
        if bf16:
            self.model.bfloat16()
        self.optimizer = xt.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        ids, targets = random_tokens(batch, length, config.vocab_size)
        rows = [slice(i, i + 1) for i in range(batch)] if looped else [slice(0, batch)]
        self.pieces = [(xt.tensor(ids[r]).to("cuda"), xt.tensor(targets[r]).to("cuda")) for r in rows]

    def step(self) -> None:
        for ids, targets in self.pieces:
            loss = self.model.loss(ids, targets)
            if len(self.pieces) > 1:
                loss = loss * (1.0 / len(self.pieces))
            loss.backward()
        xt.optim.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> float:
        xt.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        xt.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    def memory(self) -> float:
        xt.cuda.reset_peak_memory_stats()
        self.run(1)
        return xt.cuda.max_memory_allocated() / 2**30

    def work(self) -> dict[str, int]:
        self.run(1)
        before = xt.cuda.counters()
        self.step()
        after = xt.cuda.counters()
        return {name: after[name] - before[name] for name in after}


class Torch:
    def __init__(self, name: str, bf16: bool, compiled: bool) -> None:
        batch, length, shape = CONFIGS[name]
        self.bf16 = bf16
        self.model = TorchModel(shape, length).cuda()
        self.loss = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.ids, self.targets = (torch.from_numpy(a).cuda() for a in random_tokens(batch, length, shape["vocab_size"]))

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            loss = self.loss(self.ids, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    def memory(self) -> float:
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        return torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, precision: str, contenders: list[str], rounds: int, steps: int) -> list[dict]:
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    xt.set_float32_matmul_precision("high" if tf32 else "highest")
    bf16 = precision == "bfloat16"
    make = {
        "xtrain": lambda: Xtrain(name, bf16),
        "looped": lambda: Xtrain(name, bf16, looped=True),
        "eager": lambda: Torch(name, bf16, False),
        "compile": lambda: Torch(name, bf16, True),
    }
    batch, length, _ = CONFIGS[name]
    rows = []
    teams = {}
    for contender in contenders:
        team = make[contender]()
        begun = time.perf_counter()
        team.run(1)
        first = time.perf_counter() - begun
        team.run(3)
        teams[contender] = team
        rows.append(dict(config=name, precision=precision, contender=contender, first_step_s=round(first, 2)))
    times = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, team in teams.items():
            times[contender].append(team.run(max(1, steps // 8) if contender == "looped" else steps))
    for row in rows:
        team = teams[row["contender"]]
        median = statistics.median(times[row["contender"]])
        row.update(ms=round(median * 1e3, 3), tokens_per_second=round(batch * length / median))
        row.update(spread=round((max(times[row["contender"]]) - min(times[row["contender"]])) / median, 3))
        row.update(peak_GiB=round(team.memory(), 2))
        if isinstance(team, Xtrain):
            row.update(per_step=team.work())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="seed16,seed32")
    parser.add_argument("--precisions", default="float32,tf32")
    parser.add_argument("--contenders", default="xtrain,eager,compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--looped", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    contenders = args.contenders.split(",") + (["looped"] if args.looped else [])
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, xtrain {xt.__version__}", flush=True)
    rows = []
    for name in args.configs.split(","):
        for precision in args.precisions.split(","):
            found = measure(name, precision, contenders, args.rounds, args.steps)
            eager = next((row["tokens_per_second"] for row in found if row["contender"] == "eager"), None)
            for row in found:
                ratio = f"{row['tokens_per_second'] / eager:6.2f}x eager" if eager else ""
                print(
                    f"{name:8}{precision:9}{row['contender']:9}{row['ms']:9.2f} ms {row['tokens_per_second']:>10,} tokens/s {ratio} "
                    f"{row['peak_GiB']:6.2f} GiB  first step {row['first_step_s']} s  {row.get('per_step', '')}",
                    flush=True,
                )
            rows += found
            torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
