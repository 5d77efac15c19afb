"""Modules that hold modules in an order."""

from .module import Module


class ModuleList(Module):
    """A list of modules named "0", "1", ..."""

    def __init__(self, modules=()):
        self.extend(modules)

    def append(self, module):
        """Adds a module at the end; returns self."""
        return self.extend([module])

    def extend(self, modules):
        """Adds several; returns self."""
        for index, module in enumerate(modules, len(self)):
            self.add_module(str(index), module)
        return self

    def _items(self):
        return [value for name, value in self.__dict__.items() if name.isdecimal()]

    def __len__(self):
        return len(self._items())

    def __iter__(self):
        return iter(self._items())

    def __getitem__(self, index):
        found = self._items()[index]
        return type(self)(found) if isinstance(index, slice) else found

    def __setitem__(self, index, module):
        self.add_module(str(range(len(self))[index]), module)


class Sequential(ModuleList):
    """Calls its modules one after another."""

    def __init__(self, *modules):
        super().__init__(modules)

    def __getitem__(self, index):
        found = self._items()[index]
        return Sequential(*found) if isinstance(index, slice) else found

    def forward(self, input):
        for module in self._items():
            input = module(input)
        return input
