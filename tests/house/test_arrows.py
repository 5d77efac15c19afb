"""The house has rooms, and arrows between them point one way.

    xtrain -> csrc/py -> csrc/ops -> csrc/autograd -> csrc/backend -> csrc/core

csrc/cpu and cuda see only xtrain.h, kernels.h, contract/ and core. Python.h is seen by csrc/py alone, PyTorch by parity/ alone.
"""

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

CHAIN = ["core", "backend", "autograd", "ops", "py"]  # each sees itself and those before it
CONTRACTS = {"xtrain.h", "kernels.h", "contract"}
MAY_SEE = {room: set(CHAIN[: i + 1]) | CONTRACTS for i, room in enumerate(CHAIN)}
MAY_SEE["cpu"] = {"cpu", "core"} | CONTRACTS
MAY_SEE["cuda"] = {"cuda", "core"} | CONTRACTS
MAY_SEE["core"] = {"core", "xtrain.h"}
MAY_SEE["xtrain.h"] = set()
MAY_SEE["kernels.h"] = {"xtrain.h"}
MAY_SEE["contract"] = {"xtrain.h", "kernels.h", "contract"}
# csrc/ops, csrc/cpu and cuda have rooms of the same names; what does not belong to a family of kernels lies beside them.
FAMILIES = {path.stem for path in (ROOT / "csrc/contract").glob("*.h")} - {"backend", "traits"}
CUDA_ONLY = {"runtime", "common", "arch"}
PYTHON_HEADERS = re.compile(r"Python\.h|structmember\.h|numpy/")

# What each folder of Python may not import: it belongs to parity/, or would make the import of xtrain slow.
HEAVY = {"torch", "transformers", "matplotlib", "tokenizers", "subprocess"}
PARITY_ONLY = {"torch", "transformers"}


def c_files():
    files = [path for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*.*")]
    return sorted(path for path in files if path.suffix in {".c", ".h", ".cu", ".cuh"})


def room_of(path: Path) -> str:
    """csrc/ops/layers/rope.c -> ops, csrc/kernels.h -> kernels.h, cuda/layers/rope.cu -> cuda."""
    parts = path.relative_to(ROOT).parts
    return "cuda" if parts[0] == "cuda" else parts[1]


def includes(path: Path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s*(<|")([^>"]+)', line):
            yield number, match[1] == '"', match[2]


@pytest.mark.parametrize("path", c_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_includes_point_one_way(path):
    room = room_of(path)
    assert room in MAY_SEE, f"{room} is a new room: give it a place in this test"
    for number, quoted, name in includes(path):
        where = f"{path.relative_to(ROOT)}:{number}: #include {name}"
        assert room == "py" or not PYTHON_HEADERS.match(name), f"{where}: only csrc/py includes Python and NumPy"
        candidates = [(folder / name).resolve() for folder in (path.parent, ROOT / "csrc", ROOT / "cuda")]
        found = next((file for file in candidates if file.exists()), None)
        assert found or not quoted, f"{where}: no such file"
        if found and ROOT in found.parents:
            seen = room_of(found)
            assert seen in MAY_SEE[room], f"{where}: {room} must not see {seen}"


def imports(path: Path):
    """(line, module, runs at import time) for every import of the file; relative imports of xtrain come as xtrain.*"""
    tree = ast.parse(path.read_text())
    later = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in later
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, ("xtrain." if node.level else "") + (node.module or ""), id(node) not in later


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("xtrain"), ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_are_light(path):
    for number, module, at_import in imports(path):
        top = module.partition(".")[0]
        where = f"{path.relative_to(ROOT)}:{number}: import {module}"
        assert top not in {"tests", "parity", *PARITY_ONLY}, f"{where}: belongs to parity/"
        assert not (at_import and top in HEAVY), f"{where}: import it where it is used"


@pytest.mark.parametrize("path", python_files("tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_need_no_pytorch(path):
    for number, module, _ in imports(path):
        top = module.partition(".")[0]
        assert top not in PARITY_ONLY, f"{path.relative_to(ROOT)}:{number}: import {module}: belongs to parity/"


@pytest.mark.parametrize("room", ["csrc/ops", "csrc/cpu", "cuda"])
def test_kernel_rooms_have_the_families_of_the_contract(room):
    found = {path.name for path in (ROOT / room).iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found - CUDA_ONLY == FAMILIES


def test_one_stem_names_a_kernel_in_every_room():
    """cuda/layers/rope.cu has a csrc/cpu/layers/rope.c: `ls csrc/*/*/rope.c cuda/*/rope.cu` finds an op."""
    twins = {path.relative_to(ROOT / "csrc/cpu").with_suffix("") for path in (ROOT / "csrc/cpu").rglob("*.c")}
    flash = {Path(f"attention/{stem}") for stem in ("flash", "flash_half", "flash_hopper_fwd", "flash_hopper_bwd")}
    own = {Path("gemm/cublas"), Path("gemm/few"), Path("gemm/hopper")} | flash
    kernels = (path.relative_to(ROOT / "cuda").with_suffix("") for path in (ROOT / "cuda").rglob("*.cu"))
    strange = sorted(str(path) for path in kernels if path.parts[0] not in CUDA_ONLY and path not in twins | own)
    assert not strange, f"no CPU twin: {strange}"
