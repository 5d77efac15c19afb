"""What several GPUs should reach, computed from what one and two were measured to: docs/reference/scaling.md.

    python parity/bench/scaling_model.py

Each rank computes; between hosts its gradients, which become ready bucket by bucket in the last two thirds, leave while
others are made; on one host they leave behind the backward. The parameters return bucket by bucket behind the
optimizer. An exchange goes from each rank to each other one, as xtrain's do ("direct"); "two levels", inside the hosts
first, is not built. Times are milliseconds, sizes bytes.
"""

import math
from dataclasses import dataclass

NVLINK = 350e6  # bytes a ms and GPU: 340 measured on four H200, 349-362 published for eight H100
NIC = 45e6  # 400 Gb/s: 46-49 published
HOST = 8  # GPUs of a host
SLOW = 0.005  # standard deviation of a rank's step, of its mean: assumed
BUCKET = 128e6  # bytes of 64 Mi bfloat16 values


@dataclass(frozen=True)
class Model:
    """parameters; ms of a step on one GPU; what is known of that."""

    name: str
    parameters: float
    step: float
    kind: str


def wire(size: float, ranks: int, levels: int = 1) -> tuple[float, float]:
    """ms on NVLink and on the NIC of an exchange (all-to-all or all-gather) of `size` bytes a rank. One level: each
    rank sends a piece to each other one. Two: inside the hosts, then of one piece in HOST between GPUs of the same
    number.
    """
    inside = min(ranks, HOST)
    hosts = ranks // inside
    if levels == 1:
        return (inside - 1) / ranks * size / NVLINK, (ranks - inside) / ranks * size / NIC
    return (inside - 1) / inside * size / NVLINK, (hosts - 1) / hosts * size / inside / NIC


def pipeline(ready: list[float], each: list[float]) -> float:
    """When the last bucket is through, each ready at its time, through links that take each[i] for a bucket in turn."""
    ends = [0.0] * len(each)
    for at in ready:
        for i, cost in enumerate(each):
            at = ends[i] = max(at, ends[i]) + cost
    return ends[-1]


def straggle(ranks: int, share: float = SLOW) -> float:
    """How much longer the slowest of `ranks` takes, as a share: the mean of the largest of normal deviates."""
    return share * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def ours(model: Model, ranks: int, leaves_each: int = 1, levels: int = 1) -> tuple[float, float]:
    """(a step in ms with gradients that leave in the backward, and without)."""
    if ranks == 1:
        return model.step, model.step
    width = 2 if leaves_each == 1 else 4  # sums of several leaves are float32
    count = max(2, round(2 * model.parameters / BUCKET))
    compute = model.step * (1 + straggle(ranks))
    sent, back = (wire(bytes_ * model.parameters, ranks, levels) for bytes_ in (width, 2))
    ready = [compute / 3 + 2 * compute / 3 * (i + 1) / count for i in range(count)]
    summed = pipeline(ready, [cost / count for cost in sent])
    home = pipeline([0.0] * count, [cost / count for cost in back])
    return summed + home, compute + pipeline([0.0] * count, [cost / count for cost in sent]) + home


def ddp(step: float, parameters: float, ranks: int, overhead: float, last: float) -> float:
    """DDP with torch.compile: float32 gradients by a ring, all hidden but those of the last bucket; `overhead` is the
    share by which splitting the graph at buckets, and kernels that share the GPU with NCCL, slow the computing down.
    """
    bus = {2: 288e6, 4: 340e6}[ranks]  # measured
    count = max(2, round(4 * parameters / 25e6))
    compute = step * (1 + overhead)
    cost = 2 * (ranks - 1) / ranks * 4 * (parameters - last) / bus / count
    ready = [compute / 3 + 2 * compute / 3 * (i + 1) / count for i in range(count)]
    return pipeline(ready, [cost]) + 2 * (ranks - 1) / ranks * 4 * last / bus


# (name, tokens a GPU, parameters, of these in the last bucket, tok/s of one GPU, GPUs, tok/s of all): PEERS, 2026-11-22
MEASURED = [
    ("gpt2 B64", 65536, 124e6, 38.6e6, 545066, 2, 1011385),
    ("q06 B8", 32768, 596e6, 155.6e6, 90700, 2, 170929),
    ("gpt2 B64", 65536, 124e6, 38.6e6, 545066, 4, 2036000),
]
# (name, parameters, ms of one GPU, GPUs, ms): xtrain on four H200, docs/worklog/ranks.md
OURS = [
    ("0.6 B, 8 x 4096", 0.596e9, 303.58, 2, 309.45),
    ("0.6 B, 8 x 4096", 0.596e9, 303.58, 4, 321.01),
    ("124 M, 64 x 1024", 0.124e9, 103.28, 2, 104.48),
    ("124 M, 64 x 1024", 0.124e9, 103.28, 4, 107.86),
    ("67 M, 32 x 256", 0.067e9, 7.157, 2, 7.780),
    ("67 M, 32 x 256", 0.067e9, 7.157, 4, 7.920),
]
OVERHEAD = 0.0733  # fitted to the first row alone; the others are predicted

MODELS = [
    Model("0.6 B", 0.596e9, 249.71, "measured"),  # 32 x 1024 tokens, one H200
    Model("1.7 B", 1.72e9, 6 * 1.72e9 * 32768 / (989.4e9 * 0.45), "computed, 45 % MFU"),
    Model("8 B", 8.19e9, 6 * 8.19e9 * 16384 / (989.4e9 * 0.45), "computed, 45 % MFU"),
]


def check() -> list[tuple[str, int, float, float]]:
    """(name, GPUs, measured ms, computed ms)."""
    return [
        (name, ranks, ranks * tokens / total * 1e3, ddp(tokens / alone * 1e3, parameters, ranks, OVERHEAD, last))
        for name, tokens, parameters, last, alone, ranks, total in MEASURED
    ]


def check_ours() -> list[tuple[str, int, float, float]]:
    """The same of xtrain on one host."""
    return [
        (name, ranks, found, ours(Model(name, parameters, alone, ""), ranks)[1])
        for name, parameters, alone, ranks, found in OURS
    ]


def main() -> None:
    print("DDP + torch.compile, then xtrain")
    print("                         GPUs  measured ms  computed ms   off")
    for name, ranks, found, computed in [*check(), *check_ours()]:
        print(f"{name:24} {ranks:4}  {found:11.1f}  {computed:11.1f}  {computed / found - 1:+.1%}")
        assert abs(computed / found - 1) < 0.05, name
    print(
        "\nxtrain, weak scaling     GPUs  exchanges   a step, ms  NVLink ms     NIC ms  efficiency  all behind the backward"
    )
    for model in MODELS:
        for ranks, levels in ((1, 1), (8, 1), (64, 1), (64, 2), (1000, 1), (1000, 2)):
            step, plain = ours(model, ranks, levels=levels)
            step = plain if ranks <= HOST else step
            links = [2 * each for each in wire(2 * model.parameters, ranks, levels)]
            print(
                f"{model.name + ', ' + model.kind:24} {ranks:4}  {('direct', 'two levels')[levels - 1]:10}  {step:10.1f}  "
                f"{links[0]:9.1f}  {links[1]:9.1f}  {model.step / step:10.1%}  {model.step / plain:15.1%}"
            )


if __name__ == "__main__":
    main()
