"""Writes xtrain/_C.pyi, the type stubs of the compiled core, from what the core says of itself.

python tests/support/make_stubs.py            # after an op was added or its signature changed
python tests/support/make_stubs.py --check    # exit status 1 when the file is not what would be written (test_stubs.py does this)

Ops and functions have a signature in the grammar of csrc/ops/ops.h, and the texts of attributes, classes and their other
methods begin with that grammar. Methods that xtrain/_tensor.py and xtrain/tensors add have annotations there. SLOTS has what Python itself
fixes: len() is an int.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from xtrain import _C, _tensor
from xtrain.tensors import arithmetic, indexing, sorting

SOURCES = [ast.parse(Path(module.__file__).read_text()) for module in (_tensor, arithmetic, indexing, sorting)]
PYTHON = [node for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
STUB = Path(_C.__file__).parent / "_C.pyi"
BASETYPE = 1 << 10  # of type.__flags__: may have subclasses

# The words of the grammar, as arguments and as results. Methods of Tensor are named int, float and so on, hence _int.
ARGUMENTS = {
    "Tensor": "Tensor",
    "Tensors": "Sequence[Tensor]",
    "Operand": "Tensor | _float",
    "int": "_int",
    "float": "_float",
    "number": "_float",
    "bool": "_bool",
    "str": "str",
    "dtype": "_dtype | str",
    "device": "_device | str",
    "ints": "_int | Sequence[_int]",
    "object": "Any",
}
RESULTS = {
    **{kind: ARGUMENTS[kind] for kind in ("Tensor", "int", "float", "bool", "str", "object")},
    "number": "_int | _float",
    "dtype": "_dtype",
    "device": "_device",
    "None": "None",
    "self": "Self",
    "ndarray": "NDArray[Any]",
    "memoryview": "memoryview",
    "Handle": "Handle",
}

# The methods behind Python's protocols and operators. Other operators of Tensor are BINARY or IN_PLACE.
SLOTS = {
    "__repr__": "(self) -> str",
    "__str__": "(self) -> str",
    "__hash__": "(self) -> _int",
    "__bool__": "(self) -> _bool",
    "__int__": "(self) -> _int",
    "__index__": "(self) -> _int",
    "__float__": "(self) -> _float",
    "__len__": "(self) -> _int",
    "__iter__": "(self) -> Iterator[Tensor]",
    "__getitem__": "(self, index: Any) -> Tensor",
    "__setitem__": "(self, index: Any, value: Tensor | _float) -> None",
    "__neg__": "(self) -> Tensor",
    "__pos__": "(self) -> Self",
    "__abs__": "(self) -> Tensor",
    "__matmul__": "(self, other: Tensor) -> Tensor",
    "__rmatmul__": "(self, other: Tensor) -> Tensor",
    "__call__": "(self, *args: Any, **kwargs: Any) -> Any",
    "__get__": "(self, instance: Any, owner: Any = None) -> Any",
}
BINARY = "(self, other: Tensor | _float) -> Tensor"
IN_PLACE = "(self, other: Tensor | _float) -> Self"
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
NOT_SHOWN = ("__delitem__", "__buffer__", "__release_buffer__")  # always raises; only there since Python 3.12


def split(text: str) -> list[str]:
    """The parts between commas that are neither quoted nor in brackets."""
    parts = re.findall(r"(?:'[^']*'|\([^)]*\)|[^,'(])+", text)
    return [part.strip() for part in parts if part.strip()]


def argument(text: str) -> str:
    """`dim: ints? = None` as Python."""
    if text == "*":
        return text
    name, _, rest = text.partition(":")
    kind, equals, default = (part.strip() for part in rest.partition("="))
    hint = ARGUMENTS[kind.rstrip("?")] + (" | None" if kind.endswith("?") else "")
    return f"{name}: {hint}" + (f" = {default}" if equals else "")


def result(text: str) -> str:
    """`(Tensor, ...)` as Python."""
    if text[0] == "(":
        return f"tuple[{', '.join(part if part == '...' else result(part) for part in split(text[1:-1]))}]"
    if text[0] in "[{":
        return ("list[" if text[0] == "[" else "dict[str, ") + result(text[1:-1]) + "]"
    return RESULTS[text.rstrip("?")] + (" | None" if text.endswith("?") else "")


def define(name: str, signature: str, method: bool) -> list[str]:
    """The definition, as lines; a last positional argument of sizes may also be given one by one."""
    text, _, returned = signature.rpartition("->")
    arguments = split(text)
    hint = result(returned.strip())
    if hint == "Self" and not method:
        hint = "Tensor"
    written = ["self" if method and i == 0 else argument(a) for i, a in enumerate(arguments)]
    lines = [f"def {name}({', '.join(written)}) -> {hint}: ..."]
    positional = arguments[: arguments.index("*")] if "*" in arguments else arguments
    sizes, _, kind = positional[-1].partition(":") if positional else ("", "", "")
    if kind.split("=")[0].strip() in ("ints", "ints?"):
        at = len(positional) - 1
        several = [*written[:at], f"*{sizes}: _int", *written[at + 2 :]]
        lines = ["@overload", *lines, "@overload", f"def {name}({', '.join(several)}) -> {hint}: ..."]
    return lines


def annotated(name: str, function: Any) -> list[str]:
    """A method that Python adds, by its annotations there: its overloads, or else its definition."""
    nodes = [node for node in PYTHON if node.name == function.__name__]
    overloads = [node for node in nodes if node.decorator_list]
    lines = []
    for node in overloads or nodes:
        first = (node.args.posonlyargs or node.args.args)[0]
        first.annotation = None  # of self
        text = f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}: ..."
        text = re.sub(r"(?<![\w.])(int|float|bool|dtype|device)\b", r"_\1", text).replace("_Tensor", "Tensor")
        lines += [*["@overload"][: len(overloads)], f"def {name}" + re.sub(rf"^\({first.arg}\b", "(self", text)]
    return lines


def is_writable(cls: type, name: str) -> bool:
    sample = {_C.Tensor: lambda: _C.empty((2, 2)), _C.dtype: lambda: _C.float32, _C.device: lambda: _C.device("cpu")}
    if cls not in sample:
        return False
    try:
        value = sample[cls]()
        setattr(value, name, getattr(value, name))
    except AttributeError:
        return False
    return True


def class_body(cls: type) -> list[str]:
    lines: list[str] = []
    tensor = cls is _C.Tensor
    if cls.__new__ is not object.__new__ and not tensor:
        arguments = ", ".join(map(argument, split(cls.__doc__.splitlines()[0])))
        lines.append(f"def __new__(cls, {arguments}) -> Self: ...")
    for name, value in vars(cls).items():
        kind = type(value).__name__
        if kind == "getset_descriptor" and value.__doc__:
            hint = result(value.__doc__.partition(": ")[0])
            if is_writable(cls, name):
                lines.append(f"{name}: {hint}")
            else:
                lines += ["@property", f"def {name}(self) -> {hint}: ..."]
        elif kind == "Op":
            lines += define(name, value.signature, method=True)
        elif kind == "function":
            lines += annotated(name, value)
        elif kind == "method_descriptor" and not hasattr(object, name):
            lines.append(f"def {name}(self) -> {result(value.__doc__.partition(': ')[0])}: ...")
        elif kind == "wrapper_descriptor" and name in SLOTS:
            lines.append(f"def {name}{SLOTS[name]}: ...")
        elif kind == "wrapper_descriptor" and tensor and name not in NOT_SHOWN:
            note = "  # pyright: ignore[reportIncompatibleMethodOverride]" if name in COMPARISONS[:2] else ""
            in_place = name.startswith("__i")
            lines.append(f"def {name}{IN_PLACE if in_place else BINARY}: ...{note}")
    return lines


def class_lines(name: str, cls: type) -> list[str]:
    bases = "" if cls.__base__ is object else f"({cls.__base__.__name__})"
    body = class_body(cls) if not bases else []
    final = [] if cls.__flags__ & BASETYPE else ["@final"]
    return [*final, f"class {name}{bases}:" + ("" if body else " ..."), *(f"    {line}" for line in body), ""]


def stub() -> str:
    """The content of _C.pyi."""
    public = {name: getattr(_C, name) for name in sorted(dir(_C)) if not name.startswith("_")}
    classes = {name: value for name, value in public.items() if isinstance(value, type)}
    lines = [
        '"""Types of the compiled core. Written by tests/support/make_stubs.py; do not edit."""', "",
        "import builtins", "from collections.abc import Iterator, Sequence", "from typing import Any, final, overload", "",
        "from numpy.typing import NDArray", "from typing_extensions import Self", "",
        "from ._tensor import _MaxResult, _MinResult", "from ._types import Size",
        "from .tensors.sorting import _SortResult, _TopkResult", "",
        *(f"_{name} = builtins.{name}" for name in ("bool", "int", "float")), "",
    ]  # fmt: skip
    for name in sorted(classes, key=lambda name: (name not in ("dtype", "device"), name)):
        lines += class_lines(name, classes[name])
        if name in ("dtype", "device"):
            lines += [f"_{name} = {name}", ""]
    for name, value in public.items():
        if isinstance(value, _C.Op):
            lines += define(name, value.signature, method=False)
    lines.append("")
    for name, value in public.items():
        if not isinstance(value, (type, _C.Op)):
            lines.append(f"{name}: _{type(value).__name__}")
    return "\n".join(lines) + "\n"


def same(a: str, b: str) -> bool:
    """Whether two stubs say the same, whatever their layout."""
    return ast.dump(ast.parse(a)) == ast.dump(ast.parse(b))


def main() -> int:
    text = stub()
    if "--check" in sys.argv:
        return 0 if STUB.exists() and same(STUB.read_text(), text) else 1
    STUB.write_text(text)
    print(f"{STUB}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
