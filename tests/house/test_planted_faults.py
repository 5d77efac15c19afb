"""The table of planted faults: each has its place in the sources and tests that exist, and one of each room is caught."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading

import plant_faults
import pytest
from faults.table import ROOMS, Fault, table
from places import ROOT
from runs import wait_until

LEAST = 120


def test_every_fault_has_its_place_and_its_tests() -> None:
    names, wrong = set(), []
    for fault in table():
        assert fault.name not in names, fault.name
        names.add(fault.name)
        try:
            text = plant_faults.planted(ROOT, fault)
        except (OSError, ValueError) as error:
            wrong.append(str(error))
            continue
        assert text != (ROOT / fault.file).read_text(encoding="utf-8"), fault.name
        ids = [word for word in shlex.split(fault.tests) if word.startswith("tests/")]
        assert ids and fault.promise, fault.name
        for node in ids:
            path, _, test = node.partition("::")
            name = re.escape(test.partition("[")[0])
            if not (ROOT / path).is_file() or not re.search(
                rf"^def {name or 'test_'}", (ROOT / path).read_text(), re.M
            ):
                wrong.append(f"{fault.name}: there is no {node}")
    assert not wrong, "\n".join(wrong)
    assert len(names) >= LEAST


def test_a_place_that_is_not_there_once_is_refused() -> None:
    fault = Fault("x", "xtrain/_version.py", "no such text", "", "none", "tests/x.py")
    with pytest.raises(ValueError, match="x: xtrain/_version.py must have its place once, got 0 times: no such text"):
        plant_faults.planted(ROOT, fault)


def test_a_record_that_was_cut_off_goes_on_in_the_next_line(tmp_path) -> None:
    record = tmp_path / "record"
    for line in ("a", "b"):
        plant_faults.add_line(record, f"{line}\tcaught")
    record.write_bytes(record.read_bytes()[:-3])  # stopped within a line
    for line in ("c", "d"):
        plant_faults.add_line(record, f"{line}\tcaught")
    assert record.read_text() == "a\tcaught\nb\tcaug\nc\tcaught\nd\tcaught\n"
    assert plant_faults.recorded(record) == {"a", "c", "d"}


@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_tree_has_of_what_is_built(gpu: bool, monkeypatch, tmp_path) -> None:
    """The objects of cuda/, which take minutes, only for faults of cuda/."""
    for place in ("cuda/a.cu", "csrc/a.c", "build/obj/cuda/a.o", "build/obj/cpython/a.o", "build/lib.linux/a.so"):
        (tmp_path / "tree" / place).parent.mkdir(parents=True)
        (tmp_path / "tree" / place).touch()
    if gpu:
        monkeypatch.setenv(plant_faults.GPU, "1")
    else:
        monkeypatch.delenv(plant_faults.GPU, raising=False)
    plant_faults.copy_tree(tmp_path / "tree", tmp_path / "copy")
    files = (path for path in (tmp_path / "copy").rglob("*.*") if path.is_file())
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in files}
    assert found == {"cuda/a.cu", "csrc/a.c", "build/obj/cpython/a.o", *(["build/obj/cuda/a.o"] if gpu else [])}


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ([None, None], plant_faults.HUNG),
        ([None, 0], plant_faults.SURVIVED),
        ([None, 1], plant_faults.CAUGHT),
        ([0], plant_faults.SURVIVED),
        ([1], plant_faults.CAUGHT),
        ([-11], plant_faults.CAUGHT),
    ],
)
def test_tests_that_take_too_long_are_run_again_alone(statuses, outcome, monkeypatch, tmp_path) -> None:
    """When all others are done, with a longer limit. A second hang is no catch. Nothing waits here: what the tests do with a fault in place
    is a list."""
    late = Fault("late", "xtrain/_version.py", "__version__", "__wersion__", "none", "tests/late.py")
    other = Fault("other", "xtrain/_version.py", "__version__", "__wersion__", "none", "tests/other.py")
    left, calls, shown, both = list(statuses), [], [], threading.Barrier(2)

    def run_tests(tree, tests: str, limit: float = plant_faults.LIMIT):
        assert "__wersion__" in (tree / late.file).read_text()
        if len(calls) < 2:
            both.wait(600)  # two jobs are at work
        calls.append((tests, limit))
        status = 1 if tests == other.tests else left.pop(0)
        return status, "" if status is None else "1 passed" if status == 0 else "1 failed"

    def copy_tree(source, target) -> None:
        (target / "xtrain").mkdir(parents=True)
        (target / late.file).write_text('__version__ = "0"\n')

    monkeypatch.setattr(plant_faults, "copy_tree", copy_tree)
    monkeypatch.setattr(plant_faults, "build", lambda tree: (0, ""))
    monkeypatch.setattr(plant_faults, "run_tests", run_tests)
    record = tmp_path / "record"
    verdicts = plant_faults.plant([late, other], 2, tmp_path, check_first=False, show=shown.append, record=record)
    assert [(verdict.fault, verdict.outcome) for verdict in verdicts] == [(late, outcome), (other, plant_faults.CAUGHT)]
    assert sorted(calls[:2]) == [(late.tests, plant_faults.LIMIT), (other.tests, plant_faults.LIMIT)]
    assert calls[2:] == [(late.tests, plant_faults.ALONE)] * (len(statuses) - 1)
    assert plant_faults.ALONE > plant_faults.LIMIT
    assert sorted(record.read_text().splitlines()) == [f"late\t{outcome}", "other\tcaught"]
    assert [text.startswith(plant_faults.HUNG) for text in shown[:2]] == [statuses[0] is None, False]
    assert shown[-1].startswith(outcome if len(statuses) == 2 else plant_faults.CAUGHT)


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("number", "checks"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
)
def test_a_signal_ends_all_and_leaves_nothing(number: int, checks: bool, tmp_path) -> None:
    """Two jobs are at work, and more faults wait. None gets a verdict. checks: while the tests run without a fault."""
    code = """
import os, shutil, sys
import plant_faults as p
here = sys.argv[1]
def copy_tree(source, target):
    shutil.copytree(p.ROOT / "xtrain" / "train", target / "xtrain" / "train")
def run_tests(tree, tests, limit=p.LIMIT):
    return p.run(tree, "-c", f"import os, time; open(f'{here}/{{os.getpid()}}.pid', 'w'); time.sleep(300)", limit=300)
p.copy_tree, p.run_tests, p.build = copy_tree, run_tests, lambda tree: (0, "")
sys.argv[1:] = [*sys.argv[2:], "--jobs", "2", "--only", "^writers:.* xtrain/train/", "--record", os.path.join(here, "record")]
p.main()
"""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    paths = [str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *([] if checks else ["--no-check"])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, process, "two jobs")
        process.send_signal(number)
        said = "".join(process.communicate(timeout=60))
    finally:
        process.kill()
    assert process.returncode == 128 + number, said
    assert not list(scratch.iterdir()) and not (tmp_path / "record").exists() and "caught" not in said, said
    for place in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(place.stem), 0)


@pytest.mark.slow
@pytest.mark.on_cpu
def test_a_fault_of_each_room_is_caught(tmp_path) -> None:
    """And what no test sees is told from it: a word of a docstring. That the tests pass without a fault is seen where the suite runs them."""
    if os.environ.get("XTRAIN_SANITIZE") or os.environ.get("XTRAIN_PLANTING"):
        pytest.skip("builds the extension again: not under a sanitizer, nor inside a run of planted faults")
    if not (ROOT / "setup.py").is_file() or not shutil.which((os.environ.get("CC") or "cc").split()[0]):
        pytest.skip("needs setup.py and a C compiler")
    nothing = Fault(
        "nobody",
        "xtrain/nn/utils.py",
        '"""Clipping of gradients, and parameters as one vector."""',
        '"""Clipping of gradients, and parameters as a vector."""',
        "none",
        "tests/nn/test_optim.py::test_clip",
    )
    rooms = [importlib.import_module(f"faults.{room}").FAULTS for room in ROOMS]
    firsts = (next((fault for fault in room if not fault.gpu), None) for room in rooms)  # a room may be all of cuda/
    faults = [*filter(None, firsts), nothing]
    record = tmp_path / "record"
    verdicts = plant_faults.plant(
        faults, min(4, os.cpu_count() or 1), tmp_path, check_first=False, show=lambda text: None, record=record
    )
    assert plant_faults.recorded(record) == {fault.name for fault in faults[:-1]}
    assert [verdict.outcome for verdict in verdicts] == [plant_faults.CAUGHT] * (len(faults) - 1) + [
        plant_faults.SURVIVED
    ]
