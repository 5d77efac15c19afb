"""The table of planted faults: each is a small wrong edit of one file, the promise that it breaks, and the tests that must fail."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

FORWARD = "tests/ops/test_ops.py::test_forward -k "
GRADIENT = "tests/ops/test_ops.py::test_gradient_float64 -k "
STRIDES = "tests/ops/test_ops.py::test_strides -k "
BITS = "tests/ops/test_ops.py::test_same_bits -k "
CLAUSES = "tests/ops/test_clauses.py::"
CHANGED = "tests/ops/test_picking.py::test_what_another_thread_changes_leads_nowhere_else"

# In this order, which is that of the rooms; a file each beside this one. The suite plants the first of each, which compiles quickly.
ROOMS = (
    "kernels", "layers", "ops", "tape", "core", "binding", "saving", "data", "training", "optim", "modules", "models", "clauses",
    "promises", "edges", "tensors", "tuning", "runtime", "gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """`there` is in `file` exactly once, and `instead` takes its place. tests: arguments of pytest, node ids and -k, as few and fast as
    possible; one failing test is enough. Where a fault makes them wait for ever, they need a limit of their own."""

    name: str
    file: str
    there: str
    instead: str
    promise: str
    tests: str

    @property
    def gpu(self) -> bool:
        """Whether it takes a GPU, and nvcc, to build the fault and to see it."""
        return self.file.startswith("cuda/")


def table() -> list[Fault]:
    """All faults, room by room."""
    return [fault for room in ROOMS for fault in importlib.import_module(f"faults.{room}").FAULTS]
