"""The model behind docs/reference/scaling.md reproduces what was measured, and the page has what it computes."""

import subprocess
import sys

import pytest
from places import ROOT

pytestmark = pytest.mark.on_cpu


def test_the_page_has_what_the_model_computes() -> None:
    """The script itself fails where it is 5 % away from a measurement."""
    command = [sys.executable, str(ROOT / "parity" / "bench" / "scaling_model.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "reference" / "scaling.md").read_text()
    rows = [line.split() for line in printed.partition("weak scaling")[2].splitlines()[1:]]
    computed = [row for row in rows if row[-7] in ("8", "64", "1000") or row[-8] in ("8", "64", "1000")]
    assert len(computed) == 15
    for row in computed:
        assert f"{float(row[-5]):,.0f} ms" in page, row
        assert f"{row[-2][:-1]} %" in page, row
