"""The CUDA library as far as it can be checked without a GPU: every slot is there, it loads, and it says what is missing."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import xtrain as xt
from xtrain import _C

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(_C.__file__).parent / "_lib" / "libxtrain_cuda.so"
WITHOUT_GPU = not xt.cuda.is_available()


def slots() -> list[str]:
    block = re.search(r"#define XT_KERNELS\(X\)(.*?)\n\n", (ROOT / "csrc/kernels.h").read_text(), re.S)
    return re.findall(r"X\((\w+), \w+\)", block[1])


def test_every_slot_is_written_for_cuda() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "cuda").glob("*.cu"))
    missing = [slot for slot in slots() if not re.search(rf"^XtStatus xt_cuda_{slot}\(const", sources, re.M)]
    assert not missing, f"slots of kernels.h without a function in cuda/: {missing}"


@pytest.mark.skipif(
    not LIBRARY.exists() and os.environ.get("XTRAIN_CUDA") != "1",
    reason="this build has no CUDA library (XTRAIN_CUDA=1)",
)
def test_the_library_exports_one_function_and_needs_no_cuda_library_to_load() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    assert library.xt_open_cuda
    if shutil.which("nm") and shutil.which("readelf"):
        names = subprocess.run(
            ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
        ).stdout
        assert [line.split()[-1] for line in names.splitlines()] == ["xt_open_cuda"]
        needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"NEEDED.*(libcuda|libcublas|libcudart|libpython)", needed)


@pytest.mark.skipif(not WITHOUT_GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_cpu_works_and_the_error_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="CUDA is not available: .*(driver|GPU|CUDA library)"):
        xt.ones(2).to("cuda")
    assert not xt.cuda.is_available() and xt.cuda.device_count() == 0
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        xt.cuda.synchronize()
    assert xt.cuda.memory_summary().startswith("CUDA is not available")
    assert "CUDA is not available" in xt.cuda.why_unavailable()
    assert (xt.cuda.memory_allocated(), xt.cuda.max_memory_allocated(), xt.cuda.memory_reserved()) == (0, 0, 0)
    assert (xt.ones(2) + 1).tolist() == [2.0, 2.0]


def test_import_opens_no_cuda_library() -> None:
    code = "import xtrain; print(any('cuda' in line and '.so' in line for line in open('/proc/self/maps')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_paths_that_are_no_text_do_not_stop_the_import() -> None:
    """sys.path may hold what imports ignore, and bytes that are not UTF-8."""
    code = r"""
import pathlib, sys
sys.path[:0] = [pathlib.Path("site-packages"), b"site-packages", "/\udcff/site-packages"]
import xtrain
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
