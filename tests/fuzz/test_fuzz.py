"""Each fuzzer for a few seconds, and that it finds what it is there to find."""

from __future__ import annotations

import re
import sys

import pytest
from places import ROOT
from runs import python

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
from run import FAMILIES, family_class, one_case

from xtrain import _C

pytestmark = pytest.mark.on_cpu
RUN = str(ROOT / "tests" / "fuzz" / "run.py")


@pytest.mark.parametrize("name", FAMILIES)
def test_no_findings(name: str) -> None:
    done = python(RUN, name, "--seconds", "6", "--jobs", "1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    cases = re.search(rf"{name} +(\d+) cases", done.stdout)
    assert cases and int(cases[1]) > 20, done.stdout


def findings(name: str, folder, count: int = 300) -> list[str]:
    family = family_class(name)(folder)
    return [wrong for number in range(count) if (wrong := one_case(family, 5, number))]


@pytest.mark.parametrize(
    ("call", "planted"),
    [
        ("gelu", lambda gelu: lambda x, *a, **k: gelu(x, *a, **k) + x * 1e-2),
        ("amax", lambda amax: lambda x, *a, **k: amax(x, *a, **k) + 1e-3),
        ("transpose", lambda transpose: lambda x, a, b: transpose(x, a, b).clone()),  # an alias that is none
        ("slice", lambda cut: lambda x, dim, start, stop, step: cut(x, dim, start, stop, min(step, 2))),
        ("where", lambda where: lambda c, a, b: where(c, a, b.detach())),  # no gradient
        ("matmul", lambda matmul: lambda a, b: matmul(a, b.detach()) + b.sum() * 0),  # another gradient
    ],
)
def test_programs_find(monkeypatch, tmp_path, call: str, planted) -> None:
    """What a wrong op would do."""
    assert not findings("programs", tmp_path)
    monkeypatch.setattr(_C, call, planted(getattr(_C, call)))
    assert findings("programs", tmp_path, 1500), call
