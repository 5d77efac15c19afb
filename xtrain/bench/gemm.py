"""`xtrain bench gemm`: matrix products of every backend beside NumPy's and PyTorch's, on squares and training shapes.

A product is C[M, N] = op(A) op(B) with K terms. The training shapes are those of a 124M model (C = 768, F = 3072,
V = 50257) on 512 tokens: `nt` is the forward X W^T, `nn` the input's gradient dY W, `tn` the weight's gradient dY^T X;
a letter says whether the stored matrix is read as it is (n) or transposed (t).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _C
from ..errors import ConfigError
from . import frame, peers

DTYPES = ("float32", "bfloat16", "float16", "float64")
SLOW = 2.2e9  # operations above which the naive backend runs only when it is asked for: it would take seconds a turn
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    layout: str = "nn"
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k


def training(tokens: int = 512, width: int = 768, hidden: int = 3072, vocabulary: int = 50257) -> list[Shape]:
    """Forward, input's gradient and weight's gradient of the attention output, the wide projection and the head."""
    shapes = []
    for label, inputs, outputs in (("attention", width, width), ("mlp", width, hidden), ("head", width, vocabulary)):
        shapes += [
            Shape(tokens, outputs, inputs, "nt", f"{label} forward"),
            Shape(tokens, inputs, outputs, "nn", f"{label} dX"),
            Shape(outputs, inputs, tokens, "tn", f"{label} dW"),
        ]
    return shapes


GROUPS: dict[str, Callable[[], list[Shape]]] = {
    "squares": lambda: [Shape(n, n, n, label="square") for n in (64, 256, 1024)],
    "training": lambda: training()[:6],
    "head": lambda: training()[6:],
}


def parse_sizes(text: str) -> list[Shape]:
    """`squares,training,head,512,65x33x97,512x768x3072:nt` -> shapes; a number is a square, else MxNxK:layout."""
    shapes = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        if word in GROUPS:
            shapes += GROUPS[word]()
            continue
        match = re.fullmatch(r"(\d{1,7})(?:x(\d{1,7})x(\d{1,7}))?(?::([nt]{2}))?", word)
        if match is None:
            raise ConfigError(
                f"--sizes must be some of {', '.join(GROUPS)}, N, MxNxK or MxNxK:nt (layouts nn, nt, tn, tt), got "
                f"{word!r}"
            )
        m, n, k = (int(x or match[1]) for x in match.groups()[:3])
        if not all(1 <= x <= 1 << 20 for x in (m, n, k)) or m * n + n * k + m * k > 1 << 31:
            raise ConfigError(f"--sizes must be in [1, 1048576] with at most 2^31 elements in all, got {word!r}")
        shapes.append(Shape(m, n, k, match[4] or "nn"))
    if not shapes:
        raise ConfigError(f"--sizes must name at least one size, got {text!r}")
    return shapes


# ---- one shape -------------------------------------------------------------------------------------------------------


def operands(shape: Shape, dtype: str, seed: int = 0) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Normal random A and B as tensors of `dtype` and as arrays of the same values, stored as the layout says.

    All four are views of M x K and K x N whose memory is transposed where the layout has a t. The arrays are float64
    for float64, else float32, which holds every value of the lower formats.
    """
    random = np.random.default_rng(seed)
    pairs = []
    for rows, cols, letter in ((shape.m, shape.k, shape.layout[0]), (shape.k, shape.n, shape.layout[1])):
        stored = random.standard_normal((cols, rows) if letter == "t" else (rows, cols), dtype=np.float32)
        tensor = _C.cast(_C.tensor(stored), getattr(_C, dtype))
        array = _C.cast(tensor, _C.float64 if dtype == "float64" else _C.float32).numpy()
        pairs.append((_C.transpose(tensor, 0, 1), array.T) if letter == "t" else (tensor, array))
    return pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]


def worst_error(out: Any, a: np.ndarray, b: np.ndarray, dtype: str) -> float:
    """Largest error over its tolerance in a sample of a result, against NumPy in float64; anything not finite is inf.

    The sample is spread over eight rows and 512 columns. Tolerance: one rounding to the format of |c|, and K roundings
    of the accumulator of the sum of |a| |b|.
    """
    rows, cols = (np.unique(np.linspace(0, n - 1, m).astype(int)) for n, m in ((a.shape[0], 8), (b.shape[1], 512)))
    a, b = a[rows].astype(np.float64), b[:, cols].astype(np.float64)
    exact = a @ b
    accumulator = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    bound = ROUNDOFF[dtype] * np.abs(exact) + (a.shape[1] + 2) * accumulator * (np.abs(a) @ np.abs(b)) + 1e-300
    ratio = np.abs(out[np.ix_(rows, cols)] - exact) / bound
    return float(ratio.max()) if np.isfinite(ratio).all() else math.inf


def contenders(
    shape: Shape, dtype: str, backends: list[str], explicit: bool, device: str, torch: Any
) -> tuple[dict[str, Callable[[], Any]], list[str], np.ndarray, np.ndarray]:
    """(name -> call, names left out, A, B as arrays)."""
    ta, tb, a, b = operands(shape, dtype)
    if device != "cpu":
        ta, tb = (_C.to_device(t, _C.device(device)) for t in (ta, tb))
    calls: dict[str, Callable[[], Any]] = {}
    left_out = []
    for name in backends:
        if name == "naive" and shape.operations > SLOW and not explicit:
            left_out.append(name)
            continue
        calls[name] = lambda name=name: _C.matmul(ta, tb, backend=name)
    product = peers.numpy_product(dtype, a, b)
    if product is not None:
        calls["NumPy"] = product
    if torch is not None and (device == "cpu" or torch.cuda.is_available()):
        calls["PyTorch"] = peers.torch_product(torch, dtype, a, b, device)
    return calls, left_out, a, b


def host(out: Any) -> np.ndarray:
    """A result of any contender as a float64 array."""
    if isinstance(out, np.ndarray):
        return out.astype(np.float64)
    if isinstance(out, _C.Tensor):
        return _C.to_device(_C.cast(out, _C.float64), _C.device("cpu")).numpy()
    return out.double().cpu().numpy()


def bench_shape(
    shape: Shape, dtype: str, backends: list[str], explicit: bool, device: str, torch: Any
) -> list[dict[str, Any]]:
    """One record for every contender: milliseconds, GFLOP/s, part of the best, ratios to peers, error / tolerance."""
    calls, left_out, a, b = contenders(shape, dtype, backends, explicit, device, torch)
    errors = {name: worst_error(host(call()), a, b, dtype) for name, call in calls.items()}
    times = frame.measure(calls)
    speed = {name: shape.operations / (frame.summary(t)["ms"] * 1e6) for name, t in times.items()}
    best = max(speed.values())
    records = []
    for name, t in times.items():
        record = {
            **vars(shape),
            "shape": shape.name,
            "dtype": dtype,
            "contender": name,
            **frame.summary(t),
            "gflops": speed[name],
            "percent_of_best": 100 * (speed[name] / best),  # the best is exactly 100
            "error_over_tolerance": errors[name] if math.isfinite(errors[name]) else None,
            "right": errors[name] <= 1,
        }
        for peer in ("NumPy", "PyTorch"):
            record[f"x_{peer.lower()}"] = speed[name] / speed[peer] if peer in speed else None
        records.append(record)
    for name in left_out:
        records.append({**vars(shape), "shape": shape.name, "dtype": dtype, "contender": name, "left_out": True})
    return records


# ---- the command -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "sizes": "squares,training",
    "dtypes": "float32,bfloat16",
    "backends": None,
    "device": "cpu",
    "threads": 0,
    "json": None,
    "plot": None,
}
HEADER = (
    "shape M x N x K",
    "layout",
    "what",
    "dtype",
    "contender",
    "ms",
    "GFLOP/s",
    "% of best",
    "x NumPy",
    "x PyTorch",
)


def row(record: dict[str, Any]) -> list[str]:
    start = [record["shape"], record["layout"], record["label"], record["dtype"], record["contender"]]
    if record.get("left_out"):
        return [*start, "left out", "", "", "", ""]
    ratios = [f"{record[key]:.2f}" if record[key] is not None else "" for key in ("x_numpy", "x_pytorch")]
    start[-1] += "" if record["right"] else " WRONG"
    return [*start, f"{record['ms']:.3f}", f"{record['gflops']:.1f}", f"{record['percent_of_best']:.0f}", *ratios]


def command(values: dict[str, Any]) -> int:
    """Measure and print; 1 when a contender computed a wrong product, else 0."""
    device = frame.choose_device(values["device"])
    known = _C.gemm_backends(_C.device(device))
    backends = frame.choose("backends", values["backends"], known, known)
    dtypes = frame.choose("dtypes", values["dtypes"], DTYPES, DTYPES)
    shapes = parse_sizes(values["sizes"])
    frame.check_output("json", values["json"])
    frame.check_plot(values["plot"])
    frame.check_different("json", values["json"], "plot", values["plot"])
    frame.check_threads(values["threads"])
    threads = _C.get_num_threads()
    numpy_blas = peers.NumPyBlas()
    numpy_blas.set_threads(threads)
    torch = peers.find_torch(threads)

    facts = frame.machine(device)
    facts["xtrain_core"], facts["numpy_core"] = peers.xtrain_core(facts["blas"]), numpy_blas.core
    facts["torch"] = torch.__version__ if torch is not None else None
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if torch is not None else ", no PyTorch here"))
    print(peers.cores_line(facts["xtrain_core"], facts["numpy_core"]))
    print(
        f"medians of up to {frame.TURNS} alternating turns, normal random data, a new result each call, inputs warm; "
        "ratios are of speed, above 1 is faster"
    )
    names = [[shape.name for shape in shapes], [], [shape.label for shape in shapes], dtypes, [*backends, "PyTorch"]]
    table = frame.Table(HEADER, [*map(frame.longest, names), len("left out")], right=range(5, 10))
    records: list[dict[str, Any]] = []
    for dtype in dtypes:
        for shape in shapes:
            for record in bench_shape(shape, dtype, backends, values["backends"] is not None, device, torch):
                table.add(row(record))
                records.append(record)
    if any(record.get("left_out") for record in records):
        print(f"left out: the naive backend above {SLOW / 1e9:g} GFLOP; --backends naive,... runs it")
    bad = [record for record in records if not record.get("right", True)]
    for record in bad:
        print(f"wrong result: {record['contender']}, {record['shape']} {record['layout']}, {record['dtype']}")
    if values["json"] is not None:
        frame.write_json(values["json"], {"machine": facts, "records": records})
        print(f"written: {values['json']}")
    if values["plot"] is not None:
        from .plot import plot_gemm

        plot_gemm(values["plot"], facts, records)
        print(f"written: {values['plot']}")
    return 1 if bad else 0
