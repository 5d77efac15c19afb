"""Packages: archives with the same bytes each time, a bill of materials, pinned requirements, a workflow that calls what exists.

tools/wheels.py itself needs a compiler, a registry and minutes: docs/how-to/packages.md says when it was run, and with what result.
"""

import base64
import csv
import hashlib
import io
import json
import os
import re
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT

from tools import archive, pythons, sbom, try_package, wheels

DATE = 1_700_000_000
WORKFLOW = ROOT / ".github/workflows/wheels.yml"
LICENCE = """All rights reserved.

Name: OpenBLAS
Files: lib/libscipy_openblas*.so
Description: bundled as a dynamically linked library
Availability: https://example.org/openblas
License: BSD-3-Clause-Attribution
  Copyright

Name: GCC runtime library
Files: lib/libscipy_openblas*
Description: libgfortran
Availability: https://example.org/gcc
License: GPL-3.0-with-GCC-exception
"""


def unpacked(folder: Path, mtime: int) -> Path:
    """A wheel of few bytes, as it lies unpacked."""
    files = {
        "xtrain/_C.cpython-311-x86_64-linux-gnu.so": b"core",
        "xtrain/_lib/libxtrain_blas.so": b"\0OpenBLAS 0.3.34 DYNAMIC_ARCH\0",
        "xtrain/_lib/LICENSE.openblas.txt": LICENCE.encode(),
        "xtrain-1.0.dist-info/METADATA": b"Metadata-Version: 2.4\nName: xtrain\nVersion: 1.0\n\nVersion: of the text\n",
        "xtrain-1.0.dist-info/RECORD": b"",
    }
    for name in sorted(files, reverse=mtime % 2 == 1):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
        path.chmod(0o600 if mtime % 2 else 0o755)
        os.utime(path, (mtime, mtime))
    return folder


def test_a_wheel_has_the_same_bytes_whenever_it_is_packed(tmp_path):
    for i in (1, 2):
        archive.pack_wheel(unpacked(tmp_path / str(i), 1_600_000_000 + i), tmp_path / f"{i}.whl", DATE)
    assert (tmp_path / "1.whl").read_bytes() == (tmp_path / "2.whl").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.whl") as packed:
        names = packed.namelist()
        assert names[-1] == "xtrain-1.0.dist-info/RECORD", "installers read RECORD last"
        listed = {row[0]: row[1:] for row in csv.reader(io.StringIO(packed.read(names[-1]).decode()))}
        assert sorted(listed) == sorted(names)
        for name in names[:-1]:
            algorithm, digest = listed[name][0].split("=")
            data = packed.read(name)
            assert base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).decode() == digest + "=", name
            assert int(listed[name][1]) == len(data), name
        modes = {name: packed.getinfo(name).external_attr >> 16 & 0o777 for name in names}
    assert modes["xtrain/_lib/libxtrain_blas.so"] == 0o755 and modes[names[-1]] == 0o644


def test_a_source_distribution_has_the_same_bytes_whenever_it_is_packed(tmp_path):
    for i, names in enumerate([["p/a.py", "p/.ci/run"], ["p/.ci/run", "p/a.py"]]):
        with tarfile.open(tmp_path / f"{i}.tar.gz", "w:gz") as made:
            folder = tarfile.TarInfo("p")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o700
            made.addfile(folder)
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.uid, entry.uname, entry.mode = 2, i, i, f"user{i}", 0o600 + i
                made.addfile(entry, io.BytesIO(b"x\n"))
        archive.repack_sdist(tmp_path / f"{i}.tar.gz", tmp_path / f"out{i}", DATE)
    data = (tmp_path / "out0").read_bytes()
    assert data == (tmp_path / "out1").read_bytes()
    assert int.from_bytes(data[4:8], "little") == DATE, "gzip has a time of its own"
    with tarfile.open(tmp_path / "out0") as packed:
        found = [(entry.name, entry.mtime, oct(entry.mode), entry.uname) for entry in packed]
    files = [("p/.ci/run", DATE, "0o755", ""), ("p/a.py", DATE, "0o644", "")]
    assert found == [("p", DATE, "0o755", ""), *files]


def test_a_wheel_has_the_same_bytes_in_any_time_zone(tmp_path, monkeypatch):
    packed = []
    try:
        for zone in ("UTC0", "JST-9"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            archive.pack_wheel(unpacked(tmp_path / zone, 1_600_000_000), tmp_path / f"{zone}.whl", DATE)
            packed.append((tmp_path / f"{zone}.whl").read_bytes())
    finally:
        monkeypatch.undo()
        time.tzset()
    assert packed[0] == packed[1]


def test_the_date_of_the_last_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    asked = []

    def git(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout=f"{DATE}\n")

    monkeypatch.setattr(archive.subprocess, "run", git)
    assert archive.source_date(tmp_path) == DATE
    assert asked == [["git", "-C", str(tmp_path), "log", "-1", "--format=%ct"]], (
        "when it was committed, not when written"
    )

    def none(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(archive.subprocess, "run", none)
    assert archive.source_date(tmp_path) == archive.FIRST, "a source distribution, without git"


def test_the_date_of_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert archive.source_date(ROOT) == DATE
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert archive.source_date(ROOT) == archive.FIRST, "zip files begin in 1980"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(ValueError, match="SOURCE_DATE_EPOCH must be a number of seconds since 1970, got 'today'"):
        archive.source_date(ROOT)


def test_the_bill_of_materials_names_what_is_in_the_wheel(tmp_path):
    package = unpacked(tmp_path, DATE) / "xtrain"
    text = sbom.document(package, "1.0+cpu", "0.3.34.481.3", "13.0", DATE)
    assert text == sbom.document(package, "1.0+cpu", "0.3.34.481.3", "13.0", DATE)
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    core = bill["metadata"]["component"]
    assert core["purl"] == "pkg:pypi/xtrain@1.0%2Bcpu"
    assert core["hashes"] == sbom.sha256(package / "_C.cpython-311-x86_64-linux-gnu.so")
    other = json.loads(sbom.document(package, "1.1", "0.3.34.481.3", "13.0", DATE))
    assert other["serialNumber"] != bill["serialNumber"], "a document of another wheel"
    (blas,) = bill["components"]
    assert (blas["name"], blas["version"]) == ("scipy-openblas32", "0.3.34.481.3")
    assert blas["hashes"] == sbom.sha256(package / "_lib/libxtrain_blas.so")
    parts = {part["name"]: part["licenses"][0]["license"]["id"] for part in blas["components"]}
    assert parts == {"OpenBLAS": "BSD-3-Clause-Attribution", "GCC runtime library": "GPL-3.0-with-GCC-exception"}
    assert blas["components"][0]["version"] == "0.3.34", "as the library states it"
    (package / "_lib/libxtrain_cuda.so").write_bytes(b"kernels")
    bill = json.loads(sbom.document(package, "1.0", "0.3.34.481.3", "13.0", DATE))
    assert bill["components"][1]["version"] == "13.0"
    unknown = json.loads(sbom.document(package, "1.0", "0.3.34.481.3", None, DATE))
    assert "version" not in unknown["components"][1]
    names = [part["bom-ref"] for part in bill["components"]]
    assert names == ["pkg:pypi/scipy-openblas32@0.3.34.481.3", "nvidia/cudart"]
    assert bill["dependencies"] == [{"ref": "pkg:pypi/xtrain@1.0", "dependsOn": names}]
    (package / "_lib/LICENSE.openblas.txt").write_text("another text")
    with pytest.raises(ValueError, match="must name the parts of OpenBLAS, and names none"):
        sbom.document(package, "1.0", "0.3.34.481.3", None, DATE)


def test_the_wheel_without_cuda_has_a_version_of_its_own(tmp_path):
    unpacked(tmp_path, DATE)
    info = wheels.name_variant(tmp_path, tmp_path / "xtrain-1.0.dist-info", "1.0+cpu")
    assert info == tmp_path / "xtrain-1.0+cpu.dist-info"
    text = (info / "METADATA").read_text()
    assert "\nVersion: 1.0+cpu\n" in text and text.endswith("\nVersion: of the text\n")


def test_a_cuda_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "libxtrain_cuda.so").write_bytes(b"0.1.0-0123456789abcdef\0")
    with pytest.raises(SystemExit, match="--cuda-library must be built from these sources"):
        wheels.check_cuda_library(tmp_path / "libxtrain_cuda.so")


def test_a_tool_that_is_missing_is_named():
    with pytest.raises(SystemExit, match=r"^no-such-strip could not be started: No such file or directory$"):
        wheels.run("no-such-strip", "--strip-all")


def test_build_requirements_are_pinned_by_hash():
    text = re.sub(r"\\\n\s*", "", (ROOT / "tools/requirements-build.txt").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pattern = re.compile(r"([\w-]+)==[\w.]+ (; python_version [<>]=? '[\d.]+' )?(--hash=sha256:[0-9a-f]{64} ?)+")
    wrong = [line for line in lines if not pattern.fullmatch(line)]
    assert not wrong, f"a version and hashes, and nothing else: {wrong}"
    asked = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    names = {re.match(r"[\w-]+", word.strip(' "'))[0] for word in asked.split(",")}
    assert names < {line.split("==")[0] for line in lines}, "what pyproject.toml needs to build"


# Modules whose tests `make test` may skip: a GPU's, one that is compiled for minutes, and the linter's.
UNLISTED = {"cupy", "llama_cpp", "basedpyright"}
PACKAGES = {"myst_parser": "myst-parser", "xdist": "pytest-xdist"}


def test_no_test_is_skipped_for_a_package_that_is_not_installed():
    listed = set(re.findall(r"^[\w-]+", (ROOT / "parity/requirements.txt").read_text(), re.M))
    extras = re.search(r"^test = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    listed |= set(re.findall(r"[\w-]+", extras)) | {
        "tokenizers",
        "matplotlib",
    }  # transformers needs the one, `plot` lists the other
    asked = set()
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "parity").rglob("*.py")]):
        asked |= set(re.findall(r"""(?:importorskip|find_spec)\("(\w+)""", path.read_text()))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        asked |= set(re.findall(r"^needs (\w+)$", page.read_text(), re.M))
    assert {"peft", "nbclient", "ray", "mpi4py"} <= asked
    missing = {name for name in asked - UNLISTED if PACKAGES.get(name, name) not in listed}
    assert not missing, f"parity/requirements.txt must list what tests look for, got none of {missing}"


def options_of(script: str) -> set[str]:
    return set(re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / script).read_text()))


def wrong_words(command: str) -> list[str]:
    """What a command of the workflow names and the repository lacks."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = re.findall(r"[^\s\"=]+", command)
    if words[0] == "make":
        known = {*targets, "make", "PYTHON", "python3.11", "ARGS", "cpu", "cuda", "dist-again"} | options_of(
            "tools/wheels.py"
        )
        return [word for word in words if word not in known]
    if words[0].startswith("python3"):
        known = options_of(words[1]) if (ROOT / words[1]).exists() else set()
        return [word for word in words[1:2] if not known] + [
            w for w in words[2:] if w.startswith("--") and w not in known
        ]
    return [] if words[0] in ("diff", "apt-get") else words[:1]


def test_the_workflow_calls_what_the_repository_has():
    text = WORKFLOW.read_text()
    commands = re.findall(r"^ +run: (.+)$", text, re.M)
    assert len(commands) == text.count("run:") >= 6, "one line a step, so that this test reads it whole"
    wrong = {command: words for command in commands if (words := wrong_words(command))}
    assert not wrong
    assert wrong_words("make wheel ARGS=--varian") == ["wheel", "--varian"]
    assert wrong_words("python3.11 tools/try.py dist/*") == ["tools/try.py"]
    page = (ROOT / "docs/how-to/packages.md").read_text()
    missing = [command for command in commands if f"`{command}`" not in page]
    assert not missing, f"docs/how-to/packages.md must say whether each step has been run: {missing}"
    versions = re.findall(r"^ +(3\.\d+)$", text, re.M)
    assert [f"python{version}" for version in versions] == 2 * wheels.PYTHONS


def test_pythons_that_do_not_start_are_left_out(tmp_path, monkeypatch):
    for name, status in (("python3.10", 127), ("python3.12", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pythons.on_the_path() == ["python3.12"]


def test_a_wheel_is_tried_with_the_python_of_its_tag(tmp_path):
    for name in ("x-1.0-cp312-cp312-linux_x86_64.whl", "x-1.0-7-cp312-cp312-linux_x86_64.whl", "x.whl", "x-1.0.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    found = {"cp311": "python3.11", "cp312": "python3.12"}
    for file in tmp_path.glob("x-1.0-*.whl"):
        assert try_package.interpreter(file, found) == "python3.12"
    assert try_package.interpreter(tmp_path / "x-1.0.tar.gz", found) == "python3.11"
    for name, text in (("x.whl", "none among cp311, cp312"), ("y-1.0-cp312-cp312-any.whl", "there is no such file")):
        with pytest.raises(RuntimeError, match=text):
            try_package.interpreter(tmp_path / name, found)
