"""Memory that ends at some allocations of training steps; `make oom` has all."""

from __future__ import annotations

import os
import sys

import pytest
from places import ROOT
from runs import options, python, text_file

import xtrain as xt
from xtrain import _C
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
SCRIPT = str(ROOT / "tests" / "torture" / "oom.py")


def test_blocks() -> None:
    done = python(SCRIPT, "--every", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OutOfMemoryError" in done.stdout and "; 0 wrong;" in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux" or bool(os.environ.get("XTRAIN_SANITIZE")),
    reason="replaces glibc's malloc by LD_PRELOAD, which a sanitizer does itself",
)
def test_mallocs() -> None:
    done = python(SCRIPT, "--malloc", "--every", "97", "--precision", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OutOfMemoryError" in done.stdout and "; 0 wrong;" in done.stdout


def test_a_step_that_is_made_is_read_without_memory(tmp_path) -> None:
    """The last block of a step that is read late, as on a GPU, is that of its joined numbers."""
    data = text_file(tmp_path / "text.txt")

    def trainer() -> Trainer:
        made = Trainer(options(data, tmp_path / "run"), quiet=True)
        made.stepper.read_every = 8
        return made

    calm = trainer()
    _C.fail_storages(1 << 60, 1 << 61)
    numbers = calm.train_step()
    asked = _C.fail_storages(0, -1)
    late = trainer()
    _C.fail_storages(asked - 1, asked - 1)
    assert late.train_step() == numbers
    assert late.step == 1
    on_host = 2 if late.device.startswith("cuda") else 0  # loss and norm, each copied there to be read
    assert _C.fail_storages(0, -1) == asked + on_host  # that one failed, and the rest took none


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
