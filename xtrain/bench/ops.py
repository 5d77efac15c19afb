"""`xtrain bench ops`: every op of the op table, forward and backward, in GB/s beside a measured copy.

Bytes are those that any implementation has to move: inputs and results forward, upstream gradients and gradients
backward. What an op reads again (a backward its inputs, for example) counts as time, not as bytes, and so does the copy
that in-place entries of the table make of their input. A copy of 24 MiB, the faster one of xtrain's and NumPy's, is
measured in the same run; "% of copy" is the part of its rate that an op reaches. Products and attention are bound by
arithmetic: `xtrain bench gemm` compares their backends; the naive product, which needs seconds, is left out here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _C
from ..optable import TABLE, judge, sizes
from ..optable.table import FLOATS, Case, Op, as_list, outputs_of, tensor, upstream
from . import frame, peers

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


def copy_rate(device: str) -> dict[str, Any]:
    """GB/s, read and written, of copying one activation: by xtrain's kernel, and by NumPy on the host."""
    source = np.random.default_rng(0).standard_normal(sizes.ACTIVATION, dtype=np.float32)
    target, ours = np.empty_like(source), tensor(source, None, device)
    result = _C.clone(ours)
    calls: dict[str, Callable[[], Any]] = {"xtrain": lambda: _C.copy_(result, ours)}
    if device == "cpu":
        calls["NumPy"] = lambda: np.copyto(target, source)
    rates = {name: 2 * source.nbytes / statistics.median(t) / 1e9 for name, t in frame.measure(calls).items()}
    best = max(rates, key=lambda name: rates[name])
    return {"gb_per_s": rates[best], "by": best, "all": rates}


def torch_calls(
    torch: Any, entry: Op, c: Case, arrays: list[np.ndarray], dtype: str, device: str, dys: list[np.ndarray]
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """PyTorch's forward and backward of an entry; the backward repeats on one graph, as ours does."""
    tensors = [torch.tensor(a).to(device) for a in arrays]
    tensors = [t.to(getattr(torch, dtype)) if t.is_floating_point() else t for t in tensors]

    def forward() -> Any:
        with torch.no_grad():
            return entry.torch(torch, *tensors, **c.kwargs)

    if not entry.differentiable(c):
        return forward, None
    leaves = [tensors[i].detach().requires_grad_() for i in entry.differentiable(c)]
    for i, leaf in zip(entry.differentiable(c), leaves):
        tensors[i] = leaf
    roots = [o for o in as_list(entry.torch(torch, *tensors, **c.kwargs)) if o.is_floating_point()]
    seeds = [torch.tensor(dy).to(device=device, dtype=o.dtype) for dy, o in zip(dys, roots)]

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(roots, seeds, retain_graph=True)

    return forward, backward


def our_calls(
    entry: Op, c: Case, arrays: list[np.ndarray], dtype: str, device: str
) -> tuple[Callable[[], Any], Callable[[], Any] | None, int, int, list[np.ndarray]]:
    """(forward, backward or None, bytes forward, bytes backward, upstream gradients)."""
    tensors = [tensor(a, dtype, device) for a in arrays]
    outs = outputs_of(entry, c, tensors)
    floats = [o for o in outs if o.dtype.is_floating_point]
    dys = upstream(floats, dtype, entry.id) if entry.differentiable(c) else []
    moved = sum(t.nbytes for t in [*tensors, *outs])

    def forward() -> Any:
        return outputs_of(entry, c, tensors)

    if not entry.differentiable(c):
        return forward, None, moved, 0, dys
    leaves = [_C.detach(tensors[i]).requires_grad_() for i in entry.differentiable(c)]
    inputs = list(tensors)
    for i, leaf in zip(entry.differentiable(c), leaves):
        inputs[i] = leaf
    roots = [o for o in outputs_of(entry, c, inputs) if o.requires_grad]
    seeds = [_C.cast(tensor(dy, "float64", device), o.dtype) for dy, o in zip(dys, floats)]

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        _C.backward(roots, seeds, True)

    return forward, backward, moved, sum(t.nbytes for t in [*seeds, *leaves]), dys


def bench_entry(entry: Op, dtype: str, device: str, torch: Any, copy: float) -> list[dict[str, Any]]:
    """One record a backend."""
    c = sizes.bench_case(entry)
    arrays = entry.draw(c, dtype, "bench")
    if dtype not in FLOATS:
        arrays = [a.astype(dtype) for a in arrays]
    records = []
    for backend in judge.backends(entry, device):
        if backend == "naive":
            continue
        with judge.using(entry, backend):
            forward, backward, *counts, dys = our_calls(entry, c, arrays, dtype, device)
            calls = {("forward", "xtrain"): forward, ("backward", "xtrain"): backward}
            if torch is not None and entry.torch is not None:
                theirs = torch_calls(torch, entry, c, arrays, dtype, device, dys)
                calls |= {("forward", "PyTorch"): theirs[0], ("backward", "PyTorch"): theirs[1]}
            # Forward and backward apart: contenders take turns with their like.
            times: dict[tuple[str, str], list[float]] = {}
            for pass_ in ("forward", "backward"):
                times |= frame.measure({k: call for k, call in calls.items() if k[0] == pass_ and call is not None})
        record: dict[str, Any] = {"op": entry.id, "inputs": c.id, "dtype": dtype, "backend": backend}
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
    frame.check_output("json", values["json"])
    frame.check_plot(values["plot"])
    frame.check_different("json", values["json"], "plot", values["plot"])
    frame.check_threads(values["threads"])
    torch = peers.find_torch(_C.get_num_threads())
    if torch is not None and device != "cpu" and not torch.cuda.is_available():
        torch = None
    facts = frame.machine(device)
    facts["torch"] = torch.__version__ if torch is not None else None
    print(frame.headline(facts) + (f", PyTorch {facts['torch']}" if torch is not None else ", no PyTorch here"))
    copy = copy_rate(device)
    facts["copy"] = copy
    print(
        f"a copy moves {copy['gb_per_s']:.1f} GB/s (by {copy['by']}, read and written, "
        f"{sizes.TOKENS} x {sizes.WIDTH} float32); medians of up to {frame.TURNS} turns, random data"
    )
    state = _C.get_rng_state()
    entries = [(dtype, entry) for dtype in dtypes for entry in entries_of(ops, dtype)]
    named = [[e.id for _, e in entries], [shown(sizes.bench_case(e).id) for _, e in entries], dtypes]
    backends = [name or "" for _, e in entries for name in judge.backends(e, device) if name != "naive"]
    table = frame.Table(HEADER, [*map(frame.longest, [*named, backends])], right=range(4, 12))
    records: list[dict[str, Any]] = []
    try:
        for dtype, entry in entries:
            for record in bench_entry(entry, dtype, device, torch, copy["gb_per_s"]):
                table.add(row(record))
                records.append(record)
    finally:
        _C.set_rng_state(state)
    if values["json"] is not None:
        frame.write_json(values["json"], {"machine": facts, "records": records})
        print(f"written: {values['json']}")
    if values["plot"] is not None:
        from .plot import plot_ops

        plot_ops(values["plot"], facts, records)
        print(f"written: {values['plot']}")
    return 0
