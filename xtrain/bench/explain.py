"""Which implementation computes a product or an attention, and why those before it in the table do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import _C
from ..errors import ConfigError

Rows = list[tuple[str, str, str | None]]  # name, kernel, why it does not support the problem


def of_product(sizes: Sequence[int], dtype: str, layout: str, device: str, backend: str | None = None) -> Rows:
    """For a dense product of M x N x K; "tf32" is float32 that may use TF32 units."""
    kind = "float32" if dtype == "tf32" else dtype
    return _C.explain_gemm(sizes, kind, layout=layout, tf32=dtype == "tf32", device=device, backend=backend)


def of_attention(sizes: Sequence[int], dtype: str, backward: bool, device: str, backend: str | None = None) -> Rows:
    """For B, H, K, S, D; heads lie between the rows, as a projection leaves them."""
    b, h, kv, s, d = sizes
    kind = "float32" if dtype == "tf32" else dtype
    strides = (s * h * d, d, h * d, s * kv * d, d, kv * d)
    return _C.explain_attention(
        (b, h, kv, s, s, d), kind, backward, strides, tf32=dtype == "tf32", device=device, backend=backend
    )


def chosen(rows: Rows) -> str:
    """The kernel that computes."""
    return next(kernel for _, kernel, reason in rows if reason is None)


def check_options(values: Mapping[str, Any]) -> None:
    """ConfigError for files of numbers, of which there are none."""
    for name in ("json", "plot"):
        if values.get(name) is not None:
            raise ConfigError(f"--{name} must be left out with --explain, which measures nothing, got {values[name]!r}")


def lines(problem: str, rows: Rows) -> list[str]:
    """The problem with what is chosen, then a line for it and for each before it: name, yes or no, why not."""
    until = next(i for i, (_, _, reason) in enumerate(rows) if reason is None)
    width = max(len(kernel) for _, kernel, _ in rows)
    text = [f"{problem}: {rows[until][1]}"]
    for _, kernel, reason in rows[: until + 1]:
        text.append(f"  {kernel:<{width}}  {'yes' if reason is None else f'no   {reason}'}")
    return text


def _summary_of(explain: Callable[[str], Rows], dtypes: Iterable[str]) -> str:
    try:
        return summary(dtypes, [chosen(explain(dtype)) for dtype in dtypes])
    except ValueError as error:  # XTRAIN_GEMM or XTRAIN_ATTENTION may name what this device has not
        return str(error)


def summary(dtypes: Iterable[str], kernels: Iterable[str]) -> str:
    """flash for float32; flash_half for bfloat16, float16"""
    of: dict[str, list[str]] = {}
    for dtype, kernel in zip(dtypes, kernels):
        of.setdefault(kernel, []).append(dtype)
    return "; ".join(f"{kernel} for {', '.join(names)}" for kernel, names in of.items())


def usual(device: str) -> list[tuple[str, str]]:
    """(problem, what is chosen) of a layer of a 124M model with 8 x 1024 tokens, for every dtype."""
    dtypes = ("float32", "bfloat16", "float16", "float64")
    product, sizes = (8192, 3072, 768), (8, 12, 12, 1024, 64)
    attention = "attention 8x12x12x1024x64"
    problems: dict[str, Callable[[str], Rows]] = {
        "product 8192x3072x768:nt": lambda dtype: of_product(product, dtype, "nt", device),
        f"{attention} forward": lambda dtype: of_attention(sizes, dtype, False, device),
        f"{attention} backward": lambda dtype: of_attention(sizes, dtype, True, device),
    }
    return [(problem, _summary_of(explain, dtypes)) for problem, explain in problems.items()]
