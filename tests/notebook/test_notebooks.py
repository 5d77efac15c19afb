"""The notebooks of docs/notebooks/ run from the first cell to the last, and are stored without output."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import cells
import pytest
from places import ROOT
from runs import python

pytestmark = pytest.mark.on_cpu
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
HERE = Path(__file__).parent
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))
# What needs PyTorch takes 20 s, and runs once: in Jupyter where that is, as there are more ways to fail (bars of other packages).
ALONE = [path for path in NOTEBOOKS if path.stem != "fine_tune" or not JUPYTER]
KEYS = {"markdown": {"cell_type", "id", "metadata", "source"}}
KEYS["code"] = KEYS["markdown"] | {"execution_count", "outputs"}


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["fine_tune", "first_model", "op_in_c"]


@every
def test_the_form(path) -> None:
    """nbformat 4.5, written by one program: no output, no counts, nothing that only IPython understands."""
    text = path.read_text()
    book = json.loads(text)
    assert text == json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert book.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert len(text) < 20_000 and book["cells"][0]["cell_type"] == "markdown"
    names = [cell["id"] for cell in book["cells"]]
    assert len({*names}) == len(names) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    for cell in book["cells"]:
        assert cell.keys() == KEYS[cell["cell_type"]] and cell["metadata"] == {}
        assert all(line.endswith("\n") for line in cell["source"][:-1]) and not cell["source"][-1].endswith("\n")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert not [line for line in cell["source"] if line.startswith(("%", "!"))]
            code = ast.parse("".join(cell["source"]))
            names = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
            assert not names & {"display", "get_ipython", "In", "Out"}


@every
def test_the_schema_of_nbformat(path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the package nbformat is not installed")
    nbformat.validate(nbformat.read(path, as_version=4))


def needs_compiler(path: Path) -> None:
    if path.stem == "op_in_c" and shutil.which(os.environ.get("CC", "cc").split()[0]) is None:
        pytest.skip("needs a C compiler")


def check_tokens(path: Path, text: str) -> None:
    """What transformers said of the tuned model, in what the notebook printed."""
    if path.stem == "fine_tune":
        installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
        assert ("the same tokens" in text) == installed


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
@pytest.mark.slow
@pytest.mark.skipif(
    bool(os.environ.get("XTRAIN_SANITIZE")), reason="a compiler's library and PyTorch have no sanitizers"
)
def test_it_runs(path, tmp_path) -> None:
    """All cells, in a process of its own that writes below one folder alone."""
    needs_compiler(path)
    done = python(str(HERE / "cells.py"), str(path), cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_tokens(path, done.stdout)


@every
@pytest.mark.slow
def test_it_runs_in_jupyter(path, tmp_path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the package nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the package nbformat is not installed")
    pytest.importorskip("ipykernel", reason="the package ipykernel is not installed")
    needs_compiler(path)
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    check_tokens(path, "".join(out.text for out in shown if out.output_type == "stream"))
    if path.stem == "first_model":  # a run is one display, and no lines of steps
        html = [out.data["text/html"] for out in shown if out.output_type == "display_data"]
        assert len(html) == 1 and "step 80/80" in html[0] and "<polyline" in html[0]
        assert not [out for out in shown if out.output_type == "stream" and "step 10/80" in out.text]


def test_the_runner_reports_a_cell_that_fails(tmp_path) -> None:
    def code(text: str) -> dict:
        return {"cell_type": "code", "source": text.splitlines(keepends=True)}

    class_with_html = "class A:\n    def _repr_html_(self):\n        return '<b>'\nA()"
    book = {
        "cells": [code("x = 3"), {"cell_type": "markdown", "source": ["no code"]}, code("x + 1"), code(class_with_html)]
    }
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps(book))
    assert cells.code_cells(path) == ["x = 3", "x + 1", class_with_html]
    done = python(str(HERE / "cells.py"), str(path))
    assert (done.returncode, done.stdout) == (0, "4\n<b>\n")
    path.write_text(json.dumps({"cells": [*book["cells"], code("1 / 0"), code("print('never')")]}))
    done = python(str(HERE / "cells.py"), str(path))
    assert done.returncode == 1 and "code cell 4" in done.stderr and "never" not in done.stdout
