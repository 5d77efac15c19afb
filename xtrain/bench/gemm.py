"""`xtrain bench gemm`: matrix products of every backend beside NumPy's and PyTorch's, on squares and training shapes.

A product is C[M, N] = op(A) op(B) with K terms. The training shapes are those of a 124M model (C = 768, F = 3072,
V = 50257) on 512 tokens: `nt` is the forward X W^T, `nn` the input's gradient dY W, `tn` the weight's gradient dY^T X;
a letter says whether the stored matrix is read as it is (n) or transposed (t).

On a CUDA device the baselines are cuBLAS, which is one of the backends, and PyTorch; inputs are drawn there, a sample
of each result is judged here. "tf32" is float32 whose products may use TF32 units.
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
SLOW = 2.2e9  # operations above which the naive backend runs only when it is asked for: it would take seconds a turn
SLOW_ON_CUDA = 2e12
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


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
        match = re.fullmatch(r"(\d{1,999})(?:x(\d{1,999})x(\d{1,999}))?(?::([nt]{2}))?", word)
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
    return sample_error(out[np.ix_(rows, cols)], a[rows].astype(np.float64), b[:, cols].astype(np.float64), dtype)


def sample_error(out: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: str) -> float:
    """The same of a sample `out` [rows, cols] of the product of A's rows a and B's columns b. TF32 units drop bits of
    both operands: 2^-10 of each.
    """
    exact, terms = a @ b, np.abs(a) @ np.abs(b)
    accumulator = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    bound = ROUNDOFF[dtype] * np.abs(exact) + (a.shape[1] + 2) * accumulator * terms + 1e-300
    if dtype == "tf32":
        bound += 2 * 2.0**-10 * terms
    ratio = np.abs(out - exact) / bound
    return float(ratio.max()) if np.isfinite(ratio).all() else math.inf


Calls = dict[str, Callable[[], Any]]
Judge = Callable[[Any], float]


def contenders(shape: Shape, dtype: str, backends: list[str], torch: Any) -> tuple[Calls, Judge]:
    """(name -> call, what gives the error of a result) on the CPU."""
    ta, tb, a, b = operands(shape, dtype)
    calls: Calls = {name: lambda name=name: _C.matmul(ta, tb, backend=name) for name in backends}
    product = peers.numpy_product(dtype, a, b)
    if product is not None:
        calls["NumPy"] = product
    if torch is not None:
        calls["PyTorch"] = peers.torch_product(torch, dtype, a, b)
    return calls, lambda out: worst_error(host(out), a, b, dtype)


def cuda_contenders(shape: Shape, dtype: str, backends: list[str], device: str, torch: Any) -> tuple[Calls, Judge]:
    """The same on a CUDA device, where A and B are drawn; PyTorch reads the same memory. Only samples come to the host:
    some eight rows of A and 512 columns of B, and of a result where they meet.
    """
    kind = "float32" if dtype == "tf32" else dtype
    pair = []
    for rows, cols, letter in ((shape.m, shape.k, shape.layout[0]), (shape.k, shape.n, shape.layout[1])):
        stored = (cols, rows) if letter == "t" else (rows, cols)
        t = _C.normal(stored, 0.0, 1.0, getattr(_C, kind), _C.device(device))
        pair.append(_C.transpose(t, 0, 1) if letter == "t" else t)
    ta, tb = pair
    calls: Calls = {name: lambda name=name: _C.matmul(ta, tb, backend=name) for name in backends}
    if torch is not None:
        calls["PyTorch"] = peers.torch_call(torch, torch.from_dlpack(ta), torch.from_dlpack(tb))
    a, b = accelerator.to_host(accelerator.spread(ta, 0, 8)), accelerator.to_host(accelerator.spread(tb, 1, 512))

    def judge(out: Any) -> float:
        mine = out if isinstance(out, _C.Tensor) else _C.from_dlpack(out)
        sample = accelerator.spread(accelerator.spread(mine, 0, 8), 1, 512)
        return sample_error(accelerator.to_host(sample), a, b, dtype)

    return calls, judge


def host(out: Any) -> np.ndarray:
    """A result of any contender as a float64 array."""
    if isinstance(out, np.ndarray):
        return out.astype(np.float64)
    if isinstance(out, _C.Tensor):
        return _C.cast(out, _C.float64).numpy()
    return out.double().numpy()


def bench_shape(
    shape: Shape, dtype: str, backends: list[str], explicit: bool, device: str, torch: Any
) -> list[dict[str, Any]]:
    """One record for every contender: milliseconds, GFLOP/s, part of the best, ratios to peers, error / tolerance."""
    cuda = accelerator.on_cuda(device)
    slow = shape.operations > (SLOW_ON_CUDA if cuda else SLOW) and not explicit
    left_out = [name for name in backends if name == "naive" and slow]
    run = [name for name in backends if name not in left_out]
    wait = accelerator.waiter(device, torch)
    with accelerator.precision(dtype == "tf32", torch) if cuda else contextlib.nullcontext():
        calls, judge = (
            cuda_contenders(shape, dtype, run, device, torch) if cuda else contenders(shape, dtype, run, torch)
        )
        errors = {}
        for name, call in calls.items():
            out = call()
            if wait is not None:
                wait()
            errors[name] = judge(out)
            del out
        times = frame.measure(calls, wait)
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
        if cuda:
            record["percent_of_cublas"] = 100 * (speed[name] / speed["cublas"]) if "cublas" in speed else None
        for peer in ("NumPy", "PyTorch"):
            record[f"x_{peer.lower()}"] = speed[name] / speed[peer] if peer in speed else None
        records.append(record)
    for name in left_out:
        records.append({**vars(shape), "shape": shape.name, "dtype": dtype, "contender": name, "left_out": True})
    return records


# ---- the command -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "sizes": None,
    "dtypes": None,
    "backends": None,
    "device": "cpu",
    "threads": 0,
    "json": None,
    "plot": None,
    "explain": False,
}
DEFAULTS = {"sizes": "squares,training", "dtypes": "float32,bfloat16"}
CUDA_DEFAULTS = {"sizes": "256,512,1024,2048,4096,8192,training", "dtypes": "float32,tf32,bfloat16"}
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
CUDA_HEADER = (*HEADER[:6], "TFLOP/s", "% of cublas", "% of best", "x PyTorch")


def row(record: dict[str, Any]) -> list[str]:
    start = [record["shape"], record["layout"], record["label"], record["dtype"], record["contender"]]
    if record.get("left_out"):
        return [*start, "left out", "", "", "", ""]
    ratios = [f"{record[key]:.2f}" if record[key] is not None else "" for key in ("x_numpy", "x_pytorch")]
    start[-1] += "" if record["right"] else " WRONG"
    if "percent_of_cublas" in record:
        part = record["percent_of_cublas"]
        parts = [f"{part:.1f}" if part is not None else "", f"{record['percent_of_best']:.1f}"]
        return [*start, f"{record['ms']:.4f}", f"{record['gflops'] / 1e3:.2f}", *parts, ratios[1]]
    return [*start, f"{record['ms']:.3f}", f"{record['gflops']:.1f}", f"{record['percent_of_best']:.0f}", *ratios]


def show_choice(shapes: list[Shape], dtypes: list[str], device: str, backend: str | None) -> None:
    for dtype in dtypes:
        for shape in shapes:
            rows = explain.of_product((shape.m, shape.n, shape.k), dtype, shape.layout, device, backend)
            print("\n".join(explain.lines(f"{shape.name}:{shape.layout} {dtype} on {device}", rows)))


def describe_machine(device: str, torch: Any) -> dict[str, Any]:
    """The facts of frame.machine, and what computes the products: PyTorch's version, and on a CPU the cores for which
    xtrain's and NumPy's BLAS have chosen kernels. NumPy's BLAS gets as many threads as xtrain.
    """
    facts = frame.machine(device)
    facts["torch"] = torch.__version__ if torch is not None else None
    if not accelerator.on_cuda(device):
        numpy_blas = peers.NumPyBlas()
        numpy_blas.set_threads(_C.get_num_threads())
        facts["xtrain_core"], facts["numpy_core"] = peers.xtrain_core(facts["blas"]), numpy_blas.core
    return facts


def print_head(facts: dict[str, Any], device: str, missing: list[str]) -> None:
    """What stands above the table. missing: lines about backends that cannot run here."""
    has_torch = facts["torch"] is not None
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if has_torch else ", no PyTorch here"))
    cuda = accelerator.on_cuda(device)
    print(f"cuBLAS: {facts['gpu']['blas']}" if cuda else peers.cores_line(facts["xtrain_core"], facts["numpy_core"]))
    for line in missing:
        print(line)
    print(frame.method(device))


def measure_all(
    shapes: list[Shape], dtypes: list[str], backends: list[str], explicit: bool, device: str, torch: Any
) -> list[dict[str, Any]]:
    """The records of bench_shape for every dtype and shape; prints the table row by row."""
    names = [[shape.name for shape in shapes], [], [shape.label for shape in shapes], dtypes, [*backends, "PyTorch"]]
    header = CUDA_HEADER if accelerator.on_cuda(device) else HEADER
    table = frame.Table(header, [*map(frame.longest, names), len("left out")], right=range(5, 10))
    records: list[dict[str, Any]] = []
    for dtype in dtypes:
        for shape in shapes:
            _C.manual_seed(0)
            for record in bench_shape(shape, dtype, backends, explicit, device, torch):
                table.add(row(record))
                records.append(record)
            accelerator.release(device, torch)
    return records


def report(records: list[dict[str, Any]], facts: dict[str, Any], cuda: bool, values: dict[str, Any]) -> int:
    """Print what stands below the table, write the files that were asked for, and return the exit status."""
    if any(record.get("left_out") for record in records):
        limit = (SLOW_ON_CUDA if cuda else SLOW) / 1e9
        print(f"left out: the naive backend above {limit:g} GFLOP; --backends naive,... runs it")
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


def command(values: dict[str, Any]) -> int:
    """Measure and print; 1 when a contender computed a wrong product, else 0. --explain: only what is chosen."""
    device = frame.choose_device(values["device"])
    cuda = accelerator.on_cuda(device)
    defaults, known_dtypes = (CUDA_DEFAULTS, CUDA_DTYPES) if cuda else (DEFAULTS, DTYPES)
    explicit = values["backends"] is not None
    known = _C.gemm_backends(_C.device(device))
    backends = frame.choose("backends", values["backends"], known, known)
    dtypes = frame.choose("dtypes", values["dtypes"], known_dtypes, defaults["dtypes"].split(","))
    shapes = parse_sizes(defaults["sizes"] if values["sizes"] is None else values["sizes"])
    frame.check_output("json", values["json"])
    frame.check_plot(values["plot"])
    frame.check_different("json", values["json"], "plot", values["plot"])
    frame.check_threads(values["threads"], device)
    if values["explain"]:
        explain.check_options(values)
        show_choice(shapes, dtypes, device, backends[0] if explicit else None)
        return 0
    torch = accelerator.find_torch(peers.find_torch(_C.get_num_threads()), device)
    missing: list[str] = []
    state = _C.get_rng_state()
    if cuda:
        backends, missing = accelerator.usable(backends, device, explicit)
    facts = describe_machine(device, torch)
    print_head(facts, device, missing)
    try:
        records = measure_all(shapes, dtypes, backends, explicit, device, torch)
    finally:
        _C.set_rng_state(state)
    return report(records, facts, cuda, values)
