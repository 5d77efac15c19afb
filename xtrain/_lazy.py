"""Names of a package that are imported when they are first asked for."""

import sys
from importlib import import_module


def lazy(package, homes):
    """`__getattr__` and `__dir__` of `package`, a package's `__name__`.

    homes: {name: "module:attribute"}, or {name: "module"} for the module itself; modules are relative to the package.
    """

    def __getattr__(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = homes[name].partition(":")
        found = import_module(module, package)
        return getattr(found, attribute) if attribute else found

    def __dir__():
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__
