"""Runs the code cells of a notebook in order, in one namespace, without Jupyter: `python cells.py NOTEBOOK.ipynb`.

The value of a cell that ends in an expression is shown as a notebook would: by `_repr_html_` where it has one, else by repr.
An error is reported with the cell's number, and the status is 1.
"""

from __future__ import annotations

import ast
import json
import sys
import traceback
from pathlib import Path


def code_cells(path: Path) -> list[str]:
    """The text of each code cell."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(path: Path) -> None:
    """Run the cells; the first error of one ends it."""
    space = {"__name__": "__main__"}
    for number, source in enumerate(code_cells(path), 1):
        name = f"{path.name}, code cell {number}"
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
            if value is not None:
                print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
