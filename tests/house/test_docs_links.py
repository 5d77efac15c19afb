"""Documents and comments name only what exists: links between pages with their headings, paths, names of files.

A reference is a word that ends like a file of ours (`tape.h`, `ops/call.c`, also with * or {a,b}), anywhere in a page, a comment or a
docstring. A path is looked for below the folders of BASES and beside the file that names it. A path of a folder counts where it is
quoted and begins at the top level (`csrc/py`). What a page tells its reader to create, ```c file=csrc/..., need not exist.
"""

import ast
import importlib
import io
import itertools
import re
import tokenize
from pathlib import Path

import pytest
from places import ROOT
from runs import python

import xtrain

TOP = ("csrc", "cuda", "xtrain", "tests", "parity", "docs", "tools", ".ci")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
CODE = sorted(
    path
    for top in TOP
    for path in (ROOT / top).rglob("*")
    if path.suffix in {".c", ".h", ".cu", ".cuh", ".py", ".pyi"} and "__pycache__" not in path.parts
) + sorted(ROOT.glob("*.py"))
BASES = [ROOT / base for base in ("", "csrc", "cuda", "xtrain", "docs", "tests", "parity")]
NAMES = {path.name for top in TOP for path in (ROOT / top).rglob("*.*")} | {path.name for path in ROOT.glob("*.*")}
TOUR = ROOT / "docs/tour.md"
API = ROOT / "docs/reference/api"
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.M)
OURS = re.compile(r"https://(?:github\.com/xtrain/xtrain/blob|raw\.githubusercontent\.com/xtrain/xtrain)/main/")
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"^(?:{'|'.join(map(re.escape, TOP))})/[\w.*/{{}},-]+$")
REFERENCE = re.compile(r"(?<![\w/.:~$*{}-])(?:[\w*{},.-]+/)*[\w*{},-]+\.(?:c|h|cu|cuh|py|pyi|md|svg)(?![\w/(]|\.\w)")
OF_OTHERS = {"Python.h"}


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


def links(text: str) -> list[str]:
    return [one or other for one, other in LINK.findall(text)]


def dead_links(text: str, page: Path):
    for target in links(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        file, _, anchor = target.partition("#")
        if OURS.match(file):
            found = ROOT / OURS.sub("", file)
        elif re.match(r"\w+:", target):
            continue
        else:
            found = (page.parent / file).resolve() if file else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield target


def dead_paths(text: str, page: Path):
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
    for word in references(text):
        if Path(word).stem not in created and not found(word, page.parent):
            yield word


def references(text: str) -> list[str]:
    return REFERENCE.findall(re.sub(r"\w+://\S+", "", text))


def found(word: str, folder: Path) -> bool:
    if "/" not in word:
        return word in NAMES | OF_OTHERS or ("*" in word and any(Path(name).match(word) for name in NAMES))
    bases = [*BASES, folder]
    return all(any(any(base.glob(path)) for base in bases) for path in alternatives(word))


def comments(path: Path) -> str:
    """Comments and docstrings of a source file."""
    text = path.read_text()
    if not path.suffix.startswith(".py"):
        return "\n".join(re.findall(r"/\*.*?\*/|//[^\n]*", text, re.S))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    parts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    return "\n".join(
        parts + [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, documented)]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page):
    text = page.read_text()
    dead = [*dead_links(text, page), *dead_paths(text, page)]
    assert not dead, f"{page.relative_to(ROOT)} names what is not there: {', '.join(dead)}"


def test_files_named_in_comments_exist():
    dead = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in CODE
        if path != Path(__file__)
        for word in references(comments(path))
        if not found(word, path.parent)
    ]
    assert not dead, "\n".join(dead)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# see no.c, ops/no.c and ../no.h", 3),
        ("# gemm/{naive,no}.c of csrc/cpu", 1),
        ("# tape.h, ops/call.c, contract/*.h, docs/tour.md", 0),
        ("# https://a.b/no.c, no.compute, x.h(1)", 0),
    ],
)
def test_what_a_comment_names(tmp_path, text, count):
    path = tmp_path / "file.py"
    path.write_text(text + "\nx = 'no.c is no comment'\n")
    assert sum(not found(word, ROOT / "csrc/cpu") for word in references(comments(path))) == count


def test_every_page_is_reached_from_the_tour():
    """By links, from the tour onwards: a page that nobody finds is not written for anybody."""
    reached, waiting = set(), [TOUR]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        files = [target.partition("#")[0] for target in links(page.read_text()) if not re.match(r"\w+:", target)]
        waiting += [(page.parent / file).resolve() for file in files if file]
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in reached and ROOT / "docs" in page.parents]
    assert not lost, f"no link leads from docs/tour.md to {', '.join(lost)}"


def test_the_readme_reads_well_at_a_package_index() -> None:
    """Which has none of our files: links and pictures are absolute, and every name of a link is defined."""
    text = (ROOT / "README.md").read_text()
    assert (
        all(re.match("https://", target) for target in links(text))
        and sum(map(bool, map(OURS.match, links(text)))) > 15
    )
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    named = re.findall(r"\]\[([^\]]+)\]", prose)
    assert {*named} == {*re.findall(r"^\[([^\]]+)\]: ", prose, re.M)}


def test_the_tour_stays_a_map():
    words = len(TOUR.read_text().split())
    assert words <= 1200, f"docs/tour.md has {words} words, must have at most 1200: move details to docs/internals/"


@pytest.mark.parametrize(
    "text",
    [
        "[a](no.md)",
        "[a](tour.md#no)",
        "[a]: no.md",
        "[a](https://github.com/xtrain/xtrain/blob/main/docs/no.md)",
        "[a]: https://github.com/xtrain/xtrain/blob/main/docs/tour.md#no",
        "![a](https://raw.githubusercontent.com/xtrain/xtrain/main/docs/no.svg)",
        "`csrc/no.c`",
        "`cuda/*/no.cu`",
        "`xtrain/{nn,no}/__init__.py`",
        "`no.cuh`",
        "see ops/no.c",
        "the (internals/no.md) page",
        "```\ncsrc/no/  x\n```",
    ],
)
def test_what_is_not_there_is_found(text):
    assert [*dead_links(text, TOUR), *dead_paths(text, TOUR)]


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
    assert not [*dead_links(text, TOUR), *dead_paths(text, TOUR)]


def test_the_site_shows_every_page_and_module():
    """`make docs`: the front's example runs, each page of the API is of a module that exists, and each public module has one."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.S)
    assert code
    exec(code[1], {})
    shown = re.findall(r"^\.\. automodule:: (\S+)$", "".join(p.read_text() for p in sorted(API.glob("*.md"))), re.M)
    names = python("-c", "import xtrain; print(*dir(xtrain))").stdout.split()  # here other tests have imported more
    public = {name for name in names if isinstance(getattr(xtrain, name), type(re)) and not name.startswith("_")}
    assert len(public) > 10
    others = {"cli", "config", "doctor", "plot", "progress"}  # what commands are made of
    own = {"autograd", "tensors"}  # on the page of xtrain
    assert {f"xtrain.{name}" for name in public - others - own} <= set(shown)
    assert all(importlib.import_module(name) for name in shown) and len(set(shown)) == len(shown)
