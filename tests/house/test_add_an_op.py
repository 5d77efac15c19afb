"""docs/add_an_op.md is right: its blocks and commands, in a copy of the tree, give an op that passes the op table and the house tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import setup_cuda

PAGE = (ROOT / "docs/add_an_op.md").read_text()
BLOCK = re.compile(r'^```\w+ file=(\S+)(?: (before|after)="([^"]+)"| (end))?\n(.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```sh run\n(.*?)^```$", re.M | re.S)
MOST_FILES = 8
# Enough of the tree to build the package and run the tests below.
PARTS = [
    "csrc",
    "cuda",
    "xtrain",
    "tests",
    "parity",
    "setup.py",
    "setup_cuda.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
]
# A kernel of one form, not one for each instruction set: an extension that is built for a few tests runs it nearly as well.
ONE_FORM = "-DXT_SANITIZE"
HOUSE = [f"tests/house/test_{name}.py" for name in ("stubs", "results", "arrows", "c_calls", "source", "python_rooms")]


def apply(tree: Path, name: str, where: str, anchor: str, text: str) -> None:
    """A new file; or lines put before or after the one line that holds the anchor, or at the end of the file."""
    path = tree / name
    if not where:
        assert not path.exists(), f"{name} is already there"
        path.write_text(text)
        return
    lines = path.read_text().splitlines(keepends=True)
    if where == "end":
        at = len(lines)
    else:
        found = [number for number, line in enumerate(lines) if anchor in line]
        assert len(found) == 1, f"{name}: {len(found)} lines hold {anchor!r}, must be one"
        at = found[0] + (where == "after")
    path.write_text("".join([*lines[:at], text, *lines[at:]]))


def run(tree: Path, *arguments: str, **environment: str) -> str:
    folders = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    # This build is for the CPU, wherever the suite runs.
    kept = {name: value for name, value in os.environ.items() if name != "XTRAIN_TEST_DEVICE"}
    env = {**kept, "PYTHONPATH": os.pathsep.join(folders), **environment}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(arguments)} failed:\n{done.stdout[-4000:]}"
    return done.stdout


def run_tests(tree: Path, *arguments: str) -> int:
    """Runs tests of the copy; the number that passed."""
    report = run(tree, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider", "--rootdir", str(tree))
    assert "failed" not in report and "error" not in report, report
    return int(re.search(r"(\d+) passed", report)[1])


def contents(tree: Path) -> dict[str, bytes]:
    """The files that git would show, by name."""
    made = ("build/", "xtrain/_lib/", ".pytest_cache/")
    files = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if not name.startswith(made) and "__pycache__" not in name and path.suffix != ".so"
    }


def check_cpu_block(tree: Path) -> None:
    """Compiles the kernel of the page as a user's build does: for each instruction set."""
    made = next(tree.glob("build/obj/*/cpu/layers/softplus.cmd")).read_text()
    command = [word for word in shlex.split(made.splitlines()[0])[1:] if word not in (ONE_FORM, "-O0")]
    assert "-DXT_BUILD_FLAGS" in made and ONE_FORM in made and "-O3" in command
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def check_cuda_block(tree: Path) -> None:
    """Compiles the kernel of the page where nvcc is."""
    nvcc = setup_cuda.find_nvcc()
    if nvcc:
        flags = [*setup_cuda.flags(["80"], werror=True), "-Xptxas", "-O0"]
        command = [nvcc, *flags, "-c", "cuda/layers/softplus.cu", "-o", "build/softplus.o"]
        done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout


def test_an_op_touches_at_most_8_files() -> None:
    blocks = {name for name, *_ in BLOCK.findall(PAGE)}
    table = re.findall(r"^\| `([^`]+)`", PAGE, re.M)
    assert {*blocks, "xtrain/_C.pyi"} == set(table) and len(table) <= MOST_FILES
    assert f"An op touches {len(table)} files." in PAGE


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="builds the extension without sanitizers")
def test_the_worked_example(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", "*.so", "_lib")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, ignore=skip)
        else:
            shutil.copy2(ROOT / part, tmp_path / part)
    before = contents(tmp_path)
    for name, where, anchor, end, text in BLOCK.findall(PAGE):
        apply(tmp_path, name, where or end, anchor, text)

    # Nearly every object depends on the headers that changed: keeping the old ones gains nothing, -O0 does.
    settings = dict(CFLAGS=f"-O0 {ONE_FORM}", XTRAIN_SANITIZE="", XTRAIN_WERROR="1", XTRAIN_CUDA="0")
    run(tmp_path, "setup.py", "--quiet", "build_ext", "--inplace", **settings)
    commands = [line for block in COMMANDS.findall(PAGE) for line in block.splitlines()]
    assert commands == ["python tests/support/make_stubs.py"]
    for command in commands:
        run(tmp_path, *shlex.split(command)[1:])

    after = contents(tmp_path)
    touched = {name for name in after if after[name] != before.get(name)}
    assert touched == set(re.findall(r"^\| `([^`]+)`", PAGE, re.M)), "the table of the page names other files"
    assert before.keys() <= after.keys()

    use = """
import numpy as np, xtrain as xt, xtrain.functional as F
x = xt.tensor([-200.0, -1.0, 0.0, 1.0, 200.0], requires_grad=True)
y = F.softplus(x)
y.sum().backward()
assert np.allclose(y.detach().numpy(), [0, 0.31326169, 0.69314718, 1.31326169, 200])
assert np.allclose(x.grad.numpy(), [0, 0.26894142, 0.5, 0.73105858, 1])
"""
    run(tmp_path, "-c", use)
    assert run_tests(tmp_path, "tests/ops/test_ops.py", "-k", "softplus or kernel_slot or every_op") >= 16
    assert run_tests(tmp_path, "tests/cuda/test_cuda_library.py", "-k", "every_slot") == 1
    assert run_tests(tmp_path, *HOUSE) >= 500
    assert "def softplus(input: Tensor) -> Tensor: ..." in (tmp_path / "xtrain/_C.pyi").read_text()
    check_cpu_block(tmp_path)
    check_cuda_block(tmp_path)
