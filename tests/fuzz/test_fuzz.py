"""Each fuzzer for a few seconds, and that it finds what it is there to find."""

from __future__ import annotations

import json
import os
import re
import sys

import numpy as np
import pytest
from places import ROOT
from runs import python

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
from run import FAMILIES, family_class, one_case

import xtrain as xt
from xtrain import _C
from xtrain.saving import reader

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
        ("cat", lambda cat: lambda tensors, dim: tensors[0] if len(tensors) == 1 else cat(tensors, dim)),  # no copy
        ("matmul", lambda matmul: lambda a, b: matmul(a, b.detach()) + b.sum() * 0),  # another gradient
    ],
)
def test_programs_find(monkeypatch, tmp_path, call: str, planted) -> None:
    """What a wrong op would do."""
    assert not findings("programs", tmp_path)
    monkeypatch.setattr(_C, call, planted(getattr(_C, call)))
    assert findings("programs", tmp_path, 1500), call


@pytest.mark.parametrize("field", ["lanes", "stride", "alignment"])
def test_doors_find(monkeypatch, tmp_path, field: str) -> None:
    """A door that checks one thing less: it takes the object after repairing what it should have refused."""
    doors = family_class("doors")(tmp_path)
    if field == "lanes":
        monkeypatch.setattr(xt, "from_dlpack", lambda producer: xt.zeros(3))
    elif field == "stride":
        inner = xt.from_numpy
        monkeypatch.setattr(xt, "from_numpy", lambda array: inner(np.ascontiguousarray(array)))
    else:
        inner_tensor = xt.tensor
        monkeypatch.setattr(xt, "tensor", lambda data, *a, **k: inner_tensor(data, *a, **k) * 2)
    assert [wrong for number in range(300) if (wrong := one_case(doors, 5, number))]


def test_files_find(monkeypatch, tmp_path) -> None:
    """Pieces whose hashes nobody compares, and an exception that nobody documented."""
    files = family_class("files")(tmp_path)
    everything = files.targets
    files.targets = [target for target in everything if target[0] == "listed" and target[1].suffix == ".safetensors"]
    monkeypatch.setattr(reader.CheckedFile, "_wait", lambda self: self._checks.clear())
    found = [wrong for number in range(400) if (wrong := one_case(files, 5, number))]
    assert any("damage was accepted" in wrong for wrong in found)
    files.targets = everything
    monkeypatch.setattr(reader, "parse_object", lambda path, data: json.loads(data))
    found = [wrong for number in range(400) if (wrong := one_case(files, 5, number))]
    assert any("not documented" in wrong for wrong in found)


def test_the_corpus_is_refused(tmp_path) -> None:
    """Each file in the place of a good one, at every reader of its format: an exception that is documented, in one line."""
    files = family_class("files")(tmp_path)
    for kind, seeds in files.seeds.items():
        places = [(path, read) for format, path, read in files.targets if format == kind]
        assert places or kind == "tokenizer", f"no reader of {kind}"
        for path, read in places:
            good = path.read_bytes()
            for content in seeds:
                path.write_bytes(content)
                taken = files.tried(kind, path, read)
                assert not taken or kind == "metrics", f"{kind}: {content[:60]!r} is taken"
            path.write_bytes(good)
            read(path)


def test_a_crash_a_hang_and_memory_are_findings(tmp_path) -> None:
    """Planted in a worker: its case is named, and the worker goes on behind it."""
    planted = tmp_path / "programs.py"
    planted.write_text(PLANTED)
    done = python(
        RUN, "programs", "--seconds", "3", "--jobs", "1", "--seed", "1", env={**os.environ, "PLANTED": str(planted)}
    )
    assert done.returncode == 1, done.stdout
    for what in (
        "case 7: the process ended with status -11",
        "case 9: no end within 1 s",
        "case 11: an exception that is not",
    ):
        assert what in done.stdout, done.stdout
    cases = re.search(r"programs +(\d+) cases", done.stdout)
    assert cases and int(cases[1]) > 12


PLANTED = """
import os, signal, time
from frame import Family

class FAMILY(Family):
    name, slow = "programs", 1.0
    def run(self, chance):
        number = self.number = getattr(self, "number", -1) + 1
        mine = chance.random()
        from frame import chance_of
        for which in (7, 9, 11):
            if chance_of("programs", 1, which).random() == mine:
                if which == 7:
                    os.kill(os.getpid(), signal.SIGSEGV)
                if which == 9:
                    time.sleep(60)
                if which == 11:
                    bytes(1 << 40)
        time.sleep(0.01)
"""
