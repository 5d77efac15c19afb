"""docs/add_an_op.md is right: its blocks, applied to a copy of the tree, build and give an op that passes its tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

BLOCK = re.compile(r'^```\w+ file=(\S+)(?: (before|after)="([^"]+)"| (end))?\n(.*?)^```$', re.M | re.S)
# Enough of the tree to build the package and run the op table.
PARTS = ["csrc", "xtrain", "tests", "setup.py", "setup_cuda.py", "pyproject.toml", "README.md", "LICENSE"]


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


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="builds the extension without sanitizers")
def test_the_worked_example(tmp_path):
    blocks = BLOCK.findall((ROOT / "docs/add_an_op.md").read_text())
    assert len(blocks) == 7
    skip = shutil.ignore_patterns("__pycache__", "*.so", "_lib")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        copy(ROOT / part, tmp_path / part, **({"ignore": skip} if copy is shutil.copytree else {}))
    for name, where, anchor, end, text in blocks:
        apply(tmp_path, name, where or end, anchor, text)

    # Nearly every object depends on the headers that changed: keeping the old ones gains nothing, -O0 does.
    settings = dict(CFLAGS="-O0", XTRAIN_SANITIZE="", XTRAIN_WERROR="1", XTRAIN_CUDA="0")
    run(tmp_path, "setup.py", "--quiet", "build_ext", "--inplace", **settings)
    use = """
import numpy as np, xtrain as xt, xtrain.functional as F
x = xt.tensor([-200.0, -1.0, 0.0, 1.0, 200.0], requires_grad=True)
y = F.softplus(x)
y.sum().backward()
assert np.allclose(y.detach().numpy(), [0, 0.31326169, 0.69314718, 1.31326169, 200])
assert np.allclose(x.grad.numpy(), [0, 0.26894142, 0.5, 0.73105858, 1])
"""
    run(tmp_path, "-c", use)
    selected = ["-k", "softplus or kernel_slot", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    report = run(tmp_path, "-m", "pytest", "tests/ops/test_ops.py", *selected)
    passed = int(re.search(r"(\d+) passed", report)[1])
    assert passed >= 20 and "failed" not in report, report
