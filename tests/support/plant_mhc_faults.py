"""Plants faults of hyper-connections in the C kernels of copies of this tree and prints the table of docs/worklog/mhc.md.

python tests/support/plant_mhc_faults.py            # some minutes: builds and tests five copies, one after another
python tests/support/plant_mhc_faults.py "shift"    # the faults whose description has the word
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from places import ROOT

LEFT_OUT = (
    ".git",
    ".venv",
    ".ci",
    "sanitize",
    "lib.*",
    "temp.*",
    "__pycache__",
    "dist",
    "runs",
    ".pytest_cache",
    "lock",
)

# description, file, what is there, what takes its place
FAULTS = [
    ("none", "csrc/cpu/mhc/mhc_pre.c", "", ""),
    (
        "`mhc_pre`: the logits' part of du lacks r",
        "csrc/cpu/mhc/mhc_pre.c",
        "du[i] = r * dq;",
        "du[i] = i < 2 * p->streams ? r * dq : dq;",
    ),
    (
        "`mhc_pre`: r² too many in κ",
        "csrc/cpu/mhc/mhc_pre.c",
        "*kappa = -dot * r * r * r / (ACC)k;",
        "*kappa = -dot * r * r * r * r * r / (ACC)k;",
    ),
    (
        "`sinkhorn`, form P: maxima of rows instead of columns (shift)",
        "csrc/cpu/mhc/sinkhorn.c",
        "if (form == XT_SINKHORN_P) NAME(sinkhorn_exp)(a, n, 1, n);",
        "if (form == XT_SINKHORN_P) NAME(sinkhorn_exp)(a, n, n, 1);",
    ),
    (
        "`mhc_pre` inside a layer: M instead of Mᵀ in dx (fused)",
        "csrc/cpu/mhc/mhc_pre.c",
        "if (n == 4) NAME(mhc_add_rows)(w, m_res + j, 4, g, 4, cols, width);\n"
        "        else NAME(mhc_add_rows)(w, m_res + j, n, g, n, cols, width);",
        "NAME(mhc_add_rows)(w, m_res + j * n, 1, g, n, cols, width);",
    ),
]

IDENTITIES = """
from xtrain.optable.identities import mhc_identities
wrong = {}
for rms in (0.1, 1.0, 4.0):
    for name, (residual, limit) in mhc_identities("float64", (33, 4, 40), rms).items():
        if not residual <= limit:
            wrong.setdefault(name, f"{name}, residual {residual:.2g}, limit {limit:.2g}")
print("; ".join(wrong.values()) or "nothing")
"""
DIVERGENCE = """
import xtrain as xt
from xtrain import nn
from xtrain.testing import first_divergence
xt.manual_seed(0)
layer = nn.HyperConnection(4, 3, nn.Linear(4, 4), iters=3, affine=True)
nn.init.normal_(layer.phi, 0.0, 0.3)
nn.init.constant_(layer.alpha, 0.9)
x = xt.randn(6, 3, 4) * 0.3
found = first_divergence(lambda m: m(x.to(m.phi.dtype)).square().sum(), layer)
print("nothing" if found else f"{found.first.phase} of {found.first.name}")
"""


def planted(root: Path, file: str, there: str, instead: str) -> str:
    """The text of the file with the fault in it. ValueError unless its place is there exactly once."""
    text = (root / file).read_text()
    if not there:
        return text
    if text.count(there) != 1:
        raise ValueError(f"plant_mhc_faults: {file} must have its place once, got {text.count(there)} times: {there}")
    return text.replace(there, instead)


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(tree), "XTRAIN_CUDA": "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


def last_line(tree: Path, program: str) -> str:
    return run(tree, "-c", program).stdout.strip().splitlines()[-1]


def row(file: str, there: str, instead: str) -> list[str]:
    """What the tests, the identities and first_divergence say of a tree with this fault."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (tree / file).write_text(planted(tree, file, there, instead))
        built = run(tree, "setup.py", "--quiet", "build_ext", "--inplace")
        if built.returncode:
            sys.exit(built.stdout)
        chosen = ["tests", "-k", "(mhc or sinkhorn) and not plant", "-q", "-p", "no:cacheprovider", "--tb=no"]
        counts = dict(
            (what, int(n))
            for n, what in re.findall(r"(\d+) (passed|failed)", run(tree, "-m", "pytest", *chosen).stdout)
        )
        failed, count = counts.get("failed", 0), sum(counts.values())
        tests = f"{failed} of {count} fail" if failed else f"all {count} pass"
        return [tests, last_line(tree, IDENTITIES), last_line(tree, DIVERGENCE)]


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    print(
        "| fault in `csrc/cpu` | tests with `mhc` or `sinkhorn` in their names | identities | `first_divergence` |\n|---|---|---|---|"
    )
    for description, *fault in FAULTS:
        if word in description:
            print("|", " | ".join([description, *row(*fault)]), "|", flush=True)


if __name__ == "__main__":
    main()
