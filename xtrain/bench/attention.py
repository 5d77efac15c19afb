"""`xtrain bench attention`: forward and backward of every implementation, beside PyTorch's.

A shape is B x H x K x S x D: batch, query heads, key heads, tokens, head dim; causal unless `:full` follows. q, k and v
lie in memory as [B, S, heads, D], as a projection leaves them. A forward has 4 B H S S D operations and a backward 2.5
times as many, half of that when causal. A sample of out and of dq is compared with float64.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _C
from ..errors import ConfigError
from . import accelerator, explain, frame, peers

DTYPES = ("float32", "bfloat16", "float16", "float64")
CUDA_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
SLOW = 2e9  # operations above which the reference runs only when it is asked for
SLOW_ON_CUDA = 5e11
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-10, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SAMPLED = 8  # rows of one head


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    causal: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return self.batch, self.heads, self.kv_heads, self.tokens, self.dim

    @property
    def name(self) -> str:
        return "x".join(map(str, self.sizes)) + ("" if self.causal else ":full")

    def operations(self, backward: bool) -> float:
        pairs = self.tokens * self.tokens * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.heads * pairs * self.dim * (2.5 if backward else 1.0)


def parse_sizes(text: str) -> list[Shape]:
    """`2x12x12x512x64,1x8x2x256x128:full` -> shapes."""
    shapes = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})x(\d{1,9})x(\d{1,9})(:full)?", word)
        if match is None:
            raise ConfigError(f"--sizes must be BxHxKxSxD or BxHxKxSxD:full, got {word!r}")
        b, h, kv, s, d = (int(x) for x in match.groups()[:5])
        if not all(1 <= x <= 1 << 20 for x in (b, h, kv, s, d)) or b * h * s * d > 1 << 31 or h % kv:
            raise ConfigError(
                "--sizes must be in [1, 1048576] with at most 2^31 elements a tensor and H a multiple of K, got "
                f"{word!r}"
            )
        shapes.append(Shape(b, h, kv, s, d, match[6] is None))
    if not shapes:
        raise ConfigError(f"--sizes must name at least one size, got {text!r}")
    return shapes


# ---- one shape -------------------------------------------------------------------------------------------------------


def draw(shape: Shape, dtype: str, device: str) -> list[Any]:
    """q, k, v and the upstream gradient [B, heads, S, D]."""
    kind = getattr(_C, "float32" if dtype == "tf32" else dtype)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    rows = [_C.normal((shape.batch, shape.tokens, h, shape.dim), 0.0, 1.0, kind, _C.device(device)) for h in heads]
    return [_C.transpose(x, 1, 2) for x in rows]


def sample(shape: Shape, x: Any, head: int, rows: slice | None = None) -> np.ndarray:
    """One head of the last batch entry as float64 on the host."""
    part = _C.select(_C.select(x, 0, shape.batch - 1), 0, head)
    return accelerator.to_host(part if rows is None else part[rows])


def worst_error(shape: Shape, dtype: str, tensors: list[Any], out: Any, dq: Any) -> tuple[float, float]:
    """Largest error over its tolerance of out and of dq, in the last rows of the last head; not finite is inf.

    Tolerance: a rounding to the format of each result and of each term of its sum (P and dS are stored in it), and what
    sums of D and of S terms in the accumulator do to the scores, which moves P in proportion. TF32 rounds q and k.
    """
    head, kv_head, scale = shape.heads - 1, shape.kv_heads - 1, 1 / math.sqrt(shape.dim)
    last = slice(max(0, shape.tokens - SAMPLED), shape.tokens)
    q, dout = (sample(shape, x, head, last) for x in (tensors[0], tensors[3]))
    k, v = (sample(shape, x, kv_head) for x in tensors[1:3])
    scores = scale * (q @ k.T)
    if shape.causal:
        scores[np.arange(shape.tokens)[None, :] > np.arange(shape.tokens)[last, None]] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dp = dout @ v.T
    want = p @ v, scale * (p * (dp - (p * dp).sum(1, keepdims=True))) @ k

    unit, accumulator = ROUNDOFF[dtype], ROUNDOFF["float64" if dtype == "float64" else "float32"]
    moved = accumulator * (shape.dim + shape.tokens) + (unit if dtype == "tf32" else 0.0)
    relative = moved * (1 + scale * (np.abs(q) @ np.abs(k).T))
    sums = p * (np.abs(dout) @ np.abs(v).T + (np.abs(dout) * (p @ np.abs(v))).sum(1, keepdims=True))
    limits = (
        unit * np.abs(want[0]) + (p * (unit + relative)) @ np.abs(v),
        unit * np.abs(want[1]) + scale * (sums * (2 * unit + 2 * relative)) @ np.abs(k),
    )
    errors = []
    for exact, limit, x in zip(want, limits, (out, dq)):
        error = (np.abs(sample(shape, x, head, last) - exact) / (limit + 1e-300)).max()
        errors.append(float(error) if np.isfinite(error) else math.inf)
    return errors[0], errors[1]


Call = Callable[[], Any]


def our_calls(shape: Shape, tensors: list[Any], backend: str) -> tuple[Call, Call, Any, Any]:
    """(forward, backward, out, dq)"""
    leaves = [_C.detach(x).requires_grad_() for x in tensors[:3]]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return _C.scaled_dot_product_attention(q, k, v, shape.causal, None, True, backend)

    out = attend(*leaves)
    backward = frame.repeated([([out], tensors[3:], leaves)], lambda roots, seeds: _C.backward(roots, seeds, True))
    backward()
    return lambda: attend(*tensors[:3]), backward, _C.detach(out), leaves[0].grad


def torch_calls(torch: Any, shape: Shape, tensors: list[Any]) -> tuple[Call, Call, Any, Any]:
    theirs = [torch.from_dlpack(x) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in theirs[:3]]

    def attend(q: Any, k: Any, v: Any) -> Any:
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)

    def forward() -> Any:
        with torch.no_grad():
            return attend(*theirs[:3])

    out = attend(*leaves)
    backward = frame.repeated(
        [([out], theirs[3:], leaves)],
        lambda roots, seeds: torch.autograd.backward(roots, seeds, retain_graph=True),
    )
    backward()
    return forward, backward, _C.from_dlpack(out.detach()), _C.from_dlpack(leaves[0].grad.contiguous())


def bench_shape(shape: Shape, dtype: str, backends: list[str], device: str, torch: Any) -> list[dict[str, Any]]:
    """One record for every contender and pass."""
    wait = accelerator.waiter(device, torch)
    tensors = draw(shape, dtype, device)
    calls = {name: our_calls(shape, tensors, name) for name in backends}
    if torch is not None:
        calls["PyTorch"] = torch_calls(torch, shape, tensors)
    if wait is not None:
        wait()
    errors = {name: worst_error(shape, dtype, tensors, *found[2:]) for name, found in calls.items()}
    records = []
    for i, pass_ in enumerate(("forward", "backward")):
        times = {name: frame.summary(t) for name, t in frame.measure({n: c[i] for n, c in calls.items()}, wait).items()}
        best = min(t["ms"] for t in times.values())
        for name, t in times.items():
            error = errors[name][i]
            records.append(
                {
                    "shape": shape.name,
                    "dtype": dtype,
                    "pass": pass_,
                    "contender": name,
                    **t,
                    "gflops": shape.operations(i == 1) / (t["ms"] * 1e6),
                    "percent_of_best": 100 * (best / t["ms"]),
                    "x_pytorch": times["PyTorch"]["ms"] / t["ms"] if "PyTorch" in times else None,
                    "error_over_tolerance": error if math.isfinite(error) else None,
                    "right": error <= 1,
                }
            )
    return records


# ---- the command -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "sizes": None,
    "dtypes": None,
    "backends": None,
    "device": "cpu",
    "threads": 0,
    "json": None,
    "explain": False,
}
DEFAULTS = {"sizes": "1x4x4x256x64,2x12x12x512x64", "dtypes": "float32,bfloat16"}
CUDA_DEFAULTS = {"sizes": "8x12x12x1024x64,4x16x8x2048x128,1x32x8x8192x128", "dtypes": "float32,tf32,bfloat16"}
HEADER = ("shape B x H x K x S x D", "dtype", "pass", "contender", "ms", "GFLOP/s", "% of best", "x PyTorch")


def row(record: dict[str, Any], cuda: bool) -> list[str]:
    name = record["contender"] + ("" if record["right"] else " WRONG")
    speed = f"{record['gflops'] / 1e3:.2f}" if cuda else f"{record['gflops']:.1f}"
    ratio = f"{record['x_pytorch']:.2f}" if record["x_pytorch"] is not None else ""
    time = f"{record['ms']:.4f}" if cuda else f"{record['ms']:.3f}"
    return [
        record["shape"],
        record["dtype"],
        record["pass"],
        name,
        time,
        speed,
        f"{record['percent_of_best']:.0f}",
        ratio,
    ]


def show_choice(shapes: list[Shape], dtypes: list[str], device: str, backend: str | None) -> None:
    for dtype in dtypes:
        for shape in shapes:
            for backward in (False, True):
                rows = explain.of_attention(shape.sizes, dtype, backward, device, backend)
                problem = f"{shape.name} {dtype} {'backward' if backward else 'forward'} on {device}"
                print("\n".join(explain.lines(problem, rows)))


def command(values: dict[str, Any]) -> int:
    """Measure and print; 1 when a contender computed something wrong, else 0. --explain: only what is chosen."""
    device = frame.choose_device(values["device"])
    cuda = accelerator.on_cuda(device)
    defaults, known_dtypes = (CUDA_DEFAULTS, CUDA_DTYPES) if cuda else (DEFAULTS, DTYPES)
    known = _C.attention_backends(_C.device(device))
    backends = frame.choose("backends", values["backends"], known, known)
    dtypes = frame.choose("dtypes", values["dtypes"], known_dtypes, defaults["dtypes"].split(","))
    shapes = parse_sizes(defaults["sizes"] if values["sizes"] is None else values["sizes"])
    frame.check_output("json", values["json"])
    frame.check_threads(values["threads"], device)
    if values["explain"]:
        explain.check_options(values)
        show_choice(shapes, dtypes, device, None if values["backends"] is None else backends[0])
        return 0
    torch = accelerator.find_torch(peers.find_torch(_C.get_num_threads()), device)
    facts = frame.machine(device)
    facts["torch"] = torch.__version__ if torch is not None else None
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if torch is not None else ", no PyTorch here"))
    print(frame.method(device))
    names = [[shape.name for shape in shapes], dtypes, ["backward"], [*backends, "PyTorch"]]
    header = [title.replace("GFLOP/s", "TFLOP/s") if cuda else title for title in HEADER]
    table = frame.Table(header, [*map(frame.longest, names)], right=range(4, 8))
    records: list[dict[str, Any]] = []
    slow = SLOW_ON_CUDA if cuda else SLOW
    state = _C.get_rng_state()
    try:
        for dtype in dtypes:
            for shape in shapes:
                skip = values["backends"] is None and shape.operations(False) > slow
                run = [name for name in backends if not (skip and name == "reference")]
                _C.manual_seed(0)
                with accelerator.precision(dtype == "tf32", torch) if cuda else contextlib.nullcontext():
                    for record in bench_shape(shape, dtype, run, device, torch):
                        table.add(row(record, cuda))
                        records.append(record)
                accelerator.release(device, torch)
    finally:
        _C.set_rng_state(state)
    if any(shape.operations(False) > slow for shape in shapes) and values["backends"] is None:
        print(f"left out: the reference above {slow / 1e9:g} GFLOP; --backends reference,... runs it")
    bad = [record for record in records if not record["right"]]
    for record in bad:
        print(f"wrong result: {record['contender']}, {record['shape']} {record['pass']}, {record['dtype']}")
    if values["json"] is not None:
        frame.write_json(values["json"], {"machine": facts, "records": records})
        print(f"written: {values['json']}")
    return 1 if bad else 0
