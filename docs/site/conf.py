"""The documentation site: `make docs` builds it into build/site with Sphinx and MyST. Warnings are errors.

Pages are the Markdown files of docs/, which also read well where they lie. Docstrings are plain text with `code` in
backticks; what follows turns them into reStructuredText, so that nobody has to write that.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import xtrain  # noqa: E402

project, author, copyright = "xtrain", "the maintainers of xtrain", "the maintainers of xtrain, MIT licence"
release = xtrain.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["site"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
html_theme = "furo"
html_title = f"xtrain {release}"
html_static_path, html_css_files = ["static"], ["site.css"]
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
suppress_warnings = [
    "myst.xref_missing"
]  # links to files outside of docs/, which tests/house/test_docs_links.py follows

SOURCES = "https://github.com/xtrain/xtrain/blob/main/"
PICTURES = "https://raw.githubusercontent.com/xtrain/xtrain/main/"
CODE = re.compile(r"(`[^`\n]+`)")
OP = type(xtrain.Tensor.backward)


def plain(line: str) -> str:
    """A line of plain text: what reStructuredText would take for markup is escaped, but for code in backticks."""
    parts = CODE.split(line)
    parts[::2] = [re.sub(r"([*|\\_`])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def paragraphs(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Paragraphs of text stay paragraphs; one with an indented line, a table or a formula, is shown as it is typed."""
    found, typed = [], False
    for block in "\n".join(lines).split("\n\n"):
        rows = block.split("\n")
        before, typed = typed, any(row.startswith(" ") for row in rows)
        if typed:
            found += [*([] if before else ["::", ""]), *(f"    {row}" for row in rows), ""]
        else:
            found += [*map(plain, rows), ""]
    lines[:] = found


def elsewhere(app: Any, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Skips what a module without __all__ has imported, names that two pages would define, and what methods() adds."""
    if what == "class" and isinstance(obj, OP):
        return True
    here = app.env.current_document.autodoc_module
    above = sys.modules.get(here.rpartition(".")[0], xtrain)
    if (here != "xtrain" and obj is xtrain.Tensor) or (above is not xtrain and name in getattr(above, "__all__", ())):
        return True
    if hasattr(sys.modules.get(here), "__all__"):
        return skip
    return True if getattr(obj, "__module__", here) not in (here, "xtrain._C") else skip


def optional(text: str) -> str:
    """`int?`, as ops of C have it in their signatures, in the words of Python."""
    return re.sub(r"(\w+)\?", r"\1 | None", text)


def signatures(
    app: Any, what: str, name: str, obj: object, options: object, signature: str | None, result: str | None
) -> tuple[str, str | None] | None:
    return (optional(signature), result) if signature else None


def methods(app: Any, name: str, source: list[str]) -> None:
    """Adds to the page of xtrain the methods of Tensor that are ops of C: for autodoc, they are attributes."""
    if name != "reference/api/xtrain":
        return
    rows = [
        "",
        "## Methods of Tensor",
        "",
        "The ops as methods: the first argument is the tensor.",
        "",
        "```{eval-rst}",
        ".. py:currentmodule:: xtrain",
        "",
    ]
    for method, op in sorted(vars(xtrain.Tensor).items()):
        if isinstance(op, OP) and not method.startswith("_"):
            signature, _, text = op.__doc__.partition("\n\n")
            signature = re.sub(r"\(\w+: (?:Tensor|Operand)(, )?", "(", signature, count=1)
            signature = optional(signature.replace("\n", " "))
            lines = text.split("\n")
            paragraphs(app, "method", method, op, None, lines)
            rows += [f".. py:method:: Tensor.{signature}", "", *(f"   {line}" for line in lines), ""]
    source[0] += "\n".join([*rows, "```", ""])


def start(app: Any, name: str, source: list[str]) -> None:
    """Makes the page `start` of README.md, whose links are absolute, for package indexes; here they are local."""
    if name == "start":
        app.env.note_dependency(str(ROOT / "README.md"))
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        text = text.replace("# xtrain\n", "# Start\n", 1)
        source[0] = text.replace(f"{SOURCES}docs/", "").replace(f"{PICTURES}docs/", "")


def notebooks(app: Any, name: str, source: list[str]) -> None:
    """Turns a notebook into Markdown: its text, and its code in blocks."""
    if app.env.doc2path(name).suffix != ".ipynb":
        return
    found = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        found.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    source[0] = "\n\n".join(found) + "\n"


def setup(app: Any) -> None:
    app.connect("source-read", start)
    app.connect("source-read", notebooks)
    app.connect("autodoc-skip-member", elsewhere)
    app.connect("source-read", methods)
    app.connect("autodoc-process-docstring", paragraphs)
    app.connect("autodoc-process-signature", signatures)
