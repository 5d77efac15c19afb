"""The parameters of one dtype as one flat row of elements, of which each rank owns a piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .. import _C
from .._C import Tensor

ALIGN = 128  # elements, at a multiple of which a parameter begins
BLOCK = 8192  # elements of a block of the norm; pieces begin at multiples of it
BUCKET = 1 << 26  # elements of a bank, where a step has several leaves: banks are sent one after the other
GROUP = 4  # leaves that are added in one pass: a power of two. With 8, eight leaves would need no less memory


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
        self.order = sorted(range(len(sizes)), key=self.offsets.__getitem__)
        self._in_order = [self.parameters[i] for i in self.order]
        self._starts = _C.tensor([self.offsets[i] for i in self.order], _C.int64, _C.device("cpu"))

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

    def take_gradients(self) -> list[Tensor]:
        """The gradient of each parameter in the order of places, zeros where there is none; they are dropped."""
        found = []
        for parameter in self._in_order:
            gradient = parameter.grad
            if gradient is None:
                gradient = _C.full(parameter.shape, 0, self.dtype, self.device)
            else:
                parameter.grad = None
            found.append(gradient)
        return found

    def sum(
        self, banks: Sequence[Sequence[Tensor]], out: Tensor | None, squares: Tensor | None = None
    ) -> Tensor | None:
        """T of up to GROUP banks, each one tensor a parameter in the order of places, which lie anywhere: into `out`,
        of the wide dtype, or of the parameters' for one bank; None where only the squares of blocks are wanted.
        """
        _C.bank_sum_(out, [tensor for bank in banks for tensor in bank], self._starts, squares)
        return out

    def read(self, dtype: _C.dtype) -> Tensor:
        """The parameters as one flat tensor of their dtype or the wide one."""
        flat = _C.empty((self.length,), dtype, self.device)
        _C.bank_sum_(flat, [parameter.detach() for parameter in self._in_order], self._starts)
        return flat

    def write(self, flat: Tensor, which: Sequence[bool] | None = None) -> None:
        """Set the parameters from a flat tensor of their dtype. which: those to set, for each whether; None: all."""
        chosen = [i for i in range(len(self.parameters)) if which is None or which[i]]
        if chosen:
            places = self.places(flat)
            _C.foreach_copy_([self.parameters[i] for i in chosen], [places[i] for i in chosen])


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
    fits = first.dtype is bank.wide and first.is_contiguous()
    out = first if fits else _C.empty((first.numel(),), bank.wide, bank.device)
    return _C.tree_sum_(out, list(parts), squares)


def buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in order, cut into lists of at least BUCKET elements but for the first, which is needed last."""
    found: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size >= BUCKET:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.numel()
    return [bucket[::-1] for bucket in found[::-1]]


class Counter:
    """Adds the gradients of `leaves` leaves, one after the other, as the tree does. Up to GROUP of them stay where the
    backward has made them, and are added in one pass; a binary counter adds the groups.
    """

    def __init__(self, bank: Bank, leaves: int) -> None:
        self._bank, self._left = bank, leaves
        self._leaves: list[list[Tensor]] = []
        self._nodes: list[Tensor] = []
        self._groups = 0

    def push(self, gradients: list[Tensor]) -> None:
        """Take the next leaf's, which may be changed from now on."""
        self._leaves.append(gradients)
        self._left -= 1
        if len(self._leaves) < GROUP or not self._left:
            return
        node, level = self._group(), 0
        while self._groups >> level & 1:
            node = add([self._nodes.pop(), node], self._bank)
            level += 1
        self._nodes.append(node)
        self._groups += 1

    def _group(self, squares: Tensor | None = None) -> Tensor:
        flat = _C.empty((self._bank.length,), self._bank.wide, self._bank.device)
        self._bank.sum(self._leaves, flat, squares)
        self._leaves = []
        return flat

    def alone(self) -> list[Tensor]:
        """The gradients of the only leaf."""
        (gradients,) = self._leaves
        return gradients

    def packed(self) -> Tensor:
        """The sum of all, flat; in the parameters' dtype where there was one leaf."""
        if self._nodes or len(self._leaves) > 1:
            return self.finish()
        flat = _C.empty((self._bank.length,), self._bank.dtype, self._bank.device)
        self._bank.sum(self._leaves, flat)
        self._leaves = []
        return flat

    def finish(self, squares: Tensor | None = None) -> Tensor:
        """The sum of all, flat and wide. squares: gets the squares of its blocks."""
        node = self._group(None if self._nodes else squares)
        while self._nodes:
            older = self._nodes.pop()
            node = add([older, node], self._bank, None if self._nodes else squares)
        return node
