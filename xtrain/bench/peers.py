"""The libraries that xtrain's matrix products are measured against, with the same number of threads."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class NumPyBlas:
    """NumPy's BLAS: which kernels it runs, and how many threads it uses, where it can be asked.

    Only OpenBLAS can; for another BLAS `core` is its name, and its threads stay as the environment set them.
    """

    def __init__(self) -> None:
        self._library = None
        package = Path(np.__file__).parent
        folders = [package.parent / "numpy.libs", package / ".dylibs"]
        for path in sorted(path for folder in folders if folder.is_dir() for path in folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))  # already loaded by NumPy: this is the same copy
            if self._find(library, "get_corename") is not None:
                self._library = library
                break

    @staticmethod
    def _find(library: Any, name: str) -> Any:
        for prefix in ("scipy_openblas_", "openblas_"):
            for suffix in ("64_", ""):
                function = getattr(library, prefix + name + suffix, None)
                if function is not None:
                    return function
        return None

    @property
    def core(self) -> str:
        """The OpenBLAS core in use (Haswell, SkylakeX, ...), else the name of the library."""
        if self._library is None:
            blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
            return str(blas.get("name", "unknown"))
        function = self._find(self._library, "get_corename")
        function.restype = ctypes.c_char_p
        return function().decode()

    def set_threads(self, count: int) -> None:
        function = self._find(self._library, "set_num_threads") if self._library is not None else None
        if function is not None:
            function(ctypes.c_int(count))


def xtrain_core(config: str) -> str:
    """The OpenBLAS core of xtrain's own copy, from build_info()["blas"]: `... NO_AFFINITY SkylakeX MAX_THREADS=64`."""
    words = config.split()
    at = next((i for i, word in enumerate(words) if word.startswith("MAX_THREADS")), len(words))
    return words[at - 1] if words else "unknown"


def cores_line(ours: str, theirs: str) -> str:
    """Which kernels each side runs, and how to make them the same: OpenBLAS chooses per copy, when it is loaded."""
    line = f"BLAS kernels: xtrain {ours}, NumPy {theirs}"
    if ours == theirs:
        return line
    return (
        f"{line}; for the same kernels set XTRAIN_BLAS_CORE={theirs} (xtrain's copy) or OPENBLAS_CORETYPE={ours} "
        "(NumPy's copy)"
    )


def find_torch(threads: int) -> Any:
    """PyTorch with this number of threads, or None. xtrain never needs it, so it is no import of the package."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    return torch


def numpy_product(dtype: str, a: np.ndarray, b: np.ndarray) -> Callable[[], np.ndarray] | None:
    """a @ b in a format that NumPy's BLAS computes; a and b are views in the layout that is measured."""
    if dtype not in ("float32", "float64"):
        return None
    return lambda: a @ b


def torch_product(torch: Any, dtype: str, a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """PyTorch's product on the CPU of the values of two arrays."""
    kind = getattr(torch, dtype)
    # from_numpy keeps the strides, .to() keeps the order of the dimensions
    return torch_call(torch, *(torch.from_numpy(x).to(kind) for x in (a, b)))


def torch_call(torch: Any, ta: Any, tb: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return torch.matmul(ta, tb)

    return call
