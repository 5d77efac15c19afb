"""Types that many signatures share."""

from __future__ import annotations

from collections.abc import Sequence

from . import _C

DType = _C.dtype | str | None  # a dtype or its name ("float32", "bfloat16", ...); None: the function's default
Device = _C.device | str | None  # a device or its name ("cpu", "cuda", "cuda:1"); None: the function's default
Size = int | Sequence[int]  # of one dimension, or of several
