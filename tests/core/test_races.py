"""Every script of tests/races for a moment, without a sanitizer: threads at once on one thing neither end the process nor lose anything."""

from __future__ import annotations

import os

import pytest
from places import ROOT
from runs import python

pytestmark = pytest.mark.on_cpu

SCRIPTS = sorted(path for path in (ROOT / "tests/races").glob("*.py") if path.stem != "race")


def test_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 12


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_race(script) -> None:
    if script.stem == "fork" and os.environ.get("XTRAIN_SANITIZE"):
        pytest.skip(
            "a forked child waits for a lock of ASan's allocator, which another thread held at the fork (GCC 12)"
        )
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(script.parent)]))  # also with PYTHONSAFEPATH
    done = python("-X", "faulthandler", str(script), "1", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
