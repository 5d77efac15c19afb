"""Documents name only what exists: links between them with their headings, paths of the repository, names of source files.

A path counts when it begins with a folder of the repository's top level (`csrc/ops/call.c`, also with * or {a,b}), a file name when it
ends like source (`tape.h`). What a page tells its reader to create, ```c file=csrc/..., need not exist.
"""

import itertools
import re
from pathlib import Path

import pytest
from places import ROOT

TOP = ("csrc", "cuda", "xtrain", "tests", "parity", "docs", ".ci")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
CODE = sorted(
    path
    for top in TOP
    for path in (ROOT / top).rglob("*")
    if path.suffix in {".c", ".h", ".cu", ".cuh", ".py", ".pyi"} and "__pycache__" not in path.parts
)
NAMES = {path.name for top in TOP for path in (ROOT / top).rglob("*.*")} | {path.name for path in ROOT.glob("*.*")}
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"^(?:{'|'.join(map(re.escape, TOP))})/[\w.*/{{}},-]+$")
NAME = re.compile(r"^[\w-]+\.(?:c|h|cu|cuh|py|md|svg)$")
DOCUMENT = re.compile(r"\bdocs/[\w/-]+\.(?:md|svg)")
SOURCE = re.compile(rf"(?<![\w/.])(?:{'|'.join(map(re.escape, TOP))})/[\w./*-]+\.\w+")


def alternatives(path: str):
    """a/{b,c}/d -> a/b/d and a/c/d."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    assert all(len(part) == 1 for part in parts[::2]), f"{path}: a comma outside of braces"
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def exists(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(text: str, page: Path):
    for target in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield target


def dead_paths(text: str):
    created = {Path(path).stem for path in re.findall(r"^```\w+ file=(\S+)", text, re.M) if not exists(path)}
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    words = [
        word
        for quoted in QUOTED.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for word in quoted.split()
    ]
    words += [line.split(maxsplit=1)[0] for block in blocks for line in block.splitlines() if line.strip()]
    for word in words:
        word = word.strip("()").rstrip(".:;,")
        if Path(word).stem in created:
            continue
        if PATH.match(word):
            yield from (path for path in alternatives(word) if not exists(path))
        elif NAME.match(word) and word not in NAMES:
            yield word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page):
    text = page.read_text()
    dead = [*dead_links(text, page), *dead_paths(text)]
    assert not dead, f"{page.relative_to(ROOT)} names what is not there: {', '.join(dead)}"


def test_paths_named_in_the_source_exist():
    """Paths of source and documents in the comments of what is shipped; documents in the tests, too."""
    dead = []
    for path in CODE:
        tested = path.relative_to(ROOT).parts[0] in ("tests", "parity")
        for name in (DOCUMENT if tested else SOURCE).findall(path.read_text()):
            if not exists(name) and path != Path(__file__):
                dead.append(f"{path.relative_to(ROOT)}: {name}")
    assert not dead, "\n".join(dead)


def test_every_page_is_reached_from_the_tour():
    """By links, from the tour onwards: a page that nobody finds is not written for anybody."""
    reached, waiting = set(), [ROOT / "docs/tour.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = [target.partition("#")[0] for target in LINK.findall(page.read_text()) if not re.match(r"\w+:", target)]
        waiting += [(page.parent / link).resolve() for link in links if link]
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in reached and ROOT / "docs" in page.parents]
    assert not lost, f"no link leads from docs/tour.md to {', '.join(lost)}"


def test_the_tour_stays_a_map():
    words = len((ROOT / "docs/tour.md").read_text().split())
    assert words <= 1200, f"docs/tour.md has {words} words, must have at most 1200: move details to docs/internals/"


@pytest.mark.parametrize(
    "text",
    [
        "[a](no.md)",
        "[a](tour.md#no)",
        "`csrc/no.c`",
        "`cuda/*/no.cu`",
        "`xtrain/{nn,no}/__init__.py`",
        "`no.cuh`",
        "```\ncsrc/no/  x\n```",
    ],
)
def test_what_is_not_there_is_found(text):
    assert [*dead_links(text, ROOT / "docs/tour.md"), *dead_paths(text)]


@pytest.mark.parametrize(
    "text",
    [
        "[a](LOG.md#known-and-open)",
        "`csrc/*/*/rope.c`",
        "`tape.h`",
        "`xtrain/{nn,optim}/__init__.py`",
        "`nn.Linear`",
        "https://x.y/z.c",
    ],
)
def test_what_is_there_is_accepted(text):
    assert not [*dead_links(text, ROOT / "docs/tour.md"), *dead_paths(text)]
