"""The fuzzer's second opinion: PyTorch agrees with references and rules of the random programs, and a wrong one is told."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from places import ROOT
from torch_steps import STEPS, differs

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import programs
from run import one_case

pytestmark = pytest.mark.on_cpu


def test_random_programs_agree_with_pytorch(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(programs, "BESIDE", 0.3)
    family = programs.Programs(tmp_path)
    assert family.second is differs
    assert not [wrong for number in range(400) if (wrong := one_case(family, 11, number))]
    assert family.counts["beside PyTorch"] > 30
    assert all(family.counts[shape] for shape in ("chain", "fan", "ladder", "tree", "square"))


def test_every_rule_has_a_step_of_pytorch() -> None:
    assert set(programs.RULES) <= set(STEPS)


@pytest.mark.parametrize("where", ["reference", "rule", "shape"])
def test_what_is_wrong_is_told(where: str) -> None:
    x, dy = np.linspace(-2.0, 2.0, 12).reshape(3, 4), np.ones((3, 4))
    rule, want = programs.RULES["tanh"], np.tanh(x)
    assert differs("tanh", [x], dy, want, rule, {}) == ""
    if where == "reference":
        said = differs("tanh", [x], dy, want + 1e-7, rule, {})
    elif where == "shape":
        said = differs("tanh", [x], dy, want[:2], rule, {})
    else:
        said = differs("tanh", [x], dy, want, lambda *a, **k: [(p * (1 + 1e-7), s) for p, s in rule(*a, **k)], {})
    assert where in said or "reference has shape" in said
