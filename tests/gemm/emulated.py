"""C files compiled with emulate.h, which has the instructions of AVX512-BF16 and AMX in plain C: they run on any CPU of x86-64."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from xtrain import _C

BESIDES = [
    "cpu/gemm/amx.c",
    "cpu/gemm/bf16_work.c",
    "cpu/gemm/common.c",
    "core/error.c",
    "core/dtype.c",
    "core/threads.c",
]
GUARD = 0x7F80  # infinite: what is read by mistake makes NaN, what is written by mistake is seen


def compiled(folder: Path, *sources: str) -> ctypes.CDLL:
    """`sources` below csrc/cpu, with the products in AMX tiles."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("AMX tiles are for Linux on x86-64")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    options = ["-std=gnu11", "-fPIC", "-O1", "-w", "-pthread", "-DXT_SANITIZE", "-D_GNU_SOURCE"]
    if "fma" in _C.cpu_features():  # else a call for each multiply-add
        options += ["-mfma", "-ffp-contract=off"]
    options += [f"-I{ROOT}/csrc", "-include", f"{ROOT}/tests/gemm/emulate.h"]
    (folder / "none.c").write_text(
        "_Bool xt_has_bf16_pairs(void) { return 0; }\n"
    )  # csrc/cpu/gemm/bf16.c has it, and takes long to compile
    files = [ROOT / "csrc" / name for name in [*(f"cpu/{source}" for source in sources), *BESIDES]]
    files += [folder / "none.c"] * ("gemm/bf16.c" not in sources)
    running, objects = [], []
    for i, file in enumerate(files):
        objects.append(folder / f"{i}.o")
        running.append(subprocess.Popen([compiler, *options, "-c", file, "-o", objects[-1]]))
    assert [process.wait() for process in running] == [0] * len(running)
    path = folder / "emulated.so"
    subprocess.run([compiler, "-shared", "-pthread", *objects, "-lm", "-o", path], check=True)
    found = ctypes.CDLL(str(path))
    found.xt_error_message.restype = ctypes.c_char_p
    return found


def bits_of(x: np.ndarray) -> np.ndarray:
    """bfloat16 of float32, to nearest even, as uint16."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def at_the_end_of_memory(x: np.ndarray) -> np.ndarray:
    """A copy of x, dense, before a page that nobody may read."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(pages, x.dtype, x.size, size - x.nbytes).reshape(x.shape)
    copy[...] = x
    return copy
