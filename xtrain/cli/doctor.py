"""`xtrain doctor`: what this installation consists of, whether it computes, and what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import numpy as np

from .. import _C, _backends, cuda
from .._version import __version__
from ..bench import explain
from .parser import simple_options

USAGE = """\
usage: xtrain doctor

Shows versions, CPU, BLAS, devices, and what is missing and how to get it.
"""

# package -> (required, how to get it, what it is for)
_PACKAGES = {
    "numpy": (True, "numpy", "arrays"),
    "tqdm": (True, "tqdm", "the progress bar"),
    "matplotlib": (False, "'xtrain[plot]'", "loss.png"),
    "tokenizers": (False, "'xtrain[hf]'", "text for models with a tokenizer.json"),
    "pyarrow": (False, "'xtrain[data]'", "Parquet files"),
    "jinja2": (False, "'xtrain[chat]'", "chat templates"),
    "ml_dtypes": (False, "ml_dtypes", "bfloat16 to and from NumPy"),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute_check(device: str = "cpu") -> str | None:
    """Run a small matrix product on every backend of a device against NumPy; None when all agree."""
    random = np.random.default_rng(0)
    a, b = random.integers(-8, 8, (65, 33)).astype(np.float32), random.integers(-8, 8, (33, 17)).astype(np.float32)
    for backend in _backends.gemm_backends(device):
        try:
            product = _C.matmul(_C.tensor(a, device=device), _C.tensor(b, device=device), backend=backend)
        except (RuntimeError, MemoryError) as error:
            return f"the {backend} matrix product fails: {error}"
        if not np.array_equal(product.cpu().numpy(), a @ b):
            return f"the {backend} matrix product gives wrong results"
    return None


def _device_rows(index: int) -> list[tuple[str, str]]:
    info = cuda.get_device_properties(index)
    name = f"cuda:{index}"
    capability = ".".join(map(str, info["capability"]))
    driver, runtime = (f"{v // 1000}.{v % 1000 // 10}" for v in (info["driver"], info["runtime"]))
    rows = [
        (name, f"{info['name']}, compute capability {capability}, {info['multiprocessors']} multiprocessors"),
        (name, f"{info['memory_free'] / 2**30:.1f} of {info['memory_total'] / 2**30:.1f} GiB free"),
        (name, f"driver for CUDA {driver}; built with CUDA {runtime} for {info['built_for']}"),
        (name, _compute_check(name) or "matrix products of all backends agree with NumPy"),
    ]
    blas = cuda.get_device_properties(index)["blas"]  # found by the first product
    rows.append((name, f"cuBLAS: {blas or 'not found; products use the tiled backend'}"))
    rows.append((name, f"GEMM: {', '.join(_backends.gemm_backends(name))}"))
    rows.append((name, f"attention: {', '.join(_backends.attention_backends(name))}"))
    return rows + [(name, f"{problem}: {found}") for problem, found in explain.usual(name)]


def _cuda_rows() -> list[tuple[str, str]]:
    """The rows about CUDA: versions and devices, or the one thing that is missing. A device that cannot be used has a
    row, too.
    """
    missing = cuda.why_unavailable()
    if missing:
        return [("CUDA", f"{missing.removeprefix('CUDA is not available: ')}; training runs on the CPU")]
    rows = []
    for index in range(cuda.device_count()):
        try:
            rows += _device_rows(index)
        except (RuntimeError, MemoryError) as error:
            rows.append((f"cuda:{index}", f"CUDA cannot use it: {error}"))
    return rows


def report() -> tuple[str, bool]:
    """Return (text, whether everything required works)."""
    info = _C.build_info()
    rows = [
        ("xtrain", f"{__version__} in {os.path.dirname(os.path.abspath(_C.__file__))}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("compiler", f"{info.get('compiler', 'unknown')}"),
        ("flags", f"{info.get('flags', 'unknown')}"),
        ("BLAS", f"{info.get('blas', 'unknown')}"),
        ("CPU", f"{', '.join(_C.cpu_features()) or 'baseline features only'}"),
        ("threads", f"{_C.get_num_threads()} of {os.cpu_count()} processors"),
        ("GEMM", ", ".join(_backends.gemm_backends("cpu"))),
        ("attention", ", ".join(_backends.attention_backends("cpu"))),
        *(("cpu", f"{problem}: {found}") for problem, found in explain.usual("cpu")),
        *_cuda_rows(),
    ]
    missing = []
    for package, (required, hint, purpose) in _PACKAGES.items():
        version = _version(package)
        rows.append((package, version or f"missing ({purpose})"))
        if version is None:
            missing.append((required, f"  {package}, for {purpose}: pip install {hint}"))
    problem = _compute_check()
    rows.append(("check", problem or "matrix products of all backends agree with NumPy"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    if missing:
        lines += ["", "missing:", *(text for _, text in missing)]
    healthy = problem is None and not any(required for required, _ in missing)
    return "\n".join(lines), healthy


def command(arguments: list[str]) -> int:
    simple_options(arguments, {}, 0, USAGE)
    text, healthy = report()
    print(text)
    return 0 if healthy else 1
