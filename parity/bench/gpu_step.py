"""Training steps on one GPU: xtrain, PyTorch eager and torch.compile, on the same model, data and device, in turns.

    python parity/bench/gpu_step.py [--configs seed16,seed32] [--precisions float32,tf32] [--contenders xtrain,eager,compile]
                                    [--rounds 7] [--seconds 0.3] [--looped] [--graph] [--json FILE] [--commit NAME]

A step is forward, backward, clipping and AdamW on random tokens that lie on the device. Contenders take turns, `rounds` bursts of at least
`seconds` seconds and 3 steps each; a burst is timed from an idle device to an idle device. Printed: medians of tokens per second, the ratio
to the last contender of PyTorch, memory and its ratio, and xtrain's kernel launches, waits and copies per step.

`xtrain` is a step without a graph, `captured` one by xt.cuda.graph, `captured-cheap` the same with model.recompute = "cheap"; `compile` is
torch.compile with cuDNN's attention where the head dim is 64 or more; `graphs` is the same with mode="reduce-overhead". `--looped` adds the
naive way, one sequence after the other. `--graph` adds `captured`, and the looped one likewise. float32 is strict, tf32 lets both sides round
operands of products, bfloat16 is 16-bit parameters with float32 masters and moments here and autocast there. PyTorch's model has its query,
key and value projections and its gate and up projections fused into one matrix each, which is its faster form.

peak_GiB: the most bytes of a step that are allocated at once, of this contender alone; none for `graphs`, since PyTorch does not count what
lies in the pool of its graphs. reserved_GiB: what a step takes from the driver when all that was kept for later has been given back, in the
caching allocator there and the pool here; fragments count. Each contender is measured before the next one is made. The first one of a library
has the workspaces that the others share. Contenders stay in memory together: with 0.6 B parameters, `captured` and `captured-cheap` do not fit
beside `compile` on an H200, and take a run each.
launches: kernels and copies that the host launches in a step, a product as one. nodes: those inside the graph of a captured step.
call_us: the time in which the call of a step returns from an idle device, the median of 9. (In records up to 70e4186, host_us is that of three
calls one after the other, so it contains waits for room in the device's queue; a step of more than about 1,000 launches does here, too.)

`--json` appends a line of JSON a row to FILE, with the command, the device and the commit (git's, or NAME), for report.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import xtrain as xt
from xtrain import _C
from xtrain.models import GPT2, GPT2Config, Qwen2, Qwen2Config, Qwen3, Qwen3Config

# name: (batch, length, config); the 67 M model that the looped and the batched trainer of the early documents had
SHAPE = dict(
    vocab_size=50257, hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, head_dim=32, tie_word_embeddings=False, rope_theta=1e6, max_position_embeddings=256,
)  # fmt: skip
QWEN = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=32768,
)  # fmt: skip
SMALL = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=8, head_dim=32, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=256,
)  # fmt: skip
GPT2_SMALL = dict(
    family="GPT2", vocab_size=50257, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "tiny": (2, 64, SHAPE | dict(num_hidden_layers=2)),
    "5M": (8, 256, SMALL),
    "seed16": (16, 256, SHAPE),
    "seed32": (32, 256, SHAPE),
    "124M": (64, 1024, SHAPE | dict(hidden_size=768, intermediate_size=2048, head_dim=64, tie_word_embeddings=True)),
    "0.6B-1k": (32, 1024, QWEN),
    "0.6B-4k": (8, 4096, QWEN),
    "0.6B-16k": (2, 16384, QWEN),
    "0.6B-32k": (1, 32768, QWEN),
    "qwen2.5-0.5B": (
        32,
        1024,
        dict(
            family="Qwen2",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            rope_theta=1e6,
            max_position_embeddings=32768,
        ),
    ),
    "gpt2": (64, 1024, GPT2_SMALL),
    "gpt2-padded": (64, 1024, GPT2_SMALL | dict(vocab_size=50304)),  # as users pad it
    "wide": (
        4,
        2048,
        QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=6, num_attention_heads=32),
    ),
}


PEERS = ("eager", "compile", "graphs")
SDPA = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


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
        qwen2 = c.get("family") == "Qwen2"  # biases of q, k, v in place of norms of heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q_norm, self.k_norm = (nn.Identity() if qwen2 else Norm(self.dim) for _ in range(2))
        self.qkv = nn.Linear(width, inner + 2 * self.kv_heads * self.dim, bias=qwen2)
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


class Gpt2Block(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, c["intermediate_size"]), nn.Linear(c["intermediate_size"], width)

    def forward(self, x):
        b, s, width = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TorchGpt2(nn.Module):
    """Without dropout."""

    def __init__(self, c: dict, length: int) -> None:
        super().__init__()
        self.embed, self.places = (
            nn.Embedding(c["vocab_size"], c["hidden_size"]),
            nn.Embedding(length, c["hidden_size"]),
        )
        self.blocks = nn.ModuleList(Gpt2Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.head = nn.LayerNorm(c["hidden_size"]), nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(length))

    def forward(self, ids, targets):
        x = self.embed(ids) + self.places(self.positions)
        if torch.is_autocast_enabled():
            x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


class TorchModel(nn.Module):
    def __init__(self, c: dict, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.head = Norm(c["hidden_size"]), nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)
        if c["tie_word_embeddings"]:
            self.head.weight = self.embed.weight
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


def xtrain_model(shape: dict, length: int):  # made on the device: 2 billion random numbers take the host half a minute
    if shape.get("family") == "GPT2":
        names = dict(
            n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads", n_inner="intermediate_size"
        )
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        keys = {name: shape[key] for name, key in names.items()}
        return GPT2(GPT2Config(vocab_size=shape["vocab_size"], n_positions=length, **keys, **dropout), device="cuda")
    if shape.get("family") == "Qwen2":
        return Qwen2(Qwen2Config(**{k: v for k, v in shape.items() if k not in ("family", "head_dim")}), device="cuda")
    return Qwen3(Qwen3Config(**shape), device="cuda")


def release() -> None:
    """Both libraries give back what they keep for later."""
    gc.collect()
    xt.cuda.empty_cache()
    torch.cuda.empty_cache()


class Team:
    """A contender: `step` queues a step, `wait` waits for the device."""

    def run(self, steps: int) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - begun) / steps

    def call(self) -> float:
        """Seconds in which the call of a step returns, from an idle device."""
        times = []
        for _ in range(9):
            self.wait()
            begun = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begun)
        self.wait()
        return statistics.median(times)


class Xtrain(Team):
    wait = staticmethod(xt.cuda.synchronize)

    def __init__(
        self, name: str, bf16: bool, looped: bool = False, captured: bool = False, recompute: str = "none"
    ) -> None:
        batch, length, shape = CONFIGS[name]
        self.model = xtrain_model(shape, length)
        self.model.recompute = recompute
        if bf16:
            self.model.bfloat16()
        self.optimizer = xt.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        ids, targets = random_tokens(batch, length, shape["vocab_size"])
        rows = [slice(i, i + 1) for i in range(batch)] if looped else [slice(0, batch)]
        self.pieces = [(xt.tensor(ids[r]).to("cuda"), xt.tensor(targets[r]).to("cuda")) for r in rows]
        self.step = xt.cuda.graph(self.eager_step, optimizers=[self.optimizer]) if captured else self.eager_step

    def eager_step(self) -> None:
        for ids, targets in self.pieces:
            loss = self.model.loss(ids, targets)
            if len(self.pieces) > 1:
                loss = loss * (1.0 / len(self.pieces))
            loss.backward()
        xt.optim.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @staticmethod
    def held() -> tuple[int, int]:
        """Bytes of xtrain's pool that are in use, and that it has taken from the driver."""
        found = _C.cuda_counters("cuda")
        return found["pool_used"], found["pool_reserved"]

    def memory(self, before: tuple[int, int]) -> dict[str, float | None]:
        """Of a step, beyond what was held before this contender was made."""
        release()
        xt.cuda.reset_peak_memory_stats()
        self.run(1)
        return in_gib(xt.cuda.max_memory_allocated() - before[0], self.held()[1] - before[1])

    def work(self) -> dict[str, int]:
        self.run(1)
        before = xt.cuda.counters()
        self.step()
        after = xt.cuda.counters()
        return {name: after[name] - before[name] for name in after}


class Torch(Team):
    wait = staticmethod(torch.cuda.synchronize)

    def __init__(self, name: str, bf16: bool, mode: str | None) -> None:
        batch, length, shape = CONFIGS[name]
        self.bf16, self.graphs = bf16, mode == "reduce-overhead"
        with torch.device("cuda"):
            self.model = (TorchGpt2 if shape.get("family") == "GPT2" else TorchModel)(shape, length)
        self.loss = torch.compile(self.model, mode=mode) if mode else self.model
        cudnn = mode and bf16 and shape["head_dim"] >= 64
        self.attention = [SDPBackend.CUDNN_ATTENTION] if cudnn else list(SDPA)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.ids, self.targets = (torch.from_numpy(a).cuda() for a in random_tokens(batch, length, shape["vocab_size"]))

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16), sdpa_kernel(self.attention):
            loss = self.loss(self.ids, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @staticmethod
    def held() -> tuple[int, int]:
        """The same of PyTorch's allocator."""
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def memory(self, before: tuple[int, int]) -> dict[str, float | None]:
        release()
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        peak = None if self.graphs else torch.cuda.max_memory_allocated() - before[0]
        return in_gib(peak, torch.cuda.max_memory_reserved() - before[1])


def in_gib(peak: int | None, reserved: int) -> dict[str, float | None]:
    return dict(peak_GiB=None if peak is None else round(peak / 2**30, 2), reserved_GiB=round(reserved / 2**30, 2))


def measure(name: str, precision: str, contenders: list[str], rounds: int, seconds: float) -> list[dict]:
    torch.compiler.reset()  # sizes that differ from those of a config before would be compiled as variables
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    xt.set_float32_matmul_precision("high" if tf32 else "highest")
    bf16 = precision == "bfloat16"
    make = {
        "xtrain": lambda: Xtrain(name, bf16),
        "captured": lambda: Xtrain(name, bf16, captured=True),
        "captured-cheap": lambda: Xtrain(name, bf16, captured=True, recompute="cheap"),
        "looped": lambda: Xtrain(name, bf16, looped=True),
        "looped-captured": lambda: Xtrain(name, bf16, looped=True, captured=True),
        "eager": lambda: Torch(name, bf16, None),
        "compile": lambda: Torch(name, bf16, "default"),
        "graphs": lambda: Torch(name, bf16, "reduce-overhead"),
    }
    batch, length, _ = CONFIGS[name]
    rows = []
    teams = {}
    steps = {}
    for contender in contenders:
        release()
        before = (Torch if contender in PEERS else Xtrain).held()
        team = make[contender]()
        begun = time.perf_counter()
        team.run(1)
        first = time.perf_counter() - begun
        team.run(3)
        teams[contender] = team
        steps[contender] = max(3, round(seconds / team.run(3)))
        row = dict(config=name, precision=precision, contender=contender, first_step_s=round(first, 2))
        rows.append(row | team.memory(before))
    for team in teams.values():  # they have given memory back since their last step
        team.run(1)
    times = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, team in teams.items():
            times[contender].append(team.run(steps[contender]))
    for row in rows:
        team = teams[row["contender"]]
        median = statistics.median(times[row["contender"]])
        row.update(ms=round(median * 1e3, 3), tokens_per_second=round(batch * length / median))
        row.update(spread=round((max(times[row["contender"]]) - min(times[row["contender"]])) / median, 3))
        row.update(call_us=round(team.call() * 1e6))
        if isinstance(team, Xtrain):
            row.update(per_step=team.work())
            if hasattr(team.step, "launches"):
                row.update(nodes=team.step.launches)
    return rows


def gib(row: dict) -> tuple[float, str]:
    """What is allocated at once, else what is reserved; and that word."""
    return (row["reserved_GiB"], "reserved") if row["peak_GiB"] is None else (row["peak_GiB"], "at once")


def line(row: dict, peer: dict | None) -> str:
    """A row for people."""
    ratio = memory = ""
    own, what = gib(row)
    if peer:
        ratio = f"{row['tokens_per_second'] / peer['tokens_per_second']:6.3f}x {peer['contender']}"
        key = "peak_GiB" if None not in (row["peak_GiB"], peer["peak_GiB"]) else "reserved_GiB"
        memory = f"{row[key] / peer[key]:.3f}x {key.partition('_')[0]}"
    return (
        f"{row['config']:8}{row['precision']:9}{row['contender']:16}{row['ms']:9.2f} ms {row['tokens_per_second']:>10,} tokens/s {ratio} "
        f"{own:6.2f} GiB {what} ({row['reserved_GiB']:.2f} reserved) {memory}  first step {row['first_step_s']} s  "
        f"call {row['call_us']} us  nodes {row.get('nodes', '-')}  {row.get('per_step', '')}"
    )


def commit() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="seed16,seed32")
    parser.add_argument("--precisions", default="float32,tf32")
    parser.add_argument("--contenders", default="xtrain,eager,compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--looped", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--commit", help="default: git's")
    args = parser.parse_args()
    contenders = args.contenders.split(",") + (["looped"] if args.looped else [])
    if args.graph:
        contenders += [
            f"{name}-captured".removeprefix("xtrain-") for name in contenders if name in ("xtrain", "looped")
        ]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, xtrain {xt.__version__}", flush=True)
    for name in args.configs.split(","):
        for precision in args.precisions.split(","):
            found = measure(name, precision, contenders, args.rounds, args.seconds)
            peer = next((row for row in reversed(found) if row["contender"] in PEERS), None)
            for row in found:
                print(line(row, peer), flush=True)
            release()
            if args.json:
                how = f"--contenders {','.join(contenders)} --rounds {args.rounds} --seconds {args.seconds:g}"
                record(args.json, found, args.commit or commit(), f"--configs {name} --precisions {precision} {how}")


def record(path: str, rows: list[dict], at: str, flags: str) -> None:
    """Appends rows to a file of JSON lines."""
    same = dict(commit=at, device=torch.cuda.get_device_name(), torch=torch.__version__, command=f"gpu_step.py {flags}")
    with open(path, "a") as file:
        for row in rows:
            file.write(json.dumps({**row, **same}) + "\n")


if __name__ == "__main__":
    main()
