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
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, a package's `__name__`.

    homes: {name: "module:attribute"}, or {name: "module"} for the module itself; modules are relative to the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = homes[name].partition(":")
        found = import_module(module, package)
        return getattr(found, attribute) if attribute else found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__
