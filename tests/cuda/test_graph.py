"""xt.cuda.graph and the captured training step: programs of tests/support/graph_programs.py and graph_training.py, and of
graph_trouble.py, on a GPU, and on a device that computes with the CPU's kernels (tests/support/fakes/fake_device.c).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runs import HANGS

import xtrain as xt

SUPPORT = ROOT / "tests/support"
BITS = [
    f"equal('{dtype}', {streams}, {pieces})"
    for dtype in ("float32", "bfloat16")
    for streams in (0, 2)
    for pieces in (1, 2)
] + [f"equal('{dtype}', 0, 1, SMALL_GEMMA2)" for dtype in ("float32", "bfloat16")]
PLAIN = [
    "counts()", "two_graphs()", "nan()", "beyond_the_plan()", "freed()", "returned()", "outside()", "outside_gradients()", "illegal()",
    "inputs_and_outputs()", "optimizers()", "threads()", "chunks('float32')", "chunks('bfloat16')",
]  # fmt: skip
TRAINING = [
    "train_equal('.')", "train_equal('.', precision='bfloat16', grad_accum=3)", "train_equal('.', log_every=1)",
    "train_equal('.', model__mhc_streams=2, eval_every=3, save_every=4)", "train_defaults('.')", "region_estimated('.')", "train_resumed('.')", "train_nan('.', 10)",
    "train_equal('.', optim__name='muon', ema=0.9, z_loss=1e-3, precision='bfloat16')",
    "train_nan('.', 1)", "train_refused('.')", "train_interrupted('.')", "train_equal('.', recompute='cheap')",
    "train_equal('.', recompute='full', precision='bfloat16')", "train_equal('.', recompute='block', model__num_hidden_layers=4)",
    "train_equal('.', recompute='full', model__num_hidden_layers=9, model__mhc_streams=2)",
    "train_dropout('.')", "train_dropout('.', recompute='full', precision='bfloat16', grad_accum=2)", "dropout()",
]  # fmt: skip
TROUBLE = [
    "bad_ids(0, 61)", "bad_ids(0, -1)", "bad_ids(1, 70)", "bad_ids(1, -7)", "train_bad_ids('.')",
    "train_bad_file('.', 256)", "train_bad_file('.', -5)", "train_bits('.')",
]  # fmt: skip
NO_ROOM = [
    "out_of_memory()", "no_room_beside()", "train_no_room_to_evaluate('.')",
    "train_no_room_to_evaluate('.', precision='bfloat16')", "train_no_room_to_sample('.')",
]  # fmt: skip


def run(folder: Path, package: Path, program: str, **environment: str) -> None:
    paths = os.pathsep.join(map(str, (package, SUPPORT, ROOT / "tests/cuda", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    code = f"from graph_programs import *; from graph_training import *; from graph_trouble import *; {program}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, timeout=HANGS
    )
    assert done.returncode == 0, f"{program}: status {done.returncode}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("program", [*BITS, *PLAIN, *TRAINING, *TROUBLE])
def test_graph(tmp_path, package: Path, program: str) -> None:
    run(tmp_path, package, program)


@pytest.mark.parametrize("program", ["sync()", "train_sync('.')"])
def test_a_device_that_waits_captures_nothing(tmp_path, package: Path, program: str) -> None:
    run(tmp_path, package, program, XTRAIN_CUDA_SYNC="1")


@pytest.mark.skipif(not xt.cuda.is_available(), reason="needs a GPU: the same steps take minutes on a CPU")
@pytest.mark.parametrize("streams", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_of_larger_sizes(tmp_path, dtype: str, streams: int) -> None:
    run(tmp_path, Path(xt.__file__).parent.parent, f"equal_large('{dtype}', {streams}, 'auto')")


@pytest.mark.parametrize("program", NO_ROOM)
def test_out_of_memory(tmp_path, package: Path, program: str, request) -> None:
    if "gpu" in request.node.name and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("takes all memory of the GPU: run it alone")
    environment = {"FAKE_DEVICE_MOST": str(1 << 40)} if "fake" in request.node.name else {}
    run(tmp_path, package, program, **environment)


CALLS = """counts = []
for layers in (2, 3):
    team, inputs = Team(shape=SMALL | dict(num_hidden_layers=layers)), batch(0)
    team.step(*inputs)
    before = xt.cuda.counters()["launches"]
    team.step(*inputs)
    counts.append(xt.cuda.counters()["launches"] - before)
assert counts == [2 * 22 + 23, 3 * 22 + 23], counts"""


def test_calls_of_kernels_of_an_eager_step(tmp_path, fake: Path) -> None:
    """Exact, so that one call more is seen. A GPU launches one or a few kernels for each; tests/cuda/test_cuda.py bounds those."""
    run(tmp_path, fake, CALLS)


def test_a_graph_is_where_its_optimizers_are(tmp_path, fake: Path) -> None:
    run(tmp_path, fake, "second_device()", FAKE_DEVICE_COUNT="2")


def test_a_capture_that_breaks(tmp_path, fake: Path) -> None:
    run(tmp_path, fake, "broken()", FAKE_DEVICE_BROKEN="1")


@pytest.mark.parametrize("family", ["SwiGLU", "GELU"])
def test_products_with_epilogues(tmp_path, fake: Path, family: str) -> None:
    run(tmp_path, fake, f"epilogues('{family}')", FAKE_EPILOGUES="1")
