"""`xtrain bench attention`: forward and backward of every implementation, beside PyTorch's.

A shape is B x H x K x S x D: batch, query heads, key heads, tokens, head dim; causal unless `:full` follows. q, k and v
lie in memory as [B, S, heads, D], as a projection leaves them. A forward has 4 B H S S D operations and a backward 2.5
times as many, half of that when causal. A sample of out and of dq is compared with float64.

PyTorch gets views [B, heads, S, D] of the same memory, as a model makes them. `--peer cudnn` and `--peer flash` let it
choose nothing but that backend. On a GPU, calls take their inputs in turn from sets that are larger than the L2 cache
together, so that none finds its own there. A call that the host queues more slowly than the device computes is named
below the table; `--kernels` measures what the kernels take, without the host.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _C
from ..errors import ConfigError, nearest
from . import accelerator, explain, frame, peers

DTYPES = ("float32", "bfloat16", "float16", "float64")
CUDA_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
SLOW = 2e9  # operations above which the reference runs only when it is asked for
SLOW_ON_CUDA = 5e11
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-10, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SAMPLED = 8  # rows of one head
PEERS = {"default": "", "cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}  # PyTorch's names of backends
ROTATED = 192 << 20  # bytes of inputs on a GPU: above three times the L2 cache of an H200
MOST_SETS = 64  # of inputs; each keeps the graph of a backward
HOST_SHARE = 0.8  # of a call's time that its queueing takes, from which on the host may be its limit
TRACED_CALLS = 16  # of a turn of --kernels


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
Sets = list[list[Any]]  # of inputs, as `draw` makes them


def draw_sets(shape: Shape, dtype: str, device: str) -> Sets:
    """One on the CPU; on a GPU as many as have ROTATED bytes, and at most MOST_SETS."""
    if not accelerator.on_cuda(device):
        return [draw(shape, dtype, device)]
    width = {"float64": 8, "float32": 4, "tf32": 4}.get(dtype, 2)
    nbytes = 2 * width * shape.batch * shape.tokens * shape.dim * (shape.heads + shape.kv_heads)
    return [draw(shape, dtype, device) for _ in range(min(MOST_SETS, -(-ROTATED // nbytes)))]


def in_turn(sets: Iterable[Any], run: Callable[..., Any]) -> Call:
    """A call that runs on one of the sets after the other."""
    turns = itertools.cycle(sets)
    return lambda: run(*next(turns))


def our_calls(shape: Shape, sets: Sets, backend: str) -> tuple[Call, Call, Any, Any]:
    """(forward, backward, out, dq); the results are of the first set."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return _C.scaled_dot_product_attention(q, k, v, shape.causal, None, True, backend)

    graphs = []
    for tensors in sets:
        leaves = [_C.detach(x).requires_grad_() for x in tensors[:3]]
        graphs.append(([attend(*leaves)], tensors[3:], leaves))
    backward = frame.repeated(graphs, lambda roots, seeds: _C.backward(roots, seeds, True))
    backward()
    (out,), _, leaves = graphs[0]
    return in_turn([tensors[:3] for tensors in sets], attend), backward, _C.detach(out), leaves[0].grad


def torch_calls(torch: Any, shape: Shape, sets: Sets) -> tuple[Call, Call, Any, Any]:
    """As our calls, for PyTorch. Its gradients are returned and not accumulated, so none is added or copied."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)

    def gradients(out: Any, dout: Any, leaves: list[Any]) -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    inputs, graphs = [], []
    for tensors in sets:
        q, k, v, dout = (torch.from_dlpack(x) for x in tensors)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        inputs.append((q, k, v))
        graphs.append((attend(*leaves), dout, leaves))
    dq = gradients(*graphs[0])[0]
    out = _C.from_dlpack(graphs[0][0].detach())
    return in_turn(inputs, attend), in_turn(graphs, gradients), out, _C.from_dlpack(dq.contiguous())


@contextlib.contextmanager
def only(torch: Any, peer: str) -> Iterator[None]:
    """PyTorch's attention has this one backend, or chooses one itself (default)."""
    if torch is None or not PEERS[peer]:
        yield
        return
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, PEERS[peer])):
        yield


def peer_name(peer: str) -> str:
    return "PyTorch" if peer == "default" else f"PyTorch {peer}"


def reason(peer: str, error: Exception, notes: list[str]) -> str:
    """Why PyTorch refuses: what it warns of behind `<backend> attention kernel not used because:`, else the error's
    first line.
    """
    for note, next_ in itertools.pairwise(notes):
        if note.lower().startswith(peer) and "not used because" in note:
            return next_.partition(" (Triggered internally")[0].strip().rstrip(".")
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)


def peer_calls(
    torch: Any, shape: Shape, sets: Sets, peer: str
) -> tuple[tuple[Call, Call, Any, Any] | None, str | None]:
    """(torch_calls, None), or (None, why PyTorch refuses this). The error is raised where no backend is named."""
    if peer == "default":
        return torch_calls(torch, shape, sets), None
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            return torch_calls(torch, shape, sets), None
        except RuntimeError as error:
            return None, reason(peer, error, [str(note.message) for note in notes])


# ---- time ------------------------------------------------------------------------------------------------------------


def queueing(call: Call, wait: Call) -> float:
    """Seconds in which a call returns while the device is idle, or has a few of these before it."""
    times = []
    for _ in range(5):
        wait()
        begun = time.perf_counter()
        for _ in range(4):
            call()
        times.append((time.perf_counter() - begun) / 4)
    wait()
    return statistics.median(times)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def kernel_times(torch: Any, calls: dict[str, Call], wait: Call) -> dict[str, list[float]]:
    """Seconds of kernels per call, one number a turn, by CUPTI through torch.profiler; where two overlap, once."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + frame.TURNS_ON_DEVICE):
        for name, call in calls.items():
            call()
            wait()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
                for _ in range(TRACED_CALLS):
                    call()
                wait()
            events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            if not events:
                raise ConfigError(f"--kernels: torch.profiler has recorded no kernel of {name}")
            if turn:  # the first is a warm-up
                spent = covered((e.time_range.start, e.time_range.end) for e in events)
                times[name].append(spent * 1e-6 / TRACED_CALLS)
    return times


def bench_shape(
    shape: Shape, dtype: str, backends: list[str], device: str, torch: Any, peer: str = "default", kernels: bool = False
) -> list[dict[str, Any]]:
    """One record for every contender and pass."""
    with only(torch, peer):  # around all: entering it takes longer than a small call
        return _bench_shape(shape, dtype, backends, device, torch, peer, kernels)


def _bench_shape(
    shape: Shape, dtype: str, backends: list[str], device: str, torch: Any, peer: str, kernels: bool
) -> list[dict[str, Any]]:
    wait = accelerator.waiter(device, torch)
    sets = draw_sets(shape, dtype, device)
    calls = {name: our_calls(shape, sets, name) for name in backends}
    theirs, refused = (None, None) if torch is None else peer_calls(torch, shape, sets, peer)
    other = peer_name(peer)
    if theirs is not None:
        calls[other] = theirs
    if wait is not None:
        wait()
    errors = {name: worst_error(shape, dtype, sets[0], *found[2:]) for name, found in calls.items()}
    records = []
    for i, pass_ in enumerate(("forward", "backward")):
        of_pass = {name: found[i] for name, found in calls.items()}
        measured = kernel_times(torch, of_pass, wait) if kernels and wait else frame.measure(of_pass, wait)
        times = {name: frame.summary(t) for name, t in measured.items()}
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
                    "x_pytorch": times[other]["ms"] / t["ms"] if other in times else None,
                    "host_ms": queueing(of_pass[name], wait) * 1e3 if wait is not None and not kernels else None,
                    "sets": len(sets),
                    "refused": refused,
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
    "peer": "default",
    "kernels": False,
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
    ratio = f"{record['x_pytorch']:.3f}" if record["x_pytorch"] is not None else ""
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


def method(device: str, kernels: bool) -> str:
    """How numbers are measured, for people."""
    sets = f"inputs in turn from sets of {ROTATED >> 20} MiB together (at most {MOST_SETS} sets)"
    text = frame.method(device, sets) if accelerator.on_cuda(device) else frame.method(device)
    return f"kernels alone, by CUPTI; {text}" if kernels else text


def check_peer(values: dict[str, Any], torch: Any, cuda: bool) -> None:
    """ConfigError for a peer that is none, and for options that need a PyTorch which is not here."""
    peer = values["peer"]
    if peer not in PEERS:
        raise ConfigError(f"--peer must be one of {', '.join(PEERS)}, got {peer!r}{nearest(peer, list(PEERS))}")
    if values["kernels"] and not cuda:
        raise ConfigError(f"--kernels is for a CUDA device, got --device {values['device']}")
    for option, wanted in ((f"--peer {peer}", peer != "default"), ("--kernels", values["kernels"])):
        if wanted and torch is None and not values["explain"]:
            raise ConfigError(f"{option} needs PyTorch{' with CUDA' if cuda else ''}, which is missing here")


def describe_machine(device: str, torch: Any, peer: str) -> dict[str, Any]:
    """The facts of frame.machine, and what PyTorch computes with: its version, the peer, cuDNN's version on a GPU."""
    facts = frame.machine(device)
    facts["torch"] = torch.__version__ if torch is not None else None
    facts["peer"] = peer if torch is not None else None
    if accelerator.on_cuda(device) and torch is not None:
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def measure_all(
    shapes: list[Shape],
    dtypes: list[str],
    backends: list[str],
    explicit: bool,
    device: str,
    torch: Any,
    peer: str,
    kernels: bool,
) -> list[dict[str, Any]]:
    """The records of bench_shape for every dtype and shape; prints the table row by row. explicit: backends were asked
    for by name, so the reference runs above its limit, too.
    """
    cuda = accelerator.on_cuda(device)
    names = [[shape.name for shape in shapes], dtypes, ["backward"], [*backends, peer_name(peer)]]
    header = [title.replace("GFLOP/s", "TFLOP/s") if cuda else title for title in HEADER]
    table = frame.Table(header, [*map(frame.longest, names)], right=range(4, 8))
    records: list[dict[str, Any]] = []
    slow = SLOW_ON_CUDA if cuda else SLOW
    for dtype in dtypes:
        for shape in shapes:
            skip = not explicit and shape.operations(False) > slow
            run = [name for name in backends if not (skip and name == "reference")]
            _C.manual_seed(0)
            with accelerator.precision(dtype == "tf32", torch) if cuda else contextlib.nullcontext():
                for record in bench_shape(shape, dtype, run, device, torch, peer, kernels):
                    table.add(row(record, cuda))
                    records.append(record)
            accelerator.release(device, torch)
    return records


def notes(records: list[dict[str, Any]], shapes: list[Shape], explicit: bool, cuda: bool, peer: str) -> list[str]:
    """The lines below the table: what was left out, what PyTorch refuses, where the host may be the limit."""
    lines = []
    slow = SLOW_ON_CUDA if cuda else SLOW
    if any(shape.operations(False) > slow for shape in shapes) and not explicit:
        lines.append(f"left out: the reference above {slow / 1e9:g} GFLOP; --backends reference,... runs it")
    refused = {(r["shape"], r["dtype"]): r["refused"] for r in records if r["refused"] is not None}
    for (name, dtype), why in refused.items():
        lines.append(f"{peer_name(peer)} is left out of {name}, {dtype}, because PyTorch refuses: {why}")
    for r in records:
        if r["host_ms"] is not None and r["host_ms"] > HOST_SHARE * r["ms"]:
            lines.append(
                f"the host may be the limit: {r['contender']}, {r['shape']} {r['pass']}, {r['dtype']}: queued in "
                f"{r['host_ms']:.4f} ms of {r['ms']:.4f}; --kernels measures without it"
            )
    return lines


def command(values: dict[str, Any]) -> int:
    """Measure and print; 1 when a contender computed something wrong, else 0. --explain: only what is chosen."""
    device = frame.choose_device(values["device"])
    cuda = accelerator.on_cuda(device)
    defaults, known_dtypes = (CUDA_DEFAULTS, CUDA_DTYPES) if cuda else (DEFAULTS, DTYPES)
    explicit = values["backends"] is not None
    known = _C.attention_backends(_C.device(device))
    backends = frame.choose("backends", values["backends"], known, known)
    dtypes = frame.choose("dtypes", values["dtypes"], known_dtypes, defaults["dtypes"].split(","))
    shapes = parse_sizes(defaults["sizes"] if values["sizes"] is None else values["sizes"])
    frame.check_output("json", values["json"])
    frame.check_threads(values["threads"], device)
    torch = None
    if not values["explain"]:
        torch = accelerator.find_torch(peers.find_torch(_C.get_num_threads()), device)
    peer, kernels = values["peer"], values["kernels"]
    check_peer(values, torch, cuda)
    if values["explain"]:
        explain.check_options(values)
        show_choice(shapes, dtypes, device, backends[0] if explicit else None)
        return 0
    facts = describe_machine(device, torch, peer)
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if torch is not None else ", no PyTorch here"))
    print(method(device, kernels))
    state = _C.get_rng_state()
    try:
        records = measure_all(shapes, dtypes, backends, explicit, device, torch, peer, kernels)
    finally:
        _C.set_rng_state(state)
    for line in notes(records, shapes, explicit, cuda, peer):
        print(line)
    bad = [record for record in records if not record["right"]]
    for record in bad:
        print(f"wrong result: {record['contender']}, {record['shape']} {record['pass']}, {record['dtype']}")
    if values["json"] is not None:
        frame.write_json(values["json"], {"machine": facts, "records": records})
        print(f"written: {values['json']}")
    return 1 if bad else 0
