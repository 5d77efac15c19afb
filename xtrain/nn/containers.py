"""Modules that hold modules: in an order, or by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .module import Module

if TYPE_CHECKING:
    from typing_extensions import Self

_M = TypeVar("_M", bound=Module)


class ModuleList(Module, Generic[_M]):
    """A list of modules named "0", "1", ... In annotations: ModuleList[Block]."""

    def __init__(self, modules: Iterable[_M] = ()) -> None:
        self.extend(modules)

    def append(self, module: _M) -> Self:
        """Adds a module at the end; returns self."""
        return self.extend([module])

    def extend(self, modules: Iterable[_M]) -> Self:
        """Adds several; returns self."""
        for index, module in enumerate(modules, len(self)):
            self.add_module(str(index), module)
        return self

    def _items(self) -> list[_M]:
        return [value for name, value in self.__dict__.items() if name.isdecimal()]

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[_M]:
        return iter(self._items())

    @overload
    def __getitem__(self, index: int) -> _M: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._items()[index]
        return type(self)(found) if isinstance(found, list) else found

    def __setitem__(self, index: int, module: _M) -> None:
        self.add_module(str(range(len(self))[index]), module)


class Sequential(ModuleList[Module]):
    """Calls its modules one after another, each with the result of the one before."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._items()[index]
        return Sequential(*found) if isinstance(found, list) else found

    def forward(self, input: Any) -> Any:
        for module in self._items():
            input = module(input)
        return input


class ModuleDict(Module, Generic[_M]):
    """Modules by name, in the order in which they came. In annotations: ModuleDict[Block].

    modules: a mapping, or (name, module) pairs. A name is an attribute, too: `d["head"] is d.head`. ValueError for a
    name that is empty, has a dot, or is that of a method; TypeError for what is no module.
    """

    def __init__(self, modules: Mapping[str, _M] | Iterable[tuple[str, _M]] = ()) -> None:
        self.update(modules)

    def _items(self) -> dict[str, _M]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, Module)}  # pyright: ignore[reportReturnType]

    def __getitem__(self, key: str) -> _M:
        return self._items()[key]

    def __setitem__(self, key: str, module: _M) -> None:
        if not isinstance(key, str) or not key or "." in key or hasattr(type(self), key):
            raise ValueError(f"ModuleDict: a name must be text without a dot and no method of ModuleDict, got {key!r}")
        if not isinstance(module, Module):
            raise TypeError(f"ModuleDict: {key} must be a Module, got {type(module).__name__}")
        setattr(self, key, module)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        delattr(self, key)

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __contains__(self, key: object) -> bool:
        return key in self._items()

    def update(self, modules: Mapping[str, _M] | Iterable[tuple[str, _M]]) -> None:
        """Adds modules; one with the name of an old one replaces it."""
        pairs: Any = modules.items() if isinstance(modules, Mapping) else modules
        for key, module in pairs:
            self[key] = module

    def pop(self, key: str) -> _M:
        """Removes the module of that name and returns it. KeyError when there is none."""
        module = self[key]
        del self[key]
        return module

    def clear(self) -> None:
        """Removes all modules."""
        for key in list(self):
            del self[key]

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._items().keys()

    def values(self) -> Iterable[_M]:
        """The modules."""
        return self._items().values()

    def items(self) -> Iterable[tuple[str, _M]]:
        """(name, module) pairs."""
        return self._items().items()
