"""A short form of `make torture` and `make soak`, and that the simulated disk loses what was not flushed."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections import Counter

import pytest
from places import ROOT
from runs import python

sys.path.insert(0, str(ROOT / "tests" / "torture"))
from disk import SECTOR, Disk, Event, File, Folder
from power import crashes

FOLDER = ROOT / "tests" / "torture"

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD and the system calls of Linux"),
]
SANITIZED = bool(os.environ.get("XTRAIN_SANITIZE"))
preloads = pytest.mark.skipif(SANITIZED, reason="ASan's library must be the first that is preloaded")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(("power", "--states", "60", "--every", "7"), marks=preloads),
        pytest.param(("faults", "--every", "37"), marks=preloads),
        ("kills", "--kills", "8"),
        ("ranks", "--kills", "5"),
    ],
)
def test_nothing_is_lost(part: tuple[str, ...]) -> None:
    done = python(str(FOLDER / "torture.py"), *part)
    assert done.returncode == 0 and "; 0 wrong;" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(SANITIZED, reason="ASan keeps freed memory, which the test would see grow")
def test_a_short_life() -> None:
    done = python(str(FOLDER / "soak.py"), "--actions", "250")
    assert done.returncode == 0 and "; 0 wrong" in done.stdout, done.stdout + done.stderr


@preloads
@pytest.mark.parametrize("seen", [0, 2])
def test_flushes_that_the_disk_does_not_see(tmp_path, seen: int) -> None:
    """A saver without them, or with every second one: what it promises is not found after a crash."""
    numbers = itertools.count(1)
    assert crashes(
        tmp_path, 30, 1, Counter(), 9, lambda event: event.kind == "S" and not (seen and next(numbers) % seen)
    )


@preloads
def test_an_exchange_that_the_disk_does_not_see(tmp_path) -> None:
    """What had the name before is removed, and was the one that counts."""
    assert crashes(tmp_path, 30, 1, Counter(), 9, lambda event: event.kind == "X")


def test_what_a_crash_leaves_of_a_file() -> None:
    file = File(b"a" * 1000)
    file.waiting = [(0, b"b" * 2000), (1500, None)]
    assert file.crashed(random.Random(1), "nothing") == b"a" * 1000
    assert file.crashed(random.Random(1), "everything") == b"b" * 1500
    found = {file.crashed(random.Random(seed), "some") for seed in range(300)}
    assert b"b" * 2000 in found and b"\0" * 1500 in found and len(found) > 10
    torn = [one for one in found if len(one) == 2000 and len(set(one)) == 2]
    assert torn and all(len(set(one[at : at + SECTOR])) == 1 for one in torn for at in range(0, 2000, SECTOR))
    file.sync()
    assert file.crashed(random.Random(1), "nothing") == b"b" * 1500


def test_what_a_crash_leaves_of_names() -> None:
    disk = Disk(1)
    for event in (
        Event("M", "d", b"", 1, 2, 0), Event("C", "x", b"", 2, 3, 0), Event("W", "", b"data", 3, 0, 0), Event("S", "", b"", 3, 0, 0),
        Event("S", "", b"", 1, 0, 0),
    ):  # fmt: skip
        disk.follow(event)
    chance = random.Random(1)
    assert disk.crashed(chance, "nothing") == {"d": {}}  # the folder's name was flushed, not that of the file in it
    assert disk.crashed(chance, "everything") == {"d": {"x": b"data"}}
    disk.follow(Event("S", "", b"", 2, 0, 0))
    disk.follow(Event("R", "d", b"e", 1, 1, 0))
    found = [disk.crashed(random.Random(seed), "some") for seed in range(40)]
    assert {tuple(tree) for tree in found} == {("d",), ("e",)}  # one or the other
    disk.follow(Event("D", "x", b"", 2, 0, 0))
    assert disk.crashed(chance, "everything") == {"e": {}}
    assert isinstance(disk.root, Folder)
    with pytest.raises(ValueError, match="between two folders"):
        disk.follow(Event("R", "e", b"f", 1, 2, 0))
