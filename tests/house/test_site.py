"""`make docs`: no warning, no dead link, no compiler for CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.append(str(ROOT / "docs/site"))
from check_links import dead_links

pytestmark = pytest.mark.on_cpu
NEEDED = ("sphinx", "myst_parser", "furo")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def tables(text: str) -> list[list[list[str]]]:
    """Tables as rows of cells, without markup."""
    text = re.sub(r"\[([^\]\n]*)\](?:\([^)\n]*\)|\[[^\]\n]*\])|[`*]", r"\1", BLOCK.sub("", text))
    found = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]
    return [[re.split(r"(?<!\\)\|", row)[1:-1] for row in rows if not re.fullmatch(r"[\s|:-]+", row)] for rows in found]


def narrowest(table: list[list[str]]) -> int:
    """Characters that a table takes with every space a line break; a border counts as two."""
    longest = [max(len(word) for cell in column for word in ["", *cell.split()]) for column in zip(*table, strict=True)]
    return sum(longest) + 2 * len(longest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_fit_the_page(page: Path) -> None:
    """In the site's small type; a browser shows what is wider only to those who scroll."""
    wide = {" | ".join(table[0]): narrowest(table) for table in tables(page.read_text())}
    assert not {head: width for head, width in wide.items() if width > 106}


def test_what_the_width_of_a_table_is() -> None:
    text = "x\n\n| a `bb` | [ccc](d.md) |\n|---|---:|\n| **dddd** e | f |\n\n```\n| no table | at all |\n```\n"
    assert tables(text) == [[[" a bb ", " ccc "], [" dddd e ", " f "]]]
    assert narrowest(tables(text)[0]) == 4 + 3 + 2 * 2


def test_commands_of_the_readme_fit_the_page() -> None:
    lines = [line for kind, block in BLOCK.findall(PAGES[0].read_text()) if kind == "sh" for line in block.splitlines()]
    assert len(lines) > 10 and not [line for line in lines if len(line) > 90]


def test_links_of_a_site(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b.svg").write_text("<svg/>")
    (tmp_path / "sub/two.html").write_text(
        "<a href='../one.html#here'>1</a> <a name='old'></a> <img src='../a%20b.svg'>"
    )
    good = (
        "<h1 id='here'>x</h1> <a href='#here'></a> <a href='sub/two.html#old'></a> <a href='https://no.where/#x'></a>"
    )
    (tmp_path / "one.html").write_text(good)
    assert dead_links(tmp_path) == []
    bad = ["no.html", "#no", "sub/two.html#no", "sub", "../outside.html", "a b.png"]
    (tmp_path.parent / "outside.html").write_text("")
    (tmp_path / "one.html").write_text(good + "".join(f"<a href='{link}'></a>" for link in bad))
    assert dead_links(tmp_path) == [f"one.html: {link}" for link in sorted(bad)]


def test_the_target_compiles_nothing_for_cuda(tmp_path) -> None:
    """Neither on a machine with nvcc and a GPU, nor where XTRAIN_CUDA=1 is in the environment."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    command = [make, "--dry-run", "docs", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"]
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of `make test`
    env = {**{name: value for name, value in os.environ.items() if name not in outer}, "XTRAIN_CUDA": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    builds = [line for line in done.stdout.splitlines() if "build_ext" in line or "--editable" in line]
    assert len(builds) == 1 and "XTRAIN_CUDA=0 " in builds[0]
    assert "--fail-on-warning" in done.stdout and "check_links.py build/site" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"{', '.join(NEEDED)} are not all installed"
)
def test_the_site(tmp_path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-c", "docs/site", "-d", str(tmp_path / "trees"), "docs", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not dead_links(tmp_path / "site")
    start = (tmp_path / "site/start.html").read_text()
    assert re.search(r'href="_static/site\.css\b', start)
    assert 'href="how-to/data.html"' in start and 'src="_images/loss.svg"' in start
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {Path("notebooks", f"{path.stem}.html") for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    assert not [page for page in pages if not (tmp_path / "site" / page).is_file()]
    methods = (tmp_path / "site/reference/api/xtrain.html").read_text()
    assert "Methods of Tensor" in methods and 'id="xtrain.Tensor.amax"' in methods
    assert "-&gt;</span>" not in methods, "a signature that was taken for a name"
    assert not re.search(r">\w+\?<", methods), "an optional argument in C's words"
