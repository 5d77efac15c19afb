"""Captured steps of generation: programs of tests/support/generation_programs.py, on a GPU and on a device that computes with the CPU's
kernels (tests/support/fakes/fake_device.c).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS


@pytest.mark.parametrize(
    "program",
    ["equal('qwen3', 8)", "equal('qwen3', 64)", "equal('gpt2', 8)", "equal('gemma2', 8)", "repeats('float32')", "repeats('bfloat16')", "counts()", "begun()", "refused()", "at_once()"],
)  # fmt: skip
def test_captured_generation(tmp_path, package: Path, program: str) -> None:
    paths = os.pathsep.join(map(str, (package, ROOT / "tests/support", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", f"from generation_programs import *; {program}"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, f"{program}: status {done.returncode}: {done.stdout}{done.stderr}"
