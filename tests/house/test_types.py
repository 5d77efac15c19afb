"""A user's type checker finds nothing in user_script.py, and what is in it runs.

`make lint` checks the script beside the sources. Here xtrain is installed, as for a user: checkers then read only what an
installed package declares, and infer no result of a function without annotation.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import xtrain

SCRIPT = Path(__file__).with_name("user_script.py")
PACKAGE = Path(xtrain.__file__).parent
checked = pytest.mark.skipif(find_spec("basedpyright") is None, reason="no basedpyright here: make lint installs it")


def errors(folder: Path, *plants: tuple[str, str, str]) -> list[str]:
    """What basedpyright says of the script in an environment that has the package. A plant: (file, text, its replacement)."""
    site = folder / "venv/lib/python3.10/site-packages"
    shutil.copytree(PACKAGE, site / "xtrain", ignore=lambda _, names: [name for name in names if name.endswith(".so")])
    (site / "numpy.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    shutil.copy(SCRIPT, folder)
    config = {"venvPath": ".", "venv": "venv", "include": [SCRIPT.name], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps({**config, "pythonVersion": "3.10"}))
    for file, old, new in plants:
        text = (site / "xtrain" / file).read_text()
        assert text.count(old) == 1, f"xtrain/{file} has changed: write this fault anew"
        (site / "xtrain" / file).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--outputjson"]
    without_sanitizer = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=without_sanitizer)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stdout
    return [f"{found['range']['start']['line'] + 1}: {found['message']}" for found in report["generalDiagnostics"]]


@checked
def test_a_user_sees_types(tmp_path: Path) -> None:
    assert not errors(tmp_path)


# Those of one list hide nothing of each other, and a run of the checker, of seconds, sees them all: each has words that only it brings.
TOGETHER = [
    ("nn/mhc.py", "def expand_streams(x: Tensor, n: int) -> Tensor:", "def expand_streams(x, n: int) -> Tensor:", '"(x: Unknown, n: int) -> Tensor"'),
    ("models/__init__.py", "    from .qwen3 import Qwen3, Qwen3Config\n", "", '"Qwen3" is not a known attribute of module'),
    ("_C.pyi", "def item(self) -> _int | _float: ...", "def item(self) -> Any: ...", 'expected "int | float" but received "Any"'),
    ("__init__.py", "    from . import cuda as cuda\n", "", '"cuda" is not a known attribute of module "xtrain"'),
]  # fmt: skip
FAULTS = [
    ("nn/layers.py", "(self, input: Tensor) -> Tensor:\n        return _C.linear(", "(self, input):\n        return _C.linear("),
    ("nn/module.py", "(self: _Defined[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:", "(self, *args: Any, **kwargs: Any) -> Any:"),
    ("models/causal_lm.py", "class CausalLM(LanguageModel):", "class CausalLM(nn.Module):"),
]  # fmt: skip


@checked
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_missing_type_is_seen(tmp_path: Path, fault: tuple[str, str, str]) -> None:
    assert errors(tmp_path, fault)


@checked
def test_missing_types_are_seen_together(tmp_path: Path) -> None:
    said = errors(tmp_path, *(fault[:3] for fault in TOGETHER))
    missed = [file for file, _, _, words in TOGETHER if not any(words in line for line in said)]
    assert not missed, "\n".join([f"not seen: {missed}", *said])


@pytest.mark.on_cpu
def test_the_script_runs(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
