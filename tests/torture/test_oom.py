"""Memory that ends at some allocations of training steps; `make oom` has all."""

from __future__ import annotations

import os
import sys

import pytest
from places import ROOT
from runs import python

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu
SCRIPT = str(ROOT / "tests" / "torture" / "oom.py")


def test_blocks() -> None:
    done = python(SCRIPT, "--every", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OutOfMemoryError" in done.stdout and "; 0 wrong;" in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux" or bool(os.environ.get("XTRAIN_SANITIZE")), reason="LD_PRELOAD of glibc's malloc"
)
def test_mallocs() -> None:
    done = python(SCRIPT, "--malloc", "--every", "97", "--precision", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OutOfMemoryError" in done.stdout and "; 0 wrong;" in done.stdout


def test_fail_storages() -> None:
    """Numbers first to last fail, and the calls in between are counted."""
    made = []
    _C.fail_storages(1, 2)
    for _ in range(4):
        try:
            made.append(xt.zeros(3))
        except xt.OutOfMemoryError as error:
            assert "out of memory on cpu" in str(error)
            made.append(None)
    assert [one is None for one in made] == [False, True, True, False]
    assert _C.fail_storages(0, -1) == 4
    xt.zeros(3)
    assert _C.fail_storages(0, -1) == 0
