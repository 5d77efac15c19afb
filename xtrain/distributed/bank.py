"""The parameters of one dtype as one flat row of elements, of which each rank owns a piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .. import _C
from .._C import Tensor

ALIGN = 128  # elements, at a multiple of which a parameter begins
BLOCK = 8192  # elements of a block of the norm; pieces begin at multiples of it


@dataclass(frozen=True)
class Segment:
    """What of a parameter lies in the piece of a rank: elements [begin, end) of the piece."""

    parameter: int
    begin: int
    end: int


class Bank:
    """Where each parameter lies. `length` is a multiple of BLOCK x leaves, so that a piece is whole blocks for every
    number of ranks; what no parameter fills is zero.

    whole: each parameter lies within one of `leaves` equal pieces, so that one rank owns all of it. The largest are
    placed first, each into the piece with the most room.
    """

    def __init__(self, parameters: Sequence[Tensor], leaves: int, whole: bool = False) -> None:
        self.parameters = list(parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.wide = _C.float64 if self.dtype is _C.float64 else _C.float32
        sizes = [-(-parameter.numel() // ALIGN) * ALIGN for parameter in parameters]
        if whole:
            owners, places, piece = _spread(sizes, leaves)
            self.offsets = [owner * piece + place for owner, place in zip(owners, places, strict=True)]
            self.length = leaves * piece
        else:
            self.offsets = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
            self.length = max(-(-sum(sizes) // (BLOCK * leaves)), 1) * BLOCK * leaves

    def empty(self, dtype: _C.dtype, length: int | None = None) -> Tensor:
        """A flat tensor of zeros."""
        return _C.full((self.length if length is None else length,), 0, dtype, self.device)

    def places(self, flat: Tensor) -> list[Tensor]:
        """The elements of each parameter in a flat tensor of the bank's length, as views."""
        ends = (at + parameter.numel() for at, parameter in zip(self.offsets, self.parameters, strict=True))
        return [flat[at:end] for at, end in zip(self.offsets, ends, strict=True)]

    def segments(self, begin: int, end: int) -> list[Segment]:
        """What lies in elements [begin, end) of the bank."""
        found = []
        for number, (at, parameter) in enumerate(zip(self.offsets, self.parameters, strict=True)):
            first, last = max(at, begin), min(at + parameter.numel(), end)
            if first < last:
                found.append(Segment(number, first - begin, last - begin))
        return found

    def take_gradients(self) -> Tensor:
        """All gradients as one flat tensor of the parameters' dtype, zero where there is none; they are dropped."""
        flat = self.empty(self.dtype)
        for place, parameter in zip(self.places(flat), self.parameters, strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad.reshape(-1))
                parameter.grad = None
        return flat

    def read(self, dtype: _C.dtype) -> Tensor:
        """The parameters as one flat tensor."""
        flat = self.empty(dtype)
        for place, parameter in zip(self.places(flat), self.parameters, strict=True):
            place.copy_(parameter.detach().reshape(-1))
        return flat

    def write(self, flat: Tensor) -> None:
        """Set the parameters from a flat tensor of their dtype."""
        for place, parameter in zip(self.places(flat), self.parameters, strict=True):
            parameter.copy_(place.reshape(parameter.shape))


def _spread(sizes: Sequence[int], leaves: int) -> tuple[list[int], list[int], int]:
    """The piece of each parameter, its place there, and the length of a piece."""
    filled = [0] * leaves
    owners, places = [0] * len(sizes), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(leaves), key=filled.__getitem__)
        places[i] = filled[owners[i]]
        filled[owners[i]] += sizes[i]
    return owners, places, max(-(-max(filled) // BLOCK), 1) * BLOCK


def add(parts: Sequence[Tensor], bank: Bank, squares: Tensor | None = None) -> Tensor:
    """T of flat tensors, in the bank's wide dtype; the first becomes the sum where it has that dtype."""
    while len(parts) > 64:  # a power of two: neighbours are subtrees
        parts = [add(parts[i : i + 64], bank) for i in range(0, len(parts), 64)]
    first = parts[0]
    out = first if first.dtype is bank.wide and first.is_contiguous() else bank.empty(bank.wide, first.numel())
    return _C.tree_sum_(out, list(parts), squares)


class Counter:
    """The binary counter that adds flat tensors as the tree does, one after the other."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._nodes: list[Tensor] = []
        self._count = 0

    def push(self, flat: Tensor) -> None:
        """Take the next tensor, which may be changed from now on."""
        level = 0
        while self._count >> level & 1:
            flat = add([self._nodes.pop(), flat], self._bank)
            level += 1
        self._nodes.append(flat)
        self._count += 1

    def finish(self) -> Tensor:
        """The sum of all, in the parameters' dtype where there was one alone."""
        while len(self._nodes) > 1:
            last = self._nodes.pop()
            self._nodes.append(add([self._nodes.pop(), last], self._bank))
        return self._nodes.pop()
