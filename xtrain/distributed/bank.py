"""Parameters of one dtype as one flat row of elements (a "bank"; elsewhere: flat buffer or bucket), of which each rank
owns one contiguous piece. W is the number of ranks, M the number of leaves; docs/words.md explains both words.

"The tree" adds x_0..x_{n-1} as tree(x_0..x_{p-1}) + tree(x_p..x_{n-1}) with p the largest power of two below n, so the
sum has the same bits for every number of ranks (docs/internals/distributed.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .. import _C
from .._C import Tensor
from ..errors import ConfigError

ALIGN = 128  # elements, at a multiple of which a parameter begins
BLOCK = 8192  # elements whose squares are added first, for the norm; pieces begin at multiples of it
BUCKET = 1 << 26  # least elements of a bank where a step has several leaves: banks are sent one after the other
GROUP = 4  # leaves that are added in one pass: a power of two. 8 would not reduce the memory of eight leaves


def legal_sizes(leaves: int) -> list[int]:
    """The numbers of processes that a batch of `leaves` leaves can run on: 1, and those that give each process a power
    of two of them.
    """
    halvings = (leaves & -leaves).bit_length()  # how often `leaves` can be halved, plus one
    return sorted({1, *(leaves >> i for i in range(halvings))})


def check_leaves(leaves: int, size: int) -> None:
    """ConfigError where `leaves` cannot be cut for `size` processes."""
    if size not in legal_sizes(leaves):
        *most, last = map(str, legal_sizes(leaves))
        known = f"{', '.join(most)} or {last}" if most else last
        raise ConfigError(f"max_ranks {leaves} must run on {known} processes, got {size}")


@dataclass(frozen=True)
class Segment:
    """A parameter, or the part of one, that lies in the piece of a rank: elements [begin, end) of the piece."""

    parameter: int  # its index in Bank.parameters
    begin: int
    end: int


class Bank:
    """The layout of a bank: where each parameter lies in the flat row. It holds no copy of the parameters.

    `length` elements, a multiple of BLOCK x leaves, so that a piece is whole blocks for every number of ranks; elements
    that no parameter fills are zero. offsets: the first element of each parameter. order: the indices of the parameters
    by their offsets. wide: the dtype of sums, float32 (float64 for float64).

    whole: each parameter lies within one of `leaves` equal pieces, so that one rank owns all of it, as Muon needs. The
    largest are placed first, each into the piece with the most room.
    """

    def __init__(self, parameters: Sequence[Tensor], leaves: int, whole: bool = False) -> None:
        self.parameters = list(parameters)
        self.whole = whole
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
        """The parameters, or parts of parameters, in elements [begin, end) of the bank."""
        found = []
        for number, (at, parameter) in enumerate(zip(self.offsets, self.parameters, strict=True)):
            first, last = max(at, begin), min(at + parameter.numel(), end)
            if first < last:
                found.append(Segment(number, first - begin, last - begin))
        return found

    def take_gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, in `order`, zeros where there is none, and set every .grad to None."""
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
        """Add up to GROUP sets of gradients by the tree and return `out`. A set has a tensor for each parameter, in
        `order`, anywhere in memory.

        out: [length] of the wide dtype, or of the parameters' dtype for one set; None where only `squares` is wanted.
        squares: float64 [length / BLOCK], gets the sum of squares of each block.
        """
        _C.bank_sum_(out, [tensor for bank in banks for tensor in bank], self._starts, squares)
        return out

    def read(self, dtype: _C.dtype) -> Tensor:
        """The parameters as one flat tensor [length]. dtype: theirs or the wide one."""
        flat = _C.empty((self.length,), dtype, self.device)
        _C.bank_sum_(flat, [parameter.detach() for parameter in self._in_order], self._starts)
        return flat

    def write(self, flat: Tensor, which: Sequence[bool] | None = None) -> None:
        """Set the parameters from a flat tensor [length] of their dtype. which: whether to set each; None: all."""
        chosen = [i for i in range(len(self.parameters)) if which is None or which[i]]
        if chosen:
            places = self.places(flat)
            _C.foreach_copy_([self.parameters[i] for i in chosen], [places[i] for i in chosen])


def _spread(sizes: Sequence[int], leaves: int) -> tuple[list[int], list[int], int]:
    """Distribute parameters of these sizes over `leaves` pieces. Return, in elements: the piece of each parameter, its
    offset in the piece, and the length of a piece, which is that of the fullest.
    """
    filled = [0] * leaves
    owners, places = [0] * len(sizes), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(leaves), key=filled.__getitem__)
        places[i] = filled[owners[i]]
        filled[owners[i]] += sizes[i]
    return owners, places, max(-(-max(filled) // BLOCK), 1) * BLOCK


def add(parts: Sequence[Tensor], bank: Bank, squares: Tensor | None = None) -> Tensor:
    """Add flat tensors by the tree, in the bank's wide dtype. The sum overwrites the first where it has that dtype.
    squares: float64, gets the sum of squares of each block.
    """
    while len(parts) > 64:  # a power of two: neighbours are subtrees
        parts = [add(parts[i : i + 64], bank) for i in range(0, len(parts), 64)]
    first = parts[0]
    fits = first.dtype is bank.wide and first.is_contiguous()
    out = first if fits else _C.empty((first.numel(),), bank.wide, bank.device)
    return _C.tree_sum_(out, list(parts), squares)


def buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in order, cut into lists of at least BUCKET elements. Lists are filled from the last parameter on,
    whose gradients are ready first, so only the first list, which is sent last, may be smaller.
    """
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
    """Adds the gradients of `leaves` leaves, which come one after the other, in the order of the tree.

    Up to GROUP leaves stay where the backward made them, and are added in one pass to a node. Nodes are added as the
    bits of a binary counter carry: two of one level become one of the next. So at most one node is held for each bit of
    the number of groups.
    """

    def __init__(self, bank: Bank, leaves: int) -> None:
        self._bank, self._left = bank, leaves
        self._leaves: list[list[Tensor]] = []
        self._nodes: list[Tensor] = []
        self._groups = 0

    def push(self, gradients: list[Tensor]) -> None:
        """Take the gradients of the next leaf, as Bank.take_gradients returns them; they may be overwritten."""
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
        """Add the leaves that are held, and drop them."""
        flat = _C.empty((self._bank.length,), self._bank.wide, self._bank.device)
        self._bank.sum(self._leaves, flat, squares)
        self._leaves = []
        return flat

    def alone(self) -> list[Tensor]:
        """The gradients of the only leaf, where it made them."""
        (gradients,) = self._leaves
        return gradients

    def packed(self) -> Tensor:
        """The sum of all leaves, [length]; in the parameters' dtype where there was one leaf, else in the wide one."""
        if self._nodes or len(self._leaves) > 1:
            return self.finish()
        flat = _C.empty((self._bank.length,), self._bank.dtype, self._bank.device)
        self._bank.sum(self._leaves, flat)
        self._leaves = []
        return flat

    def finish(self, squares: Tensor | None = None) -> Tensor:
        """The sum of all leaves, [length] in the wide dtype. squares: gets the sum of squares of each block."""
        node = self._group(None if self._nodes else squares)
        while self._nodes:
            older = self._nodes.pop()
            node = add([older, node], self._bank, None if self._nodes else squares)
        return node
