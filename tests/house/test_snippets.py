"""The snippets of README and of the pages that users read run as they stand, or a comment above them says why not (snippets.py)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from places import ROOT
from runs import python
from snippets import blocks_of

pytestmark = pytest.mark.on_cpu
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md"]
PAGES += sorted((DOCS / "how-to").glob("*.md")) + sorted((DOCS / "reference").rglob("*.md"))
WITH = [page for page in PAGES if re.search(r"^```(python|sh)\b", page.read_text(), re.M)]
SKIPPED = 7  # blocks and lines that carry a reason; one more is a decision
DRIVER = Path(__file__).parent / "snippets.py"


@pytest.fixture(scope="module")
def reports():
    """{page: (run, changed, skipped)}; in the end a table, which pytest shows with -s."""
    found: dict[str, dict] = {}
    yield found
    print(f"\n{'page':44}{'run':>6}{'changed':>9}{'skipped':>9}")
    for page, report in sorted(found.items()):
        print(f"{page:44}{report['run']:6}{report['changed']:9}{len(report['skipped']):9}")
        for reason in report["skipped"]:
            print(f"    {reason}")


@pytest.mark.parametrize("page", WITH, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_snippets_of_a_page_run(page, tmp_path, reports) -> None:
    environment = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = python(str(DRIVER), str(page), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    reports[page.relative_to(ROOT).as_posix()] = json.loads(done.stdout.splitlines()[-1])


def test_what_is_left_out_is_counted() -> None:
    left = [
        reason
        for page in PAGES
        for block in blocks_of(page.read_text())
        for reason in filter(None, [block.why, *block.lines.values()])
    ]
    assert len(left) == SKIPPED, "\n".join(left)


def test_the_pages_that_have_snippets() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in WITH}
    assert {"README.md", "docs/index.md", "docs/how-to/data.md", "docs/reference/numerics.md"} <= names and len(
        names
    ) >= 11


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nx\n```\n", "must be one of"),
        ("```pyhton\nx\n```\n", "must be one of"),
        ("```python\nx\n", "not closed"),
        ("<!-- snippet\nskip: needs a GPU\n-->\n\n```python\nx\n```\n", "directly above"),
        ("<!-- snippet\nskip: slow\n-->\n```python\nx\n```\n", "3 words"),
        ("<!-- snippet\nskpi: needs a GPU\n-->\n```python\nx\n```\n", "no such rule"),
        ("<!-- snippet\nskip 'make': needs a GPU\n-->\n```sh\nls\n```\n", "no line begins"),
        ("<!-- snippet\nchange 'y' => 'z'\n-->\n```python\nx\n```\n", "must be there once"),
        ("<!-- snippet\nskip: needs a GPU\n-->\n```text\nx\n```\n", "not run"),
    ],
)
def test_rules_that_are_none(text, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        blocks_of(text)


PAGE = """
```python
x = 20
```
<!-- snippet
change 'raise' => 'assert x == 20 and y == 3;'
python
y = 3
-->
```python
raise
```
<!-- snippet
skip 'false': it fails always
-->
```sh
false && no
echo $((1 +  \\
  1)) > made   # by sh
xtrain --version
```
<!-- snippet
needs a_package_that_nobody_has
-->
```python
raise
```
```text
neither
```
"""


def test_the_runner(tmp_path) -> None:
    def run(text: str):
        (tmp_path / "page.md").write_text(text)
        return python(str(DRIVER), "page.md", cwd=tmp_path)

    done = run(PAGE)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / "made").read_text() == "2\n" and (report["run"], report["changed"]) == (4, 1)
    assert len(report["skipped"]) == 2 and "it fails always" in report["skipped"][0]
    for wrong in ("```python\n\n1 / 0\n```\n", "```sh\nfalse\n```\n", "```sh\nxtrain no-such-command\n```\n"):
        done = run(PAGE + wrong)
        assert done.returncode == 1 and "page.md" in done.stderr
