"""The order of rooms in xtrain/: an arrow (an import) points to the same room or to a lower one, and files have no
circle of imports. Imports inside functions count, those for type checkers too.

Where a module is named in text (BY_TEXT) no arrow shows. The front door of a package, which imports its names when they
are first asked for (xtrain/_lazy.py), also has imports that type checkers and editors see in place of its text; they are
left out here, as the text is, and a test compares the two.
"""

import ast
import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT
from runs import python

PACKAGE = ROOT / "xtrain"
# From low to high: folders of xtrain/, and two rooms that are files.
ORDER = [
    "ground",  # the files beside the folders, but __main__.py, and tensors/, notebook/, profiling/
    "nn",
    "optim",
    "distributed",
    "registry",  # these files of models/
    "saving",
    "lora",
    "generation",
    "models",
    "tokenizers",
    "data",
    "train",
    "optable",
    "testing",
    "bench",
    "cli",
]
REGISTRY = {"models/__init__.py", "models/language_model.py", "models/registry.py", "models/presets.py"}
FILES = {
    "xtrain"
    + "".join(f".{part}" for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
LEAVES = {"xtrain._C"}  # the compiled core: it imports nothing


def room_of(path: Path) -> int:
    place = path.relative_to(PACKAGE)
    room = place.parts[0] if len(place.parts) > 1 else "cli" if place.name == "__main__.py" else "ground"
    room = (
        "registry"
        if place.as_posix() in REGISTRY
        else "ground"
        if room in ("tensors", "notebook", "profiling")
        else room
    )
    assert room in ORDER, f"xtrain/{room} is a new room: give it a place in ORDER"
    return ORDER.index(room)


def for_checkers(tree: ast.Module) -> list[ast.stmt]:
    """The imports of a door that type checkers see: those before the `else` in which it calls `lazy`."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            calls = [call for part in node.orelse for call in ast.walk(part) if isinstance(call, ast.Call)]
            if any(ast.unparse(call.func) in ("lazy", "_lazy") for call in calls):
                return node.body
    return []


def arrows(name: str, path: Path) -> set[str]:
    """The modules of xtrain that a file imports, anywhere in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    tree = ast.parse(path.read_text())
    unseen = for_checkers(tree)
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "xtrain"}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            if not node.level:
                base = node.module
            if base.split(".")[0] == "xtrain":
                inside = {f"{base}.{alias.name}" for alias in node.names}
                found |= {one if one in FILES or one in LEAVES else base for one in inside}
    return found - LEAVES


@functools.cache
def graph() -> dict[str, set[str]]:
    """Of all files; made by the first test that asks, and not wherever this file is collected."""
    return {name: arrows(name, path) for name, path in FILES.items()}


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_down(name: str) -> None:
    room = room_of(FILES[name])
    for seen in graph()[name]:
        assert seen in FILES, f"{name} imports {seen}, which is no file of the package"
        assert room_of(FILES[seen]) <= room, (
            f"{name} imports {seen}: {ORDER[room]} is below {ORDER[room_of(FILES[seen])]}"
        )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of a circle, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for seen in graph[name]:
                if found := walk(seen, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := walk(name, []))), [])


def test_no_circle() -> None:
    assert not circle(graph()), " -> ".join(circle(graph()))
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})) == {"b", "c"}, "this test sees a circle"


def test_arrows_inside_functions_count(tmp_path) -> None:
    file = tmp_path / "file.py"
    file.write_text("def f():\n    from ..nn import Module\n    import xtrain.data.loader\n")
    assert arrows("xtrain.train.file", file) == {"xtrain.nn", "xtrain.data.loader"}


DOORS = {name: found for name, path in FILES.items() if (found := for_checkers(ast.parse(path.read_text())))}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_shows_what_it_opens(name: str) -> None:
    """Type checkers see in a lazy package the names that Python finds there, each from the same module."""
    shown = {}
    for node in DOORS[name]:
        assert isinstance(node, ast.ImportFrom) and FILES[name].name == "__init__.py"
        for alias in node.names:
            module = "." * node.level + (node.module or "")
            known = alias.asname or alias.name
            here = importlib.util.resolve_name(f"{module}.{alias.name}" if node.module else module + alias.name, name)
            shown[known] = (
                f"{module}{'.' * bool(node.module)}{alias.name}" if here in FILES else f"{module}:{alias.name}"
            )
    door = importlib.import_module(name)
    assert shown == door._HOMES
    assert all(hasattr(door, name) for name in shown)


@pytest.mark.parametrize("name", ["config", "doctor", "plot", "progress"])
def test_a_module_of_the_front_door_is_imported_by_its_name_there(name: str) -> None:
    """Also where its file lies at another place; `import xtrain` alone loads none of them."""
    code = (
        f"import sys, xtrain\nassert not {{m for m in sys.modules if m.startswith(('xtrain.train', 'xtrain.cli'))}}\n"
        f"import xtrain.{name} as module\nfrom xtrain import {name} as same\n"
        f"assert module is same is xtrain.{name} is sys.modules[xtrain._HOMES['{name}'].replace('.', 'xtrain.', 1)]\n"
        "try:\n    import xtrain.nothing\nexcept ModuleNotFoundError as error:\n    assert error.name == 'xtrain.nothing'"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_there_are_doors() -> None:
    assert {"xtrain", "xtrain.models", "xtrain.train"} <= set(DOORS)


def sources(*folders: str) -> list[Path]:
    endings = {".c", ".h", ".cu", ".cuh", ".py", ".pyi"}
    return [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in endings]


def test_at_most_20_files_side_by_side() -> None:
    count = Counter(path.parent.relative_to(ROOT) for path in sources("csrc", "cuda", "xtrain", "tests", "parity"))
    assert not {str(folder): n for folder, n in count.items() if n > 20}


def test_at_most_600_lines_a_file() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for path in [*sources("csrc", "cuda", "xtrain", "tests", "parity"), *ROOT.glob("*.py")]
        if (n := path.read_text().count("\n")) > 600 and path.name != "_C.pyi"  # a list, written by make_stubs.py
    }
    assert not long


def test_only_models_name_an_architecture() -> None:
    """A second model is one file and one line: training, saving and sampling ask the registry."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "models" and "qwen" in path.read_text().lower()
    ]
    assert not wrong


BY_TEXT = {
    "_lazy.py": "the names of a door; compared with its imports",
    "bench/peers.py": "packages that are measured beside ours",
    "cli/dispatch.py": "the command that a command line names, in its own folder",
    "distributed/ray.py": "the trainer, which a worker of Ray runs",
    "models/registry.py": "the module of a model_type",
    "tokenizers/from_file.py": "the package tokenizers",
}


def test_modules_are_imported_by_text_in_few_places() -> None:
    """No arrow shows there."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES.values()
        if re.search(r"\b(import_module|__import__|exec_module|spec_from_file_location)\b", path.read_text())
    }
    assert found == set(BY_TEXT)
