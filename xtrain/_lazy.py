"""Names of a package that are imported when they are first asked for.

A package that is a door to such names has, in its `__init__.py`:

    if TYPE_CHECKING:                                        # what type checkers and editors see
        from .module import Name
    else:                                                    # what Python does
        _HOMES = {"Name": ".module:Name"}
        __getattr__, __dir__ = lazy(__name__, _HOMES)

tests/house/test_python_rooms.py compares the two branches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

# What PyTorch's users look for, and what to do here.
INSTEAD = {
    "xtrain.compile": "ops are fused already; xt.cuda.graph records a step",
    "xtrain.jit": "ops are fused already; xt.cuda.graph records a step",
    "xtrain.amp": "model.bfloat16() has 16-bit parameters and activations, and AdamW float32 masters",
    "xtrain.autocast": "model.bfloat16() has 16-bit parameters and activations, and AdamW float32 masters",
    "xtrain.utils": "xt.data.open_data(...).loader(...) draws batches",
    "xtrain.einsum": "transpose, reshape and xt.matmul do it",
    "xtrain.nn.functional": "xt.functional has the functions",
    "xtrain.nn.MSELoss": "(x - y).square().mean() is that loss",
    "xtrain.nn.L1Loss": "(x - y).abs().mean() is that loss",
    "xtrain.functional.mse_loss": "(x - y).square().mean() is that loss",
    "xtrain.functional.l1_loss": "(x - y).abs().mean() is that loss",
    "xtrain.models.AutoModelForCausalLM": "xt.models.load(DIR) reads a model of any family",
    "xtrain.models.AutoModel": "xt.models.load(DIR) reads a model of any family",
    "xtrain.nn.DataParallel": "xt.distributed.DataParallel trains with a process for each device",
}


class _Elsewhere:
    """Finder and loader for `import package.name` of modules whose file is not where that name says."""

    def __init__(self, package: str, homes: Mapping[str, str]) -> None:
        self.package, self.homes = package, homes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != self.package or name not in self.homes:
            return None
        return ModuleSpec(fullname, self)  # pyright: ignore[reportArgumentType]  (importlib.abc takes 14 ms to import)

    def create_module(self, spec: ModuleSpec) -> None:
        """The default module, which exec_module replaces."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = import_module(self.homes[name.rpartition(".")[2]], self.package)


def absent(package: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module that has no lazy names: its AttributeError says what to use in the place of some."""

    def __getattr__(name: str) -> NoReturn:
        hint = f": {INSTEAD[f'{package}.{name}']}" if f"{package}.{name}" in INSTEAD else ""
        module = sys.modules.get(package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=module)

    return __getattr__


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, a package's `__name__`; `import package.name` finds its modules, too.

    homes: {name: "module:attribute"}, or {name: "module"} for the module itself; modules are relative to the package.
    """

    unknown = absent(package)

    def __getattr__(name: str) -> Any:
        if name not in homes:
            unknown(name)
        module, _, attribute = homes[name].partition(":")
        found = import_module(module, package)
        return getattr(found, attribute) if attribute else found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    elsewhere = {name: home for name, home in homes.items() if ":" not in home and home != f".{name}"}
    if elsewhere:
        sys.meta_path.append(_Elsewhere(package, elsewhere))
    return __getattr__, __dir__
