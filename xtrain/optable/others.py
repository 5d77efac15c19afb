"""Kernels that are no op, or have checks of another kind, for `xtrain check`; tests/ops tries them further."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _C
from .identities import check as identities
from .table import FLOATS, array, tensor


def _values(dtype: str) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((33, 257))
    x[3, 5], x[4, 6], x[7, 7] = np.nan, np.inf, -np.inf
    return x


def stats(device: str) -> str:
    """Minimum, maximum, mean of the finite elements, counts of NaN and Inf, of dense and strided tensors."""
    for dtype in FLOATS:
        t = tensor(_values(dtype), dtype, device)
        for view in (t, _C.transpose(t, 0, 1), _C.slice(t, 1, 1, 257, 3)):
            values = array(view)
            finite = values[np.isfinite(values)]
            low, high, mean, nans, infs = _C.stats(view)
            if (nans, infs) != (np.isnan(values).sum(), np.isinf(values).sum()):
                return f"counted {nans} NaN and {infs} Inf in {dtype}"
            if (low, high) != (finite.min(), finite.max()):
                return f"range {low} to {high} in {dtype}, expected {finite.min()} to {finite.max()}"
            if not abs(mean - finite.mean()) <= len(finite) * 2.0**-53 * np.abs(finite).mean():
                return f"mean {mean} in {dtype}, expected {finite.mean()}"
    return ""


def compare(device: str) -> str:
    """One planted difference, one NaN and one infinity among equal elements: found, counted and placed."""
    for dtype in FLOATS:
        a = _values(dtype)
        ours, same = tensor(a, dtype, device), tensor(a, dtype, device)
        found = _C.compare(ours, same, 0.0, 0.0)
        if (found["errors"], found["out_nan"], found["out_inf"]) != (1, 1, 2) or found["max_abs"] != 0:
            return f"equal tensors of {dtype} compare as {found}"
        a[3, 5] = 0.0
        b = a.copy()
        b[20, 100] += 1.0
        left, right = tensor(a, dtype, device), tensor(b, dtype, device)
        found = _C.compare(_C.transpose(left, 0, 1), _C.transpose(right, 0, 1), 0.0, 0.25)
        want = abs(array(left)[20, 100] - array(right)[20, 100])
        if (found["errors"], found["worst"]) != (1, 100 * 33 + 20) or not math.isclose(found["max_abs"], want):
            return f"one difference of {want} in {dtype} compares as {found}"
    return ""


def documents(device: str) -> str:
    """Right bounds are taken; each change of one bound of the second row by 1 is refused, with that row."""
    right = np.array([[[0, 0, 0], [3, 3, 3]], [[0, 1, 1], [1, 3, 3]]], np.int32)
    changes = [None, *((side, token, step) for side in (0, 1) for token in range(3) for step in (-1, 1))]
    for change in changes:
        bounds = right.copy()
        if change is not None:
            side, token, step = change
            bounds[1, side, token] += step
        want, found = "" if change is None else "of row 1", ""
        try:
            _C.check_documents(_C.tensor(bounds, device=device))
            if _C.device(device).type == "cuda":
                _C.synchronize(_C.device(device))
        except ValueError as error:
            found = str(error)
        if bool(found) != bool(want) or not found.endswith(want):
            return f"documents with {change} changed are answered by {found!r}"
    return ""


# slot -> (the test in tests/ops/test_ops.py that exercises it, a check that returns what is wrong or "")
OTHER_KERNELS: dict[str, tuple[str, Any]] = {
    "stats": ("test_stats", stats),
    "compare": ("test_compare", compare),
    "attention_documents": ("test_documents", documents),
    "mhc_pre_bwd": ("test_mhc_identities", identities),  # an op, too: this is what needs no reference
}
