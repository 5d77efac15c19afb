"""`xtrain check`: proves every kernel right on this machine, with the op table that the tests use.

Forward: every op, dtype and backend against a NumPy reference in float64. Backward: the float64 gradient against
difference quotients of that reference, the lower formats' gradients against the float64 gradient of the plainest
backend on the same numbers. Every number is an error as a part of its computed tolerance: above 1 is wrong.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _C
from ..errors import ConfigError
from ..optable import OTHER_KERNELS, TABLE, judge
from ..optable.table import (
    FLOATS,
    INTS,
    Case,
    Op,
    array,
    gradients,
    outputs_of,
    references_of,
    tensor,
    upstream,
)
from ..optable.table import judge as compare
from . import frame

OPTIONS = {"op": None, "dtype": None, "device": "cpu", "threads": 0, "json": None}
DTYPES = (*FLOATS, *INTS, "bool")


@dataclass
class Row:
    """What was found for one op, dtype and backend over all its cases."""

    op: str
    dtype: str
    backend: str | None
    cases: int = 0
    forward: float = 0.0
    backward: float | None = None
    worst_case: str = ""
    milliseconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, where: str, ratio: float, wrong: str) -> None:
        if not ratio <= max(self.forward, self.backward or 0.0):
            self.worst_case = where
        if kind == "forward":
            self.forward = max(self.forward, ratio)
        else:
            self.backward = max(self.backward or 0.0, ratio)
        if wrong:
            self.problems.append(f"{kind}, {where}: {wrong}")


def raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}"


class Checker:
    """Runs one entry of the table; what backends share (references, slopes, float64 gradients) is computed once.

    Entries without inputs (creation) make their tensors on the CPU, whatever the device.
    """

    def __init__(self, entry: Op, device: str) -> None:
        self.entry, self.device = entry, device
        self.backends = judge.backends(entry, device)
        self.slopes: dict[str, Any] = {}

    def rows(self, dtypes: Sequence[str]) -> Iterator[Row]:
        for dtype in self.entry.dtypes:
            if dtype not in dtypes:
                continue
            rows = [Row(self.entry.op, dtype, backend) for backend in self.backends]
            for c in self.entry.cases:
                self.case(c, dtype, rows)
            yield from rows

    def case(self, c: Case, dtype: str, rows: list[Row]) -> None:
        entry = self.entry
        arrays = entry.draw(c, dtype)
        if dtype not in FLOATS:
            arrays = [a.astype(dtype) for a in arrays]
        refs = references_of(entry, c, arrays)
        tolerances: dict[tuple[int, str], Any] = {}
        where = f"{entry.variant} {c.id}" if entry.variant else c.id
        shared: dict[str, Any] | None = None
        if dtype in FLOATS and entry.differentiable(c):
            try:
                shared = self.reference_gradients(c, dtype, arrays)
            except Exception as error:
                rows[-1].add("backward", where, np.inf, raised(error))
        for row in rows:
            row.cases += 1
            begun = time.perf_counter()
            with judge.using(entry, row.backend):
                kind = "forward"
                try:
                    self.forward(c, dtype, arrays, refs, tolerances, row, where)
                    if shared is not None:
                        kind = "backward"
                        self.backward(c, dtype, arrays, shared, row, where)
                except Exception as error:
                    row.add(kind, where, np.inf, raised(error))
            row.milliseconds += (time.perf_counter() - begun) * 1e3

    def forward(
        self,
        c: Case,
        dtype: str,
        arrays: list[np.ndarray],
        refs: list[np.ndarray],
        tolerances: dict[tuple[int, str], Any],
        row: Row,
        where: str,
    ) -> None:
        outs = outputs_of(self.entry, c, [tensor(a, dtype, self.device) for a in arrays])
        if len(outs) != len(refs):
            row.add("forward", where, np.inf, f"{len(outs)} results, expected {len(refs)}")
            return
        for i, (out, ref) in enumerate(zip(outs, refs)):
            name = judge.result_dtype(self.entry, out, dtype)
            if out.dtype.name != name:
                row.add("forward", where, np.inf, f"result {i} has dtype {out.dtype.name}, expected {name}")
            elif not out.dtype.is_floating_point:
                got = array(out)
                right = got.shape == ref.shape and np.array_equal(got, ref.astype(got.dtype))
                row.add("forward", where, 0.0 if right else np.inf, "" if right else f"result {i} is not equal")
            else:
                if (i, name) not in tolerances:
                    tolerances[i, name] = judge.forward_tolerance(self.entry, c, arrays, refs, i, dtype, name)
                row.add("forward", where, *compare(array(out), ref, tolerances[i, name]))

    def backward(
        self, c: Case, dtype: str, arrays: list[np.ndarray], shared: dict[str, Any], row: Row, where: str
    ) -> None:
        """float64 is compared with slopes; what is lower with the float64 gradient, which is itself compared first."""
        for i, ratio, wrong in shared["judged"]:
            row.add("backward", where, ratio, wrong and f"float64 gradient of input {i}: {wrong}")
        got = gradients(self.entry, c, arrays, dtype, shared["dys"], self.device)[1]
        if dtype == "float64":
            for i, ratio, wrong in self.against_slopes(c, arrays, shared["dys"], got, shared["slopes"]):
                row.add("backward", where, ratio, wrong and f"gradient of input {i}: {wrong}")
            return
        for i in self.entry.differentiable(c):
            if got[i] is None or got[i].dtype.name != dtype:
                row.add("backward", where, np.inf, f"input {i} got no gradient in {dtype}")
                continue
            want = shared["wants"][i]
            limit = judge.gradient_tolerance(self.entry, c, arrays, shared["dys"], want, dtype, i)
            ratio, wrong = compare(array(got[i]), want, limit)
            row.add("backward", where, ratio, wrong and f"gradient of input {i}: {wrong}")

    def reference_gradients(self, c: Case, dtype: str, arrays: list[np.ndarray]) -> dict[str, Any]:
        """Upstream gradients; for float64 the slopes, for the rest the float64 gradients and how they were judged."""
        entry = self.entry
        plain = self.backends[-1]
        with judge.using(entry, plain):
            outs = outputs_of(entry, c, [tensor(a, dtype, self.device) for a in arrays])
            dys = upstream([o for o in outs if o.dtype.is_floating_point], dtype, entry.id + c.id)
            found: dict[str, Any] = {"dys": dys, "judged": []}
            if dtype == "float64":
                found["slopes"] = self.slopes_of(c, arrays, dys)
            else:
                found["wants"] = [
                    None if g is None else array(g) for g in gradients(entry, c, arrays, "float64", dys, self.device)[1]
                ]
                if c.id not in self.slopes:  # float64 was not asked for: prove what the others are compared with
                    exact = entry.draw(c, "float64")
                    slopes = self.slopes_of(c, exact, dys)
                    got = gradients(entry, c, exact, "float64", dys, self.device)[1]
                    found["judged"] = list(self.against_slopes(c, exact, dys, got, slopes))
        return found

    def slopes_of(self, c: Case, arrays: list[np.ndarray], dys: list[np.ndarray]) -> dict[int, list[judge.Slope]]:
        rng = np.random.default_rng(zlib.crc32(f"{self.entry.id}/{c.id}/slopes".encode()))
        self.slopes[c.id] = judge.slopes(self.entry, c, arrays, dys, rng) if c.fd else {}
        return self.slopes[c.id]

    def against_slopes(
        self,
        c: Case,
        arrays: list[np.ndarray],
        dys: list[np.ndarray],
        got: list[Any],
        slopes: dict[int, list[judge.Slope]],
    ) -> Iterator[tuple[int, float, str]]:
        for i in self.entry.differentiable(c):
            if got[i] is None or got[i].shape != arrays[i].shape or not np.isfinite(array(got[i])).all():
                yield i, np.inf, "missing, of another shape, or not finite"
                continue
            element = judge.gradient_tolerance(self.entry, c, arrays, dys, array(got[i]), "float64", i)
            for slope in slopes.get(i, ()):
                yield i, *judge.judge_slope(slope, got[i], element)


# ---- coverage --------------------------------------------------------------------------------------------------------


def uncovered(device: str, ops: Sequence[str] | None = None) -> list[str]:
    """Ops (all, or some) and kernel slots without an entry, and kernels that the device lacks."""
    entries = {entry.op for entry in TABLE}
    wanted = list(_C.op_signatures()) if ops is None else ops
    problems = [f"op {name} has no entry in the op table" for name in wanted if name not in entries]
    if ops is not None:
        return problems
    covered = {slot for entry in TABLE for slot in entry.kernels} | set(OTHER_KERNELS)
    for slot, present in _C.kernels(_C.device(device)).items():
        if slot not in covered:
            problems.append(f"kernel {slot} has no entry in the op table")
        if not present:
            problems.append(f"kernel {slot} is missing on {device}")
    return problems


def check_others(device: str) -> list[Row]:
    """The kernels that are no op."""
    rows = []
    for slot, (_, check) in OTHER_KERNELS.items():
        row, begun = Row(f"({slot})", "all", None, cases=1), time.perf_counter()
        try:
            wrong = check(device)
        except Exception as error:
            wrong = raised(error)
        row.add("forward", slot, np.inf if wrong else 0.0, wrong)
        row.milliseconds = (time.perf_counter() - begun) * 1e3
        rows.append(row)
    return rows


# ---- the command -----------------------------------------------------------------------------------------------------


def merge(rows: list[Row]) -> list[Row]:
    """One row for each op, dtype and backend: the variants of an op belong together."""
    merged: dict[tuple[str, str, str | None], Row] = {}
    for row in rows:
        known = merged.setdefault((row.op, row.dtype, row.backend), row)
        if known is row:
            continue
        if max(row.forward, row.backward or 0.0) > max(known.forward, known.backward or 0.0):
            known.worst_case = row.worst_case
        known.forward = max(known.forward, row.forward)
        if row.backward is not None:
            known.backward = max(known.backward or 0.0, row.backward)
        known.cases += row.cases
        known.milliseconds += row.milliseconds
        known.problems += row.problems
    return list(merged.values())


def ratio_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0e}" if np.isfinite(value) else "inf"


HEADER = ("op", "dtype", "backend", "cases", "forward", "backward", "worst case", "ms")
WORST = 48  # characters of a case that are shown


def cells(row: Row) -> list[str]:
    worst = row.worst_case if len(row.worst_case) <= WORST else row.worst_case[: WORST - 3] + "..."
    name = row.op + (" WRONG" if row.problems else "")
    ratios = [ratio_text(row.forward), ratio_text(row.backward)]
    return [name, row.dtype, row.backend or "", str(row.cases), *ratios, worst, f"{row.milliseconds:.0f}"]


def table_for(ops: Sequence[str], dtypes: Sequence[str], device: str) -> frame.Table:
    """The table for rows of these ops, its header printed."""
    names = [ops, dtypes, [b or "" for e in TABLE if e.op in ops for b in judge.backends(e, device)]]
    return frame.Table(HEADER, [*map(frame.longest, names), 0, 0, 0, WORST, 5], right=(3, 4, 5, 7))


def as_json(row: Row) -> dict[str, Any]:
    record = dict(vars(row))
    for name in ("forward", "backward"):
        value = record[name]
        record[name] = None if value is None else float(value) if np.isfinite(value) else "inf"
    return record


def check_dtypes(option: str, ops: Sequence[str], dtypes: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an op, asked for by name, that would be left out in all of these dtypes. known: what the option takes."""
    for op in ops:
        entries = [entry for entry in TABLE if entry.op == op]
        taken = list(dict.fromkeys(dtype for entry in entries for dtype in entry.dtypes if dtype in known))
        if entries and not taken:
            raise ConfigError(f"--op must be one that takes {', '.join(known[:-1])} or {known[-1]}, got {op}")
        if entries and not set(taken) & set(dtypes):
            raise ConfigError(f"--{option} must hold one that {op} takes ({', '.join(taken)}), got {','.join(dtypes)}")


def check_ops(ops: Sequence[str], dtypes: Sequence[str], device: str, others: bool) -> list[Row]:
    """The rows of these ops, and of the kernels that are no op where `others`; prints the table row by row. The
    generator is left as it was.
    """
    slots = [f"({slot})" for slot in OTHER_KERNELS] if others else []
    table = table_for([*ops, *slots], dtypes, device)
    rows: list[Row] = []

    def show(found: list[Row]) -> None:
        rows.extend(found)
        for row in found:
            table.add(cells(row))

    state = _C.get_rng_state()
    try:
        for op in dict.fromkeys(entry.op for entry in TABLE if entry.op in ops):
            variants = [entry for entry in TABLE if entry.op == op]
            show(merge([row for entry in variants for row in Checker(entry, device).rows(dtypes)]))
    finally:
        _C.set_rng_state(state)
    if others:
        show(check_others(device))
    return rows


def problems_of(rows: list[Row]) -> list[str]:
    """A line for each row that is wrong: its first problem, and how many more it has."""
    problems = []
    for row in rows:
        if row.problems:
            name = " ".join(word for word in (row.op, row.dtype, row.backend) if word)
            more = f" (and {len(row.problems) - 1} more)" if len(row.problems) > 1 else ""
            problems.append(f"{name}: {row.problems[0]}{more}")
    return problems


def command(values: dict[str, Any]) -> int:
    """Check, print, and return the exit status: 1 when anything is wrong."""
    device = frame.choose_device(values["device"])
    known = list(dict.fromkeys([*_C.op_signatures(), *(entry.op for entry in TABLE)]))
    ops = frame.choose("op", values["op"], known, known)
    dtypes = frame.choose("dtype", values["dtype"], DTYPES, DTYPES)
    if values["op"] is not None:
        check_dtypes("dtype", ops, dtypes, DTYPES)
    frame.check_output("json", values["json"])
    frame.check_threads(values["threads"])
    begun = time.perf_counter()
    facts = frame.machine(device)
    print(frame.headline(facts))
    print("error / tolerance of the worst element, forward and backward; above 1.00 is wrong")
    rows = check_ops(ops, dtypes, device, others=values["op"] is None)
    problems = uncovered(device, ops if values["op"] is not None else None) + problems_of(rows)
    cases = sum(row.cases for row in rows)
    if not cases:
        problems.append("no case was checked")
    for problem in problems:
        print(f"wrong: {problem}")
    seconds = time.perf_counter() - begun
    verdict = f"{len(problems)} problems" if problems else "all right"
    count = len({row.op for row in rows})
    print(f"{count} ops and kernels, {cases} cases on {device} in {seconds:.1f} s: {verdict}")
    if values["json"] is not None:
        record = {"machine": facts, "seconds": seconds, "problems": problems, "rows": [as_json(row) for row in rows]}
        frame.write_json(values["json"], record)
        print(f"written: {values['json']}")
    return 1 if problems else 0
