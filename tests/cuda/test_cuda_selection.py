"""The choice among implementations: on a device of fake_cuda.c, whose rows do not support everything, and on a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from fake_library import make_fake, make_package, our_contract, run
from places import ROOT

import xtrain as xt
from xtrain import _C

FLOAT32 = "('fast', 'pairs', {}), ('fast', 'large', {}), ('plain', 'plain', {})"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = make_package(tmp_path_factory.mktemp("fake"))
    make_fake(folder, our_contract())
    return folder


def ask(package: Path, code: str, **environment: str) -> list[str]:
    start = "import xtrain as xt; from xtrain import _C\n"
    return run(package, start + code, **environment).splitlines()


EXPLAIN = "for sizes in ((64, 3, 4), (64, 3, 5), (5, 3, 5)): print(_C.explain_gemm(sizes, device='cuda'))"


def test_the_first_that_supports_the_problem(package: Path) -> None:
    odd, few, old = ("'K is odd'", "'M is below 32'", "'the compute capability is below 8.0'")
    tables = [(None, None, None), (odd, None, None), (odd, few, None)]
    assert ask(package, EXPLAIN) == ["[" + FLOAT32.format(*reasons) + "]" for reasons in tables]
    tables = [(None, old, None), (odd, old, None), (odd, old, None)]
    assert ask(package, EXPLAIN, FAKE_CUDA_OLD="1") == ["[" + FLOAT32.format(*reasons) + "]" for reasons in tables]


RUN = """
def table(name, **where):
    found = []
    for m in (5, 64):
        for k in (4, 5):
            a, b = xt.ones(m, k).to("cuda"), xt.ones(k, 3).to("cuda")
            ran = int(_C.matmul(a, b, backend=name).to("cpu").tolist()[0][0])
            rows = _C.explain_gemm((m, 3, k), device="cuda", backend=name)
            said = next(kernel for _, kernel, reason in rows if reason is None)
            assert said == ("", "pairs", "large", "plain")[ran], (name, m, k, said, ran)
            found.append(said)
    return found
"""


def test_what_is_explained_is_what_runs(package: Path) -> None:
    code = RUN + "print(table(None), table('fast'), table('plain'))"
    all_rows, plain = ["pairs", "plain", "pairs", "large"], ["plain"] * 4
    assert ask(package, code, FAKE_CUDA_SHOW="1") == [f"{all_rows} {all_rows} {plain}"]
    assert ask(package, code, FAKE_CUDA_SHOW="1", XTRAIN_GEMM="plain") == [f"{plain} {all_rows} {plain}"]


def test_what_a_machine_lacks(package: Path) -> None:
    """Not listed, never chosen, and an error when it is named."""
    code = """
print(_C.gemm_backends("cuda"), [k for _, k, why in _C.explain_gemm((4, 4, 4), device="cuda") if why is None])
for call in (lambda: _C.explain_gemm((4, 4, 4), device="cuda", backend="fast"),
             lambda: _C.matmul(xt.ones(2, 2).to("cuda"), xt.ones(2, 2).to("cuda"), backend="fast"),
             lambda: _C.matmul(xt.ones(2, 2).to("cuda"), xt.ones(2, 2).to("cuda"), backend="magic")):
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        print(error)
"""
    lacks = "gemm: backend='fast' needs a library"
    names = "matmul: backend must be one of auto, fast, plain on cuda:0, got 'magic'"
    assert ask(package, code, FAKE_CUDA_LACKS="1") == ["['plain'] ['plain']", lacks, lacks, names]
    assert ask(package, code)[0] == "['fast', 'plain'] ['pairs', 'plain']"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_name_of_the_cpu_opens_no_cuda_library(package: Path) -> None:
    """One that the CPU does not know does."""
    code = """
for name in ("naive", "auto", "fast"):
    with xt.use_gemm_backend(name):
        print("libxtrain_cuda" in open("/proc/self/maps").read())
"""
    assert ask(package, code) == ["False", "False", "True"]


def test_a_problem_that_no_row_supports(package: Path) -> None:
    code = """
for dtypes in (("float64",), ("float64", "float32")):
    try:
        _C.explain_gemm((4, 4, 4), *dtypes, device="cuda")
    except (NotImplementedError, TypeError) as error:
        print(error)
x = xt.ones(2, 2, dtype=xt.float64).to("cuda")
try:
    x @ x
except NotImplementedError as error:
    print(error)
"""
    nobody = "gemm: no implementation of this device supports the problem"
    mixed = "gemm: dtype of B must be float64 like that of A, got float32"
    assert ask(package, code) == [nobody, mixed, nobody]


def test_a_wrong_claim_is_seen(package: Path) -> None:
    """A row that claims odd K and drops the last term: the table of odd shapes of test_selection.py finds it, and nothing else."""
    code = "import test_selection as t; print(*t.wrong_products('cuda', ['float32']), sep='\\n')"
    path = os.pathsep.join(map(str, (package, ROOT / "tests/ops")))
    assert ask(package, code, PYTHONPATH=path) == [""]
    wrong = ask(package, code, PYTHONPATH=path, FAKE_CUDA_LIES="1")
    assert len(wrong) > 20 and all(re.match(r"pairs: \d+ x \d+ x \d*[13579] ", line) for line in wrong)


# ---- the real device --------------------------------------------------------------------------------------------------------------

ON_GPU = pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)")


def chosen(rows) -> str:
    return next(kernel for _, kernel, reason in rows if reason is None)


def hopper() -> bool:
    """Whether the GPU and the library have what flash_hopper needs."""
    facts = xt.cuda.get_device_properties()
    return facts["capability"] == (9, 0) and "90a" in facts["built_for"].split()


@ON_GPU
@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "kernel"),
    [
        ((8192, 3072, 768), "bfloat16", {}, "cublas"),
        ((65, 33, 97), "float32", {"layout": "tt"}, "cublas"),
        ((1024, 50257, 768), "bfloat16", {"layout": "nt"}, "cublas"),
        ((0, 4, 4), "float32", {}, "cublas"),
        ((4, 2**31, 4), "float32", {}, "tiled"),
        # a vector beside a matrix of more than 2^31 elements
        ((1, 50264, 65536), "bfloat16", {}, "tiled"),
        ((65536, 1, 50264), "float32", {}, "tiled"),
        ((4, 4, 4), "float32", {"ld": (2**31, 4, 4)}, "tiled"),
        # two batch dims that are no even row of matrices: lists of pointers, aligned to 16 bytes where matrix units need it
        ((64, 64, 64), "bfloat16", {"batch": (2, 3), "strides": (4096, 8192, 4096, 8192, 4096, 8192)}, "cublas"),
        ((64, 64, 64), "bfloat16", {"batch": (2, 3), "strides": (4096, 8193, 4096, 8192, 4096, 8192)}, "tiled"),
        ((64, 64, 64), "float32", {"batch": (2, 3), "strides": (4096, 8193, 4096, 8192, 4096, 8192)}, "cublas"),
        (
            (64, 64, 64),
            "float32",
            {"batch": (2, 3), "strides": (4096, 8193, 4096, 8192, 4096, 8192), "tf32": True},
            "tiled",
        ),
    ],
)
def test_products_on_the_gpu(sizes, dtype: str, options, kernel: str) -> None:
    assert chosen(_C.explain_gemm(sizes, dtype, device="cuda", **options)) == kernel


@ON_GPU
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "kernel"),
    [
        ((8, 12, 12, 1024, 1024, 64), "bfloat16", {}, "flash_hopper"),
        ((2, 4, 2, 33, 65, 96), "float16", {}, "flash_hopper"),
        ((1, 16, 8, 4096, 4096, 128), "bfloat16", {"backend": "flash"}, "flash_hopper"),
        ((2, 4, 2, 300, 300, 192), "bfloat16", {}, "flash_hopper"),
        ((2, 4, 2, 300, 300, 256), "float16", {}, "flash_hopper"),
        ((2, 4, 2, 300, 300, 160), "bfloat16", {}, "materialized"),
        # keys of all sequences in one place: the copy engine takes no stride of 0
        ((2, 4, 2, 64, 64, 64), "bfloat16", {"strides": (16384, 64, 256, 0, 64, 128)}, "flash_half"),
        ((8, 12, 12, 1024, 1024, 32), "bfloat16", {}, "flash_half"),
        ((8, 12, 12, 1024, 1024, 128), "bfloat16", {"documents": True}, "flash_hopper"),
        ((2, 4, 2, 33, 65, 64), "float16", {"window": 9}, "flash_hopper"),
        ((8, 12, 12, 1024, 1024, 32), "bfloat16", {"documents": True, "window": 9}, "flash_half"),
        ((8, 12, 12, 1024, 1024, 64), "float32", {"documents": True}, "flash"),
        ((8, 16, 8, 1024, 1024, 256), "bfloat16", {"softcap": 50.0, "window": 512}, "flash_hopper"),
        ((8, 12, 12, 1024, 1024, 32), "float16", {"softcap": 50.0}, "flash_half"),
        ((8, 12, 12, 1024, 1024, 64), "bfloat16", {"softcap": 1e-39}, "materialized"),
        # tanh of the flash kernels is off by 2^-22, which times such a softcap is a score
        ((8, 12, 12, 1024, 1024, 64), "bfloat16", {"softcap": 1e6}, "materialized"),
        ((8, 12, 12, 1024, 1024, 64), "float32", {"softcap": 50.0}, "materialized"),
        ((2, 4, 2, 33, 65, 96), "float32", {}, "materialized"),
        ((8, 12, 12, 1024, 1024, 64), "float32", {}, "flash"),
        ((1, 2, 2, 64, 1025, 64), "float32", {"tf32": True}, "materialized"),
        ((1, 2, 2, 64, 1024, 64), "float32", {"tf32": True}, "flash"),
        ((1, 2, 2, 64, 64, 80), "bfloat16", {}, "materialized"),
        ((1, 2, 2, 64, 64, 64), "float64", {}, "materialized"),
        ((1, 2, 2, 64, 64, 64), "bfloat16", {"scale": -1.0}, "materialized"),
        ((1, 2, 2, 64, 64, 64), "bfloat16", {"offset": 8}, "materialized"),
        ((1, 2, 2, 64, 64, 64), "float32", {"offset": 16}, "flash"),
        ((1, 2, 2, 64, 0, 64), "bfloat16", {}, "reference"),
        ((1, 2, 2, 64, 64, 0), "float32", {}, "reference"),
        ((1, 2, 2, 64, 64, 64), "bfloat16", {"backend": "materialized"}, "materialized"),
        ((1, 2, 2, 64, 64, 80), "bfloat16", {"backend": "flash"}, "materialized"),
    ],
)
def test_attention_on_the_gpu(sizes, dtype: str, backward: bool, options, kernel: str) -> None:
    if kernel == "flash_hopper" and not hopper():
        kernel = "flash_half" if sizes[-1] <= 128 else "materialized"
    assert chosen(_C.explain_attention(sizes, dtype, backward, device="cuda", **options)) == kernel
