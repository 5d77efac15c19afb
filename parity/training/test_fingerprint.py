"""fingerprint.py: which differences of two files it sees, and that it names what it hashes once and the same each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SCRIPT = ROOT / "parity/training/fingerprint.py"


def fingerprint(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(os.fspath, arguments)], capture_output=True, text=True)


def written(path: Path, machine: str = "cpu", **items: str) -> Path:
    path.write_text(json.dumps({"machine": [machine], "items": items}))
    return path


@pytest.mark.on_cpu
def test_compare(tmp_path) -> None:
    before = written(tmp_path / "before", a="1", b="2", c="3")
    same = fingerprint("--compare", before, written(tmp_path / "same", c="3", b="2", a="1"))
    assert (same.returncode, same.stdout, same.stderr) == (0, "0 of 3 items differ\n", "")
    other = fingerprint("--compare", before, written(tmp_path / "other", "cuda", b="2", c="4", d="5"))
    assert other.returncode == 1
    assert other.stdout.splitlines() == [
        "other machines: ['cpu'] and ['cuda']",
        "only before: a",
        "only after: d",
        "differs: c",
        "3 of 4 items differ",
    ]
    nothing = written(tmp_path / "nothing")
    assert fingerprint("--compare", nothing, nothing).returncode == 1, "nothing was compared"


@pytest.mark.on_cpu
def test_the_same_hashes_each_time(tmp_path) -> None:
    """Of another process with another hash seed; an item of --only is an item of all."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        done = fingerprint("--only", "ops/rms_norm", "--json", file)
        assert done.returncode == 0, done.stderr
    items = json.loads(files[0].read_text())["items"]
    assert done.stdout.splitlines() == [f"{name} {value}" for name, value in items.items()]
    assert all(name.startswith("ops/rms_norm") for name in items)
    assert {name.rpartition("/")[2] for name in items} == {"forward", "backward"}
    assert len(set(items.values())) > 0.8 * len(items), "different cases have the same hash"
    assert fingerprint("--compare", *files).returncode == 0
