"""Entries of the op table: tokens that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C
from .references import sample
from .table import Case, Distinct, Error, Ids, N, Spec, T, Ties, V, case, f32, i64, op

_RANDOM = Ids(0, 1 << 40, 2)  # a seed and a step


def _sample_cases() -> list[Case]:
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 5}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 1e-9},
        {"top_k": 40, "top_p": 0.5}, {"top_k": 1500, "top_p": 0.9}, {"top_k": 1 << 40, "temperature": 3.0},
    ]  # fmt: skip
    shapes: list[Spec] = [N(3, 1), N(3, 33), Ties(2, 257), Distinct(2, 50), N(2, 3001), Ties(2, 2100), N(0, 5)]
    cases = [case(shape, _RANDOM, **each) for shape in shapes for each in options]
    return cases + [case(N(9, 20001), _RANDOM, big=True, **each) for each in (options[0], options[5], options[7])]


op(
    "sample",
    "sample",
    _sample_cases(),
    _C.sample,
    lambda x, random, **options: sample(x, np.asarray(random), **options),
    out_dtype="int64",
    accumulations=0,
    roundings=0,
    errors=(
        Error(lambda: _C.sample(i64(2, 3), i64(2)), T, r"sample: logits must have a floating point dtype, got int64"),
        Error(lambda: _C.sample(f32(3), i64(2)), V, r"sample: logits must have 2 dims?.*\(3,\)"),
        Error(lambda: _C.sample(f32(2, 0), i64(2)), V, r"sample: logits must have 1 to 4194304 columns, got 0"),
        Error(lambda: _C.sample(f32(2, 3), f32(2)), T, r"sample: random must have dtype int64, got float32"),
        Error(lambda: _C.sample(f32(2, 3), i64(3)), V, r"sample: random must have shape \(2,\), got \(3,\)"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), -1.0), V, r"sample: temperature must be at least 0 .*, got -1"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), float("inf")), V, r"sample: temperature must be .* finite, got inf"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, 0), V, r"sample: top_k must be at least 1, got 0"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, None, 0.0), V, r"sample: top_p must be in \(0, 1\], got 0"),
        Error(lambda: _C.sample(f32(2, 3), i64(2), 1.0, None, 1.5), V, r"sample: top_p must be in \(0, 1\], got 1.5"),
    ),
)  # fmt: skip
