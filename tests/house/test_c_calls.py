"""Calls in csrc point one way, file by file: no two files need each other, not even through others.

A file defines its functions and variables that are not static. An arrow goes from file A to file B when the code of A
mentions a name that B alone defines. Arrows respect the order of the rooms of csrc, as includes do, and in csrc/py that of
its own rooms.
"""

import functools
import re
from pathlib import Path

import pytest
import test_arrows
from places import ROOT
from test_python_rooms import circle
from test_source import stripped

PY_ROOMS = ["py", "bind", "convert", "tensor", "runtime"]  # each calls itself and those before it
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "csrc").rglob("*.c"))}

# At the start of a line, so outside of any function. Macros that make a name (NAME(...), xt_op_##name) are not seen.
FUNCTION = re.compile(r"^(\w[\w \t*]*?)\b(\w+)\([^;{}]*\)\s*\{", re.M)
VARIABLE = re.compile(r"^(\w[\w \t*]*?)\b(\w+)(?:\[\w*\])*\s*(?:=|;)", re.M)


def defined(code: str) -> set[str]:
    found = [*FUNCTION.findall(code), *VARIABLE.findall(code)]
    hidden = {"static", "XT_INLINE", "extern", "typedef", "return", "struct", "enum", "union"}
    return {
        name for before, name in found if not hidden & set(before.split()) and name not in {"NAME", "__attribute__"}
    }


def call_graph(sources: dict[str, str]) -> dict[str, dict[str, set[str]]]:
    """file -> file -> the names that make the arrow."""
    code = {name: stripped(text) for name, text in sources.items()}
    homes: dict[str, list[str]] = {}
    for name, text in code.items():
        for symbol in defined(text):
            homes.setdefault(symbol, []).append(name)
    twice = {symbol: files for symbol, files in homes.items() if len(files) > 1}
    assert not twice, f"defined twice: {twice}"
    graph: dict[str, dict[str, set[str]]] = {name: {} for name in code}
    for name, text in code.items():
        for symbol in set(re.findall(r"\b[A-Za-z_]\w*\b", text)) & set(homes):
            if homes[symbol] != [name]:
                graph[name].setdefault(homes[symbol][0], set()).add(symbol)
    return graph


def explain(graph: dict[str, dict[str, set[str]]], path: list[str]) -> str:
    steps = zip(path, [*path[1:], path[0]])
    return "; ".join(f"{a} calls {b}: {', '.join(sorted(graph[a][b]))}" for a, b in steps)


@functools.cache
def graph() -> dict[str, dict[str, set[str]]]:
    """Of all sources; made by the first test that asks, and not wherever this file is collected."""
    return call_graph(SOURCES)


def test_no_two_files_need_each_other() -> None:
    found = circle({name: set(seen) for name, seen in graph().items()})
    assert not found, explain(graph(), found)


@pytest.mark.parametrize("name", SOURCES)
def test_rooms_call_downwards(name: str) -> None:
    """A prototype of one's own is a call without an include."""
    room = test_arrows.room_of(ROOT / name)
    for seen, symbols in graph()[name].items():
        symbols = symbols - {"xt_cpu_backend"} if room == "backend" else symbols  # it knows every device's table
        allowed = not symbols or test_arrows.room_of(ROOT / seen) in test_arrows.MAY_SEE[room]
        assert allowed, f"{name} calls {seen}: {', '.join(sorted(symbols))}"


def room_of(name: str) -> int:
    parts = Path(name).parts  # csrc/py/bind/args.c, csrc/py/py.c
    return PY_ROOMS.index(parts[2] if len(parts) > 3 else "py")


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("csrc/py/")])
def test_rooms_of_py_call_downwards(name: str) -> None:
    for seen, symbols in graph()[name].items():
        if seen.startswith("csrc/py/"):
            assert room_of(seen) <= room_of(name), f"{name} calls {seen}: {', '.join(sorted(symbols))}"


def test_includes_of_py_point_downwards() -> None:
    for path in (ROOT / "csrc/py").rglob("*.[ch]"):
        name = path.relative_to(ROOT).as_posix()
        for seen in re.findall(r'^#include "(py/[^"]+)"', path.read_text(), re.M):
            assert room_of(f"csrc/{seen}") <= room_of(name), f"{name} includes {seen}"


def test_this_test_sees_a_call_back() -> None:
    py = {name: text for name, text in SOURCES.items() if name.startswith("csrc/py/")}
    assert len(py) > 20 and sum(map(len, call_graph(py).values())) > 60
    name = "csrc/py/bind/errors.c"
    py[name] += "void py_planted(PyObject *list) {\n    py_wrap(NULL);\n    py_bind(NULL, NULL, 0, NULL, NULL);\n}\n"
    calls = call_graph(py)
    found = circle({a: set(b) for a, b in calls.items()})
    assert name in found and "errors.c calls csrc/py/bind/args.c: py_bind" in explain(calls, found)
    assert defined("int py_f(int (*g)(void), int b) {\nXtTensor *py_t(void)\n{\nPyState *xt_py;\n") == {
        "py_f", "py_t", "xt_py",
    }  # fmt: skip
    assert not defined("static int f(int a) {\nextern int g;\ntypedef int T;\nint h(int a);\n    int local = 3;\n")
