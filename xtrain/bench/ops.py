"""`xtrain bench ops`: every op of the op table, forward and backward, in GB/s beside a measured copy.

Bytes are those that any implementation has to move: inputs and results forward, upstream gradients and gradients
backward. What an op reads again (a backward its inputs, for example) counts as time, not as bytes, and so does the copy
that in-place entries of the table make of their input. A copy of 24 MiB, the faster one of xtrain's and NumPy's, is
measured in the same run; "% of copy" is the part of its rate that an op reaches. Products and attention are bound by
arithmetic: `xtrain bench gemm` compares their backends; the naive product, which needs seconds, is left out here.

On a CUDA device a tensor is several times the L2 cache, or there are several sets of inputs, used in turn; the copy is
one of 1 GiB, by xtrain or by PyTorch.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _C
from ..optable import TABLE, judge, sizes
from ..optable.table import FLOATS, Case, N, Op, as_list, outputs_of, tensor, upstream
from . import accelerator, frame, peers
from .check import check_dtypes

OPTIONS = {"op": None, "dtypes": "float32", "device": "cpu", "threads": 0, "json": None, "plot": None}
HEADER = ("op", "inputs", "dtype", "backend", "forward ms", "GB/s", "% of copy", "x PyTorch")
HEADER += ("backward ms", "GB/s", "% of copy", "x PyTorch")


def entries_of(ops: Sequence[str], dtype: str) -> list[Op]:
    """The entries that are measured in a dtype: those with a case in sizes.py, and else the first of each op."""
    chosen: dict[str, Op] = {}
    for entry in TABLE:
        if entry.op in ops and dtype in entry.dtypes:
            chosen.setdefault(entry.op, entry)
            if entry.id in sizes.BENCH:
                chosen[entry.id] = entry
    return list({entry.id: entry for entry in chosen.values()}.values())


def copy_rate(device: str, torch: Any = None) -> dict[str, Any]:
    """GB/s, read and written, of a copy: of one activation by xtrain's kernel and by NumPy; on a CUDA device of 1 GiB
    by xtrain's kernel and by PyTorch.
    """
    calls: dict[str, Callable[[], Any]] = {}
    if accelerator.on_cuda(device):
        ours = accelerator.draw(N(sizes.COPIED_ON_CUDA // 4), "float32", device)
        if torch is not None:
            source = torch.from_dlpack(ours)
            target = torch.empty_like(source)
            calls["PyTorch"] = lambda: target.copy_(source)
    else:
        numbers = np.random.default_rng(0).standard_normal(sizes.ACTIVATION, dtype=np.float32)
        ours, copied = tensor(numbers, None, device), np.empty_like(numbers)
        calls["NumPy"] = lambda: np.copyto(copied, numbers)
    result = _C.clone(ours)
    calls = {"xtrain": lambda: _C.copy_(result, ours), **calls}
    times = frame.measure(calls, accelerator.waiter(device, torch))
    rates = {name: 2 * ours.nbytes / statistics.median(t) / 1e9 for name, t in times.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"gb_per_s": rates[best], "by": best, "all": rates}


# ---- inputs ----------------------------------------------------------------------------------------------------------


class HostInputs:
    """The inputs of a case as one set of tensors on the CPU, and as PyTorch's; upstream gradients for both."""

    def __init__(self, entry: Op, c: Case, dtype: str) -> None:
        self.entry, self.dtype = entry, dtype
        self.arrays = entry.draw(c, dtype, "bench")
        if dtype not in FLOATS:
            self.arrays = [a.astype(dtype) for a in self.arrays]
        self.ours = [[tensor(a, dtype, "cpu") for a in self.arrays]]

    def theirs(self, torch: Any) -> list[list[Any]]:
        tensors = [torch.tensor(a) for a in self.arrays]
        return [[t.to(getattr(torch, self.dtype)) if t.is_floating_point() else t for t in tensors]]

    def seeds(self, outs: Sequence[Any], index: int) -> list[Any]:
        self.dys = upstream(outs, self.dtype, self.entry.id)
        return [_C.cast(tensor(dy, "float64", "cpu"), o.dtype) for dy, o in zip(self.dys, outs)]

    def their_seeds(self, torch: Any, roots: Sequence[Any], index: int) -> list[Any]:
        return [torch.tensor(dy).to(o.dtype) for dy, o in zip(self.dys, roots)]


class CudaInputs:
    """The same on a CUDA device, where everything is drawn: as many sets, used in turn, as no cache can hold. PyTorch
    reads the same memory.
    """

    def __init__(self, entry: Op, c: Case, dtype: str, device: str) -> None:
        self.device = device
        _C.manual_seed(zlib.crc32(f"{entry.id}/{c.id}/bench".encode()))
        count = sizes.sets_of(entry, c, getattr(_C, dtype).itemsize)
        self.ours = [[accelerator.draw(s, dtype, device) for s in c.inputs] for _ in range(count)]
        self.drawn: list[list[Any]] = [[] for _ in range(count)]

    def theirs(self, torch: Any) -> list[list[Any]]:
        return [[torch.from_dlpack(t) for t in tensors] for tensors in self.ours]

    def seeds(self, outs: Sequence[Any], index: int) -> list[Any]:
        self.drawn[index] = [accelerator.draw(N(*o.shape), o.dtype.name, self.device) for o in outs]
        return self.drawn[index]

    def their_seeds(self, torch: Any, roots: Sequence[Any], index: int) -> list[Any]:
        return [torch.from_dlpack(dy).to(o.dtype) for dy, o in zip(self.drawn[index], roots)]


Inputs = HostInputs | CudaInputs

# ---- one entry -------------------------------------------------------------------------------------------------------


def torch_calls(
    torch: Any, entry: Op, c: Case, inputs: Inputs, device: str
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """PyTorch's forward and backward of an entry; the backward repeats on one graph a set, as ours does."""
    compose, sets = entry.torch, inputs.theirs(torch)
    assert compose is not None, "bench_entry asks before"
    turns = itertools.cycle(sets)

    def forward() -> Any:
        with torch.no_grad():
            return compose(torch, *next(turns), **c.kwargs)

    def forward_there() -> Any:
        with torch.device(device):
            return forward()

    wanted = entry.differentiable(c)
    if not wanted:
        return (forward if c.inputs or not accelerator.on_cuda(device) else forward_there), None
    graphs = []
    for index, tensors in enumerate(sets):
        tensors = list(tensors)
        leaves = [tensors[i].detach().requires_grad_() for i in wanted]
        for i, leaf in zip(wanted, leaves):
            tensors[i] = leaf
        roots = [o for o in as_list(compose(torch, *tensors, **c.kwargs)) if o.is_floating_point()]
        graphs.append((roots, inputs.their_seeds(torch, roots, index), leaves))
    return forward, frame.repeated(
        graphs, lambda roots, seeds: torch.autograd.backward(roots, seeds, retain_graph=True)
    )


def our_calls(entry: Op, c: Case, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], Any] | None, int, int]:
    """(forward, backward or None, bytes forward, bytes backward)."""
    turns = itertools.cycle(inputs.ours)
    moved = sum(t.nbytes for t in [*inputs.ours[0], *outputs_of(entry, c, inputs.ours[0])])

    def forward() -> Any:
        return outputs_of(entry, c, next(turns))

    wanted = entry.differentiable(c)
    if not wanted:
        return forward, None, moved, 0
    graphs = []
    for index, tensors in enumerate(inputs.ours):
        tensors = list(tensors)
        leaves = [_C.detach(tensors[i]).requires_grad_() for i in wanted]
        for i, leaf in zip(wanted, leaves):
            tensors[i] = leaf
        outs = outputs_of(entry, c, tensors)
        seeds = inputs.seeds([o for o in outs if o.dtype.is_floating_point], index)
        graphs.append(([o for o in outs if o.requires_grad], seeds, leaves))
    size = sum(t.nbytes for t in [*graphs[0][1], *graphs[0][2]])
    return forward, frame.repeated(graphs, lambda roots, seeds: _C.backward(roots, seeds, True)), moved, size


def bench_entry(
    entry: Op, dtype: str, device: str, torch: Any, copy: float, backends: Sequence[str | None]
) -> list[dict[str, Any]]:
    """One record a backend."""
    cuda = accelerator.on_cuda(device)
    c = sizes.bench_case(entry, device)
    inputs = CudaInputs(entry, c, dtype, device) if cuda else HostInputs(entry, c, dtype)
    wait = accelerator.waiter(device, torch)
    records = []
    for backend in backends:
        with judge.using(entry, backend):
            forward, backward, *counts = our_calls(entry, c, inputs)
            calls = {("forward", "xtrain"): forward, ("backward", "xtrain"): backward}
            if torch is not None and entry.torch is not None:
                theirs = torch_calls(torch, entry, c, inputs, device)
                calls |= {("forward", "PyTorch"): theirs[0], ("backward", "PyTorch"): theirs[1]}
                del theirs
            # Forward and backward apart: contenders take turns with their like.
            times: dict[tuple[str, str], list[float]] = {}
            for pass_ in ("forward", "backward"):
                times |= frame.measure({k: f for k, f in calls.items() if k[0] == pass_ and f is not None}, wait)
            del forward, backward, calls  # and the memory of their graphs, before the next backend's
        record: dict[str, Any] = {"op": entry.id, "inputs": c.id, "dtype": dtype, "backend": backend}
        if cuda:
            record["sets"] = len(inputs.ours)
        for pass_, count in zip(("forward", "backward"), counts):
            if (pass_, "xtrain") not in times:
                continue
            measured = frame.summary(times[pass_, "xtrain"])
            found: dict[str, Any] = {**measured, "bytes": count, "gb_per_s": None, "percent_of_copy": None}
            found["x_pytorch"] = None
            if entry.op not in sizes.VIEWS and count >= 1 << 20:
                found["gb_per_s"] = count / (measured["ms"] * 1e6)
                found["percent_of_copy"] = 100 * found["gb_per_s"] / copy
            if (pass_, "PyTorch") in times:
                found["x_pytorch"] = frame.summary(times[pass_, "PyTorch"])["ms"] / measured["ms"]
            record[pass_] = found
        records.append(record)
    return records


def shown(inputs: str) -> str:
    return inputs if len(inputs) <= 40 else inputs[:37] + "..."


def row(record: dict[str, Any]) -> list[str]:
    cells = [record["op"], shown(record["inputs"]), record["dtype"], record["backend"] or ""]
    for pass_ in ("forward", "backward"):
        found = record.get(pass_)
        if found is None:
            cells += ["", "", "", ""]
            continue
        values = [found["gb_per_s"], found["percent_of_copy"], found["x_pytorch"]]
        formats = ("{:.1f}", "{:.0f}", "{:.2f}")
        cells += [f"{found['ms']:.4g}", *(f.format(v) if v is not None else "" for f, v in zip(formats, values))]
    return cells


def command(values: dict[str, Any]) -> int:
    """Measure and print; 0."""
    device = frame.choose_device(values["device"])
    known = list(dict.fromkeys(entry.op for entry in TABLE))
    ops = frame.choose("op", values["op"], known, known)
    dtypes = frame.choose("dtypes", values["dtypes"], FLOATS, FLOATS)
    if values["op"] is not None:
        check_dtypes("dtypes", ops, dtypes, FLOATS)
    frame.check_output("json", values["json"])
    frame.check_plot(values["plot"])
    frame.check_different("json", values["json"], "plot", values["plot"])
    frame.check_threads(values["threads"], device)
    cuda = accelerator.on_cuda(device)
    torch = accelerator.find_torch(peers.find_torch(_C.get_num_threads()), device)
    facts = frame.machine(device)
    facts["torch"] = torch.__version__ if torch is not None else None
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if torch is not None else ", no PyTorch here"))
    state = _C.get_rng_state()
    records: list[dict[str, Any]] = []
    with contextlib.ExitStack() as restored:
        restored.callback(_C.set_rng_state, state)
        if cuda:
            restored.enter_context(accelerator.precision(False, torch))
            restored.enter_context(accelerator.default_device(device))
        usable = set(accelerator.usable(_C.gemm_backends(_C.device(device)), device, False)[0]) if cuda else None

        def backends(entry: Op) -> list[str | None]:
            names = [name for name in judge.backends(entry, device) if name != "naive"]
            return [n for n in names if n in usable] if usable is not None and entry.selects == "gemm" else names

        copy = copy_rate(device, torch)
        accelerator.release(device, torch)
        facts["copy"] = copy
        moved = "1 GiB" if cuda else f"{sizes.TOKENS} x {sizes.WIDTH} float32"
        print(
            f"a copy moves {copy['gb_per_s']:.1f} GB/s (by {copy['by']}, read and written, {moved}); medians of up to "
            f"{frame.TURNS_ON_DEVICE if cuda else frame.TURNS} turns, random data"
        )
        entries = [(dtype, entry) for dtype in dtypes for entry in entries_of(ops, dtype)]
        named = [[e.id for _, e in entries], [shown(sizes.bench_case(e, device).id) for _, e in entries], dtypes]
        selected = [name or "" for _, e in entries for name in backends(e)]
        table = frame.Table(HEADER, [*map(frame.longest, [*named, selected])], right=range(4, 12))
        for dtype, entry in entries:
            for record in bench_entry(entry, dtype, device, torch, copy["gb_per_s"], backends(entry)):
                table.add(row(record))
                records.append(record)
            accelerator.release(device, torch)
    if values["json"] is not None:
        frame.write_json(values["json"], {"machine": facts, "records": records})
        print(f"written: {values['json']}")
    if values["plot"] is not None:
        from .plot import plot_ops

        plot_ops(values["plot"], facts, records)
        print(f"written: {values['plot']}")
    return 0
