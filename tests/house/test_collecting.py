"""Processes of `pytest -n` read test files in opposite orders, have one order of tests, and begin with those that take long."""

import os
import shutil
from pathlib import Path

import pytest
from places import ROOT
from runs import python

NAMES = ["a/test_1", "a/test_2", "b/test_3", "b/test_4"]


def ordered(folder: Path, *options: str) -> tuple[dict[str, list[str]], list[str]]:
    """Of each process, the test files in the order in which it read them; the tests in the order in which they ran."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    note = f"import os\nwith open({str(log)!r}, 'a') as file:\n    file.write(' '.join((os.environ.get('PYTEST_XDIST_WORKER', ''), {{}})) + '\\n')\n"
    for name in NAMES:
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        slow = "    pytestmark = pytest.mark.slow\n" if name == "b/test_3" else ""
        body = "".join(f"    {line}\n" for line in note.format("'ran', __name__").splitlines())
        path.write_text(f"import pytest\n{note.format(repr('read ' + path.stem))}{slow.strip()}\n\ndef test():\n{body}")
    shutil.copy(ROOT / "tests/conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    on_cpu\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests/support"), env.get("PYTHONPATH"))))
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "a", "b", cwd=folder, env=env)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
    read: dict[str, list[str]] = {}
    ran = []
    for line in log.read_text().splitlines():
        worker, what, name = line.split(" ")
        (read.setdefault(worker, []) if what == "read" else ran).append(name)
    return read, ran


def test_every_second_process_reads_backwards_and_what_takes_long_comes_first(tmp_path) -> None:
    pytest.importorskip("xdist", reason="the package pytest-xdist is not installed")
    read, ran = ordered(tmp_path, "-n", "2", "--dist", "worksteal")
    assert read == {
        "gw0": ["test_1", "test_2", "test_3", "test_4"],
        "gw1": ["test_2", "test_1", "test_4", "test_3"],  # the folders are arguments, which are in their order
    }
    assert sorted(ran) == ["test_1", "test_2", "test_3", "test_4"]
    assert ran.index("test_3") < ran.index("test_1")  # both of the first process


def test_a_process_alone_has_pytests_order(tmp_path) -> None:
    read, ran = ordered(tmp_path, "-p", "no:xdist")
    assert read == {"": ran} and ran == ["test_1", "test_2", "test_3", "test_4"]
