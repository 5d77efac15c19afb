"""Which implementation runs a matrix product or an attention: named per device, chosen by `with` or by argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import _C, cuda

if TYPE_CHECKING:
    from typing_extensions import Self


def gemm_backends(device: _C.device | str = "cpu") -> list[str]:
    """Names of the matrix products that `device` can run here; "auto" picks the first. "cublas" takes cuBLASLt."""
    return _C.gemm_backends(device)


def attention_backends(device: _C.device | str = "cpu") -> list[str]:
    """Names of the attention implementations of `device`; the first is what "auto" picks."""
    return _C.attention_backends(device)


class _UseBackend:
    """`with use_...(name):` selects a backend by name in this thread; None or "auto" gives the choice back.

    ValueError when no device has a backend of that name.
    """

    _names: Callable[[str], list[str]]
    _select: Callable[[str | None], str | None]

    def __init__(self, name: str | None) -> None:
        known = self._names("cpu")
        if name not in (None, "auto", *known) and cuda.is_available():
            known = [*known, *(found for found in self._names("cuda") if found not in known)]
        if name not in (None, "auto", *known):
            raise ValueError(f"{type(self).__name__}: name must be one of auto, {', '.join(known)}, got {name!r}")
        self.name: str | None = None if name == "auto" else name
        self._previous: list[str | None] = []

    def __enter__(self) -> Self:
        self._previous.append(self._select(self.name))
        return self

    def __exit__(self, *_: object) -> None:
        self._select(self._previous.pop())


class use_gemm_backend(_UseBackend):
    __doc__ = _UseBackend.__doc__
    _names, _select = staticmethod(gemm_backends), staticmethod(_C.use_gemm_backend)


class use_attention_backend(_UseBackend):
    __doc__ = _UseBackend.__doc__
    _names, _select = staticmethod(attention_backends), staticmethod(_C.use_attention_backend)


def set_float32_matmul_precision(precision: str) -> None:
    """Choose how float32 matrix products are computed on devices with TF32 units.

    "highest" (the default): in float32. "high" or "medium": with operands rounded to TF32 (10 bits of mantissa),
    several times faster. ValueError for other words.
    """
    if precision not in ("highest", "high", "medium"):
        raise ValueError(
            f"set_float32_matmul_precision: precision must be 'highest', 'high' or 'medium', got {precision!r}"
        )
    _C.allow_tf32(precision != "highest")


def get_float32_matmul_precision() -> str:
    """Return "high" when float32 matrix products may use TF32 units, else "highest"."""
    return "high" if _C.tf32() else "highest"
