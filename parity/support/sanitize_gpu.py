"""NVIDIA's compute-sanitizer over every kernel: the op table forward and backward at small shapes, the optimizer, a training step.

    make sanitize-gpu ARGS="--tools memcheck,racecheck --cases 4 --jobs 4"

    --tools   of memcheck, initcheck, racecheck, synccheck: which ones run, in turns          --jobs J   processes of a tool at once
    --cases   at most so many cases of an entry, spread from its smallest to its largest      --part i/n this machine's share of the work
    --big     also the cases that are large enough for many blocks                            --only R   cases whose name has R in it
    --logs    the folder for what every process says (build/sanitize-gpu)
    --launched  no tool: which kernels the cases launch, by NVIDIA's CUPTI; 1 where a case of RARE misses its own

Products are run by the tiled and the naive backend, because cuBLAS is not ours to check; attention by each of its
backends. `--only 'rare '` are the cases of RARE alone: kernels that take large or uncommon sizes. The tools say nothing
of kernels that were not launched, so run these cases with --launched, too. The choice of a kernel is the same under a
tool, but for decoder_step, whose blocks must all fit at once. Ends with a line that counts cases; 1 is the status when
anything was reported, or went wrong. With XTRAIN_TEST_DEVICE=cpu the cases run on the CPU, once, without a sanitizer:
this tries the script. Needs no PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import xtrain as xt
from xtrain import _C
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable import OTHER_KERNELS, TABLE
from xtrain.optable.judge import backends, using
from xtrain.optable.table import FLOATS, Case, Ids, N, Op, U, case, gradients, outputs_of, tensor

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("XTRAIN_TEST_DEVICE", "cuda")
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
DTYPES = ("float32", "bfloat16")  # of the floats; the kernels of the others are the same templates
NOT_OURS = ("cublas", "blas")
LIBRARY = r"(void )?(nvjet|cutlass|cublas)"  # how names of cuBLAS' kernels begin
UNRECYCLED = os.environ | {"XTRAIN_CUDA_SYNC": "1"}  # every block is the driver's own, and gone when it is given back
REPORTED = 9  # the status of compute-sanitizer when it has something to say

# Sizes that no case of the table has, for kernels that are chosen by size: entry, its case, what becomes of which size.
WIDER = [
    ("scaled_dot_product_attention", "1x2x33x24_1x1x33x24_1x1x33x24", {33: 131, 24: 32}),
    ("scaled_dot_product_attention", "1x2x33x24_1x1x33x24_1x1x33x24", {33: 131, 24: 64}),
    ("scaled_dot_product_attention", "1x2x33x24_1x1x33x24_1x1x33x24", {33: 131, 24: 96}),
    *[("scaled_dot_product_attention", "1x2x33x24_1x1x33x24_1x1x33x24", {33: 131, 24: dim}) for dim in (128, 192, 256)],
    ("rms_norm", "", {257: 4096}),
    *[("layer_norm", "3x257_257_257", {257: cols}) for cols in (256, 768, 1024, 4096, 40960)],  # every plan
    *[(op, "17x2x40", {17: 67, 40: 1288, 80: 2576}) for op in ("mhc_pre", "mhc_close")],
    *[(op, "1x4x257", {1: 67, 257: 1288, 1028: 5152}) for op in ("mhc_pre", "mhc_close")],
    ("mhc_post", "17x2x40", {17: 67, 40: 1288}),
    ("mhc_post", "1x4x257", {1: 67, 257: 1288}),
    # 128 tokens and more: one pass over x, by blocks that exchange sums
    ("mhc_pre", "17x2x40", {17: 131, 40: 1288, 80: 2576}),
    ("mhc_pre", "1x4x257", {1: 131, 257: 1288, 1028: 5152}),
]


def by_columns(x: _C.Tensor, w: _C.Tensor, b: _C.Tensor, d: _C.Tensor, e: _C.Tensor, form: str) -> _C.Tensor:
    """gelu_mlp with weights stored [in, out], as GPT-2's are: the layout that the product with GELU inside asks for."""
    w, d = (_C.transpose(_C.contiguous(_C.transpose(t, 0, 1)), 0, 1) for t in (w, d))
    return _C.gelu_mlp(x, w, b, d, e, form)


@dataclasses.dataclass(frozen=True)
class Rare:
    """A case in bfloat16 for kernels that are chosen by several sizes at once. On a Hopper GPU each of `launches`
    matches the name, as the compiler writes it, of a kernel that it launches: template arguments are L, a type (i int,
    b bool), the value and E."""

    entry: str  # its id in the table
    case: Case | str  # or how the id of one of its cases begins
    launches: tuple[str, ...]
    backend: str | None = None
    call: Callable[..., object] | None = None  # in the place of the entry's


def head_case(rows: int, words: int, **options: float) -> Case:
    """All rows but one are a chunk."""
    return case(N(rows, 8), U(-0.7, 0.7, words, 8), Ids(0, words, rows), chunk_rows=rows - 1, **options)


# 132 tiles of rows, one row in the last, and two of columns: of the product that makes a gradient 264, the fewest that
# gemm/hopper.cu takes.
ROWS, COLUMNS = 131 * 128 + 1, 200
SINKS = (N(1, 2, 131, 64), N(1, 1, 131, 64), N(1, 1, 131, 64), N(2))
CAPPED = (N(1, 2, 131, 128), N(1, 1, 131, 128), N(1, 1, 131, 128))
CAUSAL_CONV1D = (N(200, 260, 16), N(16, 4), N(16))  # runs of 52 rows, a warp a block
RARE = [
    Rare(
        "swiglu_mlp",
        case(N(ROWS, 8), N(COLUMNS, 8), N(COLUMNS, 8), N(8, COLUMNS)),
        ("gemm_hopper_kernel.*HopperKind0E", "gemm_hopper_kernel.*HopperKind1E"),
        "hopper",
    ),
    Rare(
        "gelu_mlp:tanh",
        case(N(ROWS, 8), N(COLUMNS, 8), N(COLUMNS), N(8, COLUMNS), N(8), approximate="tanh"),
        ("gemm_hopper_kernel.*HopperKind2E", "gemm_hopper_kernel.*HopperKind3E"),
        "hopper",
        lambda *tensors, approximate: by_columns(*tensors, approximate),
    ),
    # Above 4096 vectors of a row: one block a row, then two; more rows than 132 multiprocessors take at once, and a
    # rest of columns.
    Rare("linear_cross_entropy:chunks", head_case(135, 32781), ("cross_entropy_ring_kernel.*Li1ELb0EEv",), "tiled"),
    Rare(
        "linear_cross_entropy:chunks",
        head_case(69, 65549, z_loss=0.1),
        ("cross_entropy_ring_kernel.*Li2ELb1EEv",),
        "tiled",
    ),
    Rare(
        "scaled_dot_product_attention",
        case(N(1, 2, 66, 128), N(1, 1, 4100, 128), N(1, 1, 4100, 128), is_causal=True, enable_gqa=True),
        ("flash_hopper_ordered_kernel", "flash_hopper_finish_kernel"),
        "flash",
    ),
    Rare(
        "scaled_dot_product_attention:sinks",
        case(*SINKS, is_causal=True, enable_gqa=True, window=70, softcap=2.0),
        ("sinks_forward_kernel", "sinks_backward_kernel", "flash_hopper_forward_kernel.*Lb1ELb1EEv"),
        "flash",
    ),
    Rare(
        "scaled_dot_product_attention:sinks",
        case(*CAPPED, is_causal=True, enable_gqa=True, softcap=5.0),
        ("flash_hopper_dq_kernel.*Lb1ELb1EEv", "flash_hopper_dkv_kernel.*Lb1ELb1EEv"),
        "flash",
    ),
    Rare(
        "causal_conv1d",
        case(*CAUSAL_CONV1D),
        ("causal_conv1d_fwd_kernel.*Li4ELi4ELb1ELb0EEv", "causal_conv1d_bwd_kernel.*Li4ELi4ELb1ELb0EEv"),
    ),
    Rare(
        "causal_conv1d:silu",
        case(*CAUSAL_CONV1D, activation="silu"),
        ("causal_conv1d_fwd_kernel.*Li4ELi4ELb1ELb1EEv", "causal_conv1d_bwd_kernel.*Li4ELi4ELb1ELb1EEv"),
    ),
    Rare("decoder_step", "3x32_3_32_256x32", ("decoder_step_kernel.*Li64E",)),
    Rare("decoder_step", "9x64_9_64_256x64", ("decoder_step_kernel.*Li128E",)),
    Rare("checksums:bfloat16", "129x523_16384_70001", ("checksums_kernel",)),
]


@dataclasses.dataclass(frozen=True)
class Unit:
    """One thing to run: its name, the kernel slots that it is about, the call, and patterns of the kernels that it must
    launch."""

    name: str
    kernels: tuple[str, ...]
    run: Callable[[], object]
    launches: tuple[str, ...] = ()


# ---- what is run -----------------------------------------------------------------------------------------------------------------


def numel(c: Case) -> int:
    return sum(int(np.prod(spec.shape)) for spec in c.inputs)


def some(cases: Sequence[Case], limit: int) -> list[Case]:
    """At most `limit` of them, from the largest to the smallest that is not empty in even steps."""
    order = sorted(cases, key=numel, reverse=True)
    if limit < len(order):
        order = [c for c in order if all(0 not in spec.shape for spec in c.inputs)] or order
    if limit >= len(order):
        return order
    return [order[round(i * (len(order) - 1) / max(limit - 1, 1))] for i in range(limit)]


def wider(entry: Op) -> list[Case]:
    found = []
    for op, start, sizes in WIDER:
        for c in entry.cases:
            if entry.op == op and c.id.startswith(start) and not {*sizes} - {n for s in c.inputs for n in s.shape}:
                specs = [dataclasses.replace(s, shape=tuple(sizes.get(n, n) for n in s.shape)) for s in c.inputs]
                found.append(dataclasses.replace(c, inputs=tuple(specs)))
                break
    return found


def run_case(entry: Op, c: Case, dtype: str, backend: str | None) -> None:
    """Forward, and backward where there is one. Products inside other ops are the tiled backend's, too."""
    before = _C.use_gemm_backend("tiled")
    try:
        with using(entry, backend):
            arrays = entry.draw(c, dtype)
            if dtype in FLOATS and entry.differentiable(c):
                gradients(entry, c, arrays, dtype)
            else:
                outputs_of(entry, c, [tensor(a if dtype in FLOATS else a.astype(dtype), dtype) for a in arrays])
    finally:
        _C.use_gemm_backend(before)


def rare_unit(rare: Rare) -> Unit:
    entry = next(entry for entry in TABLE if entry.id == rare.entry)
    c = rare.case
    if isinstance(c, str):
        c = next(one for one in entry.cases if one.id.startswith(c))
    names = [name for name in backends(entry) if name not in NOT_OURS]
    name = rare.backend if rare.backend in names else names[0]  # the CPU has others
    if rare.call is not None:
        entry = dataclasses.replace(entry, call=rare.call)
    label = f"rare {entry.id} {c.id} bfloat16{f' {name}' if name else ''}"
    return Unit(label, entry.kernels, lambda: run_case(entry, c, "bfloat16", name), rare.launches)


def check_other(slot: str) -> None:
    wrong = OTHER_KERNELS[slot][1](str(_C.get_default_device()))
    if wrong:
        raise AssertionError(wrong)


def bad_index(call: Callable[[], object]) -> None:
    """What the kernels report of their data."""
    try:
        call()
        _C.synchronize(_C.get_default_device())
    except IndexError:
        return
    raise AssertionError("an index out of range was not reported")


def train_steps(streams: int) -> None:
    """Two steps of a tiny model, one of them with a guard that forbids it."""
    sizes = dict(vocab_size=211, hidden_size=64, intermediate_size=160, num_hidden_layers=2, head_dim=16)
    model = Qwen3(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, mhc_streams=streams, **sizes))
    model.to(_C.get_default_device())
    ids = tensor(np.random.default_rng(0).integers(0, 211, (2, 33)))
    optimizer = xt.optim.AdamW(model.parameters(), lr=1e-3)
    before = _C.use_gemm_backend("tiled")
    try:
        for guard in (None, tensor(np.array(np.nan, np.float32))):
            optimizer.zero_grad()
            model.loss(ids, ids).backward()
            norm = xt.optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(guard=norm if guard is None else guard)
    finally:
        _C.use_gemm_backend(before)


def units(limit: int, big: bool, only: str) -> list[Unit]:
    """Everything that there is to run, in an order that depends on the arguments alone."""
    return [unit for unit in every_unit(limit, big) if only in unit.name]


def every_unit(limit: int, big: bool) -> Iterator[Unit]:
    for entry in TABLE:
        names = [name for name in backends(entry) if name not in NOT_OURS]
        cases = some([c for c in entry.cases if big or not c.big], limit)
        for dtype in entry.dtypes:
            if dtype in FLOATS and dtype not in DTYPES:
                continue
            for c in cases + (wider(entry) if dtype in FLOATS else []):
                for name in names:
                    label = f"{entry.id} {c.id} {dtype}{f' {name}' if name else ''}"
                    yield Unit(label, entry.kernels, lambda e=entry, c=c, d=dtype, b=name: run_case(e, c, d, b))
    for rare in RARE:
        yield rare_unit(rare)
    for slot in OTHER_KERNELS:
        yield Unit(f"kernel {slot}", (slot,), lambda slot=slot: check_other(slot))
    weight, logits, ids = np.ones((5, 3)), np.ones((3, 5)), np.array([1, 7, 2])
    for name, call in [
        ("embedding", lambda: _C.embedding(tensor(ids), tensor(weight))),
        ("cross_entropy", lambda: _C.cross_entropy(tensor(logits), tensor(ids))),
    ]:
        yield Unit(f"index out of range, {name}", (), lambda call=call: bad_index(call))
    for streams in (0, 2, 4):
        yield Unit(f"training step, {streams} streams", (), lambda streams=streams: train_steps(streams))


def share(part: str) -> tuple[int, int]:
    """ "2/3" -> (1, 3): every third unit, from the second on."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"--part must be i/n with 1 <= i <= n, got '{part}'")
    return int(match[1]) - 1, int(match[2])


def work(options: argparse.Namespace, launched: set[str] | None = None) -> int:
    """Runs this process's units; waits after each, so that what fails has a name. launched: a set that kernels are
    added to as they are launched."""
    _C.set_default_device(DEVICE)
    _C.manual_seed(0)
    first, step = options.part
    mine = units(options.cases, options.big, options.only)[first::step]
    kernels: set[str] = set()
    every: set[str] = set()
    missed = 0
    for unit in mine:
        if launched is not None:
            launched.clear()
        try:
            unit.run()
            _C.synchronize(_C.get_default_device())
        except BaseException:
            print(f"in {unit.name}:", file=sys.stderr, flush=True)
            raise
        kernels.update(unit.kernels)
        if launched is not None:
            every |= launched
            missed += say_launched(unit, launched)
    print(f"ran {len(mine)} cases of {' '.join(sorted(kernels))}", flush=True)
    if launched is None:
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)
    log = options.logs / "launched.txt"
    log.write_text("".join(f"{name}\n" for name in sorted(every)))
    asked = sum(bool(unit.launches) for unit in mine)
    print(f"launched: {len(every)} kernels ({log}); {asked} cases of rare kernels, {missed} of them MISSED one")
    return int(missed > 0 or not every)


# ---- what was launched -----------------------------------------------------------------------------------------------


def say_launched(unit: Unit, launched: set[str]) -> bool:
    """Prints which kernels of its own a unit has launched; whether one is missing."""
    found = {pattern: sorted(name for name in launched if re.search(pattern, name)) for pattern in unit.launches}
    for pattern, names in found.items():
        print(f"{'launched' if names else 'MISSED'} {pattern} in {unit.name}", flush=True)
    return not all(found.values())


class CallbackData(ctypes.Structure):
    """CUPTI's CUpti_CallbackData, to its end."""

    _fields_ = (
        ("site", ctypes.c_int),  # 0: before the call
        ("function", ctypes.c_char_p),
        ("parameters", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),  # the kernel's name, where the function launches one; read nowhere else
        ("context", ctypes.c_void_p),
        ("context_id", ctypes.c_uint32),
        ("correlation", ctypes.c_void_p),
        ("correlation_id", ctypes.c_uint32),
    )


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(CallbackData))
DRIVER, RUNTIME = 1, 2  # domains of callbacks


def find_cupti() -> ctypes.CDLL:
    """CUPTI of the CUDA toolkit, or of the package nvidia-cuda-cupti."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    places = [*home.glob("extras/CUPTI/lib64/libcupti.so*"), *home.glob("lib*/libcupti.so*")]
    places += [place for folder in sys.path for place in Path(folder).glob("nvidia/*/lib/libcupti.so*")]
    for place in places:
        try:
            return ctypes.CDLL(os.fspath(place))
        except OSError:  # of another CUDA, or broken
            continue
    sys.exit(f"sanitize-gpu: --launched must find libcupti.so in {home} or in nvidia-cuda-cupti, and does not")


@dataclasses.dataclass
class Listener:
    """The names of the kernels that this process launches, as long as it lives."""

    launched: set[str] = dataclasses.field(default_factory=set)

    def begin(self) -> None:
        library = find_cupti()
        self.subscriber = ctypes.c_void_p()
        self.callback = CALLBACK(self.hear)  # CUPTI keeps its address
        self.check("cuptiSubscribe", library.cuptiSubscribe(ctypes.byref(self.subscriber), self.callback, None))
        for domain in (DRIVER, RUNTIME):
            self.check("cuptiEnableDomain", library.cuptiEnableDomain(1, self.subscriber, domain))
        self.library = library

    def end(self) -> None:
        """Before Python ends: a callback while it does would be a crash."""
        self.library.cuptiUnsubscribe(self.subscriber)

    def check(self, what: str, status: int) -> None:
        if status:
            sys.exit(f"sanitize-gpu: {what} must succeed for --launched, got status {status} of CUPTI")

    def hear(self, user: int | None, domain: int, function: int, data: ctypes._Pointer[CallbackData]) -> None:
        call = data.contents
        name = call.function or b""
        if call.site == 0 and b"Launch" in name and b"Kernel" in name and call.symbol:
            self.launched.add(call.symbol.decode(errors="replace"))


# ---- under compute-sanitizer ---------------------------------------------------------------------------------------------------------


def find_sanitizer() -> str:
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    places = ("compute-sanitizer", home / "bin/compute-sanitizer", home / "compute-sanitizer/compute-sanitizer")
    found = next(filter(None, map(shutil.which, places)), None)
    if not found:
        sys.exit(
            f"sanitize-gpu: compute-sanitizer must be on the PATH or in {home}/bin, and is not: it comes with the CUDA toolkit"
        )
    return found


@dataclasses.dataclass
class Outcome:
    cases: int = 0
    reports: int = 0
    kernels: frozenset[str] = frozenset()
    problem: str = ""  # what else is wrong with the run
    said: list[str] = dataclasses.field(default_factory=list)  # lines to print, if anything is wrong


def read_log(text: str, status: int) -> Outcome:
    """What one process says at its end. Racecheck's warnings are no errors to it, and reports to us; what a tool says of
    cuBLAS alone is none. Initcheck reports cuBLAS' own sums of parts along K."""
    ran = re.search(r"^ran (\d+) cases of (.*)$", text, re.MULTILINE)
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", text)
    pairs = re.findall(r"Race reported between \w+ access at (.*)\n=+ +and \w+ access at (.*)", text)
    readers = re.findall(r"Uninitialized __global__ memory read of .*\n=+ +at (.*)", text)
    library = sum(all(re.match(LIBRARY, name) for name in names) for names in [*pairs, *((name,) for name in readers)])
    outcome = Outcome(reports=max(0, int(summary[1]) - library) if summary else 0)
    if ran:
        outcome.cases, outcome.kernels = int(ran[1]), frozenset(ran[2].split())
    if not ran:
        outcome.problem = f"did not reach its end (status {status})"
    elif not summary:
        outcome.problem = "has no summary of compute-sanitizer"
    elif status != 0 and not outcome.reports and not library:
        outcome.problem = f"ended with status {status}"
    return outcome


def run_tool(sanitizer: str, tool: str, options: argparse.Namespace) -> list[Outcome]:
    """One tool over this machine's share of the work, in `jobs` processes at once."""
    options.logs.mkdir(parents=True, exist_ok=True)
    first, step = options.part
    passed = ["--cases", str(options.cases), "--only", options.only, *(["--big"] if options.big else [])]

    def one(job: int) -> Outcome:
        part = f"{first + step * job + 1}/{step * options.jobs}"
        log = options.logs / f"{tool}-{part.replace('/', '-of-')}.log"
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED)]
        # What is not printed counts as ours, and initcheck has a report for each word that cuBLAS reads.
        command += (
            ["--print-limit", "4000000", "--show-backtrace", "no"] if tool == "initcheck" else ["--print-limit", "50"]
        )
        command += [sys.executable, __file__, "--worker", "--part", part, *passed]
        with open(log, "wb") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=UNRECYCLED).returncode
        text = log.read_text(errors="replace")
        outcome = read_log(text, status)
        if outcome.reports or outcome.problem:
            shown = [line for line in text.splitlines() if line.strip("= ")]
            outcome.said += [*shown[:60], *(["..."] if len(shown) > 80 else []), *shown[60:][-20:]]
            outcome.said += [f"sanitize-gpu: {tool} {part}: {outcome.reports} reports {outcome.problem}: {log}"]
        return outcome

    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(one, range(options.jobs)):
            # Here and not in `one`: the prints of two threads mix within a line.
            for line in outcome.said:
                print(line, flush=True)
            outcomes.append(outcome)
    return outcomes


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--part", type=share, default=(0, 1))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/sanitize-gpu")
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--launched", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tools = [tool for tool in options.tools.split(",") if tool]
    for tool in tools:
        if tool not in TOOLS:
            parser.error(f"--tools must be of {', '.join(TOOLS)}, got '{tool}'")
    if min(options.cases, options.jobs, len(tools)) < 1:
        parser.error("--cases, --jobs and the number of --tools must be positive")
    if options.launched and DEVICE == "cpu":
        parser.error("--launched must be left out with XTRAIN_TEST_DEVICE=cpu, which launches no kernel")
    if options.worker or DEVICE == "cpu":
        return work(options)
    if not has_gpu():
        print("sanitize-gpu: no NVIDIA GPU on this machine, nothing was run")
        return 0
    if options.launched:
        listener = Listener()
        listener.begin()
        try:
            return work(options, listener.launched)
        finally:
            listener.end()
    sanitizer = find_sanitizer()
    bad = cases = 0
    for tool in tools:
        start = time.perf_counter()
        outcomes = run_tool(sanitizer, tool, options)
        count, reports = sum(o.cases for o in outcomes), sum(o.reports for o in outcomes)
        kernels = frozenset[str]().union(*(o.kernels for o in outcomes))
        seconds = time.perf_counter() - start
        print(f"{tool}: {count} cases of {len(kernels)} kernels, {reports} reports, {seconds:.0f} s", flush=True)
        cases += count
        bad += sum(bool(o.reports or o.problem) for o in outcomes) or int(count == 0)
    print(f"sanitize-gpu: {', '.join(tools)}: {cases} cases, {f'{bad} processes FAILED' if bad else 'no reports'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
