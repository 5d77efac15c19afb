"""Writes xtrain/_C.pyi, the type stubs of the compiled core, from the signatures the core carries.

python tests/support/make_stubs.py            # after an op was added or its signature changed
python tests/support/make_stubs.py --check    # exit status 1 when the file is not what would be written (test_stubs.py does this)
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from xtrain import _C

STUB = Path(_C.__file__).parent / "_C.pyi"

KINDS = {
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
# What is returned, where it is not one Tensor.
RETURNS = {
    "split": "list[Tensor]", "backward": "None", "adamw_": "None", "set_grad_enabled": "None", "is_grad_enabled": "_bool",
    "manual_seed": "None", "get_rng_state": "tuple[_int, _int]", "set_rng_state": "None", "get_num_threads": "_int",
    "set_num_threads": "None", "gemm_backends": "list[str]", "attention_backends": "list[str]",
    "use_gemm_backend": "str | None", "use_attention_backend": "str | None", "memory_stats": "dict[str, _int]",
    "memory_reset_peak": "None", "memory_trim": "None", "op_signatures": "dict[str, str]", "cpu_features": "list[str]",
    "build_info": "dict[str, str]", "stats": "tuple[_float, _float, _float, _int, _int]", "to_bytes": "memoryview",
    "function_apply": "tuple[Tensor, ...]", "stride": "Any", "size": "Any", "numel": "_int", "dim": "_int",
    "is_contiguous": "_bool", "data_ptr": "_int", "element_size": "_int", "item": "Any", "tolist": "Any",
    "numpy": "NDArray[Any]", "__array__": "NDArray[Any]", "__dlpack__": "Any", "__dlpack_device__": "tuple[_int, _int]",
    "__format__": "str", "__reduce_ex__": "Any", "retain_grad": "None", "register_hook": "Handle",
    "cuda_device_count": "_int", "cuda_info": "dict[str, Any]", "cuda_counters": "dict[str, _int]", "cuda_stream": "_int",
    "synchronize": "None", "set_package_folders": "None", "allow_tf32": "None", "tf32": "_bool",
    "set_default_device": "None", "get_default_device": "_device",
}  # fmt: skip
PROPERTIES = {
    "shape": "tuple[_int, ...]", "dtype": "_dtype", "device": "_device", "ndim": "_int", "is_leaf": "_bool",
    "grad_fn": "str | None", "T": "Tensor", "mT": "Tensor", "data": "Tensor", "_version": "_int", "nbytes": "_int",
    "__cuda_array_interface__": "dict[str, Any]", "itemsize": "_int", "name": "str", "is_floating_point": "_bool", "type": "str", "index": "_int",
}  # fmt: skip
WRITABLE = {"requires_grad": "_bool", "grad": "Tensor | None"}
PROTOCOL = {
    "bool": ("__bool__",),
    "int": ("__int__", "__index__", "__len__", "__hash__"),
    "float": ("__float__",),
    "str": ("__repr__", "__str__"),
}
BINARY = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "rpow",
    "matmul",
    "rmatmul",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "lt",
    "le",
    "gt",
    "ge",
]


def split_signature(text: str) -> list[str]:
    """The arguments of a signature; commas inside brackets or quotes do not separate."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text + ","):
        quoted ^= c == "'"
        depth += (c in "([") - (c in ")]")
        if c == "," and not depth and not quoted:
            parts.append(text[start:i].strip())
            start = i + 1
    return [p for p in parts if p]


def argument(text: str) -> str:
    """`dim: ints? = None` as Python."""
    if text == "*":
        return text
    name, _, rest = text.partition(":")
    kind, equals, default = (part.strip() for part in rest.partition("="))
    hint = KINDS[kind.rstrip("?")] + (" | None" if kind.endswith("?") else "")
    return f"{name}: {hint}" + (f" = {default}" if equals else "")


def define(name: str, signature: str, method: bool) -> list[str]:
    """The definition, as lines; a last argument of sizes may also be given one by one."""
    arguments = split_signature(signature)
    result = RETURNS.get(name, "Tensor")
    written = ["self" if method and i == 0 else argument(a) for i, a in enumerate(arguments)]
    plain = f"def {name}({', '.join(written)}) -> {result}: ..."
    sizes, _, kind = arguments[-1].partition(":") if arguments else ("", "", "")
    if kind.strip() != "ints" or name == "from_bytes":
        return [plain]
    spread = f"def {name}({', '.join([*written[:-1], f'*{sizes}: _int'])}) -> {result}: ..."
    return ["@overload", plain, "@overload", spread]


def indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def class_body(cls: type) -> list[str]:
    lines: list[str] = []
    for name, value in vars(cls).items():
        if type(value).__name__ == "getset_descriptor":
            if name in WRITABLE:
                lines.append(f"{name}: {WRITABLE[name]}")
            else:
                lines += ["@property", f"def {name}(self) -> {PROPERTIES[name]}: ..."]
        elif type(value).__name__ == "Op":
            lines += define(name, value.signature, method=True)
        for hint, names in PROTOCOL.items():
            if name in names:
                lines.append(f"def {name}(self) -> {hint if hint == 'str' else '_' + hint}: ...")
    return lines


def tensor_body() -> list[str]:
    lines = class_body(_C.Tensor)
    lines += [f"def __{name}__(self, other: Tensor | _float) -> Tensor: ..." for name in BINARY]
    lines += [f"def __{name}__(self, other: object) -> Any: ..." for name in ("eq", "ne")]
    lines += [f"def __{name}__(self) -> Tensor: ..." for name in ("neg", "pos", "abs")]
    lines += [
        "def __iter__(self) -> Iterator[Tensor]: ...",
        "def __getitem__(self, index: Any) -> Tensor: ...",
        "def __setitem__(self, index: Any, value: Tensor | _float) -> None: ...",
        "def __new__(cls, data: Any = ...) -> Self: ...",
    ]
    return lines + python_methods()


def python_methods() -> list[str]:
    """Methods that xtrain/_tensor.py adds."""
    hints = {"dim": "_int | Sequence[_int] | None", "keepdim": "_bool", "other": "Tensor", "mask": "Tensor"}
    lines = []
    for name, value in vars(_C.Tensor).items():
        if not inspect.isfunction(value):
            continue
        arguments, star = ["self"], False
        for p in list(inspect.signature(value).parameters.values())[1:]:
            if p.kind is p.KEYWORD_ONLY and not star:
                arguments.append("*")
                star = True
            default = "" if p.default is p.empty else f" = {p.default!r}"
            hint = "Tensor | _bool" if name.startswith("__") else hints.get(p.name, "Any")  # & | ^ take True and False
            arguments.append(f"{p.name}: {hint}{default}")
        result = {"split": "tuple[Tensor, ...]", "chunk": "tuple[Tensor, ...]", "max": "Any", "min": "Any",
                  "is_floating_point": "_bool"}.get(name, "Tensor")  # fmt: skip
        lines.append(f"def {name}({', '.join(arguments)}) -> {result}: ...")
    return lines


def stub() -> str:
    """The content of _C.pyi."""
    lines = [
        '"""Types of the compiled core. Written by tests/support/make_stubs.py; do not edit."""', "",
        "import builtins", "from collections.abc import Iterator, Sequence", "from typing import Any, final, overload", "",
        "from numpy.typing import NDArray", "from typing_extensions import Self", "",
        "_bool = builtins.bool", "_int = builtins.int", "_float = builtins.float", "",
    ]  # fmt: skip
    dtypes = sorted(name for name in dir(_C) if type(getattr(_C, name)).__name__ == "dtype")
    for name, cls, arguments in (
        ("dtype", _C.dtype, "name: str"),
        ("device", _C.device, "type: str, index: _int | None = None"),
    ):
        lines += [
            "@final",
            f"class {name}:",
            f"    def __new__(cls, {arguments}) -> Self: ...",
            *indent(class_body(cls)),
            "",
        ]
    lines += ["_dtype = dtype", "_device = device", ""]
    lines += ["class Handle:", "    def remove(self) -> None: ...", ""]
    lines += ["class OutOfMemoryError(MemoryError): ...", "class CudaError(RuntimeError): ...", ""]
    assert issubclass(_C.OutOfMemoryError, MemoryError) and issubclass(_C.CudaError, RuntimeError)
    lines += ["class Tensor:", *indent(tensor_body()), ""]
    for name in sorted(dir(_C)):
        value = getattr(_C, name)
        if type(value).__name__ == "Op":
            lines += define(name, value.signature, method=False)
    lines += ["", "MAX_DIMS: _int", *(f"{name}: _dtype" for name in dtypes)]
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
