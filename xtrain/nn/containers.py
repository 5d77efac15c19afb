"""Modules that hold modules in an order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
